from __future__ import annotations

import pytest

from minibroker.broker.replication.throttle import Quota, is_throttled
from minibroker.broker.settings.parsing import topic_config
from minibroker.broker.settings.types import InvalidConfig
from tests.storage_support import Clock


def test_the_rate_holds_in_the_long_run_whatever_the_sizes() -> None:
    clock = Clock()
    quota = Quota(1_000, clock)
    taken = 0
    began = clock.monotonic()
    while clock.monotonic() < began + 60:
        while not quota.is_exceeded:
            size = (1, 10, 5_000, 700)[taken % 4]
            quota.record(size)
            taken += size
        clock.now_ms += 500
    assert 58_000 < taken < 67_000


def test_what_was_not_used_for_long_is_not_made_up_for() -> None:
    clock = Clock()
    quota = Quota(1_000, clock)
    clock.now_ms += 3_600_000
    quota.record(1_001)
    assert quota.is_exceeded
    clock.now_ms += 2
    assert not quota.is_exceeded


@pytest.mark.parametrize(("rate", "owed_s"), [(10_000, 1), (1_000, 10), (10, 10)])
def test_what_was_sent_takes_less_time_at_a_higher_rate_and_no_more_at_a_lower_one(rate: int, owed_s: int) -> None:
    clock = Clock()
    quota = Quota(1_000, clock, burst_s=0)
    quota.record(10_000)
    quota.change_rate(rate)
    assert quota.free_at_s == clock.monotonic() + owed_s
    quota.record(rate)
    assert quota.free_at_s == clock.monotonic() + owed_s + 1


@pytest.mark.parametrize(
    ("replicas", "is_named"),
    [("*", True), ("", False), ("3:1", True), ("2:1,3:1", True), ("3:2", False), ("13:1", False), ("3:11", False)],
)
def test_a_topic_names_the_replicas_that_are_throttled(replicas: str, is_named: bool) -> None:
    assert is_throttled(replicas, 3, 1) is is_named


@pytest.mark.parametrize("replicas", ["all", "1", "1:", "1:2,", "*,1:2", "-1:2"])
def test_a_list_of_replicas_that_makes_no_sense_is_refused(replicas: str) -> None:
    name = "follower.replication.throttled.replicas"
    with pytest.raises(InvalidConfig, match=r"\*, or PARTITION:BROKER"):
        topic_config({name: replicas})
    assert topic_config({name: "1:2,3:4"}).follower_replication_throttled_replicas == "1:2,3:4"
