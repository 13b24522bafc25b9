"""How requests change settings, and which changes are refused."""

from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.config_changes import altered, altered_broker, altered_topic
from minibroker.broker.settings.layers import with_dynamic
from minibroker.broker.settings.parsing import broker_config
from minibroker.broker.settings.schema import as_texts, documentation
from minibroker.broker.settings.topic_config import TopicConfig
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import AlterableConfig
from minibroker.protocol.model import AlterOperation

SET, DELETE, APPEND, SUBTRACT = AlterOperation
STATIC = broker_config({"broker.id": "1", "log.dirs": "/data", "zookeeper.connect": "zookeeper:2181"})


def change(name: str, operation: int, value: str | None = None) -> AlterableConfig:
    return AlterableConfig(name, operation, value)


@pytest.mark.parametrize(
    ("known", "one", "then"),
    [
        ({}, change("retention.ms", SET, "5"), {"retention.ms": "5"}),
        ({"retention.ms": "5"}, change("retention.ms", SET, "6"), {"retention.ms": "6"}),
        ({"retention.ms": "5"}, change("retention.ms", DELETE), {}),
        ({}, change("retention.ms", DELETE), {}),
        ({}, change("cleanup.policy", APPEND, "compact"), {"cleanup.policy": "delete,compact"}),
        ({"cleanup.policy": "compact"}, change("cleanup.policy", APPEND, "compact"), {"cleanup.policy": "compact"}),
        (
            {"cleanup.policy": "compact,delete"},
            change("cleanup.policy", SUBTRACT, "delete"),
            {"cleanup.policy": "compact"},
        ),
        (
            {"cleanup.policy": "delete"},
            change("cleanup.policy", SUBTRACT, "delete"),
            {"cleanup.policy": ""},
        ),
        (
            {"leader.replication.throttled.replicas": "0:1"},
            change("leader.replication.throttled.replicas", SUBTRACT, "0:1,0:2"),
            {"leader.replication.throttled.replicas": ""},
        ),
    ],
)
def test_a_change_is_carried_out_and_to_repeat_it_changes_nothing(
    known: dict[str, str], one: AlterableConfig, then: dict[str, str]
) -> None:
    fallback = {"cleanup.policy": "delete"}
    assert altered(known, [one], fallback) == then
    assert altered(then, [one], fallback) == then


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([change("retention.ms", SET)], ErrorCode.INVALID_REQUEST),
        ([change("retention.ms", 4, "5")], ErrorCode.INVALID_REQUEST),
        ([change("retention.ms", SET, "5"), change("retention.ms", DELETE)], ErrorCode.INVALID_REQUEST),
        ([change("retention.ms", APPEND, "5")], ErrorCode.INVALID_CONFIG),
        ([change("retention", DELETE)], ErrorCode.INVALID_CONFIG),
        ([change("durability", SET, "synced")], ErrorCode.INVALID_CONFIG),
        ([change("durability", SET, "nonsense")], ErrorCode.INVALID_CONFIG),
        (
            [change("min.compaction.lag.ms", SET, "9"), change("max.compaction.lag.ms", SET, "8")],
            ErrorCode.INVALID_CONFIG,
        ),
    ],
)
def test_what_a_topic_cannot_have_is_refused(changes: list[AlterableConfig], code: ErrorCode) -> None:
    with pytest.raises(BrokerError) as refused:
        altered_topic({}, changes, STATIC)
    assert refused.value.code is code


def test_segments_of_less_than_a_mebibyte_can_be_kept_and_not_set() -> None:
    for name in ("segment.bytes", "log.segment.bytes"):
        alter = partial(altered_topic, broker=STATIC) if name == "segment.bytes" else _altered_static
        with pytest.raises(BrokerError, match=f"{name}=1048575: give 1048576 or more") as refused:
            alter({}, [change(name, SET, "1048575")])
        assert refused.value.code is ErrorCode.INVALID_CONFIG
        assert alter({}, [change(name, SET, "1048576")]) == {name: "1048576"}
        known = {name: "5000"}  # from an earlier release
        assert alter(known, [change(name, SET, "5000")]) == known
        assert alter(known, [change(name, DELETE)]) == {}


def _altered_static(known: Mapping[str, str], changes: Sequence[AlterableConfig]) -> dict[str, str]:
    return altered_broker(known, changes, STATIC, {})


def test_a_topic_s_durability_may_be_repeated_and_not_changed() -> None:
    """Tools that change one setting by AlterConfigs send all others unchanged."""
    same = altered_topic({}, [change("durability", SET, "replicated")], STATIC)
    assert same == {"durability": "replicated"}
    assert altered_topic(same, [change("durability", DELETE)], STATIC) == {}
    synced = {"durability": "synced"}
    assert altered_topic(synced, [change("durability", SET, "synced")], STATIC) == synced
    for one in (change("durability", DELETE), change("durability", SET, "replicated")):
        with pytest.raises(BrokerError, match="durability is fixed when the topic is created"):
            altered_topic(synced, [one], STATIC)


@pytest.mark.parametrize(
    ("one", "is_taken"),
    [
        (change("cleanup.policy", SET, "delete"), False),
        (change("cleanup.policy", APPEND, "delete"), False),
        (change("cleanup.policy", DELETE), False),
        (change("cleanup.policy", SET, "compact"), True),
        (change("segment.bytes", SET, "5000000"), True),
    ],
)
def test_what_the_brokers_keep_for_themselves_is_compacted_and_never_deleted(
    one: AlterableConfig, is_taken: bool
) -> None:
    known = {"cleanup.policy": "compact"}
    altered_topic(known, [one], STATIC, topic="orders")
    if is_taken:
        altered_topic(known, [one], STATIC, topic="__consumer_offsets")
        return
    with pytest.raises(BrokerError, match="__consumer_offsets holds .*: set cleanup.policy=compact") as refused:
        altered_topic(known, [one], STATIC, topic="__consumer_offsets")
    assert refused.value.code is ErrorCode.INVALID_CONFIG


