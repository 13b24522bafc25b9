from __future__ import annotations

import pytest

from minibroker.deploy.local.who import (
    AllBrokers,
    BrokerId,
    Controller,
    CoordinatorOf,
    FollowerOf,
    LeaderOf,
    MalformedWho,
    TransactionsOf,
    Who,
    ZooKeeperServer,
    parse_who,
)
from minibroker.protocol.model import TopicPartition


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("3", BrokerId(3)),
        ("controller", Controller()),
        ("all", AllBrokers()),
        ("zookeeper", ZooKeeperServer()),
        ("leader:orders-0", LeaderOf(TopicPartition("orders", 0))),
        ("follower:orders-0", FollowerOf(TopicPartition("orders", 0))),
        ("leader:orders-by-day-12", LeaderOf(TopicPartition("orders-by-day", 12))),
        ("coordinator:billing", CoordinatorOf("billing")),
        ("transactions:shop-1", TransactionsOf("shop-1")),
        ("coordinator:any name: ünlike a topic's/1", CoordinatorOf("any name: ünlike a topic's/1")),
    ],
)
def test_who_can_be_named_in_eight_ways(text: str, who: Who) -> None:
    assert parse_who(text) == who
    assert type(parse_who(text)) is type(who)


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "٣", "99999999999", "Controller", "broker-1", "leader", "coordinator"]
)
def test_a_name_of_no_process_is_refused_with_the_expected_forms(text: str) -> None:
    with pytest.raises(
        MalformedWho,
        match="controller, leader:TOPIC-PARTITION, follower:TOPIC-PARTITION, coordinator:GROUP, transactions:ID, all",
    ):
        parse_who(text)


@pytest.mark.parametrize(
    "text", ["leader:", "leader:orders", "leader:orders-", "leader:-1", "leader:a/b-1", "leader:/-x"]
)
def test_a_leader_or_follower_needs_a_topic_and_a_partition(text: str) -> None:
    with pytest.raises(MalformedWho, match="leader:orders-0"):
        parse_who(text)
    with pytest.raises(MalformedWho, match="follower:orders-0"):
        parse_who(text.replace("leader", "follower"))


@pytest.mark.parametrize("text", ["coordinator:", "coordinator:\udcff"])
def test_a_coordinator_needs_a_group_with_a_name_that_brokers_can_be_sent(text: str) -> None:
    with pytest.raises(MalformedWho, match="coordinator:billing"):
        parse_who(text)
    with pytest.raises(MalformedWho, match="transactions:shop-1"):
        parse_who(text.replace("coordinator", "transactions"))


def test_pytest_leaves_out_the_frames_of_minibroker() -> None:
    with pytest.raises(MalformedWho) as caught:
        parse_who("leader:orders")
    assert [str(each.path) for each in caught.traceback if not each.ishidden(caught)] == [__file__]


def test_a_leader_of_a_topic_alone_is_told_how_to_add_the_partition() -> None:
    """As in `cluster.kill(f"leader:{topic}")`."""
    with pytest.raises(MalformedWho, match="'leader:by-day' lacks the number of a partition: .*here leader:by-day-0 "):
        parse_who("leader:by-day")
