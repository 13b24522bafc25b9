"""`minibroker elect`: preferred leader elections, and unclean ones for partitions without a leader."""

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
from minibroker.client.cli.topics import checked_numbers, checked_topic, described, open_admin, topic_options
from minibroker.client.errors import PartitionErrors
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.model import TopicPartition


def elect(
    preferred: Annotated[
        bool, typer.Option("--preferred", help="Elect the first replica of each partition, if it is in sync.")
    ] = False,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean",
            help="Elect any live replica for partitions without a leader. The records that it lacks are lost.",
        ),
    ] = False,
    all_partitions: Annotated[bool, typer.Option("--all", help="All topics.")] = False,
    topic: Annotated[str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Only this topic.")] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", min=0, help="Only this partition of the topic. May be repeated. Default: all."
        ),
    ] = None,
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Elect leaders: the preferred ones, or, as a last resort, any replica for partitions that have none.

    Prints the result for each partition; with --all, only for partitions that needed an election. Exit code 1 if an
    election failed."""
    if preferred == unclean:
        raise UsageError("choose an election: give either --preferred or --unclean")
    if all_partitions == (topic is not None):
        raise UsageError(
            "choose partitions: give either --all, or --topic TOPIC (with --partition for single partitions)"
        )
    if partition and topic is None:
        raise UsageError(f"--partition {partition[0]} needs a topic: add --topic TOPIC")
    servers = bootstrap_servers(bootstrap, data)
    partitions = None
    if topic is not None:
        checked_topic(topic)
        needs = [topic_options([topic], AclOperation.DESCRIBE), "--operation Alter --cluster"]
        numbers = checked_numbers(run(described(servers, topic, needs=needs)), partition)
        partitions = [TopicPartition(topic, number) for number in numbers]
    if unclean:
        where = "all partitions" if partitions is None else " ".join(map(str, partitions))
        confirm(
            f"Elect leaders for partitions without one ({where})? Acknowledged records that they lack will be lost.",
            yes,
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
        print_table(
            ("topic", "partition", "result"), [row[:3] for row in rows]
        )  # the reasons for failures are printed below
    else:
        sys.stdout.write("no partition needs an election\n")
    if failed is not None:
        raise failed


async def _elect(
    bootstrap: str, election_type: Literal["preferred", "unclean"], partitions: Sequence[TopicPartition] | None
) -> tuple[dict[TopicPartition, bool], PartitionErrors | None]:
    """Return the results, and the errors of partitions that failed."""
    async with open_admin(bootstrap) as admin:
        try:
            return await admin.elect_leaders(election_type, partitions), None
        except PartitionErrors as failed:
            return {p: bool(elected) for p, elected in failed.results.items()}, failed
