"""Planted bugs of consumer groups: coordinators that forget or trust too much, members that share partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from minibroker.broker.coordinating import terms
from minibroker.broker.coordinating.ageing import Ageing
from minibroker.broker.coordinating.attempts import LatestAttempts
from minibroker.broker.coordinating.terms import Outcome, Term, Terms
from minibroker.broker.groups import commits, coordinator, offsets
from minibroker.broker.groups import terms as group_terms
from minibroker.broker.groups.coordinator import GroupCoordinator
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.offsets import GroupOffsets
from minibroker.broker.groups.removal import GroupRemoval
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import GroupTerm
from minibroker.broker.scheduling.slices import Slices
from minibroker.client.group import assignors, auto_commit
from minibroker.client.group.assignors import CooperativeSticky
from minibroker.client.group.commits import Commits, OffsetAndMetadata
from minibroker.client.group.member import GroupMember
from minibroker.client.group.standing import Standing
from minibroker.client.group.states import MemberState
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import decode_batch, iterate_batches
from tests.simulation.mutants.planting import Patches, mutant

# --- Commits --------------------------------------------------------------------------------------------------------


@mutant("acknowledged too early", "a commit is acknowledged and returned as soon as it is in the coordinator's own log")
def commit_acknowledged_before_it_is_replicated(patches: Patches) -> None:
    @patches.instead_of(Terms, "write")
    def write(original: Any, self: Terms[Any], term: Term, records: Any, written: Any, **options: Any) -> None:
        answered: list[Outcome] = []

        def once(outcome: Outcome) -> None:
            if not answered:
                answered.append(outcome)
                written(outcome)

        partition = self._replicas.partitions.get(term.topic_partition)
        end = -1 if partition is None else partition.log.log_end_offset
        original(self, term, records, once, **options)
        once(Outcome(ErrorCode.NONE, end))


@mutant("KAFKA-5600", "a loading coordinator takes the first record of each key instead of the last")
def first_record_of_a_key_counts(patches: Patches) -> None:
    @patches.instead_of(group_terms._Loading, "add")
    def add(original: Any, self: Any, batch: Any) -> None:
        known = {group: dict(of_group) for group, of_group in self._offsets.items()}
        original(self, batch)
        for group, of_group in known.items():
            self._offsets[group] |= of_group


@mutant("a number for two", "a coordinator knows of only one predecessor that stored no generation")
def generations_of_one_coordinator_are_skipped(patches: Patches) -> None:
    @patches.instead_of(group_terms, "group_from")
    def group_from(original: Any, group_id: str, value: Any, now_s: float, terms_since: int) -> Any:
        return original(group_id, value, now_s)


@mutant("KAFKA-2841", "a broker that coordinates groups again uses its groups from its earlier term")
def groups_outlive_the_term(patches: Patches) -> None:
    kept: dict[tuple[Terms[Any], int], dict[str, Group]] = {}

    @patches.instead_of(Terms, "_read")
    async def read(original: Any, self: Terms[Any], term: Term) -> None:
        await original(self, term)
        if isinstance(term, GroupTerm):
            term.groups |= kept.get((self, term.topic_partition.partition), {})

    @patches.instead_of(Terms, "_end")
    def end(original: Any, self: Terms[Any], index: int) -> None:
        term = self._terms.get(index)
        original(self, index)
        if isinstance(term, GroupTerm) and term.is_loaded:
            kept[self, index] = term.groups


@mutant("KAFKA-2841", "a load continues after its partition was lost, and its result replaces that of the next load")
def load_outlives_its_term(patches: Patches) -> None:
    ended: list[GroupTerm] = []

    @patches.instead_of(Terms, "_end")
    def end(original: Any, self: Terms[Any], index: int) -> None:
        term = self._terms.get(index)
        original(self, index)
        if isinstance(term, GroupTerm) and not term.is_loaded:
            term.is_over = False
            ended.append(term)

    @patches.instead_of(Terms, "_load")
    async def load(original: Any, self: Terms[Any], term: Term) -> None:
        await original(self, term)
        if term in ended:
            term.is_over = True
            current = self._terms.get(term.topic_partition.partition)
            if current is not None:
                current.groups.update(term.groups)
                current.is_loaded = True


@mutant("KAFKA-2841", "a coordinator serves its groups before all records that it has read are replicated")
def loaded_before_it_is_replicated(patches: Patches) -> None:
    @patches.instead_of(Terms, "_until_replicated")
    async def until_replicated(original: Any, self: Terms[Any], term: Term) -> None: ...


@mutant("KAFKA-2841", "a load ends after the first piece of the log")
def load_ends_too_early(patches: Patches) -> None:
    patches.set(terms, "LOAD_BYTES", 200)

    @patches.instead_of(Terms, "_read")
    async def read(original: Any, self: Terms[Any], term: Term) -> None:
        end, term.end_offset = term.end_offset, max(0, term.end_offset - 20)
        try:
            await original(self, term)
        finally:
            term.end_offset = end


@mutant("KAFKA-9065", "a load continues past the last record until it has read the log's last offset")
def load_never_ends(patches: Patches) -> None:
    @patches.instead_of(Terms, "_read")
    async def read(original: Any, self: Terms[Any], term: Term) -> None:
        loading = self.new_loading(term)
        partition = self._replicas.partitions.require(term.topic_partition)
        offset = partition.log.log_start_offset
        while offset < term.end_offset and not term.is_over:
            data = partition.log.read(offset, terms.LOAD_BYTES, term.end_offset)
            for piece in iterate_batches(data):
                batch = decode_batch(data, piece.header, piece.start)
                if not piece.header.is_control:
                    loading.add(batch)
                offset = max([offset, *(one + 1 for one in batch.offsets)])
            await asyncio.sleep(terms.LEAST_LOOK_S)
        await loading.finish(Slices())


@mutant("stale reads", "an isolated, deposed coordinator returns commits from before its deposition")
def deposed_coordinator_is_believed(patches: Patches) -> None:
    @patches.instead_of(Terms, "confirm")
    def confirm(original: Any, self: Terms[Any], term: Term, confirmed: Any) -> None:
        confirmed(ErrorCode.NONE)


@mutant("stale reads", "an isolated, deposed coordinator reports that there is nothing to delete")
def nothing_to_delete_is_believed(patches: Patches) -> None:
    is_deleting = False

    @patches.instead_of(commits.OffsetCommits, "delete")
    def delete(original: Any, self: commits.OffsetCommits, *rest: Any) -> None:
        nonlocal is_deleting
        is_deleting = True
        original(self, *rest)
        is_deleting = False

    @patches.instead_of(Terms, "confirm")
    def confirm(original: Any, self: Terms[Any], term: Term, confirmed: Any) -> None:
        if is_deleting:
            confirmed(ErrorCode.NONE)
        else:
            original(self, term, confirmed)

    @patches.instead_of(GroupRemoval, "delete")
    async def delete_group(original: Any, self: GroupRemoval, group_id: str, *rest: Any) -> ErrorCode:
        found = self._terms.find(group_id)
        if not isinstance(found, ErrorCode) and found[1] is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        return await original(self, group_id, *rest)  # type: ignore[no-any-return]


@mutant("KAFKA-13636", "old offsets of a group are deleted during its rebalance")
def expired_in_a_rebalance(patches: Patches) -> None:
    @patches.instead_of(GroupRemoval, "_unused")
    def unused(original: Any, self: GroupRemoval, group: Group, now_s: float) -> list[TopicPartition]:
        if not group.is_in(GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE):
            return original(self, group, now_s)  # type: ignore[no-any-return]
        retention_s = self._config.offsets_retention_minutes * 60
        return group.offsets.expired(
            now_s, retention_s, unused_since_s=None, topics_unused_since_s={}, subscribed=frozenset()
        )


@mutant("KAFKA-8069", "loaded offsets count as expired, because they have no expiry time of their own")
def expired_once_loaded(patches: Patches) -> None:
    @patches.instead_of(GroupOffsets, "expired")
    def expired(original: Any, self: GroupOffsets, now_s: float, *rest: Any, **named: Any) -> list[TopicPartition]:
        return [
            topic_partition
            for topic_partition in self._committed
            if topic_partition not in self._pending and topic_partition.topic not in named["subscribed"]
        ]


@mutant(
    "partitions without an owner",
    "a returning static member is not asked to join for partitions that it should give up",
)
def held_back_for_nobody(patches: Patches) -> None:
    @patches.instead_of(Group, "awaits_what_was_owned")
    def awaits_what_was_owned(original: Any, self: Group, *rest: Any) -> bool:
        return False


@mutant("failed commits", "only the next coordinator knows a failed commit that was replicated nevertheless")
def failed_commits_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(Term, "look_at_what_is_in_doubt")
    def look_at_what_is_in_doubt(original: Any, self: Term, *rest: Any) -> None:
        pass


@mutant("half a deletion", "a rejected attempt to delete a group ends the deletion that is in the log")
def deletions_in_doubt_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(GroupRemoval, "_delete")
    async def delete(original: Any, self: GroupRemoval, term: GroupTerm, group: Group) -> Outcome:
        outcome: Outcome = await original(self, term, group)
        group.is_being_deleted = outcome.is_in_doubt
        return outcome


@mutant("half a deletion", "a deletion ends with its request, and the group stays in deletion for ever")
def deletions_end_with_their_request(patches: Patches) -> None:
    @patches.instead_of(GroupRemoval, "_carry_out")
    async def carry_out(original: Any, self: GroupRemoval, *rest: Any) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(30):
                await original(self, *rest)


@mutant("half a deletion", "all tombstones of a deleted group go into one batch")
def tombstones_are_one_batch(patches: Patches) -> None:
    @patches.instead_of(commits, "_in_batches")
    def in_batches(original: Any, group: Group, doomed: Any, most_bytes: int) -> list[list[TopicPartition]]:
        return [list(doomed)]


@mutant("late changes", "an earlier coordinator serves a request that is meant for a later one")
def attempts_are_believed_to_be_early(patches: Patches) -> None:
    @patches.instead_of(LatestAttempts, "take")
    def take(original: Any, self: LatestAttempts, attempt: Attempt | None, leader_epoch: int) -> ErrorCode:
        return original(self, attempt, 2**31 - 1)  # type: ignore[no-any-return]


@mutant("partitions without an owner", "a returning static leader is trusted to watch topics that it has not assigned")
def static_leaders_are_believed(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "_look_at_topics")
    def look_at_topics(original: Any, self: GroupCoordinator, *rest: Any) -> None:
        pass


@mutant("two groups of one name", "an unused group that is dropped appears empty to callers that still hold it")
def dropped_groups_are_not_dead(patches: Patches) -> None:
    @patches.instead_of(GroupTerm, "forget_unused")
    def forget_unused(original: Any, self: GroupTerm, group: Group, now_s: float) -> None:
        if group.is_unused and not group.is_being_deleted:
            self.groups.pop(group.group_id, None)


@mutant("two groups of one name", "an unused group is dropped and begun again while its deletion is in doubt")
def groups_are_dropped_in_their_deletion(patches: Patches) -> None:
    @patches.instead_of(GroupTerm, "forget_unused")
    def forget_unused(original: Any, self: GroupTerm, group: Group, now_s: float) -> None:
        if group.is_unused:
            self.groups.pop(group.group_id, None)


@mutant("offsets that expire", "the age of an offset that is no longer read counts from its commit")
def what_was_read_ages_by_its_commit(patches: Patches) -> None:
    @patches.instead_of(Group, "note_subscribed")
    def note_subscribed(original: Any, self: Group, now_s: float) -> None:
        pass


@mutant("offsets that expire", "offsets age while the broker is stopped")
def offsets_age_while_stopped(patches: Patches) -> None:
    @patches.instead_of(Ageing, "look")
    def look(original: Any, self: Ageing) -> None:
        self._counted_s += self._clock.monotonic() - self._looked_at_s
        self._looked_at_s = self._clock.monotonic()


@mutant("clocks", "the age of an offset depends on the clocks of its client and its coordinator")
def offsets_age_by_their_stamps(patches: Patches) -> None:
    @patches.instead_of(GroupRemoval, "_unused")
    def unused(original: Any, self: GroupRemoval, group: Group, now_s: float) -> list[TopicPartition]:
        if not group.is_in(GroupState.EMPTY):
            return original(self, group, now_s)  # type: ignore[no-any-return]
        oldest_ms = self._terms._clock.wall_ms() - self._config.offsets_retention_minutes * 60_000
        return [one for one, value in group.offsets.settled() if value.commit_timestamp_ms <= oldest_ms]


@mutant(
    "commits of a deleted topic", "commits of a deleted topic are repeated for a while and delay those of other topics"
)
def commits_of_a_deleted_topic_wait(patches: Patches) -> None:
    @patches.instead_of(Commits, "_is_older")
    def is_older(original: Any, self: Commits, *rest: Any) -> bool:
        return False


@mutant("commits of a deleted topic", "each commit of a deleted topic waits again for the topic to appear")
def commits_of_a_deleted_topic_wait_in_turn(patches: Patches) -> None:
    @patches.instead_of(Commits, "_unknown_for_long")
    def unknown_for_long(original: Any, self: Commits, *rest: Any) -> Any:
        self._unknown_since.clear()
        return original(self, *rest)


@mutant(
    "committed for another topic", "members begin at offsets that were committed for a deleted topic of the same name"
)
def committed_for_an_earlier_topic(patches: Patches) -> None:
    @patches.instead_of(offsets, "is_of_gone_topic")
    def is_of_gone_topic(original: Any, *rest: Any) -> bool:
        return False

    @patches.instead_of(Commits, "_is_older")
    def is_older(original: Any, self: Commits, *rest: Any) -> bool:
        return False


@mutant(
    "a connection's late bytes",
    "a late commit is processed, although its client has repeated it and committed a newer offset since",
)
def late_commit_carried_out(patches: Patches) -> None:
    @patches.instead_of(LatestAttempts, "take")
    def take(original: Any, *rest: Any) -> ErrorCode:
        return ErrorCode.NONE


# --- Membership ------------------------------------------------------------------------------------------------------


@mutant("zombie", "a coordinator checks only the member id and accepts requests of any generation")
def generation_not_checked(patches: Patches) -> None:
    @patches.instead_of(coordinator, "why_not_in_generation")
    def why_not(original: Any, *rest: Any) -> ErrorCode:
        code: ErrorCode = original(*rest)
        return ErrorCode.NONE if code is ErrorCode.ILLEGAL_GENERATION else code


@mutant("zombie", "a member that the group has removed can commit as before")
def commits_of_strangers_are_taken(patches: Patches) -> None:
    @patches.instead_of(commits, "_why_no_commit")
    def why_no_commit(original: Any, *rest: Any) -> ErrorCode:
        code: ErrorCode = original(*rest)
        return ErrorCode.NONE if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION) else code


@mutant("zombie", "the heartbeat of a removed member is answered as if it was a member")
def heartbeat_of_a_stranger_is_taken(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "heartbeat")
    def heartbeat(original: Any, self: GroupCoordinator, body: Any) -> ErrorCode:
        code: ErrorCode = original(self, body)
        lost = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION, ErrorCode.FENCED_INSTANCE_ID)
        return ErrorCode.NONE if code in lost else code


@mutant("dead members stay", "a coordinator that has loaded a group does not watch its members' sessions")
def sessions_end_with_the_coordinator(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "loaded")
    def loaded(original: Any, self: GroupCoordinator, term: GroupTerm) -> None: ...


@mutant("two assignments", "a leader that returns before its assignment is stored may send another one")
def two_assignments_in_a_generation(patches: Patches) -> None:
    @patches.instead_of(Group, "takes_assignment")
    def takes_assignment(original: Any, self: Group) -> bool:
        return True


# --- Assignments ------------------------------------------------------------------------------------------------------


@mutant("KIP-429", "a leader assigns a partition to its next owner before the present owner has revoked it")
def moved_at_once(patches: Patches) -> None:
    @patches.instead_of(CooperativeSticky, "assign")
    def assign(original: Any, self: CooperativeSticky, members: Any, partitions: Any) -> Any:
        claims = {
            member_id: assignors._Claim(member.owned_partitions, member.generation)
            for member_id, member in members.items()
        }
        return assignors._sticky(members, partitions, claims)


@mutant("KIP-792", "a leader trusts the partitions that members claim to own, however old the claim")
def stale_claims_are_believed(patches: Patches) -> None:
    @patches.instead_of(assignors, "_owners")
    def owners(original: Any, claims: Mapping[str, Any]) -> dict[TopicPartition, str]:
        return {partition: member_id for member_id, claim in claims.items() for partition in claim.partitions}


@mutant("at most once", "the committed offset is the fetch position, not the position after the delivered records")
def committed_ahead(patches: Patches) -> None:
    @patches.instead_of(auto_commit, "positions")
    def positions(original: Any, partitions: Any) -> dict[TopicPartition, OffsetAndMetadata]:
        return {
            partition: OffsetAndMetadata(max(offset.offset, partitions.states[partition].fetch_offset))
            for partition, offset in original(partitions).items()
        }


@mutant("lost", "a removed member keeps its partitions and claims them when it joins again")
def lost_partitions_are_kept(patches: Patches) -> None:
    @patches.instead_of(GroupMember, "_remove")
    def remove(original: Any, self: GroupMember, partitions: Sequence[TopicPartition]) -> None:
        if self.standing.state is not MemberState.LOST:
            original(self, partitions)


@mutant("lost wake-up", "a commit rejected by a rebalance that has just ended waits for another rebalance")
def commit_waits_for_another_rebalance(patches: Patches) -> None:
    @patches.instead_of(Standing, "can_retry")
    async def can_retry(original: Any, self: Standing, membership: Any, code: ErrorCode) -> bool:
        while self.state is not MemberState.LOST and self.generation_id != -1 and not self.state.is_revoking:
            if self.state is MemberState.RECONCILING and code is ErrorCode.REBALANCE_IN_PROGRESS:
                return True
            if self.membership() != membership and self.state.has_assignment:
                return True
            await self.settled.wait()
        return False
