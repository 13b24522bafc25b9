"""Users that cancel a call, as `asyncio.timeout` does, and continue to use the client; or close it from another task.

The call must end at once and do nothing more. A request that was sent before may be carried out, once, and before any
later request of the same client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from tests.simulation.storms.verdicts.history import Anomaly

T = TypeVar("T")

AT_ONCE_S = 0.05


def begun(call: Awaitable[T]) -> asyncio.Task[T]:
    """Start a call. `ensure_future` would create an event loop if none runs, as when a killed process is cleaned up."""

    async def wait() -> T:
        return await call

    return asyncio.get_running_loop().create_task(wait())


async def patiently(ending: asyncio.Future[T], within_s: float) -> None:
    """Wait until it is done or the time is over, and a moment longer: after a clock jump all timers of the process are
    due at once, and this one may fire first."""
    await asyncio.wait([ending], timeout=within_s)
    if not ending.done():
        await asyncio.wait([ending], timeout=AT_ONCE_S)


async def may_be_interrupted(
    call: Coroutine[Any, Any, None],
    random: Random,
    accuse: Callable[[Anomaly], None],
    event: Callable[[str], None],
    who: str,
    close: Callable[[], Awaitable[None]],
) -> bool:
    """Make a call and possibly interrupt it. Return whether it ended by itself. Raise its error."""
    how = random.random()
    if how > 0.15:
        await call
        return True
    is_closed = how < 0.05
    event("a client is closed in the middle of a call" if is_closed else "a call is cancelled")
    calling = begun(call)
    try:
        await asyncio.wait([calling], timeout=random.choice([0.002, 0.05, 1.0, 5.0]) * random.random())
        if is_closed:
            await close()
        else:
            calling.cancel()
        await patiently(calling, AT_ONCE_S)
    finally:
        calling.cancel()
    if not calling.done():
        accuse(Anomaly("a call goes on", f"{who}: {'its client is closed' if is_closed else 'it was cancelled'}"))
    elif not calling.cancelled():
        calling.result()
        return True
    return False
