"""Settings of Python's collector in a broker's process. Run in this process, and undone afterwards."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

import minibroker.broker.__main__ as process
from minibroker.broker.freed_memory import LITTLE_BYTES, MUCH_BYTES, FreedMemory


@pytest.fixture
def collector() -> Iterator[None]:
    callbacks, threshold = list(gc.callbacks), gc.get_threshold()
    try:
        yield
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*threshold)
        gc.unfreeze()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("generation", [1, 2])
def test_what_outlived_a_long_collection_is_not_looked_at_again(
    generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LONG_COLLECTION_S", 0.0)
    process._bound_pauses_of_the_collector()
    survivor = [object()]
    gc.collect(generation)
    assert gc.get_freeze_count() > 0
    assert not any(known is survivor for known in gc.get_objects())


@pytest.mark.usefixtures("collector")
def test_after_short_collections_everything_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LONG_COLLECTION_S", 3_600.0)
    process._bound_pauses_of_the_collector()
    survivor = [object()]
    before = gc.get_freeze_count()
    gc.collect()
    gc.collect(1)
    assert gc.get_freeze_count() == before
    assert any(known is survivor for known in gc.get_objects())


class Process:
    """A process whose allocator keeps what was freed until it is trimmed."""

    def __init__(self) -> None:
        self.used = self.resident = 50 << 20
        self.trims = 0

    def trim(self, padding: int) -> None:
        self.trims += 1
        self.resident = self.used

    def grow(self, size: int) -> None:
        self.used += size
        self.resident = max(self.resident, self.used)


def test_memory_goes_back_after_a_peak_even_if_it_was_in_use_at_the_first_look() -> None:
    process = Process()
    memory = FreedMemory(lambda: process.resident, process.trim)

    async def look(times: int) -> None:
        for _ in range(times):
            await memory.look()

    asyncio.run(look(3))
    process.grow(MUCH_BYTES - 1)
    asyncio.run(look(3))
    assert process.trims == 0
    process.grow(200 << 20)
    asyncio.run(look(1))
    assert process.trims == 1
    process.grow(-(200 << 20))
    asyncio.run(look(3))
    assert process.resident == process.used


def test_a_process_that_needs_its_memory_is_rarely_trimmed() -> None:
    process = Process()
    memory = FreedMemory(lambda: process.resident, process.trim)
    process.grow(500 << 20)

    async def look() -> None:
        for _ in range(600):
            await memory.look()
            process.grow(LITTLE_BYTES // 100)

    asyncio.run(look())
    assert process.trims < 30
