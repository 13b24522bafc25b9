"""A real disk with injected faults."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from minibroker.broker.faults.faulty_disk import FaultyDisk, faults_at
from minibroker.protocol import faults
from minibroker.protocol.faults import DiskFaults, Faults
from minibroker.protocol.world.real import RealDisk


class Ill:
    """A disk below `path` with the faults that it is given."""

    def __init__(self, path: Path) -> None:
        self.now = Faults()
        self.directory = str(path / "log")
        (path / "log").mkdir()
        self.disk = FaultyDisk(RealDisk(), lambda: self.now)

    def file(self, name: str, within: str | None = None) -> str:
        return f"{within or self.directory}/{name}"


@pytest.fixture
def ill(tmp_path: Path) -> Ill:
    return Ill(tmp_path)


def test_faults_belong_to_a_directory_and_not_to_one_whose_name_begins_alike() -> None:
    found = faults.disks_filled(Faults(), ["/data/broker-1"])
    assert faults_at("/data/broker-1/orders-0/0.log", found).is_full
    assert faults_at("/data/broker-1", found).is_full
    assert faults_at("/data/broker-1-disk-2/orders-0", found) == DiskFaults()


def test_a_full_disk_takes_what_fits_and_says_that_it_is_full(ill: Ill) -> None:
    file = ill.disk.open(ill.file("0.log"), create=True)
    file.pwrite([b"0123456789"], 0)
    ill.now = faults.disks_filled(Faults(), [ill.directory])
    with pytest.raises(OSError, match="No space left on device") as full:
        file.pwrite([b"abcd", b"efgh"], 4)
    assert full.value.errno == errno.ENOSPC
    assert file.pread(100, 0) == b"0123abcdef"
    assert file.pwrite([b"zz"], 0) == 2
    with pytest.raises(OSError, match="No space left"):
        file.pwrite([b"x"], 1_000)
    assert file.size() == 10
    with pytest.raises(OSError, match="No space left"):
        ill.disk.write_atomically(ill.file("checkpoint"), b"1")
    with pytest.raises(OSError, match="No space left"):
        ill.disk.make_directories(ill.file("orders-1"))
    assert ill.disk.space(ill.directory)[1] == 0
    ill.disk.remove(ill.file("0.log"))
    ill.now = Faults()
    assert file.pwrite([b"abcdefgh"], 4) == 8
    assert ill.disk.space(ill.directory)[1] > 0
    file.close()


CALLS: dict[str, Callable[[Ill, str], object]] = {
    "open": lambda ill, path: ill.disk.open(path),
    "read_file": lambda ill, path: ill.disk.read_file(path),
    "write_atomically": lambda ill, path: ill.disk.write_atomically(path, b"1"),
    "list": lambda ill, path: ill.disk.list(ill.directory),
    "make_directories": lambda ill, path: ill.disk.make_directories(path + "-directory"),
    "rename": lambda ill, path: ill.disk.rename(path, path + "-other"),
    "remove": lambda ill, path: ill.disk.remove(path),
    "remove_tree": lambda ill, path: ill.disk.remove_tree(ill.directory),
    "sync_directory": lambda ill, path: ill.disk.sync_directory(ill.directory),
    "lock": lambda ill, path: ill.disk.lock(path),
    "space": lambda ill, path: ill.disk.space(path),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_call_of_a_broken_disk_fails_and_changes_nothing(ill: Ill, call: str) -> None:
    ill.disk.write_atomically(ill.file("a"), b"before")
    ill.now = faults.disks_broken(Faults(), [ill.directory])
    with pytest.raises(OSError, match="Input/output error") as broken:
        CALLS[call](ill, ill.file("a"))
    assert broken.value.errno == errno.EIO
    ill.now = Faults()
    assert ill.disk.list(ill.directory) == ["a"]
    assert ill.disk.read_file(ill.file("a")) == b"before"


def test_each_call_of_an_open_file_fails_when_the_disk_breaks(ill: Ill) -> None:
    file = ill.disk.open(ill.file("0.log"), create=True)
    ill.now = faults.disks_broken(Faults(), [ill.directory])
    for call in (lambda: file.pread(1, 0), lambda: file.pwrite([b"x"], 0), file.fdatasync, lambda: file.truncate(0)):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    file.close()


def test_another_directory_is_well(ill: Ill, tmp_path: Path) -> None:
    ill.now = faults.disks_filled(faults.disks_broken(Faults(), [ill.directory]), [ill.directory])
    ill.disk.write_atomically(str(tmp_path / "other"), b"1")
    assert ill.disk.read_file(str(tmp_path / "other")) == b"1"


class ClockOfSleeps:
    """Only sleeping takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def taken_ms(self) -> int:
        taken_s, self.now_s = self.now_s, 0.0
        return round(taken_s * 1_000)


def test_a_slow_disk_takes_its_time_and_does_its_work(ill: Ill, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockOfSleeps(monkeypatch)
    ill.now = faults.disks_slowed(Faults(), [ill.directory], 200, 30)
    file = ill.disk.open(ill.file("0.log"), create=True)
    file.pwrite([b"ab"], 0)
    assert clock.taken_ms() == 30
    file.fdatasync()
    assert clock.taken_ms() == 200
    ill.disk.sync_directory(ill.directory)
    assert clock.taken_ms() == 200
    ill.disk.write_atomically(ill.file("a"), b"1")
    assert clock.taken_ms() == 230
    assert file.pread(10, 0) == b"ab"
    assert clock.taken_ms() == 0
    file.close()


def test_a_healing_ends_the_delay_of_a_call_that_waits(ill: Ill) -> None:
    file = ill.disk.open(ill.file("0.log"), create=True)
    ill.now = faults.disks_slowed(Faults(), [ill.directory], 600_000, 600_000)
    calls: tuple[Callable[[], object], ...] = (
        lambda: file.pwrite([b"ab"], 0),
        file.fdatasync,
        lambda: ill.disk.sync_directory(ill.directory),
        lambda: ill.disk.write_atomically(ill.file("a"), b"1"),
    )
    with ThreadPoolExecutor(len(calls)) as threads:
        waiting = [threads.submit(call) for call in calls]
        assert not wait(waiting, 0.1).done
        ill.now = Faults()
        for each in waiting:
            each.result(10)
    assert file.pread(10, 0) == b"ab"
    file.close()
