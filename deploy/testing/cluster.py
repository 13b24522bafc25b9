"""A cluster that lives as long as a test or a test run, and the faults that a test can cause in it.

It is the launcher's cluster (`deploy/local/local_cluster.py`) in a temporary directory, on leased ports, with a
guardian that takes it down if this process cannot. `SyncLocalCluster` does the work and blocks. `LocalCluster` runs
each call of it in a thread, so that the test's clients in the event loop go on meanwhile. A `LocalCluster` belongs to
no event loop: a cluster that lives for the whole run serves tests with a loop each.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from minibroker.client.administering.scram import UserScramCredentialUpsertion
from minibroker.client.administering.topics import NewTopic
from minibroker.client.context_managers import Asynchronous
from minibroker.client.errors import AuthenticationFailed, TopicErrors
from minibroker.client.security import Security
from minibroker.client.sync.admin import Admin
from minibroker.deploy.errors import LaunchError, LaunchTimedOut, hidden_from_pytest
from minibroker.deploy.local import broker_process, secured
from minibroker.deploy.local.broker_process import OWN_SETTINGS
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.data_directory import MAX_BROKERS
from minibroker.deploy.local.faulty_cluster import FaultyCluster as Launcher
from minibroker.deploy.local.plan import DEFAULT_BROKERS
from minibroker.deploy.local.ports import LOOPBACK, PortLease, lease_ports
from minibroker.deploy.local.processes import (
    Process,
    ProcessState,
    send_signal,
    spawn,
    state_of,
    wait_until,
    wait_until_gone,
)
from minibroker.deploy.local.who import AllBrokers, Member, Who, ZooKeeperServer, parse_who
from minibroker.deploy.testing import evidence, guardian
from minibroker.deploy.testing.breakable import Breakable
from minibroker.deploy.testing.isolation import Isolation
from minibroker.deploy.testing.remedies import for_tests
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import topic_name_problem
from minibroker.protocol.words import counted

__tracebackhide__ = hidden_from_pytest

P = ParamSpec("P")
T = TypeVar("T")
Running = Coroutine[Any, Any, T]

HEALTHY_TIMEOUT_S = 30.0

_PORTS_OF_BROKER = 3
"""The ports for clients, for the controller's orders, and for metrics."""
_GUARDIAN_TIMEOUT_S = 10.0
_FAULTS_KEPT = 1_000
KEEP_VARIABLE = "MINIBROKER_KEEP"
"""The environment variable with the directory below which data is kept; `--minibroker-keep` sets it."""

Topics = Iterable[str | NewTopic]
_History = tuple[int, list[Process]]


left_evidence: deque[str] = deque(maxlen=3)
"""What happened to clusters that an exception ended. The plugin adds it to the report of the test."""


