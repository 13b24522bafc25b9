"""Bytes in, frames out. Sans-I/O: no socket, no clock, no asyncio.

The problem: a frame announces its length, and trusting it can be expensive. A 4-byte header must not make the broker
allocate 2 GB, a slow sender must not hold a buffer of the size that it announced, and a 1 MiB produce request must not
be copied twice on its way to the log.

The choice: small frames are collected in one reused buffer and copied out of it as `bytes` (a memoryview into a reused
buffer would change under its reader). That buffer grows with the first read that fills it, since thousands of
connections may do nothing. A larger frame gets its own buffer, which the transport fills directly
(`get_buffer`). Beyond 1 MiB that is a mapping of its own: the kernel gives it memory page by page, as the bytes arrive,
and takes all of it back with the last view. The limit depends on the API, which is in the frame's first bytes (array of
five, then the key), so these are read before anything large is allocated.

Sixty kilobytes hold thousands of tiny frames, which take milliseconds to cut and, cut, ten times their memory. A broker
therefore cuts a few at a time, and more when it has handled those.

Rejected: asyncio streams (`readexactly` copies twice and wakes a task per frame); decoding incrementally
with msgpack's Unpacker (it grows by the announced length of nested values); a buffer that doubles once it is full (the
last step for a frame of 25 MB stopped the event loop for 30 ms).
"""

import mmap
import sys
from collections.abc import Callable
from struct import Struct

_LENGTH = Struct(">i")
_SMALL = 64 * 1024
_FIRST_SMALL = 4 * 1024
_ALLOCATED = 1024 * 1024
"""The largest buffer that is allocated: for these, it is faster than a mapping."""
_MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)

MAX_SMALL_REQUEST_BYTES = 1024 * 1024
"""The largest frame of a request without records."""


class FrameTooLarge(ValueError):
    """A frame announced a length that is negative or over the limit. The connection cannot be read further.

    `frames` are the complete frames before it. `prefix` has the first bytes of the frame over the limit, from which
    `correlation_id_of` may find the request to answer.
    """

    def __init__(self, text: str, frames: list[bytes | memoryview], prefix: bytes = b"") -> None:
        super().__init__(text)
        self.frames = frames
        self.prefix = prefix


