"""Opening a log: after a clean stop, after a crash of the process, after a power cut, and with damaged files.

Below the recovery point, the log's bytes, the names of its files and its leader epochs are on disk for certain. From
there on only the bytes of the batches are trusted, as far as their CRCs, offsets and epochs are right. Everything else
(index entries, snapshots, leader epochs) may belong to a log that was truncated since, and is built again from the
batches. So a restart reads what was written since the last flush, not the whole segment, and nothing but the recovery
point has to be written in step with the log.

The checks, and why they find lost writes:
- the CRC, for torn and overwritten batches;
- batches follow each other, and each segment begins at the end of the one before: if two files were not synced, the
  power cut may have kept only the later one. (Compaction leaves gaps only within segments: it keeps the last batch of
  each, empty if need be.)
- leader epochs never decrease: after a truncation the old tail may reappear behind new batches.

A process that is killed while it appends leaves a batch cut short, which was never acknowledged: this costs no trust.
But a flipped length, or a file that lost its end, may look the same, and then acknowledged records are missing. The
kernel copies a write page by page, and a process dies between two of them: so the end of a torn append is the end of a
page, and anything else that is cut short is a loss.

Trusted batches are written again, so that the next flush covers them, even if the last one failed. It is not much: the
log flushes in the background each time that 32 MiB were appended.

At the first batch that fails, the log is cut and later segments are removed. But if that would remove a whole segment
below the recovery point, which no crash explains, nothing is touched and the replica is reported as damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from minibroker.broker.storage.checkpoints import (
    LEADER_EPOCH_FILE,
    LOG_START_OFFSET_FILE,
    MalformedFile,
    decode_epochs,
)
from minibroker.broker.storage.compaction.swap import finish_swap
from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.aborted_index import AbortedIndex, AbortedTransaction
from minibroker.broker.storage.indexes.index import OFFSET_INDEX, TIME_INDEX, InvalidIndex
from minibroker.broker.storage.leader_epochs import LeaderEpochCache
from minibroker.broker.storage.producer_state import ProducerState
from minibroker.broker.storage.recovery.recovery_progress import LogProgress
from minibroker.broker.storage.segment import LOG_SUFFIX, Appended, Segment, file_name, parse_file_name
from minibroker.broker.storage.snapshots import (
    SNAPSHOT_SUFFIX,
    TOLD_SUFFIX,
    drop_snapshots_above,
    drop_snapshots_below,
    load_producers,
    remove_told,
)
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import (
    HEADER_SIZE,
    LIMIT,
    MAX_BATCH_BYTES,
    NO_LEADER_EPOCH,
    BatchHeader,
    CorruptRecord,
    check_header,
    parse_header,
    validate_batch,
    validate_pieces,
)
from minibroker.protocol.world import Disk

logger = logging.getLogger("minibroker.storage")

_SCAN_BYTES = 1024 * 1024
PAGE_BYTES = 4096
"""The bytes of a write that the kernel copies at a time, or a divisor of them."""
_EVERY_OFFSET = 1 << 62


class DamagedLog(MinibrokerError):
    """The replica cannot be opened without deleting what was safely on disk. Says where."""


class _MissedCleanStop(Exception):
    """The log goes on where a broker that stopped in order would have flushed it."""


class RecoveryReport(NamedTuple):
    """A report of the opening of a log."""

    log_end_offset: int
    scanned_bytes: int
    bytes_cut: int
    lost_more_than_an_incomplete_batch: bool
    """Records that had been in the log may be gone: this replica must not be elected as if it had all of them. False
    where just one batch was cut short at the end of a page, as a crash in the middle of an append leaves it."""
    indexes_rebuilt: int
    problem: str
    """Why the log was cut; empty if it was not."""


class Recovered(NamedTuple):
    """The parts of a `Log`."""

    segments: list[Segment]
    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    written_epochs_version: int
    epochs: LeaderEpochCache
    producers: ProducerState
    snapshots: list[int]
    report: RecoveryReport


class _Bad(NamedTuple):
    """Where the batches of a segment end before the file does."""

    problem: str
    incomplete: bool


class _Scan:
    """Reads a segment's batches with their CRCs checked. `bad` says at the end whether something else follows."""

    def __init__(
        self, segment: Segment, position: int, next_base: int | None, leader_epoch: int, progress: LogProgress
    ) -> None:
        self.position = position
        # Where the very first batch is damaged, the log ends before it, and not where the segment begins.
        self.next_offset = segment.first_offset_at(position)
        self.bad: _Bad | None = None
        self.leader_epoch = leader_epoch
        self._segment = segment
        self._next_base = next_base
        self._progress = progress

    def batches(self) -> Iterator[tuple[int, BatchHeader]]:
        size = self._segment.size
        chunk = b""
        chunk_position = self.position
        while self.position < size:
            left = size - self.position
            at = self.position - chunk_position
            if at + HEADER_SIZE > len(chunk):
                chunk, chunk_position, at = self._read(_SCAN_BYTES), self.position, 0
            is_torn = size % PAGE_BYTES == 0
            if left < HEADER_SIZE:
                self.bad = _Bad(f"{left} bytes follow the last batch", is_torn)
                return
            try:
                header = parse_header(chunk, at)
                check_header(header)
                problem = self._contradiction(header)
                if not problem and header.size > left:
                    is_possible = header.size <= MAX_BATCH_BYTES  # nothing larger is appended
                    self.bad = _Bad(f"{left} of {header.size} bytes of a batch are there", is_torn and is_possible)
                    return
                if not problem and header.size > _SCAN_BYTES:
                    # Accept any size: a release without the present limit may have acknowledged it.
                    validate_pieces(self._pieces(header.size), header)
                    chunk = b""
                elif not problem:
                    if at + header.size > len(chunk):
                        chunk, chunk_position, at = self._read(_SCAN_BYTES), self.position, 0
                    validate_batch(chunk, header, at)
            except CorruptRecord as error:
                problem = str(error)
            if problem:
                self.bad = _Bad(problem, False)
                return
            self.leader_epoch = header.partition_leader_epoch
            self.next_offset = header.next_offset
            yield self.position, header
            self.position += header.size

    def _read(self, size: int, skipped: int = 0) -> bytes:
        position = self.position + skipped
        self._progress.left(self._segment.size - position)
        return self._segment.file.pread(size, position)

    def _pieces(self, size: int) -> Iterator[bytes]:
        """A batch at `position`: a damaged length must not make recovery take gigabytes of memory."""
        for done in range(0, size, _SCAN_BYTES):
            yield self._read(min(_SCAN_BYTES, size - done), done)

    def _contradiction(self, header: BatchHeader) -> str:
        if header.base_offset < self.next_offset:
            return f"offset {header.base_offset} where {self.next_offset} is next"
        if self._next_base is not None and header.last_offset >= self._next_base:
            return f"offset {header.last_offset} in a segment that ends before {self._next_base}"
        if header.partition_leader_epoch < self.leader_epoch:
            return f"leader epoch {header.partition_leader_epoch} follows {self.leader_epoch}"
        return ""


