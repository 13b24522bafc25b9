"""ElectLeaders: served by the controller's broker, and answered when its metadata shows the new leaders."""

from collections.abc import Callable, Iterable, Mapping

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.handlers.administering.topics import LEAST_TIMEOUT_MS
from minibroker.broker.handlers.administration import ElectionResult
from minibroker.broker.handlers.services import MOST_WAIT_MS, Services, answer_later, bound_messages
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.purgatory import DelayedOperation
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    ElectLeadersPartitionResult,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ElectLeadersTopicResult,
)
from minibroker.protocol.model import NO_EPOCH, ElectionType, TopicPartition


class DelayedElectLeader(DelayedOperation):
    """Completes when this broker's metadata shows every elected leader (Kafka's DelayedElectLeader). A leader that is
    not shown at the deadline is elected nevertheless, and reported as REQUEST_TIMED_OUT."""

    def __init__(
        self,
        timeout_ms: int,
        outcomes: Mapping[TopicPartition, ElectionResult],
        metadata: MetadataCache,
        respond: Callable[[Iterable[TopicPartition]], None],
    ) -> None:
        super().__init__(timeout_ms)
        self._epochs = {p: o.leader_epoch for p, o in outcomes.items() if o.leader_epoch != NO_EPOCH}
        self._metadata = metadata
        self._respond = respond

    def _not_shown(self) -> list[TopicPartition]:
        states = {partition: self._metadata.partition(partition) for partition in self._epochs}
        return [p for p, epoch in self._epochs.items() if (state := states[p]) is None or state.leader_epoch < epoch]

    def try_complete(self) -> bool:
        return False if self._not_shown() else self.force_complete()

    def on_complete(self) -> None:
        self._respond(self._not_shown())


async def handle_elect_leaders(services: Services, request: Request, body: ElectLeadersRequest) -> None:
    """Raise BrokerError: INVALID_REQUEST for an unknown type of election; NOT_CONTROLLER on any other broker."""
    try:
        election_type = ElectionType(body.election_type)
    except ValueError:
        raise BrokerError(
            ErrorCode.INVALID_REQUEST, f"there is no election of type {body.election_type}: 0 is preferred, 1 unclean"
        ) from None
    answer_later(
        services,
        request,
        max(body.timeout_ms, LEAST_TIMEOUT_MS),
        lambda: _elect(services, request, body, election_type),
    )


async def _elect(services: Services, request: Request, body: ElectLeadersRequest, election_type: ElectionType) -> None:
    partitions = None
    if body.topic_partitions is not None:
        named = (TopicPartition(t.topic, number) for t in body.topic_partitions for number in t.partitions)
        partitions = list(dict.fromkeys(named))
    outcomes = await services.administration.elect_leaders(
        election_type, partitions, controller_epoch=body.controller_epoch, is_wanted=lambda: not request.closed
    )

    def respond(late: Iterable[TopicPartition]) -> None:
        request.respond(_response(outcomes, frozenset(late)))

    if not any(outcome.leader_epoch != NO_EPOCH for outcome in outcomes.values()):
        respond(())
        return
    timeout_ms = min(max(body.timeout_ms, 0), MOST_WAIT_MS)
    operation = DelayedElectLeader(timeout_ms, outcomes, services.metadata, respond)
    services.topic_purgatory.try_complete_else_watch(operation, list({partition.topic for partition in outcomes}))


def _response(
    outcomes: Mapping[TopicPartition, ElectionResult], late: frozenset[TopicPartition]
) -> ElectLeadersResponse:
    topics: dict[str, ElectLeadersTopicResult] = {}
    for partition, outcome in outcomes.items():
        error, message = outcome.error, outcome.message
        if partition in late:
            error, message = ErrorCode.REQUEST_TIMED_OUT, f"{partition} has a new leader, not known to all brokers yet"
        result = topics.setdefault(partition.topic, ElectLeadersTopicResult(partition.topic, []))
        result.partition_result.append(ElectLeadersPartitionResult(partition.partition, error, message))
    bound_messages(result for topic in topics.values() for result in topic.partition_result)
    return ElectLeadersResponse(0, ErrorCode.NONE, list(topics.values()))
