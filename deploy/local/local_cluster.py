"""A cluster on this machine: ZooKeeper and N brokers as processes, started, broken and stopped.

Broker N keeps its data in DIR/broker-N/, ZooKeeper in DIR/zookeeper/; their output is in DIR/logs/. The secret by which
the brokers know each other is in DIR/broker.secret, their credential for ZooKeeper in DIR/zookeeper.digest.
DIR/cluster.json has all that is needed to find the processes again, so every method also works in other processes than
the one that called `up`. Nothing restarts a process that died: a cluster that repaired itself would hide the effect of
an experiment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from minibroker.deploy.errors import LaunchError, LaunchTimedOut, hidden_from_pytest
from minibroker.deploy.local import (
    broker_process,
    cluster_file,
    console_file,
    data_directory,
    injected,
    plan,
    ports,
    processes,
    resolution,
    secret_file,
    secured,
    zookeeper,
)
from minibroker.deploy.local.broker_process import LOG_LEVEL, HandedOver, StartingBroker
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, Leaving, ZooKeeperEntry
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import (
    KILL_TIMEOUT_S,
    POLL_INTERVAL_S,
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
from minibroker.deploy.local.resolution import NotElected
from minibroker.deploy.local.who import (
    ZOOKEEPER,
    AllBrokers,
    Coordinated,
    CoordinatorOf,
    Elected,
    Member,
    Who,
    ZooKeeperServer,
    name_of,
)
from minibroker.deploy.observing.access import ANYBODY, Access, AsBroker
from minibroker.deploy.observing.cluster_view import (
    ClusterView,
    ask_cluster,
    ask_groups,
    ask_transactional_ids,
    has_group,
    has_transactional_id,
    have_coordinators,
)
from minibroker.deploy.observing.examination import examine
from minibroker.deploy.observing.status import Status, status_of_processes
from minibroker.protocol import faults

__tracebackhide__ = hidden_from_pytest

STOP_TIMEOUT_S = 30.0
ELECTION_TIMEOUT_S = 3.0
FORMING_TIMEOUT_S = 5.0


class LocalCluster:
    """The cluster whose files are in `directory`. Blocking; methods raise LaunchError and LaunchTimedOut."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._ports = ports.PortLeases()
        """Of the cluster that `up` has started, also while one of its processes is dead: it needs its port again."""
        weakref.finalize(self, self._ports.release)

    # -- looking --

    def file(self) -> ClusterFile:
        """Return the cluster file. Raises LaunchError if there is no cluster in the directory."""
        found = self.file_or_none()
        if found is None:
            raise LaunchError(
                f"there is no cluster in {self.directory}: run `minibroker up`, or name another with --data"
            )
        return found

    def file_or_none(self) -> ClusterFile | None:
        return cluster_file.load(self.directory)

    def bootstrap(self) -> str:
        """Return `host:port,host:port` of all brokers, alive or dead."""
        return self.file().bootstrap

    def log_of(self, member: Member) -> Path:
        name = ZOOKEEPER if isinstance(member, str) else f"broker-{member}"
        return self.directory / "logs" / f"{name}.log"

    def state_of(self, member: Member) -> ProcessState:
        return state_of(self._process_of(self.file(), member))

    def view(self) -> ClusterView:
        """Ask the brokers that are neither gone nor paused; a broker that hangs is waited for 2 s."""
        cluster = self.file()
        ours = [entry.address for entry in cluster.brokers]
        # A paused broker would accept the connection and never answer.
        running = [entry.address for entry in cluster.brokers if state_of(entry.process) is ProcessState.RUNNING]
        return asyncio.run(ask_cluster(running, without=ours, access=self._access(cluster)))

    def status(self, *, asks_controller: bool = False, asks_stalls: bool = False) -> Status:
        """Return the state of processes, brokers and partitions. See `examine`."""
        return self.look(asks_controller=asks_controller, asks_stalls=asks_stalls)[1]

    def look(self, *, asks_controller: bool, asks_stalls: bool) -> tuple[ClusterView, Status]:
        """Return what the brokers say, and the status. See `examine`."""
        cluster = self.file()
        states = {entry.id: state_of(entry.process) for entry in cluster.brokers}
        with ThreadPoolExecutor(1) as thread:
            server = thread.submit(self._state_of_zookeeper, cluster)
            view, offline_log_dirs = asyncio.run(
                examine(
                    # A paused broker would accept the connection and never answer.
                    [entry.address for entry in cluster.brokers if states[entry.id] is ProcessState.RUNNING],
                    [entry.address for entry in cluster.brokers],
                    self._access(cluster),
                    asks_controller=asks_controller,
                    asks_stalls=asks_stalls,
                )
            )
        ordered = injected.all_faults(self.directory, cluster)
        silent = [
            entry
            for entry in cluster.brokers
            if states[entry.id] is ProcessState.RUNNING and entry.address not in view.answered
        ]
        found = status_of_processes(
            cluster,
            states,
            server.result(),
            view,
            silent=[entry.id for entry in silent],
            offline_log_dirs=offline_log_dirs,
            recoveries=ask_recoveries(
                {entry.id: entry.metrics_port for entry in silent if entry.metrics_port is not None}
            ),
            last_errors={
                broker_id: error
                for broker_id, state in states.items()
                if state is ProcessState.GONE
                and (error := broker_process.last_error(self.log_of(broker_id))) is not None
            },
            full_disk=str(self.directory) if data_directory.is_full(self.directory) else None,
            faults={broker_id: faults.described(found) for broker_id, found in ordered.items()},
            cut_from_zookeeper=[id for id, found in ordered.items() if found.zookeeper_is_cut or found.is_isolated],
        )
        return view, found

    def _state_of_zookeeper(self, cluster: ClusterFile) -> ProcessState:
        if cluster.zookeeper.port is not None:
            return state_of(cluster.zookeeper.process)
        answers = zookeeper.is_any_serving(cluster.zookeeper.connect, zookeeper.tls_of(cluster.settings))
        return ProcessState.RUNNING if answers else ProcessState.GONE

    def resolve(self, who: Who, *, must_exist: bool = False) -> list[Member]:
        """Return the members that `who` names.

        If the elected member was killed a moment ago, or none is elected yet, wait up to ELECTION_TIMEOUT_S for the
        next election. Raises LaunchError if there is no such broker, topic, partition, leader, group, transactional id
        or controller. A coordinator that does not say whether it has the group or the id passes, unless `must_exist`.
        """
        if not isinstance(who, Elected):
            return resolution.named(who, self.file())
        deadline = time.monotonic() + ELECTION_TIMEOUT_S
        while True:
            view = self.view()
            found = resolution.elected(who, self.file(), view)
            state = None if isinstance(found, NotElected) else self.state_of(found)
            exists = self._exists(who, found, view) if isinstance(found, int) and isinstance(who, Coordinated) else True
            is_settled = state is ProcessState.PAUSED or (state is ProcessState.RUNNING and exists is not None)
            if is_settled or time.monotonic() >= deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        if isinstance(found, NotElected):
            raise LaunchError(found.reason)
        if isinstance(who, Coordinated) and state is not ProcessState.GONE:
            if exists is False:
                ask = ask_groups if isinstance(who, CoordinatorOf) else ask_transactional_ids
                raise resolution.no_such_name(who, asyncio.run(ask(view)))
            if exists is None and must_exist:
                raise resolution.unconfirmed(who, found, state is ProcessState.PAUSED)
        return [found]

    def _exists(self, who: Coordinated, coordinator: int, view: ClusterView) -> bool | None:
        """Return whether there is such a group or transactional id; None if its coordinator does not say."""
        if self.state_of(coordinator) is not ProcessState.RUNNING or coordinator not in view.brokers:
            return None
        if isinstance(who, CoordinatorOf):
            return asyncio.run(has_group(view, coordinator, who.group))
        return asyncio.run(has_transactional_id(view, coordinator, who.transactional_id))

    # -- the whole --

    def up(
        self,
        brokers: int | None = None,
        base_port: int | None = None,
        zookeeper_connect: str | None = None,
        settings: Mapping[str, str] | None = None,
        log_dirs: int | None = None,
        secure: bool | None = None,
        allow_faults: bool | None = None,
    ) -> ClusterFile:
        """Start everything and return once every broker serves.

        None means the value of the last time in this directory, or the default; a broker that has replicas there is
        never left out. If any process fails, all are killed, and the cluster file is as it was before. Raises
        LaunchError and LaunchTimedOut.
        """
        options = plan.Options(brokers, base_port, zookeeper_connect, settings, log_dirs, secure, allow_faults)
        with self._owned() as before:
            with_replicas = data_directory.brokers_with_replicas(self.directory)
            self._ports.release()
            planned = plan.planned(self.directory, before, options, with_replicas, self._ports.choose)
            self._ports.keep([entry.port for entry in planned.brokers])
            return self._launch(planned, before)

    def launch(self, planned: ClusterFile) -> ClusterFile:
        """Start a cluster that is planned already, regardless of an earlier one in the directory."""
        with self._owned() as before:
            return self._launch(planned, before)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[ClusterFile | None]:
        """Lock the directory, in which nothing may run, and yield the cluster file of the last time."""
        with (
            data_directory.made(self.directory),
            data_directory.naming_a_full_disk(self.directory),
            cluster_file.locked(self.directory),
        ):
            before = self.file_or_none()
            if before is not None:
                self._check_not_running(before)
            yield before

    def _launch(self, cluster: ClusterFile, before: ClusterFile | None) -> ClusterFile:
        cluster = msgspec.structs.replace(cluster, log_level=os.environ.get(LOG_LEVEL, ""))
        plan.check_ports(cluster.brokers, ports.is_free)
        tls = zookeeper.tls_of(cluster.settings)
        if cluster.zookeeper.port is None:
            zookeeper.check_servers(cluster.zookeeper.connect, tls)
        elif tls is not None:
            raise LaunchError(zookeeper.OWN_WITHOUT_TLS)
        cluster_file.save(self.directory, cluster)
        try:
            injected.begin(self.directory)
            self._make_secrets(cluster)
            if cluster.zookeeper.port is not None:
                cluster = self._spawn_zookeeper(cluster)
            cluster, starting = self._spawn_brokers(cluster, cluster.brokers)
            # The brokers start meanwhile, and try again until ZooKeeper answers.
            self._wait_for_zookeeper(cluster.zookeeper)
            broker_process.wait_until_ready(starting)
            if cluster.secure:
                _in_thread(lambda: self._make_user(cluster))
        except BaseException:
            self._end_all(self.file(), kill=True, timeout_s=0)
            # Without an earlier cluster, settings that a broker may have rejected must not stay.
            left = before or msgspec.structs.replace(self.file(), settings={})
            cluster_file.save(self.directory, msgspec.structs.replace(left, running=False))
            raise
        _in_thread(self._form)
        return cluster

    def _make_user(self, cluster: ClusterFile) -> None:
        addresses = [entry.address for entry in cluster.brokers]
        asyncio.run(secured.make_user(self.directory, addresses, self._access(cluster)))

    def _form(self) -> None:
        """Wait until every broker knows all the others, and at every broker groups have coordinators.

        Asking for one creates the offsets topic now, not after the pause in which the controller waits for further
        brokers, and a broker may die before the first group is used. After FORMING_TIMEOUT_S the cluster counts as up
        in any case: `minibroker status` reports the problem.
        """
        cluster = self.file()
        addresses = [entry.address for entry in cluster.brokers]
        access = self._access(cluster)

        def has_formed() -> bool:
            view = asyncio.run(ask_cluster(addresses, access=access))
            return view.brokers.keys() >= {entry.id for entry in cluster.brokers} and not view.uninformed

        deadline = time.monotonic() + FORMING_TIMEOUT_S
        if wait_until(has_formed, FORMING_TIMEOUT_S) and plan.offsets_replicas(cluster) <= len(addresses):
            wait_until(lambda: asyncio.run(have_coordinators(addresses, access=access)), deadline - time.monotonic())

    def running(self, options: plan.Options) -> ClusterFile | None:
        """Return the cluster if it runs, or None.

        Waits for an `up` that is under way. Raises LaunchError if only a part runs, or not with these options; `grow`
        adds brokers that are missing.
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
        if differences := plan.differences(known, options):
            fewer = options.brokers is not None and options.brokers < len(known.brokers)
            raise LaunchError(
                f"the cluster in {self.directory} is running already, but not with {', '.join(differences)} "
                f"({plan.summary(known)}): {'use `minibroker brokers remove ID`, or ' if fewer else ''}stop it with "
                "`minibroker down` first, or use another --data"
            )
        return known

    def down(self, *, kill: bool = False, timeout_s: float = STOP_TIMEOUT_S) -> list[Member]:
        """Stop the living processes, brokers before ZooKeeper, and return them. Data stays.

        Without `kill`, SIGTERM comes first, and SIGKILL after `timeout_s`.
        """
        ended = self._end_all(self.file(), kill=kill, timeout_s=timeout_s)
        with cluster_file.locked(self.directory):
            self._write_that_it_is_down()
        self._ports.release()
        return ended

    def delete_data(self) -> None:
        """Remove every file of the cluster. Raises LaunchError while a process of it lives."""
        cluster = self.file()
        self._check_not_running(cluster)
        # An earlier, larger cluster may have had more brokers.
        others = (self.directory / name for name in (ZOOKEEPER, secured.DIRECTORY, injected.DIRECTORY, "logs"))
        for path in [*self.directory.glob("broker-*"), *others]:
            if path.exists():
                shutil.rmtree(path)
        for name in (
            secret_file.FILE_NAME,
            secret_file.DIGEST_FILE_NAME,
            secured.CLIENT_FILE,
            cluster_file.FILE_NAME,
            cluster_file.LOCK_NAME,
            console_file.FILE_NAME,
        ):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files in it are not ours
            self.directory.rmdir()

    # -- growing and shrinking --

    def grow(self, count: int) -> list[int]:
        """Start brokers beside the others until there are `count`, and return their ids once they serve. No replicas
        move to them. If any does not start, the cluster is as it was before. Raises LaunchError, LaunchTimedOut."""
        if count > data_directory.MAX_BROKERS:
            raise LaunchError(f"{count} brokers are too many: at most {data_directory.MAX_BROKERS} are allowed")
        with data_directory.naming_a_full_disk(self.directory), cluster_file.locked(self.directory):
            before = self.file()
            if count <= len(before.brokers):
                return []
            if not before.running:
                raise LaunchError(
                    f"the cluster in {self.directory} is down: start it with `minibroker up --brokers {count}`"
                )
            self._check_zookeeper(before)
            grown = plan.grown(before, count, self._ports.choose)
            known = {entry.id for entry in before.brokers}
            added = [entry for entry in grown.brokers if entry.id not in known]
            self._ports.keep([entry.port for entry in added])
            plan.check_ports(added, ports.is_free)
            starting: list[StartingBroker] = []
            try:
                for entry in added:
                    grown, started = self._spawn_broker(grown, entry)
                    starting.append(started)
                broker_process.wait_until_ready(starting)
            except BaseException:
                processes.end([started.process for started in starting], kill=True, timeout_s=0)
                cluster_file.save(self.directory, before)
                raise
        _in_thread(self._form)
        return [entry.id for entry in added]

    def mark(self, broker_id: int, leaving: Leaving | None) -> None:
        """Record that the replicas of a broker move away, for other commands; None: it stays."""
        with cluster_file.locked(self.directory):
            known = self.file()
            changed = msgspec.structs.replace(known.broker(broker_id), leaving=leaving)
            cluster_file.save(self.directory, known.with_broker(changed))

    def forget(self, broker_id: int) -> None:
        """Remove a broker that is gone from the cluster, with its directories: its replicas must have moved away.
        Raises LaunchError."""
        with cluster_file.locked(self.directory):
            known = self.file()
            if is_alive(known.broker(broker_id).process):
                raise LaunchError(f"broker {broker_id} is running: `minibroker brokers remove {broker_id}` stops it")
            cluster_file.save(self.directory, known.without_broker(broker_id))
            injected.file_of(self.directory, broker_id).unlink(missing_ok=True)
            data_directory.remove(self.directory, broker_id)

    # -- one or some --

    def start(self, who: Who) -> list[Member]:
        """Start members that are gone, and wait until they serve; `AllBrokers` means all brokers that are gone."""
        if isinstance(who, Elected):
            raise LaunchError(
                "a leader, follower, coordinator or controller is running already: give `start` a broker id, all or "
                "zookeeper"
            )
        with data_directory.naming_a_full_disk(self.directory), injected.naming_faults(self.directory, self.file()):
            return self._start_zookeeper(who) if isinstance(who, ZooKeeperServer) else self._start_brokers(who)

    def handed_over(self, broker_id: int) -> HandedOver | None:
        """Return the report of a stopped broker about its leaders; None if it printed none."""
        return broker_process.handed_over(self.log_of(broker_id))

    def stop(self, who: Who, timeout_s: float = STOP_TIMEOUT_S) -> list[Member]:
        """Stop cleanly (SIGTERM): brokers first hand over their leaders (`handed_over`). Raises LaunchTimedOut."""
        acted = self._signal(who, signal.SIGTERM, from_states=(ProcessState.RUNNING,))
        self._wait_for_end(acted, timeout_s, lambda member: f"`minibroker kill {member}`")
        return acted

    def kill(self, who: Who) -> list[Member]:
        """Kill (SIGKILL), like a crash. Returns once the processes are gone."""
        acted = self._signal(who, signal.SIGKILL, from_states=(ProcessState.RUNNING, ProcessState.PAUSED))
        self._wait_for_end(acted, KILL_TIMEOUT_S, lambda _: "it hangs inside the operating system")
        return acted

    def pause(self, who: Who) -> list[Member]:
        """Pause (SIGSTOP): connections stay open and nothing is answered. Returns once the processes stand still."""
        acted = self._signal(who, signal.SIGSTOP, from_states=(ProcessState.RUNNING,))
        wait_until(lambda: all(self.state_of(member) is not ProcessState.RUNNING for member in acted), KILL_TIMEOUT_S)
        return acted

    def resume(self, who: Who) -> list[Member]:
        """Resume after `pause` (SIGCONT)."""
        return self._signal(who, signal.SIGCONT, from_states=(ProcessState.PAUSED,))

    # -- inside --

    def _access(self, cluster: ClusterFile) -> Access:
        """Return how to ask the brokers: as one of them, where not anybody may ask."""
        protocols = {plan.protocol_of(cluster, entry) for entry in cluster.brokers}
        if protocols == {"PLAINTEXT"}:
            return ANYBODY
        ids = {entry.address: entry.id for entry in cluster.brokers}
        is_encrypted = any(protocol.endswith("SSL") for protocol in protocols)
        return AsBroker(self.directory / secret_file.FILE_NAME, ids, is_encrypted)

    def _process_of(self, cluster: ClusterFile, member: Member) -> Process | None:
        return cluster.zookeeper.process if isinstance(member, str) else cluster.broker(member).process

    def _check_not_running(self, cluster: ClusterFile) -> None:
        names = [f"broker {entry.id}" for entry in cluster.brokers if is_alive(entry.process)]
        if is_alive(cluster.zookeeper.process):
            names.append("ZooKeeper")
        if names:
            raise LaunchError(
                f"the data directory {self.directory} is in use by a running cluster ({', '.join(names)}): "
                "stop it with `minibroker down`, start what is missing with `minibroker start all`, "
                "or use another --data"
            )

    def _check_zookeeper(self, cluster: ClusterFile) -> None:
        if cluster.zookeeper.process is not None and not is_alive(cluster.zookeeper.process):
            raise LaunchError(
                "ZooKeeper is not running: `minibroker start zookeeper` first, or bring all up with `minibroker up`"
            )

    def _signal(self, who: Who, number: signal.Signals, from_states: tuple[ProcessState, ...]) -> list[Member]:
        """Signal the members in one of the states. Raises LaunchError for a single member in another state."""
        members = self.resolve(who, must_exist=number is not signal.SIGCONT)
        cluster = self.file()
        acted: list[Member] = []
        for member in members:
            process = self._process_of(cluster, member)
            state = state_of(process)
            if process is not None and state in from_states and send_signal(process, number):
                acted.append(member)
            elif not isinstance(who, AllBrokers):
                raise LaunchError(_cannot(member, state, number))
        return acted

    def _wait_for_end(self, members: list[Member], timeout_s: float, remedy: Callable[[Member], str]) -> None:
        cluster = self.file()
        waited_for = {member: self._process_of(cluster, member) for member in members}
        left = wait_until_gone([process for process in waited_for.values() if process is not None], timeout_s)
        for member, process in waited_for.items():
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
            self._check_zookeeper(cluster)
            gone = [entry for entry in cluster.brokers if entry.id in members and not is_alive(entry.process)]
            if not gone and not isinstance(who, AllBrokers):
                raise LaunchError(_why_not_started(members[0], self.state_of(members[0])))
            plan.check_ports(gone, ports.is_free)
            _, starting = self._spawn_brokers(cluster, gone)
        broker_process.wait_until_ready(starting)
        return [started.broker_id for started in starting]

    def _start_zookeeper(self, who: ZooKeeperServer) -> list[Member]:
        members = self.resolve(who)
        with cluster_file.locked(self.directory):
            cluster = self.file()
            ours = cluster.zookeeper
            if (process := ours.process) is not None and is_alive(process):
                raise LaunchError(f"ZooKeeper is running already (process {process.pid})")
            if ours.port is not None and not ports.is_free(ours.port):
                raise LaunchError(f"port {ours.port} of ZooKeeper is in use: stop what listens there, then try again")
            cluster = self._spawn_zookeeper(cluster)
        self._wait_for_zookeeper(cluster.zookeeper)
        return members

    def _spawn_brokers(
        self, cluster: ClusterFile, entries: Sequence[BrokerEntry]
    ) -> tuple[ClusterFile, list[StartingBroker]]:
        """Spawn brokers; each is in the cluster file as soon as it runs."""
        starting: list[StartingBroker] = []
        for entry in entries:
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

    def _make_secrets(self, cluster: ClusterFile) -> None:
        """Called while no broker runs, since running brokers would not know new secrets."""
        names = [secret_file.FILE_NAME]
        if cluster.zookeeper.port is not None:
            names.append(secret_file.DIGEST_FILE_NAME)
        for name in names:
            try:
                secret_file.make(self.directory / name)
            except OSError as error:
                raise LaunchError(f"{self.directory / name} cannot be written: {error.strerror}") from error
        if cluster.secure:
            secured.make(self.directory)

    def _secret(self, name: str) -> str | None:
        """Return the path of a secret's file, or None if there is none: an earlier version made fewer."""
        path = self.directory / name
        return str(path) if path.exists() else None

    def _spawn_broker(self, cluster: ClusterFile, entry: BrokerEntry) -> tuple[ClusterFile, StartingBroker]:
        digest = None if cluster.zookeeper.port is None else self._secret(secret_file.DIGEST_FILE_NAME)
        with uninterrupted():
            started = broker_process.start(
                entry.id,
                entry.port,
                entry.metrics_port,
                data_directory.log_dirs(self.directory, entry.id, cluster.log_dirs),
                self.log_of(entry.id),
                cluster.zookeeper.connect,
                plan.settings_of(
                    cluster, entry, self._secret(secret_file.FILE_NAME), digest, self._secured(cluster, entry)
                ),
                entry.group_id,
                os.environ.get(LOG_LEVEL) or cluster.log_level,
                injected.file_of(self.directory, entry.id) if cluster.allow_faults else None,
            )
            cluster = cluster.with_broker(msgspec.structs.replace(entry, process=started.process))
            cluster = msgspec.structs.replace(cluster, running=True)
            self._save_or_kill(cluster, started.process)
        return cluster, started

    def _secured(self, cluster: ClusterFile, entry: BrokerEntry) -> dict[str, str]:
        if not cluster.secure:
            return {}
        listeners = broker_process.listeners(entry.port, protocol=secured.PROTOCOL)
        return {"listeners": listeners, **secured.settings(self.directory)}

    def _save_or_kill(self, cluster: ClusterFile, started: Process) -> None:
        """Save the file, or kill the process that it cannot record: no command would find that one again."""
        try:
            cluster_file.save(self.directory, cluster)
        except LaunchError:
            processes.end([started], kill=True, timeout_s=0)
            raise

    def _wait_for_zookeeper(self, ours: ZooKeeperEntry) -> None:
        if ours.process is not None and ours.port is not None:
            zookeeper.wait_until_serving(ours.process, ours.port, self.log_of(ZOOKEEPER))

    def _end_all(self, cluster: ClusterFile, *, kill: bool, timeout_s: float) -> list[Member]:
        """End brokers before ZooKeeper, which a clean shutdown needs. Returns the members that lived."""
        ended: list[Member] = [entry.id for entry in cluster.brokers if is_alive(entry.process)]
        processes.end([entry.process for entry in cluster.brokers], kill=kill, timeout_s=timeout_s)
        if is_alive(cluster.zookeeper.process):
            ended.append(ZOOKEEPER)
            processes.end([cluster.zookeeper.process], kill=kill, timeout_s=timeout_s)
        return ended


def _in_thread(work: Callable[[], None]) -> None:
    """Run it in a thread of its own, since the caller's may have a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def _why_not_started(broker_id: Member, state: ProcessState) -> str:
    if state is ProcessState.PAUSED:
        return f"broker {broker_id} is paused: `minibroker resume {broker_id}`"
    return f"broker {broker_id} is running already; to start it anew, first `minibroker stop {broker_id}`"


def _cannot(member: Member, state: ProcessState, number: signal.Signals) -> str:
    name = name_of(member)
    if state is ProcessState.GONE:
        return f"{name} is not running: `minibroker start {member}` starts it"
    if number is signal.SIGCONT:
        return f"{name} is not paused, so there is nothing to resume: see `minibroker status`"
    return f"{name} is paused: `minibroker resume {member}` first"