def _is_flushed(next_base: int | None, recovery_point: int) -> bool:
    return next_base is not None and next_base <= recovery_point


def to_be_read(disk: Disk, directory: str, recovery_point: int) -> LogProgress:
    """Return what `recover` will read after a crash: the segments that reach past the recovery point. Blocks. Raises
    OSError."""
    parsed = [name for name in map(parse_file_name, disk.list(directory)) if name is not None]
    bases = [base for base, suffix in parsed if suffix == LOG_SUFFIX]
    sizes: list[int] = []
    for index, base in enumerate(bases):
        next_base = bases[index + 1] if index + 1 < len(bases) else None
        if not _is_flushed(next_base, recovery_point):
            file = disk.open(f"{directory}/{file_name(base, LOG_SUFFIX)}")
            sizes.append(file.size())
            file.close()
    return LogProgress(sizes)


def recover(
    disk: Disk,
    directory: str,
    *,
    recovery_point: int,
    clean: bool,
    log_start_offset: int | None,
    high_watermark: int = LIMIT,
    index_interval_bytes: int,
    now_ms: int,
    before_loss: Callable[[str, bool], None] = lambda reason, was_flushed: None,
    progress: LogProgress | None = None,
) -> Recovered:
    """Open the log in `directory`, repairing what a crash left. Blocks.

    `recovery_point` is the checkpoint's, 0 if it has none; `clean`: the broker stopped cleanly, so all of the log is on
    disk, unless it extends past that point: then it could not be opened, or was set aside, before the stop. A directory
    without segments becomes an empty log that begins at `log_start_offset`; None: not known, and the log begins where
    its first segment does. `high_watermark`: the checkpoint's. `before_loss` is called before anything is cut that is
    more than an incomplete last batch, since afterwards nothing shows it: with the reason, and whether the missing
    records had been flushed for certain.
    `progress`, as `to_be_read` returns it, is told how far this is. A swap of compacted segments that was under way is
    carried out first. Raises DamagedLog, CorruptRecord and MalformedFile (damage below the recovery point), OSError.
    """
    finish_swap(disk, directory, index_interval_bytes)
    if log_start_offset is not None:
        _require_first_segment(disk, directory, log_start_offset, recovery_point)

    def attempt(clean: bool) -> Recovered:
        return _recover(
            disk,
            directory,
            recovery_point,
            clean,
            log_start_offset or 0,
            high_watermark,
            index_interval_bytes,
            now_ms,
            before_loss,
            progress or LogProgress(),
        )

    try:
        return attempt(clean)
    except _MissedCleanStop:
        return attempt(False)


