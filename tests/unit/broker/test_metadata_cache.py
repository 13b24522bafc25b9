from __future__ import annotations

from typing import Any

import pytest

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    MetadataResponse,
    UpdateMetadataBroker,
    UpdateMetadataEndpoint,
    UpdateMetadataPartition,
    UpdateMetadataRequest,
    UpdateMetadataTopic,
)
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, NO_LEADER, TopicPartition

EPOCHS = {1: 11, 2: 12, 3: 13}


def described(cache: MetadataCache, *arguments: Any, **named: Any) -> MetadataResponse:
    return finish_at_once(cache.describe(*arguments, **named))


def partition(
    index: int = 0, leader: int = 1, epoch: int = 0, isr: tuple[int, ...] = (1, 2, 3), offline: tuple[int, ...] = ()
) -> UpdateMetadataPartition:
    return UpdateMetadataPartition(index, 1, leader, epoch, list(isr), epoch, [1, 2, 3], list(offline))


def topic(
    *partitions: UpdateMetadataPartition, name: str = "orders", topic_id: str = "id", deleted: bool = False, of: int = 0
) -> UpdateMetadataTopic:
    return UpdateMetadataTopic(name, topic_id, list(partitions), deleted, num_partitions=of)


def update(
    cache: MetadataCache,
    *topics: UpdateMetadataTopic,
    live: tuple[int, ...] = (1, 2, 3),
    broker_epoch: int = 1,
    names_the_last: bool = False,
) -> list[str]:
    brokers = [
        UpdateMetadataBroker(
            b,
            [
                UpdateMetadataEndpoint(9000 + b, f"broker-{b}", DEFAULT_LISTENER),
                UpdateMetadataEndpoint(9500 + b, f"broker-{b}", CONTROL_LISTENER),
            ],
            f"rack-{b}",
            EPOCHS[b],
        )
        for b in live
    ]
    return cache.update(UpdateMetadataRequest(7, 1, broker_epoch, list(topics), brokers, names_the_last=names_the_last))


def test_nothing_is_known_before_the_first_update() -> None:
    cache = MetadataCache()
    answer = described(cache, None)
    assert (answer.brokers, answer.topics, answer.controller_id) == ([], [], -1)
    assert cache.alive_epoch(1) is None
    assert not cache.has_leaders("orders", 1)


def test_an_update_is_answered_from() -> None:
    cache = MetadataCache()
    cache.cluster_id = "cluster"
    assert update(cache, topic(partition(1, leader=2, epoch=4), partition(0))) == ["orders"]
    answer = described(cache, ["orders"])
    assert [(b.node_id, b.host, b.port, b.rack) for b in answer.brokers] == [
        (b, f"broker-{b}", 9000 + b, f"rack-{b}") for b in (1, 2, 3)
    ]
    assert (answer.cluster_id, answer.controller_id, answer.controller_epoch) == ("cluster", 7, 1)
    [found] = answer.topics
    assert (found.error_code, found.name, found.topic_id) == (ErrorCode.NONE, "orders", "id")
    assert [(p.partition_index, p.leader_id, p.leader_epoch, p.error_code) for p in found.partitions] == [
        (0, 1, 0, ErrorCode.NONE),
        (1, 2, 4, ErrorCode.NONE),
    ]
    assert cache.alive_epoch(2) == 12
    assert cache.topic_id("orders") == "id"


def test_a_topic_whose_partitions_come_in_several_requests_is_shown_once_all_are_here() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(0), partition(1), of=3))
    [found] = described(cache, ["orders"]).topics
    assert (found.error_code, found.topic_id, found.partitions) == (ErrorCode.LEADER_NOT_AVAILABLE, "id", [])
    update(cache, topic(partition(2), of=3))
    [found] = described(cache, ["orders"]).topics
    assert (found.error_code, [p.partition_index for p in found.partitions]) == (ErrorCode.NONE, [0, 1, 2])


