"""The controller of this broker, as far as handlers know it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatableTopic,
    CreatableTopicResult,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    DeletableTopicResult,
    ListPartitionReassignmentsTopic,
    OngoingTopicReassignment,
    ReassignableTopic,
    ReassignableTopicResponse,
)
from minibroker.protocol.model import ElectionType, TopicPartition


class ElectionOutcome(Protocol):
    @property
    def error(self) -> ErrorCode: ...
    @property
    def message(self) -> str: ...
    @property
    def leader_epoch(self) -> int:
        """Of the leader who was elected, or needs not be."""
        ...


class Administration(Protocol):
    """The controller of this broker, as far as handlers know it. What is async raises BrokerError(NOT_CONTROLLER) where
    another broker's controller is in office."""

    @property
    def is_active(self) -> bool: ...

    def recorded_after(self, number: int, since_ms: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """The number of the last entry of the timeline, and the entries with a higher number than the given one that
        are not older than that time. In office or not."""

    async def create_topics(
        self, topics: Sequence[CreatableTopic], *, validate_only: bool, controller_epoch: int
    ) -> list[CreatableTopicResult]: ...

    async def create_partitions(
        self, topics: Sequence[CreatePartitionsTopic], *, validate_only: bool
    ) -> list[CreatePartitionsTopicResult]: ...

    async def delete_topics(self, topics: Mapping[str, str]) -> list[DeletableTopicResult]: ...

    async def until_deleted(self, topics: Mapping[str, str]) -> dict[str, str]: ...

    def deletions_left(self, topics: Mapping[str, str]) -> dict[str, str]: ...

    async def elect_leaders(
        self,
        election_type: ElectionType,
        partitions: Sequence[TopicPartition] | None,
        *,
        controller_epoch: int,
        is_wanted: Callable[[], bool],
    ) -> Mapping[TopicPartition, ElectionOutcome]: ...

    async def alter_partition_reassignments(
        self, topics: Sequence[ReassignableTopic]
    ) -> list[ReassignableTopicResponse]: ...

    async def list_partition_reassignments(
        self, topics: Sequence[ListPartitionReassignmentsTopic] | None
    ) -> list[OngoingTopicReassignment]: ...

    async def controlled_shutdown(self, broker_id: int, broker_epoch: int) -> list[TopicPartition]: ...
