"""Access control lists on a cluster: they come into force on all brokers, and clients learn what they may not do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import acl_znodes, znodes
from minibroker.protocol import messages as m
from minibroker.protocol.acls import (
    CLUSTER_NAME,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
)
from minibroker.protocol.apis import CREATE_TOPICS, METADATA
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, with_client

ORDERS = "orders"
ON = {"authorizer.class.name": "kafka.security.authorizer.AclAuthorizer"}
OPEN = ON | {"allow.everyone.if.no.acl.found": "true"}
"""Every client is User:ANONYMOUS here, so ACLs tell them apart by their hosts."""

Op = AclOperation


def acl(
    operation: AclOperation,
    name: str = ORDERS,
    *,
    host: str = "*",
    permission: AclPermissionType = AclPermissionType.ALLOW,
    kind: AclResourceType = AclResourceType.TOPIC,
    pattern: PatternType = PatternType.LITERAL,
) -> AclBinding:
    entry = AccessControlEntry("User:ANONYMOUS", host, operation, permission)
    return AclBinding(ResourcePattern(kind, name, pattern), entry)


def address(cluster: VirtualCluster, host: str) -> str:
    return cluster.simulation.host(host).address


def with_cluster(
    program: Callable[[VirtualCluster, VirtualWorld], Awaitable[None]], settings: dict[str, str] | None = None
) -> None:
    topic = {"name": ORDERS, "partitions": 3, "replication_factor": 3}
    with_client(program, topic, settings=OPEN if settings is None else settings, host="client")


async def until_refused(world: VirtualWorld, broker_id: int, *, refused: bool = True) -> None:
    """Wait until the broker hides the topic from this client, or shows it."""
    connection = await open_connection(world.network, host_name(broker_id), PORT, client_id="client", timeout_s=5)
    async with asyncio.timeout(5):
        while True:
            answer = await connection.request(METADATA, m.MetadataRequest([ORDERS]))
            if (answer.topics[0].error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED) is refused:
                break
            await asyncio.sleep(0.05)
    connection.close("done")


async def produce(cluster: VirtualCluster, world: VirtualWorld) -> None:
    async with Producer(cluster.bootstrap, world=world, delivery_timeout_ms=10_000) as producer:
        for partition in range(3):
            await producer.send(ORDERS, b"value", partition=partition)


@run_by(with_cluster)
async def test_an_acl_that_one_broker_records_holds_on_all_and_ends_when_it_is_deleted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world)
    mine = acl(Op.ALL, host=address(cluster, "admin"))
    await as_admin(cluster, lambda admin: admin.create_acls([mine]))
    for broker_id in cluster.broker_ids:
        await until_refused(world, broker_id)
    assert await as_admin(cluster, lambda admin: admin.describe_acls()) == [mine]
    assert await as_admin(cluster, lambda admin: admin.delete_acls([AclFilter(name=ORDERS)])) == [mine]
    for broker_id in cluster.broker_ids:
        await until_refused(world, broker_id, refused=False)
    await produce(cluster, world)


@run_by(with_cluster)
async def test_a_producer_learns_which_right_it_lacks(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    await as_admin(cluster, lambda admin: admin.create_acls([acl(Op.DESCRIBE)]))
    for broker_id in cluster.broker_ids:
        await until_refused(world, broker_id, refused=False)
    with pytest.raises(BrokerError) as raised:
        await produce(cluster, world)
    assert raised.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert f"User:ANONYMOUS at {address(cluster, 'client')} may not Write Topic 'orders'" in str(raised.value)
    assert "minibroker acls add --allow-principal User:ANONYMOUS --operation Write --topic orders" in str(raised.value)


@run_by(with_cluster)
async def test_the_controller_checks_a_forwarded_request_by_the_client_that_sent_it(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    acls = [
        acl(Op.CREATE, "mine", host=address(cluster, "client"), pattern=PatternType.PREFIXED),
        acl(Op.ALL, "*", host=address(cluster, "admin")),
    ]
    acls.append(acl(Op.ALL, CLUSTER_NAME, kind=AclResourceType.CLUSTER, host=address(cluster, "admin")))
    await as_admin(cluster, lambda admin: admin.create_acls(acls))
    for broker_id in cluster.broker_ids:
        await until_refused(world, broker_id)
    for broker_id in cluster.broker_ids:
        assert await created(world, broker_id, f"mine-{broker_id}") == ErrorCode.NONE
        assert await created(world, broker_id, f"other-{broker_id}") == ErrorCode.TOPIC_AUTHORIZATION_FAILED


@run_by(with_cluster)
async def test_the_controller_checks_what_a_broker_without_an_authorizer_forwards(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Brokers get their authorizer one after the other."""
    other = next(broker_id for broker_id in cluster.broker_ids if broker_id not in cluster.active_controllers())
    cluster.kill_broker(other)
    cluster.own_settings[other] = {"authorizer.class.name": ""}
    acls = [
        acl(Op.ALL, "*", host=address(cluster, "admin")),
        acl(Op.ALL, CLUSTER_NAME, kind=AclResourceType.CLUSTER, host=address(cluster, "admin")),
    ]
    await as_admin(cluster, lambda admin: admin.create_acls(acls))
    await cluster.start_broker(other)
    code: int = ErrorCode.NOT_CONTROLLER
    async with asyncio.timeout(20):
        while code == ErrorCode.NOT_CONTROLLER:  # until the broker knows the controller
            try:
                code = await created(world, other, "other")
            except BrokerError as error:
                code = error.code
                await asyncio.sleep(0.1)
    assert code == ErrorCode.TOPIC_AUTHORIZATION_FAILED


