"""`minibroker brokers add` and `minibroker brokers remove`: a running local cluster grows and shrinks.

A removal has four steps: reassign the broker's replicas to the others, wait until they are in sync, stop the broker,
and forget it. The controller records the reassignments, and the rest is decided anew from the state of the cluster, so
a removal that is interrupted at any point continues when the command is repeated. The cluster file says that the broker
is leaving, and which throttle must be removed at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigErrors, ConfigResource
from minibroker.client.administering.movements import Movement, Progress, movement, progress, sizes_of
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.administering.topics import PartitionDescription
from minibroker.client.cli import throttling
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    inform,
    note,
    print_json,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.client.errors import BrokersFailed
from minibroker.deploy import journal
from minibroker.deploy.acting import print_acted
from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local import data_directory
from minibroker.deploy.local.cluster_file import Leaving
from minibroker.deploy.local.departure import Departure, departure
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import ProcessState, wait_until
from minibroker.deploy.local.who import BrokerId, Member
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.model import ConfigSource, TopicPartition
from minibroker.protocol.words import counted, listed

LOOK_EVERY_S = 0.5
REPORT_EVERY_S = 2.0
DELETION_TIMEOUT_S = 30.0
"""The time in which a broker must delete its replicas after they have moved."""
KNOWN_WITHIN_S = 5.0
"""The time after which every broker should know the end of a reassignment."""
_ROUNDS = 3
"""Times that a broker is emptied: a topic may be created on it until it is stopped."""

BrokerArgument = Annotated[int, typer.Argument(metavar="ID", min=1, help="A broker of the local cluster.")]


def add(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of brokers to add.")] = 1,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Start more brokers beside those of a running local cluster.

    No replicas move to them; `minibroker reassign generate` proposes how to spread those of a topic."""
    cluster = LocalCluster(data)
    members = grow(cluster, len(cluster.file().brokers) + count, data)
    print_acted("add", members, format)
    note_growth(cluster)


def grow(cluster: LocalCluster, count: int, data: Path) -> list[Member]:
    return journal.done(data, f"up --brokers {count}", None, lambda: [*cluster.grow(count)])


def note_growth(cluster: LocalCluster) -> None:
    known = cluster.file()
    ids = ",".join(str(entry.id) for entry in known.brokers)
    note(f"no replicas move by themselves: `minibroker reassign generate --brokers {ids} --topic TOPIC` spreads them")


