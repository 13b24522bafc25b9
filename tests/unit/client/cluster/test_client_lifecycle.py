"""Producer, Consumer and Admin are started once, used while they run, and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, Closed
from minibroker.client.producer import Producer
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.scripted_broker import HANG, ScriptedCluster
from tests.waiting import until

AnyClient = Producer | Consumer | Admin


def producer(bootstrap: str) -> Producer:
    return Producer(bootstrap)


def consumer(bootstrap: str) -> Consumer:
    return Consumer(bootstrap, topics=["orders"])


def admin(bootstrap: str) -> Admin:
    return Admin(bootstrap)


async def use(client: AnyClient) -> None:
    if isinstance(client, Producer):
        await client.flush()
    elif isinstance(client, Consumer):
        await client.position(TopicPartition("orders", 0))
    else:
        await client.list_topics()


every_client = pytest.mark.parametrize("make", [producer, consumer, admin])
Make = Callable[[str], AnyClient]


def run(scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), ScriptedCluster(1) as cluster:
            cluster.add_topic("orders", 1)
            await scenario(cluster)

    asyncio.run(main())


@every_client
@run_by(run)
async def test_a_client_says_in_which_state_it_is_where_it_cannot_be_used(
    cluster: ScriptedCluster, /, make: Make
) -> None:
    client = make(cluster.bootstrap)
    with pytest.raises(Closed, match=f"is not started: use it within `async with {type(client).__name__}"):
        await use(client)
    async with client:
        await use(client)
    with pytest.raises(Closed, match="is closed: by `close`, of another task or thread perhaps"):
        await use(client)
    await client.close()


@every_client
@run_by(run)
async def test_a_client_is_started_once(cluster: ScriptedCluster, /, make: Make) -> None:
    async with make(cluster.bootstrap) as client:
        with pytest.raises(Closed, match="was started before and is running; make a new one"):
            await client.start()
        await use(client)
    with pytest.raises(Closed, match="was started before and is closed; make a new one"):
        await client.start()


@pytest.mark.usefixtures("short_patience")
@pytest.mark.slow
@every_client
@run_by(run)
async def test_a_client_that_reaches_no_broker_is_closed(cluster: ScriptedCluster, /, make: Make) -> None:
    await cluster.nodes[0].stop()
    client = make(cluster.bootstrap)
    with pytest.raises(NetworkError):
        await client.start()
    assert " closed, " in repr(client)


@every_client
@run_by(run)
async def test_a_client_that_is_closed_while_it_starts_does_not_start(cluster: ScriptedCluster, /, make: Make) -> None:
    cluster.rules.append(lambda received: HANG)
    client = make(cluster.bootstrap)
    starting = asyncio.create_task(client.start())
    await cluster.until(lambda: bool(cluster.received))
    async with asyncio.timeout(30):
        await client.close()
        with pytest.raises(Closed):
            await starting
    assert " closed, " in repr(client)


@every_client
@run_by(run)
async def test_a_client_whose_closing_is_cancelled_leaves_no_connection(
    cluster: ScriptedCluster, /, make: Make
) -> None:
    for steps in range(1, 9):
        client = make(cluster.bootstrap)
        await client.start()
        await use(client)
        closing = asyncio.create_task(client.close())
        for _ in range(steps):  # passes of the loop: cancelled at each point of the way
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        slots = list(client._runtime.connections._slots.values())
        await until(lambda slots=slots: all(slot.connection is None or slot.connection.closed for slot in slots), 5)  # type: ignore[misc]


@every_client
@run_by(run)
async def test_a_bug_in_a_task_is_named_by_whatever_is_called_next(cluster: ScriptedCluster, /, make: Make) -> None:
    client = make(cluster.bootstrap)
    await client.start()
    await _crash(client)
    with pytest.raises(ClientCrashed, match="stopped because of a bug: .*planted") as caught:
        await use(client)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert " crashed, " in repr(client)
    if isinstance(client, Producer):
        with pytest.raises(ClientCrashed):
            await client.close()
    else:
        await client.close()


@every_client
@run_by(run)
async def test_a_client_whose_task_dies_while_it_starts_does_not_start(cluster: ScriptedCluster, /, make: Make) -> None:
    client = make(cluster.bootstrap)
    reach = client._reach

    async def reach_and_crash() -> None:
        await reach()
        await _crash(client)

    client._reach = reach_and_crash  # type: ignore[method-assign]
    with pytest.raises(ClientCrashed, match="planted"):
        await client.start()
    assert " closed, " in repr(client)


async def _crash(client: AnyClient) -> None:
    async def broken() -> None:
        raise ZeroDivisionError("planted")

    await asyncio.wait([client._runtime.tasks.start(broken(), "broken")])
