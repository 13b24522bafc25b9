"""The whole network layer through real sockets on loopback, on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from minibroker.broker.network import acceptor, processor, quotas
from minibroker.broker.network.acceptor import Acceptor
from minibroker.broker.network.kafka_dialect import KafkaDialect
from minibroker.broker.network.processor import Processor
from minibroker.broker.network.server import NetworkSettings, Request, RequestHandler, SocketServer
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Plane
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import groups as g
from minibroker.protocol.world.real import RealWorld
from tests.running import run_by
from tests.waiting import until

DEADLINE_S = 60

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run an asynchronous test on each kind of loop. No task may be left on the loop at its end."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    async def bounded(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        async with asyncio.timeout(DEADLINE_S):
            await test()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert failures == []

    def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded(test))

    return run


class Serving:
    """A running server, its ports by listener name, and the peers connected to it."""

    def __init__(self, server: SocketServer, ports: dict[str, int]) -> None:
        self.server = server
        self.ports = ports
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, listener: str = "DATA", host: str = "127.0.0.1", source: str | None = None) -> Peer:
        local_addr = None if source is None else (source, 0)
        reader, writer = await asyncio.open_connection(host, self.ports[listener], local_addr=local_addr)
        self._writers.append(writer)
        return Peer(reader, writer)

    async def disconnect_all(self) -> None:
        for writer in self._writers:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


class Peer:
    """A client that can send any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.address = "{}:{}".format(*writer.get_extra_info("sockname"))

    def send(self, data: bytes | bytearray) -> None:
        self.writer.write(data)

    def metadata(self, correlation_id: int, topic: str = "t") -> None:
        self.send(metadata_frame(correlation_id, topic))

    async def response(self) -> m.ResponseEnvelope:
        (length,) = struct.unpack(">i", await self.reader.readexactly(4))
        return apis.decode_response_envelope(await self.reader.readexactly(length))

    async def correlation_ids(self, count: int) -> list[int]:
        return [(await self.response()).correlation_id for _ in range(count)]

    async def closed(self) -> bytes:
        """Read until the other side closes; return the bytes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    def reset(self) -> None:
        """Abort the connection without a FIN and without reading the rest, like a killed host."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def serving(
    handler: RequestHandler,
    settings: NetworkSettings | None = None,
    *,
    host: str = "127.0.0.1",
    data_listeners: Sequence[str] = ("DATA",),
) -> AsyncIterator[Serving]:
    world = RealWorld()
    server = SocketServer(world, settings or NetworkSettings(), handler)
    ports = await server.bind(
        [*((name, host, 0, Plane.DATA) for name in data_listeners), ("CONTROL", host, 0, Plane.CONTROL)]
    )
    up = Serving(server, ports)
    server.start()
    try:
        yield up
    finally:
        await server.close(grace_s=0.05)
        await up.disconnect_all()
        world.close()


def metadata_frame(correlation_id: int, topic: str = "t") -> bytes:
    return bytes(apis.encode_request(apis.METADATA, correlation_id, "test", m.MetadataRequest([topic])))


def update_metadata_frame(correlation_id: int) -> bytes:
    return bytes(
        apis.encode_request(apis.UPDATE_METADATA, correlation_id, "test", m.UpdateMetadataRequest(1, 1, 1, [], []))
    )


def produce_frame(correlation_id: int, records: bytes, acks: int = 1) -> bytes:
    partition = m.ProducePartition(0, memoryview(records))
    body = m.ProduceRequest(None, acks, 1_000, [m.ProduceTopic("t", [partition])])
    return bytes(apis.encode_request(apis.PRODUCE, correlation_id, "test", body))


def framed(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


EMPTY_METADATA = m.MetadataResponse(0, [], None, -1, [])


async def answer(request: Request) -> None:
    """A handler that answers each request with an empty response."""
    if request.api is apis.METADATA:
        request.respond(EMPTY_METADATA)
    elif request.api is apis.API_VERSIONS:
        request.respond(m.ApiVersionsResponse(0, []))
    elif request.api is apis.UPDATE_METADATA:
        request.respond(m.UpdateMetadataResponse(0))
    elif request.api is apis.PRODUCE:
        request.respond(m.ProduceResponse([]))
    else:
        raise AssertionError(request)


def topic_of(request: Request) -> str:
    return str(request.body.topics[0])


def network_lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "minibroker.network" and record.levelno >= level
    ]


# --- Requests and responses ----------------------------------------------------------------------------------


@run_by("run")
async def test_a_request_reaches_its_handler_with_its_context_and_its_answer_comes_back() -> None:
    requests: list[Request] = []

    async def handler(request: Request) -> None:
        requests.append(request)
        await answer(request)

    async with serving(handler) as up:
        world = RealWorld()
        connection = await open_connection(world.network, "127.0.0.1", up.ports["DATA"], client_id="me", timeout_s=5)
        response = await connection.request(apis.METADATA, m.MetadataRequest(["orders"]))
        assert response == EMPTY_METADATA
        (request,) = requests
        assert request.api is apis.METADATA
        assert request.body == m.MetadataRequest(["orders"])
        assert request.api_version == 0
        assert request.client_id == "me"
        assert request.listener == "DATA"
        assert request.peer.startswith("127.0.0.1:")
        assert not request.closed
        await until(lambda: request.handled_at > 0)
        assert 0 < request.received_at <= request.dequeued_at <= request.sent_at <= request.handled_at
        metrics = up.server.metrics.per_api[apis.METADATA.key]
        assert (metrics.name, metrics.handled, metrics.answered, metrics.errors) == ("Metadata", 1, 1, 0)
        assert metrics.total.sum_s > 0
        assert 0 < up.server.planes[Plane.DATA].pool.idle_ratio() <= 1
        connection.close()
        await connection.wait_closed()
        world.close()


@run_by("run")
async def test_thousands_of_pipelined_requests_are_answered_in_order() -> None:
    topics: list[str] = []

    async def handler(request: Request) -> None:
        topics.append(topic_of(request))
        await answer(request)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.send(b"".join(metadata_frame(number, str(number)) for number in range(5_000)))
        assert await peer.correlation_ids(5_000) == list(range(5_000))
        assert topics == [str(number) for number in range(5_000)]
        assert len(up.server.planes[Plane.DATA].channel) == 0
        await until(lambda: up.server.planes[Plane.DATA].channel.bytes == 0)


