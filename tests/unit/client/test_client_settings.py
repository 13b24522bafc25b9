from __future__ import annotations

import asyncio
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest

import minibroker
import minibroker.sync
from minibroker import Admin, ConfigChange, ConfigResource, Processor, RebalanceListener, sync
from minibroker.client.consumer import Consumer
from minibroker.client.errors import FailedRecord, InvalidSetting
from minibroker.client.fetching.records import Record
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.producer import Producer
from minibroker.client.settings import Address, parse_bootstrap
from minibroker.client.shown import shown
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition


def test_bootstrap_addresses_are_read_from_a_string_or_a_list() -> None:
    expected = (Address("a", 1), Address("b.example", 65_535))
    assert parse_bootstrap("a:1,b.example:65535") == expected
    assert parse_bootstrap(["a:1", "b.example:65535"]) == expected
    assert parse_bootstrap(" a:1 , b.example:65535 ") == expected
    assert parse_bootstrap("a:1,a:1") == (Address("a", 1),)
    assert parse_bootstrap("[::1]:9092") == (Address("::1", 9092),)
    assert str(Address("::1", 9092)) == "[::1]:9092"


@pytest.mark.parametrize(
    "bootstrap",
    ["", "localhost", ":9092", "localhost:", "localhost:0", "localhost:65536", "a:1,,b:2", "::1:9092", "a:²"],
)
def test_a_malformed_bootstrap_is_refused_with_the_value_and_the_rule(bootstrap: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Producer(bootstrap)
    assert isinstance(caught.value, MinibrokerError)
    assert isinstance(caught.value, ValueError)
    assert "bootstrap=" in str(caught.value)


def test_a_bootstrap_with_a_scheme_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidSetting, match=r"^bootstrap='http://a:1/': leave the scheme away: a:1$"):
        Producer("b:2,http://a:1/")


