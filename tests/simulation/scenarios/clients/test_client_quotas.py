"""Quotas of users and clients, on a whole cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.client_quotas import DEFAULT_ENTITY, QuotaEntity, QuotaErrors
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import CLIENT_ID
from minibroker.deploy.simulator.kafka_connection import connect as connect_as_kafka
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol.apis import CREATE_TOPICS, METADATA
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.kafka.topics import CREATE_TOPICS as KAFKA_CREATE_TOPICS
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, replica_of, with_client

TOPIC = "orders"
SLOW = QuotaEntity(client_id="slow")


def play(program: Any) -> None:
    with_client(program, {"name": TOPIC, "partitions": 1, "replication_factor": 3})


async def seconds_to_send(cluster: VirtualCluster, world: VirtualWorld, client_id: str, **settings: Any) -> float:
    """Send 200 records of 1 kB, which arrive."""
    began = world.clock.monotonic()
    async with Producer(cluster.bootstrap, world=world, client_id=client_id, batch_size=2_000, **settings) as producer:
        for _ in range(200):
            producer.send(TOPIC, b"x" * 1_000, partition=0)
        await producer.flush()
    return world.clock.monotonic() - began


async def seconds_to_read(cluster: VirtualCluster, world: VirtualWorld, client_id: str, count: int) -> float:
    began = world.clock.monotonic()
    async with Consumer(
        cluster.bootstrap, world=world, client_id=client_id, partitions=[TopicPartition(TOPIC, 0)]
    ) as consumer:
        while count > 0:
            count -= len(await consumer.poll(timeout_ms=1_000))
    return world.clock.monotonic() - began


@run_by(play)
async def test_a_client_over_its_quota_is_slowed_down_and_no_other_one(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Also after the leader was killed, since every broker has the quotas."""

    async def limit(admin: Admin) -> None:
        await admin.alter_client_quotas({SLOW: {"producer_byte_rate": 5_000, "consumer_byte_rate": 10_000}})

    await as_admin(cluster, limit)
    await asyncio.sleep(1)
    assert await seconds_to_send(cluster, world, "fast") < 2
    assert 20 < await seconds_to_send(cluster, world, "slow") < 60
    assert await seconds_to_read(cluster, world, "fast", 400) < 2
    assert 20 < await seconds_to_read(cluster, world, "slow", 400) < 60
    await asyncio.sleep(20)
    leaders = (id for id in cluster.broker_ids if replica_of(cluster, id, TopicPartition(TOPIC, 0)).is_leader)
    cluster.kill_broker(next(leaders))
    assert 20 < await seconds_to_send(cluster, world, "slow") < 60

    async def lift(admin: Admin) -> None:
        await admin.alter_client_quotas({SLOW: {"producer_byte_rate": None}})
        assert await admin.describe_client_quotas() == {SLOW: {"consumer_byte_rate": 10_000.0}}

    await as_admin(cluster, lift)
    await asyncio.sleep(1)
    assert await seconds_to_send(cluster, world, "slow") < 2
    assert await seconds_to_send(cluster, world, "slow", acks=0) < 2


