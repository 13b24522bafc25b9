"""Partitions are reassigned in a whole cluster, under load, while brokers and controllers are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import PartitionErrors
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import ZOOKEEPER, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Check, Operation, ZooKeeperSession
from tests.running import run_by, run_test
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin

TOPIC = "orders"
P0 = TopicPartition(TOPIC, 0)
P1 = TopicPartition(TOPIC, 1)
LAG_TIME_MAX_MS = 2_000


async def cluster_of(
    assignments: Sequence[Sequence[int]], brokers: int = 4, configs: Mapping[str, str] | None = None
) -> VirtualCluster:
    """Start a cluster with a topic whose partitions have these replicas, and a hundred records in each."""
    cluster = VirtualCluster(Simulation(), brokers=brokers, settings={"replica.lag.time.max.ms": str(LAG_TIME_MAX_MS)})
    await cluster.start()
    await as_admin(cluster, lambda admin: admin.create_topic(TOPIC, assignments=assignments, configs=configs))
    await produce(cluster, range(100), len(assignments))
    return cluster


async def reassign(cluster: VirtualCluster, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> None:
    await as_admin(cluster, lambda admin: admin.alter_partition_reassignments(wanted))


async def reassign_without(
    cluster: VirtualCluster,
    broker_ids: Sequence[int],
    wanted: Mapping[TopicPartition, Sequence[int] | None],
    *,
    how: Callable[[int], None] | None = None,
) -> None:
    """Start the reassignment, and kill these brokers (or call `how` on them) once it is recorded, before they learn of
    it."""
    asking = asyncio.create_task(reassign(cluster, wanted))
    before = {partition: topic_znode(cluster).assignment(partition.partition) for partition in wanted}
    while any(topic_znode(cluster).assignment(p.partition) == assignment for p, assignment in before.items()):
        assert not asking.done()
        await asyncio.sleep(0.0002)
    for broker_id in broker_ids:
        (how or cluster.kill_broker)(broker_id)
    await asking


async def refusals(
    cluster: VirtualCluster, wanted: Mapping[TopicPartition, Sequence[int] | None]
) -> dict[TopicPartition, ErrorCode]:
    with pytest.raises(PartitionErrors) as refused:
        await reassign(cluster, wanted)
    codes = {}
    for partition, error in refused.value.errors.items():
        assert isinstance(error, BrokerError)
        codes[partition] = error.code
    return codes


async def produce(cluster: VirtualCluster, numbers: Sequence[int], partitions: int = 1) -> None:
    """Send the numbers to each of the partitions; return once all are acknowledged."""
    world = cluster.client("producer")

    async def send() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in numbers:
                for partition in range(partitions):
                    producer.send(TOPIC, b"%d" % number, partition=partition)
                await producer.drain()

    await world.process.run(send())


async def read(cluster: VirtualCluster, partition: int, count: int) -> list[int]:
    world = cluster.client("consumer")

    async def consume() -> list[int]:
        found: list[int] = []
        partitions = [TopicPartition(TOPIC, partition)]
        async with Consumer(cluster.bootstrap, partitions=partitions, world=world) as consumer:
            async for batch in consumer.batches():
                found += [int(value or b"") for value in batch.values]
                if len(found) >= count:
                    return found
        return found

    async with asyncio.timeout(60):
        return await world.process.run(consume())


def topic_znode(cluster: VirtualCluster, topic: str = TOPIC) -> znodes.TopicZnode:
    return znodes.decode_topic(topic, cluster.simulation.zookeeper.data(znodes.topic_path(topic)))


def holders(cluster: VirtualCluster, partition: TopicPartition) -> set[int]:
    """Return the living brokers that have a replica on disk."""
    found: set[int] = set()
    for broker_id in cluster.living():
        broker = cluster.living_broker(broker_id)
        replicas = None if broker is None else broker._replicas
        if replicas is not None and replicas.log_dirs.get(partition) is not None:
            found.add(broker_id)
    return found


def watch_for_strangers(cluster: VirtualCluster, partitions: Sequence[TopicPartition]) -> list[str]:
    """Return a list that later writes extend with each broker that leads or is in an ISR without being assigned."""
    found: list[str] = []

    def written(session: VirtualSession, operations: Sequence[Operation]) -> None:
        for partition in partitions:
            state, assignment = cluster.state(partition), topic_znode(cluster).assignment(partition.partition)
            if not {state.leader, *state.isr, *state.eligible} <= {*assignment.replicas, -1}:
                found.append(f"{partition}: {state}, {assignment}")

    cluster.simulation.zookeeper.after = written
    return found


def is_over(cluster: VirtualCluster, partition: TopicPartition, target: Sequence[int]) -> bool:
    """Return whether ZooKeeper has only the target replicas, all are in sync, one leads, and no other broker has a
    replica on disk."""
    znode, state = topic_znode(cluster), cluster.state(partition)
    assignment = znode.assignment(partition.partition)
    return (
        assignment.replicas == tuple(target)
        and not assignment.is_being_reassigned
        and set(state.isr) == set(target)
        and state.leader in target
        and not state.eligible
        and holders(cluster, partition) == set(target)
    )


@run_by(on_virtual_loop, seed=1)
async def test_replicas_move_while_records_are_written_and_nothing_is_lost() -> None:
    cluster = await cluster_of([[0, 1], [1, 0]])
    strangers = watch_for_strangers(cluster, [P0, P1])
    producing = asyncio.create_task(produce(cluster, range(100, 600), 2))
    await reassign(cluster, {P0: [2, 3], P1: [1, 3]})
    await cluster.until(lambda: is_over(cluster, P0, [2, 3]) and is_over(cluster, P1, [1, 3]))
    await producing
    assert await read(cluster, 0, 600) == list(range(600))
    assert await read(cluster, 1, 600) == list(range(600))
    assert strangers == []


@run_by(on_virtual_loop, seed=2)
async def test_a_replication_factor_goes_from_three_to_two_to_three() -> None:
    cluster = await cluster_of([[0, 1, 2]])
    await reassign(cluster, {P0: [2, 1]})
    await cluster.until(lambda: is_over(cluster, P0, [2, 1]))
    await produce(cluster, range(100, 200))
    await reassign(cluster, {P0: [3, 0, 1]})
    await cluster.until(lambda: is_over(cluster, P0, [3, 0, 1]))
    assert await read(cluster, 0, 200) == list(range(200))


@run_by(on_virtual_loop, seed=3)
async def test_adding_a_replica_does_not_block_writes() -> None:
    """Unless min.insync.replicas is set, two of three replicas must be in sync, and one of one."""

    cluster = await cluster_of([[0]])
    await reassign_without(cluster, [1, 2], {P0: [0, 1, 2]})
    await produce(cluster, range(100, 200))
    assert cluster.state(P0).isr == (0,)
    await cluster.start_broker(1)
    await cluster.start_broker(2)
    await cluster.until(lambda: is_over(cluster, P0, [0, 1, 2]))


@pytest.mark.parametrize("configs", [None, {"min.insync.replicas": "2"}], ids=["by the rule", "explicit"])
@run_by(on_virtual_loop, seed=3)
async def test_min_insync_replicas_holds_while_the_replication_factor_shrinks(
    configs: Mapping[str, str] | None,
) -> None:
    """The only target replica hangs, and all but the leader are killed; then the reassignment is cancelled."""

    cluster = await cluster_of([[0, 1, 2]], configs=configs)
    await reassign_without(cluster, [3], {P0: [3]}, how=cluster.pause_broker)
    for broker_id in (1, 2):
        cluster.kill_broker(broker_id)
    await cluster.until(lambda: cluster.state(P0).isr == (0,))
    assert set(cluster.state(P0).eligible) >= {1, 2}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await produce(cluster, range(100, 101))
    await reassign(cluster, {P0: None})
    cluster.power_cut(0)
    cluster.resume_broker(3)
    for broker_id in (0, 1, 2):
        await cluster.start_broker(broker_id)
    assert await read(cluster, 0, 100) == list(range(100))
    await cluster.until(lambda: is_over(cluster, P0, [0, 1, 2]))


@run_by(on_virtual_loop, seed=4)
async def test_the_order_alone_can_be_changed() -> None:
    cluster = await cluster_of([[0, 1, 2]])
    await reassign(cluster, {P0: [2, 0, 1]})
    await cluster.until(lambda: is_over(cluster, P0, [2, 0, 1]), 5)
    assert cluster.state(P0).leader == 0


@run_by(on_virtual_loop, seed=5)
async def test_a_reassignment_in_progress_is_listed_and_can_be_cancelled() -> None:
    cluster = await cluster_of([[0, 1], [1, 0]])
    cluster.kill_broker(3)
    await cluster.until(lambda: 3 not in live_brokers(cluster))
    assert await refusals(cluster, {P0: [0, 3]}) == {P0: ErrorCode.INVALID_REPLICA_ASSIGNMENT}
    assert await refusals(cluster, {P0: None}) == {P0: ErrorCode.NO_REASSIGNMENT_IN_PROGRESS}
    await cluster.start_broker(3)
    await reassign(cluster, {P1: [1, 0]})
    await reassign_without(cluster, [3], {P0: [2, 3]})

    async def look(admin: Admin) -> None:
        listed = await admin.list_partition_reassignments()
        assert listed == {P0: ((2, 3, 0, 1), (2, 3), (0, 1))}
        assert await admin.list_partition_reassignments([P1]) == {}

    await as_admin(cluster, look)
    await produce(cluster, range(100, 150))
    await cluster.until(lambda: 2 in cluster.state(P0).isr)
    await reassign(cluster, {P0: None})
    await cluster.until(lambda: is_over(cluster, P0, [0, 1]))
    await cluster.start_broker(3)
    assert await read(cluster, 0, 150) == list(range(150))


@run_by(on_virtual_loop, seed=6)
async def test_a_cancelled_reassignment_does_not_wait_for_a_replica_that_was_away_before() -> None:
    cluster = await cluster_of([[0, 1]])
    cluster.kill_broker(1)
    await cluster.until(lambda: cluster.state(P0).isr == (0,))
    await reassign_without(cluster, [3], {P0: [2, 3]})
    await cluster.until(lambda: 2 in cluster.state(P0).isr)
    await reassign(cluster, {P0: None})
    await cluster.until(lambda: topic_znode(cluster).assignment(0).replicas == (0, 1))
    assert cluster.state(P0).isr == (0,)
    await produce(cluster, range(100, 150))
    assert await read(cluster, 0, 150) == list(range(150))


@run_by(on_virtual_loop, seed=7)
async def test_a_cancelled_reassignment_keeps_the_only_complete_replica() -> None:
    """The replicas that the reassignment removes were the last in the ISR, so only they have the acknowledged
    records."""

    cluster = await cluster_of([[0]], configs={"min.insync.replicas": "1"})
    await reassign_without(cluster, [3], {P0: [2, 3]})
    await cluster.until(lambda: cluster.state(P0).isr == (2, 0))
    cluster.kill_broker(0)
    await cluster.until(lambda: cluster.state(P0).isr == (2,))
    await produce(cluster, range(100, 150))
    await reassign(cluster, {P0: None})
    await asyncio.sleep(5)
    assert cluster.state(P0).isr == (2,)
    await cluster.start_broker(0)
    await cluster.until(lambda: topic_znode(cluster).assignment(0).replicas == (0,))
    assert await read(cluster, 0, 150) == list(range(150))


@run_by(on_virtual_loop, seed=8)
async def test_another_reassignment_replaces_one_in_progress() -> None:
    cluster = await cluster_of([[0, 1]], brokers=5)
    await reassign_without(cluster, [3], {P0: [2, 3]})
    await cluster.until(lambda: 2 in cluster.state(P0).isr)
    await reassign(cluster, {P0: [4, 1]})
    await cluster.until(lambda: topic_znode(cluster).assignment(0).replicas == (4, 1))
    await cluster.start_broker(3)
    await cluster.until(lambda: is_over(cluster, P0, [4, 1]))
    assert await read(cluster, 0, 100) == list(range(100))


@run_by(on_virtual_loop, seed=9)
async def test_a_broker_that_was_down_when_its_replica_moved_away_deletes_it_on_return() -> None:
    cluster = await cluster_of([[0, 1]])
    cluster.kill_broker(1)
    await cluster.until(lambda: cluster.state(P0).isr == (0,))
    await reassign(cluster, {P0: [0, 2]})
    await cluster.until(lambda: is_over(cluster, P0, [0, 2]))
    await cluster.start_broker(1)
    await cluster.until(lambda: holders(cluster, P0) == {0, 2}, 10)
    assert cluster.state(P0).isr == (0, 2)


@run_by(on_virtual_loop, seed=10)
async def test_a_topic_that_is_being_reassigned_is_deleted_when_that_is_over() -> None:
    cluster = await cluster_of([[0, 1]])
    await reassign_without(cluster, [3], {P0: [2, 3]})
    with pytest.raises(BrokerError, match="its partitions are being reassigned"):
        await as_admin(cluster, lambda admin: admin.delete_topic(TOPIC))
    assert await refusals(cluster, {P0: [0, 1]}) == {P0: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    await asyncio.sleep(1)
    assert cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC))
    await cluster.start_broker(3)
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC)))
    await cluster.until(lambda: not holders(cluster, P0))


# --- /admin/reassign_partitions -----------------------------------------------------------------------------------


@run_by(on_virtual_loop, seed=11)
async def test_the_reassignment_znode_is_executed_and_removed_when_all_moves_are_done() -> None:
    cluster = await cluster_of([[0, 1], [1, 0]])
    entries = [znodes.Reassignment(P0, (2, 3)), znodes.Reassignment(P1, (0, 1))]
    await write_file(cluster, znodes.encode_reassignments(entries))
    await cluster.until(lambda: is_over(cluster, P0, [2, 3]) and is_over(cluster, P1, [0, 1]))
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS), 5)
    assert await read(cluster, 0, 100) == list(range(100))


NONSENSE = [
    b"",
    b"nonsense",
    b'{"version": 1}',
    b'{"version": 1, "partitions": {}}',
    b'{"version": 1, "partitions": [{"topic": "orders"}]}',
    b'{"version": 1, "partitions": [{"topic": "orders", "partition": 0, "replicas": ["one"]}]}',
    b'{"version": 1, "partitions": []}',
]


@pytest.mark.parametrize("data", NONSENSE)
def test_an_invalid_reassignment_znode_is_removed_and_the_controller_continues(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        cluster = await cluster_of([[0, 1]])
        [controller] = cluster.active_controllers()
        await write_file(cluster, data)
        await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS), 5)
        await reassign(cluster, {P0: [2, 3]})
        await cluster.until(lambda: is_over(cluster, P0, [2, 3]))
        assert cluster.active_controllers() == [controller]

    run(scenario(), seed=12)
    said = [record.message for record in caplog.records if "reassign" in record.message]
    assert len(said) == (0 if data.endswith(b"[]}") else 1), said


def test_entries_that_cannot_be_executed_are_dropped_with_one_log_line_each(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster = await cluster_of([[0, 1], [1, 0]])
        unknown, missing = TopicPartition("unknown", 0), TopicPartition(TOPIC, 7)
        entries = [
            znodes.Reassignment(P0, (2, 3)),
            znodes.Reassignment(unknown, (0, 1)),
            znodes.Reassignment(missing, (0, 1)),
            znodes.Reassignment(P1, (0, 9)),
        ]
        await write_file(cluster, znodes.encode_reassignments(entries))
        await cluster.until(lambda: is_over(cluster, P0, [2, 3]))
        await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS), 5)
        for replicas in ((), (0, 0), (-1, 0)):
            await write_file(cluster, znodes.encode_reassignments([znodes.Reassignment(P1, replicas)]))
            await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS), 5)
        twice = [znodes.Reassignment(P1, (0, 2)), znodes.Reassignment(P1, (0, 3))]
        await write_file(cluster, znodes.encode_reassignments(twice))
        await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS), 5)
        assert topic_znode(cluster).assignment(1).replicas == (1, 0)

    run(scenario(), seed=13)
    said = [record.message for record in caplog.records if "is dropped" in record.message]
    assert len(said) == 7, said


async def write_file(cluster: VirtualCluster, data: bytes) -> None:
    """Write the znode by hand."""
    world = cluster.client("operator")

    async def write() -> None:
        session: ZooKeeperSession = await world.zookeeper.connect(ZOOKEEPER, 10_000, 10_000)
        await session.create(znodes.REASSIGN_PARTITIONS, data)
        await session.close()

    await world.process.run(write())


def live_brokers(cluster: VirtualCluster) -> list[int]:
    return [b for b in cluster.broker_ids if cluster.simulation.zookeeper.has(znodes.broker_path(b))]


# --- The controller is killed ---------------------------------------------------------------------------------------


class Killer:
    """Kills the controller at the n-th of its writes to ZooKeeper or orders to brokers from now on."""

    def __init__(self, cluster: VirtualCluster, kind: str, number: int) -> None:
        self._cluster = cluster
        self._remaining = number
        self.controller = cluster.active_controllers()[0]
        self.has_struck = False
        if kind == "write":
            cluster.simulation.zookeeper.after = self._written
        else:
            controller = cluster.broker(self.controller).controller
            assert controller is not None
            assert controller._tenure is not None
            outbox = controller._tenure._outbox
            ask = outbox._ask

            async def asked(channel: Any, request: Any) -> Any:
                self._count()
                return await ask(channel, request)

            outbox._ask = asked  # type: ignore[method-assign]

    def _written(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        is_controllers = isinstance(operations[0], Check) and operations[0].path == znodes.CONTROLLER_EPOCH
        if session.owner.startswith(host_name(self.controller)) and is_controllers:
            self._count()

    def _count(self) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            self.has_struck = True
            self._cluster.kill_broker(self.controller)


async def _move(cluster: VirtualCluster) -> dict[TopicPartition, list[int]]:
    await reassign(cluster, {P0: [2, 3], P1: [1, 3]})
    return {P0: [2, 3], P1: [1, 3]}


async def _move_by_file(cluster: VirtualCluster) -> dict[TopicPartition, list[int]]:
    entries = [znodes.Reassignment(P0, (2, 3)), znodes.Reassignment(P1, (1, 3))]
    await write_file(cluster, znodes.encode_reassignments(entries))
    return {P0: [2, 3], P1: [1, 3]}


async def _replace(cluster: VirtualCluster) -> dict[TopicPartition, list[int]]:
    await reassign(cluster, {P0: [2, 3], P1: [1, 3]})
    while True:
        try:
            await reassign(cluster, {P0: [4, 1], P1: [3, 4, 0]})
        except PartitionErrors:  # the killed broker is one of the new replicas
            await asyncio.sleep(0.5)
        else:
            return {P0: [4, 1], P1: [3, 4, 0]}


async def _kill_at(
    operation: Callable[[VirtualCluster], Awaitable[dict[TopicPartition, list[int]]]], kind: str, number: int
) -> bool:
    """Kill the controller at that point, start it again once another is elected, and return whether there was such a
    point."""
    cluster = await cluster_of([[0, 1], [1, 0]], brokers=5)
    killer = Killer(cluster, kind, number)
    producing = asyncio.create_task(produce(cluster, range(100, 140), 2))
    asking = asyncio.ensure_future(operation(cluster))

    def all_over() -> bool:
        return (
            asking.done()
            and all(is_over(cluster, partition, target) for partition, target in asking.result().items())
            and not cluster.simulation.zookeeper.has(znodes.REASSIGN_PARTITIONS)
        )

    await cluster.until(lambda: killer.has_struck or all_over())
    if killer.has_struck:
        await cluster.until(lambda: set(cluster.active_controllers()) - {killer.controller})
        await cluster.start_broker(killer.controller)
    await cluster.until(all_over)
    await producing
    for partition in asking.result():
        assert await read(cluster, partition.partition, 140) == list(range(140))
    return killer.has_struck


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "operation"),
    [("write", _move), ("order", _move), ("write", _move_by_file), ("write", _replace), ("order", _replace)],
)
def test_the_next_controller_finishes_a_reassignment_wherever_the_first_is_killed(
    kind: str, operation: Callable[[VirtualCluster], Awaitable[dict[TopicPartition, list[int]]]]
) -> None:
    points = 0
    while run(_kill_at(operation, kind, points + 1), seed=points):
        points += 1
    print(f"{operation.__name__.strip('_')}: killed at each of {points} {kind}s")
    assert points >= 6


# --- Planted bugs -----------------------------------------------------------------------------------------------------


@run_by(on_virtual_loop, seed=14)
async def test_replicas_that_hang_are_waited_for() -> None:
    cluster = await cluster_of([[0, 1]], brokers=5)
    new = [b for b in (2, 3, 4) if b not in cluster.active_controllers()][:2]
    await reassign_without(cluster, new, {P0: new}, how=cluster.pause_broker)
    await asyncio.sleep(0.5)
    for broker_id in new:
        cluster.resume_broker(broker_id)
    await cluster.until(lambda: is_over(cluster, P0, new))
    assert await read(cluster, 0, 100) == list(range(100))


@pytest.mark.parametrize(
    ("name", "scene"),
    [
        ("added-replicas-in-sync-at-once", test_replicas_that_hang_are_waited_for),
        ("removed-replicas-are-forgotten", test_replicas_move_while_records_are_written_and_nothing_is_lost),
        ("removed-replicas-stay-in-the-isr", test_replicas_move_while_records_are_written_and_nothing_is_lost),
    ],
)
def test_a_planted_bug_is_seen(name: str, scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with planted(name), pytest.raises((AssertionError, TimeoutError)):
        run_test(scene)


@pytest.mark.parametrize("partitions", [1, 2])
@run_by(on_virtual_loop, seed=1)
async def test_a_replica_moved_off_a_paused_broker_is_deleted_though_its_topic_was_recreated(
    partitions: int,
) -> None:
    cluster = await cluster_of([[0, 1], [0, 1]])
    paused = next(b for b in (0, 1) if b not in cluster.active_controllers())
    others = [b for b in cluster.broker_ids if b != paused]
    cluster.pause_broker(paused)
    await cluster.until(lambda: paused not in cluster.state(P0).isr)
    await reassign(cluster, {P0: others, P1: others})
    await cluster.until(lambda: not topic_znode(cluster).adding_replicas and set(cluster.state(P1).isr) == {*others})
    await as_admin(cluster, lambda admin: admin.delete_topic(TOPIC))
    await as_admin(cluster, lambda admin: admin.create_topic(TOPIC, assignments=[others] * partitions))
    cluster.resume_broker(paused)
    await cluster.until(lambda: paused not in holders(cluster, P0) | holders(cluster, P1))


# --- Brokers that stop during a reassignment in small clusters --------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize(
    ("before", "after", "brokers"), [([[0, 1], [1, 0]], [[2, 3], [1, 3]], 5), ([[0], [1]], [[1], [0]], 2)]
)
@run_by(on_virtual_loop)
async def test_a_broker_that_stops_while_replicas_move_to_it_stops_soon_and_gets_them_later(
    before: list[list[int]], after: list[list[int]], brokers: int, seed: int
) -> None:
    cluster = await cluster_of(before, brokers=brokers)
    asking = asyncio.create_task(reassign(cluster, dict(zip((P0, P1), after, strict=True))))
    while not topic_znode(cluster).assignment(0).is_being_reassigned:
        await asyncio.sleep(0.0002)
    await asyncio.sleep(0.002 * seed)
    target = after[0][-1]
    async with asyncio.timeout(5):
        await cluster.stop_broker(target)
    await asyncio.sleep(3)
    await cluster.start_broker(target)
    await asking
    await cluster.until(lambda: is_over(cluster, P0, after[0]) and is_over(cluster, P1, after[1]))
    for partition in (0, 1):
        assert await read(cluster, partition, 100) == list(range(100))


@pytest.mark.parametrize("brokers", [2, 3])
@run_by(on_virtual_loop, seed=1)
async def test_brokers_that_stop_together_stop_soon_and_come_back_with_everything(brokers: int) -> None:
    cluster = await cluster_of([[0, 1], [1, 0]], brokers=brokers)
    async with asyncio.timeout(5):
        await asyncio.gather(cluster.stop_broker(0), cluster.stop_broker(1))
    await asyncio.sleep(3)
    await asyncio.gather(cluster.start_broker(0), cluster.start_broker(1))
    await cluster.until(lambda: set(cluster.state(P0).isr) == set(cluster.state(P1).isr) == {0, 1})
    for partition in (0, 1):
        assert await read(cluster, partition, 100) == list(range(100))
