"""A broker that runs out of file descriptors refuses operations that need more of them, and keeps serving."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest

from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.recovery.continuity import DataContinuity
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC, PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import with_client

TOPIC = "orders"
PARTITIONS = 40

Program = Callable[[VirtualCluster, VirtualWorld], Awaitable[None]]


def with_cluster(program: Program, settings: dict[str, str] | None = None) -> None:
    """Run the program as a client of three brokers with a topic."""

    async def with_a_record(cluster: VirtualCluster, world: VirtualWorld) -> None:
        await produce(cluster, world)
        await program(cluster, world)

    with_client(with_a_record, {"name": TOPIC, "partitions": PARTITIONS, "replication_factor": 3}, settings=settings)


async def produce(cluster: VirtualCluster, world: VirtualWorld) -> None:
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send(TOPIC, b"v", partition=0)


def limit_files(cluster: VirtualCluster, broker_id: int, limit: int) -> None:
    cluster.simulation.host(host_name(broker_id)).disk.faults.descriptor_limit = limit


def open_files(cluster: VirtualCluster, broker_id: int) -> int:
    return cluster.broker(broker_id)._world.disk.descriptors().files


@run_by(with_cluster)
async def test_connections_are_refused_before_they_use_descriptors_needed_for_files(
    cluster: VirtualCluster, world: VirtualWorld, /, caplog: pytest.LogCaptureFixture
) -> None:
    limit_files(cluster, 0, open_files(cluster, 0) + 3)
    with caplog.at_level(logging.WARNING, "minibroker.network"):
        connection = await open_connection(world.network, host_name(0), PORT, client_id="one more", timeout_s=5)
        await cluster.until(lambda: connection.closed)
    assert "files and connections that this process may have open are taken" in caplog.text
    await produce(cluster, world)
    limit_files(cluster, 0, 1_000)
    connection = await open_connection(world.network, host_name(0), PORT, client_id="one more", timeout_s=5)
    await asyncio.sleep(1)
    assert not connection.closed
    connection.close()


def leaders_of_large(cluster: VirtualCluster) -> list[int]:
    return [cluster.state(TopicPartition("large", number)).leader for number in range(3 * PARTITIONS)]


@run_by(with_cluster)
async def test_a_topic_with_too_many_files_is_created_in_part_and_all_brokers_serve_and_restart(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    for broker_id in cluster.broker_ids:
        limit_files(cluster, broker_id, 4 * PARTITIONS)
    async with Admin(cluster.bootstrap, world=world) as admin:
        with suppress(MinibrokerError):
            await admin.create_topic("large", partitions=3 * PARTITIONS, replication_factor=3)
    await cluster.until(lambda: leaders_of_large(cluster)[-1] == NO_LEADER)
    await produce(cluster, world)
    for broker_id in cluster.broker_ids:
        assert not cluster.broker(broker_id)._logs.offline
        assert open_files(cluster, broker_id) <= 2 * PARTITIONS + 10
    for broker_id in cluster.broker_ids:
        await cluster.stop_broker(broker_id)
        await cluster.start_broker(broker_id)
        await produce(cluster, world)
    assert NO_LEADER not in leaders_of_large(cluster)[: PARTITIONS // 2]


@run_by(with_cluster)
async def test_replicas_without_descriptors_are_created_once_there_is_room_however_late(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    limit_files(cluster, 0, 2 * PARTITIONS + 20)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("large", assignments=[[0]] * 3 * PARTITIONS)
        await cluster.until(lambda: leaders_of_large(cluster).count(0) < PARTITIONS)
        await asyncio.sleep(140)
        limit_files(cluster, 0, 1_000)
        await cluster.until(lambda: set(leaders_of_large(cluster)) == {0}, within_s=5)


class Shortages:
    """Replaces a blocking method with one that fails for lack of descriptors until `ends_s`, but at least once, after
    its change is done or before it."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, *, is_done: bool = False) -> None:
        self.met = 0
        self.ends_s = 0.0
        original = getattr(owner, name)

        def instead(changed: object, *arguments: object) -> object:
            is_short = not self.met or asyncio.get_event_loop().time() < self.ends_s
            if is_done or not is_short:
                original(changed, *arguments)
            if is_short:
                self.met += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return None

        patch.setattr(owner, name, instead)


