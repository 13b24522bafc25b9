"""Exports what a broker knows of transactions: as their coordinator, and as the leader of partitions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.transactions.coordination import TransactionCoordination
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.verification import TransactionVerifier

PREFIX = "minibroker_transaction_coordinator_"


def coordinator_metrics(transactions: TransactionCoordination) -> Iterator[Metric]:
    """Return the metrics of the transactional ids that this broker coordinates."""
    terms, coordinator, upkeep = transactions.terms, transactions.coordinator, transactions.upkeep
    counts = dict.fromkeys(TransactionState, 0)
    for term in terms.loaded():
        for coordinated in term.ids.values():
            if coordinated.current is not None:
                counts[coordinated.current.state] += 1
    states = GaugeMetricFamily(f"{PREFIX}ids", "Transactional ids coordinated here, by state", labels=["state"])
    for state, count in counts.items():
        if state is not TransactionState.DEAD:
            states.add_metric([state.value], count)
    yield states
    for name, documentation, count in (
        ("committed", "Transactions committed", coordinator.committed),
        ("aborted", "Transactions aborted", coordinator.aborted),
        ("timed_out", "Transactions aborted because they were open for too long", upkeep.timed_out),
        ("expired_ids", "Transactional ids forgotten because they were unused", upkeep.expired),
        (
            "marker_failures",
            "Markers that a partition's leader did not write; all are sent again",
            transactions.markers.failed,
        ),
    ):
        yield CounterMetricFamily(PREFIX + name, documentation, count)
    load = SummaryMetricFamily(
        "kafka_server_transaction_coordinator_metrics_partition_load_time_ms",
        "Milliseconds until this broker had loaded the transactional ids of a partition that it began to lead",
    )
    load.add_metric([], terms.loads, terms.load_s * 1_000)
    yield load


def leader_metrics(replicas: ReplicaManager, verifier: TransactionVerifier, late_since_ms: int) -> Iterator[Metric]:
    """Return the metrics of transactions in the logs that this broker leads. A transaction is late if its producer has
    written nothing since `late_since_ms`."""
    yield CounterMetricFamily(
        "kafka_server_addpartitionstotxnmanager_verificationfailure",
        "Questions of this leader to coordinators whether a transaction may write here, that were refused or not "
        "answered",
        verifier.refused + verifier.failed,
    )
    led = [partition for partition in replicas.partitions.values() if partition.is_leader]
    yield GaugeMetricFamily(
        "kafka_server_replicamanager_partitionswithlatetransactionscount",
        "Partitions led here with a transaction that is open for longer than transaction.max.timeout.ms and 5 minutes: "
        "`minibroker transactions find-hanging`",
        sum(partition.log.has_late_transaction(late_since_ms) for partition in led),
    )
