"""A producer and a consumer that speak Kafka's protocol as librdkafka does, for storms and scenarios.

They run on any World, and replace our own clients: no acknowledged record is lost, duplicated or reordered, and a
consumer neither skips nor goes back. Each connection pipelines requests and expects the
responses in order. A malformed response, or records that such a client cannot read, raise `ProtocolBroken`, which is a
bug whatever faults the cluster has had.

In storms with security, clients of new versions authenticate themselves again before their session is over (KIP-368).
The others lose their connections then.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Self

from minibroker.client.errors import CorruptBatch, LogTruncated
from minibroker.client.security import Credentials
from minibroker.deploy.simulator.kafka_connection import KafkaConnection, read_response
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, MinibrokerError
from minibroker.protocol.kafka import data, metadata, sasl
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, CorruptRecord, decode_batch, encode_batch, iterate_batches
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.control import ControlType, decode_control_batch
from minibroker.protocol.sasl.mechanisms import PLAIN, ClientMechanism
from minibroker.protocol.sasl.plain import PlainClient
from minibroker.protocol.sasl.scram import BY_NAME, ScramClient
from minibroker.protocol.world import World

_CONNECT_S = 2.0
BACKOFF_S = 0.1
_REQUEST_TIMEOUT_S = 5.0


class ProtocolBroken(MinibrokerError):
    """A response that no broker may send."""


class Unreachable(MinibrokerError):
    """The connection failed or the request timed out; it may have been carried out."""


class Versions(NamedTuple):
    """The version of each API that a client uses."""

    metadata: int
    produce: int
    fetch: int
    epochs: int
    """The version of OffsetForLeaderEpoch; -1 if unused."""

    @property
    def fetches_by_id(self) -> bool:
        """Whether a Fetch identifies topics by id (KIP-516)."""
        return self.fetch >= 13


VERSIONS = (Versions(4, 7, 10, -1), Versions(7, 8, 11, 3), Versions(9, 9, 12, 4), Versions(12, 11, 17, 4))
"""Versions of old and new clients. All of them can read zstd, which our own producers may write."""


class RecordMetadata(NamedTuple):
    offset: int
    """-1 for a duplicate whose offset the broker no longer knows."""


class KafkaBatch(NamedTuple):
    """A fetched batch of a partition, record by record."""

    topic: str
    partition: int
    offsets: list[int]
    values: list[bytes | None]
    next_offset: int


class _Leader(NamedTuple):
    node_id: int
    epoch: int
    """The leader epoch; -1 if this version of the response has none."""


# --- Connections -----------------------------------------------------------------------------------------------


class _Connection(KafkaConnection):
    """A connection whose last frame is empty."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.frames.put_nowait(b"")


