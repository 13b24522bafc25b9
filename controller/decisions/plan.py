"""The Plan: the effects of one decision, as a value that can be printed, compared and tested.

A decision returns a Plan, and the executor carries it out in a fixed order: it checks the moves, writes the znodes,
changes the cluster state, and queues the requests. The order makes plans safe: memory and brokers get nothing that is
not in ZooKeeper.

A write belongs to a partition, a topic or a broker, so that the executor can drop the part of a plan that conflicts
with ZooKeeper's state and carry out the rest. A move of a partition to Online depends on the plan's write of that
partition; other moves do not depend on writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from minibroker.controller.decisions.cluster_state import NOT_WRITTEN, Change, described_assignment, in_order
from minibroker.controller.decisions.events import Event
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.protocol.model import LeaderAndIsr, TopicPartition
from minibroker.protocol.words import counted
from minibroker.protocol.znodes import REASSIGN_PARTITIONS, Reassignment, TopicZnode


class PartitionMove(NamedTuple):
    partition: TopicPartition
    target: PartitionState

    def __str__(self) -> str:
        return f"partition {self.partition} -> {self.target.value}"


class ReplicaMove(NamedTuple):
    replica: PartitionReplica
    target: ReplicaState

    def __str__(self) -> str:
        return f"replica {self.replica} -> {self.target.value}"


# --- Writes --------------------------------------------------------------------------------------------------


class WriteState(NamedTuple):
    """Set the state znode of a partition, or create it if `state.partition_epoch` is NOT_WRITTEN.

    `state.partition_epoch` is the version that the write expects; ZooKeeper returns the new one.
    """

    partition: TopicPartition
    state: LeaderAndIsr
    parent_exists: bool = False
    """For a creation: `/brokers/topics/T/partitions/P` exists already."""
    alarm: str = ""
    """The note of the plan that this write may lose records. Empty: it cannot."""
    settings_version: int | None = None
    """The write fails if settings have been changed since this version (`TopicSettings.version`)."""

    @property
    def creates(self) -> bool:
        return self.state.partition_epoch == NOT_WRITTEN

    def __str__(self) -> str:
        expects = "no znode yet" if self.creates else f"version {self.state.partition_epoch}"
        return f"write {self.partition}: {_described(self.state)} (over {expects})"


class CreateTopic(NamedTuple):
    """Create `/brokers/topics/T`, its node for the topic id, and `/config/topics/T`, atomically."""

    topic: str
    znode: TopicZnode
    config: Mapping[str, str]
    config_exists: bool = False
    """An earlier topic of that name has left a configuration; it is overwritten."""

    def __str__(self) -> str:
        return f"create topic {self.topic} ({self.znode.topic_id}), {counted(len(self.znode.partitions), 'partition')}"


class SetTopic(NamedTuple):
    """Write a topic's assignment over that version of its znode, if the topic still has that id."""

    topic: str
    znode: TopicZnode
    version: int

    def __str__(self) -> str:
        changing = sorted({*self.znode.adding_replicas, *self.znode.removing_replicas})
        shown = ", ".join(f"{p}: {described_assignment(self.znode.assignment(p))}" for p in changing)
        what = f", reassigned: {shown}" if shown else ""
        count = counted(len(self.znode.partitions), "partition")
        return f"write topic {self.topic}: {count}{what} (over version {self.version})"


class SetReassignments(NamedTuple):
    """Keep only these entries in `/admin/reassign_partitions`; without entries, remove the znode. If it has another
    version by now it is left alone, and its watch reports the change."""

    entries: tuple[Reassignment, ...]
    version: int

    def __str__(self) -> str:
        left = " ".join(str(entry.partition) for entry in self.entries)
        return f"leave in {REASSIGN_PARTITIONS}: {left or 'nothing, it is removed'} (over version {self.version})"


class EnsureNode(NamedTuple):
    """Create an empty persistent node unless it exists."""

    path: str

    def __str__(self) -> str:
        return f"make sure of {self.path}"


