"""Applies settings that change while the broker runs (Kafka's DynamicConfigManager and DynamicBrokerConfig; KIP-226).

The settings are in `/config/topics/T`, `/config/brokers/ID` and `/config/brokers/<default>`, quotas in `/config/users`,
`/config/clients` and `/config/ips`. Every change adds a notification below `/config/changes` with the path of the
changed node. Each broker watches the notifications (`ChangeWatcher`) and reads the nodes that they name, or all that
concern it if it may have missed one or cannot read it.

Invalid settings, which come from manual edits, are logged once, and the previous values stay in force.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.layers import dynamic_problem, with_dynamic
from minibroker.broker.settings.parsing import from_earlier_release
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol import znodes
from minibroker.protocol.change_watcher import EXPIRATION_S, RETRY_S, ChangeWatcher
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.world import (
    Clock,
    ConnectionLoss,
    NodeExists,
    NoNode,
    SessionExpired,
    WatchEvent,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.config")

READS_AT_ONCE = 100
MOST_CHANGES = 1_000
"""Notifications that stay at most; the oldest are removed early. ZooKeeper cannot list 30,000 of them, and a broker
that misses one reads everything."""
LOOK_INTERVAL_S = 0.05
"""Time between two looks in ZooKeeper for topics that the broker does not know, whoever names them."""
LOOKS_SAVED_S = 1.0
"""The looks of this time may come at once."""
CLIENTS_AT_A_TIME = 2
"""Reads and writes of settings for clients, under way at a time. Everything else that needs ZooKeeper comes between."""
_WITH_QUOTAS = (f"{znodes.USER_CONFIGS}/", f"{znodes.CLIENT_CONFIGS}/", f"{znodes.IP_CONFIGS}/")
_WITH_SETTINGS = (f"{znodes.TOPIC_CONFIGS}/", f"{znodes.BROKER_CONFIGS}/", *_WITH_QUOTAS)


class DynamicConfigManager(ChangeWatcher):
    """Keeps the broker's current settings in `config`."""

    def __init__(
        self,
        static: BrokerConfig,
        clock: Clock,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
    ) -> None:
        super().__init__("settings", logger, clock, sessions)
        self.static = static
        self.config = static
        self.own: Mapping[str, str] = {}
        """The settings of this broker; `default` has those of all brokers."""
        self.default: Mapping[str, str] = {}
        self.turns = asyncio.Semaphore(CLIENTS_AT_A_TIME)
        """Taken to read or change settings for clients."""
        self._next_look_s = -LOOKS_SAVED_S
        self._has_fired = False
        """Whether the watch on the notifications has fired."""
        self._reading = asyncio.Lock()
        self._complained: dict[str, str] = {}
        """The last logged error of each node, by its path, so that each is logged once."""
        self._on_broker: Callable[[BrokerConfig], Awaitable[None]] | None = None
        self._on_topic: Callable[[str, ZooKeeperSession], Awaitable[None]] | None = None
        self._topics: Callable[[], list[str]] = list
        self._on_quotas: Callable[[str | None, ZooKeeperSession], Awaitable[None]] | None = None

    # -- life --

    async def load(self, sessions: Callable[[], Awaitable[ZooKeeperSession]]) -> None:
        """Read the brokers' settings into `config` when the broker starts. `sessions` must open a new session if the
        first has expired, because nothing else does before the broker is registered."""
        while True:
            try:
                session = await sessions()
                await catch_up(session)
                await self.read_broker_configs(session)
                return
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(RETRY_S)

    def connect(
        self,
        on_broker: Callable[[BrokerConfig], Awaitable[None]],
        on_topic: Callable[[str, ZooKeeperSession], Awaitable[None]],
        topics: Callable[[], list[str]],
        on_quotas: Callable[[str | None, ZooKeeperSession], Awaitable[None]],
    ) -> None:
        """Set the callbacks; call this before `run`. `on_broker` receives the broker's changed settings. `on_topic`
        reads a topic's settings and raises if they are invalid. `topics` returns the topics that concern this broker.
        `on_quotas` reads the quotas of the user or client at a path, or for None all quotas."""
        self._on_broker, self._on_topic, self._topics = on_broker, on_topic, topics
        self._on_quotas = on_quotas

    def _watched(self, event: WatchEvent) -> None:
        self._has_fired = True
        super()._watched(event)

    def may_look_for_topic(self) -> bool:
        """Return whether the settings of a topic that the broker does not know may be read now."""
        now_s = self._clock.monotonic()
        look_s = max(self._next_look_s, now_s - LOOKS_SAVED_S)
        if look_s > now_s:
            return False
        self._next_look_s = look_s + LOOK_INTERVAL_S
        return True

    # -- looking --

    async def _look(self, session: ZooKeeperSession) -> None:
        """Apply the new notifications, or read everything, and set the watch for the next change."""
        everything, has_fired = self._may_have_missed, self._has_fired
        self._may_have_missed = self._has_fired = False  # set again by events, even during this call
        if everything:
            await catch_up(session)
        try:
            names = await session.children(znodes.CONFIG_CHANGES, self._watched)
        except NoNode:
            logger.warning("the znode %s was missing and is created again", znodes.CONFIG_CHANGES)
            with suppress(NodeExists):
                await session.create(znodes.CONFIG_CHANGES, b"")
            names = await session.children(znodes.CONFIG_CHANGES, self._watched)
        unread = [] if everything else [name for name in names if name not in self._seen]
        changed, is_readable = await self._changed(session, unread)
        has_come_and_gone = has_fired and names == sorted(self._seen)
        if everything or not is_readable or has_come_and_gone:
            changed = dict.fromkeys(
                [*changed, znodes.BROKER_CONFIGS, znodes.CONFIG, *map(znodes.topic_config_path, self._topics())]
            )
        paths = list(changed)
        for start in range(0, len(paths), READS_AT_ONCE):
            some = (self._apply(session, path) for path in paths[start : start + READS_AT_ONCE])
            for outcome in await asyncio.gather(*some, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        now_s = self._clock.monotonic()
        self._seen = {name: self._seen.get(name, now_s) for name in names}
        surplus = set(names[:-MOST_CHANGES])  # in the order of their numbers
        await self._purge(session, [n for n, s in self._seen.items() if n in surplus or now_s - s >= EXPIRATION_S])

    async def _changed(self, session: ZooKeeperSession, names: list[str]) -> tuple[dict[str, None], bool]:
        """Return the changed paths, each once, and whether all notifications could be read."""
        paths: dict[str, None] = {}
        is_readable = True
        for name in names:
            notification = f"{znodes.CONFIG_CHANGES}/{name}"
            try:
                data, _ = await session.get(notification)
                path = znodes.decode_config_change(notification, data)
                paths[path] = None
                if not path.startswith(_WITH_SETTINGS):
                    logger.warning(
                        "the notification %s is ignored: %s holds no settings; topics/NAME, brokers/ID, "
                        "brokers/<default>, users/NAME, clients/NAME or ips/ADDRESS is expected",
                        notification,
                        path[:200],
                    )
            except NoNode:
                is_readable = False  # already removed: this broker was away or slow
            except MalformedZnode as error:
                logger.warning("all settings are read, because a notification of changes is malformed: %s", error)
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
        elif self._on_quotas is not None and (path == znodes.CONFIG or path.startswith(_WITH_QUOTAS)):
            await self._on_quotas(None if path == znodes.CONFIG else path, session)

    async def read_broker_configs(self, session: ZooKeeperSession) -> bool:
        """Read and apply the settings of this broker and of all brokers. Return whether all of them are valid; invalid
        ones keep their previous values. Raises ZooKeeperError."""
        async with self._reading:  # an older read must not overwrite a newer one
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
                "the broker's settings have changed: for all brokers %s, for this one %s", dict(default), dict(own)
            )
            if self._on_broker is not None:
                await self._on_broker(config)
        return read_default is not None and read_own is not None

    async def _read_layer(self, session: ZooKeeperSession, broker_id: int | None) -> Mapping[str, str] | None:
        """Return None if the settings are invalid."""
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
                "the settings in %s are invalid; the previous ones stay in force, but no records are deleted by them "
                "until these are corrected: %s",
                path,
                error,
            )

    async def _purge(self, session: ZooKeeperSession, names: list[str]) -> None:
        for name in names:
            with suppress(NoNode):
                await session.delete(f"{znodes.CONFIG_CHANGES}/{name}")
            self._seen.pop(name, None)
