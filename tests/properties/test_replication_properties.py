"""Three replicas on data directories, the real elections, an abstract ZooKeeper, any order of what can happen to them.

Any number of processes is killed; sessions are lost and replaced. A power cut takes unflushed records from one replica
at a time: the next cut comes once that replica has everything again. The controller learns late which brokers came and
went, hypothesis decides when its messages arrive, and ISR writes reach ZooKeeper late or in conflict. In any order,
records that were acknowledged with acks=all or readable by a consumer are in the log of every broker that could be
elected, and such a broker exists.
"""

import asyncio
from random import Random
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minibroker.broker.replication.following import copying
from minibroker.broker.replication.isolation import FetchIsolation
from minibroker.broker.replication.partition import Partition, Settings
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.manager import LogManager
from minibroker.controller.decisions import elections
from minibroker.controller.decisions.cluster_state import LogEnd
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import LeaderAndIsrPartition
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, RegisteredBroker, TopicPartition
from minibroker.protocol.records import decode_batch, encode_batch, iterate_batches
from tests.storage_support import StorageHost, StorageWorld

BROKERS = (1, 2, 3)
PARTITION = TopicPartition("t", 0)
MIN_INSYNC_REPLICAS = 2
LAG_S = 10.0
NOT_REGISTERED_YET = 1 << 62
MOVED = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH)
brokers = st.sampled_from(BROKERS)


