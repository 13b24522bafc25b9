"""Group members in their own processes, on real brokers; the virtual event loop cannot simulate a blocked loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from tests.live_cluster import live_cluster
from tests.waiting import until

pytestmark = pytest.mark.slow

SESSION_MS, HEARTBEAT_MS = 2_000, 400

BUSY = """
import asyncio, logging, sys, time
from minibroker import Consumer

logging.basicConfig(level=logging.WARNING)


async def main() -> None:
    bootstrap, group, how, seconds, longest_ms = sys.argv[1:]
    settings = dict(session_timeout_ms=2_000, heartbeat_interval_ms=400, max_poll_interval_ms=int(longest_ms))
    async with Consumer(bootstrap, group=group, topics=["orders"], **settings) as consumer:
        record = await anext(consumer)
        generation = consumer.status().generation_id
        print("busy", flush=True)
        until = time.monotonic() + float(seconds)
        if how == "sleeping":
            time.sleep(float(seconds))
        while time.monotonic() < until:
            pass
        try:
            await consumer.commit()
            print("committed, generations", generation, consumer.status().generation_id, flush=True)
        except Exception as error:
            print("failed:", error, flush=True)
        try:
            await anext(consumer)
            print("goes on", flush=True)
        except Exception as error:
            print("raised:", error, flush=True)


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"group.min.session.timeout.ms": "1000"}
    with live_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        asyncio.run(prepare(cluster))
        yield cluster


async def prepare(cluster: LocalCluster) -> None:
    async with Admin(cluster.bootstrap()) as admin:
        await admin.create_topic("orders", partitions=4, replication_factor=3)
    async with Producer(cluster.bootstrap()) as producer:
        for number in range(1_000):
            producer.send("orders", b"%d" % number, partition=number % 4)
        await producer.flush()


def busy(
    cluster: LocalCluster, tmp_path: Path, group: str, how: str, seconds: float, longest_ms: int
) -> subprocess.Popen[str]:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    return subprocess.Popen(
        [sys.executable, "-W", "error", script, cluster.bootstrap(), group, how, str(seconds), str(longest_ms)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("how", ["sleeping", "computing"])
def test_a_member_that_blocks_its_event_loop_longer_than_its_session_stays_in_the_group(
    cluster: LocalCluster, tmp_path: Path, how: str
) -> None:
    process = busy(cluster, tmp_path, f"stays-{how}", how, 4, 300_000)
    said, _ = process.communicate(timeout=60)
    assert said.splitlines() == ["busy", "committed, generations 1 1", "goes on"]


def test_a_member_that_blocks_its_event_loop_longer_than_max_poll_interval_leaves_the_group(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    async def other(process: subprocess.Popen[str]) -> float:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "busy\n"
        began = asyncio.get_running_loop().time()
        async with Consumer(
            cluster.bootstrap(),
            group="leaves",
            topics=["orders"],
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
        ) as consumer:
            await until(lambda: len(consumer.assignment()) == 4, 30)
            return asyncio.get_running_loop().time() - began

    process = busy(cluster, tmp_path, "leaves", "sleeping", 8, 2_000)
    took_s = asyncio.run(other(process))
    said, _ = process.communicate(timeout=60)
    assert took_s < 7, "it left while its loop was blocked"
    assert "WARNING" in said
    assert "max_poll_interval_ms=2000" in said
    assert "failed: offsets of group leaves were not committed" in said
    assert "raised: no records were asked for during" in said
