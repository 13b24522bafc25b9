"""The bounds of a query: its options, resolved to offsets."""

from __future__ import annotations

from collections.abc import Collection

from minibroker.client.cluster.offsets import Known
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.look_ups import Topics, says_unknown
from minibroker.spark_jobs.source.offsets import Offsets, TopicOffsets, grouped
from minibroker.spark_jobs.source.options import EARLIEST, Bound, ReadOptions


def resolve(client: LogClient, topics: Topics, bound: Bound, *, name: str) -> dict[TopicPartition, int]:
    """Return the offset that a bound means for each partition now. `name`, for errors, is "starting" or "ending".

    Raises MinibrokerError if the bound names a partition that is not read, if an offset is not in the log, if a topic
    was created again, or if no record is as recent as a timestamp.
    """
    for topic, topic_id in bound.topic_ids.items():
        if topic in topics.ids and topics.ids[topic] != topic_id:
            raise MinibrokerError(
                f"{name}Offsets are of topic {topic} with id {topic_id}, but the topic of that name has id "
                f"{topics.ids[topic]} now: it was deleted and created again. Use new offsets"
            )
    for partition in bound.named():
        if partition not in topics.partitions:
            raise BrokerError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{name}Offsets name {partition}, which is not among what is read: "
                f"{', '.join(str(partition) for partition in topics.partitions) or 'nothing'}. "
                "Name partitions that exist and are subscribed to",
                is_complete=True,
            )
    asked: dict[TopicPartition, int] = {}
    for partition in topics.partitions:
        timestamp = bound.timestamp_of(partition)
        asked[partition] = bound.offset_of(partition) if timestamp is None else timestamp
    known = {partition: Known(topics.ids[partition.topic]) for partition in topics.partitions}
    explicit = [partition for partition in topics.partitions if _is_explicit(bound, partition)]
    found = client.offsets({partition: what for partition, what in asked.items() if partition not in explicit}, known)
    unmatched = [partition for partition, result in found.items() if result is None]
    if unmatched and not bound.unmatched_is_latest:
        first = unmatched[0]
        raise MinibrokerError(
            f"{first} has no record at or after the {name} timestamp {asked[first]}: give an earlier one, or set "
            f"{name}OffsetsByTimestampStrategy=latest to begin at the end"
        )
    ends = client.ends(
        {partition: known[partition] for partition in [*unmatched, *explicit]},
        {partition: asked[partition] for partition in explicit},
    )
    starts = client.known_offsets(dict.fromkeys(explicit, EARLIEST), known)
    offsets: dict[TopicPartition, int] = {}
    for partition in topics.partitions:
        result = found.get(partition)
        if partition in explicit:
            offsets[partition] = asked[partition]
            if not starts[partition] <= asked[partition] <= ends[partition]:
                raise BrokerError(
                    ErrorCode.OFFSET_OUT_OF_RANGE,
                    f"{name}Offsets say {asked[partition]} for {partition}, whose log holds {starts[partition]} to "
                    f"{ends[partition]}: name an offset in between, or -2 for the earliest and -1 for the latest",
                    is_complete=True,
                )
        else:
            offsets[partition] = ends[partition] if result is None else result.offset
    return offsets


def _is_explicit(bound: Bound, partition: TopicPartition) -> bool:
    return bound.timestamp_of(partition) is None and bound.offset_of(partition) >= 0


def starting_offsets(client: LogClient, options: ReadOptions) -> dict[str, TopicOffsets]:
    """Return the offsets at which a query with these options begins now. Raises as `resolve`."""
    topics = client.topics(options.subscription)
    return grouped(topics.ids, resolve(client, topics, options.starting, name="starting"))


def latest_offsets(
    client: LogClient, options: ReadOptions, *, is_lenient: bool = False, since: Offsets | None = None
) -> dict[str, TopicOffsets]:
    """Return the ends of the logs (see `LookUps`) of all subscribed partitions; missing ones are an error unless
    `is_lenient`.

    `since` are the caller's offsets. If one of its topics seems to be gone, to have another id, or to end before these
    offsets, this waits until that is certain. Raises NetworkError or BrokerError if it does not become certain.
    """
    return client.latest(options.subscription, is_lenient=is_lenient, since=since)


def earliest_offsets(
    client: LogClient, options: ReadOptions, partitions: Collection[TopicPartition], *, is_lenient: bool
) -> dict[TopicPartition, int]:
    """Return the beginnings of logs; missing partitions are an error unless `is_lenient`."""
    asked = list(partitions)
    while True:
        try:
            return client.known_offsets(dict.fromkeys(asked, EARLIEST))
        except BrokerError as error:
            if not is_lenient or not says_unknown(error):
                raise
        there = client.topics(options.subscription, is_lenient=True).partitions
        asked = [partition for partition in asked if partition in there]
