"""Accepts the connections of a listener: applies the limits and distributes connections over the processors in turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.processor import Processor
from minibroker.broker.network.quotas import ConnectionQuotas
from minibroker.protocol.world import Incoming, Listener

logger = logging.getLogger("minibroker.network")

REFUSALS_LOG_INTERVAL_S = 1.0


class Acceptor:
    def __init__(
        self,
        name: str,
        listener: Listener,
        processors: Sequence[Processor],
        quotas: ConnectionQuotas,
        metrics: NetworkMetrics,
        clock: Callable[[], float],
        room: Callable[[], str | None],
    ) -> None:
        """`room` returns why there is no room for another connection, regardless of the quotas, or None."""
        self.name = name
        self.listener = listener
        self.processors = list(processors)
        """The processors that receive new connections."""
        self._retired: list[Processor] = []
        self._is_started = False
        self._quotas = quotas
        self._metrics = metrics
        self._clock = clock
        self._room = room
        self._next_processor = 0
        self._handing_over: set[asyncio.Task[None]] = set()
        self._refused_since_log = 0
        self._log_refusals_after = 0.0

    def start(self) -> None:
        """Begin to accept connections."""
        self._is_started = True
        for processor in self.processors:
            processor.start()
        self.listener.start(self._on_connection)

    @property
    def all_processors(self) -> list[Processor]:
        """All processors, including those that only serve their existing connections."""
        return self.processors + self._retired

    def resize(self, count: int, make: Callable[[], Processor]) -> None:
        """Change the number of processors that receive new connections."""
        while len(self.processors) > count:
            self._retired.append(self.processors.pop())
        while len(self.processors) < count:
            if self._retired:
                self.processors.append(self._retired.pop())
                continue
            self.processors.append(make())
            if self._is_started:
                self.processors[-1].start()
        self._next_processor %= count

    async def close(self) -> None:
        """Stop accepting, and wait until each accepted connection belongs to its processor."""
        await self.listener.close()
        await asyncio.gather(*self._handing_over)

    def _on_connection(self, incoming: Incoming) -> None:
        now = self._clock()
        address = incoming.peer.rpartition(":")[0]
        refusal = self._room() or self._quotas.try_open(address, now)
        if refusal is not None:
            incoming.close()
            self._log_refusal(incoming.peer, refusal, now)
            return
        processor = self.processors[self._next_processor]
        self._next_processor = (self._next_processor + 1) % len(self.processors)
        task = asyncio.get_running_loop().create_task(
            self._hand_over(incoming, address, processor), name=f"accept {incoming.peer} on {self.name}"
        )
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    async def _hand_over(self, incoming: Incoming, address: str, processor: Processor) -> None:
        try:
            await processor.adopt(incoming, lambda: self._quotas.close(address))
        except OSError as error:
            self._quotas.close(address)
            logger.info("%s on listener %s disconnected before it was accepted: %s", incoming.peer, self.name, error)

    def _log_refusal(self, peer: str, reason: str, now: float) -> None:
        """Log refusals at most once per second, so that a flood of connections does not flood the log."""
        self._metrics.connections_refused += 1
        self._refused_since_log += 1
        if now < self._log_refusals_after:
            return
        logger.warning(
            "listener %s refused %d connections, the last of them from %s: %s",
            self.name,
            self._refused_since_log,
            peer,
            reason,
        )
        self._refused_since_log = 0
        self._log_refusals_after = now + REFUSALS_LOG_INTERVAL_S
