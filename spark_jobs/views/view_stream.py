"""A streaming query that maintains one version of a view, and takes over from the version that is served."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.jobs import is_running, run_query, stop_query, tell
from minibroker.spark_jobs.source.initial_offsets import keep_initial_offsets
from minibroker.spark_jobs.source.offsets import Offsets
from minibroker.spark_jobs.tables.checkpoint import Checkpoint
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.tables.table_writer import TableWriter, WriteParquet
from minibroker.spark_jobs.views.serving import Replaced, Serving
from minibroker.spark_jobs.views.views import merged, read_table, rewrite_newest, view_named, write_changes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECKPOINT = "_checkpoint"
FAN_IN = 16


class ViewStream:
    """Owns the table ROOT/NAME until it is closed. Serves at once if no version is served, or else once it has
    everything that the served version has."""

    def __init__(
        self,
        spark: SparkSession,
        serving: Serving,
        name: str,
        view: str,
        *,
        batch: str | None = None,
        lateness: str | None = None,
    ) -> None:
        """`batch` is the directory of the result up to this stream's beginning. `lateness` bounds the memory: lines
        older than the newest by more than this may be left out. Raises MinibrokerError if another process fills the
        table, if the table has other content, or if this version has served before and was replaced."""
        self._spark = spark
        self._serving = serving
        self._view_name = view
        self._view = view_named(view)
        self._batch = batch
        self._lateness = lateness
        self.name = name
        content = {"job": "view", "view": view, "lateness": lateness or "any"}
        serving.root.mkdir(parents=True, exist_ok=True)
        self._content = content
        self._writer = TableWriter(serving.root / name, serving.root / name / CHECKPOINT, content)
        try:
            if self._writer.token is not None:
                serving.check(self._writer.token)
        except BaseException:
            self._writer.close()
            raise
        self._query: StreamingQuery | None = None
        self._replaced: Replaced | None = None

    def close(self) -> None:
        """Stop the query, if there is one, and release the table."""
        if self._query is not None:
            stop_query(self._query)
        self._writer.close()

    @property
    def token(self) -> str:
        assert self._writer.token is not None
        return self._writer.token

    @property
    def serves(self) -> bool:
        return self._serving.serves(self.token)

    def start(self, options: Mapping[str, str], trigger: str | None) -> None:
        """Start the query. `trigger` is like "10 seconds"; None: read the records that exist now. Raises as
        `keep_initial_offsets`."""
        checkpoint = self._serving.root / self.name / CHECKPOINT
        kept = dict(options) | keep_initial_offsets(options, checkpoint)
        self._writer.begin(self._content, Checkpoint(checkpoint).start())
        if self._serving.current() is None:
            with self._serving.locked():
                self._take_over()
        lines = self._spark.readStream.format("minibroker").options(**kept).load()
        if self._lateness is not None:
            lines = lines.withWatermark("timestamp", self._lateness)
        self._query = (
            self._view.logic(lines)
            .writeStream.outputMode("update")
            .foreachBatch(self._process)
            .queryName(self.name)
            .option("checkpointLocation", str(checkpoint))
            .trigger(**({"availableNow": True} if trigger is None else {"processingTime": trigger}))
            .start()
        )

    def run(self, stop: threading.Event) -> bool:
        """Run until the query ends or `stop` is set. Return False if it was replaced and stopped.

        Raises MinibrokerError if it fails.
        """
        assert self._query is not None
        try:
            run_query(self._spark, self._query, stop, self._watch)
        except MinibrokerError:
            if self._replaced is None:
                raise
        self._watch()
        return self._replaced is None

    def watch(self) -> None:
        """Check the query; call this several times a second. Raises MinibrokerError if the query has failed."""
        assert self._query is not None
        if self._replaced is None and not self._watch():
            try:
                is_running(self._query)
            except MinibrokerError:
                if self._replaced is None:
                    raise

    # -- batches --

    def _process(self, changes: DataFrame, number: int) -> None:
        is_new = False

        def write(directory: Path) -> None:
            nonlocal is_new
            is_new = True
            write_changes(changes, number, directory)

        end = self._writer.checkpoint.end_of(number)
        if self.serves:
            try:
                self._writer.publish(number, write, guard=self._serving.publishing(self.token))
            except Replaced as error:
                self._replaced = error
                raise
        elif not self._takes_over_with(end, number, write):
            self._writer.publish(number, write)
        if not is_new:
            # The table has had this batch since before the query started, but Spark has lost its state, or it would not
            # repeat the batch. Spark keeps only the state of batches that are computed.
            changes.write.format("noop").mode("overwrite").save()
        self._writer.compact(
            lambda files, directory: rewrite_newest(self._spark, self._view, self._writer.table.data, files, directory),
            FAN_IN,
        )

    def _takes_over_with(self, end: Offsets, number: int, write: WriteParquet) -> bool:
        """Publish a batch and switch, if this version then has everything that the served one has."""
        with self._serving.locked():
            if not self._serving.may_take_over(end):
                return False
            self._writer.publish(number, write)
            self._take_over()
            return True

    def _take_over(self) -> None:
        """Switch to this version, with the lock held."""
        if self.serves:
            return  # the other thread was faster
        current = self._serving.switch(self._view_name, self.name, self.token, self._batch, self._writer.end)
        tell(f"{self.name} is served now (generation {current.generation})")

    def _watch(self) -> bool:
        """Switch between batches if this version has caught up. Return True if another version has taken over."""
        try:
            self._serving.check(self.token)
        except Replaced as error:
            self._replaced = error
            return True
        if not self.serves and self._serving.may_take_over(self._writer.end):
            with self._serving.locked():
                if self._serving.may_take_over(self._writer.end):
                    self._take_over()
        return False


def read_view(spark: SparkSession, path: str | Path) -> DataFrame:
    """Return the view that is served now: one version, as of one batch, even while other versions take over.

    Evaluate it within an hour. Raises MinibrokerError if there has never been a view.
    """
    serving = Serving(Path(path))
    current = serving.current()
    if current is None:
        raise MinibrokerError(f"there is no view in {serving.root}: `minibroker spark kappa` or `lambda` makes one")
    view = view_named(current.view)
    stream = read_table(spark, Table(serving.root / current.stream), view)
    if current.batch is None:
        return stream
    return merged(spark, view, read_table(spark, Table(serving.root / current.batch), view), stream)
