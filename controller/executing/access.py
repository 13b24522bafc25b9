"""The controller's access to ZooKeeper: pipelined calls that outlast lost connections.

A session outlives its connections. While it is suspended, reads wait until the session is connected again (then they
are repeated) or has expired (then SessionExpired ends the tenure). `multis` reports a lost connection, since the
executor must find out whether the write was carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world import (
    Clock,
    ConnectionLoss,
    NoNode,
    Operation,
    SessionExpired,
    SessionState,
    Stat,
    ZooKeeperError,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import CONTROLLER_EPOCH, decode_controller_epoch

T = TypeVar("T")

MAX_CALLS_IN_FLIGHT = 1_000
_PAUSE_S = 0.02
"""Seconds before a call is repeated while the session is CONNECTED: it may not have noticed the lost connection yet."""


class ControllerMoved(MinibrokerError):
    """Another controller was elected: this one must stop writing and resign."""


class ZooKeeperAccess:
    """Belongs to one tenure. `session_changed` must be called after every change of the session's state."""

    def __init__(self, session: ZooKeeperSession, clock: Clock) -> None:
        self.session = session
        self._clock = clock
        self._news = asyncio.Event()
        self.reading_s = 0.0
        """Seconds spent waiting for reads in this tenure."""
        self.writing_s = 0.0
        """The same for writes."""

    def session_changed(self) -> None:
        """Wake the callers that wait for a connection."""
        self._news.set()

    async def reconnected(self) -> None:
        """Wait until the session is connected. Raises SessionExpired."""
        if self.session.state is SessionState.CONNECTED:
            await asyncio.sleep(_PAUSE_S)
        while self.session.state is not SessionState.CONNECTED:
            if self.session.state is SessionState.EXPIRED:
                raise SessionExpired(f"session {self.session.session_id:#x} has expired")
            self._news.clear()
            await self._news.wait()

    async def read(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T | None]:
        """Make the calls, pipelined, in their order, and return their results; None if a node does not exist.

        Raises SessionExpired and all other ZooKeeperErrors except NoNode and ConnectionLoss.
        """
        started = self._clock.monotonic()
        try:
            results: list[T | None] = []
            for start in range(0, len(calls), MAX_CALLS_IN_FLIGHT):
                results += await self._read(calls[start : start + MAX_CALLS_IN_FLIGHT])
            return results
        finally:
            self.reading_s += self._clock.monotonic() - started

    async def require_term(self, epoch: int) -> None:
        """Raise ControllerMoved if a controller with a higher epoch was elected."""
        [node] = await self.read([lambda: self.session.get(CONTROLLER_EPOCH)])
        if node is not None and (now := decode_controller_epoch(node[0])) > epoch:
            raise ControllerMoved(f"the controller of epoch {now} was elected; ours is {epoch}")

    async def _read(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T | None]:
        results: list[T | None] = [None] * len(calls)
        missing = list(range(len(calls)))
        while missing:
            answers = await asyncio.gather(*(_run(calls[index]) for index in missing), return_exceptions=True)
            again = []
            for index, answer in zip(missing, answers, strict=True):
                if isinstance(answer, ConnectionLoss):
                    again.append(index)
                elif isinstance(answer, NoNode):
                    results[index] = None
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    results[index] = answer
            missing = again
            if missing:
                await self.reconnected()
        return results

    async def multis(self, batches: Sequence[Sequence[Operation]]) -> list[list[str | Stat | None] | ZooKeeperError]:
        """Send the multis, pipelined, in their order. Returns, for each, its result or its ZooKeeperError."""
        started = self._clock.monotonic()
        try:
            results: list[list[str | Stat | None] | ZooKeeperError] = []
            answers = await asyncio.gather(*(self.session.multi(batch) for batch in batches), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, ZooKeeperError):
                    raise answer
                results.append(answer)
            return results
        finally:
            self.writing_s += self._clock.monotonic() - started


async def _run(call: Callable[[], Awaitable[T]]) -> T:
    return await call()
