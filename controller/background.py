"""Background tasks. Their owner stops them; failures are reported at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable


def start_in_background(work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
    """Start a task whose failure goes to the loop's exception handler at once, not only when it is awaited."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_failure)
    return task


async def stop_in_background(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the tasks and wait until all have ended. Their exceptions have been reported already."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _report_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        return
    failure = task.exception()
    if failure is not None:
        task.get_loop().call_exception_handler(
            {"message": f"the task {task.get_name()!r} failed", "exception": failure, "task": task}
        )
