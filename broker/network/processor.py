"""Processors, and the connections that they own: bytes to requests, responses to bytes (Kafka's Processor).

The problem. A connection is driven from four sides: its socket brings bytes, its socket stops taking bytes, a
handler returns, somebody answers a request that was handled long ago. Whatever happens, requests must reach their
handlers in the order in which they were sent, and a peer that sends too fast, too slowly, nonsense or nothing
must cost little.

The choice. Frames that were cut go to the connection's backlog. One method, `_advance`, dispatches the next one if
nothing forbids it, and lets the socket be read or not; every event changes some state and calls it. What forbids
dispatching:

- **mute**: the previous request is queued or its handler has not returned (Kafka: is not answered);
- the request channel is full: the connection stands in line and is not read from;
- too many requests, or bytes of requests, of this connection are unanswered; or its responses are not being read
  (the transport has called `pause_writing`): it is not read from either, so the peer's own socket fills up.

While a connection is merely muted it is read ahead, up to READ_AHEAD_BYTES: a pipelining peer whose requests are
handled in one go then never costs the two system calls of pausing and resuming.

Bad input ends a connection, with one log line and, where the request's correlation id can be read, an error
response. What was sent before it is handled first, since a peer may take the absence of an answer for a failure of
that request. Likewise, what a peer sent before it closed the connection is handled: a producer with acks=0 may do
so. Only then, answers to it are dropped.

Deadlines (a frame that does not get finished, responses that are not read, idleness) are looked at by one periodic
sweep per processor. A timer per connection that is moved with every frame would cost more than the frame.

Responses are written one by one: uvloop joins what was written during a turn of the loop into one system call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from broker.network.metrics import NetworkMetrics
from broker.network.request_channel import Request, RequestChannel
from broker.network.settings import NetworkSettings
from protocol import apis
from protocol.errors import ErrorCode, InvalidMessage
from protocol.framing import FrameReader, FrameTooLarge, correlation_id_of, request_limit
from protocol.world import Incoming

logger = logging.getLogger("minibroker.network")

READ_AHEAD_BYTES = 128 * 1024
"""More than one read can bring in small frames, so that a single read never pauses a connection."""

RESPONSE_HIGH_WATER_BYTES = 1024 * 1024
"""Unsent bytes from which on a connection is not read from any more, until a quarter of them is left."""

_PREFIX = 16  # bytes of a frame in which its correlation id stands


def _accepted_apis(plane: apis.Plane) -> dict[int, apis.Api[apis.Any, apis.Any]]:
    """What a listener of this plane accepts. ApiVersions is for everybody who connects."""
    return {key: api for key, api in apis.APIS.items() if api.plane is plane or api is apis.API_VERSIONS}


class Processor:
    """Owns connections of one listener. Guarantees that each is closed when its time is up, and at `close`."""

    def __init__(
        self,
        listener: str,
        plane: apis.Plane,
        channel: RequestChannel,
        settings: NetworkSettings,
        metrics: NetworkMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.listener = listener
        self.plane = plane
        self.channel = channel
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.apis = _accepted_apis(plane)
        # The control plane's requests come from brokers and speak of every partition that there is.
        large = {key for key, api in self.apis.items() if api is apis.PRODUCE or api.plane is apis.Plane.CONTROL}
        self.limit_of = request_limit(settings.socket_request_max_bytes, frozenset(large))
        self.connections: dict[Connection, None] = {}
        self._nobody_left = asyncio.Event()
        self._nobody_left.set()
        self._sweep_timer: asyncio.TimerHandle | None = None

    async def adopt(self, incoming: Incoming, on_lost: Callable[[], None]) -> None:
        """Take over a connection. Raises OSError, and then does not call `on_lost`."""
        await incoming.attach(lambda: Connection(self, incoming.peer, on_lost))

    def start(self) -> None:
        """Begin to look at deadlines."""
        self._sweep_timer = asyncio.get_running_loop().call_later(self._sweep_interval_s(), self._sweep)

    def stop_reading(self) -> None:
        """Dispatch nothing more, and leave the connections open for what is still being answered."""
        for connection in list(self.connections):
            connection.stop_reading()

    async def close(self, grace_s: float) -> None:
        """Close every connection; those whose responses are not read within `grace_s` lose them."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in list(self.connections):
            connection.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._nobody_left.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
            await self._nobody_left.wait()

    def joined(self, connection: Connection) -> None:
        self.connections[connection] = None
        self._nobody_left.clear()
        self.metrics.connections_opened += 1

    def left(self, connection: Connection) -> None:
        del self.connections[connection]
        if not self.connections:
            self._nobody_left.set()

    def _sweep_interval_s(self) -> float:
        settings = self.settings
        shortest_ms = min(settings.frame_timeout_ms, settings.write_timeout_ms, settings.connections_max_idle_ms)
        return min(1.0, max(0.005, shortest_ms / 4_000))

    def _sweep(self) -> None:
        now = self.clock()
        for connection in list(self.connections):
            connection.check_deadlines(now)
        self.start()


class Connection(asyncio.BufferedProtocol):
    """One connection, from `connection_made` until all that it sent has been handled. See the module's essay."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_closing_since",
        "_frame_since",
        "_in_line",
        "_last_active",
        "_muted",
        "_on_lost",
        "_processor",
        "_reader",
        "_reading_paused",
        "_refusal",
        "_stopped",
        "_transport",
        "_unanswered",
        "_unanswered_bytes",
        "_write_paused_since",
        "closed",
        "listener",
        "peer",
    )

    def __init__(self, processor: Processor, peer: str, on_lost: Callable[[], None]) -> None:
        self.peer = peer
        self.listener = processor.listener
        self.closed = False
        """Nothing can be sent any more, because either side has closed."""
        self._processor = processor
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(processor.limit_of)
        self._backlog: deque[tuple[bytes | memoryview, float]] = deque()
        self._backlog_bytes = 0
        self._muted = False
        self._in_line = False
        self._stopped = False
        self._refusal: tuple[str, int | None] | None = None
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._reading_paused = False
        self._write_paused_since: float | None = None
        self._frame_since: float | None = None
        self._closing_since: float | None = None
        self._last_active = 0.0

    def __repr__(self) -> str:
        return f"<connection of {self.peer} to {self.listener}>"

    # -- the transport's side --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=RESPONSE_HIGH_WATER_BYTES)
        self._transport = transport
        self._last_active = self._processor.clock()
        self._processor.joined(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        now = self._processor.clock()
        self._last_active = now
        try:
            frames = self._reader.buffer_updated(nbytes)
        except FrameTooLarge as error:
            frames = error.frames
            self._refusal = (str(error), correlation_id_of(error.prefix))
        if not self._reader.in_frame:
            self._frame_since = None
        elif frames or self._frame_since is None:
            self._frame_since = now
        for frame in frames:
            self._backlog.append((frame, now))
            self._backlog_bytes += len(frame)
        self._advance(wake=True)

    def eof_received(self) -> None:
        # The transport closes itself now. As in Kafka, a peer that has ended its side is taken to be gone.
        self._end()

    def pause_writing(self) -> None:
        self._write_paused_since = self._processor.clock()
        self._update_reading()

    def resume_writing(self) -> None:
        self._write_paused_since = None
        self._advance(wake=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing_since is None or self._frame_since is None:
            pass
        self._end()
        self._transport = None
        self._write_paused_since = None
        self._processor.left(self)
        self._on_lost()
        self._advance(wake=True)
