"""One tenure: everything a controller has and does from its election to its resignation.

The tenure owns the cluster state, the queues and the tasks. All of them are dropped when it ends, so nothing of it can
act in a later one. The handlers of its events (`controller/handlers/`) follow the same steps (`steps.py`): read what
the decision needs, let a pure function return a Plan, execute the Plan, and decide again about conflicts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from minibroker.controller.background import start_in_background, stop_in_background
from minibroker.controller.decisions import events
from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.event_loop import EventLoop, Handler
from minibroker.controller.executing.access import ControllerMoved, ZooKeeperAccess
from minibroker.controller.executing.executor import PlanExecutor
from minibroker.controller.executing.gather import Gather
from minibroker.controller.executing.outbox import Outbox
from minibroker.controller.handlers.brokers import BrokerEvents
from minibroker.controller.handlers.elections import ElectionEvents
from minibroker.controller.handlers.internal_topics import InternalTopics
from minibroker.controller.handlers.office import Office
from minibroker.controller.handlers.partitions import PartitionEvents
from minibroker.controller.handlers.reassignment import ReassignmentEvents
from minibroker.controller.handlers.shutdown import ControlledShutdowns
from minibroker.controller.handlers.steps import ControllerSettings, Hooks, Steps
from minibroker.controller.handlers.topics import TopicEvents
from minibroker.controller.timeline import Timeline
from minibroker.protocol.world import SessionExpired, SessionState, Watcher, WatchEvent, World, ZooKeeperSession
from minibroker.protocol.znodes import TOPICS

_log = logging.getLogger(__name__)


class Tenure:
    """Ends through `close`, or by itself: then `ended_because` has the reason."""

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
        self._epoch_version = epoch_version
        self.session = session
        self.state = ClusterState(broker_id, epoch)
        self.ended_because: str | None = None
        self.deletion_news = asyncio.Event()
        """Set for a moment as in `Steps`, and permanently when the tenure ends."""
        self._on_end = on_end
        self._access = ZooKeeperAccess(session, world.clock)
        self._handlers: dict[type[events.Event], Handler] = {}
        self._loop = EventLoop(epoch, self._handle, world.clock, self._access, timeline)
        post = self._loop.post
        self._outbox = Outbox(
            hooks.connections,
            epoch,
            f"controller-{broker_id}",
            settings.socket_timeout_ms / 1000,
            post,
            lambda failure: post(events.SenderBroke(epoch, failure)),
            world.clock,
        )
        watchers = {watched: self._watcher(watched) for watched in events.WATCHED} | {
            events.PartitionModifications: self._topic_modified
        }
        gather = Gather(self._access, epoch, watchers, timeline.note)
        executor = PlanExecutor(self._access, self.state, epoch_version, self._outbox, timeline)
        steps = Steps(
            world, settings, hooks, self.state, gather, executor, timeline, post, self.deletion_news, asyncio.Event()
        )
        topics = TopicEvents(steps)
        self._internal_topics = InternalTopics(steps, topics)
        self._elections = ElectionEvents(steps)
        for family in (
            Office(steps, topics.identify),
            BrokerEvents(steps),
            topics,
            self._internal_topics,
            PartitionEvents(steps, topics),
            self._elections,
            ReassignmentEvents(steps),
            ControlledShutdowns(steps),
        ):
            self._handlers.update(family.handlers())
        self._task: asyncio.Task[None] | None = None
        self._clock = world.clock
        self._away_since_s: float | None = None

    # -- life --

    def start(self) -> None:
        """Take office: the first event reads everything and elects the missing leaders."""
        self._loop.post(events.Startup(self.epoch, self._epoch_version))
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

    async def delivered(self) -> None:
        """Wait until the brokers have answered every request queued by now, or are gone."""
        await self._outbox.delivered()

    def session_changed(self, state: SessionState) -> None:
        self._access.session_changed()
        if state is SessionState.SUSPENDED:
            self._away_since_s = self._clock.monotonic() - self.session.silent_s
        elif state is SessionState.CONNECTED:
            self._away_since_s = None
            self._loop.post(events.SessionReconnected(self.epoch))

    def away(self) -> dict[str, float]:
        """Return for the timeline for how long the connection to ZooKeeper has been lost (`away_ms`), if it is."""
        if self._away_since_s is None:
            return {}
        return {"away_ms": round((self._clock.monotonic() - self._away_since_s) * 1_000, 3)}

    async def close(self) -> None:
        """Stop at once. When this returns, none of the tenure's tasks is running."""
        if self._task is None:
            return
        if self.ended_because is None:  # otherwise the task is already cleaning up
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        timers = [
            start_in_background(work, f"{name} of the controller of epoch {self.epoch}")
            for work, name in (
                (self._elections.rebalance_regularly(), "rebalance timer"),
                (self._internal_topics.create_when_formed(), "creation of internal topics"),
            )
        ]
        try:
            await self._loop.run()
        except (ControllerMoved, SessionExpired) as end:
            self.ended_because = str(end)
            if isinstance(end, SessionExpired):
                self.ended_because = f"the ZooKeeper session 0x{self.session.session_id:x} has expired"
            _log.warning("the controller of epoch %d ends: %s", self.epoch, end)
        except Exception as failure:  # noqa: BLE001 - after any failure another controller must be elected
            self.ended_because = f"the controller failed: {failure!r}"
            _log.exception("the controller of epoch %d failed and resigns", self.epoch)
        finally:
            self.deletion_news.set()
            self._loop.close()
            await stop_in_background(timers)
            await self._outbox.close()

    def _watcher(self, watched: type[events.Event]) -> Watcher:
        return lambda _: self._loop.post(watched(self.epoch))

    def _topic_modified(self, change: WatchEvent) -> None:
        topic = change.path.removeprefix(f"{TOPICS}/")
        self._loop.post(events.PartitionModifications(self.epoch, (topic,)))

    async def _handle(self, event: events.Event) -> None:
        match event:
            case events.Deposed():
                raise ControllerMoved(event.cause)
            case events.SenderBroke(failure=failure):
                raise RuntimeError("a sender of control requests broke") from failure
            case _:
                await self._handlers[type(event)](event)
