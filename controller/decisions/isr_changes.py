"""Changes of ISRs by leaders (Kafka's processIsrChangeNotification).

A leader writes the state znode itself and then creates a notification. The controller adopts the state and sends it to
every broker, so that metadata and the next election use the new ISR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.decisions.plan import Plan, PlanBuilder, RemoveNode
from minibroker.protocol.model import LeaderAndIsr, TopicPartition


def changed(
    state: ClusterState,
    read: Mapping[TopicPartition, LeaderAndIsr],
    notifications: Sequence[str],
) -> Plan:
    """Adopt the states `read` and remove the `notifications` (paths) that named their partitions.

    Next comes `settle` for the partitions: a leader may have added a replica whose broker has died since.
    """
    builder = PlanBuilder()
    for path in notifications:
        builder.write(RemoveNode(path))
    known = [p for p in sorted(read) if p in state.leadership and not state.is_queued_for_deletion(p.topic)]
    for partition in known:
        builder.adopt(partition, read[partition])
    if known:
        builder.announce(state.live_brokers, known)
    return builder.build()
