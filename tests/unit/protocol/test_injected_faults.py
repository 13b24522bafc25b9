"""The faults of a broker as values."""

from __future__ import annotations

import pytest

from minibroker.protocol import faults
from minibroker.protocol.faults import DiskFaults, Faults

ONE, TWO = "/data/one", "/data/two"


def test_faults_of_a_disk_add_up_and_are_mended_together() -> None:
    found = faults.disks_filled(Faults(3), [ONE])
    found = faults.disks_slowed(found, [ONE, TWO], 200, 0)
    assert found.disks == {ONE: DiskFaults(is_full=True, sync_delay_ms=200), TWO: DiskFaults(sync_delay_ms=200)}
    assert faults.has_failed_disk(found)
    found = faults.disks_slowed(found, [TWO], 0, 0)
    assert found.disks.keys() == {ONE}
    assert faults.disks_mended(found) == Faults(3)


def test_a_slow_disk_has_not_failed_and_a_broken_one_has() -> None:
    assert not faults.has_failed_disk(faults.disks_slowed(Faults(), [ONE], 5, 5))
    assert faults.has_failed_disk(faults.disks_broken(Faults(), [ONE]))


def test_healing_ends_everything_and_keeps_the_revision() -> None:
    ill = faults.disks_broken(Faults(7), [ONE])
    assert faults.has_any(ill)
    assert faults.healed(ill) == Faults(7)
    assert not faults.has_any(faults.healed(ill))


def test_each_fault_is_described() -> None:
    ill = faults.disks_slowed(faults.disks_broken(faults.disks_filled(Faults(), [ONE]), [ONE]), [TWO], 200, 30)
    assert faults.described(ill) == [
        "the disk of /data/one is full",
        "the disk of /data/one is broken",
        "each fsync in /data/two takes 200 ms longer",
        "each write in /data/two takes 30 ms longer",
    ]
    assert faults.described(Faults(4)) == []


def test_faults_survive_the_file() -> None:
    ill = faults.disks_slowed(faults.disks_filled(Faults(9), [ONE]), [TWO], 200, 30)
    assert faults.decoded(faults.encoded(ill)) == ill
    assert faults.decoded(faults.encoded(Faults(9))) == Faults(9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"disks": {"/data/one": {"sync_delay_ms": -1}}}', "sync_delay_ms of /data/one is -1: give milliseconds"),
        ('{"disks": {"/data/one": {"write_delay_ms": 600001}}}', "write_delay_ms of /data/one is 600001"),
        ('{"disks": {"/data/one": {"is_ful": true}}}', "unknown field `is_ful`"),
        ('{"revision": "x"}', "Expected `int`"),
        ("{", "truncated"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        faults.decoded(text.encode())


def test_the_answer_of_a_broker_is_beside_its_file() -> None:
    assert faults.obeyed_path("/data/faults/broker-1.json") == "/data/faults/broker-1.obeyed.json"
