"""How `consume` prints a record: `json`, `msgpack`, `value`, or a format string with kcat's tokens.

`record_files` reads the first two.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable

import msgspec

from minibroker.client.cli.terminal.output import UsageError
from minibroker.client.fetching.records import Record

_TOKENS = "%t topic, %p partition, %o offset, %k key, %s value, %T timestamp in ms, %h headers, %% a percent sign"
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_PIECE = re.compile(r"%(.?)|\\(x[0-9a-fA-F]{2}|.?)|([^%\\]+)", re.DOTALL)


Formatter = Callable[[Record], bytes]
"""Returns the bytes to write for a record, including the end of line."""


def formatter(output: str) -> Formatter:
    """Return the formatter. Raises UsageError if `output` is neither a name nor a format with at least one token."""
    if output == "json":
        return _as_json
    if output == "msgpack":
        return _as_msgpack
    if output == "value":
        return lambda record: (record.value or b"") + b"\n"
    if "%" not in output:
        raise UsageError(f"--output '{output}' is not json, msgpack, value or a format with tokens ({_TOKENS})")
    pieces = _compiled(output)
    return lambda record: b"".join(piece if isinstance(piece, bytes) else piece(record) for piece in pieces)


def unescape(text: str) -> bytes:
    r"""Replace `\n`, `\t`, `\r`, `\0`, `\\` and `\xNN` by their bytes; a percent sign stays."""
    return b"".join(piece for piece in _compiled(text.replace("%", "%%")) if isinstance(piece, bytes))


def _compiled(text: str) -> list[bytes | Formatter]:
    pieces: list[bytes | Formatter] = []
    for match in _PIECE.finditer(text):
        token, escape, literal = match.groups()
        if literal is not None:
            pieces.append(os.fsencode(literal))
        elif token == "%":
            pieces.append(b"%")
        elif token is not None:
            if token not in _FIELDS:
                raise UsageError(f"%{token} in '{text}' is not a token: use {_TOKENS}")
            pieces.append(_FIELDS[token])
        elif escape.startswith("x") and len(escape) == 3:
            pieces.append(bytes([int(escape[1:], 16)]))
        elif escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
        else:
            raise UsageError(rf"\{escape} in '{text}' is not an escape: use \n \t \r \0 \\ or \xNN")
    return pieces


def _headers(record: Record) -> bytes:
    """Return `name=value,name=value` as kcat prints it, with NULL for a null value."""
    return b",".join(name.encode() + b"=" + (b"NULL" if value is None else value) for name, value in record.headers)


_FIELDS: dict[str, Formatter] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "T": lambda record: b"%d" % record.timestamp_ms,
    "h": _headers,
}


def _as_json(record: Record) -> bytes:
    fields: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        **text_or_base64("key", record.key),
        **text_or_base64("value", record.value),
    }
    if record.headers:
        fields["headers"] = [{"name": name, **text_or_base64("value", value)} for name, value in record.headers]
    return msgspec.json.encode(fields) + b"\n"


_encode_msgpack = msgspec.msgpack.Encoder().encode


def _as_msgpack(record: Record) -> bytes:
    """The fields of `_as_json` as a map, with keys and values as raw bytes."""
    fields: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "key": record.key,
        "value": record.value,
    }
    if record.headers:
        fields["headers"] = [{"name": name, "value": value} for name, value in record.headers]
    return _encode_msgpack(fields)


def text_or_base64(name: str, data: bytes | None) -> dict[str, object]:
    """Return text as text, and other bytes as base64 under another name, so that nothing is lost or ambiguous."""
    if data is None:
        return {name: None}
    try:
        return {name: str(data, "utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
