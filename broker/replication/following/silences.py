"""Since when another broker is silent, as far as the fetches between the two show.

A broker that hangs, or whose host is gone, loses no connection, and its ZooKeeper session lasts for seconds. Fetches
stop at once: brokers that share partitions fetch from each other all the time. Whether a lost broker had been silent
before is recorded in the timeline, so that the story of a failover begins where the fault did.
"""

import math
from typing import NamedTuple

from minibroker.protocol.world import Clock

ALLOWANCE_S = 1.0
"""A broker is silent if its next fetch or answer is later than due by this much: fetches are paused after errors, and
busy brokers are slow."""
RECENT_S = 2.0
"""A broker that has woken up is heard at once, and is replaced as leader soon after: for so long its silence counts."""


class Silence(NamedTuple):
    """Of a broker, in seconds before the present time."""

    began_s: float
    heard_again_s: float | None
    """None: it is still silent."""


class _Ended(NamedTuple):
    began_s: float
    ended_s: float


class Silences:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[int, tuple[float, float]] = {}
        """When a fetch or an answer of a broker arrived, and until when the next one is due."""
        self._ended: dict[int, _Ended] = {}
        """The last silence of each broker."""

    def heard(self, broker_id: int, next_within_ms: int) -> None:
        """A fetch of that broker, or its answer to one, has arrived; the next one follows within this time."""
        now_s = self._clock.monotonic()
        heard_s, due_s = self._heard.get(broker_id, (now_s, now_s))
        if now_s > due_s:
            self._ended[broker_id] = _Ended(heard_s, now_s)
        self._heard[broker_id] = now_s, now_s + next_within_ms / 1_000 + ALLOWANCE_S

    def replaced(self, broker_id: int) -> None:
        """The broker was replaced, and its silence told: nothing is expected of it until it is heard again. A broker
        that comes back from the dead was not silent meanwhile."""
        self._heard[broker_id] = self._clock.monotonic(), math.inf
        self._ended.pop(broker_id, None)

    def present_or_recent(self, broker_id: int, expected_since_s: float) -> Silence | None:
        """Return the broker's present or recent silence, if its fetches or answers were expected since
        `expected_since_s`. None: it was heard all the time."""
        now_s = self._clock.monotonic()
        heard_s, due_s = self._heard.get(broker_id, (expected_since_s, expected_since_s))
        heard_again_s = None
        if now_s <= due_s:
            ended = self._ended.get(broker_id)
            if ended is None or now_s - ended.ended_s > RECENT_S:
                return None
            heard_s, heard_again_s = ended.began_s, now_s - ended.ended_s
        began_s = now_s - max(heard_s, expected_since_s)
        return Silence(began_s, heard_again_s) if began_s > ALLOWANCE_S else None
