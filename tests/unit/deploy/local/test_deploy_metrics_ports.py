"""Where the brokers of a local cluster serve their metrics."""

from __future__ import annotations

import socket

from minibroker.deploy.local.cluster_file import BrokerEntry
from minibroker.deploy.local.local_cluster import METRICS_PORT_DISTANCE, _metrics_ports
from minibroker.deploy.local.ports import LOOPBACK, free_ports, lowest_source_port


def test_metrics_stay_where_they_were_and_one_port_that_is_taken_moves_no_other() -> None:
    first = free_ports(3)[0]
    known = free_ports(3, avoid=range(first, first + 3))
    before = [BrokerEntry(number + 1, first + number, metrics_port=port) for number, port in enumerate(known)]
    assert _metrics_ports(first, 3, before) == known
    with socket.create_server((LOOPBACK, known[1])):
        moved = _metrics_ports(first, 3, before)
    assert (moved[0], moved[2]) == (known[0], known[2])
    assert moved[1] not in {*known, *range(first, first + 3)}
    more = _metrics_ports(first, 4, before)
    assert more[:3] == known
    assert more[3] not in {*known, *range(first, first + 4)}
    usual = first + METRICS_PORT_DISTANCE
    assert usual + 3 > lowest_source_port() or _metrics_ports(first, 3, ())[0] in (usual, *range(1, 65_536))
