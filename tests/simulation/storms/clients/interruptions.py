"""Users who do not wait until a call is over: they cancel it, as `asyncio.timeout` does, and go on with the client; or
they close the client, from another task.

Promised is that the call ends at once, and with it whatever it had still to do: what it has sent may be carried out,
once, and before anything that the same client does later.
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
    """Not by `ensure_future`: where no loop runs, as when a killed process is buried, that makes one, which stays."""

    async def wait() -> T:
        return await call

    return asyncio.get_running_loop().create_task(wait())


async def patiently(ending: asyncio.Future[T], within_s: float) -> None:
    """Until it is done, or has had its time, and a moment more: where the clock of this process jumps, all its timers
    are due at once, and this one may come first."""
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
    """Make a call, or begin it only. Returns whether it has come to its end. Raises what it raises."""
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
