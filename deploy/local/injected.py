"""The faults that brokers inject into themselves, by the files in DIR/faults.

A cluster of `up --allow-faults`, and every cluster of tests, starts its brokers with the path of a file. What is
written there holds until it is healed, also over a restart of the broker; `up` begins without faults.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from minibroker.deploy.errors import LaunchError, LaunchTimedOut, hidden_from_pytest
from minibroker.deploy.local.cluster_file import ClusterFile
from minibroker.deploy.local.processes import OWNER_ONLY, wait_until
from minibroker.protocol.faults import (
    FILE_SUFFIX,
    MAX_DELAY_MS,
    Faults,
    Obeyed,
    decoded,
    described,
    encoded,
    has_any,
    obeyed_path,
)
from minibroker.protocol.world.real import RealDisk

__tracebackhide__ = hidden_from_pytest

DIRECTORY = "faults"
OBEYED_TIMEOUT_S = 30.0
"""The broker reads its file every few milliseconds, but the machine may be busy."""


def file_of(directory: Path, broker_id: int) -> Path:
    return directory / DIRECTORY / f"broker-{broker_id}{FILE_SUFFIX}"


def begin(directory: Path) -> None:
    """Remove the faults of an earlier time."""
    shutil.rmtree(directory / DIRECTORY, ignore_errors=True)
    (directory / DIRECTORY).mkdir(mode=OWNER_ONLY)


def milliseconds(delay_s: float) -> int:
    """Raises LaunchError for a delay that no broker can have."""
    if not 0 <= delay_s * 1_000 <= MAX_DELAY_MS:
        raise LaunchError(f"a delay of {delay_s:g} s: give seconds from 0 to {MAX_DELAY_MS / 1_000:g}")
    return round(delay_s * 1_000)


def check_allowed(cluster: ClusterFile) -> None:
    """Raises LaunchError if the brokers of this cluster obey no faults."""
    if not cluster.allow_faults:
        raise LaunchError(
            "the brokers of this cluster were not started to have such faults: `minibroker down`, then `minibroker up "
            "--allow-faults`"
        )


@contextlib.contextmanager
def naming_faults(directory: Path, cluster: ClusterFile) -> Iterator[None]:
    """Add the faults to any error: a broker may fail to start for them."""
    try:
        yield
    except LaunchError as error:
        ill = all_faults(directory, cluster)
        if not ill:
            raise
        names = "; ".join(f"broker {id} has faults ({', '.join(described(found))})" for id, found in ill.items())
        raise type(error)(f"{error}; {names}: `minibroker heal` ends them") from error


def faults_of(directory: Path, broker_id: int) -> Faults:
    """Raises LaunchError if the file is damaged."""
    path = file_of(directory, broker_id)
    try:
        return decoded(path.read_bytes())
    except FileNotFoundError:
        return Faults()
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} is damaged ({error}): remove it, which heals the broker") from error


def all_faults(directory: Path, cluster: ClusterFile) -> Mapping[int, Faults]:
    """Return the faults of each broker that has any."""
    if not cluster.allow_faults:
        return {}
    found = {entry.id: faults_of(directory, entry.id) for entry in cluster.brokers}
    return {broker_id: faults for broker_id, faults in found.items() if has_any(faults)}


def order(directory: Path, broker_id: int, change: Callable[[Faults], Faults]) -> Faults:
    """Write the changed faults of a broker, and return them. The caller holds the cluster's lock. Raises LaunchError if
    the file is damaged or cannot be written."""
    before = faults_of(directory, broker_id)
    after = msgspec.structs.replace(change(before), revision=before.revision + 1)
    path = file_of(directory, broker_id)
    try:
        RealDisk().write_atomically(str(path), encoded(after))
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
    return after


def wait_until_obeyed(directory: Path, broker_id: int, revision: int, is_running: Callable[[], bool]) -> None:
    """Return once the broker obeys this revision, or does not run any more. Raises LaunchTimedOut."""
    if not wait_until(lambda: is_obeyed(directory, broker_id, revision) or not is_running(), OBEYED_TIMEOUT_S):
        raise LaunchTimedOut(
            f"broker {broker_id} does not obey {file_of(directory, broker_id)} after {OBEYED_TIMEOUT_S:g} s: see "
            f"`minibroker logs {broker_id}`"
        )


def is_obeyed(directory: Path, broker_id: int, revision: int) -> bool:
    """Return whether the broker has acknowledged this revision or a later one."""
    try:
        path = Path(obeyed_path(str(file_of(directory, broker_id))))
        return msgspec.json.decode(path.read_bytes(), type=Obeyed).revision >= revision
    except (FileNotFoundError, msgspec.MsgspecError):
        return False
