"""Disks in memory. A disk outlives the processes that use it and the reboots of its host.

A `VirtualDisk` is the medium with its tree of directories and files. `ProcessDisk` is the view of one process; it
raises `ProcessKilled` once the process is dead. Files follow POSIX: a name refers to a file, an open file survives the
removal or replacement of its name, and locks are those of `flock`, released when their process ends.

Writes are in the page cache: all processes see them at once, and they outlive the process. State that survives a power
cut is kept separately. A file has its durable bytes beside those in memory, and the ranges in which the two may differ;
`fdatasync` copies those ranges. A directory has its durable names and a list of later changes; `sync_directory` applies
them.

A power cut is harsher than on any real file system:
- Each sector of a dirty range is the old or the new one, in any combination.
- The size of a file is the old one, the new one, or one in between; bytes without data are zeroes.
- A truncation may be lost although later writes survive.
- A directory keeps a prefix of its changes, as with a journal, or a prefix of the changes of each name. A synced file
  may thus lack its name, a name may refer to an empty file, and a renamed file may have its old name, its new name,
  both or neither.
- A directory is renamed entirely or not at all. A move to another parent is durable at once.

`faults` makes single calls or all calls in a directory fail, counts calls, fills the disk, slows it down, and lets it
die after a number of changes. `rot` flips a bit. `write_atomically`, `read_file` and `lock` consist of the same steps
as the real ones, and can fail at each.

Rejected: a copy of each file at each sync (logs are long and synced often); a journal common to all directories (it
would hide the sync of a wrong directory).
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from minibroker.deploy.simulator.disk_faults import DiskFaults, os_error
from minibroker.protocol.messages import Buffer
from minibroker.protocol.world import Descriptors

SECTOR_BYTES = 64
"""Unit that is written entirely or not at all. It is small because the batches of tests are."""

SIZE_BYTES = 2**40
"""The reported size; the capacity is unlimited."""

_Names = dict[str, "_File | _Directory | None"]
"""A change of a directory: the new target of each name; None: the name is removed."""


class _File:
    def __init__(self) -> None:
        self.data = bytearray()
        self.modified_ms = 0
        self.locked_by: ProcessLock | None = None
        self._durable = bytearray()
        self._dirty: list[list[int]] = []
        """Ranges, as [begin, end], in which `data` may differ from the durable bytes."""
        self._shortest: int | None = None
        """The smallest size to which the file was truncated since its last sync."""
        self._rotten: dict[int, tuple[int, int]] = {}
        """The original and the rotten byte, by position."""

    def write(self, data: Sequence[Buffer], position: int) -> int:
        size = len(self.data)
        begin = min(position, size)
        if position > size:
            self.data.extend(bytes(position - size))
        start = position
        if self._rotten:
            end = position + sum(map(len, data))
            self._rotten = {at: byte for at, byte in self._rotten.items() if not position <= at < end}
        for piece in data:
            self.data[position : position + len(piece)] = piece
            position += len(piece)
        if self._dirty and self._dirty[-1][1] == begin:
            self._dirty[-1][1] = position
        else:
            self._dirty.append([begin, position])
        return position - start

    def truncate(self, size: int) -> None:
        before = len(self.data)
        if size >= before:
            self.data.extend(bytes(size - before))
            self._dirty.append([before, size])
            return
        del self.data[size:]
        self._rotten = {at: byte for at, byte in self._rotten.items() if at < size}
        self._dirty = [[begin, min(end, size)] for begin, end in self._dirty if begin < size]
        self._shortest = size if self._shortest is None else min(self._shortest, size)

    def sync(self) -> None:
        if self._shortest is not None:
            del self._durable[self._shortest :]
        for begin, end in self._dirty:
            if begin > len(self._durable):
                self._durable.extend(bytes(begin - len(self._durable)))
            self._durable[begin:end] = self.data[begin:end]
        self.lose_dirty()
        self._shortest = None

    def lose_dirty(self) -> None:
        """Mark dirty ranges as written although they are in memory only, as after a failed sync."""
        self._dirty.clear()

    def power_cut(self, random: Random) -> None:
        kept = self._durable
        reach = max((end for _, end in self._dirty), default=0)
        if self._shortest is not None and self._shortest < len(kept):
            shortest, longest = self._shortest, len(kept)
            del kept[random.choice((shortest, longest, random.randint(shortest, longest))) :]
        size = len(kept)
        if reach > size:
            size = random.choice((size, reach, random.randint(size, reach)))
        kept.extend(bytes(size - len(kept)))
        probability = random.choice((0.0, 0.5, 0.9, 1.0))
        for begin, end in self._dirty:
            end = min(end, size, reach)
            for sector in range(begin - begin % SECTOR_BYTES, end, SECTOR_BYTES):
                if random.random() < probability:
                    first, last = max(begin, sector), min(end, sector + SECTOR_BYTES)
                    kept[first:last] = self.data[first:last]
        self.data = bytearray(kept)
        self._dirty.clear()
        self._shortest = None
        self._rotten = {at: byte for at, byte in self._rotten.items() if at < size and kept[at] == byte[1]}

    def rot(self, position: int, bit: int) -> None:
        good = self.data[position]
        self.data[position] ^= 1 << bit
        self._rotten[position] = (good, self.data[position])

    def mend(self) -> None:
        """Restore rotten bytes, in memory and on the medium."""
        for position, (good, bad) in self._rotten.items():
            for kept in (self.data, self._durable):
                if position < len(kept) and kept[position] == bad:
                    kept[position] = good
        self._rotten.clear()


class _Directory:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Directory] = {}
        self._durable: dict[str, _File | _Directory] = {}
        self._changes: list[_Names] = []

    def change(self, names: _Names) -> None:
        """Change the targets of names; None removes a name. The change of several names is atomic."""
        _apply(names, self.entries)
        self._changes.append(names)

    def sync(self) -> None:
        for names in self._changes:
            _apply(names, self._durable)
        self._changes.clear()

    def power_cut(self, random: Random) -> None:
        if random.random() < 0.5:
            del self._changes[random.randint(0, len(self._changes)) :]
        else:
            self._changes = _some_of_each_name(self._changes, random)
        self.sync()
        self.entries = dict(self._durable)
        for name in sorted(self.entries):
            self.entries[name].power_cut(random)


def _some_of_each_name(changes: list[_Names], random: Random) -> list[_Names]:
    by_name: dict[str, list[_Names]] = {}
    for names in changes:
        # A directory never has two names, so its rename is not torn. A file may have two, as with a hard link.
        moves_directory = any(isinstance(target, _Directory) for target in names.values())
        for change in [names] if moves_directory else [{name: target} for name, target in names.items()]:
            by_name.setdefault(next(iter(change)), []).append(change)
    return [kept for own in by_name.values() for kept in own[: random.randint(0, len(own))]]


def _apply(names: _Names, entries: dict[str, _File | _Directory]) -> None:
    for name, target in names.items():
        if target is None:
            entries.pop(name, None)
        else:
            entries[name] = target


class VirtualDisk:
    """The medium. `boot_id` is that of the host's current boot."""

    def __init__(
        self, boot_id: str, random: Random, record: Callable[[str], None], wall_ms: Callable[[], int] = lambda: 0
    ) -> None:
        self.boot_id = boot_id
        self.wall_ms = wall_ms
        self.random = random
        self.faults = DiskFaults(record)
        self._record = record
        self._rotten: list[_File] = []
        self.syncs = 0
        """Number of calls of `fdatasync`."""
        self._root = _Directory()

    def power_cut(self, boot_id: str) -> None:
        """Lose all or some of the unsynced data. The host boots with the new boot id."""
        self.boot_id = boot_id
        self._root.power_cut(self.random)

    def rot(self, path: str, position: int, bit: int) -> None:
        """Flip a bit of a file in the page cache, without an error. A later write to that position replaces it. It
        reaches the medium only with a write around it."""
        self._record(f"disk: {path} rots at {position}, bit {bit}")
        file = self.file(path)
        file.rot(position, bit)
        self._rotten.append(file)

    def mend(self) -> None:
        """Undo every `rot`."""
        self._record("disk: nothing is rotten any more")
        for file in self._rotten:
            file.mend()
        self._rotten.clear()

    def of(self, process: DiskUser) -> ProcessDisk:
        """Return the disk for one process."""
        return ProcessDisk(self, process)

    # -- for ProcessDisk, and for tests that inspect the disk --

    def find(self, path: str) -> _File | _Directory:
        """Return the file or directory at the path. Raises FileNotFoundError, NotADirectoryError."""
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not absolute")
        found: _File | _Directory = self._root
        for name in posixpath.normpath(path).split("/"):
            if not name:
                continue
            if isinstance(found, _File):
                raise os_error(errno.ENOTDIR, path)
            if name not in found.entries:
                raise os_error(errno.ENOENT, path)
            found = found.entries[name]
        return found

    def file(self, path: str) -> _File:
        found = self.find(path)
        if isinstance(found, _Directory):
            raise os_error(errno.EISDIR, path)
        return found

    def directory(self, path: str) -> _Directory:
        found = self.find(path)
        if isinstance(found, _File):
            raise os_error(errno.ENOTDIR, path)
        return found

    def parent(self, path: str) -> tuple[_Directory, str]:
        """Return the directory of the path's last name, and that name."""
        above, name = posixpath.split(posixpath.normpath(path))
        if not name:
            raise os_error(errno.EBUSY, path)
        return self.directory(above), name


