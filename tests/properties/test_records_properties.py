"""Batches decode to the records encoded, damage is found, and every fault is one error."""

from __future__ import annotations

import contextlib
import itertools
import struct
from contextlib import suppress
from typing import Any
from unittest import mock

import msgpack
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    Buffer,
    CorruptRecord,
    DecodedBatch,
    check_beginning,
    check_header,
    decode_batch,
    encode_batch,
    iterate_batches,
    parse_header,
    validate_batch,
    with_records,
    without_records,
)
from minibroker.protocol.records import columns as columns_module
from minibroker.protocol.records.compression import Compression, DecompressionFailed, compress, decompress
from minibroker.protocol.records.times import record_times

LIMIT = 1 << 20
NULLABLE_BYTES = st.none() | st.binary(max_size=40)
HEADERS = st.lists(st.tuples(st.text(max_size=5), NULLABLE_BYTES), max_size=3)
CODECS = st.sampled_from(list(Compression))
MAGICS = st.sampled_from([MAGIC_COLUMNS, MAGIC_RECORDS])


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of `encode_batch`."""
    count = draw(st.integers(1, 12))

    def column(elements: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(elements, min_size=count, max_size=count))

    gaps = column(st.integers(1, 1000))
    offset_deltas = None if gaps is None else [sum(gaps[: index + 1]) - 1 for index in range(count)]
    last = count - 1 if offset_deltas is None else offset_deltas[-1]
    return {
        "values": draw(st.lists(NULLABLE_BYTES, min_size=count, max_size=count)),
        "keys": column(NULLABLE_BYTES),
        "headers": column(st.none() | HEADERS),
        "base_timestamp": draw(st.integers(-(1 << 62), (1 << 62) - 1)),
        "timestamp_deltas": column(st.integers(-(1 << 62), 1 << 62) | st.integers(-3, 300)),
        "offset_deltas": offset_deltas,
        "last_offset_delta": draw(st.none() | st.integers(last, 0x7FFFFFFF)),
        "base_offset": draw(st.integers(0, 1 << 62)),
        "producer_id": draw(st.integers(-1, (1 << 63) - 1)),
        "producer_epoch": draw(st.integers(-1, (1 << 15) - 1)),
        "base_sequence": draw(st.integers(-1, (1 << 31) - 1)),
        "transactional": draw(st.booleans()),
        "compression": draw(CODECS),
        "magic": draw(MAGICS),
    }


def with_honest_crc(batch: bytes | bytearray) -> bytes:
    return bytes(batch[:17]) + struct.pack(">I", crc32c(bytes(batch[21:]))) + bytes(batch[21:])


def with_body(body: bytes, count: int, magic: int, codec: Compression) -> bytes:
    """Return a batch of one record with this body and the length and CRC that match it."""
    batch = encode_batch([b""], base_timestamp=0, magic=magic)[:61] + body
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">hi", batch, 21, codec, max(count - 1, 0))
    struct.pack_into(">i", batch, 57, count)
    return with_honest_crc(batch)


def decoded_giving_way(batch: Buffer) -> DecodedBatch:
    with mock.patch.object(columns_module, "_MOST_IN_ONE_CALL", 0):
        return decode_batch(batch, max_body_bytes=LIMIT, gives_way=True)


def decoded_or_corrupt(batch: bytes) -> None:
    """Decode the batch. Any error but CorruptRecord fails the test; a decoded batch has columns of the right length."""
    with suppress(CorruptRecord), mock.patch.object(columns_module, "_DECODED_AT_ONCE", 0):
        header = parse_header(batch)
        check_header(header)
        for _ in record_times(batch, header):
            pass
    try:
        decoded = decode_batch(batch, max_body_bytes=LIMIT)
    except CorruptRecord:
        with pytest.raises(CorruptRecord):
            decoded_giving_way(batch)
        return
    assert decoded_giving_way(batch) == decoded
    if decoded.count:
        check_beginning(batch, decoded.header)  # brokers accept all that readers can decode
    assert list(record_times(batch, decoded.header)) == list(zip(decoded.timestamps, decoded.offsets, strict=True))
    columns = (decoded.offsets, decoded.timestamps, decoded.keys, decoded.values, decoded.headers)
    assert {len(column) for column in columns if column is not None} == {decoded.header.records_count}
    assert {type(value) for value in decoded.values} <= {bytes, type(None)}


@given(batches())
def test_a_batch_decodes_to_the_records_encoded(arguments: dict[str, Any]) -> None:
    batch = encode_batch(**arguments)
    decoded = decode_batch(batch)
    count = len(arguments["values"])
    deltas = arguments["timestamp_deltas"] or [0] * count
    base_timestamp, base_offset = arguments["base_timestamp"], arguments["base_offset"]

    assert decoded_giving_way(batch) == decoded
    assert decoded.header.size == len(batch)
    assert decoded.values == arguments["values"]
    assert (decoded.keys or [None] * count) == (arguments["keys"] or [None] * count)
    assert [entry or [] for entry in decoded.headers or [None] * count] == [
        entry or [] for entry in arguments["headers"] or [None] * count
    ]
    assert decoded.timestamps == [base_timestamp + delta for delta in deltas]
    assert decoded.header.max_timestamp == max(decoded.timestamps)
    assert list(record_times(batch, decoded.header)) == list(zip(decoded.timestamps, decoded.offsets, strict=True))
    with mock.patch.object(columns_module, "_DECODED_AT_ONCE", 0):
        assert list(record_times(batch, decoded.header)) == list(zip(decoded.timestamps, decoded.offsets, strict=True))
    assert list(decoded.offsets) == [base_offset + delta for delta in arguments["offset_deltas"] or range(count)]
    assert decoded.header.last_offset >= decoded.offsets[-1]
    assert decoded.header.compression is arguments["compression"]
    assert decoded.header.is_transactional is arguments["transactional"]
    for field in ("producer_id", "producer_epoch", "base_sequence"):
        assert getattr(decoded.header, field) == arguments[field]


@given(
    st.lists(st.integers(-3, 300) | st.integers(-(1 << 61), 1 << 61), min_size=1).flatmap(
        lambda some: st.sampled_from([some, sorted(some), [*sorted(some), *some]])
    ),
    st.integers(-(1 << 60), 1 << 60),
)
def test_timestamps_are_the_same_batch_as_their_deltas(deltas: list[int], base: int) -> None:
    timestamps = [base + delta for delta in deltas]
    values: list[bytes | None] = [b"%d" % index for index in range(len(deltas))]
    batch = encode_batch(values, timestamps=timestamps)
    assert batch == encode_batch(
        values, base_timestamp=timestamps[0], timestamp_deltas=[delta - deltas[0] for delta in deltas]
    )
    assert decode_batch(batch).timestamps == timestamps


@given(st.lists(NULLABLE_BYTES, min_size=1), st.lists(NULLABLE_BYTES, min_size=1))
def test_columns_that_were_checked_before_make_the_same_batch(
    values: list[bytes | None], keys: list[bytes | None]
) -> None:
    count = min(len(values), len(keys))
    arguments: dict[str, Any] = {"base_timestamp": 5, "keys": keys[:count]}
    assert encode_batch(values[:count], **arguments) == encode_batch(values[:count], **arguments, is_checked=True)


@given(batches())
def test_both_magics_hold_the_same_records(arguments: dict[str, Any]) -> None:
    columns = decode_batch(encode_batch(**{**arguments, "magic": MAGIC_COLUMNS}))
    varints = decode_batch(encode_batch(**{**arguments, "magic": MAGIC_RECORDS}))

    assert list(columns.offsets) == list(varints.offsets)
    assert (columns.timestamps, columns.keys, columns.values) == (
        varints.timestamps,
        varints.keys,
        varints.values,
    )


@given(batches(), st.data())
def test_a_changed_byte_from_the_attributes_on_is_found(arguments: dict[str, Any], data: st.DataObject) -> None:
    batch = encode_batch(**arguments)
    position = data.draw(st.integers(21, len(batch) - 1))
    batch[position] ^= data.draw(st.integers(1, 255))

    for check in (lambda: validate_batch(batch, parse_header(batch)), lambda: decode_batch(batch)):
        try:
            check()
        except CorruptRecord:
            continue
        raise AssertionError(f"a changed byte at {position} went unnoticed")


@given(batches(), st.data())
def test_damage_under_an_honest_crc_is_corrupt_or_decodes(arguments: dict[str, Any], data: st.DataObject) -> None:
    batch = encode_batch(**arguments)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(21, len(batch) - 1))
        batch[position] = data.draw(st.integers(0, 255))

    decoded_or_corrupt(with_honest_crc(batch))


@given(st.binary(max_size=200), st.integers(0, 5), MAGICS, CODECS, st.booleans())
def test_any_body_is_corrupt_or_decodes(
    body: bytes, count: int, magic: int, codec: Compression, compressed: bool
) -> None:
    decoded_or_corrupt(with_body(compress(codec, body) if compressed else body, count, magic, codec))


SCALARS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=9)
ANYTHING = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=15,
)


@given(st.lists(ANYTHING, min_size=4, max_size=6), st.integers(1, 4))
def test_any_messagepack_is_corrupt_or_decodes(columns: list[Any], count: int) -> None:
    decoded_or_corrupt(with_body(msgpack.packb(columns), count, MAGIC_COLUMNS, Compression.NONE))


@given(st.lists(batches(), max_size=4), st.integers(0, 400))
def test_a_stream_of_batches_splits_where_they_were_joined(arguments: list[dict[str, Any]], cut: int) -> None:
    encoded = [encode_batch(**each) for each in arguments]
    stream = b"".join(encoded)[: max(0, sum(map(len, encoded)) - cut)]
    slices = list(iterate_batches(stream))

    ends = itertools.accumulate(map(len, encoded))
    expected = list(itertools.takewhile(lambda end: end <= len(stream), ends))
    assert [entry.end for entry in slices] == expected
    assert [bytes(stream[entry.start : entry.end]) for entry in slices] == encoded[: len(expected)]


@given(st.binary(max_size=300))
def test_any_bytes_split_into_batches_or_are_corrupt(data: bytes) -> None:
    try:
        for header, start, end in iterate_batches(data):
            assert end - start == header.size
    except CorruptRecord:
        pass


@given(CODECS, st.binary(max_size=2000), st.integers(0, 100), st.integers(0, 3000))
def test_decompression_inverts_compression_up_to_the_limit(
    codec: Compression, data: bytes, repeats: int, limit: int
) -> None:
    data *= repeats
    compressed = compress(codec, data)

    assert bytes(decompress(codec, compressed, len(data))) == data
    try:
        assert bytes(decompress(codec, compressed, limit)) == data
        assert len(data) <= limit
    except DecompressionFailed:
        assert len(data) > limit


@settings(max_examples=300)
@given(st.data(), CODECS, st.binary(max_size=300))
def test_damaged_compressed_data_never_raises_another_error_or_passes_the_limit(
    data: st.DataObject, codec: Compression, content: bytes
) -> None:
    compressed = bytearray(compress(codec, content))
    for _ in range(data.draw(st.integers(0, 4)) if compressed else 0):
        compressed[data.draw(st.integers(0, len(compressed) - 1))] = data.draw(st.integers(0, 255))
    damaged = compressed[: data.draw(st.integers(0, len(compressed)))]

    with contextlib.suppress(DecompressionFailed):
        assert len(decompress(codec, damaged, 4096)) <= 4096


@given(
    arguments=batches(),
    kept_by=st.lists(st.booleans(), min_size=12, max_size=12),
    horizon_ms=st.none() | st.integers(0, 1 << 45),
)
def test_a_batch_that_lost_records_keeps_the_others_unchanged(
    arguments: dict[str, Any], kept_by: list[bool], horizon_ms: int | None
) -> None:
    content = bytes(encode_batch(**arguments))
    before = decode_batch(content)
    kept = [index for index in range(before.count) if kept_by[index]]
    if not kept:
        emptied = bytes(without_records(before.header))
        header = decode_batch(emptied).header
        assert header.records_count == 0
        assert header.max_timestamp == before.header.max_timestamp
    else:
        try:
            written = bytes(with_records(before, kept, horizon_ms))
        except ValueError:
            timestamps = before.timestamps
            base = before.header.base_timestamp if horizon_ms is None else horizon_ms
            assert any(abs(timestamps[index] - base) > 1 << 62 for index in kept)
            return
        after = decode_batch(written)
        header = after.header
        assert header.delete_horizon_ms == horizon_ms
        assert [*after.offsets] == [before.offsets[index] for index in kept]
        assert after.timestamps == [before.timestamps[index] for index in kept]
        assert header.max_timestamp == max(after.timestamps)
        assert after.values == [before.values[index] for index in kept]
        for earlier, later in ((before.keys, after.keys), (before.headers, after.headers)):
            wanted = [None if earlier is None else earlier[index] for index in kept]
            assert [*(later or [None] * len(kept))] == wanted
    for name in ("base_offset", "last_offset_delta", "partition_leader_epoch", "magic", "compression"):
        assert getattr(header, name) == getattr(before.header, name)
    for name in ("producer_id", "producer_epoch", "base_sequence", "last_sequence", "is_transactional"):
        assert getattr(header, name) == getattr(before.header, name)
