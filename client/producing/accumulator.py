"""Where records wait until they are sent, and in what order they may be sent: Kafka's RecordAccumulator. Pure.

The problem: a record must cost the caller of `send` only a few hundred nanoseconds, and yet be grouped with others
of its partition, be given a place in a bounded buffer, and be sent exactly once and in order although requests fail,
arrive late, or are answered by a broker that is no longer the leader.

**Adding.** A batch is a set of columns (lists), so that adding is three appends. Memory is granted to a batch in
pieces of 16 KiB: `room` counts down, and only where it would fall below zero is anything decided (grant more,
close the batch, choose another partition, refuse). Records of a topic whose partitions are not known yet are held,
in order, and added anew once they are (`topic_is_known`); a held batch then *forwards* each of its records.

**Readiness.** A partition's first batch may go if it is full, if the buffer is exhausted, if a flush (or `close`,
which flushes) waits for it, or if it has lingered; and, this is Nagle's rule, a batch that is not full waits while
the partition has another on its way. Without that rule, `linger_ms=0` sends crumbs: each pass of the
event loop would find one or two records and make a request of them. With it an idle partition still sends at once,
and a busy one fills batches for as long as a request takes, which is when it matters. Rejected: a linger of 5 ms by
default (Kafka 4), which every awaited `send` would pay.

**Order without duplicates** (idempotence, KIP-98 and KIP-360). A batch is numbered when it is taken for the first
time and keeps producer id, epoch and sequence through all retries, so a broker recognises what it has. While a
batch waits for its retry, nothing of the partition overtakes it: a retry is sent only when nothing of the
partition is in flight. What an answer means is decided by `judge_batch`. Only where the broker said that it did *not*
append, in every attempt, may a batch be numbered anew; an attempt without a clear answer (a lost connection, a
timeout, "not leader" from a broker that led when the batch arrived) makes it `maybe_appended`, and such a batch
fails rather than risk a duplicate. A failed batch leaves a gap in the numbers, so what follows is numbered from 0
again, in the next epoch of the same producer id. Another id would do for the numbers, but not for the order: a request
that a slow network has held is appended whenever it arrives, unless a newer epoch of its producer has fenced it.

**Topics that come back.** A topic that was deleted and created again under its name is another one, with other
partitions, whose logs know no producer. Each batch is sent under the id of the topic that is meant, and no other topic
takes it (KIP-516). So an attempt under an older id says nothing about the present topic: it is void (`is_void`), and so
are its number and the doubt whether it was appended; a batch that is still in flight then is voided when its answer
comes. An attempt under the present id keeps both. Order holds within one topic. Rejected: concluding from
UNKNOWN_PRODUCER_ID that the topic is another one; by the time metadata says so, too, a batch may already have been sent
to the new topic.

Records whose partition the partitioner chose are placed by the new topic's number of partitions; so a batch holds
either only such records (`is_placed`), or only records whose partition the caller chose. If the number differs, the
topic is *changing* until nothing is in flight to its predecessor: nothing is sent to it, and what is added is held.
Then the waiting batches are placed anew, oldest first, and after them what was held: the records of a key stay in
order, and are all where the new number puts them. Records whose partition the caller chose stay there, or fail if it no
longer exists. Rejected: placing anew at once; a batch whose answer is still to come may have to be sent again, and
would then come behind later records of its keys.

Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from minibroker.client.errors import BufferFull, FailedRecord, PartitionerFailed, no_such_partition
from minibroker.client.producing.batch import (
    BATCH_OVERHEAD,
    HEADER_OVERHEAD,
    NOT_APPENDED,
    RECORD_OVERHEAD,
    SEQUENCE_MASK,
    UNASSIGNED,
    Batch,
    BatchVerdict,
    Identity,
    is_void,
    judge_batch,
)
from minibroker.client.producing.columns import Columns, grouped
from minibroker.client.producing.partitioners import (
    Partitioner,
    Partitions,
    RecordPartitioner,
    WithoutKey,
    choose_adaptive,
    choose_round_robin,
    choose_sticky,
    partitions_of,
)
from minibroker.client.settings import check_topic_name
from minibroker.client.shown import shown
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import Header

GRANT = 16 * 1024
"""Bytes of the buffer that a batch is given at a time."""

LAST_PRODUCER_EPOCH = 0x7FFF
"""After this one a new producer id is needed."""

_NO_LIMIT = 1 << 62


class PartitionQueue:
    """The batches of one partition that have not ended yet."""

    __slots__ = (
        "identity",
        "in_flight",
        "next_order",
        "next_sequence",
        "open",
        "partition",
        "retry_at",
        "topic",
        "tried",
        "waiting",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.waiting: deque[Batch] = deque()
        """In order. The last may be open; those with `attempts` wait for a retry and are in front."""
        self.open: Batch | None = None
        self.in_flight: list[Batch] = []
        self.next_order = 0
        self.identity: Identity | None = None
        """New batches are numbered under it; None: none yet, or the numbers were lost."""
        self.next_sequence = 0
        self.retry_at = 0.0
        """Nothing is sent before this time."""
        self.tried: tuple[int, int] | None = None
        """Node and epoch of the leader to which the last attempt went: `retry_at` applies to that leader alone."""

    def is_first(self, batch: Batch) -> bool:
        """Whether every batch before `batch` has ended. `batch` itself must be in neither list."""
        return all(other.order > batch.order for other in self.in_flight) and (
            not self.waiting or self.waiting[0].order > batch.order
        )

    def put_back(self, batches: Sequence[Batch]) -> None:
        """Insert into `waiting`, each where its order puts it."""
        for batch in batches:
            index = 0
            for other in self.waiting:
                if other.order > batch.order:
                    break
                index += 1
            self.waiting.insert(index, batch)


class TopicState:
    """What the accumulator knows about a topic."""

    __slots__ = (
        "available",
        "batch_size",
        "held",
        "name",
        "partition_count",
        "previous",
        "queues",
        "sticky",
        "sticky_bytes",
        "topic_id",
    )

    def __init__(self, name: str, batch_size: int) -> None:
        self.name = name
        self.batch_size = batch_size
        """The producer's, or less once a broker has found a batch too large."""
        self.topic_id = ""
        self.partition_count: int | None = None
        """None: not known yet, or the topic is changing."""
        self.available: list[int] = []
        """Partitions that have a leader, ascending; all of them where none has."""
        self.queues: dict[int, PartitionQueue] = {}
        self.held: PartitionQueue = PartitionQueue(name, UNASSIGNED)
        self.sticky: int | None = None
        """Where records without a key go now."""
        self.sticky_bytes = 0
        self.previous: int | None = None
        """Where the last record without a key went (round robin)."""


