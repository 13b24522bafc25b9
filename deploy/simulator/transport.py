"""One end of a connection of the network in memory, and the links and machines that carry it. See `network`."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context
from enum import Enum
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar
from zlib import crc32

from minibroker.deploy.simulator.loop import VirtualLoop
from minibroker.deploy.simulator.process import Process

T = TypeVar("T")

SEGMENT_BYTES = 64 * 1024
WINDOW_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 64 * 1024
_SIZE_HINT = 65_536
_MIN_RETRANSMISSION_S = 0.2
_MAX_RETRANSMISSION_S = 0.4
_MIN_USER_TIMEOUT_S = 20.0
_MAX_USER_TIMEOUT_S = 60.0


class _Signal(Enum):
    END = "end of the stream"
    RESET = "reset"


_Piece = memoryview | _Signal


class Arrival(NamedTuple):
    """Bytes at the end of a link, just before they are delivered."""

    source: str
    """The host that sent the bytes."""
    target: str
    target_port: int
    data: memoryview
    is_late: bool
    """Whether `delay_standing` has delayed them."""


def os_error(number: int, what: str) -> OSError:
    return OSError(number, f"{os.strerror(number)}: {what}")


class ProcessOfMachine(Protocol):
    """The network of a process (`network.ProcessNetwork`), as its host sees it."""

    def ends_to(self, address: str) -> list[VirtualTransport]:
        """Return the ends of its connections to that address."""
        ...

    def links_changed(self) -> None: ...

    def vanish(self) -> None:
        """The host has lost its power."""
        ...


class Machine:
    """The network's view of a host."""

    def __init__(self) -> None:
        self.has_power = True
        self.is_attached = True
        self.boots = 1
        self.processes: list[ProcessOfMachine] = []


class Link:
    """The route from one host to another."""

    def __init__(self, source: Machine, target: Machine) -> None:
        self._source = source
        self._target = target
        self.back = self
        self.blocked = False
        self.free_at_s = 0.0
        """Time at which all sent bytes have left, if its bandwidth is limited."""
        self.answers = False
        """This link and the one back carry. Cached, because it is read for every piece."""

    def carries(self) -> bool:
        """Whether sent pieces arrive."""
        ends = (self._source, self._target)
        if not all(end.has_power for end in ends):
            return False
        return self._source is self._target or (not self.blocked and all(end.is_attached for end in ends))

    def update(self) -> None:
        """Recompute `answers` after a change of this link or the one back."""
        self.answers = self.carries() and self.back.carries()


class Wires(Protocol):
    """The part of the network (`network.VirtualNetwork`) that a connection needs."""

    loop: VirtualLoop
    random: Random
    bytes_per_s: float | None
    taps: list[Callable[[Arrival], None]]

    def machine(self, address: str) -> Machine: ...

    def link(self, source: str, target: str) -> Link: ...

    def delay_s(self) -> float: ...

    def cut(self, size: int) -> int:
        """Return the size at which a piece is cut in two."""
        ...


