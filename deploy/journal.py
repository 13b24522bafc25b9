"""The commands of other terminals and of the console, while `minibroker scenario record` runs: DIR/recording.jsonl.

The recorder sees processes, and a process does not say by which words it was hit, or that its disk is slow. So each
command appends its words to the file, if the file is there; the recorder creates it, and removes it at its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from minibroker.deploy.local.who import Member

FILE_NAME = "recording.jsonl"
WHO, OTHER = "{who}", "{other}"


class Said(msgspec.Struct, frozen=True):
    """A command that has done something."""

    command: str
    """Its words, without `minibroker`."""
    sentence: str | None
    """An action of scenario files, with the places WHO and OTHER; None if no action does the same."""
    who: str
    other: str | None
    members: list[Member]
    """The processes that it hit."""
    began_s: float
    """On the monotonic clock of this machine."""
    ended_s: float


def begin(directory: Path) -> None:
    """Raises OSError."""
    path = directory / FILE_NAME
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)


def end(directory: Path) -> None:
    with contextlib.suppress(OSError):
        (directory / FILE_NAME).unlink()


def done(
    directory: Path,
    command: str,
    sentence: str | None,
    do: Callable[[], list[Member]],
    who: str = "",
    other: str | None = None,
) -> list[Member]:
    """Do it, and note it if a recorder listens. A note that cannot be written does not fail the command."""
    began_s = time.monotonic()
    members = do()
    path = directory / FILE_NAME
    if members and path.exists():
        said = Said(command, sentence, who, other, members, began_s, time.monotonic())
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(said) + b"\n")
    return members


def read(directory: Path) -> list[Said]:
    """Return all that was said so far. A line that is not complete yet is left out."""
    try:
        lines = (directory / FILE_NAME).read_bytes().split(b"\n")
    except OSError:
        return []
    return [msgspec.json.decode(line, type=Said) for line in lines[:-1]]
