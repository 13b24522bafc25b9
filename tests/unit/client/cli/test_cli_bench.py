"""The records that benchmarks send, how they learn each outcome, and their percentiles."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.values import HEADER_BYTES, ContentCheck, ContentVerdict, Values

VALUES = Values()
RUN = 0xDEADBEEF


def values(*numbers: int, run: int = RUN, size: int = 100) -> list[bytes | None]:
    return [VALUES.make(run, number, size) for number in numbers]


def verdict(*partitions: Sequence[bytes | None]) -> ContentVerdict:
    check = ContentCheck()
    for partition, records in enumerate(partitions):
        check.add(partition, records)
    return check.verdict()


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER_BYTES + 1, 100, 1_024, 900_000])
def test_a_value_is_recognised_by_whoever_reads_it_and_no_other_is(size: int) -> None:
    value = VALUES.make(RUN, 4_294_967_295, size)
    assert len(value) == size
    assert Values().recognise(value) == (RUN, 4_294_967_295)
    if size > HEADER_BYTES:
        assert VALUES.recognise(value[:-1] + bytes([value[-1] ^ 1])) is None
        assert VALUES.recognise(VALUES.make(RUN, 1, size)[:HEADER_BYTES] + value[HEADER_BYTES:]) is None
    assert VALUES.recognise(value[: HEADER_BYTES - 1]) is None
    assert VALUES.recognise(None) is None


def test_values_are_distinct_and_do_not_compress() -> None:
    made = [VALUES.make(RUN, number, 100) for number in range(10_000)]
    assert len({value[HEADER_BYTES:] for value in made}) == 10_000
    noise = b"".join(value[HEADER_BYTES:] for value in made)
    assert len(zlib.compress(noise)) > len(noise) * 0.99


def test_what_was_sent_and_is_there_once_and_in_order_is_no_problem() -> None:
    found = verdict([*values(0, 3), *values(0, run=7)], values(1, 2), [])
    assert found == ContentVerdict(checked=5, missing=0, duplicated=0, out_of_order=0, altered=0)
    assert found.problem is None


@pytest.mark.parametrize(
    ("partitions", "problem"),
    [
        ([values(0, 2), values(3)], "1 missing"),
        ([values(1, 2)], "1 missing"),
        ([values(0, 1, 1)], "1 duplicated"),
        ([values(0, 1), values(1)], "1 duplicated"),
        ([values(0, 2, 1)], "1 out of order"),
        ([[*values(0, 1), b"x" * 100]], "1 altered"),
        ([[*values(0, 1), None]], "1 altered"),
        ([values(0, 2), [b"?" + (values(1)[0] or b"")[1:]]], "1 missing, 1 altered"),
    ],
)
def test_what_is_wrong_with_records_is_counted(partitions: list[Sequence[bytes | None]], problem: str) -> None:
    assert verdict(*partitions).problem == problem


def test_a_topic_with_nothing_from_a_benchmark_is_not_checked() -> None:
    assert verdict([b"hello", b"a line of text", None]) == (0, 0, 0, 0, 0)


def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    ordered = [float(number) for number in range(1, 21)]
    assert [percentile(ordered, share) for share in (0.0, 0.05, 0.5, 0.95, 0.96, 0.999, 1.0)] == [
        1,
        1,
        10,
        19,
        20,
        20,
        20,
    ]
    assert percentile([7.0], 0.5) == percentile([7.0], 1.0) == 7.0
