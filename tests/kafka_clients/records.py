"""Numbered records and the problems in reading them: pure functions, for the matrix of Kafka's clients.

The record with a given number is the same in every language, so a record that was read shows whether it is as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

PARTITIONS = 3
NULL = "\\N"


class Content(NamedTuple):
    key: str
    value: str
    headers: str


class Read(NamedTuple):
    """A record as a client printed it."""

    partition: int
    offset: int
    timestamp_ms: int
    content: Content


Expected = Callable[[int], Content]


def full_record(number: int) -> Content:
    """Records with null keys, null values, an empty and a null header, and values of all small lengths."""
    key = NULL if number % 5 == 0 else f"key-{number}"
    value = NULL if number % 7 == 0 else f"value-{number}-{'x' * (number % 100)}"
    return Content(key, value, f"n={number},empty=,null={NULL}")


def with_empty_header(number: int) -> Content:
    """Records of clients that read and write a null header as an empty one."""
    return full_record(number)._replace(headers=f"n={number},empty=,null=")


def with_key(number: int) -> Content:
    """Records of clients that write a null header as an empty one, and need a key or a value."""
    return with_empty_header(number)._replace(key=f"key-{number}")


def without_headers(number: int) -> Content:
    """Records of a client that cannot set headers per record and needs a key."""
    return Content(f"key-{number}", full_record(number).value, "")


def number_of(content: Content) -> int:
    """Raises ValueError for a record that no program of the matrix wrote."""
    first = content.headers.split(",")[0]
    return int(first.removeprefix("n=") if first.startswith("n=") else content.key.removeprefix("key-"))


def problems_of_reading(
    acknowledged: Mapping[int, tuple[int, int] | None],
    read: Sequence[Read],
    expected: Expected,
    base_ms: int | None = None,
) -> list[str]:
    """Compare the records read from whole partitions with the acknowledged ones. An empty result means that no record
    was lost, duplicated, reordered or altered.

    `acknowledged` maps a record's number to its partition and offset, None if the client did not report them.
    `base_ms` is the timestamp of record 0; each next record is a millisecond later.
    """
    problems = Problems()
    places: dict[int, tuple[int, int]] = {}
    highest: dict[int, tuple[int, int]] = {}
    for partition, offset, timestamp_ms, content in read:
        number = number_of(content)
        if number in places:
            problems.add("duplicated", number)
        places.setdefault(number, (partition, offset))
        if content != expected(number) or base_ms not in (None, timestamp_ms - number):
            problems.add(f"altered: at {timestamp_ms} {content}, not {expected(number)}; record", number)
        before = highest.get(partition)
        if before is not None and (offset <= before[0] or number <= before[1]):
            problems.add("reordered", number)
        highest[partition] = (offset, number)
    for number, place in acknowledged.items():
        if number not in places:
            problems.add("lost", number)
        elif place is not None and places[number] != place:
            problems.add(f"acknowledged at {place}, but found at {places[number]}:", number)
    return problems.lines()


def problems_of_group(wanted: Iterable[int], members: Sequence[Sequence[list[str]]], expected: Expected) -> list[str]:
    """Check, with the lines that each member of a group printed, that all `wanted` records were read, and that each
    member read its partitions in order."""
    problems = Problems()
    seen: set[int] = set()
    for lines in members:
        last: dict[int, int] = {}
        for line in lines:
            if line[0] in ("assigned", "revoked"):
                last.pop(int(line[1]), None)
            elif line[0] == "rec":
                read = parse_read(line)
                number = number_of(read.content)
                seen.add(number)
                if read.content != expected(number):
                    problems.add(f"altered: {read.content}, not {expected(number)}; record", number)
                if read.offset <= last.get(read.partition, -1):
                    problems.add("reordered", number)
                last[read.partition] = read.offset
    for number in wanted:
        if number not in seen:
            problems.add("lost", number)
    return problems.lines()


def parse_read(line: Sequence[str]) -> Read:
    _, partition, offset, timestamp_ms, key, value, headers = line
    return Read(int(partition), int(offset), int(timestamp_ms), Content(key, value, headers))


class Problems:
    """Problems by kind, each with the first record's number and a count."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}

    def add(self, kind: str, number: int) -> None:
        kind = kind if len(self._numbers) < 5 else "more problems:"
        self._numbers.setdefault(kind, []).append(number)

    def lines(self) -> list[str]:
        return [
            f"{kind} {numbers[0]}" + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
            for kind, numbers in self._numbers.items()
        ]
