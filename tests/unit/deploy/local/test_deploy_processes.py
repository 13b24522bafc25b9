from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from minibroker.deploy.local.processes import (
    Process,
    ProcessState,
    is_alive,
    send_signal,
    spawn,
    state_of,
    uninterrupted,
    wait_until,
    wait_until_gone,
)

SLEEPER = [sys.executable, "-S", "-c", "import signal; print('asleep', flush=True); signal.pause()"]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    log = tmp_path / "log"
    process = spawn(SLEEPER, log)
    assert wait_until(lambda: "asleep" in log.read_text(), 20)
    yield process
    send_signal(process, signal.SIGKILL)
    assert wait_until_gone([process], 10) == []


def test_a_process_is_recognised_by_its_birth_and_not_by_its_id_alone(sleeper: Process) -> None:
    impostor = msgspec.structs.replace(sleeper, birth="another boot:1")
    assert is_alive(sleeper)
    assert not is_alive(impostor)
    assert not send_signal(impostor, signal.SIGKILL)
    assert is_alive(sleeper)


def test_a_killed_child_is_gone_although_nobody_waited_for_it(sleeper: Process) -> None:
    assert send_signal(sleeper, signal.SIGKILL)
    assert wait_until_gone([sleeper], 10) == []
    assert state_of(sleeper) is ProcessState.GONE
    assert not send_signal(sleeper, signal.SIGTERM)


def test_a_stopped_process_is_paused_and_goes_on(sleeper: Process) -> None:
    send_signal(sleeper, signal.SIGSTOP)
    assert wait_until(lambda: state_of(sleeper) is ProcessState.PAUSED, 10)
    assert is_alive(sleeper)
    send_signal(sleeper, signal.SIGCONT)
    assert wait_until(lambda: state_of(sleeper) is ProcessState.RUNNING, 10)


def test_processes_that_outlive_the_time_limit_are_reported(sleeper: Process) -> None:
    assert wait_until_gone([sleeper], 0) == [sleeper]


def test_a_spawned_process_has_a_session_of_its_own_so_that_ctrl_c_misses_it(sleeper: Process) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    process = spawn([sys.executable, "-S", "-c", "import sys; print('out'); print('err', file=sys.stderr)"], log)
    assert wait_until_gone([process], 20) == []
    assert sorted(log.read_text().splitlines()) == ["before", "err", "out"]


def test_a_program_that_does_not_exist_cannot_be_spawned(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        spawn([str(tmp_path / "missing")], tmp_path / "log")


def test_an_interruption_waits_for_the_end_and_is_not_kept_from_the_child(tmp_path: Path) -> None:
    children: list[Process] = []

    def interrupted_spawn() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            children.append(spawn(SLEEPER, tmp_path / "log"))

    with pytest.raises(KeyboardInterrupt):
        interrupted_spawn()
    (child,) = children
    assert send_signal(child, signal.SIGTERM)
    assert wait_until_gone([child], 10) == []


def test_a_process_whose_first_thread_has_ended_is_not_gone_while_another_runs(tmp_path: Path) -> None:
    code = (
        "import ctypes, signal, threading\n"
        "threading.Thread(target=signal.sigwait, args=[[signal.SIGUSR1]]).start()\n"
        "print('asleep', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    log = tmp_path / "log"
    process = spawn([sys.executable, "-S", "-c", code], log)
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", 20), log.read_text()
        assert is_alive(process)
    finally:
        send_signal(process, signal.SIGKILL)
        assert wait_until_gone([process], 10) == []
