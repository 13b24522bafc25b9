"""`minibroker topics`: create, list, describe, alter, delete, delete-records."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.command_admin import CommandAdmin, Names
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    YesOption,
    bootstrap_servers,
    confirm,
    print_json,
    print_table,
    run,
    settings_of,
)
from minibroker.client.cli.topic_details import PartitionDetails, details_of, own_settings
from minibroker.client.errors import PartitionErrors, no_such_partition, topic_error
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import UP_TO_HIGH_WATERMARK
from minibroker.protocol.model import INTERNAL_TOPICS, TopicPartition, topic_name_problem
from minibroker.protocol.words import plural

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]

app = typer.Typer(
    help="Create, list, describe, alter and delete topics, or delete their oldest records.", no_args_is_help=True
)


def checked_topic(name: str) -> str:
    """Return the name. Raises UsageError with the rule if it is not legal."""
    problem = topic_name_problem(name)
    if problem is not None:
        raise UsageError(problem)
    return name


def open_admin(
    bootstrap: str,
    *,
    topics: Sequence[str] | None = None,
    groups: Sequence[str] = (),
    transactional_ids: Sequence[str] = (),
    users: Sequence[str] = (),
    needs: Sequence[str] = (),
) -> CommandAdmin:
    """`topics`, `groups`, `transactional_ids`, `users`: the names of the command line; they and `needs`: see
    `CommandAdmin`."""
    return CommandAdmin(bootstrap, Names(topics or (), groups, transactional_ids, users), needs)


def topic_options(topics: Sequence[str], *operations: AclOperation) -> str:
    """Return options for `acls add`: these operations on these topics."""
    words = [f"--operation {each.shown}" for each in operations] + [f"--topic {shlex.quote(name)}" for name in topics]
    return " ".join(words)


async def described(
    bootstrap: str, topic: str, operation: AclOperation = AclOperation.DESCRIBE, needs: Sequence[str] = ()
) -> TopicDescription:
    """As `describe_for`, with an admin client of its own. `needs`: see `CommandAdmin`."""
    async with open_admin(bootstrap, topics=[topic], needs=needs) as admin:
        return await describe_for(admin, topic, operation)


async def describe_for(admin: Admin, topic: str, operation: AclOperation, group: str | None = None) -> TopicDescription:
    """Return the topic's current description. Raises BrokerError at once if it does not exist, and one that names
    `operation`, which the command wants to do in the end in `group`, if the user may not know the topic."""
    try:
        return await admin.describe_topic(topic)
    except BrokerError as error:
        if error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED:
            raise topic_error(error.code, "", topic, security.principal(), operation, group) from None
        raise


@app.command()
def create(
    name: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", min=1, max=10_000, help="Number of partitions. Default: the brokers' num.partitions."
        ),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            "--replication-factor",
            "-r",
            min=1,
            max=1_000,
            help="Replicas of each partition. Default: the brokers' default.replication.factor.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="NAME=VALUE", help="A setting of the topic. May be repeated."),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Create a topic and wait until its partitions have leaders and all brokers know it."""
    configs = settings_of("--config", config or [], "min.insync.replicas=2")
    checked_topic(name)
    topic = run(_create(bootstrap_servers(bootstrap, data), name, partitions, replication_factor, configs))
    if format is Format.JSON:
        print_json(_summary(topic))
    else:
        count, factor = len(topic.partitions), _summary(topic)["replication_factor"]
        sys.stdout.write(f"created {name}: {count} {plural(count, 'partition')}, replication factor {factor}\n")


