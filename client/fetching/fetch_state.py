"""Where a consumer is in each of its partitions, and which of them are to be fetched now from which leader. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import length_hint
from typing import NamedTuple

from minibroker.client.cluster.metadata import Leader
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.protocol.messages import EpochEndOffset
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import BatchHeader


class FetchedBatch(NamedTuple):
    """A batch as it arrived: `buffer[start:end]`."""

    state: PartitionState
    header: BatchHeader
    buffer: memoryview
    start: int
    end: int


class OpenBatch:
    """A batch from which the user takes records one by one.

    Its iterator is the only record of how far the user has come: to note that would cost each record a tenth of its
    time. `left` may be read from another thread.
    """

    def __init__(self, batch: ConsumerBatch) -> None:
        self.batch = batch
        self.records: Iterator[Record] = iter(batch.records())

    @property
    def left(self) -> int:
        return length_hint(self.records)

    @property
    def last_taken(self) -> int | None:
        """The offset of the last record that was taken; None if none was."""
        taken = len(self.batch) - self.left
        return self.batch.offsets[taken - 1] if taken else None

    def exhaust(self) -> None:
        """Drop the records that are left: an iteration under way ends."""
        for _ in self.records:
            pass


class PartitionState:
    """Where the consumer is in one partition, and what was fetched ahead."""

    def __init__(self, partition: TopicPartition, reset: int | None) -> None:
        self.partition = partition
        self._position: int | None = None
        self.open: OpenBatch | None = None
        """The batch from which the user takes records one by one."""
        self.saved: int | None = None
        """The position that the group has, or where the consumer has begun by itself: at another one there is something
        to commit."""
        self.reset = reset
        """The timestamp by which a position of None is looked up; None: the user must call `seek`."""
        self.fetch_offset = 0
        """The offset after what was fetched; `position` once that is consumed."""
        self.last_epoch = NO_EPOCH
        self.arrived_epoch = NO_EPOCH
        """Of the last batch that has arrived since the last move. (`last_epoch` may be what a user has committed.)"""
        """The leader epoch of the batch before `fetch_offset`: a log without it there is not the one that was read."""
        self._epochs: list[tuple[int, int]] = []
        """What was read, up to `fetch_offset`: leader epochs, and where each begins, both ascending."""
        self.generation = 0
        """Grows when the position is moved: the rest of older batches, and answers to older requests, are dropped."""
        self.handed_out_of = ""
        """The id of the topic that has the records that were handed out last; empty: there were none since the user
        chose the position."""
        self.absent_since: float | None = None
        """Since when metadata has had no such partition, or no leader as recent as the position's epoch; or when the
        user was told of that last."""
        self.is_gone = False
        """The user has named this partition, and no broker has it: nothing is fetched until it is created again."""
        self.is_paused = False
        self.is_held = False
        """As paused, but by the consumer: it does not know yet where to begin, or the user is being told of it."""
        self.awaits_committed = False
        """Nothing is looked up: perhaps the group has committed an offset to begin at."""
        self.high_watermark: int | None = None
        """As of the last answer."""
        self.is_busy = True
        """The last answer brought records, or there was none yet."""
        self.fetched: deque[FetchedBatch] = deque()
        self.fetched_bytes = 0
        self.outstanding_generation = -1
        """That of the outstanding fetch, or look-up of the position; -1: there is none."""
        self.retry_at = 0.0
        self.tried: Leader | None = None
        """The leader that was asked last."""
        self.trouble: ErrorCode | str | None = None
        """Why the last attempt brought nothing, where it failed."""
        self.suspicion: MinibrokerError | None = None
        """What was fetched last was corrupt: raised if it comes again, after the leader has looked at its disk."""
        self.error: MinibrokerError | None = None
        """Raised to the user once what was fetched before is consumed; until then nothing is fetched."""

    @property
    def position(self) -> int | None:
        """The offset of the next record for the user; None: to be looked up."""
        last = None if self.open is None else self.open.last_taken
        return self._position if last is None else last + 1

    @position.setter
    def position(self, position: int | None) -> None:
        """Closes the open batch."""
        self._position = position
        if self.open is not None:
            self.open.exhaust()
            self.open = None

    def close(self) -> None:
        """Close the open batch. The position stays behind the last record that was taken."""
        self.position = self.position

    def pass_over(self, next_offset: int) -> None:
        """What is in front of `next_offset` is done with: there was no record left for the user, so where all was
        committed, all is."""
        if self.saved is not None and self.saved == self.position:
            self.saved = next_offset
        self.position = next_offset

    @property
    def has_uncommitted(self) -> bool:
        """The user was given records, or has chosen the position, and the group does not have that."""
        position = self.position
        return position is not None and position != self.saved

    @property
    def has_records(self) -> bool:
        """Whether records wait for the user: fetched ahead, or left in the open batch."""
        return bool(self.fetched) or (self.open is not None and self.open.left > 0)

    @property
    def position_epoch(self) -> int:
        """The leader epoch of the record before `position`, where it is known."""
        position = self.position
        return NO_EPOCH if position is None else _epoch_before(position, self._epochs)

    def arrived(self, batch: FetchedBatch) -> None:
        """The batch at `fetch_offset`."""
        header = batch.header
        self.fetched.append(batch)
        self.fetched_bytes += batch.end - batch.start
        self.fetch_offset = header.next_offset
        self.arrived_epoch = header.partition_leader_epoch
        if header.partition_leader_epoch != self.last_epoch:
            self.last_epoch = header.partition_leader_epoch
            self._epochs.append((header.partition_leader_epoch, header.base_offset))

    def diverging_offset(self, leader: EpochEndOffset) -> int:
        """How far what was read is what the leader has, by its answer: the largest epoch in its log that is not above
        `last_epoch`, and where that ends there. The true offset may be lower: then the next fetch, with an earlier
        epoch, says so (KIP-279)."""
        own_end = next((begin for epoch, begin in self._epochs if epoch > leader.epoch), self.fetch_offset)
        return min(leader.end_offset, own_end)

    def go_back(self, position: int) -> None:
        """Go on at `position`, up to which all was read."""
        epochs = [entry for entry in self._epochs if entry[1] < position]
        saved = self.saved
        self.move(position)
        self.saved = saved
        self._epochs = epochs
        self.last_epoch = _epoch_before(position, epochs)

    def move(self, position: int | None, reset: int | None = None, epoch: int = NO_EPOCH) -> None:
        """Go on at `position`, behind a record of that leader epoch; None: at what `reset` finds."""
        self.position = self.saved = position
        if position is None:
            self.reset = reset
        else:
            self.fetch_offset = position
        self.last_epoch = epoch
        self.arrived_epoch = NO_EPOCH
        self._epochs = [] if epoch == NO_EPOCH or not position else [(epoch, position - 1)]
        self.generation += 1
        self.fetched.clear()
        self.fetched_bytes = 0
        self.error = self.trouble = None
        self.retry_at = 0.0


def _epoch_before(offset: int, epochs: Sequence[tuple[int, int]]) -> int:
    return next((epoch for epoch, begin in reversed(epochs) if begin < offset), NO_EPOCH)


class Due(NamedTuple):
    """What can be done now for the partitions of a consumer."""

    by_leader: dict[int, list[tuple[PartitionState, Leader]]]
    """Partitions to fetch, by the node that leads them."""
    deposed: list[tuple[PartitionState, Leader]]
    """Partitions of which a record was read that is of a later epoch than the leader that metadata names."""
    is_leader_missing: bool
    """Some partitions have no leader that can be reached."""
    next_at: float
    """When others become due by time alone; infinity: none do."""


def due_fetches(
    states: Iterable[PartitionState],
    leader_of: Callable[[str, int], Leader | None],
    now: float,
    *,
    max_bytes: int,
    max_partition_bytes: int,
) -> Due:
    """Which partitions are to be fetched, whether or not there are connections.

    Of each leader all that are in no request, as soon as none of its partitions has more than half of
    `max_partition_bytes` left, and all together have no more than half of `max_bytes`.
    """
    by_leader: dict[int, list[tuple[PartitionState, Leader]]] = {}
    deposed: list[tuple[PartitionState, Leader]] = []
    is_leader_missing = False
    next_at = inf
    bytes_ahead: dict[int, int] = {}
    """By node; over the limit where a single partition has enough."""
    for state in states:
        if state.position is None or state.is_paused or state.is_held or state.is_gone or state.error is not None:
            continue
        leader = leader_of(*state.partition)
        if leader is None:
            is_leader_missing = True
        elif leader.epoch < state.last_epoch:
            if now < state.retry_at:
                next_at = min(next_at, state.retry_at)
            else:
                deposed.append((state, leader))
        else:
            has_enough = state.fetched_bytes > max_partition_bytes // 2
            node_id = leader.node_id
            bytes_ahead[node_id] = bytes_ahead.get(node_id, 0) + (max_bytes if has_enough else state.fetched_bytes)
            if now < state.retry_at and leader == state.tried:
                next_at = min(next_at, state.retry_at)
            elif state.outstanding_generation != state.generation:
                by_leader.setdefault(node_id, []).append((state, leader))
    for node_id, ahead in bytes_ahead.items():
        if ahead > max_bytes // 2:
            by_leader.pop(node_id, None)
    return Due(by_leader, deposed, is_leader_missing, next_at)
