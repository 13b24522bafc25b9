"""The controller that every broker carries (Kafka's KafkaController): what the rest of the broker sees of it.

It does nothing until it is told that this broker was elected, and nothing any more once it has resigned; what
it does in between is a `Tenure`. It neither runs for office nor gives it up itself: `Leadership` does, which
calls `take_office` and `resign`, and is asked through `request_resign` where a tenure has to end.
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
from minibroker.protocol.model import NO_EPOCH, ElectionType, RegisteredBroker, TopicPartition
from minibroker.protocol.world import SessionState, World, ZooKeeperSession

__all__ = ["Controller", "ControllerSettings", "Probe"]

DELIVERY_S = 1.0
"""How long a broker that stops waits for others to hear what they lead now: one that hangs must not hold it up."""

T = TypeVar("T")


class Controller:
    """One per broker, for the broker's life.

    `connections` lead to the brokers that it gives orders; `probe` finds the registered brokers that are not running;
    `validate_config` says what is wrong with a topic setting; `read_defaults`: see `Hooks`; `on_brokers_changed` hears
    of the live brokers at every change while this is the controller, and of none at the end; `request_resign` is
    called, never from a task of the controller's, when the tenure has ended by itself and `/controller` must be given
    up; `timeline_sink` takes the entries of the timeline.
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
        self._hooks = Hooks(connections, probe, validate_config, read_defaults, on_brokers_changed, spent_nonces={})
        self._request_resign = request_resign
        self._tenure: Tenure | None = None
        self._session: ZooKeeperSession | None = None
        self.timeline = Timeline(world.clock, broker_id, timeline_sink)

    @property
    def is_active(self) -> bool:
        """This broker is the controller, as far as it knows."""
        return self._tenure is not None and self._tenure.running

    @property
    def epoch(self) -> int | None:
        """The controller epoch while active."""
        return self._tenure.epoch if self._tenure is not None and self.is_active else None

    @property
    def state(self) -> ClusterState | None:
        """The picture of the cluster while active. Only to be read, and without an await in between, which may change
        it."""
        return self._tenure.state if self._tenure is not None and self.is_active else None

    @property
    def queued_events(self) -> int:
        """Events that wait to be handled."""
        return self._tenure.queued_events if self._tenure is not None else 0

    @property
    def event_times(self) -> dict[str, EventTimes]:
        """By the name of the event, over all tenures of this broker."""
        return self.timeline.times

    @property
    def unclean_elections(self) -> int:
        """Elections of leaders that may lack acknowledged records, over all tenures of this broker."""
        return self.timeline.unclean_elections

    # -- for Leadership --

    async def take_office(self, session: ZooKeeperSession, epoch: int, epoch_version: int) -> None:
        """This broker was elected with `epoch`; `/controller_epoch` has the data version `epoch_version`.

        Returns when the tenure has begun, not when it has read and elected everything. A failure after that asks to
        resign.
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
        """This broker is no longer the controller. When this returns nothing of the tenure is running any more."""
        tenure, self._tenure = self._tenure, None
        if tenure is None:
            return
        await tenure.close()
        self.timeline.record("Resignation", reason, tenure.epoch)
        self._hooks.on_brokers_changed(())

    def _tenure_ended(self, tenure: Tenure) -> None:
        if tenure is self._tenure and tenure.ended_because is not None:
            self._request_resign(tenure.ended_because)

    def _session_changed(self, session: ZooKeeperSession, state: SessionState) -> None:
        if self._tenure is not None and self._tenure.session is session:
            self._tenure.session_changed(state)

    async def close(self) -> None:
        """Like `resign`, when the broker stops."""
        await self.resign("the broker stops")

    # -- for crash detection --

    def suspect(self, broker_id: int, broker_epoch: int, reason: str, lasted_ms: float = 0.0) -> None:  # C2
        """That run of a broker seems to have crashed. Does nothing while not active, or if this broker is meant."""
        if self._tenure is not None and broker_id != self._broker_id:
            self._tenure.post(BrokerSuspected(self._tenure.epoch, broker_id, broker_epoch, reason, lasted_ms))

    def record_suspected_controller(self, broker_id: int, epoch: int, reason: str, lasted_ms: float) -> None:
        """For the timeline: this broker takes the controller of that epoch for crashed, and is about to remove it."""
        cause = f"broker {broker_id}, the controller of epoch {epoch}, is suspected: {reason}"
        details = {"broker": broker_id, "reason": reason, "lasted_ms": round(lasted_ms, 3)}
        self.timeline.record("ControllerSuspected", cause, epoch, details)

    def record_removed_controller(self, broker_id: int, epoch: int) -> None:
        """For the timeline: this broker has removed `/controller`, which was of that broker and epoch."""
        cause = f"/controller of broker {broker_id} is deleted, so that another is elected"
        details = {"broker": broker_id, "writes": [f"remove {znodes.CONTROLLER} (of epoch {epoch})"]}
        self.timeline.record("ControllerRemoved", cause, epoch, details)

    # -- for settings that change --

    def topic_config_changed(self, topic: str) -> None:
        """A partition of it that has no leader may have one now. What decides elections is read for each of them."""
        state = self.state
        if state is not None and any(p.topic == topic for p in state.partitions_without_leader()):
            assert self._tenure is not None
            self._tenure.post(UncleanLeaderElectionEnable(self._tenure.epoch, topic))

    def defaults_changed(self, unclean_leader_election: bool, min_insync_replicas: int | None) -> None:
        """What holds from now on for topics that do not set it."""
        is_enabled = unclean_leader_election and not self._settings.unclean_leader_election
        self._settings.unclean_leader_election = unclean_leader_election
        self._settings.min_insync_replicas = min_insync_replicas
        if is_enabled and self._tenure is not None:
            self._tenure.post(UncleanLeaderElectionEnable(self._tenure.epoch, None))

    # -- for the handlers of the admin APIs --

    def recorded_after(self, number: int, since_ms: int) -> tuple[int, list[Entry]]:
        """The number of the timeline's last entry, and the entries with a higher number than the given one that are not
        older than that time."""
        return self.timeline.last_number, self.timeline.after(number, since_ms)

    async def create_topics(
        self, topics: Sequence[CreatableTopic], validate_only: bool = False, controller_epoch: int = NO_EPOCH
    ) -> list[CreatableTopicResult]:
        """Returns when the topics are in ZooKeeper, their leaders elected, and the brokers about to be told.

        One result per topic, in their order. Raises BrokerError: NOT_CONTROLLER where this broker is not, or no
        longer, the controller (a topic may have been created all the same), or not in this epoch, if one is given.
        """
        tenure = self._tenure_of(controller_epoch)
        return await _asked(
            tenure,
            lambda fail, answer: CreateTopicsRequest(
                tenure.epoch, fail=fail, answer=answer, topics=topics, validate_only=validate_only
            ),
        )

    async def create_partitions(
        self, topics: Sequence[CreatePartitionsTopic], validate_only: bool = False
    ) -> list[CreatePartitionsTopicResult]:
        """Returns when the partitions are in ZooKeeper, their leaders elected, and the brokers about to be told.

        One result per topic. Raises BrokerError as `create_topics`.
        """
        tenure = self._active_tenure()
        return await _asked(
            tenure,
            lambda fail, answer: CreatePartitionsRequest(
                tenure.epoch, fail=fail, answer=answer, topics=topics, validate_only=validate_only
            ),
        )

    async def delete_topics(self, topics: Mapping[str, str]) -> list[DeletableTopicResult]:
        """Returns when the topics are marked for deletion; they are gone when their brokers have deleted the logs.

        `topics` maps names to the id of the topic that is meant: where another topic has the name, nothing happens.
        An empty id is not checked. One result per name. Raises BrokerError as `create_topics`.
        """
        tenure = self._active_tenure()
        return await _asked(
            tenure, lambda fail, answer: DeleteTopicsRequest(tenure.epoch, fail=fail, answer=answer, topics=topics)
        )

    async def until_deleted(self, topics: Mapping[str, str]) -> dict[str, str]:
        """Returns when none of these topics (ids by name) is left, or what is left has to wait for something, as for a
        broker that is down: what for, by name. Raises BrokerError(NOT_CONTROLLER) once this is not, or no longer, the
        controller."""
        tenure = self._active_tenure()
        while True:
            left = deletion.waiting(self._active_tenure().state, topics)
            if all(left.values()):
                return left
            await tenure.deletion_news.wait()

    def deletions_left(self, topics: Mapping[str, str]) -> dict[str, str]:
        """Which of these topics (ids by name) are not gone, and what each of them waits for. Raises
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
        """Returns when the new leaders are in ZooKeeper, and the brokers about to be told. One outcome per partition;
        where all are asked for (None), for those that needed an election. Raises BrokerError as `create_topics`, and
        REQUEST_TIMED_OUT for an unclean election that is not wanted any more when its turn has come."""
        tenure = self._tenure_of(controller_epoch)
        return await _asked(
            tenure,
            lambda fail, answer: ElectLeadersRequest(
                tenure.epoch,
                fail=fail,
                answer=answer,
                election_type=election_type,
                partitions=partitions,
                is_wanted=is_wanted,
            ),
        )

    def _tenure_of(self, controller_epoch: int) -> Tenure:
        """The tenure of that epoch; NO_EPOCH: whichever it is."""
        tenure = self._active_tenure()
        if controller_epoch not in (NO_EPOCH, tenure.epoch):
            raise BrokerError(
                ErrorCode.NOT_CONTROLLER, f"controller epoch {controller_epoch} is meant, this one is {tenure.epoch}"
            )
        return tenure

    async def alter_partition_reassignments(
        self, topics: Sequence[ReassignableTopic]
    ) -> list[ReassignableTopicResponse]:
        """Returns when the reassignments are on record and have begun; they go on by themselves, under whichever
        controller. One result per partition, in their order. Raises BrokerError as `create_topics`."""
        tenure = self._active_tenure()
        return await _asked(
            tenure,
            lambda fail, answer: AlterPartitionReassignments(tenure.epoch, fail=fail, answer=answer, topics=topics),
        )

    async def list_partition_reassignments(
        self, topics: Sequence[ListPartitionReassignmentsTopic] | None
    ) -> list[OngoingTopicReassignment]:
        """What is under way, of these partitions or of all. Raises BrokerError as `create_topics`."""
        tenure = self._active_tenure()
        return await _asked(
            tenure,
            lambda fail, answer: ListPartitionReassignments(tenure.epoch, fail=fail, answer=answer, topics=topics),
        )

    # -- for brokers that stop --

    async def controlled_shutdown(self, broker_id: int, broker_epoch: int) -> list[TopicPartition]:
        """Let others lead what that run of the broker leads, and take it out of the ISRs, as far as others can do
        without it. Returns when the others know, with the partitions that remain with it, in order.

        It may be repeated. A later controller knows nothing of it. Raises BrokerError: NOT_CONTROLLER as
        `create_topics`; STALE_BROKER_EPOCH for an earlier run of the broker, BROKER_NOT_AVAILABLE for one that this
        controller does not know (yet).
        """
        tenure = self._active_tenure()
        remaining: list[TopicPartition] = await _asked(
            tenure,
            lambda fail, answer: ControlledShutdownRequest(
                tenure.epoch, fail=fail, answer=answer, broker_id=broker_id, broker_epoch=broker_epoch
            ),
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELIVERY_S):
                await tenure.delivered()
        return remaining

    def _active_tenure(self) -> Tenure:
        if self._tenure is None or not self.is_active:
            raise BrokerError(ErrorCode.NOT_CONTROLLER, f"broker {self._broker_id} is not the controller")
        return self._tenure


async def _asked(
    tenure: Tenure, request: Callable[[Callable[[Exception], None], Callable[[T], None]], AdminRequest]
) -> T:
    """The answer to the request that is made of the two callbacks. Raises what it failed with."""
    reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    tenure.post(request(_failer(reply), _answerer(reply)))
    return await reply


def _answerer(reply: asyncio.Future[T]) -> Callable[[T], None]:
    def answer(result: T) -> None:
        if not reply.done():
            reply.set_result(result)

    return answer


def _failer(reply: asyncio.Future[T]) -> Callable[[Exception], None]:
    def fail(failure: Exception) -> None:
        if not reply.done():
            reply.set_exception(failure)

    return fail
