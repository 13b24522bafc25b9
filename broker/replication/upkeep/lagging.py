"""Followers that lag behind this leader although their brokers live.

The problem: a follower under constant load is always one fetch behind, and the leader knows of one of a quiet partition
only what it knew at its last fetch. Neither is slow.

The choice: a follower counts if it has not been caught up for LAGGING_AFTER_S, and a moment later still lacks what the
leader had before. One that has just been answered has it by then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from minibroker.broker.replication.isr import Follower
from minibroker.broker.replication.partition import Partition
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.model import TopicPartition

LAGGING_AFTER_S = 1.0
CONFIRMED_AFTER_S = 0.3


class Lagging(NamedTuple):
    partition: TopicPartition
    broker_id: int
    records: int
    """Those that it lacks."""
    behind_s: float | None
    """Since it had everything. None: it never had, since this broker leads."""
    silent_s: float
    """Since its last fetch, or since this broker leads."""
    is_in_sync: bool


class _Suspect(NamedTuple):
    partition: Partition
    broker_id: int
    end: int
    """The leader's, at that moment."""


async def lagging_followers(
    partitions: Iterable[Partition], is_alive: Callable[[int], bool], monotonic: Callable[[], float]
) -> list[Lagging]:
    """Return those that lag, the ones that are behind for the longest first. If there are suspects, this takes
    CONFIRMED_AFTER_S. `is_alive` says whether the controller counts a broker as live."""
    slices = Slices()
    found: list[_Suspect] = []
    for partition in partitions:
        found += suspects(partition, is_alive, monotonic())
        await slices.breathe()
    if not found:
        return []
    await asyncio.sleep(CONFIRMED_AFTER_S)
    now_s = monotonic()
    lagging = [late for suspect in found if (late := confirmed(suspect, now_s)) is not None]
    return sorted(lagging, key=lambda late: math.inf if late.behind_s is None else late.behind_s, reverse=True)


def suspects(partition: Partition, is_alive: Callable[[int], bool], now_s: float) -> Iterator[_Suspect]:
    """Yield the followers that may lag."""
    if not partition.is_leader or now_s - partition.role_since_s < LAGGING_AFTER_S:
        return
    end = partition.log.log_end_offset
    for broker_id, follower in partition.followers.items():
        is_behind = _has(partition, broker_id, follower) < end and now_s - follower.last_caught_up_s >= LAGGING_AFTER_S
        if is_behind and is_alive(broker_id):
            yield _Suspect(partition, broker_id, end)


def confirmed(suspect: _Suspect, now_s: float) -> Lagging | None:
    """Return the follower if it still lags."""
    partition, broker_id, end = suspect
    follower = partition.followers.get(broker_id)
    if follower is None or (has := _has(partition, broker_id, follower)) >= end:
        return None
    behind_s = now_s - follower.last_caught_up_s
    return Lagging(
        partition.topic_partition,
        broker_id,
        partition.log.log_end_offset - has,
        None if math.isinf(behind_s) else behind_s,
        now_s - max(follower.last_fetch_s, partition.role_since_s),
        broker_id in partition.isr,
    )


def _has(partition: Partition, broker_id: int, follower: Follower) -> int:
    """Return the offset up to which the follower has what the leader has, as far as that is known: in sync, it has all
    that is committed, also before its first fetch from this leader."""
    committed = partition.high_watermark if broker_id in partition.isr else 0
    return max(follower.log_end_offset, partition.log.log_start_offset, committed)
