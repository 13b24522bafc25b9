"""One group: its members, generation and protocol, and what each request means for them (Kafka's GroupMetadata). Pure.

Nothing here waits, writes or answers. The coordinator asks what is to be done, does it, and tells the group how it
went. A member that waits for an answer has a waiter, which is opaque here.
"""

from collections.abc import Callable, Iterable, Mapping

from minibroker.broker.groups.offsets import GroupOffsets
from minibroker.broker.groups.records import GroupValue, MemberValue
from minibroker.broker.groups.states import GroupState, check_transition
from minibroker.protocol.consumer_protocol import PROTOCOL_TYPE, decode_assignment, decode_subscription
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.messages.groups import JoinGroupMember, JoinGroupResponse, SyncGroupResponse
from minibroker.protocol.model import TopicPartition

Protocols = tuple[tuple[str, bytes], ...]
"""The assignors that a member knows, the one it likes best first, each with its subscription as that one puts it."""

JoinWaiter = Callable[[JoinGroupResponse], None]
SyncWaiter = Callable[[SyncGroupResponse], None]

NO_GENERATION = -1

UNSTORED_GENERATIONS = 10_000
"""As many as may have been begun by each coordinator whose assignments never came into the log: in three hours, as each
takes a second. Those after it do not know their numbers, and must not give them to others: somebody may still commit in
their name."""
_MOST_GENERATIONS = 2**31 - 1


def never() -> bool:
    return False


