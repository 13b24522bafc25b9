"""Topics that are repeatedly deleted and re-created under one name while they are written and read.

Each incarnation is another topic, with its own partitions, replicas and promises. Everything that belongs to the old
one (files, queued writes, clients' caches and sequence numbers) must not reach the new one. Producers and consumers
outlive re-creations, and their histories are judged by incarnation (`incarnations.py`).

During bouts an administrator deletes each topic and creates it again, at once or some time later, among the other
faults. Some ambushes wait for the moment at which ZooKeeper has queued the deletion, has removed the topic, or has the
new one (`rebirth_ambushes`). After healing, the topics must exist and work for the same clients.

The random decisions of this module are independent, so that the rest of a storm does not depend on them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, Literal, NamedTuple

from minibroker.broker.replication.partition import Partition
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, CorruptBatch
from minibroker.client.producer import Producer
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.records import BatchHeader, decode_batch
from minibroker.protocol.world import Create, Delete, Operation, SetData, World
from tests.simulation.simulator.ownership import ProcessKilled
from tests.simulation.simulator.process import Process
from tests.simulation.simulator.world import VirtualWorld
from tests.simulation.storms.ambush import Ambushes
from tests.simulation.storms.clients.indirect_admin import IndirectAdmin
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition
from tests.simulation.storms.verdicts.incarnations import (
    Acknowledged,
    AdminCall,
    Incarnation,
    Lives,
    Polled,
    Sent,
    check,
    has_read_all,
)

MOST_PARTITIONS = 4
KEYS = 8

END_GRACE_S = 3.0
"""Seconds by which a delivery may exceed its timeout."""

_RETRY_S = 0.3

LATE_ISR_WRITE = "an ISR write held up"
SLOW_CONSUMERS = "consumers in the middle of a batch"
POLL_S = 0.001
_MOMENT_S = 25.0
"""Seconds for which an ambush waits for its moment."""

Moment = Literal["deletion queued", "gone", "created"]

Ambush = Callable[["Rebirth", str, asyncio.Event], Coroutine[Any, Any, None]]
"""A fault at a moment of a re-creation of the topic. It sets the event as soon as the deletion may be requested."""


@dataclass(frozen=True)
class _Producing:
    topic: str
    chooses: Literal["number", "key", "neither"]
    """The way in which a record's partition is determined."""
    records_per_s: float
    burst: int
    linger_ms: int
    batch_size: int
    delivery_timeout_ms: int
    request_timeout_ms: int


@dataclass(frozen=True)
class _Consuming:
    topic: str
    is_by_topic: bool
    is_by_record: bool
    iterates_on: bool
    """Whether it continues with the same consumer after an error."""


class _Wish(NamedTuple):
    """The partitions, replicas and settings of the next incarnation."""

    partitions: int
    replication_factor: int
    configs: Mapping[str, str]
    assignments: Sequence[Sequence[int]] | None


