"""A cluster of real processes, for fixtures of every scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from tests.waiting import until_true


@contextmanager
def live_cluster(
    directory: Path, brokers: int = 3, settings: Mapping[str, str] | None = None
) -> Iterator[LocalCluster]:
    """Run brokers with their own ZooKeeper, once each broker knows all others. All are killed at the end."""
    cluster = LocalCluster(directory)
    try:
        cluster.up(brokers, free_ports(brokers)[0], None, settings)
        until_true(lambda: len(cluster.view().brokers) == brokers)
        yield cluster
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)