class RemoveNode(NamedTuple):
    """Delete a node if it exists."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path}"


class RemoveAsRead(NamedTuple):
    """Delete a node that an administrator created, unless it was changed or created again since it was read."""

    path: str
    czxid: int
    version: int

    def __str__(self) -> str:
        return f"remove {self.path} (as of version {self.version})"


class RemoveBroker(NamedTuple):
    """Delete the registration of the broker with that epoch, and no later one."""

    broker_id: int
    broker_epoch: int

    def __str__(self) -> str:
        return f"remove /brokers/ids/{self.broker_id} (epoch {self.broker_epoch})"


Write = WriteState | CreateTopic | SetTopic | SetReassignments | EnsureNode | RemoveNode | RemoveAsRead | RemoveBroker


# --- Requests ------------------------------------------------------------------------------------------------


class DeletedTopic(NamedTuple):
    topic: str
    topic_id: str


class MetadataUpdate(NamedTuple):
    """An UpdateMetadata for several brokers. It always lists the live brokers."""

    broker_ids: tuple[int, ...]
    partitions: tuple[TopicPartition, ...]
    deleted_topics: tuple[DeletedTopic, ...] = ()
    names_the_last: bool = False
    """After this request, these brokers have the metadata of all topics."""

    def __str__(self) -> str:
        what = [str(p) for p in self.partitions] + [f"{d.topic} (deleted)" for d in self.deleted_topics]
        return f"UpdateMetadata to {_numbers(self.broker_ids)}: {' '.join(what) or 'brokers only'}"


class StopReplica(NamedTuple):
    replica: PartitionReplica
    delete: bool

    def __str__(self) -> str:
        return f"StopReplica to {self.replica.broker_id}: {self.replica.partition}{' (delete)' * self.delete}"


def _described(state: LeaderAndIsr) -> str:
    eligible = f", eligible [{_numbers(state.eligible)}]" if state.eligible else ""
    return f"leader {state.leader}, epoch {state.leader_epoch}, isr [{_numbers(state.isr)}]{eligible}"


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(str(number) for number in numbers)


# --- The plan ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """See the module. `str(plan)` has one line per step, in the order of execution."""

    changes: tuple[Change, ...] = ()
    adopted: Mapping[TopicPartition, LeaderAndIsr] = field(default_factory=dict)
    """States that were read from znodes and become part of the cluster state."""
    partition_moves: tuple[PartitionMove, ...] = ()
    replica_moves: tuple[ReplicaMove, ...] = ()
    writes: tuple[Write, ...] = ()
    leader_and_isr: Mapping[int, tuple[TopicPartition, ...]] = field(default_factory=dict)
    """The partitions of each broker's LeaderAndIsr, which carries their states after the writes."""
    new_partitions: frozenset[TopicPartition] = frozenset()
    """Those of them whose replicas have no log yet."""
    metadata_updates: tuple[MetadataUpdate, ...] = ()
    stop_replicas: tuple[StopReplica, ...] = ()
    follow_ups: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for readers of the log and the timeline."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        yield from (f"note: {note}" for note in self.notes)
        yield from map(str, self.changes)
        for partition, state in self.adopted.items():
            yield f"adopt {partition}: {_described(state)}"
        yield from map(str, self.partition_moves)
        yield from map(str, self.replica_moves)
        yield from map(str, self.writes)
        for broker_id, partitions in self.leader_and_isr.items():
            yield f"LeaderAndIsr to {broker_id}: {' '.join(self._named(p) for p in partitions)}"
        yield from map(str, self.metadata_updates)
        yield from map(str, self.stop_replicas)
        yield from (f"then {event.name}" for event in self.follow_ups)

    def _named(self, partition: TopicPartition) -> str:
        return f"{partition} (new)" if partition in self.new_partitions else str(partition)


class PlanBuilder:
    """Collects the steps of a plan. `build` puts requests in a fixed order, with each partition once per broker, and
    StopReplicas that delete last."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._adopted: dict[TopicPartition, LeaderAndIsr] = {}
        self._partition_moves: list[PartitionMove] = []
        self._replica_moves: list[ReplicaMove] = []
        self._writes: list[Write] = []
        self._leader_and_isr: dict[int, set[TopicPartition]] = {}
        self._new_partitions: set[TopicPartition] = set()
        self._metadata_updates: list[MetadataUpdate] = []
        self._stop_replicas: list[StopReplica] = []
        self._follow_ups: list[Event] = []
        self._notes: list[str] = []

    def change(self, change: Change) -> None:
        self._changes.append(change)

    def adopt(self, partition: TopicPartition, state: LeaderAndIsr) -> None:
        self._adopted[partition] = state

    def move_partition(self, partition: TopicPartition, *targets: PartitionState) -> None:
        self._partition_moves.extend(PartitionMove(partition, target) for target in targets)

    def move_replica(self, replica: PartitionReplica, *targets: ReplicaState) -> None:
        self._replica_moves.extend(ReplicaMove(replica, target) for target in targets)

    def write(self, write: Write) -> None:
        self._writes.append(write)

    def tell(self, broker_ids: Iterable[int], partition: TopicPartition, *, is_new: bool = False) -> None:
        """Send LeaderAndIsr for the partition to the brokers."""
        for broker_id in broker_ids:
            self._leader_and_isr.setdefault(broker_id, set()).add(partition)
        if is_new:
            self._new_partitions.add(partition)

    def announce(
        self,
        broker_ids: Iterable[int],
        partitions: Iterable[TopicPartition],
        deleted_topics: Iterable[DeletedTopic] = (),
        *,
        names_the_last: bool = False,
    ) -> None:
        """Send UpdateMetadata to the brokers, if there are any."""
        broker_ids = tuple(sorted(broker_ids))
        if broker_ids:
            self._metadata_updates.append(
                MetadataUpdate(broker_ids, in_order(partitions), tuple(deleted_topics), names_the_last)
            )

    def stop(self, replica: PartitionReplica, *, delete: bool) -> None:
        self._stop_replicas.append(StopReplica(replica, delete))

    def follow_up(self, event: Event) -> None:
        self._follow_ups.append(event)

    def note(self, note: str) -> None:
        self._notes.append(note)

    def build(self) -> Plan:
        return Plan(
            changes=tuple(self._changes),
            adopted=self._adopted,
            partition_moves=tuple(self._partition_moves),
            replica_moves=tuple(self._replica_moves),
            writes=tuple(self._writes),
            leader_and_isr={b: in_order(self._leader_and_isr[b]) for b in sorted(self._leader_and_isr)},
            new_partitions=frozenset(self._new_partitions),
            metadata_updates=tuple(self._metadata_updates),
            stop_replicas=tuple(sorted(self._stop_replicas, key=lambda stop: stop.delete)),
            follow_ups=tuple(self._follow_ups),
            notes=tuple(self._notes),
        )
