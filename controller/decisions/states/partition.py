"""The states of a partition, as one table (Kafka's PartitionStateMachine)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class PartitionState(Enum):
    NON_EXISTENT = "NonExistentPartition"
    """Never created, or deleted."""
    NEW = "NewPartition"
    """Assigned to brokers, but without a leader so far: there is no state znode yet."""
    ONLINE = "OnlinePartition"
    """A leader was elected."""
    OFFLINE = "OfflinePartition"
    """The leader died and no other has been elected yet."""


VALID_PREVIOUS_STATES: Mapping[PartitionState, frozenset[PartitionState]] = MappingProxyType(
    {
        PartitionState.NON_EXISTENT: frozenset({PartitionState.OFFLINE}),
        PartitionState.NEW: frozenset({PartitionState.NON_EXISTENT}),
        PartitionState.ONLINE: frozenset({PartitionState.NEW, PartitionState.ONLINE, PartitionState.OFFLINE}),
        PartitionState.OFFLINE: frozenset({PartitionState.NEW, PartitionState.ONLINE, PartitionState.OFFLINE}),
    }
)
"""Target state: the states from which a partition may move there."""
