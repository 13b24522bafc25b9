"""The fetchers of this broker: one for each leader that it follows, made when it is needed, closed when it is idle
(Kafka's ReplicaFetcherManager).
"""

from collections.abc import Callable

from minibroker.broker.replication.following.fetcher import FetcherSettings, ReplicaFetcher
from minibroker.broker.replication.following.silences import Silences
from minibroker.broker.replication.partition import Partition
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World


class ReplicaFetcherManager:
    """Each partition is with one fetcher at most, that of the leader that it was last told to follow."""

    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        supervisor: Supervisor,
        broker_epoch: Callable[[], int],
        connections: BrokerConnections,
        set_aside: Callable[[Partition, str], None],
    ) -> None:
        """`set_aside`: as for `ReplicaFetcher`."""
        self._world = world
        self._supervisor = supervisor
        self._broker_epoch = broker_epoch
        self._connections = connections
        self._set_aside = set_aside
        self.on_leader_found: Callable[[], None] = lambda: None
        """Called when one of `lost_leaders` is back, as far as this broker sees."""
        self.silences = Silences(world.clock)
        self._fetchers: dict[int, ReplicaFetcher] = {}
        """The fetchers by the ids of their leaders."""
        self._lost: dict[int, float] = {}
        """Until when leaders count as lost that are followed no longer. LeaderAndIsr names the successor of a dead
        leader before UpdateMetadata does, and a client that asks in between must not be told of the dead one."""
        self._settings = FetcherSettings(
            broker_id=config.broker_id,
            wait_max_ms=config.replica_fetch_wait_max_ms,
            lag_time_max_ms=config.replica_lag_time_max_ms,
            min_bytes=config.replica_fetch_min_bytes,
            response_max_bytes=config.replica_fetch_response_max_bytes,
            partition_max_bytes=config.replica_fetch_max_bytes,
            backoff_s=config.replica_fetch_backoff_ms / 1_000,
            socket_timeout_s=config.replica_socket_timeout_ms / 1_000,
        )

    def follows(self, topic_partition: TopicPartition, leader_id: int, address: tuple[str, int]) -> bool:
        fetcher = self._fetchers.get(leader_id)
        return fetcher is not None and fetcher.address == address and fetcher.follows(topic_partition)

    def follow(self, partition: Partition, leader_id: int, address: tuple[str, int]) -> None:
        """From now on, and in the partition's present epoch. A leader at a new address is followed there with all its
        partitions."""
        fetcher = self._fetchers.get(leader_id)
        moved: list[Partition] = []
        if fetcher is not None and fetcher.address != address:
            moved = fetcher.partitions
            self._retire(self._fetchers.pop(leader_id))
            fetcher = None
        self.stop_following(partition.topic_partition, but=leader_id)
        if fetcher is None:
            if self._lost.pop(leader_id, None) is not None:
                self.on_leader_found()
            host, port = address
            fetcher = self._fetchers[leader_id] = ReplicaFetcher(
                self._world,
                self._connections,
                leader_id,
                host,
                port,
                self._settings,
                self.silences,
                self._broker_epoch,
                self._set_aside,
                lambda: self.on_leader_found(),
            )
            self._supervisor.watch(fetcher.task)
            for other in moved:
                fetcher.add(other)
        fetcher.add(partition)

    def stop_following(self, topic_partition: TopicPartition, *, but: int | None = None) -> None:
        """Stop following the partition, whichever broker leads it, except from the leader `but`."""
        for leader_id, fetcher in self._fetchers.items():
            if leader_id != but:
                fetcher.remove(topic_partition)

    def lost_leaders(self) -> set[int]:
        """See `ReplicaFetcher.lost_until_s`."""
        now_s = self._world.clock.monotonic()
        self._lost = {leader_id: until_s for leader_id, until_s in self._lost.items() if now_s < until_s}
        followed = {leader_id for leader_id, fetcher in self._fetchers.items() if now_s < fetcher.lost_until_s}
        return followed | self._lost.keys()

    def max_lag(self) -> int:
        """Return the most committed records that a partition followed here lacks."""
        return max((fetcher.max_lag for fetcher in self._fetchers.values()), default=0)

    def wake(self, leader_id: int) -> None:
        """Let the fetcher of that leader look again, since one of its partitions may have become due."""
        fetcher = self._fetchers.get(leader_id)
        if fetcher is not None:
            fetcher.wake()

    def wake_all(self) -> None:
        """Let all fetchers look again, since their rates may have changed."""
        for fetcher in self._fetchers.values():
            fetcher.wake()

    def close_idle(self) -> None:
        """Close fetchers without partitions."""
        for leader_id in [leader_id for leader_id, fetcher in self._fetchers.items() if fetcher.idle]:
            self._retire(self._fetchers.pop(leader_id))

    def _retire(self, fetcher: ReplicaFetcher) -> None:
        if self._world.clock.monotonic() < fetcher.lost_until_s:
            self._lost[fetcher.leader_id] = fetcher.lost_until_s
        self._supervisor.start(fetcher.close(), f"end of the fetcher of broker {fetcher.leader_id}")

    async def close(self) -> None:
        for fetcher in self._fetchers.values():
            await fetcher.close()
        self._fetchers.clear()
