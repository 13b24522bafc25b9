"""Topics with durability=synced: records that are acknowledged or read are on the disks of all in-sync replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Literal

import pytest

from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin, replica_of, send_numbers, unclean_elections
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)
LAG_MS = 3_000
SYNC_DELAYS_S = (0.0, 0.03, 0.2)
everywhere = every_seed(range(5))

Scenario = Callable[[VirtualCluster], Awaitable[None]]


def _simulate(
    scenario: Scenario, seed: int = 0, *, durability: str = "synced", settings: dict[str, str] | None = None
) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), settings={"replica.lag.time.max.ms": str(LAG_MS)} | NO_OFFSETS_TOPIC)
        await cluster.start()
        configs = {"durability": durability} | (settings or {})
        await as_admin(
            cluster, lambda admin: admin.create_topic(TOPIC, partitions=1, replication_factor=3, configs=configs)
        )
        await scenario(cluster)

    run(main(), seed=seed)


async def _send_until_cut(cluster: VirtualCluster, acknowledged: list[int], acks: Literal["all", 1] = "all") -> None:
    """Send numbers from several tasks, each one at a time, until cancelled; append those acknowledged to the list."""
    world = cluster.client("producer")

    async def one_of(producer: Producer, numbers: range) -> None:
        for number in numbers:
            await producer.send(TOPIC, b"%d" % number)
            acknowledged.append(number)
            await asyncio.sleep(0.02)

    async def produce() -> None:
        async with Producer(cluster.bootstrap, acks=acks, world=world) as producer:
            await asyncio.gather(*(one_of(producer, range(first, 100_000, 5)) for first in range(5)))

    await world.process.run(produce())


async def _read_all(cluster: VirtualCluster) -> list[int]:
    world = cluster.client("consumer")

    async def consume() -> list[int]:
        found: list[int] = []
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            end = (await consumer.end_offsets([PARTITION]))[PARTITION]
            while len(found) < end:
                found.append(int((await anext(consumer)).value or b""))
        return found

    async with asyncio.timeout(120):
        return await world.process.run(consume())


def _hang_fsync(cluster: VirtualCluster, broker_id: int, seconds: float) -> None:
    cluster.simulation.host(host_name(broker_id)).disk.faults.sync_delay_s = seconds


async def _lost_by_a_power_cut_of_all(cluster: VirtualCluster, seed: int) -> tuple[list[int], int]:
    """Return the acknowledged records that are lost after a power cut of all, and the number of unclean elections."""
    random = Random(seed)
    acknowledged: list[int] = []
    for broker_id in cluster.broker_ids:
        _hang_fsync(cluster, broker_id, random.choice(SYNC_DELAYS_S))
    sending = asyncio.create_task(_send_until_cut(cluster, acknowledged))
    await cluster.until(lambda: len(acknowledged) >= 20)
    await asyncio.sleep(random.uniform(0, 0.5))
    for broker_id in random.sample(cluster.broker_ids, 3):
        cluster.power_cut(broker_id)
    known = list(acknowledged)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    for broker_id in cluster.broker_ids:
        _hang_fsync(cluster, broker_id, 0)
    await cluster.start()
    await cluster.until(lambda: cluster.state(PARTITION).leader != NO_LEADER)
    found = set(await _read_all(cluster))
    return [number for number in known if number not in found], unclean_elections(cluster)


@every_seed(range(10))
@run_by(_simulate)
async def test_a_power_cut_of_all_brokers_at_once_loses_nothing_that_was_acknowledged(
    cluster: VirtualCluster, /, seed: int
) -> None:
    assert await _lost_by_a_power_cut_of_all(cluster, seed) == ([], 0)


def test_a_power_cut_of_all_loses_acknowledged_records_of_a_replicated_topic() -> None:
    lost: list[int] = []

    async def scenario(cluster: VirtualCluster) -> None:
        of_this_one, last_resorts = await _lost_by_a_power_cut_of_all(cluster, 1)
        lost.extend(of_this_one)
        assert last_resorts, "no replica is trusted, so the longest log leads"

    for seed in range(5):
        _simulate(scenario, seed, durability="replicated")
    assert lost


@everywhere
@run_by(_simulate)
async def test_records_a_consumer_has_read_survive_a_power_cut_of_all_even_if_unacknowledged(
    cluster: VirtualCluster, /, seed: int
) -> None:
    for broker_id in cluster.broker_ids:
        _hang_fsync(cluster, broker_id, 0.2)
    sending = asyncio.create_task(_send_until_cut(cluster, [], acks=1))
    read: list[int] = []
    world = cluster.client("reader")

    async def consume() -> None:
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            async for batch in consumer.batches():
                read.extend(int(value or b"") for value in batch.values)

    reading = asyncio.create_task(world.process.run(consume()))
    await cluster.until(lambda: len(read) >= 50)
    await asyncio.sleep(Random(seed).uniform(0, 0.3))
    for broker_id in cluster.broker_ids:
        cluster.power_cut(broker_id)
    known = list(read)
    for task in (sending, reading):
        task.cancel()
    await asyncio.gather(sending, reading, return_exceptions=True)
    for broker_id in cluster.broker_ids:
        _hang_fsync(cluster, broker_id, 0)
    await cluster.start()
    await cluster.until(lambda: cluster.state(PARTITION).leader != NO_LEADER)
    assert (await _read_all(cluster))[: len(known)] == known


@everywhere
@run_by(_simulate)
async def test_after_a_power_cut_of_all_the_first_returning_in_sync_replica_has_everything(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(30))
    for broker_id in cluster.broker_ids:
        cluster.power_cut(broker_id)
    first = cluster.state(PARTITION).isr[-1]
    await cluster.start_broker(first)
    await cluster.until(lambda: cluster.state(PARTITION).leader == first)
    for broker_id in cluster.broker_ids:
        if broker_id != first:
            await cluster.start_broker(broker_id)
    await send_numbers(cluster, TOPIC, range(30, 40))
    assert await _read_all(cluster) == list(range(40))
    assert unclean_elections(cluster) == 0


@every_seed(range(6))
@run_by(_simulate, settings={"segment.bytes": "2000"})
async def test_kills_and_power_cuts_of_any_number_of_brokers_keep_acknowledged_records_once(
    cluster: VirtualCluster, /, seed: int
) -> None:
    random = Random(seed)
    acknowledged: list[int] = []
    sending = asyncio.create_task(_send_until_cut(cluster, acknowledged))
    for _ in range(8):
        await asyncio.sleep(random.uniform(0.1, 3))
        _hang_fsync(cluster, random.choice(cluster.broker_ids), random.choice(SYNC_DELAYS_S))
        for broker_id in random.sample(cluster.broker_ids, random.randint(1, 3)):
            if broker_id in cluster.living():
                random.choice((cluster.kill_broker, cluster.power_cut))(broker_id)
            await asyncio.sleep(random.choice((0, 0, random.uniform(0, 2))))
        dead = [broker_id for broker_id in cluster.broker_ids if broker_id not in cluster.living()]
        # Brokers that stay down for a while make the others lead, and follow them when they return.
        for broker_id in random.sample(dead, random.randint(1, len(dead))):
            await cluster.start_broker(broker_id)
            await asyncio.sleep(random.choice((0, random.uniform(0, 4))))
    for broker_id in cluster.broker_ids:
        _hang_fsync(cluster, broker_id, 0)
        if broker_id not in cluster.living():
            await cluster.start_broker(broker_id)
    await cluster.until(lambda: len(cluster.state(PARTITION).isr) == 3)
    assert not sending.done()
    known = list(acknowledged)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    found = await _read_all(cluster)
    assert len(found) == len(set(found))
    assert set(known) <= set(found)
    assert len(known) > 50
    assert unclean_elections(cluster) == 0


@run_by(_simulate)
async def test_a_follower_whose_fsync_hangs_leaves_the_isr_and_acknowledgements_continue(
    cluster: VirtualCluster, /
) -> None:
    await send_numbers(cluster, TOPIC, range(5))
    hung = cluster.state(PARTITION).isr[-1]
    _hang_fsync(cluster, hung, 60)
    sending = asyncio.create_task(send_numbers(cluster, TOPIC, range(5, 15)))
    await asyncio.sleep(LAG_MS / 2_000)
    assert not sending.done()
    await cluster.until(lambda: hung not in cluster.state(PARTITION).isr, within_s=2 * LAG_MS / 1_000)
    await asyncio.wait_for(sending, 2)
    # The records that it appends after its recovery must be on its disk before it rejoins the ISR.
    _hang_fsync(cluster, hung, 0.3)
    await cluster.until(lambda: hung in cluster.state(PARTITION).isr, within_s=120)
    log = cluster.broker(hung)._logs.get(PARTITION)
    assert log is not None
    assert log.recovery_point == 15


@run_by(_simulate)
async def test_a_leader_whose_fsync_hangs_acknowledges_and_shows_nothing_and_logs_that(
    cluster: VirtualCluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    await send_numbers(cluster, TOPIC, range(5))
    leader = cluster.state(PARTITION).leader
    _hang_fsync(cluster, leader, 20)
    sending = asyncio.create_task(send_numbers(cluster, TOPIC, range(5, 6)))
    await asyncio.sleep(15)
    assert not sending.done()
    assert replica_of(cluster, leader, PARTITION).high_watermark == 5
    assert await _read_all(cluster) == list(range(5))
    log = cluster.broker(leader)._logs.get(PARTITION)
    assert log is not None
    assert 14 < log.flushing_for_s < 16
    assert "orders-0: the disk has been flushing it for" in caplog.text
    await sending
    assert replica_of(cluster, leader, PARTITION).high_watermark == 6


# --- Planted bugs ------------------------------------------------------------------------------------------------


async def _lost_behind_a_leader_that_does_not_flush(cluster: VirtualCluster) -> list[int]:
    leader = cluster.state(PARTITION).leader
    _hang_fsync(cluster, leader, 60)
    acknowledged = await _acknowledged_within(cluster, LAG_MS / 2_000)
    return await _missing_where_it_comes_back_first(cluster, leader, acknowledged)


async def _lost_behind_a_follower_that_does_not_flush(cluster: VirtualCluster) -> list[int]:
    follower = cluster.state(PARTITION).isr[-1]
    _hang_fsync(cluster, follower, 60)
    acknowledged = await _acknowledged_within(cluster, LAG_MS / 2_000)
    return await _missing_where_it_comes_back_first(cluster, follower, acknowledged)


async def _lost_behind_a_replica_that_has_not_flushed_what_it_caught_up_with(cluster: VirtualCluster) -> list[int]:
    follower = cluster.state(PARTITION).isr[-1]
    cluster.kill_broker(follower)
    await cluster.until(lambda: follower not in cluster.state(PARTITION).isr)
    acknowledged = await _acknowledged_within(cluster, 1)
    await cluster.start_broker(follower)
    _hang_fsync(cluster, follower, 60)
    await asyncio.sleep(LAG_MS / 2_000)
    return await _missing_where_it_comes_back_first(cluster, follower, acknowledged)


async def _lost_with_new_segments(cluster: VirtualCluster) -> list[int]:
    acknowledged = await _acknowledged_within(cluster, 2)
    return await _missing_where_it_comes_back_first(cluster, cluster.state(PARTITION).leader, acknowledged)


async def _acknowledged_within(cluster: VirtualCluster, seconds: float) -> list[int]:
    acknowledged: list[int] = []
    sending = asyncio.create_task(_send_until_cut(cluster, acknowledged))
    await asyncio.sleep(seconds)
    known = list(acknowledged)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return known


async def _missing_where_it_comes_back_first(
    cluster: VirtualCluster, broker_id: int, acknowledged: list[int]
) -> list[int]:
    for host in cluster.broker_ids:
        cluster.power_cut(host)
    cluster.simulation.host(host_name(broker_id)).disk.faults.clear()
    await cluster.start_broker(broker_id)
    await asyncio.sleep(5)
    for other in cluster.broker_ids:
        if other != broker_id:
            await cluster.start_broker(other)
    await cluster.until(lambda: cluster.state(PARTITION).leader != NO_LEADER)
    found = set(await _read_all(cluster))
    return [number for number in acknowledged if number not in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        ("acknowledged-before-own-flush", _lost_behind_a_leader_that_does_not_flush),
        ("follower-reports-what-is-not-flushed", _lost_behind_a_follower_that_does_not_flush),
        ("directories-not-synced", _lost_with_new_segments),
        ("joins-isr-unflushed", _lost_behind_a_replica_that_has_not_flushed_what_it_caught_up_with),
    ],
)
def test_acknowledged_records_are_on_every_in_sync_disk_and_planted_bugs_are_seen(
    mutant: str, scenario: Callable[[VirtualCluster], Awaitable[list[int]]]
) -> None:
    lost: list[int] = []

    async def played(cluster: VirtualCluster) -> None:
        lost.extend(await scenario(cluster))

    for seed in range(3):
        _simulate(played, seed, settings={"segment.bytes": "2000"})
    assert not lost
    with planted(mutant):
        for seed in range(3):
            _simulate(played, seed, settings={"segment.bytes": "2000"})
    assert lost


@run_by(_simulate)
async def test_a_broker_that_lost_its_data_directory_is_not_trusted_for_a_synced_topic(
    cluster: VirtualCluster, /
) -> None:
    await send_numbers(cluster, TOPIC, range(10))
    first, *others = cluster.state(PARTITION).isr
    for broker_id in cluster.broker_ids:
        cluster.power_cut(broker_id)
    empty = cluster.simulation.host(host_name(first)).disk.of(cluster.client("thief").process)
    empty.remove_tree("/var/lib/minibroker")
    empty.sync_directory("/var/lib")
    await cluster.start_broker(first)
    await asyncio.sleep(20)
    assert cluster.state(PARTITION).leader == NO_LEADER
    await cluster.start_broker(others[0])
    await cluster.until(lambda: cluster.state(PARTITION).leader == others[0])
    assert await _read_all(cluster) == list(range(10))
