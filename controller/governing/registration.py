"""This broker's registration: its ZooKeeper session, and the ephemeral znode /brokers/ids/N.

The problem: the znode must exist exactly while the broker does. Sessions expire; other brokers delete the znode on
suspicion; and a broker that was killed and restarted finds the node of its former session, which lasts for seconds
longer (KAFKA-1387, KAFKA-6584, KAFKA-7165, KAFKA-14845). That node must go, but not the node of a live broker that has
the same id by mistake.

The choice: whenever a watch fires or the session's state changes, one task compares the actual with the intended state
and acts. It remembers nothing that it can read from ZooKeeper, so the next round corrects whatever was interrupted.
`judge_node` decides whose a conflicting node is, by the owning session and the address inside: an address that we have
bound ourselves cannot belong to another process, and one that refuses connections has no process behind it. These rules
hold until the first registration. After it, a foreign node under this id means that a second broker N was started: the
newer one wins, and this broker logs an error and stops.

Each registration has a new broker epoch (the node's czxid, KIP-380).

Rejected: waiting for the old session to expire, as Kafka does at first (6 s without the broker); deleting the node
unconditionally, as Kafka does if it contains Kafka's own session id (which a restarted process cannot know).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import Enum
from typing import cast

from minibroker.controller.background import start_in_background, stop_in_background
from minibroker.protocol.connections.broker_proof import fingerprint
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_EPOCH, Endpoint, RegisteredBroker, ZooKeeperContact
from minibroker.protocol.world import (
    Check,
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    SessionExpired,
    SessionState,
    Stat,
    WatchEvent,
    World,
    ZooKeeperError,
    ZooKeeperSession,
    silent_at_most_s,
)
from minibroker.protocol.znodes import (
    BROKER_IDS,
    CLUSTER_ID,
    CONTROLLER_EPOCH,
    PERSISTENT_PATHS,
    MalformedZnode,
    broker_path,
    decode_broker,
    decode_cluster_id,
    decode_secret,
    encode_broker,
    encode_cluster_id,
    new_uuid,
    number,
)

_logger = logging.getLogger("minibroker.registration")

_PROBE_TIMEOUT_S = 1.0
_RECONNECT_PAUSE_S = 0.25
_RETRY_PAUSE_S = 0.02
_COMPLAINT_INTERVAL_S = 10.0
"""Seconds between two log lines about an unreachable ZooKeeper."""

_RECENT_S = 60.0
_MOST_REMEMBERED = 1_000

_EXPIRY_SLACK_S = 2.0
"""ZooKeeper rounds the end of a session up to its next tick, which lasts 2 s by default."""


class BrokerIdTaken(MinibrokerError):
    """Another broker is registered under this broker's id."""


class SecretDiffers(MinibrokerError):
    """The registered brokers have another secret, so none of them would accept this one."""


class ClusterIdChanged(MinibrokerError):
    """ZooKeeper has another cluster id than at the start."""


class NodeOwner(Enum):
    """The owner of a /brokers/ids/N."""

    OURS = "ours"
    STALE = "left by a process that is gone"
    ALIVE = "of another broker that is running"
    UNKNOWN = "perhaps of another broker"


def judge_node(
    owner: int,
    recorded: Sequence[Endpoint],
    *,
    session_id: int,
    former_session_ids: Collection[int],
    own_endpoints: Sequence[Endpoint],
    was_registered: bool,
    answers: bool | None,
) -> NodeOwner:
    """Return whose node it is: the session `owner` created it, with the endpoints `recorded`.

    `answers`: a process accepts connections at those endpoints (True), they all refuse (False), or this is unknown
    (None). `was_registered`: this process has been registered before.
    """
    if owner == session_id:
        return NodeOwner.OURS
    if owner in former_session_ids:
        return NodeOwner.STALE
    if was_registered:
        return NodeOwner.UNKNOWN
    own_addresses = {(endpoint.host, endpoint.port) for endpoint in own_endpoints}
    if any((endpoint.host, endpoint.port) in own_addresses for endpoint in recorded):
        return NodeOwner.STALE
    if answers is None or not recorded:
        return NodeOwner.UNKNOWN
    return NodeOwner.ALIVE if answers else NodeOwner.STALE


