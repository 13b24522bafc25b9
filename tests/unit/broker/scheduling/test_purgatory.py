from __future__ import annotations

import asyncio
import gc
import selectors
import weakref
from collections.abc import Callable, Collection, Coroutine, Hashable
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from minibroker.broker.scheduling.purgatory import (
    EXPIRIES_PER_SLICE,
    MOVES_PER_SLICE,
    PAUSE_BETWEEN_SLICES_MS,
    SLICE_S,
    DelayedOperation,
    Purgatory,
    Timer,
)
from tests.running import run_by

START_SECONDS = 1.0  # soon after it come 1.001 s, which times 1000 is less than 1001


class JumpingSelector(selectors.SelectSelector):
    """Where a real loop would sleep, moves its time to the end of the sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = START_SECONDS
        self.sleeps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the loop would sleep for ever")
        if timeout > 0:
            self.seconds += timeout
            self.sleeps += 1
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping_selector = JumpingSelector()
        super().__init__(self.jumping_selector)
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self.jumping_selector.seconds

    def elapsed_ms(self) -> float:
        return round((self.time() - START_SECONDS) * 1000, 3)

    @property
    def errors(self) -> list[str]:
        return [str(failure["exception"]) for failure in self.failures]


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        runner.run(main(loop))


async def next_turn() -> None:
    """Return after everything scheduled for the loop's next turn has run."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class Waiter(DelayedOperation):
    """An operation that completes when the test allows it, and records its events."""

    def __init__(self, journal: list[str], name: str, timeout_ms: int = 1_000) -> None:
        super().__init__(timeout_ms)
        self.journal = journal
        self.name = name
        self.may_complete = False
        self.tries = 0
        self.then: Callable[[], object] = lambda: None

    def try_complete(self) -> bool:
        self.tries += 1
        return self.force_complete() if self.may_complete else False

    def on_complete(self) -> None:
        self.journal.append(f"{self.name} completed")
        self.then()

    def on_expiration(self) -> None:
        self.journal.append(f"{self.name} expired")

    def __repr__(self) -> str:
        return f"Waiter({self.name})"


def fail(message: str) -> Callable[[], None]:
    def raise_it() -> None:
        raise OSError(message)

    return raise_it


# ---- Timer ----


