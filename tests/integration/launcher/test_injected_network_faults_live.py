"""Networks that brokers break by themselves, on real processes and as an ordinary user."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import minibroker
from minibroker import sync
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.looking import view_and_status
from minibroker.deploy.observing.status import BrokerStatus, Status
from minibroker.deploy.observing.status_screen import MANY_LOSSES, status_lines
from minibroker.deploy.testing import isolation
from minibroker.protocol.model import TopicPartition
from minibroker.testing import SyncLocalCluster
from tests.testing_support import left_behind
from tests.waiting import until_true

pytestmark = pytest.mark.slow

ORDERS = TopicPartition("orders", 0)
SETTINGS = {"replica.lag.time.max.ms": "5000", "zookeeper.session.timeout.ms": "5000"}
TOPIC = minibroker.NewTopic("orders", configs={"min.insync.replicas": "2"})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncLocalCluster]:
    """A cluster that each test leaves as `restore` does. It finds no root."""
    directory = tmp_path_factory.mktemp("clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        patch.setattr(isolation, "_what_is_missing", lambda: "there is no program iptables on the PATH")
        with SyncLocalCluster(3, topics=[TOPIC], settings=SETTINGS) as made:
            yield made
    assert left_behind(directory) == []


@pytest.fixture(autouse=True)
def restored(cluster: SyncLocalCluster) -> Iterator[None]:
    yield
    cluster.restore(120)


def in_sync(cluster: SyncLocalCluster) -> set[int]:
    return set(FaultyCluster(cluster.directory).view().partitions[ORDERS].isr_nodes)


def one(found: list[minibroker.testing.Member]) -> int:
    [member] = found
    assert isinstance(member, int)
    return member


def leader_and_follower(cluster: SyncLocalCluster) -> tuple[int, int]:
    """Return the leader, and a follower that is not the controller: the controller's orders go on."""
    leader = one(cluster.find("leader:orders-0"))
    return leader, max({1, 2, 3} - {leader, one(cluster.find("controller"))})


def status_elsewhere(cluster: SyncLocalCluster) -> Status:
    """The status to somebody who knows nothing of the faults."""
    return view_and_status(cluster.bootstrap_servers, cluster.directory)[1]


def test_status_names_the_follower_in_the_isr_for_which_writes_wait(cluster: SyncLocalCluster) -> None:
    leader, follower = leader_and_follower(cluster)
    until_true(lambda: in_sync(cluster) == {1, 2, 3})
    files = FaultyCluster(cluster.directory)
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        assert files.status(asks_stalls=True).stalled_partitions == {}
        cluster.cut(leader, follower)
        sent = producer.send("orders", b"after")
        until_true(lambda: files.status(asks_stalls=True).stalled_partitions == {"orders-0": [follower]})
        cluster.heal()
        sent.result()
    assert files.status(asks_stalls=True).stalled_partitions == {}


@pytest.mark.parametrize("way", ["both", "to the follower", "to the leader"])
def test_a_follower_that_is_cut_from_its_leader_leaves_the_isr_until_it_is_healed(
    cluster: SyncLocalCluster, way: str
) -> None:
    leader, follower = leader_and_follower(cluster)
    ends = (follower, leader) if way == "to the leader" else (leader, follower)
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        assert cluster.cut(*ends, one_way=way != "both") == list(ends)
        assert len(FaultyCluster(cluster.directory).status().faults) == 2
        without_it = producer.send("orders", b"without it")
        until_true(lambda: in_sync(cluster) == {1, 2, 3} - {follower})
        without_it.result()
        assert cluster.find("leader:orders-0") == [leader]
        cluster.heal()
        until_true(lambda: in_sync(cluster) == {1, 2, 3})


def test_a_controller_that_is_cut_from_zookeeper_is_followed_by_another(cluster: SyncLocalCluster) -> None:
    controller = one(cluster.find("controller"))
    cluster.cut("controller", "zookeeper")
    files = FaultyCluster(cluster.directory)
    until_true(lambda: controller in status_elsewhere(cluster).cut_from_zookeeper)
    until_true(lambda: files.view().controller_id not in (None, controller))
    [problem] = [text for text in status_elsewhere(cluster).problems() if text.startswith(f"broker {controller} ")]
    assert "runs but is not in the cluster, since it has had no connection to ZooKeeper for " in problem
    cluster.heal()
    cluster.wait_healthy(120)


def test_a_connection_to_zookeeper_that_comes_and_goes_is_mentioned(cluster: SyncLocalCluster) -> None:
    files = FaultyCluster(cluster.directory)

    def of_broker() -> BrokerStatus:
        [found] = [broker for broker in files.status().brokers if broker.id == 2]
        return found

    for number in range(1, MANY_LOSSES + 1):
        cluster.cut(2, "zookeeper")
        until_true(lambda: of_broker().zookeeper_away_s is not None)
        cluster.heal()
        until_true(lambda: of_broker().zookeeper_losses >= number)  # noqa: B023 - it is called at once
    [line] = [line for line in status_lines(files.status()) if "lost touch" in line]
    assert line.startswith("broker 2 lost touch with ZooKeeper ")
    cluster.wait_healthy(120)


def test_a_leader_is_isolated_without_root(cluster: SyncLocalCluster) -> None:
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        leader = one(cluster.isolate("leader:orders-0"))
        producer.send("orders", b"elsewhere").result()
        assert cluster.find("leader:orders-0") != [leader]
        assert f"isolate leader:orders-0 (broker {leader})" in cluster.evidence()
        cluster.heal()
        until_true(lambda: in_sync(cluster) == {1, 2, 3})


def test_dropped_connections_are_made_anew_and_nothing_is_lost(cluster: SyncLocalCluster) -> None:
    _, dropped = leader_and_follower(cluster)
    controller = one(cluster.find("controller"))
    begin = len(cluster.log_of(controller).read_text())
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        cluster.drop_connections(dropped)
        until_true(
            lambda: f"the connection to broker {dropped} was lost" in cluster.log_of(controller).read_text()[begin:]
        )
        cluster.drop_connections("all")
        producer.send("orders", b"after").result()
    assert FaultyCluster(cluster.directory).status().faults == {}


def test_an_acknowledgement_takes_as_long_as_the_slow_way_to_a_follower(cluster: SyncLocalCluster) -> None:
    leader, follower = leader_and_follower(cluster)
    until_true(lambda: in_sync(cluster) == {1, 2, 3})
    with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"before").result()
        cluster.slow_network(leader, 0.4, between=follower)
        began_s = time.monotonic()
        producer.send("orders", b"late").result()
        assert time.monotonic() - began_s >= 0.4
        cluster.heal()
        cluster.slow_network(leader, 0.3)
        began_s = time.monotonic()
        producer.send("orders", b"late").result()
        assert time.monotonic() - began_s >= 0.3


def test_brokers_are_cut_apart_where_they_speak_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SyncLocalCluster(3, topics=[TOPIC], settings=SETTINGS, tls=True) as cluster:
        leader, follower = leader_and_follower(cluster)
        cluster.cut(leader, follower)
        with sync.Producer(cluster.bootstrap_servers, delivery_timeout_ms=120_000) as producer:
            producer.send("orders", b"without it").result()
        until_true(lambda: in_sync(cluster) == {1, 2, 3} - {follower})
        cluster.heal()
        until_true(lambda: in_sync(cluster) == {1, 2, 3})
