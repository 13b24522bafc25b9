"""What crosses between our event loop and kazoo's threads: `zookeeper` says why."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from minibroker.protocol.world import silent_at_most_s

_DELIVERIES_PER_TURN = 500
"""Posts that the inbox delivers in one turn of the loop, so that a backlog does not block the loop."""
_LATE_S = 1.0
"""An answer to any request that takes so long is reported."""


class Inbox:
    """A FIFO from threads to the loop, with one wake-up of the loop for all posts that have gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake_up_sent = False

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` on the loop, after all earlier posts. May be called from any thread."""
        self._posts.append((function, arguments))
        # `_empty` clears the flag before it takes the first post, so a thread that sees it set has appended in time.
        if not self._wake_up_sent:
            self._wake_up_sent = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                # The loop is closed. The guard notices that it does not tick, and ends the session.
                self._posts.clear()

    def _empty(self) -> None:
        self._wake_up_sent = False
        for _ in range(_DELIVERIES_PER_TURN):
            if not self._posts:
                return
            function, arguments = self._posts.popleft()
            function(*arguments)
        if self._posts and not self._wake_up_sent:
            self._wake_up_sent = True
            self._loop.call_soon(self._empty)


class WakeUps:
    """Both ends of the socket pair through which kazoo's callers wake its connection thread, with a byte per request.

    Counts the bytes, and keeps one byte in a real socket while the count is above zero, so that `send` never blocks.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.Lock()
        self._count = 0

    def fileno(self) -> int:
        return self._reader.fileno()

    def send(self, data: bytes) -> int:
        with self._lock:
            if self._count == 0:
                self._writer.send(b"\0")
            self._count += 1
        return len(data)

    def recv(self, _size: int) -> bytes:
        with self._lock:
            if self._count == 1:
                self._reader.recv(1)
            self._count = max(0, self._count - 1)
        return b"\0"

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Hearing:
    """When ZooKeeper was last heard of. kazoo's thread calls `asked` and `heard`, and the loop reads."""

    def __init__(
        self,
        session_timeout_ms: int,
        post: Callable[[Callable[[float, float], object], float, float], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._late_s = silent_at_most_s(session_timeout_ms)
        self._post = post
        self._monotonic = monotonic
        self._heard_s = monotonic()
        self._asked_s: float | None = None
        """When the oldest request was sent that is not answered, or a connection was wanted."""
        self.on_heard_again: Callable[[float, float], object] = lambda silent_s, unanswered_s: None
        """Called on the loop after a silence that is longer than an answer to a ping may take, or a late answer."""

    @property
    def silent_s(self) -> float:
        return self._monotonic() - self._heard_s

    def asked(self) -> None:
        if self._asked_s is None:
            self._asked_s = self._monotonic()

    def heard(self) -> None:
        now_s = self._monotonic()
        silent_s = now_s - self._heard_s
        unanswered_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        if silent_s > self._late_s or unanswered_s >= _LATE_S:
            self._post(self.on_heard_again, silent_s, unanswered_s)
        self._heard_s, self._asked_s = now_s, None
