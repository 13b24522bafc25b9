"""How long the launcher waits for a started broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minibroker.broker.settings.parsing import read_properties
from minibroker.deploy.errors import LaunchTimedOut
from minibroker.deploy.local import broker_process
from minibroker.deploy.local.broker_process import StartingBroker, wait_until_ready
from minibroker.deploy.local.processes import Process
from minibroker.protocol.recovery_progress import RecoveryProgress

RECOVERING = "2026-11-22T10:30:00.000 INFO minibroker.storage: recovering /data: {}\n"
READY = "2026-11-28T03:00:00.123 ready broker.id=1 port=9092\n"


def waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str]) -> list[str]:
    """Wait for a broker that prints one line in each of these spans of time; return the lines that it did not print."""
    broker = StartingBroker(1, Process(1, "b"), tmp_path / "broker-1.log", 0)
    broker.log.touch()

    def wait_until(condition: Callable[[], bool], _: float) -> bool:
        with broker.log.open("a") as log:
            log.write(lines.pop(0))
        return condition()

    monkeypatch.setattr(broker_process, "wait_until", wait_until)
    monkeypatch.setattr(broker_process, "is_alive", lambda _: True)
    wait_until_ready([broker])
    return lines


def test_a_broker_that_gets_on_with_its_recovery_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    news = [RECOVERING.format(RecoveryProgress(12, remaining, 0, 0, 0)) for remaining in range(12, 0, -1)]
    assert waited_for(monkeypatch, tmp_path, [*news, READY]) == []


@pytest.mark.parametrize("line", [RECOVERING.format("3 of 12 logs"), "it says something else\n"])
def test_one_that_does_not_get_on_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    with pytest.raises(LaunchTimedOut, match="broker 1 was not ready within 30 s"):
        waited_for(monkeypatch, tmp_path, [line] * 5)


HANDED_OVER = '2026-11-28T03:00:00.123 handed over: {"moved":2,"remaining":1,"among_them":["orders-0"],"problem":""}\n'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([READY, HANDED_OVER, "2026 INFO stopped\n"], "2 leaders moved to other brokers; 1 partition has too few"),
        ([READY, HANDED_OVER, READY, "error: it failed\n"], None),
        ([READY], None),
        ([], None),
    ],
)
def test_the_last_words_of_a_stopped_broker_are_those_of_its_last_run(
    tmp_path: Path, lines: list[str], said: str | None
) -> None:
    log = tmp_path / "broker-1.log"
    if lines:
        log.write_text("".join(lines))
    found = broker_process.handed_over(log)
    assert found is None if said is None else str(found).startswith(said)


def test_credentials_are_in_a_file_of_the_owner_and_not_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[str] = []

    def spawn(module: str, arguments: list[str], *_: object) -> Process:
        spawned[:] = arguments
        return Process(1, "")

    monkeypatch.setattr(broker_process, "spawn_python", spawn)
    log = tmp_path / "logs" / "broker-1.log"
    secrets = {
        "listener.name.x.plain.sasl.jaas.config": 'PlainLoginModule required\nuser_a="hunter22" ;',
        "ssl.key.password": "hunter22",
        "ssl.keystore.key": "-----BEGIN hunter22\nEND",
        "broker.secret": "hunter22" * 2,
    }
    broker_process.start(1, 9092, None, [tmp_path], log, "z:1", {"super.users": "User:a", **secrets})
    assert "hunter22" not in " ".join(spawned)
    assert "super.users=User:a" in spawned
    path = tmp_path / "logs" / "broker-1.secrets"
    assert spawned[:2] == ["--properties", str(path)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_properties(str(path)) == secrets | {
        "listener.name.x.plain.sasl.jaas.config": 'PlainLoginModule required user_a="hunter22" ;',
        "ssl.keystore.key": "-----BEGIN hunter22\\nEND",
    }
    broker_process.start(1, 9092, None, [tmp_path], log, "z:1", {})
    assert not path.exists()
    assert "--properties" not in spawned
