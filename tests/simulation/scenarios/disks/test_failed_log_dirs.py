"""Brokers with two log directories when one fails: other brokers lead its replicas, no acknowledged record is lost, and
the other directory stays in use."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.log_dirs import LogDirDescription
from minibroker.client.consumer import Consumer
from minibroker.client.errors import BrokersFailed
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, log_dir
from minibroker.deploy.simulator.disk import SIZE_BYTES
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITIONS = 6
WITHIN_S = 3
"""Seconds within which a leader whose directory fails is replaced."""


async def _cluster(brokers: int = 3, replicas: int = 3) -> VirtualCluster:
    """Start a cluster with one topic; each broker has half of its replicas in each of its two directories."""
    cluster = VirtualCluster(Simulation(), brokers=brokers, log_dirs=2)
    await cluster.start()
    await _create(cluster, TOPIC, replicas)
    return cluster


async def _create(cluster: VirtualCluster, topic: str, replicas: int = 3, partitions: int = PARTITIONS) -> None:
    await as_admin(cluster, lambda admin: admin.create_topic(topic, partitions=partitions, replication_factor=replicas))
    await cluster.until(
        lambda: all(_home(cluster, b, p) for p in _partitions(topic, partitions) for b in _isr(cluster, p))
    )


async def _delete(cluster: VirtualCluster) -> None:
    """Mark the topic for deletion, which may have to wait for a broken directory."""
    world = cluster.client("admin")

    async def delete() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            with contextlib.suppress(BrokerError):
                await admin.delete_topic(TOPIC)

    await world.process.run(delete())


def _partitions(topic: str = TOPIC, count: int = PARTITIONS) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(count)]


def _isr(cluster: VirtualCluster, partition: TopicPartition) -> tuple[int, ...]:
    return cluster.state(partition).isr


def _home(cluster: VirtualCluster, broker_id: int, partition: TopicPartition) -> str | None:
    """Return the directory in which the broker has the partition."""
    log = cluster.broker(broker_id)._logs.get(partition)
    return None if log is None else log.path.rpartition("/")[0]


def _in(cluster: VirtualCluster, broker_id: int, number: int, topic: str = TOPIC) -> list[TopicPartition]:
    return [p for p in _partitions(topic) if _home(cluster, broker_id, p) == log_dir(number)]


def _leaders(cluster: VirtualCluster) -> dict[TopicPartition, int]:
    return {partition: cluster.state(partition).leader for partition in _partitions()}


async def _send(cluster: VirtualCluster, first: int, count: int, topic: str = TOPIC) -> None:
    """Send `count` records to every partition; return once all are acknowledged."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(first, first + count):
                await asyncio.gather(*(producer.send(topic, b"%d" % number, partition=p) for p in range(PARTITIONS)))

    await world.process.run(produce())


async def _assert_all_read(cluster: VirtualCluster, count: int) -> None:
    world = cluster.client("consumer")

    async def consume() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            async for record in consumer:
                found[record.partition].append(int(record.value or b""))
                if all(len(set(values)) >= count for values in found.values()):
                    break
        return found

    async with asyncio.timeout(120):
        found = await world.process.run(consume())
    for values in found.values():
        assert sorted(set(values)) == list(range(count))


async def _whole(cluster: VirtualCluster, partitions: list[TopicPartition] | None = None) -> None:
    """Wait until all replicas are in sync, in leader epochs since which none has lost data."""

    def all_trusted() -> bool:
        for partition in partitions or _partitions():
            state = cluster.state(partition)
            trusted = [epoch >= cluster.broker(b)._logs.trusted_since for b, epoch in state.in_sync_members]
            if len(trusted) < len(cluster.broker_ids) or not all(trusted) or state.leader == NO_LEADER:
                return False
        return True

    await cluster.until(all_trusted)


def _simulate(
    scenario: Callable[[VirtualCluster], Awaitable[None]], seed: int = 0, brokers: int = 3, replicas: int = 3
) -> None:
    async def main() -> None:
        await scenario(await _cluster(brokers, replicas))

    run(main(), seed=seed)


def _notifications(cluster: VirtualCluster) -> list[str]:
    return cluster.simulation.zookeeper.names(znodes.LOG_DIR_EVENTS)


