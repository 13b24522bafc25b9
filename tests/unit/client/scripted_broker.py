"""Brokers for the client's tests: they speak the protocol over real sockets and follow the test's script.

All brokers of a ScriptedCluster share one metadata state and one in-memory log for each partition. The broker's own
ProducerState decides which batches of idempotent producers a log accepts. `script` replaces the ordinary handling of
the next requests of an API.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from minibroker.broker.storage.producer_state import EndedTransaction, ProducerState
from minibroker.broker.transactions.transaction import ProducerIdAndEpoch
from minibroker.client.admin import Admin
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.protocol import apis, topic_ids
from minibroker.protocol import messages as m
from minibroker.protocol.apis import APIS, Api, decode_request, decode_request_envelope, encode_response
from minibroker.protocol.connections.framing import FrameReader, response_limit
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    CRC_END,
    LIMIT,
    READ_COMMITTED,
    BatchHeader,
    ControlType,
    DecodedBatch,
    EndTransactionMarker,
    decode_batch,
    decode_control_batch,
    encode_control_batch,
    parse_header,
    stamp,
    validate_batch,
)
from tests.unit.client.scripted_groups import ScriptedGroups, received_by_groups
from tests.unit.client.scripted_transactions import ScriptedTransactions, received_by_transactions


class Action(NamedTuple):
    """The fate of a request."""

    code: ErrorCode = ErrorCode.NONE
    """The error returned for every partition or topic of the request."""
    is_carried_out: bool = True
    drops_connection: bool = False
    is_answered: bool = True


ORDINARY = Action()
DROP = Action(is_carried_out=False, drops_connection=True)
CARRY_OUT_AND_DROP = Action(drops_connection=True)
HANG = Action(is_carried_out=False, is_answered=False)
CARRY_OUT_AND_HANG = Action(is_answered=False)


def reject(code: ErrorCode) -> Action:
    return Action(code, is_carried_out=False)


def carry_out_and_answer(code: ErrorCode) -> Action:
    return Action(code)


class StoredBatch(NamedTuple):
    header: BatchHeader
    data: bytes


class Log:
    """A partition. With `keeps=False` it counts records and forgets them."""

    def __init__(self, leader: int, keeps: bool) -> None:
        self.leader = leader
        self.epoch = 0
        self.keeps = keeps
        self.start = 0
        self.end = 0
        self.batches: list[StoredBatch] = []
        self.producers = ProducerState()
        self.aborted: list[EndedTransaction] = []
        self.max_batch_bytes = 1 << 30
        self.offline: list[int] = []
        """The brokers that hold its replicas."""

    def append(self, records: m.Buffer) -> tuple[ErrorCode, int]:
        header = parse_header(records)
        if not self.keeps:
            base = self.end
            self.end += header.records_count
            return ErrorCode.NONE, base
        validate_batch(records, header)
        if len(records) > self.max_batch_bytes:
            return ErrorCode.MESSAGE_TOO_LARGE, -1
        if header.has_producer_id:
            try:
                repeated = self.producers.check(header)
            except BrokerError as error:
                return error.code, -1
            if repeated is not None:
                return ErrorCode.NONE, repeated.first_offset
            self.producers.update(header, self.end, now_ms=0)
        data = bytearray(records)
        data[:CRC_END] = stamp(parse_header(data), self.end, self.epoch)
        base = self.end
        self.batches.append(StoredBatch(parse_header(data), bytes(data)))
        self.end += header.last_offset_delta + 1
        return ErrorCode.NONE, base

    def is_open(self, header: BatchHeader) -> bool:
        """Whether the log has an open transaction of the batch's producer."""
        producer = self.producers.get(header.producer_id)
        return producer is not None and producer.epoch == header.producer_epoch and producer.open_since >= 0

    def committed_values(self) -> list[bytes | None]:
        """Return the values of committed transactions, in the order of their markers."""
        committed: list[bytes | None] = []
        open_values: dict[int, list[bytes | None]] = {}
        for header, data in self.batches:
            if header.is_control:
                values = open_values.pop(header.producer_id, [])
                if decode_control_batch(data, header).type is ControlType.COMMIT:
                    committed += values
            elif header.is_transactional:
                open_values.setdefault(header.producer_id, []).extend(decode_batch(data).values)
        return committed

    def forget_producers(self) -> None:
        self.producers = ProducerState()

    def append_raw(self, data: bytes) -> None:
        """Append this batch unchecked; its offsets are in its header."""
        header = parse_header(data)
        self.batches.append(StoredBatch(header, data))
        self.end = header.next_offset

    def end_transaction(self, producer_id: int, type: ControlType, producer_epoch: int = 0) -> None:
        """Append the marker."""
        marker = EndTransactionMarker(type, coordinator_epoch=0)
        data = encode_control_batch(
            marker,
            timestamp=0,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_offset=self.end,
            partition_leader_epoch=self.epoch,
        )
        ended = self.producers.update(parse_header(data), self.end, 0, marker)
        if ended is not None and ended.is_aborted:
            self.aborted.append(ended)
        self.append_raw(bytes(data))

    @property
    def last_stable_offset(self) -> int:
        return self.producers.last_stable_offset(self.end)

    def read_end(self, isolation_level: int) -> int:
        return self.last_stable_offset if isolation_level == READ_COMMITTED else self.end

    def aborted_between(self, offset: int, end: int) -> list[m.AbortedTransaction]:
        return [
            m.AbortedTransaction(each.producer_id, each.first_offset)
            for each in sorted(self.aborted, key=lambda each: each.first_offset)
            if each.first_offset < end and each.last_offset >= offset
        ]

    def read(self, offset: int, max_bytes: int, end: int = LIMIT) -> bytes:
        """Return batches that begin below `end`."""
        taken: list[bytes] = []
        size = 0
        first = bisect_left(self.batches, offset, key=lambda batch: batch.header.last_offset)
        for batch in self.batches[first : first + 1_000]:
            if batch.header.base_offset >= end or (taken and size + len(batch.data) > max_bytes):
                break
            taken.append(batch.data)
            size += len(batch.data)
        return b"".join(taken)

    def decoded(self) -> list[DecodedBatch]:
        return [decode_batch(batch.data) for batch in self.batches]

    def values(self) -> list[bytes | None]:
        return [value for batch in self.decoded() if not batch.header.is_control for value in batch.values]

    def keys(self) -> list[bytes | None]:
        return [key for batch in self.decoded() for key in (batch.keys or [None] * batch.count)]


