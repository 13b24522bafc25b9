"""Telling within a fraction of a second that a broker's process has died (what Kafka's ZooKeeper mode lacks).

The problem: a killed process closes its sockets at once, but its ZooKeeper session lives on for seconds, and until it
ends nobody elects a new leader. A connection that breaks proves little by itself, though: networks drop connections,
and a wrong guess costs a leader change.

The choice: one idle connection to each watched broker's control listener. When it ends, connect again. **Refused**,
twice, means that the host is there and no process listens on the port: the process is gone, as surely as anything
can be known from outside, so suspect it at once. So does a name that is gone where a connection stood before: that is
how containers end. (Where none stood, the name may be misspelt.) Everything else (no answer, no route, accepted and
closed again, as a container's port proxy does) may be the network, so it must last for `broker.crash.detection.ms`.

A host or a container whose address vanishes resets nothing: the connection to it would stay open for ever. So the
kernels ask each other every second whether it still stands (TCP keepalive), and after two probes without an answer it
has ended, long before the session.

Who finds others unreachable may be the one that is cut off. So ZooKeeper is asked for something before the first
attempt to connect again, and after the last: unless it answers promptly both times, what was seen in between counts for
nothing. A broker whose network has come back would otherwise depose a healthy controller for what it saw alone.

A suspicion is only that: it deletes a znode, which the suspect, if it lives, creates again under a new broker epoch.
Each watch suspects once. Who comes back, and still cannot be reached, was perhaps never gone: one link is broken, or
its advertised address is wrong, and to remove it again and again would elect new leaders for as long as that lasts. So
each suspicion in a row makes the next one take four times as long, refused or not, until a connection stands; the
session finds a real crash meanwhile. A row outlives the suspect's broker epoch, which each suspicion changes, and terms
of office: a link between the controller and another broker is broken for both ends, they depose each other in turn, and
would begin to count anew each time. (Two brokers, who have no third one to lead them, had 40 controllers in two minutes
that way, and as many leader epochs. Now either end suspects the other after 0.5, 2, 8, 32 and 128 s.) A broker that was
started anew is connected to as soon as it has registered, and a crash of it is found as quickly as the first one.

A process that was stopped (SIGSTOP) keeps its connections, its kernel answers for it: that is the session's to find.

Rejected: heartbeats on the connection (they only repeat, at a cost, what the session does for a process that hangs, and
a busy event loop would miss them; keepalive probes are answered by the kernel, however busy the process is).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from minibroker.controller.background import start_in_background, stop_in_background
from minibroker.controller.requests import control_endpoint
from minibroker.protocol.model import Broker, Endpoint
from minibroker.protocol.world import Clock, Network

_log = logging.getLogger("minibroker.controller")

REFUSALS_NEEDED = 2
RETRY_PAUSE_S = 0.02
PROVEN_S = 0.1
"""A connection that lived so long was one to the broker, not to something that accepts in its place."""

BACK_OFF = 4
"""So many times as long each suspicion in a row takes as the one before."""
LONGEST_PATIENCE_S = 128.0
"""But not longer. (A broker that has died is gone from ZooKeeper sooner, when its session ends.)"""
MAX_IN_A_ROW = 10
"""More are not counted: they change nothing any more."""
FORGOTTEN_S = 600.0
"""A row ends, too, where nobody was suspected for so long: longer than any suspicion takes, by default."""

KEEPALIVE_S = 1
KEEPALIVE_PROBES = 2
"""A connection ends where nothing came for KEEPALIVE_S, and then no answer to so many probes, one every KEEPALIVE_S.
Whole seconds are the kernel's unit."""

PROMPT_S = 0.1
"""Who waits so long for ZooKeeper's answer was cut off from it, perhaps."""

Suspect = Callable[[int, int, str], None]
"""Broker id, broker epoch, reason."""


