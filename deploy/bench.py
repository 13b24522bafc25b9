"""`minibroker bench failover`: how long writes stall when a member of the local cluster is killed."""

from __future__ import annotations

from typing import Annotated

import typer

from minibroker.client.cli.bench.report import print_figures
from minibroker.client.cli.output import (
    DEFAULT_DATA,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    note,
    print_json,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.failover import FailoverOutcome, Victims, play_rounds
from minibroker.deploy.local_cluster import LocalCluster

_TABLE = ("acknowledged", "lost", "duplicated", "out_of_order", "gap_median_ms", "gap_p95_ms", "gap_max_ms")


def failover(
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="How many rounds.")] = 5,
    who: Annotated[
        Victims,
        typer.Option(
            help="What is killed: the leader of a partition (of each in turn), the controller, both, ZooKeeper, or all "
            "brokers."
        ),
    ] = Victims.LEADER,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Kill members of the local cluster while a record a millisecond is sent to each of three partitions.

    Prints the longest time without an acknowledgement on any one partition, over the rounds. What was killed is
    started again, and the next round begins once every replica is in sync. In the end all is read back and compared.
    """
    bootstrap_servers(None, data)  # says what to do where there is no cluster, or it is down
    cluster = LocalCluster(data)
    try:
        outcome = run(_play(cluster, who, rounds))
    except KeyboardInterrupt:
        note("start what is dead now with `minibroker start all`, or `minibroker start zookeeper`")
        raise
    figures = {"action": "failover", "who": who.value, "rounds": rounds, **outcome.figures()}
    if format is Format.JSON:
        print_json(
            {**figures, "failures": outcome.failures, "gaps": [_gap(number, outcome) for number in range(rounds)]}
        )
    else:
        print_figures({name: figures[name] for name in ("who", "rounds", *_TABLE)}, format)
    if not outcome.verdict.flawless:
        raise LaunchError(
            f"records were lost, duplicated, reordered or altered: this is a bug, please report it; topic "
            f"{outcome.topic} is kept, and the logs are in {cluster.directory}/logs"
        )


async def _play(cluster: LocalCluster, who: Victims, rounds: int) -> FailoverOutcome:
    outcome = await play_rounds(cluster, who, rounds, note)
    if outcome.verdict.flawless:
        async with open_admin(cluster.bootstrap()) as admin:
            await admin.delete_topic(outcome.topic)
    return outcome


def _gap(number: int, outcome: FailoverOutcome) -> dict[str, object]:
    killed, gap, whole_after_s = outcome.rounds[number]
    return {
        "killed": killed,
        "partition": gap.partition,
        "gap_ms": round(gap.seconds * 1_000),
        "whole_after_ms": round(whole_after_s * 1_000),
    }
