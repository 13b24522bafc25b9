"""The flight recorder: each event with its cause, what was decided, written and sent, and how long that took.

One entry per event, in a ring buffer for questions asked now, and through a sink (JSON lines on disk) for those asked
after a crash. An entry is a flat dict of numbers and lists of sentences, so that a program and a person with `grep`
read the same. Lists are cut at a length, since taking office over ten thousand partitions is one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minibroker.controller.events import Event
from minibroker.protocol.world import Clock

Entry = dict[str, Any]
Sink = Callable[[Entry], None]
"""Takes a finished entry. Must not raise."""

CAPACITY = 1_000
MAX_LINES = 200

_LISTS = ("notes", "changes", "moves", "illegal_moves", "writes", "conflicts", "requests")


class EventTimes:
    """How often there was an event of one name, and how long it waited and was handled, in seconds."""

    __slots__ = ("count", "queued_s", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.queued_s = 0.0
        self.total_s = 0.0


class Timeline:
    """There is one event at a time, so what is recorded belongs to the event begun last."""

    def __init__(self, clock: Clock, controller_id: int, sink: Sink) -> None:
        self._clock = clock
        self._controller_id = controller_id
        self._sink = sink
        self._entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._current: Entry = {}
        self._omitted: dict[str, int] = {}
        self._begun = 0.0
        self._queued_s = 0.0
        self.times: dict[str, EventTimes] = {}
        """By the name of the event, since the start of the broker."""
        self.unclean_elections = 0
        """Elections of leaders that may lack acknowledged records, since the start of the broker."""

    def entries(self) -> list[Entry]:
        """The last ones, oldest first."""
        return list(self._entries)

    def begin(self, event: Event, queued_s: float) -> None:
        self._begin(event.name, event.cause, event.epoch)
        self._current["queued_ms"] = _milliseconds(queued_s)
        self._queued_s = queued_s

    def record(self, name: str, cause: str, epoch: int) -> None:
        """An entry of its own, for what is not an event: a tenure's end."""
        self._begin(name, cause, epoch)
        self.end()

    def _begin(self, name: str, cause: str, epoch: int) -> None:
        self._begun = self._clock.monotonic()
        self._queued_s = 0.0
        self._current = {
            "time_ms": self._clock.wall_ms(),
            "controller": self._controller_id,
            "epoch": epoch,
            "event": name,
            "cause": cause,
        }
        self._omitted = {}

    def add(self, kind: str, lines: Iterable[object]) -> None:
        """Sentences of one kind: notes, changes, moves, illegal_moves, writes, conflicts, requests."""
        assert kind in _LISTS, kind
        kept: list[str] = self._current.setdefault(kind, [])
        rest: Iterator[object] = iter(lines)
        for line in rest:
            if len(kept) >= MAX_LINES:
                self._omitted[kind] = self._omitted.get(kind, 0) + 1 + sum(1 for _ in rest)
                break
            kept.append(str(line))
        if not kept:
            del self._current[kind]

    def end(self, *, reading_s: float = 0.0, writing_s: float = 0.0, failure: str | None = None) -> None:
        entry = self._current
        for kind, omitted in self._omitted.items():
            entry[kind].append(f"and {omitted} more")
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
        self._entries.append(entry)
        self._sink(entry)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
