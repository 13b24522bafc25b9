"""File descriptors: whether the process has enough of them for another log, or for another segment of one.

Each segment keeps a file open, and a client decides how often a log begins one: by `segment.bytes`, by `segment.ms`, or
by timestamps far apart. So when files have taken a share of the descriptors, logs go on in their last segments,
whatever their settings: first those with small segments, then all. Logs can still be created and connections accepted.
"""

from typing import NamedTuple

from minibroker.broker.storage.io_errors import shortage
from minibroker.protocol.world import Disk

MOST_FOR_FILES = 1 / 2
"""The largest share of the process's descriptors that files may take when a log is created."""
MOST_IN_ALL = 15 / 16
"""The same for files and connections together."""
MOST_FOR_SEGMENTS = 3 / 8
"""The largest share that files may take when a log begins another segment."""
MOST_FOR_SMALL_SEGMENTS = 1 / 4
"""The same if the segment that ends is smaller than SMALL_SEGMENT_BYTES."""
SMALL_SEGMENT_BYTES = 1024 * 1024
MOST_AT_START = 3 / 4
"""The largest share that files may take when a broker opens its logs. They took less before, unless the limit was
lowered."""
LARGE_LOG = 1 / 64
"""A log with a larger share is opened after the others."""


class Room(NamedTuple):
    """Whether the process has file descriptors for more."""

    for_a_log: bool
    """Another log may be created."""
    for_a_file: bool


def room_on(disk: Disk) -> Room:
    files, used, limit = disk.descriptors()
    return Room(files <= limit * MOST_FOR_FILES and used <= limit * MOST_IN_ALL, used < limit)


def may_roll(disk: Disk, size: int) -> bool:
    """Return whether a log whose active segment has `size` bytes may begin another."""
    files, used, limit = disk.descriptors()
    share = MOST_FOR_SEGMENTS if size >= SMALL_SEGMENT_BYTES else MOST_FOR_SMALL_SEGMENTS
    return files <= limit * share and used <= limit * MOST_IN_ALL


class TooManySegments(Exception):
    """A log is not opened, because its segments would leave too few descriptors for connections and for other logs."""

    def __init__(self, segments: int, reason: str) -> None:
        super().__init__(reason)
        self.segments = segments


def check_room_to_open(disk: Disk, segments: int, *, is_last: bool) -> None:
    """Raises TooManySegments. Unless `is_last`, logs with very many segments are refused too: others come first."""
    files, _, limit = disk.descriptors()
    if files + segments > limit * MOST_AT_START or (segments > limit * LARGE_LOG and not is_last):
        raise TooManySegments(
            segments,
            f"it has {segments} segments, and {files} of the {limit} files that this process may open are open",
        )


def check_room(disk: Disk, path: str, count: int = 1) -> None:
    """Raises Shortage if `count` more logs would leave too few descriptors for connections, without which no log is of
    use, and for the next segments of present logs. `path` is the first of the new logs."""
    files, used, limit = disk.descriptors()
    if files + count - 1 > limit * MOST_FOR_FILES or used + count - 1 > limit * MOST_IN_ALL:
        reason = f"{used} or more of the {limit} descriptors of this process are taken, {files} of them by files"
        raise shortage(f"creating {path}", reason)
