"""Which members of a cluster a command's WHO means, decided from the cluster file and the answers of brokers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minibroker.client.shown import shown
from minibroker.deploy.errors import LaunchError, hidden_from_pytest
from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.plan import OFFSETS_REPLICATION_FACTOR, TRANSACTIONS_REPLICATION_FACTOR
from minibroker.deploy.local.who import (
    ZOOKEEPER,
    AllBrokers,
    BrokerId,
    Controller,
    Coordinated,
    CoordinatorOf,
    Elected,
    FollowerOf,
    LeaderOf,
    Member,
    TransactionsOf,
    ZooKeeperServer,
)
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.protocol.model import (
    INTERNAL_TOPICS,
    NO_LEADER,
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    TopicPartition,
    internal_partition,
)

__tracebackhide__ = hidden_from_pytest

NAMED = 10
"""The most groups or transactional ids that an error names."""


class NotElected(NamedTuple):
    """No broker knows a controller or leader now; there may be one in a moment."""

    reason: str


def named(who: BrokerId | AllBrokers | ZooKeeperServer, cluster: ClusterFile) -> list[Member]:
    """Return the members that the cluster file alone determines. Raises LaunchError if there is no such member."""
    match who:
        case AllBrokers():
            return [entry.id for entry in cluster.brokers]
        case BrokerId(broker_id):
            return [cluster.broker(broker_id).id]
        case ZooKeeperServer():
            if cluster.zookeeper.port is None:
                raise LaunchError(
                    f"the ZooKeeper at {cluster.zookeeper.connect} was not started here: act on it where it runs"
                )
            return [ZOOKEEPER]


def elected(who: Elected, cluster: ClusterFile, view: ClusterView) -> int | NotElected:
    """Return the broker that `view` reports as elected, dead or alive.

    Raises LaunchError if the view cannot say, or if there is no such topic, partition or coordinator.
    """
    match who:
        case Controller():
            if view.controller_id is None:
                return NotElected("no broker knows a controller: see `minibroker status`, and try again")
            return cluster.broker(view.controller_id).id
        case LeaderOf(partition):
            _check_known(view, f"the leader of {partition}")
        case FollowerOf(partition):
            _check_known(view, f"a follower of {partition}")
        case CoordinatorOf(group):
            partition = _coordinated(
                view,
                OFFSETS_TOPIC,
                group,
                f"the group {group!r}",
                f"there is no topic {OFFSETS_TOPIC} yet, so there is no coordinator of {group!r}: it is created when "
                f"as many brokers run as {OFFSETS_REPLICATION_FACTOR} says",
            )
        case TransactionsOf(key):
            partition = _coordinated(
                view,
                TRANSACTIONS_TOPIC,
                key,
                f"the transactional id {key!r}",
                f"no producer has used a transactional id yet, so there is no coordinator of {key!r}: the first one "
                f"creates {TRANSACTIONS_TOPIC}, if as many brokers run as {TRANSACTIONS_REPLICATION_FACTOR} says",
            )
    state = view.partitions.get(partition)
    if state is None:
        raise no_such_partition(partition, view)
    if isinstance(who, FollowerOf):
        followers = (id for id in state.replica_nodes if id != state.leader_id and id in state.isr_nodes)
        follower = next(followers, None)
        if follower is None:
            return NotElected(f"partition {partition} has no follower in sync now: see `minibroker status`")
        return cluster.broker(follower).id
    if state.leader_id == NO_LEADER:
        isr = ", ".join(map(str, state.isr_nodes))
        return NotElected(f"partition {partition} has no leader now: start the brokers of its ISR ({isr})")
    return cluster.broker(state.leader_id).id


def _coordinated(view: ClusterView, topic: str, key: str, sought: str, without: str) -> TopicPartition:
    """Return the partition whose leader coordinates the key. Raises LaunchError, `without` the topic by this text."""
    # FindCoordinator would create the topic, and the answer of a single broker may be old.
    _check_known(view, f"the coordinator of {sought}")
    if not any(name.topic == topic for name in view.partitions):
        raise LaunchError(f"{without}; see `minibroker status`")
    return _of_key(topic, key, view)


def coordinated_in(who: Coordinated, view: ClusterView) -> TopicPartition:
    """Return the partition whose leader coordinates. `elected` has found that leader in this view or an earlier one."""
    if isinstance(who, CoordinatorOf):
        return _of_key(OFFSETS_TOPIC, who.group, view)
    return _of_key(TRANSACTIONS_TOPIC, who.transactional_id, view)


def _of_key(topic: str, key: str, view: ClusterView) -> TopicPartition:
    return TopicPartition(topic, internal_partition(key, sum(name.topic == topic for name in view.partitions)))


def no_such_partition(partition: TopicPartition, view: ClusterView) -> LaunchError:
    """Return the error that names the partitions of the topic; without such a topic, the topics of users."""
    numbers = [name.partition for name in view.partitions if name.topic == partition.topic]
    topics = sorted({name.topic for name in view.partitions} - INTERNAL_TOPICS)
    whole = str(partition)
    if whole in topics:
        known = f"{whole} is a topic, so add the number of a partition, as in {whole}-0"
    elif numbers:
        them = "partition 0" if len(numbers) == 1 else f"partitions {min(numbers)} to {max(numbers)}"
        known = f"{partition.topic} has the {them}"
    elif topics:
        others = len(topics) - NAMED
        known = f"the topics are {', '.join(topics[:NAMED])}" + (f" and {others:,} more" if others > 0 else "")
    else:
        known = "there is no topic yet"
    return LaunchError(
        f"no broker knows a partition {partition}, so nothing was done: {known}; see `minibroker topics list`"
    )


def no_such_name(who: Coordinated, names: Sequence[str]) -> LaunchError:
    """Return the error if no group or producer has the name; these names exist."""
    noun, name, command = _noun(who)
    others = len(names) - NAMED
    known = ", ".join(map(shown, names[:NAMED])) + (f" and {others:,} more" if others > 0 else "")
    return LaunchError(
        f"there is no {noun} {shown(name)}, so nothing was done: "
        + (f"give one of {known}; see `minibroker {command} list`" if names else f"there is no {noun} at all yet")
    )


def unconfirmed(who: Coordinated, broker_id: int, is_paused: bool) -> LaunchError:
    """Return the error if the broker that would coordinate the name does not say whether that exists."""
    noun, name, _ = _noun(who)
    why = "it is paused" if is_paused else "it does not answer"
    return LaunchError(
        f"whether there is a {noun} {shown(name)} is known to broker {broker_id} alone, and {why}, so nothing was "
        f"done: give the broker's id, {broker_id}, or see `minibroker status`"
    )


def _noun(who: Coordinated) -> tuple[str, str, str]:
    """Return what the name names, the name, and the command that lists such names."""
    if isinstance(who, CoordinatorOf):
        return "group", who.group, "groups"
    return "transactional id", who.transactional_id, "transactions"


def _check_known(view: ClusterView, sought: str) -> None:
    if view.is_unknown:
        raise LaunchError(f"no broker answers, so {sought} is unknown: see `minibroker status`")
