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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from math import inf
from random import Random
from typing import Any, Literal, NamedTuple

from minibroker.broker.replication.partition import Partition
from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.records import BatchHeader, decode_batch
from minibroker.protocol.world import Create, Delete, Operation, SetData, World
from tests.simulation.storms.ambush import Ambushes
from tests.simulation.storms.clients.indirect_admin import IndirectAdmin
from tests.simulation.storms.clients.rebirth_clients import RebirthClients
from tests.simulation.storms.clients.workload import read_to_ends
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition
from tests.simulation.storms.verdicts.incarnations import (
    AdminCall,
    Incarnation,
    Lives,
    check,
)

MOST_PARTITIONS = 4

LATE_ISR_WRITE = "an ISR write held up"
SLOW_CONSUMERS = "consumers in the middle of a batch"
_MOMENT_S = 25.0
"""Seconds for which an ambush waits for its moment."""

Moment = Literal["deletion queued", "gone", "created"]

Ambush = Callable[["Rebirth", str, asyncio.Event], Coroutine[Any, Any, None]]
"""A fault at a moment of a re-creation of the topic. It sets the event as soon as the deletion may be requested."""


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
        self.clients = RebirthClients(storm, self.lives)
        self._moments: Ambushes[tuple[str, Moment, Incarnation]] = Ambushes()
        self.wished_leader: dict[str, int] = {}
        """The broker that an ambush wants as the leader of the next incarnation, by topic."""
        self.wished_assignment: dict[str, Sequence[Sequence[int]]] = {}
        self._is_complete = False

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
        self.storm.note(f"{born} was created: {dict(born.assignment)}, min ISR {born.min_insync_replicas}, {config}")
        self._happened(topic, "created")

    def _was_queued(self, topic: str) -> None:
        current = self.lives.current(topic)
        if current is not None:
            self.storm.look()  # records its content before the deletion
            current.queued_at_s = self.storm.now_s
            self.storm.note(f"the deletion of {current} is queued")
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
            if not current.may_lose and identified in self.clients.acknowledged_ends:
                ends[identified] = self.clients.acknowledged_ends[identified]
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
            end = self.clients.acknowledged_ends.get(TopicIdPartition(current.topic_id, partition), 0)
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
            self.clients.draw(topic, dice)
        self.clients.start()
        self.storm.workload.guests.append(self.clients)

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
            missing += await self.clients.probe(within_s=60)
            doing = "the end of all deliveries"
            await self._cluster.until(self.clients.have_sent_all, within_s=60)
            doing = "equal log ends"
            await self._cluster.until(self._is_settled, within_s=60)
            doing = "the final read"
            async with asyncio.timeout(60):
                reader = self._cluster.client("rebirth-reader")
                await reader.process.run(self._read_everything(reader))
            with suppress(TimeoutError):  # the verdict names the records that they have not read
                await self._cluster.until(self.clients.have_read_all, within_s=60)
            self.clients.end_consumers()
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
            self.storm.note_once(topic, f"{kind} {topic}: {error}")
        finally:
            partitions = 0 if wish is None else len(wish.assignments or ()) or wish.partitions
            self.lives.calls.append(AdminCall(kind, topic, began_s, ended_s, is_acknowledged, partitions))
        if is_acknowledged:
            self.storm.note_once(topic, f"{kind} {topic}: done")

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
            for topic in finish_at_once(broker._metadata.describe(None)).topics:
                if not self.storm.simulation.zookeeper.has(znodes.topic_path(topic.name)):
                    return False
            for name in self.topics:
                current = self.lives.current(name)
                assert current is not None
                [told] = finish_at_once(broker._metadata.describe([name])).topics
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
            read = await read_to_ends(consumer.batches(), {}, ends)
        for partition, values in read.items():
            current = self.lives.current(partition.topic)
            assert current is not None
            self.lives.committed[TopicIdPartition(current.topic_id, partition)] = values
