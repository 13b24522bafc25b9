"""Which brokers get the replicas of a new topic (Kafka's AdminUtils.assignReplicasToBrokersRackUnaware).

The aim: leaders and replicas spread evenly over the brokers, and the replicas of the partitions that one broker
leads spread over all the others, so that its load spreads evenly too when it dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def assign_replicas(
    broker_ids: Sequence[int], partitions: int, replication_factor: int, random: Random
) -> dict[int, tuple[int, ...]]:
    """Replicas per partition, the preferred leader first.

    Leaders go round the brokers, beginning at a random one. The followers of a partition are at a distance from its
    leader that grows by one each time the leaders have gone round. `replication_factor` is 1 to the number of brokers.
    """
    brokers = sorted(broker_ids)
    count = len(brokers)
    assert 1 <= replication_factor <= count, f"{replication_factor} replicas cannot go on {count} brokers"
    start = random.randrange(count)
    distance = random.randrange(count)
    assignment = {}
    for partition in range(partitions):
        if partition > 0 and partition % count == 0:
            distance += 1
        leader = (partition + start) % count
        # Of the count - 1 other brokers, counted on from the leader's neighbour, each follower takes the next one.
        followers = ((leader + 1 + (distance + n) % (count - 1)) % count for n in range(replication_factor - 1))
        assignment[partition] = (brokers[leader], *(brokers[f] for f in followers))
    return assignment
