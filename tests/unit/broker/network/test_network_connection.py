"""Connections under any order of events: no request is lost, doubled or overtaken, and no peer waits for ever."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibroker.broker.network.acceptor import _Entering
from minibroker.broker.network.backlog import MOST_AFTER_LOSS, READ_AHEAD_BYTES
from minibroker.broker.network.dialect import FRAMES_AT_ONCE, Answer, Asked, Frame
from minibroker.broker.network.handler_pool import RequestHandlerPool
from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.native_dialect import NativeDialect, NativeListener
from minibroker.broker.network.processor import Processor, ServerConnection
from minibroker.broker.network.quotas import ConnectionQuotas
from minibroker.broker.network.request_channel import Request, RequestChannel
from minibroker.broker.network.settings import NetworkSettings
from minibroker.deploy.simulator.loop import run
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.framing import FrameReader, response_limit
from minibroker.protocol.messages.groups import HeartbeatRequest
from tests.running import run_by

CONNECTIONS = 5
REQUESTS = 12
SETTINGS = NetworkSettings(
    num_io_threads=2,
    queued_max_requests=1,
    queued_max_request_bytes=150,
    max_in_flight_requests_per_connection=3,
    max_in_flight_bytes_per_connection=150,
)


class MemoryTransport(asyncio.Transport):
    """A transport that keeps the bytes written and whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.writes = 0
        self.reading = True
        self.closed = False
        self.socket: socket.socket | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the test decides when the buffer is full."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written += data
        self.writes += 1

    def pause_reading(self) -> None:
        assert self.reading
        assert not self.closed
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        assert not self.closed
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@dataclass
class Peer:
    """One connection, the bytes that its peer sends, and the requests handled."""

    connection: ServerConnection
    transport: MemoryTransport
    stream: memoryview
    position: int = 0
    handled: list[int] = field(default_factory=list)
    running: int = 0
    write_paused: bool = False
    lost: bool = False

    def deliver(self, count: int) -> None:
        if self.lost or not self.transport.reading:
            return
        piece = self.stream[self.position : self.position + count]
        if piece:
            buffer = self.connection.get_buffer(-1)
            assert len(buffer) >= len(piece)
            buffer[: len(piece)] = piece
            self.position += len(piece)
            self.connection.buffer_updated(len(piece))

    def pause_writing(self) -> None:
        if not self.lost and not self.write_paused:
            self.write_paused = True
            self.connection.pause_writing()

    def resume_writing(self) -> None:
        if not self.lost and self.write_paused:
            self.write_paused = False
            self.connection.resume_writing()

    def lose(self) -> None:
        if not self.lost:
            self.lost = True
            self.connection.eof_received()
            self.transport.closed = True
            self.connection.connection_lost(None)

    def responses(self) -> list[int]:
        reader = FrameReader(response_limit(1 << 20))
        reader.get_buffer()[: len(self.transport.written)] = self.transport.written
        return [
            apis.decode_response_envelope(f).correlation_id for f in reader.buffer_updated(len(self.transport.written))
        ]


class InOrder(NativeDialect):
    """The dialect of a peer that accepts responses only in the order of its requests."""

    answers_in_order = True

    def may_overlap(self, frame: Frame) -> bool:
        return False


class InOrderAndOverlapping(InOrder):
    """A dialect that also overlaps: most requests may be handled before the previous response is ready."""

    def may_overlap(self, frame: Frame) -> bool:
        return overlaps(apis.decode_request_envelope(frame).correlation_id)


def answer_to(request: Request) -> m.Message:
    return m.ProduceResponse([]) if request.api is apis.PRODUCE else m.MetadataResponse(0, [], None, -1, [])


def overlaps(correlation_id: int) -> bool:
    return correlation_id % 5 != 3


class InPieces(InOrderAndOverlapping):
    """A dialect that also sends some responses in pieces."""

    def encode_response(self, asked: Asked, body: m.Message) -> Answer:
        [frame] = super().encode_response(asked, body)
        return [frame] if asked.correlation_id % 3 else [frame[:1], frame[1:6], frame[6:]]