class Part(NamedTuple):
    """Where some records of one `add_many` are: in a batch, from index `first` on."""

    batch: Batch
    first: int
    indexes: Sequence[int]
    """Which records of the call these are, ascending."""


class Ready(NamedTuple):
    queues: list[PartitionQueue]
    """Those whose first batch may be sent now."""
    next_check_at: float | None
    """When another may become ready by time alone."""


class Accumulator:
    """See the module. Not thread-safe; callers pass the time where it matters."""

    def __init__(
        self,
        *,
        batch_size: int,
        buffer_memory: int,
        max_request_size: int,
        linger_s: float,
        delivery_timeout_s: float,
        is_idempotent: bool,
        partitioner: Partitioner | RecordPartitioner,
        random: Random,
        check_caller: Callable[[], None] | None = None,
    ) -> None:
        self._check_caller = check_caller
        self._batch_size = batch_size
        self.buffer_memory = buffer_memory
        self._hard_limit = 2 * buffer_memory
        self._max_request_size = max_request_size
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        self._is_idempotent = is_idempotent
        self._chooser: RecordPartitioner | None = None
        """A function of the user's that chooses for every record."""
        if isinstance(partitioner, Partitioner):
            self._by_key, self._without_key = partitioner
        else:
            self._chooser = partitioner
        self._random = random
        self._topics: dict[str, TopicState] = {}
        self._held: dict[str, None] = {}
        """Topics with held records."""
        self._changing: dict[str, None] = {}
        """Topics that were created again with another number of partitions, while something is still in flight to
        their predecessors. None of their queues is active."""
        self._active: dict[PartitionQueue, None] = {}
        """Queues with batches waiting. Those served move to the end, so that all get their turn."""
        self._unfinished: dict[int, int] = {}
        """How many batches have not ended, by generation."""
        self._generation = 0
        self._flushing_up_to = -1
        self.on_room: Callable[[], None] = lambda: None
        """Called where there is more room without any news of the sender's."""
        self._failed: dict[Batch, None] = {}
        self._is_closed = False
        self.used = 0
        """Bytes granted and not given back yet: to records that wait or are on their way, and to failed ones that
        were not reported."""
        self.identity: Identity | None = None
        """The producer id that partitions are given next; None: the sender must obtain one."""
        self.open_batches: dict[str, Batch] = {}
        """Topic -> the batch that takes a record without key, partition or headers, if it has room: the fast path
        of `Producer.send` appends to its columns itself."""

    # -- adding --

    def add(
        self,
        now: float,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int,
        headers: Sequence[Header] | None,
    ) -> tuple[Batch, int]:
        """Add a record: the batch, and the record's index in it.

        Raises BrokerError for a topic name that is illegal, a record that is too large or a partition that does
        not exist, and BufferFull.
        """
        size = RECORD_OVERHEAD
        if value is not None:
            size += len(value)
        if key is not None:
            size += len(key)
        if headers:
            for name, content in headers:
                size += HEADER_OVERHEAD + 4 * len(name) + (0 if content is None else len(content))
        if size > self._most_of_a_record:
            raise self._too_large(topic, size)
        state = self._state(topic)
        if state.partition_count is None:
            batch = self._fitting(state, state.held, size, now, is_placed=False)
            self._held[topic] = None
            assert batch.partitions is not None
            batch.partitions.append(partition)
        else:
            batch = self._assigned(state, state.partition_count, value, key, partition, size, now)
        return batch, self._append(batch, value, key, timestamp_ms, headers, size)

    @property
    def _most_of_a_record(self) -> int:
        return self._max_request_size - BATCH_OVERHEAD

    def _too_large(self, topic: str, size: int, index: int | None = None) -> BrokerError:
        record = "a record" if index is None else f"record {index}"
        return BrokerError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"{record} of {size} bytes for {topic}, with what the log adds to it: the producer's max_request_size "
            f"is {self._max_request_size}. Send smaller records, or raise it, and the topic's max.message.bytes",
            is_complete=True,
        )

    def _state(self, topic: str) -> TopicState:
        state = self._topics.get(topic)
        if state is None:
            check_topic_name(topic)
            state = self._topics[topic] = TopicState(topic, self._batch_size)
        return state

    def add_with_key(self, topic: str, value: bytes, key: bytes, timestamp_ms: int) -> tuple[Batch, int] | None:
        """`add`, for the common case alone: the key's partition has an open batch with keys and with room. None: use
        `add`. Not for a RecordPartitioner."""
        state = self._topics.get(topic)
        if state is None or state.partition_count is None:
            return None
        queue = state.queues.get(self._by_key(key, state.partition_count))
        if queue is None or (batch := queue.open) is None or batch.keys is None or batch.headers is not None:
            return None
        if not batch.is_placed:
            return None
        room = batch.room - len(value) - len(key) - RECORD_OVERHEAD
        if room < 0:
            return None
        batch.room = room
        values = batch.values
        index = len(values)
        values.append(value)
        batch.keys.append(key)
        batch.timestamps.append(timestamp_ms)
        return batch, index

    def _assigned(
        self,
        state: TopicState,
        count: int,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        size: int,
        now: float,
    ) -> Batch:
        """The batch for a record of a topic whose partitions are known."""
        is_placed = partition is None
        if partition is not None:
            self._check_partition(state, count, partition)
        elif self._chooser is not None:
            partition = self._chosen(self._chooser, state, count, key, value)
        elif key is None:
            return self._without_a_key(state, size, now)
        else:
            partition = self._by_key(key, count)
            self._check_partition(state, count, partition)
        return self._fitting(state, self._queue(state, partition), size, now, is_placed=is_placed)

    @staticmethod
    def _check_partition(state: TopicState, count: int, partition: int) -> None:
        if not 0 <= partition < count:
            raise no_such_partition(TopicPartition(state.name, partition), count)

    @staticmethod
    def _chosen(
        chooser: RecordPartitioner, state: TopicState, count: int, key: bytes | None, value: bytes | None
    ) -> int:
        """What the user's function says, whose errors must not pass for ours: it may be called by the sender's task."""
        try:
            partition = chooser(state.name, key, value, Partitions(count, state.available))
        except Exception as error:
            raise PartitionerFailed(f"the partitioner failed for a record of {state.name}: {shown(error)}") from error
        if type(partition) is not int or not 0 <= partition < count:
            raise PartitionerFailed(
                f"the partitioner returned {shown(partition)} for a record of {state.name}: it must be an int from "
                f"0 to {count - 1}"
            )
        return partition

    def _without_a_key(self, state: TopicState, size: int, now: float) -> Batch:
        strategy = self._without_key
        if strategy is WithoutKey.ROUND_ROBIN:
            state.previous = choose_round_robin(state.available, state.previous)
            return self._fitting(state, self._queue(state, state.previous), size, now, is_placed=True)
        sticky = state.sticky
        if sticky is not None:
            batch = self._queue(state, sticky).open
            if batch is not None and not batch.is_placed:
                batch = None
            needs_new = batch is None or batch.size + size > state.batch_size
            if needs_new and batch is not None:
                self._close(state, batch)
            if needs_new and (strategy is WithoutKey.STICKY or state.sticky_bytes >= state.batch_size):
                sticky = None
        if sticky is None:
            sticky = self._choose_for_a_while(state)
        batch = self._fitting(state, self._queue(state, sticky), size, now, is_placed=True)
        if not self._is_closed:
            self.open_batches[state.name] = batch
        return batch

    def _choose_for_a_while(self, state: TopicState) -> int:
        """Another partition for records without a key."""
        if self._without_key is WithoutKey.STICKY:
            chosen = choose_sticky(state.available, state.sticky, self._random)
        else:
            lengths = [self._queue_length(state, partition) for partition in state.available]
            chosen = choose_adaptive(state.available, lengths, self._random)
        state.sticky, state.sticky_bytes = chosen, 0
        return chosen

    # -- adding many --

    def add_many(self, now: float, topic: str, columns: Columns, partition: int | None) -> list[Part]:
        """Add records, of which there is at least one: where they are, those of a partition in their order.

        All of them or none. Raises as `add`, and PartitionerFailed.
        """
        index = columns.first_above(self._most_of_a_record)
        if index is not None:
            raise self._too_large(topic, columns.size(index, index + 1), index)
        state = self._state(topic)
        size = columns.size(0, len(columns))
        if self.used + size > self._hard_limit:
            raise BufferFull(
                f"{size} bytes of records beside {self.used} that wait to be sent are more than twice "
                f"buffer_memory={self.buffer_memory}: pass fewer at a time, and await producer.drain() after every "
                "call; or raise buffer_memory"
            )
        # What batches add to their records must not let some of them in and refuse the rest.
        hard_limit, self._hard_limit = self._hard_limit, _NO_LIMIT
        try:
            return self._add_many(now, state, columns, partition)
        finally:
            self._hard_limit = hard_limit

    def _add_many(self, now: float, state: TopicState, columns: Columns, partition: int | None) -> list[Part]:
        everything = range(len(columns))
        if state.partition_count is None:
            return [self._hold_many(state, columns, partition, now)]
        if partition is not None:
            self._check_partition(state, state.partition_count, partition)
            return self._add_to(state, partition, columns, everything, now, is_placed=False)
        if columns.keys is None and self._chooser is None and self._without_key is not WithoutKey.ROUND_ROBIN:
            return self._add_without_keys(state, columns, now)
        targets = self._targets(state, state.partition_count, columns)
        parts: list[Part] = []
        for target, indexes in grouped(targets).items():
            if len(indexes) == len(columns):
                parts += self._add_to(state, target, columns, everything, now, is_placed=True)
            else:
                parts += self._add_to(state, target, columns.pick(indexes), indexes, now, is_placed=True)
        return parts

    def _targets(self, state: TopicState, count: int, columns: Columns) -> list[int]:
        """The partition of each record."""
        keys = columns.keys
        if self._chooser is not None:
            chooser = self._chooser
            return [
                self._chosen(chooser, state, count, None if keys is None else keys[index], value)
                for index, value in enumerate(columns.values)
            ]
        if keys is None:
            keys = [None] * len(columns)
        with_key = [key for key in keys if key is not None]
        targets = partitions_of(with_key, self._by_key, count)
        for target in set(targets):
            self._check_partition(state, count, target)
        if len(with_key) == len(keys):
            return targets
        chosen = iter(targets)
        without_key = self._targets_without_key(state, len(keys) - len(with_key))
        return [next(without_key) if key is None else next(chosen) for key in keys]

    def _targets_without_key(self, state: TopicState, count: int) -> Iterator[int]:
        """The partitions of records without a key among others that have one: `count` times the same, unless each is to
        have another. (Where those of one call end is not a good moment to change it either.)"""
        if self._without_key is WithoutKey.ROUND_ROBIN:
            for _ in range(count):
                state.previous = choose_round_robin(state.available, state.previous)
                yield state.previous
            return
        sticky = state.sticky
        if sticky is None or state.sticky_bytes >= state.batch_size:
            sticky = self._choose_for_a_while(state)
        for _ in range(count):
            yield sticky

    def _add_without_keys(self, state: TopicState, columns: Columns, now: float) -> list[Part]:
        parts: list[Part] = []
        start = 0
        while start < len(columns):
            batch = self._without_a_key(state, columns.size(start, start + 1), now)
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
        """Add all of them to a partition. `indexes` says which records of the call they are."""
        queue = self._queue(state, partition)
        parts: list[Part] = []
        start = 0
        while start < len(columns):
            batch = self._fitting(state, queue, columns.size(start, start + 1), now, is_placed=is_placed)
            end = self._fill(state, batch, columns, start)
            parts.append(Part(batch, len(batch.values) - (end - start), indexes[start:end]))
            start = end
        return parts

    def _fill(self, state: TopicState, batch: Batch, columns: Columns, start: int) -> int:
        """Add records from `start` on to a batch that has room for the first, until it is full. Returns their end."""
        end = columns.end_within(start, max(batch.room, batch.room + state.batch_size - batch.granted))
        size = columns.size(start, end)
        if size > batch.room:
            self._grant(batch, size - batch.room)
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
        """Of a topic that is not known yet, as one batch whatever its size: it is divided when it is placed."""
        if state.held.open is not None:
            self._close(state, state.held.open)
        count, size = len(columns), columns.size(0, len(columns))
        batch = self._new_batch(state, state.held, now, is_placed=False)
        self._grant(batch, size)
        assert batch.partitions is not None
        batch.partitions += [partition] * count
        batch.is_bulk = True
        self._extend(batch, columns, 0, count, size)
        self._close(state, batch)
        self._held[state.name] = None
        return Part(batch, 0, range(count))

    # -- batches --

    @staticmethod
    def _queue_length(state: TopicState, partition: int) -> int:
        queue = state.queues.get(partition)
        return 0 if queue is None else len(queue.waiting) + len(queue.in_flight)

    @staticmethod
    def _queue(state: TopicState, partition: int) -> PartitionQueue:
        queue = state.queues.get(partition)
        if queue is None:
            queue = state.queues[partition] = PartitionQueue(state.name, partition)
        return queue

    def _fitting(self, state: TopicState, queue: PartitionQueue, size: int, now: float, *, is_placed: bool) -> Batch:
        """The queue's open batch with room for `size` bytes: as it is, granted more, or a new one."""
        batch = queue.open
        if batch is not None and batch.is_placed is not is_placed:
            self._close(state, batch)
            batch = None
        if batch is not None:
            if batch.room >= size:
                return batch
            missing = size - batch.room
            most = state.batch_size - batch.granted
            if missing <= most:
                self._grant(batch, max(missing, min(GRANT, most)))
                return batch
            self._close(state, batch)
        least = size + BATCH_OVERHEAD
        first_grant = max(least, min(GRANT, state.batch_size))
        self._check_room(first_grant)
        batch = self._new_batch(state, queue, now, is_placed=is_placed)
        self._grant(batch, first_grant)
        batch.room -= BATCH_OVERHEAD
        return batch

    def _new_batch(self, state: TopicState, queue: PartitionQueue, now: float, *, is_placed: bool) -> Batch:
        """The queue's next one, open and without any room."""
        batch = Batch(
            state.name,
            queue.partition,
            (queue.next_order,),
            now,
            self._generation,
            is_placed=is_placed,
            check_caller=self._check_caller,
        )
        queue.next_order += 1
        queue.open = batch
        queue.waiting.append(batch)
        self._count(batch, 1)
        if queue.partition != UNASSIGNED:
            self._active[queue] = None
        return batch

    def _grant(self, batch: Batch, size: int) -> None:
        self._check_room(size)
        self.used += size
        batch.granted += size
        batch.room += size

    def _check_room(self, size: int) -> None:
        if self.used + size > self._hard_limit:
            raise BufferFull(
                f"{self.used} bytes of records wait to be sent, twice buffer_memory={self.buffer_memory}: "
                "await producer.drain() after every send, or raise buffer_memory"
            )

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
        """It knows neither of keys nor of headers."""
        if (batch.keys is not None or batch.headers is not None) and self.open_batches.get(batch.topic) is batch:
            del self.open_batches[batch.topic]

    def _close(self, state: TopicState, batch: Batch) -> None:
        """No more records are added; what was granted and not used is given back."""
        batch.is_closed = True
        batch.count = len(batch.values)
        self.used -= batch.room
        batch.granted -= batch.room
        batch.room = 0
        if self.open_batches.get(state.name) is batch:
            del self.open_batches[state.name]
        queue = state.held if batch.partition == UNASSIGNED else state.queues[batch.partition]
        queue.open = None
        if batch.partition == state.sticky:
            state.sticky_bytes += batch.granted

    def _count(self, batch: Batch, difference: int) -> None:
        count = self._unfinished.get(batch.generation, 0) + difference
        if count:
            self._unfinished[batch.generation] = count
        else:
            del self._unfinished[batch.generation]

    # -- topics --

    def held_topics(self) -> list[tuple[str, float]]:
        """Topics whose partitions must be found out, and since when a record has been waiting for that."""
        return [(name, self._topics[name].held.waiting[0].created_at) for name in self._held]

    def topics(self) -> list[str]:
        return list(self._topics)

    def changing_topics(self) -> list[str]:
        """Those for which `topic_is_known` must be called again as soon as an answer has come."""
        return list(self._changing)

    def topic_is_known(self, topic: str, topic_id: str, partition_count: int, available: Sequence[int]) -> None:
        """The topic has that id, and partitions 0 to `partition_count` - 1, of which `available` have a leader.

        Places the records that were held. Must be called at every change. Under one id the count never shrinks; under
        a new one (the topic was created again) it may. If the new topic has another count, all records are placed by
        it as soon as nothing is in flight to the previous topic; those whose partition the caller chose fail if that
        no longer exists.
        """
        state = self._topics.get(topic)
        if state is None:
            state = self._topics[topic] = TopicState(topic, self._batch_size)
        if is_void(state.topic_id, topic_id):
            self._begin_anew(state, partition_count)
        state.topic_id = topic_id
        if topic in self._changing and any(queue.in_flight for queue in state.queues.values()):
            return
        state.partition_count = max(partition_count, state.partition_count or 0)
        state.available = sorted(available) or list(range(state.partition_count))
        if state.sticky is not None and state.sticky not in state.available:
            state.sticky = None
            self.open_batches.pop(topic, None)
        if topic in self._changing:
            del self._changing[topic]
            self._place_anew(state, state.partition_count)
        self._held.pop(topic, None)
        while state.held.waiting:
            self._place(state, state.held.waiting.popleft())

    def _place(self, state: TopicState, held: Batch) -> None:
        """Add every record of a batch that was held or placed again, in order, within the memory that the batch
        has already."""
        if not held.is_closed:
            self._close(state, held)
        self.used -= held.granted
        held.granted = 0
        hard_limit, self._hard_limit = self._hard_limit, _NO_LIMIT  # records that were accepted are never refused
        generation, self._generation = self._generation, held.generation
        try:
            targets = self._placed_as_one(state, held) if held.is_bulk else self._placed_each(state, held)
        finally:
            self._hard_limit = hard_limit
            self._generation = generation
        held.forward(targets)
        self._count(held, -1)

    def _placed_each(self, state: TopicState, held: Batch) -> list[tuple[Batch, int]]:
        partitions = held.partitions or [None] * held.count
        targets = []
        for index, value in enumerate(held.values):
            key = None if held.keys is None else held.keys[index]
            headers = None if held.headers is None else held.headers[index]
            timestamp_ms = held.timestamps[index]
            try:
                targets.append(
                    self.add(held.created_at, state.name, value, key, partitions[index], timestamp_ms, headers)
                )
            except (BrokerError, PartitionerFailed) as error:  # a partition that does not exist
                targets.append((self._refuse(held, index, index + 1, error), 0))
        return targets

    def _placed_as_one(self, state: TopicState, held: Batch) -> list[tuple[Batch, int]]:
        assert held.partitions is not None
        columns = Columns(held.values, held.keys, held.timestamps)
        try:
            parts = self._add_many(held.created_at, state, columns, held.partitions[0])
        except (BrokerError, PartitionerFailed) as error:
            refused = self._refuse(held, 0, held.count, error)
            return [(refused, index) for index in range(held.count)]
        targets: list[tuple[Batch, int]] = [(held, 0)] * held.count
        for batch, first, indexes in parts:
            for place, index in enumerate(indexes, first):
                targets[index] = batch, place
        return targets

    def _refuse(self, held: Batch, start: int, end: int, error: MinibrokerError) -> Batch:
        """Records of a held batch that fail, as a batch that has."""
        refused = Batch(held.topic, UNASSIGNED, held.order, held.created_at, held.generation)
        refused.partitions = (held.partitions or [None] * held.count)[start:end]
        refused.values = held.values[start:end]
        refused.keys = None if held.keys is None else held.keys[start:end]
        refused.timestamps = held.timestamps[start:end]
        refused.headers = None if held.headers is None else held.headers[start:end]
        refused.is_closed = True
        refused.count = end - start
        self._count(refused, 1)
        self._end(refused, error)
        return refused

    def fail_held(self, topic: str, error: MinibrokerError) -> None:
        """The topic's partitions could not be found out: its held records fail."""
        state = self._topics[topic]
        self._held.pop(topic, None)
        while state.held.waiting:
            batch = state.held.waiting.popleft()
            if not batch.is_closed:
                self._close(state, batch)
            self._end(batch, error)

    def forget(self, topic: str) -> None:
        """After `fail_held`: nothing is known of the topic, and nothing waits for it."""
        if self._topics[topic].partition_count is None and topic not in self._changing:
            del self._topics[topic]

    def _begin_anew(self, state: TopicState, partition_count: int) -> None:
        """The topic was created again, with that many partitions: what is known and numbered belongs to the old one.

        What is in flight keeps its number until its answer comes (`judge`), and nothing overtakes it meanwhile.
        """
        state.batch_size = self._batch_size
        state.previous = None
        for queue in state.queues.values():
            for batch in queue.waiting:
                batch.forget_attempts()
            self._lose_numbers(queue, queue.identity)
            queue.retry_at = 0.0
        if partition_count == state.partition_count:
            return  # every record is in its place
        state.partition_count = state.sticky = None
        self._changing[state.name] = None
        for queue in state.queues.values():
            if queue.open is not None:
                self._close(state, queue.open)
            self._active.pop(queue, None)

    def _place_anew(self, state: TopicState, partition_count: int) -> None:
        """The topic has that many partitions now, and nothing is in flight: give every record its place.

        A batch that may be in the log of this very topic keeps its partition and number.
        """
        waiting: list[Batch] = []
        for queue in state.queues.values():
            waiting += queue.waiting
            queue.waiting.clear()
            queue.retry_at = 0.0
        # Oldest first (within a queue that is their order), so that no record joins a younger batch: it would expire
        # later, and a flush would not wait for it.
        waiting.sort(key=lambda batch: (not batch.maybe_appended, batch.generation, batch.created_at))
        for batch in waiting:
            queue = self.queue_of(batch)
            if batch.is_placed and not batch.maybe_appended:
                self._place(state, batch)
            elif batch.partition < partition_count:
                if queue.open is not None:
                    self._close(state, queue.open)
                batch.order = (queue.next_order,)
                queue.next_order += 1
                queue.waiting.append(batch)
                self._active[queue] = None
            else:
                self._end(batch, _no_such_partition(batch, partition_count))

    # -- taking --

    @property
    def is_over_limit(self) -> bool:
        return self.used > self.buffer_memory

    def lets_pass(self) -> bool:
        """Whether a caller that waits for room in the buffer may go on: there is room, or a failure to be told."""
        return not self.is_over_limit or any(batch.unreported for batch in self._failed)

    def ready(self, now: float) -> Ready:
        """The partitions whose first batch may be sent now, as far as the accumulator can tell."""
        queues: list[PartitionQueue] = []
        next_check_at: float | None = None
        is_exhausted = self.is_over_limit
        for queue in self._active:
            first = queue.waiting[0]
            if queue.in_flight and (first.attempts > 0 or self._begins_anew(queue, first)):
                continue  # a retry, or the first of a new epoch, must overtake nothing: an answer wakes us
            if now < queue.retry_at:
                ready_at = queue.retry_at
            elif first.is_closed or first.attempts > 0 or is_exhausted or first.generation <= self._flushing_up_to:
                queues.append(queue)
                continue
            elif queue.in_flight:
                continue  # Nagle's rule
            else:
                ready_at = first.created_at + self._linger_s
                if ready_at <= now:
                    queues.append(queue)
                    continue
            if next_check_at is None or ready_at < next_check_at:
                next_check_at = ready_at
        return Ready(queues, next_check_at)

    def backing_off(self, now: float) -> list[PartitionQueue]:
        """Queues that wait for `retry_at`: the sender ends the wait where there is another leader than `tried`."""
        return [queue for queue in self._active if queue.retry_at > now]

    def _begins_anew(self, queue: PartitionQueue, batch: Batch) -> bool:
        """The batch would be the first of its producer id, or of its epoch."""
        return self._is_idempotent and batch.identity is None and (queue.identity is None or queue.next_sequence == 0)

    def lacks_identity(self, queue: PartitionQueue) -> bool:
        """Whether the queue's first batch cannot be numbered before the sender has obtained a producer id."""
        return (
            self._is_idempotent
            and self.identity is None
            and queue.identity is None
            and queue.waiting[0].identity is None
        )

    def take(self, queue: PartitionQueue) -> Batch:
        """The first batch of a ready queue, numbered, to be sent now. It must be ended, or put back."""
        batch = queue.waiting.popleft()
        if not batch.is_closed:
            self._close(self._topics[batch.topic], batch)
        del self._active[queue]
        if queue.waiting:
            self._active[queue] = None
        if self._is_idempotent and batch.identity is None:
            if queue.identity is None:
                assert self.identity is not None, "a batch was taken without a producer id"
                queue.identity = self.identity
                queue.next_sequence = 0
            batch.identity = queue.identity
            batch.sequence = queue.next_sequence
            queue.next_sequence = (queue.next_sequence + batch.count) & SEQUENCE_MASK
        batch.attempts += 1
        batch.topic_id = self._topics[batch.topic].topic_id
        queue.in_flight.append(batch)
        return batch

    # -- endings --

    def queue_of(self, batch: Batch) -> PartitionQueue:
        return self._topics[batch.topic].queues[batch.partition]

    def judge(self, batch: Batch, code: ErrorCode) -> BatchVerdict:
        """`judge_batch` for a batch that is in flight; notes whether it may be in the log."""
        if is_void(batch.topic_id, self._topics[batch.topic].topic_id):
            batch.forget_attempts()
        elif code not in NOT_APPENDED:
            batch.maybe_appended = True
        queue = self.queue_of(batch)
        queue.in_flight.remove(batch)
        return judge_batch(
            code,
            record_count=batch.count,
            is_first=queue.is_first(batch),
            maybe_appended=batch.maybe_appended,
            is_idempotent=self._is_idempotent,
        )

    def delivered(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        """After `judge`: it is in the log."""
        if batch.is_done:
            return  # the answer came too late for the batch, but in time for the numbers of those that follow
        batch.base_offset = base_offset
        batch.log_append_time_ms = log_append_time_ms
        self._end(batch, None)

    def retry(self, batch: Batch, retry_at: float) -> None:
        """After `judge`: send it again, under its number, not before `retry_at`."""
        queue = self.queue_of(batch)
        queue.retry_at = retry_at
        if batch.is_done:
            self._lose_numbers(queue, batch.identity)
            return
        if batch.identity != queue.identity and not batch.maybe_appended:
            batch.number_anew()  # the numbers were lost while it was in flight
        self._put_back(queue, [batch])

    def renumber(self, batch: Batch, retry_at: float) -> None:
        """After `judge`: send it again, in a new epoch."""
        queue = self.queue_of(batch)
        queue.retry_at = retry_at
        self._lose_numbers(queue, batch.identity)
        if not batch.is_done:
            batch.number_anew()
            self._put_back(queue, [batch])

    def split(self, batch: Batch) -> None:
        """After `judge`: send it again in two halves, and make smaller batches of this topic from now on."""
        queue = self.queue_of(batch)
        if batch.is_done:
            self._lose_numbers(queue, batch.identity)
            return
        state = self._topics[batch.topic]
        state.batch_size = max(min(state.batch_size, batch.granted // 2), BATCH_OVERHEAD + RECORD_OVERHEAD)
        middle = batch.count // 2
        halves = [batch.part(0, middle), batch.part(middle, batch.count)]
        # The grants of the halves add up to the whole's, so the buffer's account does not change.
        halves[0].granted = batch.granted // 2
        halves[1].granted = batch.granted - halves[0].granted
        batch.forward(
            [(halves[0], index) for index in range(middle)]
            + [(halves[1], index) for index in range(batch.count - middle)]
        )
        for half in halves:
            self._count(half, 1)
        self._count(batch, -1)
        self._put_back(queue, halves)

    def fail(self, batch: Batch, error: MinibrokerError) -> None:
        """After `judge`: it has failed for good."""
        self._lose_numbers(self.queue_of(batch), batch.identity)
        if not batch.is_done:
            self._end(batch, error)

    def _put_back(self, queue: PartitionQueue, batches: Sequence[Batch]) -> None:
        queue.put_back(batches)
        if queue.topic not in self._changing:
            self._active[queue] = None

    def _lose_numbers(self, queue: PartitionQueue, identity: Identity | None) -> None:
        """The next number under `identity` is not the one that the log expects: go on in the next epoch (KIP-360).

        Each partition has epochs of its own, as each log has its own producer state. What waits under an old number
        and is certainly not in the log is numbered anew. What may be in the log keeps its number: if it is there, the
        broker will say so.
        """
        if identity is None or queue.identity != identity:
            return  # never numbered, or the partition is in another epoch already
        if identity.epoch < LAST_PRODUCER_EPOCH:
            queue.identity = identity._replace(epoch=identity.epoch + 1)
            queue.next_sequence = 0
        else:
            if self.identity is not None and self.identity.producer_id == identity.producer_id:
                self.identity = None
            queue.identity = None
        for batch in queue.waiting:
            if not batch.maybe_appended:
                batch.number_anew()

    def _end(self, batch: Batch, error: MinibrokerError | None) -> None:
        if error is None or batch.unreported == 0:
            self.used -= batch.granted
            batch.granted = 0
        else:
            self._failed[batch] = None
        if error is not None:
            batch.told_changed = self._told_changed
        self._count(batch, -1)
        batch.finish(error)

    def _told_changed(self, batch: Batch) -> None:
        """Of a batch that has failed: all of it was told, or somebody who should have been told of it is gone."""
        if batch.unreported:
            self._failed[batch] = None
        elif batch in self._failed:
            del self._failed[batch]
            self.used -= batch.granted
            batch.granted = 0
            self.on_room()

    # -- expiring and failing --

    def next_expiry(self, now: float) -> float:
        """No batch, present or future, expires before this time. Ask again then."""
        oldest = min((batch.created_at for batch in self._without_ending()), default=now)
        return oldest + self._delivery_timeout_s

    def _without_ending(self) -> Iterator[Batch]:
        for state in list(self._topics.values()):
            for queue in (*state.queues.values(), state.held):
                for batch in (*queue.in_flight, *queue.waiting):
                    if not batch.is_done:
                        yield batch

    @property
    def is_waiting(self) -> bool:
        """Whether any batch has not ended."""
        return bool(self._unfinished)

    def oldest(self, now: float) -> dict[tuple[str, int], Batch]:
        """For each partition (UNASSIGNED for held records) the first batch that has not ended, unless it lingers."""
        oldest: dict[tuple[str, int], Batch] = {}
        for batch in self._without_ending():
            key = batch.topic, batch.partition
            if key not in oldest or batch.order < oldest[key].order:
                oldest[key] = batch
        return {
            key: batch for key, batch in oldest.items() if batch.attempts or batch.created_at + self._linger_s <= now
        }

    def expired(self, now: float) -> list[Batch]:
        """Batches that were not delivered in time. Pass each of them to `expire`."""
        limit = now - self._delivery_timeout_s
        return [batch for batch in self._without_ending() if batch.created_at <= limit]

    def expire(self, batch: Batch, error: MinibrokerError) -> None:
        """Fail a batch of `expired`. One in flight stays so until its answer says what became of its number."""
        state = self._topics[batch.topic]
        queue = state.held if batch.partition == UNASSIGNED else self.queue_of(batch)
        if batch not in queue.in_flight:
            if not batch.is_closed:
                self._close(state, batch)
            queue.waiting.remove(batch)
            if not queue.waiting:
                self._active.pop(queue, None)
                if queue is state.held:
                    del self._held[batch.topic]
            self._lose_numbers(queue, batch.identity)
        self._end(batch, error)

    def fail_all(self, error: MinibrokerError) -> None:
        """Fail every record that has not ended: the producer is closed or broken."""
        self.open_batches.clear()
        for name, state in self._topics.items():
            self.fail_held(name, error)
            for queue in state.queues.values():
                for batch in (*queue.in_flight, *queue.waiting):
                    if not batch.is_closed:
                        self._close(state, batch)
                    if not batch.is_done:
                        self._end(batch, error)
                queue.in_flight.clear()
                queue.waiting.clear()
        self._active.clear()
        self._changing.clear()

    # -- flushing and closing --

    def close(self) -> None:
        """The fast path is over. What is held is still placed, and everything is still sent."""
        self._is_closed = True
        self.open_batches.clear()

    def begin_flush(self) -> int:
        """Everything added so far becomes ready. The number is for `is_flushed`."""
        self._flushing_up_to = self._generation
        self._generation += 1
        return self._flushing_up_to

    def is_flushed(self, flush: int) -> bool:
        """Whether every record that was added before `begin_flush` has ended."""
        return all(generation > flush for generation in self._unfinished)

    def unacknowledged(self) -> int:
        """How many records have not ended, or have failed without anybody being told."""
        waiting = sum(batch.count or len(batch.values) for batch in self._without_ending())
        return waiting + sum(batch.unreported for batch in self._failed)

    def take_failures(self) -> list[FailedRecord]:
        """The records that failed, are not awaited, and were not returned before. Gives their memory back."""
        failures: list[FailedRecord] = []
        for batch in list(self._failed):
            failures += batch.take_failures()
        return failures


def _no_such_partition(batch: Batch, partition_count: int) -> BrokerError:
    where = "it may be in the topic that was deleted" if batch.attempts else "it was not sent to the deleted one either"
    return BrokerError(
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        f"{batch.topic}-{batch.partition}: the topic was deleted and created again while the record waited, and has "
        f"partitions 0 to {partition_count - 1} now. Send the record to one of them: {where}",
        is_complete=True,
    )
