"""The reader of a stream as Spark calls it, without Spark: offsets, limits, losses, plans."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from minibroker.protocol import messages as m
from minibroker.protocol.apis import LIST_OFFSETS, encode_request
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.spark_jobs.source import look_ups
from minibroker.spark_jobs.source.offsets import DataLost, OffsetRange
from minibroker.spark_jobs.source.source import MinibrokerDataSource, RangePartition, StreamReader, read_schema
from tests.unit.client.scripted_broker import DROP, Log, Received, reject
from tests.unit.spark_jobs.scripted_log import ScriptedLog, scripted_log

ALL = ReadAllAvailable()
Make = Callable[..., StreamReader]


@pytest.fixture
def log() -> Iterator[ScriptedLog]:
    with scripted_log() as scripted:
        scripted.topic("t", 2)
        scripted.append([b"x"] * 10, partition=0)
        scripted.append([b"x"] * 30, partition=1)
        yield scripted


@pytest.fixture
def reader(log: ScriptedLog) -> Iterator[Make]:
    made: list[StreamReader] = []

    def make(**options: str) -> StreamReader:
        given = {"bootstrap.servers": log.bootstrap, "startingOffsets": "earliest"} | options
        if "subscribePattern" not in given:
            given.setdefault("subscribe", "t")
        made.append(MinibrokerDataSource(given).streamReader(read_schema(False)))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def numbers(offset: dict[str, Any], topic: str = "t") -> dict[str, int]:
    return dict(offset[topic]["offsets"])


def drained(reader: StreamReader, start: dict[str, Any], limit: ReadLimit) -> list[dict[str, int]]:
    """Yield the ends of the batches that Spark would make, until it sees the same text twice."""
    ends: list[dict[str, int]] = []
    while True:
        end = reader.latestOffset(json.loads(json.dumps(start)), limit)
        if json.dumps(end) == json.dumps(start):
            return ends
        ends.append(numbers(end))
        start = end


def test_batches_are_shared_out_until_nothing_is_left(log: ScriptedLog, reader: Make) -> None:
    one = reader(maxOffsetsPerTrigger="20")
    start = one.initialOffset()
    assert start == {"t": {"id": log.cluster.topics["t"].topic_id, "offsets": {"0": 0, "1": 0}}}
    assert one.getDefaultReadLimit() == ReadMaxRows(20)
    assert drained(one, start, ReadMaxRows(20)) == [{"0": 5, "1": 15}, {"0": 10, "1": 30}]
    reported = one.reportLatestOffset()
    assert reported is not None
    assert numbers(reported) == {"0": 10, "1": 30}


def test_all_available_means_all(reader: Make) -> None:
    one = reader(maxOffsetsPerTrigger="20", minOffsetsPerTrigger="20")
    assert drained(one, one.initialOffset(), ALL) == [{"0": 10, "1": 30}]


def test_a_stream_that_met_a_timestamp_in_nanoseconds_goes_on_with_null_after_a_restart(
    log: ScriptedLog, reader: Make
) -> None:
    log.append([b"y"], partition=0, timestamp=1_790_000_000_000_000_000)
    strict, lenient = reader(), reader(timestampOutOfRange="null")
    start = strict.initialOffset()
    (task, _) = strict.partitions(start, strict.latestOffset(start, ALL))
    with pytest.raises(MinibrokerError, match=r"offset 10 .*timestampOutOfRange=null"):
        list(strict.read(task))
    (batch,) = lenient.read(task)
    assert batch.column("timestamp").is_null().to_pylist() == [False] * 10 + [True]


def test_available_now_ends_where_the_log_ended_at_its_start(log: ScriptedLog, reader: Make) -> None:
    one = reader(minOffsetsPerTrigger="1000000")
    one.prepareForTriggerAvailableNow()
    log.append([b"late"], partition=0)
    log.call(lambda: log.cluster.topics["t"].logs.append(Log(0, True)))
    log.append([b"late"], partition=2)
    start = one.initialOffset()
    assert numbers(start) == {"0": 0, "1": 0, "2": 0}
    assert drained(one, start, ReadMaxRows(25))[-1] == {"0": 10, "1": 30, "2": 0}


def test_available_now_reads_nothing_where_it_begins_at_the_end(log: ScriptedLog, reader: Make) -> None:
    one = reader(startingOffsets="latest")
    one.prepareForTriggerAvailableNow()
    log.append([b"between"], partition=0)
    start = one.initialOffset()
    log.append([b"late"], partition=0)
    assert numbers(start) == {"0": 11, "1": 30}
    assert drained(one, start, ReadMaxRows(25)) == []


def test_available_now_leaves_partitions_of_its_own_time_to_the_next_run(log: ScriptedLog, reader: Make) -> None:
    one = reader()
    start = one.initialOffset()
    one.prepareForTriggerAvailableNow()
    log.call(lambda: log.cluster.topics["t"].logs.append(Log(0, True)))
    log.append([b"late"], partition=2)
    assert drained(one, start, ReadMaxRows(100)) == [{"0": 10, "1": 30}]
    assert drained(reader(), one.latestOffset(start, ALL), ALL) == [{"0": 10, "1": 30, "2": 1}]


def test_partitions_that_appear_are_read_from_their_beginning(log: ScriptedLog, reader: Make) -> None:
    one = reader()
    start = one.latestOffset(one.initialOffset(), ALL)
    log.call(lambda: log.cluster.topics["t"].logs.append(Log(0, True)))
    log.append([b"new"] * 7, partition=2)
    assert numbers(one.latestOffset(start, ReadMaxRows(4))) == {"0": 10, "1": 30, "2": 4}
    end = one.latestOffset(start, ALL)
    (task,) = one.partitions(start, end)
    assert isinstance(task, RangePartition)
    assert task.range == OffsetRange("t", log.cluster.topics["t"].topic_id, 2, 0, 7, 0)
    assert pickle.loads(pickle.dumps(task)).range == task.range


def test_a_new_partition_that_has_lost_its_beginning_is_a_loss(log: ScriptedLog, reader: Make) -> None:
    one, lenient = reader(), reader(failOnDataLoss="false")
    start = one.latestOffset(one.initialOffset(), ALL)

    def add() -> None:
        new = Log(0, True)
        new.start = new.end = 5
        log.cluster.topics["t"].logs.append(new)

    log.call(add)
    log.append([b"new"] * 2, partition=2)
    with pytest.raises(DataLost, match="t-2 is new, and begins at offset 5, not 0"):
        one.latestOffset(start, ALL)
    assert [task.value.start for task in lenient.partitions(start, lenient.latestOffset(start, ALL))] == [5]


def test_plans_are_split_as_asked(reader: Make) -> None:
    one = reader(minPartitions="4", maxRecordsPerPartition="8")
    start = one.initialOffset()
    tasks = one.partitions(start, one.latestOffset(start, ALL))
    assert [(task.value.partition, task.value.size) for task in tasks] == [
        (0, 5),
        (0, 5),
        (1, 7),
        (1, 8),
        (1, 7),
        (1, 8),
    ]
    assert one.partitions(start, start) == []


def test_few_records_wait_for_more_or_for_their_time(log: ScriptedLog, reader: Make) -> None:
    one = reader(minOffsetsPerTrigger="5", maxTriggerDelay="1h")
    start = one.latestOffset(one.initialOffset(), ReadMaxRows(100))
    log.append([b"x"] * 4, partition=0)
    assert one.latestOffset(start, ReadMaxRows(100)) == start
    log.append([b"x"], partition=1)
    assert numbers(one.latestOffset(start, ReadMaxRows(100))) == {"0": 14, "1": 31}
    hasty = reader(minOffsetsPerTrigger="5", maxTriggerDelay="0ms")
    start = hasty.latestOffset(hasty.initialOffset(), ReadMaxRows(100))
    log.append([b"x"], partition=0)
    assert numbers(hasty.latestOffset(start, ReadMaxRows(100))) == {"0": 15, "1": 31}


def test_what_is_lost_fails_or_is_left_behind(log: ScriptedLog, reader: Make) -> None:
    one, lenient, now = reader(), reader(failOnDataLoss="false"), reader()
    start = one.latestOffset(one.initialOffset(), ALL)
    new_id = log.topic("t", 1)
    log.append([b"y"] * 3)
    now.prepareForTriggerAvailableNow()
    for strict in (one, now):
        with pytest.raises(DataLost, match="was deleted and created again"):
            strict.latestOffset(start, ALL)
    end = lenient.latestOffset(start, ALL)
    assert end == {"t": {"id": new_id, "offsets": {"0": 3}, "epochs": {"0": 0}}}
    assert [task.value for task in lenient.partitions(start, end)] == [OffsetRange("t", new_id, 0, 0, 3, 0)]


@pytest.mark.slow
def test_a_topic_that_is_gone_fails_or_is_left_out_until_it_is_back(
    log: ScriptedLog, reader: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(look_ups, "UNKNOWN_TOPIC_PATIENCE_S", 0.2)
    log.topic("u", 1)
    log.append([b"y"] * 3, name="u")
    strict, lenient = reader(subscribe="t,u"), reader(subscribe="t,u", failOnDataLoss="false")
    start = lenient.latestOffset(lenient.initialOffset(), ReadMaxRows(4))
    assert set(start) == {"t", "u"}
    log.call(lambda: log.cluster.topics.pop("u"))
    with pytest.raises(BrokerError, match="topic u"):
        strict.latestOffset(start, ALL)
    end = lenient.latestOffset(start, ALL)
    assert set(end) == {"t"}
    assert {task.value.topic for task in lenient.partitions(start, end)} == {"t"}
    assert lenient.latestOffset(end, ALL) == end
    warned = [record.message for record in caplog.records]
    assert [text for text in warned if "UNKNOWN_TOPIC" in text] == [warned[0]]
    new_id = log.topic("u", 1)
    log.append([b"z"] * 2, name="u")
    again = lenient.latestOffset(end, ALL)
    assert [task.value for task in lenient.partitions(end, again)] == [OffsetRange("u", new_id, 0, 0, 2, 0)]
    # A batch that was planned while the topic existed.
    log.call(lambda: log.cluster.topics.pop("u"))
    assert lenient.partitions(end, again) == []
    with pytest.raises(BrokerError, match="u-0"):
        strict.partitions(end, again)


def test_a_topic_that_is_deleted_while_its_end_is_looked_up_is_left_out(
    log: ScriptedLog, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ups, "UNKNOWN_TOPIC_PATIENCE_S", 0.2)
    log.topic("u", 1)
    lenient = reader(subscribe="t,u", failOnDataLoss="false")
    start = lenient.initialOffset()

    def delete(received: Received) -> None:
        if received.api is LIST_OFFSETS:
            log.cluster.topics.pop("u", None)

    log.call(lambda: log.cluster.rules.append(delete))
    assert set(lenient.latestOffset(start, ALL)) == {"t"}


def test_a_broker_that_knows_of_nothing_yet_is_not_believed(
    log: ScriptedLog, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = reader(subscribePattern="t")
    start = one.initialOffset()
    known = log.cluster.metadata
    answers = [m.MetadataResponse(0, [], "scripted", -1, []), m.MetadataResponse(0, [], "scripted", -1, [])]
    monkeypatch.setattr(log.cluster, "metadata", lambda request: answers.pop() if answers else known(request))
    assert numbers(one.latestOffset(start, ALL)) == {"0": 10, "1": 30}
    assert not answers


def test_latest_offset_waits_for_leaders_that_are_missing(log: ScriptedLog, reader: Make) -> None:
    one = reader()
    start = one.initialOffset()
    log.script(LIST_OFFSETS, DROP, reject(ErrorCode.NOT_LEADER_OR_FOLLOWER), reject(ErrorCode.LEADER_NOT_AVAILABLE))
    assert numbers(one.latestOffset(start, ALL)) == {"0": 10, "1": 30}


def test_the_initial_offset_is_kept_where_a_file_is_named(log: ScriptedLog, reader: Make, tmp_path: Path) -> None:
    options = {"initialOffsetsFile": str(tmp_path / "initial.json"), "startingOffsets": "latest"}
    first = reader(**options).initialOffset()
    log.append([b"x"])
    assert reader(**options).initialOffset() == first
    assert numbers(reader(startingOffsets="latest").initialOffset()) == {"0": 11, "1": 30}


def test_the_group_id_prefix_names_clients_to_brokers(reader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def encode(api: Any, correlation_id: int, client_id: str, body: Any) -> Any:
        named.append(client_id)
        return encode_request(api, correlation_id, client_id, body)

    monkeypatch.setattr("minibroker.protocol.connections.rpc.encode_request", encode)
    one = reader(groupIdPrefix="billing")
    start = one.initialOffset()
    for task in one.partitions(start, one.latestOffset(start, ALL)):
        assert sum(batch.num_rows for batch in one.read(task))
    assert set(named) == {"billing", "billing-driver"}


def test_a_reader_can_be_sent_to_executors(reader: Make) -> None:
    copy = pickle.loads(pickle.dumps(reader()))
    assert isinstance(copy, StreamReader)
    copy.stop()


def test_offsets_that_have_not_moved_have_the_same_text_whoever_leads_by_now(log: ScriptedLog, reader: Make) -> None:
    one = reader()
    start = one.latestOffset(one.initialOffset(), ALL)
    assert start["t"]["epochs"] == {"0": 0, "1": 0}
    log.call(lambda: log.cluster.move("t", 1, 0))
    for limit in (ALL, ReadMaxRows(5)):
        assert json.dumps(one.latestOffset(start, limit)) == json.dumps(start)
    del start["t"]["epochs"]  # as an earlier version wrote it
    assert json.dumps(one.latestOffset(start, ALL)) == json.dumps(start)
    log.append([b"x"], partition=1)
    end = one.latestOffset(start, ALL)
    assert end["t"]["epochs"] == {"1": 1}
    (task,) = one.partitions(start, end)
    assert task.value.leader_epoch == 1
