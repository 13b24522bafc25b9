"""The controller's timeline on disk: a line of JSON per event, in two files of bounded size."""

from collections.abc import Mapping

import msgspec

from minibroker.protocol.world import Disk, File

MAX_BYTES = 8 * 1024 * 1024


class TimelineFile:
    """Appends to `path`; once it is full it becomes `path.1`, in place of the former one, and a new one begins.

    A record for people: it is not synced. Raises OSError; what was written in part is written over by the next line.
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
