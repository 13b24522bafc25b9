from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from minibroker.broker.groups.coordination import GroupCoordination
from minibroker.broker.handlers.authorization import Authorizer
from minibroker.broker.handlers.dispatch import dispatcher
from minibroker.broker.handlers.produce import MOST_AT_ONCE
from minibroker.broker.handlers.sasl import SaslServer
from minibroker.broker.handlers.services import ControlEpoch, Services
from minibroker.broker.network.dialect import Answer, BadInput
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.broker.network.native_dialect import NativeDialect, NativeListener
from minibroker.broker.network.request_channel import Request, Session
from minibroker.broker.quotas.mutations import ControllerMutationQuotaManager
from minibroker.broker.quotas.throttling import ClientQuotaManager
from minibroker.broker.replication.transcoding import Transcoder
from minibroker.broker.scheduling import slices
from minibroker.broker.scheduling.budget import FairBudget
from minibroker.broker.scheduling.purgatory import DelayedOperation, Purgatory, Timer
from minibroker.broker.scheduling.slices import SlicedCalls
from minibroker.broker.storage import validator
from minibroker.broker.transactions.producer_ids import ProducerIds
from minibroker.broker.transactions.verification import TransactionVerifier
from minibroker.protocol import apis, records, znodes
from minibroker.protocol.connections.framing import FrameReader
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    LeaderAndIsrRequest,
    LeaderAndIsrResponse,
    LeaderAndIsrTopic,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    RequestEnvelope,
    StopReplicaRequest,
    StopReplicaResponse,
    UpdateMetadataRequest,
    UpdateMetadataResponse,
)
from minibroker.protocol.messages.transactions import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from minibroker.protocol.model import ZooKeeperContact
from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_RECORDS, encode_batch
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import write_header
from tests.replication_support import TOPIC, TOPIC_ID, OneBroker, state, with_one_broker
from tests.running import run_by
from tests.storage_support import batch
from tests.waiting import until

RECORDS = batch(3)


Coordinator = Callable[[AddPartitionsToTxnRequest], Awaitable[AddPartitionsToTxnResponse]]


