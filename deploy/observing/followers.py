"""Slow followers: replicas that lag behind their leaders, or delay acks=all, although their brokers live and answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.protocol.messages import LaggingFollower
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import all_of

_SILENT_AFTER_S = 1.0
"""A follower asks twice a second, if there are not very many partitions."""


class SlowFollower(msgspec.Struct, frozen=True):
    """The replicas of one broker that lag in the same way."""

    broker: int
    partitions: list[str]
    """`TOPIC-PARTITION` of each."""
    leaders: list[int]
    is_in_sync: bool
    is_silent: bool
    """Whether it does not ask the leaders for records."""
    records: int
    """The most that one of them lacks."""
    behind_s: float | None
    """The longest time since one of them had everything. None: at least one never had, since its leader leads."""
    silent_s: float
    """The longest time since the last fetch of one of them."""
    is_by_leader: bool = False
    """Whether it lags behind one leader alone, as other followers do, so that this leader may be the cause."""

    def sentence(self, partitions: str, remedy: str | None) -> str:
        """Return the problem, with `partitions` in words, and the remedy: `remedy`, or what to look at."""
        lacks = f"up to {self.records:,} {'record' if self.records == 1 else 'records'}"
        time = "" if self.behind_s is None else f" and {self.behind_s:,.1f} s"
        leaders = all_of("broker", self.leaders)
        how = f"{lacks}{time} behind"
        if self.is_silent:
            how += f", and has not asked {leaders} for records for {self.silent_s:,.0f} s"
        state = "in the ISR, but" if self.is_in_sync else "out of the ISR,"
        waits = ": acks=all waits for it" if self.is_in_sync else ""
        what = f"is a slow follower of {partitions}"
        if self.is_by_leader:
            what = f"lags behind {leaders}, as other followers do, in {partitions}"
            look = f"check the processor and network of {leaders}"
        elif self.is_silent:
            look = f"check the network between broker {self.broker} and {leaders}"
        else:
            look = f"check the disk, processor and network of broker {self.broker}"
        wait = "" if self.is_in_sync or self.is_silent else "wait while it catches up, else "
        return f"broker {self.broker} {what}: {state} {how}{waits}; {remedy or wait + look}"


class SlowCommits(msgspec.Struct, frozen=True):
    """The records for which acks=all waited a second or longer for one broker within the last 10 s."""

    broker: int
    """The follower that copied them last."""
    partitions: list[str]
    """`TOPIC-PARTITION` of each."""
    leaders: list[int]
    longest_s: float

    def sentence(self, partitions: str, remedy: str | None) -> str:
        """Return what has happened, and the remedy; the arguments are as in `SlowFollower.sentence`."""
        # Of one leader and one follower, either may be slow.
        slow = all_of("broker", [self.broker] if len(self.leaders) > 1 else sorted((self.broker, *self.leaders)))
        return (
            f"acks=all took up to {self.longest_s:,.1f} s in {partitions} within the last 10 s, until broker "
            f"{self.broker} had copied the records: {remedy or f'check the disk, processor and network of {slow}'}"
        )


class _Kind(NamedTuple):
    broker: int
    is_in_sync: bool
    is_silent: bool


def slow_followers(view: ClusterView) -> list[SlowFollower]:
    """Return the slow followers that their leaders have named, by broker."""
    kinds: dict[_Kind, list[tuple[TopicPartition, int, LaggingFollower]]] = {}
    named = [*_named(view)]
    leaders: dict[int, set[int]] = {}
    for _, leader, late in named:
        leaders.setdefault(late.broker_id, set()).add(leader)
    alone = Counter(leader for (leader, *others) in leaders.values() if not others)
    """Leaders, with the number of their followers that lag behind no other one."""
    for name, leader, late in named:
        kind = _Kind(late.broker_id, late.broker_id in view.partitions[name].isr_nodes, _is_silent(late))
        kinds.setdefault(kind, []).append((name, leader, late))
    return [
        SlowFollower(
            kind.broker,
            [str(name) for name in sorted(name for name, _, _ in replicas)],
            sorted({leader for _, leader, _ in replicas}),
            kind.is_in_sync,
            kind.is_silent,
            max(late.records for _, _, late in replicas),
            None
            if any(late.behind_ms < 0 for _, _, late in replicas)
            else max(late.behind_ms for _, _, late in replicas) / 1_000,
            max(late.silent_ms for _, _, late in replicas) / 1_000,
            len(leaders[kind.broker]) == 1 and alone[replicas[0][1]] > 1,
        )
        for kind, replicas in sorted(kinds.items())
    ]


def slow_commits(view: ClusterView) -> list[SlowCommits]:
    """Return what leaders say of the time that acks=all took, by broker."""
    found: dict[int, list[tuple[TopicPartition, int, int]]] = {}
    for leader, health in sorted(view.health.items()):
        for slow in health.slow_commits:
            name = TopicPartition(slow.topic_name, slow.partition_index)
            if name in view.partitions and view.partitions[name].leader_id == leader:
                found.setdefault(slow.broker_id, []).append((name, leader, slow.longest_ms))
    return [
        SlowCommits(
            broker,
            [str(name) for name in sorted(name for name, _, _ in waits)],
            sorted({leader for _, leader, _ in waits}),
            max(longest_ms for _, _, longest_ms in waits) / 1_000,
        )
        for broker, waits in sorted(found.items())
    ]


def _is_silent(late: LaggingFollower) -> bool:
    return late.silent_ms >= max(_SILENT_AFTER_S * 1_000, late.behind_ms / 2)


def _named(view: ClusterView) -> Iterator[tuple[TopicPartition, int, LaggingFollower]]:
    """Yield the followers that lag, with their leaders. Of some, more is said elsewhere: their brokers do not answer,
    records wait for them, or they are being added."""
    adding = {one.name: {copy.broker for copy in one.copies} for one in view.movements}
    absent: Collection[int] = {*view.silent()}
    for leader, health in sorted(view.health.items()):
        for late in health.lagging_followers:
            name = TopicPartition(late.topic_name, late.partition_index)
            if (
                name in view.partitions
                and view.partitions[name].leader_id == leader
                and late.broker_id in view.brokers
                and late.broker_id not in absent
                and late.broker_id not in adding.get(name, ())
                and late.broker_id not in view.stalls.get(name, ())
            ):
                yield name, leader, late