class Topic:
    def __init__(self, topic_id: str, logs: list[Log]) -> None:
        self.topic_id = topic_id
        self.logs = logs


class Received(NamedTuple):
    node_id: int
    api: Api[Any, Any]
    body: Any


class ScriptedCluster:
    """Scripted brokers: `async with ScriptedCluster(3) as cluster: cluster.add_topic("orders", 3)`."""

    def __init__(self, brokers: int = 1) -> None:
        self.nodes = {node_id: Node(self, node_id) for node_id in range(brokers)}
        self.topics: dict[str, Topic] = {}
        self.controller = 0
        self.received: list[Received] = []
        self.scripts: dict[int, deque[Action]] = {}
        self.rules: list[Callable[[Received], Action | None]] = []
        self.extra_replicas: list[int] = []
        """Brokers that hold replicas and are down."""
        self.guard: Callable[[ServerConnection, Received], m.Message | None] | None = None
        """Answers requests in place of the cluster, unless it returns None."""
        self.next_producer_id = 1_000
        self.changed = asyncio.Event()
        self._topic_number = 0
        self.groups = ScriptedGroups(lambda node_id: self.nodes[node_id].port)
        self.transactions = ScriptedTransactions(
            lambda node_id: self.nodes[node_id].port, lambda partition: self.log(*partition), self.groups
        )

    async def __aenter__(self) -> Self:
        for node in self.nodes.values():
            await node.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            await node.stop()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes.values())

    def add_topic(self, name: str, partitions: int = 1, *, keeps: bool = True, nonce: bytes = b"script") -> Topic:
        self._topic_number += 1
        topic_id = topic_ids.make(1, self._topic_number, nonce)
        node_ids = list(self.nodes)
        logs = [Log(node_ids[index % len(node_ids)], keeps) for index in range(partitions)]
        topic = self.topics[name] = Topic(topic_id, logs)
        return topic

    def log(self, name: str, partition: int = 0) -> Log:
        return self.topics[name].logs[partition]

    def script(self, api: Api[Any, Any], *actions: Action) -> None:
        """Apply these actions in turn to the next requests of the API, at any broker."""
        self.scripts.setdefault(api.key, deque()).extend(actions)

    def move(self, name: str, partition: int, node_id: int) -> None:
        """Make another broker the leader, in a new epoch."""
        log = self.log(name, partition)
        log.leader = node_id
        log.epoch += 1
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed.clear()

    def requests(self, api: Api[Any, Any]) -> list[Any]:
        return [received.body for received in self.received if received.api is api]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for an effect of requests."""
        while not condition():
            await self.changed.wait()

    def action(self, received: Received) -> Action:
        for rule in self.rules:
            action = rule(received)
            if action is not None:
                return action
        queue = self.scripts.get(received.api.key)
        return queue.popleft() if queue else ORDINARY

    # -- broker behaviour --

    async def answer(self, node_id: int, request: Any, action: Action) -> m.Message:
        if received_by_transactions(request):
            return self.transactions.answer(node_id, request, action.code, action.is_carried_out)
        if received_by_groups(request):
            return await self.groups.answer(node_id, request, action.code, action.is_carried_out)
        match request:
            case m.MetadataRequest():
                return self.metadata(request)
            case m.ProduceRequest():
                return self.produce(node_id, request, action)
            case m.FetchRequest():
                return await self.fetch(node_id, request, action)
            case m.ListOffsetsRequest():
                return self.list_offsets(node_id, request, action)
            case m.InitProducerIdRequest():
                self.next_producer_id += 1
                if action.code:
                    return m.InitProducerIdResponse(0, action.code)
                return m.InitProducerIdResponse(0, ErrorCode.NONE, self.next_producer_id, 0)
            case m.CreateTopicsRequest():
                return self.create_topics(node_id, request, action)
            case m.DeleteTopicsRequest():
                return self.delete_topics(node_id, request, action)
            case m.DeleteRecordsRequest():
                return self.delete_records(node_id, request, action)
            case m.DescribeLogDirsRequest():
                return m.DescribeLogDirsResponse(
                    0, ErrorCode.NONE, [m.DescribeLogDirsResult(0, f"/data-{node_id}", [])]
                )
            case m.DescribeConfigsRequest():
                asked = request.resources
                return m.DescribeConfigsResponse(
                    0, [m.DescribeConfigsResult(0, None, each.resource_type, each.resource_name, []) for each in asked]
                )
        raise AssertionError(f"no script for {request}")

    def metadata(self, request: m.MetadataRequest) -> m.MetadataResponse:
        names = list(self.topics) if request.topics is None else request.topics
        topics = []
        for name in names:
            topic = self.topics.get(name)
            if topic is None:
                topics.append(m.MetadataTopic(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name, "", False, []))
                continue
            replicas = [*self.nodes, *self.extra_replicas]
            partitions = [
                m.MetadataPartition(
                    ErrorCode.NONE if log.leader >= 0 else ErrorCode.LEADER_NOT_AVAILABLE,
                    index,
                    log.leader,
                    log.epoch,
                    replicas,
                    [replica for replica in replicas if replica not in log.offline],
                    log.offline,
                )
                for index, log in enumerate(topic.logs)
            ]
            topics.append(m.MetadataTopic(ErrorCode.NONE, name, topic.topic_id, False, partitions))
        brokers = [m.MetadataBroker(node.id, "127.0.0.1", node.port) for node in self.nodes.values() if node.is_up]
        return m.MetadataResponse(0, brokers, "scripted", self.controller, topics)

    def _problem(self, node_id: int, topic: str, partition: int, epoch: int = -1) -> ErrorCode:
        known = self.topics.get(topic)
        if known is None or partition >= len(known.logs):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        log = known.logs[partition]
        if log.leader != node_id:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if 0 <= epoch < log.epoch:
            return ErrorCode.FENCED_LEADER_EPOCH
        return ErrorCode.UNKNOWN_LEADER_EPOCH if epoch > log.epoch else ErrorCode.NONE

    def produce(self, node_id: int, request: m.ProduceRequest, action: Action) -> m.ProduceResponse:
        topics = []
        for topic in request.topic_data:
            answers = []
            for partition in topic.partition_data:
                code, base_offset = self._problem(node_id, topic.name, partition.index), -1
                if code is ErrorCode.NONE and topic.topic_id != self.topics[topic.name].topic_id:
                    code = ErrorCode.INCONSISTENT_TOPIC_ID
                if code is ErrorCode.NONE and action.is_carried_out and request.transactional_id is not None:
                    code = self.joins(request.transactional_id, topic.name, partition)
                if code is ErrorCode.NONE and action.is_carried_out:
                    code, base_offset = self.log(topic.name, partition.index).append(partition.records)
                answer = m.ProducePartitionResponse(partition.index, action.code or code, base_offset)
                if code is ErrorCode.NOT_LEADER_OR_FOLLOWER:
                    log = self.log(topic.name, partition.index)
                    answer.current_leader_id, answer.current_leader_epoch = log.leader, log.epoch
                answers.append(answer)
            topics.append(m.ProduceTopicResponse(topic.name, answers))
        return m.ProduceResponse(topics)

    def joins(self, transactional_id: str, topic: str, partition: m.ProducePartition) -> ErrorCode:
        """Add the partition to the transaction, unless it has joined."""
        header = parse_header(partition.records)
        assert header.is_transactional
        if self.log(topic, partition.index).is_open(header):
            return ErrorCode.NONE
        producer = ProducerIdAndEpoch(header.producer_id, header.producer_epoch)
        return self.transactions.add(transactional_id, producer, TopicPartition(topic, partition.index))

    async def fetch(self, node_id: int, request: m.FetchRequest, action: Action) -> m.FetchResponse:
        deadline = asyncio.get_running_loop().time() + request.max_wait_ms / 1_000
        while True:
            response, size = self._read(node_id, request, action)
            remaining = deadline - asyncio.get_running_loop().time()
            if size >= request.min_bytes or size < 0 or remaining <= 0:
                return response
            try:
                async with asyncio.timeout(remaining):
                    await self.changed.wait()
            except TimeoutError:
                pass

    def _read(self, node_id: int, request: m.FetchRequest, action: Action) -> tuple[m.FetchResponse, int]:
        """Return the response and its size; -1 if it contains an error."""
        size, has_error = 0, False
        topics = []
        for topic in request.topics:
            answers = []
            for partition in topic.partitions:
                code = action.code or self._problem(
                    node_id, topic.topic, partition.partition, partition.current_leader_epoch
                )
                answer = m.FetchPartitionResponse(partition.partition, code)
                known = self.topics.get(topic.topic)
                if known is not None and partition.partition < len(known.logs):
                    log = known.logs[partition.partition]
                    answer.current_leader_id, answer.current_leader_epoch = log.leader, log.epoch
                    answer.high_watermark, answer.log_start_offset = log.end, log.start
                    answer.last_stable_offset = log.last_stable_offset
                    if code is ErrorCode.NONE and not log.start <= partition.fetch_offset <= log.end:
                        answer.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
                    elif code is ErrorCode.NONE:
                        left = max(0, request.max_bytes - size)
                        most = min(partition.partition_max_bytes, left) if left else 0
                        end = log.read_end(request.isolation_level)
                        data = log.read(partition.fetch_offset, most, end)
                        answer.records = memoryview(data if left else b"")
                        if request.isolation_level == READ_COMMITTED:
                            answer.aborted_transactions = log.aborted_between(partition.fetch_offset, end)
                        size += len(answer.records)
                has_error = has_error or answer.error_code != ErrorCode.NONE
                answers.append(answer)
            topics.append(m.FetchTopicResponse(topic.topic, answers))
        return m.FetchResponse(0, ErrorCode.NONE, topics), -1 if has_error else size

    def list_offsets(self, node_id: int, request: m.ListOffsetsRequest, action: Action) -> m.ListOffsetsResponse:
        topics = []
        for topic in request.topics:
            answers = []
            for partition in topic.partitions:
                code = action.code or self._problem(
                    node_id, topic.name, partition.partition_index, partition.current_leader_epoch
                )
                answer = m.ListOffsetsPartitionResponse(partition.partition_index, code)
                if code is ErrorCode.NONE:
                    log = self.log(topic.name, partition.partition_index)
                    answer.leader_epoch = log.epoch
                    if partition.timestamp == m.LATEST_TIMESTAMP:
                        answer.offset = log.read_end(request.isolation_level)
                    elif partition.timestamp == m.EARLIEST_TIMESTAMP:
                        answer.offset = log.start
                    else:
                        answer.offset, answer.timestamp = _first_at(log, partition.timestamp)
                    answer.previous_epoch = log.epoch if answer.offset > log.start else -1
                answers.append(answer)
            topics.append(m.ListOffsetsTopicResponse(topic.name, answers))
        return m.ListOffsetsResponse(0, topics)

    def create_topics(self, node_id: int, request: m.CreateTopicsRequest, action: Action) -> m.CreateTopicsResponse:
        results = []
        for topic in request.topics:
            code = action.code
            if not code and node_id != self.controller:
                code = ErrorCode.NOT_CONTROLLER
            known = self.topics.get(topic.name)
            if not code and known is not None and topic_ids.nonce(known.topic_id) != topic.nonce:
                code = ErrorCode.TOPIC_ALREADY_EXISTS
            if action.is_carried_out and code in (ErrorCode.NONE, action.code) and known is None:
                partitions = len(topic.assignments) or max(topic.num_partitions, 1)
                known = self.add_topic(topic.name, partitions, nonce=topic.nonce)
            results.append(m.CreatableTopicResult(topic.name, known.topic_id if known else "", code))
        return m.CreateTopicsResponse(0, results)

    def delete_topics(self, node_id: int, request: m.DeleteTopicsRequest, action: Action) -> m.DeleteTopicsResponse:
        results = []
        for name, topic_id in zip(request.topics, request.topic_ids, strict=True):
            code = action.code
            known = self.topics.get(name)
            if not code and node_id != self.controller:
                code = ErrorCode.NOT_CONTROLLER
            if not code and known is None:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if not code and known is not None and known.topic_id != topic_id:
                code = ErrorCode.UNKNOWN_TOPIC_ID
            if action.is_carried_out and not code:
                del self.topics[name]
            results.append(m.DeletableTopicResult(name, known.topic_id if known else "", code))
        return m.DeleteTopicsResponse(0, results)

    def delete_records(self, node_id: int, request: m.DeleteRecordsRequest, action: Action) -> m.DeleteRecordsResponse:
        topics = []
        for topic in request.topics:
            answers = []
            for partition in topic.partitions:
                index = partition.partition_index
                code = action.code or self._problem(node_id, topic.name, index)
                if not code and topic.topic_id != self.topics[topic.name].topic_id:
                    code = ErrorCode.INCONSISTENT_TOPIC_ID
                if not code and partition.offset > self.log(topic.name, index).end:
                    code = ErrorCode.OFFSET_OUT_OF_RANGE
                low_watermark = -1
                if not code and action.is_carried_out:
                    log = self.log(topic.name, index)
                    log.start = max(log.start, log.end if partition.offset == -1 else partition.offset)
                    low_watermark = log.start
                answers.append(m.DeleteRecordsPartitionResult(index, low_watermark, code))
            topics.append(m.DeleteRecordsTopicResult(topic.name, answers))
        return m.DeleteRecordsResponse(0, topics)


def leap(client: Admin | Consumer | Producer | ClientRuntime, by_s: float = 3_600.0) -> None:
    """Set the client's clock forward, so that the deadline of its call passes at this point of the script, however
    long the machine took to reach it."""
    clock = (client if isinstance(client, ClientRuntime) else client._runtime).clock
    monotonic = clock.monotonic
    clock.monotonic = lambda: monotonic() + by_s  # type: ignore[method-assign]


def _first_at(log: Log, timestamp: int) -> tuple[int, int]:
    for batch in log.decoded():
        for offset, at in zip(batch.offsets, batch.timestamps, strict=True):
            if at >= timestamp:
                return offset, at
    return -1, -1


class Node:
    """One broker: a listening socket and its connections."""

    def __init__(self, cluster: ScriptedCluster, node_id: int) -> None:
        self.cluster = cluster
        self.id = node_id
        self.port = 0
        self.is_up = False
        self.connections: dict[ServerConnection, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ServerConnection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.is_up = True

    async def stop(self) -> None:
        """Stop like SIGKILL: no request is answered any more, and new connections are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.is_up = False
        for connection in list(self.connections):
            await connection.stop()


