"""Since when a broker is silent, as its fetches and answers show."""

from __future__ import annotations

import math

from minibroker.broker.replication.following.silences import ALLOWANCE_S, RECENT_S, Silences
from tests.storage_support import NOW, Clock

WAIT_MS = 500
EVER = -math.inf


def _heard() -> tuple[Clock, Silences]:
    clock = Clock()
    silences = Silences(clock)
    silences.heard(2, WAIT_MS)
    return clock, silences


def test_a_broker_is_silent_once_its_next_fetch_is_overdue() -> None:
    clock, silences = _heard()
    clock.now_ms = NOW + WAIT_MS + round(ALLOWANCE_S * 1_000)
    assert silences.present_or_recent(2, EVER) is None
    clock.now_ms = NOW + 6_000
    assert silences.present_or_recent(2, EVER) == (6.0, None)


def test_the_silence_of_a_broker_that_has_woken_up_counts_for_a_moment() -> None:
    clock, silences = _heard()
    for later_ms in (6_000, 500):
        clock.now_ms += later_ms
        silences.heard(2, WAIT_MS)
    assert silences.present_or_recent(2, EVER) == (6.5, 0.5)
    for later_ms in (1_000, round(RECENT_S * 1_000) - 1_000):
        clock.now_ms += later_ms
        silences.heard(2, WAIT_MS)
    assert silences.present_or_recent(2, EVER) is None


def test_no_silence_is_longer_than_a_broker_was_expected_to_speak() -> None:
    clock, silences = _heard()
    clock.now_ms = NOW + 3_600_000
    assert silences.present_or_recent(2, clock.monotonic() - 5.0) == (5.0, None)
    assert silences.present_or_recent(2, clock.monotonic() - ALLOWANCE_S / 2) is None
    assert silences.present_or_recent(3, clock.monotonic() - 10.0) == (10.0, None)  # it has never spoken


def test_a_broker_that_comes_back_from_the_dead_was_not_silent_meanwhile() -> None:
    clock, silences = _heard()
    clock.now_ms += 6_000
    silences.replaced(2)
    assert silences.present_or_recent(2, EVER) is None, "it was told once"
    clock.now_ms += 6_000
    assert silences.present_or_recent(2, EVER) is None
    for later_ms in (0, 500):
        clock.now_ms += later_ms
        silences.heard(2, WAIT_MS)
    assert silences.present_or_recent(2, EVER) is None
    clock.now_ms += 6_000
    assert silences.present_or_recent(2, EVER) == (6.0, None)
