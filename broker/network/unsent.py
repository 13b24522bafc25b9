"""The answers that clients have not read, of all connections together.

The problem: each connection may have a few megabytes of unread answers, which is little for one and too much for
hundreds that read nothing.

The choice: beyond the limit, further answers with records wait in line until there is room, and the connections that
accept no byte for STALLED_S while others wait are closed, those with most unread bytes first. Their clients have lost
nothing and may connect again. What is unread is measured, since transports do not report it: when the bytes given since
the last measurement could have filled the limit, and at intervals while it is full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

STALLED_S = 1.0
LOOK_INTERVAL_S = 0.05
SLICE_S = 0.002
PAUSE_S = 0.001


class Receiver(Protocol):
    """A connection."""

    def unsent_bytes(self) -> int: ...

    def drop_unsent(self, reason: str) -> None:
        """Close it, and forget the unread answers."""
        ...


class UnsentAnswers:
    def __init__(self, limit: int, receivers: Callable[[], Iterable[Receiver]], clock: Callable[[], float]) -> None:
        self.limit = limit
        self._receivers = receivers
        self._clock = clock
        self._estimate = 0
        self._is_full = False
        self._since: dict[Receiver, tuple[int, float]] = {}
        """While it is full: the unread bytes of each connection, and the time at which they last changed."""
        self._line: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def given(self, size: int) -> None:
        """A connection was given an answer of this size."""
        self._estimate += size
        if self._estimate > self.limit and not self._is_full:
            self._measure()

    def in_turn(self, call: Callable[[], None]) -> None:
        """Call this, which gives an answer with records, now or when there is room."""
        if self._is_full or self._line:
            self._line.append(call)
        else:
            call()

    def close(self) -> None:
        self._line.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        self._measure()
        end_s = self._clock() + SLICE_S
        try:
            while self._line and not self._is_full and self._clock() < end_s:
                self._line.popleft()()
        finally:
            if self._line:
                self._look_later(PAUSE_S)

    def _look_later(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _measure(self) -> None:
        now_s = self._clock()
        unsent = {receiver: size for receiver in self._receivers() if (size := receiver.unsent_bytes())}
        total = sum(unsent.values())
        if total > self.limit:
            total -= self._drop_stalled(unsent, total, now_s)
        else:
            self._since = {}
        self._estimate = total
        self._is_full = total > self.limit
        if self._is_full:
            self._look_later(LOOK_INTERVAL_S)

    def _drop_stalled(self, unsent: dict[Receiver, int], total: int, now_s: float) -> int:
        """Close connections that stall, until half of the limit is free. Return the bytes that this frees."""
        since: dict[Receiver, tuple[int, float]] = {}
        for receiver, size in unsent.items():
            known = self._since.get(receiver)
            since[receiver] = known if known is not None and known[0] == size else (size, now_s)
        self._since = since
        freed = 0
        for receiver in sorted(unsent, key=lambda each: unsent[each], reverse=True):
            if total - freed <= self.limit // 2:
                break
            if now_s - since[receiver][1] >= STALLED_S:
                freed += unsent[receiver]
                receiver.drop_unsent(
                    f"it has read nothing for {STALLED_S:g} s, and unread answers of all clients take {total} bytes"
                )
        return freed
