"""A disk in memory that forgets: a power cut leaves of what was not synced whatever the seed decides.

Harsher than any file system: each sector of an unsynced write, the file's new length and each unsynced name survive or
not, independently of one another and of their order.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Sequence
from random import Random

from minibroker.protocol.messages import Buffer
from minibroker.protocol.world import Disk

SECTOR = 64
"""Small, as the batches of tests are."""


def _error(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), path)


class _Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""

    def cut(self, random: Random) -> None:
        if self.data != self.durable:
            now, before = bytes(self.data), self.durable
            lengths = sorted((len(now), len(before)))
            length = random.choice((*lengths, random.randint(*lengths)))
            mixed = bytearray(length)
            for start in range(0, length, SECTOR):
                end = min(start + SECTOR, length)
                source = now if random.random() < 0.6 else before
                mixed[start:end] = source[start:end].ljust(end - start, b"\0")
            self.data = mixed
        self.durable = bytes(self.data)


class _Directory:
    def __init__(self) -> None:
        self.entries: dict[str, _Inode | _Directory] = {}
        self.durable: dict[str, _Inode | _Directory] = {}

    def cut(self, random: Random) -> None:
        survivors: dict[str, _Inode | _Directory] = {}
        for name in sorted({*self.entries, *self.durable}):
            node = self.entries.get(name) if random.random() < 0.5 else self.durable.get(name)
            if node is not None:
                survivors[name] = node
        self.entries, self.durable = survivors, dict(survivors)
        for node in survivors.values():
            node.cut(random)


class PowerCutDisk:
    def __init__(self) -> None:
        self.changes_left: int | None = None
        """After this many changes the machine is dead: every call raises EIO. None: it does not die."""
        self._root = _Directory()
        self._boots = 1

    def power_cut(self, random: Random) -> None:
        """What is left after the next start."""
        self.changes_left = None
        self._boots += 1
        self._root.cut(random)

    def check(self) -> None:
        if self.changes_left is not None and self.changes_left <= 0:
            raise _error(errno.EIO)

    def change(self) -> None:
        self.check()
        if self.changes_left is not None:
            self.changes_left -= 1

    # -- protocol.world.Disk --

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        self.check()
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            if not create:
                raise _error(errno.ENOENT, path)
            self.change()
            node = parent.entries[name] = _Inode()
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR, path)
        return MemoryFile(self, node)

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        return file.pread(file.size(), 0)

    def write_atomically(self, path: str, data: bytes) -> None:
        temporary = path + ".tmp"
        file = self.open(temporary, create=True)
        file.truncate(0)
        file.pwrite([data], 0)
        file.fdatasync()
        self.rename(temporary, path)
        self.sync_directory(posixpath.dirname(path))

    def exists(self, path: str) -> bool:
        self.check()
        if path == "/":
            return True
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    def list(self, path: str) -> list[str]:
        self.check()
        return sorted(self._directory(path).entries)

    def make_directories(self, path: str) -> None:
        directory = self._root
        for name in path.strip("/").split("/"):
            if name not in directory.entries:
                self.change()
                directory.entries[name] = _Directory()
            found = directory.entries[name]
            assert isinstance(found, _Directory)
            directory = found

    def rename(self, old: str, new: str) -> None:
        self.change()
        before, old_name = self._parent(old)
        after, new_name = self._parent(new)
        after.entries[new_name] = before.entries.pop(old_name)

    def remove(self, path: str) -> None:
        self.change()
        parent, name = self._parent(path)
        if not isinstance(parent.entries.get(name), _Inode):
            raise _error(errno.ENOENT, path)
        del parent.entries[name]

    def remove_tree(self, path: str) -> None:
        self.change()
        parent, name = self._parent(path)
        if name not in parent.entries:
            raise _error(errno.ENOENT, path)
        del parent.entries[name]

    def sync_directory(self, path: str) -> None:
        self.change()
        directory = self._directory(path)
        directory.durable = dict(directory.entries)

    def lock(self, path: str) -> MemoryLock:
        self.open(path, create=True)
        return MemoryLock()

    def boot_id(self) -> str:
        return f"boot-{self._boots}"

    def _find(self, path: str) -> _Inode | _Directory:
        found: _Inode | _Directory = self._root
        for name in filter(None, posixpath.normpath(path).split("/")):
            if isinstance(found, _Inode) or name not in found.entries:
                raise _error(errno.ENOENT, path)
            found = found.entries[name]
        return found

    def _directory(self, path: str) -> _Directory:
        found = self._find(path)
        if isinstance(found, _Inode):
            raise _error(errno.ENOTDIR, path)
        return found

    def _parent(self, path: str) -> tuple[_Directory, str]:
        above, name = posixpath.split(posixpath.normpath(path))
        return self._directory(above), name


class MemoryFile:
    def __init__(self, disk: PowerCutDisk, inode: _Inode) -> None:
        self._disk = disk
        self._inode: _Inode | None = inode

    @property
    def _open(self) -> _Inode:
        if self._inode is None:
            raise _error(errno.EBADF)
        return self._inode

    def pread(self, size: int, position: int) -> bytes:
        self._disk.check()
        return bytes(self._open.data[position : position + size])

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        content = self._open.data
        everything = b"".join(data)
        try:
            self._disk.change()
        except OSError:
            everything = everything[: len(everything) // 2]
            content[position : position + len(everything)] = everything
            raise
        content.extend(bytes(max(0, position - len(content))))
        content[position : position + len(everything)] = everything
        return len(everything)

    def size(self) -> int:
        self._disk.check()
        return len(self._open.data)

    def truncate(self, size: int) -> None:
        self._disk.change()
        data = self._open.data
        del data[size:]
        data.extend(bytes(size - len(data)))

    def fdatasync(self) -> None:
        self._disk.change()
        self._open.durable = bytes(self._open.data)

    def close(self) -> None:
        self._inode = None


class MemoryLock:
    def release(self) -> None:
        pass


def _is_disk(disk: PowerCutDisk) -> Disk:
    return disk