@run_by("run")
async def test_a_connections_next_request_waits_until_the_previous_handler_has_returned() -> None:
    running: dict[str, int] = {}
    seen: dict[str, list[str]] = {}
    most_at_once = 0

    async def handler(request: Request) -> None:
        nonlocal most_at_once
        running[request.peer] = running.get(request.peer, 0) + 1
        most_at_once = max(most_at_once, sum(running.values()))
        assert running[request.peer] == 1
        await asyncio.sleep(0.001 * (int(topic_of(request)) % 3))
        seen.setdefault(request.peer, []).append(topic_of(request))
        running[request.peer] -= 1
        await answer(request)

    async with serving(handler) as up:
        peers = [await up.connect() for _ in range(4)]
        for peer in peers:
            peer.send(b"".join(metadata_frame(number, str(number)) for number in range(50)))
        for peer in peers:
            assert await peer.correlation_ids(50) == list(range(50))
        assert list(seen.values()) == [[str(number) for number in range(50)]] * 4
        assert most_at_once == 4


@run_by("run")
async def test_responses_leave_as_they_complete() -> None:
    parked: list[Request] = []

    async def handler(request: Request) -> None:
        if topic_of(request) == "later":
            parked.append(request)
        else:
            await answer(request)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.metadata(1, "later")
        peer.metadata(2, "now")
        assert await peer.correlation_ids(1) == [2]
        parked[0].respond(EMPTY_METADATA)
        assert await peer.correlation_ids(1) == [1]
        with pytest.raises(RuntimeError, match="second time"):
            parked[0].respond(EMPTY_METADATA)


@run_by("run")
async def test_a_response_leaves_at_once_even_if_its_handler_continues() -> None:
    may_return = asyncio.Event()

    async def handler(request: Request) -> None:
        await answer(request)
        await may_return.wait()

    async with serving(handler) as up:
        alone, pipelining = await up.connect(), await up.connect()
        alone.metadata(1)
        assert await alone.correlation_ids(1) == [1]
        pipelining.send(metadata_frame(1) + metadata_frame(2))
        assert await pipelining.correlation_ids(1) == [1]
        may_return.set()
        assert await pipelining.correlation_ids(1) == [2]


@run_by("run")
async def test_a_request_without_a_response_gets_none_and_the_next_one_is_handled() -> None:
    async def handler(request: Request) -> None:
        if request.api is apis.PRODUCE and request.body.acks == 0:
            request.respond_nothing()
        else:
            await answer(request)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.send(produce_frame(1, b"x", acks=0) + metadata_frame(2))
        assert await peer.correlation_ids(1) == [2]


