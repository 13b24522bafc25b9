"""A replica whose files are damaged is given up on its own, and copied again from the broker that leads instead. It is
not deleted as long as the partition may still need its records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.upkeep.healing import may_be_deleted
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CorruptBatch
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.records import HEADER_SIZE, MAGIC_RECORDS, iterate_batches
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin, replicas_of
from tests.simulation.seeds import every_seed

TOPIC = "orders"
HURT = TopicPartition(TOPIC, 0)
PARTITIONS = 3
WITHIN_S = 3
"""Seconds within which a leader with a damaged log is replaced."""


def _simulate(
    scenario: Callable[[VirtualCluster], Awaitable[None]],
    seed: int = 0,
    brokers: int = 3,
    replicas: int = 3,
    settings: Mapping[str, str] | None = None,
) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), brokers=brokers, settings=settings)
        await cluster.start()
        await as_admin(
            cluster, lambda admin: admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=replicas)
        )
        await scenario(cluster)

    run(main(), seed=seed)


def _partitions() -> list[TopicPartition]:
    return [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]


async def _send(cluster: VirtualCluster, first: int, count: int) -> None:
    """Send `count` records to every partition, each in a batch of its own; return once all are acknowledged."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(first, first + count):
                await asyncio.gather(*(producer.send(TOPIC, b"%d" % number, partition=p) for p in range(PARTITIONS)))

    await world.process.run(produce())


async def _read(cluster: VirtualCluster, count: int, partitions: list[TopicPartition] | None = None) -> None:
    """Assert that a consumer reads all acknowledged records from the beginning."""
    world = cluster.client("consumer")

    async def consume() -> dict[TopicPartition, list[int]]:
        found: dict[TopicPartition, list[int]] = {p: [] for p in partitions or _partitions()}
        async with Consumer(
            cluster.bootstrap, partitions=list(found), auto_offset_reset="earliest", world=world
        ) as consumer:
            async for record in consumer:
                found[TopicPartition(TOPIC, record.partition)].append(int(record.value or b""))
                if all(len(set(values)) >= count for values in found.values()):
                    break
        return found

    async with asyncio.timeout(120):
        found = await world.process.run(consume())
    for values in found.values():
        assert sorted(set(values)) == list(range(count))


def _replica(cluster: VirtualCluster, broker_id: int, partition: TopicPartition = HURT) -> Partition | None:
    broker = cluster.living_broker(broker_id)
    return broker._replicas.partitions.get(partition) if broker is not None and broker._replicas is not None else None


def _rot(cluster: VirtualCluster, broker_id: int, position: int = HEADER_SIZE + 1, bit: int = 3) -> None:
    """Flip a bit of the replica, by default one in the records of its first batch."""
    path = f"{LOG_DIR}/{HURT}/00000000000000000000.log"
    cluster.simulation.host(host_name(broker_id)).disk.rot(path, position, bit)


async def _write_kafkas_format(cluster: VirtualCluster) -> None:
    """Write Kafka's format from now on; its CRC does not cover a batch's base offset."""
    world = cluster.client("admin")

    async def alter() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            changes = {ConfigResource.of_topic(TOPIC): [ConfigChange.set("record.format", "kafka")]}
            await admin.incremental_alter_configs(changes)

    await world.process.run(alter())


def _data(cluster: VirtualCluster, broker_id: int) -> bytes:
    disk = cluster.simulation.host(host_name(broker_id)).disk
    return bytes(disk.file(f"{LOG_DIR}/{HURT}/00000000000000000000.log").data)


async def _whole(cluster: VirtualCluster, partition: TopicPartition = HURT) -> None:
    """Wait until every broker has the same log as the leader."""

    def is_whole() -> bool:
        state = cluster.state(partition)
        if set(state.isr) != set(cluster.broker_ids) or state.leader == NO_LEADER:
            return False
        replicas = [_replica(cluster, b, partition) for b in cluster.broker_ids]
        return len({replica.log.log_end_offset if replica is not None else -1 for replica in replicas}) == 1

    await cluster.until(is_whole)


async def _leader(cluster: VirtualCluster, *, may_control: bool = True) -> int:
    """Return the leader of the partition that will be damaged."""
    leader = cluster.state(HURT).leader
    while not may_control and [leader] == cluster.active_controllers():
        await _move_away(cluster, leader)
        leader = cluster.state(HURT).leader
    return leader


