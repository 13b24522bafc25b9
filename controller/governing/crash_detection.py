"""Detection of a broker's crash within a fraction of a second (Kafka's ZooKeeper mode lacks it).

The problem: a killed process closes its sockets at once, but its ZooKeeper session lasts for seconds longer, and no new
leader is elected until it ends. A broken connection alone proves little: networks drop connections, and a wrong guess
costs a leader change.

The choice: one idle connection to each watched broker's control listener. When it ends, connect again;
`decisions.crashes` judges the outcome and has the rules of suspicion. The connection only proves who this broker is, so
that it keeps its place when strangers fill that listener. No answer is awaited: a watched broker may be busy, and one
with another secret still lives.

A host or a container whose address vanishes resets nothing, so the connection to it would stay open indefinitely. TCP
keepalive therefore probes every second, and ends the connection after two unanswered probes, long before the session.

A broker that finds others unreachable may itself be cut off. So it makes a ZooKeeper request before the first attempt
to reconnect, and after the last: unless both are answered promptly, the attempts in between do not count. Otherwise a
broker whose network has come back would depose a healthy controller.

To a listener with TLS, the handshake follows on the open connection, and what comes of it is no evidence of a crash: a
broker that completes it runs, and one that does not may have another certificate or be busy. After a handshake that
failed, the next connection stays silent, as without TLS, until the broker closes it for that.

A stopped process (SIGSTOP) keeps its connections, since its kernel answers for it. The session detects it.

Rejected: heartbeats on the connection. For a process that hangs they only repeat what the session does, and a busy
event loop would miss them; the kernel answers keepalive probes however busy the process is.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import cast

from minibroker.controller.background import start_in_background, stop_in_background
from minibroker.controller.decisions import crashes
from minibroker.controller.decisions.crashes import ConnectOutcome, Suspicion, UnreachableBroker
from minibroker.protocol.connections.broker_connections import SilentProof
from minibroker.protocol.connections.keepalive import OF_CRASH_DETECTION, keep_alive
from minibroker.protocol.connections.tls import TlsFailed, TlsNetwork
from minibroker.protocol.model import Endpoint, RegisteredBroker
from minibroker.protocol.world import Clock, Network

_log = logging.getLogger("minibroker.controller")

PROVEN_S = 0.1
"""Seconds after which a connection counts as one to the broker, not to a proxy that accepts in its place."""

PROMPT_S = 0.1
"""Seconds within which ZooKeeper must answer; a broker that waits longer may have been cut off."""

SuspicionListener = Callable[[int, int, str], None]
"""Broker id, broker epoch, reason."""


class _Watcher(asyncio.Protocol):
    """A connection that is idle after the proof. `lost` is done when it has ended."""

    def __init__(self, proof: SilentProof | None) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._proof = proof
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        keep_alive(transport, OF_CRASH_DETECTION)
        if self._proof is not None:
            self._transport.write(self._proof.hello())

    def data_received(self, data: bytes) -> None:
        if self._proof is not None and self._transport is not None:
            self._transport.write(self._proof.received(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class CrashDetector:
    """Watches the brokers given to `follow`, and calls the listeners of `on_suspicion`, once per watch, when it
    suspects one of them to have crashed. `in_touch` must return when ZooKeeper has answered a request. `proof_for`
    returns this broker's proof for another one, if brokers have any."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        detection_ms: int,
        in_touch: Callable[[], Awaitable[None]],
        tls_of: Callable[[Endpoint], TlsNetwork | None] = lambda endpoint: None,
        proof_for: Callable[[int], SilentProof | None] = lambda _: None,
    ) -> None:
        """`tls_of` returns what makes the handshake with an endpoint; None: it has no TLS."""
        self._network = network
        self._tls_of = tls_of
        self._silent_next: set[int] = set()
        """The brokers with which the last handshake failed."""
        self._clock = clock
        self._detection_s = detection_ms / 1_000
        self._in_touch = in_touch
        self._proof_for = proof_for
        self._listeners: list[SuspicionListener] = []
        self._troubles: dict[int, UnreachableBroker] = {}
        self._suspicions: dict[int, Suspicion] = {}
        self._watches: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def on_suspicion(self, listener: SuspicionListener) -> None:
        """Add a listener. Listeners are called in the order in which they were added."""
        self._listeners.append(listener)

    def follow(self, brokers: Iterable[RegisteredBroker]) -> None:
        """Watch exactly these brokers, in their present epochs."""
        wanted = {(broker.id, broker.epoch): broker for broker in brokers}
        for key in [key for key in self._watches if key not in wanted]:
            task = self._watches.pop(key)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key, broker in wanted.items():
            endpoint = broker.control_endpoint
            if key not in self._watches and endpoint is not None:
                name = f"crash detection of broker {broker.id}"
                self._watches[key] = start_in_background(self._watch(broker, endpoint), name)

    def facts(self, broker_id: int) -> Mapping[str, object]:
        """Return since when the broker has been unreachable, for the timeline; empty if the last attempt reached it."""
        trouble = self._troubles.get(broker_id)
        return {} if trouble is None else trouble.facts()

    async def probe(self, brokers: Sequence[RegisteredBroker]) -> list[int]:
        """Return the ids of the brokers that are not running: their control listener refuses connections, or they have
        been unreachable for `broker.crash.detection.ms`. Takes no longer than that. A broker that was reachable before
        and does not answer within that time is left to the watch."""
        gone = await asyncio.gather(*(self._is_gone(broker) for broker in brokers))
        return [broker.id for broker, is_gone in zip(brokers, gone, strict=True) if is_gone]

    async def close(self) -> None:
        self.follow(())
        await stop_in_background(list(self._ending))

    async def _is_gone(self, broker: RegisteredBroker) -> bool:
        endpoint = broker.control_endpoint
        if endpoint is None:
            return False
        trouble = self._remembered(broker)
        if trouble is not None and trouble.is_suspected:
            return True
        try:
            async with asyncio.timeout(crashes.probe_timeout_s(trouble, self._clock.monotonic(), self._detection_s)):
                for attempt in range(crashes.REFUSALS_NEEDED):
                    if attempt:
                        await asyncio.sleep(crashes.REFUSED_PAUSE_S)
                    try:
                        watcher = await self._network.connect(endpoint.host, endpoint.port, lambda: _Watcher(None))
                    except ConnectionRefusedError:
                        continue
                    watcher.close()
                    return False
        except TimeoutError:
            return trouble is not None
        except OSError:
            return False
        return True

    async def _watch(self, broker: RegisteredBroker, endpoint: Endpoint) -> None:
        suspicions = crashes.in_a_row(self._suspicions.get(broker.id), self._clock.monotonic())
        watched = crashes.begin(self._remembered(broker), suspicions)
        while True:
            if await self._was_cut_off():
                watched = watched.forgotten()
            timeout_s = crashes.connect_timeout_s(watched, self._clock.monotonic(), self._detection_s)
            attempt, reason = await self._look(broker, endpoint, timeout_s)
            now_s = self._clock.monotonic()
            watched, is_suspect, pause_s = crashes.decide(watched, attempt, now_s, self._detection_s)
            since_s = watched.since_s(now_s)
            self._troubles[broker.id] = UnreachableBroker(
                broker.epoch, since_s, now_s, watched.has_stood, lost_s=watched.lost_s
            )
            if not is_suspect:
                await asyncio.sleep(pause_s)
                continue
            # The watch of another broker may have noticed the cut meanwhile, and cleared the troubles of all brokers.
            if await self._was_cut_off() or broker.id not in self._troubles:
                _log.info("broker %d: %s, but ZooKeeper was slow to answer, too; looking again", broker.id, reason)
                watched = watched.forgotten()
                continue
            lasted_ms = (now_s - since_s) * 1_000
            _log.warning("broker %d is suspected to have crashed: %s, for %.0f ms", broker.id, reason, lasted_ms)
            self._troubles[broker.id] = self._troubles[broker.id]._replace(is_suspected=True)
            self._suspicions[broker.id] = Suspicion(now_s, watched.in_a_row + 1)
            for listener in self._listeners:
                listener(broker.id, broker.epoch, f"{endpoint.host}:{endpoint.port}: {reason}")
            return

    async def _look(self, broker: RegisteredBroker, endpoint: Endpoint, timeout_s: float) -> tuple[ConnectOutcome, str]:
        """Connect, and return the outcome with its description. If the attempt succeeds, wait until the connection has
        ended."""
        try:
            async with asyncio.timeout(timeout_s):
                proof = self._proof_for(broker.id) if self._tls_of(endpoint) is None else None
                watcher = await self._network.connect(endpoint.host, endpoint.port, lambda: _Watcher(proof))
        except ConnectionRefusedError:
            return ConnectOutcome.REFUSED, "it refuses connections"
        except (TimeoutError, OSError) as error:
            is_name_gone = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
            reason = f"it cannot be reached ({error.strerror or 'no answer'})"
            return ConnectOutcome.NAME_IS_GONE if is_name_gone else ConnectOutcome.NO_ANSWER, reason
        self._troubles.pop(broker.id, None)
        connected_s = self._clock.monotonic()
        is_proven = False
        try:
            secured = await self._secured(broker, endpoint, watcher)
            if secured is not None:
                is_proven, watcher = secured is not watcher, secured
                await watcher.lost
        finally:
            watcher.close()
            has_stood = self._clock.monotonic() - connected_s >= PROVEN_S
            if is_proven and not has_stood:  # perhaps it refuses this broker's certificate, which TLS 1.3 tells late
                self._silent_next.add(broker.id)
                has_stood = True
            if has_stood:  # also if the watch ends before the connection
                self._suspicions.pop(broker.id, None)
        if has_stood:
            _log.info("the connection to broker %d was lost; connecting again", broker.id)  # C1
        return ConnectOutcome.STOOD if has_stood else ConnectOutcome.CLOSED, "it accepts connections and closes them"

    async def _secured(self, broker: RegisteredBroker, endpoint: Endpoint, watcher: _Watcher) -> _Watcher | None:
        """Return the connection after the handshake, or as it is if there is none to make; None if it failed."""
        tls = self._tls_of(endpoint)
        if tls is None:
            return watcher
        if broker.id in self._silent_next:
            self._silent_next.discard(broker.id)
            return watcher
        try:
            return await tls.secure(watcher.transport, endpoint.host, lambda: _Watcher(self._proof_for(broker.id)))
        except TlsFailed as error:
            self._silent_next.add(broker.id)
            _log.warning("crash detection of broker %d at %s:%d: %s", broker.id, endpoint.host, endpoint.port, error)
            return None

    async def _was_cut_off(self) -> bool:
        """Return whether this broker itself may have been cut off; if so, earlier observations no longer count."""
        asked_s = self._clock.monotonic()
        await self._in_touch()
        if self._clock.monotonic() - asked_s < PROMPT_S:
            return False
        self._troubles.clear()
        return True

    def _remembered(self, broker: RegisteredBroker) -> UnreachableBroker | None:
        trouble = self._troubles.get(broker.id)
        return crashes.remembered(trouble, broker.epoch, self._clock.monotonic(), self._detection_s)
