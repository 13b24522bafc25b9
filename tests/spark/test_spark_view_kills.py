"""Drivers of Kappa and Lambda that are killed in the middle of a change of versions, under constant reads.

The killed driver is a process started by `minibroker spark`; its successor runs in this process. At any moment the
served view equals the result of a batch query over the topic up to the view's offsets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minibroker.spark_jobs.kappa import run_kappa
from minibroker.spark_jobs.lambda_ import run_lambda
from minibroker.spark_jobs.tables.manifests import Table
from minibroker.spark_jobs.views.serving import Serving
from minibroker.spark_jobs.views.view_stream import read_view
from minibroker.spark_jobs.views.views import VIEWS
from tests.faults.spark_rounds import descendants
from tests.spark.exactness import differences
from tests.spark.logs import Logs
from tests.spark.test_spark_views import DEADLINE_S, log_end, produce, source
from tests.waiting import until_true

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@contextmanager
def driver(logs: Logs, root: Path, job: str, *options: str) -> Iterator[Callable[[], None]]:
    """Run `minibroker spark JOB` as a process. Yields a function that kills it, as the OOM killer would."""
    command = [sys.executable, "-P", "-m", "minibroker", "spark", job, "--view", "v2", "--trigger", "100ms", *options]
    given = ["--topics", logs.topic, "--output", str(root), "--bootstrap", logs.bootstrap, "--master", "local[2,4]"]
    conf = ["--conf=spark.driver.memory=512m", "--conf=spark.sql.shuffle.partitions=1"]
    with (root.parent / f"{job}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *given, *conf],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def kill() -> None:
        below = [found.pid for found in descendants(process.pid)]
        process.kill()
        process.wait()
        # Its Java process ends by itself later; until then it may continue the batch.
        until_true(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in below))

    try:
        yield kill
        assert process.returncode == -signal.SIGKILL, f"it ended by itself: {(root.parent / f'{job}.log').read_text()}"
    finally:
        if process.poll() is None:
            kill()


@contextmanager
def reader(logs: Logs, root: Path) -> Iterator[list[tuple[tuple[str, ...], int]]]:
    """Read the view continuously. Yields a list with the columns and lines of each read. A read must not fail, see a
    key twice, or see fewer lines than before."""
    done = threading.Event()
    seen: list[tuple[tuple[str, ...], int]] = []
    failures: list[BaseException] = []

    def read() -> None:
        before = 0
        try:
            while not done.is_set():
                view = read_view(logs.spark, root)
                rows = view.collect()
                lines = sum(row.lines for row in rows)
                assert len({row[:3] for row in rows}) == len(rows)
                assert lines >= before
                before = lines
                seen.append((tuple(view.columns), lines))
        except BaseException as error:  # noqa: BLE001 (raised below, on the main thread)
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


def served_is_exact(logs: Logs, root: Path) -> bool:
    """Compare the served view with a batch query up to the same offsets."""
    current = Serving(root).current()
    assert current is not None
    end = Table(root / current.stream).end()
    assert end is not None
    bounds = json.dumps({topic: entry["offsets"] for topic, entry in end.items()})
    expected = VIEWS[current.view].logic(logs.batch(includeHeaders="true", endingOffsets=bounds))
    return differences(read_view(logs.spark, root), expected) == (0, 0)


def generation(root: Path) -> int:
    current = Serving(root).current()
    return 0 if current is None else current.generation


def test_a_kappa_driver_that_is_killed_while_it_replays_goes_on_and_no_reader_notices(
    logs: Logs, tmp_path: Path
) -> None:
    root = tmp_path / "view"
    logs.create(2)
    produce(logs, 0, 100)
    ends: list[bool] = []

    def serve() -> None:
        ends.append(run_kappa(logs.spark, source(logs), root, "v1", trigger="1 second"))

    first = threading.Thread(target=serve)
    first.start()
    try:
        until_true(lambda: log_end(logs, {0: 100, 1: 100})(root))
        with reader(logs, root) as seen:
            with driver(logs, root, "kappa", "--max-offsets-per-trigger", "70") as kill:
                until_true(lambda: len(Table(root / "v2").manifests()) >= 1)
                kill()
            assert served_is_exact(logs, root)
            produce(logs, 100, 40)
            assert run_kappa(logs.spark, source(logs), root, "v2")
            first.join(DEADLINE_S)
    finally:
        for query in logs.spark.streams.active:
            query.stop()
        first.join()
    assert ends == [False]
    assert generation(root) == 2
    columns = {names for names, _ in seen}
    assert VIEWS["v1"].columns in columns
    assert columns <= {VIEWS["v1"].columns, VIEWS["v2"].columns}
    assert log_end(logs, {0: 140, 1: 140})(root)
    assert served_is_exact(logs, root)


def test_a_lambda_driver_that_is_killed_between_its_layers_goes_on_and_no_reader_notices(
    logs: Logs, tmp_path: Path
) -> None:
    root = tmp_path / "view"
    logs.create(2)
    produce(logs, 0, 60)
    with driver(logs, root, "lambda", "--batch-every", "500ms", "--max-offsets-per-trigger", "30") as kill:
        until_true(lambda: generation(root) == 1)
        with reader(logs, root) as seen:
            produce(logs, 60, 60)
            until_true(lambda: log_end(logs, {0: 120, 1: 120})(root))
            # The next batch layer is complete, and its stream has not taken over, or has just done so.
            upto = generation(root) + 1
            until_true(lambda: bool(Table(root / f"batch-{upto}").manifests()))
            kill()
            assert served_is_exact(logs, root)
            produce(logs, 120, 30)
            run_lambda(logs.spark, source(logs, 25), root, "v2")
    assert seen
    assert log_end(logs, {0: 150, 1: 150})(root)
    assert served_is_exact(logs, root)
