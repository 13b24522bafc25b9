"""A rate over a sliding window, and the time that brings it back to its limit (Kafka's Rate and QuotaUtils). Pure."""

from __future__ import annotations

from collections import deque


class Rate:
    """Counts amounts in `windows` windows of `window_s` seconds, the last of which is in progress.

    A rate is the counted amount per second of at least `windows - 1` windows. So a client that was quiet may have that
    much at once.
    """

    __slots__ = ("_samples", "_total", "_window_s", "_windows")

    def __init__(self, windows: int, window_s: float) -> None:
        self._windows = windows
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()
        """The begin and the amount of each window that counts."""
        self._total = 0.0

    def record(self, amount: float, now_s: float) -> None:
        self._drop_old(now_s)
        self._total += amount
        if self._samples and now_s - self._samples[-1][0] < self._window_s:
            begin, before = self._samples[-1]
            self._samples[-1] = (begin, before + amount)
        else:
            self._samples.append((now_s, amount))

    def overdraft_s(self, limit: float, now_s: float) -> float:
        """Return the seconds without further amounts after which the rate is within the limit; 0.0 if it is now."""
        self._drop_old(now_s)
        if not self._samples:
            return 0.0
        measured_s = max(now_s - self._samples[0][0], (self._windows - 1) * self._window_s)
        return max(0.0, self._total / limit - measured_s)

    def is_quiet(self, now_s: float) -> bool:
        """Whether nothing counts any more."""
        self._drop_old(now_s)
        return not self._samples

    def _drop_old(self, now_s: float) -> None:
        oldest_s = now_s - self._windows * self._window_s
        while self._samples and self._samples[0][0] <= oldest_s:
            self._total -= self._samples.popleft()[1]
        if not self._samples:
            self._total = 0.0
