"""Processors and their connections: from sockets to the request channel and back (Kafka's Processor).

The problem. Four kinds of events drive a connection: its socket receives bytes, its socket stops accepting bytes, a
handler returns, a request that was handled long ago is answered. In any case, requests must reach their handlers in the
order in which they were sent, and a peer that sends too fast, too slowly, invalid bytes or nothing must cost little.

The choice. Complete frames go to the connection's backlog. One method, `_advance`, dispatches the next frame if nothing
prevents it, and starts or stops reading from the socket; every event changes some state and calls it. These conditions
prevent dispatching:

- **mute**: the previous request is queued or its handler has not returned. (In Kafka: it is not answered. The same
  holds here for a dialect whose answers leave in order, except for requests that may overlap with others of their kind:
  their answers are held back until earlier ones have left, and nothing is dispatched while too many bytes are held.)
- The request channel is full: the connection stands in line and is not read from.
- The client is over a quota: nothing is dispatched or read for the throttle time (KIP-219).
- The client has failed to authenticate itself by SASL: the answer to that is delayed, and a connection that closed for
  a later request would give it away at once.
- Too many requests, or bytes of requests, of this connection are unanswered, or its responses are not being read (the
  transport has called `pause_writing`): it is not read from either, so the peer's own socket fills up.

While a connection is only muted, it is read ahead, up to a limit. A pipelining peer whose requests are handled
quickly then never costs the two system calls of pausing and resuming.

The connection's dialect (`dialect.py`) interprets the bytes; the first bytes choose it (`first_frame.py`).

Bad input ends a connection, with one log line and, if the request's correlation id can be read, an error response.
Earlier requests are handled first, since a peer may take a missing answer for a failure of its request. Likewise, some
of what has been read of a peer before it closed the connection is handled, since producers with acks=0 and members that
leave a group may do that (`backlog.py`). Until then the connection counts towards the limits: otherwise a stranger that
hangs up and connects again could leave any number of requests behind.

One periodic sweep per processor checks the deadlines (no first request, an incomplete frame, unread responses,
idleness). A timer per connection, moved with every frame, would cost more than the frame.

Responses that are given in the same turn of the loop leave together: neither asyncio nor uvloop joins several writes
into one system call, and a system call costs as much as the rest of a small request. But a response waits for others
only if others are likely: the backlog has more frames, or the response does not come from the connection's handler, as
when a purgatory completes several. Large responses are never copied to be joined: their pieces leave as they are, in
one call.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast

from minibroker.broker.network.backlog import Backlog
from minibroker.broker.network.dialect import Answer, BadInput, Dialect
from minibroker.broker.network.first_frame import FirstFrame
from minibroker.broker.network.kafka_dialect import KafkaDialect, KafkaListener
from minibroker.broker.network.metrics import ApiMetrics, NetworkMetrics, Summary
from minibroker.broker.network.native_dialect import NativeDialect, NativeListener
from minibroker.broker.network.ordered_answers import OrderedAnswers
from minibroker.broker.network.quotas import Connected, ConnectionQuotas
from minibroker.broker.network.request_channel import Gate, OnAnswer, Request, RequestChannel, Session
from minibroker.broker.network.settings import NetworkSettings
from minibroker.broker.network.unsent import UnsentAnswers
from minibroker.protocol.apis import BROKER_AUTHENTICATE, BROKER_HANDSHAKE, Api, Plane
from minibroker.protocol.messages import Buffer, ProduceRequest
from minibroker.protocol.principal import Principal
from minibroker.protocol.world import Incoming

logger = logging.getLogger("minibroker.network")

PrincipalOf = Callable[[Mapping[str, Any] | None], Principal | None]
"""Returns the principal of a client's certificate, None if the client is refused for it."""
_PROOFS = (BROKER_HANDSHAKE, BROKER_AUTHENTICATE)

RESPONSE_HIGH_WATER_BYTES = 1024 * 1024
"""The unsent bytes above which a connection is no longer read from, until only a quarter of them is left."""

LARGE_RESPONSE_BYTES = 64 * 1024

FIRST_REQUEST_S = 10.0
"""Seconds in which a connection must send its first valid request, and a broker prove who it is on the control plane.
Clients do so at once; until then a connection does nothing but keep others out. A client that has no request for its
connection after all, such as a consumer that was paused meanwhile, loses nothing: it connects again when it has one."""

