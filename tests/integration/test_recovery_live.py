"""A real broker that recovers after a SIGKILL and reports its progress until it is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from minibroker.client.admin import Admin
from minibroker.client.cli.terminal.output import UNHEALTHY
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.recovery import ask_recoveries
from minibroker.deploy.local.who import BrokerId
from minibroker.deploy.observing.status import Status
from minibroker.deploy.observing.status_screen import status_lines
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC
from minibroker.protocol.recovery_progress import RecoveryProgress, of_metrics
from tests.integration.cli import shell
from tests.integration.test_metrics_live import scrape_text
from tests.waiting import until_true

LOGS = 6
RECORDS_OF_EACH = 50


class HeldUp:
    """A log that cannot be opened before `let_go`: the first file that the broker reads is a pipe without a writer. It
    holds up the recovery on a machine of any speed."""

    def __init__(self, directory: Path) -> None:
        self.bytes = sum(file.stat().st_size for file in directory.glob("*.log"))
        self._path = directory / "partition.metadata"
        self._kept = self._path.rename(directory.with_suffix(".kept"))
        os.mkfifo(self._path)

    def let_go(self) -> None:
        with self._path.open("wb") as pipe:  # waits for the broker to read
            content = self._kept.read_bytes()
            self._kept.replace(self._path)
            pipe.write(content)


async def fill(bootstrap: str) -> None:
    async with Admin(bootstrap) as admin:
        await admin.create_topic("orders", partitions=LOGS, replication_factor=1)
    async with Producer(bootstrap) as producer:
        for number in range(LOGS * RECORDS_OF_EACH):
            producer.send("orders", b"%d" % number, partition=number % LOGS)
        await producer.flush()


async def read_all(bootstrap: str) -> set[int]:
    found: set[int] = set()
    async with Consumer(bootstrap, topics=["orders"]) as consumer:
        async for record in consumer:
            assert record.value is not None
            found.add(int(record.value))
            if len(found) == LOGS * RECORDS_OF_EACH:
                break
    return found


@pytest.mark.slow
def test_a_recovering_broker_reports_its_progress_until_it_is_killed_or_ready(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = local_cluster(1, NO_OFFSETS_TOPIC)
    data = cluster.directory / "broker-1"
    asyncio.run(fill(cluster.bootstrap()))
    cluster.kill(BrokerId(1))
    size = sum(file.stat().st_size for file in data.glob("orders-*/*.log"))
    held_up = HeldUp(data / "orders-3")
    port = cluster.file().broker(1).metrics_port
    assert port is not None
    all_but_one = RecoveryProgress(LOGS, 1, 1, size, held_up.bytes)

    def all_but_one_are_open() -> bool:
        return ask_recoveries({1: port}).get(1) == all_but_one

    def check_status(found: Status) -> None:
        [broker] = found.brokers
        assert (broker.alive, broker.recovery) == (True, all_but_one)
        assert f"recovering: 5 of {LOGS} logs, " in status_lines(found)[1]
        assert f"broker 1 is recovering ({all_but_one}): wait" in found.problems()

    with ThreadPoolExecutor(1) as threads:
        start: Future[object] = threads.submit(cluster.start, BrokerId(1))
        until_true(all_but_one_are_open)
        check_status(cluster.status())

        cluster.kill(BrokerId(1))
        with pytest.raises(LaunchError, match="broker 1 did not start"):
            start.result()
        [broker] = cluster.status().brokers
        assert (broker.alive, broker.recovery) == (False, None)

        start = threads.submit(cluster.start, BrokerId(1))
        until_true(all_but_one_are_open)
        ended = shell.run(["status", "--data", str(cluster.directory), "--format", "json"], cluster.directory)
        assert ended.code == UNHEALTHY
        check_status(msgspec.json.decode(ended.out, type=Status))
        held_up.let_go()
        start.result()
    until_true(lambda: not cluster.status().problems())
    [broker] = cluster.status().brokers
    assert broker.recovery is None
    assert of_metrics(scrape_text(cluster, 1)) == RecoveryProgress(LOGS, 0, 0, size, 0)
    assert asyncio.run(read_all(cluster.bootstrap())) == {*range(LOGS * RECORDS_OF_EACH)}
