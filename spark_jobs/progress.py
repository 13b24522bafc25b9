"""How far behind a streaming query is: lag and speed of each trigger, from Spark's report about the query.

The source cannot know: Spark tells it about a batch's end one batch late, and never about the last one of
Trigger.AvailableNow. Spark's report about a trigger has the offsets at which it ended, and the ends of the logs when it
was planned.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """While the batch was processed."""
    lag: dict[TopicPartition, int]
    """How many offsets were there when the batch was planned, and are neither in it nor in earlier ones."""

    def __str__(self) -> str:
        beyond, noun = sum(each < 0 for each in self.lag.values()), "partition"
        return (
            f"{self.query} batch {self.batch_id}: {self.rows:,} rows, {self.rows_per_second:,.0f} rows/s, "
            f"lag {sum(max(0, each) for each in self.lag.values()):,}"
            f"{f', {beyond} {plural(beyond, noun)} beyond the end' if beyond else ''}"
        )


class LagListener(StreamingQueryListener):
    """`spark.streams.addListener(LagListener())`. Prints a line for each trigger that read something; or calls `report`
    for every trigger. `latest` keeps the last 100, empty ones included. Spark calls it from a thread of its own, a few
    milliseconds after the fact."""

    def __init__(self, report: Callable[[TriggerProgress], None] | None = None) -> None:
        self._report = report
        self.latest: deque[TriggerProgress] = deque(maxlen=100)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's names)
        """Nothing to tell."""

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

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Nothing to tell."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Nothing to tell."""


def lags(end: dict[TopicPartition, int], latest: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """How far each partition's end is behind its log's end; for a partition that `end` lacks, the whole log. Negative
    where the query is beyond the log's end: records were lost, or the topic is another."""
    return {partition: there - end.get(partition, 0) for partition, there in sorted(latest.items())}


def _offsets(text: str | None) -> dict[TopicPartition, int] | None:
    """None if it is not an offset of this source."""
    try:
        return by_partition(from_json(json.loads(text or "null")))
    except (ValueError, MinibrokerError):
        return None
