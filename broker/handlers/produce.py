"""Produce: append as leader, and answer when the requested acks are there. Labels P1..P7: ARCHITECTURE.md."""

from collections.abc import Iterable, Iterator
from itertools import compress
from operator import not_

from minibroker.broker.handlers.node_endpoints import node_endpoints
from minibroker.broker.handlers.services import Services, Steps, check_named_once, named_twice, respond_sized
from minibroker.broker.network.handler_pool import Continuation
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.appending import ToAppend
from minibroker.broker.replication.delayed import ProduceStatus, refused_append
from minibroker.broker.replication.questions import WAIVED
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.storage.validator import Looked, check_one_batch
from minibroker.broker.transactions.verification import produce_error
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    MAX_RECORD_ERRORS,
    Buffer,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopicResponse,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_POSITION, CorruptRecord, parse_header
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import COMPRESSION_MASK, is_transactional

LEGAL_ACKS = (-1, 0, 1)
MOST_AT_ONCE = 100
"""Partitions of a request whose batches are appended without a pause."""
_ANSWER_BYTES_EACH = 30
"""Bytes for a partition in an answer."""


async def handle_produce(services: Services, request: Request, body: ProduceRequest) -> Continuation | None:
    """P3. Each partition succeeds or fails by itself. With acks 0 there is no answer; an error then closes the
    connection, which is the only sign that such a producer can notice."""
    if body.acks not in LEGAL_ACKS:
        raise BrokerError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks is {body.acks}")
    if sum(len(topic.partition_data) for topic in body.topic_data) > MOST_AT_ONCE:
        return _append_in_slices(services, request, body)
    entries = list(_entries(request, body))
    check_named_once("a partition", [entry.topic_partition for entry in entries])
    refused: dict[TopicPartition, ProduceStatus] = {}
    taken = _acceptable(request, body, entries, refused)
    asked = _with_questions(services, body, taken)
    if asked or any(_needs_a_look(services, entry) for entry in taken):
        return _verify_look_and_append(services, request, body, taken, asked, refused)
    statuses = services.replicas.appender.append(taken, body.acks)
    _await_replicas(services, request, body, statuses, refused)
    return None


def _entries(request: Request, body: ProduceRequest) -> Iterator[ToAppend]:
    for topic in body.topic_data:
        for data in topic.partition_data:
            topic_partition = TopicPartition(topic.name, data.index)
            yield ToAppend(topic_partition, topic.topic_id, data.records, received_s=request.received_at)


async def _append_in_slices(services: Services, request: Request, body: ProduceRequest) -> None:
    """Append the batches of a request that names many partitions, some at a time."""
    slices = Slices()
    entries: list[ToAppend] = []
    named: set[TopicPartition] = set()
    for entry in _entries(request, body):
        entries.append(entry)
        named.add(entry.topic_partition)
        if len(entries) % MOST_AT_ONCE == 0:
            await slices.breathe()
    if len(named) < len(entries):
        raise named_twice("a partition")
    refused: dict[TopicPartition, ProduceStatus] = {}
    statuses: dict[TopicPartition, ProduceStatus] = {}
    for start in range(0, len(entries), MOST_AT_ONCE):
        taken = _acceptable(request, body, entries[start : start + MOST_AT_ONCE], refused)
        asked = _with_questions(services, body, taken)
        if asked or any(_needs_a_look(services, entry) for entry in taken):
            taken = await _verified_and_looked_at(services, request, body, taken, asked, refused)
        statuses |= services.replicas.appender.append(taken, body.acks)
        await slices.breathe()
    _await_replicas(services, request, body, statuses, refused)


