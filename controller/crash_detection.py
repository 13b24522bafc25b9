"""Telling within a fraction of a second that a broker's process has died (what Kafka's ZooKeeper mode lacks).

The problem: a killed process closes its sockets at once, but its ZooKeeper session lives on for seconds, and until it
ends nobody elects a new leader. A connection that breaks proves little by itself, though: networks drop connections,
and a wrong guess costs a leader change.

The choice: one idle connection to each watched broker's control listener. When it ends, connect again. **Refused**,
twice, means that the host is there and no process listens on the port: the process is gone, as surely as anything
can be known from outside, so suspect it at once. Everything else (no answer, no route, the name is gone, accepted and
closed again, as a container's port proxy does) may be the network, so it must last for
`broker.crash.detection.ms`. A suspicion is only that: it deletes a znode, which the suspect, if it lives, creates
again under a new broker epoch. Each broker epoch is suspected once. A process that was stopped (SIGSTOP) keeps its
connections: that is the session's to find.

Rejected: heartbeats on the connection (they only repeat, at a cost, what the session does for the cases where no
connection closes, and a busy event loop would miss them).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from controller.background import start_in_background, stop_in_background
from controller.requests import control_endpoint
from protocol.model import Broker, Endpoint
from protocol.world import Clock, Network

_log = logging.getLogger("minibroker.controller")

REFUSALS_NEEDED = 2
RETRY_PAUSE_S = 0.02
PROVEN_S = 0.1
"""A connection that lived so long was one to the broker, not to something that accepts in its place."""

Suspect = Callable[[int, int, str], None]
"""Broker id, broker epoch, reason."""


class _Watcher(asyncio.Protocol):
    """A connection on which nothing is said. `lost` is done when it has ended."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class CrashDetector:
    """Watches the brokers given to `follow`, and calls `suspect` for those that it takes for crashed."""

    def __init__(self, network: Network, clock: Clock, detection_ms: int, suspect: Suspect) -> None:
        self._network = network
        self._clock = clock
        self._detection_s = detection_ms / 1_000
        self._suspect = suspect
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
        """The ids of those that are certainly not running: their control listener refuses. Takes at most
        `broker.crash.detection.ms`; who cannot be reached at all within that time is left to the watch."""
        gone = await asyncio.gather(*(self._refuses(broker) for broker in brokers))
        return [broker.id for broker, refuses in zip(brokers, gone, strict=True) if refuses]

    async def close(self) -> None:
        self.follow(())
        await stop_in_background(list(self._ending))

    async def _refuses(self, broker: Broker) -> bool:
        endpoint = control_endpoint(broker)
        if endpoint is None:
            return False
        try:
            async with asyncio.timeout(self._detection_s):
                for attempt in range(REFUSALS_NEEDED):
                    if attempt:
                        await asyncio.sleep(RETRY_PAUSE_S)
                    try:
                        watcher = await self._network.connect(endpoint.host, endpoint.port, _Watcher)
                    except ConnectionRefusedError:
                        continue
                    watcher.close()
                    return False
        except (TimeoutError, OSError, UnicodeError):
            return False
        return True

    async def _watch(self, broker: Broker, endpoint: Endpoint) -> None:
        failing_since_s: float | None = None
        refusals = 0
        while True:
            now_s = self._clock.monotonic()
            deadline_s = (now_s if failing_since_s is None else failing_since_s) + self._detection_s
            try:
                async with asyncio.timeout(max(deadline_s - now_s, RETRY_PAUSE_S)):
                    watcher = await self._network.connect(endpoint.host, endpoint.port, _Watcher)
            except ConnectionRefusedError:
                refusals += 1
                reason = "it refuses connections"
            except (TimeoutError, OSError, UnicodeError) as error:
                refusals = 0
                reason = f"it cannot be reached ({error or 'no answer'})"
            else:
                refusals = 0
                connected_s = self._clock.monotonic()
                try:
                    await watcher.lost
                finally:
                    watcher.close()
                reason = "it accepts connections and closes them"
                if self._clock.monotonic() - connected_s >= PROVEN_S:
                    failing_since_s = None
                    # label C1: see ARCHITECTURE.md, "A broker crash"
                    _log.info("the connection to broker %d was lost; connecting again", broker.id)
            now_s = self._clock.monotonic()
            if failing_since_s is None:
                failing_since_s = now_s
            if refusals >= REFUSALS_NEEDED or now_s - failing_since_s >= self._detection_s:
                lasted_ms = (now_s - failing_since_s) * 1_000
                _log.warning("broker %d is suspected to have crashed: %s, for %.0f ms", broker.id, reason, lasted_ms)
                self._suspect(broker.id, broker.epoch, f"{endpoint.host}:{endpoint.port}: {reason}")
                return
            await asyncio.sleep(RETRY_PAUSE_S)
