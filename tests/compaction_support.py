"""Shared by tests of compaction: a log with known records, and its invariants after any compaction."""

from __future__ import annotations

import asyncio
from random import Random
from typing import NamedTuple

from minibroker.broker.storage.compaction.key_map import ENTRY_BYTES, KeyMap
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    BatchFilter,
    BatchHeader,
    ControlType,
    EndTransactionMarker,
    decode_batch,
    decode_control_batch,
    encode_batch,
    encode_control_batch,
    iterate_batches,
    parse_header,
)
from minibroker.protocol.records.compression import Compression
from tests.storage_support import (
    NOW,
    PARTITION,
    StorageHost,
    StorageWorld,
    check_indexes,
    everything,
    produced,
    stamped,
)

PRODUCERS = 5
TRANSACTIONAL = (3, 4)
PRODUCER_OF_MARKERS = 77
RETENTION_MS = 10_000


class Known(NamedTuple):
    """A record as it was sent."""

    offset: int
    key: bytes
    value: bytes | None
    timestamp: int
    epoch: int


class Sent(NamedTuple):
    header: BatchHeader
    content: bytes


class CompactedLog:
    """A log on the virtual disk, and its expected contents."""

    def __init__(self, random: Random, *, keys: int = 6) -> None:
        self.random = random
        self.keys = keys
        self.host = StorageHost(random)
        self.config = LogConfig(
            segment_bytes=random.choice((600, 1_500, 5_000)),
            index_interval_bytes=random.choice((1, 150)),
            compact=True,
            delete_retention_ms=RETENTION_MS,
        )
        self.records: dict[int, Known] = {}
        """By offset."""
        self.transactional: dict[int, int] = {}
        """The producers of transactional records, by offset."""
        self.markers: dict[int, bytes] = {}
        """Control batches, by offset."""
        self.batches: list[Sent] = []
        self.gone_from: dict[int, int] = {}
        """Time after which a tombstone may be removed, by its offset: it has been clean for long enough by then."""
        self.high_watermark = 0
        self.epoch = 0
        self.now_ms = NOW
        self.remembers_producers = True
        """No truncation has removed committed records, and with them the producers' state for compacted batches, or the
        ends of transactions."""

    async def open(self) -> None:
        self.world = StorageWorld(self.host.start_process())
        self.world.clock.now_ms = self.now_ms
        self.manager = LogManager(self.world, "/data", 1, default_config=self.config, checkpoint_interval_ms=10**9)
        await self.manager.open("cluster")
        assert not self.manager.damaged, self.manager.damaged
        self.log: Log = await self.manager.get_or_create(PARTITION, "topic", self.config)
        self.epoch += 1
        self.log.assign_epoch_start(self.epoch, self.log.log_end_offset)

    # -- events --

    def append(self) -> None:
        random, end = self.random, self.log.log_end_offset
        count = random.randint(1, 4)
        keys = [b"key-%d" % random.randrange(self.keys) for _ in range(count)]
        values = [None if random.random() < 0.3 else random.randbytes(random.choice((1, 30))) for _ in range(count)]
        deltas = [random.randrange(5) for _ in range(count)]
        producer_id = random.randrange(-1, PRODUCERS)
        known = self.log._producers.get(producer_id)
        transactional = producer_id in TRANSACTIONAL
        record_set = bytes(
            encode_batch(
                values,
                base_timestamp=self.now_ms,
                timestamp_deltas=deltas,
                keys=keys,
                headers=[[("h", b"1")] if random.random() < 0.2 else [] for _ in range(count)],
                compression=random.choice((Compression.NONE, Compression.NONE, Compression.ZSTD)),
                magic=random.choice((MAGIC_COLUMNS, MAGIC_RECORDS)),
                producer_id=producer_id,
                producer_epoch=0 if producer_id >= 0 else -1,
                base_sequence=-1
                if producer_id < 0
                else known.batches[-1].last_sequence + 1
                if known and known.batches
                else 0,
                transactional=transactional,
            )
        )
        for index in range(count):  # before the append: if the machine dies during it, the records may exist
            offset = end + index
            timestamp = self.now_ms + deltas[index]
            if transactional:
                self.transactional[offset] = producer_id
            self.records[offset] = Known(offset, keys[index], values[index], timestamp, self.epoch)
        self.log.append_as_leader(record_set, self.epoch, self.now_ms)
        self._note(stamped(record_set, end, self.epoch))

    def append_marker(self) -> None:
        producer_id = self.random.choice((*TRANSACTIONAL, PRODUCER_OF_MARKERS))
        self._end_transaction(producer_id, self.random.choice(list(ControlType)))

    def commit_transactions(self) -> None:
        for producer_id in TRANSACTIONAL:
            self._end_transaction(producer_id, ControlType.COMMIT)

    def _end_transaction(self, producer_id: int, type: ControlType) -> None:
        end = self.log.log_end_offset
        content = bytes(
            encode_control_batch(
                EndTransactionMarker(type, 1),
                timestamp=self.now_ms,
                producer_id=producer_id,
                producer_epoch=0,
                base_offset=end,
                partition_leader_epoch=self.epoch,
            )
        )
        self.markers[end] = content  # first, as above
        self.log.append_as_follower(content)
        self._note(content)

    def _note(self, content: bytes) -> None:
        [found] = iterate_batches(content)
        self.batches.append(Sent(found.header, content))

    def commit(self) -> None:
        """Advance the high watermark, at most to the recovery point."""
        ends = [sent.header.next_offset for sent in self.batches]
        safe = [end for end in ends if self.high_watermark < end <= self.log.recovery_point]
        if safe:
            self.high_watermark = self.random.choice(safe)
            self.log.forget_replicated(self.high_watermark)

    def truncate(self) -> None:
        """Truncate as a follower does: never below the high watermark."""
        offset = self.random.randint(self.high_watermark, self.log.log_end_offset)
        self.epoch += 1
        self.log.truncate_to(offset)
        self.forget_from(self.log.log_end_offset)

    def truncate_what_is_committed(self) -> None:
        """Truncate as a follower does after an unclean election. Records that were compacted away in favour of
        truncated ones are lost."""
        offset = self.random.randint(self.log.log_start_offset, self.log.log_end_offset)
        self.epoch += 1
        self.log.truncate_to(offset)
        self._adopt()

    def restart(self) -> None:
        """Start again as a follower does whose leader's log begins after its own end."""
        self.epoch += 1
        self.log.truncate_fully_and_start_at(self.log.log_end_offset + self.random.randint(0, 3))
        self._adopt()

    def _adopt(self) -> None:
        self.forget_from(self.log.log_end_offset)
        self.high_watermark = min(self.high_watermark, self.log.log_end_offset)
        found, self.markers, _, _ = self.read()
        self.transactional = {o: p for o, p in self.transactional.items() if o in {record.offset for record in found}}
        self.records = {record.offset: record for record in found}
        self.remembers_producers = False

    def forget_from(self, end: int) -> None:
        self.records = {o: r for o, r in self.records.items() if o < end}
        self.markers = {o: c for o, c in self.markers.items() if o < end}
        self.transactional = {o: p for o, p in self.transactional.items() if o < end}
        self.gone_from = {o: t for o, t in self.gone_from.items() if o < end}
        self.batches = [sent for sent in self.batches if sent.header.last_offset < end]

    async def flush(self) -> None:
        await self.manager.checkpoints.checkpoint_recovery_points()

    async def compact(self, room: int | None = None) -> bool:
        """Run one pass with a map for `room` keys."""
        what = self.log.candidate(self.log.last_stable_offset(self.high_watermark), self.now_ms).cleanable
        if not what.dirty_bytes:
            return False
        room = room or self.random.choice((1, 2, 5, 1_000))
        key_map = KeyMap(room * ENTRY_BYTES, b"salt")

        async def pace(done: int, stopped: asyncio.Event) -> None:
            # Even after an abort or a power cut, swapped segments determine when tombstones may be removed.
            assert self.log._compaction is not None
            tombstones = [record.offset for record in self.records.values() if record.value is None]
            for offset in (*tombstones, *self.markers):
                if offset < self.log._compaction.end:
                    self.gone_from.setdefault(offset, self.now_ms + RETENTION_MS)

        whole = await self.log.compact(what, key_map, pace)
        if whole:
            assert what.first_dirty < self.log.first_dirty_offset <= what.end
            await self.manager.checkpoints.checkpoint_first_dirty_offsets()
        return whole

    def advance_clock(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.world.clock.now_ms = self.now_ms

    async def end_process(self) -> None:
        self.world.executor.before = None
        await self.host.end_process()

    async def start_again(self, *, power_cut: bool) -> None:
        """Restart after a kill of the process."""
        if power_cut:
            self.host.power_cut()
        await self.open()
        assert self.log.log_end_offset >= self.high_watermark
        self.forget_from(self.log.log_end_offset)

    # -- invariants --

    def check(self) -> None:
        log = self.log
        found, markers, last_offset, last_epoch = self.read()
        offsets = [record.offset for record in found]
        assert offsets == sorted(set(offsets))
        assert last_offset == log.log_end_offset - 1 or log.log_start_offset == log.log_end_offset
        for record in found:
            assert record == self.records[record.offset]
        self.check_markers(markers)
        aborted = self.check_transactions(found)
        latest = {record.key: record for record in sorted(self.records.values()) if record.offset not in aborted}
        kept = {record.offset for record in found}
        for record in latest.values():
            if record.offset not in kept:
                assert record.value is None, f"{record} is missing, the latest of its key"
                gone_from = self.gone_from.get(record.offset)
                assert gone_from is not None, f"{record} is missing although it never was clean"
                assert self.now_ms >= gone_from, f"{record} was removed too early"
                older = [other for other in found if other.key == record.key and other.offset not in aborted]
                assert not older, f"{record} no longer deletes"
        clean = [record.key for record in found if record.offset < log.first_dirty_offset]
        assert len(clean) == len(set(clean))
        assert last_epoch <= log.latest_epoch
        self.check_structure()
        if self.remembers_producers:
            self.check_producers()

    def check_markers(self, found: dict[int, bytes]) -> None:
        for offset, content in found.items():
            header, sent = parse_header(content), parse_header(self.markers[offset])
            assert (header.producer_id, header.producer_epoch) == (sent.producer_id, sent.producer_epoch)
            assert decode_control_batch(content) == decode_control_batch(self.markers[offset])
        for offset in self.markers.keys() - found.keys():
            gone_from = self.gone_from.get(offset)
            assert gone_from is not None, f"the marker at {offset} is gone though it never was clean"
            assert self.now_ms >= gone_from, f"the marker at {offset} is gone too early"

    def check_transactions(self, found: list[Known]) -> set[int]:
        """Return the offsets of aborted records. A read_committed reader gets none of them, and waits for no
        transaction that has ended."""
        log, ended = self.log, self._ended()
        aborted = {offset for offset, type in ended.items() if type is ControlType.ABORT}
        undecided = {record.offset for record in found if record.offset in self.transactional.keys() - ended.keys()}
        stable = log.last_stable_offset(log.log_end_offset)
        assert not any(offset < stable for offset in undecided), f"{undecided} are not decided, {stable} is stable"
        assert undecided or stable == log.log_end_offset or not self.remembers_producers, f"stuck at {stable}"
        told = log.aborted_transactions(log.log_start_offset, stable)
        for record in found:
            producer_id = self.transactional.get(record.offset)
            if record.offset >= stable:
                continue
            is_told = any(
                one.producer_id == producer_id and one.first_offset <= record.offset <= one.last_offset for one in told
            )
            assert is_told == (record.offset in aborted), f"{record}, told {told}"
            is_clean = record.offset < log.first_dirty_offset and self.remembers_producers
            assert not (is_told and is_clean), f"{record} is aborted and clean"
        start = self.random.randint(log.log_start_offset, max(stable, log.log_start_offset))
        for offset in (log.log_start_offset, start):
            expected = [r.offset for r in found if offset <= r.offset < stable and r.offset not in aborted]
            assert self.read_committed(offset, stable) == expected, f"read from {offset}"
        return aborted

    def read_committed(self, offset: int, stable: int) -> list[int]:
        """Return the offsets of the records that a reader gets, one answer after the other."""
        shown: list[int] = []
        while offset < stable:
            data = self.log.read(offset, self.random.choice((1, 300, 1 << 20)), stable)
            if not data:
                break
            batches = list(iterate_batches(data))
            end = batches[-1].header.next_offset
            hidden = BatchFilter(self.log.aborted_transactions(offset, end))
            for header, start, _ in batches:
                if not hidden.hides(header):
                    shown += [one for one in decode_batch(data, header, start).offsets if offset <= one < stable]
            offset = end
        return shown

    def _ended(self) -> dict[int, ControlType]:
        """How the transactions of records have ended, by offset."""
        ends: dict[int, list[tuple[int, ControlType]]] = {}
        for offset, content in sorted(self.markers.items()):
            ends.setdefault(parse_header(content).producer_id, []).append((offset, decode_control_batch(content).type))
        found: dict[int, ControlType] = {}
        for offset, producer_id in self.transactional.items():
            marker = next((type for at, type in ends.get(producer_id, []) if at > offset), None)
            if marker is not None:
                found[offset] = marker
        return found

    def read(self) -> tuple[list[Known], dict[int, bytes], int, int]:
        """Return all records, all control batches, the last offset, and the last batch's epoch."""
        found: list[Known] = []
        markers: dict[int, bytes] = {}
        next_offset = 0
        epoch = -1
        data = everything(self.log)
        for header, start, end in iterate_batches(data):
            assert header.base_offset >= next_offset
            next_offset = header.next_offset
            assert header.partition_leader_epoch >= epoch
            epoch = header.partition_leader_epoch
            batch = decode_batch(data, header, start)
            if header.is_control:
                markers[header.base_offset] = data[start:end]
                continue
            for index, timestamp in enumerate(batch.timestamps):
                key = None if batch.keys is None else batch.keys[index]
                assert key is not None
                found.append(Known(batch.offsets[index], key, batch.values[index], timestamp, epoch))
            assert not batch.count or header.max_timestamp == max(batch.timestamps)
        return found, markers, next_offset - 1, epoch

    def check_structure(self) -> None:
        log = self.log
        check_indexes(log)
        extents = log.extents()
        for extent, segment in zip(extents[:-1], log._segments, strict=False):
            [*_, (_, last)] = segment.walk(0, segment.size)
            assert last.next_offset == extent.end_offset
        for offset in range(log.log_start_offset, log.log_end_offset):
            data = log.read(offset, 1, log.log_end_offset)
            assert next(iterate_batches(data)).header.last_offset >= offset

    def check_producers(self) -> None:
        """Check that each of a producer's last five batches is recognized as a duplicate."""
        for producer_id in range(PRODUCERS):
            mine = [s for s in self.batches if s.header.producer_id == producer_id and not s.header.is_control]
            for sent in mine[-5:]:
                info = self.log.append_as_leader(produced(sent.content), self.epoch, self.now_ms)
                assert (info.duplicate, info.first_offset) == (True, sent.header.base_offset)

    async def check_producers_of_a_copy(self) -> None:
        """Like `check_producers`, for a replica that was built from this log's batches."""
        world = StorageWorld(StorageHost(Random(1)).start_process())
        manager = LogManager(world, "/data", 2, default_config=self.config, checkpoint_interval_ms=10**9)
        await manager.open("cluster")
        copy = await manager.get_or_create(PARTITION, "topic", self.config)
        data = everything(self.log)
        if self.log.log_start_offset:
            copy.truncate_fully_and_start_at(self.log.log_start_offset)
        if data:
            copy.append_as_follower(data)
        assert everything(copy) == data
        mine, self.log = self.log, copy
        self.check_transactions(self.read()[0])
        if self.remembers_producers:
            self.check_producers()
        self.log = mine
        await manager.close()
