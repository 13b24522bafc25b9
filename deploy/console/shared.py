"""Readings of the cluster, shared by all viewers.

No task polls. Each viewer asks for the next reading; the first one reads, and the others get the same. So there is at
most one reading at a time, never more often than `every_s`, and none while nobody watches. If the viewer that reads
leaves or gives up waiting, its reading is cancelled and the next viewer begins one.

A reading of a large cluster costs tens of milliseconds of processor time, and pages are rendered from it. So `Pace`
spaces readings out such that the event loop keeps to its share of a core; looks in threads have a share of their own.
Rejected: a longer interval for all clusters, which would show a failover of a small one late; a pause after each
expensive reading, which would show the second of two losses late.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from minibroker.deploy.console.sessions import REST_S
from minibroker.protocol.errors import MinibrokerError

Q = TypeVar("Q")
T = TypeVar("T")

NOT_IN_TIME = "not all answers came in time"
SHARE = 0.02
"""The share of a core that the event loop may take while the console is watched."""
BURST_S = 0.1
"""Processor time that the event loop may save up."""
MAX_PAUSE_S = 5.0
"""The next reading begins this long after the last one at the latest, whatever it costs."""
MAX_LOOK_EVERY_S = 6.0
"""The next look begins this long after the last one at the latest, whatever it costs."""
ALONE_S = 2.0
"""A page that asks for a look so long after the last one is not followed by anyone, and waits for a new look."""
MAX_KEPT = 32
"""Readings of this many selections are kept without a viewer."""


@dataclass(frozen=True)
class Reading(Generic[T]):
    number: int
    value: T | None
    """The last state that could be read. None: none yet."""
    error: str | None
    """Why the cluster could not be read this time."""
    read_at_ms: int | None = None
    """When the value was read from the brokers, by the wall clock. None: it was not."""
    next_in_s: float = 0.0
    """Seconds until the next reading, if this one took more processor time than the console's share."""


