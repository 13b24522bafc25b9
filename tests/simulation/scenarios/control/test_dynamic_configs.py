"""Settings that are changed while the cluster runs: every broker applies them, even one that was down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from minibroker.broker.network import quotas
from minibroker.broker.settings import dynamic_config
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigErrors, ConfigResource
from minibroker.client.cli.configs import expected
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import apis, znodes
from minibroker.protocol.apis import Plane
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import ApiVersionsRequest
from minibroker.protocol.model import AlterOperation, ConfigSource, ConfigType, TopicPartition
from minibroker.protocol.records import MAX_BATCH_BYTES
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of, replicas_of, with_client

P0 = TopicPartition("orders", 0)
ORDERS = ConfigResource.of_topic("orders")
ALL = ConfigResource.of_all_brokers()
set_to = ConfigChange.set

Scenario = Callable[["VirtualCluster", "Admin"], Awaitable[None]]


def play(
    scenario: Scenario,
    *,
    seed: int = 1,
    settings: Mapping[str, str] | None = None,
    configs: Mapping[str, str] | None = None,
) -> None:
    """Run the scenario with three brokers and a topic of one partition on all of them."""

    async def client(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", assignments=[(0, 1, 2)], configs=configs or {})
            await scenario(cluster, admin)

    with_client(client, settings=settings, seed=seed)


def segment_bytes(cluster: VirtualCluster, broker_id: int) -> int:
    replicas = replicas_of(cluster, broker_id)
    partition = replicas.partitions.get(P0)
    return 0 if partition is None else partition.log.config.segment_bytes


async def until_all_have(cluster: VirtualCluster, value: int, brokers: tuple[int, ...] = (0, 1, 2)) -> None:
    await cluster.until(lambda: all(segment_bytes(cluster, broker_id) == value for broker_id in brokers))


async def refused(admin: Admin, resource: ConfigResource, *changes: ConfigChange) -> BrokerError:
    with pytest.raises(ConfigErrors) as caught:
        await admin.incremental_alter_configs({resource: changes})
    error = caught.value.errors[resource]
    assert isinstance(error, BrokerError)
    return error


# --- The most work that a client can order ----------------------------------------------------------------------


@run_by(play)
async def test_settings_of_many_unknown_topics_are_denied_without_zookeeper(
    cluster: VirtualCluster, admin: Admin, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    get = VirtualSession.get

    async def counted(self: VirtualSession, path: str, *arguments: Any) -> Any:
        reads.append(path)
        return await get(self, path, *arguments)

    monkeypatch.setattr(VirtualSession, "get", counted)
    unknown = [ConfigResource.of_topic(f"no-{number}") for number in range(500)]
    with pytest.raises(ConfigErrors) as described:
        await admin.describe_configs(unknown)
    assert len(described.value.errors) == 500
    with pytest.raises(ConfigErrors) as altered:
        await admin.incremental_alter_configs({resource: [set_to("retention.ms", 5)] for resource in unknown})
    codes = {error.code for error in altered.value.errors.values() if isinstance(error, BrokerError)}
    assert codes == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert sum("no-" in path for path in reads) <= 60


@run_by(play)
async def test_notifications_of_changes_do_not_pile_up(
    cluster: VirtualCluster, admin: Admin, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_config, "MOST_CHANGES", 5)
    for number in range(20):
        await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000 + number)]})
    await until_all_have(cluster, 5_019)
    await cluster.until(lambda: len(cluster.simulation.zookeeper.names(znodes.CONFIG_CHANGES)) <= 5)


# --- Every broker applies a change ------------------------------------------------------------------------------


@run_by(play)
async def test_a_topic_setting_soon_applies_on_every_broker_and_names_its_source(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
    await until_all_have(cluster, 5_000)
    entry = (await admin.describe_configs([ORDERS], synonyms=True))[ORDERS]["segment.bytes"]
    assert (entry.value, entry.source) == ("5000", ConfigSource.DYNAMIC_TOPIC_CONFIG)
    assert [s.source for s in entry.synonyms] == [
        ConfigSource.DYNAMIC_TOPIC_CONFIG,
        ConfigSource.DEFAULT_CONFIG,
    ]
    await admin.incremental_alter_configs({ORDERS: [ConfigChange.delete("segment.bytes")]})
    await until_all_have(cluster, 1024**3)


@run_by(play, settings={"log.segment.bytes": "1000"})
async def test_precedence_is_topic_then_broker_then_default_then_configuration_file(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    own = ConfigResource.of_broker(1)
    name = "log.segment.bytes"
    assert segment_bytes(cluster, 1) == 1_000
    await admin.incremental_alter_configs({ALL: [set_to(name, 2_000)]})
    await until_all_have(cluster, 2_000)
    await admin.incremental_alter_configs({own: [set_to(name, 3_000)]})
    await until_all_have(cluster, 3_000, (1,))
    assert segment_bytes(cluster, 0) == 2_000
    entry = (await admin.describe_configs([own], synonyms=True))[own][name]
    assert [(int(s.value or 0), s.source) for s in entry.synonyms] == [
        (3_000, ConfigSource.DYNAMIC_BROKER_CONFIG),
        (2_000, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
        (1_000, ConfigSource.STATIC_BROKER_CONFIG),
        (1024**3, ConfigSource.DEFAULT_CONFIG),
    ]
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 4_000)]})
    await until_all_have(cluster, 4_000)
    await admin.incremental_alter_configs({ORDERS: [ConfigChange.delete("segment.bytes")]})
    await until_all_have(cluster, 3_000, (1,))
    await until_all_have(cluster, 2_000, (0, 2))


@run_by(play, settings={"log.cleaner.max.compaction.lag.ms": "10"})
async def test_a_broker_setting_may_be_valid_only_with_the_settings_for_all_brokers(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    own, least = ConfigResource.of_broker(1), set_to("log.cleaner.min.compaction.lag.ms", 20)
    assert "exceeds" in str(await refused(admin, own, least))
    await admin.incremental_alter_configs({ALL: [set_to("log.cleaner.max.compaction.lag.ms", 30)]})
    await admin.incremental_alter_configs({own: [least]})
    await cluster.until(lambda: replica_of(cluster, 1, P0).log.config.min_compaction_lag_ms == 20)


@run_by(play)
async def test_a_broker_that_was_down_has_the_change_when_it_is_back(cluster: VirtualCluster, admin: Admin, /) -> None:
    cluster.kill_broker(2)
    await admin.incremental_alter_configs(
        {ORDERS: [set_to("segment.bytes", 5_000)], ALL: [set_to("log.retention.ms", 7)]}
    )
    await until_all_have(cluster, 5_000, (0, 1))
    broker = await cluster.start_broker(2)
    await until_all_have(cluster, 5_000)
    replicas = broker._replicas
    assert replicas is not None
    partition = replicas.partitions.get(P0)
    assert partition is not None
    assert partition.log.config.retention_ms == 7


@pytest.mark.parametrize("away_s", [1, 30])
@run_by(play)
async def test_a_broker_cut_off_from_zookeeper_has_the_change_once_it_is_reconnected(
    cluster: VirtualCluster, admin: Admin, /, away_s: int
) -> None:
    await asyncio.sleep(1)
    cluster.simulation.zookeeper.cut(host_name(2))
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
    await until_all_have(cluster, 5_000, (0, 1))
    # After fifteen minutes the notification is gone; the broker that comes back does not find it.
    zookeeper = cluster.simulation.zookeeper
    for name in zookeeper.names(znodes.CONFIG_CHANGES):
        zookeeper.remove(f"{znodes.CONFIG_CHANGES}/{name}")
    await asyncio.sleep(away_s)
    assert segment_bytes(cluster, 2) == 1024**3
    cluster.simulation.zookeeper.uncut(host_name(2))
    await until_all_have(cluster, 5_000)


# --- Invalid changes and znodes -----------------------------------------------------------------------------------


@run_by(play)
async def test_an_invalid_change_is_refused_with_value_rule_and_remedy(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    me = ConfigResource.of_broker(0)
    for resource, change, code, said in (
        (ORDERS, set_to("segment.bytes", "many"), ErrorCode.INVALID_CONFIG, "segment.bytes='many': give a whole"),
        (ORDERS, set_to("segment.byte", 5), ErrorCode.INVALID_CONFIG, "did you mean segment.bytes?"),
        (ORDERS, ConfigChange.delete("segment.byte"), ErrorCode.INVALID_CONFIG, "did you mean segment.bytes?"),
        (ORDERS, set_to("min.insync.replicas", 0), ErrorCode.INVALID_CONFIG, "min.insync.replicas"),
        (ORDERS, set_to("durability", "synced"), ErrorCode.INVALID_CONFIG, "Create another topic"),
        (ORDERS, ConfigChange.append("segment.bytes", "5"), ErrorCode.INVALID_CONFIG, "not a list"),
        (ORDERS, ConfigChange("segment.bytes", AlterOperation.SET), ErrorCode.INVALID_REQUEST, "has no value"),
        (me, set_to("num.partitions", 9), ErrorCode.INVALID_CONFIG, "start it again"),
        (me, set_to("log.retention.ms", -2), ErrorCode.INVALID_CONFIG, "-1 or more"),
        (ALL, set_to("log.cleaner.max.compaction.lag.ms", 0), ErrorCode.INVALID_CONFIG, "1 or more"),
        (ConfigResource.of_topic("none"), set_to("retention.ms", 5), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "none"),
    ):
        error = await refused(admin, resource, change)
        assert error.code is code, change
        assert said in str(error)
    error = await refused(admin, ORDERS, set_to("retention.ms", 5), set_to("retention.ms", 6))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert not cluster.simulation.zookeeper.names(znodes.CONFIG_CHANGES)


@run_by(play)
async def test_validate_only_changes_nothing(cluster: VirtualCluster, admin: Admin, /) -> None:
    await admin.incremental_alter_configs({ORDERS: [set_to("retention.ms", 5)]}, validate_only=True)
    assert (await admin.describe_configs([ORDERS]))[ORDERS]["retention.ms"].value == "604800000"


@run_by(play)
async def test_list_settings_are_appended_to_and_subtracted_from_the_value_in_force(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    async def policy(change: ConfigChange) -> str | None:
        await admin.incremental_alter_configs({ORDERS: [change]})
        return (await admin.describe_configs([ORDERS], names=["cleanup.policy"]))[ORDERS]["cleanup.policy"].value

    assert await policy(ConfigChange.append("cleanup.policy", "compact")) == "delete,compact"
    assert await policy(ConfigChange.append("cleanup.policy", "compact")) == "delete,compact"
    assert await policy(ConfigChange.subtract("cleanup.policy", "delete")) == "compact"
    assert await policy(ConfigChange.subtract("cleanup.policy", "compact")) == ""
    await cluster.until(lambda: not replica_of(cluster, 1, P0).log.config.compact)
    assert not replica_of(cluster, 1, P0).log.config.delete


def test_settings_edited_to_nonsense_are_logged_once_and_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: VirtualCluster, admin: Admin) -> None:
        await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
        await until_all_have(cluster, 5_000)
        zookeeper = cluster.simulation.zookeeper
        path = znodes.topic_config_path("orders")
        for number, data in enumerate((b"{", znodes.encode_config({"segment.bytes": "lots"}))):
            zookeeper.remove(path)
            zookeeper.make(path, data)
            notification = znodes.encode_config_change(path) if number else b"nonsense"
            zookeeper.make(f"{znodes.CONFIG_CHANGE_PREFIX}x{number}", notification)
            await asyncio.sleep(2)
        assert all(segment_bytes(cluster, broker_id) == 5_000 for broker_id in (0, 1, 2))
        lines = [r.getMessage() for r in caplog.records if "are invalid; the previous" in r.getMessage()]
        assert len(lines) == 6
        assert "segment.bytes='lots': give a whole number" in lines[-1]
        await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 6_000)]})
        await until_all_have(cluster, 6_000)

    with caplog.at_level(logging.WARNING, "minibroker.config"):
        play(scenario)


@run_by(play)
async def test_settings_edited_to_nonsense_are_described_with_the_values_in_force_and_the_problem(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    zookeeper = cluster.simulation.zookeeper
    of_broker = ConfigResource.of_broker(1)
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
    for resource in (of_broker, ALL):
        await admin.incremental_alter_configs({resource: [set_to("log.roll.ms", 5_000)]})
    await until_all_have(cluster, 5_000)
    for resource, path, name in (
        (ORDERS, znodes.topic_config_path("orders"), "segment.bytes"),
        (of_broker, znodes.broker_config_path(1), "log.roll.ms"),
        (ALL, znodes.broker_config_path(None), "log.roll.ms"),
    ):
        before = (await admin.describe_configs([resource]))[resource]
        assert (before[name].value, before[name].problem) == ("5000", None)
        zookeeper.make(path, znodes.encode_config({name: "lots", "typo": "x"}))
        entries = (await admin.describe_configs([resource]))[resource]
        assert entries[name].value == "5000"
        for problem in (entries[name].problem, entries["typo"].problem):
            assert problem is not None
            assert f"the settings in {path} are invalid; the previous ones stay in force" in problem
        assert all(entry.problem is None for entry in entries.values() if entry.name not in (name, "typo"))
        zookeeper.make(path, znodes.encode_config({name: "5000"}))
        assert (await admin.describe_configs([resource]))[resource][name] == before[name]


def test_malformed_notifications_are_logged_once_and_not_by_brokers_that_start_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lines(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    async def scenario(cluster: VirtualCluster, admin: Admin) -> None:
        notifications = (b"nonsense", b'{"version":2,"entity_path":"hosts/10.0.0.1"}')
        for number, data in enumerate(notifications):
            cluster.simulation.zookeeper.make(f"{znodes.CONFIG_CHANGE_PREFIX}x{number}", data)
        await asyncio.sleep(2)
        for _ in range(2):
            assert lines("a notification of changes is malformed") == 3
            assert lines("/config/hosts/10.0.0.1 holds no settings") == 3
            await cluster.stop_broker(2)
            await cluster.start_broker(2)
            await asyncio.sleep(5)

    with caplog.at_level(logging.WARNING, "minibroker.config"):
        play(scenario)


@run_by(play)
async def test_a_topic_with_invalid_settings_is_refused_with_one_log_line_for_all_orders(
    cluster: VirtualCluster, admin: Admin, /, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.stop_broker(2)
    cluster.simulation.zookeeper.make(znodes.topic_config_path("orders"), b"nonsense")
    await cluster.start_broker(2)
    await asyncio.sleep(2)
    for _ in range(3):
        await admin.alter_partition_reassignments({P0: [0, 1, 2]})
        await admin.alter_partition_reassignments({P0: [1, 0, 2]})
        await asyncio.sleep(2)
    refused = [record for record in caplog.records if "LeaderAndIsr for topic orders refused" in record.getMessage()]
    assert len(refused) == 1


@run_by(play)
async def test_an_unknown_setting_written_by_hand_is_described_without_its_value_and_deletable(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    zookeeper = cluster.simulation.zookeeper
    of_broker = ConfigResource.of_broker(1)
    paths = {
        ORDERS: znodes.topic_config_path("orders"),
        of_broker: znodes.broker_config_path(1),
        ALL: znodes.broker_config_path(None),
    }
    for resource, path in paths.items():
        await admin.incremental_alter_configs({resource: []})
        zookeeper.remove(path)
        zookeeper.make(path, znodes.encode_config({"typo": "x"}))
        entry = (await admin.describe_configs([resource]))[resource]["typo"]
        assert (entry.value, entry.type, entry.is_sensitive) == (None, ConfigType.UNKNOWN, True)
        await admin.incremental_alter_configs({resource: [ConfigChange.delete("typo")]})
        assert "typo" not in (await admin.describe_configs([resource]))[resource]


WITHOUT_MEANING = {
    "file.delete.delay.ms": "60000",
    "message.format.version": "0.10.0.0",
    "preallocate": "true",
    "segment.index.bytes": "10485760",
    "message.downconversion.enable": "false",
    "remote.storage.enable": "false",
    "local.retention.ms": "-2",
    "local.retention.bytes": "-2",
}
WITH_MEANING = {
    "flush.ms": "1000",
    "flush.messages": "10",
    "compression.type": "gzip",
    "compression.gzip.level": "9",
    "compression.lz4.level": "9",
    "compression.zstd.level": "3",
    "message.timestamp.type": "LogAppendTime",
    "message.timestamp.before.max.ms": "1000",
    "message.timestamp.after.max.ms": "1000",
    "message.timestamp.difference.max.ms": "1000",
}


@run_by(play)
async def test_each_described_topic_setting_has_a_value_that_may_be_set(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    """Tools read all settings, change one, and write all of them back (AlterConfigs)."""

    entries = (await admin.describe_configs([ORDERS]))[ORDERS]
    assert [name for name, entry in entries.items() if entry.value is None] == []
    changes = [set_to(name, entry.value) for name, entry in entries.items()]
    await admin.incremental_alter_configs({ORDERS: changes})


@run_by(play)
async def test_kafkas_settings_are_accepted_and_those_without_effect_are_marked(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    given = WITHOUT_MEANING | WITH_MEANING
    await admin.incremental_alter_configs({ORDERS: [set_to(name, value) for name, value in given.items()]})
    entries = (await admin.describe_configs([ORDERS], documentation=True))[ORDERS]
    assert {name: entries[name].value for name in given} == given
    assert {name for name, entry in entries.items() if entry.is_without_effect} == WITHOUT_MEANING.keys()
    await cluster.until(lambda: replica_of(cluster, 1, P0).log.config.flush_ms == 1_000)

    own = ConfigResource.of_broker(1)
    of_brokers = {"background.threads": "5", "log.segment.delete.delay.ms": "7", "plugin.name": "x"}
    await admin.incremental_alter_configs({own: [set_to(n, v) for n, v in of_brokers.items()]})
    await admin.incremental_alter_configs({ALL: [set_to("another.plugin", "x"), set_to("log.roll.ms", 5_000)]})
    entries = (await admin.describe_configs([own], documentation=True))[own]
    shown = {name: entries[name].value for name in (*of_brokers, "another.plugin")}
    assert shown == of_brokers | {"plugin.name": None, "another.plugin": None}
    assert all(entries[name].is_without_effect for name in shown)
    assert (entries["plugin.name"].is_sensitive, entries["plugin.name"].problem) == (True, None)
    assert (entries["log.roll.ms"].value, entries["log.roll.ms"].is_without_effect) == ("5000", False)


@run_by(play, configs={"segment.bytes": "4000"})
async def test_a_limit_that_an_earlier_release_accepted_is_lowered_without_other_changes(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    """If the value were refused, the topic would have no leader, and a broker would ignore the other settings in the
    znode."""

    zookeeper = cluster.simulation.zookeeper
    await admin.incremental_alter_configs({ALL: []})
    for path, limit, segments in (
        (znodes.topic_config_path("orders"), "max.message.bytes", "segment.bytes"),
        (znodes.broker_config_path(None), "message.max.bytes", "log.segment.bytes"),
    ):
        zookeeper.remove(path)
        zookeeper.make(path, znodes.encode_config({limit: "400000000", segments: "5000"}))
    await cluster.stop_broker(1)
    await cluster.start_broker(1)
    await until_all_have(cluster, 5_000, (1,))
    partition = replica_of(cluster, 1, P0)
    assert partition.log.config.max_message_bytes == MAX_BATCH_BYTES
    assert cluster.broker(1)._configs.config.message_max_bytes == MAX_BATCH_BYTES
    await admin.incremental_alter_configs({ORDERS: [set_to("retention.ms", 5)]})
    found = (await admin.describe_configs([ORDERS], names=["max.message.bytes"]))[ORDERS]
    assert found["max.message.bytes"].value == str(MAX_BATCH_BYTES)


# --- Concurrent changes and recreated topics ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
@run_by(play)
async def test_concurrent_changes_of_different_settings_all_survive(
    cluster: VirtualCluster, admin: Admin, /, seed: int
) -> None:
    wanted = {"retention.ms": 5, "retention.bytes": 6, "segment.ms": 7, "max.message.bytes": 8, "segment.bytes": 90}
    await asyncio.gather(
        *(admin.incremental_alter_configs({ORDERS: [set_to(name, value)]}) for name, value in wanted.items())
    )
    found = (await admin.describe_configs([ORDERS], names=list(wanted)))[ORDERS]
    assert {name: int(entry.value or -1) for name, entry in found.items()} == wanted


@run_by(play)
async def test_a_recreated_topic_has_none_of_the_settings_of_its_predecessor(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 5_000)]})
    cluster.kill_broker(2)
    await until_all_have(cluster, 5_000, (0, 1))
    with pytest.raises(BrokerError, match="not gone yet"):  # the deletion waits for broker 2
        await admin.delete_topic("orders")
    await cluster.start_broker(2)
    while True:
        try:
            await admin.create_topic("orders", assignments=[(0, 1, 2)])
            break
        except BrokerError:  # the old topic is still being deleted
            await asyncio.sleep(0.1)
    await until_all_have(cluster, 1024**3)
    found = (await admin.describe_configs([ORDERS], names=["segment.bytes"]))[ORDERS]["segment.bytes"]
    assert found.source is ConfigSource.DEFAULT_CONFIG


# --- Effects of a change ------------------------------------------------------------------------------------------


async def acknowledged(cluster: VirtualCluster, world: VirtualWorld, value: bytes) -> bool:
    async with Producer(
        cluster.bootstrap, world=world, delivery_timeout_ms=3_000, request_timeout_ms=1_000
    ) as producer:
        try:
            await producer.send("orders", value, partition=0)
        except Exception:  # noqa: BLE001 - whichever it is
            return False
    return True


@run_by(play)
async def test_with_more_replicas_required_nothing_is_acknowledged_and_with_fewer_again(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    world = cluster.client("producer")
    cluster.kill_broker(2)
    await cluster.until(lambda: 2 not in cluster.state(P0).isr)
    assert await world.process.run(acknowledged(cluster, world, b"with two of two"))
    await admin.incremental_alter_configs({ORDERS: [set_to("min.insync.replicas", 3)]})
    await asyncio.sleep(1)
    assert not await world.process.run(acknowledged(cluster, world, b"with two of three"))
    cluster.kill_broker(1)
    await cluster.until(lambda: cluster.state(P0).isr == (0,))
    assert cluster.state(P0).eligible == (1,)
    await admin.incremental_alter_configs({ORDERS: [set_to("min.insync.replicas", 1)]})
    await cluster.until(lambda: cluster.state(P0).eligible == ())
    assert await world.process.run(acknowledged(cluster, world, b"with one of one"))


@pytest.mark.parametrize("resource", [ORDERS, ALL])
@run_by(play)
async def test_min_insync_replicas_is_capped_by_the_number_of_replicas(
    cluster: VirtualCluster, admin: Admin, /, resource: ConfigResource
) -> None:
    """Kafka's `effectiveMinIsr` does the same: tests use brokers with production settings and topics of one replica."""

    world = cluster.client("producer")
    await admin.incremental_alter_configs({resource: [set_to("min.insync.replicas", 7)]})
    await asyncio.sleep(1)
    assert await world.process.run(acknowledged(cluster, world, b"with three of three"))
    cluster.kill_broker(2)
    await cluster.until(lambda: 2 not in cluster.state(P0).isr)
    assert not await world.process.run(acknowledged(cluster, world, b"with two of three"))


