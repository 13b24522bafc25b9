"""File descriptors: whether the process has enough of them for another log."""

from typing import NamedTuple

from minibroker.broker.storage.io_errors import shortage
from minibroker.protocol.world import Disk

MOST_FOR_FILES = 1 / 2
"""The largest share of the process's descriptors that files may take when a log is created."""
MOST_IN_ALL = 15 / 16
"""The same for files and connections together."""


class Room(NamedTuple):
    """Whether the process has file descriptors for more."""

    for_a_log: bool
    """Another log may be created."""
    for_a_file: bool


def room_on(disk: Disk) -> Room:
    files, used, limit = disk.descriptors()
    return Room(files <= limit * MOST_FOR_FILES and used <= limit * MOST_IN_ALL, used < limit)


def check_room(disk: Disk, path: str, count: int = 1) -> None:
    """Raises Shortage if `count` more logs would leave too few descriptors for connections, without which no log is of
    use, and for the next segments of present logs. `path` is the first of the new logs."""
    files, used, limit = disk.descriptors()
    if files + count - 1 > limit * MOST_FOR_FILES or used + count - 1 > limit * MOST_IN_ALL:
        reason = f"{used} or more of the {limit} descriptors of this process are taken, {files} of them by files"
        raise shortage(f"creating {path}", reason)
