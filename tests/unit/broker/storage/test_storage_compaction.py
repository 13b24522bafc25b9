"""Compaction of logs with hand-made records: the result, byte by byte and file by file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from time import thread_time
from typing import Any, TypeVar

import msgspec
import pytest

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import search
from minibroker.broker.storage.compaction import cleaning as compaction
from minibroker.broker.storage.compaction.cleanable import Cleanable
from minibroker.broker.storage.compaction.cleaning import CannotBeCleaned
from minibroker.broker.storage.compaction.key_map import ENTRY_BYTES, KeyMap
from minibroker.broker.storage.inspection.verification import Checkpointed, verify_partition
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.recovery.recovery import DamagedLog
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import (
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    MAX_BATCH_BYTES,
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    MAX_RECORDS,
    ControlType,
    EndTransactionMarker,
    Header,
    decode_batch,
    encode_batch,
    encode_control_batch,
    iterate_batches,
    parse_header,
    rewriting,
    with_records,
)
from minibroker.protocol.records.columns import encode_columns
from minibroker.protocol.records.header import write_header
from tests.storage_support import (
    NOW,
    Clock,
    Opened,
    StorageWorld,
    everything,
    flip,
    open_log,
    segments,
    stamped,
)

T = TypeVar("T")

CONFIG = LogConfig(compact=True, delete_retention_ms=1_000, index_interval_bytes=1)
SMALL = LogConfig(compact=True, index_interval_bytes=1, segment_bytes=200)
Pair = tuple[bytes, bytes | None]


class SetClock(Clock):
    """A world whose wall clock the test can set."""

    def __init__(self) -> None:
        super().__init__()
        self.set_by_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.set_by_ms


def keyed(pairs: Sequence[Pair], *, magic: int = MAGIC_COLUMNS, producer_id: int = -1, sequence: int = 0) -> bytes:
    idempotent = producer_id >= 0
    return bytes(
        encode_batch(
            [value for _, value in pairs],
            keys=[key for key, _ in pairs],
            base_timestamp=NOW,
            timestamp_deltas=list(range(len(pairs))),
            magic=magic,
            producer_id=producer_id,
            producer_epoch=0 if idempotent else -1,
            base_sequence=sequence if idempotent else -1,
        )
    )


def segments_of(path: Path, *contents: Sequence[bytes], config: LogConfig = CONFIG) -> Opened:
    """Return a log with a sealed and flushed segment for each sequence of record sets, and an empty active one."""
    opened = open_log(str(path), config)
    for batches in contents:
        append_segment(opened.log, batches)
    return opened


def append_segment(log: Log, batches: Sequence[bytes]) -> None:
    async def run() -> None:
        for record_set in batches:
            log.append_as_leader(record_set, 0, NOW)
        log.roll()
        await log.checkpoint()

    asyncio.run(run())


async def unpaced(done: int, stopped: asyncio.Event) -> None:
    """A `Pace` that does not wait."""


def compact(log: Log, *, room: int = 1_000, end: int | None = None) -> bool:
    what = Cleanable(log.first_dirty_offset, log.log_end_offset if end is None else end, 0, 1)
    return asyncio.run(log.compact(what, KeyMap(room * ENTRY_BYTES, b""), unpaced))


def found(log: Log) -> list[tuple[int, bytes, bytes | None]]:
    records: list[tuple[int, bytes, bytes | None]] = []
    data = everything(log)
    for header, start, _ in iterate_batches(data):
        batch = decode_batch(data, header, start)
        for offset, key, value in zip(batch.offsets, batch.keys or (), batch.values, strict=False):
            assert key is not None
            records.append((offset, key, value))
    return records


def test_header_names_that_are_not_utf_8_stay_as_they_are(tmp_path: Path) -> None:
    one = [("N", b"1")]
    two = encode_batch([b"1", b"2"], keys=[b"a", b"b"], headers=[one, one], base_timestamp=NOW, magic=MAGIC_RECORDS)
    content = write_header(bytearray(two.replace(b"\2N", b"\2\xff")), parse_header(two))
    log = segments_of(tmp_path, [bytes(content)], [keyed([(b"a", b"3")], magic=MAGIC_RECORDS)]).log
    assert compact(log)
    data = everything(log)
    left = decode_batch(data, parse_header(data), to_be_encoded=True)
    assert (left.values, left.headers) == ([b"2"], [[("\udcff", b"1")]])


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_the_latest_record_of_each_key_stays_at_its_offset_with_its_time(tmp_path: Path, magic: int) -> None:
    log = segments_of(
        tmp_path,
        [keyed([(b"a", b"1"), (b"b", b"2")], magic=magic), keyed([(b"c", b"3")], magic=magic)],
        [keyed([(b"a", b"4"), (b"d", b"5"), (b"d", b"6")], magic=magic)],
    ).log
    assert compact(log)
    assert found(log) == [(1, b"b", b"2"), (2, b"c", b"3"), (3, b"a", b"4"), (5, b"d", b"6")]
    data = everything(log)
    headers = [(h.base_offset, h.last_offset, h.records_count, h.magic) for h, _, _ in iterate_batches(data)]
    assert headers == [(0, 1, 1, magic), (2, 2, 1, magic), (3, 5, 2, magic)]
    timestamps = [decode_batch(data, h, start).timestamps for h, start, _ in iterate_batches(data)]
    assert timestamps == [[NOW + 1], [NOW], [NOW, NOW + 2]]
    assert log.first_dirty_offset == log.log_end_offset == 6


def test_small_segments_become_one_and_what_is_left_of_the_files_can_be_opened(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"a", b"1")])], [keyed([(b"a", b"2")])], [keyed([(b"b", b"3")])]).log
    assert compact(log)
    assert [file.stem for file in segments(tmp_path)] == [f"{0:020}", f"{3:020}"]
    assert [(extent.base_offset, extent.end_offset) for extent in log.extents()] == [(0, 3), (3, 3)]
    before = everything(log)
    asyncio.run(log.close())
    for recovery_point in (0, 3):
        again = open_log(str(tmp_path), CONFIG, recovery_point=recovery_point).log
        assert everything(again) == before
        asyncio.run(again.close())
    report = verify_partition(tmp_path, Checkpointed(recovery_point=3, is_compacted=True))
    assert report.findings == []


def test_a_tombstone_stays_until_its_time_is_up_and_what_it_deletes_goes_at_once(tmp_path: Path) -> None:
    opened = segments_of(tmp_path, [keyed([(b"a", b"1")]), keyed([(b"a", None), (b"b", b"2")])])
    log, clock = opened.log, opened.world.clock
    assert compact(log)
    assert found(log) == [(1, b"a", None), (2, b"b", b"2")]
    for later_ms, is_there in ((999, True), (1, False)):
        clock.now_ms += later_ms
        append_segment(log, [keyed([(b"c", b"3")])])
        assert compact(log)
        assert ((1, b"a", None) in found(log)) is is_there
    assert found(log)[0] == (2, b"b", b"2")


def test_what_a_tombstone_deletes_goes_though_the_log_began_after_both_when_it_was_compacted(tmp_path: Path) -> None:
    """The new start was not on disk yet: a crash brings both back."""
    log = segments_of(tmp_path, [keyed([(b"a", b"1")]), keyed([(b"a", None)]), keyed([(b"b", b"2")])]).log
    log.move_log_start_offset(2)
    what = log.candidate(log.log_end_offset, NOW).cleanable
    assert asyncio.run(log.compact(what, KeyMap(10 * ENTRY_BYTES, b""), unpaced))
    asyncio.run(log.close())
    log = open_log(str(tmp_path), CONFIG).log
    assert log.log_start_offset == 0
    assert found(log) == [(1, b"a", None), (2, b"b", b"2")]


@pytest.mark.parametrize("set_by_ms", [-5_000, 5_000], ids=["back", "ahead"])
def test_a_clock_that_is_set_and_set_right_again_takes_no_tombstone_early(tmp_path: Path, set_by_ms: int) -> None:
    clock = SetClock()
    world = StorageWorld()
    world.clock = clock
    log = open_log(str(tmp_path), CONFIG, world=world).log

    def compact_again() -> bool:
        append_segment(log, [keyed([(b"c", b"3")])])
        assert compact(log)
        return (1, b"a", None) in found(log)

    append_segment(log, [keyed([(b"a", b"1")]), keyed([(b"a", None), (b"b", b"2")])])
    clock.set_by_ms = min(0, set_by_ms)
    assert compact_again()
    clock.now_ms += 900
    clock.set_by_ms = max(0, set_by_ms)
    assert compact_again()
    clock.set_by_ms = 0
    clock.now_ms += 99
    assert compact_again()
    clock.now_ms += 1
    assert not compact_again()


def test_a_map_that_is_full_leaves_the_rest_for_later_passes(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"%d" % (number % 7), b"v")]) for number in range(21)]).log
    ends = []
    while log.first_dirty_offset < 21:
        assert compact(log, room=3, end=21)
        ends.append(log.first_dirty_offset)
    assert len(ends) > 3
    assert [offset for offset, _, _ in found(log)] == list(range(14, 21))


def test_a_batch_with_more_keys_than_the_map_has_room_for_is_compacted_all_the_same(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"%d" % number, b"v") for number in range(9)])] * 2).log
    assert compact(log, room=3, end=18)
    assert compact(log, room=3, end=18)
    assert [offset for offset, _, _ in found(log)] == list(range(9, 18))


def test_a_producer_is_remembered_by_batches_that_have_no_records_any_more(tmp_path: Path) -> None:
    sets = [keyed([(b"a", b"%d" % number)], producer_id=5, sequence=number) for number in range(8)]
    log = segments_of(tmp_path, [*sets, keyed([(b"a", b"last")])]).log
    assert compact(log)
    data = everything(log)
    assert [(h.base_offset, h.records_count, h.base_sequence) for h, _, _ in iterate_batches(data)] == [
        (0, 0, 0),  # the leader epoch begins with it
        *((offset, 0, offset) for offset in range(3, 8)),
        (8, 1, -1),
    ]
    copy = open_log(str(tmp_path / "copy"), CONFIG).log
    copy.append_as_follower(data)
    for number in range(3, 8):
        assert copy.append_as_leader(sets[number], 0, NOW).duplicate


def test_the_marker_of_a_transaction_stays_though_no_key_needs_it(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), CONFIG).log
    log.append_as_leader(keyed([(b"a", b"1")]), 0, NOW)
    marker = EndTransactionMarker(ControlType.COMMIT, 3)
    log.append_as_follower(
        encode_control_batch(
            marker, timestamp=NOW, producer_id=5, producer_epoch=0, base_offset=1, partition_leader_epoch=0
        )
    )
    append_segment(log, [keyed([(b"a", b"2")])])
    assert compact(log)
    assert (1, True) in [(h.base_offset, h.is_control) for h, _, _ in iterate_batches(everything(log))]


def test_what_needs_no_compaction_is_not_written_anew(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"a", b"1"), (b"b", b"2")])]).log
    before = segments(tmp_path)[0].stat().st_ino
    assert compact(log)
    assert segments(tmp_path)[0].stat().st_ino == before
    assert not list(tmp_path.glob("*.cleaned"))


def test_a_damaged_batch_ends_the_compaction_and_nothing_is_changed(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"a", b"1")]), keyed([(b"a", b"2")])]).log
    file = segments(tmp_path)[0]
    flip(file, file.stat().st_size - 1)
    before = file.read_bytes()
    with pytest.raises(CannotBeCleaned, match="position"):
        compact(log)
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*.cleaned"))
    assert log.first_dirty_offset == 0


def test_a_log_that_is_closed_or_cut_gives_its_compaction_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SLICE_BYTES", 64)

    def given_up(log: Log, end: Coroutine[Any, Any, None] | None) -> bool:
        async def pace(done: int, stopped: asyncio.Event) -> None:
            nonlocal end
            if end is None:
                log.truncate_to(2)
            else:
                ending = asyncio.get_running_loop().create_task(end)
                await stopped.wait()
                tasks.append(ending)

        async def run() -> bool:
            whole = await log.compact(Cleanable(0, 2, 0, 1), KeyMap(10_000, b""), pace)
            await asyncio.gather(*tasks)
            return not whole

        tasks: list[asyncio.Task[None]] = []
        return asyncio.run(run())

    cut = segments_of(tmp_path / "cut", [keyed([(b"a", b"1")])], [keyed([(b"a", b"2")])], [keyed([(b"b", b"3")])]).log
    assert given_up(cut, None)
    assert [offset for offset, _, _ in found(cut)] == [0, 1]
    closed = segments_of(tmp_path / "closed", [keyed([(b"a", b"1")])], [keyed([(b"a", b"2")])]).log
    assert given_up(closed, closed.close())
    assert not list(tmp_path.glob("*/*.cleaned"))
    assert not list(tmp_path.glob("*/*.swap"))


@pytest.mark.parametrize("seed", range(8))
def test_a_log_may_be_cut_at_any_moment_of_a_compaction_in_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The cut may come during the swap, and then waits for its end."""
    monkeypatch.setattr(compaction, "SLICE_BYTES", 200)
    random = Random(seed)

    async def run() -> None:
        world = StorageWorld()
        config = LogConfig(compact=True, segment_bytes=random.choice((300, 2_000)), index_interval_bytes=1)
        log = open_log(str(tmp_path), config, world=world).log
        world.executor = Threads()  # type: ignore[assignment]
        for epoch in range(6):
            while len(log.extents()) < 8:
                log.append_as_leader(keyed([(b"%d" % random.randrange(5), b"v" * 20)] * 2), epoch, NOW)
            await log.checkpoint()
            what = log.candidate(log.log_end_offset, NOW).cleanable
            passing = asyncio.get_running_loop().create_task(log.compact(what, KeyMap(10_000, b""), unpaced))
            await asyncio.sleep(random.uniform(0, 0.02))
            log.truncate_to(random.randrange(log.log_end_offset))
            before = found(log)
            await passing
            assert found(log) == before
        await log.checkpoint()
        end = log.log_end_offset
        await log.close()
        report = verify_partition(tmp_path, Checkpointed(recovery_point=end, is_compacted=True))
        assert report.findings == []
        assert report.log_end_offset == end

    asyncio.run(run())
    left = {file.suffix for file in tmp_path.iterdir()}
    assert left <= {".log", ".index", ".timeindex", ".snapshot", ""}


