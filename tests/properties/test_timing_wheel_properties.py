"""The timing wheel against a plain dict of pending entries, for any sequence of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from minibroker.broker.scheduling.timing_wheel import TimerEntry, TimingWheel

# Delays that fall into each of the first wheels and onto their borders, and negative ones.
DELAYS_MS = st.one_of(
    st.integers(-30, 25),
    st.integers(380, 420),
    st.integers(0, 10_000),
    st.integers(0, 4_000_000),
    st.sampled_from([20, 400, 8_000, 160_000, 3_200_000]),
)


class WheelAgainstModel(RuleBasedStateMachine):
    entries: Bundle[TimerEntry[int]] = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0  # the last time given to the wheel
        self.clock_ms = 0  # the time up to which it has worked: behind now_ms if its driver stopped halfway
        self.wheel: TimingWheel[int] = TimingWheel(0)
        self.inserted = 0
        # The deadline of each value. Values are unique.
        self.due_ms: dict[int, int] = {}

    def expect_expired(self, entry: TimerEntry[int]) -> None:
        due_ms = self.due_ms.pop(entry.value)
        assert entry.deadline_ms <= due_ms <= self.now_ms, "expired early"
        assert due_ms <= min(self.due_ms.values(), default=due_ms), "expired before an earlier one"
        self.clock_ms = due_ms

    @rule(target=entries, delay_ms=DELAYS_MS)
    def insert(self, delay_ms: int) -> TimerEntry[int]:
        self.inserted += 1
        deadline_ms = self.now_ms + delay_ms
        self.due_ms[self.inserted] = max(deadline_ms, self.clock_ms)
        return self.wheel.insert(deadline_ms, self.inserted)

    @rule(entry=consumes(entries))
    def cancel(self, entry: TimerEntry[int]) -> None:
        was_pending = self.due_ms.pop(entry.value, None) is not None
        assert self.wheel.cancel(entry) == was_pending
        assert not self.wheel.cancel(entry)

    @rule(step_ms=DELAYS_MS.map(abs))
    def advance(self, step_ms: int) -> None:
        self.now_ms += step_ms
        while (entry := self.wheel.advance(self.now_ms)) is not None:
            self.expect_expired(entry)
        self.clock_ms = self.now_ms
        assert all(due_ms > self.now_ms for due_ms in self.due_ms.values()), "not expired in time"

    @rule(step_ms=DELAYS_MS.map(abs), at_most=st.integers(1, 3))
    def advance_and_stop_halfway(self, step_ms: int, at_most: int) -> None:
        self.now_ms += step_ms
        for _ in range(at_most):
            entry = self.wheel.advance(self.now_ms)
            if entry is None:
                self.clock_ms = self.now_ms
                break
            self.expect_expired(entry)

    @rule(step_ms=DELAYS_MS.map(abs), most_moves=st.integers(1, 3))
    def advance_a_few_moves_at_a_time(self, step_ms: int, most_moves: int) -> None:
        self.now_ms += step_ms
        while (next_expiry_ms := self.wheel.next_expiry_ms()) is not None and next_expiry_ms <= self.now_ms:
            entry = self.wheel.advance(self.now_ms, most_moves)
            if entry is not None:
                self.expect_expired(entry)
        self.advance(0)

    @rule()
    def advance_to_the_next_expiry(self) -> None:
        next_expiry_ms = self.wheel.next_expiry_ms()
        if next_expiry_ms is not None and next_expiry_ms > self.now_ms:
            assert self.wheel.advance(next_expiry_ms - 1) is None
            self.now_ms = self.clock_ms = next_expiry_ms - 1
            self.advance(1)

    @invariant()
    def the_next_expiry_is_never_late(self) -> None:
        next_expiry_ms = self.wheel.next_expiry_ms()
        if not self.due_ms:
            assert next_expiry_ms is None
        else:
            assert next_expiry_ms is not None
            assert next_expiry_ms <= min(self.due_ms.values())

    @invariant()
    def the_length_is_the_number_of_pending_entries(self) -> None:
        assert len(self.wheel) == len(self.due_ms)


WheelAgainstModel.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestTimingWheelAgainstModel = WheelAgainstModel.TestCase
