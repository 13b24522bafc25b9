"""`minibroker elect`: leaders by request, where they should be or where there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

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
)
from minibroker.client.cli.topics import checked_topic, described, open_admin
from minibroker.client.errors import PartitionErrors
from minibroker.protocol.model import TopicPartition


def elect(
    preferred: Annotated[
        bool, typer.Option("--preferred", help="The first of each partition's replicas leads, if it is in sync.")
    ] = False,
    unclean: Annotated[
        bool,
        typer.Option("--unclean", help="A partition without a leader gets one: what that replica lacks is lost."),
    ] = False,
    all_partitions: Annotated[bool, typer.Option("--all", help="In all topics.")] = False,
    topic: Annotated[str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="In this topic.")] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="Only this partition of it. May be repeated. Default: all."),
    ] = None,
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Elect leaders: the preferred ones, or, as the last resort, of partitions that have none.

    Prints what came of it for each partition; with --all, for those that needed an election.
    Exit code 1 where any failed."""
    if preferred == unclean:
        raise UsageError("say which election is meant: either --preferred or --unclean")
    if all_partitions == (topic is not None):
        raise UsageError("say where: either --all, or --topic TOPIC with the --partition that is meant, if not all")
    if partition and topic is None:
        raise UsageError(f"--partition {partition[0]}: of which topic? Give --topic TOPIC, too")
    servers = bootstrap_servers(bootstrap, data)
    partitions = None
    if topic is not None:
        checked_topic(topic)
        numbers = partition or [one.partition for one in run(described(servers, topic)).partitions]
        partitions = [TopicPartition(topic, number) for number in sorted(set(numbers))]
    if unclean:
        where = "all partitions" if partitions is None else " ".join(map(str, partitions))
        confirm(
            f"Elect leaders that may lack acknowledged records, which are lost then, where none leads ({where})?", yes
        )
    results, failed = run(_elect(servers, "preferred" if preferred else "unclean", partitions))
    errors = {} if failed is None else {p: pastable(str(error)) for p, error in failed.errors.items()}
    rows = [
        (p.topic, p.partition, "failed" if p in errors else "elected" if results[p] else "not needed", errors.get(p))
        for p in sorted({*results, *errors})
    ]
    if format is Format.JSON:
        names = ("topic", "partition", "result", "error")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif rows:
        print_table(("topic", "partition", "result"), [row[:3] for row in rows])  # why one failed is said below
    else:
        sys.stdout.write("no partition needs an election\n")
    if failed is not None:
        raise failed


async def _elect(
    bootstrap: str, election_type: Literal["preferred", "unclean"], partitions: Sequence[TopicPartition] | None
) -> tuple[dict[TopicPartition, bool], PartitionErrors | None]:
    """What came of it where it was in order; and what went wrong elsewhere."""
    async with open_admin(bootstrap) as admin:
        try:
            return await admin.elect_leaders(election_type, partitions), None
        except PartitionErrors as failed:
            return {p: bool(elected) for p, elected in failed.results.items()}, failed
