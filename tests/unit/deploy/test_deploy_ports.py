from __future__ import annotations

import socket
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.ports import free_ports, is_free


def test_a_port_where_someone_listens_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)


def test_free_ports_are_consecutive_and_avoid_what_they_are_told_to() -> None:
    first, second, third = free_ports(3)
    assert (second, third) == (first + 1, first + 2)
    assert free_ports(1, avoid=[first])[0] != first


def test_free_ports_lie_where_no_outgoing_connection_gets_its_source_port() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(not lowest <= port <= highest for port in free_ports(5))


def test_where_no_port_is_left_the_error_says_so() -> None:
    with pytest.raises(LaunchError, match="no 1 consecutive free ports"):
        free_ports(1, avoid=range(65_536))
