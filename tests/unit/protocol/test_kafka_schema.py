"""Our declarations of Kafka's protocol: against Kafka's own schemas, and encoded and decoded in every version."""

from __future__ import annotations

import contextlib
import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.protocol import messages as m
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.kafka import apis as kafka
from minibroker.protocol.kafka.data import FETCH
from minibroker.protocol.kafka.primitives import MAX_ELEMENTS, MessageReader, write_unsigned_varint
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema
from minibroker.protocol.kafka.types import INT32, INT64, RECORDS, STRING, Array
from tests.kafka_messages import (
    THEIRS,
    in_words,
    oldest_of,
    random_struct,
    smallest_of,
    smallest_struct,
    theirs_in_words,
    without_tags_beside,
)

ROWS = [
    pytest.param(api, kind, version, id=f"{api.name}-{kind}-{version}")
    for api in kafka.KAFKA_APIS.values()
    for kind in ("request", "response")
    for version in range(api.advertised_from, api.max_version + 1)
]


def schema_of(api: KafkaApi, kind: str) -> Schema:
    return api.request if kind == "request" else api.response


def names_of(schema: Schema) -> tuple[str, ...]:
    return () if schema.cls is None else schema.cls.__struct_fields__


def encoded(schema: Schema, value: object, version: int, flexible: bool) -> bytes:
    out = bytearray()
    schema.compiled(version, flexible).encode(out, value)
    return bytes(out)


@pytest.mark.parametrize(("api", "kind", "version"), ROWS)
def test_a_message_has_the_fields_that_kafkas_schema_says(api: KafkaApi, kind: str, version: int) -> None:
    theirs = THEIRS[api.key, kind]
    if version >= oldest_of(theirs):  # versions that Kafka 4 dropped follow our own records
        ours = in_words(schema_of(api, kind), version)
        assert ours == without_tags_beside(theirs_in_words(theirs._json["fields"], version), ours)
    assert theirs.flexible_version_q(version) == api.is_flexible(version)


@pytest.mark.parametrize(("api", "kind", "version"), ROWS)
def test_a_message_comes_back_as_it_went(api: KafkaApi, kind: str, version: int) -> None:
    schema, flexible = schema_of(api, kind), api.is_flexible(version)
    codec = schema.compiled(version, flexible)
    for seed in range(10):
        value = random_struct(Random(seed), schema, version)
        data = encoded(schema, value, version, flexible)
        reader = MessageReader(data)
        assert codec.decode(reader) == value
        reader.check_end()


@given(
    sizes=st.lists(st.sampled_from([0, 1, 16_383, 16_384, 40_000]), max_size=6), version=st.sampled_from([4, 11, 12])
)
def test_a_frame_in_pieces_is_the_frame_and_large_records_in_it_are_not_copied(sizes: list[int], version: int) -> None:
    records = [bytes([index]) * size for index, size in enumerate(sizes)]
    partitions = [m.FetchPartitionResponse(index, 0, records=memoryview(each)) for index, each in enumerate(records)]
    answer = m.FetchResponse(0, 0, [m.FetchTopicResponse("orders", partitions)])
    frame, whole = kafka.begin_response(FETCH, version, 7), bytearray(kafka.begin_response(FETCH, version, 7))
    for out in (frame, whole):
        FETCH.write_response(out, answer, version)
    whole[:4] = (len(whole) - 4).to_bytes(4, "big")
    pieces = frame.pieces()
    assert b"".join(pieces) == whole
    large = [each for each in records if len(each) >= 16_384]
    assert [piece.obj for piece in pieces if isinstance(piece, memoryview) and isinstance(piece.obj, bytes)] == large


@pytest.mark.parametrize(("api", "kind", "version"), ROWS)
def test_kafka_python_reads_what_we_write_and_writes_the_same(api: KafkaApi, kind: str, version: int) -> None:
    theirs, schema, flexible = THEIRS[api.key, kind], schema_of(api, kind), api.is_flexible(version)
    for seed in range(5) if version >= api.min_version else ():
        value = random_struct(Random(seed), schema, version)
        if isinstance(value, m.ApiVersionsResponse):
            value.error_code = 0  # an error is sent in version 0
        data = encoded(schema, value, version, flexible)
        message = theirs.decode(data, version=version)
        message._header = None
        assert bytes(message.encode(version=version)) == data


@pytest.mark.slow
@pytest.mark.parametrize(("api", "kind", "version"), ROWS)
@settings(max_examples=5, deadline=None)  # of each of 398; `tests/faults/hostile/kafka.py` has 200,000
@given(data=st.data())
def test_a_damaged_message_is_refused_or_read_and_takes_no_more_than_its_bytes(
    api: KafkaApi, kind: str, version: int, data: st.DataObject
) -> None:
    schema, flexible = schema_of(api, kind), api.is_flexible(version)
    frame = bytearray(encoded(schema, random_struct(Random(1), schema, version), version, flexible))
    for _ in range(data.draw(st.integers(1, 3))):
        if frame:
            position = data.draw(st.integers(0, len(frame) - 1))
            frame[position] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    with contextlib.suppress(InvalidMessage):
        schema.compiled(version, flexible).decode(MessageReader(bytes(frame)))


