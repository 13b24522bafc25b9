"""The cost of a timeout: the timing wheel and the `Timer` it drives, compared with a heap and the loops' own timers.

    python -m tests.benchmarks.bench_timing_wheel [--million] [--repeat N]

For each number of pending timeouts, the table has microseconds per operation, the best of the repeats, and the ratio to
the wheel in the same run (above 1 is slower). insert+cancel: beside that many pending timeouts, one more is inserted
and cancelled, a broker's usual case. insert+expire: that many are inserted, then all expire in order, on a loop with
manual time, so nothing sleeps. uvloop's time cannot be set, so it has no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it can be run by its path too

from minibroker.broker.scheduling.purgatory import Timer
from minibroker.broker.scheduling.timing_wheel import TimingWheel

CANCELS = 50_000
LONGEST_TIMEOUT_MS = 30_000

Callback = Callable[[], None]


class Timeouts(NamedTuple):
    """One way to keep timeouts. `expire_all` returns when `is_done()`."""

    insert: Callable[[int, Callback], Any]
    cancel: Callable[[Any], object]
    expire_all: Callable[[Callable[[], bool]], Awaitable[None]]


class ManualLoop(asyncio.SelectorEventLoop):
    """A loop with manual time."""

    now_ms = 0

    def time(self) -> float:
        return self.now_ms / 1000

    async def expire_all(self, is_done: Callable[[], bool]) -> None:
        self.now_ms += LONGEST_TIMEOUT_MS
        while not is_done():
            self.now_ms += 1
            await asyncio.sleep(0)


def timing_wheel(loop: asyncio.AbstractEventLoop) -> Timeouts:
    wheel: TimingWheel[Callback] = TimingWheel(0)

    async def expire_all(is_done: Callable[[], bool]) -> None:
        while (next_expiry_ms := wheel.next_expiry_ms()) is not None:
            while (entry := wheel.advance(next_expiry_ms)) is not None:
                entry.value()

    return Timeouts(wheel.insert, wheel.cancel, expire_all)


def lazy_heap(loop: asyncio.AbstractEventLoop) -> Timeouts:
    """A heap in which cancelled entries stay until they are more than half, as in asyncio."""
    heap: list[list[Any]] = []  # deadline, sequence, callback or None
    inserted = cancelled = 0

    def insert(deadline_ms: int, callback: Callback) -> list[Any]:
        nonlocal inserted
        inserted += 1
        entry = [deadline_ms, inserted, callback]
        heapq.heappush(heap, entry)
        return entry

    def cancel(entry: list[Any]) -> None:
        nonlocal cancelled
        entry[2] = None
        cancelled += 1
        if cancelled > 100 and cancelled > len(heap) // 2:
            heap[:] = [kept for kept in heap if kept[2] is not None]
            heapq.heapify(heap)
            cancelled = 0

    async def expire_all(is_done: Callable[[], bool]) -> None:
        while heap:
            callback = heapq.heappop(heap)[2]
            if callback is not None:
                callback()

    return Timeouts(insert, cancel, expire_all)


def timer(loop: asyncio.AbstractEventLoop) -> Timeouts:
    ours = Timer()
    return Timeouts(ours.add, ours.cancel, getattr(loop, "expire_all", never))


def call_later(loop: asyncio.AbstractEventLoop) -> Timeouts:
    def insert(timeout_ms: int, callback: Callback) -> asyncio.TimerHandle:
        return loop.call_later(timeout_ms / 1000, callback)

    return Timeouts(insert, lambda handle: handle.cancel(), getattr(loop, "expire_all", never))


def nothing() -> None:
    """A callback that is never called."""


async def never(is_done: Callable[[], bool]) -> None:
    raise NotImplementedError("this loop's time cannot be set")


async def insert_and_cancel(timeouts: Timeouts, pending_ms: Sequence[int], timeouts_ms: Sequence[int]) -> float:
    """Microseconds per pair, beside the timeouts of `pending_ms`."""
    insert, cancel = timeouts.insert, timeouts.cancel
    waiting = [insert(timeout_ms, nothing) for timeout_ms in pending_ms]
    elapsed = 0.0
    for start in range(0, len(timeouts_ms), 1000):
        started = time.perf_counter()
        for timeout_ms in timeouts_ms[start : start + 1000]:
            cancel(insert(timeout_ms, nothing))
        await asyncio.sleep(0)  # asyncio sweeps cancelled entries in the loop's next iteration
        elapsed += time.perf_counter() - started
    for entry in waiting:
        cancel(entry)
    return elapsed / len(timeouts_ms) * 1e6


async def insert_and_expire(timeouts: Timeouts, timeouts_ms: Sequence[int]) -> float:
    """Microseconds per entry, from its insertion to its callback."""
    insert, count, expired = timeouts.insert, len(timeouts_ms), 0

    def callback() -> None:
        nonlocal expired
        expired += 1

    started = time.perf_counter()
    for timeout_ms in timeouts_ms:
        insert(timeout_ms, callback)
    await timeouts.expire_all(lambda: expired == count)
    elapsed = time.perf_counter() - started
    assert expired == count
    return elapsed / count * 1e6


Create = Callable[[asyncio.AbstractEventLoop], Timeouts]

CONTENDERS: list[tuple[str, Create, Callable[[], asyncio.AbstractEventLoop]]] = [
    ("TimingWheel", timing_wheel, ManualLoop),
    ("heapq, lazy deletion", lazy_heap, ManualLoop),
    ("Timer on asyncio", timer, ManualLoop),
    ("loop.call_later, asyncio", call_later, ManualLoop),
    ("Timer on uvloop", timer, uvloop.new_event_loop),
    ("loop.call_later, uvloop", call_later, uvloop.new_event_loop),
]


def best_of(
    repeat: int,
    create: Create,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    measure: Callable[[Timeouts], Awaitable[float]],
) -> float:
    async def run() -> float:
        return await measure(create(asyncio.get_running_loop()))

    results = []
    for _ in range(repeat):
        gc.collect()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            results.append(runner.run(run()))
    return min(results)


def main() -> None:
    parser = argparse.ArgumentParser(description="timing wheel against a heap and the loops' own timers")
    parser.add_argument("--million", action="store_true", help="also with 1,000,000 pending")
    parser.add_argument("--repeat", type=int, default=3, help="number of runs; the best counts (default 3)")
    arguments = parser.parse_args()
    for count in (1_000, 100_000, 1_000_000) if arguments.million else (1_000, 100_000):
        print(f"\n{f'{count:,} pending':28}   insert+cancel          insert+expire")
        baseline: Result | None = None
        for result in compare(count, arguments.repeat):
            baseline = baseline or result
            cells = [
                f"{us:7.2f} us {us / base:5.2f}x"
                for us, base in zip(result[1:], baseline[1:], strict=True)
                if us is not None and base is not None
            ]
            print(f"  {result.name:26}  {'       '.join(cells)}", flush=True)


class Result(NamedTuple):
    """Microseconds per operation."""

    name: str
    insert_and_cancel_us: float
    insert_and_expire_us: float | None


def compare(count: int, repeat: int) -> Iterator[Result]:
    """Yield the result of each contender with `count` timeouts pending, the wheel first."""
    choose = random.Random(0)
    pending_ms = [choose.randint(1_000, LONGEST_TIMEOUT_MS) for _ in range(count)]
    cancelled_ms = [choose.randint(1_000, LONGEST_TIMEOUT_MS) for _ in range(CANCELS)]
    for name, create, new_loop in CONTENDERS:
        cancelled_us = best_of(
            repeat, create, new_loop, lambda timeouts: insert_and_cancel(timeouts, pending_ms, cancelled_ms)
        )
        expired_us = None
        if new_loop is ManualLoop:
            expired_us = best_of(repeat, create, new_loop, lambda timeouts: insert_and_expire(timeouts, pending_ms))
        yield Result(name, cancelled_us, expired_us)


if __name__ == "__main__":
    main()
