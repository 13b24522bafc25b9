"""Kafka's primitive types: reading and writing numbers, strings, bytes, arrays' lengths and tagged fields.

The problem: every length in a request is a claim by whoever sent it. The choice: a `Reader` compares each with the
bytes that are left, and with a bound of its own, before memory is taken for what follows. An array claims at least as
many bytes as its smallest elements take, and all arrays of a request together may have MAX_ELEMENTS: an object costs
some fifty bytes of memory, whatever few bytes it came in.
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

MAX_ELEMENTS = 250_000
"""Of all arrays of a message together."""

MAX_STRING_BYTES = 32_767
MAX_TAGS = 64
"""Of one struct."""
MAX_ALL_TAGS = 10_000
"""Of a message. Two bytes of a frame would otherwise take a microsecond each, which large frames have many of."""

UUID_BYTES = 16

LENGTH16 = Struct(">h")
LENGTH32 = Struct(">i")

_ZERO_UUID = bytes(UUID_BYTES)


class FrameWriter(bytearray):
    """A frame, which begins with room for its length.

    Records are by far the most of an answer to Fetch, and lie in memory of their own. They take their place when the
    frame is sent, rather than be copied into it: that took 8 % of the time of a broker that a client reads from."""

    def __init__(self) -> None:
        super().__init__(LENGTH32.size)
        self._referred: list[tuple[int, Buffer]] = []

    def refer(self, data: Buffer) -> None:
        """`data` comes next. It must not change until the frame has been sent."""
        self._referred.append((len(self), data))

    def pieces(self) -> list[Buffer]:
        """The whole frame, to be sent in this order. Nothing can be added afterwards."""
        LENGTH32.pack_into(self, 0, len(self) + sum(len(data) for _, data in self._referred) - LENGTH32.size)
        if not self._referred:
            return [self]
        written, pieces, start = memoryview(self), list[Buffer](), 0
        for position, data in self._referred:
            pieces += (written[start:position], data)
            start = position
        return [*pieces, written[start:]] if start < len(self) else pieces


class Reader:
    """A cursor over one frame. Every method raises InvalidMessage, naming the position, for what is not there."""

    __slots__ = ("_elements_left", "_tags_left", "data", "end", "position")

    def __init__(self, data: Buffer) -> None:
        self.data = data
        self.position = 0
        self.end = len(data)
        self._elements_left = MAX_ELEMENTS
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
        if position < self.end and data[position] < 0x80:  # as nearly always
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
        """The next bytes, not copied where the frame is a memoryview."""
        position = self.position
        if not 0 <= length <= self.end - position:
            raise self.problem(f"a length of {length}, {self.end - position} bytes are left")
        self.position = position + length
        return self.data[position : position + length]

    def view(self, length: int) -> memoryview:
        """The next bytes, not copied."""
        position = self.position
        if not 0 <= length <= self.end - position:
            raise self.problem(f"a length of {length}, {self.end - position} bytes are left")
        self.position = position + length
        return memoryview(self.data)[position : position + length]

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
        """The length of an array whose elements take `least_bytes` or more."""
        if count < 0 or count * least_bytes > self.end - self.position:
            raise self.problem(f"an array of {count} elements, {self.end - self.position} bytes are left")
        self._elements_left -= count
        if count > max_count or self._elements_left < 0:
            raise self.problem(f"an array of {count} elements is too long here; {max_count} are allowed")
        return count

    def skip_tagged_fields(self) -> None:
        if self.position < self.end and not self.data[self.position]:  # none, as nearly always
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
    """16 bytes. Zeroes for an empty id, and for one that somebody made up by hand."""
    try:
        data = base64.b64decode(topic_id + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return _ZERO_UUID
    return data if len(data) == UUID_BYTES else _ZERO_UUID


def topic_id_of(uuid: Buffer) -> str:
    """Empty for zeroes, which is Kafka's way of saying that there is none."""
    topic_id = base64.urlsafe_b64encode(uuid).rstrip(b"=").decode()
    return "" if topic_id == NO_TOPIC else topic_id
