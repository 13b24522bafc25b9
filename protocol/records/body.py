"""The records of a batch once they are decoded, and the limits that every codec of a body observes."""

import operator
from collections.abc import Sequence
from typing import Annotated

import msgspec

from minibroker.protocol.records.header import HEADER_SIZE, LIMIT, MAX_RECORDS, BatchHeader, CorruptRecord

Header = tuple[str, bytes | None]

MAX_BODY_BYTES = 64 << 20
"""The size of a body, decompressed, as a producer may send it."""

MAX_STORED_BODY_BYTES = MAX_BODY_BYTES + 16 * MAX_RECORDS
"""The same once it is in a log: compaction writes an offset and a timestamp for each record that it leaves. What it had
no room for would keep a key that was deleted."""

MAX_BATCH_BYTES = HEADER_SIZE + MAX_BODY_BYTES
"""The size of a batch as it is sent: the most that `message.max.bytes` and `max.message.bytes` may be."""

MAX_HEADERS_BYTES = 8 << 20
"""The size of all record headers of a batch, encoded: a pair of two bytes or more becomes about 70 in memory."""

HeadersColumn = Annotated[list[list[Header] | None], msgspec.Meta(max_length=MAX_RECORDS)]


class DecodedBatch(msgspec.Struct, frozen=True):
    """A batch's records as columns of `count` elements each; `keys` or `headers` None: null in every record.

    Columns of equal elements may hold the same object `count` times.
    """

    header: BatchHeader
    offsets: Sequence[int]
    base_timestamp: int
    timestamp_deltas: list[int]
    """A record's timestamp in ms since 1970 is `base_timestamp` plus its delta: small numbers, which cost less to pass
    on than the sums."""
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[list[Header] | None] | None

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def timestamps(self) -> list[int]:
        """In ms since 1970; computed each time."""
        return [self.base_timestamp + delta for delta in self.timestamp_deltas]

    @property
    def base_offset(self) -> int:
        return self.header.base_offset


def is_increasing(column: Sequence[int]) -> bool:
    return all(map(operator.lt, column, column[1:]))


def checked_base_timestamp(header: BatchHeader) -> int:
    """The base timestamp, if deltas can be added to it. Raises CorruptRecord."""
    if not -LIMIT <= header.base_timestamp <= LIMIT:
        raise CorruptRecord(f"a base timestamp of {header.base_timestamp}")
    return header.base_timestamp
