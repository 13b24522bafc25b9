"""One look at a cluster, here or elsewhere, as `minibroker status` and the console take it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import note_overlooked
from minibroker.client.cluster.unreachable import reasons_of
from minibroker.client.security import protection
from minibroker.client.settings import Address, parse_bootstrap
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.observing.access import AsClient
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.observing.examination import examine
from minibroker.deploy.observing.status import Status, status_of_view
from minibroker.protocol.connections.rpc import RequestTimedOut
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
    if view.is_unknown:
        raise _unanswered(bootstrap, view)
    return view, status_of_view(view, offline_log_dirs, security.principal())


def _unanswered(bootstrap: str, view: ClusterView) -> NetworkError:
    """Return the error if no broker answers that has heard from a controller, with the remedy that fits the reasons."""
    if view.answered:
        return NetworkError(
            f"the brokers that answer at {bootstrap} have not heard from a controller: check ZooKeeper, and the "
            "network between it and the brokers"
        )
    reasons = reasons_of({Address(*address): error for address, error in view.failures.items()})
    if view.hanging():
        return RequestTimedOut(
            f"no broker answers at {bootstrap}: {reasons}. It hangs: look where it runs, or give the address of "
            "another broker"
        )
    return NetworkError(
        f"no broker answers at {bootstrap}: {reasons}. Check the address, or start the cluster where it runs"
    )
