"""Decoded batches as Arrow batches.

Records become columns in three steps without a loop over single records: a batch is decoded into lists
(`minibroker.protocol.records`), lists are joined until there are MIN_ROWS rows, and each joined list becomes one Arrow
array. Small batches are joined because even a short array costs about 20 us: with ten records each, arrays cost 40
times as much as everything else.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pyarrow
import pyarrow.compute

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import MAX_TIMESTAMP_MS, DecodedBatch
from minibroker.protocol.records.compression import Compression
from minibroker.spark_jobs.source.offsets import OffsetRange

MIN_ROWS = 10_000
ENOUGH_BYTES = 32 * 1024 * 1024
"""Rows are joined until one of the two limits is reached. Arrow's offsets into a column of bytes have 32 bits."""

_MICROSECONDS = pyarrow.scalar(1_000, pyarrow.int64())
"""Microseconds per millisecond. Arrow takes longer to convert a Python int than to multiply 10,000 numbers by it."""

CREATE_TIME = 0
LOG_APPEND_TIME = 1


class BatchBuilder:
    """Joins decoded batches into Arrow batches."""

    def __init__(
        self, wanted: OffsetRange, schema: pyarrow.Schema, include_headers: bool, fail_on_timestamp: bool = True
    ) -> None:
        self._range = wanted
        self._schema = schema
        self._include_headers = include_headers
        self._fail_on_timestamp = fail_on_timestamp
        self._constants: list[pyarrow.Array] = []
        """The columns topic and partition, with the largest number of rows needed so far."""
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._bytes = 0
        self._keys: list[bytes | None] = []
        """Shorter than the values if the last keys are null."""
        self._values: list[bytes | None] = []
        self._offsets: list[pyarrow.Array] = []
        self._base_timestamps: list[tuple[int, int]] = []
        """(timestamp, rows)"""
        self._timestamp_deltas: list[int] = []
        self._claimed_timestamps: list[tuple[int, int]] = []
        """(largest timestamp according to the batch's header, rows)"""
        self._timestamp_types: list[tuple[int, int]] = []
        """(type, rows)"""
        self._headers: list[Any] = []

    @property
    def is_full(self) -> bool:
        return self.rows >= MIN_ROWS or self._bytes >= ENOUGH_BYTES

    def add(self, batch: DecodedBatch, first_offset: int) -> None:
        """Add the records of a batch from `first_offset` to the end of the range."""
        offsets = batch.offsets
        count = len(offsets)
        first = bisect_left(offsets, first_offset)
        last = bisect_left(offsets, self._range.end)
        if first >= last:
            return
        is_whole = (first, last) == (0, count)
        if batch.keys is not None:
            self._keys += [None] * (self.rows - len(self._keys))
            self._keys += batch.keys if is_whole else batch.keys[first:last]
        self._values += batch.values if is_whole else batch.values[first:last]
        _add_run(self._base_timestamps, batch.base_timestamp, last - first)
        self._timestamp_deltas += batch.timestamp_deltas if is_whole else batch.timestamp_deltas[first:last]
        if isinstance(offsets, range):
            self._offsets.append(pyarrow.arange(offsets[first], offsets[last - 1] + 1))
        else:
            self._offsets.append(pyarrow.array(offsets[first:last], pyarrow.int64()))
        _add_run(self._claimed_timestamps, batch.header.max_timestamp, last - first)
        kind = LOG_APPEND_TIME if batch.header.is_log_append_time else CREATE_TIME
        _add_run(self._timestamp_types, kind, last - first)
        if self._include_headers and batch.headers is not None:
            self._headers += [None] * (self.rows - len(self._headers))
            self._headers += [headers or None for headers in batch.headers[first:last]]
        self.rows += last - first
        if batch.shared_bytes or batch.header.compression is not Compression.NONE:
            self._bytes += _size(batch)
        else:
            self._bytes += batch.header.size

    def build(self) -> pyarrow.RecordBatch:
        """Return the added records as columns in the order of the schema. Raises MinibrokerError for a timestamp out of
        Spark's range if `fail_on_timestamp` is set; otherwise that row's timestamp is null."""
        rows = self.rows
        bases = _repeated(self._base_timestamps, pyarrow.int64())
        try:
            milliseconds = pyarrow.compute.add_checked(bases, _integers(self._timestamp_deltas))
            microseconds = pyarrow.compute.multiply_checked(milliseconds, _MICROSECONDS)
        except pyarrow.ArrowInvalid:
            microseconds = self._microseconds_in_range(bases)
        topics, partitions = self._constant_columns(rows)
        columns = [
            self._bytes_column(self._keys, rows),
            pyarrow.array(self._values, pyarrow.binary()),
            topics,
            partitions,
            _joined(self._offsets),
            microseconds.view(self._schema.field("timestamp").type),
            _repeated(self._timestamp_types, pyarrow.int32()),
        ]
        if self._include_headers:
            kind = self._schema.field("headers").type
            self._headers += [None] * (rows - len(self._headers) if self._headers else 0)
            columns.append(pyarrow.array(self._headers, kind) if self._headers else pyarrow.nulls(rows, kind))
        self._clear()
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _microseconds_in_range(self, bases: pyarrow.Array) -> pyarrow.Array:
        """Return the timestamps, null for those whose microseconds exceed 64 bits. Raises as `build`, but not for a
        timestamp that the header of its batch denies. Brokers refuse a batch that admits it, so whoever sends one
        deliberately denies it, and must not be able to fail queries."""
        milliseconds = list(map(sum, zip(bases.to_pylist(), self._timestamp_deltas, strict=True)))
        found = [None if abs(each) > MAX_TIMESTAMP_MS else each * 1_000 for each in milliseconds]
        claimed = (most for most, rows in self._claimed_timestamps for _ in range(rows))
        wrong = (
            row
            for row, (each, most) in enumerate(zip(found, claimed, strict=True))
            if each is None and abs(most) > MAX_TIMESTAMP_MS
        )
        row = next(wrong, None) if self._fail_on_timestamp else None
        if row is not None:
            offset = _joined(self._offsets)[row].as_py()
            raise MinibrokerError(
                f"{self._range.topic_partition}: the record at offset {offset} has a timestamp of "
                f"{milliseconds[row]} ms, and Spark's range ends at {MAX_TIMESTAMP_MS} ms (was it written in "
                "microseconds or nanoseconds?). Read it with timestampOutOfRange=null (a job: "
                "--timestamp-out-of-range null), also after a restart from "
                "the checkpoint"
            )
        return pyarrow.array(found, pyarrow.int64())

    @staticmethod
    def _bytes_column(values: list[bytes | None], rows: int) -> pyarrow.Array:
        if not values:
            return pyarrow.nulls(rows, pyarrow.binary())
        return pyarrow.array(values + [None] * (rows - len(values)), pyarrow.binary())

    def _constant_columns(self, rows: int) -> list[pyarrow.Array]:
        if not self._constants or len(self._constants[0]) < rows:
            self._constants = [
                pyarrow.repeat(pyarrow.scalar(self._range.topic, pyarrow.string()), rows),
                pyarrow.repeat(pyarrow.scalar(self._range.partition, pyarrow.int32()), rows),
            ]
        return [column.slice(0, rows) for column in self._constants]


