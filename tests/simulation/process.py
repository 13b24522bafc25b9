"""Processes of the simulated world: who owns which callback, and what a kill does.

The problem: all processes of the simulated cluster run on one event loop, and `kill -9` must be what it is for a real
one. `Task.cancel()` is the opposite of a kill: it runs `except` and `finally` blocks, which write clean-shutdown
markers, flush files and say goodbye to ZooKeeper.

The choice: ownership through a context variable. Every handle of asyncio (a callback, a timer, a step of a task)
carries the context that it was made in, so what a process starts belongs to it, and so does what that starts. A kill
takes two steps, in this order. First the World is severed: disk, network, ZooKeeper and executor of this process
raise `ProcessKilled` from now on, its connections are dropped, its locks released. Then nothing of it runs any more:
the loop drops its handles when their turn comes (see `tests.simulation.loop`).

Tasks that are dropped in the middle stay suspended, and referenced, until the run is over: were they collected
earlier, their `finally` blocks would run at whatever moment the garbage collector likes.

Rejected: a loop or thread per process (no common order of events); a list of tasks that every process keeps by itself
(misses callbacks and timers, and whatever forgets to register).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.simulation.loop import VirtualLoop

T = TypeVar("T")

current_process: ContextVar[Process | None] = ContextVar("current_process", default=None)
"""Whose code is running; None: the test's own, or that of the simulated hardware."""


class ProcessKilled(BaseException):
    """The process that makes this call has been killed: what it asks for does not happen.

    No Exception, so that no code under test takes it for an error that it could handle.
    """


class Process:
    """One incarnation of a program, from its start to its kill. A restart is another Process on the same host."""

    def __init__(self, loop: VirtualLoop, name: str, address: str) -> None:
        self.name = name
        self.address = address
        """The IP address of its host."""
        self.alive = True
        self._loop = loop
        self._context = Context()
        self._context.run(current_process.set, self)
        self._severers: list[Callable[[], None]] = []
        self._started: list[asyncio.Task[Any]] = []
        self._callers: dict[asyncio.Future[Any], None] = {}
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"<process {self.name}{'' if self.alive else ', killed'}>"

    def new_context(self) -> Context:
        """A context for a callback that is to belong to this process."""
        return self._context.copy()

    def start(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process. Raises ProcessKilled."""
        if not self.alive:
            coroutine.close()
        self.check()
        task = self._loop.create_task(coroutine, name=name, context=self.new_context())
        self._started.append(task)
        return task

    async def run(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> T:
        """`start`, and wait for the result from outside. Raises ProcessKilled where the process is killed meanwhile."""
        task = self.start(coroutine, name)
        outcome: asyncio.Future[T] = self._loop.create_future()

        def pass_on(task: asyncio.Task[T]) -> None:
            if outcome.done():
                return
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        task.add_done_callback(pass_on)
        self._callers[outcome] = None
        try:
            return await outcome
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._callers.pop(outcome, None)

    def check(self) -> None:
        """Raises ProcessKilled. What the World does for a process begins with this."""
        if not self.alive:
            raise ProcessKilled(f"{self.name} was killed")

    def on_kill(self, sever: Callable[[], None]) -> None:
        """Call `sever` when the process is killed: what the operating system of its host does then."""
        self._severers.append(sever)

    def kill(self) -> None:
        """End the process between two instructions, as SIGKILL does. A second kill does nothing."""
        if not self.alive:
            return
        self.alive = False
        self._loop.keep_tasks_of(self)
        # In nobody's context: a process may kill itself, and what its host still does must outlive it.
        Context().run(self._sever)

    def _sever(self) -> None:
        for sever in self._severers:
            sever()
        callers, self._callers = self._callers, {}
        for outcome in callers:
            if not outcome.done():
                outcome.set_exception(ProcessKilled(f"{self.name} was killed"))
