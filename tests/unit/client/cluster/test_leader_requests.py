from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import pytest

from minibroker.client.cluster.connections import OVERDUE_S, Purpose
from minibroker.client.cluster.leader_requests import LeaderRequest, LeaderRequests
from minibroker.client.cluster.metadata import Leader
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.protocol import messages as m
from minibroker.protocol.apis import LIST_OFFSETS
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.scripted_broker import DROP, HANG, ScriptedCluster

ORDERS_0 = TopicPartition("orders", 0)
Requests = LeaderRequests[TopicPartition, m.ListOffsetsResponse]


class Desk:
    """LeaderRequests without a sender or fetcher above it, and a clock that the test sets."""

    def __init__(self, scripted: ScriptedCluster, runtime: ClientRuntime) -> None:
        self.scripted = scripted
        self.runtime = runtime
        self.requests: Requests = LeaderRequests(
            runtime, LIST_OFFSETS, Purpose.REQUESTS, partition_of=lambda partition: partition
        )
        self.ended: list[tuple[LeaderRequest[TopicPartition], asyncio.Future[m.ListOffsetsResponse]]] = []
        """The requests that ended during the steps."""
        self.now = runtime.clock.monotonic()

    def step(self, now: float) -> float:
        self.ended += self.requests.ended()
        return inf

    async def connected(self, node_id: int) -> Connection:
        while True:
            connection, _ = self.requests.connection(node_id, self.now)
            if connection is not None:
                return connection
            await asyncio.sleep(0.005)

    async def ask(self, node_id: int = 0) -> Connection:
        connection = await self.connected(node_id)
        partition = m.ListOffsetsPartition(0, -1, m.LATEST_TIMESTAMP)
        request = m.ListOffsetsRequest(-1, 0, [m.ListOffsetsTopic("orders", [partition])])
        self.requests.send(node_id, connection, request, [ORDERS_0], 30.0, self.now)
        return connection


def run(scenario: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        def crashed(error: BaseException) -> None:
            raise error

        async with asyncio.timeout(20), ScriptedCluster(2) as scripted:
            scripted.add_topic("orders")
            runtime = ClientRuntime(
                scripted.bootstrap,
                client_id="test",
                request_timeout_ms=5_000,
                retry_backoff_ms=10,
                metadata_max_age_ms=300_000,
                world=None,
                on_crash=crashed,
            )
            try:
                runtime.metadata.want("orders")
                await runtime.start()
                await scenario(Desk(scripted, runtime))
            finally:
                await runtime.close()

    asyncio.run(main())


@run_by(run)
async def test_a_broker_that_wants_a_pause_is_not_asked_before_it_is_over(desk: Desk, /) -> None:
    connection = await desk.connected(0)
    desk.requests.mute(0, 0, desk.now)
    assert desk.requests.connection(0, desk.now) == (connection, inf)
    desk.requests.mute(0, 100, desk.now)
    assert desk.requests.connection(0, desk.now) == (None, desk.now + 0.1)
    assert desk.requests.connection(0, desk.now + 0.1) == (connection, inf)


@run_by(run)
async def test_what_has_ended_is_told_once_and_is_under_way_no_more(desk: Desk, /) -> None:
    desk.runtime.tasks.start(desk.requests.run(desk.step), "steps")
    await desk.ask()
    await desk.ask()
    assert desk.requests.count(0) == 2
    assert desk.requests.count(1) == 0
    while len(desk.ended) < 2:
        await asyncio.sleep(0.005)
    assert desk.requests.ended() == []
    assert desk.requests.count(0) == 0
    for request, answer in desk.ended:
        assert (request.node_id, request.parts) == (0, [ORDERS_0])
        assert desk.requests.failure(request, answer) is None
        assert answer.result().topics[0].partitions[0].error_code == ErrorCode.NONE


@run_by(run)
async def test_a_request_whose_connection_broke_says_so(desk: Desk, /) -> None:
    desk.scripted.script(LIST_OFFSETS, DROP)
    connection = await desk.ask()
    await connection.wait_closed()
    ((request, answer),) = desk.requests.ended()
    failure = desk.requests.failure(request, answer)
    assert failure is not None
    assert failure[0] is ErrorCode.NETWORK_EXCEPTION
    assert str(connection.address) in failure[1]


@run_by(run)
async def test_a_bug_is_no_answer_of_a_brokers(desk: Desk, /) -> None:
    desk.scripted.script(LIST_OFFSETS, HANG)
    await desk.ask()
    answer: asyncio.Future[m.ListOffsetsResponse] = asyncio.get_running_loop().create_future()
    answer.set_exception(ZeroDivisionError("planted"))
    ((request,),) = desk.requests._under_way.values()
    with pytest.raises(ZeroDivisionError, match="planted"):
        desk.requests.failure(request, answer)


@run_by(run)
async def test_an_overdue_answer_costs_the_connection_only_once_another_broker_leads(desk: Desk, /) -> None:
    desk.scripted.script(LIST_OFFSETS, HANG)
    connection = await desk.ask()
    due = desk.now + OVERDUE_S
    assert desk.requests.look_for_overdue(desk.now) == due
    assert list(desk.requests.overdue(due - 0.01)) == []
    assert [request.parts for request in desk.requests.overdue(due)] == [[ORDERS_0]]
    assert desk.requests.look_for_overdue(due) == due + OVERDUE_S
    assert connection.closed_because is None
    desk.runtime.metadata.learn_leader(ORDERS_0, Leader(1, 9))
    desk.requests.look_for_overdue(due)
    assert "no answer within 1.0 s, and broker 1 leads orders-0" in str(connection.closed_because)


@run_by(run)
async def test_a_hint_at_another_leader_is_news_at_once(desk: Desk, /) -> None:
    desk.requests.take_news()
    hint = m.ProducePartitionResponse(0, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    hint.current_leader_id, hint.current_leader_epoch = 1, 9
    desk.requests.leader_moved(ORDERS_0, hint, "")
    assert desk.runtime.metadata.cluster.leader("orders", 0) == Leader(1, 9)
    assert desk.requests.take_news()
    assert not desk.requests.take_news()
