"""`--from` of `consume`, `--to` of `groups reset-offsets`: beginning, end, an offset, the last N records, or a time."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from minibroker.client.cli.terminal.output import UsageError
from minibroker.client.cli.terminal.times import hint, parse_time_ms

_MAX_INT64 = 2**63 - 1


class Edge(Enum):
    BEGINNING = "beginning"
    END = "end"


class AtOffset(NamedTuple):
    offset: int


class Last(NamedTuple):
    records: int
    """The number of records in each partition."""


class AtTime(NamedTuple):
    timestamp_ms: int


StartPosition = Edge | AtOffset | Last | AtTime

_EDGES = {
    "beginning": Edge.BEGINNING,
    "earliest": Edge.BEGINNING,
    "end": Edge.END,
    "latest": Edge.END,
}


def parse_start_position(text: str, option: str = "--from") -> StartPosition:
    """Raises UsageError, which says what is expected."""
    if text in _EDGES:
        return _EDGES[text]
    if text.startswith("@"):
        timestamp_ms = parse_time_ms(text[1:])
        if timestamp_ms is not None:
            return AtTime(timestamp_ms)
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 19 and int(digits) <= _MAX_INT64:
        if not text.startswith("-"):
            return AtOffset(int(digits))
        if int(digits) > 0:
            return Last(int(digits))
    edges = (
        "earliest, latest" if option == "--to" else "beginning, end"
    )  # both are accepted; these are the words of the help
    raise UsageError(
        f"{option} {text!r}: give {edges}, an offset such as 42, -10 for the last 10 records of each "
        "partition, or @ and a time such as @2026-11-22T10:30:00Z or @1700000000000 (milliseconds since "
        f"1970){hint(text[1:]) if text.startswith('@') else ''}"
    )
