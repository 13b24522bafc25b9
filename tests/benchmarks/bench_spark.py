"""Spark: rows per second of `minibroker`, compared with Spark's Kafka source, Parquet files and a source of tuples.

    python -m tests.benchmarks.bench_spark [--rows 4000000] [--value-bytes 100] [--partitions 4] [--kafka]

One broker and Spark with local[2]: broker, Java and two Python workers share the machine's cores. Values are distinct
and random, so neither batches nor Parquet files can be compressed. There are three jobs: `count`; `columns`, a sum over
every column, for which Spark must decode all of them; `parquet`, which writes all columns. The baselines:

- `engine`: the same rows from Parquet files, the best that Spark can do, with rows on its own disk in its own format.
  Its `count` reads only the files' footers.
- `kafka`, with `--kafka`: the same topic, on the same broker, through spark-sql-kafka, which is downloaded.
- `tuples`: the same topic through a data source that yields a Python tuple for each record, as most of them do.

The best of three runs counts; the sources take turns. Numbers of rows and sums are compared. On a machine with
other load, compare the ratios and the figures with a star.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.fetching.records import ConsumerBatch
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.spark_jobs.session import spark_session
from minibroker.spark_jobs.source.offsets import OffsetRange
from minibroker.spark_jobs.source.options import parse_read_options
from minibroker.spark_jobs.source.source import BatchReader, MinibrokerDataSource
from tests.kafka_clients.programs import spark_connector_jars

RUNS = 3
KAFKA_CLIENTS = Path(".minibroker/kafka-clients").absolute()
"""Where `make kafka-clients` keeps what it has downloaded."""
POOL = 100_000


class TupleSource(MinibrokerDataSource):
    """The same topic and tasks, with a Python tuple for each record."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def reader(self, schema: StructType) -> TupleReader:
        return TupleReader(parse_read_options(self.options, is_streaming=False), schema)


class TupleReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        wanted: OffsetRange = partition.value
        with asyncio.Runner() as runner:
            consumer = Consumer(self._options.bootstrap, partitions=[wanted.topic_partition])
            runner.run(consumer.start())
            try:
                batches = consumer.batches()
                position = wanted.start
                while position < wanted.end:
                    batch = runner.run(_next(batches))
                    position = batch.next_offset
                    for record in batch.records():
                        yield (
                            record.key,
                            record.value,
                            record.topic,
                            record.partition,
                            record.offset,
                            datetime.fromtimestamp(record.timestamp_ms / 1_000, UTC),
                            0,
                        )
            finally:
                runner.run(consumer.close())


async def _next(batches: AsyncIterator[ConsumerBatch]) -> ConsumerBatch:
    return await anext(batches)


async def fill(bootstrap: str, rows: int, partitions: int, value_bytes: int) -> None:
    random = Random(1)
    pool = [random.randbytes(value_bytes - 8) for _ in range(POOL)]
    async with Admin(bootstrap) as admin:
        await admin.create_topic("bench", partitions=partitions, replication_factor=1)
    async with Producer(bootstrap) as producer:
        for index in range(rows):
            producer.send("bench", index.to_bytes(8, "big") + pool[index % POOL], partition=index % partitions)
            await producer.drain()


def sums(frame: DataFrame) -> tuple[Any, ...]:
    """A sum over every column, for which Spark must decode them all."""
    row = frame.agg(
        F.count("value"),
        F.count("key"),
        F.sum(F.length("value")),
        F.sum(F.length("topic")),
        F.sum("partition"),
        F.sum("offset"),
        F.max("timestamp"),
        F.sum("timestampType"),
    ).first()
    assert row is not None
    return tuple(row)


