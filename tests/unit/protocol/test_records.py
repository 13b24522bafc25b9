from __future__ import annotations

import ast
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from crc32c import crc32c

from minibroker.protocol import records
from minibroker.protocol.records import (
    CRC_END,
    HEADER_SIZE,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    NO_SEQUENCE,
    BatchHeader,
    ControlType,
    CorruptRecord,
    EndTransactionMarker,
    InvalidRecord,
    check_count,
    check_header,
    claims_much,
    decode_batch,
    decode_control_batch,
    encode_batch,
    encode_control_batch,
    iterate_batches,
    parse_header,
    placed_batches,
    stamp,
    validate_batch,
    validate_produced,
)
from minibroker.protocol.records.compression import Compression, compress
from minibroker.protocol.records.header import write_header

NOW = 1_700_000_000_000
VALUES: list[bytes | None] = [b"first", None, b"", b"fourth"]
KEYS: list[bytes | None] = [None, b"key", b"", b"key"]
HEADERS: list[list[records.Header] | None] = [None, [("trace", b"1"), ("trace", None)], [], [("ü", b"")]]

HEADER_FIELDS = {
    "base_offset": 0,
    "batch_length": 49,
    "partition_leader_epoch": -1,
    "magic": MAGIC_COLUMNS,
    "crc": 0,
    "attributes": 0,
    "last_offset_delta": 0,
    "base_timestamp": NOW,
    "max_timestamp": NOW,
    "producer_id": -1,
    "producer_epoch": -1,
    "base_sequence": -1,
    "records_count": 1,
}


def header_of(**changes: int) -> BatchHeader:
    return BatchHeader(**{**HEADER_FIELDS, **changes})


def batch_of(body: bytes, **fields: int) -> bytes:
    """A batch with this body and the length and CRC that match it."""
    header = header_of(batch_length=49 + len(body), **fields)
    packed = bytearray(struct.pack(">qiibIhiqqqhii", *msgspec.structs.astuple(header)) + body)
    struct.pack_into(">I", packed, 17, crc32c(packed[21:]))
    return bytes(packed)


def columns_of(*columns: object, count: int, last_offset_delta: int | None = None, attributes: int = 0) -> bytes:
    body = compress(Compression(attributes & 7), msgpack.packb(columns))
    last = count - 1 if last_offset_delta is None else last_offset_delta
    return batch_of(body, records_count=count, last_offset_delta=last, attributes=attributes)


# --- the header ---------------------------------------------------------------------------------


def test_the_header_is_kafkas_version_2_byte_for_byte() -> None:
    batch = encode_batch(
        [b"v"],
        base_timestamp=0x0102030405060708,
        producer_id=0x1112131415161718,
        producer_epoch=0x2122,
        base_sequence=0x31323334,
        base_offset=0x0142434445464748,
        partition_leader_epoch=0x51525354,
        transactional=True,
        compression=Compression.ZSTD,
    )

    assert batch[0:8].hex() == "0142434445464748"
    assert int.from_bytes(batch[8:12], "big") == len(batch) - 12
    assert batch[12:16].hex() == "51525354"
    assert batch[16] == 77
    assert int.from_bytes(batch[17:21], "big") == crc32c(batch[21:])
    assert batch[21:23].hex() == "0014"
    assert batch[23:27].hex() == "00000000"
    assert batch[27:35].hex() == batch[35:43].hex() == "0102030405060708"
    assert batch[43:51].hex() == "1112131415161718"
    assert batch[51:53].hex() == "2122"
    assert batch[53:57].hex() == "31323334"
    assert batch[57:61].hex() == "00000001"


def test_a_parsed_header_answers_what_a_broker_asks() -> None:
    batch = encode_batch(
        VALUES,
        base_timestamp=NOW,
        timestamp_deltas=[0, 7, 3, 5],
        compression=Compression.GZIP,
        transactional=True,
        producer_id=4,
        producer_epoch=1,
        base_sequence=0x7FFFFFFE,
        base_offset=100,
    )
    header = parse_header(b"??" + batch, 2)

    assert header.size == len(batch)
    assert (header.base_offset, header.last_offset, header.next_offset) == (100, 103, 104)
    assert (header.base_timestamp, header.max_timestamp) == (NOW, NOW + 7)
    assert header.compression is Compression.GZIP
    assert header.is_transactional
    assert header.has_producer_id
    assert not header.is_control
    assert not header.is_log_append_time
    assert header.records_count == 4


