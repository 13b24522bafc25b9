"""Opening logs whose files were damaged while the broker was down."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import search
from minibroker.broker.storage.producer_state import ProducerState
from minibroker.broker.storage.recovery.recovery import DamagedLog, RecoveryReport, recover
from minibroker.broker.storage.snapshots import write_snapshot
from minibroker.protocol.messages import Buffer
from minibroker.protocol.records import CorruptRecord
from minibroker.protocol.world import Disk, File
from minibroker.protocol.world.real import RealDisk
from tests.storage_support import (
    BATCHES,
    CONFIG,
    NOW,
    batch,
    check_indexes,
    content,
    everything,
    flip,
    headers,
    open_log,
    produced,
    segments,
    stamped,
    write_log,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders-0"


def report_of(
    path: Path,
    *,
    recovery_point: int,
    clean: bool,
    disk: Disk | None = None,
    before_loss: Callable[[str, bool], None] = lambda reason, was_flushed: None,
    log_start_offset: int | None = 0,
) -> RecoveryReport:
    recovered = recover(
        disk or RealDisk(),
        str(path),
        recovery_point=recovery_point,
        clean=clean,
        log_start_offset=log_start_offset,
        index_interval_bytes=CONFIG.index_interval_bytes,
        now_ms=NOW,
        before_loss=before_loss,
    )
    for segment in recovered.segments:
        segment.close()
    return recovered.report


def check(
    path: Path, batches: int, *, recovery_point: int = 0, clean: bool = False, time_indexes_are_whole: bool = True
) -> None:
    """Check that the log holds this many of its batches and that all derived files match."""
    log = open_log(str(path), CONFIG, recovery_point=recovery_point, clean=clean).log
    assert log.log_end_offset == 2 * batches
    assert everything(log) == b"".join(content(number) for number in range(batches))
    check_indexes(log, time_indexes_are_whole=time_indexes_are_whole)
    assert [log.epoch_at(2 * number) for number in range(batches)] == [number // 20 for number in range(batches)]
    for number in range(batches):
        assert finish_at_once(search.offset_for_timestamp(log, NOW + 10 * number, 2 * batches)) == (
            NOW + 10 * number,
            2 * number,
        )
    for producer_id in range(min(batches, 3)):
        last = batches - 1 - (batches - 1 - producer_id) % 3
        for number in range(last, max(last - 15, -1), -3):
            assert log.append_as_leader(produced(content(number)), log.latest_epoch, NOW).first_offset == 2 * number
    asyncio.run(log.close())


def test_a_log_that_was_closed_in_order_is_opened_without_reading_it(path: Path) -> None:
    write_log(path)
    report = report_of(path, recovery_point=2 * BATCHES, clean=True)
    assert report.problem == ""
    assert report.scanned_bytes < 500
    check(path, BATCHES, recovery_point=2 * BATCHES, clean=True)


def test_after_a_crash_only_what_was_not_flushed_is_read(path: Path) -> None:
    log = write_log(path, checkpoint_at=50)
    report = report_of(path, recovery_point=100, clean=False)
    assert report == RecoveryReport(2 * BATCHES, report.scanned_bytes, 0, False, 0, "")
    assert report.scanned_bytes < log.size / 2
    check(path, BATCHES, recovery_point=100)


def test_without_a_recovery_point_everything_is_read_and_nothing_is_lost(path: Path) -> None:
    log = write_log(path)
    assert report_of(path, recovery_point=0, clean=False).scanned_bytes == log.size
    check(path, BATCHES)


@pytest.mark.parametrize("missing", [1, 30, 61, 100])
def test_a_batch_that_was_cut_short_in_the_middle_of_a_page_is_dropped_and_is_a_loss(path: Path, missing: int) -> None:
    write_log(path, checkpoint_at=50)
    last = segments(path)[-1]
    size = last.stat().st_size
    os.truncate(last, size - missing)
    report = report_of(path, recovery_point=100, clean=False)
    assert report.log_end_offset == 2 * BATCHES - 2
    assert report.bytes_cut == len(content(BATCHES - 1)) - missing
    assert report.lost_more_than_an_incomplete_batch
    check(path, BATCHES - 1, recovery_point=100)


@pytest.mark.parametrize("size", [4_096, 8_192])
def test_a_batch_that_was_cut_short_at_the_end_of_a_page_is_a_torn_append_and_no_loss(path: Path, size: int) -> None:
    path.mkdir()
    whole, torn = stamped(batch(1, size=4_000), 0, 0), stamped(batch(1, size=8_000), 1, 0)
    (path / "00000000000000000000.log").write_bytes((whole + torn)[:size])
    announced: list[tuple[str, bool]] = []
    report = report_of(
        path, recovery_point=0, clean=False, before_loss=lambda *announcement: announced.append(announcement)
    )
    assert (report.log_end_offset, report.bytes_cut) == (1, size - len(whole))
    assert not report.lost_more_than_an_incomplete_batch
    assert announced == []


def test_a_flipped_bit_cuts_the_log_there_and_more_than_an_incomplete_batch_is_lost(path: Path) -> None:
    write_log(path, checkpoint_at=0)
    files = segments(path)
    second = headers(files[1].read_bytes())
    flip(files[1], second[0].size + 80)
    report = report_of(path, recovery_point=0, clean=False)
    assert report.log_end_offset == second[1].base_offset
    assert report.lost_more_than_an_incomplete_batch
    assert f"{files[1]}, position {second[0].size}: the CRC is" in report.problem
    assert segments(path) == files[:2]
    check(path, second[1].base_offset // 2)


@pytest.mark.parametrize("clean", [True, False])
def test_a_flipped_bit_that_is_read_cuts_the_log_where_it_is(path: Path, clean: bool) -> None:
    """Also in the first batch read, which the last index entry names: it had been on disk, and may have rotted
    there."""
    write_log(path)
    last = segments(path)[-1]
    untouched, position = last.read_bytes(), 0
    for header in headers(untouched):
        last.write_bytes(untouched)
        flip(last, position + header.size - 1)
        report = report_of(path, recovery_point=2 * BATCHES, clean=clean)
        if report.problem:
            assert (report.log_end_offset, last.stat().st_size) == (header.base_offset, position)
        position += header.size
    assert report.problem


def test_zeros_at_the_end_are_cut(path: Path) -> None:
    write_log(path, checkpoint_at=50)
    last = segments(path)[-1]
    with last.open("ab") as file:
        file.write(bytes(5_000))
    report = report_of(path, recovery_point=100, clean=False)
    assert (report.bytes_cut, report.log_end_offset) == (5_000, 2 * BATCHES)
    assert report.lost_more_than_an_incomplete_batch
    check(path, BATCHES, recovery_point=100)


def test_a_segment_that_ends_too_early_takes_the_later_ones_with_it(path: Path) -> None:
    """A power cut kept the later file and lost the end of this one, exactly between two batches."""
    write_log(path, checkpoint_at=0)
    files = segments(path)
    last = headers(files[1].read_bytes())[-1]
    os.truncate(files[1], files[1].stat().st_size - last.size)
    report = report_of(path, recovery_point=0, clean=False)
    assert "but the next segment begins at" in report.problem
    assert report.lost_more_than_an_incomplete_batch
    assert segments(path) == files[:2]
    check(path, last.base_offset // 2)


def test_a_missing_segment_takes_the_later_ones_with_it(path: Path) -> None:
    write_log(path, checkpoint_at=0)
    files = segments(path)
    files[2].unlink()
    assert report_of(path, recovery_point=0, clean=False).lost_more_than_an_incomplete_batch
    assert segments(path) == files[:2]
    check(path, int(files[2].stem) // 2)


def test_an_old_tail_behind_new_batches_is_cut(path: Path) -> None:
    """The log was truncated, and a power cut brought the old bytes back."""
    old = b"".join(stamped(batch(2), 2 * number, 1) for number in range(10))
    new = b"".join(stamped(batch(2), 2 * number, 1 if number < 4 else 2) for number in range(6))
    path.mkdir()
    (path / "00000000000000000000.log").write_bytes(new + old[len(new) :])
    report = report_of(path, recovery_point=8, clean=False)
    assert report.log_end_offset == 12
    assert "leader epoch 1 follows 2" in report.problem


def test_a_log_that_lost_what_had_been_on_disk_says_so(path: Path) -> None:
    write_log(path)
    last = segments(path)[-1]
    os.truncate(last, 0)
    announced: list[tuple[str, bool]] = []
    report = report_of(
        path, recovery_point=2 * BATCHES, clean=False, before_loss=lambda *announcement: announced.append(announcement)
    )
    assert announced == [(report.problem, True)]
    assert report.lost_more_than_an_incomplete_batch
    assert f"ends at offset {int(last.stem)}, but {2 * BATCHES} had been on disk" in report.problem


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "torn", "zeros", "garbage", "swapped"])
@pytest.mark.parametrize("clean", [True, False])
def test_damaged_indexes_are_built_again(path: Path, suffix: str, damage: str, clean: bool) -> None:
    write_log(path)
    indexes = sorted(path.glob(f"*{suffix}"))
    for index in indexes:
        data = index.read_bytes()
        if damage == "missing":
            index.unlink()
        elif damage == "empty":
            index.write_bytes(b"")
        elif damage == "short":
            entry = 8 if suffix == ".index" else 12
            index.write_bytes(data[: len(data) // entry // 2 * entry])
        elif damage == "torn":
            index.write_bytes(data[:-3])
        elif damage == "zeros":
            index.write_bytes(data[:8] + bytes(len(data) - 8 if data else 0))
        elif damage == "garbage":
            index.write_bytes(b"\x7f\x01\x55\xaa" * (len(data) // 4))
        else:
            index.write_bytes(indexes[0].read_bytes() + indexes[1].read_bytes())
    is_whole = (damage, suffix) != ("short", ".timeindex")  # without a visible sign
    check(path, BATCHES, recovery_point=2 * BATCHES, clean=clean, time_indexes_are_whole=is_whole)
    # The same once more, with the rebuilt indexes.
    check(path, BATCHES, recovery_point=2 * BATCHES, clean=clean, time_indexes_are_whole=is_whole)


@pytest.mark.parametrize("name", ["leader-epoch-checkpoint", "*.snapshot"])
@pytest.mark.parametrize("damage", ["missing", "empty", "garbage"])
def test_lost_epochs_and_snapshots_are_built_again_from_the_batches(path: Path, name: str, damage: str) -> None:
    write_log(path)
    for file in path.glob(name):
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(b"" if damage == "empty" else b"0\n1\n\0\0\0 7")
    check(path, BATCHES, recovery_point=2 * BATCHES, clean=True)


def test_what_a_truncation_left_above_the_recovery_point_is_not_believed(path: Path) -> None:
    """Index entries, epochs and snapshots of a log that was truncated and rewritten before the crash."""
    write_log(path)
    copies = {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".log"}
    opened = open_log(str(path), CONFIG, recovery_point=2 * BATCHES, clean=True)

    async def rewrite() -> None:
        opened.log.truncate_to(30)
        for number in range(15, 40):
            changed = batch(1 + number % 2, size=90, timestamp=NOW + 10 * number, producer_id=5, sequence=0)
            opened.log.append_as_follower(stamped(changed, opened.log.log_end_offset, 7 + number))
        await opened.log.close()

    asyncio.run(rewrite())
    expected = everything_in(path)
    for name, data in copies.items():
        (path / name).write_bytes(data)
    log = open_log(str(path), CONFIG, recovery_point=30).log
    assert everything(log) == expected
    check_indexes(log)
    assert (log.epoch_at(28), log.epoch_at(30), log.epoch_at(log.log_end_offset - 1)) == (0, 22, 46)
    assert log.append_as_leader(produced(content(14)), 46, NOW).first_offset == 28


def everything_in(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in segments(path))


def test_damage_below_the_recovery_point_is_left_alone_and_reported(path: Path) -> None:
    write_log(path)
    files = segments(path)
    flip(files[1], 100)
    (path / f"{files[1].stem}.index").unlink()
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(DamagedLog, match=rf"{files[1]}, position 0: .*opening it would delete what follows"):
        report_of(path, recovery_point=2 * BATCHES, clean=False)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("which", "problem"), [(0, "begins at offset"), (1, "but the next segment begins at")])
def test_a_segment_that_is_gone_is_damage_and_not_another_beginning_or_a_gap(
    path: Path, which: int, problem: str, clean: bool
) -> None:
    write_log(path)
    lost = segments(path)[which]
    for file in path.glob(f"{lost.stem}.*"):
        file.unlink()
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(DamagedLog, match=problem):
        report_of(path, recovery_point=2 * BATCHES, clean=clean)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("start_is_known", [True, False])
def test_a_log_may_begin_later_where_that_is_on_file_or_nothing_of_it_had_been_safe(
    path: Path, start_is_known: bool
) -> None:
    write_log(path)
    first, second, *_ = segments(path)
    first.unlink()
    begins = int(second.stem)
    if start_is_known:
        log = open_log(str(path), CONFIG, recovery_point=2 * BATCHES, clean=True, log_start_offset=begins).log
    else:
        log = open_log(str(path), CONFIG, recovery_point=0, clean=False).log
    assert (log.log_start_offset, log.log_end_offset) == (begins, 2 * BATCHES)


def test_damaged_headers_below_the_recovery_point_are_not_taken_for_the_end(path: Path) -> None:
    write_log(path)
    files = segments(path)
    flip(files[1], 16)
    for snapshot in path.glob("*.snapshot"):
        snapshot.unlink()
    with pytest.raises(CorruptRecord, match=f"{files[1]}, position 0"):
        report_of(path, recovery_point=2 * BATCHES, clean=True)


def test_a_length_that_claims_a_lot_takes_little_memory(path: Path) -> None:
    write_log(path, checkpoint_at=50)
    last = segments(path)[-1]
    with last.open("r+b") as file:
        file.seek(8)
        file.write((2**28).to_bytes(4, "big"))
        file.truncate(2**28 + 100)  # sparse
    tracemalloc.start()
    try:
        report = report_of(path, recovery_point=100, clean=False)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "position 0: the CRC is" in report.problem
    assert most < 16 * 1024**2
    assert last.stat().st_size == 0


def test_temporary_files_and_indexes_without_a_segment_are_removed(path: Path) -> None:
    write_log(path)
    (path / "leader-epoch-checkpoint.tmp").write_bytes(b"half")
    (path / "00000000000000009999.index").write_bytes(b"12345678")
    (path / "notes.txt").write_bytes(b"somebody's")
    check(path, BATCHES, recovery_point=2 * BATCHES)
    assert not (path / "leader-epoch-checkpoint.tmp").exists()
    assert not (path / "00000000000000009999.index").exists()
    assert (path / "notes.txt").exists()


def contents_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_loss_is_announced_while_the_files_still_show_it(path: Path) -> None:
    write_log(path, checkpoint_at=0)
    files = segments(path)
    flip(files[1], 100)
    logs = {file.name: file.read_bytes() for file in files}
    announced: list[tuple[str, bool, dict[str, bytes]]] = []

    def before_loss(reason: str, was_flushed: bool) -> None:
        announced.append((reason, was_flushed, {file.name: file.read_bytes() for file in segments(path)}))

    report = report_of(path, recovery_point=0, clean=False, before_loss=before_loss)
    assert announced == [(report.problem, False, logs)]
    assert segments(path) == files[:2]


def test_wherever_a_crash_cut_the_file_the_whole_batches_before_it_are_the_log(path: Path) -> None:
    path.mkdir()
    batches = [content(number) for number in range(4)]
    ends = [sum(map(len, batches[:count])) for count in range(5)]
    file = path / "00000000000000000000.log"
    for size in range(ends[-1] + 1):
        file.write_bytes(b"".join(batches)[:size])
        whole = max(count for count in range(5) if ends[count] <= size)
        report = report_of(path, recovery_point=0, clean=False)
        assert (report.log_end_offset, report.bytes_cut) == (2 * whole, size - ends[whole])
        assert report.lost_more_than_an_incomplete_batch == (size > ends[whole])
        assert file.read_bytes() == b"".join(batches[:whole])


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("told", "begins"), [(0, 0), (70, 70), (-1, 0)])
def test_a_directory_without_segments_becomes_a_log_that_begins_where_it_is_told(
    path: Path, told: int, begins: int, clean: bool
) -> None:
    log = open_log(str(path), CONFIG, clean=clean, log_start_offset=told).log
    assert (log.log_start_offset, log.log_end_offset) == (begins, begins)
    assert [file.stem for file in segments(path)] == [f"{begins:020d}"]


def test_a_log_begins_neither_before_its_first_segment_nor_past_its_end(path: Path) -> None:
    write_log(path)
    files = segments(path)
    files[0].unlink()
    first, end = int(files[1].stem), 2 * BATCHES
    for told, begins in [(None, first), (first, first), (first + 1, first + 1), (end + 1, end)]:
        log = open_log(str(path), CONFIG, recovery_point=end, clean=True, log_start_offset=told).log
        assert (log.log_start_offset, log.log_end_offset) == (begins, end)
        asyncio.run(log.close())


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("are_removed", [True, False])
def test_a_log_whose_records_are_all_deleted_knows_the_last_ones_epoch_at_every_later_start(
    path: Path, are_removed: bool, clean: bool
) -> None:
    log = write_log(path)
    end, epoch = log.log_end_offset, log.latest_epoch

    async def empty() -> None:
        log = open_log(str(path), CONFIG, recovery_point=end, clean=True).log
        log.move_log_start_offset(end)
        await log.checkpoint()
        if are_removed:
            await log.remove_old_segments(end)
        await log.close()

    async def reopened() -> tuple[int, int]:
        log = open_log(str(path), CONFIG, recovery_point=end, clean=clean, log_start_offset=end).log
        assert log.log_start_offset == log.log_end_offset == end
        log.truncate_to(end)
        await log.checkpoint()
        await log.close()
        return log.latest_epoch, log.epoch_at(end - 1)

    asyncio.run(empty())
    for _ in range(3):
        assert asyncio.run(reopened()) == (epoch, epoch)
        assert (len(segments(path)) == 1) == are_removed


class WatchedDisk(RealDisk):
    """The real disk, which records open files and writes to segments."""

    def __init__(self) -> None:
        self.is_open: list[str] = []
        self.written: list[tuple[str, int, bytes]] = []
        self.removed: list[str] = []

    def remove(self, path: str) -> None:
        self.removed.append(path)
        super().remove(path)

    def open(self, path: str, *, create: bool = False) -> WatchedFile:  # type: ignore[override]
        return WatchedFile(self, path, RealDisk.open(self, path, create=create))


class WatchedFile:
    def __init__(self, disk: WatchedDisk, path: str, file: File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self.pread, self.size, self.truncate, self.fdatasync = file.pread, file.size, file.truncate, file.fdatasync
        self.modified_ms, self.set_modified_ms = file.modified_ms, file.set_modified_ms
        disk.is_open.append(path)

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        if self._path.endswith(".log"):
            self._disk.written.append((self._path, position, b"".join(data)))
        return self._file.pwrite(data, position)

    def close(self) -> None:
        self._disk.is_open.remove(self._path)
        self._file.close()


def test_later_segments_are_removed_from_the_end_on_so_that_a_crash_leaves_no_gap(path: Path) -> None:
    write_log(path, checkpoint_at=0)
    files = segments(path)
    flip(files[1], 100)
    disk = WatchedDisk()
    report_of(path, recovery_point=0, clean=False, disk=disk)
    assert [name for name in disk.removed if name.endswith(".log")] == [str(file) for file in reversed(files[2:])]


def test_what_is_read_after_a_crash_is_written_again_as_it_is(path: Path) -> None:
    """A sync that failed before the crash may have left pages that the kernel considers clean."""
    log = write_log(path, checkpoint_at=50)
    before = contents_of(path)
    disk = WatchedDisk()
    report = report_of(path, recovery_point=100, clean=False, disk=disk)
    assert sum(len(data) for _, _, data in disk.written) == report.scanned_bytes
    for file, position, data in disk.written:
        assert before[Path(file).name][position : position + len(data)] == data
    flushed = sum(map(len, (content(number) for number in range(50))))
    assert log.size - flushed <= report.scanned_bytes
    assert {name: data for name, data in contents_of(path).items() if name.endswith(".log")} == {
        name: data for name, data in before.items() if name.endswith(".log")
    }


def test_after_a_stop_in_order_no_batch_is_written_again(path: Path) -> None:
    write_log(path)
    disk = WatchedDisk()
    report_of(path, recovery_point=2 * BATCHES, clean=True, disk=disk)
    assert disk.written == []


def test_a_log_that_cannot_be_opened_leaves_no_file_open(path: Path) -> None:
    write_log(path)
    files = segments(path)
    flip(files[1], 100)
    (path / f"{files[1].stem}.index").unlink()
    disk = WatchedDisk()
    with pytest.raises(DamagedLog):
        report_of(path, recovery_point=2 * BATCHES, clean=False, disk=disk)
    assert disk.is_open == []


def test_snapshots_that_no_log_of_this_length_can_have_are_removed(path: Path) -> None:
    write_log(path, checkpoint_at=50)
    whole = sorted(path.glob("*.snapshot"))[0].read_bytes()
    late = path / f"{10_000:020d}.snapshot"
    late.write_bytes(whole)
    check(path, BATCHES, recovery_point=100)
    assert not late.exists()


def test_a_damaged_snapshot_is_passed_over_for_an_older_one(path: Path) -> None:
    write_log(path)
    newest = sorted(path.glob("*.snapshot"))[-1]
    assert len(list(path.glob("*.snapshot"))) > 1
    newest.write_bytes(newest.read_bytes()[:-1])
    check(path, BATCHES, recovery_point=2 * BATCHES, clean=True)


def test_a_snapshot_from_before_the_first_segment_is_of_another_log(path: Path) -> None:
    write_log(path)
    other = ProducerState()
    sent = batch(1, producer_id=9, sequence=0)
    other.update(headers(stamped(sent, 0, 0))[0], 0, NOW)
    for file in [*path.glob("*.snapshot"), segments(path)[0]]:
        file.unlink()
    write_snapshot(RealDisk(), str(path), 1, other.capture())
    log = open_log(str(path), CONFIG, recovery_point=2 * BATCHES, clean=True, log_start_offset=None).log
    assert not log.append_as_leader(sent, log.latest_epoch, NOW).duplicate


def test_a_snapshot_that_an_interrupted_removal_of_old_segments_left_is_removed(path: Path) -> None:
    write_log(path)
    first, second, *_ = segments(path)
    left = path / f"{int(second.stem) - 1:020}.snapshot"
    write_snapshot(RealDisk(), str(path), int(left.stem), [])
    for file in path.glob(f"{first.stem}.*"):
        file.unlink()
    assert left.exists()
    report_of(path, recovery_point=2 * BATCHES, clean=False, log_start_offset=int(second.stem))
    assert not left.exists()
    assert second.with_suffix(".snapshot").exists()