@run_by(play)
async def test_quotas_are_changed_as_asked_or_refused_with_the_reason(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    pair, of_all = QuotaEntity("CN=a, O=b/c", "app"), QuotaEntity(DEFAULT_ENTITY)
    quotas = {
        pair: {"request_percentage": 12.5},
        of_all: {"producer_byte_rate": 1.0},
        SLOW: {"consumer_byte_rate": 2.0},
    }

    async def change(admin: Admin) -> None:
        await admin.alter_client_quotas(quotas, validate_only=True)
        assert await admin.describe_client_quotas() == {}
        await admin.alter_client_quotas(quotas)
        assert await admin.describe_client_quotas() == quotas
        assert await admin.describe_client_quotas(client_id="app") == {pair: quotas[pair]}
        assert await admin.describe_client_quotas(user=DEFAULT_ENTITY) == {of_all: quotas[of_all]}
        await asyncio.gather(*(admin.alter_client_quotas({SLOW: {"producer_byte_rate": n}}) for n in (1, 2, 3)))
        assert (await admin.describe_client_quotas(client_id="slow"))[SLOW].keys() == {
            "consumer_byte_rate",
            "producer_byte_rate",
        }
        for wrong, why in (
            ({"producer_byte_rate": 0}, "producer_byte_rate=0 must be greater than 0"),
            ({"consumer_byte_rate": 1.5}, "consumer_byte_rate=1.5 must be a whole number"),
            ({"bytes": 1}, "'bytes' is not a quota of users and client ids: give one of producer_byte_rate"),
        ):
            with pytest.raises(QuotaErrors, match=why):
                await admin.alter_client_quotas({SLOW: {**wrong, "request_percentage": 5}})
        assert "request_percentage" not in (await admin.describe_client_quotas())[SLOW]

    await as_admin(cluster, change)


@run_by(play)
async def test_a_client_over_its_quota_creates_and_deletes_partitions_slowly_at_any_broker_and_others_do_not(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Admin(cluster.bootstrap, world=world, client_id="fast") as fast:
        await fast.alter_client_quotas(
            {entity: {"controller_mutation_rate": 2.0} for entity in (SLOW, QuotaEntity(client_id="other"))}
        )
        await asyncio.sleep(1)
        controller_id = (await fast.describe_cluster()).controller_id
        async with Admin(cluster.bootstrap, world=world, client_id="slow") as slow:

            async def seconds(done: Any) -> float:
                began = world.clock.monotonic()
                await done
                return world.clock.monotonic() - began

            # 11 windows of a second hold 22 tokens; these take 30
            assert await seconds(slow.create_topic("first", partitions=30, replication_factor=3)) < 3
            assert 2 < await seconds(slow.create_partitions("first", 34)) < 8
            assert 1 < await seconds(slow.delete_topic("first")) < 8
            assert await seconds(fast.create_topic("second", partitions=30, replication_factor=3)) < 3
            assert 10 < await seconds(slow.create_topic("third", partitions=1, replication_factor=3)) < 40
            with pytest.raises(BrokerError, match="second"):
                await slow.create_topic("second", partitions=30, replication_factor=3)
            assert await seconds(slow.create_topic("fourth", partitions=1, replication_factor=3)) < 8

    # A forwarded request is counted by the controller, by the client's id.
    other = next(id for id in cluster.broker_ids if id != controller_id)
    body = m.CreateTopicsRequest([m.CreatableTopic("large", 200, 1)], 5_000)
    connection = await open_connection(world.network, host_name(other), PORT, client_id="other", timeout_s=5)
    try:
        assert (await connection.request(CREATE_TOPICS, body)).topics[0].error_code == 0
        again = m.CreateTopicsRequest([m.CreatableTopic("more", 1, 1)], 5_000)
        answer = await connection.request(CREATE_TOPICS, again)
        assert answer.topics[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert 80_000 < answer.throttle_time_ms < 101_000
        with pytest.raises(NetworkError):
            await connection.request(METADATA, m.MetadataRequest([]), timeout_s=20)
    finally:
        connection.close("the test is over")


@pytest.mark.parametrize("is_controller", [True, False])
@run_by(play)
async def test_an_old_client_of_kafka_is_served_above_its_quota_and_stays_muted_for_the_throttle_time(
    cluster: VirtualCluster, world: VirtualWorld, /, is_controller: bool
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.alter_client_quotas({QuotaEntity(client_id=CLIENT_ID): {"controller_mutation_rate": 1.0}})
        await asyncio.sleep(1)
        controller_id = (await admin.describe_cluster()).controller_id
        broker_id = next(id for id in cluster.broker_ids if (id == controller_id) is is_controller)
    connection = await connect_as_kafka(world.network, host_name(broker_id), PORT)
    try:
        for name, partitions, version, code, least_ms, most_ms in (
            ("a", 21, 5, ErrorCode.NONE, 9_000, 10_000),
            ("b", 1, 5, ErrorCode.NONE, 500, 1_000),
            ("c", 8, 6, ErrorCode.NONE, 0, 0),
            ("d", 1, 6, ErrorCode.THROTTLING_QUOTA_EXCEEDED, 5_000, 8_000),
            ("e", 1, 6, ErrorCode.NONE, 0, 0),
        ):
            body = m.CreateTopicsRequest([m.CreatableTopic(name, partitions, 1)], 5_000)
            answer = await connection.request(KAFKA_CREATE_TOPICS, version, body)
            assert answer.topics[0].error_code == code
            assert least_ms <= answer.throttle_time_ms <= most_ms
    finally:
        connection.close()


@run_by(play)
async def test_an_address_over_its_rate_waits_for_its_connections_and_is_served(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """As often as the address is the client's own; a rate of another one is none of its business."""

    async def seconds_to_connect() -> float:
        began = world.clock.monotonic()
        for _ in range(5):
            connection = await open_connection(world.network, host_name(0), PORT, client_id="many", timeout_s=5)
            await connection.request(METADATA, m.MetadataRequest([]))
            connection.close("it has had its turn")
        return world.clock.monotonic() - began

    async with Admin(cluster.bootstrap, world=world) as admin:
        assert await seconds_to_connect() < 0.5
        for entity, rate, least_s, most_s in (
            (QuotaEntity(ip="10.9.9.9"), 1, 0.0, 0.5),
            (QuotaEntity(ip=DEFAULT_ENTITY), 1, 3.0, 5.5),
            (QuotaEntity(ip=DEFAULT_ENTITY), None, 0.0, 0.5),
        ):
            await admin.alter_client_quotas({entity: {"connection_creation_rate": rate}})
            await asyncio.sleep(2)
            assert least_s <= await seconds_to_connect() <= most_s
        assert await admin.describe_client_quotas(ip="10.9.9.9") == {
            QuotaEntity(ip="10.9.9.9"): {"connection_creation_rate": 1.0}
        }
        assert await admin.describe_client_quotas(user="alice") == {}
        for wrong, quota, why in (
            (QuotaEntity(ip="localhost"), "connection_creation_rate", "'localhost' is not an IP address"),
            (QuotaEntity(ip="10.0.0.1"), "producer_byte_rate", "of users and client ids: give --user NAME or"),
            (SLOW, "connection_creation_rate", "is a quota of addresses: give --ip ADDRESS"),
            (SLOW, "producer_byte_rat", r"not a quota of users and client ids: did you mean producer_byte_rate\?"),
            (QuotaEntity(ip="10.0.0.1"), "rate", "not a quota of addresses: give connection_creation_rate"),
            (QuotaEntity(user="alice", ip="10.0.0.1"), "producer_byte_rate", "give it alone"),
            (QuotaEntity(user=".."), "producer_byte_rate", "cannot be stored"),
            (QuotaEntity(user="alice", client_id="."), "producer_byte_rate", "cannot be stored"),
            (QuotaEntity(client_id=".."), "producer_byte_rate", "cannot be stored"),
            (QuotaEntity(ip="fe80::1%\0"), "connection_creation_rate", "cannot be stored"),
        ):
            with pytest.raises(QuotaErrors, match=why):
                await admin.alter_client_quotas({wrong: {quota: 1}})
