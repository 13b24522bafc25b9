"""A disk that is full, broken or slow where the fault file says so. Everything else passes to the real disk."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence

from minibroker.protocol.faults import DiskFaults, Faults
from minibroker.protocol.messages import Buffer
from minibroker.protocol.world import Descriptors, Disk, File, Lock

_WELL = DiskFaults()
_LOOK_EVERY_S = 0.02


def faults_at(path: str, faults: Faults) -> DiskFaults:
    """Return the faults of the log directory in which the path is. Pure."""
    for directory, found in faults.disks.items():
        if path == directory or path.startswith(directory + "/"):
            return found
    return _WELL


class FaultyDisk:
    """See `minibroker.protocol.world.Disk`. `faults` returns the present ones."""

    def __init__(self, disk: Disk, faults: Callable[[], Faults]) -> None:
        self._disk = disk
        self._faults = faults

    def open(self, path: str, *, create: bool = False) -> File:
        self._check(path)
        return FaultyFile(self._disk.open(path, create=create), path, self._faults)

    def read_file(self, path: str) -> bytes:
        self._check(path)
        return self._disk.read_file(path)

    def write_atomically(self, path: str, data: bytes) -> None:
        disk = self._check(path)
        if disk.is_full and data:
            raise _error(errno.ENOSPC, path)
        self._wait(path, lambda disk: disk.write_delay_ms + disk.sync_delay_ms)
        self._disk.write_atomically(path, data)

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def list(self, path: str) -> list[str]:
        self._check(path)
        return self._disk.list(path)

    def make_directories(self, path: str) -> None:
        self._check_room(path)
        self._disk.make_directories(path)

    def rename(self, old: str, new: str) -> None:
        self._check(old)
        self._disk.rename(old, new)

    def remove(self, path: str) -> None:
        self._check(path)
        self._disk.remove(path)

    def remove_tree(self, path: str) -> None:
        self._check(path)
        self._disk.remove_tree(path)

    def sync_directory(self, path: str) -> None:
        self._check(path)
        self._wait(path, lambda disk: disk.sync_delay_ms)
        self._disk.sync_directory(path)

    def lock(self, path: str) -> Lock:
        self._check(path)
        return self._disk.lock(path)

    def space(self, path: str) -> tuple[int, int]:
        size, left = self._disk.space(path)
        return size, 0 if self._check(path).is_full else left

    def descriptors(self) -> Descriptors:
        return self._disk.descriptors()

    def boot_id(self) -> str:
        return self._disk.boot_id()

    def _check(self, path: str) -> DiskFaults:
        """Raises OSError if the disk is broken."""
        faults = self._faults()
        if not faults.disks:
            return _WELL
        return _checked(path, faults)

    def _wait(self, path: str, delay_ms: Callable[[DiskFaults], int]) -> None:
        _sleep(lambda: delay_ms(faults_at(path, self._faults())))

    def _check_room(self, path: str) -> None:
        if self._check(path).is_full and not self._disk.exists(path):
            raise _error(errno.ENOSPC, path)


class FaultyFile:
    """See `minibroker.protocol.world.File`."""

    def __init__(self, file: File, path: str, faults: Callable[[], Faults]) -> None:
        self._file = file
        self._path = path
        self._faults = faults

    def pread(self, size: int, position: int) -> bytes:
        self._check()
        return self._file.pread(size, position)

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        disk = self._check()
        if disk is _WELL:
            return self._file.pwrite(data, position)
        self._wait(lambda disk: disk.write_delay_ms)
        total = sum(map(len, data))
        if not disk.is_full or position + total <= (size := self._file.size()):
            return self._file.pwrite(data, position)
        # As on a real disk, the part that needs no further block is written.
        if fitting := max(0, size - position):
            self._file.pwrite([b"".join(data)[:fitting]], position)
        raise _error(errno.ENOSPC, self._path)

    def size(self) -> int:
        return self._file.size()

    def modified_ms(self) -> int:
        return self._file.modified_ms()

    def set_modified_ms(self, wall_ms: int) -> None:
        self._file.set_modified_ms(wall_ms)

    def truncate(self, size: int) -> None:
        self._check()
        self._file.truncate(size)

    def fdatasync(self) -> None:
        self._check()
        self._wait(lambda disk: disk.sync_delay_ms)
        self._file.fdatasync()

    def close(self) -> None:
        self._file.close()

    def _wait(self, delay_ms: Callable[[DiskFaults], int]) -> None:
        _sleep(lambda: delay_ms(faults_at(self._path, self._faults())))

    def _check(self) -> DiskFaults:
        """Raises OSError if the disk is broken."""
        faults = self._faults()
        if not faults.disks:
            return _WELL
        return _checked(self._path, faults)


def _checked(path: str, faults: Faults) -> DiskFaults:
    found = faults_at(path, faults)
    if found.is_broken:
        raise _error(errno.EIO, path)
    return found


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _sleep(delay_ms: Callable[[], int]) -> None:
    """Sleep for this long. A delay that is healed or shortened meanwhile holds nothing up."""
    if not delay_ms():
        return
    began_s = time.monotonic()
    while (left_s := began_s + delay_ms() / 1_000 - time.monotonic()) > 0:
        time.sleep(min(left_s, _LOOK_EVERY_S))