@pytest.mark.parametrize("resource", [ORDERS, ALL])
@run_by(play, settings={"replica.lag.time.max.ms": "3000"})
async def test_allowing_unclean_elections_gives_a_leaderless_partition_a_leader_at_once(
    cluster: VirtualCluster, admin: Admin, /, resource: ConfigResource
) -> None:
    await admin.incremental_alter_configs({ORDERS: [set_to("min.insync.replicas", 1)]})
    for broker_id in (1, 2):
        cluster.kill_broker(broker_id)
    await cluster.until(lambda: cluster.state(P0).isr == (0,))
    await cluster.until(lambda: cluster.state(P0).eligible == ())
    await asyncio.gather(cluster.start_broker(1), asyncio.sleep(0))
    cluster.kill_broker(0)
    await cluster.until(lambda: cluster.state(P0).leader == -1)
    await admin.incremental_alter_configs({resource: [set_to("unclean.leader.election.enable", True)]})
    await cluster.until(lambda: cluster.state(P0).leader in (1, 2), within_s=3)


@run_by(play)
async def test_a_notification_is_deleted_after_a_quarter_of_an_hour(cluster: VirtualCluster, admin: Admin, /) -> None:
    await admin.incremental_alter_configs({ORDERS: [set_to("retention.ms", 5)]})
    await asyncio.sleep(14 * 60)
    assert len(cluster.simulation.zookeeper.names(znodes.CONFIG_CHANGES)) == 1
    await asyncio.sleep(2 * 60)
    assert cluster.simulation.zookeeper.names(znodes.CONFIG_CHANGES) == []


