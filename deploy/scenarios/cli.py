"""`minibroker scenario`: run, list, export and record scenario files."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    FAILURE,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    note,
    print_json,
    run,
)
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.director import Outcome
from minibroker.deploy.scenarios.model import Scenario
from minibroker.protocol.words import counted

MOST_SEEDS = 100_000

app = typer.Typer(help="Run files that describe a cluster, faults, and what must hold.", no_args_is_help=True)

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A scenario file, or a name that `minibroker scenario list` prints.")
]


def mount(application: typer.Typer) -> None:
    application.add_typer(app, name="scenario")


@app.command("run")
def run_scenario(
    file: FileArgument,
    virtual: Annotated[bool, typer.Option("--virtual", help="On virtual time, in one process. The default.")] = False,
    live: Annotated[bool, typer.Option("--live", help="On processes of this machine, started and removed.")] = False,
    containers: Annotated[
        bool, typer.Option("--containers", help="On containers, started and removed. `make image` builds their images.")
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="On virtual time: how many seeds, each another run.")
    ] = 1,
    first_seed: Annotated[int, typer.Option(min=1, help="The first seed; the same seed repeats a run.")] = 1,
    format: FormatOption = Format.TABLE,
) -> None:
    """Run a scenario and report which promises were kept. With several of --virtual, --live and --containers, all run
    and are compared.

    Exits with 1 if a promise was broken."""
    scenario = shelf.load(file)
    virtual = virtual or not (live or containers)
    if not virtual and seeds > 1:
        option, noun = ("--live", "processes") if live else ("--containers", "containers")
        raise UsageError(f"--seeds {seeds}: {noun} have no seed; leave {option} or --seeds out, or add --virtual")
    for runner, chosen in (("live", live), ("containers", containers), ("virtual", virtual)):
        if chosen:
            scenario.check_runner(runner)
    if scenario.is_undisturbed:
        example = f'at = "1 s" and do = "kill leader:{scenario.topics[0].name}-0"'
        _say(
            f"warning: {scenario.path}: no step does anything, so this run breaks nothing: add [[steps]] with {example}"
        )
    outcomes: list[Outcome] = []
    if virtual:
        outcomes += _on_virtual_time(scenario, range(first_seed, first_seed + seeds))
    if live:
        outcomes.append(_on_processes(scenario))
    if containers:
        outcomes.append(_on_containers(scenario))
    if format is Format.JSON:
        print_json(
            {"scenario": scenario.name, "kept": all(o.kept for o in outcomes), "runs": msgspec.to_builtins(outcomes)}
        )
    else:
        from minibroker.deploy.scenarios.report import report

        sys.stdout.write("\n".join(report(scenario, outcomes)) + "\n")
    if not all(outcome.kept for outcome in outcomes):
        raise typer.Exit(FAILURE)


def _on_virtual_time(scenario: Scenario, seeds: range) -> list[Outcome]:
    # Imported here, as the brokers come with it.
    from minibroker.deploy.scenarios.many import play_seeds

    began_s = time.monotonic()
    outcomes = list(play_seeds(scenario, seeds))
    note(f"{counted(len(outcomes), 'seed')} in {time.monotonic() - began_s:.1f} s")
    return outcomes


def _on_processes(scenario: Scenario) -> Outcome:
    from minibroker.deploy.scenarios.stages.live import play_live

    note("starting ZooKeeper and brokers ...")
    return run(play_live(scenario))


def _on_containers(scenario: Scenario) -> Outcome:
    from minibroker.deploy.scenarios.stages.containers import play_containers

    note("starting containers ...")
    return run(play_containers(scenario))


@app.command("list")
def list_scenarios(format: FormatOption = Format.TABLE) -> None:
    """List the library: classic failures by name."""
    found = {name: shelf.load(name).name for name in shelf.names()}
    if format is Format.JSON:
        print_json(found)
        return
    width = max(map(len, found))
    sys.stdout.write("".join(f"{name:{width}}  {title}\n" for name, title in found.items()))


@app.command("show")
def show(file: FileArgument) -> None:
    """Print a scenario file, to read it or to begin your own with it."""
    sys.stdout.write(shelf.load(file).source)


OutOption = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to this file. Default: stdout.")]


@app.command("export")
def export(file: FileArgument, out: OutOption = None) -> None:
    """Write a scenario as a module of tests for pytest."""
    from minibroker.deploy.scenarios.export import exported

    _write(exported(shelf.load(file)), out)


@app.command("record")
def record_scenario(data: DataOption = DEFAULT_DATA, out: OutOption = None) -> None:
    """Watch a local cluster until Ctrl-C, and write the commands that break and mend it as a scenario."""
    from minibroker.deploy.scenarios.record import record

    interrupted = threading.Event()
    former = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    try:
        _say("recording: kill, stop, pause, start and fault from other terminals; Ctrl-C ends the recording")
        text = record(LocalCluster(data), lambda: not interrupted.is_set(), _say)
    finally:
        signal.signal(signal.SIGINT, former)
    _write(text, out)


def _say(text: str) -> None:
    """Write to stderr, also if that is no terminal."""
    sys.stderr.write(pastable(text) + "\n")


def _write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}; give a file that can be written") from None
    _say(f"written to {out}")
