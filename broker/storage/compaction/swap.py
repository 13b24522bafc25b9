"""The swap: one cleaned segment replaces those that it was made from, whenever the broker dies.

KAFKA-2118: a broker that died between the removal of the old segments and the naming of the new one had lost both.
Several names must change, and a power cut may keep any of the changes that were not synced: the removal of one file but
not the rename of another, or even half of a rename (the old name gone, the new one missing).

The choice: **one small file, the marker, says that a swap is under way, and no file that may be needed is removed
before its replacement is on disk.** For a segment with base offset B that replaces those from B to E:

1. `B.log.cleaned` is written and synced, and `B.txnindex.cleaned`, with the aborted transactions of all of them, if
   there are any, or were before. No reader and no restart has anything to do with them.
2. The marker `B.swap` is written, atomically: "E". From now on a restart goes forward.
3. B's offset and time index are removed, since they are of the old segment; the cleaned files are renamed to `B.log`
   and `B.txnindex`; the directory is synced. (A missing `B.txnindex` would mean that no transaction was aborted.)
4. The other segments below E are removed, with their indexes; the directory is synced.
5. B's new index files are written.
6. The marker is removed; the directory is synced.

A restart that finds no marker removes `B.log.cleaned`: as before. One that finds it (`finish_swap`) goes on with step 3
where `B.log.cleaned` is there. Where it is not, either `B.log` ends at E: then it is the new segment, and step 4 comes
next. Or the name was lost in step 3, and `B.log` is the old segment: then step 4 had not begun, the others are all
there, and it is as before. In each case the index files of B go, to be built again. All of that can be repeated.

That works since a cleaned segment ends where the last of the old ones ended: its last batch is kept, empty if need be.
The next segment begins there, so a log without a gap between its segments stays one.

In the running broker the log's readers change over to the new segment before step 2, in one step of the event loop,
with the file open under whatever name it has. Truncations, which remove and create files under these names, first have
the swap carried out to its end (`Swap.carry_out` may be called from two threads).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from minibroker.broker.storage.checkpoints import MalformedFile, sealed, unsealed
from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.index import OFFSET_INDEX, TIME_INDEX
from minibroker.broker.storage.segment import LOG_SUFFIX, IndexWrite, Segment, file_name, parse_file_name
from minibroker.protocol.world import Disk

CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"


class Swap:
    """Steps 2 to 6, for a cleaned segment that is written and synced."""

    def __init__(
        self, disk: Disk, directory: str, segment: Segment, end_offset: int, replaced: Sequence[Segment]
    ) -> None:
        """Only the swap may change `segment` until it is carried out."""
        self.segment = segment
        self._disk = disk
        self._directory = directory
        self._base = segment.base_offset
        self._end_offset = end_offset
        self._others = [old.base_offset for old in replaced[1:]]
        self._aborted = segment.aborted.encode()
        segment.aborted.all_stored()
        self._index_writes: list[IndexWrite] = segment.index_writes()
        self._running = threading.Lock()
        self._is_done = False

    def carry_out(self) -> None:
        """Blocks, also while another thread does it. Raises OSError; then it can be repeated, or what is there is for
        the next start to find out."""
        with self._running:
            if self._is_done:
                return
            disk, directory, base = self._disk, self._directory, self._base
            if self._aborted or disk.exists(_aborted(directory, base)):
                disk.write_atomically(_aborted(directory, base) + CLEANED_SUFFIX, self._aborted)
            disk.write_atomically(_marker(directory, base), encode_marker(self._end_offset))
            _name_the_cleaned(disk, directory, base)
            _remove_segments(disk, directory, self._others)
            for write in self._index_writes:
                write.carry_out(disk)
            disk.remove(_marker(directory, base))
            disk.sync_directory(directory)
            self._is_done = True


def finish_swap(disk: Disk, directory: str, index_interval_bytes: int) -> None:
    """Finish or undo a swap at a restart, before anything else. Raises MalformedFile, CorruptRecord, OSError."""
    names = disk.list(directory)
    parsed = [found for name in names if (found := parse_file_name(name)) is not None]
    for base in [offset for offset, suffix in parsed if suffix == SWAP_SUFFIX]:
        path = _marker(directory, base)
        end_offset = decode_marker(path, disk.read_file(path))
        others = [offset for offset, suffix in parsed if suffix == LOG_SUFFIX and base < offset < end_offset]
        if disk.exists(_log(directory, base) + CLEANED_SUFFIX) or (
            others and _end_of_segment(disk, directory, base, index_interval_bytes) == end_offset
        ):
            _name_the_cleaned(disk, directory, base)
            _remove_segments(disk, directory, others)
        else:
            _remove_indexes(disk, directory, base)
            disk.sync_directory(directory)
        disk.remove(path)
        disk.sync_directory(directory)
    for name in names:
        if name.endswith(CLEANED_SUFFIX):
            with suppress(FileNotFoundError):  # it has got its name
                disk.remove(f"{directory}/{name}")


def remove_cleaned(disk: Disk, directory: str, base: int) -> None:
    """Remove the output of a compaction that was given up. Raises OSError."""
    with suppress(FileNotFoundError):
        disk.remove(_log(directory, base) + CLEANED_SUFFIX)


def encode_marker(end_offset: int) -> bytes:
    return sealed(f"0\n{end_offset}\n".encode())


def decode_marker(path: str, data: bytes) -> int:
    """Raises MalformedFile."""
    try:
        version, end_offset = unsealed(path, data).decode().splitlines()
        if version != "0":
            raise ValueError(f"version {version}")
        return int(end_offset)
    except MalformedFile:  # a ValueError as well
        raise
    except ValueError as error:
        raise MalformedFile(f"{path} is damaged: {error}") from error


def _name_the_cleaned(disk: Disk, directory: str, base: int) -> None:
    _remove_indexes(disk, directory, base)
    for path in (_log(directory, base), _aborted(directory, base)):
        with suppress(FileNotFoundError):  # it has its name already
            disk.rename(path + CLEANED_SUFFIX, path)
    disk.sync_directory(directory)


def _remove_segments(disk: Disk, directory: str, bases: Sequence[int]) -> None:
    for base in bases:
        _remove_indexes(disk, directory, base)
        for path in (_aborted(directory, base), _log(directory, base)):
            with suppress(FileNotFoundError):
                disk.remove(path)
    disk.sync_directory(directory)


def _remove_indexes(disk: Disk, directory: str, base: int) -> None:
    for layout in (OFFSET_INDEX, TIME_INDEX):
        with suppress(FileNotFoundError):
            disk.remove(f"{directory}/{file_name(base, layout.suffix)}")


def _end_of_segment(disk: Disk, directory: str, base: int, index_interval_bytes: int) -> int:
    segment = Segment(disk, directory, base, index_interval_bytes)
    try:
        end = base
        for _, header in segment.walk(0, segment.size):
            end = header.next_offset
        return end
    finally:
        segment.close()


def _marker(directory: str, base: int) -> str:
    return f"{directory}/{file_name(base, SWAP_SUFFIX)}"


def _log(directory: str, base: int) -> str:
    return f"{directory}/{file_name(base, LOG_SUFFIX)}"


def _aborted(directory: str, base: int) -> str:
    return f"{directory}/{file_name(base, aborted_index.SUFFIX)}"
