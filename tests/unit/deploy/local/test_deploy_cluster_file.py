from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import cluster_file
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.processes import Process

CLUSTER = ClusterFile(
    zookeeper=ZooKeeperEntry("127.0.0.1:2181", 2181, Process(1, "b")),
    brokers=(BrokerEntry(1, 9092, Process(2, "b")), BrokerEntry(2, 9093)),
    settings={"replica.lag.time.max.ms": "5000"},
    running=True,
)


def test_what_is_saved_is_loaded_with_the_bootstrap_list(tmp_path: Path) -> None:
    cluster_file.save(tmp_path, CLUSTER)
    loaded = cluster_file.load(tmp_path)
    assert loaded == msgspec.structs.replace(CLUSTER, bootstrap="127.0.0.1:9092,127.0.0.1:9093")


def test_where_there_was_no_cluster_nothing_is_loaded(tmp_path: Path) -> None:
    assert cluster_file.load(tmp_path) is None
    assert cluster_file.load(tmp_path / "missing") is None


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    held: list[int] = []

    def hold() -> None:
        with cluster_file.locked(tmp_path):
            held.append(len(held) + 1)

    with ThreadPoolExecutor(1) as threads:
        with cluster_file.locked(tmp_path):  # and its file is removed at the end
            waiting = threads.submit(hold)
            assert held == []
        waiting.result(timeout=10)
    assert held == [1]
    assert list(tmp_path.iterdir()) == []
    cluster_file.save(tmp_path, CLUSTER)
    hold()
    assert (tmp_path / cluster_file.LOCK_NAME).exists()


def test_a_damaged_file_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / cluster_file.FILE_NAME).write_text('{"zookeeper": 3')
    with pytest.raises(LaunchError, match=r"is damaged .* remove it"):
        cluster_file.load(tmp_path)


def test_an_unknown_broker_is_an_error_that_lists_the_known_ones() -> None:
    assert CLUSTER.broker(2).port == 9093
    with pytest.raises(LaunchError, match="no broker 7 in this cluster: its ids are 1, 2"):
        CLUSTER.broker(7)


def test_processes_are_those_that_were_started() -> None:
    assert CLUSTER.processes() == [Process(1, "b"), Process(2, "b")]
