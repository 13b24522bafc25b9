"""How a replica comes into service on this broker, and how it leaves it."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.metrics.log_lines import Gathered, named
from minibroker.broker.replication.delayed import Waits
from minibroker.broker.replication.following.fetcher_manager import ReplicaFetcherManager
from minibroker.broker.replication.leadership import LeadershipListeners
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.broker.replication.throttle import Traffic
from minibroker.broker.replication.upkeep.healing import Healer, tell_of_lost_replicas
from minibroker.broker.replication.upkeep.log_retention import LogRetention
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.topic_ids import is_older
from minibroker.protocol.world import Clock, ZooKeeperSession

logger = logging.getLogger("minibroker.replication")

DELETIONS_REMEMBERED = 10_000
"""Deleted replicas that are remembered. An order that comes after so many later deletions is no longer expected."""


@dataclass(eq=False)
class ReplicaLifecycle:
    """Opens logs as partitions of the table, and takes them out of it."""

    _broker_id: int
    _partitions: Partitions
    _logs: LogDirs
    _metadata: MetadataCache
    _settings: ReplicaSettings
    _fetchers: ReplicaFetcherManager
    _waits: Waits
    _listeners: LeadershipListeners
    _retention: LogRetention
    _healer: Healer
    _supervisor: Supervisor
    _clock: Clock
    _sessions: Callable[[], Awaitable[ZooKeeperSession]]
    _broker_epoch: Callable[[], int]
    _is_in_touch: Callable[[], bool]
    """As for `ReplicaManager`."""
    traffic: dict[str, Traffic] = field(default_factory=dict)
    """The traffic of each topic that has a partition here."""
    _deleted: dict[tuple[str, int], int] = field(default_factory=dict)
    """The leader epochs in which replicas were deleted here, by topic id and partition index."""
    _deleted_replicas: Gathered[TopicPartition] = field(
        default_factory=lambda: Gathered(lambda deleted: logger.info("deleted its replicas of %s", named(deleted)))
    )

    def close(self) -> None:
        self._deleted_replicas.close()

    # -- into service --

    async def ensure(self, topic_partition: TopicPartition, topic_id: str, *, is_new: bool) -> Partition:
        """Return the partition, with its log opened or created. Raises BrokerError."""
        partition = self._partitions.get(topic_partition)
        if partition is not None and is_older(partition.log.topic_id, topic_id):
            self._leave(partition)  # its topic is gone, though no order to delete it has reached this broker
            partition = None
        if partition is not None:
            if topic_id and partition.log.topic_id != topic_id:
                raise BrokerError(
                    ErrorCode.INCONSISTENT_TOPIC_ID,
                    f"{topic_partition} has topic id {partition.log.topic_id} here, but the controller says {topic_id}",
                )
            return partition
        asked_for = self._settings.log_config(topic_partition.topic)
        log = await self._logs.get_or_create(topic_partition, topic_id, asked_for, is_new=is_new)
        present = self._settings.log_config(topic_partition.topic)  # it may have changed during the wait
        if present != asked_for:
            log.configure(present)
        topic = self._settings.topics.of(topic_partition.topic)
        leader_quota, follower_quota = self._settings.quotas_of(topic_partition, topic)
        partition = self._partitions[topic_partition] = Partition(
            topic_partition,
            log,
            self._settings.of_partitions,
            self._clock,
            self._metadata.alive_epoch,
            high_watermark=self._logs.high_watermark(topic_partition),
            min_insync_replicas=topic.min_insync_replicas,
            traffic=self.traffic.setdefault(topic_partition.topic, Traffic()),
            may_be_deposed=self._may_be_deposed,
            store_start_soon=self._store_start_soon,
            leader_quota=leader_quota,
            follower_quota=follower_quota,
            give_up=self._give_up_soon,
        )
        log.on_flushed = partial(self._flushed, partition)
        return partition

    def _may_be_deposed(self, told_in_broker_epoch: int) -> bool:
        """Whether a leader may have a successor that this broker does not know: the broker has lost ZooKeeper, or had
        to register again and has not received its role since."""
        return not self._is_in_touch() or self._broker_epoch() != told_in_broker_epoch

    def _store_start_soon(self, topic_partition: TopicPartition) -> None:
        partition = self._partitions.get(topic_partition)
        if partition is not None:
            self._retention.store_start_soon(partition.log.log_dir, topic_partition)

    def _flushed(self, partition: Partition) -> None:
        """A log with durability=synced was flushed, or a log was moved: more of this replica may be safe."""
        if partition.advance_high_watermark():
            self._waits.high_watermark_moved(partition)
        elif not partition.is_leader:
            self._fetchers.wake(partition.leader_id)

    def log_moved(self, partition: Partition) -> None:
        """The partition's log is in another directory from now on, and all of it is flushed."""
        partition.log.on_flushed = partial(self._flushed, partition)
        self._flushed(partition)
        self._waits.deletions.check_soon(partition.topic_partition)  # its log start offset is on disk

    # -- out of service --

    def log_dir_failed(self) -> None:
        """End the part of each replica whose log directory is offline: it neither leads nor follows, and waiting
        requests are answered. The controller elects other leaders."""
        for topic_partition, partition in list(self._partitions.items()):
            if self._logs.is_offline(topic_partition):
                self._leave(partition)

    def set_aside(self, partition: Partition, reason: str) -> None:
        """Take a follower whose log cannot go on out of service; no other replica suffers. Its leader removes it from
        the ISR when it lags; the controller hears of it with its next order for the partition."""
        if self._partitions.get(partition.topic_partition) is partition:
            self._set_log_aside(partition, reason, is_damaged=False)

    def _give_up_soon(self, partition: Partition, reason: str) -> None:
        """End the part of a replica whose log is damaged: in a task, since the caller is still using the log."""
        self._supervisor.start(self._give_up(partition, reason), f"end of {partition.topic_partition}, damaged")

    async def _give_up(self, partition: Partition, reason: str) -> None:
        """Act as if the log directory had failed, for this replica alone."""
        if self._partitions.get(partition.topic_partition) is not partition:
            return
        self._healer.replica_lost(partition.topic_partition, partition.leader_epoch)
        self._set_log_aside(partition, reason, is_damaged=True)
        await tell_of_lost_replicas(self._sessions, self._broker_id)

    def _set_log_aside(self, partition: Partition, reason: str, *, is_damaged: bool) -> None:
        topic_partition = partition.topic_partition
        closing = self._logs.set_aside(topic_partition, reason, is_damaged=is_damaged)
        self._supervisor.start(closing, f"end of the log of {topic_partition}")
        self._leave(partition)

    def _leave(self, partition: Partition) -> None:
        """Read, write and follow nothing of this partition from now on."""
        topic_partition = partition.topic_partition
        del self._partitions[topic_partition]
        self._fetchers.stop_following(topic_partition)
        if partition.is_leader:
            self._listeners.resigned(partition)
        self._waits.role_changed(topic_partition)

    async def delete(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        """Raises BrokerError if the files cannot be deleted; the replica is out of service in any case."""
        self._remember_deletion(topic_partition, topic_id, leader_epoch)
        partition = self._partitions.get(topic_partition)
        if partition is not None:
            self._leave(partition)  # before the disk, which may take long
        else:
            self._waits.role_changed(topic_partition)
        try:
            await self._logs.delete(topic_partition)
            self._deleted_replicas.add(topic_partition)
        except BrokerError as error:
            logger.error("%s cannot be deleted: %s", topic_partition, error)
            raise

    def forget_topic_without_partitions(self, topic: str) -> None:
        if not any(partition.topic == topic for partition in self._partitions):
            self._settings.accept(topic)
            self._settings.topics.forget(topic)
            self.traffic.pop(topic, None)

    def was_deleted(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> bool:
        """Whether an order of this epoch is older than the deletion of the replica here, and came late over a
        connection that was given up. Obeying it would create a replica of a topic that is gone, which would be in the
        way of the next topic of that name."""
        return leader_epoch <= self._deleted.get((topic_id, topic_partition.partition), NO_EPOCH)

    def _remember_deletion(self, topic_partition: TopicPartition, topic_id: str, leader_epoch: int) -> None:
        if topic_id:
            self._deleted[topic_id, topic_partition.partition] = leader_epoch
            if len(self._deleted) > DELETIONS_REMEMBERED:
                del self._deleted[next(iter(self._deleted))]