@pytest.mark.parametrize("bootstrap", [[], b"localhost:9092", 9092, ["localhost:9092", 1]])
def test_a_bootstrap_of_a_wrong_type_is_refused(bootstrap: object) -> None:
    with pytest.raises(InvalidSetting):
        parse_bootstrap(bootstrap)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"acks": 2},
        {"acks": True},
        {"acks": "none"},
        {"acks": 1, "enable_idempotence": True},
        {"acks": 0, "enable_idempotence": True},
        {"compression": "brotli"},
        {"linger_ms": -1},
        {"linger_ms": "5"},
        {"linger_ms": 120_000},
        {"linger_ms": 5_000, "delivery_timeout_ms": 1_000},
        {"delivery_timeout_ms": 0},
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"buffer_memory": 1},
        {"max_request_size": 0},
        {"max_in_flight_requests_per_connection": 0},
        {"max_in_flight_requests_per_connection": 6},
        {"request_timeout_ms": float("nan")},
        {"partitioner": "murmur2"},
        {"client_id": "x" * 250},
        {"client_id": 5},
        {"transactional_id": "t", "transaction_timeout_ms": 1.5},
        {"transactional_id": ""},
        {"transactional_id": 5},
        {"transactional_id": "t", "acks": 1},
        {"transactional_id": "t", "enable_idempotence": False},
        {"transactional_id": "t", "transaction_timeout_ms": 0},
        {"transaction_timeout_ms": 1_000},
    ],
)
def test_a_producer_setting_with_an_impossible_value_is_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Producer("localhost:9092", **settings)  # type: ignore[arg-type]
    assert caught.value.name in settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("partition_assignment_strategy", "nonsense"),
        ("partition_assignment_strategy", []),
        ("session_timeout_ms", -5),
        ("heartbeat_interval_ms", 45_000),
        ("max_poll_interval_ms", "6000"),
        ("auto_commit_interval_ms", "5"),
    ],
)
@pytest.mark.parametrize("read", [{}, {"group": "g"}, {"group": "g", "enable_auto_commit": True}])
def test_a_setting_is_checked_also_where_it_has_no_effect(read: dict[str, Any], setting: str, value: object) -> None:
    for what in ({"topics": ["a"]}, {"partitions": [TopicPartition("a", 0)]}):
        with pytest.raises(InvalidSetting, match=f"^{setting}="):
            Consumer("localhost:9092", **what, **read, **{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("setting", "value"), [("listener", RebalanceListener()), ("group_instance_id", "one")])
def test_calls_for_members_are_refused_without_a_group(setting: str, value: object) -> None:
    given: dict[str, Any] = {setting: value}
    with pytest.raises(InvalidSetting, match=f'^{setting}=.*also give group="name"'):
        Consumer("localhost:9092", topics=["a"], **given)
    with pytest.raises(InvalidSetting, match=f"^{setting}=.*give topics instead of partitions"):
        Consumer("localhost:9092", partitions=[TopicPartition("a", 0)], group="g", **given)
    Consumer("localhost:9092", topics=["a"], group="g", **given)
    Consumer("localhost:9092", group="g", **given)


@pytest.mark.parametrize("pattern", [b"ord.*", re.compile(b"ord.*"), 3, "orders["])
def test_a_pattern_that_cannot_match_a_name_is_refused_at_once(pattern: Any) -> None:
    with pytest.raises(InvalidSetting, match="^pattern="):
        Consumer("localhost:9092", pattern=pattern)


@pytest.mark.parametrize("value", ["false", "no", 1, 0, None])
@pytest.mark.parametrize("module", [minibroker, minibroker.sync])
def test_a_value_that_is_no_boolean_is_refused(module: Any, value: object) -> None:
    with pytest.raises(InvalidSetting, match=r"enable_auto_commit=.*: give True or False"):
        module.Consumer("localhost:9092", topics=["a"], group="g", enable_auto_commit=value)
    if value is not None:  # the default follows from acks
        with pytest.raises(InvalidSetting, match=r"enable_idempotence=.*: give True or False"):
            module.Producer("localhost:9092", enable_idempotence=value)


def test_an_admin_takes_no_text_for_a_boolean() -> None:
    admin = Admin("localhost:9092")
    orders = ConfigResource.of_topic("orders")
    changes = {orders: [ConfigChange.set("retention.ms", 1)]}
    for call, name in (
        (lambda: admin.list_topics(internal="no"), "internal"),  # type: ignore[arg-type]
        (lambda: admin.describe_configs([orders], synonyms="no"), "synonyms"),  # type: ignore[arg-type]
        (lambda: admin.describe_configs([orders], documentation=1), "documentation"),  # type: ignore[arg-type]
        (lambda: admin.incremental_alter_configs(changes, validate_only="no"), "validate_only"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidSetting, match=f"{name}=.*: give True or False"):
            asyncio.run(call())


def test_an_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="lingre_ms"):
        Producer("localhost:9092", lingre_ms=5)  # type: ignore[call-arg]


def test_six_requests_in_flight_are_possible_without_idempotence() -> None:
    Producer("localhost:9092", acks=1, max_in_flight_requests_per_connection=6)


@pytest.mark.parametrize(
    "settings",
    [
        {"topics": []},
        {"topics": ["a"], "partitions": [TopicPartition("a", 0)]},
        {"topics": "orders"},
        {"topics": ["no/slash"]},
        {"partitions": ["orders"]},
        {"topics": ["a"], "auto_offset_reset": "newest"},
        {"topics": ["a"], "fetch_max_bytes": 0},
    ],
)
def test_a_consumer_setting_with_an_impossible_value_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        Consumer("localhost:9092", **settings)  # type: ignore[arg-type]


SECRET = b"DE89 3704"
A_RECORD = Record("orders", 3, 7, 1_000, SECRET, SECRET * 100_000, [("h", SECRET)])
WHERE = r"Record\(topic='orders', partition=3, offset=7\)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (A_RECORD, WHERE),
        ([A_RECORD] * 500, rf"\[{WHERE}, {WHERE}, ... 498 more\]"),
        ((A_RECORD,), rf"\({WHERE},\)"),
        ({TopicPartition("orders", 3): A_RECORD}, rf"{{TopicPartition\(topic='orders', partition=3\): {WHERE}}}"),
        ({3: A_RECORD}.values(), rf"dict_values\(\[{WHERE}\]\)"),
        (deque([A_RECORD]), rf"deque\(\[{WHERE}\]\)"),
        ({1: [{2: A_RECORD}]}, rf"{{1: \[{{2: {WHERE}}}\]}}"),
        (FailedRecord("t", 0, SECRET, SECRET, 5, (), InvalidSetting("a", 1, "b")), r"FailedRecord\(topic='t', .*\)"),
        (b"z" * 900_000, r"b'z{98}... \(900000 bytes\)"),
        (b"\0" * 900_000, r"b'(\\x00){24}.{2,}... \(900000 bytes\)"),
        (["z" * 900_000] * 2, r"\['z{97}... \(900000 characters\), ... 1 more\]"),
        (list(range(1_000)), r"\[0, 1, 2, .*, ... 9\d\d more\]"),
        (TopicPartition("t" * 249, 12), r"TopicPartition\(topic='t{49}..., partition=12\)"),
        (10**6_000, "an int of 19932 bits"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_shows_of_a_value_what_is_short_and_of_a_record_where_it_is(value: object, text: str) -> None:
    error = InvalidSetting("offsets", value, "give a dict")
    assert re.fullmatch(f"offsets={text}: give a dict", str(error))
    assert len(str(error)) < 200
    assert SECRET.decode() not in str(error)
    assert error.value is value


def test_a_list_that_contains_itself_can_be_shown() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert len(shown(endless)) < 150
    assert len(shown(OffsetAndMetadata(endless))) < 150  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, "x", b"x", True, None, float("nan"), print, Producer, range(3), re.compile("a")),
        *([], [1], (), (1,), (1, 2), {}, {"a": [1, {"b": None}]}, set(), {1}, frozenset(), frozenset({1}), deque([1])),
        *(TopicPartition("orders", 0), [TopicPartition("orders", 0)], "x" * 90, RebalanceListener()),
        *(ConfigResource.of_topic("orders"), [ConfigChange.set("a", 1)], Path.cwd),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_short_value_is_shown_as_python_writes_it(value: object) -> None:
    assert str(InvalidSetting("name", value, "rule")) == f"name={value!r}: rule"


@pytest.mark.parametrize("client", [Producer, Consumer, Admin, sync.Producer, sync.Consumer, sync.Admin])
@pytest.mark.parametrize(
    ("name", "here"),
    [("bootstrap_servers", "bootstrap"), ("group_id", "group="), ("compression_type", "compression=")],
)
def test_a_name_of_another_kafka_client_is_answered_with_the_name_here(client: Any, name: str, here: str) -> None:
    with pytest.raises(TypeError, match=rf"{client.__name__}\(\) has no argument {name}: .*{here}"):
        client(**{name: "x"})


LONG = "é" * 32_768


@pytest.mark.parametrize(
    ("client", "settings", "limit"),
    [
        (client, settings, limit)
        for module in (minibroker, sync)
        for client, settings, limit in [
            (module.Producer, {"transactional_id": LONG}, "32,767"),
            (module.Producer, {"client_id": LONG}, "249"),
            (module.Consumer, {"topics": ["orders"], "group": LONG}, "32,767"),
            (module.Consumer, {"topics": [LONG]}, "249"),
            (module.Processor, {"topics": ["orders"], "group": "g", "transactional_id": LONG, "process": id}, "32,767"),
            (module.Processor, {"topics": ["orders"], "group": LONG, "transactional_id": "t", "process": id}, "32,767"),
        ]
    ],
)
def test_a_name_that_no_request_can_carry_is_refused_at_once_with_the_limit(
    client: Any, settings: dict[str, object], limit: str
) -> None:
    with pytest.raises(InvalidSetting, match=rf"32768 characters.*(at most|the limit is) {limit}") as caught:
        client("localhost:9092", **settings)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("client", [Producer, Consumer, Admin, Processor])
@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_mistyped_argument_is_answered_with_the_one_that_was_meant(client: Any, is_blocking: bool) -> None:
    client = getattr(sync, client.__name__) if is_blocking else client
    for name, hint in [("clientid", "did you mean client_id?"), ("zz", rf"help\({client.__name__}\) lists them")]:
        with pytest.raises(TypeError, match=rf"{client.__name__}\(\) has no argument {name}: {hint}"):
            client("localhost:9092", **{name: "x"})


def test_the_security_arguments_count_as_known() -> None:
    with pytest.raises(TypeError, match=r"has no argument sasl_user: did you mean sasl_plain_username\?"):
        Producer("localhost:9092", sasl_user="anna")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [Processor, sync.Processor])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"group": None}, "group=None: give the name of the group"),
        ({"consumer_settings": {"fetch_max_byte": 1}}, "a Consumer has no such setting: did you mean fetch_max_bytes?"),
        ({"producer_settings": {"zz": 1}}, r"producer_settings\['zz'\]=1: a Producer has no such setting: help"),
        ({"consumer_settings": "fetch"}, "consumer_settings='fetch': give a dict"),
    ],
)
def test_errors_of_a_processor_name_its_own_arguments(kind: Any, settings: dict[str, Any], told: str) -> None:
    usual = {"topics": ["orders"], "group": "g", "transactional_id": "t", "process": id}
    with pytest.raises(InvalidSetting, match=told):
        kind("localhost:9092", **(usual | settings))


