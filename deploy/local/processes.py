"""Processes that outlive the command that started them: spawn, recognise, signal, wait.

The problem: `minibroker up --detach` ends, and a later `minibroker kill 2` must find that broker, and never another
process that has got its id since. The choice: a process is its id *and* its birth (the host's boot id and the start
time in /proc/PID/stat), and both are compared before every signal. Rejected: pid files (a recycled id is killed),
process groups (the same), a supervisor daemon (one more process that can die).

A child that has ended stays a zombie until its parent waits for it, and the parent may be a foreground `up` or an
`init` that never does. A zombie therefore counts as gone, and each look reaps our own. It counts only once its last
thread has ended: until then a killed Java, whose first thread is a zombie at once, still holds its port.
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

from minibroker.deploy.errors import LaunchTimedOut

POLL_INTERVAL_S = 0.005
OWNER_ONLY = 0o700
"""The mode of the directories that the launcher makes."""
KILL_TIMEOUT_S = 10.0


def let_signals_interrupt() -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, for commands that finally take down the processes they started. SIGINT is set
    explicitly, since a shell starts `minibroker up &` with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: signal.raise_signal(signal.SIGINT))


class Process(msgspec.Struct, frozen=True):
    """A process of this host, recognisable even after another process has got its id."""

    pid: int
    birth: str


class ProcessState(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    """Stopped by a signal (SIGSTOP): it holds its memory and connections and does nothing."""
    GONE = "gone"


def spawn(command: list[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Process:
    """Start `command` in a session of its own, so that a Ctrl-C at the terminal does not reach it.

    Its output is appended to `log`. `environment` is added to this process's own. Raises OSError if the program cannot
    be executed.
    """
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        command[0],
        command,
        {**os.environ, **environment},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), log_flags, 0o600),
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
    """Spawn a module under this interpreter, unbuffered. Another `group_id` takes root and the program setpriv.

    With -P, so that a `minibroker/` or a `kazoo.py` in the user's working directory is not imported.
    """
    command = [sys.executable, "-P", "-u", "-m", module, *arguments]
    if group_id is not None:
        command = [shutil.which("setpriv") or "setpriv", f"--regid={group_id}", "--keep-groups", "--", *command]
    return spawn(command, log, environment)


def this_process() -> Process:
    found = _look(os.getpid())
    return Process(os.getpid(), found.birth if found else "")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end: around a spawn and its record, or the process might be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def state_of(process: Process | None) -> ProcessState:
    """Return the state; None, a process that was never started, is gone."""
    if process is None:
        return ProcessState.GONE
    _reap(process.pid)
    found = _look(process.pid)
    if found is None or found.birth != process.birth:
        return ProcessState.GONE
    if found.state in "ZX" and found.threads <= 1:
        return ProcessState.GONE
    return ProcessState.PAUSED if found.state in "Tt" else ProcessState.RUNNING


def is_alive(process: Process | None) -> bool:
    return state_of(process) is not ProcessState.GONE


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Return False, and do nothing, if the process is gone."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Check `condition` every few milliseconds; return False if it does not become true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def wait_until_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Return the processes that still live after `timeout_s`."""
    living = list(processes)

    def all_gone() -> bool:
        living[:] = [process for process in living if is_alive(process)]
        return not living

    wait_until(all_gone, timeout_s)
    return living


def end(processes: Iterable[Process | None], *, kill: bool, timeout_s: float) -> None:
    """Terminate, and after `timeout_s`, or at once with `kill`, kill. Raises LaunchTimedOut if a process survives."""
    left = [process for process in processes if process is not None]
    if not kill:
        for process in left:
            send_signal(process, signal.SIGTERM)
            send_signal(process, signal.SIGCONT)  # a paused process handles no signal before it continues
        left = wait_until_gone(left, timeout_s)
    for process in left:
        send_signal(process, signal.SIGKILL)
    if left := wait_until_gone(left, KILL_TIMEOUT_S):
        raise LaunchTimedOut(
            f"process {left[0].pid} does not end even when killed: it hangs inside the operating system"
        )


def _reap(pid: int) -> None:
    # Other children are reaped by the process that started them, or by init.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class _Found(NamedTuple):
    state: str
    threads: int
    birth: str


def _look(pid: int) -> _Found | None:
    """Return the process that has this id now, according to /proc/PID/stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the program's name in parentheses, may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return _Found(fields[0], int(fields[17]), f"{boot_id}:{fields[19]}")
