"""Requests, and the bounded queue that takes them from the processors to the handlers (Kafka's RequestChannel).

The problem. Handlers must never block the sockets. More requests than the broker can handle must slow down the peers
that send them instead of piling up. Control requests must not wait behind produce requests. All of that may cost a few
microseconds per request: an `asyncio.Queue`, which wakes a task per request, costs as much as the rest of the path.

The choice. A queue, and a future per idle handler. A request that finds an idle handler goes straight into that
handler's future and never into the queue. A handler that has finished looks into the queue first (`poll`), so under
load it proceeds from one request to the next without any wake-up. One handler is woken at a time: another one only when
the loop has come round and requests are still queued, because the first waits for a disk. Otherwise each of the
handlers would do a request of its own in one turn of the loop, of a few milliseconds if it reads megabytes.

A connection has at most one request here (see "mute" in processor.py), and decodes it only when there is room. A
connection without room waits in line, does not read from its socket, and is called when there is room.

Slices. Handlers that always find requests in the queue would never let the loop return to its sockets and timers. The
handlers of a channel therefore share a slice of 2 ms; when it is over, they all rest until the loop has run one round.
They also rest when the control plane's handler has been woken but has not run yet. "Control work first" amounts to that
on one loop: between the arrival of a control request and its handling, only the request runs that a woken handler
already holds, and those whose wait for a disk ends just then.

Turns. The queue is not first come, first served: a hundred connections whose requests are expensive would make every
other wait for a hundred of those. It is fairly queued (Goyal, Vin and Cheng, 1996; Parekh and Gallager, 1993). A
request's turn begins with the turn of the request that was taken last or, if that is later, at the end of the
connection's previous turn, which lasted as many seconds as its request took. The turn that is expected to end first is
next; a request is expected to take as long as the connection's earlier ones, and the first half a slice. Connections
that always have a request waiting thus get equal times. One that seldom asks and for little is next, even if thousands
begin at once. At most a slice counts: handlers also wait, for a disk or another broker, and a connection must not wait
for as long again, as many times as there are busy ones. All that lost connections have left behind shares the turns of
one, and so do connections whose clients have hung up before all was read; nobody gets more by hanging up and coming
again. Without load nothing is queued, and turns with equal ends keep the order of arrival.

Rejected: turns for each address instead. They would stop a stranger with a thousand connections, for whom there are
quotas and `max.connections.per.ip`, and on one machine everybody has the same address.

Followers first. The fetch of a proved broker goes before all clients' requests, and its connection to the head of the
line. A producer with acks=all waits for its followers' fetches; behind all clients' requests, it would wait for those
several times. After each such fetch it is a client's turn: a follower has a single fetch at its leader, but one of
thousands of partitions takes a whole slice, and another soon follows.

Rejected: driving the handler's coroutine directly from the processor and creating a task only if it waits. It saves one
turn of the loop, but such a coroutine has no current task, so `asyncio.timeout` fails in it, and Python 3.11 has no
eager tasks.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from minibroker.broker.network.dialect import Answer, BadInput, Dialect, Header
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.protocol import messages as m
from minibroker.protocol.apis import FETCH, Api
from minibroker.protocol.connections.broker_proof import Handshake
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.fetch_slots import LeaderSlots
from minibroker.protocol.principal import ANONYMOUS, Principal

SLICE_S = 0.002
FIRST_COST_S = 0.001
"""The time that a connection's first request is expected to take: more than most, since thousands may come at once, but
not so much that a new client waits long behind busy ones."""
LEFT_BEHIND_S = 0.000_1
"""How far apart the turns are of requests of lost connections, several of which may be in the queue. The time that they
take is added when it is known."""

SHOWN_CHARACTERS = 100
"""The characters of a client id that messages show."""


class Gate(Protocol):
    """Decides which requests of a connection are handled before its client has authenticated itself (SASL)."""

    @property
    def is_open(self) -> bool:
        """Whether the client has authenticated itself."""
        ...

    @property
    def has_expired(self) -> bool:
        """Whether `why_closed` has found that the client should have authenticated itself again."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether an authentication has failed. Until its answer has left and the connection is closed, nothing more is
        read from the connection, and no request is handled."""
        ...

    def why_closed(self, api_key: int, now: float) -> str | None:
        """Return why this request must not be handled, or None."""
        ...

    def set_broker(self, is_broker: bool) -> None:
        """Record whether the other end has proved to be a broker of the cluster."""
        ...


class Turns:
    """The turns of a connection's requests: see the head of this module."""

    __slots__ = ("begin_s", "cost_s")

    def __init__(self) -> None:
        self.begin_s = 0.0
        """The beginning of the turn of its request in the channel or, without one, the earliest of the next."""
        self.cost_s = FIRST_COST_S
        """The seconds that its next request is expected to take: the mean of the last one and of what had been expected
        of that one."""


