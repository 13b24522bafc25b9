"""Disks in memory. A disk outlives the processes that use it, and the starts of its host.

A `VirtualDisk` is the medium with its tree of directories and files; `ProcessDisk` is what one process sees of it, and
raises `ProcessKilled` once that is dead. Files are POSIX's: a name points to a file, an open file lives on when its
name is removed or replaced, locks are those of `flock` and end with their process.

All bytes are kept as written: nothing is lost in a crash yet. For power cuts, `_File.data` and `_Directory.entries`
are what is in memory; a second copy of each, brought up to date by `fdatasync` and `sync_directory`, will be what is on
the medium, and a new start of the host falls back to that. Hence every change goes through those two classes, and
`write_atomically` is made of the same steps as the real one.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Sequence

from protocol.messages import Buffer
from tests.simulation.process import Process


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class _File:
    def __init__(self) -> None:
        self.data = bytearray()
        self.locked_by: ProcessLock | None = None

    def write(self, data: Sequence[Buffer], position: int) -> int:
        if position > len(self.data):
            self.data.extend(bytes(position - len(self.data)))
        start = position
        for piece in data:
            self.data[position : position + len(piece)] = piece
            position += len(piece)
        return position - start

    def truncate(self, size: int) -> None:
        if size < len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def sync(self) -> None:
        """Nothing to do as long as nothing can be lost."""


class _Directory:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Directory] = {}

    def sync(self) -> None:
        """Nothing to do as long as nothing can be lost."""


class VirtualDisk:
    """The medium. `boot_id` is that of the host's current start."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self._root = _Directory()

    def of(self, process: Process) -> ProcessDisk:
        """The disk as this process sees it."""
        return ProcessDisk(self, process)

    # -- for ProcessDisk, and for tests that look from outside --

    def find(self, path: str) -> _File | _Directory:
        """Raises FileNotFoundError, NotADirectoryError."""
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not absolute")
        found: _File | _Directory = self._root
        for name in posixpath.normpath(path).split("/"):
            if not name:
                continue
            if isinstance(found, _File):
                raise _error(errno.ENOTDIR, path)
            if name not in found.entries:
                raise _error(errno.ENOENT, path)
            found = found.entries[name]
        return found

    def file(self, path: str) -> _File:
        found = self.find(path)
        if isinstance(found, _Directory):
            raise _error(errno.EISDIR, path)
        return found

    def directory(self, path: str) -> _Directory:
        found = self.find(path)
        if isinstance(found, _File):
            raise _error(errno.ENOTDIR, path)
        return found

    def parent(self, path: str) -> tuple[_Directory, str]:
        """The directory that a name stands in, and the name."""
        above, name = posixpath.split(posixpath.normpath(path))
        if not name:
            raise _error(errno.EBUSY, path)
        return self.directory(above), name


class ProcessDisk:
    """`protocol.world.Disk` for one process. Severed when it is killed."""

    def __init__(self, disk: VirtualDisk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._locks: dict[ProcessLock, None] = {}
        process.on_kill(self._sever)

    def open(self, path: str, *, create: bool = False) -> ProcessFile:
        self._process.check()
        return ProcessFile(self._process, self._open(path, create=create), path)

    def _open(self, path: str, *, create: bool) -> _File:
        directory, name = self._disk.parent(path)
        if create and name not in directory.entries:
            directory.entries[name] = _File()
        return self._disk.file(path)

    def read_file(self, path: str) -> bytes:
        self._process.check()
        return bytes(self._disk.file(path).data)

    def write_atomically(self, path: str, data: bytes) -> None:
        temporary = path + ".tmp"
        file = self.open(temporary, create=True)
        file.truncate(0)
        file.pwrite([data], 0)
        file.fdatasync()
        file.close()
        self.rename(temporary, path)
        self.sync_directory(posixpath.dirname(path))

    def exists(self, path: str) -> bool:
        self._process.check()
        try:
            self._disk.find(path)
        except OSError:
            return False
        return True

    def list(self, path: str) -> list[str]:
        self._process.check()
        return sorted(self._disk.directory(path).entries)

    def make_directories(self, path: str) -> None:
        """Raises FileExistsError or NotADirectoryError where a file is in the way."""
        self._process.check()
        directory = self._disk.directory("/")
        names = [name for name in posixpath.normpath(path).split("/") if name]
        for depth, name in enumerate(names, 1):
            entry = directory.entries.setdefault(name, _Directory())
            if isinstance(entry, _File):
                raise _error(errno.EEXIST if depth == len(names) else errno.ENOTDIR, path)
            directory = entry

    def rename(self, old: str, new: str) -> None:
        self._process.check()
        source, old_name = self._disk.parent(old)
        moved = self._disk.find(old)
        target, new_name = self._disk.parent(new)
        replaced = target.entries.get(new_name)
        if replaced is moved:
            return
        if isinstance(moved, _Directory):
            if posixpath.normpath(new).startswith(posixpath.normpath(old) + "/"):
                raise _error(errno.EINVAL, new)
            if isinstance(replaced, _File):
                raise _error(errno.ENOTDIR, new)
            if isinstance(replaced, _Directory) and replaced.entries:
                raise _error(errno.ENOTEMPTY, new)
        elif isinstance(replaced, _Directory):
            raise _error(errno.EISDIR, new)
        del source.entries[old_name]
        target.entries[new_name] = moved

    def remove(self, path: str) -> None:
        self._process.check()
        directory, name = self._disk.parent(path)
        self._disk.file(path)
        del directory.entries[name]

    def remove_tree(self, path: str) -> None:
        self._process.check()
        directory, name = self._disk.parent(path)
        self._disk.directory(path)
        del directory.entries[name]

    def sync_directory(self, path: str) -> None:
        self._process.check()
        self._disk.directory(path).sync()

    def lock(self, path: str) -> ProcessLock:
        """Raises BlockingIOError where the file is locked."""
        self._process.check()
        lock = ProcessLock(self._open(path, create=True), self._locks, path)
        self._locks[lock] = None
        return lock

    def boot_id(self) -> str:
        self._process.check()
        return self._disk.boot_id

    def _sever(self) -> None:
        for lock in list(self._locks):
            lock.release()


class ProcessFile:
    """`protocol.world.File`."""

    def __init__(self, process: Process, file: _File, path: str) -> None:
        self._process = process
        self._file = file
        self._path = path
        self._closed = False

    def pread(self, size: int, position: int) -> bytes:
        return bytes(self._open().data[position : position + size])

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        return self._open().write(data, position)

    def size(self) -> int:
        return len(self._open().data)

    def truncate(self, size: int) -> None:
        self._open().truncate(size)

    def fdatasync(self) -> None:
        self._open().sync()

    def close(self) -> None:
        """Does nothing for a killed process, whose files the operating system has closed."""
        self._closed = True

    def _open(self) -> _File:
        self._process.check()
        if self._closed:
            raise _error(errno.EBADF, self._path)
        return self._file


class ProcessLock:
    """`protocol.world.Lock`: held until `release`, or until the process is killed."""

    def __init__(self, file: _File, held: dict[ProcessLock, None], path: str) -> None:
        if file.locked_by is not None:
            raise _error(errno.EWOULDBLOCK, path)
        file.locked_by = self
        self._file = file
        self._held = held

    def release(self) -> None:
        if self._file.locked_by is self:
            self._file.locked_by = None
        self._held.pop(self, None)
