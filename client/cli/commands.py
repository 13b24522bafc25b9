"""The client's commands, as one to mount."""

from __future__ import annotations

import typer

from minibroker.client.cli import topics
from minibroker.client.cli.bench import consume as bench_consume
from minibroker.client.cli.bench import latency as bench_latency
from minibroker.client.cli.bench import produce as bench_produce
from minibroker.client.cli.consume import consume
from minibroker.client.cli.produce import produce


def mount(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands to the application, and those that measure to its group `bench`."""
    app.add_typer(topics.app, name="topics")
    app.command()(produce)
    app.command()(consume)
    for command in (bench_produce.produce, bench_consume.consume, bench_latency.latency):
        bench.command()(command)
