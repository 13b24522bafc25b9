"""Checks that the files of a stopped broker agree with themselves and with each other, without changing a byte.

A broker checks only what it needs to start (`recovery`), and trusts everything below the recovery point. Here every
CRC, record, index entry, snapshot and checkpoint is checked that the next start relies on: from the recovery point on,
the active segment's index, the snapshots and the leader epochs are built again, and may hold anything.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from minibroker.broker.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    LEADER_EPOCH_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    EpochEntry,
    MalformedFile,
    decode_clean_shutdown,
    decode_epochs,
    decode_meta_properties,
    decode_offsets,
    decode_topic_id,
)
from minibroker.broker.storage.compaction.swap import SWAP_SUFFIX
from minibroker.broker.storage.directory import partition_of
from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.aborted_index import AbortedTransaction
from minibroker.broker.storage.indexes.index import OFFSET_INDEX, TIME_INDEX, InvalidIndex, Layout
from minibroker.broker.storage.inspection.aborted import AbortedComparison, Transactions
from minibroker.broker.storage.inspection.batches import (
    BadBytes,
    Batch,
    base_offset_of,
    read_aborted,
    read_index,
    scan,
)
from minibroker.broker.storage.producer_state import InvalidSnapshot, decode_snapshot
from minibroker.broker.storage.recovery.continuity import CONTINUITY_FILE, decode_continuity
from minibroker.broker.storage.segment import LOG_SUFFIX, file_name
from minibroker.broker.storage.snapshots import SNAPSHOT_SUFFIX, TOLD_SUFFIX
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import ControlType, CorruptRecord, decode_batch, decode_control_batch

_EVERY = 1 << 62

BUILT_AGAIN = "stop the broker and remove the file: it is built again from the batches"
_NOT_BUILT_AGAIN = (
    "no batch has it: what a producer that had written before the log begins repeats may be written twice"
)
"""The remedy if only a file that is derived from the batches is wrong."""


_WITHOUT_IT = {
    RECOVERY_POINT_FILE: "the next start reads all logs from their beginning",
    LOG_START_OFFSET_FILE: "the next start goes on without it, and records may be back that had been deleted",
    HIGH_WATERMARK_FILE: "the next start goes on without it",
    CLEANER_OFFSET_FILE: "the next start goes on without it, and compacts from the beginning",
}
"""The effects of damage to a checkpoint. No checkpoint should be removed: a broker that sees damage reports it to the
cluster."""


class Finding(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Something that is wrong. `position` to `end` are bytes of the file; `offset` is the first that is concerned.
    `costs_records`: records are missing or cannot be read; otherwise all that is wrong can be built again.
    `is_unclear`: nothing may be wrong at all; what would tell is not at hand."""

    file: str
    problem: str
    position: int | None = None
    end: int | None = None
    offset: int | None = None
    costs_records: bool = False
    is_unclear: bool = False


class PartitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a partition's directory, or of one segment. `log_end_offset`: the offset that the next record
    would get."""

    directory: str
    segments: int
    batches: int
    records: int
    bytes: int
    log_start_offset: int
    log_end_offset: int
    findings: list[Finding]


class DirectoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a broker's data directory; `findings` are those about its own files."""

    directory: str
    partitions: list[PartitionReport]
    findings: list[Finding]


class Checkpointed(NamedTuple):
    """The entries of the data directory's files for one partition; None: no entry, or the file is not at hand."""

    recovery_point: int | None = None
    log_start_offset: int | None = None
    """Not None wherever that file can be read."""
    high_watermark: int | None = None
    is_compacted: bool | None = None
    """None: not known, since that file is not there, or damaged."""


_Offsets = Mapping[TopicPartition, int]


class _Checkpoints(NamedTuple):
    """Those of a data directory; None: there is none, or it is damaged."""

    recovery_points: _Offsets | None
    log_start_offsets: _Offsets | None
    high_watermarks: _Offsets | None
    first_dirty_offsets: _Offsets | None

    @classmethod
    def read(cls, path: Path, findings: list[Finding]) -> _Checkpoints:
        return cls(
            *(
                _read_offsets(path / name, findings)
                for name in (RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE, HIGH_WATERMARK_FILE, CLEANER_OFFSET_FILE)
            )
        )

    def of(self, partition: TopicPartition) -> Checkpointed:
        return Checkpointed(
            (self.recovery_points or {}).get(partition),
            # Where it is 0, it is left out.
            None if self.log_start_offsets is None else self.log_start_offsets.get(partition, 0),
            (self.high_watermarks or {}).get(partition),
            None if self.first_dirty_offsets is None else partition in self.first_dirty_offsets,
        )


