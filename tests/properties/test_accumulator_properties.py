"""The producer's order and numbers against a log that checks sequences as the broker does, over any order of faults.

The test uses no sockets. A state machine adds records, takes batches, and answers them as a broker and a network might:
appended, refused before or after the append, connection lost before or after it. The broker may carry out a request of
a lost connection much later. The topic is deleted and created again, with the same number of partitions or another, and
the producer learns of it later. In the end everything is delivered, and these rules hold:

- No record is in the log of a topic twice, whatever its Delivery says.
- Delivered records are at the offsets reported, in the order of their `send` within a topic: all records of a partition
  while the number of partitions stays, otherwise the records of each key and those whose partition the caller chose.
- A key is in the partition that follows from the number of partitions.
- Only a record whose partition the caller chose can fail because that partition does not exist.
- Every record has an outcome, and the buffer is empty.
"""

from __future__ import annotations

from collections import deque
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minibroker.broker.storage.producer_state import ProducerState
from minibroker.client.errors import BufferFull, DeliveryTimedOut
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import Batch, BatchVerdict, Identity
from minibroker.client.producing.columns import Columns
from minibroker.client.producing.partitioners import Partitioner, crc32
from minibroker.protocol import topic_ids
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import encode_batch, parse_header

PARTITIONS = 2
MAX_IN_FLIGHT = 5


