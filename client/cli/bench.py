"""`minibroker bench`: how many records a second one process produces and consumes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from client.cli.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    note,
    print_json,
    print_table,
    run,
)
from client.cli.produce import Acks, AcksOption, Codec, CompressionOption, open_producer
from client.cli.topics import checked_topic, described, open_admin
from client.consumer import Consumer
from protocol.errors import BrokerError, ErrorCode, MinibrokerError
from protocol.model import TopicPartition

_NUMBER_BYTES = 8
_RANDOM_BYTES = 16 * 1024 * 1024
_PARTITIONS = 3

app = typer.Typer(help="Measure one producer or consumer process.", no_args_is_help=True)


class By(StrEnum):
    BATCHES = "batches"
    RECORDS = "records"


@app.command()
def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Created where it does not exist.")] = "bench",
    records: Annotated[int, typer.Option(min=1, help="How many to send.")] = 1_000_000,
    size: Annotated[int, typer.Option(min=_NUMBER_BYTES, max=900_000, help="Bytes of a value.")] = 100,
    acks: AcksOption = Acks.ALL,
    compression: CompressionOption = Codec.NONE,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Send distinct values that do not compress, without keys, until all are acknowledged."""
    checked_topic(topic)
    servers = bootstrap_servers(bootstrap, data)
    note("making values ...")
    values = distinct_values(records, size)
    seconds = run(_produce(servers, topic, values, acks, compression))
    _print("produce", topic, records, records * size, seconds, format)


@app.command()
def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="What is read.")] = "bench",
    by: Annotated[By, typer.Option(help="Take batches, or every record as an object.")] = By.BATCHES,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Read a topic from its beginning to its end."""
    checked_topic(topic)
    records, size, seconds = run(_consume(bootstrap_servers(bootstrap, data), topic, by))
    _print("consume", topic, records, size, seconds, format)


def distinct_values(count: int, size: int) -> list[bytes]:
    """Values that begin with their number, and go on with bytes that do not repeat within any batch."""
    noise = os.urandom(_RANDOM_BYTES)
    length = size - _NUMBER_BYTES
    step = max(length, 1)
    places = range(0, _RANDOM_BYTES - length, step)
    return [
        number.to_bytes(_NUMBER_BYTES, "big") + noise[(at := places[number % len(places)]) : at + length]
        for number in range(count)
    ]


async def _produce(bootstrap: str, topic: str, values: Sequence[bytes], acks: Acks, compression: Codec) -> float:
    await _make_sure_of(bootstrap, topic)
    async with open_producer(bootstrap, acks, compression) as producer:
        began = time.perf_counter()
        for value in values:
            producer.send(topic, value)
            await producer.drain()
        await producer.flush()
        return time.perf_counter() - began


async def _make_sure_of(bootstrap: str, topic: str) -> None:
    async with open_admin(bootstrap) as admin:
        try:
            await admin.create_topic(topic, partitions=_PARTITIONS)
        except BrokerError as error:
            if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise


async def _consume(bootstrap: str, topic: str, by: By) -> tuple[int, int, float]:
    """Records, bytes of their values, seconds. Raises MinibrokerError where there was nothing to read."""
    partitions = [TopicPartition(topic, p.partition) for p in (await described(bootstrap, topic)).partitions]
    async with Consumer(bootstrap, partitions=partitions, client_id="minibroker-cli") as consumer:
        ends = await consumer.end_offsets(partitions)
        expected = sum(ends.values()) - sum((await consumer.beginning_offsets(partitions)).values())
        if not expected:
            raise MinibrokerError(f"the topic {topic} is empty: run `minibroker bench produce {topic}` first")
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
        return records, size, time.perf_counter() - began


def _print(action: str, topic: str, records: int, size: int, seconds: float, format: Format) -> None:
    figures = {
        "action": action,
        "topic": topic,
        "records": records,
        "seconds": round(seconds, 3),
        "records_per_second": round(records / seconds),
        "megabytes_per_second": round(size / seconds / 1e6, 1),
    }
    if format is Format.JSON:
        print_json(figures)
    else:
        print_table(tuple(name.replace("_", " ") for name in figures), [tuple(figures.values())])
