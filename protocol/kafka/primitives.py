"""Kafka's primitive types: reading and writing numbers, strings, bytes, arrays' lengths and tagged fields.

The problem: a client may claim any length in a request. The choice: before a `MessageReader` allocates memory, it
compares each length with the bytes left in the frame and with a bound. An array must have enough bytes left for its
smallest possible elements, and all arrays of a request together may have MAX_ELEMENTS, since each element becomes an
object of about fifty bytes.
"""

from __future__ import annotations

import base64
import binascii
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is an exception, not a format
from typing import Any

from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.messages import Buffer
from minibroker.protocol.topic_ids import NO_TOPIC

MAX_ELEMENTS = 100_000
"""Elements of all arrays of a message together: ten for each partition that a cluster may have."""

MAX_STRING_BYTES = 32_767
MAX_TAGS = 64
"""Tagged fields of one struct."""
MAX_ALL_TAGS = 10_000
"""Tagged fields of a message. Each takes only two bytes of the frame, but a microsecond to skip."""

UUID_BYTES = 16

LENGTH16 = Struct(">h")
LENGTH32 = Struct(">i")

_ZERO_UUID = bytes(UUID_BYTES)


class TooManyElements(InvalidMessage):
    """The arrays of a message have more elements than its reader accepts."""


class FrameWriter(bytearray):
    """A frame, which begins with room for its length.

    Records make up most of a response to Fetch and lie in other buffers. `pieces` puts them between the frame's own
    bytes instead of copying them, which took 8 % of a broker's time while a client read from it."""

    def __init__(self) -> None:
        super().__init__(LENGTH32.size)
        self._referred: list[tuple[int, Buffer]] = []

    def refer(self, data: Buffer) -> None:
        """Append `data` without a copy. It must not change until the frame has been sent."""
        self._referred.append((len(self), data))

    def pieces(self) -> list[Buffer]:
        """Return the buffers of the whole frame, in order. Nothing can be appended afterwards."""
        LENGTH32.pack_into(self, 0, len(self) + sum(len(data) for _, data in self._referred) - LENGTH32.size)
        if not self._referred:
            return [self]
        written, pieces, start = memoryview(self), list[Buffer](), 0
        for position, data in self._referred:
            pieces += (written[start:position], data)
            start = position
        return [*pieces, written[start:]] if start < len(self) else pieces


class MessageReader:
    """A cursor over one frame. Its methods raise InvalidMessage, with the position, for missing or invalid bytes."""

    __slots__ = ("_elements_left", "_tags_left", "data", "end", "position")

    def __init__(self, data: Buffer, max_elements: int = MAX_ELEMENTS) -> None:
        """`max_elements`: of all arrays together. More raise TooManyElements."""
        self.data = data
        self.position = 0
        self.end = len(data)
        self._elements_left = max_elements
        self._tags_left = MAX_ALL_TAGS

    def problem(self, what: str) -> InvalidMessage:
        return InvalidMessage(f"at byte {self.position}: {what}")

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        try:
            values = layout.unpack_from(self.data, self.position)
        except StructError:
            raise self.problem(f"{layout.size} bytes are expected, {self.end - self.position} are left") from None
        self.position += layout.size
        return values

    def unsigned_varint(self) -> int:
        data, position = self.data, self.position
        if position < self.end and data[position] < 0x80:  # nearly always
            self.position = position + 1
            return data[position]
        value = shift = 0
        while True:
            if position >= self.end:
                raise self.problem("a varint does not end")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                raise self.problem("a varint of more than 5 bytes")
        if value > 0xFFFF_FFFF:
            raise self.problem(f"a varint of {value} does not fit into 32 bits")
        self.position = position
        return value

    def take(self, length: int) -> Buffer:
        """Return the next bytes; not a copy if the frame is a memoryview."""
        position = self.position
        if not 0 <= length <= self.end - position:
            raise self.problem(f"a length of {length}, {self.end - position} bytes are left")
        self.position = position + length
        return self.data[position : position + length]

    def view(self, length: int) -> memoryview:
        """Return a view of the next bytes."""
        position = self.position
        if not 0 <= length <= self.end - position:
            raise self.problem(f"a length of {length}, {self.end - position} bytes are left")
        self.position = position + length
        data = self.data
        return (data if type(data) is memoryview else memoryview(data))[position : position + length]

    def string(self, length: int, max_length: int) -> str:
        begin = self.position
        end = begin + length
        if length > MAX_STRING_BYTES or end > self.end:
            raise self.problem(
                f"a string of {length} bytes; {self.end - begin} are left, {MAX_STRING_BYTES} are allowed"
            )
        try:
            text = str(self.data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise self.problem(f"a string is not UTF-8: {error.reason}") from None
        if len(text) > max_length:
            raise self.problem(f"a string of {len(text)} characters; {max_length} are allowed")
        self.position = end
        return text

    def count(self, count: int, least_bytes: int, max_count: int) -> int:
        """Return `count`, the length of an array whose elements take at least `least_bytes` each."""
        if count < 0 or count * least_bytes > self.end - self.position:
            raise self.problem(f"an array of {count} elements, {self.end - self.position} bytes are left")
        if count > max_count:
            raise self.problem(f"an array of {count} elements is too long here; {max_count} are allowed")
        self._elements_left -= count
        if self._elements_left < 0:
            raise TooManyElements(
                f"at byte {self.position}: with an array of {count} elements, all arrays have more than this request "
                f"may have: name fewer in a request"
            )
        return count

    def skip_tagged_fields(self) -> None:
        if self.position < self.end and not self.data[self.position]:  # nearly always
            self.position += 1
            return
        for _ in range(self.tag_count()):
            self.unsigned_varint()
            self.view(self.unsigned_varint())

    def tag_count(self) -> int:
        count = self.unsigned_varint()
        self._tags_left -= count
        if count > MAX_TAGS or self._tags_left < 0:
            raise self.problem(f"{count} tagged fields; {MAX_TAGS} are allowed, {MAX_ALL_TAGS} in all")
        return count

    def check_end(self) -> None:
        if self.position != self.end:
            raise self.problem(f"{self.end - self.position} bytes too many")


def write_unsigned_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def uuid_of(topic_id: str) -> bytes:
    """Return the 16 bytes of an id; zeroes for an empty id or one that is not base64 of 16 bytes."""
    try:
        data = base64.b64decode(topic_id + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return _ZERO_UUID
    return data if len(data) == UUID_BYTES else _ZERO_UUID


def topic_id_of(uuid: Buffer) -> str:
    """Return the id; an empty one for zeroes, by which Kafka means no id."""
    topic_id = base64.urlsafe_b64encode(uuid).rstrip(b"=").decode()
    return "" if topic_id == NO_TOPIC else topic_id
