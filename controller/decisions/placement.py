"""Which brokers get the replicas of new partitions (Kafka's AdminUtils.assignReplicasToBrokers, KIP-36).

The aim: leaders and replicas spread evenly over the brokers; the replicas of the partitions that one broker leads
spread over all the others, so that its load spreads evenly too when it dies; and no two replicas of a partition in one
rack as long as there are racks without any, so that the loss of a rack costs each partition one replica at most.

The brokers are put in a row in which racks alternate. Leaders go round that row. The followers of a partition begin at
a distance from its leader that grows by one step, of as many brokers as there are racks, each time the leaders have
gone round; what would be a second replica in a rack is passed over. Where racks do not matter each broker counts as a
rack of its own, so that both cases are one.

Racks count only if every live broker has one (Kafka's RackAwareMode.Safe). Kafka's brokers refuse a mixture; here it
would keep topics from being created, the brokers' own among them, while racks are being introduced broker by broker.

Replicas are even where racks are of one size. If they are not, the brokers of small racks get more of them: that
follows from the rule, and is so in Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from random import Random

Racks = Mapping[int, str | None]
"""The brokers to choose from, and the rack of each."""


def assign_replicas(
    racks: Racks, partitions: int, replication_factor: int, random: Random
) -> dict[int, tuple[int, ...]]:
    """Replicas per partition of a new topic, the preferred leader first. The first leader is a random one.

    `replication_factor` is 1 to the number of brokers.
    """
    row = _Row(racks, replication_factor)
    start, distance = random.randrange(row.length), random.randrange(row.length)
    return {partition: row.replicas(partition, start, distance) for partition in range(partitions)}


def assign_more_replicas(
    racks: Racks, existing: Mapping[int, Sequence[int]], numbers: Sequence[int], random: Random
) -> dict[int, tuple[int, ...]]:
    """Replicas of the partitions `numbers`, which are added to a topic: with as many replicas as partition 0 (or the
    lowest) has, and going on where the `existing` ones end, so that as long as the brokers are the same it comes out
    as if the topic had been created with all of them. `racks`: at least so many brokers."""
    first = existing[min(existing)]
    row = _Row(racks, len(first))
    start = row.position(first[0])
    if start is None:
        start = random.randrange(row.length)
    distances = [d for d in range(row.length) if row.replicas(0, start, d) == tuple(first)]
    distance = distances[0] if distances else random.randrange(row.length)
    return {number: row.replicas(number, start, distance) for number in numbers}


class _Row:
    """Brokers, neighbours in different racks as far as possible."""

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
        """Of the partition with that number, if partition 0 is led by the broker at `start`, and its followers begin at
        `distance`."""
        count = self.length
        leader = (partition + start) % count
        chosen = [self._brokers[leader]]
        used = {self._rack_of[chosen[0]]}
        others = count - 1
        shift = (distance + partition // count) * self._racks
        # Of the other brokers, counted on from the leader's neighbour; each is looked at as often as there are rounds
        # of racks to fill.
        step = 0
        while len(chosen) < self._factor:
            broker_id = self._brokers[(leader + 1 + (shift + step) % others) % count]
            step += 1
            if broker_id in chosen or (self._rack_of[broker_id] in used and len(used) < self._racks):
                continue
            chosen.append(broker_id)
            used.add(self._rack_of[broker_id])
        return tuple(chosen)
