"""`exactlyOnce=true` of the sink, with real Spark and real brokers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from minibroker.client.admin import Admin, OffsetSpec
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import AllBrokers, CoordinatorOf, LeaderOf
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.exactly_once import NAME_PREFIX
from tests.faults.spark_rounds import WORKER, descendants
from tests.spark.copy_stream import start_copy
from tests.spark.exactness import differences
from tests.spark.logs import Logs
from tests.waiting import until_true

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def numbers(logs: Logs, topic: str) -> list[int]:
    """Return what read_committed sees of a topic, sorted."""
    rows = logs.batch(subscribe=topic, **{"isolation.level": "read_committed"}).select("value").collect()
    return sorted(int(row.value) for row in rows)


def stands_still(logs: Logs, topic: str) -> bool:
    """Whether a transaction is open in the topic: then the last stable offset is behind the end."""

    async def run() -> bool:
        async with Admin(logs.bootstrap) as admin:
            partitions = len((await admin.describe_topic(topic)).partitions)
            asked: dict[TopicPartition, OffsetSpec] = dict.fromkeys(
                (TopicPartition(topic, index) for index in range(partitions)), "latest"
            )
            ends = await admin.list_offsets(asked)
            return ends != await admin.list_offsets(asked, isolation_level="read_committed")

    return asyncio.run(run())


def test_a_replayed_batch_is_not_written_again(logs: Logs, tmp_path: Path) -> None:
    logs.create(2)
    copy = f"{logs.topic}copy"
    logs.create(2, copy)
    checkpoint = tmp_path / "checkpoint"
    for begin, end in ((0, 300), (300, 500)):
        logs.produce((b"%d" % number for number in range(begin, end)), partition=begin // 300)
        query = start_copy(logs.spark, logs.bootstrap, logs.topic, copy, str(checkpoint), 200)
        assert query.awaitTermination(60)
        assert numbers(logs, copy) == list(range(end))
        # As if the driver had died before Spark's own commit of the last batch, which the next query replays.
        last = max(int(file.name) for file in (checkpoint / "commits").glob("[0-9]*"))
        (checkpoint / "commits" / str(last)).unlink()
        (checkpoint / "commits" / f".{last}.crc").unlink()
    assert not stands_still(logs, copy)


def test_a_write_with_an_id_is_not_repeated_and_a_failed_one_leaves_no_rows(logs: Logs) -> None:
    logs.create(2)
    frame = logs.spark.range(2_000).select(F.col("id").cast("string").alias("value"))
    given = {"bootstrap.servers": logs.bootstrap, "topic": logs.topic, "exactlyOnce": "true"}
    failing = frame.repartition(2).select(
        F.when(F.col("value") != "1999", F.col("value")).otherwise(F.raise_error(F.lit("bad row"))).alias("value")
    )
    with pytest.raises(PySparkException, match="bad row"):
        failing.write.format("minibroker").mode("append").options(**given).save()
    assert not stands_still(logs, logs.topic)
    for _ in range(2):
        frame.write.format("minibroker").mode("append").options(**given, writeId=f"load-{logs.topic}").save()
        assert numbers(logs, logs.topic) == list(range(2_000))
    assert not stands_still(logs, logs.topic)
    with pytest.raises(PySparkException, match="transactionTimeout=.*transaction.max.timeout.ms"):
        frame.write.format("minibroker").mode("append").options(**given, transactionTimeout="16m").save()


@contextmanager
def driver(logs: Logs, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a copy as a process of its own, until the block ends."""
    command = [sys.executable, "-P", "-m", "tests.spark.copy_stream", logs.bootstrap, *arguments]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    for pid in [*(found.pid for found in descendants(process.pid)), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def killed_a_python_worker(driver_pid: int) -> bool:
    """Whether a Python worker ran, and was killed. None runs before the first task does."""
    for found in reversed(descendants(driver_pid)):
        if WORKER in found.command:
            try:
                os.kill(found.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return True
    return False


def test_killed_drivers_workers_leaders_and_coordinators_leave_the_topic_equal_to_its_input(
    logs: Logs, spark_cluster: LocalCluster, tmp_path: Path
) -> None:
    logs.create(3)
    copy, checkpoint = f"{logs.topic}copy", tmp_path / "checkpoint"
    logs.create(3, copy)
    for partition in range(3):
        logs.produce((b"%d" % number for number in range(partition, 6_000, 3)), partition=partition)

    def batches() -> int:
        return len(list((checkpoint / "offsets").glob("[0-9]*")))

    def progress(by: int) -> None:
        begin = batches()
        until_true(lambda: batches() >= begin + by)

    arguments = (logs.topic, copy, str(checkpoint), "--rows-per-batch", "120")
    with driver(logs, *arguments) as process:
        progress(2)
        until_true(lambda: killed_a_python_worker(process.pid))
        progress(2)
        name = NAME_PREFIX + (checkpoint / "metadata").read_text().split('"')[3]
        spark_cluster.kill(LeaderOf(TopicPartition(copy, 0)))
        progress(2)
        spark_cluster.start(AllBrokers())
        progress(2)
        spark_cluster.kill(CoordinatorOf(name))
        progress(2)
        spark_cluster.start(AllBrokers())
        progress(1)
    query = start_copy(logs.spark, logs.bootstrap, logs.topic, copy, str(checkpoint), 2_000)
    assert query.awaitTermination(120)
    found = logs.batch(subscribe=copy, **{"isolation.level": "read_committed"}).select("key", "value")
    assert differences(found, logs.batch().select("key", "value")) == (0, 0)
    assert not stands_still(logs, copy)
