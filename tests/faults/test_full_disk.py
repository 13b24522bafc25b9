"""A cluster on a full disk: its processes can be found, stopped and started, and the error names the directory.

Needs root to mount disks, so it runs with `make full-disk` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import cluster_file, secret_file
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import is_alive
from minibroker.deploy.local.who import BrokerId, ZooKeeperServer
from minibroker.deploy.observing.cluster_view import ask_offline_log_dirs
from minibroker.deploy.observing.status import status_of_view
from tests.waiting import until_true


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 8 MB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.fail(f"needs root, and the right to mount: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4_096))
    return ballast


def test_a_cluster_on_a_full_disk_is_reported_and_stopped_and_comes_up_again(small_disk: Path) -> None:
    cluster = LocalCluster(small_disk / "data")
    cluster.up(1, free_ports(1)[0])
    try:
        processes = cluster.file().processes()
        ballast = fill(small_disk)
        full = f"the disk of {cluster.directory} is full: make room there"
        assert cluster.status().problems()[0].startswith(full)
        assert cluster.stop(BrokerId(1)) == [1]
        assert cluster.stop(ZooKeeperServer()) == ["zookeeper"]
        with pytest.raises(LaunchError, match=full):
            cluster.start(ZooKeeperServer())
        with pytest.raises(LaunchError, match=full):
            cluster.up()
        assert cluster.down() == []
        assert not cluster.file().running
        assert not any(is_alive(process) for process in processes)
        assert cluster.status().problems()[1:] == ["the cluster is down: `minibroker up`"]
        ballast.unlink()
        assert cluster.up().running
        assert cluster.status().full_disk is None
    finally:
        cluster.down(kill=True)


def test_the_cluster_file_is_written_although_the_disk_has_no_room_for_a_second_one(small_disk: Path) -> None:
    shorter = ClusterFile(ZooKeeperEntry("127.0.0.1:2181"), (BrokerEntry(1, 9092),))
    longer = ClusterFile(ZooKeeperEntry("127.0.0.1:2181"), (BrokerEntry(1, 9092), BrokerEntry(2, 9093)), running=True)
    cluster_file.save(small_disk, shorter)
    fill(small_disk)
    for cluster in (longer, shorter):
        cluster_file.save(small_disk, cluster)
        found = cluster_file.load(small_disk)
        assert found is not None
        assert (found.brokers, found.running) == (cluster.brokers, cluster.running)


async def spread_over(bootstrap: str, broker_id: int) -> None:
    """Create two partitions that the broker leads, each with its second replica on broker 1."""
    async with Admin(bootstrap) as admin:
        await admin.create_topic("orders", assignments=[[broker_id, 1]] * 2)


async def leaders_after(bootstrap: str, values: range) -> list[int | None]:
    """Append the values to both partitions, then return the partitions' leaders."""
    async with Producer(bootstrap) as producer:
        for value in values:
            await asyncio.gather(*(producer.send("orders", b"%d" % value + bytes(900), partition=p) for p in (0, 1)))
    async with Admin(bootstrap) as admin:
        return [partition.leader for partition in (await admin.describe_topic("orders")).partitions]


async def values_read(bootstrap: str, count: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {0: [], 1: []}
    async with Consumer(bootstrap, topics=["orders"]) as consumer:
        async for record in consumer:
            found[record.partition].append(int((record.value or b"").rstrip(b"\0")))
            if all(len(values) >= count for values in found.values()):
                return found
    raise AssertionError("it ended")


def test_a_broker_with_one_full_disk_keeps_serving_from_its_other_disk(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    large_disk = tmp_path_factory.mktemp("large")
    cluster = LocalCluster(large_disk / "cluster")
    running = cluster.up(1, free_ports(1)[0])
    bootstrap = f"127.0.0.1:{running.broker(1).port}"
    settings = {
        "broker.id": "4",
        "listeners": f"PLAINTEXT://127.0.0.1:{free_ports(1)[0]}",
        "log.dirs": f"{large_disk / 'data'},{small_disk / 'data'}",
        "zookeeper.connect": running.zookeeper.connect,
        "broker.secret.file": str(cluster.directory / secret_file.FILE_NAME),
        "zookeeper.digest.file": str(cluster.directory / secret_file.DIGEST_FILE_NAME),
    }
    overrides = [text for pair in settings.items() for text in ("--override", "=".join(pair))]
    with (large_disk / "log").open("wb") as log:
        broker = subprocess.Popen([sys.executable, "-P", "-m", "minibroker.broker", *overrides], stderr=log, stdout=log)
    try:
        until_true(lambda: 4 in cluster.view().brokers, 30)
        asyncio.run(spread_over(bootstrap, 4))
        assert asyncio.run(leaders_after(bootstrap, range(10))) == [4, 4]
        fill(small_disk)
        assert sorted(asyncio.run(leaders_after(bootstrap, range(10, 30))), key=str) == [1, 4]
        [offline] = status_of_view(cluster.view(), asyncio.run(ask_offline_log_dirs(cluster.view()))).problems()[:1]
        assert f"broker 4 has taken its log directory {small_disk / 'data'} offline" in offline
        assert f"No space left on device): free space in {small_disk / 'data'}, or move replicas away" in offline
        assert asyncio.run(values_read(bootstrap, 30)) == {0: list(range(30)), 1: list(range(30))}
        assert broker.poll() is None
        broker.terminate()
        assert broker.wait(60) == 0
        marked = [path.parent.parent for path in (large_disk, small_disk) for path in path.glob("data/.kafka_cleansh*")]
        assert marked == [large_disk]
    finally:
        broker.kill()
        broker.wait()
        cluster.down(kill=True)