def test_the_last_sequence_wraps_to_zero() -> None:
    assert header_of(base_sequence=0x7FFFFFFE, last_offset_delta=1).last_sequence == 0x7FFFFFFF
    assert header_of(base_sequence=0x7FFFFFFE, last_offset_delta=3).last_sequence == 1
    assert header_of(base_sequence=NO_SEQUENCE, last_offset_delta=3).last_sequence == NO_SEQUENCE


def test_a_header_cut_short_is_corrupt() -> None:
    batch = encode_batch([b"v"], base_timestamp=NOW)

    with pytest.raises(CorruptRecord, match="60 are left"):
        parse_header(batch[:60])
    with pytest.raises(CorruptRecord):
        parse_header(batch, len(batch) + 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_length": 48},
        {"batch_length": 0},
        {"batch_length": -1},
        {"magic": 0},
        {"magic": 1},
        {"magic": -1},
        {"attributes": 5},
        {"records_count": -1},
        {"records_count": 3, "last_offset_delta": 1},
        {"records_count": 0, "last_offset_delta": -1},
        {"last_offset_delta": -1},
        {"base_offset": -1},
        {"base_offset": (1 << 63) - 1},
        {"records_count": records.MAX_RECORDS + 1, "last_offset_delta": records.MAX_RECORDS},
        {"records_count": 1 << 30, "last_offset_delta": 1 << 30, "magic": MAGIC_RECORDS},
        {"attributes": 0x30},
    ],
    ids=str,
)
def test_impossible_header_values_are_corrupt(changes: dict[str, int]) -> None:
    with pytest.raises(CorruptRecord):
        check_header(header_of(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"records_count": 0},
        {"records_count": 2, "last_offset_delta": 9},
        {"magic": MAGIC_RECORDS, "attributes": 0x30},
    ],
    ids=str,
)
def test_header_values_of_stored_batches_are_accepted(changes: dict[str, int]) -> None:
    check_header(header_of(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attributes": 0x20, "magic": MAGIC_RECORDS},
        {"attributes": 0x08},
        {"attributes": 0x40},
        {"records_count": 0},
        {"records_count": 1, "last_offset_delta": 1},
        {"producer_id": 5, "producer_epoch": 0, "base_sequence": -1},
        {"producer_id": 5, "producer_epoch": -1, "base_sequence": 0},
        {"attributes": 0x10},
    ],
    ids=str,
)
def test_what_only_brokers_may_write_is_invalid_from_a_producer(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidRecord):
        validate_produced(header_of(**changes))


def test_producers_may_send_plain_and_idempotent_batches() -> None:
    validate_produced(header_of())
    validate_produced(header_of(producer_id=5, producer_epoch=0, base_sequence=0))


def test_a_batch_of_a_transaction_needs_a_producer_id() -> None:
    validate_produced(header_of(producer_id=5, producer_epoch=0, base_sequence=0, attributes=0x10))
    with pytest.raises(InvalidRecord, match="belongs to a transaction and has no producer id"):
        validate_produced(header_of(attributes=0x10))


def test_coordinators_may_append_to_transactions_without_a_sequence() -> None:
    of_coordinator = header_of(producer_id=5, producer_epoch=0, base_sequence=-1, attributes=0x10)
    validate_produced(of_coordinator, has_sequence=False)
    with pytest.raises(InvalidRecord, match="both must be given"):
        validate_produced(of_coordinator)


# --- batches in a buffer ------------------------------------------------------------------------


def test_batches_are_split_up_to_the_first_incomplete_one() -> None:
    batches = [encode_batch([b"v"] * count, base_timestamp=NOW) for count in (1, 5, 2)]
    whole = b"".join(batches)
    ends = [len(b"".join(batches[: index + 1])) for index in range(3)]

    for length in range(len(whole) + 1):
        slices = list(iterate_batches(whole[:length]))
        assert [entry.end for entry in slices] == [end for end in ends if end <= length]
        assert all(parse_header(whole, entry.start) == entry.header for entry in slices)


def test_splitting_starts_at_the_given_position() -> None:
    first, second = encode_batch([b"a"], base_timestamp=NOW), encode_batch([b"b"], base_timestamp=NOW)

    (entry,) = iterate_batches(memoryview(first + second), len(first))

    assert (entry.start, entry.end) == (len(first), len(first) + len(second))


