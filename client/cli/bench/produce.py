"""`minibroker bench produce`: how many records a second one process gets acknowledged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import SystemRandom
from typing import Annotated

import typer

from minibroker.client.cli.bench.report import print_figures
from minibroker.client.cli.bench.topic import PartitionsOption, ReplicationFactorOption, ensure_topic
from minibroker.client.cli.bench.values import HEADER_BYTES, Values
from minibroker.client.cli.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    note,
    run,
)
from minibroker.client.cli.produce import Acks, AcksOption, Codec, CompressionOption, open_producer
from minibroker.client.cli.topics import checked_topic

SizeOption = Annotated[int, typer.Option(min=HEADER_BYTES, max=900_000, help="Bytes of a value.")]


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Created if it does not exist.")] = "bench",
    records: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="How many to send.")] = 1_000_000,
    size: SizeOption = 100,
    acks: AcksOption = Acks.ALL,
    compression: CompressionOption = Codec.NONE,
    partitions: PartitionsOption = None,
    replication_factor: ReplicationFactorOption = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Send distinct values that do not compress, without keys, until all are acknowledged."""
    checked_topic(topic)
    servers = bootstrap_servers(bootstrap, data)
    run(ensure_topic(servers, topic, partitions, replication_factor))
    note("making values ...")
    source, number_of_run = Values(), SystemRandom().getrandbits(32)
    values = [source.make(number_of_run, number, size) for number in range(records)]
    seconds = run(send_all(servers, topic, values, acks, compression))
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


async def send_all(bootstrap: str, topic: str, values: Sequence[bytes], acks: Acks, compression: Codec) -> float:
    """Seconds from the first `send` to the last acknowledgement."""
    async with open_producer(bootstrap, acks, compression) as producer:
        began = time.perf_counter()
        for value in values:
            producer.send(topic, value)
            await producer.drain()
        await producer.flush()
        return time.perf_counter() - began
