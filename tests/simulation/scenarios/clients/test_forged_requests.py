"""A client cannot send orders or advance a high watermark; brokers with the cluster's secret work together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.controller.governing.registration import Registration, SecretDiffers
from minibroker.deploy.simulator.cluster import CONTROL_PORT, PORT, SECRET, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import BROKER_HANDSHAKE, FETCH, LIST_OFFSETS, Api, Plane
from minibroker.protocol.connections.broker_connections import BrokerConnections, NotTrusted
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.world import ZooKeeperSession
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of, with_client
from tests.simulation.storms.forgeries import authenticate, forged_fetch, forged_orders, is_refused, shake_hands

ORDERS = TopicPartition("orders", 0)
KEY = SECRET.encode()
WRONG = b"the secret of some other cluster"

Program = Callable[[VirtualCluster, VirtualWorld], Awaitable[None]]


def with_cluster(program: Program, settings: dict[str, str] | None = None) -> None:
    """Run the program as a client of three brokers that all have a topic's ten records."""

    async def with_records(cluster: VirtualCluster, world: VirtualWorld) -> None:
        await produce(cluster, world)
        await program(cluster, world)

    topic = {"name": ORDERS.topic, "partitions": 1, "replication_factor": 3}
    with_client(with_records, topic, settings=settings, host="stranger")


async def produce(cluster: VirtualCluster, world: VirtualWorld, brokers: Sequence[int] | None = None) -> None:
    bootstrap = cluster.bootstrap if brokers is None else ",".join(f"{host_name(each)}:{PORT}" for each in brokers)
    async with Producer(bootstrap, world=world) as producer:
        for number in range(10):
            await producer.send(ORDERS.topic, b"%d" % number)


async def connect(world: VirtualWorld, broker_id: int, port: int = CONTROL_PORT) -> Connection:
    return await open_connection(world.network, host_name(broker_id), port, client_id="stranger", timeout_s=5)


async def prove(connection: Connection, world: VirtualWorld, broker_id: int, peer_id: int) -> bytes:
    """Authenticate as that broker with the cluster's secret, and return the proof."""
    proof = (await shake_hands(connection, world.random, broker_id, peer_id)).connecting_proof(KEY)
    await authenticate(connection, proof)
    return proof


async def refusal_of(awaitable: Awaitable[Any]) -> str:
    with pytest.raises(BrokerError) as raised:
        await awaitable
    assert raised.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return raised.value.detail


def refused(cluster: VirtualCluster, broker_id: int, api: Api[Any, Any]) -> int:
    """Return the number of requests of that API that the broker has counted as refused."""
    return cluster.broker(broker_id)._server.metrics.per_api[api.key].unauthorized


def high_watermark(cluster: VirtualCluster, broker_id: int) -> int:
    partition = replica_of(cluster, broker_id, ORDERS)
    return partition.high_watermark


@pytest.mark.parametrize("secret", [None, WRONG], ids=["without a proof", "with a proof by another secret"])
@pytest.mark.parametrize("order", range(3), ids=["LeaderAndIsr", "UpdateMetadata", "StopReplica"])
@run_by(with_cluster, settings={"metrics.listener": "0.0.0.0:9404"})
async def test_an_order_from_an_unproven_sender_is_refused_counted_and_has_no_effect(
    cluster: VirtualCluster, world: VirtualWorld, /, order: int, secret: bytes | None
) -> None:
    for broker_id in cluster.broker_ids:
        before = cluster.state(ORDERS)
        api, request = forged_orders(cluster, broker_id, ORDERS, controller_id=1)[order]
        connection = await connect(world, broker_id)
        if secret is not None:
            handshake = await shake_hands(connection, world.random, 1, broker_id)
            await refusal_of(authenticate(connection, handshake.connecting_proof(secret)))
        assert "in the name of broker 1, over a connection that is User:ANONYMOUS" in await refusal_of(
            connection.request(api, request)
        )
        page = (await cluster.broker(broker_id)._render_metrics()).decode()
        assert f'minibroker_network_requests_unauthorized_total{{request="{api.name}"}} 1.0' in page
        assert cluster.state(ORDERS) == before
    await produce(cluster, world)
    assert len(cluster.active_controllers()) == 1


