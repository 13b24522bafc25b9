"""The member that WHO names; if there is none, a LaunchError with the remedy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import cluster_file, local_cluster
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import parse_who
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.protocol.messages import MetadataPartition
from minibroker.protocol.model import (
    NO_LEADER,
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    TopicPartition,
    internal_partition,
)

NOBODY_ANSWERS = ClusterView({}, None, None, {})
NO_CONTROLLER = NOBODY_ANSWERS._replace(brokers={1: ("127.0.0.1", 9092)})
OFFSETS = [TopicPartition(OFFSETS_TOPIC, number) for number in range(50)]


def partition(number: int, leader: int) -> MetadataPartition:
    return MetadataPartition(0, number, leader, 1, [1, 2], [1, 2], [])


def led(leader: int, billing: int) -> ClusterView:
    """Return a view in which `leader` leads all partitions of the offsets topic except for the group `billing`'s."""
    states = {name: partition(name.partition, leader) for name in OFFSETS}
    of_billing = OFFSETS[internal_partition("billing", len(OFFSETS))]
    states[of_billing] = partition(of_billing.partition, billing)
    return NO_CONTROLLER._replace(partitions=states)


def of_topics(*topics: str, count: int = 1) -> ClusterView:
    names = [TopicPartition(topic, number) for topic in topics for number in range(count)]
    return NO_CONTROLLER._replace(partitions={name: partition(name.partition, 1) for name in [*names, *OFFSETS]})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    """A cluster of which no process runs."""
    monkeypatch.setattr(local_cluster, "ELECTION_TIMEOUT_S", 0.0)
    brokers = tuple(BrokerEntry(id, 9091 + id) for id in (1, 2))
    cluster_file.save(tmp_path, ClusterFile(ZooKeeperEntry("127.0.0.1:2181"), brokers))
    return LocalCluster(tmp_path)


@pytest.mark.parametrize(
    ("who", "view", "told"),
    [
        ("controller", NO_CONTROLLER, "no broker knows a controller"),
        ("leader:orders-0", NOBODY_ANSWERS, "no broker answers, so the leader of orders-0 is unknown"),
        ("leader:orders-0", NO_CONTROLLER, "no broker knows a partition orders-0"),
        ("follower:orders-0", NOBODY_ANSWERS, "no broker answers, so a follower of orders-0 is unknown"),
        ("follower:orders-0", NO_CONTROLLER, "no broker knows a partition orders-0"),
        ("leader:orders-0", NO_CONTROLLER, "so nothing was done: there is no topic yet; see `minibroker topics list`"),
        ("leader:orders-0", of_topics("b", "a"), "so nothing was done: the topics are a, b; see"),
        ("leader:orders-0", of_topics(*map(str, range(12))), "the topics are 0, 1, 10, 11, .*, 7 and 2 more; see"),
        ("leader:a-7", of_topics("a", count=3), "partition a-7, so nothing was done: a has the partitions 0 to 2; see"),
        ("leader:a-7", of_topics("a-7"), "a-7 is a topic, so add the number of a partition, as in a-7-0; see"),
        ("follower:a-7", of_topics("a"), "so nothing was done: a has the partition 0; see"),
        ("coordinator:billing", NOBODY_ANSWERS, "no broker answers, so the coordinator of the group 'bill"),
        (
            "coordinator:billing",
            NO_CONTROLLER,
            "there is no topic __consumer_offsets yet, so there is no coordinator of 'billing'",
        ),
        (
            "transactions:shop-1",
            led(1, 2),
            "no producer has used a transactional id yet, so there is no coordinator of 'shop-1'",
        ),
        ("coordinator:billing", led(1, NO_LEADER), "has no leader now: start the brokers of its ISR .1, 2."),
        ("coordinator:billing", led(1, 7), "there is no broker 7 in this cluster: its ids are 1, 2"),
    ],
)
def test_if_who_names_no_member_a_launch_error_says_why(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, who: str, view: ClusterView, told: str
) -> None:
    monkeypatch.setattr(cluster, "view", lambda: view)
    with pytest.raises(LaunchError, match=told) as raised:
        cluster.resolve(parse_who(who))
    assert raised.type is LaunchError  # its name stands in tracebacks


