"""Shared by tests of storage: a World with a given disk, a host with power cuts, record sets, and a failing disk."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

from crc32c import crc32c

from minibroker.broker.storage.directory import LogDirectory, partition_of
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.recovery.recovery import recover
from minibroker.deploy.simulator.disk import ProcessDisk, VirtualDisk
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.messages import Buffer
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    CRC_END,
    LIMIT,
    MAGIC_COLUMNS,
    BatchHeader,
    encode_batch,
    iterate_batches,
    parse_header,
    stamp,
)
from minibroker.protocol.world import Beside, Disk, Executor, File, Lock, World, ZooKeeper
from minibroker.protocol.world.real import NoZooKeeper, RealDisk, RealNetwork

T = TypeVar("T")

NOW = 1_700_000_000_000
PARTITION = TopicPartition("orders", 0)


class Clock:
    """Stands still; tests set `now_ms`."""

    def __init__(self) -> None:
        self.now_ms = NOW

    def monotonic(self) -> float:
        return self.now_ms / 1_000

    def wall_ms(self) -> int:
        return self.now_ms

    def observed_ms(self) -> int:
        return self.wall_ms()


class InlineExecutor:
    """Runs the function at once. `before` runs first, in place of the event loop's work while a thread is busy."""

    def __init__(self) -> None:
        self.before: Callable[[], None] | None = None

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        before, self.before = self.before, None
        if before is not None:
            before()
        return function(*arguments)


class GatedExecutor(InlineExecutor):
    """Each function waits for a `release`; `busy` counts the waiting ones."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = 0
        self.ran = 0
        self._gate = asyncio.Semaphore(0)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        self.busy += 1
        await self._gate.acquire()
        self.busy -= 1
        self.ran += 1
        return function(*arguments)

    async def release(self) -> None:
        """Let one more function run. On return its caller has continued."""
        self._gate.release()
        for _ in range(10):
            await asyncio.sleep(0)


class StorageWorld:
    """A World whose disk is the given one."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.clock = Clock()
        self.network = RealNetwork()
        self.disk: Disk = disk if disk is not None else RealDisk()
        self.zookeeper: ZooKeeper = NoZooKeeper()
        self.random = Random(1)
        self.executor: InlineExecutor = InlineExecutor()
        """Used by all executors of this World. May be replaced at any time."""

    def new_executor(self, name: str) -> Executor:
        return _CurrentExecutor(self)

    def beside(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> Beside:
        raise NotImplementedError("storage runs nothing beside its loop")


def _conforms(world: StorageWorld) -> World:
    return world


class _CurrentExecutor:
    def __init__(self, world: StorageWorld) -> None:
        self._world = world

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        return await self._world.executor.run(function, *arguments)


class StorageHost:
    """The virtual disk for tests of storage alone, on any event loop. One process at a time uses it."""

    def __init__(self, random: Random) -> None:
        self.medium = VirtualDisk("boot-1", random, lambda _: None)
        self._boots = 1
        self._process = _StorageProcess()
        self.disk: ProcessDisk = self.medium.of(self._process)

    def start_process(self) -> ProcessDisk:
        """Kill the process, clear the disk's faults, and start another process."""
        self.kill()
        self.medium.faults.clear()
        self._process = _StorageProcess()
        self.disk = self.medium.of(self._process)
        return self.disk

    def kill(self) -> None:
        self._process.kill()

    async def end_process(self) -> None:
        """Kill the process, and cancel all tasks of this event loop but the caller's."""
        self.kill()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def power_cut(self, random: Random | None = None) -> None:
        """Cut the power, and start another process. `random` decides which unsynced data survives."""
        self.kill()
        if random is not None:
            self.medium.random = random
        self._boots += 1
        self.medium.power_cut(f"boot-{self._boots}")
        self.start_process()


class _StorageProcess:
    """`minibroker.deploy.simulator.disk.DiskUser`."""

    def __init__(self) -> None:
        self._alive = True
        self._severers: list[Callable[[], None]] = []

    def check(self) -> None:
        if not self._alive:
            raise ProcessKilled("the process was killed")

    def on_kill(self, sever: Callable[[], None]) -> None:
        self._severers.append(sever)

    def kill(self) -> None:
        self._alive = False
        for sever in self._severers:
            sever()


class FailingDisk(RealDisk):
    """The real disk. Its writes or syncs fail once `fail` is set."""

    def __init__(self) -> None:
        self.fail: str | None = None
        """`write`: half of the bytes are written, then the disk is full. `sync`: an I/O error."""

    def check_sync(self) -> None:
        if self.fail == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: str, *, create: bool = False) -> FailingFile:  # type: ignore[override]
        return FailingFile(self, RealDisk.open(self, path, create=create))

    def write_atomically(self, path: str, data: bytes) -> None:
        self.check_sync()
        super().write_atomically(path, data)


