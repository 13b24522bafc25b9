"""Details for `topics describe` beyond the metadata: start, end and replica sizes of each partition, and the topic's
own settings.

A broker that does not answer must not hide the rest, so details that do not arrive soon are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigResource
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.terminal.output import DETAILS_WITHIN_MS
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.settings import IsolationLevel
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import ConfigSource, TopicPartition

_WITHIN_S = DETAILS_WITHIN_MS / 1_000

_Found = dict[TopicPartition, OffsetAndTimestamp | None]
_Where = Literal["earliest", "latest"]
_Offsets = tuple[int | None, int | None, int | None]


class PartitionDetails(NamedTuple):
    start_offset: int | None
    """None here and below: no broker answered in time, or could tell."""
    end_offset: int | None
    """The offset after the last record that consumers can read."""
    last_stable_offset: int | None
    """The offset at which the oldest open transaction begins, or `end_offset`: read_committed consumers end here."""
    sizes: dict[int, int]
    """Bytes of each replica, by broker."""


async def details_of(admin: Admin, topic: TopicDescription) -> dict[int, PartitionDetails]:
    """Return the details by partition number."""
    led: dict[int, list[TopicPartition]] = {}
    for partition in topic.partitions:
        if partition.leader is not None:
            led.setdefault(partition.leader, []).append(TopicPartition(topic.name, partition.partition))
    brokers = sorted({broker_id for partition in topic.partitions for broker_id in partition.replicas})
    ends, of_brokers = await asyncio.gather(
        asyncio.gather(*(_offsets(admin, partitions) for partitions in led.values())),
        asyncio.gather(*(_sizes(admin, topic.name, broker_id) for broker_id in brokers)),
    )
    offsets = {partition: found for part in ends for partition, found in part.items()}
    nothing: _Offsets = (None, None, None)
    return {
        each.partition: PartitionDetails(
            *offsets.get(each.partition, nothing),
            {b: sizes[each.partition] for b, sizes in zip(brokers, of_brokers, strict=True) if each.partition in sizes},
        )
        for each in topic.partitions
    }


async def own_settings(admin: Admin, topic: str) -> dict[str, str | None] | None:
    """Return the settings that this topic overrides. None: no broker answered in time, or ZooKeeper has invalid
    settings."""
    resource = ConfigResource.of_topic(topic)
    try:
        async with asyncio.timeout(_WITHIN_S):
            entries = (await admin.describe_configs([resource]))[resource]
    except (TimeoutError, MinibrokerError):
        return None
    return {e.name: e.value for e in entries.values() if e.source is ConfigSource.DYNAMIC_TOPIC_CONFIG}


async def _offsets(admin: Admin, partitions: list[TopicPartition]) -> dict[int, _Offsets]:
    """Return first offset, end and last stable offset of partitions that one broker leads. A new leader below
    min.insync.replicas knows only the first."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + _WITHIN_S

    async def ask(where: Mapping[TopicPartition, _Where], isolation: IsolationLevel = "read_uncommitted") -> _Found:
        """Ask in the time that is left."""
        left_ms = (until_s - clock()) * 1_000
        if not where or left_ms < 1:
            return {}
        try:
            return await admin.list_offsets(where, isolation_level=isolation, timeout_ms=left_ms)
        except OffsetErrors as failed:
            return failed.results

    first = await ask(dict.fromkeys(partitions, "earliest"))
    end = await ask(dict.fromkeys(first, "latest"))
    # After the end: without transactions, none of these is then lower.
    stable = await ask(dict.fromkeys(end, "latest"), "read_committed")
    return {
        p.partition: (_offset(first.get(p)), _offset(end.get(p)), _stable(_offset(stable.get(p)), end.get(p)))
        for p in partitions
    }


def _stable(stable: int | None, end: OffsetAndTimestamp | None) -> int | None:
    """Return the last stable offset. The log may have grown since `end` was asked for."""
    return stable if stable is None or end is None else min(stable, end.offset)


def _offset(found: OffsetAndTimestamp | None) -> int | None:
    return None if found is None else found.offset


async def _sizes(admin: Admin, topic: str, broker_id: int) -> dict[int, int]:
    """Return the sizes of a broker's replicas, by partition number."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            log_dirs = (await admin.describe_log_dirs([broker_id]))[broker_id]
    except (TimeoutError, MinibrokerError):
        return {}
    return {
        partition.partition: replica.size
        for log_dir in log_dirs
        for partition, replica in log_dir.replicas.items()
        if partition.topic == topic and not replica.is_future
    }