class DiskUser(Protocol):
    """The part of a process (`minibroker.deploy.simulator.process.Process`) that a disk needs."""

    def check(self) -> None:
        """Raise ProcessKilled if it is dead."""
        ...

    def on_kill(self, sever: Callable[[], None]) -> None: ...


class ProcessDisk:
    """`minibroker.protocol.world.Disk` for one process. Its locks are released when it is killed."""

    def __init__(self, disk: VirtualDisk, process: DiskUser) -> None:
        self._disk = disk
        self._process = process
        self._locks: dict[ProcessLock, None] = {}
        self.open_files = 0
        process.on_kill(self._sever)

    def _begin(self, operation: str, path: str) -> None:
        self._process.check()
        if self._disk.faults.active:
            self._disk.faults.strike(operation, path)

    def open(self, path: str, *, create: bool = False) -> ProcessFile:
        return ProcessFile(self, self._disk, self._process, self._open(path, create=create), path)

    @property
    def faults(self) -> DiskFaults:
        return self._disk.faults

    def _take_descriptor(self, path: str) -> None:
        if self.open_files >= self._disk.faults.descriptor_limit:
            raise os_error(errno.EMFILE, path)

    def descriptors(self) -> Descriptors:
        return Descriptors(self.open_files, self.open_files, self._disk.faults.descriptor_limit)

    def _open(self, path: str, *, create: bool) -> _File:
        self._begin("open", path)
        self._take_descriptor(path)
        directory, name = self._disk.parent(path)
        if create and name not in directory.entries:
            self._begin("create", path)
            directory.change({name: _File()})
        return self._disk.file(path)

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def write_atomically(self, path: str, data: bytes) -> None:
        temporary = path + ".tmp"
        file = self.open(temporary, create=True)
        try:
            file.truncate(0)
            file.pwrite([data], 0)
            file.fdatasync()
        finally:
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
        self._begin("list", path)
        self._take_descriptor(path)
        return sorted(self._disk.directory(path).entries)

    def make_directories(self, path: str) -> None:
        """Create missing directories. Raises FileExistsError or NotADirectoryError if a file is in the way."""
        self._begin("make_directories", path)
        directory = self._disk.directory("/")
        names = [name for name in posixpath.normpath(path).split("/") if name]
        for depth, name in enumerate(names, 1):
            if name not in directory.entries:
                self._begin("create", path)
                directory.change({name: _Directory()})
            entry = directory.entries[name]
            if isinstance(entry, _File):
                raise os_error(errno.EEXIST if depth == len(names) else errno.ENOTDIR, path)
            directory = entry

    def rename(self, old: str, new: str) -> None:
        self._begin("rename", old)
        source, old_name = self._disk.parent(old)
        moved = self._disk.find(old)
        target, new_name = self._disk.parent(new)
        replaced = target.entries.get(new_name)
        if replaced is moved:
            return
        if isinstance(moved, _Directory):
            if posixpath.normpath(new).startswith(posixpath.normpath(old) + "/"):
                raise os_error(errno.EINVAL, new)
            if isinstance(replaced, _File):
                raise os_error(errno.ENOTDIR, new)
            if isinstance(replaced, _Directory) and replaced.entries:
                raise os_error(errno.ENOTEMPTY, new)
        elif isinstance(replaced, _Directory):
            raise os_error(errno.EISDIR, new)
        if isinstance(replaced, _File):
            self._disk.faults.take(-len(replaced.data))
        if source is target:
            source.change({old_name: None, new_name: moved})
        else:
            source.change({old_name: None})
            target.change({new_name: moved})
            if isinstance(moved, _Directory):
                source.sync()
                target.sync()

    def remove(self, path: str) -> None:
        self._begin("remove", path)
        directory, name = self._disk.parent(path)
        self._disk.faults.take(-len(self._disk.file(path).data))
        directory.change({name: None})

    def remove_tree(self, path: str) -> None:
        self._begin("remove_tree", path)
        self._take_descriptor(path)
        directory, name = self._disk.parent(path)
        self._empty(self._disk.directory(path))
        directory.change({name: None})

    def _empty(self, directory: _Directory) -> None:
        for name in sorted(directory.entries):
            entry = directory.entries[name]
            if isinstance(entry, _Directory):
                self._empty(entry)
            else:
                self._disk.faults.take(-len(entry.data))
            directory.change({name: None})

    def sync_directory(self, path: str) -> None:
        self._begin("sync_directory", path)
        self._take_descriptor(path)
        self._disk.directory(path).sync()

    def lock(self, path: str) -> ProcessLock:
        """Lock the file. Raises BlockingIOError if it is locked already."""
        lock = ProcessLock(self._open(path, create=True), self._locks, path)
        self._locks[lock] = None
        return lock

    def space(self, path: str) -> tuple[int, int]:
        self._begin("list", path)
        free = self._disk.faults.free_bytes
        return SIZE_BYTES, SIZE_BYTES if free is None else max(free, 0)

    def boot_id(self) -> str:
        self._process.check()
        return self._disk.boot_id

    def _sever(self) -> None:
        for lock in list(self._locks):
            lock.release()


