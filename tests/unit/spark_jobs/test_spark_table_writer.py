"""A batch becomes one manifest, even if it is repeated, cut off or exchanged. Without Spark: files as it writes
them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.source.initial_offsets import FILE_NAME
from minibroker.spark_jobs.source.offsets import from_json
from minibroker.spark_jobs.tables.checkpoint import Checkpoint
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.tables.table_writer import KEEP_REPLACED_MS, TableWriter

CONTENT = {"job": "test"}


def offsets(number: int, topic_id: str = "id") -> dict[str, dict[str, Any]]:
    return {"t": {"id": topic_id, "offsets": {"0": number}}}


class Query:
    """A checkpoint as Spark leaves it: batch N is offsets 10*N to 10*N+10."""

    def __init__(self, directory: Path, query: str = "q1") -> None:
        self.directory = directory
        (directory / "offsets").mkdir(parents=True)
        (directory / FILE_NAME).write_text(json.dumps(offsets(0)))
        (directory / "metadata").write_text(json.dumps({"id": query}))

    def begin(self, batch: int, end: int | None = None) -> int:
        content = json.dumps(offsets(10 * batch + 10 if end is None else end))
        (self.directory / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{content}')
        return batch


def rows(first: int) -> Any:
    def write(directory: Path) -> None:
        (directory / "topic=t").mkdir(parents=True)
        (directory / "_SUCCESS").touch()
        numbers = list(range(first, first + 10))
        pyarrow.parquet.write_table(pyarrow.table({"n": numbers}), directory / "topic=t" / f"part-{first}.parquet")

    return write


def rewrite(files: Sequence[str], directory: Path) -> None:
    (directory / "topic=t").mkdir(parents=True)
    together = pyarrow.concat_tables(pyarrow.parquet.ParquetFile(file).read() for file in files)
    pyarrow.parquet.write_table(together, directory / "topic=t" / "part-0.parquet")


def opened(tmp_path: Path, query: Query, keep_replaced_ms: int = KEEP_REPLACED_MS) -> TableWriter:
    writer = TableWriter(tmp_path / "out", query.directory, CONTENT, keep_replaced_ms=keep_replaced_ms)
    writer.begin(CONTENT, from_json(offsets(0)))
    return writer


def numbers(tmp_path: Path) -> list[int]:
    files = Table(tmp_path / "out").files()
    return sorted(number for file in files for number in pyarrow.parquet.ParquetFile(file).read()["n"].to_pylist())


def never(_directory: Path) -> None:
    raise AssertionError("it is there already")


def test_a_batch_is_there_as_a_whole_once_its_manifest_is(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    with opened(tmp_path, query) as writer:
        assert writer.publish(query.begin(0), rows(0))
        query.begin(1)

        def dies(directory: Path) -> None:
            rows(10)(directory)
            raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            writer.publish(1, dies)
    assert numbers(tmp_path) == list(range(10))
    shutil.copytree(tmp_path / "out/data/batch=0", tmp_path / "out/data/batch=1")
    with opened(tmp_path, query) as writer:
        assert not (tmp_path / "out/_staging").exists()
        assert not (tmp_path / "out/data/batch=1").exists()
        assert not writer.publish(0, never)
        assert writer.publish(1, rows(10))
        assert not writer.publish(1, never)
        assert writer.publish(query.begin(2, end=20), lambda directory: None)  # a batch without rows
    assert numbers(tmp_path) == list(range(20))
    assert [one.rows for one in Table(tmp_path / "out").manifests()] == [10, 10, 0]
    assert Table(tmp_path / "out").end() == offsets(20)


def test_a_batch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    with opened(tmp_path, query) as writer:
        writer.publish(query.begin(0), rows(0))
        query.begin(0, end=7)
        with pytest.raises(MinibrokerError, match=r"do not match: batch 0 of query q1 up to .*7.*it is there as one"):
            writer.publish(0, never)
        query.begin(0)
        query.begin(1)
        with pytest.raises(MinibrokerError, match="do not match: batch 2 .* batch 1 .* should be next"):
            writer.publish(query.begin(2), never)
        (query.directory / "metadata").write_text('{"id": "q2"}')
        with pytest.raises(MinibrokerError, match="of query q2"):
            writer.publish(0, never)
    with pytest.raises(MinibrokerError, match="removed or restored from a copy"):
        opened(tmp_path, query)
    (query.directory / "offsets" / "1").write_text("v9\n{}\n{}")
    with pytest.raises(MinibrokerError, match="not as Spark writes it"):
        Checkpoint(query.directory).end_of(1)


def test_table_and_checkpoint_belong_together(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    out = tmp_path / "out"
    with opened(tmp_path, query) as writer:
        writer.publish(query.begin(0), rows(0))
        with pytest.raises(MinibrokerError, match="another process is writing"):
            TableWriter(out, query.directory, CONTENT)
    with pytest.raises(MinibrokerError, match="belongs to the output .*out, and .*elsewhere is new"):
        TableWriter(tmp_path / "elsewhere", query.directory, CONTENT)
    with pytest.raises(MinibrokerError, match="belongs to the checkpoint .*checkpoint, and .*fresh is new"):
        TableWriter(out, tmp_path / "fresh", CONTENT)
    other = Query(tmp_path / "foreign")
    other.begin(0)
    with pytest.raises(MinibrokerError, match="foreign is another query's"):
        TableWriter(tmp_path / "elsewhere", other.directory, CONTENT)
    with pytest.raises(MinibrokerError, match="holds job test, not job else"):
        TableWriter(out, query.directory, {"job": "else"})
    with opened(tmp_path, query):
        pass


def test_a_start_that_was_cut_off_between_its_two_files_is_made_again(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    with opened(tmp_path, query) as writer:
        first = writer.token
    (query.directory / "minibroker-table.json").unlink()
    with opened(tmp_path, query) as writer:
        assert writer.token != first
        assert writer.publish(query.begin(0), rows(0))


def test_a_compaction_replaces_files_at_once_and_removes_them_later(tmp_path: Path) -> None:
    query = Query(tmp_path / "checkpoint")
    with opened(tmp_path, query) as writer:
        for number in range(5):
            writer.publish(query.begin(number), rows(10 * number))
        before = Table(tmp_path / "out").files()
        (made,) = writer.compact(rewrite, 5)
        assert (made.first_batch, made.last_batch, made.level, made.rows) == (0, 4, 1, 50)
        assert len(Table(tmp_path / "out").files()) == 1
        assert all(Path(file).exists() for file in before)  # for readers that have begun
        assert writer.compact(rewrite, 5) == []
        assert not writer.publish(4, never)
    with opened(tmp_path, query, keep_replaced_ms=0) as writer:
        for number in range(5, 10):
            writer.publish(query.begin(number), rows(10 * number))
        writer.compact(rewrite, 5)
        assert not any(Path(file).exists() for file in before)
        assert [one.span for one in Table(tmp_path / "out").manifests()] == [(0, 4), (5, 9)]
        assert len(list((tmp_path / "out/manifests").iterdir())) == 2
    assert numbers(tmp_path) == list(range(100))