class FailingFile:
    def __init__(self, disk: FailingDisk, file: File) -> None:
        self._disk = disk
        self._file = file

    def pread(self, size: int, position: int) -> bytes:
        return self._file.pread(size, position)

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        if self._disk.fail == "write":
            everything = b"".join(data)
            self._file.pwrite([everything[: len(everything) // 2]], position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.pwrite(data, position)

    def size(self) -> int:
        return self._file.size()

    def modified_ms(self) -> int:
        return self._file.modified_ms()

    def set_modified_ms(self, wall_ms: int) -> None:
        self._file.set_modified_ms(wall_ms)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def fdatasync(self) -> None:
        self._disk.check_sync()
        self._file.fdatasync()

    def close(self) -> None:
        self._file.close()


def _is_disk(disk: FailingDisk) -> tuple[Disk, type[Lock]]:
    return disk, Lock


def batch(
    count: int = 1,
    *,
    size: int = 20,
    timestamp: int = NOW,
    producer_id: int = -1,
    producer_epoch: int = 0,
    sequence: int = 0,
    fill: bytes = b"",
    magic: int = MAGIC_COLUMNS,
    transactional: bool = False,
) -> bytes:
    """Return a producer's batch of `count` records of `size` bytes, one millisecond apart."""
    idempotent = producer_id >= 0
    values = [(b"%d:" % i + fill).ljust(size, b".") for i in range(count)]
    return bytes(
        encode_batch(
            values,
            base_timestamp=timestamp,
            timestamp_deltas=list(range(count)),
            producer_id=producer_id,
            producer_epoch=producer_epoch if idempotent else -1,
            base_sequence=sequence if idempotent else -1,
            magic=magic,
            transactional=transactional,
        )
    )


def stamped(record_set: bytes, base_offset: int, leader_epoch: int) -> bytes:
    """Return a producer's batch as the log stores it."""
    return stamp(parse_header(record_set), base_offset, leader_epoch) + record_set[CRC_END:]


def produced(content: bytes) -> bytes:
    """Return a log's batch as its producer sent it."""
    with_length = b"\0" * 8 + content[8:12] + b"\xff" * 4 + content[16:17]
    return with_length + crc32c(content[CRC_END:]).to_bytes(4, "big") + content[CRC_END:]


def headers(data: bytes) -> list[BatchHeader]:
    return [found.header for found in iterate_batches(data)]


class Opened(NamedTuple):
    """A log, its directory and its World."""

    log: Log
    directory: LogDirectory
    world: StorageWorld


def open_log(
    path: str,
    config: LogConfig | None = None,
    *,
    world: StorageWorld | None = None,
    recovery_point: int = 0,
    clean: bool = False,
    log_start_offset: int | None = 0,
    high_watermark: int = LIMIT,
    partition: TopicPartition = PARTITION,
) -> Opened:
    """Open the log in the directory `path`, as a LogManager does."""
    world = world or StorageWorld()
    config = config or LogConfig()
    world.disk.make_directories(path)
    directory = LogDirectory(world, f"{path}/..")
    recovered = recover(
        world.disk,
        path,
        recovery_point=recovery_point,
        clean=clean,
        log_start_offset=log_start_offset,
        high_watermark=high_watermark,
        index_interval_bytes=config.index_interval_bytes,
        now_ms=world.clock.wall_ms(),
    )
    return Opened(Log(directory, path, partition, "", config, recovered), directory, world)


def everything(log: Log) -> bytes:
    """Return all batches from the log's start, read in pieces."""
    pieces: list[bytes] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        data = log.read(offset, 1_000, log.log_end_offset)
        assert data, f"nothing at offset {offset} of {log}"
        pieces.append(data)
        offset = headers(data)[-1].next_offset
    return b"".join(pieces)


def check_indexes(log: Log, *, time_indexes_are_whole: bool = True) -> None:
    """Check all index entries against the batches, and the log as a leader does. If the time indexes are whole, each
    entry of the offset index has the newest timestamp up to it in the time index."""
    for segment in log._segments:
        positions: dict[int, int] = {}
        newest: dict[int, tuple[int, int] | None] = {}
        """By last offset: the largest timestamp up to it, and the first batch with that timestamp."""
        largest: tuple[int, int] | None = None
        for at, header in segment.walk(0, segment.size):
            last = header.last_offset - segment.base_offset
            positions[last] = at
            if header.max_timestamp > (-1 if largest is None else largest[0]):
                largest = header.max_timestamp, last
            newest[last] = largest
        key = -1
        while (entry := segment._offset_index.floor(2**31 - 1 if key == -1 else key - 1)) is not None:
            key = entry[0]
            assert positions[key] == entry[1], (segment.path, entry, positions)
            if time_indexes_are_whole:
                assert segment._time_index.floor_by_value(key) == newest[key], (segment.path, entry)
            if key == 0:
                break
        assert segment.max_timestamp == (-1 if largest is None else largest[0])
    try:
        data = everything(log)
        log.check(data, log.log_start_offset)
        for header in headers(data)[:: len(headers(data)) // 5 + 1]:
            log.check(b"", max(header.base_offset, log.log_start_offset))
            log.check(b"", header.next_offset)
    except BrokerError as error:
        raise AssertionError(error.detail) from error


def coverage(changes: Iterable[tuple[str, str]]) -> str:
    """Return a line for each kind of change in `DiskFaults.list_changes`, with its count."""
    kinds = Counter(f"{operation} of {_kind(path)}" for operation, path in changes)
    return "".join(f"\n  {count:5} {kind}" for kind, count in sorted(kinds.items()))


def _kind(path: str) -> str:
    directory, _, name = path.rpartition("/")
    stem, dot, suffix = name.partition(".")
    if stem.isdigit():
        return f"*{dot}{suffix}"
    return "the log's directory" if partition_of(name) else name if directory != "" else "the data directory"


# --- An example ---------------------------------------------------------------------------------------------------

CONFIG = LogConfig(segment_bytes=2_000, index_interval_bytes=200)
BATCHES = 60


def content(number: int) -> bytes:
    """Return the log's batch with offsets 2 * number and 2 * number + 1."""
    sent = batch(2, timestamp=NOW + 10 * number, producer_id=number % 3, sequence=number // 3 * 2)
    return stamped(sent, 2 * number, number // 20)


def write_log(path: Path, *, checkpoint_at: int = BATCHES) -> Log:
    """Write a log of several segments, flushed when it holds `checkpoint_at` batches."""
    opened = open_log(str(path), CONFIG)

    async def run() -> None:
        for number in range(BATCHES):
            if number == checkpoint_at:
                await opened.log.checkpoint()
            opened.log.append_as_follower(content(number))
        if checkpoint_at == BATCHES:
            await opened.log.checkpoint()
        await opened.log.close()

    asyncio.run(run())
    return opened.log


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)
