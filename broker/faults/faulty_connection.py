"""One connection under faults: what its protocol sends, and what arrives for it, may be late or held.

The protocol gets a transport and the transport a protocol, both of them from here. They stay above TLS, so the same
code serves both kinds of connections. Data that is to be sent waits in a queue of its own; data that is held on arrival
stays in the kernel, since the transport does not read it. So the other side sees a full window, as it would before the
first packet is lost; what it sent arrives when the fault is healed, as TCP sends it again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from minibroker.broker.faults.lag import Lag
from minibroker.broker.faults.links import NONE, Treatment
from minibroker.protocol.messages import Buffer

_READ_BYTES = 262_144


class FaultyConnection:
    """Connects a protocol with a transport. `port` is the one that was connected to; None if it was accepted."""

    def __init__(self, inner: asyncio.BaseProtocol, port: int | None, registry: set[FaultyConnection]) -> None:
        self.inner = inner
        self.port = port
        self.registry = registry
        self.treatment = NONE
        loop = asyncio.get_running_loop()
        self.sent = Lag(loop)
        self.received = Lag(loop)
        self.real: asyncio.Transport | None = None
        self.is_paused = False
        """Whether the protocol does not want to read."""
        self.is_ended = False
        """Whether the protocol has ended the connection, and reads nothing more."""
        self.is_lost = False
        """Whether the protocol knows that the connection is lost."""
        self.unsent_bytes = 0
        self._reads = True
        self._tell_lost: Callable[[], None] | None = None
        """Tells the protocol that the real connection is lost, which may be late like the data before it."""

    def outer(self) -> Outer:
        """Return the protocol for the real transport."""
        return _Chunks(self) if isinstance(self.inner, asyncio.BufferedProtocol) else _Stream(self)

    def treat(self, treatment: Treatment) -> None:
        if treatment == self.treatment:
            return
        self.treatment = treatment
        self.sent.change(treatment.sent)
        self.received.change(treatment.received)
        self.update_reading()

    def update_reading(self) -> None:
        reads = not self.is_paused and not self.treatment.received.is_held
        if self.real is None or reads is self._reads or self.real.is_closing():
            return
        self._reads = reads
        if reads:
            self.real.resume_reading()
        else:
            self.real.pause_reading()

    def abort(self) -> None:
        self.is_ended = True
        self.sent.clear()
        self.received.clear()
        self.unsent_bytes = 0
        if self._tell_lost is not None:
            asyncio.get_running_loop().call_soon(self._tell_lost)  # as the real transport does
        elif self.real is not None:
            self.real.abort()

    # -- from the real transport --

    def made(self, transport: asyncio.BaseTransport) -> None:
        self.real = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self.registry.add(self)
        self.inner.connection_made(_Transport(self))
        self.update_reading()

    def arrived(self, data: bytes) -> None:
        self.in_turn(partial(self._deliver, data))

    def _deliver(self, data: bytes) -> None:
        if not isinstance(self.inner, asyncio.BufferedProtocol):
            cast(asyncio.Protocol, self.inner).data_received(data)
            return
        rest = memoryview(data)
        while rest and not self.is_ended:
            buffer = memoryview(cast(bytearray, self.inner.get_buffer(len(rest)))).cast("B")
            count = min(len(buffer), len(rest))
            if not count:
                raise RuntimeError("get_buffer() returned an empty buffer")
            buffer[:count] = rest[:count]
            rest = rest[count:]
            self.inner.buffer_updated(count)

    def in_turn(self, call: Callable[[], object]) -> None:
        """Call it now, or after what is late."""
        if self.received.is_open or self.treatment.received.is_held:
            call()  # held data is not read; what was read before had arrived before
        else:
            self.received.put(call)

    def lost(self, error: Exception | None) -> None:
        self.sent.clear()
        if self.treatment.received.is_held:
            self.received.clear()
        self._tell_lost = partial(self._lose, error)
        self.in_turn(self._tell_lost)

    def _lose(self, error: Exception | None) -> None:
        """Only now are there no faults left to heal."""
        if self.is_lost:
            return
        self.is_lost = True
        self.registry.discard(self)
        self.inner.connection_lost(error)


class Outer(asyncio.BaseProtocol):
    """The protocol of the real transport."""

    def __init__(self, connection: FaultyConnection) -> None:
        self.connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connection.made(transport)

    def eof_received(self) -> bool | None:
        """Pass it on. Late, it leaves the closing to the transport, as the protocols of brokers and clients do."""
        inner = cast(asyncio.Protocol, self.connection.inner)
        if self.connection.received.is_open:
            return inner.eof_received()
        self.connection.in_turn(inner.eof_received)
        return None

    def pause_writing(self) -> None:
        self.connection.inner.pause_writing()

    def resume_writing(self) -> None:
        self.connection.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.lost(exc)


class _Stream(Outer, asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        self.connection.arrived(data)


class _Chunks(Outer, asyncio.BufferedProtocol):
    """Reads into the buffer of the protocol itself if nothing is late."""

    def __init__(self, connection: FaultyConnection) -> None:
        super().__init__(connection)
        self._inner = cast(asyncio.BufferedProtocol, connection.inner)
        self._late: bytearray | None = None
        """The buffer that was given last, if it is not the protocol's own."""

    def get_buffer(self, sizehint: int) -> Any:
        if self.connection.received.is_open:
            self._late = None
            return self._inner.get_buffer(sizehint)
        self._late = bytearray(_READ_BYTES)
        return self._late

    def buffer_updated(self, nbytes: int) -> None:
        late, self._late = self._late, None
        if late is None:
            self._inner.buffer_updated(nbytes)
        else:
            self.connection.arrived(bytes(late[:nbytes]))


