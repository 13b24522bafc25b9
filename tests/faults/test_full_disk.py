"""A cluster whose disk is full: its processes are found, ended and started, and the directory is named.

Mounts disks of its own, so it is not among the tests that need no root: `make full-disk`.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.deploy import cluster_file
from minibroker.deploy.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local_cluster import LocalCluster
from minibroker.deploy.ports import free_ports
from minibroker.deploy.processes import is_alive
from minibroker.deploy.who import BrokerId, ZooKeeperServer


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


def test_a_cluster_on_a_full_disk_is_told_of_ended_and_comes_up_again(small_disk: Path) -> None:
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


def test_the_cluster_file_is_written_where_there_is_no_room_for_another(small_disk: Path) -> None:
    shorter = ClusterFile(ZooKeeperEntry("127.0.0.1:2181"), (BrokerEntry(1, 9092),))
    longer = ClusterFile(ZooKeeperEntry("127.0.0.1:2181"), (BrokerEntry(1, 9092), BrokerEntry(2, 9093)), running=True)
    cluster_file.save(small_disk, shorter)
    fill(small_disk)
    for cluster in (longer, shorter):
        cluster_file.save(small_disk, cluster)
        found = cluster_file.load(small_disk)
        assert found is not None
        assert (found.brokers, found.running) == (cluster.brokers, cluster.running)
