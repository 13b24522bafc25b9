"""The faults that brokers inject into themselves, by name: what each needs, does, and is called in scenario files.

`minibroker fault` and the form of the console both take their words from here, so that a command does, refuses and
records the same wherever it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.journal import OTHER, WHO
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.who import AllBrokers, Member, Who, parse_who
from minibroker.deploy.times import parse_time


class WrongWords(LaunchError):
    """A fault cannot be ordered with these words; the message has the rule."""


class Words(NamedTuple):
    """What was given beside WHO. A fault ignores what it has no use for."""

    time: str = ""
    other: str = ""
    """WHO is at the other end."""
    log_dir: int | None = None
    writes: bool = False
    one_way: bool = False
    back: bool = False


class Ordered(NamedTuple):
    """A fault with its words, checked."""

    name: str
    who: Who
    who_text: str
    words: Words
    time_s: float
    other: Who
    """WHO itself if the fault has no other end."""

    @property
    def has_other(self) -> bool:
        fault = NAMED_FAULTS[self.name]
        return bool(self.words.other) and (fault.needs == "OTHER" or "--between" in fault.options)

    @property
    def rest(self) -> str:
        """The words after WHO, as they are typed, each with a space before it."""
        fault, words = NAMED_FAULTS[self.name], self.words
        needed = {"TIME": words.time.strip(), "OTHER": words.other}.get(fault.needs, "")
        given: dict[str, str | int | bool | None] = {
            "--writes": words.writes,
            "--between": words.other,
            "--log-dir": words.log_dir,
            "--one-way": words.one_way,
            "--back": words.back,
        }
        options = ((name, given[name]) for name in fault.options)
        typed = (name if value is True else f"{name} {value}" for name, value in options if value)
        return "".join(f" {word}" for word in (needed, *typed) if word)

    @property
    def command(self) -> str:
        """The words of the command line, without `minibroker`."""
        words = f"{self.name} {self.who_text}{self.rest}"
        return words if self.name == HEAL else f"fault {words}"

    @property
    def sentence(self) -> str | None:
        """An action of scenario files that does the same, with the places WHO and OTHER; None if there is none."""
        return NAMED_FAULTS[self.name].sentence(self)

    def apply(self, cluster: FaultyCluster) -> list[Member]:
        return NAMED_FAULTS[self.name].apply(cluster, self)


class NamedFault(NamedTuple):
    does: str
    apply: Callable[[FaultyCluster, Ordered], list[Member]]
    sentence: Callable[[Ordered], str | None]
    needs: str = ""
    """The word that the command needs beside WHO: TIME or OTHER."""
    options: tuple[str, ...] = ()
    """In the order in which they are typed."""


def _sentence(text: str, *, without: Callable[[Words], object] = lambda _: None) -> Callable[[Ordered], str | None]:
    """Scenario files have no words for some options: there is no sentence `without` leaving them out."""
    return lambda order: None if without(order.words) else text.replace("TIME", order.words.time.strip())


def _cut_sentence(order: Ordered) -> str | None:
    if any(isinstance(one, AllBrokers) for one in (order.who, order.other)):
        return None
    return f"cut packets from {WHO} to {OTHER}" if order.words.one_way else f"cut {WHO} from {OTHER}"


def _none(_: Ordered) -> None:
    return None


def _slow_disk(cluster: FaultyCluster, order: Ordered) -> list[Member]:
    write_delay_s = order.time_s if order.words.writes or not order.time_s else None
    return cluster.slow_disk(order.who, order.time_s, write_delay_s, order.words.log_dir)


HEAL = "heal"
NAMED_FAULTS = {
    "fill-disk": NamedFault(
        "no file can grow",
        lambda cluster, order: cluster.fill_disk(order.who, order.words.log_dir),
        _sentence(f"fill disk of {WHO}", without=lambda words: words.log_dir),
        options=("--log-dir",),
    ),
    "break-disk": NamedFault(
        "each call of the disk fails",
        lambda cluster, order: cluster.break_disk(order.who, order.words.log_dir),
        _sentence(f"break disk of {WHO}", without=lambda words: words.log_dir),
        options=("--log-dir",),
    ),
    "slow-disk": NamedFault(
        "each fsync takes TIME longer, with --writes also each write",
        _slow_disk,
        _sentence(f"slow disk of {WHO} by TIME", without=lambda words: words.log_dir or words.writes),
        needs="TIME",
        options=("--writes", "--log-dir"),
    ),
    "cut": NamedFault(
        "no packet passes to and from OTHER, with --one-way none to it",
        lambda cluster, order: cluster.cut(order.who, order.other, one_way=order.words.one_way),
        _cut_sentence,
        needs="OTHER",
        options=("--one-way",),
    ),
    "isolate": NamedFault(
        "no packet passes at all", lambda cluster, order: cluster.isolate(order.who), _sentence(f"isolate {WHO}")
    ),
    "slow-network": NamedFault(
        "each packet takes TIME longer, with --between OTHER each between the two",
        lambda cluster, order: cluster.slow_network(order.who, order.time_s, order.other if order.has_other else None),
        lambda order: (
            f"slow network by {order.words.time.strip()}"
            if isinstance(order.who, AllBrokers) and not order.has_other
            else None
        ),
        needs="TIME",
        options=("--between",),
    ),
    "drop-connections": NamedFault(
        "all connections break once",
        lambda cluster, order: cluster.drop_connections(order.who),
        _sentence(f"drop connections of {WHO}"),
    ),
    "move-clock": NamedFault(
        "the wall clock jumps forward by TIME, with --back backward",
        lambda cluster, order: cluster.move_clock(order.who, -order.time_s if order.words.back else order.time_s),
        _sentence(f"move clock of {WHO} by TIME", without=lambda words: words.back),
        needs="TIME",
        options=("--back",),
    ),
    "move-coordinator": NamedFault(
        "another broker coordinates coordinator:GROUP or transactions:ID",
        lambda cluster, order: cluster.move_coordinator(order.who),
        _none,  # a recorded scenario has no groups and no transactional ids
    ),
    HEAL: NamedFault(
        "all these faults end",
        lambda cluster, order: cluster.heal(order.who),
        lambda order: HEAL if isinstance(order.who, AllBrokers) else None,
    ),
}


def ordered(name: str, who: str, words: Words) -> Ordered:
    """Check the words of a fault. Raises WrongWords and MalformedWho."""
    fault = NAMED_FAULTS[name]
    found = parse_who(who)
    time_s = 0.0
    if fault.needs == "TIME":
        try:
            time_s = parse_time(words.time)
        except ValueError as error:
            raise WrongWords(f"TIME is {words.time!r}: {error}") from None
    if name == "move-clock" and not time_s:
        raise WrongWords(f"TIME is {words.time!r}, so no clock would move: give a longer time, or `minibroker heal`")
    if fault.needs == "OTHER" and not words.other:
        raise WrongWords(f"{name} is between two processes: give OTHER as well, as in `zookeeper` or `2`")
    order = Ordered(name, found, who, words, time_s, found)
    return order._replace(other=parse_who(words.other)) if order.has_other else order
