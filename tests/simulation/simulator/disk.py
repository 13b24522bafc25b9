"""Disks in memory. A disk outlives the processes that use it, and the starts of its host.

A `VirtualDisk` is the medium with its tree of directories and files; `ProcessDisk` is what one process sees of it, and
raises `ProcessKilled` once that is dead. Files are POSIX's: a name points to a file, an open file lives on when its
name is removed or replaced, locks are those of `flock` and end with their process.

What is written is seen by all processes at once, and outlives them: it is in the page cache. What outlives a power cut
is kept apart. A file has its bytes on the medium besides those in memory, and the ranges in which they may differ;
`fdatasync` copies those ranges. A directory has its names on the medium, and a list of changes since; `sync_directory`
applies them. A power cut is harsher than with any file system. Each sector of a dirty range is the old or the new one,
whatever the order in which they were written; the size is the old one, the new one, or one in between, with zeroes
where nothing got to; a truncation may be lost although what was written after it is not. Of the changes of a directory
the first so many are kept, as in a journal; or the first so many of each name, whatever became of the others. So a
synced file may lack its name, a name may be that of an empty file, and of a file that was renamed the old name may be
left, the new one, both or neither. A directory is renamed as a whole or not at all, and at once where it gets another
parent.

`faults` makes calls fail, one or all in a directory, counts them, fills the disk up, makes it slow, and lets it die
after so many changes; `rot` flips a bit of what is read. `write_atomically`, `read_file` and `lock` are made of the
same steps as the real ones, which is where they fail.

Rejected: a copy of each file at each sync (a log is synced often, and long); a journal common to all directories (it
would hide that the wrong directory was synced).
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Protocol

from minibroker.protocol.messages import Buffer
from minibroker.protocol.world import Descriptors

SECTOR_BYTES = 64
"""What is written as a whole or not at all. Small, as the batches of tests are."""

SIZE_BYTES = 2**40
"""What a disk says of its size; it holds more."""

DESCRIPTOR_LIMIT = 2**20
"""How many files a process may have open, unless a test says otherwise."""

_CHANGES = frozenset({"create", "fdatasync", "pwrite", "remove", "remove_tree", "rename", "sync_directory", "truncate"})
"""What changes the bytes, the names, or what is durable. `create` is the part of `open`, `lock` and `make_directories`
that makes a name, once for each."""

_OPERATIONS = _CHANGES | {"list", "make_directories", "open", "pread"}


_Names = dict[str, "_File | _Directory | None"]
"""A change of a directory: what these names point to from now on; None: nothing."""


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class _File:
    def __init__(self) -> None:
        self.data = bytearray()
        self.modified_ms = 0
        self.locked_by: ProcessLock | None = None
        self._durable = bytearray()
        self._dirty: list[list[int]] = []
        """Ranges, from and to, in which `data` may differ from what is durable."""
        self._shortest: int | None = None
        """The shortest that the file was cut to since it was synced."""
        self._rotten: dict[int, tuple[int, int]] = {}
        """By position: what a byte was, and what has become of it."""

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
        """What could not be written counts as written, and is nowhere but in memory."""
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
        """What is rotten is again what was written, here and where it has got to the medium."""
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
        """Let names point to something else, or (None) to nothing: all of them at once."""
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
        # A directory never has two names, so its move is not torn; of a file, that is a hard link.
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


@dataclass
class _Failure:
    operation: str
    number: int
    after: int


@dataclass
class _Fuse:
    path: str
    operation: str
    number: int
    after: int
    blown: Callable[[], None]


class DiskFaults:
    """What is wrong with a disk."""

    def __init__(self, record: Callable[[str], None]) -> None:
        self._record = record
        self._failures: list[_Failure] = []
        self._free_bytes: int | None = None
        self._changes_left: int | None = None
        self._broken: dict[str, int] = {}
        """Directories, and the errno of every call for what is in them."""
        self._hung: set[str] = set()
        self._fuses: list[_Fuse] = []
        self._counts: dict[str, Counter[str]] = {}
        self._changes: list[tuple[str, str]] | None = None
        self.sync_delay_s = 0.0
        """How long each fdatasync takes, where it is called in the executor."""
        self.descriptor_limit = DESCRIPTOR_LIMIT
        """How many files each process may have open: what opens one more fails with EMFILE."""
        self.active = False
        """Something could fail."""

    @property
    def free_bytes(self) -> int | None:
        """How much files can grow from now on, all together. None: without end."""
        return self._free_bytes

    @free_bytes.setter
    def free_bytes(self, free_bytes: int | None) -> None:
        self._record(f"disk: {free_bytes} bytes free")
        self._free_bytes = free_bytes
        self._look_whether_active()

    @property
    def is_dead(self) -> bool:
        """`die_after` has come true."""
        return self._changes_left == 0

    def die_after(self, changes: int) -> None:
        """Let every call of any process fail with EIO once so many more changes have been made: of bytes, of names, of
        what is durable. So a test draws the point at which the machine dies, and cuts its power, or kills the process,
        before it clears the faults. Of a pwrite that fails, some of the bytes have been written."""
        self._record(f"disk: is to die after {changes} changes")
        self._changes_left = changes
        self._look_whether_active()

    def fail(self, operation: str, number: int, after: int = 0) -> None:
        """Let this operation of any process fail with this errno, once, after so many more of it have not failed.

        Of a pwrite that fails, some of the bytes have been written. An fdatasync that fails loses what it was to write:
        a later one succeeds, and does not write it either. Raises ValueError for an unknown operation.
        """
        if operation not in _OPERATIONS:
            raise ValueError(f"{operation!r} is none of {', '.join(sorted(_OPERATIONS))}")
        self._record(f"disk: {operation} is to fail with {number} after {after}")
        self._failures.append(_Failure(operation, number, after))
        self._look_whether_active()

    def break_directory(self, path: str, number: int) -> None:
        """Let every call of any process for what is within the directory fail with this errno, as if it was a disk of
        its own that fails, until `mend_directory`. What fails changes nothing; but an fdatasync or a pwrite as in
        `fail`."""
        self._record(f"disk: everything in {path} is to fail with {number}")
        self._broken[path] = number
        self._look_whether_active()

    def break_directory_at(self, path: str, operation: str, number: int, after: int, blown: Callable[[], None]) -> None:
        """`break_directory` with the call of this operation in the directory that comes after so many others; it fails
        as the first one. `blown` is called then, in the name of the process that made the call."""
        self._record(f"disk: everything in {path} is to fail with {number} after {after} of {operation}")
        self._fuses.append(_Fuse(path, operation, number, after, blown))
        self._look_whether_active()

    def count_calls(self, path: str) -> Counter[str]:
        """How often each operation is called within the directory from now on."""
        counts = self._counts[path] = Counter()
        self._look_whether_active()
        return counts

    def list_changes(self) -> list[tuple[str, str]]:
        """Operation and path of each change from now on, of those that `die_after` counts: what it can strike."""
        self._changes = []
        self._look_whether_active()
        return self._changes

    def hang_directory(self, path: str) -> None:
        """Let what is called in the executor of that log directory not return, nor begin, until `mend_directory`."""
        self._record(f"disk: {path} hangs")
        self._hung.add(path)

    def is_hung(self, path: str) -> bool:
        return path in self._hung

    def mend_directory(self, path: str) -> None:
        """What it has lost stays lost."""
        self._record(f"disk: {path} is mended")
        self._broken.pop(path, None)
        self._hung.discard(path)
        self._look_whether_active()

    def clear(self) -> None:
        """Mend the disk. What it has lost stays lost."""
        self._failures.clear()
        self._broken.clear()
        self._hung.clear()
        self._fuses.clear()
        self._changes_left = None
        self.sync_delay_s = 0.0
        self.descriptor_limit = DESCRIPTOR_LIMIT
        self.free_bytes = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Nothing fails meanwhile: for a test that looks from outside."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    # -- for ProcessDisk --

    def strike(self, operation: str, path: str) -> None:
        """Raises OSError where it is this operation's turn to fail, or the disk is dead."""
        if self.is_dead:
            raise _error(errno.EIO, path)
        for directory, counts in self._counts.items():
            counts[operation] += _is_within(path, directory)
        for fuse in [fuse for fuse in self._fuses if fuse.operation == operation and _is_within(path, fuse.path)]:
            fuse.after -= 1
            if fuse.after < 0:
                self._fuses.remove(fuse)
                self.break_directory(fuse.path, fuse.number)
                fuse.blown()
        for directory, number in self._broken.items():
            if _is_within(path, directory):
                raise _error(number, path)
        for failure in [failure for failure in self._failures if failure.operation == operation]:
            failure.after -= 1
            if failure.after < 0:
                self._failures.remove(failure)
                self._record(f"disk: {operation} {path} fails with {failure.number}")
                self._look_whether_active()
                raise _error(failure.number, path)
        if operation in _CHANGES:
            if self._changes_left is not None:
                self._changes_left -= 1
            if self._changes is not None:
                self._changes.append((operation, path))

    def take(self, wanted: int) -> int:
        """How many of so many more bytes there is room for. Negative: they are given back."""
        if self._free_bytes is None:
            return wanted
        taken = min(wanted, max(self._free_bytes, 0))
        self._free_bytes -= taken
        return taken

    def _look_whether_active(self) -> None:
        self.active = bool(
            self._failures
            or self._broken
            or self._fuses
            or self._counts
            or self._changes is not None
            or self._free_bytes is not None
            or self._changes_left is not None
        )


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


