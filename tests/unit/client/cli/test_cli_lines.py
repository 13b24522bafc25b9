from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from minibroker.client.cli.records.lines import MAX_LINE_BYTES, read_lines
from minibroker.protocol.errors import MinibrokerError


async def collected(descriptor: int) -> list[bytes]:
    return [line async for lines in read_lines(descriptor) for line in lines]


def lines_of_file(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return asyncio.run(collected(file.fileno()))


def test_the_lines_of_a_file_come_without_their_newlines(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"one\n\nthree\r\nlast")
    assert lines_of_file(path) == [b"one", b"", b"three\r", b"last"]


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.touch()
    assert lines_of_file(path) == []
    assert lines_of_file(Path(os.devnull)) == []


def test_lines_that_span_several_reads_come_whole(tmp_path: Path) -> None:
    path = tmp_path / "input"
    expected = [b"%d" % number * 100_000 for number in range(10)]
    path.write_bytes(b"\n".join(expected) + b"\n")
    assert lines_of_file(path) == expected


def test_a_line_that_no_broker_would_take_is_an_error_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"short\n" + b"x" * (MAX_LINE_BYTES + 1_000_000))
    with pytest.raises(MinibrokerError, match="line 2 is longer than 16777216 bytes"):
        lines_of_file(path)


def test_a_line_in_a_pipe_arrives_before_the_next_one_is_written() -> None:
    reading, writing = os.pipe()
    arrived = threading.Event()

    def write() -> None:
        os.write(writing, b"first\nsec")
        assert arrived.wait(60)
        os.write(writing, b"ond\n")
        os.close(writing)

    async def read() -> list[bytes]:
        lines: list[bytes] = []
        async for more in read_lines(reading):
            lines += more
            arrived.set()
        return lines

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert asyncio.run(read()) == [b"first", b"second"]
    finally:
        writer.join()
        os.close(reading)
