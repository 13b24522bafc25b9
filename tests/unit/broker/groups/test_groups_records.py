"""The records of `__consumer_offsets` are Kafka's, byte for byte, and a group belongs to the same partition as in
Kafka."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.broker.coordinating.record_fields import MalformedRecord
from minibroker.broker.groups.records import (
    GroupKey,
    GroupValue,
    MemberValue,
    OffsetKey,
    OffsetValue,
    UnknownKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
)
from minibroker.protocol.model import internal_partition
from minibroker.protocol.topic_ids import make

TEXT = st.text(max_size=40)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
MEMBERS = st.builds(
    MemberValue, TEXT, st.none() | TEXT, TEXT, TEXT, st.integers(0, 2**31 - 1), INT32, st.binary(), st.binary()
)


def test_the_keys_of_a_group_and_of_an_offset_are_those_of_kafka() -> None:
    assert encode_group_key("g") == bytes.fromhex("0002 0001 67")
    assert encode_offset_key(OffsetKey("g", "t", 5)) == bytes.fromhex("0001 0001 67 0001 74 00000005")
    assert decode_key(bytes.fromhex("0000 0001 67 0001 74 00000005")) == OffsetKey("g", "t", 5)
    assert decode_key(encode_group_key("g")) == GroupKey("g")
    assert decode_key(bytes.fromhex("0009 00")) == UnknownKey(9)


def test_an_offset_whose_topic_is_not_known_is_written_in_version_3() -> None:
    value = OffsetValue(7, 2, "m", 1_000)
    data = bytes.fromhex("0003 0000000000000007 00000002 0001 6d 00000000000003e8")
    assert encode_offset_value(value) == data
    assert decode_offset_value(data) == value


def test_an_offset_has_its_topics_id_in_the_tagged_field_of_version_4() -> None:
    topic_id = make(3, 4, b"abcdef")
    data = encode_offset_value(OffsetValue(7, 2, "m", 1_000, topic_id))
    assert data[:26] == bytes.fromhex("0004 0000000000000007 00000002 02 6d 00000000000003e8 01 00")
    assert decode_offset_value(data).topic_id == topic_id


def test_older_versions_of_an_offset_are_read() -> None:
    v0 = bytes.fromhex("0000 0000000000000007 0001 6d 00000000000003e8")
    v1 = bytes.fromhex("0001 0000000000000007 0001 6d 00000000000003e8 00000000000007d0")
    v2 = bytes.fromhex("0002 0000000000000007 0001 6d 00000000000003e8")
    assert decode_offset_value(v0) == decode_offset_value(v2) == OffsetValue(7, -1, "m", 1_000)
    assert decode_offset_value(v1) == OffsetValue(7, -1, "m", 1_000)


def test_a_group_is_written_in_version_3() -> None:
    member = MemberValue("m", "i", "c", "h", 1, 2, b"s", b"a")
    value = GroupValue("consumer", 5, "range", "m", 9, [member])
    assert encode_group_value(value) == bytes.fromhex(
        "0003 0008 636f6e73756d6572 00000005 0005 72616e6765 0001 6d 0000000000000009 00000001"
        "0001 6d 0001 69 0001 63 0001 68 00000001 00000002 00000001 73 00000001 61"
    )


def test_a_group_of_version_0_has_its_session_timeout_for_both() -> None:
    data = bytes.fromhex("0000 0001 63 00000005 ffff ffff 00000001 0001 6d 0001 63 0001 68 00000002 00000000 00000000")
    value = decode_group_value(data)
    assert (value.state_timestamp_ms, value.protocol_name, value.members[0].rebalance_timeout_ms) == (-1, None, 2)


@given(
    st.builds(
        OffsetValue,
        INT64,
        INT32,
        TEXT,
        INT64,
        st.just("") | st.builds(make, st.integers(0, 9), st.integers(0, 9), st.just(b"abcdef")),
    )
)
def test_every_offset_comes_back(value: OffsetValue) -> None:
    assert decode_offset_value(encode_offset_value(value)) == value


@given(st.builds(GroupValue, TEXT, INT32, st.none() | TEXT, st.none() | TEXT, INT64, st.lists(MEMBERS, max_size=4)))
def test_every_group_comes_back(value: GroupValue) -> None:
    assert decode_group_value(encode_group_value(value)) == value


@given(st.binary(max_size=80))
def test_nonsense_is_malformed_and_nothing_else(data: bytes) -> None:
    for decode in (decode_key, decode_offset_value, decode_group_value):
        try:
            decode(data)
        except MalformedRecord:
            continue


@given(
    st.builds(GroupValue, TEXT, INT32, TEXT, TEXT, INT64, st.lists(MEMBERS, min_size=1, max_size=2)), st.integers(1, 20)
)
def test_a_truncated_record_is_malformed(value: GroupValue, cut: int) -> None:
    with pytest.raises(MalformedRecord):
        decode_group_value(encode_group_value(value)[:-cut])


@pytest.mark.parametrize(
    ("group", "hash_code"),
    [
        ("hello", 99162322),
        ("a", 97),
        ("console-consumer-1", None),
        ("polygenelubricants", -(2**31)),
        ("groupé", None),
        ("group😀", None),
    ],
)
def test_a_group_belongs_to_the_partition_of_javas_hash_code(group: str, hash_code: int | None) -> None:
    java = 0
    units = group.encode("utf-16-be")
    for i in range(0, len(units), 2):
        java = java * 31 + int.from_bytes(units[i : i + 2], "big")
    java = (java + 2**31) % 2**32 - 2**31
    if hash_code is not None:
        assert java == hash_code
    expected = 0 if java == -(2**31) else abs(java)
    assert internal_partition(group, 50) == expected % 50
