"""Topics to Parquet, exactly once, when batches are repeated, resumed, compacted or mixed up."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pyarrow.dataset
import pytest
from pyspark.sql import DataFrame

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.ingest import CONTENT, Ingested, read_ingested, run_ingest
from minibroker.spark_jobs.jobs import Source, prepare_session
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.tables.table_writer import TableWriter
from tests.spark.exactness import differences
from tests.spark.logs import Logs


def ingest(
    logs: Logs, directory: Path, limit: int | None = None, fan_in: int = 0, out_of_range: str = "error"
) -> Ingested:
    source = Source(logs.bootstrap, [logs.topic], max_offsets_per_trigger=limit, timestamp_out_of_range=out_of_range)
    prepare_session(logs.spark)
    return run_ingest(logs.spark, source, directory / "out", directory / "checkpoint", fan_in=fan_in)


def ingested(logs: Logs, directory: Path) -> DataFrame:
    return read_ingested(logs.spark, directory / "out").drop("date")


def topic_up_to(logs: Logs, directory: Path) -> DataFrame:
    """Return the rows of the topic that have been ingested."""
    end = Table(directory / "out").end()
    assert end is not None
    return logs.batch(
        includeHeaders="true", endingOffsets=json.dumps({topic: entry["offsets"] for topic, entry in end.items()})
    )


def produce(logs: Logs, count: int) -> None:
    for partition in (0, 1):
        logs.produce((b"%d" % number for number in range(count)), partition=partition, key=b"k", headers=[("h", b"1")])


@pytest.mark.slow
def test_a_record_with_a_timestamp_that_its_batch_denies_is_ingested_with_null(logs: Logs, tmp_path: Path) -> None:
    logs.create(1)
    logs.produce([b"0"])
    logs.produce_lie(b"1", 1_790_000_000_000_000_000)
    assert ingest(logs, tmp_path, fan_in=2).rows == 2
    assert ingest(logs, tmp_path, fan_in=2, out_of_range="null").rows == 0
    rows = ingested(logs, tmp_path).orderBy("offset").collect()
    assert [(bytes(row.value), row.timestamp is None) for row in rows] == [(b"0", False), (b"1", True)]


@pytest.mark.slow
def test_batches_of_any_size_add_up_to_the_topic_and_a_repeated_batch_changes_nothing(
    logs: Logs, tmp_path: Path
) -> None:
    logs.create(2)
    produce(logs, 500)
    logs.produce([b"old", b""], timestamp_ms=86_400_000 * 365)
    assert ingest(logs, tmp_path, 450) == Ingested(rows=1_002, batches=3)
    assert differences(ingested(logs, tmp_path), topic_up_to(logs, tmp_path)) == (0, 0)
    # Killed after the batch was published and before Spark recorded that: Spark repeats the batch.
    shutil.rmtree(tmp_path / "checkpoint" / "commits")
    produce(logs, 100)
    assert ingest(logs, tmp_path, 130) == Ingested(rows=200, batches=2)
    # Killed while it wrote: remains in the batch's directory, and no manifest.
    produce(logs, 10)
    left = tmp_path / "out" / "data" / "batch=5" / f"topic={logs.topic}" / "date=2026-01-01"
    left.mkdir(parents=True)
    some = next((tmp_path / "out" / "data" / "batch=0").rglob("*.parquet"))
    shutil.copy(some, left / "part-0.parquet")
    assert differences(ingested(logs, tmp_path), topic_up_to(logs, tmp_path)) == (0, 0)
    assert ingest(logs, tmp_path) == Ingested(rows=20, batches=1)
    assert not left.exists()
    assert differences(ingested(logs, tmp_path), logs.batch(includeHeaders="true")) == (0, 0)


@pytest.mark.slow
def test_files_are_plain_parquet_by_topic_and_day_for_other_readers(logs: Logs, tmp_path: Path) -> None:
    logs.create(2)
    logs.produce([b"a", b"b"], timestamp_ms=86_400_000 * 365 - 1)
    logs.produce([b"c"], timestamp_ms=86_400_000 * 365)
    ingest(logs, tmp_path)
    table = Table(tmp_path / "out")
    files = pyarrow.dataset.dataset(table.files(), partitioning="hive", partition_base_dir=str(table.data))
    rows = sorted((row["date"], row["value"], row["topic"]) for row in files.to_table().to_pylist())
    assert rows == [
        ("1970-12-31", b"a", logs.topic),
        ("1970-12-31", b"b", logs.topic),
        ("1971-01-01", b"c", logs.topic),
    ]
    (manifest,) = table.manifests()
    assert manifest.rows == 3
    assert manifest.end[logs.topic]["offsets"] == {"0": 3, "1": 0}
    assert manifest.query == json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]


@pytest.mark.slow
def test_readers_see_every_record_once_while_files_are_compacted(logs: Logs, tmp_path: Path) -> None:
    logs.create(2)
    produce(logs, 60)
    ingest(logs, tmp_path, 10)
    assert len(Table(tmp_path / "out").manifests()) == 12
    produce(logs, 1)
    done = threading.Event()
    counts: list[int] = []

    def read() -> None:
        while not done.is_set():
            rows = read_ingested(logs.spark, tmp_path / "out").select("partition", "offset").collect()
            assert len({(row.partition, row.offset) for row in rows}) == len(rows)
            counts.append(len(rows))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ingest(logs, tmp_path, 10, fan_in=4)
    finally:
        done.set()
        reader.join()
    assert set(counts) <= {120, 122}
    assert counts == sorted(counts)
    manifests = Table(tmp_path / "out").manifests()
    assert [(one.first_batch, one.last_batch, one.level) for one in manifests] == [(0, 12, 1)]
    assert differences(ingested(logs, tmp_path), logs.batch(includeHeaders="true")) == (0, 0)
    # A batch that was compacted is repeated, and recognised.
    shutil.rmtree(tmp_path / "checkpoint" / "commits")
    assert ingest(logs, tmp_path) == Ingested(rows=0, batches=0)


@pytest.mark.slow
def test_a_checkpoint_and_an_output_that_do_not_belong_together_are_refused(logs: Logs, tmp_path: Path) -> None:
    logs.create(2)
    produce(logs, 5)
    ingest(logs, tmp_path)
    source = Source(logs.bootstrap, [logs.topic])

    def refused(output: Path, checkpoint: Path, expected: str) -> None:
        with pytest.raises(MinibrokerError, match=expected):
            run_ingest(logs.spark, source, output, checkpoint)

    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    refused(tmp_path / "other", checkpoint, f"belongs to the output {out}.*other is new")
    refused(out, tmp_path / "new", f"belongs to the checkpoint {checkpoint}, and .*new is new")
    with TableWriter(out, checkpoint, CONTENT):
        refused(out, checkpoint, "another process is writing")
    with pytest.raises(MinibrokerError, match="holds job ingest, not job other"):
        TableWriter(out, checkpoint, {"job": "other"})
    # A checkpoint restored from a copy lacks batches of the table.
    shutil.copytree(checkpoint, tmp_path / "copy")
    produce(logs, 5)
    ingest(logs, tmp_path)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "copy", checkpoint)
    refused(out, checkpoint, "removed or restored from a copy")
    assert differences(ingested(logs, tmp_path), logs.batch(includeHeaders="true")) == (0, 0)
