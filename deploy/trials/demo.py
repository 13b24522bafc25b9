"""The story of `minibroker demo`: a cluster that loses its leader and its controller under load, and no record.

The input is real: the lines of Python's own standard library, which every machine has that runs this. They are sent
with acks=all throughout the story, so that each kill hits a cluster at work; finally all are read back and judged
(`minibroker.deploy.trials.trial`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from minibroker.client.admin import Admin
from minibroker.client.cli.timelines.failovers import last_failover
from minibroker.client.cli.timelines.story import Story
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.who import BrokerId
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.trial import Trial, TrialVerdict, longest_gap, new_topic, patience, wait_until_whole
from minibroker.protocol.model import TopicPartition

BROKERS = 3
PARTITIONS = 3
RECORDS_PER_SECOND = 10_000
DEFAULT_RECORDS = 150_000

_UNPACED = 1_000_000
_WARM_UP_RECORDS = 3_000
"""Records acknowledged on every partition before a kill."""
_RECOVERED_RECORDS = 200
"""Records acknowledged on every partition after a kill, which show that writes continue."""
_POLL_INTERVAL_S = 0.02

Tell = Callable[[str], None]
"""Called with each line of the story as it happens."""


class Kill(msgspec.Struct, frozen=True):
    """One act of the story. Seconds count from the kill."""

    role: str
    """The role for which the broker was killed."""
    broker: int
    successor: int
    """The broker that has the role now."""
    replaced_after_s: float
    stalled_s: float
    """The longest time in which one partition acknowledged nothing; the partition is `stalled_partition`."""
    stalled_partition: str
    whole_after_s: float
    """The time until every replica was in its ISR again, after the broker was started again."""


class DemoOutcome(msgspec.Struct, frozen=True):
    verdict: TrialVerdict
    kills: list[Kill]
    failures: list[str]
    """The reasons of records that were reported as failed, each once."""
    failover: Story
    """The failover of the controller, from the brokers' own records."""


def standard_library_lines() -> Iterator[bytes]:
    """Yield the lines of Python's own source files, except empty ones, over and over."""
    while True:
        for directory, directories, files in os.walk(sysconfig.get_path("stdlib")):
            # Installed packages are not part of the library.
            directories[:] = sorted({*directories} - {"site-packages", "dist-packages"})
            for name in sorted(files):
                if name.endswith(".py"):
                    for line in Path(directory, name).read_bytes().splitlines():
                        if line.strip():
                            yield line


@contextlib.contextmanager
def temporary_directory(tell: Tell, purpose: str = "demo") -> Iterator[Path]:
    """Yield a new directory, and remove it at the end, even after an interruption. After an error its logs are kept."""
    directory = Path(tempfile.mkdtemp(prefix=f"minibroker-{purpose}-"))
    try:
        yield directory
    except Exception:
        tell(f"the logs are kept in {directory}/logs")
        raise
    except BaseException:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)


@contextlib.contextmanager
def running_cluster(directory: Path, tell: Tell, settings: Mapping[str, str] | None = None) -> Iterator[LocalCluster]:
    """Start a cluster on free ports, with these broker settings, and kill it at the end. Raises LaunchError."""
    cluster = LocalCluster(directory)
    tell(f"starting ZooKeeper and {BROKERS} brokers in {cluster.directory}")
    cluster.up(BROKERS, free_ports(BROKERS)[0], settings=settings)
    try:
        tell(f"brokers 1 to {BROKERS} are up: {cluster.bootstrap()}")
        yield cluster
    finally:
        cluster.down(kill=True)


