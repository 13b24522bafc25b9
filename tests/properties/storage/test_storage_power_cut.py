"""After a power cut, a kill or a disk failure, a log keeps its promises.

- Killed process: every appended record is there.
- Power cut: every record below the recovery point is there (a replica with durability=synced counts no further), and
  the records above it are a prefix of those written, never a mixture.
- Leader epochs, producer state and lookups say what the batches say.
- Records removed as too old stay gone once the removal is on disk; their producers are remembered; nothing else goes.
- Producers that an emptied log receives from its leader are remembered as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.broker.storage import search
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.producer_state import RETAINED_BATCHES, Producer, ProducerBatch
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.records import BatchHeader
from tests.simulation.mutants import planted
from tests.storage_support import (
    NOW,
    PARTITION,
    StorageHost,
    StorageWorld,
    batch,
    check_indexes,
    everything,
    headers,
    produced,
    stamped,
)

State = tuple[bytes, ...]

TOLD = 9
"""Id of the producer that an emptied log receives from its leader, and that does not write to it."""

TOLD_REMOVALS = 1
"""How often that producer is removed before a log is emptied without receiving any producer."""


def split(data: bytes) -> State:
    pieces: list[bytes] = []
    position = 0
    for header in headers(data):
        pieces.append(data[position : position + header.size])
        position += header.size
    return tuple(pieces)


def header_of(content: bytes) -> BatchHeader:
    return headers(content)[0]


def is_run_of(run: State, state: State) -> bool:
    """Return whether the batches of `run` follow each other in `state`."""
    return any(state[start : start + len(run)] == run for start in range(len(state) - len(run) + 1))


class Driver:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.host = StorageHost(random)
        self.config = LogConfig(
            segment_bytes=random.choice((1_000, 3_000, 100_000)),
            index_interval_bytes=random.choice((1, 150)),
            flush_bytes=random.choice((600, 100_000)),
            synced=random.random() < 0.3,
        )
        self.state: State = ()
        """The batches appended and not truncated, those below `start` included."""
        self.history: set[State] = {()}
        """Every state since the last one known to be on disk, including that one."""
        self.promised = 0
        """Every offset below it is on disk."""
        self.base = 0
        """The offset at which the log began when it was empty."""
        self.start = 0
        """The offset at which the log begins for readers."""
        self.durable_start = 0
        self.knows_what_is_gone = True
        """`state` has every batch since the log was empty."""
        self.may_begin_anew = False
        """The log was read back after an interrupted emptying. Not even its topic id need be on disk, and without the
        id its directory belongs to another log, as long as nothing is promised."""
        self.emptied = False
        """The log was emptied to begin elsewhere. Until that is on disk, any part of older states may reappear."""
        self.epoch = 0
        self.topic = 0
        self.log: Log = None  # type: ignore[assignment]  # until `open`
        self.told: Producer | None = None
        """The producer state that the emptied log received, of a producer that no longer writes."""
        self.told_start = 0
        """Where the log reported, before it was opened again, that it would begin after a crash."""
        self.lowered_to: int | None = None
        """Where the log begins once the truncation under way has ended."""

    async def open(self) -> None:
        self.told_start = 0 if self.log is None else self.log.stored_start_offset
        if self.lowered_to is not None:
            self.told_start, self.lowered_to = min(self.told_start, self.lowered_to), None
        self.world = StorageWorld(self.host.start_process())
        self.manager = LogManager(self.world, "/data", 1, default_config=self.config, checkpoint_interval_ms=10**9)
        await self.manager.open("cluster")
        assert not self.manager.damaged, self.manager.damaged
        self.log = await self.manager.get_or_create(PARTITION, f"topic-{self.topic}", self.config)
        self.epoch += 1
        self.log.assign_epoch_start(self.epoch, self.log.log_end_offset)

    @property
    def end(self) -> int:
        return header_of(self.state[-1]).next_offset if self.state else self.base

    def readable(self, state: State, start: int | None = None) -> State:
        """The batches that a reader of `state` finds."""
        start = self.start if start is None else start
        return tuple(b for b in state if header_of(b).last_offset >= start)

    # -- what happens while all is well --

    def append(self) -> None:
        producer_id = self.random.randrange(3)
        mine = [h.last_sequence for h in map(header_of, self.state) if h.producer_id == producer_id]
        known = self.log._producers.get(producer_id)
        if not self.knows_what_is_gone and known is not None:
            mine = [known.batches[-1].last_sequence]
        record_set = batch(
            self.random.randint(1, 4),
            size=self.random.choice((10, 60, 200)),
            timestamp=NOW + self.random.randrange(1_000),
            producer_id=producer_id,
            sequence=mine[-1] + 1 if mine else 0,
            fill=self.random.randbytes(3),
        )
        changed = (*self.state, stamped(record_set, self.end, self.epoch))
        self.history.add(changed)
        self.log.append_as_leader(record_set, self.epoch, NOW)
        self.state = changed
        assert self.log.log_end_offset == self.end

    def truncate(self) -> None:
        self.epoch += 1
        # Mostly within the unflushed part.
        lowest = self.random.choice((self.start, max(self.start, min(self.promised, self.end))))
        offset = self.random.randint(lowest, self.end)
        changed = tuple(b for b in self.state if header_of(b).last_offset < offset)
        self.history.add(changed)
        end = header_of(changed[-1]).next_offset if changed else self.base
        self.promised = min(self.promised, end)
        self.durable_start = min(self.durable_start, end)
        self.lowered_to = min(self.start, end)
        self.log.truncate_to(offset)
        self.state, self.start, self.lowered_to = changed, self.lowered_to, None

    def empty(self) -> None:
        self.epoch += 1
        offset = max(0, self.end + self.random.randint(-2, 3))
        self.history.add(())
        self.promised, self.durable_start, self.emptied = 0, 0, True
        told = [(TOLD, Producer(0, (ProducerBatch(4, 4, offset - 1, offset - 1),), 0))] if offset else []
        if self.random.random() < 0.5:
            told = []
        self.log.truncate_fully_and_start_at(offset, producers=told)
        self.told = told[0][1] if told else None
        self.state, self.base, self.start, self.emptied, self.may_begin_anew = (), offset, offset, False, False
        self.knows_what_is_gone = True
        self.history = {()}

    def roll(self) -> None:
        self.log.roll()

    async def flush(self) -> None:
        if self.random.random() < 0.5:
            # The event loop goes on while the worker thread writes.
            self.world.executor.before = self.random.choice((self.append, self.truncate, self.empty, self.roll))
        before = self.log.recovery_point
        await self.log.flush()
        self.world.executor.before = None
        self._flushed(before < self.log.recovery_point)

    async def expire(self) -> None:
        """Move the log's start and remove old segments, while the event loop goes on."""
        self.start = self.random.randint(self.start, self.end)
        self.log.move_log_start_offset(self.start)
        start = self.start
        if self.random.random() < 0.5:
            self.world.executor.before = self.random.choice((self.append, self.truncate, self.empty, self.roll))
        else:  # as for DeleteRecords
            await self.manager.checkpoints.checkpoint_log_start_offsets()
        await self.manager.checkpoints.remove_old_segments()
        self.world.executor.before = None
        if self.manager.directory.log_start_offsets.values.get(PARTITION) == start == self.start:
            self.durable_start = start

    async def checkpoint(self) -> None:
        await self.manager.checkpoints.checkpoint_recovery_points()
        self._flushed(True)

    def _flushed(self, everything: bool) -> None:
        assert self.promised <= self.log.recovery_point <= self.end
        self.promised = self.log.recovery_point
        if self.promised == self.end and everything:
            self.history = {self.state}

    async def delete(self) -> None:
        await self.manager.delete(PARTITION)
        self.topic += 1
        self.state, self.history, self.promised = (), {()}, 0
        self.base = self.start = self.durable_start = 0
        self.may_begin_anew = False
        self.knows_what_is_gone = True
        self.told = None
        self.log = await self.manager.get_or_create(PARTITION, f"topic-{self.topic}", self.config)

    async def stop(self) -> None:
        await self.manager.close()
        self.promised, self.durable_start = self.end, self.start
        self.history = {self.state}
        await self.open()
        assert self.manager.was_clean
        assert self.manager.reports[PARTITION].problem == ""
        assert self.log.log_start_offset == self.start
        self.check_content(self.state)

    # -- what happens when it is not --

    async def _end_process(self) -> None:
        self.host.kill()
        assert self.log.recovery_point <= self.end
        self.promised = max(self.promised, self.log.recovery_point)  # it also flushes by itself
        if self.config.synced:
            assert self.log.safe_end_offset == self.log.recovery_point
        self.world.executor.before = None
        await self.host.end_process()

    async def kill(self) -> None:
        """Kill the process. Everything else survives."""
        history = self.history
        await self.open()
        found, state = self._found(), self.state
        if self.emptied:
            assert any(is_run_of(found, s) for s in history)
        else:
            # The append without an answer may be there, and the truncation may be missing.
            assert found == state or (found[: len(state)] == state and found in history) or self._cut_halfway(found)
        if found == state and not self.emptied:
            report = self.manager.reports[PARTITION]
            # A dying disk tears an append at any byte, not only at the end of a page.
            assert report.bytes_cut or not report.lost_more_than_an_incomplete_batch
        self._adopt(found)
        self.history |= history

    def _found(self) -> State:
        """The batches read back, preceded by those that are too old."""
        start = self.log.log_start_offset
        durable_start = max(self.durable_start, self.told_start)
        assert self.emptied or min(durable_start, self.log.log_end_offset) <= start <= self.start
        old = () if self.emptied else tuple(b for b in self.state if header_of(b).last_offset < start)
        return old + split(everything(self.log))

    def _cut_halfway(self, found: State) -> bool:
        return self.interrupted_truncation and any(found == s[: len(found)] for s in self.history)

    async def cut_the_power(self) -> None:
        self.host.power_cut()
        promised, emptied, history = self.promised, self.emptied, self.history
        kept = tuple(b for b in self.state if header_of(b).last_offset < promised)
        await self.open()
        found = self._found()
        if not emptied:
            assert found[: len(kept)] == kept
            assert any(found == s[: len(found)] for s in history)
            assert not kept or self.log.log_end_offset >= promised
        assert any(is_run_of(found, s) for s in history)
        self._adopt(found)

    interrupted_truncation = False

    def _adopt(self, found: State) -> None:
        self.state = found
        # The batches read back may still not be on disk.
        self.history.add(found)
        self.history = {s for s in self.history if s[: len(found)] == found} | {found[:n] for n in range(len(found))}
        promised, self.promised = self.promised, self.log.recovery_point
        self.start = self.durable_start = self.log.log_start_offset
        if self.may_begin_anew and not promised and not found:
            self.base = self.start
        self.may_begin_anew |= self.emptied
        if self.emptied:
            self.knows_what_is_gone = False
            self.base = self.start if not found else header_of(found[0]).base_offset
        self.epoch = max([self.epoch, *(header_of(b).partition_leader_epoch for b in found)])
        # Opening the log syncs the names of its segments.
        whole, self.emptied = not self.emptied, False
        if not whole:
            self.told = self.log._producers.get(TOLD)
        self.interrupted_truncation = False
        self.check_content(found, producers=whole)

    def check_content(self, state: State, *, producers: bool = True) -> None:
        log = self.log
        assert split(everything(log)) == self.readable(state)
        check_indexes(log)
        assert log.log_end_offset == (header_of(state[-1]).next_offset if state else self.base)
        known = list(map(header_of, self.readable(state)))
        for header in known:
            assert log.epoch_at(max(self.start, header.base_offset)) == header.partition_leader_epoch
        if known:
            youngest = max(h.max_timestamp for h in known)
            found = finish_at_once(search.offset_for_timestamp(log, youngest, log.log_end_offset))
            assert header_of(self.readable(state)[0]).base_offset < self.start or found is not None
            assert found is None or found[0] == youngest or known[0].base_offset < self.start
            newest = finish_at_once(search.newest_record(log, log.log_end_offset))
            assert known[0].base_offset < self.start or (newest is not None and newest[0] == youngest)
        assert finish_at_once(search.offset_for_timestamp(log, NOW + 10_000, log.log_end_offset)) is None
        known_of_told = self.log._producers.get(TOLD)
        assert (known_of_told and known_of_told.batches) == (self.told and self.told.batches)
        if producers:
            self.check_producers(list(map(header_of, state)))

    def check_producers(self, known: list[BatchHeader]) -> None:
        for producer_id in range(3):
            mine = [h for h in known if h.producer_id == producer_id][-RETAINED_BATCHES:]
            for header in mine:
                content = next(b for b in self.state if header_of(b).base_offset == header.base_offset)
                info = self.log.append_as_leader(produced(content), self.epoch, NOW)
                assert (info.duplicate, info.first_offset) == (True, header.base_offset)
            if not mine and self.knows_what_is_gone:
                assert self.log._producers.get(producer_id) is None

    async def step(self) -> None:
        """Do one random thing, during which the machine may die."""
        dies = self.random.random() < 0.15
        if dies:
            self.host.medium.faults.die_after(self.random.randrange(8))
        kind = self.random.randrange(22)
        try:
            if kind < 10:
                self.append()
            elif kind < 12:
                self.interrupted_truncation = True
                self.truncate()
                self.interrupted_truncation = False
            elif kind == 12:
                self.empty()
            elif kind == 13:
                self.roll()
            elif kind < 16:
                self.interrupted_truncation = True
                await self.flush()
                self.interrupted_truncation = False
            elif kind == 16:
                await self.checkpoint()
            elif kind == 17 and not dies:
                await self.stop()
            elif kind == 18 and not dies:
                await self.delete()
            elif kind > 19:
                self.interrupted_truncation = True
                await self.expire()
                self.interrupted_truncation = False
            await asyncio.sleep(0)
        except BrokerError:
            assert dies
        if dies or kind == 19:
            await self._end_process()
            await (self.kill() if self.random.random() < 0.5 else self.cut_the_power())
        assert self.manager.directory.failure is None


