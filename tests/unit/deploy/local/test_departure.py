"""Where the replicas of a broker go that is removed."""

from __future__ import annotations

import pytest

from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.topics import PartitionDescription
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.departure import Departure, departure
from minibroker.protocol.model import TopicPartition


def partitions(*assigned: tuple[int, ...], topic: str = "orders") -> dict[TopicPartition, PartitionDescription]:
    return {
        TopicPartition(topic, number): PartitionDescription(number, replicas[0], 0, replicas, replicas, ())
        for number, replicas in enumerate(assigned)
    }


def moves(
    leaving: int,
    assigned: dict[TopicPartition, PartitionDescription],
    reassigned: dict[TopicPartition, PartitionReassignment] | None = None,
    live: tuple[int, ...] = (1, 2, 3, 4),
    known: tuple[int, ...] = (1, 2, 3, 4),
) -> Departure:
    return departure(leaving, assigned, reassigned or {}, live, known)


def test_each_replica_is_replaced_in_its_place_by_the_broker_with_the_fewest() -> None:
    found = moves(4, partitions((1, 4), (2, 4), (4, 1), (1, 2), (1, 2)))
    assert found == Departure(
        {
            TopicPartition("orders", 0): (1, 3),
            TopicPartition("orders", 1): (2, 3),
            TopicPartition("orders", 2): (3, 1),
        },
        (),
    )


def test_preferred_leaders_are_spread_over_the_others() -> None:
    found = moves(4, partitions(*[(4,)] * 6))
    assert sorted(replicas for replicas in found.moves.values()) == [(1,), (1,), (2,), (2,), (3,), (3,)]


def test_a_reassignment_in_progress_is_waited_for_and_one_to_the_leaving_broker_is_replaced() -> None:
    assigned = partitions((1, 4, 3), (1, 2, 4))
    reassigned = {
        TopicPartition("orders", 0): PartitionReassignment((1, 4, 3), (3,), (4,)),
        TopicPartition("orders", 1): PartitionReassignment((1, 2, 4), (4,), (2,)),
    }
    found = moves(4, assigned, reassigned)
    assert found.in_progress == (TopicPartition("orders", 0),)
    assert found.moves == {TopicPartition("orders", 1): (1, 2)}
    assert not found.is_over
    assert moves(4, partitions((1, 2), (2, 3))).is_over


def test_too_few_brokers_for_the_replicas_are_refused_with_both_remedies() -> None:
    with pytest.raises(LaunchError) as caught:
        moves(3, partitions((1, 2, 3), (1, 2, 3)), live=(1, 2, 3), known=(1, 2, 3))
    assert str(caught.value) == (
        "broker 3 cannot be removed: 2 brokers would remain, and orders has up to 3 replicas of each partition: first "
        "add a broker with `minibroker brokers add`, or lower the number of replicas with `minibroker reassign "
        "generate --brokers 1,2 --replication-factor 2 --topic orders`"
    )
    with pytest.raises(LaunchError, match="broker 1 is the only one: add another"):
        moves(1, partitions((1,)), live=(1,), known=(1,))


def test_a_dead_broker_takes_no_replica_but_counts_among_those_that_remain() -> None:
    assert moves(4, partitions((1, 4)), live=(1, 2, 4)).moves == {TopicPartition("orders", 0): (1, 2)}
    with pytest.raises(
        LaunchError, match=r"orders-0 on broker 4 cannot move, as brokers 2 and 3 of the others are not"
    ):
        moves(4, partitions((1, 4)), live=(1, 4))


def test_a_dead_broker_can_leave_unless_it_has_the_last_replica_in_sync() -> None:
    assert moves(4, partitions((1, 4)), live=(1, 2, 3)).moves == {TopicPartition("orders", 0): (1, 2)}
    stuck = {name: one._replace(leader=None) for name, one in partitions((4,)).items()}
    with pytest.raises(
        LaunchError, match="orders-0 cannot move away from broker 4 without a leader: `minibroker start 4`"
    ):
        moves(4, stuck, live=(1, 2, 3))
