"""Who reads which partitions: the decision of a group's leader. Pure.

Kafka's four (RangeAssignor, RoundRobinAssignor, StickyAssignor, CooperativeStickyAssignor), under their names there.
All members of a group must have one in common, and Kafka's own clients may be among them; whoever leads decides, so
the result need not be the one that a Java leader would have found, only as good: the same for all orders of the input,
even, and with as few changes as that allows.

The problem of `sticky` is evenness where members subscribe to different topics. Moving single partitions from full
members to emptier ones, as Kafka does, stops short of it: where A may only give to B, and B to C, loads of 3, 2, 1
admit no single move that helps. So partitions move along the shortest chain from the fullest member to the emptiest one
that can be reached, until no chain ends at a member with two fewer than its first. This finds the most even assignment
there is (sum of squares), needs no special case for equal subscriptions, and changes nothing when what members own is
even already.

`cooperative-sticky` decides the same, and then takes out what would move from a member that still has it: it goes to
nobody until its owner gave it back, which joins again for that (KIP-429). What a member says that it owns may be old
news, from before it was thrown out: of two that claim a partition, the one of the later generation is right (KIP-792);
of one generation, neither.
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
    """What members do with their partitions when a rebalance begins (Kafka's ConsumerPartitionAssignor)."""

    EAGER = "eager"
    """They give all back before they join."""
    COOPERATIVE = "cooperative"
    """They keep them, and give back what is not assigned to them any more; then they join once more (KIP-429)."""


class Subscription(NamedTuple):
    """A member, as the leader sees it."""

    topics: Collection[str]
    owned_partitions: Collection[TopicPartition] = ()
    """What it has and keeps until it is told otherwise. Empty from eager members."""
    generation: int = NO_GENERATION
    """In which it got them."""
    user_data: bytes | None = None
    rack: str | None = None
    group_instance_id: str | None = None
    """The name of a static member (KIP-345)."""


Members = Mapping[str, Subscription]
"""By member id."""
Assignment = dict[str, list[TopicPartition]]
"""By member id; every member is in it."""
AssignorCallable = Callable[[Members, Mapping[str, int]], Mapping[str, Iterable[tuple[str, int]]]]
"""(members, number of partitions by topic) -> who gets what; see `Assignor.assign`. Its rebalances are eager."""


class Assignor(Protocol):
    """Decides at the leader of a group. All members must be given one of the same name."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> RebalanceProtocol: ...

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        """Who gets what. `partitions` has the number of partitions of each topic that exists; subscribed topics that it
        does not have are left out."""

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        """What a member tells the leader's `assign` when it joins, having had `owned` in `generation`."""


class Range:
    """Each topic by itself: its partitions in a row, cut into pieces of equal length, of which the first members get
    those that are longer by one. Topics with as many partitions are cut alike, so that joins find both sides."""

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
    """The partitions of all topics in a row, dealt out in turn; who does not subscribe to the topic is passed over."""

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
    """As even as subscriptions allow, and members keep what they had where that is possible."""

    name = "sticky"
    protocol = RebalanceProtocol.EAGER

    def assign(self, members: Members, partitions: Mapping[str, int]) -> Assignment:
        return _sticky(members, partitions, {member_id: _remembered(member) for member_id, member in members.items()})

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return encode_sticky_user_data(sorted(owned), generation)


class CooperativeSticky:
    """As `Sticky`, but who keeps a partition reads on through the rebalance; what moves is assigned in a second one."""

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
    """A callable of the user's, by its name. What it returns is checked: a partition that nobody gets would stand still
    and nobody would know why."""

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
            raise InvalidAssignment(self.name, f"nobody got {', '.join(map(str, missing))}; give each to one member")
        assignment: Assignment = {member_id: [] for member_id in members}
        for partition in sorted(owners):
            assignment[owners[partition]].append(partition)
        return assignment

    def user_data(self, owned: Collection[TopicPartition], generation: int) -> bytes | None:
        return None


ASSIGNORS: dict[str, Assignor] = {
    assignor.name: assignor for assignor in (Range(), RoundRobin(), Sticky(), CooperativeSticky())
}
"""By name."""


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
"""By member, in their order, and topic."""


class _Claim(NamedTuple):
    """What a member says that it has."""

    partitions: Collection[TopicPartition]
    generation: int


def _ordered(members: Members) -> list[str]:
    """Static members first, by their names, which outlive their member ids; then the others."""
    return sorted(members, key=lambda member_id: _rank(member_id, members[member_id]))


def _rank(member_id: str, member: Subscription) -> tuple[bool, str, str]:
    return member.group_instance_id is None, member.group_instance_id or "", member_id


def _subscribers(members: Members, partitions: Mapping[str, int]) -> dict[str, list[str]]:
    """Topics that exist and who subscribes to each, both in order."""
    found: dict[str, list[str]] = {}
    for member_id in _ordered(members):
        for topic in set(members[member_id].topics):
            if partitions.get(topic, 0) > 0:
                found.setdefault(topic, []).append(member_id)
    return dict(sorted(found.items()))


def _remembered(member: Subscription) -> _Claim:
    """What an eager member had. A member whose user data is not for this assignor had nothing, as in Kafka: it may have
    joined with another one before."""
    try:
        return _Claim(*decode_sticky_user_data(member.user_data or b""))
    except InvalidMessage:
        return _Claim((), NO_GENERATION)


def _owners(claims: Mapping[str, _Claim]) -> dict[TopicPartition, str]:
    """Who has each partition: the one that claims it in the latest generation, if that is one only."""
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
    """The most even assignment, and what is owned stays where it is unless that needs it moved."""
    subscribers = _subscribers(members, partitions)
    readers = {topic: frozenset(of_topic) for topic, of_topic in subscribers.items()}
    owners = {
        partition: member_id
        for partition, member_id in _owners(claims).items()
        if member_id in readers.get(partition.topic, ()) and 0 <= partition.partition < partitions[partition.topic]
    }
    loads = Counter(owners.values())
    fresh: _Held = {member_id: {} for member_id in _ordered(members)}
    # Those that fewest may read first: the others can still make up for what that leaves uneven.
    for topic in sorted(subscribers, key=lambda topic: (len(subscribers[topic]), topic)):
        for index in range(partitions[topic]):
            if (partition := TopicPartition(topic, index)) not in owners:
                member_id = min(subscribers[topic], key=loads.__getitem__)
                fresh[member_id].setdefault(topic, []).append(partition)
                loads[member_id] += 1
    # What nobody had moves first, and what is owned only if that was not enough. So what a cooperative rebalance has
    # freed finds its place in the next one without a third.
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
    """Moves what is in `held` along chains of members until none is left that helps.

    A member from which no chain helps is done for good. All that its chains reach have at most one partition less, and
    lead nowhere else; a later chain, from a member that has no more than this one, would have to end at one that has
    two less than that, so it does not come here.
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
    """The steps (topic, who gets a partition of it) from `first` to the member with the fewest partitions that can be
    reached, by the shortest way; None where that has not two fewer than `first`. No member has fewer than `lowest`."""
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
