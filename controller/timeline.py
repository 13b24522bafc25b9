"""The flight recorder: for each event its cause, the decisions, writes and requests that followed, and their times.

Each event has one entry. A ring buffer serves DescribeTimeline, and a sink writes JSON lines to disk for the time after
a crash; a broker that starts restores the last entries into its buffer. An entry is a flat dict of numbers and lists of
sentences, readable for programs and for people with `grep`. Three lists hold objects, from which `minibroker timeline`
tells the story of a failover: the states that were written (`states`), those that leaders have written (`adopted`), and
the requests that were queued (`sent`). Lists have a maximum length, since taking office over ten thousand partitions is
a single event. Entries have the time of the machine (`observed_ms`) and not that of a clock that a fault has moved, so
that those of several brokers can be told as one story.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from minibroker.controller.decisions.events import Event
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.world import Clock

_log = logging.getLogger(__name__)

T = TypeVar("T")

Entry = dict[str, Any]
Sink = Callable[[Entry], None]
"""Stores a finished entry. Must not raise."""

CAPACITY = 2_000
MAX_LINES = 200

_LISTS = ("notes", "changes", "moves", "illegal_moves", "writes", "conflicts", "requests")


class EventTimes:
    """The number of events of one name, and their total seconds in the queue and in the handler."""

    __slots__ = ("count", "queued_s", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.queued_s = 0.0
        self.total_s = 0.0


class Timeline:
    """Events are handled one at a time, so everything recorded belongs to the event begun last."""

    def __init__(self, clock: Clock, controller_id: int, sink: Sink) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._controller_id = controller_id
        self._sink = sink
        self._entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._current: Entry = {}
        self._omitted: dict[str, int] = {}
        self._begun = 0.0
        self._queued_s = 0.0
        self._number = 0
        self.times: dict[str, EventTimes] = {}
        """Times by the name of the event, since the start of the broker."""
        self.unclean_elections = 0
        """Elections of leaders that may lack acknowledged records, since the start of the broker."""

    def entries(self) -> list[Entry]:
        """The last entries, oldest first."""
        return list(self._entries)

    def restore(self, entries: Iterable[Entry]) -> None:
        """Add the entries of an earlier run of this broker. Must be called before anything is recorded."""
        self._entries.extend(entries)
        if self._entries:
            self._number = self._entries[-1]["number"]

    def after(self, number: int, since_ms: int) -> list[Entry]:
        """Return the entries with a higher number that are not older than `since_ms`, oldest first."""
        return [entry for entry in self._entries if entry["number"] > number and entry["time_ms"] >= since_ms]

    @property
    def last_number(self) -> int:
        """The number of the last entry; 0 if there is none. Numbers keep growing over restarts of the broker."""
        return self._number

    def begin(self, event: Event, queued_s: float) -> None:
        self._begun = self._clock.monotonic()
        self._current = self._new(event.name, event.cause, event.epoch) | event.details
        self._current["queued_ms"] = _milliseconds(queued_s)
        self._queued_s = queued_s
        self._omitted = {}

    def record(self, name: str, cause: str, epoch: int, details: Mapping[str, object] | None = None) -> None:
        """Record an entry for something that is not an event: the end of a tenure, or an action out of office."""
        entry = self._new(name, cause, epoch) | dict(details or {}) | {"total_ms": 0.0}
        self.times.setdefault(name, EventTimes()).count += 1
        self._finish(entry)

    def _new(self, name: str, cause: str, epoch: int) -> Entry:
        return {
            "time_ms": self._clock.observed_ms(),
            "controller": self._controller_id,
            "epoch": epoch,
            "event": name,
            "cause": cause,
        }

    def _finish(self, entry: Entry) -> None:
        self._number += 1
        entry["number"] = self._number
        self._entries.append(entry)
        self._sink(entry)

    def describe(self, **details: object) -> None:
        """Add facts about the event under way."""
        self._current.update(details)

    def note(self, note: str) -> None:
        """Add a sentence for operators, and log it."""
        self.add("notes", [note])
        _log.warning("%s", note)

    def add(self, kind: str, lines: Iterable[object]) -> None:
        """Add sentences of one kind: notes, changes, moves, illegal_moves, writes, conflicts, requests."""
        assert kind in _LISTS, kind
        self._add(kind, lines, str)

    def _add(self, kind: str, items: Iterable[T], shown: Callable[[T], object]) -> None:
        kept: list[object] = self._current.setdefault(kind, [])
        rest: Iterator[T] = iter(items)
        for item in rest:
            if len(kept) >= MAX_LINES:
                self._omitted[kind] = self._omitted.get(kind, 0) + 1 + sum(1 for _ in rest)
                break
            kept.append(shown(item))
        if not kept:
            del self._current[kind]

    def add_states(
        self, kind: str, before: Mapping[TopicPartition, LeaderAndIsr], after: Mapping[TopicPartition, LeaderAndIsr]
    ) -> None:
        """Add states that this controller has written (`states`) or that others have (`adopted`), with the states
        known before."""
        if not after:
            return
        at_ms = self.elapsed_ms()
        if kind == "states":  # counts all of them, though the list is cut
            elected = sum(1 for p, state in after.items() if p not in before or before[p].leader != state.leader)
            self._current["elected"] = self._current.get("elected", 0) + elected
            leaderless = [p for p, state in after.items() if state.leader == NO_LEADER]
            if lost := sum(1 for p in leaderless if p not in before or before[p].leader != NO_LEADER):
                self._current["leaderless"] = self._current.get("leaderless", 0) + lost
            self._current["written_at_ms"] = at_ms
        self._add(kind, after.items(), lambda item: _state(at_ms, item[0], before.get(item[0]), item[1]))

    def add_request(self, request: str, broker_ids: Iterable[int], partitions: int) -> None:
        """Add a request that was queued for each of the brokers. `partitions` is the number of its partitions."""
        at_ms = self.elapsed_ms()
        self._add(
            "sent",
            broker_ids,
            lambda b: {"at_ms": at_ms, "request": request, "broker": b, "partitions": partitions},
        )

    def up_ms(self) -> float:
        """Milliseconds since the broker was started."""
        return _milliseconds(self._clock.monotonic() - self._started)

    def elapsed_ms(self) -> float:
        """Milliseconds since the event under way was begun."""
        return _milliseconds(self._clock.monotonic() - self._begun)

    def end(
        self,
        *,
        reading_s: float = 0.0,
        writing_s: float = 0.0,
        failure: str | None = None,
        is_recorded: bool = True,
    ) -> None:
        entry = self._current
        for kind, omitted in self._omitted.items():
            if kind in _LISTS:
                entry[kind].append(f"and {omitted} more")
            else:
                entry[f"{kind}_omitted"] = omitted
        if reading_s:
            entry["reading_ms"] = _milliseconds(reading_s)
        if writing_s:
            entry["writing_ms"] = _milliseconds(writing_s)
        total_s = self._clock.monotonic() - self._begun
        entry["total_ms"] = _milliseconds(total_s)
        times = self.times.setdefault(entry["event"], EventTimes())
        times.count += 1
        times.queued_s += self._queued_s
        times.total_s += total_s
        if failure is not None:
            entry["failure"] = failure
        if is_recorded:
            self._finish(entry)


def _state(at_ms: float, partition: TopicPartition, before: LeaderAndIsr | None, state: LeaderAndIsr) -> Entry:
    described: Entry = {
        "at_ms": at_ms,
        "partition": str(partition),
        "leader": state.leader,
        "isr": list(state.isr),
        "leader_epoch": state.leader_epoch,
        "version": state.partition_epoch,
    }
    if state.to_commit:
        described["min_isr"] = state.to_commit
    if before is not None:
        described |= {
            "leader_before": before.leader,
            "isr_before": list(before.isr),
            "version_before": before.partition_epoch,
        }
    return described


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
