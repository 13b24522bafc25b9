"""Samples for the plots of the last ten minutes, kept in memory.

They are taken as long as the console runs, watched or not, since a plot that begins when it is looked at shows nothing
of what has happened. A sample comes from the brokers' answers to any client, so that remote clusters have plots, too.
Only the times of producers' requests come from the metrics ports of a cluster of this machine. Failovers are shorter
than the interval: the plots take them from the timeline, which has their exact times.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition

EVERY_S = 5.0
KEPT_S = 600.0
SHARE = 0.01
"""Of a core: a sample that costs more than 50 ms is followed by a longer pause."""
MAX_EVERY_S = 30.0
ASK_TIMEOUT_S = 1.0
MAX_METRICS_BYTES = 16 * 1024 * 1024

_PRODUCE = 'kafka_network_requestmetrics_totaltimems_{}{{request="Produce"}} '


class Sight(NamedTuple):
    """What one look at the cluster finds."""

    ends: Mapping[TopicPartition, int]
    """High watermarks of the partitions whose leaders answered, without internal topics."""
    leaderless: int
    under_replicated: int
    follower_lag: int
    """Committed records that in-sync and other followers lack, summed up."""
    group_lag: int


class ProduceTimes(NamedTuple):
    """Of one broker, since it started."""

    requests: float
    total_ms: float


class Sample(NamedTuple):
    at_s: float
    """By the wall clock."""
    records_per_s: float | None
    produce_ms: float | None
    """The mean time of producers' requests since the sample before. None: there were none, or it is not known."""
    leaderless: int
    under_replicated: int
    follower_lag: int
    group_lag: int


class Sampler:
    def __init__(self, look: Callable[[], Awaitable[Sight]], files: Path | None) -> None:
        """`look` raises MinibrokerError or TimeoutError if no broker answers, which leaves a gap in the plots."""
        self._look = look
        self._files = files
        self._before: tuple[float, Sight] | None = None
        self._times_before: dict[int, ProduceTimes] = {}
        self._samples: deque[Sample] = deque()
        self.version = 0
        """Increases with each sample."""

    @property
    def samples(self) -> list[Sample]:
        return list(self._samples)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            used_s = time.process_time()
            await self.sample()
            cost_s = time.process_time() - used_s
            await asyncio.sleep(min(MAX_EVERY_S, max(EVERY_S, cost_s / SHARE)))

    async def sample(self) -> None:
        try:
            sight, times = await asyncio.gather(self._look(), asyncio.to_thread(self._ask_for_times))
        except (TimeoutError, MinibrokerError):
            self._before = None
            return
        now_s, at_s = time.monotonic(), time.time()
        produce_ms, self._times_before = mean_ms(self._times_before, times), times
        rate = None if self._before is None else records_per_s(self._before[1], sight, now_s - self._before[0])
        self._before = now_s, sight
        self._samples.append(Sample(at_s, rate, produce_ms, *sight[1:]))
        while self._samples[0].at_s < at_s - KEPT_S:
            self._samples.popleft()
        self.version += 1

    def _ask_for_times(self) -> dict[int, ProduceTimes]:
        ports = {} if self._files is None else _metrics_ports(self._files)
        if not ports:
            return {}
        with ThreadPoolExecutor(len(ports)) as pool:
            answers = dict(zip(ports, pool.map(_ask, ports.values()), strict=True))
        return {broker: times for broker, times in answers.items() if times is not None}


def records_per_s(before: Sight, now: Sight, seconds: float) -> float:
    """Return the rate of the partitions that both looks have seen. A log whose end went back counts as none."""
    grown = (max(0, end - before.ends[each]) for each, end in now.ends.items() if each in before.ends)
    return sum(grown) / max(seconds, 0.001)


def mean_ms(before: Mapping[int, ProduceTimes], now: Mapping[int, ProduceTimes]) -> float | None:
    """Return the mean time of the requests in between; None if there were none. A broker that has started anew counts
    from zero."""
    requests = total_ms = 0.0
    for broker, times in now.items():
        earlier = before.get(broker)
        if earlier is not None and earlier.requests <= times.requests:
            requests += times.requests - earlier.requests
            total_ms += times.total_ms - earlier.total_ms
    return total_ms / requests if requests else None


def _metrics_ports(files: Path) -> dict[int, int]:
    try:
        brokers = LocalCluster(files).file().brokers
    except LaunchError:
        return {}
    return {broker.id: broker.metrics_port for broker in brokers if broker.metrics_port is not None}


def _ask(port: int) -> ProduceTimes | None:
    connection = HTTPConnection(LOOPBACK, port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return produce_times(connection.getresponse().read(MAX_METRICS_BYTES).decode("utf-8", "replace"))
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def produce_times(metrics: str) -> ProduceTimes | None:
    """Return the times of Produce from a broker's metrics; None while it starts."""
    found = []
    for kind in ("count", "sum"):
        _, there, rest = metrics.partition("\n" + _PRODUCE.format(kind))
        if not there:
            return None
        found.append(float(rest.partition("\n")[0]))
    return ProduceTimes(*found)
