"""DIR/cluster.json: the launcher's record of the cluster whose data is in DIR.

It is written when processes are started or the cluster is taken down, not when a process dies: the operating system
knows which of them live. All other commands read its field `bootstrap`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from minibroker.deploy.errors import LaunchError, hidden_from_pytest
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import Process
from minibroker.protocol.world.real import RealDisk

__tracebackhide__ = hidden_from_pytest

FILE_NAME = "cluster.json"
LOCK_NAME = "cluster.lock"


class Leaving(msgspec.Struct, frozen=True):
    """A broker whose replicas move to the others, until it is removed. Another command can go on with that."""

    throttle: int | None = None
    """Bytes per second of the copying. None: unlimited."""
    topics: tuple[str, ...] = ()
    """The topics that are throttled."""


class BrokerEntry(msgspec.Struct, frozen=True):
    id: int
    port: int
    process: Process | None = None
    """The last process of this broker; it may be gone."""
    metrics_port: int | None = None
    """The port of `/metrics`."""
    settings: dict[str, str] = {}
    """Settings of this broker alone, which override those of the cluster."""
    group_id: int | None = None
    """The group under which it runs, if not the launcher's own."""
    leaving: Leaving | None = None
    """Set while `minibroker brokers remove` moves its replicas away."""

    @property
    def address(self) -> tuple[str, int]:
        return LOOPBACK, self.port


class ZooKeeperEntry(msgspec.Struct, frozen=True):
    """The ZooKeeper of the brokers. `port` and `process` are set only if the launcher starts it."""

    connect: str
    port: int | None = None
    process: Process | None = None


class ClusterFile(msgspec.Struct, frozen=True):
    zookeeper: ZooKeeperEntry
    brokers: tuple[BrokerEntry, ...]
    settings: dict[str, str] = {}
    """Settings of every broker under Kafka's names, which override the launcher's defaults."""
    log_dirs: int = 1
    """The number of log directories of each broker."""
    secure: bool = False
    """Whether clients connect by TLS and SASL alone (`secured.py`)."""
    allow_faults: bool = False
    """Whether brokers obey the files of `injected.py`."""
    log_level: str = ""
    """MINIBROKER_LOG_LEVEL at the last `up`, which `start` also uses in other shells; empty if it was not set."""
    replicas: int | None = None
    """The replicas of topics that ask for no number. It stays while the cluster runs and grows, so that all brokers
    have the same. None: as many as suit the number of brokers."""
    running: bool = False
    """False after the cluster was taken down on purpose."""
    bootstrap: str = ""
    version: int = 1

    @property
    def base_port(self) -> int:
        """The port that broker 1 has, or would have."""
        return self.brokers[0].port - self.brokers[0].id + 1

    def broker(self, broker_id: int) -> BrokerEntry:
        """Raises LaunchError with the existing ids."""
        for entry in self.brokers:
            if entry.id == broker_id:
                return entry
        ids = ", ".join(str(entry.id) for entry in self.brokers)
        raise LaunchError(f"there is no broker {broker_id} in this cluster: its ids are {ids}")

    def with_broker(self, changed: BrokerEntry) -> ClusterFile:
        brokers = tuple(changed if entry.id == changed.id else entry for entry in self.brokers)
        return msgspec.structs.replace(self, brokers=brokers)

    def without_broker(self, broker_id: int) -> ClusterFile:
        return msgspec.structs.replace(self, brokers=tuple(entry for entry in self.brokers if entry.id != broker_id))

    def processes(self) -> list[Process]:
        """Return all processes that were started, ZooKeeper first."""
        started = [self.zookeeper.process, *(entry.process for entry in self.brokers)]
        return [process for process in started if process is not None]


def load(directory: Path) -> ClusterFile | None:
    """Return None if there is no cluster. Raises LaunchError if the file is damaged."""
    path = directory / FILE_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return msgspec.json.decode(data, type=ClusterFile)
    except msgspec.MsgspecError as error:
        raise LaunchError(
            f"{path} is damaged ({error}): remove it; the data stays, and `minibroker up` writes it anew"
        ) from error


def save(directory: Path, cluster: ClusterFile) -> None:
    """Raises LaunchError if the file cannot be written."""
    bootstrap = ",".join(f"{LOOPBACK}:{entry.port}" for entry in cluster.brokers)
    encoded = msgspec.json.encode(msgspec.structs.replace(cluster, bootstrap=bootstrap))
    data = msgspec.json.format(encoded, indent=2) + b"\n"
    path = (directory / FILE_NAME).absolute()
    try:
        try:
            RealDisk().write_atomically(str(path), data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _overwrite(path, data)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written: {error.strerror}; make room there, or make it writable"
        ) from error


def _overwrite(path: Path, data: bytes) -> None:
    """Write in place: a full disk has no room for another file, but this one's blocks stay allocated."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        # Blanks after the JSON do no harm, in case the truncation fails.
        os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Exclude other commands that start or record processes of this cluster. Waits, as it is held for milliseconds.

    The lock file stays only beside a cluster file: a refused `up` leaves nothing in a directory without a cluster."""
    path = directory / LOCK_NAME
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, _locked(path))
        try:
            yield
        finally:
            if not (directory / FILE_NAME).exists():
                path.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Return a descriptor of the lock file, which is locked. Another command may remove the file between the opening
    and the locking; a lock on a removed file excludes no other command."""
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    stack.pop_all()
                    return descriptor
