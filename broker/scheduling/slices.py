"""Long work on the event loop, in slices between which other tasks run.

After each slice of 2 ms the task really sleeps. A bare yield would let the loop's own tasks run, but keep the
interpreter from the threads, ZooKeeper's among them.

Work for large requests also gives way to the rest of the machine: the later it wakes up, the longer its next sleep.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from minibroker.protocol.world import Executor

SLICE_S = 0.002
BREATH_S = 0.001
LONG_BREATH_S = 0.004
"""The sleep between slices of work that takes turns: all of it together gets a third of the event loop's time."""

LONGEST_BREATH_S = 0.016
"""The longest sleep of work that gives way."""

_gives_way: ContextVar[bool] = ContextVar("gives way", default=False)

A = TypeVar("A")
T = TypeVar("T")


@contextmanager
def giving_way() -> Iterator[None]:
    """Let the slices that are made within this block give way."""
    token = _gives_way.set(True)
    try:
        yield
    finally:
        _gives_way.reset(token)


class Slices:
    def __init__(self) -> None:
        self._breath_s = BREATH_S
        self._gives_way = _gives_way.get()
        self._time = asyncio.get_running_loop().time
        self._end_s = self._time() + SLICE_S

    async def breathe(self) -> None:
        """Sleep if the slice is over. Call this between two pieces of work."""
        now_s = self._time()
        if now_s >= self._end_s:
            await asyncio.sleep(self._breath_s)
            woken_s = self._time()
            if self._gives_way:
                late_s = woken_s - now_s - self._breath_s
                self._breath_s = min(max(BREATH_S, 4 * late_s), LONGEST_BREATH_S)
            self._end_s = woken_s + SLICE_S

    async def map(self, function: Callable[[A], T], arguments: Iterable[A]) -> list[T]:
        """Call the function with each argument, and return the results."""
        results = []
        for argument in arguments:
            results.append(function(argument))
            await self.breathe()
        return results

    async def finish(self, steps: Generator[object, None, T]) -> T:
        """Run work that is done in steps, and return its result."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.breathe()


def finish_at_once(steps: Generator[object, None, T]) -> T:
    """Run work that is done in steps, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class TakingTurns:
    """Runs work in steps for many clients: what takes longer than a slice waits for its turn, so that all of it
    together takes one slice at a time, and the memory of one.

    A step may yield a call that needs a thread (see `storage.search.Steps`).
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._turn = asyncio.Lock()

    async def finish(self, steps: Generator[Callable[[], Any] | None, Any, T], is_moot: Callable[[], bool]) -> T | None:
        """Return the result; None if `is_moot` says that nobody waits for it any more."""
        time = asyncio.get_running_loop().time
        end_s = time() + SLICE_S
        call: Callable[[], Any] | None = None
        while call is None and time() < end_s:
            try:
                call = next(steps)
            except StopIteration as end:
                return cast(T, end.value)
        async with self._turn:
            result: Any = None
            while not is_moot():
                if call is not None:
                    result = await self._executor.run(call)
                elif time() >= end_s:
                    await asyncio.sleep(LONG_BREATH_S)
                    end_s = time() + SLICE_S
                try:
                    call = steps.send(result)
                except StopIteration as end:
                    return cast(T, end.value)
                result = None
        steps.close()
        return None


class SlicedCalls:
    """Makes calls in order and in slices. Hundreds may become due at once."""

    def __init__(self, background: Callable[[Coroutine[Any, Any, None], str], object], name: str) -> None:
        self._background = background
        self._name = name
        self._calls: deque[Callable[[], None]] = deque()
        self._is_running = False

    def call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._is_running:
            self._is_running = True
            self._background(self._run(), self._name)

    async def _run(self) -> None:
        slices = Slices()
        try:
            while self._calls:
                self._calls.popleft()()
                await slices.breathe()
        finally:
            self._is_running = False
