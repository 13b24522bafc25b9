"""`minibroker fault` and `minibroker heal`: faults that brokers of `up --allow-faults` inject into themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli.terminal.output import DEFAULT_DATA, DataOption, Format, FormatOption, UsageError, note
from minibroker.deploy.acting import WhoArgument, act
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.local.processes import ProcessState
from minibroker.deploy.local.who import MalformedWho, Member, Who, name_of
from minibroker.deploy.named_faults import Ordered, Words, WrongWords, ordered

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
    _fault("fill-disk", who, Words(log_dir=log_dir), data, format)


@app.command("break-disk")
def break_disk(
    who: WhoArgument, log_dir: LogDirOption = None, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE
) -> None:
    """Let each call of the broker's disk fail with EIO."""
    _fault("break-disk", who, Words(log_dir=log_dir), data, format)


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
    order = _fault("slow-disk", who, Words(time, log_dir=log_dir, writes=writes), data, format)
    _note_end(order, "the disks are not slow any more")


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
    _fault("cut", who, Words(other=other, one_way=one_way), data, format)


@app.command("isolate")
def isolate(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Lose all packets of the broker: from and to other brokers, ZooKeeper and clients."""
    _fault("isolate", who, Words(), data, format)


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
    order = _fault("slow-network", who, Words(time, other or ""), data, format)
    _note_end(order, "these packets are not slow any more")


@app.command("drop-connections")
def drop_connections(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Break all connections of the broker once, with other brokers and with clients. They may connect again."""
    _fault("drop-connections", who, Words(), data, format)


@app.command("move-clock")
def move_clock(
    who: WhoArgument,
    time: TimeArgument,
    back: Annotated[bool, typer.Option("--back", help="Backward.")] = False,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Let the broker's wall clock jump forward by TIME, in addition to earlier jumps."""
    _fault("move-clock", who, Words(time, back=back), data, format)


@app.command("move-coordinator")
def move_coordinator(who: WhoArgument, data: DataOption = DEFAULT_DATA, format: FormatOption = Format.TABLE) -> None:
    """Let another broker coordinate a group or a transactional id, while all brokers run on.

    WHO is coordinator:GROUP or transactions:ID. Prints the former coordinator and the new one. The order of the
    replicas of the coordinator's partition changes, and its first replica is elected."""
    _fault("move-coordinator", who, Words(), data, format)


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


def _fault(name: str, who: str, words: Words, data: Path, format: Format) -> Ordered:
    try:
        order = ordered(name, who, words)
    except (WrongWords, MalformedWho) as error:
        raise UsageError(str(error)) from None
    cluster = FaultyCluster(data)
    act(
        name,
        lambda _: order.apply(cluster),
        who,
        format,
        data,
        command=order.command,
        sentence=order.sentence,
        other=order.words.other if order.has_other else None,
    )
    return order


def _note_end(order: Ordered, text: str) -> None:
    """Say that a delay of nothing ends the fault: the word of the command says the opposite."""
    if not order.time_s:
        sys.stderr.write(f"0 ms: {text}\n")
