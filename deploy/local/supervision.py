"""A foreground `minibroker up`: report changes of the processes until the cluster is taken down."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import Process, ProcessState, state_of
from minibroker.deploy.local.who import ZOOKEEPER, Member, name_of

_INTERVAL_S = 0.2

States = dict[Member, tuple[Process | None, ProcessState]]


def watch(cluster: LocalCluster, report: Callable[[str], None]) -> None:
    """Report every process that ends, pauses or returns. Returns after a `minibroker down` in another shell.

    Each look also reaps the processes that were started here, so that none stays a zombie.
    """
    before: States = {}
    while (known := cluster.file_or_none()) is not None and known.running:
        now = _states(known)
        for line in changes(before, now, [entry.id for entry in known.brokers if entry.leaving is not None]):
            report(line)
        before = now
        time.sleep(_INTERVAL_S)


def changes(before: States, now: States, leaving: Collection[Member] = ()) -> list[str]:
    """Return a line for every member whose process or state has changed, and for those that came and went. `before` is
    empty at the first look; `leaving` are brokers that `brokers remove` is about to stop."""
    lines = [f"{name_of(member)} was removed" for member in before if member not in now]
    for member, (process, state) in now.items():
        if before and member not in before:
            lines.append(f"{name_of(member)} was added")
        if member not in before or before[member] == (process, state):
            continue
        old_process, old_state = before[member]
        if state is ProcessState.GONE and member in leaving:
            lines.append(f"{name_of(member)} is gone and leaves the cluster")
        elif state is ProcessState.GONE:
            lines.append(f"{name_of(member)} is gone: `minibroker start {member}` starts it again")
        elif state is ProcessState.PAUSED:
            lines.append(f"{name_of(member)} is paused: `minibroker resume {member}` resumes it")
        elif old_state is ProcessState.PAUSED and process == old_process:
            lines.append(f"{name_of(member)} continues")
        else:
            lines.append(f"{name_of(member)} runs again")
    return lines


def _states(known: ClusterFile) -> States:
    members: dict[Member, Process | None] = {entry.id: entry.process for entry in known.brokers}
    if known.zookeeper.port is not None:
        members[ZOOKEEPER] = known.zookeeper.process
    return {member: (process, state_of(process)) for member, process in members.items()}
