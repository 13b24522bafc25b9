"""The file by which other commands find the console of a local cluster: DIR/console.json."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from minibroker.deploy.local.processes import Process, is_alive, this_process
from minibroker.protocol.world.real import RealDisk

FILE_NAME = "console.json"


class ConsoleFile(msgspec.Struct, frozen=True):
    address: str
    process: Process


def address(directory: Path) -> str | None:
    """Return the address of the console that runs; None if there is none."""
    found = _load(directory)
    return found.address if found is not None and is_alive(found.process) else None


def write(directory: Path, address: str) -> None:
    """Record that this process is the console. Of several, the last one is found. A disk that is full, or a directory
    that is not ours, does not keep the console from running."""
    with contextlib.suppress(OSError):
        RealDisk().write_atomically(
            str((directory / FILE_NAME).absolute()), msgspec.json.encode(ConsoleFile(address, this_process())) + b"\n"
        )


def remove(directory: Path) -> None:
    """Remove the file of this process."""
    found = _load(directory)
    if found is not None and found.process == this_process():
        (directory / FILE_NAME).unlink(missing_ok=True)


def _load(directory: Path) -> ConsoleFile | None:
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=ConsoleFile)
    except (OSError, msgspec.MsgspecError):
        return None
