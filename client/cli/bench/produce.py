"""`minibroker bench produce`: the records per second that one process gets acknowledged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from random import SystemRandom
from typing import Annotated

import typer

from minibroker.client.cli.bench.report import print_figures
from minibroker.client.cli.bench.topic import PartitionsOption, ReplicationFactorOption, ensure_topic
from minibroker.client.cli.bench.values import HEADER_BYTES, Values
from minibroker.client.cli.records.produce import BATCH_SIZE, Acks, AcksOption, Codec, CompressionOption, open_producer
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
from minibroker.client.cli.topics import checked_topic


class By(StrEnum):
    RECORDS = "records"
    BATCHES = "batches"


RECORDS_AT_ONCE = 10_000
"""Records per `send_batch`."""

BULK_BATCH_SIZE = 1024 * 1024
"""Batch size for `--by batches`: the largest that a broker accepts by default."""

SizeOption = Annotated[int, typer.Option(min=HEADER_BYTES, max=900_000, help="Bytes per value.")]


def produce(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="Topic to write to; created if it does not exist.")
    ] = "bench",
    records: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="Number of records.")] = 1_000_000,
    size: SizeOption = 100,
    acks: AcksOption = Acks.ALL,
    compression: CompressionOption = Codec.NONE,
    by: Annotated[
        By, typer.Option(help=f"Use `send` for each record, or `send_batch` for each {RECORDS_AT_ONCE:,}.")
    ] = By.RECORDS,
    partitions: PartitionsOption = None,
    replication_factor: ReplicationFactorOption = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Send distinct, incompressible values without keys until all are acknowledged."""
    checked_topic(topic)
    servers = bootstrap_servers(bootstrap, data)
    run(ensure_topic(servers, topic, partitions, replication_factor))
    note("making values ...")
    source, number_of_run = Values(), SystemRandom().getrandbits(32)
    values = [source.make(number_of_run, number, size) for number in range(records)]
    seconds = run(send_all(servers, topic, values, acks, compression, by))
    print_figures(
        {
            "action": "produce",
            "topic": topic,
            "records": records,
            "seconds": round(seconds, 3),
            "records_per_second": round(records / seconds),
            "megabytes_per_second": round(records * size / seconds / 1e6, 1),
        },
        format,
    )


async def send_all(
    bootstrap: str, topic: str, values: Sequence[bytes], acks: Acks, compression: Codec, by: By = By.RECORDS
) -> float:
    """Return the seconds from the first `send` to the last acknowledgement."""
    batch_size = BULK_BATCH_SIZE if by is By.BATCHES else BATCH_SIZE
    async with open_producer(bootstrap, acks, compression, batch_size=batch_size) as producer:
        began = time.perf_counter()
        if by is By.BATCHES:
            for first in range(0, len(values), RECORDS_AT_ONCE):
                producer.send_batch(topic, values[first : first + RECORDS_AT_ONCE])
                await producer.drain()
        else:
            for value in values:
                producer.send(topic, value)
                await producer.drain()
        await producer.flush()
        return time.perf_counter() - began
