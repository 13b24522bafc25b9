"""Lambda: a batch job computes the view up to some offsets, a stream continues from there: `minibroker spark lambda`.

The boundary is a vector of offsets, one for each partition, not a time: each record is on one side of it. The sums of
both layers therefore add up to those of the whole log, and the serving layer's SQL joins them so (`views.merged`).

The stream may leave out late records, since `lateness` bounds its memory. Which records are late depends on its
batches. The next batch job corrects that: it computes everything again, up to new offsets; a new stream begins there,
and when it has everything that the old one had, both layers are replaced together.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.words import counted
from minibroker.protocol.world.real import RealWorld
from minibroker.spark_jobs.jobs import Source, run_batch, tell, triggers_told
from minibroker.spark_jobs.source.bounds import latest_offsets, starting_offsets
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.offsets import Offsets, from_json, to_json
from minibroker.spark_jobs.source.options import parse_read_options
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.tables.table_writer import KEEP_REPLACED_MS, TableWriter
from minibroker.spark_jobs.views.serving import Current, Serving
from minibroker.spark_jobs.views.view_stream import ViewStream
from minibroker.spark_jobs.views.views import view_named, write_changes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCK_FILE = "lambda.lock"
DEFAULT_LATENESS = "10 minutes"
_WATCH_EVERY_S = 0.2


def compute_batch_layer(spark: SparkSession, source: Source, directory: Path, view: str, end: Offsets) -> None:
    """Compute the view of all records before `end`, as a table of one manifest. Raises MinibrokerError."""
    bounds = source.connection | {
        # The stream reads partitions that were added after `end`.
        "assign": json.dumps({topic: sorted(entry.offsets) for topic, entry in end.items()}),
        "includeHeaders": "true",
    }
    options = parse_read_options(bounds | {"startingOffsets": source.starting}, is_streaming=False)
    with LogClient(
        options.bootstrap,
        f"{options.client_id}-batch",
        isolation_level=options.isolation_level,
        security=options.security,
    ) as client:
        start = starting_offsets(client, options)
    bounds |= {"startingOffsets": json.dumps(to_json(start)), "endingOffsets": json.dumps(to_json(end))}
    content = {"job": "batch layer", "view": view}
    with TableWriter(directory, directory / "_checkpoint", content) as writer:
        writer.begin(content, start)
        lines = spark.read.format("minibroker").options(**bounds).load()
        writer.publish_range(
            "batch", 0, start, end, lambda place: write_changes(view_named(view).logic(lines), 0, place)
        )


class Lambda:
    """The layers of one root directory."""

    def __init__(
        self, spark: SparkSession, source: Source, root: Path, view: str, lateness: str, stop: threading.Event
    ) -> None:
        self._spark = spark
        self._source = source
        self._serving = Serving(root)
        self._view = view
        self._lateness = lateness
        self._stop = stop
        self._streams: list[ViewStream] = []
        view_named(view)
        current = self._serving.current()
        if current is not None and current.batch is None:
            raise MinibrokerError(f"{root} holds a view of `minibroker spark kappa`: choose another output")
        root.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = RealWorld().disk.lock(str(root.absolute() / LOCK_FILE))
        except BlockingIOError as error:
            raise MinibrokerError(f"another process is computing the view in {root}: stop it first") from error

    def __enter__(self) -> Lambda:
        return self

    def __exit__(self, *_: object) -> None:
        self.retire_others(None)
        self._lock.release()

    def watch(self) -> bool:
        """Wait for a moment, and return False if it is time to stop. Raises MinibrokerError if a query has failed."""
        for stream in self._streams:
            stream.watch()
        return not self._stop.wait(_WATCH_EVERY_S)

    def retire_others(self, kept: ViewStream | None) -> None:
        """End all streams but one."""
        for stream in self._streams:
            if stream is not kept:
                stream.close()
        self._streams = [stream for stream in self._streams if stream is kept]

    def resume(self, trigger: str) -> None:
        """Continue the stream that is served, if there is one."""
        current = self._serving.current()
        if current is not None:
            stream = self._stream(current.stream, current.view, current.batch)
            stream.start(self._options(self._boundary(current)), trigger)

    def next_generation(self, trigger: str | None) -> ViewStream:
        """Run the batch job up to now, and start a stream from there. Both take over when the stream is ready."""
        current = self._serving.current()
        number = 1 if current is None else current.generation + 1
        batch, speed = f"batch-{number}", f"speed-{number}"
        for name in (batch, speed, *self._serving.retired_before(KEEP_REPLACED_MS)):
            shutil.rmtree(self._serving.root / name, ignore_errors=True)
        end = self._now()
        began = time.monotonic()
        run_batch(
            self._spark,
            batch,
            self._stop,
            lambda: compute_batch_layer(self._spark, self._source, self._serving.root / batch, self._view, end),
        )
        total = sum(offset for entry in end.values() for offset in entry.offsets.values())
        tell(f"{batch}: computed up to {counted(total, 'offset')} in {time.monotonic() - began:.1f} s")
        stream = self._stream(speed, self._view, batch)
        stream.start(self._options(end), trigger)
        return stream

    def _stream(self, name: str, view: str, batch: str | None) -> ViewStream:
        stream = ViewStream(self._spark, self._serving, name, view, batch=batch, lateness=self._lateness)
        self._streams.append(stream)
        return stream

    def _options(self, boundary: Offsets) -> dict[str, str]:
        starting = json.dumps({**to_json(boundary), "*": "earliest"})
        return self._source.stream_options | {"startingOffsets": starting}

    def _boundary(self, current: Current) -> Offsets:
        assert current.batch is not None
        end = Table(self._serving.root / current.batch).end()
        assert end is not None
        return from_json(end)

    def _now(self) -> Offsets:
        options = parse_read_options(self._source.subscription, is_streaming=True)
        with LogClient(
            options.bootstrap,
            f"{options.client_id}-batch",
            isolation_level=options.isolation_level,
            security=options.security,
        ) as client:
            return latest_offsets(client, options)


def run_lambda(
    spark: SparkSession,
    source: Source,
    root: Path,
    view: str,
    *,
    lateness: str = DEFAULT_LATENESS,
    trigger: str | None = None,
    batch_every_s: float = 3_600.0,
    stop: threading.Event | None = None,
) -> None:
    """Run one batch job, and the stream up to now; with `trigger` ("10 seconds"), continue until `stop` is set, with a
    batch job every `batch_every_s` seconds. Raises MinibrokerError as `ViewStream`, and if a query fails."""
    stop = stop or threading.Event()
    with Lambda(spark, source, root, view, lateness, stop) as layers, triggers_told(spark):
        if trigger is None:
            layers.next_generation(None).run(stop)
            return
        layers.resume(trigger)
        while not stop.is_set():
            stream = layers.next_generation(trigger)
            while not stream.serves and layers.watch():
                pass
            layers.retire_others(stream)
            next_at = time.monotonic() + batch_every_s
            while time.monotonic() < next_at and layers.watch():
                pass
