"""The traffic of topics, and the rates at which out-of-sync replicas catch up (Kafka's ReplicationQuotaManager, KIP-73)
and logs are compacted.

A broker has a rate for the bytes it sends as a leader, and one for those it fetches as a follower; topics name the
replicas to which they apply. While a rate is exceeded, such a partition is left out of the answer, or of the fetch. A
replica that is in sync is never held up. Nor does it count: in Kafka it does, and others starve where producers are
faster than the rate.
"""

from minibroker.protocol.world import Clock

ALL_REPLICAS = "*"
BURST_S = 1.0
"""Seconds within which unused rate may be made up for: followers do not ask at the first permitted moment."""


class Traffic:
    """The traffic of one topic's partitions on this broker (Kafka's BrokerTopicMetrics)."""

    __slots__ = ("bytes_in", "bytes_out", "messages_in", "replication_bytes_in", "replication_bytes_out")

    def __init__(self) -> None:
        self.bytes_in = 0
        self.messages_in = 0
        self.bytes_out = 0
        """Bytes sent to consumers."""
        self.replication_bytes_in = 0
        self.replication_bytes_out = 0


class Quota:
    """Over any time, no more than `bytes_per_s` times that, and `burst_s`, and one answer."""

    def __init__(self, bytes_per_s: float, clock: Clock, burst_s: float = BURST_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._clock = clock
        self.free_at_s = clock.monotonic() - burst_s
        """The monotonic time at which all recorded bytes will have had their time."""

    def record(self, size: int) -> None:
        begin_s = max(self.free_at_s, self._clock.monotonic() - self._burst_s)
        self.free_at_s = begin_s + size / self._bytes_per_s

    def change_rate(self, bytes_per_s: float) -> None:
        """Change the rate. Recorded bytes take less time at a higher rate, but no more time at a lower one: they were
        sent while that was allowed."""
        now_s = self._clock.monotonic()
        if self.free_at_s > now_s and bytes_per_s > self._bytes_per_s:
            self.free_at_s = now_s + (self.free_at_s - now_s) * (self._bytes_per_s / bytes_per_s)
        self._bytes_per_s = bytes_per_s

    @property
    def is_exceeded(self) -> bool:
        return self.free_at_s > self._clock.monotonic()


def is_throttled(replicas: str, partition: int, broker_id: int) -> bool:
    """Whether a topic's list of throttled replicas, `*` or `PARTITION:BROKER,...`, names this broker's replica."""
    return replicas == ALL_REPLICAS or f"{partition}:{broker_id}" in replicas.split(",")
