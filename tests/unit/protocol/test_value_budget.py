"""The values of a frame are counted before any of them is decoded."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import Any

import msgspec
import pytest

from minibroker.broker.network.dialect import BadInput, Undecoded
from minibroker.broker.network.native_dialect import MAX_UNPROVED_BYTES, NativeDialect, NativeListener
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.value_budget import check_values
from minibroker.protocol.errors import InvalidMessage

MEBIBYTE = 1 << 20


def values_in(value: Any) -> int:
    if isinstance(value, list):
        return len(value) + sum(map(values_in, value))
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(values_in, value.keys())) + sum(map(values_in, value.values()))
    return 0


def any_value(random: Random, depth: int) -> Any:
    if depth and random.random() < 0.5:
        size = random.choice((0, 1, 5, 15, 16, 40))
        if random.random() < 0.3:
            return {random.choice((number, f"key {number}")): any_value(random, depth - 1) for number in range(size)}
        return [any_value(random, depth - 1) for _ in range(size)]
    scalars = (None, True, 0, -1, 127, 128, -33, 2**15, 2**31, 2**63, -(2**63), 1.5, msgspec.msgpack.Ext(1, b"x" * 3))
    sizes = (0, 31, 32, 255, 256, 65_536)
    return random.choice((random.choice(scalars), "s" * random.choice(sizes), b"b" * random.choice(sizes)))


@pytest.mark.parametrize("seed", range(60))
def test_the_values_of_any_frame_are_counted(seed: int) -> None:
    value = any_value(Random(seed), 4)
    frame, count = msgspec.msgpack.encode(value), values_in(value)
    check_values(frame, count, "things")
    if count:
        with pytest.raises(InvalidMessage, match=f"more than {count - 1} values.*fewer things"):
            check_values(frame, count - 1, "things")


@pytest.mark.parametrize("size", [1, 16, 256, 4 + 16])
@pytest.mark.parametrize("code", [0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)])
def test_extensions_are_skipped(size: int, code: int) -> None:
    fixed = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
    width = {0xC7: 1, 0xC8: 2, 0xC9: 4}.get(code, 0)
    length = fixed.get(code, min(size, 255))
    extension = bytes([code]) + (length.to_bytes(width, "big") if width else b"") + b"\x01" + b"\x9f" * length
    check_values(b"\x92" + extension + b"\x90", 2, "things")


def dialect(plane: apis.Plane = apis.Plane.DATA, *, proved: bool = False) -> NativeDialect:
    listener = NativeListener("ANY", plane, 100 * MEBIBYTE, requires_proof=plane is apis.Plane.CONTROL)
    return NativeDialect(listener, lambda: proved)


def test_a_produce_of_tiny_elements_is_refused_before_it_takes_memory() -> None:
    partitions = b"\xdd" + (100_000).to_bytes(4, "big") + b"\x92\x00\xc4\x00" * 100_000
    topics = b"\xdc" + (60).to_bytes(2, "big") + (b"\x92\xa1x" + partitions) * 60
    frame = memoryview(b"\x95\x00\x00\x07\xc0\x94\xc0\x01\x00" + topics)
    assert len(frame) > 24_000_000
    tracemalloc.start()
    try:
        undecoded = dialect().decode(frame)[2]
        assert isinstance(undecoded, Undecoded)
        with pytest.raises(BadInput, match="name fewer partitions") as caught:
            undecoded.decode()
        assert tracemalloc.get_traced_memory()[1] < MEBIBYTE
    finally:
        tracemalloc.stop()
    assert caught.value.answer is not None


def test_a_produce_with_many_batches_is_decoded() -> None:
    count = 10_000
    batch = memoryview(b"b" * 70)
    topics = [m.ProduceTopic(f"topic-{number}", [m.ProducePartition(0, batch)]) for number in range(count)]
    frame = apis.encode_request(apis.PRODUCE, 1, "client", m.ProduceRequest(None, -1, 1, topics))[4:]
    _, envelope, undecoded = dialect().decode(memoryview(frame))
    assert (envelope.api_key, envelope.correlation_id, envelope.client_id) == (apis.PRODUCE.key, 1, "client")
    assert isinstance(undecoded, Undecoded)
    body = undecoded.decode()
    assert isinstance(body, m.ProduceRequest)
    assert len(body.topic_data) == count


def test_large_batches_of_few_partitions_are_decoded_at_once() -> None:
    topics = [m.ProduceTopic("topic", [m.ProducePartition(number, memoryview(bytes(100_000))) for number in range(5)])]
    frame = apis.encode_request(apis.PRODUCE, 1, None, m.ProduceRequest(None, -1, 1, topics))[4:]
    for peer in (dialect(), dialect(proved=True)):
        assert isinstance(peer.decode(memoryview(frame))[2], m.ProduceRequest)


def test_brokers_do_not_take_turns_with_strangers() -> None:
    wanted = [m.FetchTopic("topic", "", [m.FetchPartition(number, 1, 2, 3, 4, 5) for number in range(10_000)])]
    frame = apis.encode_request(apis.FETCH, 1, None, m.FetchRequest(2, 0, 1, 1, 0, wanted))[4:]
    assert isinstance(dialect().decode(memoryview(frame))[2], Undecoded)
    assert isinstance(dialect(proved=True).decode(memoryview(frame))[2], m.FetchRequest)


def test_nothing_large_is_read_from_a_connection_that_has_not_proved_itself() -> None:
    announced = (MAX_UNPROVED_BYTES + 1).to_bytes(4, "big") + b"\x95\x04\x00\x07\xc0\x90\x90\x90"
    for proved in (True, False):
        reader = dialect(apis.Plane.CONTROL, proved=proved)
        reader.get_buffer()[: len(announced)] = announced
        if proved:
            assert reader.received(len(announced)) == []
            continue
        with pytest.raises(BadInput, match="a broker proves who it is before it sends more") as caught:
            reader.received(len(announced))
        assert caught.value.answer is not None
