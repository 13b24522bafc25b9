"""Calls that are made late, in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from minibroker.broker.faults.links import Way


class Lag:
    """Makes each call after the delay of its way, or not before the way is no longer held. Belongs to one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._way = Way()
        self._calls: deque[tuple[float, Callable[[], object]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether a call may be made at once, without the lag."""
        return not self._calls and self._way == Way()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.append((self._loop.time() + self._way.delay_s, call))
        self._schedule()

    def change(self, way: Way) -> None:
        """A smaller delay also holds for the calls that wait."""
        self._way = way
        latest = self._loop.time() + way.delay_s
        self._calls = deque((min(due, latest), call) for due, call in self._calls)
        self._schedule()

    def clear(self) -> None:
        self._calls.clear()
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._calls and not self._way.is_held:
            self._timer = self._loop.call_at(self._calls[0][0], self._run)

    def _run(self) -> None:
        self._timer = None
        now = self._loop.time()
        try:
            while self._calls and not self._way.is_held and self._calls[0][0] <= now:
                self._calls.popleft()[1]()
        finally:  # the calls after one that raised are not held for ever
            self._schedule()
