"""The commands that start a local cluster, show its state, and break it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from minibroker.client.cli import brokers as broker_commands
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    UNHEALTHY,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    YesOption,
    confirm,
    data_given,
    note,
    print_json,
    print_lines,
    run,
    settings_of,
)
from minibroker.deploy import fault_commands, growing, journal
from minibroker.deploy.acting import WhoArgument, act, parsed_who, print_acted
from minibroker.deploy.console.command import console
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.fault_commands import heal
from minibroker.deploy.local import console_file, secured
from minibroker.deploy.local.broker_process import OWN_SETTINGS
from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.data_directory import MAX_BROKERS, MAX_LOG_DIRS
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.plan import Options
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.deploy.local.supervision import watch
from minibroker.deploy.local.who import Member, name_of
from minibroker.deploy.looking import view_and_status
from minibroker.deploy.observing import log_files, status_screen
from minibroker.deploy.observing.cluster_view import (
    ask_end_offsets,
)
from minibroker.deploy.trials import demo as demo_story
from minibroker.deploy.trials.bench import failover, rolling_restart, storage
from minibroker.protocol.words import listed, plural

_FOLLOW_INTERVAL_S = 0.1
_TAIL_BLOCK_BYTES = 64 * 1024


def mount(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands to the application, and the benchmarks to its group `bench`."""
    for command in (up, down, status, logs, kill, pause, resume, start, stop, demo, client_config, console, heal):
        app.command()(command)
    broker_commands.app.command()(growing.add)
    broker_commands.app.command()(growing.remove)
    app.add_typer(fault_commands.app, name="fault")
    app.add_typer(log_files.app, name="log")
    bench.command()(failover)
    bench.command()(rolling_restart)
    bench.command()(storage)


