"""Serves the metrics over HTTP: GET /metrics on a listener of its own, inside the broker's event loop.

The problem. The exported values belong to the event loop. `prometheus_client.start_http_server`, whose thread reads
while the loop writes, would race with it, and could not run in the simulation. An ASGI server would be a second set of
tasks, limits and signal handlers beside the broker's, for one page.

The choice. h11, a strict parser of HTTP/1.1 without I/O, parses and formats, and this module moves the bytes through
the World's network. Every connection serves one request and has TIMEOUT_S in total for sending it, waiting, and reading
the answer. There are never more than MAX_CONNECTIONS, and none may send more than MAX_REQUEST_BYTES of head. Scrapes
are rendered one after the other, so many scrapers cost the broker's clients no more than one at a time.

After its answer, a connection closes its sending side, then reads and discards until the peer has closed its side as
well. If it were closed with unread bytes, the operating system would send a reset, which can destroy the answer on its
way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import cast

import h11

from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import Incoming, Listener, Network

logger = logging.getLogger("minibroker.metrics")

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_CONNECTIONS = 16
MAX_REQUEST_BYTES = 8 * 1024
PIECE_BYTES = 1024
MAX_DISCARDED_BYTES = 1024 * 1024
"""Bytes discarded after a request, such as an unexpected body, before the connection is aborted."""
TIMEOUT_S = 10.0


class MetricsListener:
    """Awaits `render` for the text of each scrape, never twice at a time. Use: `bind`, `start`, `close`."""

    def __init__(self, network: Network, render: Callable[[], Awaitable[bytes]]) -> None:
        self._network = network
        self._render = render
        self._listener: Listener | None = None
        self._connections: dict[_Connection, None] = {}
        self._attaching: dict[asyncio.Task[None], None] = {}
        self._rendering = asyncio.Lock()
        self._nobody_left = asyncio.Event()
        self._nobody_left.set()

    async def bind(self, host: str, port: int) -> None:
        """Bind the address. Port 0 takes a free port. Raises NetworkError with the remedy."""
        try:
            self._listener = await self._network.listen(host, port)
        except OSError as error:
            raise NetworkError(
                f"metrics.listener cannot listen on {host}:{port}: {error.strerror or error}. Give it a free port of "
                f"this machine, 0 for any, or leave it empty to serve no metrics"
            ) from error

    @property
    def port(self) -> int | None:
        """The port; None before `bind`."""
        return None if self._listener is None else self._listener.port

    def start(self) -> None:
        """Begin to accept connections."""
        assert self._listener is not None
        self._listener.start(self._accept)

    async def close(self) -> None:
        """Close the listener and all connections, and wait for all tasks."""
        if self._listener is not None:
            await self._listener.close()
        for task in self._attaching:
            task.cancel()
        await asyncio.gather(*self._attaching, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        await self._nobody_left.wait()

    def _accept(self, incoming: Incoming) -> None:
        if len(self._connections) + len(self._attaching) >= MAX_CONNECTIONS:
            logger.warning("%s refused: %d connections are open", incoming.peer, MAX_CONNECTIONS)
            incoming.close()
            return
        task = asyncio.get_running_loop().create_task(self._attach(incoming), name=f"metrics for {incoming.peer}")
        self._attaching[task] = None
        task.add_done_callback(lambda task: self._attaching.pop(task))

    async def _attach(self, incoming: Incoming) -> None:
        try:
            await incoming.attach(lambda: _Connection(self, incoming.peer))
        except OSError as error:
            logger.info("%s disconnected before it was accepted: %s", incoming.peer, error)

    # -- for its connections --

    def joined(self, connection: _Connection) -> None:
        self._connections[connection] = None
        self._nobody_left.clear()

    def left(self, connection: _Connection) -> None:
        del self._connections[connection]
        if not self._connections:
            self._nobody_left.set()

    async def text(self) -> bytes:
        async with self._rendering:
            return await self._render()


class _Connection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, listener: MetricsListener, peer: str) -> None:
        self._listener = listener
        self._peer = peer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._scrape: asyncio.Task[None] | None = None
        self._request: h11.Request | None = None
        self._answered = False
        self._peer_ended = False
        self._discarded_bytes = 0

    # -- the transport's side --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self._time_is_up)
        self._listener.joined(self)

    def data_received(self, data: bytes) -> None:
        # in small pieces, because h11 checks the limit only while the head is incomplete
        position = 0
        while position < len(data) and self._request is None and not self._answered:
            self._receive(data[position : position + PIECE_BYTES])
            position += PIECE_BYTES
        self._discarded_bytes += max(0, len(data) - position)
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.abort()

    def eof_received(self) -> bool:
        """Keep the connection open for the answer, which the peer may still expect."""
        self._peer_ended = True
        if self._request is None and not self._answered:
            self._receive(b"")
        return not self._answered

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._timer is not None
        self._timer.cancel()
        if self._scrape is not None:
            self._scrape.cancel()
        self._transport = None
        self._listener.left(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _time_is_up(self) -> None:
        logger.info("%s, closed: its request and the answer took more than %g s", self._peer, TIMEOUT_S)
        self.abort()

    # -- inside --

    def _receive(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            logger.info("%s sent bad HTTP: %s", self._peer, error)
            self._answer_with_text(HTTPStatus(error.error_status_hint), str(error))
            return
        if isinstance(event, h11.Request):
            self._request = event
            self._serve(event)
        elif isinstance(event, h11.ConnectionClosed):
            self.abort()

    def _serve(self, request: h11.Request) -> None:
        path = request.target.partition(b"?")[0].decode("ascii")
        if path != PATH:
            self._answer_with_text(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}")
        elif request.method not in (b"GET", b"HEAD"):
            self._answer_with_text(
                HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are supported here", [("Allow", "GET, HEAD")]
            )
        else:
            self._scrape = asyncio.get_running_loop().create_task(self._answer_scrape(), name="scrape")

    async def _answer_scrape(self) -> None:
        try:
            text = await self._listener.text()
        except Exception:  # logged and answered: failing metrics must not stop the broker
            logger.exception("the metrics could not be rendered")
            self._answer_with_text(HTTPStatus.INTERNAL_SERVER_ERROR, "see the broker's log")
        else:
            self._answer(HTTPStatus.OK, text, [("Content-Type", CONTENT_TYPE)])

    def _answer_with_text(self, status: HTTPStatus, text: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._answer(status, f"{text}\n".encode(), [("Content-Type", "text/plain; charset=utf-8"), *headers])

    def _answer(self, status: HTTPStatus, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
        if self._transport is None:
            return
        self._answered = True
        all_headers = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
        events: list[h11.Event] = [
            h11.Response(status_code=status, headers=all_headers, reason=status.phrase),
            h11.EndOfMessage(),
        ]
        if self._request is None or self._request.method != b"HEAD":
            events.insert(1, h11.Data(data=body))
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        if self._peer_ended or not self._transport.can_write_eof():  # TLS ends both directions at once
            self._transport.close()
        else:
            self._transport.write_eof()
