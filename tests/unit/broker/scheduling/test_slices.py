"""Long work on the event loop, in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from minibroker.broker.scheduling.slices import BREATH_S, SLICE_S, SlicedCalls, Slices, TakingTurns, giving_way
from tests.unit.broker.replication.test_replication_log_mover import YieldingExecutor


def test_calls_due_at_once_run_in_order_and_the_loop_runs_other_work_between_them() -> None:
    async def main() -> list[object]:
        seen: list[object] = []

        def call(number: int) -> None:
            time.sleep(SLICE_S)
            seen.append(number)

        async def others() -> None:
            while 4 not in seen:
                seen.append("others")
                await asyncio.sleep(0)

        running: list[asyncio.Task[None]] = []
        calls = SlicedCalls(lambda coroutine, _: running.append(asyncio.create_task(coroutine)), "calls")
        for number in range(3):
            calls.call(partial(call, number))
        await running[0]
        for number in (3, 4):
            calls.call(partial(call, number))
        await asyncio.gather(running[1], others())
        assert len(running) == 2
        return seen

    seen = asyncio.run(main())
    assert [each for each in seen if each != "others"] == [0, 1, 2, 3, 4]
    assert "others" in seen[seen.index(3) : seen.index(4)]


def test_only_work_that_gives_way_rests_for_longer_while_others_work() -> None:
    async def rested_s(others_work_s: float) -> float:
        """Return how long the second breath takes after one whose end found others at work for this time."""
        slices = Slices()
        slices._end_s = 0.0
        asyncio.get_running_loop().call_later(BREATH_S / 2, time.sleep, others_work_s)
        await slices.breathe()
        slices._end_s = 0.0
        began_s = time.monotonic()
        await slices.breathe()
        return time.monotonic() - began_s

    async def main() -> None:
        with giving_way():
            assert await rested_s(0.05) >= 10 * BREATH_S
        assert Slices()._gives_way is False

    asyncio.run(main())


def test_long_work_takes_turns_and_ends_when_nobody_waits_for_it() -> None:
    working: list[str] = []

    def work(name: str) -> Generator[Callable[[], Any] | None, Any, str]:
        for _ in range(4):
            assert (yield partial(str.upper, name)) == name.upper()
            working.append(name)
        return name

    async def main() -> None:
        turns = TakingTurns(YieldingExecutor())
        assert await asyncio.gather(*(turns.finish(work(name), lambda: False) for name in "abc")) == ["a", "b", "c"]
        assert working == sorted("abc" * 4)
        assert await turns.finish(work("d"), lambda: True) is None
        assert await turns.finish(work("e"), lambda: len(working) == 14) is None
        assert working[12:] == ["e", "e"]

    asyncio.run(main())
