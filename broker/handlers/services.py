"""What handlers work with. The composition root fills it in."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from broker.metadata_cache import MetadataCache
from broker.purgatory.purgatory import DelayedOperation, Purgatory
from broker.replication.manager import ReplicaManager
from broker.transactions.producer_ids import ProducerIds
from protocol.messages import CreatableTopic, CreatableTopicResult, DeletableTopicResult


class Administration(Protocol):
    """The controller of this broker, as far as handlers know it. Every method raises BrokerError(NOT_CONTROLLER) where
    another broker's controller is in office."""

    async def create_topics(
        self, topics: Sequence[CreatableTopic], *, validate_only: bool
    ) -> list[CreatableTopicResult]: ...

    async def delete_topics(self, names: Sequence[str]) -> list[DeletableTopicResult]: ...


class ControlEpoch(msgspec.Struct):
    """The highest controller epoch that this broker took an order from."""

    highest: int = -1


class Services(msgspec.Struct):
    metadata: MetadataCache
    replicas: ReplicaManager
    producer_ids: ProducerIds
    administration: Administration
    topic_purgatory: Purgatory[DelayedOperation]
    control_epoch: ControlEpoch
    registered_epoch: Callable[[int], Awaitable[int]]
    """This broker's epoch, once it is known to be at least the given one."""