def measure(
    spark: SparkSession, sources: dict[str, Callable[[], DataFrame]], rows: int, directory: Path, pids: Sequence[int]
) -> None:
    def count(name: str) -> int:
        return sources[name]().count()

    def columns(name: str) -> int:
        return int(sums(sources[name]())[0])

    def parquet(name: str) -> int:
        sources[name]().write.mode("overwrite").parquet(str(directory / f"written-{name}"))
        return rows

    sources["minibroker"]().write.parquet(str(directory / "engine"))
    if sums(sources["minibroker"]()) != sums(sources["engine"]()):
        raise SystemExit("the rows of the Parquet files differ from the topic's")
    names = list(sources)
    print(
        f"{'M rows/s':10}"
        + "".join(f"{name:>12}" for name in names)
        + "".join(f"{f'x {name}':>12}" for name in names[1:])
        + "".join(f"{f'{name}*':>13}" for name in names)
    )
    for job in (count, columns, parquet):
        seconds = dict.fromkeys(names, float("inf"))
        cpu_seconds = dict(seconds)
        for _ in range(RUNS):
            for name in names:  # in turn, so that other load affects all of them
                start, cpu_start = time.perf_counter(), processor_seconds(pids)
                if job(name) != rows:
                    raise SystemExit(f"{job.__name__} of {name} did not read {rows} rows")
                seconds[name] = min(seconds[name], time.perf_counter() - start)
                cpu_seconds[name] = min(cpu_seconds[name], processor_seconds(pids) - cpu_start)
        speed = {name: rows / seconds[name] / 1e6 for name in names}
        print(
            f"{job.__name__:10}"
            + "".join(f"{speed[name]:12.2f}" for name in names)
            + "".join(f"{speed['minibroker'] / speed[name]:12.2f}" for name in names[1:])
            + "".join(f"{2 * rows / cpu_seconds[name] / 1e6:13.2f}" for name in names)
        )
    print("* M rows per second of two cores' processor time, all processes together: what idle cores would do at best")


def processor_seconds(pids: Sequence[int]) -> float:
    """Processor time of these processes and all their descendants so far."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended; its parent includes its time
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = sum(int(field) for field in fields[11:15])
    total = 0
    for pid, spent in ticks.items():
        ancestor = pid
        while ancestor not in pids and ancestor in parents:
            ancestor = parents[ancestor]
        total += spent if ancestor in pids else 0
    return total / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--kafka", action="store_true", help="compare with spark-sql-kafka")
    options = parser.parse_args()
    let_signals_interrupt()
    rows = options.rows // options.partitions * options.partitions
    directory = Path(tempfile.mkdtemp(prefix="minibroker-bench-spark-"))
    cluster = LocalCluster(directory / "cluster")
    try:
        cluster.up(1, free_ports(1)[0], None, None)
        start = time.perf_counter()
        asyncio.run(fill(cluster.bootstrap(), rows, options.partitions, options.value_bytes))
        print(
            f"{rows:,} rows of {options.value_bytes} bytes in {options.partitions} partitions, "
            f"produced in {time.perf_counter() - start:.0f} s"
        )
        settings = {"spark.driver.memory": "2g", "spark.ui.showConsoleProgress": "false"}
        if options.kafka:
            settings["spark.jars"] = spark_connector_jars(KAFKA_CLIENTS)
        spark = spark_session("bench", master="local[2]", settings=settings)
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(TupleSource)
        given = {"bootstrap.servers": cluster.bootstrap(), "subscribe": "bench"}
        sources: dict[str, Callable[[], DataFrame]] = {
            "minibroker": lambda: spark.read.format("minibroker").options(**given).load(),
            "engine": lambda: spark.read.parquet(str(directory / "engine")),
            "tuples": lambda: spark.read.format("tuples").options(**given).load(),
        }
        if options.kafka:
            kafka = {"kafka.bootstrap.servers": cluster.bootstrap(), "subscribe": "bench"}
            sources["kafka"] = lambda: spark.read.format("kafka").options(**kafka).load()
        pids = [entry.process.pid for entry in cluster.file().brokers if entry.process is not None]
        measure(spark, sources, rows, directory, [os.getpid(), *pids])
        spark.stop()
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
