"""`minibroker consume`: prints records of topics on standard output."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import typer

from minibroker.client.cli.records.consume_group import consume_group
from minibroker.client.cli.records.record_format import Formatter, formatter
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import (
    API_TIMEOUT_MS,
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    note,
    run_until_terminated,
)
from minibroker.client.cli.terminal.start_position import (
    AtOffset,
    AtTime,
    Edge,
    Last,
    StartPosition,
    parse_start_position,
)
from minibroker.client.cli.topics import checked_numbers, checked_topic, describe_for, open_admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ApiTimedOut, CorruptBatch
from minibroker.client.fetching.records import ConsumerBatch
from minibroker.client.settings import IsolationLevel
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import plural

_IDLE_S = 0.2
"""Time without records after which to check whether the end has been reached: the last batches may be empty."""


def consume(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", help="Names of topics.")],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            "-o",
            metavar="beginning|end|OFFSET|-N|@TIME",
            help="Start position in each partition. -N: the last N records. TIME: milliseconds since 1970, or ISO "
            "8601 (UTC without a zone). earliest and latest are accepted for beginning and end. With "
            "--group: used only where nothing is committed.",
        ),
    ] = "beginning",
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Join this group: continue from its committed offsets, share the partitions with its other "
            "members, and commit the printed records.",
        ),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="Only this partition. May be repeated. Default: all."),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many records.")] = None,
    exit_at_end: Annotated[
        bool, typer.Option("--exit-at-end", help="Stop at the current end of each partition.")
    ] = False,
    isolation_level: Annotated[
        IsolationLevel,
        typer.Option(
            "--isolation-level",
            help="read_committed leaves out the records of aborted transactions, and reads up to the oldest open one.",
        ),
    ] = "read_uncommitted",
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-f",
            metavar="json|msgpack|value|FORMAT",
            help=r"Output format. FORMAT is such as '%t %p %o %k %s %T %h\n'. Default: value, or json with "
            r"--format json.",
        ),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Print the records of topics. Runs until interrupted, or until --count or --exit-at-end applies."""
    names = list(dict.fromkeys(map(checked_topic, topics)))
    position = parse_start_position(start)
    if group is not None:
        _check_for_group(group, start, position, partition)
    default_output = "json" if format is Format.JSON else "value"
    print_as = formatter(default_output if output is None else output)
    if output == "msgpack" and sys.stdout.isatty():
        raise UsageError("--output msgpack is binary: redirect it to a file or a program (`> orders.msgpack`)")
    servers = bootstrap_servers(bootstrap, data)
    if group is not None:
        reset: Literal["earliest", "latest"] = "earliest" if position is Edge.BEGINNING else "latest"
        consumed = run_until_terminated(
            _consume_group(servers, names, group, reset, isolation_level, count, exit_at_end, print_as)
        )
        note(f"{consumed} {plural(consumed, 'record')}")
        return
    consumed = run_until_terminated(
        _consume(servers, names, position, partition, isolation_level, count, exit_at_end, print_as)
    )
    note(f"{consumed} {plural(consumed, 'record')}")


def _check_for_group(group: str, start: str, position: StartPosition, partition: list[int] | None) -> None:
    if not group:
        raise UsageError("--group is empty: give the name of a group")
    if partition:
        raise UsageError(f"--partition {partition[0]} cannot be used with --group: the members share all partitions")
    if not isinstance(position, Edge):
        raise UsageError(
            f"--from {start} cannot be used with --group, which continues from the committed offsets "
            "(without any, from beginning or end): use `minibroker groups reset-offsets` to change these"
        )


async def _consume_group(
    bootstrap: str,
    topics: Sequence[str],
    group: str,
    reset: Literal["earliest", "latest"],
    level: IsolationLevel,
    count: int | None,
    exit_at_end: bool,
    print_as: Formatter,
) -> int:
    await _partitions(bootstrap, topics, None, group)  # the consumer would wait for a topic that does not exist
    return await consume_group(
        bootstrap,
        topics,
        group,
        reset,
        level,
        count,
        exit_at_end,
        lambda batch, limit: _print(batch, print_as, limit),
        lambda consumed: note(f"{consumed} {plural(consumed, 'record')}"),
    )


