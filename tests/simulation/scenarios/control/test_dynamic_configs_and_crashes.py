"""Settings are changed while a broker dies or is cut off, or while the topic is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from minibroker.broker.settings.dynamic_config import DynamicConfigManager
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigErrors
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.world import Create, Operation, ZooKeeperSession
from minibroker.protocol.znodes import TopicZnode
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.control.test_dynamic_configs import (
    ALL,
    ORDERS,
    P0,
    play,
    segment_bytes,
    set_to,
    until_all_have,
)

CONFIG = znodes.topic_config_path("orders")


def is_change(operations: Sequence[Operation]) -> bool:
    return any(isinstance(o, Create) and o.path == znodes.CONFIG_CHANGE_PREFIX for o in operations)


def at_the_write(cluster: VirtualCluster, moment: str, strike: Callable[[int], None]) -> list[int]:
    """Call `strike` once with the broker that writes settings, before or after ZooKeeper executes the write. Return the
    list of brokers struck."""
    struck: list[int] = []

    def hook(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if is_change(operations) and not struck:
            struck.append(int(session.owner.partition("#")[0].removeprefix("broker-")))
            strike(struck[0])

    setattr(cluster.simulation.zookeeper, moment, hook)
    return struck


# --- Kill at every point -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("blow", ["killed", "connection lost", "session expired", "controller killed", "all killed"])
@run_by(play)
async def test_all_brokers_have_the_new_settings_though_the_writer_dies_or_is_cut_off(
    cluster: VirtualCluster, admin: Admin, /, moment: str, blow: str, seed: int
) -> None:
    def strike(writer: int) -> None:
        victims = {"controller killed": cluster.active_controllers(), "all killed": list(cluster.broker_ids)}
        if blow == "connection lost":
            cluster.simulation.zookeeper.lose_connections(host_name(writer))
        elif blow == "session expired":
            cluster.simulation.zookeeper.expire(host_name(writer))
        else:
            killed.extend(victims.get(blow, [writer]))
            for broker_id in killed:
                asyncio.get_running_loop().call_soon(cluster.kill_broker, broker_id)

    killed: list[int] = []
    struck = at_the_write(cluster, moment, strike)
    altering = asyncio.create_task(admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]}))
    await cluster.until(lambda: struck)
    await asyncio.sleep(1)
    for broker_id in killed:
        await cluster.start_broker(broker_id)
    await altering
    await until_all_have(cluster, 5_000)


@pytest.mark.parametrize("operation", range(1, 9))
def test_a_broker_cut_off_at_any_call_while_it_applies_a_change_has_it_in_the_end(operation: int) -> None:
    """The n-th answer that it gets from ZooKeeper after the change is the last one before its connection is lost."""

    async def scenario(cluster: VirtualCluster, admin: Admin) -> None:
        zookeeper = cluster.simulation.zookeeper
        zookeeper.slow_hosts[host_name(2)] = (0.1, 0.1)  # one call every 0.2 s
        altering = asyncio.create_task(admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]}))
        await cluster.until(lambda: len(zookeeper.names(znodes.CONFIG_CHANGES)) == 1)
        await asyncio.sleep(0.1 * operation)
        zookeeper.lose_connections(host_name(2))
        await altering
        await until_all_have(cluster, 5_000)

    play(scenario, seed=operation)


@run_by(play)
async def test_a_change_is_noticed_though_its_notification_is_removed_at_once(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    zookeeper = cluster.simulation.zookeeper

    def remove(writer: int) -> None:
        for name in zookeeper.names(znodes.CONFIG_CHANGES):
            zookeeper.remove(f"{znodes.CONFIG_CHANGES}/{name}")

    at_the_write(cluster, "after", remove)
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
    await until_all_have(cluster, 5_000)


# --- Recreated topics ---------------------------------------------------------------------------------------------


def replace_topic(cluster: VirtualCluster) -> None:
    """Replace the topic's znodes as if it had been recreated just before the write arrives: their versions start
    over."""
    zookeeper = cluster.simulation.zookeeper
    znode = znodes.decode_topic("orders", zookeeper.data(znodes.topic_path("orders")))
    below = f"{znodes.topic_path('orders')}/"
    for path in sorted((p for p in zookeeper.paths() if p.startswith(below)), reverse=True):
        zookeeper.remove(path)
    zookeeper.remove(znodes.topic_path("orders"))
    zookeeper.remove(CONFIG)
    zookeeper.make(znodes.topic_path("orders"), znodes.encode_topic(TopicZnode("x" * 22, znode.partitions)))
    zookeeper.make(znodes.topic_id_path("orders", "x" * 22))
    zookeeper.make(CONFIG, znodes.encode_config({}))


@run_by(play)
async def test_a_late_change_for_a_deleted_topic_does_not_affect_its_successor(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    at_the_write(cluster, "before", lambda writer: replace_topic(cluster))
    with pytest.raises(ConfigErrors) as caught:
        await admin.incremental_alter_configs({ORDERS: [set_to("retention.ms", 1)]})
    error = caught.value.errors[ORDERS]
    assert isinstance(error, BrokerError)
    assert error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert znodes.decode_config(CONFIG, cluster.simulation.zookeeper.data(CONFIG)) == {}


async def made_again_after_it_vanished(cluster: VirtualCluster, admin: Admin) -> None:
    """Delete the znode by hand, so that no broker is ordered to delete its replicas: each still has them when it learns
    of the next topic."""
    zookeeper = cluster.simulation.zookeeper
    await until_all_have(cluster, 3_000)
    below = znodes.topic_path("orders")
    for path in sorted((p for p in zookeeper.paths() if p.startswith(below) or p == CONFIG), reverse=True):
        zookeeper.remove(path)
    while True:
        with suppress(BrokerError):
            await admin.create_topic("orders", assignments=[(0, 1, 2)], configs={"segment.bytes": "5000"})
            break
        await asyncio.sleep(0.1)
    topic = znodes.decode_topic("orders", zookeeper.data(znodes.topic_path("orders")))
    await cluster.until(lambda: all(topic_id(cluster, b) == topic.topic_id for b in cluster.broker_ids))
    assert [segment_bytes(cluster, broker_id) for broker_id in cluster.broker_ids] == [5_000] * 3


def topic_id(cluster: VirtualCluster, broker_id: int) -> str | None:
    replicas = cluster.broker(broker_id)._replicas
    partition = None if replicas is None else replicas.partitions.get(P0)
    return None if partition is None else partition.log.topic_id


def test_a_broker_that_still_has_the_previous_topic_reads_the_settings_of_the_next() -> None:
    play(made_again_after_it_vanished, configs={"segment.bytes": "3000"})


def test_the_mutant_that_keeps_the_settings_of_the_previous_topic_makes_that_fail() -> None:
    with planted("settings-of-the-topic-before"), pytest.raises(AssertionError):
        play(made_again_after_it_vanished, configs={"segment.bytes": "3000"})


# --- A replica that is being created -------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("slow", ["ZooKeeper", "disk"])
@run_by(play)
async def test_a_change_and_a_replica_that_is_being_made_do_not_miss_each_other(
    cluster: VirtualCluster, admin: Admin, /, after_s: float, slow: str
) -> None:
    zookeeper = cluster.simulation.zookeeper
    await asyncio.sleep(1)
    for broker_id in (1, 2):
        if slow == "ZooKeeper":
            zookeeper.slow_hosts[host_name(broker_id)] = (0.05, 0.4)
        else:
            cluster.simulation.host(host_name(broker_id)).disk.faults.sync_delay_s = 0.5
    again = "again"
    creating = asyncio.create_task(admin.create_topic(again, assignments=[(0, 1, 2)]))
    await cluster.until(lambda: zookeeper.has(znodes.topic_path(again)))
    await asyncio.sleep(after_s)
    resource = ORDERS._replace(name=again)
    await admin.incremental_alter_configs({resource: [set_to("segment.bytes", 5_000)]})
    await creating
    zookeeper.slow_hosts.clear()

    def all_have() -> bool:
        partitions = [p for b in cluster.broker_ids for p in cluster.broker(b)._replicas.partitions.values()]  # type: ignore[union-attr]
        of_it = [p for p in partitions if p.topic_partition.topic == again]
        return len(of_it) == 3 and all(p.log.config.segment_bytes == 5_000 for p in of_it)

    await cluster.until(all_have)


# --- Planted bugs --------------------------------------------------------------------------------------------------


async def changed_while_one_is_cut_off(cluster: VirtualCluster, admin: Admin) -> None:
    await admin.incremental_alter_configs({ALL: [set_to("log.retention.ms", 7)]})
    await asyncio.sleep(1)
    cluster.simulation.zookeeper.cut(host_name(2))
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
    await asyncio.sleep(1)
    cluster.simulation.zookeeper.uncut(host_name(2))
    await until_all_have(cluster, 5_000)


def test_a_change_made_while_a_broker_is_cut_off_is_known_there_once_it_is_back() -> None:
    play(changed_while_one_is_cut_off)


def test_the_mutant_that_misses_changes_made_while_it_was_cut_off_is_caught() -> None:
    with planted("change-missed-after-reconnect"), pytest.raises(TimeoutError):
        play(changed_while_one_is_cut_off)


@run_by(play)
async def test_a_change_made_through_any_single_broker_reaches_all(cluster: VirtualCluster, admin: Admin, /) -> None:
    for broker_id in cluster.broker_ids:
        async with Admin(f"{host_name(broker_id)}:{PORT}", world=admin._runtime.world) as one:
            await one.incremental_alter_configs({ORDERS: [ConfigChange.set("segment.bytes", 5_000 + broker_id)]})
        await until_all_have(cluster, 5_000 + broker_id)


@run_by(play)
async def test_a_broker_whose_session_expires_while_it_starts_opens_another(
    cluster: VirtualCluster, admin: Admin, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other component opens a session before the broker is registered, so it would never be registered."""
    expired: list[int] = []
    read = DynamicConfigManager.read_broker_configs

    async def read_after_expiry(self: DynamicConfigManager, session: ZooKeeperSession) -> bool:
        if not expired:
            expired.append(1)
            cluster.simulation.zookeeper.expire(host_name(1))
        return await read(self, session)

    monkeypatch.setattr(DynamicConfigManager, "read_broker_configs", read_after_expiry)
    cluster.kill_broker(1)
    async with asyncio.timeout(60):
        await cluster.start_broker(1)
    assert expired
