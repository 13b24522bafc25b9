"""Brokers with two log directories when one hangs: its calls neither return nor fail."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from minibroker.broker.storage.directory import HUNG_AFTER_S, LogDirectory
from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster, log_dir
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(12)]
PROMPT_S = 2
"""Seconds within which operations that do not use the hanging directory must end."""


async def _cluster(durability: str = "synced") -> VirtualCluster:
    cluster = VirtualCluster(Simulation(), log_dirs=2)
    await cluster.start()
    await as_admin(
        cluster,
        lambda admin: admin.create_topic(
            TOPIC, partitions=len(PARTITIONS), replication_factor=3, configs={"durability": durability}
        ),
    )
    await cluster.until(lambda: all(_home(cluster, b, p) for p in PARTITIONS for b in cluster.broker_ids))
    return cluster


def _home(cluster: VirtualCluster, broker_id: int, partition: TopicPartition) -> str | None:
    log = cluster.broker(broker_id)._logs.get(partition)
    return None if log is None else log.log_dir


def _in(cluster: VirtualCluster, broker_id: int, number: int) -> list[TopicPartition]:
    return [partition for partition in PARTITIONS if _home(cluster, broker_id, partition) == log_dir(number)]


def _led(cluster: VirtualCluster, broker_id: int, number: int) -> list[TopicPartition]:
    return [p for p in _in(cluster, broker_id, number) if cluster.state(p).leader == broker_id]


async def _send(cluster: VirtualCluster, partitions: list[TopicPartition], within_s: float) -> None:
    """Send one record with acks=all to each partition. Raises TimeoutError."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with asyncio.timeout(within_s), Producer(cluster.bootstrap, world=world) as producer:
            await asyncio.gather(*(producer.send(TOPIC, b"x", partition=p.partition) for p in partitions))

    await world.process.run(produce())


def _writing(cluster: VirtualCluster, partitions: list[TopicPartition]) -> VirtualWorld:
    """Start a process that sends to these partitions until it is killed."""
    world = cluster.client("background")

    async def write(partition: TopicPartition) -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            while True:
                await producer.send(TOPIC, b"y", partition=partition.partition)
                await asyncio.sleep(0.1)

    for partition in partitions:
        world.process.start(write(partition))
    return world


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_partitions_of_the_other_directory_continue_at_once(seed: int) -> None:
    cluster = await _cluster()
    hung = cluster.state(PARTITIONS[0]).leader
    world = _writing(cluster, _in(cluster, hung, 0))
    await asyncio.sleep(1)
    cluster.hang_log_dir(hung, 0)
    others = _in(cluster, hung, 1)
    assert _led(cluster, hung, 1)
    for _ in range(8):
        await asyncio.sleep(1)
        await _send(cluster, others, PROMPT_S)
        assert all(len(cluster.state(partition).isr) == 3 for partition in others)
    async with asyncio.timeout(PROMPT_S):
        await as_admin(cluster, lambda admin: admin.delete_records(dict.fromkeys(others, 5)))
    world.process.kill()


async def _hang(cluster: VirtualCluster, broker_id: int, number: int) -> None:
    """Hang the directory, and wait until the broker has given it up."""
    cluster.hang_log_dir(broker_id, number)
    await cluster.until(lambda: log_dir(number) in cluster.broker(broker_id)._logs.offline, HUNG_AFTER_S + 10)


async def _ends(cluster: VirtualCluster) -> dict[TopicPartition, object]:
    """Return the end offset that consumers see of each partition, with its leader epoch."""
    ends: dict[TopicPartition, object] = {}

    async def ask(admin: Admin) -> None:
        ends.update(await admin.list_offsets(dict.fromkeys(PARTITIONS, "latest")))

    await as_admin(cluster, ask)
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["synced", "replicated"])
@run_by(on_virtual_loop)
async def test_other_brokers_lead_the_partitions_of_a_hanging_directory(durability: str) -> None:
    cluster = await _cluster(durability)
    hung = cluster.state(PARTITIONS[0]).leader
    concerned = _in(cluster, hung, 0)
    assert _led(cluster, hung, 0)
    await _send(cluster, PARTITIONS, PROMPT_S)
    world = _writing(cluster, concerned)
    await _hang(cluster, hung, 0)
    await cluster.until(lambda: all(cluster.state(p).leader != hung for p in concerned), PROMPT_S)
    await _send(cluster, PARTITIONS, PROMPT_S)
    world.process.kill()