class _Link:
    """A connection with pipelined requests, whose responses must arrive in order."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._waiting: deque[tuple[int, KafkaApi, int, asyncio.Future[Any]]] = deque()
        self._reading = asyncio.create_task(self._read(), name="reader of Kafka's protocol")
        self._proving = asyncio.Lock()
        self._proved_until_s = -math.inf

    @property
    def is_closed(self) -> bool:
        return self._connection.closed.is_set() or self._reading.done()

    def send(self, api: KafkaApi, version: int, wire: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.is_closed:
            future.set_exception(Unreachable("closed"))
        else:
            self._waiting.append((self._connection.send(api, version, wire), api, version, future))
        return future

    async def authenticate(self, credentials: Credentials, world: World, *, knows_sessions: bool) -> None:
        """Authenticate the client, unless it has done so and its session is not nearly over. Requests under way are
        answered before, and no other ones may be sent meanwhile: they would close the connection."""
        async with self._proving:
            if world.clock.monotonic() < self._proved_until_s:
                return
            if waiting := [future for *_, future in self._waiting]:
                await asyncio.wait(waiting)
            offered = await self.send(sasl.SASL_HANDSHAKE, 1, m.SaslHandshakeRequest(credentials.mechanism))
            if offered.error_code != ErrorCode.NONE:
                raise ProtocolBroken(f"SaslHandshake for {credentials.mechanism}: {offered.error_code}")
            client = _mechanism(credentials, world)
            message, session_ms = client.respond(None), 0
            while message is not None:
                request, version = m.SaslAuthenticateRequest(message), 2 if knows_sessions else 0
                answer = await self.send(sasl.SASL_AUTHENTICATE, version, request)
                if answer.error_code != ErrorCode.NONE:
                    self._connection.close()
                    raise Unreachable(f"{credentials.username} may not come in: {answer.error_message}")
                session_ms, message = answer.session_lifetime_ms, client.respond(answer.auth_bytes)
            lasts_s = 0.8 * session_ms / 1_000 if session_ms else math.inf
            self._proved_until_s = world.clock.monotonic() + lasts_s

    async def _read(self) -> None:
        error: MinibrokerError = Unreachable("closed")
        try:
            while frame := await self._connection.frames.get():  # the last frame is empty
                if not self._waiting:
                    raise ProtocolBroken("a response without a request")
                sent, api, version, future = self._waiting.popleft()
                try:
                    correlation_id, body = read_response(api, version, frame)
                except InvalidMessage as invalid:
                    raise ProtocolBroken(f"{api.name} {version}: {invalid}") from invalid
                if correlation_id != sent:
                    raise ProtocolBroken(f"the answer to {correlation_id} of {api.name} where that to {sent} was due")
                if not future.done():
                    future.set_result(body)
        except ProtocolBroken as broken:
            error = broken
        finally:
            for *_, future in self._waiting:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # retrieved, since the caller may be gone
            self._connection.close()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])


def _mechanism(credentials: Credentials, world: World) -> ClientMechanism:
    if credentials.mechanism == PLAIN:
        return PlainClient(credentials.username, credentials.password)
    nonce = world.random.randbytes(24).hex()
    return ScramClient(BY_NAME[credentials.mechanism], credentials.username, credentials.password, nonce)


class Links:
    """Links to the brokers, and the known leader of each partition."""

    @staticmethod
    def credentials_of(world: World) -> Credentials | None:
        """Return the credentials of this process; storms with security replace this function."""
        return None

    def __init__(self, bootstrap: str, world: World, versions: Versions) -> None:
        self.addresses = {-1 - i: _address(text) for i, text in enumerate(bootstrap.split(","))}
        self.bootstrap = list(self.addresses)
        self._world = world
        self._credentials = self.credentials_of(world)
        self._versions = versions
        self._links: dict[int, _Link] = {}
        self._leaders: dict[TopicPartition, _Leader] = {}
        self._epochs: dict[TopicPartition, int] = {}
        """The highest leader epoch seen of each partition; older metadata is ignored (KIP-320)."""
        self.topic_ids: dict[str, str] = {}

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

    def forget(self, partition: TopicPartition) -> None:
        """Forget the leader of a partition, which has answered that it is not."""
        self._leaders.pop(partition, None)

    async def leader(self, partition: TopicPartition) -> _Leader:
        """Return the leader of a partition. Raise Unreachable if no broker knows it."""
        if partition not in self._leaders:
            await self._refresh([partition.topic])
        leader = self._leaders.get(partition)
        if leader is None:
            raise Unreachable(f"{partition} has no leader")
        return leader

    async def _refresh(self, topics: Iterable[str]) -> None:
        node_id = self._world.random.choice([*self.bootstrap, *self.addresses])
        layout: Any = metadata.METADATA.request
        topic: Any = layout.fields[0].type.of.cls
        wire = layout.cls(topics=[topic("", name) for name in topics], allow_auto_topic_creation=False)
        answer: m.MetadataResponse = await self.request(node_id, metadata.METADATA, self._versions.metadata, wire)
        if not answer.brokers:
            raise ProtocolBroken(f"broker {node_id} names no brokers: librdkafka would drop all that it knows")
        self.addresses |= {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
        for of_topic in answer.topics:
            if of_topic.topic_id:
                self.topic_ids[of_topic.name] = of_topic.topic_id
            for told in of_topic.partitions:
                partition = TopicPartition(of_topic.name, told.partition_index)
                is_newest = told.leader_epoch >= self._epochs.get(partition, -1)
                if told.leader_id != NO_LEADER and told.leader_id in self.addresses and is_newest:
                    self._leaders[partition] = _Leader(told.leader_id, told.leader_epoch)
                    self._epochs[partition] = told.leader_epoch

    async def link(self, node_id: int) -> _Link:
        link = self._links.get(node_id)
        if link is None or link.is_closed:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await self._world.network.connect(*self.addresses[node_id], _Connection)
            except (OSError, TimeoutError) as error:
                raise Unreachable(f"broker {node_id}: {error!r}") from error
            if link is not None:
                await link.close()
            link = self._links[node_id] = _Link(connection)
        if self._credentials is not None:
            try:
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    knows_sessions = self._versions.produce >= 9
                    await link.authenticate(self._credentials, self._world, knows_sessions=knows_sessions)
            except TimeoutError as error:
                await self.drop(node_id)
                raise Unreachable(f"broker {node_id} does not authenticate the client") from error
        return link

    async def drop(self, node_id: int) -> None:
        """Close the link to a broker that did not respond in time."""
        if (link := self._links.pop(node_id, None)) is not None:
            await link.close()

    async def request(self, node_id: int, api: KafkaApi, version: int, wire: Any) -> Any:
        link = await self.link(node_id)
        try:
            return await asyncio.wait_for(link.send(api, version, wire), _REQUEST_TIMEOUT_S)
        except TimeoutError as error:
            await self.drop(node_id)
            raise Unreachable(f"broker {node_id} does not answer {api.name}") from error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


# --- Producing -------------------------------------------------------------------------------------------------


@dataclass
class _Unsent:
    """A batch from its first record to its response."""

    sequence: int
    deadline_s: float
    values: list[bytes] = field(default_factory=list)
    endings: list[asyncio.Future[RecordMetadata]] = field(default_factory=list)

    def end(self, base_offset: int) -> None:
        for index, ending in enumerate(self.endings):
            if not ending.done():
                ending.set_result(RecordMetadata(base_offset + index if base_offset >= 0 else -1))


MOST_IN_FLIGHT = 5
"""Batches in flight per partition: a broker detects duplicates among the last five (KAFKA-5494)."""


class KafkaProducer:
    """A producer that is idempotent with acks=all. A batch that fails or exceeds its delivery timeout fails all later
    batches and every later `send`, since its sequence numbers are used up: a fatal error in librdkafka."""

    def __init__(
        self,
        bootstrap: str,
        *,
        acks: int,
        compression: str,
        linger_ms: int,
        delivery_timeout_ms: int,
        request_timeout_ms: int,
        versions: Versions,
        world: World,
    ) -> None:
        self._cluster = Links(bootstrap, world, versions)
        self._versions = versions
        self._acks = acks
        self._compression = Compression[compression.upper()]
        self._linger_s = linger_ms / 1_000
        self._delivery_timeout_s = delivery_timeout_ms / 1_000
        self._request_timeout_s = request_timeout_ms / 1_000
        self._world = world
        self._random = Random(world.random.random())
        self._producer_id, self._producer_epoch = -1, -1
        self._queues: dict[TopicPartition, asyncio.Queue[_Unsent]] = {}
        self._open: dict[TopicPartition, _Unsent] = {}
        """Queued batches that still accept records."""
        self._sequences: dict[TopicPartition, int] = {}
        self._sending: list[asyncio.Task[None]] = []
        self._unended: dict[asyncio.Future[RecordMetadata], None] = {}
        """An ordered set: the order in which the records of a failed producer end is part of the trace."""
        self.failure: MinibrokerError | None = None
        """The fatal error, if there is one."""

    async def __aenter__(self) -> Self:
        """Get a producer id. Raise Unreachable if no broker provides one."""
        while self._acks == -1 and self._producer_id < 0:
            await self._init_producer_id()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._unended:
            await asyncio.wait(self._unended)
        for task in self._sending:
            task.cancel()
        if self._sending:
            await asyncio.wait(self._sending)
        await self._cluster.close()
        if isinstance(self.failure, ProtocolBroken):
            raise self.failure

    async def _init_producer_id(self) -> None:
        node_id = self._random.choice(self._cluster.bootstrap)
        request = m.InitProducerIdRequest(None)
        answer = await self._cluster.request(node_id, data.INIT_PRODUCER_ID, 4, request)
        if answer.error_code == ErrorCode.NONE:
            self._producer_id, self._producer_epoch = answer.producer_id, answer.producer_epoch
        else:
            await asyncio.sleep(BACKOFF_S)

    def send(self, topic: str, value: bytes, *, partition: int) -> asyncio.Future[RecordMetadata]:
        ending: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            ending.set_exception(self.failure)
            return ending
        where = TopicPartition(topic, partition)
        queue = self._queues.get(where)
        if queue is None:
            queue = self._queues[where] = asyncio.Queue()
            self._sequences[where] = 0
            sending = asyncio.create_task(self._send(where, queue), name=f"Kafka's sender of {where}")
            sending.add_done_callback(self._sender_ended)
            self._sending.append(sending)
        batch = self._open.get(where)
        if batch is None:
            batch = _Unsent(self._sequences[where], self._world.clock.monotonic() + self._delivery_timeout_s)
            self._open[where] = batch
            queue.put_nowait(batch)
        self._sequences[where] += 1
        self._unended[ending] = None
        ending.add_done_callback(self._unended.pop)
        batch.values.append(value)
        batch.endings.append(ending)
        return ending

    async def _send(self, where: TopicPartition, queue: asyncio.Queue[_Unsent]) -> None:
        while True:
            window = [await queue.get()]
            await asyncio.sleep(self._linger_s)
            while not queue.empty() and len(window) < MOST_IN_FLIGHT:
                window.append(queue.get_nowait())
            self._open.pop(where, None)
            try:
                await self._deliver(where, window)
            except MinibrokerError as error:
                self._fail(error)
                return

    def _sender_ended(self, sending: asyncio.Task[None]) -> None:
        """Fail all batches if the sender has a bug; otherwise their records would wait forever."""
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._fail(ProtocolBroken(f"{sending.get_name()}: {error!r}"))

    def _fail(self, error: MinibrokerError) -> None:
        if self.failure is None or isinstance(error, ProtocolBroken):
            self.failure = error
        for ending in list(self._unended):
            if not ending.done():
                ending.set_exception(self.failure)

    async def _deliver(self, where: TopicPartition, window: list[_Unsent]) -> None:
        """Deliver all batches in order, and retry those without a response."""
        while window:
            if self._world.clock.monotonic() > window[0].deadline_s:
                raise Unreachable(f"{where}: not delivered within the delivery timeout")
            try:
                leader = await self._cluster.leader(where)
                link = await self._cluster.link(leader.node_id)
            except Unreachable:
                self._cluster.forget(where)  # ask again, as librdkafka does when a broker is down
                await asyncio.sleep(BACKOFF_S)
                continue
            answers = [link.send(data.PRODUCE, self._versions.produce, self._request(where, each)) for each in window]
            await asyncio.wait(answers, timeout=self._request_timeout_s)
            left: list[_Unsent] = []
            for batch, answer in zip(window, answers, strict=True):
                if not await self._has_ended(where, batch, answer, leader, is_first=not left):
                    left.append(batch)
            window = left
            if window:
                self._cluster.forget(where)
                await asyncio.sleep(BACKOFF_S)

    async def _has_ended(
        self, where: TopicPartition, batch: _Unsent, answer: asyncio.Future[Any], leader: _Leader, *, is_first: bool
    ) -> bool:
        if not answer.done():
            # The sender of another partition may have timed out and dropped the link already.
            await self._cluster.drop(leader.node_id)
            return False
        try:
            response: m.ProduceResponse = answer.result()
        except Unreachable:
            return False
        [of_topic] = response.responses
        [told] = of_topic.partition_responses
        if (of_topic.name, told.index) != where:
            raise ProtocolBroken(f"an answer for {of_topic.name}-{told.index} where {where} was sent")
        code = ErrorCode(told.error_code)
        if code is ErrorCode.NONE:
            batch.end(told.base_offset)
            return True
        if code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            batch.end(-1)
            return True
        # This is expected after a failed batch. Without one, the cluster has lost records.
        if ERRORS[code].retriable or (code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and not is_first):
            return False
        raise BrokerError(code, f"{where}: {told.error_message}")

    def _request(self, where: TopicPartition, batch: _Unsent) -> m.ProduceRequest:
        is_idempotent = self._producer_id >= 0
        records = encode_batch(
            batch.values,
            base_timestamp=self._world.clock.wall_ms(),
            compression=self._compression,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            base_sequence=batch.sequence if is_idempotent else -1,
            magic=MAGIC_RECORDS,
        )
        partitions = [m.ProducePartition(where.partition, memoryview(records))]
        timeout_ms = int(self._request_timeout_s * 1_000)
        return m.ProduceRequest(None, self._acks, timeout_ms, [m.ProduceTopic(where.topic, partitions)])


# --- Consuming -------------------------------------------------------------------------------------------------


LIMITS = (1, 1_000, 1_048_576, 1_048_576)
READ_UNCOMMITTED, READ_COMMITTED = 0, 1


class KafkaConsumer:
    """A consumer that fetches from leaders only, with one request for all partitions of a leader.

    A client that knows leader epochs sends its own, and asks a new leader whether the log that it has read is still a
    prefix of the leader's (KIP-320).
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        partitions: list[TopicPartition],
        versions: Versions,
        world: World,
        limits: Sequence[int] = LIMITS,
        fetch_max_wait_ms: int = 300,
        isolation_level: int = READ_UNCOMMITTED,
    ) -> None:
        """A limit in bytes for each response, and for each partition in it, is drawn from `limits`."""
        self._limits = limits
        self._isolation_level = isolation_level
        self._fetch_max_wait_ms = fetch_max_wait_ms
        self._cluster = Links(bootstrap, world, versions)
        self._versions = versions
        self._partitions = partitions
        self._random = Random(world.random.random())
        self._position = dict.fromkeys(partitions, 0)
        self._read_epoch = dict.fromkeys(partitions, -1)
        """The leader epoch of the last batch that was read."""
        self._validated_epoch = dict.fromkeys(partitions, -1)
        """The epoch of the leader that has confirmed that no record that was read is gone."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cluster.close()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._position[partition] = offset
        self._read_epoch[partition] = -1

    async def ends(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the end offsets of the partitions for consumers. Retry until the leaders respond."""
        ends: dict[TopicPartition, int] = {}
        while missing := [partition for partition in partitions if partition not in ends]:
            try:
                ends[missing[0]] = await self._end(missing[0])
            except Unreachable:
                await asyncio.sleep(BACKOFF_S)
        return ends

    async def _end(self, partition: TopicPartition) -> int:
        leader = await self._cluster.leader(partition)
        asked = m.ListOffsetsPartition(partition.partition, leader.epoch, -1)
        request = m.ListOffsetsRequest(-1, self._isolation_level, [m.ListOffsetsTopic(partition.topic, [asked])])
        answer = await self._cluster.request(leader.node_id, data.LIST_OFFSETS, 6, request)
        [[told]] = [topic.partitions for topic in answer.topics]
        if told.error_code != ErrorCode.NONE:
            self._cluster.forget(partition)
            raise Unreachable(f"{partition}: {ErrorCode(told.error_code).name}")
        return int(told.offset)

    async def batches(self) -> AsyncGenerator[KafkaBatch]:
        """Yield batches. Raise LogTruncated, CorruptBatch, or BrokerError with OFFSET_OUT_OF_RANGE."""
        while True:
            for batch in await self.poll():
                yield batch

    async def poll(self) -> list[KafkaBatch]:
        """Fetch once from each leader. Raise as `batches`."""
        led: dict[int, list[tuple[TopicPartition, int]]] = {}
        for partition in self._partitions:
            try:
                leader = await self._cluster.leader(partition)
                await self._validate(partition, leader)
            except Unreachable:
                self._cluster.forget(partition)
                continue
            led.setdefault(leader.node_id, []).append((partition, leader.epoch))
        if not led:
            await asyncio.sleep(BACKOFF_S)
        fetches = [asyncio.create_task(self._fetch(node_id, asked)) for node_id, asked in led.items()]
        if fetches:
            await asyncio.wait(fetches)
        errors = [error for fetch in fetches if (error := fetch.exception()) is not None]
        for error in errors:
            raise error
        return [batch for fetch in fetches for batch in fetch.result()]

    def position(self, partition: TopicPartition) -> int:
        return self._position[partition]

    async def _validate(self, partition: TopicPartition, leader: _Leader) -> None:
        """Check that all records read are in this leader's log. Raise LogTruncated if not."""
        if leader.epoch < 0 or leader.epoch == self._validated_epoch[partition]:
            return
        read_epoch = self._read_epoch[partition]
        if read_epoch >= 0:
            asked = m.OffsetForLeaderPartition(partition.partition, leader.epoch, read_epoch)
            request = m.OffsetForLeaderEpochRequest(-1, [m.OffsetForLeaderTopic(partition.topic, [asked])])
            answer = await self._cluster.request(
                leader.node_id, data.OFFSET_FOR_LEADER_EPOCH, self._versions.epochs, request
            )
            [[told]] = [topic.partitions for topic in answer.topics]
            if told.error_code != ErrorCode.NONE:
                raise Unreachable(f"{partition}: {ErrorCode(told.error_code).name}")
            if 0 <= told.end_offset < self._position[partition]:
                raise LogTruncated(partition, self._position[partition], told.end_offset)
        self._validated_epoch[partition] = leader.epoch

    async def _fetch(self, node_id: int, asked: list[tuple[TopicPartition, int]]) -> list[KafkaBatch]:
        self._random.shuffle(asked)  # the first partition gets a batch whatever the limit
        topics: dict[str, list[m.FetchPartition]] = {}
        for partition, epoch in asked:
            limit = self._random.choice(self._limits)
            topics.setdefault(partition.topic, []).append(
                m.FetchPartition(partition.partition, epoch, self._position[partition], -1, -1, limit)
            )
        max_bytes = self._random.choice(self._limits)
        ids = self._cluster.topic_ids
        wanted = [m.FetchTopic(topic, ids.get(topic, ""), partitions) for topic, partitions in topics.items()]
        wire: Any = data.FETCH.request.cls
        request = wire(-1, self._fetch_max_wait_ms, 1, max_bytes, self._isolation_level, wanted)
        try:
            answer = await self._cluster.request(node_id, data.FETCH, self._versions.fetch, request)
        except Unreachable:
            for partition, _ in asked:
                self._cluster.forget(partition)
            return []
        batches = []
        if self._versions.fetches_by_id:
            names = {ids[topic]: topic for topic in topics}
            for of_topic in answer.responses:
                if of_topic.topic_id not in names:
                    raise ProtocolBroken(f"an answer for topic {of_topic.topic_id}, of {names} asked for")
                of_topic.topic = names[of_topic.topic_id]
        is_alone = sum(bool(told.records) for topic in answer.responses for told in topic.partitions) == 1
        for topic in answer.responses:
            for told in topic.partitions:
                partition = TopicPartition(topic.topic, told.partition_index)
                if told.error_code == ErrorCode.NONE:
                    batches += self._read(partition, told, is_alone=is_alone)
                elif told.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                    at = f"{partition} at offset {self._position[partition]}"
                    raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, at)
                elif told.error_code == ErrorCode.CORRUPT_MESSAGE:
                    raise CorruptBatch(partition, "is damaged, the broker says", "Fetch again.")
                else:
                    self._cluster.forget(partition)
        return batches

    def _read(self, partition: TopicPartition, told: m.FetchPartitionResponse, *, is_alone: bool) -> list[KafkaBatch]:
        """Return the complete batches of a response, without control batches, and for read_committed without aborted
        ones."""
        read = []
        is_read_committed = self._isolation_level == READ_COMMITTED
        end = told.last_stable_offset if is_read_committed else told.high_watermark
        if told.last_stable_offset > told.high_watermark:
            raise ProtocolBroken(f"{partition}: {told.last_stable_offset} is stable above {told.high_watermark}")
        aborted = deque(sorted((each.first_offset, each.producer_id) for each in told.aborted_transactions or ()))
        is_aborted: set[int] = set()
        position = start = self._position[partition]
        try:
            for header, begin, _ in iterate_batches(told.records):
                if header.magic != MAGIC_RECORDS:
                    raise ProtocolBroken(f"{partition} at {header.base_offset}: magic {header.magic}")
                next_offset = header.base_offset + header.last_offset_delta + 1
                if next_offset > end:
                    raise ProtocolBroken(f"{partition}: {next_offset - 1} is not below {end}")
                position_before, position = position, max(position, next_offset)
                self._read_epoch[partition] = header.partition_leader_epoch
                while aborted and aborted[0][0] < next_offset:
                    is_aborted.add(aborted.popleft()[1])
                if header.is_control:
                    if decode_control_batch(told.records, header, begin).type is ControlType.ABORT:
                        is_aborted.discard(header.producer_id)
                    continue
                if is_read_committed and header.is_transactional and header.producer_id in is_aborted:
                    continue
                decoded = decode_batch(told.records, header, begin)
                kept = [index for index, offset in enumerate(decoded.offsets) if offset >= position_before]
                if kept:
                    offsets, values = [decoded.offsets[i] for i in kept], [decoded.values[i] for i in kept]
                    read.append(KafkaBatch(*partition, offsets, values, next_offset))
        except CorruptRecord as error:
            raise CorruptBatch(partition, f"is damaged: {error}", "Fetch again.") from error
        if is_alone and told.records and position == start:
            raise ProtocolBroken(f"{partition} at {start}: {len(told.records)} bytes without a whole batch")
        self._position[partition] = position
        return read
