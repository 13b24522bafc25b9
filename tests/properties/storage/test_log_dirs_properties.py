"""For any fate of a broker's log directories, the cluster never trusts it to have records that it lacks.

The test models how the cluster treats one broker. For each partition the cluster records the epoch in which the broker
was known to have everything, and where its log ended. While the broker is trusted by that record
(`elections.is_trusted`), it may be elected; it must then have all those records, or refuse because a directory is
offline.
"""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.broker.storage.directory import DataDirectoryUnusable
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION
from tests.storage_support import NOW, StorageHost, StorageWorld, batch

PATHS = ("/disks/a", "/disks/b", "/disks/c")
PARTITIONS = [TopicPartition("orders", number) for number in range(4)]
CONFIG = LogConfig()


class Life(NamedTuple):
    """One life of the broker, from a start to its end."""

    configured: tuple[str, ...]
    broken: set[str]
    emptied: set[str]
    used: list[TopicPartition]
    fails: tuple[str, str] | None
    """The directory that fails during this life, and which of its calls fail."""
    used_after: list[TopicPartition]
    ends: str


some_paths = st.sets(st.sampled_from(PATHS))
lives = st.lists(
    st.builds(
        Life,
        configured=st.sampled_from([PATHS[:1], PATHS[:2], PATHS[:2], PATHS[:2], PATHS, PATHS[1:], PATHS[1:2]]),
        broken=st.one_of(st.just(set()), some_paths),
        emptied=st.one_of(st.just(set()), st.just(set()), some_paths),
        used=st.lists(st.sampled_from(PARTITIONS), max_size=6),
        fails=st.one_of(st.none(), st.tuples(st.sampled_from(PATHS), st.sampled_from(["fdatasync", "all"]))),
        used_after=st.lists(st.sampled_from(PARTITIONS), max_size=6),
        ends=st.sampled_from(["clean", "kill", "power cut"]),
    ),
    min_size=2,
    max_size=8,
)


class Cluster:
    """The cluster's knowledge of the broker. Each partition is announced to the broker as new exactly once."""

    def __init__(self) -> None:
        self.host = StorageHost(Random(0))
        self.random = Random(1)
        self.epoch = 0
        self.opened: set[str] = set()
        """The directories opened in the previous life."""
        self.record: dict[TopicPartition, tuple[int, int]] = {}
        """The epoch on record, and the end of the log in that epoch."""

    async def life(self, life: Life) -> None:
        disk = self.host.start_process()
        for path in sorted(life.emptied):
            if disk.exists(path):
                disk.remove_tree(path)
        old = {path for path in {*life.configured} - life.broken if disk.exists(path)}
        if old and self.opened and not old & self.opened:
            return  # see `continuity`, which says what goes unnoticed
        for path in life.broken:
            self.host.medium.faults.break_directory(path, errno.EIO)
        world = StorageWorld(disk)
        world.random = self.random
        logs = LogDirs(world, life.configured, 1, checkpoint_interval_ms=10**9)
        try:
            await logs.open("cluster")
        except DataDirectoryUnusable:
            assert set(life.configured) <= set(life.broken)
            return
        self.opened = {manager.log_dir for manager in logs.online}
        self.epoch += 1
        word = logs.trusted_since
        trusted_since = self.epoch if word == SINCE_THIS_REGISTRATION else min(word, self.epoch)
        logs.registered(self.epoch)
        for partition, (epoch, end) in list(self.record.items()):
            if epoch >= trusted_since:
                self.record[partition] = self.epoch, end  # it is elected, whether or not it can lead
                try:
                    log = await logs.get_or_create(partition, "id", CONFIG)
                except BrokerError:
                    continue
                assert log.log_end_offset >= end, f"{partition} ends at {log.log_end_offset}, not {end}: lost"
        await self.use(logs, life.used)
        if life.fails is not None:
            await self.fail(logs, life)
            await self.use(logs, life.used_after)
        if life.ends == "power cut":
            self.host.power_cut(self.random)
        elif life.ends == "clean":
            await logs.close(clean=True)
        else:
            self.host.kill()

    async def use(self, logs: LogDirs, partitions: list[TopicPartition]) -> None:
        """Let replicas catch up, then append an acknowledged batch."""
        for partition in partitions:
            before, end = self.record.get(partition, (None, 0))
            try:
                log = await logs.get_or_create(partition, "id", CONFIG, is_new=before is None)
                while log.log_end_offset <= end:
                    log.append_as_leader(batch(), 0, NOW)
            except BrokerError:
                continue
            self.record[partition] = self.epoch, log.log_end_offset

    async def fail(self, logs: LogDirs, life: Life) -> None:
        assert life.fails is not None
        path, what = life.fails
        faults = self.host.medium.faults
        if what == "all":
            faults.break_directory(path, errno.EIO)
        else:
            faults.fail("fdatasync", errno.EIO)
        for log in list(logs.logs()):
            with suppress(BrokerError):
                await log.flush()
        for manager in logs.online:
            if what == "all" and manager.log_dir == path:
                manager.directory.fail(OSError(errno.EIO, "as a write that failed would"), "a test")
        await logs.note_failed()


@pytest.mark.slow
@given(lives=lives)
@settings(max_examples=300, deadline=None)
def test_a_trusted_broker_has_its_records_or_refuses(lives: list[Life]) -> None:
    async def run() -> None:
        cluster = Cluster()
        for life in lives:
            await cluster.life(life)

    asyncio.run(run())
