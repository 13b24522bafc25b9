"""The settings that apply to the replicas here, and how a change reaches them while they serve."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from minibroker.broker.replication.delayed import Waits
from minibroker.broker.replication.following.fetcher_manager import ReplicaFetcherManager
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.log_configs import log_config
from minibroker.broker.replication.partition import Partition, Settings
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.replication.throttle import Quota, is_throttled
from minibroker.broker.replication.topic_configs import TopicConfigs
from minibroker.broker.replication.upkeep.healing import Healer
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.topic_config import TopicConfig
from minibroker.broker.settings.types import InvalidConfig
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock, ZooKeeperError, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.replication")

REFUSED_TOPICS_S = 5.0
"""Seconds between two reads of the settings of topics whose orders were refused."""
READS_AT_ONCE = 100
"""Concurrent reads of topics' settings from ZooKeeper."""
PARTITIONS_PER_SLICE = 100
BREATH_S = 0.001


class ReplicaSettings:
    """Reads topics' settings from ZooKeeper, and applies them and the broker's to partitions and logs."""

    def __init__(
        self,
        clock: Clock,
        config: BrokerConfig,
        partitions: Partitions,
        waits: Waits,
        isr_writer: IsrWriter,
        fetchers: ReplicaFetcherManager,
        healer: Healer,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        is_in_touch: Callable[[], bool],
        read_broker_configs: Callable[[ZooKeeperSession], Awaitable[bool]],
    ) -> None:
        """`is_in_touch` and `read_broker_configs`: as for `ReplicaManager`."""
        self._clock = clock
        self._config = config
        self._partitions = partitions
        self._waits = waits
        self._isr_writer = isr_writer
        self._fetchers = fetchers
        self._healer = healer
        self._sessions = sessions
        self._is_in_touch = is_in_touch
        self._read_broker_configs = read_broker_configs
        self.topics = TopicConfigs()
        self._refused_topics: dict[str, str] = {}
        """Topics whose orders were refused because of their settings, and the reason."""
        self.of_partitions = _settings(config)
        self._leader_quota = _quota(config.leader_replication_throttled_rate, clock)
        self._follower_quota = _quota(config.follower_replication_throttled_rate, clock)

    def log_config(self, topic: str) -> LogConfig:
        return log_config(self.topics.of(topic), self._config)

    def quotas_of(self, topic_partition: TopicPartition, topic: TopicConfig) -> tuple[Quota | None, Quota | None]:
        """Return the quotas of the replica here as a leader and as a follower."""
        return (
            self._quota_of(topic_partition, self._leader_quota, topic.leader_replication_throttled_replicas),
            self._quota_of(topic_partition, self._follower_quota, topic.follower_replication_throttled_replicas),
        )

    def _quota_of(self, topic_partition: TopicPartition, quota: Quota | None, replicas: str) -> Quota | None:
        return quota if is_throttled(replicas, topic_partition.partition, self._config.broker_id) else None

    # -- topics --

    async def topic_config_changed(self, topic: str, session: ZooKeeperSession) -> None:
        """Read and apply the topic's settings, which may have changed.

        Raises InvalidConfig and MalformedZnode, with the old settings still in force, ConnectionLoss, SessionExpired.
        """
        await self.read(topic, session)
        if self._refused_topics.pop(topic, None) is not None:
            logger.info("the settings of topic %s make sense again: the controller is asked for its replicas", topic)
            self._healer.mended()

    async def read(self, topic: str, session: ZooKeeperSession) -> None:
        """As `topic_config_changed`, when an order needs the settings of a topic."""
        if await self.topics.read(topic, session):
            await self._reconfigure([p for p in self._partitions.values() if p.topic_partition.topic == topic])

    def refuse(self, topic: str, error: BrokerError) -> None:
        """The settings of the topic make no sense, so an order was refused. Logged once, since orders are repeated."""
        if self._refused_topics.get(topic) != error.detail:
            self._refused_topics[topic] = error.detail
            logger.error("LeaderAndIsr for topic %s refused: %s", topic, error)

    def accept(self, topic: str) -> None:
        """The settings of the topic make sense, or nothing of the topic is here any more."""
        self._refused_topics.pop(topic, None)

    async def look_at_refused_topics(self) -> None:
        """Until cancelled, read the settings of refused topics again. No notification tells this broker of a znode that
        was corrected by hand, or that was corrected while an order was being refused."""
        while True:
            await asyncio.sleep(REFUSED_TOPICS_S)
            for topic in list(self._refused_topics):
                with suppress(InvalidConfig, MalformedZnode, ZooKeeperError):
                    await self.topic_config_changed(topic, await self._sessions())

    async def with_present_settings(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Read the settings of these partitions from ZooKeeper and apply them. Return the partitions for which that
        worked.

        Deletion and compaction call this first: this broker may not have heard of a change yet, and hears of none while
        it is cut off, far away, or served by a ZooKeeper server that lags. All partitions share a few requests."""
        if not self._is_in_touch():
            return []
        topics = list(dict.fromkeys(partition.topic_partition.topic for partition in partitions))
        present: set[str] = set()
        try:
            session = await self._sessions()
            await catch_up(session)
            if not await self._read_broker_configs(session):
                return []
            for start in range(0, len(topics), READS_AT_ONCE):
                some = topics[start : start + READS_AT_ONCE]
                outcomes = await asyncio.gather(
                    *(self.topic_config_changed(topic, session) for topic in some), return_exceptions=True
                )
                for topic, outcome in zip(some, outcomes, strict=True):
                    if outcome is None:
                        present.add(topic)
                    elif not isinstance(outcome, InvalidConfig | MalformedZnode):
                        raise outcome
        except ZooKeeperError:
            return []
        found = []
        for partition in partitions:
            topic_partition = partition.topic_partition
            if topic_partition.topic in present and self._partitions.get(topic_partition) is partition:
                self._reconfigure_one(partition)  # the task that read a change first may still be applying it
                found.append(partition)
        return found

    # -- the broker --

    async def broker_config_changed(self, config: BrokerConfig) -> None:
        """Apply the broker's settings, as far as they can change at run time (`settings.layers.DYNAMIC`)."""
        self._config = config
        self.of_partitions = _settings(config)
        clock = self._clock
        self._leader_quota = _changed(self._leader_quota, config.leader_replication_throttled_rate, clock)
        self._follower_quota = _changed(self._follower_quota, config.follower_replication_throttled_rate, clock)
        await self._reconfigure(list(self._partitions.values()))

    async def _reconfigure(self, partitions: Sequence[Partition]) -> None:
        for number, partition in enumerate(partitions, 1):
            if self._partitions.get(partition.topic_partition) is partition:
                self._reconfigure_one(partition)
            if number % PARTITIONS_PER_SLICE == 0:
                await asyncio.sleep(BREATH_S)
        self._fetchers.wake_all()

    def _reconfigure_one(self, partition: Partition) -> None:
        topic_partition = partition.topic_partition
        topic = self.topics.of(topic_partition.topic)
        # Records that were acknowledged with one durability count for nothing with the other.
        config = msgspec.structs.replace(log_config(topic, self._config), synced=partition.log.config.synced)
        if config != partition.log.config:
            partition.log.configure(config)
        was_throttled = partition.leader_quota is not None
        to_commit = partition.min_insync_replicas
        partition.reconfigure(self.of_partitions, topic.min_insync_replicas, *self.quotas_of(topic_partition, topic))
        if partition.min_insync_replicas != to_commit:
            self._isr_writer.propose(partition)
            if partition.advance_high_watermark():
                self._waits.high_watermark_moved(partition)
            self._waits.role_changed(topic_partition)
        elif was_throttled:
            self._waits.readable(topic_partition)


def _settings(config: BrokerConfig) -> Settings:
    return Settings(
        broker_id=config.broker_id,
        lag_time_max_s=config.replica_lag_time_max_ms / 1_000,
        min_insync_replicas=config.min_insync_replicas,
    )


def _changed(quota: Quota | None, bytes_per_s: int | None, clock: Clock) -> Quota | None:
    """Return the quota at the new rate. Bytes that were recorded at the old one still count."""
    if quota is None or bytes_per_s is None:
        return _quota(bytes_per_s, clock)
    quota.change_rate(bytes_per_s)
    return quota


def _quota(bytes_per_s: int | None, clock: Clock) -> Quota | None:
    return None if bytes_per_s is None else Quota(bytes_per_s, clock)