def test_what_was_edited_by_hand_and_is_no_setting_may_be_deleted_and_nothing_else_done_before() -> None:
    known = {"retention.hours": "5", "segment.bytes": "5000"}
    with pytest.raises(BrokerError, match=r"'retention.hours' is not known; did you mean"):
        altered_topic(known, [change("segment.bytes", SET, "6000000")], STATIC)
    mended = altered_topic(known, [change("retention.hours", DELETE)], STATIC)
    assert mended == {"segment.bytes": "5000"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("broker.id", "2", "broker.id is read-only"),
        ("broker.secret", "x" * 20, "broker.secret is read-only"),
        ("log.durability", "synced", "log.durability is read-only"),
        ("log.retention.ms", "x", "give a whole number"),
        ("log.retention.hours", "5", "set log.retention.ms=18000000 instead"),
        ("log.cleaner.min.compaction.lag.ms", "20", "exceeds log.cleaner.max.compaction.lag.ms=10"),
    ],
)
def test_what_a_running_broker_cannot_take_is_refused(name: str, value: str, said: str) -> None:
    below = {"log.cleaner.max.compaction.lag.ms": "10"}
    with pytest.raises(BrokerError, match=said):
        altered_broker({}, [change(name, SET, value)], STATIC, below)


def test_what_a_broker_does_not_know_is_taken_for_the_sake_of_tools_and_changes_nothing() -> None:
    values = altered_broker({}, [change("plugin.name", SET, "x"), change("log.retention.ms", SET, "5")], STATIC, {})
    assert values == {"plugin.name": "x", "log.retention.ms": "5"}
    assert with_dynamic(STATIC, {"listener.name.x.ssl.keystore.location": "y"}, values) == with_dynamic(
        STATIC, {"log.retention.ms": "5"}
    )
    with pytest.raises(BrokerError, match="not a list"):
        altered_broker({}, [change("plugin.list", APPEND, "x")], STATIC, {})


def test_the_limits_of_a_listener_can_be_changed_and_keep_its_other_settings() -> None:
    limit, auth = "listener.name.plaintext.max.connections", "listener.name.plaintext.ssl.client.auth"
    static = broker_config({**as_texts(STATIC), limit: "5", auth: "requested"})
    values = altered_broker({}, [change(limit, SET, "6")], static, {limit: "7"})
    assert values == {limit: "6"}
    for layers, limited_to in ((({limit: "7"}, values), "6"), (({limit: "7"},), "7"), ((), "5")):
        own = with_dynamic(static, *layers).of_listener("PLAINTEXT")
        assert own == {"max.connections": limited_to, "ssl.client.auth": "requested"}
    for name, value, said in (
        (limit, "0", "give a whole number from 1"),
        ("listener.name.elsewhere.max.connections", "many", "give a whole number from 1"),
        ("listener.name.controller.max.connection.creation.rate", "5", "has no such limit"),
    ):
        with pytest.raises(BrokerError, match=said):
            altered_broker({}, [change(name, SET, value)], static, {})
    of_another_broker = {"listener.name.elsewhere.max.connections": "5"}
    assert with_dynamic(static, of_another_broker) == static


@pytest.mark.parametrize("operation", [SET, APPEND])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("listener.name.x.plain.sasl.jaas.config", "is read-only"),
        ("listener.name.x.ssl.keystore.location", "is read-only"),
        ("listener.name.x.broker.secret", "is read-only"),
        ("sasl.jass.config.jaas.config", "is a credential, which is not stored"),
        ("listener.name.x.scram-sha-256.sasl.jaas.config", "is a credential"),
        ("listener.name.x.y.plain.sasl.jaas.config", "is a credential"),
        ("plugin.Password", "is a credential"),
        ("SCRAM-SHA-256", "is a credential"),
    ],
)
def test_a_secret_and_a_setting_of_one_listener_are_not_stored_and_can_be_deleted(
    name: str, said: str, operation: AlterOperation
) -> None:
    with pytest.raises(BrokerError, match=said) as failed:
        altered_broker({}, [change(name, operation, "hunter22")], STATIC, {})
    assert failed.value.code == ErrorCode.INVALID_CONFIG
    assert "hunter22" not in str(failed.value)
    assert altered_broker({name: "x"}, [change(name, DELETE)], STATIC, {}) == {}


def test_of_dynamic_settings_the_later_layer_wins_and_the_rest_stays() -> None:
    config = with_dynamic(STATIC, {"log.retention.ms": "5", "min.insync.replicas": "2"}, {"log.retention.ms": "6"})
    assert (config.log_retention_ms, config.min_insync_replicas) == (6, 2)
    assert as_texts(config) == as_texts(STATIC) | {"log.retention.ms": "6", "min.insync.replicas": "2"}


@pytest.mark.parametrize("schema", [BrokerConfig, TopicConfig])
def test_every_setting_is_documented_at_run_time(schema: type[BrokerConfig] | type[TopicConfig]) -> None:
    assert all(documentation(schema).values())
    assert len(documentation(schema)) == len(schema.__struct_fields__)