def remove(
    broker: BrokerArgument,
    throttle: Annotated[
        int | None,
        typer.Option(
            "--throttle",
            metavar="BYTES",
            min=1,
            help="Bytes per second that each broker copies at most. Default: unlimited, or as before the interruption.",
        ),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Stop a removal that was interrupted: the broker stays.")
    ] = False,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Move a broker's replicas to the others, stop the broker, and delete its directories.

    Repeat the command to go on after an interruption, also with another --throttle. It does nothing if the others
    cannot carry the replicas."""
    if cancel and throttle is not None:
        raise UsageError("--cancel copies nothing: leave out --throttle")
    cluster = LocalCluster(data)
    cluster.file().broker(broker)
    bootstrap = bootstrap_servers(None, data)
    if cancel:
        was_leaving = run(_cancel(cluster, bootstrap, broker))
        if was_leaving or format is Format.JSON:
            print_acted("keep", [broker] if was_leaving else [], format)
        else:
            sys.stdout.write(f"broker {broker} is not being removed: nothing to cancel\n")
        return

    def report(text: str) -> None:
        if format is Format.TABLE:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    try:
        moved = 0

        def removed() -> list[Member]:
            nonlocal moved
            moved = _remove(cluster, bootstrap, broker, throttle, report)
            return [broker]

        journal.done(data, f"brokers remove {broker}", None, removed)
    except KeyboardInterrupt:
        inform(
            f"interrupted: the copying goes on without this command; `minibroker brokers remove {broker}` finishes the "
            f"removal, and `minibroker brokers remove {broker} --cancel` keeps the broker with the rest of its replicas"
        )
        raise
    if format is Format.JSON:
        print_json({"action": "remove", "ids": [broker], "moved_partitions": moved})
    else:
        sys.stdout.write(f"remove: broker {broker}, {counted(moved, 'partition')} moved\n")
    known = cluster.file()
    if known.replicas is not None and known.replicas > len(known.brokers):
        note(
            f"new topics have {known.replicas} replicas by default, too many for {len(known.brokers)} brokers: "
            "`minibroker down` and `minibroker up` adapt it"
        )


def _remove(
    cluster: LocalCluster, bootstrap: str, broker: int, throttle: int | None, report: Callable[[str], None]
) -> int:
    """Return the number of partitions that have moved."""
    if cluster.state_of(broker) is ProcessState.PAUSED:
        raise LaunchError(f"broker {broker} is paused: `minibroker resume {broker}` first")
    moved: set[TopicPartition] = set()
    for _ in range(_ROUNDS):
        moved |= run(_Removal(cluster, broker, report).empty(bootstrap, throttle))
        is_running = cluster.state_of(broker) is not ProcessState.GONE
        if is_running and not wait_until(
            lambda: not data_directory.has_replicas(cluster.directory, broker), DELETION_TIMEOUT_S
        ):
            raise LaunchTimedOut(
                f"broker {broker} has not deleted its replicas {DELETION_TIMEOUT_S:g} s after they moved: see "
                f"`minibroker logs {broker}`, then repeat the command"
            )
        if is_running:
            cluster.stop(BrokerId(broker))
        if _is_empty(cluster, broker) and not (is_running and data_directory.has_replicas(cluster.directory, broker)):
            cluster.forget(broker)
            return len(moved)
        cluster.start(BrokerId(broker))
    raise LaunchError(f"topics are created on broker {broker} while its replicas move away: repeat the command")


class _Removal:
    """The way of one broker's replicas to the others."""

    def __init__(self, cluster: LocalCluster, broker: int, report: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._broker = broker
        self._report = report
        self._sizes: dict[TopicPartition, Progress] = {}
        """The last known progress of each partition that moves, or has moved."""
        self._submitted: set[TopicPartition] = set()
        self._strange_since_s = time.monotonic()
        self._reported_s = float("-inf")
        self._said = ""

    async def empty(self, bootstrap: str, throttle: int | None) -> set[TopicPartition]:
        """Move all replicas away, and return the partitions that had one. Raises MinibrokerError."""
        async with open_admin(bootstrap) as admin:
            left, partitions, reassigned = await self._look(admin)
            await self._throttle(admin, left, partitions, reassigned, throttle)
            while not left.is_over:
                self._check_cancelled(left)
                new = {name: target for name, target in left.moves.items() if name not in self._submitted}
                if new:
                    await admin.alter_partition_reassignments(new)
                    self._submitted |= new.keys()
                await self._measure(admin, partitions, reassigned, left)
                await asyncio.sleep(LOOK_EVERY_S)
                left, partitions, reassigned = await self._look(admin)
            leaving = self._cluster.file().broker(self._broker).leaving
            if leaving is not None and leaving.topics:
                await throttling.end(admin, leaving.topics)
            await _delete_settings(admin, self._broker)
        return set(self._sizes) | self._submitted

    def _check_cancelled(self, left: Departure) -> None:
        """Raises LaunchError if another command has cancelled a reassignment. One that is just over may look so too,
        until all brokers know."""
        cancelled = sorted(self._submitted & left.moves.keys())
        if not cancelled:
            self._strange_since_s = time.monotonic()
        elif time.monotonic() > self._strange_since_s + KNOWN_WITHIN_S:
            raise LaunchError(
                f"another command has cancelled or replaced the reassignment of {listed(cancelled[:3])}: repeat this "
                f"one to start it again, or keep broker {self._broker} with --cancel"
            )

    async def _look(
        self, admin: Admin
    ) -> tuple[Departure, dict[TopicPartition, PartitionDescription], dict[TopicPartition, PartitionReassignment]]:
        """Raises LaunchError if the others cannot carry the replicas. Where reassignments change meanwhile, perhaps by
        another command, it looks again: with those of one moment and the replicas of another, more would be counted
        than there are."""
        until_s = time.monotonic() + KNOWN_WITHIN_S
        while True:
            live = [broker.id for broker in (await admin.describe_cluster()).brokers]
            if not live:
                raise NetworkError("no broker that answers knows the cluster: see `minibroker status`")
            before = await admin.list_partition_reassignments()
            partitions = await _partitions(admin)
            reassigned = await admin.list_partition_reassignments()
            known = [
                entry.id for entry in self._cluster.file().brokers if entry.leaving is None or entry.id == self._broker
            ]
            leaving = {entry.id for entry in self._cluster.file().brokers} - set(known)
            live = [broker for broker in live if broker not in leaving]
            try:
                return departure(self._broker, partitions, reassigned, live, known), partitions, reassigned
            except LaunchError:
                is_calm = not before and not reassigned and not self._submitted
                if is_calm or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(LOOK_EVERY_S)

    async def _throttle(
        self,
        admin: Admin,
        left: Departure,
        partitions: Mapping[TopicPartition, PartitionDescription],
        reassigned: Mapping[TopicPartition, PartitionReassignment],
        throttle: int | None,
    ) -> None:
        """Record that the broker is leaving, and throttle the copying if that is wanted."""
        before = self._cluster.file().broker(self._broker).leaving or Leaving()
        rate = before.throttle if throttle is None else throttle
        wanted = dict(left.moves)
        for name in left.in_progress:
            wanted[name] = tuple(b for b in partitions[name].replicas if b not in reassigned[name].removing_replicas)
        topics = () if rate is None else tuple(sorted({*before.topics, *(name.topic for name in wanted)}))
        self._cluster.mark(self._broker, Leaving(rate, topics))
        if rate is not None and wanted:
            await throttling.begin(admin, {name: partitions[name].replicas for name in wanted}, wanted, rate)

    async def _measure(
        self,
        admin: Admin,
        partitions: Mapping[TopicPartition, PartitionDescription],
        reassigned: Mapping[TopicPartition, PartitionReassignment],
        left: Departure,
    ) -> None:
        """Report the progress, at most every REPORT_EVERY_S and if it has changed."""
        if time.monotonic() < self._reported_s + REPORT_EVERY_S or not left.in_progress:
            return
        self._reported_s = time.monotonic()
        try:
            sizes = sizes_of(await admin.describe_log_dirs())
        except BrokersFailed as failed:
            sizes = sizes_of(failed.results)
        moving: dict[TopicPartition, Movement] = {
            name: movement(name, reassigned[name], partitions[name].leader, sizes) for name in left.in_progress
        }
        for name, one in self._sizes.items():
            if name not in moving:
                self._sizes[name] = Progress(one.total_bytes, one.total_bytes)
        self._sizes |= {name: progress([one]) for name, one in moving.items()}
        done = Progress(
            sum(one.moved_bytes for one in self._sizes.values()),
            sum(one.total_bytes for one in self._sizes.values()),
            sum(one.unknown for one in self._sizes.values()),
        )
        text = f"moving, {done}, {counted(len(moving), 'partition')} left"
        if text != self._said:
            self._said = text
            self._report(text)


async def _partitions(admin: Admin) -> dict[TopicPartition, PartitionDescription]:
    topics = await admin.describe_topics()
    return {TopicPartition(topic.name, one.partition): one for topic in topics.values() for one in topic.partitions}


def _is_empty(cluster: LocalCluster, broker: int) -> bool:
    """Return whether no partition has a replica on the broker, which is down.

    Its data is deleted next, so all other brokers are asked, and those that do not know a change yet have
    KNOWN_WITHIN_S. Raises LaunchError if none knows the partitions: a broker that starts reports none.
    """
    view = cluster.view()

    def is_empty() -> bool:
        nonlocal view
        view = cluster.view()
        return not view.is_unknown and all(broker not in state.replica_nodes for state in view.partitions.values())

    if wait_until(is_empty, KNOWN_WITHIN_S):
        return True
    if view.is_unknown:
        raise LaunchError(
            f"no broker of {cluster.directory} that knows the partitions answers, so nothing is deleted: see "
            "`minibroker status`, then repeat the command"
        )
    return False


async def _delete_settings(admin: Admin, broker: int) -> None:
    """Delete the broker's dynamic settings: the next broker with its id is another one. A broker that is down is not
    asked, so its settings stay."""
    resource = ConfigResource.of_broker(broker)
    try:
        found = (await admin.describe_configs([resource]))[resource]
        own = [name for name, one in found.items() if one.source is ConfigSource.DYNAMIC_BROKER_CONFIG]
        if own:
            await admin.incremental_alter_configs({resource: [ConfigChange.delete(name) for name in own]})
    except ConfigErrors as failed:
        if not all(isinstance(error, NetworkError) for error in failed.errors.values()):
            raise


async def _cancel(cluster: LocalCluster, bootstrap: str, broker: int) -> bool:
    """Cancel the reassignments that take replicas from the broker. Those that have moved stay where they are. Return
    whether the broker was leaving."""
    async with open_admin(bootstrap) as admin:
        reassigned = await admin.list_partition_reassignments()
        going = [name for name, one in reassigned.items() if broker in one.removing_replicas]
        if going:
            await admin.alter_partition_reassignments(dict.fromkeys(going))
        leaving = cluster.file().broker(broker).leaving
        if leaving is not None and leaving.topics:
            await throttling.end(admin, leaving.topics)
    cluster.mark(broker, None)
    return bool(going) or leaving is not None
