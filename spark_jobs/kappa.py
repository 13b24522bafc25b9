"""Kappa: one stream maintains the view, and a new version of it replays the log: `minibroker spark kappa`.

To change what a view computes, start the new version beside the old one. It reads the topics from the beginning, with a
checkpoint and a directory of its own, while the old one serves; once it has caught up, it serves instead, and the old
one ends (`minibroker.spark_jobs.views.serving`).

There is no watermark, so a stream's state is as large as its view and grows with it. With a watermark, Spark would
forget windows and leave out late lines; which lines are late depends on the batches, so a replay, which has other
batches, would not get the result of the version before. Here v2 equals a batch query up to its offsets. Keep state that
outgrows the memory on disk: --conf spark.sql.streaming.stateStore.providerClass=
org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider. To bound the state by lateness, use
`minibroker spark lambda`, whose batch job adds the lines that its stream left out.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from minibroker.client.errors import InvalidSetting
from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.jobs import Source, triggers_told
from minibroker.spark_jobs.views.serving import Serving
from minibroker.spark_jobs.views.view_stream import ViewStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_kappa(
    spark: SparkSession,
    source: Source,
    root: Path,
    view: str,
    *,
    trigger: str | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Bring a version of the view up to now, and return whether it is served afterwards; with `trigger` ("10 seconds"),
    continue until `stop` is set or another version has replaced it.

    Raises MinibrokerError as `ViewStream`, and if the query fails.
    """
    serving = Serving(root)
    current = serving.current()
    if current is not None and current.batch is not None:
        raise MinibrokerError(f"{root} holds a view of `minibroker spark lambda`: choose another output")
    if current is not None and not set(current.offsets) <= set(source.topics):
        raise InvalidSetting(
            "topics",
            ",".join(source.topics),
            f"the view that is served is of {', '.join(sorted(current.offsets))}: add these, or choose another output",
        )
    stream = ViewStream(spark, serving, view, view)
    try:
        with triggers_told(spark):
            stream.start(source.stream_options, trigger)
            stream.run(stop or threading.Event())
            return stream.serves
    finally:
        stream.close()
