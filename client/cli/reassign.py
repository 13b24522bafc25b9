"""`minibroker reassign`: move replicas between brokers, with Kafka's JSON files (kafka-reassign-partitions)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.movements import Movement, movement, progress, sizes_of
from minibroker.client.administering.reassignment import PartitionReassignment, may_have_begun
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli import throttling
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    FAILURE,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    inform,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import checked_topic, open_admin, topic_options
from minibroker.client.errors import BrokersFailed, PartitionErrors
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted

Assignments = Mapping[TopicPartition, tuple[int, ...]]
Reassignments = Mapping[TopicPartition, PartitionReassignment]

app = typer.Typer(help="Move the replicas of partitions to other brokers.", no_args_is_help=True)

_FILE_HELP = "A file as printed by `generate --format json`; -: standard input."
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help=_FILE_HELP)]
PreserveOption = Annotated[
    bool, typer.Option("--preserve-throttles", help="Keep the throttle of `execute --throttle`.")
]


class _Entry(msgspec.Struct, omit_defaults=True):
    topic: str
    partition: int
    replicas: list[int]
    log_dirs: list[str] | None = None
    """Kafka's tool writes "any" for each replica. The broker chooses the directory."""


class _File(msgspec.Struct):
    partitions: list[_Entry]
    version: Literal[1] = 1


