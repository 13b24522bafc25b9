"""Which segments may be compacted or merged, and which log is next."""

from __future__ import annotations

import pytest

from minibroker.broker.storage.compaction.cleanable import Candidate, Cleanable, cleanable, dirtiest, groups
from minibroker.broker.storage.indexes.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.retention import SegmentExtent

NOW = 1_000_000

LOG = [
    SegmentExtent(0, 10, 100, NOW - 400),
    SegmentExtent(10, 20, 200, NOW - 300),
    SegmentExtent(20, 30, 300, NOW - 200),
    SegmentExtent(30, 40, 400, NOW - 100),
]
"""Return extents of these sizes; the last is the active segment."""


def of_log(
    first_dirty: int = 0, log_start_offset: int = 0, limit: int = 1_000, min_compaction_lag_ms: int = 0
) -> Cleanable:
    return cleanable(
        LOG,
        first_dirty=first_dirty,
        log_start_offset=log_start_offset,
        limit=limit,
        now_ms=NOW,
        min_compaction_lag_ms=min_compaction_lag_ms,
    )


def test_all_but_the_active_segment_may_be_cleaned() -> None:
    assert of_log() == Cleanable(0, 30, 0, 600)


def test_what_is_clean_counts_as_clean_and_what_is_partly_clean_as_dirty() -> None:
    assert of_log(first_dirty=10) == Cleanable(10, 30, 100, 500)
    assert of_log(first_dirty=15) == Cleanable(15, 30, 100, 500)
    assert of_log(first_dirty=30) == Cleanable(30, 30, 600, 0)
    assert of_log(first_dirty=35) == Cleanable(35, 35, 600, 0)


@pytest.mark.parametrize(("limit", "end"), [(9, 0), (10, 10), (19, 10), (30, 30)])
def test_nothing_is_cleaned_that_is_not_wholly_committed_and_on_disk(limit: int, end: int) -> None:
    assert of_log(limit=limit).end == end


@pytest.mark.parametrize(("lag_ms", "end"), [(150, 30), (200, 30), (201, 20), (300, 20), (301, 10), (1_000, 0)])
def test_nothing_is_cleaned_from_the_first_record_on_that_is_too_young(lag_ms: int, end: int) -> None:
    assert of_log(min_compaction_lag_ms=lag_ms).end == end


def test_what_is_only_waiting_for_its_removal_counts_for_nothing() -> None:
    assert of_log(log_start_offset=12) == Cleanable(12, 30, 0, 500)
    assert of_log(first_dirty=25, log_start_offset=12) == Cleanable(25, 30, 200, 300)


def candidate(dirty: int, clean: int, *, is_overdue: bool = False, min_dirty_ratio: float = 0.5) -> Candidate:
    return Candidate(Cleanable(0, 1, clean, dirty), min_dirty_ratio, is_overdue)


def test_the_log_with_the_largest_dirty_part_comes_first() -> None:
    less, more = candidate(60, 40), candidate(90, 10)
    assert dirtiest([less, more]) is more


def test_a_log_that_is_not_dirty_enough_waits_unless_it_is_overdue() -> None:
    assert dirtiest([candidate(50, 50)]) is None
    overdue = candidate(1, 99, is_overdue=True)
    assert dirtiest([candidate(50, 50), overdue]) is overdue
    assert dirtiest([candidate(0, 100, is_overdue=True, min_dirty_ratio=0.0)]) is None
    assert dirtiest([]) is None


def test_neighbours_become_one_segment_as_long_as_they_fit() -> None:
    assert groups(LOG, 300) == [LOG[:2], LOG[2:3], LOG[3:]]
    assert groups(LOG, 1_000) == [LOG]
    assert groups(LOG, 1) == [[segment] for segment in LOG]
    assert groups([], 1) == []


def test_offsets_that_no_index_could_hold_keep_segments_apart() -> None:
    first = SegmentExtent(0, 10, 1, NOW)
    just = SegmentExtent(10, MAX_RELATIVE_OFFSET + 1, 1, NOW)
    beyond = SegmentExtent(10, MAX_RELATIVE_OFFSET + 2, 1, NOW)
    assert groups([first, just], 1_000) == [[first, just]]
    assert groups([first, beyond], 1_000) == [[first], [beyond]]
