"""The records of a `send_batch` as columns: checked, measured and divided. Pure.

The problem: a call with thousands of records must check that every value is bytes, find the end of each batch, and
group the records by partition, without a step of Python for each record. So each of these is one pass in C over a
column: `set(map(type, ...))` for the types, a running sum of lengths in which bisection finds the end of a batch, and
`itemgetter(*indexes)` for the records of one partition. Rejected: numpy, which has no column of byte strings, and would
be a dependency of each client.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import Any, Protocol

from minibroker.client.producing.batch import RECORD_OVERHEAD
from minibroker.client.shown import shown
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import MAX_TIMESTAMP_MS

BytesLike = bytes | bytearray | memoryview
Column = list[bytes | None]


class ArrowArray(Protocol):
    """A pyarrow Array or ChunkedArray."""

    def __len__(self) -> int: ...

    def to_pylist(self) -> list[Any]: ...


_BYTES = {bytes}
_BYTES_OR_NONE = {bytes, type(None)}
_INT = {int}


class Columns:
    """Records as columns of equal length. The columns are not copied, and must not change while this is used."""

    __slots__ = ("_ends", "_longest", "keys", "timestamps", "values")

    def __init__(self, values: Column, keys: Column | None, timestamps: list[int]) -> None:
        self.values = values
        self.keys = keys
        self.timestamps = timestamps
        lengths = _lengths(values)
        if keys is not None:
            lengths = list(map(add, lengths, _lengths(keys)))
        self._longest = max(lengths, default=0)
        self._ends = list(accumulate(lengths, initial=0))
        """Bytes of keys and values before each record, and of all records."""

    def __len__(self) -> int:
        return len(self.values)

    def size(self, start: int, end: int) -> int:
        """Return an upper bound of the bytes of the records from `start` to before `end`."""
        return self._ends[end] - self._ends[start] + RECORD_OVERHEAD * (end - start)

    def end_within(self, start: int, room: int) -> int:
        """Return the end of the longest run of records from `start` on that fits in `room` bytes; `start` if the first
        does not fit."""
        count = len(self.values)
        if self.size(start, count) <= room:
            return count
        fitting = bisect_right(range(start, count + 1), room, key=lambda end: self.size(start, end))
        return start + fitting - 1

    def first_above(self, size: int) -> int | None:
        """Return the index of the first record of more than `size` bytes; None if there is none."""
        if self._longest + RECORD_OVERHEAD <= size:
            return None
        return next(index for index in range(len(self.values)) if self.size(index, index + 1) > size)

    def pick(self, indexes: Sequence[int]) -> Columns:
        """Return these records, in this order."""
        if len(indexes) == 1:
            (index,) = indexes
            keys = None if self.keys is None else [self.keys[index]]
            return Columns([self.values[index]], keys, [self.timestamps[index]])
        get = itemgetter(*indexes)
        return Columns(
            list(get(self.values)), None if self.keys is None else list(get(self.keys)), list(get(self.timestamps))
        )


def _lengths(column: Column) -> list[int]:
    try:
        return list(map(len, column))  # type: ignore[arg-type]  # nulls are rare, and noticed by their error
    except TypeError:
        return [0 if data is None else len(data) for data in column]


def grouped(targets: Sequence[int]) -> dict[int, list[int]]:
    """Return the indexes of each target, ascending; targets are in the order of their first appearance."""
    groups: dict[int, list[int]] = {target: [] for target in dict.fromkeys(targets)}
    appends = {target: group.append for target, group in groups.items()}
    for index, target in enumerate(targets):
        appends[target](index)
    return groups


# --- checks of arguments --------------------------------------------------------------------------------------------


def checked_column(name: str, data: object) -> Column:
    """Return a list of bytes and None, from a list of bytes-like objects or a pyarrow array of binary or string.

    Raises TypeError naming the first element of another type.
    """
    if is_arrow(data):
        return from_arrow(name, data)
    column: Column = checked_list(name, data)
    types = set(map(type, column))
    if types <= _BYTES_OR_NONE:
        return column
    return [
        element if type(element) is bytes or element is None else as_bytes(f"{name}[{index}]", element)
        for index, element in enumerate(column)
    ]


def checked_list(name: str, data: object) -> list[Any]:
    """Return the iterable as a list. Raises TypeError for a single value, such as a str, that only looks iterable."""
    if isinstance(data, list):
        return data
    if isinstance(data, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(data, Iterable):
        raise TypeError(f"{name} must be a list, or a pyarrow array, not {type(data).__name__}")
    return list(data)


def checked_timestamps(timestamps_ms: object) -> list[int]:
    """Return a list of timestamps, from a list or a pyarrow array of integers or timestamps. Raises TypeError for other
    types, and BrokerError (INVALID_TIMESTAMP) for a time out of range."""
    column = _arrow_times(timestamps_ms) if is_arrow(timestamps_ms) else checked_list("timestamps_ms", timestamps_ms)
    types = set(map(type, column))
    if types and not (types == _INT and min(column) >= 0 and max(column) <= MAX_TIMESTAMP_MS):
        index, wrong = next(
            (index, each)
            for index, each in enumerate(column)
            if type(each) is not int or not 0 <= each <= MAX_TIMESTAMP_MS
        )
        raise BrokerError(
            ErrorCode.INVALID_TIMESTAMP,
            f"timestamps_ms[{index}]={shown(wrong)}: give milliseconds since 1970, a whole number from 0 to "
            f"{MAX_TIMESTAMP_MS}",
            is_complete=True,
        )
    return column


def _arrow_times(data: Any) -> list[Any]:
    """Return the milliseconds of a pyarrow array of integers, or of timestamps of any unit."""
    kind = str(getattr(data, "type", _kind(data)))
    unit = kind.partition("[")[2][:2].rstrip("],") if kind.startswith("timestamp[") else ""
    if not unit and not kind.startswith(("int", "uint")):
        raise TypeError(
            f"timestamps_ms must be a list of ints, or a pyarrow array of ints or timestamps, not of {kind}"
        )
    times: list[Any] = data.cast("int64", safe=False).to_pylist()
    if unit in ("", "ms"):
        return times
    numerator, denominator = {"s": (1_000, 1), "us": (1, 1_000), "ns": (1, 1_000_000)}[unit]
    return [None if time is None else time * numerator // denominator for time in times]


def _kind(data: object) -> str:
    return type(data).__name__


def as_bytes(name: str, data: object) -> bytes:
    """Return `data` as bytes. Raises TypeError, which calls it `name`."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    hint = f"; encode the text: {name}.encode()" if isinstance(data, str) else ""
    raise TypeError(f"{name} must be bytes, bytearray, memoryview or None, not {type(data).__name__}{hint}")


