"""A cluster under a seeded storm of faults, and the verdict: what was promised, and was it kept?

The problem: bugs of a replicated log need several things to go wrong within the same few milliseconds. Waiting for that
in real time takes weeks, and then it cannot be had again.

The choice: one seed decides everything, and each seed is a storm of its own kind. It draws which faults occur and how
often (a fault that is rare in the mix of all seeds is frequent in some), the brokers' timeouts, sizes of segments and
fetches, how many clients there are and what they send, and whether ready tasks are shuffled. Faults last for a while
and overlap; between bouts there is quiet, in which the cluster may recover. In the end everything is healed, must be
whole again within LIVENESS_S, and is read back.

What the cluster promises, and so what a storm may do: acks=all with min.insync.replicas=2 survives any number of kills,
pauses, partitions and failed disks, of all brokers at once too, since the page cache outlives a process. Of power cuts,
which take what was not synced, it survives one broker's at a time: the next one comes when the last victim has caught
up. Everything else may happen whenever the seed says so.

Some storms cut the power of several hosts at once. That may cost the ends of partitions, which is legal, and counted,
where no broker is left that had everything: no member of the ISR, and none that is eligible. A topic with
durability=synced, which half of the storms have, may lose nothing even then, unless a disk has failed, too. All else is
judged as ever (see `storms.verdicts.history`), and so is what is acknowledged from then on. With two replicas acks=all
means min ISR 1 (as does the setting, for three), so there the power of a leader that is alone in sync is such a case,
too; and it may be left alone in sync when its power is gone already, by a controller that sees the end of the others
first.

Rejected: the same mix for every seed (all seeds are then alike, and the rare combination never comes); faults at the
random moments of a real run (nothing to replay).
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.controller.handlers import steps
from minibroker.protocol import znodes
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, Member, TopicPartition
from minibroker.protocol.world import Create, Operation, SetData, World
from tests.simulation.simulator.cluster import VirtualCluster, host_name
from tests.simulation.simulator.disk import DiskFaults
from tests.simulation.simulator.loop import run
from tests.simulation.simulator.ownership import ProcessKilled
from tests.simulation.simulator.world import Simulation
from tests.simulation.simulator.zookeeper import VirtualSession
from tests.simulation.storms.ambush import Ambushes
from tests.simulation.storms.clients.bookkeepers import CLOCK_FAULTS, Bookkeepers
from tests.simulation.storms.clients.bookkeepers import broker_settings as bookkeeping_settings
from tests.simulation.storms.clients.compacting import TOPIC as COMPACTED
from tests.simulation.storms.clients.compacting import Compacting
from tests.simulation.storms.clients.groups import Groups
from tests.simulation.storms.clients.groups import broker_settings as group_settings
from tests.simulation.storms.clients.kafka_clients import VERSIONS
from tests.simulation.storms.clients.rebirth import Rebirth
from tests.simulation.storms.clients.shrinking import Shrinking
from tests.simulation.storms.clients.users import Users
from tests.simulation.storms.clients.workload import (
    DURABLE,
    SHRINKING,
    SYNCED,
    ProducerSettings,
    Workload,
    read_as_kafkas_do,
    read_everything,
)
from tests.simulation.storms.faults import operations_reassign
from tests.simulation.storms.faults.faults import (
    FAULTS,
    FAULTS_OF_DISKS,
    KEPT_IN_EVERY_STORM,
    POWER_OF_SEVERAL,
    WORSE_ALONE,
)
from tests.simulation.storms.faults.operations_configs import settings_not_heard_of
from tests.simulation.storms.faults.operations_elect import REBALANCE_INTERVALS_S
from tests.simulation.storms.faults.operations_topics import TOPIC as GROWING
from tests.simulation.storms.faults.operations_topics import Growing
from tests.simulation.storms.verdicts.history import Acknowledged, Anomaly, History, Sent, TopicIdPartition, check
from tests.simulation.storms.verdicts.invariants import Invariants

LIVENESS_S = 60.0
"""So long after the last fault everything must be whole: RELIABILITY's bound."""

LEAST_FAULTS = 15
LEAST_ACKNOWLEDGED = 1_000
LEAST_LEADER_CHANGES = 3
LEAST_UNCLEAN_RESTARTS = 1
_FLOORS_ARE_FOR_S = 180.0
_MORE_S = 20.0
"""By so much a storm goes on, again and again, that is behind the floor of acknowledged records."""

AMBUSH_S = 20.0
MAX_CHANGES_A_SECOND = 30
"""Of a partition's state. Faults cause a few; more is a leader or controller that does and undoes."""

MAX_CHANGES_BY_A_LINK = 12
"""How often the controller, and each partition's leader epoch, may change while a link between two brokers is broken
and all else is well."""

_BROKERS = [2, 3, 3, 3, 3, 3, 3, 4]
_REASSIGNS_TO_ONE_PROBABILITY = 0.3
_POWER_OF_SEVERAL_PROBABILITY = 1 / 8
_LONG_LINK_PROBABILITY = 1 / 8
_LONG_LINK_OF_TWO_PROBABILITY = 1 / 2
"""With no third broker to lead, the two depose each other."""
_LONG_LINK_S = (60, 150)
_LONGEST_FAULT_S = 45.0
_TWO_LOG_DIRS_PROBABILITY = 0.4
_LOOK_EVERY_S = 0.1
_GROWING_STATES = f"{znodes.TOPICS}/{GROWING}/partitions/"

_TIMELINE_LENGTH = 400


