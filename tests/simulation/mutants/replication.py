"""Planted bugs of replication: truncation, the high watermark, the ISR, acknowledgements."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from minibroker.broker.replication import isr as isr_rules
from minibroker.broker.replication import isr_writer
from minibroker.broker.replication.delayed import DelayedFetch
from minibroker.broker.replication.following import copying
from minibroker.broker.replication.following.fetcher import ReplicaFetcher
from minibroker.broker.replication.following.silences import Silences
from minibroker.broker.replication.isolation import CONSUMER, FetchIsolation
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.broker.replication.orders import ControllerOrders
from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.flushing import FlushedLog
from minibroker.broker.storage.log import Log
from minibroker.protocol import model, zookeeper_reads
from minibroker.protocol.connections import keepalive
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.fetch_slots import Answer, LeaderSlots
from minibroker.protocol.model import NO_EPOCH
from minibroker.protocol.records import iterate_batches
from minibroker.protocol.world import SetData
from tests.simulation.mutants.planting import Patches, mutant

# --- Truncation of followers ------------------------------------------------------------------------------------


def _never_ask_where_epochs_part(patches: Patches) -> None:
    @patches.instead_of(Partition, "check_fetch")
    def check_fetch(original: Any, self: Partition, fetch: Any, replica_id: int) -> Any:
        if replica_id != CONSUMER:
            fetch = msgspec.structs.replace(fetch, last_fetched_epoch=self.log.latest_epoch)
        return original(self, fetch, replica_id)


@mutant(
    "KIP-101, KAFKA-1211",
    "a new follower truncates its log to its own high watermark instead of the point where its epochs diverge "
    "from the leader's",
)
def truncation_by_high_watermark(patches: Patches) -> None:
    @patches.instead_of(Partition, "become_follower")
    def become_follower(original: Any, self: Partition, state: Any) -> None:
        is_new = state.leader_epoch > self.leader_epoch
        original(self, state)
        if is_new:
            self.log.truncate_to(self.high_watermark)

    _never_ask_where_epochs_part(patches)


@mutant("KIP-279, KAFKA-6361", "a follower's log that is no longer than the leader's is taken as a prefix of it")
def divergence_by_length_alone(patches: Patches) -> None:
    _never_ask_where_epochs_part(patches)


@mutant("KIP-320", "the leader checks neither the leader epoch of a follower's fetch nor the last epoch of its log")
def fetch_not_fenced_by_epoch(patches: Patches) -> None:
    @patches.instead_of(Partition, "check_fetch")
    def check_fetch(original: Any, self: Partition, fetch: Any, replica_id: int) -> Any:
        if replica_id != CONSUMER:
            fetch = msgspec.structs.replace(
                fetch, current_leader_epoch=NO_EPOCH, last_fetched_epoch=self.log.latest_epoch
            )
        return original(self, fetch, replica_id)


@mutant("KIP-320", "a leader orders a replica with records of a later epoch than its own to truncate them")
def stale_leader_says_where_histories_part(patches: Patches) -> None:
    @patches.instead_of(Partition, "_require_past")
    def require_past(original: Any, self: Partition, epoch: int) -> None:
        """Do nothing."""


@mutant(
    "KAFKA-14704, KAFKA-9491",
    "a follower adopts the high watermark before it truncates its log, and keeps it afterwards",
)
def high_watermark_before_truncation(patches: Patches) -> None:
    @patches.instead_of(copying, "apply_fetched")
    def apply_fetched(original: Any, partition: Partition, response: Any) -> Any:
        raised = max(partition.high_watermark, min(response.high_watermark, partition.log.log_end_offset))
        fetched = original(partition, response)
        partition.high_watermark = max(partition.high_watermark, raised)
        return fetched


@mutant("KAFKA-7415", "a leader's epoch begins after the first batch that it wrote in it")
def epoch_begins_too_late(patches: Patches) -> None:
    @patches.instead_of(Log, "assign_epoch_start")
    def assign_epoch_start(original: Any, self: Log, epoch: int, offset: int) -> None:
        """Do nothing: the first append records it."""

    @patches.instead_of(Log, "append_as_leader")
    def append_as_leader(original: Any, self: Log, records: Any, leader_epoch: int, now_ms: int, **named: Any) -> Any:
        is_first = leader_epoch > self.latest_epoch
        info = original(self, records, leader_epoch, now_ms, **named)
        if is_first and not info.duplicate:
            self._epochs.truncate_from_end(info.first_offset)
            self._epochs.assign(leader_epoch, info.next_offset)
        return info


@mutant(
    "a stale answer to a fetch",
    "the answer to a fetch of an earlier epoch is appended, wherever the log ends meanwhile",
)
def late_answer_is_appended(patches: Patches) -> None:
    @patches.instead_of(ReplicaFetcher, "_apply")
    def apply(original: Any, self: ReplicaFetcher, asked: Any, response: Any) -> None:
        original(self, {partition: self._follows.get(partition) for partition in asked}, response)

    @patches.instead_of(Log, "append_as_follower")
    def append_as_follower(original: Any, self: Log, records: Any, leader_epoch: int) -> Any:
        info = None
        for header, start, end in iterate_batches(records):
            if header.partition_leader_epoch >= self.latest_epoch:
                self._log_end_offset = header.base_offset
                info = original(self, memoryview(records)[start:end], leader_epoch)
        return info


# --- High watermark -------------------------------------------------------------------------------------------


@mutant("acknowledged too early", "acks=all is answered as soon as the leader itself has the records")
def acknowledged_before_replicated(patches: Patches) -> None:
    @patches.instead_of(Partition, "acknowledgement")
    def acknowledgement(original: Any, self: Partition, *rest: Any) -> ErrorCode:
        code = original(self, *rest)
        return ErrorCode.NONE if code is None else code


@mutant("high watermark too high", "the high watermark is the leader's log end")
def high_watermark_is_log_end(patches: Patches) -> None:
    @patches.instead_of(isr_rules, "high_watermark")
    def high_watermark(original: Any, leader_end_offset: int, *rest: Any) -> int:
        return leader_end_offset


@mutant(
    "high watermark too high",
    "the high watermark ignores members of the ISR that have not fetched from a new leader yet",
)
def not_waiting_for_members_that_have_not_fetched(patches: Patches) -> None:
    @patches.instead_of(isr_rules, "high_watermark")
    def high_watermark(original: Any, leader_end_offset: int, followers: Any, *rest: Any) -> int:
        known = {broker_id: follower for broker_id, follower in followers.items() if follower.log_end_offset >= 0}
        return original(leader_end_offset, known, *rest)  # type: ignore[no-any-return]


@mutant("high watermark too high", "records count as stored by a follower as soon as they are sent")
def sent_counts_as_stored(patches: Patches) -> None:
    @patches.instead_of(Partition, "read")
    def read(original: Any, self: Partition, fetch: Any, replica_id: int, *isolation: Any, **limits: Any) -> Any:
        response = original(self, fetch, replica_id, *isolation, **limits)
        if len(response.records) and replica_id in self.followers:
            *_, (header, _, _) = iterate_batches(response.records)
            self.followers[replica_id].log_end_offset = header.next_offset
            self.advance_high_watermark()
        return response


@mutant("KIP-497", "the high watermark uses the committed ISR and ignores the one being written to ZooKeeper")
def high_watermark_of_committed_isr(patches: Patches) -> None:
    @patches.instead_of(Partition, "maximal_isr")
    def maximal_isr(original: Any, self: Partition) -> set[int]:
        return set(self.isr)

    # The second fence: recently caught-up replicas are waited for, in the ISR or not.
    @patches.instead_of(isr_rules, "high_watermark")
    def high_watermark(original: Any, leader_end_offset: int, followers: Any, maximal_isr: Any, *rest: Any) -> int:
        members = {broker_id: follower for broker_id, follower in followers.items() if broker_id in maximal_isr}
        return original(leader_end_offset, members, maximal_isr, *rest)  # type: ignore[no-any-return]


@mutant("KIP-497", "an ISR counts as soon as its write is under way: leaving members are not waited for")
def high_watermark_of_proposed_isr(patches: Patches) -> None:
    @patches.instead_of(Partition, "maximal_isr")
    def maximal_isr(original: Any, self: Partition) -> set[int]:
        return set(self.isr if self.proposed_isr is None else self.proposed_isr)


@mutant("uncommitted reads", "consumers may read up to the log's end")
def consumers_read_to_the_end(patches: Patches) -> None:
    @patches.instead_of(Partition, "end_for")
    def end_for(original: Any, self: Partition, isolation: FetchIsolation) -> int:
        return self.log.log_end_offset


@mutant("min.insync.replicas", "min.insync.replicas counts as 1, whatever its value")
def min_insync_replicas_not_checked(patches: Patches) -> None:
    @patches.instead_of(model, "min_insync_replicas")
    def min_insync_replicas(original: Any, *rest: Any) -> int:
        return 1


@mutant("KIP-966", "the high watermark advances while fewer than min.insync.replicas are in sync")
def high_watermark_moves_below_min_isr(patches: Patches) -> None:
    @patches.instead_of(Partition, "advance_high_watermark")
    def advance_high_watermark(original: Any, self: Partition) -> bool:
        isr, eligible = self.isr, self.eligible
        self.isr, self.eligible = isr * len(self.assignment), ()  # so that it seems large enough
        try:
            return bool(original(self))
        finally:
            self.isr, self.eligible = isr, eligible


# --- The ISR -----------------------------------------------------------------------------------------------------


@mutant(
    "KAFKA-7128",
    "a replica at the high watermark joins the ISR, although it is below the start of the leader's epoch or lags",
)
def join_before_epoch_start(patches: Patches) -> None:
    @patches.instead_of(Partition, "_may_join")
    def may_join(original: Any, self: Partition, broker_id: int) -> bool:
        alive_epoch = self._alive_epoch(broker_id)
        start = self.log.log_start_offset
        return isr_rules.may_join(self.followers[broker_id], start, self.high_watermark, 0, alive_epoch)


@mutant("an ensemble's stale read", "a topic's settings are read from a ZooKeeper server that may be behind")
def settings_of_a_server_that_is_behind(patches: Patches) -> None:
    @patches.instead_of(ControllerOrders, "_up_to_date_session")
    async def up_to_date_session(original: Any, self: ControllerOrders) -> Any:
        return await self._sessions()


@mutant("an ensemble's stale read", "the outcome of an ISR write is read from a ZooKeeper server that may be behind")
def outcome_of_a_server_that_is_behind(patches: Patches) -> None:
    @patches.instead_of(zookeeper_reads, "catch_up")
    async def catch_up(original: Any, session: Any) -> None:
        pass


class _WithoutVersions:
    """A ZooKeeper session that writes whatever the version is."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def set(self, path: str, data: bytes, version: int = -1) -> Any:
        return await self._session.set(path, data)

    async def multi(self, operations: Any) -> Any:
        return await self._session.multi([o._replace(version=-1) if isinstance(o, SetData) else o for o in operations])


