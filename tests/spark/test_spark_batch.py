"""`spark.read.format("minibroker")` against real brokers."""

from __future__ import annotations

import json

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 (its usual name)

from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.options import EARLIEST, LATEST
from minibroker.spark_jobs.source.source import read_schema
from tests.spark.logs import Logs


def offsets(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in frame.select("partition", "offset").collect())


@pytest.mark.slow
def test_rows_are_those_of_kafkas_connector(logs: Logs) -> None:
    logs.create(2)
    logs.produce([b"v"], partition=1, key=b"k", headers=[("h", b"1")], timestamp_ms=1_700_000_000_123)
    frame = logs.batch(includeHeaders="true")
    assert frame.schema == read_schema(True)
    (row,) = frame.withColumn("ms", F.expr("unix_millis(timestamp)")).drop("timestamp").collect()
    assert row.asDict(recursive=True) == {
        "key": b"k",
        "value": b"v",
        "topic": logs.topic,
        "partition": 1,
        "offset": 0,
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}],
        "ms": 1_700_000_000_123,
    }


@pytest.mark.slow
def test_a_dataframe_can_be_filtered_counted_and_joined_again_and_again(logs: Logs) -> None:
    logs.create(2)
    for partition in (0, 1):
        logs.produce((b"%d" % number for number in range(750)), partition=partition)
    frame = logs.batch()
    assert frame.where("offset >= 500").count() == 500
    assert frame.count() == 1_500
    union = frame.where("partition = 0").unionAll(frame.where("partition = 1 and offset < 10"))
    assert union.count() == 760
    assert frame.alias("a").join(frame.alias("b"), ["partition", "offset"]).count() == 1_500


@pytest.mark.slow
def test_topics_are_found_by_name_by_pattern_and_by_partition(logs: Logs) -> None:
    for name in ("a", "b"):
        logs.create(2, f"{logs.topic}{name}")
        logs.produce([b"x"], partition=1, topic=f"{logs.topic}{name}")
    assert logs.batch(subscribe=f"{logs.topic}a,{logs.topic}b").count() == 2
    assert logs.batch(subscribePattern=f"{logs.topic}[b-z]").count() == 1
    assert logs.batch(subscribePattern=f"{logs.topic}").count() == 0
    assert logs.batch(assign=json.dumps({f"{logs.topic}a": [0], f"{logs.topic}b": [1]})).count() == 1


@pytest.mark.slow
def test_bounds_and_splits_prune_what_is_read(logs: Logs) -> None:
    logs.create(2)
    for second in range(10):
        logs.produce([b"x"], timestamp_ms=1_000 * second)
    topic = logs.topic
    one = {"assign": json.dumps({topic: [0]})}
    between = logs.batch(
        startingOffsets=json.dumps({topic: {"0": 3}}), endingOffsets=json.dumps({topic: {"0": 8, "1": -1}})
    )
    assert offsets(between) == [(0, offset) for offset in range(3, 8)]
    timed = logs.batch(startingTimestamp="2500", endingTimestamp="7000", **one)
    assert offsets(timed) == [(0, offset) for offset in range(3, 7)]
    timed = logs.batch(
        startingOffsetsByTimestamp=json.dumps({topic: {"0": 8000}}),
        endingOffsetsByTimestamp=json.dumps({topic: {"0": 99000}}),
    )
    assert offsets(timed) == [(0, 8), (0, 9)]
    assert logs.batch(startingTimestamp="99000", startingOffsetsByTimestampStrategy="latest").count() == 0
    assert logs.batch(minPartitions="4", **one).rdd.getNumPartitions() == 4
    sized = logs.batch(maxRecordsPerPartition="3")
    assert sized.rdd.getNumPartitions() == 4
    assert offsets(sized) == [(0, offset) for offset in range(10)]


@pytest.mark.slow
def test_mistakes_are_reported_with_the_remedy(logs: Logs) -> None:
    logs.create(1)
    logs.produce([b"x"])
    for options, expected in (
        ({"startingOffset": "latest"}, "did you mean startingOffsets"),
        ({"includeHeaders": "yes"}, "give true or false"),
        ({"startingOffsets": json.dumps({logs.topic: {"4": 0}})}, "which is not among what is read"),
        ({"startingOffsets": json.dumps({logs.topic: {"0": 5}})}, "whose log holds 0 to 1"),
        (
            {
                "startingOffsets": json.dumps({logs.topic: {"0": 1}}),
                "endingOffsets": json.dumps({logs.topic: {"0": 0}}),
            },
            "would begin at offset 1 and end at 0",
        ),
    ):
        with pytest.raises(PySparkException, match=expected):
            logs.batch(**options).collect()
    with pytest.raises(PySparkException, match=r"rows of this source are .* drop \.schema"):
        logs.spark.read.format("minibroker").schema("value string").options(**logs.options()).load().collect()


@pytest.mark.slow
def test_the_client_of_the_driver_looks_up_real_logs(logs: Logs) -> None:
    logs.create(1)
    logs.produce([b"x"] * 3, timestamp_ms=5_000)
    partition = TopicPartition(logs.topic, 0)
    with LogClient(logs.bootstrap, "test") as client:
        assert client.known_offsets({partition: EARLIEST}) == {partition: 0}
        assert client.known_offsets({partition: LATEST}) == {partition: 3}
        assert client.offsets({partition: 5_000}) == {partition: OffsetAndTimestamp(0, 5_000)}
