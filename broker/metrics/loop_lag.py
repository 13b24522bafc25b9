"""How late the timers of the event loop are."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable

PROBE_INTERVAL_S = 0.1
PROBES_PER_WINDOW = 600


class LoopLag:
    """The lateness of the loop's timers, measured ten times a second while `probe` runs. uvloop's timers have a
    resolution of one millisecond, so smaller values mean nothing."""

    BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._probed_s = clock()
        self._on_time_s = 0.0
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        """Probes by the smallest bound that they did not exceed; the last counter is for those beyond all bounds."""
        self.sum_s = 0.0
        self._max_s = 0.0
        self._max_before_s = 0.0
        self._probes = 0

    @property
    def max_s(self) -> float:
        """The largest lag of the last one to two minutes."""
        return max(self._max_s, self._max_before_s)

    def observe(self, lag_s: float) -> None:
        if self._probes == PROBES_PER_WINDOW:
            self._max_before_s, self._max_s, self._probes = self._max_s, 0.0, 0
        self._probes += 1
        self._max_s = max(self._max_s, lag_s)
        self.sum_s += lag_s
        self.counts[bisect_left(self.BOUNDS_S, lag_s)] += 1

    def on_time_s(self) -> float:
        """Return a clock's seconds that stand still while the loop does: while it waits for a disk, or the process is
        stopped."""
        return self._on_time_s + min(self._clock() - self._probed_s, 2 * PROBE_INTERVAL_S)

    async def probe(self, running_s: Callable[[], float], on_lag: Callable[[float, float], None]) -> None:
        """Measure until cancelled. `on_lag` is called with each lag, and with the part of it in which the process did
        not run, by `running_s` (`RunningTime.seconds`)."""
        while True:
            began_s, had_run_s = self._clock(), running_s()
            await asyncio.sleep(PROBE_INTERVAL_S)
            self._on_time_s, self._probed_s = self.on_time_s(), self._clock()
            elapsed_s = self._probed_s - began_s
            lag_s = max(0.0, elapsed_s - PROBE_INTERVAL_S)
            self.observe(lag_s)
            on_lag(lag_s, min(lag_s, max(0.0, elapsed_s - (running_s() - had_run_s))))
