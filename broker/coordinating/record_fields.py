"""The fields of records in internal topics, in Kafka's binary schema. Pure."""

import struct
from collections.abc import Mapping

from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.kafka.primitives import MessageReader, write_unsigned_varint
from minibroker.protocol.messages import Buffer

INT8 = struct.Struct(">b")
INT16 = struct.Struct(">h")
INT32 = struct.Struct(">i")
INT64 = struct.Struct(">q")


class MalformedRecord(InvalidMessage):
    """The bytes are not a record of this topic. The message names the expected content."""


# --- write -------------------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    data = text.encode()
    return INT16.pack(len(data)) + data


def nullable_string(text: str | None) -> bytes:
    return INT16.pack(-1) if text is None else string(text)


def blob(data: Buffer) -> bytes:
    return INT32.pack(len(data)) + bytes(data)


def compact_string(text: str) -> bytes:
    data = text.encode()
    return length(len(data)) + data


def length(number: int) -> bytes:
    """The length of a compact string or array."""
    out = bytearray()
    write_unsigned_varint(out, number + 1)
    return bytes(out)


def tagged_fields(fields: Mapping[int, bytes]) -> bytes:
    """The tagged fields at the end of a flexible version, by tag."""
    out = bytearray()
    write_unsigned_varint(out, len(fields))
    for tag, data in sorted(fields.items()):
        write_unsigned_varint(out, tag)
        write_unsigned_varint(out, len(data))
        out += data
    return bytes(out)


# --- read --------------------------------------------------------------------------------------------------------


class RecordReader(MessageReader):
    """Reads the fields of one key or value."""

    def problem(self, what: str) -> MalformedRecord:
        return MalformedRecord(f"at byte {self.position}: {what}")

    def int8(self) -> int:
        return int(self.unpack(INT8)[0])

    def int16(self) -> int:
        return int(self.unpack(INT16)[0])

    def int32(self) -> int:
        return int(self.unpack(INT32)[0])

    def int64(self) -> int:
        return int(self.unpack(INT64)[0])

    def text(self) -> str:
        text = self.nullable_text()
        if text is None:
            raise self.problem("null, where text is required")
        return text

    def nullable_text(self) -> str | None:
        size = self.int16()
        return None if size < 0 else self._decoded(size)

    def compact_text(self) -> str:
        return self._decoded(self.unsigned_varint() - 1)

    def blob(self) -> bytes:
        return bytes(self.take(self.int32()))

    def tagged_fields(self) -> dict[int, bytes]:
        return {self.unsigned_varint(): bytes(self.take(self.unsigned_varint())) for _ in range(self.tag_count())}

    def _decoded(self, size: int) -> str:
        try:
            return bytes(self.take(size)).decode()
        except UnicodeDecodeError as error:
            raise self.problem("text is not UTF-8") from error
