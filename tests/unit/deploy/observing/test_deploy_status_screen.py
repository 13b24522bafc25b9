from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from minibroker.client.cli.terminal.output import Format
from minibroker.deploy.observing.status import BrokerStatus, ControllerStatus, Status, ZooKeeperStatus
from minibroker.deploy.observing.status_screen import Glance, records_per_second, status_lines, watch
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition

STATUS = Status(
    brokers=[
        BrokerStatus(1, 101, True, 9092, False, True, 2, 10_092),
        BrokerStatus(2, None, False, 9093, False, False, 0),
    ],
    controller=ControllerStatus(1, 7),
    zookeeper=None,
    offline_partitions=[],
    under_replicated_partitions=["t-0"],
)
UNKNOWN = Status(
    brokers=[BrokerStatus(1, 101, True, 9092, True, None, None)],
    controller=ControllerStatus(None, None),
    zookeeper=None,
    offline_partitions=None,
    under_replicated_partitions=None,
)
ZERO, ONE = TopicPartition("t", 0), TopicPartition("t", 1)


def test_a_broker_is_shown_with_its_leaders_and_the_controller_with_its_epoch() -> None:
    lines = status_lines(STATUS)
    assert lines[1].split() == ["1", "9092", "101", "running", "2", "epoch", "7"]
    assert lines[2].split() == ["2", "9093", "-", "not", "running", "0"]
    assert lines[-1] == "under-replicated partitions: t-0"


def test_leaders_away_from_their_preferred_brokers_are_reported_with_the_remedy() -> None:
    away = msgspec.structs.replace(STATUS, not_preferred_partitions=["t-0", "t-1"])
    assert status_lines(away)[-1] == (
        "not led by their preferred broker: t-0, t-1: `minibroker elect --preferred --all` moves their leaders back at "
        "once; the controller does so at its next check, if too many are away "
        "(leader.imbalance.check.interval.seconds)"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"zookeeper": ZooKeeperStatus("localhost:2181", 7, True, True, False)},
        {"zookeeper": ZooKeeperStatus("localhost:2181", None, False, False, False)},
        {"controller": ControllerStatus(None, 7)},
        {"cut_from_zookeeper": [1]},
    ],
)
def test_no_election_is_advised_while_the_controller_does_not_reach_zookeeper(changed: dict[str, Any]) -> None:
    away = msgspec.structs.replace(STATUS, not_preferred_partitions=["t-0"])
    line = next(line for line in status_lines(msgspec.structs.replace(away, **changed)) if "preferred" in line)
    assert line == (
        "not led by their preferred broker: t-0: no leader can move until the controller reaches ZooKeeper again"
    )
    healed = msgspec.structs.replace(away, cut_from_zookeeper=[2])
    assert "`minibroker elect --preferred --all`" in "".join(status_lines(healed))


def test_facts_that_no_broker_reports_are_shown_as_unknown() -> None:
    lines = status_lines(UNKNOWN)
    assert lines[1].split() == ["1", "9092", "101", "paused", "unknown", "unknown"]
    assert lines[-2:] == ["offline partitions: unknown", "under-replicated partitions: unknown"]


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize(
    ("glance", "line", "rate"),
    [
        (Glance(UNKNOWN, {}, 1.0), "records: unknown\n", None),
        (Glance(STATUS, {}, 1.0, unknown_ends=3), "records: unknown\n", None),
        (Glance(STATUS, {ZERO: 5}, 1.0, unknown_ends=1), "records: 5 without 1 partition of unknown end, 0/s\n", 0),
    ],
)
def test_records_that_nobody_can_count_are_unknown_and_not_zero(
    glance: Glance,
    line: str,
    rate: int | None,
    format: Format,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    watch(lambda: glance, format)
    printed = capsys.readouterr().out
    if format is Format.JSON:
        found = json.loads(printed)
        assert (found["records"], found["records_per_second"]) == (None, rate)
        assert found["offline_partitions"] == glance.status.offline_partitions
    else:
        assert line in printed


def test_the_rate_counts_partitions_that_were_seen_both_times_and_nothing_twice() -> None:
    before = Glance(STATUS, {ZERO: 100, ONE: 50}, at_s=10.0)
    assert records_per_second(before, Glance(STATUS, {ZERO: 300, ONE: 50}, at_s=12.0)) == 100
    assert records_per_second(before, Glance(STATUS, {ZERO: 300}, at_s=12.0)) == 100
    assert records_per_second(before, Glance(STATUS, {ZERO: 90, ONE: 52}, at_s=12.0)) == 1
    assert records_per_second(before, Glance(STATUS, {TopicPartition("u", 0): 9}, at_s=12.0)) == 0


def test_watch_shows_a_cluster_that_stops_answering_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minibroker.deploy.observing.status_screen.INTERVAL_S", 0)
    seen: list[Glance | MinibrokerError] = [
        Glance(STATUS, {ZERO: 5}, 1.0),
        MinibrokerError("nobody answers"),
        Glance(STATUS, {ZERO: 9}, 3.0),
    ]
    looks = iter(seen)

    def look() -> Glance:
        found = next(looks, None)
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, MinibrokerError):
            raise found
        return found

    watch(look, Format.TABLE)
    blocks = capsys.readouterr().out.split("\n\n")
    assert "records: 5, 0/s" in blocks[0]
    assert "broker 2 is not running: `minibroker start 2`" in blocks[0]
    assert blocks[1] == "nobody answers"
    assert "records: 9, 2/s" in blocks[2]


def test_what_fails_at_the_first_look_ends_the_watch() -> None:
    def look() -> Glance:
        raise MinibrokerError("there is no cluster")

    with pytest.raises(MinibrokerError, match="there is no cluster"):
        watch(look, Format.TABLE)
