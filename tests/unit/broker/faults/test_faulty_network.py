"""A real network with injected faults: sockets of this machine."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvloop

from minibroker.broker.faults.fault_file import FaultFile
from minibroker.broker.faults.faulty_network import MOST_WAITING_NEWCOMERS, FaultyNetwork
from minibroker.protocol import faults
from minibroker.protocol.connections.tls import TlsFailed, TlsNetwork
from minibroker.protocol.faults import Faults, Obeyed, encoded
from minibroker.protocol.world import Incoming, Listener, Network
from minibroker.protocol.world.real import RealDisk, RealNetwork
from tests.running import run_by
from tests.waiting import until

PEER = 2


class Heard(asyncio.Protocol):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.data = b""
        self.is_lost = False
        self.has_eof = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.has_eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class HeardInChunks(asyncio.BufferedProtocol):
    """The same through a small buffer of its own."""

    def __init__(self) -> None:
        self.data = b""
        self.is_lost = False
        self._buffer = bytearray(3)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self._buffer[:nbytes]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


PROTOCOLS: list[Callable[[], Heard | HeardInChunks]] = [Heard, HeardInChunks]


class Broker:
    """The network of broker 1, and a peer with a network of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "broker-1.json"
        self.file = FaultFile(str(self.path), RealDisk())
        self.network = FaultyNetwork(RealNetwork(), self.file)
        self.revision = 0
        self._directory = directory

    async def order(self, change: Callable[[Faults], Faults]) -> None:
        """Write faults, and return when they hold."""
        self.revision += 1
        self.path.write_bytes(encoded(change(Faults(self.revision, drops=self.file.current.drops))))
        await asyncio.to_thread(self.file.look)

    def is_peer(self, port: int) -> None:
        (self._directory / f"broker-{PEER}.obeyed.json").write_bytes(encoded(Obeyed(0, (port,))))


@asynccontextmanager
async def accepting(network: Network) -> AsyncIterator[tuple[Listener, list[Heard]]]:
    accepted: list[Heard] = []
    listener = await network.listen("127.0.0.1", 0)
    tasks: set[asyncio.Task[None]] = set()

    async def attach(incoming: Incoming) -> None:
        accepted.append(await incoming.attach(Heard))

    def arrived(incoming: Incoming) -> None:
        task = asyncio.create_task(attach(incoming))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener.start(arrived)
    try:
        yield listener, accepted
    finally:
        await listener.close()
        for each in accepted:
            each.transport.abort()


def in_a_loop(test: Callable[..., object], tmp_path: Path) -> None:
    """Run it with the loop of brokers."""

    async def main() -> None:
        await test(Broker(tmp_path))  # type: ignore[misc]

    uvloop.run(main())


cut = lambda found: faults.link_cut(found, PEER, sent=True, received=True)  # noqa: E731


