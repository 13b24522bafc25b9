"""Preferred and unclean elections: by request, by znode, and automatically at an interval."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import PartitionErrors
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import ELECT_LEADERS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by, run_test
from tests.simulation.mutants import planted
from tests.simulation.scenarios.control.test_forwarding import connect, cut, until_controller
from tests.simulation.scenarios.helpers import with_client
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]
ASSIGNMENTS = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
NO_REBALANCE = {"auto.leader.rebalance.enable": "false"}
STALL_S = 0.2

Program = Callable[[VirtualCluster, VirtualWorld], Coroutine[Any, Any, None]]


def with_cluster(program: Program, settings: dict[str, str] | None = None, seed: int = 0) -> None:
    topic = {"name": TOPIC, "assignments": ASSIGNMENTS}
    with_client(program, topic, settings=NO_REBALANCE if settings is None else settings, seed=seed)


def leaders(cluster: VirtualCluster) -> list[int]:
    return [cluster.state(partition).leader for partition in PARTITIONS]


def replicas_of(cluster: VirtualCluster, partition: TopicPartition) -> list[int]:
    known = cluster.broker(0)._metadata.partition(partition)
    return [] if known is None else list(known.replicas)


def is_in_sync(cluster: VirtualCluster) -> bool:
    return all(len(cluster.state(partition).isr) == 3 for partition in PARTITIONS)


async def restart(cluster: VirtualCluster, broker_id: int) -> None:
    """Restart the broker; afterwards it is in sync and leads no partition."""
    cluster.kill_broker(broker_id)
    await cluster.until(lambda: broker_id not in leaders(cluster) and NO_LEADER not in leaders(cluster))
    await cluster.start_broker(broker_id)
    await cluster.until(lambda: is_in_sync(cluster))
    await until_controller(cluster)


async def restart_all(cluster: VirtualCluster) -> None:
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    for broker_id in cluster.broker_ids:
        await cluster.start_broker(broker_id)
        await asyncio.sleep(10)
    await cluster.until(lambda: is_in_sync(cluster))


def ask_by_znode(cluster: VirtualCluster, data: bytes) -> None:
    cluster.simulation.zookeeper.make(znodes.PREFERRED_REPLICA_ELECTION, data)


def is_held(cluster: VirtualCluster) -> bool:
    return not cluster.simulation.zookeeper.has(znodes.PREFERRED_REPLICA_ELECTION)


# --- Preferred ------------------------------------------------------------------------------------------------------


@every_seed(range(3))
@run_by(with_cluster)
async def test_after_a_restart_of_all_brokers_leaders_are_balanced_on_request(
    cluster: VirtualCluster, world: VirtualWorld, /, seed: int
) -> None:
    await restart_all(cluster)
    unbalanced = {p for p, leader, a in zip(PARTITIONS, leaders(cluster), ASSIGNMENTS, strict=True) if leader != a[0]}
    assert unbalanced
    epochs = [cluster.state(partition).leader_epoch for partition in PARTITIONS]
    async with Admin(cluster.bootstrap, world=world) as admin:
        assert await admin.elect_leaders("preferred") == dict.fromkeys(unbalanced, True)
        described = await admin.describe_topic(TOPIC)
        assert await admin.elect_leaders("preferred") == {}
        assert await admin.elect_leaders("preferred", PARTITIONS) == dict.fromkeys(PARTITIONS, False)
    assert [partition.leader for partition in described.partitions] == leaders(cluster) == [0, 1, 2]
    for partition, before in zip(PARTITIONS, epochs, strict=True):
        assert cluster.state(partition).leader_epoch == before + (partition in unbalanced)
        assert set(cluster.state(partition).isr) == {0, 1, 2}


@run_by(with_cluster)
async def test_a_repeated_election_is_not_answered_before_clients_know_the_leaders(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """After a failover the first controller has held the election, so its successor finds nothing to do."""

    controller = await until_controller(cluster)
    await restart(cluster, (controller + 1) % 3)
    host = host_name(controller)
    assert cluster.simulation.network.delay_standing(host, host, by_s=1.0)
    async with Admin(cluster.bootstrap, world=world) as admin:
        first = asyncio.create_task(admin.elect_leaders("preferred", PARTITIONS))
        await cluster.until(lambda: leaders(cluster) == [0, 1, 2])
        elected = await admin.elect_leaders("preferred", PARTITIONS)
        assert elected == dict.fromkeys(PARTITIONS, False)
        told = [cluster.broker(controller)._metadata.partition(partition) for partition in PARTITIONS]
        assert [state and state.leader for state in told] == [0, 1, 2]
        assert any((await first).values())


async def restart_one(cluster: VirtualCluster) -> None:
    await restart(cluster, ((await until_controller(cluster)) + 1) % 3)


async def stop_and_start_all(cluster: VirtualCluster) -> None:
    for broker_id in cluster.broker_ids:
        await cluster.stop_broker(broker_id)
    await cluster.start()
    await cluster.until(lambda: is_in_sync(cluster))


@every_seed(range(2))
@pytest.mark.parametrize("restarted", [restart_one, restart_all, stop_and_start_all])
@run_by(with_cluster, settings={})
async def test_leaders_are_balanced_seconds_after_the_last_broker_has_caught_up(
    cluster: VirtualCluster,
    world: VirtualWorld,
    /,
    restarted: Callable[[VirtualCluster], Coroutine[Any, Any, None]],
    seed: int,
) -> None:
    await asyncio.sleep(20)
    await restarted(cluster)
    await cluster.until(lambda: leaders(cluster) == [0, 1, 2], within_s=6)


@run_by(with_cluster, settings={})
async def test_a_broker_that_catches_up_slowly_leads_soon_afterwards(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await asyncio.sleep(20)
    controller = await until_controller(cluster)
    back = (controller + 1) % 3
    cluster.kill_broker(back)
    await cluster.until(lambda: back not in leaders(cluster))
    cut(cluster, host_name(back), host_name(cluster.state(PARTITIONS[back]).leader))
    await cluster.start_broker(back)
    await asyncio.sleep(60)
    assert back not in leaders(cluster)
    cluster.simulation.network.heal()
    await cluster.until(lambda: leaders(cluster) == [0, 1, 2], within_s=45)


@run_by(with_cluster, settings={})
async def test_if_no_broker_has_returned_leaders_are_balanced_only_at_the_interval(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await asyncio.sleep(20)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.alter_partition_reassignments({PARTITIONS[0]: [1, 2, 0]})
        await cluster.until(lambda: replicas_of(cluster, PARTITIONS[0]) == [1, 2, 0])
    await asyncio.sleep(250)
    assert leaders(cluster) == [0, 1, 2]
    await cluster.until(lambda: leaders(cluster) == [1, 1, 2], within_s=60)


@run_by(with_cluster)
async def test_leaders_are_not_balanced_automatically_if_that_is_turned_off(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await restart_all(cluster)
    before = leaders(cluster)
    await asyncio.sleep(700)
    assert leaders(cluster) == before != [0, 1, 2]


@run_by(with_cluster, settings={"leader.imbalance.check.interval.seconds": "2"})
async def test_leaders_are_balanced_at_the_configured_interval(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    controller = await until_controller(cluster)
    broker_id = next(b for b in cluster.broker_ids if b != controller)
    for _ in range(2):
        await restart(cluster, broker_id)
        await cluster.until(lambda: leaders(cluster) == [0, 1, 2], within_s=2.5)


@run_by(with_cluster)
async def test_a_preferred_leader_that_is_dead_or_not_in_sync_is_not_elected(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    broker_id = next(b for b in cluster.broker_ids if b != controller)
    partition = PARTITIONS[broker_id]
    cluster.kill_broker(broker_id)
    await cluster.until(lambda: cluster.state(partition).leader not in (broker_id, NO_LEADER))
    async with Admin(cluster.bootstrap, world=world) as admin:
        with pytest.raises(PartitionErrors, match=f"broker {broker_id}, is not alive") as raised:
            await admin.elect_leaders("preferred", PARTITIONS)
        error = raised.value.errors[partition]
        assert isinstance(error, BrokerError)
        assert error.code is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
        assert raised.value.results == {p: False for p in PARTITIONS if p != partition}
        leader = cluster.state(partition).leader
        cut(cluster, host_name(broker_id), host_name(leader))
        await cluster.start_broker(broker_id)
        with pytest.raises(PartitionErrors, match=f"broker {broker_id}, is not in the ISR"):
            await admin.elect_leaders("preferred", [partition])
        assert cluster.state(partition).leader == leader


@run_by(with_cluster)
async def test_unknown_partitions_and_types_are_refused(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    controller = await until_controller(cluster)
    async with Admin(cluster.bootstrap, world=world) as admin:
        with pytest.raises(PartitionErrors) as raised:
            await admin.elect_leaders("preferred", [TopicPartition(TOPIC, 3), TopicPartition("none", 0)])
    assert {str(p): e.code for p, e in raised.value.errors.items() if isinstance(e, BrokerError)} == {
        "none-0": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "orders-3": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    connection = await connect(world, controller)
    for election_type in (-1, 2):
        with pytest.raises(BrokerError, match="there is no election of type"):
            await connection.request(ELECT_LEADERS, m.ElectLeadersRequest(election_type, None, 1_000))
    epoch = cluster.broker(controller)._metadata.controller_epoch
    with pytest.raises(BrokerError, match=f"for controller epoch {epoch - 1}, not {epoch}"):
        await connection.request(ELECT_LEADERS, m.ElectLeadersRequest(0, None, 1_000, epoch - 1))


# --- By znode -------------------------------------------------------------------------------------------------------


@run_by(with_cluster)
async def test_the_election_znode_gives_partitions_to_preferred_leaders_and_is_removed(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    broker_id = next(b for b in cluster.broker_ids if b != controller)
    for _ in range(2):
        await restart(cluster, broker_id)
        epoch = cluster.state(PARTITIONS[broker_id]).leader_epoch
        ask_by_znode(cluster, znodes.encode_preferred_election(PARTITIONS))
        await cluster.until(lambda: is_held(cluster), within_s=1)
        assert leaders(cluster) == [0, 1, 2]
        assert cluster.state(PARTITIONS[broker_id]).leader_epoch > epoch
        await asyncio.sleep(0.5)
        partition = cluster.broker(broker_id)._replicas.partitions.get(PARTITIONS[broker_id])  # type: ignore[union-attr]
        assert partition is not None
        assert partition.is_leader


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "holds b''"),
        (b"{", "holds b'{'"),
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b'{"version":1}', "missing required field `partitions`"),
        (b'{"version":1,"partitions":[{"topic":"orders"}]}', "missing required field `partition`"),
        (b'{"version":1,"partitions":[{"topic":"orders","partition":"0"}]}', "Expected `int`"),
        (b'{"version":1,"partitions":[{"topic":"orders","partition":-1}]}', "there is no partition orders--1"),
        (b'{"version":1,"partitions":[{"topic":"none","partition":0}]}', "there is no partition none-0"),
        (b'{"version":1,"partitions":[{"topic":"orders","partition":99999999999999}]}', "<= 2147483647"),
        (
            b'{"version":1,"partitions":[{"topic":"orders","partition":0},{"topic":"orders","partition":0}]}',
            "orders-0 is named more than once",
        ),
        (b'{"version":1,"partitions":[]}', None),
        (b'{"partitions":[{"topic":"orders","partition":0}],"more":{}}', None),
    ],
)
def test_an_invalid_election_znode_is_logged_once_and_removed(
    data: bytes, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        controller = await until_controller(cluster)
        caplog.clear()
        ask_by_znode(cluster, data)
        await cluster.until(lambda: is_held(cluster), within_s=1)
        assert await until_controller(cluster) == controller

    with caplog.at_level(logging.WARNING, "minibroker.controller"):
        with_cluster(program)
    said = [r.getMessage() for r in caplog.records if znodes.PREFERRED_REPLICA_ELECTION in r.getMessage()]
    assert len(said) == (0 if line is None else 1), said
    assert all((line or "") in one for one in said)


@run_by(with_cluster)
async def test_an_election_request_that_replaces_a_running_one_is_executed(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    broker_id = next(b for b in cluster.broker_ids if b != controller)
    await restart(cluster, broker_id)
    zookeeper = cluster.simulation.zookeeper
    another = znodes.encode_preferred_election([PARTITIONS[broker_id]])

    def before(session: Any, operations: Any) -> None:
        if any(getattr(operation, "path", "") == znodes.PREFERRED_REPLICA_ELECTION for operation in operations):
            zookeeper.before = None
            zookeeper.make(znodes.PREFERRED_REPLICA_ELECTION, another)

    zookeeper.before = before
    ask_by_znode(cluster, znodes.encode_preferred_election([]))
    await cluster.until(lambda: leaders(cluster) == [0, 1, 2], within_s=1)
    await cluster.until(lambda: is_held(cluster), within_s=1)


@run_by(with_cluster)
async def test_an_election_request_is_executed_though_the_previous_removals_answer_is_lost(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    broker_id = next(b for b in cluster.broker_ids if b != controller)
    await restart(cluster, broker_id)
    zookeeper = cluster.simulation.zookeeper

    def after(session: Any, operations: Any) -> None:
        if any(getattr(operation, "path", "") == znodes.PREFERRED_REPLICA_ELECTION for operation in operations):
            zookeeper.after = None
            zookeeper.lose_connections(host_name(controller))
            ask_by_znode(cluster, znodes.encode_preferred_election([PARTITIONS[broker_id]]))

    zookeeper.after = after
    ask_by_znode(cluster, znodes.encode_preferred_election([]))
    await cluster.until(lambda: leaders(cluster) == [0, 1, 2], within_s=5)
    await cluster.until(lambda: is_held(cluster), within_s=5)


def test_no_leader_is_elected_in_a_topic_that_is_being_deleted(caplog: pytest.LogCaptureFixture) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        controller = await until_controller(cluster)
        broker_id = next(b for b in cluster.broker_ids if b != controller)
        cluster.kill_broker(broker_id)
        await cluster.until(lambda: broker_id not in leaders(cluster))
        async with Admin(cluster.bootstrap, world=world) as admin:
            with pytest.raises(BrokerError, match=f"replicas on broker {broker_id} cannot be reached"):
                await admin.delete_topic(TOPIC)
            before = [cluster.state(partition) for partition in PARTITIONS]
            for election_type in ("preferred", "unclean"):
                with pytest.raises(PartitionErrors, match="topic orders is being deleted") as raised:
                    await admin.elect_leaders(election_type, PARTITIONS)
                assert raised.value.errors.keys() == set(PARTITIONS)
                assert await admin.elect_leaders(election_type) == {}
        ask_by_znode(cluster, znodes.encode_preferred_election(PARTITIONS))
        await cluster.until(lambda: is_held(cluster), within_s=1)
        assert [cluster.state(partition) for partition in PARTITIONS] == before

    with_cluster(program)
    assert caplog.text.count("topic orders is being deleted: no leader is elected for orders-0") == 1


def test_an_election_znode_with_children_stays_and_does_not_block_balancing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        controller = await until_controller(cluster)
        cluster.simulation.zookeeper.make(f"{znodes.PREFERRED_REPLICA_ELECTION}/nonsense")
        await asyncio.sleep(1)
        assert not is_held(cluster)
        await restart(cluster, (controller + 1) % 3)
        await cluster.until(lambda: leaders(cluster) == [0, 1, 2], within_s=2.5)
        assert await until_controller(cluster) == controller

    with_cluster(program, settings={"leader.imbalance.check.interval.seconds": "2"})
    assert "/admin/preferred_replica_election stays, because there are nodes below it" in caplog.text


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        ("preferred-leader-out-of-sync", test_a_preferred_leader_that_is_dead_or_not_in_sync_is_not_elected),
        (
            "preferred-leader-in-the-same-epoch",
            test_the_election_znode_gives_partitions_to_preferred_leaders_and_is_removed,
        ),
    ],
)
def test_a_wrong_election_is_noticed(mutant: str, test: Callable[..., Coroutine[Any, Any, None]]) -> None:
    with planted(mutant), pytest.raises((AssertionError, pytest.fail.Exception)):
        run_test(test)


# --- Unclean --------------------------------------------------------------------------------------------------------


@run_by(with_cluster)
async def test_a_leaderless_partition_gets_a_leader_on_request_and_others_keep_theirs(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    other = next(b for b in cluster.broker_ids if b != controller)
    async with Admin(cluster.bootstrap, world=world) as admin:
        third = 3 - controller - other
        await admin.create_topic("lost", assignments=[[other, third]], configs={"min.insync.replicas": "1"})
        lost = TopicPartition("lost", 0)
        cluster.kill_broker(third)
        await cluster.until(lambda: cluster.state(lost).isr == (other,))
        async with Producer(cluster.bootstrap, acks=1, world=world) as producer:
            await producer.send("lost", b"only there", partition=0)
        cluster.kill_broker(other)
        await cluster.until(lambda: cluster.state(lost).leader == NO_LEADER)
        with pytest.raises(PartitionErrors, match="none of the replicas"):
            await admin.elect_leaders("unclean", [lost])
        await cluster.start_broker(third)
        await cluster.until(lambda: cluster.state(lost).leader == NO_LEADER)
        await until_controller(cluster)
        with pytest.raises(PartitionErrors):
            await admin.elect_leaders("preferred", [lost])
        assert cluster.state(lost).leader == NO_LEADER
        before = cluster.state(lost).leader_epoch
        assert await admin.elect_leaders("unclean") == {lost: True}
        state = cluster.state(lost)
        assert (state.leader, state.isr, state.eligible) == (third, (third,), ())
        assert state.leader_epoch > before
        assert await admin.elect_leaders("unclean", [lost]) == {lost: False}


# --- Under load -----------------------------------------------------------------------------------------------------


@every_seed(range(3))
@pytest.mark.parametrize("way", ["request", "znode"])
@run_by(with_cluster)
async def test_an_election_delays_a_producer_only_briefly_and_loses_nothing(
    cluster: VirtualCluster, world: VirtualWorld, /, way: str, seed: int
) -> None:
    controller = await until_controller(cluster)
    broker_id = (controller + 1 + seed % 2) % 3
    partition = PARTITIONS[broker_id]
    await restart(cluster, broker_id)
    loop = asyncio.get_running_loop()
    took_s: list[float] = []
    stop = asyncio.Event()

    async def produce() -> None:
        async with Producer(cluster.bootstrap, acks="all", world=world) as producer:
            while not stop.is_set():
                began_s = loop.time()
                await producer.send(TOPIC, b"%d" % len(took_s), partition=partition.partition)
                took_s.append(loop.time() - began_s)
                await asyncio.sleep(0.003)

    producing = asyncio.create_task(produce())
    async with Admin(cluster.bootstrap, world=world) as admin:
        for _ in range(3):
            await asyncio.sleep(0.5)
            if way == "request":
                await admin.elect_leaders("preferred", [partition])
            else:
                ask_by_znode(cluster, znodes.encode_preferred_election([partition]))
            await cluster.until(lambda: cluster.state(partition).leader == broker_id, within_s=1)
            await asyncio.sleep(0.5)
            await restart(cluster, broker_id)
    stop.set()
    await producing
    async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
        read = [int((await anext(consumer)).value or b"") for _ in took_s]
    assert read == list(range(len(took_s)))
    assert max(took_s) < STALL_S
