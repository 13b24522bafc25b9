"""How commands protect their connections: `--command-config FILE`, as Kafka's tools have it.

Without it, the commands for a local cluster use the file that `minibroker up --secure` has written in its data
directory.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from minibroker.client.errors import InvalidSetting
from minibroker.client.security import KAFKA_NAMES, Security, from_kafka_names, protection
from minibroker.client.shown import shown

FILE_NAME = "client.properties"
"""The file of a local cluster, in its data directory."""
OPTION = "--command-config"

_NAME = re.compile("[A-Za-z0-9._-]+")

_chosen: Security | None = None
_after_refusal = ""
_overlooked: Path | None = None


def choose(path: Path | None) -> None:
    """Use the settings in the file for all connections of this command. Raises InvalidSetting."""
    global _chosen, _after_refusal, _overlooked
    _chosen = None if path is None else read(path)
    _after_refusal = "" if path is None else f". The credentials are from {path}"
    _overlooked = None


def choose_of(data: Path) -> None:
    """Use the file of a local cluster, if there is one, unless `--command-config` is given. Raises InvalidSetting."""
    global _after_refusal
    path = data / FILE_NAME
    if _chosen is None and path.exists():
        choose(path)
        _after_refusal += ": if the password was changed elsewhere, `minibroker down` and `minibroker up` set it again"


def is_secured(data: Path) -> bool:
    """Whether the local cluster has a file of settings."""
    return (data / FILE_NAME).exists()


def overlook(data: Path) -> None:
    """Remember the file of the local cluster, which the command does not use because of `--bootstrap`."""
    global _overlooked
    path = data / FILE_NAME
    if _chosen is None and path.exists():
        _overlooked = path


def remedy() -> str | None:
    """Return what to do if no broker answers and a file was overlooked, else None."""
    if _overlooked is None:
        return None
    file = shlex.quote(str(_overlooked))
    return f"the cluster in {_overlooked.parent} is secured, so give `{OPTION} {file}` before the command"


def after_refusal() -> str:
    """Return the end of an error if a broker has refused the credentials: where they come from, and what to do if they
    are the local cluster's own."""
    return _after_refusal


def chosen() -> Security:
    """Return the arguments of clients."""
    return _chosen or {}


def principal() -> str | None:
    """Return the principal of clients, if it is known without a broker."""
    return protection("minibroker", chosen()).principal


def read(path: Path) -> Security:
    """Return the arguments of clients in a file with Kafka's names. Raises InvalidSetting."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(OPTION, str(path), f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidSetting(OPTION, str(path), "it is not UTF-8") from error
    values: dict[str, str] = {}
    for number, line in _logical_lines(text):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or name not in KAFKA_NAMES:
            # The text of a line without a name may be a password.
            what = f"{shown(name)} is none of" if equals and _NAME.fullmatch(name) else "its beginning is none of"
            rule = f"line {number}: {what} the names {', '.join(KAFKA_NAMES)}; each line is NAME=VALUE"
            raise InvalidSetting(OPTION, str(path), rule)
        values[name] = value
    try:
        return from_kafka_names(values)
    except InvalidSetting as error:
        raise InvalidSetting(OPTION, str(path), str(error)) from error


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines that are no comments, with their numbers. A line that ends with a backslash goes on in the
    next."""
    found: list[tuple[int, str]] = []
    began, so_far = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not so_far and (not line.strip() or line.lstrip().startswith(("#", "!"))):
            continue
        began = began if so_far else number
        if line.endswith("\\"):
            so_far += line[:-1].strip() + " "
            continue
        found.append((began, so_far + line.strip()))
        so_far = ""
    if so_far:
        found.append((began, so_far))
    return found