# --- Placement of replicas -------------------------------------------------------------------------------------


@run_by(_simulate)
async def test_new_replicas_go_to_the_directory_with_the_fewest(cluster: VirtualCluster, /) -> None:
    for broker_id in cluster.broker_ids:
        assert [len(_in(cluster, broker_id, number)) for number in (0, 1)] == [PARTITIONS / 2, PARTITIONS / 2]


# --- A directory fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@every_seed(range(3))
@run_by(_simulate)
async def test_other_brokers_lead_the_failed_directorys_partitions_and_the_rest_is_unaffected(
    cluster: VirtualCluster, /, error: int, seed: int
) -> None:
    await _send(cluster, 0, 10)
    before = _leaders(cluster)
    victim = before[_partitions()[0]]
    failing, healthy = (0, 1) if _home(cluster, victim, _partitions()[0]) == log_dir(0) else (1, 0)
    lost, kept = _in(cluster, victim, failing), _in(cluster, victim, healthy)
    epochs = {p: cluster.state(p).leader_epoch for p in _partitions()}
    cluster.break_log_dir(victim, failing, error)
    sending = asyncio.ensure_future(_send(cluster, 10, 20))
    await cluster.until(lambda: all(cluster.state(p).leader not in (victim, NO_LEADER) for p in lost), WITHIN_S)
    await sending
    await cluster.until(lambda: all(victim not in cluster.state(p).isr for p in lost))
    for partition in kept:
        assert cluster.state(partition).leader == before[partition]
        assert cluster.state(partition).leader_epoch == epochs[partition]
        assert victim in cluster.state(partition).isr
    assert list(cluster.broker(victim)._logs.offline) == [log_dir(failing)]
    assert cluster.living() == list(cluster.broker_ids)
    await cluster.until(lambda: not _notifications(cluster))
    await _assert_all_read(cluster, 30)


@run_by(_simulate)
async def test_the_controller_may_die_before_it_has_heard_of_the_failure(cluster: VirtualCluster, /) -> None:
    await _send(cluster, 0, 10)
    [controller] = cluster.active_controllers()
    victim = next(b for b in cluster.broker_ids if b != controller and b in _leaders(cluster).values())
    lost = _in(cluster, victim, 1)
    cluster.pause_broker(controller)
    cluster.break_log_dir(victim, 1)
    sending = asyncio.ensure_future(_send(cluster, 10, 10))
    await cluster.until(lambda: _notifications(cluster))
    cluster.kill_broker(controller)
    await cluster.until(lambda: all(cluster.state(p).leader not in (victim, controller, NO_LEADER) for p in lost))
    await cluster.start_broker(controller)
    await sending
    await cluster.until(lambda: not _notifications(cluster))
    assert victim in _leaders(cluster).values()
    await _assert_all_read(cluster, 20)


@every_seed(range(4))
@run_by(_simulate)
async def test_the_controller_may_die_while_it_handles_the_failure(cluster: VirtualCluster, /, seed: int) -> None:
    await _send(cluster, 0, 10)
    [controller] = cluster.active_controllers()
    victim = next(b for b in cluster.broker_ids if b != controller and b in _leaders(cluster).values())
    lost = _in(cluster, victim, 1)
    cluster.break_log_dir(victim, 1)
    sending = asyncio.ensure_future(_send(cluster, 10, 10))
    await cluster.until(lambda: cluster.broker(victim)._logs.offline)
    await asyncio.sleep(cluster.simulation.random("the moment of the kill").uniform(0, 0.05))
    cluster.kill_broker(controller)
    await cluster.until(lambda: all(cluster.state(p).leader not in (victim, controller, NO_LEADER) for p in lost))
    await cluster.start_broker(controller)
    await sending
    await cluster.until(lambda: not _notifications(cluster))
    await _assert_all_read(cluster, 20)


@run_by(_simulate)
async def test_a_controller_with_a_failed_directory_stays_in_office_and_elects_other_leaders(
    cluster: VirtualCluster, /
) -> None:
    [controller] = cluster.active_controllers()
    lost = _in(cluster, controller, 0)
    cluster.break_log_dir(controller, 0)  # the one with its timeline
    await _send(cluster, 0, 10)
    await cluster.until(lambda: all(cluster.state(p).leader not in (controller, NO_LEADER) for p in lost))
    assert cluster.active_controllers() == [controller]
    disk = cluster.simulation.host(f"broker-{controller}").start_process().disk
    assert "controller-timeline.jsonl" in disk.list(log_dir(1))
    await _assert_all_read(cluster, 10)


