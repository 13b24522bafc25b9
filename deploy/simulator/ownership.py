"""Which simulated process owns the code that runs.

All processes of a simulated cluster share one event loop. Every handle of asyncio (a callback, a timer, a step of a
task) carries the context in which it was made. `current_owner` is set in the context of a process, so the process owns
each handle that it makes, and each handle that those make in turn.

The loop asks the owner of a handle whether the handle may run. `process` decides when it may not: the process is killed
or paused.

Rejected: a loop or a thread per process (events have no common order); a list of tasks that every process keeps (misses
callbacks, timers, and tasks that are not registered).
"""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar

current_owner: ContextVar[Owner | None] = ContextVar("current_owner", default=None)
"""The process whose code is running. None: the test itself, or the simulated hardware."""


class ProcessKilled(BaseException):
    """The process that makes this call has been killed; the call has no effect.

    It is not an Exception, so that no code under test handles it as an error.
    """


class Owner:
    """The loop's view of a process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.running = True
        """Alive and not paused."""
        self.ahead_s = 0.0
        """Seconds by which its monotonic clock is ahead of true time: see `VirtualLoop.jump`."""
        self.held: list[asyncio.Handle] = []
        """Handles that came due while it was paused, in order."""
        self._context = Context()
        self._context.run(current_owner.set, self)

    def new_context(self) -> Context:
        """Return a context for a callback that belongs to this process."""
        return self._context.copy()
