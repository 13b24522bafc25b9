"""If the machine dies while old records are deleted, the log reads as before or as after the deletion.

The test plays each pass once to its end and lists the changes that it makes on the disk. It then plays the pass once
for each change, and the process dies just before it. (Calls that only read need no death of their own: the disk is as
after the previous change.) Afterwards the log begins at the old or the new start; every record above it is there; the
leader epochs and the producers of deleted records are known; and no unknown file is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import pytest

from minibroker.broker.storage import snapshots
from minibroker.broker.storage.directory import LogDirectoryFailed
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.retention import expired
from minibroker.protocol.errors import BrokerError
from tests.simulation.mutants import Patches
from tests.storage_support import (
    NOW,
    PARTITION,
    StorageHost,
    StorageWorld,
    batch,
    check_indexes,
    coverage,
    everything,
    produced,
    stamped,
)

PRODUCERS = 3
SEGMENT_MS = 1_000
HOUR_MS = 3_600_000
DIRECTORY = "/data/orders-0"
SEEDS = 1
STRIDE = 9
"""Distance between the tested deaths of a start that follows a death; the tests begin at different steps. Testing every
step takes nine times as long, and passed when it was tried."""


class Sent(NamedTuple):
    first_offset: int
    next_offset: int
    epoch: int
    producer_id: int
    content: bytes


class RetainedLog:
    """A log on the virtual disk whose old records are deleted, and all that was ever appended to it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.host = StorageHost(Random(f"{seed} disk"))
        self.config = LogConfig(
            segment_bytes=700,
            index_interval_bytes=self.random.choice((1, 200)),
            segment_ms=SEGMENT_MS,
            retention_ms=None,
        )
        self.now_ms = NOW
        self.epoch = 0
        self.sent: list[Sent] = []
        self.appended_end = 0
        self.safe_end = 0
        """Where the records end that a power cut must not take."""
        self.safe_start = 0
        """Where the log begins at the latest deletion that was acknowledged; records below must not return."""

    async def open(self, *, dies_before: int | None = None) -> None:
        """Start the broker. Raises LogDirectoryFailed or BrokerError if it dies after so many changes, before the start
        ends."""
        self.world = StorageWorld(self.host.start_process())
        if dies_before is not None:
            self.host.medium.faults.die_after(dies_before)
        self.manager = LogManager(self.world, "/data", 1, default_config=self.config, checkpoint_interval_ms=10**9)
        await self.manager.open("cluster")
        assert not self.manager.damaged, self.manager.damaged
        self.log: Log = await self.manager.get_or_create(PARTITION, "topic", self.config)

    async def fill(self) -> None:
        """Append six segments and flush them; the stored recovery point covers only the first ones."""
        while len(self.log.extents()) < 6:
            self.append()
            self.epoch += self.random.random() < 0.2
            if len(self.log.extents()) == 2 and not self.safe_end:
                await self.manager.checkpoints.checkpoint_recovery_points()
                self.safe_end = self.log.log_end_offset
        await self.flush()
        fourth = self.log.extents()[3]
        self.middle = (fourth.base_offset + fourth.end_offset) // 2

    def append(self) -> None:
        end, producer_id = self.log.log_end_offset, self.random.randrange(-1, PRODUCERS)
        known = self.log._producers.get(producer_id)
        count = self.random.randint(1, 3)
        record_set = batch(
            count,
            size=self.random.choice((20, 100)),
            timestamp=self.now_ms,
            producer_id=producer_id,
            sequence=0 if known is None else known.batches[-1].last_sequence + 1,
        )
        # The batch may be in the log even if the call fails.
        self.sent.append(Sent(end, end + count, self.epoch, producer_id, stamped(record_set, end, self.epoch)))
        self.log.append_as_leader(record_set, self.epoch, self.now_ms)
        self.appended_end = self.log.log_end_offset

    async def flush(self) -> None:
        await self.log.flush()
        self.safe_end = self.log.log_end_offset

    async def expire(self, *, retention_ms: int | None = None, retention_bytes: int | None = None) -> None:
        """Delete old records as `log_retention.expire` and `LogRetention.run_once` do."""
        start = expired(
            self.log.extents(),
            log_start_offset=self.log.log_start_offset,
            high_watermark=self.safe_end,
            now_ms=self.now_ms,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
        )
        self.log.move_log_start_offset(start)
        await self.manager.checkpoints.remove_old_segments()

    async def die(self, *, power_cut: bool) -> None:
        await self.host.end_process()
        if power_cut:
            self.host.power_cut()

    # -- what must hold --

    def check(self) -> None:
        log = self.log
        start, end = log.log_start_offset, log.log_end_offset
        assert end >= self.safe_end
        self.sent = [sent for sent in self.sent if sent.next_offset <= end]
        assert end == self.sent[-1].next_offset
        readable = [sent for sent in self.sent if sent.next_offset > start]
        assert everything(log) == b"".join(sent.content for sent in readable)
        check_indexes(log)
        for sent in readable:
            assert {log.epoch_at(offset) for offset in range(max(start, sent.first_offset), sent.next_offset)} == {
                sent.epoch
            }
        for epoch in {sent.epoch for sent in readable}:
            last = max(sent.next_offset for sent in self.sent if sent.epoch == epoch)
            assert log.end_offset_for(epoch) == (epoch, last)
        for producer_id in range(PRODUCERS):
            for sent in [sent for sent in self.sent if sent.producer_id == producer_id][-5:]:
                info = log.append_as_leader(produced(sent.content), self.epoch, self.now_ms)
                assert (info.duplicate, info.first_offset) == (True, sent.first_offset)

    def check_files(self) -> None:
        """Check that the log knows every file in its directory."""
        log = self.log
        bases = {extent.base_offset for extent in log.extents()}
        for name in self.world.disk.list(DIRECTORY):
            stem, _, suffix = name.partition(".")
            if stem.isdigit():
                known = {*log._snapshots} if suffix == "snapshot" else bases
                assert int(stem) in known, name
            else:
                assert name in ("leader-epoch-checkpoint", "partition.metadata"), name


