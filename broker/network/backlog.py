"""The frames of a connection that have been read and wait to be dispatched.

The problem. Reading ahead is cheap for the broker and its client, but the client may send thousands of tiny frames at
once, and may hang up and come again. What it leaves behind must cost little.

The choice. Only a few frames are cut out of the received bytes at a time (`framing`), and more when these have been
dispatched. Of a lost connection as much is handled as Kafka would handle. Kafka goes on until an answer cannot be sent:
so records with acks=0 count, which have no answer, and a LeaveGroup that follows a Heartbeat. Here the answer of a lost
connection never leaves, so MOST_AFTER_LOSS requests with answers are allowed; the rest is dropped, and of those few the
ones that only read.

Rejected: a budget of bytes for all that lost connections leave behind. One stranger would use it up, and a producer
with acks=0 that closes would lose records. Such records are bounded by the connection's buffer, and the connection
counts until they are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from minibroker.broker.network.dialect import BadInput, Dialect, Frame
from minibroker.protocol.apis import PRODUCE, READS

READ_AHEAD_BYTES = 128 * 1024
"""More than one read can bring in small frames, so that a single read never pauses a connection."""
READ_AHEAD_FRAMES = 128

MOST_AFTER_LOSS = 5
"""Requests with answers that a lost connection may have left. Kafka's producers have as many in flight."""


class Reading(Protocol):
    """The connection."""

    @property
    def dialect(self) -> Dialect:
        """It may change while bytes are received."""
        ...


class Backlog(deque[tuple[Frame, float]]):
    """Frames with the times at which they were cut. Use `take` and `drop` to remove them. Call `cut_more` when the last
    is taken and the dialect `has_more`."""

    __slots__ = ("_after_loss", "bytes", "frame_since", "refusal")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.frame_since: float | None = None
        """Since when a frame has been incomplete, and is the next one."""
        self.refusal: BadInput | None = None
        """What followed these frames."""
        self._after_loss = 0

    def received(self, count: int, connection: Reading, now: float) -> None:
        """The dialect's buffer has `count` more bytes."""
        try:
            frames = connection.dialect.received(count)
        except BadInput as error:
            frames, self.refusal = error.frames, error
        self._put(frames, connection.dialect, now)

    def is_full(self, dialect: Dialect) -> bool:
        """Whether nothing more should be read."""
        return self.bytes >= READ_AHEAD_BYTES or len(self) >= READ_AHEAD_FRAMES or dialect.is_full

    def take(self) -> tuple[Frame, float]:
        """Remove and return the first."""
        first = self.popleft()
        self.bytes -= len(first[0])
        return first

    def cut_more(self, dialect: Dialect, now: float) -> None:
        """Add frames that have been received and not been cut."""
        try:
            frames = dialect.more()
        except BadInput as error:
            frames, self.refusal = error.frames, error
        self._put(frames, dialect, now)

    def drop(self, refusal: BadInput | None = None) -> None:
        """Remove all frames. `refusal` takes their place."""
        self.clear()
        self.bytes = 0
        self.refusal = refusal

    # -- after the connection was lost --

    def skip(self, dialect: Dialect, clock: Callable[[], float]) -> None:
        """Drop what need not be handled before the first frame that must be. Call it once for each that is the
        first."""
        while self:
            key = dialect.api_key(self[0][0])
            if key == PRODUCE.key or not self.has_answer() or key not in READS:
                return
            self.take()
            if not self and dialect.has_more:
                self.cut_more(dialect, clock())

    def has_answer(self) -> bool:
        """The first frame has an answer. Return whether it is handled nevertheless; if not, nothing is left."""
        self._after_loss += 1
        if self._after_loss > MOST_AFTER_LOSS:
            self.drop()
        return self._after_loss <= MOST_AFTER_LOSS

    def _put(self, frames: Sequence[Frame], dialect: Dialect, now: float) -> None:
        if self.refusal is not None or not dialect.in_frame:
            self.frame_since = None
        elif frames or self.frame_since is None:
            self.frame_since = now
        for frame in frames:
            self.append((frame, now))
            self.bytes += len(frame)
