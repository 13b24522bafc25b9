"""`minibroker spark ...`: the jobs as commands. Without pyspark they report the packages to install."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    UsageError,
    bootstrap_servers,
    settings_of,
)
from minibroker.client.cli.topics import checked_topic
from minibroker.client.shown import undecodable
from minibroker.protocol.words import counted
from minibroker.spark_jobs import jobs
from minibroker.spark_jobs.session import check_packages

app = typer.Typer(help="Spark jobs that read topics (pip install pyspark pyarrow).", no_args_is_help=True)


def _nameable(path: Path | None) -> Path | None:
    """Raise UsageError for a path that is not UTF-8, which a table's files and Spark cannot name."""
    if path is not None and (text := undecodable(path)) is not None:
        raise UsageError(f"{text} is not UTF-8: give a path that is, for --output and --checkpoint")
    return path


TopicsOption = Annotated[str, typer.Option("--topics", metavar="NAME,...", help="The topics to read.")]
OutputOption = Annotated[
    Path, typer.Option("--output", metavar="DIR", callback=_nameable, help="Directory for the Parquet files.")
]
TriggerOption = Annotated[
    str, typer.Option("--trigger", metavar="TIME", help="Interval between batches, such as 10s or 500ms.")
]
OnceOption = Annotated[bool, typer.Option("--once", help="Read the records that exist now, then exit.")]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--max-offsets-per-trigger", min=1, metavar="N", help="Maximum records per batch. Default: 10 million."
    ),
]


class OutOfRange(StrEnum):
    ERROR = "error"
    NULL = "null"


OutOfRangeOption = Annotated[
    OutOfRange,
    typer.Option(
        "--timestamp-out-of-range", help="For a timestamp that Spark cannot represent: fail the job, or use null."
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help=f"Spark's master. Default: the one of spark-submit, or {jobs.DEFAULT_MASTER}."),
]
ConfOption = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A Spark setting. May be repeated.")
]

_TIME = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600}


def mount(root: typer.Typer) -> None:
    """Add the group `spark` to the application."""
    root.add_typer(app, name="spark")


def _source(
    topics: str, bootstrap: str | None, data: Path, starting: str, limit: int | None, out_of_range: OutOfRange
) -> jobs.Source:
    names = [checked_topic(name.strip()) for name in topics.split(",")]
    servers = bootstrap_servers(bootstrap, data)
    protection = jobs.security_options(security.chosen())
    return jobs.Source(servers, names, starting, limit, out_of_range.value, protection)


def _settings(conf: Sequence[str] | None) -> dict[str, str]:
    settings = settings_of("--conf", conf or (), "spark.sql.shuffle.partitions=4")
    for name, value in settings.items():
        if not name.startswith("spark."):
            raise UsageError(f"--conf {name}={value}: give spark.NAME=VALUE")
    return settings


def _time(text: str) -> tuple[int, str]:
    """Return (number, unit). Raises UsageError."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is not a time: give one such as 500ms, 10s or 5m")
    return int(found[1]), found[2]


def _interval(text: str) -> str:
    """Return the time in Spark's notation."""
    number, unit = _time(text)
    return f"{number} {_UNITS[unit]}"


def _seconds(text: str) -> float:
    number, unit = _time(text)
    return number * _SECONDS[unit]


def _check_finished(once: bool, stop: threading.Event) -> None:
    """Raise KeyboardInterrupt for a stopped job that would have ended by itself; other jobs are meant to be stopped."""
    if once and stop.is_set():
        raise KeyboardInterrupt


