"""One group: its members, generation and protocol, and the rules for each request (Kafka's GroupMetadata). Pure.

Nothing here waits, writes or answers. The coordinator asks for the next action, carries it out and reports the result
to the group. A member that waits for an answer has a waiter, which is opaque here.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from minibroker.broker.groups.offsets import GroupOffsets
from minibroker.broker.groups.rebalances import Rebalances, ended
from minibroker.broker.groups.records import GroupValue, MemberValue
from minibroker.broker.groups.states import GroupState, check_transition
from minibroker.protocol.consumer_protocol import PROTOCOL_TYPE, decode_assignment, decode_subscription
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.messages.groups import JoinGroupMember, JoinGroupResponse, SyncGroupResponse
from minibroker.protocol.model import TopicPartition

Protocols = tuple[tuple[str, bytes], ...]
"""The assignors that a member supports, in order of preference, each with its encoded subscription."""

JoinWaiter = Callable[[JoinGroupResponse], None]
SyncWaiter = Callable[[SyncGroupResponse], None]

NO_GENERATION = -1

MEMBER_BYTES, PENDING_MEMBER_BYTES, GROUP_BYTES = 3_000, 1_500, 3_000
"""Memory of a member beside its metadata and its assignment, of an id handed out for joining, and of a group."""

UNSTORED_GENERATIONS = 10_000
"""The maximum number of generations that one coordinator can have begun without any of their assignments reaching the
log: three hours of one per second. Later coordinators do not know their numbers and must not reuse them, because a
member may still commit in their name."""
_MOST_GENERATIONS = 2**31 - 1


class Connection(Protocol):
    """A client's connection, which makes registered calls when it has ended."""

    def at_end(self, key: object, call: Callable[[], None]) -> None: ...

    def not_at_end(self, key: object) -> None: ...


def bytes_of(protocols: Protocols) -> int:
    return sum(len(name) + len(metadata) for name, metadata in protocols)


def never() -> bool:
    return False


class MemberMetadata:
    def __init__(
        self,
        member_id: str,
        group_instance_id: str | None,
        client_id: str,
        client_host: str,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
        protocols: Protocols,
        assignment: bytes = b"",
    ) -> None:
        self.member_id = member_id
        self.group_instance_id = group_instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.session_timeout_ms = session_timeout_ms
        self.protocols = protocols
        self.assignment = assignment
        self.join_waiter: JoinWaiter | None = None
        self.sync_waiter: SyncWaiter | None = None
        self.is_gone: Callable[[], bool] = never
        """Returns whether the client that sent the join has hung up."""
        self.connection: Connection | None = None
        """The connection over which it has joined, until it has an assignment."""
        self.is_assigned = False
        """It has had an assignment at this coordinator. Until then nothing was promised to it."""
        self.is_new = False
        """The member has never been in a generation. It does not know its id yet, so it need not send heartbeats."""
        self.has_joined = True
        """The member has joined at this coordinator. Otherwise it may have been in a later generation that is not in
        the log."""
        self.session_end_s = 0.0
        """The end of the session by the coordinator's clock. Each request of the member moves it."""
        self.session_watches = 0
        """The number of watches of the session so far; only the latest one counts."""

    @property
    def is_static(self) -> bool:
        return self.group_instance_id is not None

    @property
    def is_waiting(self) -> bool:
        return self.join_waiter is not None or self.sync_waiter is not None

    def metadata(self, protocol_name: str) -> bytes:
        return next(metadata for name, metadata in self.protocols if name == protocol_name)

    def vote(self, candidates: frozenset[str]) -> str:
        return next(name for name, _ in self.protocols if name in candidates)


