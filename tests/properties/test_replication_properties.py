"""Three replicas over real logs, an abstract controller and ZooKeeper, and any order of what can happen to them.

What is acknowledged with acks=all must be in the log of every replica that could be elected: every member of the ISR.
The controller here is three lines (elect the first live member of the ISR, take the dead out of it); messages from it
arrive when hypothesis says so, ISR writes reach ZooKeeper late or in conflict.
"""

import asyncio
import shutil
import tempfile
from typing import NamedTuple

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.replication.partition import Partition, Settings
from broker.storage.log import Log, LogConfig
from broker.storage.manager import LogManager
from protocol.errors import BrokerError, ErrorCode
from protocol.messages import LeaderAndIsrPartition
from protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from protocol.real_world import RealWorld
from protocol.records import decode_batch, encode_batch, iterate_batches

BROKERS = (1, 2, 3)
PARTITION = TopicPartition("t", 0)
LAG_S = 10.0
MOVED = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH)
brokers = st.sampled_from(BROKERS)


class FakeClock:
    """Time that passes when the test says so. (The World's clock is an interface made to be replaced.)"""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return int(self.now_s * 1_000)


class Pending(NamedTuple):
    """A produce that waits for its acknowledgement."""

    partition: Partition
    leading_since: int
    offset: int
    value: bytes


