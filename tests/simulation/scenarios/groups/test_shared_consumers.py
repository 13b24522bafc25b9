"""Several tasks may iterate over one consumer; each record goes to one of them."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.control.test_forwarding import until_controller
from tests.simulation.scenarios.helpers import with_client


@pytest.mark.parametrize("mode", ["records+records", "records+batches"])
@run_by(with_client)
async def test_two_loops_over_one_consumer_share_all_records_between_them(
    cluster: VirtualCluster, world: VirtualWorld, /, mode: str
) -> None:
    """Both are waiting when the first batches arrive."""

    await until_controller(cluster)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("orders", partitions=2, replication_factor=3)
    got: list[tuple[int, int]] = []
    async with (
        Consumer(cluster.bootstrap, topics=["orders"], world=world) as consumer,
        Producer(cluster.bootstrap, world=world) as producer,
    ):

        async def by_records() -> None:
            async for record in consumer:
                got.append((record.partition, record.offset))
                await asyncio.sleep(0.001)

        async def by_batches() -> None:
            async for batch in consumer.batches():
                got.extend((batch.partition, offset) for offset in batch.offsets)
                await asyncio.sleep(0.001)

        loops = [asyncio.ensure_future(by_records())]
        loops.append(asyncio.ensure_future(by_records() if mode == "records+records" else by_batches()))
        await asyncio.sleep(1)
        for _ in range(5):
            for n in range(10):
                for partition in (0, 1):
                    producer.send("orders", b"%d" % n, partition=partition)
            await producer.flush()
            await asyncio.sleep(1)
        await asyncio.sleep(5)
        positions = {p: await consumer.position(TopicPartition("orders", p)) for p in (0, 1)}
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    wanted = [(p, o) for p in (0, 1) for o in range(50)]
    assert sorted(got) == wanted, f"missing {sorted(set(wanted) - set(got))}, positions {positions}"
