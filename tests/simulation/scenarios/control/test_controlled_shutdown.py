"""A controlled shutdown moves leadership away from a broker before it stops: no write waits for a stopped leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import CONTROL_PORT, NO_OFFSETS_TOPIC, PORT, SECRET, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.ownership import Owner, ProcessKilled, current_owner
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import CONTROLLED_SHUTDOWN, LEADER_AND_ISR, STOP_REPLICA, UPDATE_METADATA
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import ConnectionLoss, Operation, SetData
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.mutants.planting import Patches
from tests.simulation.scenarios.control.test_cluster import Load
from tests.simulation.scenarios.control.test_cluster import _check as check_records
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]
BACKOFF_S = 0.1
"""The client's `retry_backoff_ms`."""
LONGEST_STALL_S = 0.05
"""The stall without a controlled shutdown is 0.1 s here, because computation takes no virtual time."""


async def start_cluster(replication_factor: int = 3, **settings: str) -> VirtualCluster:
    """Start three brokers, and create a topic of three partitions."""
    named = {name.replace("_", "."): value for name, value in settings.items()}
    cluster = VirtualCluster(Simulation(), settings=NO_OFFSETS_TOPIC | named)
    await cluster.start()
    await as_admin(
        cluster,
        lambda admin: admin.create_topic(TOPIC, partitions=len(PARTITIONS), replication_factor=replication_factor),
    )
    await until_whole(cluster, replication_factor)
    return cluster


async def until_whole(cluster: VirtualCluster, replication_factor: int = 3) -> None:
    await cluster.until(
        lambda: (
            len(cluster.active_controllers()) == 1
            and all(len(cluster.state(partition).isr) == replication_factor for partition in PARTITIONS)
        )
    )


def controller_of(cluster: VirtualCluster) -> int:
    [controller] = cluster.active_controllers()
    return controller


