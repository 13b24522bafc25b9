"""The choice of brokers to watch for crashes: the controller, or all others while this broker is the controller."""

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
    """Chooses the brokers for the detector, and requests the removal of a suspected controller. Other suspected brokers
    are handled by this broker's controller, while it is in office."""

    def __init__(
        self,
        broker_id: int,
        detector: CrashDetector,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        start: Callable[[Coroutine[object, object, None], str], object],
        remove_controller: Callable[[int, int, str], None],
    ) -> None:
        """`sessions` waits for a session; `start` starts a task with an owner; `remove_controller` is called with the
        broker id and the epoch of a controller that seems to have crashed, and the reason."""
        self._broker_id = broker_id
        self._detector = detector
        self._sessions = sessions
        self._start = start
        self._remove_controller = remove_controller
        self._brokers: tuple[RegisteredBroker, ...] = ()
        self._controller: RegisteredBroker | None = None
        self._controller_epoch = NO_EPOCH

    def brokers_changed(self, brokers: tuple[RegisteredBroker, ...]) -> None:
        """Watch the live brokers that this broker's controller knows; none once it is out of office."""
        self._brokers = tuple(broker for broker in brokers if broker.id != self._broker_id)
        self._follow()

    def controller_changed(self, controller_id: int | None, epoch: int) -> None:
        """Watch the broker that is controller in that epoch; None: there is none."""
        self._controller_epoch = epoch
        self._controller = None
        self._follow()
        if controller_id is not None and controller_id != self._broker_id:
            self._start(self._find_controller(controller_id, epoch), f"address of controller {controller_id}")

    async def _find_controller(self, controller_id: int, epoch: int) -> None:
        """Read the controller's endpoint from its registration, then watch it."""
        path = znodes.broker_path(controller_id)
        while self._controller_epoch == epoch:
            try:
                data, stat = await (await self._sessions()).get(path)
                broker = znodes.decode_broker(controller_id, data, stat.czxid)
            except (ConnectionLoss, SessionExpired, NoNode, MalformedZnode):
                # An unregistered controller either registers again, or is dead and its session ends soon. With a
                # malformed znode it cannot be watched until the znode is corrected.
                await asyncio.sleep(CONTROLLER_RETRY_S)
                continue
            if self._controller_epoch == epoch:
                self._controller = broker
                self._follow()
            return

    def suspected(self, broker_id: int, broker_epoch: int, reason: str) -> None:
        """Listener for `CrashDetector.on_suspicion`."""
        controller = self._controller
        if controller is not None and (controller.id, controller.epoch) == (broker_id, broker_epoch):
            self._remove_controller(broker_id, self._controller_epoch, reason)

    def _follow(self) -> None:
        watched = {broker.id: broker for broker in self._brokers}
        if self._controller is not None:
            watched.setdefault(self._controller.id, self._controller)
        self._detector.follow(watched.values())