def up(
    brokers: Annotated[
        int | None, typer.Option(min=1, max=MAX_BROKERS, help="Number of brokers. Default: as last time, or 3.")
    ] = None,
    data: DataOption = DEFAULT_DATA,
    base_port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port of broker 1. Default: as last time, or 9092.")
    ] = None,
    zookeeper: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A running ZooKeeper. Default: start one in DIR."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A setting for every broker. May be repeated. Default: those of last time."
        ),
    ] = None,
    log_dirs: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LOG_DIRS, help="Log directories of each broker. Default: as last time, or 1."),
    ] = None,
    secure: Annotated[
        bool | None,
        typer.Option(
            "--secure/--no-secure",
            help="TLS, users with passwords (SCRAM) and access control lists. Default: as last time, or not.",
        ),
    ] = None,
    allow_faults: Annotated[
        bool | None,
        typer.Option(
            "--allow-faults/--no-allow-faults",
            help="Let `minibroker fault` break disks, networks and clocks. Default: as last time, or not.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave the cluster running and return.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Start ZooKeeper and brokers 1 to N on this machine and print the bootstrap list. Ctrl-C stops them cleanly.

    If the cluster is already running, a larger --brokers adds brokers; otherwise only the bootstrap list is printed,
    even without --detach: the cluster belongs to the command that started it. With --secure, `minibroker client-config`
    prints what clients need."""
    let_signals_interrupt()
    options = Options(brokers, base_port, zookeeper, _checked_overrides(override), log_dirs, secure, allow_faults)
    cluster = LocalCluster(data)
    began = time.monotonic()
    found = cluster.running(options)
    if found is not None:
        added = [] if brokers is None else growing.grow(cluster, brokers, data)
        _print_cluster(cluster, cluster.file(), format)
        if added:
            note(f"added {listed(map(name_of, added))}")
            growing.note_growth(cluster)
        note("already running: `minibroker down` stops it")
        _note_console(data)
        return
    note("starting ...")
    started = cluster.up(*options)
    _print_cluster(cluster, started, format)
    count, took_s = len(started.brokers), time.monotonic() - began
    note(f"{count} {plural(count, 'broker')} up after {took_s:.1f} s, logs in {cluster.directory}/logs")
    note(f"ZooKeeper is at {started.zookeeper.connect}")
    _note_console(data)
    if started.secure:
        for lines in _client_lines(cluster):
            note(f"\n{lines.client}:\n{lines.text.rstrip()}")
        note(f"\nThis is the super user {secured.USER}, whom commands with --data {data} use")
    if detach:
        return
    note("Ctrl-C stops the cluster")
    try:
        watch(cluster, note)
    except KeyboardInterrupt:
        note("stopping ... (Ctrl-C again kills)")
        try:
            cluster.down()
        except KeyboardInterrupt:
            cluster.down(kill=True)
            raise


def client_config(
    client: Annotated[
        list[str] | None, typer.Argument(metavar="[CLIENT]...", help=f"{', '.join(secured.CLIENTS)}. Default: all.")
    ] = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Print what clients need to connect to a cluster of `up --secure`: the password is among it.

    They connect as the user that client.properties in the data directory has, which is the super user admin."""
    client = ["librdkafka" if name == "confluent-kafka" else name for name in client or ()]
    for name in client:
        if name not in secured.CLIENTS:
            raise UsageError(f"{name!r} is no client known here: give {', '.join(secured.CLIENTS)}")
    found = [lines for lines in _client_lines(LocalCluster(data)) if not client or lines.client in client]
    if format is Format.JSON:
        print_json({lines.client: lines.text for lines in found})
        return
    for number, (name, text) in enumerate(found):
        heading = f"{'' if number == 0 else chr(10)}# {name}\n" if len(found) > 1 else ""
        sys.stdout.write(f"{heading}{text}")


def _client_lines(cluster: LocalCluster) -> list[secured.Lines]:
    if not cluster.file().secure:
        raise LaunchError(
            f"the cluster in {cluster.directory} is not secured: clients need its addresses and nothing else; "
            "`minibroker up --secure` starts one that is"
        )
    return secured.lines_for(cluster.directory, cluster.bootstrap(), secured.credentials(cluster.directory))


def down(
    data: DataOption = DEFAULT_DATA,
    delete_data: Annotated[bool, typer.Option("--delete-data", help="Also remove all topics and logs.")] = False,
    yes: YesOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Stop all brokers and the ZooKeeper that `up` started. The data is kept for the next `up`."""
    cluster = LocalCluster(data)
    cluster.file()
    if delete_data:
        confirm(f"Remove all data of the cluster in {cluster.directory}?", yes)
    print_acted("down", cluster.down(), format)
    if delete_data:
        cluster.delete_data()


def status(
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show brokers, controller and partitions, and each problem with its remedy. Exit code 4 if there is a problem."""
    if watch:
        status_screen.watch(lambda: _glance(bootstrap, data), format)
        return
    _, found = view_and_status(bootstrap, data)
    address = console_file.address(data) if bootstrap is None else None
    if format is Format.JSON:
        print_json({**status_screen.status_object(found), "console": address})
    else:
        lines = [f"console: {address}"] if address is not None else []
        print_lines([*status_screen.status_lines(found), *lines, *status_screen.problem_lines(found)])
        if bootstrap is None and address is None:
            _note_console(data)
    if found.problems():
        raise typer.Exit(UNHEALTHY)


def logs(
    who: WhoArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines as they are added.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only the last N lines of each log. Default: all.")
    ] = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Print the logs of brokers or ZooKeeper."""
    cluster = LocalCluster(data)
    members = cluster.resolve(parsed_who(who))
    for member in members:
        if not cluster.log_of(member).exists():
            raise LaunchError(
                f"{name_of(member)} has no log in {cluster.log_of(member).parent}: it may never have been started"
            )
    positions = {
        member: 0 if tail is None else _where_last_lines_begin(cluster.log_of(member), tail) for member in members
    }
    while True:
        for member in members:
            for line in _lines_from(cluster.log_of(member), member, positions):
                if format is Format.JSON:
                    print_json({"who": member, "line": line})
                else:
                    sys.stdout.write(f"{name_of(member)}: {line}\n" if len(members) > 1 else f"{line}\n")
        sys.stdout.flush()
        if not follow:
            return
        time.sleep(_FOLLOW_INTERVAL_S)


def kill(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Kill with SIGKILL, like a crash. `minibroker start` starts the process again."""
    act("kill", LocalCluster(data).kill, who, format, data, sentence="kill {who}")


def pause(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Freeze with SIGSTOP: connections stay open, but nothing answers."""
    act("pause", LocalCluster(data).pause, who, format, data, sentence="pause {who}")


def resume(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Resume a paused process (SIGCONT)."""
    act("resume", LocalCluster(data).resume, who, format, data, sentence="resume {who}")


def start(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Start killed or stopped processes and wait until they serve. `all` starts all brokers that are not running."""
    act("start", LocalCluster(data).start, who, format, data, sentence="start {who}")


def stop(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Stop cleanly (SIGTERM) and wait for the end. A broker first moves its leaders to other brokers."""
    cluster = LocalCluster(data)
    found = parsed_who(who)
    stopped = journal.done(data, f"stop {who}", "stop {who}", lambda: cluster.stop(found), who)
    said = {member: cluster.handed_over(member) for member in stopped if isinstance(member, int)}
    handed_over = {member: each for member, each in said.items() if each is not None}
    if format is Format.JSON:
        print_json({"action": "stop", "ids": stopped, "handed_over": msgspec.to_builtins(handed_over, str_keys=True)})
        return
    print_acted("stop", stopped, format)
    for member, each in handed_over.items():
        sys.stdout.write(f"{name_of(member)}: {each}\n")


def demo(
    records: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Minimum number of lines to send.")
    ] = demo_story.DEFAULT_RECORDS,
    data: Annotated[
        # Not from MINIBROKER_DATA, which may name a cluster that should not be killed.
        Path | None,
        typer.Option("--data", metavar="DIR", callback=data_given, help="Use this directory and keep it afterwards."),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Start a cluster, kill its leader and its controller under load, and show that no record was lost."""
    let_signals_interrupt()
    tell = _story_teller(format)
    with demo_story.temporary_directory(tell) if data is None else nullcontext(data) as directory:
        with demo_story.running_cluster(directory, tell) as cluster:
            outcome = run(demo_story.play(cluster, records, tell))
        _print_outcome(outcome, format)
        if not outcome.verdict.flawless:
            raise LaunchError("records were lost, duplicated, reordered or altered: this is a bug, please report it")


def _story_teller(format: Format) -> demo_story.Tell:
    """Print each line with the seconds since the beginning. With --format json, these lines are only progress."""
    began = time.monotonic()

    def tell(text: str) -> None:
        line = f"{time.monotonic() - began:5.1f} s  {text}"
        if format is Format.JSON:
            note(line)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    return tell


def _print_outcome(outcome: demo_story.DemoOutcome, format: Format) -> None:
    verdict = outcome.verdict
    if format is Format.JSON:
        timeline = outcome.failover.objects()
        print_json({**verdict._asdict(), "kills": outcome.kills, "failures": outcome.failures, "timeline": timeline})
        return
    sys.stdout.write("\n")
    for name, count in verdict._asdict().items():
        sys.stdout.write(f"{name.replace('_', ' '):<12}  {count:>11,}\n")
    for reason in outcome.failures:
        sys.stdout.write(f"reported as failed: {reason}\n")
    if verdict.flawless:
        sys.stdout.write("\nEvery acknowledged record is there, once, in order, with its value.\n")
    sys.stdout.write("\n")
    sys.stdout.writelines(f"{line}\n" for line in outcome.failover.lines(short=True))


def _checked_overrides(override: list[str] | None) -> dict[str, str] | None:
    """Return the settings; None: as last time. Raises UsageError. Brokers themselves reject unknown settings."""
    if not override:
        return None
    settings = settings_of("--override", override, "log.segment.bytes=1048576")
    for name in settings:
        if name in OWN_SETTINGS:
            raise UsageError(f"--override {name}: it is set by `up`; {OWN_SETTINGS[name]}")
    return settings


def _note_console(data: Path) -> None:
    address = console_file.address(data)
    note("`minibroker console` shows the cluster in a browser" if address is None else f"the console is at {address}")


def _print_cluster(cluster: LocalCluster, running: ClusterFile, format: Format) -> None:
    bootstrap = cluster.bootstrap()
    if format is Format.JSON:
        print_json(
            {
                "bootstrap": bootstrap,
                "zookeeper": running.zookeeper.connect,
                "data": str(cluster.directory),
                "brokers": [
                    {"id": entry.id, "port": entry.port, "pid": entry.process.pid if entry.process else None}
                    for entry in running.brokers
                ],
            }
        )
    else:
        sys.stdout.write(bootstrap + "\n")
    sys.stdout.flush()


def _glance(bootstrap: str | None, data: Path) -> status_screen.Glance:
    view, found = view_and_status(bootstrap, data)
    ends = asyncio.run(ask_end_offsets(view))
    return status_screen.Glance(found, ends, time.monotonic(), len(view.partitions) - len(ends))


def _lines_from(path: Path, member: Member, positions: dict[Member, int]) -> list[str]:
    """Return the whole lines after the given position, and advance it."""
    with path.open("rb") as log:
        log.seek(positions[member])
        data = log.read()
    end = data.rfind(b"\n") + 1
    positions[member] += end
    return data[:end].decode("utf-8", "replace").splitlines()


def _where_last_lines_begin(path: Path, count: int) -> int:
    """Return the position of the last `count` whole lines. Reads no more of the file than these, in blocks."""
    newlines_left = count + 1  # one more, which ends the previous line
    with path.open("rb") as log:
        position = log.seek(0, os.SEEK_END)
        while position > 0:
            position, end = max(0, position - _TAIL_BLOCK_BYTES), position
            log.seek(position)
            block = log.read(end - position)
            found = block.count(b"\n")
            if found < newlines_left:
                newlines_left -= found
                continue
            at = len(block)
            for _ in range(newlines_left):
                at = block.rindex(b"\n", 0, at)
            return position + at + 1
    return 0
