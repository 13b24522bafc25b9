"""Slow calls of a broker's disks.

A write that takes seconds stops the whole broker, since records are written on the event loop; a flush that does stops
the topics with durability=synced. When the disk answers again, nothing shows why clients have waited. So a World whose
disk measures each write and flush is put below all parts, and slow ones are remembered for WINDOW_S.

Only time in which the process runs counts (`running_time`): a broker that is stopped during a call has no slow disk.

Rejected: measuring in the log (a dozen places write files); the lag of the event loop (it does not name the disk).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from minibroker.protocol.messages import Buffer
from minibroker.protocol.world import Beside, Clock, Descriptors, Disk, Executor, File, Lock, Network, World, ZooKeeper

SLOW_S = 1.0
WINDOW_S = 20.0
MOST_REMEMBERED = 1_000
WRITE, FLUSH = "write", "flush"


class SlowCalls(NamedTuple):
    """Those of one log directory, under way or ended within WINDOW_S."""

    log_dir: str
    calls: int
    longest_s: float
    longest: str
    """WRITE or FLUSH."""


class _Ended(NamedTuple):
    at_s: float
    took_s: float
    call: str


class DiskTimes:
    """Worker threads add calls as well; all that is shared changes in single steps."""

    def __init__(self, log_dirs: Sequence[str], running_s: Callable[[], float]) -> None:
        self.running_s = running_s
        self._healed_s = dict.fromkeys(log_dirs, -math.inf)
        """When injected faults of the disk ended. Time before is not counted."""
        self._ended = {path: deque[_Ended](maxlen=MOST_REMEMBERED) for path in log_dirs}
        self._flushes: dict[object, tuple[str, float]] = {}
        """The paths and beginnings of those under way."""
        self.totals = dict.fromkeys(log_dirs, 0)

    def ended(self, path: str, call: str, began_s: float) -> None:
        now_s = self.running_s()
        log_dir = self._log_dir(path) if now_s - began_s >= SLOW_S else None
        if log_dir is not None:
            self._ended[log_dir].append(_Ended(now_s, now_s - began_s, call))
            self.totals[log_dir] += 1

    def flush(self, path: str, flush: Callable[[], None]) -> None:
        """Call `flush`, which may hang: it counts before it has ended."""
        began_s, token = self.running_s(), object()
        self._flushes[token] = path, began_s
        try:
            flush()
        finally:
            del self._flushes[token]
            self.ended(path, FLUSH, began_s)

    def healed(self, log_dir: str) -> None:
        """Forget the calls of a disk whose injected faults have ended, on request."""
        if log_dir in self._healed_s:
            self._healed_s[log_dir] = self.running_s()

    def slow(self) -> Iterator[SlowCalls]:
        """Yield the slow calls of each log directory that had any."""
        now_s = self.running_s()
        flushes = [(self._log_dir(path), began_s) for path, began_s in list(self._flushes.values())]
        for log_dir, ended in self._ended.items():
            measured = [each for each in list(ended) if each.at_s >= now_s - WINDOW_S]
            measured += [_Ended(now_s, now_s - began_s, FLUSH) for of, began_s in flushes if of == log_dir]
            healed_s = self._healed_s[log_dir]
            calls = [
                (took_s, each.call)
                for each in measured
                if (took_s := each.at_s - max(each.at_s - each.took_s, healed_s)) >= SLOW_S
            ]
            if calls:
                yield SlowCalls(log_dir, len(calls), *max(calls))

    def _log_dir(self, path: str) -> str | None:
        return next((known for known in self._ended if path == known or path.startswith(f"{known}/")), None)


def disk_metrics(times: DiskTimes) -> Iterator[Metric]:
    slow = CounterMetricFamily(
        "minibroker_disk_slow_calls", f"Writes and flushes that took {SLOW_S:g} s or longer", labels=["dir"]
    )
    for log_dir, count in times.totals.items():
        slow.add_metric([log_dir], count)
    yield slow


class TimedFile:
    """See `minibroker.protocol.world.File`. What is not measured costs nothing more."""

    __slots__ = (
        "_file",
        "_path",
        "_times",
        "close",
        "modified_ms",
        "pread",
        "set_modified_ms",
        "size",
        "truncate",
    )

    def __init__(self, file: File, path: str, times: DiskTimes) -> None:
        self._file = file
        self._path = path
        self._times = times
        self.pread = file.pread
        self.size = file.size
        self.modified_ms = file.modified_ms
        self.set_modified_ms = file.set_modified_ms
        self.truncate = file.truncate
        self.close = file.close

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        began_s = self._times.running_s()
        written = self._file.pwrite(data, position)
        self._times.ended(self._path, WRITE, began_s)
        return written

    def fdatasync(self) -> None:
        self._times.flush(self._path, self._file.fdatasync)


class TimedDisk:
    """See `minibroker.protocol.world.Disk`."""

    def __init__(self, disk: Disk, times: DiskTimes) -> None:
        self._disk = disk
        self._times = times

    def open(self, path: str, *, create: bool = False) -> File:
        return TimedFile(self._disk.open(path, create=create), path, self._times)

    def read_file(self, path: str) -> bytes:
        return self._disk.read_file(path)

    def write_atomically(self, path: str, data: bytes) -> None:
        self._times.flush(path, lambda: self._disk.write_atomically(path, data))

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def list(self, path: str) -> list[str]:
        return self._disk.list(path)

    def make_directories(self, path: str) -> None:
        self._disk.make_directories(path)

    def rename(self, old: str, new: str) -> None:
        self._disk.rename(old, new)

    def remove(self, path: str) -> None:
        self._disk.remove(path)

    def remove_tree(self, path: str) -> None:
        self._disk.remove_tree(path)

    def sync_directory(self, path: str) -> None:
        self._times.flush(path, lambda: self._disk.sync_directory(path))

    def lock(self, path: str) -> Lock:
        return self._disk.lock(path)

    def space(self, path: str) -> tuple[int, int]:
        return self._disk.space(path)

    def descriptors(self) -> Descriptors:
        return self._disk.descriptors()

    def boot_id(self) -> str:
        return self._disk.boot_id()


class TimedWorld:
    """See `minibroker.protocol.world.World`."""

    def __init__(self, world: World, log_dirs: Sequence[str], running_s: Callable[[], float]) -> None:
        self._world = world
        self.disk_times = DiskTimes(log_dirs, running_s)
        self.clock: Clock = world.clock
        self.network: Network = world.network
        self.disk: Disk = TimedDisk(world.disk, self.disk_times)
        self.zookeeper: ZooKeeper = world.zookeeper
        self.random: Random = world.random

    def new_executor(self, name: str) -> Executor:
        return self._world.new_executor(name)

    def beside(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> Beside:
        return self._world.beside(main, name)
