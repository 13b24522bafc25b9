from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import json
import pickle
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.client.errors import DeserializationFailed, InvalidSetting, SerializationFailed
from minibroker.client.producer import Producer
from minibroker.client.serializers import (
    DESERIALIZERS,
    SERIALIZERS,
    choose_deserializer,
    choose_serializer,
    deserialize,
    serialize,
)
from minibroker.protocol.model import TopicPartition
from tests.unit.client.scripted_broker import ScriptedCluster

TREES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
FINITE = TREES.filter(lambda tree: "inf" not in repr(tree))


@given(TREES.filter(lambda tree: tree is not None))
def test_what_messagepack_takes_comes_back(tree: Any) -> None:
    data = serialize(SERIALIZERS["msgpack"], tree, "t", "value")
    assert deserialize(DESERIALIZERS["msgpack"], data, "t", 0, 0, "value") == tree


@given(FINITE.filter(lambda tree: tree is not None))
def test_what_json_takes_comes_back(tree: Any) -> None:
    data = serialize(SERIALIZERS["json"], tree, "t", "value")
    assert deserialize(DESERIALIZERS["json"], data, "t", 0, 0, "value") == tree


def test_messagepack_keeps_bytes_keys_that_are_no_text_and_times() -> None:
    value = {1: b"\xff", (2): [datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)], b"k": "ö"}
    data = serialize(SERIALIZERS["msgpack"], value, "t", "value")
    assert deserialize(DESERIALIZERS["msgpack"], data, "t", 0, 0, "value") == value


def test_none_is_no_value_to_any_of_them() -> None:
    def refuse(value: object) -> bytes:
        raise AssertionError

    for serializer in (*SERIALIZERS.values(), refuse):
        assert serialize(serializer, None, "t", "value") is None
    for deserializer in (*DESERIALIZERS.values(), refuse):
        assert deserialize(deserializer, None, "t", 0, 0, "value") is None


def test_a_choice_is_a_name_or_a_function() -> None:
    assert choose_serializer("value_serializer", "bytes") is None
    assert choose_deserializer("value_deserializer", "bytes") is None
    assert choose_serializer("value_serializer", str.encode) is str.encode
    assert choose_deserializer("value_deserializer", "json") is DESERIALIZERS["json"]
    for wrong in ("avro", None, 5):
        with pytest.raises(InvalidSetting, match='value_serializer=.*"msgpack", or a function'):
            Producer("127.0.0.1:9092", value_serializer=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("str", b"bytes"), ("bytes", "text"), ("json", object()), ("msgpack", object())]
)
def test_what_cannot_be_serialized_is_named_with_its_type(name: str, value: object) -> None:
    with pytest.raises(SerializationFailed, match=rf"the value for t, of type {type(value).__name__}, ") as caught:
        serialize(SERIALIZERS[name], value, "t", "value")
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@dataclasses.dataclass
class _Reading:
    at: datetime.datetime
    value: Any


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": [1, (v,)]}, lambda v: _Reading(NOON, v)])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"abc", "JSON has no bytes: decode them to str"),
        (bytearray(b"abc"), "JSON has no bytes"),
        (memoryview(b"abc"), "JSON has no bytes"),
        (float("nan"), "JSON has no nan: send None"),
        (float("-inf"), "JSON has no -inf"),
    ],
)
def test_json_takes_nothing_that_would_come_back_as_something_else(
    wrap: Callable[[Any], Any], value: object, problem: str
) -> None:
    with pytest.raises(SerializationFailed, match=problem):
        serialize(SERIALIZERS["json"], wrap(value), "t", "value")


def test_json_takes_dataclasses_times_numbers_of_any_size_and_sets() -> None:
    value = [_Reading(NOON, 1 << 70), uuid.UUID(int=7), decimal.Decimal("1.5"), {1: {2}}, True, None, 0.5]
    assert json.loads(serialize(SERIALIZERS["json"], value, "t", "value") or b"") == [
        {"at": "2026-01-02T12:00:00Z", "value": 1 << 70},
        "00000000-0000-0000-0000-000000000007",
        "1.5",
        {"1": [2]},
        True,
        None,
        0.5,
    ]


def test_a_function_that_returns_no_bytes_is_named() -> None:
    with pytest.raises(SerializationFailed, match="returned str, not bytes"):
        serialize(str, 5, "t", "key")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("str", b"\xff"),
        ("json", b"{"),
        ("msgpack", b"\x92\x01"),
        ("msgpack", b"\x91" * 100_000),
        ("json", b"[" * 99_999),
    ],
)
def test_what_cannot_be_deserialized_is_named_with_its_place(name: str, data: bytes) -> None:
    with pytest.raises(DeserializationFailed, match="t-3 at offset 77: the key of") as caught:
        deserialize(DESERIALIZERS[name], data, "t", 3, 77, "key")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.partition, error.offset, error.what, error.data) == (TopicPartition("t", 3), 77, "key", data)
    assert str(error) == str(caught.value)


async def test_a_producer_serializes_keys_and_values_and_sends_nothing_that_it_cannot() -> None:
    async with asyncio.timeout(60), ScriptedCluster(1) as cluster:
        cluster.add_topic("orders")
        async with Producer(cluster.bootstrap, key_serializer="str", value_serializer="msgpack") as producer:
            for _ in range(3):
                producer.send("orders", {"a": 1}, key="k")
                producer.send("orders", None, key="k")
                producer.send("orders", [b"1"])
                with pytest.raises(SerializationFailed, match="the key for orders, of type int"):
                    producer.send("orders", 1, key=5)
                with pytest.raises(SerializationFailed, match="the value for orders, of type object"):
                    producer.send("orders", object())
        assert cluster.log("orders").values() == [b"\x81\xa1a\x01", None, b"\x91\xc4\x011"] * 3
        assert cluster.log("orders").keys() == [b"k", b"k", None] * 3
