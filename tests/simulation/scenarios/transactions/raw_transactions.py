"""A transactional producer that sends the protocol's requests itself, without minibroker's client."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import Message
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import NO_LEADER, TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from minibroker.protocol.records import encode_batch

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)

RETRY_S = 0.02
NOT_NOW = frozenset(
    {
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.REQUEST_TIMED_OUT,
    }
)
TRANSACTION_KEY = 1


class RawProducer:
    """One instance of a transactional id. `raises_epoch`: it behaves like a client that knows KIP-890."""

    def __init__(
        self, cluster: VirtualCluster, world: VirtualWorld, transactional_id: str = "t", *, raises_epoch: bool = True
    ) -> None:
        self.cluster = cluster
        self.world = world
        self.transactional_id = transactional_id
        self.raises_epoch = raises_epoch
        self.producer_id = -1
        self.epoch = -1
        self.timeout_ms = 60_000
        self._sequences: dict[TopicPartition, int] = {}
        self._connections: dict[int, Connection] = {}

    # -- requests --

    async def ask(self, broker_id: int, api: apis.Api[Asked, Answered], body: Asked, timeout_s: float = 10) -> Answered:
        """Raises NetworkError, BrokerError."""
        connection = self._connections.get(broker_id)
        if connection is None or connection.closed:
            connection = self._connections[broker_id] = await open_connection(
                self.world.network, host_name(broker_id), PORT, client_id="client", timeout_s=5
            )
        return await connection.request(api, body, timeout_s=timeout_s)

    async def find_coordinator(self) -> int:
        while True:
            for broker_id in self.cluster.broker_ids:
                try:
                    request = g.FindCoordinatorRequest(TRANSACTION_KEY, [self.transactional_id])
                    found = (await self.ask(broker_id, apis.FIND_COORDINATOR, request)).coordinators[0]
                except (NetworkError, BrokerError):
                    continue
                if not found.error_code:
                    return found.node_id
            await asyncio.sleep(RETRY_S)

    async def of_coordinator(self, api: apis.Api[Asked, Answered], body: Asked, within_s: float = 60) -> Answered:
        """Return the coordinator's answer; retry after NOT_NOW errors and lost connections. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    answer = await self.ask(await self.find_coordinator(), api, body)
                except (NetworkError, BrokerError):
                    await asyncio.sleep(RETRY_S)
                    continue
                if not NOT_NOW.intersection(codes_of(answer)):
                    return answer
                await asyncio.sleep(RETRY_S)

    # -- the protocol --

    async def init(self, *, goes_on: bool = False) -> ErrorCode:
        body = m.InitProducerIdRequest(self.transactional_id, self.timeout_ms)
        if goes_on:
            body.producer_id, body.producer_epoch = self.producer_id, self.epoch
        answer = await self.of_coordinator(apis.INIT_PRODUCER_ID, body)
        if not answer.error_code:
            self._take(answer.producer_id, answer.producer_epoch)
        return ErrorCode(answer.error_code)

    def _take(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != (self.producer_id, self.epoch):
            self.producer_id, self.epoch = producer_id, epoch
            self._sequences = {}

    async def add(self, *partitions: TopicPartition, verify_only: bool = False) -> set[ErrorCode]:
        topics: dict[str, list[int]] = {}
        for topic, index in partitions:
            topics.setdefault(topic, []).append(index)
        extend = t.TransactionToExtend(
            self.transactional_id,
            self.producer_id,
            self.epoch,
            [t.TransactionTopic(name, indexes) for name, indexes in topics.items()],
            verify_only,
        )
        answer = await self.of_coordinator(apis.ADD_PARTITIONS_TO_TXN, t.AddPartitionsToTxnRequest([extend]))
        return {ErrorCode(code) for code in codes_of(answer)}

    async def end(self, *, committed: bool = True, takes_epoch: bool = True) -> ErrorCode:
        body = t.EndTxnRequest(self.transactional_id, self.producer_id, self.epoch, committed, self.raises_epoch)
        answer = await self.of_coordinator(apis.END_TXN, body)
        if not answer.error_code and self.raises_epoch and takes_epoch:
            self._take(answer.producer_id, answer.producer_epoch)
        return ErrorCode(answer.error_code)

    def batch(self, topic_partition: TopicPartition, *values: bytes, transactional: bool = True) -> memoryview:
        sequence = self._sequences.get(topic_partition, 0)
        self._sequences[topic_partition] = sequence + len(values)
        return memoryview(
            encode_batch(
                list(values),
                base_timestamp=self.world.clock.wall_ms(),
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=sequence,
                transactional=transactional,
            )
        )

    async def send(self, topic_partition: TopicPartition, *values: bytes, within_s: float = 60) -> ErrorCode:
        """Produce with acks=all, until it is written or refused."""
        return await self._produce(
            topic_partition, self.batch(topic_partition, *values), self.transactional_id, within_s
        )

    async def send_records(self, topic_partition: TopicPartition, records: memoryview) -> ErrorCode:
        """Produce a batch that belongs to no transaction."""
        return await self._produce(topic_partition, records, None, 60)

    async def _produce(
        self, topic_partition: TopicPartition, records: memoryview, transactional_id: str | None, within_s: float
    ) -> ErrorCode:
        body = m.ProduceRequest(
            transactional_id,
            -1,
            5_000,
            [m.ProduceTopic(topic_partition.topic, [m.ProducePartition(topic_partition.partition, records)])],
            adds_partitions=self.raises_epoch,
        )
        async with asyncio.timeout(within_s):
            while True:
                code = await self._send_once(topic_partition, body)
                if code not in NOT_NOW:
                    return code
                await asyncio.sleep(RETRY_S)

    async def _send_once(self, topic_partition: TopicPartition, body: m.ProduceRequest) -> ErrorCode:
        leader = self.cluster.state(topic_partition).leader
        if leader == NO_LEADER:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        try:
            answer = await self.ask(leader, apis.PRODUCE, body)
        except NetworkError:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode(answer.responses[0].partition_responses[0].error_code)

    async def describe(self) -> t.DescribedTransaction:
        body = t.DescribeTransactionsRequest([self.transactional_id])
        return (await self.of_coordinator(apis.DESCRIBE_TRANSACTIONS, body)).transaction_states[0]

    async def until_state(self, state: str, within_s: float = 60) -> t.DescribedTransaction:
        async with asyncio.timeout(within_s):
            while (described := await self.describe()).transaction_state != state:
                await asyncio.sleep(RETRY_S)
        return described

    def coordinator_partition(self, partitions: int) -> TopicPartition:
        return TopicPartition(TRANSACTIONS_TOPIC, internal_partition(self.transactional_id, partitions))


def codes_of(answer: object) -> set[int]:
    """Return all error codes of a response."""
    codes = {code} if isinstance(code := getattr(answer, "error_code", None), int) else set()
    for name in (
        "results_by_transaction",
        "topic_results",
        "results_by_partition",
        "topics",
        "partitions",
        "transaction_states",
    ):
        for part in getattr(answer, name, ()) or ():
            codes |= codes_of(part)
    return codes
