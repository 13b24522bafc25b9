"""Background tasks that have an owner, and ways to wake coroutines that wait."""

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
    """Lets coroutines pass one by one, in the order in which they came, while `is_open` says so.

    The next one is let through when the one before has had its turn of the event loop: what it does with the room that
    there was is then seen by `is_open`. So no coroutine is overtaken, however greedy the others are, and room for one
    is not given to all. (Kafka's BufferPool is as fair.)
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_clear(self) -> bool:
        """Whether a coroutine would pass at once."""
        return not self._waiting and self._is_open()

    async def wait(self) -> None:
        """Until it is this coroutine's turn; it may be told so although `is_open` does not, by `let_all_through`."""
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
        """To be called when `is_open` may have changed."""
        if self._waiting and not self._waiting[0].done() and self._is_open():
            self._waiting[0].set_result(None)

    def let_all_through(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


class BackgroundTasks:
    """The tasks of one client. A task that raises is a bug: `on_crash` is called at once, in the loop.

    `close` cancels the tasks that still run, and waits for them to end. Nothing else cancels one of them, apart from an
    event loop that ends: `asyncio.run` cancels all tasks of its loop first, whoever owns them.
    """

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._has_lost_one = False
        """A task has ended because it was cancelled."""
        self._is_closed = False
        self._replaced: set[asyncio.Task[None]] = set()
        """Tasks that are cancelled and have not ended yet, in whose place there are others."""

    @property
    def are_cancelled(self) -> bool:
        """Whether the event loop has cancelled them. All of them count: `asyncio.timeout` cancels a single one for a
        moment."""
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
        """The owner starts others in place of those that are cancelled."""
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
    """A method as a listener that does not keep its object alive: if a task held its client, the garbage collector
    could not notice that it was dropped without `close`."""
    reference = WeakMethod(listener)

    def call(*arguments: P.args, **named: P.kwargs) -> None:
        method = reference()
        if method is not None:
            method(*arguments, **named)

    return call


class Waker:
    """The alarm clock of a task that works in steps: it sleeps until it is woken or its time has come."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def sleep(self, delay_s: float | None) -> None:
        """Until `wake`, or for `delay_s`; not at all if `wake` was called since the last sleep."""
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
