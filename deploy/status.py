"""`minibroker status`: which processes live, what the cluster says of itself, and whether that is healthy.

What only brokers can tell is None where none of them answers: zeros and empty lists would look like health.
So would what the others know of a broker that was just started: its registration may be of the run before, so that it
is in the cluster once it has itself heard from the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from minibroker.deploy.cluster_file import ClusterFile
from minibroker.deploy.cluster_view import ClusterView
from minibroker.deploy.processes import ProcessState
from minibroker.protocol.model import INTERNAL_TOPICS
from minibroker.protocol.recovery_progress import RecoveryProgress

_NAMED = 5
"""This many partitions are named in a line, and the rest are counted for as many topics."""


class BrokerStatus(msgspec.Struct, frozen=True):
    id: int
    pid: int | None
    """None where it does not run, or was not started here."""
    alive: bool
    port: int
    paused: bool
    registered: bool | None
    """The controller knows it as a live broker, and not from its run before. None: unknown."""
    leaders: int | None
    """How many partitions it leads. None: unknown."""
    metrics_port: int | None = None
    """Where it serves Prometheus's `/metrics`, as far as is known here."""
    last_error: str | None = None
    """Why it ended, where it is gone and said so."""
    offline_log_dirs: dict[str, str] = {}
    """Its log directories whose disks have failed, and what the disk said, as far as it answers."""
    recovery: RecoveryProgress | None = None
    """How far it is with opening its logs, which comes before it serves. None: it is not at that, or does not say."""
    silent: bool = False
    """It runs, and did not answer when it was asked just now."""


class ControllerStatus(msgspec.Struct, frozen=True):
    id: int | None
    epoch: int | None


class ZooKeeperStatus(msgspec.Struct, frozen=True):
    connect: str
    pid: int | None
    """None where it does not run, or was not started here."""
    alive: bool
    paused: bool
    is_elsewhere: bool
    """It was not started here."""


class Status(msgspec.Struct, frozen=True):
    brokers: list[BrokerStatus]
    controller: ControllerStatus
    zookeeper: ZooKeeperStatus | None
    """None where only the brokers are known."""
    offline_partitions: list[str] | None
    """`TOPIC-PARTITION` of those without a leader. None: unknown."""
    under_replicated_partitions: list[str] | None
    """`TOPIC-PARTITION` of those with fewer replicas in sync than assigned. None: unknown."""
    under_min_isr_partitions: list[str] | None = None
    """`TOPIC-PARTITION` of those with fewer replicas in sync than `min.insync.replicas`. None: unknown."""
    not_preferred_partitions: list[str] | None = None
    """`TOPIC-PARTITION` of those whose preferred broker is in sync, and another leads. None: unknown."""
    full_disk: str | None = None
    """The directory of the cluster, where its disk has no room left."""

    @property
    def is_unknown(self) -> bool:
        """No broker answers that knows the cluster."""
        return self.offline_partitions is None

    def problems(self) -> list[str]:
        """Why the cluster is not healthy, a sentence each with the remedy; empty where it is."""
        found: list[str] = []
        if self.full_disk is not None:
            found.append(f"the disk of {self.full_disk} is full: make room there, then start what has ended")
        if self.zookeeper and not self.zookeeper.alive and not any(broker.alive for broker in self.brokers):
            return [*found, "the cluster is down: `minibroker up`"]
        if self.zookeeper and not self.zookeeper.alive:
            found.append(
                f"no ZooKeeper answers at {self.zookeeper.connect}: start it where it runs"
                if self.zookeeper.is_elsewhere
                else "ZooKeeper is not running: `minibroker start zookeeper`"
            )
        elif self.zookeeper and self.zookeeper.paused:
            found.append("ZooKeeper is paused: `minibroker resume zookeeper`")
        for broker in self.brokers:
            if not broker.alive:
                why = "" if broker.last_error is None else f" ({broker.last_error})"
                found.append(f"broker {broker.id} is not running{why}: `minibroker start {broker.id}`")
            elif broker.paused:
                found.append(f"broker {broker.id} is paused: `minibroker resume {broker.id}`")
            elif broker.recovery is not None:
                found.append(f"broker {broker.id} is recovering ({broker.recovery}): wait")
            elif broker.silent and not self.is_unknown:
                found.append(
                    f"broker {broker.id} runs but does not answer: wait if it was just started, else see "
                    f"`minibroker logs {broker.id}`"
                )
            elif broker.registered is False:
                found.append(f"broker {broker.id} runs but is not in the cluster: see `minibroker logs {broker.id}`")
            for path, reason in broker.offline_log_dirs.items():
                found.append(
                    f"broker {broker.id} does without its log directory {path} ({reason}): repair the disk, then "
                    f"restart the broker"
                )
        if self.is_unknown:
            found.append("no broker answers that knows the controller and the partitions: see `minibroker logs all`")
        elif self.controller.id is None:
            found.append("no broker that answers knows a controller: see `minibroker logs all`")
        has_failed_disks = any(broker.offline_log_dirs for broker in self.brokers)
        may_lack_brokers = not has_failed_disks or any(
            not broker.alive or broker.paused or broker.registered is False for broker in self.brokers
        )
        disks = ["repair the disks of the log directories"] if has_failed_disks else []
        if self.offline_partitions:
            remedy = " and ".join([*disks, *(["start the brokers of their ISR"] if may_lack_brokers else [])])
            found.append(f"{some_of(self.offline_partitions)} without a leader: {remedy}")
        if self.under_replicated_partitions:
            remedy = " and ".join([*disks, *(["start brokers, or wait"] if may_lack_brokers else [])])
            found.append(f"{some_of(self.under_replicated_partitions)} with replicas missing from the ISR: {remedy}")
        if self.under_min_isr_partitions:
            found.append(
                f"{some_of(self.under_min_isr_partitions)} with fewer replicas in sync than min.insync.replicas: "
                f"records with acks=all are refused, and consumers see no new ones, until more are"
            )
        return found


