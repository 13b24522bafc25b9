"""Deleting records: DeleteRecords at the leaders, until every partition has its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minibroker.client.administering.requests import AdminRequests, or_yet
from minibroker.client.administering.topics import existing
from minibroker.client.cluster.metadata import Leader
from minibroker.client.cluster.offsets import Known, ask_leader, ask_leaders, not_mentioned, request_leader
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.errors import PartitionErrors
from minibroker.client.settings import check_by_partition, check_integer
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DELETE_RECORDS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError, error_of
from minibroker.protocol.model import TopicPartition

_GRACE_S = 1.0
"""A broker that waited for the whole timeout of the request has this much longer to report that."""
_AFTER_IT_BEGAN = (
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
)


class Deleted(NamedTuple):
    low_watermarks: dict[TopicPartition, int]
    errors: dict[TopicPartition, MinibrokerError]
    """Errors of the other partitions."""
    undecided: set[TopicPartition]
    """Partitions whose records some attempt may have deleted, or may still delete."""


_MAY_YET = "They may yet be deleted; to ask for it again does no harm. See `minibroker status` for replicas out of sync"


async def delete_records(requests: AdminRequests, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """See `Admin.delete_records`."""
    retries = requests.retries()
    asked = check_by_partition(
        "offsets", offsets, 5, lambda offset: check_integer("offset", offset, m.UP_TO_HIGH_WATERMARK, 2**63 - 1)
    )
    if not asked:
        return {}
    ids, errors = await existing(requests, asked)
    there = {partition: offset for partition, offset in asked.items() if partition not in errors}
    ids = {partition.topic: ids[partition.topic] for partition in there}
    deleted = await _delete(requests.runtime, there, ids, retries.remaining_s)
    for partition, error in deleted.errors.items():
        errors[partition] = or_yet(error, _MAY_YET) if partition in deleted.undecided else error
    if errors:
        raise PartitionErrors(errors, deleted.low_watermarks)
    return deleted.low_watermarks


async def _delete(
    runtime: ClientRuntime, offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, str], timeout_s: float
) -> Deleted:
    """Delete the records before each offset (UP_TO_HIGH_WATERMARK: before the end as it is now). Topics of the same
    names with other ids lose nothing."""
    found: dict[TopicPartition, int] = {}
    errors: dict[TopicPartition, MinibrokerError] = {}
    undecided: set[TopicPartition] = set()
    ends: dict[TopicPartition, int] = {}
    """The offset that UP_TO_HIGH_WATERMARK stands for, the same in all attempts: an attempt that arrives late must not
    delete records that were produced since."""

    async def ask(
        runtime: ClientRuntime, leader: Leader, offsets: Mapping[TopicPartition, int], timeout_s: float
    ) -> dict[TopicPartition, int | MinibrokerError]:
        broker_patience_s = min(timeout_s, runtime.request_timeout_s)
        results: dict[TopicPartition, int | MinibrokerError] = {}
        unknown = [p for p, offset in offsets.items() if offset == m.UP_TO_HIGH_WATERMARK and p not in ends]
        if unknown:
            latest = await ask_leader(runtime, leader, dict.fromkeys(unknown, m.LATEST_TIMESTAMP), broker_patience_s)
            for partition, answer in latest.items():
                if isinstance(answer, MinibrokerError):
                    results[partition] = answer
                elif answer.result is not None:
                    ends[partition] = answer.result.offset
        exact = {p: ends.get(p, offset) for p, offset in offsets.items() if p not in results}
        if not exact:
            return results
        request = _request(exact, topic_ids, round(broker_patience_s * 1_000))
        try:
            response = await request_leader(
                runtime, leader, DELETE_RECORDS, request, exact, broker_patience_s + _GRACE_S
            )
        except MinibrokerError as error:
            undecided.update(exact)
            return results | dict.fromkeys(exact, error)
        results |= _results(leader, exact, response)
        for partition, result in results.items():
            if isinstance(result, BrokerError) and result.code in _AFTER_IT_BEGAN:
                undecided.add(partition)
        return results

    known = {partition: Known(topic_ids[partition.topic]) for partition in offsets}
    try:
        with runtime.metadata.wanted(topic_ids):
            await ask_leaders(
                runtime, offsets, timeout_s, found, errors, ask, "deleting records", known, each_by_itself=True
            )
    except (BrokerError, NetworkError) as error:  # time is up
        for partition in offsets:
            if partition not in found:
                errors.setdefault(partition, error)
    return Deleted(found, errors, undecided)


def _request(
    offsets: Mapping[TopicPartition, int], topic_ids: Mapping[str, str], timeout_ms: int
) -> m.DeleteRecordsRequest:
    topics: dict[str, m.DeleteRecordsTopic] = {}
    for (name, index), offset in offsets.items():
        topic = topics.setdefault(name, m.DeleteRecordsTopic(name, [], topic_ids[name]))
        topic.partitions.append(m.DeleteRecordsPartition(index, offset))
    return m.DeleteRecordsRequest(list(topics.values()), timeout_ms)


def _results(
    leader: Leader, offsets: Mapping[TopicPartition, int], response: m.DeleteRecordsResponse
) -> dict[TopicPartition, int | MinibrokerError]:
    """Return the low watermark of each partition, or its error."""
    answered = {
        TopicPartition(topic.name, answer.partition_index): answer
        for topic in response.topics
        for answer in topic.partitions
    }
    results: dict[TopicPartition, int | MinibrokerError] = {}
    for partition in offsets:
        answer = answered.get(partition)
        if answer is None:
            results[partition] = not_mentioned(DELETE_RECORDS, leader, partition)
        elif answer.error_code == ErrorCode.NONE:
            results[partition] = answer.low_watermark
        else:
            detail = answer.error_message or f"deleting records of {partition}"
            results[partition] = BrokerError(error_of(answer.error_code), detail)
    return results
