"""Faults of a disk in memory, and its counters. See `disk`."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DESCRIPTOR_LIMIT = 2**20
"""Default limit of open files of a process."""

_CHANGES = frozenset({"create", "fdatasync", "pwrite", "remove", "remove_tree", "rename", "sync_directory", "truncate"})
"""Operations that change bytes, names, or durable state. `create` is the step of `open`, `lock` and `make_directories`
that creates a name; it counts once for each name."""

_OPERATIONS = _CHANGES | {"list", "make_directories", "open", "pread"}


def os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


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
    """The faults of a disk, and its counters."""

    def __init__(self, record: Callable[[str], None]) -> None:
        self._record = record
        self._failures: list[_Failure] = []
        self._free_bytes: int | None = None
        self._changes_left: int | None = None
        self._broken: dict[str, int] = {}
        """The errno of every call within a directory, by directory."""
        self._hung: set[str] = set()
        self._fuses: list[_Fuse] = []
        self._counts: dict[str, Counter[str]] = {}
        self._changes: list[tuple[str, str]] | None = None
        self.sync_delay_s = 0.0
        """Duration of each fdatasync that runs in an executor."""
        self.descriptor_limit = DESCRIPTOR_LIMIT
        """Limit of open files of each process. Further calls that need a descriptor fail with EMFILE."""
        self.active = False
        """Some call may fail or is counted. Cached for speed."""

    @property
    def free_bytes(self) -> int | None:
        """Bytes by which all files together can still grow. None: unlimited."""
        return self._free_bytes

    @free_bytes.setter
    def free_bytes(self, free_bytes: int | None) -> None:
        self._record(f"disk: {free_bytes} bytes free")
        self._free_bytes = free_bytes
        self._update_active()

    @property
    def is_dead(self) -> bool:
        """Whether the number of changes of `die_after` is reached."""
        return self._changes_left == 0

    def die_after(self, changes: int) -> None:
        """Let every call fail with EIO after so many more changes of bytes, names or durable state. A test can thus
        draw the moment at which the machine dies; it cuts the power or kills the process before it clears the faults. A
        failing pwrite writes a prefix of its bytes."""
        self._record(f"disk: is to die after {changes} changes")
        self._changes_left = changes
        self._update_active()

    def fail(self, operation: str, number: int, after: int = 0) -> None:
        """Let this operation fail once with this errno, after `after` calls that succeed.

        A failing pwrite writes a prefix of its bytes. A failing fdatasync loses its data: a later one succeeds without
        writing it. Raises ValueError for an unknown operation.
        """
        if operation not in _OPERATIONS:
            raise ValueError(f"unknown operation {operation!r}: use one of {', '.join(sorted(_OPERATIONS))}")
        self._record(f"disk: {operation} is to fail with {number} after {after}")
        self._failures.append(_Failure(operation, number, after))
        self._update_active()

    def break_directory(self, path: str, number: int) -> None:
        """Let every call within the directory fail with this errno until `mend_directory`, as if it was a failed disk
        of its own. Failing calls have no effect, except those of fdatasync and pwrite: see `fail`."""
        self._record(f"disk: everything in {path} is to fail with {number}")
        self._broken[path] = number
        self._update_active()

    def break_directory_at(self, path: str, operation: str, number: int, after: int, blown: Callable[[], None]) -> None:
        """Break the directory at a call of this operation within it, after `after` calls that succeed. `blown` is
        called then, as the process that makes the call, and the call fails."""
        self._record(f"disk: everything in {path} is to fail with {number} after {after} of {operation}")
        self._fuses.append(_Fuse(path, operation, number, after, blown))
        self._update_active()

    def count_calls(self, path: str) -> Counter[str]:
        """Return a counter of the operations that are called within the directory from now on."""
        counts = self._counts[path] = Counter()
        self._update_active()
        return counts

    def list_changes(self) -> list[tuple[str, str]]:
        """Return a list that collects operation and path of each later change that `die_after` counts."""
        self._changes = []
        self._update_active()
        return self._changes

    def hang_directory(self, path: str) -> None:
        """Stop the executor of that log directory: its functions do not begin until `mend_directory`."""
        self._record(f"disk: {path} hangs")
        self._hung.add(path)

    def is_hung(self, path: str) -> bool:
        return path in self._hung

    def mend_directory(self, path: str) -> None:
        """Repair the directory. Lost data stays lost."""
        self._record(f"disk: {path} is mended")
        self._broken.pop(path, None)
        self._hung.discard(path)
        self._update_active()

    def clear(self) -> None:
        """Repair the disk. Lost data stays lost."""
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
        """Suspend all faults, for a test that inspects the disk."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    # -- for ProcessDisk --

    def strike(self, operation: str, path: str) -> None:
        """Count the call. Raises OSError if it has to fail or the disk is dead."""
        if self.is_dead:
            raise os_error(errno.EIO, path)
        for directory, counts in self._counts.items():
            counts[operation] += is_within(path, directory)
        for fuse in [fuse for fuse in self._fuses if fuse.operation == operation and is_within(path, fuse.path)]:
            fuse.after -= 1
            if fuse.after < 0:
                self._fuses.remove(fuse)
                self.break_directory(fuse.path, fuse.number)
                fuse.blown()
        for directory, number in self._broken.items():
            if is_within(path, directory):
                raise os_error(number, path)
        for failure in [failure for failure in self._failures if failure.operation == operation]:
            failure.after -= 1
            if failure.after < 0:
                self._failures.remove(failure)
                self._record(f"disk: {operation} {path} fails with {failure.number}")
                self._update_active()
                raise os_error(failure.number, path)
        if operation in _CHANGES:
            if self._changes_left is not None:
                self._changes_left -= 1
            if self._changes is not None:
                self._changes.append((operation, path))

    def take(self, wanted: int) -> int:
        """Reserve space, and return the number of bytes that fit. A negative number releases space."""
        if self._free_bytes is None:
            return wanted
        taken = min(wanted, max(self._free_bytes, 0))
        self._free_bytes -= taken
        return taken

    def _update_active(self) -> None:
        self.active = bool(
            self._failures
            or self._broken
            or self._fuses
            or self._counts
            or self._changes is not None
            or self._free_bytes is not None
            or self._changes_left is not None
        )


def is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")
