"""Crash detection against real sockets on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from minibroker.controller.governing.crash_detection import PROMPT_S, PROVEN_S, CrashDetector
from minibroker.protocol.model import CONTROL_LISTENER, Endpoint, RegisteredBroker
from minibroker.protocol.world import Incoming, Network
from minibroker.protocol.world.real import RealClock, RealNetwork
from tests.faults.false_alarms import suspicions_in
from tests.running import run_by
from tests.waiting import until

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Peer(asyncio.Protocol):
    """A broker's end of a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


class FakeBroker:
    """A listener that accepts, or accepts and closes at once."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.accepted = 0
        self.closes_at_once = False
        self.tasks: set[asyncio.Task[None]] = set()

    async def listen(self, port: int = 0) -> int:
        self.listener = await RealNetwork().listen("127.0.0.1", port)
        self.listener.start(self.on_connection)
        return self.listener.port

    def on_connection(self, incoming: Incoming) -> None:
        self.accepted += 1
        if self.closes_at_once:
            incoming.close()
            return
        task = asyncio.get_running_loop().create_task(self.attach(incoming))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def attach(self, incoming: Incoming) -> None:
        self.peers.append(await incoming.attach(Peer))

    async def die(self) -> None:
        """Close like a killed process: the listener first, then every connection."""
        await self.listener.close()
        self.drop()

    def drop(self) -> None:
        for peer in self.peers:
            assert isinstance(peer.transport, asyncio.Transport)
            peer.transport.abort()
        self.peers.clear()


def broker(port: int, epoch: int = 1, broker_id: int = 1) -> RegisteredBroker:
    return RegisteredBroker(broker_id, epoch, (Endpoint(CONTROL_LISTENER, "127.0.0.1", port),))


async def at_once() -> None:
    """ZooKeeper's answer."""


@asynccontextmanager
async def watching(
    detection_ms: int, in_touch: Callable[[], Awaitable[None]] = at_once, network: Network | None = None
) -> AsyncIterator[tuple[CrashDetector, list[tuple[int, int, str]]]]:
    suspected: list[tuple[int, int, str]] = []
    detector = CrashDetector(network or RealNetwork(), RealClock(), detection_ms, in_touch)
    detector.on_suspicion(lambda broker_id, epoch, reason: suspected.append((broker_id, epoch, reason)))
    try:
        yield detector, suspected
    finally:
        await detector.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await test()

    asyncio.run(body())


async def stand() -> None:
    """Let a connection stand for PROVEN_S, even if the event loop stands still before it notices the connection."""
    for _ in range(4):
        await asyncio.sleep(PROVEN_S / 2)


@run_by(run)
async def test_a_killed_process_is_suspected_long_before_the_detection_time_is_over() -> None:
    fake = FakeBroker()
    port = await fake.listen()
    async with watching(detection_ms=600_000) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: len(fake.peers) == 1)
        await fake.die()
        await until(lambda: bool(suspected))
        assert [s[:2] for s in suspected] == [(1, 1)]
        assert "refuses" in suspected[0][2]


@run_by(run)
async def test_a_broker_that_was_never_there_is_suspected_too() -> None:
    fake = FakeBroker()
    port = await fake.listen()
    await fake.die()
    async with watching(detection_ms=600_000) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: bool(suspected))


@run_by(run)
async def test_a_dropped_connection_alone_is_no_crash() -> None:
    fake = FakeBroker()
    port = await fake.listen()
    async with watching(detection_ms=500) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: len(fake.peers) == 1)
        fake.drop()
        await until(lambda: fake.accepted == 2)
        assert not suspected
    await fake.die()


@run_by(run)
async def test_a_broker_that_accepts_and_closes_for_the_whole_detection_time_is_suspected() -> None:
    fake = FakeBroker()
    fake.closes_at_once = True
    port = await fake.listen()
    async with watching(detection_ms=1_000) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: bool(suspected))
        assert "closes" in suspected[0][2]
    await fake.die()


@pytest.mark.slow
@run_by(run)
async def test_an_epoch_is_suspected_once_and_each_later_suspicion_takes_four_times_as_long() -> None:
    fake = FakeBroker()
    port = await fake.listen()
    await fake.die()
    async with watching(detection_ms=100) as (detector, suspected):
        lasted_s = []
        for epoch in (1, 2, 3):
            start_s = RealClock().monotonic()
            detector.follow([broker(port, epoch)])
            detector.follow([broker(port, epoch)])
            await until(lambda epoch=epoch: len(suspected) >= epoch)  # type: ignore[misc]
            lasted_s.append(RealClock().monotonic() - start_s)
        assert [s[1] for s in suspected] == [1, 2, 3]
        assert lasted_s[1] >= 0.4
        assert lasted_s[2] >= 1.6


@run_by(run)
async def test_suspicions_of_a_broker_count_also_where_it_is_followed_anew_in_the_same_epoch() -> None:
    """A controller that suspects it and is deposed by it, or one that is elected again after it was removed, does
    this."""

    fake = FakeBroker()
    port = await fake.listen()
    await fake.die()
    async with watching(detection_ms=100) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: len(suspected) == 1)
        start_s = RealClock().monotonic()
        detector.follow([])
        detector.follow([broker(port)])
        await until(lambda: len(suspected) == 2)
        assert RealClock().monotonic() - start_s >= 0.4


