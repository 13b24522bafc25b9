"""Processes that outlive the command that started them: spawn, recognise again, signal, wait.

The problem: `minibroker up --detach` ends, and a later `minibroker kill 2` must find that broker, and never hit
a stranger that got its process id since. The choice: a process is its id *and* its birth (the host's boot id and
the start time in /proc/PID/stat), and both are compared before every signal. Rejected: pid files (a recycled id is
killed), process groups (the same), a supervisor daemon (one more process that can die).

A child that has ended stays a zombie until its parent asks for it, and the parent may be a foreground `up` or an
`init` that never does. So a zombie counts as gone, and our own are reaped whenever someone looks. Not before its last
thread has ended, though: until then a killed Java, whose first thread is a zombie at once, still holds its port.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

_POLL_INTERVAL_S = 0.005


def let_signals_interrupt() -> None:
    """For commands that take down in the end what they have started: SIGTERM and SIGHUP are as Ctrl-C. So is SIGINT,
    explicitly, since a shell starts `minibroker up &` with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: signal.raise_signal(signal.SIGINT))


class Process(msgspec.Struct, frozen=True):
    """A process of this host, recognisable after its id was given to another."""

    pid: int
    birth: str


class ProcessState(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    """Stopped by a signal (SIGSTOP): it holds its memory and connections and does nothing."""
    GONE = "gone"


def spawn(command: list[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Process:
    """Start `command` in a session of its own, so that a Ctrl-C at the terminal does not reach it.

    What it prints is appended to `log`. `environment` is added to this process's own. Raises OSError where the program
    cannot be executed.
    """
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        command[0],
        command,
        {**os.environ, **environment},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), log_flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGTERM],
    )
    found = _look(pid)
    return Process(pid, found.birth if found else "")


def spawn_python(
    module: str,
    arguments: Sequence[str],
    log: Path,
    group_id: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Process:
    """`spawn` for a module under this interpreter, unbuffered; under another group id, if that is given, which takes
    root and the program setpriv.

    With -P, since a `minibroker/` or a `kazoo.py` in the user's working directory is not the one that is meant.
    """
    command = [sys.executable, "-P", "-u", "-m", module, *arguments]
    if group_id is not None:
        command = [shutil.which("setpriv") or "setpriv", f"--regid={group_id}", "--keep-groups", "--", *command]
    return spawn(command, log, environment)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and its like wait until the end: around a spawn and the note of it, or the process might be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def state_of(process: Process) -> ProcessState:
    _reap(process.pid)
    found = _look(process.pid)
    if found is None or found.birth != process.birth:
        return ProcessState.GONE
    if found.state in "ZX" and found.threads <= 1:
        return ProcessState.GONE
    return ProcessState.PAUSED if found.state in "Tt" else ProcessState.RUNNING


def is_alive(process: Process) -> bool:
    return state_of(process) is not ProcessState.GONE


def send_signal(process: Process, number: signal.Signals) -> bool:
    """False, and nothing done, where the process is gone."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Look every few milliseconds; False where `condition` did not become true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def wait_until_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Those that still live at the end of the time."""
    living = list(processes)

    def all_gone() -> bool:
        living[:] = [process for process in living if is_alive(process)]
        return not living

    wait_until(all_gone, timeout_s)
    return living


def _reap(pid: int) -> None:
    # Where it is not our child, whoever started it, or init, reaps it.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class _Found(NamedTuple):
    state: str
    threads: int
    birth: str


def _look(pid: int) -> _Found | None:
    """The process that has this id now, according to /proc/PID/stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return _Found(fields[0], int(fields[17]), f"{boot_id}:{fields[19]}")
