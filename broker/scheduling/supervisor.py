"""The owner of the broker's background tasks: none runs unwatched, none outlives the broker, no failure goes unseen."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Supervisor:
    """Starts tasks, waits for the first that fails, and ends them all.

    A task that ends normally is forgotten. One that raises is a broken invariant of the whole broker: `failure`
    gets its exception, and whoever awaits that stops the broker.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self.watch(task)
        return task

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Own a task that somebody else started."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """Stop the broker for this reason, unless it is stopping already."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            self.fail(error)

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failure.done() and not self.failure.cancelled():
            self.failure.exception()  # seen: an unawaited failure must not be reported a second time
        else:
            self.failure.cancel()
