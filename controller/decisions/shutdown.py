"""A broker asks for a controlled shutdown (Kafka's doControlledShutdown). Pure.

From then on it is in the picture as one that is shutting down, and everything that is decided goes by that: `settle`
gives its partitions other leaders and takes it out of their ISRs (`elections.for_controlled_shutdown`), now and
whenever something changes, until it is gone. A broker that registers again is another one, and is not shutting down.

Nothing of this is in ZooKeeper: the next controller does not know of it, and the broker asks that one again. What has
been moved stays moved.
"""

from __future__ import annotations

from minibroker.controller.decisions.cluster_state import BrokerShuttingDown, ClusterState
from minibroker.controller.decisions.plan import Plan, PlanBuilder
from minibroker.controller.decisions.states.replica import PartitionReplica
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition


def refusal(state: ClusterState, broker_id: int, broker_epoch: int) -> BrokerError | None:
    """Why that run of the broker cannot be shut down in this way; None: it can."""
    broker = state.live_brokers.get(broker_id)
    if broker is not None and broker_epoch < broker.epoch:
        return BrokerError(
            ErrorCode.STALE_BROKER_EPOCH,
            f"broker {broker_id} of epoch {broker_epoch} is gone: it has registered again, with epoch {broker.epoch}",
        )
    if broker is None or broker_epoch > broker.epoch:
        return BrokerError(
            ErrorCode.BROKER_NOT_AVAILABLE, f"the controller does not know broker {broker_id} of epoch {broker_epoch}"
        )
    return None


def begin(state: ClusterState, broker_id: int) -> Plan:
    """All brokers hear of it before anything else: leaders take the broker into no ISR from then on.

    What is in ZooKeeper of `out_of_sync` comes next, then `settle` over its partitions, then `stop_following`.
    """
    builder = PlanBuilder()
    builder.change(BrokerShuttingDown(broker_id))
    builder.announce(state.live_brokers, ())
    return builder.build()


def out_of_sync(state: ClusterState, broker_id: int) -> list[TopicPartition]:
    """The partitions whose ISR lacks the broker, as far as is known: leaders may have taken it in just now, and
    announce that a moment later."""
    return [
        p for p in state.partitions_on(broker_id) if p in state.leadership and broker_id not in state.leadership[p].isr
    ]


def stop_following(state: ClusterState, broker_id: int) -> Plan:
    """The broker stops fetching where nobody counts on it any more: else a leader might wait for it as one that has
    caught up."""
    builder = PlanBuilder()
    for partition in state.partitions_on(broker_id):
        known = state.leadership.get(partition)
        if known is None or state.is_queued_for_deletion(partition.topic):
            continue
        if broker_id not in (known.leader, *known.isr):
            builder.stop(PartitionReplica(partition, broker_id), delete=False)
    return builder.build()


def remaining(state: ClusterState, broker_id: int) -> list[TopicPartition]:
    """The partitions that remain with the broker, in order: it leads them, as the only one in sync, or their ISR would
    be too small without it. Those of topics that are being deleted do not count."""
    return sorted(
        partition
        for partition in state.partitions_on(broker_id)
        if partition in state.leadership
        and not state.is_queued_for_deletion(partition.topic)
        and broker_id in (state.leader(partition), *_isr_with_a_leader(state, partition))
    )


def _isr_with_a_leader(state: ClusterState, partition: TopicPartition) -> tuple[int, ...]:
    """Where there is no leader, a broker that goes takes nothing away."""
    known = state.leadership[partition]
    return known.isr if state.is_live(partition, known.leader) else ()