@run_by(run)
async def test_callbacks_run_in_order_and_exactly_at_their_timeouts(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []
    for timeout_ms in (500, 3, 30_000, 21, 400, 8_001, 0):
        timer.add(timeout_ms, lambda: calls.append(loop.elapsed_ms()))
    assert calls == []
    await asyncio.sleep(31)
    assert calls == [0, 3, 21, 400, 500, 8_001, 30_000]
    assert len(timer) == 0


@run_by(run)
async def test_every_millisecond_is_met_although_a_loops_time_is_a_float_of_seconds(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []

    def once_more() -> None:
        calls.append(loop.elapsed_ms())
        if len(calls) < 3_000:
            timer.add(1, once_more)

    timer.add(1, once_more)
    await asyncio.sleep(4)
    assert calls == list(range(1, 3_001))
    assert loop.jumping_selector.sleeps == 3_001

    calls.clear()
    for timeout_ms in range(3_000):
        timer.add(timeout_ms, lambda: calls.append(loop.elapsed_ms()))
    await asyncio.sleep(4)
    assert calls == list(range(4_000, 7_000))


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_no_callback_is_early_on_a_real_loop(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        timer = Timer()
        lead_seconds: list[float] = []
        all_called = asyncio.Event()

        def expect(timeout_ms: int) -> None:
            due = loop.time() + timeout_ms / 1000

            def callback() -> None:
                lead_seconds.append(due - loop.time())
                if len(lead_seconds) == 60:
                    all_called.set()

            timer.add(timeout_ms, callback)

        for timeout_ms in range(60):
            expect(timeout_ms)
        await all_called.wait()
        assert max(lead_seconds) < 0.000_002
        timer.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@pytest.mark.slow
@run_by(run)
async def test_the_loop_sleeps_through_a_hundred_thousand_pending_timeouts(loop: VirtualLoop, /) -> None:
    timer = Timer()
    entries = [timer.add(30_000 + index % 100, list) for index in range(100_000)]
    await asyncio.sleep(20)
    # The test's own sleep and, at most, one bucket of the wheel whose ticks are 8 s.
    assert loop.jumping_selector.sleeps <= 2
    for entry in entries:
        assert timer.cancel(entry)
    assert len(timer) == 0
    timer.close()


@run_by(run)
async def test_a_timer_that_was_idle_for_long_wakes_once_for_a_short_timeout(loop: VirtualLoop, /) -> None:
    timer = Timer()
    await asyncio.sleep(12_345.678)
    called = asyncio.Event()
    sleeps_before = loop.jumping_selector.sleeps
    timer.add(15, called.set)
    await called.wait()
    assert loop.elapsed_ms() == 12_345_693
    assert loop.jumping_selector.sleeps == sleeps_before + 1


@run_by(run)
async def test_a_shorter_timeout_added_later_comes_first(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []
    timer.add(5_000, lambda: calls.append(loop.elapsed_ms()))
    await asyncio.sleep(0.1)
    timer.add(50, lambda: calls.append(loop.elapsed_ms()))
    await asyncio.sleep(5)
    assert calls == [150, 5_000]


@run_by(run)
async def test_a_callback_that_raises_is_reported_and_the_others_run(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[str] = []
    timer.add(10, fail("the first"))
    timer.add(10, lambda: calls.append("second"))
    timer.add(900, lambda: calls.append("third"))
    await asyncio.sleep(1)
    assert loop.errors == ["the first"]
    assert calls == ["second", "third"]


@run_by(run)
async def test_a_callback_may_cancel_one_that_is_due_at_the_same_time(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[str] = []
    timer.add(10, lambda: calls.append(f"cancelled: {timer.cancel(second)}"))
    second = timer.add(10, lambda: calls.append("second"))
    await asyncio.sleep(1)
    assert calls == ["cancelled: True"]


@run_by(run)
async def test_a_callback_that_takes_long_may_add_another(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []

    def slow() -> None:
        loop.jumping_selector.seconds += 0.025
        timer.add(5, lambda: calls.append(loop.elapsed_ms()))
        timer.add(0, lambda: calls.append(loop.elapsed_ms()))

    timer.add(10, slow)
    await asyncio.sleep(1)
    assert calls == [35 + PAUSE_BETWEEN_SLICES_MS, 40]
    assert loop.errors == []


@run_by(run)
async def test_a_mass_of_expiries_lets_the_loop_breathe_between_slices(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []
    for _ in range(3 * EXPIRIES_PER_SLICE):
        timer.add(10, lambda: calls.append(loop.elapsed_ms()))
    last = timer.add(10, lambda: calls.append(-1.0))
    await asyncio.sleep(0.0115)
    assert len(calls) == 2 * EXPIRIES_PER_SLICE
    assert timer.cancel(last)  # though its time has come
    await asyncio.sleep(1)
    assert calls == [float(ms) for ms in (10, 11, 12) for _ in range(EXPIRIES_PER_SLICE)]


@run_by(run)
async def test_expiries_that_take_long_let_the_loop_breathe_after_two_milliseconds(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []

    def work() -> None:
        calls.append(loop.elapsed_ms())
        loop.jumping_selector.seconds += 0.6 * SLICE_S

    for _ in range(4):
        timer.add(10, work)
    await asyncio.sleep(1)
    apart = [after - before for before, after in pairwise(calls)]
    assert apart[0] == apart[2] == pytest.approx(600 * SLICE_S)
    assert apart[1] > apart[0] + PAUSE_BETWEEN_SLICES_MS / 2, "two of them are a slice"


@run_by(run)
async def test_a_mass_of_entries_that_move_to_finer_wheels_lets_the_loop_breathe_too(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[float] = []
    for _ in range(5 * MOVES_PER_SLICE):
        timer.add(100_017, lambda: calls.append(loop.elapsed_ms()))
    await asyncio.sleep(100.016)
    # From the wheel of 160 s to those of 8 s, 400 ms and 20 ms, each time in five slices or six,
    # as the slice that ends with the last move cannot know that it was the last.
    assert 3 * 5 <= loop.jumping_selector.sleeps <= 3 * 6 + 1
    assert calls == []
    await asyncio.sleep(1)
    assert len(calls) == 5 * MOVES_PER_SLICE
    assert calls[0] == 100_017


@run_by(run)
async def test_a_callback_may_close_the_timer_and_none_runs_after_it(loop: VirtualLoop, /) -> None:
    timer = Timer()
    calls: list[str] = []
    timer.add(10, timer.close)
    second = timer.add(10, lambda: calls.append("same time"))
    timer.add(20, lambda: calls.append("later"))
    await asyncio.sleep(1)
    assert calls == []
    assert len(timer) == 0
    assert not timer.cancel(second)
    with pytest.raises(RuntimeError):
        timer.add(10, list)
    timer.close()
    assert loop.errors == []


# ---- DelayedOperation ----


def test_an_operation_completes_exactly_once() -> None:
    journal: list[str] = []
    operation = Waiter(journal, "a")
    completed_inside: list[bool] = []
    operation.then = lambda: completed_inside.append(operation.is_completed)
    assert not operation.try_complete()
    assert operation.force_complete()
    assert completed_inside == [True]
    assert not operation.force_complete()
    operation.expire()
    assert journal == ["a completed"]


def test_an_operation_that_fails_to_answer_is_completed_all_the_same() -> None:
    operation = Waiter([], "a")
    operation.then = fail("no answer")
    with pytest.raises(OSError, match="no answer"):
        operation.force_complete()
    assert operation.is_completed
    assert not operation.force_complete()


# ---- Purgatory ----


@run_by(run)
async def test_an_operation_that_can_complete_at_once_is_not_watched(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operation = Waiter(journal, "a")
    operation.may_complete = True
    assert purgatory.try_complete_else_watch(operation, ["key"])
    assert purgatory.try_complete_else_watch(operation, ["key"])  # completed before: not even tried
    assert operation.tries == 1
    assert journal == ["a completed"]
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (0, 0, 0)


@run_by(run)
async def test_an_operation_completes_when_one_of_its_keys_is_checked_and_it_may(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operation, other = Waiter(journal, "a"), Waiter(journal, "b")
    assert not purgatory.try_complete_else_watch(operation, [("t", 0), ("t", 1), ("t", 1)])
    assert not purgatory.try_complete_else_watch(other, [("t", 1)])
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (3, 2, 2)

    assert purgatory.check_and_complete(("t", 1)) == 0
    operation.may_complete = True
    assert purgatory.check_and_complete("nobody waits for this") == 0
    assert journal == []
    assert purgatory.check_and_complete(("t", 1)) == 1
    assert journal == ["a completed"]
    # It is still watched under the key that was not checked; its timeout is gone.
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (2, 1, 1)
    assert purgatory.check_and_complete(("t", 0)) == 0
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (1, 1, 1)
    timer.close()


@run_by(run)
async def test_operations_are_tried_in_the_order_in_which_they_were_watched(loop: VirtualLoop, /) -> None:
    journal = list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", Timer())
    operations = [Waiter(journal, str(index)) for index in range(10)]
    for operation in operations:
        purgatory.try_complete_else_watch(operation, ["key"])
    for operation in reversed(operations):
        operation.may_complete = True
    assert purgatory.check_and_complete("key") == 10
    assert journal == [f"{index} completed" for index in range(10)]


@run_by(run)
async def test_an_operation_whose_time_is_up_completes_and_then_notes_the_expiration(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    purgatory.try_complete_else_watch(Waiter(journal, "a", timeout_ms=500), ["key"])
    await asyncio.sleep(0.4995)
    assert journal == []
    await asyncio.sleep(0.001)
    assert journal == ["a completed", "a expired"]
    assert (purgatory.watched(), purgatory.delayed()) == (1, 0)
    assert purgatory.check_and_complete("key") == 0
    assert purgatory.watched() == 0


@run_by(run)
async def test_an_operation_that_completed_does_not_expire(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operation = Waiter(journal, "a", timeout_ms=500)
    purgatory.try_complete_else_watch(operation, ["key"])
    assert operation.force_complete()
    assert (purgatory.delayed(), len(timer)) == (0, 0)
    await asyncio.sleep(1)
    assert journal == ["a completed"]
    assert operation.tries == 1


@run_by(run)
async def test_what_cannot_be_watched_is_refused(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operation = Waiter(journal, "a")
    with pytest.raises(ValueError):
        purgatory.try_complete_else_watch(operation, [])
    purgatory.try_complete_else_watch(operation, ["key"])
    with pytest.raises(ValueError):
        purgatory.try_complete_else_watch(operation, ["other key"])
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (1, 1, 1)
    timer.close()


@run_by(run)
async def test_the_reaper_purges_once_more_than_the_interval_are_completed_and_watched(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer, purge_interval=5)
    operations = [Waiter(journal, str(index)) for index in range(8)]
    for operation in operations:
        purgatory.try_complete_else_watch(operation, ["busy", "quiet"])
    for operation in operations[:5]:
        operation.may_complete = True
    assert purgatory.check_and_complete("busy") == 5
    await next_turn()
    assert purgatory.watched() == 5 + 2 * 3
    operations[5].force_complete()
    assert purgatory.watched() == 5 + 2 * 3
    await next_turn()
    assert (purgatory.watched(), purgatory.delayed()) == (2 * 2, 2)
    assert [operation.tries for operation in operations] == [2] * 8  # purging tries none
    timer.close()


@run_by(run)
async def test_purging_counts_the_operations_it_removed_and_leaves_the_rest(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    done, waiting = Waiter(journal, "a"), Waiter(journal, "b")
    purgatory.try_complete_else_watch(done, ["x", "y"])
    purgatory.try_complete_else_watch(waiting, ["y"])
    done.force_complete()
    assert purgatory.purge_completed() == 1
    assert purgatory.purge_completed() == 0
    assert (purgatory.watched(), purgatory.delayed()) == (1, 1)
    waiting.may_complete = True
    assert purgatory.check_and_complete("y") == 1


@run_by(run)
async def test_a_completed_operation_is_freed_without_the_garbage_collector(loop: VirtualLoop, /) -> None:
    purgatory: Purgatory[Waiter] = Purgatory("test", Timer())
    operation = Waiter([], "a", timeout_ms=30_000)
    purgatory.try_complete_else_watch(operation, ["key"])
    operation.may_complete = True
    reference = weakref.ref(operation)
    gc.disable()
    try:
        assert purgatory.check_and_complete("key") == 1
        del operation
        assert reference() is None
    finally:
        gc.enable()


@run_by(run)
async def test_on_complete_may_watch_a_new_operation_under_the_same_key(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    first, second = Waiter(journal, "first"), Waiter(journal, "second")
    first.then = lambda: purgatory.try_complete_else_watch(second, ["key"])
    purgatory.try_complete_else_watch(first, ["key"])
    first.may_complete = True
    assert purgatory.check_and_complete("key") == 1
    assert second.tries == 1
    assert (purgatory.watched(), purgatory.delayed()) == (1, 1)
    second.may_complete = True
    assert purgatory.check_and_complete("key") == 1
    assert purgatory.watched() == 0


@run_by(run)
async def test_on_complete_may_check_another_key_and_it_is_checked_at_once(loop: VirtualLoop, /) -> None:
    journal = list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", Timer())
    first, second, both = Waiter(journal, "first"), Waiter(journal, "second"), Waiter(journal, "both")
    first.then = lambda: journal.append(f"nested: {purgatory.check_and_complete('y')}")
    purgatory.try_complete_else_watch(first, ["x"])
    purgatory.try_complete_else_watch(second, ["y"])
    purgatory.try_complete_else_watch(both, ["x", "y"])
    first.may_complete = second.may_complete = both.may_complete = True
    assert purgatory.check_and_complete("x") == 1
    assert journal == ["first completed", "second completed", "both completed", "nested: 2"]
    assert (purgatory.watched(), purgatory.delayed()) == (0, 0)


@run_by(run)
async def test_on_complete_may_check_its_own_key_however_many_wait_there(loop: VirtualLoop, /) -> None:
    journal = list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", Timer())
    operations = [Waiter(journal, str(index)) for index in range(5_000)]
    for operation in operations:
        operation.then = lambda: purgatory.check_and_complete("key")
        purgatory.try_complete_else_watch(operation, ["key"])
        operation.may_complete = True
    assert purgatory.check_and_complete("key") == 5_000
    assert purgatory.watched() == 0
    assert loop.errors == []


@run_by(run)
async def test_an_operation_passed_by_a_check_is_tried_again_when_a_later_one_checks_the_key(
    loop: VirtualLoop, /
) -> None:
    journal = list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", Timer())
    first, second = Waiter(journal, "first"), Waiter(journal, "second")

    def let_the_first_complete() -> None:
        first.may_complete = True
        assert purgatory.check_and_complete("key") == 0

    second.then = let_the_first_complete
    purgatory.try_complete_else_watch(first, ["key"])
    purgatory.try_complete_else_watch(second, ["key"])
    second.may_complete = True
    assert purgatory.check_and_complete("key") == 1
    assert journal == ["second completed"]
    await next_turn()
    assert journal == ["second completed", "first completed"]


@run_by(run)
async def test_on_complete_may_purge_or_close_while_its_key_is_checked(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operations = [Waiter(journal, name) for name in ("purges", "waits", "closes", "dropped")]
    operations[0].then = lambda: purgatory.purge_completed()
    operations[2].then = lambda: purgatory.close()
    for operation in operations:
        purgatory.try_complete_else_watch(operation, ["key", "other key"])
        operation.may_complete = operation.name != "waits"
    assert purgatory.check_and_complete("key") == 2
    assert journal == ["purges completed", "closes completed"]
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (0, 0, 0)


@run_by(run)
async def test_one_operation_that_raises_does_not_keep_the_others_from_completing(loop: VirtualLoop, /) -> None:
    journal = list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("produce", Timer())
    operations = [Waiter(journal, str(index)) for index in range(3)]
    operations[1].then = fail("connection lost")
    for operation in operations:
        purgatory.try_complete_else_watch(operation, ["key"])
        operation.may_complete = True
    assert purgatory.check_and_complete("key") == 3
    assert journal == ["0 completed", "1 completed", "2 completed"]
    assert (purgatory.watched(), purgatory.delayed()) == (0, 0)
    assert loop.errors == ["connection lost"]
    assert "Waiter(1) in purgatory produce" in loop.failures[0]["message"]


@run_by(run)
async def test_an_operation_that_fails_to_look_is_still_watched_and_still_expires(loop: VirtualLoop, /) -> None:
    class Broken(Waiter):
        def try_complete(self) -> bool:
            if self.tries == 1:
                raise asyncio.CancelledError("as the result of a future would")
            return super().try_complete()

    journal = list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", Timer())
    purgatory.try_complete_else_watch(Broken(journal, "broken", timeout_ms=100), ["key"])
    sound = Waiter(journal, "sound")
    purgatory.try_complete_else_watch(sound, ["key"])
    sound.may_complete = True
    assert purgatory.check_and_complete("key") == 1
    assert loop.errors == ["as the result of a future would"]
    assert purgatory.delayed() == 1
    await asyncio.sleep(1)
    assert journal == ["sound completed", "broken completed", "broken expired"]


@run_by(run)
async def test_what_the_first_try_raises_goes_to_the_caller_and_nothing_is_watched(loop: VirtualLoop, /) -> None:
    timer = Timer()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operation = Waiter([], "a")
    operation.may_complete = True
    operation.then = fail("no answer")
    with pytest.raises(OSError, match="no answer"):
        purgatory.try_complete_else_watch(operation, ["key"])
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (0, 0, 0)
    assert loop.errors == []


@run_by(run)
async def test_many_requests_for_a_check_in_one_turn_are_one_check_on_the_next(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operations = {key: Waiter(journal, key) for key in ("x", "y", "z")}
    for key, operation in operations.items():
        purgatory.try_complete_else_watch(operation, [key])
    for _ in range(100):
        purgatory.check_soon("y")
        purgatory.check_soon("x")
    for operation in operations.values():
        operation.may_complete = True
    assert [operation.tries for operation in operations.values()] == [1, 1, 1]
    await next_turn()
    assert journal == ["y completed", "x completed"]
    assert [operation.tries for operation in operations.values()] == [2, 2, 1]
    purgatory.check_soon("z")
    await next_turn()
    assert journal == ["y completed", "x completed", "z completed"]


@run_by(run)
async def test_an_operation_is_tried_once_in_a_turn_however_many_of_its_keys_are_checked(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    both, second = Waiter(journal, "both"), Waiter(journal, "second")
    purgatory.try_complete_else_watch(both, ["x", "y"])
    purgatory.try_complete_else_watch(second, ["y"])
    purgatory.check_soon("x")
    purgatory.check_soon("y")
    await next_turn()
    assert (both.tries, second.tries) == (2, 2)
    both.may_complete = second.may_complete = True
    purgatory.check_soon("x")
    purgatory.check_soon("y")
    await next_turn()
    assert (both.tries, second.tries) == (3, 3)
    assert journal == ["both completed", "second completed"]
    assert purgatory.watched() == 0


@run_by(run)
async def test_an_operation_hears_of_those_of_its_keys_that_were_checked_in_the_turn(loop: VirtualLoop, /) -> None:
    class Selective(Waiter):
        heard: list[list[Hashable]]

        def try_complete_after(self, checked: Collection[Hashable]) -> bool:
            self.heard.append(list(checked))
            return self.try_complete()

    timer = Timer()
    purgatory: Purgatory[Selective] = Purgatory("test", timer)
    operation, other = Selective([], "a"), Selective([], "b")
    operation.heard, other.heard = [], []
    purgatory.try_complete_else_watch(operation, ["x", "y", "z"])
    purgatory.try_complete_else_watch(other, ["y"])
    for key in ("z", "w", "x"):
        purgatory.check_soon(key)
    await next_turn()
    purgatory.check_soon("y")
    await next_turn()
    purgatory.check_and_complete("x")
    assert operation.heard == [["z", "x"], ["y"], ["x"]]
    assert other.heard == [["y"]]
    timer.close()


@run_by(run)
async def test_an_operation_of_which_its_owner_knows_that_it_must_wait_is_watched_without_a_try(
    loop: VirtualLoop, /
) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    operation = Waiter(journal, "a")
    purgatory.watch(operation, ["key"])
    assert operation.tries == 0
    with pytest.raises(ValueError):
        purgatory.watch(operation, ["key"])
    operation.may_complete = True
    purgatory.check_and_complete("key")
    assert journal == ["a completed"]


@run_by(run)
async def test_a_check_of_a_key_that_nobody_waits_for_is_not_scheduled(loop: VirtualLoop, /) -> None:
    timer = Timer()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    purgatory.check_soon("key")
    operation = Waiter([], "a")
    purgatory.try_complete_else_watch(operation, ["key"])
    await next_turn()
    assert operation.tries == 1  # when it was watched, with the state of that time
    timer.close()


@run_by(run)
async def test_a_check_asked_for_during_a_turns_checks_comes_on_the_turn_after(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    patient = Waiter(journal, "patient")
    asking = Waiter(journal, "asking")

    def ask_for_both() -> None:
        purgatory.check_soon("x")
        purgatory.check_soon("y")

    asking.then = ask_for_both
    purgatory.try_complete_else_watch(patient, ["x"])
    purgatory.try_complete_else_watch(Waiter(journal, "other"), ["y"])
    purgatory.try_complete_else_watch(asking, ["x"])
    purgatory.check_soon("x")
    asking.may_complete = True
    await asyncio.sleep(0)
    assert patient.tries == 2
    await asyncio.sleep(0)
    assert patient.tries == 3
    await next_turn()
    assert patient.tries == 3
    assert loop.errors == []
    timer.close()


@run_by(run)
async def test_closing_drops_what_waits_without_completing_it(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer, purge_interval=0)
    sibling: Purgatory[Waiter] = Purgatory("sibling", timer)
    dropped, checked, completed = (Waiter(journal, name) for name in ("dropped", "checked", "completed"))
    for operation in (dropped, checked, completed):
        purgatory.try_complete_else_watch(operation, [operation.name, "key"])
    sibling.try_complete_else_watch(Waiter(journal, "sibling's"), ["key"])
    completed.force_complete()  # wakes the reaper
    checked.may_complete = True
    purgatory.check_soon("checked")

    purgatory.close()
    purgatory.close()
    assert (purgatory.watched(), purgatory.delayed(), len(timer)) == (0, 0, 1)
    purgatory.check_soon("key")
    assert purgatory.check_and_complete("key") == 0
    with pytest.raises(RuntimeError):
        purgatory.try_complete_else_watch(Waiter(journal, "late"), ["key"])
    await asyncio.sleep(10)
    assert journal == ["completed completed", "sibling's completed", "sibling's expired"]
    assert dropped.force_complete()  # its owner may still complete it
    assert (purgatory.watched(), purgatory.delayed()) == (0, 0)
    assert loop.errors == []
