"""A hierarchical timing wheel: many deadlines, nearly all of which are cancelled.

The problem. Every produce request with acks=all, every long-polling fetch and every session of a group member has a
timeout, and nearly all of them complete long before it. Insert and cancel must therefore be cheap, with a million
pending timers as with ten, and a cancelled timer must release its memory at once, because its deadline may be half a
minute away.

The choice, after Kafka's TimingWheel. Time is divided into ticks. The finest wheel has one bucket for each of the next
20 ticks. Later deadlines go to an overflow wheel, in which one bucket is as wide as the whole wheel below, and so on;
each wheel is created when it is first needed. A deadline up to 20 ms ahead is in the first wheel, 0.4 s in the second,
8 s in the third, 160 s in the fourth. A bucket is a circular doubly linked list whose sentinel is the bucket itself, so
linking and unlinking only change a few references. When the clock reaches the start of a coarse bucket, its entries
move to finer wheels, so an entry moves at most once per wheel. A coarse bucket may hold most of a million entries,
about half a second of moving. `advance` can therefore stop after some moves and continue when it is called again; in
the meantime, the bucket's list is simply the list of due entries.

The used buckets are in a heap by the time at which they expire (Kafka's DelayQueue). There are at most 20 of them per
wheel, so the heap stays tiny with any number of entries, and the driver can sleep until `next_expiry_ms` instead of
waking at every tick.

How exact. The tick is the resolution of the given clock, one millisecond. An entry is never handed out before its
deadline, and the first `advance` to its deadline or later hands it out. It is therefore only as late as its driver: a
driver that advances every n ms is up to n ms late. Entries come in the order of their deadlines; those inserted after
their deadline come first. Within one millisecond the order is deterministic but unspecified.

Rejected: one binary heap with lazy deletion, as asyncio has. It is faster per operation, because CPython's heap is
written in C (tests/benchmarks/bench_timing_wheel.py compares them). But a cancelled entry stays in it, with the request
that it refers to, until its time comes or the whole heap is swept, and that sweep blocks the loop for as long as a
million entries take. Also rejected: a dict per bucket instead of links, because an entry would have to carry its bucket
and a key in order to leave.

This module is pure: it never reads a clock.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

TICK_MS = 1
BUCKETS_PER_WHEEL = 20

Value = TypeVar("Value")


class _Link(Generic[Value]):
    """A place in a circular doubly linked list. A link outside of any list has no neighbours."""

    __slots__ = ("following", "preceding")

    following: _Link[Value] | None
    preceding: _Link[Value] | None

    def unlink(self) -> bool:
        """Leave the list, in O(1). Return False if it was in none."""
        following, preceding = self.following, self.preceding
        if following is None or preceding is None:
            return False
        preceding.following = following
        following.preceding = preceding
        self.following = self.preceding = None
        return True


class TimerEntry(_Link[Value]):
    """One deadline in a `TimingWheel`, returned by `insert` and needed to cancel."""

    __slots__ = ("deadline_ms", "value")

    def __init__(self, deadline_ms: int, value: Value) -> None:
        self.deadline_ms = deadline_ms
        self.value = value
        self.following = self.preceding = None


class _Bucket(_Link[Value]):
    """A list of entries, and its own sentinel. `queued`: whether it is in the heap of used buckets."""

    __slots__ = ("queued",)

    def __init__(self) -> None:
        self.following: _Link[Value] = self
        self.preceding: _Link[Value] = self
        self.queued = False

    def is_empty(self) -> bool:
        return self.following is self

    def append(self, entry: TimerEntry[Value]) -> None:
        last = self.preceding
        entry.preceding = last
        entry.following = self
        last.following = entry
        self.preceding = entry

    def pop_first(self) -> TimerEntry[Value] | None:
        first = self.following
        if isinstance(first, TimerEntry):
            first.unlink()
            return first
        return None  # the sentinel itself: the bucket is empty

    def take_all(self, other: _Bucket[Value]) -> None:
        """Move all entries of `other` to the end of this bucket, in O(1)."""
        if other.is_empty():
            return
        first, last = other.following, other.preceding
        other.following = other.preceding = other
        self.preceding.following = first
        first.preceding = self.preceding
        last.following = self
        self.preceding = last


class _Wheel(Generic[Value]):
    """The buckets for the next `BUCKETS_PER_WHEEL` intervals of `tick_ms` each."""

    __slots__ = ("buckets", "tick_ms")

    def __init__(self, tick_ms: int) -> None:
        self.tick_ms = tick_ms
        self.buckets: list[_Bucket[Value]] = [_Bucket() for _ in range(BUCKETS_PER_WHEEL)]


class TimingWheel(Generic[Value]):
    """Deadlines in whole milliseconds of any clock, which `advance` reports (Kafka's TimingWheel, with the DelayQueue
    of its SystemTimer).

    Guaranteed: every entry is handed out by `advance` exactly once or cancelled, never before its deadline, in the
    order of the deadlines (a past deadline counts as now). `insert` and `cancel` are O(1). The wheel may be changed
    between any two calls, for example by the handler of an entry that was just handed out.
    """

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._wheels: list[_Wheel[Value]] = [_Wheel(TICK_MS)]
        # Used buckets: (time of expiry, width, bucket). No two of them agree in the first two, as a wheel never holds
        # two rounds at once, so the buckets themselves are never compared.
        self._in_use: list[tuple[int, int, _Bucket[Value]]] = []
        # Entries of expired buckets, and entries inserted after their deadline.
        self._due: _Bucket[Value] = _Bucket()
        self._pending = 0

    def __len__(self) -> int:
        """The number of entries neither handed out nor cancelled."""
        return self._pending

    def insert(self, deadline_ms: int, value: Value) -> TimerEntry[Value]:
        """Add an entry that expires when the clock reaches `deadline_ms`; a past deadline expires at the next
        `advance`."""
        entry = TimerEntry(deadline_ms, value)
        self._place(entry)
        self._pending += 1
        return entry

    def cancel(self, entry: TimerEntry[Value]) -> bool:
        """Remove an entry of this wheel. Return False if it was handed out or cancelled before."""
        if entry.unlink():
            self._pending -= 1
            return True
        return False

    def advance(self, now_ms: int, most_moves: int | None = None) -> TimerEntry[Value] | None:
        """Move the clock towards `now_ms` and return the next entry that has expired by then.

        None: no such entry is left, and the clock is at `now_ms`. Call this until then. Entries come one at a time, so
        that later ones can be cancelled while earlier ones are handled, and so that a driver may stop halfway; the
        clock then stands still, and the rest is due. With `most_moves`, the call also ends after moving that many
        entries to finer wheels. None then means that none was found so far; there may be more if `next_expiry_ms` is
        not after `now_ms`. Raises ValueError if `now_ms` is before the clock: time does not go back.
        """
        if now_ms < self._now_ms:
            raise ValueError(f"the clock is at {self._now_ms} ms and cannot go back to {now_ms} ms")
        moves = 0
        while moves != most_moves:
            entry = self._due.pop_first()
            if entry is not None:
                if entry.deadline_ms <= self._now_ms:
                    self._pending -= 1
                    return entry
                self._place(entry)
                moves += 1
            elif self._in_use and self._in_use[0][0] <= now_ms:
                self._now_ms, _, bucket = heapq.heappop(self._in_use)
                bucket.queued = False
                self._due.take_all(bucket)
            else:
                self._now_ms = now_ms
                break
        return None

    def next_expiry_ms(self) -> int | None:
        """Return the time to which the wheel should be advanced next, never later than the earliest deadline, or None
        if it is empty.

        This is the time at which the next bucket expires. If that is a coarse one, its entries move to finer wheels, so
        an `advance` to that time may hand out nothing. O(1), except that each bucket emptied by `cancel` is dropped
        here once.
        """
        if not self._due.is_empty():
            return self._now_ms
        while self._in_use:
            expiry_ms, _, bucket = self._in_use[0]
            if not bucket.is_empty():
                return expiry_ms
            heapq.heappop(self._in_use)
            bucket.queued = False
        return None

    def _place(self, entry: TimerEntry[Value]) -> None:
        deadline_ms, now_ms = entry.deadline_ms, self._now_ms
        if deadline_ms <= now_ms:
            self._due.append(entry)
            return
        for wheel in self._wheels:
            tick_ms = wheel.tick_ms
            interval = deadline_ms // tick_ms
            # Never 0 here: an entry too late for the finer wheel is at least one of its rounds away.
            if interval - now_ms // tick_ms < BUCKETS_PER_WHEEL:
                bucket = wheel.buckets[interval % BUCKETS_PER_WHEEL]
                bucket.append(entry)
                if not bucket.queued:
                    bucket.queued = True
                    heapq.heappush(self._in_use, (interval * tick_ms, tick_ms, bucket))
                return
        self._wheels.append(_Wheel(self._wheels[-1].tick_ms * BUCKETS_PER_WHEEL))
        self._place(entry)
