"""A group's members, protocols and states, without a coordinator."""

from __future__ import annotations

import itertools

import pytest

from minibroker.broker.groups.group import Group, MemberMetadata, group_from
from minibroker.broker.groups.records import OffsetValue, decode_group_value, encode_group_value
from minibroker.broker.groups.states import (
    VALID_PREVIOUS_STATES,
    GroupState,
    IllegalTransition,
    check_transition,
)
from minibroker.protocol.consumer_protocol import ConsumerProtocolSubscription, encode_subscription
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition

LEGAL = {
    ("Empty", "PreparingRebalance"),
    ("Empty", "Dead"),
    ("PreparingRebalance", "CompletingRebalance"),
    ("PreparingRebalance", "Empty"),
    ("PreparingRebalance", "Dead"),
    ("CompletingRebalance", "Stable"),
    ("CompletingRebalance", "PreparingRebalance"),
    ("CompletingRebalance", "Dead"),
    ("Stable", "PreparingRebalance"),
    ("Stable", "Dead"),
}
"""The transitions of Kafka's GroupState."""


def member(name: str, *protocols: str, instance: str | None = None) -> MemberMetadata:
    known = tuple((protocol, f"{name}:{protocol}".encode()) for protocol in protocols or ("range",))
    return MemberMetadata(name, instance, "client", "host", 1_000, 500, known)


def group_of(*members: MemberMetadata) -> Group:
    group = Group("g")
    for one in members:
        group.add(one, "consumer")
    return group


def begun(*members: MemberMetadata) -> Group:
    """Return a group in its first generation, which all members have joined."""
    group = group_of(*members)
    for one in members:
        one.join_waiter = lambda response: None
    group.transition_to(GroupState.PREPARING_REBALANCE, 1)
    assert group.elect_joined_leader()
    group.begin_generation(2)
    return group


@pytest.mark.parametrize(("old", "new"), list(itertools.product(GroupState, GroupState)))
def test_a_group_moves_as_the_table_says_and_in_no_other_way(old: GroupState, new: GroupState) -> None:
    assert ((old.value, new.value) in LEGAL) == (old in VALID_PREVIOUS_STATES[new])
    if (old.value, new.value) in LEGAL:
        check_transition("g", old, new)
    else:
        with pytest.raises(IllegalTransition, match=f"cannot go from {old.value} to {new.value}"):
            check_transition("g", old, new)


def test_the_protocol_is_known_to_all_and_preferred_by_most() -> None:
    group = group_of(member("a", "sticky", "range"), member("b", "range", "sticky"), member("c", "range", "sticky"))
    assert group.select_protocol() == "range"
    group.add(member("d", "sticky"), "consumer")
    assert group.select_protocol() == "sticky"


def test_of_protocols_with_as_many_votes_the_first_members_choice_wins() -> None:
    group = group_of(member("a", "sticky", "range"), member("b", "range", "sticky"))
    assert group.select_protocol() == "sticky"


def test_a_member_needs_a_protocol_that_all_others_know() -> None:
    group = group_of(member("a", "range", "sticky"), member("b", "sticky"))
    assert group.supports("consumer", ["sticky", "other"])
    assert not group.supports("consumer", ["range"])
    assert not group.supports("connect", ["sticky"])
    assert not group.supports("consumer", [])
    group.remove("b")
    assert group.supports("consumer", ["range"])


def test_an_empty_group_takes_any_protocol_type_but_none() -> None:
    group = group_of(member("a"))
    group.remove("a")
    assert group.supports("connect", ["x"])
    assert not group.supports("", ["x"])
    assert not group.supports("connect", [])


def test_the_leader_stays_if_it_has_joined_and_otherwise_another_member_leads() -> None:
    first, second = member("a"), member("b")
    group = group_of(first, second)
    assert not group.elect_joined_leader()
    second.join_waiter = lambda response: None
    assert group.elect_joined_leader()
    assert group.leader_id == "b"
    first.join_waiter = lambda response: None
    assert group.elect_joined_leader()
    assert group.leader_id == "b"


def test_the_generation_after_the_last_number_is_1() -> None:
    group = Group("g")
    group.generation_id = 2**31 - 1
    group.transition_to(GroupState.PREPARING_REBALANCE, 1)
    group.begin_generation(2)
    assert group.generation_id == 1


