"""The clock by which committed offsets age: it stands still while the process does.

The problem. While brokers are stopped (SIGSTOP, a suspended machine) no consumer can commit. If that time counted, the
offsets of an idle consumer that commits them every few seconds would expire before it is heard of again. So the clock
is looked at every so often, and what passes beyond two such steps between two looks does not count (as for producers,
see `storage/producer_state.py`).
"""

from __future__ import annotations

import math

from minibroker.protocol.world import Clock

STEPS_IN_RETENTION = 6
"""A stop counts for at most two steps, a third of the time after which an unused offset expires."""


def steps_between_checks(check_interval_s: float, retention_s: float) -> int:
    """How often the clock is looked at from one check of what has expired to the next."""
    return max(1, math.ceil(STEPS_IN_RETENTION * check_interval_s / retention_s))


class Ageing:
    def __init__(self, clock: Clock, step_s: float) -> None:
        self._clock = clock
        self.step_s = step_s
        """A look is due this long after the last one."""
        self._counted_s = 0.0
        self._looked_at_s = clock.monotonic()

    @property
    def now_s(self) -> float:
        return self._counted_s + min(self._clock.monotonic() - self._looked_at_s, 2 * self.step_s)

    def look(self) -> None:
        self._counted_s = self.now_s
        self._looked_at_s = self._clock.monotonic()
