"""DIR/cluster.json: what the launcher knows of the cluster whose data is in DIR.

It is written when processes are started or the cluster is taken down, never when one dies: the operating system is
asked which of them live. Its field `bootstrap` is what every other command reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import Process
from minibroker.protocol.world.real import RealDisk

FILE_NAME = "cluster.json"
LOCK_NAME = "cluster.lock"


class BrokerEntry(msgspec.Struct, frozen=True):
    id: int
    port: int
    process: Process | None = None
    """The last one started for this broker; it may be gone."""
    metrics_port: int | None = None
    """Where Prometheus finds `/metrics`."""
    settings: dict[str, str] = {}
    """Given to this broker alone, on top of what all are given."""
    group_id: int | None = None
    """Under which it runs, where that is not the launcher's own."""

    @property
    def address(self) -> tuple[str, int]:
        """Where it answers, or would."""
        return LOOPBACK, self.port


class ZooKeeperEntry(msgspec.Struct, frozen=True):
    """What the brokers connect to. `port` and `process` are set only where it was started here."""

    connect: str
    port: int | None = None
    process: Process | None = None


class ClusterFile(msgspec.Struct, frozen=True):
    zookeeper: ZooKeeperEntry
    brokers: tuple[BrokerEntry, ...]
    settings: dict[str, str] = {}
    """Given to every broker on top of what the launcher sets, under Kafka's names."""
    log_dirs: int = 1
    """How many log directories each broker has."""
    log_level: str = ""
    """MINIBROKER_LOG_LEVEL as it was at the last `up`: `start` in another shell goes by it. Empty: it was not set."""
    running: bool = False
    """False once the cluster was taken down on purpose."""
    bootstrap: str = ""
    version: int = 1

    def broker(self, broker_id: int) -> BrokerEntry:
        """Raises LaunchError that lists the ids there are."""
        for entry in self.brokers:
            if entry.id == broker_id:
                return entry
        ids = ", ".join(str(entry.id) for entry in self.brokers)
        raise LaunchError(f"there is no broker {broker_id} in this cluster: its ids are {ids}")

    def with_broker(self, changed: BrokerEntry) -> ClusterFile:
        brokers = tuple(changed if entry.id == changed.id else entry for entry in self.brokers)
        return msgspec.structs.replace(self, brokers=brokers)

    def processes(self) -> list[Process]:
        """All that were started, ZooKeeper first."""
        started = [self.zookeeper.process, *(entry.process for entry in self.brokers)]
        return [process for process in started if process is not None]


def load(directory: Path) -> ClusterFile | None:
    """None where there was never a cluster. Raises LaunchError for a file that is damaged."""
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
    """Raises LaunchError where the file cannot be written."""
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
            _write_where_it_stands(path, data)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written: {error.strerror}; make room there, or make it writable"
        ) from error


def _write_where_it_stands(path: Path, data: bytes) -> None:
    """A full disk has no room for another file, but it has for this one, whose blocks stay allocated."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        # Blanks after the JSON do no harm, should this be all that is written.
        os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """No other command starts or forgets processes of this cluster meanwhile. Held for milliseconds, so it waits."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
