"""One look at a cluster, here or elsewhere, as `minibroker status` and the console take it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import note_overlooked
from minibroker.client.security import protection
from minibroker.client.settings import parse_bootstrap
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.observing.access import AsClient
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.observing.examination import examine
from minibroker.deploy.observing.status import Status, status_of_view
from minibroker.protocol.errors import NetworkError


def view_and_status(bootstrap: str | None, data: Path) -> tuple[ClusterView, Status]:
    """Look at the cluster of `data`, or at the one of `bootstrap`. Blocking. Raises MinibrokerError if there is no such
    cluster, or if no broker of `bootstrap` answers."""
    if bootstrap is None:
        return LocalCluster(data).look(asks_controller=True, asks_stalls=True)
    note_overlooked(bootstrap, data)
    access = AsClient(protection("minibroker", security.chosen()))
    view, offline_log_dirs = asyncio.run(
        examine(parse_bootstrap(bootstrap), access=access, asks_controller=True, asks_stalls=True, asks_rights=True)
    )
    if not view.brokers:
        raise NetworkError(f"no broker answers at {bootstrap}: check the address, or start the cluster")
    return view, status_of_view(view, offline_log_dirs, security.principal())