@pytest.mark.slow
def test_a_segment_whose_removal_a_kill_interrupted_does_not_come_back() -> None:
    """The next process relies on the names that it finds, so it must make sure that they are on disk."""

    async def run(seed: int) -> None:
        driver = Driver(Random(seed))
        driver.config = LogConfig(segment_bytes=1_000)
        await driver.open()
        for _ in range(20):
            driver.append()
        await driver.checkpoint()
        before = driver.state
        driver.emptied = True
        # All snapshots, and the three files of the last segment.
        driver.host.medium.faults.fail("remove", errno.EIO, after=len(driver.log._snapshots) + 3 + TOLD_REMOVALS)
        with pytest.raises(BrokerError):
            driver.log.truncate_fully_and_start_at(1_000)
        await driver._end_process()
        await driver.kill()
        assert 0 < len(driver.state) < len(before)
        if seed % 2:
            driver.append()
        seen = driver.state
        await driver._end_process()
        await driver.cut_the_power()
        assert driver.state == seen[: len(driver.state)]

    for seed in range(30):
        asyncio.run(run(seed))


def test_a_log_whose_emptying_a_power_cut_interrupted_has_no_gap() -> None:
    """A power cut keeps any of the removed names, also those of segments behind one that is gone."""

    async def run(seed: int) -> None:
        driver = Driver(Random(seed))
        driver.config = LogConfig(segment_bytes=1_000)
        await driver.open()
        for _ in range(20):
            driver.append()
        await driver.checkpoint()
        driver.emptied = True
        removals = TOLD_REMOVALS + len(driver.log._snapshots) + 3 * len(driver.log._segments)
        driver.host.medium.faults.fail("remove", errno.EIO, after=removals - 1)
        with pytest.raises(BrokerError):
            driver.log.truncate_fully_and_start_at(1_000)
        await driver._end_process()
        await driver.cut_the_power()

    for seed in range(30):
        asyncio.run(run(seed))


