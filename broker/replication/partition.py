"""One replica of one partition on this broker: leader or follower, its log, ISR and high watermark.

Synchronous throughout: nothing here awaits, so each method is atomic on the event loop, and what is checked at
its top still holds at its bottom. Writing the ISR to ZooKeeper is the business of `IsrWriter`; this class says what to
write (`propose_isr`) and is told how it went (`isr_written`, `isr_conflict`).

A fetch comes in three steps, each taken once: `admit` it, note a follower's progress (`record_follower_fetch`), `read`
its records. What is admitted stays so while this leadership lasts, as a leader's log is not cut: after a wait it is
enough to ask `leads_in` before reading.
"""

import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from enum import Enum

import msgspec

from minibroker.broker.replication import isr as isr_rules
from minibroker.broker.replication.isr import Follower
from minibroker.broker.replication.throttle import Quota
from minibroker.broker.storage import retention, search
from minibroker.broker.storage.log import AppendInfo, Log
from minibroker.broker.storage.producer_state import InvalidSnapshot, decode_snapshot, encode_snapshot
from minibroker.broker.storage.validator import Looked
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    EARLIEST_LOCAL_TIMESTAMP,
    EARLIEST_TIMESTAMP,
    LATEST_TIERED_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    UP_TO_HIGH_WATERMARK,
    Buffer,
    EpochEndOffset,
    FetchPartition,
    FetchPartitionResponse,
    LeaderAndIsrPartition,
)
from minibroker.protocol.model import (
    NO_EPOCH,
    NO_LEADER,
    LeaderAndIsr,
    ReplicaAssignment,
    TopicPartition,
    min_insync_replicas,
)
from minibroker.protocol.records import HEADER_SIZE, parse_header
from minibroker.protocol.words import counted
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.replication")

CONSUMER = -1
"""The replica id of a fetch that no replica makes."""


class Role(Enum):
    LEADER = "leader"
    FOLLOWER = "follower"


class Settings(msgspec.Struct, frozen=True):
    broker_id: int
    lag_time_max_s: float
    min_insync_replicas: int | None
    """The broker's own, for topics that do not set it; None: 2 for three or more replicas, else 1."""


class Fetched(msgspec.Struct, frozen=True):
    """What a follower did with the answer to its fetch."""

    truncated_to: int | None = None
    appended: bool = False
    is_stuck: bool = False
    """It was to truncate, but there was nothing to cut: the next fetch will say the same."""


class Traffic:
    """What went through the partitions of one topic on this broker (Kafka's BrokerTopicMetrics). Whoever exports it
    reads it."""

    __slots__ = ("bytes_in", "bytes_out", "messages_in", "replication_bytes_in", "replication_bytes_out")

    def __init__(self) -> None:
        self.bytes_in = 0
        self.messages_in = 0
        self.bytes_out = 0
        """To consumers."""
        self.replication_bytes_in = 0
        self.replication_bytes_out = 0


