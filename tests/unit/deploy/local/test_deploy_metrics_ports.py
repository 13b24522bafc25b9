"""The ports on which the brokers of a local cluster serve their metrics."""

from __future__ import annotations

import socket
from collections.abc import Collection

from minibroker.deploy.local.cluster_file import BrokerEntry
from minibroker.deploy.local.plan import ChoosePort, metrics_ports
from minibroker.deploy.local.ports import LOOPBACK, PortLeases, free_ports, lowest_source_port

ANOTHER = 20_000


def chooser(*taken: int) -> ChoosePort:
    def choose(preferred: int | None, avoid: Collection[int]) -> int:
        if preferred is not None and preferred not in taken:
            return preferred
        return next(port for port in range(ANOTHER, 65_536) if port not in avoid)

    return choose


def test_metrics_stay_where_they_were_and_one_port_that_is_taken_moves_no_other() -> None:
    before = [BrokerEntry(number + 1, 9092 + number, metrics_port=11_000 + number) for number in range(3)]
    assert metrics_ports(9092, [1, 2, 3], before, chooser()) == {1: 11_000, 2: 11_001, 3: 11_002}
    assert metrics_ports(9092, [1, 2, 3], before, chooser(11_001)) == {1: 11_000, 2: ANOTHER, 3: 11_002}
    assert metrics_ports(9092, [1, 2, 3, 4], before, chooser()) == {1: 11_000, 2: 11_001, 3: 11_002, 4: 10_095}
    assert metrics_ports(9092, [1, 3], before, chooser()) == {1: 11_000, 3: 11_002}, "broker 2 was removed"


def test_new_metrics_ports_are_1000_above_the_brokers_unless_one_is_taken() -> None:
    assert metrics_ports(9092, [1, 2, 3], (), chooser(10_093)) == {1: 10_092, 2: ANOTHER, 3: 10_094}
    before = [BrokerEntry(1, 9092, metrics_port=10_093)]
    assert metrics_ports(9092, [1, 2], before, chooser()) == {1: 10_093, 2: ANOTHER}


def test_a_port_is_chosen_if_it_is_free_and_the_kernel_does_not_give_it_away() -> None:
    [free] = free_ports(1)
    ours, others = PortLeases(), PortLeases()
    assert ours.choose(free, ()) == free
    assert others.choose(free, ()) != free, "leased while nothing listens"
    ours.release()
    with socket.create_server((LOOPBACK, free)):
        assert ours.choose(free, [free]) != free
    assert ours.choose(lowest_source_port(), ()) < lowest_source_port()
    ours.keep([free, free])
    assert others.choose(free, ()) != free
    for each in (ours, others):
        each.release()
    assert others.choose(free, ()) == free
    others.release()
