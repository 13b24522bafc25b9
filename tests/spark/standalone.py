"""A Spark cluster on this machine for tests: a master and workers as processes in the foreground, ended by their ids.

python -m tests.spark.standalone        # prints the master's URL, and runs until Ctrl-C
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.spark_jobs.session import prepare_environment

PATIENCE_S = 120.0
CORES_OF_A_WORKER = 1
MEMORY_OF_A_WORKER = "640m"

SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
}
"""Settings of sessions on this cluster, which are small for tests."""


class SparkCluster:
    """`url` is the master's. The children of the processes `workers` are executors."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self._directory = directory
        self._environment = dict(os.environ)
        prepare_environment(self._environment)
        home = Path(pyspark.__file__).parent
        self._environment |= {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        }
        self._program = str(home / "bin" / "spark-class")
        port, self._web_port = free_ports(2)
        self.url = f"spark://{LOOPBACK}:{port}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self.master = self._start("master", "master.Master", "--port", str(port), "--webui-port", str(self._web_port))
        self.workers: list[subprocess.Popen[bytes]] = []
        try:
            self._wait_for_workers(0)
            for number in range(1, workers + 1):
                self.workers.append(
                    self._start(
                        f"worker-{number}",
                        "worker.Worker",
                        *("--cores", str(CORES_OF_A_WORKER), "--memory", MEMORY_OF_A_WORKER, "--webui-port", "0"),
                        *("--work-dir", str(directory / f"worker-{number}"), self.url),
                    )
                )
            self._wait_for_workers(workers)
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, main: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [self._program, f"org.apache.spark.deploy.{main}", "--host", LOOPBACK, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_for_workers(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._alive_workers() != count:
            for process in (self.master, *self.workers):
                assert process.poll() is None, f"see the logs in {self._directory}"
            assert time.monotonic() < deadline, f"see the logs in {self._directory}"
            time.sleep(0.1)

    def _alive_workers(self) -> int | None:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self._web_port}/json/", timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, json.JSONDecodeError):  # the server answers with a page until its handlers are there
            return None

    def stop(self) -> None:
        for process in (*self.workers, self.master):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (*self.workers, self.master):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def spark_cluster_in(directory: Path) -> Iterator[SparkCluster]:
    cluster = SparkCluster(directory)
    try:
        yield cluster
    finally:
        cluster.stop()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="minibroker-spark-") as directory, spark_cluster_in(Path(directory)) as it:
        print(it.url, flush=True)
        try:
            it.master.wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