def test_a_log_that_was_rolled_before_its_first_flush_begins_where_it_began() -> None:
    """Otherwise it would be empty and end where its second segment begins: ahead of all other replicas, though it has
    no records."""

    async def run(seed: int) -> None:
        driver = Driver(Random(seed))
        driver.config = LogConfig(segment_bytes=1_000)
        await driver.open()
        driver.append()
        driver.roll()
        if seed % 2:
            driver.append()
        await driver._end_process()
        await driver.cut_the_power()
        assert driver.log.log_start_offset == 0

    for seed in range(100):
        asyncio.run(run(seed))


def test_a_log_whose_start_was_stored_before_its_first_flush_still_knows_its_producers() -> None:
    """Otherwise it would begin there and claim to know every earlier producer."""

    async def run(seed: int) -> None:
        driver = Driver(Random(seed))
        await driver.open()
        for _ in range(3):
            driver.append()
        driver.start = driver.random.randint(1, driver.end)
        driver.log.move_log_start_offset(driver.start)
        await driver.manager.checkpoints.checkpoint_log_start_offsets()
        driver.durable_start = driver.start
        await driver._end_process()
        await driver.cut_the_power()
        assert driver.log.topic_id == "topic-0"

    for seed in range(30):
        asyncio.run(run(seed))