def test_a_static_member_goes_on_under_a_new_id_in_its_place() -> None:
    group = begun(member("a", instance="one"), member("b"))
    group.rename_static_member("one", "a2")
    assert list(group.members) == ["a2", "b"]
    assert group.leader_id == "a2"
    assert list(group.pending_sync) == ["b", "a2"]
    assert group.why_not_member("a", "one") is ErrorCode.FENCED_INSTANCE_ID
    assert group.why_not_member("a", None) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.why_not_member("a2", "one") is ErrorCode.NONE
    assert group.why_not_member("a2", "nobody's") is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_that_has_not_joined_is_not_waited_for_to_sync() -> None:
    silent = member("s", instance="s")
    group = group_of(member("a"), silent)
    group.members["a"].join_waiter = lambda response: None
    group.transition_to(GroupState.PREPARING_REBALANCE, 1)
    group.begin_generation(2)
    assert list(group.pending_sync) == ["a"]


@pytest.mark.parametrize(
    ("state", "who", "accepted"),
    [
        (GroupState.STABLE, "a", True),
        (GroupState.STABLE, "", False),
        (GroupState.COMPLETING_REBALANCE, "", False),
        (GroupState.PREPARING_REBALANCE, "a", True),
        (GroupState.PREPARING_REBALANCE, "", False),
    ],
)
def test_a_full_group_accepts_its_members_and_no_others(state: GroupState, who: str, accepted: bool) -> None:
    group = begun(member("a"), member("b"))
    if state is not GroupState.COMPLETING_REBALANCE:
        group.transition_to(state, 3)
    assert group.accepts(who, None, 2) is accepted


def test_a_full_group_accepts_a_static_member_that_comes_back() -> None:
    group = begun(member("a", instance="one"), member("b"))
    assert group.accepts("", "one", 2)
    assert not group.accepts("", "two", 2)


def test_a_group_gives_out_as_many_member_ids_as_it_may_have_members() -> None:
    group = Group("g")
    group.pending_members = dict.fromkeys(("p", "q"))
    assert not group.accepts("", None, 2)
    assert group.accepts("p", None, 2)


def test_a_stored_group_comes_back_stable_with_what_it_had() -> None:
    group = begun(member("a", "sticky", "range"), member("b", "sticky", instance="two"))
    value = decode_group_value(encode_group_value(group.as_value({"a": b"1", "b": b"2"}, 5)))
    back = group_from("g", value, 7.0)
    assert (value.state_timestamp_ms, back.state_since_s) == (5, 7.0)
    assert back.is_in(GroupState.STABLE)
    assert (back.generation_id, back.protocol_name, back.leader_id) == (1, "sticky", "a")
    assert [m.assignment for m in back.members.values()] == [b"1", b"2"]
    assert back.static_members == {"two": "b"}
    assert back.select_protocol() == "sticky"
    assert back.members["b"].session_timeout_ms == 500


def test_subscribed_topics_are_known_while_the_group_is_stable_and_has_consumers() -> None:
    subscription = encode_subscription(ConsumerProtocolSubscription(["orders"]))
    reader = MemberMetadata("a", None, "client", "host", 1_000, 500, (("range", subscription),))
    group = begun(reader)
    assert group.subscribed_topics() is None
    group.transition_to(GroupState.STABLE, 3)
    assert group.subscribed_topics() == frozenset({"orders"})
    odd = begun(member("a"))
    odd.transition_to(GroupState.STABLE, 3)
    assert odd.subscribed_topics() is None


def test_a_topic_is_unused_from_when_a_generation_begins_whose_members_do_not_read_it() -> None:
    def reader(*topics: str) -> MemberMetadata:
        subscription = encode_subscription(ConsumerProtocolSubscription(list(topics)))
        return MemberMetadata("a", None, "client", "host", 1_000, 500, (("range", subscription),))

    def rebalance(began_s: float, *topics: str) -> None:
        group.transition_to(GroupState.PREPARING_REBALANCE, began_s)
        group.update(group.members["a"], reader(*topics))
        group.begin_generation(began_s + 1)
        group.transition_to(GroupState.STABLE, began_s + 2)

    group = begun(reader("orders", "other", "nothing-committed"))
    for topic in ("orders", "other"):
        group.offsets.load(TopicPartition(topic, 0), OffsetValue(1, -1, "", 0, ""), 0, 1)
    group.transition_to(GroupState.STABLE, 3)
    rebalance(10, "orders")
    assert group.topics_unused_since_s == {"other": 12}
    rebalance(20, "other")
    assert group.topics_unused_since_s == {"orders": 22}
    group.transition_to(GroupState.PREPARING_REBALANCE, 30)
    group.remove("a")
    group.begin_generation(31)
    assert group.topics_unused_since_s == {"orders": 22, "other": 31}