class ServerConnection(asyncio.BufferedProtocol):
    def __init__(self, node: Node) -> None:
        self.node = node
        self.reader = FrameReader(response_limit(256 * 1024 * 1024))
        self.transport: asyncio.Transport | None = None
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.previous: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses
        self.node.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.node.connections.pop(self, None)
        for task in self.tasks:
            task.cancel()

    async def stop(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(list(self.tasks))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self.reader.buffer_updated(nbytes):
            self.frame(frame)

    def frame(self, frame: m.Buffer) -> None:
        cluster = self.node.cluster
        envelope = decode_request_envelope(frame)
        api = APIS[envelope.api_key]
        body = decode_request(api, envelope)
        received = Received(self.node.id, api, body)
        cluster.received.append(received)
        if cluster.guard is not None and (response := cluster.guard(self, received)) is not None:
            self.finish(envelope.correlation_id, body, ORDINARY, response)
            cluster.notify()
            return
        action = cluster.action(received)
        if api in (apis.FETCH, apis.JOIN_GROUP, apis.SYNC_GROUP):
            task = asyncio.get_running_loop().create_task(self.answer_later(envelope.correlation_id, body, action))
            self.tasks[task] = None
            task.add_done_callback(self.tasks.pop)
        else:
            coroutine = cluster.answer(self.node.id, body, action)
            try:
                coroutine.send(None)
            except StopIteration as result:
                self.finish(envelope.correlation_id, body, action, result.value)
        cluster.notify()

    async def answer_later(self, correlation_id: int, body: Any, action: Action) -> None:
        self.finish(correlation_id, body, action, await self.node.cluster.answer(self.node.id, body, action))

    def finish(self, correlation_id: int, body: Any, action: Action, response: m.Message) -> None:
        assert self.transport is not None
        if action.drops_connection:
            self.transport.abort()
        elif action.is_answered and getattr(body, "acks", -1) != 0:
            self.transport.write(encode_response(correlation_id, response))