@run_by(on_virtual_loop)
async def test_a_broker_stops_when_its_last_directory_fails() -> None:
    told: list[tuple[int, str]] = []
    cluster = VirtualCluster(Simulation(), log_dirs=2, on_broker_failure=lambda b, error: told.append((b, str(error))))
    await cluster.start()
    await _create(cluster, TOPIC)
    cluster.break_log_dir(2, 0)
    await _send(cluster, 0, 10)
    await cluster.until(lambda: cluster.broker(2)._logs.offline)
    assert told == []
    cluster.break_log_dir(2, 1)
    await _send(cluster, 10, 10)
    await cluster.until(lambda: told)
    [(broker_id, text)] = told
    assert broker_id == 2
    assert f"{log_dir(1)}, the last one that was online, has failed" in text
    await _assert_all_read(cluster, 20)


@run_by(_simulate)
async def test_admin_describes_each_directory_and_why_one_is_offline(cluster: VirtualCluster, /) -> None:
    await _send(cluster, 0, 10)
    cluster.break_log_dir(1, 1)
    await _send(cluster, 10, 10)
    await cluster.until(lambda: cluster.broker(1)._logs.offline)
    world = cluster.client("admin")

    async def describe() -> dict[int, tuple[LogDirDescription, ...]]:
        async with Admin(cluster.bootstrap, world=world) as admin:
            with pytest.raises(BrokersFailed, match="broker 7: it is not alive") as caught:
                await admin.describe_log_dirs([1, 7])
            assert (list(caught.value.errors), list(caught.value.results)) == ([7], [1])
            assert list(await admin.describe_log_dirs([2])) == [2]
            return await admin.describe_log_dirs()

    found = await world.process.run(describe())
    assert sorted(found) == [0, 1, 2]
    for broker_id, described in found.items():
        assert [each.log_dir for each in described] == [log_dir(0), log_dir(1)]
        for each in described[: 1 if broker_id == 1 else 2]:
            assert each.error is None
            assert len(each.replicas) == PARTITIONS / 2
            for partition, replica in each.replicas.items():
                log = cluster.broker(broker_id)._logs.get(partition)
                assert log is not None
                assert replica == (log.size, 0, False)
            assert each.total_bytes == each.usable_bytes == SIZE_BYTES
    lost = found[1][1]
    assert (lost.replicas, lost.total_bytes, lost.usable_bytes) == ({}, None, None)
    assert "Input/output error" in str(lost.error)


def test_a_paused_broker_does_not_hide_the_directories_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: VirtualCluster) -> None:
        world = cluster.client("admin")

        async def describe() -> BrokersFailed:
            async with Admin(cluster.bootstrap, default_api_timeout_ms=20_000, world=world) as admin:
                await admin.describe_cluster()
                cluster.pause_broker(1)
                with pytest.raises(BrokersFailed) as caught:
                    await admin.describe_log_dirs([0, 1, 2])
                return caught.value

        failed = await world.process.run(describe())
        assert (list(failed.errors), sorted(failed.results)) == ([1], [0, 2])
        assert "DescribeLogDirs" in str(failed.errors[1])
        cluster.resume_broker(1)

    caplog.set_level(logging.INFO, "minibroker.client.stalls")
    _simulate(scenario)
    [told] = [record.getMessage() for record in caplog.records if record.name == "minibroker.client.stalls"]
    assert "of broker 1: no answer to DescribeLogDirs yet. See `minibroker status`" in told


# --- KAFKA-10778, KAFKA-15375 ----------------------------------------------------------------------------------