@run_by(run)
async def test_a_broker_that_came_back_is_suspected_at_once_again_after_a_connection_has_stood() -> None:
    fake = FakeBroker()
    port = await fake.listen()
    await fake.die()
    async with watching(detection_ms=600_000) as (detector, suspected):
        detector.follow([broker(port, epoch=1)])
        await until(lambda: len(suspected) == 1)
        await fake.listen(port)
        detector.follow([broker(port, epoch=2)])
        await until(lambda: len(fake.peers) == 1)
        await stand()
        await fake.die()
        await until(lambda: len(suspected) == 2)


@run_by(run)
async def test_a_connection_that_stood_counts_also_where_its_watch_ended_before_it() -> None:
    """When a broker's session ends, it registers again, and its connection has no time to break."""

    fake = FakeBroker()
    port = await fake.listen()
    await fake.die()
    async with watching(detection_ms=600_000) as (detector, suspected):
        detector.follow([broker(port, epoch=1)])
        await until(lambda: len(suspected) == 1)
        await fake.listen(port)
        detector.follow([broker(port, epoch=2)])
        await until(lambda: len(fake.peers) == 1)
        await stand()
        detector.follow([])
        await fake.die()
        detector.follow([broker(port, epoch=3)])
        await until(lambda: len(suspected) == 2)


@run_by(run)
async def test_a_detector_without_zookeeper_suspects_no_broker_and_looks_again_when_it_is_back() -> None:
    fake = FakeBroker()
    port = await fake.listen()
    answers, asked = asyncio.Event(), asyncio.Event()
    answers.set()

    async def in_touch() -> None:
        asked.set()
        await answers.wait()

    async with watching(detection_ms=600_000, in_touch=in_touch) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: len(fake.peers) == 1)
        answers.clear()
        asked.clear()
        await fake.die()
        await asked.wait()
        await asyncio.sleep(2 * PROMPT_S)  # no answer for longer than a prompt one takes
        await fake.listen(port)
        answers.set()
        await until(lambda: len(fake.peers) == 1)
        assert not suspected
        await stand()
        answers.clear()
        asked.clear()
        await fake.die()
        await asked.wait()
        await asyncio.sleep(2 * PROMPT_S)
        answers.set()
        await until(lambda: bool(suspected))
        waited_ms = detector.facts(1)["waited_ms"]  # the time without ZooKeeper, since the connection was lost
        assert isinstance(waited_ms, float)
        assert waited_ms > PROMPT_S * 1_000


@run_by(run)
async def test_a_broker_is_looked_for_again_if_another_watch_found_zookeeper_slow() -> None:
    asks = 0
    answers = asyncio.Event()
    second_is_looked_for, first_is_suspected = 3, 6

    async def in_touch() -> None:
        nonlocal asks
        asks += 1
        if asks in (second_is_looked_for, first_is_suspected):
            await answers.wait()

    fakes = [FakeBroker(), FakeBroker()]
    first, second = [await fake.listen() for fake in fakes]
    async with watching(detection_ms=600_000, in_touch=in_touch) as (detector, suspected):
        detector.follow([broker(first), broker(second, broker_id=2)])
        await until(lambda: all(fake.peers for fake in fakes))
        await fakes[1].die()
        await until(lambda: asks == second_is_looked_for)
        await asyncio.sleep(2 * PROMPT_S)  # no answer for longer than a prompt one takes
        await fakes[0].die()
        await until(lambda: asks == first_is_suspected)
        answers.set()
        await until(lambda: len(suspected) == 2)


@run_by(run)
async def test_a_name_that_is_gone_counts_as_refused_where_a_connection_stood_also_for_a_probe() -> None:
    class Names(RealNetwork):
        is_gone = False

        async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
            if self.is_gone:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return await super().connect(host, port, factory)

    fake, network = FakeBroker(), Names()
    port = await fake.listen()
    async with watching(detection_ms=600_000, network=network) as (detector, suspected):
        detector.follow([broker(port)])
        await until(lambda: len(fake.peers) == 1)
        await stand()
        network.is_gone = True
        await fake.die()
        await until(lambda: bool(suspected))
        assert "Name or service not known" in suspected[0][2]
        # A controller that removed a crashed one and takes its office need not find out again.
        detector.follow([])
        assert await detector.probe([broker(port)]) == [1]


@run_by(run)
async def test_a_probe_names_those_that_refuse_and_no_others() -> None:
    alive, dead = FakeBroker(), FakeBroker()
    alive_port, dead_port = await alive.listen(), await dead.listen()
    await dead.die()
    async with watching(detection_ms=5_000) as (detector, suspected):
        brokers = [
            broker(alive_port),
            RegisteredBroker(2, 1, (Endpoint(CONTROL_LISTENER, "127.0.0.1", dead_port),)),
        ]
        assert await detector.probe(brokers) == [2]
        assert not suspected
    await alive.die()


@run_by(run)
async def test_a_listener_that_is_too_busy_to_accept_is_not_suspected() -> None:
    assert await suspicions_in(3) == []