@dataclass
class Report:
    """How a storm went."""

    seed: int
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    """What else was drawn, and which ambushes struck, by class."""
    acknowledged: int = 0
    leader_changes: int = 0
    """While a producer waited for that partition's answer."""
    unclean_restarts: int = 0
    lost_with_acks_1: int = 0
    """Legal, and seen."""
    lost_with_power: int = 0
    """Acknowledged with acks=all, and gone with the power of all that had it: legal, and counted."""
    recovery_s: float = 0.0
    """From the last fault until everything was whole again."""
    anomalies: list[Anomaly] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)
    trace: str = ""

    def below_floors(self) -> list[str]:
        """Which of the floors this storm did not reach: it was too mild to say much."""
        floors = (
            ("faults", self.faults.total(), LEAST_FAULTS),
            ("acknowledged records", self.acknowledged, LEAST_ACKNOWLEDGED),
            ("leader changes with produce in flight", self.leader_changes, LEAST_LEADER_CHANGES),
            ("unclean restarts", self.unclean_restarts, LEAST_UNCLEAN_RESTARTS),
        )
        return [f"{value} {name}, at least {least} are due" for name, value, least in floors if value < least]


def simulate(
    seed: int,
    minutes: float,
    is_enough: Callable[[Anomaly], bool] | None = None,
    kind: type[Storm] | None = None,
) -> Report:
    """A whole storm of so many virtual minutes, or up to the first anomaly that is enough. Never raises for what goes
    wrong in it: that is an anomaly."""
    report = Report(seed)
    dice = Random(f"{seed} storm")
    limit_s = minutes * 60 + 600
    usual = steps.PARTITIONS_AT_ONCE
    steps.PARTITIONS_AT_ONCE = dice.choice([1, 2, usual])  # a topic of a few partitions comes as one of thousands
    try:
        storm = _storm(kind or Storm, report, dice, minutes * 60, is_enough)
        run(storm, seed=seed, limit_s=limit_s, shuffle=dice.random() < 0.7)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict on this seed
        if is_enough is None or not any(map(is_enough, report.anomalies)):  # else the storm has stopped the loop
            report.anomalies.append(Anomaly("failed", "; ".join(_flat(error))))
    finally:
        steps.PARTITIONS_AT_ONCE = usual
    return report


async def _storm(
    kind: type[Storm], report: Report, dice: Random, seconds: float, is_enough: Callable[[Anomaly], bool] | None
) -> None:
    storm = kind(report, dice, is_enough)
    try:
        with storm.shrinking.watched(), storm.compacting.watched(), storm.groups.watched():
            await storm.run(seconds)
    finally:
        report.virtual_s = storm.simulation.loop.time()
        report.trace = storm.simulation.loop.trace


class Change(NamedTuple):
    """What ZooKeeper says of a partition has changed."""

    before: LeaderAndIsr
    after: LeaderAndIsr


