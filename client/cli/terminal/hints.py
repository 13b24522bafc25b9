"""Hints that can be pasted: a command that a message names repeats the `--data` or `--bootstrap` that was typed.

Such messages come from every layer, even from brokers, and none of these knows what was typed. So the options are added
where a message is printed, to each command in backquotes that takes them and does not have its own.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import typer

_HINT = re.compile(r"`minibroker ([^`]+)`")


class _Typed(NamedTuple):
    root: Callable[[], Any]
    """Makes the command of which all others are subcommands."""
    options: dict[str, str]
    """The options for the cluster that were typed, by the name of the parameter."""


_typed: ContextVar[_Typed | None] = ContextVar("typed", default=None)


@contextlib.contextmanager
def repeating(root: Callable[[], object]) -> Iterator[None]:
    """For the time in which a command line is parsed and carried out. `root` makes the command that it is one of."""
    token = _typed.set(_Typed(root, {}))
    try:
        yield
    finally:
        _typed.reset(token)


def remember(context: typer.Context, parameter: str, value: object) -> None:
    """Repeat the option in hints, if it was typed: an environment variable holds for the next command anyway."""
    typed = _typed.get()
    if typed is not None and comes_from(context, parameter, "COMMANDLINE"):
        typed.options[parameter] = f"--{parameter} {shlex.quote(str(value))}"


def comes_from(context: typer.Context, parameter: str, source: str) -> bool:
    """Whether the parameter has its value from COMMANDLINE, ENVIRONMENT or DEFAULT."""
    found = context.get_parameter_source(parameter)
    return found is not None and found.name == source


def pastable(text: str) -> str:
    """The text, with `--data` or `--bootstrap` in its hints, if that was typed."""
    typed = _typed.get()
    if typed is None or not typed.options:
        return text
    if not _HINT.search(text):
        return text
    root = typed.root()
    return _HINT.sub(lambda hint: f"`minibroker {_completed(hint[1], root, typed.options)}`", text)


def _completed(hint: str, root: Any, options: dict[str, str]) -> str:
    if "--help" in hint:
        return hint
    command = root
    for word in hint.split():
        command = getattr(command, "commands", {}).get(word, command)
    # Where a command takes both, `--bootstrap` wins.
    for parameter in ("bootstrap", "data"):
        if parameter in options and any(taken.name == parameter for taken in command.params):
            return hint if f"--{parameter}" in hint else f"{hint} {options[parameter]}"
    return hint
