from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import ports
from minibroker.deploy.local.ports import free_ports, is_free, lease_ports


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


class Drawn:
    """Randomness that draws these numbers, one after the other."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def randint(self, _a: int, _b: int) -> int:
        return self.numbers.pop(0)


def test_a_leased_port_is_drawn_by_nobody_else_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = free_ports(3)[0], free_ports(2)[0]
    monkeypatch.setattr(ports, "_random", Drawn(first, first, first + 2, other, first))
    lease = lease_ports(3)
    assert lease.ports == [first, first + 1, first + 2]
    assert all(map(is_free, lease.ports))
    assert free_ports(2) == [other, other + 1]
    lease.release()
    assert free_ports(2) == [first, first + 1]


def test_a_lease_ends_with_its_process_however_that_ends() -> None:
    (port,) = free_ports(1)
    program = f"from minibroker.deploy.local import ports; ports._lease({port}, held := []); print('leased'); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"leased\n"
        held: list[socket.socket] = []
        assert not ports._lease(port, held)
        process.kill()
        process.wait()
        assert ports._lease(port, held)
        for each in held:
            each.close()
