"""One term of office: everything a controller has and does from its election to its resignation.

A tenure is made when office is taken and thrown away when it ends, with its picture of the cluster, its queues and
its tasks, so nothing of it can be left to act in a later one. Its events are handled here, each in the same steps:
what is to be read is read, a decision (a pure function) makes a Plan of it, the executor carries that out, and what
conflicted is decided again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from minibroker.controller import events
from minibroker.controller.access import ControllerMoved, ZooKeeperAccess
from minibroker.controller.cluster_state import (
    BrokerAdded,
    BrokerRemoved,
    ClusterState,
    LogEndReported,
    ReplicaFailed,
    ReplicaRecovered,
    Snapshot,
    TopicSettings,
    in_order,
)
from minibroker.controller.decisions import brokers, deletion, isr_changes, topics
from minibroker.controller.event_loop import EventLoop
from minibroker.controller.executor import Executor, PlanOutcome
from minibroker.controller.gather import Gather, Watchers
from minibroker.controller.outbox import Outbox
from minibroker.controller.plan import Plan
from minibroker.controller.timeline import Timeline
from minibroker.protocol import topic_ids
from minibroker.protocol.broker_connections import BrokerConnections
from minibroker.protocol.messages import CreatableTopicResult, DeletableTopicResult
from minibroker.protocol.model import REPLICATED, Broker, TopicPartition, topic_name_problem
from minibroker.protocol.world import SessionExpired, SessionState, World, ZooKeeperSession
from minibroker.protocol.znodes import TopicZnode, topic_config_path, topic_id_path, topic_path

_log = logging.getLogger(__name__)

PARTITIONS_AT_ONCE = 200
"""How many are decided on, written and sent in one go: some milliseconds of work, two or three multis."""
_BREATH_S = 0.001

T = TypeVar("T")
U = TypeVar("U")

Probe = Callable[[Sequence[Broker]], Awaitable[Collection[int]]]
"""Tries to connect to brokers and returns the ids of those that are certainly not running. Bounds its own time."""


MOST_SPENT_NONCES = 10_000
"""More than the creations that a network can be holding back from one broker at any time."""


@dataclass(frozen=True)
class ControllerSettings:
    """Kafka's `num.partitions`, `default.replication.factor`, `unclean.leader.election.enable` and
    `min.insync.replicas` (which a topic may override) and `controller.socket.timeout.ms`; and the `durability` of
    topics whose creator does not say."""

    num_partitions: int
    default_replication_factor: int
    unclean_leader_election: bool = False
    min_insync_replicas: int | None = None
    durability: str = REPLICATED
    socket_timeout_ms: int = 30_000


class Hooks(NamedTuple):
    """What a tenure is given by the composition root."""

    connections: BrokerConnections
    probe: Probe
    validate_config: topics.ConfigCheck
    on_brokers_changed: Callable[[tuple[Broker, ...]], None]
    spent_nonces: dict[bytes, None]
    """Of the topics that this process has created, in whichever term: see `topics.validate`. The oldest come first."""


class Tenure:
    """`start` begins it. It ends through `close`, or by itself: then `ended_because` says why."""

    def __init__(
        self,
        world: World,
        settings: ControllerSettings,
        broker_id: int,
        session: ZooKeeperSession,
        epoch: int,
        epoch_version: int,
        hooks: Hooks,
        timeline: Timeline,
        on_end: Callable[[Tenure], None],
    ) -> None:
        self.epoch = epoch
        self.session = session
        self.state = ClusterState(broker_id, epoch)
        self.ended_because: str | None = None
        self._random = world.random
        self._topic_numbers = itertools.count(1)
        self._settings = settings
        self._defaults = TopicSettings(settings.unclean_leader_election, settings.min_insync_replicas)
        self._hooks = hooks
        self._timeline = timeline
        self._on_end = on_end
        self._access = ZooKeeperAccess(session, world.clock)
        self._loop = EventLoop(epoch, self._handle, world.clock, self._access, timeline)
        self._outbox = Outbox(
            hooks.connections,
            epoch,
            f"controller-{broker_id}",
            settings.socket_timeout_ms / 1000,
            self._loop.post,
            lambda failure: self._loop.post(events.SenderBroke(epoch, failure)),
        )
        self._executor = Executor(self._access, self.state, epoch_version, self._outbox, timeline)
        watchers = Watchers(
            brokers=lambda _: self._loop.post(events.BrokerChange(epoch)),
            topics=lambda _: self._loop.post(events.TopicChange(epoch)),
            delete_topics=lambda _: self._loop.post(events.DeleteTopics(epoch)),
            isr_changes=lambda _: self._loop.post(events.IsrChange(epoch)),
            log_dir_failures=lambda _: self._loop.post(events.LogDirFailure(epoch)),
        )
        self._gather = Gather(self._access, epoch, watchers, self._note)
        self._task: asyncio.Task[None] | None = None

    # -- life --

    def start(self) -> None:
        """Take office: the first event reads everything and elects where it must."""
        self._loop.post(events.Startup(self.epoch))
        self._task = asyncio.create_task(self._run(), name=f"controller of epoch {self.epoch}")
        self._task.add_done_callback(lambda _: self._on_end(self))

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done() and self.ended_because is None

    @property
    def queued_events(self) -> int:
        return len(self._loop)

    def post(self, event: events.Event) -> None:
        self._loop.post(event)

    def session_changed(self, state: SessionState) -> None:
        self._access.session_changed()
        if state is SessionState.CONNECTED:
            self._loop.post(events.SessionReconnected(self.epoch))

    async def close(self) -> None:
        """Stop at once. When this returns nothing of the tenure is running any more."""
        if self._task is None:
            return
        if self.ended_because is None:  # else it is about to end, and must not be disturbed while it tidies up
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._loop.run()
        except (ControllerMoved, SessionExpired) as end:
            self.ended_because = str(end)
            _log.warning("the controller of epoch %d ends: %s", self.epoch, end)
        except Exception as failure:  # noqa: BLE001 - whatever is broken here, another controller must be elected
            self.ended_because = f"the controller failed: {failure!r}"
            _log.exception("the controller of epoch %d failed and resigns", self.epoch)
        finally:
            self._loop.close()
            await self._outbox.close()

    # -- the steps of every event --

    def _note(self, note: str) -> None:
        self._timeline.add("notes", [note])
        _log.warning("%s", note)

    async def _execute(self, plan: Plan) -> PlanOutcome:
        outcome = await self._executor.execute(plan)
        if outcome.obstacle is None:
            for event in plan.follow_ups:
                self._loop.post(event)
            if any(isinstance(change, BrokerAdded | BrokerRemoved) for change in plan.changes):
                self._hooks.on_brokers_changed(tuple(self.state.live_brokers[b] for b in self.state.live_broker_ids()))
        return outcome

    async def _settle(
        self,
        partitions: Iterable[TopicPartition],
        *,
        tell: Container[int] = (),
        announce: Collection[TopicPartition] = (),
        announce_brokers: bool = False,
    ) -> None:
        """`brokers.settle`, a part at a time, so that ten thousand partitions do not hold up the loop for as long as
        they take: the broker that it is shared with has clients, and the session has heartbeats.

        `announce` are some of `partitions`.
        """
        remaining = in_order(partitions)
        announced = frozenset(announce)
        for start in range(0, max(len(remaining), 1), PARTITIONS_AT_ONCE):
            if start:
                await asyncio.sleep(_BREATH_S)
            part = remaining[start : start + PARTITIONS_AT_ONCE]
            await self._settle_part(part, tell, [p for p in part if p in announced], announce_brokers and start == 0)

    async def _settle_part(
        self,
        partitions: Collection[TopicPartition],
        tell: Container[int],
        announce: Collection[TopicPartition],
        announce_brokers: bool,
    ) -> None:
        """Decide again about each partition that turns out to have another state than the known one."""
        while True:
            unsettled = brokers.topics_to_settle(self.state, partitions)
            plan = brokers.settle(
                self.state,
                partitions,
                settings=await self._gather.topic_settings(unsettled, self._defaults),
                tell=tell,
                announce=announce,
                announce_brokers=announce_brokers,
            )
            outcome = await self._execute(plan)
            if not outcome.conflicts:
                return
            partitions = announce = outcome.conflicts
            tell, announce_brokers = self.state.live_broker_ids(), False

    async def _handle(self, event: events.Event) -> None:
        match event:
            case events.Startup():
                await self._take_office()
            case events.SessionReconnected():
                for again in (
                    events.BrokerChange,
                    events.TopicChange,
                    events.DeleteTopics,
                    events.IsrChange,
                    events.LogDirFailure,
                ):
                    self._loop.post(again(self.epoch))
            case events.BrokerChange():
                await self._brokers_changed()
            case events.TopicChange():
                await self._topics_changed()
            case events.DeleteTopics():
                await self._deletions_changed()
            case events.IsrChange():
                await self._isrs_changed()
            case events.LogDirFailure():
                await self._log_dirs_failed()
            case events.BrokerSuspected():
                await self._broker_suspected(event)
            case events.LeaderAndIsrAnswered():
                await self._leader_and_isr_answered(event)
            case events.StopReplicaAnswered():
                if self._is_alive(event.broker_id, event.broker_epoch):
                    await self._execute(deletion.replicas_answered(self.state, event.broker_id, event.errors))
            case events.TopicDeletionsHeard():
                if self._is_alive(event.broker_id, event.broker_epoch):
                    await self._execute(deletion.heard(self.state, event.broker_id, event.topics))
            case events.ResumeDeletions():
                await self._resume_deletions()
            case events.CreateTopicsRequest():
                await self._create_topics(event)
            case events.DeleteTopicsRequest():
                await self._delete_topics(event)
            case events.Deposed():
                raise ControllerMoved(event.cause)
            case events.SenderBroke(failure=failure):
                raise RuntimeError("a sender of control requests broke") from failure
            case _:
                raise AssertionError(f"no handler for {event!r}")

    # -- taking office --

    async def _take_office(self) -> None:
        overview = await self._gather.overview()
        registered, found = await _both(
            self._gather.registered(overview.broker_ids), self._gather.topics(overview.topics)
        )
        partitions = [TopicPartition(name, number) for name, topic in found.read.items() for number in topic.partitions]
        # To elect one crashed broker in place of another would be in vain: probe before electing.
        states, refused = await _both(self._gather.states(partitions), self._probe(registered))
        snapshot = Snapshot(
            registered,
            found.read,
            states.read,
            tuple(overview.topics_to_delete),
            (*overview.isr_notifications, *overview.log_dir_notifications),
            found.malformed,
            states.malformed,
        )
        for broker_id in sorted(refused):
            self._note(f"broker {broker_id} is registered and cannot be reached: it is removed")
        await self._execute(brokers.load(self.state, snapshot, refused))
        every = tuple(self.state.assignments)
        await self._settle(every, tell=self.state.live_broker_ids(), announce=every)
        await self._execute(brokers.all_told(self.state))
        await self._identify(self.state.topic_ids)

    async def _probe(self, registered: Mapping[int, Broker]) -> Collection[int]:
        others = [broker for broker_id, broker in sorted(registered.items()) if broker_id != self.state.controller_id]
        return await self._hooks.probe(others) if others else ()

    # -- brokers --

    async def _brokers_changed(self) -> None:
        registered = await self._gather.brokers(self.state.live_brokers)
        difference = brokers.difference(self.state.live_brokers, registered)
        lost = sorted((*difference.lost, *(broker.id for broker in difference.bounced)))
        if lost:
            affected = brokers.affected_by(self.state, lost)
            await self._execute(brokers.lost(self.state, lost))
            await self._settle(affected, announce=affected, announce_brokers=True)
        added = sorted((*difference.added, *difference.bounced), key=lambda broker: broker.id)
        if added:
            ids = [broker.id for broker in added]
            affected = brokers.affected_by(self.state, ids)
            await self._execute(brokers.added(self.state, added))
            await self._settle(
                (*affected, *self.state.partitions_without_leader()),
                tell=ids,
                announce=affected,
                announce_brokers=True,
            )

    async def _broker_suspected(self, event: events.BrokerSuspected) -> None:
        if not self._is_alive(event.broker_id, event.broker_epoch):
            self._note(f"broker {event.broker_id} of epoch {event.broker_epoch} is gone already")
        elif await self._gather.broker_epoch(event.broker_id) != event.broker_epoch:
            self._note(f"broker {event.broker_id} is no longer registered with epoch {event.broker_epoch}")
        else:
            # The watch on the registrations does the rest.
            await self._execute(brokers.suspected(event.broker_id, event.broker_epoch))

    def _is_alive(self, broker_id: int, broker_epoch: int) -> bool:
        """That very run of the broker."""
        broker = self.state.live_brokers.get(broker_id)
        return broker is not None and broker.epoch == broker_epoch

    async def _leader_and_isr_answered(self, event: events.LeaderAndIsrAnswered) -> None:
        if not self._is_alive(event.broker_id, event.broker_epoch):
            return
        plan = brokers.replicas_answered(self.state, event.broker_id, event.errors, event.log_ends)
        await self._execute(plan)
        touched = tuple(
            change.replica.partition for change in plan.changes if isinstance(change, ReplicaFailed | ReplicaRecovered)
        )
        reported = tuple(change.replica.partition for change in plan.changes if isinstance(change, LogEndReported))
        if touched or reported:
            await self._settle((*touched, *reported), announce=touched)

    async def _isrs_changed(self) -> None:
        notifications = await self._gather.isr_notifications()
        if not notifications:
            return
        named = await self._gather.changed_partitions(notifications)
        states = await self._gather.states([partition for partition in named if partition in self.state.assignments])
        await self._execute(isr_changes.changed(self.state, states.read, notifications))
        await self._settle(states.read)

    async def _log_dirs_failed(self) -> None:
        notifications = await self._gather.log_dir_notifications()
        if not notifications:
            return
        failed = await self._gather.brokers_of_failures(notifications)
        await self._execute(brokers.log_dirs_failed(notifications))
        await self._settle(brokers.affected_by(self.state, failed), tell=failed)

    # -- topics --

    async def _topics_changed(self) -> None:
        names = await self._gather.topic_names()
        present = frozenset(names)
        vanished = [topic for topic in self.state.topic_ids if topic not in present]
        if vanished:
            await self._execute(topics.vanished(self.state, vanished))
        await self._read_new_topics(names)

    async def _read_new_topics(self, names: Iterable[str]) -> frozenset[str]:
        """Take in those of the topics that are in ZooKeeper and not yet in the picture; returns the malformed ones."""
        found = await self._gather.topics([name for name in names if name not in self.state.topic_ids])
        await self._identify({name: topic.topic_id for name, topic in found.read.items()})
        await self._add_topics(found.read)
        return found.malformed

    async def _identify(self, topic_ids: Mapping[str, str]) -> None:
        """Make sure that there is a node for the id of each of the topics."""
        paths = [topic_id_path(name, topic_id) for name, topic_id in topic_ids.items() if topic_id]
        there = await self._gather.existing(paths)
        await self._execute(topics.identified(path for path in paths if path not in there))

    async def _add_topics(self, new: Mapping[str, TopicZnode]) -> None:
        if not new:
            return
        await self._execute(topics.added(self.state, new))
        await self._settle(partition for topic in new for partition in self.state.partitions_of(topic))

    async def _deletions_changed(self) -> None:
        names = await self._gather.topics_to_delete()
        # A topic may have been created and deleted before the event of its creation was taken.
        malformed = await self._read_new_topics(names)
        await self._execute(deletion.queue(self.state, names, leave_alone=malformed))

    async def _resume_deletions(self) -> None:
        await self._execute(deletion.resume(self.state))
        for topic in deletion.finished(self.state):
            topic_id = self.state.topic_ids[topic]
            while True:
                nodes = await self._gather.tree(topic_path(topic))
                outcome = await self._execute(deletion.forget(self.state, topic, nodes))
                if outcome.obstacle is None:
                    break
                self._note(f"topic {topic} cannot be removed yet, it is read again: {outcome.obstacle}")
            # Whichever controller created it, and whether or not that one heard of its success.
            self._spend_nonces([topic_id])

    # -- administrators --

    async def _create_topics(self, request: events.CreateTopicsRequest) -> None:
        names = list(dict.fromkeys(t.name for t in request.topics if topic_name_problem(t.name) is None))
        paths = await self._gather.existing([topic_path(n) for n in names] + [topic_config_path(n) for n in names])
        answers = topics.validate(
            request.topics,
            self.state,
            [name for name in names if topic_path(name) in paths],
            topics.TopicDefaults(
                self._settings.num_partitions, self._settings.default_replication_factor, self._settings.durability
            ),
            self._hooks.validate_config,
            self._random,
            self._topic_numbers,
            self._hooks.spent_nonces,
        )
        new = [answer for answer in answers if isinstance(answer, topics.NewTopic)]
        if request.validate_only:
            request.answer([_result(answer, validated_only=True) for answer in answers])
            return
        leftover = [name for name in names if topic_config_path(name) in paths]
        outcome = await self._execute(topics.create(new, leftover))
        existing = outcome.existing_topics
        created = {topic.topic: topic.znode for topic in new if topic.topic not in existing}
        self._spend_nonces(znode.topic_id for znode in created.values())
        try:
            await self._add_topics(created)
        finally:
            # Whatever happened: the topics are in ZooKeeper, and if this controller does not serve them, the next one
            # does.
            request.answer([_result(answer, existing=existing) for answer in answers])

    def _spend_nonces(self, created: Iterable[str]) -> None:
        spent = self._hooks.spent_nonces
        for topic_id in created:
            spent[topic_ids.nonce(topic_id) or b""] = None
            if len(spent) > MOST_SPENT_NONCES:
                del spent[next(iter(spent))]

    async def _delete_topics(self, request: events.DeleteTopicsRequest) -> None:
        unknown = [
            name for name in request.topics if name not in self.state.topic_ids and topic_name_problem(name) is None
        ]
        if unknown:  # what is read may be old, and this controller deposed: its denial would be believed
            await self._execute(deletion.confirm_office())
            await self._read_new_topics(unknown)
        results: list[DeletableTopicResult] = deletion.results(self.state, request.topics)
        await self._execute(deletion.request(self.state, request.topics))
        request.answer(results)


def _result(
    answer: topics.NewTopic | CreatableTopicResult,
    *,
    existing: Container[str] = (),
    validated_only: bool = False,
) -> CreatableTopicResult:
    if isinstance(answer, CreatableTopicResult):
        return answer
    return (
        topics.already_exists(answer.topic) if answer.topic in existing else answer.result(created=not validated_only)
    )


async def _both(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Both at once. Where one fails the other is stopped, and the failure is raised as it is."""

    async def run_first() -> T:
        return await first

    async def run_second() -> U:
        return await second

    try:
        async with asyncio.TaskGroup() as group:
            one, other = group.create_task(run_first()), group.create_task(run_second())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return one.result(), other.result()
