"""`minibroker brokers`: the live brokers, and their log directories. `deploy` adds the commands for a local cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from minibroker.client.administering.log_dirs import LogDirDescription
from minibroker.client.administering.requests import ClusterDescription
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import (
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
from minibroker.client.errors import BrokersFailed

app = typer.Typer(
    help="Show brokers and their log directories; add and remove brokers of a local cluster.", no_args_is_help=True
)


@app.command(name="list")
def list_brokers(
    bootstrap: BootstrapOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """List the live brokers and mark the controller."""
    cluster = run(_cluster(bootstrap_servers(bootstrap, data)))
    rows = [broker._asdict() | {"controller": broker.id == cluster.controller_id} for broker in cluster.brokers]
    if format is Format.JSON:
        print_json(rows)
    else:
        print_table(("broker", "host", "port", "rack", "controller"), [tuple(row.values()) for row in rows])


@app.command(name="log-dirs")
def log_dirs(
    brokers: Annotated[
        list[int] | None, typer.Argument(metavar="[BROKER]...", help="Broker ids. Default: all.")
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the log directories of brokers: replicas, free space, and the reason if one is offline.

    Exit code 1 if a broker does not answer or is down; the others are printed."""
    found, failed = run(_describe(bootstrap_servers(bootstrap, data), brokers or None))
    errors = {} if failed is None else {broker: pastable(str(error)) for broker, error in sorted(failed.errors.items())}
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
            + [{"broker": broker, "log_dir": None, "error": error, **_UNKNOWN} for broker, error in errors.items()]
        )
    else:
        print_table(
            ("broker", "log directory", "replicas", "bytes", "usable bytes", "state"),
            [
                (
                    broker,
                    described.log_dir,
                    None if described.error else len(described.replicas),
                    None if described.error else sum(replica.size for replica in described.replicas.values()),
                    described.usable_bytes,
                    "online" if described.error is None else f"offline: {described.error}",
                )
                for broker, descriptions in found.items()
                for described in descriptions
            ]
            + [(broker, None, None, None, None, f"unknown: {error}") for broker, error in errors.items()],
        )
    if failed is not None:
        raise failed


_UNKNOWN = {"total_bytes": None, "usable_bytes": None, "replicas": None}


async def _cluster(bootstrap: str) -> ClusterDescription:
    async with open_admin(bootstrap) as admin:
        return await admin.describe_cluster()


async def _describe(
    bootstrap: str, brokers: list[int] | None
) -> tuple[dict[int, tuple[LogDirDescription, ...]], BrokersFailed | None]:
    """Return the descriptions, and the errors of brokers that failed. By default, brokers that have replicas and are
    down are included."""
    async with open_admin(bootstrap) as admin:
        if brokers is None:
            alive = {broker.id for broker in (await admin.describe_cluster()).brokers}
            topics = (await admin.describe_topics()).values()
            brokers = sorted(alive.union(*(one.replicas for topic in topics for one in topic.partitions)))
        try:
            return await admin.describe_log_dirs(brokers), None
        except BrokersFailed as failed:
            if not failed.results:
                raise
            return failed.results, failed
