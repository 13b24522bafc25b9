"""Any broker forwards requests that only the controller can execute, and only brokers change internal topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.broker.handlers import dispatch
from minibroker.client.admin import Admin
from minibroker.client.administering.requests import KNOWN_WITHIN_S
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import CONTROL_PORT, PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import CREATE_TOPICS, DELETE_TOPICS, ENVELOPE, METADATA, encode_request
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, INTERNAL_TOPICS, TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.clients.test_forged_requests import KEY
from tests.simulation.scenarios.helpers import with_client
from tests.simulation.storms.clients.indirect_admin import IndirectAdmin
from tests.simulation.storms.forgeries import authenticate, shake_hands

OFFSETS = "__consumer_offsets"

Program = Callable[[VirtualCluster, VirtualWorld], Coroutine[Any, Any, None]]


async def until_controller(cluster: VirtualCluster) -> int:
    """Return the controller once all brokers know it."""

    def agreed() -> bool:
        known = {cluster.broker(broker_id)._metadata.controller_id for broker_id in cluster.living()}
        return len(known) == 1 and known == set(cluster.active_controllers())

    await cluster.until(agreed)
    return cluster.active_controllers()[0]


async def connect(world: VirtualWorld, broker_id: int) -> Connection:
    return await open_connection(world.network, host_name(broker_id), PORT, client_id="client", timeout_s=5)


def creation(*names: str, replication_factor: int = 3) -> m.CreateTopicsRequest:
    return m.CreateTopicsRequest([m.CreatableTopic(name, 1, replication_factor) for name in names], 5_000)


def cut(cluster: VirtualCluster, host: str, other: str) -> None:
    """Drop all messages between these two hosts from now on."""
    cluster.simulation.network.block(host, other)
    cluster.simulation.network.block(other, host)


async def as_broker(cluster: VirtualCluster, names: list[str]) -> dict[str, int]:
    """Let a broker that is not the controller create topics for itself; return the error codes."""
    other = next(b for b in cluster.broker_ids if b not in cluster.active_controllers())
    services = cluster.broker(other)._services
    assert services is not None
    answer = await services.forwarding.request(CREATE_TOPICS, creation(*names), timeout_s=5)
    return {result.name: result.error_code for result in answer.topics}


@run_by(with_client)
async def test_every_broker_creates_and_deletes_topics_through_the_controller(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await until_controller(cluster)
    for broker_id in cluster.broker_ids:
        connection, name = await connect(world, broker_id), f"asked-of-{broker_id}"
        created = await connection.request(CREATE_TOPICS, creation(name))
        assert [(topic.name, topic.error_code) for topic in created.topics] == [(name, ErrorCode.NONE)]
        again = await connection.request(CREATE_TOPICS, creation(name))
        assert [topic.error_code for topic in again.topics] == [ErrorCode.TOPIC_ALREADY_EXISTS]
        topic_id = created.topics[0].topic_id
        deleted = await connection.request(DELETE_TOPICS, m.DeleteTopicsRequest([name], 5_000, [topic_id]))
        assert [topic.error_code for topic in deleted.responses] == [ErrorCode.NONE]


@run_by(with_client)
async def test_a_client_that_cannot_reach_the_controller_uses_another_broker(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = host_name(await until_controller(cluster))
    for ends in ((controller, "client"), ("client", controller)):
        cluster.simulation.network.block(*ends)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("orders", partitions=1, replication_factor=3)
        assert await admin.list_topics() == ["orders"]
        await admin.delete_topic("orders")


@run_by(with_client)
async def test_a_forwarded_creation_keeps_default_api_timeout_ms_without_a_path_to_the_controller(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = host_name(await until_controller(cluster))
    async with Admin(cluster.bootstrap, default_api_timeout_ms=3_000, world=world) as admin:
        await admin.list_topics()
        cut(cluster, controller, "client")
        cluster.simulation.network.reset(controller, "client")
        began = world.clock.monotonic()
        await admin.create_topic("orders", partitions=1, replication_factor=3)
        # The client cannot ask the controller's broker whether it knows the topic.
        assert world.clock.monotonic() - began < 3 + KNOWN_WITHIN_S


@run_by(with_client)
async def test_a_client_that_is_cut_off_from_all_brokers_gives_up_at_default_api_timeout_ms(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await until_controller(cluster)
    async with Admin(cluster.bootstrap, default_api_timeout_ms=5_000, world=world) as admin:
        await admin.list_topics()
        for broker in map(host_name, cluster.broker_ids):
            cut(cluster, broker, "client")
            cluster.simulation.network.reset(broker, "client")
        began = world.clock.monotonic()
        with pytest.raises(NetworkError, match="connecting to broker-0:9092: no answer"):
            await admin.create_topic("orders")
        assert world.clock.monotonic() - began < 6


@run_by(with_client, settings={"broker.crash.detection.ms": "120000"})
async def test_a_client_that_cannot_reach_the_controller_finds_the_broker_that_can(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:

    # Otherwise the two brokers that do not reach each other would remove each other in between.
    controller = await until_controller(cluster)
    first, second = (b for b in cluster.broker_ids if b != controller)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.list_topics()
        cut(cluster, "client", host_name(controller))
        cluster.simulation.network.reset("client", host_name(controller))
        cut(cluster, host_name(first), host_name(controller))
        began = world.clock.monotonic()
        await admin.create_topic("orders", assignments=[[second]])
        assert world.clock.monotonic() - began < 15
        assert cluster.active_controllers() == [controller]


@pytest.mark.parametrize("seed", range(12))  # whom the client asks for metadata differs
@run_by(with_client, settings={"zookeeper.session.timeout.ms": "60000", "broker.crash.detection.ms": "60000"})
async def test_a_client_that_cannot_reach_the_controller_switches_from_a_hanging_broker(
    cluster: VirtualCluster, world: VirtualWorld, /, seed: int
) -> None:
    controller = await until_controller(cluster)
    first = next(b for b in cluster.broker_ids if b != controller)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("orders", partitions=1, replication_factor=1)
        cut(cluster, "client", host_name(controller))
        cluster.simulation.network.reset("client", host_name(controller))
        cluster.pause_broker(first)
        began = world.clock.monotonic()
        await admin.create_topic("receipts", assignments=[[controller]])
        assert world.clock.monotonic() - began < 10
        began = world.clock.monotonic()
        await admin.create_topic("invoices", assignments=[[controller]])
        assert world.clock.monotonic() - began < 1 + KNOWN_WITHIN_S + 1, "it asked the one that hangs again"


@run_by(on_virtual_loop)
async def test_a_client_of_a_listener_that_the_controller_lacks_changes_topics() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        external = f"{host_name(1)}:9094,{host_name(2)}:9094"
        async with Admin(external, world=world) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=3)
            await admin.delete_topic("orders")

    cluster = VirtualCluster(Simulation())
    first = (await cluster.start_broker(0)).controller
    await cluster.until(lambda: first is not None and first.is_active)
    for broker_id in (1, 2):
        listeners = {DEFAULT_LISTENER: PORT, CONTROL_LISTENER: CONTROL_PORT, "EXTERNAL": 9094}
        text = ",".join(f"{name}://{host_name(broker_id)}:{port}" for name, port in listeners.items())
        cluster.own_settings[broker_id] = {"listeners": text}
        await cluster.start_broker(broker_id)
    assert await until_controller(cluster) == 0
    world = cluster.client("client")
    await world.process.run(program(cluster, world))


def waiting_answers() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("answer to")]


def ask_for_ever(connection: Connection, requests: int) -> None:
    for number in range(requests):
        topic = m.CreatableTopic(f"topic-{number}", 1, 1)
        connection.send_and_forget(CREATE_TOPICS, m.CreateTopicsRequest([topic], 2**31 - 1))


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["known to all of the brokers", None])
@run_by(on_virtual_loop)
async def test_a_request_forwarded_to_a_hanging_controller_ends_with_its_client(secret: str | None) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        controller = await until_controller(cluster)
        connection = await connect(world, (controller + 1) % 3)
        cluster.pause_broker(controller)
        ask_for_ever(connection, 20)
        await cluster.until(lambda: len(waiting_answers()) == 20)
        connection.close()
        await cluster.until(lambda: not waiting_answers(), within_s=15)

    settings = {"zookeeper.session.timeout.ms": "60000", "broker.crash.detection.ms": "60000"}
    cluster = VirtualCluster(Simulation(), settings=settings, secret=secret)
    await cluster.start()
    world = cluster.client("client")
    await world.process.run(program(cluster, world))


@run_by(with_client, settings={"zookeeper.session.timeout.ms": "6000"})
async def test_a_request_forwarded_to_a_hanging_controller_ends_with_its_term(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    connection = await connect(world, (controller + 1) % 3)
    services = cluster.broker((controller + 1) % 3)._services
    assert services is not None
    asked = asyncio.ensure_future(services.forwarding.request(CREATE_TOPICS, creation("orders"), timeout_s=10**6))
    cluster.pause_broker(controller)
    ask_for_ever(connection, 20)
    with pytest.raises(BrokerError, match="could not forward CreateTopics") as raised:
        await asyncio.wait_for(asked, 30)
    assert raised.value.code is ErrorCode.NOT_CONTROLLER
    await cluster.until(lambda: not waiting_answers(), within_s=15)


@run_by(with_client)
async def test_each_name_of_a_creation_is_answered_once_however_often_it_is_repeated(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await until_controller(cluster)
    connection = await connect(world, 0)
    answer = await connection.request(CREATE_TOPICS, creation(OFFSETS, "a", OFFSETS, "b", "b"))
    codes = [(topic.name, topic.error_code) for topic in answer.topics]
    assert sorted(codes) == [
        (OFFSETS, ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("a", ErrorCode.NONE),
        ("b", ErrorCode.INVALID_REQUEST),
    ]


@run_by(with_client)
async def test_a_request_too_large_for_an_envelope_is_not_retriable(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world, (await until_controller(cluster) + 1) % 3)
    names = ["n" * 32_000] * (MAX_SMALL_REQUEST_BYTES // 32_003)
    names.append("n" * (MAX_SMALL_REQUEST_BYTES - 32_003 * len(names) - 100))
    with pytest.raises(BrokerError, match="too large to be forwarded") as raised:
        await connection.request(DELETE_TOPICS, m.DeleteTopicsRequest(names, 5_000))
    assert not raised.value.retriable


@run_by(with_client)
async def test_a_malformed_envelope_response_counts_as_no_answer(
    cluster: VirtualCluster, world: VirtualWorld, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nonsense(services: Any, request: Any, body: Any) -> None:
        request.respond(m.EnvelopeResponse(memoryview(b"nonsense")))

    connection = await connect(world, (await until_controller(cluster) + 1) % 3)
    monkeypatch.setitem(dispatch.HANDLERS, ENVELOPE.key, nonsense)
    with pytest.raises(BrokerError, match="not a response envelope") as raised:
        await connection.request(CREATE_TOPICS, creation("orders"))
    assert raised.value.code is ErrorCode.NOT_CONTROLLER


@run_by(with_client, settings={"zookeeper.session.timeout.ms": "6000"})
async def test_forwarding_is_retried_until_there_is_a_controller(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with IndirectAdmin(cluster.bootstrap, world=world) as admin:
        cluster.kill_broker(await until_controller(cluster))
        await admin.create_topic("orders", partitions=1, replication_factor=2)
        assert await admin.list_topics() == ["orders"]


@run_by(with_client)
async def test_a_request_from_an_envelope_is_not_forwarded_again(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    first, second = (b for b in cluster.broker_ids if b != controller)
    connection = await connect(world, second)
    await authenticate(connection, (await shake_hands(connection, world.random, first, second)).connecting_proof(KEY))
    data = encode_request(CREATE_TOPICS, 7, None, creation("orders"))[4:]
    answer = await connection.request(ENVELOPE, m.EnvelopeRequest(first, True, memoryview(data)))
    assert b"is not the controller" in bytes(answer.response_data)
    assert (await connection.request(METADATA, m.MetadataRequest(None))).topics == []


IN_VERSION_9 = bytearray(encode_request(CREATE_TOPICS, 7, None, creation("orders"))[4:])
IN_VERSION_9[2] = 9


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"nonsense", ErrorCode.INVALID_REQUEST, "not a request envelope"),
        (
            encode_request(METADATA, 7, None, m.MetadataRequest(None))[4:],
            ErrorCode.INVALID_REQUEST,
            "API 3 is not forwarded",
        ),
        (IN_VERSION_9, ErrorCode.UNSUPPORTED_VERSION, "version 9 of CreateTopics; this broker knows 0 to 0"),
    ],
)
@run_by(with_client)
async def test_an_invalid_envelope_is_refused(
    cluster: VirtualCluster, world: VirtualWorld, /, data: bytes, code: ErrorCode, said: str
) -> None:
    controller = await until_controller(cluster)
    connection, other = await connect(world, controller), (controller + 1) % 3
    proof = (await shake_hands(connection, world.random, other, controller)).connecting_proof(KEY)
    await authenticate(connection, proof)
    with pytest.raises(BrokerError, match=said) as raised:
        await connection.request(ENVELOPE, m.EnvelopeRequest(other, True, memoryview(data)))
    assert raised.value.code is code


@run_by(with_client)
async def test_an_envelope_from_an_anonymous_connection_is_refused(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    connection = await connect(world, controller)
    data = encode_request(CREATE_TOPICS, 7, None, creation(OFFSETS))[4:]
    with pytest.raises(BrokerError) as raised:
        await connection.request(ENVELOPE, m.EnvelopeRequest(0, False, memoryview(data)))
    assert raised.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


@run_by(with_client, settings={"zookeeper.session.timeout.ms": "60000", "broker.crash.detection.ms": "60000"})
async def test_a_request_forwarded_to_a_dead_controller_is_answered_as_retriable(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    connection = await connect(world, (controller + 1) % 3)
    cluster.kill_broker(controller)
    with pytest.raises(BrokerError, match="could not forward CreateTopics") as raised:
        await connection.request(CREATE_TOPICS, creation("orders"))
    assert raised.value.code is ErrorCode.NOT_CONTROLLER


@pytest.mark.parametrize("admin_of", [Admin, IndirectAdmin], ids=["at the controller", "by another broker"])
@run_by(with_client)
async def test_clients_may_read_the_internal_topics_but_not_change_them(
    cluster: VirtualCluster, world: VirtualWorld, /, admin_of: type[Admin]
) -> None:
    await until_controller(cluster)
    async with admin_of(cluster.bootstrap, world=world) as admin:
        for topic in INTERNAL_TOPICS:
            with pytest.raises(BrokerError, match="the brokers' own") as raised:
                await admin.create_topic(topic, partitions=1, replication_factor=3)
            assert raised.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
        assert await as_broker(cluster, [OFFSETS, "orders"]) == {OFFSETS: 0, "orders": 0}
        with pytest.raises(BrokerError, match="the brokers' own"):
            await admin.delete_topic(OFFSETS)
        async with asyncio.timeout(5):  # the broker that is asked may be the last to learn of it
            while await admin.list_topics() != ["orders"]:
                await asyncio.sleep(0.01)
        assert await admin.list_topics(internal=True) == [OFFSETS, "orders"]
    async with Producer(cluster.bootstrap, world=world) as producer:
        refused, taken = producer.send(OFFSETS, b"mine"), producer.send("orders", b"mine")
        await taken
        with pytest.raises(BrokerError) as raised:
            await refused
        assert raised.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
    async with Consumer(cluster.bootstrap, topics=[OFFSETS], world=world) as consumer:
        assert await consumer.end_offsets([TopicPartition(OFFSETS, 0)]) == {TopicPartition(OFFSETS, 0): 0}


@run_by(with_client, settings={"zookeeper.session.timeout.ms": "6000"})
async def test_a_late_creation_does_not_bring_back_a_topic_that_a_retry_created_and_was_deleted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller, network = await until_controller(cluster), cluster.simulation.network
    others = [broker_id for broker_id in cluster.broker_ids if broker_id != controller]
    request = creation("orders", replication_factor=2)
    request.topics[0].nonce = b"repeat"
    request.controller_epoch = cluster.broker(controller)._metadata.controller_epoch
    for broker_id in others:
        connection = await connect(world, broker_id)
        network.block("client", host_name(broker_id))
        connection.send_and_forget(CREATE_TOPICS, request)
    again = await (await connect(world, controller)).request(CREATE_TOPICS, request)
    assert [topic.error_code for topic in again.topics] == [ErrorCode.NONE]
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.delete_topic("orders")
        await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path("orders")))
        cluster.kill_broker(controller)
        await until_controller(cluster)
        for broker_id in others:  # one of them is the controller now, and the other forwards to it
            network.unblock("client", host_name(broker_id))
        await asyncio.sleep(10)
        assert await admin.list_topics() == []
