"""Lag, from what Spark reports of a trigger."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.streaming.listener import QueryProgressEvent, StreamingQueryProgress

from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.progress import LagListener, TriggerProgress, lags

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def event(end: Any, latest: Any, rows: int = 5, name: str | None = "q") -> QueryProgressEvent:
    source = {
        "description": "d",
        "startOffset": None,
        "endOffset": end,
        "latestOffset": latest,
        "numInputRows": rows,
        "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 2_000.0,
        "metrics": {},
    }
    progress = {
        "id": "00000000-0000-0001-0000-000000000001",
        "runId": "00000000-0000-0001-0000-000000000002",
        "name": name,
        "timestamp": "2020-01-01T00:00:00.000Z",
        "batchId": 3,
        "batchDuration": 5,
        "durationMs": {},
        "eventTime": {},
        "stateOperators": [],
        "sources": [source],
        "sink": {"description": "s", "numOutputRows": 5, "metrics": {}},
        "numInputRows": rows,
        "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 2_000.0,
        "observedMetrics": {},
    }
    return QueryProgressEvent(StreamingQueryProgress.fromJson(progress))


def offset(**partitions: int) -> str:
    return json.dumps({"t": {"id": "x", "offsets": {name[1:]: value for name, value in partitions.items()}}})


def test_lag_is_what_was_there_and_is_not_read() -> None:
    assert lags({P0: 5, P1: 7}, {P0: 9, P1: 7}) == {P0: 4, P1: 0}
    assert lags({P0: 5}, {P0: 4, P1: 3}) == {P0: -1, P1: 3}
    line = str(TriggerProgress("q", 3, 5, 2_000.0, {P0: -1, P1: 3}))
    assert line.endswith("lag 3, 1 partition beyond the end")


def test_each_trigger_is_reported_with_its_lag_and_speed() -> None:
    reported: list[TriggerProgress] = []
    listener = LagListener(reported.append)
    listener.onQueryProgress(event(offset(p0=5, p1=2), offset(p0=9, p1=2)))
    assert reported == [TriggerProgress("q", 3, 5, 2_000.0, {P0: 4, P1: 0})]
    assert str(reported[0]) == "q batch 3: 5 rows, 2,000 rows/s, lag 4"
    assert list(listener.latest) == reported


def test_without_a_report_lines_are_printed_for_triggers_with_rows(capsys: pytest.CaptureFixture[str]) -> None:
    listener = LagListener()
    listener.onQueryProgress(event(offset(p0=5), None, name=None))
    listener.onQueryProgress(event(offset(p0=5), None, rows=0))
    assert capsys.readouterr().out == ("00000000-0000-0001-0000-000000000001 batch 3: 5 rows, 2,000 rows/s, lag 0\n")
    assert len(listener.latest) == 2


@pytest.mark.parametrize("other", ["17", "null", '{"logOffset":5}', "-", None])
def test_queries_without_a_source_of_ours_are_passed_over(other: str | None) -> None:
    listener = LagListener()
    listener.onQueryProgress(event(other, None))
    assert not listener.latest
