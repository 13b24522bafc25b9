"""Kafka's ConsumerProtocol, byte for byte, and the errors for other bytes."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.consumer_protocol import (
    HIGHEST_VERSION,
    NO_GENERATION,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    decode_assignment,
    decode_sticky_user_data,
    decode_subscription,
    encode_assignment,
    encode_sticky_user_data,
    encode_subscription,
)
from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.model import TopicPartition

FULL = ConsumerProtocolSubscription(
    ["ab", "c"], b"\x07", [TopicPartition("ab", 0), TopicPartition("ab", 2)], generation_id=5, rack_id="r1"
)
FIELDS = {
    "topics": "00000002 0002 6162 0001 63",
    "user_data": "00000001 07",
    "owned_partitions": "00000001 0002 6162 00000002 00000000 00000002",
    "generation_id": "00000005",
    "rack_id": "0002 7231",
}
"""The subscription in Kafka 3.9's ConsumerProtocolSubscription.json."""
VECTORS = {
    version: bytes.fromhex(f"000{version}" + "".join(list(FIELDS.values())[: version + 2])) for version in range(4)
}
READ = {
    0: FULL._replace(owned_partitions=[], generation_id=NO_GENERATION, rack_id=None),
    1: FULL._replace(generation_id=NO_GENERATION, rack_id=None),
    2: FULL._replace(rack_id=None),
    3: FULL,
}

names = st.text(min_size=1, max_size=20)
nullable_bytes = st.none() | st.binary(max_size=40)
partitions = st.lists(st.builds(TopicPartition, names, st.integers(0, 2**31 - 1)), max_size=20, unique=True).map(sorted)


@pytest.mark.parametrize("version", range(4))
def test_each_version_has_kafkas_bytes(version: int) -> None:
    assert encode_subscription(FULL, version) == VECTORS[version]
    assert decode_subscription(VECTORS[version]) == READ[version]


def test_an_assignment_has_kafkas_bytes() -> None:
    assignment = ConsumerProtocolAssignment([TopicPartition("ab", 0), TopicPartition("ab", 2)])
    data = bytes.fromhex("0003 00000001 0002 6162 00000002 00000000 00000002 ffffffff")
    assert encode_assignment(assignment) == data
    assert decode_assignment(data) == assignment
    assert encode_assignment(assignment, 0) == b"\0\0" + data[2:]


def test_the_sticky_assignors_user_data_has_kafkas_bytes_in_both_versions() -> None:
    owned = [TopicPartition("ab", 1)]
    data = bytes.fromhex("00000001 0002 6162 00000001 00000001 00000009")
    assert encode_sticky_user_data(owned, 9) == data
    assert decode_sticky_user_data(data) == (owned, 9)
    assert decode_sticky_user_data(data[:-4]) == (owned, NO_GENERATION)


@given(
    st.builds(
        ConsumerProtocolSubscription,
        st.lists(names, max_size=10),
        nullable_bytes,
        partitions,
        st.integers(-1, 2**31 - 1),
        st.none() | names,
    )
)
def test_a_subscription_comes_back_as_it_was(subscription: ConsumerProtocolSubscription) -> None:
    assert decode_subscription(encode_subscription(subscription)) == subscription


@given(st.builds(ConsumerProtocolAssignment, partitions, nullable_bytes), st.integers(0, HIGHEST_VERSION))
def test_an_assignment_comes_back_as_it_was(assignment: ConsumerProtocolAssignment, version: int) -> None:
    assert decode_assignment(encode_assignment(assignment, version)) == assignment


def test_a_member_that_was_left_out_has_no_partitions() -> None:
    assert decode_assignment(b"") == ConsumerProtocolAssignment([])


def test_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    assert decode_subscription(b"\0\x09" + VECTORS[3][2:] + b"more") == FULL


@pytest.mark.parametrize("version", range(4))
def test_a_subscription_that_ends_anywhere_is_refused(version: int) -> None:
    for end in range(len(VECTORS[version])):
        with pytest.raises(InvalidMessage, match=rf"a subscription of {end} bytes: "):
            decode_subscription(VECTORS[version][:end])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("ffff", r"a subscription of 2 bytes: version is -1; versions are not negative"),
        ("0000 7fffffff", r"topics has 2147483647 elements, with 0 bytes left and a limit of 20000"),
        ("0000 ffffffff", r"topics has -1 elements"),
        ("0000 00000001 ffff", r"a topic is null"),
        ("0000 00000001 0002 ff", r"a topic has a length of 2, with 1 bytes left"),
        ("0000 00000001 0001 ff ffffffff", r"a topic is not UTF-8"),
        ("0000 00000000 fffffffe", r"user_data has a length of -2, with 0 bytes left"),
        ("0000 00000000 ffffffff 00", r"a subscription of 11 bytes has 1 bytes after its last field"),
        ("0001 00000000 ffffffff 00000001 0001 61 00000001 fffffffe", r"owned_partitions of a has partition -2"),
        ("0001 00000000 ffffffff 00000001 0001 61 00ffffff", r"owned_partitions of a has 16777215 elements"),
    ],
)
def test_nonsense_is_refused_with_its_reason(data: str, message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        decode_subscription(bytes.fromhex(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_subscription, decode_assignment, decode_sticky_user_data):
        with suppress(InvalidMessage):
            decode(data)


def test_a_version_that_there_is_not_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="version 4 of the consumer protocol: it has 0 to 3"):
        encode_subscription(FULL, 4)
