"""A sink for a test; a module of its own, since Spark's workers import it by its name."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext


class Spy(DataSource):
    """A sink that records the query, batch and partition of each task, as Spark reports them to the task."""

    @classmethod
    def name(cls) -> str:
        return "spy"

    def streamWriter(self, schema: StructType, overwrite: bool) -> SpyWriter:  # noqa: N802
        return SpyWriter(str(self.options["path"]))


class SpyWriter(DataSourceStreamArrowWriter):
    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        rows = sum(batch.num_rows for batch in iterator)
        task = TaskContext.get()
        assert task is not None
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        with open(self.path, "a") as file:
            file.write(f"{query} {batch} {task.partitionId()} {rows}\n")
        return WriterCommitMessage()
