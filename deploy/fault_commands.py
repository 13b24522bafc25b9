"""`minibroker fault` and `minibroker heal`: faults that brokers of `up --allow-faults` inject into themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli.terminal.output import DEFAULT_DATA, DataOption, Format, FormatOption, UsageError, note
from minibroker.deploy.acting import WhoArgument, act, parsed_who
from minibroker.deploy.journal import OTHER, WHO
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import AllBrokers, Member, Who, name_of
from minibroker.deploy.times import parse_time

app = typer.Typer(
    help="Without root: break the disk, network or clock of a broker of `minibroker up --allow-faults`, or move a "
    "coordinator.",
    no_args_is_help=True,
)

TimeArgument = Annotated[str, typer.Argument(metavar="TIME", help="As in 200ms or 2s.")]
DelayArgument = Annotated[str, typer.Argument(metavar="TIME", help="As in 200ms or 2s. 0ms ends the delay.")]
LogDirOption = Annotated[
    int | None, typer.Option("--log-dir", min=1, metavar="N", help="Only the broker's Nth log directory. Default: all.")
]


@app.command("fill-disk")
def fill_disk(
    who: WhoArgument, log_dir: LogDirOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """Let no file of the broker grow, as on a full disk."""
    cluster = FaultyCluster(data)
    sentence = f"fill disk of {WHO}" if log_dir is None else None
    rest = _options(("--log-dir", log_dir))
    _fault("fill-disk", lambda found: cluster.fill_disk(found, log_dir), who, format, data, sentence, rest=rest)


@app.command("break-disk")
def break_disk(
    who: WhoArgument, log_dir: LogDirOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """Let each call of the broker's disk fail with EIO."""
    cluster = FaultyCluster(data)
    sentence = f"break disk of {WHO}" if log_dir is None else None
    rest = _options(("--log-dir", log_dir))
    _fault("break-disk", lambda found: cluster.break_disk(found, log_dir), who, format, data, sentence, rest=rest)


