"""`minibroker groups`: list, describe, reset the offsets of, and delete groups (kafka-consumer-groups)."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Annotated

import typer

from minibroker.client.administering.groups import GROUP_STATES, GroupErrors, GroupListing, MemberDescription, named
from minibroker.client.cli.group_details import NOBODYS_TOPIC, GroupDetails, details_of, refuses_one_of
from minibroker.client.cli.group_resets import Reset, Shift, planned
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.live import text_in_place
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    YesOption,
    bootstrap_servers,
    confirm,
    inform,
    print_json,
    print_lines,
    print_table,
    run,
    shortened,
    table_lines,
)
from minibroker.client.cli.terminal.start_position import StartPosition, parse_start_position
from minibroker.client.cli.timelines.words import date_and_time, milliseconds
from minibroker.client.cli.topics import checked_topic, named_partitions, open_admin
from minibroker.client.errors import BrokersFailed, acl_commands
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.words import counted, plural, printable

INTERVAL_S = 1.0

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")]

app = typer.Typer(help="List, describe and delete consumer groups, and reset their offsets.", no_args_is_help=True)


@app.command(name="list")
def list_groups(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help=f"{', '.join(GROUP_STATES)}. May be repeated. Default: all."),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """List all groups with their states.

    Exit code 1 if a broker does not answer; the groups of the others are printed."""
    for each in state or ():
        if each not in GROUP_STATES:
            raise UsageError(f"--state {each!r}: give one of {', '.join(GROUP_STATES)}")
    groups, failed = run(_list(bootstrap_servers(bootstrap, data), state))
    if format is Format.JSON:
        print_json([each._asdict() for each in groups])
    else:
        rows = [(shortened(each.group), each.state, each.protocol_type or None) for each in groups]
        print_table(("group", "state", "protocol"), rows)
    if failed is not None:
        raise failed


@app.command()
def describe(
    group: GroupArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the state, coordinator, assignor and members of a group, and the lag of each partition.

    For each partition: the committed offset, the end of the log, the lag, and the member that reads it. For each of the
    last rebalances that the coordinator remembers: the generation that it ended, and its reason. With --watch
    and without a terminal, prints one line each time, with the partitions that have a lag."""
    _checked_group(group)
    servers = bootstrap_servers(bootstrap, data)
    if watch:
        with suppress(KeyboardInterrupt):
            run(_watch(servers, group, format))
        return
    details = run(_describe(servers, group))
    _tell_missing_right(details)
    if format is Format.JSON:
        print_json(_object(details))
    else:
        lines, *tables = _blocks(details)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        for table in tables:
            sys.stdout.write("\n")
            print_lines(table)