class Session:
    """The state of the other end of a connection (Kafka's RequestChannel.Session)."""

    __slots__ = (
        "_at_end",
        "fetch_slots",
        "gate",
        "handshake",
        "has_ended",
        "host",
        "inquiries",
        "is_before_mutation_quotas",
        "principal",
        "turns",
    )

    def __init__(self) -> None:
        self._at_end: dict[object, Callable[[], None]] = {}
        self.has_ended = False
        self.principal: Principal = ANONYMOUS
        self.host = ""
        """The address of the client. Empty: that of the connection."""
        self.inquiries: dict[int, Any] = {}
        """Used by the handlers to check the sender's requests against ACLs (`broker/security/access.py`)."""
        self.is_before_mutation_quotas = False
        """Set for a forwarded request whose client does not know THROTTLING_QUOTA_EXCEEDED."""
        self.gate: Gate | None = None
        """None: the listener does not use SASL."""
        self.handshake: Handshake | None = None
        """A handshake in progress."""
        self.fetch_slots = LeaderSlots()
        self.turns = Turns()

    def is_broker(self) -> bool:
        """Return whether the other end has proved to be a broker."""
        return self.principal.broker_id is not None

    def set_broker(self, broker_id: int | None) -> None:
        """The other end has proved to be this broker; None: no longer any."""
        self.principal = self.principal._replace(broker_id=broker_id)
        if self.gate is not None:
            self.gate.set_broker(broker_id is not None)

    def at_end(self, key: object, call: Callable[[], None]) -> None:
        """Call this once when the connection has ended, or now if it has; it replaces an earlier call of the same key.

        Whatever the broker keeps only for the sake of this connection, it drops there: nobody would take the answer."""
        if self.has_ended:
            call()
        else:
            self._at_end[key] = call

    def not_at_end(self, key: object) -> None:
        """Forget the call of this key, if there is one."""
        if self._at_end:
            self._at_end.pop(key, None)

    def end(self) -> None:
        """The connection has ended. Make the calls, once."""
        self.has_ended = True
        calls, self._at_end = self._at_end, {}
        for call in calls.values():
            call()


class Amendment(Protocol):
    """A change of a request and its answer (`broker/security/access.py`)."""

    @property
    def finish(self) -> Callable[[Any], None]:
        """Changes the answer."""
        ...

    @property
    def undo(self) -> Callable[[], None]:
        """Makes the request what it was, for an error that concerns all of it."""
        ...


class RequestSource(Protocol):
    """The origin of requests: a connection, as the channel and its requests see it."""

    peer: str
    listener: str
    session: Session

    @property
    def dialect(self) -> Dialect: ...

    @property
    def closed(self) -> bool: ...

    def proved_broker(self) -> None:
        """Record that the peer has proved to be a broker."""
        ...

    def authenticated(self) -> None:
        """Record that the peer, a client, has proved who it is."""
        ...

    @property
    def on_answer(self) -> OnAnswer | None:
        """Called with each answer; None while there are no quotas."""
        ...

    def throttle(self, seconds: float) -> None:
        """Dispatch no further request for this time."""
        ...

    def introduced(self, name: str, version: str) -> None:
        """Record the peer's software (KIP-511)."""
        ...

    def answered(self, request: Request, answer: Answer | None) -> None:
        """Send the answer of a request, if it has one."""
        ...

    def handled(self, *, wake: bool) -> None:
        """The handler of this connection's request has returned, so the next one may be dispatched. `wake` as in
        `RequestChannel.offer`."""
        ...

    def refused(self, bad_input: BadInput) -> None:
        """The body of the request that is being handled is invalid: close once earlier requests are answered."""
        ...

    def close_connection(self, reason: str) -> None:
        """Close once the peer has read all earlier answers."""
        ...

    def close(self) -> None:
        """Like `close_connection`, without a log line."""
        ...

    def room_in_channel(self, size: int) -> None:
        """The channel, which was full, has room: the connection may offer its next request now, without asking again,
        if it is no larger than the one that it stood in line for."""
        ...


