"""Connections to real brokers are cut after the append. `make cut-connections` sends a million records."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from tests.faults import cut_connections


@pytest.mark.slow
def test_connections_cut_after_the_append_cause_no_duplicates(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.up(cut_connections.BROKERS, free_ports(cut_connections.BROKERS)[0])
    try:
        outcome = uvloop.run(cut_connections.run(cluster.bootstrap(), 100_000, seed=1))
    finally:
        cluster.down(kill=True)
    assert outcome.problem is None
    assert outcome.verdict.checked == 100_000
    assert outcome.cut_after_append >= 5