@pytest.mark.slow
@pytest.mark.parametrize(("api", "version"), {(api, api.max_version): None for api in kafka.KAFKA_APIS.values()})
def test_as_many_smallest_elements_as_a_request_may_have_take_bounded_memory(api: KafkaApi, version: int) -> None:
    """A MiB of such bytes. An element is an object of some 60 bytes, and its place in a list."""
    for field in api.request.fields:
        if (
            not isinstance(field.type, Array)
            or version not in field.versions
            or field.name not in names_of(api.request)
        ):
            continue
        wire = smallest_struct(api.request, version)
        count = min(MAX_ELEMENTS, api.request._bounds[field.name].max_length)
        setattr(wire, field.name, [smallest_of(field.type.of, version)] * count)
        data = encoded(api.request, wire, version, api.is_flexible(version))[:MAX_SMALL_REQUEST_BYTES]
        tracemalloc.start()
        with contextlib.suppress(InvalidMessage):
            api.read_request(MessageReader(data), version)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 32 * 1024 * 1024, f"{field.name}: {count} elements in {len(data)} bytes took {peak} bytes"


NAMES = Schema(None, Field("names", Array(STRING)))


@pytest.mark.parametrize("count", [2**31 - 1, 1_000_000, -2])
@pytest.mark.parametrize("flexible", [False, True])
def test_an_array_that_claims_more_than_is_left_is_refused_before_memory_is_taken(count: int, flexible: bool) -> None:
    out = bytearray()
    if flexible:
        write_unsigned_varint(out, (count + 1) % 2**32)
    else:
        out += count.to_bytes(4, "big", signed=True)
    with pytest.raises(InvalidMessage, match="left|length"):
        NAMES.compiled(0, flexible).decode(MessageReader(bytes(out + bytes(1_000))))


def test_all_arrays_of_a_message_together_have_a_bound() -> None:
    nested = Schema(None, Field("outer", Array(Schema(None, Field("inner", Array(STRING))))))
    inner = (1_000).to_bytes(4, "big") + bytes(2_000)
    data = (MAX_ELEMENTS // 1_000 + 1).to_bytes(4, "big") + inner * (MAX_ELEMENTS // 1_000 + 1)
    with pytest.raises(InvalidMessage, match="name fewer"):
        nested.compiled(0, False).decode(MessageReader(data))


def test_our_structs_say_how_long_things_may_be() -> None:
    schema = Schema(
        m.MetadataBroker,
        Field("node_id", INT32),
        Field("host", STRING),
        Field("port", INT32),
        Field("rack", STRING, nullable="0+"),
    )
    fine = encoded(schema, m.MetadataBroker(1, "host", 9092, "r" * 249), 0, False)
    assert schema.compiled(0, False).decode(MessageReader(fine)).rack == "r" * 249
    with pytest.raises(InvalidMessage, match="250 characters; 249 are allowed"):
        schema.compiled(0, False).decode(
            MessageReader(encoded(schema, m.MetadataBroker(1, "host", 9092, "r" * 250), 0, False))
        )


def test_unknown_tagged_fields_are_skipped_and_known_ones_must_fill_their_size() -> None:
    schema = Schema(m.EpochEndOffset, Field("epoch", INT32), Field("end_offset", INT64, tag=1, default=-1))
    assert encoded(schema, m.EpochEndOffset(7), 0, True) == b"\0\0\0\x07\0"
    assert encoded(schema, m.EpochEndOffset(7, 8), 0, True) == b"\0\0\0\x07\x01\x01\x08" + bytes(7) + b"\x08"
    codec = schema.compiled(0, True)
    with_unknown = b"\0\0\0\x07\x03\0\x01?\x01\x08" + bytes(7) + b"\x08" + b"\x63\x02??"
    assert codec.decode(MessageReader(with_unknown)) == m.EpochEndOffset(7, 8)
    with pytest.raises(InvalidMessage, match="tagged field 1 has 9 bytes"):
        codec.decode(MessageReader(b"\0\0\0\x07\x01\x01\x09" + bytes(9)))
    with pytest.raises(InvalidMessage, match="65 tagged fields; 64 are allowed"):
        codec.decode(MessageReader(b"\0\0\0\x07\x41" + bytes(200)))


def test_records_are_not_copied() -> None:
    frame = bytearray(b"\0\0\0\x07" + b"\0\0\0\x03abc")
    schema = Schema(m.ProducePartition, Field("index", INT32), Field("records", RECORDS))
    partition = schema.compiled(0, False).decode(MessageReader(memoryview(frame)))
    assert partition == m.ProducePartition(7, memoryview(b"abc"))
    frame[-1:] = b"d"
    assert partition.records == b"abd"