def _acceptable(
    request: Request, body: ProduceRequest, entries: list[ToAppend], refused: dict[TopicPartition, ProduceStatus]
) -> list[ToAppend]:
    """Return the entries that may be appended according to their headers, and add the others to `refused`."""
    knows_zstd = request.source.dialect.knows_zstd(request.api.key, request.api_version)
    taken: list[ToAppend] = []
    for entry in entries:
        try:
            check_one_batch(entry.records, entry.topic_partition)
            if not knows_zstd:
                _refuse_zstd(entry.records, request.api_version)
            if body.transactional_id is None and is_transactional(entry.records):
                raise BrokerError(ErrorCode.INVALID_RECORD, "a transactional batch without a transactional id")
        except BrokerError as error:
            refused[entry.topic_partition] = _refusal(entry, error)
        else:
            taken.append(entry)
    return taken


def _needs_a_look(services: Services, entry: ToAppend) -> bool:
    """Return whether the batch must be checked before the append, which may take seconds."""
    appender = services.replicas.appender
    return appender.is_to_be_rewritten_for(entry) is not None or appender.takes_long(entry)


def _with_questions(
    services: Services, body: ProduceRequest, entries: list[ToAppend]
) -> dict[TopicPartition, ToAppend]:
    """Return the entries that open a transaction, with a question for its coordinator."""
    if body.transactional_id is None:
        return {}
    questions = ((entry, services.replicas.appender.question_for(entry)) for entry in entries)
    return {
        entry.topic_partition: entry._replace(question=question)
        for entry, question in questions
        if question is not None
    }


async def _verified(
    services: Services,
    body: ProduceRequest,
    asked: dict[TopicPartition, ToAppend],
    refused: dict[TopicPartition, ProduceStatus],
) -> dict[TopicPartition, ToAppend]:
    """T3. Ask the transaction's coordinator about the entries that open a transaction (KIP-890). Return those that may
    be appended, and add the others to `refused`."""
    transactional_id, adds = body.transactional_id, body.adds_partitions
    assert transactional_id is not None
    if services.verifier.is_waived(adds=adds):
        return {topic_partition: entry._replace(question=WAIVED) for topic_partition, entry in asked.items()}
    headers = [parse_header(entry.records) for entry in asked.values()]
    producers = {(header.producer_id, header.producer_epoch) for header in headers}
    if len(producers) > 1:
        error = BrokerError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, "transactional batches of more than one producer")
        refused |= {topic_partition: _refusal(entry, error) for topic_partition, entry in asked.items()}
        return {}
    [(producer_id, epoch)] = producers
    codes = await services.verifier.verify_all([*asked], transactional_id, producer_id, epoch, adds=adds)
    verified: dict[TopicPartition, ToAppend] = {}
    for topic_partition, entry in asked.items():
        code = codes[topic_partition]
        if code is ErrorCode.NONE:
            verified[topic_partition] = entry
        else:
            error = produce_error(code, transactional_id, adds=adds)
            services.replicas.appender.note_refused(entry, error.code)
            refused[topic_partition] = _refusal(entry, error)
    return verified


async def _verify_look_and_append(
    services: Services,
    request: Request,
    body: ProduceRequest,
    entries: list[ToAppend],
    asked: dict[TopicPartition, ToAppend],
    refused: dict[TopicPartition, ProduceStatus],
) -> None:
    """Verify, check, rewrite and append the batches. The connection's next request waits for this, because a producer's
    later batches must come after these. `asked`: those of the entries that open a transaction, with questions."""
    taken = await _verified_and_looked_at(services, request, body, entries, asked, refused)
    statuses = services.replicas.appender.append(taken, body.acks)
    _await_replicas(services, request, body, statuses, refused)