@pytest.mark.parametrize("is_done", [False, True])
@run_by(with_cluster, settings=NO_OFFSETS_TOPIC)
async def test_a_topic_is_deleted_despite_a_shortage_of_descriptors(
    cluster: VirtualCluster, world: VirtualWorld, /, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    shortages = Shortages(monkeypatch, LogManager, "_rename_away", is_done=is_done)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.delete_topic(TOPIC)
    await cluster.until(lambda: not cluster.simulation.zookeeper.names(znodes.DELETE_TOPICS))
    assert shortages.met
    for broker_id in cluster.broker_ids:
        logs = cluster.broker(broker_id)._logs
        assert (logs.damaged, list(logs.logs())) == ({}, [])


@run_by(with_cluster)
async def test_a_topic_is_deleted_despite_a_long_shortage_of_descriptors(
    cluster: VirtualCluster, world: VirtualWorld, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("small", assignments=[[0, 1]])
        shortages = Shortages(monkeypatch, LogManager, "_rename_away")
        shortages.ends_s = asyncio.get_running_loop().time() + 30
        with suppress(MinibrokerError):
            await admin.delete_topic("small")
    await cluster.until(lambda: not cluster.simulation.zookeeper.names(znodes.DELETE_TOPICS), within_s=70)
    assert shortages.met


@run_by(with_cluster)
async def test_a_topic_is_deleted_though_a_broker_could_not_create_its_replica(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    [controller] = cluster.active_controllers()  # it needs descriptors for the connections of the requests
    short = next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    async with Admin(cluster.bootstrap, world=world) as admin:
        limit_files(cluster, short, 0)
        await admin.create_topic("small", assignments=[[controller, short]])
        with suppress(MinibrokerError):
            await asyncio.wait_for(admin.delete_topic("small"), 3)
        limit_files(cluster, short, 1_000)
    await cluster.until(lambda: not cluster.simulation.zookeeper.names(znodes.DELETE_TOPICS), within_s=140)


@pytest.mark.parametrize("lasts_s", [0, 30])
@run_by(with_cluster)
async def test_a_partition_returns_to_a_broker_that_lacked_descriptors_to_delete_it(
    cluster: VirtualCluster, world: VirtualWorld, /, monkeypatch: pytest.MonkeyPatch, lasts_s: float
) -> None:
    moved = TopicPartition("moved", 0)

    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic(moved.topic, assignments=[[0]])
        shortages = Shortages(monkeypatch, LogManager, "_rename_away")
        shortages.ends_s = asyncio.get_running_loop().time() + lasts_s
        for target in (1, 0):
            await admin.alter_partition_reassignments({moved: [target]})
            await cluster.until(partial(lambda wanted: cluster.state(moved).isr == wanted, (target,)), within_s=60)
        assert shortages.met


@run_by(on_virtual_loop)
async def test_a_directory_survives_that_anothers_failure_is_recorded_during_a_shortage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = VirtualCluster(Simulation(), log_dirs=2)
    await cluster.start()
    shortages = Shortages(monkeypatch, DataContinuity, "note_failed")
    cluster.break_log_dir(0, 0)
    await cluster.until(lambda: shortages.met > 0)
    await asyncio.sleep(10)
    assert len(cluster.broker(0)._logs.offline) == 1
    assert cluster.living() == [0, 1, 2]


@run_by(with_cluster)
async def test_a_broker_that_cannot_open_all_its_logs_says_so_and_serves_the_others(
    cluster: VirtualCluster, world: VirtualWorld, /, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.stop_broker(0)
    limit_files(cluster, 0, PARTITIONS)
    with caplog.at_level(logging.ERROR, "minibroker.storage"):
        broker = await cluster.start_broker(0)
    open_logs = len(list(broker._logs.logs()))
    assert 0 < open_logs <= 3 / 4 * PARTITIONS
    assert len(broker._logs.damaged) == PARTITIONS - open_logs
    assert not broker._logs.healable
    assert f"{PARTITIONS - open_logs} of the replicas in" in caplog.text
    assert "Raise the hard limit of this process" in caplog.text
    await cluster.until(lambda: NO_LEADER not in [cluster.state(TopicPartition(TOPIC, p)).leader for p in range(40)])
    await produce(cluster, world)
    await cluster.stop_broker(0)
    limit_files(cluster, 0, 10 * PARTITIONS)
    broker = await cluster.start_broker(0)
    assert not broker._logs.damaged
    assert len(list(broker._logs.logs())) == PARTITIONS
    await produce(cluster, world)
    everywhere = (0, 1, 2)
    await cluster.until(
        lambda: all(tuple(sorted(cluster.state(TopicPartition(TOPIC, p)).isr)) == everywhere for p in range(40))
    )


@pytest.mark.parametrize("by", ["size", "time"])
@run_by(with_cluster)
async def test_segments_of_one_topic_leave_descriptors_for_all_others(
    cluster: VirtualCluster, world: VirtualWorld, /, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    limit = 8 * PARTITIONS
    for broker_id in cluster.broker_ids:
        limit_files(cluster, broker_id, limit)
    many = TopicPartition("many", 0)
    async with Admin(cluster.bootstrap, world=world) as admin, Producer(cluster.bootstrap, world=world) as producer:
        configs = {"segment.bytes": "100"} if by == "size" else {}
        await admin.create_topic(many.topic, assignments=[[0, 1, 2]], configs=configs)
        with caplog.at_level(logging.WARNING, "minibroker.storage"):
            for number in range(limit):
                timestamp_ms = None if by == "size" else number * 8 * 86_400_000
                await producer.send(many.topic, b"v", partition=0, timestamp_ms=timestamp_ms)
        assert "files have taken their share of the descriptors" in caplog.text
        for broker_id in cluster.broker_ids:
            assert open_files(cluster, broker_id) <= limit / 4 + 2
        await admin.create_topic("later", partitions=10, replication_factor=3)
        await produce(cluster, world)
        for broker_id in cluster.broker_ids:
            await cluster.stop_broker(broker_id)
            broker = await cluster.start_broker(broker_id)
            assert not broker._logs.damaged
        await admin.delete_topic(many.topic)
        await cluster.until(lambda: all(open_files(cluster, b) <= limit / 4 for b in cluster.broker_ids))
        await produce(cluster, world)


BUSY = {
    "log.retention.check.interval.ms": "400",
    "log.cleaner.backoff.ms": "300",
    "log.flush.offset.checkpoint.interval.ms": "700",
    "replica.high.watermark.checkpoint.interval.ms": "900",
}
KINDS = {
    "replicated": {"durability": "replicated", "segment.bytes": "1500"},
    "synced": {"durability": "synced", "segment.bytes": "1500"},
    "compacted": {"cleanup.policy": "compact", "segment.bytes": "700", "min.cleanable.dirty.ratio": "0.1"},
    "shrinking": {"retention.bytes": "2000", "segment.bytes": "700"},
}


def _all_have(acknowledged: dict[str, list[bytes]], wanted: dict[str, int]) -> bool:
    return all(len(acknowledged[topic]) >= count for topic, count in wanted.items())


@pytest.mark.parametrize("spare", [0, *(pytest.param(spare, marks=pytest.mark.slow) for spare in range(1, 4))])
@run_by(with_cluster, settings=BUSY)
async def test_files_that_cannot_be_opened_for_a_while_are_opened_later_and_nothing_is_lost(
    cluster: VirtualCluster, world: VirtualWorld, /, spare: int
) -> None:
    acknowledged: dict[str, list[bytes]] = {topic: [] for topic in KINDS}

    async with Admin(cluster.bootstrap, world=world) as admin:
        for topic, configs in KINDS.items():
            await admin.create_topic(topic, partitions=1, replication_factor=3, configs=configs)
    done = False

    async def send(topic: str) -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            while not done:
                value = b"%d" % len(acknowledged[topic])
                await producer.send(topic, value, key=b"k%d" % (len(acknowledged[topic]) % 3))
                acknowledged[topic].append(value)
                await asyncio.sleep(0.05)

    sending = [asyncio.ensure_future(send(topic)) for topic in KINDS]
    await asyncio.sleep(2)
    for _ in range(2):
        for broker_id in cluster.broker_ids:
            limit_files(cluster, broker_id, open_files(cluster, broker_id) + spare)
        await asyncio.sleep(2)
        for broker_id in cluster.broker_ids:
            limit_files(cluster, broker_id, 10_000)
        wanted = {topic: len(values) + 30 for topic, values in acknowledged.items()}
        await cluster.until(partial(_all_have, acknowledged, wanted))
    done = True
    await asyncio.gather(*sending)
    for broker_id in cluster.broker_ids:
        assert not cluster.broker(broker_id)._logs.offline
        cluster.kill_broker(broker_id)
        await cluster.start_broker(broker_id)
    partitions = [TopicPartition(topic, 0) for topic in KINDS]
    await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in partitions))
    for topic in ("replicated", "synced"):
        async with Consumer(cluster.bootstrap, partitions=[TopicPartition(topic, 0)], world=world) as consumer:
            found: list[bytes] = []
            async for record in consumer:
                found.append(record.value or b"")
                if found[-1] == acknowledged[topic][-1]:
                    break
            assert found == acknowledged[topic]
