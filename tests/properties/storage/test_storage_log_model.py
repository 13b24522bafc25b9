"""A log against a plain list of batches: appends, reads, truncations, restarts, damaged tails."""

from __future__ import annotations

import asyncio
import os
import tempfile
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import search
from minibroker.broker.storage.indexes.aborted_index import AbortedTransaction
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.producer_state import RETAINED_BATCHES
from minibroker.protocol.records import BatchHeader, ControlType, EndTransactionMarker, decode_control_batch
from tests.storage_support import (
    NOW,
    Opened,
    batch,
    check_indexes,
    everything,
    headers,
    open_log,
    produced,
    stamped,
)

PRODUCERS = 4
TRANSACTIONAL = (2, 3)


class Model:
    """The expected content of the log: its batches as bytes, in order."""

    def __init__(self) -> None:
        self.batches: list[tuple[BatchHeader, bytes]] = []
        self.start = 0

    @property
    def end(self) -> int:
        return self.batches[-1][0].next_offset if self.batches else self.start

    def append(self, data: bytes) -> None:
        position = 0
        for header in headers(data):
            self.batches.append((header, data[position : position + header.size]))
            position += header.size

    def truncate(self, offset: int) -> None:
        self.batches = [entry for entry in self.batches if entry[0].last_offset < offset]

    def read(self, offset: int, max_bytes: int, up_to: int) -> bytes:
        """The expected result of a read if the log had one segment; a read ends at the end of a segment."""
        data = b""
        for header, content in self.batches:
            if header.last_offset >= offset and header.last_offset < up_to:
                if data and len(data) + len(content) > max_bytes:
                    break
                data += content
        return data

    def epochs(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for header, _ in self.batches:
            if not found or found[-1][0] != header.partition_leader_epoch:
                found.append((header.partition_leader_epoch, header.base_offset))
        return found

    def producer(self, producer_id: int) -> list[tuple[int, int]]:
        """Sequence and offset of a producer's last batches."""
        mine = [h for h, _ in self.batches if h.producer_id == producer_id and not h.is_control]
        return [(h.base_sequence, h.base_offset) for h in mine][-RETAINED_BATCHES:]

    def transactions(self) -> tuple[dict[int, int], list[AbortedTransaction]]:
        """The first offsets of open transactions by producer, and the aborted transactions."""
        opened: dict[int, int] = {}
        aborted: list[AbortedTransaction] = []
        for header, content in self.batches:
            if not header.is_control:
                if header.is_transactional:
                    opened.setdefault(header.producer_id, header.base_offset)
            elif (first_offset := opened.pop(header.producer_id, None)) is not None:
                stable = min([*opened.values(), header.next_offset])
                if decode_control_batch(content).type is ControlType.ABORT:
                    aborted.append(AbortedTransaction(header.producer_id, first_offset, header.last_offset, stable))
        return opened, aborted


class Driver:
    """Applies each operation to a log in a directory of real files and to the model."""

    def __init__(self, path: str, random: Random) -> None:
        self.path = path
        self.random = random
        self.model = Model()
        self.epoch = 0
        self.config = LogConfig(
            segment_bytes=random.choice((1_000, 2_000, 10_000)),
            index_interval_bytes=random.choice((1, 100, 1_000)),
            flush_bytes=random.choice((500, 100_000)),
        )
        self.opened: Opened = open_log(path, self.config)

    @property
    def log(self) -> Log:
        return self.opened.log

    def batch(self) -> bytes:
        random = self.random
        producer_id = random.randrange(-1, PRODUCERS)
        mine = self.model.producer(producer_id)
        sequence = 0
        if mine:
            last = next(h for h, _ in self.model.batches if h.base_offset == mine[-1][1])
            sequence = last.last_sequence + 1
        return batch(
            random.randint(1, 5),
            size=random.choice((5, 20, 120)),
            timestamp=NOW + random.randint(0, 1_000),
            producer_id=producer_id,
            sequence=sequence,
            fill=random.randbytes(3),
            transactional=producer_id in TRANSACTIONAL,
        )

    def append_as_leader(self) -> None:
        record_set = self.batch()
        info = self.log.append_as_leader(record_set, self.epoch, NOW)
        assert (info.first_offset, info.duplicate) == (self.model.end, False)
        self.model.append(stamped(record_set, self.model.end, self.epoch))
        assert info.next_offset == self.model.end

    def append_many_as_leader(self) -> None:
        record_sets = [batch(self.random.randint(1, 3), fill=b"many") for _ in range(self.random.randint(2, 3))]
        self.log.append_as_leader(b"".join(record_sets), self.epoch, NOW)
        for record_set in record_sets:
            self.model.append(stamped(record_set, self.model.end, self.epoch))

    def append_as_follower(self) -> None:
        data = b""
        for _ in range(self.random.randint(1, 3)):
            piece = stamped(self.batch(), self.model.end, self.epoch)
            self.model.append(piece)
            data += piece
            self.epoch += self.random.random() < 0.1
        self.log.append_as_follower(data)

    def repeat_a_batch(self) -> None:
        for producer_id in range(PRODUCERS):
            mine = self.model.producer(producer_id)
            if mine:
                _, offset = self.random.choice(mine)
                content = next(data for header, data in self.model.batches if header.base_offset == offset)
                info = self.log.append_as_leader(produced(content), self.epoch, NOW)
                assert info.duplicate
                assert info.first_offset == offset

    def end_a_transaction(self) -> None:
        producer_id = self.random.choice(TRANSACTIONAL)
        marker = EndTransactionMarker(self.random.choice(list(ControlType)), 1)
        info = self.log.append_marker(producer_id, 0, marker, self.epoch, NOW)
        assert info.first_offset == self.model.end
        self.model.append(self.log.read(info.first_offset, 1, info.next_offset))

    def read_committed(self) -> None:
        """An abort is told to every reader of a record that it takes back, and to none far away."""
        opened, aborted = self.model.transactions()
        stable = min([*opened.values(), self.model.end])
        start = self.random.randint(self.model.start, max(stable, self.model.start))
        up_to = self.random.randint(start, max(stable, start))
        told = self.log.aborted_transactions(start, up_to)
        assert told == [one for one in aborted if one.first_offset < up_to and one.last_offset >= start]

    def new_leader(self) -> None:
        self.epoch += 1
        self.log.assign_epoch_start(self.epoch, self.log.log_end_offset)
        assert self.log.end_offset_for(self.epoch) == (self.epoch, self.model.end)

    def read(self) -> None:
        start = self.random.randint(self.model.start, self.model.end)
        up_to = self.random.randint(start, self.model.end + 2)
        max_bytes = self.random.choice((1, 200, 1_000, 1_000_000))
        data = self.log.read(start, max_bytes, up_to)
        assert self.model.read(start, max_bytes, up_to).startswith(data)
        possible = any(start <= h.last_offset < up_to for h, _ in self.model.batches)
        assert bool(data) == possible
        if len(data) > max_bytes:
            assert len(headers(data)) == 1
        unforced = self.log.read(start, max_bytes, up_to, min_one=False)
        assert unforced == (data if len(data) <= max_bytes else b"")

    def count_bytes(self) -> None:
        bounds = sorted((self._boundary(), self._boundary()))
        expected = sum(h.size for h, _ in self.model.batches if bounds[0] <= h.base_offset < bounds[1])
        assert self.log.bytes_between(*bounds) == expected

    def _boundary(self) -> int:
        return self.random.choice([self.model.start, *(h.next_offset for h, _ in self.model.batches)])

    def look_up_a_timestamp(self) -> None:
        timestamp = NOW + self.random.randint(-1, 1_010)
        up_to = self.random.randint(self.model.start, self.model.end)
        expected = None
        for header, _ in self.model.batches:
            for index in range(header.last_offset_delta + 1):
                record = header.base_timestamp + index, header.base_offset + index
                if expected is None and record[0] >= timestamp and record[1] < up_to:
                    expected = record
        assert finish_at_once(search.offset_for_timestamp(self.log, timestamp, up_to)) == expected

    def look_up_the_newest(self) -> None:
        up_to = self.random.randint(self.model.start, self.model.end)
        records = [
            (header.base_timestamp + index, -header.base_offset - index)
            for header, _ in self.model.batches
            for index in range(header.last_offset_delta + 1)
            if self.model.start <= header.base_offset + index < up_to
        ]
        timestamp, negated = max(records, default=(-1, 0))
        assert finish_at_once(search.newest_record(self.log, up_to)) == ((timestamp, -negated) if records else None)

    def truncate(self) -> None:
        offset = self.random.randint(self.model.start, self.model.end + 1)
        self.log.truncate_to(offset)
        self.model.truncate(offset)
        self.epoch += 1

    def truncate_fully(self) -> None:
        offset = self.random.randint(self.model.start, self.model.end + 10)
        self.log.truncate_fully_and_start_at(offset)
        self.model.batches.clear()
        self.model.start = offset
        self.epoch += 1

    def roll(self) -> None:
        self.log.roll()

    async def flush(self) -> None:
        await self.log.flush()
        assert self.log.recovery_point == self.model.end

    async def restart(self) -> None:
        await self.log.checkpoint()
        await self._reopen(recovery_point=self.log.recovery_point, clean=True)
        assert self.opened.log.recovery_point == self.model.end

    async def crash(self) -> None:
        await self._reopen(recovery_point=self.random.randint(0, self.log.recovery_point), clean=False)

    async def crash_with_a_damaged_tail(self) -> None:
        """Cut or overwrite the log somewhere in its unflushed part; the flushed part must survive."""
        recovery_point = self.log.recovery_point
        await self._finish()
        self._damage_the_tail(recovery_point)
        self._open(recovery_point=recovery_point, clean=False)

    def _damage_the_tail(self, recovery_point: int) -> None:
        name = sorted(name for name in os.listdir(self.path) if name.endswith(".log"))[-1]
        base = int(name[:-4])
        safe = sum(len(data) for h, data in self.model.batches if base <= h.base_offset < recovery_point)
        with open(f"{self.path}/{name}", "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size == safe:
                return
            position = self.random.randrange(safe, size)
            kept = sum(1 for h, _ in self.model.batches if h.base_offset < base)
            start = 0
            while start + len(self.model.batches[kept][1]) <= position:
                start += len(self.model.batches[kept][1])
                kept += 1
            # The CRC covers neither base offset nor leader epoch.
            if self.random.random() < 0.5 or position - start in _UNCHECKED:
                file.truncate(position)
            else:
                file.seek(position)
                byte = file.read(1)[0]
                file.seek(position)
                file.write(bytes((byte ^ 0x55,)))
        del self.model.batches[kept:]

    async def _finish(self) -> None:
        await self.log.close()
        self.epoch += 1

    async def _reopen(self, *, recovery_point: int, clean: bool) -> None:
        await self._finish()
        self._open(recovery_point=recovery_point, clean=clean)

    def _open(self, *, recovery_point: int, clean: bool) -> None:
        self.opened = open_log(
            self.path, self.config, recovery_point=recovery_point, clean=clean, log_start_offset=self.model.start
        )

    def check(self) -> None:
        log, model = self.log, self.model
        assert (log.log_start_offset, log.log_end_offset) == (model.start, model.end)
        assert log.recovery_point <= log.log_end_offset
        check_indexes(log)
        assert everything(log) == b"".join(data for _, data in model.batches)
        assert log.size == sum(len(data) for _, data in model.batches)
        opened, aborted = model.transactions()
        assert log.last_stable_offset(model.end) == min([*opened.values(), model.end])
        assert [one for segment in log.segments_from(0) for one in segment.aborted] == aborted
        for epoch, start in model.epochs():
            assert log.epoch_at(start) == epoch
        assert log.latest_epoch in (self.epoch, *(epoch for epoch, _ in model.epochs()[-1:]), -1)


_UNCHECKED = (*range(8), *range(12, 16))

_SYNCHRONOUS = (
    Driver.append_as_leader,
    Driver.append_as_leader,
    Driver.append_as_leader,
    Driver.append_many_as_leader,
    Driver.append_as_follower,
    Driver.append_as_follower,
    Driver.end_a_transaction,
    Driver.end_a_transaction,
    Driver.repeat_a_batch,
    Driver.new_leader,
    Driver.read,
    Driver.read,
    Driver.count_bytes,
    Driver.look_up_a_timestamp,
    Driver.look_up_the_newest,
    Driver.read_committed,
    Driver.truncate,
    Driver.truncate_fully,
    Driver.roll,
)
_ASYNCHRONOUS = (Driver.flush, Driver.restart, Driver.crash, Driver.crash_with_a_damaged_tail)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_a_log_holds_the_same_batches_as_a_plain_list(seed: int, steps: int) -> None:
    async def run() -> None:
        random = Random(seed)
        with tempfile.TemporaryDirectory() as directory:
            driver = Driver(f"{directory}/orders-0", random)
            for _ in range(steps):
                choice = random.randrange(len(_SYNCHRONOUS) + len(_ASYNCHRONOUS))
                if choice < len(_SYNCHRONOUS):
                    if choice >= 15 and random.random() < 0.7:
                        continue
                    _SYNCHRONOUS[choice](driver)
                else:
                    await _ASYNCHRONOUS[choice - len(_SYNCHRONOUS)](driver)
                assert driver.opened.directory.failure is None
                driver.check()
                await asyncio.sleep(0)
            await driver.log.close()

    asyncio.run(run())