OnAnswer = Callable[["Request", m.Message | None], None]
"""Receives a request that is about to be answered, with its answer, whose throttle time it may set; None: the client
expects no answer."""


class Request:
    """One request, from the arrival of its last byte to its answer. Not thread-safe.

    `body` is an instance of `api.request`. It refers to the frame it came in, which stays in memory as long as the
    request does. Times are monotonic seconds, or 0.0 if not reached.
    """

    place: int
    """The place of its answer if answers leave in order; set and used by its connection."""
    turns: Turns
    """Set and used by the channel."""

    __slots__ = (
        "_answered",
        "_clock",
        "_failed",
        "_source",
        "amendment",
        "api",
        "api_version",
        "body",
        "client_id",
        "correlation_id",
        "dequeued_at",
        "handled_at",
        "large",
        "place",
        "received_at",
        "sent_at",
        "size",
        "turns",
    )

    def __init__(
        self,
        source: RequestSource,
        clock: Callable[[], float],
        api: Api[Any, Any],
        header: Header,
        body: Any,
        size: int,
        received_at: float,
    ) -> None:
        self.api = api
        self.api_version = header.api_version
        self.correlation_id = header.correlation_id
        self.client_id = header.client_id
        self.body = body
        self.size = size
        """Bytes of the frame."""
        self.received_at = received_at
        self.dequeued_at = 0.0
        self.handled_at = 0.0
        self.sent_at = 0.0
        self.amendment: Amendment | None = None
        """Set if the sender may not do or see everything that it has asked for."""
        self._source = source
        self._clock = clock
        self._answered = False
        self._failed = False
        self.large: LargeRequests | None = None
        """Encodes the answer if the request is a large one."""

    def __repr__(self) -> str:
        client = f"{self.client_id!r:.{SHOWN_CHARACTERS}}"
        return f"<{self.api.name} request {self.correlation_id} from {self._source.peer} ({client})>"

    @property
    def peer(self) -> str:
        """`host:port` of the sender."""
        return self._source.peer

    @property
    def listener(self) -> str:
        """The name of the listener that received it."""
        return self._source.listener

    @property
    def session(self) -> Session:
        """The session of its connection, whose requests are handled one after the other."""
        return self._source.session

    @property
    def principal(self) -> Principal:
        """The sender's identity, as far as it has been proved."""
        return self._source.session.principal

    @property
    def host(self) -> str:
        """The address of the sender, without its port."""
        session = self._source.session
        if not session.host:
            session.host = self._source.peer.rpartition(":")[0].strip("[]")
        return session.host

    @property
    def source(self) -> RequestSource:
        return self._source

    @property
    def closed(self) -> bool:
        """Whether the peer is gone, so that an answer would be lost. (Answering is still allowed.)"""
        return self._source.closed

    def respond(self, body: m.Message) -> None:
        """Send the answer: once, now or from any later callback. It leaves at once, before earlier requests' answers if
        those are not ready (and the dialect allows it). Does nothing if the connection is gone, or if the handler has
        raised and the request was answered with an error for that reason. Raises RuntimeError the second time."""
        if self._may_answer():
            if self.amendment is not None:
                self.amendment.finish(body)
            if self._source.on_answer is not None:
                self._source.on_answer(self, body)
            if self._source.closed:
                self._finish(None)
            elif self.large is not None:
                self._answered = True
                self.large.encode(partial(self._source.dialect.encode_response, self, body), self._finish_large)
            else:
                self._finish(self._source.dialect.encode_response(self, body))

    def respond_error(self, code: ErrorCode, message: str) -> None:
        """Like `respond`, with an error instead of a body. If the client expects no answer, its connection is
        closed."""
        if self._may_answer():
            if self.amendment is not None:
                self.amendment.undo()
            if self._source.closed:
                self._finish(None)
            elif self.large is not None:
                self._answered = True
                encode = partial(self._source.dialect.encode_error, self, code, message)
                self.large.encode(encode, partial(self._finish_error, code, message))
            else:
                self._finish_error(code, message, self._source.dialect.encode_error(self, code, message))

    def respond_nothing(self) -> None:
        """Like `respond`, for a request that needs no answer (Produce with acks 0)."""
        if self._may_answer():
            if self._source.on_answer is not None:
                self._source.on_answer(self, None)
            self._finish(None)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Answer with the error of a handler that raised, unless it has answered already. If it had passed the request
        on to be answered later, that answer is dropped."""
        if not self._answered:
            self.respond_error(code, message)
            self._failed = True

    def refuse(self, bad_input: BadInput) -> None:
        """End the connection of a request whose body, decoded late, is invalid."""
        self._source.refused(bad_input)
        self.respond_nothing()

    def close_connection(self, reason: str) -> None:
        """Log the reason and close the sender's connection, once it has read the answers given so far. Its later
        requests are not handled. A producer with acks=0 can notice only this."""
        self._source.close_connection(reason)

    def close_quietly(self) -> None:
        """Like `close_connection`, for a reason that is logged elsewhere."""
        self._source.close()

    def enveloped(self, source: RequestSource, api: Api[Any, Any], header: Header, body: Any) -> Request:
        """Return the request inside of this envelope, whose answer goes to `source`."""
        return Request(source, self._clock, api, header, body, self.size, self.received_at)

    def _may_answer(self) -> bool:
        if self._answered and not self._failed:
            raise RuntimeError(f"{self!r} is answered a second time")
        return not self._answered

    def _finish_large(self, answer: Answer | None) -> None:
        if answer is None:
            self.close_connection(f"the answer to {self.api.name} cannot be encoded: see the broker's log")
        self._finish(answer)

    def _finish_error(self, code: ErrorCode, message: str, answer: Answer | None) -> None:
        if answer is None:
            self.close_connection(f"{code.name}, which no answer can tell this client: {message}")
        self._finish(answer)

    def _finish(self, answer: Answer | None) -> None:
        self._answered = True
        self._source.session.not_at_end(self)
        self.sent_at = self._clock()
        self._source.answered(self, answer)


class RequestChannel:
    """A bounded queue of requests, in the order of their turns. `poll` and `wait` are for the handlers, everything else
    for the processors."""

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        clock: Callable[[], float],
        gives_way_to: RequestChannel | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._clock = clock
        self._gives_way_to = gives_way_to
        self._loop = asyncio.get_running_loop()
        self._queue: list[tuple[float, int, float, Request]] = []
        """A heap of clients' requests: the expected end of the turn, the arrival, the beginning of the turn and the
        request."""
        self._fetches: deque[tuple[float, Request]] = deque()
        """Of followers: the beginnings of their turns, and the requests."""
        self._is_clients_turn = False
        self._arrivals = count()
        self._turn_s = 0.0
        """The beginning of the turn of the request that was taken last."""
        self.left_behind = Turns()
        """Of the requests of all lost connections together."""
        self._idle: deque[asyncio.Future[Request | None]] = deque()
        self._in_line: list[tuple[float, int, RequestSource, int]] = []
        """A heap: the expected ends of turns, the arrivals, the connections and the sizes of their requests."""
        self._resting = False
        self._slice_ends_at = 0.0
        self._closed = False
        self.bytes = 0
        """Bytes of the requests that are queued or being handled."""
        self.on_answer: OnAnswer | None = None
        """See `RequestSource.on_answer`."""
        self.waking = 0
        """Handlers that have received a request and have not run since."""

    def __len__(self) -> int:
        """The number of requests that wait for a handler."""
        return len(self._queue) + len(self._fetches)

    @property
    def in_line(self) -> int:
        """The number of connections that wait for room."""
        return len(self._in_line)

    # -- the processors' side --

    def has_room(self, size: int) -> bool:
        """Return whether a request of `size` bytes may be offered now. If not, get in line."""
        return not self._in_line and not self._closed and self._fits(size)

    def get_in_line(self, source: RequestSource, size: int) -> None:
        """Call `source.room_in_channel` once a request of `size` bytes may be offered, in the order of turns. It is
        never called if the channel closes before that."""
        if not self._closed:
            turns, begin_s = self._turn_of(source)
            end_s = -math.inf if source.session.is_broker() else begin_s + turns.cost_s
            heappush(self._in_line, (end_s, next(self._arrivals), source, size))

    def offer(self, request: Request, *, wake: bool) -> None:
        """Queue a request for which there is room. `wake` is False if the caller is a handler about to poll."""
        self.bytes += request.size
        request.turns, begin_s = self._turn_of(request.source)
        may_wake = wake and self._idle and not self.waking
        if may_wake and not (self._queue or self._fetches) and not self._resting and self._give(request):
            self._turn_s = begin_s
            return
        if request.api is FETCH and request.session.is_broker():
            self._fetches.append((begin_s, request))
        else:
            heappush(self._queue, (begin_s + request.turns.cost_s, next(self._arrivals), begin_s, request))

    # -- the handlers' side --

    def poll(self, now: float) -> Request | None:
        """Return the next request, if there is one and the slice is not over. `now` is the clock's time, which the
        caller has just read."""
        if self._resting or not (self._queue or self._fetches):
            return None
        if now >= self._slice_ends_at or (self._gives_way_to is not None and self._gives_way_to.waking):
            self._resting = True
            self._loop.call_soon(self._rested)
            return None
        request = self._take()
        if self._in_line:
            self._admit()
        return request

    def wait(self) -> asyncio.Future[Request | None]:
        """Return a future of the next request, or of None once the channel is closed and empty. Call `woken` with the
        time after that."""
        future: asyncio.Future[Request | None] = self._loop.create_future()
        if self._closed and not (self._queue or self._fetches):
            self.waking += 1
            future.set_result(None)
        else:
            self._idle.append(future)
        return future

    def leave(self) -> None:
        """A handler ends instead of polling. What was offered while it was about to poll goes to those that are idle:
        nobody else would wake them."""
        self._wake_another()

    def woken(self, now: float) -> None:
        """Record that a handler runs again after `wait`."""
        self.waking -= 1
        if now >= self._slice_ends_at:
            self._slice_ends_at = now + SLICE_S
        if self._idle and (self._closed or self._queue or self._fetches):
            self._loop.call_soon(self._wake_another)

    def handled(self, request: Request, seconds: float) -> None:
        """Stop counting a request, whose handler took this time."""
        self.bytes -= request.size
        turns, seconds = request.turns, min(seconds, SLICE_S)
        turns.begin_s += seconds
        turns.cost_s = (turns.cost_s + seconds) / 2
        if self._in_line:
            self._admit()

    # -- the end --

    def close(self) -> None:
        """Accept no more requests: there is never room again, so connections soon stop reading. Handlers receive the
        queued requests and then None."""
        self._closed = True
        self._in_line.clear()
        self._wake_another()

    def _turn_of(self, source: RequestSource) -> tuple[Turns, float]:
        """Return the turns that a request of this source shares, and the beginning of its own turn."""
        turns = self.left_behind if source.closed else source.session.turns
        if turns.begin_s < self._turn_s:
            turns.begin_s = self._turn_s
        begin_s = turns.begin_s
        if turns is self.left_behind:
            turns.begin_s += LEFT_BEHIND_S
        return turns, begin_s

    def _take(self) -> Request:
        if self._fetches and not (self._is_clients_turn and self._queue):
            begin_s, request = self._fetches.popleft()
            self._is_clients_turn = True
        else:
            *_, begin_s, request = heappop(self._queue)
            self._is_clients_turn = False
        if self._turn_s < begin_s:
            self._turn_s = begin_s
        return request

    def _give(self, request: Request | None) -> bool:
        """Hand the request to an idle handler. Return False if there is none."""
        if not self._has_idle():
            return False
        self._idle.popleft().set_result(request)
        self.waking += 1
        return True

    def _has_idle(self) -> bool:
        while self._idle and self._idle[0].done():  # the handler was cancelled
            self._idle.popleft()
        return bool(self._idle)

    def _wake_another(self) -> None:
        """Give the next request to an idle handler, unless one has been woken or all rest, and its place to the next in
        line. Tell all that are idle if the channel has ended."""
        if (self._queue or self._fetches) and not self._resting and not self.waking and self._has_idle():
            self._give(self._take())
        if self._closed and not (self._queue or self._fetches):
            while self._give(None):
                pass
        if self._in_line:
            self._admit()

    def _rested(self) -> None:
        self._resting = False
        self._slice_ends_at = self._clock() + SLICE_S
        self._wake_another()

    def _fits(self, size: int) -> bool:
        return len(self) < self._max_requests and (not self.bytes or self.bytes + size <= self._max_bytes)

    def _admit(self) -> None:
        while self._in_line and self._fits(self._in_line[0][-1]):
            *_, source, size = heappop(self._in_line)
            source.room_in_channel(size)
