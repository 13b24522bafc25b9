"""Shared by the commands that do something to processes of a local cluster: the argument WHO, and what is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from minibroker.client.cli.terminal.output import Format, UsageError, print_json
from minibroker.deploy import journal
from minibroker.deploy.local.who import MalformedWho, Member, Who, acted, parse_who

WhoArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHO",
        help="A broker id, controller, leader:TOPIC-PARTITION, follower:TOPIC-PARTITION (in sync), coordinator:GROUP, "
        "transactions:ID (the coordinator of a transactional id), all, or zookeeper. The partition, group or id must "
        "exist.",
    ),
]


def act(
    action: str,
    method: Callable[[Who], list[Member]],
    who: str,
    format: Format,
    data: Path,
    *,
    command: str | None = None,
    sentence: str | None = None,
    other: str | None = None,
) -> None:
    """Do it, print it, and note it for a recording: the words of the command, and the sentence of scenario files that
    does the same."""
    found = parsed_who(who)
    members = journal.done(data, command or f"{action} {who}", sentence, lambda: method(found), who, other)
    print_acted(action, members, format)


def parsed_who(who: str) -> Who:
    try:
        return parse_who(who)
    except MalformedWho as error:
        raise UsageError(str(error)) from error


def print_acted(action: str, members: list[Member], format: Format) -> None:
    if format is Format.JSON:
        print_json({"action": action, "ids": members})
    else:
        sys.stdout.write(f"{acted(action, members)}\n")
