"""The transaction coordinator of a broker, composed of its parts for handlers and metrics."""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.cluster.peers import Peers
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.transactions.coordinator import TransactionCoordinator
from minibroker.broker.transactions.listing import list_transactions
from minibroker.broker.transactions.markers import MarkerSender
from minibroker.broker.transactions.producer_ids import ProducerIds
from minibroker.broker.transactions.terms import TransactionTerms
from minibroker.broker.transactions.upkeep import TransactionUpkeep
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.messages.transactions import ListTransactionsRequest, ListTransactionsResponse
from minibroker.protocol.world import World, ZooKeeperSession

LATE_AFTER_MS = 5 * 60_000
"""Time beyond `transaction.max.timeout.ms` after which an open transaction without new records is late, as in Kafka."""


class TransactionCoordination:
    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        connections: BrokerConnections,
        producer_ids: ProducerIds,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        """Create this before the first control request, because control requests announce the partitions that the
        broker leads."""
        self.terms = TransactionTerms(world.clock, config, metadata, replicas, start_task)
        self._peers = Peers(config.broker_id, metadata, connections, "transaction-markers")
        self.markers = MarkerSender(metadata, self._peers, sessions, start_task)
        self.coordinator = TransactionCoordinator(
            world.clock, config, self.terms, producer_ids, self.markers, start_task
        )
        self.upkeep = TransactionUpkeep(world.clock, config, self.terms, self.coordinator)
        replicas.listeners.add(self.terms)
        self._start_task = start_task
        self._clock = world.clock
        self._late_after_ms = config.transaction_max_timeout_ms + LATE_AFTER_MS

    def list(self, body: ListTransactionsRequest) -> Generator[None, None, ListTransactionsResponse]:
        return list_transactions(self.terms, body, self._clock.wall_ms())

    def late_since_ms(self) -> int:
        """Return the wall time since which the producer of a late transaction has written nothing."""
        return self._clock.wall_ms() - self._late_after_ms

    def start(self) -> None:
        self._start_task(self.upkeep.abort_late_transactions(), "time-outs of transactions")
        self._start_task(self.upkeep.forget_unused_ids(), "expiration of transactional ids")

    def close(self) -> None:
        self._peers.close()
        self.terms.close()
