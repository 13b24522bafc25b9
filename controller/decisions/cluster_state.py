"""The controller's picture of the cluster (Kafka's ControllerContext), with its changes and queries.

It belongs to one tenure. Decisions only read it and return Plans; the executor applies a plan's changes after the
znodes were written. ZooKeeper holds the truth. The cluster state is a copy of everything read or written there, so that
elections need no further reads; the version in each `LeaderAndIsr` makes a write fail if the copy is outdated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, assert_never

from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, RegisteredBroker, ReplicaAssignment, TopicPartition
from minibroker.protocol.znodes import TopicZnode

NOT_WRITTEN = -1
"""The `partition_epoch` of a state whose znode does not exist yet."""

_SHOWN = 20
"""Partitions of a topic, or of a state, that a line in the timeline names."""

# --- Changes of the cluster state by a plan, besides moves and elections ---------------------------------------


class BrokerAdded(NamedTuple):
    broker: RegisteredBroker

    def __str__(self) -> str:
        return f"broker {self.broker.id} (epoch {self.broker.epoch}) joins"


class BrokerRemoved(NamedTuple):
    broker_id: int

    def __str__(self) -> str:
        return f"broker {self.broker_id} is gone"


class BrokerShuttingDown(NamedTuple):
    """The broker has asked for a controlled shutdown."""

    broker_id: int

    def __str__(self) -> str:
        return f"broker {self.broker_id} is shutting down"


class TopicAdded(NamedTuple):
    topic: str
    znode: TopicZnode

    def __str__(self) -> str:
        shown = islice(self.znode.partitions.items(), _SHOWN)
        partitions = ", ".join(f"{p}: {list(replicas)}" for p, replicas in shown)
        more = len(self.znode.partitions) - _SHOWN
        and_more = f", and {more} more" if more > 0 else ""
        return f"topic {self.topic} ({self.znode.topic_id}) has the replicas {partitions}{and_more}"


class PartitionsAdded(NamedTuple):
    topic: str
    partitions: Mapping[int, tuple[int, ...]]

    def __str__(self) -> str:
        partitions = ", ".join(f"{p}: {list(replicas)}" for p, replicas in self.partitions.items())
        return f"topic {self.topic} has more partitions, with the replicas {partitions}"


class TopicRemoved(NamedTuple):
    topic: str

    def __str__(self) -> str:
        return f"topic {self.topic} is forgotten"


class StatesInitialized(NamedTuple):
    """The initial states of partitions and their replicas when office is taken."""

    partitions: Mapping[TopicPartition, PartitionState]
    replicas: Mapping[PartitionReplica, ReplicaState]

    def __str__(self) -> str:
        found: dict[str, list[str]] = {}
        for partition, position in self.partitions.items():
            found.setdefault(position.value, []).append(str(partition))
        for replica, state in self.replicas.items():
            found.setdefault(state.value, []).append(f"[{replica}]")
        return "found " + "; ".join(f"{state}: {_some(names)}" for state, names in found.items())


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return " ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class AssignmentChanged(NamedTuple):
    """A partition has other replicas, or a reassignment of it begins."""

    partition: TopicPartition
    assignment: ReplicaAssignment

    def __str__(self) -> str:
        return f"{self.partition} has the replicas {described_assignment(self.assignment)}"


def described_assignment(assignment: ReplicaAssignment) -> str:
    adding = f", adding {list(assignment.adding)}" if assignment.adding else ""
    removing = f", removing {list(assignment.removing)}" if assignment.removing else ""
    return f"{list(assignment.replicas)}{adding}{removing}"


class ReplicaFailed(NamedTuple):
    """The broker is alive, but the replica's log directory has failed."""

    replica: PartitionReplica

    def __str__(self) -> str:
        return f"replica {self.replica} has lost its log directory"


class ReplicaRecovered(NamedTuple):
    replica: PartitionReplica

    def __str__(self) -> str:
        return f"replica {self.replica} has its log directory again"


class LogEnd(NamedTuple):
    """The end of a log: the leader epoch of its last record, and the next offset. Greater means a longer log."""

    last_epoch: int
    log_end_offset: int


