from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from random import Random
from time import thread_time

import msgspec
import pytest
from crc32c import crc32c

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import log as log_of_storage
from minibroker.broker.storage import search
from minibroker.broker.storage.directory import FLUSHES_AT_ONCE
from minibroker.broker.storage.inspection.verification import Checkpointed, verify_partition
from minibroker.broker.storage.log import AppendInfo, Log, LogInvariantViolated
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.search import Search
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import Buffer
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    MAX_RECORDS,
    MAX_TIMESTAMP_MS,
    encode_batch,
    iterate_batches,
    parse_header,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import write_header
from tests.storage_support import (
    NOW,
    FailingDisk,
    GatedExecutor,
    Opened,
    StorageWorld,
    batch,
    check_indexes,
    everything,
    headers,
    open_log,
    stamped,
)

SYNCED = LogConfig(synced=True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "orders-0")


def refusal(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(BrokerError) as raised:
        call()
    return raised.value.code


def files(path: str, suffix: str) -> list[int]:
    return sorted(int(name[: -len(suffix)]) for name in os.listdir(path) if name.endswith(suffix))


# -- appending as leader --


def test_a_leader_gives_batches_their_offsets_and_its_epoch_and_leaves_the_rest(path: str) -> None:
    log = open_log(path).log
    first, second = batch(3), batch(2, timestamp=NOW + 50)
    assert log.append_as_leader(first, 4, NOW) == AppendInfo(0, 2, NOW + 2)
    info = log.append_as_leader(second, 4, NOW)
    assert info == AppendInfo(3, 4, NOW + 51)
    assert info.next_offset == log.log_end_offset == 5
    assert log.read(0, 10_000, 5) == stamped(first, 0, 4) + stamped(second, 3, 4)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_received_bytes_are_not_changed(path: str, kind: Callable[[bytes], Buffer]) -> None:
    log = open_log(path).log
    sent = batch(2)
    received = kind(sent)
    log.append_as_leader(received, 1, NOW)
    log.append_as_leader(received, 1, NOW)
    assert bytes(received) == sent
    assert everything(log) == stamped(sent, 0, 1) + stamped(sent, 2, 1)


def test_a_record_set_may_hold_many_batches_more_than_a_vectored_write_takes(path: str) -> None:
    log = open_log(path).log
    batches = [batch(1 + number % 3, timestamp=NOW + number) for number in range(1_500)]
    info = log.append_as_leader(b"".join(batches), 0, NOW)
    assert info == AppendInfo(0, sum(1 + number % 3 for number in range(1_500)) - 1, NOW + 1_499 + 2)
    offset = 0
    expected = b""
    for number, content in enumerate(batches):
        expected += stamped(content, offset, 0)
        offset += 1 + number % 3
    assert everything(log) == expected


def test_kafkas_own_records_are_taken_as_they_are(path: str) -> None:
    log = open_log(path).log
    sent = bytes(encode_batch([b"a", b"b"], base_timestamp=NOW, magic=MAGIC_RECORDS))
    log.append_as_leader(sent, 0, NOW)
    assert everything(log) == stamped(sent, 0, 0)


GOOD = batch(2)
CONTROL = bytes(encode_batch([b"x"], base_timestamp=NOW, magic=MAGIC_RECORDS))


def with_attributes(content: bytes, attributes: int) -> bytes:
    """Return the batch with other attributes and the CRC to match."""
    changed = bytearray(content)
    changed[21:23] = attributes.to_bytes(2, "big")
    changed[17:21] = crc32c(memoryview(changed)[21:]).to_bytes(4, "big")
    return bytes(changed)


def with_base_timestamp(content: bytes, base_timestamp: int) -> bytes:
    header = msgspec.structs.replace(parse_header(content), base_timestamp=base_timestamp)
    return bytes(write_header(bytearray(content), header))


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (b"", ErrorCode.INVALID_RECORD),
        (GOOD[:60], ErrorCode.CORRUPT_MESSAGE),
        (GOOD[:-1], ErrorCode.CORRUPT_MESSAGE),
        (GOOD + b"x", ErrorCode.CORRUPT_MESSAGE),
        (GOOD + GOOD[:-1], ErrorCode.CORRUPT_MESSAGE),
        (GOOD[:-1] + b"\0", ErrorCode.CORRUPT_MESSAGE),
        (GOOD[:16] + b"\1" + GOOD[17:], ErrorCode.INVALID_RECORD),
        (GOOD[:16] + b"\3" + GOOD[17:], ErrorCode.CORRUPT_MESSAGE),
        (GOOD[:8] + b"\xff\xff\xff\xff" + GOOD[12:], ErrorCode.CORRUPT_MESSAGE),
        (GOOD[:8] + b"\x7f\xff\xff\xff" + GOOD[12:], ErrorCode.CORRUPT_MESSAGE),
        (with_attributes(CONTROL, 0x20), ErrorCode.INVALID_RECORD),
        (with_attributes(GOOD, 0x08), ErrorCode.INVALID_RECORD),
        (with_attributes(GOOD, 0x07), ErrorCode.CORRUPT_MESSAGE),
        (bytes(encode_batch([b"a"], base_timestamp=NOW, offset_deltas=[3])), ErrorCode.INVALID_RECORD),
        (bytes(encode_batch([], base_timestamp=NOW, last_offset_delta=0)), ErrorCode.INVALID_RECORD),
        (with_base_timestamp(GOOD, -MAX_TIMESTAMP_MS - 1), ErrorCode.INVALID_TIMESTAMP),
        (with_base_timestamp(GOOD, MAX_TIMESTAMP_MS + 1), ErrorCode.INVALID_TIMESTAMP),
        (batch(size=2_000), ErrorCode.MESSAGE_TOO_LARGE),
        (batch(size=900) * 4, ErrorCode.RECORD_LIST_TOO_LARGE),
        (batch(producer_id=5) + batch(producer_id=5, sequence=1), ErrorCode.INVALID_RECORD),
        (batch() + batch(producer_id=5), ErrorCode.INVALID_RECORD),
        (batch(producer_id=5, sequence=1), ErrorCode.UNKNOWN_PRODUCER_ID),
        (batch(producer_id=5, producer_epoch=-1), ErrorCode.INVALID_RECORD),
    ],
)
def test_what_no_producer_may_send_is_refused_and_nothing_is_written(
    path: str, records: bytes, code: ErrorCode
) -> None:
    log = open_log(path, LogConfig(max_message_bytes=1_000, segment_bytes=3_000)).log
    log.append_as_leader(batch(), 0, NOW)
    before = everything(log)
    assert refusal(lambda: log.append_as_leader(records, 0, NOW)) is code
    assert (log.log_end_offset, everything(log)) == (1, before)
    assert Path(path, "00000000000000000000.log").read_bytes() == before
    log.append_as_leader(batch(producer_id=5), 0, NOW)


