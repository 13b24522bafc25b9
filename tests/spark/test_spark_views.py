"""Kappa and Lambda: the view is that of the whole log, for any batches and any order of versions."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame

from minibroker.client.producer import Producer
from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.jobs import Source, prepare_session
from minibroker.spark_jobs.kappa import run_kappa
from minibroker.spark_jobs.lambda_ import Lambda, run_lambda
from minibroker.spark_jobs.source.offsets import from_json
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.views.serving import Serving, reached
from minibroker.spark_jobs.views.view_stream import CHECKPOINT, read_view
from minibroker.spark_jobs.views.views import VIEWS
from tests.spark.exactness import differences
from tests.spark.logs import Logs
from tests.waiting import until_true

DEADLINE_S = 120.0
HOUR_MS = 3_600_000


def source(logs: Logs, limit: int | None = None) -> Source:
    prepare_session(logs.spark)
    return Source(logs.bootstrap, [logs.topic], max_offsets_per_trigger=limit)


def log_end(logs: Logs, counts: dict[int, int]) -> Callable[[Path], bool]:
    """Return whether the served view has these numbers of records of each partition."""

    def has(root: Path) -> bool:
        current = Serving(root).current()
        end = None if current is None else Table(root / current.stream).end()
        if end is None:
            return False
        topic_id = end[logs.topic]["id"]
        wanted = {logs.topic: {"id": topic_id, "offsets": {str(index): count for index, count in counts.items()}}}
        return reached(from_json(end), from_json(wanted))

    return has


def recomputed(logs: Logs, view: str) -> DataFrame:
    return VIEWS[view].logic(logs.batch(includeHeaders="true"))


WORDS = (b"def f(x):", b"    return x", b"", b"# ERROR", b"import os", b"\xff\xfe", b"def g():")


def produce(logs: Logs, first: int, count: int, timestamp_ms: int = HOUR_MS) -> None:
    """Send seven kinds of lines to both partitions, over several windows, not in the order of their time."""

    async def send() -> None:
        async with Producer(logs.bootstrap) as producer:
            for number in range(first, first + count):
                for partition in (0, 1):
                    at_ms = timestamp_ms + (number * 7_919 + partition * 3_000) % 60_000
                    line = WORDS[number % len(WORDS)]
                    producer.send(logs.topic, line, partition=partition, timestamp_ms=at_ms)

    asyncio.run(send())


@pytest.mark.slow
def test_a_kappa_view_is_the_same_whatever_its_batches_are(logs: Logs, tmp_path: Path) -> None:
    logs.create(2)
    produce(logs, 0, 150)
    for view, limit in (("v1", 170), ("v2", None)):
        assert run_kappa(logs.spark, source(logs, limit), tmp_path / view, view)
        assert differences(read_view(logs.spark, tmp_path / view), recomputed(logs, view)) == (0, 0)
    produce(logs, 150, 20, timestamp_ms=0)
    assert run_kappa(logs.spark, source(logs, 27), tmp_path / "v1", "v1")
    assert differences(read_view(logs.spark, tmp_path / "v1"), recomputed(logs, "v1")) == (0, 0)


@pytest.mark.slow
def test_readers_of_a_kappa_view_notice_nothing_but_new_columns_when_a_version_replaces_another(
    logs: Logs, tmp_path: Path
) -> None:
    logs.create(2)
    produce(logs, 0, 100)
    ends: dict[str, bool] = {}

    def keep(view: str, limit: int | None) -> threading.Thread:
        def run() -> None:
            ends[view] = run_kappa(logs.spark, source(logs, limit), tmp_path, view, trigger="0 seconds")

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    done = threading.Event()
    seen: list[tuple[tuple[str, ...], int]] = []

    def read() -> None:
        while not done.is_set():
            view = read_view(logs.spark, tmp_path)
            rows = view.collect()
            seen.append((tuple(view.columns), sum(row.lines for row in rows)))
            assert len({row[:3] for row in rows}) == len(rows)

    first = keep("v1", None)
    reader, second = threading.Thread(target=read), None
    try:
        until_true(lambda: log_end(logs, {0: 100, 1: 100})(tmp_path))
        reader.start()
        second = keep("v2", 60)
        for number in range(100, 200, 20):
            produce(logs, number, 20)
        first.join(DEADLINE_S)
        assert ends == {"v1": False}
        until_true(lambda: log_end(logs, {0: 200, 1: 200})(tmp_path))
    finally:
        done.set()
        reader.join()
        for query in logs.spark.streams.active:
            query.stop()
        for thread in (first, second):
            if thread is not None:
                thread.join()
    assert ends == {"v1": False, "v2": True}
    columns = [names for names, _ in seen]
    assert set(columns) <= {VIEWS["v1"].columns, VIEWS["v2"].columns}
    assert columns == sorted(columns, key=len)
    counts = [count for _, count in seen]
    assert counts == sorted(counts)
    assert counts[0] >= 200
    assert differences(read_view(logs.spark, tmp_path), recomputed(logs, "v2")) == (0, 0)
    with pytest.raises(MinibrokerError, match="was replaced by v2 and cannot serve again"):
        run_kappa(logs.spark, source(logs), tmp_path, "v1")


@pytest.mark.slow
def test_both_layers_of_lambda_add_up_to_everything_and_the_batch_job_corrects_what_came_too_late(
    logs: Logs, tmp_path: Path
) -> None:
    logs.create(2)
    produce(logs, 0, 60)
    run_lambda(logs.spark, source(logs), tmp_path, "v2")
    assert differences(read_view(logs.spark, tmp_path), recomputed(logs, "v2")) == (0, 0)
    produce(logs, 60, 30)
    with Lambda(logs.spark, source(logs, 25), tmp_path, "v2", "10 minutes", threading.Event()) as layers:
        # From the first boundary, in small batches, into windows that the batch layer also has.
        layers.resume("0 seconds")
        until_true(lambda: log_end(logs, {0: 90, 1: 90})(tmp_path))
        assert differences(read_view(logs.spark, tmp_path), recomputed(logs, "v2")) == (0, 0)
        # Two hours later, and then an old line. Spark applies to a batch the watermark of the one before, and runs
        # one without lines to apply a new one. It is one line, since a second one in a batch of its own, not newer,
        # would leave nothing to apply.
        logs.produce([b"def h():"], timestamp_ms=3 * HOUR_MS)
        until_true(lambda: log_end(logs, {0: 91, 1: 90})(tmp_path))
        until_true(lambda: not Table(tmp_path / "speed-1").manifests()[-1].rows)
        logs.produce([b"late"], timestamp_ms=HOUR_MS)
        until_true(lambda: log_end(logs, {0: 92, 1: 90})(tmp_path))
        assert differences(read_view(logs.spark, tmp_path), recomputed(logs, "v2")) == (1, 0)
        stream = layers.next_generation("0 seconds")
        while not stream.serves:
            layers.watch()
        layers.retire_others(stream)
        assert differences(read_view(logs.spark, tmp_path), recomputed(logs, "v2")) == (0, 0)
        produce(logs, 91, 5, timestamp_ms=3 * HOUR_MS)
        until_true(lambda: log_end(logs, {0: 97, 1: 95})(tmp_path))
        assert differences(read_view(logs.spark, tmp_path), recomputed(logs, "v2")) == (0, 0)
    current = Serving(tmp_path).current()
    assert current is not None
    assert (current.generation, current.batch, current.stream) == (2, "batch-2", "speed-2")
    boundary = Table(tmp_path / "batch-2").end()
    assert boundary is not None
    assert json.loads(json.dumps(boundary[logs.topic]["offsets"])) == {"0": 92, "1": 90}


@pytest.mark.slow
@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_batch_that_the_table_has_and_the_checkpoint_lacks_counts_once(
    state: str, logs: Logs, tmp_path: Path
) -> None:
    """A driver that dies between the two leaves them so."""
    root = tmp_path / "view"
    logs.create(2)
    produce(logs, 0, 50)
    assert run_kappa(logs.spark, source(logs), root, "v1")
    checkpoint = root / "v1" / CHECKPOINT
    shutil.rmtree(checkpoint / "commits")
    if state == "lost":
        shutil.rmtree(checkpoint / "state")
    produce(logs, 50, 30)
    assert run_kappa(logs.spark, source(logs), root, "v1")
    assert log_end(logs, {0: 80, 1: 80})(root)
    assert differences(read_view(logs.spark, root), recomputed(logs, "v1")) == (0, 0)