def is_data_directory(path: Path) -> bool:
    return (path / META_PROPERTIES_FILE).is_file()


def is_in_use(path: Path) -> bool:
    """Whether a broker has this data directory open: it holds a lock for as long as it lives."""
    try:
        with (path / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def verify_data_directory(path: Path) -> DirectoryReport:
    """Raises OSError."""
    findings: list[Finding] = []
    for name, decode in (
        (META_PROPERTIES_FILE, decode_meta_properties),
        (CLEAN_SHUTDOWN_FILE, decode_clean_shutdown),
        (CONTINUITY_FILE, decode_continuity),
    ):
        file = path / name
        try:
            if file.exists():
                decode(str(file), file.read_bytes())
        except MalformedFile as error:
            findings.append(Finding(file=str(file), problem=_damage(file, error)))
    checkpoints = _Checkpoints.read(path, findings)
    directories = {partition: child for child in sorted(path.iterdir()) if (partition := _partition_at(child))}
    for partition, offset in sorted((checkpoints.recovery_points or {}).items()):
        if offset > 0 and partition not in directories:
            problem = f"{offset} records of {partition} had been on disk, and its directory is gone"
            findings.append(Finding(file=str(path / RECOVERY_POINT_FILE), problem=problem, costs_records=True))
    reports = [
        verify_partition(directory, checkpoints.of(partition)) for partition, directory in sorted(directories.items())
    ]
    return DirectoryReport(directory=str(path), partitions=reports, findings=findings)


def checkpointed(directory: Path) -> Checkpointed:
    """Return the entries for a partition in the data directory around its directory, as far as they can be read."""
    partition = _partition_at(directory)
    if partition is None or not is_data_directory(directory.parent):
        return Checkpointed()
    return _Checkpoints.read(directory.parent, []).of(partition)


def _partition_at(path: Path) -> TopicPartition | None:
    return partition_of(path.name) if path.is_dir() else None


def _read_offsets(path: Path, findings: list[Finding]) -> _Offsets | None:
    try:
        return decode_offsets(str(path), path.read_bytes()) if path.exists() else None
    except MalformedFile as error:
        findings.append(Finding(file=str(path), problem=f"{_damage(path, error)}; {_WITHOUT_IT[path.name]}"))
        return None


def _damage(path: Path, error: MalformedFile) -> str:
    """The problem, without the path."""
    return str(error).removeprefix(f"{path} is ")


def verify_partition(directory: Path, known: Checkpointed) -> PartitionReport:
    """Raises OSError."""
    names: dict[str, list[int]] = {}
    for child in sorted(directory.iterdir()):
        if parsed := base_offset_of(child.name):
            names.setdefault(parsed[1], []).append(parsed[0])
    bases = names.get(LOG_SUFFIX, [])
    walk = _Walk.from_offset(directory, known, bases[0] if bases else 0)
    if markers := sorted(directory.glob(f"*{SWAP_SUFFIX}")):
        problem = "compacted segments were being swapped in; the next start goes on with that, verify after it"
        walk.findings.append(Finding(file=str(markers[0]), problem=problem))
        bases = []
    for number, base in enumerate(bases):
        walk.segment(base, bases[number + 1] if number + 1 < len(bases) else None)
    walk.tell_of_unclear_gaps()
    if not markers:
        walk.compare_with_checkpoints(bases[0] if bases else 0)
        walk.compare_epochs()
    for offset in names.get(SNAPSHOT_SUFFIX, []):
        walk.snapshot(offset)
    if bases and bases[0] in names.get(TOLD_SUFFIX, []):
        walk.snapshot(bases[0], TOLD_SUFFIX)
    walk.topic_id()
    return walk.report(directory, len(bases), bases[0] if bases else 0)


def verify_segment(path: Path, known: Checkpointed) -> PartitionReport:
    """One segment with its indexes, whatever is in the others. `known` is said of its partition. Raises OSError."""
    base = int(path.stem)
    later = (int(child.stem) for child in path.parent.glob(f"*{LOG_SUFFIX}") if base_offset_of(child.name))
    walk = _Walk.from_offset(path.parent, known, base)
    walk.segment(base, min((other for other in later if other > base), default=None))
    walk.tell_of_unclear_gaps()
    return walk.report(path, 1, base)


class _Gap(NamedTuple):
    file: Path
    position: int
    first: int
    last: int


@dataclass
class _Walk:
    """Through the segments of one partition, in their order."""

    directory: Path
    known: Checkpointed
    next_offset: int
    """The offset at which the next batch should begin."""
    transactions: Transactions
    leader_epoch: int = NO_EPOCH
    batches: int = 0
    records: int = 0
    bytes: int = 0
    epoch_starts: list[EpochEntry] = field(default_factory=list)
    """The bytes of the batches."""
    unclear_gaps: list[_Gap] = field(default_factory=list)
    """Legal if the topic is or was compacted, and that is not known."""
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def from_offset(cls, directory: Path, known: Checkpointed, base: int) -> _Walk:
        return cls(directory, known, base, Transactions(base, is_whole=known.is_compacted is False))

    @property
    def relied_upon(self) -> int:
        """Up to where the files beside the batches are believed at the next start."""
        return self.next_offset if self.known.recovery_point is None else self.known.recovery_point

    def report(self, path: Path, segments: int, first_base: int) -> PartitionReport:
        return PartitionReport(
            directory=str(path),
            segments=segments,
            batches=self.batches,
            records=self.records,
            bytes=self.bytes,
            log_start_offset=max(self.known.log_start_offset or 0, first_base),
            log_end_offset=self.next_offset,
            findings=self.findings,
        )

    def segment(self, base: int, next_base: int | None) -> None:
        path = self.directory / file_name(base, LOG_SUFFIX)
        self.bytes += path.stat().st_size
        if base != self.next_offset:
            self._gap(path, 0, base, f"the segment before ends at {self.next_offset}, and this one begins at {base}")
            self.next_offset = base
        indexes = _Indexes(self, base, is_active=next_base is None)
        aborted = AbortedComparison(self.transactions, self._read_aborted(base))
        bad: BadBytes | None = None
        for part in scan(path):
            if isinstance(part, BadBytes):
                bad = part
                continue
            if bad is not None:
                self._bad_bytes(path, bad, part.header.base_offset)
                indexes.bad_bytes(bad, self.next_offset, part.header.base_offset)
                aborted.bad_bytes(self.next_offset, part.header.base_offset)
                self.next_offset = max(self.next_offset, part.header.base_offset)
                bad = None
            marker = self._batch(path, part, next_base)
            indexes.batch(part)
            aborted.batch(part.header, marker)
        if bad is not None:
            self._bad_bytes(path, bad, next_base)
            indexes.bad_bytes(bad, self.next_offset, next_base)
            aborted.bad_bytes(self.next_offset, next_base)
            if next_base is not None:
                self.next_offset = next_base
        indexes.end()
        self.findings += [
            Finding(file=str(self.directory / file_name(base, aborted_index.SUFFIX)), problem=problem)
            for problem in aborted.problems(below=self.relied_upon)
        ]

    def _read_aborted(self, base: int) -> list[AbortedTransaction] | None:
        path = self.directory / file_name(base, aborted_index.SUFFIX)
        try:
            return read_aborted(path) if path.exists() else []
        except InvalidIndex as error:
            problem = f"not an index: {error}; the next start builds it again from the batches"
            self.findings.append(Finding(file=str(path), problem=problem))
            return None

    def _bad_bytes(self, path: Path, bad: BadBytes, goes_on_at: int | None) -> None:
        if goes_on_at is not None:
            missing = f"offsets {self.next_offset} to {goes_on_at - 1} are missing"
        elif bad.is_incomplete:
            missing = "the next start cuts what was being appended when the broker died"
        else:
            missing = f"nothing can be read from offset {self.next_offset} on"
        finding = Finding(
            file=str(path),
            problem=f"{bad.problem}; {missing}",
            position=bad.position,
            end=bad.end,
            offset=self.next_offset,
            costs_records=goes_on_at is not None or not bad.is_incomplete,
        )
        self.findings.append(finding)

    def _gap(self, path: Path, position: int, offset: int, problem: str) -> None:
        self.findings.append(
            Finding(file=str(path), problem=problem, position=position, offset=offset, costs_records=True)
        )

    def _batch(self, path: Path, batch: Batch, next_base: int | None) -> ControlType | None:
        """Return the type of the marker, if the batch is one."""
        header, position = batch.header, batch.position
        first, last = header.base_offset, header.last_offset
        if first > self.next_offset and self.known.is_compacted is None:
            self.unclear_gaps.append(_Gap(path, position, self.next_offset, first - 1))
        elif first < self.next_offset or (first > self.next_offset and not self.known.is_compacted):
            self._gap(path, position, first, f"a batch of offset {first} where {self.next_offset} is next")
        if next_base is not None and last >= next_base:
            self._gap(path, position, last, f"offset {last} in a segment that ends before {next_base}")
        if header.partition_leader_epoch < self.leader_epoch:
            problem = f"leader epoch {header.partition_leader_epoch} follows {self.leader_epoch}"
            self._gap(path, position, first, problem)
        elif header.partition_leader_epoch > self.leader_epoch:
            self.leader_epoch = header.partition_leader_epoch
            self.epoch_starts.append(EpochEntry(self.leader_epoch, first))
        marker: ControlType | None = None
        try:
            if header.is_control:
                marker = decode_control_batch(batch.data, header).type
            else:
                decode_batch(batch.data, header, check_crc=False)
        except CorruptRecord as error:
            self._gap(path, position, first, f"the CRC is right, but the records cannot be read: {error}")
        self.batches += 1
        self.records += header.records_count
        self.next_offset = max(self.next_offset, last + 1)
        return marker

    def tell_of_unclear_gaps(self) -> None:
        """All in one finding."""
        if not self.unclear_gaps:
            return
        gap, others = self.unclear_gaps[0], len(self.unclear_gaps) - 1
        missing = f"offset {gap.first} is" if gap.first == gap.last else f"offsets {gap.first} to {gap.last} are"
        more = f", and there are {others} more such gaps up to {self.unclear_gaps[-1].last}" if others else ""
        problem = (
            f"{missing} missing between two batches{more}: legal if the topic is or was compacted, lost otherwise; the "
            f"{CLEANER_OFFSET_FILE} that would tell cannot be read, or is not at hand"
        )
        self.findings.append(
            Finding(file=str(gap.file), problem=problem, position=gap.position, offset=gap.first, is_unclear=True)
        )

    def compare_with_checkpoints(self, first_base: int) -> None:
        recovery_point, log_start_offset, high_watermark, _ = self.known
        for name, offset, what in (
            (RECOVERY_POINT_FILE, recovery_point, "had been on disk"),
            (HIGH_WATERMARK_FILE, high_watermark, "had been committed"),
        ):
            if offset is not None and offset > self.next_offset:
                problem = f"the log ends at offset {self.next_offset}, but all below {offset} {what}"
                self.findings.append(
                    Finding(
                        file=str(self.directory.parent / name),
                        problem=f"{self.directory.name}: {problem}",
                        offset=self.next_offset,
                        costs_records=True,
                    )
                )
        # A log that was emptied, to begin later, is known by its recovery point, which was lowered before.
        if log_start_offset is not None and log_start_offset < min(first_base, recovery_point or 0):
            problem = f"the log should begin at offset {log_start_offset}, and its first segment begins at {first_base}"
            self.findings.append(
                Finding(file=str(self.directory), problem=problem, offset=log_start_offset, costs_records=True)
            )

    def compare_epochs(self) -> None:
        path = self.directory / LEADER_EPOCH_FILE
        if not path.exists():
            if self.known.recovery_point and self.epoch_starts:
                self.findings.append(Finding(file=str(path), problem="it is missing; the next start writes it again"))
            return
        try:
            entries = decode_epochs(str(path), path.read_bytes())
        except MalformedFile as error:
            self.findings.append(Finding(file=str(path), problem=f"{_damage(path, error)}; {BUILT_AGAIN}"))
            return
        if any(finding.costs_records for finding in self.findings):
            return  # an epoch may have begun in the missing part
        end = min(self.relied_upon, self.next_offset)
        said = {entry.epoch: entry.start_offset for entry in entries if entry.start_offset < end}
        first = self.known.log_start_offset
        if first is None:  # what begins before this file's entries may lie before the log's start
            first = min((entry.start_offset for entry in entries), default=end)
        may_leave_gaps = self.known.is_compacted or bool(self.unclear_gaps)
        found = {entry.epoch: entry.start_offset for entry in self.epoch_starts if entry.start_offset < end}
        for epoch in sorted({*said, *found}):
            # The log's start may lie within a batch, and then the epoch begins there.
            by_file, by_batches = max(said.get(epoch, -1), first), max(found.get(epoch, -1), first)
            if may_leave_gaps and epoch in said:
                # A compacted log may lack the first batches of an epoch, or all of them.
                by_batches = by_file if epoch not in found else min(by_file, by_batches)
            if by_file != by_batches:
                problem = (
                    f"leader epoch {epoch} begins at offset {said.get(epoch, 'none')} by this file, and at "
                    f"{found.get(epoch, 'none')} by the batches; {BUILT_AGAIN}"
                )
                self.findings.append(Finding(file=str(path), problem=problem))

    def snapshot(self, offset: int, suffix: str = SNAPSHOT_SUFFIX) -> None:
        path = self.directory / file_name(offset, suffix)
        remedy = BUILT_AGAIN if suffix == SNAPSHOT_SUFFIX else _NOT_BUILT_AGAIN
        if offset > self.relied_upon and suffix == SNAPSHOT_SUFFIX:
            return
        try:
            producers = decode_snapshot(path.read_bytes())
        except InvalidSnapshot as error:
            self.findings.append(Finding(file=str(path), problem=f"not a snapshot: {error}; {remedy}"))
            return
        for producer_id, producer in producers:
            if producer.batches and producer.batches[-1].last_offset >= offset:
                problem = f"producer {producer_id} wrote offset {producer.batches[-1].last_offset}, past the snapshot's"
                self.findings.append(Finding(file=str(path), problem=f"{problem}; {remedy}"))

    def topic_id(self) -> None:
        path = self.directory / PARTITION_METADATA_FILE
        try:
            if path.exists():
                decode_topic_id(str(path), path.read_bytes())
        except MalformedFile as error:
            problem = f"{_damage(path, error)}; the broker does not open this replica"
            self.findings.append(Finding(file=str(path), problem=problem, costs_records=True))


class _Indexes:
    """The two indexes of one segment, compared with its batches as they come."""

    def __init__(self, walk: _Walk, base: int, *, is_active: bool) -> None:
        self._walk = walk
        self._base = base
        self._is_active = is_active
        self._positions = {position: offset for offset, position in self._read(OFFSET_INDEX)}
        self._timestamps = {offset: timestamp for timestamp, offset in self._read(TIME_INDEX)}
        self._newest = max(self._timestamps.values(), default=None)
        self._newer: int | None = None
        """A timestamp that the time index does not reach."""

    def _path(self, layout: Layout) -> Path:
        return self._walk.directory / file_name(self._base, layout.suffix)

    def _read(self, layout: Layout) -> Iterator[tuple[int, int]]:
        path = self._path(layout)
        try:
            yield from read_index(path, layout)
        except FileNotFoundError:
            if not self._is_active and self._base < self._walk.relied_upon:
                self._walk.findings.append(
                    Finding(file=str(path), problem="it is missing; the next start builds it again")
                )
        except InvalidIndex as error:
            self._walk.findings.append(Finding(file=str(path), problem=f"not an index: {error}; {BUILT_AGAIN}"))

    def batch(self, batch: Batch) -> None:
        last_offset = batch.header.last_offset - self._base
        if self._positions.get(batch.position) == last_offset:
            del self._positions[batch.position]
        if self._timestamps.get(last_offset) == batch.header.max_timestamp:
            del self._timestamps[last_offset]
        if self._newest is not None and batch.header.max_timestamp > self._newest:
            self._newer = batch.header.max_timestamp

    def bad_bytes(self, bad: BadBytes, first_missing: int, goes_on_at: int | None) -> None:
        """Entries of batches that cannot be read are not wrong."""
        missing = range(first_missing - self._base, _EVERY if goes_on_at is None else goes_on_at - self._base)
        self._positions = {p: o for p, o in self._positions.items() if not bad.position <= p < bad.end}
        self._timestamps = {offset: t for offset, t in self._timestamps.items() if offset not in missing}

    def end(self) -> None:
        limit = self._walk.relied_upon - self._base if self._is_active else None
        wrong_offsets = [(offset, position) for position, offset in self._positions.items() if _counts(offset, limit)]
        wrong_times = [(timestamp, offset) for offset, timestamp in self._timestamps.items() if _counts(offset, limit)]
        for layout, wrong, meaning in (
            (OFFSET_INDEX, wrong_offsets, "offset {} at position {}"),
            (TIME_INDEX, wrong_times, "timestamp {} at offset {}"),
        ):
            if wrong:
                first = meaning.format(*(wrong[0][0], wrong[0][1]))
                problem = f"{len(wrong)} entries fit no batch, the first says {first} (relative); {BUILT_AGAIN}"
                self._walk.findings.append(Finding(file=str(self._path(layout)), problem=problem))
        if self._newer is not None and not self._is_active:
            problem = f"it ends before timestamp {self._newer} of a batch; {BUILT_AGAIN}"
            self._walk.findings.append(Finding(file=str(self._path(TIME_INDEX)), problem=problem))


def _counts(relative_offset: int, limit: int | None) -> bool:
    return limit is None or relative_offset < limit
