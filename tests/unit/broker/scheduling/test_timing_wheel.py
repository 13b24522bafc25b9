from __future__ import annotations

import ast
from pathlib import Path

import pytest

from minibroker.broker.scheduling import timing_wheel
from minibroker.broker.scheduling.timing_wheel import BUCKETS_PER_WHEEL, TimingWheel


def drain(wheel: TimingWheel[str], now_ms: int) -> list[str]:
    values = []
    while (entry := wheel.advance(now_ms)) is not None:
        values.append(entry.value)
    return values


def test_an_entry_expires_at_its_deadline_and_not_a_millisecond_before() -> None:
    for timeout_ms in (1, 19, 20, 21, 399, 400, 401, 7_999, 8_000, 8_001, 159_999, 160_000, 1_000_003):
        for now_ms in (0, 7, 20, 399, 123_456_789):
            wheel: TimingWheel[str] = TimingWheel(now_ms)
            wheel.insert(now_ms + timeout_ms, "entry")
            assert drain(wheel, now_ms + timeout_ms - 1) == []
            assert drain(wheel, now_ms + timeout_ms) == ["entry"]
            assert len(wheel) == 0


def test_an_entry_that_is_due_already_expires_on_the_next_advance_even_to_the_same_time() -> None:
    wheel: TimingWheel[str] = TimingWheel(1_000)
    wheel.insert(1_000, "now")
    wheel.insert(-5, "long ago")
    assert wheel.next_expiry_ms() == 1_000
    assert drain(wheel, 1_000) == ["now", "long ago"]


def test_entries_come_in_the_order_of_their_deadlines_after_a_jump_over_several_wheels() -> None:
    deadlines_ms = [9_000, 3, 410, 160_001, 19, 400, 20, 8_000, 21, 1, 399]
    wheel: TimingWheel[str] = TimingWheel(0)
    for deadline_ms in deadlines_ms:
        wheel.insert(deadline_ms, str(deadline_ms))
    assert drain(wheel, 1_000_000) == [str(deadline_ms) for deadline_ms in sorted(deadlines_ms)]


def test_a_cancelled_entry_never_expires_and_cannot_be_cancelled_again() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    near, far, kept = wheel.insert(5, "near"), wheel.insert(5_000, "far"), wheel.insert(5, "kept")
    assert wheel.cancel(near)
    assert wheel.cancel(far)
    assert not wheel.cancel(far)
    assert len(wheel) == 1
    assert drain(wheel, 10_000) == ["kept"]
    assert not wheel.cancel(kept)
    assert len(wheel) == 0


def test_an_entry_can_be_cancelled_after_it_has_moved_to_a_finer_wheel() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    entry = wheel.insert(415, "moved")
    assert drain(wheel, 400) == []
    assert wheel.cancel(entry)
    assert wheel.next_expiry_ms() is None


def test_an_entry_can_be_cancelled_while_another_of_the_same_bucket_is_handled() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    wheel.insert(5, "first")
    second = wheel.insert(5, "second")
    first = wheel.advance(5)
    assert first is not None
    assert first.value == "first"
    assert wheel.cancel(second)
    assert wheel.advance(5) is None


def test_a_driver_that_stops_halfway_finds_the_rest_due() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    for deadline_ms in (405, 410, 415):
        wheel.insert(deadline_ms, str(deadline_ms))
    first = wheel.advance(1_000)
    assert first is not None
    assert first.value == "405"
    next_expiry_ms = wheel.next_expiry_ms()
    assert next_expiry_ms is not None
    assert next_expiry_ms <= 410
    wheel.insert(407, "407")
    assert drain(wheel, 1_000) == ["407", "410", "415"]


def test_a_coarse_bucket_may_move_to_finer_wheels_in_several_calls() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    entries = [wheel.insert(400 + index, str(index)) for index in range(1, 11)]
    for _ in range(3):
        assert wheel.advance(400, most_moves=3) is None
        assert wheel.next_expiry_ms() == 400
    assert wheel.cancel(entries[0])
    assert wheel.cancel(entries[9])
    assert wheel.advance(400, most_moves=3) is None
    assert wheel.next_expiry_ms() == 402
    assert drain(wheel, 500) == [str(index) for index in range(2, 10)]


def test_the_next_expiry_is_that_of_the_earliest_bucket_that_is_not_empty() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    assert wheel.next_expiry_ms() is None
    wheel.insert(450, "in the bucket from 400 to 800")
    assert wheel.next_expiry_ms() == 400
    nearer = wheel.insert(33, "in the bucket from 20 to 40")
    assert wheel.next_expiry_ms() == 20
    wheel.cancel(nearer)
    assert wheel.next_expiry_ms() == 400


def test_a_bucket_emptied_and_forgotten_is_used_again() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    wheel.cancel(wheel.insert(33, "cancelled"))
    assert wheel.next_expiry_ms() is None
    wheel.insert(33, "again")
    assert wheel.next_expiry_ms() == 20
    assert drain(wheel, 33) == ["again"]


def test_one_wake_up_per_wheel_is_enough_for_an_entry() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    deadline_ms = 7 * 8_000 + 11 * 400 + 13 * 20 + 17
    wheel.insert(deadline_ms, "entry")
    wake_ups = []
    expired: list[str] = []
    while (next_expiry_ms := wheel.next_expiry_ms()) is not None:
        wake_ups.append(next_expiry_ms)
        expired += drain(wheel, next_expiry_ms)
    assert wake_ups == [56_000, 60_400, 60_660, deadline_ms]
    assert expired == ["entry"]


def test_a_round_of_one_wheel_never_meets_the_next() -> None:
    wheel: TimingWheel[str] = TimingWheel(0)
    for now_ms in range(3 * BUCKETS_PER_WHEEL * BUCKETS_PER_WHEEL):
        wheel.insert(now_ms + BUCKETS_PER_WHEEL, str(now_ms + BUCKETS_PER_WHEEL))
        wheel.insert(now_ms + BUCKETS_PER_WHEEL - 1, str(now_ms + BUCKETS_PER_WHEEL - 1))
        for value in drain(wheel, now_ms):
            assert value == str(now_ms)
    assert len(wheel) == 2 * BUCKETS_PER_WHEEL - 1


def test_time_does_not_go_back() -> None:
    wheel: TimingWheel[str] = TimingWheel(10)
    with pytest.raises(ValueError):
        wheel.advance(9)


def test_the_timing_wheel_imports_nothing_that_knows_the_time() -> None:
    tree = ast.parse(Path(timing_wheel.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert imported == {"__future__", "heapq", "typing"}
