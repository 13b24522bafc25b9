from __future__ import annotations

import pytest

from minibroker.client.cli.produce import Template


@pytest.mark.parametrize(
    ("template", "line", "key", "value"),
    [
        (Template(), b"a:1", None, b"a:1"),
        (Template(), b"", None, b""),
        (Template(key=b"k"), b"a:1", b"k", b"a:1"),
        (Template(key_separator=b":"), b"a:1:2", b"a", b"1:2"),
        (Template(key_separator=b":"), b":1", b"", b"1"),
        (Template(key_separator=b":"), b"a", None, b"a"),
        (Template(key=b"k", key_separator=b"::"), b"a::1", b"a", b"1"),
        (Template(key=b"k", key_separator=b"::"), b"a:1", b"k", b"a:1"),
        (Template(key_separator=b":"), b"a:", b"a", b""),
        (Template(key_separator=b":", tombstone=True), b"a:", b"a", None),
        (Template(key=b"k", tombstone=True), b"", b"k", None),
        (Template(tombstone=True), b"1", None, b"1"),
    ],
)
def test_a_line_becomes_a_key_and_a_value(
    template: Template, line: bytes, key: bytes | None, value: bytes | None
) -> None:
    assert template.key_and_value(line) == (key, value)
