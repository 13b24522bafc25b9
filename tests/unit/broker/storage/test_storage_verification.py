"""The findings in whole files, and in files with one wrong byte."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.broker.storage.checkpoints import (
    CLEANER_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    LEADER_EPOCH_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    EpochEntry,
    MetaProperties,
    decode_epochs,
    encode_epochs,
    encode_meta_properties,
    encode_offsets,
    encode_topic_id,
    sealed,
    unsealed,
)
from minibroker.broker.storage.inspection.batches import BadBytes, Batch, scan
from minibroker.broker.storage.inspection.verification import (
    Checkpointed,
    Finding,
    PartitionReport,
    checkpointed,
    is_in_use,
    verify_data_directory,
    verify_partition,
    verify_segment,
)
from minibroker.protocol.records import ControlType, EndTransactionMarker, encode_control_batch
from minibroker.protocol.world.real import RealLock
from tests.storage_support import (
    BATCHES,
    CONFIG,
    NOW,
    PARTITION,
    batch,
    content,
    flip,
    open_log,
    segments,
    stamped,
    write_log,
)

END = 2 * BATCHES


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of several segments, all flushed."""
    path = tmp_path_factory.mktemp("data") / str(PARTITION)
    write_log(path)
    (path / PARTITION_METADATA_FILE).write_bytes(encode_topic_id("AAAAAAAAAAAAAAAAAAAAAA"))
    return path


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / str(PARTITION)))


def verified(path: Path, recovery_point: int = END) -> PartitionReport:
    return verify_partition(path, Checkpointed(recovery_point, 0, END))


def only(report: PartitionReport) -> Finding:
    [finding] = report.findings
    return finding


def test_a_whole_log_is_counted_and_nothing_is_wrong(path: Path) -> None:
    report = verified(path)
    assert report.findings == []
    assert (report.batches, report.records, report.log_start_offset, report.log_end_offset) == (BATCHES, END, 0, END)
    assert report.segments == len(segments(path)) > 2
    assert report.bytes == sum(file.stat().st_size for file in segments(path))


def test_each_byte_of_a_segment_is_in_a_batch_or_among_the_bad_ones(path: Path) -> None:
    file = segments(path)[1]
    size = file.stat().st_size
    flip(file, 70)
    flip(file, size - 5)
    parts = list(scan(file))
    assert [type(part) for part in parts].count(BadBytes) == 2
    assert [part.position for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == size


def test_bytes_that_are_wrong_in_the_middle_are_named_with_the_offsets_that_are_missing(path: Path) -> None:
    file = segments(path)[1]
    third = [part for part in scan(file) if isinstance(part, Batch)][2]
    flip(file, third.position + 80)
    finding = only(verified(path))
    assert (finding.file, finding.position, finding.end) == (str(file), third.position, third.end)
    assert finding.offset == third.header.base_offset
    assert finding.costs_records
    assert f"offsets {third.header.base_offset} to {third.header.last_offset} are missing" in finding.problem
    assert "CRC" in finding.problem


def test_a_batch_that_is_cut_short_at_the_end_of_a_page_is_a_torn_append_and_costs_nothing(path: Path) -> None:
    file = segments(path)[-1]
    torn = stamped(batch(1, size=5_000), END, 2)
    with file.open("ab") as log:
        log.write(torn[: 4_096 - log.tell() % 4_096])
    report = verify_partition(path, Checkpointed(END - 2))
    finding = only(report)
    assert "the next start cuts" in finding.problem
    assert not finding.costs_records
    assert report.log_end_offset == END


def test_a_batch_that_is_cut_short_in_the_middle_of_a_page_costs_its_records(path: Path) -> None:
    file = segments(path)[-1]
    os.truncate(file, file.stat().st_size - 7)
    report = verify_partition(path, Checkpointed(END - 2))
    finding = only(report)
    assert f"nothing can be read from offset {END - 2} on" in finding.problem
    assert finding.costs_records
    assert report.log_end_offset == END - 2


def test_a_log_that_ends_before_what_was_on_disk_or_committed_is_short_of_records(path: Path) -> None:
    segments(path)[-1].unlink()
    findings = verified(path).findings
    assert [Path(finding.file).name for finding in findings if finding.costs_records] == [
        RECOVERY_POINT_FILE,
        HIGH_WATERMARK_FILE,
    ]


def test_a_segment_that_is_missing_in_the_middle_leaves_a_gap(path: Path) -> None:
    files = segments(path)
    files[1].unlink()
    findings = [finding for finding in verified(path).findings if finding.costs_records]
    assert [finding.file for finding in findings] == [str(files[2])]
    assert f"ends at {int(files[1].stem)}" in findings[0].problem


def test_a_first_segment_that_is_missing_is_missed_where_the_log_should_begin_there(path: Path) -> None:
    segments(path)[0].unlink()
    [finding] = [finding for finding in verified(path).findings if finding.costs_records]
    assert "should begin at offset 0" in finding.problem


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda file: file.unlink(), "missing"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "not a multiple"),
        (lambda file: flip(file, file.stat().st_size - 1), "fit no batch|do not increase"),
    ],
)
def test_an_index_that_does_not_fit_its_batches_is_named_and_costs_no_records(
    path: Path, suffix: str, spoil: Callable[[Path], None], problem: str
) -> None:
    file = segments(path)[1].with_suffix(suffix)
    assert file.stat().st_size
    spoil(file)
    finding = only(verified(path))
    assert finding.file == str(file)
    assert re.search(problem, finding.problem)
    assert not finding.costs_records


