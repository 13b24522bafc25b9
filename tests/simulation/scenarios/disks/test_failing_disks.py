"""Disks that fail: a failed fdatasync leaves pages that are only in memory, although the kernel considers them clean;
an error while replicas are opened fails the start, but costs no replica."""

from __future__ import annotations

import errno

import pytest

from minibroker.broker.storage.directory import DataDirectoryUnusable
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.storage_support import NOW, batch

LOG_DIR = "/var/lib/minibroker"
PARTITION = TopicPartition("orders", 0)


async def _open(world: VirtualWorld) -> LogManager:
    logs = LogManager(world, LOG_DIR, 1)
    await logs.open("cluster")
    return logs


@run_by(on_virtual_loop)
async def test_data_left_in_memory_by_a_failed_fsync_is_on_disk_after_the_next_flush() -> None:
    host = Simulation().host("broker-1")

    async def fail_to_flush(world: VirtualWorld) -> None:
        log = await (await _open(world)).get_or_create(PARTITION, "topic-id", LogConfig())
        log.append_as_leader(batch(1, size=10_000, fill=b"a" * 9_000), 0, NOW)
        host.disk.faults.fail("fdatasync", errno.EIO)
        with pytest.raises(BrokerError, match="offline"):
            await log.flush()

    async def flush(world: VirtualWorld) -> None:
        log = (await _open(world)).get(PARTITION)
        assert log is not None
        assert log.log_end_offset == 1
        await log.checkpoint()
        assert log.recovery_point == 1

    async def read(world: VirtualWorld) -> bytes:
        log = (await _open(world)).get(PARTITION)
        assert log is not None
        return log.read(0, 1_000_000, log.log_end_offset)

    world = host.start_process()
    await world.process.run(fail_to_flush(world))
    world.process.kill()
    world = host.start_process()
    await world.process.run(flush(world))
    host.power_cut()
    world = host.start_process()
    assert b"a" * 9_000 in await world.process.run(read(world))


@run_by(on_virtual_loop)
async def test_a_broker_does_not_start_if_its_disk_fails_while_replicas_are_opened() -> None:
    host = Simulation().host("broker-1")

    async def append(world: VirtualWorld) -> None:
        log = await (await _open(world)).get_or_create(PARTITION, "topic-id", LogConfig())
        log.append_as_leader(batch(1), 0, NOW)

    async def start(world: VirtualWorld) -> bool:
        try:
            logs = await _open(world)
        except DataDirectoryUnusable:
            return False
        assert logs.damaged == {}
        assert logs.get(PARTITION) is not None
        return True

    world = host.start_process()
    await world.process.run(append(world))
    world.process.kill()
    failed = 0
    for number in range(100):
        host.disk.faults.fail("sync_directory", errno.EIO, after=number)
        world = host.start_process()
        started = await world.process.run(start(world))
        world.process.kill()
        host.disk.faults.clear()
        if started:
            break
        failed += 1
    assert failed
