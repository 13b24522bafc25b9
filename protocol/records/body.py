"""The decoded records of a batch, and the limits of bodies of either magic."""

import operator
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from minibroker.protocol.records.header import HEADER_SIZE, LIMIT, MAX_RECORDS, BatchHeader, CorruptRecord

Header = tuple[str, bytes | None]

MAX_BODY_BYTES = 64 << 20
"""The largest decompressed body that a producer may send."""

MAX_STORED_BODY_BYTES = MAX_BODY_BYTES + 16 * MAX_RECORDS
"""The largest decompressed body in a log. Compaction adds an offset and a timestamp to each remaining record, and must
always have room for them, or a deleted key would stay."""

MAX_BATCH_BYTES = HEADER_SIZE + MAX_BODY_BYTES
"""The largest batch, and the upper bound of `message.max.bytes` and `max.message.bytes`."""

MAX_HEADERS_BYTES = 8 << 20
"""The largest size of all encoded record headers of a batch. A pair of two bytes or more takes about 70 in memory."""

RECORDS_AT_ONCE = 1 << 17
BYTES_AT_ONCE = 16 << 20
"""The limits of a part of a batch (`DecodedBatch.parts`). Few honest batches exceed them."""

_PAIR_BYTES = 64
"""What a header takes at least beside its name and value."""

HeadersColumn = Annotated[list[list[Header] | None], msgspec.Meta(max_length=MAX_RECORDS)]


class DecodedBatch(msgspec.Struct, frozen=True):
    """A batch's records as columns of `count` elements each; `keys` or `headers` None: null in every record.

    Columns of equal elements may hold the same object `count` times: a few stored bytes may stand for terabytes. A
    reader that writes the columns out, or makes an object of each record, takes them in `parts`.
    """

    header: BatchHeader
    offsets: Sequence[int]
    base_timestamp: int
    timestamp_deltas: list[int]
    """A record's timestamp in ms since 1970 is `base_timestamp` plus its delta. The deltas are small numbers, which are
    cheaper to pass on than the sums."""
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[list[Header] | None] | None
    shared_bytes: int = 0
    """Bytes of the keys, values and headers that are stored once for all records."""

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def timestamps(self) -> list[int]:
        """Timestamps in ms since 1970; computed on every access."""
        return [self.base_timestamp + delta for delta in self.timestamp_deltas]

    @property
    def base_offset(self) -> int:
        return self.header.base_offset

    @property
    def records_at_once(self) -> int:
        """The number of records of a part: at least one, and no more than BYTES_AT_ONCE allow if the shared bytes are
        written out in each."""
        if not self.shared_bytes:
            return RECORDS_AT_ONCE
        return max(1, min(RECORDS_AT_ONCE, BYTES_AT_ONCE // self.shared_bytes))

    def part(self, first: int, end: int) -> "DecodedBatch":
        """Return the records from index `first` to below `end`, with the header of the whole batch."""
        if first == 0 and end >= self.count:
            return self
        part = slice(first, end)
        return DecodedBatch(
            self.header,
            self.offsets[part],
            self.base_timestamp,
            self.timestamp_deltas[part],
            None if self.keys is None else self.keys[part],
            self.values[part],
            None if self.headers is None else self.headers[part],
            self.shared_bytes,
        )

    def parts(self, first: int = 0) -> "Iterator[DecodedBatch]":
        """Yield the records from index `first` on in parts that a reader can take at once; mostly the batch itself."""
        size = self.records_at_once
        for begin in range(first, self.count, size):
            yield self.part(begin, begin + size)


def size_of_headers(pairs: Sequence[Header] | None) -> int:
    """Return about what the headers of a record take in memory."""
    return sum(_PAIR_BYTES + len(name) + len(value or b"") for name, value in pairs or ())


def is_increasing(column: Sequence[int]) -> bool:
    return all(map(operator.lt, column, column[1:]))


def checked_base_timestamp(header: BatchHeader) -> int:
    """Return the base timestamp. Raises CorruptRecord if it is too large for adding deltas."""
    if not -LIMIT <= header.base_timestamp <= LIMIT:
        raise CorruptRecord(f"a base timestamp of {header.base_timestamp}")
    return header.base_timestamp
