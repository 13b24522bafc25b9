"""A cluster that lives as long as a test, or a test run, and what can be done to it.

It is the launcher's (`deploy/local/local_cluster.py`) in a temporary directory, on leased ports, with a guardian that
takes it down where this process cannot. `SyncLocalCluster` is what works; it blocks. `LocalCluster` is the same for
coroutines: each call runs in a thread, so that the clients of the test, which live in the event loop, see what happens
while it happens. A `LocalCluster` belongs to no event loop: one that lives for the whole run serves tests that have a
loop each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from minibroker.client.administering.topics import NewTopic
from minibroker.client.context_managers import Asynchronous, Blocking
from minibroker.client.errors import TopicErrors
from minibroker.client.sync.admin import Admin
from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local import broker_process
from minibroker.deploy.local.broker_process import OWN_SETTINGS
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.data_directory import MAX_BROKERS
from minibroker.deploy.local.local_cluster import LocalCluster as Launcher
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
from minibroker.deploy.local.who import AllBrokers, Member, ZooKeeperServer, parse_who
from minibroker.deploy.testing import guardian
from minibroker.deploy.testing.isolation import Isolation
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import topic_name_problem

T = TypeVar("T")

HEALTHY_TIMEOUT_S = 30.0

_PORTS_OF_BROKER = 3
"""For clients, for the controller's orders, and for metrics."""
_GUARDIAN_TIMEOUT_S = 10.0
_COMMAND = re.compile("`(minibroker (?![^`]*--(?:data|help))[^`]+)`")
"""In a message: one that does not say yet which cluster it is for."""

Topics = Iterable[str | NewTopic]
_History = tuple[int, list[Process]]