@app.command()
def generate(
    brokers: Annotated[
        str, typer.Option("--brokers", metavar="ID,ID,...", help="The brokers that should have the replicas.")
    ],
    topic: Annotated[list[str], typer.Option("--topic", metavar="TOPIC", help="A topic to spread. May be repeated.")],
    replication_factor: Annotated[
        int | None,
        typer.Option("--replication-factor", "-r", min=1, help="Replicas of each partition. Default: unchanged."),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Propose an assignment that spreads the topics' replicas over the brokers. Changes nothing.

    With --format json, prints a file for `minibroker reassign execute`."""
    ids = _broker_ids(brokers)
    names = [checked_topic(name) for name in dict.fromkeys(topic)]
    described, alive = run(_describe(bootstrap_servers(bootstrap, data), names))
    for broker_id in ids:
        if broker_id not in alive:
            raise MinibrokerError(
                f"--brokers {brokers}: broker {broker_id} is not alive (alive: "
                f"{', '.join(map(str, alive))}): start it, or name other brokers"
            )
    current = _assignments(described.values())
    proposed: dict[TopicPartition, tuple[int, ...]] = {}
    for one in described.values():
        factor = replication_factor or max(len(p.replicas) for p in one.partitions)
        if factor > len(ids):
            raise UsageError(
                f"--brokers {brokers} names {counted(len(ids), 'broker')}, but {one.name} needs "
                f"{counted(factor, 'replica')} of each partition: name at least as many, or give a lower "
                "--replication-factor"
            )
        spread_out = spread([p.partition for p in one.partitions], factor, ids)
        proposed |= {TopicPartition(one.name, number): replicas for number, replicas in spread_out.items()}
    if format is Format.JSON:
        print_json(_as_file(proposed))
    else:
        print_table(
            ("topic", "partition", "replicas", "proposed"),
            [(p.topic, p.partition, current[p], proposed[p]) for p in sorted(proposed)],
        )


@app.command(name="list")
def list_reassignments(
    bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """List the reassignments in progress with the bytes that are copied, also those that were started elsewhere."""
    under_way, moved = run(_list(bootstrap_servers(bootstrap, data)))
    if format is Format.JSON:
        print_json(
            [
                {
                    "topic": p.topic,
                    "partition": p.partition,
                    "replicas": one.replicas,
                    "adding_replicas": one.adding_replicas,
                    "removing_replicas": one.removing_replicas,
                    **_bytes(moved.get(p)),
                }
                for p, one in under_way.items()
            ]
        )
    else:
        print_table(
            ("topic", "partition", "replicas", "adding", "removing", "copied"),
            [(p.topic, p.partition, *one, _copied(moved.get(p))) for p, one in under_way.items()],
        )


@app.command()
def execute(
    file: FileArgument,
    throttle: Annotated[
        int | None,
        typer.Option(
            "--throttle",
            metavar="BYTES",
            min=1,
            help="Bytes per second that each broker sends, and receives, at most. `verify` removes the limit at the "
            "end. Default: unlimited, or as it is.",
        ),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Start the reassignments. They continue by themselves; `minibroker reassign verify` shows the progress.

    Repeat it with another --throttle to change the rate.

    Prints the previous replicas; with --format json, a file that reverts the change. If some reassignments are refused,
    the others start nevertheless: those are printed, with those that may have started, and the exit code is 1."""
    wanted = _read(file)
    before, failed = run(_execute(bootstrap_servers(bootstrap, data), wanted, throttle, file))
    errors = {} if failed is None else failed.errors
    began = {p: before[p] for p in sorted(before) if p not in errors or may_have_begun(errors[p])}
    if format is Format.JSON and (began or failed is None):
        print_json(_as_file(began))
    elif began:
        print_table(
            ("topic", "partition", "replicas before", "replicas"),
            [(p.topic, p.partition, replicas, wanted[p]) for p, replicas in began.items()],
        )
    if failed is not None:
        raise failed


@app.command()
def verify(
    file: FileArgument,
    preserve_throttles: PreserveOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the progress of reassignments. Exit code 1 until all are complete. Removes their throttle then."""
    wanted = _read(file)
    current, under_way, moved = run(_look(bootstrap_servers(bootstrap, data), wanted, preserve_throttles))
    states = {p: _state(wanted[p], current.get(p, ()), under_way.get(p)) for p in sorted(wanted)}
    if format is Format.JSON:
        print_json(
            [
                {
                    "topic": p.topic,
                    "partition": p.partition,
                    "state": state,
                    "replicas": current.get(p, ()),
                    "adding_replicas": under_way[p].adding_replicas if p in under_way else (),
                    "removing_replicas": under_way[p].removing_replicas if p in under_way else (),
                    **_bytes(moved.get(p)),
                }
                for p, state in states.items()
            ]
        )
    else:
        none = PartitionReassignment((), (), ())
        print_table(
            ("topic", "partition", "state", "replicas", "adding", "removing", "copied"),
            [
                (p.topic, p.partition, state, current.get(p, ()), *under_way.get(p, none)[1:], _copied(moved.get(p)))
                for p, state in states.items()
            ],
        )
    if any(state != COMPLETE for state in states.values()):
        raise typer.Exit(FAILURE)


@app.command()
def cancel(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=_FILE_HELP)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Cancel all reassignments in progress.")] = False,
    preserve_throttles: PreserveOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Cancel the reassignments of the partitions in the file, or all: each returns to its previous replicas.

    If some cannot be cancelled, the others are cancelled and printed, and the exit code is 1. A partition that is not
    being reassigned is not an error."""
    if (file is None) != all_:
        raise UsageError("give either FILE or --all")
    named = None if file is None else sorted(_read(file))
    partitions, failed = run(_cancel(bootstrap_servers(bootstrap, data), named, preserve_throttles))
    errors = {} if failed is None else failed.errors
    idle = [p for p, e in errors.items() if isinstance(e, BrokerError) and e.code is _NOTHING_UNDER_WAY]
    cancelled = [p for p in partitions if p not in errors]
    if format is Format.JSON:
        if cancelled or len(idle) == len(errors):
            print_json([{"topic": p.topic, "partition": p.partition} for p in cancelled])
    else:
        if cancelled:
            sys.stdout.write(f"cancelled {', '.join(map(str, cancelled))}\n")
        if idle:
            sys.stdout.write(f"not being reassigned: {', '.join(map(str, idle))}\n")
        if not partitions:
            sys.stdout.write("no partition is being reassigned: nothing to cancel\n")
    if len(idle) < len(errors):
        raise PartitionErrors({p: error for p, error in errors.items() if p not in idle})


# --- Requests ----------------------------------------------------------------------------------------------------


async def _describe(bootstrap: str, topics: Sequence[str]) -> tuple[dict[str, TopicDescription], list[int]]:
    """Return the topics, and the ids of the live brokers."""
    async with open_admin(bootstrap, topics=topics) as admin:
        return await admin.describe_topics(topics), [b.id for b in (await admin.describe_cluster()).brokers]


async def _alter(admin: Admin, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> PartitionErrors | None:
    """Return the errors of partitions that failed."""
    try:
        await admin.alter_partition_reassignments(wanted)
    except PartitionErrors as failed:
        return failed
    return None


async def _execute(
    bootstrap: str, wanted: Assignments, throttle: int | None, file: Path
) -> tuple[Assignments, PartitionErrors | None]:
    """Return the previous replicas, and the errors of partitions that failed."""
    cluster, topics = "--operation Alter --cluster", _topics(wanted)
    needs = [topic_options(topics, AclOperation.DESCRIBE), cluster]
    if throttle is not None:
        needs = [
            topic_options(topics, AclOperation.ALTER_CONFIGS, AclOperation.DESCRIBE_CONFIGS, AclOperation.DESCRIBE)
        ]
        needs.append(f"{cluster} --operation AlterConfigs --operation DescribeConfigs")
    async with open_admin(bootstrap, topics=topics, needs=needs) as admin:
        before = await _current(admin, wanted)
        if throttle is not None and await throttling.begin(admin, before, wanted, throttle):
            verify = f"`minibroker reassign verify {shlex.quote(str(file))}`"
            inform(f"the throttle of {throttle:,} bytes/s stays on, also after the move, until {verify} removes it")
        return before, await _alter(admin, wanted)


async def _cancel(
    bootstrap: str, named: list[TopicPartition] | None, preserve_throttles: bool
) -> tuple[list[TopicPartition], PartitionErrors | None]:
    """Return the partitions, and the errors of those that failed. None: all reassignments in progress."""
    async with open_admin(bootstrap) as admin:
        partitions = sorted(await admin.list_partition_reassignments()) if named is None else named
        failed = await _alter(admin, dict.fromkeys(partitions))
        if not preserve_throttles:
            await _unthrottle(admin, partitions)
        return partitions, failed


async def _list(bootstrap: str) -> tuple[Reassignments, dict[TopicPartition, Movement]]:
    async with open_admin(bootstrap) as admin:
        under_way = dict(sorted((await admin.list_partition_reassignments()).items()))
        return under_way, await _movements(admin, under_way)


async def _look(
    bootstrap: str, wanted: Assignments, preserve_throttles: bool
) -> tuple[Assignments, Reassignments, dict[TopicPartition, Movement]]:
    needs = [topic_options(_topics(wanted), AclOperation.DESCRIBE), "--operation Describe --cluster"]
    async with open_admin(bootstrap, topics=_topics(wanted), needs=needs) as admin:
        under_way = await admin.list_partition_reassignments(wanted)
        moved = await _movements(admin, under_way)
        if not under_way and not preserve_throttles:
            await _unthrottle(admin, wanted)
        return await _current(admin, wanted), under_way, moved


async def _unthrottle(admin: Admin, partitions: Iterable[TopicPartition]) -> None:
    if await throttling.end(admin, {p.topic for p in partitions}):
        inform("the throttle is removed")


async def _movements(admin: Admin, under_way: Reassignments) -> dict[TopicPartition, Movement]:
    """Return the progress in bytes. Brokers that do not answer make it unknown."""
    if not under_way:
        return {}
    topics = await admin.describe_topics()
    leaders = {TopicPartition(t.name, p.partition): p.leader for t in topics.values() for p in t.partitions}
    try:
        sizes = sizes_of(await admin.describe_log_dirs())
    except BrokersFailed as failed:
        sizes = sizes_of(failed.results)
    return {p: movement(p, one, leaders.get(p), sizes) for p, one in under_way.items()}


def _topics(wanted: Assignments) -> list[str]:
    return sorted({partition.topic for partition in wanted})


async def _current(admin: Admin, wanted: Assignments) -> dict[TopicPartition, tuple[int, ...]]:
    """Raises TopicErrors for topics that do not exist."""
    described = await admin.describe_topics({p.topic for p in wanted})
    return {p: replicas for p, replicas in _assignments(described.values()).items() if p in wanted}


# --- Files and proposals -----------------------------------------------------------------------------------------


COMPLETE = "complete"
_NOTHING_UNDER_WAY = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


def _bytes(one: Movement | None) -> dict[str, int | None]:
    return {"copied_bytes": one.moved if one else None, "total_bytes": one.total if one else None}


def _copied(one: Movement | None) -> str | None:
    return None if one is None or one.moved is None else str(progress([one]))


def _state(wanted: tuple[int, ...], current: tuple[int, ...], under_way: PartitionReassignment | None) -> str:
    if under_way is not None:
        target = tuple(b for b in under_way.replicas if b not in under_way.removing_replicas)
        return "in progress" if target == wanted else "in progress to other replicas"
    return COMPLETE if current == wanted else "not begun" if current else "no such partition"


def spread(partitions: Sequence[int], factor: int, brokers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Place the first replicas round-robin over the brokers, and the others behind them at a distance that grows with
    each round (Kafka's assignReplicasToBrokersRackUnaware, without its random start)."""
    count = len(brokers)
    spread_out: dict[int, tuple[int, ...]] = {}
    for index, partition in enumerate(partitions):
        first, shift = index % count, index // count
        followers = ((first + 1 + (shift + n) % (count - 1)) % count for n in range(factor - 1))
        spread_out[partition] = tuple(brokers[position] for position in (first, *followers))
    return spread_out


def _assignments(topics: Iterable[TopicDescription]) -> dict[TopicPartition, tuple[int, ...]]:
    return {TopicPartition(topic.name, p.partition): p.replicas for topic in topics for p in topic.partitions}


def _as_file(assignments: Assignments) -> _File:
    return _File([_Entry(p.topic, p.partition, list(replicas)) for p, replicas in sorted(assignments.items())])


def _read(file: Path) -> dict[TopicPartition, tuple[int, ...]]:
    """Raises UsageError with the problem, OSError."""
    text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        entries = msgspec.json.decode(text, type=_File).partitions
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        example = '{"version": 1, "partitions": [{"topic": "orders", "partition": 0, "replicas": [1, 2]}]}'
        raise UsageError(f"{file} is not a list of reassignments ({error}): give one such as {example}") from error
    wanted: dict[TopicPartition, tuple[int, ...]] = {}
    for entry in entries:
        partition = TopicPartition(checked_topic(entry.topic), entry.partition)
        if partition in wanted:
            raise UsageError(f"{file} names {partition} more than once: name it once")
        if not 0 <= entry.partition < 2**31 or not all(-(2**31) <= b < 2**31 for b in entry.replicas):
            raise UsageError(f"{file}: {partition} with replicas {entry.replicas}: give numbers below 2147483648")
        for log_dir in entry.log_dirs or ():
            if log_dir != "any":
                raise UsageError(
                    f"{file}: {partition} with log_dirs {log_dir!r}: the broker chooses the directory: write "
                    '"any", or leave log_dirs out'
                )
        if entry.log_dirs is not None and len(entry.log_dirs) != len(entry.replicas):
            raise UsageError(
                f"{file}: {partition} with {len(entry.log_dirs)} log_dirs for "
                f"{counted(len(entry.replicas), 'replica')}: write "
                '"any" for each of the replicas, or leave log_dirs out'
            )
        wanted[partition] = tuple(entry.replicas)
    if not wanted:
        raise UsageError(f"{file} names no partition")
    return wanted


def _broker_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) < 2**31 for part in parts):
        raise UsageError(f"--brokers {text!r}: ids such as 1,2,3 are expected")
    if len(set(parts)) != len(parts):
        raise UsageError(f"--brokers {text!r}: name each broker once")
    return [int(part) for part in parts]
