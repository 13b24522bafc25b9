"""The remedies in messages of a test's cluster: methods of the fixture in place of commands. Pure.

Messages come from the launcher, whose users type commands. A test calls the cluster's methods, so these are named where
one does the same; other commands get `--data`, without which they would act on another cluster or on none.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_COMMAND = re.compile("`minibroker ([^`]+)`")
_METHODS = ("start", "stop", "kill", "pause", "resume")


def for_tests(text: str, directory: Path) -> str:
    """Return the message with the remedies of a test, whose cluster it calls `cluster`."""
    return _COMMAND.sub(lambda found: f"`{_remedy(found[1], directory)}`", text)


def _remedy(command: str, directory: Path) -> str:
    match command.split():
        case [method, who] if method in _METHODS:
            return f"cluster.{method}({_argument(who)})"
        case ["heal"] | ["heal", _]:
            return "cluster.heal()"
        case ["logs", who]:
            return f"cluster.log_of({_argument(who) if who != 'all' else '...'})"
        case ["status"]:
            return "cluster.evidence()"
        case ["fault", "cut", who, other]:
            return f"cluster.cut({_argument(who)}, {_argument(other)})"
        case words if {"--help", "--data"}.isdisjoint(words):
            return f"minibroker {command} --data {shlex.quote(str(directory))}"
        case _:
            return f"minibroker {command}"


def _argument(who: str) -> str:
    return who if who.isdecimal() else f'"{who}"'