def _files(cluster: VirtualCluster, broker_id: int, path: str) -> dict[str, bytes]:
    """Return the content of all files in the directory, by path."""
    disk = cluster.simulation.host(f"broker-{broker_id}").start_process().disk
    found: dict[str, bytes] = {}

    def walk(directory: str) -> None:
        for name in disk.list(directory):
            try:
                found[f"{directory}/{name}"] = disk.read_file(f"{directory}/{name}")
            except OSError:
                walk(f"{directory}/{name}")

    walk(path)
    return {name: data for name, data in found.items() if not name.endswith(("data-continuity", "timeline.jsonl"))}


async def _one_write_fails(cluster: VirtualCluster) -> None:
    """Fail one write to one directory; its disk would accept all later ones."""
    [controller] = cluster.active_controllers()
    victim = next(b for b in cluster.broker_ids if b != controller and b in _leaders(cluster).values())
    await _send(cluster, 0, 10)
    faults = cluster.simulation.host(f"broker-{victim}").disk.faults
    faults.fail("pwrite", errno.EIO)
    await _send(cluster, 10, 1)
    await cluster.until(lambda: cluster.broker(victim)._logs.offline)
    [failed] = cluster.broker(victim)._logs.offline
    before = _files(cluster, victim, failed)
    await _send(cluster, 11, 19)
    await asyncio.sleep(70)  # every checkpoint is due in this time
    assert _files(cluster, victim, failed) == before
    [healthy] = {log_dir(0), log_dir(1)} - {failed}
    await cluster.stop_broker(victim)
    assert f"{healthy}/.kafka_cleanshutdown" in _files(cluster, victim, healthy)
    assert _files(cluster, victim, failed) == before
    await _assert_all_read(cluster, 30)


def test_after_a_failed_write_nothing_is_written_to_the_directory_not_even_the_clean_marker() -> None:
    _simulate(_one_write_fails)


@pytest.mark.parametrize("name", ["io-error-ignored", "clean-marker-of-a-failed-directory"])
def test_a_mutant_that_keeps_using_a_failed_directory_is_caught(name: str) -> None:
    with planted(name), pytest.raises((AssertionError, TimeoutError)):
        _simulate(_one_write_fails)


# --- Restarts --------------------------------------------------------------------------------------------------


async def _restart(cluster: VirtualCluster, broker_id: int) -> int:
    """Stop the broker cleanly and start it; return its previous broker epoch."""
    before = cluster.broker(broker_id).broker_epoch
    await cluster.stop_broker(broker_id)
    await cluster.start_broker(broker_id)
    return before


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOTDIR])
@pytest.mark.parametrize("number", [0, 1])
@run_by(_simulate)
async def test_a_directory_that_cannot_be_opened_counts_as_failed_and_is_not_trusted_later(
    cluster: VirtualCluster, /, number: int, error: int
) -> None:
    await _send(cluster, 0, 10)
    lost = _in(cluster, 1, number)
    cluster.kill_broker(1)
    cluster.break_log_dir(1, number, error)
    await cluster.start_broker(1)
    trusted_since = cluster.broker(1)._logs.trusted_since
    assert trusted_since < cluster.broker(1).broker_epoch
    await cluster.until(lambda: all(len(_isr(cluster, p)) == (2 if p in lost else 3) for p in _partitions()))
    world = cluster.client("admin")

    async def describe() -> dict[str, str | None]:
        async with Admin(cluster.bootstrap, world=world) as admin:
            return {each.log_dir: each.error for each in (await admin.describe_log_dirs([1]))[1]}

    described = await world.process.run(describe())
    assert described[log_dir(1 - number)] is None
    assert "cannot be used" in str(described[log_dir(number)])
    await _send(cluster, 10, 10)
    cluster.mend_log_dir(1, number)
    await _restart(cluster, 1)
    assert cluster.broker(1)._logs.trusted_since == cluster.broker(1).broker_epoch
    await _whole(cluster)
    await _assert_all_read(cluster, 20)


