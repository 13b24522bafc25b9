"""The clock by which committed offsets age: it stops while the process is suspended.

The problem. While brokers are stopped (SIGSTOP, a suspended machine), no consumer can commit. If that time counted, the
offsets of an idle consumer, which commits them every few seconds, would expire before its next commit. The clock is
therefore read at regular steps, and time beyond two steps between two readings does not count (as for producers, see
`storage/producer_state.py`).
"""

from __future__ import annotations

import math

from minibroker.protocol.world import Clock

STEPS_IN_RETENTION = 6
"""A suspension counts as at most two steps, a third of the retention of an unused offset."""


def steps_between_checks(check_interval_s: float, retention_s: float) -> int:
    """Return the number of readings of the clock between two checks for expired offsets."""
    return max(1, math.ceil(STEPS_IN_RETENTION * check_interval_s / retention_s))


class Ageing:
    def __init__(self, clock: Clock, step_s: float) -> None:
        self._clock = clock
        self.step_s = step_s
        """Seconds between two readings."""
        self._counted_s = 0.0
        self._looked_at_s = clock.monotonic()

    @property
    def now_s(self) -> float:
        return self._counted_s + min(self._clock.monotonic() - self._looked_at_s, 2 * self.step_s)

    def look(self) -> None:
        self._counted_s = self.now_s
        self._looked_at_s = self._clock.monotonic()
