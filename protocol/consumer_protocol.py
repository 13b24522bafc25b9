"""The messages between members of a consumer group, which the coordinator passes on unread. Pure.

They are Kafka's ConsumerProtocolSubscription (member to leader) and ConsumerProtocolAssignment (leader to member),
versions 0 to 3, in Kafka's own bytes (big-endian, no MessagePack), since a group may have members of both kinds. Each
begins with the version that its writer chose. As in Kafka, a version above 3 is read as 3 and its other bytes are
ignored: newer versions only add fields at the end. The bytes are not trusted: each length is checked against the bytes
left before memory is allocated, and errors name the field and the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct, error
from typing import NamedTuple, TypeVar

from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.messages import MAX_PARTITIONS, MAX_TOPICS
from minibroker.protocol.model import TopicPartition

PROTOCOL_TYPE = "consumer"
"""The `protocol_type` of groups whose members are consumers."""
HIGHEST_VERSION = 3
NO_GENERATION = -1
"""The generation of a member that has been in none, or does not name it (before version 2)."""

_INT16, _INT32 = Struct(">h"), Struct(">i")
_SMALLEST_TOPIC = 6  # an empty name and no partitions
_T = TypeVar("_T")


class ConsumerProtocolSubscription(NamedTuple):
    """A member's subscribed topics and owned partitions."""

    topics: Sequence[str]
    user_data: bytes | None = None
    """Data for the leader's assignor of the protocol's name."""
    owned_partitions: Sequence[TopicPartition] = ()
    """Version 1 (KIP-429): the partitions that the member kept when it joined. Empty for eager members."""
    generation_id: int = NO_GENERATION
    """Version 2 (KIP-792): the generation in which the member received them."""
    rack_id: str | None = None
    """Version 3 (KIP-881)."""


class ConsumerProtocolAssignment(NamedTuple):
    """The partitions that the leader assigns to a member."""

    assigned_partitions: Sequence[TopicPartition]
    user_data: bytes | None = None


def encode_subscription(subscription: ConsumerProtocolSubscription, version: int = HIGHEST_VERSION) -> bytes:
    """Encode the fields that `version` has. Raises ValueError for a version above `HIGHEST_VERSION`."""
    output = _begin(version)
    output += _INT32.pack(len(subscription.topics))
    for topic in subscription.topics:
        _write_string(output, topic)
    _write_bytes(output, subscription.user_data)
    if version >= 1:
        _write_partitions(output, subscription.owned_partitions)
    if version >= 2:
        output += _INT32.pack(subscription.generation_id)
    if version >= 3:
        _write_string(output, subscription.rack_id)
    return bytes(output)


def decode_subscription(data: bytes) -> ConsumerProtocolSubscription:
    """Decode a member's subscription. Raises InvalidMessage."""
    reader = _Reader(data, "subscription")
    version = reader.version()
    topics = reader.topics()
    user_data = reader.nullable_bytes("user_data")
    owned = reader.partitions("owned_partitions") if version >= 1 else []
    generation_id = reader.int32("generation_id") if version >= 2 else NO_GENERATION
    rack_id = reader.nullable_string("rack_id") if version >= 3 else None
    reader.end(version)
    return ConsumerProtocolSubscription(topics, user_data, owned, generation_id, rack_id)


def encode_assignment(assignment: ConsumerProtocolAssignment, version: int = HIGHEST_VERSION) -> bytes:
    """Encode an assignment; all versions have the same fields. Raises ValueError for one above `HIGHEST_VERSION`."""
    output = _begin(version)
    _write_partitions(output, assignment.assigned_partitions)
    _write_bytes(output, assignment.user_data)
    return bytes(output)


def decode_assignment(data: bytes) -> ConsumerProtocolAssignment:
    """Decode the leader's assignment. Raises InvalidMessage. No bytes mean no partitions: the coordinator sends none if
    the leader left the member out."""
    if not data:
        return ConsumerProtocolAssignment([])
    reader = _Reader(data, "assignment")
    version = reader.version()
    partitions = reader.partitions("assigned_partitions")
    user_data = reader.nullable_bytes("user_data")
    reader.end(version)
    return ConsumerProtocolAssignment(partitions, user_data)


def subscribed_topics(data: bytes) -> list[str]:
    """Decode only the topics of a subscription, the first field in all versions: some clients (Faust) claim a version
    whose other fields they do not write. Raises InvalidMessage."""
    reader = _Reader(data, "subscription")
    reader.version()
    return reader.topics()


def assigned_partitions(data: bytes) -> list[TopicPartition]:
    """Decode only the partitions of an assignment, as `subscribed_topics` does. No bytes mean no partitions."""
    if not data:
        return []
    reader = _Reader(data, "assignment")
    reader.version()
    return reader.partitions("assigned_partitions")


