"""Records from files: the output of `consume --output msgpack` and `json`, read by `produce --input`.

A file may be larger than memory, damaged or truncated, so it is sent while it is read. Errors give the record's number
and the byte at which it begins; everything before that byte was read. Unknown fields are rejected, since a misspelled
`timestmap` would otherwise be lost silently. A record without a value is rejected as well, because null is a deletion
in compacted topics and should be written explicitly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgpack
import msgspec

from minibroker.client.cli.records.lines import CHUNK_BYTES, read_chunks, read_lines
from minibroker.client.shown import shown
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import MAX_TIMESTAMP_MS, Header
from minibroker.protocol.words import counted

MAX_RECORD_BYTES = 16 * 1024 * 1024
"""As `lines.MAX_LINE_BYTES`."""
_MAX_HEADERS = 100_000
_MAX_FIELDS = 16
_EXAMPLE = (
    '{"key": "k", "value": "v", "headers": [{"name": "n", "value": "v"}], "timestamp": 1700000000000, "partition": 0}'
)


class Input(StrEnum):
    LINES = "lines"
    JSON = "json"
    MSGPACK = "msgpack"


class InputRecord(NamedTuple):
    key: bytes | None
    value: bytes | None
    partition: int | None
    """None, here and for the timestamp: the producer chooses."""
    timestamp_ms: int | None
    headers: list[Header] | None
    begins_at: int
    """The byte of the input at which the record begins."""


def read_records(descriptor: int, kind: Input) -> AsyncIterator[list[InputRecord]]:
    """Yield lists of records until the end. After all valid records, raises MinibrokerError for an invalid record or
    unreadable input."""
    return _read_json(descriptor) if kind is Input.JSON else _read_msgpack(descriptor)


# --- MessagePack -------------------------------------------------------------------------------------------------


async def _read_msgpack(descriptor: int) -> AsyncIterator[list[InputRecord]]:
    unpacker = msgpack.Unpacker(
        max_buffer_size=MAX_RECORD_BYTES + 2 * CHUNK_BYTES,
        # The memory of a list is allocated when its length is read, before its items arrive.
        max_array_len=_MAX_HEADERS,
        max_map_len=_MAX_FIELDS,
    )
    fed = begins_at = number = 0
    async for data in read_chunks(descriptor):
        fed += len(data)
        records: list[InputRecord] = []
        problem: MinibrokerError | None = None
        try:
            unpacker.feed(data)
            for found in unpacker:
                records.append(_from_map(found, number + 1, begins_at))
                number += 1
                begins_at = unpacker.tell()
        except MinibrokerError as error:
            problem = error
        except (msgpack.UnpackException, ValueError, TypeError, OverflowError) as error:
            if fed - begins_at <= MAX_RECORD_BYTES:
                why = f" ({error})" if str(error) else ""
                problem = _no_record("record", number + 1, begins_at, f"it is not a MessagePack record{why}")
        if records:
            yield records
        if problem is None and fed - begins_at > MAX_RECORD_BYTES:
            problem = MinibrokerError(
                f"record {number + 1}, from byte {begins_at} on, is longer than {MAX_RECORD_BYTES} bytes, "
                "which no broker accepts"
            )
        if problem is not None:
            raise problem
    if begins_at != fed:
        raise MinibrokerError(
            f"the input is truncated: it ends within record {number + 1}, {counted(fed - begins_at, 'byte')} "
            f"after byte {begins_at}, where that record begins"
        )


_IGNORED = ("topic", "offset")
_NO_TIMESTAMP = -1
_FIELDS = frozenset(("key", "value", "headers", "timestamp", "partition", *_IGNORED))


def _from_map(found: object, number: int, begins_at: int) -> InputRecord:
    if not isinstance(found, dict):
        raise _no_record("record", number, begins_at, f"a map is expected, not {_named(found)}")
    if not found.keys() <= _FIELDS:
        unknown = next(name for name in found if name not in _FIELDS)
        raise _no_record("record", number, begins_at, f"there is no field {shown(unknown)}")
    if "value" not in found:
        raise _no_record("record", number, begins_at, _NO_VALUE)
    try:
        headers = found.get("headers")
        return InputRecord(
            _bytes("key", found.get("key")),
            _bytes("value", found["value"]),
            _whole("partition", found.get("partition"), 2**31),
            _whole("timestamp", _time(found.get("timestamp")), MAX_TIMESTAMP_MS + 1),
            None if headers is None else _headers(headers),
            begins_at,
        )
    except ValueError as error:
        raise _no_record("record", number, begins_at, str(error)) from None


def _bytes(name: str, value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise ValueError(f"{name} is {_named(value)}: give bytes, text or null")


def _time(timestamp: object) -> object:
    """`consume` prints a missing timestamp as none."""
    return None if timestamp == _NO_TIMESTAMP else timestamp


def _whole(name: str, value: object, limit: int) -> int | None:
    if value is None or (type(value) is int and 0 <= value < limit):
        return value
    raise ValueError(f"{name} is {_named(value)}: give a whole number from 0 to {limit - 1}")


def _headers(value: object) -> list[Header]:
    if not isinstance(value, list):
        raise ValueError(f"headers is {_named(value)}: give a list")
    headers: list[Header] = []
    for header in value:
        if not isinstance(header, dict) or header.keys() != {"name", "value"} or not isinstance(header["name"], str):
            raise ValueError(f"headers has {_named(header)}: give maps with a name (text) and a value")
        headers.append((header["name"], _bytes("the value of a header", header["value"])))
    return headers


def _named(value: object) -> str:
    """Return the value in a form short enough for a message."""
    text = "null" if value is None else repr(value) if isinstance(value, (bool, int, float)) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- JSON --------------------------------------------------------------------------------------------------------


class _JsonHeader(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: str | msgspec.UnsetType | None = msgspec.UNSET
    value_base64: bytes | msgspec.UnsetType = msgspec.UNSET


class _JsonRecord(msgspec.Struct, forbid_unknown_fields=True):
    topic: str | None = None
    partition: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    offset: int | None = None
    timestamp: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TIMESTAMP_MS)] | None = None
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    key_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    value: str | msgspec.UnsetType | None = msgspec.UNSET
    value_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    headers: list[_JsonHeader] | None = None


_decode_json: Callable[[bytes], _JsonRecord] = msgspec.json.Decoder(_JsonRecord).decode


async def _read_json(descriptor: int) -> AsyncIterator[list[InputRecord]]:
    begins_at = number = 0
    async for lines in read_lines(descriptor):
        records: list[InputRecord] = []
        problem: MinibrokerError | None = None
        for line in lines:
            number += 1
            try:
                records.append(_from_json(_decode_json(line), begins_at))
            except (msgspec.MsgspecError, ValueError) as error:
                problem = _no_record("line", number, begins_at, str(error))
                break
            begins_at += len(line) + 1
        if records:
            yield records
        if problem is not None:
            raise problem


def _from_json(found: _JsonRecord, begins_at: int) -> InputRecord:
    headers = found.headers
    return InputRecord(
        None if found.key is found.key_base64 is msgspec.UNSET else _either("key", found.key, found.key_base64),
        _either("value", found.value, found.value_base64),
        found.partition,
        None if found.timestamp == _NO_TIMESTAMP else found.timestamp,
        None if headers is None else [(h.name, _either("value", h.value, h.value_base64)) for h in headers],
        begins_at,
    )


def _either(name: str, text: str | msgspec.UnsetType | None, encoded: bytes | msgspec.UnsetType) -> bytes | None:
    if text is msgspec.UNSET:
        if encoded is msgspec.UNSET:
            raise ValueError(_NO_VALUE)
        return encoded
    if encoded is not msgspec.UNSET:
        raise ValueError(f"it has both {name} and {name}_base64: give one of them")
    return None if text is None else text.encode()


_NO_VALUE = "it has no value: write null for a tombstone"


def _no_record(noun: str, number: int, begins_at: int, why: str) -> MinibrokerError:
    return MinibrokerError(
        f"{noun} {number}, which begins at byte {begins_at}, is not a valid record: {why}. Example: {_EXAMPLE}"
    )
