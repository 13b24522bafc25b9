"""`minibroker fault`, at a cluster whose processes are all gone: what the faults are then, and what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from minibroker import application
from minibroker.client.cli.terminal.output import run_app
from minibroker.deploy import journal
from minibroker.deploy.local import cluster_file, injected
from minibroker.deploy.local.cluster_file import BrokerEntry, ClusterFile, ZooKeeperEntry
from minibroker.deploy.local.faulty_cluster import FaultyCluster
from minibroker.deploy.scenarios.words import parse_action
from minibroker.protocol import faults


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    file = ClusterFile(
        ZooKeeperEntry("127.0.0.1:1", 1), (BrokerEntry(1, 9092), BrokerEntry(2, 9093)), allow_faults=True
    )
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
    ("words", "sentence"),
    [
        ("fill-disk 1", "fill disk of 1"),
        ("fill-disk 1 --log-dir 1", None),
        ("break-disk all", "break disk of all"),
        ("slow-disk 1 200ms", "slow disk of 1 by 200ms"),
        ("slow-disk 1 200ms --writes", None),
        ("cut 1 2", "cut 1 from 2"),
        ("cut 2 zookeeper", "cut 2 from zookeeper"),
        ("cut 1 2 --one-way", "cut packets from 1 to 2"),
        ("cut 1 all", None),
        ("isolate 2", "isolate 2"),
        ("slow-network all 5ms", "slow network by 5ms"),
        ("slow-network 1 5ms", None),
        ("drop-connections 1", "drop connections of 1"),
        ("move-clock 1 5s", "move clock of 1 by 5s"),
        ("move-clock 1 5s --back", None),
    ],
)
def test_each_fault_knows_the_sentence_of_scenarios_that_does_the_same(
    directory: Path, words: str, sentence: str | None
) -> None:
    journal.begin(directory)
    assert fault(directory, *words.split()) == 0
    [said] = journal.read(directory)
    assert said.command == f"fault {words}"
    if sentence is None:
        assert said.sentence is None
    else:
        assert said.sentence is not None
        text = said.sentence.replace(journal.WHO, said.who).replace(journal.OTHER, said.other or "")
        assert parse_action(text).text == sentence
    assert run_app(application(), ["heal", "--data", str(directory)]) == 0
    assert [each.sentence for each in journal.read(directory)[1:]] in (["heal"], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slow-disk", "1", "-5ms"], "No such option: -5, and no argument may be negative: see `minibroker fault slow"),
        (["slow-disk", "1", "5"], "TIME is '5': a time is a number with ms, s, min or h"),
        (["move-clock", "1", "0s"], "TIME is '0s', so no clock would move"),
    ],
)
def test_a_time_that_breaks_nothing_is_refused_with_the_rule(
    directory: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert fault(directory, *words) == 2
    assert said in capsys.readouterr().err
    assert described(directory) == []