@run_by(on_virtual_loop)
async def test_controller_orders_wait_at_most_until_a_directory_is_given_up() -> None:
    cluster = await _cluster()
    hung = cluster.state(PARTITIONS[0]).leader
    killed = next(broker_id for broker_id in cluster.broker_ids if broker_id != hung)
    others = _in(cluster, hung, 1)
    cluster.hang_log_dir(hung, 0)
    with contextlib.suppress(BrokerError):  # REQUEST_TIMED_OUT, if the broker that waits for the directory is asked
        await as_admin(cluster, lambda admin: admin.create_topic("new", partitions=6, replication_factor=3))
    with contextlib.suppress(BrokerError):
        await as_admin(cluster, lambda admin: admin.delete_topic("new"))
    await cluster.until(lambda: log_dir(0) in cluster.broker(hung)._logs.offline, HUNG_AFTER_S + 10)
    cluster.kill_broker(killed)
    await cluster.until(lambda: all(cluster.state(p).leader != killed for p in PARTITIONS), 5)
    await _send(cluster, others, 5)


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_calls_that_return_late_have_no_effect_and_the_directory_is_not_trusted_later(seed: int) -> None:
    cluster = await _cluster()
    hung = cluster.state(PARTITIONS[0]).leader
    concerned = _in(cluster, hung, 0)
    world = _writing(cluster, concerned)
    await asyncio.sleep(1)
    before = cluster.broker(hung)._logs.synced_since
    await _hang(cluster, hung, 0)
    world.process.kill()
    await _send(cluster, PARTITIONS, PROMPT_S)
    sent = await _ends(cluster)
    cluster.mend_log_dir(hung, 0)
    await asyncio.sleep(5)
    assert log_dir(0) in cluster.broker(hung)._logs.offline
    assert all(cluster.state(p).leader != hung and hung not in cluster.state(p).isr for p in concerned)
    cluster.kill_broker(hung)
    await cluster.start_broker(hung)
    assert cluster.broker(hung)._logs.synced_since > before
    await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in PARTITIONS))
    assert await _ends(cluster) == sent


@run_by(on_virtual_loop)
async def test_a_directory_that_hangs_for_a_shorter_time_is_not_given_up() -> None:
    cluster = await _cluster()
    hung = cluster.state(PARTITIONS[0]).leader
    for _ in range(3):
        cluster.hang_log_dir(hung, 0)
        await asyncio.sleep(HUNG_AFTER_S - 6)
        cluster.mend_log_dir(hung, 0)
        await _send(cluster, PARTITIONS, 10)
    assert not cluster.broker(hung)._logs.offline
    await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in PARTITIONS))


@run_by(on_virtual_loop)
async def test_if_all_directories_hang_none_is_given_up() -> None:
    cluster = await _cluster()
    hung = cluster.state(PARTITIONS[0]).leader
    for number in range(2):
        cluster.hang_log_dir(hung, number)
    await asyncio.sleep(3 * HUNG_AFTER_S)
    assert not cluster.broker(hung)._logs.offline
    for number in range(2):
        cluster.mend_log_dir(hung, number)
    await _send(cluster, PARTITIONS, 10)
    await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in PARTITIONS))


@run_by(on_virtual_loop)
async def test_time_while_the_process_was_stopped_does_not_count_as_a_hang() -> None:
    simulation = Simulation()
    host = simulation.host("broker")
    world = host.start_process()

    async def call() -> None:
        directory, hangs = LogDirectory(world, LOG_DIR), asyncio.Event()
        directory.on_silence(hangs.set)
        host.disk.faults.hang_directory(LOG_DIR)
        calling = asyncio.create_task(directory.run(int))
        await asyncio.sleep(3)
        simulation.loop.jump(world.process, 3 * HUNG_AFTER_S)
        await asyncio.sleep(3)
        assert not hangs.is_set()
        await asyncio.sleep(HUNG_AFTER_S)
        assert hangs.is_set()
        host.disk.faults.clear()
        await calling

    await world.process.run(call())


@pytest.mark.slow
@run_by(on_virtual_loop)
async def test_a_broker_stops_though_a_directory_hangs() -> None:
    cluster = await _cluster()
    hung = cluster.state(PARTITIONS[0]).leader
    world = _writing(cluster, PARTITIONS)
    await asyncio.sleep(1)
    cluster.hang_log_dir(hung, 0)
    async with asyncio.timeout(HUNG_AFTER_S + 15):
        await cluster.stop_broker(hung)
    cluster.mend_log_dir(hung, 0)
    await cluster.start_broker(hung)
    await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in PARTITIONS))
    world.process.kill()
