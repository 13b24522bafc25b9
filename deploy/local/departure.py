"""How the replicas of a broker that is removed spread over the others. Pure.

Each replica is replaced where it stands in its partition's list, so that a preferred leader is replaced by another one.
The broker with the fewest replicas takes it; a preferred leader goes to the broker that is preferred by the fewest.
Other replicas do not move. Rejected: a new assignment of everything, which `minibroker reassign generate` makes; it
would copy data that can stay where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.topics import PartitionDescription
from minibroker.deploy.errors import LaunchError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import all_of, counted, listed

NAMED = 5


class Departure(NamedTuple):
    """What is left to do before the broker has no replicas."""

    moves: dict[TopicPartition, tuple[int, ...]]
    """The replicas of partitions whose reassignment has not begun."""
    in_progress: tuple[TopicPartition, ...]
    """Partitions that are leaving it already."""

    @property
    def is_over(self) -> bool:
        return not self.moves and not self.in_progress


def departure(
    leaving: int,
    partitions: Mapping[TopicPartition, PartitionDescription],
    reassigned: Mapping[TopicPartition, PartitionReassignment],
    live: Collection[int],
    known: Collection[int],
) -> Departure:
    """Decide where the replicas go.

    `live` are the registered brokers, `known` all brokers of the cluster. Raises LaunchError if the others cannot
    carry them.
    """
    others = sorted({*live, *known} - {leaving})
    if not others:
        raise LaunchError(
            f"broker {leaving} is the only one: add another with `minibroker brokers add`, or stop the cluster with "
            "`minibroker down`"
        )
    targets = {name: _target(one.replicas, reassigned.get(name)) for name, one in partitions.items()}
    concerned = sorted(name for name, target in targets.items() if leaving in target)
    _check_replication(leaving, others, {name: targets[name] for name in concerned})
    _check_sources(leaving, live, {name: partitions[name] for name in concerned})
    replicas = Counter(broker for target in targets.values() for broker in target)
    preferred = Counter(target[0] for target in targets.values() if target)
    moves: dict[TopicPartition, tuple[int, ...]] = {}
    for name in concerned:
        target = targets[name]
        candidates = [broker for broker in others if broker in live and broker not in target]
        if not candidates:
            dead = [broker for broker in others if broker not in live]
            raise LaunchError(
                f"the replica of {name} on broker {leaving} cannot move, as {all_of('broker', dead)} of the others "
                f"{'is' if len(dead) == 1 else 'are'} not alive: `minibroker start all` first"
            )
        is_preferred = target[0] == leaving
        chosen = min(candidates, key=lambda broker: (preferred[broker] if is_preferred else 0, replicas[broker]))
        replicas[chosen] += 1
        preferred[chosen] += is_preferred
        moves[name] = tuple(chosen if broker == leaving else broker for broker in target)
    going = (name for name, one in partitions.items() if leaving in one.replicas and leaving not in targets[name])
    return Departure(moves, tuple(sorted(going)))


def _target(replicas: Iterable[int], reassigned: PartitionReassignment | None) -> tuple[int, ...]:
    removing = () if reassigned is None else reassigned.removing_replicas
    return tuple(broker for broker in replicas if broker not in removing)


def _check_replication(
    leaving: int, others: Collection[int], targets: Mapping[TopicPartition, Collection[int]]
) -> None:
    factors = {name.topic: len(target) for name, target in targets.items() if len(target) > len(others)}
    if not factors:
        return
    topics = [*list(factors)[:NAMED], *([f"{len(factors) - NAMED:,} more topics"] if len(factors) > NAMED else [])]
    raise LaunchError(
        f"broker {leaving} cannot be removed: {counted(len(others), 'broker')} would remain, and {listed(topics)} "
        f"{'has' if len(factors) == 1 else 'have'} up to {max(factors.values())} replicas of each partition: first add "
        "a broker with `minibroker brokers add`, or lower the number of replicas with `minibroker reassign generate "
        f"--brokers {','.join(map(str, others))} --replication-factor {len(others)} --topic {next(iter(factors))}`"
    )


def _check_sources(
    leaving: int, live: Collection[int], partitions: Mapping[TopicPartition, PartitionDescription]
) -> None:
    """A partition without a leader cannot be copied."""
    stuck = [str(name) for name, one in partitions.items() if one.leader is None]
    if stuck:
        shown = listed([*stuck[:NAMED], *([f"{len(stuck) - NAMED:,} more"] if len(stuck) > NAMED else [])])
        remedy = (
            "`minibroker status` names the brokers to start"
            if leaving in live
            else f"`minibroker start {leaving}` first, if it has the last replica in sync"
        )
        raise LaunchError(f"{shown} cannot move away from broker {leaving} without a leader: {remedy}")
