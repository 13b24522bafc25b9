"""The states of a replica, as one table (Kafka's ReplicaStateMachine)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from minibroker.protocol.model import TopicPartition


class PartitionReplica(NamedTuple):
    """The copy of a partition that one broker holds (Kafka's PartitionAndReplica)."""

    partition: TopicPartition
    broker_id: int

    def __str__(self) -> str:
        return f"{self.partition} on {self.broker_id}"


class ReplicaState(Enum):
    NON_EXISTENT = "NonExistentReplica"
    """Never created, or deleted and forgotten."""
    NEW = "NewReplica"
    """Just assigned; the broker has no LeaderAndIsr for it yet."""
    ONLINE = "OnlineReplica"
    """The broker is alive and was ordered to lead or to follow."""
    OFFLINE = "OfflineReplica"
    """The broker is down, its log directory failed, or the replica is about to be deleted."""
    DELETION_STARTED = "ReplicaDeletionStarted"
    """The broker was ordered to delete it and has not answered."""
    DELETION_SUCCESSFUL = "ReplicaDeletionSuccessful"
    """The broker has deleted it."""
    DELETION_INELIGIBLE = "ReplicaDeletionIneligible"
    """It cannot be deleted now: the broker is down, or failed to delete it."""


_S = ReplicaState
VALID_PREVIOUS_STATES: Mapping[ReplicaState, frozenset[ReplicaState]] = MappingProxyType(
    {
        _S.NEW: frozenset({_S.NON_EXISTENT}),
        _S.ONLINE: frozenset({_S.NEW, _S.ONLINE, _S.OFFLINE, _S.DELETION_INELIGIBLE}),
        _S.OFFLINE: frozenset({_S.NEW, _S.ONLINE, _S.OFFLINE, _S.DELETION_INELIGIBLE}),
        _S.DELETION_STARTED: frozenset({_S.OFFLINE}),
        _S.DELETION_SUCCESSFUL: frozenset({_S.DELETION_STARTED}),
        _S.DELETION_INELIGIBLE: frozenset({_S.OFFLINE, _S.DELETION_STARTED}),
        _S.NON_EXISTENT: frozenset({_S.DELETION_SUCCESSFUL}),
    }
)
"""Target state: the states from which a replica may move there."""
