import itertools
import resource
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.connections.framing import (
    MAX_SMALL_REQUEST_BYTES,
    FrameReader,
    FrameTooLarge,
    api_key_of,
    request_limit,
    response_limit,
)

LARGE = 200_000


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def feed(reader: FrameReader, data: bytes, piece: int) -> list[bytes]:
    """Hand `data` to the reader as a transport would, at most `piece` bytes at a time."""
    frames: list[bytes] = []
    position = 0
    while position < len(data):
        buffer = reader.get_buffer()
        size = min(piece, len(buffer), len(data) - position)
        assert size > 0
        buffer[:size] = data[position : position + size]
        position += size
        frames.extend(bytes(f) for f in reader.buffer_updated(size))
    return frames


@pytest.mark.parametrize("piece", [1, 3, 4, 5, 17, 65_536, 10_000_000])
def test_frames_come_out_whole_and_in_order_however_the_bytes_arrive(piece: int) -> None:
    payloads = [b"", b"a", b"bc" * 20_000, bytes(range(256)) * 800, b"tail"]
    if piece < 17:
        payloads[2:4] = [b"x" * 70_000]
    reader = FrameReader(response_limit(10_000_000))
    assert feed(reader, b"".join(map(frame, payloads)), piece) == payloads
    assert not reader.in_frame


def test_a_reader_that_is_full_takes_what_comes_nevertheless() -> None:
    reader = FrameReader(response_limit(LARGE), most_at_once=2)
    payloads = [b"%d" % number * 20 for number in range(20_000)]
    cut = feed(reader, b"".join(map(frame, payloads)), 65_536)
    assert len(cut) == 2
    assert reader.is_full
    while reader.has_more:
        more = reader.cut()
        assert 1 <= len(more) <= 2
        cut += [bytes(each) for each in more]
    assert cut == payloads
    assert not reader.in_frame


SIZES = st.one_of(st.integers(0, 60), st.integers(65_520, 65_560), st.integers(61, 150_000))


@given(
    sizes=st.lists(st.tuples(SIZES, st.integers(1, 2_000)), max_size=6),
    reads=st.lists(st.integers(1, 300_000), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    waits=st.booleans(),
)
def test_frames_of_any_size_come_out_whole_if_a_few_are_cut_at_a_time(
    sizes: list[tuple[int, int]], reads: list[int], cuts: list[int], waits: bool
) -> None:
    """`waits`: nothing is read while the reader is full."""
    payloads = [b"%d" % size * (size // 6) for size, times in sizes for _ in range(times if size < 61 else 1)]
    data, found, position = b"".join(map(frame, payloads)), list[bytes](), 0
    reader = FrameReader(response_limit(LARGE), most_at_once=16)
    for read, cut in zip(itertools.cycle(reads), itertools.cycle(cuts), strict=False):
        if position < len(data) and not (waits and reader.is_full):
            buffer = reader.get_buffer()
            size = min(read, len(buffer), len(data) - position)
            assert size > 0
            buffer[:size] = data[position : position + size]
            position += size
            found += map(bytes, reader.buffer_updated(size))
        elif not reader.has_more:
            break
        for _ in range(max(cut, position == len(data) or (waits and reader.is_full))):
            if reader.has_more:
                found += map(bytes, reader.cut())
    assert found == payloads
    assert not reader.in_frame
    assert not waits or len(reader._small) <= 65_536


def test_a_buffer_that_was_enlarged_shrinks_again() -> None:
    reader = FrameReader(response_limit(LARGE), most_at_once=2)
    feed(reader, frame(b"x" * 20) * 20_000, 65_536)
    assert len(reader._small) > 65_536
    while reader.has_more:
        reader.cut()
    assert len(reader._small) == 65_536


def test_a_part_of_a_frame_is_seen_as_such() -> None:
    reader = FrameReader(response_limit(LARGE))
    assert feed(reader, frame(b"abc")[:-1], 100) == []
    assert reader.in_frame
    assert feed(reader, b"c", 100) == [b"abc"]
    assert not reader.in_frame


@pytest.mark.parametrize("length", [-1, -(2**31)])
def test_a_negative_length_is_refused(length: int) -> None:
    with pytest.raises(FrameTooLarge, match=str(length)):
        feed(FrameReader(response_limit(100)), struct.pack(">i", length), 4)


def test_a_length_over_the_limit_is_refused_before_memory_is_taken() -> None:
    reader = FrameReader(response_limit(LARGE))
    with pytest.raises(FrameTooLarge, match="2147483647"):
        feed(reader, struct.pack(">i", 2**31 - 1) + b"12345678", 12)


def test_memory_follows_the_bytes_that_arrived_not_those_announced() -> None:
    before = resident_bytes()
    reader = FrameReader(response_limit(2**31))
    feed(reader, struct.pack(">i", 2**30) + b"12345678", 12)
    assert resident_bytes() < before + 16 * 2**20
    arrived = bytes(32 * 2**20)
    reader.get_buffer()[: len(arrived)] = arrived
    assert reader.buffer_updated(len(arrived)) == []
    assert before + 32 * 2**20 <= resident_bytes() < before + 96 * 2**20


def resident_bytes() -> int:
    """The memory that this process takes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_large_frame_keeps_its_bytes_while_later_frames_arrive() -> None:
    reader = FrameReader(response_limit(10_000_000))
    payload = bytes(range(256)) * 1_000
    kept: list[bytes | memoryview] = []
    for data in (frame(payload), frame(b"y" * 60_000), frame(b"z" * 300_000)):
        position = 0
        while position < len(data):
            buffer = reader.get_buffer()
            size = min(len(buffer), len(data) - position)
            buffer[:size] = data[position : position + size]
            position += size
            kept.extend(reader.buffer_updated(size))
    assert [bytes(f) for f in kept] == [payload, b"y" * 60_000, b"z" * 300_000]


def test_only_requests_that_carry_records_may_be_large() -> None:
    limit_of = request_limit(100_000_000, frozenset({0}))
    produce, metadata = bytes([0x95, 0, 0, 1, 0xC0, 0x91, 0, 0]), bytes([0x95, 3, 0, 1, 0xC0, 0x91, 0, 0])
    assert limit_of(produce) == 100_000_000
    assert limit_of(metadata) == MAX_SMALL_REQUEST_BYTES
    assert limit_of(b"GET / HT") == MAX_SMALL_REQUEST_BYTES


def test_the_api_key_is_read_from_an_envelope_alone() -> None:
    assert api_key_of(bytes([0x95, 18, 0])) == 18
    assert api_key_of(b"GET /") is None
    assert api_key_of(b"\x95") is None