class Cluster:
    """Connections on one channel, with handlers that return and answer when the test says so."""

    def __init__(
        self,
        answers_in_handler: list[bool],
        limits: NetworkSettings = SETTINGS,
        dialect: type[NativeDialect] = NativeDialect,
    ) -> None:
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        metrics = NetworkMetrics()
        self.channel = RequestChannel(limits.queued_max_requests, limits.queued_max_request_bytes, clock)
        self.pool = RequestHandlerPool("test", limits.num_io_threads, self.channel, self.handle, metrics, clock)
        self.processor = Processor("DATA", apis.Plane.DATA, self.channel, limits, metrics, clock)
        listener = NativeListener("DATA", apis.Plane.DATA, limits.socket_request_max_bytes)
        self.processor.new_dialect = lambda connection: dialect(listener)
        self.most_unanswered = 1 if dialect is InOrder else limits.max_in_flight_requests_per_connection
        self.limits = limits
        self.returns_at_once = False
        self.returns: list[asyncio.Future[None]] = []
        self.parked: list[Request] = []
        self.wrong: list[str] = []
        self.answers_in_handler = answers_in_handler
        self.peers: dict[str, Peer] = {}
        quotas = self.quotas = ConnectionQuotas(limits)
        for name in range(CONNECTIONS):
            assert quotas.try_open("", "DATA", 0.0) is None
            entering = _Entering("", "DATA", None)
            quotas.joined(entering)
            stream = b"".join(
                apis.encode_request(
                    apis.PRODUCE, number, None, m.ProduceRequest("t" * ((number * 7 + name) % 60), 0, 1_000, [])
                )
                for number in range(REQUESTS)
            )
            connection = ServerConnection(self.processor, str(name), quotas, entering)
            transport = MemoryTransport()
            self.peers[str(name)] = Peer(connection, transport, memoryview(stream))
            connection.connection_made(transport)

    def wrong_about(self, request: Request) -> Iterator[str]:
        """Yield each rule that handling this request now would break."""
        peer = self.peers[request.peer]
        if peer.running:
            yield "a connection's requests are handled one at a time"
        unanswered = [parked.correlation_id for parked in self.parked if parked.peer == request.peer]
        if len(unanswered) >= self.most_unanswered:
            yield "too many are unanswered"
        together = [*unanswered, request.correlation_id]
        if unanswered and peer.connection.dialect.answers_in_order and not all(map(overlaps, together)):
            yield "some do not overlap"
        if len(self.channel) > self.limits.queued_max_requests:
            yield "the queue is too long"
        if self.channel.bytes > self.limits.queued_max_request_bytes and self.channel.bytes > request.size:
            yield "the requests are too large together"

    async def handle(self, request: Request) -> None:
        self.wrong += self.wrong_about(request)
        peer = self.peers[request.peer]
        peer.running += 1
        peer.handled.append(request.correlation_id)
        future = asyncio.get_running_loop().create_future()
        if self.returns_at_once:
            future.set_result(None)
        else:
            self.returns.append(future)
        if self.answers_in_handler[request.correlation_id]:
            await future
            request.respond(answer_to(request))
        else:
            self.parked.append(request)
            await future
        peer.running -= 1

    def let_return(self, index: int) -> None:
        if self.returns:
            self.returns.pop(index % len(self.returns)).set_result(None)

    def answer(self, index: int) -> None:
        if self.parked:
            request = self.parked.pop(index % len(self.parked))
            request.respond(answer_to(request))

    async def finish(self, deliver: int = 0) -> None:
        """Let every handler return and answer, for as long as that can take, then end the handlers."""
        for turn in range(20 * CONNECTIONS * REQUESTS):
            for peer in self.peers.values():
                peer.deliver(deliver)
            self.let_return(0)
            if turn % 3 == 0:  # later than the handlers return
                self.answer(0)
            await asyncio.sleep(0)
        self.channel.close()
        await self.pool.close(1)
        assert not self.wrong  # an assertion in the handler would become its response


@dataclass(frozen=True)
class Action:
    kind: str
    peer: str = "0"
    number: int = 0


