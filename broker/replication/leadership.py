"""Listeners for the leaderships that this broker takes and loses (Kafka's onLeadershipChange)."""

from typing import Protocol

from minibroker.broker.replication.partition import Partition
from minibroker.protocol.model import TopicPartition


class LeadershipListener(Protocol):
    """Hears which role this broker has taken in a partition. Coordinators and caches that depend on a led partition
    begin and end with its leadership (Kafka's onElection and onResignation).

    Guarantees:
    - For each leader epoch in which this broker takes a role, exactly one of the two methods is called, once, however
      often the order is repeated. A role that the broker could not take is not reported.
    - The calls for one partition come in the order of its epochs; the calls for several partitions come in the order
      in which the controller names them.
    - Nothing has run since the role was taken. No record was appended in the new epoch, which begins at the log's end.

    If the leading replica was stopped or deleted, or its log directory failed, `on_follower` is called with the epoch
    of `on_leader`. After a deletion epochs may begin at 0 again: they belong to another topic of the same name.

    Nothing else in the broker runs before the listeners return, so they must neither wait nor raise. Long work belongs
    into a task.
    """

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        """This broker leads in `epoch`. It may have led in earlier epochs as well."""

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        """This broker does not lead in `epoch`: another broker leads, or none does, or the replica is gone."""


class LeadershipListeners:
    """Calls the listeners in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[LeadershipListener] = []

    def add(self, listener: LeadershipListener) -> None:
        """Add a listener before the first control request, since it does not hear of earlier roles."""
        self._listeners.append(listener)

    def role_taken(self, partition: Partition) -> None:
        for listener in self._listeners:
            report = listener.on_leader if partition.is_leader else listener.on_follower
            report(partition.topic_partition, partition.leader_epoch)

    def resigned(self, partition: Partition) -> None:
        for listener in self._listeners:
            listener.on_follower(partition.topic_partition, partition.leader_epoch)