def test_splitting_refuses_zeros_after_a_batch() -> None:
    batch = encode_batch([b"a"], base_timestamp=NOW)
    slices = iterate_batches(batch + bytes(100))

    assert next(slices).end == len(batch)
    with pytest.raises(CorruptRecord, match="batch length of 0"):
        next(slices)


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_a_flipped_bit_anywhere_behind_the_crc_is_found(magic: int) -> None:
    batch = encode_batch(VALUES, keys=KEYS, headers=HEADERS, base_timestamp=NOW, magic=magic)

    for position in range(21, len(batch)):
        damaged = bytearray(batch)
        damaged[position] ^= 0x10
        with pytest.raises(CorruptRecord):
            validate_batch(damaged, parse_header(damaged))
        with pytest.raises(CorruptRecord):
            decode_batch(damaged)


def test_a_batch_cut_short_is_corrupt() -> None:
    batch = encode_batch(VALUES, base_timestamp=NOW)
    header = parse_header(batch)

    with pytest.raises(CorruptRecord, match="are left"):
        validate_batch(batch[:-1], header)
    with pytest.raises(CorruptRecord, match="are left"):
        decode_batch(batch[:-1], header, check_crc=False)


def stamped(magic: int) -> bytes:
    batch = encode_batch(VALUES, base_timestamp=NOW, magic=magic)
    return stamp(parse_header(batch), 1 << 40, 9) + batch[CRC_END:]


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_a_stamped_batch_has_its_offset_and_leader_epoch_and_is_valid(magic: int) -> None:
    buffer = b"xxx" + stamped(magic)
    header = parse_header(buffer, 3)
    assert (header.base_offset, header.partition_leader_epoch) == (1 << 40, 9)
    validate_batch(buffer, header, 3)
    assert list(decode_batch(buffer, header, 3).offsets) == [(1 << 40) + delta for delta in range(4)]


