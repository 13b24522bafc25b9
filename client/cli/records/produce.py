"""`minibroker produce`: sends the lines of a file or of standard input as records, or the records of a file."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from minibroker.client.cli.records.lines import read_lines
from minibroker.client.cli.records.record_files import Input, read_records
from minibroker.client.cli.records.record_format import unescape
from minibroker.client.cli.records.tally import Tally
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.live import progress_bar
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    name_and_value,
    note,
    print_json,
    run_until_terminated,
)
from minibroker.client.cli.terminal.times import hint, parse_time_ms
from minibroker.client.cli.topics import TopicArgument, checked_topic, described
from minibroker.client.producer import Producer, drain_patiently
from minibroker.client.producing.delivery import BatchDelivery
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import Header
from minibroker.protocol.words import counted


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


AcksOption = Annotated[Acks, typer.Option(help="Replicas that must have a record: all in sync, the leader, or none.")]
CompressionOption = Annotated[Codec, typer.Option("--compression", "-z", help="Compression of the batches.")]

MAX_REQUEST_SIZE = 1024 * 1024
BATCH_SIZE = 256 * 1024
"""The codecs of keys and values, as the producer's defaults."""

_ACKS: dict[Acks, Literal["all", 0, 1]] = {Acks.ALL: "all", Acks.LEADER: 1, Acks.NONE: 0}


class Template(NamedTuple):
    """How a line becomes a record, and the fields that all records share."""

    key: bytes | None = None
    """The key of lines without a key."""
    key_separator: bytes | None = None
    tombstone: bool = False
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: list[Header] | None = None

    def key_and_value(self, line: bytes) -> tuple[bytes | None, bytes | None]:
        """Return the record of a line. A line without the separator has no key of its own. An empty line or value
        becomes an empty value, or null with `tombstone`."""
        key, value = self.key, line
        if self.key_separator is not None:
            before, found, after = line.partition(self.key_separator)
            if found:
                key, value = before, after
        return key, None if self.tombstone and not value else value


class Produced(NamedTuple):
    topic: str
    records: int
    bytes: int
    """Bytes of keys and values."""
    seconds: float

    @property
    def records_per_second(self) -> float:
        return self.records / self.seconds if self.seconds else 0.0


