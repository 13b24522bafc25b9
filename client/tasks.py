"""Background tasks that have an owner, and primitives that wake waiting coroutines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import ParamSpec
from weakref import WeakMethod

P = ParamSpec("P")


class Pulse:
    """`wait` returns at the next `notify`. The caller then checks its condition again: notifications are not kept."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def notify(self) -> None:
        # Event.set completes the futures of all waiters; clearing at once makes the next `wait` wait again.
        self._event.set()
        self._event.clear()


class Turns:
    """Lets coroutines pass one by one, in the order of their arrival, while `is_open` returns True.

    The next coroutine passes after the previous one has had a turn of the event loop, so that `is_open` sees how much
    room that one took. So no coroutine is overtaken, and room for one is not given to all. (Kafka's BufferPool is as
    fair.)
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_clear(self) -> bool:
        """Whether a coroutine would pass without waiting."""
        return not self._waiting and self._is_open()

    async def wait(self) -> None:
        """Wait for this coroutine's turn, or for `let_all_through`, which does not ask `is_open`."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        self.look()
        try:
            await turn
        finally:
            self._waiting.remove(turn)
            loop.call_soon(self.look)

    def look(self) -> None:
        """Let the next coroutine pass, if `is_open`. Call it when that may have changed."""
        if self._waiting and not self._waiting[0].done() and self._is_open():
            self._waiting[0].set_result(None)

    def let_all_through(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


class BackgroundTasks:
    """The tasks of one client. If a task raises, that is a bug, and `on_crash` is called at once, in the loop.

    `close` cancels the tasks that still run, and waits for their end. Only the end of the event loop cancels them
    otherwise: `asyncio.run` first cancels all tasks of its loop.
    """

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._has_lost_one = False
        """A task was cancelled and has ended."""
        self._is_closed = False
        self._replaced: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended yet and were replaced by others."""

    @property
    def are_cancelled(self) -> bool:
        """Whether the event loop has cancelled the tasks: all of them, since `asyncio.timeout` cancels a single one for
        a moment."""
        if self._has_lost_one or self._is_closed:
            return not self._is_closed
        count = 0
        for task in self._tasks:
            if task not in self._replaced:
                if not task.cancelling():
                    return False
                count += 1
        return count > 0

    def replace_all(self) -> None:
        """Note that the owner starts other tasks in place of the cancelled ones."""
        self._has_lost_one = False
        self._replaced.update(self._tasks)

    def start(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if task in self._replaced:
            self._replaced.remove(task)
        elif task.cancelled():
            self._has_lost_one = True
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)

    async def close(self) -> None:
        self._is_closed = True
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def weakly(listener: Callable[P, None]) -> Callable[P, None]:
    """Return a listener that calls a method without keeping its object alive. If a task held its client, the client
    could not be collected after it was dropped without `close`."""
    reference = WeakMethod(listener)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        method = reference()
        if method is not None:
            method(*arguments, **named)

    return call


class Waker:
    """Lets a task that works in steps sleep until it is woken or until a time."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def sleep(self, delay_s: float | None) -> None:
        """Sleep until `wake`, at most for `delay_s`; not at all if `wake` was called since the last sleep."""
        if not self._event.is_set():
            timer = None
            if delay_s is not None:
                timer = asyncio.get_running_loop().call_later(delay_s, self._event.set)
            try:
                await self._event.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        self._event.clear()
