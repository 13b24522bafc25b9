"""Coordinates the members of groups: joins, removals, generations and their assignments (Kafka's GroupCoordinator).

Each request is decided synchronously on the event loop: nothing is awaited between reading a group and changing it.
Anything that must wait is a member's waiter, an operation in a purgatory, or a write whose outcome arrives by a
callback. Each continuation checks again whether the term is over (see `terms`), and checks the generation and the
state.

A member receives an assignment only after the log has replicated it (KAFKA-6683). The next coordinator therefore knows
the assignment and never gives the same partitions to another member.
"""

import logging
from collections.abc import Callable, Mapping
from random import Random

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.coordinating.terms import Outcome, TermListener
from minibroker.broker.groups.answers import answer_join, answer_sync, refused_join, settle
from minibroker.broker.groups.delayed import DelayedHeartbeat, DelayedJoin, DelayedSync
from minibroker.broker.groups.group import (
    Connection,
    Group,
    JoinWaiter,
    MemberMetadata,
    Protocols,
    SyncWaiter,
)
from minibroker.broker.groups.rebalances import begun
from minibroker.broker.groups.records import encode_group_key, encode_group_value
from minibroker.broker.groups.room import MOST_MEMBERS_BYTES, Room, why_too_large
from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import GroupTerm, GroupTerms
from minibroker.broker.scheduling.purgatory import Purgatory, Timer
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.words import counted
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.groups")

NEW_MEMBER_TIMEOUT_MS = 300_000
"""The maximum time that a new member waits for its first generation (Kafka's NewMemberJoinTimeoutMs). It sends no
heartbeats until then."""
MAX_MEMBER_BYTES = 1024 * 1024
"""Size limit of a member's metadata, all protocols together (Kafka: unlimited)."""
UNASSIGNED_SESSION_S = 10.0
"""The session of a member that has hung up before its first assignment, if it is longer. Its client asks again at once,
or is gone."""
MOST_OF_CLIENT_ID = 255
"""Characters of the client id that go into a member id, which must fit into every version of every message."""
_LEAST_WAIT_MS = 1_000
"""The shortest wait for static members that have not joined. It ends when one joins or its session ends."""
SLEPT_S = 1.0
"""A session check that runs this late means that the process was suspended."""

_S = GroupState
_E = ErrorCode