class Partition:
    """Guarantees: the high watermark never goes back within a leader epoch except by truncation, and stands still while
    fewer than min.insync.replicas are in sync; a request of another leader epoch changes nothing; an acknowledged
    offset is below the high watermark of the maximal ISR.

    With `durability=synced` a replica has what it has flushed: the leader counts its own log so far, and a follower
    asks for more once it has flushed what it got (`may_fetch`), so the offset of its fetch says that. Whatever is
    decided by these offsets holds on disk, then: the high watermark, who lags, who may join the ISR. It is the high
    watermark that waits, not acks=all alone: what a power cut of all replicas may take back must not be read before
    either, or a consumer would have seen, and committed, what never happened.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        log: Log,
        settings: Settings,
        clock: Clock,
        alive_epoch: Callable[[int], int | None],
        *,
        high_watermark: int = 0,
        min_insync_replicas: int | None = None,
        traffic: Traffic | None = None,
        may_be_deposed: Callable[[int], bool] = lambda told_in_broker_epoch: False,
        store_start_soon: Callable[[TopicPartition], None] = lambda topic_partition: None,
        leader_quota: Quota | None = None,
        follower_quota: Quota | None = None,
        give_up: Callable[["Partition", str], None] = lambda partition, reason: None,
    ) -> None:
        """`store_start_soon`: called where the log begins later than it would after a crash, and others wait for it.
        `give_up`: called where the log is damaged, and this broker's part in the partition is to end, soon.
        The quotas are for replicas that are out of sync, as they are sent to, or as this is one; None: no limit."""
        self.topic_partition = topic_partition
        self.log = log
        self.traffic = traffic or Traffic()
        self.leader_quota = leader_quota
        self.follower_quota = follower_quota
        self.role = Role.FOLLOWER
        self.leader_id = NO_LEADER
        self.leader_epoch = NO_EPOCH
        self.leading_since_epoch = NO_EPOCH
        """The epoch in which this broker last *became* leader. Later epochs of an unbroken leadership keep it, since
        between them the log was never truncated."""
        self.controller_epoch = NO_EPOCH
        self.told_in_broker_epoch = NO_EPOCH
        """The broker epoch in which this broker was told its role."""
        self.assignment: tuple[int, ...] = ()
        """All replicas, also those that a reassignment adds or removes."""
        self.replication_factor = 0
        """As in `ReplicaAssignment`."""
        self.isr: tuple[int, ...] = ()
        """The committed ISR: what ZooKeeper is known to hold."""
        self.isr_epochs: tuple[int, ...] = ()
        self.eligible: tuple[int, ...] = ()
        self.eligible_epochs: tuple[int, ...] = ()
        self.to_commit = 0
        """These four belong to the committed ISR, as in `LeaderAndIsr`."""
        self.proposed_isr: tuple[int, ...] | None = None
        """An ISR that was sent to ZooKeeper and whose outcome is not known yet."""
        self.proposed_to_commit = 0
        """What goes on record with it."""
        self.partition_epoch = NO_EPOCH
        self.epoch_start_offset = -1
        self.high_watermark = min(max(high_watermark, log.log_start_offset), log.log_end_offset)
        self.followers: dict[int, Follower] = {}
        self._settings = settings
        self._clock = clock
        self._alive_epoch = alive_epoch
        self._may_be_deposed = may_be_deposed
        self._store_start_soon = store_start_soon
        self._give_up = give_up
        self._topic_min_insync_replicas = min_insync_replicas

    def reconfigure(
        self,
        settings: Settings,
        min_insync_replicas: int | None,
        leader_quota: Quota | None,
        follower_quota: Quota | None,
    ) -> None:
        """As in the constructor, from now on. Whoever calls it looks after what waits, and after the ISR: with another
        min.insync.replicas something may be committed, or be no longer."""
        self._settings = settings
        self._topic_min_insync_replicas = min_insync_replicas
        self.leader_quota = leader_quota
        self.follower_quota = follower_quota

    # -- what the controller says --

    def is_stale(self, state: LeaderAndIsrPartition) -> bool:
        """The state is of an earlier leader epoch than the one held here."""
        return state.leader_epoch < self.leader_epoch

    def become_leader(self, state: LeaderAndIsrPartition) -> None:
        """Lead in the state's epoch. The log knows the epoch and its start offset before anything can be
        appended (KAFKA-7415). A second call for the same epoch changes nothing but the ISR, if the state's is newer."""
        was_leading = self.role is Role.LEADER
        new_epoch = state.leader_epoch > self.leader_epoch
        if new_epoch:
            self.log.assign_epoch_start(state.leader_epoch, self.log.log_end_offset)
            self.epoch_start_offset = self.log.log_end_offset
            if not was_leading:
                self.leading_since_epoch = state.leader_epoch
        self._adopt(state, Role.LEADER)
        if new_epoch or not was_leading:
            now_s = self._clock.monotonic()
            self.followers = {
                broker_id: Follower(last_caught_up_s=now_s if broker_id in self.isr else float("-inf"))
                for broker_id in self.assignment
                if broker_id != self._settings.broker_id
            }
        self.advance_high_watermark()

    def become_follower(self, state: LeaderAndIsrPartition) -> None:
        """Follow the state's leader (or none, where it has none)."""
        self._adopt(state, Role.FOLLOWER)
        self.followers = {}

    def stop_leading(self) -> None:
        """The controller has stopped this replica: it leads no more, and follows none, until it is told a role."""
        self.role = Role.FOLLOWER
        self.leader_id = NO_LEADER
        self.followers = {}

    def _adopt(self, state: LeaderAndIsrPartition, role: Role) -> None:
        self.role = role
        self.leader_id = state.leader
        if state.leader_epoch > self.leader_epoch or state.partition_epoch > self.partition_epoch:
            self.isr, self.isr_epochs = tuple(state.isr), tuple(state.isr_epochs)
            self.eligible, self.eligible_epochs = tuple(state.eligible), tuple(state.eligible_epochs)
            self.to_commit = state.to_commit
            self.proposed_isr = None
            self.partition_epoch = state.partition_epoch
        self.leader_epoch = state.leader_epoch
        self.controller_epoch = state.controller_epoch
        assignment = ReplicaAssignment(
            tuple(state.replicas), tuple(state.adding_replicas), tuple(state.removing_replicas)
        )
        self.assignment = assignment.replicas
        self.replication_factor = assignment.replication_factor

    # -- leader: appends --

    @property
    def is_leader(self) -> bool:
        return self.role is Role.LEADER

    def leads_in(self, leader_epoch: int) -> bool:
        return self.leader_epoch == leader_epoch and self.role is Role.LEADER

    @property
    def _configured_min_insync_replicas(self) -> int | None:
        return self._topic_min_insync_replicas or self._settings.min_insync_replicas

    @property
    def min_insync_replicas(self) -> int:
        return min_insync_replicas(self._configured_min_insync_replicas, self.replication_factor)

    @property
    def promises_more_than_is_on_record(self) -> bool:
        """The state znode has a lower number than min.insync.replicas, or would have it by a change that is on its way.
        Whoever shrinks the ISR goes by that number, so what was committed by the higher one would not be safe."""
        needed = self.min_insync_replicas
        return 0 < self.to_commit < needed or (self.proposed_isr is not None and self.proposed_to_commit < needed)

    @property
    def is_to_be_recorded(self) -> bool:
        """The state znode has another number than min.insync.replicas. (Where replicas are eligible, that waits until
        they are struck off: to write is to judge about them.)"""
        return self.is_leader and self.to_commit != self.min_insync_replicas and not self.eligible

    def append(self, records: Buffer, *, required_acks: int, now_ms: int, looked: Looked = Looked.NOT) -> AppendInfo:
        """Append as leader. `looked`: as for `check_acceptable`. Raises BrokerError: NOT_LEADER_OR_FOLLOWER,
        NOT_ENOUGH_REPLICAS (acks=all), and what the log refuses; then nothing was written."""
        self._require_leader(NO_EPOCH)
        if required_acks == -1 and len(self.isr) < self.min_insync_replicas:
            raise self._not_enough_replicas()
        info = self.log.append_as_leader(records, self.leader_epoch, now_ms, looked=looked)  # P4
        self.traffic.bytes_in += len(records)
        self.traffic.messages_in += info.last_offset - info.first_offset + 1
        if len(self.isr) == 1:
            self.advance_high_watermark()
        return info

    def _not_enough_replicas(self) -> BrokerError:
        return BrokerError(
            ErrorCode.NOT_ENOUGH_REPLICAS,
            f"{self.topic_partition} has {counted(len(self.isr), 'replica')} in sync {list(self.isr)}, "
            f"but min.insync.replicas is {self.min_insync_replicas}",
        )

    def acknowledgement(self, required_offset: int, leading_since_epoch: int) -> ErrorCode | None:
        """Whether an append that ended at `required_offset` is settled: NONE once all in-sync replicas have it, an
        error where it cannot be told any more, None while it is open (DelayedProduce's three endings).

        With too few replicas in sync the high watermark stands still, so there is nothing to wait for: the producer
        is told at once, and tries again."""
        if not self.is_leader or self.leading_since_epoch != leading_since_epoch:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if len(self.isr) < self.min_insync_replicas:
            return ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        return ErrorCode.NONE if self.high_watermark >= required_offset else None

    # -- leader: high watermark and ISR --

    @property
    def maximal_isr(self) -> set[int]:
        return set(self.isr).union(self.proposed_isr or ())

    def advance_high_watermark(self) -> bool:
        """Move the high watermark to what all replicas that count have; True if it moved.

        It stands still while the committed ISR is too small, while others are on record as eligible (they have what was
        committed before, and would lack what is committed now), and until min.insync.replicas is on record."""
        if self.role is not Role.LEADER or self.high_watermark >= self.log.log_end_offset:
            return False  # nearly always, where there are very many partitions
        if self.eligible or len(self.isr) < self.min_insync_replicas or self.promises_more_than_is_on_record:
            return False
        of_replicas = isr_rules.high_watermark(
            self.log.log_end_offset,
            self.followers,
            self.maximal_isr,
            self._clock.monotonic(),
            self._settings.lag_time_max_s,
        )
        reached = min(of_replicas, self.log.safe_end_offset)
        if reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True

    @property
    def leads_alone(self) -> bool:
        """No other replica can have become the leader without this one's part in it: none is in sync, or eligible."""
        return self.is_leader and self.maximal_isr == {self.leader_id} and not self.eligible

    def disregard_the_gone(self) -> bool:
        """A follower outside of the ISR whose broker has died, or is about to stop, is not waited for any more, however
        recently it had caught up: it will not join. True if the high watermark moved."""
        awaited = self.maximal_isr
        for broker_id, follower in self.followers.items():
            if broker_id not in awaited and self._alive_epoch(broker_id) is None:
                follower.last_caught_up_s = float("-inf")
        return self.advance_high_watermark()

    def isr_to_propose(self) -> tuple[int, ...] | None:
        """The ISR that this leader would write now: without those that lag, with those that have caught up. None where
        it is right as it is, or where a change is on its way already. The same ISR again where others are eligible
        beside it though it is large enough, as after a change of the setting, or where one of them has lost something:
        until they are not, nothing is committed. But not before all of the ISR have fetched in this epoch: of those
        that have not, nobody knows whether they live. And the same ISR again where another min.insync.replicas is to go
        on record.
        """
        if not self.is_leader or self.proposed_isr is not None:
            return None
        out = isr_rules.lagging(
            self.leader_id,
            self.isr,
            self.followers,
            self.log.log_end_offset,
            self._clock.monotonic(),
            self._settings.lag_time_max_s,
        )
        joining = [b for b in self.followers if b not in self.isr and self._may_join(b)]
        to_be_cleared = (
            bool(self.eligible)
            and len(self.isr) >= self.min_insync_replicas
            and all(follower.log_end_offset >= 0 for b, follower in self.followers.items() if b in self.isr)
        )
        if not out and not joining and not to_be_cleared and not self.is_to_be_recorded:
            return None
        members = [b for b in self.isr if b not in out] + joining
        return isr_rules.in_assignment_order(self.assignment, members)

    def _may_join(self, broker_id: int) -> bool:
        follower = self.followers[broker_id]
        end, now_s = self.log.log_end_offset, self._clock.monotonic()
        if not isr_rules.is_caught_up(follower, end, now_s, self._settings.lag_time_max_s):
            # It would have to leave again at once. Where the high watermark stands still (below min.insync.replicas)
            # even one that is long dead has reached it: it would come and go with each answer of ZooKeeper.
            return False
        return isr_rules.may_join(
            follower,
            self.log.log_start_offset,
            self.high_watermark,
            self.epoch_start_offset,
            self._alive_epoch(broker_id),
        )

    def propose_isr(self, isr: tuple[int, ...]) -> LeaderAndIsr:
        """From now on the high watermark waits for the members of `isr` too. Returns what to write; the write must be
        conditional on `partition_epoch`, the version of the znode that it replaces."""
        self.proposed_isr = isr
        self.proposed_to_commit = self.min_insync_replicas
        return isr_rules.proposal(self._committed(), isr, self.followers, self.proposed_to_commit)

    def _committed(self) -> LeaderAndIsr:
        return LeaderAndIsr(
            self.leader_id,
            self.leader_epoch,
            self.isr,
            self.controller_epoch,
            self.partition_epoch,
            self.isr_epochs,
            self.eligible,
            self.eligible_epochs,
            self.to_commit,
        )

    def _commit(self, state: LeaderAndIsr, version: int) -> bool:
        """True if the high watermark moved."""
        self.isr, self.isr_epochs = state.isr, state.isr_epochs
        self.eligible, self.eligible_epochs = state.eligible, state.eligible_epochs
        self.to_commit = state.to_commit
        self.proposed_isr = None
        self.partition_epoch = version
        return self.advance_high_watermark()

    def isr_written(self, written: LeaderAndIsr, version: int) -> bool:
        """ZooKeeper holds the proposed ISR at this version. True if the high watermark moved."""
        return self.is_pending(written) and self._commit(written, version)

    def isr_conflict(self, proposed: LeaderAndIsr, actual: LeaderAndIsr) -> bool:
        """ZooKeeper refused: it holds `actual`. Adopted where it is of this leadership; otherwise another broker
        leads and the controller is about to say so. True if the high watermark moved."""
        if not self.is_pending(proposed):
            return False
        if (actual.leader, actual.leader_epoch) != (self.leader_id, self.leader_epoch):
            return False
        return self._commit(actual, actual.partition_epoch)

    def is_pending(self, proposal: LeaderAndIsr) -> bool:
        """The proposal's outcome still matters: nothing newer was told since."""
        return (
            self.is_leader
            and self.leader_epoch == proposal.leader_epoch
            and self.partition_epoch == proposal.partition_epoch
            and self.proposed_isr == proposal.isr
        )

    # -- leader: fetches --

    def record_follower_fetch(self, replica_id: int, fetch: FetchPartition, broker_epoch: int) -> bool:
        """A follower has what comes before an admitted fetch. True if the high watermark moved."""
        isr_rules.record_fetch(
            self.followers[replica_id],
            fetch.fetch_offset,
            fetch.log_start_offset,
            self.log.log_end_offset,
            self._clock.monotonic(),
            broker_epoch,
        )
        return self.advance_high_watermark()

    def readable_end(self, replica_id: int) -> int:
        """Consumers read up to the high watermark, replicas up to the end."""
        return self.high_watermark if replica_id == CONSUMER else self.log.log_end_offset

    def quota_for(self, replica_id: int) -> Quota | None:
        """What is sent to that replica counts towards it. None for those that the high watermark waits for."""
        quota = self.leader_quota
        if quota is None or replica_id == CONSUMER or replica_id in self.maximal_isr:
            return None
        end, now_s = self.log.log_end_offset, self._clock.monotonic()
        is_caught_up = isr_rules.is_caught_up(self.followers[replica_id], end, now_s, self._settings.lag_time_max_s)
        return None if is_caught_up else quota

    def withholds_from(self, replica_id: int) -> bool:
        """That replica gets nothing now: it is out of sync, and others have used up the rate."""
        quota = self.quota_for(replica_id)
        return quota is not None and quota.is_exceeded

    def check_topic_id(self, topic_id: str) -> None:
        """Raises BrokerError where this is a partition of another topic of the same name; empty: whichever it is."""
        if topic_id and topic_id != self.log.topic_id:
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID,
                f"{self.topic_partition} has topic id {self.log.topic_id} here, not {topic_id}",
            )

    def admit(self, fetch: FetchPartition, replica_id: int) -> FetchPartitionResponse | None:
        """None where the fetch may be served, now and for as long as this leadership lasts. Else its answer: an error,
        or the diverging epoch."""
        try:
            diverging = self.check_fetch(fetch, replica_id)
        except BrokerError as error:
            refusal = self.refusal(error.code)
            if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and replica_id != CONSUMER:
                start = self.log.log_start_offset
                refusal.diverging_epoch = EpochEndOffset(self.log.epoch_at(start - 1), start)
            return refusal
        return None if diverging is None else self._response(b"", diverging)

    def tell_producers(self, refusal: FetchPartitionResponse) -> None:
        """To a follower that `admit` has refused as out of range: see `FetchPartitionResponse.producers`."""
        if producers := self.log.producers_below(refusal.log_start_offset):
            refusal.producers = memoryview(encode_snapshot(producers))

    def check_fetch(self, fetch: FetchPartition, replica_id: int) -> EpochEndOffset | None:
        """Raises BrokerError (not leader, another epoch, out of range, no replica of this partition). The diverging
        epoch where the follower's log is not a prefix of this one (KIP-595), which includes a follower that is ahead.

        A follower whose log is empty and that does not know what came before it has nothing to compare. To go on where
        this log holds records before that would make it one without them, so that is out of range.
        """
        self._require_leader(fetch.current_leader_epoch)
        log = self.log
        if fetch.last_fetched_epoch != NO_EPOCH:
            self._require_past(fetch.last_fetched_epoch)
            epoch, end_offset = log.end_offset_for(fetch.last_fetched_epoch)
            if epoch < fetch.last_fetched_epoch or end_offset < fetch.fetch_offset:
                return EpochEndOffset(epoch, end_offset)
        compares_nothing = replica_id != CONSUMER and fetch.last_fetched_epoch == NO_EPOCH
        end_offset = log.log_start_offset if compares_nothing else log.log_end_offset
        if not log.log_start_offset <= fetch.fetch_offset <= end_offset:
            problem = (
                f"offset {fetch.fetch_offset} of {self.topic_partition}, "
                f"which holds {log.log_start_offset} to {log.log_end_offset}"
            )
            if replica_id == CONSUMER and self._may_be_deposed(self.told_in_broker_epoch):
                code = ErrorCode.OFFSET_NOT_AVAILABLE
                raise BrokerError(code, f"{problem}; but another broker, which has more, may lead it by now")
            raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, problem)
        if replica_id != CONSUMER and replica_id not in self.followers:
            raise BrokerError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"broker {replica_id} holds no replica of {self.topic_partition} {list(self.assignment)}",
            )
        return None

    def read(
        self, fetch: FetchPartition, replica_id: int, *, max_bytes: int, at_least_one: bool
    ) -> FetchPartitionResponse:
        """The records for a fetch that is admitted, from its offset, whole batches; an error code instead of an
        exception."""
        end = self.readable_end(replica_id)
        if fetch.fetch_offset >= end or self.withholds_from(replica_id):
            return self._response(b"")
        limit = min(max_bytes, fetch.partition_max_bytes)
        try:
            records = self.log.read(fetch.fetch_offset, limit, end, min_one=at_least_one)
            if fetch.suspect:
                self.log.check(records, fetch.fetch_offset)
        except BrokerError as error:
            return self.refusal(self.considered(error, replica_id).code)
        return self._response(records)

    def read_past_emptied(
        self, fetch: FetchPartition, *, max_bytes: int, at_least_one: bool
    ) -> Generator[None, None, FetchPartitionResponse]:
        """As `read`, for a consumer, from the next batch on that has records; in steps. Where none has below the high
        watermark, the answer is the last batch, for the consumer to go on behind it."""
        epoch = self.leader_epoch
        try:
            offset = yield from search.past_emptied(self.log, fetch.fetch_offset, self.high_watermark)
        except BrokerError as error:
            return self.refusal(self.considered(error).code)
        if not self.leads_in(epoch):
            return self.refusal(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        found = msgspec.structs.replace(fetch, fetch_offset=offset)
        response = self.read(found, CONSUMER, max_bytes=max_bytes, at_least_one=at_least_one)
        self.traffic.bytes_out += len(response.records)
        return response

    def considered(self, error: BrokerError, reader: int = CONSUMER) -> BrokerError:
        """What to tell a reader that met it. A leader whose log is damaged gives up its leadership where the others
        can commit without it, or will with the follower that reads: one that cannot get past the damage may be the one
        that is missing. Else it stays, since all but what is damaged can be read and written, as nowhere else."""
        if error.code is not ErrorCode.CORRUPT_MESSAGE:
            return error
        others = {*self.isr} - {self._settings.broker_id}
        in_sync_then = others if reader == CONSUMER else others | {reader}
        if not others or len(in_sync_then) < self.min_insync_replicas:
            return error
        self._give_up(self, error.detail)
        return BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, error.detail)

    def _response(self, records: bytes, diverging: EpochEndOffset | None = None) -> FetchPartitionResponse:
        return FetchPartitionResponse(
            partition_index=self.topic_partition.partition,
            error_code=ErrorCode.NONE,
            high_watermark=self.high_watermark,
            last_stable_offset=self.high_watermark,
            log_start_offset=self.log.log_start_offset,
            diverging_epoch=diverging,
            records=memoryview(records),
        )

    def refusal(self, code: ErrorCode) -> FetchPartitionResponse:
        return FetchPartitionResponse(
            partition_index=self.topic_partition.partition,
            error_code=code,
            high_watermark=self.high_watermark,
            log_start_offset=self.log.log_start_offset,
            current_leader_id=self.leader_id,
            current_leader_epoch=self.leader_epoch,
        )

    def offset_for(
        self, timestamp_ms: int, current_leader_epoch: int, replica_id: int
    ) -> Generator[None, None, tuple[int, int]]:
        """(timestamp, offset) for ListOffsets; offset -1 where there is no such record. "Latest" is the high
        watermark, which a new leader does not know until it has reached the start of its epoch (KIP-207). In steps,
        as `Search`. Raises BrokerError."""
        self._require_leader(current_leader_epoch)
        end = self.readable_end(replica_id)
        if timestamp_ms in (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP):
            return -1, self.log.log_start_offset
        if timestamp_ms == LATEST_TIERED_TIMESTAMP:
            return -1, -1
        if timestamp_ms < LATEST_TIERED_TIMESTAMP:
            raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, f"timestamp {timestamp_ms} has no meaning here")
        if replica_id == CONSUMER and self.high_watermark < self.epoch_start_offset:
            raise self._high_watermark_not_known()
        if timestamp_ms == LATEST_TIMESTAMP:
            return -1, end
        epoch = self.leader_epoch
        try:
            if timestamp_ms == MAX_TIMESTAMP:
                found = yield from search.newest_record(self.log, end)
            else:
                found = yield from search.offset_for_timestamp(self.log, timestamp_ms, end)
        except BrokerError as error:
            self._require_leader(current_leader_epoch)
            raise self.considered(error, replica_id) from error
        if self.leader_epoch != epoch:
            return (yield from self.offset_for(timestamp_ms, current_leader_epoch, replica_id))
        self._require_leader(current_leader_epoch)
        return found if found is not None else (-1, -1)

    def _high_watermark_not_known(self) -> BrokerError:
        return BrokerError(
            ErrorCode.OFFSET_NOT_AVAILABLE,
            f"the high watermark of {self.topic_partition} is {self.high_watermark}, "
            f"but its leader's epoch began at {self.epoch_start_offset}",
        )

    def end_offset_for_epoch(self, leader_epoch: int, current_leader_epoch: int) -> tuple[int, int]:
        """OffsetsForLeaderEpoch: (epoch, end offset) of the largest epoch not above `leader_epoch`. Raises BrokerError,
        UNKNOWN_LEADER_EPOCH for epochs after this leader's included: an answer would pass for a truncation."""
        self._require_leader(current_leader_epoch)
        self._require_past(leader_epoch)
        return self.log.end_offset_for(leader_epoch)

    def _require_past(self, epoch: int) -> None:
        """A reader with records of a later epoch than this leader's knows of a later leader: it is not for this one to
        say where their histories part (KIP-320)."""
        if epoch > self.leader_epoch:
            raise BrokerError(
                ErrorCode.UNKNOWN_LEADER_EPOCH,
                f"{self.topic_partition} is in epoch {self.leader_epoch} here, not yet in {epoch}",
            )

    def _require_leader(self, current_leader_epoch: int) -> None:
        if current_leader_epoch != NO_EPOCH:
            if current_leader_epoch < self.leader_epoch:
                raise BrokerError(
                    ErrorCode.FENCED_LEADER_EPOCH,
                    f"{self.topic_partition} is in epoch {self.leader_epoch}, not {current_leader_epoch}",
                )
            if current_leader_epoch > self.leader_epoch:
                raise BrokerError(
                    ErrorCode.UNKNOWN_LEADER_EPOCH,
                    f"{self.topic_partition} is in epoch {self.leader_epoch} here, not yet in {current_leader_epoch}",
                )
        if self.role is not Role.LEADER:
            raise BrokerError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{self.topic_partition} is led by broker {self.leader_id} in epoch {self.leader_epoch}",
            )

    # -- leader: what is deleted, on demand and by age --

    def delete_records(self, offset: int) -> int:
        """Let the log begin at `offset` (UP_TO_HIGH_WATERMARK: there), if it begins before. Returns the offset for
        which to await `deletion`.

        Raises BrokerError, and then nothing was deleted: NOT_LEADER_OR_FOLLOWER, also where this leader may have a
        successor that it has not heard of; POLICY_VIOLATION in a topic that is compacted alone; NOT_ENOUGH_REPLICAS;
        OFFSET_OUT_OF_RANGE above the high watermark; OFFSET_NOT_AVAILABLE where a new leader does not know yet how high
        that is (KIP-207); or the disk has failed."""
        self._require_leader(NO_EPOCH)
        if self._may_be_deposed(self.told_in_broker_epoch):
            raise BrokerError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER, f"another broker may lead {self.topic_partition} by now"
            )
        if not self.log.config.delete:
            raise BrokerError(
                ErrorCode.POLICY_VIOLATION,
                f"topic {self.topic_partition.topic} has cleanup.policy=compact, which keeps every key's latest "
                f"record, however old: send a record without a value for each key that is to go, or set "
                f"cleanup.policy=compact,delete",
            )
        if len(self.isr) < self.min_insync_replicas:
            raise self._not_enough_replicas()
        is_beyond = self.high_watermark < offset <= self.log.log_end_offset
        if self.high_watermark < self.epoch_start_offset and (is_beyond or offset == UP_TO_HIGH_WATERMARK):
            raise self._high_watermark_not_known()
        until = self.high_watermark if offset == UP_TO_HIGH_WATERMARK else offset
        if not 0 <= until <= self.high_watermark:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} of {self.topic_partition}, whose committed records end at {self.high_watermark}",
            )
        before = self.log.log_start_offset
        self.log.move_log_start_offset(until)
        if until > before:
            logger.info("%s: deletes records %d to %d on request", self.topic_partition, before, until - 1)
        if self.log.stored_start_offset < until:
            self._store_start_soon(self.topic_partition)
        return until

    @property
    def low_watermark(self) -> int:
        """No replica that may be elected has records below it, nor will it after a crash."""
        return isr_rules.low_watermark(
            self.log.stored_start_offset, self.followers, self.maximal_isr.union(self.eligible)
        )

    def deletion(self, required_offset: int, leading_since_epoch: int) -> ErrorCode | None:
        """As `acknowledgement`, of a deletion up to `required_offset`: NONE once the low watermark has reached it."""
        if not self.is_leader or self.leading_since_epoch != leading_since_epoch:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if len(self.isr) < self.min_insync_replicas:
            return ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        return ErrorCode.NONE if self.low_watermark >= required_offset else None

    def has_expired(self, now_ms: int) -> bool:
        """There is something to `expire`, by the settings as far as they are known here."""
        return self._expired_until(now_ms, self.high_watermark) > self.log.log_start_offset

    def expire(self, now_ms: int, limit: int) -> None:
        """Let the log begin after what is too old or too much by the topic's settings, at `limit` at most. Only a
        leader does that, and none that may have a successor, whose log would begin earlier. Raises BrokerError where
        the disk has failed.

        Called when the settings have just been read: `limit` is the high watermark of a moment before, when they may
        have been others by which nothing was to be deleted that came later."""
        before, start, config = self.log.log_start_offset, self._expired_until(now_ms, limit), self.log.config
        if start > before:
            gone = [segment for segment in self.log.extents() if before < segment.end_offset <= start]
            self.log.move_log_start_offset(start)
            what = retention.described(gone, before, start, now_ms, config.retention_ms, config.retention_bytes)
            logger.info("%s: retention deletes %s", self.topic_partition, what)

    def _expired_until(self, now_ms: int, limit: int) -> int:
        if not self.is_leader or self._may_be_deposed(self.told_in_broker_epoch):
            return self.log.log_start_offset
        return retention.expired(
            self.log.extents(),
            log_start_offset=self.log.log_start_offset,
            high_watermark=min(limit, self.high_watermark),
            now_ms=now_ms,
            retention_ms=self.log.config.retention_ms,
            retention_bytes=self.log.config.retention_bytes,
        )

    # -- follower --

    @property
    def may_fetch(self) -> bool:
        """A fetch says that this replica has all before its offset. Once that is so, the log's `on_flushed` is called
        where it was not."""
        return self.log.is_safe

    def next_fetch(self, partition_max_bytes: int, *, suspect: bool = False) -> FetchPartition:
        """Tells the leader where this log begins and ends, and whether its last answer was corrupt."""
        log = self.log
        stored_start = log.stored_start_offset
        if stored_start != log.log_start_offset:
            self._store_start_soon(self.topic_partition)
        return FetchPartition(
            partition=self.topic_partition.partition,
            current_leader_epoch=self.leader_epoch,
            fetch_offset=log.log_end_offset,
            last_fetched_epoch=log.latest_epoch,
            log_start_offset=stored_start,
            partition_max_bytes=partition_max_bytes,
            suspect=suspect,
        )

    def apply_fetched(self, response: FetchPartitionResponse) -> Fetched:
        """Take the leader's answer to a fetch at the log's end: truncate where the logs diverge, else append.

        The high watermark is raised only after that, and never past the log's end: raised first, it could cover
        records that are about to be cut (KAFKA-14704).
        """
        if response.diverging_epoch is not None:
            before = self.log.log_end_offset, self.log.latest_epoch
            truncated_to = self._truncate_to_divergence(response.diverging_epoch)
            return Fetched(truncated_to, is_stuck=(truncated_to, self.log.latest_epoch) == before)
        appended = len(response.records) > 0
        if appended:
            self._begin_with(response.records)
            self.log.append_as_follower(response.records, self.leader_epoch)
            self.traffic.replication_bytes_in += len(response.records)
        self.high_watermark = max(self.high_watermark, min(response.high_watermark, self.log.log_end_offset))
        self.log.move_log_start_offset(min(response.log_start_offset, self.high_watermark))
        return Fetched(appended=appended)

    def _begin_with(self, records: Buffer) -> None:
        """The leader's log may begin within a batch, and the whole batch is what comes: an empty log begins there, as
        in Kafka after its UnexpectedAppendOffsetException."""
        end = self.log.log_end_offset
        if self.log.log_start_offset == end and len(records) >= HEADER_SIZE:
            header = parse_header(records)
            if header.base_offset < end <= header.last_offset:
                producers = self.log.producers_below(header.base_offset)
                self.log.truncate_fully_and_start_at(header.base_offset, producers=producers)

    def is_to_restart(self, leader_start_offset: int) -> bool:
        """This log was out of the leader's range, and cannot go on with it: the leader's begins after its end, or it
        is empty and does not know what came before it."""
        return leader_start_offset > self.log.log_end_offset or self.log.latest_epoch == NO_EPOCH

    def restart(self, refusal: FetchPartitionResponse) -> None:
        """Drop everything and follow from where the leader's log begins (KAFKA-9491), knowing what it knows of the
        producers of what came before. Raises BrokerError CORRUPT_MESSAGE."""
        try:
            producers = decode_snapshot(bytes(refusal.producers)) if refusal.producers else []
        except InvalidSnapshot as error:
            raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"what the leader knows of producers: {error}") from error
        start, previous = refusal.log_start_offset, refusal.diverging_epoch
        self.log.truncate_fully_and_start_at(start, NO_EPOCH if previous is None else previous.epoch, producers)
        self.high_watermark = start

    def _truncate_to_divergence(self, leader: EpochEndOffset) -> int:
        """Cut back to the end of the last epoch that both logs may share. One round is enough where this log has the
        leader's epoch; otherwise the next fetch, with an earlier epoch, finds the next point (KIP-279)."""
        _, own_end = self.log.end_offset_for(leader.epoch)
        if leader.epoch == NO_EPOCH or own_end == -1:
            offset = min(self.log.log_start_offset, self.log.log_end_offset)
        else:
            offset = min(leader.end_offset, own_end, self.log.log_end_offset)
        try:
            self.log.truncate_to(offset)
        except BrokerError as error:
            if error.code is not ErrorCode.CORRUPT_MESSAGE:
                raise
            self._give_up(self, error.detail)  # it is cut halfway
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, error.detail) from error
        # A batch that reaches over the offset goes as a whole, so the log may end before it.
        self.high_watermark = min(self.high_watermark, self.log.log_end_offset)
        return self.log.log_end_offset


WithPresentSettings = Callable[[Sequence[Partition]], Awaitable[list[Partition]]]
"""Reads settings again, before something is deleted by them: `ReplicaSettings.with_present_settings`."""
