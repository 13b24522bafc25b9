"""Commits, fetches and deletes the offsets of groups (the other half of Kafka's GroupCoordinator).

A committed offset belongs to a topic, not to a name, so it is stored with the topic's id. A topic that is deleted and
created again has new records at the old offsets, and a consumer that continued there would skip some. Commits are
therefore accepted only for the topic that was read, and offsets of a deleted topic are not returned.
"""

import logging
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import NamedTuple

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.coordinating.terms import Outcome, Record
from minibroker.broker.groups.coordinator import GroupCoordinator, why_not_in_generation
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.offsets import is_of_gone_topic, newest_topic_id
from minibroker.broker.groups.records import OffsetKey, OffsetValue, encode_offset_key, encode_offset_value
from minibroker.broker.groups.room import Room
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import OFFSET_BYTES, GroupTerm, GroupTerms
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.consumer_protocol import PROTOCOL_TYPE
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages.transactions import TxnOffsetCommitPartition
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.groups")

_S = GroupState
_E = ErrorCode

CommitTopics = list[g.OffsetCommitTopicResponse]
FetchSteps = Generator[None, None, g.OffsetFetchResponse]

TOMBSTONES_BYTES = 256 * 1024
"""The maximum bytes of tombstones in a batch."""
BATCH_BYTES, RECORD_BYTES = 128, 32
"""Upper bounds of the overhead of a batch and of a record, besides the keys."""


STEP = 50
"""Offsets that are fetched in a step."""
MOST_METADATA_LENGTH = 64 * 1024 * 1024
"""Characters of metadata of all offsets of a broker."""
LONG_METADATA = 256
"""Shorter metadata is always accepted: an offset takes more memory anyway. Kafka Streams stores about 30 characters."""


class _Accepted(NamedTuple):
    topic_partition: TopicPartition
    value: OffsetValue
    answer: g.OffsetCommitPartitionResponse


