"""The queue of events, handled one at a time in order (Kafka's ControllerEventManager).

With one event at a time, no decision sees a cluster state that another one is changing. In return the loop must not
wait for a broker: requests are queued in the outbox, and responses come back as events.

Events that only cause a read are queued once, however often they are raised: one read sees all earlier changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from minibroker.controller.decisions.events import (
    WATCHED,
    AdminRequest,
    AutoLeaderRebalance,
    ClusterFormed,
    Event,
    ReassignedPartitionsIsrChange,
    ResumeDeletions,
    ResumeReassignments,
    SessionReconnected,
)
from minibroker.controller.executing.access import ControllerMoved, ZooKeeperAccess
from minibroker.controller.timeline import Timeline
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.world import Clock, SessionExpired

Handler = Callable[[Any], Awaitable[None]]
Handlers = Mapping[type[Event], Handler]
"""The handler of each kind of event, called with the event."""

_LOOK_AGAIN = (
    *WATCHED,
    AutoLeaderRebalance,
    ClusterFormed,
    ReassignedPartitionsIsrChange,
    ResumeDeletions,
    ResumeReassignments,
    SessionReconnected,
)

_log = logging.getLogger(__name__)


class EventLoop:
    """Belongs to one tenure. `post` drops events of other tenures, and all events after `close`."""

    def __init__(
        self,
        epoch: int,
        handle: Callable[[Event], Awaitable[None]],
        clock: Clock,
        access: ZooKeeperAccess,
        timeline: Timeline,
    ) -> None:
        self._epoch = epoch
        self._handle = handle
        self._clock = clock
        self._access = access
        self._timeline = timeline
        self._queue: deque[tuple[Event, float]] = deque()
        self._waiting: set[Event] = set()
        self._filled = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """The number of queued events."""
        return len(self._queue)

    def post(self, event: Event) -> None:
        """Queue an event. A request that arrives too late fails with NOT_CONTROLLER."""
        if self._closed or event.epoch != self._epoch:
            if isinstance(event, AdminRequest):
                event.fail(_not_controller())
            return
        if isinstance(event, _LOOK_AGAIN):
            if event in self._waiting:
                return
            self._waiting.add(event)
        self._queue.append((event, self._clock.monotonic()))
        self._filled.set()

    async def run(self) -> None:
        """Handle events until a handler raises; the exception is passed on, and the caller ends the tenure."""
        while True:
            while self._queue:
                event, queued_at = self._queue.popleft()
                if isinstance(event, _LOOK_AGAIN):
                    self._waiting.discard(event)
                await self._take(event, self._clock.monotonic() - queued_at)
            self._filled.clear()
            await self._filled.wait()

    async def _take(self, event: Event, queued_s: float) -> None:  # C3
        reading_s, writing_s = self._access.reading_s, self._access.writing_s
        failure: BaseException | None = None
        self._timeline.begin(event, queued_s)
        try:
            await self._handle(event)
        except BaseException as error:
            failure = error
            raise
        finally:
            if failure is not None and isinstance(event, AdminRequest):
                event.fail(_reported(failure))
            self._timeline.end(
                reading_s=self._access.reading_s - reading_s,
                writing_s=self._access.writing_s - writing_s,
                failure=repr(failure) if failure is not None else None,
                is_recorded=failure is not None or not event.is_question,
            )

    def close(self) -> None:
        """Accept no more events. Queued requests fail with NOT_CONTROLLER, so that clients try the next controller."""
        self._closed = True
        for event, _ in self._queue:
            if isinstance(event, AdminRequest):
                event.fail(_not_controller())
        self._queue.clear()
        self._waiting.clear()


def _not_controller() -> BrokerError:
    return BrokerError(ErrorCode.NOT_CONTROLLER, "this broker is not the controller, or no longer")


def _reported(failure: BaseException) -> BrokerError:
    """Return the error for the client. Only a moved controller is retriable: a request that fails because of a bug must
    not be sent to the next controller as well."""
    if isinstance(failure, ControllerMoved | SessionExpired | asyncio.CancelledError):
        return _not_controller()
    return BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the controller failed to handle this request: {failure!r}")