class Replication(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.mkdtemp(prefix="minibroker-replication-")
        self.world = RealWorld(threads=1)
        self.clock = FakeClock()
        self.managers: list[LogManager] = []
        self.logs: dict[int, Log] = {}
        self.partitions: dict[int, Partition] = {}
        self.broker_epochs = dict.fromkeys(BROKERS, 1)
        self.alive = set(BROKERS)
        self.zookeeper = LeaderAndIsr(1, 0, BROKERS, 1, 0)
        self.proposals: list[tuple[Partition, LeaderAndIsr]] = []
        self.pending: list[Pending] = []
        self.acknowledged: dict[int, bytes] = {}
        self.values = 0

    @initialize()
    def open(self) -> None:
        for broker_id in BROKERS:
            manager = LogManager(self.world, f"{self.directory}/{broker_id}", broker_id)
            self.managers.append(manager)
            self.loop.run_until_complete(manager.open("cluster"))
            self.logs[broker_id] = self.loop.run_until_complete(manager.get_or_create(PARTITION, "id", LogConfig()))
            self.restart_process(broker_id)
            self.deliver(broker_id)

    def teardown(self) -> None:
        for manager in self.managers:
            self.loop.run_until_complete(manager.close(clean=False))
        self.world.close()
        self.loop.close()
        shutil.rmtree(self.directory)

    # -- the controller and ZooKeeper --

    def restart_process(self, broker_id: int) -> None:
        """A new process on the same log. Its high watermark checkpoint may be as old as can be."""
        self.partitions[broker_id] = Partition(
            PARTITION,
            self.logs[broker_id],
            Settings(broker_id, LAG_S, 2),
            self.clock,
            lambda b: self.broker_epochs[b] if b in self.alive else None,
        )

    def write_state(self, leader: int, isr: tuple[int, ...]) -> None:
        old = self.zookeeper
        self.zookeeper = LeaderAndIsr(leader, old.leader_epoch + 1, isr, 1, old.partition_epoch + 1)

    def elect(self) -> None:
        """Offline election: the first live member of the ISR, and the ISR without the dead."""
        candidates = tuple(b for b in self.zookeeper.isr if b in self.alive)
        if candidates:
            self.write_state(candidates[0], candidates)
        else:
            self.write_state(NO_LEADER, self.zookeeper.isr)

    @rule(broker_id=brokers)
    def deliver(self, broker_id: int) -> None:
        """LeaderAndIsr reaches a broker."""
        if broker_id not in self.alive:
            return
        partition, state = self.partitions[broker_id], self.zookeeper
        told = LeaderAndIsrPartition(
            0, 1, state.leader, state.leader_epoch, list(state.isr), state.partition_epoch, list(BROKERS)
        )
        if partition.is_stale(told):
            return
        if state.leader == broker_id:
            partition.become_leader(told)
        else:
            partition.become_follower(told)

    @rule(broker_id=brokers)
    def crash(self, broker_id: int) -> None:
        if broker_id not in self.alive:
            return
        self.alive.discard(broker_id)
        dead = self.partitions[broker_id]
        self.pending = [p for p in self.pending if p.partition is not dead]
        if self.zookeeper.leader == broker_id:
            self.elect()
        elif broker_id in self.zookeeper.isr and len(self.zookeeper.isr) > 1:
            self.write_state(self.zookeeper.leader, tuple(b for b in self.zookeeper.isr if b != broker_id))

    @rule(broker_id=brokers)
    def restart(self, broker_id: int) -> None:
        if broker_id in self.alive:
            return
        self.alive.add(broker_id)
        self.broker_epochs[broker_id] += 1
        self.restart_process(broker_id)
        if self.zookeeper.leader == NO_LEADER:
            self.elect()

    # -- the data path --

    @rule(broker_id=brokers, count=st.integers(1, 3))
    def produce(self, broker_id: int, count: int) -> None:
        """To whoever believes that it leads."""
        partition = self.partitions[broker_id]
        if broker_id not in self.alive or not partition.is_leader:
            return
        for _ in range(count):
            self.values += 1
            value = b"value %d" % self.values
            try:
                info = partition.append(encode_batch([value], base_timestamp=0), required_acks=-1, now_ms=0)
            except BrokerError as error:
                if error.code is not ErrorCode.NOT_ENOUGH_REPLICAS:
                    raise
                return
            self.pending.append(Pending(partition, partition.leading_since_epoch, info.first_offset, value))

    @rule(broker_id=brokers, times=st.integers(1, 3))
    def fetch(self, broker_id: int, times: int) -> None:
        """A follower fetches from whom it believes to be the leader."""
        partition = self.partitions[broker_id]
        for _ in range(times):
            if broker_id not in self.alive or partition.is_leader or partition.leader_id not in self.alive:
                return
            leader = self.partitions[partition.leader_id]
            request = partition.next_fetch(1_000)
            try:
                if leader.check_fetch(request, broker_id) is None:
                    leader.record_follower_fetch(broker_id, request.fetch_offset, self.broker_epochs[broker_id])
                    self.propose(leader)
            except BrokerError as error:
                if error.code not in MOVED:
                    raise
                return
            partition.apply_fetched(leader.read(request, broker_id, max_bytes=1_000, at_least_one=True))

    def propose(self, partition: Partition) -> None:
        isr = partition.isr_to_propose()
        if isr is not None:
            self.proposals.append((partition, partition.propose_isr(isr)))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for broker_id in sorted(self.alive):
            self.propose(self.partitions[broker_id])

    @precondition(lambda self: self.proposals)
    @rule(data=st.data())
    def write_isr(self, data: st.DataObject) -> None:
        """A proposal reaches ZooKeeper, whether its leader still lives or not."""
        index = data.draw(st.integers(0, len(self.proposals) - 1))
        partition, proposal = self.proposals.pop(index)
        if proposal.partition_epoch == self.zookeeper.partition_epoch:
            version = proposal.partition_epoch + 1
            self.zookeeper = msgspec.structs.replace(proposal, partition_epoch=version)
            partition.isr_written(proposal, version)
        else:
            partition.isr_conflict(proposal, self.zookeeper)

    # -- what must hold --

    @invariant()
    def acknowledged_records_are_in_every_replica_that_could_be_elected(self) -> None:
        still = []
        for pending in self.pending:
            code = pending.partition.acknowledgement(pending.offset + 1, pending.leading_since)
            if code is None:
                still.append(pending)
            elif code is ErrorCode.NONE:
                assert self.acknowledged.setdefault(pending.offset, pending.value) == pending.value
        self.pending = still
        for broker_id in self.zookeeper.isr:
            held = self.contents(broker_id)
            missing = {o: v for o, v in self.acknowledged.items() if held.get(o) != v}
            assert not missing, f"broker {broker_id} of ISR {self.zookeeper.isr} lacks {missing}"

    @invariant()
    def logs_agree_below_the_lowest_high_watermark_of_those_that_lead_or_follow(self) -> None:
        current = [
            self.partitions[b]
            for b in sorted(self.alive)
            if self.partitions[b].leader_epoch == self.zookeeper.leader_epoch
        ]
        mark = min((p.high_watermark for p in current), default=0)
        logs = [{o: v for o, v in self.read(p.log).items() if o < mark} for p in current]
        assert all(log == logs[0] for log in logs)

    def contents(self, broker_id: int) -> dict[int, bytes | None]:
        return self.read(self.logs[broker_id]) if broker_id in self.logs else {}

    @staticmethod
    def read(log: Log) -> dict[int, bytes | None]:
        if log.log_end_offset == log.log_start_offset:
            return {}
        data = b""
        position = log.log_start_offset
        held: dict[int, bytes | None] = {}
        while position < log.log_end_offset:
            data = log.read(position, 1_000_000, log.log_end_offset)
            for batch in iterate_batches(data):
                decoded = decode_batch(data, batch.header, batch.start)
                held.update(zip(decoded.offsets, decoded.values, strict=True))
                position = batch.header.next_offset
        return held


TestReplication = Replication.TestCase
TestReplication.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