class SyncLocalCluster(Blocking):
    """Brokers 1 to `brokers` and a ZooKeeper, as processes of this machine, within `with`.

    `topics` are there from the beginning: names (with `num.partitions` partitions, and as many replicas as there are
    brokers, three at most), or `NewTopic`. `settings` are given to every broker, `broker_settings` to single ones on
    top, by their ids; under Kafka's names, as in docs/settings.md.

    At the end every process is killed and every file removed; also after an exception or Ctrl-C, and, by the guardian,
    after this process was killed. Calls raise LaunchError, with the remedy, and LaunchTimedOut where something takes
    too long. WHO is a broker id, `"controller"`, `"leader:TOPIC-PARTITION"`, `"coordinator:GROUP"`, `"all"` or
    `"zookeeper"`. Any thread may call.
    """

    _asynchronous = "minibroker.testing.LocalCluster"

    def __init__(
        self,
        brokers: int = DEFAULT_BROKERS,
        *,
        topics: Topics = (),
        settings: Mapping[str, str] | None = None,
        broker_settings: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Raises LaunchError for a number, a setting or a topic's name that no cluster here can have."""
        if type(brokers) is not int or not 1 <= brokers <= MAX_BROKERS:
            raise LaunchError(f"brokers={brokers!r}: give a whole number from 1 to {MAX_BROKERS}")
        self._brokers = brokers
        self._topics = _new_topics(topics)
        self._settings = _checked(settings or {})
        self._broker_settings = {id: _checked(own) for id, own in (broker_settings or {}).items()}
        for id in self._broker_settings:
            if id not in range(1, brokers + 1):
                raise LaunchError(f"broker_settings: there is no broker {id}: their ids are 1 to {brokers}")
        self._owner_pid = 0
        self._launcher: Launcher | None = None
        self._guardian: Process | None = None
        self._lease: PortLease | None = None
        self._isolation: Isolation | None = None
        self._unseen_faults = 0
        """Those so far of which the processes tell nothing once they are over."""
        self._healthy: _History | None = None
        """As it was when all was found healthy the last time."""

    # -- the whole --

    def __enter__(self) -> Self:
        """Returns once every broker serves and knows the controller, and the topics are there, also that of the groups'
        offsets."""
        _refuse_in_event_loop()
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _begin(self) -> None:
        if self._launcher is not None:
            raise LaunchError("this cluster runs already: make another one")
        self._owner_pid = os.getpid()
        # Not mkdtemp: it is the guardian's before it is there, as this process may end at any moment.
        directory = Path(tempfile.gettempdir(), f"minibroker-test-{secrets.token_hex(8)}").absolute()
        self._guardian = _start_guardian(directory)
        self._launcher = Launcher(directory)
        try:
            directory.mkdir(mode=0o700)
            self._lease = lease_ports(self._brokers * _PORTS_OF_BROKER + 1)
            self._isolation = Isolation(directory)
            self._launcher.launch(self._planned(self._lease.ports))
            self.wait_healthy()
            if self._topics:
                with Admin(self.bootstrap_servers) as admin:
                    admin.create_topics(self._topics)
            self.wait_healthy()
            self._healthy = self._history()
        except BaseException as error:
            if isinstance(error, LaunchError):
                error.add_note(self._last_lines())
            self._end()
            raise

    def _planned(self, ports: list[int]) -> ClusterFile:
        count = self._brokers
        assert self._isolation is not None
        entries = [
            BrokerEntry(
                id=number + 1,
                port=ports[number],
                metrics_port=ports[2 * count + number],
                settings={
                    # Both are known in advance, so that `isolate` can close them.
                    "listeners": broker_process.listeners(ports[number], ports[count + number]),
                    **self._broker_settings.get(number + 1, {}),
                },
                group_id=self._isolation.group_id(ports[number]),
            )
            for number in range(count)
        ]
        return ClusterFile(
            zookeeper=ZooKeeperEntry(f"{LOOPBACK}:{ports[-1]}", ports[-1]),
            brokers=tuple(entries),
            settings=self._settings,
        )

    def _end(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # a child that was forked within `with` has left that, too
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        if self._isolation is not None:
            self._isolation.heal_all()
        if launcher.file_or_none() is not None:
            launcher.down(kill=True)
        if launcher.directory.exists():
            shutil.rmtree(launcher.directory)
        # Until here it would have done the rest, had this process ended.
        if self._guardian is not None:
            send_signal(self._guardian, signal.SIGKILL)
            wait_until_gone([self._guardian], _GUARDIAN_TIMEOUT_S)
        if self._lease is not None:
            self._lease.release()

    def _last_lines(self) -> str:
        """Of what the processes printed, since their directory is removed now."""
        found: list[str] = []
        for log in sorted(self.directory.glob("logs/*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            heading = f"the last lines of {log.name}:" if lines else f"{log.name} is empty: nothing was printed yet"
            found += [heading, *(f"  {line}" for line in lines)]
        return "\n".join(found)

    # -- looking --

    @property
    def _running(self) -> Launcher:
        if self._launcher is None:
            raise LaunchError("this cluster does not run: use it within `with`, or `async with`")
        return self._launcher

    @contextlib.contextmanager
    def _acting(self) -> Iterator[Launcher]:
        """Blocks its thread. A command that an error names finds this cluster: without `--data` it would act on another
        one, or on none."""
        _refuse_in_event_loop()
        launcher = self._running
        try:
            yield launcher
        except LaunchError as error:
            directory = shlex.quote(str(launcher.directory))
            error.args = (_COMMAND.sub(lambda found: f"`{found[1]} --data {directory}`", str(error)),)
            raise

    @property
    def directory(self) -> Path:
        """Where its data and, in `logs`, what it prints are while it lives. Commands reach it with `--data`."""
        return self._running.directory

    @property
    def bootstrap_servers(self) -> str:
        """`host:port,host:port` of all brokers, living or not, for any client."""
        return self._running.bootstrap()

    def log_of(self, member: Member) -> Path:
        """What a broker, by its id, or `"zookeeper"` has printed so far. Raises LaunchError where there is no such
        broker."""
        if not isinstance(member, str):
            self._running.file().broker(member)
        return self._running.log_of(member)

    def find(self, who: int | str) -> list[Member]:
        """Whom WHO means now: broker ids, or `"zookeeper"`."""
        with self._acting() as launcher:
            return launcher.resolve(parse_who(str(who)))

    def wait_healthy(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """Until all brokers run and are in the cluster, there is a controller, and every partition has a leader and all
        its replicas in the ISR. Raises LaunchTimedOut with what is wrong still."""
        problems: list[str] = []
        with self._acting() as launcher:

            def is_healthy() -> bool:
                problems[:] = launcher.status().problems()
                return not problems

            if not wait_until(is_healthy, timeout_s):
                raise LaunchTimedOut(f"the cluster is not healthy after {timeout_s:g} s: {'; '.join(problems)}")

    def _history(self) -> _History:
        """It changes with every fault and every start of a process, also by the command line."""
        return self._unseen_faults, self._running.file().processes()

    # -- topics --

    def create_topics(self, topics: Topics) -> None:
        """Returns when they have leaders and the brokers know them. Raises TopicErrors."""
        _refuse_in_event_loop()
        with Admin(self.bootstrap_servers) as admin:
            admin.create_topics(_new_topics(topics))

    def delete_topics(self, names: Iterable[str]) -> None:
        """Returns when they are gone; those that are gone already do no harm. Raises TopicErrors. Brokers that have
        replicas of them must run (`restore`)."""
        _refuse_in_event_loop()
        with Admin(self.bootstrap_servers) as admin:
            try:
                admin.delete_topics(names)
            except TopicErrors as errors:
                if not all(_says_unknown_topic(error) for error in errors.errors.values()):
                    raise

    # -- faults --

    def kill(self, who: int | str) -> list[Member]:
        """SIGKILL, as a crash. Returns whom, once they are gone."""
        with self._acting() as launcher:
            return launcher.kill(parse_who(str(who)))

    def stop(self, who: int | str) -> list[Member]:
        """SIGTERM, as before maintenance: a clean shutdown, in which others lead first. Returns whom, once they have
        ended."""
        with self._acting() as launcher:
            return launcher.stop(parse_who(str(who)))

    def start(self, who: int | str) -> list[Member]:
        """Start what was killed or stopped. Returns whom, once they serve; `wait_healthy` waits until their replicas
        are in sync, too."""
        with self._acting() as launcher:
            return launcher.start(parse_who(str(who)))

    def pause(self, who: int | str) -> list[Member]:
        """SIGSTOP: as a machine that hangs. Connections stay open and nothing is answered."""
        with self._acting() as launcher:
            self._unseen_faults += 1
            return launcher.pause(parse_who(str(who)))

    def resume(self, who: int | str) -> list[Member]:
        """SIGCONT, after `pause`."""
        with self._acting() as launcher:
            return launcher.resume(parse_who(str(who)))

    def isolate(self, who: int | str) -> list[Member]:
        """Pull the cable: the broker runs on, but reaches neither the others, ZooKeeper nor clients, nor these it;
        packets are dropped silently. Needs root, iptables with its module `owner`, and setpriv: LaunchError where one
        is missing."""
        with self._acting() as launcher:
            members = launcher.resolve(parse_who(str(who)))
        assert self._isolation is not None
        if "zookeeper" in members:
            raise LaunchError("ZooKeeper cannot be isolated: pause it, or isolate every broker")
        self._unseen_faults += 1
        for id in members:
            assert isinstance(id, int)
            self._isolation.isolate(launcher.file().broker(id))
        return members

    def heal(self) -> None:
        """After `isolate`: every cable is plugged in again. What was sent meanwhile arrives when TCP sends it again."""
        if self._isolation is not None:
            self._isolation.heal_all()

    def restore(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """After any of these: heal, resume and start whatever needs it, and wait until all is healthy."""
        with self._acting() as launcher:
            self.heal()
            launcher.resume(AllBrokers())
            if launcher.state_of("zookeeper") is ProcessState.PAUSED:
                launcher.resume(ZooKeeperServer())
            if launcher.state_of("zookeeper") is ProcessState.GONE:
                launcher.start(ZooKeeperServer())
            launcher.start(AllBrokers())
        restored = self._history()
        self.wait_healthy(timeout_s)
        self._healthy = restored

    def _restore_if_touched(self) -> None:
        """`restore` where something was done to a process since it was healthy, or one has ended by itself. No broker
        is asked, so this takes no time where all is well."""
        history = self._history()
        if history != self._healthy or any(state_of(process) is not ProcessState.RUNNING for process in history[1]):
            self.restore()


class LocalCluster(Asynchronous):
    """The same as `SyncLocalCluster`, for asyncio: `async with`, and methods that are awaited."""

    _blocking = "minibroker.testing.SyncLocalCluster"

    def __init__(
        self,
        brokers: int = DEFAULT_BROKERS,
        *,
        topics: Topics = (),
        settings: Mapping[str, str] | None = None,
        broker_settings: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Raises LaunchError for a number or a setting that no cluster here can have."""
        self._cluster = SyncLocalCluster(brokers, topics=topics, settings=settings, broker_settings=broker_settings)

    @classmethod
    def around(cls, cluster: SyncLocalCluster) -> Self:
        """The cluster that runs already, for coroutines. Whoever began it ends it."""
        made = cls.__new__(cls)
        made._cluster = cluster
        return made

    async def __aenter__(self) -> Self:
        await _in_thread(self._cluster._begin, undo=self._cluster._end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await _in_thread(self._cluster._end)

    @property
    def directory(self) -> Path:
        """As in SyncLocalCluster; so are all that follow."""
        return self._cluster.directory

    @property
    def bootstrap_servers(self) -> str:
        return self._cluster.bootstrap_servers

    def log_of(self, member: Member) -> Path:
        return self._cluster.log_of(member)

    async def find(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.find(who))

    async def wait_healthy(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        await _in_thread(lambda: self._cluster.wait_healthy(timeout_s))

    async def create_topics(self, topics: Topics) -> None:
        await _in_thread(lambda: self._cluster.create_topics(topics))

    async def delete_topics(self, names: Iterable[str]) -> None:
        await _in_thread(lambda: self._cluster.delete_topics(names))

    async def kill(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.kill(who))

    async def stop(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.stop(who))

    async def start(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.start(who))

    async def pause(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.pause(who))

    async def resume(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.resume(who))

    async def isolate(self, who: int | str) -> list[Member]:
        return await _in_thread(lambda: self._cluster.isolate(who))

    async def heal(self) -> None:
        await _in_thread(self._cluster.heal)

    async def restore(self, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        await _in_thread(lambda: self._cluster.restore(timeout_s))


async def _in_thread(work: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
    """A thread cannot be interrupted: where the caller is cancelled, its end is waited for all the same, so that
    nothing of it goes on unseen, and what it did is undone."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled = await _ended(running)
    if cancelled is None:
        return running.result()
    running.exception()  # the cancellation is what the caller hears of
    if undo is not None:
        undoing = asyncio.ensure_future(asyncio.to_thread(undo))
        await _ended(undoing)
        undoing.result()
    raise cancelled


async def _ended(running: asyncio.Future[T]) -> asyncio.CancelledError | None:
    """Wait until it has, however often the caller is cancelled meanwhile (anyio does it at every turn of the loop), and
    return the first of these."""
    first: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as cancelled:
            first = first or cancelled
    return first


def _start_guardian(directory: Path) -> Process:
    command = [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), str(directory)]
    return spawn(command, Path(os.devnull))


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
    """Settings that brokers do not know, they refuse themselves."""
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
