"""Numbers and lists in sentences."""

from __future__ import annotations

import pytest

from minibroker.protocol.words import all_of, counted, listed


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 segments"), (1, "1 segment"), (2, "2 segments"), (60_000, "60,000 segments")]
)
def test_a_noun_agrees_with_its_number(number: int, shown: str) -> None:
    assert counted(number, "segment") == shown


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert [counted(number, "directory", "directories") for number in (1, 2)] == ["1 directory", "2 directories"]


def test_lists_end_with_and() -> None:
    assert [listed(items) for items in ([], [1], [1, 3], [1, 3, 5])] == ["", "1", "1 and 3", "1, 3 and 5"]
    assert [all_of("broker", items) for items in ([1], [1, 3])] == ["broker 1", "brokers 1 and 3"]
