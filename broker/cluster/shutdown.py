"""Controlled shutdown: a stopping broker first hands its leaderships over (Kafka's KafkaServer.controlledShutdown).

The problem: if a leader simply disappears, every write to its partitions waits until the loss is noticed and a new
leader is elected; if a follower disappears, until it is out of the ISR. The choice: before it stops, the broker asks
the controller to elect other leaders and to take it out of the ISRs. Meanwhile it keeps serving and redirects clients
to the new leaders. When it then stops, no client has to wait for it.

It stops in any case. It asks the controller `controlled.shutdown.max.retries` times, because the controller may be
moving, or may lack another replica in sync while a broker restarts. If every other broker is shutting down as well, or
a partition has no other replica, the broker does not wait.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.apis import CONTROLLED_SHUTDOWN
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.messages import ControlledShutdownRequest
from minibroker.protocol.model import TopicPartition

logger = logging.getLogger("minibroker.broker")

MOST_S = 15.0
"""The limit for the whole procedure. A container has 30 s to stop, and files must still be flushed afterwards."""
ATTEMPT_S = 5.0
"""The limit for one answer of the controller, which moves thousands of partitions per second."""
SHOWN = 10
"""The maximum number of remaining partitions that are named."""
_LOOK_EVERY_S = 0.05


class Elector(Protocol):
    """The controller of this broker, in office or not."""

    @property
    def is_active(self) -> bool: ...

    async def controlled_shutdown(self, broker_id: int, broker_epoch: int) -> list[TopicPartition]: ...


class HandedOver(NamedTuple):
    moved: int
    """The number of partitions whose leadership has moved to other brokers."""
    remaining: tuple[TopicPartition, ...]
    """Partitions that this broker still leads, or that have too few replicas in sync without it."""
    problem: str = ""
    """Why the controller did not answer, or empty."""

    def as_json(self) -> str:
        """Return the result for the program that stops the broker and reads its output."""
        shown = [str(partition) for partition in self.remaining[:SHOWN]]
        return msgspec.json.encode(
            {"moved": self.moved, "remaining": len(self.remaining), "among_them": shown, "problem": self.problem}
        ).decode()


class ControlledShutdown:
    def __init__(
        self,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        connections: BrokerConnections,
        elector: Elector,
        controller_id: Callable[[], int | None],
        broker_epoch: Callable[[], int],
    ) -> None:
        """`controller_id` returns the controller that ZooKeeper named last."""
        self._broker_id = config.broker_id
        self._attempts = config.controlled_shutdown_max_retries
        self._backoff_s = config.controlled_shutdown_retry_backoff_ms / 1_000
        self._metadata = metadata
        self._replicas = replicas
        self._connections = connections
        self._elector = elector
        self._controller_id = controller_id
        self._broker_epoch = broker_epoch

    async def run(self) -> HandedOver:
        """Hand over. Returns when other brokers lead, when nothing more can be done, or after `MOST_S`."""
        led = self._led()
        problem = ""
        remaining: Sequence[TopicPartition] = [p.topic_partition for p in self._replicas.partitions.values()]
        try:
            async with asyncio.timeout(MOST_S):
                for attempt in range(self._attempts):
                    if attempt:
                        await self._back_off(remaining)
                    problem = f"no answer within {ATTEMPT_S:g} s"
                    try:
                        async with asyncio.timeout(ATTEMPT_S):
                            remaining = await self._ask()
                        problem = ""
                    except TimeoutError:
                        pass
                    except (BrokerError, NetworkError, InvalidMessage) as error:
                        problem = str(error)
                    if problem:
                        logger.info("broker %d could not hand over its leaders: %s", self._broker_id, problem)
                    elif not self._may_be_relieved_of(remaining):
                        break
        except TimeoutError:
            problem = problem or f"not done within {MOST_S:g} s"
        if problem:
            remaining = self._led()
        moved = len(set(led).difference(remaining))
        return HandedOver(moved, tuple(remaining), problem)

    def _led(self) -> list[TopicPartition]:
        return sorted(p.topic_partition for p in self._replicas.partitions.values() if p.is_leader)

    async def _ask(self) -> list[TopicPartition]:
        """Ask the controller and return the partitions that remain here. Raises BrokerError, NetworkError,
        InvalidMessage."""
        epoch = self._broker_epoch()
        if self._elector.is_active:
            return await self._elector.controlled_shutdown(self._broker_id, epoch)
        controller_id = self._controller_id()
        endpoint = None if controller_id is None else self._metadata.control_endpoint(controller_id)
        if controller_id is None or endpoint is None:
            raise BrokerError(ErrorCode.NOT_CONTROLLER, "no live broker is known as the controller")
        connection = await self._connections.open(
            controller_id,
            endpoint.host,
            endpoint.port,
            client_id=f"broker-{self._broker_id}-shutdown",
            connect_timeout_s=ATTEMPT_S,
            request_timeout_s=ATTEMPT_S,
            listener=endpoint.listener,
        )
        try:
            request = ControlledShutdownRequest(self._broker_id, epoch)
            answer = await connection.request(CONTROLLED_SHUTDOWN, request, timeout_s=ATTEMPT_S)
        finally:
            connection.close("the controller was asked")
        if answer.error_code:
            raise BrokerError(error_of(answer.error_code), f"broker {controller_id}, the controller, refused")
        return [TopicPartition(p.topic_name, p.partition_index) for p in answer.remaining_partitions]

    async def _back_off(self, remaining: Sequence[TopicPartition]) -> None:
        left_s = self._backoff_s
        while left_s > 0 and self._may_be_relieved_of(remaining):
            await asyncio.sleep(min(_LOOK_EVERY_S, left_s))
            left_s -= _LOOK_EVERY_S

    def _may_be_relieved_of(self, remaining: Sequence[TopicPartition]) -> bool:
        """Return whether any of them could still move: it has other replicas, and a broker stays that can elect one."""
        if not self._metadata.has_others_that_stay(self._broker_id):
            return False
        partitions = (self._replicas.partitions.get(topic_partition) for topic_partition in remaining)
        return any(partition is not None and len(partition.assignment) > 1 for partition in partitions)
