"""AlterPartitionReassignments and ListPartitionReassignments (KIP-455): served by the controller's broker."""

from minibroker.broker.handlers.administering.topics import LEAST_TIMEOUT_MS
from minibroker.broker.handlers.services import Services, answer_later, bound_messages
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)


async def handle_alter_partition_reassignments(
    services: Services, request: Request, body: AlterPartitionReassignmentsRequest
) -> None:
    """Answer once the reassignments are recorded and have begun; they continue on their own. Raises
    BrokerError(NOT_CONTROLLER) on any other broker."""

    async def answer() -> None:
        results = await services.administration.alter_partition_reassignments(body.topics)
        bound_messages(result for topic in results for result in topic.partitions)
        request.respond(AlterPartitionReassignmentsResponse(0, ErrorCode.NONE, "", results))

    answer_later(services, request, max(body.timeout_ms, LEAST_TIMEOUT_MS), answer)


async def handle_list_partition_reassignments(
    services: Services, request: Request, body: ListPartitionReassignmentsRequest
) -> None:
    """Raise BrokerError(NOT_CONTROLLER) on any other broker."""

    async def answer() -> None:
        found = await services.administration.list_partition_reassignments(body.topics)
        request.respond(ListPartitionReassignmentsResponse(0, ErrorCode.NONE, "", found))

    answer_later(services, request, max(body.timeout_ms, LEAST_TIMEOUT_MS), answer)