class Registration:
    """Keeps broker `broker_id` registered from `start` to `close`.

    Listeners are called on the event loop and must not block.
    """

    def __init__(
        self,
        world: World,
        *,
        zookeeper_connect: str,
        session_timeout_ms: int,
        connect_timeout_ms: int,
        broker_id: int,
        trusted_since: Callable[[], int],
        synced_since: Callable[[], int | None] = lambda: None,
        secret: bytes | None = None,
        rack: str | None = None,
    ) -> None:
        """`trusted_since` and `synced_since` are called at each registration: see `encode_broker`."""
        self._world = world
        self._servers = zookeeper_connect
        self._session_timeout_ms = session_timeout_ms
        self._connect_timeout_ms = connect_timeout_ms
        self._broker_id = broker_id
        self._path = broker_path(broker_id)
        self._rack = rack
        self._trusted_since = trusted_since
        self._synced_since = synced_since
        self._secret = secret
        self._endpoints: tuple[Endpoint, ...] = ()
        self._is_elsewhere = False
        """The endpoints differ from the registered ones."""

        self._session: ZooKeeperSession | None = None
        self._lost_at_s: float | None = None
        """When ZooKeeper was heard of for the last time, if the connection is lost and not back yet."""
        self._away_since_s: float | None = None
        """Since when ZooKeeper has not answered, if the connection is lost and not back yet."""
        self._lost_times = 0
        self._losses: deque[float] = deque(maxlen=_MOST_REMEMBERED)
        """The moments of the last losses."""
        self._former_session_ids: set[int] = set()
        self._cluster_id: str | None = None
        self._broker_epoch = NO_EPOCH
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        self._session_listeners: list[Callable[[ZooKeeperSession, int], None]] = []
        self._lost_listeners: list[Callable[[SessionState], None]] = []
        self._back_listeners: list[Callable[[float], None]] = []
        self._failure_listeners: list[Callable[[Exception], None]] = []

    # -- public --

    @property
    def session(self) -> ZooKeeperSession:
        """The current session, which may be suspended. Raises SessionExpired if there is none."""
        if self._session is None or self._session.state is SessionState.EXPIRED:
            raise SessionExpired(
                f"broker {self._broker_id} has no session with ZooKeeper {self._servers} now; retry later"
            )
        return self._session

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to ZooKeeper, as far as is known."""
        return self._session is not None and self._session.state is SessionState.CONNECTED

    def contact(self) -> ZooKeeperContact:
        now_s = self._world.clock.monotonic()
        silent_s = 0.0 if self._session is None else self._session.silent_s
        lost_s = 0.0 if self._lost_at_s is None else now_s - self._lost_at_s
        away_s: float | None = max(silent_s, lost_s)
        if self.is_connected and silent_s < silent_at_most_s(self._session_timeout_ms):
            away_s = None
        recent = sum(1 for lost_at_s in self._losses if lost_at_s > now_s - _RECENT_S)
        return ZooKeeperContact(away_s, self._session_timeout_ms, self._lost_times, recent)

    @property
    def broker_epoch(self) -> int:
        """The epoch of the present or last registration; NO_EPOCH before the first."""
        return self._broker_epoch

    @property
    def cluster_id(self) -> str:
        """Known once `connect` has returned."""
        assert self._cluster_id is not None, "connect first"
        return self._cluster_id

    def on_session(self, listener: Callable[[ZooKeeperSession, int], None]) -> None:
        """Call `listener` with the session and the broker epoch after every registration: the first, one in a new
        session, and one in the same session after the node was deleted."""
        self._session_listeners.append(listener)

    def on_lost(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` when the session is SUSPENDED or EXPIRED. `on_session` reports a new session; only the
        session's own `on_state` reports that a suspended one has reconnected."""
        self._lost_listeners.append(listener)

    def on_back(self, listener: Callable[[float], None]) -> None:
        """Call `listener` when ZooKeeper answers again after a lost connection or a late answer, if the session has
        survived: with the seconds for which it did not answer, which may be few."""
        self._back_listeners.append(listener)

    def on_failure(self, listener: Callable[[Exception], None]) -> None:
        """Call `listener`, once, if this broker cannot stay registered (BrokerIdTaken, ClusterIdChanged) and must stop.
        Until `start` has returned, `start` raises the error instead."""
        self._failure_listeners.append(listener)

    # -- life --

    async def connect(self) -> None:
        """Open the session, create missing persistent paths, and read (or choose) the cluster id. Registers nothing.

        Raises ConnectionLoss if no ZooKeeper answers in time, MalformedZnode, and other ZooKeeperErrors.
        """
        session = await self._open_session()
        while True:
            try:
                return await self._prepare(session)
            except ConnectionLoss:
                await self._reconnected(session)

    async def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Register with endpoints on which this process already listens, and stay registered. Requires `connect`.

        Returns once registered. Raises BrokerIdTaken, with the other broker's address, and SecretDiffers.
        """
        assert self._task is None
        self._endpoints = tuple(endpoints)
        self._task = start_in_background(self._run(), f"registration of broker {self._broker_id}")
        await asyncio.shield(self._registered)

    def move(self, endpoints: Sequence[Endpoint]) -> None:
        """Change the endpoints after `start`. The broker registers again, as after the end of its session, since
        endpoints belong to one registration."""
        if tuple(endpoints) != self._endpoints:
            self._endpoints = tuple(endpoints)
            self._is_elsewhere = True
            self._news.set()

    async def close(self) -> None:
        """End the session, and with it the registration. No listener is called."""
        if self._task is not None:
            await stop_in_background([self._task])
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- the task --

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._stay_registered(await self.usable_session())
                except SessionExpired as error:
                    _logger.warning("broker %d: %s; opening another session", self._broker_id, error)
        except (MinibrokerError, ZooKeeperError) as error:
            self._fail(error)
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        if not self._registered.done():
            self._registered.set_exception(error)
            return
        _logger.error("broker %d cannot stay registered: %s", self._broker_id, error)
        for listener in self._failure_listeners:
            listener(error)

    async def usable_session(self) -> ZooKeeperSession:
        """Return the current session, or wait for a new one. Callers use it only between `connect` and `start`; after
        that the registration itself opens new sessions."""
        if self._session is not None and self._session.state is not SessionState.EXPIRED:
            return self._session
        next_complaint_s = self._world.clock.monotonic()
        while True:
            try:
                return await self._open_session()
            except ConnectionLoss as error:
                if self._world.clock.monotonic() >= next_complaint_s:
                    _logger.warning("broker %d has no ZooKeeper session: %s; still trying", self._broker_id, error)
                    next_complaint_s = self._world.clock.monotonic() + _COMPLAINT_INTERVAL_S
                await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def _open_session(self) -> ZooKeeperSession:
        if self._session is not None:
            self._former_session_ids.add(self._session.session_id)
        session = await self._world.zookeeper.connect(self._servers, self._session_timeout_ms, self._connect_timeout_ms)
        self._session, self._lost_at_s, self._away_since_s = session, None, None
        session.on_state(lambda state: self._state_changed(session, state))
        session.on_heard_again(lambda *seconds: self._heard_again(session, *seconds))
        return session

    def _heard_again(self, session: ZooKeeperSession, silent_s: float, unanswered_s: float) -> None:
        if session is not self._session:
            return
        if session.state is not SessionState.CONNECTED:  # that change counts as a loss, and the session may have ended
            asked_s = self._world.clock.monotonic() - unanswered_s
            self._away_since_s = asked_s if self._away_since_s is None else min(self._away_since_s, asked_s)
            return
        if silent_s > silent_at_most_s(self._session_timeout_ms):
            self._count_loss()
        self._back(unanswered_s)

    def _back(self, away_s: float) -> None:
        for listener in self._back_listeners:
            listener(away_s)

    def _count_loss(self) -> None:
        self._lost_times += 1
        self._losses.append(self._world.clock.monotonic())

    def _state_changed(self, session: ZooKeeperSession, state: SessionState) -> None:
        if session is not self._session:
            return
        self._news.set()
        if state is SessionState.CONNECTED:
            self._lost_at_s = None
            if self._away_since_s is not None:
                away_s, self._away_since_s = self._world.clock.monotonic() - self._away_since_s, None
                self._back(away_s)
        else:
            if self._lost_at_s is None:
                now_s = self._world.clock.monotonic()
                self._lost_at_s = now_s - session.silent_s
                if self._away_since_s is None:
                    self._away_since_s = now_s
                self._count_loss()
            for listener in self._lost_listeners:
                listener(state)

    async def _stay_registered(self, session: ZooKeeperSession) -> None:
        """Compare and act until cancelled. Raises SessionExpired."""
        prepared = False
        announced = NO_EPOCH
        while True:
            self._news.clear()
            if session.state is SessionState.EXPIRED:
                raise SessionExpired(f"the ZooKeeper session 0x{session.session_id:x} has expired")
            try:
                if not prepared:
                    await self._prepare(session)
                    prepared = True
                stat = await session.exists(self._path, self._watched)
                if stat is None or stat.ephemeral_owner != session.session_id:
                    self._is_elsewhere = False
                    await self._register(session)
                    continue  # read it back, and watch it
                if self._is_elsewhere:
                    endpoints = self._endpoints
                    await self._replace(session, stat, self._node())
                    self._is_elsewhere = endpoints != self._endpoints
                    continue
            except ConnectionLoss:
                await self._reconnected(session)
                continue
            if stat.czxid != announced:
                announced = stat.czxid
                self._announce(session, announced)
            await self._news.wait()

    def _announce(self, session: ZooKeeperSession, broker_epoch: int) -> None:
        again = "again " if self._registered.done() else ""
        _logger.info(
            "broker %d is %sregistered: broker epoch %d, session 0x%x",
            self._broker_id,
            again,
            broker_epoch,
            session.session_id,
        )
        self._broker_epoch = broker_epoch
        for listener in self._session_listeners:
            listener(session, broker_epoch)
        if not self._registered.done():
            self._registered.set_result(None)

    def _watched(self, _event: WatchEvent) -> None:
        self._news.set()

    async def _reconnected(self, session: ZooKeeperSession) -> None:
        """Wait, after a ConnectionLoss, until a retry makes sense. Raises SessionExpired."""
        if session.state is SessionState.CONNECTED:
            await asyncio.sleep(_RETRY_PAUSE_S)  # the change of state may not have been reported yet
        while session.state is not SessionState.CONNECTED:
            if session.state is SessionState.EXPIRED:
                raise SessionExpired(f"the ZooKeeper session 0x{session.session_id:x} has expired")
            self._news.clear()
            await self._news.wait()

    # -- one step each; all may be repeated --

    async def _prepare(self, session: ZooKeeperSession) -> None:
        # Pipelined: ZooKeeper keeps the order, so parents exist before their children.
        created = await asyncio.gather(*(session.create(p, b"") for p in PERSISTENT_PATHS), return_exceptions=True)
        for outcome in created:
            if isinstance(outcome, BaseException) and not isinstance(outcome, NodeExists):
                raise outcome
        cluster_id = self._cluster_id or new_uuid(self._world.random)
        try:
            await session.create(CLUSTER_ID, encode_cluster_id(cluster_id))
        except NodeExists:
            data, _ = await session.get(CLUSTER_ID)
            cluster_id = decode_cluster_id(data)
        if self._cluster_id not in (None, cluster_id):
            raise ClusterIdChanged(
                f"ZooKeeper at {self._servers} holds cluster {cluster_id}, but broker {self._broker_id} belongs to "
                f"{self._cluster_id}: correct zookeeper.connect, or restore {CLUSTER_ID}"
            )
        self._cluster_id = cluster_id

    async def _register(self, session: ZooKeeperSession) -> None:
        """Create the node, and remove a stale one first. Raises BrokerIdTaken, SecretDiffers."""
        if not self._registered.done():
            await self._require_same_secret(session, fingerprint(self._secret, self.cluster_id))
        patience_ends_s: float | None = None
        while True:
            self._news.clear()
            node = self._node()
            try:
                await session.create(self._path, node, ephemeral=True)
                return
            except NodeExists:
                pass
            try:
                data, stat = await session.get(self._path, self._watched)
            except NoNode:
                continue
            owner, where = await self._judge(session, data, stat)
            if owner is NodeOwner.OURS:
                return  # created by a call whose response was lost
            if owner is NodeOwner.STALE:
                _logger.info(
                    "broker %d removes its old registration (session 0x%x)", self._broker_id, stat.ephemeral_owner
                )
                await self._replace(session, stat, node)
                continue
            if owner is NodeOwner.UNKNOWN and stat.ephemeral_owner:
                # If its broker is gone, the session ends and the node disappears.
                now_s = self._world.clock.monotonic()
                if patience_ends_s is None:
                    patience_ends_s = now_s + self._session_timeout_ms / 1000 + _EXPIRY_SLACK_S
                    _logger.warning(
                        "broker id %d is registered by %s: waiting up to %.0f s for it to go",
                        self._broker_id,
                        where,
                        patience_ends_s - now_s,
                    )
                if now_s < patience_ends_s:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(patience_ends_s - now_s):
                            await self._news.wait()
                    if session.state is SessionState.SUSPENDED:
                        await self._reconnected(session)
                    continue
            remedy = "stop that broker" if stat.ephemeral_owner else f"delete the znode {self._path}, made by hand"
            raise BrokerIdTaken(
                f"broker id {self._broker_id} is taken by {where}: give this broker another broker.id, or {remedy}"
            )

    def _node(self) -> bytes:
        return encode_broker(
            self._endpoints,
            self._rack,
            self._world.clock.wall_ms(),
            self._trusted_since(),
            self._synced_since(),
            fingerprint(self._secret, self.cluster_id),
        )

    async def _require_same_secret(self, session: ZooKeeperSession, secret: str) -> None:
        """Compare the secret with those of the registered brokers. Raises SecretDiffers: with another secret this
        broker would be assigned replicas that it could never serve."""
        for name in await session.children(BROKER_IDS):
            other = number(name)
            if other is None or other == self._broker_id:
                continue
            try:
                data, _ = await session.get(broker_path(other))
                theirs = decode_secret(other, data)
            except (NoNode, MalformedZnode):
                continue
            if theirs is not None and theirs != secret:
                mine = "has the one that it was given" if secret else "has none"
                raise SecretDiffers(
                    f"broker {name} has {'another secret' if theirs else 'no secret'}, and broker {self._broker_id} "
                    f"{mine}: give all brokers of a cluster the same broker.secret.file (if broker {name} has just "
                    f"been killed to change it, wait until its session with ZooKeeper is over)"
                )

    async def _judge(self, session: ZooKeeperSession, data: bytes, stat: Stat) -> tuple[NodeOwner, str]:
        """Return whose node it is, and the addresses in it."""
        broker = RegisteredBroker(self._broker_id, stat.czxid, ())
        try:
            broker = decode_broker(self._broker_id, data, stat.czxid)
        except MalformedZnode as error:
            _logger.warning("%s", error)
        where = ", ".join(f"{endpoint.host}:{endpoint.port}" for endpoint in broker.endpoints) or "an unknown address"

        def judge(answers: bool | None) -> NodeOwner:
            return judge_node(
                stat.ephemeral_owner,
                broker.endpoints,
                session_id=session.session_id,
                former_session_ids=self._former_session_ids,
                own_endpoints=self._endpoints,
                was_registered=self._broker_epoch != NO_EPOCH,
                answers=answers,
            )

        owner = judge(None)
        if owner is NodeOwner.UNKNOWN and self._broker_epoch == NO_EPOCH:
            owner = judge(await self._answers(broker.endpoints))
        return owner, where

    async def _replace(self, session: ZooKeeperSession, stale: Stat, node: bytes) -> None:
        """Replace the stale node by ours, unless something has changed since it was judged; then it is judged again."""
        operations: list[Operation] = []
        epoch = await session.exists(CONTROLLER_EPOCH)
        if epoch is not None:
            operations.append(Check(CONTROLLER_EPOCH, epoch.version))
        # ZooKeeper can check versions but not czxids, and a re-created node begins at version 0 again: so compare the
        # czxid here.
        found = await session.exists(self._path)
        if found is None or found.czxid != stale.czxid:
            return
        operations += [Delete(self._path, stale.version), Create(self._path, node, ephemeral=True)]
        try:
            await session.multi(operations)
        except MultiFailed as error:
            _logger.info("the registrations in %s changed meanwhile (%s); looking again", BROKER_IDS, error.cause)

    async def _answers(self, endpoints: Sequence[Endpoint]) -> bool | None:
        """Return True if one of the endpoints accepts connections, False if all refuse, None if it is unknown."""
        refused = 0
        for endpoint in endpoints:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    probe = await self._world.network.connect(endpoint.host, endpoint.port, _Probe)
            except ConnectionRefusedError:
                refused += 1
            except (OSError, UnicodeError):  # no answer, no route, no such name, or an empty one
                continue
            else:
                probe.transport.abort()
                if not probe.to_itself:
                    return True
                refused += 1
        return False if endpoints and refused == len(endpoints) else None


class _Probe(asyncio.Protocol):
    transport: asyncio.Transport
    to_itself = False
    """TCP connects a socket to itself if the kernel happens to choose the destination port as the source port. No
    process listens there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        own_address = transport.get_extra_info("sockname")
        self.to_itself = own_address is not None and own_address == transport.get_extra_info("peername")
