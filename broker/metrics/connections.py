"""The connections of each listener, under the names of Kafka's SocketServer and ConnectionQuotas."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from minibroker.broker.network.server import SocketServer

_PREFIX = "kafka_server_socket_server_metrics_"


def connection_metrics(server: SocketServer) -> Iterator[Metric]:
    labels = ["listener"]
    count = GaugeMetricFamily(f"{_PREFIX}connection_count", "Open connections", labels=labels)
    accepted = CounterMetricFamily(f"{_PREFIX}connection_accept", "Connections accepted", labels=labels)
    delays = SummaryMetricFamily(
        f"{_PREFIX}connection_accept_throttle_time",
        "Milliseconds by which connections over the rate of the listener or the broker were delayed",
        labels=labels,
    )
    address_delays = SummaryMetricFamily(
        f"{_PREFIX}ip_connection_accept_throttle_time",
        "Milliseconds by which connections over the rate of their address were delayed",
        labels=labels,
    )
    for listener, open_now in server.open_connections().items():
        counts = server.metrics.per_listener[listener]
        count.add_metric([listener], open_now)
        accepted.add_metric([listener], counts.accepted)
        for family, measured in ((delays, counts.delays), (address_delays, counts.address_delays)):
            family.add_metric([listener], measured.count, measured.sum_s * 1_000)
    yield from (count, accepted, delays, address_delays)