@mutant("KAFKA-8836", "a leader writes the ISR without checking the state znode's version")
def isr_written_without_version(patches: Patches) -> None:
    @patches.instead_of(IsrWriter, "__init__")
    def init(original: Any, self: IsrWriter, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        sessions = self._sessions

        async def without_versions() -> Any:
            return _WithoutVersions(await sessions())

        self._sessions = without_versions


@mutant("a topic created again", "an order for a replica that arrives after its deletion creates it again")
def deleted_replica_made_again(patches: Patches) -> None:
    @patches.instead_of(ReplicaLifecycle, "was_deleted")
    def was_deleted(original: Any, *rest: Any) -> bool:
        return False


@mutant(
    "a topic created again",
    "a leader does not check which topic the state znode belongs to before it reads and writes it",
)
def isr_of_another_topic(patches: Patches) -> None:
    @patches.instead_of(isr_writer, "_isr_write")
    def isr_write(original: Any, *rest: Any) -> Any:
        return [operation for operation in original(*rest) if isinstance(operation, SetData)]

    @patches.instead_of(isr_writer, "_is_gone")
    async def is_gone(original: Any, *rest: Any) -> bool:
        return False


@mutant(
    "KAFKA-2729, KAFKA-3042",
    "a leader learns the znode's new version neither from its write nor from the conflict that follows",
)
def cached_version_for_ever(patches: Patches) -> None:
    @patches.instead_of(Partition, "isr_written")
    def isr_written(original: Any, self: Partition, written: Any, version: int) -> bool:
        return bool(original(self, written, self.partition_epoch))

    @patches.instead_of(Partition, "isr_conflict")
    def isr_conflict(original: Any, self: Partition, *rest: Any) -> bool:
        return False


# --- Deleted records ---------------------------------------------------------------------------------------------


@mutant("KIP-107", "a deletion of records is acknowledged as soon as the leader itself has deleted them")
def deletion_acknowledged_before_replicated(patches: Patches) -> None:
    @patches.instead_of(Partition, "low_watermark")
    def low_watermark(original: Any, self: Partition) -> int:
        return self.log.log_start_offset


@mutant("KIP-107", "a deletion of records is acknowledged before it is on the replicas' disks")
def deletion_acknowledged_before_stored(patches: Patches) -> None:
    @patches.instead_of(FlushedLog, "stored_start_offset")
    def stored_start_offset(original: Any, self: FlushedLog) -> int:
        return self.log_start_offset


@mutant("KIP-107", "a replica joins the ISR with records that were deleted while it was away")
def join_with_what_was_deleted(patches: Patches) -> None:
    @patches.instead_of(isr_rules, "may_join")
    def may_join(original: Any, follower: Any, log_start_offset: int, *rest: Any) -> bool:
        return bool(original(follower, -1, *rest))


@mutant(
    "KIP-107, KIP-966",
    "a deletion of records is acknowledged regardless of min.insync.replicas, and without the eligible "
    "replicas outside the ISR",
)
def deletion_acknowledged_below_min_isr(patches: Patches) -> None:
    is_about_a_deletion = False

    @patches.instead_of(Partition, "min_insync_replicas")
    def min_insync_replicas(original: Any, self: Partition) -> Any:
        return 1 if is_about_a_deletion else original(self)

    def forgetful(original: Any, *what: Any) -> Any:
        nonlocal is_about_a_deletion
        is_about_a_deletion = True
        try:
            return original(*what)
        finally:
            is_about_a_deletion = False

    patches.instead_of(Partition, "delete_records")(forgetful)
    patches.instead_of(Partition, "deletion")(forgetful)

    @patches.instead_of(Partition, "low_watermark")
    def low_watermark(original: Any, self: Partition) -> int:
        return isr_rules.low_watermark(self.log.stored_start_offset, self.followers, self.maximal_isr)


@mutant("KIP-227", "a leader that receives the same fetch again does not report progress without new records")
def news_without_records_untold(patches: Patches) -> None:
    @patches.instead_of(LeaderSlots, "_news")
    def news(original: Any, self: LeaderSlots, answer: Answer) -> Answer:
        return [part for part in original(self, answer) if len(part[1].records) or part[1].error_code]


@mutant("KAFKA-6653", "a waiting fetch of several partitions checks only one of them")
def other_partitions_of_a_fetch_forgotten(patches: Patches) -> None:
    @patches.instead_of(DelayedFetch, "try_complete_after")
    def try_complete_after(original: Any, self: DelayedFetch, checked: Sequence[Hashable]) -> bool:
        return bool(original(self, checked[:1]))


@mutant("a silent connection", "a broker does not check whether a silent connection still exists")
def silence_is_not_noticed(patches: Patches) -> None:
    @patches.instead_of(keepalive, "keep_alive")
    def keep_alive(original: Any, *rest: Any) -> None:
        """Do nothing."""


# --- Silent brokers ------------------------------------------------------------------------------------------------


@mutant("false stories", "nobody records that a broker was silent, so a failover begins when it was noticed")
def silences_are_not_recorded(patches: Patches) -> None:
    @patches.instead_of(Silences, "present_or_recent")
    def present_or_recent(original: Any, self: Silences, broker_id: int, expected_since_s: float) -> None:
        """Return None."""
