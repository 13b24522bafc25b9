"""A network that loses packets or is slow where the fault file says so. See `links` for who treats which connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from ssl import SSLContext
from typing import TypeVar, cast

from minibroker.broker.faults.fault_file import FaultFile
from minibroker.broker.faults.faulty_connection import FaultyConnection, Outer
from minibroker.broker.faults.links import Treatment, accepted, opened
from minibroker.protocol.faults import Faults
from minibroker.protocol.world import Incoming, Listener, Network

P = TypeVar("P", bound=asyncio.BaseProtocol)

_LOOP_IS_LOOKED_AT_EVERY_S = 0.1
_REPORTED_AFTER_S = 10.0
"""The time that the event loop has to apply changed faults, before a warning says that it has not."""
MOST_WAITING_NEWCOMERS = 128
"""Accepted connections that an isolated broker keeps until it is healed. Others are closed."""

logger = logging.getLogger("minibroker.faults")


class FaultyNetwork:
    """See `minibroker.protocol.world.Network`."""

    def __init__(self, network: Network, file: FaultFile) -> None:
        self._network = network
        self._file = file
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._connections: set[FaultyConnection] = set()
        self._waiting: list[Callable[[], None]] = []
        """Accepted connections that nobody looks at while the broker is isolated."""
        self._drops = file.current.drops
        file.on_change(self._tell_loop)

    async def addresses(self, host: str) -> list[str]:
        return await self._network.addresses(host)

    async def listen(self, host: str, port: int) -> Listener:
        self._loop = asyncio.get_running_loop()
        listener = await self._network.listen(host, port)
        self._file.listens_on(listener.port)
        return _FaultyListener(listener, self)

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        self._loop = asyncio.get_running_loop()
        await self._packets_pass(port)
        outer = await self._network.connect(host, port, lambda: self._outer(factory, port))
        outer.connection.treat(self._of_opened(port))
        return cast(P, outer.connection.inner)

    def _outer(self, factory: Callable[[], asyncio.BaseProtocol], port: int | None) -> Outer:
        return FaultyConnection(factory(), port, self._connections).outer()

    async def _packets_pass(self, port: int) -> None:
        """Wait for as long as the first packet and its answer need. What is healed meanwhile holds nothing up."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            changed = self._changed
            treatment = self._of_opened(port)
            if treatment.is_cut:
                await changed.wait()
                began_s = loop.time()
                continue
            left_s = began_s + treatment.sent.delay_s + treatment.received.delay_s - loop.time()
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    def _of_opened(self, port: int) -> Treatment:
        faults = self._file.current
        return opened(faults, self._file.peers().get(port) if faults.links else None)

    # -- accepted connections --

    def arrived(self, take: Callable[[], None], close: Callable[[], None]) -> None:
        if not self._file.current.is_isolated:
            take()
        elif len(self._waiting) < MOST_WAITING_NEWCOMERS:
            self._waiting.append(take)
        else:  # or strangers that come and go would take all descriptors, and the healing could not be read
            close()

    async def attached(self, incoming: Incoming, factory: Callable[[], P], tls: SSLContext | None) -> P:
        outer = await incoming.attach(lambda: self._outer(factory, None), tls)
        outer.connection.treat(accepted(self._file.current))
        return cast(P, outer.connection.inner)

    # -- changes --

    def _tell_loop(self, faults: Faults) -> None:
        """Called by the thread of the file. Returns when the connections are treated."""
        loop = self._loop
        if loop is None:
            self._drops = faults.drops  # what was ordered before the broker started
            return
        is_done = threading.Event()

        def apply() -> None:
            try:
                self._apply(faults)
            finally:  # or the thread would wait for ever, and the broker obey nothing more
                is_done.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(apply)
            rounds = 0
            while not is_done.wait(_LOOP_IS_LOOKED_AT_EVERY_S) and loop.is_running():
                rounds += 1
                if rounds == round(_REPORTED_AFTER_S / _LOOP_IS_LOOKED_AT_EVERY_S):
                    logger.warning("the event loop has not come to the faults of revision %d", faults.revision)

    def _apply(self, faults: Faults) -> None:
        if faults.drops != self._drops:
            self._drops = faults.drops
            for connection in list(self._connections):
                connection.abort()
        peers = self._file.peers() if faults.links else {}
        for connection in list(self._connections):
            port = connection.port
            connection.treat(accepted(faults) if port is None else opened(faults, peers.get(port)))
        self._changed.set()
        self._changed = asyncio.Event()
        if not faults.is_isolated:
            waiting, self._waiting = self._waiting, []
            for take in waiting:
                take()


class _FaultyListener:
    def __init__(self, listener: Listener, network: FaultyNetwork) -> None:
        self._listener = listener
        self._network = network

    @property
    def port(self) -> int:
        return self._listener.port

    def start(self, on_connection: Callable[[Incoming], None], may_accept: Callable[[], bool] = lambda: True) -> None:
        def arrived(incoming: Incoming) -> None:
            self._network.arrived(lambda: on_connection(_FaultyIncoming(incoming, self._network)), incoming.close)

        self._listener.start(arrived, may_accept)

    async def close(self) -> None:
        await self._listener.close()


class _FaultyIncoming:
    def __init__(self, incoming: Incoming, network: FaultyNetwork) -> None:
        self._incoming = incoming
        self._network = network

    @property
    def peer(self) -> str:
        return self._incoming.peer

    async def attach(self, factory: Callable[[], P], tls: SSLContext | None = None) -> P:
        return await self._network.attached(self._incoming, factory, tls)

    def close(self) -> None:
        self._incoming.close()