async def _move_away(cluster: VirtualCluster, leader: int) -> None:
    """Let another broker lead the partition, and one become the controller."""
    cluster.kill_broker(leader)
    await cluster.until(lambda: cluster.state(HURT).leader not in (leader, NO_LEADER))
    await cluster.until(lambda: cluster.active_controllers())
    await cluster.start_broker(leader)
    await _whole(cluster)


# --- When a damaged replica may be deleted ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "may"),
    [
        (LeaderAndIsr(1, 5, (1, 2), 1, 0), True),
        (LeaderAndIsr(1, 4, (1, 2), 1, 0), False),
        (LeaderAndIsr(1, 5, (1, 3), 1, 0), False),
        (LeaderAndIsr(3, 5, (3,), 1, 0), False),
        (LeaderAndIsr(NO_LEADER, 5, (1,), 1, 0), False),
        (LeaderAndIsr(1, 5, (1,), 1, 0, eligible=(3,)), False),
    ],
)
def test_a_damaged_replica_is_deleted_only_if_no_leader_or_election_can_need_it(state: LeaderAndIsr, may: bool) -> None:
    assert may_be_deleted(state, 3, 4) is may


# --- Damage found while reading --------------------------------------------------------------------------------


@every_seed(range(3))
@run_by(_simulate)
async def test_a_damaged_batch_is_read_from_another_broker_and_its_replica_is_recreated(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await _send(cluster, 0, 10)
    before = {p: cluster.state(p) for p in _partitions()}
    victim = before[HURT].leader
    good = _data(cluster, victim)
    _rot(cluster, victim)
    assert _data(cluster, victim) != good
    reading = asyncio.ensure_future(_read(cluster, 10))
    await cluster.until(lambda: cluster.state(HURT).leader not in (victim, NO_LEADER), WITHIN_S)
    await reading
    await _send(cluster, 10, 10)
    await cluster.until(lambda: replicas_of(cluster, victim).healer.healed == 1)
    await _whole(cluster)
    assert _data(cluster, victim)[: len(good)] == good
    for partition in _partitions()[1:]:
        assert cluster.state(partition) == before[partition]
    assert not cluster.broker(victim)._logs.damaged
    for broker_id in cluster.broker_ids:  # including the recreated one
        if broker_id != victim:
            cluster.kill_broker(broker_id)
    await asyncio.sleep(10)
    for broker_id in cluster.broker_ids:
        if broker_id != victim:
            await cluster.start_broker(broker_id)
    await _read(cluster, 20)


@run_by(_simulate)
async def test_a_follower_gets_a_damaged_batch_from_another_leader(cluster: VirtualCluster, /) -> None:
    leader = cluster.state(HURT).leader
    behind = next(b for b in cluster.broker_ids if b != leader)
    cluster.kill_broker(behind)
    await cluster.until(lambda: behind not in cluster.state(HURT).isr)
    await _send(cluster, 0, 10)
    victim = cluster.state(HURT).leader
    _rot(cluster, victim)
    await cluster.start_broker(behind)
    await cluster.until(lambda: cluster.state(HURT).leader not in (victim, NO_LEADER))
    await _whole(cluster)
    assert replicas_of(cluster, victim).healer.healed == 1
    await _read(cluster, 10)


@pytest.mark.parametrize("reader", ["follower", "consumer"])
@pytest.mark.parametrize(
    ("position", "bit", "batch"),
    [
        pytest.param(6, 2, 3, id="an offset is higher"),
        pytest.param(6, 2, 9, id="the last offset is higher"),
        pytest.param(7, 2, 5, id="an offset is lower"),
        pytest.param(14, 2, 9, id="an epoch is later"),
        pytest.param(8, 6, 9, id="a length is larger"),
    ],
)
@run_by(_simulate)
async def test_a_kafka_batch_with_an_impossible_offset_is_read_from_another_broker(
    cluster: VirtualCluster, /, position: int, bit: int, batch: int, reader: str
) -> None:
    """The damaged fields are not covered by the CRC."""

    await _write_kafkas_format(cluster)
    behind = next(b for b in cluster.broker_ids if b != cluster.state(HURT).leader)
    if reader == "follower":
        cluster.kill_broker(behind)
        await cluster.until(lambda: behind not in cluster.state(HURT).isr)
    await _send(cluster, 0, 10)
    victim = cluster.state(HURT).leader
    batches = list(iterate_batches(_data(cluster, victim)))
    assert [each.header.magic for each in batches] == 10 * [MAGIC_RECORDS]
    _rot(cluster, victim, batches[batch].start + position, bit)
    if reader == "follower":
        await cluster.start_broker(behind)
        await cluster.until(lambda: cluster.state(HURT).leader not in (victim, NO_LEADER))
    await _read(cluster, 10)
    await _whole(cluster)
    assert replicas_of(cluster, victim).healer.healed == 1
    assert len({_data(cluster, broker_id) for broker_id in cluster.broker_ids}) == 1


@run_by(_simulate)
async def test_a_follower_that_receives_records_before_its_end_leaves_the_leader(cluster: VirtualCluster, /) -> None:
    await _write_kafkas_format(cluster)
    await _send(cluster, 0, 5)
    leader = cluster.state(HURT).leader
    behind = next(b for b in cluster.broker_ids if b != leader)
    cluster.pause_broker(behind)  # it stays in the ISR, and its next fetch is at offset 5 in the same epoch
    await asyncio.sleep(1)  # until the fetch that waits at the leader ends empty, after 0.5 s
    sending = asyncio.ensure_future(_send(cluster, 5, 1))
    await cluster.until(lambda: len(list(iterate_batches(_data(cluster, leader)))) == 6)
    *_, last = iterate_batches(_data(cluster, leader))
    _rot(cluster, leader, last.start + 7, 2)  # 5 becomes 1
    cluster.resume_broker(behind)
    await sending
    await cluster.until(lambda: cluster.state(HURT).leader not in (leader, NO_LEADER))
    await _whole(cluster)
    assert replicas_of(cluster, leader).healer.healed == 1
    assert replicas_of(cluster, behind).healer.healed == 0
    await _read(cluster, 6)


@run_by(_simulate)
async def test_a_consumer_leaves_a_leader_with_decreasing_epochs_and_reads_everything_once(
    cluster: VirtualCluster, /
) -> None:
    await _write_kafkas_format(cluster)
    await _send(cluster, 0, 3)
    while cluster.state(HURT).leader_epoch < 2:
        leader = cluster.state(HURT).leader
        cluster.kill_broker(leader)
        await cluster.until(lambda: leader not in cluster.state(HURT).isr)  # noqa: B023
        await cluster.start_broker(leader)
        await cluster.until(lambda: leader in cluster.state(HURT).isr)  # noqa: B023
    await _send(cluster, 3, 3)
    leader = cluster.state(HURT).leader
    *_, last = iterate_batches(_data(cluster, leader))
    epoch = last.header.partition_leader_epoch
    _rot(cluster, leader, last.start + 15, epoch.bit_length() - 1)  # the highest bit that is set
    await _read(cluster, 6)
    await cluster.until(lambda: cluster.state(HURT).leader not in (leader, NO_LEADER))
    await _whole(cluster)
    assert replicas_of(cluster, leader).healer.healed == 1


@run_by(_simulate, brokers=1, replicas=1)
async def test_records_before_a_misplaced_batch_are_read_if_no_other_broker_can_lead(
    cluster: VirtualCluster, /
) -> None:
    await _write_kafkas_format(cluster)
    await _send(cluster, 0, 10)
    leader = cluster.state(HURT).leader
    _rot(cluster, leader, list(iterate_batches(_data(cluster, leader)))[6].start + 6, 4)  # 6 becomes 4102
    world = cluster.client("consumer")
    found: set[int] = set()

    async def consume() -> None:
        async with Consumer(
            cluster.bootstrap, partitions=[HURT], auto_offset_reset="earliest", world=world
        ) as consumer:
            async for record in consumer:
                found.add(record.offset)

    with pytest.raises(CorruptBatch, match="at or after offset 6"):
        await asyncio.wait_for(world.process.run(consume()), 60)
    assert found == set(range(6))


@run_by(_simulate)
async def test_the_last_in_sync_replica_keeps_leading_despite_damage_and_readers_get_an_error(
    cluster: VirtualCluster, /
) -> None:
    await _send(cluster, 0, 10)
    victim = cluster.state(HURT).leader
    for broker_id in cluster.broker_ids:
        if broker_id != victim:
            cluster.kill_broker(broker_id)
    await cluster.until(lambda: cluster.state(HURT).isr == (victim,))
    _rot(cluster, victim)
    damaged = _data(cluster, victim)
    with pytest.raises(CorruptBatch):
        await _read(cluster, 10, [HURT])
    await asyncio.sleep(10)
    assert cluster.state(HURT).leader == victim
    assert _data(cluster, victim) == damaged
    for broker_id in cluster.broker_ids:
        if broker_id != victim:
            await cluster.start_broker(broker_id)
    await _whole(cluster)
    await _read(cluster, 10)  # another broker leads by then
    await _whole(cluster)


@run_by(_simulate, replicas=1)
async def test_without_another_replica_nothing_is_deleted_and_the_rest_is_served(cluster: VirtualCluster, /) -> None:
    await _send(cluster, 0, 10)
    [victim] = cluster.state(HURT).isr
    _rot(cluster, victim)
    damaged = _data(cluster, victim)
    with pytest.raises(CorruptBatch):
        await _read(cluster, 10, [HURT])
    await _send(cluster, 10, 10)
    await asyncio.sleep(10)
    assert _data(cluster, victim)[: len(damaged)] == damaged
    assert cluster.state(HURT).leader == victim


@every_seed(range(4))
@run_by(_simulate)
async def test_the_controller_may_die_while_a_replica_is_given_up_and_recreated(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await _send(cluster, 0, 10)
    victim = await _leader(cluster, may_control=False)
    [controller] = cluster.active_controllers()
    assert controller != victim
    _rot(cluster, victim)
    reading = asyncio.ensure_future(_read(cluster, 10))
    await cluster.until(lambda: _replica(cluster, victim) is None)
    await asyncio.sleep(cluster.simulation.random("the moment of the kill").uniform(0, 2))
    cluster.kill_broker(controller)
    await cluster.until(lambda: cluster.state(HURT).leader not in (controller, NO_LEADER))
    await cluster.start_broker(controller)
    await reading
    await _whole(cluster)
    assert replicas_of(cluster, victim).healer.healed == 1
    await _read(cluster, 10)


@every_seed(range(6))
@pytest.mark.parametrize("power", [False, True])
@run_by(_simulate)
async def test_a_broker_may_die_while_its_replica_is_recreated(
    cluster: VirtualCluster, /, power: bool, seed: int
) -> None:
    await _send(cluster, 0, 10)
    victim = cluster.state(HURT).leader
    _rot(cluster, victim)
    reading = asyncio.ensure_future(_read(cluster, 10))
    await cluster.until(lambda: _replica(cluster, victim) is None)
    await asyncio.sleep(cluster.simulation.random("the moment of the kill").uniform(0, 2))
    if power:
        cluster.power_cut(victim)
    else:
        cluster.kill_broker(victim)
    await _send(cluster, 10, 5)
    await cluster.start_broker(victim)
    await reading
    await _whole(cluster)
    await _read(cluster, 15)


# --- Damage found at a start -----------------------------------------------------------------------------------


def _metadata_file(cluster: VirtualCluster, broker_id: int) -> None:
    disk = cluster.simulation.host(host_name(broker_id)).disk
    disk.rot(f"{LOG_DIR}/{HURT}/partition.metadata", 12, 1)


def _segment(cluster: VirtualCluster, broker_id: int) -> None:
    _rot(cluster, broker_id)
    disk = cluster.simulation.host(host_name(broker_id)).start_process().disk
    disk.remove(f"{LOG_DIR}/.kafka_cleanshutdown")


HARMS: Mapping[str, Callable[[VirtualCluster, int], None]] = {"metadata": _metadata_file, "segment": _segment}


@pytest.mark.parametrize("harm", HARMS)
@every_seed(range(2))
@run_by(_simulate)
async def test_a_replica_damaged_while_its_broker_was_down_is_recreated(
    cluster: VirtualCluster, /, harm: str, seed: int
) -> None:
    await _send(cluster, 0, 10)
    victim = cluster.state(HURT).leader
    await cluster.stop_broker(victim)
    await _send(cluster, 10, 10)
    HARMS[harm](cluster, victim)
    broker = await cluster.start_broker(victim)
    if harm == "metadata":
        assert list(broker._logs.damaged) == [HURT]
        await cluster.until(lambda: replicas_of(cluster, victim).healer.healed == 1)
    await _whole(cluster)
    assert not broker._logs.damaged
    await _read(cluster, 20)


@pytest.mark.parametrize("which", [0, 1], ids=["first", "middle"])
@run_by(_simulate, settings={"log.segment.bytes": "600"})
async def test_a_replica_that_lost_a_segment_while_down_is_recreated_at_no_cost_to_others(
    cluster: VirtualCluster, /, which: int
) -> None:
    """If it led, the others would drop the records before its log start, or keep an unnoticed gap."""

    await _send(cluster, 0, 30)
    victim, *others = cluster.state(HURT).isr
    await cluster.stop_broker(victim)
    disk = cluster.simulation.host(host_name(victim)).start_process().disk
    names = sorted(name for name in disk.list(f"{LOG_DIR}/{HURT}") if name.endswith(".log"))
    assert len(names) > 3
    for suffix in (".log", ".index", ".timeindex"):
        disk.remove(f"{LOG_DIR}/{HURT}/{names[which].removesuffix('.log')}{suffix}")
    broker = await cluster.start_broker(victim)
    assert list(broker._logs.damaged) == [HURT]
    await cluster.until(lambda: replicas_of(cluster, victim).healer.healed == 1)
    await _whole(cluster)
    for broker_id in others:
        await cluster.stop_broker(broker_id)
    await cluster.until(lambda: cluster.state(HURT).leader == victim)
    for broker_id in others:
        await cluster.start_broker(broker_id)
    await _whole(cluster)
    await _read(cluster, 30)


async def _last_in_sync_is_damaged(cluster: VirtualCluster) -> None:
    """Stop and damage the third broker while two are down. Those come back without the acknowledged records."""
    await _send(cluster, 0, 10)
    last = cluster.state(HURT).leader
    others = [b for b in cluster.broker_ids if b != last]
    for broker_id in others:
        cluster.kill_broker(broker_id)
    await cluster.until(lambda: cluster.state(HURT).isr == (last,))
    await cluster.stop_broker(last)
    good = _data(cluster, last)
    _metadata_file(cluster, last)
    broker = await cluster.start_broker(last)
    await asyncio.sleep(20)
    assert list(broker._logs.damaged) == [HURT]
    assert cluster.state(HURT).leader == NO_LEADER
    assert "nothing of it is deleted" in broker._logs.damaged[HURT]
    assert _data(cluster, last) == good
    for broker_id in others:
        await cluster.start_broker(broker_id)
    await _whole(cluster)
    assert replicas_of(cluster, last).healer.healed == 1
    await _read(cluster, 10)


@pytest.mark.parametrize("clean", [True, False])
@run_by(_simulate, replicas=1, settings={"log.segment.bytes": "200"})
async def test_restarts_do_not_truncate_the_only_replica_at_its_damage(cluster: VirtualCluster, /, clean: bool) -> None:
    await _send(cluster, 0, 10)
    [victim] = cluster.state(HURT).isr
    await cluster.stop_broker(victim)
    host = cluster.simulation.host(host_name(victim))
    _rot(cluster, victim)
    process = host.start_process().disk
    process.remove(f"{LOG_DIR}/{HURT}/00000000000000000000.index")  # so that the broker reads the segment at its start
    files = [f"{LOG_DIR}/{HURT}/{name}" for name in process.list(f"{LOG_DIR}/{HURT}") if name.endswith(".log")]
    assert len(files) > 3
    damaged = [bytes(host.disk.file(file).data) for file in files]
    for _ in range(3):
        broker = await cluster.start_broker(victim)
        await asyncio.sleep(20)
        assert list(broker._logs.damaged) == [HURT]
        if clean:
            await cluster.stop_broker(victim)
        else:
            cluster.kill_broker(victim)
        assert [bytes(host.disk.file(file).data) for file in files] == damaged
    host.disk.mend()
    await cluster.start_broker(victim)
    await cluster.until(lambda: cluster.state(HURT).leader == victim)
    await _read(cluster, 10, [HURT])


def test_the_last_in_sync_replica_is_not_deleted_before_another_leads() -> None:
    _simulate(_last_in_sync_is_damaged)


def test_a_mutant_that_deletes_a_damaged_replica_while_it_is_in_the_isr_is_caught() -> None:
    with planted("remade-while-in-the-isr"), pytest.raises(AssertionError):
        _simulate(_last_in_sync_is_damaged)
