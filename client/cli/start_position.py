"""`--from` of `consume`: beginning, end, an offset, or a time."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from minibroker.client.cli.output import UsageError

_MAX_INT64 = 2**63 - 1


class Edge(Enum):
    BEGINNING = "beginning"
    END = "end"


class AtOffset(NamedTuple):
    offset: int


class AtTime(NamedTuple):
    timestamp_ms: int


StartPosition = Edge | AtOffset | AtTime


def parse_start_position(text: str) -> StartPosition:
    """Raises UsageError that says what is expected."""
    if text in (Edge.BEGINNING.value, Edge.END.value):
        return Edge(text)
    digits = text.removeprefix("@")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 19 and int(digits) <= _MAX_INT64:
        return AtTime(int(digits)) if text.startswith("@") else AtOffset(int(digits))
    raise UsageError(
        f"--from {text!r}: beginning, end, an offset such as 42, or @ and milliseconds since 1970 such as "
        "@1700000000000 is expected"
    )
