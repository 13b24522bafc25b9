"""The broker's connection to ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from minibroker.protocol.model import ZooKeeperContact


def zookeeper_metrics(contact: ZooKeeperContact) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "minibroker_zookeeper_away_seconds",
        "Seconds since the connection to ZooKeeper was lost; 0: there is one",
        contact.away_s or 0.0,
    )
    yield CounterMetricFamily(
        "minibroker_zookeeper_connection_losses",
        "How many times the connection to ZooKeeper was lost, or a ping was not answered in time",
        contact.losses,
    )