# --- Passes --------------------------------------------------------------------------------------------------------


async def by_age(driver: RetainedLog) -> None:
    await driver.expire(retention_ms=HOUR_MS // 2)


async def by_size(driver: RetainedLog) -> None:
    await driver.expire(retention_bytes=sum(extent.size for extent in driver.log.extents()[-2:]))


async def delete_records(driver: RetainedLog) -> None:
    """Delete records up to the middle of a segment or batch. The request is answered once the new start is stored."""
    driver.log.move_log_start_offset(driver.middle)
    await driver.manager.checkpoints.checkpoint_log_start_offsets()
    driver.safe_start = driver.middle
    await driver.manager.checkpoints.remove_old_segments()


async def roll_by_time(driver: RetainedLog) -> None:
    """Roll to a new segment by appending a much younger record, then delete everything older."""
    if driver.log.log_end_offset == driver.safe_end:
        driver.append()
        await driver.flush()
    await by_age(driver)


async def everything_goes(driver: RetainedLog) -> None:
    """Delete all records. This seals the active segment."""
    driver.log.move_log_start_offset(driver.log.log_end_offset)
    await driver.flush()
    await driver.manager.checkpoints.remove_old_segments()


Pass = Callable[[RetainedLog], Awaitable[None]]
PASSES: list[Pass] = [by_age, by_size, delete_records, roll_by_time, everything_goes]


async def filled(seed: int, retain: Pass) -> RetainedLog:
    """Return a log whose records are all an hour old. For `by_age` it has newer ones as well, which stay."""
    driver = RetainedLog(seed)
    await driver.open()
    await driver.fill()
    driver.now_ms += HOUR_MS
    if retain is by_age:
        while len(driver.log.extents()) < 8:
            driver.append()
        await driver.flush()
    return driver


# --- Deaths --------------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """The changes and the result of a pass that nothing disturbed."""

    changes: list[tuple[str, str]]
    starts: tuple[int, int]
    """Where the log began before the pass and after it."""


async def play(seed: int, retain: Pass) -> Played:
    driver = await filled(seed, retain)
    before = driver.log.log_start_offset
    changes = driver.host.medium.faults.list_changes()
    await retain(driver)
    played = Played(list(changes), (before, driver.log.log_start_offset))
    driver.check()
    driver.check_files()
    assert before < played.starts[1]
    assert driver.log.extents()[0].base_offset > 0
    await driver.manager.close()
    return played


async def die_before(change: int, seed: int, retain: Pass, played: Played, *, power_cut: bool) -> bool:
    """Kill the process before this change. Return True if the log is then as after the pass, False if as before it."""
    driver = await filled(seed, retain)
    driver.host.medium.faults.die_after(change)
    with suppress(BrokerError):  # the broker may report the failure
        await retain(driver)
    assert driver.host.medium.faults.is_dead
    await driver.die(power_cut=power_cut)
    await driver.open()
    start = driver.log.log_start_offset
    assert start in played.starts
    assert start >= driver.safe_start
    assert power_cut or driver.log.log_end_offset >= driver.appended_end
    driver.check()
    await driver.die(power_cut=False)
    await driver.open()
    assert driver.log.log_start_offset == start
    driver.check()
    driver.check_files()
    await driver.flush()
    await retain(driver)
    assert driver.log.log_start_offset >= played.starts[1]
    driver.check()
    # The lost batch may have kept files from being removed; append a new one.
    driver.append()
    await everything_goes(driver)
    driver.check()
    await driver.manager.close()
    await driver.open()
    driver.check()
    driver.check_files()
    assert len(driver.log.extents()) == 1
    assert not [name for name in driver.world.disk.list("/data") if name.endswith(".tmp")]
    await driver.manager.close()
    return start == played.starts[1]


def die_at_each_step(seed: int, retain: Pass, *, power_cut: bool) -> tuple[Counter[str], list[tuple[str, str]]]:
    """Return how often the log was as before and as after the pass, and the changes before which the process died."""
    played = asyncio.run(play(seed, retain))
    outcomes: Counter[str] = Counter()
    for change in range(len(played.changes)):
        is_after = asyncio.run(die_before(change, seed, retain, played, power_cut=power_cut))
        outcomes["after" if is_after else "before"] += 1
    return outcomes, played.changes


@pytest.mark.slow
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("retain", PASSES)
def test_a_retention_that_dies_at_any_step_leaves_the_log_as_before_or_after(retain: Pass, power_cut: bool) -> None:
    outcomes: Counter[str] = Counter()
    struck: list[tuple[str, str]] = []
    for seed in range(SEEDS):
        found, changes = die_at_each_step(seed, retain, power_cut=power_cut)
        outcomes += found
        struck += changes
    print(f"\ndied before each of {len(struck)} changes; the log was as {dict(outcomes)}:{coverage(struck)}")
    assert outcomes.total() == len(struck)
    assert outcomes["before"] > SEEDS
    assert outcomes["after"] > SEEDS
    kinds = {(operation, path.rpartition(".")[2]) for operation, path in struck}
    assert {("remove", "log"), ("remove", "index"), ("remove", "timeindex"), ("remove", "snapshot")} <= kinds


async def die_twice(
    change: int, change_of_start: int, seed: int, retain: Pass, played: Played, *, power_cut: bool
) -> bool:
    """Kill the pass and then the start after it. Return whether that start died."""
    driver = await filled(seed, retain)
    driver.host.medium.faults.die_after(change)
    with suppress(BrokerError):
        await retain(driver)
    await driver.die(power_cut=power_cut)
    with suppress(LogDirectoryFailed, BrokerError):
        await driver.open(dies_before=change_of_start)
    died = driver.host.medium.faults.is_dead
    await driver.die(power_cut=power_cut)
    await driver.open()
    assert driver.log.log_start_offset in played.starts
    driver.check()
    await driver.manager.close()
    await driver.open()
    driver.check()
    driver.check_files()
    await driver.manager.close()
    return died


@pytest.mark.slow
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("retain", [by_size, roll_by_time])
def test_the_start_after_that_may_also_die_at_any_step(retain: Pass, power_cut: bool) -> None:
    played = asyncio.run(play(0, retain))
    deaths = 0
    for change in range(len(played.changes)):
        change_of_start = change % STRIDE
        while asyncio.run(die_twice(change, change_of_start, 0, retain, played, power_cut=power_cut)):
            change_of_start += STRIDE
            deaths += 1
    print(f"\n{deaths} starts died, at every {STRIDE}th step after each of {len(played.changes)} deaths")
    assert deaths > len(played.changes)


# --- Bugs that this test sees --------------------------------------------------------------------------------------


def start_written_after_the_removal(patches: Patches) -> None:
    removing = False

    @patches.instead_of(LogCheckpoints, "_write_log_start_offsets")
    async def write_log_start_offsets(original: Any, self: LogCheckpoints) -> Any:
        if not removing:
            return await original(self)
        return {log.partition: log.log_start_offset for log in self._logs.values()}

    @patches.instead_of(LogCheckpoints, "remove_old_segments")
    async def remove_old_segments(original: Any, self: LogCheckpoints) -> None:
        nonlocal removing
        removing = True
        try:
            await original(self)
        finally:
            removing = False
        await self.checkpoint_log_start_offsets()


def start_not_written(patches: Patches) -> None:
    @patches.instead_of(LogCheckpoints, "_write_log_start_offsets")
    async def write_log_start_offsets(original: Any, self: LogCheckpoints) -> Any:
        return {log.partition: log.log_start_offset for log in self._logs.values()}


def recovery_points_not_written(patches: Patches) -> None:
    @patches.instead_of(LogCheckpoints, "remove_old_segments")
    async def remove_old_segments(original: Any, self: LogCheckpoints) -> None:
        starts = await self.checkpoint_log_start_offsets()
        for log in list(self._logs.values()):
            await log.remove_old_segments(starts.get(log.partition, 0))


def snapshot_not_synced(patches: Patches) -> None:
    @patches.instead_of(snapshots, "keep_snapshot")
    def keep_snapshot(original: Any, *where: Any) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "retain", "power_cut"),
    [
        (start_written_after_the_removal, by_age, False),
        (start_written_after_the_removal, by_size, True),
        (start_not_written, delete_records, True),
        (recovery_points_not_written, by_size, False),
        (snapshot_not_synced, by_size, True),
    ],
)
def test_a_retention_in_the_wrong_order_is_detected(
    bug: Callable[[Patches], None], retain: Pass, power_cut: bool
) -> None:
    def die_with_several_seeds() -> None:
        for seed in range(SEEDS):
            die_at_each_step(seed, retain, power_cut=power_cut)

    patches = Patches()
    try:
        bug(patches)
        with pytest.raises((AssertionError, BrokerError)):
            die_with_several_seeds()
    finally:
        patches.undo()
