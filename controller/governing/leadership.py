"""The election of the controller: the race for /controller, taking office, resigning, removing a crashed controller.

The problem: exactly one broker must act as controller, although sessions expire, connections break during a race, and
nodes are deleted by other brokers or by hand. Known failures: a deposed controller that continues (KAFKA-4447,
KAFKA-6082); a winner that never hears of its victory and never starts (KAFKA-13407); a late delete that removes the
successor (ZooKeeper compares data versions, and every new node begins with the same version).

The choice: the race is one `multi` that creates /controller and raises /controller_epoch from the version read, so each
term of office has an epoch and a data version of /controller_epoch of its own. Each removal of /controller checks that
version in the same `multi`. There is one way into office and out of it: read both nodes, let `judge_leadership` return
a verdict, act on it, read again. The response to the race is ignored: the race was won if the next read shows our
session and the claimed epoch, so a lost response makes no difference. One task does all this, one step at a time, and
waits until the callbacks have returned: a broker never runs for office before its former term has ended.

A server of the ensemble may lag: it never shows a session anything older than an earlier response of that session, but
it may not have a write whose response was lost. ZooKeeper's leader, which orders all writes, then refuses the race, and
the next read is newer.

Rejected: compare-and-delete by czxid (ZooKeeper has none); a lock recipe with a queue of waiters (tools know Kafka's
znodes); reacting to single events (any of them may be lost with the connection; a fresh read is always right).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple

from minibroker.controller.background import start_in_background, stop_in_background
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import INITIAL_CONTROLLER_EPOCH, NO_CONTROLLER
from minibroker.protocol.world import (
    Check,
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    SessionExpired,
    SessionState,
    SetData,
    WatchEvent,
    World,
    ZooKeeperError,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import (
    CONTROLLER,
    CONTROLLER_EPOCH,
    MalformedZnode,
    decode_controller,
    decode_controller_epoch,
    encode_controller,
    encode_controller_epoch,
)

_logger = logging.getLogger("minibroker.leadership")

_RETRY_PAUSE_S = 0.02
_TROUBLE_PAUSE_S = 1.0
"""Seconds before the next read, if ZooKeeper refused a request or a znode is malformed."""

RESIGNATION_PAUSE_S = 0.5
"""Seconds for which a controller that resigned or was removed does not run: other brokers may not have its problem."""
REMOVAL_PAUSE_S = 0.05
"""Seconds for which a broker that removed a crashed controller does not run. If the controller lives and only the link
between the two is broken, a third broker that reaches both should win. Without a third broker, the failover takes this
much longer."""

NO_SESSION = 0
"""The owner of a node that is not ephemeral."""


class OfficeTerm(NamedTuple):
    """A term of office. `epoch_version` is the data version of /controller_epoch after its election."""

    epoch: int
    epoch_version: int


class Seen(NamedTuple):
    """The contents of /controller and /controller_epoch."""

    controller_id: int | None
    """None: there is no /controller. NO_CONTROLLER: its content is not a broker id."""
    owner: int
    """The session that created /controller and removes it at its end; NO_SESSION: it is not ephemeral."""
    epoch: int
    epoch_version: int


class LeadershipVerdict(Enum):
    VACANT = "no broker is controller"
    ELECTED = "this broker is controller"
    FOLLOWER = "another broker is controller"
    LEFTOVER = "/controller belongs to a former session of this broker, or to none and names no broker"
    INVALID = "/controller belongs to this session, but names another broker or term"


def judge_leadership(seen: Seen, broker_id: int, session_id: int, claim: OfficeTerm | None) -> LeadershipVerdict:
    """Return what the two nodes mean for broker `broker_id`, whose last race claimed the term `claim`."""
    if seen.controller_id is None:
        return LeadershipVerdict.VACANT
    if seen.owner == NO_SESSION and seen.controller_id == NO_CONTROLLER:
        # Written by hand, or only half written: it would stay forever. A persistent node that names a controller is
        # respected: Kafka's migration to KRaft keeps brokers out of office in this way.
        return LeadershipVerdict.LEFTOVER
    if seen.owner != session_id:
        # An attached broker is registered, so no other process has its id: the node is from its former process.
        return LeadershipVerdict.LEFTOVER if seen.controller_id == broker_id else LeadershipVerdict.FOLLOWER
    if seen.controller_id == broker_id and claim == (seen.epoch, seen.epoch_version):
        return LeadershipVerdict.ELECTED
    return LeadershipVerdict.INVALID


class Leadership:
    """Runs for controller whenever the office is vacant, from `start` to `close`, in the sessions given to `attach`.

    `on_elected(session, epoch, epoch_version)` begins a term; it should return once the term has begun, before its work
    is done. If it raises, the term ends at once. `on_resign(reason)` ends the term: when it returns, no task of the
    term may be running. `on_controller(controller_id, epoch)` reports every change of controller; None: there is none.
    `on_removed(controller_id, epoch)` reports that this broker has removed a crashed controller. The callbacks are
    called one after the other.
    """

    def __init__(
        self,
        world: World,
        broker_id: int,
        *,
        on_elected: Callable[[ZooKeeperSession, int, int], Awaitable[None]],
        on_resign: Callable[[str], Awaitable[None]],
        on_controller: Callable[[int | None, int], None],
        on_removed: Callable[[int, int], None],
    ) -> None:
        self._clock = world.clock
        self._broker_id = broker_id
        self._on_elected = on_elected
        self._on_resign = on_resign
        self._on_controller = on_controller
        self._on_removed = on_removed

        self._session: ZooKeeperSession | None = None
        self._claim: OfficeTerm | None = None
        self._term: OfficeTerm | None = None
        self._announced: tuple[int | None, int] | None = None
        self._highest_epoch = INITIAL_CONTROLLER_EPOCH
        self._not_before_s = 0.0
        self._resignation: asyncio.Future[None] | None = None

        self._watching = False
        self._look_asked = False
        self._work: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    # -- public; none of it waits --

    @property
    def is_controller(self) -> bool:
        """Whether this broker is in office, as far as it knows."""
        return self._term is not None

    @property
    def controller_id(self) -> int | None:
        """The controller as of the last read; None if there is none, or it is not known yet."""
        return self._announced[0] if self._announced else None

    @property
    def epoch(self) -> int:
        """The controller epoch as of the last read."""
        return self._announced[1] if self._announced else INITIAL_CONTROLLER_EPOCH

    def start(self) -> None:
        self._task = start_in_background(self._run(), f"leadership of broker {self._broker_id}")

    def attach(self, session: ZooKeeperSession) -> None:
        """Run for office in this session from now on. For the current session, only read again."""
        self._work.put_nowait(lambda: self._attach(session))

    def detach(self, reason: str = "detached from ZooKeeper") -> None:
        """Resign, and do not run until the next `attach`. After the end of a session it need not be called."""
        self._work.put_nowait(lambda: self._leave_session(self._session, reason))

    def resign(self, reason: str) -> None:
        """Request the end of the term and the removal of /controller, so that another broker is elected. Ignored out of
        office."""
        self._work.put_nowait(lambda: self._resign(reason))

    def remove_crashed(self, controller_id: int, epoch: int) -> None:
        """Request the removal of the /controller of that term, whose broker has crashed. No other term's is removed."""
        self._work.put_nowait(lambda: self._remove_crashed(controller_id, epoch))

    async def close(self) -> None:
        """End the term, if any, and stop. The end of the session removes /controller."""
        if self._task is not None:
            await stop_in_background([self._task])
        if self._resignation is not None:
            await self._resignation
        await self._end_term("the broker stops")

    # -- the task --

    async def _run(self) -> None:
        while True:
            work = await self._work.get()
            try:
                await work()
            except SessionExpired:
                await self._session_expired(self._session)
            except ConnectionLoss:
                # The request may have been carried out. Only reads and removals get here, and they begin by reading.
                self._again_in(_RETRY_PAUSE_S, work)
            except (MinibrokerError, ZooKeeperError) as error:
                _logger.error("broker %d cannot take part in the election of a controller: %s", self._broker_id, error)
                self._again_in(_TROUBLE_PAUSE_S, self._look)

    def _again_in(self, pause_s: float, work: Callable[[], Awaitable[None]]) -> None:
        asyncio.get_running_loop().call_later(pause_s, self._work.put_nowait, work)

    def _ask_to_look(self) -> None:
        if not self._look_asked:
            self._look_asked = True
            self._work.put_nowait(self._look)

    async def _attach(self, session: ZooKeeperSession) -> None:
        if session is not self._session:
            await self._leave_session(self._session, "a new ZooKeeper session")
            self._session = session
            session.on_state(lambda state: self._state_changed(session, state))
        self._ask_to_look()

    def _state_changed(self, session: ZooKeeperSession, state: SessionState) -> None:
        if session is not self._session:
            return
        self._watching = False  # the watch is lost with the connection
        if state is SessionState.CONNECTED:
            self._ask_to_look()
        elif state is SessionState.EXPIRED:
            self._work.put_nowait(lambda: self._session_expired(session))

    async def _session_expired(self, session: ZooKeeperSession | None) -> None:
        if session is not None:
            await self._leave_session(session, f"the ZooKeeper session 0x{session.session_id:x} has expired")

    async def _leave_session(self, session: ZooKeeperSession | None, reason: str) -> None:
        if session is None or session is not self._session:
            return
        self._session = None
        self._watching = False
        await self._end_term(reason)

    async def _resign(self, reason: str) -> None:
        if self._term is None:
            return
        self._let_others_go_first(RESIGNATION_PAUSE_S)
        await self._end_term(reason)
        self._ask_to_look()  # finds our node without a term, and removes it

    async def _remove_crashed(self, controller_id: int, epoch: int) -> None:
        session = self._session
        if session is None:
            return
        seen = await self._read(session)
        if (seen.controller_id, seen.epoch) == (controller_id, epoch) and seen.owner != session.session_id:
            _logger.warning("broker %d removes the controller %d, which has crashed", self._broker_id, controller_id)
            if await self._remove(session, seen.epoch_version):
                self._on_removed(controller_id, epoch)
                self._let_others_go_first(REMOVAL_PAUSE_S)
        await self._look()

    # -- looking and acting --

    async def _look(self) -> None:
        """Read, judge and act until there is nothing left to do."""
        self._look_asked = False
        while (session := self._session) is not None:
            seen = await self._read(session)
            verdict = judge_leadership(seen, self._broker_id, session.session_id, self._claim)
            if verdict is LeadershipVerdict.ELECTED:
                self._announce(seen.controller_id, seen.epoch)
                await self._begin_term(session, OfficeTerm(seen.epoch, seen.epoch_version))
                if self._term is not None:
                    return
            elif verdict is LeadershipVerdict.FOLLOWER:
                await self._end_term(f"broker {seen.controller_id} is the controller, says {CONTROLLER}")
                self._announce(seen.controller_id, seen.epoch)
                return
            elif verdict is LeadershipVerdict.LEFTOVER:
                await self._end_term(f"{CONTROLLER} belongs to another session")
                if seen.controller_id == NO_CONTROLLER:
                    _logger.warning(
                        "broker %d removes %s: no session owns it, and it names no broker", self._broker_id, CONTROLLER
                    )
                await self._remove(session, seen.epoch_version)
            elif verdict is LeadershipVerdict.INVALID:
                await self._end_term(f"{CONTROLLER} no longer matches epoch {seen.epoch} of broker {self._broker_id}")
                await self._remove(session, seen.epoch_version)
            else:
                if self._term is not None:  # removed, most likely by a broker that could not reach this one
                    self._let_others_go_first(RESIGNATION_PAUSE_S)
                await self._end_term(f"{CONTROLLER} is gone")
                self._announce(None, seen.epoch)
                pause_s = self._not_before_s - self._clock.monotonic()
                if pause_s > 0:
                    self._again_in(pause_s, self._look)
                    return
                await self._race(session, seen)

    async def _read(self, session: ZooKeeperSession) -> Seen:
        """Read both nodes, after setting a watch on /controller.

        The epoch is read first, so that a removal that checks its version cannot hit a newer /controller.
        """
        if not self._watching:
            self._watching = True
            try:
                await session.exists(CONTROLLER, self._watched_in(session))
            except BaseException:
                self._watching = False
                raise
        try:
            data, epoch_stat = await session.get(CONTROLLER_EPOCH)
        except NoNode:
            await self._create_epoch(session)
            data, epoch_stat = await session.get(CONTROLLER_EPOCH)
        epoch = decode_controller_epoch(data)
        self._highest_epoch = max(self._highest_epoch, epoch)
        try:
            data, stat = await session.get(CONTROLLER)
        except NoNode:
            return Seen(None, NO_SESSION, epoch, epoch_stat.version)
        try:
            controller_id = decode_controller(data)
        except MalformedZnode as error:
            _logger.warning("%s", error)
            controller_id = NO_CONTROLLER
        return Seen(controller_id, stat.ephemeral_owner, epoch, epoch_stat.version)

    def _watched_in(self, session: ZooKeeperSession) -> Callable[[WatchEvent], None]:
        def watched(_event: WatchEvent) -> None:
            if session is self._session:
                self._watching = False
                self._ask_to_look()

        return watched

    async def _create_epoch(self, session: ZooKeeperSession) -> None:
        # Epochs only grow: if the node was deleted by hand, the next epoch still exceeds the last one known here.
        with contextlib.suppress(NodeExists):
            await session.create(CONTROLLER_EPOCH, encode_controller_epoch(self._highest_epoch))

    async def _race(self, session: ZooKeeperSession, seen: Seen) -> None:
        term = OfficeTerm(max(seen.epoch, self._highest_epoch) + 1, seen.epoch_version + 1)
        self._claim = term
        with contextlib.suppress(MultiFailed):  # another broker was faster; the next read shows which
            await session.multi(
                [
                    Create(CONTROLLER, encode_controller(self._broker_id, self._clock.wall_ms()), ephemeral=True),
                    SetData(CONTROLLER_EPOCH, encode_controller_epoch(term.epoch), seen.epoch_version),
                ]
            )

    async def _remove(self, session: ZooKeeperSession, epoch_version: int) -> bool:
        """Remove /controller. Return False if another was elected since `epoch_version`, or the node is gone."""
        try:
            await session.multi([Check(CONTROLLER_EPOCH, epoch_version), Delete(CONTROLLER)])
        except MultiFailed as error:
            _logger.info("%s was not removed: %s", CONTROLLER, error.cause)
            return False
        return True

    def _let_others_go_first(self, pause_s: float) -> None:
        self._not_before_s = self._clock.monotonic() + pause_s

    # -- terms --

    def _announce(self, controller_id: int | None, epoch: int) -> None:
        if self._announced != (controller_id, epoch):
            self._announced = (controller_id, epoch)
            self._on_controller(controller_id, epoch)

    async def _begin_term(self, session: ZooKeeperSession, term: OfficeTerm) -> None:
        if self._term == term:
            return
        await self._end_term("elected again")
        self._claim = self._term = term
        _logger.info("broker %d is the controller, epoch %d", self._broker_id, term.epoch)
        try:
            await self._on_elected(session, *term)
        except Exception:
            _logger.exception("broker %d could not take office as controller and resigns", self._broker_id)
            self._let_others_go_first(RESIGNATION_PAUSE_S)
            await self._end_term("it could not take office")

    async def _end_term(self, reason: str) -> None:
        if self._term is None:
            return
        _logger.info("broker %d is no longer the controller: %s", self._broker_id, reason)
        self._term = self._claim = None
        # Shielded: `close` may cancel this task, and then waits for the end of the term.
        self._resignation = asyncio.ensure_future(self._on_resign(reason))
        await asyncio.shield(self._resignation)
        self._resignation = None