def produce(
    topic: TopicArgument,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="Read this file instead of stdin.")] = None,
    input: Annotated[
        Input,
        typer.Option("--input", "-i", help="lines, or records as printed by `consume --output json` or msgpack."),
    ] = Input.LINES,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="TEXT", help="Key of records without a key of their own.")
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help=r"Separator between key and value, such as : or \t. Lines without it get --key.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of each record. May be repeated."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            "-p",
            min=0,
            help="Send all records to this partition. Default: the record's own, or by key, or spread.",
        ),
    ] = None,
    timestamp: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Timestamp of each record: milliseconds since 1970, or ISO 8601 (UTC without a zone). Default: now.",
        ),
    ] = None,
    tombstone: Annotated[
        bool,
        typer.Option("--tombstone", "-Z", help="Send an empty value or line as null, instead of as an empty value."),
    ] = False,
    acks: AcksOption = Acks.ALL,
    compression: CompressionOption = Codec.NONE,
    max_request_size: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            min=1_024,
            max=64 * 1024 * 1024,
            help="The longest line, in bytes. The topic's max.message.bytes must allow it.",
        ),
    ] = MAX_REQUEST_SIZE,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Send each line as a record. Returns when all records are acknowledged.

    With --input json or msgpack, each record has its own key, headers, timestamp and partition. Missing fields have the
    same defaults as for lines; topic and offset are ignored."""
    checked_topic(topic)
    if input is not Input.LINES:
        _refuse_options_for_lines(
            {"--key": key, "--key-separator": key_separator, "--header": header, "--timestamp": timestamp}, tombstone
        )
    template = Template(
        key=None if key is None else os.fsencode(key),
        key_separator=None if key_separator is None else _separator(key_separator),
        tombstone=tombstone,
        partition=partition,
        timestamp_ms=None if timestamp is None else _timestamp_ms(timestamp),
        headers=[_header(text) for text in header] if header else None,
    )
    servers = bootstrap_servers(bootstrap, data)
    tally = Tally("record" if input is Input.MSGPACK else "line")
    with nullcontext(0) if file is None else file.open("rb") as source:
        descriptor = source if isinstance(source, int) else source.fileno()
        if os.isatty(descriptor):
            note("each line is a record; Ctrl-D ends the input")
        try:
            produced = run_until_terminated(
                produce_lines(servers, topic, descriptor, template, acks, compression, tally, max_request_size, input)
            )
        except (KeyboardInterrupt, typer.Exit):  # by Ctrl-C, by SIGTERM
            sys.stderr.write(pastable(f"interrupted: {tally}\n"))
            raise
    if format is Format.JSON:
        print_json({**produced._asdict(), "records_per_second": round(produced.records_per_second)})
    else:
        sys.stdout.write(
            f"produced {counted(produced.records, 'record')} to {topic} in {produced.seconds:.2f} s "
            f"({produced.records_per_second:,.0f} records/s)\n"
        )


def _refuse_options_for_lines(given: dict[str, object], tombstone: bool) -> None:
    named = [option for option, value in given.items() if value is not None]
    if tombstone:
        named.append("--tombstone")
    if named:
        raise UsageError(f"{named[0]} applies only to lines: records of --input json or msgpack have their own")


def _separator(text: str) -> bytes:
    separator = unescape(text)
    if separator == b"":
        raise UsageError("--key-separator is empty: give at least one character, such as :")
    return separator


def _header(text: str) -> tuple[str, bytes]:
    name, value = name_and_value("--header", text, "trace=42")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--header {text!r}: a name must be UTF-8; a value may be any bytes") from error
    return name, os.fsencode(value)


def _timestamp_ms(text: str) -> int:
    timestamp_ms = parse_time_ms(text)
    if timestamp_ms is None:
        raise UsageError(
            f"--timestamp {text!r}: give milliseconds since 1970 such as 1700000000000, or a time such as "
            f"2026-11-22T10:30:00Z{hint(text)}"
        )
    return timestamp_ms


async def produce_lines(
    bootstrap: str,
    topic: str,
    descriptor: int,
    template: Template,
    acks: Acks,
    compression: Codec,
    tally: Tally,
    max_request_size: int = MAX_REQUEST_SIZE,
    input: Input = Input.LINES,
) -> Produced:
    """Send until the end or the first failure. After a failure, or if the input cannot be read, raises an error that
    reports the lines before it."""
    # The producer would wait for a missing topic, since another client may be about to create it.
    partitions = len((await described(bootstrap, topic, AclOperation.WRITE)).partitions)
    began = time.monotonic()
    try:
        async with open_producer(bootstrap, acks, compression, max_request_size) as producer:
            if input is Input.LINES:
                source = _lines(descriptor, template)
            else:
                source = _records(descriptor, input, topic, partitions, template.partition)
            sending = asyncio.create_task(_send(producer, topic, descriptor, source, tally))
            settling = asyncio.create_task(tally.keep_settling(producer))
            try:
                await asyncio.wait((sending, settling), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await _end((sending, settling))
                raise
            await _end((sending, settling))
            await tally.settle(producer)
    finally:
        await tally.settle_rest()
    if not settling.cancelled():
        settling.result()
    if not sending.cancelled() and isinstance(unreadable := sending.exception(), MinibrokerError):
        raise tally.failure(f"{unreadable} ({tally})") from unreadable
    size = None if sending.cancelled() else sending.result()
    if size is None:
        raise tally.failure(f"{tally}. No {tally.noun} after {tally.lines} was sent")
    if tally.has_failed:
        raise tally.failure(f"{tally}")
    return Produced(topic, tally.lines, size, time.monotonic() - began)


_Fields = tuple[bytes | None, bytes | None, int | None, int | None, list[Header] | None]
"""Key, value, partition, timestamp and headers of a record."""


class _Part(NamedTuple):
    """A part of the input."""

    records: list[_Fields]
    bytes: int
    """Bytes of keys and values."""
    ends_at: int
    """Position in the input, or slightly before it, for the progress bar."""


async def _lines(descriptor: int, template: Template) -> AsyncIterator[_Part]:
    """Raises what `read_lines` raises."""
    key_and_value, rest = template.key_and_value, (template.partition, template.timestamp_ms, template.headers)
    ends_at = 0
    async for lines in read_lines(descriptor):
        size = sum(map(len, lines))
        ends_at += size + len(lines)
        yield _Part([(*key_and_value(line), *rest) for line in lines], size, ends_at)


async def _records(
    descriptor: int, input: Input, topic: str, partitions: int, partition: int | None
) -> AsyncIterator[_Part]:
    """Yield the records, all for `partition` if it is given. Raises the errors of `read_records`, and MinibrokerError
    for a partition that the topic does not have."""
    number = 0
    async for records in read_records(descriptor, input):
        part: list[_Fields] = []
        size = 0
        problem: MinibrokerError | None = None
        for key, value, its_own, timestamp_ms, headers, begins_at in records:
            number += 1
            if partition is None and its_own is not None and its_own >= partitions:
                problem = MinibrokerError(
                    f"record {number}, which begins at byte {begins_at}, is for partition {its_own}, but "
                    f"{topic} has partitions 0 to {partitions - 1}: add partitions (`minibroker topics alter "
                    f"{topic} --partitions {its_own + 1}`), or choose one for all records with --partition"
                )
                break
            part.append((key, value, its_own if partition is None else partition, timestamp_ms, headers))
            size += len(key or b"") + len(value or b"")
        yield _Part(part, size, records[-1].begins_at)
        if problem is not None:
            raise problem


async def _send(
    producer: Producer, topic: str, descriptor: int, source: AsyncIterator[_Part], tally: Tally
) -> int | None:
    """Return the bytes of all records when all are sent; None after a failure. Raises the errors of `source`."""
    size = 0
    of_file = os.fstat(descriptor).st_size  # 0 for a pipe
    with progress_bar(topic, of_file, of_bytes=True) if of_file else nullcontext() as show:
        async for part in source:
            at_once = _sent_at_once(producer, topic, part.records)
            if at_once is None:
                await _send_each(producer, topic, part.records, tally)
            else:
                tally.add(at_once)
                await _drain(producer, tally)
            if tally.has_failed:
                return None
            size += part.bytes
            if show is not None:
                show(part.ends_at)
            await tally.has_room()
    return size


async def _send_each(producer: Producer, topic: str, records: list[_Fields], tally: Tally) -> None:
    """Runs until the first failure, which `tally` has then."""
    send, add = producer.send, tally.add
    for key, value, partition, timestamp_ms, headers in records:
        try:
            add(send(topic, value, key=key, partition=partition, timestamp_ms=timestamp_ms, headers=headers))
        except MinibrokerError as error:
            tally.refuse(error)
            return
        await _drain(producer, tally)
        if tally.has_failed:
            return


async def _drain(producer: Producer, tally: Tally) -> None:
    try:
        await drain_patiently(producer)
    except MinibrokerError:
        tally.has_failed = True


def _sent_at_once(producer: Producer, topic: str, records: list[_Fields]) -> BatchDelivery | None:
    """Return all records for one `send_batch`, if they are alike. None: send each, which also identifies a rejected
    one."""
    if not records:
        return None
    values = [record[1] for record in records]
    partitions, timestamps = {record[2] for record in records}, [record[3] for record in records]
    stated = [timestamp for timestamp in timestamps if timestamp is not None]
    if len(partitions) > 1 or len(stated) not in (0, len(records)) or any(record[4] for record in records):
        return None
    keys = [record[0] for record in records]
    try:
        return producer.send_batch(topic, values, keys, stated or None, partitions.pop())
    except MinibrokerError:
        return None


async def _end(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def open_producer(
    bootstrap: str,
    acks: Acks,
    compression: Codec,
    max_request_size: int = MAX_REQUEST_SIZE,
    batch_size: int = BATCH_SIZE,
) -> Producer:
    return Producer(
        bootstrap,
        batch_size=batch_size,
        acks=_ACKS[acks],
        compression=compression.value,
        max_request_size=max_request_size,
        client_id="minibroker-cli",
        **security.chosen(),
    )