peers = st.sampled_from([str(name) for name in range(CONNECTIONS)])
deliveries = st.builds(Action, st.just("deliver"), peers, st.integers(1, 200))
actions = st.one_of(
    deliveries,
    deliveries,
    st.builds(Action, st.just("turn")),
    st.builds(Action, st.sampled_from(["return", "answer"]), number=st.integers(0, 10)),
    st.builds(Action, st.sampled_from(["pause", "resume", "throttle"]), peers),
    st.builds(Action, st.just("time"), number=st.integers(0, 3_000)),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(actions, min_size=10, max_size=150),
    lost_at=st.none() | st.integers(0, 150),
    answers_in_handler=st.lists(st.booleans(), min_size=REQUESTS, max_size=REQUESTS),
    dialect=st.sampled_from([NativeDialect, InOrder, InOrderAndOverlapping, InPieces]),
)
def test_every_request_is_handled_once_in_order_and_answered_in_any_order_of_events(
    script: list[Action], lost_at: int | None, answers_in_handler: list[bool], dialect: type[NativeDialect]
) -> None:
    async def main() -> None:
        cluster = Cluster(answers_in_handler, dialect=dialect)
        cluster.pool.start()
        await asyncio.sleep(0)
        for number, action in enumerate(script):
            if number == lost_at:
                cluster.peers["0"].lose()
            peer = cluster.peers[action.peer]
            match action.kind:
                case "deliver":
                    peer.deliver(action.number)
                case "turn":
                    await asyncio.sleep(0)
                case "return":
                    cluster.let_return(action.number)
                case "answer":
                    cluster.answer(action.number)
                case "pause":
                    peer.pause_writing()
                case "resume":
                    peer.resume_writing()
                case "throttle":
                    peer.connection.throttle(0.0002)
                case "time":
                    cluster.now += action.number / 1_000_000
                case _:
                    raise AssertionError(action)
            live = [peer for peer in cluster.peers.values() if not peer.lost]
            if len(live) == CONNECTIONS:
                assert cluster.channel.in_line <= sum(not peer.transport.reading for peer in live)
        # Remove every obstacle: then all requests must get through.
        await asyncio.sleep(0.001)
        for peer in cluster.peers.values():
            peer.resume_writing()
        await cluster.finish(deliver=1_000)
        for peer in cluster.peers.values():
            assert peer.handled == list(range(len(peer.handled)))
            if peer.lost:
                whole = FrameReader(lambda prefix: 1 << 20)
                whole.get_buffer()[: peer.position] = peer.stream[: peer.position]
                assert len(peer.handled) == len(whole.buffer_updated(peer.position))
            else:
                assert len(peer.handled) == REQUESTS
                assert Counter(peer.responses()) == Counter(range(REQUESTS))
                assert not dialect.answers_in_order or peer.responses() == list(range(REQUESTS))
                assert peer.transport.reading
        assert cluster.channel.bytes == 0
        assert cluster.channel.in_line == 0

    asyncio.run(main())


@run_by(lambda program: run(program()))
async def test_a_throttled_connection_is_not_read_until_its_time_is_over() -> None:
    cluster = Cluster([True] * REQUESTS)
    cluster.returns_at_once = True
    cluster.channel.on_answer = lambda request, answer: request.source.throttle(5 + request.correlation_id)
    cluster.pool.start()
    peer = cluster.peers["0"]
    peer.deliver(1_000)
    await asyncio.sleep(0.1)
    for handled in range(1, 4):
        assert len(peer.handled) == handled
        assert not peer.transport.reading
        await asyncio.sleep(4 + handled - 0.2)
        assert len(peer.handled) == handled
        await asyncio.sleep(0.2)
    peer.lose()
    cluster.channel.close()
    await cluster.pool.close(1)


