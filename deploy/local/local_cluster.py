"""A cluster on this machine: ZooKeeper and N brokers as processes, started, broken and stopped.

Data of broker N is in DIR/broker-N/, ZooKeeper's in DIR/zookeeper/, what they print in DIR/logs/, the secret by which
the brokers know each other in DIR/broker.secret. Everything that is needed to find the processes again is in
DIR/cluster.json, so every method works from other processes than the one that called `up`. Nothing restarts what died:
a cluster that repairs itself behind the experimenter's back would hide what the experiment is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import msgspec

from minibroker.client.shown import undecodable
from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local import broker_process, cluster_file, secret_file, zookeeper
from minibroker.deploy.local.broker_process import LOG_LEVEL, HandedOver, StartingBroker
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.ports import LOOPBACK, free_ports, is_free, lowest_source_port
from minibroker.deploy.local.processes import (
    Process,
    ProcessState,
    is_alive,
    send_signal,
    state_of,
    uninterrupted,
    wait_until,
    wait_until_gone,
)
from minibroker.deploy.local.recovery import ask_recoveries
from minibroker.deploy.local.who import (
    AllBrokers,
    BrokerId,
    Controller,
    CoordinatorOf,
    Elected,
    LeaderOf,
    Who,
    ZooKeeperServer,
)
from minibroker.deploy.observing.cluster_view import (
    ClusterView,
    ask_cluster,
    ask_offline_log_dirs,
    has_coordinators,
    with_details,
)
from minibroker.deploy.observing.status import Status, status_of_processes
from minibroker.protocol.model import NO_LEADER, OFFSETS_TOPIC, TopicPartition, offsets_partition

DEFAULT_BROKERS = 3
DEFAULT_BASE_PORT = 9092
MAX_BROKERS = 100
MAX_LOG_DIRS = 16
METRICS_PORT_DISTANCE = 1_000
STOP_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 10.0
ELECTION_TIMEOUT_S = 3.0
FORMING_TIMEOUT_S = 5.0
OFFSETS_REPLICATION_FACTOR: Final = "offsets.topic.replication.factor"
LITTLE_ROOM_BYTES = 1024 * 1024
"""A disk with less is full: a broker fails at the first write that does not fit."""

ZOOKEEPER: Final = "zookeeper"
Member = int | Literal["zookeeper"]
"""What can be acted on: a broker's id, or the ZooKeeper that was started here."""


class _NobodyElected(LaunchError):
    """No controller, or no leader, that brokers know of. There may be one in a moment."""


