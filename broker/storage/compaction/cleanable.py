"""The part of a log that can be compacted, the log that comes first, and the segments that become one. Pure (Kafka's
LogCleanerManager and Cleaner.groupSegmentsBySize).

A log is *clean* below its first dirty offset: no key has two records there. The rest is dirty, and part of it may be
cleaned: whole segments that cannot be cut any more and that are old enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minibroker.broker.storage.indexes.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.retention import SegmentExtent


class Cleanable(NamedTuple):
    """The range of a compaction. From `first_dirty` to `end` the log is dirty, and may be cleaned."""

    first_dirty: int
    end: int
    clean_bytes: int
    dirty_bytes: int
    """The bytes that may be cleaned."""

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / (self.clean_bytes + self.dirty_bytes) if self.dirty_bytes else 0.0


class Candidate(NamedTuple):
    """The facts that decide whether a log's turn has come."""

    cleanable: Cleanable
    min_dirty_ratio: float
    is_overdue: bool
    """The dirty part has records that are older than max.compaction.lag.ms."""


def cleanable(
    segments: Sequence[SegmentExtent],
    *,
    first_dirty: int,
    log_start_offset: int,
    limit: int,
    now_ms: int,
    min_compaction_lag_ms: int,
) -> Cleanable:
    """Return the range of a log that may be cleaned. The last of these segments is the active one, which is never
    cleaned; nor is anything from the offset `limit` on, or from the first dirty segment with a record younger than
    `min_compaction_lag_ms`."""
    first_dirty = end = max(first_dirty, log_start_offset)
    clean_bytes = dirty_bytes = 0
    for segment in segments[:-1]:
        if segment.end_offset <= log_start_offset:
            continue
        if segment.end_offset <= first_dirty:
            clean_bytes += segment.size
            continue
        is_young = min_compaction_lag_ms > 0 and segment.newest_ms > now_ms - min_compaction_lag_ms
        if segment.end_offset > limit or is_young:
            break
        dirty_bytes += segment.size
        end = segment.end_offset
    return Cleanable(first_dirty, end, clean_bytes, dirty_bytes)


def dirtiest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Whose turn it is: of those that are dirty enough, or overdue, the one with the largest dirty part."""
    due = [
        candidate
        for candidate in candidates
        if candidate.cleanable.dirty_bytes > 0
        and (candidate.is_overdue or candidate.cleanable.dirty_ratio > candidate.min_dirty_ratio)
    ]
    return max(due, key=lambda candidate: candidate.cleanable.dirty_ratio, default=None)


def groups(segments: Sequence[SegmentExtent], max_bytes: int) -> list[list[SegmentExtent]]:
    """Neighbours that become one segment: together they have no more than `max_bytes`, and offsets that an index can
    hold, relative to the first one's."""
    found: list[list[SegmentExtent]] = []
    size = 0
    for segment in segments:
        fits = (
            found
            and size + segment.size <= max_bytes
            and segment.end_offset - 1 - found[-1][0].base_offset <= MAX_RELATIVE_OFFSET
        )
        if fits:
            found[-1].append(segment)
            size += segment.size
        else:
            found.append([segment])
            size = segment.size
    return found
