"""Spark's own connector for Kafka: batches and a stream; `programs` describes the output."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import SparkSession

RECORDS = 1_000


def main() -> None:
    jars, bootstrap, _, topic = sys.argv[1:]
    topic = topic.removeprefix("topic=")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(topic, 3, 3), NewTopic(f"{topic}-copy", 3, 3)]).values():
        future.result(20)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    session = (
        builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )

    def options(what: Any, **more: str) -> Any:
        what = what.format("kafka").option("kafka.bootstrap.servers", bootstrap)
        for name, value in more.items():
            what = what.option(name, value)
        return what

    def numbers(name: str, **more: str) -> list[int]:
        rows = options(session.read, subscribe=name, startingOffsets="earliest", **more).load()
        assert rows.schema.names == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"], rows
        found = rows.selectExpr(
            "CAST(CAST(key AS STRING) AS INT) AS number", "CAST(value AS STRING) AS value"
        ).collect()
        assert all(row.value == f"value-{row.number}" for row in found), "a value does not belong to its key"
        return sorted(row.number for row in found)

    def check(found: list[int]) -> None:
        assert found == list(range(RECORDS)), f"{len(found)} of {RECORDS} records, {len(set(found))} different ones"

    def write() -> None:
        rows = session.range(RECORDS).selectExpr("CAST(id AS STRING) AS key", "concat('value-', id) AS value")
        options(rows.write, topic=topic).save()

    def stream() -> None:
        with tempfile.TemporaryDirectory(prefix="minibroker-spark-") as directory:
            for _ in range(2):  # the second run continues from the checkpoint and finds no record
                rows = options(
                    session.readStream, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="300"
                ).load()
                writer = options(rows.select("key", "value").writeStream, topic=f"{topic}-copy")
                query = writer.option("checkpointLocation", directory).trigger(availableNow=True).start()
                query.awaitTermination()
        check(numbers(f"{topic}-copy"))

    step("batch write", write)
    step("batch read", lambda: check(numbers(topic)))
    step("stream from topic to topic", stream)
    session.stop()
    print("end", flush=True)


def step(name: str, body: Callable[[], None]) -> None:
    try:
        body()
    except Exception as error:  # noqa: BLE001 - any exception is a failure of the step
        print("bad", name, str(error).replace("\n", " ").replace("\t", " ")[:500], sep="\t", flush=True)
    else:
        print("ok", name, sep="\t", flush=True)


if __name__ == "__main__":
    main()
