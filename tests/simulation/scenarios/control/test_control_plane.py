"""Faults between a controller and its brokers while all of them live: broken links, lost answers, late orders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from minibroker.broker.broker import Broker
from minibroker.client.admin import Admin
from minibroker.client.administering.requests import KNOWN_WITHIN_S
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import CREATE_TOPICS
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.world import Create, Operation
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]


async def _start_cluster(brokers: int, replication_factor: int, detection_ms: int = 500) -> VirtualCluster:
    """Start the brokers, and create a topic of three partitions."""
    settings = {"broker.crash.detection.ms": str(detection_ms)}
    cluster = VirtualCluster(Simulation(), brokers=brokers, settings=settings)
    await cluster.start()
    await _create_topic(cluster, TOPIC, replication_factor)
    return cluster


async def _create_topic(cluster: VirtualCluster, topic: str, replication_factor: int) -> None:
    await as_admin(
        cluster,
        lambda admin: admin.create_topic(topic, partitions=len(PARTITIONS), replication_factor=replication_factor),
    )


def _controller_epoch(cluster: VirtualCluster) -> int:
    return znodes.decode_controller_epoch(cluster.simulation.zookeeper.data(znodes.CONTROLLER_EPOCH))


def _is_whole(cluster: VirtualCluster) -> bool:
    """Return whether there is one controller, and each partition has a leader and all replicas in sync."""
    states = [cluster.state(partition) for partition in PARTITIONS]
    return len(cluster.active_controllers()) == 1 and all(
        state.leader != NO_LEADER and len(state.isr) == len(cluster.broker_ids) for state in states
    )


# --- One broken link ----------------------------------------------------------------------------------------------


@every_seed(range(2))
@pytest.mark.parametrize("direction", ["both ways", "to the controller", "from the controller"])
@pytest.mark.parametrize(
    ("brokers", "detection_ms", "changes_at_most"),
    [
        (2, 500, 10),
        (3, 500, 2),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in [(2, 100, 12), (2, 1_500, 10)]),
    ],
)
@run_by(on_virtual_loop)
async def test_a_controller_link_broken_for_two_minutes_costs_few_elections(
    brokers: int, detection_ms: int, changes_at_most: int, direction: str, seed: int
) -> None:
    """Two brokers on a broken link depose each other after ever longer times. A third one that reaches both leads."""

    cluster = await _start_cluster(brokers, brokers, detection_ms)
    await cluster.until(lambda: _is_whole(cluster))
    [controller] = cluster.active_controllers()
    other = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    controller_epoch = _controller_epoch(cluster)
    leader_epochs = [cluster.state(partition).leader_epoch for partition in PARTITIONS]
    if direction != "to the controller":
        cluster.simulation.network.block(host_name(controller), host_name(other))
    if direction != "from the controller":
        cluster.simulation.network.block(host_name(other), host_name(controller))
    await asyncio.sleep(120)
    assert _controller_epoch(cluster) - controller_epoch <= changes_at_most
    for partition, before in zip(PARTITIONS, leader_epochs, strict=True):
        assert cluster.state(partition).leader_epoch - before <= changes_at_most
    cluster.simulation.network.heal()
    await cluster.until(lambda: _is_whole(cluster), within_s=60)


def _changes_of_controller_while_a_link_is_broken(seed: int) -> tuple[int, int]:
    """Return the changes of controller in three minutes, while a third broker reaches both ends and after it was
    killed."""
    changes: list[int] = []

    async def scenario() -> None:
        cluster = await _start_cluster(3, replication_factor=3)
        await cluster.until(lambda: _is_whole(cluster))
        [controller] = cluster.active_controllers()
        other, third = (broker_id for broker_id in cluster.broker_ids if broker_id != controller)
        cluster.simulation.network.block(host_name(controller), host_name(other))
        cluster.simulation.network.block(host_name(other), host_name(controller))
        for _ in range(2):
            before = _controller_epoch(cluster)
            await asyncio.sleep(180)
            changes.append(_controller_epoch(cluster) - before)
            if cluster.living_broker(third) is not None:
                cluster.kill_broker(third)
        cluster.simulation.network.heal()
        await cluster.start_broker(third)
        await cluster.until(lambda: _is_whole(cluster), within_s=60)

    run(scenario(), seed=seed)
    with_third, without_third = changes
    return with_third, without_third


@every_seed(range(3))
def test_a_controller_that_one_broker_cannot_reach_is_not_deposed_repeatedly(seed: int) -> None:
    with_third, without_third = _changes_of_controller_while_a_link_is_broken(seed)
    assert with_third <= 2
    assert without_third <= 10


@pytest.mark.slow
def test_suspicions_of_the_controller_count_as_consecutive() -> None:
    with planted("controllers-suspicions-not-counted"):
        _, without_third = _changes_of_controller_while_a_link_is_broken(0)
    assert without_third > 20


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_a_controller_that_is_killed_after_a_quarrel_is_replaced_at_once(seed: int) -> None:
    """The link works again, so suspicions raised while it was broken no longer count."""

    cluster = await _start_cluster(2, replication_factor=2)
    cluster.simulation.network.block(host_name(0), host_name(1))
    await asyncio.sleep(30)
    cluster.simulation.network.heal()
    await cluster.until(lambda: _is_whole(cluster), within_s=60)
    await asyncio.sleep(1)
    [controller] = cluster.active_controllers()
    cluster.kill_broker(controller)
    await cluster.until(
        lambda: all(cluster.state(partition).leader not in (NO_LEADER, controller) for partition in PARTITIONS),
        within_s=0.3,
    )


# --- Orders for a broker that does not know yet that it is registered -----------------------------------------------


async def _start_and_hear_nothing_of_the_registration(cluster: VirtualCluster, broker_id: int) -> asyncio.Task[Broker]:
    """Return when its znode exists. From that moment on it receives nothing from ZooKeeper."""
    zookeeper, path = cluster.simulation.zookeeper, znodes.broker_path(broker_id)
    registered = asyncio.Event()

    def after(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(isinstance(operation, Create) and operation.path == path for operation in operations):
            zookeeper.after = None
            zookeeper.slow_hosts[host_name(broker_id)] = (60.0, 60.0)
            registered.set()

    zookeeper.after = after
    start = asyncio.create_task(cluster.start_broker(broker_id))
    await registered.wait()
    return start


@pytest.mark.parametrize("away_s", [3, 20])
@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_orders_reach_a_broker_that_hears_late_that_it_is_registered(seed: int, away_s: int) -> None:
    """ZooKeeper is unreachable for everyone, so no session ends and the broker is not registered a second time."""

    cluster = await _start_cluster(3, replication_factor=1)
    [controller] = cluster.active_controllers()
    partition, broker_id = next(
        (partition, leader)
        for partition in PARTITIONS
        if (leader := cluster.state(partition).leader) not in (controller, NO_LEADER)
    )
    zookeeper = cluster.simulation.zookeeper
    cluster.kill_broker(broker_id)
    await cluster.until(lambda: cluster.state(partition).leader == NO_LEADER)
    start = await _start_and_hear_nothing_of_the_registration(cluster, broker_id)
    await cluster.until(lambda: cluster.state(partition).leader == broker_id)
    zookeeper.stop()
    zookeeper.slow_hosts.clear()
    await asyncio.sleep(away_s)
    zookeeper.start()
    broker = await start
    assert broker.broker_epoch == zookeeper.stat(znodes.broker_path(broker_id)).czxid
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            await producer.send(TOPIC, b"value", partition=partition.partition)

    async with asyncio.timeout(30):
        await world.process.run(produce())


# --- Topics that are created during a fault -------------------------------------------------------------------------


def _knows(cluster: VirtualCluster, broker_id: int, topic: str) -> bool:
    return cluster.broker(broker_id)._metadata.has_leaders(topic, len(PARTITIONS))


async def _create_later(admin: Admin) -> None:
    await admin.create_topic("later", partitions=len(PARTITIONS), replication_factor=1)


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_a_topic_that_was_created_is_known_to_every_broker_that_can_be_told(seed: int) -> None:
    cluster = await _start_cluster(3, replication_factor=3)
    [controller] = cluster.active_controllers()
    others = [broker_id for broker_id in cluster.broker_ids if broker_id != controller]
    cluster.simulation.network.block(host_name(controller), host_name(others[0]))
    creating = asyncio.ensure_future(as_admin(cluster, _create_later, host="creator"))
    await cluster.until(lambda: _knows(cluster, others[1], "later"))
    assert not _knows(cluster, others[0], "later")
    assert not creating.done()
    cluster.simulation.network.heal()
    await creating
    assert all(_knows(cluster, broker_id, "later") for broker_id in cluster.broker_ids)


@run_by(on_virtual_loop)
async def test_a_topic_is_created_though_a_broker_that_hangs_does_not_hear_of_it() -> None:
    cluster = await _start_cluster(3, replication_factor=3)
    [controller] = cluster.active_controllers()
    other = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)

    async def create(admin: Admin) -> None:
        cluster.pause_broker(other)
        began_s = asyncio.get_running_loop().time()
        await admin.create_topic("later", assignments=[[controller]] * len(PARTITIONS))
        assert KNOWN_WITHIN_S <= asyncio.get_running_loop().time() - began_s < 2 * KNOWN_WITHIN_S

    await as_admin(cluster, create, host="creator")
    cluster.resume_broker(other)
    await cluster.until(lambda: _knows(cluster, other, "later"))


@pytest.mark.parametrize(
    ("timeout_ms", "code", "message"),
    [
        (0, ErrorCode.REQUEST_TIMED_OUT, "'later' was created, but not all of its partitions have a leader yet"),
        (5_000, ErrorCode.NONE, ""),
    ],
)
@run_by(on_virtual_loop)
async def test_a_caller_that_does_not_wait_for_leaders_learns_that_the_topic_has_none_yet(
    timeout_ms: int, code: ErrorCode, message: str
) -> None:
    cluster = await _start_cluster(3, replication_factor=3)
    [controller] = cluster.active_controllers()
    world = cluster.client("creator")
    found: list[m.CreatableTopicResult] = []

    async def create() -> None:
        connection = await open_connection(
            world.network, host_name(controller), PORT, client_id="creator", timeout_s=5.0
        )
        topics = [m.CreatableTopic("later", len(PARTITIONS), 3)]
        response = await connection.request(CREATE_TOPICS, m.CreateTopicsRequest(topics, timeout_ms), timeout_s=30.0)
        found.extend(response.topics)
        connection.close("that was all")

    await world.process.run(create())
    [result] = found
    assert (result.error_code, message in result.error_message) == (code, True)
    await cluster.until(lambda: _knows(cluster, controller, "later"))


@run_by(on_virtual_loop)
async def test_a_topic_creation_without_zookeeper_reports_that_the_topic_may_yet_appear() -> None:
    cluster = await _start_cluster(3, replication_factor=3)
    cluster.simulation.zookeeper.stop()
    with pytest.raises(BrokerError, match="It may yet be created: see `minibroker topics list`"):
        await as_admin(cluster, _create_later, host="creator", default_api_timeout_ms=3_000)
    cluster.simulation.zookeeper.start()
    await cluster.until(lambda: cluster.simulation.zookeeper.has(znodes.topic_path("later")))


@run_by(on_virtual_loop)
async def test_an_invalid_znode_is_logged_once_however_often_it_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(about: str) -> int:
        return sum(record.levelname == "WARNING" and about in record.message for record in caplog.records)

    cluster = await _start_cluster(3, replication_factor=3)
    zookeeper = cluster.simulation.zookeeper
    [controller] = cluster.active_controllers()
    zookeeper.make(znodes.topic_path("bad"), b"nonsense")
    zookeeper.make(znodes.broker_path(77), b"nonsense")
    for number in range(3):
        await _create_topic(cluster, f"good-{number}", 3)
        await asyncio.sleep(0.1)
    follower = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    await cluster.stop_broker(follower)
    await cluster.start_broker(follower)
    await cluster.until(lambda: _is_whole(cluster))
    assert (told("topic bad is ignored"), told("broker 77 is ignored")) == (1, 1)
    zookeeper.make(znodes.topic_path("bad"), b"other nonsense")
    await _create_topic(cluster, "good-3", 3)
    await cluster.until(lambda: told("topic bad is ignored") == 2)
