"""Finding offsets: ListOffsets at whoever leads, until every partition is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from client.cluster import Cluster
from client.connections import Purpose
from client.metadata import Leader
from protocol import messages as m
from protocol.apis import LIST_OFFSETS
from protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from protocol.model import NO_EPOCH, TopicPartition

CONSUMER = -1
READ_UNCOMMITTED = 0


class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp_ms: int
    """Of the record there; -1 where offsets were asked for by EARLIEST_TIMESTAMP or LATEST_TIMESTAMP."""


async def list_offsets(
    cluster: Cluster, timestamps: Mapping[TopicPartition, int], timeout_s: float
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """The first offset at or after each time (or EARLIEST_TIMESTAMP, LATEST_TIMESTAMP); None: there is none.

    Raises as `find_offsets`.
    """
    found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    await find_offsets(cluster, timestamps, timeout_s, found)
    return found


async def find_offsets(
    cluster: Cluster,
    timestamps: Mapping[TopicPartition, int],
    timeout_s: float,
    found: dict[TopicPartition, OffsetAndTimestamp | None],
) -> None:
    """As `list_offsets`, into `found`, which has what was found by then where this raises.

    Retries until `timeout_s` has passed; then raises the last error: BrokerError, or NetworkError. Errors that no
    retry mends are raised at once.
    """
    deadline = cluster.clock.monotonic() + timeout_s
    pending = dict(timestamps)
    for partition in pending:
        cluster.metadata.want(partition.topic)
    while pending:
        error: MinibrokerError | None = None
        by_leader: dict[Leader, dict[TopicPartition, int]] = {}
        for partition, timestamp in pending.items():
            leader = cluster.metadata.picture.leader(*partition)
            if leader is not None:
                by_leader.setdefault(leader, {})[partition] = timestamp
                continue
            code = cluster.metadata.picture.errors.get(partition.topic)
            if code is None and partition.topic in cluster.metadata.picture.topics:
                exists = partition.partition in cluster.metadata.picture.topics[partition.topic].partitions
                code = ErrorCode.LEADER_NOT_AVAILABLE if exists else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            error = BrokerError(code or ErrorCode.LEADER_NOT_AVAILABLE, f"finding offsets of {partition}")
        # Several leaders are asked at the same time; what one answers counts whatever becomes of the others.
        answers = await asyncio.gather(
            *(_ask(cluster, leader, part) for leader, part in by_leader.items()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, (NetworkError, InvalidMessage)):
                error = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for partition, result in answer.items():
                    if not isinstance(result, BrokerError):
                        found[partition] = result
                        del pending[partition]
                    elif error is None or not result.retriable:
                        error = result
        if pending:
            assert error is not None
            is_final = isinstance(error, BrokerError) and not error.retriable
            if is_final or cluster.clock.monotonic() >= deadline:
                raise error
            try:
                async with asyncio.timeout(cluster.retry_backoff_s):
                    await cluster.metadata.refreshed()
            except TimeoutError:
                continue  # nobody answers yet; the leaders may, by now
            if isinstance(error, BrokerError) and not ERRORS[error.code].refresh_metadata:
                await asyncio.sleep(cluster.retry_backoff_s)


async def _ask(
    cluster: Cluster, leader: Leader, timestamps: Mapping[TopicPartition, int]
) -> dict[TopicPartition, OffsetAndTimestamp | BrokerError | None]:
    address = cluster.metadata.address(leader.node_id)
    if address is None:
        raise NetworkError(f"the address of broker {leader.node_id} is not known")
    topics: dict[str, list[m.ListOffsetsPartition]] = {}
    for partition, timestamp in timestamps.items():
        known = cluster.metadata.picture.leader(*partition)
        epoch = NO_EPOCH if known is None else known.epoch
        topics.setdefault(partition.topic, []).append(m.ListOffsetsPartition(partition.partition, epoch, timestamp))
    request = m.ListOffsetsRequest(
        CONSUMER, READ_UNCOMMITTED, [m.ListOffsetsTopic(name, partitions) for name, partitions in topics.items()]
    )
    try:
        connection = await cluster.connections.open(address, Purpose.REQUESTS)
        response = await cluster.ask(
            connection,
            LIST_OFFSETS,
            request,
            timeout_s=cluster.request_timeout_s,
            is_in_charge=lambda: any(cluster.metadata.picture.leader(*partition) == leader for partition in timestamps),
        )
    except NetworkError:
        cluster.metadata.suspect(address)
        raise
    answered = {
        TopicPartition(topic.name, answer.partition_index): answer
        for topic in response.topics
        for answer in topic.partitions
    }
    results: dict[TopicPartition, OffsetAndTimestamp | BrokerError | None] = {}
    for partition in timestamps:
        answer = answered.get(partition)
        if answer is None:
            raise InvalidMessage(f"the answer of {address} to ListOffsets does not speak of {partition}")
        if answer.error_code != ErrorCode.NONE:
            results[partition] = BrokerError(error_of(answer.error_code), f"finding offsets of {partition}")
        else:
            results[partition] = None if answer.offset < 0 else OffsetAndTimestamp(answer.offset, answer.timestamp)
    return results