def _joined(arrays: list[pyarrow.Array]) -> pyarrow.Array:
    return arrays[0] if len(arrays) == 1 else pyarrow.concat_arrays(arrays)


def _add_run(runs: list[tuple[int, int]], value: int, rows: int) -> None:
    """Add a run of rows that have the same value."""
    if runs and runs[-1][0] == value:
        rows += runs.pop()[1]
    runs.append((value, rows))


def _repeated(runs: list[tuple[int, int]], kind: pyarrow.DataType) -> pyarrow.Array:
    """Return a column from pairs of a value and its number of rows."""
    return _joined([pyarrow.repeat(pyarrow.scalar(value, kind), rows) for value, rows in runs])


def _integers(numbers: list[int]) -> pyarrow.Array:
    """Return a column of 64-bit numbers, four times faster if each fits into a byte, as deltas mostly do."""
    try:
        small = bytes(numbers)
    except ValueError:
        return pyarrow.array(numbers, pyarrow.int64())
    return pyarrow.Array.from_buffers(pyarrow.uint8(), len(numbers), [None, pyarrow.py_buffer(small)]).cast(
        pyarrow.int64()
    )


def _size(batch: DecodedBatch) -> int:
    """Return the bytes of keys and values, and those of headers that all records share."""
    size = sum(map(len, filter(None, batch.values))) + sum(map(len, filter(None, batch.keys or ())))
    return size if batch.headers is None else size + batch.shared_bytes * batch.count
