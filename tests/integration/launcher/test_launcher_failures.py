"""Failures of `up`, which must leave nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import cluster_file
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports, is_free


def test_all_ports_in_use_are_named_before_any_process_starts(tmp_path: Path) -> None:
    ports = free_ports(3)
    cluster = LocalCluster(tmp_path)
    with socket.create_server(("127.0.0.1", ports[1])):
        with pytest.raises(LaunchError) as caught:
            cluster.up(3, ports[0])
        assert f"port {ports[1]} (broker 2) is in use" in str(caught.value)
        with socket.create_server(("127.0.0.1", ports[2])), pytest.raises(LaunchError) as caught:
            cluster.up(3, ports[0])
    assert f"ports {ports[1]} (broker 2), {ports[2]} (broker 3) are in use" in str(caught.value)
    assert "--base-port" in str(caught.value)
    assert cluster.file_or_none() is None


@pytest.mark.parametrize("place", [".", "new", "new/one"])
def test_a_refused_up_leaves_no_file_where_there_was_no_cluster(place: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="is in use"):
        LocalCluster(tmp_path / place).up(1, taken.getsockname()[1])
    assert list(tmp_path.iterdir()) == []


def test_a_zookeeper_that_does_not_answer_is_reported_before_any_process_starts(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    port = free_ports(1)[0]
    with pytest.raises(LaunchError, match=f"no ZooKeeper answers at 127.0.0.1:{port}"):
        cluster.up(1, free_ports(1)[0], f"127.0.0.1:{port}")
    assert cluster.file_or_none() is None


def test_up_refuses_to_leave_out_a_broker_with_replicas(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    (tmp_path / "broker-2" / "orders-0").mkdir(parents=True)
    (tmp_path / "broker-4-disk-2" / "orders-1").mkdir(parents=True)
    refused = (
        f"--brokers 1 would leave out broker 2, broker 4, with replicas in {tmp_path}: "
        "leave out --brokers, give 4 or more, or use another --data"
    )
    with pytest.raises(LaunchError, match=refused):
        cluster.up(1, free_ports(1)[0])
    assert cluster.file_or_none() is None


def test_up_may_leave_out_a_broker_whose_replicas_are_gone(tmp_path: Path) -> None:
    (tmp_path / "broker-2" / f"orders-0.{'0' * 32}-delete").mkdir(parents=True)
    (tmp_path / "broker-2" / "meta.properties").touch()
    port = free_ports(1)[0]
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(LaunchError, match=rf"port {port} \(broker 1\) is in use"),
    ):
        LocalCluster(tmp_path).up(1, port)


def test_an_up_without_a_number_includes_every_broker_with_replicas(tmp_path: Path) -> None:
    (tmp_path / "broker-4" / "orders-0").mkdir(parents=True)
    before = ClusterFile(ZooKeeperEntry("127.0.0.1:1", 1), (BrokerEntry(1, 1), BrokerEntry(2, 2)))
    port = free_ports(4)[0]
    for known in (None, before):  # a lost cluster file, and one without the last broker
        if known is not None:
            cluster_file.save(tmp_path, known)
        with (
            socket.create_server(("127.0.0.1", port + 3)),
            pytest.raises(LaunchError, match=rf"port {port + 3} \(broker 4\) is in use"),
        ):
            LocalCluster(tmp_path).up(base_port=port)


def test_a_data_directory_that_is_a_file_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(LaunchError, match="cannot be created"):
        LocalCluster(path).up(1, free_ports(1)[0])


def test_if_a_broker_does_not_start_the_error_has_its_reason_and_all_are_stopped(
    local_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=r"broker \d did not start: .*num\.partitions"):
        local_cluster(2, settings={"num.partitions": "many"})
    left = LocalCluster(tmp_path / "cluster-1").file()
    assert not left.running
    assert all(is_free(entry.port) for entry in left.brokers)
    assert left.zookeeper.port is not None
    assert is_free(left.zookeeper.port)


def test_commands_without_a_cluster_name_the_command_that_creates_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="minibroker up"):
        LocalCluster(tmp_path).down()
