"""The file that a broker obeys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from minibroker.broker import __main__ as process
from minibroker.broker.faults.fault_file import FaultFile
from minibroker.protocol import faults
from minibroker.protocol.faults import Faults, Obeyed
from minibroker.protocol.world.real import RealDisk
from tests.waiting import until_true

FULL = faults.disks_filled(Faults(4), ["/data/broker-1"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker-1.json"


@pytest.fixture
def file(path: Path) -> Iterator[FaultFile]:
    made = FaultFile(str(path), RealDisk())
    yield made
    made.close()


def obeyed(path: Path) -> int:
    return msgspec.json.decode(path.with_suffix(".obeyed.json").read_bytes(), type=Obeyed).revision


def test_a_broker_begins_with_the_faults_that_are_written_and_says_so(path: Path, file: FaultFile) -> None:
    path.write_bytes(faults.encoded(FULL))
    file.start()
    assert file.current == FULL
    assert obeyed(path) == 4


def test_without_a_file_nothing_fails(path: Path, file: FaultFile) -> None:
    file.start()
    assert file.current == Faults()
    assert obeyed(path) == 0


def test_a_change_is_obeyed_reported_and_acknowledged(path: Path, file: FaultFile) -> None:
    told: list[Faults] = []
    file.on_change(told.append)
    file.start()
    RealDisk().write_atomically(str(path), faults.encoded(FULL))
    until_true(lambda: obeyed(path) == 4)
    assert file.current == FULL
    path.unlink()
    until_true(lambda: obeyed(path) == 0)
    assert told == [Faults(), FULL, Faults()]


def test_a_file_that_makes_no_sense_changes_nothing_and_is_reported_once(
    path: Path, file: FaultFile, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(faults.encoded(FULL))
    file.look()
    path.write_text('{"revision": 5, "disks": {"/data": {"is_empty": true}}}')
    with caplog.at_level(logging.WARNING, "minibroker.faults"):
        file.look()
        file.look()
    assert file.current == FULL
    assert obeyed(path) == 4
    [line] = caplog.messages
    assert "makes no sense" in line
    assert "is_empty" in line


def test_an_acknowledgement_that_cannot_be_written_is_reported_once_and_written_later(
    path: Path, file: FaultFile, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = path.with_suffix(".obeyed.json")
    in_the_way.mkdir()
    path.write_bytes(faults.encoded(FULL))
    with caplog.at_level(logging.WARNING, "minibroker.faults"):
        file.look()
        file.look()
    [line] = caplog.messages
    assert "cannot be written, trying again" in line
    in_the_way.rmdir()
    file.look()
    assert obeyed(path) == 4


def test_a_broker_obeys_only_a_file_of_its_command_line() -> None:
    settings = ["--override", "broker.id=1", "--override", "zookeeper.connect=z:1", "--override", "log.dirs=/tmp/x"]
    assert process._parse(settings)[1] is None
    assert process._parse([*settings, "--faults", "/data/faults/broker-1.json"])[1] == "/data/faults/broker-1.json"