async def _consume(
    bootstrap: str,
    topics: Sequence[str],
    start: StartPosition,
    numbers: list[int] | None,
    level: IsolationLevel,
    count: int | None,
    exit_at_end: bool,
    print_as: Formatter,
) -> int:
    partitions = await _partitions(bootstrap, topics, numbers)
    reset: Literal["earliest", "latest", "none"] = "none" if isinstance(start, AtOffset) else "earliest"
    async with Consumer(
        bootstrap,
        partitions=partitions,
        auto_offset_reset=reset,
        isolation_level=level,
        client_id="minibroker-cli",
        default_api_timeout_ms=API_TIMEOUT_MS,
        **security.chosen(),
    ) as consumer:
        ends = await consumer.end_offsets(partitions) if exit_at_end else {}
        await _seek(consumer, partitions, start)
        batches = consumer.batches()
        consumed = 0
        idle_since = time.monotonic()
        try:
            while not (exit_at_end and await _is_at_end(consumer, ends)):
                try:
                    async with asyncio.timeout(_IDLE_S if exit_at_end else None):
                        batch = await anext(batches)
                except TimeoutError:
                    if time.monotonic() >= idle_since + API_TIMEOUT_MS / 1_000:
                        raise ApiTimedOut(
                            f"no record arrived for {API_TIMEOUT_MS // 1_000} s, and the end of "
                            f"{' '.join(topics)} is not reached: check with `minibroker status` that brokers "
                            "run and partitions have leaders"
                        ) from None
                    continue
                consumed += _print(batch, print_as, None if count is None else count - consumed)
                if consumed == count:
                    break
                idle_since = time.monotonic()
        except CorruptBatch as error:
            topic, number = error.partition
            behind = "an offset behind it" if error.next_offset is None else error.next_offset
            raise MinibrokerError(
                f"{error.partition} {error.problem}. Try again, or skip it: `minibroker consume {topic} "
                f"--partition {number} --from {behind}`"
            ) from error
        except asyncio.CancelledError:
            note(f"{consumed} {plural(consumed, 'record')}")
            raise
    if exit_at_end and level == "read_committed" and consumed != count:
        await _note_open_transactions(bootstrap, ends)
    return consumed


async def _note_open_transactions(bootstrap: str, ends: Mapping[TopicPartition, int]) -> None:
    """Say on stderr where an open transaction was the end."""
    async with open_admin(bootstrap) as admin:
        asked: dict[TopicPartition, Literal["latest"]] = dict.fromkeys(ends, "latest")
        stable = await admin.list_offsets(asked, isolation_level="read_committed")
        latest = await admin.list_offsets(asked)
    for partition, end in ends.items():
        last_stable, high_watermark = stable[partition], latest[partition]
        if last_stable and high_watermark and last_stable.offset == end < high_watermark.offset:
            note(
                f"{partition} was read up to offset {end}, where an open transaction begins; the partition ends at "
                f"{high_watermark.offset}. See `minibroker transactions list --state Ongoing`"
            )


async def _partitions(
    bootstrap: str, topics: Sequence[str], numbers: list[int] | None, group: str | None = None
) -> list[TopicPartition]:
    """Return the requested partitions of each topic, or all. Raises BrokerError for a partition that does not exist."""
    partitions: list[TopicPartition] = []
    async with open_admin(bootstrap, topics=topics) as admin:
        for topic in topics:
            description = await describe_for(admin, topic, AclOperation.READ, group)
            partitions += [TopicPartition(topic, number) for number in checked_numbers(description, numbers)]
    return partitions


async def _seek(consumer: Consumer, partitions: list[TopicPartition], start: StartPosition) -> None:
    """Raises BrokerError for an offset outside a partition's log. The log end offset is allowed."""
    match start:
        case Edge.BEGINNING:
            pass
        case Edge.END:
            consumer.seek_to_end()
        case AtOffset(offset):
            ends = await consumer.end_offsets(partitions)
            for partition, first in (await consumer.beginning_offsets(partitions)).items():
                if not first <= offset <= ends[partition]:
                    raise BrokerError(
                        ErrorCode.OFFSET_OUT_OF_RANGE,
                        f"--from {offset}: the log of {partition} begins at {first} and ends at {ends[partition]}",
                    )
                consumer.seek(partition, offset)
        case Last(records):
            ends = await consumer.end_offsets(partitions)
            for partition, first in (await consumer.beginning_offsets(partitions)).items():
                consumer.seek(partition, max(first, ends[partition] - records))
        case AtTime(timestamp_ms):
            found = await consumer.offsets_for_times(dict.fromkeys(partitions, timestamp_ms))
            for partition, record in found.items():
                if record is None:
                    consumer.seek_to_end(partition)
                else:
                    consumer.seek(partition, record.offset)


async def _is_at_end(consumer: Consumer, ends: dict[TopicPartition, int]) -> bool:
    for partition, end in ends.items():
        if await consumer.position(partition) < end:
            return False
    return True


def _print(batch: ConsumerBatch, print_as: Formatter, limit: int | None) -> int:
    """Return the number of records written. Raises BrokenPipeError if the reader is gone, MinibrokerError for other
    failures such as a full disk."""
    records = batch.records()[:limit]
    try:
        left = memoryview(b"".join(map(print_as, records)))
        # With PYTHONUNBUFFERED=1, a signal such as Ctrl-C may end a blocked write in the middle.
        while left:
            left = left[sys.stdout.buffer.write(left) :]
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MinibrokerError(f"the output cannot be written: {error.strerror}") from error
    return len(records)
