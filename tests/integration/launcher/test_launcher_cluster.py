"""A local cluster is started, inspected, broken and repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.plan import Options
from minibroker.deploy.local.processes import ProcessState, wait_until
from minibroker.deploy.local.who import AllBrokers, BrokerId, Controller, ZooKeeperServer
from minibroker.protocol.apis import FETCH
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.messages import FetchRequest
from minibroker.protocol.model import OFFSETS_TOPIC
from minibroker.protocol.world.real import RealNetwork

SETTLE_S = 30.0


def is_healthy(cluster: LocalCluster) -> bool:
    return not cluster.status().problems()


@pytest.mark.slow
def test_a_cluster_comes_up_healthy_and_goes_down_cleanly(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(3)
    replicas = [state.replica_nodes for name, state in cluster.view().partitions.items() if name.topic == OFFSETS_TOPIC]
    assert {len(nodes) for nodes in replicas} == {3}, "a broker may die before the first group is used"
    assert wait_until(lambda: is_healthy(cluster), SETTLE_S), cluster.status()
    status = cluster.status()
    assert [broker.id for broker in status.brokers] == [1, 2, 3]
    assert status.controller.id in (1, 2, 3)
    assert status.controller.epoch == 1
    assert sorted(map(str, cluster.down())) == ["1", "2", "3", "zookeeper"]
    assert cluster.state_of(1) is ProcessState.GONE
    assert cluster.state_of("zookeeper") is ProcessState.GONE
    assert not cluster.file().running


@pytest.mark.slow
def test_the_brokers_share_a_secret_and_reject_requests_without_it(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = local_cluster(1)
    secret = cluster.directory / "broker.secret"
    before = secret.read_text()
    assert secret.stat().st_mode & 0o777 == 0o600
    assert "broker.secret.file is set" not in cluster.log_of(1).read_text()

    async def fetch_as_replica() -> None:
        port = cluster.file().brokers[0].port
        connection = await open_connection(RealNetwork(), "127.0.0.1", port, client_id="test", timeout_s=5)
        try:
            await connection.request(FETCH, FetchRequest(2, 0, 0, 1, 0, []), timeout_s=5)
        finally:
            connection.close()

    with pytest.raises(BrokerError, match="CLUSTER_AUTHORIZATION_FAILED"):
        asyncio.run(fetch_as_replica())
    cluster.down()
    LocalCluster(cluster.directory).up()
    assert secret.read_text() == before
    cluster.down()
    cluster.delete_data()
    assert not secret.exists()


@pytest.mark.slow
def test_a_directory_in_use_is_refused_and_comes_up_again_after_down(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = local_cluster(1)
    first = cluster.file()
    with pytest.raises(LaunchError, match=r"in use by a running cluster \(broker 1, ZooKeeper\)"):
        LocalCluster(cluster.directory).up()
    cluster.down()
    again = LocalCluster(cluster.directory).up()
    assert [entry.port for entry in again.brokers] == [entry.port for entry in first.brokers]
    assert [entry.metrics_port for entry in again.brokers] == [entry.metrics_port for entry in first.brokers]
    assert wait_until(lambda: is_healthy(cluster), SETTLE_S), cluster.status()


@pytest.mark.slow
def test_log_directories_can_be_added_at_an_up_but_not_removed(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(1)
    cluster.down()
    again = LocalCluster(cluster.directory)
    again.up(log_dirs=2)
    both = [str(cluster.directory / name) for name in ("broker-1", "broker-1-disk-2")]

    async def log_dirs() -> list[tuple[str, str | None]]:
        async with Admin(again.bootstrap()) as admin:
            return [(found.log_dir, found.error) for found in (await admin.describe_log_dirs())[1]]

    assert asyncio.run(log_dirs()) == [(path, None) for path in both]
    assert again.running(Options(log_dirs=2)) is not None
    with pytest.raises(LaunchError, match="not with --log-dirs .*log directories: 2 each"):
        again.running(Options(log_dirs=3))
    again.down()
    with pytest.raises(LaunchError, match="--log-dirs 1: each broker has replicas in 2 log directories"):
        again.up(log_dirs=1)
    again.up()
    assert again.file().log_dirs == 2


@pytest.mark.slow
def test_a_killed_controller_is_replaced_and_rejoins_after_a_start(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(3)
    assert wait_until(lambda: is_healthy(cluster), SETTLE_S), cluster.status()
    (killed,) = cluster.kill(Controller())
    assert isinstance(killed, int)
    assert cluster.state_of(killed) is ProcessState.GONE
    assert wait_until(lambda: cluster.status().controller.id not in (killed, None), SETTLE_S)
    assert cluster.status().problems()[0] == f"broker {killed} is not running: `minibroker start {killed}`"
    with pytest.raises(LaunchError, match=f"broker {killed} is not running"):
        cluster.kill(BrokerId(killed))
    assert cluster.start(BrokerId(killed)) == [killed]
    assert wait_until(lambda: is_healthy(cluster), SETTLE_S), cluster.status()
    with pytest.raises(LaunchError, match="is running already"):
        cluster.start(BrokerId(killed))


def test_a_paused_broker_does_nothing_until_it_is_resumed(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(1)
    assert cluster.pause(BrokerId(1)) == [1]
    assert cluster.state_of(1) is ProcessState.PAUSED
    with pytest.raises(LaunchError, match="is paused: `minibroker resume 1` first"):
        cluster.stop(BrokerId(1))
    with pytest.raises(LaunchError, match="broker 1 is paused: `minibroker resume 1`"):
        cluster.start(BrokerId(1))
    assert cluster.resume(AllBrokers()) == [1]
    assert cluster.state_of(1) is ProcessState.RUNNING
    with pytest.raises(LaunchError, match="nothing to resume"):
        cluster.resume(BrokerId(1))
    assert cluster.resume(AllBrokers()) == []
    assert cluster.stop(BrokerId(1)) == [1]
    assert cluster.state_of(1) is ProcessState.GONE


@pytest.mark.slow
def test_brokers_need_zookeeper_to_start_and_keep_the_log_level_of_the_up(
    local_cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIBROKER_LOG_LEVEL", "debug")
    cluster = local_cluster(1)
    assert " DEBUG " in cluster.log_of(1).read_text()
    monkeypatch.delenv("MINIBROKER_LOG_LEVEL")
    assert cluster.kill(ZooKeeperServer()) == ["zookeeper"]
    assert cluster.kill(AllBrokers()) == [1]
    with pytest.raises(LaunchError, match="minibroker start zookeeper"):
        cluster.start(AllBrokers())
    assert cluster.start(ZooKeeperServer()) == ["zookeeper"]
    cluster.log_of(1).write_text("")
    assert cluster.start(AllBrokers()) == [1]
    assert wait_until(lambda: is_healthy(cluster), SETTLE_S), cluster.status()
    assert " DEBUG " in cluster.log_of(1).read_text()


def test_a_cluster_does_not_stop_an_external_zookeeper(
    local_cluster: Callable[..., LocalCluster], zookeeper: str
) -> None:
    cluster = local_cluster(1, zookeeper=zookeeper)
    assert cluster.file().zookeeper.connect == zookeeper
    with pytest.raises(LaunchError, match="was not started here"):
        cluster.kill(ZooKeeperServer())
    assert cluster.down() == [1]
