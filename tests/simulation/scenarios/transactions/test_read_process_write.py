"""Processors through failures: every input has its result exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import pytest

from minibroker.client.errors import ProducerFenced
from minibroker.client.fetching.records import Record
from minibroker.client.processing.results import ProducerRecord
from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.transactions.processing import INPUTS, Pipeline, double, with_pipeline


async def slowly(records: list[Record]) -> list[ProducerRecord]:
    await asyncio.sleep(0.1)
    return double(records)


async def until_results(pipeline: Pipeline, count: int) -> None:
    async with asyncio.timeout(60):
        while len(await pipeline.results()) < count:
            await asyncio.sleep(0.05)


@run_by(with_pipeline)
async def test_each_input_has_one_result_and_the_group_is_at_the_end(pipeline: Pipeline, /) -> None:
    async def yielding(records: list[Record]) -> AsyncIterator[ProducerRecord]:
        for result in double(records):
            yield result

    await pipeline.send(20, 0)
    await pipeline.send(20, 1)
    pipeline.start("processor", "billing-1", yielding)
    await pipeline.all_done()
    assert await pipeline.committed() == dict.fromkeys(INPUTS, 20)
    assert not pipeline.ended


@pytest.mark.parametrize("victim", ["input", "output", "group", "transactions"])
@pytest.mark.parametrize("seed", range(3))
def test_brokers_die_one_after_the_other(
    victim: Literal["input", "output", "group", "transactions"], seed: int
) -> None:
    async def program(pipeline: Pipeline) -> None:
        await pipeline.send(60, 0)
        await pipeline.send(60, 1)
        pipeline.start("processor", "billing-1", slowly)
        for round_number in range(1, 4):
            await until_results(pipeline, 20 * round_number)
            broker_id = {
                "input": lambda: pipeline.leader(INPUTS[0]),
                "output": lambda: pipeline.leader(TopicPartition("bills", 1)),
                "group": lambda: pipeline.group_coordinator,
                "transactions": lambda: pipeline.transaction_coordinator,
            }[victim]()
            pipeline.cluster.kill_broker(broker_id)
            await asyncio.sleep(5)
            await pipeline.cluster.start_broker(broker_id)
        await pipeline.all_done()
        assert not pipeline.ended

    with_pipeline(program, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_processor_starts_again_with_its_transactional_id(seed: int) -> None:
    async def program(pipeline: Pipeline) -> None:
        await pipeline.send(60, 0)
        for number in range(1, 5):
            world = pipeline.start(f"processor-{number}", "billing-1", slowly)
            await until_results(pipeline, 8 * number)
            await asyncio.sleep(world.random.random() * 0.2)
            world.process.kill()
        pipeline.start("processor-5", "billing-1", slowly)
        await pipeline.all_done()

    with_pipeline(program, seed=seed)


@run_by(with_pipeline)
async def test_a_twin_fences_the_earlier_processor(pipeline: Pipeline, /) -> None:
    await pipeline.send(60, 0)
    await pipeline.send(60, 1)
    pipeline.start("processor", "billing-1", slowly)
    await until_results(pipeline, 10)
    pipeline.start("twin", "billing-1", slowly)
    await pipeline.all_done()
    assert [type(error) for error in pipeline.ended] == [ProducerFenced]


@pytest.mark.parametrize("seed", range(3))
def test_a_zombie_wakes_up_after_another_member_took_its_partitions(seed: int) -> None:
    async def program(pipeline: Pipeline) -> None:
        await pipeline.send(60, 0)
        await pipeline.send(60, 1)
        zombie = pipeline.start("zombie", "billing-1", slowly)
        await until_results(pipeline, 10)
        zombie.process.pause()
        pipeline.start("processor", "billing-2", slowly)
        await until_results(pipeline, 60)
        zombie.process.resume()
        await pipeline.all_done()
        assert not pipeline.ended

    with_pipeline(program, seed=seed)


@run_by(with_pipeline)
async def test_members_come_and_go(pipeline: Pipeline, /) -> None:
    await pipeline.send(60, 0)
    await pipeline.send(60, 1)
    pipeline.start("processor-1", "billing-1", slowly)
    await until_results(pipeline, 10)
    second = pipeline.start("processor-2", "billing-2", slowly)
    await until_results(pipeline, 50)
    second.process.kill()
    await until_results(pipeline, 70)
    pipeline.start("processor-3", "billing-3", slowly)
    await pipeline.all_done()


@pytest.mark.parametrize("seed", range(4))
def test_a_processor_cut_off_from_the_coordinator_finds_out_what_became_of_its_commit(seed: int) -> None:
    """The cuts outlast its patience, and some the time-out of the transaction."""

    async def program(pipeline: Pipeline) -> None:
        await pipeline.send(60, 0)
        await pipeline.send(60, 1)
        world = pipeline.start("processor", "billing-1", slowly)
        network = pipeline.cluster.simulation.network
        for round_number in range(1, 4):
            await until_results(pipeline, 20 * round_number)
            await pipeline.until_committing("processor")
            broker = host_name(pipeline.transaction_coordinator)
            one_way, other_way = ("processor", broker), (broker, "processor")
            cuts = [one_way, other_way] if world.random.random() < 0.5 else [other_way]  # answers alone may be lost
            for cut in cuts:
                network.block(*cut)
            await asyncio.sleep(world.random.choice([5, 15, 30]))
            for cut in cuts:
                network.unblock(*cut)
        await pipeline.all_done()
        assert not pipeline.ended

    with_pipeline(program, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_all_kinds_follow_each_other(seed: int) -> None:
    with_pipeline(faults_of_all_kinds, seed=seed)


async def faults_of_all_kinds(pipeline: Pipeline) -> None:
    """Two processors, through faults in a random order. Ids stay; processes come and go."""
    await pipeline.send(100, 0)
    await pipeline.send(100, 1)
    hosts = {name: name for name in ("one", "two")}
    worlds = {name: pipeline.start(name, name, slowly) for name in hosts}
    cluster, draw = pipeline.cluster, worlds["one"].random
    zombies = []
    for number in range(8):
        await until_results(pipeline, 10 * (number + 1))
        name = draw.choice(["one", "two"])
        event = draw.choice(["broker", "broker", "kill", "pause", "cut", "twin"])
        match event:
            case "broker":
                broker_id = draw.choice([pipeline.leader(INPUTS[0]), pipeline.transaction_coordinator])
                cluster.kill_broker(broker_id)
                await asyncio.sleep(draw.uniform(0, 8))
                await cluster.start_broker(broker_id)
            case "kill":
                worlds[name].process.kill()
            case "pause":
                worlds[name].process.pause()
                await asyncio.sleep(draw.uniform(0, 15))
                worlds[name].process.resume()
            case "cut":
                one, other = hosts[name], host_name(draw.choice(cluster.living()))
                cluster.simulation.network.block(other, one)
                await asyncio.sleep(draw.uniform(0, 20))
                cluster.simulation.network.unblock(other, one)
            case "twin":
                zombies.append(worlds[name])
                worlds[name].process.pause()
        if event in ("kill", "twin"):
            hosts[name] = f"{name}-{number}"
            worlds[name] = pipeline.start(hosts[name], name, slowly)
    for zombie in zombies:
        if zombie.process.alive:
            zombie.process.resume()
    await pipeline.all_done()
    unexpected = [error for error in pipeline.ended if not isinstance(error, (ProducerFenced, ProcessKilled))]
    assert not unexpected, unexpected
