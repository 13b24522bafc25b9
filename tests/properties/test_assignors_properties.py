"""The assignors, for any members, subscriptions, topics and claims."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from itertools import product
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minibroker.client.group.assignors import ASSIGNORS, Assignment, Assignor, Members, RebalanceProtocol, Subscription
from minibroker.protocol.model import TopicPartition

TOPICS = ("a", "b", "c", "d")
STICKY = ASSIGNORS["sticky"]
COOPERATIVE = ASSIGNORS["cooperative-sticky"]

partition_counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 7), min_size=1)
any_partition = st.builds(TopicPartition, st.sampled_from((*TOPICS, "gone")), st.integers(0, 9))
some_topics = st.frozensets(st.sampled_from((*TOPICS, "gone")), min_size=1)


@st.composite
def groups(draw: st.DrawFn, equal: bool = False) -> Members:
    """Members with any claims: contradictory, of old generations, of partitions that do not exist."""
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=7, unique=True))
    common = draw(some_topics)
    return {
        f"member-{number}": Subscription(
            topics=common if equal else draw(some_topics),
            owned_partitions=(owned := draw(st.lists(any_partition, max_size=8, unique=True))),
            generation=(generation := draw(st.integers(-1, 3))),
            user_data=draw(st.sampled_from((None, b"nonsense", STICKY.user_data(owned, generation)))),
            group_instance_id=draw(st.sampled_from((None, f"static-{99 - number}"))),
        )
        for number in ids
    }


FEW = settings(max_examples=50)  # a planted bug that moves partitions at once, or believes stale claims, shows in 30
every_assignor = pytest.mark.parametrize("assignor", ASSIGNORS.values(), ids=ASSIGNORS.keys())


def after(members: Members, assignment: Assignment, generation: int) -> Members:
    """The members in the next rebalance, each claiming its assignment."""
    return {
        member_id: member._replace(
            owned_partitions=assignment[member_id],
            generation=generation,
            user_data=STICKY.user_data(assignment[member_id], generation),
        )
        for member_id, member in members.items()
    }


def settled(assignor: Assignor, members: Members, partitions: Mapping[str, int]) -> Assignment:
    """The final assignment of a group without a past."""
    without_past = {
        member_id: member._replace(owned_partitions=(), user_data=None) for member_id, member in members.items()
    }
    return assignor.assign(without_past, partitions)


def owners(assignment: Assignment) -> dict[TopicPartition, list[str]]:
    found: dict[TopicPartition, list[str]] = {}
    for member_id, mine in assignment.items():
        for partition in mine:
            found.setdefault(partition, []).append(member_id)
    return found


@pytest.mark.slow
@every_assignor
@FEW
@given(groups(), partition_counts)
def test_each_partition_goes_to_one_subscriber(
    assignor: Assignor, members: Members, partitions: dict[str, int]
) -> None:
    if assignor.protocol is RebalanceProtocol.COOPERATIVE:
        members = after(members, assignor.assign(members, partitions), 4)
    assignment = assignor.assign(members, partitions)
    assert assignment.keys() == members.keys()
    wanted = {topic for member in members.values() for topic in member.topics} & partitions.keys()
    found = owners(assignment)
    assert found.keys() == {TopicPartition(topic, index) for topic in wanted for index in range(partitions[topic])}
    for partition, who in found.items():
        assert len(who) == 1
        assert partition.topic in members[who[0]].topics


@every_assignor
@FEW
@given(groups(), partition_counts, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    assignor: Assignor, members: Members, partitions: dict[str, int], random: Random
) -> None:
    other_members = {
        member_id: members[member_id]._replace(owned_partitions=list(members[member_id].owned_partitions)[::-1])
        for member_id in random.sample(sorted(members), len(members))
    }
    other_partitions = {topic: partitions[topic] for topic in random.sample(sorted(partitions), len(partitions))}
    assert assignor.assign(other_members, other_partitions) == assignor.assign(members, partitions)


@pytest.mark.parametrize("name", ["roundrobin", "sticky", "cooperative-sticky"])
@FEW
@given(groups(equal=True), partition_counts)
def test_members_with_the_same_topics_have_as_many_partitions_or_one_more(
    name: str, members: Members, partitions: dict[str, int]
) -> None:
    members = after(members, ASSIGNORS[name].assign(members, partitions), 4)
    counts = [len(mine) for mine in ASSIGNORS[name].assign(members, partitions).values()]
    assert max(counts) - min(counts) <= 1


@FEW
@given(groups(equal=True), partition_counts)
def test_range_is_even_within_each_topic(members: Members, partitions: dict[str, int]) -> None:
    assignment = ASSIGNORS["range"].assign(members, partitions)
    for topic in partitions:
        counts = [sum(partition.topic == topic for partition in mine) for mine in assignment.values()]
        assert max(counts) - min(counts) <= 1


@st.composite
def small_groups(draw: st.DrawFn) -> Members:
    topics = st.frozensets(st.sampled_from(TOPICS[:3]), min_size=1)
    owned = st.lists(st.builds(TopicPartition, st.sampled_from(TOPICS[:3]), st.integers(0, 1)), max_size=4, unique=True)
    return {
        f"member-{number}": Subscription(draw(topics), (mine := draw(owned)), 1, STICKY.user_data(mine, 1))
        for number in range(draw(st.integers(1, 3)))
    }


CHAIN = {
    "member-0": Subscription({"a"}, (), 1, STICKY.user_data([TopicPartition("a", 0), TopicPartition("a", 1)], 1)),
    "member-1": Subscription({"a", "b"}, (), 1, STICKY.user_data([TopicPartition("b", 0), TopicPartition("b", 1)], 1)),
    "member-2": Subscription({"b", "c"}),
}


@FEW
@given(small_groups(), st.dictionaries(st.sampled_from(TOPICS[:3]), st.integers(1, 2), min_size=1))
@example(CHAIN, {"a": 2, "b": 2})
def test_sticky_is_as_even_as_subscriptions_allow(members: Members, partitions: dict[str, int]) -> None:
    assignment = STICKY.assign(members, partitions)
    unevenness = sum(len(mine) ** 2 for mine in assignment.values())
    choices = [
        [member_id for member_id, member in members.items() if topic in member.topics]
        for topic, count in partitions.items()
        for _ in range(count)
    ]
    possible = product(*(choice for choice in choices if choice))
    assert unevenness == min(sum(count**2 for count in Counter(each).values()) for each in possible)


@pytest.mark.parametrize("assignor", [STICKY, COOPERATIVE], ids=["sticky", "cooperative-sticky"])
@FEW
@given(groups(), partition_counts)
def test_nothing_moves_if_nothing_changed(assignor: Assignor, members: Members, partitions: dict[str, int]) -> None:
    before = settled(assignor, members, partitions)
    assert assignor.assign(after(members, before, 1), partitions) == before


@pytest.mark.parametrize("assignor", [STICKY, COOPERATIVE], ids=["sticky", "cooperative-sticky"])
@FEW
@given(groups(equal=True), partition_counts, st.data())
def test_when_a_member_leaves_the_others_keep_what_they_have(
    assignor: Assignor, members: Members, partitions: dict[str, int], data: st.DataObject
) -> None:
    before = settled(assignor, members, partitions)
    left = data.draw(st.sampled_from(sorted(members)))
    remaining = {member_id: member for member_id, member in after(members, before, 1).items() if member_id != left}
    now = assignor.assign(remaining, partitions)
    for member_id in remaining:
        assert set(before[member_id]) <= set(now[member_id])


@FEW
@given(groups(equal=True), partition_counts)
def test_for_a_member_that_joins_no_more_moves_than_it_gets(members: Members, partitions: dict[str, int]) -> None:
    before = settled(STICKY, members, partitions)
    topics = next(iter(members.values())).topics
    now = STICKY.assign({**after(members, before, 1), "new": Subscription(topics)}, partitions)
    for member_id in members:
        assert set(now[member_id]) <= set(before[member_id])


@FEW
@given(groups(), partition_counts)
def test_in_a_cooperative_rebalance_no_member_gets_a_partition_that_another_still_has(
    members: Members, partitions: dict[str, int]
) -> None:
    assignment = COOPERATIVE.assign(members, partitions)
    for member_id, mine in assignment.items():
        generation = members[member_id].generation
        for partition in mine:
            for other_id, other in members.items():
                if other_id != member_id and partition in other.owned_partitions:
                    assert partition in members[member_id].owned_partitions
                    assert generation > other.generation, "the other one was thrown out since"


@FEW
@given(groups(), partition_counts)
def test_a_cooperative_group_is_settled_after_two_rounds(members: Members, partitions: dict[str, int]) -> None:
    first = COOPERATIVE.assign(members, partitions)
    second = COOPERATIVE.assign(after(members, first, 4), partitions)
    for member_id in members:
        assert set(first[member_id]) <= set(second[member_id])
    assert COOPERATIVE.assign(after(members, second, 5), partitions) == second


@every_assignor
@pytest.mark.parametrize("topics", [1, 100])
def test_a_thousand_partitions_and_a_hundred_members_take_less_than_a_second(assignor: Assignor, topics: int) -> None:
    """Measure the worst case for sticky: one member has everything, 99 join, and some subscribe to fewer topics."""
    partitions = {f"topic-{number}": 1000 // topics for number in range(topics)}
    everything = [TopicPartition(topic, index) for topic, count in partitions.items() for index in range(count)]
    some = frozenset(list(partitions)[: topics // 2 + 1])
    members = {
        f"member-{number}": Subscription(frozenset(partitions) if number % 2 == 0 else some) for number in range(100)
    }
    members["member-0"] = Subscription(frozenset(partitions), everything, 1, STICKY.user_data(everything, 1))
    started = time.process_time()
    assignor.assign(members, partitions)
    assert time.process_time() - started < 1
