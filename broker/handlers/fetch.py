"""Fetch: for consumers up to the high watermark, for followers up to the end."""

from broker.handlers.services import Services
from broker.network.request_channel import Request
from broker.replication.manager import FetchAnswer
from protocol.errors import BrokerError, ErrorCode
from protocol.messages import FetchPartitionResponse, FetchRequest, FetchResponse, FetchTopicResponse


async def handle_fetch(services: Services, request: Request) -> None:
    body = request.body
    assert isinstance(body, FetchRequest)
    wanted = [(topic.topic, fetch.partition) for topic in body.topics for fetch in topic.partitions]
    if len(set(wanted)) != len(wanted):
        raise BrokerError(ErrorCode.INVALID_REQUEST, "a partition stands in the request twice")
    if body.replica_id < -1:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"replica_id is {body.replica_id}; -1 is a consumer's")

    def respond(answer: FetchAnswer) -> None:
        topics: dict[str, list[FetchPartitionResponse]] = {}
        for topic_partition, response in answer:
            topics.setdefault(topic_partition.topic, []).append(response)
        responses = [FetchTopicResponse(name, partitions) for name, partitions in topics.items()]
        request.respond(FetchResponse(0, ErrorCode.NONE, responses))

    services.replicas.fetch(body, respond)
