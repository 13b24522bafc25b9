"""Lines or bytes from a file or standard input as they arrive, without blocking the event loop.

Pipes and terminals are awaited with the loop's reader and then read once, which cannot block. They are not made
non-blocking, because that would affect the terminal itself, which may also be standard output. Regular files are always
readable and cannot be awaited.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator

from minibroker.protocol.errors import MinibrokerError

CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Yield lists of whole lines without their newline; the last line may lack one.

    Raises MinibrokerError for a line longer than MAX_LINE_BYTES, and as `read_chunks`."""
    rest = b""
    number = 0
    async for data in read_chunks(descriptor):
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        number += len(lines)
        if lines:
            yield lines
        if len(rest) > MAX_LINE_BYTES:
            raise MinibrokerError(f"line {number + 1} is longer than {MAX_LINE_BYTES} bytes, which no broker accepts")
    if rest:
        yield [rest]


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the available bytes, at most CHUNK_BYTES at a time, until the end. Raises MinibrokerError for unreadable
    input, such as a directory."""
    must_wait = not _is_always_readable(descriptor)
    while True:
        if must_wait:
            await _readable(descriptor)
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except OSError as error:
            raise MinibrokerError(f"the input cannot be read: {error.strerror}") from error
        if not data:
            return
        yield data


def _is_always_readable(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor))


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