def test_times_that_the_log_replaces_may_be_beyond_those_that_readers_show(path: str) -> None:
    log = open_log(path, LogConfig(log_append_time=True)).log
    log.append_as_leader(with_times(GOOD, 1_790_000_000_000_000_000, 1_790_000_000_000_000_001), 0, NOW)
    (stored,) = [header for header, _, _ in iterate_batches(everything(log))]
    assert stored.max_timestamp == NOW


def test_a_timestamp_that_its_batch_denies_is_refused_where_records_are_looked_at(path: str) -> None:
    log = open_log(path, LogConfig(compact=True)).log
    honest = encode_batch([b"v"], keys=[b"k"], base_timestamp=0, timestamp_deltas=[MAX_TIMESTAMP_MS])
    log.append_as_leader(honest, 0, NOW)
    lie = encode_batch([b"v"], keys=[b"k"], base_timestamp=0, timestamp_deltas=[MAX_TIMESTAMP_MS + 1])
    assert refusal(lambda: log.append_as_leader(with_times(bytes(lie), 0, 0), 0, NOW)) is ErrorCode.INVALID_TIMESTAMP


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_a_search_by_time_looks_at_few_records_in_a_step_and_decompresses_in_a_thread(path: str, magic: int) -> None:
    count = 20_000
    deltas = [0] * (count - 1) + [1]
    content = encode_batch(
        [b""] * count, base_timestamp=NOW, timestamp_deltas=deltas, compression=Compression.ZSTD, magic=magic
    )
    log = open_log(path).log
    log.append_as_leader(content, 0, NOW)
    steps = search.offset_for_timestamp(log, NOW + 1, count)
    call = next(steps)
    assert call is not None
    steps.send(call())
    assert list(islice(steps, count // 1_000)) == [None] * (count // 1_000)
    assert finish_at_once(steps) == (NOW + 1, count - 1)
    assert finish_at_once(search.newest_record(log, count)) == (NOW + 1, count - 1)


def test_a_segment_holds_no_more_offsets_than_an_index_can_express(path: str) -> None:
    """A million equal records take a few bytes."""
    log = open_log(path, LogConfig(index_interval_bytes=1)).log
    content = bytes(encode_batch([None] * MAX_RECORDS, base_timestamp=NOW))
    fitting = (2**31 - 1) // MAX_RECORDS
    refused = content * (fitting + 1)
    assert refusal(lambda: log.append_as_leader(refused, 0, NOW)) is ErrorCode.RECORD_LIST_TOO_LARGE

    async def append() -> None:
        for number in range(3):
            info = log.append_as_leader(content * fitting, 0, NOW)
            assert info.first_offset == number * fitting * MAX_RECORDS
        await log.checkpoint()

    asyncio.run(append())
    assert files(path, ".log") == [number * fitting * MAX_RECORDS for number in range(3)]
    follower = open_log(f"{path}-copy").log

    async def follow() -> None:
        while follower.log_end_offset < log.log_end_offset:
            follower.append_as_follower(log.read(follower.log_end_offset, 50_000, log.log_end_offset))

    asyncio.run(follow())
    assert everything(follower) == everything(log)


def test_a_leader_of_an_epoch_that_is_over_cannot_append(path: str) -> None:
    log = open_log(path).log
    log.assign_epoch_start(5, 0)
    with pytest.raises(LogInvariantViolated, match="append to orders-0 in epoch 4, but 5 has begun"):
        log.append_as_leader(batch(), 4, NOW)
    log.append_as_leader(batch(), 5, NOW)


def test_a_repeated_batch_gets_the_offsets_of_the_first_time_and_is_not_written_again(path: str) -> None:
    log = open_log(path).log
    log.append_as_leader(batch(7), 0, NOW)
    sent = [batch(2, producer_id=9, sequence=2 * number, timestamp=NOW + number) for number in range(5)]
    offsets = [log.append_as_leader(content, 0, NOW) for content in sent]
    for content, info in zip(sent, offsets, strict=True):
        again = log.append_as_leader(content, 0, NOW)
        assert again == info._replace(duplicate=True)
    assert log.log_end_offset == 17


# -- appending as follower --


def test_a_follower_takes_batches_with_their_offsets_and_epochs(path: str, tmp_path: Path) -> None:
    leader = open_log(str(tmp_path / "leader")).log
    leader.append_as_leader(batch(2, producer_id=3), 1, NOW)
    leader.append_as_leader(batch(3, producer_id=3, sequence=2), 4, NOW)
    log = open_log(path).log
    assert log.append_as_follower(everything(leader)) == AppendInfo(0, 4, NOW + 2)
    assert everything(log) == everything(leader)
    assert (log.latest_epoch, log.end_offset_for(1), log.end_offset_for(4)) == (4, (1, 2), (4, 5))
    repeated = log.append_as_leader(batch(2, producer_id=3), 4, NOW)
    assert (repeated.first_offset, repeated.duplicate) == (0, True)


def test_a_follower_takes_sequences_as_the_leader_has_them(path: str) -> None:
    log = open_log(path).log
    log.append_as_follower(stamped(batch(producer_id=3, sequence=50), 0, 0))
    log.append_as_follower(stamped(batch(producer_id=3, sequence=90), 1, 0))
    log.append_as_leader(batch(producer_id=3, sequence=91), 0, NOW)


@pytest.mark.parametrize(
    ("offset", "epoch"),
    [(0, 5), (1, 5), (2, 4)],
    ids=["again", "overlapping", "of an older epoch"],
)
def test_a_follower_refuses_what_does_not_continue_its_log(path: str, offset: int, epoch: int) -> None:
    log = open_log(path).log
    log.append_as_follower(stamped(batch(2), 0, 5))
    with pytest.raises(LogInvariantViolated, match="does not continue it"):
        log.append_as_follower(stamped(batch(), offset, epoch))
    with pytest.raises(LogInvariantViolated, match="does not continue it"):
        log.append_as_follower(stamped(batch(), 2, 5) + stamped(batch(), 2, 5))
    assert log.log_end_offset == 2
    log.append_as_follower(stamped(batch(), 2, 5))


def test_a_follower_accepts_gaps_of_compaction_whatever_its_cleanup_policy_says(path: str) -> None:
    log = open_log(path).log
    log.append_as_follower(stamped(batch(2), 0, 5))
    log.append_as_follower(stamped(batch(), 7, 5))
    assert log.log_end_offset == 8


def test_a_follower_refuses_bytes_that_were_damaged_on_the_way(path: str) -> None:
    log = open_log(path).log
    content = stamped(batch(2), 0, 0)
    assert refusal(lambda: log.append_as_follower(content[:-1] + b"\0")) is ErrorCode.CORRUPT_MESSAGE
    assert refusal(lambda: log.append_as_follower(content + content[:50])) is ErrorCode.CORRUPT_MESSAGE
    with pytest.raises(LogInvariantViolated, match="nothing to append"):
        log.append_as_follower(b"")
    assert log.log_end_offset == 0


def test_damage_that_many_readers_meet_is_told_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(path).log
    one, other = (stamped(batch(2), offset, 0) for offset in (0, 2))
    log.append_as_follower(one + other)
    for offset, damaged in ((0, one[:-1] + b"\0"), (2, other[:-1] + b"\0")):
        for _ in range(3):
            assert refusal(lambda: log.check(damaged, offset)) is ErrorCode.CORRUPT_MESSAGE  # noqa: B023
    assert len([record for record in caplog.records if "damaged on disk" in record.message]) == 2


def test_a_leader_that_looks_at_a_batch_looks_at_the_one_before_it_too(path: str) -> None:
    log = open_log(path).log
    for offset in (0, 2):
        sent = bytes(encode_batch([b"a", b"b"], base_timestamp=NOW, magic=MAGIC_RECORDS))
        log.append_as_follower(stamped(sent, offset, 0))
    log.check(log.read(2, 1_000, 4), 2)
    with open(f"{path}/{0:020}.log", "r+b") as file:
        file.seek(15)
        file.write(b"\x01")  # the first batch's leader epoch
    assert refusal(lambda: log.check(log.read(2, 1_000, 4), 2)) is ErrorCode.CORRUPT_MESSAGE


def test_a_follower_takes_batches_that_are_larger_than_its_own_limits(path: str) -> None:
    log = open_log(path, LogConfig(max_message_bytes=100, segment_bytes=300)).log

    async def append() -> None:
        for number in range(3):
            log.append_as_follower(stamped(batch(size=1_000), number, 0))

    asyncio.run(append())
    assert files(path, ".log") == [0, 1, 2]


# -- reading --


def test_reads_are_whole_batches_that_fit_and_at_least_one_if_wanted(path: str) -> None:
    log = open_log(path).log
    for _ in range(4):
        log.append_as_leader(batch(5), 0, NOW)
    size = len(log.read(0, 1, 5))
    for max_bytes, batches in ((1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (10 * size, 4)):
        found = headers(log.read(0, max_bytes, 20))
        assert [h.base_offset for h in found] == [0, 5, 10, 15][:batches]
    assert log.read(0, size - 1, 20, min_one=False) == b""
    assert headers(log.read(7, 1, 20))[0].base_offset == 5


def test_reads_stop_before_the_batch_that_reaches_the_limit(path: str) -> None:
    log = open_log(path).log
    for _ in range(4):
        log.append_as_leader(batch(5), 0, NOW)
    for up_to, ends in (
        (0, []),
        (4, []),
        (5, [5]),
        (9, [5]),
        (10, [5, 10]),
        (20, [5, 10, 15, 20]),
        (99, [5, 10, 15, 20]),
    ):
        assert [h.next_offset for h in headers(log.read(0, 10_000, up_to))] == ends
    assert log.read(20, 10_000, 20) == b""
    assert log.read(15, 10_000, 5) == b""


def test_offsets_that_the_log_does_not_hold_are_out_of_range(path: str) -> None:
    log = open_log(path, log_start_offset=10).log
    log.append_as_leader(batch(5), 0, NOW)
    for offset in (0, 9, 16, 2**60):
        assert refusal(lambda offset=offset: log.read(offset, 100, 15)) is ErrorCode.OFFSET_OUT_OF_RANGE  # type: ignore[misc]
    assert log.read(15, 100, 15) == b""


def test_a_consumer_reads_over_the_seams_of_segments(path: str) -> None:
    log = open_log(path, LogConfig(segment_bytes=500, index_interval_bytes=1)).log

    async def run() -> bytes:
        for number in range(30):
            log.append_as_leader(batch(3, timestamp=NOW + number), 0, NOW)
        before = everything(log)
        await log.checkpoint()
        assert everything(log) == before
        return before

    assert len(headers(asyncio.run(run()))) == 30
    assert len(files(path, ".log")) > 5
    assert log.bytes_between(0, 90) == log.size
    assert log.bytes_between(3, 87) == log.size * 28 // 30


def test_damage_on_the_disk_is_reported_where_it_is(path: str) -> None:
    log = open_log(path).log
    for _ in range(3):
        log.append_as_leader(batch(5, size=5_000), 0, NOW)
    size = log.size // 3
    with open(f"{path}/00000000000000000000.log", "r+b") as file:
        file.seek(size + 8)
        file.write(b"\xff\xff")
    with pytest.raises(BrokerError, match=f"00000000000000000000.log, position {size}") as raised:
        log.read(6, 100, 15)
    assert raised.value.code is ErrorCode.CORRUPT_MESSAGE


def test_the_first_record_at_or_after_a_time_is_found_even_if_times_go_back(path: str) -> None:
    log = open_log(path, LogConfig(index_interval_bytes=100, segment_bytes=1_000)).log
    starts = [0, 100, 50, 300, 200, 300, 1_000, 10]

    async def append() -> None:
        for start in starts:
            log.append_as_leader(batch(10, timestamp=NOW + start), 0, NOW)
        await log.checkpoint()

    asyncio.run(append())
    records = [
        (NOW + start + number, 10 * index + number) for index, start in enumerate(starts) for number in range(10)
    ]
    for time in (-1, 0, 5, 10, 99, 105, 110, 301, 309, 310, 1_009, 1_010):
        for up_to in (0, 15, 35, 65, 80):
            expected = next((r for r in records if r[0] >= NOW + time and r[1] < up_to), None)
            assert finish_at_once(search.offset_for_timestamp(log, NOW + time, up_to)) == expected, (time, up_to)
    log.move_log_start_offset(15)
    assert finish_at_once(search.offset_for_timestamp(log, NOW, 80)) == (NOW + 105, 15)


@pytest.mark.parametrize("is_rebuilt", [False, True], ids=["as written", "recovered"])
def test_the_newest_record_is_found_in_every_part_of_a_log(path: str, is_rebuilt: bool) -> None:
    config = LogConfig(index_interval_bytes=300, segment_bytes=2_000)
    random = Random(7)
    log = open_log(path, config).log
    records: list[tuple[int, int]] = []

    async def append() -> None:
        for _ in range(60):
            time = NOW + random.randrange(0, 400, 10)
            info = log.append_as_leader(batch(3, timestamp=time), 0, NOW)
            records.extend((time + number, -info.first_offset - number) for number in range(3))
        await log.checkpoint()

    asyncio.run(append())
    if is_rebuilt:
        asyncio.run(log.close())
        for name in os.listdir(path):
            if name.endswith(("index", ".snapshot")):
                os.remove(f"{path}/{name}")
        log = open_log(path, config, clean=False).log
    log.truncate_to(165)
    for start in range(0, 165, 2):
        log.move_log_start_offset(start)
        for up_to in {start + 1, *range(start + 1, 165, 13), 165}:
            found = max(record for record in records if start <= -record[1] < up_to)
            assert finish_at_once(search.newest_record(log, up_to)) == (found[0], -found[1]), (start, up_to)
    assert finish_at_once(search.newest_record(log, 164)) is None


def test_the_newest_record_of_a_long_segment_is_found_without_reading_its_headers(path: str) -> None:
    log = open_log(path, LogConfig(index_interval_bytes=300)).log
    for number in range(2_000):
        log.append_as_leader(batch(1, timestamp=NOW + number if number < 900 else NOW), 0, NOW)
    segment = log._active
    assert len(list(segment.newest_batches(0, 2_000))) < 10
    assert finish_at_once(search.newest_record(log, 2_000)) == (NOW + 899, 899)


def the_newest_is_gone(path: str, *, segment_bytes: int = 1 << 30) -> Log:
    """No indexed batch is left: the first batch, now gone, was the newest."""
    log = open_log(path, LogConfig(index_interval_bytes=300, segment_bytes=segment_bytes)).log
    log.append_as_leader(batch(1, timestamp=NOW + 9_999), 0, NOW)
    for number in range(1, 2_000):
        log.append_as_leader(batch(1, timestamp=NOW + number % 100), 0, NOW)
    log.move_log_start_offset(1)
    return log


SEARCHES: list[tuple[Callable[[Log], Search], tuple[int, int] | None]] = [
    (lambda log: search.newest_record(log, 2_000), (NOW + 99, 99)),
    (lambda log: search.offset_for_timestamp(log, NOW + 100, 2_000), None),
]


@pytest.mark.parametrize(("search", "answer"), SEARCHES, ids=["newest", "time"])
def test_a_search_through_a_whole_segment_is_done_in_short_steps(
    path: str, search: Callable[[Log], Search], answer: tuple[int, int] | None
) -> None:
    log = the_newest_is_gone(path)
    steps = search(log)
    for _ in range(20):
        next(steps)
    assert finish_at_once(steps) == answer


async def test_what_was_the_newest_of_a_segment_is_not_searched_for_again(path: str) -> None:
    log = the_newest_is_gone(path)
    log.roll()
    for time in (50, 70):
        log.append_as_leader(batch(1, timestamp=NOW + time), 0, NOW)
        finish_at_once(search.newest_record(log, log.log_end_offset))
    with pytest.raises(StopIteration):
        next(search.newest_record(log, log.log_end_offset))
    log.truncate_to(50)
    assert finish_at_once(search.newest_record(log, 50)) == (NOW + 49, 49)
    log.append_as_leader(batch(1, timestamp=NOW + 70), 0, NOW)
    assert finish_at_once(search.newest_record(log, 51)) == (NOW + 70, 50)
    await log.checkpoint()
    await log.close()


@pytest.mark.parametrize(("search", "answer"), SEARCHES, ids=["newest", "time"])
def test_a_search_restarts_if_its_segment_is_removed_and_ends_if_the_log_is_cut_or_closed(
    path: str, search: Callable[[Log], Search], answer: tuple[int, int] | None
) -> None:
    async def removed() -> None:
        log = the_newest_is_gone(f"{path}/removed", segment_bytes=50_000)
        await log.checkpoint()
        steps = search(log)
        next(steps)
        start = log.extents()[0].end_offset
        log.move_log_start_offset(start)
        await log.remove_old_segments(start)
        left = start + (99 - start) % 100
        assert finish_at_once(steps) == (None if answer is None else (NOW + 99, left))
        await log.close()

    async def cut() -> None:
        log = the_newest_is_gone(f"{path}/cut")
        steps = search(log)
        next(steps)
        log.truncate_to(50)
        assert finish_at_once(steps) == (None if answer is None else (NOW + 49, 49))
        await log.close()

    async def closed() -> None:
        log = the_newest_is_gone(f"{path}/closed")
        steps = search(log)
        next(steps)
        await log.close()
        assert refusal(lambda: finish_at_once(steps)) is ErrorCode.NOT_LEADER_OR_FOLLOWER

    for scenario in (removed, cut, closed):
        asyncio.run(scenario())


def test_a_batch_that_its_producer_filled_with_nonsense_is_found_by_the_time_in_its_header(path: str) -> None:
    log = open_log(path).log
    log.append_as_leader(batch(3), 0, NOW)
    nonsense = bytearray(batch(2, timestamp=NOW + 50))
    nonsense[62] = 0xC1  # no column begins like this
    nonsense[17:21] = crc32c(nonsense[21:]).to_bytes(4, "big")
    log.append_as_leader(nonsense, 0, NOW)
    log.append_as_leader(batch(1, timestamp=NOW + 90), 0, NOW)
    assert finish_at_once(search.offset_for_timestamp(log, NOW + 1, 6)) == (NOW + 1, 1)
    assert finish_at_once(search.offset_for_timestamp(log, NOW + 10, 6)) == (NOW + 51, 3)
    assert finish_at_once(search.offset_for_timestamp(log, NOW + 80, 6)) == (NOW + 90, 5)
    assert finish_at_once(search.newest_record(log, 6)) == (NOW + 90, 5)
    assert finish_at_once(search.newest_record(log, 5)) == (NOW + 51, 3)


# -- truncating --


def test_truncating_within_a_batch_takes_the_whole_batch(path: str) -> None:
    log = open_log(path).log
    for _ in range(3):
        log.append_as_leader(batch(5), 0, NOW)
    log.truncate_to(12)
    assert log.log_end_offset == 10
    log.append_as_leader(batch(1), 0, NOW)
    assert [h.base_offset for h in headers(everything(log))] == [0, 5, 10]


def test_truncating_at_or_past_the_end_forgets_an_epoch_that_wrote_nothing(path: str) -> None:
    """Otherwise a leader deposed before its first append asks its successor about that epoch for ever."""
    log = open_log(path).log
    log.append_as_leader(batch(5), 3, NOW)
    log.assign_epoch_start(6, 5)
    assert log.latest_epoch == 6
    log.truncate_to(5)
    assert (log.latest_epoch, log.log_end_offset) == (3, 5)


def test_truncating_brings_epochs_producers_and_segments_back(path: str) -> None:
    log = open_log(path, LogConfig(segment_bytes=300)).log

    async def append() -> None:
        for number in range(10):
            log.append_as_leader(batch(producer_id=1, sequence=number), number // 4, NOW)
        await log.checkpoint()

    asyncio.run(append())
    segments = files(path, ".log")
    assert len(segments) > 3
    log.truncate_to(5)
    assert files(path, ".log") == [base for base in segments if base <= 5]
    assert all(offset <= 5 for offset in files(path, ".snapshot"))
    assert (log.log_end_offset, log.recovery_point, log.latest_epoch) == (5, 5, 1)
    assert log.append_as_leader(batch(producer_id=1, sequence=4), 1, NOW).duplicate
    assert not log.append_as_leader(batch(producer_id=1, sequence=5), 1, NOW).duplicate


def test_an_emptied_log_begins_where_it_is_told_and_remembers_nothing(path: str) -> None:
    log = open_log(path).log
    log.append_as_leader(batch(5, producer_id=1), 3, NOW)
    log.truncate_fully_and_start_at(100)
    assert (log.log_start_offset, log.log_end_offset, log.latest_epoch, log.size) == (100, 100, -1, 0)
    assert files(path, ".log") == [100]
    assert refusal(lambda: log.read(4, 1, 100)) is ErrorCode.OFFSET_OUT_OF_RANGE
    assert (
        refusal(lambda: log.append_as_leader(batch(producer_id=1, sequence=5), 4, NOW)) is ErrorCode.UNKNOWN_PRODUCER_ID
    )
    assert log.append_as_leader(batch(2), 4, NOW).first_offset == 100
    reopened = open_log(path).log
    assert (reopened.log_start_offset, reopened.log_end_offset) == (100, 102)


def test_an_emptied_log_knows_the_producers_that_it_is_told_of_after_a_crash_too(path: str) -> None:
    other = open_log(f"{path}-of-another").log
    other.append_as_leader(batch(5, producer_id=1), 3, NOW)
    log = open_log(path).log
    log.append_as_leader(batch(5, producer_id=2), 3, NOW)
    log.truncate_fully_and_start_at(100, 3, other.producers())
    again = batch(5, producer_id=1)
    assert log.append_as_leader(again, 4, NOW) == AppendInfo(0, 4, NOW + 4, duplicate=True)
    assert log.append_as_leader(batch(producer_id=1, sequence=5), 4, NOW).first_offset == 100
    reopened = open_log(path).log
    assert reopened.append_as_leader(again, 4, NOW).duplicate
    assert reopened.append_as_leader(batch(producer_id=1, sequence=6), 4, NOW).first_offset == 101
    reopened.truncate_to(100)
    assert reopened.append_as_leader(again, 4, NOW).duplicate
    assert refusal(lambda: reopened.append_as_leader(batch(producer_id=2, sequence=5), 4, NOW)) is (
        ErrorCode.UNKNOWN_PRODUCER_ID
    )


async def test_what_an_emptied_log_was_told_goes_with_its_first_segment(path: str) -> None:
    other = open_log(f"{path}-of-another").log
    other.append_as_leader(batch(5, producer_id=1), 3, NOW)
    log = open_log(path).log
    log.truncate_fully_and_start_at(100, 3, other.producers())
    assert files(path, ".producers") == [100]
    log.truncate_fully_and_start_at(200, 3, other.producers())
    assert files(path, ".producers") == [200]
    log.append_as_leader(batch(), 3, NOW)
    log.roll()
    await log.flush()
    log.move_log_start_offset(201)
    await log.remove_old_segments(201)
    assert (files(path, ".producers"), files(path, ".snapshot")) == ([201], [201])
    assert (
        open_log(path, recovery_point=201, log_start_offset=201)
        .log.append_as_leader(batch(5, producer_id=1), 4, NOW)
        .duplicate
    )
    log.truncate_fully_and_start_at(300, 3, other.producers())
    log.truncate_fully_and_start_at(300, 3)
    assert (files(path, ".producers"), log.producers()) == ([], [])


async def test_segments_that_begin_in_a_row_leave_few_snapshots_in_memory_and_forget_no_producer(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_of_storage, "MOST_PENDING_PRODUCERS", 10)
    log = open_log(path).log
    for producer_id in range(20):
        log.append_as_leader(batch(producer_id=producer_id), 3, NOW)
        log.roll()
    assert sum(len(captured) for _, captured in log._pending_snapshots) <= 20
    await log.flush()
    log.move_log_start_offset(19)
    await log.remove_old_segments(19)
    assert files(path, ".log")[0] in files(path, ".snapshot")
    reopened = open_log(path, recovery_point=20, log_start_offset=19).log
    assert [producer_id for producer_id, _ in reopened.producers()] == list(range(20))


def test_a_log_that_is_cut_below_its_start_knows_who_had_written_before_that(path: str) -> None:
    other = open_log(f"{path}-of-another").log
    other.append_as_leader(batch(5, producer_id=1), 3, NOW)
    log = open_log(path).log
    log.truncate_fully_and_start_at(100, 3, other.producers())
    log.append_as_leader(batch(producer_id=2), 3, NOW)
    log.truncate_to(90)
    assert [producer_id for producer_id, _ in log.producers()] == [1]
    assert [producer_id for producer_id, _ in open_log(path).log.producers()] == [1]


def test_a_log_whose_recovery_point_was_lowered_for_nothing_knows_who_had_written_before_it(path: str) -> None:
    """A cut that failed at once leaves no more than that, and a snapshot above the recovery point is not trusted."""

    async def run() -> None:
        log = open_log(path).log
        log.append_as_leader(batch(5, producer_id=1), 3, NOW)
        log.roll()
        log.append_as_leader(batch(producer_id=2), 3, NOW)
        await log.flush()
        log.move_log_start_offset(5)
        await log.remove_old_segments(5)

    asyncio.run(run())
    reopened = open_log(path, recovery_point=0, log_start_offset=0).log
    assert (reopened.log_start_offset, [i for i, _ in reopened.producers()]) == (5, [1, 2])


def test_what_a_log_was_told_is_looked_at_and_its_damage_is_said(path: str, caplog: pytest.LogCaptureFixture) -> None:
    other = open_log(f"{path}-of-another").log
    other.append_as_leader(batch(5, producer_id=1), 3, NOW)
    log = open_log(path).log
    log.truncate_fully_and_start_at(100, 3, other.producers())
    told = Path(path) / f"{100:020}.producers"
    known = Checkpointed(recovery_point=100, log_start_offset=100)
    assert str(told) not in [finding.file for finding in verify_partition(Path(path), known).findings]
    told.write_bytes(told.read_bytes()[:-1])
    [problem] = [each.problem for each in verify_partition(Path(path), known).findings if each.file == str(told)]
    assert "may be written twice" in problem
    assert open_log(path).log.producers() == []
    assert f"{told} is damaged" in caplog.text


def test_truncating_below_the_start_empties_the_log(path: str) -> None:
    log = open_log(path, log_start_offset=50).log
    log.append_as_leader(batch(5), 0, NOW)
    log.truncate_to(20)
    assert (log.log_start_offset, log.log_end_offset) == (20, 20)


def test_the_start_moves_forward_only_and_not_past_the_end(path: str) -> None:
    log = open_log(path).log
    log.append_as_leader(batch(5), 1, NOW)
    log.append_as_leader(batch(5), 2, NOW)
    log.move_log_start_offset(6)
    log.move_log_start_offset(3)
    assert log.log_start_offset == 6
    assert refusal(lambda: log.move_log_start_offset(11)) is ErrorCode.OFFSET_OUT_OF_RANGE
    assert refusal(lambda: log.read(5, 1, 10)) is ErrorCode.OFFSET_OUT_OF_RANGE


# -- rolling and flushing --


def test_segments_roll_before_they_grow_too_large_and_are_named_by_their_first_offset(path: str) -> None:
    log = open_log(path, LogConfig(segment_bytes=1_000)).log

    async def append() -> None:
        for _ in range(20):
            log.append_as_leader(batch(4), 0, NOW)
        await log.checkpoint()

    asyncio.run(append())
    bases = files(path, ".log")
    assert bases[0] == 0
    assert len(bases) > 1
    for base in bases:
        content = Path(path, f"{base:020d}.log").read_bytes()
        assert len(content) <= 1_000
        assert headers(content)[0].base_offset == base
    assert files(path, ".index") == files(path, ".timeindex") == bases
    assert set(bases[1:]) < set(files(path, ".snapshot"))


def test_an_empty_segment_does_not_roll(path: str) -> None:
    log = open_log(path).log
    log.roll()
    assert files(path, ".log") == [0]


def flushed(opened: Opened, action: Callable[[Log], Awaitable[None]]) -> None:
    async def run() -> None:
        await action(opened.log)

    asyncio.run(run())


def test_a_flush_covers_what_was_appended_before_it_and_not_what_comes_meanwhile(path: str) -> None:
    opened = open_log(path)
    log = opened.log
    log.append_as_leader(batch(5), 0, NOW)

    def append() -> None:
        log.append_as_leader(batch(3), 0, NOW)

    opened.world.executor.before = append
    flushed(opened, Log.flush)
    assert (log.recovery_point, log.log_end_offset) == (5, 8)
    flushed(opened, Log.flush)
    assert log.recovery_point == 8


async def test_a_truncation_meanwhile_annuls_a_flush(path: str) -> None:
    opened = open_log(path)
    log = opened.log

    log.append_as_leader(batch(5), 0, NOW)
    log.append_as_leader(batch(5), 0, NOW)
    await log.flush()
    log.append_as_leader(batch(5), 0, NOW)
    opened.world.executor.before = lambda: log.truncate_to(5)
    await log.flush()
    assert (log.recovery_point, log.log_end_offset) == (5, 5)


async def test_every_so_many_bytes_are_flushed_in_the_background(path: str) -> None:
    log = open_log(path, LogConfig(flush_bytes=1_000)).log

    for number in range(100):
        log.append_as_leader(batch(1, size=100), 0, NOW)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log.recovery_point >= number - 10
    await log.close()


# -- durability=synced --


def gated(path: str, *, world: StorageWorld | None = None, recovery_point: int = 0) -> tuple[Opened, GatedExecutor]:
    opened = open_log(path, SYNCED, world=world, recovery_point=recovery_point)
    executor = GatedExecutor()
    opened.world.executor = executor
    return opened, executor


async def soon() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_flush_is_under_way_and_the_next_covers_all_that_came_meanwhile(path: str) -> None:
    opened, disk = gated(path)
    log, heard = opened.log, []
    log.on_flushed = lambda: heard.append(log.safe_end_offset)
    log.append_as_leader(batch(2), 0, NOW)
    await soon()
    assert (log.safe_end_offset, log.is_safe, log.log_end_offset, disk.busy) == (0, False, 2, 1)
    for _ in range(3):
        log.append_as_leader(batch(2), 0, NOW)
        await soon()
    assert disk.busy == 1
    opened.world.clock.now_ms += 7_000
    assert log.flushing_for_s == 7
    await disk.release()
    assert (log.safe_end_offset, disk.busy, log.flushing_for_s) == (2, 1, 0)
    await disk.release()
    assert (log.safe_end_offset, log.is_safe, disk.busy, disk.ran) == (8, True, 0, 2)
    assert heard == [2, 8]


def test_a_replicated_log_counts_as_far_as_it_goes_and_is_not_flushed_for_it(path: str) -> None:
    log = open_log(path).log
    log.append_as_leader(batch(2), 0, NOW)  # without an event loop
    assert (log.safe_end_offset, log.is_safe, log.recovery_point) == (2, True, 0)


async def test_recovered_records_count_once_flushed_and_the_flush_begins_with_the_setting(
    path: str,
) -> None:
    flushed_log = open_log(path).log
    flushed_log.append_as_leader(batch(5), 0, NOW)
    await flushed_log.flush()
    flushed_log.append_as_leader(batch(5), 0, NOW)
    log = open_log(path, recovery_point=5).log
    assert log.safe_end_offset == 10
    log.configure(SYNCED)
    assert log.safe_end_offset == 5
    await soon()
    assert log.safe_end_offset == 10


async def test_a_synced_log_is_safe_again_after_it_was_cut_or_emptied(path: str) -> None:
    opened, disk = gated(path)
    log = opened.log
    for _ in range(2):
        log.append_as_leader(batch(5), 0, NOW)
    await soon()
    log.truncate_to(5)  # annuls the flush that is under way
    for _ in range(2):
        await disk.release()
    assert (log.safe_end_offset, log.is_safe, disk.busy) == (5, True, 0)
    log.truncate_to(0)
    assert (log.safe_end_offset, log.is_safe) == (0, True)
    log.truncate_fully_and_start_at(100)
    await soon()
    assert (log.safe_end_offset, log.is_safe) == (0, False)
    await disk.release()
    assert (log.safe_end_offset, log.is_safe) == (100, True)


async def test_after_a_flush_that_failed_no_other_is_tried_and_nothing_more_counts(path: str) -> None:
    disk = FailingDisk()
    opened, executor = gated(path, world=StorageWorld(disk))
    log = opened.log
    for _ in range(2):
        log.append_as_leader(batch(), 0, NOW)
        await soon()
    disk.fail = "sync"
    await executor.release()
    assert isinstance(opened.directory.failure, OSError)
    disk.fail = ""
    assert (log.safe_end_offset, executor.busy) == (0, 0)
    await log.close()


async def test_a_directory_flushes_so_many_logs_at_once_and_the_others_in_turn(tmp_path: Path) -> None:
    world = StorageWorld()
    executor = world.executor = GatedExecutor()
    first = open_log(str(tmp_path / "orders-0"), SYNCED, world=world)
    logs = [first.log]
    for number in range(1, FLUSHES_AT_ONCE + 3):
        log = open_log(str(tmp_path / f"orders-{number}"), SYNCED, world=world).log
        log._directory = first.directory
        logs.append(log)
    for log in logs:
        log.append_as_leader(batch(), 0, NOW)
    await soon()
    for number in range(len(logs)):
        assert executor.busy == min(FLUSHES_AT_ONCE, len(logs) - number)
        await executor.release()
        assert sum(log.is_safe for log in logs) == number + 1


def test_a_checkpoint_writes_epochs_and_producers_and_then_has_nothing_to_do(path: str) -> None:
    opened = open_log(path)
    log = opened.log
    log.append_as_leader(batch(5, producer_id=1), 2, NOW)
    flushed(opened, Log.checkpoint)
    assert Path(path, "leader-epoch-checkpoint").read_bytes().startswith(b"0\n1\n2 0\n#")
    assert files(path, ".snapshot") == [5]
    opened.world.executor.before = lambda: pytest.fail("there was nothing to write")
    flushed(opened, Log.checkpoint)


def test_the_epoch_of_a_new_leader_is_on_disk_with_the_first_records_that_it_wrote(path: str) -> None:
    opened = open_log(path)
    opened.log.append_as_leader(batch(3), 0, NOW)
    flushed(opened, Log.checkpoint)
    opened.log.assign_epoch_start(4, 3)
    opened.log.append_as_leader(batch(2), 4, NOW)
    flushed(opened, Log.checkpoint)
    assert Path(path, "leader-epoch-checkpoint").read_bytes().startswith(b"0\n2\n0 0\n4 3\n#")


def test_index_entries_of_truncated_batches_are_gone_before_a_flush_passes_them(path: str) -> None:
    """Two batches are replaced by others with another boundary; later ones are at their old offsets, so the last entry
    alone shows no difference."""
    config = LogConfig(index_interval_bytes=1)
    log = open_log(path, config).log
    twice = 2 * len(batch(3))
    others = next(
        pair
        for size in range(10, 60)
        for pair in [(batch(2, size=size), batch(4, size=other)) for other in range(10, 60)]
        if len(pair[0]) + len(pair[1]) == twice
    )

    async def run() -> None:
        for _ in range(10):
            log.append_as_leader(batch(3), 0, NOW)
        await log.checkpoint()
        log.truncate_to(6)
        for content in (*others, *[batch(3)] * 6):
            log.append_as_leader(content, 1, NOW)
        await log.flush()
        await log.close()

    asyncio.run(run())
    reopened = open_log(path, config, recovery_point=log.recovery_point).log
    assert reopened.log_end_offset == 30
    check_indexes(reopened)


def test_a_segment_is_as_old_as_its_newest_record_wherever_that_is(path: str) -> None:
    log = open_log(path).log
    for timestamp in (NOW, NOW + 50, NOW + 20):
        log.append_as_leader(batch(1, timestamp=timestamp), 0, NOW)
    assert [extent.newest_ms for extent in log.extents()] == [NOW + 50]


def test_what_can_be_removed_of_many_segments_is_found_in_one_walk_over_them(path: str) -> None:
    log = open_log(path, LogConfig(segment_bytes=100)).log

    async def append() -> None:
        for number in range(600):
            log.append_as_leader(batch(1, timestamp=NOW + number), 0, NOW)
        await log.checkpoint()

    def shortest(call: Callable[[], object]) -> float:
        times = []
        for _ in range(10):
            began_s = thread_time()
            call()
            times.append(thread_time() - began_s)
        return min(times)

    asyncio.run(append())
    log.move_log_start_offset(599)
    assert len(log.extents()) == 600
    assert log.has_old_segments
    assert shortest(lambda: log.has_old_segments) < 2 * shortest(log.extents)


def test_old_snapshots_go_away_but_for_those_where_segments_begin(path: str) -> None:
    opened = open_log(path, LogConfig(segment_bytes=400))
    log = opened.log

    async def run() -> None:
        for _ in range(12):
            log.append_as_leader(batch(1), 0, NOW)
            await log.checkpoint()

    asyncio.run(run())
    bases = files(path, ".log")
    others = set(files(path, ".snapshot")) - set(bases)
    assert len(bases) > 2
    assert len(others) <= 3
    assert 12 in files(path, ".snapshot")


# -- failing disks --


@pytest.mark.parametrize("failure", ["write", "sync"])
def test_after_an_io_error_nothing_is_appended_read_or_flushed_any_more(path: str, failure: str) -> None:
    disk = FailingDisk()
    opened = open_log(path, world=StorageWorld(disk))
    log = opened.log
    told: list[str] = []
    opened.directory.on_offline(lambda: told.append("offline"))
    log.append_as_leader(batch(2), 0, NOW)
    disk.fail = failure

    async def run() -> None:
        if failure == "write":
            assert refusal(lambda: log.append_as_leader(batch(2), 0, NOW)) is ErrorCode.KAFKA_STORAGE_ERROR
        else:
            with pytest.raises(BrokerError):
                await log.flush()
        # The disk accepts writes again, but which bytes it lost is unknown.
        disk.fail = None
        assert (log.log_end_offset, log.recovery_point) == (2, 0)
        for call in (
            lambda: log.append_as_leader(batch(2), 0, NOW),
            lambda: log.append_as_follower(stamped(batch(2), 2, 0)),
            lambda: log.read(0, 100, 2),
            lambda: log.truncate_to(0),
            lambda: log.truncate_fully_and_start_at(9),
            lambda: log.assign_epoch_start(1, 2),
            lambda: finish_at_once(search.offset_for_timestamp(log, 0, 2)),
            lambda: log.bytes_between(0, 2),
        ):
            assert refusal(call) is ErrorCode.KAFKA_STORAGE_ERROR
        for flush in (log.flush, log.checkpoint):
            with pytest.raises(BrokerError, match="is offline"):
                await flush()
        await log.close()

    asyncio.run(run())
    assert told == ["offline"]
    late: list[str] = []
    opened.directory.on_offline(lambda: late.append("offline"))
    assert late == ["offline"]
    # The half batch is cut when the log is opened again.
    reopened = open_log(path)
    assert reopened.log.log_end_offset == 2


def test_a_failed_flush_in_the_background_takes_the_directory_offline(path: str) -> None:
    disk = FailingDisk()
    opened = open_log(path, LogConfig(flush_bytes=100), world=StorageWorld(disk))

    async def run() -> None:
        disk.fail = "sync"
        opened.log.append_as_leader(batch(size=200), 0, NOW)
        await opened.log.close()

    asyncio.run(run())
    assert isinstance(opened.directory.failure, OSError)


def test_a_closed_log_refuses_everything(path: str) -> None:
    opened = open_log(path)
    log = opened.log
    log.append_as_leader(batch(), 0, NOW)
    flushed(opened, Log.close)
    for call in (lambda: log.append_as_leader(batch(), 0, NOW), lambda: log.read(0, 1, 1), lambda: log.truncate_to(0)):
        assert refusal(call) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    flushed(opened, Log.flush)
    flushed(opened, Log.checkpoint)


def test_producers_that_are_silent_for_a_day_are_forgotten_at_a_checkpoint(path: str) -> None:
    opened = open_log(path)
    log = opened.log
    log.append_as_leader(batch(producer_id=1), 0, NOW)
    log.append_as_leader(batch(producer_id=2, timestamp=5), 0, NOW)
    for minute in range(24 * 60 + 2):
        opened.world.clock.now_ms += 60_000
        if minute == 1_000:
            log.append_as_leader(batch(producer_id=2, sequence=1), 0, NOW)
        flushed(opened, Log.checkpoint)
    assert (
        refusal(lambda: log.append_as_leader(batch(producer_id=1, sequence=1), 0, NOW)) is ErrorCode.UNKNOWN_PRODUCER_ID
    )
    log.append_as_leader(batch(producer_id=2, sequence=2), 0, NOW)


@pytest.mark.parametrize(
    "config",
    [
        LogConfig(max_message_bytes=100),
        LogConfig(segment_bytes=100),
        LogConfig(compact=True),
        LogConfig(message_timestamp_after_max_ms=0),
    ],
    ids=["smaller batches", "smaller segments", "compacted", "older records"],
)
def test_a_repetition_is_known_whatever_the_settings_are_by_now(path: str, config: LogConfig) -> None:
    """Otherwise its producer reports records as lost that are in the log."""
    log = open_log(path).log
    sent = batch(20, producer_id=1)
    assert log.append_as_leader(sent, 0, NOW).last_offset == 19
    log.configure(config)
    try:
        again = log.append_as_leader(sent, 0, NOW)
    except BrokerError as error:
        pytest.fail(f"refused: {error.code.name}")
    assert again == AppendInfo(0, 19, NOW + 19, duplicate=True)
    assert log.log_end_offset == 20
    assert refusal(lambda: log.append_as_leader(sent[:-1] + b"?", 0, NOW)) is ErrorCode.CORRUPT_MESSAGE
    assert refusal(lambda: log.append_as_leader(batch(20, producer_id=1, sequence=20), 0, NOW)) is not None


def test_a_clock_that_jumps_between_a_batch_and_its_repetition_does_not_let_it_in_twice(path: str) -> None:
    opened = open_log(path)
    log = opened.log
    first = log.append_as_leader(batch(producer_id=1), 0, NOW)
    opened.world.clock.now_ms += 30 * 86_400_000  # both clocks: the wall clock was set, the monotonic one slept
    flushed(opened, Log.checkpoint)
    again = log.append_as_leader(batch(producer_id=1), 0, opened.world.clock.now_ms)
    assert (again.first_offset, again.duplicate) == (first.first_offset, True)


# -- records without a timestamp --


def with_times(content: bytes, base_timestamp: int, max_timestamp: int) -> bytes:
    header = msgspec.structs.replace(parse_header(content), base_timestamp=base_timestamp, max_timestamp=max_timestamp)
    return bytes(write_header(bytearray(content), header))


@pytest.mark.parametrize(("base", "largest"), [(-1, -1), (-5, -5), (-5, -1), (-1_000, -1_000), (-MAX_TIMESTAMP_MS, -1)])
def test_negative_timestamps_are_taken_and_no_search_by_time_finds_them(path: str, base: int, largest: int) -> None:
    log = open_log(path, LogConfig(index_interval_bytes=1)).log
    for content in (with_times(GOOD, base, largest), GOOD, with_times(GOOD, base, largest)):
        log.append_as_leader(content, 0, NOW)
    assert finish_at_once(search.offset_for_timestamp(log, NOW - 1, 6)) == (NOW, 2)
    assert finish_at_once(search.newest_record(log, 6)) == (NOW + 1, 3)
    check_indexes(log)


def test_a_log_without_timestamps_has_no_newest_record_and_is_read_back_as_it_was(path: str) -> None:
    config = LogConfig(segment_bytes=400, index_interval_bytes=1)

    async def run() -> Log:
        log = open_log(path, config).log
        for timestamp in (-1, -5, -1_000) * 10:
            log.append_as_leader(batch(1, timestamp=timestamp), 0, NOW)
        await log.flush()
        await log.close()
        return log

    log = asyncio.run(run())
    for recovery_point in (0, log.recovery_point):
        reopened = open_log(path, config, recovery_point=recovery_point).log
        assert finish_at_once(search.newest_record(reopened, 30)) is None
        assert finish_at_once(search.offset_for_timestamp(reopened, 0, 30)) is None
        assert reopened.log_end_offset == 30
        check_indexes(reopened)


def test_a_segment_without_timestamps_is_as_old_as_its_file(path: str) -> None:
    log = open_log(path, LogConfig(segment_bytes=200)).log
    log.append_as_leader(batch(1, timestamp=-1), 0, NOW)
    log._active.file.set_modified_ms(NOW - 70)
    assert [extent.newest_ms for extent in log.extents()] == [NOW - 70]
    log.append_as_leader(batch(1, timestamp=-1), 0, NOW)
    assert log.extents()[0].newest_ms > NOW - 70


async def test_a_segment_without_timestamps_is_closed_when_it_was_begun_long_ago(path: str) -> None:
    opened = open_log(path, LogConfig(segment_ms=1_000))
    for _ in range(4):
        opened.log.append_as_leader(batch(1, timestamp=-1), 0, NOW)
        opened.world.clock.now_ms += 600
    assert [extent.base_offset for extent in opened.log.extents()] == [0, 2]


@pytest.mark.parametrize("jitter_ms", [1_000_000, 2**63 - 1])
async def test_a_jitter_above_the_age_of_a_segment_does_not_close_one_with_every_batch(
    path: str, jitter_ms: int
) -> None:
    log = open_log(path, LogConfig(segment_ms=1_000_000, segment_jitter_ms=jitter_ms)).log
    for number in range(200):
        log.append_as_leader(batch(1, timestamp=NOW + number), 0, NOW)
    assert len(log.extents()) < 10
