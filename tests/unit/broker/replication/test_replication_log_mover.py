"""A replica moves to another log directory during appends; the machine dies or a directory fails at any point of the
move."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import TypeVar

import msgspec
import pytest

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.upkeep import log_mover
from minibroker.broker.replication.upkeep.log_mover import LogMover
from minibroker.broker.storage.compaction.key_map import KeyMap
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import encode_batch
from tests.replication_support import ORDERS, partition_over
from tests.running import run_by
from tests.simulation.seeds import every_seed
from tests.storage_support import (
    NOW,
    Clock,
    InlineExecutor,
    StorageHost,
    StorageWorld,
    batch,
    check_indexes,
    everything,
    headers,
)

HERE, THERE = PATHS = ("/disks/a", "/disks/b")
CONFIG = LogConfig(segment_bytes=1_000, index_interval_bytes=200)
SYNCED = LogConfig(segment_bytes=1_000, index_interval_bytes=200, synced=True)
PRODUCERS = 3
ELSEWHERE = TopicPartition("elsewhere", 0)
"""The replica of a topic that has replicas on other brokers."""

T = TypeVar("T")
STRUCK = ("open", "pwrite", "fdatasync", "rename", "sync_directory")


class YieldingExecutor(InlineExecutor):
    """Let the loop go on while a worker thread is busy."""

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().run(function, *arguments)


class Moving:
    """A broker's log directories with one movable replica, in HERE by default."""

    def __init__(self, host: StorageHost) -> None:
        self.host = host
        world = StorageWorld(host.start_process())
        world.executor = YieldingExecutor()
        self.logs = LogDirs(world, PATHS, 1, checkpoint_interval_ms=10**9)
        self.partitions: dict[TopicPartition, Partition] = {}
        self.moved: list[Partition] = []
        self.mover = LogMover(self.logs, self.partitions, ELSEWHERE.__eq__, self.moved.append)
        self.running: asyncio.Task[None] | None = None
        self.sent = 0

    @property
    def log(self) -> Log:
        return self.partitions[ORDERS].log

    async def open(self, config: LogConfig = CONFIG) -> None:
        await self.logs.open("cluster")
        log = await self.logs.get_or_create(ORDERS, "id", config, is_new=True)
        self.partitions[ORDERS] = partition_over(log, Clock(), self.logs.high_watermark(ORDERS))
        self.running = asyncio.create_task(self.mover.run())

    def append(self, count: int = 1, epoch: int = 0) -> None:
        for _ in range(count):
            sequence = self.sent // PRODUCERS
            records = batch(timestamp=NOW + self.sent, producer_id=self.sent % PRODUCERS, sequence=sequence)
            self.log.append_as_leader(records, epoch, NOW)
            self.sent += 1

    async def until_moved(self, to: str = THERE) -> None:
        async with asyncio.timeout(30):
            while self.log.log_dir != to or self.mover._moves:
                await asyncio.sleep(0)

    async def close(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.logs.close()

    async def die(self, power: Random | None) -> None:
        if power is None:
            await self.host.end_process()
        else:
            self.host.kill()
            await self.host.end_process()
            self.host.power_cut(power)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_mover, "SLICE_BYTES", 400)
    monkeypatch.setattr(log_mover, "REST_BYTES", 400)
    monkeypatch.setattr(log_mover, "BREATH_S", 0)


