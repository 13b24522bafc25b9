"""Rules that decisions about the ISR never break."""

from hypothesis import given
from hypothesis import strategies as st

from minibroker.broker.replication.isr import (
    Follower,
    high_watermark,
    in_assignment_order,
    lagging,
    low_watermark,
    may_join,
    record_fetch,
)

offsets = st.integers(0, 50)
followers = st.dictionaries(
    st.integers(2, 5),
    st.builds(Follower, log_end_offset=offsets, last_caught_up_s=st.floats(0, 100), broker_epoch=st.integers(0, 3)),
)
isrs = st.sets(st.integers(2, 5)).map(lambda rest: (1, *sorted(rest)))


@given(st.integers(50, 60), followers, isrs)
def test_the_high_watermark_never_exceeds_any_member_of_the_maximal_isr(
    leader_end: int, known: dict[int, Follower], isr: tuple[int, ...]
) -> None:
    known.update({b: Follower() for b in isr if b != 1 and b not in known})
    mark = high_watermark(leader_end, known, isr, 50.0, 10.0)
    assert mark <= leader_end
    assert all(mark <= max(known[b].log_end_offset, 0) for b in isr if b != 1)


@given(st.integers(50, 60), followers, isrs)
def test_the_leader_never_lags_so_the_last_member_never_leaves(
    leader_end: int, known: dict[int, Follower], isr: tuple[int, ...]
) -> None:
    out = lagging(1, isr, known, leader_end, 1_000.0, 10.0)
    assert 1 not in out
    assert set(out) <= set(isr)


@given(st.lists(st.tuples(offsets, st.integers(0, 3)), min_size=1))
def test_a_follower_is_caught_up_only_at_times_when_it_had_every_record(steps: list[tuple[int, int]]) -> None:
    """Compare with the definition: the latest fetch time t at which some fetch so far covered the leader's end at t."""
    follower = Follower()
    ends: list[int] = []
    best = float("-inf")
    leader_end = 0
    position = 0
    for now, (grow, fetched) in enumerate(steps):
        leader_end += grow
        position = min(leader_end, position + fetched)
        record_fetch(follower, position, 0, leader_end, float(now), 0)
        ends.append(leader_end)
        covered = [t for t, end in enumerate(ends) if position >= end]
        best = max([best, *map(float, covered)])
        assert follower.last_caught_up_s <= best


def test_a_follower_one_fetch_behind_under_load_stays_in_sync() -> None:
    follower = Follower()
    for now in range(100):
        record_fetch(follower, now * 10, 0, now * 10 + 10, float(now), 0)
    assert follower.last_caught_up_s == 98.0


def test_a_late_fetch_of_a_former_run_says_nothing_about_the_present_one() -> None:
    follower = Follower()
    record_fetch(follower, 7, 0, 10, 1.0, broker_epoch=5)
    record_fetch(follower, 10, 0, 10, 2.0, broker_epoch=4)
    assert (follower.log_end_offset, follower.broker_epoch) == (7, 5)
    record_fetch(follower, 8, 0, 10, 3.0, broker_epoch=6)
    assert (follower.log_end_offset, follower.broker_epoch) == (8, 6)


def test_no_follower_joins_before_the_epoch_start_with_deleted_records_or_in_a_former_epoch() -> None:
    follower = Follower(log_end_offset=10, log_start_offset=3, broker_epoch=7)
    assert may_join(follower, 3, high_watermark=10, epoch_start_offset=10, alive_epoch=7)
    assert not may_join(follower, 4, high_watermark=10, epoch_start_offset=10, alive_epoch=7)
    assert not may_join(follower, 0, high_watermark=10, epoch_start_offset=11, alive_epoch=7)
    assert not may_join(follower, 0, high_watermark=11, epoch_start_offset=0, alive_epoch=7)
    assert not may_join(follower, 0, high_watermark=0, epoch_start_offset=0, alive_epoch=8)
    assert not may_join(follower, 0, high_watermark=0, epoch_start_offset=0, alive_epoch=None)


def test_the_low_watermark_is_the_lowest_start_of_the_replicas_that_may_lead() -> None:
    followers = {2: Follower(log_start_offset=5), 3: Follower(log_start_offset=0), 4: Follower()}
    assert low_watermark(7, {}, (1,)) == 7
    assert low_watermark(7, followers, (1, 2)) == 5
    assert low_watermark(4, followers, (1, 2)) == 4
    assert low_watermark(7, followers, (1, 2, 3)) == 0
    assert low_watermark(7, followers, (1, 2, 3, 4)) == -1


def test_the_isr_keeps_the_order_of_the_assignment() -> None:
    assert in_assignment_order((3, 1, 2), [1, 2, 3]) == (3, 1, 2)
    assert in_assignment_order((3, 1, 2), [2, 9]) == (2,)
