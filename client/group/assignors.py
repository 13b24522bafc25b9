"""The assignment of partitions to the members of a group, which the group's leader decides. Pure.

These are Kafka's four assignors (RangeAssignor, RoundRobinAssignor, StickyAssignor, CooperativeStickyAssignor), with
the names that they have there. All members of a group must have one in common, and Kafka's own clients may be among
them. Any member may be the leader, so the result need not equal that of a Java leader, but it is as good: independent
of the order of the input, even, and with as few changes as evenness allows.

The problem of `sticky` is evenness if members subscribe to different topics. Kafka moves single partitions from full
members to emptier ones, which is not enough: if A may only give to B, and B only to C, no single move improves loads of
3, 2, 1. So partitions move along the shortest chain from the fullest member to the emptiest member within reach, until
no chain ends at a member with two fewer than its first. This finds the most even assignment there is (by sum of
squares), needs no special case for equal subscriptions, and changes nothing if the owned partitions are even already.

`cooperative-sticky` decides the same, and then withholds each partition that would move from a member that still has
it. Its owner revokes it and joins again; that rebalance assigns it (KIP-429). A member that was removed may claim
partitions that it has lost. If two members claim a partition, the one with the later generation owns it (KIP-792); if
their generations are equal, neither does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import cycle
from typing import NamedTuple, Protocol

from minibroker.client.errors import InvalidAssignment, InvalidSetting
from minibroker.client.shown import shown
from minibroker.protocol.consumer_protocol import NO_GENERATION, decode_sticky_user_data, encode_sticky_user_data
from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.model import TopicPartition


class RebalanceProtocol(Enum):
    """How members treat their partitions when a rebalance begins (Kafka's ConsumerPartitionAssignor)."""

    EAGER = "eager"
    """They revoke all partitions before they join."""
    COOPERATIVE = "cooperative"
    """They keep their partitions, revoke those that the assignment takes away, and then join again (KIP-429)."""


class Subscription(NamedTuple):
    """A member, as the leader sees it."""

    topics: Collection[str]
    owned_partitions: Collection[TopicPartition] = ()
    """The partitions that it keeps until an assignment takes them away. Empty from eager members."""
    generation: int = NO_GENERATION
    """The generation in which it got them."""
    user_data: bytes | None = None
    rack: str | None = None
    group_instance_id: str | None = None
    """The name of a static member (KIP-345)."""


Members = Mapping[str, Subscription]
"""The members, by member id."""
Assignment = dict[str, list[TopicPartition]]
"""The partitions of all members, by member id."""
AssignorCallable = Callable[[Members, Mapping[str, int]], Mapping[str, Iterable[tuple[str, int]]]]
"""(members, number of partitions by topic) -> partitions by member; see `Assignor.assign`. Rebalances are eager."""


class Assignor(Protocol):
    """Decides at the leader of a group. All members must have one with the same name."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> RebalanceProtocol: ...

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        """Return the partitions of each member. `partitions` has the number of partitions of each existing topic;
        topics that are not in it get no assignment."""

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        """Return the data that a member which had `owned` in `generation` sends to the leader's `assign`."""


class Range:
    """Cuts the partitions of each topic into pieces of equal length, one for each member; the first members get one
    partition more. Topics with equal partition counts are cut alike, so that joins find both sides."""

    name = "range"
    protocol = RebalanceProtocol.EAGER

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        assignment: Assignment = {member_id: [] for member_id in members}
        for topic, readers in _subscribers(members, partitions).items():
            each, longer = divmod(partitions[topic], len(readers))
            start = 0
            for place, member_id in enumerate(readers):
                end = start + each + (place < longer)
                assignment[member_id] += [TopicPartition(topic, index) for index in range(start, end)]
                start = end
        return assignment

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return None


class RoundRobin:
    """Deals out the partitions of all topics in turn, and skips members that have not subscribed to the topic."""

    name = "roundrobin"
    protocol = RebalanceProtocol.EAGER

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        assignment: Assignment = {member_id: [] for member_id in members}
        subscribers = _subscribers(members, partitions)
        turns = cycle(_ordered(members))
        for topic, readers in subscribers.items():
            allowed = set(readers)
            for index in range(partitions[topic]):
                member_id = next(member_id for member_id in turns if member_id in allowed)
                assignment[member_id].append(TopicPartition(topic, index))
        return assignment

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return None


class Sticky:
    """Assigns as evenly as subscriptions allow; members keep their partitions if that is possible."""

    name = "sticky"
    protocol = RebalanceProtocol.EAGER

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        return _sticky(members, partitions, {member_id: _remembered(member) for member_id, member in members.items()})

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return encode_sticky_user_data(sorted(owned), generation)


class CooperativeSticky:
    """As `Sticky`, but members read on through the rebalance. A second rebalance assigns the partitions that move."""

    name = "cooperative-sticky"
    protocol = RebalanceProtocol.COOPERATIVE

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        claims = {
            member_id: _Claim(member.owned_partitions, member.generation) for member_id, member in members.items()
        }
        owners = _owners(claims)
        claimed = {partition for claim in claims.values() for partition in claim.partitions}
        wanted = _sticky(members, partitions, claims)
        return {
            member_id: [
                partition for partition in mine if partition not in claimed or owners.get(partition) == member_id
            ]
            for member_id, mine in wanted.items()
        }

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return None


class _OfUser:
    """The user's callable. Its result is checked: an unassigned partition would not be read, and nothing would say
    why."""

    protocol = RebalanceProtocol.EAGER

    def __init__(self, name: str, decide: AssignorCallable) -> None:
        self.name = name
        self._decide = decide

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        decided = self._decide(members, partitions)
        unassigned = {
            TopicPartition(topic, index)
            for topic in _subscribers(members, partitions)
            for index in range(partitions[topic])
        }
        owners: dict[TopicPartition, str] = {}
        for member_id, mine in decided.items():
            if member_id not in members:
                raise InvalidAssignment(
                    self.name, f"{shown(member_id)} is no member; they are {', '.join(sorted(members))}"
                )
            for partition in mine:
                if partition in owners:
                    both = f"{owners[partition]} and {member_id}"
                    raise InvalidAssignment(self.name, f"{partition} went to {both}; give it to one of them")
                if partition not in unassigned or partition[0] not in members[member_id].topics:
                    topics = ", ".join(sorted(members[member_id].topics))
                    raise InvalidAssignment(
                        self.name, f"{partition} went to {member_id}, which asked for {topics}, or does not exist"
                    )
                owners[TopicPartition(*partition)] = member_id
        missing = sorted(unassigned - owners.keys())
        if missing:
            raise InvalidAssignment(self.name, f"no member got {', '.join(map(str, missing))}; give each to one member")
        assignment: Assignment = {member_id: [] for member_id in members}
        for partition in sorted(owners):
            assignment[owners[partition]].append(partition)
        return assignment

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return None


ASSIGNORS: dict[str, Assignor] = {
    assignor.name: assignor for assignor in (Range(), RoundRobin(), Sticky(), CooperativeSticky())
}
"""The assignors, by name."""


Strategy = str | Assignor | AssignorCallable
"""The name of an assignor, a callable (known by its `__name__`, the same for all members), or an Assignor."""


def assignors_of(strategy: Strategy | list[Strategy] | tuple[Strategy, ...]) -> list[Assignor]:
    """Return the assignors that `partition_assignment_strategy` names. Raises InvalidSetting."""
    choices: list[Strategy] = [*strategy] if isinstance(strategy, (list, tuple)) else [strategy]
    assignors = {assignor.name: assignor for assignor in map(assignor_of, choices)}
    if not assignors:
        raise InvalidSetting("partition_assignment_strategy", strategy, "give at least one")
    return list(assignors.values())


def assignor_of(choice: Strategy) -> Assignor:
    if isinstance(choice, str):
        if choice not in ASSIGNORS:
            raise InvalidSetting(
                "partition_assignment_strategy", choice, f"must be one of {', '.join(ASSIGNORS)}, or a callable"
            )
        return ASSIGNORS[choice]
    if not callable(choice) and hasattr(choice, "assign"):
        return choice
    name = getattr(choice, "__name__", "<")
    if not callable(choice) or name.startswith("<"):
        rule = "must be a name, a function with a name (all members name theirs alike), or an object like Assignor"
        raise InvalidSetting("partition_assignment_strategy", choice, rule)
    return _OfUser(name, choice)


_Held = dict[str, dict[str, list[TopicPartition]]]
"""Partitions by member, in the order of the members, and topic."""


class _Claim(NamedTuple):
    """The partitions that a member claims to own."""

    partitions: Collection[TopicPartition]
    generation: int


def _ordered(members: Members) -> list[str]:
    """Static members first, by their names, which outlive their member ids; then all other members."""
    return sorted(members, key=lambda member_id: _rank(member_id, members[member_id]))


def _rank(member_id: str, member: Subscription) -> tuple[bool, str, str]:
    return member.group_instance_id is None, member.group_instance_id or "", member_id


def _subscribers(members: Members, partitions: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the existing topics and the subscribers of each, both in order."""
    found: dict[str, list[str]] = {}
    for member_id in _ordered(members):
        for topic in set(members[member_id].topics):
            if partitions.get(topic, 0) > 0:
                found.setdefault(topic, []).append(member_id)
    return dict(sorted(found.items()))


def _remembered(member: Subscription) -> _Claim:
    """Return the claim of an eager member. A member whose user data is of another assignor claims nothing, as in
    Kafka: it may have joined with that one before."""
    try:
        return _Claim(*decode_sticky_user_data(member.user_data or b""))
    except InvalidMessage:
        return _Claim((), NO_GENERATION)


def _owners(claims: Mapping[str, _Claim]) -> dict[TopicPartition, str]:
    """Return the owner of each partition: the only member that claims it in the latest generation."""
    latest: dict[TopicPartition, int] = {}
    claimants: dict[TopicPartition, set[str]] = {}
    for member_id, (partitions, generation) in claims.items():
        for partition in partitions:
            known = latest.get(partition)
            if known is None or generation > known:
                latest[partition] = generation
                claimants[partition] = {member_id}
            elif generation == known:
                claimants[partition].add(member_id)
    return {partition: next(iter(who)) for partition, who in claimants.items() if len(who) == 1}


def _sticky(members: Members, partitions: Mapping[str, int], claims: Mapping[str, _Claim]) -> Assignment:
    """Return the most even assignment. Owned partitions move only if evenness requires it."""
    subscribers = _subscribers(members, partitions)
    readers = {topic: frozenset(of_topic) for topic, of_topic in subscribers.items()}
    owners = {
        partition: member_id
        for partition, member_id in _owners(claims).items()
        if member_id in readers.get(partition.topic, ()) and 0 <= partition.partition < partitions[partition.topic]
    }
    loads = Counter(owners.values())
    fresh: _Held = {member_id: {} for member_id in _ordered(members)}
    # Topics with the fewest subscribers come first, because later topics can still balance the loads.
    for topic in sorted(subscribers, key=lambda topic: (len(subscribers[topic]), topic)):
        for index in range(partitions[topic]):
            if (partition := TopicPartition(topic, index)) not in owners:
                member_id = min(subscribers[topic], key=loads.__getitem__)
                fresh[member_id].setdefault(topic, []).append(partition)
                loads[member_id] += 1
    # Unowned partitions move first, and owned ones only if that was not enough. So the next rebalance places the
    # partitions that a cooperative one has freed, and no third is needed.
    _even_out(fresh, loads, subscribers)
    held: _Held = {member_id: {} for member_id in fresh}
    for partition in sorted(owners):
        held[owners[partition]].setdefault(partition.topic, []).append(partition)
    for member_id, by_topic in fresh.items():
        for topic, of_topic in by_topic.items():
            held[member_id].setdefault(topic, []).extend(of_topic)
    _even_out(held, loads, subscribers)
    return {
        member_id: sorted(partition for of_topic in held[member_id].values() for partition in of_topic)
        for member_id in members
    }


def _even_out(held: _Held, loads: Counter[str], subscribers: Mapping[str, Sequence[str]]) -> None:
    """Move the partitions in `held` along chains of members until no chain improves the loads.

    If no chain from a member improves the loads, none ever will. All members within its reach have at most one
    partition fewer, and they reach no others. A later chain starts at a member with no more partitions than this one,
    and would have to end at a member with two fewer, so it never passes here.
    """
    places = {member_id: place for place, member_id in enumerate(held)}
    waiting = set(held)
    while waiting:
        lowest = min(loads[member_id] for member_id in held)
        fullest = max(waiting, key=lambda member_id: (loads[member_id], -places[member_id]))
        chain = _chain_to_emptiest(fullest, held, loads, subscribers, lowest)
        if chain is None:
            waiting.remove(fullest)
            continue
        giver = fullest
        for topic, taker in chain:
            held[taker].setdefault(topic, []).append(held[giver][topic].pop())
            giver = taker
        loads[fullest] -= 1
        loads[giver] += 1


def _chain_to_emptiest(
    first: str,
    held: _Held,
    loads: Counter[str],
    subscribers: Mapping[str, Sequence[str]],
    lowest: int,
) -> list[tuple[str, str]] | None:
    """Return the shortest steps (topic, member that gets a partition of it) from `first` to the member with the fewest
    partitions within reach; None unless that has at least two fewer than `first`. No member has fewer than
    `lowest`."""
    if loads[first] - lowest < 2:
        return None
    came_by: dict[str, tuple[str, str] | None] = {first: None}
    tried: set[str] = set()
    waiting = deque([first])
    best = first
    while waiting and loads[best] > lowest:
        giver = waiting.popleft()
        for topic, of_topic in sorted(held[giver].items()):
            if not of_topic or topic in tried:
                continue
            tried.add(topic)
            for taker in subscribers[topic]:
                if taker not in came_by:
                    came_by[taker] = (topic, giver)
                    waiting.append(taker)
                    if loads[taker] < loads[best]:
                        best = taker
    if loads[first] - loads[best] < 2:
        return None
    steps: list[tuple[str, str]] = []
    taker = best
    while (came := came_by[taker]) is not None:
        topic, giver = came
        steps.append((topic, taker))
        taker = giver
    return steps[::-1]
