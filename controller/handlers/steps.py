"""The steps that all handlers of a tenure share: read, decide, execute, and decide again about conflicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from minibroker.controller.decisions import brokers, deletion, topics
from minibroker.controller.decisions.cluster_state import (
    BrokerAdded,
    BrokerRemoved,
    ClusterState,
    DeletionIneligible,
    TopicRemoved,
    TopicSettings,
    in_order,
)
from minibroker.controller.decisions.events import Event
from minibroker.controller.decisions.plan import Plan
from minibroker.controller.executing.executor import PlanExecutor, PlanOutcome
from minibroker.controller.executing.gather import Gather
from minibroker.controller.timeline import Timeline
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.messages import CreatableTopic
from minibroker.protocol.model import REPLICATED, RegisteredBroker, TopicPartition
from minibroker.protocol.world import World, ZooKeeperSession

PARTITIONS_AT_ONCE = 100
"""Partitions that are decided, written and sent at a time: two or three steps of a millisecond each, and one multi
(three if znodes are created)."""
BREATH_S = 0.001
ANSWERS_AT_ONCE = 20
"""Topics of a request that are decided without a breath: a millisecond, or a tenth of a second if they have thousands
of partitions."""

T = TypeVar("T")

Probe = Callable[[Sequence[RegisteredBroker]], Awaitable[Collection[int]]]
"""Connects to brokers and returns the ids of those that are certainly not running. Limits its own time."""


@dataclass
class ControllerSettings:
    """Kafka's `num.partitions`, `default.replication.factor`, `unclean.leader.election.enable` and
    `min.insync.replicas` (which a topic may override), `max.broker.partitions`, `delete.topic.enable`,
    `controller.socket.timeout.ms`, `auto.leader.rebalance.enable`, `leader.imbalance.per.broker.percentage` and
    `leader.imbalance.check.interval.seconds`; the default `durability` of topics; and the brokers' own topics.
    `unclean_leader_election` and `min_insync_replicas` may change while a controller is in office."""

    num_partitions: int
    default_replication_factor: int
    unclean_leader_election: bool = False
    min_insync_replicas: int | None = None
    max_broker_partitions: int | None = None
    durability: str = REPLICATED
    deletes_topics: bool = True
    socket_timeout_ms: int = 30_000
    auto_leader_rebalance: bool = True
    leader_imbalance_per_broker_percentage: int = 10
    leader_imbalance_check_interval_s: float = 300.0
    internal_topics: Sequence[CreatableTopic] = ()


class Hooks(NamedTuple):
    """The parts of the broker that a tenure uses."""

    connections: BrokerConnections
    probe: Probe
    validate_config: topics.ConfigCheck
    read_defaults: Callable[[ZooKeeperSession], Awaitable[object]]
    """Reads the brokers' settings from ZooKeeper and updates `ControllerSettings`. Raises ZooKeeperError."""
    on_brokers_changed: Callable[[tuple[RegisteredBroker, ...]], None]
    spent_nonces: dict[bytes, None]
    """The nonces of the topics that this process has created in all its tenures, oldest first: see
    `topics.validate`."""


