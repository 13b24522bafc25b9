"""The controller's picture of the cluster (Kafka's ControllerContext), the changes to it, and its queries.

It belongs to one tenure and dies with it. Decisions read it and never change it: they return Plans, and the
executor alone applies a plan's changes, after the znodes were written. ZooKeeper holds the truth; this is what
the controller has read or written there, so an election can be decided without asking again, and the version
in each `LeaderAndIsr` makes the write fail where the picture is old.
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

# --- Changes: what a plan can do to the picture, besides moves and elections -----------------------------------


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
    """To a topic that is known."""

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
    """Of partitions that an earlier controller has looked after, and of all their replicas."""

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
    """The replicas of a partition are others from now on, or begin to come and go."""

    partition: TopicPartition
    assignment: ReplicaAssignment

    def __str__(self) -> str:
        return f"{self.partition} has the replicas {described_assignment(self.assignment)}"


def described_assignment(assignment: ReplicaAssignment) -> str:
    adding = f", adding {list(assignment.adding)}" if assignment.adding else ""
    removing = f", removing {list(assignment.removing)}" if assignment.removing else ""
    return f"{list(assignment.replicas)}{adding}{removing}"


class ReplicaFailed(NamedTuple):
    """The broker lives, but the log directory of the replica does not."""

    replica: PartitionReplica

    def __str__(self) -> str:
        return f"replica {self.replica} has lost its log directory"


class ReplicaRecovered(NamedTuple):
    replica: PartitionReplica

    def __str__(self) -> str:
        return f"replica {self.replica} has its log directory again"


class LogEnd(NamedTuple):
    """How a log ends: the leader epoch of its last record, and the next offset. The greater one is the longer log."""

    last_epoch: int
    log_end_offset: int


class LogEndReported(NamedTuple):
    """A replica has said how its log ends. It does not change as long as `leader_epoch`, which has no leader, lasts."""

    replica: PartitionReplica
    leader_epoch: int
    end: LogEnd

    def __str__(self) -> str:
        return f"the log of {self.replica} ends at {self.end.log_end_offset}, in epoch {self.end.last_epoch}"


class DeletionQueued(NamedTuple):
    topic: str

    def __str__(self) -> str:
        return f"topic {self.topic} is to be deleted"


class DeletionIneligible(NamedTuple):
    """The deletion cannot go on until something changes; `reason` says what."""

    topic: str
    reason: str

    def __str__(self) -> str:
        return f"the deletion of topic {self.topic} waits: {self.reason}"


class DeletionAnnounced(NamedTuple):
    """The brokers are about to be told that the topic is gone."""

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


# --- What is read from a topic's configuration -------------------------------------------------------------------


class TopicSettings(NamedTuple):
    """What decides elections: the topic's own setting, or else that of the broker in which the controller runs."""

    unclean_leader_election: bool = False
    min_insync_replicas: int | None = None
    """For a partition that has no state yet. None: by the number of replicas (`model.min_insync_replicas`)."""
    is_synced: bool = False
    """durability=synced. The topic's own alone: it is what the brokers go by."""
    version: int | None = None
    """Of all settings in ZooKeeper (the data version of `/config/changes`) when these were read, where an unclean
    election may be decided by them."""


# --- What is read when office is taken ---------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Everything in ZooKeeper that concerns a controller. What could not be decoded is named, not left out."""

    brokers: Mapping[int, RegisteredBroker]
    topics: Mapping[str, TopicZnode]
    states: Mapping[TopicPartition, LeaderAndIsr]
    topics_to_delete: tuple[str, ...] = ()
    notifications: tuple[str, ...] = ()
    """Paths: of ISR changes, and of failures of log directories."""
    malformed_topics: frozenset[str] = frozenset()
    malformed_states: frozenset[TopicPartition] = frozenset()


# --- The picture ---------------------------------------------------------------------------------------------


