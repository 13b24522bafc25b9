"""`minibroker bench consume`: the records that one process reads per second, and a check of their content.

The topic is read twice. The first pass is timed and counts records and bytes (the client checks every batch's checksum,
as always). The second pass is not timed: it compares every value with the one that `bench produce` sent, which takes
longer than reading.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer

from minibroker.client.cli.bench.report import print_figures
from minibroker.client.cli.bench.values import ContentCheck, ContentVerdict
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    note,
    run,
)
from minibroker.client.cli.topics import checked_topic, described
from minibroker.client.consumer import Consumer
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition


class By(StrEnum):
    BATCHES = "batches"
    RECORDS = "records"


class Timed(NamedTuple):
    records: int
    bytes: int
    """Bytes of the values."""
    seconds: float


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")] = "bench",
    by: Annotated[By, typer.Option(help="Iterate over batches, or over records as objects.")] = By.BATCHES,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Read a topic from beginning to end, timed; then read it again, untimed, to check the content."""
    checked_topic(topic)
    timed, verdict = run(_consume(bootstrap_servers(bootstrap, data), topic, by))
    print_figures(
        {
            "action": "consume",
            "topic": topic,
            "records": timed.records,
            "seconds": round(timed.seconds, 3),
            "records_per_second": round(timed.records / timed.seconds),
            "megabytes_per_second": round(timed.bytes / timed.seconds / 1e6, 1),
            "checked": verdict.checked,
        },
        format,
    )
    if verdict.problem is not None:
        raise MinibrokerError(
            f"the records of {topic} differ from those that were sent: {verdict.problem}. If every `bench "
            "produce` to it succeeded and none is running, please report this; otherwise run `minibroker "
            f"topics delete {topic}` first"
        )


async def _consume(bootstrap: str, topic: str, by: By) -> tuple[Timed, ContentVerdict]:
    """Raises MinibrokerError if there is nothing to read."""
    partitions = [TopicPartition(topic, p.partition) for p in (await described(bootstrap, topic)).partitions]
    async with _open_consumer(bootstrap, partitions) as consumer:
        ends = await consumer.end_offsets(partitions)
        expected = sum(ends.values()) - sum((await consumer.beginning_offsets(partitions)).values())
        if not expected:
            raise MinibrokerError(f"the topic {topic} is empty: run `minibroker bench produce {topic}` first")
        timed = await _timed(consumer, by, expected)
    note("checking values ...")
    async with _open_consumer(bootstrap, partitions) as consumer:
        return timed, await _checked(consumer, expected)


def _open_consumer(bootstrap: str, partitions: list[TopicPartition]) -> Consumer:
    return Consumer(bootstrap, partitions=partitions, client_id="minibroker-cli", **security.chosen())


async def _timed(consumer: Consumer, by: By, expected: int) -> Timed:
    records = size = 0
    began = time.perf_counter()
    if by is By.BATCHES:
        async for batch in consumer.batches():
            records += len(batch)
            size += sum(map(len, filter(None, batch.values)))
            if records >= expected:
                break
    else:
        async for record in consumer:
            records += 1
            size += len(record.value or b"")
            if records >= expected:
                break
    return Timed(records, size, time.perf_counter() - began)


async def _checked(consumer: Consumer, expected: int) -> ContentVerdict:
    check = ContentCheck()
    records = 0
    async for batch in consumer.batches():
        check.add(batch.partition, batch.values)
        records += len(batch)
        if records >= expected:
            break
    return check.verdict()
