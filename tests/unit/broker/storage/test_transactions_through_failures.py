"""The open transactions of a log after a truncation, a failed append, a long time, and a power cut."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.segment import file_name
from minibroker.broker.storage.snapshots import SNAPSHOT_SUFFIX
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.records import NO_DECISION, ControlType, EndTransactionMarker
from tests.storage_support import NOW, StorageHost, StorageWorld, batch, open_log
from tests.unit.broker.storage.test_storage_transactions import EPOCH, end, send, stable


@pytest.mark.parametrize("is_open_before", [False, True])
async def test_a_transaction_whose_records_are_cut_is_not_open_any_more(tmp_path: Path, is_open_before: bool) -> None:
    """KAFKA-12153: nothing would ever end it."""
    log = open_log(f"{tmp_path}/orders-0").log
    log.append_as_leader(batch(), EPOCH, NOW)
    if is_open_before:
        send(log, 8)
    offset = log.log_end_offset
    send(log, 7)
    end(log, 7, ControlType.COMMIT)
    send(log, 7, 1)
    log.truncate_to(offset)
    assert stable(log) == 1
    assert not any(producer_id == 7 for producer_id, _ in log.producers())
    log.append_as_leader(batch(5), EPOCH, NOW)
    assert stable(log) == (1 if is_open_before else log.log_end_offset)
    await log.close()


async def test_the_decision_of_a_marker_is_known_again_after_a_truncation_or_a_restart_unless_it_was_cut(
    tmp_path: Path,
) -> None:
    """A log that knows less appends a late marker; one that knows more never ends a transaction."""
    log = open_log(f"{tmp_path}/orders-0").log
    log.append_marker(7, 0, marker(10), EPOCH, NOW)
    offset = log.log_end_offset
    log.append_marker(7, 0, marker(12), EPOCH, NOW)
    known = {decision: log.has_marker(7, marker(decision)) for decision in (10, 11, 12, 13, NO_DECISION)}
    assert known == {10: True, 11: True, 12: True, 13: False, NO_DECISION: False}
    assert not log.has_marker(7, marker(10, coordinator_epoch=2))
    log.truncate_to(offset)
    assert [log.has_marker(7, marker(decision)) for decision in (10, 11)] == [True, False]
    await log.close()
    log = open_log(f"{tmp_path}/orders-0").log
    assert [log.has_marker(7, marker(decision)) for decision in (10, 11)] == [True, False]
    log.append_marker(7, 0, marker(3, coordinator_epoch=2), EPOCH, NOW)
    assert [log.has_marker(7, marker(decision, coordinator_epoch=2)) for decision in (3, 4)] == [True, False]
    await log.close()


def marker(decision: int, coordinator_epoch: int = 1) -> EndTransactionMarker:
    return EndTransactionMarker(ControlType.COMMIT, coordinator_epoch, decision)


async def test_nothing_is_stable_that_is_not_replicated(tmp_path: Path) -> None:
    """KAFKA-9807."""
    log = open_log(f"{tmp_path}/orders-0").log
    log.append_as_leader(batch(), EPOCH, NOW)
    log.append_as_leader(batch(), EPOCH, NOW)
    send(log, 7)
    assert [log.last_stable_offset(high_watermark) for high_watermark in range(4)] == [0, 1, 2, 2]
    await log.close()


async def test_a_marker_that_could_not_be_appended_has_ended_nothing() -> None:
    """KAFKA-6683."""
    host = StorageHost(Random(1))
    opened = open_log("/data/orders-0", LogConfig(segment_bytes=150), world=StorageWorld(host.disk))
    log = opened.log
    send(log, 7)
    host.medium.faults.fail("open", errno.EMFILE)
    with pytest.raises(BrokerError):
        end(log, 7, ControlType.ABORT)  # it needs a new segment
    assert (log.log_end_offset, stable(log)) == (1, 0)
    host.medium.faults.clear()
    end(log, 7, ControlType.ABORT)
    assert [(one.producer_id, one.first_offset) for one in log.aborted_transactions(0, 2)] == [(7, 0)]
    assert stable(log) == 2
    await log.close()


async def test_a_producer_with_an_open_transaction_is_never_forgotten(tmp_path: Path) -> None:
    """KAFKA-9144."""
    opened = open_log(f"{tmp_path}/orders-0", LogConfig(producer_id_expiration_ms=60_000))
    log, clock = opened.log, opened.world.clock
    send(log, 7)
    send(log, 8)
    end(log, 8, ControlType.COMMIT)
    for _ in range(10):
        clock.now_ms += 60_000
        await log.checkpoint()
    assert [producer_id for producer_id, _ in log.producers()] == [7]
    end(log, 7, ControlType.COMMIT)
    assert stable(log) == log.log_end_offset
    await log.close()


async def test_a_producer_is_not_forgotten_before_its_time_nor_is_its_coordinators_epoch(tmp_path: Path) -> None:
    """KAFKA-9144."""
    opened = open_log(f"{tmp_path}/orders-0", LogConfig(producer_id_expiration_ms=600_000))
    log, clock = opened.log, opened.world.clock
    send(log, 7)
    end(log, 7, ControlType.COMMIT, coordinator_epoch=5)
    for _ in range(9):
        clock.now_ms += 60_000
        await log.checkpoint()
    send(log, 7, 1)
    with pytest.raises(BrokerError):
        end(log, 7, ControlType.ABORT, coordinator_epoch=4)
    assert stable(log) == 2
    await log.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 100], ids=["empty", "zeros"])
async def test_a_snapshot_that_a_power_cut_has_left_empty_is_not_believed(tmp_path: Path, content: bytes) -> None:
    """KAFKA-9892: the open transaction that it should name would seem to be decided."""
    first = open_log(f"{tmp_path}/orders-0").log
    send(first, 7)
    await first.checkpoint()
    await first.close()
    path = tmp_path / "orders-0" / file_name(1, SNAPSHOT_SUFFIX)
    assert path.exists()
    path.write_bytes(content)
    log = open_log(f"{tmp_path}/orders-0", recovery_point=first.recovery_point).log
    assert stable(log) == 0
    end(log, 7, ControlType.COMMIT)
    assert stable(log) == 2
    await log.close()