class Member:
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
        """Whether nobody would get the answer to its join any more."""
        self.is_new = False
        """It has never been in a generation: until then it need not send heartbeats, for it does not know its id."""
        self.has_joined = True
        """At this coordinator. Else it may have been in a generation since that is not in the log."""
        self.session_end_s = 0.0
        """When it is put out unless it is heard of before; by the coordinator's clock."""
        self.session_watches = 0
        """How often it has begun to be watched for that."""

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
        """As far as this coordinator has seen it, by `Terms.now_s`."""
        self.topics_unused_since_s: dict[str, float] = {}
        """When the members ceased to read topics of which something was committed then, by the same clock."""
        self._read: frozenset[str] = frozenset()
        """The topics that the members of the last generation have subscribed to."""
        self.protocol_type: str | None = None
        """None: nobody has ever joined."""
        self.generation_id = 0
        self.generations_used = 0
        """The highest number that may have been given to a generation, by any coordinator."""
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, Member] = {}
        self.static_members: dict[str, str] = {}
        """The member id of each static member, by its name."""
        self.pending_members: dict[str, None] = {}
        """Ids that were given out to be joined with (KIP-394)."""
        self.pending_sync: dict[str, None] = {}
        """Members of the generation that have not asked for their assignment yet."""
        self.assigned_in_generation = 0
        """The last one in which the leader has brought an assignment."""
        self.new_member_added = False
        """Since the initial delay was last looked at."""
        self.seen_counts: Mapping[str, int] | None = None
        """Of the topics of a group whose static leader has come back, as this broker last saw them. That leader takes
        what itself sees of them for what is assigned. None: it has brought the assignment, and watches them."""
        self.is_being_deleted = False
        """Its end is on its way into the log: until it is known there, nothing may be said of it."""
        self.offsets = GroupOffsets()
        self._supporters: dict[str, int] = {}
        """How many members know each protocol."""

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

    def note_subscribed(self, now_s: float) -> None:
        """The members read from now on what they have subscribed to. In a rebalance they still count as reading what
        they did before it."""
        topics = self.subscribed_topics() if self.members else frozenset()
        if topics is None:
            return
        unused = self.topics_unused_since_s | dict.fromkeys(self._read - topics, now_s)
        kept = self.offsets.topics() - topics
        self.topics_unused_since_s = {topic: since_s for topic, since_s in unused.items() if topic in kept}
        self._read = topics

    # -- members --

    def add(self, member: Member, protocol_type: str) -> None:
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

    def remove(self, member_id: str) -> Member | None:
        """The member, which is none any more, with its waiters."""
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

    def update(self, member: Member, joining: Member) -> None:
        """The member joins anew, with what it says now, or is what it was before."""
        self._count(member.protocols, -1)
        member.protocols = joining.protocols
        self._count(member.protocols, 1)
        member.rebalance_timeout_ms = joining.rebalance_timeout_ms
        member.session_timeout_ms = joining.session_timeout_ms
        member.client_id, member.client_host = joining.client_id, joining.client_host
        member.has_joined = True
        member.join_waiter, member.is_gone = joining.join_waiter, joining.is_gone

    def rename_static_member(self, group_instance_id: str, member_id: str) -> None:
        """The static member goes on under another id, in its place among the members; the old id is fenced."""
        old_id = self.static_members[group_instance_id]
        member = self.members[old_id]
        # In its old place: the order of members is part of what assignors see.
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
        """NONE where this is a member, and not one whose name another has taken over (KIP-345)."""
        if group_instance_id is not None:
            current = self.static_members.get(group_instance_id)
            if current is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if current != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def accepts(self, member_id: str, group_instance_id: str | None, max_size: int) -> bool:
        """Whether there is room for who joins (`group.max.size`, KIP-389). Ids that were given out count as well:
        anybody can ask for one."""
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
        """Nothing of it is in the log, or about to be, and nobody is about to join."""
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

    def _count(self, protocols: Protocols, change: int) -> None:
        for name in {name: None for name, _ in protocols}:
            self._supporters[name] = self._supporters.get(name, 0) + change
            if not self._supporters[name]:
                del self._supporters[name]

    def _candidates(self) -> frozenset[str]:
        return frozenset(name for name, count in self._supporters.items() if count == len(self.members))

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether a member with these protocols would have one in common with all others."""
        names = frozenset(names)
        if not self.members:
            return bool(protocol_type) and bool(names)
        return self.protocol_type == protocol_type and not self._candidates().isdisjoint(names)

    def why_unsupported(self, protocol_type: str, names: Iterable[str]) -> str | None:
        """What to tell a member that `supports` refuses; None: the code says enough."""
        if not self.members or self.protocol_type != protocol_type:
            return None
        # They are what clients call them, and go to others' logs.
        offered, wanted = (", ".join(map(repr, some))[:200] for some in (names, sorted(self._candidates())))
        return (
            f"this member offers {offered}, and all others of the group know {wanted}: give it one of those "
            "(partition.assignment.strategy), or use another group"
        )

    def select_protocol(self) -> str:
        """The protocol that all members know and most like best; of several, the one that was voted for first."""
        candidates = self._candidates()
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = member.vote(candidates)
            votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def reads_the_same(self, protocols: Protocols, others: Protocols) -> bool:
        """Whether a static member that comes back with `others` asks its leader for what it asked with `protocols`, in
        the generation's protocol. What it has, since when, and what its assignor remembers of that is no part of it:
        whoever comes back has nothing."""
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
        """Whether the members have exactly the partitions of what they read, as far as that can be said.
        `partition_count`: of a topic; 0 where it is not known."""
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
        """Whether the member that joined the generation with `protocols` had partitions then that nobody has in it. It
        was to give them up and to join once more, upon which others get them (KIP-429): nobody else asks for that."""
        assert self.protocol_name is not None
        if self.protocol_type != PROTOCOL_TYPE:
            return False
        try:
            owned = decode_subscription(dict(protocols).get(self.protocol_name, b"")).owned_partitions
            return not self._assigned().issuperset(owned)
        except InvalidMessage:
            return False

    def _assigned(self) -> frozenset[TopicPartition]:
        """What the members have together, as consumers put it. Raises InvalidMessage."""
        assignments = [decode_assignment(member.assignment) for member in self.members.values()]
        return frozenset(partition for one in assignments for partition in one.assigned_partitions)

    # -- generations --

    def elect_joined_leader(self) -> bool:
        """Let a member lead that has joined: the one that leads already if it has. False where nobody has joined."""
        leader = None if self.leader_id is None else self.members.get(self.leader_id)
        if leader is None or leader.join_waiter is None:
            joined = next((m.member_id for m in self.members.values() if m.join_waiter is not None), None)
            if joined is None:
                return False
            self.leader_id = joined
        return True

    def takes_assignment(self) -> bool:
        """Once in a generation. What is on its way into the log may be given to members, and the next coordinator gives
        what came last, so a leader that comes again, as its request broke off, has to wait for what it brought first.
        (Kafka's takes, and stores, another one.)"""
        is_first = self.assigned_in_generation != self.generation_id
        self.assigned_in_generation = self.generation_id
        return is_first

    def begin_generation(self, now_s: float) -> None:
        """The next generation, of the members that there are."""
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
        """For the leader, in the generation's protocol."""
        assert self.protocol_name is not None
        return [
            JoinGroupMember(member.member_id, member.group_instance_id, member.metadata(self.protocol_name))
            for member in self.members.values()
        ]

    def subscribed_topics(self) -> frozenset[str] | None:
        """What the members read; None where that is not known: they are no consumers, are about to say anew what they
        read (KAFKA-13636), or say it in a way of their own."""
        if not self.is_in(GroupState.STABLE) or self.protocol_type != PROTOCOL_TYPE or self.protocol_name is None:
            return None
        try:
            subscriptions = [decode_subscription(m.metadata(self.protocol_name)) for m in self.members.values()]
        except InvalidMessage:
            return None
        return frozenset(topic for subscription in subscriptions for topic in subscription.topics)

    # -- what is kept in the log --

    def as_value(self, assignments: Mapping[str, bytes], now_ms: int) -> GroupValue:
        """`now_ms`: by the wall clock."""
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
    """A group as it was stored: Stable with the members of its last generation that got an assignment, or Empty.
    `terms_since`: as many coordinators as there can have been since, this one included. What numbers the others gave is
    not known, but they counted from here in the same way."""
    group = Group(group_id, GroupState.STABLE if value.members else GroupState.EMPTY)
    group.generation_id = value.generation_id
    group.generations_used = min(value.generation_id + terms_since * UNSTORED_GENERATIONS, _MOST_GENERATIONS)
    group.protocol_type = value.protocol_type or None
    group.protocol_name = value.protocol_name
    group.state_since_s = now_s
    for stored in value.members:
        member = Member(
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