STOOD_STILL_S = 3.0
"""A sweep that begins this long after the last one drops no connection. Sweeps come every second or more often."""


class Processor:
    """Owns connections of one listener. Guarantees that each is closed at its deadline, and at `close`."""

    def __init__(
        self,
        listener: str,
        plane: Plane,
        channel: RequestChannel,
        settings: NetworkSettings,
        metrics: NetworkMetrics,
        clock: Callable[[], float],
        principal_of: PrincipalOf | None = None,
        *,
        requires_proof: bool = False,
        new_gate: Callable[[], Gate] | None = None,
    ) -> None:
        """`principal_of` returns the principal of a connection by TLS; None: it has none by TLS. `requires_proof`: see
        `NativeListener`. `new_gate`: of a connection; None: the listener does not use SASL."""
        self.listener = listener
        self.plane = plane
        self.principal_of = principal_of
        self.requires_proof = requires_proof
        self.new_gate = new_gate
        self.shut_out = Summary(logger, listener, "closed")
        self.channel = channel
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        native = NativeListener(listener, plane, settings.socket_request_max_bytes, requires_proof=requires_proof)
        kafka = KafkaListener(settings.socket_request_max_bytes)
        self.new_dialect: Callable[[ServerConnection], Dialect] = lambda connection: FirstFrame(
            lambda: NativeDialect(native, connection.session.is_broker, _is_open(connection.session.gate)),
            lambda: KafkaDialect(kafka, _is_open(connection.session.gate)),
            connection.chose_dialect,
            settings.socket_request_max_bytes,
        )
        """Creates the dialect of a connection."""
        if plane is Plane.CONTROL:  # only brokers connect here, with our own dialect
            self.new_dialect = lambda connection: NativeDialect(native, connection.session.is_broker)
        self.new: set[Incoming] = set()
        """Accepted connections that wait for this processor."""
        self.connections: dict[ServerConnection, None] = {}
        self.unsent: UnsentAnswers | None = None
        """The answers of all data listeners; None: unbounded."""
        self._nobody_left = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._to_flush: list[ServerConnection] = []
        self._nobody_left.set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._swept_at = clock()

    async def adopt(self, incoming: Incoming, quotas: ConnectionQuotas, entering: Connected) -> None:
        """Take over a connection. In the quotas it takes the place of `entering`, and leaves them at its end. Raises
        OSError."""
        self.new.discard(incoming)
        await incoming.attach(lambda: ServerConnection(self, incoming.peer, quotas, entering))

    def start(self) -> None:
        """Begin to check deadlines."""
        self._sweep_timer = asyncio.get_running_loop().call_later(self._sweep_interval_s(), self._sweep)

    async def close(self, grace_s: float) -> None:
        """Close every connection. Responses that are not read within `grace_s` are lost."""
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

    def flush_soon(self, connection: ServerConnection) -> None:
        """Call `connection.flush` once the handlers are done in this turn of the loop."""
        self._to_flush.append(connection)
        if len(self._to_flush) == 1:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        to_flush, self._to_flush = self._to_flush, []
        for connection in to_flush:
            connection.flush()

    def call_soon(self, call: Callable[[], None]) -> None:
        self.loop.call_soon(call)

    def joined(self, connection: ServerConnection) -> None:
        self.connections[connection] = None
        self._nobody_left.clear()
        self.metrics.connections_opened += 1

    def left(self, connection: ServerConnection) -> None:
        del self.connections[connection]
        if not self.connections:
            self._nobody_left.set()

    def _sweep_interval_s(self) -> float:
        settings = self.settings
        shortest_ms = min(settings.frame_timeout_ms, settings.write_timeout_ms, settings.connections_max_idle_ms)
        return min(1.0, max(0.005, shortest_ms / 4_000))

    def _sweep(self) -> None:
        now = self.clock()
        # After a pause of the whole process, peers first get the time to be heard.
        if now - self._swept_at < STOOD_STILL_S:
            for connection in list(self.connections):
                connection.check_deadlines(now)
        self._swept_at = now
        self.start()


