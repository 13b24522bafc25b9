"""What the blocking Producer, Consumer and Admin have in common: an asynchronous client, and the thread in which it
lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, NoReturn, Self, TypeVar

from minibroker.client import log
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.context_managers import Blocking
from minibroker.client.errors import ApiTimedOut, Closed, records_were
from minibroker.client.log import Logger
from minibroker.client.settings import check_ms
from minibroker.client.sync.background import LOG_PATIENCE_S, Background
from minibroker.protocol.errors import MinibrokerError

T = TypeVar("T")
C = TypeVar("C", bound=Client)

THREAD_END_S = 5.0
"""How long `close` waits for the thread once all else is closed: it only closes its loop."""

logger = Logger("minibroker.client", defers=True)

Coroutines = Callable[[], Coroutine[Any, Any, T]]


def within(make: Coroutines[T], timeout_ms: float | None, otherwise: str, is_idle: Callable[[], bool]) -> Coroutines[T]:
    """The same, and ApiTimedOut if it takes longer. Where it has nothing to wait for when it begins (`is_idle`), it
    comes to its end, even with 0 ms."""
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
    """How an asynchronous client is closed, in its loop. It does not know the facade, which may be gone by then."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def close(self) -> None:
        await self._client.close()

    async def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The end of `with`."""
        await self._client.__aexit__(kind, error, traceback)

    async def see_off(self, background: Background) -> None:
        """For a client that nobody closes any more: soon, and with the thread."""
        try:
            await self.leave(SystemExit, SystemExit(), None)
        finally:
            background.stop_soon()

    def finish(self) -> None:
        """The loop is over."""


class Facade(Blocking, Generic[C]):
    """A client for scripts and threads. Its calls wait for what the asynchronous client does, in a thread of its
    own."""

    _noun: ClassVar[str]

    def __init__(self, client: C, ending: Ending | None = None) -> None:
        self._client = client
        self._ending = Ending(client) if ending is None else ending
        self._state: Literal["not started", "running", "closing", "closed", "forked"] = "not started"
        self._background = Background(self._noun, self._was_forked, self._begin_to_exit)

    def start(self) -> None:
        """Reach a broker. Raises NetworkError naming every address and the reason if none answers within 2 s."""
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
        nothing; nor does one in a forked child."""
        self._end(self._ending.close, self._serve)

    def _end(self, end: Coroutines[None], serve: Callable[[], None] | None = None) -> None:
        """Close, and end the thread, whatever happens. `serve` is what this thread does for the client meanwhile."""
        if self._state != "running":
            return
        self._state = "closing"
        try:
            self._background.call(end, serve)
        finally:
            if self._state == "closing":  # and this is not a child that was forked meanwhile
                self._state = "closed"
                self._background.stop(THREAD_END_S)
                self._ending.finish()
                log.wait(LOG_PATIENCE_S)

    def _serve(self) -> None:
        """Do what the client wants done in a thread of its user's."""

    def _call(self, make: Coroutines[T], serve: Callable[[], None] | None = None) -> T:
        """Run a coroutine of the client's, and wait for it."""
        if self._state not in ("running", "closing"):  # what `close` calls may call the client
            raise self._not_running()
        return self._background.call(make, serve)

    def _do(self, work: Callable[[], T]) -> T:
        """Run it in the client's loop, and wait for it."""

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

    # -- when nobody closes it --

    def _unacknowledged(self) -> int:
        """Records that may be lost now."""
        return 0

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") == "running":  # none: the constructor has raised
            with suppress(Closed):
                self._background.begin(partial(self._ending.see_off, self._background))
            self._warn("was dropped without `close`", self._unacknowledged())

    def _begin_to_exit(self) -> Callable[[], None] | None:
        """The interpreter ends, and nobody has closed the client. Returns what to call if it does not end in time."""
        if self._state != "running":
            return None
        self._state = "closed"
        with suppress(Closed):
            self._background.begin(partial(self._ending.see_off, self._background))
        with suppress(ResourceWarning):  # made an error; there is nobody left to whom it could go
            self._warn("was not closed before the interpreter ended", 0)
        return self._did_not_exit

    def _did_not_exit(self) -> None:
        with suppress(ResourceWarning):
            self._warn("was not closed before the interpreter ended, and is busy", self._unacknowledged())

    def _warn(self, text: str, records: int) -> None:
        text = f"{self!r} {text}"
        if records:  # a ResourceWarning is not shown by default
            logger.warning("%s: %s not acknowledged, and may never be sent", text, records_were(records))
        logger.resource_warning(text, source=self)

    def _was_forked(self) -> object:
        """This is a child, in which nothing works for this client."""
        self._state = "forked"
        self._client._state = "closed"  # it need not warn here that it was dropped
        return self._client, self._ending
