from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from minibroker.client.producing.partitioners import (
    choose_adaptive,
    choose_round_robin,
    choose_sticky,
    crc32,
    frequency_table,
    murmur2,
    murmur2_hash,
)


@pytest.mark.parametrize(
    ("key", "signed_hash"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_agrees_with_javas_producer(key: bytes, signed_hash: int) -> None:
    assert murmur2_hash(key) == signed_hash & 0xFFFFFFFF


def test_murmur2_maps_to_partitions_by_the_positive_hash() -> None:
    assert murmur2(b"21", 1_000) == (-973932308 & 0x7FFFFFFF) % 1_000


def test_crc32_is_the_ieee_polynomial() -> None:
    assert crc32(b"123456789", 1 << 32) == 0xCBF43926
    assert crc32(b"", 7) == 0


def test_the_frequency_table_favours_short_queues() -> None:
    assert frequency_table([0, 3, 1]) == [4, 5, 8]
    assert frequency_table([5, 5]) == [1, 2]


def test_the_adaptive_choice_follows_the_table() -> None:
    random = Random(1)
    counts = Counter(choose_adaptive([10, 11, 12], [0, 3, 1], random) for _ in range(8_000))
    assert counts[10] == pytest.approx(4_000, rel=0.1)
    assert counts[11] == pytest.approx(1_000, rel=0.2)
    assert counts[12] == pytest.approx(3_000, rel=0.1)


def test_the_sticky_choice_leaves_the_previous_partition_where_it_can() -> None:
    random = Random(1)
    assert {choose_sticky([0, 1, 2], 1, random) for _ in range(100)} == {0, 2}
    assert choose_sticky([4], 4, random) == 4


def test_round_robin_goes_around_and_skips_what_is_missing() -> None:
    assert choose_round_robin([0, 2, 5], None) == 0
    assert [choose_round_robin([0, 2, 5], previous) for previous in (0, 1, 2, 5, 9)] == [2, 2, 5, 0, 0]