class Rebirth:
    """The re-created topics of a storm and their clients."""

    def __init__(self, storm: Ground, dice: Random, ambushes: Mapping[str, Ambush]) -> None:
        self.storm = storm
        self._cluster = storm.cluster
        self._most_replicas = min(3, len(storm.cluster.broker_ids))
        self.dice = dice
        self._ambushes = ambushes
        [count] = dice.choices([0, 1, 2], [2, 15, 3])
        self.topics = [f"reborn-{number}" for number in range(count)]
        self.lives = Lives()
        self.acknowledged_ends: dict[TopicIdPartition, int] = {}
        self._moments: Ambushes[tuple[str, Moment, Incarnation]] = Ambushes()
        self._processes: dict[str, Process] = {}
        self._starts: dict[str, int] = {}
        self._producers: dict[str, _Producing] = {}
        self._producing: dict[str, asyncio.Task[None]] = {}
        self._consumers: dict[str, _Consuming] = {}
        self.wished_leader: dict[str, int] = {}
        """The broker that an ambush wants as the leader of the next incarnation, by topic."""
        self.wished_assignment: dict[str, Sequence[Sequence[int]]] = {}
        self.quiet: set[str] = set()
        """Topics to which producers send nothing at the moment."""
        self.slow: set[str] = set()
        """Topics whose consumers process one record and read no other at the moment."""
        self._last_notes: dict[str, str] = {}
        self._is_complete = False
        self._is_probing = False
        self._probed: dict[str, str] = {}
        """The last problem of each producer that has not finished its final probes."""

    # -- writes to ZooKeeper --

    def written(self, operations: Sequence[Operation]) -> None:
        """Follow a write that ZooKeeper has just carried out."""
        for operation in operations:
            for topic in self.topics:
                path = operation.path
                if isinstance(operation, Create) and path == znodes.topic_path(topic):
                    self._was_created(topic, operation.data, operations)
                elif isinstance(operation, Create) and path == znodes.delete_topic_path(topic):
                    self._was_queued(topic)
                elif isinstance(operation, Delete) and path == znodes.topic_path(topic):
                    self.lives.incarnations[topic][-1].gone_at_s = self.storm.now_s
                    self._happened(topic, "gone")
                elif path.startswith(f"{znodes.topic_path(topic)}/") and path.endswith("/state"):
                    partition = TopicPartition(topic, int(path.split("/")[-2]))
                    if isinstance(operation, Create):
                        state = znodes.decode_state(partition, operation.data, 0)
                        self.storm.leadership[path] = (partition, state)
                    elif isinstance(operation, Delete):
                        self.storm.leadership.pop(path, None)

    def _was_created(self, topic: str, data: bytes, operations: Sequence[Operation]) -> None:
        znode = znodes.decode_topic(topic, data)
        config: Mapping[str, str] = {}
        for operation in operations:
            if isinstance(operation, Create | SetData) and operation.path == znodes.topic_config_path(topic):
                config = znodes.decode_config(operation.path, operation.data)
        factor = len(znode.partitions[0])
        born = Incarnation(
            topic,
            znode.topic_id,
            znode.partitions,
            int(config.get("min.insync.replicas", 2 if factor >= 3 else 1)),
            config.get("unclean.leader.election.enable") == "true",
            self.storm.now_s,
            has_own_min_insync_replicas="min.insync.replicas" in config,
        )
        earlier = self.lives.incarnations[topic]
        if earlier:
            change = len(born.assignment) - len(earlier[-1].assignment)
            size = "fewer partitions" if change < 0 else "more partitions" if change else "as many partitions"
            kinds = [size, f"{factor} replicas", f"min ISR {born.min_insync_replicas}"]
            kinds += ["unclean elections"] * born.has_unclean_elections
            for kind in kinds:
                self.storm.event(f"re-created with {kind}")
        earlier.append(born)
        self.storm.note(f"{born} is there: {dict(born.assignment)}, min ISR {born.min_insync_replicas}, {config}")
        self._happened(topic, "created")

    def _was_queued(self, topic: str) -> None:
        current = self.lives.current(topic)
        if current is not None:
            self.storm.look()  # records its content before the deletion
            current.queued_at_s = self.storm.now_s
            self.storm.note(f"{current} is to be deleted")
            self._happened(topic, "deletion queued")

    def _happened(self, topic: str, moment: Moment) -> None:
        # This runs in the broker whose request it is. An ambush acts only when its own task resumes.
        self._moments.strike((topic, moment, self.lives.incarnations[topic][-1]))

    async def moment(self, topic: str, moment: Moment) -> Incarnation | None:
        """Return the topic's incarnation at this moment; None if the moment does not come in time."""
        happened = await self._moments.next(_MOMENT_S, lambda event: event[:2] == (topic, moment))
        return None if happened is None else happened[2]

    # -- invariants --

    def committed(self, identified: TopicIdPartition, header: BatchHeader, records: bytes, start: int) -> None:
        """Record a batch that was seen below a high watermark. A batch that arrives late from a dropped connection,
        when the consumers are gone, does not count."""
        if identified.topic_partition.topic in self.topics and not self._is_complete:
            batch = decode_batch(records, header, start)
            values = (value or b"" for value in batch.values)
            self.lives.committed[identified].update(zip(batch.offsets, values, strict=True))

    def look(self, *, is_harmed: bool) -> tuple[dict[TopicIdPartition, int], set[str]]:
        """Return the acknowledged ends of topics that may lose nothing, and the ids of topics that may."""
        lossy = set()
        for topic in self.topics:
            incarnations = self.lives.incarnations[topic]
            if incarnations and is_harmed and incarnations[-1].is_weak:
                incarnations[-1].was_harmed = True
            lossy |= {incarnation.topic_id for incarnation in incarnations if incarnation.may_lose}
        ends = {}
        for partition, current, assigned in self.replicas():
            identified = TopicIdPartition(current.topic_id, partition)
            for broker_id in assigned:
                replica = self.replica(broker_id, current, partition)
                if replica is None or not replica.is_leader:
                    continue
                found, expected = replica.min_insync_replicas, current.min_insync_replicas
                if found < expected or (current.has_own_min_insync_replicas and found > expected):
                    self.storm.accuse(
                        Anomaly(
                            "other settings than the topic's",
                            f"{partition} of {current} on broker {broker_id}: min.insync.replicas is {found}, and was "
                            f"set to {expected}",
                        )
                    )
            if not current.may_lose and identified in self.acknowledged_ends:
                ends[identified] = self.acknowledged_ends[identified]
        return ends, lossy

    def power_lost(self) -> None:
        """Allow the current topics to lose records, since no broker is known to be complete."""
        for topic in self.topics:
            if (current := self.lives.current(topic)) is not None:
                current.was_harmed = True

    def partitions(self) -> list[TopicPartition]:
        """Return the partitions that exist and whose topic is not being deleted."""
        return [
            partition
            for topic in self.topics
            if (current := self.lives.current(topic)) is not None
            for partition in current.partitions
            if self.storm.simulation.zookeeper.has(znodes.state_path(partition))
        ]

    def replicas(self) -> list[tuple[TopicPartition, Incarnation, tuple[int, ...]]]:
        """Return each of `partitions` with its incarnation and its assigned brokers."""
        found = []
        for partition in self.partitions():
            current = self.lives.current(partition.topic)
            assert current is not None
            found.append((partition, current, current.assignment[partition.partition]))
        return found

    def has_caught_up(self, broker_id: int) -> bool:
        """Return whether the broker is in sync and complete in every partition assigned to it."""
        for partition, current, assigned in self.replicas():
            if broker_id not in assigned:
                continue
            replica = self.replica(broker_id, current, partition)
            if replica is None or not self.storm.is_in_sync(broker_id, partition):
                return False
            end = self.acknowledged_ends.get(TopicIdPartition(current.topic_id, partition), 0)
            if replica.high_watermark < end and not current.may_lose:
                return False
        return True

    def replica(self, broker_id: int, incarnation: Incarnation, partition: TopicPartition) -> Partition | None:
        """Return a living broker's replica of this incarnation, if it has one."""
        replica = self.storm.replica(broker_id, partition)
        return replica if replica is not None and replica.log.topic_id == incarnation.topic_id else None

    def is_whole(self) -> bool:
        """Return whether no deletion is pending and all existing topics have leaders and all replicas in sync."""
        if self.storm.simulation.zookeeper.names(znodes.DELETE_TOPICS):
            return False
        there = self.partitions()
        for topic in self.topics:
            current = self.lives.current(topic)
            if current is not None and not set(current.partitions) <= set(there):
                return False
        return all(
            state.leader != NO_LEADER and len(state.isr) == len(assigned)
            for partition, _, assigned in self.replicas()
            for state in [self._cluster.state(partition)]
        )

    def condition(self) -> str:
        zookeeper = self.storm.simulation.zookeeper
        states = [f"{partition} {self._cluster.state(partition)}" for partition in self.partitions()]
        return f"deletions under way: {zookeeper.names(znodes.DELETE_TOPICS)}; {'; '.join(states)}"

    # -- the course of a storm --

    async def begin(self) -> None:
        """Create the first incarnations and start their clients."""
        dice = self.dice
        for topic in self.topics:
            least = min(dice.choice([1, 2, 2, 3]), self._most_replicas)
            wish = _Wish(dice.randint(1, 4), self._most_replicas, {"min.insync.replicas": str(least)}, None)
            admin = self._cluster.client(f"admin-{topic}")
            await self._create(topic, admin, wish)
            admin.process.kill()
            for number in range(dice.choice([1, 1, 2])):
                self._producers[f"{topic}-producer-{number}"] = _Producing(
                    topic=topic,
                    chooses=dice.choice(["number", "key", "neither"]),
                    records_per_s=dice.choice([1, 3, 6]),
                    burst=dice.choice([1, 4, 4, 10]),
                    linger_ms=dice.choice([0, 0, 5, 100]),
                    batch_size=dice.choice([100, 300, 16_384]),
                    delivery_timeout_ms=dice.choice([4_000, 8_000, 20_000]),
                    request_timeout_ms=dice.choice([500, 1_000, 5_000]),
                )
            for number in range(dice.choice([1, 1, 2])):
                self._consumers[f"{topic}-consumer-{number}"] = _Consuming(
                    topic=topic,
                    is_by_topic=dice.random() < 0.7,
                    is_by_record=dice.random() < 0.6,
                    iterates_on=dice.random() < 0.5,
                )
        for name in [*self._producers, *self._consumers]:
            self._start(name)
        self.storm.workload.guests.append(self)

    def bout(self, end_s: float) -> None:
        """Re-create the topics until then, or until everything is healed."""
        for topic in self.topics:
            self.storm.begin(self._live(topic, end_s), f"life of {topic}")

    async def recover(self) -> list[str]:
        """After healing, check that the topics exist and work for clients that knew the old ones, and end the clients.
        Return what did not happen in time."""
        missing = []
        doing = ""
        try:
            for topic in self.topics:
                doing = f"the creation of {topic}"
                async with asyncio.timeout(60):
                    await self._ensure(topic)
            doing = "metadata of every broker that agrees with ZooKeeper"
            await self._cluster.until(lambda: self.is_whole() and self._metadata_agrees(), within_s=60)
            self._probed = dict.fromkeys(self._producers, "it has not begun")
            self._is_probing = True
            try:
                await self._cluster.until(lambda: not self._probed, within_s=60)
            except TimeoutError:
                missing += [f"acknowledgements for {name}: {why}" for name, why in self._probed.items()]
            self._probed = {}
            doing = "the end of all deliveries"
            await self._cluster.until(lambda: all(task.done() for task in self._producing.values()), within_s=60)
            doing = "equal log ends"
            await self._cluster.until(self._is_settled, within_s=60)
            doing = "the final read"
            async with asyncio.timeout(60):
                reader = self._cluster.client("rebirth-reader")
                await reader.process.run(self._read_everything(reader))
            with suppress(TimeoutError):  # the verdict names the records that they have not read
                await self._cluster.until(self._is_read, within_s=60)
            for name, settings in self._consumers.items():
                self.lives.readers[self._identity(name)] = self._read_by(settings)
                self._processes[name].kill()
            self._is_complete = True
        except TimeoutError:
            missing.append(f"{doing} of topics that come back: {self.condition()}")
        return missing

    def judge(self) -> list[Anomaly]:
        """Return the anomalies of the clients' history, if it is complete."""
        if not self._is_complete:
            return []
        if self.lives.legal_losses():
            self.storm.event("legal losses of a topic that came back")
        return check(self.lives)

    # -- the life of a topic --

    async def _live(self, topic: str, end_s: float) -> None:
        dice = self.dice
        while True:
            await asyncio.sleep(dice.choice([0.3, 2.0, 6.0]) * dice.uniform(0.5, 1.5))
            if self.storm.now_s >= end_s:
                return
            kinds = [*sorted(self._ambushes), LATE_ISR_WRITE, LATE_ISR_WRITE, SLOW_CONSUMERS, SLOW_CONSUMERS]
            ambushes = list(dict.fromkeys(dice.sample(kinds, dice.choice([0, 1, 1, 2]))))
            admin = self._cluster.client(f"admin-{topic}")
            self.wished_leader.pop(topic, None)
            self.wished_assignment.pop(topic, None)
            try:
                if LATE_ISR_WRITE in ambushes:
                    # The write names a version, which begins at 0: this topic must be as new as the next one.
                    await self._delete(topic, admin)
                    await self._create(
                        topic,
                        admin,
                        self._wish(topic)._replace(
                            replication_factor=self._most_replicas, assignments=None, configs={}
                        ),
                    )
                for kind in ambushes:
                    is_laid = asyncio.Event()
                    self.storm.begin(self._ambushes[kind](self, topic, is_laid), f"ambush of {topic}: {kind}")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(20):
                            await is_laid.wait()
                await self._delete(topic, admin)
                if dice.random() < 0.5:
                    await asyncio.sleep(dice.uniform(0, 5))
                    how = "some time later"
                else:
                    how = "at once"
                if await self._create(topic, admin):
                    self.storm.event(f"re-created {how}")
            finally:
                admin.process.kill()

    async def _delete(self, topic: str, admin: VirtualWorld) -> None:
        """Delete the topic. Return once the deletion is queued."""
        while self.lives.current(topic) is not None:
            await self._call("delete", topic, admin)
            await asyncio.sleep(0.1)

    async def _create(self, topic: str, admin: VirtualWorld, wish: _Wish | None = None) -> bool:
        """Create the topic, and retry for a while. Return whether it exists."""
        patience_s = self.storm.now_s + 30
        while self.lives.current(topic) is None and self.storm.now_s < patience_s:
            await self._call("create", topic, admin, wish or self._wish(topic))
            await asyncio.sleep(self.dice.choice([0.02, 0.2, 0.5]))
        return self.lives.current(topic) is not None

    async def _ensure(self, topic: str) -> None:
        """Create the topic if it does not exist, which nothing may prevent after healing."""
        admin = self._cluster.client(f"admin-{topic}")
        while self.lives.current(topic) is None:
            wish = self._wish(topic)
            await self._call(
                "create",
                topic,
                admin,
                wish._replace(replication_factor=self._most_replicas, assignments=None, configs={}),
            )
            await asyncio.sleep(0.2)
        admin.process.kill()

    async def _call(
        self, kind: Literal["create", "delete"], topic: str, admin: VirtualWorld, wish: _Wish | None = None
    ) -> None:
        began_s, ended_s, is_acknowledged = self.storm.now_s, inf, False
        patience_ms = self.dice.choice([1_000, 5_000, 30_000])
        is_indirect = self.dice.random() < 0.3
        if is_indirect:
            self.storm.event("topic changed by another broker than the controller")

        async def call() -> None:
            async with (IndirectAdmin if is_indirect else Admin)(
                self._cluster.bootstrap, request_timeout_ms=patience_ms, default_api_timeout_ms=10_000, world=admin
            ) as client:
                if wish is None:
                    await client.delete_topic(topic)
                elif wish.assignments is not None:
                    await client.create_topic(topic, configs=wish.configs, assignments=wish.assignments)
                else:
                    await client.create_topic(
                        topic,
                        partitions=wish.partitions,
                        replication_factor=wish.replication_factor,
                        configs=wish.configs,
                    )

        try:
            await admin.process.run(call(), f"{kind} {topic}")
            ended_s, is_acknowledged = self.storm.now_s, True
        except ClientCrashed as error:
            self.storm.workload.unexpected.append(f"admin of {topic}: {error!r} {error.__cause__!r}")
        except (MinibrokerError, ProcessKilled) as error:
            self._note_once(topic, f"{kind} {topic}: {error}")
        finally:
            partitions = 0 if wish is None else len(wish.assignments or ()) or wish.partitions
            self.lives.calls.append(AdminCall(kind, topic, began_s, ended_s, is_acknowledged, partitions))
        if is_acknowledged:
            self._note_once(topic, f"{kind} {topic}: done")

    def _note_once(self, whose: str, text: str) -> None:
        """Note the text unless it repeats the last one: retries would fill the timeline."""
        if self._last_notes.get(whose) != text:
            self._last_notes[whose] = text
            self.storm.note(text)

    def _wish(self, topic: str) -> _Wish:
        dice = self.dice
        before = len(self.lives.incarnations[topic][-1].assignment)
        more, fewer = min(before + dice.randint(1, 2), MOST_PARTITIONS), max(before - dice.randint(1, 2), 1)
        partitions = dice.choice([before, more, fewer])
        factor = min(dice.choice([1, 2, 3, 3, 3]), self._most_replicas)
        leader, assignments = self.wished_leader.get(topic), self.wished_assignment.get(topic)
        if assignments:
            factor = len(assignments[0])
        elif leader is not None:
            factor = self._most_replicas
        configs = {"min.insync.replicas": str(dice.randint(1, factor))}
        if dice.random() < 0.08:
            configs["unclean.leader.election.enable"] = "true"
        if not assignments and (leader is not None or dice.random() < 0.25):
            self.storm.event("re-created by explicit assignment")
            brokers = self._cluster.broker_ids
            assignments = [dice.sample(brokers, factor) for _ in range(partitions)]
            if leader is not None:
                assignments = [sorted(ids, key=lambda broker_id: broker_id != leader) for ids in assignments]
        return _Wish(partitions, factor, configs, assignments or None)

    # -- after healing --

    def _metadata_agrees(self) -> bool:
        for broker_id in self._cluster.broker_ids:
            broker = self._cluster.living_broker(broker_id)
            if broker is None:
                return False
            for topic in broker._metadata.describe(None).topics:
                if not self.storm.simulation.zookeeper.has(znodes.topic_path(topic.name)):
                    return False
            for name in self.topics:
                current = self.lives.current(name)
                assert current is not None
                [told] = broker._metadata.describe([name]).topics
                if (told.topic_id, len(told.partitions)) != (current.topic_id, len(current.assignment)):
                    return False
        return True

    def _is_settled(self) -> bool:
        for partition, current, assigned in self.replicas():
            ends = set()
            for broker_id in assigned:
                replica = self.replica(broker_id, current, partition)
                if replica is None:
                    return False
                ends |= {replica.log.log_end_offset, replica.high_watermark}
            if len(ends) != 1:
                return False
        return True

    async def _read_everything(self, world: World) -> None:
        partitions = self.partitions()
        if not partitions:
            return
        async with Consumer(self._cluster.bootstrap, partitions=partitions, world=world) as consumer:
            ends = await consumer.end_offsets(partitions)
            read: dict[TopicPartition, dict[int, bytes]] = {partition: {} for partition in partitions}
            missing = {partition for partition in partitions if ends[partition] > 0}
            batches = consumer.batches()
            while missing:
                batch = await anext(batches)
                partition = TopicPartition(batch.topic, batch.partition)
                read[partition] |= dict(zip(batch.offsets, (value or b"" for value in batch.values), strict=True))
                if batch.next_offset >= ends[partition]:
                    missing.discard(partition)
        for partition, values in read.items():
            current = self.lives.current(partition.topic)
            assert current is not None
            self.lives.committed[TopicIdPartition(current.topic_id, partition)] = values

    def _read_by(self, settings: _Consuming) -> list[TopicPartition]:
        current = self.lives.current(settings.topic)
        assert current is not None
        return current.partitions if settings.is_by_topic else [TopicPartition(settings.topic, 0)]

    def _is_read(self) -> bool:
        return all(
            has_read_all(self.lives, self._identity(name), partition)
            for name, settings in self._consumers.items()
            for partition in self._read_by(settings)
        )

    # -- clients --

    def _identity(self, name: str) -> str:
        return f"{name}#{self._starts[name]}"

    def _start(self, name: str) -> None:
        self._starts[name] = self._starts.get(name, 0) + 1
        world = self._cluster.client(name)
        self._processes[name] = world.process
        if name in self._producers:
            self._producing[name] = world.process.start(self._produce(name, world, self._producers[name]), name)
        else:
            world.process.start(self._consume(name, world, self._consumers[name]), name)

    @property
    def names(self) -> list[str]:
        return [*self._producers, *self._consumers]

    def process(self, name: str) -> Process:
        return self._processes[name]

    def restart(self, name: str) -> None:
        """Kill a client (SIGKILL) and start it again."""
        self._processes[name].kill()
        self._start(name)

    async def _produce(self, name: str, world: World, settings: _Producing) -> None:
        start = self._identity(name)
        for attempt in itertools.count(1):
            try:
                async with Producer(
                    self._cluster.bootstrap,
                    linger_ms=settings.linger_ms,
                    batch_size=settings.batch_size,
                    delivery_timeout_ms=settings.delivery_timeout_ms,
                    request_timeout_ms=settings.request_timeout_ms,
                    world=world,
                ) as producer:
                    await self._send(name, f"{start}.{attempt}", producer, world.random, settings)
                return
            except ClientCrashed as error:
                self.storm.workload.unexpected.append(f"{name}: {error!r} {error.__cause__!r}")
            except MinibrokerError as error:  # no broker was reached; each record has its own outcome
                if name in self._probed:
                    self._probed[name] = str(error)
            await asyncio.sleep(_RETRY_S)

    async def _send(self, name: str, identity: str, producer: Producer, random: Random, settings: _Producing) -> None:
        numbers = itertools.count()
        async with asyncio.TaskGroup() as tasks:
            while not self._is_probing:
                for _ in range(0 if settings.topic in self.quiet else random.randint(1, settings.burst)):
                    choice = self._choice(settings, random)
                    tasks.create_task(self._record(identity, next(numbers), producer, random, settings, choice))
                await asyncio.sleep(random.expovariate(settings.records_per_s) * (1 + settings.burst) / 2)
            while name in self._probed:
                problem = await self._probe(identity, numbers, producer, random, settings)
                if problem is None:
                    del self._probed[name]
                elif name in self._probed:
                    self._probed[name] = problem
                    await asyncio.sleep(_RETRY_S)

    def _choice(self, settings: _Producing, random: Random) -> int | bytes | None:
        """Draw the partition or the key of a record."""
        if settings.chooses == "number":
            return random.randrange(len(self.lives.incarnations[settings.topic][-1].assignment))
        return b"%d" % random.randrange(KEYS) if settings.chooses == "key" else None

    async def _probe(
        self, identity: str, numbers: itertools.count[int], producer: Producer, random: Random, settings: _Producing
    ) -> str | None:
        """Send a record to each partition, with each key, or to partitions of the producer's choice. Return the first
        problem."""
        count = len(self.lives.incarnations[settings.topic][-1].assignment)
        choices: list[int | bytes | None] = list(range(count))
        if settings.chooses == "key":
            choices = [b"%d" % key for key in range(KEYS)]
        elif settings.chooses == "neither":
            choices = [None] * (2 * count)
        for choice in choices:
            problem = await self._record(identity, next(numbers), producer, random, settings, choice)
            if problem is not None:
                return problem
        return None

    async def _record(
        self,
        identity: str,
        number: int,
        producer: Producer,
        random: Random,
        settings: _Producing,
        choice: int | bytes | None,
    ) -> str | None:
        """Send a record and wait for its outcome. Return its error, if there is one."""
        value = b"%s/%d|" % (identity.encode(), number) + random.randbytes(random.choice([0, 20, 200]))
        partition = choice if isinstance(choice, int) else None
        key = choice if isinstance(choice, bytes) else None
        sent_s = self.storm.now_s
        self.lives.sent[value] = Sent(identity, number, settings.topic, partition, sent_s, key)
        try:
            metadata = await producer.send(settings.topic, value, partition=partition, key=key)
        except MinibrokerError as error:
            self._check_duration(identity, number, sent_s, settings)
            return f"{error}"
        self._check_duration(identity, number, sent_s, settings)
        acknowledged_in = TopicPartition(metadata.topic, metadata.partition)
        self.lives.acknowledged.append(Acknowledged(value, acknowledged_in, metadata.offset, self.storm.now_s))
        incarnation = self.lives.surely_in(value, acknowledged_in, self.storm.now_s)
        if incarnation is not None:
            identified = TopicIdPartition(incarnation.topic_id, acknowledged_in)
            self.acknowledged_ends[identified] = max(self.acknowledged_ends.get(identified, 0), metadata.offset + 1)
        return None

    def _check_duration(self, identity: str, number: int, sent_s: float, settings: _Producing) -> None:
        took_s = self.storm.now_s - sent_s
        if took_s > settings.delivery_timeout_ms / 1_000 + END_GRACE_S:
            self.storm.workload.unexpected.append(
                f"{identity}/{number} had its end after {took_s:.1f} s, with a delivery timeout of "
                f"{settings.delivery_timeout_ms} ms"
            )

    async def _consume(self, name: str, world: World, settings: _Consuming) -> None:
        random = world.random
        partitions = [TopicPartition(settings.topic, 0)]
        for _ in itertools.count():
            identity = self._identity(name)
            try:
                async with Consumer(
                    self._cluster.bootstrap,
                    topics=[settings.topic] if settings.is_by_topic else None,
                    partitions=None if settings.is_by_topic else partitions,
                    request_timeout_ms=5_000,
                    max_partition_fetch_bytes=random.choice([300, 1_048_576]),
                    world=world,
                ) as consumer:
                    while True:
                        try:
                            await self._read(identity, consumer, random, settings)
                        except BrokerError as error:
                            if not settings.iterates_on:
                                raise
                            self._note_once(identity, f"{identity} iterates on after {error.code.name}")
                            await asyncio.sleep(_RETRY_S)
            except (ClientCrashed, CorruptBatch) as error:
                self.storm.workload.unexpected.append(f"{identity}: {error!r} {error.__cause__!r}")
            except MinibrokerError as error:
                self.storm.note(f"{identity} begins anew: {error}")
            self._starts[name] += 1  # the next consumer begins at the beginning again
            await asyncio.sleep(_RETRY_S)

    async def _read(self, identity: str, consumer: Consumer, random: Random, settings: _Consuming) -> None:
        polled = self.lives.polled
        if not settings.is_by_record:
            async for batch in consumer.batches():
                polls = polled[identity, TopicPartition(batch.topic, batch.partition)]
                for offset, value in zip(batch.offsets, batch.values, strict=True):
                    polls.append(Polled(offset, value or b"", self.storm.now_s))
            return
        async for record in consumer:
            polls = polled[identity, TopicPartition(record.topic, record.partition)]
            polls.append(Polled(record.offset, record.value or b"", self.storm.now_s))
            if random.random() < 0.2:
                await asyncio.sleep(random.uniform(0, 0.1))
            while settings.topic in self.slow:
                await asyncio.sleep(POLL_S)