class LogEndReported(NamedTuple):
    """The end of a replica's log. It cannot change during `leader_epoch`, in which there is no leader."""

    replica: PartitionReplica
    leader_epoch: int
    end: LogEnd

    def __str__(self) -> str:
        return f"the log of {self.replica} ends at {self.end.log_end_offset}, in epoch {self.end.last_epoch}"


class DeletionQueued(NamedTuple):
    topic: str

    def __str__(self) -> str:
        return f"topic {self.topic} is queued for deletion"


class DeletionIneligible(NamedTuple):
    """The deletion cannot continue until the obstacle `reason` is gone."""

    topic: str
    reason: str

    def __str__(self) -> str:
        return f"the deletion of topic {self.topic} waits: {self.reason}"


class DeletionAnnounced(NamedTuple):
    """The brokers are about to get an UpdateMetadata that reports the topic as deleted."""

    topic: str
    broker_ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"the deletion of topic {self.topic} waits until {' '.join(map(str, self.broker_ids))} know of it"


class DeletionHeard(NamedTuple):
    topic: str
    broker_id: int

    def __str__(self) -> str:
        return f"broker {self.broker_id} knows that topic {self.topic} is gone"


class DeletionResumed(NamedTuple):
    topic: str

    def __str__(self) -> str:
        return f"the deletion of topic {self.topic} may go on"


Change = (
    BrokerAdded
    | BrokerRemoved
    | BrokerShuttingDown
    | TopicAdded
    | PartitionsAdded
    | TopicRemoved
    | StatesInitialized
    | AssignmentChanged
    | ReplicaFailed
    | ReplicaRecovered
    | LogEndReported
    | DeletionQueued
    | DeletionIneligible
    | DeletionAnnounced
    | DeletionHeard
    | DeletionResumed
)


# --- A topic's configuration -------------------------------------------------------------------------------------


class TopicSettings(NamedTuple):
    """The settings that decide elections: the topic's own, or the defaults of the controller's broker."""

    unclean_leader_election: bool = False
    min_insync_replicas: int | None = None
    """For partitions without a state. None: by the number of replicas (`model.min_insync_replicas`)."""
    is_synced: bool = False
    """durability=synced. There is no default for it, since brokers use the topic's own setting."""
    version: int | None = None
    """The version of all settings in ZooKeeper (the data version of `/config/changes`) when these were read, if they
    allow an unclean election."""


# --- ZooKeeper when office is taken ------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Everything in ZooKeeper that concerns a controller. Znodes that could not be decoded are named."""

    brokers: Mapping[int, RegisteredBroker]
    topics: Mapping[str, TopicZnode]
    states: Mapping[TopicPartition, LeaderAndIsr]
    topics_to_delete: tuple[str, ...] = ()
    notifications: tuple[str, ...] = ()
    """Paths of the notifications of ISR changes and of failed log directories."""
    malformed_topics: frozenset[str] = frozenset()
    malformed_states: frozenset[TopicPartition] = frozenset()


# --- The state -----------------------------------------------------------------------------------------------


