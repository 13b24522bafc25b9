"""The group coordinator of a broker, composed of its parts for handlers and metrics."""

from collections.abc import Callable, Coroutine
from typing import Any

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.groups.commits import OffsetCommits
from minibroker.broker.groups.coordinator import GroupCoordinator
from minibroker.broker.groups.removal import GroupRemoval
from minibroker.broker.groups.terms import GroupTerms
from minibroker.broker.groups.transactional_commits import TransactionalCommits, Verify
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.world import World


class GroupCoordination:
    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
        verify: Verify,
    ) -> None:
        """Create this before the first control request, because control requests announce the partitions that the
        broker leads."""
        self.terms = GroupTerms(world.clock, config, metadata, replicas, start_task)
        self.members = GroupCoordinator(world.clock, world.random, config, metadata, self.terms)
        self.commits = OffsetCommits(world.clock, config, metadata, self.terms, self.members)
        self.transactional_commits = TransactionalCommits(world.clock, self.terms, self.commits, verify)
        self.removal = GroupRemoval(config, metadata, self.terms, start_task)
        replicas.listeners.add(self.terms)
        replicas.appender.marker_listeners.append(self.terms)
        self._start_task = start_task

    def start(self) -> None:
        self._start_task(self.removal.run(), "retention of committed offsets")

    def close(self) -> None:
        self.members.close()
        self.terms.close()