def test_a_topic_that_gets_partitions_is_shown_as_it_was_until_all_the_new_ones_are_here() -> None:
    cache = MetadataCache()

    def shown() -> list[int]:
        [found] = described(cache, ["orders"]).topics
        assert found.error_code == ErrorCode.NONE
        return [p.partition_index for p in found.partitions]

    update(cache, topic(partition(0), partition(1), of=2))
    update(cache, topic(partition(2), of=4))
    assert shown() == [0, 1]
    update(cache, topic(partition(3), of=4))
    assert shown() == [0, 1, 2, 3]


def test_brokers_are_replaced_and_topics_are_added_to() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(0)))
    update(cache, topic(partition(1)), topic(partition(), name="payments"), live=(2, 3))
    assert [b.node_id for b in described(cache, []).brokers] == [2, 3]
    assert [t.name for t in described(cache, None).topics] == ["orders", "payments"]
    assert cache.partition(TopicPartition("orders", 0)) is not None
    assert cache.alive_epoch(1) is None


def test_a_leader_that_is_not_alive_is_none() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(0, leader=1), partition(1, leader=NO_LEADER), partition(2, leader=2)), live=(2, 3))
    [found] = described(cache, ["orders"]).topics
    assert [(p.leader_id, p.error_code) for p in found.partitions] == [
        (NO_LEADER, ErrorCode.LEADER_NOT_AVAILABLE),
        (NO_LEADER, ErrorCode.LEADER_NOT_AVAILABLE),
        (2, ErrorCode.NONE),
    ]
    assert not cache.has_leaders("orders", 3)


def test_replicas_are_offline_on_dead_brokers_and_in_failed_log_directories() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(offline=(3,))), live=(2, 3))
    [found] = described(cache, ["orders"]).topics
    assert found.partitions[0].offline_replicas == [1, 3]


def test_has_leaders_wants_all_partitions() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(0)))
    assert cache.has_leaders("orders", 1)
    assert not cache.has_leaders("orders", 2)
    update(cache, topic(partition(1)))
    assert cache.has_leaders("orders", 2)


def test_a_deleted_topic_is_forgotten_and_a_new_one_of_its_name_begins_anew() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(0), partition(1)))
    assert update(cache, topic(deleted=True)) == ["orders"]
    assert cache.topic_id("orders") is None
    assert cache.partition(TopicPartition("orders", 0)) is None
    update(cache, topic(partition(0), partition(1)))
    update(cache, topic(partition(0), topic_id="another"))  # the deletion itself was missed
    assert [p.partition_index for p in described(cache, ["orders"]).topics[0].partitions] == [0]


def test_no_topic_is_denied_before_the_broker_was_told_of_all_of_them_in_its_present_epoch() -> None:
    cache = MetadataCache()

    def code() -> int:
        return described(cache, ["payments"]).topics[0].error_code

    assert code() == ErrorCode.LEADER_NOT_AVAILABLE
    update(cache, topic(partition()))
    assert code() == ErrorCode.LEADER_NOT_AVAILABLE
    update(cache, topic(partition(), name="users"), names_the_last=True)
    assert code() == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    update(cache)
    assert code() == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    update(cache, topic(partition()), broker_epoch=2)
    assert code() == ErrorCode.LEADER_NOT_AVAILABLE, "registered again, and gets all topics anew"


def test_a_question_for_all_topics_gets_no_answer_before_the_broker_was_told_of_all() -> None:
    cache = MetadataCache()
    update(cache, topic(partition()))
    assert described(cache, None).brokers == []
    assert len(described(cache, ["orders"]).brokers) == 3
    update(cache, names_the_last=True)
    assert len(described(cache, None).brokers) == 3


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unknown", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("..", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("a/b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("", ErrorCode.INVALID_TOPIC_EXCEPTION),
    ],
)
def test_a_topic_that_is_not_there_has_its_error(name: str, code: ErrorCode) -> None:
    cache = MetadataCache()
    update(cache, topic(partition()), names_the_last=True)
    answer = described(cache, [name, "orders", name])
    assert [(t.name, t.error_code) for t in answer.topics] == [(name, code), ("orders", ErrorCode.NONE)]


def test_a_topic_that_was_deleted_while_this_broker_was_away_is_forgotten_when_it_is_back() -> None:
    cache = MetadataCache()
    update(cache, topic(partition()), topic(partition(), name="deleted-since"), broker_epoch=5)
    update(cache, topic(partition()), broker_epoch=9)
    update(cache, topic(partition(), name="payments"), broker_epoch=9)
    assert [t.name for t in described(cache, None).topics] == ["orders", "payments"]


