"""Planted bugs around the controller: fencing, orders, registration, watches."""

from __future__ import annotations

import asyncio
import math
from heapq import heappush
from typing import Any

from minibroker.broker.handlers import authorization, control
from minibroker.broker.network.backlog import Backlog
from minibroker.broker.network.processor import ServerConnection
from minibroker.broker.network.request_channel import RequestChannel
from minibroker.broker.replication.partition import Partition
from minibroker.controller.decisions import crashes
from minibroker.controller.executing import executor, outbox
from minibroker.controller.executing.access import ControllerMoved, ZooKeeperAccess
from minibroker.controller.governing import leadership
from minibroker.controller.governing.crash_watch import CrashWatch
from minibroker.controller.governing.leadership import Leadership
from minibroker.controller.governing.registration import Registration
from minibroker.controller.tenure import Tenure
from minibroker.protocol.connections import broker_proof
from minibroker.protocol.connections.framing import FrameReader
from minibroker.protocol.world import ConnectionLoss
from tests.simulation.mutants.planting import Patches, mutant

# --- Two controllers ---------------------------------------------------------------------------------------------


def _write_unfenced(patches: Patches) -> None:
    @patches.instead_of(executor, "_batches")
    def batches(original: Any, writes: Any, epoch_version: int) -> Any:
        return original(writes, -1)


@mutant("KAFKA-6082", "a controller's writes do not depend on the version of /controller_epoch")
def unfenced_controller_writes(patches: Patches) -> None:
    _write_unfenced(patches)


@mutant(
    "KAFKA-4447, KAFKA-1096",
    "a resigned controller continues with its events; its writes, which would end it, are not fenced",
)
def resigned_controller_goes_on(patches: Patches) -> None:
    @patches.instead_of(Tenure, "close")
    async def close(original: Any, self: Tenure) -> None:
        """Do nothing: its task continues."""

    _write_unfenced(patches)


def _obey_older_controllers(patches: Patches) -> None:
    @patches.instead_of(control, "_fence")
    async def fence(original: Any, services: Any, request: Any) -> None:
        request.controller_epoch = max(request.controller_epoch, services.control_epoch.highest)
        request.number = 0  # the second fence, between orders of the same controller
        await original(services, request)


@mutant("older controller", "a broker obeys a controller although it knows a newer one")
def older_controller_obeyed(patches: Patches) -> None:
    _obey_older_controllers(patches)


@mutant(
    "older leader epoch",
    "a broker accepts a role in an older leader epoch than its own; only older controllers send such orders, "
    "and it obeys them as well",
)
def older_leader_epoch_accepted(patches: Patches) -> None:
    @patches.instead_of(Partition, "is_stale")
    def is_stale(original: Any, self: Partition, state: Any) -> bool:
        return False

    _obey_older_controllers(patches)


@mutant("a connection's late bytes", "a broker obeys an order that arrives after later ones of the same controller")
def late_order_carried_out(patches: Patches) -> None:
    def is_late(*_: Any) -> bool:
        return False

    patches.set(control, "_is_late", is_late)


@mutant("KIP-380, KAFKA-7235", "a broker obeys orders for an earlier run of itself")
def stale_broker_epoch_accepted(patches: Patches) -> None:
    @patches.instead_of(control, "_fence")
    async def fence(original: Any, services: Any, request: Any) -> None:
        request.broker_epoch = await services.registered_epoch(request.broker_epoch)
        await original(services, request)


@mutant(
    "KAFKA-13407",
    "a broker that created /controller and lost the reply attributes the node to another broker, so there is "
    "no controller",
)
def elected_and_never_started(patches: Patches) -> None:
    @patches.instead_of(Leadership, "_race")
    async def race(original: Any, self: Leadership, *rest: Any) -> None:
        try:
            await original(self, *rest)
        except ConnectionLoss:
            self._claim = None
            raise

    @patches.instead_of(leadership, "judge_leadership")
    def judge_leadership(original: Any, *rest: Any) -> Any:
        verdict = original(*rest)
        return leadership.LeadershipVerdict.FOLLOWER if verdict is leadership.LeadershipVerdict.INVALID else verdict