def encode_sticky_user_data(owned: Iterable[TopicPartition], generation_id: int) -> bytes:
    """Encode an eager member's data for the leader's `sticky` assignor (Kafka's StickyAssignor, user data version 1).

    They are the partitions that it owned before it revoked them all, and their generation."""
    output = bytearray()
    _write_partitions(output, owned)
    output += _INT32.pack(generation_id)
    return bytes(output)


def decode_sticky_user_data(data: bytes) -> tuple[list[TopicPartition], int]:
    """Return (partitions, generation); NO_GENERATION from version 0, which has none. Raises InvalidMessage."""
    reader = _Reader(data, "sticky member's user data")
    partitions = reader.partitions("previous_assignment")
    generation_id = NO_GENERATION if reader.is_at_end else reader.int32("generation")
    reader.end(0)
    return partitions, generation_id


def _begin(version: int) -> bytearray:
    if not 0 <= version <= HIGHEST_VERSION:
        raise ValueError(f"version {version} of the consumer protocol: it has 0 to {HIGHEST_VERSION}")
    return bytearray(_INT16.pack(version))


def _write_string(output: bytearray, text: str | None) -> None:
    data = b"" if text is None else text.encode()
    output += _INT16.pack(-1 if text is None else len(data))
    output += data


def _write_bytes(output: bytearray, data: bytes | None) -> None:
    output += _INT32.pack(-1 if data is None else len(data))
    output += data or b""


def _write_partitions(output: bytearray, partitions: Iterable[TopicPartition]) -> None:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        by_topic.setdefault(topic, []).append(partition)
    output += _INT32.pack(len(by_topic))
    for topic, indexes in by_topic.items():
        _write_string(output, topic)
        output += Struct(f">i{len(indexes)}i").pack(len(indexes), *indexes)


class _Reader:
    """Reads fields in turn; each is named for errors."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def version(self) -> int:
        """Return the version, at most HIGHEST_VERSION + 1, which stands for all newer ones."""
        version = self._int16("version")
        if version < 0:
            raise self._wrong("version", f"is {version}; versions are not negative")
        return min(version, HIGHEST_VERSION + 1)

    def int32(self, field: str) -> int:
        return self._unpack(_INT32, field)

    def string(self, field: str) -> str:
        text = self.nullable_string(field)
        if text is None:
            raise self._wrong(field, "is null")
        return text

    def nullable_string(self, field: str) -> str | None:
        data = self._take(self._int16(field), field)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError:
            raise self._wrong(field, "is not UTF-8") from None

    def nullable_bytes(self, field: str) -> bytes | None:
        return self._take(self.int32(field), field)

    def topics(self) -> list[str]:
        return self.array("topics", 2, MAX_TOPICS, lambda: self.string("a topic"))

    def partitions(self, field: str) -> list[TopicPartition]:
        topics = self.array(field, _SMALLEST_TOPIC, MAX_TOPICS, lambda: list(self._partitions_of_topic(field)))
        found = [partition for of_topic in topics for partition in of_topic]
        if len(found) > MAX_PARTITIONS:
            raise self._wrong(field, f"has {len(found)} partitions; the limit is {MAX_PARTITIONS}")
        return found

    def array(self, field: str, smallest: int, limit: int, read: Callable[[], _T]) -> list[_T]:
        """Return elements of at least `smallest` bytes each."""
        count = self.int32(field)
        left = len(self._data) - self._at
        if not 0 <= count <= limit or count * smallest > left:
            raise self._wrong(field, f"has {count} elements, with {left} bytes left and a limit of {limit}")
        return [read() for _ in range(count)]

    def end(self, version: int) -> None:
        if version <= HIGHEST_VERSION and not self.is_at_end:
            raise InvalidMessage(f"{self._name()} has {len(self._data) - self._at} bytes after its last field")

    def _partitions_of_topic(self, field: str) -> Iterator[TopicPartition]:
        topic = self.string(f"a topic of {field}")
        for index in self.array(f"{field} of {topic}", 4, MAX_PARTITIONS, lambda: self.int32(f"{field} of {topic}")):
            if index < 0:
                raise self._wrong(f"{field} of {topic}", f"has partition {index}; partitions are not negative")
            yield TopicPartition(topic, index)

    def _int16(self, field: str) -> int:
        return self._unpack(_INT16, field)

    def _unpack(self, form: Struct, field: str) -> int:
        try:
            (value,) = form.unpack_from(self._data, self._at)
        except error:
            raise self._wrong(field, "is cut off") from None
        self._at += form.size
        return int(value)

    def _take(self, length: int, field: str) -> bytes | None:
        """Return the next bytes; None for a length of -1."""
        left = len(self._data) - self._at
        if not -1 <= length <= left:
            raise self._wrong(field, f"has a length of {length}, with {left} bytes left")
        if length == -1:
            return None
        self._at += length
        return self._data[self._at - length : self._at]

    def _wrong(self, field: str, why: str) -> InvalidMessage:
        return InvalidMessage(f"{self._name()}: {field} {why}")

    def _name(self) -> str:
        return f"a {self._what} of {len(self._data)} bytes"
