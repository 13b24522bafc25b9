"""Planted bugs of storage: data on disk, the state recorded about it, and recovery."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from minibroker.broker.handlers import fetch
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.upkeep import healing
from minibroker.broker.replication.upkeep.healing import Healer
from minibroker.broker.storage import log_dirs, validator
from minibroker.broker.storage.checkpoints import HIGH_WATERMARK_FILE, LEADER_EPOCH_FILE, OffsetCheckpoint
from minibroker.broker.storage.cleanup import CleanedLog
from minibroker.broker.storage.compaction import swap
from minibroker.broker.storage.compaction.cleanable import Candidate
from minibroker.broker.storage.compaction.cleaning import Compaction, Now
from minibroker.broker.storage.compaction.swap import Swap
from minibroker.broker.storage.directory import LogDirectory
from minibroker.broker.storage.flushing import Flush, FlushedLog
from minibroker.broker.storage.indexes.aborted_index import AbortedTransactions
from minibroker.broker.storage.indexes.index import SparseIndex
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.storage.manager import LogManager
from minibroker.broker.storage.opening import LogOpener, read_topic_id
from minibroker.broker.storage.producer_state import ProducerState
from minibroker.broker.storage.recovery import continuity, recovery
from minibroker.broker.storage.recovery.continuity import DataContinuity
from minibroker.broker.storage.segment import IndexWrite, Segment
from minibroker.client.fetching import fetcher
from minibroker.protocol.records import MAX_BODY_BYTES, iterate_batches, validate_batch
from tests.simulation.mutants.planting import Patches, mutant


@mutant("no fdatasync", "a flush advances the recovery point without syncing the segments")
def recovery_point_without_sync(patches: Patches) -> None:
    @patches.instead_of(Flush, "carry_out")
    def carry_out(original: Any, self: Any, *rest: Any) -> None:
        self.files = []
        original(self, *rest)


@mutant("no CRC covers it", "a leader that checks its log checks only CRCs, not the offsets of batches")
def places_are_believed(patches: Patches) -> None:
    @patches.instead_of(Log, "check")
    def check(original: Any, self: Log, data: Any, offset: int) -> None:
        for header, start, _ in iterate_batches(data):
            validate_batch(data, header, start)


@mutant("no CRC covers it", "a leader that checks its log skips the requested offset")
def lower_batches_are_passed(patches: Patches) -> None:
    @patches.instead_of(Log, "check")
    def check(original: Any, self: Log, data: Any, offset: int) -> None:
        self._check(data, 0)


@mutant("no CRC covers it", "a leader that checks its log skips the batch before")
def batch_before_is_passed(patches: Patches) -> None:
    @patches.instead_of(Log, "check")
    def check(original: Any, self: Log, data: Any, offset: int) -> None:
        self._check(data, offset)


@mutant("no CRC covers it", "consumers accept decreasing leader epochs")
def epochs_may_go_down(patches: Patches) -> None:
    @patches.instead_of(fetcher, "placed_batches")
    def placed_batches(original: Any, records: Any, offset: int, end: int, leader_epoch: int, _: int) -> Any:
        return original(records, offset, end, leader_epoch)


@mutant("no CRC covers it", "consumers accept batches at any offset")
def consumers_believe_places(patches: Patches) -> None:
    @patches.instead_of(fetcher, "placed_batches")
    def placed_batches(original: Any, records: Any, *where: Any) -> Any:
        return list(iterate_batches(records)), None


@mutant("two limits for one thing", "a repeated batch that is in the log is rejected by settings that changed since")
def sizes_before_repetitions(patches: Patches) -> None:
    @patches.instead_of(Log, "append_as_leader")
    def append_as_leader(original: Any, self: Log, records: Any, epoch: int, now_ms: int, **named: Any) -> Any:
        headers = validator.read_headers(records, self.partition)
        validator.check_acceptable(records, headers, self.partition, self.config, now_ms, **named)
        return original(self, records, epoch, now_ms, **named)


@mutant("two limits for one thing", "a batch is acknowledged although its records are too large for readers")
def compressed_size_alone_counts(patches: Patches) -> None:
    @patches.instead_of(validator, "_may_be_too_large")
    def may_be_too_large(original: Any, *_: Any) -> bool:
        return False


@mutant("two limits for one thing", "a batch is acknowledged although it claims records that it does not hold")
def claims_are_believed(patches: Patches) -> None:
    @patches.instead_of(validator, "claims_much")
    def claims_much(original: Any, *_: Any) -> bool:
        return False


@mutant("batches without records", "an answer to a consumer may consist only of batches that compaction has emptied")
def consumers_get_emptied_batches(patches: Patches) -> None:
    @patches.instead_of(fetch, "_begins_emptied")
    def begins_emptied(original: Any, response: Any) -> bool:
        return False


@mutant(
    "two limits for one thing", "a restart truncates the log at a batch that exceeds its limit, acknowledged or not"
)
def large_batches_are_cut(patches: Patches) -> None:
    @patches.instead_of(recovery._Scan, "_contradiction")
    def contradiction(original: Any, self: Any, header: Any) -> str:
        return "a large batch" if header.size > MAX_BODY_BYTES // 2 else original(self, header)


@mutant(
    "a new log", "the topic id of a new log counts as durable from the beginning: the first flush does not write it"
)
def topic_id_not_flushed(patches: Patches) -> None:
    @patches.instead_of(LogOpener, "_create_log")
    def create_log(original: Any, self: LogOpener, *rest: Any) -> Any:
        return original(self, *rest)._replace(has_durable_id=True)


@mutant(
    "a new log", "after a power cut, a log that was never flushed counts as the log of the topic whose id it contains"
)
def unflushed_topic_id_believed(patches: Patches) -> None:
    @patches.instead_of(LogOpener, "_topic_id_or_reset")
    def topic_id_or_reset(original: Any, self: LogOpener, directory: str, *rest: Any) -> str:
        return read_topic_id(self._disk, directory)


@mutant("a new log", "if a log is rolled before its first flush, either of its names may be lost")
def first_name_not_synced(patches: Patches) -> None:
    @patches.instead_of(Log, "roll")
    def roll(original: Any, self: Log) -> None:
        known, self._has_durable_id = self._has_durable_id, True
        try:
            original(self)
        finally:
            self._has_durable_id = known


@mutant("a log set aside", "a stop that leaves a log set aside and unflushed counts as clean")
def set_aside_logs_are_vouched_for(patches: Patches) -> None:
    @patches.instead_of(LogManager, "set_aside")
    def set_aside(original: Any, self: LogManager, *args: Any, **rest: Any) -> Any:
        ending = original(self, *args, **rest)
        self._not_flushed.clear()
        return ending


@mutant(
    "DeleteRecords before the first flush",
    "the log start is stored before the log's first flush: after a power cut, the rest begins there without "
    "its producers",
)
def start_stored_before_the_first_flush(patches: Patches) -> None:
    patches.set(FlushedLog, "has_durable_id", property(lambda self: True))


@mutant("no CRC check", "recovery accepts every batch with a plausible header")
def recovery_without_crc(patches: Patches) -> None:
    def believe(*_: Any) -> None:
        pass

    patches.set(recovery, "validate_batch", believe)


@mutant("KAFKA-10778", "an I/O error of a write or a sync is reported, but the log directory stays in use")
def io_error_ignored(patches: Patches) -> None:
    @patches.instead_of(LogDirectory, "fail")
    def fail(original: Any, self: LogDirectory, *rest: Any) -> None:
        """Do nothing."""

    @patches.instead_of(Flush, "carry_out")
    def carry_out(original: Any, self: Any, *rest: Any) -> None:
        with suppress(OSError):
            original(self, *rest)


@mutant("KAFKA-15375, KAFKA-10471", "the clean-shutdown marker survives the start of the broker")
def clean_marker_stays(patches: Patches) -> None:
    @patches.instead_of(LogDirectory, "remove_clean_marker")
    def remove_clean_marker(original: Any, self: LogDirectory) -> None:
        """Do nothing."""


@mutant("KAFKA-15375, KAFKA-10471", "a failed log directory is marked as clean, and trusted, when the broker stops")
def clean_marker_of_a_failed_directory(patches: Patches) -> None:
    @patches.instead_of(LogManager, "close")
    async def close(original: Any, self: LogManager, *, clean: bool = True, broker_epoch: int = -1) -> None:
        failed, self.directory.failure = self.directory.failure is not None, None
        if failed and clean and self.directory.is_taken:
            self.directory.write_clean_marker(broker_epoch)
        await original(self, clean=clean and not failed, broker_epoch=broker_epoch)


@mutant(
    "several log.dirs",
    "a replica that may be in an offline log directory is created anew, empty, in another one, and its broker "
    "is trusted",
)
def replica_in_a_broken_directory_made_anew(patches: Patches) -> None:
    @patches.instead_of(LogDirs, "_check_homes")
    def check_homes(original: Any, self: LogDirs, homes: Any, *rest: Any, may_be_unknown: bool) -> None:
        original(self, homes, *rest, may_be_unknown=True)


@mutant("several log.dirs", "a missing log directory, or one that returns after a failure, goes unnoticed")
def directories_do_not_know_each_other(patches: Patches) -> None:
    @patches.instead_of(continuity, "combined")
    def combined(original: Any, witnesses: Any, unopened: int) -> Any:
        return original(witnesses, unopened)._replace(
            doubt="", trusted_since=max(witness.trusted_since for witness in witnesses)
        )


@mutant("KAFKA-7415", "a new leader's epoch is not written to the leader epoch file")
def leader_epoch_not_persisted(patches: Patches) -> None:
    @patches.instead_of(Log, "assign_epoch_start")
    def assign_epoch_start(original: Any, self: Log, *rest: Any) -> None:
        version = self._epochs.version
        original(self, *rest)
        self._epochs.version = version


@mutant(
    "a topic created again",
    "the stored high watermark is lowered neither for a new topic of that name nor after a truncation: later "
    "records count as committed",
)
def high_watermark_not_lowered(patches: Patches) -> None:
    @patches.instead_of(OffsetCheckpoint, "lower")
    def lower(original: Any, self: OffsetCheckpoint, *rest: Any) -> None:
        if not self.path.endswith(HIGH_WATERMARK_FILE):
            original(self, *rest)


@mutant(
    "a topic created again",
    "an order to delete a replica is obeyed even if the local replica belongs to another topic of that name",
)
def another_topic_deleted(patches: Patches) -> None:
    @patches.instead_of(LogManager, "topic_id")
    async def topic_id(original: Any, self: LogManager, *rest: Any) -> str:
        return ""


@mutant(
    "a clock that jumps", "a producer is forgotten a day after its last batch by the wall clock, whatever its jumps"
)
def producers_forgotten_by_the_wall_clock(patches: Patches) -> None:
    @patches.instead_of(FlushedLog, "_forget_silent_producers")
    def forget_silent_producers(original: Any, self: FlushedLog) -> None:
        since_ms = self._clock.wall_ms() - self.config.producer_id_expiration_ms
        kept = [(i, producer) for i, producer in self._producers.capture() if producer.last_seen_ms >= since_ms]
        self._producers = ProducerState.restore(kept)


@mutant("KAFKA-9144", "a log with many producers forgets the oldest, even with an open transaction")
def oldest_forgotten_with_its_transaction(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "forget_oldest")
    def forget_oldest(original: Any, self: ProducerState, most: int) -> None:
        for producer_id in list(self._producers)[: len(self._producers) - (most - most // 10)]:
            del self._producers[producer_id]
            self._open.pop(producer_id, None)


@mutant("KIP-98", "a log with many producers forgets the newest")
def newest_forgotten(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "forget_oldest")
    def forget_oldest(original: Any, self: ProducerState, most: int) -> None:
        self._producers = dict(reversed(self._producers.items()))
        original(self, most)


@mutant("KIP-98", "a leader does not check the sequence numbers of producers")
def sequences_not_checked(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "check")
    def check(original: Any, self: ProducerState, header: Any) -> None:
        """Treat each batch as new."""


@mutant(
    "KAFKA-2118",
    "compacted segments are swapped in without a marker: the old ones are removed before the new one is renamed",
)
def swap_without_marker(patches: Patches) -> None:
    @patches.instead_of(Swap, "carry_out")
    def carry_out(original: Any, self: Any) -> None:
        if not self._is_done:
            swap._remove_segments(self._disk, self._directory, self._others)
            swap._name_the_cleaned(self._disk, self._directory, self._base)
            for write in self._index_writes:
                write.carry_out(self._disk)
            self._is_done = True


@mutant("index entries of another life", "truncated entries stay in the offset index until the time index is rewritten")
def cut_index_entries_stay(patches: Patches) -> None:
    @patches.instead_of(Segment, "index_writes")
    def index_writes(original: Any, self: Segment, **named: Any) -> list[IndexWrite]:
        writes: list[IndexWrite] = original(self, **named)
        return writes[-2:]  # without the first write of a rewritten offset index


@mutant(
    "index entries of another life", "an index file that was read counts as durable, even if a former process wrote it"
)
def read_index_is_durable(patches: Patches) -> None:
    @patches.instead_of(Segment, "_read_index")
    def read_index(original: Any, self: Segment, layout: Any) -> SparseIndex:
        index: SparseIndex = original(self, layout)
        index.in_step = True
        return index


@mutant("KAFKA-4529", "the next compaction may remove a tombstone, however recently its key was removed")
def tombstone_removed_early(patches: Patches) -> None:
    @patches.instead_of(Compaction, "_kept")
    def kept(original: Any, self: Any, *rest: Any) -> Any:
        self._delete_retention_ms = 0
        return original(self, *rest)


@mutant("a start that a crash undoes", "records below the log start in memory count as clean")
def compacted_from_the_start_in_memory(patches: Patches) -> None:
    @patches.instead_of(CleanedLog, "candidate")
    def candidate(original: Any, self: CleanedLog, *rest: Any) -> Candidate:
        found: Candidate = original(self, *rest)
        first_dirty = max(found.cleanable.first_dirty, self.log_start_offset)
        return found._replace(cleanable=found.cleanable._replace(first_dirty=first_dirty))


@mutant("a clock that jumps", "a tombstone expires by the wall clock, whatever its jumps")
def tombstones_by_the_wall_clock(patches: Patches) -> None:
    @patches.instead_of(CleanedLog, "_now")
    def now(original: Any, self: CleanedLog) -> Now:
        return Now(self._clock.wall_ms(), self._clock.wall_ms())


@mutant("KAFKA-8351, KAFKA-13727", "compaction treats control batches as superseded records")
def control_batches_compacted(patches: Patches) -> None:
    @patches.instead_of(Compaction, "_kept")
    def kept(original: Any, self: Any, header: Any, data: Any, is_last: bool, now: Now) -> Any:
        if header.is_control and not is_last:
            return None
        return original(self, header, data, is_last, now)


@mutant("KIP-903, KIP-966", "a broker on a rebooted host claims that it has lost nothing")
def lost_page_cache_not_noticed(patches: Patches) -> None:
    @patches.instead_of(DataContinuity, "_present_boot_id")
    def present_boot_id(original: Any, self: DataContinuity) -> str:
        return "always the same"


@mutant("KAFKA-3968", "a flush syncs the segments but not their directory")
def directories_not_synced(patches: Patches) -> None:
    @patches.instead_of(Flush, "carry_out")
    def carry_out(original: Any, self: Any, *rest: Any) -> None:
        self.sync_directory, self.epochs = False, None
        original(self, *rest)


@mutant("KAFKA-16541", "a flush does not sync the leader epoch file: a power cut may restore an older one")
def leader_epochs_not_synced(patches: Patches) -> None:
    @patches.instead_of(Flush, "carry_out")
    def carry_out(original: Any, self: Any, world: Any) -> None:
        epochs, self.epochs = self.epochs, None
        original(self, world)
        if epochs is not None:
            path = f"{self.directory}/{LEADER_EPOCH_FILE}"
            file = world.disk.open(path, create=True)
            file.pwrite([epochs], 0)
            file.truncate(len(epochs))
            file.close()


@mutant("a durable mode", "the leader of a synced topic counts its own unflushed records")
def acknowledged_before_own_flush(patches: Patches) -> None:
    @patches.instead_of(FlushedLog, "safe_end_offset")
    def safe_end_offset(original: Any, self: FlushedLog) -> int:
        return self.log_end_offset


@mutant("a durable mode", "a follower of a synced topic fetches further and so confirms unflushed records")
def follower_reports_what_is_not_flushed(patches: Patches) -> None:
    @patches.instead_of(Partition, "may_fetch")
    def may_fetch(original: Any, self: Partition) -> bool:
        return True


@mutant("a durable mode", "a replica of a synced topic outside the ISR catches up and joins without a flush")
def joins_isr_unflushed(patches: Patches) -> None:
    @patches.instead_of(Partition, "may_fetch")
    def may_fetch(original: Any, self: Partition) -> bool:
        return self._settings.broker_id not in self.isr or bool(original(self))


@mutant("(damaged replicas)", "a damaged replica is deleted and created anew while it counts as complete")
def remade_while_in_the_isr(patches: Patches) -> None:
    @patches.instead_of(healing, "may_be_deleted")
    def may_be_deleted(original: Any, *rest: Any) -> bool:
        return True


@mutant("(shortages)", "a replica that lacked descriptors is created only after the next restart")
def refused_replicas_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(Healer, "replica_refused")
    def replica_refused(original: Any, self: Healer, *rest: Any) -> None:
        pass


@mutant("several log.dirs", "of a replica that is in two directories the older log is served, or neither")
def shorter_of_two_is_served(patches: Patches) -> None:
    @patches.instead_of(log_dirs, "_how_long")
    def how_long(original: Any, log: Any) -> tuple[int, ...]:
        return tuple(-number for number in original(log))


@mutant(
    "KIP-113",
    "a replica is served from its new directory, and removed from the old one, before its end is on disk there",
)
def moved_before_it_is_flushed(patches: Patches) -> None:
    @patches.instead_of(FlushedLog, "flush_now")
    def flush_now(original: Any, self: FlushedLog) -> None:
        pass


@mutant("KIP-113", "a log that was truncated during its move, and has grown again, is served as it was copied")
def cuts_are_not_noticed(patches: Patches) -> None:
    @patches.instead_of(FlushedLog, "cuts")
    def cuts(original: Any, self: FlushedLog) -> int:
        return 0


@mutant("asked for once", "replicas that lacked descriptors are retried by a back-off alone")
def room_is_not_noticed(patches: Patches) -> None:
    @patches.instead_of(LogDirs, "room")
    def room(original: Any, self: LogDirs) -> Any:
        return healing.NO_ROOM


@mutant("read_committed", "the aborted transactions that were on disk are unknown after a restart")
def aborted_index_not_loaded(patches: Patches) -> None:
    @patches.instead_of(recovery, "_load_aborted")
    def load_aborted(original: Any, segments: Any, believed: int) -> int:
        return believed


@mutant("read_committed", "the index keeps an aborted transaction whose marker compaction has removed")
def aborted_index_outlives_markers(patches: Patches) -> None:
    @patches.instead_of(Compaction, "_kept_marker")
    def kept_marker(original: Any, self: Compaction, *rest: Any) -> Any:
        kept = original(self, *rest)
        self.dropped_markers.clear()
        return kept


@mutant("read_committed", "a compacted segment without aborted transactions keeps the index of the segment before")
def emptied_index_not_written(patches: Patches) -> None:
    @patches.instead_of(Swap, "carry_out")
    def carry_out(original: Any, self: Swap) -> None:
        path = swap._aborted(self._directory, self._base)
        before = self._disk.read_file(path) if not self._aborted and self._disk.exists(path) else b""
        original(self)
        if before:
            self._disk.write_atomically(path, before)


@mutant("a transaction stays open", "compaction removes an old marker although a batch of its transaction stays")
def marker_goes_before_its_batches(patches: Patches) -> None:
    @patches.instead_of(Compaction, "_kept_marker")
    def kept_marker(original: Any, self: Compaction, *rest: Any) -> Any:
        self._unended.clear()
        return original(self, *rest)


@mutant("lost records", "in compaction, an aborted record supersedes the committed record of its key")
def aborted_records_supersede(patches: Patches) -> None:
    @patches.instead_of(Compaction, "read_keys")
    def read_keys(original: Any, self: Compaction) -> Any:
        aborted, self._aborted = self._aborted, AbortedTransactions(())
        yield from original(self)
        self._aborted = aborted


@mutant("a torn transaction", "a truncation that removes a marker leaves its transaction ended")
def truncation_leaves_transactions_ended(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "reaches")
    def reaches(original: Any, self: ProducerState, offset: int) -> bool:
        return any(p.batches and p.batches[-1].last_offset >= offset for p in self._producers.values())
