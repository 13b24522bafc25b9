"""Shared by tests of replication: partitions on real logs, and one broker's ReplicaManager on virtual time.

Its ZooKeeper is virtual, its disk is real. The test plays the other brokers and fetches as they would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.replication.appending import ToAppend
from minibroker.broker.replication.delayed import DeletionStatus, ProduceStatus
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.partition import Partition, Settings
from minibroker.broker.replication.questions import Question
from minibroker.broker.replication.reading import FetchAnswer
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.parsing import broker_config
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.errors import ErrorCode, error_of
from minibroker.protocol.messages import (
    DeleteRecordsPartitionResult,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    LeaderAndIsrPartition,
    LeaderAndIsrRequest,
    LeaderAndIsrTopic,
    LiveLeader,
    PartitionError,
    ProducePartitionResponse,
    StopReplicaPartition,
    StopReplicaRequest,
    StopReplicaTopic,
    UpdateMetadataBroker,
    UpdateMetadataEndpoint,
    UpdateMetadataRequest,
)
from minibroker.protocol.messages.transactions import TransactionMarker, TransactionTopic
from minibroker.protocol.model import DEFAULT_LISTENER, LeaderAndIsr, TopicPartition
from minibroker.protocol.records import READ_UNCOMMITTED
from minibroker.protocol.world import ZooKeeperSession
from minibroker.protocol.world.real import RealDisk
from tests.storage_support import Clock, open_log

ME = 1
"""The broker under test; 2 and 3 are its peers."""
LAG_S = 10.0
TOPIC = "orders"
TOPIC_ID = "id-of-orders"
ORDERS = TopicPartition(TOPIC, 0)


def state(
    leader: int = ME,
    epoch: int = 0,
    isr: tuple[int, ...] = (1, 2, 3),
    *,
    version: int | None = None,
    replicas: tuple[int, ...] = (1, 2, 3),
    index: int = 0,
    isr_epochs: tuple[int, ...] = (),
    eligible: Mapping[int, int] | None = None,
    to_commit: int = 2,
) -> LeaderAndIsrPartition:
    """Return a partition of a LeaderAndIsr. The znode's version defaults to the leader epoch. `eligible` maps replicas
    to their epochs."""
    return LeaderAndIsrPartition(
        index,
        1,
        leader,
        epoch,
        list(isr),
        epoch if version is None else version,
        list(replicas),
        isr_epochs=list(isr_epochs),
        eligible=list(eligible or {}),
        eligible_epochs=list((eligible or {}).values()),
        to_commit=to_commit,
    )


def open_partition(
    path: Path,
    *,
    high_watermark: int = 0,
    min_insync_replicas: int | None = None,
    alive: Mapping[int, int] | None = None,
) -> tuple[Partition, Clock]:
    """Open a replica of this broker on a new or existing log. By default all brokers live in epoch 1."""
    log, _, world = open_log(str(path / "orders-0"))
    return partition_over(log, world.clock, high_watermark, min_insync_replicas, alive), world.clock


def partition_over(
    log: Log,
    clock: Clock,
    high_watermark: int = 0,
    min_insync_replicas: int | None = None,
    alive: Mapping[int, int] | None = None,
) -> Partition:
    epochs = {1: 1, 2: 1, 3: 1} if alive is None else alive
    return Partition(
        ORDERS,
        log,
        Settings(ME, LAG_S, None),
        clock,
        epochs.get,
        high_watermark=high_watermark,
        min_insync_replicas=min_insync_replicas,
    )


def fetch_of(
    offset: int, *, epoch: int = -1, last_epoch: int = -1, index: int = 0, max_bytes: int = 1 << 20, start: int = 0
) -> FetchPartition:
    return FetchPartition(index, epoch, offset, last_epoch, start, max_bytes)


class OneBroker:
    """A ReplicaManager as the broker composes it. Tests inspect the server `zookeeper` and inject faults into it."""

    def __init__(self, simulation: Simulation, world: VirtualWorld, config: BrokerConfig, logs: LogDirs) -> None:
        self.zookeeper = simulation.zookeeper
        self.config = config
        self.logs = logs
        self.world = world
        self.metadata = MetadataCache()
        self.supervisor = Supervisor()
        self.broker_epoch = 1
        self.session: ZooKeeperSession | None = None
        self.replicas = ReplicaManager(
            world,
            config,
            logs,
            self.metadata,
            self.supervisor,
            self._session,
            lambda: self.broker_epoch,
            BrokerConnections(world, ME, None),
        )

    async def _session(self) -> ZooKeeperSession:
        while self.session is None:
            await asyncio.sleep(0.05)
        return self.session

    async def connect(self) -> None:
        self.session = await self.world.zookeeper.connect("zookeeper:2181", 6_000, 1_000)

    def announce_brokers(self, epochs: Mapping[int, int]) -> None:
        self.metadata.update(
            UpdateMetadataRequest(
                1,
                1,
                self.broker_epoch,
                [],
                [
                    UpdateMetadataBroker(
                        b, [UpdateMetadataEndpoint(9092, f"broker-{b}", DEFAULT_LISTENER)], None, epoch
                    )
                    for b, epoch in epochs.items()
                ],
            )
        )
        self.replicas.isr_writer.reconsider()

    async def told(
        self,
        *states: LeaderAndIsrPartition,
        topic: str = TOPIC,
        topic_id: str = TOPIC_ID,
        leader_ports: Mapping[int, int] | None = None,
    ) -> list[PartitionError]:
        """Send LeaderAndIsr, after writing its znodes as the controller would."""
        self.topic_znodes(topic, topic_id)
        for s in states:
            self.znode(TopicPartition(topic, s.partition_index), s)
        return await self.replicas.orders.apply_leader_and_isr(
            LeaderAndIsrRequest(
                1,
                1,
                self.broker_epoch,
                [LeaderAndIsrTopic(topic, topic_id, list(states))],
                [LiveLeader(b, f"broker-{b}", port) for b, port in (leader_ports or {2: 9092, 3: 9092}).items()],
            )
        )

    def topic_znodes(self, topic: str, topic_id: str) -> None:
        if not self.zookeeper.has(znodes.topic_path(topic)):
            self.zookeeper.make(
                znodes.topic_path(topic), znodes.encode_topic(znodes.TopicZnode(topic_id, {0: (1, 2, 3)}))
            )
            if topic_id:
                self.zookeeper.make(znodes.topic_id_path(topic, topic_id))

    def znode(self, partition: TopicPartition, told: LeaderAndIsrPartition) -> None:
        path = znodes.state_path(partition)
        data = znodes.encode_state(
            LeaderAndIsr(
                told.leader,
                told.leader_epoch,
                tuple(told.isr),
                told.controller_epoch,
                -1,
                tuple(told.isr_epochs),
                tuple(told.eligible),
                tuple(told.eligible_epochs),
                told.to_commit,
            )
        )
        while not self.zookeeper.has(path) or self.zookeeper.stat(path).version < told.partition_epoch:
            self.zookeeper.make(path, data)

    def in_zookeeper(self, partition: TopicPartition = ORDERS) -> LeaderAndIsr:
        path = znodes.state_path(partition)
        return znodes.decode_state(partition, self.zookeeper.data(path), self.zookeeper.stat(path).version)

    async def stop_replica(
        self, *, epoch: int, delete: bool, index: int = 0, topic_id: str = TOPIC_ID
    ) -> list[PartitionError]:
        return await self.replicas.orders.stop_replicas(
            StopReplicaRequest(
                1,
                1,
                self.broker_epoch,
                [StopReplicaTopic(TOPIC, topic_id, [StopReplicaPartition(index, epoch, delete)])],
            )
        )

    def partition(self, partition: TopicPartition = ORDERS) -> Partition:
        found = self.replicas.partitions.get(partition)
        assert found is not None
        return found

    def produce(
        self,
        records: bytes,
        *,
        acks: int = -1,
        timeout_ms: int = 1_000,
        partition: TopicPartition = ORDERS,
        topic_id: str = TOPIC_ID,
        question: Question | None = None,
    ) -> asyncio.Future[ProducePartitionResponse]:
        answer: asyncio.Future[ProducePartitionResponse] = asyncio.get_running_loop().create_future()

        def respond(statuses: dict[TopicPartition, ProduceStatus]) -> None:
            answer.set_result(statuses[partition].response)

        appender = self.replicas.appender
        statuses = appender.append([ToAppend(partition, topic_id, records, question=question)], acks)
        appender.await_replicas(statuses, timeout_ms=timeout_ms, respond=respond)
        return answer

    def end_transaction(
        self,
        producer_id: int,
        *,
        epoch: int = 0,
        committed: bool = True,
        coordinator_epoch: int = 0,
        raises_epoch: bool = False,
        timeout_ms: int = 1_000,
        partitions: tuple[TopicPartition, ...] = (ORDERS,),
    ) -> asyncio.Future[dict[TopicPartition, ErrorCode]]:
        """Write the marker to these partitions. The result has the outcome in each."""
        answer: asyncio.Future[dict[TopicPartition, ErrorCode]] = asyncio.get_running_loop().create_future()
        topics = [TransactionTopic(p.topic, [p.partition]) for p in partitions]

        def respond(statuses: dict[TopicPartition, ProduceStatus]) -> None:
            answer.set_result({p: error_of(status.response.error_code) for p, status in statuses.items()})

        self.replicas.appender.write_markers(
            TransactionMarker(producer_id, epoch, committed, coordinator_epoch, topics, raises_epoch),
            timeout_ms=timeout_ms,
            respond=respond,
        )
        return answer

    def fetch(
        self,
        *fetches: FetchPartition,
        replica: int = -1,
        broker_epoch: int = 1,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
        isolation: int = READ_UNCOMMITTED,
        topic_id: str = TOPIC_ID,
    ) -> asyncio.Future[list[FetchPartitionResponse]]:
        answer: asyncio.Future[list[FetchPartitionResponse]] = asyncio.get_running_loop().create_future()

        def respond(found: FetchAnswer) -> None:
            answer.set_result([response for _, response in found])

        request = FetchRequest(
            replica,
            max_wait_ms,
            min_bytes,
            max_bytes,
            isolation,
            [FetchTopic(TOPIC, topic_id, list(fetches))],
            broker_epoch,
        )
        self.replicas.reader.fetch(request, respond)
        return answer

    def fetch_from(
        self,
        partition: TopicPartition,
        topic_id: str,
        offset: int,
        replica: int,
        *,
        broker_epoch: int = 1,
        start: int = 0,
    ) -> FetchPartitionResponse:
        """Fetch as a follower that has the records from `start` to `offset`."""
        leader = self.partition(partition)
        asked = fetch_of(
            offset,
            epoch=leader.leader_epoch,
            last_epoch=leader.log.epoch_at(offset - 1) if offset else -1,
            index=partition.partition,
            start=start,
        )
        answers: list[FetchPartitionResponse] = []
        topic = FetchTopic(partition.topic, topic_id, [asked])
        request = FetchRequest(replica, 0, 1, 1 << 20, 0, [topic], broker_epoch)
        self.replicas.reader.fetch(request, lambda found: answers.extend(response for _, response in found))
        return answers[0]

    def delete(
        self,
        offset: int,
        *,
        timeout_ms: int = 1_000,
        partition: TopicPartition = ORDERS,
        topic_id: str = TOPIC_ID,
    ) -> asyncio.Future[DeleteRecordsPartitionResult]:
        answer: asyncio.Future[DeleteRecordsPartitionResult] = asyncio.get_running_loop().create_future()

        def respond(statuses: dict[TopicPartition, DeletionStatus]) -> None:
            answer.set_result(statuses[partition].response)

        status = self.replicas.appender.delete_records(partition, topic_id, offset)
        self.replicas.appender.await_deletions({partition: status}, timeout_ms=timeout_ms, respond=respond)
        return answer

    def follower_has(self, offset: int, *followers: int, broker_epoch: int = 1, start: int = 0) -> None:
        """Fetch as followers that have the records of ORDERS from `start` to `offset`."""
        for follower in followers:
            fetched = self.fetch_from(ORDERS, TOPIC_ID, offset, follower, broker_epoch=broker_epoch, start=start)
            assert fetched.error_code == 0


def with_one_broker(
    tmp_path: Path,
    scenario: Callable[[OneBroker], Awaitable[None]],
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run the scenario with a started manager and its ZooKeeper session. Raises the error of a failed task."""

    async def main() -> None:
        simulation = Simulation()
        world = simulation.host("broker-1").start_process()
        config = broker_config(
            {
                "broker.id": str(ME),
                "log.dirs": str(tmp_path / "data"),
                "zookeeper.connect": "zookeeper:2181",
                "replica.lag.time.max.ms": str(int(LAG_S * 1_000)),
            }
            | dict(settings or {})
        )
        for path in (*znodes.PERSISTENT_PATHS, znodes.CLUSTER_ID):
            simulation.zookeeper.make(path)

        async def inside() -> None:
            # The interface is the same; only the virtual disk is bound to its process.
            world.disk = RealDisk()  # type: ignore[assignment]
            logs = LogDirs(world, config.log_directories(), ME)
            await logs.open("cluster")
            broker = OneBroker(simulation, world, config, logs)
            await broker.connect()
            broker.replicas.start()
            broker.announce_brokers({1: 1, 2: 1, 3: 1})
            try:
                await scenario(broker)
                failure = broker.supervisor.failure
                if failure.done() and not failure.cancelled():
                    failure.result()
            finally:
                await broker.supervisor.close()
                await broker.replicas.close()
                await logs.close(clean=False)

        await world.process.run(inside())

    run(main())
