"""The controller's timeline on disk: one line of JSON per event, in two files of bounded size."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.storage.manager import LogManager
from minibroker.protocol.world import Disk, File

FILE_NAME = "controller-timeline.jsonl"
MAX_BYTES = 8 * 1024 * 1024
MAX_READ_BYTES = 1024 * 1024
"""Bytes read when the broker starts, which must not take long."""


class TimelineFile:
    """Appends to `path`. A full file is renamed to `path.1`, replacing the previous one, and a new file begins.

    The timeline is a record for operators: it is not synced. Raises OSError; the next line overwrites one that was
    written in part.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file: File = disk.open(path, create=True)
        self._size = self._file.size()

    def write(self, entry: Mapping[str, object]) -> None:
        line = msgspec.json.encode(entry) + b"\n"
        if self._size and self._size + len(line) > MAX_BYTES:
            self._file.close()
            self._disk.rename(self._path, self._path + ".1")
            self._file = self._disk.open(self._path, create=True)
            self._size = 0
        self._size += self._file.pwrite([line], self._size)

    def close(self) -> None:
        self._file.close()


class TimelineStore:
    """The file in the first log directory that is online. If that disk fails, the file continues on the next one."""

    def __init__(self, disk: Disk, logs: LogDirs) -> None:
        self._disk = disk
        self._logs = logs
        self._file: TimelineFile | None = None
        self._home: LogManager | None = None

    def open(self) -> None:
        """Open the file in the first online directory, if any. Call it again once log directories are open."""
        self.close()
        while (home := next(iter(self._logs.online), None)) is not None:
            try:
                self._file = TimelineFile(self._disk, os.path.join(home.log_dir, FILE_NAME))
                break
            except OSError as error:
                home.directory.fail_unless_short(error, f"opening {FILE_NAME}")
                if home.directory.failure is None:
                    break
        self._home = home

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the last entries of this broker's earlier runs."""
        home = self._home
        if home is None or self._file is None:
            return []
        try:
            return read_last(self._disk, os.path.join(home.log_dir, FILE_NAME), count)
        except OSError as error:
            home.directory.fail_unless_short(error, f"reading {FILE_NAME}")
            return []

    def write(self, entry: Mapping[str, object]) -> None:
        """Append the entry, on the first disk that accepts it."""
        while (home := self._home) is not None:
            if home.directory.failure is not None or self._file is None:
                self.open()
                if self._file is None:
                    return  # without a usable disk, the entry is dropped
                continue
            try:
                self._file.write(entry)
                return
            except OSError as error:
                home.directory.fail_unless_short(error, f"writing {FILE_NAME}")
                if home.directory.failure is None:
                    self.close()
                    return

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def read_last(disk: Disk, path: str, count: int) -> list[dict[str, Any]]:
    """Return the last `count` entries of both files, or as many as are in their last MAX_READ_BYTES, oldest first.

    Damaged lines, and lines from before entries were numbered, are left out. Raises OSError.
    """
    data = b""
    for part in (path, path + ".1"):
        if len(data) < MAX_READ_BYTES and disk.exists(part):
            data = _tail(disk, part, MAX_READ_BYTES - len(data)) + data
    entries: list[dict[str, Any]] = []
    for line in reversed(data.splitlines()):
        entry = _entry(line)
        if entry is not None and (not entries or entry["number"] < entries[-1]["number"]):
            entries.append(entry)
            if len(entries) == count:
                break
    return entries[::-1]


def _tail(disk: Disk, path: str, size: int) -> bytes:
    file = disk.open(path)
    try:
        return file.pread(size, max(0, file.size() - size))
    finally:
        file.close()


class _Numbered(msgspec.Struct):
    """The fields of every entry."""

    number: int
    time_ms: int
    epoch: int
    controller: int
    event: str


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        msgspec.json.decode(line, type=_Numbered)
        entry: dict[str, Any] = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return entry