@pytest.mark.parametrize("kind", [Producer, minibroker.sync.Producer])
def test_what_a_transaction_lacks_is_answered_with_its_place(kind: type) -> None:
    producer = kind("localhost:9092", transactional_id="t")
    with pytest.raises(AttributeError, match=r"Producer has no send_offsets: call it on the transaction: "):
        _ = producer.send_offsets
    transaction = producer.transaction()
    for name, hint in [("begin", "its block begins it"), ("send", "call producer.send within its block")]:
        with pytest.raises(AttributeError, match=f"Transaction has no {name}: {hint}"):
            getattr(transaction, name)

    async def awaits() -> None:
        await transaction

    with pytest.raises(TypeError, match="a transaction is a block, and is not awaited: write `with producer"):
        asyncio.run(awaits())


@pytest.mark.parametrize("kind", [Producer, minibroker.sync.Producer])
def test_kafkas_methods_of_transactions_name_the_ones_here(kind: type) -> None:
    for name in ("init_transactions", "begin_transaction", "commit_transaction", "send_offsets_to_transaction"):
        with pytest.raises(AttributeError, match=f"Producer has no {name}: "):
            getattr(kind("localhost:9092", transactional_id="t"), name)
    with pytest.raises(AttributeError, match="Transaction has no commit: the end of its block commits it"):
        _ = kind("localhost:9092", transactional_id="t").transaction().commit
    with pytest.raises(TypeError, match=r"no argument transactional.id: write it with _: transactional_id="):
        kind("localhost:9092", **{"transactional.id": "t"})
    with pytest.raises(TypeError, match=r"no argument bootstrap.servers: it is called bootstrap here"):
        kind("localhost:9092", **{"bootstrap.servers": "t"})
