"""The memory of a producer: how many bytes its batches may hold, and how many they hold. Pure.

A batch is granted memory in pieces of 16 KiB. Its `room` counts down with each record, so only a record for which there
is no room needs a decision: grant more, or close the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minibroker.client.errors import BufferFull
from minibroker.client.producing.batch import Batch

GRANT = 16 * 1024
"""Bytes that a batch is granted at a time."""

_NO_LIMIT = 1 << 62


class Buffer:
    """`send` is refused at twice the `size`; `drain` waits above it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        """Bytes granted to batches that have not ended, and to failed ones that were not reported."""
        self._limit = 2 * size

    @property
    def is_over_limit(self) -> bool:
        return self.used > self.size

    def check(self, size: int) -> None:
        """Raise BufferFull if that many bytes cannot be granted."""
        if self.used + size > self._limit:
            raise BufferFull(
                f"{self.used} bytes of records wait to be sent, twice buffer_memory={self.size}: "
                "call producer.drain() after every send (in asyncio: await it), or raise buffer_memory"
            )

    def check_all(self, size: int) -> None:
        """The same for the records of one `send_batch`."""
        if self.used + size > self._limit:
            raise BufferFull(
                f"{size} bytes of records beside {self.used} that wait to be sent are more than twice "
                f"buffer_memory={self.size}: pass fewer at a time, and call producer.drain() after every one (in "
                "asyncio: await it); or raise buffer_memory"
            )

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Refuse nothing within this block: its records were accepted before."""
        limit, self._limit = self._limit, _NO_LIMIT
        try:
            yield
        finally:
            self._limit = limit

    def grant(self, batch: Batch, size: int) -> None:
        """Raises BufferFull."""
        self.check(size)
        self.used += size
        batch.granted += size
        batch.room += size

    def take_unused(self, batch: Batch) -> None:
        """Take back the memory that a batch was granted and does not use."""
        self.used -= batch.room
        batch.granted -= batch.room
        batch.room = 0

    def take_all(self, batch: Batch) -> None:
        """Take back all memory of a batch."""
        self.used -= batch.granted
        batch.granted = 0