async def play(cluster: LocalCluster, records: int, tell: Tell) -> DemoOutcome:
    """Play the story. At least `records` lines are sent, more if the story takes longer. Raises MinibrokerError."""
    # Earlier demos in the same directory have left their topics.
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    topic = await new_topic(cluster, names, PARTITIONS, BROKERS)
    view = await _whole(cluster, topic)
    leaders = [str(view.partitions[TopicPartition(topic, partition)].leader_id) for partition in range(PARTITIONS)]
    tell(f"topic {topic} has {PARTITIONS} partitions of {BROKERS} replicas, led by brokers {', '.join(leaders)}")
    tell(f"the controller is broker {view.controller_id}")
    is_told = False

    def lines() -> Iterator[bytes]:
        for line in standard_library_lines():
            if is_told and trial.sent >= records:
                return
            yield line

    trial = Trial(cluster.bootstrap(), topic, PARTITIONS, lines(), records_per_second=RECORDS_PER_SECOND)
    tell(f"sending lines of Python's standard library, acks=all, {RECORDS_PER_SECOND:,} per second")
    async with trial.sending():
        kills = [await _kill_leader(cluster, trial, tell), await _kill_controller(cluster, trial, tell)]
        trial.records_per_second = _UNPACED
        is_told = True
        async with patience("the rest of the lines could not be sent"):
            while trial.sent < records:  # noqa: ASYNC110 (the sender has no event for this)
                await asyncio.sleep(_POLL_INTERVAL_S)
    failover = await _last_failover(cluster)
    tell(f"{trial.sent:,} lines sent, {trial.acknowledged_count:,} acknowledged; reading all of them back")
    async with patience("the records could not be read back"):
        verdict = await trial.verdict()
    return DemoOutcome(verdict, kills, list(dict.fromkeys(trial.failures)), failover)


async def _last_failover(cluster: LocalCluster) -> Story:
    async with Admin(cluster.bootstrap()) as admin:
        story = last_failover((await admin.timeline()).entries)
    assert story is not None  # the controller has just been killed
    return story


async def _kill_leader(cluster: LocalCluster, trial: Trial, tell: Tell) -> Kill:
    partition = TopicPartition(trial.topic, 0)

    def leader(view: ClusterView) -> int | None:
        state = view.partitions.get(partition)
        return state.leader_id if state is not None and state.leader_id in view.brokers else None

    return await _kill(cluster, trial, tell, f"leader of {partition}", leader)


async def _kill_controller(cluster: LocalCluster, trial: Trial, tell: Tell) -> Kill:
    return await _kill(cluster, trial, tell, "controller", lambda view: view.controller_id)


async def _kill(
    cluster: LocalCluster, trial: Trial, tell: Tell, role: str, holder_in: Callable[[ClusterView], int | None]
) -> Kill:
    """Kill the broker in that role. Start it again once another broker has the role and writes continue, and wait until
    all replicas are in sync."""
    await _acknowledged(trial, _WARM_UP_RECORDS)
    victim = holder_in(await _whole(cluster, trial.topic))
    assert victim is not None  # in a whole cluster every role has its holder
    tell(f"kill -9 broker {victim}, the {role}, after {trial.acknowledged_count:,} acknowledgements")
    killed_s = time.monotonic()
    await asyncio.to_thread(cluster.kill, BrokerId(victim))
    async with patience(f"no broker took over from broker {victim}"):
        while (successor := holder_in(await asyncio.to_thread(cluster.view))) in (victim, None):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL_S)
    assert successor is not None
    replaced_after_s = time.monotonic() - killed_s
    tell(f"broker {successor} is the {role} now")

    await _acknowledged(trial, _RECOVERED_RECORDS)
    gap = longest_gap(trial.acknowledged, killed_s, time.monotonic())
    stalled = str(TopicPartition(trial.topic, gap.partition))
    tell(f"writes continue; the longest stall was {gap.seconds * 1_000:.0f} ms, on {stalled}")

    await asyncio.to_thread(cluster.start, BrokerId(victim))
    await _whole(cluster, trial.topic)
    whole_after_s = time.monotonic() - killed_s
    tell(f"broker {victim} is back and all replicas are in sync, {whole_after_s:.1f} s after the kill")
    return Kill(
        role=role,
        broker=victim,
        successor=successor,
        replaced_after_s=round(replaced_after_s, 3),
        stalled_s=round(gap.seconds, 3),
        stalled_partition=stalled,
        whole_after_s=round(whole_after_s, 3),
    )


async def _whole(cluster: LocalCluster, topic: str) -> ClusterView:
    return await wait_until_whole(cluster, topic, f"a broker is missing, or a replica of {topic} is not in its ISR,")


async def _acknowledged(trial: Trial, more: int) -> None:
    async with patience("writes did not continue"):
        await trial.wait_for_acknowledgements(more)
