"""Accepts the connections of a listener: applies the limits and distributes connections over the processors in turn.

If NEW_CONNECTIONS wait for a processor, the next one is tried. While they wait for all processors, no connection is
accepted: further ones wait in the operating system's queue, or are delayed for another turn of the loop.

A delayed connection has a timer, and nothing waits for it: neither this listener nor another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from minibroker.broker.network.connection_rates import ConnectionRates, RateOf, Stage
from minibroker.broker.network.metrics import NetworkMetrics, Summary
from minibroker.broker.network.processor import Processor
from minibroker.broker.network.quotas import ConnectionQuotas
from minibroker.protocol.connections.tls import TlsFailed
from minibroker.protocol.world import Incoming, Listener

logger = logging.getLogger("minibroker.network")

NEW_CONNECTIONS = 20
"""New connections that may wait for a processor (Kafka's ConnectionQueueSize), until the next turn of the loop.
TLS handshakes that have begun are not among them: silent clients must not keep others out."""

MOST_DELAYED = 1_000
"""Connections of a listener that may be delayed at a time. They hold file descriptors, and nothing else."""

HANDSHAKES_GRACE_S = 0.5
"""Seconds for handshakes that are in progress when a broker stops."""


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
        rates: ConnectionRates | None = None,
    ) -> None:
        """`rates`: None for a listener without rates of new connections.

        `room` returns why there is no room for another connection, regardless of the quotas, or None."""
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
        self._rates = rates
        self._counts = metrics.per_listener[name]
        self._delayed: dict[Incoming, asyncio.TimerHandle] = {}
        self._next_processor = 0
        self._handing_over: set[asyncio.Task[None]] = set()
        self._refusals = Summary(logger, name, "refused")
        self._failures = Summary(logger, name, "closed")

    def start(self) -> None:
        """Begin to accept connections."""
        self._is_started = True
        for processor in self.processors:
            processor.start()
        self.listener.start(self._on_connection, self._has_room)

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
        for incoming, turn in self._delayed.items():
            turn.cancel()
            incoming.close()
        self._delayed.clear()
        if self._handing_over:
            await asyncio.wait(self._handing_over, timeout=HANDSHAKES_GRACE_S)
        for task in self._handing_over:
            task.cancel()
        await asyncio.gather(*self._handing_over, return_exceptions=True)

    def _on_connection(self, incoming: Incoming) -> None:
        address = incoming.peer.rpartition(":")[0]
        stages = [] if self._rates is None else self._rates.stages(address.strip("[]"), self.name)
        self._wait_for_turns(incoming, address, stages)

    def _wait_for_turns(self, incoming: Incoming, address: str, stages: Sequence[Stage]) -> None:
        """Open the connection when it has had its turn at each rate."""
        now = self._clock()
        for position, stage in enumerate(stages, 1):
            assert self._rates is not None
            delay_s = self._rates.delay_s(stage, now)
            if delay_s is None:
                self._refuse(incoming, self._rates.why_refused(stage), now)
                return
            if delay_s > 0.0:
                self._delay(incoming, address, now, delay_s, stage, stages[position:])
                return
        self._open(incoming, address, now)

    def _delay(
        self, incoming: Incoming, address: str, now: float, delay_s: float, stage: Stage, then: Sequence[Stage]
    ) -> None:
        assert self._rates is not None
        full = f"{MOST_DELAYED} connections are delayed" if len(self._delayed) >= MOST_DELAYED else self._room()
        if full is not None:
            self._refuse(incoming, f"{self._rates.why_refused(stage)}, and {full}", now)
            return
        (self._counts.address_delays if stage.of is RateOf.ADDRESS else self._counts.delays).add(delay_s)

        def its_turn() -> None:
            if self._has_room():
                del self._delayed[incoming]
                self._wait_for_turns(incoming, address, then)
            else:
                self._delayed[incoming] = asyncio.get_running_loop().call_later(0, its_turn)

        self._delayed[incoming] = asyncio.get_running_loop().call_later(delay_s, its_turn)

    def _refuse(self, incoming: Incoming, reason: str, now: float) -> None:
        incoming.close()
        self._metrics.connections_refused += 1
        self._refusals.log(incoming.peer, reason, now)

    def _open(self, incoming: Incoming, address: str, now: float) -> None:
        refusal = self._quotas.try_open(address, self.name, now, self._room())
        if refusal is not None:
            if self._rates is not None:
                self._rates.give_back(self.name, now)
            self._refuse(incoming, refusal, now)
            return
        self._counts.accepted += 1
        processor = self._processor_in_turn()
        processor.new.add(incoming)
        task = asyncio.get_running_loop().create_task(
            self._hand_over(incoming, address, processor), name=f"accept {incoming.peer} on {self.name}"
        )
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)
        task.add_done_callback(lambda task: processor.new.discard(incoming))

    def _has_room(self) -> bool:
        return any(len(processor.new) < NEW_CONNECTIONS for processor in self.processors)

    def _processor_in_turn(self) -> Processor:
        """Return the next processor that has room."""
        while True:
            processor = self.processors[self._next_processor]
            self._next_processor = (self._next_processor + 1) % len(self.processors)
            if len(processor.new) < NEW_CONNECTIONS or not self._has_room():
                return processor

    async def _hand_over(self, incoming: Incoming, address: str, processor: Processor) -> None:
        entering = _Entering(address, self.name, asyncio.current_task())
        self._quotas.joined(entering)
        try:
            await processor.adopt(incoming, self._quotas, entering)
        except TlsFailed as error:
            self._metrics.handshakes_failed += 1
            self._failures.log(incoming.peer, str(error), self._clock())
        except OSError as error:
            logger.info("%s on listener %s disconnected before it was accepted: %s", incoming.peer, self.name, error)
        finally:
            self._quotas.left(entering)


class _Entering:
    """A connection in the middle of its TLS handshake, as the quotas see it."""

    idle_since = None

    def __init__(self, address: str, listener: str, handing_over: asyncio.Task[None] | None) -> None:
        self.address = address
        self.listener = listener
        self._handing_over = handing_over

    def give_way(self, reason: str) -> None:
        if self._handing_over is not None:
            self._handing_over.cancel()
