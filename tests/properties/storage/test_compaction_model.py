"""A compacted log under any order of appends, compactions, truncations, kills and power cuts.

The latest record of each key stays at its offset and in order, tombstones stay for as long as they must, control
batches stay, and producers are remembered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minibroker.broker.storage.compaction import cleaning as compaction
from minibroker.protocol.errors import BrokerError
from tests.compaction_support import RETENTION_MS, CompactedLog
from tests.simulation.mutants import planted
from tests.storage_support import coverage


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SLICE_BYTES", 300)


def cuts(driver: CompactedLog) -> list[Callable[[], None]]:
    return [*[driver.truncate] * 4, driver.truncate_what_is_committed, driver.restart]


def do_later(driver: CompactedLog, action: Callable[[], None], calls: int) -> None:
    """Run `action` before one of the next calls of the worker threads: `calls` of them come first."""

    def before() -> None:
        if calls:
            do_later(driver, action, calls - 1)
        else:
            action()

    driver.world.executor.before = before


async def step(driver: CompactedLog) -> None:
    """Do one random thing, during which the machine may die."""
    random = driver.random
    kind = random.randrange(24)
    dies = random.random() < 0.1
    if dies:
        driver.host.medium.faults.die_after(random.randrange(25))
    try:
        if kind < 9:
            driver.append()
        elif kind == 9:
            driver.append_marker()
        elif kind == 10:
            driver.log.roll()
        elif kind == 11 and not dies:
            random.choice(cuts(driver))()
        elif kind == 12:
            driver.advance_clock(random.choice((10, RETENTION_MS // 2, RETENTION_MS)))
        elif kind < 16:
            await driver.flush()
            driver.commit()
        elif kind == 16 and not dies:
            await driver.manager.close()
            await driver.open()
        elif kind > 16:
            if random.random() < 0.3 and not dies:
                # The event loop goes on while a worker thread reads and writes.
                action = random.choice((driver.append, driver.log.roll, *cuts(driver)))
                do_later(driver, action, random.randrange(30))
            await driver.compact()
            driver.world.executor.before = None
        await asyncio.sleep(0)
    except BrokerError:
        assert dies
    if dies:
        await driver.end_process()
        await driver.start_again(power_cut=random.random() < 0.5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(10, 80), keys=st.integers(1, 12))
@example(seed=108_443, steps=19, keys=3)  # cut while an unneeded cleaned segment was removed
@example(seed=641, steps=63, keys=1)  # died while index files were rebuilt
def test_the_latest_record_of_each_key_survives_any_order_of_events(seed: int, steps: int, keys: int) -> None:
    asyncio.run(live(seed, steps, keys))


async def live(seed: int, steps: int, keys: int) -> None:
    driver = CompactedLog(Random(seed), keys=keys)
    await driver.open()
    for _ in range(steps):
        await step(driver)
        driver.check()
    await driver.check_producers_of_a_copy()
    await driver.manager.close()


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.slow
def test_a_compaction_that_dies_at_any_step_leaves_the_log_as_before_or_after(power_cut: bool) -> None:
    outcomes: Counter[str] = Counter()
    struck = [change for seed in range(3) for change in die_at_each_step(seed, power_cut, outcomes)]
    print(f"\ndied before each of {len(struck)} changes; the log was as {dict(outcomes)}:{coverage(struck)}")
    kinds = {(operation, path.rpartition(".")[2]) for operation, path in struck}
    assert {("pwrite", "cleaned"), ("rename", "cleaned"), ("remove", "log")} <= kinds
    assert outcomes["before"] > 5
    assert outcomes["after"] > 5


def die_at_each_step(seed: int, power_cut: bool, outcomes: Counter[str]) -> list[tuple[str, str]]:
    """Kill a compaction before each change of the disk that it makes; return these changes."""
    struck: list[tuple[str, str]] = []

    async def run(changes: int) -> bool:
        """Return whether the compaction ended within so many changes of the disk."""
        driver = await with_segments_to_merge(seed)
        before = driver.read()
        driver.random.seed(f"{seed} {changes}")
        driver.host.medium.faults.die_after(changes)
        made = driver.host.medium.faults.list_changes()
        try:
            await driver.compact(room=1_000)
        except BrokerError:
            died = True
        else:
            died = driver.host.medium.faults.is_dead
        struck[:] = made
        await driver.end_process()
        await driver.start_again(power_cut=power_cut)
        after = driver.read()
        driver.check()
        outcomes["before" if after == before else "after"] += 1
        if after != before:
            assert [record.offset for record in after[0]] == await offsets_once_compacted(seed)
        await driver.compact(room=1_000)
        driver.check()
        assert not [name for name in driver.world.disk.list("/data/orders-0") if "swap" in name or "cleaned" in name]
        await driver.manager.close()
        return not died

    changes = 0
    while not asyncio.run(run(changes)):
        changes += 1
    assert len(struck) + 1 == changes  # the last change listed is the one that the kill prevented
    return struck


async def with_segments_to_merge(seed: int) -> CompactedLog:
    """Return a log of four segments; three are committed, and small enough to be merged."""
    driver = CompactedLog(Random(seed), keys=3)
    await driver.open()
    while len(driver.log.extents()) < 4:
        driver.append()
    driver.commit_transactions()
    await driver.flush()
    driver.high_watermark = driver.log.recovery_point
    driver.config = driver.log.config = msgspec.structs.replace(driver.config, segment_bytes=1_000_000)
    return driver


async def offsets_once_compacted(seed: int) -> list[int]:
    driver = await with_segments_to_merge(seed)
    assert await driver.compact(room=1_000)
    assert len(driver.log.extents()) == 2
    found = [record.offset for record in driver.read()[0]]
    await driver.manager.close()
    return found


def test_a_swap_that_is_not_crash_safe_is_detected() -> None:
    with planted("swap-without-marker"), pytest.raises(AssertionError):
        die_at_each_step(0, power_cut=False, outcomes=Counter())


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["tombstone-removed-early", "control-batches-compacted"])
def test_wrong_removals_by_compaction_are_detected(bug: str) -> None:
    def storm() -> None:
        for seed in range(50):
            asyncio.run(live(seed, steps=80, keys=4))

    with planted(bug), pytest.raises(AssertionError):
        storm()
