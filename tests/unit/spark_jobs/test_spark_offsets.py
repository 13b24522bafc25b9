"""Offsets in JSON, data loss, ranges, shares and splits."""

from __future__ import annotations

import json

import pytest

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.offsets import (
    DataLost,
    OffsetRange,
    TopicOffsets,
    backlog,
    from_json,
    loss_error,
    losses,
    prorated,
    ranges,
    split,
    to_json,
    unknown_partitions,
)

P = [TopicPartition("t", index) for index in range(12)]


def offsets(topic_id: str = "id", **partitions: int) -> dict[str, TopicOffsets]:
    return {"t": TopicOffsets(topic_id, {int(name[1:]): offset for name, offset in partitions.items()})}


def test_equal_offsets_have_equal_texts() -> None:
    one = {"b": TopicOffsets("2", {10: 1, 9: 2}), "a": TopicOffsets("1", {0: 3})}
    other = {"a": TopicOffsets("1", {0: 3}), "b": TopicOffsets("2", {9: 2, 10: 1})}
    assert json.dumps(to_json(one)) == json.dumps(to_json(other))
    assert (
        json.dumps(to_json(one))
        == '{"a": {"id": "1", "offsets": {"0": 3}}, "b": {"id": "2", "offsets": {"9": 2, "10": 1}}}'
    )
    assert from_json(json.loads(json.dumps(to_json(one)))) == one
    with_epochs = {"a": TopicOffsets("1", {10: 3, 9: 4}, {10: 0, 9: 7})}
    text = '{"a": {"id": "1", "offsets": {"9": 4, "10": 3}, "epochs": {"9": 7, "10": 0}}}'
    assert json.dumps(to_json(with_epochs)) == text
    assert from_json(json.loads(text)) == with_epochs


@pytest.mark.parametrize("text", ['{"t":5}', '{"t":{"0":5}}', "[]", "null", '{"t":{"id":"x","offsets":{"a":1}}}'])
def test_the_offset_of_another_source_is_refused(text: str) -> None:
    with pytest.raises(MinibrokerError, match="not an offset of this source"):
        from_json(json.loads(text))


def test_ranges_lie_between_two_offsets_and_begin_at_the_earliest_where_nothing_was_read() -> None:
    start, end = offsets(p0=5, p1=7), offsets(p0=9, p1=7, p2=4)
    assert unknown_partitions(start, end) == [P[2]]
    assert ranges(start, end, {P[2]: 1}) == [OffsetRange("t", "id", 0, 5, 9), OffsetRange("t", "id", 2, 1, 4)]


def test_a_topic_that_was_created_again_is_read_from_its_beginning() -> None:
    start, end = offsets("old", p0=5), offsets("new", p0=9)
    assert ranges(start, end, dict.fromkeys(unknown_partitions(start, end), 0)) == [OffsetRange("t", "new", 0, 0, 9)]


def test_what_can_never_be_read_is_named() -> None:
    assert losses(offsets(p0=5), offsets(p0=5, p1=3)) == []
    assert losses(offsets(p0=5), {}) == ["topic t is gone (or no longer subscribed to)"]
    assert losses(offsets(p0=5, p1=1), offsets(p0=5)) == ["partition t-1 is gone (or no longer assigned)"]
    assert losses(offsets(p0=5), offsets(p0=4)) == ["t-0 ends at offset 4, but was read up to 5"]
    (text,) = losses(offsets("old", p0=5), offsets("new", p0=9))
    assert text == "topic t was deleted and created again: its id was old, and is new"
    error = loss_error([text])
    assert isinstance(error, DataLost)
    assert "failOnDataLoss=false" in str(error)


def test_a_backlog_counts_what_is_ahead() -> None:
    assert backlog({P[0]: 5, P[1]: 7, P[2]: 9}, {P[0]: 9, P[1]: 7, P[2]: 3}) == {P[0]: 4}


def test_shares_are_in_proportion_and_nobody_starves() -> None:
    assert prorated({P[0]: 3, P[1]: 4}, 10) == {P[0]: 3, P[1]: 4}
    assert prorated({P[0]: 1_000_000, P[1]: 1}, 100) == {P[0]: 99, P[1]: 1}
    assert prorated({P[0]: 300, P[1]: 100}, 40) == {P[0]: 30, P[1]: 10}
    assert prorated({P[0]: 5, P[1]: 9, P[2]: 7}, 2) == {P[1]: 1, P[2]: 1}


def test_the_largest_range_is_divided_first() -> None:
    big, small = OffsetRange("t", "id", 0, 100, 200), OffsetRange("t", "id", 1, 0, 20)
    assert [part.size for part in split([big, small], 4, None)] == [33, 33, 34, 20]
    assert split([big, small], 0, None) == [big, small]


def test_no_range_has_more_than_the_most_records() -> None:
    assert [part.size for part in split([OffsetRange("t", "id", 0, 0, 25)], 0, 10)] == [8, 8, 9]


def test_ranges_are_not_divided_into_nothing() -> None:
    assert [part.size for part in split([OffsetRange("t", "id", 0, 0, 3)], 8, None)] == [1, 1, 1]
    assert split([OffsetRange("t", "id", 0, 3, 3)], 8, 5) == []
