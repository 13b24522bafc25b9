"""The controller that every broker carries (Kafka's KafkaController): what the rest of the broker sees of it.

It does nothing until it is told that this broker was elected, and nothing any more once it has resigned; what
it does in between is a `Tenure`. It neither runs for office nor gives it up itself: `Leadership` does, which
calls `take_office` and `resign`, and is asked through `request_resign` where a tenure has to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from minibroker.controller.cluster_state import ClusterState
from minibroker.controller.decisions.topics import ConfigCheck
from minibroker.controller.events import BrokerSuspected, CreateTopicsRequest, DeleteTopicsRequest
from minibroker.controller.tenure import ControllerSettings, Hooks, Probe, Tenure
from minibroker.controller.timeline import EventTimes, Sink, Timeline
from minibroker.protocol.broker_connections import BrokerConnections
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import CreatableTopic, CreatableTopicResult, DeletableTopicResult
from minibroker.protocol.model import NO_EPOCH, Broker
from minibroker.protocol.world import SessionState, World, ZooKeeperSession

__all__ = ["Controller", "ControllerSettings", "Probe"]

T = TypeVar("T")


class Controller:
    """One per broker, for the broker's life.

    `connections` lead to the brokers that it gives orders; `probe` finds the registered brokers that are not running;
    `validate_config` says what is wrong with a topic setting; `on_brokers_changed` hears of the live brokers at every
    change while this is the controller, and of none at the end; `request_resign` is called, never from a task of
    the controller's, when the tenure has ended by itself and `/controller` must be given up; `timeline_sink` takes the
    entries of the timeline.
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
        on_brokers_changed: Callable[[tuple[Broker, ...]], None],
        request_resign: Callable[[str], None],
        timeline_sink: Sink,
    ) -> None:
        self._world = world
        self._settings = settings
        self._broker_id = broker_id
        self._hooks = Hooks(connections, probe, validate_config, on_brokers_changed, spent_nonces={})
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

    def suspect(self, broker_id: int, broker_epoch: int, reason: str) -> None:  # C2
        """That run of a broker seems to have crashed. Does nothing while not active, or if this broker is meant."""
        if self._tenure is not None and broker_id != self._broker_id:
            self._tenure.post(BrokerSuspected(self._tenure.epoch, broker_id, broker_epoch, reason))

    # -- for the handlers of the admin APIs --

    async def create_topics(
        self, topics: Sequence[CreatableTopic], validate_only: bool = False, controller_epoch: int = NO_EPOCH
    ) -> list[CreatableTopicResult]:
        """Returns when the topics are in ZooKeeper, their leaders elected, and the brokers about to be told.

        One result per topic, in their order. Raises BrokerError: NOT_CONTROLLER where this broker is not, or no
        longer, the controller (a topic may have been created all the same), or not in this epoch, if one is given.
        """
        tenure = self._active_tenure()
        if controller_epoch not in (NO_EPOCH, tenure.epoch):
            raise BrokerError(
                ErrorCode.NOT_CONTROLLER, f"controller epoch {controller_epoch} is meant, this one is {tenure.epoch}"
            )
        reply: asyncio.Future[list[CreatableTopicResult]] = asyncio.get_running_loop().create_future()
        tenure.post(
            CreateTopicsRequest(
                tenure.epoch,
                fail=_failer(reply),
                answer=_answerer(reply),
                topics=topics,
                validate_only=validate_only,
            )
        )
        return await reply

    async def delete_topics(self, topics: Mapping[str, str]) -> list[DeletableTopicResult]:
        """Returns when the topics are marked for deletion; they are gone when their brokers have deleted the logs.

        `topics` maps names to the id of the topic that is meant: where another topic has the name, nothing happens.
        An empty id is not checked. One result per name. Raises BrokerError as `create_topics`.
        """
        tenure = self._active_tenure()
        reply: asyncio.Future[list[DeletableTopicResult]] = asyncio.get_running_loop().create_future()
        tenure.post(DeleteTopicsRequest(tenure.epoch, fail=_failer(reply), answer=_answerer(reply), topics=topics))
        return await reply

    def _active_tenure(self) -> Tenure:
        if self._tenure is None or not self.is_active:
            raise BrokerError(ErrorCode.NOT_CONTROLLER, f"broker {self._broker_id} is not the controller")
        return self._tenure


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
