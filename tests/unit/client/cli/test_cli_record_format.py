from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from minibroker.client.cli.records.record_format import formatter, unescape
from minibroker.client.cli.terminal.output import UsageError
from minibroker.client.fetching.records import Record

RECORD = Record("orders", 2, 41, 1_700_000_000_000, b"k1", "caf\u00e9".encode())


@pytest.mark.parametrize(
    ("output", "printed"),
    [
        ("value", "caf\u00e9\n".encode()),
        (r"%t-%p@%o %k=%s %T\n", "orders-2@41 k1=caf\u00e9 1700000000000\n".encode()),
        (r"%p\t%o\x00\\%%", b"2\t41\x00\\%"),
        ("\u2192%p", "\u21922".encode()),
    ],
)
def test_a_record_is_printed_as_the_format_says(output: str, printed: bytes) -> None:
    assert formatter(output)(RECORD) == printed


def test_a_format_adds_no_end_of_line_of_its_own() -> None:
    assert formatter("%o,")(RECORD) == b"41,"


def test_a_missing_key_or_value_prints_as_nothing() -> None:
    record = replace(RECORD, key=None, value=None)
    assert formatter(r"[%k][%s]")(record) == b"[][]"
    assert formatter("value")(record) == b"\n"


def test_headers_are_printed_as_kcat_prints_them() -> None:
    headers = [("trace", b"1"), ("trace", b"2,\xff"), ("caf\u00e9", b""), ("empty", None)]
    assert formatter("%k %h")(replace(RECORD, headers=headers)) == b"k1 trace=1,trace=2,\xff,caf\xc3\xa9=,empty=NULL"
    assert formatter("%k %h")(RECORD) == b"k1 "


def test_json_holds_every_field_on_one_line() -> None:
    line = formatter("json")(replace(RECORD, value=b"a\nb", headers=[("trace", b"1"), ("empty", None)]))
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "topic": "orders",
        "partition": 2,
        "offset": 41,
        "timestamp": 1_700_000_000_000,
        "key": "k1",
        "value": "a\nb",
        "headers": [{"name": "trace", "value": "1"}, {"name": "empty", "value": None}],
    }


def test_bytes_that_are_no_text_are_base64_under_another_name() -> None:
    fields = json.loads(formatter("json")(replace(RECORD, key=None, value=b"\xff\x00")))
    assert fields["key"] is None
    assert "value" not in fields
    assert fields["value_base64"] == "/wA="


@pytest.mark.parametrize("output", ["jsn", "", "%q", "100%", r"%s\q", r"%s\x1", "%s\\"])
def test_an_unknown_format_is_a_usage_error_that_lists_the_known_ones(output: str) -> None:
    with pytest.raises(UsageError, match=r"%s value|or \\xNN"):
        formatter(output)


def test_a_format_is_quoted_in_an_error_as_it_was_typed() -> None:
    with pytest.raises(UsageError, match=re.escape(r"%v in '%v\n' is not a token")):
        formatter(r"%v\n")
    with pytest.raises(UsageError, match=re.escape(r"\q in '%s\q' is not an escape")):
        formatter(r"%s\q")


def test_escapes_of_a_separator_are_undone_and_percent_signs_kept() -> None:
    assert unescape(r"\t") == b"\t"
    assert unescape("%k:") == b"%k:"
    assert unescape(r"\x1f") == b"\x1f"
