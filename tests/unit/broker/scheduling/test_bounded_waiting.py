"""Many waiting operations of strangers: their checks take turns with other work, and what they hold is bounded."""

from __future__ import annotations

import asyncio

from minibroker.broker.scheduling.budget import FairBudget
from minibroker.broker.scheduling.purgatory import SLICE_S, USUAL_KEYS, Purgatory, SlicedPurgatory, Timer
from tests.running import run_by
from tests.unit.broker.scheduling.test_purgatory import VirtualLoop, Waiter, next_turn, run

TRY_S = SLICE_S / 10


class SlowWaiter(Waiter):
    """An operation whose check takes time, as with many partitions."""

    def __init__(self, loop: VirtualLoop, journal: list[str], name: str) -> None:
        super().__init__(journal, name, timeout_ms=60_000)
        self.loop = loop

    def try_complete(self) -> bool:
        self.loop.jumping_selector.seconds += TRY_S
        return super().try_complete()


@run_by(run)
async def test_checks_of_many_waiting_operations_leave_the_loop_to_other_tasks(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: SlicedPurgatory[Waiter] = SlicedPurgatory("test", timer)
    waiting = [SlowWaiter(loop, journal, str(number)) for number in range(100)]
    for one in waiting:
        purgatory.watch(one, ["key"])
    purgatory.check_soon("key")
    longest_s = 0.0
    while any(one.tries == 0 for one in waiting):
        began_s = loop.time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, loop.time() - began_s)
        await asyncio.sleep(0.000_1)
    assert longest_s <= 2 * SLICE_S
    assert loop.elapsed_ms() > 4 * 100 * TRY_S * 1_000  # most of the time was left to others
    assert [one.tries for one in waiting] == [1] * 100
    purgatory.close()
    timer.close()


@run_by(run)
async def test_a_check_in_slices_tries_each_operation_once_for_all_its_keys(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: SlicedPurgatory[Waiter] = SlicedPurgatory("test", timer)
    ready, waits = Waiter(journal, "ready"), Waiter(journal, "waits")
    for one in (ready, waits):
        purgatory.watch(one, ["a", "b", "c"])
    ready.may_complete = True
    for key in ("a", "b", "unknown"):
        purgatory.check_soon(key)
    await next_turn()
    assert (ready.tries, waits.tries) == (1, 1)
    assert journal == ["ready completed"]
    assert purgatory.delayed() == 1
    purgatory.check_soon("c")
    await next_turn()
    assert (ready.tries, waits.tries, purgatory.watched()) == (1, 2, 3)
    timer.close()


@run_by(run)
async def test_an_abandoned_operation_neither_acts_nor_expires(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer)
    waiter = Waiter(journal, "waiter")
    purgatory.watch(waiter, ["key"])
    assert waiter.abandon()
    assert not waiter.abandon()
    assert not waiter.force_complete()
    assert (purgatory.delayed(), len(timer)) == (0, 0)
    await asyncio.sleep(2)
    assert journal == []


@run_by(run)
async def test_a_completed_operation_with_very_many_keys_is_purged_soon(loop: VirtualLoop, /) -> None:
    timer, journal = Timer(), list[str]()
    purgatory: Purgatory[Waiter] = Purgatory("test", timer, purge_interval=10)
    waiter = Waiter(journal, "waiter")
    purgatory.watch(waiter, range(10 * USUAL_KEYS + 1))
    waiter.abandon()
    await next_turn()
    assert purgatory.watched() == 0
    timer.close()


def test_beyond_the_budget_the_owner_with_the_most_gives_way() -> None:
    budget: FairBudget[str] = FairBudget(100)
    gave_way: list[object] = []

    def hold(owner: str, thing: int, size: int) -> None:
        budget.hold(owner, thing, size, lambda: gave_way.append(thing))

    hold("small", 1, 10)
    for thing in range(2, 10):
        hold("large", thing, 10)
    assert (budget.held, gave_way) == (90, [])
    hold("small", 10, 15)
    assert gave_way == [*range(2, 10)]
    assert budget.held == 25
    budget.release("small", 1)
    budget.release("small", 1)
    budget.release("large", 2)
    assert budget.held == 15
    hold("small", 11, 101)  # alone, and still too much
    assert budget.held == 0
