"""Leaders have changed ISRs (Kafka's processIsrChangeNotification).

A leader writes the state znode itself and then leaves a notification. The controller adopts what it reads and
tells every broker, so that metadata shows the ISR and the next election goes by it.
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
    """`read` are the state znodes of the partitions named in `notifications`, which are paths to be removed.

    `settle` over the partitions comes next: a leader may have added a replica whose broker has died since.
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
