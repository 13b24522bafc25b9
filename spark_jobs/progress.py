"""Lag and speed of each trigger of a streaming query, from Spark's report about the query.

The source cannot measure them: Spark reports a batch's end to it one batch late, and never the last one of
Trigger.AvailableNow. Spark's report about a trigger has its end offsets, and the ends of the logs when it was planned.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import plural
from minibroker.spark_jobs.source.offsets import by_partition, from_json


@dataclass(frozen=True)
class TriggerProgress:
    """One trigger of one query, for all its sources of format "minibroker" together."""

    query: str
    """The query's name, or its id if it has none."""
    batch_id: int
    rows: int
    rows_per_second: float
    """The rate while the batch was processed."""
    lag: dict[TopicPartition, int]
    """The offsets of each partition beyond this batch that existed when it was planned."""

    def __str__(self) -> str:
        beyond, noun = sum(each < 0 for each in self.lag.values()), "partition"
        return (
            f"{self.query} batch {self.batch_id}: {self.rows:,} rows, {self.rows_per_second:,.0f} rows/s, "
            f"lag {sum(max(0, each) for each in self.lag.values()):,}"
            f"{f', {beyond} {plural(beyond, noun)} beyond the end' if beyond else ''}"
        )


class LagListener(StreamingQueryListener):
    """`spark.streams.addListener(LagListener())` prints a line for each trigger that read records, or calls `report`
    for every trigger. `latest` keeps the last 100, empty ones included. Spark calls it from its own thread, a few
    milliseconds later."""

    def __init__(self, report: Callable[[TriggerProgress], None] | None = None) -> None:
        self._report = report
        self.latest: deque[TriggerProgress] = deque(maxlen=100)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's names)
        """Required by Spark."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        progress = event.progress
        lag: dict[TopicPartition, int] = {}
        is_ours = False
        for source in progress.sources:
            end, latest = _offsets(source.endOffset), _offsets(source.latestOffset)
            if end is not None:
                is_ours = True
                lag |= lags(end, latest or end)
        if not is_ours:
            return
        trigger = TriggerProgress(
            progress.name or str(progress.id),
            progress.batchId,
            progress.numInputRows,
            progress.processedRowsPerSecond,
            lag,
        )
        self.latest.append(trigger)
        if self._report is not None:
            self._report(trigger)
        elif trigger.rows:
            print(trigger, flush=True)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Required by Spark."""


def lags(end: dict[TopicPartition, int], latest: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return each partition's distance from its log's end, which is the whole log if `end` lacks the partition. It is
    negative if the query is beyond the log's end: records were lost, or the topic was created again."""
    return {partition: there - end.get(partition, 0) for partition, there in sorted(latest.items())}


def _offsets(text: str | None) -> dict[TopicPartition, int] | None:
    """Return None if `text` is not an offset of this source."""
    try:
        return by_partition(from_json(json.loads(text or "null")))
    except (ValueError, MinibrokerError):
        return None
