"""Rate limits and splits for any backlog."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.offsets import OffsetRange, prorated, split

SIZES = st.dictionaries(st.integers(0, 30), st.integers(1, 10**9), min_size=1).map(
    lambda sizes: {TopicPartition("t", index): size for index, size in sizes.items()}
)
SMALL_SIZES = st.dictionaries(st.integers(0, 8), st.integers(1, 40), min_size=1).map(
    lambda sizes: {TopicPartition("t", index): size for index, size in sizes.items()}
)


@given(SIZES, st.integers(1, 10**9))
def test_shares_add_up_to_the_limit_and_exceed_no_backlog(sizes: dict[TopicPartition, int], limit: int) -> None:
    shares = prorated(sizes, limit)
    assert sum(shares.values()) == min(limit, sum(sizes.values()))
    assert all(0 < share <= sizes[partition] for partition, share in shares.items())
    assert shares.keys() == sizes.keys() or limit < len(sizes)


@given(SIZES, st.integers(100, 10**9))
def test_shares_are_in_proportion_up_to_one_record_each(sizes: dict[TopicPartition, int], limit: int) -> None:
    shares, total = prorated(sizes, limit), sum(sizes.values())
    if limit < total:
        for partition, share in shares.items():
            assert abs(share - 1 - (limit - len(sizes)) * (sizes[partition] - 1) / (total - len(sizes))) <= 1.001


@given(SMALL_SIZES, st.integers(1, 10))
def test_a_backlog_is_read_in_as_few_batches_as_the_limit_allows(sizes: dict[TopicPartition, int], limit: int) -> None:
    left, batches = dict(sizes), 0
    while left:
        for partition, share in prorated(left, limit).items():
            left[partition] -= share
        left = {partition: size for partition, size in left.items() if size}
        batches += 1
    assert batches == -(-sum(sizes.values()) // limit)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), max_size=6),
    st.integers(0, 40),
    st.none() | st.integers(100, 10**4),
)
def test_splits_cover_every_offset_once_and_keep_both_limits(
    spans: list[tuple[int, int]], min_partitions: int, max_records: int | None
) -> None:
    whole = [OffsetRange("t", "id", index, start, start + size) for index, (start, size) in enumerate(spans)]
    parts = split(whole, min_partitions, max_records)
    assert len(parts) >= min(min_partitions, sum(item.size for item in whole))
    assert all(0 < part.size <= (max_records or 10**4) for part in parts)
    for item in whole:
        position = item.start
        sizes = []
        for part in (part for part in parts if part.partition == item.partition):
            assert part.start == position
            position = part.end
            sizes.append(part.size)
        assert position == item.end
        assert not sizes or max(sizes) - min(sizes) <= 1