@run_by(with_cluster, settings={"zookeeper.session.timeout.ms": "60000"})
async def test_a_fetch_in_a_replicas_name_advances_the_high_watermark_only_from_that_replica(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader = cluster.state(ORDERS).leader
    first, second = (broker_id for broker_id in cluster.broker_ids if broker_id != leader)
    await cluster.until(lambda: high_watermark(cluster, leader) == 10)
    for follower in (first, second):
        cluster.pause_broker(follower)
    async with Producer(cluster.bootstrap, acks=1, world=world) as producer:
        await producer.send(ORDERS.topic, b"on one broker alone")
    connection = await connect(world, leader, PORT)

    async def fetch_as(replica_id: int) -> bool:
        request = forged_fetch(cluster, leader, ORDERS, replica_id)
        assert request is not None
        return not await is_refused(connection, FETCH, request)

    assert [await fetch_as(first), await fetch_as(second)] == [False, False]
    await prove(connection, world, first, leader)
    assert [await fetch_as(first), await fetch_as(second)] == [True, False]
    assert high_watermark(cluster, leader) == 10
    assert refused(cluster, leader, FETCH) == 3
    await prove(connection, world, second, leader)
    assert [await fetch_as(first), await fetch_as(second)] == [False, True]
    assert high_watermark(cluster, leader) == 11  # ids and offsets are all that distinguishes them


@run_by(with_cluster)
async def test_only_replicas_see_offsets_beyond_the_high_watermark(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader = cluster.state(ORDERS).leader
    connection = await connect(world, leader, PORT)
    topics = [m.ListOffsetsTopic(ORDERS.topic, [m.ListOffsetsPartition(0, -1, -1)])]
    assert await is_refused(connection, LIST_OFFSETS, m.ListOffsetsRequest(5, 0, topics))
    assert not await is_refused(connection, LIST_OFFSETS, m.ListOffsetsRequest(-1, 0, topics))


@run_by(with_cluster)
async def test_a_broker_speaks_only_for_itself(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await connect(world, 0)
    await prove(connection, world, 1, 0)
    for api, request in forged_orders(cluster, 0, ORDERS, controller_id=2):
        detail = await refusal_of(connection.request(api, request))
        assert "in the name of broker 2, over a connection that is broker 1" in detail
        assert "need the same broker.secret.file" in detail


@run_by(with_cluster)
async def test_a_proof_is_valid_once_and_on_its_own_connection(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await connect(world, 0)
    assert "a proof without a handshake" in await refusal_of(authenticate(connection, bytes(32)))
    proof = await prove(connection, world, 1, 0)
    assert "a proof without a handshake" in await refusal_of(authenticate(connection, proof))
    for replayed_to in (0, 2):
        other = await connect(world, replayed_to)
        await shake_hands(other, world.random, 1, replayed_to)
        assert "the proof of broker 1 is wrong" in await refusal_of(authenticate(other, proof))
        assert await is_refused(other, *forged_orders(cluster, replayed_to, ORDERS, 1)[0])


@run_by(with_cluster)
async def test_a_brokers_own_proof_does_not_authenticate_its_caller(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world, 0)
    nonce = world.random.randbytes(m.PROOF_BYTES)
    answer = await connection.request(BROKER_HANDSHAKE, m.BrokerHandshakeRequest(0, 0, nonce))
    assert "the proof of broker 0 is wrong" in await refusal_of(authenticate(connection, answer.proof))


@run_by(with_cluster)
async def test_a_broker_that_starts_another_handshake_is_anonymous_until_it_ends(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world, 0, PORT)
    topics = [m.ListOffsetsTopic(ORDERS.topic, [m.ListOffsetsPartition(0, -1, -1)])]
    await prove(connection, world, 1, 0)
    assert not await is_refused(connection, LIST_OFFSETS, m.ListOffsetsRequest(1, 0, topics))
    await shake_hands(connection, world.random, 1, 0)
    assert await is_refused(connection, LIST_OFFSETS, m.ListOffsetsRequest(1, 0, topics))


@run_by(with_cluster)
async def test_a_reregistered_broker_is_trusted_and_trusts_as_before(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    topics = [m.ListOffsetsTopic(ORDERS.topic, [m.ListOffsetsPartition(0, -1, -1)])]
    before = await connect(world, 0, PORT)
    await prove(before, world, 1, 0)
    epoch = cluster.broker(0).broker_epoch
    cluster.simulation.zookeeper.cut(host_name(0))
    cluster.simulation.zookeeper.expire(host_name(0))
    meanwhile = await connect(world, 0, PORT)  # the broker does not know the registration
    await prove(meanwhile, world, 1, 0)
    cluster.simulation.zookeeper.uncut(host_name(0))
    await cluster.until(lambda: cluster.broker(0).broker_epoch > epoch)
    for connection in (before, meanwhile):
        assert not await is_refused(connection, LIST_OFFSETS, m.ListOffsetsRequest(1, 0, topics))


@run_by(with_cluster)
async def test_a_broker_sends_nothing_to_a_peer_with_another_secret_or_id(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async def open_as(secret: bytes, peer_id: int) -> Connection:
        connections = BrokerConnections(world, 1, secret)
        return await connections.open(
            peer_id, host_name(0), PORT, client_id="test", connect_timeout_s=5, request_timeout_s=5
        )

    with pytest.raises(NotTrusted, match=r"broker 0 at broker-0:9092 does not have this .*broker\.secret\.file"):
        await open_as(WRONG, 0)
    with pytest.raises(NotTrusted, match="this is broker 0, not broker 2"):
        await open_as(KEY, 2)
    assert not (await open_as(KEY, 0)).closed


@run_by(with_cluster)
async def test_a_broker_with_another_secret_does_not_start_beside_the_others(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await cluster.stop_broker(0)
    cluster.own_settings[0] = {"broker.secret": WRONG.decode()}
    with pytest.raises(SecretDiffers, match="broker 1 has another secret"):
        await cluster.start_broker(0)
    cluster.own_settings.clear()
    await cluster.start_broker(0)
    await cluster.until(lambda: len(cluster.state(ORDERS).isr) == 3)


def test_a_broker_with_another_secret_is_logged_with_the_remedy_and_not_suspected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All brokers may have started at once, so that none has seen the others' secret."""

    async def sees_none(self: Registration, session: ZooKeeperSession, secret: str) -> None:
        pass

    monkeypatch.setattr(Registration, "_require_same_secret", sees_none)

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        needed = {*cluster.active_controllers(), cluster.state(ORDERS).leader}
        odd = next(broker_id for broker_id in cluster.broker_ids if broker_id not in needed)
        cluster.kill_broker(odd)
        cluster.own_settings[odd] = {"broker.secret": WRONG.decode()}
        path = znodes.broker_path(odd)
        with caplog.at_level(logging.WARNING):
            await cluster.start_broker(odd)
            epoch = cluster.simulation.zookeeper.stat(path).czxid
            await asyncio.sleep(10)  # ten times the detection time of a crash
            await produce(cluster, world, [broker_id for broker_id in cluster.broker_ids if broker_id != odd])
        assert f"broker {odd} at {host_name(odd)}:{CONTROL_PORT} does not have this broker's secret" in caplog.text
        assert "give all brokers of the cluster the same broker.secret.file" in caplog.text
        assert len(caplog.messages) < 10
        assert cluster.simulation.zookeeper.stat(path).czxid == epoch
        cluster.kill_broker(odd)
        cluster.own_settings.clear()
        await cluster.start_broker(odd)
        await cluster.until(lambda: len(cluster.state(ORDERS).isr) == 3)

    with_cluster(program)


@run_by(on_virtual_loop)
async def test_brokers_without_a_secret_log_that_at_start_and_trust_every_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = VirtualCluster(Simulation(), brokers=2, secret=None)
    await cluster.start()
    assert [r.levelname for r in caplog.records if "broker.secret" in r.message] == ["WARNING", "WARNING"]
    world = cluster.client("stranger")

    async def program() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic(ORDERS.topic, partitions=1, replication_factor=2)
        assert cluster.state(ORDERS).leader != NO_LEADER
        connection = await connect(world, 0)
        api, request = forged_orders(cluster, 0, ORDERS, controller_id=1)[1]
        assert (await connection.request(api, request)).error_code == ErrorCode.NONE
        assert "has no secret" in await refusal_of(shake_hands(connection, world.random, 1, 0))

    await world.process.run(program())


class Silent(asyncio.Protocol):
    """A connection that says nothing."""

    def __init__(self) -> None:
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False


@run_by(with_cluster, settings={"max.connections": "30", "max.connections.per.ip": "20"})
async def test_strangers_who_fill_the_control_listeners_keep_no_broker_out(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """A new controller reaches the others, and takes none of them for dead; strangers are closed after a while."""
    filling = asyncio.create_task(_fill_control_listeners(cluster, world))
    await asyncio.sleep(5)
    (controller,) = cluster.active_controllers()
    epochs = {each: cluster.broker(each).broker_epoch for each in cluster.living() if each != controller}
    cluster.kill_broker(controller)
    await cluster.until(lambda: set(cluster.active_controllers()) - {controller}, within_s=2)
    await produce(cluster, world)
    await asyncio.sleep(20)
    assert {each: cluster.broker(each).broker_epoch for each in cluster.living()} == epochs
    for each in epochs:
        assert cluster.broker(each)._server.planes[Plane.CONTROL].quotas.gave_way > 0
    filling.cancel()
    strangers = await filling
    await asyncio.sleep(15)
    assert not any(stranger.is_open for stranger in strangers)


async def _fill_control_listeners(cluster: VirtualCluster, world: VirtualWorld) -> list[Silent]:
    strangers: list[Silent] = []
    try:
        while True:
            for broker_id in cluster.broker_ids:
                with contextlib.suppress(OSError):
                    strangers.append(await world.network.connect(host_name(broker_id), CONTROL_PORT, Silent))
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        return strangers