class GroupCoordinator(TermListener[GroupTerm]):
    def __init__(
        self, clock: Clock, random: Random, config: BrokerConfig, metadata: MetadataCache, terms: GroupTerms
    ) -> None:
        self._clock = clock
        self._random = random
        self._config = config
        self._metadata = metadata
        self._terms = terms
        self._timer = Timer()
        self._joins: Purgatory[DelayedJoin] = Purgatory("Rebalance", self._timer)
        self._heartbeats: Purgatory[DelayedHeartbeat] = Purgatory("Heartbeat", self._timer)
        self.room = Room(MOST_MEMBERS_BYTES, clock, self._kept_bytes)
        self.rebalances = 0
        """Generations begun so far."""
        terms.add_listener(self)

    def close(self) -> None:
        """Drop all waiting operations. No client receives an answer after this."""
        self._joins.close()
        self._heartbeats.close()
        self._timer.close()

    def purgatories(self) -> list[Purgatory[DelayedJoin] | Purgatory[DelayedHeartbeat]]:
        """Return the purgatories, for metrics."""
        return [self._joins, self._heartbeats]

    # -- terms --

    def loaded(self, term: GroupTerm) -> None:
        """Start the sessions of all members, which no coordinator has tracked until now."""
        for group in term.groups.values():
            for member in list(group.members.values()):
                self._session_begins(term, group, member)
            if group.leader_id in group.static_members.values():
                group.seen_counts = {}  # a static leader may have returned to the previous coordinator
            if len(group.members) > self._config.group_max_size:
                self._prepare_rebalance(term, group, "it has more members than group.max.size")

    def over(self, term: GroupTerm) -> None:
        """Answer all waiting requests with NOT_COORDINATOR."""
        for group in term.groups.values():
            for member in group.members.values():
                settle(member)
                answer_join(member, refused_join(_E.NOT_COORDINATOR, member.member_id))
                answer_sync(member, g.SyncGroupResponse(0, _E.NOT_COORDINATOR))
            group.transition_to(_S.DEAD, self._terms.now_s)
            for key in (group, *((group, member_id) for member_id in (*group.members, *group.pending_members))):
                self._joins.check_soon(key)
                self._heartbeats.check_soon(key)

    # -- JoinGroup --

    def join(
        self,
        body: g.JoinGroupRequest,
        client_id: str,
        client_host: str,
        respond: JoinWaiter,
        is_gone: Callable[[], bool],
        connection: Connection | None = None,
    ) -> None:
        """R2. Handle JoinGroup. `respond` is called at once with an error, or when the generation is complete. A
        dynamic member that joins without an id first receives one to join with (KIP-394), unless its protocol version
        is too old. `is_gone` returns whether the client has hung up, and `connection` calls at that moment."""
        code, term, group = self._find_to_join(body)
        if code is not _E.NONE:
            refused = refused_join(code, body.member_id)
            if code is _E.INVALID_SESSION_TIMEOUT:
                least, most = self._session_timeouts_ms
                refused.error_message = (
                    f"session_timeout_ms={body.session_timeout_ms}: the brokers accept {least} to {most} "
                    "(group.min.session.timeout.ms, group.max.session.timeout.ms)"
                )
            respond(refused)
            return
        assert term is not None
        assert group is not None
        protocols: Protocols = tuple((protocol.name, bytes(protocol.metadata)) for protocol in body.protocols)
        body.protocols = []  # the request may wait long, and must not keep them as well
        joining = MemberMetadata(
            body.member_id,
            body.group_instance_id,
            client_id,
            client_host,
            max(body.rebalance_timeout_ms, 0),
            body.session_timeout_ms,
            protocols,
        )
        joining.join_waiter, joining.is_gone = respond, is_gone
        if not group.accepts(body.member_id, body.group_instance_id, self._config.group_max_size):
            if body.member_id:
                self._remove(term, group, body.member_id, "the group is full")
            respond(refused_join(_E.GROUP_MAX_SIZE_REACHED, ""))
        elif not group.supports(body.protocol_type, names := [name for name, _ in protocols]):
            refused = refused_join(_E.INCONSISTENT_GROUP_PROTOCOL, body.member_id)
            refused.error_message = group.why_unsupported(body.protocol_type, names)
            respond(refused)
        elif (too_large := why_too_large(group, joining, self.room)) is not None:
            refused = refused_join(too_large.code, joining.member_id)
            refused.error_message = too_large.detail
            respond(refused)
        elif not body.member_id:
            self._join_new(term, group, joining, body)
        else:
            self._join_known(term, group, joining, body)
        member = group.members.get(joining.member_id)
        if connection is not None and member is not None and not member.is_assigned and member.is_waiting:
            settle(member)
            member.connection = connection
            connection.at_end(member, lambda: self._hung_up(term, group, member))
        if group.is_in(_S.PREPARING_REBALANCE):
            self._joins.check_and_complete(group)

    def _kept_bytes(self) -> int:
        return sum(group.kept_bytes for term in self._terms.loaded() for group in term.groups.values())

    def _hung_up(self, term: GroupTerm, group: Group, member: MemberMetadata) -> None:
        """The connection over which the member has joined is closed. Nothing was promised to a member that has had no
        assignment: it is removed if it has not been in a generation, and otherwise its session is short."""
        if term.is_over or group.members.get(member.member_id) is not member or member.is_assigned:
            return
        if member.is_new:
            self._remove(term, group, member.member_id, "its client has hung up before it was in a generation")
            return
        soon_s = self._clock.monotonic() + UNASSIGNED_SESSION_S
        if soon_s < member.session_end_s:
            member.session_end_s = soon_s
            self._watch_session(term, group, member)

    @property
    def _session_timeouts_ms(self) -> tuple[int, int]:
        return self._config.group_min_session_timeout_ms, self._config.group_max_session_timeout_ms

    def _find_to_join(self, body: g.JoinGroupRequest) -> tuple[ErrorCode, GroupTerm | None, Group | None]:
        """Return the group, which is new if it is unknown, or the error that prevents joining."""
        found = self._terms.find_named(body.group_id)
        if isinstance(found, ErrorCode):
            return found, None, None
        term, group = found
        least, most = self._session_timeouts_ms
        if not least <= body.session_timeout_ms <= most:
            return _E.INVALID_SESSION_TIMEOUT, None, None
        if sum(len(protocol.metadata) for protocol in body.protocols) > MAX_MEMBER_BYTES:
            return _E.MESSAGE_TOO_LARGE, None, None
        if group is None:
            if body.member_id:
                return _E.UNKNOWN_MEMBER_ID, None, None
            if not self._terms.may_add_group(term, body.group_id):
                return _E.POLICY_VIOLATION, None, None
            group = Group(body.group_id)
        return _E.NONE, term, group

    def _join_new(self, term: GroupTerm, group: Group, joining: MemberMetadata, body: g.JoinGroupRequest) -> None:
        assert joining.join_waiter is not None
        name = joining.client_id if joining.group_instance_id is None else joining.group_instance_id
        joining.member_id = f"{name[:MOST_OF_CLIENT_ID]}-{self._random.randbytes(16).hex()}"
        if joining.group_instance_id is None and body.requires_known_member_id:
            term.groups[group.group_id] = group
            group.pending_members[joining.member_id] = None
            self._await_joining(term, group, joining)
            joining.join_waiter(refused_join(_E.MEMBER_ID_REQUIRED, joining.member_id))
        elif joining.group_instance_id is not None and joining.group_instance_id in group.static_members:
            self._replace(term, group, joining, body)
        else:
            self._add(term, group, joining, body)

    def _join_known(self, term: GroupTerm, group: Group, joining: MemberMetadata, body: g.JoinGroupRequest) -> None:
        respond = joining.join_waiter
        assert respond is not None
        if joining.member_id in group.pending_members:
            self._add(term, group, joining, body)
            return
        error = group.why_not_member(joining.member_id, joining.group_instance_id)
        if error is not _E.NONE:
            respond(refused_join(error, joining.member_id))
            return
        member = group.members[joining.member_id]
        is_leader = group.leader_id == member.member_id
        is_same = member.protocols == joining.protocols and member.has_joined
        # A member whose answer was lost asks again and receives the same answer. A leader that rejoins a stable group
        # has seen a change that its assignor must consider, such as new partitions.
        if is_same and (group.is_in(_S.COMPLETING_REBALANCE) or (group.is_in(_S.STABLE) and not is_leader)):
            self._heard_of(member)
            respond(_joined(group, member, with_members=is_leader))
            return
        answer_join(member, refused_join(_E.REBALANCE_IN_PROGRESS, member.member_id))  # answers the earlier request
        group.update(member, joining)
        self._session_begins(term, group, member)
        self._prepare_rebalance(term, group, f"member {member.member_id} joins again{_because(body.reason)}")

    def _add(self, term: GroupTerm, group: Group, member: MemberMetadata, body: g.JoinGroupRequest) -> None:
        term.groups[group.group_id] = group
        member.is_new = True
        group.new_member_added = True
        group.add(member, body.protocol_type)
        self._session_begins(term, group, member)
        self._prepare_rebalance(term, group, f"member {member.member_id} joins{_because(body.reason)}")

    # -- static members that come back (KIP-345) --

    def _replace(self, term: GroupTerm, group: Group, joining: MemberMetadata, body: g.JoinGroupRequest) -> None:
        """A static member has returned without its member id. It takes its old place under a new id, and a process that
        still uses the old id is fenced. In a stable group it receives its old assignment without a rebalance as soon as
        the log has the new id, except in four cases, which cause a rebalance (in Kafka the first three go unnoticed
        until another one):

        - Its subscription has changed.
        - It is the leader, and its topics have partitions that are not assigned.
        - It was about to give up partitions and rejoin, so that other members receive them, and no longer knows of
          that.
        - The generation was stored by another coordinator. Its record tells how many numbers later coordinators may
          have used without storing a generation (`group_from`). A record of the same generation from this term would
          not, and the next coordinator would use their numbers again.
        """
        name, respond = joining.group_instance_id, joining.join_waiter
        assert name is not None
        assert respond is not None
        member = group.members[group.static_members[name]]
        before = MemberMetadata(
            member.member_id,
            name,
            member.client_id,
            member.client_host,
            member.rebalance_timeout_ms,
            member.session_timeout_ms,
            member.protocols,
        )
        logger.info(
            "group %r: static member %s comes back as %s instead of %s",
            group.group_id,
            name,
            joining.member_id,
            before.member_id,
        )
        answer_join(member, refused_join(_E.FENCED_INSTANCE_ID, before.member_id))
        answer_sync(member, g.SyncGroupResponse(0, _E.FENCED_INSTANCE_ID))
        group.rename_static_member(name, joining.member_id)
        group.update(member, joining)
        self._session_begins(term, group, member)
        if group.is_in(_S.COMPLETING_REBALANCE):
            # The leader may be computing an assignment for the old id.
            self._prepare_rebalance(term, group, f"static member {name} comes back{_because(body.reason)}")
        elif group.is_in(_S.STABLE):
            if group.select_protocol() != group.protocol_name:
                self._prepare_rebalance(term, group, f"static member {name} comes back with other protocols")
            elif not group.reads_the_same(before.protocols, joining.protocols):
                self._prepare_rebalance(term, group, f"static member {name} comes back with another subscription")
            elif group.leader_id == member.member_id and not group.assigns_all(self._metadata.partition_count):
                self._prepare_rebalance(term, group, f"its leader {name} comes back, and topics have other partitions")
            elif group.generations_used != group.generation_id:
                self._prepare_rebalance(term, group, f"static member {name} comes back to another coordinator")
            elif group.awaits_what_was_owned(before.protocols):
                self._prepare_rebalance(term, group, f"static member {name} comes back, and was to give up partitions")
            else:
                if group.leader_id == member.member_id:
                    group.seen_counts = self._partition_counts(group)
                self._store_return(term, group, member, before)

    def _store_return(self, term: GroupTerm, group: Group, member: MemberMetadata, before: MemberMetadata) -> None:
        member_id, respond, generation = member.member_id, member.join_waiter, group.generation_id

        def stored(outcome: Outcome) -> None:
            if not group.is_in(_S.STABLE) or group.generation_id != generation or member.join_waiter is not respond:
                return  # the join now belongs to a rebalance, or the member has returned once more
            if outcome.code is _E.NONE:
                answer_join(member, _joined(group, member, with_members=group.leader_id == member_id, skip=True))
                return
            # The log may have only the old id, so the next coordinator may know only that one. It stays valid here as
            # well.
            assert before.group_instance_id is not None
            answer_join(member, refused_join(outcome.code, ""))
            group.rename_static_member(before.group_instance_id, before.member_id)
            group.update(member, before)
            self._session_begins(term, group, member)

        assignments = {other.member_id: other.assignment for other in group.members.values()}
        self._store_group(term, group, assignments, stored)

    def _look_at_topics(self, term: GroupTerm, group: Group) -> None:
        """Rebalance if the topics of a returned static leader have unassigned partitions. The leader may have read
        metadata that was newer than this broker's, and then no client would notice them."""
        if group.seen_counts is None or not group.is_in(_S.STABLE):
            return
        counts = self._partition_counts(group)
        if counts == group.seen_counts:
            return
        group.seen_counts = counts
        if not group.assigns_all(self._metadata.partition_count):
            self._prepare_rebalance(term, group, "its leader came back, and topics have other partitions")

    def _partition_counts(self, group: Group) -> dict[str, int]:
        return {topic: self._metadata.partition_count(topic) for topic in group.subscribed_topics() or ()}

    # -- rebalances --

    def _prepare_rebalance(self, term: GroupTerm, group: Group, reason: str) -> None:
        """Ask all members to rejoin, unless a rebalance is already under way."""
        if not group.is_in(_S.EMPTY, _S.COMPLETING_REBALANCE, _S.STABLE):
            return
        if group.is_in(_S.COMPLETING_REBALANCE):
            self._refuse_assignments(group, _E.REBALANCE_IN_PROGRESS)
        logger.info("group %r rebalances from generation %d: %s", group.group_id, group.generation_id, reason)
        self._remember(group, reason)
        is_first = group.is_in(_S.EMPTY)
        group.transition_to(_S.PREPARING_REBALANCE, self._terms.now_s)
        delay_ms = self._config.group_initial_rebalance_delay_ms
        if is_first and delay_ms:
            self._wait_for_more(term, group, delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0))
        else:
            self._wait_for_all(term, group)

    def _remember(self, group: Group, reason: str) -> None:
        """Keep the reason for DescribeGroups, if there is memory for it."""
        after = begun(group.rebalances, self._clock.observed_ms(), self._terms.now_s, group.generation_id, reason)
        group.rebalances = after if self.room.add(after[-1].kept_bytes) else ()

    def _wait_for_more(self, term: GroupTerm, group: Group, delay_ms: int, left_ms: int) -> None:
        """Wait for the initial delay, and again while new members keep joining, up to the rebalance timeout."""
        group.new_member_added = False

        def complete() -> None:
            if group.new_member_added and left_ms and not term.is_over:
                next_ms = min(self._config.group_initial_rebalance_delay_ms, left_ms)
                self._wait_for_more(term, group, next_ms, left_ms - next_ms)
            else:
                self._complete_join(term, group)

        self._joins.try_complete_else_watch(DelayedJoin(delay_ms, lambda: term.is_over, complete), [group])

    def _wait_for_all(self, term: GroupTerm, group: Group, least_ms: int = 0) -> None:
        operation = DelayedJoin(
            max(group.rebalance_timeout_ms, least_ms),
            lambda: term.is_over or group.has_all_joined(),
            lambda: self._complete_join(term, group),
        )
        self._joins.try_complete_else_watch(operation, [group])

    def _complete_join(self, term: GroupTerm, group: Group) -> None:
        """R3. Begin the next generation. Dynamic members that have not rejoined are removed; static ones keep their
        place until their session ends. A new member that has hung up is removed as well: it knows no id, so it could
        never rejoin."""
        if term.is_over or not group.is_in(_S.PREPARING_REBALANCE):
            return
        for member in list(group.members.values()):
            if not member.is_static and (member.join_waiter is None or (member.is_new and member.is_gone())):
                logger.info("group %r: member %s has not joined in time", group.group_id, member.member_id)
                self._drop(group, member.member_id)
        if group.members and not group.elect_joined_leader():
            # Only static members are left, and none has joined. Their sessions must end before there is a generation.
            # Their rebalance timeout may be 0.
            self._wait_for_all(term, group, _LEAST_WAIT_MS)
            return
        group.begin_generation(self._terms.now_s)
        self.rebalances += 1
        if group.is_in(_S.EMPTY):
            logger.info("group %r is empty in generation %d", group.group_id, group.generation_id)
            self._store_group(term, group, {}, lambda outcome: None)
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
            if member.join_waiter is not None:
                if member.is_new:
                    member.is_new = False
                    self._session_begins(term, group, member)
                self._heard_of(member)
                answer_join(member, _joined(group, member, with_members=member.member_id == group.leader_id))
        self._await_syncs(term, group)

    def _await_syncs(self, term: GroupTerm, group: Group) -> None:
        """Wait, up to the rebalance timeout, until all members have asked for their assignments and the leader has sent
        them."""
        generation = group.generation_id

        def is_over() -> bool:
            return term.is_over or group.generation_id != generation or not group.pending_sync

        def expired() -> None:
            if is_over() or not group.is_in(_S.COMPLETING_REBALANCE, _S.STABLE):
                return
            late = list(group.pending_sync)
            for member_id in late:
                self._drop(group, member_id)
            self._prepare_rebalance(
                term, group, f"{counted(len(late), 'member')} did not ask for an assignment in time"
            )

        operation = DelayedSync(group.rebalance_timeout_ms, is_over, expired)
        self._heartbeats.try_complete_else_watch(operation, [group])

    def _refuse_assignments(self, group: Group, code: ErrorCode) -> None:
        for member in group.members.values():
            member.assignment = b""
            answer_sync(member, g.SyncGroupResponse(0, code))

    def _remove(self, term: GroupTerm, group: Group, member_id: str, reason: str) -> None:
        """Remove a member, or an id handed out for joining. The other members rebalance."""
        if self._drop(group, member_id):
            if group.is_in(_S.PREPARING_REBALANCE):  # otherwise the rebalance logs it
                logger.info("group %r: member %s is gone: %s", group.group_id, member_id, reason)
            self._prepare_rebalance(term, group, f"member {member_id} is gone: {reason}")
        if group.is_in(_S.PREPARING_REBALANCE):
            self._joins.check_and_complete(group)
        term.forget_unused(group, self._terms.now_s)

    def _drop(self, group: Group, member_id: str) -> bool:
        """Remove the member and return whether it was one. Its pending requests fail with an error upon which it
        rejoins."""
        member = group.remove(member_id)
        self._heartbeats.check_soon((group, member_id))
        if member is None:
            return False
        settle(member)
        answer_join(member, refused_join(_E.UNKNOWN_MEMBER_ID, member_id))
        answer_sync(member, g.SyncGroupResponse(0, _E.UNKNOWN_MEMBER_ID))
        return True

    def _store_group(
        self, term: GroupTerm, group: Group, assignments: Mapping[str, bytes], stored: Callable[[Outcome], None]
    ) -> None:
        """Write the group to the log. `stored` is not called if the term has ended, because all waiters were answered
        then."""

        def written(outcome: Outcome) -> None:
            if not term.is_over:
                stored(outcome)

        value = encode_group_value(group.as_value(assignments, self._clock.wall_ms()))
        self._terms.write(term, [(encode_group_key(group.group_id), value)], written)

    # -- SyncGroup --

    def sync(self, body: g.SyncGroupRequest, respond: SyncWaiter) -> None:
        """R4. Handle SyncGroup. `respond` is called with the member's assignment once the log has it."""

        def refuse(code: ErrorCode) -> None:
            respond(g.SyncGroupResponse(0, code))

        found = self._terms.find_named(body.group_id)
        if isinstance(found, ErrorCode):
            # The generation is not in the log, so the member has to rejoin in any case.
            refuse(_E.REBALANCE_IN_PROGRESS if found is _E.COORDINATOR_LOAD_IN_PROGRESS else found)
            return
        term, group = found
        error = why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)
        if group is None or error is not _E.NONE:
            refuse(error)
        elif body.protocol_type not in (None, group.protocol_type) or (
            body.protocol_name not in (None, group.protocol_name)
        ):
            refuse(_E.INCONSISTENT_GROUP_PROTOCOL)
        elif group.is_in(_S.PREPARING_REBALANCE):
            refuse(_E.REBALANCE_IN_PROGRESS)
        elif group.is_in(_S.STABLE):
            member = group.members[body.member_id]
            self._heard_of(member)
            settle(member, is_assigned=True)
            self._has_synced(group, member)
            respond(_assigned(group, member))
        else:
            self._sync_completing(term, group, body, respond)

    def _sync_completing(self, term: GroupTerm, group: Group, body: g.SyncGroupRequest, respond: SyncWaiter) -> None:
        member = group.members[body.member_id]
        answer_sync(member, g.SyncGroupResponse(0, _E.REBALANCE_IN_PROGRESS))  # answers an earlier copy of the request
        member.sync_waiter = respond
        self._has_synced(group, member)
        sent, body.assignments = body.assignments, []  # the request may wait long, and must not keep them as well
        if group.leader_id != member.member_id or not group.takes_assignment():
            return
        given = {one.member_id: bytes(one.assignment) for one in sent}
        assignments = {member_id: given.get(member_id, b"") for member_id in group.members}
        generation = group.generation_id

        def stored(outcome: Outcome) -> None:
            """R5."""
            if not group.is_in(_S.COMPLETING_REBALANCE) or group.generation_id != generation:
                return
            if outcome.code is not _E.NONE:
                self._refuse_assignments(group, outcome.code)
                self._prepare_rebalance(term, group, f"the assignments could not be stored: {outcome.code.name}")
                return
            group.transition_to(_S.STABLE, self._terms.now_s)
            group.seen_counts = None
            for other in group.members.values():
                other.assignment = assignments.get(other.member_id, b"")
                if other.sync_waiter is not None:
                    settle(other, is_assigned=True)
                    self._heard_of(other)
                    answer_sync(other, _assigned(group, other))

        self._store_group(term, group, assignments, stored)

    def _has_synced(self, group: Group, member: MemberMetadata) -> None:
        group.pending_sync.pop(member.member_id, None)
        if not group.pending_sync:
            self._heartbeats.check_soon(group)

    # -- Heartbeat, LeaveGroup --

    def heartbeat(self, body: g.HeartbeatRequest) -> ErrorCode:
        """R6. Handle Heartbeat."""
        found = self._terms.find_named(body.group_id)
        if isinstance(found, ErrorCode):
            # No session runs while groups are loading, so the member need not act.
            return _E.NONE if found is _E.COORDINATOR_LOAD_IN_PROGRESS else found
        term, group = found
        error = why_not_in_generation(group, body.member_id, body.group_instance_id, body.generation_id)
        if group is None or error is not _E.NONE:
            return error
        self._heard_of(group.members[body.member_id])
        if group.leader_id == body.member_id:
            self._look_at_topics(term, group)
        return _E.REBALANCE_IN_PROGRESS if group.is_in(_S.PREPARING_REBALANCE) else _E.NONE

    def leave(self, body: g.LeaveGroupRequest) -> g.LeaveGroupResponse:
        """Handle LeaveGroup, which may remove several members, static ones by their names (KIP-345)."""
        found = self._terms.find_named(body.group_id)
        if isinstance(found, ErrorCode):
            return g.LeaveGroupResponse(0, found, [])
        term, group = found
        answers = []
        for leaving in body.members:
            code = _E.UNKNOWN_MEMBER_ID if group is None else self._leave(term, group, leaving)
            answers.append(g.LeavingMemberResponse(leaving.member_id, leaving.group_instance_id, code))
        return g.LeaveGroupResponse(0, _E.NONE, answers)

    def _leave(self, term: GroupTerm, group: Group, leaving: g.LeavingMember) -> ErrorCode:
        member_id, name = leaving.member_id, leaving.group_instance_id
        if not member_id and name is not None:
            member_id = group.static_members.get(name, "")
        if member_id not in group.pending_members:
            error = group.why_not_member(member_id, name)
            if error is not _E.NONE:
                return error
        self._remove(term, group, member_id, f"it leaves{_because(leaving.reason)}")
        return _E.NONE

    def heard_of(self, group: Group, member_id: str) -> None:
        """Extend the session of a member that has sent another request."""
        member = group.members.get(member_id)
        if member is not None:
            self._heard_of(member)

    # -- sessions --

    def _heard_of(self, member: MemberMetadata) -> None:
        timeout_ms = NEW_MEMBER_TIMEOUT_MS if member.is_new else member.session_timeout_ms
        member.session_end_s = self._clock.monotonic() + timeout_ms / 1_000

    def _session_begins(self, term: GroupTerm, group: Group, member: MemberMetadata) -> None:
        self._heard_of(member)
        self._watch_session(term, group, member)

    def _watch_session(self, term: GroupTerm, group: Group, member: MemberMetadata) -> None:
        """Watch the member's session until its currently known end. Call this again if the session may end sooner, or
        under another id; the previous watch then ends."""
        member_id = member.member_id
        member.session_watches += 1
        number = member.session_watches
        self._heartbeats.check_soon((group, member_id))

        def is_over() -> bool:
            return term.is_over or group.members.get(member_id) is not member or member.session_watches != number

        def expired() -> None:
            now_s = self._clock.monotonic()
            if is_over():
                return
            waits = member.is_waiting and not member.is_new  # it waits for other members and sends no heartbeats
            if waits or now_s - member.session_end_s > SLEPT_S:
                # Or the process was suspended, and heartbeats of that time are still unread.
                self._heard_of(member)
            if member.session_end_s > now_s:
                self._watch_session(term, group, member)
            else:
                self._remove(term, group, member_id, f"no heartbeat for {member.session_timeout_ms} ms")

        left_ms = max(int((member.session_end_s - self._clock.monotonic()) * 1_000) + 1, 1)
        operation = DelayedHeartbeat(left_ms, is_over, expired)
        self._heartbeats.try_complete_else_watch(operation, [(group, member_id)])

    def _await_joining(self, term: GroupTerm, group: Group, joining: MemberMetadata) -> None:
        """Expect the member to join with the id that it received, within a session timeout."""
        member_id = joining.member_id

        def is_over() -> bool:
            return term.is_over or member_id not in group.pending_members

        def expired() -> None:
            if not is_over():
                self._remove(term, group, member_id, "it did not join with the id that it received")

        operation = DelayedHeartbeat(joining.session_timeout_ms, is_over, expired)
        self._heartbeats.try_complete_else_watch(operation, [(group, member_id)])


def why_not_in_generation(
    group: Group | None, member_id: str, group_instance_id: str | None, generation_id: int
) -> ErrorCode:
    """Return NONE for a member of the current generation, otherwise why it is not one."""
    if group is None:
        return _E.UNKNOWN_MEMBER_ID
    error = group.why_not_member(member_id, group_instance_id)
    if error is _E.NONE and generation_id != group.generation_id:
        return _E.ILLEGAL_GENERATION
    return error


def _joined(group: Group, member: MemberMetadata, *, with_members: bool, skip: bool = False) -> g.JoinGroupResponse:
    """`skip`: the leader need not compute an assignment (KIP-814)."""
    return g.JoinGroupResponse(
        0,
        _E.NONE,
        group.generation_id,
        group.protocol_type,
        group.protocol_name,
        group.leader_id or "",
        skip and with_members,
        member.member_id,
        group.member_metadata() if with_members else [],
    )


def _assigned(group: Group, member: MemberMetadata) -> g.SyncGroupResponse:
    return g.SyncGroupResponse(0, _E.NONE, group.protocol_type, group.protocol_name, member.assignment)


def _because(reason: str | None) -> str:
    return f" ({reason[:200]})" if reason else ""
