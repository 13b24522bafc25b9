"""A bound on the memory of what clients create at a coordinator and may leave there: groups with their offsets, and
transactional ids.

The problem. Kafka forgets these after days, and a client can create millions within hours. Nothing may be forgotten
earlier, because it was acknowledged. So new ones are refused beyond a limit that no honest cluster reaches; the
existing ones go on as before.

The choice. Additions are estimated as they happen. Removals are not: all is counted anew, in slices, when three
quarters of the limit may be in use, after a load, and then at intervals.
"""

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.coordinating")

COUNT_INTERVAL_S = 10.0
LOG_INTERVAL_S = 60.0
MOST_KEPT_BYTES = 512 * 1024 * 1024
"""Of the groups of a broker, and of its transactional ids: about a million committed offsets."""
FEW = 1_000
"""Groups or transactional ids of a partition that need not be counted after it was loaded."""


class KeptMemory:
    def __init__(
        self,
        limit: int,
        what: str,
        sizes: Callable[[], Iterable[int]],
        clock: Clock,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        """`sizes` returns the memory of each `what` that is kept, and may be iterated over with pauses."""
        self.limit = limit
        self.kept = 0
        self.refused = 0
        """Number of additions refused so far."""
        self._what = what
        self._sizes = sizes
        self._clock = clock
        self._start_task = start_task
        self._is_counting = False
        self._count_after_s = float("-inf")
        self._log_after_s = float("-inf")

    def add(self, size: int) -> bool:
        """Return whether this fits, and count it if it does."""
        after = self.kept + size
        if after > self.limit * 3 // 4:
            if self._clock.monotonic() >= self._count_after_s:
                self.count_soon()
            if after > self.limit:
                self._refuse()
                return False
        self.kept = after
        return True

    def count_soon(self) -> None:
        """Count what is kept: it may have changed otherwise than by additions."""
        if not self._is_counting:
            self._is_counting = True
            self._start_task(self._count(), "count of the memory of a coordinator")

    async def _count(self) -> None:
        try:
            before, counted = self.kept, 0
            slices = Slices()
            for size in self._sizes():
                counted += size
                await slices.breathe()
            self.kept = counted + max(0, self.kept - before)  # additions meanwhile, some of them twice
        finally:
            self._is_counting = False
            self._count_after_s = self._clock.monotonic() + COUNT_INTERVAL_S

    def _refuse(self) -> None:
        self.refused += 1
        now_s = self._clock.monotonic()
        if now_s >= self._log_after_s:
            self._log_after_s = now_s + LOG_INTERVAL_S
            logger.warning(
                "the %ss of this broker would take more than %d bytes, %d additions were refused so far: delete unused "
                "ones, or restrict by ACLs who may create them",
                self._what,
                self.limit,
                self.refused,
            )
