"""A broker as a local process: how it is started, and how it reports that it serves or why it does not.

`python -m minibroker.broker` prints one line `TIME ready broker.id=N port=P` once it serves, and one line `error: ...`
if it ends because it cannot. Both are read from its log, from the position at which this run began, so that any process
can wait for them. Clients cannot forge these lines: a line with text of theirs begins with the time and the level, or
with blanks (`broker/log_format.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import OWNER_ONLY, Process, is_alive, spawn_python, wait_until
from minibroker.protocol.credential_names import is_credential

LOG_LEVEL = "MINIBROKER_LOG_LEVEL"
"""The environment variable that brokers read."""
READY_TIMEOUT_S = 30.0
_LAST_LINE_BYTES = 65_536
_LAST_LINES_BYTES = 1_048_576
_READY = " ready broker.id="
_HANDED_OVER = " handed over: "
_RECOVERING = " INFO minibroker.storage: recovering "

OWN_SETTINGS = {
    "broker.id": "brokers are numbered from 1 on",
    "broker.secret": "their secret is in broker.secret, in the data directory",
    "broker.secret.file": "their secret is in broker.secret, in the data directory",
    "listeners": "give --base-port",
    "advertised.listeners": "each broker is reached where it listens, on 127.0.0.1",
    "control.plane.listener.name": "it is of no use here",
    "log.dirs": "give --data, and --log-dirs for several of them",
    "zookeeper.connect": "give --zookeeper",
    "metrics.listener": "`minibroker status --format json` says where metrics are",
}
"""The settings that the launcher sets itself, and the alternative for each, which messages show."""


class HandedOver(msgspec.Struct, frozen=True):
    """A broker's report about its leaders before it stopped."""

    moved: int
    """The number of partitions whose leader moved to another broker."""
    remaining: int
    """The number of partitions that have no leader without it, or too few replicas in sync."""
    among_them: tuple[str, ...] = ()
    """The names of the first of these."""
    problem: str = ""
    """The reason why the controller did not move them, or an empty string."""

    def __str__(self) -> str:
        moved = f"{self.moved} {'leader' if self.moved == 1 else 'leaders'} moved to other brokers"
        names = ", ".join(self.among_them) + (", ..." if self.remaining > len(self.among_them) else "")
        what = "1 partition has" if self.remaining == 1 else f"{self.remaining} partitions have"
        remaining = f"; {what} too few replicas in sync without it: {names}" if self.remaining else ""
        problem = f"; the controller did not answer: {self.problem}" if self.problem else ""
        return f"{moved}{remaining}{problem}"


class StartingBroker(NamedTuple):
    """A broker that was spawned, and the position in its log at which this run begins."""

    broker_id: int
    process: Process
    log: Path
    log_offset: int


def listeners(port: int, control_port: int = 0, ssl_port: int | None = None, protocol: str = "PLAINTEXT") -> str:
    """Return the setting. Only brokers use the control listener, and read its port from ZooKeeper: 0 means any port."""
    also = "" if ssl_port is None else f"SSL://{LOOPBACK}:{ssl_port},"
    return f"{protocol}://{LOOPBACK}:{port},{also}CONTROLLER://{LOOPBACK}:{control_port}"


def start(
    broker_id: int,
    port: int,
    metrics_port: int | None,
    log_dirs: Sequence[Path],
    log: Path,
    zookeeper_connect: str,
    settings: Mapping[str, str],
    group_id: int | None = None,
    log_level: str = "",
    faults: Path | None = None,
) -> StartingBroker:
    """Spawn the broker, which does not serve yet.

    `settings` override the launcher's own. Credentials among them reach the broker in a file beside its log. It runs
    under `group_id`, if given. An empty `log_level` means the default. It obeys the file `faults`, if given.
    """
    log.parent.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
    log_offset = log.stat().st_size if log.exists() else 0
    properties = {
        "broker.id": str(broker_id),
        "listeners": listeners(port),
        "control.plane.listener.name": "CONTROLLER",
        "log.dirs": ",".join(map(str, log_dirs)),
        "zookeeper.connect": zookeeper_connect,
        "metrics.listener": "" if metrics_port is None else f"{LOOPBACK}:{metrics_port}",
        **settings,
    }
    secrets = {name: value for name, value in properties.items() if is_credential(name)}
    arguments = _secrets_file(broker_id, log.parent, secrets)
    for name, value in properties.items():
        if name not in secrets:
            arguments += ["--override", f"{name}={value}"]
    if faults is not None:
        arguments += ["--faults", str(faults)]
    environment = {LOG_LEVEL: log_level} if log_level else {}
    process = spawn_python("minibroker.broker", arguments, log, group_id, environment)
    return StartingBroker(broker_id, process, log, log_offset)


