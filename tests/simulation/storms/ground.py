"""The ground of a storm: its cluster, the keepers that restart brokers, and the account of what happened.

Clients and faults know their storm as a `Ground` or a `Scene`, and neither module imports the storm:

    ground   the cluster, which brokers are down, held or damaged, and the report
    scene    a ground with all its clients, and which losses are legal after a power cut
    storm    a scene with its faults, its course and its verdict
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

from minibroker.broker.replication.partition import Partition
from minibroker.client.errors import ClientCrashed, CorruptBatch
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.disk_faults import DiskFaults
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, Member, ReplicaAssignment, TopicPartition
from minibroker.protocol.world import Operation
from tests.simulation.storms.ambush import Ambushes
from tests.simulation.storms.clients.workload import DURABLE, SHRINKING, SYNCED, Workload
from tests.simulation.storms.report import Report, innermost_errors
from tests.simulation.storms.security import Security
from tests.simulation.storms.settings import ENDLESS_RETENTION_MINUTES, RETENTION_MINUTES, draw_cluster
from tests.simulation.storms.verdicts.history import Anomaly, History

AMBUSH_S = 20.0
_TWO_LOG_DIRS_PROBABILITY = 0.4
_MOST_ANOMALIES = 20


class Change(NamedTuple):
    """A change of a partition's state in ZooKeeper."""

    before: LeaderAndIsr
    after: LeaderAndIsr


def elects_another(before: LeaderAndIsr, after: LeaderAndIsr) -> bool:
    """Return whether the change elects another leader."""
    return after.leader not in (NO_LEADER, before.leader)


