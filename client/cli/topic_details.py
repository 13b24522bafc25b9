"""Details for `topics describe` beyond the metadata: start, end and replica sizes of each partition, and the topic's
own settings.

A broker that does not answer must not hide the rest, so details that do not arrive soon are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigResource
from minibroker.client.administering.log_dirs import LogDirDescription
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.terminal import security
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.errors import BrokersFailed
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import ConfigSource, TopicPartition

PATIENCE_MS = 3_000

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


async def details_of(bootstrap: str, topic: TopicDescription) -> dict[int, PartitionDetails]:
    """Return the details by partition number."""
    led: dict[int, list[TopicPartition]] = {}
    for partition in topic.partitions:
        if partition.leader is not None:
            led.setdefault(partition.leader, []).append(TopicPartition(topic.name, partition.partition))
    brokers = sorted({broker_id for partition in topic.partitions for broker_id in partition.replicas})
    async with Admin(
        bootstrap, client_id="minibroker-cli", default_api_timeout_ms=PATIENCE_MS, **security.chosen()
    ) as admin:
        found = asyncio.gather(*(_offsets(admin, partitions) for partitions in led.values()))
        sizes = await _sizes(admin, topic.name, brokers)
        offsets = {partition: ends for part in await found for partition, ends in part.items()}
    nothing: _Offsets = (None, None, None)
    return {
        partition.partition: PartitionDetails(
            *offsets.get(partition.partition, nothing), sizes.get(partition.partition, {})
        )
        for partition in topic.partitions
    }


async def own_settings(bootstrap: str, topic: str) -> dict[str, str | None] | None:
    """Return the settings that this topic overrides. None: no broker answered in time, or ZooKeeper has invalid
    settings."""
    resource = ConfigResource.of_topic(topic)
    async with Admin(
        bootstrap, client_id="minibroker-cli", default_api_timeout_ms=PATIENCE_MS, **security.chosen()
    ) as admin:
        try:
            entries = (await admin.describe_configs([resource]))[resource]
        except MinibrokerError:
            return None
    return {e.name: e.value for e in entries.values() if e.source is ConfigSource.DYNAMIC_TOPIC_CONFIG}


async def _offsets(admin: Admin, partitions: list[TopicPartition]) -> dict[int, _Offsets]:
    """Return first offset, end and last stable offset of partitions that one broker leads. A new leader below
    min.insync.replicas knows only the first."""
    first = await _found(admin.list_offsets(dict.fromkeys(partitions, "earliest")))
    end = await _found(admin.list_offsets(dict.fromkeys(first, "latest")))
    # After the end: without transactions, none of these is then lower.
    stable = await _found(admin.list_offsets(dict.fromkeys(end, "latest"), isolation_level="read_committed"))
    return {
        p.partition: (_offset(first.get(p)), _offset(end.get(p)), _stable(_offset(stable.get(p)), end.get(p)))
        for p in partitions
    }


async def _found(
    asking: Awaitable[dict[TopicPartition, OffsetAndTimestamp | None]],
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    try:
        return await asking
    except OffsetErrors as failed:
        return failed.results


def _stable(stable: int | None, end: OffsetAndTimestamp | None) -> int | None:
    """Return the last stable offset. The log may have grown since `end` was asked for."""
    return stable if stable is None or end is None else min(stable, end.offset)


def _offset(found: OffsetAndTimestamp | None) -> int | None:
    return None if found is None else found.offset


async def _sizes(admin: Admin, topic: str, broker_ids: Iterable[int]) -> dict[int, dict[int, int]]:
    """Return replica sizes by partition number and broker."""
    results: dict[int, tuple[LogDirDescription, ...]]
    try:
        results = await admin.describe_log_dirs(broker_ids)
    except BrokersFailed as failed:
        results = failed.results
    except MinibrokerError:
        return {}
    sizes: dict[int, dict[int, int]] = {}
    for broker_id, log_dirs in sorted(results.items()):
        for log_dir in log_dirs:
            for partition, replica in log_dir.replicas.items():
                if partition.topic == topic and not replica.is_future:
                    sizes.setdefault(partition.partition, {})[broker_id] = replica.size
    return sizes
