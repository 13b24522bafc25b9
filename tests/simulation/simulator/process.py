"""Processes of the simulated world: which of them owns a callback, and what a kill does.

The problem: all processes of the simulated cluster run on one event loop, and `kill -9` must be what it is for a real
one. `Task.cancel()` is the opposite of a kill: it runs `except` and `finally` blocks, which write clean-shutdown
markers, flush files and say goodbye to ZooKeeper.

The choice: ownership through a context variable. Every handle of asyncio (a callback, a timer, a step of a task)
carries the context that it was made in, so what a process starts belongs to it, and so does what that starts. A kill
takes two steps, in this order. First the World is severed: disk, network, ZooKeeper and executor of this process
raise `ProcessKilled` from now on, its connections are dropped, its locks released. Then nothing of it runs any more:
the loop drops its handles when their turn comes (see `tests.simulation.simulator.loop`).

Tasks that are dropped in the middle stay suspended, and referenced, until the run is over: were they collected
earlier, their `finally` blocks would run at whatever moment the garbage collector likes.

A pause (SIGSTOP) is the same ownership put to another use: the loop holds the handles of a paused process, and runs
them after `resume`. What its host does for it goes on meanwhile, since that runs in nobody's context: connections are
accepted into the backlog, bytes are taken up to the window. Whatever would enter the process from there must look at
`running` first, and come again when it is resumed (`on_resume`).

Rejected: a loop or thread per process (no common order of events); a list of tasks that every process keeps by itself
(misses callbacks and timers, and whatever forgets to register).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.simulation.simulator.loop import VirtualLoop

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
        self.paused = False
        self.running = True
        """Alive and not paused."""
        self.ahead_s = 0.0
        """How far its monotonic clock is ahead of the true time: see `VirtualLoop.jump`."""
        self._loop = loop
        self._context = Context()
        self._context.run(current_process.set, self)
        self._severers: list[Callable[[], None]] = []
        self._pausers: list[Callable[[], None]] = []
        self._resumers: list[Callable[[], None]] = []
        self._held: list[asyncio.Handle] = []
        self._started: list[asyncio.Task[Any]] = []
        self._callers: dict[asyncio.Future[Any], None] = {}
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"<process {self.name}{', killed' if not self.alive else ', paused' if self.paused else ''}>"

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

    def on_pause(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the process is paused."""
        self._pausers.append(stop)

    def on_resume(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the process is resumed, after what was held is on its way again."""
        self._resumers.append(go_on)

    def kill(self) -> None:
        """End the process between two instructions, as SIGKILL does. A second kill does nothing."""
        if not self.alive:
            return
        self._loop.record(f"{self.name} is killed")
        self.alive = self.running = False
        self._loop.keep_remains_of(self, self._held)
        self._held = []
        # In nobody's context: a process may kill itself, and what its host still does must outlive it.
        Context().run(self._sever)

    def pause(self) -> None:
        """SIGSTOP: nothing of the process runs until `resume`. Does nothing where it is paused or dead."""
        if not self.running:
            return
        self._loop.record(f"{self.name} is paused")
        self.paused, self.running = True, False
        Context().run(_call_all, self._pausers)

    def resume(self) -> None:
        """SIGCONT: what was held runs, in order. Does nothing where the process is not paused, or dead.

        First what was ready and what its host has for it, then its timers, which have been due for a while; or the
        timers before what has come over the network, as event loops differ in that.
        """
        if not self.paused or not self.alive:
            return
        self._loop.record(f"{self.name} is resumed")
        self.paused, self.running = False, True
        held, self._held = self._held, []
        timers = [handle for handle in held if isinstance(handle, asyncio.TimerHandle)]
        self._loop.make_ready(handle for handle in held if not isinstance(handle, asyncio.TimerHandle))
        timers_first = self._loop.random.random() < 0.5
        if timers_first:
            self._loop.make_ready(timers)
        Context().run(_call_all, self._resumers)
        if not timers_first:
            self._loop.make_ready(timers)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended."""
        return [task for task in asyncio.all_tasks(self._loop) if getattr(task, "process", None) is self]

    def hold(self, handle: asyncio.Handle) -> None:
        """For the loop: the handle of a paused process, whose turn has come."""
        self._held.append(handle)

    def _sever(self) -> None:
        _call_all(self._severers)
        callers, self._callers = self._callers, {}
        for outcome in callers:
            if not outcome.done():
                outcome.set_exception(ProcessKilled(f"{self.name} was killed"))


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in list(functions):
        function()