@pytest.mark.parametrize("dialect", [NativeDialect, InOrder])
@pytest.mark.parametrize(
    ("throttles_s", "returns_at_s", "writable_at_s", "next_at_s"),
    [
        ((5,), 1, 0, 5),
        ((5,), 8, 0, 8),
        ((5,), 1, 7, 7),
        ((5,), 7, 6, 7),
        ((5, 2), 1, 0, 5),
        ((2, 5), 1, 0, 5),
        ((), 3, 0, 3),
    ],
)
@run_by(lambda program: run(program()))
async def test_the_next_request_waits_for_the_last_reason_to_be_mute(
    *,
    throttles_s: tuple[int, ...],
    returns_at_s: int,
    writable_at_s: int,
    next_at_s: int,
    dialect: type[NativeDialect],
) -> None:
    """Kafka's ChannelMuteState: the answer that is due, and the throttle time, end in any order."""
    cluster = Cluster([True] * REQUESTS, dialect=dialect)
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    peer.deliver(1_000)
    for seconds in throttles_s:
        peer.connection.throttle(seconds)
    if writable_at_s:
        peer.pause_writing()
    for second in range(10):
        await asyncio.sleep(0.01)
        if second == returns_at_s:
            cluster.let_return(0)
        if second == writable_at_s and writable_at_s:
            peer.resume_writing()
        await asyncio.sleep(0.49)
        assert (len(peer.handled) > 1) is (second >= next_at_s)
        await asyncio.sleep(0.5)
    peer.lose()
    cluster.returns_at_once = True
    await cluster.finish()


@run_by(lambda program: run(program()))
async def test_a_throttled_connection_is_not_idle_and_one_that_closes_leaves_no_timer() -> None:
    cluster = Cluster([True] * REQUESTS, NetworkSettings(connections_max_idle_ms=1_000))
    peer, other = cluster.peers["0"], cluster.peers["1"]
    for each in (peer, other):
        each.connection.throttle(60)
    other.connection.close()
    assert other.connection.idle_since is not None
    cluster.now += 5
    peer.connection.check_deadlines(cluster.now)
    assert not peer.transport.is_closing()
    await asyncio.sleep(61)
    cluster.now += 0.9
    peer.connection.check_deadlines(cluster.now)
    assert not peer.transport.is_closing()
    cluster.now += 1
    peer.connection.check_deadlines(cluster.now)
    assert peer.transport.is_closing()


async def test_a_peer_is_not_called_slow_for_the_time_when_it_was_not_read() -> None:
    cluster = Cluster([True] * REQUESTS, NetworkSettings(frame_timeout_ms=1_000))
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    peer.deliver(len(peer.stream) - 1)
    peer.pause_writing()
    assert not peer.transport.is_reading()
    cluster.now += 5.0
    peer.connection.check_deadlines(cluster.now)
    assert not peer.transport.is_closing()
    peer.resume_writing()
    assert peer.transport.is_reading()
    cluster.now += 0.9
    peer.connection.check_deadlines(cluster.now)
    assert not peer.transport.is_closing()
    cluster.now += 0.1
    peer.connection.check_deadlines(cluster.now)
    assert peer.transport.is_closing()
    await cluster.finish()


async def test_requests_of_a_peer_lost_while_it_read_no_responses_are_handled() -> None:
    cluster = Cluster([True] * REQUESTS)
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    peer.pause_writing()
    peer.transport.reading = True  # received before the pause
    peer.deliver(1_000)
    assert peer.handled == []
    peer.lose()
    await cluster.finish()
    assert peer.handled == list(range(REQUESTS))