@dataclass(frozen=True)
class Steps:
    """Belongs to one tenure. `post` queues an event."""

    world: World
    settings: ControllerSettings
    hooks: Hooks
    state: ClusterState
    gather: Gather
    executor: PlanExecutor
    timeline: Timeline
    post: Callable[[Event], None]
    deletion_news: asyncio.Event
    """Set for a moment when a topic is gone, or its deletion has met an obstacle."""
    forming: asyncio.Event
    """Set for a moment when a broker has joined, or a topic is gone."""

    @property
    def epoch(self) -> int:
        return self.state.controller_epoch

    def is_alive(self, broker_id: int, broker_epoch: int) -> bool:
        """Return whether the broker is alive in that epoch."""
        broker = self.state.live_brokers.get(broker_id)
        return broker is not None and broker.epoch == broker_epoch

    def describe_failed_disks(self, reasons: Mapping[int, str]) -> None:
        """Record in the timeline why brokers have lost log directories, as far as they reported it."""
        known = [{"broker": broker_id, "reason": reason} for broker_id, reason in reasons.items() if reason]
        if known:
            self.timeline.describe(failed_disks=known)

    async def topic_settings(self, names: Sequence[str]) -> dict[str, TopicSettings]:
        """Read the settings that decide elections in these topics.

        An unclean election loses records, so outdated settings must not allow it (this controller may have been paused,
        or its ZooKeeper server may lag). If one would be allowed, the settings are read again from a server that has
        caught up, after their common version. ZooKeeper then refuses the write if they have been changed since.
        """
        settings = await self.gather.topic_settings(names, self._topic_defaults)
        if not any(of_topic.unclean_leader_election for of_topic in settings.values()):
            return settings
        await self.execute(deletion.confirm_office())
        version = await self.gather.settings_version()
        await self.gather.read_again(self.hooks.read_defaults)
        settings = await self.gather.topic_settings(names, self._topic_defaults)
        return {topic: of_topic._replace(version=version) for topic, of_topic in settings.items()}

    @property
    def _topic_defaults(self) -> TopicSettings:
        return TopicSettings(self.settings.unclean_leader_election, self.settings.min_insync_replicas)

    async def in_slices(self, answers: Iterator[T]) -> list[T]:
        """Return the answers to a request, which are decided some at a time."""
        decided: list[T] = []
        for answer in answers:
            decided.append(answer)
            await asyncio.sleep(0 if len(decided) % ANSWERS_AT_ONCE else BREATH_S)
        return decided

    async def execute(self, plan: Plan) -> PlanOutcome:
        outcome = await self.executor.execute(plan)
        if outcome.obstacle is None:
            for event in plan.follow_ups:
                self.post(event)
            if any(isinstance(change, TopicRemoved | DeletionIneligible) for change in plan.changes):
                self.deletion_news.set()
                self.deletion_news.clear()
            if any(isinstance(change, BrokerAdded | TopicRemoved) for change in plan.changes):
                self.forming.set()
                self.forming.clear()
            if any(isinstance(change, BrokerAdded | BrokerRemoved) for change in plan.changes):
                self.hooks.on_brokers_changed(tuple(self.state.live_brokers[b] for b in self.state.live_broker_ids()))
        return outcome

    async def settle(
        self,
        partitions: Iterable[TopicPartition],
        *,
        tell: Container[int] = (),
        announce: Collection[TopicPartition] = (),
        announce_brokers: bool = False,
    ) -> None:
        """Run `brokers.settle` for some partitions at a time, so that ten thousand partitions do not block the loop,
        which also serves the broker's clients and the session's heartbeats.

        `announce` is a subset of `partitions`.
        """
        remaining = in_order(partitions)
        announced = frozenset(announce)
        for start in range(0, max(len(remaining), 1), PARTITIONS_AT_ONCE):
            await asyncio.sleep(BREATH_S if start else 0)
            part = remaining[start : start + PARTITIONS_AT_ONCE]
            await self._settle_part(part, tell, [p for p in part if p in announced], announce_brokers and start == 0)

    async def _settle_part(
        self,
        partitions: Collection[TopicPartition],
        tell: Container[int],
        announce: Collection[TopicPartition],
        announce_brokers: bool,
    ) -> None:
        while True:  # until there is no conflict
            unsettled = brokers.topics_to_settle(self.state, partitions)
            plan = brokers.settle(
                self.state,
                partitions,
                settings=await self.topic_settings(unsettled),
                tell=tell,
                announce=announce,
                announce_brokers=announce_brokers,
            )
            outcome = await self.execute(plan)
            if not outcome.conflicts:
                return
            partitions = announce = outcome.conflicts
            tell, announce_brokers = self.state.live_broker_ids(), False
