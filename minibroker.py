"""The public face of minibroker: `from minibroker import Admin, Consumer, Producer`, and the command `minibroker`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from client import (
    Admin,
    ApiTimedOut,
    BrokerDescription,
    BrokerError,
    BufferFull,
    ClientCrashed,
    Closed,
    ClusterDescription,
    Consumer,
    ConsumerBatch,
    CorruptBatch,
    Delivery,
    DeliveryFailed,
    DeliveryTimedOut,
    ErrorCode,
    FailedRecord,
    InvalidSetting,
    LogTruncated,
    MinibrokerError,
    NetworkError,
    NewTopic,
    OffsetAndTimestamp,
    PartitionDescription,
    Partitioner,
    Producer,
    Record,
    RecordMetadata,
    TopicDescription,
    TopicErrors,
    TopicPartition,
    WithoutKey,
    crc32,
    murmur2,
)

if TYPE_CHECKING:
    import typer

__all__ = [
    "Admin",
    "ApiTimedOut",
    "BrokerDescription",
    "BrokerError",
    "BufferFull",
    "ClientCrashed",
    "Closed",
    "ClusterDescription",
    "Consumer",
    "ConsumerBatch",
    "CorruptBatch",
    "Delivery",
    "DeliveryFailed",
    "DeliveryTimedOut",
    "ErrorCode",
    "FailedRecord",
    "InvalidSetting",
    "LogTruncated",
    "MinibrokerError",
    "NetworkError",
    "NewTopic",
    "OffsetAndTimestamp",
    "PartitionDescription",
    "Partitioner",
    "Producer",
    "Record",
    "RecordMetadata",
    "TopicDescription",
    "TopicErrors",
    "TopicPartition",
    "WithoutKey",
    "crc32",
    "main",
    "murmur2",
]


def application() -> typer.Typer:
    """Every package's commands as one."""
    # Imported here alone: a program that produces or consumes needs neither command lines nor process control.
    import typer

    import client.cli.commands
    import deploy.cli
    import spark_jobs.cli

    app = typer.Typer(
        name="minibroker",
        help="A small, real, replicated log broker cluster.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # A group that two packages fill: what needs brokers to talk to is the client's, what kills them the launcher's.
    bench = typer.Typer(help="Measure a cluster.", no_args_is_help=True)
    deploy.cli.mount(app, bench)
    client.cli.commands.mount(app, bench)
    app.add_typer(bench, name="bench")
    spark_jobs.cli.mount(app)
    return app


def main() -> NoReturn:
    """The command line `minibroker`. Exit codes: 0 ok, 1 failure, 2 usage, 3 timeout, 4 unhealthy."""
    from client.cli.output import run_app

    sys.exit(run_app(application()))


if __name__ == "__main__":
    main()
