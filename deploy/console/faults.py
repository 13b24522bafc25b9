"""Faults by button: the commands that break a local cluster, with the words and the functions of the command line.

A command runs in a thread, because `start` and `stop` wait for processes. The page does not wait for it: what it did is
shown by the next reading, and at the failover that it caused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import time_ns
from typing import NamedTuple

from minibroker.client.cli.timelines.story import Story
from minibroker.deploy import journal
from minibroker.deploy.console.shared import in_thread
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.injected import all_faults
from minibroker.deploy.local.who import ZOOKEEPER, Member, acted, name_of, parse_who
from minibroker.deploy.named_faults import HEAL, NAMED_FAULTS, Words, ordered
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.faults import described

PROCESS_COMMANDS = {
    "kill": "like a crash (SIGKILL)",
    "pause": "connections stay open, but nothing answers (SIGSTOP)",
    "resume": "after pause (SIGCONT)",
    "stop": "cleanly (SIGTERM): a broker first moves its leaders",
    "start": "what was killed or stopped",
}
"""The commands for any process, and what they do."""
REPAIRS = ("resume", "start", HEAL)
HARMLESS = (*REPAIRS, "move-coordinator", "move-clock")
"""No broker is lost by them."""
MAX_KEPT = 200
MAX_AT_ONCE = 8
CAUSED_WITHIN_MS = 30_000
"""A failover begins at most this long after its cause: a paused broker is missed when its ZooKeeper session ends."""


class Applied(NamedTuple):
    number: int
    at_ms: int
    """Milliseconds since 1970."""
    action: str
    who: str
    said: str | None
    """What the command did, or why it failed. None: it is under way."""
    failed: bool = False
    rest: str = ""
    """The words after WHO."""

    @property
    def command(self) -> str:
        words = f"{self.action} {self.who}{self.rest}"
        return f"fault {words}" if self.action in NAMED_FAULTS and self.action != HEAL else words


class MemberState(NamedTuple):
    who: str
    name: str
    state: str
    faults: tuple[str, ...] = ()
    """Those that it was ordered to have, in words."""


class Faults:
    """The commands of one console, and what they did."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.token = secrets.token_urlsafe(32)
        """A page of another origin cannot read it, so its requests lack it."""
        self._cluster = cluster
        self._applied: dict[int, Applied] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._last = 0
        self.version = 0
        """Increases with each change."""

    @property
    def applied(self) -> list[Applied]:
        """The oldest first."""
        return list(self._applied.values())

    def apply(self, action: str, who: str, words: Words = Words()) -> None:  # noqa: B008 (it is immutable)
        """Begin a command. Raises MinibrokerError, among them MalformedWho, if there is none of these words."""
        sentence: str | None = f"{action} {journal.WHO}"
        rest, named = "", None
        if action in PROCESS_COMMANDS:
            do = partial(getattr(self._cluster, action), parse_who(who))
        elif action in NAMED_FAULTS:
            order = ordered(action, who, words)
            rest, sentence = order.rest, order.sentence
            named = words.other if order.has_other else None
            do = partial(order.apply, self._cluster)
        else:
            raise LaunchError(f"{action!r} is no fault: give {', '.join([*PROCESS_COMMANDS, *NAMED_FAULTS])}")
        if len(self._under_way) >= MAX_AT_ONCE:
            raise LaunchError(f"{MAX_AT_ONCE} commands are under way already: wait for one of them")
        self._last += 1
        applied = Applied(self._last, time_ns() // 1_000_000, action, who, None, rest=rest)
        self._put(applied)
        task = asyncio.create_task(self._run(applied, sentence, do, named))
        self._under_way.add(task)
        task.add_done_callback(partial(self._ended, applied))

    async def _run(
        self, applied: Applied, sentence: str | None, do: Callable[[], list[Member]], other: str | None
    ) -> None:
        note = partial(journal.done, self._cluster.directory, applied.command, sentence, do, applied.who, other)
        try:
            members: list[Member] = await in_thread(note)
        except (MinibrokerError, OSError) as error:  # a process of another user raises the latter
            self._put(applied._replace(said=str(error), failed=True))
            return
        said = [acted(applied.action, members)]
        if applied.action == "stop":
            reports = ((member, self._cluster.handed_over(member)) for member in members if isinstance(member, int))
            said += [f"{name_of(member)}: {report}" for member, report in reports if report is not None]
        self._put(applied._replace(said="; ".join(said)))

    def _ended(self, applied: Applied, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._put(applied._replace(said=f"failed by a fault of the console: {error!r}", failed=True))

    def _put(self, applied: Applied) -> None:
        self.version += 1
        self._applied[applied.number] = applied
        while len(self._applied) > MAX_KEPT:
            del self._applied[next(iter(self._applied))]

    async def members(self) -> tuple[MemberState, ...]:
        """Return the processes of the cluster. Raises LaunchError if there is no cluster."""
        return tuple(await asyncio.to_thread(lambda: list(self._members())))

    def _members(self) -> Iterator[MemberState]:
        cluster = self._cluster.file()
        ill = all_faults(self._cluster.directory, cluster)
        for broker in cluster.brokers:
            state = self._cluster.state_of(broker.id)
            injected = tuple(described(ill[broker.id])) if broker.id in ill else ()
            yield MemberState(str(broker.id), name_of(broker.id), state.value, injected)
        if cluster.zookeeper.port is not None:
            yield MemberState(ZOOKEEPER, name_of(ZOOKEEPER), self._cluster.state_of(ZOOKEEPER).value)


def may_cause(fault: Applied) -> bool:
    """Whether a failover may follow from the command: it was carried out, or is under way, and does harm."""
    return not fault.failed and fault.action not in HARMLESS


def causes_of(story: Story, faults: Sequence[Applied]) -> list[tuple[Applied, float]]:
    """Return the faults that were applied shortly before the failover or during it, with their times, in milliseconds
    after its beginning."""
    return [(fault, fault.at_ms - story.began_ms) for fault in faults if _is_cause(story, fault)]


def consequences_of(fault: Applied, stories: Sequence[Story]) -> list[Story]:
    return [story for story in stories if _is_cause(story, fault)]


def _is_cause(story: Story, fault: Applied) -> bool:
    last_ms = max([0.0, *(step.at_ms for step in story.steps)])
    return may_cause(fault) and -CAUSED_WITHIN_MS <= fault.at_ms - story.began_ms <= last_ms


def is_same_origin(host: str, origin: str | None, fetch_site: str | None) -> bool:
    """Whether a browser sent a request from a page of this host. `fetch_site` is Sec-Fetch-Site, which older browsers
    do not send."""
    return origin == f"http://{host}" and fetch_site in (None, "same-origin")