class FakeClock:
    """A clock that the test advances. (The World's clock is an interface made to be replaced.)"""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return int(self.now_s * 1_000)

    def observed_ms(self) -> int:
        return self.wall_ms()


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
        self.clock = FakeClock()
        self.hosts = {b: StorageHost(Random(b)) for b in BROKERS}
        self.managers: dict[int, LogManager] = {}
        self.logs: dict[int, Log] = {}
        self.left: dict[int, dict[int, bytes | None]] = {}
        """The content of killed processes' logs."""
        self.partitions: dict[int, Partition] = {}
        self.broker_epochs = dict.fromkeys(BROKERS, 0)
        self.epochs_given = 0
        self.trusted_since = dict.fromkeys(BROKERS, NOT_REGISTERED_YET)
        self.alive: set[int] = set()
        self.stopped_cleanly: set[int] = set()
        self.lossy: set[int] = set()
        """Brokers that lost records in a power cut and are not known to have everything again."""
        self.cluster: dict[int, RegisteredBroker] = {}
        """The brokers that live, as far as the controller knows."""
        self.log_ends: dict[int, tuple[int, LogEnd]] = {}
        """Where brokers' logs end, each with the leader epoch in which that was reported."""
        self.zookeeper = LeaderAndIsr(1, 0, BROKERS, 1, 0, BROKERS)
        self.proposals: list[tuple[Partition, LeaderAndIsr]] = []
        self.pending: list[Pending] = []
        self.promised: dict[int, bytes] = {}
        """The records acknowledged, or below the high watermark of a broker that leads."""
        self.values = 0

    @initialize()
    def open(self) -> None:
        for broker_id in BROKERS:
            self.restart(broker_id)
        self.change_controller()
        for broker_id in BROKERS:
            self.deliver(broker_id)

    def teardown(self) -> None:
        for broker_id in sorted(self.alive):
            self.loop.run_until_complete(self.managers[broker_id].close(clean=False))
        self.loop.close()

    # -- processes --

    def registration(self, broker_id: int) -> RegisteredBroker:
        return RegisteredBroker(
            broker_id, self.broker_epochs[broker_id], (), trusted_since=self.trusted_since[broker_id]
        )

    def register(self, broker_id: int) -> None:
        self.epochs_given += 1
        self.broker_epochs[broker_id] = self.epochs_given
        manager = self.managers[broker_id]
        manager.registered(self.epochs_given)
        expected = min(self.trusted_since[broker_id], self.epochs_given)
        assert manager.continuity.trusted_since == expected, "distrusted only after a power cut"
        self.trusted_since[broker_id] = expected

    @rule(broker_id=brokers)
    def restart(self, broker_id: int) -> None:
        """Start a new process. Its high watermark checkpoint may be of any age."""
        if broker_id in self.alive:
            return
        manager = self.managers[broker_id] = LogManager(
            StorageWorld(self.hosts[broker_id].start_process()), "/data", broker_id
        )
        self.loop.run_until_complete(manager.open("cluster"))
        log = self.loop.run_until_complete(manager.get_or_create(PARTITION, "id", LogConfig()))
        self.logs[broker_id] = log
        self.partitions[broker_id] = Partition(
            PARTITION,
            log,
            Settings(broker_id, LAG_S, MIN_INSYNC_REPLICAS),
            self.clock,
            lambda b: self.cluster[b].epoch if b in self.cluster else None,
        )
        self.alive.add(broker_id)
        self.stopped_cleanly.discard(broker_id)
        self.register(broker_id)

    @rule(broker_id=brokers)
    def lose_the_session(self, broker_id: int) -> None:
        """Register the same process again."""
        if broker_id in self.alive:
            self.register(broker_id)

    @rule(broker_id=brokers, clean=st.booleans())
    def stop(self, broker_id: int, clean: bool) -> None:
        """End the process by a kill or in order."""
        if broker_id not in self.alive:
            return
        self.left[broker_id] = self.read(self.logs[broker_id])
        self.loop.run_until_complete(self.managers[broker_id].close(clean=clean))
        self.alive.discard(broker_id)
        if clean:
            self.stopped_cleanly.add(broker_id)
        dead = self.partitions[broker_id]
        self.pending = [p for p in self.pending if p.partition is not dead]

    @rule(broker_id=brokers, seed=st.integers(0, 1_000))
    def cut_the_power(self, broker_id: int, seed: int) -> None:
        if self.lossy - {broker_id}:
            return
        nothing_to_lose = broker_id in self.stopped_cleanly
        self.stop(broker_id, False)
        self.hosts[broker_id].power_cut(Random(seed))
        if nothing_to_lose:
            return
        self.trusted_since[broker_id] = NOT_REGISTERED_YET
        self.lossy.add(broker_id)

    @rule(power_fails=st.booleans(), seed=st.integers(0, 1_000))
    def the_leader_is_back_before_anybody_notices(self, power_fails: bool, seed: int) -> None:
        """End the session late, as when the controller goes down with the broker."""
        leader = self.zookeeper.leader
        if leader not in self.alive or (power_fails and self.lossy - {leader}):
            return
        if power_fails:
            self.cut_the_power(leader, seed)
        else:
            self.stop(leader, False)
        self.restart(leader)
        self.change_controller()

    @rule(broker_id=brokers)
    def checkpoint(self, broker_id: int) -> None:
        if broker_id in self.alive:
            self.loop.run_until_complete(self.managers[broker_id].checkpoints.checkpoint_recovery_points())

    # -- the controller and ZooKeeper --

    @rule()
    def notice(self) -> None:
        """Let the controller see which brokers are registered. It first removes those that are gone or run anew."""
        registered = {b: self.registration(b) for b in sorted(self.alive)}
        if registered == self.cluster:
            return
        self.cluster = {b: known for b, known in self.cluster.items() if registered.get(b) == known}
        self.log_ends = {b: end for b, end in self.log_ends.items() if b in self.cluster}
        self.settle()
        self.cluster = registered
        self.settle()

    @rule()
    def change_controller(self) -> None:
        """Start the next controller, which sees only the present state."""
        self.cluster = {b: self.registration(b) for b in sorted(self.alive)}
        self.log_ends.clear()
        self.settle()

    @rule()
    def settle(self) -> None:
        """Let the controller read the state, as after the notification of an ISR change."""
        before = self.zookeeper
        log_ends = {b: end for b, (epoch, end) in self.log_ends.items() if epoch == before.leader_epoch}
        after, election = elections.decide(BROKERS, before, self.cluster, 1, log_ends=log_ends)
        assert election is None or not election.may_lose_records, "with one power cut at a time it never comes to this"
        if after is not before:
            self.zookeeper = msgspec.structs.replace(after, partition_epoch=before.partition_epoch + 1)

    @rule(broker_id=brokers)
    def deliver(self, broker_id: int) -> None:
        """Deliver LeaderAndIsr to a broker if it is in the broker epoch for which the request was sent."""
        known = self.cluster.get(broker_id)
        if broker_id not in self.alive or known is None or known.epoch != self.broker_epochs[broker_id]:
            return
        partition, state = self.partitions[broker_id], self.zookeeper
        told = LeaderAndIsrPartition(
            0,
            1,
            state.leader,
            state.leader_epoch,
            list(state.isr),
            state.partition_epoch,
            list(BROKERS),
            isr_epochs=list(state.isr_epochs),
            eligible=list(state.eligible),
            eligible_epochs=list(state.eligible_epochs),
            to_commit=state.to_commit,
        )
        if partition.is_stale(told):
            return
        if state.leader == broker_id:
            partition.become_leader(told)
            return
        partition.become_follower(told)
        if state.leader == NO_LEADER:
            end = partition.log.log_end_offset
            self.log_ends[broker_id] = (state.leader_epoch, LogEnd(partition.log.epoch_at(end - 1), end))

    # -- the data path --

    @rule(broker_id=brokers, count=st.integers(1, 3))
    def produce(self, broker_id: int, count: int) -> None:
        """Produce to a broker that believes it leads."""
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
        """Let a follower fetch from the broker that it considers the leader."""
        partition = self.partitions[broker_id]
        for _ in range(times):
            if broker_id not in self.alive or partition.is_leader or partition.leader_id not in self.alive:
                return
            leader = self.partitions[partition.leader_id]
            request = copying.next_fetch(partition, 1_000)
            answer = leader.admit(request, broker_id)
            if answer is None:
                leader.record_follower_fetch(broker_id, request, self.broker_epochs[broker_id])
                self.propose(leader)
                answer = leader.read(request, broker_id, FetchIsolation.LOG_END, max_bytes=1_000, at_least_one=True)
            elif answer.error_code != ErrorCode.NONE:
                assert answer.error_code in MOVED
                return
            copying.apply_fetched(partition, answer)

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
        """Let a proposal reach ZooKeeper, whether or not its leader still lives."""
        index = data.draw(st.integers(0, len(self.proposals) - 1))
        self.carry_out(*self.proposals.pop(index))

    def carry_out(self, partition: Partition, proposal: LeaderAndIsr) -> None:
        if proposal.partition_epoch == self.zookeeper.partition_epoch:
            version = proposal.partition_epoch + 1
            self.zookeeper = msgspec.structs.replace(proposal, partition_epoch=version)
            partition.isr_written(proposal, version)
        else:
            partition.isr_conflict(proposal, self.zookeeper)

    @rule(times=st.integers(1, 3))
    def all_goes_well(self, times: int) -> None:
        """Deliver every message and record to the brokers that live."""
        for _ in range(times):
            self.notice()
            self.settle()
            while self.proposals:
                self.carry_out(*self.proposals.pop(0))
            for broker_id in BROKERS:
                self.deliver(broker_id)
            if self.zookeeper.leader in self.alive:
                self.produce(self.zookeeper.leader, 1)
            for broker_id in BROKERS:
                self.fetch(broker_id, 3)
            self.note_promises()

    @rule()
    def heal(self) -> None:
        """Start all brokers and deliver everything: then all are in sync and have the promised records."""
        for broker_id in BROKERS:
            self.restart(broker_id)
        self.all_goes_well(6)
        for broker_id in BROKERS:
            self.fetch(broker_id, 100)
            self.fetch(broker_id, 1)
        leader = self.zookeeper.leader
        assert self.zookeeper.isr == BROKERS
        assert self.zookeeper.eligible == ()
        assert self.partitions[leader].high_watermark == self.logs[leader].log_end_offset
        assert self.promised.items() <= self.read(self.logs[leader]).items()

    # -- what must hold --

    @invariant()
    def promised_records_are_in_every_replica_that_could_be_elected_and_there_is_one(self) -> None:
        self.note_promises()
        if not self.logs:
            return
        state = self.zookeeper
        on_record = (*state.in_sync_members, *state.eligible_members)
        electable = [member for member in on_record if member.epoch >= self.trusted_since[member.broker_id]]
        for broker_id, epoch in electable:
            held = self.read(self.logs[broker_id]) if broker_id in self.alive else self.left[broker_id]
            missing = {o: v for o, v in self.promised.items() if held.get(o) != v}
            assert not missing, f"broker {broker_id} of epoch {epoch} lacks {missing}: {state}"
        self.lossy -= {member.broker_id for member in state.in_sync_members if member in electable}
        assert electable, f"none could be elected: {state}, {self.trusted_since}"

    def note_promises(self) -> None:
        still = []
        for pending in self.pending:
            code = pending.partition.acknowledgement(pending.offset + 1, pending.leading_since)
            if code is None:
                still.append(pending)
            elif code is ErrorCode.NONE:
                assert self.promised.setdefault(pending.offset, pending.value) == pending.value
        self.pending = still
        for broker_id in sorted(self.alive):
            partition = self.partitions[broker_id]
            if partition.is_leader:
                for offset, value in self.read(partition.log).items():
                    if offset < partition.high_watermark and value is not None:
                        assert self.promised.setdefault(offset, value) == value

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


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_replica_stopped_before_its_first_record_opens_after_a_power_cut(seed: int) -> None:
    replication = Replication()
    replication.open()
    replication.stop(broker_id=1, clean=True)
    replication.cut_the_power(broker_id=1, seed=seed)
    replication.heal()
    replication.teardown()


TestReplication = Replication.TestCase
TestReplication.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
