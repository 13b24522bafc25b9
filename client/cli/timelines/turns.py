"""The turns of failovers: entries that show the loss of a broker or the election of another controller. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minibroker.client.administering.timeline import Entry

SIGNS_WITHIN_MS = 60_000
"""Maximum time between a sign and the loss of the broker."""
CLOCKS_DIFFER_MS = 1_000
TOGETHER_MS = 2_000
"""Losses that follow each other faster than this are one failover."""
BY_OTHERS = ("ControllerSuspected", "ControllerRemoved")
"""Entries that other brokers record about a controller."""
SILENT = "BrokerSilent"
"""Recorded by brokers that carried out the orders of a failover: since when they had not heard from the lost one."""
SESSION_ENDED = "SessionExpired"
"""Recorded by a broker that was not in office, when it learned that ZooKeeper had ended its session."""
STALLED = "BrokerStalled"
"""Recorded by a broker that runs again, about itself."""
ZOOKEEPER_AWAY = "ZooKeeperAway"
"""Recorded by a broker that ZooKeeper answers again in the same session."""
INTERRUPTIONS = (STALLED, ZOOKEEPER_AWAY)
ASIDE = (SILENT, SESSION_ENDED, *INTERRUPTIONS)
"""Entries that tell nothing about the controller of their epoch."""
_NEWS = ("ZooKeeper session", "was elected", "is the controller, says")
"""Words of the causes of a resignation that a controller learns after it has lost its office."""
STOPS = "ControlledShutdownRequest"
CONTROLLER_STOPS = "the broker stops"
"""The cause of a resignation."""


def is_turn(entry: Entry) -> bool:
    """Whether the entry is the loss of a broker, a controlled shutdown, or the election of another controller (except
    the first one ever)."""
    if entry["event"] == "BrokerChange":
        return bool(entry.get("lost"))
    if entry["event"] == STOPS:
        return "broker" in entry and bool(entry.get("states"))  # files of earlier versions do not name it
    return bool(entry["event"] == "Startup" and entry["epoch"] > 1)


def is_of_deposed(entries: Sequence[Entry], index: int) -> bool:
    """Whether a controller has recorded the entry that did not know yet that another had been elected. Brokers reject
    its orders, so that nothing follows from it."""
    known_ms = entries[index]["time_ms"] - CLOCKS_DIFFER_MS
    epoch = entries[index]["epoch"]
    return any(
        entry["event"] == "Startup" and entry["epoch"] > epoch and entry["time_ms"] < known_ms
        for entry in entries[index + 1 :]
    )


def came_back(entries: Sequence[Entry], begin: int, end: int) -> set[int]:
    """Return the brokers that these entries show alive again."""
    back: set[int] = set()
    for entry in entries[begin:end]:
        if entry["event"] == "BrokerChange":
            back.update(entry.get("added", []))
        elif entry["event"] == "Startup":
            back.add(entry["controller"])
    return back


def was_whole_between(entries: Sequence[Entry], lost: int, end: int) -> bool:
    """Whether the brokers lost by the entry at `lost` came back, and were in sync again where they had been."""
    turn, victims = entries[lost], victims_of(entries, lost)
    if turn.get("states_omitted") or not victims or not victims <= came_back(entries, lost + 1, end):
        return False
    missing = {state["partition"]: set(state.get("isr_before", ())) for state in turn.get("states", [])}
    for entry in entries[lost + 1 : end]:
        for state in (*entry.get("adopted", []), *entry.get("states", [])):
            if missing.get(state["partition"], set()) <= set(state["isr"]):
                missing.pop(state["partition"], None)
    return not missing


def begins_anew(entries: Sequence[Entry], index: int) -> bool:
    """Whether the entry shows the start of a cluster that had been stopped, which is not a failover: the previous
    controller stopped cleanly before this broker was started."""
    entry = entries[index]
    if entry["event"] != "Startup" or "broker_up_ms" not in entry:
        return False
    started_ms = entry["time_ms"] - entry["broker_up_ms"]
    before = next(_of_earlier_epochs(entries[:index], entry["epoch"]), None)
    return before is not None and before["event"] == "Resignation" and before["time_ms"] < started_ms


def stops_the_cluster(entries: Sequence[Entry], last: int, first: int, victims: set[int]) -> bool:
    """Whether the failover from `first` to the turn `last` is the stop of the whole cluster, which is none: all lost
    brokers stopped cleanly, the others soon after them, the controller at the end, and no broker was left to follow
    it."""
    cleanly: set[int] = set()
    ended_ms = entries[last]["time_ms"]
    has_resigned = False
    for index, entry in enumerate(entries[first:], first):
        resigns = entry["event"] == "Resignation" and entry["cause"] == CONTROLLER_STOPS
        if not (resigns or (entry["event"] == STOPS and "broker" in entry)):
            continue
        cleanly.add(entry["controller" if resigns else "broker"])
        if index > last:
            if entry["time_ms"] > ended_ms + TOGETHER_MS:
                return False
            ended_ms = entry["time_ms"]
            has_resigned = has_resigned or resigns
    return has_resigned and victims <= cleanly


def victims_of(entries: Sequence[Entry], index: int) -> set[int]:
    """Return the brokers that were lost, or lost their office."""
    entry = entries[index]
    if entry["event"] == "BrokerChange":
        return set(entry["lost"])
    if entry["event"] == STOPS:
        return {entry["broker"]}
    victims = set(entry.get("unreachable", []))
    before = controller_before(entries[:index], entry["epoch"])
    return victims if before is None else victims | {before}


def stalls_over(entries: Sequence[Entry], turns: Sequence[int], silent: set[int]) -> dict[int, Entry]:
    """Return the stalls that lasted from before these turns until after them, by the broker: of those that a turn has
    replaced, and of the `silent` ones, which the entries may not name."""
    found: dict[int, Entry] = {}
    for index in turns:
        lost, turn_ms = victims_of(entries, index) | silent, entries[index]["time_ms"]
        for entry in entries:
            if entry["event"] != STALLED or entry["controller"] not in lost:
                continue
            if entry["time_ms"] - entry["lasted_ms"] < turn_ms <= entry["time_ms"] + CLOCKS_DIFFER_MS:
                found[entry["controller"]] = entry
    return found


def started_before(startup: Entry, before: int, entries: Sequence[Entry]) -> set[int]:
    """Return the brokers that cannot have run on since before this election, if none recorded the end or the silence of
    the controller `before`. Those that fetched from it would have recorded its silence. A leader is elected again with
    the same ISR if its broker has registered again. `entries`: those before."""
    found = {before, startup["controller"], *startup.get("unreachable", [])}
    if any(entry["event"] == "Startup" for entry in entries):
        found |= {*startup.get("brokers", [])} - alive_after(entries)
    for state in startup.get("states", []):
        isr_before = set(state.get("isr_before", ()))
        if before in isr_before:
            found |= isr_before
        if state["leader"] == state.get("leader_before") and isr_before == set(state["isr"]):
            found.add(state["leader"])
    return found


def controller_before(entries: Sequence[Entry], epoch: int) -> int | None:
    """Return the controller of the epoch before, which it or others have recorded. None if it is not known: an entry of
    a still earlier epoch is about another one."""
    before = next(_of_earlier_epochs(entries, epoch), None)
    if before is None or before["epoch"] < epoch - 1:
        return None
    return int(before["broker" if before["event"] in BY_OTHERS else "controller"])


def _of_earlier_epochs(entries: Sequence[Entry], epoch: int) -> Iterator[Entry]:
    """Yield entries of earlier controllers, or about them, the last one first."""
    return (entry for entry in reversed(entries) if entry["epoch"] < epoch and entry["event"] not in ASIDE)


def ended_together(ended: Sequence[Entry]) -> list[Entry]:
    """Return the entries of brokers that had no ZooKeeper over the same time as the one that was without it for the
    longest time, which included. Empty if there are fewer than two: that broker was cut off."""
    longest = max(ended, key=lambda entry: float(entry["away_ms"]), default=None)
    if longest is None:
        return []
    found = [
        entry
        for entry in ended
        if min(entry["time_ms"], longest["time_ms"]) - max(began_ms(entry), began_ms(longest)) > CLOCKS_DIFFER_MS
    ]
    return found if len(found) > 1 else []


def longest_away_ms(ended: Iterable[Entry]) -> float:
    """Return the longest time without ZooKeeper."""
    return max(float(entry["away_ms"]) for entry in ended)


def is_news(resignation: Entry) -> bool:
    """Whether a controller resigned because it had learned that it was none any more."""
    return any(words in resignation["cause"] for words in _NEWS)


def began_ms(entry: Entry) -> int:
    """Return the time at which the recorded event began: for a suspicion, when the connection was lost, and for an
    ended session, when ZooKeeper was heard for the last time."""
    if entry["event"] == SESSION_ENDED:
        return int(entry["time_ms"] - round(entry["away_ms"]))
    return int(entry["time_ms"] - round(entry.get("lasted_ms", 0.0) + entry.get("waited_ms", 0.0)))


def is_election(state: dict[str, Any]) -> bool:
    return bool(state["leader"] != state.get("leader_before"))


def alive_after(entries: Sequence[Entry]) -> set[int]:
    """Return the brokers in the cluster after these entries, as far as they tell."""
    alive: set[int] = set()
    for entry in entries:
        if entry["event"] == "Startup" and "brokers" in entry:
            alive = {*entry["brokers"]}
        alive -= {*entry.get("unreachable", []), *entry.get("lost", [])}
        alive |= {*entry.get("added", [])}
    return alive