class FrameReader:
    """Cuts a byte stream into frames of a 4-byte big-endian length and that many bytes.

    `limit_of(prefix)` returns the maximum length of a frame that does not fit the small buffer; the prefix is the
    frame's first bytes (at least 8). To use it, call `get_buffer`, fill a part of the buffer, and call
    `buffer_updated(n)`, which returns the completed frames, in order, without their length prefix. If there are more
    than `most_at_once`, `cut` returns the rest by and by, and nothing should be read while the reader `is_full`.
    """

    def __init__(self, limit_of: Callable[[bytes], int], most_at_once: int = sys.maxsize) -> None:
        self._limit_of = limit_of
        self._most_at_once = most_at_once
        self._small = bytearray(_FIRST_SMALL)
        self._view = memoryview(self._small)
        self._start = 0
        self._end = 0
        self.has_more = False
        """Whether `cut` would return more frames."""
        self._large: bytearray | mmap.mmap | None = None
        self._large_length = 0
        self._large_filled = 0

    @property
    def in_frame(self) -> bool:
        """Whether a part of a frame has arrived, and no complete one before it, so that a deadline for the rest should
        be running."""
        return self._large is not None or (self._end > self._start and not self.has_more)

    @property
    def is_full(self) -> bool:
        """Whether frames that have not been cut leave little room for more bytes."""
        return self.has_more and self._end - self._start > _SMALL // 2

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes. It is never empty, and valid until `buffer_updated`."""
        if self._large is None:
            if self._end == len(self._small):
                self._make_room()
            return self._view[self._end :]
        return memoryview(self._large)[self._large_filled :]

    def buffer_updated(self, received: int) -> list[bytes | memoryview]:
        """Return the frames that `received` more bytes complete, none while there are others to cut. Raises
        FrameTooLarge."""
        if self._large is not None:
            self._large_filled += received
            if self._large_filled < self._large_length:
                return []
            frame = memoryview(self._large)
            self._large = None
            return [frame]
        self._end += received
        return [] if self.has_more else self.cut()

    def cut(self) -> list[bytes | memoryview]:
        """Return the next frames, at most `most_at_once`. Raises FrameTooLarge."""
        view, end, start, most = self._view, self._end, self._start, self._most_at_once
        frames: list[bytes | memoryview] = []
        self.has_more = False
        while end - start >= 4:
            (length,) = _LENGTH.unpack_from(view, start)
            if length < 0:
                raise FrameTooLarge(f"a frame announced a length of {length}; lengths are not negative", frames)
            is_large = length > _SMALL - 4
            if is_large and end - start < 12:
                break
            if end - start - 4 < length:
                if not is_large:
                    break
                self._begin_large(length, start + 4, end, frames)
                self._start = self._end = 0
                return frames
            if len(frames) == most:
                self.has_more = True
                break
            if is_large:  # the buffer has been enlarged
                self._check(length, start + 4, frames)
            frames.append(bytes(view[start + 4 : start + 4 + length]))
            start += 4 + length
        self._start = start
        if start and (end == len(self._small) or not self.has_more):
            self._make_room()
        return frames

    def _make_room(self) -> None:
        """Move the bytes that have not been cut to the beginning, of a larger buffer if this one is filled by them."""
        view, left = self._view[self._start : self._end], self._end - self._start
        size = len(self._small)
        if self._end == size and (size < _SMALL or not self._start):
            size = max(_SMALL, 2 * left)  # more than _SMALL only if it is read although it is full
        elif left <= _SMALL // 2:
            size = min(size, _SMALL)
        if size != len(self._small):
            self._small = bytearray(size)
            self._view = memoryview(self._small)
        self._view[:left] = view
        self._start, self._end = 0, left

    def _check(self, length: int, start: int, frames: list[bytes | memoryview]) -> None:
        prefix = bytes(self._view[start : start + 8])
        limit = self._limit_of(prefix)
        if length > limit:
            raise FrameTooLarge(f"a frame announced {length} bytes; the limit for it is {limit}", frames, prefix)

    def _begin_large(self, length: int, start: int, end: int, frames: list[bytes | memoryview]) -> None:
        """Allocate for a frame of which only a part has arrived."""
        self._check(length, start, frames)
        self._large = bytearray(length) if length <= _ALLOCATED else mmap.mmap(-1, length, flags=_MAPPING)
        self._large_length = length
        self._large_filled = end - start
        self._large[: end - start] = self._view[start:end]


def api_key_of(prefix: bytes) -> int | None:
    """Return the API key in the first bytes of a request frame, or None if they do not begin a request envelope."""
    if len(prefix) >= 2 and prefix[0] == 0x95 and prefix[1] < 0x80:
        return prefix[1]
    return None


def correlation_id_of(prefix: bytes) -> int | None:
    """Return the correlation id in the first bytes of a request frame, or None if there is none."""
    if len(prefix) < 4 or api_key_of(prefix) is None or prefix[2] >= 0x80:
        return None
    if prefix[3] < 0x80:
        return prefix[3]
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(prefix[3])
    if size is None or len(prefix) < 4 + size:
        return None
    correlation_id = int.from_bytes(prefix[4 : 4 + size], "big")
    return correlation_id if correlation_id < 2**31 else None


def request_limit(max_request_bytes: int, large_api_keys: frozenset[int]) -> Callable[[bytes], int]:
    """Return a broker's `limit_of`: `max_request_bytes` for requests with records, 1 MiB for all others."""

    def limit_of(prefix: bytes) -> int:
        if api_key_of(prefix) in large_api_keys:
            return max_request_bytes
        return min(MAX_SMALL_REQUEST_BYTES, max_request_bytes)

    return limit_of


def response_limit(max_response_bytes: int) -> Callable[[bytes], int]:
    """Return a client's `limit_of`: one limit for all responses."""
    return lambda prefix: max_response_bytes