@run_by(in_a_loop)
async def test_a_cut_connection_is_silent_in_both_directions_and_delivers_after_the_healing(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        for protocol in PROTOCOLS:
            ours = await broker.network.connect("127.0.0.1", listener.port, protocol)
            await until(lambda: bool(accepted))
            theirs = accepted[-1]
            ours.transport.write(b"first ")
            theirs.transport.write(b"hello ")
            await until(lambda: (theirs.data, ours.data) == (b"first ", b"hello "))  # noqa: B023
            await broker.order(cut)
            ours.transport.writelines([b"sec", b"ond"])
            theirs.transport.write(b"again")
            await asyncio.sleep(0.1)
            assert (theirs.data, ours.data) == (b"first ", b"hello ")
            assert ours.transport.get_write_buffer_size() == 6
            await broker.order(lambda found: found)
            await until(lambda: (theirs.data, ours.data) == (b"first second", b"hello again"))  # noqa: B023
            assert ours.transport.get_write_buffer_size() == 0
            ours.transport.abort()
            await until(lambda: ours.is_lost)  # noqa: B023
            accepted.clear()


@run_by(in_a_loop)
async def test_a_one_way_cut_lets_the_other_direction_pass(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        ours = await broker.network.connect("127.0.0.1", listener.port, Heard)
        await until(lambda: bool(accepted))
        await broker.order(lambda found: faults.link_cut(found, PEER, sent=True, received=False))
        ours.transport.write(b"lost")
        accepted[0].transport.write(b"heard")
        await until(lambda: ours.data == b"heard")
        assert accepted[0].data == b""
        await broker.order(lambda found: faults.link_cut(found, PEER, sent=False, received=True))
        await until(lambda: accepted[0].data == b"lost")
        accepted[0].transport.write(b" more")
        ours.transport.write(b" and found")
        await until(lambda: accepted[0].data == b"lost and found")
        assert ours.data == b"heard"
        ours.transport.abort()


@run_by(in_a_loop)
async def test_no_connection_can_be_opened_across_a_cut_until_it_is_healed(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        await broker.order(cut)
        opening = asyncio.create_task(broker.network.connect("127.0.0.1", listener.port, Heard))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(opening)
        assert not accepted
        await broker.order(lambda found: found)
        (await opening).transport.abort()


@run_by(in_a_loop)
async def test_another_port_is_not_the_peer(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(1)
        await broker.order(cut)
        ours = await broker.network.connect("127.0.0.1", listener.port, Heard)
        ours.transport.write(b"passes")
        await until(lambda: bool(accepted) and accepted[0].data == b"passes")
        ours.transport.abort()


@run_by(in_a_loop)
async def test_each_packet_is_late_and_none_overtakes_another(broker: Broker, /) -> None:
    loop = asyncio.get_running_loop()
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        for protocol in PROTOCOLS:
            await broker.order(lambda found: faults.link_slowed(found, PEER, 100))
            began_s = loop.time()
            ours = await broker.network.connect("127.0.0.1", listener.port, protocol)
            await until(lambda: bool(accepted))
            theirs = accepted[-1]
            assert loop.time() - began_s >= 0.19
            began_s = loop.time()
            for number in range(10):
                ours.transport.write(b"%d" % number)
            await until(lambda: theirs.data == b"0123456789")  # noqa: B023
            assert loop.time() - began_s >= 0.09
            began_s = loop.time()
            theirs.transport.write(b"abcdefghij")
            await until(lambda: bool(ours.data))  # noqa: B023
            assert loop.time() - began_s >= 0.09
            theirs.transport.write(b"klm")
            theirs.transport.close()
            await broker.order(lambda found: found)
            await until(lambda: ours.is_lost)  # noqa: B023
            assert ours.data == b"abcdefghijklm"
            accepted.clear()


class Ending(HeardInChunks):
    """Ends the connection after three bytes, and then has no room."""

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray() if self.data else super().get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        self.transport.abort()


@run_by(in_a_loop)
async def test_late_data_that_ends_the_connection_is_the_last(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        opened = await broker.network.connect("127.0.0.1", listener.port, Ending)
        await broker.order(lambda found: faults.link_slowed(found, PEER, 20))
        await until(lambda: len(accepted) == 1)
        accepted[0].transport.write(b"abcdefghi")
        await until(lambda: opened.is_lost)
        assert opened.data == b"abc"


@run_by(in_a_loop)
async def test_a_connection_that_is_closed_while_data_is_late_sends_it_first(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        ours = await broker.network.connect("127.0.0.1", listener.port, Heard)
        await broker.order(lambda found: faults.link_slowed(found, PEER, 100))
        ours.transport.write(b"goodbye")
        ours.transport.close()
        assert ours.transport.is_closing()
        await until(lambda: bool(accepted) and accepted[0].has_eof)
        assert accepted[0].data == b"goodbye"


@run_by(in_a_loop)
async def test_a_protocol_that_pauses_reading_is_not_woken_by_the_healing(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        ours = await broker.network.connect("127.0.0.1", listener.port, Heard)
        await until(lambda: bool(accepted))
        ours.transport.pause_reading()
        await broker.order(cut)
        accepted[0].transport.write(b"later")
        await broker.order(lambda found: found)
        await asyncio.sleep(0.05)
        assert ours.data == b""
        ours.transport.resume_reading()
        await until(lambda: ours.data == b"later")
        ours.transport.abort()


@run_by(in_a_loop)
async def test_an_isolated_broker_answers_nobody_and_looks_at_newcomers_after_the_healing(broker: Broker, /) -> None:
    async with accepting(broker.network) as (listener, accepted):
        early = await RealNetwork().connect("127.0.0.1", listener.port, Heard)
        await until(lambda: bool(accepted))
        await broker.order(faults.isolated)
        late = await RealNetwork().connect("127.0.0.1", listener.port, Heard)
        early.transport.write(b"early")
        late.transport.write(b"late")
        accepted[0].transport.write(b"answer")
        await asyncio.sleep(0.1)
        assert len(accepted) == 1
        assert (accepted[0].data, early.data) == (b"", b"")
        await broker.order(lambda found: found)
        await until(lambda: [each.data for each in accepted] == [b"early", b"late"])
        await until(lambda: early.data == b"answer")
        early.transport.abort()
        late.transport.abort()


@run_by(in_a_loop)
async def test_an_isolated_broker_keeps_only_some_newcomers(broker: Broker, /) -> None:
    closed: list[int] = []
    await broker.order(faults.isolated)
    for number in range(MOST_WAITING_NEWCOMERS + 72):
        broker.network.arrived(lambda: None, lambda number=number: closed.append(number))  # type: ignore[misc]
    assert closed == list(range(MOST_WAITING_NEWCOMERS, MOST_WAITING_NEWCOMERS + 72))


@run_by(in_a_loop)
async def test_a_broker_goes_on_obeying_after_an_error_in_its_loop(broker: Broker, /) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    error = RuntimeError("of a connection")

    def fail() -> None:
        raise error

    async with accepting(broker.network) as (listener, accepted), asyncio.timeout(30):
        await broker.order(faults.isolated)
        broker.network.arrived(fail, fail)
        await broker.order(lambda found: found)
        assert reported == [error]
        client = await RealNetwork().connect("127.0.0.1", listener.port, Heard)
        await until(lambda: len(accepted) == 1)
        client.transport.abort()


@run_by(in_a_loop)
async def test_connections_are_dropped_once_and_may_be_made_anew(broker: Broker, /) -> None:
    async with accepting(broker.network) as (listener, accepted):
        client = await RealNetwork().connect("127.0.0.1", listener.port, Heard)
        await until(lambda: len(accepted) == 1)
        opened = await broker.network.connect("127.0.0.1", listener.port, Heard)
        await until(lambda: len(accepted) == 2)
        await broker.order(faults.connections_dropped)
        await until(lambda: client.is_lost and opened.is_lost and all(each.is_lost for each in accepted))
        again = await broker.network.connect("127.0.0.1", listener.port, Heard)
        await broker.order(lambda found: faults.network_slowed(found, 1))
        again.transport.write(b"here")
        await until(lambda: accepted[-1].data == b"here")
        again.transport.abort()


@run_by(in_a_loop)
async def test_the_ports_of_a_broker_are_published_for_its_peers(broker: Broker, /) -> None:
    async with accepting(broker.network) as (listener, _):
        other = FaultFile(str(broker.path.with_name("broker-3.json")), RealDisk())
        assert other.peers() == {listener.port: 1}
        assert broker.file.peers() == {}


@run_by(in_a_loop)
async def test_a_healing_ends_the_delay_of_lost_connections_and_of_those_being_opened(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        broker.is_peer(listener.port)
        for ends_it_itself in (False, True):
            ours = await broker.network.connect("127.0.0.1", listener.port, Heard)
            await until(lambda: bool(accepted))
            await broker.order(lambda found: faults.link_slowed(found, PEER, 600_000))
            opening = asyncio.create_task(broker.network.connect("127.0.0.1", listener.port, Heard))
            accepted[-1].transport.write(b"last words")
            accepted[-1].transport.close()
            # the real connection is lost, but the protocol does not know it
            await until(lambda: ours.transport.is_closing())  # noqa: B023
            if ends_it_itself:
                ours.transport.abort()
                await until(lambda: ours.is_lost)  # noqa: B023
            assert (ours.data, ours.is_lost, opening.done()) == (b"", ends_it_itself, False)
            await broker.order(lambda found: found)
            (await asyncio.wait_for(opening, 10)).transport.abort()
            await until(lambda: ours.is_lost)  # noqa: B023
            assert ours.data == (b"" if ends_it_itself else b"last words")
            accepted.clear()
        await until(lambda: not broker.network._connections)


@run_by(in_a_loop)
async def test_a_failed_handshake_of_tls_leaves_no_connection(broker: Broker, /) -> None:
    async with accepting(RealNetwork()) as (listener, accepted):
        opening = asyncio.create_task(
            TlsNetwork(broker.network, connecting=ssl.create_default_context).connect("127.0.0.1", listener.port, Heard)
        )
        await until(lambda: bool(accepted) and bool(accepted[0].data))
        assert len(broker.network._connections) == 1
        accepted[0].transport.write(b"no TLS here")
        with pytest.raises(TlsFailed):
            await opening
        await until(lambda: not broker.network._connections)


@run_by(in_a_loop)
async def test_peers_are_remembered_if_their_files_cannot_be_read(broker: Broker, /) -> None:
    broker.is_peer(9092)
    assert broker.file.peers() == {9092: PEER}
    obeyed = broker.path.with_name(f"broker-{PEER}.obeyed.json")
    obeyed.write_bytes(b"")
    assert broker.file.peers() == {9092: PEER}
    obeyed.unlink()
    assert broker.file.peers() == {}
    broker.is_peer(9092)
    broker.file.peers()
    shutil.rmtree(broker.path.parent)
    assert broker.file.peers() == {9092: PEER}
