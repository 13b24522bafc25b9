from __future__ import annotations

import pytest

from minibroker.client.cli.terminal.output import UsageError
from minibroker.client.cli.terminal.start_position import (
    AtOffset,
    AtTime,
    Edge,
    Last,
    StartPosition,
    parse_start_position,
)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("beginning", Edge.BEGINNING),
        ("earliest", Edge.BEGINNING),
        ("end", Edge.END),
        ("latest", Edge.END),
        ("0", AtOffset(0)),
        ("9223372036854775807", AtOffset(2**63 - 1)),
        ("-1", Last(1)),
        ("-10", Last(10)),
        ("@1700000000000", AtTime(1_700_000_000_000)),
        ("@2023-11-14T22:13:20Z", AtTime(1_700_000_000_000)),
        ("@2023-11-14", AtTime(1_699_920_000_000)),
    ],
)
def test_from_takes_an_edge_an_offset_the_last_so_many_records_or_a_time(text: str, position: StartPosition) -> None:
    assert parse_start_position(text) == position
    assert type(parse_start_position(text)) is type(position)


@pytest.mark.parametrize(
    "text",
    ["", "start", "-", "-0", "--1", "1.5", "@", "@now", "@-5", "@@1", "9223372036854775808", "٣", "1e3", "2023-11-14"],
)
def test_anything_else_is_a_usage_error_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="beginning, end, an offset such as 42"):
        parse_start_position(text)
