"""`minibroker topics`: create, list, describe, delete, delete-records."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from minibroker.client.admin import Admin, TopicDescription
from minibroker.client.cli.output import (
    API_TIMEOUT_MS,
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
from minibroker.protocol.messages import UP_TO_HIGH_WATERMARK
from minibroker.protocol.model import TopicPartition, topic_name_problem

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]

app = typer.Typer(help="Create, list, describe and delete topics, and their oldest records.", no_args_is_help=True)


def checked_topic(name: str) -> str:
    """The name, if it is legal. Raises UsageError with the rule."""
    problem = topic_name_problem(name)
    if problem is not None:
        raise UsageError(problem)
    return name


def open_admin(bootstrap: str) -> Admin:
    return Admin(bootstrap, client_id="minibroker-cli", default_api_timeout_ms=API_TIMEOUT_MS)


async def described(bootstrap: str, topic: str) -> TopicDescription:
    """What the topic looks like now. Raises BrokerError at once where there is none."""
    async with open_admin(bootstrap) as admin:
        return await admin.describe_topic(topic)


@app.command()
def create(
    name: TopicArgument,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, max=10_000, help="Default: the brokers' num.partitions.")
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
    """Create a topic, and wait until its partitions have leaders and the brokers know it."""
    configs = settings_of("--config", config or [], "min.insync.replicas=2")
    checked_topic(name)
    topic = run(_create(bootstrap_servers(bootstrap, data), name, partitions, replication_factor, configs))
    if format is Format.JSON:
        print_json(_summary(topic))
    else:
        summary = _summary(topic)
        sys.stdout.write(
            f"created {name}: {summary['partitions']} partitions, replication factor {summary['replication_factor']}\n"
        )


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
    name: TopicArgument,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show leader, replicas and in-sync replicas of each partition of a topic."""
    checked_topic(name)
    topic = run(described(bootstrap_servers(bootstrap, data), name))
    if format is Format.JSON:
        print_json(
            {
                "name": topic.name,
                "topic_id": topic.topic_id,
                "internal": topic.is_internal,
                "partitions": [partition._asdict() for partition in topic.partitions],
            }
        )
    else:
        print_table(
            ("partition", "leader", "leader epoch", "replicas", "isr"),
            [(p.partition, p.leader, p.leader_epoch, p.replicas, p.isr) for p in topic.partitions],
        )


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
    run(described(servers, name))
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
            help="Records with a lower offset are deleted; end: all that are committed.",
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
    """Delete the oldest records of a topic's partitions, for good, and wait until no replica that may lead has them.

    Prints where each partition begins now."""
    checked_topic(name)
    offset = _offset_of(before)
    servers = bootstrap_servers(bootstrap, data)
    topic = run(described(servers, name))
    numbers = sorted(set(partition)) if partition else [one.partition for one in topic.partitions]
    which = "all records" if offset == UP_TO_HIGH_WATERMARK else f"the records before offset {offset}"
    where = "partition" if len(numbers) == 1 else "partitions"
    confirm(f"Delete {which} of {name}, {where} {', '.join(map(str, numbers))}?", yes)
    begin = run(_delete_records(servers, {TopicPartition(name, number): offset for number in numbers}))
    if format is Format.JSON:
        print_json([{"partition": number, "low_watermark": offset} for (_, number), offset in sorted(begin.items())])
    else:
        print_table(("partition", "begins at"), [(number, offset) for (_, number), offset in sorted(begin.items())])


async def _create(
    bootstrap: str, name: str, partitions: int | None, replication_factor: int | None, configs: dict[str, str]
) -> TopicDescription:
    async with open_admin(bootstrap) as admin:
        await admin.create_topic(name, partitions=partitions, replication_factor=replication_factor, configs=configs)
        return await admin.describe_topic(name)


async def _describe_all(bootstrap: str) -> list[TopicDescription]:
    async with open_admin(bootstrap) as admin:
        return list((await admin.describe_topics()).values())


async def _delete(bootstrap: str, name: str) -> None:
    async with open_admin(bootstrap) as admin:
        await admin.delete_topic(name)


async def _delete_records(bootstrap: str, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    async with open_admin(bootstrap) as admin:
        return await admin.delete_records(offsets)


def _offset_of(text: str) -> int:
    if text == "end":
        return UP_TO_HIGH_WATERMARK
    if text.isascii() and text.isdecimal() and int(text) < 2**63:
        return int(text)
    raise UsageError(f"--before {text!r}: an offset such as 42, or end, is expected")


def _summary(topic: TopicDescription) -> dict[str, object]:
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "internal": topic.is_internal,
        "partitions": len(topic.partitions),
        "replication_factor": max((len(partition.replicas) for partition in topic.partitions), default=0),
    }