async def _verified_and_looked_at(
    services: Services,
    request: Request,
    body: ProduceRequest,
    entries: list[ToAppend],
    asked: dict[TopicPartition, ToAppend],
    refused: dict[TopicPartition, ProduceStatus],
) -> list[ToAppend]:
    """Return the entries that are to be appended now, before anything else runs. Add the others to `refused`."""
    taken: list[ToAppend] = []
    room = MAX_RECORD_ERRORS
    if asked:
        verified = await _verified(services, body, asked, refused)
        entries = [verified.get(entry.topic_partition, entry) for entry in entries]
    left = [entry for entry in reversed(entries) if entry.topic_partition not in refused]
    while left:
        entry = left.pop()
        try:
            config = services.replicas.appender.is_to_be_rewritten_for(entry)
            if config is not None:
                records = await services.transcoder.as_appended(entry.records, config)
                came_as_columns = entry.came_as_columns or (_are_columns(entry.records) and not _are_columns(records))
                entry = entry._replace(
                    records=records, rewritten_for=config, came_as_columns=came_as_columns, looked=Looked.NOT
                )
            entry = entry._replace(
                looked=await services.replicas.appender.check(entry, lambda: _is_moot(request, body))
            )
        except BrokerError as error:
            status = refused[entry.topic_partition] = _refusal(entry, error)
            room = _bound_record_errors([status], room)
        else:
            taken.append(entry)
        if not left:  # the topic's settings or leader may have changed meanwhile
            again = [_needs_a_look(services, each) for each in taken]
            left = list(compress(taken, again))
            taken = list(compress(taken, map(not_, again)))
    return taken


def _is_moot(request: Request, body: ProduceRequest) -> bool:
    """Return whether the sender has disconnected and will send the batch again over another connection."""
    return request.closed and body.acks != 0


def _refusal(entry: ToAppend, error: BrokerError) -> ProduceStatus:
    return ProduceStatus(response=refused_append(entry.topic_partition.partition, error))


def _await_replicas(
    services: Services,
    request: Request,
    body: ProduceRequest,
    statuses: dict[TopicPartition, ProduceStatus],
    refused: dict[TopicPartition, ProduceStatus],
) -> None:
    """Answer once the appended batches are replicated, as far as the producer asks for it."""

    def respond(statuses: dict[TopicPartition, ProduceStatus]) -> None:
        """P7."""
        statuses |= refused
        _bound_record_errors(statuses.values())
        errors = [status.response.error_code for status in statuses.values() if status.response.error_code]
        if errors:
            services.replicas.appender.refusals.update(errors)
        if body.acks == 0:
            request.respond_nothing()
            if errors:
                request.close_connection("a produce request with acks=0 failed")
            return
        respond_sized(services, request, len(statuses) * _ANSWER_BYTES_EACH, _answer(services, request, statuses))

    services.replicas.appender.await_replicas(statuses, timeout_ms=max(body.timeout_ms, 0), respond=respond)
    body.topic_data.clear()  # the records are in the log, so the frame can be released while the replicas fetch


def _answer(services: Services, request: Request, statuses: dict[TopicPartition, ProduceStatus]) -> Steps:
    topics: dict[str, list[ProducePartitionResponse]] = {}
    for number, (topic_partition, status) in enumerate(statuses.items(), 1):
        topics.setdefault(topic_partition.topic, []).append(status.response)
        if number % MOST_AT_ONCE == 0:
            yield None
    endpoints = node_endpoints(services, request, (status.response for status in statuses.values()))
    return ProduceResponse([ProduceTopicResponse(name, parts) for name, parts in topics.items()], 0, endpoints)


def _bound_record_errors(statuses: Iterable[ProduceStatus], room: int = MAX_RECORD_ERRORS) -> int:
    """Limit the record errors of all partitions together: a batch of 70 bytes may have a million records without a key.
    Return the remaining room."""
    for status in statuses:
        errors = status.response.record_errors
        if errors:
            status.response.record_errors = errors[:room]
            room -= len(status.response.record_errors)
    return room


def _are_columns(records: Buffer) -> bool:
    return len(records) > MAGIC_POSITION and records[MAGIC_POSITION] == MAGIC_COLUMNS


def _refuse_zstd(records: Buffer, version: int) -> None:
    """Reject zstd from an older producer, as Kafka does: consumers as old as it could not read the records."""
    try:
        compression = parse_header(records).attributes & COMPRESSION_MASK
    except CorruptRecord:
        return  # the append reports it
    if compression == Compression.ZSTD:
        raise BrokerError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
            f"zstd in version {version} of Produce, older than zstd: upgrade the producer or use another codec",
        )
