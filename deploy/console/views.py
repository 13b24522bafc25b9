"""What the pages show of the cluster, as values. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from minibroker.client.administering.topics import PartitionDescription, TopicDescription
from minibroker.deploy.console.state import ClusterState
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import all_of

T = TypeVar("T")

PARTITIONS_A_PAGE = 100
TROUBLES_SHOWN = 10


class Query(NamedTuple):
    """What the reader of a page chose, in its address."""

    topic: str = ""
    group: str = ""
    page: int = 1
    internal: bool = False


class BrokerView(NamedTuple):
    id: int
    address: str
    """Empty: it is not alive, so nobody knows."""
    state: str
    """"alive", "silent" (registered, but it does not answer) or "dead"."""
    is_controller: bool
    leads: int
    in_sync: int
    """Replicas of which it is an in-sync one."""
    out_of_sync: int


class Cell(NamedTuple):
    """A partition's replica on a broker."""

    role: str
    """"leader", "in sync", "out of sync", or empty if the broker has no replica."""
    behind: int | None
    """Committed records that the replica lacks. None: unknown."""


class PartitionView(NamedTuple):
    name: TopicPartition
    cells: tuple[Cell, ...]
    """By broker, in the order of the brokers."""
    end: int | None
    leader_epoch: int
    trouble: str
    """The first of TROUBLES that holds; empty if none does."""
    detail: str


class Overview(NamedTuple):
    cluster_id: str
    controller: str
    brokers: tuple[BrokerView, ...]
    partitions: tuple[PartitionView, ...]
    """Those of this page."""
    page: int
    pages: int
    selected: int
    """Partitions that the query selects, on all pages."""
    internal: int
    """Partitions of internal topics."""
    troubles: tuple[PartitionView, ...]
    """Some of those in trouble, in the order of TROUBLES, and those of internal topics last."""
    trouble_counts: tuple[tuple[str, int], ...]
    """Of all partitions."""


NO_LEADER, SILENT_LEADER = "no leader", "leader does not answer"
UNDER_MIN_ISR, OUT_OF_SYNC = "under min.insync.replicas", "out of sync"
TROUBLES = (NO_LEADER, SILENT_LEADER, UNDER_MIN_ISR, OUT_OF_SYNC)
"""The worst first."""


def overview(state: ClusterState, query: Query) -> Overview:
    ids = broker_ids(state)
    everything = [(topic, each) for topic in state.topics.values() for each in topic.partitions]
    chosen = [
        pair
        for pair in everything
        if (pair[0].name == query.topic if query.topic else query.internal or not pair[0].is_internal)
    ]
    page, pages, shown = page_of(chosen, query.page, PARTITIONS_A_PAGE)
    troubles = {TopicPartition(topic.name, each.partition): _trouble(state, topic, each) for topic, each in everything}
    counts = Counter(troubles.values())

    def urgency(pair: tuple[TopicDescription, PartitionDescription]) -> tuple[int, bool]:
        topic, each = pair
        return TROUBLES.index(troubles[TopicPartition(topic.name, each.partition)]), topic.is_internal

    troubled = sorted(
        (pair for pair in everything if troubles[TopicPartition(pair[0].name, pair[1].partition)]), key=urgency
    )
    described = state.description
    return Overview(
        described.cluster_id or "",
        "none" if described.controller_id is None else f"broker {described.controller_id}",
        tuple(_broker(state, broker_id) for broker_id in ids),
        tuple(_partition(state, ids, *pair) for pair in shown),
        page,
        pages,
        len(chosen),
        sum(topic.is_internal for topic, _ in everything),
        tuple(_partition(state, ids, *pair) for pair in troubled[:TROUBLES_SHOWN]),
        tuple((trouble, counts[trouble]) for trouble in TROUBLES if counts[trouble]),
    )


def broker_ids(state: ClusterState) -> list[int]:
    """Return the live brokers, and dead ones that have replicas."""
    with_replicas = {b for topic in state.topics.values() for each in topic.partitions for b in each.replicas}
    return sorted(with_replicas.union(broker.id for broker in state.description.brokers))


def page_of(items: Sequence[T], page: int, size: int) -> tuple[int, int, Sequence[T]]:
    """Return the page that there is, from 1, the number of pages, and the page's items."""
    pages = max(1, -(-len(items) // size))
    page = min(max(1, page), pages)
    return page, pages, items[(page - 1) * size : page * size]


def _broker(state: ClusterState, broker_id: int) -> BrokerView:
    alive = {broker.id: broker for broker in state.description.brokers}
    replicas = [each for topic in state.topics.values() for each in topic.partitions if broker_id in each.replicas]
    in_sync = sum(broker_id in each.isr for each in replicas)
    broker = alive.get(broker_id)
    return BrokerView(
        broker_id,
        "" if broker is None else f"{broker.host}:{broker.port}",
        "dead" if broker is None else "alive" if broker_id in state.behind else "silent",
        state.description.controller_id == broker_id,
        sum(each.leader == broker_id for each in replicas),
        in_sync,
        len(replicas) - in_sync,
    )


def _partition(
    state: ClusterState, ids: Iterable[int], topic: TopicDescription, described: PartitionDescription
) -> PartitionView:
    name = TopicPartition(topic.name, described.partition)
    trouble = _trouble(state, topic, described)
    missing = sorted(set(described.replicas) - set(described.isr))
    details = [all_of("broker", missing)] if missing else []
    if trouble != OUT_OF_SYNC:
        details = [f"{OUT_OF_SYNC}: {text}" for text in details]
    if trouble == UNDER_MIN_ISR:
        details.insert(0, f"{len(described.isr)} in sync, {_min_isr(state, topic, described)} required")
    return PartitionView(
        name,
        tuple(_cell(state, name, described, broker_id) for broker_id in ids),
        state.ends.get(name),
        described.leader_epoch,
        trouble,
        "; ".join(details),
    )


def _cell(state: ClusterState, name: TopicPartition, described: PartitionDescription, broker_id: int) -> Cell:
    if broker_id not in described.replicas:
        return Cell("", None)
    behind = state.behind.get(broker_id, {}).get(name)
    if broker_id == described.leader:
        return Cell("leader", None)
    return Cell("in sync" if broker_id in described.isr else OUT_OF_SYNC, None if behind == -1 else behind)


def _trouble(state: ClusterState, topic: TopicDescription, described: PartitionDescription) -> str:
    if described.leader is None:
        return NO_LEADER
    if described.leader not in state.behind:
        return SILENT_LEADER
    if len(described.isr) < _min_isr(state, topic, described):
        return UNDER_MIN_ISR
    return OUT_OF_SYNC if len(described.isr) < len(described.replicas) else ""


def _min_isr(state: ClusterState, topic: TopicDescription, described: PartitionDescription) -> int:
    return min(state.min_isr.get(topic.name, 0), len(described.replicas))
