"""A group's committed offsets: memory follows the log, in the log's order; and which offsets expire."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minibroker.broker.groups.offsets import GroupOffsets, is_of_gone_topic, newest_topic_id
from minibroker.broker.groups.records import OffsetValue
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.topic_ids import make

ORDERS = TopicPartition("orders", 0)
OTHER = TopicPartition("other", 0)
OLD, NEW = make(1, 1, b"aaaaaa"), make(1, 2, b"bbbbbb")


def value(offset: int, *, topic_id: str = "") -> OffsetValue:
    return OffsetValue(offset, -1, "", 0, topic_id)


def offset_of(offsets: GroupOffsets) -> int | None:
    known = offsets.get(ORDERS)
    return None if known is None else known.offset


def test_a_commit_is_shown_when_it_is_complete_and_not_before() -> None:
    offsets = GroupOffsets()
    offsets.begin([ORDERS])
    assert offset_of(offsets) is None
    assert not offsets.is_unused
    offsets.complete(ORDERS, value(5), 10, 0)
    assert offset_of(offsets) == 5


def test_a_commit_that_fails_changes_nothing() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.begin([ORDERS])
    offsets.fail([ORDERS])
    assert offset_of(offsets) == 3
    offsets = GroupOffsets()
    offsets.begin([ORDERS])
    offsets.fail([ORDERS])
    assert offsets.is_unused


def test_the_commit_written_last_counts_in_any_order_of_completion() -> None:
    offsets = GroupOffsets()
    offsets.begin([ORDERS])
    offsets.begin([ORDERS])
    offsets.complete(ORDERS, value(6), 11, 0)
    offsets.complete(ORDERS, value(5), 10, 0)
    assert offset_of(offsets) == 6


def test_a_commit_that_was_written_after_a_tombstone_outlives_it() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.begin([ORDERS])
    offsets.begin([ORDERS])
    offsets.complete(ORDERS, value(5), 11, 0)
    offsets.complete(ORDERS, None, 10, 0)
    assert offset_of(offsets) == 5


def test_an_offset_expires_from_its_commit_or_from_when_it_was_last_in_use() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 1_000)

    def expired(
        now_s: float,
        since_s: float | None = None,
        topics: Mapping[str, float] = MappingProxyType({}),
        subscribed: frozenset[str] = frozenset(),
    ) -> bool:
        return offsets.expired(
            now_s, 100, unused_since_s=since_s, topics_unused_since_s=topics, subscribed=subscribed
        ) == [ORDERS]

    assert not expired(1_099)
    assert expired(1_100)
    assert not expired(1_100, since_s=1_050)
    assert expired(1_150, since_s=1_050)
    assert expired(1_100, since_s=500)
    assert not expired(1_100, topics={"orders": 1_050})
    assert expired(1_150, topics={"orders": 1_050, "other": 1_100})
    assert not expired(5_000, subscribed=frozenset({"orders"}))


def test_an_offset_that_is_being_committed_does_not_expire() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.begin([ORDERS])
    assert offsets.expired(1_000_000, 100, unused_since_s=None, topics_unused_since_s={}, subscribed=()) == []
    assert offsets.settled() == []


def test_a_topic_is_gone_if_a_newer_one_has_its_name() -> None:
    of_old = value(1, topic_id=OLD)
    assert is_of_gone_topic(of_old, NEW)
    assert not is_of_gone_topic(of_old, OLD)
    assert not is_of_gone_topic(value(1, topic_id=NEW), OLD)  # this broker has not yet learned of the newer one
    assert not is_of_gone_topic(of_old, None)  # nor perhaps of this one
    assert not is_of_gone_topic(value(1), NEW)


def test_the_newest_of_the_topics_of_a_name_is_found() -> None:
    assert newest_topic_id([OLD, NEW, OLD]) == NEW
    assert newest_topic_id(["", OLD]) == OLD
    assert newest_topic_id([]) == ""


def test_a_commit_written_before_a_tombstone_stays_deleted_in_any_order_of_completion() -> None:
    offsets = GroupOffsets()
    offsets.begin([ORDERS])
    offsets.begin([ORDERS])
    offsets.complete(ORDERS, None, 11, 0)
    offsets.complete(ORDERS, value(5), 10, 0)
    assert offset_of(offsets) is None
    assert offsets.is_unused


def test_offsets_in_flight_or_in_doubt_are_deleted_like_known_ones() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.begin([ORDERS, OTHER])
    assert offsets.to_delete() == [ORDERS, OTHER]
    offsets.fail([ORDERS])
    offsets.fail([OTHER], is_in_doubt=True)
    assert offsets.to_delete() == [ORDERS, OTHER]
    offsets = GroupOffsets()
    offsets.begin([ORDERS])
    offsets.fail([ORDERS])
    assert offsets.to_delete() == []