def status_of_processes(
    cluster: ClusterFile,
    states: Mapping[int, ProcessState],
    zookeeper: ProcessState,
    view: ClusterView,
    last_errors: Mapping[int, str] = MappingProxyType({}),
    full_disk: str | None = None,
    offline_log_dirs: Mapping[int, dict[str, str]] = MappingProxyType({}),
    recoveries: Mapping[int, RecoveryProgress] = MappingProxyType({}),
    silent: Collection[int] = (),
) -> Status:
    """Of a cluster that was started here. `states` are those of the brokers' processes, `last_errors` why some of them
    ended, `silent` who of the rest did not answer, `recoveries` how far some of these are with their start; a ZooKeeper
    elsewhere is RUNNING if it answers, else GONE."""
    view = view.without([broker for broker, state in states.items() if state is ProcessState.GONE])
    brokers = [
        BrokerStatus(
            id=entry.id,
            pid=entry.process.pid if entry.process and states[entry.id] is not ProcessState.GONE else None,
            alive=states[entry.id] is not ProcessState.GONE,
            port=entry.port,
            paused=states[entry.id] is ProcessState.PAUSED,
            registered=(None if view.is_unknown else entry.id in view.brokers and entry.address not in view.uninformed),
            leaders=None if view.is_unknown else view.leader_count(entry.id),
            last_error=last_errors.get(entry.id),
            offline_log_dirs=offline_log_dirs.get(entry.id, {}),
            metrics_port=entry.metrics_port,
            recovery=recoveries.get(entry.id),
            silent=entry.id in silent,
        )
        for entry in cluster.brokers
    ]
    server = cluster.zookeeper
    return _status(
        brokers,
        ZooKeeperStatus(
            connect=server.connect,
            pid=server.process.pid if server.process and zookeeper is not ProcessState.GONE else None,
            alive=zookeeper is not ProcessState.GONE,
            paused=zookeeper is ProcessState.PAUSED,
            is_elsewhere=server.port is None,
        ),
        view,
        full_disk,
    )


def status_of_view(view: ClusterView, offline_log_dirs: Mapping[int, dict[str, str]] = MappingProxyType({})) -> Status:
    """Of a cluster elsewhere, whose processes are out of sight: what is registered counts as alive."""
    brokers = [
        BrokerStatus(
            id=broker,
            pid=None,
            alive=True,
            port=address[1],
            paused=False,
            registered=True,
            leaders=view.leader_count(broker),
            offline_log_dirs=offline_log_dirs.get(broker, {}),
        )
        for broker, address in sorted(view.brokers.items())
    ]
    return _status(brokers, None, view)


def _status(
    brokers: list[BrokerStatus], zookeeper: ZooKeeperStatus | None, view: ClusterView, full_disk: str | None = None
) -> Status:
    return Status(
        brokers=brokers,
        zookeeper=zookeeper,
        controller=ControllerStatus(view.controller_id, view.controller_epoch),
        offline_partitions=None if view.is_unknown else [str(name) for name in view.offline_partitions()],
        under_replicated_partitions=(
            None if view.is_unknown else [str(name) for name in view.under_replicated_partitions()]
        ),
        under_min_isr_partitions=(None if view.is_unknown else [str(name) for name in view.under_min_isr_partitions()]),
        not_preferred_partitions=(None if view.is_unknown else [str(name) for name in view.not_preferred_partitions()]),
        full_disk=full_disk,
    )


def some_of(partitions: Sequence[str]) -> str:
    """The first few of them by name, the users' before those of internal topics, and how many more there are of each
    topic: a line that can be read."""
    ordered = sorted(partitions, key=lambda name: name.rpartition("-")[0] in INTERNAL_TOPICS)
    named = len(ordered) if len(ordered) == _NAMED + 1 else _NAMED  # its name is shorter than "1 more"
    shown = ", ".join(ordered[:named])
    rest = Counter(name.rpartition("-")[0] for name in ordered[named:])
    if not rest:
        return shown
    counts = [f"{topic} {count:,}" for topic, count in rest.most_common(_NAMED)]
    if len(rest) > _NAMED:
        counts.append(f"{len(rest) - _NAMED:,} more topics")
    return f"{shown} and {rest.total():,} more partitions ({', '.join(counts)})"