def _secrets_file(broker_id: int, directory: Path, secrets: Mapping[str, str]) -> list[str]:
    """Write the credentials into a file that only its owner can read, and return the arguments that name it: every user
    of the machine sees command lines. Raises LaunchError."""
    path = directory / f"broker-{broker_id}.secrets"
    try:
        path.unlink(missing_ok=True)
        if not secrets:
            return []
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.writelines(f"{name}={_in_one_line(name, value)}\n" for name, value in secrets.items())
    except OSError as error:
        raise LaunchError(f"{path}, with the credentials of broker {broker_id}, cannot be written: {error}") from error
    return ["--properties", str(path)]


def _in_one_line(name: str, value: str) -> str:
    """Brokers read `\\n` in PEM texts as the end of a line; in JAAS it separates words."""
    return (" " if name.endswith("jaas.config") else "\\n").join(value.splitlines())


def wait_until_ready(brokers: Sequence[StartingBroker], timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return once all serve.

    Raises LaunchError as soon as one has ended, and LaunchTimedOut if one makes no progress for `timeout_s`: a broker
    that recovers its logs may take any time, and prints its progress every few seconds.
    """
    waiting = list(brokers)
    progress: list[str] = []

    def settled() -> bool:
        waiting[:] = [broker for broker in waiting if not _is_ready(broker)]
        return not waiting or any(not is_alive(broker.process) for broker in waiting)

    while not wait_until(settled, timeout_s):
        before, progress = progress, [_progress(broker) for broker in waiting]
        if progress == before or not any(progress):
            break
    for broker in waiting:
        if not is_alive(broker.process):
            raise LaunchError(f"broker {broker.broker_id} did not start: {_last_words(broker)}")
    if waiting:
        late = waiting[0]
        raise LaunchTimedOut(f"broker {late.broker_id} was not ready within {timeout_s:g} s: see {late.log}")


def _output_of(broker: StartingBroker) -> list[str]:
    with broker.log.open("rb") as log:
        log.seek(broker.log_offset)
        return log.read().decode("utf-8", "replace").splitlines()


def _is_ready(broker: StartingBroker) -> bool:
    return any(_said(_READY, line).startswith(f"{broker.broker_id} ") for line in _output_of(broker))


def _said(what: str, line: str) -> str:
    """Return the text after the time and `what` in a line that begins so; empty for any other line."""
    time, found, said = line.partition(what)
    return said if found and " " not in time else ""


def _progress(broker: StartingBroker) -> str:
    """Return the last report of a recovery, or an empty string."""
    return next((said for line in reversed(_output_of(broker)) if (said := _said(_RECOVERING, line))), "")


def _last_words(broker: StartingBroker) -> str:
    """Return the error that the broker printed, or else its last line and the path of the log."""
    lines = [line for line in _output_of(broker) if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return f"{lines[-1] if lines else 'it said nothing'}; see {broker.log}"


def last_error(log: Path) -> str | None:
    """Return the error with which the last run ended, if its last line is one."""
    lines = _last_lines(log, _LAST_LINE_BYTES)
    return lines[-1].removeprefix("error: ") if lines and lines[-1].startswith("error: ") else None


def handed_over(log: Path) -> HandedOver | None:
    """Return the report of the last run; None if it was killed, or has no controlled shutdown."""
    for line in reversed(_last_lines(log, _LAST_LINES_BYTES)):
        if _said(_READY, line):
            return None
        if said := _said(_HANDED_OVER, line):
            return msgspec.json.decode(said, type=HandedOver)
    return None


def _last_lines(log: Path, size: int) -> list[str]:
    """Return the whole lines in the last bytes of the log."""
    try:
        with log.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(begin)
            lines = file.read().decode("utf-8", "replace").splitlines()
            return lines[1:] if begin else lines
    except FileNotFoundError:
        return []
