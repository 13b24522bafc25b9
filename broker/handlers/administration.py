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


class ElectionResult(Protocol):
    @property
    def error(self) -> ErrorCode: ...
    @property
    def message(self) -> str: ...
    @property
    def leader_epoch(self) -> int:
        """The epoch of the elected leader, or of the present one if no election was needed."""
        ...


class Administration(Protocol):
    """The controller of this broker. The async methods raise BrokerError(NOT_CONTROLLER) if another broker's controller
    is in office."""

    @property
    def is_active(self) -> bool: ...

    def recorded_after(self, number: int, since_ms: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """Return the number of the timeline's last entry, and the entries after `number` that are not older than
        `since_ms`. Works in office or not."""

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
    ) -> Mapping[TopicPartition, ElectionResult]: ...

    async def alter_partition_reassignments(
        self, topics: Sequence[ReassignableTopic]
    ) -> list[ReassignableTopicResponse]: ...

    async def list_partition_reassignments(
        self, topics: Sequence[ListPartitionReassignmentsTopic] | None
    ) -> list[OngoingTopicReassignment]: ...

    async def controlled_shutdown(self, broker_id: int, broker_epoch: int) -> list[TopicPartition]: ...
