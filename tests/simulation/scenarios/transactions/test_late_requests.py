"""Requests that arrive when their transaction has ended, and producers that come back after they were replaced."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.simulation.scenarios.transactions.transaction_support import GROUP, P, Q, Scenario, run_scenario
from tests.simulation.storms.clients.transacting.kafka_transactions import (
    OLDER,
    RAISING,
    Abortable,
    Fenced,
    TransactionVersions,
)

ALL = [*OLDER, *RAISING]


@pytest.mark.parametrize("commits", [True, False])
def test_a_late_end_of_a_transaction_does_not_end_the_next_one(commits: bool) -> None:
    """KAFKA-17754."""

    async def scenario(s: Scenario) -> None:
        async with s.client() as producer:
            await producer.initialize()
            await producer.append(P, [b"first"])
            late = producer.copied()
            await (producer.commit() if commits else producer.abort())
            await producer.append(P, [b"second"])
            async with late:
                with pytest.raises((Abortable, Fenced)):
                    await (late.commit() if commits else late.abort())
            await producer.append(Q, [b"third"])
            await (producer.abort() if commits else producer.commit())
            assert await s.is_stable()
            assert await s.visible() == ({P: [b"first"], Q: []} if commits else {P: [b"second"], Q: [b"third"]})

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_a_late_batch_of_an_ended_transaction_leaves_nothing_hanging(versions: TransactionVersions) -> None:
    """KAFKA-14402: without an ongoing transaction, nothing would ever end what the batch begins."""

    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as producer:
            await producer.initialize()
            await producer.append(P, [b"first"])
            late = producer.copied()
            await producer.commit()
            assert await s.is_stable()
            async with late:
                with pytest.raises(Abortable):
                    await late.append(P, [b"late"])
            assert await s.is_stable()
            assert await s.visible() == {P: [b"first"], Q: []}

    run_scenario(scenario)


def test_late_group_offsets_of_an_ended_transaction_are_not_committed() -> None:
    async def scenario(s: Scenario) -> None:
        async with s.client() as producer:
            await producer.initialize()
            late = producer.copied()
            await producer.send_offsets(GROUP, {P: 5})
            await producer.commit()
            await producer.send_offsets(GROUP, {P: 7})
            async with late:
                with pytest.raises(Abortable):
                    await late.send_offsets(GROUP, {P: 3})
            await producer.commit()
            assert await producer.committed(GROUP, [P]) == {P: 7}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
@pytest.mark.parametrize("commits", [True, False])
def test_a_zombie_does_not_end_the_transaction_of_its_successor(versions: TransactionVersions, commits: bool) -> None:
    """KAFKA-9600."""

    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as zombie, s.client(versions) as successor:
            await zombie.initialize()
            await zombie.append(P, [b"zombie's"])
            await successor.initialize()
            await successor.append(P, [b"successor's"])
            with pytest.raises((Abortable, Fenced)):
                await (zombie.commit() if commits else zombie.abort())
            await (successor.abort() if commits else successor.commit())
            assert await s.is_stable()
            assert await s.visible() == {P: [] if commits else [b"successor's"], Q: []}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_a_zombie_begins_no_transaction_after_its_successor_came(versions: TransactionVersions) -> None:
    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as zombie, s.client(versions) as successor:
            await zombie.initialize()
            await zombie.append(P, [b"before"])
            await zombie.commit()
            await successor.initialize()
            with pytest.raises(Abortable):
                await zombie.append(P, [b"zombie's"])
            with pytest.raises(Fenced):
                await zombie.abort()
            assert await s.is_stable()
            assert await s.visible() == {P: [b"before"], Q: []}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_a_transaction_that_took_too_long_is_aborted_as_a_whole(versions: TransactionVersions) -> None:
    """KAFKA-6119: its producer does not know, and sends and commits the rest."""

    async def scenario(s: Scenario) -> None:
        async with s.client(versions, timeout_ms=1_000) as producer:
            await producer.initialize()
            await producer.append(P, [b"before"])
            await asyncio.sleep(5)
            assert await s.is_stable()
            with suppress(Abortable):
                await producer.append(Q, [b"after"])
            with pytest.raises(Abortable):
                await producer.commit()
            await producer.abort()
            assert await s.is_stable()
            assert await s.visible() == {P: [], Q: []}
            await producer.append(P, [b"again"])
            await producer.commit()
            assert await s.is_stable()
            assert await s.visible() == {P: [b"again"], Q: []}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_group_offsets_and_records_are_committed_together_or_not_at_all(versions: TransactionVersions) -> None:
    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as producer:
            await producer.initialize()
            await producer.append(P, [b"aborted"])
            await producer.send_offsets(GROUP, {P: 1})
            await producer.abort()
            assert await producer.committed(GROUP, [P]) == {P: -1}
            await producer.append(P, [b"committed"])
            await producer.send_offsets(GROUP, {P: 2})
            await producer.commit()
            assert await producer.committed(GROUP, [P]) == {P: 2}
            assert await s.is_stable()
            assert await s.visible() == {P: [b"committed"], Q: []}

    run_scenario(scenario)
