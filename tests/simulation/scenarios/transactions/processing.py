"""Read-process-write in scenarios: inputs, processors on hosts of their own, and the count of every input's result."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.fetching.records import Record
from minibroker.client.processing.results import Process, ProducerRecord
from minibroker.client.processor import Processor
from minibroker.client.transactions.states import Outcome
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.errors import BrokerError, NetworkError
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from tests.simulation.scenarios.helpers import as_admin, send_numbers

GROUP = "billing"
PARTITIONS = 2
INPUTS = [TopicPartition("orders", partition) for partition in range(PARTITIONS)]
SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
}
QUICK: dict[str, Any] = {
    "max_poll_records": 3,
    "transaction_timeout_ms": 10_000,
    "consumer_settings": {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 500, "fetch_max_wait_ms": 50},
    "producer_settings": {"max_block_ms": 10_000},
}


def double(records: list[Record]) -> list[ProducerRecord]:
    """The result of each number is the number, to the partition that it came from."""
    return [ProducerRecord("bills", record.value, partition=record.partition) for record in records]


class Pipeline:
    """A cluster with the topics `orders` and `bills`, and its processors."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.sent = 0
        self.ended: list[BaseException] = []
        """Why processors have ended."""
        self.tasks: list[asyncio.Task[None]] = []
        self.processors: dict[str, Processor] = {}
        """The latest of each host."""

    async def send(self, count: int, partition: int = 0) -> None:
        numbers = range(self.sent, self.sent + count)
        self.sent += count
        await send_numbers(self.cluster, "orders", numbers, partition)

    def start(
        self,
        host: str,
        transactional_id: str,
        process: Process = double,
        **settings: Any,
    ) -> VirtualWorld:
        """Start a processor. It runs until its process ends or it fails."""
        world = self.cluster.client(host)

        async def started() -> Processor:
            """Return a processor that has reached the cluster: `start` raises while brokers are away."""
            while True:
                processor = Processor(
                    self.cluster.bootstrap,
                    topics=["orders"],
                    group=GROUP,
                    transactional_id=transactional_id,
                    process=process,
                    world=world,
                    **(QUICK | settings),
                )
                try:
                    await processor.start()
                    return processor
                except (NetworkError, BrokerError):
                    await asyncio.sleep(0.5)

        async def play() -> None:
            processor = self.processors[host] = await started()
            try:
                await processor.run()
            finally:
                await processor.close()

        async def watched() -> None:
            try:
                await world.process.run(play())
            except ProcessKilled as error:
                self.ended.append(error)
            except Exception as error:  # noqa: BLE001 - tests look at it
                self.ended.append(error)

        self.tasks.append(asyncio.get_running_loop().create_task(watched()))
        return world

    async def until_committing(self, host: str, within_s: float = 60) -> None:
        """Wait until the coordinator is asked to commit a transaction of the processor."""
        transactions = self.processors[host]._producer._transactions
        assert transactions is not None
        async with asyncio.timeout(within_s):
            while transactions._states.result.outcome is not Outcome.UNKNOWN:
                await asyncio.sleep(0.0001)

    async def results(self) -> Counter[int]:
        """Return how often each number is in `bills`, for readers of committed records."""
        world = self.cluster.client("reader")

        async def read() -> Counter[int]:
            counts: Counter[int] = Counter()
            async with Consumer(
                self.cluster.bootstrap, topics=["bills"], isolation_level="read_committed", world=world
            ) as consumer:
                while sum((await consumer.lag()).values()) > 0:
                    counts.update(int(record.value) for record in await consumer.poll(200))
            return counts

        return await world.process.run(read())

    async def committed(self) -> dict[TopicPartition, int]:
        offsets = await as_admin(self.cluster, lambda admin: admin.list_group_offsets(GROUP))
        return {partition: at.offset for partition, at in offsets.items() if at is not None}

    async def all_done(self, within_s: float = 120) -> None:
        """Wait until every input has its result, and check that it has it once, and nothing hangs."""
        async with asyncio.timeout(within_s):
            while len(await self.results()) < self.sent:
                await asyncio.sleep(0.2)
        assert await self.results() == Counter(range(self.sent))
        await self.until_stable()
        assert await self.results() == Counter(range(self.sent))

    async def until_stable(self, within_s: float = 60) -> None:
        """Wait until no transaction is open: the last stable offset is the high watermark."""

        async def is_stable(admin: Admin) -> bool:
            bills = [TopicPartition("bills", partition) for partition in range(PARTITIONS)]
            ends = await admin.list_offsets(dict.fromkeys(bills, "latest"))
            stable = await admin.list_offsets(dict.fromkeys(bills, "latest"), isolation_level="read_committed")
            return stable == ends

        async with asyncio.timeout(within_s):
            while not await as_admin(self.cluster, is_stable):
                await asyncio.sleep(0.2)

    def leader(self, partition: TopicPartition) -> int:
        return self.cluster.state(partition).leader

    @property
    def group_coordinator(self) -> int:
        return self.leader(TopicPartition(OFFSETS_TOPIC, internal_partition(GROUP, 1)))

    @property
    def transaction_coordinator(self) -> int:
        return self.leader(TopicPartition(TRANSACTIONS_TOPIC, 0))


def with_pipeline(program: Callable[[Pipeline], Awaitable[None]], *, seed: int = 0) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), 3, SETTINGS)
        await cluster.start()

        async def create(admin: Admin) -> None:
            for topic in ("orders", "bills"):
                await admin.create_topic(topic, partitions=PARTITIONS, replication_factor=3)

        await as_admin(cluster, create)
        pipeline = Pipeline(cluster)
        try:
            await program(pipeline)
        finally:
            for task in pipeline.tasks:
                task.cancel()

    run(main(), seed=seed)
