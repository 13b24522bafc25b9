"""Reports what makes no progress for long in the log: once when that is noticed, and once when it is over.

A task that works in steps calls `look` about once in LOOK_EVERY_S with what it is waiting for just then. So nothing is
noted, and no clock is read, for records, batches or requests that go well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from minibroker.client.log import Logger

K = TypeVar("K")

logger = Logger("minibroker.client.stalls")

STALL_S = 5.0
"""After so long, waiting is a stall: a failover, and a metadata refresh or two, take less."""

LOOK_EVERY_S = 1.0
LATE_LOOK_S = 2 * LOOK_EVERY_S
_NAMES_SHOWN = 5


class Stalls(Generic[K]):
    """The stalls of one client, `who`. `name` turns what waits, for instance a partition, into text; `remedy` ends what
    is said where the reason names no command."""

    def __init__(
        self,
        who: str,
        name: Callable[[K], str] = str,
        remedy: str = ". See `minibroker status`",
        *,
        is_regular: bool = False,
    ) -> None:
        """`is_regular`: `look` comes every LOOK_EVERY_S as long as anything waits, so one that comes late says that the
        event loop stood still, and nothing of who is waited for."""
        self._who = who
        self._name = name
        self._remedy = remedy
        self._since: dict[K, float] = {}
        self._told: dict[K, float] = {}
        """Since when those have waited for which there was a warning."""
        self._is_regular = is_regular
        self._looked_s = 0.0

    def look(self, now: float, waiting: Collection[K], reason: Callable[[K], str]) -> None:
        """`waiting` is all that makes no progress. Logs a WARNING with a reason and a remedy for what has been in it
        for STALL_S, and an INFO for what was reported and is no longer in it: one line each, however many there are."""
        stood_still_s = max(0.0, now - self._looked_s - LATE_LOOK_S) if self._is_regular and self._since else 0.0
        self._looked_s = now
        self._since = {key: self._since.get(key, now - stood_still_s) + stood_still_s for key in waiting}
        over = {key: since for key, since in self._told.items() if key not in self._since}
        for key in over:
            del self._told[key]
        if over:
            took_s = now - min(over.values())
            logger.info("%s: the stall of %s is over after %.1f s", self._who, self._names(list(over)), took_s)
        new = {key: since for key, since in self._since.items() if now >= since + STALL_S and key not in self._told}
        if new:
            self._told |= new
            first = next(iter(new))
            why = reason(first)
            remedy = "" if "`minibroker " in why else self._remedy
            logger.warning(
                "%s: no progress for %.1f s of %s: %s%s",
                self._who,
                now - min(new.values()),
                self._names(list(new)),
                why.rstrip("."),
                remedy,
            )

    def give_up(self, keys: Collection[K]) -> None:
        """These have failed: nothing is over, and whoever waits for them is told so elsewhere."""
        for key in keys:
            self._since.pop(key, None)
            self._told.pop(key, None)

    def is_told(self, key: K) -> bool:
        """Whether there was a warning of it, and it still waits."""
        return key in self._told

    @property
    def is_any(self) -> bool:
        """Whether anything waited when `look` was called last."""
        return bool(self._since)

    def _names(self, keys: list[K]) -> str:
        names = ", ".join(self._name(key) for key in keys[:_NAMES_SHOWN])
        return names if len(keys) <= _NAMES_SHOWN else f"{names} and {len(keys) - _NAMES_SHOWN} more"