@app.command(name="list")
def list_topics(
    bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """List all topics."""
    topics = run(_describe_all(bootstrap_servers(bootstrap, data)))
    summaries = [_summary(topic) for topic in topics]
    if format is Format.JSON:
        print_json(summaries)
    else:
        print_table(
            ("topic", "partitions", "replication factor"),
            [(row["name"], row["partitions"], row["replication_factor"]) for row in summaries],
        )


@app.command()
def describe(
    name: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Name of the topic. Default: all topics.")] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the partitions and the settings of a topic.

    For each partition: leader, replicas, in-sync replicas, offline replicas (if any), first offset, offset after the
    last record, last stable offset (if an open transaction holds one back), and size in bytes on the leader. Without a
    name, all topics are shown; --format json then prints one object per line."""
    servers = bootstrap_servers(bootstrap, data)
    names = [checked_topic(name)] if name is not None else run(_names(servers))
    for number, each in enumerate(names):
        topic, details, settings = run(_describe(servers, each))
        if format is Format.JSON:
            print_json(_described(topic, details, settings))
            continue
        if name is None:
            sys.stdout.write(("\n" if number else "") + f"{each}:\n")
        _print_described(topic, details, settings)


def _described(
    topic: TopicDescription, details: dict[int, PartitionDetails], settings: dict[str, str | None] | None
) -> dict[str, object]:
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "internal": topic.is_internal,
        "configs": settings,
        "partitions": [p._asdict() | details[p.partition]._asdict() for p in topic.partitions],
    }


def _print_described(
    topic: TopicDescription, details: dict[int, PartitionDetails], settings: dict[str, str | None] | None
) -> None:
    columns: list[object] = [
        "partition",
        "leader",
        "leader epoch",
        "replicas",
        "isr",
        "offline",
        "start",
        "end",
        "last stable",
        "size",
    ]
    rows: list[list[object]] = []
    for p in topic.partitions:
        start, end, stable, sizes = details[p.partition]
        told = (start, end, stable, None if p.leader is None else sizes.get(p.leader))
        known = ["unknown" if each is None else each for each in told]
        rows.append([p.partition, p.leader, p.leader_epoch, p.replicas, p.isr, p.offline_replicas, *known])
    left_out = set()
    if not any(p.offline_replicas for p in topic.partitions):
        left_out.add(columns.index("offline"))
    if all(found.last_stable_offset == found.end_offset for found in details.values()):
        left_out.add(columns.index("last stable"))
    columns, *rows = ([cell for n, cell in enumerate(row) if n not in left_out] for row in (columns, *rows))
    print_table([str(column) for column in columns], rows)
    if settings is None:
        texts = [f"unknown: see `minibroker configs describe --topic {topic.name}`"]
    else:
        shown = {setting: "(secret)" if value is None else value for setting, value in settings.items()}
        texts = [f"{setting}={value}" for setting, value in shown.items()] or ["none of its own"]
    sys.stdout.write(pastable(f"settings: {' '.join(texts)}") + "\n")


@app.command()
def alter(
    name: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            max=10_000,
            help="The new number of partitions, higher than now. Records of a key may then go to another partition.",
        ),
    ] = None,
    config: Annotated[list[str] | None, typer.Option("--config", "-c", hidden=True)] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Add partitions to a topic and wait until they have leaders and all brokers know them."""
    checked_topic(name)
    if config:
        raise UsageError(
            f"--config {config[0]}: use `minibroker configs alter --topic {name} --set {config[0]}` to change settings"
        )
    if partitions is None:
        raise UsageError(
            "no change given: give --partitions N. To change settings, use `minibroker configs alter "
            f"--topic {name} --set NAME=VALUE`; to change replicas, `minibroker reassign`"
        )
    topic = run(_alter(bootstrap_servers(bootstrap, data), name, partitions))
    if format is Format.JSON:
        print_json(_summary(topic))
    else:
        sys.stdout.write(f"altered {name}: {len(topic.partitions)} {plural(len(topic.partitions), 'partition')}\n")


@app.command()
def delete(
    name: TopicArgument,
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Delete a topic with all its records."""
    checked_topic(name)
    servers = bootstrap_servers(bootstrap, data)
    run(described(servers, name, AclOperation.DELETE))
    confirm(f"Delete the topic {name} with all its records?", yes)
    run(_delete(servers, name))
    if format is Format.JSON:
        print_json({"deleted": name})
    else:
        sys.stdout.write(f"deleted {name}\n")


@app.command()
def delete_records(
    name: TopicArgument,
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="OFFSET",
            help="Delete records with a lower offset. end: delete all committed records.",
        ),
    ],
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="Only this partition. May be repeated. Default: all."),
    ] = None,
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Delete the oldest records of a topic's partitions.

    Returns when no replica that may become leader has them. Prints the new start of each partition, or the reason if
    its records were not deleted. Exit code 1 if a partition failed."""
    checked_topic(name)
    offset = _offset_of(before)
    servers = bootstrap_servers(bootstrap, data)
    topic = run(described(servers, name, AclOperation.DELETE))
    numbers = sorted(set(partition)) if partition else [one.partition for one in topic.partitions]
    which = "all records" if offset == UP_TO_HIGH_WATERMARK else f"the records before offset {offset}"
    where = "partition" if len(numbers) == 1 else "partitions"
    confirm(f"Delete {which} of {name}, {where} {', '.join(map(str, numbers))}?", yes)
    deleted, failed = run(_delete_records(servers, {TopicPartition(name, number): offset for number in numbers}))
    errors = failed.errors if failed is not None else {}
    rows = [
        (p.partition, deleted.get(p), pastable(str(errors[p])) if p in errors else None)
        for p in sorted({*deleted, *errors})
    ]
    if format is Format.JSON:
        print_json([{"partition": number, "low_watermark": low, "error": error} for number, low, error in rows])
    else:
        width = 2 if failed is None else 3
        print_table(("partition", "begins at", "error")[:width], [row[:width] for row in rows])
    if failed is not None:
        raise failed


async def named_partitions(admin: Admin, topics: list[str] | None, numbers: list[int] | None) -> list[TopicPartition]:
    """Return the partitions with these numbers, or all, of each topic, or of all. Raises BrokerError, TopicErrors."""
    partitions = []
    for name, topic in (await admin.describe_topics(topics)).items():
        partitions += [TopicPartition(name, number) for number in checked_numbers(topic, numbers)]
    return partitions


def checked_numbers(topic: TopicDescription, numbers: Sequence[int] | None) -> list[int]:
    """Return these numbers of partitions, or all, sorted. Raises BrokerError for one that the topic does not have."""
    known = [each.partition for each in topic.partitions]
    wanted = sorted(set(numbers or known))
    for number in wanted:
        if number not in known:
            raise no_such_partition(TopicPartition(topic.name, number), len(known))
    return wanted


async def _create(
    bootstrap: str, name: str, partitions: int | None, replication_factor: int | None, configs: dict[str, str]
) -> TopicDescription:
    needs = topic_options([name], AclOperation.CREATE, AclOperation.DESCRIBE)
    async with open_admin(bootstrap, needs=[needs]) as admin:
        await admin.create_topic(name, partitions=partitions, replication_factor=replication_factor, configs=configs)
        return await admin.describe_topic(name)


async def _alter(bootstrap: str, name: str, partitions: int) -> TopicDescription:
    async with open_admin(bootstrap, topics=[name]) as admin:
        await admin.create_partitions(name, partitions)
        return await admin.describe_topic(name)


async def _describe(
    bootstrap: str, name: str
) -> tuple[TopicDescription, dict[int, PartitionDetails], dict[str, str | None] | None]:
    async with open_admin(bootstrap, topics=[name]) as admin:
        topic = await describe_for(admin, name, AclOperation.DESCRIBE)
        return topic, *await asyncio.gather(details_of(admin, topic), own_settings(admin, name))


async def _names(bootstrap: str) -> list[str]:
    """Return all topic names, users' topics first."""
    async with open_admin(bootstrap) as admin:
        return sorted(await admin.list_topics(internal=True), key=lambda name: (name in INTERNAL_TOPICS, name))


async def _describe_all(bootstrap: str) -> list[TopicDescription]:
    async with open_admin(bootstrap) as admin:
        return list((await admin.describe_topics()).values())


async def _delete(bootstrap: str, name: str) -> None:
    async with open_admin(bootstrap, topics=[name]) as admin:
        await admin.delete_topic(name)


async def _delete_records(
    bootstrap: str, offsets: dict[TopicPartition, int]
) -> tuple[dict[TopicPartition, int], PartitionErrors | None]:
    """Return the new start of each partition, and the errors of partitions that failed."""
    topics = sorted({partition.topic for partition in offsets})
    async with open_admin(bootstrap, needs=[topic_options(topics, AclOperation.DELETE)]) as admin:
        try:
            return await admin.delete_records(offsets), None
        except PartitionErrors as failed:
            if not failed.results:
                raise
            return failed.results, failed


def _offset_of(text: str) -> int:
    if text == "end":
        return UP_TO_HIGH_WATERMARK
    if text.isascii() and text.isdecimal() and int(text) < 2**63:
        return int(text)
    raise UsageError(f"--before {text!r}: give an offset such as 42, or end")


def _summary(topic: TopicDescription) -> dict[str, object]:
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "internal": topic.is_internal,
        "partitions": len(topic.partitions),
        "replication_factor": max((len(partition.replicas) for partition in topic.partitions), default=0),
    }