class Peer:
    """The connection that requests come from and responses go to."""

    def __init__(self, broker: OneBroker, secret: bytes | None = None) -> None:
        self.session = Session()
        self.dialect = NativeDialect(NativeListener("PLAINTEXT", apis.Plane.DATA, 1 << 20))
        self.peer = "test:1"
        self.listener = "PLAINTEXT"
        self.closed = False
        self.answers: list[bytes | None] = []
        self.services = Services(
            metadata=broker.metadata,
            replicas=broker.replicas,
            producer_ids=ProducerIds(1, broker._session),
            administration=None,  # type: ignore[arg-type]  # nothing here gets as far as the controller
            configs=None,  # type: ignore[arg-type]  # nor to ZooKeeper
            client_quotas=ClientQuotaManager(11, 1, broker.world.clock.monotonic),
            mutation_quotas=ControllerMutationQuotaManager(11, 1, broker.world.clock.monotonic),
            sasl=SaslServer(broker.config, broker.world),
            sessions=None,  # type: ignore[arg-type]
            forwarding=None,  # type: ignore[arg-type]  # nor do brokers that are not the controller
            groups=GroupCoordination(
                broker.world,
                broker.config,
                broker.metadata,
                broker.replicas,
                broker.supervisor.start,
                None,  # type: ignore[arg-type]  # there are no transactions
            ),
            transactions=None,  # type: ignore[arg-type]
            verifier=TransactionVerifier(
                1,
                broker.metadata,
                None,  # type: ignore[arg-type]  # there is one broker
                self._extend_transactions,
                lambda: self.verifies_transactions,
            ),
            auto_topic_creation=None,  # type: ignore[arg-type]
            transcoder=Transcoder(broker.replicas, broker.world.new_executor("transcoding")),
            in_turn=lambda call: call(),
            large_answers=lambda: LargeRequests(broker.world.new_executor("large requests")),
            waiting_fetches=FairBudget(1 << 30),
            topic_purgatory=Purgatory[DelayedOperation]("topics", Timer()),
            metadata_answers=SlicedCalls(broker.supervisor.start, "answers to Metadata"),
            control_epoch=ControlEpoch(),
            authorizer=Authorizer(1, secret, broker.world.random, broker.world.clock.monotonic),
            registered_epoch=self._registered_epoch,
            zookeeper_contact=lambda: ZooKeeperContact(None, 6_000),
            slow_disks=tuple,
            background=broker.supervisor.start,
        )
        self.verifies_transactions = True
        self.coordinator: Coordinator | None = None
        """What answers the questions of this broker's verifier."""
        self._broker = broker
        self._dispatch = dispatcher(self.services)

    async def _extend_transactions(self, body: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        assert self.coordinator is not None
        return await self.coordinator(body)

    async def _registered_epoch(self, at_least: int) -> int:
        while self._broker.broker_epoch < at_least:
            await asyncio.sleep(0.01)
        return self._broker.broker_epoch

    def proved_broker(self) -> None:
        pass

    def authenticated(self) -> None:
        pass

    def close(self) -> None:
        pass

    def introduced(self, name: str, version: str) -> None:
        raise AssertionError("nobody says anything here")

    def answered(self, request: Request, answer: Answer | None) -> None:
        self.answers.append(None if answer is None else b"".join(answer))

    def handled(self, *, wake: bool) -> None:
        pass

    def refused(self, bad_input: BadInput) -> None:
        raise AssertionError("nothing is decoded late here")

    def close_connection(self, reason: str) -> None:
        self.closed = True

    on_answer = None

    def throttle(self, seconds: float) -> None: ...

    def room_in_channel(self, size: int) -> None:
        pass

    async def send(self, api: apis.Api[Any, Any], body: Any) -> None:
        envelope = RequestEnvelope(api.key, 0, 7, "test", b"")  # type: ignore[arg-type]
        request = Request(self, self._broker.world.clock.monotonic, api, envelope, body, 100, 0.0)
        if (rest := await self._dispatch(request)) is not None:
            await rest

    def answer(self, api: apis.Api[Any, Any]) -> Any:
        frame = self.answers[-1]
        assert frame is not None
        size = len(frame)
        reader = FrameReader(lambda _: size)
        contents: list[bytes | memoryview] = []
        while frame:
            buffer = reader.get_buffer()
            piece, frame = frame[: len(buffer)], frame[len(buffer) :]
            buffer[: len(piece)] = piece
            contents += reader.buffer_updated(len(piece))
        [content] = contents
        return apis.decode_response(api, apis.decode_response_envelope(content))


def produce(*partitions: int, acks: int = -1, records: Any = RECORDS, topic: str = TOPIC) -> ProduceRequest:
    data = [ProducePartition(index, memoryview(records)) for index in partitions]
    return ProduceRequest(None, acks, 1_000, [ProduceTopic(topic, data)])


# -- produce --


@run_by(with_one_broker)
async def test_partitions_succeed_and_fail_one_by_one(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state())
    await peer.send(apis.PRODUCE, produce(0, 9, acks=1))
    answer: ProduceResponse = peer.answer(apis.PRODUCE)
    assert [(p.index, p.error_code, p.base_offset) for p in answer.responses[0].partition_responses] == [
        (0, ErrorCode.NONE, 0),
        (9, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1),
    ]
    assert broker.replicas.appender.refusals == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: 1}


@run_by(with_one_broker)
async def test_a_second_batch_of_a_partition_is_refused_with_the_first(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state())
    for behind in (RECORDS, b"\0"):
        await peer.send(apis.PRODUCE, produce(0, acks=1, records=RECORDS + behind))
        [part] = peer.answer(apis.PRODUCE).responses[0].partition_responses
        assert part.error_code == ErrorCode.INVALID_RECORD
        assert "send the next one in another request" in part.error_message
    assert broker.partition().log.log_end_offset == 0


