"""Compaction of logs with transactions: which records count, how long markers stay, and what readers are told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from minibroker.broker.storage.compaction.cleanable import Cleanable
from minibroker.broker.storage.compaction.key_map import ENTRY_BYTES, KeyMap
from minibroker.broker.storage.inspection.verification import Checkpointed, verify_partition
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.records import (
    BatchFilter,
    ControlType,
    EndTransactionMarker,
    decode_batch,
    encode_batch,
    iterate_batches,
)
from tests.storage_support import NOW, Opened, everything, open_log

CONFIG = LogConfig(compact=True, delete_retention_ms=1_000, index_interval_bytes=1)
COMMIT, ABORT = ControlType.COMMIT, ControlType.ABORT
PLAIN = -1


class Writer:
    """Writes to a log. Each batch has one record; its value is its offset."""

    def __init__(self, path: Path) -> None:
        self.opened: Opened = open_log(str(path), CONFIG)
        self._sequences: dict[int, int] = {}

    @property
    def log(self) -> Log:
        return self.opened.log

    def put(self, producer_id: int, key: bytes) -> None:
        sequence = self._sequences.get(producer_id, 0)
        is_transactional = producer_id != PLAIN
        data = encode_batch(
            [b"%d" % self.log.log_end_offset],
            keys=[key],
            base_timestamp=NOW,
            producer_id=producer_id,
            producer_epoch=0 if is_transactional else -1,
            base_sequence=sequence if is_transactional else -1,
            transactional=is_transactional,
        )
        self._sequences[producer_id] = sequence + 1
        self.log.append_as_leader(bytes(data), 0, NOW)

    def end(self, producer_id: int, type: ControlType) -> None:
        self.log.append_marker(producer_id, 0, EndTransactionMarker(type, 1), 0, NOW)

    def roll(self) -> None:
        async def run() -> None:
            self.log.roll()
            await self.log.checkpoint()

        asyncio.run(run())

    def compact(self) -> None:
        async def unpaced(done: int, stopped: asyncio.Event) -> None:
            """Do not wait."""

        self.roll()
        what = Cleanable(self.log.first_dirty_offset, self.log.log_end_offset, 0, 1)
        assert asyncio.run(self.log.compact(what, KeyMap(100 * ENTRY_BYTES, b""), unpaced))

    def pass_retention(self) -> None:
        """Mark what may go, and let the time pass after which it goes."""
        for key in (b"x", b"y"):
            self.put(PLAIN, key)
            self.compact()
            self.opened.world.clock.now_ms += CONFIG.delete_retention_ms

    def reopened(self, path: Path) -> Log:
        asyncio.run(self.log.close())
        return open_log(str(path), CONFIG, recovery_point=self.log.log_end_offset, clean=True).log


def kept(log: Log) -> list[int]:
    """The first offsets of batches and markers."""
    return [header.base_offset for header, _, _ in iterate_batches(everything(log))]


def stable(log: Log) -> int:
    return log.last_stable_offset(log.log_end_offset)


def read_committed(log: Log, offset: int) -> Sequence[int]:
    data = log.read(offset, 1 << 20, stable(log))
    hidden = BatchFilter(log.aborted_transactions(offset, stable(log)))
    shown: list[int] = []
    for header, start, _ in iterate_batches(data):
        if not hidden.hides(header):
            shown += decode_batch(data, header, start).offsets
    return shown


def test_an_aborted_record_does_not_take_the_place_of_a_committed_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(PLAIN, b"a")  # 0
    writer.put(7, b"a")  # 1
    writer.end(7, ABORT)  # 2
    writer.put(8, b"b")  # 3
    writer.end(8, COMMIT)  # 4
    writer.compact()
    assert read_committed(writer.log, 0) == [0, 3]


def test_a_marker_stays_as_long_as_a_batch_of_its_transaction(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(7, b"a")  # 0 stays for ever
    writer.end(7, COMMIT)  # 1
    writer.put(7, b"b")  # 2 is replaced by 4
    writer.end(7, COMMIT)  # 3
    writer.put(7, b"b")  # 4
    writer.end(7, COMMIT)  # 5
    for number in range(5):  # 7's last five batches stay in any case
        writer.put(7, b"%d" % number)
        writer.end(7, COMMIT)
    writer.pass_retention()
    assert {0, 1} <= set(kept(writer.log))
    assert not {2, 3} & set(kept(writer.log))
    log = writer.reopened(tmp_path)
    assert stable(log) == log.log_end_offset
    assert log.aborted_transactions(0, log.log_end_offset) == []


def test_an_abort_leaves_the_index_with_its_marker(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(PLAIN, b"a")  # 0 stays: a leader epoch begins with it
    writer.put(7, b"b")  # 1
    writer.end(7, ABORT)  # 2
    for number in range(6):
        writer.put(7, b"%d" % number)  # 3, 5, ... 13
        writer.end(7, COMMIT)
    writer.compact()
    assert 2 in kept(writer.log)
    assert [one.first_offset for one in writer.log.aborted_transactions(0, 4)] == [1]
    assert read_committed(writer.log, 0) == [0, *range(3, 14, 2)]
    writer.pass_retention()
    assert not {1, 2} & set(kept(writer.log))
    # If 7 were still listed, a reader would skip its next transaction, up to that one's marker.
    committed = [0, *range(3, 14, 2), 15, 16]
    assert read_committed(writer.log, 0) == committed
    assert read_committed(writer.reopened(tmp_path), 0) == committed
    report = verify_partition(tmp_path, Checkpointed(recovery_point=17, is_compacted=True))
    assert report.findings == []