@app.command()
def reset_offsets(
    group: GroupArgument,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="earliest|latest|OFFSET|-N|@TIME",
            help="New position in each partition. -N: the last N records. TIME: the first record that is not "
            "older; milliseconds since 1970, or ISO 8601 (UTC without a zone).",
        ),
    ] = None,
    shift_by: Annotated[
        int | None,
        typer.Option(
            "--shift-by", metavar="N", help="Move each committed offset forward by N records (negative: backward)."
        ),
    ] = None,
    all_partitions: Annotated[bool, typer.Option("--all", help="All partitions with a committed offset.")] = False,
    topic: Annotated[
        list[str] | None, typer.Option("--topic", "-t", metavar="TOPIC", help="This topic. May be repeated.")
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", min=0, help="Only this partition of the topic. May be repeated. Default: all."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the new offsets.")] = False,
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Set the committed offsets of a group without members.

    Prints the old and new offsets and asks for confirmation. An offset outside a partition's log is replaced by the
    log's start or end."""
    _checked_group(group)
    target = _target(to, shift_by)
    topics = [checked_topic(name) for name in dict.fromkeys(topic or ())]
    if all_partitions == bool(topics):
        raise UsageError(
            "choose partitions: give either --all, or --topic TOPIC (with --partition for single partitions)"
        )
    if partition and len(topics) != 1:
        raise UsageError(f"--partition {partition[0]} needs exactly one topic: give --topic TOPIC once")
    servers = bootstrap_servers(bootstrap, data)
    plan = run(_plan(servers, group, topics, partition, target))
    is_shown_first = format is Format.TABLE and not (dry_run or yes)
    if dry_run or is_shown_first:
        _print_plan(plan, format)
    if dry_run:
        return
    sys.stdout.flush()
    confirm(f"Reset these offsets of group {group}?", yes)
    run(_commit(servers, group, plan))
    if is_shown_first:
        sys.stdout.write(f"reset {counted(len(plan), 'offset')} of {printable(group)}\n")
    else:
        _print_plan(plan, format)


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP...", help="Names of groups.")],
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Delete groups without members, with all their committed offsets."""
    names = [_checked_group(group) for group in dict.fromkeys(groups)]
    servers = bootstrap_servers(bootstrap, data)
    needs = f"--operation Delete {' '.join(f'--group {shlex.quote(name)}' for name in names)}"
    run(_refuse_members(servers, names, [needs]))
    noun = "group" if len(names) == 1 else "groups"
    confirm(f"Delete the {noun} {', '.join(names)} with all committed offsets?", yes)
    failed = run(_delete(servers, names, needs))
    deleted = [name for name in names if failed is None or name not in failed.errors]
    if format is Format.JSON and deleted:
        print_json({"deleted": deleted})
    elif deleted:
        sys.stdout.write(f"deleted {printable(', '.join(deleted))}\n")
    if failed is not None:
        raise failed


@app.command("remove-members")
def remove_members(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The name of a group.")],
    members: Annotated[
        list[str] | None, typer.Argument(metavar="[MEMBER...]", help="Member ids, or names of static members.")
    ] = None,
    all_members: Annotated[bool, typer.Option("--all", help="All members.")] = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Remove members from a group, as if they had left it. Those that live join again: this forces a rebalance."""
    _checked_group(group)
    if all_members == bool(members):
        raise UsageError("choose members: give either --all, or their ids as `minibroker groups describe` prints them")
    removed = run(_remove(bootstrap_servers(bootstrap, data), group, None if all_members else members))
    if format is Format.JSON:
        print_json({"removed": removed})
    else:
        sys.stdout.write(f"removed: {printable(', '.join(removed)) or 'nobody, as the group has no members'}\n")


# --- Requests ----------------------------------------------------------------------------------------------------


async def _list(bootstrap: str, states: list[str] | None) -> tuple[list[GroupListing], BrokersFailed | None]:
    async with open_admin(bootstrap) as admin:
        try:
            return await admin.list_groups(states), None
        except BrokersFailed as failed:
            if not failed.results:
                raise
            return sorted({each.group: each for part in failed.results.values() for each in part}.values()), failed


async def _describe(bootstrap: str, group: str) -> GroupDetails:
    async with open_admin(bootstrap, groups=[group]) as admin:
        return await details_of(admin, group)


async def _watch(bootstrap: str, group: str, format: Format) -> None:
    """Raises the errors of the first look-up. Later errors are shown instead, since the cluster may come back."""
    on_terminal = sys.stdout.isatty() and format is Format.TABLE
    async with open_admin(bootstrap, groups=[group]) as admin:
        details, problem = await details_of(admin, group), ""
        _tell_missing_right(details)
        with text_in_place() if on_terminal else nullcontext() as show:
            while True:
                if show is not None:
                    lines = [line for block in _blocks(details) for line in (*block, "")]
                    show(pastable(problem) if problem else "\n".join(lines))
                elif format is Format.TABLE:
                    sys.stdout.write(f"{pastable(problem) if problem else _line(details)}\n")
                elif not problem:
                    print_json(_object(details))
                sys.stdout.flush()
                await asyncio.sleep(INTERVAL_S)
                try:
                    details, problem = await details_of(admin, group), ""
                except MinibrokerError as error:
                    problem = str(error)


