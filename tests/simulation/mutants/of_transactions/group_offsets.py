"""Planted bugs of offsets that a transaction commits: visible too early, for ever or never, or in the wrong order."""

from __future__ import annotations

import heapq
from typing import Any

from minibroker.broker.coordinating.terms import Term
from minibroker.broker.groups import terms
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.offsets import GroupOffsets
from minibroker.broker.groups.records import OffsetValue
from minibroker.broker.groups.terms import GroupTerm, GroupTerms
from minibroker.broker.groups.transactional_commits import TransactionalCommits
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.simulation.mutants.planting import Patches, mutant


@mutant("aborted reads", "an offset of a transaction counts as soon as it is in the log")
def transactional_offsets_need_no_marker(patches: Patches) -> None:
    @patches.instead_of(GroupTerm, "add_of_transaction")
    def add(
        original: Any,
        self: GroupTerm,
        producer_id: int,
        group: Group,
        topic_partition: TopicPartition,
        value: OffsetValue,
        log_offset: int,
    ) -> None:
        group.offsets.load(topic_partition, value, log_offset, 0.0)


@mutant("aborted reads", "an abort marker commits the offsets of its transaction")
def offsets_of_aborted_transactions_count(patches: Patches) -> None:
    @patches.instead_of(GroupOffsets, "end_transaction")
    def end(original: Any, self: GroupOffsets, *rest: Any, is_committed: bool, now_s: float) -> None:
        original(self, *rest, is_committed=True, now_s=now_s)


@mutant("aborted reads", "a commit marker counts before it is replicated")
def markers_count_unreplicated(patches: Patches) -> None:
    @patches.instead_of(Term, "look_at_what_is_in_doubt")
    def look(original: Any, self: Term, *rest: Any) -> None:
        while self._in_doubt:
            heapq.heappop(self._in_doubt)[1]()


@mutant("KAFKA-6119", "a loading coordinator takes no notice of markers")
def loads_ignore_markers(patches: Patches) -> None:
    @patches.instead_of(terms._Loading, "add_control")
    def add_control(original: Any, self: Any, *rest: Any) -> None:
        pass


@mutant("lost offsets", "an offset replaces that of the transaction before, whose marker is not replicated yet")
def markers_in_doubt_separate_nothing(patches: Patches) -> None:
    @patches.instead_of(GroupTerm, "marker_appended")
    def marker_appended(original: Any, self: GroupTerm, *rest: Any) -> None:
        pass


@mutant("KAFKA-5600", "a loading coordinator places an offset of a transaction where its marker is")
def loads_go_by_the_order_of_markers(patches: Patches) -> None:
    @patches.instead_of(terms._Loading, "_is_overridden")
    def is_overridden(original: Any, self: Any, record: Any) -> bool:
        return False


@mutant("committed offsets go back", "an earlier offset of a transaction replaces a later commit when its marker comes")
def markers_decide_the_order_of_commits(patches: Patches) -> None:
    @patches.instead_of(GroupOffsets, "_override")
    def override(original: Any, self: GroupOffsets, *rest: Any) -> None:
        pass

    @patches.instead_of(GroupOffsets, "end_transaction")
    def end(original: Any, self: GroupOffsets, producer_id: int, *rest: Any, **named: Any) -> None:
        for topic_partition in self._of_transactions.get(producer_id, {}):
            self._committed.pop(topic_partition, None)
        original(self, producer_id, *rest, **named)


@mutant("KAFKA-14402", "the coordinator of the transaction is not asked before offsets are appended")
def transactional_offsets_are_not_verified(patches: Patches) -> None:
    async def yes(*rest: Any, **named: Any) -> ErrorCode:
        return ErrorCode.NONE

    @patches.instead_of(TransactionalCommits, "commit")
    async def commit(original: Any, self: TransactionalCommits, body: Any) -> Any:
        self._verify = yes
        return await original(self, body)


@mutant("KAFKA-14402", "an answer about a transaction that has ended since lets its offsets join the next one")
def markers_void_no_answers(patches: Patches) -> None:
    @patches.instead_of(GroupTerms, "stands")
    def stands(original: Any, self: GroupTerms, *rest: Any) -> bool:
        return True


@mutant("zombie", "the generation of a commit is checked only before the coordinator of its transaction is asked")
def generation_checked_before_the_question(patches: Patches) -> None:
    found: dict[int, Any] = {}

    @patches.instead_of(TransactionalCommits, "_find")
    def find(original: Any, self: TransactionalCommits, body: Any) -> Any:
        return found.pop(id(body)) if id(body) in found else found.setdefault(id(body), original(self, body))


@mutant("KIP-447", "a member that requires a stable offset gets the one from before the open transaction")
def open_transactions_are_stable(patches: Patches) -> None:
    @patches.instead_of(GroupOffsets, "of_transactions")
    def of_transactions(original: Any, self: GroupOffsets) -> set[TopicPartition]:
        return set()
