"""A batch that a leader accepts survives a restart and is read by clients, whatever its size."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.validator import takes_long
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import (
    HEADER_SIZE,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    MAX_BATCH_BYTES,
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    decode_batch,
    encode_batch,
    parse_header,
)
from minibroker.protocol.records.columns import encode_columns
from minibroker.protocol.records.compression import Compression, compress
from minibroker.protocol.records.header import write_header
from minibroker.protocol.records.varint import encode_records
from tests.storage_support import NOW, batch, open_log

SCAN = 1024 * 1024
OVERHEAD = 100
SIZES = st.one_of(st.integers(0, 3_000), st.integers(SCAN - 200, SCAN + 200), st.integers(2 * SCAN, 3 * SCAN))


@example([10, MAX_BODY_BYTES - OVERHEAD, 5], MAX_BATCH_BYTES, MAGIC_RECORDS)
@example([10, MAX_BODY_BYTES - OVERHEAD, 5], MAX_BATCH_BYTES, MAGIC_COLUMNS)
@given(
    st.lists(SIZES, min_size=1, max_size=4),
    st.sampled_from([1_000, SCAN, MAX_BATCH_BYTES, 2**31 - 1]),
    st.sampled_from([MAGIC_RECORDS, MAGIC_COLUMNS]),
)
@settings(max_examples=30, deadline=None)
def test_recovery_keeps_every_batch_that_validation_accepts(sizes: list[int], limit: int, magic: int) -> None:
    async def run(path: Path) -> None:
        config = LogConfig(max_message_bytes=limit)
        log = open_log(str(path), config).log
        accepted, refused = 0, list[tuple[ErrorCode, bool]]()
        for size in sizes:
            try:
                log.append_as_leader(encode_batch([bytes(size)], base_timestamp=NOW, magic=magic), 0, NOW)
                accepted += 1
            except BrokerError as error:
                refused.append((error.code, size > limit - OVERHEAD))
        assert set(refused) <= {(ErrorCode.MESSAGE_TOO_LARGE, True)}
        held = log.read(0, 2**31, accepted)
        await log.close()
        again = open_log(str(path), config).log
        assert again.log_end_offset == accepted
        assert again.read(0, 2**31, accepted) == held
        await again.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory) / "orders-0"))


async def test_recovery_keeps_a_batch_larger_than_any_accepted_today(tmp_path: Path) -> None:
    """An earlier release may have acknowledged such a batch."""

    path = str(tmp_path / "orders-0")
    log = open_log(path).log
    for number, size in enumerate((10, 2 * MAX_BODY_BYTES + SCAN, 5)):
        log.append_as_follower(_of_any_size(size, number))
    await log.close()
    again = open_log(path).log
    assert again.log_end_offset == 3
    await again.close()


def _of_any_size(size: int, base_offset: int) -> bytes:
    header = parse_header(batch())
    made = write_header(
        bytearray(HEADER_SIZE + size),
        msgspec.structs.replace(header, base_offset=base_offset, magic=MAGIC_RECORDS, partition_leader_epoch=0),
    )
    return bytes(made)


def _records(values: Sequence[bytes], codec: Compression, magic: int, header: bytes | None) -> bytes:
    """A batch as any producer may send it, readable or not."""
    headers = None if header is None else [[("h", header)]] * len(values)
    keys = [b"key"] * len(values)
    if magic == MAGIC_COLUMNS:
        body = bytearray(HEADER_SIZE)
        encode_columns(body, None, None, keys, values, headers)
    else:
        body = encode_records(len(values), None, None, keys, values, headers, 1 << 30)
    template = parse_header(encode_batch([b""] * len(values), base_timestamp=NOW, magic=magic))
    with memoryview(body) as view:
        body = bytearray(HEADER_SIZE) + compress(codec, view[HEADER_SIZE:])
    return bytes(write_header(body, msgspec.structs.replace(template, attributes=int(codec))))


@pytest.mark.parametrize(
    ("codec", "magic", "compact"),
    [
        (Compression.NONE, MAGIC_RECORDS, False),
        (Compression.GZIP, MAGIC_RECORDS, False),
        (Compression.SNAPPY, MAGIC_RECORDS, True),
        (Compression.LZ4, MAGIC_COLUMNS, True),
        (Compression.ZSTD, MAGIC_RECORDS, False),
        (Compression.ZSTD, MAGIC_COLUMNS, False),
    ],
)
async def test_readers_accept_acknowledged_batches_and_others_are_too_large(
    tmp_path: Path, codec: Compression, magic: int, compact: bool
) -> None:
    config = LogConfig(max_message_bytes=2**31 - 1, compact=compact)
    log = open_log(str(tmp_path), config).log
    for values, header, is_accepted in (
        ([bytes(MAX_BODY_BYTES - 100)], None, True),
        ([bytes(MAX_BODY_BYTES)], None, False),
        ([b"v"] * 3, bytes(MAX_HEADERS_BYTES // 3 - 100), True),
        ([b"v"] * 3, bytes(MAX_HEADERS_BYTES // 3), False),
    )[codec is not Compression.ZSTD :]:
        records = _records(values, codec, magic, header)
        before = log.log_end_offset
        try:
            log.append_as_leader(records, 0, NOW)
            outcome = ErrorCode.NONE
        except BrokerError as error:
            outcome = error.code
        assert outcome is (ErrorCode.NONE if is_accepted else ErrorCode.MESSAGE_TOO_LARGE)
        if is_accepted:
            assert decode_batch(log.read(before, 1, log.log_end_offset)).values == values
        else:
            assert log.log_end_offset == before
            assert takes_long(records, config), "not in a slice of the event loop"