def run(scenario: Callable[[Moving], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Moving(StorageHost(Random(0))))

    asyncio.run(main())


def offsets(log: Log) -> list[int]:
    return [header.base_offset for header in headers(everything(log))]


def names(host: StorageHost, path: str) -> list[str]:
    return sorted(name for name in host.start_process().list(path) if name.startswith(f"{ORDERS.topic}-"))


@contextmanager
def refused(code: ErrorCode) -> Iterator[None]:
    with pytest.raises(BrokerError) as raised:
        yield
    assert raised.value.code is code


@run_by(run)
async def test_a_moved_replica_keeps_its_records_and_its_new_directory_after_a_restart(moving: Moving, /) -> None:
    await moving.open()
    moving.append(40)
    moving.log.move_log_start_offset(7)
    moving.append(1, epoch=3)
    old = moving.log
    old.assign_epoch_start(5, 41)  # it leads without a record in this epoch
    moving.mover.move(ORDERS, THERE)
    for _ in range(3):
        moving.append(1, epoch=5)
        await asyncio.sleep(0)
    await moving.until_moved()
    assert moving.moved == [moving.partitions[ORDERS]]
    log = moving.log
    assert log.path == f"{THERE}/{ORDERS}"
    assert offsets(log) == list(range(7, 44))
    assert log._epochs.entries == old._epochs.entries
    assert dict(log.producers()).keys() == {0, 1, 2}
    assert log.recovery_point == 44
    check_indexes(log)
    moving.append(10, epoch=5)
    await moving.close()
    assert (names(moving.host, HERE), names(moving.host, THERE)) == ([], [str(ORDERS)])
    again = Moving(moving.host)
    await again.open()
    assert again.log.log_dir == THERE
    assert offsets(again.log) == list(range(7, 54))
    check_indexes(again.log)
    again.mover.move(ORDERS, HERE)
    await again.until_moved(HERE)
    assert offsets(again.log) == list(range(7, 54))
    await again.close()


@every_seed(range(5))
@pytest.mark.parametrize("config", [CONFIG, SYNCED], ids=["asynchronous", "synced"])
@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
async def test_whenever_the_broker_dies_one_directory_has_all_that_the_replica_had(
    config: LogConfig, power: bool, seed: int
) -> None:
    """A kill keeps every record, a power cut the flushed ones. The broker dies at one in five changes of a disk for
    each seed."""

    async def dies_after(number: int) -> bool:
        host = StorageHost(Random(number))
        moving = Moving(host)
        await moving.open(config)
        moving.append(30)
        moving.log.move_log_start_offset(5)
        await moving.log.checkpoint()
        await moving.logs.at(HERE, LogCheckpoints.checkpoint_log_start_offsets)
        await moving.logs.at(HERE, LogCheckpoints.note_recovery_points)
        safe = 30
        faults = host.medium.faults
        faults.die_after(number)
        moving.mover.move(ORDERS, THERE)
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(30):
                while not faults.is_dead and (moving.mover._moves or not moving.moved):
                    if moving.sent < 50:
                        moving.append()
                    safe = max(safe, moving.log.recovery_point)
                    await asyncio.sleep(0)
        has_died, sent = faults.is_dead, moving.sent
        await moving.die(Random(number) if power else None)
        again = Moving(host)
        await again.logs.open("cluster")
        [log] = again.logs.logs()
        found = offsets(log)
        assert found == list(range(5, len(found) + 5)), number
        assert log.log_end_offset >= (safe if power else sent), number
        check_indexes(log)
        assert log.topic_id == "id"
        assert dict(log.producers()).keys() == {0, 1, 2}
        await again.logs.close()
        for path in PATHS:
            assert not [name for name in names(host, path) if name.endswith("-future")]
        return has_died

    number = seed
    while await dies_after(number):
        number += 5
    assert number > 50


@pytest.mark.parametrize("seed", range(5))
async def test_what_was_flushed_just_before_the_move_ended_survives_a_power_cut_just_after_it(seed: int) -> None:
    host = StorageHost(Random(seed))
    moving = Moving(host)
    await moving.open()
    moving.append(30)
    moving.mover.move(ORDERS, THERE)
    old, safe = moving.log, 0
    while moving.log is old:
        moving.append()
        await old.flush()
        safe = max(safe, old.recovery_point)
    await moving.until_moved()
    await moving.die(Random(seed))
    again = Moving(host)
    await again.logs.open("cluster")
    [log] = again.logs.logs()
    assert log.log_dir == THERE
    assert log.log_end_offset >= safe
    assert offsets(log) == list(range(log.log_end_offset))
    await again.logs.close()


async def test_whenever_the_destination_fails_the_replica_is_served_from_where_it_was() -> None:
    async def fails_at(operation: str, after: int) -> bool:
        moving = Moving(StorageHost(Random(after)))
        await moving.open()
        moving.append(30)
        blown: list[None] = []
        faults = moving.host.medium.faults
        faults.break_directory_at(THERE, operation, errno.EIO, after, lambda: blown.append(None))
        moving.mover.move(ORDERS, THERE)
        async with asyncio.timeout(30):
            while moving.mover._moves:
                await asyncio.sleep(0)
        is_here = moving.log.log_dir == HERE
        if is_here:
            assert list(moving.logs.offline) == [THERE] * len(blown)
            assert not moving.logs.is_offline(ORDERS)
            assert moving.logs.get(ORDERS) is moving.log
            moving.append(5)
            assert offsets(moving.log) == list(range(35))
        await moving.close()
        return is_here and bool(blown)

    failed = [await fails_at(operation, after) for operation in STRUCK for after in range(7)]
    assert sum(failed) > 20


@run_by(run)
async def test_a_replica_whose_old_directory_fails_after_the_move_is_served_on(moving: Moving, /) -> None:
    await moving.open()
    moving.append(30)
    await moving.log.checkpoint()
    moving.mover.move(ORDERS, THERE)
    moving.host.medium.faults.break_directory_at(HERE, "rename", errno.EIO, 0, lambda: None)
    await moving.until_moved()
    assert list(moving.logs.offline) == [HERE]
    assert not moving.logs.is_offline(ORDERS)
    moving.append(5)
    assert offsets(moving.log) == list(range(35))
    # Records left there would be back with the directory.
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        await moving.logs.delete(ORDERS)
    await moving.close()
    again = Moving(moving.host)
    await again.open()
    assert (again.log.log_dir, again.log.log_end_offset) == (THERE, 35)
    await again.close()


@run_by(run)
async def test_a_log_that_is_cut_while_it_is_moved_is_copied_anew(moving: Moving, /) -> None:
    await moving.open()
    moving.append(30)
    moving.mover.move(ORDERS, THERE)
    while not moving.mover.futures_in(THERE)[0].size:
        await asyncio.sleep(0)
    moving.log.truncate_to(2)
    for number in range(30):  # other records, of another leader, until it is as long as before
        moving.log.append_as_leader(batch(timestamp=NOW - 1 - number), 1, NOW)
    kept = everything(moving.log)
    await moving.until_moved()
    assert everything(moving.log) == kept
    assert moving.log._epochs.entries == [(0, 0), (1, 2)]
    await moving.close()


@run_by(run)
async def test_a_log_is_not_compacted_while_it_is_moved_and_goes_on_to_be_afterwards(moving: Moving, /) -> None:
    async def compacted() -> bool:
        cleanable = moving.log.candidate(moving.sent, NOW).cleanable
        return await moving.log.compact(cleanable, KeyMap(100_000, b"0123456789abcdef"), pace)

    async def pace(done: int, stopped: asyncio.Event) -> None:
        pass

    await moving.open(msgspec.structs.replace(CONFIG, compact=True, delete=False))
    for _ in range(2):
        for number in range(20):
            moving.log.append_as_leader(keyed(number % 5), 0, NOW)
        await moving.log.checkpoint()
    moving.sent = moving.log.log_end_offset
    assert await compacted()
    first_dirty, kept = moving.log.first_dirty_offset, offsets(moving.log)
    assert first_dirty > 0
    assert len(kept) < 40
    moving.log.append_as_leader(keyed(1), 0, NOW)
    moving.mover.move(ORDERS, THERE)
    while not moving.mover.futures_in(THERE)[0].size:
        await asyncio.sleep(0)
    assert not await compacted()
    await moving.until_moved()
    assert offsets(moving.log) == [*kept, 40]
    assert moving.log.first_dirty_offset == first_dirty
    moving.log.roll()
    await moving.log.checkpoint()
    moving.sent = moving.log.log_end_offset
    assert await compacted()
    assert moving.log.first_dirty_offset == 41
    await moving.close()


def keyed(key: int) -> bytes:
    return bytes(encode_batch([b"x" * 40], keys=[b"key-%d" % key], base_timestamp=NOW, timestamp_deltas=[0]))


@run_by(run)
async def test_a_log_whose_start_moves_past_what_was_copied_is_copied_from_there(moving: Moving, /) -> None:
    await moving.open()
    moving.append(30)
    moving.mover.move(ORDERS, THERE)
    while not moving.mover.futures_in(THERE)[0].size:
        await asyncio.sleep(0)
    moving.log.move_log_start_offset(30)
    await moving.until_moved()
    assert (moving.log.log_start_offset, moving.log.log_end_offset) == (30, 30)
    moving.append(2)
    assert offsets(moving.log) == [30, 31]
    await moving.close()


@run_by(run)
async def test_a_replica_that_is_deleted_while_it_is_moved_leaves_nothing_behind(moving: Moving, /) -> None:
    await moving.open()
    moving.append(30)
    moving.mover.move(ORDERS, THERE)
    while not moving.mover.futures_in(THERE)[0].size:
        await asyncio.sleep(0)
    del moving.partitions[ORDERS]
    await moving.logs.delete(ORDERS)
    async with asyncio.timeout(30):
        while moving.mover._moves:
            await asyncio.sleep(0)
    await moving.close()
    assert (names(moving.host, HERE), names(moving.host, THERE)) == ([], [])


@pytest.mark.parametrize("position", [3, 16, 30, 400])
def test_a_log_that_is_damaged_stays_where_it_is_and_the_destination_serves_on(
    position: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(moving: Moving) -> None:
        await moving.open()
        moving.append(30)
        await moving.log.checkpoint()
        moving.host.medium.rot(f"{HERE}/{ORDERS}/{0:020}.log", position, 4)
        moving.mover.move(ORDERS, THERE)
        async with asyncio.timeout(30):
            while moving.mover._moves:
                await asyncio.sleep(0)
        assert moving.log.log_dir == HERE
        assert not moving.logs.offline
        assert moving.running is not None
        assert not moving.running.done()
        moving.append(1)
        await moving.close()
        assert names(moving.host, THERE) == []

    run(scenario)
    assert f"{ORDERS} is not moved to {THERE}" in caplog.text


@run_by(run)
async def test_a_move_back_to_where_the_replica_is_ends_the_move_and_the_last_directory_counts(
    moving: Moving, /
) -> None:
    await moving.open()
    moving.append(30)
    moving.mover.move(ORDERS, THERE)
    assert moving.mover.futures_in(THERE) == [(ORDERS, 0, 30)]
    assert moving.mover.futures_in(HERE) == []
    while not moving.mover.futures_in(THERE)[0].size:
        await asyncio.sleep(0)
    [future] = moving.mover.futures_in(THERE)
    assert 0 < future.size < moving.log.size
    assert 0 < future.offset_lag < 30
    moving.mover.move(ORDERS, HERE)
    assert moving.mover.futures_in(THERE) == []
    for _ in range(100):
        await asyncio.sleep(0)
    assert moving.log.log_dir == HERE
    await moving.close()
    assert names(moving.host, THERE) == []


@run_by(run)
async def test_what_cannot_be_moved_is_refused_as_by_kafka(moving: Moving, /) -> None:
    await moving.open()
    moving.append(30)
    with refused(ErrorCode.LOG_DIR_NOT_FOUND):
        moving.mover.move(ORDERS, "/disks/c")
    with refused(ErrorCode.LOG_DIR_NOT_FOUND):
        moving.mover.move(ORDERS, f"{THERE}/")
    with refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
        moving.mover.move(TopicPartition("none", 0), THERE)
    with refused(ErrorCode.REPLICA_NOT_AVAILABLE):
        moving.mover.move(ELSEWHERE, THERE)
    moving.mover.move(ORDERS, HERE)
    assert not moving.mover.futures_in(HERE)
    for manager in moving.logs.online:
        if manager.log_dir == THERE:
            manager.directory.fail(OSError(errno.EIO, "broken"), "a test")
    with refused(ErrorCode.KAFKA_STORAGE_ERROR):
        moving.mover.move(ORDERS, THERE)
    await moving.close()


def test_a_disk_that_has_too_little_room_for_the_copy_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(moving: Moving) -> None:
        await moving.open()
        moving.append(30)
        await moving.log.checkpoint()
        moving.host.medium.faults.free_bytes = 1_000
        moving.mover.move(ORDERS, THERE)
        async with asyncio.timeout(30):
            while moving.mover._moves:
                await asyncio.sleep(0)
        assert moving.log.log_dir == HERE
        assert not moving.logs.offline
        moving.host.medium.faults.clear()
        await moving.close()

    run(scenario)
    assert f"{THERE} has room for 1000 bytes" in caplog.text