class ClusterState:
    """Read by decisions, changed by the executor (`apply`, `adopt`, `move_...`)."""

    def __init__(self, controller_id: int, controller_epoch: int) -> None:
        self.controller_id = controller_id
        self.controller_epoch = controller_epoch
        self.live_brokers: dict[int, RegisteredBroker] = {}
        self.shutting_down_brokers: set[int] = set()
        """Live brokers in a controlled shutdown, until they are gone or registered again. They get no leadership, no
        place in an ISR, and no new replicas."""
        self.topic_ids: dict[str, str] = {}
        self.assignments: dict[TopicPartition, tuple[int, ...]] = {}
        """All replicas, including those that a reassignment adds or removes."""
        self.reassigning: dict[TopicPartition, ReplicaAssignment] = {}
        """Partitions that are being reassigned; `assignments` has the same replicas."""
        self.leadership: dict[TopicPartition, LeaderAndIsr] = {}
        """Partitions whose state znode exists and could be decoded."""
        self.partition_states: dict[TopicPartition, PartitionState] = {}
        self.replica_states: dict[PartitionReplica, ReplicaState] = {}
        self.failed_replicas: set[PartitionReplica] = set()
        self._log_ends: dict[TopicPartition, dict[int, LogEndReported]] = {}
        """For partitions without a leader: the reports of brokers in their present epochs."""
        self.topics_to_delete: dict[str, None] = {}
        """Topics whose deletion is queued or under way, in the order of arrival."""
        self.ineligible_topics: dict[str, str] = {}
        """Those whose deletion waits, with the reason."""
        self.unaware_brokers: dict[str, frozenset[int]] = {}
        """For topics whose deletion has begun: the brokers that have not confirmed the deletion yet."""
        self._partitions_of: dict[str, tuple[TopicPartition, ...]] = {}
        self._partitions_on: dict[int, dict[TopicPartition, None]] = {}
        self._shown: dict[str, int] = {}
        """See `shown_partitions`. Cleared by changes, and updated by moves and elections: topics are settled in parts,
        and a new count for each part would take quadratic time."""

    # -- queries --

    def partition_state(self, partition: TopicPartition) -> PartitionState:
        return self.partition_states.get(partition, PartitionState.NON_EXISTENT)

    def replica_state(self, replica: PartitionReplica) -> ReplicaState:
        return self.replica_states.get(replica, ReplicaState.NON_EXISTENT)

    def live_broker_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.live_brokers))

    def racks(self) -> dict[int, str | None]:
        """Return the racks of the live brokers that are not shutting down, by ascending id."""
        return {broker_id: self.live_brokers[broker_id].rack for broker_id in self.staying_broker_ids()}

    def assignment(self, partition: TopicPartition) -> ReplicaAssignment:
        return self.reassigning.get(partition) or ReplicaAssignment(self.assignments[partition])

    def is_reassigning(self, topic: str) -> bool:
        """Return whether at least one partition of the topic is being reassigned."""
        return any(partition.topic == topic for partition in self.reassigning)

    def staying_broker_ids(self) -> tuple[int, ...]:
        """Return the live brokers that are not shutting down."""
        return tuple(b for b in self.live_broker_ids() if b not in self.shutting_down_brokers)

    def partitions_of(self, topic: str) -> tuple[TopicPartition, ...]:
        return self._partitions_of.get(topic, ())

    def replica_count(self, broker_id: int) -> int:
        return len(self._partitions_on.get(broker_id, ()))

    def partitions_on(self, broker_id: int) -> tuple[TopicPartition, ...]:
        """Return the partitions with a replica assigned to the broker."""
        return tuple(self._partitions_on.get(broker_id, ()))

    def shown_partitions(self, topic: str) -> int:
        """Return the number of the topic's partitions in clients' metadata: those with a present or former leader, and
        those about to get their first. (Clients could not use the topic if metadata had a new partition whose replicas
        are all dead, or one whose state cannot be decoded.)"""
        if topic not in self._shown:
            self._shown[topic] = sum(self._is_shown(partition) for partition in self.partitions_of(topic))
        return self._shown[topic]

    def _is_shown(self, partition: TopicPartition) -> bool:
        if partition in self.leadership:
            return True
        return self.partition_state(partition) is PartitionState.NEW and bool(self.live_replicas(partition))

    def leader(self, partition: TopicPartition) -> int:
        state = self.leadership.get(partition)
        return state.leader if state is not None else NO_LEADER

    def assignment_of(self, topic: str) -> dict[int, tuple[int, ...]]:
        """Return the replicas by ascending partition number."""
        return {partition.partition: self.assignments[partition] for partition in self.partitions_of(topic)}

    def topic_znode(self, topic: str) -> TopicZnode:
        """Return the intended content of the topic's znode."""
        reassigning = {p.partition: self.reassigning[p] for p in self.partitions_of(topic) if p in self.reassigning}
        return TopicZnode(self.topic_ids[topic], self.assignment_of(topic)).reassigned(reassigning)

    def replicas_of(self, topic: str) -> Iterator[PartitionReplica]:
        for partition in self.partitions_of(topic):
            for broker_id in self.assignments[partition]:
                yield PartitionReplica(partition, broker_id)

    def is_live(self, partition: TopicPartition, broker_id: int) -> bool:
        """Return whether the broker is alive and the replica's log directory works."""
        if broker_id not in self.live_brokers:
            return False
        return not self.failed_replicas or (partition, broker_id) not in self.failed_replicas

    def live_replicas(self, partition: TopicPartition) -> tuple[int, ...]:
        """Return the live replicas in the order of the assignment."""
        return tuple(b for b in self.assignments[partition] if self.is_live(partition, b))

    def live_brokers_of(self, partition: TopicPartition) -> dict[int, RegisteredBroker]:
        return {b: self.live_brokers[b] for b in self.live_replicas(partition)}

    def staying_brokers_of(self, partition: TopicPartition) -> dict[int, RegisteredBroker]:
        return {b: br for b, br in self.live_brokers_of(partition).items() if b not in self.shutting_down_brokers}

    def log_ends(self, partition: TopicPartition) -> dict[int, LogEnd]:
        """Return the ends of the logs that live brokers have reported since the leader was lost."""
        state = self.leadership.get(partition)
        if state is None or state.leader != NO_LEADER:
            return {}
        reports = self._log_ends.get(partition, {})
        return {b: report.end for b, report in reports.items() if report.leader_epoch == state.leader_epoch}

    def offline_replicas(self, partition: TopicPartition) -> tuple[int, ...]:
        return tuple(b for b in self.assignments[partition] if not self.is_live(partition, b))

    def is_queued_for_deletion(self, topic: str) -> bool:
        """Return whether the topic's deletion is queued or under way. A topic that is being reassigned does not count:
        its leaders and ISRs are maintained until the reassignment is over."""
        return topic in self.topics_to_delete and not self.is_reassigning(topic)

    def partitions_without_leader(self) -> tuple[TopicPartition, ...]:
        """Return new and offline partitions, except those of topics queued for deletion."""
        return tuple(
            partition
            for partition, state in self.partition_states.items()
            if state in (PartitionState.NEW, PartitionState.OFFLINE)
            and not self.is_queued_for_deletion(partition.topic)
        )

    def offline_partition_count(self) -> int:
        """Return Kafka's OfflinePartitionsCount: partitions without a live leader, except those being deleted."""
        return sum(
            1
            for partition in self.assignments
            if not self.is_queued_for_deletion(partition.topic)
            and (
                self.partition_state(partition) is not PartitionState.ONLINE
                or not self.is_live(partition, self.leader(partition))
            )
        )

    def preferred_replica_imbalance_count(self) -> int:
        """Return Kafka's PreferredReplicaImbalanceCount: partitions not led by the head of their assignment, except
        those that never had a leader and those being deleted."""
        return sum(
            1
            for partition, current in self.leadership.items()
            if current.leader != self.assignments[partition][0] and not self.is_queued_for_deletion(partition.topic)
        )

    def replica_states_of(self, topic: str) -> frozenset[ReplicaState]:
        """Return the set of states of the topic's replicas."""
        return frozenset(self.replica_state(replica) for replica in self.replicas_of(topic))

    # -- changes: for the executor --

    def move_partition(self, partition: TopicPartition, target: PartitionState) -> None:
        with self._recounting(partition):
            if target is PartitionState.NON_EXISTENT:
                self.partition_states.pop(partition, None)
            else:
                self.partition_states[partition] = target

    def move_replica(self, replica: PartitionReplica, target: ReplicaState) -> None:
        if target is ReplicaState.NON_EXISTENT:
            self.replica_states.pop(replica, None)
        else:
            self.replica_states[replica] = target

    def adopt(self, leadership: Mapping[TopicPartition, LeaderAndIsr]) -> None:
        """Record states that were read from, or written to, the znodes."""
        for partition, state in leadership.items():
            if partition in self.assignments:
                with self._recounting(partition):
                    self.leadership[partition] = state
                if state.leader != NO_LEADER:
                    self._log_ends.pop(partition, None)

    @contextmanager
    def _recounting(self, partition: TopicPartition) -> Iterator[None]:
        """Keep `shown_partitions` up to date over a change of the partition."""
        if partition.topic not in self._shown or partition in self.leadership:
            yield
            return
        before = self._is_shown(partition)
        yield
        self._shown[partition.topic] += self._is_shown(partition) - before

    def apply(self, change: Change) -> None:
        self._shown.clear()
        match change:
            case BrokerAdded(broker):
                self.live_brokers[broker.id] = broker
                self.shutting_down_brokers.discard(broker.id)
            case BrokerRemoved(broker_id):
                self.live_brokers.pop(broker_id, None)
                self.shutting_down_brokers.discard(broker_id)
                # The broker may return with other log directories.
                self.failed_replicas = {r for r in self.failed_replicas if r.broker_id != broker_id}
                for reports in self._log_ends.values():
                    reports.pop(broker_id, None)
                for topic in self.unaware_brokers:
                    self.unaware_brokers[topic] -= {broker_id}
            case BrokerShuttingDown(broker_id):
                self.shutting_down_brokers.add(broker_id)
            case TopicAdded(topic, znode):
                self._add_topic(topic, znode)
            case PartitionsAdded(topic, partitions):
                self._add_partitions(topic, {n: ReplicaAssignment(replicas) for n, replicas in partitions.items()})
            case TopicRemoved(topic):
                self._remove_topic(topic)
            case StatesInitialized(partitions=positions, replicas=replicas):
                self.partition_states.update(positions)
                self.replica_states.update(replicas)
            case AssignmentChanged(partition, assignment):
                self._assign(partition, assignment)
            case ReplicaFailed(replica):
                self.failed_replicas.add(replica)
            case ReplicaRecovered(replica):
                self.failed_replicas.discard(replica)
            case LogEndReported(replica):
                self._log_ends.setdefault(replica.partition, {})[replica.broker_id] = change
            case DeletionQueued(topic):
                self.topics_to_delete[topic] = None
            case DeletionIneligible(topic, reason):
                self.ineligible_topics[topic] = reason
            case DeletionAnnounced(topic, broker_ids):
                self.unaware_brokers[topic] = frozenset(broker_ids)
            case DeletionHeard(topic, broker_id):
                self.unaware_brokers[topic] -= {broker_id}
            case DeletionResumed(topic):
                self.ineligible_topics.pop(topic, None)
            case _:
                assert_never(change)

    def _add_topic(self, topic: str, znode: TopicZnode) -> None:
        assert topic not in self.topic_ids, f"topic {topic} is known already"
        self.topic_ids[topic] = znode.topic_id
        self._add_partitions(topic, {number: znode.assignment(number) for number in znode.partitions})

    def _add_partitions(self, topic: str, added: Mapping[int, ReplicaAssignment]) -> None:
        for number in sorted(added):
            partition = TopicPartition(topic, number)
            assert partition not in self.assignments, f"{partition} is known already"
            self._assign(partition, added[number])
        known = self._partitions_of.get(topic, ())
        self._partitions_of[topic] = tuple(sorted((*known, *(TopicPartition(topic, number) for number in added))))

    def _assign(self, partition: TopicPartition, assignment: ReplicaAssignment) -> None:
        gone = set(self.assignments.get(partition, ())) - set(assignment.replicas)
        self.assignments[partition] = assignment.replicas
        if assignment.is_being_reassigned:
            self.reassigning[partition] = assignment
        else:
            self.reassigning.pop(partition, None)
        for broker_id in assignment.replicas:
            self._partitions_on.setdefault(broker_id, {})[partition] = None
        for broker_id in gone:
            self._partitions_on[broker_id].pop(partition, None)
            self.failed_replicas.discard(PartitionReplica(partition, broker_id))
            self._log_ends.get(partition, {}).pop(broker_id, None)

    def _remove_topic(self, topic: str) -> None:
        for partition in self._partitions_of.pop(topic, ()):
            for broker_id in self.assignments.pop(partition):
                self._partitions_on[broker_id].pop(partition, None)
                replica = PartitionReplica(partition, broker_id)
                self.replica_states.pop(replica, None)
                self.failed_replicas.discard(replica)
            self.reassigning.pop(partition, None)
            self.partition_states.pop(partition, None)
            self.leadership.pop(partition, None)
            self._log_ends.pop(partition, None)
        self.topic_ids.pop(topic, None)
        self.topics_to_delete.pop(topic, None)
        self.ineligible_topics.pop(topic, None)
        self.unaware_brokers.pop(topic, None)


def in_order(partitions: Iterable[TopicPartition]) -> tuple[TopicPartition, ...]:
    """Return each partition once, sorted, so that plans, requests and logs are the same in every run."""
    return tuple(sorted(dict.fromkeys(partitions)))  # most input is sorted, which costs almost nothing
