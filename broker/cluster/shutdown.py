"""A broker that is to stop hands over what it leads first (Kafka's KafkaServer.controlledShutdown).

The problem: when a leader just goes, every write to its partitions waits until the loss was noticed and another was
elected; and where a follower goes, until it is out of the ISR. The choice: before it stops, the broker asks the
controller to elect others and to take it out of the ISRs. It serves on meanwhile, and tells clients that come to it
where the new leaders are. When it stops then, nobody waits for it.

It stops in any case. The controller is asked `controlled.shutdown.max.retries` times, since it may be moving, or lack
another replica that is in sync: one whose broker is being restarted comes back. Where no other broker stays, as when a
whole cluster is stopped, or the partition has no other replica, there is nothing to wait for.
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
"""For all of it. A container has 30 s to stop, and files are still to be flushed then."""
ATTEMPT_S = 5.0
"""For one answer of the controller: in a second it moves thousands of partitions."""
SHOWN = 10
"""How many of the remaining partitions are named."""
_LOOK_EVERY_S = 0.05


class Elector(Protocol):
    """The controller of this broker, in office or not."""

    @property
    def is_active(self) -> bool: ...

    async def controlled_shutdown(self, broker_id: int, broker_epoch: int) -> list[TopicPartition]: ...


class HandedOver(NamedTuple):
    moved: int
    """How many partitions this broker led that others lead now."""
    remaining: tuple[TopicPartition, ...]
    """Those that it still leads, or that have too few replicas in sync without it."""
    problem: str = ""
    """Why the controller did not answer; empty: it did."""

    def as_json(self) -> str:
        """For whoever stops a broker, and reads what it prints."""
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
        """`controller_id`: as ZooKeeper said last."""
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
        """Returns when others lead, or when nothing more can be done about it; after `MOST_S` at the latest."""
        led = self._led()
        problem = ""
        remaining: Sequence[TopicPartition] = [p.topic_partition for p in self._replicas.partitions()]
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
                        logger.info("broker %d asks to be relieved in vain: %s", self._broker_id, problem)
                    elif not self._may_be_relieved_of(remaining):
                        break
        except TimeoutError:
            problem = problem or f"not done within {MOST_S:g} s"
        if problem:
            remaining = self._led()
        moved = len(set(led).difference(remaining))
        return HandedOver(moved, tuple(remaining), problem)

    def _led(self) -> list[TopicPartition]:
        return sorted(p.topic_partition for p in self._replicas.partitions() if p.is_leader)

    async def _ask(self) -> list[TopicPartition]:
        """What remains here. Raises BrokerError, NetworkError, InvalidMessage."""
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
        """Of any of them: there are other replicas, and a broker that stays and can elect one."""
        if not self._metadata.has_others_that_stay(self._broker_id):
            return False
        partitions = (self._replicas.partition(topic_partition) for topic_partition in remaining)
        return any(partition is not None and len(partition.assignment) > 1 for partition in partitions)
