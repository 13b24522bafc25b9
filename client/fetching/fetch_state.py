"""The position in each partition of a consumer, and the decision which partitions to fetch from which leader. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import length_hint
from typing import NamedTuple

from minibroker.client.cluster.metadata import Leader
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.protocol.fetch_schedule import PARTITIONS_PER_REQUEST
from minibroker.protocol.messages import EpochEndOffset
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import BatchHeader


class FetchedBatch(NamedTuple):
    """A batch as it arrived: `buffer[start:end]`."""

    state: TopicPartitionState
    header: BatchHeader
    buffer: memoryview
    start: int
    end: int
    next_offset: int
    """The offset after this batch, and after the hidden ones that follow it."""

    @classmethod
    def hidden(cls, state: TopicPartitionState, header: BatchHeader) -> FetchedBatch:
        """A batch of an aborted transaction, or a control batch: it only moves the position, and its bytes are not
        kept."""
        return cls(state, header, memoryview(b""), 0, 0, header.next_offset)

    @property
    def is_hidden(self) -> bool:
        return self.start == self.end


class OpenBatch:
    """A batch from which the user takes records one by one.

    Only the iterator knows how many records were taken: a counter would cost each record a tenth of its time. `left`
    may be read from another thread.
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


class TopicPartitionState:
    """The position in one partition and the batches fetched ahead (Kafka's TopicPartitionState)."""

    def __init__(self, partition: TopicPartition, reset: int | None) -> None:
        self.partition = partition
        self._position: int | None = None
        self.open: OpenBatch | None = None
        """The batch from which the user takes records one by one."""
        self.saved: int | None = None
        """The position that the group has committed, or at which the consumer began by itself. Any other position has
        yet to be committed."""
        self.reset = reset
        """The timestamp by which a position of None is looked up. None: the user must call `seek`."""
        self.fetch_offset = 0
        """The offset behind the batches that were fetched."""
        self.last_epoch = NO_EPOCH
        """The leader epoch of the batch before `fetch_offset`. A log with another epoch there is not the one that was
        read. A user may have committed this epoch."""
        self.arrived_epoch = NO_EPOCH
        """The leader epoch of the last batch that arrived since the last move."""
        self._epochs: list[tuple[int, int]] = []
        """The leader epochs of the log up to `fetch_offset`, and the offset at which each begins, both ascending."""
        self.generation = 0
        """Incremented when the position is moved: older batches, and answers to older requests, are dropped."""
        self.handed_out_of = ""
        """The id of the topic whose records were handed out last; empty if none were since the user chose the
        position."""
        self.absent_since: float | None = None
        """The time since which metadata has lacked the partition, or a leader as recent as the position's epoch; or the
        time of the last error that said so."""
        self.is_gone = False
        """The user has named this partition, and no broker has it. Nothing is fetched until it is created again."""
        self.is_paused = False
        self.is_held = False
        """Paused by the consumer: it does not know yet where to begin, or the listener has not been called yet."""
        self.awaits_committed = False
        """No position is looked up yet: the group may have a committed offset."""
        self.high_watermark: int | None = None
        """The high watermark in the last answer."""
        self.end_offset: int | None = None
        """The offset up to which this consumer may read, as of the last answer: the high watermark, or for
        read_committed the last stable offset."""
        self.is_busy = True
        """The last answer had records, or there was none yet."""
        self.request_size = PARTITIONS_PER_REQUEST
        """How many partitions a fetch should name that names this one while it is quiet."""
        self.fetched: deque[FetchedBatch] = deque()
        self.fetched_bytes = 0
        self.outstanding_generation = -1
        """The generation of the outstanding fetch or look-up of the position; -1 if there is none."""
        self.retry_at = 0.0
        self.tried: Leader | None = None
        """The leader that was asked last."""
        self.trouble: ErrorCode | str | None = None
        """Why the last attempt failed, if it did."""
        self.suspicion: MinibrokerError | None = None
        """The last batch was corrupt. Raised if it arrives again, after the leader has checked its disk."""
        self.error: MinibrokerError | None = None
        """Raised to the user after the batches that were fetched before. Nothing is fetched until then."""

    @property
    def position(self) -> int | None:
        """The offset of the next record for the user; None if it has yet to be looked up."""
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
        """Move the position past offsets that hold no record for the user. If everything was committed, everything
        still is."""
        if self.saved is not None and self.saved == self.position:
            self.saved = next_offset
        self.position = next_offset

    @property
    def has_uncommitted(self) -> bool:
        """Whether the group lacks the position: the user was given records since, or has chosen the position."""
        position = self.position
        return position is not None and position != self.saved

    @property
    def has_records(self) -> bool:
        """Whether records wait for the user: fetched ahead, or left in the open batch."""
        return any(not batch.is_hidden for batch in self.fetched) or (self.open is not None and self.open.left > 0)

    @property
    def position_epoch(self) -> int:
        """The leader epoch of the record before `position`, or NO_EPOCH if it is not known."""
        position = self.position
        return NO_EPOCH if position is None else _epoch_before(position, self._epochs)

    def arrived(self, batch: FetchedBatch) -> None:
        """Append the batch at `fetch_offset`. A hidden one becomes part of the batch before it: a commit behind the
        last record of a transaction then includes the marker, and many hidden batches take no memory."""
        header = batch.header
        if batch.is_hidden and self.fetched:
            self.fetched.append(self.fetched.pop()._replace(next_offset=header.next_offset))
        else:
            self.fetched.append(batch)
        self.fetched_bytes += batch.end - batch.start
        self.fetch_offset = header.next_offset
        self.arrived_epoch = header.partition_leader_epoch
        if header.partition_leader_epoch != self.last_epoch:
            self.last_epoch = header.partition_leader_epoch
            self._epochs.append((header.partition_leader_epoch, header.base_offset))

    def diverging_offset(self, leader: EpochEndOffset) -> int:
        """Return the offset up to which the leader's log has the records that were read. The leader answers with the
        largest epoch in its log that is not above `last_epoch`, and with the end of that epoch. The true offset may be
        lower; the answer to the next fetch, with an earlier epoch, then shows it (KIP-279)."""
        own_end = next((begin for epoch, begin in self._epochs if epoch > leader.epoch), self.fetch_offset)
        return min(leader.end_offset, own_end)

    def go_back(self, position: int) -> None:
        """Continue at `position`, up to which all records were read."""
        epochs = [entry for entry in self._epochs if entry[1] < position]
        saved = self.saved
        self.move(position)
        self.saved = saved
        self._epochs = epochs
        self.last_epoch = _epoch_before(position, epochs)

    def move(self, position: int | None, reset: int | None = None, epoch: int = NO_EPOCH) -> None:
        """Continue at `position`, behind a record of that leader epoch; None: at the offset that `reset` finds."""
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
    """The fetches that are possible now."""

    by_leader: dict[int, list[tuple[TopicPartitionState, Leader]]]
    """Partitions to fetch, by the node that leads them."""
    deposed: list[tuple[TopicPartitionState, Leader]]
    """Partitions with a record of a later epoch than that of the leader in the metadata."""
    is_leader_missing: bool
    """Some partitions have no reachable leader."""
    next_at: float
    """When the next partition becomes due by time alone; infinity if none does."""


def due_fetches(
    states: Iterable[TopicPartitionState],
    leader_of: Callable[[str, int], Leader | None],
    now: float,
    *,
    max_bytes: int,
    max_partition_bytes: int,
) -> Due:
    """Decide which partitions to fetch, whether or not there are connections.

    All partitions of a leader that are in no request are fetched as soon as each of its partitions has at most half of
    `max_partition_bytes` left, and all together at most half of `max_bytes`.
    """
    by_leader: dict[int, list[tuple[TopicPartitionState, Leader]]] = {}
    deposed: list[tuple[TopicPartitionState, Leader]] = []
    is_leader_missing = False
    next_at = inf
    bytes_ahead: dict[int, int] = {}
    """Bytes ahead per node, above the limit if a single partition has enough."""
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
