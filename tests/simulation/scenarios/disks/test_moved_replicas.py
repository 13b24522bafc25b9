"""Replicas move between the log directories of their brokers while records are sent with acks=all and brokers die:
every acknowledged record is there afterwards, once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random

import pytest

from minibroker.broker.replication.upkeep import log_mover
from minibroker.client.consumer import Consumer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name, log_dir
from minibroker.deploy.simulator.kafka_connection import connect
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import brokers
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, send_numbers
from tests.simulation.seeds import every_seed
from tests.storage_support import batch

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)
OTHERS = (log_dir(1), log_dir(0))
SETTINGS = {"log.segment.bytes": "20000"}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy in small slices, so that a move takes some time."""
    monkeypatch.setattr(log_mover, "SLICE_BYTES", 500)
    monkeypatch.setattr(log_mover, "REST_BYTES", 500)


def _simulate(
    scenario: Callable[[VirtualCluster], Awaitable[None]], seed: int = 0, configs: dict[str, str] | None = None
) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), log_dirs=2, settings=SETTINGS)
        await cluster.start()
        await as_admin(
            cluster, lambda admin: admin.create_topic(TOPIC, partitions=1, replication_factor=3, configs=configs)
        )
        await cluster.until(lambda: all(_home(cluster, broker_id) for broker_id in cluster.broker_ids))
        await scenario(cluster)

    run(main(), seed=seed)


def _home(cluster: VirtualCluster, broker_id: int) -> str | None:
    """Return the directory from which the broker serves the partition, or None if it does not serve it."""
    broker = cluster.living_broker(broker_id)
    replica = None if broker is None or broker._replicas is None else broker._replicas.partitions.get(PARTITION)
    return None if replica is None else replica.log.log_dir


def _move(cluster: VirtualCluster, broker_id: int) -> str:
    """Start to move the replica to the other directory, and return that directory."""
    path = next(path for path in OTHERS if path != _home(cluster, broker_id))
    cluster.broker(broker_id)._replicas.mover.move(PARTITION, path)  # type: ignore[union-attr]
    return path


async def _moved(cluster: VirtualCluster, moves: Iterable[tuple[int, str]]) -> None:
    for broker_id, path in moves:
        await cluster.until(partial(_is_at, cluster, broker_id, path))


def _is_at(cluster: VirtualCluster, broker_id: int, path: str) -> bool:
    return _home(cluster, broker_id) == path


async def _assert_read(cluster: VirtualCluster, count: int) -> None:
    """Assert that `count` records are read, once and in order."""
    world = cluster.client("consumer")

    async def consume() -> list[int]:
        found: list[int] = []
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            async for record in consumer:
                found.append(int(record.value or b""))
                if found[-1] == count - 1:
                    return found
        return found

    async with asyncio.timeout(120):
        assert await world.process.run(consume()) == list(range(count))


async def _whole(cluster: VirtualCluster) -> None:
    await cluster.until(
        lambda: len(cluster.state(PARTITION).isr) == 3 and all(_home(cluster, b) for b in cluster.broker_ids)
    )


def _ends(cluster: VirtualCluster) -> set[tuple[int, int]]:
    found = set()
    for broker_id in cluster.broker_ids:
        log = cluster.broker(broker_id)._logs.get(PARTITION)
        assert log is not None
        found.add((log.log_start_offset, log.log_end_offset))
    return found


@pytest.mark.parametrize("durability", ["replicated", "synced"])
def test_replicas_moved_during_writes_are_complete_after_a_power_cut_of_all(
    durability: str,
) -> None:
    async def scenario(cluster: VirtualCluster) -> None:
        await send_numbers(cluster, TOPIC, range(100))
        sending = asyncio.ensure_future(send_numbers(cluster, TOPIC, range(100, 300)))
        leader = cluster.state(PARTITION).leader
        moves = [(broker_id, _move(cluster, broker_id)) for broker_id in cluster.broker_ids]
        await _moved(cluster, moves)
        await sending
        state = cluster.state(PARTITION)
        assert (state.leader, len(state.isr)) == (leader, 3)
        await cluster.until(lambda: len(_ends(cluster)) == 1)
        if durability == "synced":
            for broker_id in cluster.broker_ids:
                cluster.power_cut(broker_id)
        else:
            for broker_id in cluster.broker_ids:
                cluster.kill_broker(broker_id)
        await asyncio.gather(*(cluster.start_broker(broker_id) for broker_id in cluster.broker_ids))
        await _whole(cluster)
        assert [(broker_id, _home(cluster, broker_id)) for broker_id in cluster.broker_ids] == moves
        await _assert_read(cluster, 300)

    _simulate(scenario, configs={"durability": durability})


@every_seed(range(6))
def test_whenever_brokers_die_during_moves_nothing_acknowledged_is_lost(seed: int) -> None:
    async def scenario(cluster: VirtualCluster) -> None:
        dice = Random(seed)
        await send_numbers(cluster, TOPIC, range(60))
        sending = asyncio.ensure_future(send_numbers(cluster, TOPIC, range(60, 360)))
        for _ in range(4):
            await _whole(cluster)
            for broker_id in cluster.broker_ids:
                _move(cluster, broker_id)
            await asyncio.sleep(dice.choice([0.002, 0.02, 0.05]) * dice.random())
            victim = dice.choice(cluster.broker_ids)
            (cluster.kill_broker if dice.random() < 0.5 else cluster.power_cut)(victim)
            await cluster.start_broker(victim)
        await sending
        await _whole(cluster)
        await cluster.until(lambda: len(_ends(cluster)) == 1)
        await _assert_read(cluster, 360)

    _simulate(scenario, seed, {"durability": "synced"} if seed % 2 else None)


