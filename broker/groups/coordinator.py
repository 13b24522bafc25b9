"""The coordinator of the groups whose partition of `__consumer_offsets` this broker leads (Kafka's GroupCoordinator).

Each request is decided at once, on the event loop: nothing awaits between a look at a group and what is done to it.
What has to wait is a waiter of a member, an operation in a purgatory, or a write whose outcome comes back as a call;
and whoever comes back looks again: at the term (see `store`), at the generation, at the state.

Memory follows the log. An assignment is given to nobody, and a commit acknowledged to nobody and shown to nobody,
before its record is replicated (KAFKA-6683).
"""

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from minibroker.broker.config import BrokerConfig
from minibroker.broker.groups.delayed import DelayedHeartbeat, DelayedJoin, DelayedSync
from minibroker.broker.groups.group import NO_GENERATION, Group, JoinWaiter, Member, Protocols, SyncWaiter
from minibroker.broker.groups.records import (
    OffsetKey,
    OffsetValue,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
)
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.store import OFFSETS_TOPIC, GroupStore, Record, Term
from minibroker.broker.metadata_cache import MetadataCache
from minibroker.broker.purgatory.purgatory import DelayedOperation, Purgatory, Timer
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.protocol import group_messages as g
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.groups")

NEW_MEMBER_TIMEOUT_MS = 300_000
"""How long one that joins for the first time may wait for its first generation (Kafka's NewMemberJoinTimeoutMs): it
sends no heartbeats meanwhile."""
MAX_GROUP_ID_BYTES = 32_767
"""As much as a record's key can say."""

_S = GroupState
_E = ErrorCode


