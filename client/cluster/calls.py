"""Calls of a client that are in progress, and end when the client is closed.

The problem. A call asks brokers repeatedly until it is answered or its time is up. After `close`, such a call must
change nothing more: a commit that is sent then would surprise the application. And a call that waits for one of the
client's tasks would wait for ever.

The choice. Each call is recorded with its task, and `close` cancels it; the call then raises Closed. So no loop inside
needs to check the client's state, and none can forget to. Requests that were sent before may still be carried out.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from minibroker.protocol.errors import MinibrokerError

P = ParamSpec("P")
T = TypeVar("T")


class _Client(Protocol):
    _calls: Calls

    def _not_running(self) -> MinibrokerError: ...


C = TypeVar("C", bound=_Client)


class Calls:
    """The calls of one client."""

    def __init__(self) -> None:
        self._under_way: dict[_Call, None] = {}

    def end(self) -> None:
        """End all calls except the one that calls this."""
        for call in list(self._under_way):
            call.end()

    def begin(self, why_ended: Callable[[], MinibrokerError]) -> _Call:
        return _Call(self._under_way, why_ended)


class _Call:
    """A block like `asyncio.timeout`, which `end` ends."""

    def __init__(self, under_way: dict[_Call, None], why_ended: Callable[[], MinibrokerError]) -> None:
        self._under_way = under_way
        self._why_ended = why_ended
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._is_ended = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._under_way[self] = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._under_way[self]
        assert self._task is not None
        if self._is_ended and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._why_ended() from None

    def end(self) -> None:
        assert self._task is not None
        if not self._is_ended and self._task is not asyncio.current_task():
            self._is_ended = True
            self._task.cancel()


def ends_with_its_client(
    method: Callable[Concatenate[C, P], Awaitable[T]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """Decorate a method of a client: it raises Closed if the client is closed during the call, and ClientCrashed if the
    client crashes."""

    async def call(self: C, /, *arguments: P.args, **named: P.kwargs) -> T:
        async with self._calls.begin(self._not_running):
            return await method(self, *arguments, **named)

    functools.update_wrapper(call, method)
    return call
