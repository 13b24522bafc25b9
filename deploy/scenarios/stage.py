"""The interface between the director and a cluster, virtual or real."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from minibroker.deploy.local.who import (
    AllBrokers,
    BrokerId,
    Controller,
    Coordinated,
    CoordinatorOf,
    FollowerOf,
    LeaderOf,
    Member,
    TransactionsOf,
    ZooKeeperServer,
)
from minibroker.deploy.scenarios.ledger import Ledger
from minibroker.deploy.scenarios.model import SETTINGS, Client, Scenario
from minibroker.deploy.scenarios.words import Action, Bystander, Event, Named, Target
from minibroker.protocol.model import NO_LEADER, OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from minibroker.protocol.world import World

T = TypeVar("T")


class State(NamedTuple):
    leader: int | None
    isr: tuple[int, ...]
    replicas: tuple[int, ...]


class Picture(NamedTuple):
    """The cluster as ZooKeeper or its brokers describe it."""

    partitions: Mapping[TopicPartition, State]
    controller: int | None
    brokers: frozenset[int]
    """The registered brokers."""


class NoSuchMember(Exception):
    """The target names no broker at the moment. The text says why."""


class Stage(Protocol):
    """A cluster that runs, and its clients."""

    runner: str
    bootstrap: str
    broker_ids: tuple[int, ...]

    def now_s(self) -> float: ...

    async def picture(self) -> Picture: ...

    async def run(self, program: Callable[[World | None], Awaitable[T]]) -> T:
        """Run a program as a client of its own."""
        ...

    def start_client(self, client: Client, ledger: Ledger) -> None: ...

    def kill_client(self, name: str, ledger: Ledger) -> None: ...

    async def act(self, action: Action, members: Sequence[Member]) -> None:
        """Do it to these members, which the director has found."""
        ...

    async def moment(self, event: Event, within_s: float) -> str | None:
        """Wait for a moment, and return what happened before anything reacts to it; None if it did not come."""
        ...

    async def restore(self) -> None:
        """Undo all faults, and start what is gone."""
        ...

    def notes(self) -> list[tuple[float, str]]:
        """Return what happened by itself, as brokers that ended, with times."""
        ...


def cluster_settings(scenario: Scenario) -> dict[str, str]:
    factor = str(min(3, scenario.brokers))
    replication = {"offsets.topic.replication.factor": factor, "transaction.state.log.replication.factor": factor}
    if scenario.brokers < 2:
        replication["transaction.state.log.min.isr"] = "1"
    return {**SETTINGS, **replication, **scenario.settings}


def resolve(target: Target, picture: Picture, brokers: Sequence[int], names: Mapping[str, Member]) -> list[Member]:
    """Return the members that a target means now. Raises NoSuchMember."""
    match target:
        case AllBrokers():
            return list(brokers)
        case ZooKeeperServer():
            return ["zookeeper"]
        case Named(name):
            if name not in names:
                raise NoSuchMember(f"the step that gives the name {name} hit no broker")
            return [names[name]]
        case BrokerId(broker_id):
            if broker_id not in brokers:
                raise NoSuchMember(f"there is no broker {broker_id}: the brokers are 1 to {max(brokers)}")
            return [broker_id]
        case Controller():
            if picture.controller is None:
                raise NoSuchMember("there is no controller now: wait with when before this step")
            return [picture.controller]
        case Bystander():
            return [next(broker for broker in brokers if broker != picture.controller)]
        case LeaderOf(partition):
            return [_leader(picture, partition)]
        case CoordinatorOf() | TransactionsOf():
            return [_leader(picture, coordinated_in(target, picture))]
        case FollowerOf(partition):
            state = _state(picture, partition)
            followers = [broker for broker in state.replicas if broker != state.leader and broker in state.isr]
            if not followers:
                raise NoSuchMember(f"{partition} has no follower in sync now")
            return [followers[0]]


def _state(picture: Picture, partition: TopicPartition) -> State:
    if partition not in picture.partitions:
        raise NoSuchMember(f"there is no partition {partition}")
    return picture.partitions[partition]


def _leader(picture: Picture, partition: TopicPartition) -> int:
    leader = _state(picture, partition).leader
    if leader in (None, NO_LEADER):
        raise NoSuchMember(f"{partition} has no leader now: wait with when before this step")
    assert leader is not None
    return leader


def coordinated_in(who: Coordinated, picture: Picture) -> TopicPartition:
    """Return the partition whose leader coordinates. Raises NoSuchMember."""
    if isinstance(who, CoordinatorOf):
        return _internal(picture, OFFSETS_TOPIC, who.group)
    return _internal(picture, TRANSACTIONS_TOPIC, who.transactional_id)


def _internal(picture: Picture, topic: str, key: str) -> TopicPartition:
    partitions = sum(partition.topic == topic for partition in picture.partitions)
    if not partitions:
        raise NoSuchMember(f"there is no coordinator of {key} yet: {topic} does not exist")
    return TopicPartition(topic, internal_partition(key, partitions))
