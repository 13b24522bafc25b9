"""The console's records and settings, from values."""

from __future__ import annotations

import msgspec
import pytest

from minibroker.client.administering.configs import ConfigEntry, ConfigSynonym
from minibroker.client.fetching.records import Record
from minibroker.deploy.console.record_page import (
    Settings,
    record_form,
    record_sections,
    settings_form,
    settings_sections,
)
from minibroker.deploy.console.records import (
    AUTO,
    HEX,
    JSON,
    MAX_CHARACTERS,
    MAX_DECODED_BYTES,
    MSGPACK,
    TEXT,
    Extent,
    Records,
    shown,
)
from minibroker.deploy.console.views import Query
from minibroker.protocol.model import ConfigSource, ConfigType, TopicPartition

EVIL = "<script>alert(1)</script>"


@pytest.mark.parametrize(
    ("data", "kind", "expected"),
    [
        (None, AUTO, "null"),
        (b"", AUTO, ""),
        (b"plain", AUTO, "plain"),
        ("größer".encode(), AUTO, "größer"),
        (b"\x00\x01", AUTO, "00 01"),
        (b"\xff", AUTO, "ff"),
        (b"\xff", TEXT, "\\xff"),
        (b'{"a": [1,2]}', AUTO, '{"a": [1, 2]}'),
        (b"{broken", AUTO, "{broken"),
        (b"{broken", JSON, "not json: {broken"),
        (b"1", JSON, "1"),
        (msgspec.msgpack.encode({"a": 1, "b": b"x"}), MSGPACK, '{"a":1,"b":"eA=="}'),
        (b"\xc1", MSGPACK, "not msgpack: \\xc1"),
        (b"az", HEX, "61 7a"),
    ],
)
def test_a_value_is_shown_in_the_chosen_format(data: bytes | None, kind: str, expected: str) -> None:
    assert shown(data, kind) == expected


@pytest.mark.parametrize("kind", [AUTO, TEXT, JSON, MSGPACK, HEX])
@pytest.mark.parametrize(
    "data",
    [
        b"x" * 5_000_000,
        ("ö" * 500_000).encode(),
        b'"' + b"x" * 40_000 + b'"',
        b"[" * 60_000,
        b"\x91" * 60_000,
        b"[" * (MAX_DECODED_BYTES + 1),
        bytes(100_000),
    ],
)
def test_a_huge_value_is_cut(data: bytes, kind: str) -> None:
    found = shown(data, kind)
    assert len(found) <= 12 * MAX_CHARACTERS  # four characters for each byte that is no text
    assert found.endswith(" …")


def _records(*records: Record, first: int = 0, end: int = 100, problem: str | None = None) -> Records:
    partition = TopicPartition("orders", 0)
    return Records(("orders",), {partition: Extent(first, end)}, 1, records, problem)


def test_records_show_what_strangers_wrote_and_run_nothing() -> None:
    record = Record("orders", 0, 60, 1_795_343_400_000, EVIL.encode(), EVIL.encode(), [(EVIL, EVIL.encode())])
    sections = record_sections(_records(record), Query(topic="orders"))
    html = "".join(sections.values())
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 4
    assert "2026-11-22 10:30:00.000 UTC" in html
    assert "offsets 0 to 99" in html
    assert 'href="/records?topic=orders&amp;partition=0&amp;start=10"' in html
    assert 'href="/records?topic=orders&amp;partition=0&amp;start=61"' in html


def test_without_a_topic_all_are_offered_and_a_problem_is_shown() -> None:
    chosen = record_sections(Records(("orders", "other"), {}, 0, (), None), Query())
    assert 'href="/records?topic=other"' in chosen["extent"]
    assert record_sections(None, Query()).keys() == chosen.keys()
    problem = record_sections(_records(problem=f"no {EVIL}"), Query(topic="orders"))
    assert "no &lt;script&gt;" in problem["extent"]
    assert 'value="json" selected' in record_form(["orders"], Query(form="json"))


def test_a_setting_says_where_it_comes_from_and_what_it_overrides() -> None:
    synonyms = (
        ConfigSynonym("retention.ms", "5", ConfigSource.DYNAMIC_TOPIC_CONFIG),
        ConfigSynonym("log.retention.ms", "7", ConfigSource.STATIC_BROKER_CONFIG),
        ConfigSynonym("log.retention.ms", "9", ConfigSource.DEFAULT_CONFIG),
    )
    given = ConfigEntry(
        "retention.ms", "5", ConfigSource.DYNAMIC_TOPIC_CONFIG, False, False, ConfigType.LONG, synonyms, "Age."
    )
    default = given._replace(name="segment.ms", source=ConfigSource.DEFAULT_CONFIG, synonyms=(), is_read_only=True)
    secret = given._replace(name="password", value=None, is_sensitive=True, problem=EVIL)
    settings = Settings(("orders",), (1, 2), "topic orders", (given, default, secret), None)
    html = settings_sections(settings, Query(topic="orders"))
    assert "instead of 7 (broker, when it started), 9 (default)" in html["settings"]
    assert "1 default<" in html["settings"]
    assert "(secret)" in html["settings"]
    assert "<script" not in html["settings"]
    assert 'href="/settings?broker=2"' in html["owners"]
    assert 'href="/settings?broker=all"' in html["owners"]
    assert "Nothing is set there" in settings_sections(settings._replace(entries=()), Query(broker="all"))["settings"]
    assert settings_sections(None, Query()).keys() == html.keys()
    assert 'list="topics"' in settings_form(["orders"], Query())
