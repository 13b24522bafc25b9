"""If the cluster file cannot be written, the error names it, and no unrecorded process remains."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import cluster_file
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import BrokerId


def test_a_cluster_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.json.tmp").mkdir()
    with pytest.raises(LaunchError, match=f"{tmp_path}/cluster.json cannot be written: Is a directory"):
        cluster_file.save(tmp_path, ClusterFile(ZooKeeperEntry("127.0.0.1:2181"), (BrokerEntry(1, 9092),)))


@pytest.mark.slow
def test_a_process_that_cannot_be_recorded_is_ended(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(1)
    cluster.stop(BrokerId(1))
    (cluster.directory / "cluster.json.tmp").mkdir()
    with pytest.raises(LaunchError, match="cannot be written"):
        cluster.start(BrokerId(1))
    (cluster.directory / "cluster.json.tmp").rmdir()
    data = str(cluster.directory / "broker-1")
    commands = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
    assert data not in commands
    assert cluster.start(BrokerId(1)) == [1]