class _Transport(asyncio.Transport):
    """What the protocol gets."""

    def __init__(self, connection: FaultyConnection) -> None:
        super().__init__()
        self._connection = connection
        assert connection.real is not None
        self._real = connection.real
        self._is_closing = False

    def write(self, data: Buffer) -> None:
        connection = self._connection
        if connection.sent.is_open:
            self._real.write(data)
            return
        kept = bytes(data)
        connection.unsent_bytes += len(kept)
        connection.sent.put(partial(self._write_late, kept))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        if self._connection.sent.is_open:
            self._real.writelines(list_of_data)
        else:
            self.write(b"".join(list_of_data))

    def _write_late(self, data: bytes) -> None:
        self._connection.unsent_bytes -= len(data)
        if not self._real.is_closing():
            self._real.write(data)

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = self._connection.is_ended = True
        if self._connection.sent.is_open:
            self._real.close()
        else:
            self._connection.sent.put(self._real.close)

    def abort(self) -> None:
        self._is_closing = True
        self._connection.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._real.is_closing()

    def pause_reading(self) -> None:
        self._connection.is_paused = True
        self._connection.update_reading()

    def resume_reading(self) -> None:
        self._connection.is_paused = False
        self._connection.update_reading()

    def is_reading(self) -> bool:
        return not self._connection.is_paused

    def get_write_buffer_size(self) -> int:
        return self._real.get_write_buffer_size() + self._connection.unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._real.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._real.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default)

    def can_write_eof(self) -> bool:
        return self._real.can_write_eof()

    def write_eof(self) -> None:
        self._real.write_eof()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._connection.inner

    async def start_tls(
        self,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        *,
        server_hostname: str,
        ssl_handshake_timeout: float,
    ) -> asyncio.Transport | None:
        """As `loop.start_tls`, for `minibroker.protocol.connections.tls`. From then on, faults are those of the
        connection above."""
        below = self._connection
        above = FaultyConnection(protocol, below.port, below.registry)
        try:
            real = await asyncio.get_running_loop().start_tls(
                self._real,
                above.outer(),
                context,
                server_hostname=server_hostname,
                ssl_handshake_timeout=ssl_handshake_timeout,
            )
        finally:  # the handshake has its place below TLS: nothing is told that it is lost
            below.registry.discard(below)
        if real is None:
            return None
        above.real = real
        above.registry.add(above)
        above.treat(below.treatment)
        return _Transport(above)
