"""Long work on the event loop, in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from minibroker.broker.scheduling.slices import SLICE_S, SlicedCalls, TakingTurns
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