@pytest.mark.parametrize("magic", [MAGIC_RECORDS, MAGIC_COLUMNS])
@run_by(with_one_broker)
async def test_a_batch_of_eight_bytes_that_claims_a_million_records_is_refused(
    broker: OneBroker, /, magic: int
) -> None:
    peer = Peer(broker)
    await broker.told(state())
    count = 1 << 20
    header = records.parse_header(encode_batch([b"v"], base_timestamp=1_000, magic=magic))
    claim = msgspec.structs.replace(header, records_count=count, last_offset_delta=count - 1)
    first = b"\x02" if magic == MAGIC_RECORDS else b"\x95"  # so it begins as records or columns do
    sent = write_header(bytearray(records.HEADER_SIZE) + first + bytes(7), claim)
    await peer.send(apis.PRODUCE, produce(0, acks=1, records=sent))
    [part] = peer.answer(apis.PRODUCE).responses[0].partition_responses
    assert part.error_code == ErrorCode.INVALID_RECORD
    assert "claims 1048576 records" in part.error_message
    assert broker.partition().log.log_end_offset == 0


@run_by(with_one_broker)
async def test_a_produce_for_thousands_of_partitions_lets_others_run(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state(), state(index=1))
    with patch.object(slices, "SLICE_S", 0.0):
        sent = asyncio.create_task(peer.send(apis.PRODUCE, produce(*range(5_000), acks=1)))
        pauses = 0
        while not sent.done() or not peer.answers:
            pauses += 1
            await asyncio.sleep(slices.BREATH_S)
        await sent
    parts = peer.answer(apis.PRODUCE).responses[0].partition_responses
    assert sorted(part.index for part in parts) == list(range(5_000))
    assert [part.index for part in parts if part.error_code == ErrorCode.NONE] == [0, 1]
    assert pauses > 5_000 / MOST_AT_ONCE / 2