class OffsetCommits:
    def __init__(
        self, clock: Clock, config: BrokerConfig, metadata: MetadataCache, terms: GroupTerms, members: GroupCoordinator
    ) -> None:
        self._clock = clock
        self._config = config
        self._metadata = metadata
        self._terms = terms
        self._members = members
        self.committed = 0
        """Offsets committed so far."""
        self.room = Room(MOST_METADATA_LENGTH, clock, self._metadata_length)
        self._being_written = 0
        """Characters of metadata in commits that are being written."""
        self.deleted = 0
        """Offsets deleted so far on request."""

    # -- OffsetCommit --

    def commit(self, body: g.OffsetCommitRequest, respond: Callable[[CommitTopics], None]) -> None:
        """R7. Handle OffsetCommit. `respond` is called once the offsets are in the log, with an error for each
        partition that failed."""
        found = self._terms.find(body.group_id)
        if isinstance(found, ErrorCode):
            respond(_all(body, found))
            return
        term, group = found
        late = term.attempts.take(body.attempt, term.epoch)
        if late is not _E.NONE:
            respond(_all(body, late))
            return
        if group is None:
            error = _E.ILLEGAL_GENERATION if body.generation_id >= 0 else _E.NONE
            if error is _E.NONE and not self._terms.may_add_group(term, body.group_id):
                error = _E.POLICY_VIOLATION
            group = Group(body.group_id)
        else:
            error = _why_no_commit(group, body)
        if error is not _E.NONE:
            respond(_all(body, error))
            return
        self._members.heard_of(group, body.member_id)
        self._commit(term, group, body, respond)

    def _commit(
        self, term: GroupTerm, group: Group, body: g.OffsetCommitRequest, respond: Callable[[CommitTopics], None]
    ) -> None:
        now_ms = self._clock.wall_ms()
        answers: CommitTopics = []
        accepted: list[_Accepted] = []
        for topic in body.topics:
            parts = []
            for asked in topic.partitions:
                topic_partition = TopicPartition(topic.name, asked.partition_index)
                value, error = self.checked(group, topic_partition, topic.topic_id, asked, now_ms)
                answer = g.OffsetCommitPartitionResponse(asked.partition_index, error)
                if error is _E.NONE:
                    accepted.append(_Accepted(topic_partition, value, answer))
                parts.append(answer)
            answers.append(g.OffsetCommitTopicResponse(topic.name, parts))
        if not accepted:
            respond(answers)
            return
        term.groups[group.group_id] = group
        group.offsets.begin(one.topic_partition for one in accepted)
        metadata = sum(len(one.value.metadata) for one in accepted)
        self._being_written += metadata
        body.topics = []  # the request waits for the replicas, and need not keep them as well

        def written(outcome: Outcome) -> None:
            self._being_written -= metadata
            _end_write(self._terms, term, group, [(one.topic_partition, one.value) for one in accepted], outcome)
            if outcome.code is _E.NONE:
                self.committed += len(accepted)
            else:
                too_large = outcome.code is _E.MESSAGE_TOO_LARGE
                for one in accepted:
                    one.answer.error_code = _E.INVALID_COMMIT_OFFSET_SIZE if too_large else outcome.code
                term.forget_unused(group, self._terms.now_s)
            respond(answers)

        self._terms.write(term, [offset_record(group, one.topic_partition, one.value) for one in accepted], written)

    def checked(
        self,
        group: Group,
        topic_partition: TopicPartition,
        topic_id: str,
        asked: g.OffsetCommitPartition | TxnOffsetCommitPartition,
        now_ms: int,
        producer_id: int | None = None,
    ) -> tuple[OffsetValue, ErrorCode]:
        """Return the value to store for one partition of a commit, and the error why it is rejected, or NONE.
        `producer_id`: of the transaction that commits."""
        value = OffsetValue(
            asked.committed_offset,
            asked.committed_leader_epoch,
            asked.committed_metadata or "",
            now_ms,
            topic_id or self._metadata.topic_id(topic_partition.topic) or "",
        )
        return value, self._why_not_this(group, topic_partition, value, producer_id)

    def _why_not_this(
        self, group: Group, topic_partition: TopicPartition, value: OffsetValue, producer_id: int | None
    ) -> ErrorCode:
        if _java_length(value.metadata) > self._config.offset_metadata_max_bytes:
            return _E.OFFSET_METADATA_TOO_LARGE
        if len(value.metadata) > LONG_METADATA and not self.room.add(len(value.metadata)):
            return _E.OFFSET_METADATA_TOO_LARGE
        if self._metadata.partition(topic_partition) is None:
            return _E.UNKNOWN_TOPIC_OR_PARTITION
        if value.topic_id != self._metadata.topic_id(topic_partition.topic):
            return _E.INCONSISTENT_TOPIC_ID
        replaced = group.offsets.replaced_metadata(topic_partition, producer_id)
        growth = len(value.metadata) + (OFFSET_BYTES if replaced is None else -replaced)
        if growth > 0 and not self._terms.kept.add(growth):
            return _E.POLICY_VIOLATION
        return _E.NONE

    def _metadata_length(self) -> int:
        groups = (group for term in self._terms.loaded() for group in term.groups.values())
        return self._being_written + sum(group.offsets.metadata_length for group in groups)

    # -- OffsetFetch --

    def fetch(self, body: g.OffsetFetchRequest, respond: Callable[[int, FetchSteps], None]) -> None:
        """Handle OffsetFetch. `respond` is called once it is certain that no other broker coordinated these groups when
        the request arrived. A deposed coordinator that does not know it yet would otherwise send a consumer back to old
        offsets. `respond` receives the number of offsets in the answer, about, and the steps that make the answer."""
        codes: dict[str, ErrorCode] = {}
        by_term: dict[GroupTerm, list[str]] = {}
        for asked in body.groups:
            term = self._terms.of(asked.group_id)
            if isinstance(term, ErrorCode):
                codes[asked.group_id] = term
            else:
                by_term.setdefault(term, []).append(asked.group_id)
        left = len(by_term)

        def finish() -> None:
            respond(sum(self._count(asked, codes) for asked in body.groups), self._fetch_all(body, codes))

        if not left:
            finish()
        for term, group_ids in by_term.items():

            def confirmed(code: ErrorCode, group_ids: Sequence[str] = group_ids) -> None:
                nonlocal left
                codes.update(dict.fromkeys(group_ids, code))
                left -= 1
                if not left:
                    finish()

            self._terms.confirm(term, confirmed)

    def _count(self, asked: g.OffsetFetchGroup, codes: Mapping[str, ErrorCode]) -> int:
        if asked.topics is not None:
            return 1 + sum(len(topic.partition_indexes) for topic in asked.topics)
        found = codes[asked.group_id] or self._terms.find(asked.group_id)
        return 1 if isinstance(found, ErrorCode) or found[1] is None else 1 + len(found[1].offsets)

    def _fetch_all(self, body: g.OffsetFetchRequest, codes: Mapping[str, ErrorCode]) -> FetchSteps:
        groups: list[g.OffsetFetchGroupResponse] = []
        for asked in body.groups:
            code = codes[asked.group_id]
            if code is _E.NONE:
                groups.append((yield from self._fetch(asked, body.require_stable)))
            else:
                groups.append(g.refused_offset_fetch(asked, code))
                yield
        return g.OffsetFetchResponse(0, groups)

    def _fetch(
        self, asked: g.OffsetFetchGroup, require_stable: bool
    ) -> Generator[None, None, g.OffsetFetchGroupResponse]:
        """`require_stable`: return UNSTABLE_OFFSET_COMMIT where an open transaction may change the offset (KIP-447)."""
        look_up = self._terms.find(asked.group_id)
        if isinstance(look_up, ErrorCode):
            return g.refused_offset_fetch(asked, look_up)
        _, group = look_up
        known: dict[str, dict[int, OffsetValue]] = {}
        unstable = group.offsets.of_transactions() if require_stable and group is not None else set[TopicPartition]()
        if group is not None:
            for number, (topic_partition, value) in enumerate(group.offsets.items()):
                if number % STEP == 0:
                    yield
                if not self._is_gone(topic_partition.topic, value):
                    known.setdefault(topic_partition.topic, {})[topic_partition.partition] = value
        wanted: Sequence[tuple[str, Sequence[int]]]
        if asked.topics is None:
            found = {name: set(parts) for name, parts in known.items()}
            for topic_partition in unstable:
                found.setdefault(topic_partition.topic, set()).add(topic_partition.partition)
            wanted = [(name, sorted(parts)) for name, parts in sorted(found.items())]
        else:
            wanted = [(topic.name, topic.partition_indexes) for topic in asked.topics]
        topics: list[g.OffsetFetchTopicResponse] = []
        for name, indexes in wanted:
            topics.append((yield from _fetched(name, indexes, known.get(name, {}), unstable)))
        return g.OffsetFetchGroupResponse(asked.group_id, topics, _E.NONE)

    def _is_gone(self, topic: str, value: OffsetValue) -> bool:
        return is_of_gone_topic(value, self._metadata.topic_id(topic))

    # -- OffsetDelete (KIP-496) --

    def delete(self, body: g.OffsetDeleteRequest, respond: Callable[[g.OffsetDeleteResponse], None]) -> None:
        """Handle OffsetDelete for topics that no member reads. `respond` is called once the log has the tombstones, or
        once it is certain that no other coordinator has committed offsets that this one does not know."""
        found = self._terms.find_named(body.group_id)
        if isinstance(found, ErrorCode):
            respond(g.OffsetDeleteResponse(found, 0, []))
            return
        term, group = found
        late = term.attempts.take(body.attempt, term.epoch)
        if late is not _E.NONE:
            respond(g.OffsetDeleteResponse(late, 0, []))
            return

        def respond_if_confirmed(response: g.OffsetDeleteResponse) -> None:
            self._terms.confirm(
                term, lambda code: respond(g.OffsetDeleteResponse(code, 0, []) if code is not _E.NONE else response)
            )

        if group is None:
            respond_if_confirmed(g.OffsetDeleteResponse(_E.GROUP_ID_NOT_FOUND, 0, []))
            return
        if not group.is_in(_S.EMPTY) and group.protocol_type != PROTOCOL_TYPE:
            respond(g.OffsetDeleteResponse(_E.NON_EMPTY_GROUP, 0, []))
            return
        subscribed = frozenset() if group.is_in(_S.EMPTY) else group.subscribed_topics()
        answers: CommitTopics = []
        doomed: list[TopicPartition] = []
        known = frozenset(group.offsets.to_delete())
        for topic in body.topics:
            is_read = subscribed is None or topic.name in subscribed
            code = _E.GROUP_SUBSCRIBED_TO_TOPIC if is_read else _E.NONE
            parts = [g.OffsetCommitPartitionResponse(index, code) for index in topic.partitions]
            answers.append(g.OffsetCommitTopicResponse(topic.name, parts))
            if not is_read:
                named = (TopicPartition(topic.name, index) for index in topic.partitions)
                doomed += [topic_partition for topic_partition in named if topic_partition in known]
        response = g.OffsetDeleteResponse(_E.NONE, 0, answers)
        if not doomed:
            respond_if_confirmed(response)
            return

        def removed(outcome: Outcome) -> None:
            if outcome.code is _E.NONE:
                self.deleted += len(doomed)
                respond(response)
            else:  # for all partitions, because the absence of the others is not certain either
                respond(g.OffsetDeleteResponse(outcome.code, 0, []))

        remove_offsets(self._terms, term, group, doomed, removed)