def empty_log(disk: Disk, directory: str, index_interval_bytes: int) -> Recovered:
    """Return the parts of a log in a directory that was just created. Blocks. Raises OSError."""
    return Recovered(
        segments=[Segment.create(disk, directory, 0, index_interval_bytes)],
        log_start_offset=0,
        log_end_offset=0,
        recovery_point=0,
        written_epochs_version=0,
        epochs=LeaderEpochCache(),
        producers=ProducerState(),
        snapshots=[],
        report=RecoveryReport(0, 0, 0, False, 0, ""),
    )


def _recover(
    disk: Disk,
    directory: str,
    recovery_point: int,
    clean: bool,
    log_start_offset: int,
    high_watermark: int,
    index_interval_bytes: int,
    now_ms: int,
    before_loss: Callable[[str, bool], None],
    progress: LogProgress,
) -> Recovered:
    bases, snapshots = _tidy(disk, directory)
    segments: list[Segment] = []
    problem = ""
    scanned = cut = rebuilt = 0
    lost_more = False
    leader_epoch = NO_LEADER_EPOCH
    end_offset = max(log_start_offset, 0)
    try:
        for index, base in enumerate(bases):
            next_base = bases[index + 1] if index + 1 < len(bases) else None
            segment = Segment(disk, directory, base, index_interval_bytes)
            segments.append(segment)
            flushed = _is_flushed(next_base, _EVERY_OFFSET if clean else recovery_point)
            sealed_end = segment.load_sealed() if flushed else None
            if sealed_end is not None and (sealed_end == next_base or _is_being_removed(next_base, log_start_offset)):
                assert next_base is not None
                end_offset = next_base
                continue
            rebuilt += flushed
            start = 0
            if flushed:
                progress.found(segment.size)
                segment.clear_indexes()
            else:
                segment.load_active()
                start = segment.resume(_EVERY_OFFSET if clean else recovery_point, segment.size)
            progress.begin(segment.size)
            scan = _Scan(segment, start, next_base, leader_epoch, progress)
            for position, header in scan.batches():
                segment.note(Appended(header.last_offset, header.max_timestamp, header.size), position)
            scanned += scan.position - start
            leader_epoch = scan.leader_epoch
            end_offset = scan.next_offset
            if clean and end_offset > recovery_point:
                raise _MissedCleanStop
            if scan.bad is not None:
                problem = f"{segment.path}, position {scan.position}: {scan.bad.problem}"
            elif next_base is not None and end_offset != next_base:
                problem = f"{segment.path} ends at offset {end_offset}, but the next segment begins at {next_base}"
            if problem and flushed and next_base is not None and _is_being_removed(next_base, log_start_offset):
                problem, end_offset = "", next_base
            if not (flushed or clean):
                _write_again(segment, start, scan.position)
            progress.end()
            if not problem:
                if next_base is not None:
                    segment.seal()
                if flushed:
                    _store_indexes(disk, segment)
                continue
            if flushed:
                raise DamagedLog(
                    f"{problem}, below the recovery point; opening it would delete what follows. (To give that up, "
                    f"stop the broker, and move this segment and those after it elsewhere)"
                )
            lost_more = next_base is not None or scan.bad is None or not scan.bad.incomplete
            if lost_more:
                before_loss(problem, clean)
            cut = segment.size - scan.position
            for later_base in reversed(bases[index + 1 :]):
                later = Segment(disk, directory, later_base, index_interval_bytes)
                cut += later.size
                later.close()
                later.remove_files()
            if scan.position < segment.size:
                segment.cut(scan.position)
            break
        if not segments:
            segments.append(Segment.create(disk, directory, end_offset, index_interval_bytes))
        if end_offset < recovery_point:
            lost_more = True
            problem = (
                problem or f"the log in {directory} ends at offset {end_offset}, but {recovery_point} had been on disk"
            )
            before_loss(problem, True)
        believed = end_offset if clean else min(recovery_point, end_offset)
        epochs, epochs_end = _load_epochs(disk, directory, believed)
        if not clean or problem:
            # For names that a truncation or a roll changed: what this start saw, the next must see, whatever happens.
            disk.sync_directory(directory)
        snapshots = drop_snapshots_above(disk, directory, snapshots, believed)
        # Snapshots of another log, or left by an interrupted removal of old segments.
        snapshots = drop_snapshots_below(disk, directory, snapshots, segments[0].base_offset)
        aborted_from = _load_aborted(segments, believed)
        believable = [] if aborted_from < believed else snapshots
        producers, snapshot_offset = load_producers(disk, directory, believable, segments[0].base_offset)
        if snapshot_offset > high_watermark and producers.has_transactions:
            # Which markers are not replicated yet is in no snapshot.
            replicated = [offset for offset in believable if offset <= high_watermark]
            producers, snapshot_offset = load_producers(disk, directory, replicated, segments[0].base_offset)
        start = min(snapshot_offset, epochs_end)
        replay(segments, start, end_offset, producers, snapshot_offset, epochs, now_ms, aborted_from)
        if aborted_from < believed:
            for segment in segments:
                segment.store_aborted()
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    log_start_offset = min(max(log_start_offset, segments[0].base_offset), end_offset)
    epochs.truncate_from_start(log_start_offset)
    epochs.truncate_from_end(end_offset)
    return Recovered(
        segments=segments,
        log_start_offset=log_start_offset,
        log_end_offset=end_offset,
        recovery_point=believed,
        written_epochs_version=0 if clean and not problem else -1,
        epochs=epochs,
        producers=producers,
        snapshots=snapshots,
        report=RecoveryReport(end_offset, scanned, cut, lost_more, rebuilt, problem),
    )


