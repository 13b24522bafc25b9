"""The virtual network. Behaviour that it shares with real TCP is also tested on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, cast

import pytest
import uvloop

from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.transport import WINDOW_BYTES, Arrival
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.apis import METADATA, decode_request, decode_request_envelope, encode_response
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES, FrameReader, request_limit
from minibroker.protocol.connections.rpc import RequestTimedOut, open_connection
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.messages import MetadataRequest, MetadataResponse, MetadataTopic
from minibroker.protocol.world import Incoming, Listener, Network
from minibroker.protocol.world.real import RealNetwork
from tests.running import run_by

Scenario = Callable[[Network, Network, str], Coroutine[None, None, None]]
"""A test, given the server's network, the client's, and the name of the server's host."""


def _on_the_virtual_loop(scenario: Scenario) -> None:
    async def main() -> None:
        simulation = Simulation()
        server = simulation.host("server").start_process()
        client = simulation.host("client").start_process()
        await scenario(server.network, client.network, "server")

    for seed in range(5):
        run(main(), seed=seed)


def _on_asyncio(scenario: Scenario) -> None:
    asyncio.run(scenario(RealNetwork(), RealNetwork(), "127.0.0.1"))


def _on_uvloop(scenario: Scenario) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(RealNetwork(), RealNetwork(), "127.0.0.1"))


everywhere = pytest.mark.parametrize("play", [_on_the_virtual_loop, _on_asyncio, _on_uvloop])
Play = Callable[[Scenario], None]


class Recording(asyncio.BaseProtocol):
    """Records bytes and events, and lets a test wait for them."""

    def __init__(self, *, keep_open: bool = False) -> None:
        self.transport: asyncio.Transport | None = None
        self.data = bytearray()
        self.events: list[str] = []
        self.error: Exception | None = None
        self._keep_open = keep_open
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses
        self._note("made")

    def keep(self, data: bytes) -> None:
        self.data += data
        self._changed.set()

    def eof_received(self) -> bool:
        self._note("eof")
        return self._keep_open

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._note("lost")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def lost(self) -> None:
        await self.until(lambda: "lost" in self.events)

    @property
    def wire(self) -> asyncio.Transport:
        assert self.transport is not None
        return self.transport


