"""Kill processes of `minibroker spark ingest` and of its cluster under load; then compare its output with the topic.

    python -m tests.faults.spark_rounds --rounds 5 [--modes local,cluster] [--kinds driver,worker,...] [--keep DIR]

A round kills one process with SIGKILL: the driver (in turn its Python process and its JVM), a Python worker of an
executor, an executor's JVM (on the cluster), the leader of a partition, or the controller. The job runs on local[2], or
on a Spark master with two workers. Each kind has its own topic and output; a producer writes and the job compacts
throughout. A job that ends is restarted. At the end the Parquet files must equal the topic: `exceptAll` finds no record
in either direction. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.cli.terminal.output import table_lines
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.who import AllBrokers, Controller, LeaderOf, Who
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.ingest import read_ingested
from minibroker.spark_jobs.jobs import prepare_session
from minibroker.spark_jobs.session import spark_session
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.options import LATEST
from minibroker.spark_jobs.tables.manifests import Table
from tests.spark.exactness import differences
from tests.spark.standalone import SETTINGS, SparkCluster, spark_cluster_in

ROOT = Path(__file__).parents[2]
BROKERS = 3
PARTITIONS = 3
RECORDS_PER_SECOND = 300
PATIENCE_S = 600.0
KINDS = ("driver", "worker", "executor", "leader", "controller")
MODES = ("local", "cluster")
WORKER = "pyspark.daemon pyspark.worker"
"""Module on the command lines of executors' Python processes and of the daemon that forks them."""


class Row(NamedTuple):
    mode: str
    killed: str
    rounds: int
    restarts: int
    records: int
    batches: int
    missing: int
    extra: int


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


# --- processes -----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    pid: int
    command: str


