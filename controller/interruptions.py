"""Which interruptions of a broker's service its timeline keeps: a stall of the broker, a time without ZooKeeper. Pure.

The problem: a broker that stands still for 4 s, and continues before its session ends, stops all writes to what it
leads, and no controller has anything to decide, hence to record.

The choice: the broker records it afterwards, if it was long enough to be noticed. A machine that is always overloaded
must not push the failovers out of the timeline, which has a bounded number of entries, so their number within some
minutes is limited, and the next entry says how many were left out.

Rejected: at most one entry every few seconds, which drops the longer one of two pauses in a row; stalls of the
event loop by a slow disk (the entry would be written to that disk, and stall the loop again; `disk_times` measures it).
"""

from __future__ import annotations

from collections import deque

LEAST_S = 1.0
MOST = 10
WITHIN_S = 600.0


def stalled_s(lag_s: float, stopped_s: float) -> float:
    """Return for how long the broker was stopped, if its event loop was late by `lag_s`, and its process did not run
    for `stopped_s` of it. 0: its process ran."""
    return lag_s if stopped_s > lag_s / 2 else 0.0


class Interruptions:
    """Those of one kind."""

    def __init__(self) -> None:
        self._recorded_s: deque[float] = deque(maxlen=MOST)
        self._unrecorded = 0

    def ended(self, lasted_s: float, now_s: float) -> dict[str, object] | None:
        """Return what to record of an interruption that ends now. None: nothing, since it was short or there were many
        of them."""
        if lasted_s < LEAST_S:
            return None
        if len(self._recorded_s) == MOST and now_s - self._recorded_s[0] < WITHIN_S:
            self._unrecorded += 1
            return None
        self._recorded_s.append(now_s)
        details: dict[str, object] = {"lasted_ms": round(lasted_s * 1_000, 3)}
        if self._unrecorded:
            details["unrecorded"] = self._unrecorded
            self._unrecorded = 0
        return details
