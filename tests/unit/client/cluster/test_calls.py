"""Waiting calls end with their client, and only with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, Closed
from minibroker.protocol.apis import DELETE_GROUPS, METADATA, OFFSET_COMMIT, OFFSET_FETCH
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.administering.administered_groups import GroupCluster
from tests.unit.client.scripted_broker import DROP, HANG

P0, OTHER = TopicPartition("orders", 0), TopicPartition("other", 0)


def run(scenario: Callable[[GroupCluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        cluster = GroupCluster(3)
        async with asyncio.timeout(30), cluster:
            cluster.add_topic("orders", 2)
            await scenario(cluster)

    asyncio.run(main())


async def begun(call: Awaitable[object], cluster: GroupCluster, api: Any) -> asyncio.Future[object]:
    """Start the call; return its task once it has sent a request and waits."""

    def asked() -> int:
        return sum(received.api is api for received in cluster.received)

    before = asked()
    task = asyncio.ensure_future(call)
    while asked() == before:
        assert not task.done(), task
        await asyncio.sleep(0.005)
    return task


@run_by(run)
async def test_a_change_that_waits_is_over_with_its_client_and_not_tried_again(cluster: GroupCluster, /) -> None:
    cluster.script(DELETE_GROUPS, DROP, *[HANG] * 5)
    async with Admin(cluster.bootstrap, retry_backoff_ms=10) as admin:
        deleting = await begun(admin.delete_groups(["billing"]), cluster, DELETE_GROUPS)
    asked = len(cluster.received)
    with pytest.raises(Closed, match="the admin client is closed"):
        await deleting
    await asyncio.sleep(0.1)  # far longer than the back-off
    assert len(cluster.received) == asked


@run_by(run)
async def test_a_commit_and_a_question_for_a_topic_that_is_not_known_are_over_with_their_consumer(
    cluster: GroupCluster, /
) -> None:
    cluster.script(OFFSET_COMMIT, *[HANG] * 5)
    cluster.script(OFFSET_FETCH, *[HANG] * 5)
    consumer = Consumer(cluster.bootstrap, group="billing", partitions=[P0], retry_backoff_ms=10)
    await consumer.start()
    committing = await begun(consumer.commit({P0: 1}), cluster, OFFSET_COMMIT)
    cluster.script(METADATA, *[HANG] * 20)
    asking = asyncio.ensure_future(consumer.committed(OTHER))
    await asyncio.sleep(0)
    await consumer.close(timeout_ms=10)
    for call in (committing, asking):
        with pytest.raises(Closed):
            await call


@run_by(run)
async def test_a_cancelled_call_whose_client_crashes_raises_the_crash(cluster: GroupCluster, /) -> None:
    cluster.script(DELETE_GROUPS, *[HANG] * 5)
    admin = Admin(cluster.bootstrap)
    await admin.start()
    cancelled = await begun(admin.delete_groups(["billing"]), cluster, DELETE_GROUPS)
    crashed = await begun(admin.delete_groups(["billing"]), cluster, DELETE_GROUPS)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    admin._crashed(ZeroDivisionError("a bug"))
    with pytest.raises(ClientCrashed, match="a bug"):
        await crashed
    await admin.close()


@run_by(run)
async def test_a_cancellation_that_comes_with_the_end_of_the_client_is_no_less_one(cluster: GroupCluster, /) -> None:
    cluster.script(DELETE_GROUPS, *[HANG] * 5)
    async with Admin(cluster.bootstrap) as admin:
        call = await begun(admin.delete_groups(["billing"]), cluster, DELETE_GROUPS)
        call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


@run_by(run)
async def test_a_call_that_closes_its_own_client_goes_on(cluster: GroupCluster, /) -> None:
    admin = Admin(cluster.bootstrap)
    await admin.start()
    async with admin._calls.begin(admin._not_running):
        await admin.close()
