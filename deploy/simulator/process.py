"""Processes of the simulated world: how they start, pause and die.

The problem: all processes of the simulated cluster run on one event loop, and `kill -9` must do what it does to a real
process. `Task.cancel()` does the opposite: it runs `except` and `finally` blocks, which write clean-shutdown markers,
flush files and close ZooKeeper sessions.

The choice: each handle of the loop has an owner (see `ownership`). A kill takes two steps, in this order. First the
World is severed: the disk, network, ZooKeeper and executors of this process raise `ProcessKilled` from now on, its
connections are dropped, its locks are released. Then its code no longer runs: the loop drops its handles as they come
due.

Dropped tasks stay suspended and referenced until the run ends. If they were collected earlier, the garbage collector
would determine when their `finally` blocks run.

A pause (SIGSTOP) uses the same ownership: the loop holds the handles of a paused process and runs them after `resume`.
Its host continues meanwhile, because the host's callbacks have no owner: it accepts connections into the backlog and
bytes up to the window. Before the host calls into a process it checks `running`; if that is false, it tries again when
the process is resumed (`on_resume`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from minibroker.deploy.simulator.loop import VirtualLoop
from minibroker.deploy.simulator.ownership import Owner, ProcessKilled

T = TypeVar("T")


class Process(Owner):
    """One incarnation of a program, from its start to its kill. A restart is another Process on the same host."""

    def __init__(self, loop: VirtualLoop, name: str, address: str) -> None:
        super().__init__(name)
        self.address = address
        """The IP address of its host."""
        self._loop = loop
        self._severers: list[Callable[[], None]] = []
        self._pausers: list[Callable[[], None]] = []
        self._resumers: list[Callable[[], None]] = []
        self._started: list[asyncio.Task[Any]] = []
        self._callers: dict[asyncio.Future[Any], None] = {}
        self._paused_at_s = 0.0
        self.paused_s = 0.0
        """Seconds for which it has been paused, without a pause that has not ended."""
        loop.before_close.append(self.kill)

    def __repr__(self) -> str:
        return f"<process {self.name}{', killed' if not self.alive else ', paused' if self.paused else ''}>"

    def start(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process. Raises ProcessKilled."""
        if not self.alive:
            coroutine.close()
        self.check()
        task = self._loop.create_task(coroutine, name=name, context=self.new_context())
        self._started.append(task)
        return task

    async def run(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> T:
        """Start a task of this process and wait for its result. Raises ProcessKilled if the process is killed."""
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
        """Raise ProcessKilled if the process is dead. Every call of its World begins with this check."""
        if not self.alive:
            raise ProcessKilled(f"{self.name} was killed")

    def on_kill(self, sever: Callable[[], None]) -> None:
        """Call `sever` when the process is killed, as its host's operating system would."""
        self._severers.append(sever)

    def on_pause(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the process is paused."""
        self._pausers.append(stop)

    def on_resume(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the process is resumed, after its held handles are ready."""
        self._resumers.append(go_on)

    def kill(self) -> None:
        """End the process between two callbacks, as SIGKILL does. A second kill has no effect."""
        if not self.alive:
            return
        self._loop.record(f"{self.name} is killed")
        self.alive = self.running = False
        self._loop.keep_remains_of(self)
        # Without an owner: a process may kill itself, and the work of its host must outlive it.
        Context().run(self._sever)

    def pause(self) -> None:
        """SIGSTOP: the process stands still until `resume`. Has no effect if it is paused or dead."""
        if not self.running:
            return
        self._loop.record(f"{self.name} is paused")
        self.paused, self.running = True, False
        self._paused_at_s = self._loop.now_s
        Context().run(_call_all, self._pausers)

    def resume(self) -> None:
        """SIGCONT: held handles run, in order. Has no effect if the process is not paused or is dead.

        Callbacks come first. Expired timers run before or after the bytes that the network has delivered meanwhile, at
        random, because event loops differ in that order.
        """
        if not self.paused or not self.alive:
            return
        self._loop.record(f"{self.name} is resumed")
        self.paused, self.running = False, True
        self.paused_s += self._loop.now_s - self._paused_at_s
        held, self.held = self.held, []
        timers = [handle for handle in held if isinstance(handle, asyncio.TimerHandle)]
        self._loop.make_ready(handle for handle in held if not isinstance(handle, asyncio.TimerHandle))
        timers_first = self._loop.random.random() < 0.5
        if timers_first:
            self._loop.make_ready(timers)
        Context().run(_call_all, self._resumers)
        if not timers_first:
            self._loop.make_ready(timers)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended."""
        return [task for task in asyncio.all_tasks(self._loop) if getattr(task, "process", None) is self]

    def _sever(self) -> None:
        _call_all(self._severers)
        callers, self._callers = self._callers, {}
        for outcome in callers:
            if not outcome.done():
                outcome.set_exception(ProcessKilled(f"{self.name} was killed"))


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in list(functions):
        function()
