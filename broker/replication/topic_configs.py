"""The settings of the topics that have a replica here, as they were when they last made sense (ConfigRepository).

They are read when a replica is made, and again whenever they may have changed. The two may overlap, and then the read
that began last counts: ZooKeeper answers a session in order, so it saw what the other one saw, or more.
"""

import itertools
import logging

import msgspec

from minibroker.broker.settings.parsing import topic_config_in_zookeeper
from minibroker.broker.settings.schema import as_texts, default_texts, known_names
from minibroker.broker.settings.topic_config import TopicConfig
from minibroker.protocol import znodes
from minibroker.protocol.model import INTERNAL_CLEANUP_POLICY, INTERNAL_TOPICS
from minibroker.protocol.world import NoNode, ZooKeeperSession

logger = logging.getLogger("minibroker.replication")

_MOST_SHOWN = 500
"""In characters."""


class _Known(msgspec.Struct):
    read: int = 0
    """Reads are numbered; this is the one that `config` is from."""
    config: TopicConfig = TopicConfig()
    unknown: list[str] = []
    """The names in the znode that no topic has."""


class TopicConfigs:
    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, topic: str) -> bool:
        """They have been read, or are being read: a change of them matters."""
        return topic in self._known

    def names(self) -> list[str]:
        return list(self._known)

    def of(self, topic: str) -> TopicConfig:
        known = self._known.get(topic)
        return TopicConfig() if known is None else known.config

    def texts_of(self, topic: str) -> dict[str, str] | None:
        """Return the topic's own settings as they apply here, None if nothing of the topic is here."""
        if topic not in self._known:
            return None
        defaults = default_texts(TopicConfig)
        return {name: v for name, v in as_texts(self.of(topic)).items() if defaults.get(name) != v}

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    async def read(self, topic: str, session: ZooKeeperSession) -> bool:
        """From now on `of` has what ZooKeeper has; returns whether that is something else than before. Raises
        InvalidConfig and MalformedZnode, and then `of` has what it had, ConnectionLoss, and SessionExpired."""
        known = self._known.setdefault(topic, _Known())
        number = next(self._numbers)
        path = znodes.topic_config_path(topic)
        unknown: list[str] = []
        try:
            data, _ = await session.get(path)
        except NoNode:
            config = TopicConfig()
        else:
            values = znodes.decode_config(path, data)
            config = topic_config_in_zookeeper(values)
            unknown = sorted(values.keys() - known_names(TopicConfig))
        if topic in INTERNAL_TOPICS:
            config = msgspec.structs.replace(config, cleanup_policy=INTERNAL_CLEANUP_POLICY)
        if number < known.read:
            return False
        if unknown and unknown != known.unknown:
            logger.warning(
                "%s has settings that no topic has, and that are without effect: %s; correct or remove them",
                path,
                repr(unknown)[:_MOST_SHOWN],
            )
        known.unknown = unknown
        is_change = config != known.config
        known.read, known.config = number, config
        return is_change
