"""Verification of the index of aborted transactions against the batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.aborted_index import AbortedIndex, AbortedTransaction
from minibroker.broker.storage.inspection.batches import Batch, read_aborted, scan
from minibroker.broker.storage.inspection.verification import Checkpointed, Finding, verify_partition, verify_segment
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.segment import LOG_SUFFIX, file_name
from minibroker.protocol.records import ControlType, EndTransactionMarker
from tests.storage_support import NOW, batch, flip, open_log

COMMIT, ABORT = ControlType.COMMIT, ControlType.ABORT
END = 10
FIRST, SECOND = AbortedTransaction(7, 0, 2, 1), AbortedTransaction(7, 6, 9, 10)


def send(log: Log, producer_id: int, sequence: int = 0) -> None:
    records = batch(1, producer_id=producer_id, producer_epoch=0, sequence=sequence, transactional=True)
    log.append_as_leader(records, 0, NOW)


def end(log: Log, producer_id: int, type: ControlType) -> None:
    log.append_marker(producer_id, 0, EndTransactionMarker(type, 1), 0, NOW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of two segments, from 0 and from 4."""

    async def write() -> None:
        log = open_log(str(tmp_path / "orders-0")).log
        send(log, 7)  # 0
        send(log, 8)  # 1
        end(log, 7, ABORT)  # 2
        send(log, 7, 1)  # 3
        log.roll()
        end(log, 7, COMMIT)  # 4
        end(log, 8, COMMIT)  # 5
        send(log, 7, 2)  # 6
        send(log, 7, 3)  # 7
        log.append_as_leader(batch(1), 0, NOW)  # 8
        end(log, 7, ABORT)  # 9
        await log.checkpoint()
        await log.close()

    asyncio.run(write())
    return tmp_path / "orders-0"


def index(path: Path, base: int) -> Path:
    return path / file_name(base, aborted_index.SUFFIX)


def write_index(path: Path, base: int, *entries: AbortedTransaction) -> None:
    written = AbortedIndex()
    for entry in entries:
        written.append(entry)
    index(path, base).write_bytes(written.encode())


def findings(path: Path, *, recovery_point: int = END, is_compacted: bool | None = False) -> list[Finding]:
    known = Checkpointed(recovery_point, 0, recovery_point, is_compacted)
    return verify_partition(path, known).findings


def test_indexes_that_agree_with_the_batches_are_not_reported(path: Path) -> None:
    assert (read_aborted(index(path, 0)), read_aborted(index(path, 4))) == ([FIRST], [SECOND])
    assert findings(path) == []
    for base in (0, 4):
        known = Checkpointed(END, 0, END, is_compacted=False)
        assert verify_segment(path / file_name(base, LOG_SUFFIX), known).findings == []


def test_a_missing_aborted_transaction_is_reported(path: Path) -> None:
    index(path, 4).unlink()
    [finding] = findings(path)
    assert finding.file == str(index(path, 4))
    assert "it lacks 1 aborted transaction, the first is producer 7, offsets 6 to 9" in finding.problem
    assert findings(path, recovery_point=9) == []  # the next start adds what is behind the recovery point


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (SECOND._replace(first_offset=7), "1 entry at odds with the batches"),
        (SECOND._replace(first_offset=5), "1 entry at odds with the batches"),
        (SECOND._replace(last_stable_offset=8), "1 entry at odds with the batches"),
        (SECOND._replace(producer_id=8), "1 entry at odds with the batches"),
        (SECOND._replace(last_offset=8), "1 entry without an abort marker"),
        (AbortedTransaction(8, 1, 5, 6), "1 entry without an abort marker"),
    ],
)
def test_an_entry_that_the_batches_contradict_is_reported(path: Path, entry: AbortedTransaction, problem: str) -> None:
    write_index(path, 4, *sorted({entry, SECOND} if entry.last_offset == 5 else {entry}, key=lambda e: e.last_offset))
    problems = [finding.problem for finding in findings(path)]
    assert any(problem in each for each in problems), problems
    assert all("overwrite the file with any text" in each for each in problems)


def test_where_batches_may_be_missing_an_entry_may_begin_earlier_than_they_do(path: Path) -> None:
    write_index(path, 4, SECOND._replace(first_offset=5, last_stable_offset=3))
    assert findings(path, is_compacted=True) == []
    write_index(path, 4, SECOND._replace(first_offset=7))
    assert findings(path, is_compacted=True)


def test_a_transaction_that_began_before_the_log_does_is_no_contradiction(path: Path) -> None:
    write_index(path, 4, SECOND._replace(first_offset=2))
    for child in path.glob(f"{0:020}.*"):
        child.unlink()
    known = Checkpointed(END, 4, END, is_compacted=False)
    assert [f for f in verify_partition(path, known).findings if f.file.endswith(aborted_index.SUFFIX)] == []


@pytest.mark.parametrize("base", [0, 4], ids=["sealed", "active"])
@pytest.mark.parametrize("damage", ["a bit", "any text"])
def test_a_damaged_index_is_reported_and_the_next_start_builds_it_again(path: Path, damage: str, base: int) -> None:
    if damage == "a bit":
        flip(index(path, base), 20)
    else:
        index(path, base).write_text("x\n")
    [finding] = findings(path)
    assert "not an index" in finding.problem
    assert "the next start builds it again" in finding.problem

    async def start() -> None:
        log = open_log(str(path), recovery_point=END, clean=True).log
        await log.close()

    asyncio.run(start())
    assert findings(path) == []
    assert (read_aborted(index(path, 0)), read_aborted(index(path, 4))) == ([FIRST], [SECOND])


def test_entries_of_markers_that_cannot_be_read_are_not_reported(path: Path) -> None:
    file = path / file_name(0, LOG_SUFFIX)
    marker = next(part for part in scan(file) if isinstance(part, Batch) and part.header.is_control)
    flip(file, marker.end - 1)
    [finding] = findings(path)
    assert (finding.file, finding.costs_records) == (str(file), True)
