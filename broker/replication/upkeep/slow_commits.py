"""Records for which acks=all has waited long, although no follower is far behind.

The problem: a follower whose fetches take a second each has nearly everything whenever one looks, and yet acks=all
waits a second for each record.

The choice: each wait for replicas knows how long it lasted. The follower whose fetch has ended it is the slowest. If a
change of the ISR has ended it, the follower that was waited for is out of sync, which is told elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from minibroker.broker.replication.partition import Partition
from minibroker.protocol.model import TopicPartition

SLOW_S = 1.0
WINDOW_S = 10.0
MOST_REMEMBERED = 1_000
_JUST_NOW_S = 0.1
"""Since the fetch that moved the high watermark, when the wait for it ends."""


class SlowCommit(NamedTuple):
    partition: TopicPartition
    broker_id: int
    """The follower."""
    times: int
    longest_s: float


class _Wait(NamedTuple):
    ended_s: float
    partition: TopicPartition
    broker_id: int
    took_s: float


class SlowCommits:
    """The long waits of the last WINDOW_S, at most MOST_REMEMBERED."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.on_time_s = monotonic
        """The time in which this broker's own event loop did not stand still (`LoopLag.on_time_s`): no follower is to
        blame for the rest."""
        self._waits: deque[_Wait] = deque(maxlen=MOST_REMEMBERED)

    def committed(self, partition: Partition, isr: tuple[int, ...], began_s: float) -> None:
        """Note that records of the partition are committed, which have waited since `began_s` of `on_time_s` and were
        appended with this ISR. Another one now may have ended the wait, and the followers that are left had the records
        before."""
        took_s = self.on_time_s() - began_s
        if took_s < SLOW_S or isr != partition.isr:
            return
        now_s = self._monotonic()
        fetched = [
            (follower.last_fetch_s, broker_id)
            for broker_id, follower in partition.followers.items()
            if broker_id in isr and now_s - follower.last_fetch_s <= _JUST_NOW_S
        ]
        if fetched:
            _, slowest = max(fetched)
            self._waits.append(_Wait(now_s, partition.topic_partition, slowest, took_s))

    def recent(self) -> Iterator[SlowCommit]:
        """Yield the waits for each follower of each partition as one, the longest first."""
        since_s = self._monotonic() - WINDOW_S
        found: dict[tuple[TopicPartition, int], list[float]] = {}
        for wait in self._waits:
            if wait.ended_s >= since_s:
                found.setdefault((wait.partition, wait.broker_id), []).append(wait.took_s)
        for (partition, broker_id), took_s in sorted(found.items(), key=lambda one: max(one[1]), reverse=True):
            yield SlowCommit(partition, broker_id, len(took_s), max(took_s))
