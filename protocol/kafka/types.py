"""The types of fields in Kafka's protocol, each compiled for a version: numbers, strings, bytes, arrays.

Flexible versions (KIP-482) write lengths as varints, increased by one, and null as 0; the others write fixed integers,
and null as -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, NamedTuple, Protocol

from minibroker.protocol.kafka.primitives import (
    LENGTH16,
    LENGTH32,
    MAX_ELEMENTS,
    MAX_STRING_BYTES,
    UUID_BYTES,
    FrameWriter,
    MessageReader,
    topic_id_of,
    uuid_of,
    write_unsigned_varint,
)
from minibroker.protocol.messages import Buffer

Decode = Callable[[MessageReader], Any]
Encode = Callable[[bytearray, Any], None]

NO_BOUND = 2**31 - 1

_NO_STRING = b"\xff\xff"


class CompiledType(NamedTuple):
    """The functions that read and write a type in one version."""

    decode: Decode
    encode: Encode
    least_bytes: int
    """Bytes of the smallest value on the wire."""


class Bounds(NamedTuple):
    """The bounds of a value and of its elements, from our struct's annotations."""

    max_length: int = NO_BOUND
    of_items: Bounds | None = None


class Type(Protocol):
    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds, /) -> CompiledType: ...


class Fixed:
    """A number or a bool."""

    def __init__(self, character: str) -> None:
        self.character = character
        self._struct = Struct(f">{character}")

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> CompiledType:
        layout = self._struct
        pack = layout.pack

        def decode(reader: MessageReader) -> Any:
            return reader.unpack(layout)[0]

        def encode(out: bytearray, value: Any) -> None:
            out += pack(value)

        return CompiledType(decode, encode, layout.size)


class _Uuid:
    """A topic id; an empty one is all zeroes."""

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> CompiledType:
        def decode(reader: MessageReader) -> str:
            return topic_id_of(reader.take(UUID_BYTES))

        def encode(out: bytearray, value: str) -> None:
            out += uuid_of(value)

        return CompiledType(decode, encode, UUID_BYTES)


class _String:
    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> CompiledType:
        max_length = min(bounds.max_length, MAX_STRING_BYTES)
        read_length = _read_length(flexible, LENGTH16, nullable)
        pack = LENGTH16.pack

        def decode(reader: MessageReader) -> str | None:
            length = read_length(reader)
            return None if length < 0 else reader.string(length, max_length)

        def encode_compact(out: bytearray, value: str | None) -> None:
            if value is None:
                out.append(0)
            else:
                data = value.encode()
                write_unsigned_varint(out, len(data) + 1)
                out += data

        def encode_plain(out: bytearray, value: str | None) -> None:
            if value is None:
                out += _NO_STRING
            else:
                data = value.encode()
                out += pack(len(data)) + data

        return CompiledType(decode, encode_compact if flexible else encode_plain, 1 if flexible else 2)


_REFERRED_BYTES = 16 * 1024
"""Smaller pieces are copied into the frame, which is faster than sending them separately."""


class _Bytes:
    """`copied`: the decoded value is a copy, which outlives the frame."""

    def __init__(self, copied: bool) -> None:
        self._copied = copied

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> CompiledType:
        max_length = bounds.max_length
        read_length = _read_length(flexible, LENGTH32, nullable)
        write_length = _write_length(flexible, LENGTH32)
        copied = self._copied

        def decode(reader: MessageReader) -> bytes | memoryview | None:
            length = read_length(reader)
            if length < 0:
                return None
            if length > max_length:
                raise reader.problem(f"{length} bytes; {max_length} are allowed")
            view = reader.view(length)
            return bytes(view) if copied else view

        def encode(out: bytearray, value: Buffer | None) -> None:
            if value is None:
                write_length(out, -1)
            else:
                write_length(out, len(value))
                if not copied and len(value) >= _REFERRED_BYTES and isinstance(out, FrameWriter):
                    out.refer(value)
                else:
                    out += value

        return CompiledType(decode, encode, 1 if flexible else 4)


class Array:
    def __init__(self, of: Type) -> None:
        self.of = of

    def compiled(self, version: int, flexible: bool, nullable: bool, bounds: Bounds) -> CompiledType:
        item_decode, item_encode, least_bytes = self.of.compiled(version, flexible, False, bounds.of_items or Bounds())
        max_count = min(bounds.max_length, MAX_ELEMENTS)
        read_length = _read_length(flexible, LENGTH32, nullable)
        write_length = _write_length(flexible, LENGTH32)

        def decode(reader: MessageReader) -> list[Any] | None:
            count = read_length(reader)
            if count < 0:
                return None
            return [item_decode(reader) for _ in range(reader.count(count, least_bytes, max_count))]

        def encode(out: bytearray, value: Sequence[Any] | None) -> None:
            if value is None:
                write_length(out, -1)
                return
            write_length(out, len(value))
            for item in value:
                item_encode(out, item)

        return CompiledType(decode, encode, 1 if flexible else 4)


INT8 = Fixed("b")
INT16 = Fixed("h")
INT32 = Fixed("i")
INT64 = Fixed("q")
FLOAT64 = Fixed("d")
BOOL = Fixed("?")
UUID = _Uuid()
STRING = _String()
BYTES = _Bytes(copied=True)
RECORDS = _Bytes(copied=False)
"""Bytes that are decoded as a view of the frame (see `messages`)."""


def _read_length(flexible: bool, fixed: Struct, nullable: bool) -> Callable[[MessageReader], int]:
    """The returned function returns -1 for null."""

    def compact(reader: MessageReader) -> int:
        length = reader.unsigned_varint() - 1
        if length < 0 and not nullable:
            raise reader.problem("null, but a value is required")
        return length

    def plain(reader: MessageReader) -> int:
        length: int = reader.unpack(fixed)[0]
        if length < 0 and not (nullable and length == -1):
            raise reader.problem(f"a length of {length}")
        return length

    return compact if flexible else plain


def _write_length(flexible: bool, fixed: Struct) -> Callable[[bytearray, int], None]:
    pack = fixed.pack

    def compact(out: bytearray, length: int) -> None:
        write_unsigned_varint(out, length + 1)

    def plain(out: bytearray, length: int) -> None:
        out += pack(length)

    return compact if flexible else plain