class LocalCluster:
    """The cluster whose files are in `directory`. Blocking; methods raise LaunchError and LaunchTimedOut."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    # -- looking --

    def file(self) -> ClusterFile:
        """Raises LaunchError where there is no cluster in the directory."""
        found = self.file_or_none()
        if found is None:
            raise LaunchError(
                f"there is no cluster in {self.directory}: run `minibroker up`, or name another with --data"
            )
        return found

    def file_or_none(self) -> ClusterFile | None:
        return cluster_file.load(self.directory)

    def bootstrap(self) -> str:
        """`host:port,host:port` of all brokers, living or not."""
        return self.file().bootstrap

    def log_of(self, member: Member) -> Path:
        name = ZOOKEEPER if isinstance(member, str) else f"broker-{member}"
        return self.directory / "logs" / f"{name}.log"

    def state_of(self, member: Member) -> ProcessState:
        process = self._process_of(self.file(), member)
        return ProcessState.GONE if process is None else state_of(process)

    def view(self) -> ClusterView:
        """What the brokers that are able to answer say; waits at most 2 s for one that hangs."""
        cluster = self.file()
        ours = [entry.address for entry in cluster.brokers]
        return asyncio.run(ask_cluster(self._answering_addresses(cluster), without=ours))

    def status(self, view: ClusterView | None = None, *, asks_controller: bool = False) -> Status:
        """`view`: what the brokers said just now, if they have been asked. `asks_controller`: see `with_details`."""
        cluster = self.file()
        states = {
            entry.id: ProcessState.GONE if entry.process is None else state_of(entry.process)
            for entry in cluster.brokers
        }
        if cluster.zookeeper.port is None:
            answers = zookeeper.is_any_serving(cluster.zookeeper.connect)
            server = ProcessState.RUNNING if answers else ProcessState.GONE
        else:
            server = self.state_of(ZOOKEEPER)
        view = asyncio.run(with_details(self.view() if view is None else view, asks_controller=asks_controller))
        silent = [
            entry
            for entry in cluster.brokers
            if states[entry.id] is ProcessState.RUNNING and entry.address not in view.answered
        ]
        return status_of_processes(
            cluster,
            states,
            server,
            view,
            silent=[entry.id for entry in silent],
            offline_log_dirs=asyncio.run(ask_offline_log_dirs(view)),
            recoveries=ask_recoveries(
                {entry.id: entry.metrics_port for entry in silent if entry.metrics_port is not None}
            ),
            last_errors={
                broker_id: error
                for broker_id, state in states.items()
                if state is ProcessState.GONE
                and (error := broker_process.last_error(self.log_of(broker_id))) is not None
            },
            full_disk=str(self.directory) if _is_full(self.directory) else None,
        )

    def resolve(self, who: Who) -> list[Member]:
        """The members meant. Raises LaunchError where there is no such broker, topic, partition, leader, coordinator,
        controller.

        Who was killed just now is taken for the leader, coordinator or controller for a moment still, and then there
        may be none: this waits for the next one, for ELECTION_TIMEOUT_S at most."""
        members: list[Member] = []
        nobody: _NobodyElected | None = None

        def are_those_meant() -> bool:
            nonlocal nobody
            try:
                members[:], nobody = self._named(who), None
            except _NobodyElected as error:
                nobody = error
                return False
            return not isinstance(who, Elected) or self.state_of(members[0]) is not ProcessState.GONE

        wait_until(are_those_meant, ELECTION_TIMEOUT_S)
        if nobody is not None:
            raise LaunchError(str(nobody))  # that it could be waited for is nobody's business any more
        return members

    def _named(self, who: Who) -> list[Member]:
        """As brokers say at this moment, dead or alive. Raises LaunchError."""
        cluster = self.file()
        match who:
            case ZooKeeperServer():
                if cluster.zookeeper.port is None:
                    raise LaunchError(
                        f"the ZooKeeper at {cluster.zookeeper.connect} was not started here: act on it where it runs"
                    )
                return [ZOOKEEPER]
            case AllBrokers():
                return [entry.id for entry in cluster.brokers]
            case BrokerId(broker_id):
                return [cluster.broker(broker_id).id]
            case Controller():
                controller_id = self.view().controller_id
                if controller_id is None:
                    raise _NobodyElected("no broker knows a controller: see `minibroker status`, and try again")
                return [cluster.broker(controller_id).id]
            case LeaderOf(partition):
                view = self._view_that_tells(f"the leader of {partition}")
                return [cluster.broker(_leader_of(partition, view)).id]
            case CoordinatorOf(group):
                # Not asked for by FindCoordinator: that would make the topic, and one broker's answer may be old.
                view = self._view_that_tells(f"the coordinator of the group {group!r}")
                partitions = sum(name.topic == OFFSETS_TOPIC for name in view.partitions)
                if not partitions:
                    raise LaunchError(
                        f"the group {group!r} has no coordinator, as there is no topic {OFFSETS_TOPIC} yet: it is "
                        f"created when as many brokers run as {OFFSETS_REPLICATION_FACTOR} says; see `minibroker "
                        "status`"
                    )
                partition = TopicPartition(OFFSETS_TOPIC, offsets_partition(group, partitions))
                return [cluster.broker(_leader_of(partition, view)).id]

    def _view_that_tells(self, what: str) -> ClusterView:
        view = self.view()
        if view.is_unknown:
            raise LaunchError(f"no broker answers, so {what} is unknown: see `minibroker status`")
        return view

    # -- the whole --

    def up(
        self,
        brokers: int | None = None,
        base_port: int | None = None,
        zookeeper_connect: str | None = None,
        settings: Mapping[str, str] | None = None,
        log_dirs: int | None = None,
    ) -> ClusterFile:
        """Start everything and return once every broker serves.

        What is not given is as it was the last time in this directory, or the default; a broker that has replicas
        there is never left out. Where any of it fails, all that was started is stopped again, and the next `up` goes by
        what was there before.
        """
        with self._owned() as before:
            count = self._count_of(before, brokers)
            cluster = _planned(before, count, base_port, zookeeper_connect, settings, log_dirs)
            return self._launch(cluster, before)

    def launch(self, planned: ClusterFile) -> ClusterFile:
        """`up` for a cluster all of whose ports and settings are planned, whatever was in this directory before."""
        with self._owned() as before:
            return self._launch(planned, before)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[ClusterFile | None]:
        """No other command starts anything here meanwhile, and nothing runs. Yields what was here the last time."""
        _check_directory(self.directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the data directory {self.directory} cannot be created: {error.strerror}; use --data"
            ) from error
        with self._naming_a_full_disk(), cluster_file.locked(self.directory):
            before = self.file_or_none()
            if before is not None:
                self._check_not_running(before)
            yield before

    def _launch(self, cluster: ClusterFile, before: ClusterFile | None) -> ClusterFile:
        cluster = msgspec.structs.replace(cluster, log_level=os.environ.get(LOG_LEVEL, ""))
        _check_ports(cluster.brokers)
        if cluster.zookeeper.port is None:
            zookeeper.check_servers(cluster.zookeeper.connect)
        cluster_file.save(self.directory, cluster)
        try:
            self._make_secret()
            cluster, starting = self._spawn_all(cluster)
            # The brokers start meanwhile, and try again until ZooKeeper answers.
            self._wait_for_zookeeper(cluster)
            broker_process.wait_until_ready(starting)
        except BaseException:
            self._end_all(self.file(), kill=True, timeout_s=0)
            # Where there was nothing before, a setting that no broker accepts must not come back.
            left = before or msgspec.structs.replace(self.file(), settings={})
            cluster_file.save(self.directory, msgspec.structs.replace(left, running=False))
            raise
        # In a thread of its own: the caller's may have an event loop that runs.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._form).result()
        return cluster

    def _form(self) -> None:
        """Wait until every broker knows all the others, and groups have coordinators: their topic is created without
        the pause in which the controller waits for further brokers, and a broker may die from here on before the first
        group is used. If it takes too long, the cluster is up all the same: `minibroker status` says what is wrong."""
        cluster = self.file()
        addresses = [entry.address for entry in cluster.brokers]

        def has_formed() -> bool:
            view = asyncio.run(ask_cluster(addresses))
            return view.brokers.keys() >= {entry.id for entry in cluster.brokers} and not view.uninformed

        deadline = time.monotonic() + FORMING_TIMEOUT_S
        if wait_until(has_formed, FORMING_TIMEOUT_S) and _replicas_of_offsets(cluster) <= len(addresses):
            wait_until(lambda: asyncio.run(has_coordinators(addresses[0])), deadline - time.monotonic())

    def running(
        self,
        brokers: int | None = None,
        base_port: int | None = None,
        zookeeper_connect: str | None = None,
        settings: Mapping[str, str] | None = None,
        log_dirs: int | None = None,
    ) -> ClusterFile | None:
        """The cluster, if all of it runs, and as asked for; None where none of it does.

        Waits for an `up` that is under way. Raises LaunchError where a part runs, or something else is asked for.
        """
        if self.file_or_none() is None:
            return None
        with cluster_file.locked(self.directory):
            known = self.file()
        if not any(is_alive(process) for process in known.processes()):
            return None
        members: list[Member] = [entry.id for entry in known.brokers]
        if known.zookeeper.port is not None:
            members.append(ZOOKEEPER)
        if any(self.state_of(member) is not ProcessState.RUNNING for member in members):
            self._check_not_running(known)
            return None
        asked_and_found: tuple[tuple[str, object, object], ...] = (
            ("--brokers", brokers, len(known.brokers)),
            ("--base-port", base_port, known.brokers[0].port),
            ("--zookeeper", zookeeper_connect, known.zookeeper.connect),
            ("--log-dirs", log_dirs, known.log_dirs),
        )
        others = [f"{option} {asked}" for option, asked, found in asked_and_found if asked not in (None, found)]
        if settings not in (None, known.settings):
            missing = {name: value for name, value in (settings or {}).items() if known.settings.get(name) != value}
            others += [f"--override {name}={value}" for name, value in missing.items()] or ["fewer --override"]
        if others:
            raise LaunchError(
                f"the cluster in {self.directory} is running already, but not with {', '.join(others)} "
                f"({_summary(known)}): stop it with `minibroker down` first, or use another --data"
            )
        return known

    def down(self, *, kill: bool = False, timeout_s: float = STOP_TIMEOUT_S) -> list[Member]:
        """Stop what lives, brokers before ZooKeeper, and return what that was. Data stays.

        Asks with SIGTERM first, unless `kill`, and kills what has not ended in time.
        """
        ended = self._end_all(self.file(), kill=kill, timeout_s=timeout_s)
        with cluster_file.locked(self.directory):
            self._write_that_it_is_down()
        return ended

    def delete_data(self) -> None:
        """Remove every file of the cluster. Raises LaunchError while a process of it lives."""
        cluster = self.file()
        self._check_not_running(cluster)
        # Also those of brokers of an earlier, larger cluster.
        for path in [*self.directory.glob("broker-*"), self.directory / ZOOKEEPER, self.directory / "logs"]:
            if path.exists():
                shutil.rmtree(path)
        for name in (secret_file.FILE_NAME, cluster_file.FILE_NAME, cluster_file.LOCK_NAME):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what else is in there is not ours
            self.directory.rmdir()

    # -- one or some --

    def start(self, who: Who) -> list[Member]:
        """Start members that are gone, and wait until they serve; `AllBrokers` means those that are gone."""
        if isinstance(who, Elected):
            raise LaunchError(
                "a leader, coordinator or controller is running already: give `start` a broker id, all or zookeeper"
            )
        with self._naming_a_full_disk():
            return self._start_zookeeper(who) if isinstance(who, ZooKeeperServer) else self._start_brokers(who)

    def handed_over(self, broker_id: int) -> HandedOver | None:
        """What a broker that was stopped said of its leaders; None: nothing."""
        return broker_process.handed_over(self.log_of(broker_id))

    def stop(self, who: Who, timeout_s: float = STOP_TIMEOUT_S) -> list[Member]:
        """SIGTERM: a clean shutdown, in which others lead first (`handed_over`). Raises LaunchTimedOut where one does
        not end in time."""
        acted = self._signal(who, signal.SIGTERM, from_states=(ProcessState.RUNNING,))
        self._wait_for_end(acted, timeout_s, lambda member: f"`minibroker kill {member}`")
        return acted

    def kill(self, who: Who) -> list[Member]:
        """SIGKILL, as a crash. Returns once the processes are gone."""
        acted = self._signal(who, signal.SIGKILL, from_states=(ProcessState.RUNNING, ProcessState.PAUSED))
        self._wait_for_end(acted, KILL_TIMEOUT_S, lambda _: "it hangs inside the operating system")
        return acted

    def pause(self, who: Who) -> list[Member]:
        """SIGSTOP: connections stay open and nothing is answered. Returns once the processes stand still."""
        acted = self._signal(who, signal.SIGSTOP, from_states=(ProcessState.RUNNING,))
        wait_until(lambda: all(self.state_of(member) is not ProcessState.RUNNING for member in acted), KILL_TIMEOUT_S)
        return acted

    def resume(self, who: Who) -> list[Member]:
        """SIGCONT, after `pause`."""
        return self._signal(who, signal.SIGCONT, from_states=(ProcessState.PAUSED,))

    # -- inside --

    @contextlib.contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        """What cannot be started on a full disk may say anything, and mostly has no room to write down why."""
        try:
            yield
        except (LaunchError, OSError) as error:
            if not _is_full(self.directory):
                raise
            raise LaunchError(f"{error}; the disk of {self.directory} is full: make room there") from error

    def _process_of(self, cluster: ClusterFile, member: Member) -> Process | None:
        return cluster.zookeeper.process if isinstance(member, str) else cluster.broker(member).process

    def _answering_addresses(self, cluster: ClusterFile) -> list[tuple[str, int]]:
        # One that is paused would accept the connection and say nothing.
        return [
            entry.address
            for entry in cluster.brokers
            if entry.process is not None and state_of(entry.process) is ProcessState.RUNNING
        ]

    def _check_not_running(self, cluster: ClusterFile) -> None:
        names = [f"broker {entry.id}" for entry in cluster.brokers if _lives(entry)]
        if cluster.zookeeper.process is not None and is_alive(cluster.zookeeper.process):
            names.append("ZooKeeper")
        if names:
            raise LaunchError(
                f"the data directory {self.directory} is in use by a running cluster ({', '.join(names)}): "
                "stop it with `minibroker down`, start what is missing with `minibroker start all`, "
                "or use another --data"
            )

    def _count_of(self, before: ClusterFile | None, asked: int | None) -> int:
        """How many brokers are to run: none that has replicas is left out, not even one of an earlier, larger cluster
        that the cluster file knows no more. Raises LaunchError."""
        with_replicas = [
            broker_id
            for broker_id in range(1, MAX_BROKERS + 1)
            if any(_has_replicas(log_dir) for log_dir in self._log_dirs_of(broker_id, MAX_LOG_DIRS))
        ]
        if asked is None:
            return max(DEFAULT_BROKERS if before is None else len(before.brokers), *with_replicas, 1)
        left_out = [broker_id for broker_id in with_replicas if broker_id > asked]
        if left_out:
            raise LaunchError(
                f"--brokers {asked} would leave out {', '.join(map(name_of, left_out))}, with replicas in "
                f"{self.directory}: leave out --brokers, give {left_out[-1]} or more, or use another --data; to have "
                "fewer, first move the replicas to other brokers: `minibroker reassign generate`"
            )
        return asked

    def _signal(self, who: Who, number: signal.Signals, from_states: tuple[ProcessState, ...]) -> list[Member]:
        """Signal the members that are in one of the states; one named alone that is not is an error."""
        members = self.resolve(who)
        cluster = self.file()
        acted: list[Member] = []
        for member in members:
            process = self._process_of(cluster, member)
            state = ProcessState.GONE if process is None else state_of(process)
            if process is not None and state in from_states and send_signal(process, number):
                acted.append(member)
            elif not isinstance(who, AllBrokers):
                raise LaunchError(_cannot(member, state, number))
        return acted

    def _wait_for_end(self, members: list[Member], timeout_s: float, remedy: Callable[[Member], str]) -> None:
        cluster = self.file()
        processes = {member: self._process_of(cluster, member) for member in members}
        left = wait_until_gone([process for process in processes.values() if process is not None], timeout_s)
        for member, process in processes.items():
            if process in left:
                raise LaunchTimedOut(f"{name_of(member)} did not end within {timeout_s:g} s: {remedy(member)}")

    def _write_that_it_is_down(self) -> None:
        latest = self.file()
        if not any(is_alive(process) for process in latest.processes()):
            cluster_file.save(self.directory, msgspec.structs.replace(latest, running=False))

    def _start_brokers(self, who: Who) -> list[Member]:
        members = self.resolve(who)
        with cluster_file.locked(self.directory):
            cluster = self.file()
            if cluster.zookeeper.process is not None and not is_alive(cluster.zookeeper.process):
                raise LaunchError(
                    "ZooKeeper is not running: `minibroker start zookeeper` first, or bring all up with `minibroker up`"
                )
            gone = [entry for entry in cluster.brokers if entry.id in members and not _lives(entry)]
            if not gone and not isinstance(who, AllBrokers):
                raise LaunchError(_why_not_started(members[0], self.state_of(members[0])))
            _check_ports(gone)
            starting: list[StartingBroker] = []
            for entry in gone:
                cluster, started = self._spawn_broker(cluster, entry)
                starting.append(started)
        broker_process.wait_until_ready(starting)
        return [started.broker_id for started in starting]

    def _start_zookeeper(self, who: ZooKeeperServer) -> list[Member]:
        members = self.resolve(who)
        with cluster_file.locked(self.directory):
            cluster = self.file()
            ours = cluster.zookeeper
            if ours.process is not None and is_alive(ours.process):
                raise LaunchError(f"ZooKeeper is running already (process {ours.process.pid})")
            if ours.port is not None and not is_free(ours.port):
                raise LaunchError(f"port {ours.port} of ZooKeeper is in use: stop what listens there, then try again")
            cluster = self._spawn_zookeeper(cluster)
        self._wait_for_zookeeper(cluster)
        return members

    def _spawn_all(self, cluster: ClusterFile) -> tuple[ClusterFile, list[StartingBroker]]:
        """Spawn ZooKeeper, if it is ours, and the brokers; each is in the file as soon as it runs."""
        if cluster.zookeeper.port is not None:
            cluster = self._spawn_zookeeper(cluster)
        starting: list[StartingBroker] = []
        for entry in cluster.brokers:
            cluster, started = self._spawn_broker(cluster, entry)
            starting.append(started)
        return cluster, starting

    def _spawn_zookeeper(self, cluster: ClusterFile) -> ClusterFile:
        port = cluster.zookeeper.port
        assert port is not None
        program = zookeeper.find_program()
        with uninterrupted():
            process = zookeeper.start(program, self.directory / ZOOKEEPER, self.log_of(ZOOKEEPER), port)
            entry = ZooKeeperEntry(f"{LOOPBACK}:{port}", port, process)
            cluster = msgspec.structs.replace(cluster, zookeeper=entry, running=True)
            self._save_or_kill(cluster, process)
        return cluster

    def _make_secret(self) -> None:
        """While none of the brokers runs, since those that run would not know it."""
        try:
            secret_file.make(self._secret_file)
        except OSError as error:
            raise LaunchError(f"{self._secret_file} cannot be written: {error.strerror}") from error

    @property
    def _secret_file(self) -> Path:
        return self.directory / secret_file.FILE_NAME

    def _log_dirs_of(self, broker_id: int, count: int) -> list[Path]:
        """The first is where a broker that has only one has it, so that others can be added later."""
        first = self.directory / f"broker-{broker_id}"
        return [first, *(first.with_name(f"{first.name}-disk-{number}") for number in range(2, count + 1))]

    def _spawn_broker(self, cluster: ClusterFile, entry: BrokerEntry) -> tuple[ClusterFile, StartingBroker]:
        secret = {"broker.secret.file": str(self._secret_file)} if self._secret_file.exists() else {}
        replication_factor = str(_usual_replicas(cluster))
        with uninterrupted():
            started = broker_process.start(
                entry.id,
                entry.port,
                entry.metrics_port,
                self._log_dirs_of(entry.id, cluster.log_dirs),
                self.log_of(entry.id),
                cluster.zookeeper.connect,
                # A topic created without a word about replicas must be possible on a small cluster too, as are groups.
                {
                    "default.replication.factor": replication_factor,
                    OFFSETS_REPLICATION_FACTOR: replication_factor,
                    **secret,
                    **cluster.settings,
                    **entry.settings,
                },
                entry.group_id,
                os.environ.get(LOG_LEVEL) or cluster.log_level,
            )
            cluster = cluster.with_broker(msgspec.structs.replace(entry, process=started.process))
            cluster = msgspec.structs.replace(cluster, running=True)
            self._save_or_kill(cluster, started.process)
        return cluster, started

    def _save_or_kill(self, cluster: ClusterFile, started: Process) -> None:
        """Where it cannot be noted that a process was started, it must not go on: no command would find it again."""
        try:
            cluster_file.save(self.directory, cluster)
        except LaunchError:
            _end([started], kill=True, timeout_s=0)
            raise

    def _wait_for_zookeeper(self, cluster: ClusterFile) -> None:
        ours = cluster.zookeeper
        if ours.process is not None and ours.port is not None:
            zookeeper.wait_until_serving(ours.process, ours.port, self.log_of(ZOOKEEPER))

    def _end_all(self, cluster: ClusterFile, *, kill: bool, timeout_s: float) -> list[Member]:
        """Brokers before ZooKeeper, which they need for a clean shutdown. Returns those that lived."""
        ended: list[Member] = [entry.id for entry in cluster.brokers if _lives(entry)]
        brokers = [entry.process for entry in cluster.brokers if entry.process is not None]
        _end(brokers, kill=kill, timeout_s=timeout_s)
        if cluster.zookeeper.process is not None:
            if is_alive(cluster.zookeeper.process):
                ended.append(ZOOKEEPER)
            _end([cluster.zookeeper.process], kill=kill, timeout_s=timeout_s)
        return ended


def _check_directory(directory: Path) -> None:
    """Raises LaunchError for a path that the settings of brokers and ZooKeeper cannot name."""
    if (path := undecodable(directory)) is not None:
        raise LaunchError(f"the data directory {path} is not UTF-8, and settings are: use --data with another path")
    if "," in str(directory):
        raise LaunchError(
            f"the data directory {directory} has a comma, which separates log directories in `log.dirs`: use --data "
            "with another path"
        )


def _planned(
    before: ClusterFile | None,
    count: int,
    base_port: int | None,
    zookeeper_connect: str | None,
    settings: Mapping[str, str] | None,
    log_dirs: int | None,
) -> ClusterFile:
    """What is to run: as given, else as before, else the default. No processes yet."""
    if before is not None:
        base_port = before.brokers[0].port if base_port is None else base_port
        settings = before.settings if settings is None else settings
        log_dirs = before.log_dirs if log_dirs is None else log_dirs
        if log_dirs < before.log_dirs:
            raise LaunchError(
                f"--log-dirs {log_dirs}: each broker has replicas in {before.log_dirs} log directories, and would miss "
                f"them: give {before.log_dirs} or more, or use another --data"
            )
    first_port = DEFAULT_BASE_PORT if base_port is None else base_port
    same = before.brokers if before is not None and before.brokers[0].port == first_port else ()
    if first_port + count > 65_536:
        raise LaunchError(f"{count} brokers from port {first_port} on go past port 65535: use a lower --base-port")
    if zookeeper_connect is not None:
        entry = ZooKeeperEntry(zookeeper_connect)
    elif before is not None and (before.zookeeper.port is None or is_free(before.zookeeper.port)):
        entry = msgspec.structs.replace(before.zookeeper, process=None)
    else:
        (port,) = free_ports(1, avoid=range(first_port, first_port + count))
        entry = ZooKeeperEntry(f"{LOOPBACK}:{port}", port)
    return ClusterFile(
        zookeeper=entry,
        brokers=tuple(
            BrokerEntry(number + 1, first_port + number, metrics_port=metrics_port)
            for number, metrics_port in enumerate(_metrics_ports(first_port, count, same))
        ),
        settings=dict(settings or {}),
        log_dirs=log_dirs or 1,
    )


def _usual_replicas(cluster: ClusterFile) -> int:
    return min(3, len(cluster.brokers))


def _replicas_of_offsets(cluster: ClusterFile) -> int:
    return int(cluster.settings.get(OFFSETS_REPLICATION_FACTOR, _usual_replicas(cluster)))


def _leader_of(partition: TopicPartition, view: ClusterView) -> int:
    """Raises LaunchError."""
    state = view.partitions.get(partition)
    if state is None:
        raise LaunchError(
            f"no broker knows a partition {partition}: see `minibroker topics list`, or `minibroker status`"
        )
    if state.leader_id == NO_LEADER:
        raise _NobodyElected(
            f"partition {partition} has no leader now: start the brokers of its ISR "
            f"({', '.join(str(broker) for broker in state.isr_nodes)})"
        )
    return state.leader_id


def _why_not_started(broker_id: Member, state: ProcessState) -> str:
    if state is ProcessState.PAUSED:
        return f"broker {broker_id} is paused: `minibroker resume {broker_id}`"
    return f"broker {broker_id} is running already; to start it anew, first `minibroker stop {broker_id}`"


def _metrics_ports(first_port: int, count: int, before: Sequence[BrokerEntry]) -> list[int]:
    """Where they were the last time, as Prometheus's configuration names them; else 1000 above the brokers' own. One
    that is taken is elsewhere, and the others stay."""
    known = {number: entry.metrics_port for number, entry in enumerate(before) if entry.metrics_port is not None}
    taken = [*range(first_port, first_port + count), *known.values()]
    ports: list[int] = []
    for number in range(count):
        port = known.get(number, first_port + METRICS_PORT_DISTANCE + number)
        is_usual = number in known or (port < lowest_source_port() and port not in taken)
        if not (is_usual and is_free(port)):
            (port,) = free_ports(1, avoid=taken)
        taken.append(port)
        ports.append(port)
    return ports


def _check_ports(brokers: list[BrokerEntry] | tuple[BrokerEntry, ...]) -> None:
    taken = [entry for entry in brokers if not is_free(entry.port)]
    if taken:
        ports = ", ".join(f"{entry.port} (broker {entry.id})" for entry in taken)
        are_in_use = f"port {ports} is in use" if len(taken) == 1 else f"ports {ports} are in use"
        raise LaunchError(
            f"{are_in_use}: stop what listens there, or use other ports with `minibroker up --base-port PORT`"
        )


def _summary(cluster: ClusterFile) -> str:
    settings = "".join(f", {name}={value}" for name, value in cluster.settings.items())
    log_dirs = f", log directories: {cluster.log_dirs} each" if cluster.log_dirs > 1 else ""
    return (
        f"brokers: {len(cluster.brokers)}, base port {cluster.brokers[0].port}, ZooKeeper {cluster.zookeeper.connect}"
        f"{log_dirs}{settings}"
    )


def _has_replicas(log_dir: Path) -> bool:
    """Directories of replicas that have gone, which stay for a while, do not end in a partition's number."""
    try:
        return any(entry.is_dir() and entry.name.rpartition("-")[2].isdecimal() for entry in log_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # of a disk that fails: it must not pass for empty
        return True


def _is_full(directory: Path) -> bool:
    try:
        found = os.statvfs(directory)
    except FileNotFoundError:
        return False
    return found.f_bavail * found.f_frsize < LITTLE_ROOM_BYTES


def _lives(entry: BrokerEntry) -> bool:
    return entry.process is not None and is_alive(entry.process)


def name_of(member: Member) -> str:
    return "ZooKeeper" if isinstance(member, str) else f"broker {member}"


def _cannot(member: Member, state: ProcessState, number: signal.Signals) -> str:
    name = name_of(member)
    if state is ProcessState.GONE:
        return f"{name} is not running: `minibroker start {member}` starts it"
    if number is signal.SIGCONT:
        return f"{name} is not paused, so there is nothing to resume: see `minibroker status`"
    return f"{name} is paused: `minibroker resume {member}` first"


def _end(processes: list[Process], *, kill: bool, timeout_s: float) -> None:
    """Terminate, and kill those that have not ended in time. Raises LaunchTimedOut where even that does not end one."""
    if not kill:
        for process in processes:
            send_signal(process, signal.SIGTERM)
            # One that is paused hears nothing until it goes on.
            send_signal(process, signal.SIGCONT)
        processes = wait_until_gone(processes, timeout_s)
    for process in processes:
        send_signal(process, signal.SIGKILL)
    left = wait_until_gone(processes, KILL_TIMEOUT_S)
    if left:
        raise LaunchTimedOut(
            f"process {left[0].pid} does not end even when killed: it hangs inside the operating system"
        )