def remove_offsets(
    terms: GroupTerms,
    term: GroupTerm,
    group: Group,
    doomed: Sequence[TopicPartition],
    removed: Callable[[Outcome], None],
) -> None:
    """Delete offsets by tombstones. They are forgotten once these are replicated, unless a commit followed. The offsets
    may need several batches; if one fails, `removed` receives its error for all, although the others may be deleted."""
    group.offsets.begin(doomed)
    batches = _in_batches(group, doomed, min(terms.room(term), TOMBSTONES_BYTES))
    outcomes: list[Outcome] = []

    def write(batch: list[TopicPartition]) -> None:
        def written(outcome: Outcome) -> None:
            _end_write(terms, term, group, [(topic_partition, None) for topic_partition in batch], outcome)
            outcomes.append(outcome)
            if len(outcomes) == len(batches):
                removed(_altogether(outcomes))

        terms.write(term, [(_key(group, topic_partition), None) for topic_partition in batch], written)

    for batch in batches:
        write(batch)


def _in_batches(group: Group, doomed: Sequence[TopicPartition], most_bytes: int) -> list[list[TopicPartition]]:
    """Split the tombstones into batches, as a group may have more than fit into one."""
    batches: list[list[TopicPartition]] = []
    left = 0
    for topic_partition in doomed:
        size = len(_key(group, topic_partition)) + RECORD_BYTES
        if not batches or size > left:
            batches.append([])
            left = most_bytes - BATCH_BYTES
        batches[-1].append(topic_partition)
        left -= size
    return batches


