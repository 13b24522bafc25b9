"""The log directories of brokers: DescribeLogDirs at each of them (KIP-113, KIP-827)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import BrokersFailed
from minibroker.client.settings import Address
from minibroker.client.stalls import LOOK_EVERY_S, Stalls
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_LOG_DIRS
from minibroker.protocol.errors import (
    BrokerError,
    ErrorCode,
    InvalidMessage,
    MinibrokerError,
    NetworkError,
    error_of,
)
from minibroker.protocol.model import TopicPartition


class LogDirReplica(NamedTuple):
    size: int
    """In bytes."""
    offset_lag: int
    """Offsets from the end of the log to the high watermark; -1: not known."""
    is_future: bool


class LogDirDescription(NamedTuple):
    """One log directory of a broker."""

    log_dir: str
    error: str | None
    """Why the directory is offline, in which case nothing else is known of it; None if it is online."""
    replicas: Mapping[TopicPartition, LogDirReplica]
    total_bytes: int | None
    usable_bytes: int | None
    """Sizes of the file system that contains the directory."""


async def describe(
    requests: AdminRequests, broker_ids: Iterable[int] | None
) -> dict[int, tuple[LogDirDescription, ...]]:
    """See `Admin.describe_log_dirs`."""
    alive = {broker.id: Address(broker.host, broker.port) for broker in (await requests.cluster()).brokers}
    wanted = sorted(alive) if broker_ids is None else list(dict.fromkeys(broker_ids))
    errors: dict[int, MinibrokerError] = {
        broker_id: NetworkError(
            f"it is not alive (those that are: {', '.join(map(str, alive))}): see `minibroker status`"
        )
        for broker_id in wanted
        if broker_id not in alive
    }
    tasks = {
        broker_id: asyncio.create_task(_of_broker(requests, alive[broker_id]))
        for broker_id in wanted
        if broker_id in alive
    }
    results: dict[int, tuple[LogDirDescription, ...]] = {}
    stalls: Stalls[int] = Stalls(requests.runtime.connections.client_id, lambda broker_id: f"broker {broker_id}")
    try:
        while pending := [task for task in tasks.values() if not task.done()]:
            await asyncio.wait(pending, timeout=LOOK_EVERY_S)
            # A broker that has failed still counts as silent, so that its stall is not reported as over.
            silent = [broker_id for broker_id, task in tasks.items() if not task.done() or task.exception() is not None]
            stalls.look(requests.runtime.clock.monotonic(), silent, lambda _: "no answer to DescribeLogDirs yet")
        for broker_id, task in tasks.items():
            try:
                results[broker_id] = task.result()
            except (NetworkError, BrokerError, InvalidMessage) as error:
                errors[broker_id] = error
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    if errors:
        raise BrokersFailed(errors, results)
    return results


async def _of_broker(requests: AdminRequests, address: Address) -> tuple[LogDirDescription, ...]:
    response = await requests.ask(address, DESCRIBE_LOG_DIRS, m.DescribeLogDirsRequest(None))
    return tuple(_description(result) for result in response.results)


def _description(result: m.DescribeLogDirsResult) -> LogDirDescription:
    error = None
    if result.error_code != ErrorCode.NONE:
        error = result.error_message or error_of(result.error_code).name
    return LogDirDescription(
        result.log_dir,
        error,
        {
            TopicPartition(topic.name, p.partition_index): LogDirReplica(
                p.partition_size, p.offset_lag, p.is_future_key
            )
            for topic in result.topics
            for p in topic.partitions
        },
        None if result.total_bytes < 0 else result.total_bytes,
        None if result.usable_bytes < 0 else result.usable_bytes,
    )
