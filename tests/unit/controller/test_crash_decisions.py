"""When a broker is suspected, by the outcomes of connection attempts: no network, no clock."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from minibroker.controller.decisions.crashes import (
    BACK_OFF,
    FORGOTTEN_S,
    LONGEST_PATIENCE_S,
    MAX_IN_A_ROW,
    REFUSALS_NEEDED,
    REFUSED_PAUSE_S,
    RETRY_PAUSE_S,
    ConnectOutcome,
    CrashDecision,
    Suspicion,
    UnreachableBroker,
    Watched,
    begin,
    connect_timeout_s,
    decide,
    in_a_row,
    probe_timeout_s,
    remembered,
)

DETECTION_S = 0.5
START_S = 1_000.0
EVERY_S = 0.1

FAILURES = [ConnectOutcome.REFUSED, ConnectOutcome.NAME_IS_GONE, ConnectOutcome.NO_ANSWER, ConnectOutcome.CLOSED]
UNSURE = [ConnectOutcome.NO_ANSWER, ConnectOutcome.CLOSED]


def after(attempts: Iterable[ConnectOutcome], watched: Watched | None = None) -> CrashDecision:
    """Return the decision after attempts that all end at the same moment."""
    decision = CrashDecision(watched or Watched(), is_suspect=False, pause_s=0)
    for attempt in attempts:
        assert not decision.is_suspect, "a suspect is not watched"
        decision = decide(decision.watched, attempt, START_S, DETECTION_S)
    return decision


def time_until_suspected_s(attempt: ConnectOutcome, watched: Watched) -> float:
    """Return how long it takes if every attempt ends in this way."""
    for number in range(10_000):
        now_s = START_S + number * EVERY_S
        watched, is_suspect, _ = decide(watched, attempt, now_s, DETECTION_S)
        if is_suspect:
            return now_s - START_S
    raise AssertionError("never suspected")


# -- one decision --


def test_a_broker_that_refuses_twice_is_suspected_at_once_and_one_that_refuses_once_is_not() -> None:
    assert REFUSALS_NEEDED == 2
    assert not after([ConnectOutcome.REFUSED]).is_suspect
    assert after([ConnectOutcome.REFUSED] * 2).is_suspect


@pytest.mark.parametrize("other", [*UNSURE, ConnectOutcome.STOOD, ConnectOutcome.NAME_IS_GONE])
def test_refusals_count_only_in_a_row(other: ConnectOutcome) -> None:
    assert not after([ConnectOutcome.REFUSED, other, ConnectOutcome.REFUSED]).is_suspect
    assert after([ConnectOutcome.REFUSED, other, ConnectOutcome.REFUSED, ConnectOutcome.REFUSED]).is_suspect


def test_a_name_that_is_gone_is_a_refusal_where_a_connection_stood_and_nowhere_else() -> None:
    assert after([ConnectOutcome.STOOD, ConnectOutcome.NAME_IS_GONE, ConnectOutcome.NAME_IS_GONE]).is_suspect
    assert after([ConnectOutcome.STOOD, ConnectOutcome.NAME_IS_GONE, ConnectOutcome.REFUSED]).is_suspect
    assert not after([ConnectOutcome.NAME_IS_GONE] * 9).is_suspect


@pytest.mark.parametrize("attempt", [*UNSURE, ConnectOutcome.NAME_IS_GONE])
def test_what_may_be_the_network_must_last_for_the_detection_time(attempt: ConnectOutcome) -> None:
    assert time_until_suspected_s(attempt, Watched()) == pytest.approx(DETECTION_S)


def test_different_failures_last_together() -> None:
    watched = Watched()
    found = []
    for number, attempt in enumerate(
        [ConnectOutcome.NO_ANSWER, ConnectOutcome.CLOSED, ConnectOutcome.REFUSED, ConnectOutcome.NO_ANSWER]
    ):
        watched, is_suspect, _ = decide(watched, attempt, START_S + number * DETECTION_S / 3, DETECTION_S)
        found.append(is_suspect)
    assert found == [False, False, False, True]


def test_a_connection_that_stood_begins_everything_anew() -> None:
    troubled = Watched(START_S - 60, refusals=1, in_a_row=3, has_stood=False)
    found, is_suspect, _ = decide(troubled, ConnectOutcome.STOOD, START_S, DETECTION_S)
    assert (found, is_suspect) == (Watched(START_S, refusals=0, in_a_row=0, has_stood=True, lost_s=START_S), False)


def test_only_a_lost_connection_and_a_first_refusal_are_followed_up_within_milliseconds() -> None:
    assert after([ConnectOutcome.STOOD]).pause_s == 0
    assert after([ConnectOutcome.REFUSED]).pause_s == REFUSED_PAUSE_S
    assert {after([attempt]).pause_s for attempt in (*UNSURE, ConnectOutcome.NAME_IS_GONE)} == {RETRY_PAUSE_S}
    assert after([ConnectOutcome.REFUSED], Watched(in_a_row=1)).pause_s == BACK_OFF * RETRY_PAUSE_S


@pytest.mark.parametrize("suspicions", [0, 2])
@pytest.mark.parametrize("attempt", FAILURES)
def test_forgotten_attempts_no_longer_count_but_connections_and_suspicions_do(
    attempt: ConnectOutcome, suspicions: int
) -> None:
    troubled = Watched(START_S - 60, refusals=1, in_a_row=suspicions, has_stood=True)
    found, is_suspect, _ = decide(troubled.forgotten(), attempt, START_S, DETECTION_S)
    assert not is_suspect
    assert (found.failing_since_s, found.in_a_row, found.has_stood) == (START_S, suspicions, True)


# -- suspicions in a row --


@pytest.mark.parametrize("attempt", FAILURES)
def test_each_suspicion_in_a_row_takes_four_times_as_long_refused_or_not(attempt: ConnectOutcome) -> None:
    for suspicions, takes_s in enumerate((2, 8, 32, 128, 128, 128), 1):
        watched = Watched(in_a_row=suspicions, has_stood=True)
        assert time_until_suspected_s(attempt, watched) == pytest.approx(takes_s)


@pytest.mark.parametrize(("detection_s", "longest_s"), [(0.001, 128), (0.1, 128), (1.5, 128), (300, 300)])
def test_a_suspicion_takes_at_most_two_minutes_unless_the_detection_time_is_longer(
    detection_s: float, longest_s: float
) -> None:
    suspicions = in_a_row(Suspicion(START_S, 99), START_S)
    assert suspicions == MAX_IN_A_ROW
    watched = Watched(START_S, in_a_row=suspicions)
    for later_s, is_suspect in ((longest_s - 0.01, False), (longest_s, True)):
        assert decide(watched, ConnectOutcome.NO_ANSWER, START_S + later_s, detection_s).is_suspect == is_suspect


def test_no_suspicion_takes_as_long_as_a_row_is_remembered() -> None:
    assert LONGEST_PATIENCE_S < FORGOTTEN_S


def test_a_row_ends_where_nobody_was_suspected_for_long() -> None:
    last = Suspicion(START_S, 2)
    assert in_a_row(None, START_S) == 0
    assert in_a_row(last, START_S + FORGOTTEN_S) == 2
    assert in_a_row(last, START_S + FORGOTTEN_S + 1) == 0


def test_pauses_grow_with_the_row_and_stay_below_the_detection_time() -> None:
    pauses_s = [after([ConnectOutcome.NO_ANSWER], Watched(in_a_row=n)).pause_s for n in range(5)]
    assert pauses_s == [0.02, 0.08, 0.25, 0.25, 0.25]


# -- how long to wait for an answer --


def test_an_attempt_takes_as_long_as_those_before_it_and_ends_when_the_decision_is_due() -> None:
    assert connect_timeout_s(Watched(), START_S, DETECTION_S) == DETECTION_S / 10
    assert connect_timeout_s(Watched(START_S - 0.15), START_S, DETECTION_S) == pytest.approx(0.15)
    assert connect_timeout_s(Watched(START_S - 0.3), START_S, DETECTION_S) == pytest.approx(0.2)
    assert connect_timeout_s(Watched(START_S - 9), START_S, DETECTION_S) == RETRY_PAUSE_S
    assert connect_timeout_s(Watched(START_S - 9, in_a_row=3), START_S, DETECTION_S) == DETECTION_S


def test_a_probe_waits_no_longer_than_a_watch_would() -> None:
    assert probe_timeout_s(None, START_S, DETECTION_S) == DETECTION_S
    for ago_s, timeout_s in ((0.3, 0.2), (9, RETRY_PAUSE_S)):
        trouble = UnreachableBroker(1, START_S - ago_s, START_S, has_stood=False)
        assert probe_timeout_s(trouble, START_S, DETECTION_S) == pytest.approx(timeout_s)


# -- outcomes of the last watch --


def test_the_next_watch_goes_on_from_what_was_seen_of_the_same_epoch_just_now() -> None:
    trouble = UnreachableBroker(7, START_S - 3, START_S, has_stood=True)
    assert remembered(trouble, 7, START_S + 0.4, DETECTION_S) is trouble
    assert remembered(trouble, 7, START_S + 0.5, DETECTION_S) is None
    assert remembered(trouble, 8, START_S, DETECTION_S) is None
    assert remembered(None, 7, START_S, DETECTION_S) is None
    watched = begin(trouble, 0)
    assert watched == Watched(START_S - 3, has_stood=True)
    assert decide(watched, ConnectOutcome.NO_ANSWER, START_S + 0.1, DETECTION_S).is_suspect


def test_a_broker_that_was_suspected_is_suspected_again_after_the_whole_time_of_the_row() -> None:
    trouble = UnreachableBroker(7, START_S - 3, START_S, has_stood=True, is_suspected=True)
    watched = begin(trouble, 1)
    assert watched == Watched(None, in_a_row=1, has_stood=True)
    assert time_until_suspected_s(ConnectOutcome.NAME_IS_GONE, watched) == pytest.approx(4 * DETECTION_S)


def test_a_watch_that_remembers_nothing_still_knows_the_row() -> None:
    assert begin(None, 2) == Watched(in_a_row=2)