class VirtualDisk:
    """The medium. `boot_id` is that of the host's current start."""

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
        """How many times `fdatasync` was called."""
        self._root = _Directory()

    def power_cut(self, boot_id: str) -> None:
        """Lose what was not synced, or some of it, and go on as the disk of the host's next start."""
        self.boot_id = boot_id
        self._root.power_cut(self.random)

    def rot(self, path: str, position: int, bit: int) -> None:
        """Flip a bit of a file, as in a page of the page cache. Nobody is told; what is written there afterwards is
        right again. It gets to the medium only with what is written around it."""
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


class DiskUser(Protocol):
    """The part of a process (`tests.simulation.simulator.process.Process`) that a disk needs."""

    def check(self) -> None:
        """Raises ProcessKilled."""
        ...

    def on_kill(self, sever: Callable[[], None]) -> None: ...


class ProcessDisk:
    """`minibroker.protocol.world.Disk` for one process. Severed when it is killed."""

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
            raise _error(errno.EMFILE, path)

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
        """Raises FileExistsError or NotADirectoryError where a file is in the way."""
        self._begin("make_directories", path)
        directory = self._disk.directory("/")
        names = [name for name in posixpath.normpath(path).split("/") if name]
        for depth, name in enumerate(names, 1):
            if name not in directory.entries:
                self._begin("create", path)
                directory.change({name: _Directory()})
            entry = directory.entries[name]
            if isinstance(entry, _File):
                raise _error(errno.EEXIST if depth == len(names) else errno.ENOTDIR, path)
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
                raise _error(errno.EINVAL, new)
            if isinstance(replaced, _File):
                raise _error(errno.ENOTDIR, new)
            if isinstance(replaced, _Directory) and replaced.entries:
                raise _error(errno.ENOTEMPTY, new)
        elif isinstance(replaced, _Directory):
            raise _error(errno.EISDIR, new)
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
        """Raises BlockingIOError where the file is locked."""
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
            raise _error(errno.ENOSPC, self._path)
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
        """Does nothing for a killed process, whose files the operating system has closed."""
        self._opener.open_files -= not self._closed
        self._closed = True

    def _open(self) -> _File:
        self._process.check()
        if self._closed:
            raise _error(errno.EBADF, self._path)
        return self._file

    def _check_not_negative(self, *numbers: int) -> None:
        """As Linux has it. (Slices of Python count from the end instead.)"""
        if min(numbers) < 0:
            raise _error(errno.EINVAL, self._path)


class ProcessLock:
    """`minibroker.protocol.world.Lock`: held until `release`, or until the process is killed."""

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
