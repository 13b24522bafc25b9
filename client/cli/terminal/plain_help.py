"""Help and errors for users: without Python's type names, and with every text as written.

Typer shows `<int range> [1<=x<=100]` although N says all that a user needs, shows `<bool>` beside options without a
value, and parses `[spark]` as markup. It has no options to turn this off, so its texts are replaced in each command
before the command runs.
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
    """Change a command made by Typer, and its subcommands."""
    command.help = _literal(command.help)
    # The help option is made on first use and kept.
    help_option = command.get_help_option(typer.Context(command, help_option_names=HELP_OPTIONS))
    for parameter in [*command.params, help_option]:
        parameter.help = _literal(parameter.help)
        _hide_type(parameter)
    for subcommand in getattr(command, "commands", {}).values():
        make_plain(subcommand)


def plain_error(text: str, cause: Any) -> str:
    """Return Typer's message about a value without Python's terms, but with the value, which only `cause` has."""
    if text.count("Input should be ") == 1 and hasattr(cause, "errors"):
        text += f", not {cause.errors()[0]['input']!r}"
    for theirs, ours in _ERRORS:
        text = text.replace(theirs, ours)
    return text


def _hide_type(parameter: Any) -> None:
    if not hasattr(parameter, "display_type_rich"):  # older versions use another name
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
