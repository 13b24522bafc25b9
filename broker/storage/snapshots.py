"""The snapshots of producers' state in a log's directory: files that are named after the offset they stand for.

Beside them a log that does not begin at 0 may have one file, named after its first segment, of who had written before:
as a leader told it, or a snapshot said when older segments were removed. It is in their format, and can be built again
from no batch. So it is on disk before that segment is made or comes first, and stays as long as it.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

from minibroker.broker.storage.producer_state import (
    InvalidSnapshot,
    Producer,
    ProducerState,
    decode_snapshot,
    encode_snapshot,
)
from minibroker.broker.storage.segment import file_name
from minibroker.protocol.world import Disk

logger = logging.getLogger("minibroker.storage")

SNAPSHOT_SUFFIX = ".snapshot"
TOLD_SUFFIX = ".producers"


def _path(directory: str, offset: int, suffix: str = SNAPSHOT_SUFFIX) -> str:
    return f"{directory}/{file_name(offset, suffix)}"


def write_told(disk: Disk, directory: str, offset: int, producers: Sequence[tuple[int, Producer]]) -> None:
    """Write the producers before `offset` that the leader has sent. Durable on return. Raises OSError."""
    disk.write_atomically(_path(directory, offset, TOLD_SUFFIX), encode_snapshot(producers))


def remove_told(disk: Disk, directory: str, offset: int) -> None:
    """If it is there. Raises OSError."""
    with suppress(FileNotFoundError):
        disk.remove(_path(directory, offset, TOLD_SUFFIX))


def write_snapshot(disk: Disk, directory: str, offset: int, captured: list[tuple[int, Producer]]) -> None:
    """Not synced: its CRC tells a reader whether it is whole, and an older one will do. Raises OSError."""
    snapshot = disk.open(_path(directory, offset), create=True)
    try:
        data = encode_snapshot(captured)
        snapshot.pwrite([data], 0)
        snapshot.truncate(len(data))
    finally:
        snapshot.close()


def keep_snapshot(disk: Disk, directory: str, offset: int) -> bool:
    """Make a snapshot durable, both as a snapshot and as the received state of a log that begins there: the one is read
    while segments before it are being removed, the other if the recovery point was lowered since. Return False if it is
    missing or not whole. Raises OSError."""
    path = _path(directory, offset)
    try:
        known = decode_snapshot(disk.read_file(path))
        snapshot = disk.open(path)
    except (FileNotFoundError, InvalidSnapshot):
        return False
    try:
        snapshot.fdatasync()
    finally:
        snapshot.close()
    write_told(disk, directory, offset, known)  # syncs the directory
    return True


def remove_snapshot(disk: Disk, directory: str, offset: int) -> None:
    """If it is there: a worker thread of the same log may have removed it first. Raises OSError."""
    with suppress(FileNotFoundError):
        disk.remove(_path(directory, offset))


def drop_snapshots_above(disk: Disk, directory: str, snapshots: list[int], offset: int) -> list[int]:
    """Remove the snapshots of states past `offset`. Returns those kept."""
    for snapshot in snapshots:
        if snapshot > offset:
            remove_snapshot(disk, directory, snapshot)
    return [snapshot for snapshot in snapshots if snapshot <= offset]


def drop_snapshots_below(disk: Disk, directory: str, snapshots: list[int], offset: int) -> list[int]:
    """Remove the snapshots of states before `offset`. Returns those kept."""
    for snapshot in snapshots:
        if snapshot < offset:
            remove_snapshot(disk, directory, snapshot)
    return [snapshot for snapshot in snapshots if snapshot >= offset]


def load_producers(disk: Disk, directory: str, snapshots: list[int], first_offset: int) -> tuple[ProducerState, int]:
    """Return the state of the newest readable snapshot, or the received one, and its offset; an empty state and 0 if
    there is none. `first_offset`: the base offset of the first segment."""
    files = [(offset, SNAPSHOT_SUFFIX) for offset in reversed(snapshots)]
    for offset, suffix in (*files, (first_offset, TOLD_SUFFIX)):
        path = _path(directory, offset, suffix)
        try:
            return ProducerState.restore(decode_snapshot(disk.read_file(path))), offset
        except FileNotFoundError:
            continue
        except InvalidSnapshot as error:
            if suffix == TOLD_SUFFIX:
                logger.error("%s is damaged (%s): a batch that a producer repeats may be written twice", path, error)
    return ProducerState(), 0
