"""Filling batches: each record is appended to a batch of its partition that has room. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minibroker.client.producing.batch import BATCH_OVERHEAD, UNASSIGNED, Batch
from minibroker.client.producing.buffer import GRANT, Buffer
from minibroker.client.producing.choosing import PartitionChoice, check_partition
from minibroker.client.producing.columns import Columns, grouped
from minibroker.client.producing.partitioners import WithoutKey
from minibroker.client.producing.queues import Generations, PartitionQueue, TopicState
from minibroker.protocol.records import Header


class Part(NamedTuple):
    """Some records of one `send_batch`, in a batch from index `first` on."""

    batch: Batch
    first: int
    indexes: Sequence[int]
    """The indexes of these records in the call, ascending."""


class Filling:
    """The open batches of a producer. `active` gets each queue to which a batch is added."""

    def __init__(
        self,
        buffer: Buffer,
        choice: PartitionChoice,
        generations: Generations,
        active: dict[PartitionQueue, None],
        check_caller: Callable[[], None] | None,
    ) -> None:
        self._buffer = buffer
        self._choice = choice
        self._generations = generations
        self._active = active
        self._check_caller = check_caller
        self._has_fast_path = True
        self.open_batches: dict[str, Batch] = {}
        """By topic, the batch for records without key, partition and headers. The fast path of `Producer.send` appends
        to its columns itself, if it has room."""

    def end_fast_path(self) -> None:
        self._has_fast_path = False
        self.open_batches.clear()

    # -- one record --

    def add(
        self,
        state: TopicState,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int,
        headers: Sequence[Header] | None,
        size: int,
        now: float,
    ) -> tuple[Batch, int]:
        """Add a record, or hold it if the topic's partitions are not known. Return the batch, and the index in it."""
        count = state.partition_count
        if count is None:
            batch = self._fitting(state, state.held, size, now, is_placed=False)
            assert batch.partitions is not None
            batch.partitions.append(partition)
        elif partition is not None:
            check_partition(state, count, partition)
            batch = self._fitting(state, state.queue(partition), size, now, is_placed=False)
        elif (chosen := self._choice.of_record(state, count, key, value)) is not None:
            batch = self._fitting(state, state.queue(chosen), size, now, is_placed=True)
        else:
            batch = self._sticky_batch(state, size, now)
        return batch, self._append(batch, value, key, timestamp_ms, headers, size)

    def _sticky_batch(self, state: TopicState, size: int, now: float) -> Batch:
        """Return the batch for a record without a key."""
        sticky = state.sticky
        if sticky is not None:
            batch = state.queue(sticky).open
            if batch is not None and not batch.is_placed:
                batch = None
            needs_new = batch is None or batch.size + size > state.batch_size
            if needs_new and batch is not None:
                self.close(state, batch)
            is_for_one_batch = self._choice.without_key is WithoutKey.STICKY
            if needs_new and (is_for_one_batch or state.sticky_bytes >= state.batch_size):
                sticky = None
        if sticky is None:
            sticky = self._choice.next_sticky(state)
        batch = self._fitting(state, state.queue(sticky), size, now, is_placed=True)
        if self._has_fast_path:
            self.open_batches[state.name] = batch
        return batch

    def _append(
        self,
        batch: Batch,
        value: bytes | None,
        key: bytes | None,
        timestamp_ms: int,
        headers: Sequence[Header] | None,
        size: int,
    ) -> int:
        index = len(batch.values)
        if batch.keys is not None:
            batch.keys.append(key)
        elif key is not None:
            batch.keys = [None] * index
            batch.keys.append(key)
        if batch.headers is not None:
            batch.headers.append(headers)
        elif headers:
            batch.headers = [None] * index
            batch.headers.append(headers)
        batch.values.append(value)
        batch.timestamps.append(timestamp_ms)
        batch.room -= size
        self._keep_from_fast_path(batch)
        return index

    def _keep_from_fast_path(self, batch: Batch) -> None:
        """Take a batch with keys or headers from the fast path, which appends neither."""
        if (batch.keys is not None or batch.headers is not None) and self.open_batches.get(batch.topic) is batch:
            del self.open_batches[batch.topic]

    # -- many records --

    def add_many(self, now: float, state: TopicState, columns: Columns, partition: int | None) -> list[Part]:
        """Add the records of a `send_batch`, or hold them if the topic's partitions are not known. Return their places;
        those of a partition are in order."""
        everything = range(len(columns))
        if state.partition_count is None:
            return [self._hold_many(state, columns, partition, now)]
        if partition is not None:
            check_partition(state, state.partition_count, partition)
            return self._add_to(state, partition, columns, everything, now, is_placed=False)
        if columns.keys is None and not self._choice.is_for_each_record:
            return self._add_without_keys(state, columns, now)
        targets = self._choice.of_records(state, state.partition_count, columns)
        parts: list[Part] = []
        for target, indexes in grouped(targets).items():
            if len(indexes) == len(columns):
                parts += self._add_to(state, target, columns, everything, now, is_placed=True)
            else:
                parts += self._add_to(state, target, columns.pick(indexes), indexes, now, is_placed=True)
        return parts

    def _add_without_keys(self, state: TopicState, columns: Columns, now: float) -> list[Part]:
        parts: list[Part] = []
        start = 0
        while start < len(columns):
            batch = self._sticky_batch(state, columns.size(start, start + 1), now)
            end = self._fill(state, batch, columns, start)
            parts.append(Part(batch, len(batch.values) - (end - start), range(start, end)))
            start = end
        return parts

    def _add_to(
        self,
        state: TopicState,
        partition: int,
        columns: Columns,
        indexes: Sequence[int],
        now: float,
        *,
        is_placed: bool,
    ) -> list[Part]:
        """Add all of them to a partition. `indexes` are their indexes in the call."""
        queue = state.queue(partition)
        parts: list[Part] = []
        start = 0
        while start < len(columns):
            batch = self._fitting(state, queue, columns.size(start, start + 1), now, is_placed=is_placed)
            end = self._fill(state, batch, columns, start)
            parts.append(Part(batch, len(batch.values) - (end - start), indexes[start:end]))
            start = end
        return parts

    def _fill(self, state: TopicState, batch: Batch, columns: Columns, start: int) -> int:
        """Add records from `start` on to a batch that has room for the first, until it is full. Return their end."""
        end = columns.end_within(start, max(batch.room, batch.room + state.batch_size - batch.granted))
        size = columns.size(start, end)
        if size > batch.room:
            self._buffer.grant(batch, size - batch.room)
        self._extend(batch, columns, start, end, size)
        return end

    def _extend(self, batch: Batch, columns: Columns, start: int, end: int, size: int) -> None:
        index, count = len(batch.values), end - start
        if columns.keys is not None:
            if batch.keys is None:
                batch.keys = [None] * index
            batch.keys += columns.keys[start:end]
        elif batch.keys is not None:
            batch.keys += [None] * count
        if batch.headers is not None:
            batch.headers += [None] * count
        batch.values += columns.values[start:end]
        batch.timestamps += columns.timestamps[start:end]
        batch.room -= size
        self._keep_from_fast_path(batch)

    def _hold_many(self, state: TopicState, columns: Columns, partition: int | None, now: float) -> Part:
        """Hold the records of a topic that is not known yet in one batch of any size. It is divided when it is
        placed."""
        if state.held.open is not None:
            self.close(state, state.held.open)
        count, size = len(columns), columns.size(0, len(columns))
        batch = self._new_batch(state, state.held, now, is_placed=False)
        self._buffer.grant(batch, size)
        assert batch.partitions is not None
        batch.partitions += [partition] * count
        batch.is_bulk = True
        self._extend(batch, columns, 0, count, size)
        self.close(state, batch)
        return Part(batch, 0, range(count))

    # -- batches --

    def _fitting(self, state: TopicState, queue: PartitionQueue, size: int, now: float, *, is_placed: bool) -> Batch:
        """Return a batch of the queue with room for `size` bytes: the open one, granted more if necessary, or a new
        one."""
        batch = queue.open
        if batch is not None and batch.is_placed is not is_placed:
            self.close(state, batch)
            batch = None
        if batch is not None:
            if batch.room >= size:
                return batch
            missing = size - batch.room
            most = state.batch_size - batch.granted
            if missing <= most:
                self._buffer.grant(batch, max(missing, min(GRANT, most)))
                return batch
            self.close(state, batch)
        least = size + BATCH_OVERHEAD
        first_grant = max(least, min(GRANT, state.batch_size))
        self._buffer.check(first_grant)
        batch = self._new_batch(state, queue, now, is_placed=is_placed)
        self._buffer.grant(batch, first_grant)
        batch.room -= BATCH_OVERHEAD
        return batch

    def _new_batch(self, state: TopicState, queue: PartitionQueue, now: float, *, is_placed: bool) -> Batch:
        """Return a new open batch of the queue, without room."""
        batch = Batch(
            state.name,
            queue.partition,
            (),
            now,
            self._generations.current,
            is_placed=is_placed,
            check_caller=self._check_caller,
        )
        queue.open = batch
        queue.append(batch)
        self._generations.count(batch, 1)
        if queue.partition != UNASSIGNED:
            self._active[queue] = None
        return batch

    def close(self, state: TopicState, batch: Batch) -> None:
        """Add no more records, and take back unused memory."""
        batch.is_closed = True
        batch.count = len(batch.values)
        self._buffer.take_unused(batch)
        if self.open_batches.get(state.name) is batch:
            del self.open_batches[state.name]
        queue = state.held if batch.partition == UNASSIGNED else state.queues[batch.partition]
        queue.open = None
        if batch.partition == state.sticky:
            state.sticky_bytes += batch.granted
