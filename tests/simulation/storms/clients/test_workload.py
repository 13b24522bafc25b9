"""The strict clients of the storms record the outcome of each record and continue after errors."""

from __future__ import annotations

import asyncio
from collections import Counter

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import NewTopic
from minibroker.client.producer import Producer
from minibroker.client.producing.partitioners import crc32
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.kafka_clients import VERSIONS, KafkaProducer
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.storms.clients.workload import Workload
from tests.simulation.storms.verdicts.history import History

TOPIC = "durable"


@run_by(on_virtual_loop)
async def test_a_batch_under_way_during_a_power_loss_counts_only_parts_that_ended_later() -> None:
    cluster = VirtualCluster(Simulation(), brokers=2)
    await cluster.start()
    history = History(frozenset([TOPIC]))
    workload = Workload(cluster, history)
    on_0, on_1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
    world = cluster.client("client")

    async def inside() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topics([NewTopic(TOPIC, assignments=[[0], [1]])])
        by_partition = {crc32(key, 2): key for key in (b"%d" % number for number in range(10))}
        keys = [by_partition[0], by_partition[1]]
        async with Producer(cluster.bootstrap, world=world) as producer:
            await producer.send_batch(TOPIC, [b"1", b"2"], keys)
            cluster.kill_broker(1)
            delivery = producer.send_batch(TOPIC, [b"3", b"4"], keys)
            awaiting = workload._await_batch(delivery, [b"3", b"4"], [on_0, on_1], Counter(), True)
            awaited = asyncio.create_task(awaiting)
            await cluster.until(lambda: "1 waiting" in repr(delivery))
            history.power_lost([on_0], cluster.simulation.loop.now_s)
            await cluster.start_broker(1)
            await awaited

    await world.process.run(inside())
    assert [record.value for record in history.acknowledged[on_1]] == [b"4"]
    assert history.acknowledged[on_0] == []
    assert workload.acknowledged_end == {on_1: 2}


@run_by(on_virtual_loop)
async def test_all_senders_of_a_kafka_client_continue_after_timing_out_at_the_same_moment() -> None:
    cluster = VirtualCluster(Simulation(), brokers=1)
    await cluster.start()
    world = cluster.client("client")

    async def inside() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topics([NewTopic(TOPIC, partitions=3, replication_factor=1)])
        async with KafkaProducer(
            cluster.bootstrap,
            acks=-1,
            compression="none",
            linger_ms=0,
            delivery_timeout_ms=60_000,
            request_timeout_ms=500,
            versions=VERSIONS[-1],
            world=world,
        ) as producer:
            first = [producer.send(TOPIC, b"1", partition=partition) for partition in range(3)]
            assert [each.offset for each in await asyncio.gather(*first)] == [0, 0, 0]
            cluster.pause_broker(0)
            second = [producer.send(TOPIC, b"2", partition=partition) for partition in range(3)]
            await asyncio.sleep(2)
            cluster.resume_broker(0)
            async with asyncio.timeout(30):
                assert [each.offset for each in await asyncio.gather(*second)] == [1, 1, 1]

    await world.process.run(inside())
