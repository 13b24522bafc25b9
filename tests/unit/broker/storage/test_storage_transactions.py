"""Transactions in a log: what is open, what is stable, what was aborted, whatever becomes of the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.aborted_index import AbortedIndex, AbortedTransaction
from minibroker.broker.storage.indexes.index import InvalidIndex
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.segment import file_name
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.records import NO_SEQUENCE, ControlType, EndTransactionMarker
from tests.storage_support import NOW, batch, flip, open_log

EPOCH = 3


def send(log: Log, producer_id: int, sequence: int = 0, *, epoch: int = 0, count: int = 1) -> None:
    record_set = batch(count, producer_id=producer_id, producer_epoch=epoch, sequence=sequence, transactional=True)
    log.append_as_leader(record_set, EPOCH, NOW)


def end(log: Log, producer_id: int, type: ControlType, *, epoch: int = 0, coordinator_epoch: int = 1) -> None:
    log.append_marker(producer_id, epoch, EndTransactionMarker(type, coordinator_epoch), EPOCH, NOW)


def stable(log: Log) -> int:
    return log.last_stable_offset(log.log_end_offset)


def aborted(log: Log) -> list[AbortedTransaction]:
    return log.aborted_transactions(log.log_start_offset, log.log_end_offset)


async def test_the_oldest_open_transaction_holds_the_last_stable_offset(tmp_path: Path) -> None:
    log = open_log(f"{tmp_path}/orders-0").log
    log.append_as_leader(batch(2), EPOCH, NOW)
    send(log, 7)
    send(log, 8)
    assert stable(log) == 2
    end(log, 8, ControlType.COMMIT)
    assert stable(log) == 2
    end(log, 7, ControlType.COMMIT)
    assert stable(log) == log.log_end_offset == 6
    await log.close()


async def test_a_transaction_counts_as_open_until_its_marker_is_replicated(tmp_path: Path) -> None:
    log = open_log(f"{tmp_path}/orders-0").log
    send(log, 7)
    end(log, 7, ControlType.COMMIT)
    send(log, 8)
    end(log, 8, ControlType.ABORT)
    assert [log.last_stable_offset(watermark) for watermark in range(5)] == [0, 0, 2, 2, 4]
    log.forget_replicated(2)
    assert [log.last_stable_offset(watermark) for watermark in (2, 3, 4)] == [2, 2, 4]
    await log.close()


async def test_a_marker_that_was_not_replicated_at_a_restart_still_counts_as_such(tmp_path: Path) -> None:
    first = open_log(f"{tmp_path}/orders-0")
    send(first.log, 7)
    end(first.log, 7, ControlType.COMMIT)
    await first.log.checkpoint()
    await first.log.close()
    log = open_log(f"{tmp_path}/orders-0", recovery_point=2, clean=True, high_watermark=1).log
    assert log.last_stable_offset(1) == 0
    assert log.last_stable_offset(2) == 2
    await log.close()


@pytest.mark.parametrize("is_checkpointed", [False, True])
async def test_a_restart_knows_open_and_aborted_transactions(tmp_path: Path, is_checkpointed: bool) -> None:
    first = open_log(f"{tmp_path}/orders-0").log
    send(first, 7)
    end(first, 7, ControlType.ABORT)
    send(first, 8)
    if is_checkpointed:
        await first.checkpoint()
    await first.close()
    log = open_log(f"{tmp_path}/orders-0", recovery_point=first.recovery_point).log
    assert aborted(log) == [AbortedTransaction(7, 0, 1, 2)]
    assert stable(log) == 2
    end(log, 8, ControlType.ABORT)
    assert aborted(log) == [AbortedTransaction(7, 0, 1, 2), AbortedTransaction(8, 2, 3, 4)]
    await log.close()


@pytest.mark.parametrize("is_checkpointed", [False, True])
async def test_a_truncation_of_the_marker_opens_the_transaction_again(tmp_path: Path, is_checkpointed: bool) -> None:
    log = open_log(f"{tmp_path}/orders-0").log
    send(log, 7)
    end(log, 7, ControlType.COMMIT)
    if is_checkpointed:
        await log.checkpoint()
    log.truncate_to(1)
    assert (stable(log), aborted(log)) == (0, [])
    send(log, 7, 1)
    end(log, 7, ControlType.ABORT)
    both = [AbortedTransaction(7, 0, 2, 3)]
    assert (stable(log), aborted(log)) == (3, both)
    await log.checkpoint()
    await log.close()
    again = open_log(f"{tmp_path}/orders-0", recovery_point=3, clean=True).log
    assert (stable(again), aborted(again)) == (3, both)
    again.truncate_to(2)
    assert (stable(again), aborted(again)) == (0, [])
    await again.close()


async def test_a_damaged_index_is_built_again_from_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_log(f"{tmp_path}/orders-0").log
    for sequence in range(2):
        send(first, 7, sequence)
        end(first, 7, ControlType.ABORT)
    found = aborted(first)
    await first.checkpoint()
    await first.close()
    path = tmp_path / "orders-0" / file_name(0, aborted_index.SUFFIX)
    for position in (1, 20, aborted_index.ENTRY_SIZE - 1):
        flip(path, position)
        log = open_log(f"{tmp_path}/orders-0", recovery_point=4, clean=True).log
        assert aborted(log) == found
        assert "building the aborted transactions again" in caplog.text
        caplog.clear()
        await log.checkpoint()
        await log.close()
    assert path.stat().st_size == 2 * aborted_index.ENTRY_SIZE


async def test_a_marker_of_a_fenced_producer_or_coordinator_is_refused(tmp_path: Path) -> None:
    log = open_log(f"{tmp_path}/orders-0").log
    send(log, 7, epoch=5)
    end(log, 7, ControlType.COMMIT, epoch=5, coordinator_epoch=4)
    for epoch, coordinator_epoch, code in (
        (4, 4, ErrorCode.INVALID_PRODUCER_EPOCH),
        (5, 3, ErrorCode.TRANSACTION_COORDINATOR_FENCED),
    ):
        with pytest.raises(BrokerError) as refused:
            end(log, 7, ControlType.ABORT, epoch=epoch, coordinator_epoch=coordinator_epoch)
        assert refused.value.code is code
    assert log.log_end_offset == 2
    await log.close()


async def test_a_late_batch_of_an_ended_transaction_is_refused_once_the_marker_moved_the_epoch(tmp_path: Path) -> None:
    log = open_log(f"{tmp_path}/orders-0").log
    send(log, 7)
    end(log, 7, ControlType.COMMIT, epoch=1)
    with pytest.raises(BrokerError) as refused:
        send(log, 7, 1)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
    send(log, 7, epoch=1)
    assert stable(log) == 2
    await log.close()


async def test_a_coordinators_batch_without_sequence_opens_a_transaction_and_is_fenced_by_epoch(tmp_path: Path) -> None:
    partition = TopicPartition(OFFSETS_TOPIC, 0)
    first = open_log(f"{tmp_path}/{partition}", partition=partition)
    for _ in range(2):  # the second is no repetition
        send(first.log, 7, NO_SEQUENCE, epoch=1)
    assert (first.log.log_end_offset, stable(first.log)) == (2, 0)
    await first.log.checkpoint()
    await first.log.close()
    log = open_log(f"{tmp_path}/{partition}", partition=partition, recovery_point=1).log
    assert stable(log) == 0
    end(log, 7, ControlType.ABORT, epoch=2)
    assert stable(log) == log.log_end_offset == 3
    assert aborted(log) == [AbortedTransaction(7, 0, 2, 3)]
    with pytest.raises(BrokerError) as refused:
        send(log, 7, NO_SEQUENCE, epoch=1)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
    await log.close()


async def test_a_client_may_not_leave_out_the_sequence_in_a_transaction(tmp_path: Path) -> None:
    log = open_log(f"{tmp_path}/orders-0").log
    with pytest.raises(BrokerError) as refused:
        send(log, 7, NO_SEQUENCE)
    assert refused.value.code is ErrorCode.INVALID_RECORD
    await log.close()


def test_an_index_file_that_goes_on_past_what_is_trusted_is_read_up_to_there() -> None:
    index = AbortedIndex()
    for offset in (3, 8, 12):
        index.append(AbortedTransaction(7, offset - 1, offset, offset + 1))
    data = index.encode()
    found = AbortedIndex.decode(data, below=9)
    assert [one.last_offset for one in found] == [3, 8]
    assert not found.is_written
    assert AbortedIndex.decode(data, below=13).is_written
    for cut in (1, aborted_index.ENTRY_SIZE - 1):
        with pytest.raises(InvalidIndex):
            AbortedIndex.decode(data[:cut], below=13)
