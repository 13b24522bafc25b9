"""Fetch: for consumers up to the high watermark or the last stable offset, for followers up to the log end.

Compaction leaves batches without records: for producers' state, at the end of a segment, at the beginning of a leader
epoch. Followers need all of them. Consumers need none, and some fail on an answer with nothing else: kafka-go requests
the same offset forever, kafkajs reads nothing, and librdkafka concludes from the eleventh that its fetch size is too
small. An answer to a consumer therefore skips such batches at its beginning. A run of them may be long, so it is read
in slices, between which other tasks run. If no records follow below the consumer's end, the answer has the last of
these batches alone, so that a consumer that skips it reaches the end. (Control batches count as records: clients know
them.) Kafka sends the batches as they are.
"""

from collections.abc import Callable, Generator
from itertools import chain

from minibroker.broker.handlers.node_endpoints import node_endpoints
from minibroker.broker.handlers.services import Services, answer_later, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.delayed import DelayedFetch
from minibroker.broker.replication.isolation import CONSUMER, FetchIsolation
from minibroker.broker.replication.reading import FetchAnswer, read_past_emptied
from minibroker.broker.replication.transcoding import has_columns
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.fetch_slots import NO_SLOT
from minibroker.protocol.messages import (
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    FetchTopicResponse,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import HEADER_SIZE
from minibroker.protocol.records.compression import Compression

MOST_READ_WITHOUT_PAUSE = 1_000
"""Partitions of a request that are looked up without a pause."""
MOST_AT_ONCE_BYTES = 4 * 1024 * 1024
"""The maximum bytes of records in one answer, regardless of the request and `fetch.max.bytes`. They are read and sent
in one go, which blocks the loop for half a millisecond or more per MiB. A client that wants more asks again at once;
the round trip is short in comparison. (A larger first batch is sent nevertheless.)"""
MOST_TO_CONSUMERS_BYTES = 1024 * 1024
"""The same for our own consumers that do not wait for much (`most_bytes`). Such a consumer often runs on the same
machine and, busy with earlier records, waits for its core while the broker sends."""
MOST_TO_KAFKA_CONSUMERS_BYTES = 2 * 1024 * 1024
"""The same for Kafka's clients. librdkafka pauses for a second whenever it has 100,000 records; larger answers in
flight mean fewer such pauses."""

MOST_WAIT_MS = 300_000
"""The longest wait of a consumer's fetch, ten times the request timeout of Kafka's clients. After it, the answer is as
empty as at the end of a shorter `max_wait_ms`."""

MOST_WAITING_BYTES = 96 * 1024 * 1024
"""Memory of all fetches of consumers that wait: 160,000 partitions in fetches of a hundred."""
WAITING_FETCH_BYTES, WAITING_PARTITION_BYTES = 4_000, 600
"""Memory of a fetch that waits, and of each partition in it."""

_COUNT_START = HEADER_SIZE - 4
_NO_RECORDS = bytes(4)
"""The last four bytes of a batch's header are the number of its records."""


def most_bytes(min_bytes: int, usual: int) -> int:
    """Return the maximum size of an answer, usually `usual`. A client that waits for more gets it in one answer: the
    rest of a split answer would be too small to be sent, and would wait although it was already there."""
    return MOST_AT_ONCE_BYTES if min_bytes > usual // 2 else usual


def _name_topics(services: Services, body: FetchRequest) -> list[FetchTopicResponse]:
    """Fill in the names of topics that are requested by id only, as Kafka's clients do from version 13 on (KIP-516).
    Return the answers for unknown ids, which the client receives at once."""
    unknown: list[FetchTopic] = []
    for topic in body.topics:
        if not topic.topic:
            name = services.metadata.topic_with_id(topic.topic_id)
            if name is None:
                unknown.append(topic)
            else:
                topic.topic = name
    if not unknown:
        return []
    body.topics = [topic for topic in body.topics if topic.topic]
    body.max_wait_ms = 0
    return [
        FetchTopicResponse(
            "",
            [FetchPartitionResponse(part.partition, ErrorCode.UNKNOWN_TOPIC_ID) for part in topic.partitions],
            topic.topic_id,
        )
        for topic in unknown
    ]


async def _set_aside_missing(services: Services, body: FetchRequest) -> list[FetchTopicResponse]:
    """Remove the partitions of which this broker has no replica from a large request, in slices, and return the answers
    for them, which the client receives at once. This broker has few of the partitions that a stranger may name."""
    if sum(len(topic.partitions) for topic in body.topics) <= MOST_READ_WITHOUT_PAUSE:
        return []
    slices = Slices()
    missing = []
    for topic in body.topics:
        present, refusals = [], []
        for part in topic.partitions:
            refusal = services.replicas.reader.refusal(TopicPartition(topic.topic, part.partition), topic.topic_id)
            if refusal is None:
                present.append(part)
            else:
                refusals.append(refusal)
            await slices.breathe()
        topic.partitions = present
        if refusals:
            missing.append(FetchTopicResponse(topic.topic, refusals, topic.topic_id))
    if missing:
        body.max_wait_ms = 0
    return missing


async def handle_fetch(services: Services, request: Request, body: FetchRequest) -> None:
    is_follower = body.replica_id != CONSUMER
    shorten = request.session.fetch_slots.open(body) if is_follower else None
    unknown = _name_topics(services, body)
    ids = {topic.topic: topic.topic_id for topic in body.topics}
    check_named_once(
        "a partition", [(topic.topic, part.partition) for topic in body.topics for part in topic.partitions]
    )
    if body.replica_id < -1:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"replica_id is {body.replica_id}; give -1 for a consumer")
    if body.max_bytes < 0:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"max_bytes is {body.max_bytes}; it must be 0 or more")
    for topic in body.topics:
        for fetch in topic.partitions:
            if fetch.partition_max_bytes < 0:
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST,
                    f"partition_max_bytes of {topic.topic}-{fetch.partition} is {fetch.partition_max_bytes}; it must "
                    f"be 0 or more",
                )
    if not is_follower:
        unknown += await _set_aside_missing(services, body)
    if is_follower:
        usual = MOST_AT_ONCE_BYTES
    elif request.source.dialect.reads_columns:
        usual = MOST_TO_CONSUMERS_BYTES
    else:
        usual = MOST_TO_KAFKA_CONSUMERS_BYTES
    body.max_bytes = min(body.max_bytes, most_bytes(body.min_bytes, usual))
    body.max_wait_ms = min(body.max_wait_ms, MOST_WAIT_MS)
    by_quota = services.client_quotas.most_fetched_bytes(request)
    if by_quota is not None:
        body.max_bytes = min(body.max_bytes, by_quota)
    FetchIsolation.of(body.replica_id, body.isolation_level)  # raises now rather than in the line

    def respond(answer: FetchAnswer) -> None:
        topics: dict[str, list[FetchPartitionResponse]] = {}
        for topic_partition, response in answer if shorten is None else shorten(answer):
            topics.setdefault(topic_partition.topic, []).append(response)
        responses = [FetchTopicResponse(name, partitions, ids.get(name, "")) for name, partitions in topics.items()]
        elsewhere = (part for topic in unknown for part in topic.partitions)
        endpoints = node_endpoints(services, request, chain((response for _, response in answer), elsewhere))
        slot = body.slot if is_follower else NO_SLOT
        request.respond(FetchResponse(0, ErrorCode.NONE, responses + unknown, slot, endpoints))

    def respond_to_consumer(answer: FetchAnswer) -> None:
        if any(_begins_emptied(response) for _, response in answer):
            answer_later(services, request, None, lambda: read_on(answer))
        else:
            respond_to_client(answer)

    async def read_on(answer: FetchAnswer) -> None:
        respond_to_client(await _past_emptied(services, body, answer))

    def respond_to_client(answer: FetchAnswer) -> None:
        if request.source.dialect.reads_columns:
            respond(answer)
            return
        if not knows_zstd():
            answer = [_without_zstd(services, *part) for part in answer]
        search = has_columns(answer)
        try:
            next(search)
        except StopIteration as found:
            if found.value:
                answer_later(services, request, None, lambda: transcode(answer))
            else:
                respond(answer)
        else:
            answer_later(services, request, None, lambda: search_on(answer, search))

    async def search_on(answer: FetchAnswer, search: Generator[None, None, bool]) -> None:
        if await Slices().finish(search):
            await transcode(answer)
        else:
            respond(answer)

    def knows_zstd() -> bool:
        return request.source.dialect.knows_zstd(request.api.key, request.api_version)

    async def transcode(answer: FetchAnswer) -> None:
        respond(await services.transcoder.transcode(answer, body, lambda: request.closed, knows_zstd=knows_zstd()))

    if is_follower:
        waiting = services.replicas.reader.fetch(body, respond)
        if waiting is not None:
            _keep_waiting(services, request, waiting, body)
        return

    def in_turn(call: Callable[[], None]) -> None:
        services.in_turn(lambda: request.respond_nothing() if request.closed else call())

    def read() -> None:
        waiting = services.replicas.reader.fetch(body, respond_to_consumer, in_turn)
        if waiting is not None:
            _keep_waiting(services, request, waiting, body)

    in_turn(read)