class Thread:
    """A worker that records its calls and waits until it may begin."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.may_begin = asyncio.Event()

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        self.asked.append(function)
        await self.may_begin.wait()
        return function(*arguments)


def keyed(count: int, magic: int, compression: Compression = Compression.NONE, key: bytes | None = b"k") -> bytes:
    batch = encode_batch([b"v"] * count, keys=[key] * count, base_timestamp=0, magic=magic, compression=compression)
    return bytes(batch)


def with_compacted_topic(tmp_path: Path, scenario: Callable[[OneBroker, Peer, Thread], Awaitable[None]]) -> None:
    async def run(broker: OneBroker) -> None:
        broker.zookeeper.make(znodes.topic_config_path(TOPIC), znodes.encode_config({"cleanup.policy": "compact"}))
        peer, thread = Peer(broker), Thread()
        broker.replicas.appender._checks = thread
        await broker.told(state(1, isr=(1,), replicas=(1,)))
        await scenario(broker, peer, thread)

    with_one_broker(tmp_path, run)


@pytest.mark.parametrize("magic", [MAGIC_RECORDS, MAGIC_COLUMNS])
@run_by(with_compacted_topic)
async def test_records_of_a_large_batch_for_a_compacted_topic_are_checked_only_in_a_thread(
    broker: OneBroker, peer: Peer, thread: Thread, /, monkeypatch: pytest.MonkeyPatch, magic: int
) -> None:
    """Checking a million records took seconds, during which the event loop stood still."""
    looked_at: list[bool] = []

    def decode_batch(*arguments: Any, **named: Any) -> Any:
        looked_at.append(thread.may_begin.is_set())
        return records.decode_batch(*arguments, **named)

    monkeypatch.setattr(validator, "decode_batch", decode_batch)
    sending = asyncio.create_task(peer.send(apis.PRODUCE, produce(0, records=keyed(5_000, magic))))
    await until(lambda: bool(thread.asked))
    await peer.send(apis.PRODUCE, produce(0, records=keyed(3, magic)))
    assert broker.partition().log.log_end_offset == 3, "another connection is not held up"
    thread.may_begin.set()
    await sending
    assert broker.partition().log.log_end_offset == 5_003
    assert looked_at == [False, True]


@run_by(with_compacted_topic)
async def test_the_records_that_a_batch_is_refused_for_are_named(
    broker: OneBroker, peer: Peer, thread: Thread, /
) -> None:
    def errors(peer: Peer) -> list[list[int]]:
        """Return for each partition which records are named, and why."""
        parts = peer.answer(apis.PRODUCE).responses[0].partition_responses
        assert {part.error_code for part in parts} == {ErrorCode.INVALID_RECORD}
        messages = {error.batch_index_error_message for part in parts for error in part.record_errors}
        assert messages == {"a record without a key, and the topic is compacted"}
        return [[error.batch_index for error in part.record_errors] for part in parts]

    thread.may_begin.set()
    some = records.encode_batch([b"v"] * 5, keys=[b"k", None, b"k", None, None], base_timestamp=0)
    await peer.send(apis.PRODUCE, produce(0, records=some))
    assert errors(peer) == [[1, 3, 4]]
    await peer.send(apis.PRODUCE, produce(0, records=keyed(500, MAGIC_RECORDS, key=None)))
    assert errors(peer) == [list(range(500))]
    many = keyed(20_000, MAGIC_RECORDS, Compression.ZSTD, key=None)
    await peer.send(apis.PRODUCE, produce(0, records=many))
    assert errors(peer) == [list(range(10_000))]
    assert broker.partition().log.log_end_offset == 0


@run_by(with_compacted_topic)
async def test_the_response_carries_the_faults_that_a_thread_finds_in_records(
    broker: OneBroker, peer: Peer, thread: Thread, /
) -> None:
    thread.may_begin.set()
    small = keyed(2, MAGIC_RECORDS, Compression.GZIP)
    swelling = records.encode_batch(
        [bytes(1 << 20)],
        keys=[b"key"],
        base_timestamp=1_000,
        magic=MAGIC_RECORDS,
        compression=Compression.GZIP,
    )
    for sent, code, asked in (
        (small, ErrorCode.NONE, 0),
        (small[:20] + b"?" + small[21:], ErrorCode.CORRUPT_MESSAGE, 0),
        (swelling, ErrorCode.NONE, 1),
        (swelling[:-1] + b"?", ErrorCode.CORRUPT_MESSAGE, 1),
        (keyed(2_000, MAGIC_RECORDS, key=None), ErrorCode.INVALID_RECORD, 1),
    ):
        thread.asked.clear()
        await peer.send(apis.PRODUCE, produce(0, records=memoryview(sent)))
        assert peer.answer(apis.PRODUCE).responses[0].partition_responses[0].error_code == code
        assert len(thread.asked) == asked
    assert broker.partition().log.log_end_offset == 3


def zeros(mebibytes: int) -> memoryview:
    """Return a batch of one record, 4 bytes for each 128 KiB of it."""
    blocks = mebibytes << 3
    block = (131_072 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    frame = b"\x28\xb5\x2f\xfd\x00\x38" + block * blocks + b"\1\0\0"
    header = records.parse_header(encode_batch([b"v"], base_timestamp=1_000, magic=MAGIC_RECORDS))
    batch = bytearray(records.HEADER_SIZE) + frame
    return memoryview(write_header(batch, msgspec.structs.replace(header, attributes=int(Compression.ZSTD))))


@run_by(with_one_broker)
async def test_a_batch_that_readers_may_refuse_is_decompressed_in_a_thread_and_no_other_is(
    broker: OneBroker, /
) -> None:
    peer, thread = Peer(broker), Thread()
    thread.may_begin.set()
    broker.replicas.appender._checks = thread
    await broker.told(state(1, isr=(1,), replicas=(1,)))
    for sent, code, asked in (
        (RECORDS, ErrorCode.NONE, 0),
        (zeros(7), ErrorCode.NONE, 0),
        (zeros(9), ErrorCode.NONE, 1),
        (zeros(65), ErrorCode.MESSAGE_TOO_LARGE, 1),
    ):
        thread.asked.clear()
        before = broker.partition().log.log_end_offset
        await peer.send(apis.PRODUCE, produce(0, records=sent))
        answer = peer.answer(apis.PRODUCE).responses[0].partition_responses[0]
        assert answer.error_code == code
        assert len(thread.asked) == asked
        assert (broker.partition().log.log_end_offset > before) == (code is ErrorCode.NONE)
    assert "at most 67108864 bytes of records, decompressed" in answer.error_message


@run_by(with_one_broker)
async def test_a_repeated_batch_is_neither_checked_nor_converted_by_the_present_settings(broker: OneBroker, /) -> None:
    """The present settings may refuse batches that are already in the log."""

    peer, thread = Peer(broker), Thread()
    broker.replicas.appender._checks = thread
    await broker.told(state(1, isr=(1,), replicas=(1,)))
    thread.may_begin.set()
    sent = encode_batch(  # too large as Kafka's records, and without a key
        [bytes(17 << 20)],
        base_timestamp=1_000,
        producer_id=3,
        producer_epoch=0,
        base_sequence=0,
        compression=Compression.ZSTD,
    )
    settings = {"record.format": "kafka", "cleanup.policy": "compact"}
    for _ in range(2):
        await peer.send(apis.PRODUCE, produce(0, records=sent))
        answer = peer.answer(apis.PRODUCE).responses[0].partition_responses[0]
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, 0)
        broker.zookeeper.make(znodes.topic_config_path(TOPIC), znodes.encode_config(settings))
        await broker.replicas.settings.topic_config_changed(TOPIC, await broker._session())
    assert broker.partition().log.log_end_offset == 1
    assert len(thread.asked) == 1, "when it came first"
    await peer.send(apis.PRODUCE, produce(0, records=RECORDS))
    answer = peer.answer(apis.PRODUCE).responses[0].partition_responses[0]
    assert answer.error_code == ErrorCode.INVALID_RECORD, "the settings hold for new batches"


@run_by(with_one_broker)
async def test_a_batch_of_a_transaction_without_a_transactional_id_is_refused_and_not_written(
    broker: OneBroker, /
) -> None:
    peer = Peer(broker)
    await broker.told(state())
    records = encode_batch(
        [b"value"], base_timestamp=0, producer_id=5, producer_epoch=0, base_sequence=0, transactional=True
    )
    await peer.send(apis.PRODUCE, produce(0, acks=1, records=records))
    [answer] = peer.answer(apis.PRODUCE).responses[0].partition_responses
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert "without a transactional id" in answer.error_message
    assert broker.partition().log.log_end_offset == 0


@run_by(with_one_broker)
async def test_with_acks_0_nothing_is_answered_and_an_error_closes_the_connection(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state())
    await peer.send(apis.PRODUCE, produce(0, acks=0))
    assert (peer.answers, peer.closed) == ([None], False)
    await peer.send(apis.PRODUCE, produce(9, acks=0))
    assert (peer.answers, peer.closed) == ([None, None], True)


@pytest.mark.parametrize(
    ("request_", "code"),
    [(produce(0, acks=2), ErrorCode.INVALID_REQUIRED_ACKS), (produce(0, 0), ErrorCode.INVALID_REQUEST)],
)
@run_by(with_one_broker)
async def test_a_produce_request_that_makes_no_sense_appends_nothing(
    broker: OneBroker, /, request_: ProduceRequest, code: ErrorCode
) -> None:
    await broker.told(state())
    with pytest.raises(BrokerError) as raised:
        await Peer(broker).send(apis.PRODUCE, request_)
    assert raised.value.code is code
    assert broker.partition().log.log_end_offset == 0


@run_by(with_one_broker)
async def test_a_produce_that_waits_for_replicas_does_not_keep_its_records_in_memory(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state())
    frame = bytearray(RECORDS)
    await peer.send(apis.PRODUCE, produce(0, records=frame))
    assert peer.answers == []
    frame.append(0)  # raises BufferError while a view of it exists
    broker.follower_has(3, 2, 3)
    await asyncio.sleep(0.01)
    assert peer.answer(apis.PRODUCE).responses[0].partition_responses[0].error_code == ErrorCode.NONE


# -- control --


def leader_and_isr(controller_epoch: int, broker_epoch: int = 1, leader_epoch: int = 0) -> LeaderAndIsrRequest:
    topic = LeaderAndIsrTopic(TOPIC, TOPIC_ID, [state(epoch=leader_epoch)])
    return LeaderAndIsrRequest(1, controller_epoch, broker_epoch, [topic], [])


@run_by(with_one_broker)
async def test_orders_of_a_deposed_controller_are_refused(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await peer.send(apis.UPDATE_METADATA, UpdateMetadataRequest(2, 5, 1, [], []))
    metadata: UpdateMetadataResponse = peer.answer(apis.UPDATE_METADATA)
    assert metadata.error_code == ErrorCode.NONE
    await peer.send(apis.LEADER_AND_ISR, leader_and_isr(4))
    refused: LeaderAndIsrResponse = peer.answer(apis.LEADER_AND_ISR)
    assert refused.error_code == ErrorCode.STALE_CONTROLLER_EPOCH
    await peer.send(apis.STOP_REPLICA, StopReplicaRequest(1, 4, 1, []))
    stopped: StopReplicaResponse = peer.answer(apis.STOP_REPLICA)
    assert stopped.error_code == ErrorCode.STALE_CONTROLLER_EPOCH
    await peer.send(apis.UPDATE_METADATA, UpdateMetadataRequest(1, 4, 1, [], []))
    assert peer.answer(apis.UPDATE_METADATA).error_code == ErrorCode.STALE_CONTROLLER_EPOCH
    assert broker.metadata.controller_id == 2
    assert not broker.replicas.partitions


@run_by(with_one_broker)
async def test_orders_for_a_former_run_of_the_broker_are_refused(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    broker.broker_epoch = 8
    await peer.send(apis.LEADER_AND_ISR, leader_and_isr(1, broker_epoch=7))
    assert peer.answer(apis.LEADER_AND_ISR).error_code == ErrorCode.STALE_BROKER_EPOCH
    assert not broker.replicas.partitions


@run_by(with_one_broker)
async def test_an_order_waits_until_the_broker_knows_its_own_epoch(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    sent = asyncio.ensure_future(peer.send(apis.LEADER_AND_ISR, leader_and_isr(1, broker_epoch=2)))
    await asyncio.sleep(1)
    assert not sent.done()
    broker.broker_epoch = 2
    await sent
    assert peer.answer(apis.LEADER_AND_ISR).error_code == ErrorCode.NONE
    assert broker.partition().is_leader


@run_by(with_one_broker)
async def test_an_order_overtaken_by_a_new_registration_is_refused_as_a_whole(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    session, broker.session = broker.session, None
    sent = asyncio.ensure_future(peer.send(apis.LEADER_AND_ISR, leader_and_isr(1)))
    await asyncio.sleep(1)
    broker.session, broker.broker_epoch = session, 2
    await sent
    assert peer.answer(apis.LEADER_AND_ISR).error_code == ErrorCode.STALE_BROKER_EPOCH
    assert not broker.partition().is_leader
