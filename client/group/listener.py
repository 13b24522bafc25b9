"""The rebalance listener: what a user may do when partitions are revoked or assigned, and how the member calls it."""

from __future__ import annotations

import asyncio
import inspect
from contextvars import ContextVar

from minibroker.client.errors import InvalidSetting, ListenerTimedOut, WithinListener
from minibroker.client.log import Logger
from minibroker.client.tasks import Pulse
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock

logger = Logger("minibroker.client")


class RebalanceListener:
    """Derive from this class, override the methods that you need, and pass an instance to Consumer or `subscribe`.

    The methods are awaited in the consumer's event loop, one at a time. They run while the user holds no records: the
    loop over the consumer waits for the next ones, or has not begun. They may call the consumer: `commit`, `position`,
    `seek`, `pause`. Each has `max_poll_interval_ms`; after that it is cancelled, with a WARNING, and the group may have
    gone on without this member. The iteration raises the exceptions that these methods raise.
    """

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """These partitions are about to go to other members, which get no records of them until this returns. Commit
        finished work here."""

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """These partitions were added. Their positions are the group's committed offsets, and no record of them has
        been handed out yet. The list is empty if the rebalance added none."""

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """These partitions are lost: the group went on without this member, and other members may read them already. A
        commit would be refused. By default this calls `on_partitions_revoked`, as in Kafka."""
        await self.on_partitions_revoked(partitions)


def checked_listener(listener: RebalanceListener | None) -> RebalanceListener | None:
    """Raises InvalidSetting."""
    if listener is not None and not isinstance(listener, RebalanceListener):
        raise InvalidSetting("listener", listener, "derive it from RebalanceListener")
    for name in ("on_partitions_revoked", "on_partitions_assigned", "on_partitions_lost"):
        if listener is not None and not inspect.iscoroutinefunction(getattr(listener, name)):
            rule = f"{name} is awaited: define it by `async def`, or use minibroker.sync"
            raise InvalidSetting("listener", listener, rule)
    return listener


class _Call:
    """A call of a listener's method."""

    def __init__(self, calls: ListenerCalls, method: str, began: float) -> None:
        self.calls = calls
        self.method = method
        self.began = began
        self.is_over = False
        self.task = asyncio.current_task()


_call: ContextVar[_Call | None] = ContextVar("minibroker_listener_call", default=None)
"""The listener's call in which the present code runs, or in which its task was started."""


class ListenerCalls:
    """Calls the listener of one member, and keeps the exceptions that it raises for the user."""

    def __init__(self, clock: Clock, who: str, timeout_s: float, errors: list[BaseException], stirred: Pulse) -> None:
        self.listener = RebalanceListener()
        self.under_way: _Call | None = None
        self.last_raised: Exception | None = None
        """The last of `errors` that the listener has raised."""
        self._clock = clock
        self._who = who
        self._timeout_s = timeout_s
        self._errors = errors
        self._stirred = stirred

    def check_caller_is_outside(self, method: str) -> None:
        """Raises WithinListener if the caller runs in a call of the listener that has not returned, or in a task that
        such a call started."""
        call = _call.get()
        if call is not None and call.calls is self and not call.is_over:
            raise WithinListener(method)

    def check_caller_is_another(self, method: str) -> None:
        """Raises WithinListener if the caller runs in the task that calls the listener, because records arrive only
        after the listener has returned. A task that the listener has started may wait for records."""
        if self.under_way is not None and self.under_way.task is asyncio.current_task():
            raise WithinListener(method)

    async def call(self, method: str, partitions: list[TopicPartition]) -> None:
        call = self.under_way = _Call(self, method, self._clock.monotonic())
        self._stirred.notify()
        token = _call.set(call)  # tasks that the listener starts inherit it
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await getattr(self.listener, method)(partitions)
        except TimeoutError as error:
            if limit.expired():
                timed_out = ListenerTimedOut(method, round(self._timeout_s * 1_000))
                timed_out.__cause__ = error.__cause__  # the traceback of the cancelled listener
                logger.warning("%s: %s", self._who, timed_out)
                self._raised(timed_out)
            else:
                self._raised(error)
        except Exception as error:  # noqa: BLE001 - the listener is the user's code, and the iteration raises this
            self._raised(error)
        finally:
            call.is_over = True
            self.under_way = None
            _call.reset(token)

    def _raised(self, error: Exception) -> None:
        self._errors.append(error)
        self.last_raised = error
