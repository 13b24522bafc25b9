"""The life of a Producer, Consumer or Admin: it is started once, used in one event loop, and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import ClassVar, Literal, Self

from minibroker.client.cluster.calls import Calls
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.context_managers import Asynchronous
from minibroker.client.errors import AuthenticationFailed, ClientCrashed, Closed
from minibroker.client.security import Security, protection
from minibroker.client.tasks import weakly
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world import World


class Client(Asynchronous):
    """The base class of Producer, Consumer and Admin. They override `_reach`, `_go`, `_tell` and `_was_dropped`. The
    producer and the consumer also override `close`, since they have work to finish first.

    The state is an attribute of the client itself, since `send` looks at it for each record.
    """

    _noun: ClassVar[str]
    """Its name in error messages."""
    _state: Literal["not started", "starting", "running", "closing", "closed", "crashed"] = "not started"
    _crash: BaseException | None = None

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        client_id: str,
        request_timeout_ms: float,
        retry_backoff_ms: float,
        metadata_max_age_ms: float,
        world: World | None,
        security: Security,
    ) -> None:
        self._runtime = ClientRuntime(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
            protection=protection(type(self).__name__, security),
            on_crash=weakly(self._crashed),
            on_cancelled=weakly(self._go),
        )
        self._calls = Calls()
        self._has_ended = asyncio.Event()
        """Set after `close`, in clients whose `close` takes time."""
        # Not a method: batches refer to it, and must not keep a dropped producer alive.
        self._check_loop = partial(self._runtime.check_loop, self._noun)

    async def start(self) -> None:
        """Reach a broker. Raises NetworkError naming every address and the reason if none answers within 2 s, or
        within 5 s if one is silent."""
        if self._state != "not started":
            raise Closed(f"the {self._noun} was started before and is {self._state}; make a new one")
        self._state = "starting"
        try:
            async with self._calls.begin(self._not_running):
                await self._reach()
            if self._state != "starting":  # it has crashed, or was closed meanwhile
                raise self._not_running()
        except BaseException:
            self._state = "closed"
            await self._runtime.close()
            raise
        self._state = "running"
        self._go()

    async def _reach(self) -> None:
        """Learn what the client needs before it can be used."""
        await self._runtime.start()

    def _go(self) -> None:
        """Start the background tasks: at the start, and again if the event loop has cancelled them."""

    def _tell(self) -> None:
        """Wake the coroutines that wait for this client, since it has crashed or was closed."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._runtime.is_gone(error):
            await self.close()

    async def close(self) -> None:
        """End all tasks and connections. Calls in progress raise Closed and send nothing more; requests that they sent
        may still be carried out. A second `close` does nothing."""
        if self._state != "closed":
            self._check_loop()
            self._state = "closed"
            self._calls.end()
            self._tell()
            await self._runtime.close()

    def __del__(self) -> None:
        if self._state not in ("not started", "closed"):
            self._was_dropped()

    def _was_dropped(self) -> None:
        """Clean up after a client that was dropped without `close`."""
        self._runtime.dropped(self, self._runtime.close)

    def _check_running(self) -> None:
        if self._state != "running":
            raise self._not_running()
        self._check_loop()

    def _crashed(self, error: BaseException) -> None:
        """Note that a task failed, because of a bug or because a broker has not accepted the client's credentials."""
        if self._crash is None:
            self._crash = error
            self._state = "crashed"
            self._calls.end()
            self._tell()

    def _not_running(self) -> MinibrokerError:
        if isinstance(self._crash, AuthenticationFailed):
            return self._crash.copy()
        if self._crash is not None:
            crashed = ClientCrashed(f"the {self._noun} stopped because of a bug: {self._crash!r}. Please report it")
            crashed.__cause__ = self._crash
            return crashed
        if self._state in ("closing", "closed"):
            return Closed(
                f"the {self._noun} is {self._state}: by `close`, of another task or thread perhaps, or the end of "
                "`with`"
            )
        return Closed(
            f"the {self._noun} is {self._state}: use it within `async with {type(self).__name__}(...)`, or call start()"
        )
