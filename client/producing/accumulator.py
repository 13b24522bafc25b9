"""Where records wait until they are sent: Kafka's RecordAccumulator. Pure.

The problem: `send` may cost its caller only a few hundred nanoseconds, and yet each record must be grouped with others
of its partition, get a place in a bounded buffer, and be sent exactly once and in order, although requests fail, arrive
late, or are answered by a broker that no longer leads.

**Adding.** A batch is a set of columns (lists), so that adding a record is three appends. `buffer.py` grants memory to
batches, `choosing.py` chooses partitions, `filling.py` appends. Records of a topic whose partitions are not known yet
are held in order, and added anew once they are known (`topic_is_known`); a held batch then *forwards* each of its
records.

**Sending.** `queues.py` decides which batches may be sent, in which order and under which numbers; `judge_batch`
decides what an answer means.

**Topics that come back.** A topic that was deleted and created again under its name is another topic, with other
partitions, whose logs know no producer. Each batch is sent under the id of its topic, and no other topic accepts it
(KIP-516). So an attempt under an older id says nothing about the present topic: it is void (`is_void`), and with it its
number and the doubt whether it was appended. A batch that is still in flight is voided when its answer arrives. An
attempt under the present id keeps number and doubt. Order holds within one topic. Rejected: concluding from
UNKNOWN_PRODUCER_ID that the topic is another one; when metadata confirms it, a batch may already have been sent to the
new topic.

If the partitioner chose the partition of a record, the record is placed by the new topic's number of partitions.
Therefore a batch holds only such records (`is_placed`), or only records whose partition the caller chose. If the number
differs, the topic is *changing* until nothing is in flight to its predecessor: nothing is sent to it, and added records
are held. Then the waiting batches are placed anew, oldest first, and after them the held records. So the records of a
key stay in order, and are all in the partition that the new number gives. Records whose partition the caller chose stay
there, or fail if it no longer exists. Rejected: placing anew at once. A batch that waits for its answer may have to be
sent again, and would then follow later records of its keys.

Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from minibroker.client.errors import FailedRecord, PartitionerFailed
from minibroker.client.producing.batch import (
    BATCH_OVERHEAD,
    HEADER_OVERHEAD,
    NOT_APPENDED,
    RECORD_OVERHEAD,
    UNASSIGNED,
    Batch,
    BatchVerdict,
    Identity,
    is_void,
    judge_batch,
)
from minibroker.client.producing.buffer import Buffer
from minibroker.client.producing.choosing import PartitionChoice
from minibroker.client.producing.columns import Columns
from minibroker.client.producing.filling import Filling, Part
from minibroker.client.producing.partitioners import Partitioner, RecordPartitioner
from minibroker.client.producing.queues import Generations, PartitionQueue, Ready, TopicState, ready
from minibroker.client.settings import check_topic_name
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.records import Header


class Accumulator:
    """See the module. Not thread-safe. Callers pass the time."""

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
        is_transactional: bool = False,
    ) -> None:
        self._batch_size = batch_size
        self._buffer = Buffer(buffer_memory)
        self._max_request_size = max_request_size
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        self._is_idempotent = is_idempotent
        self._is_transactional = is_transactional
        choice = PartitionChoice(partitioner, random)
        self._by_key = choice.by_key
        self._topics: dict[str, TopicState] = {}
        self._held: dict[str, None] = {}
        """Topics with held records."""
        self._changing: dict[str, None] = {}
        """Topics that were created again with another number of partitions while batches are in flight to their
        predecessors. None of their queues is active."""
        self._active: dict[PartitionQueue, None] = {}
        """Queues with batches waiting. A queue that was served moves to the end."""
        self._generations = Generations()
        self._filling = Filling(self._buffer, choice, self._generations, self._active, check_caller)
        self.open_batches = self._filling.open_batches
        self.on_room: Callable[[], None] = lambda: None
        """Called when room becomes free other than through the sender."""
        self.on_failed: Callable[[Batch, MinibrokerError], None] | None = None
        """Called when a batch fails."""
        self.has_sent = False
        """A batch of the present transaction was taken, so a partition may have joined it."""
        self._failed: dict[Batch, None] = {}
        self.identity: Identity | None = None
        """The producer id for partitions that need one; None: the sender must obtain it."""

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
        """Add a record. Return the batch, and the record's index in it.

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
        place = self._filling.add(state, value, key, partition, timestamp_ms, headers, size, now)
        if state.partition_count is None:
            self._held[topic] = None
        return place

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
        """`add` for the common case: the key's partition has an open batch with keys and with room. None: use `add`.
        Not for a RecordPartitioner."""
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

    # -- adding many --

    def add_many(self, now: float, topic: str, columns: Columns, partition: int | None) -> list[Part]:
        """Add one or more records: all of them or none. Return their places; those of a partition are in order.

        Raises as `add`, and PartitionerFailed.
        """
        index = columns.first_above(self._most_of_a_record)
        if index is not None:
            raise self._too_large(topic, columns.size(index, index + 1), index)
        state = self._state(topic)
        self._buffer.check_all(columns.size(0, len(columns)))
        # The overhead of batches must not admit some records and refuse others.
        with self._buffer.unlimited():
            parts = self._filling.add_many(now, state, columns, partition)
        if state.partition_count is None:
            self._held[topic] = None
        return parts

    # -- batches --

    # -- topics --

    def held_topics(self) -> list[tuple[str, float]]:
        """Return the topics whose partitions must be looked up, and since when a record has been waiting for that."""
        return [(name, self._topics[name].held.waiting[0].created_at) for name in self._held]

    def topics(self) -> list[str]:
        return list(self._topics)

    def changing_topics(self) -> list[str]:
        """Return the topics for which `topic_is_known` must be called again after the next answer."""
        return list(self._changing)

    def topic_is_known(self, topic: str, topic_id: str, partition_count: int, available: Sequence[int]) -> None:
        """Learn that the topic has that id, and partitions 0 to `partition_count` - 1; `available` have a leader.

        Places the held records. Must be called at every change. The count never shrinks under one id, but may under a
        new one (the topic was created again). If the new topic has another count, all records are placed by it as soon
        as nothing is in flight to the previous topic. Records whose partition the caller chose fail if it no longer
        exists.
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
        """Add every record of a held or returned batch anew, in order, within the memory that the batch has."""
        if not held.is_closed:
            self._filling.close(state, held)
        self._buffer.take_all(held)
        with self._generations.at(held.generation), self._buffer.unlimited():
            targets = self._placed_as_one(state, held) if held.is_bulk else self._placed_each(state, held)
        held.forward(targets)
        self._generations.count(held, -1)

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
            parts = self._filling.add_many(held.created_at, state, columns, held.partitions[0])
        except (BrokerError, PartitionerFailed) as error:
            refused = self._refuse(held, 0, held.count, error)
            return [(refused, index) for index in range(held.count)]
        targets: list[tuple[Batch, int]] = [(held, 0)] * held.count
        for batch, first, indexes in parts:
            for place, index in enumerate(indexes, first):
                targets[index] = batch, place
        return targets

    def _refuse(self, held: Batch, start: int, end: int, error: MinibrokerError) -> Batch:
        """Return a failed batch with these records of a held batch."""
        refused = held.part(start, end)
        refused.partition = UNASSIGNED
        refused.partitions = (held.partitions or [None] * held.count)[start:end]
        self._generations.count(refused, 1)
        self._end(refused, error)
        return refused

    def fail_held(self, topic: str, error: MinibrokerError) -> None:
        """Fail the held records of a topic whose partitions could not be looked up."""
        state = self._topics[topic]
        self._held.pop(topic, None)
        while state.held.waiting:
            batch = state.held.waiting.popleft()
            if not batch.is_closed:
                self._filling.close(state, batch)
            self._end(batch, error)

    def forget(self, topic: str) -> None:
        """Forget a topic after `fail_held`, unless more is known of it."""
        if self._topics[topic].partition_count is None and topic not in self._changing:
            del self._topics[topic]

    def _begin_anew(self, state: TopicState, partition_count: int) -> None:
        """Begin anew with a topic that was created again: all knowledge and numbers belong to the old topic.

        Batches in flight keep their numbers until their answers arrive (`judge`), and nothing overtakes them.
        """
        state.batch_size = self._batch_size
        state.previous = None
        for queue in state.queues.values():
            for batch in queue.waiting:
                batch.forget_attempts()
            self._lose_numbers(queue, queue.identity)
            queue.retry_at = 0.0
        if partition_count == state.partition_count:
            return  # every record stays in its partition
        state.partition_count = state.sticky = None
        self._changing[state.name] = None
        for queue in state.queues.values():
            if queue.open is not None:
                self._filling.close(state, queue.open)
            self._active.pop(queue, None)

    def _place_anew(self, state: TopicState, partition_count: int) -> None:
        """Place every waiting record by the new number of partitions, when nothing is in flight any more.

        A batch that may be in the log of the present topic keeps its partition and number.
        """
        waiting: list[Batch] = []
        for queue in state.queues.values():
            waiting += queue.waiting
            queue.waiting.clear()
            queue.retry_at = 0.0
        # Oldest first, which is the order within a queue. Otherwise a record could join a younger batch, which expires
        # later, and for which a flush does not wait.
        waiting.sort(key=lambda batch: (not batch.maybe_appended, batch.generation, batch.created_at))
        for batch in waiting:
            queue = self.queue_of(batch)
            if batch.is_placed and not batch.maybe_appended:
                self._place(state, batch)
            elif batch.partition < partition_count:
                if queue.open is not None:
                    self._filling.close(state, queue.open)
                queue.append(batch)
                self._active[queue] = None
            else:
                self._end(batch, _no_such_partition(batch, partition_count))

    # -- taking --

    @property
    def buffer_memory(self) -> int:
        return self._buffer.size

    @property
    def used(self) -> int:
        """Bytes of the buffer that are in use."""
        return self._buffer.used

    @property
    def is_over_limit(self) -> bool:
        return self._buffer.is_over_limit

    def lets_pass(self) -> bool:
        """Return whether a caller that waits for room may continue: there is room, or a failure to report."""
        return not self.is_over_limit or any(batch.unreported for batch in self._failed)

    def ready(self, now: float) -> Ready:
        """Return the partitions whose first batch may be sent now. The sender may have reasons to wait."""
        return ready(
            self._active,
            now,
            is_exhausted=self.is_over_limit,
            flushing_up_to=self._generations.flushing_up_to,
            linger_s=self._linger_s,
            is_idempotent=self._is_idempotent,
        )

    def backing_off(self, now: float) -> list[PartitionQueue]:
        """Return the queues that wait for `retry_at`. The sender ends the wait if the leader is no longer `tried`."""
        return [queue for queue in self._active if queue.retry_at > now]

    def lacks_identity(self, queue: PartitionQueue) -> bool:
        """Return whether the queue's first batch needs a producer id that the sender must obtain first."""
        return (
            self._is_idempotent
            and self.identity is None
            and queue.identity is None
            and queue.waiting[0].identity is None
        )

    def take(self, queue: PartitionQueue) -> Batch:
        """Take the first batch of a ready queue, numbered, to send it now. The caller must end it or put it back."""
        batch = queue.waiting.popleft()
        if not batch.is_closed:
            self._filling.close(self._topics[batch.topic], batch)
        del self._active[queue]
        if queue.waiting:
            self._active[queue] = None
        if self._is_idempotent and batch.identity is None:
            queue.number(batch, self.identity)
        self.has_sent = True
        batch.attempts += 1
        batch.topic_id = self._topics[batch.topic].topic_id
        queue.in_flight.append(batch)
        return batch

    # -- endings --

    def queue_of(self, batch: Batch) -> PartitionQueue:
        return self._topics[batch.topic].queues[batch.partition]

    def judge(self, batch: Batch, code: ErrorCode) -> BatchVerdict:
        """Take a batch out of flight, record whether it may be in the log, and return what to do (`judge_batch`)."""
        if is_void(batch.topic_id, self._topics[batch.topic].topic_id):
            batch.forget_attempts()
        elif code not in NOT_APPENDED:
            batch.maybe_appended = True
        queue = self.queue_of(batch)
        queue.in_flight.remove(batch)
        verdict = judge_batch(
            code,
            record_count=batch.count,
            is_first=queue.is_first(batch),
            maybe_appended=batch.maybe_appended,
            is_idempotent=self._is_idempotent,
        )
        if verdict is BatchVerdict.RENUMBER and self._is_transactional:
            return BatchVerdict.FAIL  # only the coordinator raises the epoch, at the end of the transaction
        return verdict

    def delivered(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        """After `judge`: the batch is in the log."""
        if batch.is_done:
            return  # it has expired; the numbers of the batches behind it are right
        batch.base_offset = base_offset
        batch.log_append_time_ms = log_append_time_ms
        self._end(batch, None)

    def retry(self, batch: Batch, retry_at: float) -> None:
        """After `judge`: send the batch again, under its number, not before `retry_at`."""
        queue = self.queue_of(batch)
        queue.retry_at = retry_at
        if batch.is_done:
            self._lose_numbers(queue, batch.identity)
            return
        if batch.identity != queue.identity and not batch.maybe_appended:
            batch.number_anew()  # the numbers were lost while it was in flight
        self._put_back(queue, [batch])

    def renumber(self, batch: Batch, retry_at: float) -> None:
        """After `judge`: send the batch again, in a new epoch."""
        queue = self.queue_of(batch)
        queue.retry_at = retry_at
        self._lose_numbers(queue, batch.identity)
        if not batch.is_done:
            batch.number_anew()
            self._put_back(queue, [batch])

    def split(self, batch: Batch) -> None:
        """After `judge`: send the batch again in two halves, and make smaller batches of this topic from now on."""
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
            self._generations.count(half, 1)
        self._generations.count(batch, -1)
        self._put_back(queue, halves)

    def fail(self, batch: Batch, error: MinibrokerError) -> None:
        """After `judge`: the batch has failed permanently."""
        self._lose_numbers(self.queue_of(batch), batch.identity)
        if not batch.is_done:
            self._end(batch, error)

    def _put_back(self, queue: PartitionQueue, batches: Sequence[Batch]) -> None:
        queue.put_back(batches)
        if queue.topic not in self._changing:
            self._active[queue] = None

    def _lose_numbers(self, queue: PartitionQueue, identity: Identity | None) -> None:
        if self._is_transactional:
            queue.begin_again(identity)
            return
        is_used_up = queue.lose_numbers(identity)
        if is_used_up and self.identity and identity and self.identity.producer_id == identity.producer_id:
            self.identity = None

    def _end(self, batch: Batch, error: MinibrokerError | None) -> None:
        if error is None or batch.unreported == 0:
            self._buffer.take_all(batch)
        else:
            self._failed[batch] = None
        if error is not None:
            batch.told_changed = self._told_changed
        self._generations.count(batch, -1)
        batch.finish(error)
        if error is not None and self.on_failed is not None:
            self.on_failed(batch, error)

    def _told_changed(self, batch: Batch) -> None:
        """Update the memory of a failed batch: all of its failures were reported, or the caller that awaited one is
        gone."""
        if batch.unreported:
            self._failed[batch] = None
        elif batch in self._failed:
            del self._failed[batch]
            self._buffer.take_all(batch)
            self.on_room()

    # -- expiring and failing --

    def next_expiry(self, now: float) -> float:
        """Return a time before which no batch expires, present or future."""
        oldest = min((batch.created_at for batch in self._unended()), default=now)
        return oldest + self._delivery_timeout_s

    def _unended(self) -> Iterator[Batch]:
        for state in list(self._topics.values()):
            for queue in (*state.queues.values(), state.held):
                for batch in (*queue.in_flight, *queue.waiting):
                    if not batch.is_done:
                        yield batch

    @property
    def is_waiting(self) -> bool:
        """Whether there is a batch that has not ended."""
        return self._generations.are_unfinished

    def oldest(self, now: float) -> dict[tuple[str, int], Batch]:
        """Return the first batch of each partition that has not ended, unless it lingers. Held records are under
        UNASSIGNED."""
        oldest: dict[tuple[str, int], Batch] = {}
        for batch in self._unended():
            key = batch.topic, batch.partition
            if key not in oldest or batch.order < oldest[key].order:
                oldest[key] = batch
        return {
            key: batch for key, batch in oldest.items() if batch.attempts or batch.created_at + self._linger_s <= now
        }

    def expired(self, now: float) -> list[Batch]:
        """Return the batches that were not delivered in time. Pass each to `expire`."""
        limit = now - self._delivery_timeout_s
        return [batch for batch in self._unended() if batch.created_at <= limit]

    def expire(self, batch: Batch, error: MinibrokerError) -> None:
        """Fail a batch of `expired`. A batch in flight stays in flight until its answer, for the sake of its number."""
        state = self._topics[batch.topic]
        queue = state.held if batch.partition == UNASSIGNED else self.queue_of(batch)
        if batch not in queue.in_flight:
            if not batch.is_closed:
                self._filling.close(state, batch)
            queue.waiting.remove(batch)
            if not queue.waiting:
                self._active.pop(queue, None)
                if queue is state.held:
                    del self._held[batch.topic]
            self._lose_numbers(queue, batch.identity)
        self._end(batch, error)

    # -- transactions --

    def close_batches(self) -> None:
        """Add no more records to any batch. Records that are added after this go into new ones."""
        for state in self._topics.values():
            for queue in (*state.queues.values(), state.held):
                if queue.open is not None:
                    self._filling.close(state, queue.open)

    def abandon(self, error: MinibrokerError) -> None:
        """Fail every record that has not ended, since its transaction is aborted. Batches in flight stay in flight
        until their answers: the next transaction's records must not overtake them."""
        for batch in list(self._unended()):
            self.expire(batch, error)

    def begin_epoch(self, identity: Identity) -> None:
        """Number the batches that are taken from now on under this identity, from 0. Every batch must have ended."""
        self.identity = identity
        for state in self._topics.values():
            for queue in state.queues.values():
                queue.forget_numbers()

    def fail_all(self, error: MinibrokerError) -> None:
        """Fail every record that has not ended, when the producer is closed or has crashed."""
        self.open_batches.clear()
        for name, state in self._topics.items():
            self.fail_held(name, error)
            for queue in state.queues.values():
                for batch in (*queue.in_flight, *queue.waiting):
                    if not batch.is_closed:
                        self._filling.close(state, batch)
                    if not batch.is_done:
                        self._end(batch, error)
                queue.in_flight.clear()
                queue.waiting.clear()
        self._active.clear()
        self._changing.clear()

    # -- flushing and closing --

    def close(self) -> None:
        """End the fast path. Held records are still placed, and all records are still sent."""
        self._filling.end_fast_path()

    def begin_flush(self) -> int:
        """Make all records ready that were added so far. Return a number for `is_flushed`."""
        return self._generations.begin_flush()

    def is_flushed(self, flush: int) -> bool:
        """Return whether every record has ended that was added before `begin_flush`."""
        return self._generations.is_flushed(flush)

    def unacknowledged(self) -> int:
        """Return the number of records that have not ended, or have failed and were not reported."""
        waiting = sum(batch.count or len(batch.values) for batch in self._unended())
        return waiting + sum(batch.unreported for batch in self._failed)

    def take_failures(self) -> list[FailedRecord]:
        """Return the failed records that are not awaited and were not returned before. Frees their memory."""
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