class ProcessFile:
    """`minibroker.protocol.world.File`."""

    def __init__(self, opener: ProcessDisk, disk: VirtualDisk, process: DiskUser, file: _File, path: str) -> None:
        opener.open_files += 1
        self._opener = opener
        self._disk = disk
        self._process = process
        self._file = file
        self._path = path
        self._closed = False

    def pread(self, size: int, position: int) -> bytes:
        file = self._open()
        if self._disk.faults.active:
            self._disk.faults.strike("pread", self._path)
        self._check_not_negative(size, position)
        return bytes(file.data[position : position + size])

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        file = self._open()
        self._check_not_negative(position)
        file.modified_ms = self._disk.wall_ms()
        if self._disk.faults.active:
            return self._pwrite_with_faults(file, b"".join(data), position)
        return file.write(data, position)

    def _pwrite_with_faults(self, file: _File, data: bytes, position: int) -> int:
        faults = self._disk.faults
        try:
            faults.strike("pwrite", self._path)
        except OSError:
            file.write([data[: self._disk.random.randint(0, len(data))]], position)
            raise
        wanted = max(0, position + len(data) - len(file.data))
        missing = wanted - faults.take(wanted)
        if missing:
            file.write([data[: max(0, len(data) - missing)]], position)
            raise os_error(errno.ENOSPC, self._path)
        return file.write([data], position)

    def size(self) -> int:
        return len(self._open().data)

    def modified_ms(self) -> int:
        return self._open().modified_ms

    def set_modified_ms(self, wall_ms: int) -> None:
        self._open().modified_ms = wall_ms

    def truncate(self, size: int) -> None:
        file = self._open()
        file.modified_ms = self._disk.wall_ms()
        if self._disk.faults.active:
            self._disk.faults.strike("truncate", self._path)
        self._check_not_negative(size)
        self._disk.faults.take(min(0, size - len(file.data)))
        file.truncate(size)

    def fdatasync(self) -> None:
        file = self._open()
        self._disk.syncs += 1
        if self._disk.faults.active:
            try:
                self._disk.faults.strike("fdatasync", self._path)
            except OSError:
                if not self._disk.faults.is_dead:
                    file.lose_dirty()
                raise
        file.sync()

    def close(self) -> None:
        """Close the file. Has no effect for a killed process: the operating system has closed its files."""
        self._opener.open_files -= not self._closed
        self._closed = True

    def _open(self) -> _File:
        self._process.check()
        if self._closed:
            raise os_error(errno.EBADF, self._path)
        return self._file

    def _check_not_negative(self, *numbers: int) -> None:
        """Raise EINVAL for a negative number, as Linux does. Python's slices would count from the end."""
        if min(numbers) < 0:
            raise os_error(errno.EINVAL, self._path)


class ProcessLock:
    """`minibroker.protocol.world.Lock`: held until `release`, or until the process is killed."""

    def __init__(self, file: _File, held: dict[ProcessLock, None], path: str) -> None:
        if file.locked_by is not None:
            raise os_error(errno.EWOULDBLOCK, path)
        file.locked_by = self
        self._file = file
        self._held = held

    def release(self) -> None:
        if self._file.locked_by is self:
            self._file.locked_by = None
        self._held.pop(self, None)
