"""Records with the timestamp of the broker that appended them, wherever they are read."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by

P0 = TopicPartition("orders", 0)


async def times(cluster: VirtualCluster, world: VirtualWorld, count: int) -> list[int]:
    async with Consumer(cluster.bootstrap, partitions=[P0], auto_offset_reset="earliest", world=world) as consumer:
        return [(await anext(consumer)).timestamp_ms for _ in range(count)]


@pytest.mark.parametrize("extra", [{}, {"compression.type": "zstd"}, {"record.format": "kafka"}], ids=str)
@run_by(on_virtual_loop, seed=1)
async def test_log_append_time_is_the_leaders_for_producers_consumers_and_replicas(
    extra: dict[str, str],
) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic(
                "orders",
                assignments=[(0, 1, 2)],
                configs={"message.timestamp.type": "LogAppendTime", "cleanup.policy": "compact", **extra},
            )
        cluster.simulation.host("broker-0").clock_offset_ms = -50_000
        cluster.simulation.host("broker-1").clock_offset_ms = 7_000
        sent = []
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(3):
                now_ms = world.clock.wall_ms()
                metadata = await producer.send("orders", b"x", key=b"%d" % number, partition=0, timestamp_ms=5)
                assert 0 <= metadata.timestamp_ms - (now_ms - 50_000) < 1_000
                sent.append(metadata.timestamp_ms)
                await asyncio.sleep(2)
            assert await times(cluster, world, 3) == sent
            async with Consumer(cluster.bootstrap, partitions=[P0], world=world) as consumer:
                found = (await consumer.offsets_for_times({P0: sent[1]}))[P0]
                assert found is not None
                assert (found.offset, found.timestamp_ms) == (1, sent[1])
            cluster.kill_broker(0)
            await cluster.until(lambda: cluster.state(P0).leader == 1)
            metadata = await producer.send("orders", b"x", key=b"9", partition=0, timestamp_ms=5)
        assert metadata.timestamp_ms > world.clock.wall_ms() + 5_000
        assert await times(cluster, world, 4) == [*sent, metadata.timestamp_ms]

    cluster = VirtualCluster(Simulation())
    await cluster.start()
    world = cluster.client("client")
    await world.process.run(scenario(cluster, world))
