"""The requests of transactions that the leaders of partitions answer. The coordinators' side is in
`coordinated_transactions`."""

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from minibroker.broker.handlers.services import Services, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.delayed import ProduceStatus
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.messages.transactions import (
    TransactionMarker,
    TransactionPartitionResult,
    TransactionTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
    WrittenTransactionMarker,
)
from minibroker.protocol.model import TopicPartition

MOST_AT_ONCE = 100
"""Partitions of a topic in which a marker is written without a pause."""
MARKER_TIMEOUT_MS = 20_000
"""The limit of the wait for replicas: less than the coordinator waits for the answer."""


async def handle_write_txn_markers(services: Services, request: Request, body: WriteTxnMarkersRequest) -> None:
    """End transactions in partitions that this broker leads. Answer once every marker is replicated or has an error,
    in the order of the request."""
    for marker in body.markers:
        check_named_once("a partition", [(topic.name, index) for topic in marker.topics for index in topic.partitions])
    parts = [(number, part) for number, marker in enumerate(body.markers) for part in _parts(marker)]
    results: list[TransactionTopicResult] = [TransactionTopicResult(part.topics[0].name, []) for _, part in parts]
    unsettled = len(parts)

    def settle(result: TransactionTopicResult, statuses: dict[TopicPartition, ProduceStatus]) -> None:
        nonlocal unsettled
        result.results_by_partition = [
            TransactionPartitionResult(index, status.response.error_code) for (_, index), status in statuses.items()
        ]
        unsettled -= 1
        if not unsettled:
            respond()

    def respond() -> None:
        topics: list[dict[str, TransactionTopicResult]] = [{} for _ in body.markers]
        for (number, _), result in zip(parts, results, strict=True):
            known = topics[number].setdefault(result.name, result)
            if known is not result:
                known.results_by_partition += result.results_by_partition
        of_markers = zip(body.markers, topics, strict=True)
        written = [WrittenTransactionMarker(marker.producer_id, [*found.values()]) for marker, found in of_markers]
        request.respond(WriteTxnMarkersResponse(written))

    if not parts:
        respond()
    slices = Slices()
    for (_, part), result in zip(parts, results, strict=True):
        services.replicas.appender.write_markers(
            part,
            by_administrator=not services.authorizer.may_be_broker(request),
            timeout_ms=MARKER_TIMEOUT_MS,
            respond=partial(settle, result),
        )
        await slices.breathe()


def _parts(marker: TransactionMarker) -> Iterator[TransactionMarker]:
    """Divide a marker for many partitions. Its partitions are independent of each other."""
    for topic in marker.topics:
        for start in range(0, len(topic.partitions), MOST_AT_ONCE):
            yield replace(marker, topics=[replace(topic, partitions=topic.partitions[start : start + MOST_AT_ONCE])])
