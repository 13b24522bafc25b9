"""`spark.readStream.format("minibroker")` against real brokers: offsets in the checkpoint, limits, losses, failover."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql.streaming.query import StreamingQuery

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import BrokerId, LeaderOf
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.progress import LagListener
from minibroker.spark_jobs.source.initial_offsets import keep_initial_offsets
from tests.spark.logs import Logs
from tests.waiting import until_true

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0


def until(condition: Callable[[], bool], query: StreamingQuery | None = None) -> None:
    def is_over() -> bool:
        if query is not None and (error := query.exception()) is not None:
            raise error
        return condition()

    until_true(is_over, DEADLINE_S)


def rows_of(query: StreamingQuery) -> list[int]:
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def everything(logs: Logs, counts: dict[int, int], topic: str | None = None) -> list[tuple[str, int, int, bytes]]:
    return [
        (topic or logs.topic, partition, offset, b"%d" % offset)
        for partition, count in sorted(counts.items())
        for offset in range(count)
    ]


def produce(logs: Logs, partition: int, first: int, count: int, topic: str | None = None) -> None:
    logs.produce((b"%d" % number for number in range(first, first + count)), partition=partition, topic=topic)


@pytest.mark.slow
def test_batches_keep_to_the_limit_and_a_restart_goes_on_from_the_checkpoint(logs: Logs, tmp_path: Path) -> None:
    logs.create(2)
    produce(logs, 0, 0, 900)
    produce(logs, 1, 0, 100)
    listener = LagListener()
    logs.spark.streams.addListener(listener)
    try:
        first = logs.drain(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger=400)
        assert rows_of(first) == [400, 400, 200]
        until(lambda: len(listener.latest) >= 3)
    finally:
        logs.spark.streams.removeListener(listener)
    assert [sum(trigger.lag.values()) for trigger in list(listener.latest)[:3]] == [600, 200, 0]
    assert [trigger.rows for trigger in list(listener.latest)[:3]] == [400, 400, 200]
    end = json.loads(first.recentProgress[-1].sources[0].endOffset)
    assert {topic: entry["offsets"] for topic, entry in end.items()} == {logs.topic: {"0": 900, "1": 100}}
    produce(logs, 1, 100, 50)
    second = logs.drain(tmp_path, startingOffsets="earliest", minPartitions=4)
    assert rows_of(second) == [50]
    assert logs.written(tmp_path) == everything(logs, {0: 900, 1: 150})


def test_a_stream_that_meets_a_timestamp_that_its_batch_denies_goes_on_with_null(logs: Logs, tmp_path: Path) -> None:
    logs.create(1)
    logs.produce([b"0"], timestamp_ms=5)
    logs.drain(tmp_path, startingOffsets="earliest")
    logs.produce_lie(b"1", 1_790_000_000_000_000_000)
    logs.drain(tmp_path, startingOffsets="earliest")
    assert logs.written(tmp_path) == everything(logs, {0: 2})
    rows = logs.spark.read.parquet(str(tmp_path / "out")).orderBy("offset").select("timestamp").collect()
    assert [row.timestamp is None for row in rows] == [False, True]


def test_a_stream_that_began_at_the_end_loses_nothing_when_its_first_batch_is_not_committed(
    logs: Logs, tmp_path: Path
) -> None:
    logs.create(1)
    produce(logs, 0, 0, 10)
    checkpoint = tmp_path / "checkpoint"
    kept = keep_initial_offsets(logs.options(), checkpoint)
    assert kept == {"initialOffsetsFile": str(checkpoint / "minibroker-initial.json")}
    produce(logs, 0, 10, 5)
    logs.drain(tmp_path, **kept)
    assert [row[2] for row in logs.written(tmp_path)] == [10, 11, 12, 13, 14]
    # Killed before the commit of batch 0: Spark asks for the initial offset again, with more records in the log.
    for name in ("offsets", "commits", "sources"):
        shutil.rmtree(checkpoint / name, ignore_errors=True)
    shutil.rmtree(tmp_path / "out")
    produce(logs, 0, 15, 5)
    assert keep_initial_offsets(logs.options(), checkpoint) == kept
    logs.drain(tmp_path, **kept)
    assert [row[2] for row in logs.written(tmp_path)] == list(range(10, 20))


def test_topics_that_appear_in_the_middle_of_a_query_are_read_from_their_beginning(logs: Logs, tmp_path: Path) -> None:
    a, b = f"{logs.topic}a", f"{logs.topic}b"
    logs.create(1, a)
    produce(logs, 0, 0, 3, a)
    query = logs.start(tmp_path, subscribePattern=f"{logs.topic}.", startingOffsets="earliest", includeHeaders="true")
    try:
        until(lambda: sum(rows_of(query)) == 3, query)
        logs.create(2, b)
        produce(logs, 1, 0, 4, b)
        until(lambda: sum(rows_of(query)) == 7, query)
    finally:
        query.stop()
    assert logs.written(tmp_path) == everything(logs, {0: 3}, a) + everything(logs, {1: 4}, b)


@pytest.mark.slow
def test_a_batch_waits_for_enough_records_or_for_its_time(logs: Logs, tmp_path: Path) -> None:
    logs.create(1)
    produce(logs, 0, 0, 5)
    query = logs.start(tmp_path, startingOffsets="earliest", minOffsetsPerTrigger=20, maxTriggerDelay="1h")
    try:
        until(lambda: rows_of(query) == [5], query)  # the first waits for nothing
        produce(logs, 0, 5, 12)
        produce(logs, 0, 17, 8)
        until(lambda: sum(rows_of(query)) == 25, query)
        assert rows_of(query) == [5, 20]
    finally:
        query.stop()
    produce(logs, 0, 25, 1)
    query = logs.start(tmp_path, minOffsetsPerTrigger=20, maxTriggerDelay="1ms")
    try:
        until(lambda: rows_of(query) == [1], query)
        produce(logs, 0, 26, 1)
        until(lambda: rows_of(query) == [1, 1], query)
    finally:
        query.stop()


@pytest.mark.slow
def test_a_topic_that_was_created_again_ends_the_query_unless_losses_are_accepted(logs: Logs, tmp_path: Path) -> None:
    logs.create(1)
    produce(logs, 0, 0, 5)
    logs.drain(tmp_path, startingOffsets="earliest")
    logs.create_again()
    produce(logs, 0, 0, 7)
    with pytest.raises(Exception, match=f"topic {logs.topic} was deleted and created again.*failOnDataLoss=false"):
        logs.drain(tmp_path)
    assert rows_of(logs.drain(tmp_path, failOnDataLoss="false")) == [7]
    assert len(logs.written(tmp_path)) == 12


@pytest.mark.slow
def test_a_topic_that_is_deleted_while_a_query_runs_ends_it_unless_losses_are_accepted(
    logs: Logs, tmp_path: Path
) -> None:
    a, b = f"{logs.topic}a", f"{logs.topic}b"
    for topic in (a, b):
        logs.create(1, topic)
        produce(logs, 0, 0, 3, topic)
    both = f"{a},{b}"
    strict = logs.start(tmp_path / "strict", subscribe=both, startingOffsets="earliest")
    lenient = logs.start(tmp_path / "lenient", subscribe=both, startingOffsets="earliest", failOnDataLoss="false")
    try:
        for query in (strict, lenient):
            until(lambda query=query: sum(rows_of(query)) == 6, query)  # type: ignore[misc]
        logs.delete(a)
        produce(logs, 0, 3, 4, b)
        until(lambda: sum(rows_of(lenient)) == 10, lenient)
        until(lambda: not strict.isActive)
        assert f"topic {a}" in str(strict.exception())
        logs.create(1, a)
        produce(logs, 0, 0, 5, a)
        until(lambda: sum(rows_of(lenient)) == 15, lenient)
    finally:
        strict.stop()
        lenient.stop()
    expected = everything(logs, {0: 3}, a) + everything(logs, {0: 5}, a) + everything(logs, {0: 7}, b)
    assert logs.written(tmp_path / "lenient") == sorted(expected)


@pytest.mark.slow
def test_a_query_survives_the_death_of_leaders(logs: Logs, spark_cluster: LocalCluster, tmp_path: Path) -> None:
    logs.create(2)
    for partition in (0, 1):
        produce(logs, partition, 0, 500)
    view = spark_cluster.view()
    leader = view.partitions[TopicPartition(logs.topic, 0)].leader_id
    query = logs.start(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger=100)
    try:
        until(lambda: sum(rows_of(query)) >= 200, query)
        spark_cluster.kill(LeaderOf(TopicPartition(logs.topic, 0)))
        produce(logs, 0, 500, 300)
        until(lambda: sum(rows_of(query)) == 1_300, query)
    finally:
        query.stop()
        spark_cluster.start(BrokerId(leader))
    assert logs.written(tmp_path) == everything(logs, {0: 800, 1: 500})
    assert logs.batch().count() == 1_300
