"""A topic goes into a file and comes back: `consume --output`, `produce --input`."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minibroker import application
from minibroker.client.cli.records import lines, record_files
from minibroker.client.cli.records.produce import Acks, Codec, Produced, Template, produce_lines
from minibroker.client.cli.records.record_files import Input, InputRecord, read_records
from minibroker.client.cli.records.record_format import formatter
from minibroker.client.cli.records.tally import Tally
from minibroker.client.cli.terminal.output import run_app
from minibroker.client.fetching.records import Record
from minibroker.client.producer import Producer
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import MAX_TIMESTAMP_MS
from tests.unit.client.scripted_broker import ScriptedCluster

KINDS = (Input.MSGPACK, Input.JSON)

BYTES = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
HEADERS = st.lists(st.tuples(NAMES, BYTES), max_size=4)
"""Headers with a repeated name and empty ones."""
RECORDS = st.lists(
    st.builds(
        Record,
        st.just("orders"),
        st.integers(0, 2),
        st.integers(0, 2**60),
        st.integers(0, MAX_TIMESTAMP_MS),
        BYTES,
        BYTES,
        HEADERS,
    ),
    max_size=20,
)


def written(records: list[Record], kind: Input) -> bytes:
    return b"".join(map(formatter(kind.value), records))


def read(data: bytes, kind: Input, chunk_bytes: int = lines.CHUNK_BYTES) -> list[InputRecord]:
    """Read records from text that arrives in pieces of this size. Raises the errors of `read_records`."""
    found: list[InputRecord] = []
    collect(data, kind, found, chunk_bytes)
    return found


def collect(data: bytes, kind: Input, found: list[InputRecord], chunk_bytes: int = lines.CHUNK_BYTES) -> None:
    async def main(descriptor: int) -> None:
        async for records in read_records(descriptor, kind):
            assert records, "an empty list says nothing"
            found.extend(records)

    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patched:
        file.write(data)
        file.seek(0)
        patched.setattr("minibroker.client.cli.records.lines.CHUNK_BYTES", chunk_bytes)
        asyncio.run(main(file.fileno()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(records=RECORDS, chunk_bytes=st.integers(1, 200))
@settings(deadline=None, max_examples=60)
def test_any_records_are_read_as_they_were_written(kind: Input, records: list[Record], chunk_bytes: int) -> None:
    found = read(written(records, kind), kind, chunk_bytes)
    assert [(r.key, r.value, r.partition, r.timestamp_ms, r.headers or []) for r in found] == [
        (r.key, r.value, r.partition, r.timestamp_ms, list(r.headers)) for r in records
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_was_read_without_a_timestamp_is_sent_without_one(kind: Input) -> None:
    [record] = read(written([Record("orders", 0, 0, -1, b"k", b"v")], kind), kind)
    assert record.timestamp_ms is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_knows_the_byte_at_which_it_begins(kind: Input) -> None:
    records = [Record("orders", 0, offset, 0, b"k" * offset, None) for offset in range(50)]
    starts = [len(written(records[:index], kind)) for index in range(50)]
    assert [record.begins_at for record in read(written(records, kind), kind, 7)] == starts


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=200) | st.binary(max_size=30).map(lambda tail: b"\x81\xa5value" + tail))
@settings(deadline=None, max_examples=200)
def test_whatever_is_in_a_file_ends_in_records_or_in_an_error_for_users(kind: Input, data: bytes) -> None:
    with suppress(MinibrokerError):
        read(data, kind)


@given(records=RECORDS.filter(len), data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_file_that_was_cut_off_says_so_after_all_whole_records(records: list[Record], data: st.DataObject) -> None:
    whole = written(records[:-1], Input.MSGPACK)
    last = written(records[-1:], Input.MSGPACK)
    kept = data.draw(st.integers(1, len(last) - 1))
    found: list[InputRecord] = []
    with pytest.raises(
        MinibrokerError, match=f"ends within record {len(records)}, {kept} bytes? after byte {len(whole)}"
    ):
        collect(whole + last[:kept], Input.MSGPACK, found)
    assert len(found) == len(records) - 1


GOOD = msgpack.packb({"value": b"v"})


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([1], "a map is expected, not list"),
        (7, "a map is expected, not 7"),
        ({"value": 1.5}, "value is 1.5: give bytes, text or null"),
        ({"key": [], "value": None}, "key is list: give bytes, text or null"),
        ({"value": None, "timestmap": 1}, "there is no field 'timestmap'"),
        ({"key": b"k"}, "it has no value: write null"),
        ({"value": b"", "partition": -1}, "partition is -1: give a whole number from 0 to 2147483647"),
        ({"value": b"", "partition": True}, "partition is True: give a whole number"),
        ({"value": b"", "timestamp": 2**63}, "timestamp is 9223372036854775808: give a whole number"),
        ({"value": b"", "headers": {"a": b"b"}}, "headers is dict: give a list"),
        ({"value": b"", "headers": [["a", b"b"]]}, "give maps with a name (text) and a value"),
        ({"value": b"", "headers": [{"name": "a", "value": 1}]}, "the value of a header is 1"),
        ({"value": msgpack.ExtType(5, b"")}, "value is ExtType"),
        ({1: 2}, "it is not a MessagePack record"),
    ],
)
def test_what_is_no_record_is_named_with_its_number_its_byte_and_the_rule(second: Any, said: str) -> None:
    found: list[InputRecord] = []
    with pytest.raises(MinibrokerError) as raised:
        collect(GOOD + msgpack.packb(second) + GOOD, Input.MSGPACK, found)
    assert str(raised.value).startswith(f"record 2, which begins at byte {len(GOOD)}, is not a valid record: ")
    assert said in str(raised.value)
    assert 'Example: {"key"' in str(raised.value)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("", "truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"value": 1}', "Expected `str | null`, got `int` - at `$.value`"),
        ('{"value": null, "timestmap": 1}', "`timestmap`"),
        ('{"key": "k"}', "it has no value: write null"),
        ('{"value": "v", "value_base64": ""}', "it has both value and value_base64: give one of them"),
        ('{"value_base64": "%"}', "base64"),
        ('{"value": "v", "partition": -1}', ">= 0"),
        ('{"value": "v", "headers": [{"name": "n"}]}', "it has no value"),
    ],
)
def test_a_line_that_is_no_record_is_named_as_well(second: str, said: str) -> None:
    found: list[InputRecord] = []
    with pytest.raises(MinibrokerError) as raised:
        collect(f'{{"value": "v"}}\n{second}\n{{"value": "v"}}'.encode(), Input.JSON, found)
    assert str(raised.value).startswith("line 2, which begins at byte 15, is not a valid record: ")
    assert said in str(raised.value)
    assert len(found) == 1


def test_text_will_do_for_bytes_and_what_is_left_out_is_for_the_producer_to_choose() -> None:
    data = msgpack.packb({"key": "caf\u00e9", "value": "v"}) + msgpack.packb({"value": None, "topic": "t", "offset": 7})
    assert read(data, Input.MSGPACK) == [
        InputRecord("caf\u00e9".encode(), b"v", None, None, None, 0),
        InputRecord(None, None, None, None, None, data.index(b"\x83")),
    ]


def test_a_record_that_is_announced_to_be_huge_takes_no_more_memory_than_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 100_000)
    one_value = b"\x81\xa5value\xc6\x7f\xff\xff\xff" + b"x" * 2_000_000
    many_headers = b"\x82\xa5value\xc0\xa7headers\xdd\x00\x01\x86\xa0" + (b"\xda\x03\xe8" + b"x" * 1_000) * 2_000
    for data in (one_value, many_headers):
        with pytest.raises(
            MinibrokerError, match="record 2, from byte 10 on, is longer than 100000 bytes, which no broker"
        ):
            read(GOOD + data, Input.MSGPACK, 10_000)
    with pytest.raises(MinibrokerError, match="2147483647 exceeds max_array_len"):
        read(b"\x82\xa5value\xc0\xa7headers\xdd\x7f\xff\xff\xff", Input.MSGPACK)


# --- Against a broker ---


async def command(
    cluster: ScriptedCluster, path: Path, kind: Input, topic: str, tally: Tally, **template: Any
) -> Produced:
    with path.open("rb") as file:
        return await produce_lines(
            cluster.bootstrap, topic, file.fileno(), Template(**template), Acks.ALL, Codec.NONE, tally, input=kind
        )


def stored(cluster: ScriptedCluster, topic: str) -> list[list[tuple[Any, ...]]]:
    """Return time, key, value and headers of each partition's records."""
    return [
        [
            record
            for batch in log.decoded()
            for record in zip(
                batch.timestamps,
                batch.keys or [None] * batch.count,
                batch.values,
                [headers or [] for headers in batch.headers or [None] * batch.count],
                strict=True,
            )
        ]
        for log in cluster.topics[topic].logs
    ]


