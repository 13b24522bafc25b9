"""The views of lines, for batch and stream alike, and their tables.

A view's logic is one pure function of a DataFrame with the source's columns: a streaming query computes the same from a
topic as a batch query. Lines are texts, perhaps with a key, as `minibroker demo` and `minibroker produce` send them. A
log's lines begin with their level, the demo's with a keyword of Python, so the views count by first word.

A streaming query returns, for each batch, the rows that have changed. They are appended to the view's table with the
number of their batch; readers use the newest row of each window and word. Compactions keep only that row.

The sums of two parts of a topic add up to those of the whole: `merged` relies on that, and a new view must ensure it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (its usual name)
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from minibroker.client.errors import InvalidSetting
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.tables.table_reader import read_files

WINDOW = "10 seconds"
LONGEST_WORD = 32
KEYS = ("window_start", "window_end", "word")


@dataclass(frozen=True)
class View:
    logic: Callable[[DataFrame], DataFrame]
    measures: tuple[str, ...]
    """The columns beside KEYS: whole numbers that can be added up."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*KEYS, *self.measures)

    @property
    def schema(self) -> StructType:
        keys = [StructField(name, TimestampType()) for name in KEYS[:2]] + [StructField(KEYS[2], StringType())]
        return StructType(keys + [StructField(name, LongType()) for name in self.measures])


def word() -> Column:
    """Return a line's key, or else the first word of its value, or the first character that is not a space."""
    first = F.regexp_extract(F.col("value").cast("string"), r"^\s*(\w+|\S)", 1)
    return F.substring(F.coalesce(F.col("key").cast("string"), first, F.lit("")), 1, LONGEST_WORD)


def _summed(lines: DataFrame, *measures: Column) -> DataFrame:
    window = F.window("timestamp", WINDOW)
    return (
        lines.groupBy(window.alias("window"), word().alias("word"))
        .agg(*measures)
        .select(
            F.col("window.start").alias("window_start"),
            F.col("window.end").alias("window_end"),
            "word",
            *(F.col(name).cast("long").alias(name) for name in ("lines", "bytes")[: len(measures)]),
        )
    )


def lines_per_word(lines: DataFrame) -> DataFrame:
    """Count the lines per first word and ten seconds of their timestamps (v1)."""
    return _summed(lines, F.count(F.lit(1)).alias("lines"))


def lines_and_bytes_per_word(lines: DataFrame) -> DataFrame:
    """Count the lines as v1, and their bytes (v2)."""
    size = F.coalesce(F.octet_length("value"), F.lit(0))
    return _summed(lines, F.count(F.lit(1)).alias("lines"), F.sum(size).alias("bytes"))


VIEWS = {
    "v1": View(lines_per_word, ("lines",)),
    "v2": View(lines_and_bytes_per_word, ("lines", "bytes")),
}


def view_named(name: str) -> View:
    """Raises InvalidSetting."""
    if name not in VIEWS:
        raise InvalidSetting("view", name, f"there are {', '.join(VIEWS)}")
    return VIEWS[name]


# --- tables of views -----------------------------------------------------------------------------------------------


def write_changes(changes: DataFrame, batch: int, directory: Path) -> None:
    changes.withColumn("batch_number", F.lit(batch).cast("long")).write.parquet(str(directory))


def rewrite_newest(spark: SparkSession, view: View, data: Path, files: Sequence[str], directory: Path) -> None:
    """Compact files: keep the newest row of each window and word."""
    rows = _newest(_changes(spark, view, data, files), view)
    rows.select(*view.columns, "batch_number").coalesce(1).write.parquet(str(directory))


def read_table(spark: SparkSession, table: Table, view: View) -> DataFrame:
    """Return a view as it is in its table now."""
    return _newest(_changes(spark, view, table.data, table.files()), view).select(*view.columns)


def _changes(spark: SparkSession, view: View, data: Path, files: Sequence[str]) -> DataFrame:
    return read_files(spark, data, files, StructType([*view.schema.fields]).add("batch_number", LongType()))


def _newest(changes: DataFrame, view: View) -> DataFrame:
    newest = F.max_by(F.struct(*view.measures), "batch_number").alias("newest")
    return changes.groupBy(*KEYS).agg(newest, F.max("batch_number").alias("batch_number")).select("*", "newest.*")


def merged(spark: SparkSession, view: View, batch: DataFrame, speed: DataFrame) -> DataFrame:
    """Add up the views of two parts of a topic."""
    sums = ", ".join(f"SUM({name}) AS {name}" for name in view.measures)
    keys = ", ".join(KEYS)
    return spark.sql(
        f"SELECT {keys}, {sums} FROM (SELECT * FROM {{batch}} UNION ALL SELECT * FROM {{speed}}) GROUP BY {keys}",
        batch=batch,
        speed=speed,
    )