async def test_a_log_without_descriptors_for_another_segment_begins_where_it_did() -> None:
    driver = Driver(Random(0))
    await driver.open()
    for _ in range(3):
        driver.append()
    driver.host.medium.faults.fail("open", errno.EMFILE)
    with pytest.raises(BrokerError):
        driver.log.move_log_start_offset(driver.end)
    assert driver.log.log_start_offset == 0
    driver.log.move_log_start_offset(driver.end)
    assert driver.log.log_start_offset == driver.end
    await driver.manager.close()


@pytest.mark.parametrize("by", ["recovery", "a truncation"])
@pytest.mark.slow
def test_cut_batches_do_not_come_back_behind_a_segment_rolled_at_once(by: str) -> None:
    """The recovery point is where the next segment begins: the previous one counts as flushed, and old bytes that
    return in it count as damage."""

    async def run(seed: int) -> None:
        driver = Driver(Random(seed))
        await driver.open()
        for _ in range(3):
            driver.append()
        await driver.checkpoint()
        driver.append()
        if by == "recovery":
            await driver.cut_the_power()
        else:
            await driver.checkpoint()
            driver.truncate()
        driver.roll()
        await driver.cut_the_power()

    for seed in range(100):
        asyncio.run(run(seed))


@pytest.mark.parametrize("changes", range(6))
def test_cut_index_entries_do_not_come_back_if_the_process_dies_before_the_sync(
    changes: int,
) -> None:
    """The next process finds the entries gone, and the power cut after it brings them back: they fit the new batches,
    except for their timestamps."""

    async def run(seed: int) -> None:
        host = StorageHost(Random(seed))
        config = LogConfig(segment_bytes=100_000, index_interval_bytes=1)

        async def opened() -> tuple[LogManager, Log]:
            manager = LogManager(
                StorageWorld(host.start_process()), "/data", 1, default_config=config, checkpoint_interval_ms=10**9
            )
            await manager.open("cluster")
            return manager, await manager.get_or_create(PARTITION, "topic", config)

        manager, log = await opened()
        for number in range(10):
            log.append_as_leader(batch(timestamp=NOW + number), 1, NOW)
        await manager.checkpoints.checkpoint_recovery_points()
        log.truncate_to(5)
        host.medium.faults.die_after(changes)  # among them the cut of the offset index
        with contextlib.suppress(BrokerError):
            await manager.checkpoints.checkpoint_recovery_points()
        await host.end_process()
        manager, log = await opened()
        await manager.checkpoints.checkpoint_recovery_points()
        for number in range(5, 10):
            log.append_as_leader(batch(timestamp=NOW + (1_000 if number == 6 else number)), 2, NOW)
        await log.flush()  # of batches, and of the index only if something else may be in its file
        await manager.checkpoints.note_recovery_points()
        await host.end_process()
        host.power_cut()
        manager, log = await opened()
        check_indexes(log)
        assert finish_at_once(search.offset_for_timestamp(log, NOW + 500, log.log_end_offset)) == (NOW + 1_000, 6)
        await manager.close()

    for seed in range(10):
        asyncio.run(run(seed))