def test_the_coordinator_of_a_group_is_the_leader_of_its_partition_of_the_offsets(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "view", lambda: led(1, 2))
    assert cluster.resolve(parse_who("coordinator:billing")) == [2]
    assert cluster.resolve(parse_who("coordinator:shipping")) == [1]


def test_a_follower_is_the_first_replica_in_sync_that_does_not_lead(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = TopicPartition("orders", 0)

    def seen(leader: int, isr: list[int]) -> ClusterView:
        return NO_CONTROLLER._replace(partitions={orders: MetadataPartition(0, 0, leader, 1, [1, 2], isr, [])})

    for leader, isr, follower in ((1, [1, 2], 2), (2, [2, 1], 1), (NO_LEADER, [2], 2)):
        monkeypatch.setattr(cluster, "view", partial(seen, leader, isr))
        assert cluster.resolve(parse_who("follower:orders-0")) == [follower]
    monkeypatch.setattr(cluster, "view", partial(seen, 1, [1]))
    with pytest.raises(LaunchError, match="orders-0 has no follower in sync now: see `minibroker status`"):
        cluster.resolve(parse_who("follower:orders-0"))


TRANSACTIONS = TopicPartition(TRANSACTIONS_TOPIC, 0)


@pytest.mark.parametrize("action", ["kill", "stop", "pause", "resume", "resolve"])
@pytest.mark.parametrize(
    ("who", "names", "told"),
    [
        (
            "coordinator:nope",
            ["billing", "shop"],
            "there is no group 'nope', so nothing was done: give one of 'billing', ",
        ),
        ("coordinator:nope", [], "there is no group at all yet"),
        (
            "transactions:nope",
            [f"shop-{number}" for number in range(12)],
            "no transactional id 'nope'.*'shop-9' and 2 more",
        ),
        ("transactions:nope", [], "there is no transactional id at all yet"),
    ],
)
def test_a_group_or_id_that_does_not_exist_is_refused_and_nothing_is_signalled(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, action: str, who: str, names: list[str], told: str
) -> None:
    _runs(cluster, monkeypatch, exists=False, names=names)
    with pytest.raises(LaunchError, match=told):
        getattr(cluster, action)(parse_who(who))


@pytest.mark.parametrize("who", ["coordinator:billing", "transactions:shop-1"])
@pytest.mark.parametrize(
    ("state", "why"), [(ProcessState.PAUSED, "it is paused"), (ProcessState.RUNNING, "not answer")]
)
def test_a_coordinator_that_cannot_say_is_not_killed_but_can_be_found(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, who: str, state: ProcessState, why: str
) -> None:
    _runs(cluster, monkeypatch, exists=None, names=[], state=state)
    with pytest.raises(LaunchError, match=f"known to broker 1 alone, and .*{why}.*give the broker's id, 1"):
        cluster.kill(parse_who(who))
    assert cluster.resolve(parse_who(who)) == [1]


def _runs(
    cluster: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
    *,
    exists: bool | None,
    names: list[str],
    state: ProcessState = ProcessState.RUNNING,
) -> None:
    """Let broker 1 run, lead all internal partitions, and know these names; a signal fails the test."""

    async def has(*_: object) -> bool | None:
        return exists

    async def ask(_: ClusterView) -> list[str]:
        return names

    def signalled(*_: object) -> bool:
        raise AssertionError("a process was signalled")

    view = led(1, 1)
    partitions = {**view.partitions, TRANSACTIONS: partition(0, 1)}
    monkeypatch.setattr(cluster, "view", lambda: view._replace(partitions=partitions))
    monkeypatch.setattr(cluster, "state_of", lambda _: state)
    monkeypatch.setattr(local_cluster, "send_signal", signalled)
    for name in ("has_group", "has_transactional_id"):
        monkeypatch.setattr(local_cluster, name, has)
    for name in ("ask_groups", "ask_transactional_ids"):
        monkeypatch.setattr(local_cluster, name, ask)


@pytest.mark.parametrize("who", ["controller", "leader:orders-0", "coordinator:billing"])
def test_an_elected_member_cannot_be_started(cluster: LocalCluster, who: str) -> None:
    with pytest.raises(LaunchError, match="is running already: give `start` a broker id, all or zookeeper"):
        cluster.start(parse_who(who))