async def _plan(
    bootstrap: str, group: str, topics: list[str], numbers: list[int] | None, target: StartPosition | Shift
) -> list[Reset]:
    needs = _reset_needs(group, topics or [_ANY_TOPIC])
    try:
        await _refuse_members(bootstrap, [group], needs, may_be_new=True)
    except BrokerError as error:
        if not topics and error.code is ErrorCode.GROUP_AUTHORIZATION_FAILED:
            error.add_note(_instead_of_any_topic(group))
        raise
    async with open_admin(bootstrap, topics=topics, groups=[group], needs=needs if topics else ()) as admin:
        if topics:
            partitions = await named_partitions(admin, topics, numbers)
        else:
            partitions = list(await admin.list_group_offsets(group))
            if not partitions:
                if await refuses_one_of(admin, [NOBODYS_TOPIC]):
                    raise _nothing_seen(group, needs)
                nothing = MinibrokerError(
                    f"group {group} has committed nothing: see `minibroker groups list`, or name a topic with --topic"
                )
                await admin.suggest_groups(nothing)
                raise nothing
        return await planned(admin, group, partitions, target)


_ANY_TOPIC = "TOPIC"
"""Stands for the topics of a group whose offsets the user may not see."""


def _instead_of_any_topic(group: str) -> str:
    return (
        f"Give it for each topic of the group instead of {_ANY_TOPIC}, which `groups describe {shlex.quote(group)}` "
        "shows to an administrator."
    )


def _nothing_seen(group: str, needs: Sequence[str]) -> MinibrokerError:
    """Return the error if a user who may not Describe all topics sees no commit of the group."""
    principal = security.principal()
    who, commands = principal or "this client", acl_commands(principal, needs)
    error = MinibrokerError(
        f"group {group} has committed nothing, or only in topics that {who} may not Describe: an administrator can "
        f"allow the command with {commands}"
    )
    error.add_note(_instead_of_any_topic(group))
    return error


def _reset_needs(group: str, topics: Iterable[str]) -> list[str]:
    """Return the options of `acls add` that allow the command."""
    names = " ".join(f"--topic {shlex.quote(name)}" for name in sorted(set(topics)))
    return [f"--consumer {names} --group {shlex.quote(group)}"]


async def _refuse_members(
    bootstrap: str, groups: Sequence[str], needs: Sequence[str], *, may_be_new: bool = False
) -> None:
    """Raise BrokerError if a group has members or does not exist. `groups` are the groups of one request; `needs`: see
    `CommandAdmin`."""
    others = ". Nothing was deleted" if len(groups) > 1 else ""
    async with open_admin(bootstrap, groups=groups, needs=needs) as admin:
        try:
            described = await admin.describe_groups(groups)
        except GroupErrors as failed:
            for error in failed.errors.values():
                if isinstance(error, BrokerError) and error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                    if may_be_new:
                        continue
                    raise BrokerError(error.code, f"{error.detail}{others}") from None
                raise error from None
            return
    for name, found in described.items():
        if found.members:
            said = f"group {name} has members: {named(found.members)}"
            raise BrokerError(ErrorCode.NON_EMPTY_GROUP, f"{said}. Stop them first{others}", is_complete=True)


async def _commit(bootstrap: str, group: str, plan: Sequence[Reset]) -> None:
    needs = _reset_needs(group, (each.partition.topic for each in plan))
    async with open_admin(bootstrap, needs=needs) as admin:
        await admin.alter_group_offsets(group, {each.partition: each.new for each in plan})


async def _remove(bootstrap: str, group: str, members: list[str] | None) -> list[str]:
    async with open_admin(bootstrap, groups=[group]) as admin:
        return await admin.remove_group_members(group, members)


async def _delete(bootstrap: str, groups: Sequence[str], needs: str) -> GroupErrors | None:
    """Return the errors if some groups were deleted, or the reasons differ. Raises BrokerError if all were refused."""
    async with open_admin(bootstrap, needs=[needs]) as admin:
        try:
            await admin.delete_groups(groups)
        except GroupErrors as failed:
            if len(failed.errors) == len(groups):
                raise
            return failed
    return None


def _tell_missing_right(details: GroupDetails) -> None:
    if (missing := details.missing_right(security.principal())) is not None:
        inform(missing)


# --- Output ------------------------------------------------------------------------------------------------------


