"""Both state machines: every pair of states against Kafka's transitions."""

from __future__ import annotations

from itertools import product

import pytest

from minibroker.controller.decisions.states import partition as partition_states
from minibroker.controller.decisions.states import replica as replica_states
from minibroker.controller.decisions.states.machine import IllegalMove, check
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import ReplicaState

PARTITION_ARROWS = {
    "NonExistentPartition": {"NewPartition"},
    "NewPartition": {"OnlinePartition", "OfflinePartition"},
    "OnlinePartition": {"OnlinePartition", "OfflinePartition"},
    "OfflinePartition": {"OnlinePartition", "OfflinePartition", "NonExistentPartition"},
}
REPLICA_ARROWS = {
    "NonExistentReplica": {"NewReplica"},
    "NewReplica": {"OnlineReplica", "OfflineReplica"},
    "OnlineReplica": {"OnlineReplica", "OfflineReplica"},
    "OfflineReplica": {"OnlineReplica", "OfflineReplica", "ReplicaDeletionStarted", "ReplicaDeletionIneligible"},
    "ReplicaDeletionStarted": {"ReplicaDeletionSuccessful", "ReplicaDeletionIneligible"},
    "ReplicaDeletionSuccessful": {"NonExistentReplica"},
    "ReplicaDeletionIneligible": {"OnlineReplica", "OfflineReplica"},
}


def test_the_tables_name_every_state() -> None:
    assert set(partition_states.VALID_PREVIOUS_STATES) == set(PartitionState)
    assert set(replica_states.VALID_PREVIOUS_STATES) == set(ReplicaState)


@pytest.mark.parametrize(("current", "target"), list(product(PartitionState, PartitionState)))
def test_a_partition_moves_along_an_arrow_and_nowhere_else(current: PartitionState, target: PartitionState) -> None:
    legal = check(partition_states.VALID_PREVIOUS_STATES, current, target)
    assert legal == (target.value in PARTITION_ARROWS[current.value])


@pytest.mark.parametrize(("current", "target"), list(product(ReplicaState, ReplicaState)))
def test_a_replica_moves_along_an_arrow_and_nowhere_else(current: ReplicaState, target: ReplicaState) -> None:
    legal = check(replica_states.VALID_PREVIOUS_STATES, current, target)
    assert legal == (target.value in REPLICA_ARROWS[current.value])


def test_an_illegal_move_is_reported_with_both_states() -> None:
    move = IllegalMove("partition orders-0", PartitionState.NON_EXISTENT, PartitionState.ONLINE)
    assert str(move) == "partition orders-0: NonExistentPartition -> OnlinePartition is not a legal move"
