"""`minibroker fault`, at a cluster whose processes are all gone: what the faults are then, and what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from minibroker import application
from minibroker.client.cli.terminal.output import run_app
from minibroker.deploy.local import cluster_file, injected
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.protocol import faults


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    file = ClusterFile(ZooKeeperEntry("127.0.0.1:1", 1), (BrokerEntry(1, 9092),), allow_faults=True)
    cluster_file.save(tmp_path, file)
    injected.begin(tmp_path)
    return tmp_path


def fault(directory: Path, *words: str) -> int:
    return run_app(application(), ["fault", *words, "--data", str(directory)])


def described(directory: Path) -> list[str]:
    return [text for found in FaultyCluster(directory).faults().values() for text in faults.described(found)]


def test_a_slow_disk_keeps_its_slow_writes_until_no_time_ends_both(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = f"each write in {directory}/broker-1 takes 100 ms longer"
    assert fault(directory, "slow-disk", "1", "100ms", "--writes") == 0
    assert fault(directory, "slow-disk", "1", "200ms") == 0
    assert described(directory) == [f"each fsync in {directory}/broker-1 takes 200 ms longer", writes]
    assert capsys.readouterr().err == ""
    assert fault(directory, "slow-disk", "1", "0ms") == 0
    assert described(directory) == []
    assert capsys.readouterr().err == "0 ms: the disks are not slow any more\n"
    assert fault(directory, "slow-network", "1", "0ms") == 0
    assert capsys.readouterr().err == "0 ms: these packets are not slow any more\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slow-disk", "1", "-5ms"], "No such option: -5, and no argument may be negative: see `minibroker fault slow"),
        (["slow-disk", "1", "5"], "TIME is '5': a time is a number with ms, s or min"),
        (["move-clock", "1", "0s"], "TIME is '0s', so no clock would move"),
    ],
)
def test_a_time_that_breaks_nothing_is_refused_with_the_rule(
    directory: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert fault(directory, *words) == 2
    assert said in capsys.readouterr().err
    assert described(directory) == []