def _blocks(details: GroupDetails) -> list[list[str]]:
    """Return a sentence, then the members, the last rebalances and the partitions, as far as there are any."""
    group = details.group
    parts = [
        f"group {group.group}: {group.state}",
        f"coordinator broker {group.coordinator.node_id} ({group.coordinator.address})",
        *([f"assignor {group.assignor}"] if group.assignor else []),
        f"{len(group.members)} member{'' if len(group.members) == 1 else 's'}",
        _lag(details),
    ]
    blocks = [[printable(", ".join(parts))]]
    if group.members:
        has_instances = any(each.group_instance_id is not None for each in group.members)
        columns = ["member", *(["instance"] if has_instances else []), "client", "host", "partitions"]
        rows = [
            [
                each.member_id,
                *([each.group_instance_id] if has_instances else []),
                each.client_id,
                each.client_host,
                _short(each),
            ]
            for each in group.members
        ]
        blocks.append(table_lines(columns, rows))
    if group.rebalances:
        rebalances = [
            [
                date_and_time(each.time_ms),
                str(each.generation),
                None if each.took_ms is None else milliseconds(each.took_ms),
                each.reason,
            ]
            for each in group.rebalances
        ]
        blocks.append(table_lines(("rebalance", "generation", "took", "reason"), rebalances))
    if details.partitions:
        offsets = [
            (
                *each.partition,
                None if each.committed is None else each.committed.offset,
                each.end_offset,
                each.lag,
                each.member_id,
            )
            for each in details.partitions
        ]
        blocks.append(table_lines(("topic", "partition", "committed", "end", "lag", "member"), offsets))
    return blocks


def _lag(details: GroupDetails) -> str:
    """Such as `lag 3 (2 partitions without a commit)`. The sum alone would hide records that no member has read, and
    commits beyond the end."""
    counts = ((details.without_commit, "without a commit"), (details.beyond_end, "committed beyond the end"))
    words = ", ".join(f"{count} {plural(count, 'partition')} {what}" for count, what in counts if count)
    return f"lag {'-' if details.lag is None else details.lag}{f' ({words})' if words else ''}"


def _short(member: MemberDescription) -> str | None:
    """Such as `orders 0,1,2; stock 0`."""
    if member.partitions is None:
        return None
    topics: dict[str, list[str]] = {}
    for topic, number in member.partitions:
        topics.setdefault(topic, []).append(str(number))
    return "; ".join(f"{topic} {','.join(numbers)}" for topic, numbers in topics.items()) or None


def _line(details: GroupDetails) -> str:
    behind = ", ".join(f"{each.partition} {each.lag}" for each in details.partitions if each.lag)
    members = f"{len(details.group.members)} member{'' if len(details.group.members) == 1 else 's'}"
    return f"{details.group.state}, {members}, {_lag(details)}{f' ({behind})' if behind else ''}"


def _object(details: GroupDetails) -> dict[str, object]:
    group = details.group
    return {
        "group": group.group,
        "state": group.state,
        "protocol_type": group.protocol_type,
        "assignor": group.assignor,
        "coordinator": {"id": group.coordinator.node_id, **group.coordinator.address._asdict()},
        "lag": details.lag,
        "members": [
            each._asdict() | {"partitions": None if each.partitions is None else [p._asdict() for p in each.partitions]}
            for each in group.members
        ],
        "partitions": [
            {
                **each.partition._asdict(),
                "committed": None if each.committed is None else each.committed.offset,
                "leader_epoch": None if each.committed is None else each.committed.leader_epoch,
                "metadata": None if each.committed is None else each.committed.metadata,
                "end": each.end_offset,
                "lag": each.lag,
                "member_id": each.member_id,
            }
            for each in details.partitions
        ],
        "rebalances": [each._asdict() for each in group.rebalances],
    }


def _print_plan(plan: Sequence[Reset], format: Format) -> None:
    columns = ("topic", "partition", "old", "new", "lag")
    rows = [(*each.partition, each.old, each.new.offset, each.lag) for each in plan]
    if format is Format.JSON:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)


# --- Arguments ---------------------------------------------------------------------------------------------------


def _checked_group(group: str) -> str:
    if not group:
        raise UsageError("the group name is empty: see `minibroker groups list` for the names")
    return group


def _target(to: str | None, shift_by: int | None) -> StartPosition | Shift:
    if (to is None) == (shift_by is None):
        raise UsageError("choose the new position: give either --to (such as --to earliest) or --shift-by N")
    if to is not None:
        return parse_start_position(to, "--to")
    assert shift_by is not None
    return Shift(shift_by)
