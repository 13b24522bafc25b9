"""The functions with which `send_batch` examines whole columns agree with a look at each record."""

from __future__ import annotations

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.client.producing.batch import RECORD_OVERHEAD
from minibroker.client.producing.columns import Columns, checked_column, grouped
from minibroker.client.producing.partitioners import crc32, murmur2, partitions_of

COLUMN = st.lists(st.none() | st.binary(max_size=50), min_size=1, max_size=40)


def size_of(value: bytes | None, key: bytes | None) -> int:
    return RECORD_OVERHEAD + len(value or b"") + len(key or b"")


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.none() | st.binary(max_size=50), st.none() | st.binary(max_size=9)), min_size=1), st.data()
)
def test_the_end_of_a_batch_is_where_adding_one_by_one_would_find_it(
    records: list[tuple[bytes | None, bytes | None]], data: st.DataObject
) -> None:
    columns = Columns([value for value, _ in records], [key for _, key in records], [0] * len(records))
    start = data.draw(st.integers(0, len(records) - 1))
    room = data.draw(st.integers(0, 400))
    end, used = start, 0
    while end < len(records) and used + size_of(*records[end]) <= room:
        used += size_of(*records[end])
        end += 1
    assert columns.end_within(start, room) == end
    assert columns.size(start, end) == used
    largest = data.draw(st.integers(RECORD_OVERHEAD, 90))
    above = [index for index, record in enumerate(records) if size_of(*record) > largest]
    assert columns.first_above(largest) == (above[0] if above else None)


@given(st.lists(st.integers(0, 5)))
def test_groups_are_the_indexes_of_each_target_in_order_of_records(targets: list[int]) -> None:
    assert grouped(targets) == {
        target: [index for index, each in enumerate(targets) if each == target] for target in set(targets)
    }


@given(COLUMN, st.data())
def test_pick_returns_the_requested_records(values: list[bytes | None], data: st.DataObject) -> None:
    indexes = sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1)))
    picked = Columns(values, values[::-1], list(range(len(values)))).pick(indexes)
    assert picked.values == [values[index] for index in indexes]
    assert picked.keys == [values[::-1][index] for index in indexes]
    assert picked.timestamps == indexes


@given(st.lists(st.binary()), st.integers(1, 1_000))
def test_many_keys_are_hashed_as_each_of_them(keys: list[bytes], count: int) -> None:
    for by_key in (crc32, murmur2):
        assert partitions_of(keys, by_key, count) == [by_key(key, count) for key in keys]


@given(COLUMN, st.sampled_from(["binary", "large_binary"]), st.data())
def test_an_arrow_array_equals_its_list(column: list[bytes | None], kind: str, data: st.DataObject) -> None:
    array = pyarrow.array(column, kind)
    start = data.draw(st.integers(0, len(column)))
    for part in (array, array[start:], array[:start], pyarrow.chunked_array([array[start:], array[:start]], kind)):
        assert checked_column("values", part) == part.to_pylist()