def test_no_bit_of_a_stamped_batch_of_columns_flips_unseen() -> None:
    batch = bytearray(stamped(MAGIC_COLUMNS))
    for bit in range(8 * len(batch)):
        batch[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            validate_batch(batch, parse_header(batch))
        batch[bit // 8] ^= 1 << bit % 8


def test_a_batch_of_kafkas_format_keeps_its_crc_when_it_is_stamped() -> None:
    produced = encode_batch(VALUES, base_timestamp=NOW, magic=MAGIC_RECORDS)
    assert parse_header(stamped(MAGIC_RECORDS)).crc == parse_header(produced).crc


def test_a_batch_that_was_stamped_is_not_taken_for_one_that_was_produced() -> None:
    batch = stamped(MAGIC_COLUMNS)
    with pytest.raises(CorruptRecord):
        validate_batch(batch, parse_header(batch), as_produced=True)


# --- columns and records ------------------------------------------------------------------------


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_what_was_encoded_is_decoded(magic: int, compression: Compression) -> None:
    batch = encode_batch(
        VALUES,
        keys=KEYS,
        headers=HEADERS,
        base_timestamp=NOW,
        timestamp_deltas=[0, 300, -5, 1 << 40],
        base_offset=50,
        offset_deltas=[0, 2, 3, 9],
        last_offset_delta=12,
        compression=compression,
        magic=magic,
    )
    decoded = decode_batch(batch)

    assert decoded.header == parse_header(batch)
    assert (decoded.count, decoded.base_offset, decoded.header.last_offset) == (4, 50, 62)
    assert list(decoded.offsets) == [50, 52, 53, 59]
    assert decoded.timestamps == [NOW, NOW + 300, NOW - 5, NOW + (1 << 40)]
    assert decoded.header.max_timestamp == NOW + (1 << 40)
    assert decoded.keys == KEYS
    assert decoded.values == VALUES
    assert decoded.headers is not None
    assert [entry or [] for entry in decoded.headers] == [entry or [] for entry in HEADERS]


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_columns_that_were_not_given_decode_to_their_defaults(magic: int) -> None:
    decoded = decode_batch(encode_batch([b"a", b"b"], base_timestamp=NOW, base_offset=7, magic=magic))

    assert list(decoded.offsets) == [7, 8]
    assert decoded.timestamps == [NOW, NOW]
    assert decoded.keys is None
    assert decoded.headers is None


def test_the_body_is_one_messagepack_array_of_five_columns() -> None:
    batch = encode_batch(
        [b"a", b"b"], keys=[b"k", None], base_timestamp=NOW, timestamp_deltas=[0, 1], offset_deltas=[1, 4]
    )

    assert msgpack.unpackb(bytes(batch[HEADER_SIZE:])) == [[1, 4], [0, 1], [b"k", None], [b"a", b"b"], None]


def test_columns_without_information_are_nil() -> None:
    batch = encode_batch(
        [None, None],
        keys=[None, None],
        headers=[None, []],
        base_timestamp=NOW,
        timestamp_deltas=[0, 0],
        offset_deltas=[0, 1],
    )

    assert msgpack.unpackb(bytes(batch[HEADER_SIZE:])) == [None] * 5
    assert decode_batch(batch).values == [None, None]


def test_the_records_of_magic_2_are_kafkas() -> None:
    batch = encode_batch(
        [b"value"],
        keys=[b"k"],
        headers=[[("h", None)]],
        base_timestamp=NOW,
        timestamp_deltas=[-1],
        offset_deltas=[300],
        magic=MAGIC_RECORDS,
    )

    #      length attributes timestamp offset  key      value            headers
    assert batch[61:].hex() == "20" + "00" + "01" + "d804" + "026b" + "0a76616c7565" + "02" + "026801"


def test_a_column_of_one_element_holds_for_every_record() -> None:
    batch = columns_of(None, [5], [b"k"], [b"v"], [[["h", None]]], count=3)
    decoded = decode_batch(batch)

    assert decoded.timestamps == [NOW + 5] * 3
    assert decoded.keys == [b"k"] * 3
    assert decoded.values == [b"v"] * 3
    assert decoded.headers == [[("h", None)]] * 3


def test_log_append_time_overrides_every_timestamp() -> None:
    body = msgpack.packb([None, [1, 2], None, [b"a", b"b"], None])
    batch = batch_of(body, records_count=2, last_offset_delta=1, attributes=0x08, max_timestamp=NOW + 99)

    assert decode_batch(batch).timestamps == [NOW + 99] * 2


def test_a_batch_emptied_by_compaction_keeps_its_header() -> None:
    batch = encode_batch([], base_timestamp=NOW, last_offset_delta=4, producer_id=9, producer_epoch=0, base_sequence=10)
    decoded = decode_batch(batch)

    assert len(batch) == HEADER_SIZE
    validate_batch(batch, decoded.header)
    assert (decoded.count, list(decoded.offsets), decoded.header.last_sequence) == (0, [], 14)


@pytest.mark.parametrize(
    "columns",
    [
        {"values": []},
        {"keys": [b"k"]},
        {"timestamp_deltas": [1, 2, 3]},
        {"headers": []},
        {"offset_deltas": [0]},
        {"offset_deltas": [1, 1]},
        {"offset_deltas": [2, 1]},
        {"offset_deltas": [-1, 0]},
        {"offset_deltas": [0, 1 << 31]},
        {"last_offset_delta": 0},
        {"offset_deltas": [0, 5], "last_offset_delta": 4},
        {"timestamp_deltas": [0, 1 << 63]},
        {"timestamp_deltas": [-(1 << 63), 0]},
        {"base_timestamp": 1 << 63},
        {"producer_id": 1 << 63},
        {"base_offset": -1},
        {"magic": 1},
        {"values": [b""] * (records.MAX_RECORDS + 1)},
        {"values": [bytes(records.MAX_BODY_BYTES), b""]},
        {"headers": [[("h", bytes(records.MAX_HEADERS_BYTES))], None]},
    ],
    ids=lambda columns: ",".join(columns),
)
def test_columns_that_no_reader_would_accept_are_not_encoded(columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        encode_batch(**{"values": [b"a", b"b"], "base_timestamp": NOW, **columns})


@pytest.mark.parametrize(
    "columns",
    [
        {"values": ["text", b"b"]},
        {"values": [bytearray(b"a"), b"b"]},
        {"keys": [1, b"k"]},
        {"timestamp_deltas": [0, 1.5]},
        {"timestamp_deltas": [0, True]},
        {"offset_deltas": [0, None]},
        {"headers": [{"a": b"b"}, None]},
        {"headers": [[("name", "text")], None]},
        {"headers": [[(b"name", b"value")], None]},
    ],
    ids=str,
)
def test_elements_of_a_wrong_type_are_not_encoded(columns: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        encode_batch(**{"values": [b"a", b"b"], "base_timestamp": NOW, **columns})


# --- malformed bodies -----------------------------------------------------------------------------

DEEP = b"\x91" * 100_000

MALFORMED_COLUMNS = {
    "empty body": b"",
    "not an array": b"\xc0",
    "four columns": msgpack.packb([None] * 4),
    "six columns": msgpack.packb([None] * 6),
    "trailing bytes": msgpack.packb([None] * 5) + b"\xc0",
    "too few values": msgpack.packb([None, None, None, [b"a", b"b"], None]),
    "too many values": msgpack.packb([None, None, None, [b"a"] * 4, None]),
    "no values": msgpack.packb([None, None, None, [], None]),
    "too few keys": msgpack.packb([None, None, [b"a", b"b"], None, None]),
    "too few headers": msgpack.packb([None, None, None, None, [None, None]]),
    "too few timestamps": msgpack.packb([None, [1, 2], None, None, None]),
    "an int value": msgpack.packb([None, None, None, [b"a", 1, b"c"], None]),
    "a str value": msgpack.packb([None, None, None, [b"a", "b", b"c"], None]),
    "a str key": msgpack.packb([None, None, ["b"], None, None]),
    "a list as value": msgpack.packb([None, None, None, [[], [], []], None]),
    "a map as column": msgpack.packb([None, None, None, {"a": 1}, None]),
    "an extension": msgpack.packb([None, None, None, [msgpack.ExtType(1, b"x")], None]),
    "a null timestamp": msgpack.packb([None, [None, 1, 2], None, None, None]),
    "a float timestamp": msgpack.packb([None, [0.5, 1, 2], None, None, None]),
    "a boolean offset": msgpack.packb([[False, True, 2], None, None, None, None]),
    "a huge timestamp": msgpack.packb([None, [(1 << 64) - 1], None, None, None]),
    "a negative offset": msgpack.packb([[-1, 1, 2], None, None, None, None]),
    "offsets that stand still": msgpack.packb([[0, 1, 1], None, None, None, None]),
    "one offset for all": msgpack.packb([[1], None, None, None, None]),
    "an offset past the last": msgpack.packb([[0, 1, 3], None, None, None, None]),
    "a header name of bytes": msgpack.packb([None, None, None, None, [[[b"name", None]]]]),
    "a header value of str": msgpack.packb([None, None, None, None, [[["name", "value"]]]]),
    "a header of three": msgpack.packb([None, None, None, None, [[["name", b"", b""]]]]),
    "a header map": msgpack.packb([None, None, None, None, [{"name": b""}]]),
    "headers that are bytes": msgpack.packb([None, None, None, None, b"headers"]),
    "a name that is not UTF-8": b"\x95\xc0\xc0\xc0\xc0\x91\x91\x92\xa1\xff\xc0",
    "more headers than are read": msgpack.packb(
        [None, None, None, None, [[["name", bytes(records.MAX_HEADERS_BYTES)]]]]
    ),
    "deep nesting among values": b"\x95\xc0\xc0\xc0" + DEEP,
    "deep nesting among headers": b"\x95\xc0\xc0\xc0\xc0" + DEEP + b"\xc0",
    "a column longer than the body": b"\x95\xc0\xc0\xc0\xdd\xff\xff\xff\xff",
    "a value longer than the body": b"\x95\xc0\xc0\xc0\x91\xc6\xff\xff\xff\xff\xc0",
    "an unused code": b"\x95\xc0\xc0\xc0\xc0\xc1",
}


WIDE = b"\xdd" + struct.pack(">I", 8_000_000)


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
@pytest.mark.parametrize(
    "body",
    [
        b"\x95\xc0\xc0\xc0" + WIDE + b"\xc0" * 8_000_001,
        b"\x95\xc0\xc0\xc0" + WIDE + b"\x90" * 8_000_000 + b"\xc0",
        b"\x95\xc0\xc0\xc0\xc0" + WIDE + b"\x90" * 8_000_000,
        b"\x95\xc0\xc0\xc0\xc0\x91" + WIDE + b"\x90" * 8_000_000,
        b"\x95" + WIDE + b"\x00" * 8_000_000 + b"\xc0" * 4,
    ],
    ids=["nil values", "values that are arrays", "headers of no pairs", "pairs of nothing", "offsets"],
)
def test_eight_megabytes_of_almost_nothing_do_not_become_hundreds(body: bytes, magic: int) -> None:
    batch = batch_of(body, records_count=3, last_offset_delta=2, magic=magic)

    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord):
            decode_batch(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(body)


@pytest.mark.parametrize("body", MALFORMED_COLUMNS.values(), ids=MALFORMED_COLUMNS.keys())
def test_malformed_columns_are_corrupt_though_their_crc_is_right(body: bytes) -> None:
    batch = batch_of(body, records_count=3, last_offset_delta=2)

    validate_batch(batch, parse_header(batch))
    with pytest.raises(CorruptRecord):
        decode_batch(batch)


def varint_record(*fields: bytes, length: int | None = None) -> bytes:
    content = b"".join(fields)
    return bytes([2 * (len(content) if length is None else length)]) + content


# A good record: attributes, timestamp 0, offset 0, no key, value "v", no headers.
GOOD_RECORD = varint_record(b"\0", b"\0", b"\0", b"\1", b"\2v", b"\0")

MALFORMED_RECORDS = {
    "empty body": b"",
    "no record": bytes(3),
    "trailing bytes": GOOD_RECORD + b"\0",
    "length too short": varint_record(GOOD_RECORD[1:], length=6),
    "length too long": varint_record(GOOD_RECORD[1:], length=8) + b"\0",
    "negative length": b"\1" + GOOD_RECORD[1:],
    "value past the end": varint_record(b"\0\0\0\1", b"\x40v", b"\0"),
    "negative value length": varint_record(b"\0\0\0\1", b"\3v", b"\0"),
    "an endless integer": varint_record(b"\0", b"\x80" * 11, b"\0\0\1\1\0"),
    "a huge timestamp": varint_record(b"\0", b"\xff" * 9 + b"\1", b"\0", b"\1", b"\2v", b"\0"),
    "an offset past the last": varint_record(b"\0\0", b"\2", b"\1\2v\0"),
    "a negative offset": varint_record(b"\0\0", b"\1", b"\1\2v\0"),
    "negative headers": varint_record(b"\0\0\0\1\2v", b"\1"),
    "a header without a name": varint_record(b"\0\0\0\1\2v", b"\2", b"\1\1"),
    "headers cut short": varint_record(b"\0\0\0\1\2v", b"\x40"),
}


@pytest.mark.parametrize("body", MALFORMED_RECORDS.values(), ids=MALFORMED_RECORDS.keys())
def test_malformed_records_are_corrupt_though_their_crc_is_right(body: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_batch(batch_of(body, magic=MAGIC_RECORDS))


def test_the_good_record_that_the_malformed_ones_vary_is_good() -> None:
    assert decode_batch(batch_of(GOOD_RECORD, magic=MAGIC_RECORDS)).values == [b"v"]


def test_a_header_name_that_is_not_utf_8_is_read_by_replacement_and_can_be_restored() -> None:
    batch = batch_of(varint_record(b"\0\0\0\1\2v", b"\2", b"\4\xffn\1"), magic=MAGIC_RECORDS)
    assert decode_batch(batch).headers == [[("\ufffdn", None)]]
    restored = decode_batch(batch, to_be_encoded=True)
    assert records.with_records(restored, [0])[HEADER_SIZE:] == batch[HEADER_SIZE:]


def test_records_of_magic_2_must_increase_in_offset() -> None:
    with pytest.raises(CorruptRecord, match="increase"):
        decode_batch(batch_of(GOOD_RECORD * 2, magic=MAGIC_RECORDS, records_count=2, last_offset_delta=1))


def test_more_headers_in_a_batch_of_magic_2_than_are_read_are_corrupt() -> None:
    half = [("name", bytes(records.MAX_HEADERS_BYTES // 2))]
    batch = encode_batch([b"v"], headers=[half], base_timestamp=NOW, magic=MAGIC_RECORDS)
    body = bytes(batch[HEADER_SIZE:])

    assert decode_batch(batch).headers == [half]
    second = body.replace(b"\0\0\0\1\2v", b"\0\0\2\1\2v", 1)  # the same record at the next offset
    with pytest.raises(CorruptRecord, match="bytes of headers"):
        decode_batch(batch_of(body + second, magic=MAGIC_RECORDS, records_count=2, last_offset_delta=1))


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
def test_a_body_is_decompressed_to_the_limit_and_no_further(magic: int) -> None:
    batch = encode_batch([bytes(100_000)], base_timestamp=NOW, compression=Compression.ZSTD, magic=magic)

    assert decode_batch(batch, max_body_bytes=100_020).values == [bytes(100_000)]
    with pytest.raises(CorruptRecord, match="more than the limit of 100000"):
        decode_batch(batch, max_body_bytes=100_000)


def test_a_body_that_its_codec_did_not_write_is_corrupt() -> None:
    for codec in (Compression.GZIP, Compression.SNAPPY, Compression.LZ4, Compression.ZSTD):
        with pytest.raises(CorruptRecord):
            decode_batch(batch_of(b"not compressed at all", attributes=codec))


def test_bytes_behind_a_header_without_records_are_corrupt() -> None:
    with pytest.raises(CorruptRecord, match="no records"):
        decode_batch(batch_of(b"\xc0", records_count=0))


def test_a_base_timestamp_whose_sums_would_not_fit_64_bits_is_corrupt() -> None:
    columns = batch_of(msgpack.packb([None, [1], None, [b"v"], None]), base_timestamp=(1 << 63) - 1)
    varints = batch_of(GOOD_RECORD, magic=MAGIC_RECORDS, base_timestamp=(1 << 63) - 1)

    for batch in (columns, varints):
        with pytest.raises(CorruptRecord, match="base timestamp"):
            decode_batch(batch)


def test_the_crc_can_be_left_to_someone_who_has_checked_it() -> None:
    batch = encode_batch([b"v"], base_timestamp=NOW)
    batch[17] ^= 1

    with pytest.raises(CorruptRecord, match="CRC"):
        decode_batch(batch)
    assert decode_batch(batch, check_crc=False).values == [b"v"]


def test_a_decoded_batch_does_not_refer_to_the_buffer() -> None:
    batch = encode_batch([b"value"], headers=[[("h", b"x")]], base_timestamp=NOW)
    decoded = decode_batch(batch)

    batch.clear()  # raises BufferError while a view of it exists

    assert decoded.values == [b"value"]


# --- control batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(ControlType))
def test_a_control_batch_carries_its_marker(kind: ControlType) -> None:
    marker = EndTransactionMarker(kind, 12)
    batch = encode_control_batch(
        marker, timestamp=NOW, producer_id=3, producer_epoch=2, base_offset=8, partition_leader_epoch=1
    )
    header = parse_header(batch)

    validate_batch(batch, header)
    assert (header.is_control, header.is_transactional, header.magic) == (True, True, MAGIC_RECORDS)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (3, 2, NO_SEQUENCE)
    assert (header.base_offset, header.next_offset, header.max_timestamp) == (8, 9, NOW)
    assert decode_control_batch(batch, header) == marker
    decoded = decode_batch(batch)
    assert decoded.keys == [struct.pack(">hh", 0, kind)]
    assert decoded.values == [struct.pack(">hi", 0, 12)]
    decided = marker._replace(decision=1 << 40)
    batch = encode_control_batch(decided, timestamp=NOW, producer_id=3, producer_epoch=2)
    assert decode_control_batch(batch) == decided
    assert decode_batch(batch).values == [struct.pack(">hiq", 0, 12, 1 << 40)], "Kafka's clients skip the last field"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"\0\0\0\7", bytes(6)),
        (b"\0\0\0", bytes(6)),
        (b"\0\0\0\1", bytes(5)),
        (None, bytes(6)),
        (b"\0\0\0\1", None),
    ],
    ids=["unknown type", "short key", "short value", "no key", "no value"],
)
def test_a_control_batch_with_anything_else_is_corrupt(key: bytes | None, value: bytes | None) -> None:
    batch = encode_batch([value], keys=[key], base_timestamp=NOW, magic=MAGIC_RECORDS)
    body = bytes(batch[HEADER_SIZE:])

    with pytest.raises(CorruptRecord):
        decode_control_batch(batch_of(body, magic=MAGIC_RECORDS, attributes=0x30))


def test_a_data_batch_is_not_a_control_batch() -> None:
    with pytest.raises(CorruptRecord, match="not a control batch"):
        decode_control_batch(encode_batch([bytes(6)], keys=[b"\0\0\0\1"], base_timestamp=NOW))


@pytest.mark.parametrize("module", sorted(Path(records.__file__).parent.glob("*.py")), ids=lambda module: module.stem)
def test_the_module_is_pure(module: Path) -> None:
    tree = ast.parse(module.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }

    assert not imported & {"asyncio", "time", "os", "random", "threading"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"timestamps": [1]}, ValueError),
        ({"timestamps": [1, 2], "base_timestamp": 1}, ValueError),
        ({"timestamps": [1.0, 2.0]}, TypeError),
        ({"timestamps": [1, None]}, TypeError),
        ({"timestamps": [0, 1 << 63]}, ValueError),
        ({}, TypeError),
    ],
)
def test_timestamps_that_no_reader_would_take_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        encode_batch([b"a", b"b"], **arguments)


@pytest.mark.parametrize(
    ("places", "well", "trouble"),
    [
        ([(4, 0), (6, 0), (9, 2)], 3, None),
        ([(3, 0), (5, 0)], 2, None),  # the first holds offset 4
        ([(4, -1), (6, 0)], 2, None),
        ([(1, 0)], 0, "the offsets 1 to 2 comes at 4"),
        ([(4, 0), (5, 0)], 1, "the offsets 5 to 6 comes at 6"),
        ([(4, 0), (20, 0)], 1, "a batch begins at 20, where 20 is the end"),
        ([(4, 2), (6, 1)], 1, "the batch at 6 has leader epoch 1, behind 2"),
        ([(4, 0), (6, 3)], 1, "the batch at 6 has leader epoch 3, where 2 is the latest"),
        ([], 0, "0 bytes hold no whole batch"),
    ],
)
def test_batches_count_up_to_the_first_that_cannot_be_where_it_says(
    places: list[tuple[int, int]], well: int, trouble: str | None
) -> None:
    """Batches of two records each, fetched at offset 4 from a leader in epoch 2."""
    sent = bytearray()
    for offset, epoch in places:
        one = encode_batch([b"a", b"b"], base_timestamp=1, magic=MAGIC_RECORDS)
        header = parse_header(one)
        sent += stamp(header, offset, epoch) + one[CRC_END:]
    placed, error = placed_batches(sent, 4, 20, 2)
    assert [(each.header.base_offset, each.header.partition_leader_epoch) for each in placed] == places[:well]
    assert (error is None) == (trouble is None)
    assert trouble is None or trouble in str(error)


def test_epochs_do_not_go_down_from_what_was_read_before() -> None:
    one = encode_batch([b"a"], base_timestamp=1, magic=MAGIC_RECORDS)
    sent = stamp(parse_header(one), 4, 1) + one[CRC_END:]
    assert placed_batches(sent, 4, 20, 2, 1)[1] is None
    assert str(placed_batches(sent, 4, 20, 2, 2)[1]) == "the batch at 4 has leader epoch 1, behind 2"


# -- the number of records that a header claims --


def claiming(batch: bytes | bytearray, count: int) -> bytes:
    header = parse_header(batch)
    made = bytearray(HEADER_SIZE) + batch[HEADER_SIZE:]
    return bytes(write_header(made, msgspec.structs.replace(header, records_count=count, last_offset_delta=count - 1)))


def counted(batch: bytes) -> bool:
    """Return whether the batch claims much. Raises CorruptRecord if it claims more than it has."""
    header = parse_header(batch)
    much = claims_much(header.magic, header.attributes, header.size, header.records_count)
    if much:
        check_count(batch, header)
    return much


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("magic", [MAGIC_RECORDS, MAGIC_COLUMNS])
def test_a_small_batch_cannot_claim_a_million_records(magic: int, compression: Compression) -> None:
    """Consumers would stop at it."""
    batch = encode_batch([b"v"] * 3, base_timestamp=0, magic=magic, compression=compression)
    for claimed in (1 << 20, len(batch)):
        with pytest.raises(CorruptRecord):
            counted(claiming(batch, claimed))
    garbage = bytearray(HEADER_SIZE) + b"\xff" * 8
    header = msgspec.structs.replace(parse_header(batch), records_count=1 << 20, last_offset_delta=(1 << 20) - 1)
    with pytest.raises(CorruptRecord):
        counted(bytes(write_header(garbage, header)))


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("magic", [MAGIC_RECORDS, MAGIC_COLUMNS])
def test_equal_records_may_take_less_than_a_byte_each(magic: int, compression: Compression) -> None:
    for count in (1, 20_000):
        batch = encode_batch(
            [b"value"] * count, keys=[b""] * count, base_timestamp=0, magic=magic, compression=compression
        )
        is_squeezed = count > len(batch) - HEADER_SIZE
        assert counted(bytes(batch)) == is_squeezed
        assert decode_batch(batch).count == count


@pytest.mark.parametrize(
    "columns",
    [
        ([0], None, None, [b"v"], None),
        (None, [0, 1], None, [b"v"], None),
        (None, None, [b"k", b"k"], [b"v"], None),
        (None, None, None, [b"v"], [None, None]),
        (None, None, None, [7], None),
        (None, None, None, [b"v"], None, None),
    ],
)
def test_columns_said_once_for_many_records_are_as_readers_accept_them(columns: tuple[Any, ...]) -> None:
    count = 1_000
    fine = bytearray(HEADER_SIZE) + msgspec.msgpack.encode((None, [5], [b"k"], [b"v"], [[("h", b"1")]]))
    header = parse_header(encode_batch([b"v"], base_timestamp=0))
    header = msgspec.structs.replace(header, records_count=count, last_offset_delta=count - 1)
    assert counted(bytes(write_header(fine, header)))
    assert decode_batch(fine).count == count
    wrong = bytes(write_header(bytearray(HEADER_SIZE) + msgspec.msgpack.encode(columns), header))
    for read in (counted, decode_batch):
        with pytest.raises(CorruptRecord):
            read(wrong)
