"""`minibroker logs` on existing files, without processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minibroker import application
from minibroker.client.cli.terminal.output import run_app
from minibroker.deploy import cli
from minibroker.deploy.local import broker_process, cluster_file
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    brokers = (BrokerEntry(1, 9092), BrokerEntry(2, 9093))
    cluster_file.save(tmp_path, ClusterFile(ZooKeeperEntry("127.0.0.1:1"), brokers))
    directory = tmp_path / "logs"
    directory.mkdir()
    (directory / "broker-1.log").write_text("".join(f"line {number}\n" for number in range(100)) + "not yet whole")
    (directory / "broker-2.log").write_text("only one\n")
    return directory


def printed(capsys: pytest.CaptureFixture[str], logs: Path, *arguments: str) -> list[str]:
    assert run_app(application(), ["logs", *arguments, "--data", str(logs.parent)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("block_bytes", [1, 7, 64 * 1024])
def test_tail_prints_the_last_lines_however_large_the_log_is(
    block_bytes: int, logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_TAIL_BLOCK_BYTES", block_bytes)
    everything = [f"line {number}" for number in range(100)]
    assert printed(capsys, logs, "1") == everything
    assert printed(capsys, logs, "1", "--tail", "3") == ["line 97", "line 98", "line 99"]
    assert printed(capsys, logs, "1", "--tail", "0") == []
    assert printed(capsys, logs, "1", "--tail", "100") == everything
    assert printed(capsys, logs, "1", "--tail", "1000") == everything


def test_tail_counts_the_lines_of_each_log(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, logs, "all", "--tail", "2") == [
        "broker 1: line 98",
        "broker 1: line 99",
        "broker 2: only one",
    ]
    (line,) = printed(capsys, logs, "1", "--tail", "1", "--format", "json")
    assert json.loads(line) == {"who": 1, "line": "line 99"}


def test_the_last_error_of_a_broker_is_what_its_log_ends_with(tmp_path: Path) -> None:
    log = tmp_path / "broker-1.log"
    assert broker_process.last_error(log) is None
    log.write_text("")
    assert broker_process.last_error(log) is None
    log.write_text("x" * 10_000 + "\nerror: the disk is full\n")
    assert broker_process.last_error(log) == "the disk is full"
    with log.open("a") as more:
        more.write("2026-11-22T06:00:00.000 INFO minibroker.broker: the next run\n")
    assert broker_process.last_error(log) is None