@every_seed(range(3))
@run_by(_simulate)
async def test_a_topic_that_is_deleted_while_its_replicas_move_leaves_nothing_behind(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(60))
    for broker_id in cluster.broker_ids:
        _move(cluster, broker_id)
    await asyncio.sleep(0.005 * Random(seed).random())
    await as_admin(cluster, lambda admin: admin.delete_topic(TOPIC), host="deleter")
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC)))

    def left() -> list[str]:
        disks = [cluster.simulation.host(host_name(broker_id)).disk for broker_id in cluster.broker_ids]
        names = [name for disk in disks for path in OTHERS for name in disk.directory(path).entries]
        return [name for name in names if name.startswith(f"{TOPIC}-")]

    await cluster.until(lambda: not left())


@every_seed(range(4))
@run_by(_simulate)
async def test_a_directory_that_fails_during_a_move_to_or_from_it_loses_nothing(
    cluster: VirtualCluster, /, seed: int
) -> None:
    dice = Random(seed)
    await send_numbers(cluster, TOPIC, range(60))
    sending = asyncio.ensure_future(send_numbers(cluster, TOPIC, range(60, 120)))
    leader = cluster.state(PARTITION).leader
    path = _move(cluster, leader)
    await asyncio.sleep(dice.choice([0.01, 0.1, 0.5]) * dice.random())
    fails = path if seed % 2 else next(other for other in OTHERS if other != path)
    cluster.break_log_dir(leader, int(fails == log_dir(1)))
    await sending
    await _assert_read(cluster, 120)
    if _home(cluster, leader) not in (None, fails):
        await _whole(cluster)


@every_seed(range(4))
@run_by(_simulate)
async def test_a_follower_that_truncates_its_log_during_a_move_matches_its_leader(
    cluster: VirtualCluster, /, seed: int
) -> None:
    dice = Random(seed)
    await send_numbers(cluster, TOPIC, range(60))
    old = cluster.state(PARTITION).leader
    log = cluster.broker(old)._logs.get(PARTITION)
    assert log is not None
    cluster.pause_broker(old)
    await cluster.until(lambda: cluster.state(PARTITION).leader not in (old, -1))
    cluster.resume_broker(old)
    path = _move(cluster, old)
    # Records that only the deposed leader has: it must truncate them.
    partition = cluster.broker(old)._replicas.partitions.get(PARTITION)  # type: ignore[union-attr]
    assert partition is not None
    kept = [(broker_id, _move(cluster, broker_id)) for broker_id in cluster.broker_ids if broker_id != old]
    log.append_as_leader(batch(5), log.latest_epoch, 1)
    await asyncio.sleep(0.003 * dice.random())
    await send_numbers(cluster, TOPIC, range(60, 120))
    await _moved(cluster, [*kept, (old, path)])
    await _whole(cluster)
    await cluster.until(lambda: len(_ends(cluster)) == 1)
    await _assert_read(cluster, 120)


@run_by(_simulate)
async def test_a_kafka_client_moves_a_replica_and_sees_its_progress(cluster: VirtualCluster, /) -> None:
    await send_numbers(cluster, TOPIC, range(100))
    world = cluster.client("client")
    there = next(path for path in OTHERS if path != _home(cluster, 1))

    async def asked(version: int, path: str, *partitions: tuple[str, int]) -> list[int]:
        connection = await connect(world.network, host_name(1), PORT)
        topics = [m.AlterReplicaLogDirTopic(topic, [index]) for topic, index in partitions]
        request = m.AlterReplicaLogDirsRequest([m.AlterReplicaLogDir(path, topics)])
        answer = await connection.request(brokers.ALTER_REPLICA_LOG_DIRS, version, request)
        connection.close()
        assert [(result.topic_name, result.partitions[0].partition_index) for result in answer.results] == [*partitions]
        return [result.partitions[0].error_code for result in answer.results]

    async def shown() -> dict[str, tuple[bool, bool]]:
        """Return the directories of the replica; for each, whether it is the future replica and whether it lags."""
        connection = await connect(world.network, host_name(1), PORT)
        topics = [m.DescribableLogDirTopic(TOPIC, [0])]
        answer = await connection.request(brokers.DESCRIBE_LOG_DIRS, 4, m.DescribeLogDirsRequest(topics))
        connection.close()
        return {
            result.log_dir: (partition.is_future_key, partition.offset_lag > 0)
            for result in answer.results
            for topic in result.topics
            for partition in topic.partitions
        }

    async def inside() -> None:
        here = _home(cluster, 1)
        assert here is not None
        assert await asked(1, "/none", PARTITION) == [ErrorCode.LOG_DIR_NOT_FOUND]
        assert await asked(2, there, ("none", 0), (TOPIC, 1)) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 2
        assert await asked(2, here, PARTITION) == [ErrorCode.NONE]
        assert await shown() == {here: (False, False)}
        assert await asked(2, there, PARTITION) == [ErrorCode.NONE]
        assert await shown() == {here: (False, False), there: (True, True)}
        assert await asked(1, here, PARTITION) == [ErrorCode.NONE]
        assert await shown() == {here: (False, False)}
        assert await asked(1, there, PARTITION) == [ErrorCode.NONE]
        await _moved(cluster, [(1, there)])
        assert await shown() == {there: (False, False)}
        cluster.break_log_dir(1, OTHERS.index(here) ^ 1)
        await cluster.until(lambda: cluster.broker(1)._logs.offline)
        assert await asked(2, here, PARTITION) == [ErrorCode.KAFKA_STORAGE_ERROR]

    await world.process.run(inside())