def partition_of(group_id: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` that a group belongs to, as everywhere in Kafka: by Java's
    `String.hashCode`, over UTF-16 units."""
    value = 0
    data = group_id.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(data), 2):
        value = (31 * value + (data[position] << 8 | data[position + 1])) & 0xFFFFFFFF
    if value >= 1 << 31:
        value = (1 << 32) - value  # the absolute value of what Java has for a negative number
    return 0 if value == 1 << 31 else value % partitions


class GroupCoordinator:
    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._random = world.random
        self._clock = world.clock
        self._config = config
        self._metadata = metadata
        self._replicas = replicas
        self._start_task = start_task
        self._store = GroupStore(replicas, world.clock, config)
        self._terms: dict[int, Term] = {}
        self._timer = Timer()
        self._joins: Purgatory[DelayedOperation] = Purgatory("Rebalance", self._timer)
        self._heartbeats: Purgatory[DelayedOperation] = Purgatory("Heartbeat", self._timer)

    def close(self) -> None:
        """Drop what waits; the server answers nobody any more."""
        self._joins.close()
        self._heartbeats.close()
        self._timer.close()

    def purgatories(self) -> list[Purgatory[DelayedOperation]]:
        """To be looked at."""
        return [self._joins, self._heartbeats]

    # -- what this broker coordinates (LeadershipListener) --

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        if topic_partition.topic != OFFSETS_TOPIC:
            return
        partition = self._replicas.partition(topic_partition)
        assert partition is not None
        term = self._terms.get(topic_partition.partition)
        if term is not None and term.leading_since_epoch == partition.leading_since_epoch:
            term.epoch = epoch
            return
        self._end_term(topic_partition.partition)
        term = Term(topic_partition.partition, epoch, partition.leading_since_epoch, partition.log.log_end_offset)
        self._terms[topic_partition.partition] = term
        self._start_task(self._load(term), f"load of the groups of {topic_partition}")

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        if topic_partition.topic == OFFSETS_TOPIC:
            self._end_term(topic_partition.partition)

    async def _load(self, term: Term) -> None:
        began_s = self._clock.monotonic()
        groups = await self._store.load(term)
        if term.is_over:
            return
        term.groups = groups
        term.is_loaded = True
        for group in groups.values():
            for member in group.members.values():
                self._session_begins(term, group, member)
        logger.info(
            "%s: coordinates %d groups in epoch %d, after %.3f s",
            term.topic_partition,
            len(groups),
            term.epoch,
            self._clock.monotonic() - began_s,
        )

    def _end_term(self, index: int) -> None:
        """Who waits is told to look for another coordinator; what comes back later finds the term over."""
        term = self._terms.pop(index, None)
        if term is None:
            return
        term.is_over = True
        for group in term.groups.values():
            self._answer_all(group, _E.NOT_COORDINATOR)
            group.transition_to(_S.DEAD, self._clock.wall_ms())
            self._joins.check_and_complete(group)
            self._heartbeats.check_and_complete(group)
            for member_id in (*group.members, *group.pending_members):
                self._heartbeats.check_and_complete((group, member_id))
        logger.info("%s: coordinates its %d groups no more", term.topic_partition, len(term.groups))

    def _answer_all(self, group: Group, code: ErrorCode) -> None:
        for member in group.members.values():
            _answer_join(member, _refused_join(code, member.member_id))
            _answer_sync(member, g.SyncGroupResponse(0, code))

    def _term_of(self, group_id: str) -> Term | ErrorCode:
        """The loaded term of the group, or why there is none."""
        if len(group_id.encode()) > MAX_GROUP_ID_BYTES:
            return _E.INVALID_GROUP_ID
        partitions = self._metadata.partition_count(OFFSETS_TOPIC)
        term = self._terms.get(partition_of(group_id, partitions)) if partitions else None
        if term is None:
            return _E.NOT_COORDINATOR
        return term if term.is_loaded else _E.COORDINATOR_LOAD_IN_PROGRESS

    # -- JoinGroup --

    def join(
        self,
        body: g.JoinGroupRequest,
        client_id: str,
        client_host: str,
        respond: JoinWaiter,
    ) -> None:
        """R2. `respond` at once with an error, or when the generation is made up. One that joins without an id is told
        one, to join with (KIP-394), unless it is static."""

        def refuse(code: ErrorCode, member_id: str = body.member_id) -> None:
            respond(_refused_join(code, member_id))

        term = self._term_of(body.group_id) if body.group_id else _E.INVALID_GROUP_ID
        if isinstance(term, ErrorCode):
            refuse(term)
            return
        least, most = self._config.group_min_session_timeout_ms, self._config.group_max_session_timeout_ms
        if not least <= body.session_timeout_ms <= most:
            refuse(_E.INVALID_SESSION_TIMEOUT)
            return
        group = term.groups.get(body.group_id)
        if group is None:
            if body.member_id:
                refuse(_E.UNKNOWN_MEMBER_ID)
                return
            group = term.groups[body.group_id] = Group(body.group_id)
        protocols: Protocols = tuple((protocol.name, bytes(protocol.metadata)) for protocol in body.protocols)
        if not group.accepts(body.member_id, self._config.group_max_size):
            if body.member_id:
                self._remove(term, group, body.member_id, "the group is full")
            refuse(_E.GROUP_MAX_SIZE_REACHED, "")
        elif group.is_in(_S.DEAD):
            refuse(_E.COORDINATOR_NOT_AVAILABLE)
        elif not group.supports(body.protocol_type, [name for name, _ in protocols]):
            refuse(_E.INCONSISTENT_GROUP_PROTOCOL)
        elif not body.member_id:
            self._join_new(term, group, body, protocols, client_id, client_host, respond)
        else:
            self._join_known(term, group, body, protocols, client_id, client_host, respond)
        if group.is_in(_S.PREPARING_REBALANCE):
            self._joins.check_and_complete(group)

    def _join_new(
        self,
        term: Term,
        group: Group,
        body: g.JoinGroupRequest,
        protocols: Protocols,
        client_id: str,
        client_host: str,
        respond: JoinWaiter,
    ) -> None:
        name = client_id if body.group_instance_id is None else body.group_instance_id
        member_id = f"{name}-{self._random.randbytes(16).hex()}"
        if body.group_instance_id is None:
            group.pending_members[member_id] = None
            self._pending_member_begins(term, group, member_id, body.session_timeout_ms)
            respond(_refused_join(_E.MEMBER_ID_REQUIRED, member_id))
        elif body.group_instance_id in group.static_members:
            self._static_member_returns(term, group, body, protocols, member_id, respond)
        else:
            self._add(term, group, body, protocols, member_id, client_id, client_host, respond)

    def _join_known(
        self,
        term: Term,
        group: Group,
        body: g.JoinGroupRequest,
        protocols: Protocols,
        client_id: str,
        client_host: str,
        respond: JoinWaiter,
    ) -> None:
        if body.member_id in group.pending_members:
            self._add(term, group, body, protocols, body.member_id, client_id, client_host, respond)
            return
        error = group.why_not_member(body.member_id, body.group_instance_id)
        if error is not _E.NONE:
            respond(_refused_join(error, body.member_id))
            return
        member = group.members[body.member_id]
        is_leader = group.leader_id == member.member_id
        same = member.protocols == protocols
        # A member whose answer was lost asks again; it is told what it was told before.
        if group.is_in(_S.COMPLETING_REBALANCE) and same:
            respond(self._joined(group, member, members=is_leader))
        elif group.is_in(_S.STABLE) and same and not is_leader:
            respond(self._joined(group, member, members=False))
        else:
            self._update(term, group, member, body, protocols, respond)

    def _add(
        self,
        term: Term,
        group: Group,
        body: g.JoinGroupRequest,
        protocols: Protocols,
        member_id: str,
        client_id: str,
        client_host: str,
        respond: JoinWaiter,
    ) -> None:
        member = Member(
            member_id,
            body.group_instance_id,
            client_id,
            client_host,
            max(body.rebalance_timeout_ms, 0),
            body.session_timeout_ms,
            protocols,
        )
        member.is_new = True
        member.join_waiter = respond
        if group.is_in(_S.PREPARING_REBALANCE) and group.generation_id == 0:
            group.new_member_added = True
        group.add(member, body.protocol_type)
        self._session_begins(term, group, member)
        self._prepare_rebalance(term, group, f"member {member_id} joins{_because(body.reason)}")

    def _update(
        self,
        term: Term,
        group: Group,
        member: Member,
        body: g.JoinGroupRequest,
        protocols: Protocols,
        respond: JoinWaiter,
    ) -> None:
        group.update(member, protocols, max(body.rebalance_timeout_ms, 0), body.session_timeout_ms)
        member.join_waiter = respond
        self._heard_of(member)
        self._prepare_rebalance(term, group, f"member {member.member_id} joins again{_because(body.reason)}")

    def _static_member_returns(
        self,
        term: Term,
        group: Group,
        body: g.JoinGroupRequest,
        protocols: Protocols,
        member_id: str,
        respond: JoinWaiter,
    ) -> None:
        raise NotImplementedError

    def _joined(self, group: Group, member: Member, *, members: bool, skip: bool = False) -> g.JoinGroupResponse:
        return g.JoinGroupResponse(
            0,
            _E.NONE,
            group.generation_id,
            group.protocol_type,
            group.protocol_name,
            group.leader_id or "",
            skip,
            member.member_id,
            group.member_metadata() if members else [],
        )

    # -- rebalances --

    def _prepare_rebalance(self, term: Term, group: Group, reason: str) -> None:
        """Ask all members to join anew, unless that is under way already."""
        if not group.is_in(_S.EMPTY, _S.COMPLETING_REBALANCE, _S.STABLE):
            return
        if group.is_in(_S.COMPLETING_REBALANCE):
            self._refuse_assignments(group, _E.REBALANCE_IN_PROGRESS)
        logger.info("group %r rebalances from generation %d: %s", group.group_id, group.generation_id, reason)
        timeout_ms = group.rebalance_timeout_ms
        is_first = group.is_in(_S.EMPTY)
        group.transition_to(_S.PREPARING_REBALANCE, self._clock.wall_ms())
        delay_ms = self._config.group_initial_rebalance_delay_ms
        if is_first and delay_ms:
            self._wait_for_more(term, group, delay_ms, max(timeout_ms - delay_ms, 0))
        else:
            self._wait_for_all(term, group, timeout_ms)

    def _wait_for_more(self, term: Term, group: Group, delay_ms: int, left_ms: int) -> None:
        """The initial delay, as long again for each further member, up to the rebalance timeout."""
        group.new_member_added = False

        def complete() -> None:
            if group.new_member_added and left_ms:
                next_ms = min(self._config.group_initial_rebalance_delay_ms, left_ms)
                self._wait_for_more(term, group, next_ms, left_ms - next_ms)
            else:
                self._complete_join(term, group)

        operation = DelayedJoin(delay_ms, lambda: term.is_over, complete)
        self._joins.try_complete_else_watch(operation, [group])

    def _wait_for_all(self, term: Term, group: Group, timeout_ms: int) -> None:
        operation = DelayedJoin(
            timeout_ms, lambda: term.is_over or group.has_all_joined(), lambda: self._complete_join(term, group)
        )
        self._joins.try_complete_else_watch(operation, [group])

    def _complete_join(self, term: Term, group: Group) -> None:
        """R3. Who has not joined is a member no more, unless it is static: that one keeps its place for the time of its
        session."""
        if term.is_over or not group.is_in(_S.PREPARING_REBALANCE):
            return
        for member in list(group.members.values()):
            if member.join_waiter is None and not member.is_static:
                logger.info("group %r: member %s has not joined in time", group.group_id, member.member_id)
                group.remove(member.member_id)
                self._heartbeats.check_and_complete((group, member.member_id))
        if group.members and not group.elect_joined_leader():
            # Static members alone, none of whom has joined: their sessions end before there is a generation.
            self._wait_for_all(term, group, group.rebalance_timeout_ms)
            return
        group.begin_generation(self._clock.wall_ms())
        if group.is_in(_S.EMPTY):
            logger.info("group %r is empty in generation %d", group.group_id, group.generation_id)
            self._store_group(term, group, {}, lambda code: None)
            return
        logger.info(
            "group %r has generation %d with %d members: protocol %s, leader %s",
            group.group_id,
            group.generation_id,
            len(group.members),
            group.protocol_name,
            group.leader_id,
        )
        for member in list(group.members.values()):
            _answer_join(member, self._joined(group, member, members=member.member_id == group.leader_id))
            member.is_new = False
            self._heard_of(member)
        self._await_syncs(term, group)

    def _await_syncs(self, term: Term, group: Group) -> None:
        generation = group.generation_id

        def is_over() -> bool:
            return term.is_over or group.generation_id != generation or not group.pending_sync

        def expired() -> None:
            if is_over() or not group.is_in(_S.COMPLETING_REBALANCE, _S.STABLE):
                return
            late = list(group.pending_sync)
            for member_id in late:
                member = group.remove(member_id)
                if member is not None:
                    _answer_sync(member, g.SyncGroupResponse(0, _E.UNKNOWN_MEMBER_ID))
                self._heartbeats.check_and_complete((group, member_id))
            self._prepare_rebalance(term, group, f"{len(late)} members did not ask for their assignments in time")

        operation = DelayedSync(group.rebalance_timeout_ms, is_over, expired)
        self._heartbeats.try_complete_else_watch(operation, [group])

    def _refuse_assignments(self, group: Group, code: ErrorCode) -> None:
        for member in group.members.values():
            member.assignment = b""
            _answer_sync(member, g.SyncGroupResponse(0, code))

    def _remove(self, term: Term, group: Group, member_id: str, reason: str) -> None:
        """A member, or an id that was given out, is none any more."""
        member = group.remove(member_id)
        if member is not None:
            logger.info("group %r: member %s is gone: %s", group.group_id, member_id, reason)
            _answer_join(member, _refused_join(_E.UNKNOWN_MEMBER_ID, member_id))
            _answer_sync(member, g.SyncGroupResponse(0, _E.UNKNOWN_MEMBER_ID))
            self._prepare_rebalance(term, group, f"member {member_id} is gone: {reason}")
        self._heartbeats.check_and_complete((group, member_id))
        if group.is_in(_S.PREPARING_REBALANCE):
            self._joins.check_and_complete(group)

    def _store_group(
        self, term: Term, group: Group, assignments: Mapping[str, bytes], stored: Callable[[ErrorCode], None]
    ) -> None:
        """`stored` is not called when the term is over by then: whoever waited was answered when it ended."""

        def written(code: ErrorCode, _: int) -> None:
            if not term.is_over:
                stored(code)

        value = encode_group_value(group.as_value(assignments))
        self._store.append(term, [(encode_group_key(group.group_id), value)], written)

    # -- SyncGroup --

    def sync(self, body: g.SyncGroupRequest, respond: SyncWaiter) -> None:
        """R4. `respond` with the member's assignment, once it is in the log."""

        def refuse(code: ErrorCode) -> None:
            respond(g.SyncGroupResponse(0, code))

        term = self._term_of(body.group_id) if body.group_id else _E.INVALID_GROUP_ID
        if isinstance(term, ErrorCode):
            # The generation is not the one that was loaded: it would have to be joined again in any case.
            refuse(_E.REBALANCE_IN_PROGRESS if term is _E.COORDINATOR_LOAD_IN_PROGRESS else term)
            return
        group = term.groups.get(body.group_id)
        if group is None:
            refuse(_E.UNKNOWN_MEMBER_ID)
            return
        error = self._why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)
        if error is not _E.NONE:
            refuse(error)
        elif body.protocol_type not in (None, group.protocol_type) or body.protocol_name not in (
            None,
            group.protocol_name,
        ):
            refuse(_E.INCONSISTENT_GROUP_PROTOCOL)
        elif group.is_in(_S.PREPARING_REBALANCE):
            refuse(_E.REBALANCE_IN_PROGRESS)
        elif group.is_in(_S.STABLE):
            member = group.members[body.member_id]
            self._heard_of(member)
            self._synced(group, member)
            respond(self._assigned(group, member))
        else:
            self._sync_completing(term, group, body, respond)

    def _sync_completing(self, term: Term, group: Group, body: g.SyncGroupRequest, respond: SyncWaiter) -> None:
        member = group.members[body.member_id]
        member.sync_waiter = respond
        self._synced(group, member)
        if group.leader_id != member.member_id:
            return
        given = {one.member_id: bytes(one.assignment) for one in body.assignments}
        assignments = {member_id: given.get(member_id, b"") for member_id in group.members}
        generation = group.generation_id
        logger.info("group %r: assignments for generation %d from %s", group.group_id, generation, member.member_id)

        def stored(code: ErrorCode) -> None:
            """R5."""
            if not group.is_in(_S.COMPLETING_REBALANCE) or group.generation_id != generation:
                return
            if code is not _E.NONE:
                self._refuse_assignments(group, code)
                self._prepare_rebalance(term, group, f"the assignments could not be stored: {code.name}")
                return
            group.transition_to(_S.STABLE, self._clock.wall_ms())
            for other in group.members.values():
                other.assignment = assignments.get(other.member_id, b"")
                if other.sync_waiter is not None:
                    _answer_sync(other, self._assigned(group, other))
                    self._heard_of(other)

        self._store_group(term, group, assignments, stored)

    def _synced(self, group: Group, member: Member) -> None:
        group.pending_sync.pop(member.member_id, None)
        if not group.pending_sync:
            self._heartbeats.check_and_complete(group)

    def _assigned(self, group: Group, member: Member) -> g.SyncGroupResponse:
        return g.SyncGroupResponse(0, _E.NONE, group.protocol_type, group.protocol_name, member.assignment)

    # -- Heartbeat, LeaveGroup --

    def heartbeat(self, body: g.HeartbeatRequest) -> ErrorCode:
        """R6."""
        term = self._term_of(body.group_id) if body.group_id else _E.INVALID_GROUP_ID
        if isinstance(term, ErrorCode):
            # While the groups are loaded nobody's session runs, so nobody need do anything.
            return _E.NONE if term is _E.COORDINATOR_LOAD_IN_PROGRESS else term
        group = term.groups.get(body.group_id)
        if group is None:
            return _E.UNKNOWN_MEMBER_ID
        error = self._why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)
        if error is not _E.NONE:
            return error
        self._heard_of(group.members[body.member_id])
        return _E.REBALANCE_IN_PROGRESS if group.is_in(_S.PREPARING_REBALANCE) else _E.NONE

    def leave(self, body: g.LeaveGroupRequest) -> g.LeaveGroupResponse:
        """Several members may be removed at once, static ones by their names (KIP-345)."""
        term = self._term_of(body.group_id) if body.group_id else _E.INVALID_GROUP_ID
        if isinstance(term, ErrorCode):
            return g.LeaveGroupResponse(0, term, [])
        group = term.groups.get(body.group_id)
        left = []
        for leaving in body.members:
            code = _E.UNKNOWN_MEMBER_ID if group is None else self._leave(term, group, leaving)
            left.append(g.LeavingMemberResponse(leaving.member_id, leaving.group_instance_id, code))
        return g.LeaveGroupResponse(0, _E.NONE, left)

    def _leave(self, term: Term, group: Group, leaving: g.LeavingMember) -> ErrorCode:
        member_id, name = leaving.member_id, leaving.group_instance_id
        if not member_id and name is not None:
            member_id = group.static_members.get(name, "")
        if member_id not in group.pending_members:
            error = group.why_not_member(member_id, name)
            if error is not _E.NONE:
                return error
        self._remove(term, group, member_id, f"it leaves{_because(leaving.reason)}")
        return _E.NONE

    def _why_not_in_generation(
        self, group: Group, member_id: str, group_instance_id: str | None, generation_id: int
    ) -> ErrorCode:
        if group.is_in(_S.DEAD):
            return _E.COORDINATOR_NOT_AVAILABLE
        error = group.why_not_member(member_id, group_instance_id)
        if error is _E.NONE and generation_id != group.generation_id:
            return _E.ILLEGAL_GENERATION
        return error

    # -- sessions --

    def _heard_of(self, member: Member) -> None:
        member.session_end_s = self._clock.monotonic() + member.session_timeout_ms / 1_000

    def _session_begins(self, term: Term, group: Group, member: Member) -> None:
        self._heard_of(member)
        if member.is_new:
            member.session_end_s = self._clock.monotonic() + NEW_MEMBER_TIMEOUT_MS / 1_000
        self._watch_session(term, group, member)

    def _watch_session(self, term: Term, group: Group, member: Member) -> None:
        def is_over() -> bool:
            return term.is_over or group.members.get(member.member_id) is not member

        def expired() -> None:
            if is_over():
                return
            if member.is_waiting and not member.is_new:
                self._heard_of(member)  # it has done its part, and is not asked for heartbeats
            if member.session_end_s > self._clock.monotonic():
                self._watch_session(term, group, member)
                return
            self._remove(term, group, member.member_id, f"not heard of for {member.session_timeout_ms} ms")

        left_ms = max(int((member.session_end_s - self._clock.monotonic()) * 1_000) + 1, 1)
        self._heartbeats.try_complete_else_watch(
            DelayedHeartbeat(left_ms, is_over, expired), [(group, member.member_id)]
        )

    def _pending_member_begins(self, term: Term, group: Group, member_id: str, timeout_ms: int) -> None:
        def is_over() -> bool:
            return term.is_over or member_id not in group.pending_members

        def expired() -> None:
            if not is_over():
                self._remove(term, group, member_id, "it did not join with the id that it was given")

        self._heartbeats.try_complete_else_watch(DelayedHeartbeat(timeout_ms, is_over, expired), [(group, member_id)])

    # -- offsets --

    def commit(self, body: g.OffsetCommitRequest, respond: Callable[[list[g.OffsetCommitTopicResponse]], None]) -> None:
        """R7. `respond` once the offsets are in the log, with an error for each partition of which they are not."""

        def refuse(code: ErrorCode) -> None:
            respond(
                [
                    g.OffsetCommitTopicResponse(
                        topic.name,
                        [g.OffsetCommitPartitionResponse(p.partition_index, code) for p in topic.partitions],
                    )
                    for topic in body.topics
                ]
            )

        term = self._term_of(body.group_id)
        if isinstance(term, ErrorCode):
            refuse(term)
            return
        group = term.groups.get(body.group_id)
        if group is None:
            if body.generation_id >= 0:
                refuse(_E.ILLEGAL_GENERATION)
                return
            group = term.groups[body.group_id] = Group(body.group_id)
        error = self._why_no_commit(group, body)
        if error is not _E.NONE:
            refuse(error)
            return
        if body.member_id in group.members:
            self._heard_of(group.members[body.member_id])
        self._commit(term, group, body, respond)

    def _why_no_commit(self, group: Group, body: g.OffsetCommitRequest) -> ErrorCode:
        if body.generation_id < 0 and group.is_in(_S.EMPTY):
            return _E.NONE  # of somebody who is no member, as the group has none
        error = self._why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)
        if error is _E.NONE and group.is_in(_S.COMPLETING_REBALANCE):
            return _E.REBALANCE_IN_PROGRESS
        return error

    def _commit(
        self,
        term: Term,
        group: Group,
        body: g.OffsetCommitRequest,
        respond: Callable[[list[g.OffsetCommitTopicResponse]], None],
    ) -> None:
        now_ms = self._clock.wall_ms()
        answers: list[g.OffsetCommitTopicResponse] = []
        accepted: list[tuple[TopicPartition, OffsetValue, g.OffsetCommitPartitionResponse]] = []
        for topic in body.topics:
            parts = []
            for asked in topic.partitions:
                topic_partition = TopicPartition(topic.name, asked.partition_index)
                answer = g.OffsetCommitPartitionResponse(asked.partition_index, _E.NONE)
                parts.append(answer)
                metadata = asked.committed_metadata or ""
                known_id = self._metadata.topic_id(topic.name)
                if len(metadata.encode()) > self._config.offset_metadata_max_bytes:
                    answer.error_code = _E.OFFSET_METADATA_TOO_LARGE
                elif self._metadata.partition(topic_partition) is None or known_id is None:
                    answer.error_code = _E.UNKNOWN_TOPIC_OR_PARTITION
                elif topic.topic_id not in ("", known_id):
                    answer.error_code = _E.INCONSISTENT_TOPIC_ID
                else:
                    value = OffsetValue(
                        asked.committed_offset, asked.committed_leader_epoch, metadata, now_ms, known_id
                    )
                    accepted.append((topic_partition, value, answer))
            answers.append(g.OffsetCommitTopicResponse(topic.name, parts))
        if not accepted:
            respond(answers)
            return
        group.offsets.begin(topic_partition for topic_partition, _, _ in accepted)

        def written(code: ErrorCode, base_offset: int) -> None:
            if code is _E.NONE:
                for position, (topic_partition, value, _) in enumerate(accepted):
                    group.offsets.complete(topic_partition, value, base_offset + position)
            else:
                group.offsets.fail(topic_partition for topic_partition, _, _ in accepted)
                for _, _, answer in accepted:
                    answer.error_code = code
            respond(answers)

        records: list[Record] = [
            (
                encode_offset_key(OffsetKey(group.group_id, topic_partition.topic, topic_partition.partition)),
                encode_offset_value(value),
            )
            for topic_partition, value, _ in accepted
        ]
        self._store.append(term, records, written)

    def fetch_offsets(self, asked: g.OffsetFetchGroup) -> g.OffsetFetchGroupResponse:
        term = self._term_of(asked.group_id)
        if isinstance(term, ErrorCode):
            return g.OffsetFetchGroupResponse(asked.group_id, [], term)
        group = term.groups.get(asked.group_id)
        known: dict[str, dict[int, OffsetValue]] = {}
        if group is not None and not group.is_in(_S.DEAD):
            for topic_partition, value in group.offsets.items():
                known.setdefault(topic_partition.topic, {})[topic_partition.partition] = value
        wanted: Sequence[tuple[str, Sequence[int]]]
        if asked.topics is None:
            wanted = [(name, sorted(parts)) for name, parts in sorted(known.items())]
        else:
            wanted = [(topic.name, topic.partition_indexes) for topic in asked.topics]
        topics = [self._fetched(name, indexes, known.get(name, {})) for name, indexes in wanted]
        return g.OffsetFetchGroupResponse(asked.group_id, topics, _E.NONE)

    def _fetched(
        self, name: str, indexes: Sequence[int], known: Mapping[int, OffsetValue]
    ) -> g.OffsetFetchTopicResponse:
        parts = []
        topic_id = ""
        for index in indexes:
            value = known.get(index)
            if value is None:
                parts.append(g.OffsetFetchPartition(index, -1, -1, "", _E.NONE))
            else:
                topic_id = value.topic_id
                parts.append(g.OffsetFetchPartition(index, value.offset, value.leader_epoch, value.metadata, _E.NONE))
        return g.OffsetFetchTopicResponse(name, parts, topic_id)


def _because(reason: str | None) -> str:
    return f" ({reason[:200]})" if reason else ""


def _refused_join(code: ErrorCode, member_id: str) -> g.JoinGroupResponse:
    return g.JoinGroupResponse(0, code, NO_GENERATION, member_id=member_id)


def _answer_join(member: Member, response: g.JoinGroupResponse) -> None:
    waiter, member.join_waiter = member.join_waiter, None
    if waiter is not None:
        waiter(response)


def _answer_sync(member: Member, response: g.SyncGroupResponse) -> None:
    waiter, member.sync_waiter = member.sync_waiter, None
    if waiter is not None:
        waiter(response)