def consumed(cluster: ScriptedCluster, topic: str, kind: Input, path: Path) -> None:
    """Run `minibroker consume TOPIC --exit-at-end --output KIND > PATH` in this process."""
    with path.open("wb") as file, io.TextIOWrapper(file) as stdout, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        arguments = ["consume", topic, "--exit-at-end", "--output", kind.value, "--bootstrap", cluster.bootstrap]
        assert run_app(application(), arguments) == 0


def run(scenario: Callable[[ScriptedCluster], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster() as cluster:
            await scenario(cluster)

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
@given(records=RECORDS)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_topic_goes_into_a_file_and_comes_back_as_another_topic(
    kind: Input, records: list[Record], tmp_path: Path
) -> None:
    path = tmp_path / "records"

    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.add_topic("orders", 3)
        cluster.add_topic("copy", 3)
        async with Producer(cluster.bootstrap) as producer:
            for r in records:
                producer.send(
                    "orders",
                    r.value,
                    key=r.key,
                    partition=r.partition,
                    timestamp_ms=r.timestamp_ms,
                    headers=list(r.headers) or None,
                )
        await asyncio.to_thread(consumed, cluster, "orders", kind, path)
        tally = Tally("record")
        produced = await command(cluster, path, kind, "copy", tally)
        assert produced.records == len(records)
        assert stored(cluster, "copy") == stored(cluster, "orders")
        assert str(tally) == f"{len(records)} of {len(records)} records acknowledged"

    run(scenario)


def test_a_damaged_file_says_how_many_of_its_records_are_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(GOOD * 5_000 + b"\xc1" + GOOD)

    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.add_topic("orders")
        with pytest.raises(MinibrokerError) as raised:
            await command(cluster, path, Input.MSGPACK, "orders", Tally("record"))
        assert f"record 5001, which begins at byte {len(GOOD) * 5_000}, is not a valid record" in str(raised.value)
        assert str(raised.value).endswith("(5000 of 5000 records acknowledged)")
        assert len(cluster.log("orders").values()) == 5_000

    run(scenario)


def test_a_record_for_a_partition_that_is_not_there_ends_it_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(b'{"value": "1", "partition": 1}\n{"value": "2", "partition": 4}\n')

    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.add_topic("orders", 2)
        with pytest.raises(MinibrokerError) as raised:
            await command(cluster, path, Input.JSON, "orders", Tally())
        assert str(raised.value) == (
            "record 2, which begins at byte 31, is for partition 4, but orders has partitions 0 to 1: add partitions "
            "(`minibroker topics alter orders --partitions 5`), or choose one for all records with --partition "
            "(1 of 1 lines acknowledged)"
        )
        await command(cluster, path, Input.JSON, "orders", Tally(), partition=0)
        assert [log.values() for log in cluster.topics["orders"].logs] == [[b"1", b"2"], [b"1"]]

    run(scenario)


def test_a_terminal_is_spared_the_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_app(application(), ["consume", "orders", "--output", "msgpack", "-b", "127.0.0.1:1"]) == 2
    assert "--output msgpack is binary" in capsys.readouterr().err


def test_what_is_written_is_what_other_programs_read() -> None:
    record = Record("orders", 2, 41, 1_700_000_000_000, b"\xff", None, [("n", b"1"), ("n", None)])
    assert msgpack.unpackb(formatter("msgpack")(record)) == {
        "topic": "orders",
        "partition": 2,
        "offset": 41,
        "timestamp": 1_700_000_000_000,
        "key": b"\xff",
        "value": None,
        "headers": [{"name": "n", "value": b"1"}, {"name": "n", "value": None}],
    }
    line = formatter("json")(record)
    assert json.loads(line)["key_base64"] == "/w=="
    assert read(line, Input.JSON)[0].key == b"\xff"
