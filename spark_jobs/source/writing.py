"""Rows of a DataFrame, written as records by the tasks of `write` and `writeStream`, at least once.

The producer is idempotent and waits for all in-sync replicas, so its own retries cause no duplicates. But Spark does
not know which rows a failed attempt of a task has written, and repeats the task from its beginning. `exactly_once` has
the writes with `exactlyOnce=true`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pyarrow
from pyspark.sql.datasource import WriterCommitMessage

from minibroker.client.errors import InvalidSetting
from minibroker.client.producer import Producer, drain_patiently
from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.source.options import WriteOptions

COLUMNS = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}
"""The possible types of each column. Only `value` is required; columns with other names are not written."""


WRITER_CLIENT_ID = "minibroker-spark-writer"
SLICE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """A task's message to the driver: the number of rows in the logs of all in-sync replicas."""

    rows: int


def check_write_schema(options: WriteOptions, types: Mapping[str, str]) -> None:
    """Check Spark's type names, by column. Raises InvalidSetting."""
    if "value" not in types:
        raise InvalidSetting(
            "columns",
            ", ".join(types),
            "there is no column `value`, the record's value: name one with .alias('value')",
        )
    for name, allowed in COLUMNS.items():
        if name in types and types[name] not in allowed:
            raise InvalidSetting(f"column {name}", types[name], f"its type must be {' or '.join(allowed)}: cast it")
    if options.topic is None and "topic" not in types:
        raise InvalidSetting("topic", None, "give the option `topic`, or a column `topic`")


def write_batches(options: WriteOptions, batches: Iterable[pyarrow.RecordBatch]) -> Written:
    """Write all rows, and return once they are acknowledged.

    Raises DeliveryFailed with the reasons, NetworkError, and MinibrokerError for a row that cannot be a record.
    """
    return asyncio.run(_write(options, batches))


async def _write(options: WriteOptions, batches: Iterable[pyarrow.RecordBatch]) -> Written:
    async with Producer(options.bootstrap, client_id=WRITER_CLIENT_ID, linger_ms=5, **options.security) as producer:
        return Written(await send_all(producer, options, batches))


async def send_all(producer: Producer, options: WriteOptions, batches: Iterable[pyarrow.RecordBatch]) -> int:
    """Send all rows, and return their number once they are acknowledged."""
    rows = 0
    # The iterator blocks the event loop while Spark computes the next batch: nothing may be in flight then.
    for batch in batches:
        await _send(producer, options, batch)
        await producer.flush()
        rows += batch.num_rows
    return rows


async def _send(producer: Producer, options: WriteOptions, batch: pyarrow.RecordBatch) -> None:
    if options.topic is not None and not {"partition", "headers"} & set(batch.schema.names):
        await _send_columns(producer, options.topic, batch)
        return
    values = _bytes(batch, "value")
    topics = repeat(options.topic) if options.topic is not None else _column(batch, "topic")
    columns = zip(values, _bytes(batch, "key"), topics, _column(batch, "partition"), _headers(batch), strict=False)
    for value, key, topic, partition, headers in columns:
        if topic is None:
            raise MinibrokerError("a row's topic is null: give the option `topic`, or fill the column")
        producer.send(topic, value, key=key, partition=partition, headers=headers)
        await drain_patiently(producer)


async def _send_columns(producer: Producer, topic: str, batch: pyarrow.RecordBatch) -> None:
    """Send whole columns, in slices that leave room in the buffer for batches in flight."""
    rows = max(1, min(batch.num_rows, batch.num_rows * SLICE_BYTES // max(batch.nbytes, 1)))
    has_keys = "key" in batch.schema.names
    for first in range(0, batch.num_rows, rows):
        part = batch.slice(first, rows)
        producer.send_batch(topic, part.column("value"), part.column("key") if has_keys else None)
        await drain_patiently(producer)


def _column(batch: pyarrow.RecordBatch, name: str) -> Iterable[Any]:
    """Return the column's values, or endless nulls if there is no such column."""
    return batch.column(name).to_pylist() if name in batch.schema.names else repeat(None)


def _bytes(batch: pyarrow.RecordBatch, name: str) -> Iterable[bytes | None]:
    if name not in batch.schema.names:
        return repeat(None)
    column = batch.column(name)
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    values: list[bytes | None] = column.to_pylist()
    return values


def _headers(batch: pyarrow.RecordBatch) -> Iterator[Sequence[tuple[str, bytes | None]] | None]:
    for headers in _column(batch, "headers"):
        if headers is not None and any(header is None or header["key"] is None for header in headers):
            raise MinibrokerError("a row's headers contain null, or a header without a key: drop it before writing")
        yield None if headers is None else [(header["key"], header["value"]) for header in headers]
