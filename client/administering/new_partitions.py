"""Adding partitions to a topic: CreatePartitions at the controller, until it is done."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minibroker.protocol import messages as m
from minibroker.protocol.apis import CREATE_PARTITIONS
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.topic_ids import NO_TOPIC


class Growth:
    """One topic's, as a change that `Admin` asks the controller for.

    The first request has an id that no topic has, and is refused with the current id and number of partitions. With
    these in every request from then on, no topic that is created meanwhile gets partitions; and where a repetition
    finds as many partitions as were asked for, an attempt before has made them. (Partitions never go away, so somebody
    else can at most have asked for the very same at the same time.)
    """

    api = CREATE_PARTITIONS
    may_yet = "They may yet be added: see `minibroker topics describe` before you try again"

    def __init__(self, topic: str, count: int, assignments: Sequence[Sequence[int]] | None) -> None:
        given = None if assignments is None else [m.CreatePartitionsAssignment(list(ids)) for ids in assignments]
        self._request = m.CreatePartitionsTopic(topic, count, given, NO_TOPIC)
        self._is_another = False
        self.is_prepared = False

    @property
    def final(self) -> Collection[ErrorCode]:
        """If time runs out the partitions are there, but not all of them have leaders: the user must hear of that."""
        final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.REQUEST_TIMED_OUT)
        return (*final, ErrorCode.UNKNOWN_TOPIC_ID) if self._is_another else final

    def names(self) -> list[str]:
        return [self._request.name]

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.CreatePartitionsRequest:
        return m.CreatePartitionsRequest([self._request], timeout_ms)

    def results(self, response: m.CreatePartitionsResponse) -> dict[str, tuple[int, str]]:
        for result in response.results:
            if result.error_code == ErrorCode.UNKNOWN_TOPIC_ID:
                if self._request.topic_id == NO_TOPIC:
                    self._request.topic_id, self._request.known_count = result.topic_id, result.num_partitions
                    self.is_prepared = True
                else:
                    self._is_another = True
        return {result.name: (result.error_code, result.error_message) for result in response.results}
