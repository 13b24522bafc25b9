"""Which manifests count, and which are compacted: decisions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.errors import MinibrokerError
from minibroker.spark_jobs.tables.manifests import DataFile, Manifest, Span, Table, effective, next_compaction, span_of


def manifest(first: int, last: int, level: int = 0, size: int = 1) -> Manifest:
    return Manifest("q", first, last, {}, {}, 1, [DataFile("f", 1, size)], level)


def test_names_tell_spans_and_nothing_else_is_a_manifest() -> None:
    assert span_of(Span(3, 12).file_name) == Span(3, 12)
    assert span_of(Span(3, 12).file_name + ".tmp") is None
    assert span_of("notes.json") is None
    assert [Span(3, 3).directory_name, Span(3, 12).directory_name] == ["batch=3", "batch=3-12"]
    assert sorted(Span(first, first).file_name for first in (10, 9, 100)) == [
        Span(first, first).file_name for first in (9, 10, 100)
    ]


def test_the_widest_manifests_count_and_a_hole_is_noticed() -> None:
    singles = [Span(number, number) for number in range(6)]
    assert effective([]) == []
    assert effective(singles) == singles
    assert effective([*singles, Span(0, 3)]) == [Span(0, 3), Span(4, 4), Span(5, 5)]
    assert effective([*singles, Span(0, 1), Span(2, 3), Span(0, 3)]) == [Span(0, 3), Span(4, 4), Span(5, 5)]
    assert effective([Span(0, 3), Span(4, 4)]) == [Span(0, 3), Span(4, 4)]
    assert effective([Span(0, 0), Span(2, 2)]) is None
    assert effective([Span(1, 1)]) is None


@given(st.integers(1, 200), st.integers(2, 6))
def test_compactions_as_batches_come_leave_few_manifests_and_every_batch_once(batches: int, fan_in: int) -> None:
    manifests: list[Manifest] = []
    rewritten = 0
    for number in range(batches):
        manifests.append(manifest(number, number))
        while chosen := next_compaction(manifests, fan_in, 1_000):
            at = manifests.index(chosen[0])
            rewritten += sum(one.last_batch - one.first_batch + 1 for one in chosen)
            manifests[at : at + len(chosen)] = [
                manifest(chosen[0].first_batch, chosen[-1].last_batch, chosen[0].level + 1)
            ]
    assert effective(one.span for one in manifests) == [one.span for one in manifests]
    assert manifests[-1].last_batch == batches - 1
    levels = max(one.level for one in manifests)
    assert len(manifests) <= (levels + 1) * (fan_in - 1) + 1
    assert rewritten <= levels * batches


def test_what_is_large_enough_is_left_alone() -> None:
    large, small = manifest(0, 0, size=1_000), [manifest(number, number) for number in (1, 2, 3)]
    assert next_compaction([large, *small], 4, 1_000) == ()
    assert next_compaction([large, *small], 3, 1_000) == small
    assert next_compaction([*small, large], 3, 1_000) == small


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    table = Table(tmp_path)
    assert (table.manifests(), table.end(), table.files()) == ([], None, [])
    path = tmp_path / "manifests" / Span(0, 0).file_name
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(MinibrokerError, match=f"{path} is damaged"):
        table.manifests()
