"""Cluster states for tests of decisions, and plans carried out on them as if every write succeeded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import dedent
from types import MappingProxyType

import msgspec

from minibroker.controller.decisions import brokers
from minibroker.controller.decisions.cluster_state import NOT_WRITTEN, ClusterState, Snapshot, in_order
from minibroker.controller.decisions.plan import Plan, WriteState
from minibroker.controller.decisions.states import partition as partition_states
from minibroker.controller.decisions.states import replica as replica_states
from minibroker.controller.decisions.states.machine import check
from minibroker.protocol.model import Endpoint, LeaderAndIsr, RegisteredBroker, TopicPartition
from minibroker.protocol.znodes import TopicZnode

CONTROLLER = 100
EPOCH = 7


def broker(
    broker_id: int, epoch: int | None = None, trusted_since: int = 0, synced_since: int | None = None
) -> RegisteredBroker:
    """Live brokers. Broker 2 has epoch 20 by default."""
    return RegisteredBroker(
        broker_id,
        broker_id * 10 if epoch is None else epoch,
        (
            Endpoint("CONTROLLER", f"host-{broker_id}", 9091),
            Endpoint("PLAINTEXT", f"host-{broker_id}", 9092),
        ),
        trusted_since=trusted_since,
        synced_since=trusted_since if synced_since is None else synced_since,
    )


def partition(name: str) -> TopicPartition:
    """The partition `orders-0`."""
    topic, _, number = name.rpartition("-")
    return TopicPartition(topic, int(number))


def leads(
    leader: int,
    epoch: int,
    isr: Iterable[int],
    version: int = 5,
    controller_epoch: int = 6,
    *,
    epochs: Iterable[int] = (),
    eligible: Mapping[int, int] = MappingProxyType({}),
    to_commit: int = 2,
) -> LeaderAndIsr:
    """A partition state. `epochs` are those of the ISR, `eligible` are replicas with theirs."""
    return LeaderAndIsr(
        leader,
        epoch,
        tuple(isr),
        controller_epoch,
        version,
        tuple(epochs),
        tuple(eligible),
        tuple(eligible.values()),
        to_commit,
    )


def picture(
    live: Iterable[int],
    assignments: Mapping[str, tuple[int, ...]],
    states: Mapping[str, LeaderAndIsr] | None = None,
    to_delete: tuple[str, ...] = (),
) -> ClusterState:
    """The state that a controller has after it took office, before it has settled anything."""
    topics: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, replicas in assignments.items():
        topics.setdefault(partition(name).topic, {})[partition(name).partition] = replicas
    snapshot = Snapshot(
        {broker_id: broker(broker_id) for broker_id in live},
        {topic: TopicZnode(f"id-of-{topic}", partitions) for topic, partitions in topics.items()},
        {partition(name): state for name, state in (states or {}).items()},
        to_delete,
    )
    state = ClusterState(CONTROLLER, EPOCH)
    take_office(state, snapshot)
    return state


def take_office(state: ClusterState, snapshot: Snapshot) -> None:
    carry_out(state, brokers.load(state, snapshot))
    carry_out(state, brokers.initialize(state, snapshot, in_order(state.assignments)))


def carry_out(state: ClusterState, plan: Plan) -> None:
    """Carry the plan out as the executor does if ZooKeeper accepts every write. Fails at an illegal move."""
    for change in plan.changes:
        state.apply(change)
    state.adopt(plan.adopted)
    for write in plan.writes:
        if isinstance(write, WriteState):
            version = 0 if write.state.partition_epoch == NOT_WRITTEN else write.state.partition_epoch + 1
            state.adopt({write.partition: msgspec.structs.replace(write.state, partition_epoch=version)})
    for moved, target in plan.partition_moves:
        current = state.partition_state(moved)
        assert check(partition_states.VALID_PREVIOUS_STATES, current, target), f"{moved}: {current} -> {target}"
        state.move_partition(moved, target)
    for replica, goal in plan.replica_moves:
        position = state.replica_state(replica)
        assert check(replica_states.VALID_PREVIOUS_STATES, position, goal), f"{replica}: {position} -> {goal}"
        state.move_replica(replica, goal)


def lines(plan: Plan) -> list[str]:
    return list(plan.lines())


def text(indented: str) -> list[str]:
    """Return the lines of an indented block, for comparison with `lines`."""
    return dedent(indented).strip().splitlines()