class ClusterState:
    """Read by decisions, changed by the executor (`apply`, `move_...`, `leadership`)."""

    def __init__(self, controller_id: int, controller_epoch: int) -> None:
        self.controller_id = controller_id
        self.controller_epoch = controller_epoch
        self.live_brokers: dict[int, RegisteredBroker] = {}
        self.shutting_down_brokers: set[int] = set()
        """Live brokers that are about to stop: they get no leadership, no place in an ISR, and no new replicas. Until
        they are gone, or registered again."""
        self.topic_ids: dict[str, str] = {}
        self.assignments: dict[TopicPartition, tuple[int, ...]] = {}
        """All replicas, also those that a reassignment adds or removes."""
        self.reassigning: dict[TopicPartition, ReplicaAssignment] = {}
        """Of those partitions alone that are being reassigned; `assignments` has the same replicas."""
        self.leadership: dict[TopicPartition, LeaderAndIsr] = {}
        """Only of partitions whose state znode exists and could be read."""
        self.partition_states: dict[TopicPartition, PartitionState] = {}
        self.replica_states: dict[PartitionReplica, ReplicaState] = {}
        self.failed_replicas: set[PartitionReplica] = set()
        self._log_ends: dict[TopicPartition, dict[int, LogEndReported]] = {}
        """For partitions without a leader: by broker, as reported in its present run."""
        self.topics_to_delete: dict[str, None] = {}
        """Queued or under way, in the order of their arrival."""
        self.ineligible_topics: dict[str, str] = {}
        """Those among them that wait, and for what."""
        self.unaware_brokers: dict[str, frozenset[int]] = {}
        """For topics whose deletion has begun: the brokers that have not yet confirmed that they know of it."""
        self._partitions_of: dict[str, tuple[TopicPartition, ...]] = {}
        self._partitions_on: dict[int, dict[TopicPartition, None]] = {}
        self._shown: dict[str, int] = {}
        """See `shown_partitions`. Counted anew after a change, and kept up to date by moves and elections: a topic is
        settled part by part, and counting it for each of them would cost the square of its partitions."""

    # -- queries --

    def partition_state(self, partition: TopicPartition) -> PartitionState:
        return self.partition_states.get(partition, PartitionState.NON_EXISTENT)

    def replica_state(self, replica: PartitionReplica) -> ReplicaState:
        return self.replica_states.get(replica, ReplicaState.NON_EXISTENT)

    def live_broker_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.live_brokers))

    def racks(self) -> dict[int, str | None]:
        """Of the live brokers that are not about to stop, ascending."""
        return {broker_id: self.live_brokers[broker_id].rack for broker_id in self.staying_broker_ids()}

    def assignment(self, partition: TopicPartition) -> ReplicaAssignment:
        return self.reassigning.get(partition) or ReplicaAssignment(self.assignments[partition])

    def is_reassigning(self, topic: str) -> bool:
        """At least one of its partitions is being reassigned."""
        return any(partition.topic == topic for partition in self.reassigning)

    def staying_broker_ids(self) -> tuple[int, ...]:
        """The live brokers that are not about to stop."""
        return tuple(b for b in self.live_broker_ids() if b not in self.shutting_down_brokers)

    def partitions_of(self, topic: str) -> tuple[TopicPartition, ...]:
        return self._partitions_of.get(topic, ())

    def partitions_on(self, broker_id: int) -> tuple[TopicPartition, ...]:
        """Partitions with a replica assigned to the broker."""
        return tuple(self._partitions_on.get(broker_id, ()))

    def shown_partitions(self, topic: str) -> int:
        """How many of the topic's partitions clients are told of: those that have a leader, or had one, or are about to
        get their first. (One whose replicas are all dead, or whose state cannot be read, would keep clients from the
        others.)"""
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
        """Replicas by partition number, ascending."""
        return {partition.partition: self.assignments[partition] for partition in self.partitions_of(topic)}

    def topic_znode(self, topic: str) -> TopicZnode:
        """What its znode should hold."""
        reassigning = {p.partition: self.reassigning[p] for p in self.partitions_of(topic) if p in self.reassigning}
        return TopicZnode(self.topic_ids[topic], self.assignment_of(topic)).reassigned(reassigning)

    def replicas_of(self, topic: str) -> Iterator[PartitionReplica]:
        for partition in self.partitions_of(topic):
            for broker_id in self.assignments[partition]:
                yield PartitionReplica(partition, broker_id)

    def is_live(self, partition: TopicPartition, broker_id: int) -> bool:
        """The broker is up, and so is the replica's log directory."""
        if broker_id not in self.live_brokers:
            return False
        return not self.failed_replicas or (partition, broker_id) not in self.failed_replicas

    def live_replicas(self, partition: TopicPartition) -> tuple[int, ...]:
        """In the order of the assignment."""
        return tuple(b for b in self.assignments[partition] if self.is_live(partition, b))

    def live_brokers_of(self, partition: TopicPartition) -> dict[int, RegisteredBroker]:
        """The brokers of `live_replicas`."""
        return {b: self.live_brokers[b] for b in self.live_replicas(partition)}

    def staying_brokers_of(self, partition: TopicPartition) -> dict[int, RegisteredBroker]:
        """Those of them that are not about to stop."""
        return {b: br for b, br in self.live_brokers_of(partition).items() if b not in self.shutting_down_brokers}

    def log_ends(self, partition: TopicPartition) -> dict[int, LogEnd]:
        """How the logs end of the replicas on live brokers that have reported it since the leader was lost."""
        state = self.leadership.get(partition)
        if state is None or state.leader != NO_LEADER:
            return {}
        reports = self._log_ends.get(partition, {})
        return {b: report.end for b, report in reports.items() if report.leader_epoch == state.leader_epoch}

    def offline_replicas(self, partition: TopicPartition) -> tuple[int, ...]:
        return tuple(b for b in self.assignments[partition] if not self.is_live(partition, b))

    def is_queued_for_deletion(self, topic: str) -> bool:
        """It is about to go, or going. One that is being reassigned is not, though somebody has asked for it: its
        leaders and ISRs are looked after until the reassignment is over."""
        return topic in self.topics_to_delete and not self.is_reassigning(topic)

    def partitions_without_leader(self) -> tuple[TopicPartition, ...]:
        """New and offline partitions, except those of topics to be deleted."""
        return tuple(
            partition
            for partition, state in self.partition_states.items()
            if state in (PartitionState.NEW, PartitionState.OFFLINE)
            and not self.is_queued_for_deletion(partition.topic)
        )

    def offline_partition_count(self) -> int:
        """Kafka's OfflinePartitionsCount: partitions without a live leader, except those to be deleted."""
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
        """Kafka's PreferredReplicaImbalanceCount: partitions that the head of their assignment does not lead, except
        those that never had a leader, and those to be deleted."""
        return sum(
            1
            for partition, current in self.leadership.items()
            if current.leader != self.assignments[partition][0] and not self.is_queued_for_deletion(partition.topic)
        )

    def replica_states_of(self, topic: str) -> frozenset[ReplicaState]:
        """The states that at least one replica of the topic is in."""
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
        """Take over what was read from, or written to, the state znodes."""
        for partition, state in leadership.items():
            if partition in self.assignments:
                with self._recounting(partition):
                    self.leadership[partition] = state
                if state.leader != NO_LEADER:
                    self._log_ends.pop(partition, None)

    @contextmanager
    def _recounting(self, partition: TopicPartition) -> Iterator[None]:
        """Around what may change whether clients are told of the partition."""
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
                # A new run of the broker starts with the directories that it has then.
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
    """Each partition once, by topic and number: plans, requests and logs read the same in every run."""
    return tuple(sorted(dict.fromkeys(partitions)))  # what comes in order, as most does, is sorted in no time
