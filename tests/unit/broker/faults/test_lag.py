"""Calls that are late keep their order."""

from __future__ import annotations

import asyncio

from minibroker.broker.faults.lag import Lag
from minibroker.broker.faults.links import Way
from tests.waiting import until


def lag(made: list[str], *names: str) -> Lag:
    """A lag that is held, with calls that note their names."""
    found = Lag(asyncio.get_running_loop())
    found.change(Way(is_held=True))
    for name in names:
        found.put(lambda name=name: made.append(name))  # type: ignore[misc]
    return found


async def test_what_is_held_is_called_in_its_order_after_the_healing() -> None:
    made: list[str] = []
    held = lag(made, "a", "b")
    await asyncio.sleep(0.05)
    assert made == []
    held.change(Way())
    assert not held.is_open
    held.put(lambda: made.append("c"))
    await until(lambda: held.is_open)
    assert made == ["a", "b", "c"]


async def test_a_delay_passes_before_a_call_and_a_shorter_one_holds_for_those_that_wait() -> None:
    made: list[str] = []
    loop = asyncio.get_running_loop()
    late = Lag(loop)
    late.change(Way(delay_s=0.2))
    began_s = loop.time()
    late.put(lambda: made.append("a"))
    await until(lambda: bool(made))
    assert loop.time() - began_s >= 0.19
    late.change(Way(delay_s=3_600.0))
    late.put(lambda: made.append("b"))
    late.change(Way(delay_s=0.01))
    await until(lambda: made == ["a", "b"])
    assert not late.is_open


async def test_what_is_cleared_is_never_called() -> None:
    made: list[str] = []
    held = lag(made, "a")
    held.clear()
    held.change(Way())
    assert held.is_open
    await asyncio.sleep(0.02)
    assert made == []


async def test_a_call_that_raises_holds_up_no_other() -> None:
    made: list[str] = []
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    held = lag(made, "a")
    error = RuntimeError("of a protocol")

    def fail() -> None:
        raise error

    held.put(fail)
    held.put(lambda: made.append("b"))
    held.change(Way())
    await until(lambda: held.is_open)
    assert (made, reported) == (["a", "b"], [error])
