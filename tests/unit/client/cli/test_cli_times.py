from __future__ import annotations

import pytest

from minibroker.client.cli.terminal.times import hint, parse_time_ms


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0", 0),
        ("1700000000000", 1_700_000_000_000),
        ("4611686018427387903", 2**62 - 1),
        ("1970-01-01", 0),
        ("2023-11-14", 1_699_920_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T23:13:20.123456+01:00", 1_700_000_000_123),
    ],
)
def test_a_time_is_milliseconds_or_iso_8601_which_is_utc_unless_it_says_otherwise(text: str, milliseconds: int) -> None:
    assert parse_time_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026",
        "-1",
        "1.5",
        "1e3",
        "٣",
        "4611686018427387904",
        "1" * 5_000,
        "1969-12-31",
        "2023-13-01",
        "10:30",
    ],
)
def test_anything_else_is_no_time(text: str) -> None:
    assert parse_time_ms(text) is None


def test_a_number_of_four_digits_is_refused_with_the_spelling_of_either_meaning() -> None:
    assert "write 2026-01-01 for the year, 02026 for milliseconds" in hint("2026")
    assert (parse_time_ms("2026-01-01"), parse_time_ms("02026")) == (1_767_225_600_000, 2_026)
    assert hint("now") == hint("20260") == ""
