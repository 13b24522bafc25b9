"""The map of keys: its content and its size."""

from __future__ import annotations

import tracemalloc

from minibroker.broker.storage.compaction.key_map import ENTRY_BYTES, KeyMap


def test_the_last_offset_that_was_put_counts_and_other_keys_have_none() -> None:
    keys = KeyMap(10 * ENTRY_BYTES, b"salt")
    keys.put([b"a", b"b", None, b"a"], [3, 4, 5, 6])
    keys.put([b"", b"b"], [7, 8])
    assert keys.latest([b"a", b"b", None, b"", b"c"]) == [6, 8, -1, 7, -1]
    assert len(keys) == 3


def test_long_keys_are_told_apart_by_their_digests() -> None:
    keys = KeyMap(10 * ENTRY_BYTES, b"salt")
    long, longer = b"k" * 33, b"k" * 1_000_000
    keys.put([b"a", long, longer], [1, 2, 3])
    assert keys.latest([long, longer, b"a", b"k" * 34]) == [2, 3, 1, -1]


def test_it_has_room_for_so_many_keys_and_for_any_number_while_it_is_empty() -> None:
    keys = KeyMap(10 * ENTRY_BYTES, b"salt")
    assert keys.has_room_for(1_000)
    keys.put([b"%d" % number for number in range(7)], range(7))
    assert keys.has_room_for(3)
    assert not keys.has_room_for(4)


def test_it_takes_no_more_memory_than_it_was_given() -> None:
    count = 90_000  # just after the dictionary has grown
    keys = KeyMap(count * ENTRY_BYTES, b"salt")
    tracemalloc.start()
    try:
        for number in range(count):
            keys.put([b"%032d" % number], [number + 10**12])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < count * ENTRY_BYTES
    assert not keys.has_room_for(1)