class Threads:
    """An `Executor` with threads."""

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def test_a_truncation_in_a_gap_ends_the_log_with_the_batch_before(tmp_path: Path) -> None:
    sets = [keyed([(b"k", b"%d" % number)]) for number in range(9)]
    log = segments_of(tmp_path, [keyed([(b"a", b"1")]), *sets]).log
    assert compact(log)
    assert [offset for offset, _, _ in found(log)] == [0, 9]
    log.truncate_to(5)
    assert (log.log_end_offset, found(log)) == (1, [(0, b"a", b"1")])
    log.append_as_leader(keyed([(b"b", b"2")]), 0, NOW)
    assert [offset for offset, _, _ in found(log)] == [0, 1]
    assert log.first_dirty_offset == 1


def test_a_read_in_a_gap_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"k", b"%d" % number)]) for number in range(9)]).log
    assert compact(log)
    for offset in range(1, 9):
        [batch] = iterate_batches(log.read(offset, 1_000, 9))
        assert batch.header.base_offset == 8
    assert finish_at_once(search.offset_for_timestamp(log, NOW, 9)) == (NOW, 8)


def test_a_record_without_a_key_is_refused_with_the_batch_that_it_is_in(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), CONFIG).log
    for keys in (None, [b"a", None]):
        record_set = bytes(encode_batch([b"1", b"2"], keys=keys, base_timestamp=NOW))
        with pytest.raises(BrokerError, match="without a key, and the topic is compacted") as refused:
            log.append_as_leader(record_set, 0, NOW)
        assert refused.value.code is ErrorCode.INVALID_RECORD
    assert log.log_end_offset == 0


