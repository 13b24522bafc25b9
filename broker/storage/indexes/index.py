"""Sparse indexes of a segment: sorted pairs that say where to begin to look.

The offset index maps a batch's last offset (relative to the segment's base) to the position where the batch begins, the
time index maps the largest timestamp so far to the offset that brought it. In both, keys and values increase strictly,
so one type serves both, and can be searched by value too.

`SparseIndex` is in memory: two arrays, searched by C code. It belongs to the active segment and to sealed segments
whose index file is not written yet. `StoredIndex` searches a sealed segment's file with a dozen reads of a few bytes
and keeps nothing: a terabyte of log has two gigabytes of index, and readers that go on where they stopped never ask for
it. Rejected: mapping the files (the simulator cannot map files, and a page fault on the event loop is an invisible
stall).

Files are Kafka's: entries of 8 (offset index) or 12 bytes (time index), big endian, without header.
"""

from __future__ import annotations

import operator
import struct
import sys
from array import array
from bisect import bisect_right
from itertools import chain
from typing import NamedTuple

from minibroker.protocol.world import Disk


class Layout(NamedTuple):
    suffix: str
    key_code: str
    """The key's type, as `struct` and `array` call it."""
    entry: struct.Struct


OFFSET_INDEX = Layout(".index", "i", struct.Struct(">ii"))
TIME_INDEX = Layout(".timeindex", "q", struct.Struct(">qi"))

MAX_RELATIVE_OFFSET = 2**31 - 1
"""Relative offsets and positions are 32 bits."""

Entry = tuple[int, int]


class InvalidIndex(ValueError):
    """The bytes are not an index of the segment; it must be built again."""


class SparseIndex:
    """An index in memory."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stored = 0
        """How many entries, from the first on, are in the file."""
        self.in_step = False
        """The file, if there is one, holds nothing else and will not, whatever happens: a cut or a write under way may
        have left it longer, and a power cut may undo what a process has cut that died before it had synced the file."""
        self._keys = array(layout.key_code)
        self._values = array("i")

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def entry_size(self) -> int:
        return self.layout.entry.size

    @property
    def last(self) -> Entry | None:
        return (self._keys[-1], self._values[-1]) if self._keys else None

    def append(self, key: int, value: int) -> None:
        self._keys.append(key)
        self._values.append(value)

    def floor(self, key: int) -> Entry | None:
        """The last entry whose key is not above `key`."""
        return self._entry(bisect_right(self._keys, key) - 1)

    def floor_by_value(self, value: int) -> Entry | None:
        """The last entry whose value is not above `value`."""
        return self._entry(bisect_right(self._values, value) - 1)

    def _entry(self, index: int) -> Entry | None:
        return (self._keys[index], self._values[index]) if index >= 0 else None

    def keep_keys_below(self, key: int) -> None:
        self._keep(bisect_right(self._keys, key - 1))

    def keep_values_below(self, value: int) -> None:
        self._keep(bisect_right(self._values, value - 1))

    def _keep(self, count: int) -> None:
        del self._keys[count:]
        del self._values[count:]
        if count < self.stored:
            self.stored = count
            self.in_step = False

    def encode(self, start: int = 0) -> bytes:
        """The entries from number `start` on, as the file has them."""
        pairs = zip(self._keys[start:], self._values[start:], strict=True)
        count = len(self._keys) - start
        fields = self.layout.entry.format[1:] * count
        return struct.pack(f">{fields}", *chain.from_iterable(pairs))

    @classmethod
    def decode(cls, layout: Layout, data: bytes) -> SparseIndex:
        """Raises InvalidIndex unless `data` is whole entries of keys and values that increase and are not negative.

        Nor may an offset index have one for the position 0: the first batch gets none, so these are zeros that a power
        cut has left of a write.
        """
        if len(data) % layout.entry.size:
            raise InvalidIndex(f"{len(data)} bytes are not a multiple of {layout.entry.size}")
        index = cls(layout)
        if layout is OFFSET_INDEX:
            numbers = array("i")
            numbers.frombytes(data)
            if sys.byteorder == "little":
                numbers.byteswap()
            index._keys, index._values = numbers[0::2], numbers[1::2]
        else:
            for key, value in layout.entry.iter_unpack(data):
                index.append(key, value)
        for column in (index._keys, index._values):
            if len(column) and (column[0] < 0 or not all(map(operator.lt, column, column[1:]))):
                raise InvalidIndex("entries do not increase")
        if layout is OFFSET_INDEX and len(index) and index._values[0] == 0:
            raise InvalidIndex("an entry is of the first batch")
        index.stored = len(index)
        return index


class StoredIndex:
    """A sealed segment's index: `count` entries in a file that is opened for each search. Raises OSError, and
    InvalidIndex where the file has become shorter."""

    def __init__(self, disk: Disk, path: str, layout: Layout, count: int) -> None:
        self._disk = disk
        self.path = path
        self._layout = layout
        self._count = count

    def __len__(self) -> int:
        return self._count

    def floor(self, key: int) -> Entry | None:
        return self._search(0, key)

    def floor_by_value(self, value: int) -> Entry | None:
        return self._search(1, value)

    def _search(self, column: int, target: int) -> Entry | None:
        size = self._layout.entry.size
        file = self._disk.open(self.path)
        try:

            def entry(index: int) -> Entry:
                data = file.pread(size, index * size)
                if len(data) < size:
                    raise InvalidIndex(f"{self.path} ends before entry {index} of {self._count}")
                key, value = self._layout.entry.unpack(data)
                return key, value

            found = bisect_right(range(self._count), target, key=lambda index: entry(index)[column]) - 1
            return entry(found) if found >= 0 else None
        finally:
            file.close()