class Group:
    def __init__(self, group_id: str, state: GroupState = GroupState.EMPTY) -> None:
        self.group_id = group_id
        self._state = state
        self.state_since_s = 0.0
        """Time of the last transition at this coordinator, by `GroupTerms.now_s`."""
        self.topics_unused_since_s: dict[str, float] = {}
        """Times at which members ceased to read a topic with committed offsets, by the same clock."""
        self._read: frozenset[str] = frozenset()
        """The topics to which the members of the last generation subscribed."""
        self.protocol_type: str | None = None
        """None: no member has ever joined."""
        self.generation_id = 0
        self.generations_used = 0
        """The highest generation number that any coordinator may have used."""
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, MemberMetadata] = {}
        self.static_members: dict[str, str] = {}
        """The member id of each static member, by its name."""
        self.pending_members: dict[str, None] = {}
        """Ids handed out for joining (KIP-394)."""
        self.pending_sync: dict[str, None] = {}
        """Members of the generation that have not asked for their assignment yet."""
        self.assigned_in_generation = 0
        """The last generation in which the leader has sent an assignment."""
        self.new_member_added = False
        """A member has joined since the last check of the initial delay."""
        self.seen_counts: Mapping[str, int] | None = None
        """If a static leader has returned: the partition counts of the group's topics as this broker last saw them.
        Such a leader assumes that the partitions in its own metadata are assigned. None: the leader computed the
        assignment and watches the topics itself."""
        self.is_being_deleted = False
        """Its deletion is being written; until the outcome is known, the group must not be shown."""
        self.rebalances: Rebalances = ()
        """The last ones that this coordinator has begun."""
        self.offsets = GroupOffsets()
        self._metadata_bytes = 0
        self._supporters: dict[str, int] = {}
        """The number of members that support each protocol."""

    def __repr__(self) -> str:
        return f"<group {self.group_id!r} {self._state.value} generation {self.generation_id}>"

    # -- state --

    @property
    def state(self) -> GroupState:
        return self._state

    def is_in(self, *states: GroupState) -> bool:
        return self._state in states

    def transition_to(self, state: GroupState, now_s: float) -> None:
        """Raises IllegalTransition."""
        check_transition(self.group_id, self._state, state)
        self._state = state
        self.state_since_s = now_s
        if state in (GroupState.STABLE, GroupState.EMPTY):
            self.note_subscribed(now_s)
            self.rebalances = ended(self.rebalances, now_s)

    def note_subscribed(self, now_s: float) -> None:
        """Record the topics that the members read from now on. During a rebalance, the earlier subscriptions still
        count."""
        topics = self.subscribed_topics() if self.members else frozenset()
        if topics is None:
            return
        unused = self.topics_unused_since_s | dict.fromkeys(self._read - topics, now_s)
        kept = self.offsets.topics() - topics
        self.topics_unused_since_s = {topic: since_s for topic, since_s in unused.items() if topic in kept}
        self._read = topics

    # -- members --

    def add(self, member: MemberMetadata, protocol_type: str) -> None:
        assert member.member_id not in self.members
        if not self.members:
            self.protocol_type = protocol_type
        if self.leader_id is None:
            self.leader_id = member.member_id
        self.members[member.member_id] = member
        if member.group_instance_id is not None:
            self.static_members[member.group_instance_id] = member.member_id
        self._count(member.protocols, 1)
        self.pending_members.pop(member.member_id, None)

    def remove(self, member_id: str) -> MemberMetadata | None:
        """Remove the member and return it with its waiters."""
        member = self.members.pop(member_id, None)
        self.pending_members.pop(member_id, None)
        self.pending_sync.pop(member_id, None)
        if member is None:
            return None
        self._count(member.protocols, -1)
        if member.group_instance_id is not None and self.static_members.get(member.group_instance_id) == member_id:
            del self.static_members[member.group_instance_id]
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)
        return member

    def update(self, member: MemberMetadata, joining: MemberMetadata) -> None:
        """Update the member with the values of its new join request, or restore earlier ones."""
        self._count(member.protocols, -1)
        member.protocols = joining.protocols
        self._count(member.protocols, 1)
        member.rebalance_timeout_ms = joining.rebalance_timeout_ms
        member.session_timeout_ms = joining.session_timeout_ms
        member.client_id, member.client_host = joining.client_id, joining.client_host
        member.has_joined = True
        member.join_waiter, member.is_gone = joining.join_waiter, joining.is_gone

    def rename_static_member(self, group_instance_id: str, member_id: str) -> None:
        """Give a static member a new id. It keeps its place; the old id is fenced."""
        old_id = self.static_members[group_instance_id]
        member = self.members[old_id]
        # Assignors see the order of the members.
        self.members = {
            (member_id if known_id == old_id else known_id): known for known_id, known in self.members.items()
        }
        member.member_id = member_id
        self.static_members[group_instance_id] = member_id
        if self.leader_id == old_id:
            self.leader_id = member_id
        if old_id in self.pending_sync:
            del self.pending_sync[old_id]
            self.pending_sync[member_id] = None

    def why_not_member(self, member_id: str, group_instance_id: str | None) -> ErrorCode:
        """Return NONE for a member whose name no other has taken over (KIP-345), otherwise the error."""
        if group_instance_id is not None:
            current = self.static_members.get(group_instance_id)
            if current is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if current != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def accepts(self, member_id: str, group_instance_id: str | None, max_size: int) -> bool:
        """Return whether the group has room for this member (`group.max.size`, KIP-389). Handed-out ids count as well,
        because any client can request one."""
        if not member_id and group_instance_id is not None:
            member_id = self.static_members.get(group_instance_id, "")
        if not member_id and len(self.pending_members) >= max_size:
            return False
        member = self.members.get(member_id)
        if self.is_in(GroupState.PREPARING_REBALANCE):
            if member is not None and member.join_waiter is not None:
                return True
            return sum(1 for other in self.members.values() if other.join_waiter is not None) < max_size
        return member is not None or len(self.members) < max_size

    @property
    def is_unused(self) -> bool:
        """Whether nothing of the group is or will be in the log, and no member is about to join."""
        return (
            self.is_in(GroupState.EMPTY)
            and not self.generation_id
            and not self.pending_members
            and self.offsets.is_unused
        )

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def has_all_joined(self) -> bool:
        return not self.pending_members and all(member.join_waiter is not None for member in self.members.values())

    # -- protocols --

    @property
    def metadata_bytes(self) -> int:
        """The metadata of all members, in all their protocols."""
        return self._metadata_bytes

    @property
    def kept_bytes(self) -> int:
        """The memory that the members and the rebalances take."""
        assignments = sum(len(member.assignment) for member in self.members.values())
        ids = MEMBER_BYTES * len(self.members) + PENDING_MEMBER_BYTES * len(self.pending_members)
        rebalances = sum(each.kept_bytes for each in self.rebalances)
        return GROUP_BYTES + ids + self._metadata_bytes + assignments + rebalances

    def _count(self, protocols: Protocols, change: int) -> None:
        self._metadata_bytes += change * bytes_of(protocols)
        for name in {name: None for name, _ in protocols}:
            self._supporters[name] = self._supporters.get(name, 0) + change
            if not self._supporters[name]:
                del self._supporters[name]

    def _candidates(self) -> frozenset[str]:
        return frozenset(name for name, count in self._supporters.items() if count == len(self.members))

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Return whether a member with these protocols would share one with all other members."""
        names = frozenset(names)
        if not self.members:
            return bool(protocol_type) and bool(names)
        return self.protocol_type == protocol_type and not self._candidates().isdisjoint(names)

    def why_unsupported(self, protocol_type: str, names: Iterable[str]) -> str | None:
        """Return the message for a member that `supports` rejects, or None if the error code suffices."""
        if not self.members or self.protocol_type != protocol_type:
            return None
        # Clients choose these names, and other clients log them.
        offered, wanted = (", ".join(map(repr, some))[:200] for some in (names, sorted(self._candidates())))
        return (
            f"this member offers {offered}, and all others of the group know {wanted}: give it one of those "
            "(partition.assignment.strategy), or use another group"
        )

    def select_protocol(self) -> str:
        """Return the protocol that all members support and most prefer. On a tie, the one with the earliest vote
        wins."""
        candidates = self._candidates()
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = member.vote(candidates)
            votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def reads_the_same(self, protocols: Protocols, others: Protocols) -> bool:
        """Return whether a returned static member has the same subscription in `others` as in `protocols`, in the
        generation's protocol. Owned partitions, the generation and the assignor's user data are ignored, because a
        returned member has none."""
        assert self.protocol_name is not None
        known, now = (dict(some).get(self.protocol_name, b"") for some in (protocols, others))
        if known == now:
            return True
        if self.protocol_type != PROTOCOL_TYPE:
            return False
        try:
            before, after = decode_subscription(known), decode_subscription(now)
        except InvalidMessage:
            return False
        return frozenset(before.topics) == frozenset(after.topics) and before.rack_id == after.rack_id

    def assigns_all(self, partition_count: Callable[[str], int]) -> bool:
        """Return whether the members together have exactly the partitions of their topics, as far as is known.
        `partition_count` returns 0 for an unknown topic."""
        topics = self.subscribed_topics()
        if topics is None:
            return True
        try:
            assigned = self._assigned()
        except InvalidMessage:
            return True
        counts = {topic: count for topic in topics if (count := partition_count(topic))}
        there_are = {TopicPartition(topic, index) for topic, count in counts.items() for index in range(count)}
        return {partition for partition in assigned if partition.topic in counts} == there_are

    def awaits_what_was_owned(self, protocols: Protocols) -> bool:
        """Return whether a member that joined with `protocols` owned partitions then that no member has in this
        generation. It was expected to give them up and rejoin, so that other members receive them (KIP-429). No other
        member causes that rebalance."""
        assert self.protocol_name is not None
        if self.protocol_type != PROTOCOL_TYPE:
            return False
        try:
            owned = decode_subscription(dict(protocols).get(self.protocol_name, b"")).owned_partitions
            return not self._assigned().issuperset(owned)
        except InvalidMessage:
            return False

    def _assigned(self) -> frozenset[TopicPartition]:
        """Return the assigned partitions of all members, in the consumer protocol. Raises InvalidMessage."""
        assignments = [decode_assignment(member.assignment) for member in self.members.values()]
        return frozenset(partition for one in assignments for partition in one.assigned_partitions)

    # -- generations --

    def elect_joined_leader(self) -> bool:
        """Make a member that has joined the leader, preferably the present leader. Return False if none has joined."""
        leader = None if self.leader_id is None else self.members.get(self.leader_id)
        if leader is None or leader.join_waiter is None:
            joined = next((m.member_id for m in self.members.values() if m.join_waiter is not None), None)
            if joined is None:
                return False
            self.leader_id = joined
        return True

    def takes_assignment(self) -> bool:
        """Return True once per generation. An assignment on its way into the log may be delivered to members, and the
        next coordinator delivers the last one that was written. A leader whose request broke off therefore waits for
        its first assignment. (Kafka accepts and stores another one.)"""
        is_first = self.assigned_in_generation != self.generation_id
        self.assigned_in_generation = self.generation_id
        return is_first

    def begin_generation(self, now_s: float) -> None:
        """Begin the next generation with the present members."""
        highest = max(self.generation_id, self.generations_used)
        self.generation_id = highest + 1 if highest < _MOST_GENERATIONS else 1
        self.generations_used = self.generation_id
        self.pending_sync = {}
        if self.members:
            self.protocol_name = self.select_protocol()
            self.transition_to(GroupState.COMPLETING_REBALANCE, now_s)
            self.pending_sync = {
                member.member_id: None for member in self.members.values() if member.join_waiter is not None
            }
        else:
            self.protocol_name = None
            self.leader_id = None
            self.transition_to(GroupState.EMPTY, now_s)

    def member_metadata(self) -> list[JoinGroupMember]:
        """Return the members' metadata for the leader, in the generation's protocol."""
        assert self.protocol_name is not None
        return [
            JoinGroupMember(member.member_id, member.group_instance_id, member.metadata(self.protocol_name))
            for member in self.members.values()
        ]

    def subscribed_topics(self) -> frozenset[str] | None:
        """Return the topics that the members read. None: unknown, because they are not consumers, are about to
        subscribe anew (KAFKA-13636), or use another format."""
        if not self.is_in(GroupState.STABLE) or self.protocol_type != PROTOCOL_TYPE or self.protocol_name is None:
            return None
        try:
            subscriptions = [decode_subscription(m.metadata(self.protocol_name)) for m in self.members.values()]
        except InvalidMessage:
            return None
        return frozenset(topic for subscription in subscriptions for topic in subscription.topics)

    # -- records --

    def as_value(self, assignments: Mapping[str, bytes], now_ms: int) -> GroupValue:
        """Return the group as a record. `now_ms` is wall-clock time."""
        return GroupValue(
            self.protocol_type or "",
            self.generation_id,
            self.protocol_name,
            self.leader_id,
            now_ms,
            [
                MemberValue(
                    member.member_id,
                    member.group_instance_id,
                    member.client_id,
                    member.client_host,
                    member.rebalance_timeout_ms,
                    member.session_timeout_ms,
                    member.metadata(self.protocol_name) if self.protocol_name is not None else b"",
                    assignments.get(member.member_id, b""),
                )
                for member in self.members.values()
            ],
        )


def group_from(group_id: str, value: GroupValue, now_s: float, terms_since: int = 1) -> Group:
    """Return a stored group: Stable with the members of its last generation that received an assignment, or Empty.
    `terms_since` is the maximum number of coordinators since then, including this one. The generations of the others
    are unknown, but they counted from the same number."""
    group = Group(group_id, GroupState.STABLE if value.members else GroupState.EMPTY)
    group.generation_id = value.generation_id
    group.generations_used = min(value.generation_id + terms_since * UNSTORED_GENERATIONS, _MOST_GENERATIONS)
    group.protocol_type = value.protocol_type or None
    group.protocol_name = value.protocol_name
    group.state_since_s = now_s
    for stored in value.members:
        member = MemberMetadata(
            stored.member_id,
            stored.group_instance_id,
            stored.client_id,
            stored.client_host,
            stored.rebalance_timeout_ms,
            stored.session_timeout_ms,
            ((value.protocol_name or "", stored.subscription),),
            stored.assignment,
        )
        member.has_joined = False
        group.add(member, value.protocol_type)
    group.leader_id = value.leader if value.leader in group.members else next(iter(group.members), None)
    group.note_subscribed(now_s)
    return group
