"""`minibroker brokers`: what is on the disks of each."""

from __future__ import annotations

from typing import Annotated

import typer

from minibroker.client.admin import LogDirDescription
from minibroker.client.cli.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import open_admin

app = typer.Typer(help="Look at the brokers.", no_args_is_help=True)


@app.callback()
def group() -> None:
    # With it, a group of one command stays a group.
    ...


@app.command(name="log-dirs")
def log_dirs(
    brokers: Annotated[list[int] | None, typer.Argument(metavar="[BROKER]...", help="Default: all.")] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the log directories of brokers: their replicas, the room on their disks, and which are offline."""
    found = run(_describe(bootstrap_servers(bootstrap, data), brokers or None))
    if format is Format.JSON:
        print_json(
            [
                {
                    "broker": broker,
                    "log_dir": described.log_dir,
                    "error": described.error,
                    "total_bytes": described.total_bytes,
                    "usable_bytes": described.usable_bytes,
                    "replicas": [
                        {"topic": name.topic, "partition": name.partition, **replica._asdict()}
                        for name, replica in described.replicas.items()
                    ],
                }
                for broker, descriptions in found.items()
                for described in descriptions
            ]
        )
    else:
        print_table(
            ("broker", "log directory", "replicas", "bytes", "usable bytes", "state"),
            [
                (
                    broker,
                    described.log_dir,
                    len(described.replicas),
                    sum(replica.size for replica in described.replicas.values()),
                    described.usable_bytes,
                    "online" if described.error is None else f"offline: {described.error}",
                )
                for broker, descriptions in found.items()
                for described in descriptions
            ],
        )


async def _describe(bootstrap: str, brokers: list[int] | None) -> dict[int, tuple[LogDirDescription, ...]]:
    async with open_admin(bootstrap) as admin:
        return await admin.describe_log_dirs(brokers)
