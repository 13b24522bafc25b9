"""The client's commands, as one to mount."""

from __future__ import annotations

import typer

from client.cli import bench, topics
from client.cli.consume import consume
from client.cli.produce import produce


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(topics.app, name="topics")
    app.command()(produce)
    app.command()(consume)
    app.add_typer(bench.app, name="bench")
