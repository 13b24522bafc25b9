"""Mounts the client's commands, and `--version`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli import acls, brokers, configs, groups, reassign, topics, transactions, users
from minibroker.client.cli.bench import consume as bench_consume
from minibroker.client.cli.bench import durability as bench_durability
from minibroker.client.cli.bench import latency as bench_latency
from minibroker.client.cli.bench import produce as bench_produce
from minibroker.client.cli.elect import elect
from minibroker.client.cli.records.consume import consume
from minibroker.client.cli.records.produce import produce
from minibroker.client.cli.terminal import hints, security
from minibroker.client.cli.timelines.timeline import timeline


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"minibroker {importlib.metadata.version('minibroker')}\n")
        raise typer.Exit


def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
    command_config: Annotated[
        Path | None,
        typer.Option(
            "--command-config",
            metavar="FILE",
            envvar="MINIBROKER_COMMAND_CONFIG",
            help="Settings of connections, as security.protocol=SSL and ssl.truststore.location=ca.pem, one a line.",
        ),
    ] = None,
) -> None:
    # A docstring would become the help of `minibroker`.
    hints.remember_config(context)
    security.choose(command_config)


def mount(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands to the application, and the benchmarks to its group `bench`."""
    app.callback()(options)
    app.add_typer(topics.app, name="topics")
    app.add_typer(groups.app, name="groups")
    app.add_typer(transactions.app, name="transactions")
    app.add_typer(brokers.app, name="brokers")
    app.add_typer(reassign.app, name="reassign")
    app.add_typer(configs.app, name="configs")
    app.add_typer(acls.app, name="acls")
    app.add_typer(users.app, name="users")
    app.command()(produce)
    app.command()(consume)
    app.command()(elect)
    app.command()(timeline)
    for command in (bench_produce.produce, bench_consume.consume, bench_latency.latency, bench_durability.durability):
        bench.command()(command)
