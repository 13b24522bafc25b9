"""A streaming query that copies a topic with `exactlyOnce`, as a process that tests kill.

python -m tests.spark.copy_stream BOOTSTRAP FROM TO CHECKPOINT [--master local[2,4]] [--rows-per-batch 200]
    [--trigger 100ms | --once]
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from minibroker.spark_jobs.session import spark_session
from tests.spark.standalone import SETTINGS


def start_copy(
    spark: SparkSession,
    bootstrap: str,
    source: str,
    target: str,
    checkpoint: str,
    rows: int,
    trigger: str | None = None,
) -> StreamingQuery:
    """`trigger` is the interval of batches; None: the query ends with the topic."""
    writer = (
        spark.readStream.format("minibroker")
        .option("bootstrap.servers", bootstrap)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("isolation.level", "read_committed")
        .option("maxOffsetsPerTrigger", str(rows))
        .load()
        .select("key", "value")
        .writeStream.format("minibroker")
        .option("bootstrap.servers", bootstrap)
        .option("topic", target)
        .option("exactlyOnce", "true")
        .option("transactionTimeout", "2m")
        .option("checkpointLocation", checkpoint)
    )
    return (writer.trigger(availableNow=True) if trigger is None else writer.trigger(processingTime=trigger)).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bootstrap", "source", "target", "checkpoint"):
        parser.add_argument(name)
    parser.add_argument("--master", default="local[2,4]")
    parser.add_argument("--rows-per-batch", type=int, default=200)
    parser.add_argument("--trigger", default="100ms")
    parser.add_argument("--once", action="store_true")
    given = parser.parse_args()
    spark = spark_session("copy", master=given.master, settings=SETTINGS)
    trigger = None if given.once else given.trigger.replace("ms", " milliseconds")
    start_copy(
        spark, given.bootstrap, given.source, given.target, given.checkpoint, given.rows_per_batch, trigger
    ).awaitTermination()


if __name__ == "__main__":
    main()
