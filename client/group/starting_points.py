"""Where a consumer begins to read partitions for which its group has committed offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.group.commits import Commits, Committed
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_EPOCH, TopicPartition

RETRY_S = 1.0


def begin_at_committed(
    partitions: FetchedPartitions, states: Iterable[TopicPartitionState], committed: Mapping[TopicPartition, Committed]
) -> None:
    """Move each partition that has no position yet to its committed offset. An offset that was committed in an earlier
    topic of the same name does not count."""
    for state in states:
        at = committed.get(state.partition)
        if at is not None and not at.is_of_older_topic and state.position is None and state.generation == 0:
            epoch = NO_EPOCH if at.offset.leader_epoch is None else at.offset.leader_epoch
            partitions.move(state, at.offset.offset, epoch=epoch)
        state.awaits_committed = False
    partitions.wake()


async def begin_by_hand(
    partitions: FetchedPartitions,
    commits: Commits,
    states: Sequence[TopicPartitionState],
    patience_s: float,
) -> None:
    """Begin partitions that were assigned by hand. Tries until it succeeds; calls for records raise each failure."""
    if not states:
        return
    committed = None
    while committed is None:
        try:
            committed = await commits.fetch([state.partition for state in states], patience_s)
        except MinibrokerError as error:
            partitions.errors.append(error)
            partitions.pulse.notify()
            await asyncio.sleep(RETRY_S)
    begin_at_committed(partitions, states, committed)
    partitions.release(states)