class Storm:
    def __init__(self, report: Report, dice: Random, is_enough: Callable[[Anomaly], bool] | None = None) -> None:
        self._is_enough = is_enough
        self.simulation = Simulation()
        self.report = report
        self.dice = dice
        self.settings = _broker_settings(dice) | {
            "leader.imbalance.check.interval.seconds": str(
                Random(f"{report.seed} rebalance").choice(REBALANCE_INTERVALS_S)
            )
        }
        brokers = dice.choice(_BROKERS)
        self.settings |= group_settings(Random(f"{report.seed} coordinators"), brokers)
        self.settings |= bookkeeping_settings(Random(f"{report.seed} offsets retention"))
        self.log_dirs = 2 if Random(f"{report.seed} log dirs").random() < _TWO_LOG_DIRS_PROBABILITY else 1
        self.cluster = VirtualCluster(
            self.simulation,
            brokers,
            self.settings,
            on_broker_failure=self._broker_failed,
            log_dirs=self.log_dirs,
        )
        self.session_timeout_s = int(self.settings["zookeeper.session.timeout.ms"]) / 1_000
        self.partitions = [TopicPartition(f"{DURABLE}-0", p) for p in range(dice.randint(1, 3))]
        if dice.random() < 0.5:
            self.partitions.append(TopicPartition(f"{DURABLE}-1", 0))
        if Random(f"{report.seed} synced").random() < 0.5:
            self.partitions.append(TopicPartition(SYNCED, 0))
        self.partitions.append(TopicPartition("fast", 0))
        self._history = History(
            frozenset(p.topic for p in self.partitions if p.topic.startswith(DURABLE)) | {SHRINKING}
        )
        self.shrinking = Shrinking(
            self.cluster,
            Random(f"{report.seed} shrinking"),
            self._history.deleted,
            event=self.event,
            accuse=self.accuse,
        )
        self.partitions += self.shrinking.partitions
        self.workload = Workload(self.cluster, self._history)
        self.rebirth = Rebirth(self, Random(f"{report.seed} rebirth"))
        self.users = Users(self.cluster, self.workload.acknowledged_end, event=self.event, accuse=self.accuse)
        self.growing = Growing(self, Random(f"{report.seed} growing"))
        self.compacting = Compacting(
            self.cluster,
            Random(f"{report.seed} compacting"),
            self.workload,
            event=self.event,
            accuse=self.accuse,
        )
        self.groups = Groups(self, Random(f"{report.seed} groups"))
        self.bookkeepers = Bookkeepers(self, Random(f"{report.seed} bookkeepers"))
        self.workload.guests += [self.users, self.compacting, self.groups, self.bookkeepers]
        self._all_partitions = [*self.partitions, *self.compacting.partitions, *self.users.partitions]
        self._invariants = Invariants(
            self.cluster, self.rebirth.committed, self.shrinking.decided, self.shrinking.promised
        )
        self._topic_ids: dict[str, str] = {}
        """Of the topics that stay."""
        self.on_start: list[Callable[[int], None]] = []
        """Called with a broker's id at the moment at which its process begins."""
        self.before_write: list[Callable[[VirtualSession, Sequence[Operation]], None]] = []
        """Called for every write at the moment at which ZooKeeper is about to carry it out. To raise is to refuse."""
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._down = {broker_id: asyncio.Event() for broker_id in self.cluster.broker_ids}
        self._restart_after_s = dict.fromkeys(self.cluster.broker_ids, 0.0)
        self.busy: set[int] = set()
        """Brokers that a fault of a whole process has in hand: no other may touch them meanwhile."""
        self.damaged: set[int] = set()
        """Brokers that had a power cut and have not caught up with everything since, or may have to cut what another's
        has taken, or have rotten pages."""
        self.powerless: set[int] = set()
        """Those of them that had it themselves."""
        self._growing_states: dict[TopicPartition, LeaderAndIsr] = {}
        """Their partitions come one by one, so that they are in no `leadership`."""
        self.content_with_one: set[str] = set()
        """Topics with more than two replicas of which acks=all needs, or once needed, only one."""
        self.losses_of_power = 0
        """How often no broker may have kept its power that had everything, of whatever topic: what was stored before
        that may be gone."""
        self.rotten: set[int] = set()
        """Brokers that have rotten pages now."""
        self._bad_disks: Counter[int] = Counter()
        """How many faults the disks of brokers have now."""
        self._hurt: set[int] = set()
        """Brokers whose disks had a fault since their last start: they may fail by themselves."""
        self.lose_next_reply_of: set[str] = set()
        """Hosts whose next write in ZooKeeper is to be carried out without an answer."""
        self.reassigned = False
        """Partitions may have other replicas than one on each broker."""
        self.is_changing_late = False
        """A change of settings is under way whose old requests may yet come."""
        self._faults: set[asyncio.Task[None]] = set()
        self._weights = self._draw_weights()
        self.reassigns_to_one = self.dice.random() < _REASSIGNS_TO_ONE_PROBABILITY
        """Partitions may have one replica alone. What that has is gone with its disk, so no disk fails then."""
        if self.reassigns_to_one:
            self._weights |= dict.fromkeys(FAULTS_OF_DISKS, 0.0)
        if self.bookkeepers.expires:
            self._weights |= dict.fromkeys(CLOCK_FAULTS, 0.0)
        self._reported: set[str] = set()
        self.leadership: dict[str, tuple[TopicPartition, LeaderAndIsr]] = {}
        """What the state znodes of the partitions hold, by their paths."""
        self.led_since_s: dict[TopicPartition, float] = {}
        """Since when partitions have been in their leader epochs, if that was not from the beginning on."""
        self._changed_at_s: dict[str, deque[float]] = {}
        """When the latest MAX_CHANGES_A_SECOND changes of the state at a path were."""
        self._changes: Ambushes[Change] = Ambushes()

    # -- the course of it --

    async def run(self, seconds: float) -> None:
        await self.cluster.start()
        await self._create_topics()
        if self.groups.names or self.bookkeepers.names:
            await self.groups.create_offsets_topic()
            self._all_partitions += self.groups.partitions
        self.leadership = {znodes.state_path(p): (p, self.cluster.state(p)) for p in self._all_partitions}
        self._topic_ids = {p.topic: self._topic_id(p.topic) for p in self._all_partitions}
        self.simulation.zookeeper.before = self._about_to_write
        self.simulation.zookeeper.after = self._written
        watching = asyncio.create_task(self._watch_invariants(), name="invariants")
        self._keepers = {b: asyncio.create_task(self._keep(b), name=f"keeper of {b}") for b in self.cluster.broker_ids}
        self._start_clients()
        await self.rebirth.begin()
        of_two = len(self.cluster.broker_ids) == 2
        probability = _LONG_LINK_OF_TWO_PROBABILITY if of_two else _LONG_LINK_PROBABILITY
        end_s = self._now_s + seconds
        if self.dice.random() < probability:
            is_well = await self._bear_a_broken_link(min(self.dice.uniform(*_LONG_LINK_S), seconds / 2))
            end_s = self._now_s + (seconds if is_well else 0)
        longest_s = end_s + seconds
        while self._now_s < end_s:
            await self._bout(min(self._now_s + self.dice.uniform(15, 45), end_s))
            if self.dice.random() < 0.5:
                await self._heal()
                if not await self._becomes_whole() or not await self._bear_a_lone_fault():
                    break
            self.note("quiet")
            await asyncio.sleep(min(self.dice.uniform(5, 15), max(0.0, end_s - self._now_s)))
            if self._now_s >= end_s and self._acknowledged() < LEAST_ACKNOWLEDGED * seconds / _FLOORS_ARE_FOR_S:
                end_s = min(self._now_s + _MORE_S, longest_s)  # a slow network has held it up, say
        await self._heal()
        await self._recover()
        watching.cancel()
        self.look()
        self._judge()

    def _acknowledged(self) -> int:
        return sum(map(len, self._history.acknowledged.values()))

    async def _bout(self, end_s: float) -> None:
        """Faults one after the other, each for a while, until the end; those under way then go on."""
        self.rebirth.bout(end_s)
        mean_s = self.dice.choice([1.0, 2.0, 3.0])
        kinds = sorted(self._weights)
        weights = [self._weights[kind] for kind in kinds]
        while True:
            await asyncio.sleep(self.dice.expovariate(1 / mean_s))
            if self._now_s >= end_s:
                return
            [kind] = self.dice.choices(kinds, weights)
            self.begin(self._inflict(kind), kind)

    def begin(self, fault: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """It goes on until it ends, or all is healed."""
        task = asyncio.create_task(fault, name=name)
        self._faults.add(task)
        task.add_done_callback(self._fault_ended)
        return task

    async def _bear_a_lone_fault(self) -> bool:
        """What one fault has spoilt, the next one often mends, since it makes all begin anew. So now and then one
        comes alone. Returns whether all is well afterwards."""
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
        """Two brokers do not reach each other, or one does not reach the other, and all else is well. Returns
        whether all is well afterwards, too."""
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
        for what, epoch in epochs().items():
            if epoch - before[what] > MAX_CHANGES_BY_A_LINK:
                times = epoch - before[what]
                self.accuse(Anomaly("a broken link", f"{what} changed {times} times in {seconds:.0f} s"))
        for link in links:
            network.unblock(*link)
        self.note(f"{one} and {other} reach each other")
        return await self._becomes_whole()

    async def _inflict(self, kind: str) -> None:
        await FAULTS[kind](self)

    def _fault_ended(self, task: asyncio.Task[None]) -> None:
        self._faults.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.accuse(Anomaly("the storm itself failed", f"{task.get_name()}: {error!r}"))

    async def _heal(self) -> None:
        """End every fault: each undoes what it has done."""
        while self._faults:
            for fault in sorted(self._faults, key=lambda task: task.get_name()):
                fault.cancel()
            await asyncio.wait(sorted(self._faults, key=lambda task: task.get_name()))
        self.note("healed")

    async def _recover(self) -> None:
        """Everything must be whole again in time: brokers, ISRs, producers, topics; then every log is read."""
        healed_s = self._now_s
        if not await self._becomes_whole():
            return
        doing = ""
        try:
            async with asyncio.timeout(LIVENESS_S):
                doing = "an acknowledgement from each partition"
                probe = self.cluster.client("probe")
                await probe.process.run(_produce_to_each(self.cluster.bootstrap, probe, self._history, self.partitions))
            self.report.recovery_s = self._now_s - healed_s
            for in_vain in await self.rebirth.recover():
                self.accuse(Anomaly("not live", f"after healing, in vain awaited {in_vain}"))
            doing = "the end of all deliveries"
            async with asyncio.timeout(150):
                await asyncio.gather(self.workload.finish(), self.compacting.finish(), self.users.finish())
            self.shrinking.end()
            doing = "what was written to a topic that grows"
            await self.growing.finish(LIVENESS_S)
            doing = "that groups share and commit everything"
            await self.groups.finish()
            doing = "what is kept for groups without members"
            await self.bookkeepers.finish()
            doing = "equal high watermarks and log ends, and log starts that are those of leaders"
            await self.cluster.until(self._is_settled, within_s=LIVENESS_S)
            doing = "the final read"
            async with asyncio.timeout(LIVENESS_S):
                reader = self.cluster.client("reader")
                await reader.process.run(
                    read_everything(self.cluster.bootstrap, reader, self.partitions, self._history)
                )
                await reader.process.run(self.compacting.read_back(reader))
                await self.users.read_back()
            doing = "the final read of a client of Kafka's"
            async with asyncio.timeout(LIVENESS_S):
                versions = Random(f"{self.report.seed} kafka's reader").choice(VERSIONS)
                for text in await reader.process.run(
                    read_as_kafkas_do(self.cluster.bootstrap, reader, versions, self._history)
                ):
                    self.accuse(Anomaly("two dialects, two logs", text))
            await self.users.look_at_topics()
        except TimeoutError:
            self.accuse(Anomaly("not live", f"after healing, in vain awaited {doing}: {self._condition()}"))

    async def _becomes_whole(self) -> bool:
        """After everything was healed: all brokers up, and all replicas in sync."""
        try:
            await operations_reassign.restore(self)
        except TimeoutError as in_vain:
            self.accuse(Anomaly("not live", f"after healing, in vain awaited {in_vain}: {self._condition()}"))
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
        report.lost_with_acks_1 = self._history.lost_with_acks_1()
        report.lost_with_power = self._history.lost_with_power()
        for text in self.workload.unexpected:
            self.accuse(Anomaly("a client crashed", text))
        if not report.anomalies:  # a history that was not read to its end says nothing
            for anomaly in (
                *check(self._history),
                *self.compacting.judge(),
                *self.users.judge(),
                *self.groups.judge(),
                *self.bookkeepers.judge(),
            ):
                self.accuse(anomaly)
        for anomaly in self.rebirth.judge():
            self.accuse(anomaly)

    # -- what is there in the beginning --

    async def _create_topics(self) -> None:
        world = self.cluster.client("admin")
        configs = {SHRINKING: self.shrinking.configs, SYNCED: {"durability": "synced"}}
        if Random(f"{self.report.seed} format").random() < 0.3:
            configs[f"{DURABLE}-0"] = {"record.format": "kafka"}

        async def create() -> None:
            async with Admin(self.cluster.bootstrap, world=world) as admin:
                for topic in dict.fromkeys(partition.topic for partition in self.partitions):
                    count = sum(partition.topic == topic for partition in self.partitions)
                    await admin.create_topic(
                        topic,
                        partitions=count,
                        replication_factor=len(self.cluster.broker_ids),
                        configs=configs.get(topic),
                    )
                if self.compacting.partitions:
                    await admin.create_topic(
                        COMPACTED,
                        partitions=1,
                        replication_factor=len(self.cluster.broker_ids),
                        configs=self.compacting.configs,
                    )
                await self.users.create_topics(admin)

        await world.process.run(create())

    def _start_clients(self) -> None:
        dice = self.dice
        topics = list(dict.fromkeys(partition.topic for partition in self.partitions))
        producers = [*topics, *dice.choices(topics, k=dice.randint(0, 2))]
        for number, topic in enumerate(producers):
            settings = ProducerSettings(
                topic=topic,
                partitions=sum(partition.topic == topic for partition in self.partitions),
                records_per_s=dice.choice([3, 5, 10]),
                max_value_bytes=dice.choice([20, 200, 2_000]),
                compression=dice.choice(["none", "none", "lz4", "zstd"]),
                linger_ms=dice.choice([0, 0, 5, 100]),
                delivery_timeout_ms=dice.choice([5_000, 20_000, 120_000]),
                request_timeout_ms=dice.choice([1_000, 5_000, 30_000]),
                sends_batches=number % 2 == 1,
            )
            self.workload.start_producer(f"producer-{number}", settings)
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

    def _start_clients_of_kafka(self, topics: list[str], lasting: list[TopicPartition]) -> None:
        """Two storms in three have some: a producer or two, a consumer or two."""
        dice = Random(f"{self.report.seed} kafka")
        if dice.random() < 1 / 3:
            return
        for number in range(dice.randint(1, 2)):
            topic = dice.choice(topics)
            settings = ProducerSettings(
                topic=topic,
                partitions=sum(partition.topic == topic for partition in self.partitions),
                records_per_s=dice.choice([3, 5, 10]),
                max_value_bytes=dice.choice([20, 200, 2_000]),
                compression=dice.choice(["none", "gzip", "snappy", "lz4", "zstd"]),
                linger_ms=dice.choice([0, 5, 100, 500]),
                delivery_timeout_ms=dice.choice([5_000, 20_000, 120_000]),
                request_timeout_ms=dice.choice([1_000, 5_000, 30_000]),
                versions=dice.choice(VERSIONS),
            )
            self.workload.start_producer(f"kafka-producer-{number}", settings)
        for number in range(dice.randint(1, 2)):
            self.workload.start_consumer(f"kafka-consumer-{number}", lasting, dice.choice(VERSIONS))

    def _draw_weights(self) -> dict[str, float]:
        """Which faults this storm is made of: some are left out, some are frequent."""
        weights = {kind: self.dice.choice([0.0, 0.0, 1.0, 1.0, 3.0]) for kind in FAULTS}
        weights |= {kind: self.dice.choice([2.0, 4.0]) for kind in KEPT_IN_EVERY_STORM}
        is_drawn = self.dice.random() < _POWER_OF_SEVERAL_PROBABILITY
        return weights | {POWER_OF_SEVERAL: 3.0 if is_drawn else 0.0}

    @property
    def cuts_power_of_several(self) -> bool:
        """The power of several hosts may be cut at once."""
        return self._weights[POWER_OF_SEVERAL] > 0

    # -- brokers --

    async def _keep(self, broker_id: int) -> None:
        """Start the broker again whenever it is down, after the time that its fault has set."""
        while True:
            await self._down[broker_id].wait()
            await asyncio.sleep(self._restart_after_s[broker_id])
            while not await self._start(broker_id):
                await asyncio.sleep(0.5)

    async def _start(self, broker_id: int) -> bool:
        self._down[broker_id].clear()
        if not self._bad_disks[broker_id]:
            self._hurt.discard(broker_id)
        self.simulation.loop.call_soon(self._starts, broker_id)
        try:
            await self.cluster.start_broker(broker_id)
        except ProcessKilled:
            return not self._down[broker_id].is_set()
        except (MinibrokerError, OSError) as error:
            self.note(f"broker {broker_id} did not start: {error}")
            self._down[broker_id].set()
            return False
        self.note(f"broker {broker_id} is up")
        return True

    def _starts(self, broker_id: int) -> None:
        for hook in list(self.on_start):
            hook(broker_id)

    def take_down(self, broker_id: int, how: Callable[[int], None], *, restart_after_s: float | None = None) -> None:
        if restart_after_s is None:
            restart_after_s = self.dice.choice([0.0, 0.2, 1.0, 5.0, 15.0]) * self.dice.random()
        self._restart_after_s[broker_id] = restart_after_s
        how(broker_id)
        self._down[broker_id].set()
        self.report.unclean_restarts += 1

    def cut_power(self, broker_ids: Sequence[int], *, restart_after_s: float | None = None) -> None:
        """The hosts of these brokers lose their power at the same moment: see the essay for when that is fair."""
        there = [*self._all_partitions, *self.growing.partitions()]
        exposed = [partition for partition in there if self._may_lose(partition, broker_ids)]
        self.damaged.update(broker_ids)
        self.powerless.update(broker_ids)
        for broker_id in broker_ids:
            self.take_down(broker_id, self.cluster.power_cut, restart_after_s=restart_after_s)
        if len(broker_ids) > 1 or len(self.cluster.broker_ids) == 2:
            self.losses_of_power += 1
            self.rebirth.power_lost()
        if not exposed:
            return
        self._expose(exposed)

    def _expose(self, exposed: Sequence[TopicPartition]) -> None:
        """No broker is left that had everything of these partitions."""
        self.event("power of all that had everything cut")
        self.note(f"no broker that had everything has kept its power: {', '.join(map(str, exposed))}")
        self.damaged.update(self.cluster.broker_ids)  # those that are left may have to be cut back
        self.workload.exposed.update(exposed)
        self._forgive(exposed)

    def _is_left_to_victims(self, partition: TopicPartition, before: LeaderAndIsr, after: LeaderAndIsr) -> bool:
        """Of those of which acks=all needs one, the controller has put out whoever had kept its power."""
        if not self._needs_one(partition) or partition.topic == SYNCED:
            return False
        kept, left = (
            [member for member in (*state.in_sync_members, *state.eligible_members) if self._has_kept_its_power(member)]
            for state in (before, after)
        )
        return bool(kept) and not left

    def _needs_one(self, partition: TopicPartition) -> bool:
        """What is acknowledged with acks=all may be in one replica alone."""
        factor = operations_reassign.assignment(self, partition).replication_factor
        return (
            factor <= 2
            or partition.topic in self.content_with_one
            or operations_reassign.is_promised_by_one(self, partition, self.cluster.state(partition))
        )

    def _has_kept_its_power(self, member: Member) -> bool:
        is_dead_victim = member.broker_id in self.powerless and self.cluster.living_broker(member.broker_id) is None
        return not is_dead_victim and self._has_lost_nothing(member)

    def _forgive(self, exposed: Collection[TopicPartition]) -> None:
        """What was acknowledged and read of these partitions up to now may be lost."""
        for broker_id in self.cluster.broker_ids:
            for client in self.workload.names:  # what it was told before, and hears later, must not count as later
                self.simulation.network.reset(client, host_name(broker_id))
        self._history.power_lost(exposed, self._now_s)
        self._invariants.power_lost(exposed)
        self.workload.power_lost(exposed)
        self.users.forgive(exposed)
        self.growing.forgive(exposed)
        self.shrinking.forgive(exposed)
        self.groups.forgive(exposed)
        if not set(exposed).isdisjoint(self.groups.partitions):
            self.bookkeepers.forgive()
        if not set(exposed).isdisjoint(self.compacting.partitions):
            self.compacting.forgive()

    def _may_lose(self, partition: TopicPartition, victims: Sequence[int]) -> bool:
        state = self.cluster.state(partition)
        members = [*state.in_sync_members, *state.eligible_members]
        if len(victims) == 1 and not self._needs_one(partition):
            return False
        if partition.topic == SYNCED:
            return not any(self._has_lost_nothing(member, flushed=True) for member in members)
        return not any(
            member.broker_id not in victims and member.broker_id not in self.damaged and self._has_lost_nothing(member)
            for member in members
        )

    def _has_lost_nothing(self, member: Member, *, flushed: bool = False) -> bool:
        """It has lost nothing, or nothing that was flushed, since it was known to have everything. (A bad disk may have
        torn a log.)"""
        broker = self.cluster.living_broker(member.broker_id)
        if broker is None:
            return member.broker_id not in self._hurt
        if broker._logs.offline:
            return False  # the replica may be there
        since = broker._logs.synced_since if flushed else broker._logs.trusted_since
        return znodes.SINCE_THIS_REGISTRATION != since <= member.epoch

    def _broker_failed(self, broker_id: int, error: Exception) -> None:
        self.note(f"broker {broker_id} failed: {error}")
        if broker_id not in self._hurt:
            self.accuse(Anomaly("a broker failed by itself", f"broker {broker_id}: {'; '.join(_flat(error))}"))
        self._restart_after_s[broker_id] = self.dice.uniform(0, 3)
        self._down[broker_id].set()
        self.report.unclean_restarts += 1

    @contextmanager
    def hold(self, broker_id: int) -> Iterator[None]:
        """No other fault of whole processes may take this broker meanwhile."""
        self.busy.add(broker_id)
        try:
            yield
        finally:
            self.busy.discard(broker_id)

    async def stop(self, broker_id: int, *, restart_after_s: float | None = None) -> None:
        """Stop a broker in good order; its keeper starts it again."""
        try:
            async with asyncio.timeout(30):
                await self.cluster.stop_broker(broker_id)
        except (TimeoutError, MinibrokerError, OSError, ProcessKilled) as error:
            self.note(f"broker {broker_id} could not be stopped in good order: {error!r}")
            self.take_down(broker_id, self.cluster.kill_broker)
            return
        except asyncio.CancelledError:
            self.take_down(broker_id, self.cluster.kill_broker)  # in the middle of its stop
            raise
        self._restart_after_s[broker_id] = self.dice.uniform(0, 5) if restart_after_s is None else restart_after_s
        self._down[broker_id].set()

    @contextmanager
    def bad_disk(self, broker_id: int) -> Iterator[DiskFaults]:
        """The faults of a broker's disk, which the broker may die of; all are over in the end."""
        faults = self.simulation.host(host_name(broker_id)).disk.faults
        self._bad_disks[broker_id] += 1
        self._hurt.add(broker_id)
        try:
            yield faults
        finally:
            self._bad_disks[broker_id] -= 1
            faults.clear()

    @contextmanager
    def slow_zookeeper(self, hosts: Sequence[str], high_s: float) -> Iterator[None]:
        """Each request and each answer of these hosts takes up to so long."""
        slow = self.simulation.zookeeper.slow_hosts
        slow.update(dict.fromkeys(hosts, (high_s / 10, high_s)))
        try:
            yield
        finally:
            for host in hosts:
                slow.pop(host, None)

    async def next_change(self, is_wanted: Callable[[LeaderAndIsr, LeaderAndIsr], bool]) -> Change | None:
        """The next change of a partition's state (before, after) that is wanted; returns at the very moment at which
        ZooKeeper has carried it out. None: there was none for AMBUSH_S."""
        return await self._changes.next(AMBUSH_S, lambda change: is_wanted(*change))

    def strikable(self, broker_id: int) -> bool:
        """Its process lives, even if it is only just starting, and no fault has it in hand."""
        return broker_id not in self.busy and self.cluster.process(broker_id).alive

    def idle_brokers(self) -> list[int]:
        """Those that live and that no fault has in hand."""
        return [b for b in self.cluster.broker_ids if b not in self.busy and self.cluster.living_broker(b) is not None]

    def some_broker(self) -> int | None:
        idle = self.idle_brokers()
        return self.dice.choice(idle) if idle else None

    def leader(self) -> int | None:
        """The leader of some partition, with something in flight to it if there is one."""
        partitions = self.dice.sample(self.partitions, len(self.partitions))
        for partition in sorted(partitions, key=lambda p: not self.workload.has_in_flight(p)):
            leader = self.cluster.state(partition).leader
            if leader in self.idle_brokers():
                return leader
        return None

    # -- what is watched --

    @property
    def _now_s(self) -> float:
        return self.simulation.loop.now_s

    def note(self, text: str) -> None:
        self.report.timeline.append(f"{self._now_s:10.3f} s  {text}")
        del self.report.timeline[:-_TIMELINE_LENGTH]

    def event(self, kind: str) -> None:
        """Something of this class was drawn and has happened (an ambush: has struck): see the summary of a run."""
        self.report.events[kind] += 1

    def count(self, kind: str, text: str) -> None:
        self.report.faults[kind] += 1
        self.note(f"{kind}: {text}")

    def accuse(self, anomaly: Anomaly) -> None:
        if str(anomaly) not in self._reported and len(self._reported) < 20:
            self._reported.add(str(anomaly))
            self.report.anomalies.append(anomaly)
            self.note(f"ANOMALY {anomaly}")
            if self._is_enough is not None and self._is_enough(anomaly):
                self.simulation.loop.stop()  # not by a task, so that up to here it is the same storm as always

    async def _watch_invariants(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        is_harmed = bool(self.damaged or self._hurt)
        reborn_ends, lossy_topic_ids = self.rebirth.look(is_harmed=is_harmed)
        ends = {
            TopicIdPartition(self._topic_ids[partition.topic], partition): end
            for partition, end in self.workload.acknowledged_end.items()
        }
        for anomaly in self._invariants.look(ends | reborn_ends, self.damaged, lossy_topic_ids):
            self.accuse(anomaly)
        self._start_anew_where_a_disk_was_mended()
        # From the next look on: what it had to cut was cut since the last one.
        for broker_id in sorted(self.damaged - self.rotten):
            if self._has_caught_up(broker_id):
                self.damaged.discard(broker_id)
                self.powerless.discard(broker_id)
                self.note(f"broker {broker_id} has caught up after its power cut")
        if self.workload.exposed and not self.damaged:
            self._forgive(sorted(self.workload.exposed))
            self.workload.exposed.clear()

    def _start_anew_where_a_disk_was_mended(self) -> None:
        """As somebody does who looks at `status`: a log directory that is offline stays so until the next start."""
        for broker_id in self.idle_brokers():
            broker = self.cluster.living_broker(broker_id)
            if broker is None or self._bad_disks[broker_id]:
                continue
            if broker._logs.offline:
                self.event("a broker goes on without a log directory, and is started anew")
                self.note(f"broker {broker_id} is started anew: {broker._logs.offline}")
                self.take_down(broker_id, self.cluster.kill_broker)

    def _has_caught_up(self, broker_id: int) -> bool:
        """It is in every ISR again *and* holds all that was acknowledged."""
        broker = self.cluster.living_broker(broker_id)
        if broker is None or broker._replicas is None:
            return False
        for topic_partition in self._all_partitions:
            if broker_id not in operations_reassign.assignment(self, topic_partition).replicas:
                continue
            partition = broker._replicas.partitions.get(topic_partition)
            if (
                partition is None
                or not self.is_in_sync(broker_id, topic_partition)
                or partition.high_watermark < self.workload.acknowledged_end[topic_partition]
            ):
                return False
        return self.rebirth.has_caught_up(broker_id) and self.growing.has_caught_up(broker_id)

    def is_in_sync(self, broker_id: int, partition: TopicPartition) -> bool:
        """It is in the ISR, and not only in that of before its power cut: what it had then, it may not have now."""
        members = self.cluster.state(partition).in_sync_members
        return any(m.broker_id == broker_id and self._has_lost_nothing(m) for m in members)

    def _topic_id(self, topic: str) -> str:
        return znodes.decode_topic(topic, self.simulation.zookeeper.data(znodes.topic_path(topic))).topic_id

    def _about_to_write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        for hook in list(self.before_write):
            hook(session, operations)

    def _written(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        """A hook of the simulated ZooKeeper, which has just carried out a write: sees every change of a leader."""
        host, _, _ = session.owner.partition("#")
        if host in self.lose_next_reply_of:
            self.lose_next_reply_of.discard(host)
            self.simulation.zookeeper.lose_connections(host)
        self.rebirth.written(operations)
        for operation in operations:
            if isinstance(operation, SetData) and operation.path in self.leadership:
                self._state_changed(operation.path, operation.data)
            elif isinstance(operation, SetData) and operation.path == znodes.topic_config_path(SHRINKING):
                self.shrinking.settings_written(operation.data)
            elif isinstance(operation, Create | SetData) and operation.path.startswith(_GROWING_STATES):
                self._growing_changed(operation.path, operation.data)
            elif isinstance(operation, SetData) and operation.path.startswith(f"{znodes.TOPICS}/"):
                for partition, state in self.leadership.values():
                    for anomaly in operations_reassign.members_without_a_replica(self, partition, state):
                        self.accuse(anomaly)

    def _growing_changed(self, path: str, data: bytes) -> None:
        if not path.endswith("/state"):
            return
        partition = TopicPartition(GROWING, int(path.removeprefix(_GROWING_STATES).partition("/")[0]))
        state = znodes.decode_state(partition, data, 0)
        before = self._growing_states.get(partition)
        self._growing_states[partition] = state
        if before is not None and self._is_left_to_victims(partition, before, state):
            self._expose([partition])

    def _state_changed(self, path: str, data: bytes) -> None:
        partition, before = self.leadership[path]
        state = znodes.decode_state(partition, data, 0)
        self.leadership[path] = (partition, state)
        for anomaly in (
            *self._invariants.state_written(partition, before, state),
            *operations_reassign.members_without_a_replica(self, partition, state),
        ):
            self.accuse(anomaly)
        changed_at_s = self._changed_at_s.setdefault(path, deque(maxlen=MAX_CHANGES_A_SECOND))
        if len(changed_at_s) == MAX_CHANGES_A_SECOND and self._now_s - changed_at_s[0] < 1:
            self.accuse(Anomaly("a state flaps", f"{partition} changed {MAX_CHANGES_A_SECOND} times within a second"))
        changed_at_s.append(self._now_s)
        if state.leader_epoch != before.leader_epoch:
            self.led_since_s[partition] = self._now_s
        if self._is_left_to_victims(partition, before, state):
            self._expose([partition])
        self._changes.strike(Change(before, state))
        if state.leader not in (before.leader, NO_LEADER):
            self.report.leader_changes += self.workload.has_in_flight(partition)
        self.note(
            f"{partition}: leader {state.leader}, epoch {state.leader_epoch}, ISR {list(state.isr)}"
            f" (was {before.leader}, {before.leader_epoch}, {list(before.isr)})"
        )

    def _is_whole(self) -> bool:
        return (
            all(self.cluster.living_broker(broker_id) is not None for broker_id in self.cluster.broker_ids)
            and all(
                state.leader != NO_LEADER and len(state.isr) == len(self.cluster.broker_ids)
                for state in map(self.cluster.state, self._all_partitions)
            )
            and not settings_not_heard_of(self)
            and not self.simulation.zookeeper.has(znodes.PREFERRED_REPLICA_ELECTION)
            and self.rebirth.is_whole()
            and self.growing.is_whole()
        )

    def _is_settled(self) -> bool:
        """All replicas of a partition end at the same offset, know that all of it is committed, and have deleted what
        their leader has. One may have deleted more: it was deposed while it was paused, and had not heard of it yet."""
        leads = {partition: self.cluster.state(partition).leader for partition in self._all_partitions}
        return all(len(set(ends)) == 1 for ends in self._ends().values()) and all(
            bool(of_replicas) and of_replicas.get(leads[partition]) == min(of_replicas.values())
            for partition, of_replicas in self._begins().items()
        )

    def _begins(self) -> dict[TopicPartition, dict[int, int]]:
        """Log starts of all replicas, by broker; of one that is not there, none."""
        begins: dict[TopicPartition, dict[int, int]] = {partition: {} for partition in self._all_partitions}
        for broker_id in self.cluster.broker_ids:
            broker = self.cluster.living_broker(broker_id)
            if broker is not None and broker._replicas is not None:
                for topic_partition, of_replicas in begins.items():
                    partition = broker._replicas.partitions.get(topic_partition)
                    if partition is not None:
                        of_replicas[broker_id] = partition.log.log_start_offset
        return begins

    def _ends(self) -> dict[TopicPartition, list[int]]:
        """Log ends and high watermarks of all replicas; -1 for one that is not there."""
        ends: dict[TopicPartition, list[int]] = {partition: [] for partition in self._all_partitions}
        for broker_id in self.cluster.broker_ids:
            broker = self.cluster.living_broker(broker_id)
            for topic_partition in self._all_partitions:
                partition = None
                if broker is not None and broker._replicas is not None:
                    partition = broker._replicas.partitions.get(topic_partition)
                ends[topic_partition] += (
                    [-1] if partition is None else [partition.log.log_end_offset, partition.high_watermark]
                )
        return ends

    def _condition(self) -> str:
        states = (f"{partition} {self.cluster.state(partition)}" for partition in self._all_partitions)
        return (
            f"brokers {self.cluster.living()} live; log starts {self._begins()}, ends {self._ends()}; "
            f"{'; '.join(states)}; "
            f"settings that were not heard of: {settings_not_heard_of(self)}; "
            f"{self.rebirth.condition()}"
        )


async def _produce_to_each(
    bootstrap: str, world: World, history: History, partitions: Sequence[TopicPartition]
) -> None:
    """The producer of a user who comes after the storm."""
    async with Producer(bootstrap, world=world) as producer:
        for partition in partitions:
            value = f"probe/{partition}|".encode()
            history.sent[value] = Sent("probe", 0, partition)
            metadata = await producer.send(partition.topic, value, partition=partition.partition)
            now_s = asyncio.get_running_loop().time()
            history.acknowledged[partition].append(Acknowledged(value, metadata.offset, now_s))


def _broker_settings(dice: Random) -> dict[str, str]:
    """Timeouts far below their defaults, and sizes at which segments roll and fetches are cut."""
    lag_ms = dice.choice([1_000, 3_000, 10_000])
    return {
        "zookeeper.session.timeout.ms": str(dice.choice([1_500, 3_000, 6_000])),
        "zookeeper.connection.timeout.ms": str(dice.choice([2_000, 6_000])),
        "broker.crash.detection.ms": str(dice.choice([100, 500, 1_500])),
        "replica.lag.time.max.ms": str(lag_ms),
        "replica.fetch.wait.max.ms": str(dice.choice([50, 200, 500])),
        "replica.fetch.max.bytes": str(dice.choice([500, 20_000, 1_048_576])),
        "replica.fetch.backoff.ms": str(dice.choice([20, 100, 1_000])),
        "replica.socket.timeout.ms": str(dice.choice([1_000, 5_000, 30_000])),
        "replica.high.watermark.checkpoint.interval.ms": str(dice.choice([100, 1_000, 5_000])),
        "log.flush.offset.checkpoint.interval.ms": str(dice.choice([200, 2_000, 60_000])),
        "log.segment.bytes": str(dice.choice([4_000, 30_000, 1_000_000])),
        "log.index.interval.bytes": str(dice.choice([1, 500, 4_096])),
        "log.retention.check.interval.ms": str(dice.choice([100, 1_000, 5_000])),
        "log.cleaner.backoff.ms": str(dice.choice([100, 1_000, 5_000])),
        "num.network.threads": str(dice.randint(1, 3)),
        "num.io.threads": str(dice.choice([1, 2, 8])),
    }


def _flat(error: BaseException) -> list[str]:
    """The innermost errors of exception groups, with what they were caused by."""
    if isinstance(error, BaseExceptionGroup):
        return [text for inner in error.exceptions for text in _flat(inner)]
    cause = f" (from {error.__cause__!r})" if error.__cause__ is not None else ""
    notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return [f"{error!r}{cause}{notes} in {place}"]
