"""A token bucket (Kafka's TokenBucket). Pure."""

from __future__ import annotations

from typing import Any, TypeVar

MOST_REMEMBERED = 10_000
"""Clients whose limits and rates are remembered. Beyond that, those that were looked up first are forgotten: a client
that changes its id can start anew in any case."""


_Key = TypeVar("_Key")

_ROUNDING_S = 1e-6
"""Who waits for the overdraft does not find a rest of it, left by the rounding of numbers."""


class TokenBucket:
    """Holds up to `burst` tokens, is full at first, and gains `rate` tokens per second.

    The tokens may become negative: whoever takes many must be let in at some time, and those after it wait longer.
    """

    __slots__ = ("_burst", "_filled_at_s", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._filled_at_s = now_s

    def change(self, rate: float, burst: float, now_s: float) -> None:
        """Change the rate from now on. A bucket that was overdrawn stays so."""
        self._fill(now_s)
        self._rate, self._burst = rate, burst
        self._tokens = min(self._tokens, burst)

    def take(self, count: float, now_s: float) -> None:
        self._fill(now_s)
        self._tokens -= count

    def put_back(self, count: float, now_s: float) -> None:
        """Undo `take`."""
        self.take(-count, now_s)
        self._tokens = min(self._tokens, self._burst)

    def overdraft_s(self, now_s: float) -> float:
        """Return the seconds after which the tokens are no longer negative; 0.0 if they are not now."""
        self._fill(now_s)
        seconds = -self._tokens / self._rate
        return seconds if seconds > _ROUNDING_S else 0.0

    def _fill(self, now_s: float) -> None:
        if now_s > self._filled_at_s:
            self._tokens = min(self._burst, self._tokens + (now_s - self._filled_at_s) * self._rate)
            self._filled_at_s = now_s


def make_room(remembered: dict[_Key, Any]) -> None:
    if len(remembered) >= MOST_REMEMBERED:
        del remembered[next(iter(remembered))]