class VirtualSocket:
    """The socket of a transport. It stores options; those of keepalive and TCP_USER_TIMEOUT have an effect."""

    def __init__(self) -> None:
        self._options: dict[tuple[int, int], int] = {}

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._options[level, option] = value

    def fileno(self) -> int:
        """Return -1, as a socket without a descriptor does."""
        return -1

    @property
    def keepalive(self) -> bool:
        return bool(self._options.get((socket.SOL_SOCKET, socket.SO_KEEPALIVE)))

    @property
    def keepalive_idle_s(self) -> int:
        """Seconds of silence after which the other end is probed."""
        return self._options.get((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 7_200)

    @property
    def keepalive_patience_s(self) -> float:
        """Seconds for an answer to the probes. If TCP_USER_TIMEOUT is set, Linux does not count probes: that timeout
        applies, since the last piece from the other end."""
        interval_s = self._options.get((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 75)
        if self.user_timeout_s is not None:
            return max(self.user_timeout_s - self.keepalive_idle_s, interval_s)
        return self._options.get((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 9) * interval_s

    @property
    def user_timeout_s(self) -> float | None:
        """Seconds that sent bytes may stay unacknowledged."""
        milliseconds = self._options.get((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return None if milliseconds is None else milliseconds / 1_000


class VirtualTransport(asyncio.Transport):
    """One end of a connection. It behaves as asyncio's and uvloop's transports where those agree."""

    def __init__(
        self,
        network: Wires,
        process: Process,
        open_ends: dict[VirtualTransport, None],
        local: tuple[str, int],
        remote: tuple[str, int],
    ) -> None:
        self._socket = VirtualSocket()
        super().__init__(extra={"sockname": local, "peername": remote, "socket": self._socket})
        self._network = network
        self._loop = network.loop
        self._process = process
        self._context = process.new_context()
        self._open_ends = open_ends
        open_ends[self] = None
        self._name = f"{local[0]}:{local[1]}>{remote[0]}:{remote[1]}"
        self._protocol: asyncio.BaseProtocol | None = None
        self.other: VirtualTransport
        """The other end. Set, with the link to it, by `join`."""
        self._link: Link
        self._machine = network.machine(process.address)
        self._boot = self._machine.boots

        self._closing = False
        """Nothing more is read, and new writes are ignored."""
        self._closed = False
        """This end is gone: `connection_lost` has been called or is scheduled."""

        self._unread: deque[_Piece] = deque()
        self._reading_paused = False
        self._reset_received = False

        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._unacknowledged_bytes = 0
        self._last_arrival = 0.0
        self.delay_s = 0.0
        """Added to the latency of each piece."""
        self.silenced = False
        """No piece arrives any more, from either end."""
        self._flush_scheduled = False
        self._end_written = False
        self._end_sent = False
        self._writing_paused = False
        self._high_water = _HIGH_WATER_BYTES
        self._low_water = _HIGH_WATER_BYTES // 4

        self._vanished = False
        """Its host lost its power, or gave up without reaching the other end: only resets leave this end."""
        self._stalled = False
        """A piece was not acknowledged, so no piece arrives."""
        self._held: deque[_Piece] = deque()
        """Pieces to retransmit."""
        self._backing_off = False
        """A retransmission has failed, so no new piece is sent."""
        self._gives_up_at_s = 0.0
        self._retransmission_s = 0.0
        self._keepalive: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<connection {self._name} of {self._process.name}>"

    # -- beginning --

    def join(self, other: VirtualTransport) -> None:
        self.other = other
        self._link = self._network.link(self._process.address, other._process.address)

    @property
    def remote_address(self) -> str:
        return self.other._process.address

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._loop.call_soon(self._read, context=Context())

    # -- asyncio.BaseTransport --

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing or not self._process.alive:
            return
        self._closing = True
        self._flush()

    def abort(self) -> None:
        if self._process.alive:
            self._lose(None)

    # -- reading --

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._loop.call_soon(self._read, context=Context())

    def _arrive(self, piece: _Piece) -> None:
        if self._closed:
            if not isinstance(piece, _Signal):
                self._send(_Signal.RESET)  # this end will never read it
            return
        if self._reset_received:
            return
        if piece is _Signal.RESET:
            self._reset_received = True
            if self._unsent and self._process.running:
                self._lose(_reset())
                return
        self._unread.append(piece)
        self._read()

    def _read(self) -> None:
        """Pass arrived pieces to the protocol while it reads."""
        protocol: Any = self._protocol
        while self._unread and protocol is not None and self.is_reading() and self._process.running:
            piece = self._unread.popleft()
            if piece is _Signal.RESET:
                self._lose(_reset())
            elif piece is _Signal.END:
                if not self._call("eof_received", protocol.eof_received):
                    self.close()
            elif isinstance(protocol, asyncio.BufferedProtocol):
                self._call("buffer_updated", self._fill_buffer, protocol, piece)
            else:
                self._was_read(len(piece))
                self._call("data_received", protocol.data_received, bytes(piece))

    def _fill_buffer(self, protocol: asyncio.BufferedProtocol, piece: memoryview) -> None:
        buffer = memoryview(protocol.get_buffer(_SIZE_HINT))
        size = min(len(buffer), len(piece))
        if size == 0:
            raise RuntimeError("get_buffer() returned an empty buffer")
        buffer[:size] = piece[:size]
        if size < len(piece):
            self._unread.appendleft(piece[size:])
        self._was_read(size)
        protocol.buffer_updated(size)

    def _was_read(self, size: int) -> None:
        other = self.other
        other._unacknowledged_bytes -= size
        if other._unsent:
            self._loop.call_later(self._network.delay_s(), other._acknowledged, context=Context())

    # -- writing --

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 4 * low if low is not None else _HIGH_WATER_BYTES
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_water, self._low_water = high, low
        self._maybe_pause_writing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
        if self._end_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._closing or not self._process.alive:
            return
        self._unsent.append(memoryview(data).cast("B"))
        self._unsent_bytes += len(self._unsent[-1])
        if self._unsent_bytes > self._high_water:
            self._flush()
            self._maybe_pause_writing()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_scheduled_data, context=self._context)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._closing or self._end_written or not self._process.alive:
            return
        self._end_written = True
        self._flush()

    def _flush_scheduled_data(self) -> None:
        self._flush_scheduled = False
        self._flush()
        self._maybe_pause_writing()

    def _flush(self) -> None:
        """Send as much as the window allows. After the last byte, end the stream or close, if requested."""
        if self._closed:
            return
        if self._reset_received and self._unsent:
            self._lose(_reset())
            return
        while self._unsent and self._unacknowledged_bytes < WINDOW_BYTES:
            segment = self._take(min(SEGMENT_BYTES, WINDOW_BYTES - self._unacknowledged_bytes))
            size = self._network.cut(len(segment))
            self._send(segment[:size])
            if size < len(segment):
                self._send(segment[size:])
        if self._unsent:
            return
        if self._closing:
            self._lose(None)
        elif self._end_written and not self._end_sent:
            self._end_sent = True
            self._send(_Signal.END)

    def _take(self, limit: int) -> memoryview:
        pieces = []
        while self._unsent and limit:
            piece = self._unsent.popleft()
            if len(piece) > limit:
                self._unsent.appendleft(piece[limit:])
                piece = piece[:limit]
            pieces.append(piece)
            limit -= len(piece)
            self._unsent_bytes -= len(piece)
        return memoryview(b"".join(pieces))

    def _acknowledged(self) -> None:
        if not self._process.running:
            return
        self._flush()
        if self._writing_paused and self._unsent_bytes <= self._low_water and not self._closed:
            self._writing_paused = False
            self._call("resume_writing", self.get_protocol().resume_writing)

    def _maybe_pause_writing(self) -> None:
        if self._unsent_bytes > self._high_water and not self._writing_paused and not self._closed:
            self._writing_paused = True
            self.get_protocol().pause_writing()

    def _send(self, piece: _Piece) -> None:
        leaves_at_s = self._loop.now_s
        if not isinstance(piece, _Signal):
            self._unacknowledged_bytes += len(piece)
            if self._network.bytes_per_s is not None:
                leaves_at_s = max(leaves_at_s, self._link.free_at_s) + len(piece) / self._network.bytes_per_s
                self._link.free_at_s = leaves_at_s
        self._last_arrival = max(self._last_arrival, leaves_at_s + self._network.delay_s() + self.delay_s)
        self._loop.record(f"{self._name} {piece.value if isinstance(piece, _Signal) else crc32(piece)}")
        self._loop.call_at_true(self._last_arrival, self._deliver, (piece,), Context())

    def _deliver(self, piece: _Piece) -> None:
        """Deliver a piece that has reached the end of the link."""
        if self._network.taps and not isinstance(piece, _Signal):
            source, target = self._process.name.partition("#")[0], self.other._process.name.partition("#")[0]
            arrival = Arrival(source, target, self.get_extra_info("peername")[1], piece, self.delay_s > 0)
            for tap in list(self._network.taps):
                tap(arrival)
        if self._answers and not self._stalled:
            self.other._arrive(piece)
        else:
            self._deliver_or_hold(piece)

    # -- broken links --

    @property
    def _answers(self) -> bool:
        return self._link.answers and not self.silenced

    def _deliver_or_hold(self, piece: _Piece) -> None:
        carries = self._link.carries() and not self.silenced
        if self._vanished or self._boot != self._machine.boots:
            if piece is _Signal.RESET and carries:
                self.other._arrive(piece)
            return
        if not self._stalled:
            random = self._network.random
            self._stalled, self._backing_off = True, False
            patience_s, own_s = random.uniform(_MIN_USER_TIMEOUT_S, _MAX_USER_TIMEOUT_S), self._socket.user_timeout_s
            self._gives_up_at_s = self._loop.now_s + (patience_s if own_s is None else own_s)
            self._retransmission_s = random.uniform(_MIN_RETRANSMISSION_S, _MAX_RETRANSMISSION_S)
            self._loop.call_later(self._retransmission_s, self._retransmit, context=Context())
        if carries and not self._held and not self._backing_off:
            self.other._arrive(piece)  # only the acknowledgement is lost
        else:
            self._held.append(piece)

    def _retransmit(self) -> None:
        now_s = self._loop.now_s
        if self._vanished or self._boot != self._machine.boots:
            self._held.clear()
        elif self._answers:
            self._stalled = False
            held, self._held = self._held, deque()
            for piece in held:
                self.other._arrive(piece)
        elif now_s >= self._gives_up_at_s:
            self._give_up()
        else:
            self._backing_off = True
            self._retransmission_s *= 2
            again_at_s = min(now_s + self._retransmission_s, self._gives_up_at_s)
            self._loop.call_at_true(again_at_s, self._retransmit, (), Context())

    def _give_up(self) -> None:
        """Time out. The other end is not notified."""
        self._loop.record(f"{self._name} has timed out")
        self._forget()
        self._lose(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def _forget(self) -> None:
        self._vanished = self._stalled = True
        self._held.clear()

    def vanish(self) -> None:
        """The host has lost its power."""
        self._forget()
        self._lose(None)

    def broken(self) -> None:
        """Reset both ends. Pieces in transit are lost."""
        for end in (self, self.other):
            end._held.clear()
            end._arrive(_Signal.RESET)

    def broken_here(self) -> None:
        """Reset this end only."""
        self._arrive(_Signal.RESET)

    def link_changed(self) -> None:
        """Simulate keepalive probes, if enabled: they detect that the other end is unreachable or gone."""
        if not self._socket.keepalive:
            return
        random, other = self._network.random, self.other
        if not self._answers:
            if self._keepalive is None:
                gives_up_s = random.uniform(0, self._socket.keepalive_idle_s) + self._socket.keepalive_patience_s
                self._keepalive = self._loop.call_later(gives_up_s, self._probes_end, context=Context())
            return
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None
        if other._vanished:
            within_s = random.uniform(0, self._socket.keepalive_idle_s)
            self._loop.call_later(within_s, self._arrive, _Signal.RESET, context=Context())

    def _probes_end(self) -> None:
        """Give up after unanswered probes. TCP sends no probes while a piece is unacknowledged."""
        if not self._stalled:
            self._give_up()

    def process_resumed(self) -> None:
        """Handle the pieces that arrived and the acknowledgements from the time of the pause."""
        self._read()
        self._acknowledged()

    # -- end --

    def process_killed(self) -> None:
        """Close the connection as the operating system does for a killed process."""
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closing = self._closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if not self._reset_received and not self._vanished:
            if any(not isinstance(piece, _Signal) for piece in self._unread):
                self._send(_Signal.RESET)
            elif not self._end_sent:
                self._send(_Signal.END)
        self._unread.clear()
        del self._open_ends[self]
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def _call(self, what: str, method: Callable[..., T], *arguments: object) -> T | None:
        """Call the protocol as its process."""
        try:
            return self._context.run(method, *arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - reported; it ends the connection, as in asyncio
            if self._process.alive:
                self._loop.call_exception_handler(
                    {
                        "message": f"Fatal error: protocol.{what}() call failed.",
                        "exception": error,
                        "transport": self,
                        "protocol": self._protocol,
                    }
                )
            self._lose(error if isinstance(error, Exception) else None)
            return None


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
