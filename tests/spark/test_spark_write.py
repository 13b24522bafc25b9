"""`df.write.format("minibroker")` and writeStream against real brokers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.logs import Logs
from tests.spark.spy_sink import Spy

WRITE_SCHEMA = (
    "key string, value binary, headers array<struct<key:string,value:binary>>, topic string, partition int, extra int"
)


def test_rows_become_records_with_everything_that_columns_say(logs: Logs) -> None:
    logs.create(3)
    rows = [
        ("k", bytearray(b"v"), [("h", bytearray(b"1")), ("h", None)], logs.topic, 2, 7),
        (None, None, None, logs.topic, 0, 7),
    ]
    frame = logs.spark.createDataFrame(rows, WRITE_SCHEMA)
    frame.write.format("minibroker").mode("append").option("bootstrap.servers", logs.bootstrap).save()
    found = {record.partition: record for record in logs.consume(2)}
    assert (found[2].key, found[2].value, list(found[2].headers)) == (b"k", b"v", [("h", b"1"), ("h", None)])
    assert (found[0].key, found[0].value) == (None, None)
    assert logs.batch().count() == 2


@pytest.mark.slow
def test_the_option_topic_wins_over_the_column(logs: Logs) -> None:
    logs.create(1)
    frame = logs.spark.range(20_000).select(F.col("id").cast("string").alias("value"), F.lit("other").alias("topic"))
    frame.write.format("minibroker").mode("append").options(
        **{"kafka.bootstrap.servers": logs.bootstrap, "topic": logs.topic}
    ).save()
    assert sorted(int(record.value or b"") for record in logs.consume(20_000)) == list(range(20_000))


@pytest.mark.slow
def test_rows_that_cannot_be_written_are_reported_with_the_remedy(logs: Logs) -> None:
    logs.create(1)

    def write(select: str, mode: str = "append", **options: str) -> None:
        frame = logs.spark.range(1).selectExpr(*select.split(";"))
        given = {"bootstrap.servers": logs.bootstrap} | options
        frame.write.format("minibroker").mode(mode).options(**given).save()

    for select, options, expected in (
        ("id", {"topic": logs.topic}, "there is no column `value`"),
        ("id as value", {"topic": logs.topic}, "its type must be binary or string: cast it"),
        ("'x' as value", {}, "give the option `topic`, or a column `topic`"),
        ("'x' as value", {"topic": logs.topic, "acks": "1"}, "this option is not known"),
        ("'x' as value;cast(null as string) as topic", {}, "a row's topic is null"),
        ("'x' as value;9 as partition", {"topic": logs.topic}, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("'x' as value;'missing' as topic", {}, r"UNKNOWN_TOPIC_OR_PARTITION: missing, after 1\d\.\d s"),
    ):
        with pytest.raises(PySparkException, match=expected):
            write(select, **options)
    with pytest.raises(PySparkException, match="a log can only be appended to"):
        write("'x' as value", "overwrite", topic=logs.topic)


@pytest.mark.slow
def test_a_stream_is_written_on(logs: Logs, tmp_path: Path) -> None:
    logs.create(1)
    copy = f"{logs.topic}copy"
    logs.create(1, copy)
    logs.produce(b"%d" % number for number in range(1_000))
    query = (
        logs.stream(startingOffsets="earliest", maxOffsetsPerTrigger=400)
        .select("key", "value")
        .writeStream.format("minibroker")
        .option("bootstrap.servers", logs.bootstrap)
        .option("topic", copy)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    assert logs.batch(subscribe=copy).select("value").distinct().count() == 1_000


@pytest.mark.slow
def test_a_task_can_tell_query_batch_and_partition_and_a_replay_tells_the_same(logs: Logs, tmp_path: Path) -> None:
    """Exactly-once writing needs this, and Spark does not document it: see docs/internals/spark.md."""
    logs.create(2)
    for partition in (0, 1):
        logs.produce([b"x"] * 10, partition=partition)
    logs.spark.dataSource.register(Spy)
    notes, checkpoint = tmp_path / "notes", tmp_path / "checkpoint"
    for _ in range(2):
        query = (
            logs.stream(startingOffsets="earliest")
            .writeStream.format("spy")
            .option("path", str(notes))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        shutil.rmtree(checkpoint / "commits")
    lines = sorted(notes.read_text().splitlines())
    assert lines == sorted([f"{query.id} 0 {partition} 10" for partition in (0, 1)] * 2)
