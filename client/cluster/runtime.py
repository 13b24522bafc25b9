"""The common parts of Producer, Consumer and Admin: a World, connections, metadata, background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from math import inf
from typing import TypeVar

from minibroker.client.cluster.connections import OVERDUE_S, Connections, Purpose
from minibroker.client.cluster.metadata import Metadata
from minibroker.client.cluster.retries import Retries
from minibroker.client.errors import WrongEventLoop
from minibroker.client.log import Logger
from minibroker.client.security import UNPROTECTED, Protection
from minibroker.client.settings import Address, check_ms, check_text, parse_bootstrap
from minibroker.client.stalls import Stalls
from minibroker.client.tasks import BackgroundTasks
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Api
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import World
from minibroker.protocol.world.real import RealWorld

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)

logger = Logger("minibroker.client")

MAX_CLIENT_ID = 249
START_PATIENCE_S = 2.0
"""`start` tries to reach a broker for this long. A cluster that is starting answers within that time, and users with a
mistyped address should not wait longer."""
SILENCE_PATIENCE_S = 5.0
"""`start` waits for an answer for this long if a broker is silent: it, or this program, may be short of CPU time."""


class ClientRuntime:
    """The parts of one client. `on_crash` is called if one of its tasks fails because of a bug.

    `on_cancelled` starts the client's tasks again, if the client is used after the event loop has cancelled them.
    `asyncio.run` cancels all tasks at its end, and a call in a `finally` would wait for them for ever.

    The constructor raises InvalidSetting, and starts nothing.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        client_id: str,
        request_timeout_ms: float,
        retry_backoff_ms: float,
        metadata_max_age_ms: float,
        world: World | None,
        on_crash: Callable[[BaseException], None],
        on_cancelled: Callable[[], None] | None = None,
        protection: Protection = UNPROTECTED,
    ) -> None:
        addresses = parse_bootstrap(bootstrap)
        check_text("client_id", client_id, MAX_CLIENT_ID)
        self.bootstrap = ",".join(map(str, addresses))
        self.request_timeout_s = check_ms("request_timeout_ms", request_timeout_ms, lowest=1)
        self.retry_backoff_s = check_ms("retry_backoff_ms", retry_backoff_ms, lowest=1)
        self.metadata_max_age_s = check_ms("metadata_max_age_ms", metadata_max_age_ms, lowest=1)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop in which the client was started; None before that."""
        self._ending: asyncio.Task[None] | None = None
        self._own_world: RealWorld | None = None
        if world is None:
            world = self._own_world = RealWorld()
        self.world = world
        self.clock = self.world.clock
        self.tasks = BackgroundTasks(on_crash)
        self._on_cancelled = on_cancelled
        self._were_cancelled = False
        self.protection = protection
        self.connections = Connections(
            self.world, self.tasks, client_id=client_id, backoff_s=self.retry_backoff_s, protection=protection
        )
        self.metadata = Metadata(
            self.world,
            self.connections,
            addresses,
            request_timeout_s=self.request_timeout_s,
            retry_backoff_s=self.retry_backoff_s,
            max_age_s=self.metadata_max_age_s,
        )

    async def start(self) -> None:
        """Reach a broker and begin to keep metadata fresh. Raises NetworkError naming every address and the reason."""
        self._loop = asyncio.get_running_loop()
        await self.metadata.first_refresh(START_PATIENCE_S, SILENCE_PATIENCE_S)
        self.go_on()

    def go_on(self) -> None:
        """Keep metadata fresh."""
        self.tasks.start(self.metadata.run(), "metadata")

    def retries(self, timeout_s: float = inf, what: str | None = None) -> Retries:
        """Return the retries of a call that has `timeout_s`. See Retries for `what`."""
        return Retries(self.world, self.connections.client_id, self.retry_backoff_s, timeout_s, what)

    @property
    def loop_is_ending(self) -> bool:
        """Whether the event loop has cancelled the client's tasks, so that little time is left."""
        return self._were_cancelled or self.tasks.are_cancelled

    def check_loop(self, who: str) -> None:
        """Check the event loop of a call that needs the client's tasks, and start these again if the event loop has
        cancelled them. Raises WrongEventLoop outside the loop of `start`, where the call would wait for ever."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop or self._loop is None:
            if self.tasks.are_cancelled and self._on_cancelled is not None:
                self._were_cancelled = True
                self.tasks.replace_all()
                self.go_on()
                self._on_cancelled()
            return
        here = "no event loop runs in this thread" if running is None else "this is another event loop"
        remedy = (
            "That loop is closed, and what had not been acknowledged by then is not sent"
            if self._loop.is_closed()
            else "From another thread, call asyncio.run_coroutine_threadsafe with the loop in which it was started"
        )
        raise WrongEventLoop(
            f"the {who} lives in the event loop in which it was started, and {here}. {remedy}. "
            f"Make one {who} for each event loop (each asyncio.run has its own), and close it there"
        )

    def is_gone(self, error: BaseException | None) -> bool:
        """Return whether `async with` ends because its coroutine is destroyed after the loop was closed. Nothing can be
        awaited then; `__del__` reports that the client was not closed."""
        return isinstance(error, GeneratorExit) and self._loop is not None and self._loop.is_closed()

    def usable_at(self, address: Address, purpose: Purpose, now: float) -> float | None:
        """Return when to try again to connect to a leader, if nothing happens before.

        If the attempt to connect has failed or takes long, another broker may lead by now, so other brokers are asked
        for metadata.
        """
        began = self.connections.attempt_began(address, purpose)
        if began is not None and now < began + OVERDUE_S:
            return began + OVERDUE_S
        self.metadata.suspect(address)
        self.metadata.request_refresh()
        return now + OVERDUE_S if began is not None else self.connections.retry_at(address, purpose)

    async def connection_soon(self, address: Address, purpose: Purpose = Purpose.REQUESTS) -> Connection:
        """Return a connection. Raises NetworkError, also after OVERDUE_S: the attempt to connect then continues, for
        later calls."""
        now = self.clock.monotonic()
        began = self.connections.attempt_began(address, purpose)
        try:
            async with asyncio.timeout(max(0.0, OVERDUE_S if began is None else began + OVERDUE_S - now)):
                return await self.connections.open(address, purpose)
        except TimeoutError:
            raise NetworkError(f"connecting to {address}: no answer yet") from None

    async def ask(
        self,
        connection: Connection,
        api: Api[Request, Response],
        body: Request,
        *,
        timeout_s: float,
        is_in_charge: Callable[[], bool],
    ) -> Response:
        """`connection.request`, but if the answer is overdue and metadata shows that another broker is in charge, close
        the connection. Raises as `Connection.request`."""
        answer = connection.send(api, body, timeout_s=timeout_s)
        stalls: Stalls[str] = Stalls(self.connections.client_id)
        waiting = {api.name: f"{connection.address} has not answered yet"}
        while not answer.done():
            stalls.look(self.clock.monotonic(), waiting, waiting.__getitem__)
            await asyncio.wait([answer], timeout=OVERDUE_S)
            if not answer.done():
                self.metadata.request_refresh()
                if not is_in_charge():
                    connection.close(f"no answer to {api.name} yet, and another broker is in charge", RequestTimedOut)
                    await asyncio.wait([answer])
        result = answer.result()
        stalls.look(self.clock.monotonic(), (), waiting.__getitem__)
        return result

    def dropped(self, client: object, then: Callable[[], Coroutine[object, object, None]], records: int = 0) -> None:
        """Warn about an open client that is deleted with that many unacknowledged records, and run `then` in the
        client's loop, if it still exists. Any thread may call this, since the garbage collector may run in any."""
        loop = None if self._loop is None or self._loop.is_closed() else self._loop

        def start() -> None:
            assert loop is not None
            self._ending = loop.create_task(then(), name="end of a dropped client")

        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed by now
                loop.call_soon_threadsafe(start)
        text = f"{client!r} was dropped without `close`"
        if records:  # a ResourceWarning is not shown by default
            logger.warning("%s: %d records were not acknowledged, and may never be sent", text, records)
        logger.resource_warning(text, source=client)

    async def close(self) -> None:
        """End the tasks, then close the connections, even if this is cancelled."""
        try:
            await self.tasks.close()
        finally:
            try:
                await self.connections.close()
            finally:
                if self._own_world is not None:
                    self._own_world.close()
