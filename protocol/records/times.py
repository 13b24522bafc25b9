"""The timestamps of a batch's records, without their keys, values and headers.

Searches by time look at them one by one and stop in the middle, so nothing is made of the other records.
"""

from collections.abc import Iterator

from minibroker.protocol.records.body import MAX_STORED_BODY_BYTES
from minibroker.protocol.records.columns import timestamps_of
from minibroker.protocol.records.compression import (
    DecompressionFailed,
    DecompressionTooLarge,
    decompress,
)
from minibroker.protocol.records.header import HEADER_SIZE, MAGIC_COLUMNS, BatchHeader, Buffer, CorruptRecord
from minibroker.protocol.records.varint import walk_times


def record_times(batch: Buffer, header: BatchHeader) -> Iterator[tuple[int, int]]:
    """Return an iterator over timestamp and offset of each record, in order. The caller has checked the header; the CRC
    is not checked. The body is decompressed at once, and the numbers of columns are decoded. The call and the iterator
    raise CorruptRecord."""
    if not header.records_count:
        return iter(())
    try:
        body = decompress(header.compression, memoryview(batch)[HEADER_SIZE : header.size], MAX_STORED_BODY_BYTES)
    except (DecompressionTooLarge, DecompressionFailed) as error:
        raise CorruptRecord(str(error)) from error
    times = timestamps_of(header, body) if header.magic == MAGIC_COLUMNS else walk_times(header, bytes(body))
    if header.is_log_append_time:
        return ((header.max_timestamp, offset) for _, offset in times)
    return times
