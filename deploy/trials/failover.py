"""Rounds of kills under load, which measure the longest write stall of each and count lost records.

A new topic gets a record per millisecond on each of its partitions, with acks=all. In each round the victims are killed
with SIGKILL. If the cluster can still accept writes, it must accept some before the victims are started again; then
every replica must be back in the ISR before the next round. Finally all records are read back and judged
(`minibroker.deploy.trials.trial`).
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import StrEnum
from random import SystemRandom
from typing import NamedTuple

from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.values import Values
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import ZOOKEEPER, AllBrokers, BrokerId, Member, ZooKeeperServer, name_of
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.trial import Gap, Trial, TrialVerdict, longest_gap, new_topic, patience, wait_until_whole
from minibroker.protocol.model import TopicPartition

PARTITIONS = 3
MAX_REPLICAS = 3
VALUE_BYTES = 100
SENT_PER_PARTITION_AND_SECOND = 1_000

_ACKNOWLEDGED_BETWEEN = 50
"""Records acknowledged on every partition before a kill and after it."""
_ACKNOWLEDGED_QUIETLY = 1_000
"""Records acknowledged on every partition before the first kill, during which the quiet gap is measured."""

Tell = Callable[[str], None]
"""Called with a line for each round."""

PlayRound = Callable[[Trial, int], Awaitable["Round"]]


class Victims(StrEnum):
    LEADER = "leader"
    CONTROLLER = "controller"
    BOTH = "both"
    ZOOKEEPER = "zookeeper"
    ALL = "all"


_WITHOUT_WRITES = (Victims.BOTH, Victims.ALL)
"""Victims after which fewer brokers live than min.insync.replicas needs."""


class Round(NamedTuple):
    killed: list[Member]
    gap: Gap
    """The longest time without an acknowledgement on one partition."""
    whole_after_s: float
    """The time from the kill until every replica was in its ISR again."""
    with_controller: bool = False
    """Whether the controller was among them, so that another had to be elected first."""


class FailoverOutcome(NamedTuple):
    topic: str
    verdict: TrialVerdict
    failures: list[str]
    """The reasons of records that were reported as failed, each once."""
    quiet: Gap
    """The longest gap in the second before the first kill, which this machine causes without kills."""
    rounds: list[Round]

    def figures(self) -> dict[str, object]:
        """Return the verdict, and the gaps in whole milliseconds."""
        ordered = sorted(each.gap.seconds for each in self.rounds)
        return {
            **self.verdict._asdict(),
            "quiet_gap_ms": round(self.quiet.seconds * 1_000),
            "gap_median_ms": round(statistics.median(ordered) * 1_000),
            "gap_p95_ms": round(percentile(ordered, 0.95) * 1_000),
            "gap_max_ms": round(ordered[-1] * 1_000),
        }


def choose_victims(who: Victims, view: ClusterView, partition: TopicPartition, brokers: Sequence[int]) -> list[Member]:
    """Return the members to kill in a whole cluster; Victims.LEADER is the leader of `partition`."""
    leader, controller = view.partitions[partition].leader_id, view.controller_id
    assert controller is not None  # the cluster is whole
    match who:
        case Victims.LEADER:
            return [leader]
        case Victims.CONTROLLER:
            return [controller]
        case Victims.BOTH:
            # One broker may have both roles: then another one dies with it.
            other = next(broker for broker in brokers if broker != controller)
            return [controller, other if leader == controller else leader]
        case Victims.ZOOKEEPER:
            return [ZOOKEEPER]
        case Victims.ALL:
            return list(brokers)


async def play_rounds(cluster: LocalCluster, who: Victims, rounds: int, tell: Tell) -> FailoverOutcome:
    """Create a topic and play the rounds. Raises MinibrokerError if the cluster rejects writes or does not recover."""
    if who in (Victims.LEADER, Victims.CONTROLLER, Victims.BOTH):
        _require_two_brokers(cluster)
    if who is Victims.ZOOKEEPER:
        _require_running(cluster, cluster.resolve(ZooKeeperServer()))

    async def play(trial: Trial, number: int) -> Round:
        return await _kill_and_start(cluster, who, trial, number)

    return await _play(cluster, play, who, rounds, tell)


async def restart_in_turn(cluster: LocalCluster, rounds: int, tell: Tell) -> FailoverOutcome:
    """Stop every broker cleanly and start it again, one after the other, `rounds` times. As `play_rounds`, with a round
    for each broker."""
    _require_two_brokers(cluster)
    brokers = [entry.id for entry in cluster.file().brokers]

    async def play(trial: Trial, number: int) -> Round:
        return await _restart(cluster, brokers[number % len(brokers)], trial)

    return await _play(cluster, play, "restart", rounds * len(brokers), tell)


async def _play(cluster: LocalCluster, play: PlayRound, what: str, rounds: int, tell: Tell) -> FailoverOutcome:
    brokers = [entry.id for entry in cluster.file().brokers]
    _require_running(cluster, brokers)
    names = (f"bench-failover-{number}" for number in itertools.count(1))
    topic = await new_topic(cluster, names, PARTITIONS, min(MAX_REPLICAS, len(brokers)))
    await _whole(cluster, topic)
    rate = SENT_PER_PARTITION_AND_SECOND * PARTITIONS
    trial = Trial(cluster.bootstrap(), topic, PARTITIONS, _values(), records_per_second=rate)
    played: list[Round] = []
    async with trial.sending():
        await _acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
        began_s = time.monotonic()
        await _acknowledged(trial, _ACKNOWLEDGED_QUIETLY)
        quiet = longest_gap(trial.acknowledged, began_s, time.monotonic())
        for number in range(rounds):
            await _acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
            played.append(await play(trial, number))
            gap, and_controller = played[-1].gap, ", with the controller" if played[-1].with_controller else ""
            tell(f"{what} {number + 1}/{rounds}{and_controller}: writes stalled for {gap.seconds * 1_000:.0f} ms")
    async with patience("the records could not be read back"):
        verdict = await trial.verdict()
    return FailoverOutcome(topic, verdict, list(dict.fromkeys(trial.failures)), quiet, played)


def _require_two_brokers(cluster: LocalCluster) -> None:
    if len(cluster.file().brokers) < 2:
        raise LaunchError(
            f"the cluster in {cluster.directory} has 1 broker, and at least 2 are needed for one to take over: "
            "start one with `minibroker up --brokers 3 --data DIR` in another directory"
        )


def _require_running(cluster: LocalCluster, members: Sequence[Member]) -> None:
    for member in members:
        if cluster.state_of(member) is not ProcessState.RUNNING:
            raise LaunchError(
                f"{name_of(member)} is not running: see `minibroker status`, and repair the cluster first"
            )


def _values() -> Iterator[bytes]:
    values, run = Values(), SystemRandom().getrandbits(32)
    return (values.make(run, number, VALUE_BYTES) for number in itertools.count())


async def _restart(cluster: LocalCluster, broker_id: int, trial: Trial) -> Round:
    await _whole(cluster, trial.topic)
    began_s = time.monotonic()
    await asyncio.to_thread(cluster.stop, BrokerId(broker_id))
    await _acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
    await asyncio.to_thread(cluster.start, BrokerId(broker_id))
    await _whole(cluster, trial.topic)
    await _acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
    now_s = time.monotonic()
    return Round([broker_id], longest_gap(trial.acknowledged, began_s, now_s), now_s - began_s)


async def _kill_and_start(cluster: LocalCluster, who: Victims, trial: Trial, number: int) -> Round:
    brokers = [entry.id for entry in cluster.file().brokers]
    partition = TopicPartition(trial.topic, number % PARTITIONS)
    view = await _whole(cluster, trial.topic)
    killed = choose_victims(who, view, partition, brokers)
    began_s = time.monotonic()
    await asyncio.to_thread(_kill, cluster, who, killed)
    if who not in _WITHOUT_WRITES:
        await _acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
    await asyncio.to_thread(_start, cluster, who)
    await _acknowledged(trial, _ACKNOWLEDGED_BETWEEN)
    gap = longest_gap(trial.acknowledged, began_s, time.monotonic())
    await _whole(cluster, trial.topic)
    return Round(killed, gap, time.monotonic() - began_s, view.controller_id in killed)


def _kill(cluster: LocalCluster, who: Victims, killed: Sequence[Member]) -> None:
    if who is Victims.ALL:
        cluster.kill(AllBrokers())
        return
    for member in killed:
        cluster.kill(ZooKeeperServer() if isinstance(member, str) else BrokerId(member))


def _start(cluster: LocalCluster, who: Victims) -> None:
    cluster.start(ZooKeeperServer() if who is Victims.ZOOKEEPER else AllBrokers())


async def _whole(cluster: LocalCluster, topic: str) -> ClusterView:
    return await wait_until_whole(
        cluster,
        topic,
        f"a broker is missing, or a replica of {topic} is not in its ISR: see `minibroker status`, and start what is "
        "missing with `minibroker start all`; it did not recover",
    )


async def _acknowledged(trial: Trial, more: int) -> None:
    async with patience("not every partition took writes: see `minibroker status`; it did not recover"):
        await trial.wait_for_acknowledgements(more)
