"""One connection to a broker: correlation ids, pipelining, time limits. For clients, followers and controllers.

Guarantees: requests leave in the order of `send`; every returned future ends exactly once (with a response, a
BrokerError, InvalidMessage, or NetworkError); a lost connection accepts no more requests. A request without a response
in time closes the connection, as in Kafka's NetworkClient: responses come in order, so the next ones would also be
late, and a slow broker cannot be distinguished from a dead one.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from minibroker.protocol import messages as m
from minibroker.protocol.apis import SASL_HANDSHAKE, Api, decode_response, decode_response_envelope, encode_request
from minibroker.protocol.connections.framing import FrameReader, FrameTooLarge, response_limit
from minibroker.protocol.connections.keepalive import OF_CLIENTS, Patience, keep_alive
from minibroker.protocol.connections.tls import TlsFailed
from minibroker.protocol.errors import BrokerError, InvalidMessage, NetworkError
from minibroker.protocol.world import Network

Request = TypeVar("Request", bound=m.Message)
Response = TypeVar("Response", bound=m.Message)

MAX_RESPONSE_BYTES = 256 * 1024 * 1024


_PERHAPS_TLS = (
    ': if that listener is SSL, give security_protocol="SSL" (security.protocol=SSL); if it is SASL_SSL or '
    "SASL_PLAINTEXT, give that and sasl_mechanism"
)
_PERHAPS_TLS_AND_SASL = ': if that listener is SASL_SSL, give security_protocol="SASL_SSL" (security.protocol=SASL_SSL)'
_PERHAPS_NO_CERTIFICATE = (
    "; perhaps it did not accept this client's certificate, or asks for one (ssl_certfile){}: the broker's log says why"
)
_PERHAPS_SASL = ", or is SASL_SSL (security_protocol, sasl_mechanism)"


_GIVEN_UP_S = 0.01
"""How often `hold` looks for the answer to a request whose caller does not wait for it any more."""


class RequestTimedOut(NetworkError):
    """The other side did not answer in time."""


class NotServed(NetworkError):
    """The other side was reached, but closed the connection before its first answer, or does not speak the protocol."""


class HandshakeFailed(NetworkError):
    """The other side was reached, but the TLS handshake failed. The text has the remedy."""


class Connection(asyncio.BufferedProtocol):
    """A connection, made by `open_connection`. It belongs to one event loop."""

    def __init__(
        self,
        address: str,
        client_id: str,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        patience: Patience = OF_CLIENTS,
    ) -> None:
        self.address = address
        self._client_id = client_id
        self._patience = patience
        self._reader = FrameReader(response_limit(max_response_bytes))
        self._has_answered = False
        self._is_encrypted = False
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, tuple[Api[Any, Any], asyncio.Future[Any], asyncio.TimerHandle | None]] = {}
        self._next_correlation_id = 0
        self._closed_because: str | None = None
        self._ends_with: type[NetworkError] = NetworkError
        self._loop = asyncio.get_running_loop()
        self._lost = self._loop.create_future()
        self._on_lost: Callable[[Connection], None] | None = None
        self._held: list[m.Buffer] | None = None
        """Requests that wait for `release`; None: they are written at once."""

    # -- the caller's side --

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    @property
    def closed_because(self) -> str | None:
        """Why the connection is closed; None if it is open."""
        return self._closed_because

    @property
    def in_flight(self) -> int:
        """Requests that wait for their response."""
        return len(self._pending)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of requests not yet passed to the operating system: the only backpressure with acks 0."""
        held = sum(map(len, self._held or ()))
        return held + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def on_lost(self, listener: Callable[["Connection"], None]) -> None:
        """Call `listener` once, when the connection has ended for any reason."""
        self._on_lost = listener

    async def hold(self) -> None:
        """Keep new requests, except those that are `ahead`, until `release`. Return when all earlier ones are
        answered, or the connection has ended."""
        self._held = []
        last = next(reversed(self._pending), None)
        while last is not None and last in self._pending:
            answer = self._pending[last][1]
            if answer.done():  # its caller has given up
                await asyncio.sleep(_GIVEN_UP_S)
            else:
                await asyncio.wait([answer])

    def release(self) -> None:
        """Write what `hold` has kept."""
        held, self._held = self._held or [], None
        if self._transport is not None and not self.closed:
            self._transport.writelines(held)

    def send(
        self, api: Api[Request, Response], body: Request, *, timeout_s: float | None = None, ahead: bool = False
    ) -> asyncio.Future[Response]:
        """Write a request now and return a future of its response. Raises NetworkError if the connection is gone.
        `ahead`: even during `hold`."""
        transport = self._usable(api)
        correlation_id = self._next_correlation_id
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        future: asyncio.Future[Response] = self._loop.create_future()
        timer = None
        if timeout_s is not None:
            timer = self._loop.call_later(timeout_s, self._timed_out, api, timeout_s)
        self._pending[correlation_id] = (api, future, timer)
        self._write(transport, encode_request(api, correlation_id, self._client_id, body), ahead)
        return future

    def send_and_forget(self, api: Api[Request, Any], body: Request) -> None:
        """Write a request that has no response (Produce with acks 0)."""
        transport = self._usable(api)
        correlation_id = self._next_correlation_id
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        self._write(transport, encode_request(api, correlation_id, self._client_id, body), False)

    async def request(
        self, api: Api[Request, Response], body: Request, *, timeout_s: float | None = None, ahead: bool = False
    ) -> Response:
        """Send a request and return its response. Raises NetworkError, RequestTimedOut, BrokerError, InvalidMessage."""
        return await self.send(api, body, timeout_s=timeout_s, ahead=ahead)

    def close(self, reason: str = "closed here", ends_with: type[NetworkError] = NetworkError) -> None:
        """Drop the connection; pending requests fail with `ends_with`."""
        if self._closed_because is None:
            self._closed_because = reason
            self._ends_with = ends_with
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._lost)

    def _usable(self, api: Api[Any, Any]) -> asyncio.Transport:
        if self._transport is None or self._closed_because is not None:
            raise NetworkError(
                f"the connection to {self.address} is gone ({self._closed_because}); {api.name} not sent"
            )
        return self._transport

    def _write(self, transport: asyncio.Transport, data: m.Buffer, ahead: bool) -> None:
        if self._held is None or ahead:
            transport.write(data)
        else:
            self._held.append(data)

    def _timed_out(self, api: Api[Any, Any], timeout_s: float) -> None:
        self.close(f"no answer to {api.name} within {timeout_s:.3g} s", RequestTimedOut)

    # -- the transport's side --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._is_encrypted = transport.get_extra_info("ssl_object") is not None
        keep_alive(transport, self._patience)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.buffer_updated(nbytes):
                self._frame(frame)
        except FrameTooLarge as error:
            why = str(error)
            if error.prefix.startswith(b"/1."):  # after "HTTP", which was read as the frame's length
                why = "it speaks HTTP, as a broker's metrics port does"
            self.close(f"it does not speak this protocol: {why}", NotServed)
        except InvalidMessage as error:
            self.close(f"it does not speak this protocol: {error}", NotServed)

    def _frame(self, frame: bytes | memoryview) -> None:
        self._has_answered = True
        envelope = decode_response_envelope(frame)
        entry = self._pending.pop(envelope.correlation_id, None)
        if entry is None:
            raise InvalidMessage(f"a response to request {envelope.correlation_id}, which does not wait for one")
        api, future, timer = entry
        if timer is not None:
            timer.cancel()
        if future.done():
            return
        try:
            future.set_result(decode_response(api, envelope))
        except BrokerError as error:
            _fail(future, error)
        except InvalidMessage as error:
            _fail(future, error)
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed_because is None:
            self._closed_because = f"lost: {exc}" if exc else "closed by the other side"
            if self._pending and not self._has_answered:
                self._closed_because += f" before its first answer{self._perhaps()}"
                self._ends_with = NotServed
        for api, future, timer in self._pending.values():
            if timer is not None:
                timer.cancel()
            if not future.done():
                _fail(future, self._ends_with(f"{api.name} to {self.address}: {self._closed_because}"))
        self._pending.clear()
        if not self._lost.done():
            self._lost.set_result(None)
        if self._on_lost is not None:
            self._on_lost(self)

    def _perhaps(self) -> str:
        """Return how the protection of this connection may differ from the listener's."""
        uses_sasl = any(api is SASL_HANDSHAKE for api, _, _ in self._pending.values())
        if self._is_encrypted:
            return _PERHAPS_NO_CERTIFICATE.format("" if uses_sasl else _PERHAPS_SASL)
        return _PERHAPS_TLS_AND_SASL if uses_sasl else _PERHAPS_TLS


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    future.set_exception(error)
    future.exception()  # no warning if the future is never awaited; awaiting it still raises


async def open_connection(
    network: Network,
    host: str,
    port: int,
    *,
    client_id: str,
    timeout_s: float,
    max_response_bytes: int = MAX_RESPONSE_BYTES,
    patience: Patience = OF_CLIENTS,
) -> Connection:
    """Connect to a broker. Raises NetworkError with the address and the reason (refused, unknown name, time-out)."""
    address = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            return await network.connect(
                host, port, lambda: Connection(address, client_id, max_response_bytes, patience)
            )
    except TimeoutError as error:
        raise NetworkError(f"connecting to {address}: no answer within {timeout_s:.3g} s") from error
    except TlsFailed as error:
        raise HandshakeFailed(f"connecting to {address}: {error}") from error
    except OSError as error:
        raise NetworkError(f"connecting to {address}: {error.strerror or error}") from error