async def produce(cluster: VirtualCluster, world: VirtualWorld, count: int, size: int = 100) -> None:
    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(count):
            await producer.send("orders", b"x" * size, key=b"k%d" % (number % 2), partition=0)


@run_by(play, settings={"log.retention.check.interval.ms": "500", "log.segment.bytes": "1000"})
async def test_records_expire_once_their_topic_says_so(cluster: VirtualCluster, admin: Admin, /) -> None:
    world = cluster.client("producer")
    await world.process.run(produce(cluster, world, 50))
    await asyncio.sleep(5)
    assert replica_of(cluster, 0, P0).log.log_start_offset == 0
    await admin.incremental_alter_configs({ORDERS: [set_to("retention.ms", 1_000)]})
    await cluster.until(lambda: all(replica_of(cluster, b, P0).log.log_start_offset > 30 for b in cluster.broker_ids))


@run_by(play, settings={"replica.lag.time.max.ms": "3000", "replica.fetch.max.bytes": "5000"})
async def test_a_replica_catches_up_at_the_rate_that_is_set_and_faster_when_it_is_raised(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    world = cluster.client("producer")
    throttled = set_to("leader.replication.throttled.replicas", "*")
    await admin.incremental_alter_configs(
        {ORDERS: [throttled], ALL: [set_to("leader.replication.throttled.rate", 5_000)]}
    )
    cluster.kill_broker(2)
    await cluster.until(lambda: 2 not in cluster.state(P0).isr)
    await world.process.run(produce(cluster, world, 200, 1_000))
    await cluster.start_broker(2)
    await asyncio.sleep(10)
    assert 2 not in cluster.state(P0).isr
    assert 0 < replica_of(cluster, 2, P0).log.size < 100_000
    await admin.incremental_alter_configs({ALL: [ConfigChange.delete("leader.replication.throttled.rate")]})
    await cluster.until(lambda: 2 in cluster.state(P0).isr, within_s=3)


async def ask(world: VirtualWorld) -> None:
    connection = await open_connection(world.network, host_name(1), PORT, client_id="x", timeout_s=2)
    await connection.request(apis.API_VERSIONS, ApiVersionsRequest(), timeout_s=2)
    connection.close()


@run_by(play)
async def test_network_tasks_and_connection_limits_follow_their_settings(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    server = cluster.broker(1)._server
    [acceptor] = server._data_acceptors
    for handlers, processors in ((20, 5), (1, 1), (4, 2)):
        await admin.incremental_alter_configs(
            {ALL: [set_to("num.io.threads", handlers), set_to("num.network.threads", processors)]}
        )
        await cluster.until(lambda: server.planes[Plane.DATA].pool.size == handlers)  # noqa: B023
        assert len(acceptor.processors) == processors
        for _ in range(40):
            await admin.describe_configs([ConfigResource.of_broker(1)])
        pool = server.planes[Plane.DATA].pool
        assert sum(not task.done() for task in pool._tasks) <= max(handlers, 2)
        assert 0 <= server.planes[Plane.DATA].pool.idle_ratio() <= 1
    open_now = server.planes[Plane.DATA].quotas.clients
    await admin.incremental_alter_configs({ConfigResource.of_broker(1): [set_to("max.connections", open_now)]})
    world = cluster.client("another")
    await asyncio.sleep(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(quotas, "MIN_IDLE_S", 1_000.0)  # nobody gives way
        with pytest.raises(NetworkError):
            await ask(world)
    await admin.incremental_alter_configs({ConfigResource.of_broker(1): [ConfigChange.delete("max.connections")]})
    await asyncio.sleep(1)
    await ask(world)


@run_by(play, settings={"listener.name.plaintext.max.connections": "900"})
async def test_limits_of_a_listener_and_of_a_host_are_shown_and_changed(
    cluster: VirtualCluster, admin: Admin, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MIN_IDLE_S", 1_000.0)
    own, world = ConfigResource.of_broker(1), cluster.client("another")
    limit, rate = "listener.name.plaintext.max.connections", "listener.name.plaintext.max.connection.creation.rate"
    overrides = "max.connections.per.ip.overrides"
    server = cluster.broker(1)._server
    assert server._settings.max_connections_of_listeners == {"PLAINTEXT": 900}
    entry = (await admin.describe_configs([own], documentation=True))[own][limit]
    assert (entry.value, entry.source, entry.is_read_only) == ("900", ConfigSource.STATIC_BROKER_CONFIG, False)
    assert (entry.type, entry.is_without_effect, entry.problem) == (ConfigType.INT, False, None)

    assert rate not in (await admin.describe_configs([own]))[own]
    assert await expected(admin, ALL, [set_to(rate, 500)]) == ({}, [])
    await admin.incremental_alter_configs({ALL: [set_to(limit, 1), set_to(rate, 500)]})
    await cluster.until(lambda: server._settings.max_connections_of_listeners == {"PLAINTEXT": 1})
    assert server._settings.max_connection_creation_rate_of_listeners == {"PLAINTEXT": 500}
    shown = (await admin.describe_configs([ALL]))[ALL]
    assert {name: each.value for name, each in shown.items()} == {limit: "1", rate: "500"}
    with pytest.raises(NetworkError):
        await ask(world)
    await admin.incremental_alter_configs({ALL: [ConfigChange.delete(limit)]})
    await cluster.until(lambda: server._settings.max_connections_of_listeners == {"PLAINTEXT": 900})
    await ask(world)

    address = cluster.simulation.host("another").address
    for host in (address, "another"):
        await admin.incremental_alter_configs({own: [set_to(overrides, f"{host}:0")]})
        await cluster.until(lambda: server.planes[Plane.DATA].quotas._overrides == {address: 0})
        with pytest.raises(NetworkError):
            await ask(world)
        await admin.incremental_alter_configs({own: [ConfigChange.delete(overrides)]})
        await cluster.until(lambda: server.planes[Plane.DATA].quotas._overrides == {})
        await ask(world)
    assert (await refused(admin, own, set_to(overrides, "nonsense"))).code == ErrorCode.INVALID_CONFIG


@run_by(play)
async def test_a_changed_advertised_address_is_used_at_once(cluster: VirtualCluster, admin: Admin, /) -> None:
    own, name = ConfigResource.of_broker(1), "advertised.listeners"
    address = cluster.simulation.host(host_name(1)).address
    for nonsense, said in (
        ("NONE://a:1", "not among listeners"),
        ("PLAINTEXT://0.0.0.0:1", "not an address to connect"),
    ):
        assert said in str(await refused(admin, own, set_to(name, nonsense)))
    assert "by its id" in str(await refused(admin, ALL, set_to(name, f"PLAINTEXT://{address}:{PORT}")))
    world = cluster.client("producer")

    def knows(broker_id: int, host: str) -> bool:
        endpoint = cluster.broker(broker_id)._metadata.endpoint(1)
        return endpoint is not None and (endpoint.host, endpoint.port) == (host, PORT)

    for change, host in (
        (set_to(name, f"PLAINTEXT://{address}:{PORT}"), address),
        (ConfigChange.delete(name), host_name(1)),
    ):
        before = cluster.broker(1).broker_epoch
        await admin.incremental_alter_configs({own: [change]})
        await cluster.until(lambda: cluster.broker(1).broker_epoch > before, within_s=5)  # noqa: B023
        await cluster.until(lambda: all(knows(b, host) for b in cluster.broker_ids), within_s=5)  # noqa: B023
        await cluster.until(lambda: len(cluster.state(P0).isr) == 3, within_s=10)
        await world.process.run(produce(cluster, world, 3))


@pytest.mark.parametrize("remedy", ["delete at another broker", "set at another broker", "delete at its own port"])
@run_by(play)
async def test_a_broker_is_reachable_seconds_after_its_advertised_address_is_corrected(
    cluster: VirtualCluster, admin: Admin, /, remedy: str
) -> None:
    own, name = ConfigResource.of_broker(1), "advertised.listeners"

    def is_advertised(port: int) -> bool:
        endpoints = [cluster.broker(b)._metadata.endpoint(1) for b in cluster.broker_ids]
        return all(e is not None and e.port == port for e in endpoints)

    await admin.incremental_alter_configs({own: [set_to(name, f"PLAINTEXT://{host_name(1)}:9999")]})
    await cluster.until(lambda: is_advertised(9999), within_s=5)
    host = host_name(1 if remedy == "delete at its own port" else 0)
    world = cluster.client("who repairs")
    right = set_to(name, f"PLAINTEXT://{host_name(1)}:{PORT}")

    async def repair() -> None:
        async with Admin(f"{host}:{PORT}", world=world) as other:
            if remedy == "delete at its own port":
                assert (await other.describe_configs([own]))[own][name].value
            else:
                assert "not an address to connect" in str(
                    await refused(other, own, set_to(name, "PLAINTEXT://0.0.0.0:1"))
                )
                assert "not among listeners" in str(await refused(other, own, set_to(name, "NONE://a:1")))
            change = right if remedy == "set at another broker" else ConfigChange.delete(name)
            await other.incremental_alter_configs({own: [change]})

    async with asyncio.timeout(5):
        await world.process.run(repair())
    await cluster.until(lambda: is_advertised(PORT), within_s=5)
    await cluster.until(lambda: len(cluster.state(P0).isr) == 3, within_s=20)


@run_by(play)
async def test_settings_without_effect_and_unset_ones_are_reported_before_the_change(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    delete = ConfigChange.delete
    for resource in (ConfigResource.of_broker(1), ALL):
        changes = [set_to("my.unknown", 17), set_to("background.threads", 3), set_to("log.retention.ms", 5)]
        changes += [delete("log.segment.bytes"), delete("my.other")]
        said = await expected(admin, resource, changes)
        assert [why[:20] for why in said.without_effect.values()] == [
            "Without effect: a br",
            "Without effect: task",
        ]
        assert list(said.without_effect) == ["my.unknown", "background.threads"]
        assert said.not_set == ["log.segment.bytes", "my.other"]
        await admin.incremental_alter_configs({resource: [set_to("log.segment.bytes", 5000), set_to("my.other", 1)]})
        assert (await expected(admin, resource, changes)).not_set == []
    assert await expected(admin, ORDERS, [delete("segment.bytes"), set_to("segment.ms", 5)]) == (
        {},
        ["segment.bytes"],
    )


@run_by(
    play,
    settings={
        "replica.lag.time.max.ms": "2000",
        "log.cleaner.backoff.ms": "100",
        "zookeeper.session.timeout.ms": "300000",
        "broker.crash.detection.ms": "100000",
    },
)
async def test_a_follower_that_does_not_know_of_compaction_replicates_across_gaps(
    cluster: VirtualCluster, admin: Admin, /
) -> None:
    network, world = cluster.simulation.network, cluster.client("producer")
    compacted = [
        set_to("cleanup.policy", "compact"),
        set_to("min.cleanable.dirty.ratio", 0),
        set_to("segment.bytes", 1_000),
    ]
    for broker_id in (0, 1):
        network.block(host_name(2), host_name(broker_id))
        network.block(host_name(broker_id), host_name(2))
    await admin.incremental_alter_configs({ORDERS: [set_to("segment.bytes", 1_000)]})
    await until_all_have(cluster, 1_000)
    cluster.simulation.zookeeper.cut(host_name(2))
    await world.process.run(produce(cluster, world, 100))
    await admin.incremental_alter_configs({ORDERS: compacted})
    await cluster.until(lambda: replica_of(cluster, 0, P0).log.first_dirty_offset > 50)
    network.heal()
    end = replica_of(cluster, 0, P0).log.log_end_offset
    await cluster.until(lambda: replica_of(cluster, 2, P0).log.log_end_offset == end)
    assert not replica_of(cluster, 2, P0).log.config.compact
    assert replica_of(cluster, 2, P0).log.size < 5_000
    cluster.simulation.zookeeper.uncut(host_name(2))
    await cluster.until(lambda: replica_of(cluster, 2, P0).log.config.compact)
    await admin.incremental_alter_configs({ORDERS: [set_to("cleanup.policy", "delete")]})
    await cluster.until(lambda: 2 in cluster.state(P0).isr)


def test_a_broker_starts_despite_invalid_dynamic_settings(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: VirtualCluster, admin: Admin) -> None:
        zookeeper = cluster.simulation.zookeeper
        cluster.kill_broker(2)
        zookeeper.make(znodes.broker_config_path(2), znodes.encode_config({"num.partitions": "1"}))
        zookeeper.make(znodes.broker_config_path(None), b"[]")
        broker = await cluster.start_broker(2)
        assert broker._configs.config == broker.config
        [own] = [r.getMessage() for r in caplog.records if "/config/brokers/2 are invalid" in r.getMessage()]
        assert "num.partitions is read-only" in own
        await admin.incremental_alter_configs({ConfigResource.of_broker(2): [ConfigChange.delete("num.partitions")]})
        assert (await refused(admin, ALL, set_to("log.retention.ms", 5))).code is ErrorCode.INVALID_CONFIG

    with caplog.at_level(logging.WARNING, "minibroker.config"):
        play(scenario)
