"""Hints that can be pasted: a command in a message repeats the `--data` or `--bootstrap` from the command line.

Messages come from every layer, even from brokers, and none of them knows the command line. The options are therefore
added when a message is printed, to each command in backquotes that accepts them and does not have its own.

With `--bootstrap`, `--command-config` is repeated as well. Commands that grant rights or set passwords need the file of
an administrator, which the refused user's is not: they show ADMIN_FILE. A local cluster that is secured is named by its
directory instead, because commands for a directory use the administrator's file in it by themselves.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import typer

_HINT = re.compile(r"`minibroker ([^`]+)`")
_CONFIG = "command_config"
_FOR_ADMINISTRATORS = ("acls add ", "users ", "configs alter --user ")


class _Typed(NamedTuple):
    root: Callable[[], Any]
    """Returns the command that contains all others."""
    options: dict[str, str]
    """The cluster options on the command line, by parameter name."""
    config: list[str]
    """The option `--command-config`, if it was given."""


_typed: ContextVar[_Typed | None] = ContextVar("typed", default=None)


@contextlib.contextmanager
def repeating(root: Callable[[], object]) -> Iterator[None]:
    """Use this while a command line is parsed and executed. `root` returns the command that contains all others."""
    token = _typed.set(_Typed(root, {}, []))
    try:
        yield
    finally:
        _typed.reset(token)


def remember(context: typer.Context, parameter: str, value: object) -> None:
    """Repeat the option in hints if it was given on the command line. An environment variable applies to the next
    command anyway."""
    typed = _typed.get()
    if typed is not None and comes_from(context, parameter, "COMMANDLINE"):
        typed.options[parameter] = f"--{parameter} {shlex.quote(str(value))}"


def remember_config(context: typer.Context) -> None:
    """Repeat `--command-config` in hints if it was given on the command line."""
    typed = _typed.get()
    if typed is not None and comes_from(context, _CONFIG, "COMMANDLINE"):
        typed.config.append(f"--command-config {shlex.quote(str(context.params[_CONFIG]))}")


def prefer_directory(data: Path, *, is_default: bool) -> None:
    """Name the cluster by its directory in hints, not by `--bootstrap`."""
    typed = _typed.get()
    if typed is not None and typed.options.pop("bootstrap", None) is not None and not is_default:
        typed.options["data"] = f"--data {shlex.quote(str(data))}"


def global_option(option: str) -> str | None:
    """Return an option of `minibroker` itself as one types it, with its metavariable; None for any other option."""
    typed = _typed.get()
    root = None if typed is None else typed.root()
    found = next((one for one in getattr(root, "params", ()) if option in (*one.opts, *one.secondary_opts)), None)
    if found is None:
        return None
    return option if found.is_flag else f"{option} {found.metavar}"


def comes_from(context: typer.Context, parameter: str, source: str) -> bool:
    """Whether the parameter has its value from COMMANDLINE, ENVIRONMENT or DEFAULT."""
    found = context.get_parameter_source(parameter)
    return found is not None and found.name == source


def pastable(text: str) -> str:
    """Return the text with `--data` or `--bootstrap` in its hints, if one was given."""
    typed = _typed.get()
    if typed is None or not typed.options:
        return text
    if not _HINT.search(text):
        return text
    root = typed.root()

    def complete(hint: re.Match[str]) -> str:
        command = _completed(hint[1], root, typed.options)
        return f"`minibroker {_with_config(command, typed.config)}`"

    return _HINT.sub(complete, text)


def _completed(hint: str, root: Any, options: dict[str, str]) -> str:
    if "--help" in hint:
        return hint
    command = root
    for word in hint.split():
        command = getattr(command, "commands", {}).get(word, command)
    # If a command has both options, `--bootstrap` is used.
    for parameter in ("bootstrap", "data"):
        if parameter in options and any(taken.name == parameter for taken in command.params):
            return hint if f"--{parameter}" in hint else f"{hint} {options[parameter]}"
    return hint


def _with_config(hint: str, config: list[str]) -> str:
    if not config or "--bootstrap" not in hint or "--command-config" in hint:
        return hint
    return f"{'--command-config ADMIN_FILE' if hint.startswith(_FOR_ADMINISTRATORS) else config[-1]} {hint}"