class Writers:
    """One writer for each partition. Each sends one record at a time with acks=all, and records when it is
    acknowledged."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._world = cluster.client("writer")
        self._bootstrap = cluster.bootstrap
        self._enough = False
        self.longest_s = 0.0
        self.acknowledged = 0
        self._task = self._world.process.start(self._write_all())

    async def stop(self) -> None:
        self._enough = True
        await self._task

    async def _write_all(self) -> None:
        async with Producer(self._bootstrap, acks="all", world=self._world) as producer:
            await asyncio.gather(*(self._write(producer, partition) for partition in PARTITIONS))

    async def _write(self, producer: Producer, partition: TopicPartition) -> None:
        clock = self._world.clock
        while not self._enough:
            began_s = clock.monotonic()
            await producer.send(TOPIC, b"%d" % self.acknowledged, partition=partition.partition)
            took_s = clock.monotonic() - began_s
            if self.acknowledged > 100:
                self.longest_s = max(self.longest_s, took_s)
            self.acknowledged += 1
            await asyncio.sleep(0.001)


@pytest.mark.slow
def test_a_rolling_restart_stalls_no_write_for_long() -> None:
    """On at most one seed of four, the client asks a broker that does not know the new leader yet, and retries after
    its back-off."""

    async def scenario() -> float:
        cluster = await start_cluster()
        writers = Writers(cluster)
        await cluster.until(lambda: writers.acknowledged > 200)
        for broker_id in cluster.broker_ids:
            before = writers.acknowledged
            await cluster.stop_broker(broker_id)
            await asyncio.sleep(0.5)
            await cluster.start_broker(broker_id)
            await until_whole(cluster)
            assert writers.acknowledged > before
        await writers.stop()
        return writers.longest_s

    *others, longest = sorted(run(scenario(), seed=seed) for seed in range(4))
    assert max(others) <= LONGEST_STALL_S
    assert longest <= LONGEST_STALL_S + BACKOFF_S


def test_without_a_controlled_shutdown_writes_stall_for_longer() -> None:
    async def scenario() -> float:
        cluster = await start_cluster(controlled_shutdown_enable="false")
        writers = Writers(cluster)
        await cluster.until(lambda: writers.acknowledged > 200)
        for broker_id in cluster.broker_ids:
            await cluster.stop_broker(broker_id)
            await cluster.start_broker(broker_id)
            await until_whole(cluster)
        await writers.stop()
        return writers.longest_s

    assert run(scenario()) > LONGEST_STALL_S


# --- The state afterwards -------------------------------------------------------------------------------------------


@run_by(on_virtual_loop)
async def test_a_stopping_broker_gives_up_leadership_and_isr_membership_and_leaves_at_once() -> None:
    cluster = await start_cluster()
    for victim in (next(b for b in cluster.broker_ids if b != controller_of(cluster)), controller_of(cluster)):
        handed_over = await cluster.process(victim).run(cluster.broker(victim).hand_over())
        assert handed_over is not None
        assert (handed_over.remaining, handed_over.problem) == ((), "")
        for partition in PARTITIONS:
            assert victim not in (cluster.state(partition).leader, *cluster.state(partition).isr)
        began_s = cluster.simulation.loop.time()
        await cluster.stop_broker(victim)
        assert not cluster.simulation.zookeeper.has(znodes.broker_path(victim))
        await cluster.until(lambda: len(cluster.active_controllers()) == 1)
        assert cluster.simulation.loop.time() - began_s < 1.0
        await cluster.start_broker(victim)
        await until_whole(cluster)


async def restarted_broker_leads() -> None:
    cluster = await start_cluster()
    victim = next(b for b in cluster.broker_ids if b != controller_of(cluster))
    await cluster.stop_broker(victim)
    await cluster.start_broker(victim)  # the controller may see stop and start as one change
    await until_whole(cluster)
    for other in cluster.broker_ids:
        if other != victim:
            await cluster.stop_broker(other)
    assert [cluster.state(partition).leader for partition in PARTITIONS] == [victim] * 3


def test_a_broker_that_was_restarted_is_not_shutting_down_any_more() -> None:
    run(restarted_broker_leads())


def test_the_planted_bug_that_considers_it_shutting_down_is_seen() -> None:
    with planted("shutting-down-over-a-restart"), pytest.raises((AssertionError, TimeoutError)):
        run(restarted_broker_leads())


async def last_in_sync_stops() -> None:
    cluster = await start_cluster(replication_factor=2)
    leader = cluster.state(PARTITIONS[0]).leader
    [follower] = (b for b in cluster.state(PARTITIONS[0]).isr if b != leader)
    cluster.kill_broker(follower)
    await cluster.until(lambda: cluster.state(PARTITIONS[0]).isr == (leader,))
    world = cluster.client("writer")

    async def write() -> None:
        async with Producer(cluster.bootstrap, acks="all", world=world) as producer:
            await producer.send(TOPIC, b"only the leader has it", partition=0)

    await world.process.run(write())
    cluster.simulation.network.block(host_name(follower), host_name(leader))
    await cluster.start_broker(follower)
    await cluster.stop_broker(leader)
    assert cluster.state(PARTITIONS[0]).leader != follower
    assert cluster.state(PARTITIONS[0]).isr == (leader,)


def test_a_replica_out_of_sync_does_not_take_over() -> None:
    run(last_in_sync_stops())


def test_the_planted_bug_that_lets_it_take_over_is_seen() -> None:
    with planted("unclean-controlled-shutdown"), pytest.raises(AssertionError):
        run(last_in_sync_stops())


@run_by(on_virtual_loop)
async def test_the_second_stopping_broker_waits_if_too_few_in_sync_would_be_left() -> None:
    cluster = await start_cluster()
    controller = controller_of(cluster)
    first, second = (b for b in cluster.broker_ids if b != controller)
    writers = Writers(cluster)
    await cluster.until(lambda: writers.acknowledged > 200)
    await cluster.stop_broker(first)
    stopping = asyncio.ensure_future(cluster.stop_broker(second))
    await asyncio.sleep(0.5)
    assert not stopping.done()
    assert all(second in cluster.state(partition).isr for partition in PARTITIONS)
    assert all(cluster.state(partition).leader == controller for partition in PARTITIONS)
    await cluster.start_broker(first)
    await stopping
    assert all(sorted(cluster.state(partition).isr) == sorted((controller, first)) for partition in PARTITIONS)
    await writers.stop()
    assert writers.longest_s <= LONGEST_STALL_S


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(2, 0), (3, 1)])
@run_by(on_virtual_loop)
async def test_several_brokers_that_stop_at_the_same_time_lose_nothing(count: int, seed: int) -> None:
    cluster = await start_cluster()
    load = Load(cluster)
    await asyncio.sleep(0.2)
    began_s = cluster.simulation.loop.time()
    victims = cluster.simulation.loop.random.sample(cluster.broker_ids, count)
    await asyncio.gather(*(cluster.stop_broker(victim) for victim in victims))
    assert cluster.simulation.loop.time() - began_s < 8
    await asyncio.gather(*(cluster.start_broker(victim) for victim in victims))
    await until_whole(cluster)
    await check_records(cluster, await load.stop())


@every_seed(range(2))
@run_by(on_virtual_loop)
async def test_a_broker_that_stops_in_the_middle_of_an_election_loses_nothing(seed: int) -> None:
    cluster = await start_cluster()
    load = Load(cluster)
    await asyncio.sleep(0.2)
    leader = cluster.state(PARTITIONS[0]).leader
    second = next(b for b in cluster.state(PARTITIONS[0]).isr if b != leader)
    cluster.kill_broker(leader)
    await asyncio.sleep(cluster.simulation.loop.random.uniform(0, 0.02))
    await cluster.stop_broker(second)  # it is about to be elected, or was just elected
    await cluster.start_broker(leader)
    await cluster.start_broker(second)
    await until_whole(cluster)
    await check_records(cluster, await load.stop())


@run_by(on_virtual_loop)
async def test_a_broker_stops_in_bounded_time_though_the_controller_hangs() -> None:
    cluster = await start_cluster(zookeeper_session_timeout_ms="60000")
    load = Load(cluster)
    await asyncio.sleep(0.2)
    controller = controller_of(cluster)
    victim = next(b for b in cluster.broker_ids if b != controller)
    cluster.pause_broker(controller)
    began_s = cluster.simulation.loop.time()
    await cluster.stop_broker(victim)
    assert cluster.simulation.loop.time() - began_s < 20
    cluster.resume_broker(controller)
    await cluster.start_broker(victim)
    await until_whole(cluster)
    await check_records(cluster, await load.stop())


@run_by(on_virtual_loop)
async def test_a_broker_that_only_follows_waits_for_the_next_controller() -> None:
    cluster = await start_cluster()
    controller = controller_of(cluster)
    victim = next(b for b in cluster.broker_ids if b != controller)
    await cluster.stop_broker(victim)
    await cluster.start_broker(victim)  # it leads no partition from here on
    await until_whole(cluster)
    cluster.pause_broker(controller)
    cluster.simulation.zookeeper.remove(znodes.CONTROLLER)
    handing_over = asyncio.ensure_future(cluster.process(victim).run(cluster.broker(victim).hand_over()))
    await asyncio.sleep(0.001)
    cluster.resume_broker(controller)
    handed_over = await handing_over
    assert handed_over is not None
    assert (handed_over.problem, handed_over.remaining) == ("", ())
    assert all(victim not in cluster.state(partition).isr for partition in PARTITIONS)


@run_by(on_virtual_loop)
async def test_the_last_one_in_sync_remains_the_leader_and_stops_in_bounded_time() -> None:
    cluster = await start_cluster()
    for victim in cluster.broker_ids:
        began_s = cluster.simulation.loop.time()
        await cluster.stop_broker(victim)
        assert cluster.simulation.loop.time() - began_s < 5
    last = {cluster.state(partition).leader for partition in PARTITIONS}
    assert last <= {cluster.broker_ids[-1], -1}
    for broker_id in reversed(cluster.broker_ids):
        await cluster.start_broker(broker_id)
    await until_whole(cluster)


@run_by(on_virtual_loop)
async def test_partitions_with_a_single_replica_are_not_waited_for() -> None:
    cluster = await start_cluster(replication_factor=1)
    victim = cluster.state(PARTITIONS[0]).leader
    began_s = cluster.simulation.loop.time()
    handed_over = await cluster.process(victim).run(cluster.broker(victim).hand_over())
    assert handed_over is not None
    assert PARTITIONS[0] in handed_over.remaining
    assert cluster.simulation.loop.time() - began_s < 0.5
    assert cluster.state(PARTITIONS[0]).leader == victim


@pytest.mark.parametrize("is_controller", [False, True])
@run_by(on_virtual_loop)
async def test_a_broker_stops_in_bounded_time_though_zookeeper_is_away(is_controller: bool) -> None:
    cluster = await start_cluster()
    controller = controller_of(cluster)
    victim = controller if is_controller else next(b for b in cluster.broker_ids if b != controller)
    cluster.simulation.zookeeper.stop()
    began_s = cluster.simulation.loop.time()
    await cluster.stop_broker(victim)
    assert cluster.simulation.loop.time() - began_s < 25
    cluster.simulation.zookeeper.start()
    await cluster.start_broker(victim)
    await until_whole(cluster)


@run_by(on_virtual_loop)
async def test_a_new_topic_gets_no_replica_on_a_broker_that_stops() -> None:
    cluster = await start_cluster()
    victim = next(b for b in cluster.broker_ids if b != controller_of(cluster))
    await cluster.process(victim).run(cluster.broker(victim).hand_over())
    world = cluster.client("admin")

    async def create() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("new", partitions=4, replication_factor=2)
            with pytest.raises(BrokerError, match="INVALID_REPLICATION_FACTOR"):
                await admin.create_topic("wide", partitions=1, replication_factor=3)

    await world.process.run(create())
    assert all(victim not in cluster.state(TopicPartition("new", number)).isr for number in range(4))


@run_by(on_virtual_loop)
async def test_only_a_broker_may_request_a_shutdown_and_only_of_its_own_current_run() -> None:
    cluster = await start_cluster()
    controller = controller_of(cluster)
    one, other = (b for b in cluster.broker_ids if b != controller)
    world = cluster.client("stranger")
    epoch = cluster.broker(one).broker_epoch

    async def ask(secret: bytes | None, name: int, broker_epoch: int, port: int = CONTROL_PORT) -> int:
        connections = BrokerConnections(world, one, secret)
        connection = await connections.open(
            controller, host_name(controller), port, client_id="test", connect_timeout_s=5, request_timeout_s=5
        )
        request = m.ControlledShutdownRequest(name, broker_epoch)
        return (await connection.request(CONTROLLED_SHUTDOWN, request, timeout_s=5)).error_code

    async def refused(secret: bytes | None, name: int, port: int = CONTROL_PORT) -> ErrorCode:
        with pytest.raises(BrokerError) as raised:
            await ask(secret, name, epoch, port)
        return raised.value.code

    async def program() -> None:
        secret = SECRET.encode()
        assert await refused(None, one) is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert await refused(secret, other) is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert await refused(secret, one, PORT) is ErrorCode.INVALID_REQUEST
        assert await ask(secret, one, epoch - 1) == ErrorCode.STALE_BROKER_EPOCH
        assert await ask(secret, one, epoch + 1) == ErrorCode.BROKER_NOT_AVAILABLE

    await world.process.run(program())
    await asyncio.sleep(1)
    assert all(one in cluster.state(partition).isr for partition in PARTITIONS)


@every_seed(range(4))
@pytest.mark.parametrize(
    ("after_ms", "is_killed"),
    [(4.5, False), *(pytest.param(*other, marks=pytest.mark.slow) for other in [(4.5, True), (8, False)])],
)
def test_no_write_waits_for_a_broker_that_leaves_just_as_it_joins_the_isr(
    after_ms: float, is_killed: bool, seed: int
) -> None:
    async def scenario() -> float:
        cluster = await start_cluster()
        victim = next(b for b in cluster.broker_ids if b != controller_of(cluster))
        writers = Writers(cluster)
        await cluster.until(lambda: writers.acknowledged > 200)
        await cluster.stop_broker(victim)
        await cluster.start_broker(victim)
        await asyncio.sleep(after_ms / 1_000)
        if is_killed:
            cluster.kill_broker(victim)
        else:
            await cluster.stop_broker(victim)
        await asyncio.sleep(1)
        await writers.stop()
        return writers.longest_s

    # A pending ISR change is announced to the controller with a delay.
    assert run(scenario(), seed=seed) <= LONGEST_STALL_S + (0.15 if is_killed else 0.05)


# --- Kills during a controlled shutdown -----------------------------------------------------------------------------


class Points:
    """Counts the controller's writes to ZooKeeper and its orders from now on, each before and after its execution, and
    calls `strike` at the point of that number."""

    def __init__(self, cluster: VirtualCluster, number: int | None, strike: Callable[[], None]) -> None:
        self._controller = cluster.process(controller_of(cluster))
        self._number = number
        self._strike = strike
        self.count = 0
        self._patches = Patches()
        zookeeper = cluster.simulation.zookeeper
        zookeeper.before = zookeeper.after = self._write

        @self._patches.instead_of(Connection, "send")
        def send(original: Any, connection: Connection, api: Any, *rest: Any, **named: Any) -> Any:
            if api not in (LEADER_AND_ISR, UPDATE_METADATA, STOP_REPLICA):
                return original(connection, api, *rest, **named)
            self._next(current_owner.get())
            answer = original(connection, api, *rest, **named)
            self._next(current_owner.get())
            return answer

    def _write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(isinstance(o, SetData) and "/state" in o.path for o in operations):
            self._next(self._controller)
            if not self._controller.alive:
                raise ConnectionLoss("killed")

    def _next(self, process: Owner | None) -> None:
        if process is self._controller and process.alive:
            if self.count == self._number:
                self._strike()
            self.count += 1

    def close(self, cluster: VirtualCluster) -> None:
        zookeeper = cluster.simulation.zookeeper
        zookeeper.before = zookeeper.after = None
        self._patches.undo()


async def shut_down_and_strike(whom: str, number: int | None) -> int:
    """Stop the controller or another broker under load, and kill `whom` at the point of that number. Then start every
    broker again. Return the number of points."""
    cluster = await start_cluster()
    controller = controller_of(cluster)
    follower = next(b for b in cluster.broker_ids if b != controller)
    stopping = controller if whom == "stopping controller" else follower
    killed = stopping if whom == "stopping broker" else controller
    load = Load(cluster)
    await asyncio.sleep(0.1)
    points = Points(cluster, number, lambda: cluster.kill_broker(killed))
    try:
        await cluster.stop_broker(stopping)
    except ProcessKilled:
        assert killed == stopping
    finally:
        points.close(cluster)
    for broker_id in cluster.broker_ids:
        if not cluster.process(broker_id).alive:
            await cluster.start_broker(broker_id)
    await until_whole(cluster)
    await check_records(cluster, await load.stop())
    elected = cluster.broker(controller_of(cluster)).controller
    assert elected is not None
    assert elected.state is not None
    assert elected.state.shutting_down_brokers == set()
    return points.count


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["controller", "stopping broker", "stopping controller"])
def test_a_kill_before_any_write_or_order_of_a_controlled_shutdown_loses_nothing(whom: str) -> None:
    count = run(shut_down_and_strike(whom, None))
    for number in range(0, count, 2):  # the moment after a write or order is the one before the next
        run(shut_down_and_strike(whom, number), seed=number)
    print(f"killed {whom} at every other of {count} points")
