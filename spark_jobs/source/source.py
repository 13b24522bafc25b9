"""`spark.read.format("minibroker")`, readStream, write and writeStream: a Spark data source in Python.

    from minibroker.spark_jobs.source.source import MinibrokerDataSource

    spark.dataSource.register(MinibrokerDataSource)
    spark.readStream.format("minibroker").option("bootstrap.servers", "localhost:9092").option("subscribe", "orders")

Rows and options are those of Spark's Kafka connector (`options`). The executors read records as Arrow batches made from
record columns (`reading`), one task for each partition unless `minPartitions` or `maxRecordsPerPartition` divides them.
The driver assigns ranges of offsets to tasks (`offsets`), so a repeated task reads the same records.

Traps of Spark's Python API, and how they are avoided:

- No `pushFilters`: Spark keeps one mutable state for all queries on a DataFrame, and answers them wrongly. Prune with
  the offset and timestamp options.
- A stream's first offset is not in Spark's checkpoint until its first batch is committed, and every restart before that
  asks for it again: "latest" would be later each time, and skip records. With the option `initialOffsetsFile` it is
  resolved once and kept in that file; `initial_offsets` does so before the query starts. Give the option to every query
  that begins at "latest" and must not lose records.
- An exception in `latestOffset` ends the query, so it waits for failovers.

Writing is at least once by default: each task has an idempotent producer, which retries without duplicates, and the
task ends when all in-sync replicas have acknowledged every record. But a task or batch that Spark repeats is written
again. With `exactlyOnce=true`, tasks leave their transactions to the driver, which commits all or none
(`exactly_once`).

Classes are at module level since Spark pickles readers and writers by reference.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from minibroker.client.errors import InvalidSetting
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.bounds import earliest_offsets, latest_offsets, resolve, starting_offsets
from minibroker.spark_jobs.source.exactly_once import (
    NAME_PREFIX,
    Place,
    WrittenInTransaction,
    abort_batch,
    commit_batch,
    prepare_rows,
)
from minibroker.spark_jobs.source.initial_offsets import load_or_store
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.offsets import (
    JsonOffsets,
    OffsetRange,
    Offsets,
    TopicOffsets,
    backlog,
    by_partition,
    epochs_of,
    from_json,
    grouped,
    loss_error,
    losses,
    prorated,
    ranges,
    split,
    to_json,
    unknown_partitions,
    up_to,
    with_kept_epochs,
)
from minibroker.spark_jobs.source.options import (
    ReadOptions,
    Subscription,
    WriteOptions,
    parse_include_headers,
    parse_read_options,
    parse_write_options,
)
from minibroker.spark_jobs.source.reading import ReadSettings, read_range
from minibroker.spark_jobs.source.writing import WRITER_CLIENT_ID, Written, check_write_schema, write_batches

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
"""Spark's properties of a task. They are not documented; `tests/spark` checks that a replay has the same ones."""

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def read_schema(include_headers: bool) -> StructType:
    """Return the schema of the source's rows, in the order of Kafka's connector."""
    fields = [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
    if include_headers:
        fields.append(StructField("headers", HEADERS))
    return StructType(fields)


class MinibrokerDataSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        return "minibroker"

    def schema(self) -> StructType:
        return read_schema(parse_include_headers(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        options = parse_read_options(self.options, is_streaming=False)
        return BatchReader(options, _checked_schema(schema, options))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 (Spark's name)
        options = parse_read_options(self.options, is_streaming=True)
        return StreamReader(options, _checked_schema(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter | ExactlyOnceBatchWriter:
        if overwrite:
            raise InvalidSetting("mode", "overwrite", 'a log can only be appended to: use mode("append")')
        options = _checked_write_options(self.options, schema, is_streaming=False)
        if options.topic is not None:
            # Check it here, since each task would wait for the topic and fail, as often as Spark repeats it.
            with LogClient(options.bootstrap, WRITER_CLIENT_ID, security=options.security) as client:
                client.topics(Subscription(topics=(options.topic,)))
        return ExactlyOnceBatchWriter(options) if options.is_exactly_once else BatchWriter(options)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> StreamWriter | ExactlyOnceStreamWriter:
        if overwrite:
            raise InvalidSetting("outputMode", "complete", 'a log can only be appended to: use outputMode("append")')
        options = _checked_write_options(self.options, schema, is_streaming=True)
        return ExactlyOnceStreamWriter(options) if options.is_exactly_once else StreamWriter(options)


def _checked_schema(schema: StructType, options: ReadOptions) -> StructType:
    expected = read_schema(options.include_headers)
    if schema != expected:
        raise InvalidSetting(
            "schema", schema.simpleString(), f"rows of this source are {expected.simpleString()}: drop .schema(...)"
        )
    return expected


def _checked_write_options(given: Mapping[str, str], schema: StructType, *, is_streaming: bool) -> WriteOptions:
    options = parse_write_options(given, is_streaming=is_streaming)
    check_write_schema(options, {field.name: field.dataType.simpleString() for field in schema.fields})
    return options


def _exempt_modules_from_collection() -> None:
    """Freeze the objects of modules, once in a process. Spark's workers collect garbage after every task, which takes
    20 to 50 ms with 60,000 such objects."""
    if gc.get_freeze_count() == 0 and TaskContext.get() is not None:
        gc.freeze()


class RangePartition(InputPartition):
    """One task: a range of one partition's offsets."""

    def __init__(self, wanted: OffsetRange) -> None:
        super().__init__(wanted)
        self.range = wanted


class _RangeReader:
    """The reader that executors run, for batches and streams."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def _client(self) -> LogClient:
        given = self._options
        return LogClient(
            given.bootstrap,
            f"{given.client_id}-driver",
            isolation_level=given.isolation_level,
            security=given.security,
        )

    def _tasks(self, whole: Sequence[OffsetRange]) -> list[InputPartition]:
        parts = split(whole, self._options.min_partitions, self._options.max_records_per_partition)
        return [RangePartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Return the records of one task. Raises as `read_range`."""
        if not isinstance(partition, RangePartition):
            return iter(())  # Spark's substitute for an empty list of partitions
        _exempt_modules_from_collection()
        given = self._options
        settings = ReadSettings(
            given.bootstrap,
            given.client_id,
            given.include_headers,
            given.fail_on_data_loss,
            given.fail_on_timestamp,
            given.isolation_level,
            given.security,
        )
        return read_range(settings, partition.range, to_arrow_schema(self._schema, timezone="UTC"))


class BatchReader(_RangeReader, DataSourceReader):
    """One DataFrame: its bounds are resolved when Spark plans a query, and again for the next query on it. To read the
    same records twice, give offsets, not "latest"."""

    def partitions(self) -> Sequence[InputPartition]:
        with self._client() as client:
            topics = client.topics(self._options.subscription)
            start = resolve(client, topics, self._options.starting, name="starting")
            end = resolve(client, topics, self._options.ending, name="ending")
            epochs = client.leader_epochs(topics.partitions)
        for partition in topics.partitions:
            if start[partition] > end[partition]:
                raise MinibrokerError(
                    f"{partition} would begin at offset {start[partition]} and end at {end[partition]}: give "
                    "startingOffsets (or timestamps) that are not after endingOffsets"
                )
        return self._tasks(
            [
                OffsetRange(
                    partition.topic,
                    topics.ids[partition.topic],
                    partition.partition,
                    start[partition],
                    stop,
                    epochs[partition],
                )
                for partition, stop in sorted(end.items())
            ]
        )


class StreamReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query. Spark keeps one reader in a process beside the driver, for offsets and plans; the tasks have
    copies, which only `read`."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._kept: LogClient | None = None
        """The client whose connections stay open as long as the query runs."""
        self._target: dict[str, TopicOffsets] | None = None
        """The end of a query with Trigger.AvailableNow."""
        self._ends: dict[str, TopicOffsets] | None = None
        """The ends of the logs at the last look."""
        self._looked_at: float | None = None
        self._triggered_at: float | None = None

    @property
    def client(self) -> LogClient:
        if self._kept is None:
            self._kept = self._client()
        return self._kept

    def stop(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # -- offsets --

    def initialOffset(self) -> JsonOffsets:  # noqa: N802
        """Return the start of a query without a checkpoint. See the module for `initialOffsetsFile`."""
        if self._options.initial_offsets_file is None:
            return to_json(self._starting())
        return to_json(load_or_store(Path(self._options.initial_offsets_file), self._starting))

    def _starting(self) -> dict[str, TopicOffsets]:
        return starting_offsets(self.client, self._options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._look()

    def reportLatestOffset(self) -> JsonOffsets | None:  # noqa: N802
        """Return the ends of the logs, for the query's progress: lag is their distance from the batch's end."""
        return None if self._ends is None else to_json(self._ends)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> JsonOffsets:  # noqa: N802
        """Return the end of the next batch: the logs' ends, or less with a limit; `start` means no batch.

        Waits for missing leaders, since an exception would end the query. Raises DataLost.
        """
        begin = from_json(start)
        self._rest()
        end = self._ends = self._look(begin)
        problems = losses(begin, end)
        if self._target is not None:
            end = up_to(self._target, end, begin)
        earliest = self._earliest(begin, end)
        problems += [f"{new} is new, and begins at offset {at}, not 0" for new, at in earliest.items() if at > 0]
        if problems:
            self._lose(problems)
        sizes = backlog(by_partition(begin) | earliest, by_partition(end))
        if isinstance(limit, ReadAllAvailable):
            return to_json(with_kept_epochs(begin, end))
        if self._is_too_early(sum(sizes.values())):
            return to_json(begin)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_offsets_per_trigger
        shares = prorated(sizes, most)
        ends = {
            partition: offset - sizes.get(partition, 0) + shares.get(partition, 0)
            for partition, offset in by_partition(end).items()
        }
        topic_ids = {topic: entry.topic_id for topic, entry in end.items()}
        return to_json(with_kept_epochs(begin, grouped(topic_ids, ends, epochs_of(end))))

    def _is_too_early(self, available: int) -> bool:
        """Apply `minOffsetsPerTrigger` and `maxTriggerDelay`. A query with Trigger.AvailableNow must end, and does not
        wait for more."""
        if available == 0 or self._target is not None:
            return False
        now = self.client.monotonic()
        if (
            available < self._options.min_offsets_per_trigger
            and self._triggered_at is not None
            and (now - self._triggered_at) * 1_000 < self._options.max_trigger_delay_ms
        ):
            return True
        self._triggered_at = now
        return False

    def _rest(self) -> None:
        """Limit the requests to brokers: without new records Spark asks a hundred times a second."""
        now = self.client.monotonic()
        if self._looked_at is not None and now < self._looked_at + LOOK_EVERY_S:
            self.client.pause(self._looked_at + LOOK_EVERY_S - now)
        self._looked_at = self.client.monotonic()

    def _look(self, since: Offsets | None = None) -> dict[str, TopicOffsets]:
        return latest_offsets(self.client, self._options, is_lenient=not self._options.fail_on_data_loss, since=since)

    def _lose(self, problems: Sequence[str]) -> None:
        if self._options.fail_on_data_loss:
            raise loss_error(problems)
        logger.warning("%s (failOnDataLoss=false: going on without)", "; ".join(problems))

    def _earliest(self, begin: Offsets, end: Offsets) -> dict[TopicPartition, int]:
        """Return the earliest offsets of the partitions that only `end` has. Missing ones (`failOnDataLoss=false`)
        begin at their ends, so nothing is read of them."""
        new = unknown_partitions(begin, end)
        found = earliest_offsets(self.client, self._options, new, is_lenient=not self._options.fail_on_data_loss)
        ends = by_partition(end)
        return {partition: found.get(partition, ends[partition]) for partition in new}

    # -- batches --

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, stop = from_json(start), from_json(end)
        return self._tasks(ranges(begin, stop, self._earliest(begin, stop)))

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: the checkpoint has the offsets."""


class _Writer:
    """The writer that executors run: at least once, since Spark may repeat a task or a batch."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Written:
        """Raises as `write_batches`: then the task has failed, and part of its rows may stay."""
        return write_batches(self._options, iterator)


class BatchWriter(_Writer, DataSourceArrowWriter):
    pass


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    pass


class ExactlyOnceBatchWriter(DataSourceArrowWriter):
    """One write of a DataFrame: all of its rows are committed, or none. Tasks and `commit` have copies of the driver's
    writer."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        run = str(uuid4())
        self._name = NAME_PREFIX + (options.write_id or run)
        self._guard = f"{self._name}-{run}"

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WrittenInTransaction:
        """Raises as `prepare_rows`."""
        task = _task()
        place = Place(self._name, 0, task.partitionId(), task.attemptNumber(), self._guard)
        return asyncio.run(prepare_rows(self._options, place, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        asyncio.run(commit_batch(self._options, self._name, 0, _ours(messages)))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        asyncio.run(abort_batch(self._options, self._name, 0, _ours(messages), self._guard))


class ExactlyOnceStreamWriter(DataSourceStreamArrowWriter):
    """The batches of a query. Spark makes a new writer for each `commit`, which learns the query's id from the
    messages."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WrittenInTransaction:
        """Raises as `prepare_rows`."""
        task = _task()
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise MinibrokerError(
                f"this version of Spark does not give tasks {QUERY_ID} and {BATCH_ID}, which exactlyOnce needs: use a "
                "version that minibroker's tests have (pyspark 4.2 or newer)"
            )
        place = Place(NAME_PREFIX + query, int(batch), task.partitionId(), task.attemptNumber())
        return asyncio.run(prepare_rows(self._options, place, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        ours = _ours(messages)
        if ours:
            asyncio.run(commit_batch(self._options, ours[0].place.name, batchId, ours))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        ours = _ours(messages)
        if ours:
            asyncio.run(abort_batch(self._options, ours[0].place.name, batchId, ours))


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None
    return task


def _ours(messages: Iterable[WriterCommitMessage | None]) -> list[WrittenInTransaction]:
    """Leave out the tasks that have failed."""
    return [message for message in messages if isinstance(message, WrittenInTransaction)]