class Recorder(Recording, asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        self.keep(data)


class BufferedRecorder(Recording, asyncio.BufferedProtocol):
    """A recorder with a small buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = bytearray(1_000)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.keep(bytes(self._buffer[:nbytes]))


async def _pair(
    server: Network, client: Network, host: str, there: Recording | None = None, here: Recording | None = None
) -> tuple[Listener, Recording, Recording]:
    """Return a listener, and a connection to it: the server's end and the client's."""
    accepted = there or Recorder()
    connected = here or Recorder()
    attaching: list[asyncio.Task[Recording]] = []
    listener = await server.listen(host, 0)
    listener.start(lambda incoming: attaching.append(asyncio.ensure_future(incoming.attach(lambda: accepted))))
    await client.connect(host, listener.port, lambda: connected)
    await accepted.until(lambda: "made" in accepted.events)
    return listener, accepted, connected


@everywhere
@pytest.mark.parametrize("kind", [Recorder, BufferedRecorder])
@run_by("play")
async def test_bytes_arrive_complete_and_in_order_in_both_directions(
    server: Network, client: Network, host: str, /, kind: type[Recording]
) -> None:
    listener, there, here = await _pair(server, client, host, kind(), kind())
    data = Random(7).randbytes(500_000)
    for position in range(0, len(data), 5_000):
        here.wire.write(data[position : position + 5_000])
        there.wire.writelines([b"abc", bytearray(b"de"), memoryview(b"f")])
    await there.until(lambda: len(there.data) == len(data))
    await here.until(lambda: len(here.data) == 600)
    assert there.data == data
    assert here.data == b"abcdef" * 100
    here.wire.close()
    await there.lost()
    await listener.close()


@everywhere
@run_by("play")
async def test_a_buffer_may_be_reused_after_its_bytes_have_left(server: Network, client: Network, host: str, /) -> None:
    listener, there, here = await _pair(server, client, host)
    buffer = bytearray(b"before")
    here.wire.write(buffer)
    for _ in range(3):
        await asyncio.sleep(0)
    buffer[:] = b"after!"
    await there.until(lambda: len(there.data) == 6)
    assert there.data == b"before"
    here.wire.close()
    await there.lost()
    await listener.close()


@everywhere
@run_by("play")
async def test_close_delivers_all_written_bytes_and_then_the_end(
    server: Network, client: Network, host: str, /
) -> None:
    listener, there, here = await _pair(server, client, host)
    here.wire.write(bytes(1_000_000))
    here.wire.close()
    assert here.wire.is_closing()
    assert "lost" not in here.events
    await there.lost()
    await here.lost()
    assert len(there.data) == 1_000_000
    assert there.events == ["made", "eof", "lost"]
    assert [event for event in here.events if event not in ("pause", "resume")] == ["made", "lost"]
    assert (there.error, here.error) == (None, None)
    await listener.close()


@everywhere
@run_by("play")
async def test_abort_drops_unsent_bytes_and_ends_the_connection_once(
    server: Network, client: Network, host: str, /
) -> None:
    listener, there, here = await _pair(server, client, host)
    there.wire.pause_reading()
    here.wire.write(bytes(50_000_000))
    here.wire.abort()
    here.wire.abort()
    here.wire.close()
    assert "lost" not in here.events
    await here.lost()
    there.wire.resume_reading()
    await there.lost()
    assert len(there.data) < 50_000_000
    assert here.events.count("lost") == 1
    assert here.error is None
    await listener.close()


@everywhere
@run_by("play")
async def test_a_half_closed_connection_still_carries_answers(server: Network, client: Network, host: str, /) -> None:
    listener, there, here = await _pair(server, client, host, there=Recorder(keep_open=True))
    here.wire.write(b"question")
    here.wire.write_eof()
    await there.until(lambda: "eof" in there.events)
    assert there.data == b"question"
    there.wire.write(b"answer")
    there.wire.close()
    await here.lost()
    assert here.data == b"answer"
    await there.lost()
    await listener.close()


@everywhere
@run_by("play")
async def test_a_writer_to_a_closed_end_is_reset(server: Network, client: Network, host: str, /) -> None:
    listener, there, here = await _pair(server, client, host, there=Recorder(keep_open=True))
    here.wire.close()
    await there.until(lambda: "eof" in there.events)
    loop = asyncio.get_running_loop()

    def write_on() -> None:
        if "lost" not in there.events:
            there.wire.write(b"a probe")
            loop.call_later(0.001, write_on)

    write_on()
    await there.lost()
    assert isinstance(there.error, ConnectionError)
    await listener.close()


class OneByteReader(BufferedRecorder):
    """Reads a single byte, and closes the connection."""

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(1)

    def buffer_updated(self, nbytes: int) -> None:
        self.wire.close()


@everywhere
@run_by("play")
async def test_closing_with_unread_bytes_resets_the_other_side(server: Network, client: Network, host: str, /) -> None:
    listener, there, here = await _pair(server, client, host, there=OneByteReader())
    here.wire.write(b"much more than one byte")
    await there.lost()
    await here.lost()
    assert there.error is None
    assert isinstance(here.error, ConnectionResetError)
    await listener.close()


@everywhere
@run_by("play")
async def test_a_writer_is_paused_while_the_peer_does_not_read(server: Network, client: Network, host: str, /) -> None:
    listener, there, here = await _pair(server, client, host)
    there.wire.pause_reading()
    assert not there.wire.is_reading()
    here.wire.set_write_buffer_limits(high=200_000, low=1_000)
    written = 0
    while "pause" not in here.events:
        here.wire.write(bytes(100_000))
        written += 100_000
        await asyncio.sleep(0)
    assert here.wire.get_write_buffer_size() > 200_000
    assert there.data == b""
    there.wire.resume_reading()
    await here.until(lambda: "resume" in here.events)
    assert here.wire.get_write_buffer_size() <= 1_000
    await there.until(lambda: len(there.data) == written)
    here.wire.close()
    await there.lost()
    await listener.close()


@everywhere
@run_by("play")
async def test_neither_bytes_nor_the_end_are_read_while_reading_is_paused(
    server: Network, client: Network, host: str, /
) -> None:
    listener, there, here = await _pair(server, client, host)
    there.wire.pause_reading()
    here.wire.write(b"x" * 1_000)
    here.wire.close()
    await here.lost()
    # Another connection, opened and closed afterwards, shows that time has passed.
    second, far, near = await _pair(server, client, host)
    near.wire.close()
    await far.lost()
    assert there.events == ["made"]
    there.wire.resume_reading()
    await there.lost()
    assert there.events == ["made", "eof", "lost"]
    assert len(there.data) == 1_000
    await listener.close()
    await second.close()


@everywhere
@run_by("play")
async def test_a_protocol_that_raises_loses_its_connection_and_is_reported(
    server: Network, client: Network, host: str, /
) -> None:
    class Failing(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("a bug")

    reported: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
    listener, there, here = await _pair(server, client, host, there=Failing())
    here.wire.write(b"x")
    await there.lost()
    await here.lost()
    assert str(there.error) == "a bug"
    assert reported == ["a bug"]
    await listener.close()
    if hasattr(loop, "unhandled"):
        loop.unhandled.clear()


@everywhere
@run_by("play")
async def test_connecting_to_a_port_without_a_listener_is_refused(
    server: Network, client: Network, host: str, /
) -> None:
    listener = await server.listen(host, 0)
    await listener.close()
    with pytest.raises(ConnectionRefusedError) as refused:
        await client.connect(host, listener.port, Recorder)
    assert refused.value.errno == errno.ECONNREFUSED


@everywhere
@run_by("play")
async def test_an_unknown_name_is_an_error_of_the_operating_system(
    server: Network, client: Network, host: str, /
) -> None:
    with pytest.raises(socket.gaierror):
        await client.connect("no-such-host.invalid", 9092, Recorder)


@everywhere
@run_by("play")
async def test_a_port_can_be_bound_again_after_its_listener_was_closed(
    server: Network, client: Network, host: str, /
) -> None:
    first = await server.listen(host, 0)
    with pytest.raises(OSError) as taken:
        await server.listen(host, first.port)
    assert taken.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError) as taken:
        await server.listen("0.0.0.0", first.port)
    assert taken.value.errno == errno.EADDRINUSE
    await first.close()
    await first.close()
    second = await server.listen("0.0.0.0", first.port)
    assert second.port == first.port
    await second.close()


@everywhere
@run_by("play")
async def test_a_listener_on_all_addresses_is_reached_by_every_name(
    server: Network, client: Network, host: str, /
) -> None:
    accepted: list[str] = []
    listener = await server.listen("0.0.0.0", 0)

    def accept(incoming: Incoming) -> None:
        accepted.append(incoming.peer)
        incoming.close()

    listener.start(accept)
    for name, network in ((host, client), ("localhost", server), ("127.0.0.1", server)):
        recorder = await network.connect(name, listener.port, Recorder)
        await recorder.lost()
    assert len(accepted) == 3
    await listener.close()


@everywhere
@run_by("play")
async def test_connections_queue_up_until_the_listener_starts(server: Network, client: Network, host: str, /) -> None:
    class Answering(Recorder):
        def data_received(self, data: bytes) -> None:
            self.wire.write(b"answer to " + data)
            self.wire.close()

    listener = await server.listen(host, 0)
    clients = [await client.connect(host, listener.port, Recorder) for _ in range(3)]
    for number, recorder in enumerate(clients):
        recorder.wire.write(b"%d" % number)
    attaching: list[asyncio.Task[Answering]] = []
    listener.start(lambda incoming: attaching.append(asyncio.ensure_future(incoming.attach(Answering))))
    for number, recorder in enumerate(clients):
        await recorder.lost()
        assert recorder.data == b"answer to %d" % number
    await listener.close()


@everywhere
@run_by("play")
async def test_a_refused_connection_ends_for_the_client(server: Network, client: Network, host: str, /) -> None:
    listener = await server.listen(host, 0)
    listener.start(lambda incoming: incoming.close())
    recorder = await client.connect(host, listener.port, Recorder)
    await recorder.lost()
    await listener.close()


@everywhere
@run_by("play")
async def test_accepted_connections_outlive_their_listener(server: Network, client: Network, host: str, /) -> None:
    listener, there, here = await _pair(server, client, host)
    await listener.close()
    here.wire.write(b"still there")
    await there.until(lambda: there.data)
    here.wire.close()
    await there.lost()


@everywhere
@run_by("play")
async def test_both_ends_know_their_addresses(server: Network, client: Network, host: str, /) -> None:
    peers: list[str] = []
    listener = await server.listen(host, 0)
    accepted = Recorder()
    attaching: list[asyncio.Task[Recorder]] = []

    def accept(incoming: Incoming) -> None:
        peers.append(incoming.peer)
        attaching.append(asyncio.ensure_future(incoming.attach(lambda: accepted)))

    listener.start(accept)
    here = await client.connect(host, listener.port, Recorder)
    await accepted.until(lambda: "made" in accepted.events)
    assert here.wire.get_extra_info("peername") == accepted.wire.get_extra_info("sockname")
    assert here.wire.get_extra_info("sockname") == accepted.wire.get_extra_info("peername")
    assert here.wire.get_extra_info("peername")[1] == listener.port
    address, port = accepted.wire.get_extra_info("peername")
    assert peers == [f"{address}:{port}"]
    here.wire.close()
    await accepted.lost()
    await listener.close()


@everywhere
@run_by("play")
async def test_invalid_writes_raise_the_same_errors_as_in_asyncio(
    server: Network, client: Network, host: str, /
) -> None:
    listener, there, here = await _pair(server, client, host)
    with pytest.raises(TypeError):
        here.wire.write("text")  # type: ignore[arg-type]
    here.wire.write(b"")
    here.wire.close()
    here.wire.write(b"too late")
    await there.lost()
    assert there.data == b""
    await listener.close()


# --- protocol.rpc.Connection, against a server that knows one request ---------------------------------------------


class EchoServer(asyncio.BufferedProtocol):
    """Answers Metadata requests in order, with the requested topics. It never answers requests for `silence`."""

    def __init__(self) -> None:
        self._reader = FrameReader(request_limit(MAX_SMALL_REQUEST_BYTES, frozenset()))
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._reader.buffer_updated(nbytes):
            envelope = decode_request_envelope(frame)
            topics = decode_request(METADATA, envelope).topics or []
            if topics != ["silence"]:
                body = MetadataResponse(0, [], None, -1, [MetadataTopic(0, topic, "", False, []) for topic in topics])
                self._transport.write(encode_response(envelope.correlation_id, body))


async def _serve(network: Network, host: str) -> Listener:
    listener = await network.listen(host, 0)
    attaching: list[asyncio.Task[EchoServer]] = []
    listener.start(lambda incoming: attaching.append(asyncio.ensure_future(incoming.attach(EchoServer))))
    return listener


def _echoed(response: MetadataResponse) -> list[str]:
    return [topic.name for topic in response.topics]


@everywhere
@run_by("play")
async def test_an_rpc_connection_gets_its_pipelined_answers(server: Network, client: Network, host: str, /) -> None:
    listener = await _serve(server, host)
    connection = await open_connection(client, host, listener.port, client_id="test", timeout_s=30)
    many = [f"a-topic-with-quite-a-long-name-{number}" for number in range(15_000)]
    questions = [[f"topic-{number}"] for number in range(200)] + [many]
    answers = [connection.send(METADATA, MetadataRequest(topics)) for topics in questions]
    assert [_echoed(await answer) for answer in answers] == questions
    connection.close()
    await connection.wait_closed()
    await listener.close()


@everywhere
@run_by("play")
async def test_an_rpc_connection_without_a_listener_is_an_error(server: Network, client: Network, host: str, /) -> None:
    listener = await server.listen(host, 0)
    await listener.close()
    with pytest.raises(NetworkError, match=f"connecting to {host}:{listener.port}: .*refused|Connect call failed"):
        await open_connection(client, host, listener.port, client_id="test", timeout_s=30)


# --- Only in the simulation: virtual time, kills, seeds ------ -----------------------------------------------------


def _two_processes() -> tuple[VirtualWorld, VirtualWorld]:
    simulation = Simulation()
    return simulation.host("server").start_process(), simulation.host("client").start_process()


@run_by(on_virtual_loop)
async def test_a_request_times_out_in_virtual_time() -> None:
    server, client = _two_processes()
    listener = await server.process.run(_serve(server.network, "server"))
    connection = await open_connection(client.network, "server", listener.port, client_id="test", timeout_s=30)
    started = client.clock.monotonic()
    with pytest.raises(RequestTimedOut):
        await connection.request(METADATA, MetadataRequest(["silence"]), timeout_s=300)
    assert client.clock.monotonic() - started == pytest.approx(300)


@pytest.mark.parametrize("kind", [NetworkError, RequestTimedOut])
@run_by(on_virtual_loop)
async def test_pending_requests_fail_with_the_reason_of_the_close(
    kind: type[NetworkError],
) -> None:
    server, client = _two_processes()
    listener = await server.process.run(_serve(server.network, "server"))
    connection = await open_connection(client.network, "server", listener.port, client_id="test", timeout_s=30)
    answer = connection.send(METADATA, MetadataRequest(["silence"]))
    connection.close("no answer is worth waiting for", kind)
    connection.close("closed again")
    with pytest.raises(kind, match="no answer is worth waiting for") as caught:
        await answer
    assert type(caught.value) is kind


@run_by(on_virtual_loop)
async def test_a_kill_ends_connections_and_listeners() -> None:
    server, client = _two_processes()
    listener = await server.process.run(_serve(server.network, "server"))
    connection = await open_connection(client.network, "server", listener.port, client_id="test", timeout_s=30)
    answer = connection.send(METADATA, MetadataRequest(["silence"]))
    await asyncio.sleep(1)
    assert server.network.connections == 1
    server.process.kill()
    with pytest.raises(NetworkError, match="closed by the other side"):
        await answer
    assert server.network.connections == 0
    with pytest.raises(NetworkError, match="Connect call failed"):
        await open_connection(client.network, "server", listener.port, client_id="test", timeout_s=30)


@run_by(on_virtual_loop)
async def test_bytes_sent_before_the_kill_arrive_and_buffered_ones_do_not() -> None:
    server, client = _two_processes()
    _, there, here = await _pair(server.network, client.network, "server")
    there.wire.write(b"sent")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    there.wire.write(b", written")
    server.process.kill()
    there.wire.write(b", by a dead hand")
    await here.lost()
    assert here.data == b"sent"
    assert here.events == ["made", "eof", "lost"]
    assert there.events == ["made"]


@run_by(on_virtual_loop)
async def test_a_kill_with_unread_bytes_is_a_reset_for_the_other_side() -> None:
    server, client = _two_processes()
    _, there, here = await _pair(server.network, client.network, "server")
    there.wire.pause_reading()
    here.wire.write(b"unread")
    await asyncio.sleep(1)
    server.process.kill()
    await here.lost()
    assert isinstance(here.error, ConnectionResetError)


@run_by(on_virtual_loop)
async def test_a_writer_with_a_full_buffer_is_reset_when_its_reader_is_killed() -> None:
    server, client = _two_processes()
    _, there, here = await _pair(server.network, client.network, "server")
    there.wire.pause_reading()
    here.wire.write(bytes(4 * WINDOW_BYTES))
    here.wire.close()
    await asyncio.sleep(10)
    assert "lost" not in here.events
    server.process.kill()
    await here.lost()
    assert isinstance(here.error, ConnectionResetError)


@run_by(on_virtual_loop)
async def test_a_killed_process_cannot_use_the_network() -> None:
    _, client = _two_processes()
    client.process.kill()
    with pytest.raises(ProcessKilled):
        await client.network.connect("server", 1, Recorder)
    with pytest.raises(ProcessKilled):
        await client.network.listen("client", 1)


@run_by(on_virtual_loop)
async def test_the_next_process_on_a_host_can_listen_on_the_same_port() -> None:
    simulation = Simulation()
    host = simulation.host("server")
    first = host.start_process()
    await first.network.listen("server", 9092)
    first.process.kill()
    assert (await host.start_process().network.listen("server", 9092)).port == 9092


@run_by(on_virtual_loop)
async def test_a_process_cannot_listen_on_another_hosts_address() -> None:
    _, client = _two_processes()
    with pytest.raises(OSError) as refused:
        await client.network.listen("server", 9092)
    assert refused.value.errno == errno.EADDRNOTAVAIL


@run_by(on_virtual_loop)
async def test_loopback_is_not_reached_from_other_hosts() -> None:
    server, client = _two_processes()
    listener = await server.network.listen("127.0.0.1", 9092)
    with pytest.raises(ConnectionRefusedError):
        await client.network.connect("server", listener.port, Recorder)
    with pytest.raises(ConnectionRefusedError):
        await client.network.connect("localhost", listener.port, Recorder)
    await server.network.connect("localhost", listener.port, Recorder)


@run_by(on_virtual_loop)
async def test_a_cancelled_connect_leaves_no_connection_behind() -> None:
    server, client = _two_processes()
    accepted: list[Recorder] = []
    listener = await server.network.listen("server", 9092)

    async def attach(incoming: Incoming) -> None:
        accepted.append(await incoming.attach(Recorder))

    def accept(incoming: Incoming) -> None:
        server.process.start(attach(incoming))

    listener.start(accept)
    for microseconds in range(0, 1_200, 50):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(microseconds / 1_000_000):
                (await client.network.connect("server", 9092, Recorder)).wire.abort()
    await asyncio.sleep(1)
    assert server.network.connections == client.network.connections == 0
    assert 0 < len(accepted) < 24
    assert all(recorder.events == ["made", "eof", "lost"] for recorder in accepted)


def test_the_latency_of_bytes_depends_on_the_seed() -> None:
    async def main() -> tuple[float, ...]:
        server, client = _two_processes()
        _, there, here = await _pair(server.network, client.network, "server")
        times = []
        for _ in range(20):
            there.data.clear()
            here.wire.write(b"x")
            sent = client.clock.monotonic()
            await there.until(lambda: there.data)
            times.append(client.clock.monotonic() - sent)
        return tuple(times)

    assert min(run(main())) > 0
    assert run(main(), seed=1) == run(main(), seed=1)
    assert run(main(), seed=1) != run(main(), seed=2)


# --- Faults -------------------------------------------------------------------------------------------------------


def _on_seeds(scenario: Callable[[Simulation, VirtualWorld, VirtualWorld], Coroutine[None, None, None]]) -> None:
    """Run a scenario with a process on the host `server` and one on the host `client`."""

    async def main() -> None:
        simulation = Simulation()
        await scenario(simulation, simulation.host("server").start_process(), simulation.host("client").start_process())

    for seed in range(5):
        run(main(), seed=seed)


@run_by(_on_seeds)
async def test_bytes_on_a_blocked_link_arrive_in_order_after_the_unblocking(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    for number in range(10):
        here.wire.write(b"%d" % number)
        await asyncio.sleep(0)  # the bytes leave
        if number == 4:
            simulation.network.block("client", "server")
    await asyncio.sleep(5)
    assert there.data == b""  # bytes in transit are held as well
    here.wire.write(b"!")
    here.wire.write_eof()
    await asyncio.sleep(1)
    simulation.network.unblock("client", "server")
    unblocked_s = client.clock.monotonic()
    await there.until(lambda: "eof" in there.events)
    assert there.data == b"0123456789!"
    assert client.clock.monotonic() - unblocked_s < 6.5
    await here.lost()
    assert here.error is None


@run_by(_on_seeds)
async def test_a_block_is_one_way_until_acknowledgements_are_missed(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    simulation.network.block("server", "client")
    here.wire.write(b"arrives")
    await asyncio.sleep(1)
    assert there.data == b"arrives"
    here.wire.write(b", and this does not")
    await asyncio.sleep(5)
    assert there.data == b"arrives"
    simulation.network.unblock("server", "client")
    await there.until(lambda: there.data == b"arrives, and this does not")
    here.wire.close()
    await there.lost()


@pytest.mark.parametrize(("source", "target"), [("client", "server"), ("server", "client")])
@run_by(_on_seeds)
async def test_a_sender_without_acknowledgements_gives_up_after_a_while(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /, source: str, target: str
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    simulation.network.block(source, target)
    here.wire.write(b"x")
    await asyncio.sleep(19)
    assert "lost" not in here.events
    await here.lost()
    assert client.clock.monotonic() < 61
    assert isinstance(here.error, TimeoutError)
    assert here.error.errno == errno.ETIMEDOUT
    assert "lost" not in there.events  # it is not notified
    simulation.network.heal()
    await asyncio.sleep(60)
    assert "lost" not in there.events
    there.wire.write(b"a probe")
    await there.lost()
    assert isinstance(there.error, ConnectionResetError)


@run_by(_on_seeds)
async def test_idle_connections_outlive_a_partition(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    simulation.network.block("client", "server")
    simulation.network.block("server", "client")
    await asyncio.sleep(600)
    simulation.network.heal()
    here.wire.write(b"still there")
    await there.until(lambda: there.data)
    assert there.data == b"still there"


@pytest.mark.parametrize(("source", "target"), [("client", "server"), ("server", "client")])
@run_by(_on_seeds)
async def test_connecting_over_a_blocked_link_lasts_until_the_unblocking_or_a_timeout(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /, source: str, target: str
) -> None:
    listener = await _serve(server.network, "server")
    simulation.network.block(source, target)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await client.network.connect("server", listener.port, Recorder)
    assert client.network.connections == server.network.connections == 0
    simulation.loop.call_later(5, simulation.network.unblock, source, target)
    started_s = client.clock.monotonic()
    recorder = await client.network.connect("server", listener.port, Recorder)
    assert recorder.events == ["made"]
    assert 5 < client.clock.monotonic() - started_s < 11
    simulation.network.block(source, target)
    started_s = client.clock.monotonic()
    with pytest.raises(TimeoutError) as caught:
        await client.network.connect("server", listener.port, Recorder)
    assert caught.value.errno == errno.ETIMEDOUT
    assert client.clock.monotonic() - started_s == pytest.approx(127, abs=0.1)


@run_by(_on_seeds)
async def test_an_unreachable_host_has_no_name_and_no_route_and_its_connections_are_silent(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    listener, there, here = await _pair(server.network, client.network, "server")
    address = simulation.host("server").address
    simulation.network.unreachable("server", True)
    with pytest.raises(socket.gaierror) as unknown:
        await client.network.connect("server", listener.port, Recorder)
    assert unknown.value.errno == socket.EAI_NONAME
    with pytest.raises(OSError) as no_route:
        await client.network.connect(address, listener.port, Recorder)
    assert no_route.value.errno == errno.EHOSTUNREACH
    with pytest.raises(socket.gaierror) as no_answer:
        await server.network.connect("client", 1, Recorder)
    assert no_answer.value.errno == socket.EAI_AGAIN
    (await server.network.connect("server", listener.port, Recorder)).wire.close()  # it reaches itself
    here.wire.write(b"question")
    await asyncio.sleep(3)
    assert there.data == b""
    simulation.network.unreachable("server", False)
    await there.until(lambda: there.data)
    (await client.network.connect("server", listener.port, Recorder)).wire.close()


@run_by(_on_seeds)
async def test_a_reset_breaks_all_connections_between_two_hosts_and_no_others(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    _, near, far = await _pair(client.network, server.network, "client")
    third = simulation.host("third").start_process()
    _, other, another = await _pair(server.network, third.network, "server")
    here.wire.write(b"lost on the way")
    await asyncio.sleep(0)
    assert simulation.network.reset("client", "server") == 2
    for recorder in (there, here, near, far):
        await recorder.lost()
        assert isinstance(recorder.error, ConnectionResetError)
    assert there.data == b""
    assert simulation.network.reset("client", "server") == 0
    another.wire.write(b"alive")
    await other.until(lambda: other.data)


@run_by(_on_seeds)
async def test_bytes_of_a_dead_connection_can_arrive_after_those_of_its_successor(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    assert simulation.network.delay_standing("client", "server", 5.0) == 1
    here.wire.write(b"first")
    await asyncio.sleep(0)
    assert simulation.network.reset_at("client", "server") == 1
    await here.lost()
    assert isinstance(here.error, ConnectionResetError)
    began_s = simulation.loop.time()
    _, successor, again = await _pair(server.network, client.network, "server")
    again.wire.write(b"second")
    await successor.until(lambda: successor.data == b"second")
    assert simulation.loop.time() - began_s < 0.1
    assert there.events == ["made"], "it is not notified of the reset"
    await there.until(lambda: there.data == b"first")
    assert simulation.loop.time() - began_s > 4.9
    there.wire.write(b"an answer to a closed end")
    await there.lost()
    assert isinstance(there.error, ConnectionResetError)


@run_by(_on_seeds)
async def test_a_delayed_connection_is_slow_in_one_direction_and_keeps_its_order(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    simulation.network.delay_standing("client", "server", 3.0)
    began_s = simulation.loop.time()
    there.wire.write(b"from the server")
    await here.until(lambda: here.data)
    assert simulation.loop.time() - began_s < 0.1
    here.wire.write(b"all of it")
    here.wire.close()
    await there.lost()
    assert there.data == b"all of it"
    assert (there.events, there.error) == (["made", "eof", "lost"], None)
    assert simulation.loop.time() - began_s > 3


@run_by(_on_seeds)
async def test_a_tap_sees_bytes_before_they_arrive_and_may_break_their_connection(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    listener, there, here = await _pair(server.network, client.network, "server")
    seen: list[Arrival] = []

    def tap(arrival: Arrival) -> None:
        seen.append(arrival)
        if bytes(arrival.data) == b"l":
            simulation.network.reset("client", "server")

    simulation.network.taps.append(tap)
    here.wire.write(b"f")
    await there.until(lambda: there.data)
    here.wire.write(b"l")
    await there.lost()
    await here.lost()
    assert there.data == b"f"
    assert (seen[0].source, seen[0].target, seen[0].target_port) == ("client", "server", listener.port)


@run_by(_on_seeds)
async def test_latency_and_bandwidth_determine_the_arrival_of_bytes(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    _, other, another = await _pair(server.network, client.network, "server")

    async def takes_s() -> float:
        there.data.clear()
        other.data.clear()
        started_s = client.clock.monotonic()
        here.wire.write(bytes(50_000))
        another.wire.write(bytes(50_000))
        await there.until(lambda: len(there.data) == 50_000)
        await other.until(lambda: len(other.data) == 50_000)
        return client.clock.monotonic() - started_s

    assert await takes_s() < 0.01
    simulation.network.set_latency(2, 3)
    assert 2 < await takes_s() < 3.1
    simulation.network.set_bandwidth(10_000)
    assert 12 < await takes_s() < 13.1
    simulation.network.set_bandwidth(None)
    simulation.network.set_latency(0.001, 0.001)
    assert await takes_s() < 0.01


# --- Paused processes and hosts without power ---------------------------------------------------------------------


@run_by(_on_seeds)
async def test_the_kernel_of_a_paused_process_accepts_connections_and_takes_a_window_of_bytes(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    accepted: list[Recorder] = []
    listener = await server.network.listen("server", 9092)

    async def attach(incoming: Incoming) -> None:
        accepted.append(await incoming.attach(Recorder))

    def accept(incoming: Incoming) -> None:
        server.process.start(attach(incoming))

    listener.start(accept)
    first = await client.network.connect("server", 9092, Recorder)
    await asyncio.sleep(1)
    server.process.pause()
    second = await client.network.connect("server", 9092, Recorder)
    second.wire.write(b"in the backlog")
    first.wire.write(bytes(2 * WINDOW_BYTES))
    first.wire.close()
    await asyncio.sleep(600)
    assert len(accepted) == 1
    assert accepted[0].events == ["made"]
    assert first.wire.get_write_buffer_size() == WINDOW_BYTES
    server.process.resume()
    await first.lost()
    await accepted[0].lost()
    assert (len(accepted[0].data), accepted[0].error) == (2 * WINDOW_BYTES, None)
    await accepted[1].until(lambda: accepted[1].data)
    assert accepted[1].data == b"in the backlog"


@run_by(_on_seeds)
async def test_a_paused_process_sends_its_written_bytes_after_it_is_resumed(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    here.wire.pause_reading()
    there.wire.write(bytes(WINDOW_BYTES + 100_000))
    await asyncio.sleep(1)
    server.process.pause()
    here.wire.resume_reading()
    await asyncio.sleep(5)
    assert len(here.data) == WINDOW_BYTES
    assert there.events == ["made", "pause"]
    server.process.resume()
    await here.until(lambda: len(here.data) == WINDOW_BYTES + 100_000)
    await there.until(lambda: "resume" in there.events)


@run_by(_on_seeds)
async def test_the_connections_of_a_paused_process_that_is_killed_end(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, _, here = await _pair(server.network, client.network, "server")
    server.process.pause()
    await asyncio.sleep(5)
    assert here.events == ["made"]
    server.process.kill()
    await here.lost()


@run_by(_on_seeds)
async def test_a_power_cut_ends_connections_without_notice(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, _, idle = await _pair(server.network, client.network, "server")
    _, _, busy = await _pair(server.network, client.network, "server")
    _, _, late = await _pair(server.network, client.network, "server")
    _, deaf, unread = await _pair(server.network, client.network, "server")
    deaf.wire.pause_reading()
    unread.wire.write(b"never read")
    await asyncio.sleep(1)
    simulation.host("server").power_cut()
    simulation.host("server").start_process()
    await asyncio.sleep(1)
    assert unread.events == ["made"]
    simulation.host("server").power_cut()
    busy.wire.write(b"x")
    await asyncio.sleep(19)
    assert (idle.events, busy.events, late.events) == (["made"],) * 3
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await client.network.connect("server", 9092, Recorder)
    await busy.lost()
    assert client.clock.monotonic() < 63
    assert isinstance(busy.error, TimeoutError)
    late.wire.write(b"x")
    await asyncio.sleep(1)
    simulation.host("server").start_process()
    with pytest.raises(ConnectionRefusedError):
        await client.network.connect("server", 9092, Recorder)
    async with asyncio.timeout(5):
        await late.lost()
    assert isinstance(late.error, ConnectionResetError)
    await asyncio.sleep(600)
    assert idle.events == ["made"]
    idle.wire.write(b"x")
    await idle.lost()
    assert isinstance(idle.error, ConnectionResetError)


@run_by(_on_seeds)
async def test_a_power_cut_drops_the_undelivered_bytes_of_a_killed_process(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    _, there, here = await _pair(server.network, client.network, "server")
    simulation.network.block("server", "client")
    there.wire.write(b"held")
    await asyncio.sleep(1)
    server.process.kill()
    simulation.host("server").power_cut()
    simulation.host("server").start_process()
    simulation.network.heal()
    await asyncio.sleep(60)
    assert here.events == ["made"]
    assert here.data == b""


class Probing(Recorder):
    """Enables keepalive probes, as `minibroker.controller.governing.crash_detection` does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


@run_by(_on_seeds)
async def test_keepalive_probes_detect_dead_or_rebooted_hosts_but_no_paused_process(
    simulation: Simulation, server: VirtualWorld, client: VirtualWorld, /
) -> None:
    async def connect() -> Probing:
        connected = Probing()
        await _pair(simulation.host("server").start_process().network, client.network, "server", here=connected)
        return connected

    first = await connect()
    simulation.network.block("server", "client")
    await asyncio.sleep(1.5)
    simulation.network.unblock("server", "client")
    await asyncio.sleep(60)
    assert first.events == ["made"]
    started_s = client.clock.monotonic()
    simulation.host("server").power_cut()
    await first.lost()
    assert isinstance(first.error, TimeoutError)
    assert 2 < client.clock.monotonic() - started_s < 3
    second = await connect()
    simulation.host("server").power_cut()
    simulation.host("server").start_process()
    async with asyncio.timeout(1):
        await second.lost()
    assert isinstance(second.error, ConnectionResetError)
    third = Probing()
    world = simulation.host("server").start_process()
    await _pair(world.network, client.network, "server", here=third)
    world.process.pause()
    await asyncio.sleep(600)
    assert third.events == ["made"]