def _keep_waiting(services: Services, request: Request, waiting: DelayedFetch, body: FetchRequest) -> None:
    """Drop the fetch with its connection. Beyond the budget, answer the fetches of the connection with the most."""
    session = request.session
    if body.replica_id == CONSUMER:
        size = WAITING_FETCH_BYTES + WAITING_PARTITION_BYTES * sum(len(topic.partitions) for topic in body.topics)
        waiting.ended = lambda: services.waiting_fetches.release(session, request)
        services.waiting_fetches.hold(session, request, size, waiting.force_complete)

    def drop() -> None:
        if waiting.abandon():
            request.respond_nothing()

    if not waiting.is_completed:
        session.at_end(request, drop)


def _begins_emptied(response: FetchPartitionResponse) -> bool:
    """Return whether the records begin with an empty batch."""
    return response.records[_COUNT_START:HEADER_SIZE] == _NO_RECORDS


async def _past_emptied(services: Services, body: FetchRequest, answer: FetchAnswer) -> FetchAnswer:
    """Return the answer, within the limits of the request, with records in place of empty batches."""
    fetches = {TopicPartition(t.topic, fetch.partition): fetch for t in body.topics for fetch in t.partitions}
    kept = sum(len(response.records) for _, response in answer if not _begins_emptied(response))
    left, at_least_one = max(0, services.replicas.reader.max_bytes(body) - kept), not kept
    isolation = FetchIsolation.of(body.replica_id, body.isolation_level)
    slices = Slices()
    found: FetchAnswer = []
    for topic_partition, response in answer:
        partition = services.replicas.partitions.get(topic_partition)
        if partition is not None and _begins_emptied(response):
            fetch = fetches[topic_partition]
            steps = read_past_emptied(partition, fetch, isolation, max_bytes=left, at_least_one=at_least_one)
            response = await slices.finish(steps)
            left = max(0, left - len(response.records))
            at_least_one = at_least_one and not response.records
        found.append((topic_partition, response))
    return found


def _without_zstd(
    services: Services, topic_partition: TopicPartition, response: FetchPartitionResponse
) -> tuple[TopicPartition, FetchPartitionResponse]:
    """Replace the records of a topic with `compression.type=zstd` by an error, as in Kafka, for a client older than
    zstd."""
    partition = services.replicas.partitions.get(topic_partition)
    if partition is None or partition.log.config.compression is not Compression.ZSTD:
        return topic_partition, response
    return topic_partition, partition.refusal(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE)
