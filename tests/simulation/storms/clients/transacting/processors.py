"""Processors of one group: they read what transactors write, and produce a result for each record, exactly once.

In the end each committed record of the transactors' topic has one committed result, whatever became of the members.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from random import Random

from minibroker.client.admin import Admin
from minibroker.client.errors import ProducerFenced
from minibroker.client.fetching.records import Record
from minibroker.client.processing.results import ProducerRecord
from minibroker.client.processor import Processor
from minibroker.deploy.simulator.kafka_clients import READ_COMMITTED, READ_UNCOMMITTED, KafkaConsumer
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.transacting.kafka_transactions import RAISING
from tests.simulation.storms.clients.transacting.transactors import TOPIC
from tests.simulation.storms.clients.workload import Guests
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.security import TWIN, Right, may_join, may_read, may_use, may_write
from tests.simulation.storms.verdicts.history import Anomaly

RESULTS = "results"
GROUP = "processors"

_RETRY_S = 0.3
_SESSION_TIMEOUT_MS = 3_000


class Processors(Guests):
    """The processors of a storm, `Guests` of the workload."""

    def __init__(self, storm: Ground, dice: Random, count: int) -> None:
        super().__init__(storm.cluster)
        self._storm = storm
        self._most_records = dice.choice([1, 10, 100])
        self._timeout_ms = dice.choice([2_000, 6_000, 20_000])
        self._slow_s = dice.choice([0.0, 0.02, 0.5])
        self._names = [f"processor-{number}" for number in range(count)]
        self.partitions = [TopicPartition(RESULTS, number) for number in range(dice.randint(1, 2))] if count else []
        self._inputs: Counter[bytes] = Counter()
        self._results: Counter[bytes] = Counter()
        self._is_forgiven = False

    def stay_away(self) -> None:
        self._names.clear()
        self.partitions.clear()

    @property
    def names(self) -> list[str]:
        return self._names

    def rights(self, name: str) -> list[Right]:
        return [*may_read(TOPIC), *may_write(RESULTS), *may_join(GROUP), *may_use(f"id-of-{name}")]

    def _run(self, name: str, world: VirtualWorld) -> None:
        world.process.start(self._live(name, name, world), name)

    def start_twin(self, name: str) -> VirtualWorld:
        """Start another instance of a processor on another host. It lives until it is fenced."""
        twin = f"{name}{TWIN}"
        world = self._new_process(twin)
        world.process.start(self._live(name, twin, world, instances=1), twin)
        return world

    async def _live(self, name: str, host: str, world: VirtualWorld, instances: int | None = None) -> None:
        for number in itertools.count(1) if instances is None else range(1, instances + 1):
            with self._storm.client_errors(f"{host}#{self._starts[host]}.{number}"):
                try:
                    async with self._processor(name, world) as processor:
                        await processor.run()
                except ProducerFenced:
                    self._storm.event("processor: fenced")
                    raise
            await asyncio.sleep(_RETRY_S + world.random.choice([0.0, 0.0, 5.0]) * world.random.random())

    def _processor(self, name: str, world: World) -> Processor:
        return Processor(
            self._cluster.bootstrap,
            process=self._process,
            group=GROUP,
            topics=[TOPIC],
            transactional_id=f"id-of-{name}",
            max_poll_records=self._most_records,
            transaction_timeout_ms=self._timeout_ms,
            request_timeout_ms=3_000,
            consumer_settings={
                "session_timeout_ms": _SESSION_TIMEOUT_MS,
                "heartbeat_interval_ms": _SESSION_TIMEOUT_MS / 5,
                "fetch_max_wait_ms": 100,
            },
            producer_settings={"max_block_ms": 10_000, "delivery_timeout_ms": 10_000},
            world=world,
        )

    async def _process(self, records: list[Record]) -> list[ProducerRecord]:
        await asyncio.sleep(self._slow_s * self._storm.simulation.loop.random.random())
        return [
            ProducerRecord(RESULTS, _label(r.partition, r.offset), partition=r.offset % len(self.partitions))
            for r in records
        ]

    # -- what the storm asks --

    async def create_topic(self, admin: Admin, replication_factor: int) -> None:
        if self.partitions:
            await admin.create_topic(RESULTS, partitions=len(self.partitions), replication_factor=replication_factor)

    async def finish(self, inputs: dict[TopicPartition, dict[int, bytes]], within_s: float) -> None:
        """After healing, and when no more inputs come, wait for all results. Then end the processors, and read all
        results again once their transactions have ended. Accuse what is late."""
        if not self.partitions or self._is_forgiven:  # a transaction that the coordinator has lost stays open
            for process in self._processes.values():
                process.kill()
            return
        self._slow_s = 0.0  # a slow processor may have many inputs left
        self._inputs = Counter(_label(p.partition, offset) for p, values in inputs.items() for offset in values)
        world = self._cluster.client("results-reader")
        try:
            async with asyncio.timeout(3 * within_s):
                await world.process.run(self._finish(world, within_s))
        except (MinibrokerError, TimeoutError) as error:
            self._storm.accuse(Anomaly("not live", f"not in time after healing: the results of processors: {error!r}"))
        world.process.kill()

    async def _finish(self, world: World, within_s: float) -> None:
        fewest, until_s = len(self._inputs) + 1, self._storm.now_s + within_s
        while (missing := len(self._inputs - await self._read(READ_COMMITTED, world))) and self._storm.now_s < until_s:
            if missing < fewest:  # slow processors may have many inputs left, so progress counts
                fewest, until_s = missing, self._storm.now_s + within_s
            await asyncio.sleep(1)
        if missing:
            text = f"{missing} of {len(self._inputs)} inputs have no result, and none got one for {within_s:g} s"
            self._storm.accuse(Anomaly("not live", text))
        for process in self._processes.values():
            process.kill()
        until_s = self._storm.now_s + within_s
        while (stable := await self._ends(READ_COMMITTED, world)) != (
            ends := await self._ends(READ_UNCOMMITTED, world)
        ):
            if self._storm.now_s > until_s:
                self._storm.accuse(Anomaly("last stable offset stands still", f"{stable}, ends are {ends}"))
                break
            await asyncio.sleep(0.5)
        self._results = await self._read(READ_COMMITTED, world)

    async def _ends(self, isolation_level: int, world: World) -> dict[TopicPartition, int]:
        async with self._consumer(isolation_level, world) as consumer:
            return await consumer.ends(self.partitions)

    async def _read(self, isolation_level: int, world: World) -> Counter[bytes]:
        results: Counter[bytes] = Counter()
        async with self._consumer(isolation_level, world) as consumer:
            ends = await consumer.ends(self.partitions)
            while any(consumer.position(partition) < end for partition, end in ends.items()):
                for batch in await consumer.poll():
                    results.update(value or b"" for value in batch.values)
        return results

    def _consumer(self, isolation_level: int, world: World) -> KafkaConsumer:
        return KafkaConsumer(
            self._cluster.bootstrap,
            partitions=self.partitions,
            versions=RAISING[0].data,
            world=world,
            limits=[1_048_576],
            isolation_level=isolation_level,
            fetch_max_wait_ms=10,
        )

    def forgive(self) -> None:
        """Allow the loss of records, of offsets and of the states of transactions."""
        self._is_forgiven = True

    def judge(self) -> Iterator[Anomaly]:
        if self._is_forgiven:
            return
        for label, times in self._results.items():
            if times > 1:
                yield Anomaly("processed twice", f"the input {label.decode()} has {times} results of processors")
            if label not in self._inputs:
                yield Anomaly("phantom", f"a processor has a result for {label.decode()}, which is no input")
        for label in self._inputs - self._results:
            yield Anomaly("lost input", f"the input {label.decode()} has no result of processors")


def _label(partition: int, offset: int) -> bytes:
    return b"%d/%d" % (partition, offset)
