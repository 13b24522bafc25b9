"""Helpers that open sessions, record their events, and expire them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from minibroker.controller.zookeeper import KazooSession, KazooZooKeeper
from minibroker.protocol.world import SessionState, WatchEvent

T = TypeVar("T")

SESSION_TIMEOUT_MS = 6_000
CONNECT_TIMEOUT_MS = 10_000


@asynccontextmanager
async def open_session(servers: str, session_timeout_ms: int = SESSION_TIMEOUT_MS) -> AsyncIterator[KazooSession]:
    session = await KazooZooKeeper().connect(servers, session_timeout_ms, CONNECT_TIMEOUT_MS)
    try:
        yield session
    finally:
        await session.close()


class Recorder(Generic[T]):
    """A callback that collects its arguments, for which a test can wait."""

    def __init__(self) -> None:
        self.seen: list[T] = []
        self._changed = asyncio.Event()

    def __call__(self, item: T) -> None:
        self.seen.append(item)
        self._changed.set()

    async def until(self, condition: Callable[[list[T]], bool]) -> list[T]:
        """Wait until `condition` holds for the collected items; return them."""
        async with asyncio.timeout(30):
            while not condition(self.seen):
                self._changed.clear()
                await self._changed.wait()
        return self.seen


def record_states(session: KazooSession) -> Recorder[SessionState]:
    recorder = Recorder[SessionState]()
    session.on_state(recorder)
    return recorder


def record_events() -> Recorder[WatchEvent]:
    return Recorder[WatchEvent]()


async def expire(servers: str, session: KazooSession) -> None:
    """End the session from outside: another client takes it over and closes it."""
    client_id = session._client.client_id
    session_id = session.session_id

    def take_over_and_close() -> None:
        taken_over = session_id
        # The owner may reconnect before it is closed. If the session is already over, kazoo gets a new one.
        while taken_over == session_id:
            thief = KazooClient(hosts=servers.partition("/")[0], client_id=client_id, timeout=SESSION_TIMEOUT_MS / 1000)
            with contextlib.suppress(KazooTimeoutError):  # the owner reconnected meanwhile
                thief.start(timeout=CONNECT_TIMEOUT_MS / 1000)
                taken_over = thief.client_id[0] if thief.client_id else session_id
                thief.stop()
                thief.close()

    await asyncio.to_thread(take_over_and_close)