def _altogether(outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of several writes. A failure is in doubt unless nothing was written."""
    failed = next((outcome for outcome in outcomes if outcome.code is not _E.NONE), None)
    if failed is None:
        return outcomes[0]
    is_in_doubt = any(outcome.is_in_doubt or outcome.code is _E.NONE for outcome in outcomes)
    return Outcome(failed.code, failed.base_offset, is_in_doubt)


def _end_write(
    terms: GroupTerms,
    term: GroupTerm,
    group: Group,
    written: Sequence[tuple[TopicPartition, OffsetValue | None]],
    outcome: Outcome,
) -> None:
    """Apply the outcome of a write of these offsets or tombstones. Records that may be replicated later stay
    pending."""

    def complete() -> None:
        for position, (topic_partition, value) in enumerate(written):
            group.offsets.complete(topic_partition, value, outcome.base_offset + position, terms.now_s)

    if outcome.code is _E.NONE:
        complete()
    elif outcome.base_offset >= 0:
        term.await_replicas(outcome.base_offset + len(written), complete)
    else:
        group.offsets.fail((topic_partition for topic_partition, _ in written), is_in_doubt=outcome.is_in_doubt)


def offset_record(group: Group, topic_partition: TopicPartition, value: OffsetValue) -> Record:
    return _key(group, topic_partition), encode_offset_value(value)


def _key(group: Group, topic_partition: TopicPartition) -> bytes:
    return encode_offset_key(OffsetKey(group.group_id, topic_partition.topic, topic_partition.partition))


def _why_no_commit(group: Group, body: g.OffsetCommitRequest) -> ErrorCode:
    if body.generation_id < 0 and group.is_in(_S.EMPTY):
        return _E.NONE  # a client that is not a member, while the group has none
    error = why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)
    if error is _E.NONE and group.is_in(_S.COMPLETING_REBALANCE):
        # the member has given up its previous partitions and does not know its new ones
        return _E.REBALANCE_IN_PROGRESS
    return error


def _java_length(text: str) -> int:
    """Return the length as Kafka measures it: in UTF-16 units (`String.length`)."""
    return len(text.encode("utf-16-le")) // 2


def _all(body: g.OffsetCommitRequest, code: ErrorCode) -> CommitTopics:
    return [
        g.OffsetCommitTopicResponse(
            topic.name, [g.OffsetCommitPartitionResponse(part.partition_index, code) for part in topic.partitions]
        )
        for topic in body.topics
    ]


def _fetched(
    name: str, indexes: Sequence[int], known: Mapping[int, OffsetValue], unstable: Container[TopicPartition]
) -> Generator[None, None, g.OffsetFetchTopicResponse]:
    """Return the offsets of one topic: the newest topic of that name that has any."""
    topic_id = newest_topic_id(value.topic_id for value in known.values())
    parts = []
    for number, index in enumerate(indexes):
        if number % STEP == 0:
            yield
        value = known.get(index)
        if TopicPartition(name, index) in unstable:
            parts.append(g.OffsetFetchPartition(index, -1, -1, "", _E.UNSTABLE_OFFSET_COMMIT))
        elif value is None or value.topic_id != topic_id:
            parts.append(g.OffsetFetchPartition(index, -1, -1, "", _E.NONE))
        else:
            parts.append(g.OffsetFetchPartition(index, value.offset, value.leader_epoch, value.metadata, _E.NONE))
    return g.OffsetFetchTopicResponse(name, parts, topic_id)