@mutant("KAFKA-7165", "a broker that finds its own former registration never registers again")
def own_old_registration_in_the_way(patches: Patches) -> None:
    @patches.instead_of(Registration, "_replace")
    async def replace(original: Any, self: Registration, *rest: Any) -> None:
        await asyncio.Event().wait()


# --- Watches lost at a reconnect ------------------------------------------------------------------------------------


@mutant("watches", "a controller does not set its watches again after a reconnect")
def controller_watches_lost(patches: Patches) -> None:
    @patches.instead_of(Tenure, "session_changed")
    def session_changed(original: Any, self: Tenure, state: Any) -> None:
        self._access.session_changed()


@mutant("watches", "a broker believes after a reconnect that the watch on its registration is still set")
def registration_watch_lost(patches: Patches) -> None:
    @patches.instead_of(Registration, "_stay_registered")
    async def stay_registered(original: Any, self: Registration, session: Any) -> None:
        await original(self, _WatchedOnce(session))


class _WatchedOnce:
    """A ZooKeeper session that sets a watch by `exists` only where it has not set one that has not fired."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._is_watched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def exists(self, path: str, watch: Any = None) -> Any:
        if watch is None or self._is_watched:
            return await self._session.exists(path)

        def fired(event: Any) -> None:
            self._is_watched = False
            watch(event)

        found = await self._session.exists(path, fired)
        self._is_watched = True
        return found


# --- Authentication
# ----------------------------------------------------------------------------------------------------


@mutant("CVE-2018-1288", "orders and replica fetches are accepted from any client")
def anybody_is_a_broker(patches: Patches) -> None:
    @patches.instead_of(authorization, "why_refused")
    def why_refused(original: Any, *rest: Any) -> None:
        """Reject no order."""


@mutant("CVE-2018-1288", "any proof that a connection sends is accepted")
def any_proof_is_believed(patches: Patches) -> None:
    @patches.instead_of(broker_proof, "is_same")
    def is_same(original: Any, *rest: Any) -> bool:
        return True


# --- Orders ------------------------------------------------------------------------------------------------------


@mutant(
    "lost registration answer",
    "an order rejected by a broker that does not know its registration yet counts as answered",
)
def refused_order_forgotten(patches: Patches) -> None:
    @patches.instead_of(outbox, "_is_to_be_repeated")
    def is_to_be_repeated(original: Any, error: Any, attempts: int) -> bool:
        return False


@mutant(
    "one nonsense number",
    "a state that names a later controller deposes every controller, although no later one was elected",
)
def deposed_by_a_state(patches: Patches) -> None:
    @patches.instead_of(ZooKeeperAccess, "require_term")
    async def require_term(original: Any, self: ZooKeeperAccess, epoch: int) -> None:
        raise ControllerMoved("a state says so")


# --- One broken link -----------------------------------------------------------------------------------------------


@mutant(
    "flapping controller",
    "a broker suspects a returning broker as quickly as the first time, and a broker that removed a "
    "controller, or was removed, runs for controller at once: two brokers without a link depose each other "
    "for ever",
)
def suspicions_not_counted(patches: Patches) -> None:
    @patches.instead_of(crashes, "in_a_row")
    def in_a_row(original: Any, *rest: Any) -> int:
        return 0

    @patches.instead_of(Leadership, "_let_others_go_first")
    def let_others_go_first(original: Any, self: Leadership, pause_s: float) -> None:
        """Do not wait."""


@mutant(
    "flapping controller",
    "each removed controller resets the count of suspicions: a broker that only one other broker cannot reach "
    "loses the controllership as soon as it has it",
)
def controllers_suspicions_not_counted(patches: Patches) -> None:
    @patches.instead_of(CrashWatch, "suspected")
    def suspected(original: Any, self: CrashWatch, broker_id: int, broker_epoch: int, reason: str) -> None:
        self._detector._suspicions.pop(broker_id, None)
        original(self, broker_id, broker_epoch, reason)


# --- Crash detection -----------------------------------------------------------------------------------------------


@mutant("false alarm", "one refused attempt is a crash")
def one_refusal_is_enough(patches: Patches) -> None:
    patches.set(crashes, "REFUSALS_NEEDED", 1)


@mutant("false alarm", "the attempt whose packet was lost may take all of the detection time, so no other is made")
def one_attempt_decides(patches: Patches) -> None:
    @patches.instead_of(crashes, "connect_timeout_s")
    def connect_timeout_s(original: Any, watched: crashes.Watched, now_s: float, detection_s: float) -> float:
        return detection_s


# --- Requests ------------------------------------------------------------------------------------------------------


@mutant("followers behind clients", "the fetch of a follower waits behind the requests of clients")
def followers_wait_their_turn(patches: Patches) -> None:
    @patches.instead_of(RequestChannel, "offer")
    def offer(original: Any, self: RequestChannel, request: Any, *, wake: bool) -> None:
        original(self, request, wake=wake)
        if self._fetches:
            heappush(self._queue, (math.inf, next(self._arrivals), *self._fetches.pop()))


@mutant("many expensive requests", "the time that a connection's requests take does not count, so each waits for all")
def requests_in_the_order_of_arrival(patches: Patches) -> None:
    @patches.instead_of(RequestChannel, "handled")
    def handled(original: Any, self: RequestChannel, request: Any, seconds: float) -> None:
        original(self, request, 0.0)


@mutant("thousands of new connections", "a turn is expected to take no time, so each new connection goes first once")
def turns_are_expected_to_cost_nothing(patches: Patches) -> None:
    @patches.instead_of(RequestChannel, "_turn_of")
    def turn_of(original: Any, self: RequestChannel, source: Any) -> Any:
        turns, begin_s = original(self, source)
        turns.cost_s = 0.0
        return turns, begin_s


@mutant("starved producers", "clients' requests wait while there is any fetch of a follower")
def followers_keep_clients_out(patches: Patches) -> None:
    @patches.instead_of(RequestChannel, "_take")
    def take(original: Any, self: RequestChannel) -> Any:
        self._is_clients_turn = False
        return original(self)


@mutant("requests of megabytes", "all idle handlers are woken in one turn of the loop")
def handlers_are_woken_together(patches: Patches) -> None:
    @patches.instead_of(RequestChannel, "offer")
    def offer(original: Any, self: RequestChannel, request: Any, *, wake: bool) -> None:
        original(self, request, wake=wake)
        while wake and len(self) and not self._resting and self._has_idle():
            self._give(self._take())


@mutant("fewer handlers", "a handler that ends leaves what was queued for it, and no idle one is woken")
def handlers_leave_a_queue(patches: Patches) -> None:
    @patches.instead_of(RequestChannel, "leave")
    def leave(original: Any, self: RequestChannel) -> None:
        """Do nothing."""


@mutant("hang-ups", "all that a lost connection has sent is handled, although no answer can be sent")
def lost_connections_leave_everything(patches: Patches) -> None:
    @patches.instead_of(Backlog, "has_answer")
    def has_answer(original: Any, self: Backlog) -> bool:
        return True


@mutant("thousands of tiny frames", "all frames that were received are cut at once")
def frames_are_cut_at_once(patches: Patches) -> None:
    @patches.instead_of(FrameReader, "__init__")
    def init(original: Any, self: FrameReader, limit_of: Any, most_at_once: int = 0) -> None:
        original(self, limit_of)


@mutant("hang-ups", "a connection that is called dispatches a larger request than it stood in line for")
def connections_dispatch_what_they_like(patches: Patches) -> None:
    @patches.instead_of(ServerConnection, "room_in_channel")
    def room_in_channel(original: Any, self: ServerConnection, size: int) -> None:
        original(self, 1 << 30)


@mutant("hang-ups", "a peer that hung up before all was read keeps the turns of a connection")
def hang_ups_are_noticed_at_the_end(patches: Patches) -> None:
    @patches.instead_of(ServerConnection, "_notice_hang_up")
    def notice_hang_up(original: Any, self: ServerConnection) -> None:
        """Do nothing."""
