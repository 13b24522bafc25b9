"""Reassigning partitions: AlterPartitionReassignments and ListPartitionReassignments at the controller (KIP-455)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import InvalidSetting, PartitionErrors
from minibroker.client.settings import check_partitions
from minibroker.protocol import messages as m
from minibroker.protocol.apis import ALTER_PARTITION_REASSIGNMENTS, LIST_PARTITION_REASSIGNMENTS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition


class PartitionReassignment(NamedTuple):
    """A reassignment in progress."""

    replicas: tuple[int, ...]
    """All replicas: the target's, and those that will be removed."""
    adding_replicas: tuple[int, ...]
    removing_replicas: tuple[int, ...]


async def alter(requests: AdminRequests, reassignments: Mapping[TopicPartition, Sequence[int] | None]) -> None:
    """See `Admin.alter_partition_reassignments`."""
    alteration = Alteration(reassignments)
    errors = await requests.at_controller(alteration)
    if errors:
        raise PartitionErrors({alteration.partitions[name]: error for name, error in errors.items()})


async def in_progress(
    requests: AdminRequests, partitions: Iterable[TopicPartition] | None
) -> dict[TopicPartition, PartitionReassignment]:
    """See `Admin.list_partition_reassignments`."""
    listing = Listing(partitions)
    for error in (await requests.at_controller(listing)).values():
        raise error
    return listing.found


class Alteration:
    """The target replicas of each partition; None: a cancellation. It is no error to repeat a reassignment that is in
    progress or done, nor to cancel one that an earlier attempt may have cancelled.

    The first request has a version that no topic has, and is rejected with the current ones. All later requests carry
    these, so a request that arrives late changes nothing if another attempt or another client has changed the topic
    before.
    """

    api = ALTER_PARTITION_REASSIGNMENTS
    final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
    may_yet = "It may yet be reassigned: see `minibroker reassign verify` before you try again"

    def __init__(self, reassignments: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        self.partitions = {str(partition): partition for partition in check_partitions("reassignments", reassignments)}
        self._targets = {
            name: None if target is None else _broker_ids(name, target)
            for name, target in zip(self.partitions, reassignments.values(), strict=True)
        }
        self._known: dict[str, tuple[str, int]] = {}
        """Id and version of the topics that were looked up."""
        self.is_prepared = False
        self._unanswered = 0
        """Requests that may have been carried out."""

    def names(self) -> list[str]:
        return list(self.partitions)

    def request(
        self, names: Sequence[str], timeout_ms: int, controller_epoch: int
    ) -> m.AlterPartitionReassignmentsRequest:
        self._unanswered += 1
        topics: dict[str, list[m.ReassignablePartition]] = {}
        for name in names:
            topic, number = self.partitions[name]
            topics.setdefault(topic, []).append(m.ReassignablePartition(number, self._targets[name]))
        return m.AlterPartitionReassignmentsRequest(
            timeout_ms,
            [
                m.ReassignableTopic(topic, partitions, *self._known.get(topic, ("", m.NO_VERSION)))
                for topic, partitions in topics.items()
            ],
        )

    def results(self, response: m.AlterPartitionReassignmentsResponse) -> dict[str, tuple[int, str]]:
        self._unanswered -= 1
        results: dict[str, tuple[int, str]] = {}
        for topic in response.responses:
            for one in topic.partitions:
                code = one.error_code
                if code == ErrorCode.INVALID_UPDATE_VERSION:
                    self._known[topic.name] = topic.topic_id, topic.version
                    self.is_prepared = True
                if code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS and self._unanswered:
                    code = ErrorCode.NONE
                results[str(TopicPartition(topic.name, one.partition_index))] = code, one.error_message
        return results


def may_have_begun(error: MinibrokerError) -> bool:
    """Return whether the reassignment that failed with this error may have begun, or may still begin."""
    return not isinstance(error, BrokerError) or (error.retriable and error.code not in Alteration.final)


def _broker_ids(partition: str, target: Sequence[int]) -> list[int]:
    # A set has no order, and the first replica is the preferred leader.
    in_order = isinstance(target, Sequence)
    if not in_order or not all(type(broker_id) is int and abs(broker_id) < 2**31 for broker_id in target):
        raise InvalidSetting(f"replicas of {partition}", target, "give a list of broker ids, or None to cancel")
    return list(target)


_ALL = "the reassignments"


class Listing:
    """The reassignments in progress, in `found`."""

    api = LIST_PARTITION_REASSIGNMENTS
    final = ()
    is_prepared = False
    may_yet = ""

    def __init__(self, partitions: Iterable[TopicPartition] | None) -> None:
        self._topics: dict[str, list[int]] | None = None
        if partitions is not None:
            self._topics = {}
            for topic, number in check_partitions("partitions", partitions):
                self._topics.setdefault(topic, []).append(number)
        self.found: dict[TopicPartition, PartitionReassignment] = {}

    def names(self) -> list[str]:
        return [_ALL]

    def request(
        self, names: Sequence[str], timeout_ms: int, controller_epoch: int
    ) -> m.ListPartitionReassignmentsRequest:
        topics = None
        if self._topics is not None:
            topics = [m.ListPartitionReassignmentsTopic(topic, numbers) for topic, numbers in self._topics.items()]
        return m.ListPartitionReassignmentsRequest(timeout_ms, topics)

    def results(self, response: m.ListPartitionReassignmentsResponse) -> dict[str, tuple[int, str]]:
        self.found = {
            TopicPartition(topic.name, one.partition_index): PartitionReassignment(
                tuple(one.replicas), tuple(one.adding_replicas), tuple(one.removing_replicas)
            )
            for topic in response.topics
            for one in topic.partitions
        }
        return {_ALL: (response.error_code, response.error_message)}
