"""Long work on the event loop, in slices between which other tasks run.

After each slice of 2 ms the task really sleeps. A bare yield would let the loop's own tasks run, but keep the
interpreter from the threads, ZooKeeper's among them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

SLICE_S = 0.002
BREATH_S = 0.001

T = TypeVar("T")


class Slices:
    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._end_s = self._time() + SLICE_S

    async def breathe(self) -> None:
        """Sleep if the slice is over. Call this between two pieces of work."""
        if self._time() >= self._end_s:
            await asyncio.sleep(BREATH_S)
            self._end_s = self._time() + SLICE_S

    async def finish(self, steps: Generator[None, None, T]) -> T:
        """Run work that is done in steps, and return its result."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await self.breathe()


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
