"""The data directory of a cluster: its log directories, its disk, and which paths are possible."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from minibroker.client.shown import undecodable
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local.processes import OWNER_ONLY

MAX_BROKERS = 100
MAX_LOG_DIRS = 16
LITTLE_ROOM_BYTES = 1024 * 1024
"""A disk with less room is called full: a broker fails at the first write that does not fit."""


@contextlib.contextmanager
def made(directory: Path) -> Iterator[None]:
    """Create the directory, and remove what was created if an error leaves it empty. Raises LaunchError if the
    directory cannot be created, or if settings of brokers cannot name it."""
    if (path := undecodable(directory)) is not None:
        raise LaunchError(f"the data directory {path} is not UTF-8, and settings are: use --data with another path")
    if "," in str(directory):
        raise LaunchError(
            f"the data directory {directory} has a comma, which separates log directories in `log.dirs`: use --data "
            "with another path"
        )
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"the data directory {directory} cannot be created: {error.strerror}; use --data") from error
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, missing)
        yield
        stack.pop_all()


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove these, the innermost first, up to one that is not empty or that another command has removed."""
    with contextlib.suppress(OSError):
        for each in directories:
            each.rmdir()


def log_dirs(directory: Path, broker_id: int, count: int) -> list[Path]:
    """Return a broker's log directories. The first does not depend on `count`, so that more can be added later."""
    first = directory / f"broker-{broker_id}"
    return [first, *(first.with_name(f"{first.name}-disk-{number}") for number in range(2, count + 1))]


def brokers_with_replicas(directory: Path) -> list[int]:
    """Return the ids of the brokers that have replicas here, whether the cluster file names them or not."""
    return [broker_id for broker_id in range(1, MAX_BROKERS + 1) if has_replicas(directory, broker_id)]


def has_replicas(directory: Path, broker_id: int) -> bool:
    """Return whether the broker has replicas here that are not deleted."""
    return any(map(_has_replicas, log_dirs(directory, broker_id, MAX_LOG_DIRS)))


def remove(directory: Path, broker_id: int) -> None:
    """Remove the log directories of a broker that does not run. Raises LaunchError."""
    for path in log_dirs(directory, broker_id, MAX_LOG_DIRS):
        try:
            shutil.rmtree(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise LaunchError(f"{path} cannot be removed: {error.strerror}; remove it yourself") from error


def _has_replicas(log_dir: Path) -> bool:
    try:
        # The name of a deleted replica's directory, which stays for a while, does not end in a partition's number.
        return any(entry.is_dir() and entry.name.rpartition("-")[2].isdecimal() for entry in log_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a failing disk must not count as empty
        return True


def is_full(directory: Path) -> bool:
    try:
        found = os.statvfs(directory)
    except FileNotFoundError:
        return False
    return found.f_bavail * found.f_frsize < LITTLE_ROOM_BYTES


@contextlib.contextmanager
def naming_a_full_disk(directory: Path) -> Iterator[None]:
    """Add the full disk to any error: a process that cannot start on one rarely has the room to log the reason."""
    try:
        yield
    except (LaunchError, OSError) as error:
        if not is_full(directory):
            raise
        raise LaunchError(f"{error}; the disk of {directory} is full: make room there") from error
