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
    kept = faults.disks_slowed(faults.disks_slowed(found, [TWO], 200, 30), [TWO], 0, None)
    assert kept.disks[TWO] == DiskFaults(write_delay_ms=30)
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


def test_faults_of_the_network_are_described_by_what_is_lost() -> None:
    ill = faults.link_cut(Faults(), 2, sent=True, received=False)
    assert faults.described(ill) == ["nothing that it sends arrives at broker 2"]
    ill = faults.link_cut(ill, 2, sent=False, received=True)
    assert faults.described(ill) == ["it is cut from broker 2"]
    ill = faults.link_slowed(faults.link_cut(ill, 3, sent=False, received=True), 3, 50)
    ill = faults.network_slowed(faults.zookeeper_cut(faults.isolated(ill)), 7)
    assert faults.described(ill) == [
        "it is isolated",
        "it is cut from ZooKeeper",
        "each packet that it sends takes 7 ms longer",
        "it is cut from broker 2",
        "nothing that broker 3 sends arrives",
        "each packet between it and broker 3 takes 50 ms longer",
    ]
    assert faults.decoded(faults.encoded(ill)) == ill
    assert faults.healed_towards(ill, 2).links.keys() == {3}
    assert not faults.zookeeper_healed(ill).zookeeper_is_cut
    assert faults.healed(ill) == Faults()


def test_dropped_connections_are_no_fault_that_lasts() -> None:
    dropped = faults.connections_dropped(faults.connections_dropped(Faults()))
    assert dropped.drops == 2
    assert not faults.has_any(dropped)
    assert faults.healed(faults.isolated(dropped)).drops == 2


def test_a_delay_that_ends_leaves_no_link() -> None:
    assert faults.link_slowed(faults.link_slowed(Faults(), 2, 50), 2, 0) == Faults()
    both = faults.link_slowed(faults.link_cut(Faults(), 2, sent=True, received=True), 2, 50)
    assert faults.described(faults.link_slowed(both, 2, 0)) == ["it is cut from broker 2"]


@pytest.mark.parametrize(
    ("name", "broker"),
    [("broker-12.obeyed.json", 12), ("broker-1.json", None), ("broker-.obeyed.json", None), ("x-1.obeyed.json", None)],
)
def test_an_answer_is_known_by_its_name(name: str, broker: int | None) -> None:
    assert faults.broker_of(name) == broker


def test_a_clock_that_is_moved_twice_is_moved_by_both_and_set_right_by_healing() -> None:
    moved = faults.clock_moved(faults.clock_moved(Faults(), 5_000), -7_000)
    assert faults.described(moved) == ["its wall clock is 2 s behind"]
    assert faults.described(faults.clock_moved(moved, 3_000)) == ["its wall clock is 1 s ahead"]
    assert faults.described(faults.clock_moved(Faults(), 600_000)) == ["its wall clock is 10 min ahead"]
    assert faults.healed(moved) == Faults()
    far = faults.clock_moved(faults.clock_moved(Faults(), faults.MAX_CLOCK_OFFSET_MS), 1)
    assert faults.decoded(faults.encoded(far)) == far


def test_faults_survive_the_file() -> None:
    ill = faults.disks_slowed(faults.disks_filled(Faults(9), [ONE]), [TWO], 200, 30)
    assert faults.decoded(faults.encoded(ill)) == ill
    assert faults.decoded(faults.encoded(Faults(9))) == Faults(9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"disks": {"/data/one": {"sync_delay_ms": -1}}}', "sync_delay_ms of /data/one is -1: give milliseconds"),
        ('{"disks": {"/data/one": {"write_delay_ms": 600001}}}', "write_delay_ms of /data/one is 600001"),
        ('{"links": {"2": {"delay_ms": -5}}}', "delay_ms of link 2 is -5"),
        ('{"delay_ms": 600001}', "delay_ms is 600001"),
        ('{"clock_offset_ms": -315360000001}', "clock_offset_ms is -315360000001: give at most"),
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
