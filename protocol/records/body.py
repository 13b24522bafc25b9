"""The decoded records of a batch, and the limits of bodies of either magic."""

import operator
from collections.abc import Sequence
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

HeadersColumn = Annotated[list[list[Header] | None], msgspec.Meta(max_length=MAX_RECORDS)]


class DecodedBatch(msgspec.Struct, frozen=True):
    """A batch's records as columns of `count` elements each; `keys` or `headers` None: null in every record.

    Columns of equal elements may hold the same object `count` times.
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


def is_increasing(column: Sequence[int]) -> bool:
    return all(map(operator.lt, column, column[1:]))


def checked_base_timestamp(header: BatchHeader) -> int:
    """Return the base timestamp. Raises CorruptRecord if it is too large for adding deltas."""
    if not -LIMIT <= header.base_timestamp <= LIMIT:
        raise CorruptRecord(f"a base timestamp of {header.base_timestamp}")
    return header.base_timestamp