class Pace:
    """How long the event loop must pause to keep to its share of a core. What it has saved may be spent at once, since
    readings cost most when something happens, and then they must not be late."""

    def __init__(
        self,
        share: float = SHARE,
        used_s: Callable[[], float] = time.thread_time,
        burst_s: float = BURST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`used_s` returns the processor time that the caller's thread has used."""
        self._share = share
        self._used_s = used_s
        self._burst_s = burst_s
        self._clock = clock
        self._credit_s = burst_s
        self._seen = clock(), used_s()

    def pause_s(self) -> float:
        (before_s, used_before_s), self._seen = self._seen, (self._clock(), self._used_s())
        now_s, used_s = self._seen
        credit_s = self._credit_s + (now_s - before_s) * self._share - (used_s - used_before_s)
        self._credit_s = max(-MAX_PAUSE_S * self._share, min(self._burst_s, credit_s))
        return max(0.0, -self._credit_s / self._share)


class Shared(Generic[T]):
    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        every_s: float,
        instead: Callable[[], T | None] = lambda: None,
        pace: Pace | None = None,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """`read` raises MinibrokerError or TimeoutError if the cluster cannot be read. If it never could, the value is
        what `instead` returns. Without `pace`, only `every_s` counts, and also if `is_urgent`, which is asked as often,
        returns true. The first reading never waits."""
        self._read = read
        self._instead = instead
        self._every_s = every_s
        self._last: Reading[T] = Reading(0, None, NOT_IN_TIME)
        self._pace = pace
        self._is_urgent = is_urgent
        self._read_at_s = float("-inf")
        self._lock = asyncio.Lock()
        self._is_ended = False
        self._waits: set[asyncio.Timeout] = set()

    def end(self) -> None:
        """All viewers give up waiting, now and from now on."""
        self._is_ended = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    async def after(self, seen: int, within_s: float | None = None) -> Reading[T]:
        """Return the next reading after number `seen`: another viewer's, or a new one in time. If that takes longer
        than `within_s`, or the console ends, return the last value with an error."""
        try:
            async with asyncio.timeout(0 if self._is_ended else within_s) as wait:
                self._waits.add(wait)
                try:
                    return await self._next(seen)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            return replace(self._last, error=self._last.error or NOT_IN_TIME)

    async def _next(self, seen: int) -> Reading[T]:
        async with self._lock:
            if self._last.number > seen:
                return self._last
            await self._until_due()
            value, error, read_at_ms = self._last.value, None, self._last.read_at_ms
            try:
                value = await self._read()
                read_at_ms = time.time_ns() // 1_000_000
            except TimeoutError:
                error = NOT_IN_TIME
            except MinibrokerError as failure:
                error = str(failure)
            if value is None:
                value = self._instead()
            self._read_at_s = asyncio.get_running_loop().time()
            wait_s = self._wait_s()
            next_in_s = wait_s if wait_s > self._every_s else 0.0
            self._last = Reading(self._last.number + 1, value, error, read_at_ms, next_in_s)
            return self._last

    async def soon(self, within_s: float) -> Reading[T]:
        """Return the last reading if the next one is not due, else a new one. Return the last value with an error as
        `after` does."""
        if self._wait_s() > 0:
            return self._last
        return await self.after(self._last.number, within_s)

    @property
    def is_watched(self) -> bool:
        return bool(self._waits)

    async def _until_due(self) -> None:
        while (wait_s := self._wait_s()) > 0:  # noqa: ASYNC110 - others use the processor meanwhile, which puts it off
            await asyncio.sleep(min(wait_s, self._every_s or wait_s))

    def _wait_s(self) -> float:
        ago_s = asyncio.get_running_loop().time() - self._read_at_s
        pause_s = 0.0 if self._pace is None else min(self._pace.pause_s(), MAX_PAUSE_S - ago_s)
        wait_s = self._every_s - ago_s
        return wait_s if wait_s >= pause_s or self._is_urgent() else pause_s


class Readings(Generic[Q, T]):
    """What pages show of the cluster: a shared reading for each selection that viewers have chosen."""

    def __init__(self, begin: Callable[[Q], Shared[T]]) -> None:
        self._begin = begin
        self._by_selection: dict[Q, Shared[T]] = {}
        self._is_ended = False

    def of(self, selection: Q) -> Shared[T]:
        found = self._by_selection.pop(selection, None)
        if found is None:
            found = self._begin(selection)
            if self._is_ended:
                found.end()
            unwatched = [key for key, shared in self._by_selection.items() if not shared.is_watched]
            for key in unwatched[: max(0, len(unwatched) + 1 - MAX_KEPT)]:
                del self._by_selection[key]
        self._by_selection[selection] = found  # the latest comes last
        return found

    def end(self) -> None:
        """See `Shared.end`."""
        self._is_ended = True
        for shared in self._by_selection.values():
            shared.end()


class Look(Generic[T]):
    """A blocking look at the cluster that may take seconds, beside the reading of a page, which does not wait for it.
    It is taken in a thread while a page asks for it. If no page has asked for REST_S, what was found before is
    forgotten."""

    def __init__(self, look: Callable[[], T], every_s: float, share: float) -> None:
        """`look` raises MinibrokerError. `share` is that of a core which the looks may take."""
        self._look = look
        self._every_s = every_s
        self._share = share
        self._due_at_s = self._asked_at_s = float("-inf")
        self._under_way: asyncio.Task[None] | None = None
        self._is_outdated = False
        """Whether the look under way may have begun before a change."""
        self._is_alone = False
        self.is_late = False
        """Whether something may have changed since the last look began."""
        self.began_at_ms = 0
        """When the last look that has ended began, by the wall clock."""
        self.value: T | None = None
        """What the last look has found. None: it has failed, or there was none."""
        self.is_known = False
        """Whether a look has ended, successful or not."""
        self.error: str | None = None
        """Why the last look has failed."""
        self.version = 0
        """Increases with each change."""

    def begin(self) -> None:
        """Begin a look if one is due."""
        now_s = asyncio.get_running_loop().time()
        rested_s, self._asked_at_s = now_s - self._asked_at_s, now_s
        self._is_alone = rested_s > ALONE_S
        if self.is_known and rested_s > REST_S:
            self.value, self.error, self.is_known = None, None, False
            self.version += 1
            self._due_at_s = now_s
        if self._is_alone:
            self.hurry()
        elif self._under_way is None and now_s >= self._due_at_s:
            self._under_way = asyncio.create_task(self._run())

    def hurry(self) -> None:
        """Begin a look now, or as soon as the one under way has ended: something has changed."""
        self.is_late = True
        if self._under_way is None:
            self._under_way = asyncio.create_task(self._run())
        else:
            self._is_outdated = True

    async def first(self, within_s: float) -> None:
        """Wait for the first look, or the first after a rest or for a page that nobody follows, at most this long."""
        if self._under_way is not None and (not self.is_known or self._is_alone):
            await asyncio.wait([self._under_way], timeout=within_s)
        self._asked_at_s = asyncio.get_running_loop().time()  # a reading that took long is no rest

    async def _run(self) -> None:
        used_s = 0.0

        def measured() -> T:
            nonlocal used_s
            began_s = time.thread_time()
            try:
                return self._look()
            finally:
                used_s = time.thread_time() - began_s

        value, error, began_at_ms = None, None, time.time_ns() // 1_000_000
        try:
            value = await in_thread(measured)
        except (MinibrokerError, OSError) as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001 - shown on the page, which needs the rest of its contents
            error = f"failed by a fault of the console: {failure!r}"
        finally:
            self._due_at_s = asyncio.get_running_loop().time() + max(
                self._every_s, min(MAX_LOOK_EVERY_S, used_s / self._share)
            )
            self._under_way = None
            was_late, self.is_late, self.began_at_ms = self.is_late, self._is_outdated, began_at_ms
            if self._is_outdated:
                self._is_outdated, self._due_at_s = False, asyncio.get_running_loop().time()
        if not self.is_known or was_late or (value, error) != (self.value, self.error):
            self.value, self.error, self.is_known = value, error, True
            self.version += 1


async def in_thread(call: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but the console ends without waiting for the call: `start` may wait for minutes."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001 - raised by the caller
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await outcome
