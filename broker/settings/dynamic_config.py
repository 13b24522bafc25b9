"""Settings that change while the broker runs (Kafka's DynamicConfigManager and DynamicBrokerConfig; KIP-226).

What is set is in `/config/topics/T`, `/config/brokers/ID` and `/config/brokers/<default>`. Whoever changes it also
leaves a node under `/config/changes` that says where. Every broker watches these, and reads what they name: never more
is taken from a notification than that, so it does not matter how many are missed. Where they may have been (the
session or its connection was lost, a notification cannot be read) everything that matters here is read.

What makes no sense, since it was edited by hand, is one line in the log; what held until then holds on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from minibroker.broker.replication.isr_writer import catch_up
from minibroker.broker.settings.config import (
    BrokerConfig,
    InvalidConfig,
    dynamic_problem,
    from_earlier_release,
    with_dynamic,
)
from minibroker.protocol import znodes
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world import (
    Clock,
    ConnectionLoss,
    NodeExists,
    NoNode,
    SessionExpired,
    SessionState,
    WatchEvent,
    ZooKeeperError,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode

logger = logging.getLogger("minibroker.config")

ZOOKEEPER_RETRY_S = 0.1
ZOOKEEPER_TROUBLE_S = 1.0
READS_AT_ONCE = 100
CHANGE_EXPIRATION_S = 15 * 60.0
"""How long a notification stays, counted by each broker from when it saw it; whoever is first removes it."""


class DynamicConfigManager:
    """`config` has the broker's settings as they hold now."""

    def __init__(
        self,
        static: BrokerConfig,
        clock: Clock,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
    ) -> None:
        self.static = static
        self.config = static
        self.own: Mapping[str, str] = {}
        """What is set for this broker, and below, for all."""
        self.default: Mapping[str, str] = {}
        self._clock = clock
        self._sessions = sessions
        self._session: ZooKeeperSession | None = None
        self._may_have_missed = True
        self._has_fired = False
        """The watch on the notifications has."""
        self._news = asyncio.Event()
        self._reading = asyncio.Lock()
        self._seen: dict[str, float] = {}
        """Notifications, and when they were seen first."""
        self._complained: dict[str, str] = {}
        """What is wrong with a node, by its path: said once."""
        self._on_broker: Callable[[BrokerConfig], Awaitable[None]] | None = None
        self._on_topic: Callable[[str, ZooKeeperSession], Awaitable[None]] | None = None
        self._topics: Callable[[], list[str]] = list

    # -- life --

    async def load(self, sessions: Callable[[], Awaitable[ZooKeeperSession]]) -> None:
        """Read what is set for brokers, when this one starts: `config` has it then. `sessions` opens another where the
        first has expired meanwhile, since nobody else does as long as the broker is not registered."""
        while True:
            try:
                session = await sessions()
                await catch_up(session)
                await self.read_broker_configs(session)
                return
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(ZOOKEEPER_RETRY_S)

    def connect(
        self,
        on_broker: Callable[[BrokerConfig], Awaitable[None]],
        on_topic: Callable[[str, ZooKeeperSession], Awaitable[None]],
        topics: Callable[[], list[str]],
    ) -> None:
        """Before `run`. `on_broker` takes the broker's settings when they have changed; `on_topic` reads those of a
        topic and raises what is wrong with them; `topics`: all whose settings matter here."""
        self._on_broker, self._on_topic, self._topics = on_broker, on_topic, topics

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._news.clear()
            try:
                await self._look(await self._usable_session())
            except (ConnectionLoss, SessionExpired):
                self._may_have_missed = True
                await asyncio.sleep(ZOOKEEPER_RETRY_S)
                continue
            except ZooKeeperError as error:
                logger.error("changes of settings cannot be read: %s", error)
                self._may_have_missed = True
                await asyncio.sleep(ZOOKEEPER_TROUBLE_S)
                continue
            oldest_s = min(self._seen.values(), default=None)
            until_next_s = None if oldest_s is None else oldest_s + CHANGE_EXPIRATION_S - self._clock.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next_s):
                    await self._news.wait()

    async def _usable_session(self) -> ZooKeeperSession:
        session = await self._sessions()
        if session is not self._session:
            self._session = session
            self._may_have_missed = True
            session.on_state(lambda state: self._state_changed(session, state))
        return session

    def _state_changed(self, session: ZooKeeperSession, state: SessionState) -> None:
        if session is self._session and state is not SessionState.SUSPENDED:
            self._may_have_missed = True
            self._news.set()

    def _watched(self, _event: WatchEvent) -> None:
        self._has_fired = True
        self._news.set()

    # -- looking --

    async def _look(self, session: ZooKeeperSession) -> None:
        """Once: what was not seen yet, or everything; and set the watch for what comes next."""
        everything, has_fired = self._may_have_missed, self._has_fired
        self._may_have_missed = self._has_fired = False  # until something says so, perhaps already while this goes on
        if everything:
            await catch_up(session)
        try:
            names = await session.children(znodes.CONFIG_CHANGES, self._watched)
        except NoNode:
            logger.warning("the znode %s was missing; it is made again", znodes.CONFIG_CHANGES)
            with suppress(NodeExists):
                await session.create(znodes.CONFIG_CHANGES, b"")
            names = await session.children(znodes.CONFIG_CHANGES, self._watched)
        unread = [] if everything else [name for name in names if name not in self._seen]
        changed, is_readable = await self._changed(session, unread)
        has_come_and_gone = has_fired and names == sorted(self._seen)
        if everything or not is_readable or has_come_and_gone:
            changed = dict.fromkeys([*changed, znodes.BROKER_CONFIGS, *map(znodes.topic_config_path, self._topics())])
        paths = list(changed)
        for start in range(0, len(paths), READS_AT_ONCE):
            some = (self._apply(session, path) for path in paths[start : start + READS_AT_ONCE])
            for outcome in await asyncio.gather(*some, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        now_s = self._clock.monotonic()
        self._seen = {name: self._seen.get(name, now_s) for name in names}
        await self._purge(session, [name for name, s in self._seen.items() if now_s - s >= CHANGE_EXPIRATION_S])

    async def _changed(self, session: ZooKeeperSession, names: list[str]) -> tuple[dict[str, None], bool]:
        """Where something has changed, each path once, and whether that is all."""
        paths: dict[str, None] = {}
        is_readable = True
        for name in names:
            notification = f"{znodes.CONFIG_CHANGES}/{name}"
            try:
                data, _ = await session.get(notification)
                path = znodes.decode_config_change(notification, data)
                paths[path] = None
                if not path.startswith((f"{znodes.TOPIC_CONFIGS}/", f"{znodes.BROKER_CONFIGS}/")):
                    logger.warning(
                        "the notification %s is ignored: there are no settings in %s; topics/NAME, brokers/ID or "
                        "brokers/<default> is expected",
                        notification,
                        path[:200],
                    )
            except NoNode:
                is_readable = False  # it is removed already: this broker was away, or slow
            except MalformedZnode as error:
                logger.warning("a notification of changed settings tells nothing, all are read: %s", error)
                is_readable = False
        return paths, is_readable

    async def _apply(self, session: ZooKeeperSession, path: str) -> None:
        if path == znodes.BROKER_CONFIGS or path.startswith(f"{znodes.BROKER_CONFIGS}/"):
            await self.read_broker_configs(session)
        elif path.startswith(f"{znodes.TOPIC_CONFIGS}/") and self._on_topic is not None:
            topic = path.removeprefix(f"{znodes.TOPIC_CONFIGS}/")
            try:
                await self._on_topic(topic, session)
                self._complained.pop(path, None)
            except (InvalidConfig, MalformedZnode) as error:
                self._complain(path, error)

    async def read_broker_configs(self, session: ZooKeeperSession) -> bool:
        """What is set for this broker and for all of them; it holds from now on. Returns whether all of it makes sense:
        what does not is as it was before. Raises ZooKeeperError."""
        async with self._reading:  # or what was read first might be taken for the last
            return await self._read_broker_configs(session)

    async def _read_broker_configs(self, session: ZooKeeperSession) -> bool:
        read_default = await self._read_layer(session, None)
        read_own = await self._read_layer(session, self.static.broker_id)
        default = self.default if read_default is None else read_default
        own = self.own if read_own is None else read_own
        paths = f"{znodes.broker_config_path(self.static.broker_id)} and {znodes.broker_config_path(None)}"
        try:
            config = with_dynamic(self.static, default, own)
        except InvalidConfig as error:
            self._complain(paths, error)
            return False
        self._complained.pop(paths, None)
        self.default, self.own = default, own
        if config != self.config:
            self.config = config
            logger.info(
                "the settings of this broker have changed: for all %s, for this one %s", dict(default), dict(own)
            )
            if self._on_broker is not None:
                await self._on_broker(config)
        return read_default is not None and read_own is not None

    async def _read_layer(self, session: ZooKeeperSession, broker_id: int | None) -> Mapping[str, str] | None:
        """None where it makes no sense."""
        path = znodes.broker_config_path(broker_id)
        try:
            data, _ = await session.get(path)
            layer = from_earlier_release(znodes.decode_config(path, data))
            problem = dynamic_problem(layer, is_for_all=broker_id is None)
            if problem is not None:
                raise InvalidConfig(problem)
        except NoNode:
            return {}
        except (MalformedZnode, InvalidConfig) as error:
            self._complain(path, error)
            return None
        self._complained.pop(path, None)
        return layer

    def _complain(self, path: str, error: MinibrokerError) -> None:
        if self._complained.get(path) != str(error):
            self._complained[path] = str(error)
            logger.error(
                "the settings in %s make no sense: what held before holds on, but nothing is deleted by it until they "
                "are corrected: %s",
                path,
                error,
            )

    async def _purge(self, session: ZooKeeperSession, names: list[str]) -> None:
        for name in names:
            with suppress(NoNode):
                await session.delete(f"{znodes.CONFIG_CHANGES}/{name}")
            self._seen.pop(name, None)
