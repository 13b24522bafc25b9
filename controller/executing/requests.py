"""The cluster state as LeaderAndIsr, UpdateMetadata and StopReplica messages. Pure.

Many partitions are split into several requests of at most MAX_PARTITIONS, since a broker does nothing else while it
handles one. A control request must also fit a frame of 1 MiB (`protocol/connections/framing.py`), by an estimate that
errs on the large side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.decisions.plan import MetadataUpdate, StopReplica
from minibroker.protocol import messages as m
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.model import NO_EPOCH, NO_LEADER, RegisteredBroker, TopicPartition

MAX_PARTITIONS = 100
"""Partitions of one request: the broker must serve its clients between two requests."""
MAX_BODY_BYTES = MAX_SMALL_REQUEST_BYTES * 3 // 4
"""Bytes for partitions; the rest is for the list of brokers."""

_PARTITION_BYTES = 40
_REPLICA_BYTES = 5
_MEMBER_BYTES = 14
"""Bytes of a member of the ISR or an eligible replica, with its broker epoch."""
_TOPIC_BYTES = 40


Described = dict[TopicPartition, m.LeaderAndIsrPartition]
"""The LeaderAndIsr states of partitions, built once since all brokers get the same."""


def leader_and_isr(
    state: ClusterState,
    broker: RegisteredBroker,
    partitions: Sequence[TopicPartition],
    new: frozenset[TopicPartition],
    described: Described,
) -> Iterator[tuple[m.LeaderAndIsrRequest, tuple[TopicPartition, ...]]]:
    """Yield the requests for one broker, each with its partitions. Partitions without a state are left out.
    `described` is filled, and shared by calls for the same cluster state.

    A broker that is shutting down gets no addresses of leaders whose ISR it is not in. So it does not follow them, and
    no leader counts it as caught up."""
    known = [p for p in partitions if p in state.leadership]
    if broker.id in state.shutting_down_brokers:
        followed = [p for p in known if broker.id in state.leadership[p].isr]
        left = [p for p in known if broker.id not in state.leadership[p].isr]
        yield from _leader_and_isr(state, broker, left, new, described, with_addresses=False)
        known = followed
    yield from _leader_and_isr(state, broker, known, new, described)


def _leader_and_isr(
    state: ClusterState,
    broker: RegisteredBroker,
    known: Sequence[TopicPartition],
    new: frozenset[TopicPartition],
    described: Described,
    *,
    with_addresses: bool = True,
) -> Iterator[tuple[m.LeaderAndIsrRequest, tuple[TopicPartition, ...]]]:
    for part in _parts(state, known):
        for partition in part:
            if partition not in described:
                described[partition] = _replica_state(state, partition, new)
        leaders = sorted({state.leader(p) for p in part} - {NO_LEADER}) if with_addresses else []
        request = m.LeaderAndIsrRequest(
            state.controller_id,
            state.controller_epoch,
            broker.epoch,
            [
                m.LeaderAndIsrTopic(topic, state.topic_ids[topic], [described[p] for p in group])
                for topic, group in _by_topic(part)
            ],
            [
                m.LiveLeader(b, e.host, e.port)
                for b in leaders
                if b in state.live_brokers and (e := state.live_brokers[b].data_endpoint) is not None
            ],
        )
        yield request, part


def _replica_state(
    state: ClusterState, partition: TopicPartition, new: frozenset[TopicPartition]
) -> m.LeaderAndIsrPartition:
    current = state.leadership[partition]
    assignment = state.assignment(partition)
    return m.LeaderAndIsrPartition(
        partition.partition,
        current.controller_epoch,
        current.leader,
        current.leader_epoch,
        list(current.isr),
        current.partition_epoch,
        list(assignment.replicas),
        partition in new,
        list(current.isr_epochs),
        list(current.eligible),
        list(current.eligible_epochs),
        list(assignment.adding),
        list(assignment.removing),
        current.to_commit,
    )


def update_metadata(
    state: ClusterState, update: MetadataUpdate
) -> Iterator[Callable[[RegisteredBroker], m.UpdateMetadataRequest]]:
    """Yield a factory for each request of the update. The requests of the brokers differ in the broker epoch only."""
    live = [
        m.UpdateMetadataBroker(
            broker.id,
            [m.UpdateMetadataEndpoint(e.port, e.host, e.listener) for e in broker.endpoints],
            broker.rack,
            broker.epoch,
            broker.id in state.shutting_down_brokers,
        )
        for _, broker in sorted(state.live_brokers.items())
    ]
    deleted = [m.UpdateMetadataTopic(d.topic, d.topic_id, [], True) for d in update.deleted_topics]
    known = [p for p in update.partitions if p in state.leadership]
    parts = list(_parts(state, known))
    if deleted or not parts:
        parts.append(())

    def made_out(
        topics: list[m.UpdateMetadataTopic], *, is_last: bool
    ) -> Callable[[RegisteredBroker], m.UpdateMetadataRequest]:
        names_the_last = update.names_the_last and is_last
        return lambda broker: m.UpdateMetadataRequest(
            state.controller_id, state.controller_epoch, broker.epoch, topics, live, names_the_last=names_the_last
        )

    for number, part in enumerate(parts, 1):
        topics = [
            m.UpdateMetadataTopic(
                topic,
                state.topic_ids[topic],
                [_metadata_state(state, p) for p in group],
                num_partitions=state.shown_partitions(topic),
            )
            for topic, group in _by_topic(part)
        ]
        yield made_out(topics if part else deleted, is_last=number == len(parts))


def _metadata_state(state: ClusterState, partition: TopicPartition) -> m.UpdateMetadataPartition:
    current = state.leadership[partition]
    return m.UpdateMetadataPartition(
        partition.partition,
        current.controller_epoch,
        current.leader,
        current.leader_epoch,
        list(current.isr),
        current.partition_epoch,
        list(state.assignments[partition]),
        list(state.offline_replicas(partition)),
    )


def stop_replica(
    state: ClusterState, broker: RegisteredBroker, stops: Sequence[StopReplica]
) -> Iterator[tuple[m.StopReplicaRequest, tuple[TopicPartition, ...]]]:
    """Yield the requests for one broker, each with its partitions."""
    deleted = {stop.replica.partition: stop.delete for stop in stops}
    for part in _parts(state, sorted(deleted)):
        request = m.StopReplicaRequest(
            state.controller_id,
            state.controller_epoch,
            broker.epoch,
            [
                m.StopReplicaTopic(
                    topic,
                    state.topic_ids[topic],
                    [m.StopReplicaPartition(p.partition, _leader_epoch(state, p), deleted[p]) for p in group],
                )
                for topic, group in _by_topic(part)
            ],
        )
        yield request, part


def _leader_epoch(state: ClusterState, partition: TopicPartition) -> int:
    current = state.leadership.get(partition)
    return current.leader_epoch if current is not None else NO_EPOCH


def _by_topic(partitions: Iterable[TopicPartition]) -> Iterator[tuple[str, list[TopicPartition]]]:
    groups: dict[str, list[TopicPartition]] = {}
    for partition in partitions:
        groups.setdefault(partition.topic, []).append(partition)
    yield from groups.items()


def _parts(state: ClusterState, partitions: Sequence[TopicPartition]) -> Iterator[tuple[TopicPartition, ...]]:
    part: list[TopicPartition] = []
    size = 0
    topic = None
    for partition in partitions:
        replicas = len(state.assignments[partition])
        current = state.leadership.get(partition)
        # The assignment, at most as many offline replicas, the ISR and the eligible replicas.
        on_record = len(current.isr) + len(current.eligible) if current is not None else 0
        cost = _PARTITION_BYTES + _REPLICA_BYTES * 2 * replicas + _MEMBER_BYTES * on_record
        if partition.topic != topic:
            topic = partition.topic
            cost += _TOPIC_BYTES + len(topic)
        if part and (size + cost > MAX_BODY_BYTES or len(part) == MAX_PARTITIONS):
            yield tuple(part)
            part, size = [], 0
            cost += _TOPIC_BYTES + len(topic)
        part.append(partition)
        size += cost
    if part:
        yield tuple(part)
