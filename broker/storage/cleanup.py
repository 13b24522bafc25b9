"""Cleanup of a log: old segments are removed from disk, and the others compacted (Kafka's cleanup.policy)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from minibroker.broker.storage.compaction.cleanable import Candidate, Cleanable, cleanable, groups
from minibroker.broker.storage.compaction.cleaning import CannotBeCleaned, Compaction, Now, Source
from minibroker.broker.storage.compaction.key_map import KeyMap
from minibroker.broker.storage.compaction.swap import Swap, remove_cleaned
from minibroker.broker.storage.directory import LogDirectory
from minibroker.broker.storage.flushing import SHORTAGE_PAUSE_S, FlushedLog
from minibroker.broker.storage.indexes.aborted_index import AbortedTransactions
from minibroker.broker.storage.io_errors import Trouble, trouble_of
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.recovery.recovery import Recovered
from minibroker.broker.storage.retention import Removal, SegmentExtent
from minibroker.broker.storage.snapshots import (
    keep_snapshot,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    CorruptRecord,
)

Pace = Callable[[int, asyncio.Event], Awaitable[None]]
"""Waits as long as the reading and writing of so many bytes should take, or until the event is set."""


class CleanedLog(FlushedLog):
    """The part of a `Log` that removes and replaces segments in the background."""

    def __init__(
        self,
        directory: LogDirectory,
        path: str,
        partition: TopicPartition,
        topic_id: str,
        config: LogConfig,
        recovered: Recovered,
        first_dirty_offset: int = 0,
        *,
        has_durable_id: bool = True,
    ) -> None:
        """The arguments are those of `FlushedLog`; `first_dirty_offset` is the checkpointed one."""
        super().__init__(directory, path, partition, topic_id, config, recovered, has_durable_id=has_durable_id)
        self._first_dirty_offset = first_dirty_offset
        self._wall_clock_ahead_ms = self._clock.wall_ms() - self._monotonic_ms()
        """The difference between the two clocks when the log was opened."""
        self._compaction: Compaction | None = None
        self._compacting: asyncio.Task[bool] | None = None
        self._is_compaction_paused = False
        self._removal: Removal | None = None
        self._removing: asyncio.Task[None] | None = None
        self._removal_waits = False
        """Old segments should be removed before the next compaction."""

    @property
    def first_dirty_offset(self) -> int:
        """The offset below which no two records have the same key, as far as is known."""
        return self._first_dirty_offset

    # -- removal of old segments --

    @property
    def has_old_segments(self) -> bool:
        """Whether there are segments below the log's start that could be removed."""
        return self._removing is None and self._count_old(self._log_start_offset) > 0

    def _count_old(self, start: int) -> int:
        """Return how many segments can be removed. They end at or below `start`, no flush needs them, and the producers
        of their batches are in a snapshot that no truncation removes."""
        start = min(start, self._log_start_offset, self._recovery_point)
        count = 0
        while count + 1 < len(self._segments) and self._segments[count + 1].base_offset <= start:
            if not self._segments[count].stored:
                break
            count += 1
        # Begin with the newest, which nearly always has a snapshot: checking thousands would hold the loop.
        while count and self._segments[count].base_offset not in self._snapshots:
            count -= 1
        return count

    async def remove_old_segments(self, start: int) -> None:
        """Remove the segments that end at or below `start` from disk. `start` is the log start offset, or less; it and
        the recovery point must be on disk. Segments that cannot be removed yet stay until the next call, as do those
        that an interrupted call leaves."""
        self._directory.check()
        count = 0 if self._closed or self._removing is not None else self._count_old(start)
        if not count:
            return
        if self._compaction is not None:
            self._removal_waits = True  # a compaction that is stopped for each removal may never end
            return
        kept = self._segments[count].base_offset
        try:
            reading = self._directory.run(keep_snapshot, self._disk, self.path, kept)
            is_whole = await self._directory.unless_hung(reading)
        except OSError as error:
            self._directory.refuse(error, f"keeping a snapshot of {self.path}")
        if not is_whole:
            self._snapshots = [offset for offset in self._snapshots if offset != kept]
        is_same = count == self._count_old(start) and kept == self._segments[count].base_offset
        if self._closed or self._removing is not None or self._compaction is not None or not is_same:
            return  # the log has changed: left to the next call
        self._removal_waits = False
        removed, self._segments = self._segments[:count], self._segments[count:]
        snapshots = [offset for offset in self._snapshots if offset < kept]
        self._snapshots = self._snapshots[len(snapshots) :]
        self._epochs.truncate_from_start(kept)
        self._removal = Removal(self._disk, self.path, removed, snapshots)
        self._removing = asyncio.get_running_loop().create_task(self._remove(), name=f"removal {self.partition}")
        await self._directory.unless_hung(self._removing)

    async def _remove(self) -> None:
        assert self._removal is not None
        try:
            await self._directory.run(self._removal.carry_out)
        except OSError as error:
            self._directory.fail_unless_short(error, f"removing segments of {self.path}")
        finally:
            for segment in self._removal.stop():
                segment.close()
            self._removal = self._removing = None

    # -- compaction --

    def candidate(self, last_stable_offset: int, now_ms: int) -> Candidate:
        """Return the part of the log that could be compacted. Raises BrokerError."""
        self.require_usable()
        found = cleanable(
            self.extents(),
            first_dirty=self._first_dirty_offset,
            log_start_offset=self.stored_start_offset,  # records below may be back after a crash
            limit=min(last_stable_offset, self._recovery_point),
            now_ms=now_ms,
            min_compaction_lag_ms=self.config.min_compaction_lag_ms,
        )
        is_overdue = False
        max_lag_ms = self.config.max_compaction_lag_ms
        if max_lag_ms is not None and found.dirty_bytes:
            try:
                oldest = self._segments[self._segment_index(found.first_dirty)]
                oldest_ms = oldest.first_timestamp if oldest.first_timestamp >= 0 else oldest.newest_ms
            except OSError as error:
                self.read_failed(error)
            except CorruptRecord as error:
                self.report_damage(error)
            is_overdue = now_ms - oldest_ms > max_lag_ms
        return Candidate(found, self.config.min_cleanable_dirty_ratio, is_overdue)

    async def compact(self, what: Cleanable, key_map: KeyMap, pace: Pace) -> bool:
        """Make one pass over the log (see `compaction`), with an empty `key_map`. On return everything below
        `first_dirty_offset` is compacted on disk. Return False if the pass was given up: the log was cut or closed,
        compaction is paused, or old segments must be removed first.

        Raises CannotBeCleaned and BrokerError KAFKA_STORAGE_ERROR."""
        self.require_usable()
        assert self._compaction is None
        if self._is_compaction_paused:
            return False
        sources = self._sources(what.end)
        if not sources or not all(source.segment.stored for source in sources):
            return False  # a flush is about to write their indexes
        if self._removal_waits and self.has_old_segments:
            return False
        self._compaction = Compaction(
            self._disk,
            self.path,
            sources,
            first_dirty=what.first_dirty,
            end=what.end,
            key_map=key_map,
            producer_ids=frozenset(producer_id for producer_id, _ in self._producers.capture()),
            aborted=AbortedTransactions(aborted for segment in self._segments for aborted in segment.aborted),
            has_whole_log=sources[0].segment is self._segments[0],
            index_interval_bytes=self.config.index_interval_bytes,
            delete_retention_ms=self.config.delete_retention_ms,
        )
        self._compacting = asyncio.get_running_loop().create_task(
            self._compact(self._compaction, sources, pace), name=f"compaction {self.partition}"
        )
        return await self._directory.unless_hung(self._compacting)

    async def pause_compaction(self) -> None:
        """Stop a pass that is under way, and let none begin before `resume_compaction`. Raises BrokerError
        KAFKA_STORAGE_ERROR if the disk hangs."""
        self._is_compaction_paused = True
        await self._stop_compaction()

    def resume_compaction(self) -> None:
        self._is_compaction_paused = False

    async def _stop_compaction(self) -> None:
        if self._compaction is not None and self._compacting is not None:
            self._compaction.stop()
            await self._directory.unless_hung(asyncio.wait([self._compacting]))

    def _sources(self, end: int) -> list[Source]:
        """Return the segments that begin below `end`, without those that only wait for their removal."""
        return [
            Source(segment, extent.end_offset, extent.size)
            for segment, extent in zip(self._segments, self.extents(), strict=True)
            if extent.base_offset < end and extent.end_offset > self.stored_start_offset and segment is not self._active
        ]

    async def _compact(self, work: Compaction, sources: list[Source], pace: Pace) -> bool:
        try:
            for phase in (work.read_keys(), work.read_headers()):
                if not await self._in_slices(phase, work, pace):
                    return False
            of = {source.segment.base_offset: source for source in sources}
            extents = [
                SegmentExtent(base_offset, source.end_offset, source.size, -1)
                for base_offset, source in of.items()
                if base_offset < work.end
            ]
            for group in groups(extents, self.config.segment_bytes):
                if not await self._replace([of[extent.base_offset] for extent in group], work, pace):
                    return False
            self._first_dirty_offset = max(self._first_dirty_offset, work.end)
            return True
        except OSError as error:
            if work.stopped.is_set() and self._directory.failure is None:
                return False  # the files no longer belong to the log
            self._directory.refuse(error, f"compacting {self.path}")
        except (CorruptRecord, ValueError) as error:
            if work.stopped.is_set():
                return False
            raise CannotBeCleaned(f"{self.partition} cannot be compacted: {error}") from error
        finally:
            self._compaction = self._compacting = None

    async def _in_slices(self, phase: Iterator[int], work: Compaction, pace: Pace) -> bool:
        while not work.stopped.is_set():
            self._directory.check()
            done = await self._directory.run(next, phase, None)
            if done is None:
                return not work.stopped.is_set()
            await pace(done, work.stopped)
        return False

    async def _replace(self, group: list[Source], work: Compaction, pace: Pace) -> bool:
        """Write a group of segments anew, and put the result in their place."""
        run, base = self._directory.run, group[0].segment.base_offset
        cleaned = await run(work.create, base)
        is_wanted = False
        try:
            whole = await self._in_slices(work.write(group, cleaned, self._now()), work, pace)
            is_wanted = whole and (len(group) > 1 or work.has_changed)
        finally:
            if not is_wanted:
                cleaned.close()
                if self._directory.failure is None:
                    await run(remove_cleaned, self._disk, self.path, base)
        if not is_wanted:
            return not work.stopped.is_set()  # it may have been stopped during the removal
        for source in group:
            for aborted in source.segment.aborted:
                if aborted.last_offset not in work.dropped_markers:
                    cleaned.aborted.append(aborted)
        # Nothing else may run between here and the swap's first step.
        old = [source.segment for source in group]
        first = self._segments.index(old[0])
        assert self._segments[first : first + len(old)] == old
        self._segments[first : first + len(old)] = [cleaned]
        self._swap = swap = Swap(self._disk, self.path, cleaned, group[-1].end_offset, old)
        for segment in old:
            self._let_go(segment)
        while not self._closed and self._directory.failure is None:
            try:
                await run(swap.carry_out)
                self._finish_swap()
                break
            except OSError as error:
                doing = f"swapping segments of {self.path}"
                if trouble_of(error) is not Trouble.SHORTAGE:
                    self._directory.fail_and_raise(error, doing)
                self._directory.tell_of_shortage(error, doing)
                await asyncio.sleep(SHORTAGE_PAUSE_S)
        return not work.stopped.is_set()

    def _now(self) -> Now:
        times = self._clock.wall_ms(), self._wall_clock_ahead_ms + self._monotonic_ms()
        return Now(min(times), max(times))

    def _monotonic_ms(self) -> int:
        return round(self._clock.monotonic() * 1_000)