@app.command()
def ingest(
    topics: TopicsOption,
    output: OutputOption,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", callback=_nameable, help="Spark's checkpoint, on a local disk. Default: OUTPUT/_checkpoint."
        ),
    ] = None,
    starting: Annotated[
        str,
        typer.Option("--from", help="Start position of the first run: earliest, latest, or startingOffsets as JSON."),
    ] = "earliest",
    once: OnceOption = False,
    trigger: TriggerOption = "10s",
    max_offsets_per_trigger: LimitOption = None,
    timestamp_out_of_range: OutOfRangeOption = OutOfRange.ERROR,
    compact_after: Annotated[
        int, typer.Option(min=0, metavar="N", help="Compact every N batches of small files into one. 0: never.")
    ] = 16,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    master: MasterOption = None,
    conf: ConfOption = None,
) -> None:
    """Copy topics to Parquet files, each record exactly once. Each run continues where the last one ended."""
    check_packages()
    interval = _interval(trigger)
    if compact_after == 1:
        raise UsageError("--compact-after 1 would rewrite every batch: give 0, or 2 or more")
    source = _source(topics, bootstrap, data, starting, max_offsets_per_trigger, timestamp_out_of_range)
    from minibroker.spark_jobs.ingest import run_ingest

    with jobs.job_session("ingest", master, _settings(conf)) as spark:
        stop = jobs.stop_on_signals()
        done = run_ingest(
            spark,
            source,
            output,
            checkpoint or output / "_checkpoint",
            trigger=None if once else interval,
            fan_in=compact_after,
            stop=stop,
        )
    batches = counted(done.batches, "batch", "batches")
    topics = ", ".join(source.topics)
    sys.stdout.write(f"ingested {counted(done.rows, 'record')} of {topics} in {batches} to {output}\n")
    _check_finished(once, stop)


ViewOption = Annotated[
    str, typer.Option("--view", metavar="NAME", help="Version of the view (spark_jobs/views/views.py): v1 or v2.")
]
RootOption = Annotated[
    Path,
    typer.Option("--output", metavar="DIR", callback=_nameable, help="Directory for the view's versions and CURRENT."),
]


@app.command()
def kappa(
    topics: TopicsOption,
    output: RootOption,
    view: ViewOption = "v1",
    once: OnceOption = False,
    trigger: TriggerOption = "10s",
    max_offsets_per_trigger: LimitOption = None,
    timestamp_out_of_range: OutOfRangeOption = OutOfRange.ERROR,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    master: MasterOption = None,
    conf: ConfOption = None,
) -> None:
    """Maintain a view of lines with one stream. A new version, started beside the old one, replays the topics and
    replaces it."""
    check_packages()
    interval = _interval(trigger)
    source = _source(topics, bootstrap, data, "earliest", max_offsets_per_trigger, timestamp_out_of_range)
    settings = _settings(conf)
    from minibroker.spark_jobs.kappa import run_kappa
    from minibroker.spark_jobs.views.views import view_named

    view_named(view)
    with jobs.job_session(f"kappa {view}", master, settings) as spark:
        stop = jobs.stop_on_signals()
        serves = run_kappa(spark, source, output, view, trigger=None if once else interval, stop=stop)
    _check_finished(once, stop)
    said = (
        "is served" if serves else "was replaced" if not once else "is not served yet: the other version is ahead of it"
    )
    sys.stdout.write(f"view {view} in {output} {said}\n")


@app.command(name="lambda")
def lambda_(
    topics: TopicsOption,
    output: RootOption,
    view: ViewOption = "v2",
    lateness: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Lines that are later than this are left out by the stream; the next batch job adds them.",
        ),
    ] = "10m",
    batch_every: Annotated[str, typer.Option(metavar="TIME", help="Interval between full batch computations.")] = "1h",
    once: OnceOption = False,
    trigger: TriggerOption = "10s",
    max_offsets_per_trigger: LimitOption = None,
    timestamp_out_of_range: OutOfRangeOption = OutOfRange.ERROR,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    master: MasterOption = None,
    conf: ConfOption = None,
) -> None:
    """Maintain a view of lines with two layers: a batch job for old records and a stream for new ones, served as
    one."""
    check_packages()
    interval, late, every = _interval(trigger), _interval(lateness), _seconds(batch_every)
    source = _source(topics, bootstrap, data, "earliest", max_offsets_per_trigger, timestamp_out_of_range)
    settings = _settings(conf)
    from minibroker.spark_jobs.lambda_ import run_lambda
    from minibroker.spark_jobs.views.views import view_named

    view_named(view)
    with jobs.job_session(f"lambda {view}", master, settings) as spark:
        stop = jobs.stop_on_signals()
        run_lambda(
            spark,
            source,
            output,
            view,
            lateness=late,
            trigger=None if once else interval,
            batch_every_s=every,
            stop=stop,
        )
    _check_finished(once, stop)
    sys.stdout.write(f"view {view} in {output} is served\n")
