"""Electing leaders on request: ElectLeaders at the controller."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import PartitionErrors
from minibroker.client.settings import check_choice, check_partitions
from minibroker.protocol import messages as m
from minibroker.protocol.apis import ELECT_LEADERS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, error_of
from minibroker.protocol.model import ElectionType, TopicPartition

_ALL = "the elections"
"""The one name under which all elections of a call are requested."""


async def elect(
    requests: AdminRequests, election_type: str, partitions: Iterable[TopicPartition] | None
) -> dict[TopicPartition, bool]:
    """See `Admin.elect_leaders`."""
    check_choice("election_type", election_type, [name.lower() for name in ElectionType.__members__])
    asked = None if partitions is None else check_partitions("partitions", partitions)
    if asked is not None and not asked:
        return {}
    elections = LeaderElections(ElectionType[election_type.upper()], asked)
    for error in (await requests.at_controller(elections)).values():
        raise error
    return elections.outcome()


class LeaderElections:
    """The elections of one call. Each attempt names one controller epoch, so that no later controller carries out a
    request that arrives late."""

    api = ELECT_LEADERS
    final: Collection[ErrorCode] = ()
    is_prepared = False
    may_yet = "Leaders may yet be elected; to ask for it again does no harm"

    def __init__(self, election_type: ElectionType, partitions: Iterable[TopicPartition] | None) -> None:
        self._election_type = election_type
        self._topics: dict[str, list[int]] | None = None if partitions is None else {}
        for partition in partitions or ():
            assert self._topics is not None
            self._topics.setdefault(partition.topic, []).append(partition.partition)
        self._answered: dict[TopicPartition, m.ElectLeadersPartitionResult] = {}

    def names(self) -> list[str]:
        return [_ALL]

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.ElectLeadersRequest:
        topics = self._topics
        return m.ElectLeadersRequest(
            self._election_type,
            None if topics is None else [m.ElectLeadersTopic(name, numbers) for name, numbers in topics.items()],
            timeout_ms,
            controller_epoch,
        )

    def results(self, response: m.ElectLeadersResponse) -> dict[str, tuple[int, str]]:
        self._answered = {
            TopicPartition(topic.topic, result.partition_id): result
            for topic in response.replica_election_results
            for result in topic.partition_result
        }
        return {_ALL: (response.error_code, "")}

    def outcome(self) -> dict[TopicPartition, bool]:
        """Return or raise the results of the answer. See `Admin.elect_leaders`."""
        elected: dict[TopicPartition, bool] = {}
        errors: dict[TopicPartition, MinibrokerError] = {}
        for partition, result in sorted(self._answered.items()):
            if result.error_code in (ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED):
                elected[partition] = result.error_code == ErrorCode.NONE
            else:
                errors[partition] = BrokerError(error_of(result.error_code), result.error_message)
        for topic, numbers in (self._topics or {}).items():
            for partition in (TopicPartition(topic, number) for number in numbers):
                if partition not in self._answered:
                    errors[partition] = BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer leaves it out")
        if errors:
            raise PartitionErrors(errors, elected)
        return elected