def _require_first_segment(disk: Disk, directory: str, log_start_offset: int, recovery_point: int) -> None:
    """A log whose first segments are gone would pass for one that begins later, and a leader's followers delete what
    lies before its beginning. (Where a log was emptied to begin later, both offsets are lowered before.)"""
    names = (parse_file_name(name) for name in disk.list(directory))
    first = min((parsed[0] for parsed in names if parsed is not None and parsed[1] == LOG_SUFFIX), default=None)
    if first is not None and log_start_offset < min(first, recovery_point):
        raise DamagedLog(
            f"{directory} begins at offset {first}, but everything from {log_start_offset} on was on disk. (To give up "
            f"the missing records, stop the broker and remove {LOG_START_OFFSET_FILE})"
        )


def _is_being_removed(next_base: int | None, log_start_offset: int) -> bool:
    """The segment before that one lies below the log's start: a power cut keeps any of the names."""
    return next_base is not None and next_base <= log_start_offset


def _write_again(segment: Segment, start: int, end: int) -> None:
    """Make the bytes of the batches dirty. An fdatasync that failed before the crash may have left pages that differ
    from the disk and that the kernel considers clean: the next one would succeed without writing them."""
    for position in range(start, end, _SCAN_BYTES):
        segment.file.pwrite([segment.file.pread(min(_SCAN_BYTES, end - position), position)], position)


