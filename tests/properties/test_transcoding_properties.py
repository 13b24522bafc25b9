"""Kafka's clients read the same values, offsets, progress and producer from a batch of columns as native clients do."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AiokafkaBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.protocol.records import (
    HEADER_SIZE,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    CorruptRecord,
    DecodedBatch,
    decode_batch,
    encode_batch,
    parse_header,
    validate_batch,
    validate_produced,
    with_records,
    without_records,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import stamp, write_header
from minibroker.protocol.records.transcoding import LARGEST_BODY_BYTES, PART_BYTES, as_records, decompressed, finished
from tests.properties.test_records_properties import batches

Row = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def rows(batch: DecodedBatch) -> list[Row]:
    keys = batch.keys or [None] * batch.count
    headers = batch.headers or [None] * batch.count
    columns = zip(batch.offsets, batch.timestamps, keys, batch.values, headers, strict=True)
    return [(offset, timestamp, key, value, pairs or []) for offset, timestamp, key, value, pairs in columns]


def transcode(batch: bytes | bytearray, offset: int = 0) -> bytearray:
    header = parse_header(batch)
    return finished(as_records(header, decompressed(batch, header), offset))


def check_same(native: bytes | bytearray) -> bytearray:
    batch = transcode(native)
    before, after = decode_batch(native), decode_batch(batch)
    assert rows(after) == rows(before)
    assert after.header.magic == MAGIC_RECORDS
    for field in (
        "base_offset",
        "partition_leader_epoch",
        "last_offset_delta",
        "base_timestamp",
        "max_timestamp",
        "producer_id",
        "producer_epoch",
        "base_sequence",
        "records_count",
        "is_log_append_time",
        "is_transactional",
        "is_control",
        "delete_horizon_ms",
    ):
        assert getattr(after.header, field) == getattr(before.header, field), field
    assert after.header.compression in (before.header.compression, Compression.NONE)
    validate_batch(batch, after.header, as_produced=True)
    return batch


@pytest.mark.slow
@given(batches())
def test_any_batch_of_columns_is_the_same_batch_of_records(arguments: dict[str, Any]) -> None:
    check_same(encode_batch(**{**arguments, "magic": MAGIC_COLUMNS}))


@pytest.mark.slow
@given(batches(), st.data())
def test_a_compacted_batch_is_the_same_batch_of_records(arguments: dict[str, Any], data: st.DataObject) -> None:
    batch = decode_batch(encode_batch(**{**arguments, "magic": MAGIC_COLUMNS}))
    horizon = data.draw(st.none() | st.integers(-(1 << 40), 1 << 40))
    kept = sorted(data.draw(st.sets(st.integers(0, batch.count - 1), min_size=1)))
    try:
        compacted = with_records(batch, kept, horizon)
    except ValueError:
        return  # timestamps too far from each other
    check_same(compacted)


# Lengths and offsets on both sides of where a varint grows by a byte, and of the size of lookup tables.
EDGES = [0, 1, 55, 56, 57, 62, 63, 64, 65, 8_180, 8_185, 8_191, 8_192, 16_370, 16_383, 16_384, 16_390]
SOURCE = random.Random(7)


def column(draw: Callable[[Any], Any], count: int) -> list[bytes | None]:
    """Values of one length, of two lengths or of many; some are null."""
    lengths = draw(st.lists(st.sampled_from(EDGES) | st.integers(0, 300), min_size=1, max_size=4))
    nulls = draw(st.sampled_from([0, 0, 2, 7]))
    return [
        None if nulls and index % nulls == 0 else bytes(lengths[index % len(lengths)] or 0) for index in range(count)
    ]


@settings(max_examples=60)
@given(st.data())
def test_lengths_offsets_and_timestamps_may_be_of_any_size(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 2, 63, 64, 65, 200]))
    gap = data.draw(st.sampled_from([1, 1, 50, 130, 9_000, 1 << 22]))
    steps = data.draw(st.lists(st.sampled_from([0, 1, 63, 64, -1, -64, -65, 8_192, 1 << 35]), min_size=1, max_size=3))
    native = encode_batch(
        column(data.draw, count),
        keys=column(data.draw, count) if data.draw(st.booleans()) else None,
        headers=[[("ä", bytes(index))] if index % 3 else None for index in range(count)]
        if data.draw(st.booleans())
        else None,
        base_timestamp=1_700_000_000_000,
        timestamp_deltas=[steps[index % len(steps)] * (index // 10) for index in range(count)],
        offset_deltas=[index * gap for index in range(count)],
    )
    check_same(native)


@pytest.mark.parametrize("count", [8_191, 8_193, 16_390])
@pytest.mark.parametrize("length", [0, 5, None])
def test_a_batch_of_many_small_records_is_the_same_batch(count: int, length: int | None) -> None:
    values = [bytes(index % 3 if length is None else length) for index in range(count)]
    check_same(encode_batch(values, base_timestamp=0, timestamp_deltas=[index // 100 for index in range(count)]))


def test_a_batch_with_log_append_time_keeps_it() -> None:
    native = encode_batch([b"a", b"b"], base_timestamp=1_000, timestamp_deltas=[0, 7])
    header = parse_header(native)
    stamped = write_header(native, msgspec.structs.replace(header, attributes=0x08, max_timestamp=99_000))
    decoded = decode_batch(check_same(stamped))
    assert decoded.timestamps == [99_000, 99_000]


def test_a_batch_emptied_by_compaction_stays_empty() -> None:
    native = without_records(parse_header(encode_batch([b"a", b"b"], base_timestamp=0, base_offset=5)))
    batch = check_same(native)
    assert len(batch) == HEADER_SIZE


def test_the_leaders_stamp_on_a_native_batch_is_not_part_of_kafkas_crc() -> None:
    native = encode_batch([b"a"], base_timestamp=0)
    native[:21] = stamp(parse_header(native), 77, 3)
    header = parse_header(check_same(native))
    assert (header.base_offset, header.partition_leader_epoch) == (77, 3)


def test_damage_is_found_and_not_covered_by_a_new_crc() -> None:
    native = encode_batch([b"some value"], base_timestamp=0)
    native[-3] ^= 1
    with pytest.raises(CorruptRecord, match="CRC"):
        transcode(native)


def test_a_body_that_compression_enlarges_is_sent_uncompressed() -> None:
    native = encode_batch([SOURCE.randbytes(50)], base_timestamp=0, compression=Compression.ZSTD)
    assert parse_header(check_same(native)).compression is Compression.NONE


# -- a batch that says once what all of its records have --


def said_once(value: bytes, count: int, **header: int) -> bytes:
    """Return a batch of `count` records with this value, which it contains once."""
    one = decode_batch(encode_batch([value], base_timestamp=5))
    fields = {"last_offset_delta": count - 1, **header}
    many = msgspec.structs.replace(one.header, **fields)
    return bytes(
        with_records(
            DecodedBatch(
                many,
                range(many.base_offset, many.base_offset + count),
                many.base_timestamp,
                [0] * count,
                None,
                [value] * count,
                None,
            ),
            range(count),
        )
    )


def test_a_batch_that_expands_to_too_much_is_read_part_by_part() -> None:
    """The batch of columns contains the value once; as records it would take 200 MB."""
    count = 2_000
    native = said_once(
        b"v" * 100_000,
        count,
        base_offset=1_000,
        last_offset_delta=count + 9,
        producer_id=4,
        producer_epoch=0,
        base_sequence=0x7FFFFFFF - 5,
    )
    assert len(native) < 110_000 + 6 * count

    offset, read = 1_003, 0
    while offset < 1_000 + count + 10:
        batch = transcode(native, offset)
        header = parse_header(batch)
        assert len(batch) < 2 * PART_BYTES < LARGEST_BODY_BYTES
        assert header.base_offset == offset  # the requested records, each once
        assert header.base_sequence == (0x7FFFFFFF - 5 + offset - 1_000) & 0x7FFFFFFF
        decoded = decode_batch(batch)
        assert list(decoded.offsets) == list(range(offset, offset + decoded.count))
        read += decoded.count
        offset = header.next_offset
    assert offset == 1_000 + count + 10  # as the batch itself ends
    assert read == count - 3


# -- as others read it --


def kafka_python(batch: bytes) -> list[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it uses a deprecated part of Python
        from kafka.record.memory_records import MemoryRecords

    records = MemoryRecords(batch)
    found = []
    while records.has_next():
        part = records.next_batch()
        assert part.validate_crc()
        found += [(r.offset, r.timestamp, r.key, r.value, [tuple(pair) for pair in r.headers]) for r in part]
    return found


def aiokafka(batch: bytes) -> list[Row]:
    reader = AiokafkaBatch(batch)
    assert reader.validate_crc()
    return [(r.offset, r.timestamp, r.key, r.value, [tuple(pair) for pair in r.headers]) for r in reader]


@pytest.mark.parametrize(
    ("reader", "codec"),
    # kafka-python has the other codecs only where their packages are.
    [(kafka_python, Compression.NONE), (kafka_python, Compression.GZIP), *((aiokafka, codec) for codec in Compression)],
)
def test_other_clients_read_the_batch(reader: Callable[[bytes], list[Row]], codec: Compression) -> None:
    count = 300
    native = encode_batch(
        [None if index % 7 == 0 else b"value %d " % index * 20 for index in range(count)],
        keys=[None if index % 5 == 0 else b"key %d" % index for index in range(count)],
        headers=[[("name", b"value"), ("none", None)] if index % 2 else None for index in range(count)],
        base_timestamp=1_700_000_000_000,
        timestamp_deltas=[index // 10 for index in range(count)],
        offset_deltas=[index * 2 for index in range(count)],
        base_offset=10_000,
        compression=codec,
    )
    assert reader(bytes(transcode(native))) == rows(decode_batch(native))


@pytest.mark.parametrize("reader", [kafka_python, aiokafka])
def test_other_clients_accept_an_empty_batch(reader: Callable[[bytes], list[Row]]) -> None:
    native = without_records(parse_header(encode_batch([b"a", b"b"], base_timestamp=0, base_offset=5)))
    assert reader(bytes(transcode(native))) == []


# -- what others write, as native clients read it --


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("size", [10, 5_000], ids=["small", "of several blocks"])
def test_native_clients_read_batches_of_other_clients(codec: Compression, size: int) -> None:
    builder = AiokafkaBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=False,
        producer_id=9,
        producer_epoch=1,
        base_sequence=3,
        batch_size=1 << 20,
    )
    written: list[Row] = []
    for index in range(40):
        value = None if index % 7 == 0 else SOURCE.randbytes(size)
        key = None if index % 5 == 0 else b"key %d" % index
        headers: list[tuple[str, bytes | None]] = [("ä", b"1"), ("none", None)] if index % 2 else []
        builder.append(index, timestamp=1_700_000_000_000 + index, key=key, value=value, headers=headers)
        written.append((index, 1_700_000_000_000 + index, key, value, headers))
    batch = bytes(builder.build())
    header = parse_header(batch)
    validate_batch(batch, header, as_produced=True)
    validate_produced(header)
    assert header.compression is codec
    assert (header.producer_id, header.base_sequence, header.records_count) == (9, 3, 40)
    assert rows(decode_batch(batch)) == written