def test_a_handler_that_closes_the_connection_sends_earlier_answers_and_drops_later_requests(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        topics: list[str] = []

        async def handler(request: Request) -> None:
            topics.append(topic_of(request))
            if topic_of(request) == "bad":
                request.respond_nothing()
                request.close_connection("a produce request with acks=0 failed")
            else:
                await answer(request)

        async with serving(handler) as up:
            peer = await up.connect()
            peer.send(metadata_frame(1, "good") + metadata_frame(2, "bad") + metadata_frame(3, "late"))
            assert await peer.correlation_ids(1) == [1]
            assert await peer.closed() == b""
            assert topics == ["good", "bad"]

    caplog.set_level(logging.INFO)
    run(main)
    (line,) = network_lines(caplog, logging.INFO)
    assert "acks=0 failed" in line


@run_by("run")
async def test_the_records_of_a_large_frame_do_not_change_while_later_frames_arrive() -> None:
    kept: list[memoryview] = []

    async def handler(request: Request) -> None:
        kept.append(request.body.topic_data[0].partition_data[0].records)
        await answer(request)

    async with serving(handler) as up:
        peer = await up.connect()
        sizes = [100, 65_000, 65_536, 70_000, 200, 3_000_000, 1_000_000]
        for number, size in enumerate(sizes):
            peer.send(produce_frame(number, bytes([number]) * size))
        assert await peer.correlation_ids(len(sizes)) == list(range(len(sizes)))
        assert [bytes(records) for records in kept] == [bytes([n]) * size for n, size in enumerate(sizes)]


@run_by("run")
async def test_the_control_listener_accepts_control_requests_and_api_versions() -> None:
    async with serving(answer) as up:
        peer = await up.connect("CONTROL")
        peer.send(bytes(apis.encode_request(apis.API_VERSIONS, 1, None, m.ApiVersionsRequest())))
        peer.send(update_metadata_frame(2))
        assert await peer.correlation_ids(2) == [1, 2]


@run_by("run")
async def test_control_requests_which_list_every_partition_may_exceed_a_mebibyte() -> None:
    partition = m.UpdateMetadataPartition(1, 1, 1, 1, [1, 2, 3], 1, [1, 2, 3], [])
    topic = m.UpdateMetadataTopic("orders", "", [partition] * 80_000)
    frame = apis.encode_request(apis.UPDATE_METADATA, 7, "test", m.UpdateMetadataRequest(1, 1, 1, [topic], []))
    assert len(frame) > 1024 * 1024
    async with serving(answer) as up:
        peer = await up.connect("CONTROL")
        peer.send(frame)
        assert await peer.correlation_ids(1) == [7]


# --- Handlers that fail --------------------------------------------------------------------------------------


def test_a_handlers_error_is_answered_and_the_connection_stays_open(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def handler(request: Request) -> None:
            match topic_of(request):
                case "broker-error":
                    raise BrokerError(ErrorCode.NOT_CONTROLLER, "the controller is 3")
                case "bug":
                    raise KeyError("secret")
                case "cancelled":
                    cancelled = asyncio.get_running_loop().create_future()
                    cancelled.cancel()
                    await cancelled
                case "after-answering":
                    await answer(request)
                    raise KeyError("secret")
                case "does-not-encode":
                    request.respond(m.MetadataResponse(0, object(), None, -1, []))  # type: ignore[arg-type]
                case _:
                    await answer(request)

        async with serving(handler, NetworkSettings(num_io_threads=1)) as up:
            peer = await up.connect()
            cases = ["broker-error", "bug", "cancelled", "after-answering", "does-not-encode", "fine"]
            for number, topic in enumerate(cases):
                peer.metadata(number, topic)
            responses = [await peer.response() for _ in cases]
            assert [response.correlation_id for response in responses] == list(range(len(cases)))
            assert [response.error_code for response in responses] == [41, -1, -1, 0, -1, 0]
            with pytest.raises(BrokerError, match="the controller is 3") as raised:
                apis.decode_response(apis.METADATA, responses[0])
            assert raised.value.code is ErrorCode.NOT_CONTROLLER
            assert "secret" not in responses[1].error_message
            assert up.server.metrics.per_api[apis.METADATA.key].errors == 5

    run(main)
    with_traceback = [r for r in caplog.records if r.name == "minibroker.network" and r.exc_info]
    assert len(with_traceback) == 4  # not for the BrokerError


@run_by("run")
async def test_a_late_answer_to_a_request_whose_handler_raised_is_dropped() -> None:
    parked: list[Request] = []

    async def handler(request: Request) -> None:
        parked.append(request)
        raise BrokerError(ErrorCode.REQUEST_TIMED_OUT)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.metadata(1)
        assert (await peer.response()).error_code == ErrorCode.REQUEST_TIMED_OUT
        parked[0].respond(EMPTY_METADATA)
        peer.metadata(2)
        assert (await peer.response()).correlation_id == 2


# --- Bad input -----------------------------------------------------------------------------------------------


def request_frame(*envelope: Any) -> bytes:
    return framed(msgspec.msgpack.encode(list(envelope)))


BAD_INPUT: dict[str, tuple[bytes, tuple[int, ErrorCode] | None, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", None, "a frame announced 1195725856 bytes"),
    "a negative length": (struct.pack(">i", -1) + b"x" * 20, None, "length of -1"),
    "the longest length": (struct.pack(">i", 2**31 - 1) + b"x" * 20, None, "a frame announced 2147483647 bytes"),
    "a produce request over its limit": (
        struct.pack(">i", 104_857_601) + b"\x95\x00\x00\x07" + b"x" * 20,
        (7, ErrorCode.INVALID_REQUEST),
        "socket.request.max.bytes=104857600",
    ),
    "another request over its limit": (
        struct.pack(">i", 1024 * 1024 + 1) + b"\x95\x03\x00\xce\x00\x01\x00\x00" + b"x" * 20,
        (65_536, ErrorCode.INVALID_REQUEST),
        "the limit for it is 1048576",
    ),
    "an empty frame": (framed(b""), None, "not a request envelope"),
    "no MessagePack": (framed(b"\xc1\xc1\xc1\xc1"), None, "not a request envelope"),
    "a cut envelope": (framed(b"\x95\x03\x00\x07"), (7, ErrorCode.INVALID_REQUEST), "not a request envelope"),
    "not an array": (framed(b"\x07"), None, "not a request envelope"),
    "an envelope with a wrong field": (
        request_frame(3, 0, 200, 5, [None]),
        (200, ErrorCode.INVALID_REQUEST),
        "not a request envelope: Expected `str | null`, got `int`",
    ),
    "a correlation id that is no integer": (request_frame(3, 0, "1", "c", [None]), None, "not a request envelope"),
    "an unknown API": (request_frame(99, 0, 70_000, "c", []), (70_000, ErrorCode.INVALID_REQUEST), "unknown API 99"),
    "an unknown version": (
        request_frame(3, 1, 8, "c", [None]),
        (8, ErrorCode.UNSUPPORTED_VERSION),
        "version 1 of Metadata; this broker knows 0 to 0",
    ),
    "a wrong field": (request_frame(3, 0, 8, "c", [[5]]), (8, ErrorCode.INVALID_REQUEST), "not a Metadata request"),
    "a number out of bounds": (
        request_frame(18, 0, 8, "c", ["x" * 250, ""]),
        (8, ErrorCode.INVALID_REQUEST),
        "not a ApiVersions request",
    ),
    "text that is not UTF-8": (
        framed(b"\x95\x03\x00\x08\xa1c\x91\x91\xa1\xff"),
        (8, ErrorCode.INVALID_REQUEST),
        "UTF-8",
    ),
    "an array that announces four billion elements": (
        framed(b"\x95\x03\x00\x08\xa1c\x91\xdd\xff\xff\xff\xff"),
        (8, ErrorCode.INVALID_REQUEST),
        "truncated",
    ),
    "deep nesting": (framed(b"\x95\x03\x00\x08\xa1c" + b"\x91" * 60_000), (8, ErrorCode.INVALID_REQUEST), "recursion"),
    "a control request": (
        update_metadata_frame(8),
        (8, ErrorCode.INVALID_REQUEST),
        "UpdateMetadata is not served on listener DATA",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_closes_the_connection_and_logs_one_line(
    run: Run, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, expected, reason = BAD_INPUT[case]
    addresses: list[str] = []

    async def main() -> None:
        topics: list[str] = []

        async def handler(request: Request) -> None:
            topics.append(topic_of(request))
            await answer(request)

        async with serving(handler) as up:
            bystander = await up.connect()
            peer = await up.connect()
            addresses.append(peer.address)
            peer.send(metadata_frame(1, "before") + data + metadata_frame(2, "after"))
            assert (await peer.response()).correlation_id == 1
            if expected is not None:
                response = await peer.response()
                assert (response.correlation_id, response.error_code) == expected
                with pytest.raises(BrokerError):
                    apis.decode_response(apis.METADATA, response)
            assert await peer.closed() == b""
            bystander.metadata(3, "bystander")
            assert (await bystander.response()).correlation_id == 3
            assert topics == ["before", "bystander"]
            assert up.server.metrics.bad_input == 1
            await until(lambda: up.server.planes[Plane.DATA].quotas.total == 1)

    run(main)
    (line,) = network_lines(caplog)
    assert addresses[0] in line
    assert "DATA" in line
    assert reason.casefold() in line.casefold(), "msgspec has used both spellings"
    assert "Traceback" not in caplog.text


def test_a_data_request_on_the_control_listener_is_refused(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(answer) as up:
            peer = await up.connect("CONTROL")
            peer.metadata(5)
            response = await peer.response()
            assert (response.correlation_id, response.error_code) == (5, ErrorCode.INVALID_REQUEST)
            assert await peer.closed() == b""

    run(main)
    (line,) = network_lines(caplog)
    assert "Metadata is not served on listener CONTROL of the control plane" in line


@run_by("run")
async def test_requests_handled_before_bad_input_are_answered_even_if_their_handler_takes_long() -> None:
    may_return = asyncio.Event()

    async def handler(request: Request) -> None:
        await may_return.wait()
        await answer(request)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.send(metadata_frame(1) + metadata_frame(2) + struct.pack(">i", -5))
        await until(lambda: up.server.planes[Plane.DATA].channel.bytes > 0)
        assert up.server.metrics.bad_input == 0
        may_return.set()
        assert await peer.correlation_ids(2) == [1, 2]
        assert await peer.closed() == b""


def test_a_peer_that_closes_in_the_middle_of_a_frame_is_removed(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with serving(answer) as up:
            peer = await up.connect()
            peer.send(metadata_frame(1) + metadata_frame(2)[:-3])
            assert await peer.correlation_ids(1) == [1]
            peer.writer.close()
            await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)

    run(main)
    assert [line for line in network_lines(caplog, logging.INFO) if "in the middle of a frame" in line]


@run_by("run")
async def test_some_changes_sent_before_the_peer_closed_its_side_are_handled_and_reads_are_not() -> None:
    handled: list[int] = []

    async def handler(request: Request) -> None:
        await until(lambda: request.closed)
        handled.append(request.correlation_id)
        request.respond_nothing()

    produce = m.ProduceRequest(None, 0, 1_000, [])
    leave = g.LeaveGroupRequest("orders", [])
    frames = bytearray()
    for number in range(20):
        frames += apis.encode_request(apis.PRODUCE, number, None, produce)
    for number in range(20, 40, 2):
        frames += apis.encode_request(apis.LEAVE_GROUP, number, None, leave)
        frames += metadata_frame(number + 1, "orders")
    async with serving(handler) as up:
        peer = await up.connect()
        peer.send(frames)
        peer.writer.write_eof()
        assert await peer.closed() == b""
        await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)
        assert handled == [*range(20), 20, 22, 24], (
            "all without an answer, and of MOST_AFTER_LOSS others those that change"
        )
        assert up.server.planes[Plane.DATA].channel.bytes == 0


@pytest.mark.parametrize("how", ["closes", "resets"])
@run_by("run")
async def test_an_answer_to_a_closed_connection_is_dropped(how: str) -> None:
    parked: list[Request] = []

    async def handler(request: Request) -> None:
        parked.append(request)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.metadata(1)
        peer.metadata(2)
        await until(lambda: len(parked) == 2)
        assert not parked[0].closed
        if how == "closes":
            peer.writer.close()
        else:
            peer.reset()
        await until(lambda: parked[0].closed)
        parked[0].respond(EMPTY_METADATA)
        parked[1].respond_error(ErrorCode.REQUEST_TIMED_OUT, "late")
        assert parked[0].sent_at > 0
        await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)


@run_by("run")
async def test_a_connection_may_be_lost_while_its_handler_runs() -> None:
    running: list[Request] = []
    finished: list[str] = []

    async def handler(request: Request) -> None:
        running.append(request)
        await until(lambda: request.closed)
        await answer(request)
        finished.append(topic_of(request))

    async with serving(handler) as up:
        peer = await up.connect()
        peer.send(metadata_frame(1, "first") + metadata_frame(2, "second"))
        await until(lambda: len(running) == 1)
        peer.reset()
        await until(lambda: finished == ["first"])
        await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)
        assert len(running) == 1, "nobody awaits the answer to the second"


# --- Deadlines -----------------------------------------------------------------------------------------------


def test_a_frame_that_is_not_completed_in_time_closes_the_connection(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(answer, NetworkSettings(frame_timeout_ms=100)) as up:
            small, large = await up.connect(), await up.connect()
            bystander = await up.connect()
            large.send(produce_frame(1, b"x" * 500_000)[:400_000])
            trickling = asyncio.create_task(trickle(small.writer))
            await small.closed()
            await large.closed()
            await trickling
            bystander.metadata(3)
            assert await bystander.correlation_ids(1) == [3]
            assert up.server.metrics.slow_closed == 2

    async def trickle(writer: asyncio.StreamWriter) -> None:
        """Send byte after byte, never a complete frame."""
        for byte in metadata_frame(1, "x" * 10_000):
            if writer.transport.is_closing():
                return
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    run(main)
    lines = network_lines(caplog)
    assert len(lines) == 2
    assert all("a frame was not complete after 0.1 s" in line for line in lines)


@pytest.mark.slow
@run_by("run")
async def test_idle_connections_are_closed_on_data_listeners_only() -> None:
    parked: list[Request] = []

    async def handler(request: Request) -> None:
        if request.api is apis.METADATA:
            parked.append(request)
        else:
            await answer(request)

    async with serving(handler, NetworkSettings(connections_max_idle_ms=400)) as up:
        control = await up.connect("CONTROL")
        waiting = await up.connect()
        waiting.metadata(1)
        idle = await up.connect()
        assert await idle.closed() == b""
        also_idle = await up.connect()
        assert await also_idle.closed() == b""
        control.send(update_metadata_frame(2))
        assert await control.correlation_ids(1) == [2]
        parked[0].respond(EMPTY_METADATA)
        assert await waiting.correlation_ids(1) == [1]
        assert await waiting.closed() == b""
        assert up.server.metrics.idle_closed == 3


def test_a_peer_that_does_not_read_is_no_longer_read_from_and_is_closed_after_a_while(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        handled = 0
        big = m.MetadataResponse(0, [m.MetadataBroker(1, "h" * 30_000, 1)] * 20, None, -1, [])

        async def handler(request: Request) -> None:
            nonlocal handled
            handled += 1
            request.respond(big)

        async with serving(handler, NetworkSettings(write_timeout_ms=300)) as up:
            with socket.create_connection(("127.0.0.1", up.ports["DATA"])) as raw:
                raw.sendall(b"".join(metadata_frame(number) for number in range(200)))
                await until(lambda: up.server.metrics.slow_closed == 1)
                assert handled < 100
                await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)

    run(main)
    (line,) = network_lines(caplog)
    assert "has not read its responses for 0.3 s" in line


@run_by("run")
async def test_a_slow_reader_gets_all_its_responses() -> None:
    big = m.MetadataResponse(0, [m.MetadataBroker(1, "h" * 30_000, 1)] * 20, None, -1, [])

    async def handler(request: Request) -> None:
        request.respond(big)

    async with serving(handler) as up:
        peer = await up.connect()
        peer.send(b"".join(metadata_frame(number) for number in range(60)))
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        handled = up.server.metrics.per_api[apis.METADATA.key]
        await until(lambda: 0 < handled.handled < 60)
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await peer.correlation_ids(60) == list(range(60))


@run_by("run")
async def test_the_send_buffer_is_a_hundred_kibibytes_for_kafkas_protocol_and_the_systems_for_ours() -> None:
    def held(peer: Peer) -> int:
        acceptors = up.server._acceptors
        every = (each for acceptor in acceptors for processor in acceptor.processors for each in processor.connections)
        [connection] = [each for each in every if each.peer == peer.address]
        assert connection._transport is not None
        raw = connection._transport.get_extra_info("socket")
        return int(raw.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

    async with serving(answer) as up:
        kafkas, ours = await up.connect(), await up.connect()
        api_versions_v0 = struct.pack(">hhih4s", 18, 0, 1, 4, b"test")
        kafkas.send(framed(api_versions_v0))
        await kafkas.reader.readexactly(4)
        ours.metadata(1)
        await ours.response()
        assert held(kafkas) == 2 * KafkaDialect.send_buffer_bytes  # Linux doubles the value for its own overhead
        assert held(ours) != held(kafkas)


def test_a_peer_whose_unread_responses_hold_too_much_memory_is_closed(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        big = m.MetadataResponse(0, [m.MetadataBroker(1, "h" * 30_000, 1)] * 200, None, -1, [])
        parked: list[Request] = []

        async def handler(request: Request) -> None:
            parked.append(request)

        async with serving(handler, NetworkSettings(max_unsent_response_bytes=20_000_000)) as up:
            with socket.create_connection(("127.0.0.1", up.ports["DATA"])) as raw:
                raw.sendall(b"".join(metadata_frame(number) for number in range(20)))
                await until(lambda: len(parked) == 20)
                for request in parked:
                    request.respond(big)
                assert parked[-1].closed
                await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)

    run(main)
    (line,) = network_lines(caplog)
    assert "bytes of responses are unread" in line


# --- Back-pressure -------------------------------------------------------------------------------------------


async def fill(raw: socket.socket, data: bytes) -> int:
    """Send copies of `data` until the server, which runs on this loop, reads no more in many iterations. Return the
    number of bytes sent."""
    raw.setblocking(False)
    sent = turns = 0
    rest = memoryview(data)
    while turns < 200:
        try:
            count = raw.send(rest)
        except BlockingIOError:
            turns += 1
        else:
            turns = 0
            sent += count
            rest = rest[count:] or memoryview(data)
        await asyncio.sleep(0)
    return sent


@run_by("run")
async def test_handlers_that_are_stuck_push_back_on_a_pipelining_sender() -> None:
    may_return = asyncio.Event()
    handled = 0

    async def handler(request: Request) -> None:
        nonlocal handled
        await may_return.wait()
        handled += 1
        request.respond_nothing()

    async with serving(handler) as up:
        with socket.create_connection(("127.0.0.1", up.ports["DATA"])) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
            frame = produce_frame(1, b"x" * 20_000)
            sent = await fill(raw, frame)
            assert handled == 0
            may_return.set()
            await until(lambda: handled == sent // len(frame))


@run_by("run")
async def test_a_full_request_channel_stops_reading_and_admits_the_waiting_connections_in_turn() -> None:
    running = 0

    def count_of_all(server: SocketServer) -> int:
        return running + len(server.planes[Plane.DATA].channel) + server.planes[Plane.DATA].channel.in_line

    may_return = asyncio.Event()
    order: list[str] = []

    async def handler(request: Request) -> None:
        nonlocal running
        running += 1
        order.append(topic_of(request))
        await may_return.wait()
        await answer(request)

    settings = NetworkSettings(num_io_threads=1, queued_max_requests=3)
    async with serving(handler, settings) as up:
        peers = [await up.connect() for _ in range(12)]
        for number, peer in enumerate(peers):
            peer.metadata(number, f"{number:02}")
            await until(lambda number=number: count_of_all(up.server) == number + 1)  # type: ignore[misc]
        assert len(up.server.planes[Plane.DATA].channel) == 3
        assert up.server.planes[Plane.DATA].channel.in_line == 8
        with socket.create_connection(("127.0.0.1", up.ports["DATA"])) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
            await fill(raw, metadata_frame(99, "flood" + "x" * 1_000))
            assert len(up.server.planes[Plane.DATA].channel) == 3
            may_return.set()
            for number, peer in enumerate(peers):
                assert await peer.correlation_ids(1) == [number]
        assert [topic for topic in order if len(topic) == 2] == [f"{number:02}" for number in range(12)]


@run_by("run")
async def test_the_bytes_of_queued_requests_are_bounded_but_a_single_request_may_exceed_the_limit() -> None:
    may_return = asyncio.Event()
    most = 0

    async def handler(request: Request) -> None:
        nonlocal most
        most = max(most, up.server.planes[Plane.DATA].channel.bytes)
        await may_return.wait()
        await answer(request)

    async with serving(handler, NetworkSettings(queued_max_request_bytes=250_000)) as up:
        peers = [await up.connect() for _ in range(6)]
        for number, peer in enumerate(peers):
            peer.send(produce_frame(number, b"x" * 100_000))
        await until(lambda: up.server.planes[Plane.DATA].channel.bytes > 200_000)
        may_return.set()
        for number, peer in enumerate(peers):
            assert await peer.correlation_ids(1) == [number]
        assert most <= 250_000
        peers[0].send(produce_frame(9, b"x" * 400_000))
        assert await peers[0].correlation_ids(1) == [9]
        assert most > 400_000


@run_by("run")
async def test_unanswered_requests_of_a_connection_are_bounded() -> None:
    parked: list[Request] = []

    async def handler(request: Request) -> None:
        parked.append(request)

    async with serving(handler, NetworkSettings(max_in_flight_requests_per_connection=3)) as up:
        peer, other = await up.connect(), await up.connect()
        peer.send(b"".join(metadata_frame(number) for number in range(10)))
        await until(lambda: len(parked) == 3)
        other.metadata(1)
        await until(lambda: len(parked) == 4)  # the first peer's fourth request was not handled
        for number in range(10):
            mine = [request for request in parked if request.peer == peer.address]
            assert len(mine) == min(10, 3 + number)
            mine[number].respond(EMPTY_METADATA)
            assert await peer.correlation_ids(1) == [number]
            await until(lambda number=number: len(parked) == 1 + min(10, 4 + number))  # type: ignore[misc]


@run_by("run")
async def test_unanswered_bytes_of_a_connection_are_bounded() -> None:
    parked: list[Request] = []

    async def handler(request: Request) -> None:
        parked.append(request)

    async with serving(handler, NetworkSettings(max_in_flight_bytes_per_connection=150_000)) as up:
        peer, other = await up.connect(), await up.connect()
        peer.send(b"".join(produce_frame(number, b"x" * 100_000) for number in range(4)))
        await until(lambda: len(parked) == 2)
        other.metadata(1)
        await until(lambda: len(parked) == 3)
        parked[0].respond(m.ProduceResponse([]))
        await until(lambda: len(parked) == 4)
        assert [request.correlation_id for request in parked if request.peer == peer.address] == [0, 1, 2]


@run_by("run")
async def test_the_control_plane_is_served_while_data_handlers_are_stuck_and_their_channel_is_full() -> None:
    may_return = asyncio.Event()

    async def handler(request: Request) -> None:
        if request.listener == "DATA":
            await may_return.wait()
        await answer(request)

    settings = NetworkSettings(num_io_threads=3, queued_max_requests=4)
    async with serving(handler, settings) as up:
        peers = [await up.connect() for _ in range(20)]
        for peer in peers:
            peer.send(b"".join(metadata_frame(number) for number in range(10)))
        await until(lambda: len(up.server.planes[Plane.DATA].channel) == 4)
        control = await up.connect("CONTROL")
        for number in range(100):
            control.send(update_metadata_frame(number))
            assert await control.correlation_ids(1) == [number]
        assert len(up.server.planes[Plane.DATA].channel) == 4
        may_return.set()
        for peer in peers:
            assert await peer.correlation_ids(10) == list(range(10))


# --- Connection limits, listeners, the end -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (NetworkSettings(max_connections=3), "max.connections=3"),
        (NetworkSettings(max_connections_per_ip=3), "max.connections.per.ip=3"),
    ],
)
def test_clients_over_a_limit_are_refused_while_others_are_busy_and_limits_are_per_plane(
    run: Run,
    settings: NetworkSettings,
    setting: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MIN_IDLE_S", 1_000.0)

    async def main() -> None:
        async with serving(answer, settings) as up:
            peers = [await up.connect() for _ in range(3)]
            for peer in peers:
                peer.metadata(1)
                assert await peer.correlation_ids(1) == [1]
            for _ in range(5):
                refused = await up.connect()
                refused.metadata(1)
                assert await refused.closed() == b""
            assert up.server.metrics.connections_refused == 5
            control = await up.connect("CONTROL")
            control.send(update_metadata_frame(1))
            assert await control.correlation_ids(1) == [1]

    run(main)
    lines = network_lines(caplog)
    assert len(lines) == 5
    assert all(f"on listener DATA is refused: {setting} is reached" in line for line in lines)


@pytest.mark.parametrize("settings", [NetworkSettings(max_connections=3), NetworkSettings(max_connections_per_ip=3)])
@pytest.mark.parametrize("have_asked", [True, False])
def test_idle_connections_give_way_to_new_ones(
    run: Run, settings: NetworkSettings, have_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MIN_IDLE_S", 0.0)

    async def main() -> None:
        async with serving(answer, settings) as up:
            peers = [await up.connect() for _ in range(3)]
            for peer in peers:
                if have_asked:
                    peer.metadata(1)
                    assert await peer.correlation_ids(1) == [1]
            late = await up.connect()
            late.metadata(2)
            assert await late.correlation_ids(1) == [2]
            assert await peers[0].closed() == b""
            for peer in peers[1:]:
                peer.metadata(3)
                assert await peer.correlation_ids(1) == [3]

    run(main)


def test_a_connection_without_a_first_request_ends_soon(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "minibroker.network")
    monkeypatch.setattr(processor, "FIRST_REQUEST_S", 0.3)

    async def main() -> None:
        async with serving(answer, NetworkSettings()) as up:
            silent, client = await up.connect(), await up.connect()
            client.metadata(1)
            assert await client.correlation_ids(1) == [1]
            assert await silent.closed() == b""
            control = await up.connect("CONTROL")  # perhaps a broker's crash detection, since there are no proofs
            await asyncio.sleep(1.5)
            control.send(update_metadata_frame(1))
            assert await control.correlation_ids(1) == [1]
            client.metadata(2)
            assert await client.correlation_ids(1) == [2]

    run(main)
    [said] = [line for line in network_lines(caplog, logging.INFO) if "closed: it has not sent" in line]
    assert "it has not sent a valid request within 0.3 s" in said
    assert not network_lines(caplog)


@run_by("run")
async def test_connections_over_the_rate_are_delayed_and_served_in_turn() -> None:
    async with serving(answer, NetworkSettings(max_connection_creation_rate=3)) as up:
        began = asyncio.get_running_loop().time()
        peers = [await up.connect() for _ in range(6)]
        for number, peer in enumerate(peers):
            peer.metadata(number)
            assert await peer.correlation_ids(1) == [number]
        assert asyncio.get_running_loop().time() - began > 0.9
        assert 1 <= up.server.metrics.per_listener["DATA"].delays.count <= 3  # less than 3: the loop stood still
        assert up.server.metrics.connections_refused == 0


@run_by("run")
async def test_an_address_over_its_rate_delays_neither_another_one_nor_the_control_plane_nor_the_end() -> None:
    async with serving(answer) as up:
        up.server.set_connection_rates({"127.0.0.1": 1, "127.0.0.2": 1_000})
        peers = [await up.connect() for _ in range(14)]
        delays = up.server.metrics.per_listener["DATA"].address_delays
        await until(lambda: delays.count >= 9 and up.server.metrics.connections_refused)
        assert up.server.metrics.connections_refused <= 3
        began = asyncio.get_running_loop().time()
        other = await up.connect(source="127.0.0.2")
        other.metadata(1)
        assert await other.correlation_ids(1) == [1]
        await up.connect("CONTROL")
        assert asyncio.get_running_loop().time() - began < 5  # the last of the delayed ones waits for twice as long
        peers[1].metadata(7)
        assert await peers[1].correlation_ids(1) == [7]


TWO = ("BROKERS", "DATA")
"""Listeners of data, of which the first is that of the brokers."""


async def serves(up: Serving, listener: str, source: str | None = None) -> Peer | None:
    """Return a new connection that was answered, or None if it was closed."""
    peer = await up.connect(listener, source=source)
    try:
        peer.metadata(1)
        assert await peer.correlation_ids(1) == [1]
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return peer


@run_by("run")
async def test_a_listener_has_a_limit_of_its_own_that_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MIN_IDLE_S", 1_000.0)
    settings = NetworkSettings(max_connections_of_listeners={"DATA": 2})
    async with serving(answer, settings, data_listeners=TWO) as up:
        assert [await serves(up, "DATA") is not None for _ in range(3)] == [True, True, False]
        assert [await serves(up, "BROKERS") is not None for _ in range(3)] == [True] * 3
        up.server.reconfigure(msgspec.structs.replace(settings, max_connections_of_listeners={"DATA": 3}))
        assert [await serves(up, "DATA") is not None for _ in range(2)] == [True, False]
        assert up.server.open_connections() == {"BROKERS": 3, "DATA": 3, "CONTROL": 0}
        assert up.server.metrics.per_listener["BROKERS"].accepted == 3


@run_by("run")
async def test_a_listener_has_a_rate_of_its_own_that_delays_no_other_listener() -> None:
    settings = NetworkSettings(max_connection_creation_rate_of_listeners={"DATA": 2})
    async with serving(answer, settings, data_listeners=TWO) as up:
        now = asyncio.get_running_loop().time
        began = now()
        slow = [await up.connect("DATA") for _ in range(6)]
        for _ in range(10):
            assert await serves(up, "BROKERS")
        assert now() - began < 4  # at the other listener's rate, 5
        for peer in slow:
            peer.metadata(1)
            assert await peer.correlation_ids(1) == [1]
        assert now() - began > 1.9
        counts = up.server.metrics.per_listener
        assert 1 <= counts["DATA"].delays.count <= 4  # less than 4: the loop stood still
        assert counts["DATA"].delays.sum_s > 0.4
        assert counts["DATA"].address_delays.count == 0
        assert counts["BROKERS"].delays.count == 0


@run_by("run")
async def test_a_connection_that_waited_for_its_address_waits_for_its_listener_as_well() -> None:
    async with serving(answer, NetworkSettings(max_connection_creation_rate_of_listeners={"DATA": 1})) as up:
        up.server.set_connection_rates({"127.0.0.1": 2})
        for _ in range(6):
            await up.connect()
        counts = up.server.metrics.per_listener["DATA"]
        await until(lambda: counts.delays.count >= 3 and counts.address_delays.count >= 2)


@run_by("run")
async def test_the_listener_of_the_brokers_is_served_although_clients_have_all_connections_and_use_up_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MIN_IDLE_S", 1_000.0)
    settings = NetworkSettings(max_connections=3, max_connection_creation_rate=3, protected_listener="BROKERS")
    async with serving(answer, settings, data_listeners=TWO) as up:
        began = asyncio.get_running_loop().time()
        clients = [await serves(up, "DATA") for _ in range(3)]
        brokers = [await serves(up, "BROKERS") for _ in range(20)]
        assert None not in brokers
        assert asyncio.get_running_loop().time() - began < 5  # at the rate, more than 6
        for client in clients:
            assert client is not None
            assert await client.closed() == b""
        assert await serves(up, "DATA") is None
        for broker in brokers:
            assert broker is not None
            broker.metadata(2)
            assert await broker.correlation_ids(1) == [2]


@pytest.mark.parametrize("rate", [1_000, 20])
@run_by("run")
async def test_new_connections_do_not_pile_up_at_processors_and_each_gets_its_share(
    rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "NEW_CONNECTIONS", 2)
    processors: list[Processor] = []
    waiting: list[int] = []
    open_one = Acceptor._open

    def opened(self: Acceptor, *arguments: Any) -> None:
        open_one(self, *arguments)
        processors[:] = self.processors
        waiting.append(max(len(each.new) for each in processors))

    monkeypatch.setattr(Acceptor, "_open", opened)
    async with serving(answer, NetworkSettings(max_connection_creation_rate=rate)) as up:
        await asyncio.gather(*(up.connect() for _ in range(60)))
        if rate == 20:
            await until(lambda: len(waiting) + up.server.metrics.per_listener["DATA"].delays.count >= 60)
            time.sleep(1.0)  # noqa: ASYNC251, the loop stands still, and the turns of many come at once
        await until(lambda: len(waiting) == 60)
        await until(lambda: up.server.open_connections()["DATA"] == 60)
        assert max(waiting) == 2
        assert [len(each.connections) for each in processors] == [20, 20, 20]


@run_by("run")
async def test_a_host_has_a_limit_of_its_own_by_address_or_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quotas, "MIN_IDLE_S", 1_000.0)
    limits = {"localhost": 2, "127.0.0.3": 1, "no-such-host.invalid": 1}
    settings = NetworkSettings(max_connections_per_ip=3, max_connections_per_ip_overrides=limits)
    async with serving(answer, settings) as up:
        of_plane = up.server.planes[Plane.DATA].quotas
        await until(lambda: "127.0.0.1" in of_plane._overrides)
        assert [await serves(up, "DATA") is not None for _ in range(3)] == [True, True, False]
        for source, limit in (("127.0.0.2", 3), ("127.0.0.3", 1)):
            served = [await serves(up, "DATA", source) is not None for _ in range(limit + 1)]
            assert served == [True] * limit + [False]
        await until(lambda: any("no-such-host.invalid, which is not known" in line for line in network_lines(caplog)))
        up.server.reconfigure(msgspec.structs.replace(settings, max_connections_per_ip_overrides={}))
        assert await serves(up, "DATA")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@run_by("run")
async def test_a_listener_for_all_of_ipv6_counts_an_ipv4_address_as_what_it_is() -> None:
    settings = NetworkSettings(max_connections_per_ip_overrides={"127.0.0.3": 0})
    async with serving(answer, settings, host="::") as up:
        assert await serves(up, "DATA", "127.0.0.2")
        assert not await serves(up, "DATA", "127.0.0.3")


@run_by("run")
async def test_a_closed_connection_makes_room_for_another() -> None:
    async with serving(answer, NetworkSettings(max_connections_per_ip=1)) as up:
        for number in range(3):
            peer = await up.connect()
            peer.metadata(number)
            assert await peer.correlation_ids(1) == [number]
            peer.writer.close()
            await until(lambda: up.server.planes[Plane.DATA].quotas.total == 0)


@run_by("run")
async def test_a_port_in_use_is_an_error_with_address_and_remedy_and_binds_nothing() -> None:
    world = RealWorld()
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        port, free_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        server = SocketServer(world, NetworkSettings(), answer)
        with pytest.raises(NetworkError) as raised:
            await server.bind(
                [("DATA", "127.0.0.1", free_port, Plane.DATA), ("CONTROL", "127.0.0.1", port, Plane.CONTROL)]
            )
        assert f"the listener CONTROL cannot listen on 127.0.0.1:{port}" in str(raised.value)
        assert "another process" in str(raised.value)
        again = SocketServer(world, NetworkSettings(), answer)
        assert await again.bind([("DATA", "127.0.0.1", free_port, Plane.DATA)]) == {"DATA": free_port}
        await again.close()
    world.close()


@pytest.mark.parametrize(
    ("host", "hint"),
    [("192.0.2.1", "does not have that address"), ("no-such-host.invalid", "is not known")],
)
@run_by("run")
async def test_an_address_of_another_machine_is_a_clear_error(host: str, hint: str) -> None:
    world = RealWorld()
    server = SocketServer(world, NetworkSettings(), answer)
    with pytest.raises(NetworkError, match=hint) as raised:
        await server.bind([("DATA", host, 0, Plane.DATA)])
    assert f"{host}:0" in str(raised.value)
    world.close()


@pytest.mark.parametrize(
    ("host", "connect_to"), [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("localhost", "localhost")]
)
@run_by("run")
async def test_listeners_accept_every_kind_of_host(host: str, connect_to: str) -> None:
    async with serving(answer, host=host) as up:
        peer = await up.connect(host=connect_to)
        peer.metadata(1)
        assert await peer.correlation_ids(1) == [1]


@run_by("run")
async def test_connections_made_before_the_start_are_served_after_it() -> None:
    world = RealWorld()
    server = SocketServer(world, NetworkSettings(), answer)
    up = Serving(server, await server.bind([("DATA", "127.0.0.1", 0, Plane.DATA)]))
    peer = await up.connect()
    peer.metadata(1)
    server.start()
    assert await peer.correlation_ids(1) == [1]
    await server.close()
    assert await peer.closed() == b""
    await up.disconnect_all()
    world.close()


@run_by("run")
async def test_close_waits_for_requests_that_are_being_handled() -> None:

    def peer_is_refused(port: int) -> bool:
        with socket.socket() as raw:
            return raw.connect_ex(("127.0.0.1", port)) != 0

    world = RealWorld()
    started = 0
    may_return = asyncio.Event()

    async def handler(request: Request) -> None:
        nonlocal started
        started += 1
        await may_return.wait()
        await answer(request)

    server = SocketServer(world, NetworkSettings(num_io_threads=2), handler)
    up = Serving(server, await server.bind([("DATA", "127.0.0.1", 0, Plane.DATA)]))
    server.start()
    peers = [await up.connect() for _ in range(4)]
    for peer in peers:
        peer.send(metadata_frame(1) + metadata_frame(2))
    await until(lambda: started == 2 and len(server.planes[Plane.DATA].channel) == 2)
    closing = asyncio.create_task(server.close(grace_s=10))
    await until(lambda: peer_is_refused(up.ports["DATA"]))
    may_return.set()
    await closing
    for peer in peers:
        assert await peer.correlation_ids(1) == [1]
        assert await peer.closed() == b""  # the second request was not dispatched
    assert started == 4
    await up.disconnect_all()
    world.close()


def test_close_cancels_handlers_that_do_not_finish(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = RealWorld()
        cancelled: list[str] = []

        async def handler(request: Request) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.append(topic_of(request))
                raise

        server = SocketServer(world, NetworkSettings(num_io_threads=1), handler)
        up = Serving(server, await server.bind([("DATA", "127.0.0.1", 0, Plane.DATA)]))
        server.start()
        peers = [await up.connect() for _ in range(2)]
        for number, peer in enumerate(peers):
            peer.metadata(1, str(number))
        await until(lambda: len(server.planes[Plane.DATA].channel) == 1)
        await server.close(grace_s=0.01)
        for peer in peers:
            assert await peer.closed() == b""
        assert len(cancelled) == 1
        await up.disconnect_all()
        world.close()

    run(main)
    assert "were not handled within 0.01 s" in caplog.text


@pytest.mark.slow
@run_by("run")
async def test_close_does_not_wait_for_peers_that_do_not_read() -> None:
    world = RealWorld()
    big = m.MetadataResponse(0, [m.MetadataBroker(1, "h" * 30_000, 1)] * 200, None, -1, [])

    async def handler(request: Request) -> None:
        request.respond(big)

    server = SocketServer(world, NetworkSettings(), handler)
    ports = await server.bind([("DATA", "127.0.0.1", 0, Plane.DATA)])
    server.start()
    with socket.create_connection(("127.0.0.1", ports["DATA"])) as raw:
        raw.sendall(metadata_frame(1) + metadata_frame(2))
        await until(lambda: server.metrics.per_api[apis.METADATA.key].handled >= 1)
        await server.close()
    assert server.planes[Plane.DATA].quotas.total == 0
    world.close()


@run_by("run")
async def test_close_right_after_bind_is_fine() -> None:
    world = RealWorld()
    server = SocketServer(world, NetworkSettings(), answer)
    await server.bind([("DATA", "127.0.0.1", 0, Plane.DATA)])
    await server.close()
    world.close()
