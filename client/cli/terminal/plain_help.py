r"""Help and errors for users: without the names of Python's types, and with every text as it was written.

Typer shows `<int range> [1<=x<=100]` where N says all that a user needs, shows `<bool>` beside options that take no
value, and parses `[spark]` as markup. None of this can be turned off, so what it shows is replaced, in each command,
before one is run.
"""

from __future__ import annotations

import re
from typing import Any

import typer

HELP_OPTIONS = ["--help", "-h"]

_TYPES = {"str": "TEXT", "path": "PATH"} | dict.fromkeys(("int", "int range", "float", "float range"), "N")

_MARKUP = re.compile(r"\[(?=[a-z#/@])")

_ERRORS = (
    ("Input should be a valid integer, unable to parse string as an integer", "a whole number is expected"),
    ("Input should be a valid number, unable to parse string as a number", "a number is expected"),
    ("Input should be ", "it must be "),
    ("Value error, ", ""),
)


def make_plain(command: Any) -> None:
    """Change a command as Typer made it, and its subcommands."""
    command.help = _literal(command.help)
    # The help option is made when it is first asked for, and kept.
    help_option = command.get_help_option(typer.Context(command, help_option_names=HELP_OPTIONS))
    for parameter in [*command.params, help_option]:
        parameter.help = _literal(parameter.help)
        _hide_type(parameter)
    for subcommand in getattr(command, "commands", {}).values():
        make_plain(subcommand)


def plain_error(text: str) -> str:
    """What Typer says about a value, in words that need no knowledge of Python."""
    for theirs, ours in _ERRORS:
        text = text.replace(theirs, ours)
    return text


def _hide_type(parameter: Any) -> None:
    if not hasattr(parameter, "display_type_rich"):  # older versions call it something else
        return
    if parameter.param_type_name == "argument" or getattr(parameter, "is_flag", False):
        shown = ""
    else:
        label = parameter.display_type(None).strip("<>").removeprefix("list[").removesuffix("]")
        shown = parameter.metavar or _TYPES.get(label, label)
    parameter.display_type_rich = lambda ctx: shown
    # Values are checked as declared; these two are for the help alone.
    parameter.min = parameter.max = None


def _literal(text: str | None) -> str | None:
    return None if text is None else _MARKUP.sub(r"\\[", text)
