"""Waiting for a condition with a deadline, in real or virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 60.0, every_s: float = 0.005) -> None:
    """Wait until the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (conditions of other processes have no event)
            await asyncio.sleep(every_s)
