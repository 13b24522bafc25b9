"""The files of a table as a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def read_files(spark: SparkSession, data: Path, files: Sequence[str], columns: StructType) -> DataFrame:
    """Return the rows of `files`, which are below `data`."""
    if not files:
        return spark.createDataFrame([], columns)
    from pyspark.sql.types import StringType, StructType

    # `batch` is in the paths, from which Spark would guess different types.
    schema = StructType([*columns.fields]).add("batch", StringType())
    return spark.read.schema(schema).option("basePath", str(data)).parquet(*files).select(*columns.names)
