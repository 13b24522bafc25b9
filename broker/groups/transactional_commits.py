"""Commits offsets as part of a producer's transaction (TxnOffsetCommit; KIP-98, KIP-447, KIP-890).

The problem. The offsets become visible with the transaction, by a marker that its coordinator writes to this group's
partition. If the coordinator does not know that the partition belongs to the transaction, no marker ever comes, and
members that wait for stable offsets wait for ever. A late request is worse: its offsets would join the producer's next
transaction, and the group would go back.

The choice. The transaction coordinator is asked before each append. Its answer holds until a marker of the producer is
appended here, or until this term ends. The group and its generation are checked again after the answer, because members
that join meanwhile may already have read the committed offsets. All later checks and the append happen in one turn of
the event loop.
"""

import asyncio
from typing import NamedTuple, Protocol

from minibroker.broker.coordinating.terms import Outcome
from minibroker.broker.groups.commits import OffsetCommits, offset_record
from minibroker.broker.groups.coordinator import why_not_in_generation
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.records import OffsetValue
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import GroupTerm, GroupTerms
from minibroker.protocol.errors import ERRORS, ErrorCode
from minibroker.protocol.messages.transactions import (
    TxnOffsetCommitPartitionResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitTopicResponse,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock

_E = ErrorCode

Topics = list[TxnOffsetCommitTopicResponse]


class Verify(Protocol):
    """Asks the coordinator of a transactional id whether the partition belongs to the producer's ongoing transaction.
    `adds`: the partition joins it, if it does not belong to it yet."""

    async def __call__(
        self,
        topic_partition: TopicPartition,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        adds: bool,
    ) -> ErrorCode: ...


class _Accepted(NamedTuple):
    topic_partition: TopicPartition
    value: OffsetValue
    answer: TxnOffsetCommitPartitionResponse


class TransactionalCommits:
    def __init__(self, clock: Clock, terms: GroupTerms, commits: OffsetCommits, verify: Verify) -> None:
        self._clock = clock
        self._terms = terms
        self._commits = commits
        self._verify = verify

    async def commit(self, body: TxnOffsetCommitRequest) -> Topics:
        """T6. Handle TxnOffsetCommit. Return once the offsets are in the log and replicated, with an error for each
        partition that failed."""
        found = self._find(body)
        if isinstance(found, ErrorCode):
            return _all(body, found)
        asking_term = found[0]
        question = self._terms.question(asking_term, body.producer_id)
        error = await self._verify(
            asking_term.topic_partition,
            body.transactional_id,
            body.producer_id,
            body.producer_epoch,
            adds=body.adds_partition,
        )
        if error is not _E.NONE:
            return _all(body, _for_clients(error, adds=body.adds_partition))
        found = self._find(body)
        if isinstance(found, ErrorCode):
            return _all(body, found)
        term, group = found
        if question is None or not self._terms.stands(asking_term, body.producer_id, question):
            return _all(body, _E.COORDINATOR_LOAD_IN_PROGRESS)
        return await self._append(term, group, body)

    def _find(self, body: TxnOffsetCommitRequest) -> tuple[GroupTerm, Group] | ErrorCode:
        """Return the term and the group, which is new if it is unknown, or the error why nothing may be committed."""
        found = self._terms.find(body.group_id)
        if isinstance(found, ErrorCode):
            return found
        term, group = found
        late = term.attempts.take(body.attempt, term.epoch)
        if late is not _E.NONE:
            return late
        if group is None:
            if body.generation_id >= 0:
                return _E.ILLEGAL_GENERATION
            if not self._terms.may_add_group(term, body.group_id):
                return _E.POLICY_VIOLATION
            return term, Group(body.group_id)
        error = _why_no_commit(group, body)
        return (term, group) if error is _E.NONE else error

    def _append(self, term: GroupTerm, group: Group, body: TxnOffsetCommitRequest) -> asyncio.Future[Topics]:
        """Append the accepted offsets. They are offsets of an open transaction from now on, whether or not the client
        hears of it, because the marker will decide about them."""
        now_ms = self._clock.wall_ms()
        answers: Topics = []
        accepted: list[_Accepted] = []
        for topic in body.topics:
            parts = []
            for asked in topic.partitions:
                topic_partition = TopicPartition(topic.name, asked.partition_index)
                value, error = self._commits.checked(
                    group, topic_partition, topic.topic_id, asked, now_ms, body.producer_id
                )
                answer = TxnOffsetCommitPartitionResponse(asked.partition_index, error)
                if error is _E.NONE:
                    accepted.append(_Accepted(topic_partition, value, answer))
                parts.append(answer)
            answers.append(TxnOffsetCommitTopicResponse(topic.name, parts))
        future: asyncio.Future[Topics] = asyncio.get_running_loop().create_future()
        if not accepted:
            future.set_result(answers)
            return future

        def written(outcome: Outcome) -> None:
            if outcome.code is _E.NONE:
                self._commits.committed += len(accepted)
            too_large = outcome.code is _E.MESSAGE_TOO_LARGE
            for one in accepted:
                one.answer.error_code = _E.INVALID_COMMIT_OFFSET_SIZE if too_large else outcome.code
            if not future.done():
                future.set_result(answers)

        base_offset = self._terms.write(
            term,
            [offset_record(group, one.topic_partition, one.value) for one in accepted],
            written,
            producer_id=body.producer_id,
            producer_epoch=body.producer_epoch,
            is_transactional=True,
        )
        if base_offset >= 0:
            term.groups[group.group_id] = group
            for position, one in enumerate(accepted):
                term.add_of_transaction(body.producer_id, group, one.topic_partition, one.value, base_offset + position)
        return future


def _why_no_commit(group: Group, body: TxnOffsetCommitRequest) -> ErrorCode:
    """As Kafka's validateOffsetCommit for transactions. Clients before KIP-447 name no member: their transactional id
    is fenced, but not their membership."""
    names_member = bool(body.member_id) or body.group_instance_id is not None
    if body.generation_id < 0 and (group.is_in(GroupState.EMPTY) or not names_member):
        return _E.NONE
    return why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)


def _for_clients(error: ErrorCode, *, adds: bool) -> ErrorCode:
    """Return the error for the client. An error about the transaction's coordinator must not send it to another group
    coordinator. `adds`: it knows CONCURRENT_TRANSACTIONS and TRANSACTION_ABORTABLE as answers to this request."""
    if error is _E.CONCURRENT_TRANSACTIONS and adds:
        return error
    if error is _E.TRANSACTION_ABORTABLE and not adds:
        return _E.INVALID_TXN_STATE
    return _E.COORDINATOR_LOAD_IN_PROGRESS if ERRORS[error].retriable else error


def _all(body: TxnOffsetCommitRequest, code: ErrorCode) -> Topics:
    return [
        TxnOffsetCommitTopicResponse(
            topic.name, [TxnOffsetCommitPartitionResponse(part.partition_index, code) for part in topic.partitions]
        )
        for topic in body.topics
    ]