@every_seed(range(3))
@run_by(_simulate)
async def test_a_repaired_directory_is_used_again_but_not_trusted(cluster: VirtualCluster, /, seed: int) -> None:
    await _send(cluster, 0, 10)
    lost = _in(cluster, 1, 1)
    cluster.break_log_dir(1, 1)
    await _send(cluster, 10, 10)
    await cluster.until(lambda: all(1 not in _isr(cluster, p) for p in lost))
    await _restart(cluster, 1)
    assert list(cluster.broker(1)._logs.offline) == [log_dir(1)]
    epoch = cluster.broker(1).broker_epoch
    assert cluster.broker(1)._logs.trusted_since < epoch
    await _send(cluster, 20, 10)
    assert all(1 not in _isr(cluster, p) and _home(cluster, 1, p) is None for p in lost)
    cluster.mend_log_dir(1, 1)
    await _restart(cluster, 1)
    assert not cluster.broker(1)._logs.offline
    assert cluster.broker(1)._logs.trusted_since == cluster.broker(1).broker_epoch > epoch
    await _whole(cluster)
    assert _in(cluster, 1, 1) == lost
    await _send(cluster, 30, 10)
    trusted_since = cluster.broker(1)._logs.trusted_since
    await _restart(cluster, 1)
    assert cluster.broker(1)._logs.trusted_since == trusted_since
    await _whole(cluster)
    await _assert_all_read(cluster, 40)


def _break(cluster: VirtualCluster) -> None:
    cluster.break_log_dir(1, 1)


def _empty(cluster: VirtualCluster) -> None:
    cluster.simulation.host("broker-1").start_process().disk.remove_tree(log_dir(1))


def _leave_out(cluster: VirtualCluster) -> None:
    cluster.own_settings[1] = {"log.dirs": log_dir(0)}


def _replace(cluster: VirtualCluster) -> None:
    cluster.own_settings[1] = {"log.dirs": f"{log_dir(0)},/another"}


async def _comes_back(cluster: VirtualCluster, harm: Callable[[VirtualCluster], None]) -> None:
    await _send(cluster, 0, 10)
    lost, kept = _in(cluster, 1, 1), _in(cluster, 1, 0)
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    await cluster.until(lambda: not cluster.simulation.zookeeper.names(znodes.BROKER_IDS))
    harm(cluster)
    await cluster.start_broker(1)
    await asyncio.sleep(10)
    assert all(cluster.state(p).leader == NO_LEADER and cluster.state(p).isr for p in lost)
    if harm is _break:  # the other replicas are unaffected; only those in the broken directory are missing
        assert all(cluster.state(p).leader == 1 for p in kept)
        assert all(_home(cluster, 1, p) is None for p in lost)
    await cluster.start_broker(0)
    await cluster.start_broker(2)
    await cluster.until(lambda: NO_LEADER not in _leaders(cluster).values())
    await _send(cluster, 10, 10)
    if harm is _break:
        cluster.mend_log_dir(1, 1)
        await _restart(cluster, 1)
    await _whole(cluster)
    await _assert_all_read(cluster, 20)
    unclean = [cluster.broker(b).controller for b in cluster.living()]
    assert sum(controller.unclean_elections for controller in unclean if controller is not None) == 0


@pytest.mark.parametrize("harm", [_break, _empty, _leave_out, _replace])
def test_a_broker_that_comes_back_without_a_directory_leads_nothing_that_was_in_it(
    harm: Callable[[VirtualCluster], None],
) -> None:
    _simulate(partial(_comes_back, harm=harm))


@pytest.mark.parametrize(
    ("name", "harm"),
    [("replica-in-a-broken-directory-made-anew", _break), ("directories-do-not-know-each-other", _leave_out)],
)
def test_a_mutant_that_recreates_replicas_is_caught(name: str, harm: Callable[[VirtualCluster], None]) -> None:
    with planted(name), pytest.raises(AssertionError):
        _simulate(partial(_comes_back, harm=harm))


@run_by(_simulate)
async def test_one_more_directory_costs_no_trust(cluster: VirtualCluster, /) -> None:
    before = cluster.broker(1)._logs.trusted_since
    cluster.own_settings[1] = {"log.dirs": f"{log_dir(0)},{log_dir(1)},/another"}
    await _restart(cluster, 1)
    assert cluster.broker(1)._logs.trusted_since == before
    await _create(cluster, "more")
    homes = [_home(cluster, 1, p) for p in (*_partitions(), *_partitions("more"))]
    assert [homes.count(path) for path in (log_dir(0), log_dir(1), "/another")] == [4, 4, 4]