class ServerConnection(asyncio.BufferedProtocol):
    """One connection, from `connection_made` until all of its requests have been handled. See the head of this
    module."""

    __slots__ = (
        "_backlog",
        "_closed_here",
        "_closing_since",
        "_entering",
        "_has_large_outgoing",
        "_has_left",
        "_in_line",
        "_is_waiting",
        "_joined_at",
        "_last_active",
        "_muted",
        "_muted_until_answered",
        "_order",
        "_outgoing",
        "_overlaps",
        "_processor",
        "_quotas",
        "_reading_paused",
        "_software",
        "_throttle_timer",
        "_transport",
        "_unanswered",
        "_unanswered_bytes",
        "_unwritten",
        "_write_paused_since",
        "address",
        "closed",
        "dialect",
        "listener",
        "peer",
        "session",
    )

    def __init__(self, processor: Processor, peer: str, quotas: ConnectionQuotas, entering: Connected) -> None:
        self.peer = peer
        self.address = peer.rpartition(":")[0]
        self.listener = processor.listener
        self.session = Session()
        if processor.new_gate is not None:
            self.session.gate = processor.new_gate()
        self._order: OrderedAnswers[tuple[ApiMetrics, Answer | None, float]] | None = None
        self.chose_dialect(processor.new_dialect(self))
        self.closed = False
        """Whether either side has closed, so that nothing can be sent any more."""
        self._processor = processor
        self._quotas = quotas
        self._entering = entering
        self._is_waiting = True  # see `quotas`
        self._transport: asyncio.Transport | None = None
        self._backlog = Backlog()
        self._outgoing: list[Buffer] = []
        self._has_large_outgoing = False
        self._unwritten: list[tuple[ApiMetrics, float]] = []  # the times at which these answers were given
        self._muted = False
        self._muted_until_answered = False
        self._overlaps = False  # whether the last dispatched request may overlap
        self._in_line = False
        self._has_left = True  # it has not joined yet
        self._closed_here = False
        self._software: tuple[str, str] | None = None
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._reading_paused = False
        self._write_paused_since: float | None = None
        self._closing_since: float | None = None
        self._throttle_timer: asyncio.TimerHandle | None = None
        self._last_active = self._joined_at = 0.0

    def __repr__(self) -> str:
        return f"<connection of {self.peer} to {self.listener}>"

    # -- the transport's side --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(high=RESPONSE_HIGH_WATER_BYTES)
        self._last_active = self._joined_at = self._processor.clock()
        self._processor.joined(self)
        if self._processor.principal_of is not None:
            self._identify(self._processor.principal_of, transport.get_extra_info("peercert"))
        self._has_left = False
        self._quotas.joined(self, instead_of=self._entering)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.dialect.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        now = self._processor.clock()
        self._last_active = now
        self._backlog.received(nbytes, self, now)  # P1
        self._advance(wake=True)

    def eof_received(self) -> None:
        # The transport closes itself now. As in Kafka, a peer that has closed its sending side is considered gone.
        self._end()

    def pause_writing(self) -> None:
        self._write_paused_since = self._processor.clock()
        self._update_reading()

    def resume_writing(self) -> None:
        self._write_paused_since = None
        self._advance(wake=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._backlog.frame_since is not None and not self._closed_here:
            logger.info("%s on listener %s: closed by the peer in the middle of a frame", self.peer, self.listener)
        self._end()
        self._transport = None
        self._forget_outgoing()
        self._write_paused_since = None
        self._processor.metrics.client_software.remove(self._software)
        self._processor.left(self)
        self._backlog.skip(self.dialect, self._processor.clock)
        self._advance(wake=True)

    # -- the quotas' side --

    @property
    def idle_since(self) -> float | None:
        return self._last_active if self._is_idle() else None

    def give_way(self, reason: str) -> None:
        logger.info("%s on listener %s, closed in favour of a new connection: %s", self.peer, self.listener, reason)
        self.abort()

    def _is_idle(self) -> bool:
        is_asking = self._unanswered or self._backlog or self._in_line or self._backlog.frame_since is not None
        return not is_asking and self._throttle_timer is None

    # -- the channel's and the handlers' side --

    def proved_broker(self) -> None:
        self._is_waiting = False
        self._quotas.proved(self)

    def authenticated(self) -> None:
        if self._is_waiting and not self.closed:
            self._take_place()

    @property
    def on_answer(self) -> OnAnswer | None:
        return self._processor.channel.on_answer

    def throttle(self, seconds: float) -> None:
        if self.closed:
            return
        ends_at = self._processor.loop.time() + seconds
        if self._throttle_timer is not None:
            ends_at = max(ends_at, self._throttle_timer.when())
            self._throttle_timer.cancel()
        self._throttle_timer = self._processor.loop.call_at(ends_at, self._throttle_ended)
        self._update_reading()

    def _throttle_ended(self) -> None:
        self._throttle_timer = None
        self._last_active = self._processor.clock()
        self._advance(wake=True)

    def introduced(self, name: str, version: str) -> None:
        counts = self._processor.metrics.client_software
        counts.remove(self._software)
        self._software = counts.add(name, version)

    def answered(self, request: Request, answer: Answer | None) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= request.size
        of_api = self._processor.metrics.per_api[request.api.key]
        of_api.answered += 1
        of_api.total.add(request.sent_at - request.received_at)
        if request.handled_at:
            of_api.remote.add(request.sent_at - request.handled_at)
        if self._order is not None:
            size = 0 if answer is None else sum(map(len, answer))
            for each in self._order.answered(request.place, (of_api, answer, request.sent_at), size):
                self._give(*each)
        elif answer is not None:
            self._give(of_api, answer, request.sent_at)
        if self._muted_until_answered and not self._unanswered:
            self._muted = self._muted_until_answered = False
        if not self._muted:
            self._advance(wake=True)

    def handled(self, *, wake: bool) -> None:
        self._muted = self._muted_until_answered = (
            self._order is not None and self._unanswered > 0 and not self._overlaps
        )
        self._advance(wake=wake)

    def refused(self, bad_input: BadInput) -> None:
        self._backlog.drop(bad_input)

    def close_connection(self, reason: str) -> None:
        if not self.closed:
            logger.info("%s on listener %s, closed: %s", self.peer, self.listener, reason)
            self.close()

    def room_in_channel(self, size: int) -> None:
        self._in_line = False
        if self._backlog and self._may_dispatch():
            if len(self._backlog[0][0]) <= size:
                self._dispatch(wake=True)
            else:  # the connection was lost, and the frame that it stood for was dropped
                self._get_in_line()
        self._update_reading()
        self._leave_if_done()

    # -- the processor's side --

    def flush(self) -> None:
        """Write the pending responses."""
        outgoing = self._outgoing
        if not outgoing or self._transport is None or self._transport.is_closing():
            return
        if self._has_large_outgoing and self._processor.unsent is not None:
            self._processor.unsent.given(sum(map(len, outgoing)))
        if len(outgoing) == 1:
            self._transport.write(outgoing[0])
        elif self._has_large_outgoing:
            self._transport.writelines(outgoing)
        else:
            self._transport.write(b"".join(outgoing))
        now = self._processor.clock()
        for of_api, answered_at in self._unwritten:
            of_api.send_s += now - answered_at
        self._forget_outgoing()
        if self._write_paused_since is not None:
            unsent = self._transport.get_write_buffer_size()
            if unsent > self._processor.settings.max_unsent_response_bytes:
                self._drop(f"{unsent} bytes of responses are unread")

    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def drop_unsent(self, reason: str) -> None:
        self._drop(reason)

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its peer has exceeded a deadline."""
        settings = self._processor.settings
        write_timeout_s = settings.write_timeout_ms / 1_000
        if self._closing_since is not None:
            if now - self._closing_since >= write_timeout_s:
                self.abort()
        elif self._write_paused_since is not None:
            if now - self._write_paused_since >= write_timeout_s:
                self._drop(f"it has not read its responses for {write_timeout_s:g} s")
        elif self._backlog.frame_since is not None:
            if not self._reading_paused and now - self._backlog.frame_since >= settings.frame_timeout_ms / 1_000:
                self._drop(f"a frame was not complete after {settings.frame_timeout_ms / 1_000:g} s")
        elif self._is_waiting and self._has_deadline() and self._is_idle() and now - self._joined_at >= FIRST_REQUEST_S:
            what = "proved to be a broker" if self._processor.requires_proof else "sent a valid request"
            if self.session.gate is not None:
                what = "authenticated itself"
            self._drop(f"it has not {what} within {FIRST_REQUEST_S:g} s", logging.INFO)
        elif (
            self._processor.plane is Plane.DATA
            and self._throttle_timer is None
            and not self._unanswered
            and not self._backlog
            and now - self._last_active >= settings.connections_max_idle_ms / 1_000
        ):
            logger.debug("%s on listener %s: idle, closed", self.peer, self.listener)
            self._processor.metrics.idle_closed += 1
            self.close()

    def _has_deadline(self) -> bool:
        """Without proofs, a silent connection to the control plane may be a broker's crash detection."""
        return self._processor.plane is Plane.DATA or self._processor.requires_proof

    def chose_dialect(self, dialect: Dialect) -> None:
        """Use this dialect from now on."""
        self.dialect = dialect
        self._order = OrderedAnswers() if dialect.answers_in_order else None
        if dialect.send_buffer_bytes is not None:
            assert self._transport is not None
            connection = self._transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, dialect.send_buffer_bytes)

    def close(self) -> None:
        """Stop dispatching, and close once the peer has read all responses given so far."""
        self._end()
        self.flush()
        self._closed_here = True
        self._backlog.drop()
        if self._transport is not None:
            self._transport.close()
        self._leave_if_done()

    def abort(self) -> None:
        """Close now."""
        self.close()
        if self._transport is not None:
            self._transport.abort()

    # -- inside --

    def _give(self, of_api: ApiMetrics, answer: Answer | None, answered_at: float) -> None:
        """Send an answer, now or together with others, if there is one and the connection is open."""
        if answer is None or self.closed:
            return
        self._last_active = answered_at
        self._outgoing += answer
        self._unwritten.append((of_api, answered_at))
        self._has_large_outgoing = len(answer) > 1 or len(answer[0]) >= LARGE_RESPONSE_BYTES
        if (self._muted and not self._backlog) or self._has_large_outgoing:
            self.flush()
        elif len(self._unwritten) == 1:
            self._processor.flush_soon(self)

    def _forget_outgoing(self) -> None:
        self._outgoing = []  # the transport may still hold the list
        self._has_large_outgoing = False
        self._unwritten.clear()

    def _advance(self, *, wake: bool) -> None:
        """Dispatch the next frame if nothing prevents it, and start or stop reading."""
        if not self._muted and not self._in_line:
            if self._backlog:
                if self._may_dispatch() and not self._waits_for_answers():
                    if self._processor.channel.has_room(len(self._backlog[0][0])):
                        self._dispatch(wake)
                    else:
                        self._get_in_line()
            elif self._backlog.refusal is not None and not self._has_open_answers() and not self._has_failed():
                self._refuse(self._backlog.refusal)
        self._update_reading()
        self._leave_if_done()

    def _get_in_line(self) -> None:
        self._in_line = True
        self._processor.channel.get_in_line(self, len(self._backlog[0][0]))

    def _leave_if_done(self) -> None:
        """Stop counting the connection, if it is lost and has left nothing to handle."""
        if self.closed and self._transport is None and not self._backlog and not self._has_left:
            self._has_left = True
            self._quotas.left(self)

    def _may_dispatch(self) -> bool:
        settings = self._processor.settings
        return (
            self._write_paused_since is None
            and self._throttle_timer is None
            and self._unanswered < settings.max_in_flight_requests_per_connection
            and self._unanswered_bytes < settings.max_in_flight_bytes_per_connection
            and not self._has_failed()
            and (self._order is None or self._order.has_room(settings.max_in_flight_requests_per_connection))
        )

    def _has_failed(self) -> bool:
        return self.session.gate is not None and self.session.gate.has_failed

    def _waits_for_answers(self) -> bool:
        """Return whether the first frame of the backlog must wait until all earlier requests have been answered."""
        return self._order is not None and self._unanswered > 0 and not self.dialect.may_overlap(self._backlog[0][0])

    def _has_open_answers(self) -> bool:
        """Return whether answers must leave before anything else is sent."""
        return self._order is not None and self._order.open > 0

    def _update_reading(self) -> None:
        if self.closed or self._transport is None:
            return
        pause = (
            self._in_line
            or self._backlog.refusal is not None
            or self._backlog.is_full(self.dialect)
            or not self._may_dispatch()
        )
        if pause is self._reading_paused or self._transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            if self._backlog.frame_since is not None:
                self._backlog.frame_since = self._processor.clock()  # the broker caused the pause
            self._transport.resume_reading()

    def _dispatch(self, wake: bool) -> None:
        """Decode the first frame of the backlog and hand it to the channel, or reject it."""
        processor = self._processor
        frame, received_at = self._backlog.take()
        is_lost = self._transport is None
        if not self._backlog and self.dialect.has_more:
            self._backlog.cut_more(self.dialect, processor.clock())
            if self._reading_paused and not is_lost:
                self._notice_hang_up()
        if is_lost:
            self._backlog.skip(self.dialect, processor.clock)
        if self.session.gate is not None and not self._is_let_in(self.session.gate, self.dialect.api_key(frame)):
            return
        try:
            api, header, body = self.dialect.decode(frame)
        except BadInput as error:
            if self._has_open_answers():
                self._backlog.drop(error)
            else:
                self._refuse(error)
            return
        if self._is_waiting and not self._admit(api):
            return
        if is_lost and type(body) is ProduceRequest and body.acks and not self._backlog.has_answer():
            return
        self._muted = True  # P2
        self._unanswered += 1
        size = len(frame)
        self._unanswered_bytes += size
        request = Request(self, processor.clock, api, header, body, size, received_at)
        if self._order is not None:
            self._overlaps = self.dialect.may_overlap(frame)
            request.place = self._order.take_place()
        processor.channel.offer(request, wake=wake)

    def _notice_hang_up(self) -> None:
        """If the peer has hung up, its requests share the turns of those that lost connections have left. The end of
        the stream, behind many requests that have not been read, would show it too late."""
        assert self._transport is not None
        connection = self._transport.get_extra_info("socket")
        descriptor = -1 if connection is None else connection.fileno()
        if descriptor >= 0:  # a socket that is closed, or of a simulation, has none
            poll = select.poll()
            poll.register(descriptor, select.POLLRDHUP)
            if poll.poll(0):
                self.session.turns = self._processor.channel.left_behind

    def _admit(self, api: Api[Any, Any]) -> bool:
        """Judge the first request. Return False if the connection is closed."""
        if self._processor.requires_proof or api in _PROOFS:
            return True  # it waits for `proved_broker`
        if self.session.gate is not None and not self.session.gate.is_open:
            return True  # it waits for `authenticated`
        return self._take_place()

    def _take_place(self) -> bool:
        """Stop waiting. Return False if there is no place, and the connection is closed."""
        refusal = self._quotas.admit(self, self._last_active)
        if refusal is not None:
            self._processor.metrics.connections_refused += 1
            logger.warning("%s on listener %s is refused: %s", self.peer, self.listener, refusal)
            self.close()
            return False
        self._is_waiting = False
        return True

    def _is_let_in(self, gate: Gate, api_key: int) -> bool:
        """Return False if the request must not be handled, and the connection is closed."""
        now = self._processor.clock()
        reason = gate.why_closed(api_key, now)
        if reason is None:
            return True
        if gate.has_expired:
            self._processor.metrics.expired_connections_killed += 1
        self._processor.shut_out.log(self.peer, reason, now)
        self.close()
        return False

    def _refuse(self, bad_input: BadInput) -> None:
        """Answer bad input with an error, if the request is known, and close."""
        logger.warning("%s on listener %s sent bad input, closed: %s", self.peer, self.listener, bad_input)
        self._processor.metrics.bad_input += 1
        if bad_input.answer is not None:
            self._outgoing += bad_input.answer
        self.close()

    def _drop(self, reason: str, level: int = logging.WARNING) -> None:
        logger.log(level, "%s on listener %s, closed: %s", self.peer, self.listener, reason)
        self._processor.metrics.slow_closed += 1
        self.abort()

    def _identify(self, principal_of: PrincipalOf, certificate: Mapping[str, Any] | None) -> None:
        principal = principal_of(certificate)
        if principal is None:
            assert certificate is not None
            subject = certificate.get("subject")
            self._drop(f"no rule of ssl.principal.mapping.rules matches its certificate's subject, {subject}")
        else:
            self.session.principal = principal

    def _end(self) -> None:
        self.closed = True
        if self._throttle_timer is not None:
            self._throttle_timer.cancel()
            self._throttle_timer = None
        if self._closing_since is None:
            self._closing_since = self._processor.clock()
            # Not now: the calls answer requests, and the caller is not done with this connection.
            self._processor.call_soon(self.session.end)


def _is_open(gate: Gate | None) -> Callable[[], bool] | None:
    """Not through the session, which the dialect must not keep."""
    return None if gate is None else lambda: gate.is_open
