"""Outcomes of transactions outlive their coordinators, and reach each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minibroker.deploy.simulator.cluster import host_name
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.model import NO_LEADER, TRANSACTIONS_TOPIC, TopicPartition
from tests.simulation.scenarios.transactions.transaction_support import GROUP, P, Q, Scenario, run_scenario
from tests.simulation.storms.clients.transacting.kafka_transactions import OLDER, RAISING, TransactionVersions

ALL = [*OLDER, *RAISING]
STATE = TopicPartition(TRANSACTIONS_TOPIC, 0)


def _others(s: Scenario, node: int) -> list[int]:
    return [broker_id for broker_id in s.cluster.broker_ids if broker_id != node]


async def _led_by_another(s: Scenario, partition: TopicPartition, node: int) -> None:
    await s.cluster.until(lambda: s.cluster.state(partition).leader not in (node, NO_LEADER))


@pytest.mark.parametrize("versions", ALL)
def test_a_commit_that_was_answered_outlives_its_coordinator(versions: TransactionVersions) -> None:
    """The coordinator cannot reach its followers, and dies."""

    async def scenario(s: Scenario) -> None:
        network = s.cluster.simulation.network
        async with s.client(versions) as producer:
            await producer.initialize()
            await producer.append(P, [b"x"])
            await producer.append(Q, [b"y"])
            coordinator = s.cluster.state(STATE).leader
            for other in _others(s, coordinator):
                network.block(host_name(other), host_name(coordinator))
            committing = asyncio.create_task(producer.commit())
            await asyncio.sleep(0.2)
            was_answered = committing.done()
            s.cluster.kill_broker(coordinator)
            network.heal()
            await _led_by_another(s, STATE, coordinator)
            await s.cluster.start_broker(coordinator)
            await committing
            assert await s.is_stable()
            assert await s.visible() == {P: [b"x"], Q: [b"y"]}
            assert not was_answered

    run_scenario(scenario)


def test_a_decision_that_could_not_be_written_is_made_again() -> None:
    """KAFKA-6683: its partition has too few replicas for a while."""

    async def scenario(s: Scenario) -> None:
        async with s.client() as producer:
            await producer.initialize()
            await producer.append(P, [b"x"])
            coordinator = s.cluster.state(STATE).leader
            for other in _others(s, coordinator):
                s.cluster.kill_broker(other)
            await s.cluster.until(lambda: s.cluster.state(STATE).isr == (coordinator,))
            committing = asyncio.create_task(producer.commit())
            await asyncio.sleep(3)
            assert not committing.done()
            for other in _others(s, coordinator):
                await s.cluster.start_broker(other)
            await committing
            assert await s.is_stable()
            assert await s.visible() == {P: [b"x"], Q: []}

    run_scenario(scenario)


Send = Callable[[], Awaitable[Any]]


def _watch_markers(s: Scenario, send: Callable[[Send, int, Any], Awaitable[Any]]) -> None:
    """Let `send` send each request of markers of the present coordinator: it gets the usual way to send it, the broker,
    and the request."""
    coordination = s.cluster.broker(s.cluster.state(STATE).leader)._transactions
    assert coordination is not None
    usual = coordination._peers.request

    async def request(broker_id: int, api: Any, body: Any, **rest: Any) -> Any:
        return await send(lambda: usual(broker_id, api, body, **rest), broker_id, body)

    coordination._peers.request = request  # type: ignore


@pytest.mark.parametrize("versions", ALL)
@pytest.mark.parametrize("commits", [True, False])
def test_a_new_coordinator_tells_the_partitions_what_the_last_one_has_decided(
    versions: TransactionVersions, commits: bool
) -> None:
    async def scenario(s: Scenario) -> None:
        async with s.client(versions) as producer:
            await producer.initialize()
            await producer.append(P, [b"x"])
            await producer.send_offsets(GROUP, {P: 1})
            coordinator = s.cluster.state(STATE).leader

            async def kill(send: Send, broker_id: int, body: Any) -> Any:
                s.cluster.kill_broker(coordinator)
                raise NetworkError("the markers are lost")

            _watch_markers(s, kill)
            await (producer.commit() if commits else producer.abort())
            await _led_by_another(s, STATE, coordinator)
            assert await s.is_stable()
            assert await s.visible() == {P: [b"x"] if commits else [], Q: []}
            assert await producer.committed(GROUP, [P]) == {P: 1 if commits else -1}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
def test_the_next_transaction_waits_until_all_partitions_know_the_outcome(versions: TransactionVersions) -> None:
    async def scenario(s: Scenario) -> None:
        is_lost = True
        async with s.client(versions) as producer:
            await producer.initialize()

            async def lose(send: Send, broker_id: int, body: Any) -> Any:
                if is_lost:
                    raise NetworkError("the markers are lost")
                return await send()

            _watch_markers(s, lose)
            await producer.append(P, [b"x"])
            await producer.commit()
            appending = asyncio.create_task(producer.append(P, [b"y"]))
            await asyncio.sleep(2)
            assert not appending.done()
            is_lost = False
            await appending
            await producer.abort()
            assert await s.is_stable()
            assert await s.visible() == {P: [b"x"], Q: []}

    run_scenario(scenario)


@pytest.mark.parametrize("versions", ALL)
@pytest.mark.parametrize("is_next_open", [True, False])
def test_a_marker_that_arrives_late_does_not_end_the_next_transaction(
    versions: TransactionVersions, is_next_open: bool
) -> None:
    """The coordinator has sent it twice, as the first connection was slow and then broke."""

    async def scenario(s: Scenario) -> None:
        sent: list[Send] = []

        async def note(send: Send, broker_id: int, body: Any) -> Any:
            sent.append(send)
            return await send()

        async with s.client(versions) as producer:
            await producer.initialize()
            _watch_markers(s, note)
            await producer.append(P, [b"x"])
            await producer.commit()
            assert await s.is_stable()
            [again] = sent
            if is_next_open:
                await producer.append(P, [b"y"])
            await again()
            await producer.append(Q, [b"z"])
            await producer.abort()
            assert await s.is_stable()
            assert await s.visible() == {P: [b"x"], Q: []}

    run_scenario(scenario)
