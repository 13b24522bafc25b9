"""Planted bugs of consumer groups: coordinators that forget or believe too much, members that share what they may
not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from minibroker.broker.groups import store
from minibroker.broker.groups.coordinator import GroupCoordinator
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.offsets import GroupOffsets
from minibroker.broker.groups.store import GroupStore, Term
from minibroker.client import assignors, auto_commit
from minibroker.client.assignors import CooperativeSticky
from minibroker.client.commits import Commits, OffsetAndMetadata
from minibroker.client.group_member import GroupMember
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.simulation.mutants.planting import Patches, mutant

# --- What is committed ----------------------------------------------------------------------------------------------


@mutant("acknowledged too early", "a commit is acknowledged, and shown, when it is in the coordinator's log alone")
def commit_acknowledged_before_it_is_replicated(patches: Patches) -> None:
    @patches.instead_of(GroupStore, "append")
    def append(original: Any, self: GroupStore, term: Term, records: Any, written: Any) -> None:
        answered: list[int] = []

        def once(code: ErrorCode, base_offset: int) -> None:
            if not answered:
                answered.append(base_offset)
                written(code, base_offset)

        end = self._replicas.leader(term.topic_partition).log.log_end_offset
        original(self, term, records, once)
        once(ErrorCode.NONE, end)


@mutant("KAFKA-5600", "a coordinator that loads takes the first record of each key for the latest")
def first_record_of_a_key_counts(patches: Patches) -> None:
    @patches.instead_of(store._Loading, "add")
    def add(original: Any, self: Any, batch: Any, from_offset: int) -> None:
        known = {group: dict(offsets) for group, offsets in self._offsets.items()}
        original(self, batch, from_offset)
        for group, offsets in known.items():
            self._offsets[group] |= offsets


@mutant(
    "KAFKA-2841",
    "a broker that coordinates groups again has them as it knew them when it last did, and loads nothing",
)
def groups_outlive_the_term(patches: Patches) -> None:
    kept: dict[tuple[GroupStore, int], dict[str, Group]] = {}

    @patches.instead_of(GroupStore, "load")
    async def load(original: Any, self: GroupStore, term: Term) -> dict[str, Group]:
        key = (self, term.topic_partition.partition)
        if key not in kept:
            kept[key] = await original(self, term)
        return kept[key]

    @patches.instead_of(GroupCoordinator, "_end_term")
    def end_term(original: Any, self: GroupCoordinator, index: int) -> None:
        term = self._terms.get(index)
        if term is None:
            return
        groups, term.groups = term.groups, {}
        original(self, index)
        if term.is_loaded:
            kept[self._store, index] = groups


@mutant("KAFKA-2841", "a load goes on after its partition was lost, and what it found replaces what the next one knows")
def load_outlives_its_term(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "_load")
    async def load(original: Any, self: GroupCoordinator, term: Term) -> None:
        await original(self, term)
        if term.is_over:
            late = await self._store._read(term) if self._replicas.partition(term.topic_partition) else {}
            current = self._terms.get(term.topic_partition.partition)
            if current is not None:
                current.groups.update(late)
                current.is_loaded = True


@mutant("KAFKA-9065", "a load waits for a next batch where compaction has left none")
def load_waits_for_ever(patches: Patches) -> None:
    @patches.instead_of(GroupStore, "_read")
    async def read(original: Any, self: GroupStore, term: Term) -> dict[str, Group]:
        groups = await original(self, term)
        partition = self._replicas.partition(term.topic_partition)
        while partition is not None and not term.is_over:
            last = partition.log.read(max(term.end_offset - 1, partition.log.log_start_offset), 1, term.end_offset)
            if last or term.end_offset == partition.log.log_start_offset:
                break
            await asyncio.sleep(1)
        return groups  # type: ignore[no-any-return]


@mutant(
    "committed for another topic", "what was committed for a topic that was deleted stays, and its members begin there"
)
def committed_for_an_earlier_topic(patches: Patches) -> None:
    @patches.instead_of(GroupOffsets, "of_other_topics")
    def of_other_topics(original: Any, self: GroupOffsets, topic_ids: Any) -> list[TopicPartition]:
        return []

    @patches.instead_of(Commits, "_is_older")
    def is_older(original: Any, self: Commits, topic: Any) -> bool:
        return False


@mutant("commits out of order", "commits overtake each other, since none waits for the one before it")
def commits_overtake(patches: Patches) -> None:
    @patches.instead_of(Commits, "commit")
    async def commit(original: Any, self: Commits, ticket: Any, timeout_s: float) -> None:
        self._queue.remove(ticket)
        self._queue.appendleft(ticket)
        await asyncio.sleep(self._runtime.world.random.choice([0.0, 0.5]))
        if ticket in self._queue:
            self._queue.remove(ticket)
            self._queue.appendleft(ticket)
        await original(self, ticket, timeout_s)


# --- Who is in the group ---------------------------------------------------------------------------------------------


@mutant("zombie", "a coordinator looks at the member alone, and takes what it says of any generation")
def generation_not_checked(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "_why_not_in_generation")
    def why_not(original: Any, self: GroupCoordinator, *rest: Any) -> ErrorCode:
        code: ErrorCode = original(self, *rest)
        return ErrorCode.NONE if code is ErrorCode.ILLEGAL_GENERATION else code


@mutant("zombie", "whoever the group has put out may go on committing as before")
def commits_of_strangers_are_taken(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "_why_no_commit")
    def why_no_commit(original: Any, self: GroupCoordinator, *rest: Any) -> ErrorCode:
        code: ErrorCode = original(self, *rest)
        return ErrorCode.NONE if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION) else code


@mutant("zombie", "the heartbeat of a member that the group has put out is answered as if it were one")
def heartbeat_of_a_stranger_is_taken(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "heartbeat")
    def heartbeat(original: Any, self: GroupCoordinator, body: Any) -> ErrorCode:
        code: ErrorCode = original(self, body)
        lost = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION, ErrorCode.FENCED_INSTANCE_ID)
        return ErrorCode.NONE if code in lost else code


@mutant("dead members stay", "a coordinator that has loaded a group does not watch the sessions of its members")
def sessions_end_with_the_coordinator(patches: Patches) -> None:
    @patches.instead_of(GroupCoordinator, "_load")
    async def load(original: Any, self: GroupCoordinator, term: Term) -> None:
        def begins(term: Term, group: Group, member: Any) -> None: ...

        self._session_begins = begins  # type: ignore[method-assign]
        try:
            await original(self, term)
        finally:
            del self._session_begins


# --- Who reads what --------------------------------------------------------------------------------------------------


@mutant("KIP-429", "a leader gives a partition to its next owner before the one that has it gave it back")
def moved_at_once(patches: Patches) -> None:
    @patches.instead_of(CooperativeSticky, "assign")
    def assign(original: Any, self: CooperativeSticky, members: Any, partitions: Any) -> Any:
        claims = {
            member_id: assignors._Claim(member.owned_partitions, member.generation)
            for member_id, member in members.items()
        }
        return assignors._sticky(members, partitions, claims)


@mutant("KIP-792", "a leader believes whatever members say that they own, however long ago that was")
def stale_claims_are_believed(patches: Patches) -> None:
    @patches.instead_of(assignors, "_owners")
    def owners(original: Any, claims: Mapping[str, Any]) -> dict[TopicPartition, str]:
        return {partition: member_id for member_id, claim in claims.items() for partition in claim.partitions}


@mutant("at most once", "what is committed is how far the member has fetched ahead, not what it was handed")
def committed_ahead(patches: Patches) -> None:
    @patches.instead_of(auto_commit, "positions")
    def positions(original: Any, fetcher: Any) -> dict[TopicPartition, OffsetAndMetadata]:
        return {
            partition: OffsetAndMetadata(max(offset.offset, fetcher.states[partition].fetch_offset))
            for partition, offset in original(fetcher).items()
        }


@mutant("lost", "a member that was put out keeps what it had, and claims it when it joins again")
def lost_partitions_are_kept(patches: Patches) -> None:
    @patches.instead_of(GroupMember, "_give_up")
    async def give_up(original: Any, self: GroupMember, partitions: Collection[TopicPartition], is_lost: bool) -> None:
        if not is_lost:
            await original(self, partitions, is_lost)
