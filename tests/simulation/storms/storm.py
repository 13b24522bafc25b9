"""A cluster under a seeded storm of faults, and the verdict on its promises.

The problem: bugs of a replicated log need several things to go wrong within the same few milliseconds. In real time
that takes weeks, and then it cannot be repeated.

The choice: one seed decides everything, and each seed is a storm of its own kind. It draws which faults occur and how
often (a fault that is rare over all seeds is frequent in some), the brokers' timeouts, the sizes of segments and
fetches, the number of clients, what they send, and whether ready tasks are shuffled. Faults last for a while and
overlap. Between bouts of faults the cluster may recover. At the end everything is healed; the cluster must be whole
again within LIVENESS_S, and every log is read.

A storm may do everything that the cluster promises to survive:

- Records acknowledged with acks=all and min.insync.replicas=2 survive any number of kills, pauses, partitions and
  failed disks, even of all brokers at once, since the page cache outlives a process.
- They survive a power cut, which takes what was not synced, of one broker at a time. The next power cut comes when the
  last victim has caught up.

Some storms cut the power of several hosts at once. A partition may then legally lose the end of its log, which the
report counts, if no complete replica is left: no ISR member and no eligible replica. A topic with durability=synced,
which half of the storms have, may lose nothing even then, unless a disk has failed as well. Everything else, and every
record acknowledged from then on, is judged as usual (see `storms.verdicts.history`).

With two replicas, or with the setting for three, acks=all means min ISR 1. There the power cut of a leader that is
alone in the ISR is such a case. A controller that sees the others end first may also leave a leader alone in the ISR
that has already lost its power.

Rejected: the same mix for every seed (all seeds are then alike, and a rare combination never comes); faults at random
moments of a real run (nothing can be replayed).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.controller.handlers import steps
from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.kafka_clients import VERSIONS
from minibroker.deploy.simulator.loop import run
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.bookkeepers import CLOCK_FAULTS
from tests.simulation.storms.clients.compacting import TOPIC as COMPACTED
from tests.simulation.storms.clients.workload import (
    DURABLE,
    SHRINKING,
    SYNCED,
    ProducerSettings,
    read_as_kafkas_do,
    read_everything,
)
from tests.simulation.storms.faults import operations_reassign
from tests.simulation.storms.faults.faults import (
    FAULTS,
    FAULTS_OF_DISKS,
    FAULTS_OF_SECURITY,
    FAULTS_OF_TRANSACTIONS,
    KEPT_IN_EVERY_STORM,
    POWER_OF_SEVERAL,
    WORSE_ALONE,
)
from tests.simulation.storms.faults.operations_configs import unapplied_settings
from tests.simulation.storms.report import LEAST_ACKNOWLEDGED, Report, innermost_errors
from tests.simulation.storms.scene import Scene
from tests.simulation.storms.verdicts.history import Acknowledged, Anomaly, History, Sent, check

LIVENESS_S = 60.0
"""Seconds after the last fault within which everything must be whole: the bound of RELIABILITY.md."""

_FLOORS_ARE_FOR_S = 180.0
_MORE_S = 20.0
"""Seconds by which a storm below the floor of acknowledged records is extended, possibly several times."""

MAX_CHANGES_BY_A_LINK = 12
"""Limit for the changes of the controller, and of each leader epoch, while a single link between two brokers is broken.
"""

_REASSIGNS_TO_ONE_PROBABILITY = 0.3
_POWER_OF_SEVERAL_PROBABILITY = 1 / 8
_LONG_LINK_PROBABILITY = 1 / 8
_LONG_LINK_OF_TWO_PROBABILITY = 1 / 2
"""More often, since two brokers without a third one depose each other."""
_LONG_LINK_S = (60, 150)
_LONGEST_FAULT_S = 45.0


def simulate(
    seed: int,
    minutes: float,
    is_enough: Callable[[Anomaly], bool] | None = None,
    kind: type[Storm] | None = None,
) -> Report:
    """Run a whole storm of that many virtual minutes, or until an anomaly for which `is_enough` returns true. An error
    inside the storm is reported as an anomaly, not raised."""
    report = Report(seed)
    dice = Random(f"{seed} storm")
    limit_s = minutes * 60 + 600
    usual = steps.PARTITIONS_AT_ONCE
    steps.PARTITIONS_AT_ONCE = dice.choice([1, 2, usual])  # as in a topic of thousands
    try:
        storm = _storm(kind or Storm, report, dice, minutes * 60, is_enough)
        run(storm, seed=seed, limit_s=limit_s, shuffle=dice.random() < 0.7)
    except Exception as error:  # noqa: BLE001 - every error is a verdict on this seed
        if is_enough is None or not any(map(is_enough, report.anomalies)):  # the storm itself did not stop the loop
            report.anomalies.append(Anomaly("failed", "; ".join(innermost_errors(error))))
    finally:
        steps.PARTITIONS_AT_ONCE = usual
    return report


async def _storm(
    kind: type[Storm], report: Report, dice: Random, seconds: float, is_enough: Callable[[Anomaly], bool] | None
) -> None:
    storm = kind(report, dice, is_enough)
    try:
        with storm.shrinking.watched(), storm.compacting.watched(), storm.groups.watched(), storm.security.watched():
            await storm.run(seconds)
    finally:
        report.virtual_s = storm.simulation.loop.time()
        report.trace = storm.simulation.loop.trace


class Storm(Scene):
    def __init__(self, report: Report, dice: Random, is_enough: Callable[[Anomaly], bool] | None = None) -> None:
        super().__init__(report, dice, is_enough)
        self._weights = self._draw_weights() | self._draw_weights_of_security()
        self.cuts_power_of_several = self._weights[POWER_OF_SEVERAL] > 0
        self.reassigns_to_one = self.dice.random() < _REASSIGNS_TO_ONE_PROBABILITY
        if self.reassigns_to_one:
            self._weights |= dict.fromkeys(FAULTS_OF_DISKS, 0.0)
        if self.offsets_expire:
            self._weights |= dict.fromkeys(CLOCK_FAULTS, 0.0)

    # -- the course of a storm --

    async def run(self, seconds: float) -> None:
        await self.cluster.start()
        await self._create_topics()
        if self.groups.names or self.bookkeepers.names or self.transactors.names:
            await self.groups.create_offsets_topic()
            self._all_partitions += self.groups.partitions
        if self.transactors.names:
            await self.transactors.create_state_topic()
            self._all_partitions += self.transactors.state_partitions
        self.leadership = {znodes.state_path(p): (p, self.cluster.state(p)) for p in self._all_partitions}
        self._topic_ids = {p.topic: self.topic(p.topic).topic_id for p in self._all_partitions}
        self.simulation.zookeeper.before = self._about_to_write
        self.simulation.zookeeper.after = self._written
        watching = asyncio.create_task(self._watch_invariants(), name="invariants")
        self._start_keepers()
        self._start_clients()
        await self.rebirth.begin()
        of_two = len(self.cluster.broker_ids) == 2
        probability = _LONG_LINK_OF_TWO_PROBABILITY if of_two else _LONG_LINK_PROBABILITY
        end_s = self.now_s + seconds
        if self.dice.random() < probability:
            is_well = await self._bear_a_broken_link(min(self.dice.uniform(*_LONG_LINK_S), seconds / 2))
            end_s = self.now_s + (seconds if is_well else 0)
        longest_s = end_s + seconds
        while self.now_s < end_s:
            await self._bout(min(self.now_s + self.dice.uniform(15, 45), end_s))
            if self.dice.random() < 0.5:
                await self._heal()
                if not await self._becomes_whole() or not await self._bear_a_lone_fault():
                    break
            self.note("quiet")
            await asyncio.sleep(min(self.dice.uniform(5, 15), max(0.0, end_s - self.now_s)))
            if self.now_s >= end_s and self._acknowledged() < LEAST_ACKNOWLEDGED * seconds / _FLOORS_ARE_FOR_S:
                end_s = min(self.now_s + _MORE_S, longest_s)  # for example after a slow network
        await self._heal()
        await self._recover()
        watching.cancel()
        self.look()
        self._judge()

    def _acknowledged(self) -> int:
        return sum(map(len, self.history.acknowledged.values()))

    async def _bout(self, end_s: float) -> None:
        """Begin one fault after the other until `end_s`. Faults under way then continue."""
        self.rebirth.bout(end_s)
        mean_s = self.dice.choice([1.0, 2.0, 3.0])
        kinds = sorted(self._weights)
        weights = [self._weights[kind] for kind in kinds]
        while True:
            await asyncio.sleep(self.dice.expovariate(1 / mean_s))
            if self.now_s >= end_s:
                return
            [kind] = self.dice.choices(kinds, weights)
            self.begin(self._inflict(kind), kind)

    async def _bear_a_lone_fault(self) -> bool:
        """Now and then, run a single fault: with several, the next restart often repairs what the last fault broke.
        Return whether the cluster is whole afterwards."""
        if self.dice.random() < 0.5:
            return True
        [kind] = self.dice.choices(sorted(self._weights), [self._weights[kind] for kind in sorted(self._weights)])
        if self.dice.random() < 0.5:
            kind = self.dice.choice(WORSE_ALONE)
        self.note(f"alone: {kind}")
        fault = self.begin(self._inflict(kind), kind)
        await asyncio.wait([fault], timeout=_LONGEST_FAULT_S)
        await self._heal()
        return await self._becomes_whole()

    async def _bear_a_broken_link(self, seconds: float) -> bool:
        """Break the link between two brokers, in one or both directions, with no other fault. Return whether the
        cluster is whole afterwards."""
        dice, network, zookeeper = self.dice, self.simulation.network, self.simulation.zookeeper
        ends = dice.sample(self.cluster.broker_ids, 2)
        if (controllers := self.cluster.active_controllers()) and dice.random() < 0.7:
            ends = [controllers[0], dice.choice([b for b in self.cluster.broker_ids if b != controllers[0]])]
        one, other = map(host_name, ends)
        links = dice.choice(
            [[(one, other), (other, one)], [(one, other), (other, one)], [(one, other)], [(other, one)]]
        )
        self.count(
            "broken link", f"{' and '.join(f'{source} to {target}' for source, target in links)}, {seconds:.0f} s"
        )

        def epochs() -> dict[str, int]:
            controller = znodes.decode_controller_epoch(zookeeper.data(znodes.CONTROLLER_EPOCH))
            return {"the controller": controller} | {
                str(p): self.cluster.state(p).leader_epoch for p in self._all_partitions
            }

        before = epochs()
        for link in links:
            network.block(*link)
        await asyncio.sleep(seconds)
        for name, epoch in epochs().items():
            if (times := epoch - before[name]) > MAX_CHANGES_BY_A_LINK:
                self.accuse(Anomaly("a broken link", f"{name} changed {times} times in {seconds:.0f} s"))
        for link in links:
            network.unblock(*link)
        self.note(f"{one} and {other} reach each other")
        return await self._becomes_whole()

    async def _inflict(self, kind: str) -> None:
        await FAULTS[kind](self)

    async def _heal(self) -> None:
        """Cancel all faults; each undoes its effect."""
        while self._faults:
            for fault in sorted(self._faults, key=lambda task: task.get_name()):
                fault.cancel()
            await asyncio.wait(sorted(self._faults, key=lambda task: task.get_name()))
        self.note("healed")

    async def _recover(self) -> None:
        """Wait until brokers, ISRs, producers and topics are whole, and read every log. Accuse what is late."""
        healed_s = self.now_s
        if not await self._becomes_whole():
            return
        await self.transactors.finish(LIVENESS_S)
        await self.processors.finish(self.transactors.history.committed, LIVENESS_S)
        doing = ""
        try:
            async with asyncio.timeout(LIVENESS_S):
                doing = "an acknowledgement from each partition"
                probe = self.cluster.client("probe")
                await probe.process.run(_produce_to_each(self.cluster.bootstrap, probe, self.history, self.partitions))
            self.report.recovery_s = self.now_s - healed_s
            for missing in await self.rebirth.recover():
                self.accuse(Anomaly("not live", f"not in time after healing: {missing}"))
            doing = "the end of all deliveries"
            async with asyncio.timeout(150):
                await asyncio.gather(self.workload.finish(), self.compacting.finish(), self.users.finish())
            self.shrinking.end()
            doing = "the content of the growing topic"
            await self.growing.finish(LIVENESS_S)
            doing = "a generation of each group with all partitions and all commits"
            await self.groups.finish()
            doing = "the offsets of the bookkeepers"
            await self.bookkeepers.finish()
            doing = "equal high watermarks and log ends, and the leaders' log starts"
            await self.cluster.until(self._is_settled, within_s=LIVENESS_S)
            doing = "the final read"
            async with asyncio.timeout(LIVENESS_S):
                reader = self.cluster.client("reader")
                await reader.process.run(read_everything(self.cluster.bootstrap, reader, self.partitions, self.history))
                await reader.process.run(self.compacting.read_back(reader))
                await self.users.read_back()
            doing = "the final read by a Kafka client"
            async with asyncio.timeout(LIVENESS_S):
                versions = Random(f"{self.report.seed} kafka's reader").choice(VERSIONS)
                for text in await reader.process.run(
                    read_as_kafkas_do(self.cluster.bootstrap, reader, versions, self.history)
                ):
                    self.accuse(Anomaly("two dialects, two logs", text))
            await self.users.look_at_topics()
        except TimeoutError:
            self.accuse(Anomaly("not live", f"not in time after healing: {doing}: {self._condition()}"))

    async def _becomes_whole(self) -> bool:
        """After healing, return whether all brokers come up and all replicas get in sync in time."""
        try:
            await operations_reassign.restore(self)
        except TimeoutError as late:
            self.accuse(Anomaly("not live", f"not in time after healing: {late}: {self._condition()}"))
            return False
        try:
            await self.cluster.until(self._is_whole, within_s=LIVENESS_S)
        except TimeoutError:
            self.accuse(Anomaly("not live", f"{LIVENESS_S:g} s after healing it is not whole: {self._condition()}"))
            return False
        return True

    def _judge(self) -> None:
        report = self.report
        report.acknowledged = self._acknowledged()
        report.lost_with_acks_1 = self.history.lost_with_acks_1()
        report.lost_with_power = self.history.lost_with_power()
        for text in self.workload.unexpected:
            self.accuse(Anomaly("a client crashed", text))
        if not report.anomalies:  # without a complete final read a history proves nothing
            for anomaly in (
                *check(self.history),
                *self.compacting.judge(),
                *self.users.judge(),
                *self.groups.judge(),
                *self.bookkeepers.judge(),
                *self.transactors.judge(),
                *self.processors.judge(),
                *self.security.judge(self.history),
            ):
                self.accuse(anomaly)
        for anomaly in self.rebirth.judge():
            self.accuse(anomaly)

    # -- topics and clients --

    async def _create_topics(self) -> None:
        world = self.cluster.client("admin")
        configs = {
            SHRINKING: self.shrinking.configs,
            SYNCED: {"durability": "synced"},
            COMPACTED: self.compacting.configs,
        }
        if Random(f"{self.report.seed} format").random() < 0.3:
            configs[f"{DURABLE}-0"] = {"record.format": "kafka"}

        async def create() -> None:
            async with Admin(self.cluster.bootstrap, world=world) as admin:
                partitions = Counter(partition.topic for partition in [*self.partitions, *self.compacting.partitions])
                for topic, count in partitions.items():
                    await admin.create_topic(
                        topic,
                        partitions=count,
                        replication_factor=len(self.cluster.broker_ids),
                        configs=configs.get(topic),
                    )
                await self.users.create_topics(admin)
                for guests in (self.transactors, self.processors):
                    await guests.create_topic(admin, len(self.cluster.broker_ids))

        await world.process.run(create())

    def _start_clients(self) -> None:
        dice = self.dice
        topics = list(dict.fromkeys(partition.topic for partition in self.partitions))
        producers = [*topics, *dice.choices(topics, k=dice.randint(0, 2))]
        for number, topic in enumerate(producers):
            settings = self._draw_producer(dice, topic, ["none", "none", "lz4", "zstd"], [0, 0, 5, 100])
            self.workload.start_producer(f"producer-{number}", replace(settings, sends_batches=number % 2 == 1))
        lasting = [partition for partition in self.partitions if partition.topic != SHRINKING]
        for number in range(dice.randint(1, 2)):
            self.workload.start_consumer(f"consumer-{number}", lasting)
        self._start_clients_of_kafka(topics, lasting)
        if self.shrinking.partitions:
            self.workload.start_consumer("consumer-shrinking", self.shrinking.partitions)
            self.shrinking.start_administrator(self.cluster.client("deleter"), self.workload.acknowledged_end)
        self.compacting.start()
        self.users.start()
        self.groups.start()
        self.bookkeepers.start()
        self.transactors.start()
        self.processors.start()
        for name in self.workload.names:
            self.security.allow(name, self.workload.rights(name))
        self.security.start()

    def _start_clients_of_kafka(self, topics: list[str], lasting: list[TopicPartition]) -> None:
        """Start one or two producers and consumers that speak Kafka's protocol, in two storms of three."""
        dice = Random(f"{self.report.seed} kafka")
        if dice.random() < 1 / 3:
            return
        for number in range(dice.randint(1, 2)):
            compressions = ["none", "gzip", "snappy", "lz4", "zstd"]
            settings = self._draw_producer(dice, dice.choice(topics), compressions, [0, 5, 100, 500])
            settings = replace(settings, versions=dice.choice(VERSIONS))
            self.workload.start_producer(f"kafka-producer-{number}", settings)
        for number in range(dice.randint(1, 2)):
            self.workload.start_consumer(f"kafka-consumer-{number}", lasting, dice.choice(VERSIONS))

    def _draw_producer(
        self, dice: Random, topic: str, compressions: Sequence[str], lingers_ms: Sequence[int]
    ) -> ProducerSettings:
        return ProducerSettings(
            topic=topic,
            partitions=sum(partition.topic == topic for partition in self.partitions),
            records_per_s=dice.choice([3, 5, 10]),
            max_value_bytes=dice.choice([20, 200, 2_000]),
            compression=dice.choice(compressions),
            linger_ms=dice.choice(lingers_ms),
            delivery_timeout_ms=dice.choice([5_000, 20_000, 120_000]),
            request_timeout_ms=dice.choice([1_000, 5_000, 30_000]),
        )

    def _draw_weights(self) -> dict[str, float]:
        """Return the weight of each fault. Some are left out, some are frequent."""
        weights = {
            kind: self.dice.choice([0.0, 0.0, 1.0, 1.0, 3.0])
            for kind in FAULTS
            if kind not in (*FAULTS_OF_TRANSACTIONS, *FAULTS_OF_SECURITY)
        }
        of_transactions = Random(f"{self.report.seed} faults of transactions")
        for kind in FAULTS_OF_TRANSACTIONS:
            weights[kind] = of_transactions.choice([0.0, 1.0, 3.0]) if self.transactors.names else 0.0
        weights |= {kind: self.dice.choice([2.0, 4.0]) for kind in KEPT_IN_EVERY_STORM}
        is_drawn = self.dice.random() < _POWER_OF_SEVERAL_PROBABILITY
        return weights | {POWER_OF_SEVERAL: 3.0 if is_drawn else 0.0}

    def _draw_weights_of_security(self) -> dict[str, float]:
        dice = Random(f"{self.report.seed} faults of security")
        return {kind: dice.choice([2.0, 4.0]) * self.security.is_on for kind in FAULTS_OF_SECURITY}

    def _is_whole(self) -> bool:
        return (
            all(self.cluster.living_broker(broker_id) is not None for broker_id in self.cluster.broker_ids)
            and all(
                state.leader != NO_LEADER and len(state.isr) == len(self.cluster.broker_ids)
                for state in map(self.cluster.state, self._all_partitions)
            )
            and not unapplied_settings(self)
            and not self.simulation.zookeeper.has(znodes.PREFERRED_REPLICA_ELECTION)
            and self.rebirth.is_whole()
            and self.growing.is_whole()
            and self.security.is_whole()
        )

    def _is_settled(self) -> bool:
        """Return whether all replicas of each partition have the same log end and high watermark, and no log start
        below the leader's. A log start may be higher: a paused leader that was deposed can delete more before it knows.
        """
        leads = {partition: self.cluster.state(partition).leader for partition in self._all_partitions}
        return all(len(set(ends)) == 1 for ends in self._ends().values()) and all(
            bool(of_replicas) and of_replicas.get(leads[partition]) == min(of_replicas.values())
            for partition, of_replicas in self._begins().items()
        )

    def _begins(self) -> dict[TopicPartition, dict[int, int]]:
        """Return the log start of each replica that is there, by broker."""
        begins: dict[TopicPartition, dict[int, int]] = {partition: {} for partition in self._all_partitions}
        for broker_id in self.cluster.broker_ids:
            for partition, of_replicas in begins.items():
                if (replica := self.replica(broker_id, partition)) is not None:
                    of_replicas[broker_id] = replica.log.log_start_offset
        return begins

    def _ends(self) -> dict[TopicPartition, list[int]]:
        """Return the log ends and high watermarks of all replicas, with -1 for a replica that is not there."""
        ends: dict[TopicPartition, list[int]] = {partition: [] for partition in self._all_partitions}
        for broker_id in self.cluster.broker_ids:
            for partition, of_replicas in ends.items():
                replica = self.replica(broker_id, partition)
                of_replicas += [-1] if replica is None else [replica.log.log_end_offset, replica.high_watermark]
        return ends

    def _condition(self) -> str:
        states = (f"{partition} {self.cluster.state(partition)}" for partition in self._all_partitions)
        return (
            f"brokers {self.cluster.living()} live; log starts {self._begins()}, ends {self._ends()}; "
            f"{'; '.join(states)}; "
            f"settings that were not heard of: {unapplied_settings(self)}; "
            f"{self.rebirth.condition()}"
        )


async def _produce_to_each(
    bootstrap: str, world: World, history: History, partitions: Sequence[TopicPartition]
) -> None:
    """Send a record to each partition, as the producer of a user who arrives after the storm."""
    async with Producer(bootstrap, world=world) as producer:
        for partition in partitions:
            value = f"probe/{partition}|".encode()
            history.sent[value] = Sent("probe", 0, partition)
            metadata = await producer.send(partition.topic, value, partition=partition.partition)
            now_s = asyncio.get_running_loop().time()
            history.acknowledged[partition].append(Acknowledged(value, metadata.offset, now_s))