def _store_indexes(disk: Disk, segment: Segment) -> None:
    for write in segment.index_writes():
        write.carry_out(disk)
        write.carried_out()
    segment.indexes_stored()


def _tidy(disk: Disk, directory: str) -> tuple[list[int], list[int]]:
    """The base offsets of segments and the offsets of snapshots; removes temporary files and orphaned indexes."""
    found: dict[str, list[int]] = {}
    for name in disk.list(directory):
        parsed = parse_file_name(name)
        if parsed is not None:
            found.setdefault(parsed[1], []).append(parsed[0])
        elif name.endswith(".tmp"):
            disk.remove(f"{directory}/{name}")
    bases = found.get(LOG_SUFFIX, [])
    for suffix in (OFFSET_INDEX.suffix, TIME_INDEX.suffix, aborted_index.SUFFIX):
        for base in found.get(suffix, []):
            if base not in bases:
                disk.remove(f"{directory}/{file_name(base, suffix)}")
    for offset in found.get(TOLD_SUFFIX, []):
        if offset not in bases[:1]:  # of a start or a removal that was interrupted
            remove_told(disk, directory, offset)
    return bases, found.get(SNAPSHOT_SUFFIX, [])


def _load_epochs(disk: Disk, directory: str, believed: int) -> tuple[LeaderEpochCache, int]:
    """The epochs that the file has below `believed`, and from which offset on to add those of the batches."""
    path = f"{directory}/{LEADER_EPOCH_FILE}"
    try:
        epochs = LeaderEpochCache(decode_epochs(path, disk.read_file(path)))
    except (FileNotFoundError, MalformedFile):
        return LeaderEpochCache(), 0
    epochs.truncate_from_end(believed)
    return epochs, believed


def _load_aborted(segments: list[Segment], believed: int) -> int:
    """Load the aborted transactions. Return the offset from which on they must be taken from the batches."""
    ends = [*(segment.base_offset for segment in segments[1:]), believed]
    try:
        for segment, end in zip(segments, ends, strict=True):
            segment.load_aborted(min(end, believed))
    except InvalidIndex as error:
        logger.warning("%s: %s; building the aborted transactions again from the whole log", segment.path, error)
        for segment in segments:
            segment.aborted = AbortedIndex()
            segment.aborted.in_step = False
        return 0
    return believed


def replay(
    segments: list[Segment],
    start: int,
    end: int,
    producers: ProducerState,
    producers_start: int,
    epochs: LeaderEpochCache | None,
    now_ms: int,
    aborted_from: int = LIMIT,
) -> None:
    """Bring producer state and leader epochs up to the log's `end` from batch headers, and aborted transactions whose
    markers are at `aborted_from` or later."""
    for index, segment in enumerate(segments):
        segment_end = segments[index + 1].base_offset if index + 1 < len(segments) else end
        if segment_end <= start:
            continue
        for position, header in segment.walk(segment.locate(start), segment.size):
            if header.has_producer_id and header.base_offset >= producers_start:
                marker = segment.marker_at(position, header) if header.is_control else None
                ended = producers.update(header, header.base_offset, now_ms, marker)
                if ended is not None and ended.is_aborted and ended.last_offset >= aborted_from:
                    segment.aborted.append(AbortedTransaction.of(ended))
            if epochs is not None and header.last_offset >= start and header.partition_leader_epoch > epochs.latest:
                epochs.assign(header.partition_leader_epoch, header.base_offset)
