"""Controlled shutdown of a broker (Kafka's doControlledShutdown). Pure.

The broker is marked as shutting down in the cluster state until it is gone or registers again. `settle` then gives its
partitions other leaders and removes it from their ISRs (`elections.for_controlled_shutdown`), now and after each
change.

The mark is not in ZooKeeper: the broker sends its request again to the next controller. Leaderships that were moved
stay moved.
"""

from __future__ import annotations

from minibroker.controller.decisions.cluster_state import BrokerShuttingDown, ClusterState
from minibroker.controller.decisions.plan import Plan, PlanBuilder
from minibroker.controller.decisions.states.replica import PartitionReplica
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition


def refusal(state: ClusterState, broker_id: int, broker_epoch: int) -> BrokerError | None:
    """Return why the broker with that epoch cannot be shut down in this way, or None if it can."""
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
    """Inform all brokers first: from then on, leaders do not add the broker to ISRs.

    Next the states of `out_of_sync` are read again, then come `settle` for the broker's partitions and
    `stop_following`.
    """
    builder = PlanBuilder()
    builder.change(BrokerShuttingDown(broker_id))
    builder.announce(state.live_brokers, ())
    return builder.build()


def out_of_sync(state: ClusterState, broker_id: int) -> list[TopicPartition]:
    """Return the partitions whose known ISR lacks the broker. Leaders may have added it without a notification yet."""
    return [
        p for p in state.partitions_on(broker_id) if p in state.leadership and broker_id not in state.leadership[p].isr
    ]


def stop_following(state: ClusterState, broker_id: int) -> Plan:
    """Stop the broker's fetching of partitions whose ISR it is not in, so that no leader counts it as caught up."""
    builder = PlanBuilder()
    for partition in state.partitions_on(broker_id):
        known = state.leadership.get(partition)
        if known is None or state.is_queued_for_deletion(partition.topic):
            continue
        if broker_id not in (known.leader, *known.isr):
            builder.stop(PartitionReplica(partition, broker_id), delete=False)
    return builder.build()


def remaining(state: ClusterState, broker_id: int) -> list[TopicPartition]:
    """Return the partitions that remain with the broker, in order: it leads them as the only replica in sync, or their
    ISR would be too small without it. Topics that are being deleted do not count."""
    return sorted(
        partition
        for partition in state.partitions_on(broker_id)
        if partition in state.leadership
        and not state.is_queued_for_deletion(partition.topic)
        and broker_id in (state.leader(partition), *_isr_with_a_leader(state, partition))
    )


def _isr_with_a_leader(state: ClusterState, partition: TopicPartition) -> tuple[int, ...]:
    """Return the ISR, or nothing if there is no live leader: then the partition loses nothing by the shutdown."""
    known = state.leadership[partition]
    return known.isr if state.is_live(partition, known.leader) else ()
