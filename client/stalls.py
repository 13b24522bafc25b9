"""Stalls in the log: one line when something has made no progress for long, and one when that is over.

A task that works in steps calls `look` about every LOOK_EVERY_S with the things that it is waiting for. So records,
batches and requests that proceed normally cost no note and no look at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from minibroker.client.log import Logger
from minibroker.protocol.words import counted

K = TypeVar("K")

logger = Logger("minibroker.client.stalls")

STALL_S = 5.0
"""A wait of this length is a stall. A failover with one or two metadata refreshes takes less."""

LOOK_EVERY_S = 1.0
LATE_LOOK_S = 2 * LOOK_EVERY_S
_NAMES_SHOWN = 5
_REASONS_SHOWN = 3


class Stalls(Generic[K]):
    """The stalls of one client, `who`. `name` turns a key, for instance a partition, into text. `remedy` ends the
    message if the reason names no command."""

    def __init__(
        self,
        who: str,
        name: Callable[[K], str] = str,
        remedy: str = ". See `minibroker status`",
        *,
        is_regular: bool = False,
    ) -> None:
        """`is_regular`: `look` is called every LOOK_EVERY_S as long as anything waits. So a late call means that the
        event loop stood still, and that time does not count as a stall."""
        self._who = who
        self._name = name
        self._remedy = remedy
        self._since: dict[K, float] = {}
        self._told: dict[K, float] = {}
        """The keys for which a warning was logged, and since when they have waited."""
        self._is_regular = is_regular
        self._looked_s = 0.0

    def look(self, now: float, waiting: Collection[K], reason: Callable[[K], str]) -> None:
        """Log the stalls that began or ended. `waiting` has all keys that make no progress.

        A key that has been in it for STALL_S gets a WARNING with reason and remedy. A key that was reported and is no
        longer in it gets an INFO. All keys of a call share one line each."""
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
            why = self._why(new, reason)
            remedy = "" if "`minibroker " in why else self._remedy
            logger.warning(
                "%s: no progress for %.1f s of %s: %s%s",
                self._who,
                now - min(new.values()),
                self._names(list(new)),
                why,
                remedy,
            )

    def _why(self, keys: Collection[K], reason: Callable[[K], str]) -> str:
        """Return the reasons, each with its keys if there are several."""
        by_reason: dict[str, list[K]] = {}
        for key in keys:
            by_reason.setdefault(reason(key).rstrip("."), []).append(key)
        if len(by_reason) == 1:
            return next(iter(by_reason))
        shown = list(by_reason.items())[:_REASONS_SHOWN]
        told = [why if self._names(those) in why else f"{self._names(those)}: {why}" for why, those in shown]
        more = len(by_reason) - len(shown)
        return "; ".join(told) + (f"; and {counted(more, 'other reason')}" if more else "")

    def give_up(self, keys: Collection[K]) -> None:
        """Forget keys that have failed. Their stall did not end well, and the failure is reported elsewhere."""
        for key in keys:
            self._since.pop(key, None)
            self._told.pop(key, None)

    def is_told(self, key: K) -> bool:
        """Return whether a warning was logged for the key, and it still waits."""
        return key in self._told

    @property
    def is_any(self) -> bool:
        """Whether any key waited at the last `look`."""
        return bool(self._since)

    def _names(self, keys: list[K]) -> str:
        names = ", ".join(self._name(key) for key in keys[:_NAMES_SHOWN])
        return names if len(keys) <= _NAMES_SHOWN else f"{names} and {len(keys) - _NAMES_SHOWN} more"
