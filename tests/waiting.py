"""Waiting for a condition with a deadline, in real or virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 60.0, every_s: float = 0.005) -> None:
    """Wait until the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(every_s)


def until_true(condition: Callable[[], object], within_s: float = 120.0, every_s: float = 0.05) -> None:
    """Like `until`, without an event loop."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s:.0f} s")
        time.sleep(every_s)
