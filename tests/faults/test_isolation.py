"""Brokers of a test's cluster are isolated from the network and healed.

Needs root to write rules of the kernel's packet filter, so it runs with `make isolation` only.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker import sync
from minibroker.testing import SyncLocalCluster
from tests.testing_support import left_behind, owner
from tests.waiting import until_true


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory below which this test's clusters have their directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert left_behind(tmp_path) == []


def test_an_isolated_leader_is_replaced_and_comes_back_when_it_is_healed() -> None:
    settings = {"zookeeper.session.timeout.ms": "2000"}
    with (
        SyncLocalCluster(topics=["orders"], settings=settings) as cluster,
        sync.Producer(cluster.bootstrap_servers) as producer,
    ):
        producer.send("orders", b"0").result()
        isolated = cluster.isolate("leader:orders-0")
        assert cluster.isolate(isolated[0]) == isolated
        assert producer.send("orders", b"1").result().offset == 1
        assert cluster.find("leader:orders-0") != isolated
        assert "handed over" not in cluster.log_of(isolated[0]).read_text()  # it runs, unaware of the isolation
        cluster.heal()
        cluster.wait_healthy()
        cluster.isolate(isolated[0])
        directory = str(cluster.directory)
    listed = subprocess.run(["iptables", "-w", "-S", "OUTPUT"], capture_output=True, text=True, check=True)
    assert directory not in listed.stdout


def test_no_rule_of_the_packet_filter_outlives_a_process_that_is_killed(temporary: Path) -> None:
    with owner(temporary, "isolate") as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "isolated\n"]
        process.kill()
        process.wait()
        until_true(lambda: not left_behind(temporary), 60.0)
    listed = subprocess.run(["iptables", "-w", "-S", "OUTPUT"], capture_output=True, text=True, check=True)
    assert str(temporary) not in listed.stdout
