"""Encodes and decodes the records of `__consumer_offsets` in Kafka's binary schema (GroupMetadataManager,
OffsetCommitKey and -Value, GroupMetadataKey and -Value). Pure.

The version of a key is its type: 0 and 1 are committed offsets, 2 is a group. Values are written in version 3. An
offset whose topic id is known is written in version 4, the first flexible one, with the id in tagged field 0 as in
Kafka 4.1; the tools of Kafka 3.9 skip that version. All versions are read.
"""

import base64
import binascii
from typing import NamedTuple

import msgspec

from minibroker.broker.coordinating.record_fields import (
    INT16,
    INT32,
    INT64,
    MalformedRecord,
    RecordReader,
    blob,
    nullable_string,
    string,
)
from minibroker.protocol.kafka.primitives import write_unsigned_varint

OFFSET_KEY_VERSION = 1
GROUP_KEY_VERSION = 2
OFFSET_VALUE_VERSION = 3
OFFSET_VALUE_VERSION_WITH_TOPIC_ID = 4
GROUP_VALUE_VERSION = 3

TOPIC_ID_BYTES = 16
TOPIC_ID_TAG = 0


class OffsetKey(NamedTuple):
    group_id: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    group_id: str


class UnknownKey(NamedTuple):
    """A key of an unknown version, perhaps of a newer broker. Such a record is skipped."""

    version: int


class OffsetValue(msgspec.Struct, frozen=True):
    offset: int
    leader_epoch: int
    """-1: unknown."""
    metadata: str
    commit_timestamp_ms: int
    topic_id: str = ""
    """Empty: unknown."""


class MemberValue(msgspec.Struct, frozen=True):
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupValue(msgspec.Struct, frozen=True):
    protocol_type: str
    generation_id: int
    protocol_name: str | None
    leader: str | None
    state_timestamp_ms: int
    """Time of the last change of state; -1: unknown (versions 0 and 1)."""
    members: list[MemberValue]


Key = OffsetKey | GroupKey | UnknownKey


# --- write -------------------------------------------------------------------------------------------------------


def encode_offset_key(key: OffsetKey) -> bytes:
    return b"".join(
        (INT16.pack(OFFSET_KEY_VERSION), string(key.group_id), string(key.topic), INT32.pack(key.partition))
    )


def encode_group_key(group_id: str) -> bytes:
    return INT16.pack(GROUP_KEY_VERSION) + string(group_id)


def encode_offset_value(value: OffsetValue) -> bytes:
    topic_id = _topic_id_bytes(value.topic_id)
    fields = (INT64.pack(value.offset), INT32.pack(value.leader_epoch))
    timestamp = INT64.pack(value.commit_timestamp_ms)
    if topic_id is None:
        return b"".join((INT16.pack(OFFSET_VALUE_VERSION), *fields, string(value.metadata), timestamp))
    metadata = value.metadata.encode()
    out = bytearray(b"".join((INT16.pack(OFFSET_VALUE_VERSION_WITH_TOPIC_ID), *fields)))
    write_unsigned_varint(out, len(metadata) + 1)
    tagged_fields = bytes((1, TOPIC_ID_TAG, TOPIC_ID_BYTES))
    return b"".join((out, metadata, timestamp, tagged_fields, topic_id))


def encode_group_value(value: GroupValue) -> bytes:
    parts = [
        INT16.pack(GROUP_VALUE_VERSION),
        string(value.protocol_type),
        INT32.pack(value.generation_id),
        nullable_string(value.protocol_name),
        nullable_string(value.leader),
        INT64.pack(value.state_timestamp_ms),
        INT32.pack(len(value.members)),
    ]
    for member in value.members:
        parts += (
            string(member.member_id),
            nullable_string(member.group_instance_id),
            string(member.client_id),
            string(member.client_host),
            INT32.pack(member.rebalance_timeout_ms),
            INT32.pack(member.session_timeout_ms),
            blob(member.subscription),
            blob(member.assignment),
        )
    return b"".join(parts)


def _topic_id_bytes(topic_id: str) -> bytes | None:
    """Return the 16 bytes of a topic id, or None for any other text, which would not survive the round trip."""
    try:
        data = base64.b64decode(topic_id + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) == TOPIC_ID_BYTES else None


# --- read --------------------------------------------------------------------------------------------------------


def decode_key(data: bytes) -> Key:
    """Raises MalformedRecord."""
    reader = RecordReader(data)
    version = reader.int16()
    if version in (0, OFFSET_KEY_VERSION):
        return OffsetKey(reader.text(), reader.text(), reader.int32())
    if version == GROUP_KEY_VERSION:
        return GroupKey(reader.text())
    return UnknownKey(version)


def decode_offset_value(data: bytes) -> OffsetValue:
    """Raises MalformedRecord."""
    reader = RecordReader(data)
    version = reader.int16()
    if not 0 <= version <= OFFSET_VALUE_VERSION_WITH_TOPIC_ID:
        raise MalformedRecord(f"an offset's value has version {version}: 0 to 4 are known")
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    metadata = reader.compact_text() if version >= 4 else reader.text()
    timestamp = reader.int64()
    if version == 1:
        reader.int64()  # the retention of this offset, which the broker's setting overrides
    topic_id = ""
    if version >= 4:
        topic_id_bytes = reader.tagged_fields().get(TOPIC_ID_TAG)
        if topic_id_bytes is not None:
            topic_id = base64.urlsafe_b64encode(topic_id_bytes).rstrip(b"=").decode()
    return OffsetValue(offset, leader_epoch, metadata, timestamp, topic_id)


def decode_group_value(data: bytes) -> GroupValue:
    """Raises MalformedRecord."""
    reader = RecordReader(data)
    version = reader.int16()
    if not 0 <= version <= GROUP_VALUE_VERSION:
        raise MalformedRecord(f"a group's value has version {version}: 0 to 3 are known")
    protocol_type, generation_id = reader.text(), reader.int32()
    protocol_name, leader = reader.nullable_text(), reader.nullable_text()
    state_timestamp_ms = reader.int64() if version >= 2 else -1
    members = []
    for _ in range(reader.int32()):
        member_id = reader.text()
        group_instance_id = reader.nullable_text() if version >= 3 else None
        client_id, client_host = reader.text(), reader.text()
        rebalance_timeout_ms = reader.int32() if version >= 1 else -1
        session_timeout_ms = reader.int32()
        if rebalance_timeout_ms < 0:
            rebalance_timeout_ms = session_timeout_ms
        members.append(
            MemberValue(
                member_id,
                group_instance_id,
                client_id,
                client_host,
                rebalance_timeout_ms,
                session_timeout_ms,
                reader.blob(),
                reader.blob(),
            )
        )
    return GroupValue(protocol_type, generation_id, protocol_name, leader, state_timestamp_ms, members)