@app.command("slow-disk")
def slow_disk(
    who: WhoArgument,
    time: DelayArgument,
    writes: Annotated[
        bool,
        typer.Option("--writes", help="Also each write, and not only each fsync. Default: as before; 0ms ends both."),
    ] = False,
    log_dir: LogDirOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Let each fsync of the broker take TIME longer.

    Acknowledgements wait for an fsync only in topics with durability=synced. In other topics, --writes delays them."""
    delay_s = _seconds(time)
    write_delay_s = delay_s if writes or not delay_s else None
    cluster = FaultyCluster(data)
    sentence = f"slow disk of {WHO} by {time.strip()}" if log_dir is None and not writes else None
    _fault(
        "slow-disk",
        lambda found: cluster.slow_disk(found, delay_s, write_delay_s, log_dir),
        who,
        format,
        data,
        sentence,
        rest=time + _options(("--writes", writes), ("--log-dir", log_dir)),
    )
    _note_end(delay_s, "the disks are not slow any more")


OtherArgument = Annotated[str, typer.Argument(metavar="OTHER", help="As WHO: the process at the other end.")]


@app.command("cut")
def cut(
    who: WhoArgument,
    other: OtherArgument,
    one_way: Annotated[bool, typer.Option("--one-way", help="Lose only what WHO sends to OTHER.")] = False,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Lose all packets between two brokers, or between a broker and zookeeper. Connections stay open, silent."""
    cluster, end = FaultyCluster(data), parsed_who(other)
    is_of_two = not any(isinstance(one, AllBrokers) for one in (end, parsed_who(who)))
    words = f"cut packets from {WHO} to {OTHER}" if one_way else f"cut {WHO} from {OTHER}"
    _fault(
        "cut",
        lambda found: cluster.cut(found, end, one_way=one_way),
        who,
        format,
        data,
        words if is_of_two else None,
        rest=other + _options(("--one-way", one_way)),
        other=other,
    )


@app.command("isolate")
def isolate(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Lose all packets of the broker: from and to other brokers, ZooKeeper and clients."""
    _fault("isolate", FaultyCluster(data).isolate, who, format, data, f"isolate {WHO}")


@app.command("slow-network")
def slow_network(
    who: WhoArgument,
    time: DelayArgument,
    other: Annotated[
        str | None,
        typer.Option(
            "--between", metavar="OTHER", help="Only packets between WHO and this broker, in both directions."
        ),
    ] = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Let each packet that the broker sends take TIME longer."""
    cluster, delay_s = FaultyCluster(data), _seconds(time)
    end = None if other is None else parsed_who(other)
    sentence = f"slow network by {time.strip()}" if who == "all" and end is None else None
    _fault(
        "slow-network",
        lambda found: cluster.slow_network(found, delay_s, end),
        who,
        format,
        data,
        sentence,
        rest=time + _options(("--between", other)),
    )
    _note_end(delay_s, "these packets are not slow any more")


@app.command("drop-connections")
def drop_connections(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Break all connections of the broker once, with other brokers and with clients. They may connect again."""
    _fault("drop-connections", FaultyCluster(data).drop_connections, who, format, data, f"drop connections of {WHO}")


@app.command("move-clock")
def move_clock(
    who: WhoArgument,
    time: TimeArgument,
    back: Annotated[bool, typer.Option("--back", help="Backward.")] = False,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Let the broker's wall clock jump forward by TIME, in addition to earlier jumps."""
    cluster, by_s = FaultyCluster(data), _seconds(time) * (-1 if back else 1)
    if not by_s:
        raise UsageError(f"TIME is {time!r}, so no clock would move: give a longer time, or `minibroker heal`")
    sentence = None if back else f"move clock of {WHO} by {time.strip()}"
    rest = time + _options(("--back", back))
    _fault("move-clock", lambda found: cluster.move_clock(found, by_s), who, format, data, sentence, rest=rest)


@app.command("move-coordinator")
def move_coordinator(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Let another broker coordinate a group or a transactional id, while all brokers run on.

    WHO is coordinator:GROUP or transactions:ID. Prints the former coordinator and the new one. The order of the
    replicas of the coordinator's partition changes, and its first replica is elected."""
    # A recorded scenario has no groups and no transactional ids.
    _fault("move-coordinator", FaultyCluster(data).move_coordinator, who, format, data, None)


def heal(
    who: Annotated[str, typer.Argument(metavar="[WHO]", help="As for `minibroker kill`.")] = "all",
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """End all faults of `minibroker fault`. A broker that has ended for its disk is started by `minibroker start`."""
    cluster = FaultyCluster(data)

    def healed(found: Who) -> list[Member]:
        members = cluster.heal(found)
        gone = [member for member in members if cluster.state_of(member) is ProcessState.GONE]
        for member in gone:
            note(f"{name_of(member)} has ended: `minibroker start {member}` starts it")
        return members

    act("heal", healed, who, format, data, sentence="heal" if who == "all" else None)


def _fault(
    action: str,
    method: Callable[[Who], list[Member]],
    who: str,
    format: Format,
    data: Path,
    sentence: str | None,
    *,
    rest: str = "",
    other: str | None = None,
) -> None:
    command = f"fault {action} {who} {rest.strip()}".rstrip()
    act(action, method, who, format, data, command=command, sentence=sentence, other=other)


def _options(*given: tuple[str, str | int | bool | None]) -> str:
    """Return the options that were given, as they are typed."""
    return "".join(f" {name}" if value is True else f" {name} {value}" for name, value in given if value)


def _note_end(delay_s: float, text: str) -> None:
    """Say that a delay of nothing ends the fault: the word of the command says the opposite."""
    if not delay_s:
        sys.stderr.write(f"0 ms: {text}\n")


def _seconds(time: str) -> float:
    try:
        return parse_time(time)
    except ValueError as error:
        raise UsageError(f"TIME is {time!r}: {error}") from None
