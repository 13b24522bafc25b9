"""The aborted transactions of a segment, for read_committed readers (Kafka's TransactionIndex).

An entry stands in the segment that holds the abort marker. The whole index is in memory: 32 bytes for each aborted
transaction that the log holds, which is nothing for most logs. Its file has Kafka's entries, each followed by its
CRC-32C: a bit that flips there would otherwise show readers the records of an aborted transaction.

Below the recovery point the file is complete. Everything above comes from the batches (`recovery.replay`).
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from crc32c import crc32c

from minibroker.broker.storage.indexes.index import InvalidIndex
from minibroker.broker.storage.producer_state import EndedTransaction
from minibroker.protocol.records import BatchHeader

SUFFIX = ".txnindex"

_FIELDS = struct.Struct(">hqqqq")
"""Version, producer id, first offset, last offset, last stable offset."""
_CRC = struct.Struct(">I")
ENTRY_SIZE = _FIELDS.size + _CRC.size
_VERSION = 0
_COLUMNS = 4


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    """The offset of its first record in this partition."""
    last_offset: int
    """The offset of its abort marker."""
    last_stable_offset: int
    """The first offset of the oldest transaction that was open behind the marker, or the offset after the marker."""

    @classmethod
    def of(cls, ended: EndedTransaction) -> AbortedTransaction:
        return cls(ended.producer_id, ended.first_offset, ended.last_offset, ended.last_stable_offset)


class AbortedIndex:
    """Entries in the order of their markers."""

    entry_size = ENTRY_SIZE

    def __init__(self) -> None:
        self.stored = 0
        """The number of entries, from the first on, that are in the file."""
        self.in_step = True
        """The file, if there is one, holds nothing else: see `SparseIndex.in_step`."""
        self._numbers = array("q")

    def __len__(self) -> int:
        return len(self._numbers) // _COLUMNS

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return map(self._entry, range(len(self)))

    def _entry(self, index: int) -> AbortedTransaction:
        return AbortedTransaction(*self._numbers[index * _COLUMNS : (index + 1) * _COLUMNS])

    def _last_offset(self, index: int) -> int:
        return self._numbers[index * _COLUMNS + 2]

    def append(self, aborted: AbortedTransaction) -> None:
        self._numbers.extend(aborted)

    def since(self, offset: int) -> Iterator[AbortedTransaction]:
        """The transactions whose markers are at `offset` or later."""
        first = bisect_left(range(len(self)), offset, key=self._last_offset)
        return map(self._entry, range(first, len(self)))

    def keep_below(self, offset: int) -> None:
        """Drop the transactions whose markers are at `offset` or later."""
        count = bisect_left(range(len(self)), offset, key=self._last_offset)
        del self._numbers[count * _COLUMNS :]
        if count < self.stored:
            self.stored = count
            self.in_step = False

    @property
    def is_written(self) -> bool:
        """The file holds these entries and no others."""
        return self.in_step and self.stored == len(self)

    def all_stored(self) -> None:
        """The file is written by other means."""
        self.stored, self.in_step = len(self), True

    def encode(self, start: int = 0) -> bytes:
        """The entries from number `start` on, as the file has them."""
        pieces: list[bytes] = []
        for index in range(start, len(self)):
            fields = _FIELDS.pack(_VERSION, *self._entry(index))
            pieces += fields, _CRC.pack(crc32c(fields))
        return b"".join(pieces)

    @classmethod
    def decode(cls, data: bytes, below: int) -> AbortedIndex:
        """The entries with markers below `below`, up to which the file can be trusted. Raises InvalidIndex."""
        index = cls()
        last_offset = -1
        for start in range(0, len(data), ENTRY_SIZE):
            fields = data[start : start + _FIELDS.size]
            crc = data[start + _FIELDS.size : start + ENTRY_SIZE]
            if len(crc) < _CRC.size or _CRC.pack(crc32c(fields)) != crc:
                raise InvalidIndex(f"the entry at {start} does not match its CRC")
            version, *numbers = _FIELDS.unpack(fields)
            aborted = AbortedTransaction(*numbers)
            if version != _VERSION or not last_offset < aborted.last_offset or aborted.first_offset < 0:
                raise InvalidIndex(f"the entry at {start} is {version}, {aborted}")
            last_offset = aborted.last_offset
            if last_offset >= below:
                index.in_step = False
                break
            index.append(aborted)
        index.stored = len(index)
        return index


class AbortedTransactions:
    """The aborted transactions of a log by producer: which batches belong to one."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        """`aborted` is in the order of the log."""
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for producer_id, first_offset, last_offset, _ in aborted:
            self._ranges.setdefault(producer_id, []).append((last_offset, first_offset))

    def includes(self, header: BatchHeader) -> bool:
        """Whether the batch, which is not a marker, belongs to an aborted transaction."""
        if not header.is_transactional:
            return False
        ranges = self._ranges.get(header.producer_id, [])
        index = bisect_left(ranges, (header.last_offset, 0))
        return index < len(ranges) and ranges[index][1] <= header.base_offset