class Ground(ABC):
    keeps_offsets = False
    """Whether committed offsets never expire, because the verdict does not know that they may."""

    def __init__(self, report: Report, dice: Random, is_enough: Callable[[Anomaly], bool] | None = None) -> None:
        self._is_enough = is_enough
        self.simulation = Simulation()
        self.report = report
        self.dice = dice
        brokers, self.settings = draw_cluster(report.seed, dice)
        if self.keeps_offsets:
            self.settings["offsets.retention.minutes"] = str(ENDLESS_RETENTION_MINUTES)
        self.security = Security(self)
        self.settings |= self.security.settings
        self.log_dirs = 2 if Random(f"{report.seed} log dirs").random() < _TWO_LOG_DIRS_PROBABILITY else 1
        self.cluster = VirtualCluster(
            self.simulation, brokers, self.settings, on_broker_failure=self._broker_failed, log_dirs=self.log_dirs
        )
        self.session_timeout_s = int(self.settings["zookeeper.session.timeout.ms"]) / 1_000
        self.offsets_expire = self.settings["offsets.retention.minutes"] == str(RETENTION_MINUTES)
        """Committed offsets may expire within the storm."""
        self.partitions = [TopicPartition(f"{DURABLE}-0", p) for p in range(dice.randint(1, 3))]
        if dice.random() < 0.5:
            self.partitions.append(TopicPartition(f"{DURABLE}-1", 0))
        if Random(f"{report.seed} synced").random() < 0.5:
            self.partitions.append(TopicPartition(SYNCED, 0))
        self.partitions.append(TopicPartition("fast", 0))
        durable = frozenset(p.topic for p in self.partitions if p.topic.startswith(DURABLE))
        self.history = History(durable | {SHRINKING})
        self.workload = Workload(self.cluster, self.history, self.security)
        self.on_start: list[Callable[[int], None]] = []
        """Called with a broker's id at the moment at which its process begins."""
        self.before_write: list[Callable[[VirtualSession, Sequence[Operation]], None]] = []
        """Called before ZooKeeper carries out a write. A hook rejects the write by raising."""
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._down = {broker_id: asyncio.Event() for broker_id in self.cluster.broker_ids}
        self._restart_after_s = dict.fromkeys(self.cluster.broker_ids, 0.0)
        self.busy: set[int] = set()
        """Brokers held by a fault of a whole process; other such faults leave them alone."""
        self.damaged: set[int] = set()
        """Brokers that may lack acknowledged records: they had a power cut, may have to truncate their logs after that
        of another broker, or have a rotten page. They leave the set when they have caught up."""
        self.powerless: set[int] = set()
        """The damaged brokers that had a power cut themselves."""
        self.content_with_one: set[str] = set()
        """Topics with more than two replicas for which one in-sync replica is, or was, enough for acks=all."""
        self.losses_of_power = 0
        """Power cuts after which records of any topic stored before may be gone."""
        self.rotten: set[int] = set()
        """Brokers that have a rotten page now."""
        self._bad_disks: Counter[int] = Counter()
        """Faults that each broker's disk has now."""
        self._hurt: set[int] = set()
        """Brokers whose disks had a fault since their last start; such a broker may fail."""
        self.lose_next_reply_of: set[str] = set()
        """Hosts whose next ZooKeeper write is carried out but not answered."""
        self.reassigned = False
        """Partitions may have replicas on other brokers than on all."""
        self.reassigns_to_one = False
        """Partitions may have a single replica, which a disk fault would destroy: such storms have no disk faults."""
        self.is_changing_late = False
        """A fault is running whose delayed requests may still arrive."""
        self.cuts_power_of_several = False
        """Several hosts may lose their power at once."""
        self.leadership: dict[str, tuple[TopicPartition, LeaderAndIsr]] = {}
        """The partition and the content of each state znode, by path."""
        self.led_since_s: dict[TopicPartition, float] = {}
        """When the current leader epoch of a partition began, if not at the start of the storm."""
        self._changes: Ambushes[Change] = Ambushes()
        self._faults: set[asyncio.Task[None]] = set()
        self._reported: set[str] = set()
        self._last_notes: dict[str, str] = {}

    # -- implemented by the scene --

    @abstractmethod
    def look(self) -> None:
        """Check the invariants now."""

    @abstractmethod
    def cut_power(self, broker_ids: Sequence[int], *, restart_after_s: float | None = None) -> None:
        """Cut the power of these brokers' hosts at the same moment."""

    # -- the report --

    @property
    def now_s(self) -> float:
        return self.simulation.loop.now_s

    def note(self, text: str) -> None:
        self.report.timeline.append(f"{self.now_s:10.3f} s  {text}")

    def note_once(self, source: str, text: str) -> None:
        """Note the text unless it repeats the last one of this source: retries would fill the timeline."""
        if self._last_notes.get(source) != text:
            self._last_notes[source] = text
            self.note(text)

    def event(self, kind: str) -> None:
        """Count something for the summary of a run, such as an ambush that struck."""
        self.report.events[kind] += 1

    def count(self, kind: str, text: str) -> None:
        """Count a fault that has struck."""
        self.report.faults[kind] += 1
        self.note(f"{kind}: {text}")

    def accuse(self, anomaly: Anomaly) -> None:
        if str(anomaly) not in self._reported and len(self._reported) < _MOST_ANOMALIES:
            self._reported.add(str(anomaly))
            self.report.anomalies.append(anomaly)
            self.note(f"ANOMALY {anomaly}")
            if self._is_enough is not None and self._is_enough(anomaly):
                self.simulation.loop.stop()  # a task for this would change the trace of the storm

    # -- faults under way --

    def begin(self, fault: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a fault, which runs until it ends or healing cancels it."""
        task = asyncio.create_task(fault, name=name)
        self._faults.add(task)
        task.add_done_callback(self._fault_ended)
        return task

    def _fault_ended(self, task: asyncio.Task[None]) -> None:
        self._faults.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.accuse(Anomaly("the storm itself failed", f"{task.get_name()}: {error!r}"))

    # -- brokers --

    def _start_keepers(self) -> None:
        self._keepers = {b: asyncio.create_task(self._keep(b), name=f"keeper of {b}") for b in self.cluster.broker_ids}

    async def _keep(self, broker_id: int) -> None:
        """Restart the broker each time that it is down, after the delay that its fault has set."""
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

    def _broker_failed(self, broker_id: int, error: Exception) -> None:
        self.note(f"broker {broker_id} failed: {error}")
        if broker_id not in self._hurt:
            said = "; ".join(innermost_errors(error))
            self.accuse(Anomaly("a broker failed by itself", f"broker {broker_id}: {said}"))
        self._restart_after_s[broker_id] = self.dice.uniform(0, 3)
        self._down[broker_id].set()
        self.report.unclean_restarts += 1

    @contextmanager
    def hold(self, broker_id: int) -> Iterator[None]:
        """Keep other faults of whole processes away from this broker."""
        self.busy.add(broker_id)
        try:
            yield
        finally:
            self.busy.discard(broker_id)

    @contextmanager
    def paused(self, broker_id: int) -> Iterator[None]:
        """Hold this broker and pause its process (SIGSTOP)."""
        with self.hold(broker_id):
            self.cluster.pause_broker(broker_id)
            try:
                yield
            finally:
                self.cluster.resume_broker(broker_id)

    async def stop(self, broker_id: int, *, restart_after_s: float | None = None) -> None:
        """Stop a broker in good order; its keeper restarts it."""
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
        """Yield the faults of a broker's disk, and clear them at the end. The broker may die of them."""
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
        """Delay each request of these hosts to ZooKeeper, and each reply, by up to `high_s`."""
        slow = self.simulation.zookeeper.slow_hosts
        slow.update(dict.fromkeys(hosts, (high_s / 10, high_s)))
        try:
            yield
        finally:
            for host in hosts:
                slow.pop(host, None)

    @contextmanager
    def blocked(self, links: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Block these links, each from a source host to a target host."""
        network = self.simulation.network
        for link in links:
            network.block(*link)
        try:
            yield
        finally:
            for link in links:
                network.unblock(*link)

    @contextmanager
    def cut_from_zookeeper(self, host: str) -> Iterator[None]:
        """Keep a host from reaching ZooKeeper."""
        self.simulation.zookeeper.cut(host)
        try:
            yield
        finally:
            self.simulation.zookeeper.uncut(host)

    async def next_change(self, is_wanted: Callable[[LeaderAndIsr, LeaderAndIsr], bool]) -> Change | None:
        """Return the next wanted change of a partition's state, at the moment at which ZooKeeper has carried it out;
        None after AMBUSH_S."""
        return await self._changes.next(AMBUSH_S, lambda change: is_wanted(*change))

    def strikable(self, broker_id: int) -> bool:
        """Return whether the process lives, even if it is still starting, and no fault holds it."""
        return broker_id not in self.busy and self.cluster.process(broker_id).alive

    def idle_brokers(self) -> list[int]:
        """Return the living brokers that no fault holds."""
        return [b for b in self.cluster.broker_ids if b not in self.busy and self.cluster.living_broker(b) is not None]

    def some_broker(self) -> int | None:
        idle = self.idle_brokers()
        return self.dice.choice(idle) if idle else None

    def leader(self) -> int | None:
        """Return an idle leader of some partition, preferably one with a produce request in flight."""
        partitions = self.dice.sample(self.partitions, len(self.partitions))
        for partition in sorted(partitions, key=lambda p: not self.workload.has_in_flight(p)):
            leader = self.cluster.state(partition).leader
            if leader in self.idle_brokers():
                return leader
        return None

    # -- clients of a fault --

    async def run_client(self, world: VirtualWorld, work: Coroutine[Any, Any, None], within_s: float) -> None:
        """Run this in the process of a client, and kill the process when the work or the time is over."""
        try:
            await asyncio.wait([world.process.start(work)], timeout=within_s)
        finally:
            world.process.kill()

    @contextmanager
    def client_errors(self, client: str) -> Iterator[None]:
        """Absorb the errors of a client, which starts again. Accuse those that no fault explains."""
        try:
            yield
        except ClientCrashed as error:
            self.accuse(Anomaly("a client crashed", f"{client}: {error!r} {error.__cause__!r}"))
        except CorruptBatch as error:
            if not self.workload.pages_have_rotten:
                self.accuse(Anomaly("a client crashed", f"{client}: {error}"))
        except MinibrokerError as error:
            self.note(f"{client} starts again: {error!r}")
            if isinstance(error, BrokerError) and error.code is ErrorCode.UNKNOWN_SERVER_ERROR:
                self.accuse(Anomaly("a broker met a bug", f"{client}: {error}"))

    # -- replicas --

    def replica(self, broker_id: int, partition: TopicPartition) -> Partition | None:
        """Return a living broker's replica; None if the broker is down or has none."""
        broker = self.cluster.living_broker(broker_id)
        return None if broker is None or broker._replicas is None else broker._replicas.partitions.get(partition)

    def assignment(self, partition: TopicPartition) -> ReplicaAssignment:
        """Return the assignment of a partition in ZooKeeper."""
        return self.topic(partition.topic).assignment(partition.partition)

    def topic(self, name: str) -> znodes.TopicZnode:
        """Return the znode of a topic."""
        return znodes.decode_topic(name, self.simulation.zookeeper.data(znodes.topic_path(name)))

    def is_in_sync(self, broker_id: int, partition: TopicPartition) -> bool:
        """Return whether the broker is in the ISR and has lost nothing since it joined."""
        members = self.cluster.state(partition).in_sync_members
        return any(m.broker_id == broker_id and self._has_lost_nothing(m) for m in members)

    def _has_lost_nothing(self, member: Member, *, flushed: bool = False) -> bool:
        """Return whether the broker has lost no record (or no flushed record) since it was last known to be complete.
        A bad disk may have torn a log."""
        broker = self.cluster.living_broker(member.broker_id)
        if broker is None:
            return member.broker_id not in self._hurt
        if broker._logs.offline:
            return False  # the replica may be there
        since = broker._logs.synced_since if flushed else broker._logs.trusted_since
        return znodes.SINCE_THIS_REGISTRATION != since <= member.epoch
