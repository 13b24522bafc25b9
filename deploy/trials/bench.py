"""`minibroker bench failover`, `rolling-restart` and `storage`: the write stalls of kills and restarts, and the cost of
log upkeep."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli.bench.produce import SizeOption
from minibroker.client.cli.bench.report import print_figures
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    data_given,
    note,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.trials.demo import running_cluster, temporary_directory
from minibroker.deploy.trials.failover import FailoverOutcome, Victims, play_rounds, restart_in_turn
from minibroker.deploy.trials.storage import SETTINGS, Figure, StorageBench

_TABLE = ("acknowledged", "lost", "duplicated", "out_of_order", "gap_median_ms", "gap_p95_ms", "gap_max_ms")


def failover(
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Number of rounds.")] = 5,
    who: Annotated[
        Victims,
        typer.Option(
            help="The victim: the leader of a partition (of each in turn), the controller, both, ZooKeeper, or "
            "all brokers."
        ),
    ] = Victims.LEADER,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Kill members of the local cluster under load and print the longest write stall.

    A record per millisecond is sent to each of three partitions. The stall is the longest time without an
    acknowledgement on any one partition, over all rounds. Killed members are started again, and the next round begins
    when every replica is in sync. Finally, all records are read back and compared."""
    bootstrap_servers(None, data)  # reports the remedy if there is no cluster, or it is down
    cluster = LocalCluster(data)
    try:
        outcome = run(_flawless(cluster, play_rounds(cluster, who, rounds, note)))
    except KeyboardInterrupt:
        note("start the killed members with `minibroker start all` or `minibroker start zookeeper`")
        raise
    figures = {"action": "failover", "who": who.value, "rounds": rounds, **outcome.figures()}
    if format is Format.JSON:
        print_json(
            {**figures, "failures": outcome.failures, "gaps": [_gap(number, outcome) for number in range(rounds)]}
        )
    else:
        print_figures({name: figures[name] for name in ("who", "rounds", *_TABLE)}, format)
    _require_flawless(cluster, outcome)


def rolling_restart(
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Restarts of each broker.")] = 1,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Restart every broker of the local cluster in turn under load and print the longest write stall.

    A record per millisecond is sent to each of three partitions. Each broker is stopped cleanly, and the next one when
    every replica is in sync again. The stall is the longest time without an acknowledgement on any one partition.
    Finally, all records are read back and compared."""
    bootstrap_servers(None, data)
    cluster = LocalCluster(data)
    try:
        outcome = run(_flawless(cluster, restart_in_turn(cluster, rounds, note)))
    except KeyboardInterrupt:
        note("start the stopped brokers with `minibroker start all`")
        raise
    figures = {"action": "rolling-restart", "restarts": len(outcome.rounds), **outcome.figures()}
    if format is Format.JSON:
        gaps = [_gap(number, outcome, "restarted") for number in range(len(outcome.rounds))]
        print_json({**figures, "failures": outcome.failures, "gaps": gaps})
    else:
        print_figures({name: figures[name] for name in ("restarts", *_TABLE)}, format)
    _require_flawless(cluster, outcome)


def _require_flawless(cluster: LocalCluster, outcome: FailoverOutcome) -> None:
    if not outcome.verdict.flawless:
        raise LaunchError(
            f"records were lost, duplicated, reordered or altered: this is a bug, please report it; topic "
            f"{outcome.topic} is kept, and the logs are in {cluster.directory}/logs"
        )


async def _flawless(cluster: LocalCluster, playing: Awaitable[FailoverOutcome]) -> FailoverOutcome:
    """Return the outcome. The topic is kept if something is wrong with it."""
    outcome = await playing
    if outcome.verdict.flawless:
        async with open_admin(cluster.bootstrap()) as admin:
            await admin.delete_topic(outcome.topic)
    return outcome


def _gap(number: int, outcome: FailoverOutcome, what: str = "killed") -> dict[str, object]:
    members, gap, whole_after_s, with_controller = outcome.rounds[number]
    return {
        what: members,
        "with_controller": with_controller,
        "partition": gap.partition,
        "gap_ms": round(gap.seconds * 1_000),
        "whole_after_ms": round(whole_after_s * 1_000),
    }


def storage(
    megabytes: Annotated[
        int, typer.Option(min=1, max=100_000, help="Size of the data to compact, recover and catch up with.")
    ] = 256,
    size: SizeOption = 1_000,
    segments: Annotated[int, typer.Option(min=2, max=100_000, help="Segments to delete at once.")] = 1_000,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of compaction.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Duration of each measurement beside compaction and deletion.")
    ] = 3,
    data: Annotated[
        # Not from MINIBROKER_DATA: this command starts its own cluster.
        Path | None,
        typer.Option("--data", metavar="DIR", callback=data_given, help="Use this directory and keep it afterwards."),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Measure compaction, recovery, catch-up and segment deletion on a new cluster.

    Operations that these slow down are also measured without them, in the same run."""
    let_signals_interrupt()
    with (
        temporary_directory(note, "bench") if data is None else nullcontext(data) as directory,
        running_cluster(directory, note, SETTINGS) as cluster,
    ):
        figures = run(_measure(StorageBench(cluster, megabytes, size, note), segments, rounds, seconds))
    rows = [
        {
            "what": figure.what,
            "figure": round(figure.figure, 2),
            "unit": figure.unit,
            "without": None if figure.baseline is None else round(figure.baseline, 2),
            "ratio": None if figure.ratio is None else round(figure.ratio, 2),
        }
        for figure in figures
    ]
    if format is Format.JSON:
        print_json(rows)
    else:
        print_table(list(rows[0]), [list(row.values()) for row in rows])


async def _measure(bench: StorageBench, segments: int, rounds: int, seconds: float) -> list[Figure]:
    return [
        *await bench.recovery_and_catch_up(),
        *await bench.compaction(rounds, seconds),
        *await bench.deletion(segments, seconds),
    ]