def descendants(pid: int) -> list[Found]:
    """All descendants of a process, with their command lines. A process that ends during the search is left out."""
    found: list[Found] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            children = [
                int(child)
                for task in Path(f"/proc/{parent}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
        except OSError:
            continue
        for child in children:
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found.append(Found(child, command))
            waiting.append(child)
    return found


class Job:
    """A streaming job, restarted whenever it has ended. It has the options `--trigger TIME` and `--once`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._arguments = [sys.executable, "-P", "-m", *arguments]
        self._log = log
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        self.keep_up()
        assert self._process is not None
        return self._process.pid

    def keep_up(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start("--trigger", "500ms")
            self.starts += 1

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._arguments, *more],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def finish(self) -> None:
        """Stop the job cleanly, then run it once more to ingest the rest."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE_S)
        while (code := self._start("--once").wait(PATIENCE_S)) != 0:
            tell(f"the last run ended with {code}, see {self._log}; once more")

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        for found in [*descendants(self._process.pid), Found(self._process.pid, "")]:
            _kill(found.pid)
        self._process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        tell(f"process {pid} had ended already")


# --- load ----------------------------------------------------------------------------------------------------------


@contextmanager
def load(bootstrap: str, topic: str) -> Iterator[None]:
    """Send records to every partition without a pause."""
    done = threading.Event()
    errors: list[BaseException] = []

    async def send() -> None:
        async with Producer(bootstrap) as producer:
            number = 0
            while not done.is_set():
                for _ in range(RECORDS_PER_SECOND // 20):
                    producer.send(topic, b"%d" % number * (number % 50 + 1), key=b"%d" % (number % 97))
                    number += 1
                await producer.drain()
                await asyncio.sleep(0.05)
            await producer.flush()

    def run() -> None:
        try:
            asyncio.run(send())
        except BaseException as error:  # noqa: BLE001 - raised below, on the main thread
            errors.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


# --- rounds --------------------------------------------------------------------------------------------------------


class Rounds:
    """One kind of victim in one mode."""

    def __init__(
        self, brokers: LocalCluster, spark: SparkCluster | None, kind: str, directory: Path, randomness: random.Random
    ) -> None:
        self._brokers = brokers
        self._spark = spark
        self._kind = kind
        self._random = randomness
        self.mode = "local" if spark is None else "cluster"
        self.topic = f"{self.mode}-{kind}"
        self.output = directory / self.topic
        self._master = "local[2,4]" if spark is None else spark.url
        self.job = Job(self.arguments(), directory / f"{self.topic}.log")

    def arguments(self) -> list[str]:
        """Return the module of the job, and its arguments."""
        settings = [f"--conf={name}={value}" for name, value in SETTINGS.items()]
        return [
            *("minibroker", "spark", "ingest", "--topics", self.topic, "--output", str(self.output)),
            *("--bootstrap", self._brokers.bootstrap(), "--master", self._master, *settings),
            *("--max-offsets-per-trigger", "5000", "--compact-after", "4"),
        ]

    def play(self, rounds: int) -> None:
        asyncio.run(self._create_topics())
        try:
            with load(self._brokers.bootstrap(), self.topic):
                for number in range(1, rounds + 1):
                    self._until(self._has_grown(), "the job made no progress")
                    time.sleep(self._random.uniform(0, 2))
                    victim = self._kill(number)
                    killed_at = time.monotonic()
                    target = self._log_ends()
                    self._until(lambda end=target: self._has(end), "the job did not catch up")  # type: ignore[misc]
                    took = time.monotonic() - killed_at
                    tell(f"{self.topic} round {number}: killed {victim}, caught up after {took:.1f} s")
                    self._mend()
            self.job.finish()
        finally:
            self.job.end()

    def topics(self) -> list[str]:
        return [self.topic]

    async def _create_topics(self) -> None:
        async with Admin(self._brokers.bootstrap()) as admin:
            for topic in self.topics():
                await admin.create_topic(topic, partitions=PARTITIONS, replication_factor=BROKERS)

    def _until(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.job.keep_up()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.topic}: {complaint} in {PATIENCE_S:.0f} s")
            time.sleep(0.1)

    def _batches(self) -> int:
        manifests = Table(self.output).manifests()
        return manifests[-1].last_batch + 1 if manifests else 0

    def _has_grown(self) -> Callable[[], bool]:
        before = self._batches()
        return lambda: self._batches() >= before + 2

    def _log_ends(self) -> dict[str, int]:
        partitions = [TopicPartition(self.topic, index) for index in range(PARTITIONS)]
        with LogClient(self._brokers.bootstrap(), "spark-rounds") as client:
            ends = client.known_offsets(dict.fromkeys(partitions, LATEST))
        return {str(partition.partition): offset for partition, offset in ends.items()}

    def _has(self, ends: dict[str, int]) -> bool:
        there = (Table(self.output).end() or {}).get(self.topic, {"offsets": {}})["offsets"]
        return all(there.get(partition, 0) >= offset for partition, offset in ends.items())

    def _kill(self, number: int) -> str:
        match self._kind:
            case "driver":
                return self._kill_one(self._driver_processes, "python" if number % 2 else "java")
            case "worker":
                return self._kill_one(self._python_workers, WORKER)
            case "executor":
                return self._kill_one(self._executor_processes, "CoarseGrainedExecutorBackend")
            case _:
                return f"broker {self._brokers.kill(self.member())[0]}, the {self._kind}"

    def member(self) -> Who:
        """Return the member of the cluster that this kind of round kills."""
        return LeaderOf(TopicPartition(self.topic, 0)) if self._kind == "leader" else Controller()

    def _driver_processes(self) -> list[Found]:
        pid = self.job.pid
        return [Found(pid, "python"), *(found for found in descendants(pid) if "SparkSubmit" in found.command)]

    def _executor_processes(self) -> list[Found]:
        roots = [self.job.pid] if self._spark is None else [worker.pid for worker in self._spark.workers]
        return [found for root in roots for found in descendants(root)]

    def _python_workers(self) -> list[Found]:
        """The workers that read; without their daemon Spark would continue with the orphaned workers."""
        return [found for found in self._executor_processes() if not descendants(found.pid)]

    def _kill_one(self, candidates: Callable[[], list[Found]], name: str) -> str:
        chosen: list[Found] = []

        def exists() -> bool:
            chosen[:] = [found for found in candidates() if name in found.command]
            return bool(chosen)

        self._until(exists, f"there is no {name}")
        victim = self._random.choice(chosen)
        _kill(victim.pid)
        return f"{name} {victim.pid}"

    def _mend(self) -> None:
        """Restart all brokers and wait until all replicas are in sync."""
        if self._kind not in ("driver", "worker", "executor"):
            self._brokers.start(AllBrokers())
            self._until(self._is_whole, "the replicas did not come back")

    def _is_whole(self) -> bool:
        view = self._brokers.view()
        states = [state for partition, state in view.partitions.items() if partition.topic in self.topics()]
        return (
            len(view.brokers) == BROKERS
            and view.controller_id is not None
            and sum(len(state.isr_nodes) for state in states) == len(self.topics()) * PARTITIONS * BROKERS
        )

    def judged(self, rounds: int) -> Row:
        """Compare the ingested records with the records of the topic."""
        session = spark_session(
            "judge", master="local[2]", settings=SETTINGS | {"spark.ui.showConsoleProgress": "false"}
        )
        prepare_session(session)
        options = {"bootstrap.servers": self._brokers.bootstrap(), "subscribe": self.topic, "includeHeaders": "true"}
        topic = session.read.format("minibroker").options(**options).load()
        missing, extra = differences(read_ingested(session, self.output).drop("date"), topic)
        return Row(self.mode, self._kind, rounds, self.job.starts - 1, topic.count(), self._batches(), missing, extra)


def run(
    played_as: type[Rounds], directory: Path, modes: Sequence[str], kinds: Sequence[str], rounds: int, seed: int
) -> list[Row]:
    rows: list[Row] = []
    randomness = random.Random(seed)
    brokers = LocalCluster(directory / "brokers")
    brokers.up(BROKERS, free_ports(BROKERS)[0])
    try:
        for mode in modes:
            with ExitStack() as stack:
                spark = None if mode == "local" else stack.enter_context(spark_cluster_in(directory / "spark"))
                for kind in kinds:
                    if kind == "executor" and spark is None:
                        continue  # the driver is the executor there
                    played = played_as(brokers, spark, kind, directory, randomness)
                    played.play(rounds)
                    rows.append(played.judged(rounds))
                    tell(json.dumps(rows[-1]._asdict()))
    finally:
        brokers.down(kill=True)
    return rows


def main(played_as: type[Rounds] = Rounds, all_kinds: Sequence[str] = KINDS, description: str | None = __doc__) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default=",".join(all_kinds))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    arguments = parser.parse_args()
    let_signals_interrupt()
    modes, kinds = arguments.modes.split(","), arguments.kinds.split(",")
    for name in (*modes, *kinds):
        if name not in (*MODES, *all_kinds):
            parser.error(f"unknown {name!r}: choose from {', '.join((*MODES, *all_kinds))}")
    # The default handler would exit at once and leave the started processes running.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="minibroker-spark-rounds-") as temporary:
        directory = arguments.keep or Path(temporary)
        rows = run(played_as, directory.absolute(), modes, kinds, arguments.rounds, arguments.seed)
    print("\n".join(table_lines([name.replace("_", " ") for name in Row._fields], rows)))
    sys.exit(1 if any(row.missing or row.extra or not row.records for row in rows) else 0)


if __name__ == "__main__":
    main()
