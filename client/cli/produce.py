"""`minibroker produce`: lines of a file or of standard input as records."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from minibroker.client.cli.lines import read_lines
from minibroker.client.cli.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    print_json,
    run,
)
from minibroker.client.cli.record_format import unescape
from minibroker.client.cli.topics import TopicArgument, checked_topic, described
from minibroker.client.producer import Producer
from minibroker.protocol.errors import BrokerError, MinibrokerError


class Acks(StrEnum):
    ALL = "all"
    LEADER = "1"
    NONE = "0"


class Codec(StrEnum):
    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


AcksOption = Annotated[Acks, typer.Option(help="Who must have a record: all in-sync replicas, the leader, nobody.")]
CompressionOption = Annotated[Codec, typer.Option(help="Codec of the batches.")]

_ACKS: dict[Acks, Literal["all", 0, 1]] = {Acks.ALL: "all", Acks.LEADER: 1, Acks.NONE: 0}


class Produced(NamedTuple):
    topic: str
    records: int
    bytes: int
    """Of keys and values."""
    seconds: float

    @property
    def records_per_second(self) -> float:
        return self.records / self.seconds if self.seconds else 0.0


def produce(
    topic: TopicArgument,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="Read lines from here, not from stdin.")] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help=r"What ends the key at the start of a line, such as : or \t.")
    ] = None,
    acks: AcksOption = Acks.ALL,
    compression: CompressionOption = Codec.NONE,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Send each line as a record. Returns once all are acknowledged."""
    checked_topic(topic)
    separator = None if key_separator is None else unescape(key_separator)
    if separator == b"":
        raise UsageError("--key-separator is empty: give at least one character, such as :")
    servers = bootstrap_servers(bootstrap, data)
    with nullcontext(0) if file is None else file.open("rb") as source:
        descriptor = source if isinstance(source, int) else source.fileno()
        produced = run(_produce(servers, topic, descriptor, separator, acks, compression))
    if format is Format.JSON:
        print_json({**produced._asdict(), "records_per_second": round(produced.records_per_second)})
    else:
        sys.stdout.write(
            f"produced {produced.records} records to {topic} in {produced.seconds:.2f} s "
            f"({produced.records_per_second:.0f} records/s)\n"
        )


async def _produce(
    bootstrap: str, topic: str, descriptor: int, separator: bytes | None, acks: Acks, compression: Codec
) -> Produced:
    # The producer would wait for a topic that does not exist, since another may be about to create it.
    await described(bootstrap, topic)
    records = size = 0
    began = time.monotonic()
    async with open_producer(bootstrap, acks, compression) as producer:
        with _progress(os.fstat(descriptor).st_size) as progress:
            task = progress.add_task(topic, total=os.fstat(descriptor).st_size or None) if progress else None
            async for lines in read_lines(descriptor):
                for line in lines:
                    key, value = _key_and_value(line, separator)
                    try:
                        producer.send(topic, value, key=key)
                    except BrokerError as error:
                        raise MinibrokerError(f"line {records + 1}: {error}") from error
                    await producer.drain()
                    records += 1
                    size += len(line)
                if progress and task is not None:
                    progress.update(task, completed=size + records)
            await producer.flush()
    return Produced(topic, records, size, time.monotonic() - began)


def open_producer(bootstrap: str, acks: Acks, compression: Codec) -> Producer:
    return Producer(bootstrap, acks=_ACKS[acks], compression=compression.value, client_id="minibroker-cli")


def _key_and_value(line: bytes, separator: bytes | None) -> tuple[bytes | None, bytes]:
    """A line without the separator has no key."""
    if separator is None:
        return None, line
    key, found, value = line.partition(separator)
    return (key, value) if found else (None, line)


def _progress(size: int) -> AbstractContextManager[Progress | None]:
    """A bar where the size is known; on stderr, if that is a terminal and stdin is not the same one."""
    if not sys.stderr.isatty() or size == 0:
        return nullcontext()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