class SyncLocalCluster(Breakable):
    """Brokers 1 to `brokers` and a ZooKeeper, as processes of this machine, within `with`.

    `topics` exist from the beginning: names (with `num.partitions` partitions, and a replica on each broker, three at
    most), or `NewTopic`. `settings` apply to every broker, `broker_settings`, by broker id, to single ones in addition;
    the names are Kafka's, as in docs/settings.md.

    With `tls`, brokers also have a listener that is SSL, at `ssl_bootstrap_servers`, and use it among themselves.
    `security` returns the arguments of a client for it; `certificates` has the files.

    With `secure`, the cluster is that of `minibroker up --secure`: clients need TLS, a user and access control lists.
    `security` returns the arguments of a client as `admin`, who may do everything, or as a user of `add_user`.

    At the end every process is killed and every file removed, even after an exception, Ctrl-C or, thanks to the
    guardian, a kill of this process. If a test fails by an exception that leaves `with`, its report has the `evidence`.
    Methods raise LaunchError with the remedy, and LaunchTimedOut if an operation takes too long. WHO is a broker id,
    `"controller"`, `"leader:TOPIC-PARTITION"`, `"follower:TOPIC-PARTITION"`, `"coordinator:GROUP"`,
    `"transactions:ID"`, `"all"` or `"zookeeper"`.
    Methods that take WHO return its members. Any thread may call.
    """

    _asynchronous = "minibroker.testing.LocalCluster"

    def __init__(
        self,
        brokers: int = DEFAULT_BROKERS,
        *,
        topics: Topics = (),
        settings: Mapping[str, str] | None = None,
        broker_settings: Mapping[int, Mapping[str, str]] | None = None,
        tls: bool = False,
        secure: bool = False,
    ) -> None:
        """Raises LaunchError for a number, a setting or a topic name that no cluster here can have."""
        if type(brokers) is not int or not 1 <= brokers <= MAX_BROKERS:
            raise LaunchError(f"brokers={brokers!r}: give a whole number from 1 to {MAX_BROKERS}")
        self._brokers = brokers
        self._topics = _new_topics(topics)
        self._settings = _checked(settings or {})
        self._broker_settings = {id: _checked(own) for id, own in (broker_settings or {}).items()}
        for id in self._broker_settings:
            if id not in range(1, brokers + 1):
                raise LaunchError(f"broker_settings: there is no broker {id}: their ids are 1 to {brokers}")
        if tls and secure:
            raise LaunchError("tls=True and secure=True: leave tls away, as a secured cluster has TLS")
        self._tls = tls
        self._secure = secure
        self._users: dict[str, Security] = {}
        self._certificates: Certificates | None = None
        self._owner_pid = 0
        self._launcher: Launcher | None = None
        self._guardian: Process | None = None
        self._lease: PortLease | None = None
        self._isolation: Isolation | None = None
        self._faults: deque[evidence.Fault] = deque(maxlen=_FAULTS_KEPT)
        self._evidence_begin: evidence.Begin | None = None
        self._failed_disks: set[Member] = set()
        self._unseen_faults = 0
        """The number of faults so far that leave no trace in the processes."""
        self._healthy: _History | None = None
        """The history when the cluster was last healthy."""

    # -- the whole --

    def __enter__(self) -> Self:
        """Return once every broker serves and knows the controller, and the topics and the offsets topic exist."""
        _refuse_in_event_loop()
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave_evidence(error)
        finally:
            self._end()

    def _leave_evidence(self, error: BaseException | None) -> None:
        """Gather it for pytest's report. Not as a note of the exception, because `pytest.raises` would match that."""
        is_failure = error is not None and not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if is_failure and self._launcher is not None and os.getpid() == self._owner_pid:
            left_evidence.append(self._evidence_or_reason())

    def __repr__(self) -> str:
        name, brokers = type(self).__name__, counted(self._brokers, "broker")
        if self._launcher is None:
            return f"<{name} of {brokers}, not running>"
        return f"<{name} of {brokers} at {self.bootstrap_servers}, data in {self.directory}>"

    def _begin(self) -> None:
        if self._launcher is not None:
            raise LaunchError("this cluster runs already: make another one")
        self._owner_pid = os.getpid()
        # Not mkdtemp: the guardian must know the directory before it exists, as this process may end at any moment.
        kept = os.environ.get(KEEP_VARIABLE)
        directory = Path(kept or tempfile.gettempdir(), f"minibroker-test-{secrets.token_hex(8)}").absolute()
        self._guardian = _start_guardian(directory, keeps=kept is not None)
        self._launcher = Launcher(directory)
        self._faults.clear()
        try:
            directory.mkdir(mode=0o700, parents=kept is not None)
            if self._secure:
                secured.make(directory)
            if self._tls or self._secure:
                self._certificates = Certificates(directory / "certificates")
            self._lease = lease_ports(self._brokers * (_PORTS_OF_BROKER + self._tls) + 1)
            self._isolation = Isolation(directory)
            self._launcher.launch(self._planned(self._lease.ports))
            self.wait_healthy()
            if self._topics:
                with self._admin() as admin:
                    admin.create_topics(self._topics)
            self.wait_healthy()
            self._healthy = self._history()
            self._begin_evidence()
        except BaseException as error:
            if isinstance(error, LaunchError):
                error.add_note(self._last_lines())
            self._end()
            raise

    def _planned(self, ports: list[int]) -> ClusterFile:
        count = self._brokers
        assert self._isolation is not None
        settings = self._settings
        if self._certificates is not None and self._tls:
            settings = {"security.inter.broker.protocol": "SSL", **self._certificates.settings(), **settings}
        entries = [
            BrokerEntry(
                id=number + 1,
                port=ports[number],
                metrics_port=ports[2 * count + number],
                settings={
                    # All ports are known in advance, so that `isolate` can close them.
                    "listeners": broker_process.listeners(
                        ports[number],
                        ports[count + number],
                        ports[3 * count + number] if self._tls else None,
                        secured.PROTOCOL if self._secure else "PLAINTEXT",
                    ),
                    **self._broker_settings.get(number + 1, {}),
                },
                group_id=self._isolation.group_id(ports[number]),
            )
            for number in range(count)
        ]
        return ClusterFile(
            zookeeper=ZooKeeperEntry(f"{LOOPBACK}:{ports[-1]}", ports[-1]),
            brokers=tuple(entries),
            settings=settings,
            secure=self._secure,
            allow_faults=True,
        )

    def _admin(self) -> Admin:
        return Admin(self.bootstrap_servers, **(self.security() if self._secure else {}))

    def _end(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # a child that was forked within `with` also leaves it
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        if self._isolation is not None:
            self._isolation.heal_all()
        if launcher.file_or_none() is not None:
            launcher.down(kill=True)
        if launcher.directory.exists() and KEEP_VARIABLE not in os.environ:
            shutil.rmtree(launcher.directory)
        # Until here the guardian would have done the rest.
        if self._guardian is not None:
            send_signal(self._guardian, signal.SIGKILL)
            wait_until_gone([self._guardian], _GUARDIAN_TIMEOUT_S)
        if self._lease is not None:
            self._lease.release()

    def _last_lines(self) -> str:
        """Return the last output of the processes, since their directory is removed now."""
        found: list[str] = []
        for log in sorted(self.directory.glob("logs/*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            heading = f"the last lines of {log.name}:" if lines else f"{log.name} is empty: nothing was printed yet"
            found += [heading, *(f"  {line}" for line in lines)]
        return "\n".join(found)

    # -- looking --

    def evidence(self) -> str:
        """Return what happened since the test began, as lines of text: the states of the processes, the faults, the
        failovers in words, and the last warnings of each broker. Asks no broker."""
        launcher = self._running
        assert self._evidence_begin is not None
        return evidence.told(launcher.directory, launcher.file(), self._faults, self._evidence_begin)

    def _evidence_or_reason(self) -> str:
        try:
            return self.evidence()
        except (OSError, MinibrokerError) as error:
            return f"its directory cannot be read: {error}"

    def _begin_evidence(self) -> None:
        self._evidence_begin = evidence.Begin.now(self.directory)

    @property
    def _running(self) -> Launcher:
        if self._launcher is None:
            raise LaunchError("this cluster does not run: use it within `with`, or `async with`")
        return self._launcher

    @contextlib.contextmanager
    def _acting(self) -> Iterator[Launcher]:
        """Name the remedies of a test in messages."""
        _refuse_in_event_loop()
        launcher = self._running
        try:
            yield launcher
        except LaunchError as error:
            error.args = (for_tests(str(error), launcher.directory),)
            raise

    @property
    def directory(self) -> Path:
        """The directory of its data and, in `logs`, its output, while it lives. Commands reach it with `--data`."""
        return self._running.directory

    @property
    def bootstrap_servers(self) -> str:
        """`host:port,host:port` of all brokers, alive or dead, for any client."""
        return self._running.bootstrap()

    @property
    def ssl_bootstrap_servers(self) -> str:
        """`host:port,host:port` of the listeners that are SSL or SASL_SSL, for any client. Raises LaunchError without
        `tls` and `secure`."""
        self._of_tls()
        found = [re.search(r"SSL://([^,]+)", entry.settings["listeners"]) for entry in self._running.file().brokers]
        return ",".join(matched[1] for matched in found if matched is not None)

    def security(self, client: str | None = None) -> Security:
        """Return the arguments of minibroker's clients for `ssl_bootstrap_servers`. With `tls`, and if `client` is a
        name, they have a new certificate. With `secure`, they are those of a user of `add_user`, or of `admin`. Raises
        LaunchError without either."""
        if self._secure:
            if client in (None, secured.USER):
                return secured.credentials(self.directory)
            if client not in self._users:
                raise LaunchError(f"there is no user {client!r}: call add_user({client!r}) first")
            return self._users[client]
        made: Security = {"security_protocol": "SSL", "ssl_cafile": str(self._of_tls().authority)}
        if client is not None:
            made["ssl_certfile"] = str(self._of_tls().client(client))
        return made

    def add_user(self, name: str) -> Security:
        """Create a user of a secured cluster, who may do nothing yet, with a new password (SCRAM-SHA-256). Return the
        arguments of its clients, once all brokers that run know the user. Raises LaunchError without `secure`;
        LaunchTimedOut; MinibrokerError."""
        if not self._secure:
            raise LaunchError("this cluster has no users: make it with secure=True")
        _refuse_in_event_loop()
        password = secrets.token_urlsafe(24)
        with self._admin() as admin:
            admin.alter_user_scram_credentials([UserScramCredentialUpsertion(name, secured.MECHANISM, password)])
        user: Security = {**self.security(), "sasl_plain_username": name, "sasl_plain_password": password}

        def is_unknown(broker: str) -> bool:
            try:
                with Admin(broker, **user):
                    return False
            except AuthenticationFailed:
                return True
            except NetworkError:  # it does not run, and reads all users when it does
                return False

        for broker in self.bootstrap_servers.split(","):
            if not wait_until(lambda broker=broker: not is_unknown(broker), HEALTHY_TIMEOUT_S):  # type: ignore[misc]
                raise LaunchTimedOut(f"{broker} does not know user {name!r} after {HEALTHY_TIMEOUT_S:g} s")
        self._users[name] = user
        return user

    @property
    def certificates(self) -> Certificates:
        """The authority and the certificates. Raises LaunchError without `tls` and `secure`."""
        return self._of_tls()

    def _of_tls(self) -> Certificates:
        if self._certificates is None:
            raise LaunchError("this cluster has no TLS: make it with tls=True or secure=True")
        return self._certificates

    def log_of(self, member: Member) -> Path:
        """Return the file with the output of a broker or `"zookeeper"`. Raises LaunchError for an unknown broker."""
        if not isinstance(member, str):
            self._running.file().broker(member)
        return self._running.log_of(member)

    def find(self, who: int | str) -> list[Member]:
        """Return the broker ids, or `"zookeeper"`, that WHO means now."""
        with self._acting() as launcher:
            return launcher.resolve(parse_who(str(who)))

    def wait_healthy(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """Wait until all brokers run and are in the cluster, there is a controller, and every partition has a leader
        and all its replicas in the ISR. Raises LaunchTimedOut with the remaining problems."""
        problems: list[str] = []
        with self._acting() as launcher:

            def is_healthy() -> bool:
                problems[:] = launcher.status().problems()
                return not problems

            if not wait_until(is_healthy, timeout_s):
                raise LaunchTimedOut(f"the cluster is not healthy after {timeout_s:g} s: {'; '.join(problems)}")

    def _history(self) -> _History:
        """Return a value that changes with every fault and every start of a process, also by the command line."""
        return self._unseen_faults, self._running.file().processes()

    # -- topics --

    def create_topics(self, topics: Topics) -> None:
        """Create topics, and return once they have leaders and the brokers know them. Raises TopicErrors."""
        _refuse_in_event_loop()
        with self._admin() as admin:
            admin.create_topics(_new_topics(topics))

    def delete_topics(self, names: Iterable[str]) -> None:
        """Delete topics, and return once they are gone; missing ones are ignored. Brokers that have replicas of them
        must run (`restore`). Raises TopicErrors."""
        _refuse_in_event_loop()
        with self._admin() as admin:
            try:
                admin.delete_topics(names)
            except TopicErrors as errors:
                if not all(_says_unknown_topic(error) for error in errors.errors.values()):
                    raise

    # -- faults --

    def _fault(self, name: str, who: int | str, act: Callable[[Launcher], list[Member]]) -> list[Member]:
        time_ms = evidence.now_ms()
        with self._acting() as launcher:
            members = act(launcher)
        self._faults.append(evidence.Fault(time_ms, name, str(who), tuple(members)))
        return members

    def kill(self, who: int | str) -> list[Member]:
        """Kill (SIGKILL), like a crash. Returns once the processes are gone."""
        return self._fault("kill", who, lambda launcher: launcher.kill(parse_who(str(who))))

    def stop(self, who: int | str) -> list[Member]:
        """Stop cleanly (SIGTERM), as before maintenance: leaders move first. Returns once the processes have ended."""
        return self._fault("stop", who, lambda launcher: launcher.stop(parse_who(str(who))))

    def start(self, who: int | str) -> list[Member]:
        """Start killed or stopped processes. Returns once they serve; `wait_healthy` also waits for their replicas."""
        return self._fault("start", who, lambda launcher: launcher.start(parse_who(str(who))))

    def pause(self, who: int | str) -> list[Member]:
        """Pause (SIGSTOP), like a machine that hangs: connections stay open and nothing is answered."""
        self._unseen_faults += 1
        return self._fault("pause", who, lambda launcher: launcher.pause(parse_who(str(who))))

    def resume(self, who: int | str) -> list[Member]:
        """Resume after `pause` (SIGCONT)."""
        return self._fault("resume", who, lambda launcher: launcher.resume(parse_who(str(who))))

    def isolate(self, who: int | str) -> list[Member]:
        """Cut the broker off: it runs on, but packets between it and other brokers, ZooKeeper and clients are dropped
        silently. With root, iptables with its module `owner`, and setpriv, the kernel drops them; without one of these,
        the broker itself does, and a client can connect to it but gets no answer."""
        return self._fault("isolate", who, lambda launcher: self._isolate(launcher, parse_who(str(who))))

    def _isolate(self, launcher: Launcher, who: Who) -> list[Member]:
        members = launcher.resolve(who, must_exist=True)
        assert self._isolation is not None
        if "zookeeper" in members:
            raise LaunchError('ZooKeeper cannot be isolated like a broker: cut("zookeeper", "all") cuts it from all')
        self._unseen_faults += 1
        if not self._isolation.is_possible:
            return launcher.isolate(who)
        for id in members:
            assert isinstance(id, int)
            self._isolation.isolate(launcher.file().broker(id))
        return members

    def heal(self) -> None:
        """End every fault that leaves the processes running. Data sent meanwhile arrives when TCP sends it again."""
        with self._acting() as launcher:
            healed = launcher.heal(AllBrokers())
        if (self._isolation is not None and self._isolation.heal_all()) or healed:
            self._faults.append(evidence.Fault(evidence.now_ms(), "heal", "", tuple(healed)))

    def restore(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """Undo all faults: heal, resume and start processes, and wait until the cluster is healthy."""
        with self._acting() as launcher:
            self.heal()
            launcher.resume(AllBrokers())
            restarted, self._failed_disks = self._failed_disks, set()
            if launcher.state_of("zookeeper") is ProcessState.PAUSED:
                launcher.resume(ZooKeeperServer())
            if launcher.state_of("zookeeper") is ProcessState.GONE:
                launcher.start(ZooKeeperServer())
            launcher.restart_after_a_lost_disk(restarted)
            launcher.start(AllBrokers())
        restored = self._history()
        self.wait_healthy(timeout_s)
        self._healthy = restored

    def _restore_if_touched(self) -> None:
        """Restore if there was a fault since the cluster was healthy, or a process has ended. Asks no broker, so it
        costs nothing in a healthy cluster."""
        history = self._history()
        if history != self._healthy or any(state_of(process) is not ProcessState.RUNNING for process in history[1]):
            self.restore()


def _in_threads(
    method: Callable[Concatenate[SyncLocalCluster, P], T],
) -> Callable[Concatenate[LocalCluster, P], Running[T]]:
    """Return the method as a coroutine function of LocalCluster."""

    @functools.wraps(method)
    async def run(self: LocalCluster, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _in_thread(lambda: method(self._cluster, *args, **kwargs))

    return run


class LocalCluster(Asynchronous):
    """`SyncLocalCluster` for asyncio: `async with`, and asynchronous methods."""

    _blocking = "minibroker.testing.SyncLocalCluster"

    def __init__(
        self,
        brokers: int = DEFAULT_BROKERS,
        *,
        topics: Topics = (),
        settings: Mapping[str, str] | None = None,
        broker_settings: Mapping[int, Mapping[str, str]] | None = None,
        tls: bool = False,
        secure: bool = False,
    ) -> None:
        """Raises LaunchError for a number or a setting that no cluster here can have."""
        self._cluster = SyncLocalCluster(
            brokers, topics=topics, settings=settings, broker_settings=broker_settings, tls=tls, secure=secure
        )

    @classmethod
    def around(cls, cluster: SyncLocalCluster) -> Self:
        """Return an asynchronous face of a running cluster, which its owner ends."""
        made = cls.__new__(cls)
        made._cluster = cluster
        return made

    async def __aenter__(self) -> Self:
        await _in_thread(self._cluster._begin, undo=self._cluster._end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await _in_thread(lambda: self._cluster.__exit__(kind, error, traceback))

    def __repr__(self) -> str:
        return repr(self._cluster).replace(type(self._cluster).__name__, type(self).__name__, 1)

    @property
    def directory(self) -> Path:
        return self._cluster.directory

    @property
    def bootstrap_servers(self) -> str:
        return self._cluster.bootstrap_servers

    @property
    def ssl_bootstrap_servers(self) -> str:
        return self._cluster.ssl_bootstrap_servers

    def security(self, client: str | None = None) -> Security:
        return self._cluster.security(client)

    @property
    def certificates(self) -> Certificates:
        return self._cluster.certificates

    def log_of(self, member: Member) -> Path:
        return self._cluster.log_of(member)

    add_user = _in_threads(SyncLocalCluster.add_user)
    evidence = _in_threads(SyncLocalCluster.evidence)
    find = _in_threads(SyncLocalCluster.find)
    wait_healthy = _in_threads(SyncLocalCluster.wait_healthy)
    create_topics = _in_threads(SyncLocalCluster.create_topics)
    delete_topics = _in_threads(SyncLocalCluster.delete_topics)
    kill = _in_threads(SyncLocalCluster.kill)
    stop = _in_threads(SyncLocalCluster.stop)
    start = _in_threads(SyncLocalCluster.start)
    pause = _in_threads(SyncLocalCluster.pause)
    resume = _in_threads(SyncLocalCluster.resume)
    isolate = _in_threads(SyncLocalCluster.isolate)
    cut = _in_threads(SyncLocalCluster.cut)
    slow_network = _in_threads(SyncLocalCluster.slow_network)
    drop_connections = _in_threads(SyncLocalCluster.drop_connections)
    move_clock = _in_threads(SyncLocalCluster.move_clock)
    move_coordinator = _in_threads(SyncLocalCluster.move_coordinator)
    fill_disk = _in_threads(SyncLocalCluster.fill_disk)
    break_disk = _in_threads(SyncLocalCluster.break_disk)
    slow_disk = _in_threads(SyncLocalCluster.slow_disk)
    mend_disk = _in_threads(SyncLocalCluster.mend_disk)
    heal = _in_threads(SyncLocalCluster.heal)
    restore = _in_threads(SyncLocalCluster.restore)


async def _in_thread(work: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
    """Run `work` in a thread. A thread cannot be interrupted: if the caller is cancelled, wait for its end, and then
    `undo` it."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled = await _ended(running)
    if cancelled is None:
        return running.result()
    running.exception()  # the caller gets the cancellation instead
    if undo is not None:
        undoing = asyncio.ensure_future(asyncio.to_thread(undo))
        await _ended(undoing)
        undoing.result()
    raise cancelled


async def _ended(running: asyncio.Future[T]) -> asyncio.CancelledError | None:
    """Wait until `running` has ended, and return the first cancellation of the caller meanwhile. anyio cancels at every
    turn of the loop."""
    first: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as cancelled:
            first = first or cancelled
    return first


def _start_guardian(directory: Path, keeps: bool) -> Process:
    command = [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), str(directory)]
    return spawn(command + ["keep"] * keeps, Path(os.devnull))


def _new_topics(topics: Topics) -> list[NewTopic]:
    if isinstance(topics, str):
        raise LaunchError(f"topics={topics!r}: give a list of names, as in topics=[{topics!r}]")
    made = [NewTopic(topic) if isinstance(topic, str) else topic for topic in topics]
    for topic in made:
        if (problem := topic_name_problem(topic.name)) is not None:
            raise LaunchError(f"topics: {problem}")
    return made


def _says_unknown_topic(error: MinibrokerError) -> bool:
    return isinstance(error, BrokerError) and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _checked(settings: Mapping[str, str]) -> dict[str, str]:
    """Raises LaunchError for settings that the cluster sets itself. Brokers reject unknown settings."""
    if not isinstance(settings, Mapping):
        raise LaunchError(f"settings={settings!r}: give a dict, as in {{'num.partitions': '3'}}")
    for name, value in settings.items():
        if name in OWN_SETTINGS:
            raise LaunchError(f"{name}={value}: LocalCluster sets it itself, for each broker: leave it out")
    return {name: str(value) for name, value in settings.items()}


def _refuse_in_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise LaunchError(
        "this call would hold up the event loop of its thread: await the same of minibroker.testing.LocalCluster, "
        "which the fixture minibroker_async_cluster is"
    )
