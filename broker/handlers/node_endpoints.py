"""The endpoints of the leaders that an answer to Produce or Fetch names with its errors (KIP-951)."""

from collections.abc import Iterable

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import FetchPartitionResponse, MetadataBroker, ProducePartitionResponse


def node_endpoints(
    services: Services, request: Request, partitions: Iterable[ProducePartitionResponse | FetchPartitionResponse]
) -> list[MetadataBroker]:
    """Return each live leader once, with its endpoint of the request's listener."""
    leaders = {
        partition.current_leader_id
        for partition in partitions
        if partition.error_code in (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
    }
    found = (services.metadata.node(leader, request.listener) for leader in sorted(leaders))
    return [node for node in found if node is not None]
