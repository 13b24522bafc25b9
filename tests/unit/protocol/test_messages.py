"""Every message: round trip through the envelope, bounds, growth at the tail."""

import struct
from typing import Any

import msgspec
import pytest

from minibroker.protocol import messages as m
from minibroker.protocol.apis import (
    APIS,
    FETCH,
    METADATA,
    PRODUCE,
    Api,
    decode_request,
    decode_request_envelope,
    decode_response,
    decode_response_envelope,
    encode_error,
    encode_request,
    encode_response,
)
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, error_of


def example(kind: Any) -> Any:
    """A value of a field's type, with one element in every list."""
    info = msgspec.inspect.type_info(kind)
    return _example(info)


def _example(info: Any) -> Any:
    match info:
        case msgspec.inspect.StructType():
            return info.cls(**{f.name: _example(f.type) for f in info.fields})
        case msgspec.inspect.ListType():
            return [_example(info.item_type)]
        case msgspec.inspect.UnionType():
            return _example(next(t for t in info.types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.IntType():
            return 7
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.BytesType():
            return b"b" * (info.min_length or 5)
        case msgspec.inspect.MemoryViewType():
            return memoryview(b"records")
    raise AssertionError(f"no example for {info}")


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_request_and_response_reads_back(api: Api[Any, Any]) -> None:
    request, response = example(api.request), example(api.response)
    envelope = decode_request_envelope(encode_request(api, 5, "me", request)[4:])
    assert (envelope.api_key, envelope.correlation_id, envelope.client_id) == (api.key, 5, "me")
    assert decode_request(api, envelope) == request
    answer = decode_response_envelope(encode_response(5, response)[4:])
    assert answer.correlation_id == 5
    assert decode_response(api, answer) == response


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_a_frame_begins_with_its_length(api: Api[Any, Any]) -> None:
    frame = encode_request(api, 1, None, example(api.request))
    assert struct.unpack(">i", frame[:4]) == (len(frame) - 4,)


def test_unknown_trailing_fields_are_ignored_and_missing_ones_take_their_default() -> None:
    encode = msgspec.msgpack.encode
    longer = encode([None, 1, 100, [], True, "from a newer version"])
    assert msgspec.msgpack.decode(longer, type=m.ProduceRequest).acks == 1
    shorter = encode([-1, 0, 1, 100, 0, []])
    assert msgspec.msgpack.decode(shorter, type=m.FetchRequest).replica_epoch == -1


@pytest.mark.parametrize(
    "body",
    [
        [None, 2**15, 100, []],
        [None, 1, 2**31, []],
        [None, 1, 100, "topics"],
        [None, "1", 100, []],
        ["x" * 32_768, 1, 100, []],
        [None, 1, 100, [["t", [[0, "not bytes"]]]]],
        [],
        {"acks": 1},
    ],
)
def test_a_field_out_of_its_bounds_or_type_is_refused(body: Any) -> None:
    frame = msgspec.msgpack.encode([0, 0, 1, None, body])
    with pytest.raises(InvalidMessage, match="Produce"):
        decode_request(PRODUCE, decode_request_envelope(frame))


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x95", b"\x90", b"\xdd\xff\xff\xff\xff", b"GET / HTTP/1.1", b"\x91" * 5_000]
)
def test_bytes_that_are_no_envelope_are_refused(frame: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_request_envelope(frame)
    with pytest.raises(InvalidMessage):
        decode_response_envelope(frame)


def test_a_list_that_is_longer_than_it_may_be_is_refused() -> None:
    body = b"\x91\xdd" + struct.pack(">I", m.MAX_TOPICS + 1) + b"\xa0" * (m.MAX_TOPICS + 1)
    frame = msgspec.msgpack.encode([METADATA.key, 0, 1, None, msgspec.Raw(body)])
    with pytest.raises(InvalidMessage, match="length"):
        decode_request(METADATA, decode_request_envelope(frame))


def test_records_are_a_view_of_the_frame_not_a_copy() -> None:
    request = m.ProduceRequest(None, -1, 100, [m.ProduceTopic("t", [m.ProducePartition(0, memoryview(b"x" * 100))])])
    frame = encode_request(PRODUCE, 1, None, request)[4:]
    decoded = decode_request(PRODUCE, decode_request_envelope(frame))
    records = decoded.topic_data[0].partition_data[0].records
    frame[frame.rindex(b"x")] = ord("y")
    assert bytes(records[-1:]) == b"y"


def test_an_error_answer_raises_the_brokers_error_with_its_sentence() -> None:
    envelope = decode_response_envelope(encode_error(9, ErrorCode.UNSUPPORTED_VERSION, "version 9")[4:])
    assert envelope.correlation_id == 9
    with pytest.raises(BrokerError, match="version 9") as caught:
        decode_response(FETCH, envelope)
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_the_remedy_is_a_sentence_of_its_own_whatever_the_detail_ends_with() -> None:
    for detail, said in (("late", "late. "), ("late.", "late. "), ("is ZooKeeper away?", "is ZooKeeper away? ")):
        assert f"{said}`minibroker status` shows" in str(BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail))


def test_a_broken_rule_or_a_missing_right_that_is_named_needs_no_other_remedy() -> None:
    assert str(BrokerError(ErrorCode.INVALID_REQUEST, "it must be greater than 0")).endswith("greater than 0")
    allow = "allow it with `minibroker acls add --allow-principal User:a --operation Describe --cluster`"
    assert str(BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, allow)).endswith("--cluster`")
    assert "acls list --group" in str(BrokerError(ErrorCode.GROUP_AUTHORIZATION_FAILED, "group a"))


def test_every_error_has_a_row_and_every_failure_a_remedy() -> None:
    assert set(ERRORS) == set(ErrorCode)
    assert all(info.remedy for code, info in ERRORS.items() if code is not ErrorCode.NONE)


def test_a_code_from_the_future_is_an_unknown_server_error() -> None:
    assert error_of(32_000) is ErrorCode.UNKNOWN_SERVER_ERROR
