"""Samples for the plots of the last ten minutes, kept in memory.

They are taken as long as the console runs, watched or not, since a plot that begins when it is looked at shows nothing
of what has happened. A sample comes from the brokers' answers to any client, so that remote clusters have plots, too.
Only what brokers see of producers' requests comes from the metrics ports of a cluster of this machine. Failovers are
shorter than the interval: the plots take them from the timeline, which has their exact times.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from minibroker.deploy.console.producers import (
    Counters,
    Rates,
    Seen,
    counters_of,
    look,
    mean_ms,
    refused_per_s,
    topic_rates,
)
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
MAX_GROUPS_KEPT = 1_000
MAX_METRICS_BYTES = 16 * 1024 * 1024


class Sight(NamedTuple):
    """What one look at the cluster finds."""

    ends: Mapping[TopicPartition, int]
    """High watermarks of the partitions whose leaders answered, without internal topics."""
    leaderless: int | None
    """None: not all topics may be seen."""
    under_replicated: int | None
    """As `leaderless`."""
    follower_lag: int | None
    """Committed records that in-sync and other followers lack, summed up. None: the broker of a replica did not
    answer."""
    group_lags: Mapping[str, int | None] | None
    """Of groups that have committed. None: the groups, the commits of one, or the end of a partition are not known."""
    without_commit: int = 0
    """Groups that have committed nothing, so that they have no lag."""

    def of_some_topics(self) -> Sight:
        """Return what is known if there may be topics that this user may not see. There may be hidden groups, too."""
        return self._replace(
            leaderless=None, under_replicated=None, follower_lag=None, group_lags=self.group_lags or None
        )


class Sample(NamedTuple):
    at_s: float
    """By the wall clock."""
    records_per_s: float | None
    produce_ms: float | None
    """The mean time of producers' requests since the sample before. None: there were none, or it is not known."""
    waiting: int | None
    """Producers' requests that wait for followers. None: not known."""
    leaderless: int | None
    """None: no broker answered, or not all topics may be seen."""
    under_replicated: int | None
    """As `leaderless`."""
    follower_lag: int | None
    """None: not known."""
    group_lag: int | None
    """Of the sampled groups. None: that of one is not known, or none has committed."""
    refused_per_s: float | None = None
    """Producers' batches that brokers answered with an error. None: not known."""
    hides_topics: bool = False
    """Whether brokers answered, and not all topics may be seen."""

    @property
    def is_gap(self) -> bool:
        """Whether no broker answered."""
        return self.leaderless is None and not self.hides_topics


def total_lag(sight: Sight) -> int | None:
    """Return the lag of all sampled groups; None if that of one is not known, or no group has committed."""
    if sight.group_lags is None or (not sight.group_lags and sight.without_commit):
        return None
    known = [lag for lag in sight.group_lags.values() if lag is not None]
    return sum(known) if len(known) == len(sight.group_lags) else None


class Lags:
    """The lag of groups in the last ten minutes: of those that are sampled, and of others while a page shows them."""

    def __init__(self) -> None:
        self._lags: dict[str, deque[tuple[float, int | None]]] = {}
        """By group; the latest comes last."""
        self.version = 0
        """Increases with each value."""

    def add(self, at_s: float, lags: Mapping[str, int | None]) -> None:
        """Add lags; None: it is not known. Groups on a page are read more often than they are sampled, and those
        readings are left out, unless a lag becomes known or unknown."""
        for group, lag in lags.items():
            if lag is None and group not in self._lags:
                continue
            kept = self._lags.pop(group, deque())
            self._lags[group] = kept
            if not kept or at_s - kept[-1][0] >= EVERY_S / 2 or (kept[-1][1] is None) != (lag is None):
                kept.append((at_s, lag))
                self.version += 1
            while kept[0][0] < at_s - KEPT_S:
                kept.popleft()
        for group, kept in list(self._lags.items()):
            if len(self._lags) <= MAX_GROUPS_KEPT and kept[-1][0] >= at_s - KEPT_S:
                break
            del self._lags[group]

    def lost(self, at_s: float) -> None:
        """No lag is known."""
        self.add(at_s, dict.fromkeys(self._lags))

    def of(self, group: str) -> Sequence[tuple[float, int | None]]:
        """Return the lags with their times, by the wall clock."""
        return tuple(self._lags.get(group, ()))


class Sampler:
    def __init__(self, look: Callable[[], Awaitable[Sight]], files: Path | None) -> None:
        """`look` raises MinibrokerError or TimeoutError if no broker answers, which leaves a gap in the plots."""
        self._look = look
        self._files = files
        self._before: tuple[float, Sight] | None = None
        self._seen: dict[int, Seen] = {}
        self.rates: list[Rates] = []
        """Of the producers of each broker, in the last sample."""
        self.topics: dict[str, float] = {}
        """Records per second of each topic, in the last sample."""
        self._samples: deque[Sample] = deque()
        self.lags = Lags()
        self.version = 0
        """Increases with each look at the cluster."""

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
            sight, counters = await asyncio.gather(self._look(), asyncio.to_thread(self._ask_for_counters))
        except (TimeoutError, MinibrokerError):
            self._before, self.rates, self.topics = None, [], {}
            self._add(Sample(time.time(), None, None, None, None, None, None, None))
            self.lags.lost(time.time())
            return
        now_s, at_s = time.monotonic(), time.time()
        self._seen, self.rates = look(self._seen, counters, now_s)
        rate = None
        if self._before is not None:
            self.topics = topic_rates(self._before[1].ends, sight.ends, now_s - self._before[0])
            rate = sum(self.topics.values())
        self._before = now_s, sight
        waiting = int(sum(each.waiting for each in counters.values())) if counters else None
        self._add(
            Sample(
                at_s,
                rate,
                mean_ms(self.rates),
                waiting,
                sight.leaderless,
                sight.under_replicated,
                sight.follower_lag,
                total_lag(sight),
                refused_per_s(self.rates),
                sight.leaderless is None,
            )
        )
        if sight.group_lags is None:
            self.lags.lost(at_s)
        else:
            self.lags.add(at_s, sight.group_lags)

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample)
        while self._samples[0].at_s < sample.at_s - KEPT_S:
            self._samples.popleft()
        self.version += 1

    def _ask_for_counters(self) -> dict[int, Counters]:
        ports = {} if self._files is None else _metrics_ports(self._files)
        if not ports:
            return {}
        with ThreadPoolExecutor(len(ports)) as pool:
            answers = dict(zip(ports, pool.map(_ask, ports.values()), strict=True))
        return {broker: counters for broker, counters in answers.items() if counters is not None}


def _metrics_ports(files: Path) -> dict[int, int]:
    try:
        brokers = LocalCluster(files).file().brokers
    except LaunchError:
        return {}
    return {broker.id: broker.metrics_port for broker in brokers if broker.metrics_port is not None}


def _ask(port: int) -> Counters | None:
    connection = HTTPConnection(LOOPBACK, port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return counters_of(connection.getresponse().read(MAX_METRICS_BYTES).decode("utf-8", "replace"))
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
