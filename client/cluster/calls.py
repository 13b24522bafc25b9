"""Calls of a client that are under way, and end with it.

The problem. A call asks brokers again and again until it is answered or its time is up. Whoever closes the client has
done with it: what a call changes after that, as a commit that is sent then, is a surprise to whoever goes on; and a
call that waits for one of the client's tasks would wait for ever.

The choice. Each such call is noted with its task, and `close` cancels it: where it waits, it raises Closed. So no loop
inside needs to look at the client's state, and none can forget it. What was sent before may be carried out.
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
    """Those of one client."""

    def __init__(self) -> None:
        self._under_way: dict[_Call, None] = {}

    def end(self) -> None:
        """All but that of who calls this."""
        for call in list(self._under_way):
            call.end()

    def begin(self, why_ended: Callable[[], MinibrokerError]) -> _Call:
        return _Call(self._under_way, why_ended)


class _Call:
    """As `asyncio.timeout`, but ended by `end`."""

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
    """A decorator of methods of a client: where it is closed meanwhile, they raise Closed; ClientCrashed where it has
    crashed."""

    async def call(self: C, /, *arguments: P.args, **named: P.kwargs) -> T:
        async with self._calls.begin(self._not_running):
            return await method(self, *arguments, **named)

    functools.update_wrapper(call, method)
    return call
