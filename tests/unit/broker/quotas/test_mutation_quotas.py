"""Token buckets, and the quota for controller mutations, against models in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.broker.network.token_bucket import TokenBucket
from minibroker.broker.quotas.entities import QuotaEntity, QuotaKey
from minibroker.broker.quotas.mutations import ControllerMutationQuota, ControllerMutationQuotaManager

KEY = QuotaKey.CONTROLLER_MUTATION_RATE
STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 50)), max_size=40)
"""Tenths of seconds that pass, and tokens that are taken then."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(st.integers(1, 20), st.integers(1, 40), STEPS)
def test_a_bucket_has_the_tokens_of_exact_arithmetic(rate: int, burst: int, steps: list[tuple[int, int]]) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    tokens, tenths = Fraction(burst), 0
    for passed, taken in steps:
        tenths += passed
        tokens = min(Fraction(burst), tokens + Fraction(passed * rate, 10)) - taken
        bucket.take(taken, tenths / 10)
        assert bucket.overdraft_s(tenths / 10) == pytest.approx(float(max(Fraction(0), -tokens / rate)), abs=2e-6)


@given(st.integers(1, 20), st.integers(1, 40), STEPS)
def test_over_any_time_a_bucket_lets_through_no_more_than_its_burst_and_its_rate(
    rate: int, burst: int, steps: list[tuple[int, int]]
) -> None:
    """Beyond that only the last take, which may overdraw the bucket."""
    bucket = TokenBucket(rate, burst, 0.0)
    through: list[tuple[float, int]] = []
    now_s = 0.0
    for passed, wanted in steps:
        now_s += passed / 10
        if bucket.overdraft_s(now_s) == 0:
            bucket.take(wanted, now_s)
            through.append((now_s, wanted))
    for first, (began_s, _) in enumerate(through):
        for last in range(first, len(through)):
            taken = sum(count for _, count in through[first:last])
            assert taken <= burst + rate * (through[last][0] - began_s) + 1e-6


def test_a_clock_that_stands_or_goes_back_gives_no_tokens() -> None:
    bucket = TokenBucket(1.0, 1.0, 10.0)
    bucket.take(3, 10.0)
    assert [bucket.overdraft_s(now_s) for now_s in (9.0, 10.0, 11.0)] == [2.0, 2.0, 1.0]


def test_a_bucket_takes_back_no_more_than_it_holds() -> None:
    bucket = TokenBucket(1.0, 5.0, 0.0)
    bucket.take(2, 0.0)
    bucket.put_back(2, 1.0)
    bucket.take(6, 1.0)
    assert bucket.overdraft_s(1.0) == 1.0


def quota(
    clock: Clock, *, is_strict: bool, manager: ControllerMutationQuotaManager | None = None
) -> ControllerMutationQuota:
    if manager is None:
        manager = ControllerMutationQuotaManager(11, 1, clock)
        manager.apply({QuotaEntity("alice"): {KEY: 2.0}})
    found = manager.quota_of("alice", "app", is_strict=is_strict)
    assert found is not None
    return found


def test_a_client_that_knows_the_error_is_refused_while_its_tokens_are_negative() -> None:
    """As Kafka's StrictControllerMutationQuota: one request may overdraw the bucket, and is not throttled for it."""
    clock = Clock()
    strict = quota(clock, is_strict=True)
    assert strict.take(30)
    assert strict.throttle_s() == 0
    assert not strict.take(1)
    assert not strict.take(0)
    assert strict.throttle_s() == (30 - 22) / 2
    clock.now_s += 1
    assert strict.throttle_s() == 3
    clock.now_s += 3
    assert strict.take(1)


def test_an_older_client_is_served_and_pays_with_its_throttle_time() -> None:
    clock = Clock()
    permissive = quota(clock, is_strict=False)
    assert permissive.take(22)
    assert permissive.throttle_s() == 0
    assert permissive.take(4)
    assert permissive.take(4)
    assert permissive.throttle_s() == 4


def test_what_fails_for_another_reason_costs_nothing() -> None:
    clock = Clock()
    strict = quota(clock, is_strict=True)
    assert strict.take(30)
    strict.put_back(30)
    assert strict.take(22)
    assert strict.take(0)


def test_a_changed_quota_applies_at_once_and_a_debt_stays() -> None:
    clock = Clock()
    manager = ControllerMutationQuotaManager(11, 1, clock)
    manager.apply({QuotaEntity("alice"): {KEY: 2.0}})
    assert quota(clock, is_strict=True, manager=manager).take(30)
    manager.apply({QuotaEntity("alice"): {KEY: 8.0}})
    slow = quota(clock, is_strict=True, manager=manager)
    assert not slow.take(1)
    assert slow.throttle_s() == 1
    manager.apply({})
    assert manager.quota_of("alice", "app", is_strict=True) is None


def test_clients_of_a_user_share_a_bucket_and_others_have_none() -> None:
    clock = Clock()
    manager = ControllerMutationQuotaManager(11, 1, clock)
    manager.apply({QuotaEntity("alice"): {KEY: 1.0}, QuotaEntity("bob"): {QuotaKey.PRODUCER_BYTE_RATE: 1.0}})
    one, other = (manager.quota_of("alice", name, is_strict=True) for name in ("a", "b"))
    assert one is not None
    assert other is not None
    assert one.take(12)
    assert not other.take(1)
    assert manager.quota_of("bob", "a", is_strict=True) is None
