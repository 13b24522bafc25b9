"""The public face of minibroker: `from minibroker import Admin, Consumer, Producer`, and the command `minibroker`.

The parts (`minibroker.broker`, `minibroker.client`, ...) are links to the folders beside this one. Importing any of
them imports this module first, even in brokers and controllers, which have no use for the client: so the client's names
are looked up when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer

    __version__: str

    from minibroker.client import (
        Admin,
        AlterOperation,
        ApiTimedOut,
        BatchDelivery,
        BatchDeliveryFailed,
        BatchMetadata,
        BrokerDescription,
        BrokerError,
        BrokersFailed,
        BufferFull,
        ClientCrashed,
        Closed,
        ClusterDescription,
        CommitFailed,
        ConfigChange,
        ConfigEntry,
        ConfigErrors,
        ConfigResource,
        ConfigSource,
        ConfigSynonym,
        ConfigType,
        Consumer,
        ConsumerBatch,
        ConsumerStatus,
        Coordinator,
        CorruptBatch,
        Delivery,
        DeliveryFailed,
        DeliveryTimedOut,
        DeserializationFailed,
        ErrorCode,
        FailedRecord,
        ForkedClient,
        GroupDescription,
        GroupErrors,
        GroupListing,
        InvalidSetting,
        LogDirDescription,
        LogDirReplica,
        LogTruncated,
        MaxPollIntervalExceeded,
        MemberDescription,
        MinibrokerError,
        NetworkError,
        NewTopic,
        OffsetAndMetadata,
        OffsetAndTimestamp,
        PartitionDescription,
        Partitioner,
        PartitionerFailed,
        PartitionErrors,
        PartitionReassignment,
        Partitions,
        PartMetadata,
        Producer,
        RebalanceListener,
        Record,
        RecordMetadata,
        ResourceType,
        RoundRobin,
        SerializationFailed,
        TopicDescription,
        TopicErrors,
        TopicPartition,
        WithinListener,
        WithoutKey,
        WrongEventLoop,
        crc32,
        murmur2,
    )

__all__ = [
    "Admin",
    "AlterOperation",
    "ApiTimedOut",
    "BatchDelivery",
    "BatchDeliveryFailed",
    "BatchMetadata",
    "BrokerDescription",
    "BrokerError",
    "BrokersFailed",
    "BufferFull",
    "ClientCrashed",
    "Closed",
    "ClusterDescription",
    "CommitFailed",
    "ConfigChange",
    "ConfigEntry",
    "ConfigErrors",
    "ConfigResource",
    "ConfigSource",
    "ConfigSynonym",
    "ConfigType",
    "Consumer",
    "ConsumerBatch",
    "ConsumerStatus",
    "Coordinator",
    "CorruptBatch",
    "Delivery",
    "DeliveryFailed",
    "DeliveryTimedOut",
    "DeserializationFailed",
    "ErrorCode",
    "FailedRecord",
    "ForkedClient",
    "GroupDescription",
    "GroupErrors",
    "GroupListing",
    "InvalidSetting",
    "LogDirDescription",
    "LogDirReplica",
    "LogTruncated",
    "MaxPollIntervalExceeded",
    "MemberDescription",
    "MinibrokerError",
    "NetworkError",
    "NewTopic",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "PartMetadata",
    "PartitionDescription",
    "PartitionErrors",
    "PartitionReassignment",
    "Partitioner",
    "PartitionerFailed",
    "Partitions",
    "Producer",
    "RebalanceListener",
    "Record",
    "RecordMetadata",
    "ResourceType",
    "RoundRobin",
    "SerializationFailed",
    "TopicDescription",
    "TopicErrors",
    "TopicPartition",
    "WithinListener",
    "WithoutKey",
    "WrongEventLoop",
    "crc32",
    "murmur2",
]


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("minibroker")
    elif name in __all__:
        value = getattr(importlib.import_module("minibroker.client"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Not what this module itself imports and is started by, for which no user looks; but the parts that are imported.
    found = {name for name in globals() if name.startswith("__") or f"{__name__}.{name}" in sys.modules}
    return sorted({*found, *__all__, "__version__"})


def application() -> typer.Typer:
    """The commands of all packages, as one application."""
    # Imported only here: a program that produces or consumes needs neither command lines nor process control.
    import typer

    from minibroker.client.cli import commands
    from minibroker.deploy import cli as launcher
    from minibroker.spark_jobs import cli as spark

    app = typer.Typer(
        name="minibroker",
        help="A small, real, replicated log broker cluster.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    # A group that two packages fill: benchmarks that only talk to brokers are the client's, those that kill them the
    # launcher's.
    bench = typer.Typer(help="Measure a cluster.", no_args_is_help=True)
    launcher.mount(app, bench)
    commands.mount(app, bench)
    app.add_typer(bench, name="bench")
    spark.mount(app)
    return app


def main() -> NoReturn:
    """The command line `minibroker`. Exit codes: 0 ok, 1 failure, 2 usage, 3 timeout, 4 unhealthy."""
    try:
        from minibroker.client.cli.terminal.log import show_waits
        from minibroker.client.cli.terminal.output import run_app

        show_waits()
        code = run_app(application())
    except KeyboardInterrupt:  # during the imports
        code = 130
    sys.exit(code)
