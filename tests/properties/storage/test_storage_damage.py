"""A bit of a file flips, a tail is cut or overwritten, a file is gone: the broker starts and serves no wrong record.

Four outcomes are allowed: the replica is as it was; it has fewer records and the directory reports the loss (so the
broker is not trusted before it has caught up); it is set aside and reported; or a reader meets bytes that are visibly
no batch. A reader must never find records that were not written, and must not miss existing ones because a number in a
file changed. Knowledge of producers and epochs must not shrink silently.
"""

from __future__ import annotations

import asyncio
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, count
from pathlib import Path
from random import Random

import pytest

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import search
from minibroker.broker.storage.checkpoints import META_PROPERTIES_FILE
from minibroker.broker.storage.directory import DataDirectoryUnusable
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.recovery.recovery import PAGE_BYTES, recover
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import CorruptRecord, iterate_batches, validate_batch
from minibroker.protocol.records.header import HEADER_SIZE
from minibroker.protocol.world.real import RealDisk
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION
from tests.storage_support import NOW, PARTITION, StorageWorld, batch, stamped

CONFIG = LogConfig(segment_bytes=2_000, index_interval_bytes=200)
TOPIC_ID = "aGVsbG8gd29ybGQhISEhIQ"
BATCHES = 70
FLUSHED = 50
"""Number of batches at the last flush before the crash."""
FLIPS = 1_000
"""Number of flipped bits. Ten thousand take four minutes, and passed when they were tried."""
TAIL_BYTES = 64 * 1024
"""Bytes appended since the last flush, at least."""


class UnsyncedDisk(RealDisk):
    """A disk that syncs nothing, since no power cut happens in these tests."""

    def write_atomically(self, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)

    def sync_directory(self, path: str) -> None:
        """Do nothing."""


