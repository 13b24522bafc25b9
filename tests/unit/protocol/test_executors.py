"""The worker threads that the World hands out."""

import asyncio
import threading

import pytest

from minibroker.protocol.world import real
from minibroker.protocol.world.real import THREADS, RealWorld
from tests.waiting import until


async def test_an_executor_whose_calls_do_not_return_holds_up_no_other() -> None:
    world, hangs = RealWorld(), threading.Event()
    hung, other = world.new_executor("hung"), world.new_executor("other")
    calls = [asyncio.create_task(hung.run(hangs.wait)) for _ in range(2 * THREADS)]
    try:
        async with asyncio.timeout(10):
            assert [await other.run(divmod, 7, 2) for _ in range(2 * THREADS)] == [(3, 1)] * 2 * THREADS
        assert not any(call.done() for call in calls)
    finally:
        hangs.set()
        await asyncio.gather(*calls)
        world.close()


async def test_threads_are_started_when_they_are_needed() -> None:
    world = RealWorld()
    before = set(threading.enumerate())
    executors = [world.new_executor(name) for name in ("one", "other")]
    assert not set(threading.enumerate()) - before
    await executors[0].run(int)
    assert len(set(threading.enumerate()) - before) == 1
    world.close()


def test_a_world_that_is_closed_does_not_wait_for_ever_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world, hangs = RealWorld(), threading.Event()
        call = asyncio.create_task(world.new_executor("hung").run(hangs.wait))
        await asyncio.sleep(0)
        assert not world.close()
        hangs.set()
        await call
        await until(world.close)

    monkeypatch.setattr(real, "CLOSE_PATIENCE_S", 0.01)
    asyncio.run(main())
