"""The old segments that a log need not keep, and their removal from disk.

The leader alone decides (`expired`, a pure function). The decision is one number, the log start offset: followers take
it from the answers to their fetches, so all replicas begin at the same offset, whatever their clocks say and wherever
their segments end. (Kafka's replicas each delete by their own clock.) It never passes the high watermark (KAFKA-5634).

A worker thread removes the files. A power cut may restore any of the removed names, so the log start offset is on disk
before the first removal, and recovery does not treat a gap below it as damage. The batches take their producers' state
with them; so the producers' snapshot at the end of the removed segments is on disk as well, with a recovery point below
which it is trusted. Otherwise a batch whose answer was lost could be appended again after a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from minibroker.broker.storage.segment import Segment
from minibroker.broker.storage.snapshots import remove_snapshot, remove_told
from minibroker.protocol.words import counted
from minibroker.protocol.world import Disk


class SegmentExtent(NamedTuple):
    """The facts about a segment that retention needs. `end_offset` is the start of the next one, or the log's end."""

    base_offset: int
    end_offset: int
    size: int
    newest_ms: int
    """`Segment.newest_ms`: how old it is."""


def expired(
    segments: Sequence[SegmentExtent],
    *,
    log_start_offset: int,
    high_watermark: int,
    now_ms: int,
    retention_ms: int | None,
    retention_bytes: int | None,
) -> int:
    """Where the log should begin: after the oldest segments all of whose records are older than `retention_ms`, and
    after those without which it would still have `retention_bytes` (Kafka's UnifiedLog.deleteOldSegments). Never above
    `high_watermark`, nor below `log_start_offset`. None: no limit."""
    start = log_start_offset
    excess = 0
    if retention_bytes is not None:
        excess = sum(segment.size for segment in segments if segment.end_offset > start) - retention_bytes
    for segment in segments:
        if segment.end_offset <= start:
            continue
        is_old = retention_ms is not None and segment.newest_ms < now_ms - retention_ms
        is_excess = retention_bytes is not None and segment.size <= excess
        if not (is_old or is_excess) or not segment.size or segment.end_offset > high_watermark:
            break
        start = segment.end_offset
        excess -= segment.size
    return start


def described(
    gone: Sequence[SegmentExtent],
    before: int,
    start: int,
    now_ms: int,
    retention_ms: int | None,
    retention_bytes: int | None,
) -> str:
    """For the log: which segments go, and why, if a log that began at `before` begins at `start` now."""
    old = [retention_ms is not None and segment.newest_ms < now_ms - retention_ms for segment in gone]
    reasons = [f"older than retention.ms={retention_ms}"] if any(old) else []
    reasons += [] if all(old) else [f"more than retention.bytes={retention_bytes}"]
    size = counted(sum(segment.size for segment in gone), "byte")
    return (
        f"offsets {before} to {start - 1} ({counted(start - before, 'record')} at most, "
        f"{counted(len(gone), 'segment')}, {size}): {' or '.join(reasons)}; the log begins at offset {start} now"
    )


class Removal:
    """Segments and snapshots that are no longer the log's, on their way out."""

    def __init__(self, disk: Disk, directory: str, segments: list[Segment], snapshots: list[int]) -> None:
        self._disk = disk
        self._directory = directory
        self._left = segments
        self._snapshots = snapshots
        self._first_offset = segments[0].base_offset
        self._step = threading.Lock()
        self._is_stopped = False

    def carry_out(self) -> None:
        """In a worker thread. Raises OSError."""
        for step in (*[self._remove_segment] * len(self._left), self._remove_snapshots):
            with self._step:
                if self._is_stopped:
                    return
                step()

    def _remove_segment(self) -> None:
        self._left[0].remove_files()
        self._left.pop(0).close()

    def _remove_snapshots(self) -> None:
        for offset in self._snapshots:
            remove_snapshot(self._disk, self._directory, offset)
        remove_told(self._disk, self._directory, self._first_offset)
        self._disk.sync_directory(self._directory)

    def stop(self) -> list[Segment]:
        """No file is removed here any more: another one may get its name. Returns the segments that are left, once.
        Called in the event loop; waits for one step at most."""
        with self._step:
            self._is_stopped = True
            left, self._left = self._left, []
            return left
