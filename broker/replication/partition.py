"""One replica of one partition on this broker: leader or follower, its log, ISR and high watermark.

Synchronous throughout: nothing here awaits, so each method is atomic on the event loop, and a condition that is checked
at its top still holds at its bottom. `IsrWriter` writes the ISR to ZooKeeper; this class decides what to write
(`propose_isr`) and takes the outcome (`isr_written`, `isr_conflict`).

A fetch is served in three steps, each taken once: `admit` it, record the follower's progress (`record_follower_fetch`),
`read` its records. An admission holds while this leadership lasts, since a leader's log is not cut: after a wait,
`leads_in` is the only question before reading.
"""

import logging
from collections.abc import Callable
from enum import Enum

import msgspec

from minibroker.broker.replication import isr as isr_rules
from minibroker.broker.replication.isolation import CONSUMER, FetchIsolation, aborted_in
from minibroker.broker.replication.isr import Follower
from minibroker.broker.replication.questions import Question, Questions
from minibroker.broker.replication.throttle import Quota, Traffic
from minibroker.broker.storage.log import AppendInfo, Log
from minibroker.broker.storage.validator import Looked
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
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
from minibroker.protocol.records import EndTransactionMarker
from minibroker.protocol.words import counted
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.replication")


class Role(Enum):
    LEADER = "leader"
    FOLLOWER = "follower"


class Settings(msgspec.Struct, frozen=True):
    broker_id: int
    lag_time_max_s: float
    min_insync_replicas: int | None
    """The broker's setting, for topics that do not set it; None: 2 for three or more replicas, else 1."""


