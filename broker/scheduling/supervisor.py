"""Owns the broker's background tasks: each is awaited, ends with the broker, and reports its failure."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Supervisor:
    """Starts tasks, waits for the first that fails, and ends them all.

    A task that ends normally is forgotten. An exception is a broken invariant of the whole broker: `failure` receives
    it, and its awaiter stops the broker.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self.watch(task)
        return task

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Own a task that was started elsewhere."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """Stop the broker because of this error, unless it is stopping already."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self.fail(error)

    async def close(self) -> None:
        """Cancel all remaining tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failure.done() and not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio does not report it a second time
        else:
            self.failure.cancel()
