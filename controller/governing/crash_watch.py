"""Which brokers this one watches for crashes: the controller, and all others while it is the controller itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from minibroker.controller.governing.crash_detection import CrashDetector
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_EPOCH, RegisteredBroker
from minibroker.protocol.world import ConnectionLoss, NoNode, SessionExpired, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode

CONTROLLER_RETRY_S = 0.05


class CrashWatch:
    """Gives the detector the brokers to follow, and has a suspected controller removed from office. Any other suspected
    broker is left to this one's controller, while it is in office."""

    def __init__(
        self,
        broker_id: int,
        detector: CrashDetector,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        start: Callable[[Coroutine[object, object, None], str], object],
        remove_controller: Callable[[int, int, str], None],
    ) -> None:
        """`sessions` waits until there is a session, `start` starts a task that has an owner; `remove_controller`
        takes the broker id and the controller epoch of the one whose broker has crashed, and what
        speaks for it."""
        self._broker_id = broker_id
        self._detector = detector
        self._sessions = sessions
        self._start = start
        self._remove_controller = remove_controller
        self._brokers: tuple[RegisteredBroker, ...] = ()
        self._controller: RegisteredBroker | None = None
        self._controller_epoch = NO_EPOCH

    def brokers_changed(self, brokers: tuple[RegisteredBroker, ...]) -> None:
        """This broker's controller has a new picture of the live brokers, or none, once it is out of office."""
        self._brokers = tuple(broker for broker in brokers if broker.id != self._broker_id)
        self._follow()

    def controller_changed(self, controller_id: int | None, epoch: int) -> None:
        """Which broker is in office, and in which controller epoch; None: none is."""
        self._controller_epoch = epoch
        self._controller = None
        self._follow()
        if controller_id is not None and controller_id != self._broker_id:
            self._start(self._find_controller(controller_id, epoch), f"address of controller {controller_id}")

    async def _find_controller(self, controller_id: int, epoch: int) -> None:
        """Find where the controller's broker listens, from its registration; then watch it."""
        path = znodes.broker_path(controller_id)
        while self._controller_epoch == epoch:
            try:
                data, stat = await (await self._sessions()).get(path)
                broker = znodes.decode_broker(controller_id, data, stat.czxid)
            except (ConnectionLoss, SessionExpired, NoNode, MalformedZnode):
                # Not registered: about to be again, or a dead controller whose session, and office, end soon. Or
                # the znode is malformed: then this broker goes without the watch until that is corrected.
                await asyncio.sleep(CONTROLLER_RETRY_S)
                continue
            if self._controller_epoch == epoch:
                self._controller = broker
                self._follow()
            return

    def suspected(self, broker_id: int, broker_epoch: int, reason: str) -> None:
        """For `CrashDetector.on_suspicion`."""
        controller = self._controller
        if controller is not None and (controller.id, controller.epoch) == (broker_id, broker_epoch):
            self._remove_controller(broker_id, self._controller_epoch, reason)

    def _follow(self) -> None:
        watched = {broker.id: broker for broker in self._brokers}
        if self._controller is not None:
            watched.setdefault(self._controller.id, self._controller)
        self._detector.follow(watched.values())
