"""Connecting by name: a resolver that does not answer for one name, or for a while, delays no other lookup."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, cast

import pytest
import uvloop

from minibroker.protocol.world.real import RealNetwork, _by_turns

DEADLINE_S = 30.0


class Resolver:
    """A resolver: names in `hanging` get no answer before `release`; "gone" is unknown; the others are this host."""

    def __init__(self) -> None:
        self.hanging: set[str] = set()
        self.release = Event()
        self.asked: list[str] = []
        self.addresses = ["127.0.0.1"]

    def getaddrinfo(self, host: str, *_arguments: Any, **_keywords: Any) -> list[Any]:
        self.asked.append(host)
        if host in self.hanging:
            self.release.wait(DEADLINE_S)
        if host == "gone":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.addresses]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, 0))
            for family, address in zip(families, self.addresses, strict=True)
        ]


@contextmanager
def resolving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver()
    monkeypatch.setattr("minibroker.protocol.world.real.socket.getaddrinfo", resolver.getaddrinfo)
    try:
        yield resolver
    finally:
        resolver.release.set()


async def connect(network: RealNetwork, host: str, port: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        protocol = await network.connect(host, port, Peer)
    protocol.transport.abort()
    await protocol.lost


class Peer(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_names_that_hang_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(resolver: Resolver, port: int) -> None:
        network = RealNetwork()
        names = [f"dead-{number}" for number in range(20)]
        resolver.hanging.update(names)
        waiting = [asyncio.create_task(connect(network, name, port)) for name in names]
        while len(resolver.asked) < len(names):
            await asyncio.sleep(0.001)
        await connect(network, "living", port)
        assert not any(task.done() for task in waiting)
        resolver.release.set()
        await asyncio.gather(*waiting)

    with resolving(monkeypatch) as resolver, listening() as port:
        asyncio.run(scenario(resolver, port))


def test_a_caller_that_waits_for_a_lookup_that_hangs_is_served_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(resolver: Resolver, port: int) -> None:
        network = RealNetwork()
        resolver.hanging.add("back")
        waiting = asyncio.create_task(connect(network, "back", port))
        while not resolver.asked:
            await asyncio.sleep(0.001)
        resolver.hanging.clear()
        await waiting
        assert resolver.asked == ["back", "back"]

    with resolving(monkeypatch) as resolver, listening() as port:
        asyncio.run(scenario(resolver, port))


def test_a_caller_that_gives_up_leaves_nothing_behind_and_the_name_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(resolver: Resolver, port: int) -> None:
        network = RealNetwork()
        resolver.hanging.add("slow")
        impatient = asyncio.create_task(connect(network, "slow", port))
        patient = asyncio.create_task(connect(network, "slow", port))
        while not resolver.asked:
            await asyncio.sleep(0.001)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert resolver.asked == ["slow"]
        resolver.release.set()
        await patient

    monkeypatch.setattr("minibroker.protocol.world.real.LOOKUP_OVERDUE_S", DEADLINE_S)
    with resolving(monkeypatch) as resolver, listening() as port:
        asyncio.run(scenario(resolver, port))


def test_an_unknown_name_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(port: int) -> None:
        with pytest.raises(socket.gaierror, match="not known"):
            await connect(RealNetwork(), "gone", port)

    with resolving(monkeypatch), listening() as port:
        asyncio.run(scenario(port))


def test_a_port_where_nobody_listens_is_a_refusal_by_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        pass

    async def scenario() -> None:
        with pytest.raises(ConnectionRefusedError):
            await connect(RealNetwork(), "living", port)

    with resolving(monkeypatch):
        asyncio.run(scenario())


# --- a name with several addresses ---


@contextmanager
def swallowing(port: int) -> Iterator[str]:
    """The address of a listener on that port that answers nothing, as its backlog is full."""
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.2", port))
        server.listen(0)
        first.connect(("127.0.0.2", port))
        yield "127.0.0.2"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_address_that_swallows_packets_does_not_hide_the_next(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(port: int) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await connect(RealNetwork(), "several", port)
        assert 0.2 < loop.time() - began < DEADLINE_S / 2  # a silent address takes the whole time

    with resolving(monkeypatch) as resolver, listening() as port, swallowing(port) as silent:
        resolver.addresses = [silent, "127.0.0.1"]
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(scenario(port))


def test_where_all_addresses_refuse_that_is_a_refusal_and_where_one_is_silent_it_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal proves that the process is gone; one silent address does not."""

    async def scenario(resolver: Resolver, port: int, silent: str) -> None:
        resolver.addresses = ["127.0.0.1", "127.0.0.3"]
        with pytest.raises(ConnectionRefusedError, match="Connection refused"):
            await connect(RealNetwork(), "several", port)
        resolver.addresses = ["127.0.0.1", silent]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                await connect(RealNetwork(), "several", port)
        await asyncio.sleep(0)  # for the attempt that was cancelled
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    with listening() as port:
        pass
    with resolving(monkeypatch) as resolver, swallowing(port) as silent:
        asyncio.run(scenario(resolver, port, silent))


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connect_that_is_cancelled_at_any_step_and_again_leaves_no_socket(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def cancelled_after(steps: int, port: int) -> None:
        connecting = asyncio.create_task(RealNetwork().connect("127.0.0.1", port, Peer))
        for _ in range(steps):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        if not connecting.cancelled():
            connecting.result().transport.abort()
        await asyncio.sleep(0.01)

    def sockets() -> int:
        found = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return sum("socket:" in path for path in found)

    with listening() as port, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(cancelled_after(0, port))
        before = sockets()
        for steps in range(1, 12):
            runner.run(cancelled_after(steps, port))
        assert sockets() == before


def test_families_are_tried_in_turn() -> None:
    six, four = [(socket.AF_INET6, f"::{n}") for n in range(1, 4)], [(socket.AF_INET, "127.0.0.1")]
    assert [address for _, address in _by_turns([*six, *four])] == ["::1", "127.0.0.1", "::2", "::3"]
