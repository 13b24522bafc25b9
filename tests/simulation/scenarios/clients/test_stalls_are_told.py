"""Clients log long waits, their reason and their end: real brokers on the virtual World."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import DeliveryTimedOut
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from tests.simulation.scenarios.helpers import as_admin


async def _start_cluster() -> VirtualCluster:
    """Start three brokers, and create a topic of three partitions with three replicas each."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await as_admin(cluster, lambda admin: admin.create_topic("orders", partitions=3, replication_factor=3))
    return cluster


STALLS = "minibroker.client.stalls"
CLIENT = "minibroker.client"


def _lines(caplog: pytest.LogCaptureFixture, who: str, level: int, log: str = STALLS) -> list[str]:
    records = [record for record in caplog.records if record.name == log and record.levelno == level]
    return [record.getMessage() for record in records if record.getMessage().startswith(f"{who}: ")]


def test_an_outage_of_the_cluster_is_one_warning_and_one_end_per_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "minibroker.client")

    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("client")
        await world.process.run(use(cluster, world))

    async def use(cluster: VirtualCluster, world: VirtualWorld) -> None:
        producer = Producer(cluster.bootstrap, client_id="p", world=world)
        consumer = Consumer(cluster.bootstrap, topics=["orders"], client_id="c", world=world)
        async with producer, consumer, Admin(cluster.bootstrap, client_id="a", world=world) as admin:
            await asyncio.gather(*(producer.send("orders", b"before", partition=number) for number in range(3)))
            for _ in range(3):
                await anext(consumer)
            assert not _lines(caplog, "p", logging.WARNING) + _lines(caplog, "c", logging.WARNING)
            for broker_id in cluster.broker_ids:
                cluster.kill_broker(broker_id)
            deliveries = [producer.send("orders", b"after", partition=number) for number in range(3)]
            listing = asyncio.create_task(admin.list_topics())
            await asyncio.sleep(30)
            await asyncio.gather(*(cluster.start_broker(broker_id) for broker_id in cluster.broker_ids))
            await asyncio.gather(*deliveries)
            await listing
            for _ in range(3):
                await anext(consumer)
            await asyncio.sleep(5)

    run(scenario(), seed=1)
    for who, what in (("p", "orders-"), ("c", "orders-"), ("a", "Metadata")):
        warnings = _lines(caplog, who, logging.WARNING)
        assert len(warnings) == 1, warnings
        assert warnings[0].startswith(f"{who}: no progress for ")
        assert what in warnings[0]
        assert "connecting to broker-" in warnings[0]
        assert "minibroker status" in warnings[0]
        ends = [line for line in _lines(caplog, who, logging.INFO) if "is over after" in line]
        assert ends
        assert all(float(line.split()[-2]) > 25 for line in ends)
    assert any("disconnected from broker-" in line for line in _lines(caplog, "p", logging.INFO, CLIENT))
    assert any("connected to broker-" in line for line in _lines(caplog, "p", logging.DEBUG, CLIENT))
    assert any("retry: NETWORK_EXCEPTION" in line for line in _lines(caplog, "p", logging.DEBUG, CLIENT))


def test_a_stall_that_ends_with_a_failure_is_not_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minibroker.client")

    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("client")
        await world.process.run(use(cluster, world))

    async def use(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Producer(cluster.bootstrap, client_id="p", delivery_timeout_ms=20_000, world=world) as producer:
            await producer.send("orders", b"before", partition=0)
            for broker_id in cluster.broker_ids:
                cluster.kill_broker(broker_id)
            with pytest.raises(DeliveryTimedOut):
                await producer.send("orders", b"after", partition=0)
            await asyncio.sleep(5)

    run(scenario(), seed=1)
    assert len(_lines(caplog, "p", logging.WARNING)) == 1
    assert not [line for line in _lines(caplog, "p", logging.INFO) if "is over" in line]


def test_a_failover_and_a_long_linger_are_not_stalls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minibroker.client")

    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("client")
        await world.process.run(use(cluster, world))

    async def use(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with (
            Producer(cluster.bootstrap, client_id="p", linger_ms=20_000, world=world) as producer,
            Consumer(cluster.bootstrap, topics=["orders"], client_id="c", world=world) as consumer,
        ):
            for number in range(30):
                producer.send("orders", b"v", partition=number % 3)
                await asyncio.sleep(1)
                if number == 5:
                    cluster.kill_broker(1)
            await producer.flush()
            for _ in range(30):
                await anext(consumer)
            await asyncio.sleep(20)  # waiting without records to read is not a stall

    run(scenario(), seed=2)
    assert not _lines(caplog, "p", logging.WARNING) + _lines(caplog, "c", logging.WARNING)


def test_a_consumer_that_waits_for_a_missing_topic_logs_that(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("client")

        async def use() -> None:
            with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
                async with Consumer(cluster.bootstrap, topics=["oders"], client_id="c", world=world):
                    pass

        await world.process.run(use())

    run(scenario())
    [warning] = _lines(caplog, "c", logging.WARNING)
    assert "UNKNOWN_TOPIC_OR_PARTITION: oders. Check the name with `minibroker topics list`" in warning


@pytest.mark.parametrize("acks", ["all", 1])
def test_a_producer_whose_leader_is_silent_reports_that_instead_of_a_short_timeout(
    acks: Literal["all", 1], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("client")

        async def use() -> None:
            async with Producer(cluster.bootstrap, acks=acks, client_id="p", world=world) as producer:
                await producer.send("orders", b"before", partition=0)
                leader = cluster.state(TopicPartition("orders", 0)).leader
                cluster.pause_broker(leader)
                cluster.simulation.zookeeper.stop()
                delivery = producer.send("orders", b"after", partition=0)
                await asyncio.sleep(7)
                cluster.simulation.zookeeper.start()
                cluster.resume_broker(leader)
                await delivery

        await world.process.run(use())

    run(scenario())
    [warning] = _lines(caplog, "p", logging.WARNING)
    waits = ", or still waits for its replicas" if acks == "all" else ""
    assert f"has not answered{waits}: see `minibroker status`" in warning
