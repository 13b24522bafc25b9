from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.broker.storage.indexes.index import (
    OFFSET_INDEX,
    TIME_INDEX,
    InvalidIndex,
    Layout,
    SparseIndex,
    StoredIndex,
)
from minibroker.protocol.world.real import RealDisk

LAYOUTS = (OFFSET_INDEX, TIME_INDEX)


def filled(layout: Layout, entries: list[tuple[int, int]]) -> SparseIndex:
    index = SparseIndex(layout)
    for entry in entries:
        index.append(*entry)
    return index


def test_files_are_kafkas_big_endian_entries() -> None:
    assert filled(OFFSET_INDEX, [(1, 2), (0x01020304, 5)]).encode() == bytes.fromhex(
        "0000000100000002 0102030400000005"
    )
    assert filled(TIME_INDEX, [(0x0102030405060708, 9)]).encode() == bytes.fromhex("0102030405060708 00000009")


@settings(deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), unique=True),
    st.lists(st.integers(-5, 305)),
)
def test_both_kinds_of_index_find_what_a_scan_of_all_entries_finds(
    layout: Layout, numbers: list[tuple[int, int]], targets: list[int]
) -> None:
    keys, values = sorted({k for k, _ in numbers}), sorted({v for _, v in numbers})
    if layout is OFFSET_INDEX:
        values = [value for value in values if value]  # the first batch has no entry
    entries = list(zip(keys, values, strict=False))
    sparse = filled(layout, entries)
    decoded = SparseIndex.decode(layout, sparse.encode())
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/index"
        Path(path).write_bytes(sparse.encode())
        stored = StoredIndex(RealDisk(), path, layout, len(entries))
        for target in targets:
            by_key = max((e for e in entries if e[0] <= target), default=None)
            by_value = max((e for e in entries if e[1] <= target), default=None)
            for index in (sparse, decoded, stored):
                assert index.floor(target) == by_key
                assert index.floor_by_value(target) == by_value


def test_cutting_keeps_the_entries_below() -> None:
    index = filled(OFFSET_INDEX, [(1, 10), (5, 20), (9, 30)])
    index.keep_keys_below(9)
    assert index.last == (5, 20)
    index.keep_values_below(20)
    assert index.last == (1, 10)
    index.keep_keys_below(-3)
    assert index.last is None


def test_an_index_knows_when_its_file_holds_more_than_it_should() -> None:
    index = SparseIndex.decode(OFFSET_INDEX, filled(OFFSET_INDEX, [(1, 10), (5, 20)]).encode())
    assert (index.stored, index.in_step) == (2, False), "whoever wrote it may have died before it was synced"
    index.in_step = True
    index.append(9, 30)
    index.keep_keys_below(9)
    assert (index.stored, index.in_step) == (2, True)
    index.keep_keys_below(5)
    assert (index.stored, index.in_step) == (1, False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "entries", [[(5, 1), (5, 2)], [(1, 5), (2, 5)], [(2, 1), (1, 2)], [(-1, 2)], [(1, -2)], [(0, 0)] * 2]
)
def test_entries_that_do_not_increase_are_no_index(layout: Layout, entries: list[tuple[int, int]]) -> None:
    data = b"".join(layout.entry.pack(*entry) for entry in entries)
    with pytest.raises(InvalidIndex):
        SparseIndex.decode(layout, data)
    with pytest.raises(InvalidIndex):
        SparseIndex.decode(layout, layout.entry.pack(1, 2) + b"\0")


def test_zeros_are_no_entry_of_the_offset_index() -> None:
    with pytest.raises(InvalidIndex):
        SparseIndex.decode(OFFSET_INDEX, OFFSET_INDEX.entry.pack(0, 0))