def is_arrow(data: object) -> bool:
    """Return whether it is a pyarrow Array or ChunkedArray, without importing pyarrow."""
    return type(data).__module__.partition(".")[0] == "pyarrow" and hasattr(data, "to_pylist")


def from_arrow(name: str, data: Any) -> Column:
    """Return the elements of a pyarrow array of binary or string. Raises TypeError for another type, and for a table.

    They are cut out of the array's buffers. `to_pylist` creates an Arrow object for each element first, and takes
    several times as long.
    """
    if not hasattr(data, "type"):
        raise TypeError(f'{name} must be a list, or a pyarrow array: pass one column of the {_kind(data)}, ["column"]')
    kind = str(data.type)
    if kind == "null":
        return [None] * len(data)
    if kind not in ("binary", "string", "large_binary", "large_string"):
        raise TypeError(f"{name} must be a pyarrow array of binary or string, not of {kind}: cast it")
    if hasattr(data, "chunks"):
        column: Column = []
        for chunk in data.chunks:
            column += from_arrow(name, chunk)
        return column
    count = len(data)
    if count == 0:
        return []
    _, offsets_buffer, data_buffer = data.buffers()
    all_offsets = memoryview(offsets_buffer).cast("q" if kind.startswith("large") else "i")
    offsets = all_offsets[data.offset : data.offset + count + 1].tolist()
    first = offsets[0]
    content = b"" if data_buffer is None else bytes(memoryview(data_buffer)[first : offsets[-1]])
    if first:
        offsets = [offset - first for offset in offsets]
    values: Column = list(map(content.__getitem__, map(slice, offsets, offsets[1:])))
    if data.null_count:
        valid = data.is_valid().cast("uint8")
        flags = memoryview(valid.buffers()[1])[valid.offset : valid.offset + count].tolist()
        values = [value if flag else None for value, flag in zip(values, flags, strict=True)]
    return values
