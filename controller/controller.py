"""The controller that every broker carries (Kafka's KafkaController), as the rest of the broker uses it.

It is active from `take_office` to `resign`; a `Tenure` does the work in between. It neither runs for office nor leaves
office by itself: `Leadership` calls `take_office` and `resign`, and the controller asks it through `request_resign` to
end a tenure that has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from minibroker.controller.decisions import deletion
from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.decisions.events import (
    AdminRequest,
    AlterPartitionReassignments,
    BrokerSuspected,
    ControlledShutdownRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    ElectionOutcome,
    ElectLeadersRequest,
    ListPartitionReassignments,
    UncleanLeaderElectionEnable,
)
from minibroker.controller.decisions.topics import ConfigCheck
from minibroker.controller.handlers.steps import ControllerSettings, Hooks, Probe
from minibroker.controller.interruptions import Interruptions, stalled_s
from minibroker.controller.tenure import Tenure
from minibroker.controller.timeline import Entry, EventTimes, Sink, Timeline
from minibroker.protocol import znodes
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    CreatableTopic,
    CreatableTopicResult,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    DeletableTopicResult,
    ListPartitionReassignmentsTopic,
    OngoingTopicReassignment,
    ReassignableTopic,
    ReassignableTopicResponse,
)
from minibroker.protocol.model import NO_EPOCH, ElectionType, RegisteredBroker, TopicPartition, ZooKeeperContact
from minibroker.protocol.world import SessionState, World, ZooKeeperSession

__all__ = ["Controller", "ControllerSettings", "Probe"]

CLIENTS_AT_A_TIME = 2
"""Requests of clients in the queue of events: one is handled, and the next is there when it ends."""
DELIVERY_S = 1.0
"""Seconds for which a controlled shutdown waits until the other brokers have taken over. A broker that hangs must not
delay it."""
NO_FACTS: Mapping[str, object] = {}

T = TypeVar("T")


class Controller:
    """One per broker, for the broker's life.

    `connections` open connections to brokers; `probe`, `validate_config` and `read_defaults`: see `Hooks`.
    `on_brokers_changed` is called with the live brokers after every change while this broker is the controller, and
    with none after it resigned. `request_resign` is called when the tenure has ended by itself and `/controller` must
    be removed; never from a task of the controller. `timeline_sink` takes the entries of the timeline.
    """

    def __init__(
        self,
        world: World,
        settings: ControllerSettings,
        broker_id: int,
        *,
        connections: BrokerConnections,
        probe: Probe,
        validate_config: ConfigCheck,
        read_defaults: Callable[[ZooKeeperSession], Awaitable[object]],
        on_brokers_changed: Callable[[tuple[RegisteredBroker, ...]], None],
        request_resign: Callable[[str], None],
        timeline_sink: Sink,
    ) -> None:
        self._world = world
        self._settings = settings
        self._broker_id = broker_id
        self._turns = asyncio.Semaphore(CLIENTS_AT_A_TIME)
        self._hooks = Hooks(connections, probe, validate_config, read_defaults, on_brokers_changed, spent_nonces={})
        self._request_resign = request_resign
        self._tenure: Tenure | None = None
        self._session: ZooKeeperSession | None = None
        self.timeline = Timeline(world.clock, broker_id, timeline_sink)
        self._stalls, self._times_without_zookeeper = Interruptions(), Interruptions()

    @property
    def is_active(self) -> bool:
        """Whether this broker is the controller, as far as it knows."""
        return self._tenure is not None and self._tenure.running

    @property
    def epoch(self) -> int | None:
        """The controller epoch; None while not active."""
        return self._tenure.epoch if self._tenure is not None and self.is_active else None

    @property
    def state(self) -> ClusterState | None:
        """The cluster state; None while not active. Callers must not change it, and an await may change it."""
        return self._tenure.state if self._tenure is not None and self.is_active else None

    @property
    def queued_events(self) -> int:
        return self._tenure.queued_events if self._tenure is not None else 0

    @property
    def event_times(self) -> dict[str, EventTimes]:
        """Counts and times by the name of the event, over all tenures of this broker."""
        return self.timeline.times

    @property
    def unclean_elections(self) -> int:
        """The number of elections of leaders that may lack acknowledged records, over all tenures of this broker."""
        return self.timeline.unclean_elections

    # -- for Leadership --

    async def take_office(self, session: ZooKeeperSession, epoch: int, epoch_version: int) -> None:
        """Begin a tenure. This broker was elected with `epoch`; `/controller_epoch` has the version `epoch_version`.

        Returns when the tenure has begun, before it has read and elected everything. If it fails later,
        `request_resign` is called.
        """
        await self.resign("elected again")
        if self._session is not session:
            self._session = session
            session.on_state(lambda state: self._session_changed(session, state))
        self._tenure = Tenure(
            self._world,
            self._settings,
            self._broker_id,
            session,
            epoch,
            epoch_version,
            self._hooks,
            self.timeline,
            self._tenure_ended,
        )
        self._tenure.start()

    async def resign(self, reason: str) -> None:
        """End the tenure. When this returns, none of its tasks is running."""
        tenure, self._tenure = self._tenure, None
        if tenure is None:
            return
        away = tenure.away()
        await tenure.close()
        self.timeline.record("Resignation", reason, tenure.epoch, away)
        self._hooks.on_brokers_changed(())

    def _tenure_ended(self, tenure: Tenure) -> None:
        if tenure is self._tenure and tenure.ended_because is not None:
            self._request_resign(tenure.ended_because)

    def _session_changed(self, session: ZooKeeperSession, state: SessionState) -> None:
        if self._tenure is not None and self._tenure.session is session:
            self._tenure.session_changed(state)

    async def close(self) -> None:
        """Resign because the broker stops."""
        await self.resign("the broker stops")

    # -- for crash detection --

    def suspect(  # C2
        self, broker_id: int, broker_epoch: int, reason: str, facts: Mapping[str, object] = NO_FACTS
    ) -> None:
        """Report that the broker in that epoch seems to have crashed. Ignored while not active, and for this broker."""
        if self._tenure is not None and broker_id != self._broker_id:
            self._tenure.post(BrokerSuspected(self._tenure.epoch, broker_id, broker_epoch, reason, facts))

    def record_suspected_controller(self, broker_id: int, epoch: int, reason: str, facts: Mapping[str, object]) -> None:
        """Record in the timeline that this broker suspects the controller of that epoch and is about to remove it."""
        cause = f"broker {broker_id}, the controller of epoch {epoch}, is suspected: {reason}"
        details = {"broker": broker_id, "reason": reason, **facts}
        self.timeline.record("ControllerSuspected", cause, epoch, details)

    def record_removed_controller(self, broker_id: int, epoch: int) -> None:
        """Record in the timeline that this broker has removed the `/controller` of that broker and epoch."""
        cause = f"/controller of broker {broker_id} is deleted, so that another is elected"
        details = {"broker": broker_id, "writes": [f"remove {znodes.CONTROLLER} (of epoch {epoch})"]}
        self.timeline.record("ControllerRemoved", cause, epoch, details)

    def record_silent_broker(
        self, broker_id: int, epoch: int, began_s: float, heard_again_s: float | None = None
    ) -> None:
        """Record in the timeline that the broker, which the controller of that epoch has replaced, had been silent:
        nothing of it reached this broker since `began_s` seconds, or until it woke up `heard_again_s` seconds ago."""
        lasted_ms = round(began_s * 1_000, 3)
        cause = f"broker {broker_id}, which the controller has replaced, was silent for {lasted_ms:,.0f} ms"
        details: dict[str, object] = {"broker": broker_id, "lasted_ms": lasted_ms}
        if heard_again_s is not None:
            details["heard_again_ms"] = round(heard_again_s * 1_000, 3)
        self.timeline.record("BrokerSilent", cause, epoch, details)

    def record_stall(self, lag_s: float, stopped_s: float, epoch: int) -> None:
        """Record in the timeline that this broker was stopped, if its event loop was late by so much, its process did
        not run for `stopped_s` of it, and this was long. `epoch` is that of the last controller that this broker
        knows."""
        details = self._stalls.ended(stalled_s(lag_s, stopped_s), self._world.clock.monotonic())
        if details is not None:
            cause = f"broker {self._broker_id} did not run for {lag_s * 1_000:,.0f} ms"
            self.timeline.record("BrokerStalled", cause, epoch, details)

    # -- for the registration --

    def session_lost(self, state: SessionState, epoch: int, contact: ZooKeeperContact) -> None:
        """Record in the timeline, once ZooKeeper has ended this broker's session, for how long the broker had no
        ZooKeeper: the controller sees only that the broker is gone. `epoch` is that of the last controller that this
        broker knows. A controller's resignation says the same."""
        if state is SessionState.EXPIRED and self._tenure is None:
            away_ms = round((contact.away_s or 0.0) * 1_000, 3)
            cause = f"the ZooKeeper session of broker {self._broker_id} has expired"
            self.timeline.record("SessionExpired", cause, epoch, {"away_ms": away_ms})

    def zookeeper_is_back(self, away_s: float, epoch: int) -> None:
        """Record in the timeline, if it was long, for how long ZooKeeper did not answer this broker, whose session goes
        on. `epoch` is that of the last controller that this broker knows."""
        details = self._times_without_zookeeper.ended(away_s, self._world.clock.monotonic())
        if details is not None:
            cause = f"ZooKeeper did not answer broker {self._broker_id} for {away_s * 1_000:,.0f} ms"
            self.timeline.record("ZooKeeperAway", cause, epoch, details)

    # -- for settings that change --

    def topic_config_changed(self, topic: str) -> None:
        """Decide again about the topic's partitions without a leader; unclean elections may be allowed now."""
        state = self.state
        if state is not None and any(p.topic == topic for p in state.partitions_without_leader()):
            assert self._tenure is not None
            self._tenure.post(UncleanLeaderElectionEnable(self._tenure.epoch, topic))

    def defaults_changed(self, unclean_leader_election: bool, min_insync_replicas: int | None) -> None:
        """Set the defaults for topics without settings of their own."""
        is_enabled = unclean_leader_election and not self._settings.unclean_leader_election
        self._settings.unclean_leader_election = unclean_leader_election
        self._settings.min_insync_replicas = min_insync_replicas
        if is_enabled and self._tenure is not None:
            self._tenure.post(UncleanLeaderElectionEnable(self._tenure.epoch, None))

    # -- for the handlers of the admin APIs --

    def recorded_after(self, number: int, since_ms: int) -> tuple[int, list[Entry]]:
        """Return the number of the timeline's last entry, and the entries after `number` that are not older than
        `since_ms`."""
        return self.timeline.last_number, self.timeline.after(number, since_ms)

    async def create_topics(
        self, topics: Sequence[CreatableTopic], validate_only: bool = False, controller_epoch: int = NO_EPOCH
    ) -> list[CreatableTopicResult]:
        """Create the topics. Returns when they are in ZooKeeper, their leaders are elected, and the requests to the
        brokers are queued.

        Returns one result per topic, in their order. Raises BrokerError(NOT_CONTROLLER) if this broker is not, or no
        longer, the controller, or has another epoch than the given one. A topic may have been created nevertheless.
        """
        tenure = self._tenure_of(controller_epoch)
        return await self._in_turn(
            tenure, lambda reply: CreateTopicsRequest(tenure.epoch, reply, topics, validate_only)
        )

    async def create_partitions(
        self, topics: Sequence[CreatePartitionsTopic], validate_only: bool = False
    ) -> list[CreatePartitionsTopicResult]:
        """Add partitions to the topics. Returns and raises like `create_topics`."""
        tenure = self._active_tenure()
        return await self._in_turn(
            tenure, lambda reply: CreatePartitionsRequest(tenure.epoch, reply, topics, validate_only)
        )

    async def delete_topics(self, topics: Mapping[str, str]) -> list[DeletableTopicResult]:
        """Mark the topics for deletion; they are gone when their brokers have deleted the logs.

        `topics` maps names to ids. A topic with another id is not deleted; an empty id is not checked. Returns one
        result per name. Raises BrokerError like `create_topics`.
        """
        tenure = self._active_tenure()
        return await self._in_turn(tenure, lambda reply: DeleteTopicsRequest(tenure.epoch, reply, topics))

    async def until_deleted(self, topics: Mapping[str, str]) -> dict[str, str]:
        """Wait until the topics (ids by name) are gone, or the remaining ones cannot be deleted now, for instance
        because a broker is down. Returns the obstacles by name. Raises BrokerError(NOT_CONTROLLER) when this broker is
        not, or no longer, the controller."""
        tenure = self._active_tenure()
        while True:
            left = deletion.waiting(self._active_tenure().state, topics)
            if all(left.values()):
                return left
            await tenure.deletion_news.wait()

    def deletions_left(self, topics: Mapping[str, str]) -> dict[str, str]:
        """Return those of the topics (ids by name) that still exist, each with the reason why it does. Raises
        BrokerError(NOT_CONTROLLER)."""
        state = self._active_tenure().state
        left = deletion.waiting(state, topics)
        return {topic: why or deletion.unanswered(state, topic) for topic, why in left.items()}

    async def elect_leaders(
        self,
        election_type: ElectionType,
        partitions: Sequence[TopicPartition] | None,
        controller_epoch: int = NO_EPOCH,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> dict[TopicPartition, ElectionOutcome]:
        """Elect leaders. Returns when they are in ZooKeeper and the requests to the brokers are queued.

        Returns one outcome per partition; for all partitions (None), only of those that needed an election. Raises
        BrokerError like `create_topics`, and REQUEST_TIMED_OUT for an unclean election if `is_wanted` returns False
        when its turn has come.
        """
        tenure = self._tenure_of(controller_epoch)
        return await self._in_turn(
            tenure,
            lambda reply: ElectLeadersRequest(tenure.epoch, reply, election_type, partitions, is_wanted),
        )

    def _tenure_of(self, controller_epoch: int) -> Tenure:
        """Return the tenure of that epoch, or the active one for NO_EPOCH."""
        tenure = self._active_tenure()
        if controller_epoch not in (NO_EPOCH, tenure.epoch):
            raise BrokerError(
                ErrorCode.NOT_CONTROLLER, f"the request is for controller epoch {controller_epoch}, not {tenure.epoch}"
            )
        return tenure

    async def alter_partition_reassignments(
        self, topics: Sequence[ReassignableTopic]
    ) -> list[ReassignableTopicResponse]:
        """Begin reassignments. Returns when they are recorded in ZooKeeper and have begun; they continue under any
        later controller. Returns one result per partition, in their order. Raises BrokerError like `create_topics`."""
        tenure = self._active_tenure()
        return await self._in_turn(tenure, lambda reply: AlterPartitionReassignments(tenure.epoch, reply, topics))

    async def list_partition_reassignments(
        self, topics: Sequence[ListPartitionReassignmentsTopic] | None
    ) -> list[OngoingTopicReassignment]:
        """Return the reassignments under way, of these partitions or of all. Raises BrokerError like
        `create_topics`."""
        tenure = self._active_tenure()
        return await self._in_turn(tenure, lambda reply: ListPartitionReassignments(tenure.epoch, reply, topics))

    # -- for brokers that stop --

    async def controlled_shutdown(self, broker_id: int, broker_epoch: int) -> list[TopicPartition]:
        """Move leaderships from the broker in that epoch to others and remove it from ISRs, as far as the partitions
        stay writable without it. Returns the partitions that remain with the broker, in order, when the other brokers
        have been informed.

        The call may be repeated. A later controller knows nothing of it. Raises BrokerError: NOT_CONTROLLER like
        `create_topics`; STALE_BROKER_EPOCH for an earlier epoch of the broker, BROKER_NOT_AVAILABLE for one that this
        controller does not know (yet).
        """
        tenure = self._active_tenure()
        remaining = await _ask(
            tenure, lambda reply: ControlledShutdownRequest(tenure.epoch, reply, broker_id, broker_epoch)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELIVERY_S):
                await tenure.delivered()
        return remaining

    async def _in_turn(self, tenure: Tenure, request: Callable[[asyncio.Future[T]], AdminRequest[T]]) -> T:
        """Ask for a client. The queue of events has few such requests at a time: a broker's crash must not wait behind
        a thousand of them."""
        async with self._turns:
            return await _ask(tenure, request)

    def _active_tenure(self) -> Tenure:
        if self._tenure is None or not self.is_active:
            raise BrokerError(ErrorCode.NOT_CONTROLLER, f"broker {self._broker_id} is not the controller")
        return self._tenure


async def _ask(tenure: Tenure, request: Callable[[asyncio.Future[T]], AdminRequest[T]]) -> T:
    """Post the request and return its result, or raise its failure."""
    reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    tenure.post(request(reply))
    return await reply
