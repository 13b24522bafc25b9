"""Waiting for a condition with a deadline, in real or virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable

from minibroker.deploy.simulator.waiting import until as until


def until_true(condition: Callable[[], object], within_s: float = 300.0, every_s: float = 0.05) -> None:
    """Like `until`, without an event loop."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s:.0f} s")
        time.sleep(every_s)