async def live(seed: int, steps: int) -> None:
    driver = Driver(Random(seed))
    await driver.open()
    for _ in range(steps):
        await driver.step()
    await driver.manager.close()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
@example(seed=2_584, steps=7)  # an interrupted emptying, whose log had no topic id on disk
def test_power_cuts_kills_and_dying_disks_break_no_promise(seed: int, steps: int) -> None:
    asyncio.run(live(seed, steps))


@pytest.mark.parametrize("cuts_power", [False, True])
def test_a_log_emptied_again_to_an_earlier_start_has_either_state_or_begins_at_zero(
    cuts_power: bool,
) -> None:
    """The leader may begin within a batch, and the follower then gets the whole batch. At offset 0 the log would be
    emptied once more."""

    async def run(seed: int, steps: int) -> None:
        driver = Driver(Random(seed))
        await driver.open()
        told = [(TOLD, Producer(0, (ProducerBatch(4, 4, 15, 15),), 0))]
        driver.log.truncate_fully_and_start_at(20, 3, told)
        driver.host.medium.faults.die_after(steps)
        with contextlib.suppress(BrokerError):
            driver.log.truncate_fully_and_start_at(18, 3, told)
        await driver._end_process()
        if cuts_power:
            driver.host.power_cut()
        await driver.open()
        assert driver.log.log_end_offset == 0 or dict(driver.log.producers()).keys() == {TOLD}
        await driver._end_process()

    for seed in range(8):
        for steps in range(20):
            asyncio.run(run(seed, steps))


def flush_in_two_epochs(bug: str | None) -> None:
    """The bug needs two snapshots. A torn file is rebuilt; only the older, whole one does harm."""

    async def run(seed: int) -> None:
        driver = Driver(Random(seed))
        await driver.open()
        driver.append()
        await driver.checkpoint()
        await driver._end_process()
        await driver.kill()
        with planted(bug):
            driver.append()
            await driver.checkpoint()
        await driver._end_process()
        await driver.cut_the_power()

    for seed in range(100):
        asyncio.run(run(seed))


def test_a_flush_makes_leader_epochs_durable() -> None:
    flush_in_two_epochs(None)
    with pytest.raises(AssertionError):
        flush_in_two_epochs("leader-epochs-not-synced")


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["recovery-point-without-sync", "directories-not-synced", "recovery-without-crc"])
def test_a_missing_sync_or_check_is_detected(bug: str) -> None:
    def lives() -> None:
        for seed in range(500):
            asyncio.run(live(seed, 60))

    with planted(bug), pytest.raises((AssertionError, BrokerError, KeyError)):
        lives()
