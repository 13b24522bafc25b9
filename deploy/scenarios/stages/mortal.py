"""Clients that can be killed although they are tasks of this process.

A killed process sends no goodbye, and its kernel breaks its connections. So a mortal client has a World of its own. At
its death every connection of that World is aborted, and no new one is made; whatever the client's code still does
reaches no broker, and no ledger. Rejected: a process for each client, whose ledger would have to travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar, cast

from minibroker.deploy.scenarios.ledger import Ledger
from minibroker.protocol.world import Beside, Clock, Disk, Executor, Listener, Network, World, ZooKeeper

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Life:
    """The connections of a client while it lives. Threads of the client share it."""

    def __init__(self) -> None:
        self.is_over = False
        self._open: dict[asyncio.Transport, asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()

    def opened(self, transport: asyncio.Transport) -> None:
        with self._lock:
            self._open[transport] = asyncio.get_running_loop()
        if self.is_over:
            transport.abort()

    def closed(self, transport: asyncio.Transport) -> None:
        with self._lock:
            self._open.pop(transport, None)

    def end(self) -> None:
        self.is_over = True
        with self._lock:
            left = list(self._open.items())
        for transport, loop in left:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its connections with it
                loop.call_soon_threadsafe(transport.abort)


class _Watched(asyncio.BufferedProtocol):
    """Hands everything on to the protocol, and knows its transport."""

    def __init__(self, inner: asyncio.BufferedProtocol, life: Life) -> None:
        self._life = life
        self._transport: asyncio.Transport | None = None
        self.inner = inner
        self.get_buffer = inner.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = inner.buffer_updated  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.inner.connection_made(transport)
        self._life.opened(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._life.closed(self._transport)
        self.inner.connection_lost(error)


class _MortalNetwork:
    def __init__(self, network: Network, life: Life) -> None:
        self._network = network
        self._life = life

    async def listen(self, host: str, port: int) -> Listener:
        return await self._network.listen(host, port)

    async def addresses(self, host: str) -> list[str]:
        return await self._network.addresses(host)

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        if self._life.is_over:
            raise ConnectionRefusedError(f"the client that would connect to {host}:{port} was killed")
        inner = factory()
        assert isinstance(inner, asyncio.BufferedProtocol)
        watched = _Watched(inner, self._life)
        await self._network.connect(host, port, lambda: watched)
        return inner


class MortalWorld:
    """The World of a client that `Life.end` kills."""

    def __init__(self, world: World, life: Life) -> None:
        self._world = world
        self._life = life
        self.clock: Clock = world.clock
        self.network: Network = _MortalNetwork(world.network, life)
        self.disk: Disk = world.disk
        self.zookeeper: ZooKeeper = world.zookeeper
        self.random: Random = world.random

    def new_executor(self, name: str) -> Executor:
        return self._world.new_executor(name)

    def beside(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> Beside:
        return self._world.beside(lambda world: main(MortalWorld(world, self._life)), name)


class MortalLedger(Ledger):
    """The ledger of the run, until the client is dead: then one that nobody reads."""

    def __init__(self, ledger: Ledger) -> None:
        self.__dict__ = ledger.__dict__

    def die(self) -> None:
        unread = Ledger()
        unread.producing = unread.running = False
        self.__dict__ = unread.__dict__
