"""Assignors with known results, and assignors of the user.

`test_assignors_properties` has the rules for any group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from minibroker.client.errors import InvalidAssignment, InvalidSetting
from minibroker.client.group.assignors import ASSIGNORS, Members, RebalanceProtocol, Subscription, assignor_of
from minibroker.protocol.model import TopicPartition


def partitions(text: str) -> list[TopicPartition]:
    """Write partitions as `a0 b1`."""
    return [TopicPartition(name[0], int(name[1:])) for name in text.split()]


def shown(assignment: Mapping[str, Iterable[TopicPartition]]) -> dict[str, str]:
    return {member_id: " ".join(f"{topic}{index}" for topic, index in mine) for member_id, mine in assignment.items()}


BOTH = frozenset("ab")


def test_range_cuts_each_topic_alike() -> None:
    assignment = ASSIGNORS["range"].assign({"x": Subscription(BOTH), "y": Subscription(BOTH)}, {"a": 3, "b": 3})
    assert shown(assignment) == {"x": "a0 a1 b0 b1", "y": "a2 b2"}


def test_roundrobin_deals_all_topics_in_turn_and_passes_over_who_does_not_subscribe() -> None:
    members = {"x": Subscription("a"), "y": Subscription("ab"), "z": Subscription("b")}
    assert shown(ASSIGNORS["roundrobin"].assign(members, {"a": 3, "b": 3})) == {
        "x": "a0 a2",
        "y": "a1 b0 b2",
        "z": "b1",
    }


def test_static_members_come_first_and_by_their_names() -> None:
    members = {
        "x": Subscription("a"),
        "y": Subscription("a", group_instance_id="2"),
        "z": Subscription("a", group_instance_id="1"),
    }
    assert shown(ASSIGNORS["range"].assign(members, {"a": 3})) == {"x": "a2", "y": "a1", "z": "a0"}


def test_of_two_that_claim_a_partition_the_later_generation_is_right() -> None:
    claims = {
        "x": Subscription("a", partitions("a0 a1"), 4),
        "y": Subscription("a", partitions("a0 a1"), 7),
    }
    for members in (claims, dict(reversed(claims.items()))):
        assignment = ASSIGNORS["cooperative-sticky"].assign(members, {"a": 2})
        assert shown(assignment) == {"x": "", "y": "a0"}, "a1 moves on when y gave it back"


def test_a_partition_claimed_twice_in_a_generation_stays_unassigned_until_both_revoked_it() -> None:
    members = {"x": Subscription("a", partitions("a0"), 4), "y": Subscription("a", partitions("a0"), 4)}
    assert shown(ASSIGNORS["cooperative-sticky"].assign(members, {"a": 2})) in (
        {"x": "", "y": "a1"},
        {"x": "a1", "y": ""},
    )


def test_a_partition_moves_through_a_member_that_had_enough_where_that_is_the_only_way() -> None:
    """x has three partitions, y two, z one: x can give only to y, and y to z."""
    sticky = ASSIGNORS["sticky"]
    members = {
        "x": Subscription("a", user_data=sticky.user_data(partitions("a0 a1 a2"), 1)),
        "y": Subscription("ab", user_data=sticky.user_data(partitions("b0 b1"), 1)),
        "z": Subscription("bc", user_data=sticky.user_data(partitions("c0"), 1)),
    }
    assert shown(sticky.assign(members, {"a": 3, "b": 2, "c": 1})) == {"x": "a0 a1", "y": "a2 b0", "z": "b1 c0"}


def test_user_data_of_another_assignor_counts_as_none() -> None:
    assert shown(ASSIGNORS["sticky"].assign({"x": Subscription("a", user_data=b"\xff")}, {"a": 1})) == {"x": "a0"}


def to_first(members: Members, partitions: Mapping[str, int]) -> dict[str, list[tuple[str, int]]]:
    return {min(members): [(topic, index) for topic in partitions for index in range(partitions[topic])]}


def test_a_function_is_an_eager_assignor_of_its_name() -> None:
    assignor = assignor_of(to_first)
    assert (assignor.name, assignor.protocol) == ("to_first", RebalanceProtocol.EAGER)
    assert shown(assignor.assign({"x": Subscription("a"), "y": Subscription("a")}, {"a": 2})) == {"x": "a0 a1", "y": ""}


@pytest.mark.parametrize(
    ("decided", "message"),
    [
        ({"x": "a0"}, "assignor choose: no member got a-1, b-0; give each to one member"),
        ({"x": "a0 a1 b0", "y": "b0"}, "assignor choose: b-0 went to x and y; give it to one of them"),
        ({"x": "a0 a1", "y": "b0 b1"}, "assignor choose: b-1 went to y, which asked for a, b, or does not exist"),
        ({"x": "a0 a1", "z": "b0"}, "assignor choose: b-0 went to z, which asked for a, or does not exist"),
        ({"x": "a0 a1", "w": "b0"}, "assignor choose: 'w' is no member; they are x, y, z"),
    ],
)
def test_a_wrong_decision_of_a_users_assignor_is_named(decided: dict[str, str], message: str) -> None:
    def choose(members: Members, counts: Mapping[str, int]) -> dict[str, list[TopicPartition]]:
        return {member_id: partitions(text) for member_id, text in decided.items()}

    members = {"x": Subscription("ab"), "y": Subscription("ab"), "z": Subscription("a")}
    with pytest.raises(InvalidAssignment, match=message):
        assignor_of(choose).assign(members, {"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "stikcy",
            "partition_assignment_strategy='stikcy': must be one of range, roundrobin, sticky, cooperative-sticky",
        ),
        (lambda members, partitions: {}, "must be a name, a function with a name"),
        (7, "must be a name, a function with a name"),
    ],
)
def test_an_object_that_is_no_assignor_is_refused(choice: object, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        assignor_of(choice)  # type: ignore[arg-type]
