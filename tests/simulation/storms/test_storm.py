"""A few short storms for every test run. `make simulate` runs hundreds of long ones, with their floors; CI four."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import msgspec
import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.transport import VirtualTransport
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.seeds import every_seed
from tests.simulation.storms.clients.groups import _Group, _Life, _Listener, _Member
from tests.simulation.storms.clients.growing import TOPIC as GROWING
from tests.simulation.storms.clients.users import Users
from tests.simulation.storms.faults.faults_of_worlds import late_bytes
from tests.simulation.storms.group_storm import GroupStorm
from tests.simulation.storms.report import Report
from tests.simulation.storms.storm import Storm, simulate
from tests.simulation.storms.transaction_storm import TransactionStorm
from tests.simulation.storms.verdicts.group_history import GroupHistory, check_group

SHORT_MINUTES = 0.75


def _story(report: Report) -> str:
    return "\n".join([*map(str, report.anomalies), "what came before:", *report.timeline[-40:]])


def test_a_storm_breaks_no_promise() -> None:
    report = simulate(2, 0.25)
    assert not report.anomalies, _story(report)
    assert report.faults
    assert report.acknowledged


@pytest.mark.slow
@every_seed(range(1, 3))
def test_a_storm_of_consumer_groups_breaks_no_promise(seed: int) -> None:
    report = simulate(seed, SHORT_MINUTES, kind=GroupStorm)
    assert not report.anomalies, _story(report)
    assert report.faults


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_seed_has_the_same_trace_in_every_process() -> None:
    program = "from tests.simulation.storms.storm import simulate; print(simulate(10, 0.25).trace)"

    def trace(hash_seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    with ThreadPoolExecutor() as threads:
        traces = list(threads.map(trace, ("1", "2")))
    assert traces[0] == traces[1]
    assert len(traces[0].strip()) == 32


def test_a_report_names_the_floors_that_a_storm_did_not_reach() -> None:
    assert len(Report(seed=1).below_floors()) == 4


@every_seed(range(3))
def test_a_link_that_an_administrator_blocks_is_unblocked_even_if_its_process_is_killed(seed: int) -> None:
    accused: list[object] = []

    async def main() -> None:
        cluster = VirtualCluster(Simulation(), brokers=2)
        users = Users(cluster, Counter(), event=lambda _: None, accuse=accused.append)
        await cluster.start()
        world = cluster.client("administrator")

        async def delete() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic("orders", partitions=1, replication_factor=2)
                users._hold_up_deletions(Random(seed))
                await admin.delete_topic("orders")

        deletion = asyncio.create_task(world.process.run(delete()))
        zookeeper = cluster.simulation.zookeeper
        await cluster.until(lambda: zookeeper.names(znodes.DELETE_TOPICS) == ["orders"])
        world.process.kill()
        with contextlib.suppress(ProcessKilled):
            await deletion
        await cluster.until(lambda: not zookeeper.names(znodes.DELETE_TOPICS), within_s=30)

    run(main(), seed=seed)
    assert not accused


@every_seed(range(10))
@run_by(on_virtual_loop)
async def test_delayed_connections_are_closed_when_their_fault_is_cancelled(seed: int) -> None:
    storm = Storm(Report(seed=seed), Random(seed))
    await storm.cluster.start()
    network = storm.simulation.network
    hosts = [network._address(host_name(broker_id)) for broker_id in storm.cluster.broker_ids]

    def late() -> list[VirtualTransport]:
        return [end for a in hosts for b in hosts if a != b for end in network._ends(a, b) if end.delay_s]

    was_late = False
    while not was_late:  # the drawn pair of hosts may have no connections
        fault = asyncio.create_task(late_bytes(storm))
        await asyncio.sleep(0.001)
        was_late = bool(late())
        fault.cancel()
        await asyncio.wait([fault])
    await asyncio.sleep(0.001)
    assert not late()


@run_by(on_virtual_loop, seed=1)
async def test_a_requested_growing_topic_is_created_and_known_after_its_fault_is_cancelled() -> None:
    storm = Storm(Report(seed=1), Random(1))
    await storm.cluster.start()
    fault = asyncio.create_task(storm.growing.add_partitions())
    await asyncio.sleep(0.001)
    assert not storm.simulation.zookeeper.has(znodes.topic_path(GROWING))
    fault.cancel()
    await asyncio.wait([fault])
    await storm.cluster.until(lambda: len(storm.growing.partitions()) == 2)


@run_by(on_virtual_loop, seed=1)
async def test_a_killed_broker_has_kept_its_power_although_others_have_lost_theirs() -> None:
    """If one victim is the last replica of several partitions, the first loss does not mean that all brokers lost
    power."""

    storm = Storm(Report(seed=1), Random(1))
    await storm.cluster.start()
    await storm._create_topics()
    partition = TopicPartition("fast", 0)
    storm.content_with_one.add(partition.topic)
    state = storm.cluster.state(partition)
    victim, *killed = state.isr
    storm.cut_power([victim])
    for broker_id in killed:
        storm.take_down(broker_id, storm.cluster.kill_broker)
    storm.damaged.update(storm.cluster.broker_ids)  # as after another partition's loss
    left = msgspec.structs.replace(state, leader=victim, isr=(victim,), isr_epochs=state.isr_epochs[:1])
    assert storm._is_left_to_victims(partition, state, left)


@run_by(on_virtual_loop, seed=1)
async def test_a_member_outside_its_group_has_not_committed_partitions_without_a_position() -> None:
    """The re-created topic has fewer partitions, so the failed commit does not name all partitions of the member."""
    topic = "reborn-0"
    kept, gone = (TopicPartition(topic, number) for number in range(2))

    async def commit_too_late(storm: Storm, world: VirtualWorld) -> None:
        async with Admin(storm.cluster.bootstrap, world=world) as admin:
            await admin.create_topic(topic, partitions=2, replication_factor=1)
            async with Producer(storm.cluster.bootstrap, world=world) as producer:
                for partition in (kept, gone):
                    await producer.send(topic, b"x", partition=partition.partition)
            group = _Group("group", [topic], False, "range", "awaited", 6_000, 2_000, {}, GroupHistory("group"))
            life = _Life(_Member("member", group, None, "poll", 0.1, 10.0, 1), "member#1")
            life.consumer = Consumer(
                storm.cluster.bootstrap,
                topics=[topic],
                group=group.name,
                listener=_Listener(storm.groups, life),
                max_poll_interval_ms=group.max_poll_interval_ms,
                metadata_max_age_ms=200,
                world=world,
            )
            async with life.consumer as consumer:
                while len(life.positions) < 2:
                    for record in await consumer.poll(timeout_ms=500):
                        storm.groups._delivered(life, record.topic, record.partition, record.offset, record.value)
                generation = life.generation
                await admin.delete_topic(topic)
                await admin.create_topic(topic, partitions=1, replication_factor=1)
                states = consumer._partitions.states
                await storm.cluster.until(lambda: states[gone].position is None and states[kept].position == 0)
                await storm.cluster.until(lambda: life.generation == -1)
                group.history.holds("another", generation + 1, [kept])
                await storm.groups.commit_last(life)
                assert not [commit for commit in group.history.commits if commit.is_acknowledged]
                assert list(check_group(group.history, {})) == []

    storm = Storm(Report(seed=1), Random(1))
    storm.rebirth.topics[:] = [topic]
    await storm.cluster.start()
    world = storm.cluster.client("member")
    await world.process.run(commit_too_late(storm, world))


@pytest.mark.slow
@every_seed(range(1, 3))
def test_a_storm_of_transactions_breaks_no_promise(seed: int) -> None:
    report = simulate(seed, SHORT_MINUTES, kind=TransactionStorm)
    assert not report.anomalies, _story(report)
    assert report.events["transaction committed"]
