"""What happened to a cluster during a test: for the report of a test that failed.

It is gathered without asking a broker, because brokers may be dead or hang: from the list of faults and repairs, the
states of the processes, and the files of timelines and logs in the cluster's directory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from minibroker.client.administering.timeline import merged
from minibroker.client.cli.timelines.failovers import failovers
from minibroker.client.cli.timelines.timeline import entries_of_all
from minibroker.client.cli.timelines.words import clock_time, milliseconds
from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.processes import state_of
from minibroker.deploy.local.who import Member

MAX_FAULTS = 50
MAX_STORIES = 5
MAX_WARNINGS = 5
"""Lines of each broker's log."""
_MAX_LOG_BYTES = 262_144
_WARNING = re.compile(r"^\S+ (WARNING|ERROR|CRITICAL) ")


class Fault(NamedTuple):
    time_ms: int
    name: str
    """The method, for instance `kill`."""
    who: str
    members: tuple[Member, ...]

    def __str__(self) -> str:
        found = ", ".join(member if isinstance(member, str) else f"broker {member}" for member in self.members)
        return f"{self.name} {self.who}".rstrip() + (f" ({found})" if found and found != self.who else "")


class Begin(NamedTuple):
    """The moment from which on evidence counts."""

    time_ms: int
    log_sizes: Mapping[Path, int]

    @classmethod
    def now(cls, directory: Path) -> Begin:
        return cls(now_ms(), {log: log.stat().st_size for log in _logs(directory)})


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def told(directory: Path, cluster: ClusterFile, faults: Sequence[Fault], begin: Begin) -> str:
    """Return lines of text. Raises OSError if the directory is gone."""
    return "\n".join(_lines(directory, cluster, faults, begin))


def _lines(directory: Path, cluster: ClusterFile, faults: Sequence[Fault], begin: Begin) -> Iterator[str]:
    states = [f"broker {entry.id} {state_of(entry.process).value}" for entry in cluster.brokers]
    if cluster.zookeeper.process is not None:
        states.append(f"ZooKeeper {state_of(cluster.zookeeper.process).value}")
    yield f"processes: {', '.join(states)}"
    yield f"data: {directory}"
    recent = [fault for fault in faults if fault.time_ms >= begin.time_ms]
    yield f"what the test did: {len(recent) or 'nothing'}"
    if len(recent) > MAX_FAULTS:
        yield f"    the last {MAX_FAULTS}:"
    for fault in recent[-MAX_FAULTS:]:
        yield f"    {clock_time(fault.time_ms)}  +{milliseconds(fault.time_ms - begin.time_ms)}  {fault}"
    entries = merged(entries_of_all(directory, 0))
    stories = [story for story in failovers(entries) if story.began_ms >= begin.time_ms]
    yield f"failovers: {len(stories) or 'none'}"
    if len(stories) > MAX_STORIES:
        yield f"    the last {MAX_STORIES}:"
    for story in stories[-MAX_STORIES:]:
        yield from (f"    {line}" for line in story.lines(short=True, name="Failover"))
    for log in _logs(directory):
        warnings = [line for line in _new_lines(log, begin.log_sizes.get(log, 0)) if _WARNING.match(line)]
        if warnings:
            yield f"the last warnings in {log.name}:"
            yield from (f"    {line[:300]}" for line in warnings[-MAX_WARNINGS:])


def _logs(directory: Path) -> list[Path]:
    return sorted(directory.glob("logs/broker-*.log"))


def _new_lines(log: Path, offset: int) -> list[str]:
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(offset, end - _MAX_LOG_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()