class _Watcher(asyncio.Protocol):
    """A connection on which nothing is said. `lost` is done when it has ended."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        connection = transport.get_extra_info("socket")
        if connection is not None:  # a simulated network has none
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
            if hasattr(socket, "TCP_KEEPIDLE"):  # macOS has another name for it
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Trouble(NamedTuple):
    """A broker that could not be reached when it was looked at last."""

    epoch: int
    since_s: float
    seen_s: float
    has_stood: bool
    """A connection to it stood for a while, before."""
    is_suspected: bool = False


class _Suspicion(NamedTuple):
    """The last one of a broker whose connection has not stood since."""

    at_s: float
    in_a_row: int


class CrashDetector:
    """Watches the brokers given to `follow`, and calls `suspect` for those that it takes for crashed. `in_touch` is to
    return when ZooKeeper has answered something."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        detection_ms: int,
        suspect: Suspect,
        in_touch: Callable[[], Awaitable[None]],
    ) -> None:
        self._network = network
        self._clock = clock
        self._detection_s = detection_ms / 1_000
        self._suspect = suspect
        self._in_touch = in_touch
        self._troubles: dict[int, _Trouble] = {}
        self._suspicions: dict[int, _Suspicion] = {}
        self._watches: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, brokers: Iterable[Broker]) -> None:
        """Watch these brokers, in their present epochs, and no others."""
        wanted = {(broker.id, broker.epoch): broker for broker in brokers}
        for key in [key for key in self._watches if key not in wanted]:
            task = self._watches.pop(key)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key, broker in wanted.items():
            endpoint = control_endpoint(broker)
            if key not in self._watches and endpoint is not None:
                name = f"crash detection of broker {broker.id}"
                self._watches[key] = start_in_background(self._watch(broker, endpoint), name)

    async def probe(self, brokers: Sequence[Broker]) -> list[int]:
        """The ids of those that are not running: their control listener refuses, or they were found to be unreachable
        for `broker.crash.detection.ms` by now. Takes no longer than that; who was not known to be in trouble and cannot
        be reached within that time is left to the watch."""
        gone = await asyncio.gather(*(self._is_gone(broker) for broker in brokers))
        return [broker.id for broker, is_gone in zip(brokers, gone, strict=True) if is_gone]

    async def close(self) -> None:
        self.follow(())
        await stop_in_background(list(self._ending))

    async def _is_gone(self, broker: Broker) -> bool:
        endpoint = control_endpoint(broker)
        if endpoint is None:
            return False
        trouble = self._remembered(broker)
        if trouble is not None and trouble.is_suspected:
            return True
        patience_s = self._detection_s
        if trouble is not None:
            patience_s = max(trouble.since_s + self._detection_s - self._clock.monotonic(), RETRY_PAUSE_S)
        try:
            async with asyncio.timeout(patience_s):
                for attempt in range(REFUSALS_NEEDED):
                    if attempt:
                        await asyncio.sleep(RETRY_PAUSE_S)
                    try:
                        watcher = await self._network.connect(endpoint.host, endpoint.port, _Watcher)
                    except ConnectionRefusedError:
                        continue
                    watcher.close()
                    return False
        except TimeoutError:
            return trouble is not None
        except OSError:
            return False
        return True

    async def _watch(self, broker: Broker, endpoint: Endpoint) -> None:
        trouble = self._remembered(broker)
        # What it was suspected for has been judged. Another suspicion needs its whole time.
        failing_since_s = None if trouble is None or trouble.is_suspected else trouble.since_s
        has_stood = trouble is not None and trouble.has_stood
        refusals, in_a_row = 0, self._in_a_row(broker)
        while True:
            if await self._was_cut_off():
                failing_since_s, refusals = None, 0
            now_s = self._clock.monotonic()
            patience_s = min(self._detection_s * BACK_OFF**in_a_row, max(self._detection_s, LONGEST_PATIENCE_S))
            deadline_s = (now_s if failing_since_s is None else failing_since_s) + patience_s
            try:
                async with asyncio.timeout(min(max(deadline_s - now_s, RETRY_PAUSE_S), self._detection_s)):
                    watcher = await self._network.connect(endpoint.host, endpoint.port, _Watcher)
            except ConnectionRefusedError:
                refusals += 1
                reason = "it refuses connections"
            except (TimeoutError, OSError) as error:
                is_name_gone = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
                refusals = refusals + 1 if is_name_gone and has_stood else 0
                reason = f"it cannot be reached ({error.strerror or 'no answer'})"
            else:
                refusals = 0
                self._troubles.pop(broker.id, None)
                connected_s = self._clock.monotonic()
                try:
                    await watcher.lost
                finally:
                    watcher.close()
                    has_proven = self._clock.monotonic() - connected_s >= PROVEN_S
                    if has_proven:
                        self._suspicions.pop(broker.id, None)
                reason = "it accepts connections and closes them"
                if has_proven:
                    failing_since_s = None
                    has_stood = True
                    in_a_row = 0
                    # label C1: see ARCHITECTURE.md, "A broker crash"
                    _log.info("the connection to broker %d was lost; connecting again", broker.id)
            now_s = self._clock.monotonic()
            if failing_since_s is None:
                failing_since_s = now_s
            self._troubles[broker.id] = _Trouble(broker.epoch, failing_since_s, now_s, has_stood)
            if (refusals >= REFUSALS_NEEDED and in_a_row == 0) or now_s - failing_since_s >= patience_s:
                # Another broker's watch may have found so meanwhile, and cleared what was seen of all.
                if await self._was_cut_off() or broker.id not in self._troubles:
                    _log.info("broker %d: %s, but ZooKeeper was slow to answer, too; looking again", broker.id, reason)
                    failing_since_s, refusals = None, 0
                    continue
                lasted_ms = (now_s - failing_since_s) * 1_000
                _log.warning("broker %d is suspected to have crashed: %s, for %.0f ms", broker.id, reason, lasted_ms)
                self._troubles[broker.id] = self._troubles[broker.id]._replace(is_suspected=True)
                self._suspicions[broker.id] = _Suspicion(now_s, in_a_row + 1)
                self._suspect(broker.id, broker.epoch, f"{endpoint.host}:{endpoint.port}: {reason}")
                return
            await asyncio.sleep(min(RETRY_PAUSE_S * BACK_OFF**in_a_row, self._detection_s / 2))

    def _in_a_row(self, broker: Broker) -> int:
        """How many suspicions of this broker there have been since a connection to it stood, in whatever epoch of its
        own and of the controller's."""
        last = self._suspicions.get(broker.id)
        if last is None or self._clock.monotonic() - last.at_s > FORGOTTEN_S:
            return 0
        return min(last.in_a_row, MAX_IN_A_ROW)

    async def _was_cut_off(self) -> bool:
        """Perhaps it is this broker that could reach nobody; by now it can, and what it saw before counts no more."""
        asked_s = self._clock.monotonic()
        await self._in_touch()
        if self._clock.monotonic() - asked_s < PROMPT_S:
            return False
        self._troubles.clear()
        return True

    def _remembered(self, broker: Broker) -> _Trouble | None:
        """What the last watch of this epoch saw, if that was just now: who has removed a crashed controller, and then
        takes its office, need not find out again that it has crashed."""
        trouble = self._troubles.get(broker.id)
        if trouble is None or trouble.epoch != broker.epoch:
            return None
        return trouble if self._clock.monotonic() - trouble.seen_s < self._detection_s else None