class Origin:
    """A data directory as a broker left it, and its expected content."""

    def __init__(self, path: Path, *, clean: bool, batches: int = BATCHES, size: int = 20) -> None:
        self.path = path
        self.clean = clean
        asyncio.run(self._write(batches, size))

    async def _write(self, batches: int, size: int) -> None:
        working = self.path.with_name(f"{self.path.name}-working")
        manager = a_manager(working)
        await manager.open("cluster")
        manager.registered(7)
        log = await manager.get_or_create(PARTITION, TOPIC_ID, CONFIG)
        for number in range(batches):
            epoch = number // 20
            if epoch > log.latest_epoch:
                log.assign_epoch_start(epoch, log.log_end_offset)
            sent = batch(2, size=size, timestamp=NOW + 10 * number, producer_id=number % 3, sequence=number // 3 * 2)
            log.append_as_leader(sent, epoch, NOW)
            if number + 1 == min(FLUSHED, batches - 5):
                await manager.checkpoints.checkpoint_recovery_points()
                log.move_log_start_offset(25)
                await manager.checkpoints.remove_old_segments()
                manager.checkpoints.write_high_watermarks(
                    manager.checkpoints.stage_high_watermarks({PARTITION: log.log_end_offset})
                )
        await manager.checkpoints.checkpoint_log_start_offsets()
        self._remember(log)
        if self.clean:
            await manager.close(clean=True)
        shutil.copytree(working, self.path)
        if not self.clean:
            await manager.close(clean=False)
        shutil.rmtree(working)

    def _remember(self, log: Log) -> None:
        self.begin, self.end = log.log_start_offset, log.log_end_offset
        self.batches: dict[int, bytes] = {}
        at = self.begin
        while at < self.end:
            data = log.read(at, 1, self.end)
            [found] = iterate_batches(data)
            self.batches[found.header.base_offset] = data
            at = found.header.next_offset
        self.epochs = epochs_of(log, self.begin)
        self.producers = sequences_of(log)
        self.times = {
            time: finish_at_once(search.offset_for_timestamp(log, time, self.end)) for time in self.asked_times
        }

    asked_times = tuple(range(NOW - 5, NOW + 10 * BATCHES + 10, 37))

    def files(self) -> list[Path]:
        return sorted(path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())


def a_manager(path: Path) -> LogManager:
    path.mkdir(exist_ok=True)
    world = StorageWorld(UnsyncedDisk())
    return LogManager(world, str(path), 1, default_config=CONFIG, checkpoint_interval_ms=10**9)


def sequences_of(log: Log) -> dict[int, list[tuple[int, int]]]:
    return {
        producer_id: [(found.first_sequence, found.last_sequence) for found in producer.batches]
        for producer_id, producer in log._producers.capture()
    }


def epochs_of(log: Log, begin: int) -> list[tuple[int, int]]:
    """Return where each epoch with records from `begin` on ends, as a follower would ask."""
    return [log.end_offset_for(epoch) for epoch in range(5) if log.end_offset_for(epoch)[1] > begin]


def what_becomes_of(origin: Origin, path: Path) -> str:
    """Start a broker on the directory and read everything. Raises AssertionError if it serves something wrong."""
    return asyncio.run(_what_becomes_of(origin, path))


async def _what_becomes_of(origin: Origin, path: Path) -> str:
    manager = a_manager(path)
    try:
        await manager.open("cluster")
    except DataDirectoryUnusable:
        return "refused"
    is_believed = manager.continuity.trusted_since != SINCE_THIS_REGISTRATION
    try:
        log = manager.get(PARTITION)
        if log is None:
            assert PARTITION in manager.damaged or not (path / str(PARTITION)).exists()
            assert not is_believed
            return "set aside"
        assert log.topic_id == TOPIC_ID, "the replica is of another topic"
        assert manager.checkpoints.high_watermark(PARTITION) <= origin.end
        assert log.log_end_offset <= origin.end
        assert log.recovery_point <= log.log_end_offset
        if log.log_end_offset < origin.end:
            assert not is_believed, f"{log.log_end_offset} of {origin.end} are there, and that is believed"
        assert log.log_start_offset <= origin.begin or not is_believed, "records are hidden"
        noticed = _read_everything(origin, log)
        if log.log_end_offset == origin.end and not noticed:
            assert epochs_of(log, origin.begin) == origin.epochs, "it has other epochs"
            assert sequences_of(log) == origin.producers, "it knows other producers"
        if noticed:
            return "noticed by a reader"
        return "as it was" if is_believed and log.log_end_offset == origin.end else "less, and not believed"
    finally:
        await manager.close(clean=False)


def _read_everything(origin: Origin, log: Log) -> bool:
    """Read everything. Return whether the damage was reported or visible to a reader; readers go on behind it."""
    noticed = False
    offset = max(log.log_start_offset, origin.begin)
    while offset < log.log_end_offset:
        expected = next(base for base in reversed(origin.batches) if base <= offset)
        try:
            data = log.read(offset, 1_000, log.log_end_offset)
            whole = list(iterate_batches(data))
            if data and not whole:
                raise CorruptRecord(f"{len(data)} bytes, and no whole batch, at {offset}")
            assert whole, f"nothing at {offset}"
            for header, start, end in whole:
                validate_batch(data, header, start)
                assert header.base_offset == expected, f"offset {header.base_offset} where {expected} is next"
                assert bytes(data[start:end]) == origin.batches[expected]
                expected = offset = header.next_offset
        except BrokerError as error:
            if error.code is not ErrorCode.CORRUPT_MESSAGE:
                raise
            noticed = True
        except CorruptRecord:
            noticed = True
        if noticed:
            offset = next((base for base in origin.batches if base > offset), log.log_end_offset)
    for time, found in origin.times.items():
        try:
            told = finish_at_once(search.offset_for_timestamp(log, time, log.log_end_offset))
        except BrokerError as error:
            if error.code is not ErrorCode.CORRUPT_MESSAGE:
                raise
            noticed = True
            continue
        if log.log_end_offset == origin.end and log.log_start_offset == origin.begin:
            assert told == found or noticed, f"the first record of {time} is {told}, not {found}"
    return noticed


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> list[Origin]:
    path = tmp_path_factory.mktemp("origins")
    return [Origin(path / "clean", clean=True), Origin(path / "crashed", clean=False)]


def damaged(origin: Origin, where: Path, damage: Callable[[Path], None]) -> str:
    shutil.copytree(origin.path, where)
    try:
        damage(where)
        return what_becomes_of(origin, where)
    finally:
        shutil.rmtree(where)


def test_undamaged_directories_are_as_they_were(origins: list[Origin], tmp_path: Path) -> None:
    for origin in origins:
        assert damaged(origin, tmp_path / "copy", lambda _: None) == "as it was"


def flips(origins: list[Origin], tmp_path: Path, times: int, seed: int) -> Counter[tuple[str, str]]:
    random = Random(seed)
    ends: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    for number in range(times):
        origin = origins[number % len(origins)]
        kinds: dict[str, list[Path]] = {}
        for file in origin.files():
            if (origin.path / file).stat().st_size:
                kinds.setdefault(file.suffix or file.name, []).append(file)
        kind = random.choice([*kinds, ".log", ".log", ".log"])
        file = random.choice(kinds[kind])
        position = random.randrange((origin.path / file).stat().st_size)
        bit = 1 << random.randrange(8)

        def flip(path: Path, file: Path = file, position: int = position, bit: int = bit) -> None:
            data = bytearray((path / file).read_bytes())
            data[position] ^= bit
            (path / file).write_bytes(data)

        try:
            ends[kind, damaged(origin, tmp_path / f"{number}", flip)] += 1
        except Exception as error:  # noqa: BLE001 - the failure names its cause
            wrong.append(f"{origin.path.name} {file} at {position}, {bit:#04x}: {str(error).splitlines()[0]}")
    assert not wrong, f"{len(wrong)} of {times}:\n" + "\n".join(wrong[:40])
    return ends


def test_a_flipped_bit_anywhere_is_never_served(origins: list[Origin], tmp_path: Path) -> None:
    ends = flips(origins, tmp_path, 300, 1)
    assert all(end != "refused" or kind == META_PROPERTIES_FILE or kind == ".properties" for kind, end in ends)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a thousand directories, on a disk that may be busy
def test_a_thousand_flipped_bits_are_never_served(origins: list[Origin], tmp_path: Path) -> None:
    ends = flips(origins, tmp_path, FLIPS, 2)
    for (kind, end), times in sorted(ends.items()):
        print(f"{kind:40} {end:25} {times}")
    assert ends.total() == FLIPS


# --- The end of a log is gone, or overwritten ----------------------------------------------------------------------


class Tail:
    """A log with at least TAIL_BYTES behind its recovery point."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.file = path / "00000000000000000000.log"
        batches = [stamped(batch(2, size=size), 2 * n, 0) for n, size in enumerate(self._sizes())]
        self.content = b"".join(batches)
        self.ends = list(accumulate(map(len, batches), initial=0))
        self.begin = self.ends[FLUSHED]

    def _sizes(self) -> Iterator[int]:
        random = Random(3)
        total = 0
        for number in count():
            if number > FLUSHED and total > TAIL_BYTES:
                return
            size = random.choice((20, 100, 400, 3_000))
            total += 2 * size if number >= FLUSHED else 0
            yield size

    def check(self, content: bytes, intact: int) -> None:
        """Return the log as a start recovers it from `content`; the first `intact` bytes are unchanged."""
        self.file.write_bytes(content)
        recovered = recover(
            UnsyncedDisk(),
            str(self.path),
            recovery_point=2 * FLUSHED,
            clean=False,
            log_start_offset=0,
            index_interval_bytes=400,
            now_ms=NOW,
        )
        for segment in recovered.segments:
            segment.close()
        whole = bisect_right(self.ends, intact) - 1
        assert recovered.log_end_offset == 2 * whole
        assert self.file.read_bytes() == self.content[: self.ends[whole]]
        report = recovered.report
        is_torn_append = len(content) == intact and intact % PAGE_BYTES == 0
        assert report.lost_more_than_an_incomplete_batch == (self.ends[whole] < len(content) and not is_torn_append)


@pytest.fixture(scope="module")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Tail:
    return Tail(tmp_path_factory.mktemp("tail") / "orders-0")


def check_tail(tail: Tail, places: Iterable[int]) -> None:
    random = Random(4)
    for place in places:
        tail.check(tail.content[:place], place)
        garbage = random.randbytes(random.choice((1, 60, 500)))
        if garbage[:1] != tail.content[place : place + 1]:
            tail.check(tail.content[:place] + garbage + tail.content[place + len(garbage) :], place)


def test_a_tail_that_is_cut_or_overwritten_leaves_the_batches_before_it(tail: Tail) -> None:
    check_tail(tail, range(tail.begin, len(tail.content), 331))


@pytest.mark.timeout(600)  # hundreds of logs, on a disk that may be busy
@pytest.mark.slow
def test_a_tail_cut_or_overwritten_anywhere_in_a_header_leaves_the_batches_before_it(tail: Tail) -> None:
    """Cut at every seventh byte of the headers, so that each offset within a header is tried in one of the batches, and
    at every 77th byte of the records, which are all under one checksum."""
    assert len(tail.content) - tail.begin >= TAIL_BYTES
    places = range(tail.begin, len(tail.content), 7)
    headers = {place for place in places if place - tail.ends[bisect_right(tail.ends, place) - 1] < HEADER_SIZE}
    check_tail(tail, sorted(headers.union(places[::11])))