@pytest.mark.parametrize("what", ["the peer leaves", "the handler closes the connection", "the handler returns"])
def test_only_the_first_reason_to_close_a_connection_is_logged(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minibroker.network")

    async def main() -> None:
        cluster = Cluster([True] * REQUESTS)
        cluster.pool.start()
        await asyncio.sleep(0)
        peer = cluster.peers["0"]
        first_frame_ends_at = 4 + int.from_bytes(peer.stream[:4], "big")
        peer.stream = memoryview(bytes(peer.stream[:first_frame_ends_at]) + b"\x7f" * 20)
        peer.deliver(1_000)
        await asyncio.sleep(0)
        assert peer.handled == [0]
        if what == "the peer leaves":
            peer.lose()
        elif what == "the handler closes the connection":
            peer.connection.close_connection("enough")
        await cluster.finish()
        assert peer.transport.is_closing()

    asyncio.run(main())
    (record,) = caplog.records
    assert ("enough" if "closes" in what else "a frame announced") in record.getMessage()


async def test_responses_that_are_given_in_the_same_turn_leave_in_one_write() -> None:
    for answered_in_handler in (True, False):
        cluster = Cluster([answered_in_handler] * REQUESTS, NetworkSettings())
        cluster.returns_at_once = True
        cluster.pool.start()
        await asyncio.sleep(0)
        peer = cluster.peers["0"]
        peer.deliver(10_000)
        while len(peer.handled) < REQUESTS:
            await asyncio.sleep(0)
        for _ in range(len(cluster.parked)):
            cluster.answer(0)
        await asyncio.sleep(0)
        assert peer.responses() == list(range(REQUESTS))
        assert peer.transport.writes == 1
        await cluster.finish()


async def test_requests_of_a_lost_peer_are_handled_even_while_answers_are_held_back() -> None:
    cluster = Cluster([False] + [True] * REQUESTS, dialect=InOrderAndOverlapping)
    cluster.returns_at_once = True
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    peer.deliver(1_000)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(cluster.parked) == 1
    assert peer.handled == [0, 1, 2], "no more answers are held back than requests may be unanswered"
    peer.lose()
    await cluster.finish()
    assert peer.handled == list(range(REQUESTS))
    assert not peer.transport.written


async def test_a_lost_peer_s_questions_are_dropped_and_it_counts_until_its_records_are_written() -> None:
    cluster = Cluster([True] * REQUESTS)
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    question = apis.encode_request(apis.METADATA, 1, None, m.MetadataRequest([]))
    records = [apis.encode_request(apis.PRODUCE, number, None, m.ProduceRequest(None, 0, 1, [])) for number in (0, 2)]
    peer.stream = memoryview(b"".join([records[0], question, records[1]]))
    peer.deliver(1_000)
    await asyncio.sleep(0)
    assert peer.handled == [0]
    before = cluster.quotas.total
    peer.lose()
    assert cluster.quotas.total == before
    await cluster.finish()
    assert peer.handled == [0, 2]
    assert cluster.quotas.total == before - 1


@pytest.mark.parametrize("api", [apis.HEARTBEAT, apis.PRODUCE, apis.METADATA])
async def test_a_lost_peer_leaves_few_requests_that_have_answers(api: apis.Api[Any, Any]) -> None:
    bodies = {
        apis.HEARTBEAT: HeartbeatRequest("g", 1, "m", None),
        apis.PRODUCE: m.ProduceRequest(None, 1, 1, []),
        apis.METADATA: m.MetadataRequest([]),
    }
    cluster = Cluster([True] * REQUESTS)
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    frames = [apis.encode_request(api, number, None, bodies[api]) for number in range(REQUESTS - 1)]
    last = apis.encode_request(apis.PRODUCE, REQUESTS - 1, None, m.ProduceRequest(None, 0, 1, []))
    peer.stream = memoryview(b"".join([*frames, last]))
    peer.deliver(1_000)
    await asyncio.sleep(0)
    assert peer.handled == [0]
    before = cluster.quotas.total
    peer.lose()
    await cluster.finish()
    assert peer.handled == list(range(1 if api is apis.METADATA else 1 + MOST_AFTER_LOSS))
    assert cluster.quotas.total == before - 1


async def test_of_thousands_of_frames_only_a_few_are_cut_at_a_time() -> None:
    frame = bytes(apis.encode_request(apis.HEARTBEAT, 1, None, HeartbeatRequest("g", 1, "m", None)))
    dialect = NativeDialect(NativeListener("DATA", apis.Plane.DATA, 1 << 20))
    left = 10 * READ_AHEAD_BYTES // len(frame)
    sent = memoryview(frame * left)
    while left:
        cut: Sequence[Frame] = ()
        if sent and not dialect.is_full:
            buffer = dialect.get_buffer()
            size = min(len(buffer), len(sent))
            assert size > 0
            buffer[:size], sent = sent[:size], sent[size:]
            cut = dialect.received(size)
        if not cut and dialect.has_more:
            cut = dialect.more()
        assert all(bytes(each) == frame[4:] for each in cut)
        assert len(cut) <= FRAMES_AT_ONCE
        left -= len(cut)
    assert not sent
    assert not dialect.in_frame


async def test_a_peer_that_hangs_up_before_all_is_read_shares_the_turns_of_the_lost() -> None:
    cluster = Cluster([True], NetworkSettings())
    cluster.returns_at_once = True
    frame = bytes(apis.encode_request(apis.PRODUCE, 0, None, m.ProduceRequest("t" * 100, 0, 1, [])))
    ours, theirs = zip(*[socket.socketpair() for _ in range(2)], strict=True)
    present, gone = (cluster.peers[name] for name in "01")
    for peer, end in zip((present, gone), ours, strict=True):
        peer.transport.socket = end
        peer.stream = memoryview(frame * 1_000)
        while peer.transport.reading:
            peer.deliver(len(peer.connection.get_buffer(-1)))
    theirs[1].close()
    cluster.pool.start()
    await cluster.finish()
    assert min(len(gone.handled), len(present.handled)) > FRAMES_AT_ONCE
    assert gone.connection.session.turns is cluster.channel.left_behind
    assert present.connection.session.turns is not cluster.channel.left_behind
    for end in (*ours, theirs[0]):
        end.close()


async def test_a_lost_peer_in_line_dispatches_nothing_larger_than_it_stands_for() -> None:
    cluster = Cluster([True] * REQUESTS, SETTINGS)
    cluster.pool.start()
    await asyncio.sleep(0)
    small = apis.encode_request(apis.METADATA, 1, None, m.MetadataRequest([]))
    large = apis.encode_request(apis.PRODUCE, 2, None, m.ProduceRequest("t" * 120, 0, 1, []))
    for name in "123":
        cluster.peers[name].stream = memoryview(bytes(small) * 2)
        cluster.peers[name].deliver(len(small))
        await asyncio.sleep(0)
    lost = cluster.peers["0"]
    lost.stream = memoryview(small + large)
    lost.deliver(1_000)
    assert cluster.channel.in_line == 1
    lost.lose()
    await cluster.finish()
    assert lost.handled == [2]


async def test_a_refusal_comes_after_the_answers_that_are_held_back() -> None:
    cluster = Cluster([False] + [True] * REQUESTS, dialect=InOrderAndOverlapping)
    cluster.returns_at_once = True
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    requests = [apis.encode_request(apis.METADATA, number, None, m.MetadataRequest([])) for number in range(2)]
    peer.stream = memoryview(b"".join([*requests, b"\0\0\0\x01?"]))
    peer.deliver(1_000)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (peer.handled, bytes(peer.transport.written)) == ([0, 1], b"")
    assert not peer.transport.is_closing()
    cluster.answer(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert peer.responses() == [0, 1]
    assert peer.transport.is_closing()
    await cluster.finish()


class FailingGate:
    """A gate whose authentication fails when the test says so."""

    is_open = True
    has_expired = False
    has_failed = False

    def why_closed(self, api_key: int, now: float) -> str | None:
        return "its authentication has failed" if self.has_failed else None

    def set_broker(self, is_broker: bool) -> None:
        """Do nothing: the other end is a client."""


@pytest.mark.parametrize("dialect", [NativeDialect, InOrder])
@pytest.mark.parametrize(
    "more", [apis.encode_request(apis.METADATA, 1, None, m.MetadataRequest([])), b"\0\0\0\x01?", b"\xff" * 8]
)
async def test_nothing_reveals_a_failed_authentication_before_its_answer(
    more: bytes, dialect: type[NativeDialect]
) -> None:
    cluster = Cluster([False] * REQUESTS, dialect=dialect)
    cluster.returns_at_once = True
    cluster.pool.start()
    await asyncio.sleep(0)
    peer = cluster.peers["0"]
    gate = peer.connection.session.gate = FailingGate()
    peer.stream = memoryview(apis.encode_request(apis.METADATA, 0, None, m.MetadataRequest([])) + more)
    peer.deliver(len(peer.stream) - len(more))
    gate.has_failed = True
    peer.deliver(len(more))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not peer.transport.is_closing()
    assert not peer.transport.is_reading()
    assert (peer.handled, peer.responses()) == ([0], [])
    cluster.answer(0)
    peer.connection.close()
    assert (peer.handled, peer.responses()) == ([0], [0])
    assert peer.transport.is_closing()
    await cluster.finish()