def test_brokers_are_described_by_their_endpoint_of_the_listener_that_asked() -> None:
    cache = MetadataCache()
    update(cache, topic(partition()))
    assert [b.port for b in described(cache, [], CONTROL_LISTENER).brokers] == [9501, 9502, 9503]
    assert described(cache, [], "ANOTHER").brokers == []


def test_a_broker_that_has_gone_is_named_until_it_is_forgotten_to_those_who_would_drop_it() -> None:
    cache = MetadataCache()

    def named(with_departed: bool) -> list[int]:
        return sorted(broker.node_id for broker in described(cache, (), with_departed=with_departed).brokers)

    update(cache, topic(partition(leader=3)))
    update(cache, live=(1, 2))
    assert (named(False), named(True)) == ([1, 2], [1, 2, 3])
    [found] = described(cache, ["orders"], with_departed=True).topics
    assert [p.leader_id for p in found.partitions] == [NO_LEADER], "no client is sent to it"
    first = list(cache.departed.values())
    update(cache)
    assert (named(False), named(True)) == ([1, 2, 3], [1, 2, 3])
    update(cache, live=(1, 2))
    cache.forget(first)
    assert named(True) == [1, 2, 3], "it has come back since, and gone again"
    cache.forget(list(cache.departed.values()))
    assert named(True) == [1, 2]


def test_a_lost_leader_is_not_named_though_it_is_alive_here() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(leader=2), partition(1, leader=1), of=2))
    [found] = described(cache, ["orders"], lost_leaders={2}).topics
    assert [(p.error_code, p.leader_id) for p in found.partitions] == [
        (ErrorCode.LEADER_NOT_AVAILABLE, NO_LEADER),
        (ErrorCode.NONE, 1),
    ]
    assert found.partitions[0].offline_replicas == []


@pytest.mark.parametrize(
    ("lost", "topics", "found"),
    [
        ({2}, ["orders", "payments"], ["orders"]),
        ({1, 2}, ["orders", "payments"], []),
        ({2}, ["payments", "unknown"], []),
        ({2}, ["orders", "orders"], ["orders"]),
        (set(), ["orders"], []),
        (set(), ["gone", "orders"], ["gone"]),
        ({1}, ["gone"], ["gone"]),
        ({1, 2}, ["gone"], []),
        ({2}, ["alone"], []),
        (set(), ["offline"], []),
    ],
)
def test_topics_await_elections_if_their_leader_is_lost_or_gone_and_another_may_be_elected(
    lost: set[int], topics: list[str], found: list[str]
) -> None:
    cache = MetadataCache()
    both, alone = (1, 2), (2,)
    update(
        cache, topic(partition(leader=2, isr=both)), topic(partition(leader=1, isr=both), name="payments", topic_id="2")
    )
    update(cache, topic(partition(leader=2, isr=alone), name="alone", topic_id="3"))
    update(cache, topic(partition(leader=NO_LEADER, isr=both), name="offline", topic_id="4"))
    update(cache, topic(partition(leader=3), name="gone", topic_id="5"), live=both)
    assert cache.awaiting_elections(lost, topics) == found


def test_an_answer_given_in_steps_names_no_leader_that_is_not_among_its_brokers() -> None:
    cache = MetadataCache()
    update(cache, topic(partition(), name="a"), topic(partition(leader=3), name="b"), live=(1, 2), names_the_last=True)

    steps = cache.describe(["a", "b"])
    next(steps)
    update(cache, live=(1, 2, 3))
    answer = finish_at_once(steps)

    assert [broker.node_id for broker in answer.brokers] == [1, 2]
    assert [topic.partitions[0].leader_id for topic in answer.topics] == [1, NO_LEADER]


def test_names_that_a_topic_may_have_are_missing_once_all_topics_have_been_told() -> None:
    cache = MetadataCache()
    update(cache, topic(partition()))
    assert cache.missing(["orders", "payments"]) == []
    update(cache, names_the_last=True)
    assert cache.missing(["payments", "orders", "payments", "no name"]) == ["payments"]
