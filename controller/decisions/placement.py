"""The assignment of replicas of new partitions to brokers (Kafka's AdminUtils.assignReplicasToBrokers, KIP-36).

The aims: leaders and replicas are spread evenly over the brokers. The followers of the partitions that one broker leads
are spread over all the others, so that its load is too when it dies. No rack gets a second replica of a partition while
another rack has none, so that the loss of a rack costs each partition at most one replica.

The brokers form a row in which racks alternate. Leaders go round that row. The followers of a partition begin at a
distance from its leader; each time the leaders have gone round, the distance grows by as many brokers as there are
racks. A broker that would hold a second replica in its rack is skipped. Without racks, each broker counts as a rack of
its own.

Racks count only if every live broker has one (Kafka's RackAwareMode.Safe). Kafka's brokers reject a mixture. That would
prevent the creation of topics, the brokers' own included, while racks are introduced broker by broker.

Replicas are even if racks have equal sizes. Otherwise the brokers of small racks get more replicas, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from random import Random

Racks = Mapping[int, str | None]
"""The rack of each available broker."""


def assign_replicas(
    racks: Racks, partitions: int, replication_factor: int, random: Random
) -> dict[int, tuple[int, ...]]:
    """Return the replicas of each partition of a new topic, the preferred leader first. The first leader is random.

    `replication_factor` is between 1 and the number of brokers.
    """
    row = _Row(racks, replication_factor)
    start, distance = random.randrange(row.length), random.randrange(row.length)
    return {partition: row.replicas(partition, start, distance) for partition in range(partitions)}


def assign_more_replicas(
    racks: Racks, existing: Mapping[int, Sequence[int]], numbers: Sequence[int], random: Random
) -> dict[int, tuple[int, ...]]:
    """Return the replicas of the partitions `numbers`, which are added to a topic. They have as many replicas as
    partition 0 (or the lowest), which needs that many brokers in `racks`. The row continues after the `existing`
    partitions: with the same brokers, the result is as if the topic had been created with all partitions."""
    first = existing[min(existing)]
    row = _Row(racks, len(first))
    start = row.position(first[0])
    if start is None:
        start = random.randrange(row.length)
    distances = [d for d in range(row.length) if row.replicas(0, start, d) == tuple(first)]
    distance = distances[0] if distances else random.randrange(row.length)
    return {number: row.replicas(number, start, distance) for number in numbers}


class _Row:
    """The brokers in a row, with neighbours in different racks as far as possible."""

    def __init__(self, racks: Racks, replication_factor: int) -> None:
        assert 1 <= replication_factor <= len(racks), f"{replication_factor} replicas cannot go on {len(racks)} brokers"
        known = {broker_id: rack for broker_id, rack in racks.items() if rack is not None}
        self._rack_of = known if len(known) == len(racks) else {broker_id: f"{broker_id:10}" for broker_id in racks}
        self._factor = replication_factor
        in_rack: dict[str, list[int]] = {}
        for broker_id in sorted(racks):
            in_rack.setdefault(self._rack_of[broker_id], []).append(broker_id)
        self._racks = len(in_rack)
        rounds = zip_longest(*(in_rack[rack] for rack in sorted(in_rack)))
        self._brokers = [broker_id for one_of_each in rounds for broker_id in one_of_each if broker_id is not None]

    @property
    def length(self) -> int:
        return len(self._brokers)

    def position(self, broker_id: int) -> int | None:
        return self._brokers.index(broker_id) if broker_id in self._brokers else None

    def replicas(self, partition: int, start: int, distance: int) -> tuple[int, ...]:
        """Return the replicas of a partition, if partition 0 is led by the broker at `start` and its followers begin at
        `distance`."""
        count = self.length
        leader = (partition + start) % count
        chosen = [self._brokers[leader]]
        used = {self._rack_of[chosen[0]]}
        others = count - 1
        shift = (distance + partition // count) * self._racks
        # Goes round the other brokers, from the leader's neighbour, once for each round of racks to fill.
        step = 0
        while len(chosen) < self._factor:
            broker_id = self._brokers[(leader + 1 + (shift + step) % others) % count]
            step += 1
            if broker_id in chosen or (self._rack_of[broker_id] in used and len(used) < self._racks):
                continue
            chosen.append(broker_id)
            used.add(self._rack_of[broker_id])
        return tuple(chosen)
