"""What read_committed consumers and the next transaction of a group see."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.deploy.simulator.kafka_clients import READ_COMMITTED, KafkaConsumer
from tests.simulation.scenarios.transactions.transaction_support import GROUP, P, Q, Scenario, run_scenario
from tests.simulation.storms.clients.transacting.kafka_transactions import OLDER, RAISING, TransactionVersions

ALL = [*OLDER, *RAISING]


@pytest.mark.parametrize("versions", ALL)
def test_a_consumer_that_waits_for_the_end_of_a_transaction_gets_nothing_of_an_aborted_one(
    versions: TransactionVersions,
) -> None:
    """KAFKA-5376."""

    async def scenario(s: Scenario) -> None:
        consumer = KafkaConsumer(
            s.cluster.bootstrap,
            partitions=[P],
            versions=versions.data,
            world=s.world,
            isolation_level=READ_COMMITTED,
            fetch_max_wait_ms=4_000,
        )
        async with s.client(versions) as producer, consumer:
            await producer.initialize()
            await producer.append(P, [b"aborted"])
            await consumer.poll()
            polling = asyncio.create_task(consumer.poll())
            await asyncio.sleep(1)
            assert not polling.done()
            await producer.abort()
            assert await polling == []
            await producer.append(P, [b"committed"])
            await producer.commit()
            async with asyncio.timeout(10):
                while not (batches := await consumer.poll()):
                    pass
            assert [value for batch in batches for value in batch.values] == [b"committed"]

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_group_offsets_are_read_once_the_transaction_that_commits_them_is_decided(
    versions: TransactionVersions,
) -> None:
    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as producer, s.client(versions, transactional_id="other") as other:
            await producer.initialize()
            await producer.append(P, [b"x"])
            await producer.send_offsets(GROUP, {P: 1})
            looking = asyncio.create_task(other.committed(GROUP, [P]))
            await asyncio.sleep(1)
            assert not looking.done()
            await producer.commit()
            assert await looking == {P: 1}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_a_successor_aborts_the_transaction_that_its_predecessor_has_left_open(versions: TransactionVersions) -> None:
    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as first:
            await first.initialize()
            await first.append(P, [b"left"])
            await first.send_offsets(GROUP, {P: 7})
        async with s.client(versions) as successor:
            await successor.initialize()
            assert await s.is_stable()
            await successor.append(Q, [b"new"])
            await successor.commit()
            assert await s.is_stable()
            assert await s.visible() == {P: [], Q: [b"new"]}
            assert await successor.committed(GROUP, [P]) == {P: -1}

    run_scenario(scenario)