class Partition:
    """Guarantees: the high watermark never goes back within a leader epoch except by truncation, and stands still while
    fewer than min.insync.replicas are in sync; a request of another leader epoch changes nothing; an acknowledged
    offset is below the high watermark of the maximal ISR.

    With `durability=synced` only flushed records count: the leader counts its own log up to its last flush, and a
    follower fetches again only when it has flushed the last answer (`may_fetch`), so the offset of its fetch is the end
    of its flushed log. So everything that these offsets decide holds on disk: the high watermark, which replicas lag,
    which may join the ISR. The high watermark itself waits, not only acks=all. Otherwise a consumer could read, and
    commit, records that a power cut of all replicas takes back.
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
        """`store_start_soon` is called when the log begins later than it would after a crash, and a deletion waits for
        that. `give_up` is called when the log is damaged, so that this replica should soon leave service. The quotas
        apply to replicas that are out of sync: those that this leader sends to, and this follower; None: no limit."""
        self.topic_partition = topic_partition
        self.log = log
        self.traffic = traffic or Traffic()
        self.leader_quota = leader_quota
        self.follower_quota = follower_quota
        self.role = Role.FOLLOWER
        self.leader_id = NO_LEADER
        self.role_since_s = clock.monotonic()
        self.leader_epoch = NO_EPOCH
        self.leading_since_epoch = NO_EPOCH
        """The epoch in which this broker last *became* leader. Later epochs of an unbroken leadership keep it, since
        between them the log was never truncated."""
        self.controller_epoch = NO_EPOCH
        self.told_in_broker_epoch = NO_EPOCH
        """The broker epoch in which this broker received its role."""
        self.assignment: tuple[int, ...] = ()
        """All replicas, including those that a reassignment adds or removes."""
        self.replication_factor = 0
        """The replication factor, as in `ReplicaAssignment`."""
        self.isr: tuple[int, ...] = ()
        """The committed ISR: what ZooKeeper is known to hold."""
        self.isr_epochs: tuple[int, ...] = ()
        self.eligible: tuple[int, ...] = ()
        self.eligible_epochs: tuple[int, ...] = ()
        self.to_commit = 0
        """The last four attributes belong to the committed ISR, as in `LeaderAndIsr`."""
        self.proposed_isr: tuple[int, ...] | None = None
        """An ISR that was sent to ZooKeeper, with an outcome that is not known yet."""
        self.proposed_to_commit = 0
        """The `to_commit` that is written with `proposed_isr`."""
        self.partition_epoch = NO_EPOCH
        self.epoch_start_offset = -1
        self.high_watermark = min(max(high_watermark, log.log_start_offset), log.log_end_offset)
        self.followers: dict[int, Follower] = {}
        self.questions = Questions()
        """About transactional batches that this leader is to append."""
        self._settings = settings
        self._clock = clock
        self._alive_epoch = alive_epoch
        self._may_be_deposed = may_be_deposed
        self.store_start_soon = store_start_soon
        self.give_up = give_up
        self._topic_min_insync_replicas = min_insync_replicas

    def reconfigure(
        self,
        settings: Settings,
        min_insync_replicas: int | None,
        leader_quota: Quota | None,
        follower_quota: Quota | None,
    ) -> None:
        """Replace these arguments of the constructor. The caller must then check waiting requests and the ISR: another
        min.insync.replicas may commit records, or stop committing them."""
        self._settings = settings
        self._topic_min_insync_replicas = min_insync_replicas
        self.leader_quota = leader_quota
        self.follower_quota = follower_quota

    # -- orders of the controller --

    def is_stale(self, state: LeaderAndIsrPartition) -> bool:
        """Whether the state's leader epoch is earlier than the one held here."""
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
        """Follow the state's leader, if it has one."""
        self._adopt(state, Role.FOLLOWER)
        self.followers = {}

    def stop_leading(self) -> None:
        """Stop leading, on the controller's order. The replica follows no leader until it receives a role."""
        self.role = Role.FOLLOWER
        self.leader_id = NO_LEADER
        self.followers = {}
        self.questions.void_all()

    def _adopt(self, state: LeaderAndIsrPartition, role: Role) -> None:
        if (role, state.leader) != (self.role, self.leader_id):
            self.role_since_s = self._clock.monotonic()
        self.role = role
        self.leader_id = state.leader
        if state.leader_epoch > self.leader_epoch or state.partition_epoch > self.partition_epoch:
            self.isr, self.isr_epochs = tuple(state.isr), tuple(state.isr_epochs)
            self.eligible, self.eligible_epochs = tuple(state.eligible), tuple(state.eligible_epochs)
            self.to_commit = state.to_commit
            self.proposed_isr = None
            self.partition_epoch = state.partition_epoch
        if role is Role.FOLLOWER:
            self.questions.void_all()
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

    @property
    def may_be_deposed(self) -> bool:
        """Whether this leader may have a successor that it does not know."""
        return self._may_be_deposed(self.told_in_broker_epoch)

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
        """Whether the state znode has a lower number than min.insync.replicas, or would get it by a pending change. The
        controller shrinks the ISR by that number, so records committed by the higher one would not be safe."""
        needed = self.min_insync_replicas
        return 0 < self.to_commit < needed or (self.proposed_isr is not None and self.proposed_to_commit < needed)

    @property
    def is_to_be_recorded(self) -> bool:
        """Whether the state znode has another number than min.insync.replicas. While other replicas are eligible, this
        waits until they are struck off, since each write decides about them."""
        return self.is_leader and self.to_commit != self.min_insync_replicas and not self.eligible

    def append(
        self,
        records: Buffer,
        *,
        required_acks: int,
        now_ms: int,
        looked: Looked = Looked.NOT,
        question: Question | None = None,
    ) -> AppendInfo:
        """Append as leader. `looked`: as for `check_acceptable`. `question`: the one that was answered for these
        records. Raises BrokerError, with nothing written: NOT_LEADER_OR_FOLLOWER, NOT_ENOUGH_REPLICAS (acks=all), and
        the errors of `Questions.check` and `Log.append_as_leader`."""
        self._require_writable(required_acks)
        self.questions.check(self.log, records, question)
        info = self.log.append_as_leader(records, self.leader_epoch, now_ms, looked=looked)  # P4
        self.traffic.bytes_in += len(records)
        self.traffic.messages_in += info.last_offset - info.first_offset + 1
        if len(self.isr) == 1:
            self.advance_high_watermark()
        return info

    def append_marker(
        self, producer_id: int, producer_epoch: int, marker: EndTransactionMarker, *, raises_epoch: bool, now_ms: int
    ) -> AppendInfo:
        """End the producer's transaction, as leader. Raises BrokerError, with nothing written: NOT_LEADER_OR_FOLLOWER,
        NOT_ENOUGH_REPLICAS, and the errors of `Log.append_marker`."""
        self._require_writable(-1)
        info = self.log.append_marker(
            producer_id, producer_epoch, marker, self.leader_epoch, now_ms, raises_epoch=raises_epoch
        )
        self.questions.void(producer_id)
        if len(self.isr) == 1:
            self.advance_high_watermark()
        return info

    def _require_writable(self, required_acks: int) -> None:
        self.require_leader(NO_EPOCH)
        if required_acks == -1 and len(self.isr) < self.min_insync_replicas:
            raise self._not_enough_replicas()

    def _not_enough_replicas(self) -> BrokerError:
        return BrokerError(
            ErrorCode.NOT_ENOUGH_REPLICAS,
            f"{self.topic_partition} has {counted(len(self.isr), 'replica')} in sync {list(self.isr)}, "
            f"but min.insync.replicas is {self.min_insync_replicas}",
        )

    def acknowledgement(self, required_offset: int, leading_since_epoch: int) -> ErrorCode | None:
        """Return the outcome of an append that ended at `required_offset`: NONE once all in-sync replicas have it, an
        error if its fate can no longer be determined, None while it is open (DelayedProduce's three endings).

        With too few replicas in sync the high watermark stands still, so the producer gets an error at once and
        retries."""
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
        """Move the high watermark to the smallest log end of the replicas that count. Return True if it moved.

        It stands still while the committed ISR is too small, while replicas outside of it are on record as eligible
        (they have the records committed before, and would lack those committed now), and until min.insync.replicas is
        on record."""
        if self.role is not Role.LEADER or self.high_watermark >= self.log.log_end_offset:
            return False  # nearly always, with very many partitions
        if self.eligible or len(self.isr) < self.min_insync_replicas or self.promises_more_than_is_on_record:
            return False
        if len(self.isr) < len(self.assignment):
            self.disregard_the_gone()  # one that was about to join when it went, or that has fetched once more
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
        self.log.forget_replicated(reached)
        return True

    @property
    def last_stable_offset(self) -> int:
        """The end for read_committed consumers: every transaction below is decided. At least the log's start: the first
        records of an open transaction may be deleted."""
        return max(self.log.last_stable_offset(self.high_watermark), self.log.log_start_offset)

    @property
    def leads_alone(self) -> bool:
        """Whether no other replica can have become leader without this one: none is in sync or eligible."""
        return self.is_leader and self.maximal_isr == {self.leader_id} and not self.eligible

    def disregard_the_gone(self) -> None:
        """Stop waiting for followers outside of the ISR whose brokers have died or are about to stop: however recently
        they had caught up, they will not join."""
        awaited = self.maximal_isr
        for broker_id, follower in self.followers.items():
            if broker_id not in awaited and self._alive_epoch(broker_id) is None:
                follower.last_caught_up_s = float("-inf")

    def isr_to_propose(self) -> tuple[int, ...] | None:
        """Return the ISR that this leader would write now: without lagging followers, with those that caught up. None
        if the ISR is right, or if a change is pending already.

        The same ISR is proposed again in two cases. One: other replicas are eligible beside an ISR that is large enough
        (the setting has changed, or a replica has lost records). Nothing is committed until they are struck off; but
        first all of the ISR must have fetched in this epoch, which shows that they live. Two: another
        min.insync.replicas must go on record.
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
            # It would have to leave again at once. While the high watermark stands still (below min.insync.replicas),
            # even a dead follower has reached it, and would join and leave with each answer of ZooKeeper.
            return False
        return isr_rules.may_join(
            follower,
            self.log.log_start_offset,
            self.high_watermark,
            self.epoch_start_offset,
            self._alive_epoch(broker_id),
        )

    def propose_isr(self, isr: tuple[int, ...]) -> LeaderAndIsr:
        """Let the high watermark wait for the members of `isr` as well. Return the state to write; the write must be
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
        """Adopt the committed state. Return True if the high watermark moved."""
        self.isr, self.isr_epochs = state.isr, state.isr_epochs
        self.eligible, self.eligible_epochs = state.eligible, state.eligible_epochs
        self.to_commit = state.to_commit
        self.proposed_isr = None
        self.partition_epoch = version
        return self.advance_high_watermark()

    def isr_written(self, written: LeaderAndIsr, version: int) -> bool:
        """Adopt the proposed ISR, which ZooKeeper holds at this version. Return True if the high watermark moved."""
        return self.is_pending(written) and self._commit(written, version)

    def isr_conflict(self, proposed: LeaderAndIsr, actual: LeaderAndIsr) -> bool:
        """ZooKeeper rejected the write, and holds `actual`. Adopt that if it belongs to this leadership; otherwise
        another broker leads, and an order of the controller is about to say so. Return True if the high watermark
        moved."""
        if not self.is_pending(proposed):
            return False
        if (actual.leader, actual.leader_epoch) != (self.leader_id, self.leader_epoch):
            return False
        return self._commit(actual, actual.partition_epoch)

    def is_pending(self, proposal: LeaderAndIsr) -> bool:
        """Whether the proposal's outcome still matters: no newer state has arrived since."""
        return (
            self.is_leader
            and self.leader_epoch == proposal.leader_epoch
            and self.partition_epoch == proposal.partition_epoch
            and self.proposed_isr == proposal.isr
        )

    # -- leader: fetches --

    def record_follower_fetch(self, replica_id: int, fetch: FetchPartition, broker_epoch: int) -> bool:
        """Record that a follower has everything before an admitted fetch. Return True if the high watermark moved."""
        isr_rules.record_fetch(
            self.followers[replica_id],
            fetch.fetch_offset,
            fetch.log_start_offset,
            self.log.log_end_offset,
            self._clock.monotonic(),
            broker_epoch,
        )
        return self.advance_high_watermark()

    def end_for(self, isolation: FetchIsolation) -> int:
        """Return the end of the log for a reader."""
        if isolation is FetchIsolation.HIGH_WATERMARK:
            return self.high_watermark
        return self.log.log_end_offset if isolation is FetchIsolation.LOG_END else self.last_stable_offset

    def quota_for(self, replica_id: int) -> Quota | None:
        """Return the quota to which bytes sent to that replica count; None if the high watermark waits for it."""
        quota = self.leader_quota
        if quota is None or replica_id == CONSUMER or replica_id in self.maximal_isr:
            return None
        end, now_s = self.log.log_end_offset, self._clock.monotonic()
        is_caught_up = isr_rules.is_caught_up(self.followers[replica_id], end, now_s, self._settings.lag_time_max_s)
        return None if is_caught_up else quota

    def withholds_from(self, replica_id: int) -> bool:
        """Whether that replica gets nothing now: it is out of sync, and the rate is used up."""
        quota = self.quota_for(replica_id)
        return quota is not None and quota.is_exceeded

    def check_topic_id(self, topic_id: str) -> None:
        """Raises BrokerError if this partition belongs to another topic of the same name. An empty id matches any."""
        if topic_id and topic_id != self.log.topic_id:
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID,
                f"{self.topic_partition} has topic id {self.log.topic_id} here, not {topic_id}",
            )

    def admit(self, fetch: FetchPartition, replica_id: int) -> FetchPartitionResponse | None:
        """Return None if the fetch may be served, now and while this leadership lasts. Otherwise return its answer: an
        error, or the diverging epoch."""
        try:
            diverging = self.check_fetch(fetch, replica_id)
        except BrokerError as error:
            refusal = self.refusal(error.code)
            if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and replica_id != CONSUMER:
                start = self.log.log_start_offset
                refusal.diverging_epoch = EpochEndOffset(self.log.epoch_at(start - 1), start)
            return refusal
        return None if diverging is None else self._response(b"", diverging)

    def check_fetch(self, fetch: FetchPartition, replica_id: int) -> EpochEndOffset | None:
        """Return the diverging epoch if the follower's log is not a prefix of this one (KIP-595), which includes a
        follower that is ahead. Raises BrokerError (not leader, another epoch, out of range, no replica of this
        partition).

        A follower with an empty log that knows nothing of earlier records has nothing to compare. If this log holds
        records before its offset, the follower would lack them, so its fetch is out of range.
        """
        self.require_leader(fetch.current_leader_epoch)
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
            if replica_id == CONSUMER and self.may_be_deposed:
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
        self, fetch: FetchPartition, replica_id: int, isolation: FetchIsolation, *, max_bytes: int, at_least_one: bool
    ) -> FetchPartitionResponse:
        """Return the records for an admitted fetch: whole batches, from its offset on. Errors come as codes."""
        end = self.end_for(isolation)
        if fetch.fetch_offset >= end or self.withholds_from(replica_id):
            return self._response(b"")
        limit = min(max_bytes, fetch.partition_max_bytes)
        try:
            records = self.log.read(fetch.fetch_offset, limit, end, min_one=at_least_one)
            if fetch.suspect:
                self.log.check(records, fetch.fetch_offset)
        except BrokerError as error:
            return self.refusal(self.considered(error, replica_id).code)
        response = self._response(records)
        if isolation is FetchIsolation.TXN_COMMITTED:
            response.aborted_transactions = aborted_in(self.log, fetch.fetch_offset, records, end)
        return response

    def considered(self, error: BrokerError, reader: int = CONSUMER) -> BrokerError:
        """Return the error for a reader that met `error`. A leader with a damaged log gives up its leadership if the
        other replicas can commit without it, or could together with the reading follower, which may be the missing one
        because it cannot get past the damage. Otherwise it stays: everything else in its log can be read and written,
        and nowhere else."""
        if error.code is not ErrorCode.CORRUPT_MESSAGE:
            return error
        others = {*self.isr} - {self._settings.broker_id}
        in_sync_then = others if reader == CONSUMER else others | {reader}
        if not others or len(in_sync_then) < self.min_insync_replicas:
            return error
        self.give_up(self, error.detail)
        return BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, error.detail)

    def _response(self, records: bytes, diverging: EpochEndOffset | None = None) -> FetchPartitionResponse:
        return FetchPartitionResponse(
            partition_index=self.topic_partition.partition,
            error_code=ErrorCode.NONE,
            high_watermark=self.high_watermark,
            last_stable_offset=self.last_stable_offset,
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

    def high_watermark_not_known(self) -> BrokerError:
        return BrokerError(
            ErrorCode.OFFSET_NOT_AVAILABLE,
            f"the high watermark of {self.topic_partition} is {self.high_watermark}, "
            f"but its leader's epoch began at {self.epoch_start_offset}",
        )

    def end_offset_for_epoch(self, leader_epoch: int, current_leader_epoch: int) -> tuple[int, int]:
        """OffsetsForLeaderEpoch: return (epoch, end offset) of the largest epoch not above `leader_epoch`. Raises
        BrokerError; UNKNOWN_LEADER_EPOCH for epochs after this leader's, since any answer would look like a truncation.
        """
        self.require_leader(current_leader_epoch)
        self._require_past(leader_epoch)
        return self.log.end_offset_for(leader_epoch)

    def _require_past(self, epoch: int) -> None:
        """Raises BrokerError if `epoch` is later than this leader's. A reader with records of a later epoch knows a
        later leader, so this one cannot say where their histories part (KIP-320)."""
        if epoch > self.leader_epoch:
            raise BrokerError(
                ErrorCode.UNKNOWN_LEADER_EPOCH,
                f"{self.topic_partition} is in epoch {self.leader_epoch} here, not yet in {epoch}",
            )

    def require_leader(self, current_leader_epoch: int) -> None:
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

    # -- leader: deletion on request; by retention: see `upkeep.log_retention` --

    def delete_records(self, offset: int) -> int:
        """Let the log begin at `offset` (or at the high watermark, for UP_TO_HIGH_WATERMARK), if it begins earlier.
        Return the offset for which to await `deletion`.

        Raises BrokerError, with nothing deleted: NOT_LEADER_OR_FOLLOWER, also if this leader may have a successor that
        it does not know; POLICY_VIOLATION in a topic that is only compacted; NOT_ENOUGH_REPLICAS; OFFSET_OUT_OF_RANGE
        above the high watermark; OFFSET_NOT_AVAILABLE while a new leader does not know the high watermark (KIP-207);
        KAFKA_STORAGE_ERROR if the disk has failed."""
        self.require_leader(NO_EPOCH)
        if self.may_be_deposed:
            raise BrokerError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER, f"another broker may lead {self.topic_partition} by now"
            )
        if not self.log.config.delete:
            raise BrokerError(
                ErrorCode.POLICY_VIOLATION,
                f"topic {self.topic_partition.topic} has cleanup.policy=compact, which keeps every key's latest "
                f"record, however old: send a record without a value for each key to delete, or set "
                f"cleanup.policy=compact,delete",
            )
        if len(self.isr) < self.min_insync_replicas:
            raise self._not_enough_replicas()
        is_beyond = self.high_watermark < offset <= self.log.log_end_offset
        if self.high_watermark < self.epoch_start_offset and (is_beyond or offset == UP_TO_HIGH_WATERMARK):
            raise self.high_watermark_not_known()
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
            self.store_start_soon(self.topic_partition)
        return until

    @property
    def low_watermark(self) -> int:
        """The offset below which no electable replica has records, even after a crash."""
        return isr_rules.low_watermark(
            self.log.stored_start_offset, self.followers, self.maximal_isr.union(self.eligible)
        )

    def deletion(self, required_offset: int, leading_since_epoch: int) -> ErrorCode | None:
        """As `acknowledgement`, for a deletion up to `required_offset`: NONE once the low watermark has reached it."""
        if not self.is_leader or self.leading_since_epoch != leading_since_epoch:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if len(self.isr) < self.min_insync_replicas:
            return ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        return ErrorCode.NONE if self.low_watermark >= required_offset else None

    # -- follower: see `following.copying` --

    @property
    def may_fetch(self) -> bool:
        """Whether this follower may ask for more: a fetch says that it has everything before its offset. When that
        becomes true, the log's `on_flushed` is called."""
        return self.log.is_safe
