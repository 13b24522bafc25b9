"""The bytes that reassignments have copied."""

from __future__ import annotations

import pytest

from minibroker.client.administering.log_dirs import LogDirDescription, LogDirReplica
from minibroker.client.administering.movements import Copy, Progress, movement, progress, sizes_of
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.protocol.model import TopicPartition

P, Q = TopicPartition("orders", 0), TopicPartition("orders", 1)
MOVE = PartitionReassignment((1, 2, 3), (3,), (2,))


def test_a_new_replica_is_measured_by_its_leader_and_an_answer_without_it_means_that_it_has_not_begun() -> None:
    one = movement(P, MOVE, 1, {1: {P: 1_000}, 3: {P: 400}})
    assert (one.copies, one.moved, one.left, one.total) == ((Copy(3, 400),), 400, 600, 1_000)
    assert movement(P, MOVE, 1, {1: {P: 1_000}, 3: {}}).moved == 0
    assert movement(P, MOVE, 1, {1: {P: 1_000}, 3: {P: 1_200}}).moved == 1_000, "a deletion may reach it later"


@pytest.mark.parametrize(("leader", "sizes"), [(None, {1: {P: 9}, 3: {}}), (1, {3: {}}), (1, {1: {P: 9}})])
def test_the_progress_is_unknown_without_an_answer_of_the_leader_or_of_a_new_replica(
    leader: int | None, sizes: dict[int, dict[TopicPartition, int]]
) -> None:
    one = movement(P, MOVE, leader, sizes)
    assert (one.moved, one.left, one.total) == (None, None, None)
    assert str(progress([one])) == "progress unknown, as brokers do not answer"


def test_the_progress_of_several_is_one_percentage() -> None:
    moves = [
        movement(P, MOVE, 1, {1: {P: 1_000_000_000}, 3: {P: 400_000_000}}),
        movement(Q, PartitionReassignment((1, 2, 3), (2, 3), ()), 1, {1: {Q: 100_000_000}, 2: {Q: 80_000_000}, 3: {}}),
    ]
    assert str(progress(moves)) == "40 % of 1.2 GB"
    assert str(progress([*moves, movement(P, MOVE, None, {})])) == "40 % of 1.2 GB and 1 partition of unknown size"
    assert progress([]) == Progress(0, 0, 0)
    assert str(progress([movement(P, MOVE, 1, {1: {P: 0}, 3: {}})])) == "100 % of 0 bytes"


def test_a_replica_that_moves_between_directories_counts_once() -> None:
    old, new = LogDirReplica(10, 0, False), LogDirReplica(4, 6, True)
    directories = [LogDirDescription(path, None, {P: one}, None, None) for path, one in (("a", old), ("b", new))]
    assert sizes_of({1: directories}) == {1: {P: 10}}
