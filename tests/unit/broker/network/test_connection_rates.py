"""Rates of new connections, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.broker.network.connection_rates import MOST_DELAY_S, ConnectionRates, RateOf, Stage

BROKER, OF_A = Stage(RateOf.BROKER), Stage(RateOf.ADDRESS, "a")
SLOW = Stage(RateOf.LISTENER, "SLOW")

GAPS = st.lists(st.integers(0, 3_000), max_size=60)
"""Milliseconds between connections."""


@given(st.integers(1, 20), GAPS, st.sampled_from([BROKER, OF_A, SLOW]))
def test_no_second_has_more_turns_than_the_rate_and_its_burst(rate: int, gaps: list[int], stage: Stage) -> None:
    rates = ConnectionRates(rate, {"SLOW": rate})
    rates.set_quotas({"a": rate}, 0.0)
    turns: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap / 1_000
        delay_s = rates.delay_s(stage, now)
        if delay_s is None:
            continue
        assert 0 <= delay_s <= MOST_DELAY_S
        assert not turns or now + delay_s >= turns[-1] - 1e-5
        turns.append(now + delay_s)
    for first, began in enumerate(turns):
        for last in range(first, len(turns)):
            assert last - first + 1 <= rate + rate * (turns[last] - began) + 1 + 1e-3


def test_a_seconds_worth_comes_at_once_the_next_ones_in_turn_and_those_far_away_are_refused() -> None:
    rates = ConnectionRates(2, {})
    delays = [rates.delay_s(BROKER, 5.0) for _ in range(24)]
    assert delays == [0, 0, *(pytest.approx(n / 2) for n in range(1, 21)), None, None]
    assert rates.delay_s(BROKER, 6.0) == pytest.approx(9.5)


def test_an_address_delays_itself_alone_and_what_it_is_refused_counts_for_nobody() -> None:
    rates = ConnectionRates(1_000, {})
    rates.set_quotas({"a": 1, None: 5}, 0.0)
    assert [rates.delay_s(OF_A, 0.0) for _ in range(3)] == [0, pytest.approx(1), pytest.approx(2)]
    assert [rates.delay_s(Stage(RateOf.ADDRESS, "b"), 0.0) for _ in range(5)] == [0] * 5
    assert [rates.delay_s(Stage(RateOf.ADDRESS, "c"), 0.0) for _ in range(5)] == [0] * 5
    assert rates.delay_s(BROKER, 0.0) == 0
    assert "connection_creation_rate=1 per second of a" in rates.why_refused(OF_A)


def test_a_changed_rate_applies_to_the_next_connections_and_a_removed_one_to_none() -> None:
    rates = ConnectionRates(1, {})
    rates.set_quotas({None: 1}, 0.0)
    for _ in range(5):
        rates.delay_s(OF_A, 0.0)
    rates.set_quotas({"a": 10}, 0.0)
    assert rates.delay_s(OF_A, 0.0) == pytest.approx(0.5)
    rates.set_quotas({}, 0.0)
    assert [rates.delay_s(OF_A, 0.0) for _ in range(50)] == [0] * 50
    rates.delay_s(BROKER, 0.0)
    rates.configure(100, {}, 0.0)
    assert rates.delay_s(BROKER, 0.0) == pytest.approx(0.01)


def test_a_connection_that_is_refused_for_another_reason_takes_no_turn() -> None:
    rates = ConnectionRates(1, {"SLOW": 1})
    for _ in range(10):
        assert rates.delay_s(SLOW, 0.0) == rates.delay_s(BROKER, 0.0) == 0
        rates.give_back("SLOW", 0.0)


def test_a_listener_over_its_rate_delays_itself_alone_and_counts_for_the_broker_afterwards() -> None:
    rates = ConnectionRates(1_000, {"SLOW": 2})
    assert rates.stages("a", "SLOW") == [OF_A, SLOW, BROKER]
    assert [rates.delay_s(SLOW, 0.0) for _ in range(4)] == [0, 0, pytest.approx(0.5), pytest.approx(1)]
    assert [rates.delay_s(Stage(RateOf.LISTENER, "OTHER"), 0.0) for _ in range(5)] == [0] * 5
    assert rates.why_refused(SLOW) == ("listener.name.slow.max.connection.creation.rate=2 per second is exceeded")


def test_the_rate_of_the_broker_does_not_apply_to_the_protected_listener_but_its_own_rate_does() -> None:
    rates = ConnectionRates(1, {"BROKERS": 5}, "BROKERS")
    assert BROKER not in rates.stages("a", "BROKERS")
    assert Stage(RateOf.LISTENER, "BROKERS") in rates.stages("a", "BROKERS")
    rates.delay_s(BROKER, 0.0)
    rates.give_back("BROKERS", 0.0)
    assert rates.delay_s(BROKER, 0.0) == pytest.approx(1)


def test_the_rate_of_a_listener_changes_with_the_next_connections_and_goes_when_it_is_removed() -> None:
    rates = ConnectionRates(1_000, {"SLOW": 1})
    for _ in range(5):
        rates.delay_s(SLOW, 0.0)
    rates.configure(1_000, {"SLOW": 10}, 0.0)
    assert rates.delay_s(SLOW, 0.0) == pytest.approx(0.5)
    rates.configure(1_000, {}, 0.0)
    assert [rates.delay_s(SLOW, 0.0) for _ in range(50)] == [0] * 50
