"""Shortened requests and answers carry the same information as full ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.fetch_slots import NO_SLOT, Answer, FollowerSlots, LeaderSlots
from minibroker.protocol.messages import (
    MAX_FETCH_SLOTS,
    EpochEndOffset,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
)
from minibroker.protocol.model import TopicPartition

TOPIC = "orders"


def topics(offsets: dict[int, int]) -> list[FetchTopic]:
    """The fetch position of each partition asked for."""
    return [FetchTopic(TOPIC, "", [FetchPartition(p, 0, offset, 0, 0, 1_000) for p, offset in offsets.items()])]


def request(slot: int, of: list[FetchTopic]) -> FetchRequest:
    return FetchRequest(2, 500, 1, 1_000, 0, of, slot=slot)


def said(high_watermarks: dict[int, int]) -> Answer:
    return [
        (TopicPartition(TOPIC, p), FetchPartitionResponse(p, ErrorCode.NONE, high_watermark=high))
        for p, high in high_watermarks.items()
    ]


def partitions(answer: Answer) -> list[int]:
    return [topic_partition.partition for topic_partition, _ in answer]


class Connection:
    """Both ends of one connection, and the messages that went over it."""

    def __init__(self) -> None:
        self.leader, self.follower = LeaderSlots(), FollowerSlots[str]()
        self.heard: dict[int, FetchPartitionResponse] = {}
        """For each partition, the follower's copy of the last answer."""
        self.sent = self.answered = 0
        """Partitions."""

    def fetch(self, asked: list[str], offsets: dict[int, int], full_answer: Answer, *, is_busy: bool = False) -> None:
        wanted = topics(offsets)
        slot, is_known = (NO_SLOT, False) if is_busy else self.follower.choose(asked, wanted, [])
        over_the_wire = request(slot, [] if is_known else wanted)
        self.sent += sum(len(topic.partitions) for topic in over_the_wire.topics)
        shorten = self.leader.open(over_the_wire)
        assert over_the_wire.topics == wanted
        answer = shorten(full_answer)
        self.answered += len(answer)
        self.heard.update((topic_partition.partition, response) for topic_partition, response in answer)
        if slot != NO_SLOT:
            self.follower.keep(slot, asked, wanted)


def test_a_second_request_for_the_same_names_nothing_and_gets_nothing() -> None:
    connection = Connection()
    for _ in range(10):
        connection.fetch(["a", "b"], {0: 5, 1: 7}, said({0: 5, 1: 7}))
    assert (connection.sent, connection.answered) == (2, 2)


def test_what_has_changed_of_one_partition_is_all_that_is_answered() -> None:
    leader = LeaderSlots()
    assert partitions(leader.open(request(3, topics({0: 5, 1: 7})))(said({0: 5, 1: 6}))) == [0, 1]
    assert partitions(leader.open(request(3, []))(said({0: 5, 1: 7}))) == [1]
    assert partitions(leader.open(request(3, []))(said({0: 5, 1: 7}))) == []


@pytest.mark.parametrize(
    "news",
    [
        FetchPartitionResponse(0, ErrorCode.NONE, high_watermark=5, records=memoryview(b"x")),
        FetchPartitionResponse(0, ErrorCode.FENCED_LEADER_EPOCH),
        FetchPartitionResponse(0, ErrorCode.NONE, high_watermark=5, diverging_epoch=EpochEndOffset(1, 3)),
    ],
)
def test_records_errors_and_divergence_are_said_each_time(news: FetchPartitionResponse) -> None:
    leader = LeaderSlots()
    answer = [(TopicPartition(TOPIC, 0), news)]
    leader.open(request(0, topics({0: 5})))(answer)
    assert leader.open(request(0, []))(answer) == answer
    assert leader.open(request(0, []))(answer) == answer
    after = said({0: 5})
    assert leader.open(request(0, []))(after) == after


def test_a_request_in_full_is_answered_in_full_though_nothing_has_changed() -> None:
    """Such a request may come from a follower that took the partition anew, and knows nothing."""
    leader = LeaderSlots()
    for _ in range(2):
        assert partitions(leader.open(request(0, topics({0: 5})))(said({0: 5}))) == [0]


def test_a_slot_in_which_nothing_was_asked_is_refused() -> None:
    with pytest.raises(BrokerError, match="slot 4") as caught:
        LeaderSlots().open(request(4, []))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_follower_that_has_taken_a_partition_anew_asks_in_full() -> None:
    follower = FollowerSlots[str]()
    follower.keep(0, ["a"], topics({0: 5}))
    assert follower.choose(["a"], topics({0: 5}), []) == (0, True)
    assert follower.choose(["a, anew"], topics({0: 5}), []) == (1, False)
    assert follower.choose(["a"], topics({0: 6}), []) == (1, False)
    assert follower.choose(["a"], topics({0: 5}), [0]) == (1, False), "it is under way"


def test_the_slot_that_was_used_longest_ago_is_taken_where_all_are_kept() -> None:
    follower = FollowerSlots[str]()
    for slot in range(MAX_FETCH_SLOTS):
        follower.keep(slot, [str(slot)], topics({slot: 0}))
    follower.keep(0, ["0"], topics({0: 0}))
    assert follower.choose(["new"], topics({99: 0}), [1]) == (2, False)
    assert follower.choose(["2"], topics({2: 0}), []) == (2, False), "it is no longer kept"


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 3), st.integers(0, 2), min_size=1),
            st.dictionaries(st.integers(0, 3), st.integers(0, 2)),
            st.integers(0, 1),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_a_follower_knows_what_it_would_know_without_slots(
    rounds: list[tuple[dict[int, int], dict[int, int], int, bool]],
) -> None:
    """In each round the follower asks for some partitions, and the leader has high watermarks and perhaps an error for
    it."""
    connection = Connection()
    told: dict[int, FetchPartitionResponse] = {}
    for offsets, high_watermarks, errors, is_busy in rounds:
        full = said({p: high_watermarks.get(p, 0) for p in offsets})
        for _, response in full[: errors * len(high_watermarks)]:
            response.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        told.update((topic_partition.partition, response) for topic_partition, response in full)
        connection.fetch([str(p) for p in offsets], offsets, full, is_busy=is_busy)
        assert {p: connection.heard[p] for p in offsets} == {p: told[p] for p in offsets}