def test_what_the_files_beside_the_batches_say_from_the_recovery_point_on_counts_for_nothing(path: Path) -> None:
    last = segments(path)[-1]
    recovery_point = int(last.stem)
    for suffix in (".index", ".timeindex"):
        index = last.with_suffix(suffix)
        os.truncate(index, 0)
        index.write_bytes(bytes(range(24)))
    last.with_name(f"{END:020d}.snapshot").write_bytes(b"half a snapshot")
    assert verified(path, recovery_point).findings == []
    assert verified(path, END).findings != []


def test_a_damaged_snapshot_is_named(path: Path) -> None:
    file = sorted(path.glob("*.snapshot"))[0]
    flip(file, 8)
    assert only(verified(path)).file == str(file)


def test_leader_epochs_that_the_batches_contradict_are_named(path: Path) -> None:
    file = path / LEADER_EPOCH_FILE
    file.write_bytes(sealed(unsealed(str(file), file.read_bytes()).replace(b"1 40", b"1 38")))
    finding = only(verified(path))
    assert finding.file == str(file)
    assert "leader epoch 1 begins at offset 38 by this file, and at 40 by the batches" in finding.problem


def test_a_control_batch_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / str(PARTITION)
    log = open_log(str(path), CONFIG).log
    log.append_as_follower(content(0))
    marker = EndTransactionMarker(ControlType.COMMIT, 3)
    log.append_as_follower(
        encode_control_batch(
            marker, timestamp=NOW, producer_id=1, producer_epoch=0, base_offset=2, partition_leader_epoch=0
        )
    )
    asyncio.run(log.close())
    report = verify_partition(path, Checkpointed())
    assert (report.findings, report.batches, report.records) == ([], 2, 3)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_of_what_a_broker_relies_on_goes_unnoticed(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = Path(shutil.copytree(written, tmp_path_factory.mktemp("flipped") / str(PARTITION)))
    file = data.draw(st.sampled_from(sorted(file for file in path.iterdir() if file.stat().st_size)))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    report = verified(path)
    is_of_the_active_segment = file.stem == segments(path)[-1].stem and file.suffix != ".log"
    if file.name == PARTITION_METADATA_FILE or is_of_the_active_segment:
        return  # any text may be an id, and an entry past the end is left over from before a truncation
    if (
        file.name == LEADER_EPOCH_FILE
        and content.decode("latin-1").split() == (written / file.name).read_text().split()
    ):
        return  # another kind of line break
    assert report.findings


def test_a_data_directory_is_verified_with_what_its_own_files_say(path: Path) -> None:
    data = path.parent
    (data / META_PROPERTIES_FILE).write_bytes(encode_meta_properties(MetaProperties(1, "a cluster")))
    (data / RECOVERY_POINT_FILE).write_bytes(encode_offsets({PARTITION: END}))
    (data / HIGH_WATERMARK_FILE).write_bytes(encode_offsets({PARTITION: END + 1}))
    report = verify_data_directory(data)
    assert report.findings == []
    [partition] = report.partitions
    assert "all below 121 had been committed" in only(partition).problem
    assert checkpointed(path) == Checkpointed(END, None, END + 1, None)
    (data / LOG_START_OFFSET_FILE).write_bytes(encode_offsets({}))
    (data / CLEANER_OFFSET_FILE).write_bytes(encode_offsets({PARTITION: 0}))
    assert checkpointed(path) == Checkpointed(END, 0, END + 1, True)

    shutil.rmtree(path)
    (data / HIGH_WATERMARK_FILE).write_bytes(b"no checkpoint")
    gone, damaged = sorted(verify_data_directory(data).findings, key=lambda finding: finding.file)
    assert "120 records of orders-0 had been on disk, and its directory is gone" in gone.problem
    assert damaged.file.endswith("replication-offset-checkpoint")
    assert damaged.problem.startswith("damaged: ")


def without_the_second_batch(path: Path) -> Path:
    """Write a segment as compaction leaves it, without its indexes."""
    file = segments(path)[1]
    data = file.read_bytes()
    second = [part for part in scan(file) if isinstance(part, Batch)][1]
    file.write_bytes(data[: second.position] + data[second.end :])
    for suffix in (".index", ".timeindex"):
        file.with_suffix(suffix).unlink()
    return file


@pytest.mark.parametrize("is_compacted", [True, False, None])
def test_a_gap_is_a_loss_only_where_the_topic_is_known_not_to_be_compacted(
    path: Path, is_compacted: bool | None
) -> None:
    file = without_the_second_batch(path)
    report = verify_partition(path, Checkpointed(0, 0, END, is_compacted))
    if is_compacted:
        assert report.findings == []
        return
    finding = only(report)
    assert (finding.file, finding.costs_records, finding.is_unclear) == (
        str(file),
        is_compacted is False,
        is_compacted is None,
    )
    if is_compacted is None:
        assert "legal if the topic is or was compacted, lost otherwise" in finding.problem


def test_a_damaged_checkpoint_of_the_cleaner_makes_no_gap_a_loss_and_is_not_to_be_removed(path: Path) -> None:
    without_the_second_batch(path)
    data = path.parent
    (data / META_PROPERTIES_FILE).write_bytes(encode_meta_properties(MetaProperties(1, "a cluster")))
    (data / CLEANER_OFFSET_FILE).write_bytes(encode_offsets({PARTITION: 0}))
    flip(data / CLEANER_OFFSET_FILE, 5)
    report = verify_data_directory(data)
    damaged = report.findings[0]
    assert damaged.problem == (
        "damaged: its checksum is not that of what stands before it; the next start goes on without it, and compacts "
        "from the beginning"
    )
    assert not any(finding.costs_records for finding in report.partitions[0].findings)


def test_leader_epochs_are_right_where_nothing_says_at_which_offset_the_log_starts(path: Path) -> None:
    file = path / LEADER_EPOCH_FILE
    first, *others = decode_epochs(str(file), file.read_bytes())
    file.write_bytes(encode_epochs([EpochEntry(first.epoch, 10), *others]))  # records before 10 were deleted
    assert verify_partition(path, Checkpointed(END, 10, END)).findings == []
    assert verify_partition(path, Checkpointed(END, None, END)).findings == []
    assert only(verify_partition(path, Checkpointed(END, 0, END))).file == str(file)


def test_a_segment_is_verified_by_itself(path: Path) -> None:
    second = segments(path)[1]
    segments(path)[0].unlink()
    report = verify_segment(second, Checkpointed(END, 0, END))
    assert report.findings == []
    assert (report.directory, report.segments, report.log_start_offset) == (str(second), 1, int(second.stem))
    assert report.log_end_offset == int(segments(path)[1].stem)
    flip(second, 80)
    assert only(verify_segment(second, Checkpointed(END, 0, END))).costs_records


def test_a_data_directory_is_in_use_while_a_broker_holds_its_lock(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path)
    lock = RealLock(str(tmp_path / LOCK_FILE))
    assert is_in_use(tmp_path)
    lock.release()
    assert not is_in_use(tmp_path)
