"""The verdict on a compacted topic accepts every legal content and no other."""

import pytest

from tests.simulation.storms.clients.compacting import Found, Written, lost, wrong

K = b"k"
ONE = Written(producer=0, number=1, is_tombstone=False, offset=10)
UNKNOWN = Written(producer=0, number=2, is_tombstone=False, offset=None)
THREE = Written(producer=1, number=3, is_tombstone=False, offset=12)
DELETED = Written(producer=1, number=4, is_tombstone=True, offset=13)


@pytest.mark.parametrize(
    ("written", "found", "problems"),
    [
        ([ONE], [Found(10, 1)], []),
        ([ONE], [], ["the latest record of a key is lost"]),
        ([ONE], [Found(11, 7)], ["phantom"]),
        ([ONE, UNKNOWN], [Found(10, 1)], []),
        ([ONE, UNKNOWN], [Found(11, 2)], []),
        ([ONE, UNKNOWN], [Found(10, 1), Found(11, 2)], []),
        ([ONE, UNKNOWN], [Found(10, 2)], ["inconsistent offset"]),
        ([ONE, UNKNOWN], [Found(9, 2), Found(10, 1)], ["a key went back"]),
        ([ONE, UNKNOWN, THREE], [Found(12, 3)], []),
        ([ONE, UNKNOWN, THREE], [Found(12, 3), Found(14, 2)], []),  # it came late
        ([ONE, UNKNOWN, THREE], [Found(10, 1)], ["the latest record of a key is lost"]),
        ([ONE, THREE, DELETED], [Found(13, None)], []),
        ([ONE, THREE, DELETED], [], []),
        ([ONE, THREE, DELETED], [Found(12, 3)], ["the latest record of a key is lost"]),
        ([UNKNOWN], [], []),
    ],
)
def test_each_key_has_its_last_acknowledged_value(
    written: list[Written], found: list[Found], problems: list[str]
) -> None:
    assert [anomaly.kind for anomaly in wrong({K: written}, {K: found} if found else {})] == problems


def test_a_key_that_was_never_written_is_a_phantom() -> None:
    assert [anomaly.kind for anomaly in wrong({}, {K: [Found(0, 1)]})] == ["phantom"]


def test_a_record_that_must_stay_is_there_even_if_its_key_was_overwritten() -> None:
    must_stay = [(K, Found(10, 1)), (K, Found(11, None)), (K, Found(12, 3))]
    assert list(lost(must_stay, {K: [Found(10, 1), Found(11, None), Found(12, 3)]})) == []
    [anomaly] = lost(must_stay, {K: [Found(12, 3)]})
    assert anomaly.kind == "a record is lost that had to stay"
    assert "2 of 3" in anomaly.text