def test_a_gap_in_a_log_that_is_not_compacted_is_damage_to_a_follower_and_to_the_offline_tool(tmp_path: Path) -> None:
    log = segments_of(tmp_path / "compacted", [keyed([(b"k", b"%d" % number)]) for number in range(9)]).log
    assert compact(log)
    assert verify_partition(tmp_path / "compacted", Checkpointed(9, is_compacted=True)).findings == []
    [finding] = verify_partition(tmp_path / "compacted", Checkpointed(9, is_compacted=False)).findings[:1]
    assert finding.costs_records


def test_a_marker_that_is_damaged_costs_the_replica_and_no_file(tmp_path: Path) -> None:
    log = segments_of(tmp_path, [keyed([(b"a", b"1")])], [keyed([(b"a", b"2")])]).log
    asyncio.run(log.close())
    (tmp_path / f"{0:020}.swap").write_bytes(b"0\nx\n")
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises((DamagedLog, ValueError), match=r"swap is damaged"):
        open_log(str(tmp_path), CONFIG, recovery_point=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    finding = verify_partition(tmp_path, Checkpointed(2)).findings[0]
    assert "the next start goes on with that" in finding.problem


def test_where_leader_epochs_begin_can_be_told_from_what_is_left(tmp_path: Path) -> None:
    """A broker that copies the log needs them: they show deposed leaders where to cut unacknowledged records."""
    opened = open_log(str(tmp_path / "log"), CONFIG)
    log = opened.log

    async def write() -> None:
        for epoch in range(4):
            for number in range(3):
                log.append_as_leader(keyed([(b"k", b"%d.%d" % (epoch, number))]), epoch, NOW)
        log.roll()
        await log.checkpoint()

    asyncio.run(write())
    epochs = [log.end_offset_for(epoch) for epoch in range(4)]
    assert compact(log)
    assert [offset for offset, _, _ in found(log)] == [11]
    copy = open_log(str(tmp_path / "copy"), CONFIG).log
    copy.append_as_follower(everything(log))
    assert [copy.end_offset_for(epoch) for epoch in range(4)] == epochs


def test_a_tombstone_that_came_with_another_replicas_word_stays_for_as_long_as_this_ones(tmp_path: Path) -> None:
    first = segments_of(tmp_path / "first", [keyed([(b"a", None), (b"b", b"1")])])
    assert compact(first.log)
    copy = open_log(str(tmp_path / "copy"), CONFIG, world=first.world)
    copy.log.append_as_follower(everything(first.log))
    append_segment(copy.log, [])
    first.world.clock.now_ms += 2_000
    assert compact(copy.log)
    assert (0, b"a", None) in found(copy.log)


def said_once(keys: list[bytes], value: bytes, headers: list[Header] | None = None) -> bytes:
    """Return a batch that our own producer does not send: a column with one element for all records."""
    content = bytearray(HEADER_SIZE)
    encode_columns(content, None, None, keys, [value], None if headers is None else [headers])
    return bytes(write_header(content, parse_header(encode_batch([b""] * len(keys), base_timestamp=NOW))))


def test_what_a_batch_says_once_for_all_its_records_is_not_written_once_for_each(tmp_path: Path) -> None:
    keys = [b"%d" % number for number in range(20)]
    content = said_once(keys, b"v" * 100_000, [("name", b"h" * (MAX_HEADERS_BYTES // 10))])
    log = segments_of(tmp_path, [content, keyed([(b"0", b"new")])]).log
    assert compact(log)
    assert log.size < len(content) + 1_000
    assert found(log) == [*((number, b"%d" % number, b"v" * 100_000) for number in range(1, 20)), (20, b"0", b"new")]


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_a_batch_that_cannot_be_written_anew_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int
) -> None:
    log = segments_of(tmp_path, [keyed([(b"a", b"1"), (b"b", b"2")], magic=magic)], [keyed([(b"a", b"3")])]).log
    monkeypatch.setattr(rewriting, "MAX_STORED_BODY_BYTES", 1)
    assert compact(log)
    assert found(log) == [(0, b"a", b"1"), (1, b"b", b"2"), (2, b"a", b"3")]


def placed(content: bytes, base_timestamp: int) -> bytes:
    """Return the batch as the log of a topic that accepted it has it."""
    header = msgspec.structs.replace(
        parse_header(content), base_timestamp=base_timestamp, max_timestamp=base_timestamp, base_offset=0
    )
    return stamped(bytes(write_header(bytearray(content), header)), 0, 0)


def test_a_batch_that_can_be_read_can_be_read_when_it_has_lost_records(tmp_path: Path) -> None:
    opened = segments_of(tmp_path)
    content = bytes(encode_batch([b"1", b"2"], keys=[b"a", b"b"], base_timestamp=NOW))
    opened.log.append_as_follower(placed(content, LIMIT + 1))
    append_segment(opened.log, [keyed([(b"a", b"3")])])
    assert compact(opened.log)
    assert found(opened.log) == [(1, b"b", b"2"), (2, b"a", b"3")]


def test_a_batch_that_nobody_can_read_does_not_keep_its_log_from_being_compacted(tmp_path: Path) -> None:
    opened = segments_of(tmp_path)
    unreadable = placed(keyed([(b"a", b"1")], magic=MAGIC_RECORDS), LIMIT + 1)
    opened.log.append_as_follower(unreadable)
    append_segment(opened.log, [keyed([(b"a", b"2"), (b"a", b"3")])])
    assert compact(opened.log)
    data = everything(opened.log)
    assert data.startswith(unreadable)
    assert decode_batch(data, position=len(unreadable)).offsets == [2]


def test_a_tombstone_that_is_to_stay_for_longer_than_there_are_numbers_for_stays(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, delete_retention_ms=LIMIT - 1)
    log = segments_of(tmp_path, [keyed([(b"a", b"1"), (b"a", None), (b"b", b"2")])], config=config).log
    assert compact(log)
    assert found(log) == [(1, b"a", None), (2, b"b", b"2")]


def test_a_record_set_of_many_batches_is_refused_before_they_are_decoded(tmp_path: Path) -> None:
    """Decoding batches of 73 bytes each would hold the event loop for 40 ms."""
    log = open_log(str(tmp_path), CONFIG).log
    header = msgspec.structs.replace(
        parse_header(said_once([b"k"], b"v")), records_count=MAX_RECORDS, last_offset_delta=MAX_RECORDS - 1
    )
    large = bytes(write_header(bytearray(said_once([b"k"], b"v")), header))
    began_s = thread_time()
    with pytest.raises(BrokerError, match="more than one batch") as refused:
        log.append_as_leader(large * 200, 0, NOW)
    assert refused.value.code is ErrorCode.INVALID_RECORD
    assert thread_time() - began_s < 2
    assert log.log_end_offset == 0


def test_the_largest_batch_has_room_for_what_compaction_writes() -> None:
    """Compaction adds offsets and timestamps, which a batch of columns may leave out."""
    values = [b"1", bytes(MAX_BODY_BYTES - 40), None, None]
    batch = decode_batch(
        encode_batch(values, keys=[b"a", b"b", b"c", b"d"], timestamps=[NOW, NOW + 1, NOW + 2, NOW + 3])
    )
    assert batch.header.size > MAX_BODY_BYTES
    written = with_records(batch, [1, 2, 3], NOW * 10)
    assert len(written) > MAX_BATCH_BYTES
    assert decode_batch(written).values == values[1:]


def test_the_newest_record_is_one_that_is_left(tmp_path: Path) -> None:
    late = bytes(encode_batch([b"1"], keys=[b"a"], base_timestamp=NOW + 5_000))
    log = segments_of(tmp_path, [late, keyed([(b"b", b"2")]), keyed([(b"a", b"3"), (b"c", b"4")])]).log
    assert finish_at_once(search.newest_record(log, log.log_end_offset)) == (NOW + 5_000, 0)
    assert compact(log)
    assert [offset for offset, _, _ in found(log)] == [1, 2, 3]
    assert next(iterate_batches(everything(log))).header.max_timestamp == NOW + 5_000, "it has no records"
    assert finish_at_once(search.newest_record(log, log.log_end_offset)) == (NOW + 1, 3)


def test_a_search_begins_anew_when_a_compaction_replaces_its_segment(tmp_path: Path) -> None:
    late = bytes(encode_batch([b"1"], keys=[b"a"], base_timestamp=NOW + 5_000))
    others = [keyed([(b"%d" % number, b"2")]) for number in range(200)]
    log = segments_of(tmp_path, [late, *others, keyed([(b"a", b"3"), (b"199", b"3")])]).log
    log.move_log_start_offset(1)
    for steps in (search.newest_record(log, 203), search.offset_for_timestamp(log, NOW + 1, 203)):
        next(steps)
        append_segment(log, [keyed([(b"0", b"4")])])
        assert compact(log)
        assert finish_at_once(steps) == (NOW + 1, 202)


def test_old_segments_wait_for_a_compaction_that_is_under_way_and_the_next_one_for_them(tmp_path: Path) -> None:
    contents = [[keyed([(b"k%d" % number, b"1")])] for number in range(6)]
    log = segments_of(
        tmp_path, *contents, config=LogConfig(compact=True, index_interval_bytes=1, segment_bytes=200)
    ).log

    async def run() -> None:
        async def pace(done: int, stopped: asyncio.Event) -> None:
            log.move_log_start_offset(3)
            await log.remove_old_segments(3)

        what = Cleanable(0, log.log_end_offset, 0, 1)
        assert await log.compact(what, KeyMap(1_000 * ENTRY_BYTES, b""), pace)
        assert log.extents()[0].base_offset == 0
        assert not await log.compact(what, KeyMap(1_000 * ENTRY_BYTES, b""), unpaced)
        await log.remove_old_segments(3)
        assert not log.has_old_segments
        assert await log.compact(what, KeyMap(1_000 * ENTRY_BYTES, b""), unpaced)

    asyncio.run(run())
    assert [offset for offset, _, _ in found(log)] == [3, 4, 5]
