from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from minibroker.client.stalls import STALL_S, Stalls

Taken = Callable[[], list[str]]


@pytest.fixture
def taken(caplog: pytest.LogCaptureFixture) -> Taken:
    """Return the messages logged since the last call."""
    caplog.set_level(logging.INFO, "minibroker.client")

    def take() -> list[str]:
        lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        caplog.clear()
        return lines

    return take


def because(name: str) -> str:
    return f"{name} has no leader."


def test_a_stall_is_logged_once_with_reason_and_remedy_and_once_at_its_end(taken: Taken) -> None:
    stalls: Stalls[str] = Stalls("mine")
    for second in range(60):
        stalls.look(100.0 + second, ["a-0"], because)
    assert taken() == ["WARNING mine: no progress for 5.0 s of a-0: a-0 has no leader. See `minibroker status`"]
    stalls.look(160.0, [], because)
    stalls.look(161.0, [], because)
    assert taken() == ["INFO mine: the stall of a-0 is over after 60.0 s"]


def test_nothing_is_over_where_what_waited_has_failed(taken: Taken) -> None:
    stalls: Stalls[str] = Stalls("mine")
    for second in range(10):
        stalls.look(100.0 + second, ["a-0", "b-0"], because)
    assert len(taken()) == 1
    stalls.give_up(["a-0", "c-0"])
    stalls.look(120.0, ["b-0"], because)
    assert not taken()
    stalls.look(121.0, [], because)
    assert taken() == ["INFO mine: the stall of b-0 is over after 21.0 s"]


def test_what_waits_for_a_short_time_only_is_not_told(taken: Taken) -> None:
    stalls: Stalls[str] = Stalls("mine")
    for moment in range(100):
        stalls.look(moment * (STALL_S - 0.1), ["a-0"] if moment % 2 else ["b-0"], because)
    assert not taken()


def test_many_partitions_make_one_line_and_those_that_join_later_another(taken: Taken) -> None:
    stalls: Stalls[int] = Stalls("mine", lambda number: f"t-{number}")
    for second in range(20):
        waiting = range(7) if second < 3 else range(8)
        stalls.look(float(second), waiting, lambda _: "gone: see `minibroker status`")
    assert taken() == [
        "WARNING mine: no progress for 5.0 s of t-0, t-1, t-2, t-3, t-4 and 2 more: gone: see `minibroker status`",
        "WARNING mine: no progress for 5.0 s of t-7: gone: see `minibroker status`",
    ]
    stalls.look(21.0, range(6, 8), lambda _: "gone")
    assert taken() == ["INFO mine: the stall of t-0, t-1, t-2, t-3, t-4 and 1 more is over after 21.0 s"]


def test_partitions_of_different_leaders_have_a_reason_each_in_the_same_line(taken: Taken) -> None:
    leaders = {"a-0": 1, "b-0": 3, "a-1": 1, "c-0": 4, "d-0": 5}
    stalls: Stalls[str] = Stalls("mine")
    for second in range(6):
        stalls.look(100.0 + second, leaders, lambda name: f"the leader, broker {leaders[name]}, has not answered")
    assert taken() == [
        "WARNING mine: no progress for 5.0 s of a-0, b-0, a-1, c-0, d-0: a-0, a-1: the leader, broker 1, has not "
        "answered; b-0: the leader, broker 3, has not answered; c-0: the leader, broker 4, has not answered; and 1 "
        "other reason. See `minibroker status`"
    ]


def test_a_reason_is_asked_for_only_where_it_is_told() -> None:
    asked: list[str] = []

    def reason(name: str) -> str:
        asked.append(name)
        return "x"

    stalls: Stalls[str] = Stalls("mine")
    for second in range(30):
        stalls.look(float(second), ["a-0", "b-0"], reason)
    assert asked == ["a-0", "b-0"]


def test_a_time_in_which_the_event_loop_stood_still_is_nobodys_stall(taken: Taken) -> None:
    stalls: Stalls[str] = Stalls("mine", is_regular=True)
    for second in (0, 1, 12, 13):
        stalls.look(100.0 + second, ["a-0"], because)
    assert not taken()
    for second in (14, 15):
        stalls.look(100.0 + second, ["a-0"], because)
    assert taken() == ["WARNING mine: no progress for 5.0 s of a-0: a-0 has no leader. See `minibroker status`"]
