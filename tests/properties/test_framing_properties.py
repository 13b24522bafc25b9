import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.connections.framing import FrameReader, response_limit


@pytest.mark.slow
@given(st.lists(st.binary(max_size=300) | st.integers(65_000, 70_000).map(bytes), max_size=6), st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack(">i", len(p)) + p for p in payloads)
    reader = FrameReader(response_limit(1_000_000))
    frames: list[bytes] = []
    position = 0
    while position < len(stream):
        buffer = reader.get_buffer()
        most = min(len(buffer), len(stream) - position)
        size = data.draw(st.integers(1, most)) if most < 400 else data.draw(st.sampled_from([1, most // 2, most]))
        buffer[:size] = stream[position : position + size]
        frames.extend(bytes(f) for f in reader.buffer_updated(size))
        position += size
    assert frames == payloads
