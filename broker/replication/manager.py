"""The replicas of this broker: the entry for handlers and the controller's orders (Kafka's ReplicaManager).

`ReplicaManager` creates the parts, connects them, and starts and stops them. Callers use the parts directly:

| part | job |
|---|---|
| `partitions` | the table of replicas |
| `appender`, `reader` | the data path; a request that cannot be answered yet waits in `waits` |
| `orders` | the controller's LeaderAndIsr and StopReplica, and strays |
| `lifecycle` | how a replica comes into service and leaves it |
| `settings` | topics' and the broker's settings, and their changes |
| `fetchers`, `isr_writer`, `healer`, `mover`, `cleaner` | work that goes on by itself, with retention and checkpoints |
"""

from collections.abc import Awaitable, Callable

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.replication.appending import Appender
from minibroker.broker.replication.delayed import Waits
from minibroker.broker.replication.following.fetcher_manager import ReplicaFetcherManager
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.leadership import LeadershipListeners
from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.broker.replication.orders import ControllerOrders
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.replication.reading import Reader
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.broker.replication.upkeep.healing import Healer
from minibroker.broker.replication.upkeep.high_watermark_checkpoint import HighWatermarkCheckpoint
from minibroker.broker.replication.upkeep.lagging import Lagging, lagging_followers
from minibroker.broker.replication.upkeep.log_cleaner import CleanerSettings, LogCleaner
from minibroker.broker.replication.upkeep.log_mover import LogMover
from minibroker.broker.replication.upkeep.log_retention import LogRetention
from minibroker.broker.scheduling.sleeps import Sleeps
from minibroker.broker.scheduling.slices import TakingTurns
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.world import World, ZooKeeperSession

SessionSource = Callable[[], Awaitable[ZooKeeperSession]]
"""Waits until there is a session, and returns it."""


async def _no_broker_configs(_session: ZooKeeperSession) -> bool:
    return True


class ReplicaManager:
    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        logs: LogDirs,
        metadata: MetadataCache,
        supervisor: Supervisor,
        sessions: SessionSource,
        broker_epoch: Callable[[], int],
        connections: BrokerConnections,
        is_in_touch: Callable[[], bool] = lambda: True,
        read_broker_configs: Callable[[ZooKeeperSession], Awaitable[bool]] = _no_broker_configs,
    ) -> None:
        """`connections` are those to leaders. `is_in_touch` returns whether this broker is connected to ZooKeeper, as
        far as it knows. `read_broker_configs` is as in `DynamicConfigManager`; it calls `broker_config_changed` if they
        have changed."""
        me, clock = config.broker_id, world.clock
        self._config = config
        self._metadata = metadata
        self._clock = clock
        self._supervisor = supervisor
        self.log_dirs = logs
        self.waits = waits = Waits(clock.monotonic)
        self.listeners = LeadershipListeners()
        self.partitions = partitions = Partitions(me, logs, metadata)
        self.fetchers = ReplicaFetcherManager(
            world,
            config,
            supervisor,
            broker_epoch,
            connections,
            lambda partition, reason: self.lifecycle.set_aside(partition, reason),
        )
        self.isr_writer = IsrWriter(
            partitions,
            supervisor,
            sessions,
            config.replica_lag_time_max_ms,
            waits.high_watermark_moved,
            waits.isr_changed,
        )
        self.healer = Healer(logs, sessions, me)
        self.settings = ReplicaSettings(
            clock,
            config,
            partitions,
            waits,
            self.isr_writer,
            self.fetchers,
            self.healer,
            sessions,
            is_in_touch,
            read_broker_configs,
        )
        self._sleeps = Sleeps(clock)
        self._checkpoint = HighWatermarkCheckpoint(
            logs, partitions, config.replica_high_watermark_checkpoint_interval_ms
        )
        self._retention = LogRetention(
            clock,
            logs,
            partitions,
            config.log_retention_check_interval_ms,
            waits.deletions.check_soon,
            self._sleeps,
            self.settings.with_present_settings,
        )
        self.cleaner = LogCleaner(
            world,
            logs,
            partitions,
            _cleaner_settings(config),
            self._sleeps,
            self.settings.with_present_settings,
        )
        self.lifecycle = ReplicaLifecycle(
            me,
            partitions,
            logs,
            metadata,
            self.settings,
            self.fetchers,
            waits,
            self.listeners,
            self._retention,
            self.healer,
            supervisor,
            clock,
            sessions,
            broker_epoch,
            is_in_touch,
        )
        self.mover = LogMover(
            logs, partitions, lambda partition: metadata.partition(partition) is not None, self.lifecycle.log_moved
        )
        self.orders = ControllerOrders(
            me,
            partitions,
            logs,
            metadata,
            self.lifecycle,
            self.settings,
            self.fetchers,
            self.isr_writer,
            waits,
            self.listeners,
            self.healer,
            sessions,
            broker_epoch,
        )
        self.appender = Appender(world, partitions, waits)
        self.searches = TakingTurns(world.new_executor("searches by time"))
        """For ListOffsets."""
        self.reader = Reader(partitions, logs, waits, self.isr_writer, self.fetchers.silences, config.fetch_max_bytes)

    def start(self) -> None:
        """Start the background work, once the logs are open and before the first control request."""
        start = self._supervisor.start
        self.isr_writer.start()
        start(self.healer.run(), "healing of damaged replicas")
        start(self.mover.run(), "moves of replicas between log directories")
        start(self.settings.look_at_refused_topics(), "look at settings that make no sense")
        for path in self.log_dirs.paths:
            start(self._checkpoint.run(path), f"high watermark checkpoint of {path}")
            start(self._retention.run(path), f"log retention in {path}")
            start(self._retention.store_starts(path), f"log start checkpoint of {path}")
        if self._config.log_cleaner_enable:
            start(self.cleaner.run(), "log cleaner")

    async def broker_config_changed(self, config: BrokerConfig) -> None:
        """Apply the broker's settings, as far as they can change at run time."""
        self.cleaner.configure(_cleaner_settings(config))
        self._retention.interval_ms = config.log_retention_check_interval_ms
        self._sleeps.look_again()
        await self.settings.broker_config_changed(config)

    async def lagging_followers(self) -> list[Lagging]:
        """Return the live followers that lag behind this broker."""
        return await lagging_followers(
            list(self.partitions.values()), lambda id: self._metadata.alive_epoch(id) is not None, self._clock.monotonic
        )

    async def close(self) -> None:
        """Stop following, drop waiting requests, write the last checkpoint. The supervisor has ended the tasks."""
        await self.fetchers.close()
        self.isr_writer.close()
        self.lifecycle.close()
        self.waits.close()
        await self._checkpoint.write()


def _cleaner_settings(config: BrokerConfig) -> CleanerSettings:
    return CleanerSettings(
        config.log_cleaner_backoff_ms,
        config.log_cleaner_dedupe_buffer_size,
        config.log_cleaner_io_max_bytes_per_second,
    )