class ModelLog:
    """A partition: its values, and the broker's own check of sequences."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.producers = ProducerState()

    def append(self, identity: Identity, sequence: int, values: list[bytes | None]) -> tuple[ErrorCode, int]:
        batch = encode_batch(
            values,
            base_timestamp=0,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            base_sequence=sequence,
        )
        header = parse_header(batch)
        try:
            repeated = self.producers.check(header)
        except BrokerError as error:
            return error.code, -1
        if repeated is not None:
            return ErrorCode.NONE, repeated.first_offset
        offset = len(self.values)
        self.producers.update(header, offset, now_ms=0)
        self.values += values
        return ErrorCode.NONE, offset


class Topic:
    def __init__(self, number: int, partitions: int) -> None:
        self.topic_id = topic_ids.make(1, number, b"chance")
        self.logs = [ModelLog() for _ in range(partitions)]


class Sent:
    """A request as the network holds it: its content no longer changes."""

    def __init__(self, batch: Batch) -> None:
        assert batch.identity is not None
        self.batch = batch
        self.topic_id = batch.topic_id
        self.identity = batch.identity
        self.sequence = batch.sequence
        self.values = list(batch.values)


class ProducerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.topics = [Topic(1, PARTITIONS)]
        self.told = self.topics[0]
        """The topic as the producer knows it."""
        self.placed: dict[Batch, ModelLog] = {}
        """The logs that contain delivered batches."""
        self.wire: deque[Sent] = deque()
        self.late: list[Sent] = []
        self.records: list[tuple[bytes, Batch, int]] = []
        self.keys: dict[bytes, bytes] = {}
        """Partitions of the records that the partitioner placed by key."""
        self.chosen: dict[bytes, int] = {}
        """Partitions that the caller chose."""
        self.identities = 0

    @initialize(seed=st.integers(0, 1_000), batch_size=st.sampled_from([200, 400, 100_000]), known=st.booleans())
    def begin(self, seed: int, batch_size: int, known: bool) -> None:
        self.random = Random(seed)
        self.accumulator = Accumulator(
            batch_size=batch_size,
            buffer_memory=64 * 1024,
            max_request_size=64 * 1024,
            linger_s=0.0,
            delivery_timeout_s=100.0,
            is_idempotent=True,
            partitioner=Partitioner(),
            random=self.random,
        )
        if known:
            self.learn()

    @rule()
    def learn(self) -> None:
        self.told = self.topics[-1]
        self.tell()

    def tell(self) -> None:
        count = len(self.told.logs)
        self.accumulator.topic_is_known("t", self.told.topic_id, count, range(count))

    @rule(partitions=st.integers(1, PARTITIONS + 2))
    def create_again(self, partitions: int) -> None:
        self.topics.append(Topic(len(self.topics) + 1, partitions))

    @rule(count=st.integers(1, 8), keyed=st.booleans(), partition=st.none() | st.integers(0, PARTITIONS))
    def add(self, count: int, keyed: bool, partition: int | None) -> None:
        for _ in range(count):
            value = str(len(self.records)).encode()
            key = value[-1:] if keyed else None
            try:
                handle = self.accumulator.add(self.now, "t", value, key, partition, 0, None)
            except BufferFull:
                return
            except BrokerError:
                continue  # a partition that does not exist
            self.records.append((value, *handle))
            if partition is not None:
                self.chosen[value] = partition
            elif key is not None:
                self.keys[value] = key

    @rule(
        kinds=st.lists(st.booleans(), min_size=1, max_size=40),
        has_keys=st.booleans(),
        partition=st.none() | st.integers(0, PARTITIONS),
        longest=st.sampled_from([1, 30, 300]),
    )
    def add_many(self, kinds: list[bool], has_keys: bool, partition: int | None, longest: int) -> None:
        """Add records. `kinds` says for each whether it has a key, or is None if none has."""
        first = len(self.records)
        values = [str(first + number).encode().ljust(1 + number * 37 % longest, b".") for number in range(len(kinds))]
        keys = [b"%d" % (number % 7) if kind else None for number, kind in enumerate(kinds)] if has_keys else None
        columns = Columns(list(values), None if keys is None else list(keys), [0] * len(values))
        used = self.accumulator.used
        try:
            parts = self.accumulator.add_many(self.now, "t", columns, partition)
        except (BufferFull, BrokerError):
            assert self.accumulator.used == used
            return
        places: dict[int, tuple[Batch, int]] = {}
        for part in parts:
            for place, index in enumerate(part.indexes, part.first):
                assert index not in places
                places[index] = part.batch, place
        for index, value in enumerate(values):
            self.records.append((value, *places[index]))
            key = None if keys is None else keys[index]
            if partition is not None:
                self.chosen[value] = partition
            elif key is not None:
                self.keys[value] = key

    @rule(flush=st.booleans())
    def send(self, flush: bool) -> None:
        if flush:
            self.accumulator.begin_flush()
        if self.accumulator.changing_topics():
            self.tell()
        for queue in self.accumulator.ready(self.now).queues:
            if len(self.wire) >= MAX_IN_FLIGHT:
                return
            if self.accumulator.lacks_identity(queue):
                self.identities += 1
                self.accumulator.identity = Identity(self.identities, 0)
            self.wire.append(Sent(self.accumulator.take(queue)))

    @precondition(lambda self: self.wire)
    @rule(
        code=st.sampled_from(
            [
                ErrorCode.NONE,
                ErrorCode.NONE,
                ErrorCode.NONE,
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                ErrorCode.NOT_ENOUGH_REPLICAS,
                ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
                ErrorCode.MESSAGE_TOO_LARGE,
                ErrorCode.INVALID_RECORD,
                ErrorCode.REQUEST_TIMED_OUT,
            ]
        )
    )
    def answer(self, code: ErrorCode) -> None:
        """Let the broker answer the oldest request: with its own result, or with `code`."""
        sent = self.wire.popleft()
        after_append = code in (
            ErrorCode.NONE,
            ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
            ErrorCode.REQUEST_TIMED_OUT,
        )
        offset = -1
        if after_append:
            own, offset = self.append(sent)
            code = code if own is ErrorCode.NONE else own
            if code is ErrorCode.NONE:
                self.placed[sent.batch] = self.topics[-1].logs[sent.batch.partition]
        self.settle(sent.batch, code, offset)

    @precondition(lambda self: self.wire)
    @rule(appended=st.integers(0, MAX_IN_FLIGHT), late=st.integers(0, MAX_IN_FLIGHT))
    def lose_connection(self, appended: int, late: int) -> None:
        """Lose a connection. Some requests in flight were carried out, some will be later, some never are."""
        lost = list(self.wire)
        self.wire.clear()
        for sent in lost[:appended]:
            self.append(sent)
        self.late += lost[appended : appended + late]
        for sent in lost:
            self.settle(sent.batch, ErrorCode.NETWORK_EXCEPTION, -1)

    @precondition(lambda self: self.late)
    @rule()
    def carry_out_late(self) -> None:
        sent = self.late.pop(0)
        self.append(sent)

    @rule(seconds=st.sampled_from([0.1, 1.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for batch in self.accumulator.expired(self.now):
            self.accumulator.expire(batch, DeliveryTimedOut("late"))

    def append(self, sent: Sent) -> tuple[ErrorCode, int]:
        topic = self.topics[-1]
        if sent.batch.partition >= len(topic.logs):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1
        if sent.topic_id != topic.topic_id:
            return ErrorCode.INCONSISTENT_TOPIC_ID, -1
        for value in sent.values:
            assert value is not None
            if value in self.keys:
                assert sent.batch.partition == crc32(self.keys[value], len(topic.logs))
            assert self.chosen.get(value, sent.batch.partition) == sent.batch.partition
        return topic.logs[sent.batch.partition].append(sent.identity, sent.sequence, sent.values)

    def settle(self, batch: Batch, code: ErrorCode, offset: int) -> None:
        match self.accumulator.judge(batch, code):
            case BatchVerdict.DELIVERED:
                self.accumulator.delivered(batch, offset, -1)
            case BatchVerdict.RETRY:
                self.accumulator.retry(batch, self.now + self.random.choice([0.0, 0.5]))
            case BatchVerdict.RENUMBER:
                self.accumulator.renumber(batch, self.now)
            case BatchVerdict.SPLIT:
                self.accumulator.split(batch)
            case BatchVerdict.FAIL:
                self.accumulator.fail(batch, BrokerError(code))

    def logs(self) -> list[ModelLog]:
        return [log for topic in self.topics for log in topic.logs]

    @invariant()
    def no_record_is_in_the_log_twice(self) -> None:
        for log in self.logs():
            assert len(set(log.values)) == len(log.values)

    def teardown(self) -> None:
        if not hasattr(self, "accumulator"):
            return
        self.learn()
        flush = self.accumulator.begin_flush()
        while not self.accumulator.is_flushed(flush):
            self.now += 1.0
            self.send(True)
            while self.wire:
                self.answer(ErrorCode.NONE)
            assert self.now < 100_000, "the accumulator is stuck"
        while self.late:
            self.carry_out_late()
        self.no_record_is_in_the_log_twice()
        is_one_count = len({len(topic.logs) for topic in self.topics}) == 1
        positions: dict[tuple[ModelLog, object], list[int]] = {}
        for value, batch, index in self.records:
            while batch.forwarded is not None:
                batch, index = batch.forwarded[index]
            assert batch.is_done
            if batch.error is None:
                offset = batch.base_offset + index
                log = self.placed[batch]
                assert log.values[offset] == value
                group: object = None
                if not is_one_count:
                    is_free = value not in self.keys and value not in self.chosen
                    group = self.keys.get(value), self.chosen.get(value), value if is_free else None
                positions.setdefault((log, group), []).append(offset)
            elif isinstance(batch.error, BrokerError) and batch.error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                assert value in self.chosen
        for offsets in positions.values():
            assert offsets == sorted(offsets)
        self.accumulator.take_failures()
        assert self.accumulator.used == 0


ProducerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfFaults = ProducerMachine.TestCase
