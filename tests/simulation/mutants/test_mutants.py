"""Planted bugs leave no trace after their removal, and a cluster without faults works with each of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.world import World
from tests.simulation.mutants import MUTANTS, Patches, planted
from tests.simulation.mutants.planting import PRODUCT

RECORDS = 40
every_mutant = pytest.mark.parametrize("name", MUTANTS)


Attributes = dict[tuple[str, str], Any]


def _each() -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield everything that a mutant could replace: the attributes of modules and of their classes, those of the
    product first, then those of the tests."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] in (PRODUCT, "tests"):
            for name, value in list(vars(module).items()):
                yield (module_name, name), value
                if isinstance(value, type):
                    for key, held in vars(value).items():
                        yield (f"{module_name}.{name}", key), held


def _different(before: Attributes, after: Attributes) -> list[tuple[str, str]]:
    return [key for key in {**before, **after} if before.get(key) is not after.get(key)]


@pytest.fixture(scope="module")
def before() -> Attributes:
    return dict(_each())


@pytest.mark.slow
@every_mutant
def test_a_planted_mutant_leaves_no_trace(name: str, before: Attributes) -> None:
    with planted(name):
        assert any(before.get(key) is not value for key, value in _each())
    assert _different(before, dict(_each())) == []


def test_nothing_is_planted_without_a_name(before: Attributes) -> None:
    with planted(None):
        assert _different(before, dict(_each())) == []


def test_a_mutant_is_removed_after_an_error(before: Attributes) -> None:
    with pytest.raises(ZeroDivisionError), planted(next(iter(MUTANTS))):
        raise ZeroDivisionError
    assert _different(before, dict(_each())) == []


def test_a_function_is_replaced_in_all_modules_that_import_it() -> None:
    first, second = ModuleType("minibroker.first_of_test"), ModuleType("minibroker.second_of_test")

    def double(number: int) -> int:
        return 2 * number

    first.__dict__["double"] = second.__dict__["twice"] = double
    sys.modules |= {module.__name__: module for module in (first, second)}
    patches = Patches()
    try:

        @patches.instead_of(first, "double")
        def plus_one(original: Any, number: int) -> int:
            return int(original(number)) + 1

        assert (first.double(5), second.twice(5)) == (11, 11)
        patches.undo()
        assert (first.double, second.twice) == (double, double)
    finally:
        for module in (first, second):
            del sys.modules[module.__name__]


# --- Without faults -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_mutant
def test_a_cluster_without_faults_works_with_the_mutant(name: str) -> None:
    with planted(name):
        assert run(_written_and_read(), seed=1) == [b"%d" % number for number in range(RECORDS)]


async def _written_and_read() -> list[bytes]:
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    world = cluster.client("client")
    return await world.process.run(_write_and_read(world, cluster.bootstrap))


async def _write_and_read(world: World, bootstrap: str) -> list[bytes]:
    async with Admin(bootstrap, world=world) as admin:
        await admin.create_topic("orders", partitions=1, replication_factor=3)
    async with Producer(bootstrap, acks="all", world=world) as producer:
        for number in range(RECORDS):
            await producer.send("orders", b"%d" % number)
            await asyncio.sleep(0.01)
    read: list[bytes] = []
    async with Consumer(bootstrap, topics=["orders"], world=world) as consumer:
        async for record in consumer:
            read.append(record.value or b"")
            if len(read) == RECORDS:
                return read
    return read
