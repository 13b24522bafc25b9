"""A cluster with a topic of two partitions, and clients that speak Kafka's protocol of transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from minibroker.client.admin import Admin
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.kafka_clients import READ_COMMITTED, READ_UNCOMMITTED, KafkaConsumer
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.transacting.kafka_transactions import (
    RAISING,
    KafkaTransactions,
    TransactionVersions,
)

TOPIC = "orders"
P, Q = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
GROUP = "billing"
SETTINGS = {
    "transaction.state.log.num.partitions": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "log.flush.offset.checkpoint.interval.ms": "500",
}
WITHIN_S = 60.0
"""Virtual seconds within which the last stable offset reaches the high watermark."""


class Scenario:
    def __init__(self, cluster: VirtualCluster, world: VirtualWorld) -> None:
        self.cluster = cluster
        self.world = world

    def client(
        self,
        versions: TransactionVersions = RAISING[0],
        *,
        transactional_id: str = "mover",
        timeout_ms: int = 60_000,
        world: World | None = None,
    ) -> KafkaTransactions:
        return KafkaTransactions(
            self.cluster.bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            partitions=[P, Q],
            versions=versions,
            patience_s=60.0,
            world=world or self.world,
        )

    async def ends(self, isolation_level: int) -> dict[TopicPartition, int]:
        async with self._consumer(isolation_level) as consumer:
            return await consumer.ends([P, Q])

    async def is_stable(self) -> bool:
        """Return whether the last stable offsets reach the high watermarks in time."""
        try:
            async with asyncio.timeout(WITHIN_S):
                while await self.ends(READ_COMMITTED) != await self.ends(READ_UNCOMMITTED):
                    await asyncio.sleep(0.2)
        except TimeoutError:
            return False
        return True

    async def visible(self, isolation_level: int = READ_COMMITTED) -> dict[TopicPartition, list[bytes]]:
        """Return the values of each partition up to its present end."""
        values: dict[TopicPartition, list[bytes]] = {P: [], Q: []}
        async with self._consumer(isolation_level) as consumer:
            ends = await consumer.ends([P, Q])
            while any(consumer.position(partition) < end for partition, end in ends.items()):
                for batch in await consumer.poll():
                    values[TopicPartition(batch.topic, batch.partition)] += [value or b"" for value in batch.values]
        return values

    def _consumer(self, isolation_level: int) -> KafkaConsumer:
        return KafkaConsumer(
            self.cluster.bootstrap,
            partitions=[P, Q],
            versions=RAISING[0].data,
            world=self.world,
            limits=[1_048_576],
            isolation_level=isolation_level,
            fetch_max_wait_ms=10,
        )


def run_scenario(
    scenario: Callable[[Scenario], Awaitable[None]], *, settings: Mapping[str, str] | None = None, seed: int = 0
) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), settings=SETTINGS | dict(settings or {}))
        await cluster.start()
        world = cluster.client("client")

        async def client() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic(TOPIC, partitions=2, replication_factor=3)
            await scenario(Scenario(cluster, world))

        await world.process.run(client())

    run(main(), seed=seed)