async def _reassign(cluster: VirtualCluster, partitions: list[TopicPartition], replicas: list[int]) -> None:
    world = cluster.client("admin")

    async def reassign() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.alter_partition_reassignments(dict.fromkeys(partitions, replicas))
            while await admin.list_partition_reassignments():
                await asyncio.sleep(0.1)

    await world.process.run(reassign())


@pytest.mark.parametrize("is_made_anew", ["by a reassignment", "without the directory"])
@run_by(_simulate)
async def test_a_replica_recreated_while_its_directory_was_away_stays_the_served_one(
    cluster: VirtualCluster, /, is_made_anew: str
) -> None:
    """The longer log is served, because the directory's replica is older. That one is kept under another name."""

    await _send(cluster, 0, 10)
    lost = _in(cluster, 1, 1)
    if is_made_anew == "by a reassignment":
        cluster.kill_broker(1)
        _break(cluster)
        await cluster.start_broker(1)
        await _reassign(cluster, lost, [0, 2])
        await _reassign(cluster, lost, [0, 1, 2])
    else:
        _leave_out(cluster)
        await _restart(cluster, 1)
    await _whole(cluster)
    assert _in(cluster, 1, 0) == _partitions()
    await _send(cluster, 10, 10)
    cluster.mend_log_dir(1, 1)
    cluster.own_settings.clear()
    await _restart(cluster, 1)
    assert cluster.broker(1)._logs.trusted_since == cluster.broker(1).broker_epoch
    await _whole(cluster)
    assert _in(cluster, 1, 0) == _partitions()
    await _send(cluster, 20, 10)
    await _assert_all_read(cluster, 30)
    strays = {name.split("/")[-2].partition(".")[0] for name in _files(cluster, 1, log_dir(1)) if "-stray/" in name}
    assert strays == set(map(str, lost))
    await _restart(cluster, 1)
    await _whole(cluster)


@pytest.mark.parametrize("comes_back_first", [True, False])
@run_by(_simulate)
async def test_a_topic_is_served_though_its_predecessor_returns_with_a_left_out_directory(
    cluster: VirtualCluster, /, comes_back_first: bool
) -> None:
    await _send(cluster, 100, 10)
    strays = _in(cluster, 1, 1)
    _leave_out(cluster)
    await _restart(cluster, 1)
    await _whole(cluster)
    await _delete(cluster)
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC)))
    cluster.own_settings.clear()
    if comes_back_first:
        await _restart(cluster, 1)
        await _create(cluster, TOPIC)
        await _send(cluster, 0, 10)
    else:
        await _create(cluster, TOPIC)
        await _send(cluster, 0, 10)
        await _restart(cluster, 1)
    await _whole(cluster)
    await _assert_all_read(cluster, 10)
    await _restart(cluster, 1)
    await _whole(cluster)
    kept = {name.split("/")[-2] for name in _files(cluster, 1, log_dir(1)) if "-stray/" in name}
    assert sorted(name.partition(".")[0] for name in kept) == sorted(map(str, strays))


@run_by(_simulate)
async def test_a_deletion_ends_only_when_the_broken_directory_returns_and_new_topics_avoid_it(
    cluster: VirtualCluster, /
) -> None:
    await cluster.stop_broker(1)
    cluster.break_log_dir(1, 1)
    await cluster.start_broker(1)
    await _create(cluster, "more")
    assert {_home(cluster, 1, p) for p in _partitions("more")} == {log_dir(0)}
    await _delete(cluster)
    await asyncio.sleep(10)
    assert cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC))
    cluster.mend_log_dir(1, 1)
    await _restart(cluster, 1)
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC)))
    assert not [name for name in _files(cluster, 1, log_dir(1)) if f"/{TOPIC}-" in name and "-delete" not in name]


@every_seed(range(3))
@run_by(_simulate)
async def test_both_directories_recover_from_kills_and_power_cuts(cluster: VirtualCluster, /, seed: int) -> None:
    sending = asyncio.ensure_future(_send(cluster, 0, 60))
    for broker_id in cluster.broker_ids:
        await asyncio.sleep(0.2)
        if broker_id == 1:
            cluster.power_cut(broker_id)
        else:
            cluster.kill_broker(broker_id)
        await cluster.start_broker(broker_id)
        await _whole(cluster)
    await sending
    await _assert_all_read(cluster, 60)
