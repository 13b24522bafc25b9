"""`minibroker log dump` and `verify` of files that a broker left."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from minibroker import application
from minibroker.broker.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    MetaProperties,
    encode_clean_shutdown,
    encode_meta_properties,
    encode_offsets,
    encode_topic_id,
)
from minibroker.broker.storage.inspection import batches as inspection
from minibroker.broker.storage.recovery.continuity import CONTINUITY_FILE, Continuity, encode_continuity
from minibroker.client.cli.terminal.output import FAILURE, UNHEALTHY, USAGE, run_app
from minibroker.deploy.observing import log_files
from minibroker.protocol.records import ControlType, EndTransactionMarker, parse_header
from minibroker.protocol.world.real import RealLock
from tests.faults.hostile.readers import constant_batch
from tests.properties.test_records_properties import with_honest_crc
from tests.storage_support import BATCHES, NOW, PARTITION, batch, flip, open_log, segments, write_log

END = 2 * BATCHES
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    path = tmp_path / "data" / str(PARTITION)
    write_log(path)
    (path / PARTITION_METADATA_FILE).write_bytes(encode_topic_id("AAAAAAAAAAAAAAAAAAAAAA"))
    for name, content in {
        META_PROPERTIES_FILE: encode_meta_properties(MetaProperties(7, "a cluster")),
        RECOVERY_POINT_FILE: encode_offsets({PARTITION: END}),
        LOG_START_OFFSET_FILE: encode_offsets({}),
        HIGH_WATERMARK_FILE: encode_offsets({PARTITION: END}),
        CLEAN_SHUTDOWN_FILE: encode_clean_shutdown(12),
        CONTINUITY_FILE: encode_continuity(Continuity(boot_id="a boot", trusted_since=4)),
    }.items():
        (path.parent / name).write_bytes(content)
    return path


def run(capsys: Captured, *arguments: str | Path, code: int = 0) -> str:
    assert run_app(application(), ["log", *map(str, arguments)]) == code
    return capsys.readouterr().out


def entries(capsys: Captured, *arguments: str | Path, code: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(capsys, *arguments, "--format", "json", code=code).splitlines()]


def test_a_dump_takes_the_memory_of_one_record_at_a_time(tmp_path: Path, capsys: Captured) -> None:
    """The records have a terabyte together."""
    batch = constant_batch(bytes(1 << 20))
    records = log_files._records(inspection.Batch(0, parse_header(batch), bytes(batch)))
    assert [record["offset"] for record in islice(records, 3)] == [0, 1, 2]


def test_a_dump_of_a_segment_has_its_batches_and_their_records(partition: Path, capsys: Captured) -> None:
    first, second, *_ = entries(capsys, "dump", segments(partition)[0], "--records")
    assert (first["kind"], first["position"], first["first_offset"], first["last_offset"]) == ("batch", 0, 0, 1)
    assert (second["position"], second["first_offset"]) == (first["size"], 2)
    assert [record["offset"] for record in first["records"]] == [0, 1]
    assert first["records"][0]["timestamp"] == NOW
    assert isinstance(first["records"][0]["value"], str)
    table = run(capsys, "dump", segments(partition)[0], "--records")
    assert "\n  batch: position=0 size=" in table
    assert "max_timestamp=2023-11-14T22:13:20.001+00:00" in table
    assert "\n    record: offset=1 timestamp=2023-11-14T22:13:20.001+00:00 key=" in table
    assert "record:" not in run(capsys, "dump", segments(partition)[0])


def test_a_dump_of_a_data_directory_has_everything_that_a_broker_keeps_in_it(partition: Path, capsys: Captured) -> None:
    kinds = {
        (Path(entry["file"]).suffix or Path(entry["file"]).name, entry["kind"])
        for entry in entries(capsys, "dump", partition.parent)
    }
    assert kinds == {
        (".log", "batch"),
        (".index", "index entry"),
        (".timeindex", "index entry"),
        (".snapshot", "producer"),
        (".metadata", "topic"),
        (".properties", "owner"),
        ("leader-epoch-checkpoint", "leader epoch"),
        (RECOVERY_POINT_FILE, "offset"),
        (HIGH_WATERMARK_FILE, "offset"),
        (CLEAN_SHUTDOWN_FILE, "clean shutdown"),
        (CONTINUITY_FILE, "continuity"),
    }


def test_a_dump_shows_markers_and_aborted_transactions(tmp_path: Path, capsys: Captured) -> None:
    async def write() -> None:
        log = open_log(str(tmp_path / "orders-1")).log
        for sequence, type in enumerate(ControlType):
            transactional = batch(1, producer_id=7, producer_epoch=2, sequence=sequence, transactional=True)
            log.append_as_leader(transactional, 0, NOW)
            log.append_marker(7, 2, EndTransactionMarker(type, coordinator_epoch=5), 0, NOW)
        log.append_as_leader(batch(1, producer_id=7, producer_epoch=2, sequence=2, transactional=True), 0, NOW)
        await log.checkpoint()
        await log.close()

    asyncio.run(write())
    dumped = entries(capsys, "dump", tmp_path / "orders-1")
    fields = ("first_offset", "producer_id", "producer_epoch", "marker", "coordinator_epoch")
    markers = [tuple(e[name] for name in fields) for e in dumped if e["kind"] == "control batch"]
    assert markers == [(1, 7, 2, "ABORT", 5), (3, 7, 2, "COMMIT", 5)]
    [aborted] = [entry for entry in dumped if entry["kind"] == "aborted transaction"]
    offsets = {"producer_id": 7, "first_offset": 0, "last_offset": 1, "last_stable_offset": 2}
    assert {name: aborted[name] for name in offsets} == offsets
    assert {e["open_since"] for e in dumped if e["kind"] == "producer"} == {4}
    table = run(capsys, "dump", tmp_path / "orders-1")
    assert "marker='ABORT' coordinator_epoch=5\n" in table
    assert "  aborted transaction: producer_id=7 first_offset=0 last_offset=1 last_stable_offset=2\n" in table


def test_a_dump_goes_on_behind_bad_bytes_and_says_so(partition: Path, capsys: Captured) -> None:
    file = segments(partition)[0]
    _, second, third, *rest = entries(capsys, "dump", file)
    flip(file, second["position"] + 80)
    _, bad, after, *others = entries(capsys, "dump", file, code=UNHEALTHY)
    assert (bad["kind"], bad["position"], bad["end"]) == ("bad", second["position"], third["position"])
    assert [after, *others] == [third, *rest]
    assert f"  BAD: position={second['position']} end=" in run(capsys, "dump", file, code=UNHEALTHY)


def test_a_dump_says_which_offsets_cannot_be_read_though_their_batch_is_intact(
    tmp_path: Path, capsys: Captured
) -> None:
    async def write() -> None:
        log = open_log(str(tmp_path / "orders-1")).log
        nonsense = bytearray(batch(2))
        nonsense[62] = 0xC1  # no column begins like this
        log.append_as_leader(with_honest_crc(nonsense), 0, NOW)
        log.append_as_leader(batch(1), 0, NOW)
        await log.checkpoint()
        await log.close()

    asyncio.run(write())
    dumped = entries(capsys, "dump", segments(tmp_path / "orders-1")[0], "--records", code=UNHEALTHY)
    bad, unreadable, readable = dumped[:3]
    assert "the records at offsets 0 to 1 cannot be read" in bad["problem"]
    assert bad["problem"].endswith("Consumers stop there until they seek to 2")
    assert (unreadable["first_offset"], readable["records"][0]["offset"]) == (0, 2)


@pytest.mark.parametrize("name", [RECOVERY_POINT_FILE, META_PROPERTIES_FILE, f"{PARTITION}/leader-epoch-checkpoint"])
def test_a_dump_of_a_small_file_that_is_damaged_says_what_is_wrong(
    partition: Path, capsys: Captured, name: str
) -> None:
    (partition.parent / name).write_bytes(b"\xff")
    [bad] = entries(capsys, "dump", partition.parent / name, code=UNHEALTHY)
    assert bad["kind"] == "bad"
    assert "is damaged" in bad["problem"]


def test_files_that_agree_are_verified_as_ok(partition: Path, capsys: Captured) -> None:
    expected = (
        f"orders-0: offsets 0 to {END}, {END} records in {BATCHES} batches, {len(segments(partition))} segments, "
    )
    for path in (partition, partition.parent):
        line, summary = run(capsys, "verify", path).splitlines()
        assert line.startswith(expected)
        assert line.endswith("bytes: ok")
        assert summary.startswith(f"1 partition with {END} records in {BATCHES} batches, ")
        assert summary.endswith("bytes: ok")
    [report] = entries(capsys, "verify", partition)
    assert (report["records"], report["log_end_offset"], report["findings"]) == (END, END, [])
    [whole] = entries(capsys, "verify", partition.parent)
    assert whole["partitions"] == [report]


def test_what_is_wrong_is_named_with_its_file_and_bytes_and_whether_records_are_lost(
    partition: Path, capsys: Captured
) -> None:
    file = segments(partition)[0]
    flip(file, 80)
    os.truncate(index := file.with_suffix(".timeindex"), 3)
    lines = run(capsys, "verify", partition.parent, code=UNHEALTHY).splitlines()
    assert lines[0].endswith("bytes: 2 problems")
    assert f"wrong: {index}: not an index: 3 bytes" in "\n".join(lines)
    assert f"LOST: {file}, byte 0 to " in "\n".join(lines)
    [report] = entries(capsys, "verify", partition, code=UNHEALTHY)
    assert [finding.get("costs_records", False) for finding in report["findings"]] == [False, True]


@pytest.mark.slow
def test_paths_that_hold_no_log_are_refused_with_what_is_expected(
    tmp_path: Path, partition: Path, capsys: Captured
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        (["dump", tmp_path / "nowhere"], "there is no"),
        (["dump", tmp_path / "notes.txt"], "notes.txt is not a log file"),
        (["dump", tmp_path / "empty"], "there is no log file in"),
        (["verify", tmp_path / "nowhere"], "there is no"),
        (["verify", tmp_path / "empty"], "is neither a broker's data directory"),
        (["verify", segments(partition)[0].with_suffix(".index")], "use `minibroker log dump` for another file"),
    ):
        assert run_app(application(), ["log", *map(str, arguments)]) == USAGE
        assert said in capsys.readouterr().err


def test_a_segment_is_verified_by_itself(partition: Path, capsys: Captured) -> None:
    segment = segments(partition)[0]
    assert run(capsys, "verify", segment).startswith(f"{segment.name}: offsets 0 to ")


def test_the_cleaners_checkpoint_is_dumped(partition: Path, capsys: Captured) -> None:
    file = partition.parent / CLEANER_OFFSET_FILE
    file.write_bytes(encode_offsets({PARTITION: 12}))
    [entry] = entries(capsys, "dump", file)
    assert (entry["kind"], entry["topic"], entry["offset"]) == ("offset", PARTITION.topic, 12)


def test_possibly_legal_findings_are_reported_and_are_no_damage(partition: Path, capsys: Captured) -> None:
    segment = segments(partition)[-1]
    [first, *_] = entries(capsys, "dump", segment)
    segment.write_bytes(segment.read_bytes()[first["size"] :])
    (partition.parent / RECOVERY_POINT_FILE).write_bytes(encode_offsets({PARTITION: 0}))
    lines = run(capsys, "verify", partition).splitlines()
    assert lines[0].endswith(": ok, 1 unclear")
    assert lines[1].startswith(f"unclear: {segment}, byte 0: offsets ")


def test_files_of_a_broker_that_runs_are_not_verified(partition: Path, capsys: Captured) -> None:
    lock = RealLock(str(partition.parent / LOCK_FILE))
    try:
        for path in (partition.parent, partition, segments(partition)[0]):
            assert run_app(application(), ["log", "verify", str(path)]) == FAILURE
            assert f"a broker is running on {partition.parent}" in capsys.readouterr().err
    finally:
        lock.release()
