"""Brokers are killed, also all at once, and hosts lose their power one at a time: no acknowledged record is lost, and
the cluster recovers without an administrator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.consumer import Consumer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, replica_of, send_numbers, unclean_elections
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)
everywhere = every_seed(range(5))


async def _cluster() -> VirtualCluster:
    """Start three brokers, each with a replica of one partition. Nothing is flushed before a minute has passed."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await as_admin(cluster, lambda admin: admin.create_topic(TOPIC, partitions=1, replication_factor=3))
    return cluster


async def _read(cluster: VirtualCluster, count: int) -> list[int]:
    world = cluster.client("consumer")

    async def consume() -> list[int]:
        found: list[int] = []
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            async for record in consumer:
                found.append(int(record.value or b""))
                if len(found) == count:
                    break
        return found

    async with asyncio.timeout(120):
        return await world.process.run(consume())


async def _whole(cluster: VirtualCluster) -> None:
    """Wait until all replicas are in sync, in leader epochs since which none has lost data."""

    def all_trusted() -> bool:
        state = cluster.state(PARTITION)
        trusted = [epoch >= cluster.broker(b)._logs.trusted_since for b, epoch in state.in_sync_members]
        return len(trusted) == 3 and all(trusted) and state.leader != NO_LEADER

    await cluster.until(all_trusted)


def _simulate(scenario: Callable[[VirtualCluster], Awaitable[None]], seed: int) -> None:
    async def main() -> None:
        cluster = await _cluster()
        await scenario(cluster)

    run(main(), seed=seed)


@everywhere
@run_by(_simulate)
async def test_the_leaders_host_loses_its_power_while_the_other_brokers_are_killed(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(50))
    victim = cluster.state(PARTITION).leader
    others = [broker_id for broker_id in cluster.broker_ids if broker_id != victim]
    cluster.power_cut(victim)
    for broker_id in others:
        cluster.kill_broker(broker_id)
    await cluster.start_broker(victim)
    await asyncio.sleep(20)
    assert cluster.state(PARTITION).leader == NO_LEADER, "it is not elected, whatever data survived"
    await cluster.start_broker(others[0])
    await cluster.until(lambda: cluster.state(PARTITION).leader == others[0])
    await send_numbers(cluster, TOPIC, range(50, 60))
    assert await _read(cluster, 60) == list(range(60))
    await cluster.start_broker(others[1])
    await _whole(cluster)
    assert unclean_elections(cluster) == 0


@everywhere
@run_by(_simulate)
async def test_every_host_in_turn_loses_its_power_once_the_one_before_has_caught_up(
    cluster: VirtualCluster, /, seed: int
) -> None:
    sent = 0
    for broker_id in cluster.broker_ids:
        await send_numbers(cluster, TOPIC, range(sent, sent + 20))
        sent += 20
        cluster.power_cut(broker_id)
        await send_numbers(cluster, TOPIC, range(sent, sent + 20))
        sent += 20
        await cluster.start_broker(broker_id)
        assert cluster.broker(broker_id)._logs.trusted_since == cluster.broker(broker_id).broker_epoch
        await _whole(cluster)
    assert await _read(cluster, sent) == list(range(sent))
    assert unclean_elections(cluster) == 0


@everywhere
@run_by(_simulate)
async def test_after_all_brokers_were_killed_at_once_any_of_them_leads_in_a_new_epoch(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(30))
    before = cluster.state(PARTITION)
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    for broker_id in reversed(cluster.broker_ids):
        await cluster.start_broker(broker_id)
        assert cluster.broker(broker_id)._logs.trusted_since < cluster.broker(broker_id).broker_epoch
    await cluster.until(lambda: cluster.state(PARTITION).leader_epoch > before.leader_epoch)
    await _whole(cluster)
    assert await _read(cluster, 30) == list(range(30))
    assert unclean_elections(cluster) == 0


@everywhere
@run_by(_simulate)
async def test_a_leader_left_alone_acknowledges_nothing_so_its_power_cut_loses_nothing(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(30))
    first, *rest = cluster.broker_ids
    for broker_id in (first, rest[0]):
        cluster.kill_broker(broker_id)
    last = rest[1]
    await cluster.until(lambda: cluster.state(PARTITION).isr == (last,))
    assert cluster.state(PARTITION).eligible
    cluster.power_cut(last)
    await cluster.start_broker(first)
    await cluster.start_broker(rest[0])
    await cluster.until(lambda: cluster.state(PARTITION).leader in (first, rest[0]))
    assert await _read(cluster, 30) == list(range(30))
    await cluster.start_broker(last)
    await _whole(cluster)
    assert unclean_elections(cluster) == 0


@everywhere
@run_by(_simulate)
async def test_after_a_power_cut_of_the_whole_cluster_the_longest_log_leads_with_a_warning(
    cluster: VirtualCluster, /, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(30))
    for broker_id in cluster.broker_ids:
        cluster.power_cut(broker_id)
    await cluster.start()
    await _whole(cluster)
    assert unclean_elections(cluster) >= 1
    ends = {cluster.broker(b)._logs.online[0].reports[PARTITION].log_end_offset for b in cluster.broker_ids}
    await send_numbers(cluster, TOPIC, range(1_000, 1_000 + 1))
    survived = max(ends)
    assert await _read(cluster, survived + 1) == [*range(survived), 1_000]


@everywhere
@pytest.mark.parametrize("whole", range(3))
@run_by(_simulate)
async def test_the_longest_log_leads_even_if_its_broker_returns_before_the_others_are_missed(
    cluster: VirtualCluster, /, whole: int, seed: int
) -> None:
    await send_numbers(cluster, TOPIC, range(30))
    await replica_of(cluster, whole, PARTITION).log.flush()
    for broker_id in cluster.broker_ids:
        cluster.power_cut(broker_id)
    for broker_id in sorted(cluster.broker_ids, key=lambda broker_id: broker_id != whole):
        await cluster.start_broker(broker_id)
    await _whole(cluster)
    await send_numbers(cluster, TOPIC, range(30, 31))
    assert await _read(cluster, 31) == list(range(31))


@everywhere
@run_by(_simulate)
async def test_if_one_host_loses_its_power_the_others_continue_at_once(cluster: VirtualCluster, /, seed: int) -> None:
    await send_numbers(cluster, TOPIC, range(30))
    victim = next(b for b in cluster.broker_ids if b != cluster.state(PARTITION).leader)
    cluster.power_cut(victim)
    before = cluster.state(PARTITION)
    await cluster.start_broker(victim)
    await cluster.until(lambda: cluster.state(PARTITION).leader_epoch > before.leader_epoch)
    await cluster.until(lambda: not cluster.state(PARTITION).eligible, within_s=1)
    await _whole(cluster)


@run_by(_simulate, seed=0)
async def test_a_new_broker_is_not_trusted_for_existing_replicas(cluster: VirtualCluster, /) -> None:
    for broker_id in cluster.broker_ids:
        broker = cluster.broker(broker_id)
        assert broker._logs.trusted_since == broker.broker_epoch != SINCE_THIS_REGISTRATION
