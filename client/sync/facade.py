"""The common parts of the blocking Producer, Consumer and Admin: an asynchronous client, and the thread in which it
lives.

`blocking` and `in_loop` derive a method from the asynchronous client's, with its signature and docstring. The
constructors repeat the settings. Rejected: typing the settings once (a TypedDict with Unpack, or a dataclass). `help()`
and editors would show `**settings` in place of names, types and defaults. A test compares the two lists instead. The
arguments about security, the same in all clients, are the exception (`client/security.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, Literal, NoReturn, ParamSpec, Protocol, Self, TypeVar

from minibroker.client import log
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.context_managers import Blocking
from minibroker.client.errors import ApiTimedOut, Closed, records_were
from minibroker.client.log import Logger
from minibroker.client.settings import check_ms
from minibroker.client.sync.background import LOG_PATIENCE_S, Background
from minibroker.protocol.errors import MinibrokerError

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
C = TypeVar("C", bound=Client)

THREAD_END_S = 5.0
"""`close` waits this long for the thread after all else is closed. The thread only closes its loop then."""

logger = Logger("minibroker.client", defers=True)

Coroutines = Callable[[], Coroutine[Any, Any, T]]


def within(make: Coroutines[T], timeout_ms: float | None, otherwise: str, is_idle: Callable[[], bool]) -> Coroutines[T]:
    """Return coroutines that raise ApiTimedOut if they take longer. If there is nothing to wait for at the beginning
    (`is_idle`), they run to their end, even with 0 ms."""
    timeout_s = None if timeout_ms is None else check_ms("timeout_ms", timeout_ms)

    async def bounded() -> T:
        try:
            async with asyncio.timeout(None if is_idle() else timeout_s) as bound:
                return await make()
        except TimeoutError as error:
            if bound.expired():
                raise ApiTimedOut(f"{otherwise}, within {timeout_ms:g} ms") from error
            raise

    return bounded


class Ending:
    """Closes an asynchronous client, in its loop. It does not refer to the facade, which may be gone by then."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def close(self) -> None:
        await self._client.close()

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close at the end of `with`."""
        await self._client.__aexit__(kind, error, traceback)

    async def see_off(self, background: Background) -> None:
        """Close a client that was not closed by its user, soon, and end the thread."""
        try:
            await self.leave(SystemExit, SystemExit(), None)
        finally:
            background.stop_soon()

    def finish(self) -> None:
        """Clean up after the end of the loop."""


class Facade(Blocking, Generic[C]):
    """A client for scripts and threads. Its calls wait for the asynchronous client, which has a thread of its own."""

    _noun: ClassVar[str]

    def __init__(self, client: C, ending: Ending | None = None) -> None:
        self._client = client
        self._ending = Ending(client) if ending is None else ending
        self._state: Literal["not started", "running", "closing", "closed", "forked"] = "not started"
        self._background = Background(self._noun, self._was_forked, self._begin_to_exit)

    def start(self) -> None:
        """Reach a broker. Raises NetworkError naming every address and the reason if none answers within 2 s, or
        within 5 s if one is silent."""
        if self._state != "not started":
            raise (
                self._not_running()
                if self._state == "forked"
                else Closed(f"the {self._noun} was started before and is {self._state}; make a new one")
            )
        self._state = "closed"
        self._background.start()
        try:
            self._background.call(self._begin)
        except BaseException:
            self._background.stop(THREAD_END_S)
            raise
        self._state = "running"

    def _begin(self) -> Coroutine[Any, Any, None]:
        return self._client.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(partial(self._ending.leave, kind, error, traceback), self._serve)

    def close(self) -> None:
        """End everything in the background. Calls that wait in other threads raise Closed. A second `close` does
        nothing, nor does a `close` in a forked child."""
        self._end(self._ending.close, self._serve)

    def _end(self, end: Coroutines[None], serve: Callable[[], None] | None = None) -> None:
        """Close, and end the thread in any case. The calling thread runs `serve` when the client asks for it."""
        if self._state != "running":
            return
        self._state = "closing"
        try:
            self._background.call(end, serve)
        finally:
            if self._state == "closing":  # otherwise this is a child that was forked during the call
                self._state = "closed"
                self._background.stop(THREAD_END_S)
                self._ending.finish()
                log.wait(LOG_PATIENCE_S)

    def _serve(self) -> None:
        """Run, in a thread of the user, the work that the client has for it."""

    def _call(self, make: Coroutines[T], serve: Callable[[], None] | None = None) -> T:
        """Run a coroutine of the client, and wait for it."""
        if self._state not in ("running", "closing"):  # callbacks during `close` may call the client
            raise self._not_running()
        return self._background.call(make, serve)

    def _do(self, work: Callable[[], T]) -> T:
        """Run a function in the client's loop, and wait for it."""

        async def run() -> T:
            return work()

        return self._call(run)

    def _not_running(self) -> MinibrokerError:
        if self._state == "forked":
            return self._background.forked()
        if self._client._crash is not None:
            return self._client._not_running()
        if self._state == "not started":
            return Closed(
                f"the {self._noun} is not started: use it within `with {type(self).__name__}(...)`, or call start()"
            )
        return Closed(f"the {self._noun} is {self._state}: by `close`, of another thread perhaps, or the end of `with`")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state}, bootstrap={self._client._runtime.bootstrap}>"

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"a {self._noun} cannot be sent to another process: make a new one there")

    # -- without `close` --

    def _unacknowledged(self) -> int:
        """Return the number of records that may be lost now."""
        return 0

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") == "running":  # no state: the constructor raised
            was, records = repr(self), self._unacknowledged()  # before the loop sends them
            with suppress(Closed):
                self._background.begin(partial(self._ending.see_off, self._background))
            self._warn(f"{was} was dropped without `close`", records)

    def _begin_to_exit(self) -> Callable[[], None] | None:
        """Begin to close the client at the end of the interpreter. Return a function to call if that takes too long."""
        if self._state != "running":
            return None
        self._state = "closed"
        with suppress(Closed):
            self._background.begin(partial(self._ending.see_off, self._background))
        with suppress(ResourceWarning):  # a warning that the user made an error; no caller could catch it
            self._warn(f"{self!r} was not closed before the interpreter ended", 0)
        return self._did_not_exit

    def _did_not_exit(self) -> None:
        with suppress(ResourceWarning):
            self._warn(f"{self!r} was not closed before the interpreter ended, and is busy", self._unacknowledged())

    def _warn(self, text: str, records: int) -> None:
        if records:  # a ResourceWarning is not shown by default
            logger.warning("%s: %s not acknowledged, and may never be sent", text, records_were(records))
        logger.resource_warning(text, source=self)

    def _was_forked(self) -> object:
        """Note that this is a forked child, in which the client does not work."""
        self._state = "forked"
        self._client._state = "closed"  # no warning here that it was dropped
        return self._client, self._ending


class _Method(Protocol[P, T_co]):
    """The type of a method for type checkers: a descriptor whose access through an instance gives a function."""

    def __get__(self, facade: object, owner: type | None = None, /) -> Callable[P, T_co]: ...


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> _Method[P, T]:
    """Return a method of a facade that calls this method of its asynchronous client, and waits for the result.
    Signature and docstring are those of `method`."""

    def call(facade: Facade[Any], /, *arguments: P.args, **named: P.kwargs) -> T:
        return facade._call(partial(method, facade._client, *arguments, **named))

    update_wrapper(call, method)
    return call


def in_loop(method: Callable[Concatenate[Any, P], T]) -> _Method[P, T]:
    """As `blocking`, for a method that is not a coroutine: it runs in the client's loop."""

    def call(facade: Facade[Any], /, *arguments: P.args, **named: P.kwargs) -> T:
        return facade._do(partial(method, facade._client, *arguments, **named))

    update_wrapper(call, method)
    return call
