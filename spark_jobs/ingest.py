"""Topics to Parquet, exactly once: `minibroker spark ingest`, or `spark-submit spark_jobs/submit.py ingest`.

    spark = spark_session("reader")
    read_ingested(spark, "out").where("topic = 'orders'").count()

Each batch of a streaming query becomes a manifest of a table (see `spark_jobs/tables/table_writer.py`),
partitioned by topic and by the day of the records' timestamps (UTC). Rows are those of the source, with headers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minibroker.client.cli.terminal.live import progress_bar
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.jobs import Source, run_query, triggers_told
from minibroker.spark_jobs.source.offsets import by_partition
from minibroker.spark_jobs.tables.checkpoint import Checkpoint
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.tables.table_reader import read_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

CONTENT = {"job": "ingest"}
DAY = "date_from_unix_date(cast(floor(unix_millis(timestamp) / 86400000) as int))"
"""The day in UTC, independent of the session's time zone."""
DEFAULT_FAN_IN = 16


@dataclass(frozen=True)
class Ingested:
    """The rows and batches that one run added."""

    rows: int
    batches: int


def run_ingest(
    spark: SparkSession,
    source: Source,
    output: Path,
    checkpoint: Path,
    *,
    trigger: str | None = None,
    fan_in: int = DEFAULT_FAN_IN,
    stop: threading.Event | None = None,
) -> Ingested:
    """Ingest the records that exist now and return; with `trigger` ("10 seconds"), continue until `stop` is set.

    `fan_in` batches of small files are compacted into one; 0: never. Raises MinibrokerError if another process writes
    to the output, if output and checkpoint do not belong together, if records are gone, or if the query fails.
    """
    from minibroker.spark_jobs.source.initial_offsets import keep_initial_offsets
    from minibroker.spark_jobs.tables.table_writer import TableWriter

    with TableWriter(output, checkpoint, CONTENT) as writer:
        options = source.stream_options
        options |= keep_initial_offsets(options, checkpoint)
        writer.begin(CONTENT, Checkpoint(checkpoint).start())
        before = by_partition(writer.end)
        added = [0, 0]

        with progress_bar(
            f"ingest {', '.join(source.topics)}", _backlog(options, before) if trigger is None else None
        ) as update:

            def process(batch: DataFrame, number: int) -> None:
                if writer.publish(number, lambda directory: write_records(batch, directory)):
                    added[0] += writer.last.rows if writer.last is not None else 0
                    added[1] += 1
                    now = by_partition(writer.end)
                    update(sum(offset - before.get(partition, 0) for partition, offset in now.items()))
                if fan_in:
                    writer.compact(lambda files, place: _rewrite(spark, writer.table.data, files, place), fan_in)

            stream = spark.readStream.format("minibroker").options(**options).load()
            query = (
                stream.writeStream.foreachBatch(process)
                .queryName("ingest")
                .option("checkpointLocation", str(checkpoint))
                .trigger(**({"availableNow": True} if trigger is None else {"processingTime": trigger}))
            )
            with triggers_told(spark):
                run_query(spark, query.start(), stop or threading.Event())
        return Ingested(rows=added[0], batches=added[1])


def _backlog(options: dict[str, str], start: Mapping[TopicPartition, int]) -> int:
    from minibroker.spark_jobs.source.log_client import LogClient
    from minibroker.spark_jobs.source.options import LATEST, parse_read_options

    parsed = parse_read_options(options, is_streaming=True)
    with LogClient(
        parsed.bootstrap,
        f"{parsed.client_id}-progress",
        isolation_level=parsed.isolation_level,
        security=parsed.security,
    ) as client:
        partitions = client.topics(parsed.subscription).partitions
        ends = client.known_offsets(dict.fromkeys(partitions, LATEST))
    return sum(offset - start.get(partition, 0) for partition, offset in ends.items())


def write_records(batch: DataFrame, directory: Path) -> None:
    """Write rows of the source as Parquet files, each in the order of the partitions' logs."""
    from pyspark.sql import functions as F  # noqa: N812 (its usual name)

    (
        batch.withColumn("date", F.expr(DAY))
        .sortWithinPartitions("topic", "date", "partition", "offset")
        .write.partitionBy("topic", "date")
        .parquet(str(directory))
    )


def _rewrite(spark: SparkSession, data: Path, files: Sequence[str], directory: Path) -> None:
    (
        read_files(spark, data, files, _records_schema())
        .repartition("topic", "date")
        .sortWithinPartitions("topic", "date", "partition", "offset")
        .write.partitionBy("topic", "date")
        .parquet(str(directory))
    )


def _records_schema() -> StructType:
    from pyspark.sql.types import DateType

    from minibroker.spark_jobs.source.source import read_schema

    return read_schema(True).add("date", DateType())


def read_ingested(spark: SparkSession, path: str | Path) -> DataFrame:
    """Return the rows ingested so far: the source's rows with headers, and `date`.

    Every record is there once, even if a job runs, dies or compacts meanwhile. Evaluate the DataFrame within an hour:
    after that, compactions remove the files that they have replaced.
    """
    table = Table(path)
    return read_files(spark, table.data, table.files(), _records_schema())
