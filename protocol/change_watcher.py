"""The watch on sequential notifications in ZooKeeper, below which each change adds one (Kafka's
ZkNodeChangeNotificationListener).

A notification names what has changed and carries nothing else, so missing some does no harm: if a watcher may have
missed one (it lost its session or connection), it reads everything.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress

from minibroker.protocol.world import (
    Clock,
    ConnectionLoss,
    SessionExpired,
    SessionState,
    WatchEvent,
    ZooKeeperError,
    ZooKeeperSession,
)

RETRY_S = 0.1
TROUBLE_S = 1.0
EXPIRATION_S = 15 * 60.0
"""Time that a notification stays, counted by each broker from when it saw it. The first broker to reach it removes
it."""


class ChangeWatcher(ABC):
    """Calls `_look` at first, after each event of the watches that it sets, and when a notification expires."""

    def __init__(
        self, what: str, logger: logging.Logger, clock: Clock, sessions: Callable[[], Awaitable[ZooKeeperSession]]
    ) -> None:
        """`what` names the changes in the log. `sessions` waits until there is a session."""
        self._what = what
        self._logger = logger
        self._clock = clock
        self._sessions = sessions
        self._session: ZooKeeperSession | None = None
        self._may_have_missed = True
        self._news = asyncio.Event()
        self._seen: dict[str, float] = {}
        """The time at which each notification was first seen."""

    async def run(self) -> None:
        """Watch for changes until cancelled."""
        while True:
            self._news.clear()
            try:
                await self._look(await self._usable_session())
            except (ConnectionLoss, SessionExpired):
                self._may_have_missed = True
                await asyncio.sleep(RETRY_S)
                continue
            except ZooKeeperError as error:
                self._logger.error("changes of %s cannot be read: %s", self._what, error)
                self._may_have_missed = True
                await asyncio.sleep(TROUBLE_S)
                continue
            oldest_s = min(self._seen.values(), default=None)
            until_next_s = None if oldest_s is None else oldest_s + EXPIRATION_S - self._clock.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next_s):
                    await self._news.wait()

    @abstractmethod
    async def _look(self, session: ZooKeeperSession) -> None:
        """Apply the new notifications, or read everything if `_may_have_missed`, and watch for the next change with
        `_watched`. Raises ZooKeeperError."""

    def _watched(self, _event: WatchEvent) -> None:
        self._news.set()

    async def _usable_session(self) -> ZooKeeperSession:
        session = await self._sessions()
        if session is not self._session:
            self._session = session
            self._may_have_missed = True
            session.on_state(lambda state: self._state_changed(session, state))
        return session

    def _state_changed(self, session: ZooKeeperSession, state: SessionState) -> None:
        if session is self._session and state is not SessionState.SUSPENDED:
            self._may_have_missed = True
            self._news.set()