async def created(world: VirtualWorld, broker_id: int, name: str) -> int:
    connection = await open_connection(world.network, host_name(broker_id), PORT, client_id="client", timeout_s=5)
    try:
        request = m.CreateTopicsRequest([m.CreatableTopic(name, 1, 1)], 5_000)
        return (await connection.request(CREATE_TOPICS, request)).topics[0].error_code
    finally:
        connection.close("done")


@run_by(with_cluster)
async def test_a_broker_that_was_away_knows_the_acls_of_that_time_when_it_is_back(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    cluster.kill_broker(2)
    await as_admin(cluster, lambda admin: admin.create_acls([acl(Op.ALL, host=address(cluster, "admin"))]))
    await cluster.start_broker(2)
    await until_refused(world, 2)


@run_by(with_cluster)
async def test_a_broker_hears_of_acls_after_its_session_of_zookeeper_has_expired(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    zookeeper = cluster.simulation.zookeeper
    zookeeper.expire(host_name(2))
    await cluster.until(lambda: not zookeeper.has(znodes.broker_path(2)))
    await cluster.until(lambda: zookeeper.has(znodes.broker_path(2)))
    await as_admin(cluster, lambda admin: admin.create_acls([acl(Op.ALL, host=address(cluster, "admin"))]))
    await until_refused(world, 2)


@run_by(with_cluster)
async def test_acls_that_cannot_be_read_refuse_everything_to_their_resource(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    pattern = ResourcePattern(AclResourceType.TOPIC, ORDERS)
    zookeeper = await world.zookeeper.connect("zookeeper:2181", session_timeout_ms=6_000, connect_timeout_ms=6_000)
    await zookeeper.create(acl_znodes.acl_path(pattern), b'{"version":1,"acls":[{"principal":')
    path = f"{acl_znodes.ACL_CHANGES}/{acl_znodes.CHANGE_PREFIX}"
    await zookeeper.create(path, acl_znodes.encode_change(pattern), sequence=True)
    for broker_id in cluster.broker_ids:
        await until_refused(world, broker_id)


@run_by(with_cluster, settings={})
async def test_without_an_authorizer_acls_are_refused_with_the_setting_that_is_missing(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        with pytest.raises(BrokerError, match="authorizer.class.name") as raised:
            await admin.create_acls([acl(Op.READ)])
    assert raised.value.code is ErrorCode.SECURITY_DISABLED


@run_by(with_cluster)
async def test_brokers_that_have_proved_themselves_need_no_acl(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    """Only the client's host is allowed anything: replication, elections, coordinators and transactions go on."""
    kinds = [AclResourceType.TOPIC, AclResourceType.GROUP, AclResourceType.TRANSACTIONAL_ID]
    acls = [acl(Op.ALL, "*", kind=kind, host=address(cluster, "client")) for kind in kinds]
    acls.append(acl(Op.ALL, CLUSTER_NAME, kind=AclResourceType.CLUSTER, host=address(cluster, "client")))
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_acls(acls)
    await produce(cluster, world)
    leader = cluster.state(TopicPartition(ORDERS, 0)).leader
    cluster.kill_broker(leader)
    await produce(cluster, world)
    await cluster.start_broker(leader)
    async with Producer(cluster.bootstrap, world=world, transactional_id="t") as producer, producer.transaction():
        await producer.send(ORDERS, b"together", partition=0)
        await producer.send(ORDERS, b"together", partition=1)
    async with Consumer(
        cluster.bootstrap,
        topics=[ORDERS],
        group="readers",
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        world=world,
    ) as consumer:
        found: list[bytes | None] = []
        async with asyncio.timeout(60):
            while len(found) < 8:
                found += [record.value for record in await consumer.poll(1_000)]
        await consumer.commit()
    assert sorted(filter(None, found)) == [b"together"] * 2 + [b"value"] * 6
    with pytest.raises(BrokerError, match=r"User:ANONYMOUS at .* may not Describe Cluster"):
        await as_admin(cluster, lambda stranger: stranger.describe_acls())


@run_by(with_cluster)
async def test_a_consumer_learns_which_right_it_lacks(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    await produce(cluster, world)
    acls = [acl(Op.READ), acl(Op.DESCRIBE, "readers", kind=AclResourceType.GROUP)]
    await as_admin(cluster, lambda admin: admin.create_acls(acls))
    for broker_id in cluster.broker_ids:
        await until_refused(world, broker_id, refused=False)
    await asyncio.sleep(1)
    with pytest.raises(BrokerError, match="may not Read Group 'readers'") as raised:
        async with Consumer(cluster.bootstrap, topics=[ORDERS], group="readers", world=world) as consumer:
            await consumer.poll(10_000)
    assert raised.value.code is ErrorCode.GROUP_AUTHORIZATION_FAILED
    # without a group, Read on the topic is enough; without that, the topic is the reason
    async with Consumer(cluster.bootstrap, topics=[ORDERS], auto_offset_reset="earliest", world=world) as consumer:
        assert len(await consumer.poll(10_000)) > 0
    await as_admin(cluster, lambda admin: admin.delete_acls([AclFilter(name=ORDERS)]))
    await as_admin(cluster, lambda admin: admin.create_acls([acl(Op.DESCRIBE)]))
    await asyncio.sleep(1)
    with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
        async with Consumer(cluster.bootstrap, topics=[ORDERS], auto_offset_reset="earliest", world=world) as consumer:
            await consumer.poll(10_000)
