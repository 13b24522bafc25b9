"""Answers of a controller about topics that it does not know, or that an earlier controller created."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.cluster.connections import Purpose
from minibroker.client.settings import Address
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import CREATE_TOPICS, DELETE_TOPICS, Api
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.world import Create, Operation
from tests.running import run_by
from tests.simulation.scenarios.control.test_forwarding import connect, creation, until_controller
from tests.simulation.scenarios.helpers import with_client


class AdminOfSeveralBrokers(Admin):
    """An Admin for which the test chooses the broker of each attempt."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ways: list[int] = []
        self._admin_requests.to_controller = self._on_its_way  # type: ignore[method-assign]

    async def _on_its_way(self, api: Api[Any, Any]) -> Connection:
        broker = self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]
        return await self._runtime.connections.open(Address(host_name(broker), PORT), Purpose.REQUESTS)


def on_broker(broker_id: int) -> m.CreateTopicsRequest:
    topic = m.CreatableTopic("orders", assignments=[m.CreatableAssignment(0, [broker_id])])
    return m.CreateTopicsRequest([topic], 5_000)


async def two_controllers(cluster: VirtualCluster) -> tuple[int, int]:
    """Return the deposed controller, which does not know that it is deposed, and its successor."""
    zookeeper = cluster.simulation.zookeeper
    old = await until_controller(cluster)
    zookeeper.lag(host_name(old), 20.0)
    zookeeper.lose_connections(host_name(old))
    await cluster.until(lambda: zookeeper.stale_sessions(host_name(old)))
    zookeeper.remove(znodes.CONTROLLER)  # an administrator triggers an election, as is usual with Kafka
    await cluster.until(lambda: len(cluster.active_controllers()) == 2)
    [new] = (b for b in cluster.active_controllers() if b != old)
    await cluster.until(lambda: cluster.broker(old)._metadata.controller_id == new)
    return old, new


@run_by(with_client)
async def test_a_topic_reported_as_deleted_is_deleted(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    old, new = await two_controllers(cluster)
    created = await (await connect(world, new)).request(CREATE_TOPICS, on_broker(new))
    assert [topic.error_code for topic in created.topics] == [0]
    async with AdminOfSeveralBrokers(cluster.bootstrap, world=world) as admin:
        admin.ways = [new, old, new]
        await admin.delete_topic("orders")  # returns once it is deleted
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.topic_path("orders")), within_s=5)


@run_by(with_client)
async def test_a_created_topic_is_not_reported_as_unknown(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    old, new = await two_controllers(cluster)
    created = await (await connect(world, new)).request(CREATE_TOPICS, on_broker(new))
    assert [topic.error_code for topic in created.topics] == [0]
    request = m.DeleteTopicsRequest(["orders"], 5_000, [created.topics[0].topic_id])
    with pytest.raises(BrokerError) as raised:
        await (await connect(world, old)).request(DELETE_TOPICS, request)
    assert raised.value.code in (ErrorCode.NOT_CONTROLLER, ErrorCode.REQUEST_TIMED_OUT)


@run_by(with_client)
async def test_a_retry_does_not_bring_back_a_topic_that_the_same_broker_created_before(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    controller = await until_controller(cluster)
    zookeeper = cluster.simulation.zookeeper
    others = [host_name(b) for b in cluster.broker_ids if b != controller]

    def after(session: Any, operations: Sequence[Operation]) -> None:
        if any(isinstance(o, Create) and o.path == znodes.topic_path("orders") for o in operations):
            zookeeper.after = None
            for other in others:
                zookeeper.cut(other)  # so that the same broker is elected again
            zookeeper.expire(host_name(controller))

    zookeeper.after = after
    request = creation("orders")
    request.topics[0].nonce = b"repeat"
    request.controller_epoch = cluster.broker(controller)._metadata.controller_epoch
    connection = await connect(world, controller)
    with pytest.raises(BrokerError) as raised:
        await connection.request(CREATE_TOPICS, request)
    assert raised.value.code is ErrorCode.NOT_CONTROLLER
    await cluster.until(lambda: cluster.active_controllers() == [controller])
    for other in others:
        zookeeper.uncut(other)
    assert await until_controller(cluster) == controller
    await asyncio.sleep(2)
    async with Admin(cluster.bootstrap, world=world) as admin:
        assert await admin.list_topics() == ["orders"]
        await admin.delete_topic("orders")
        await cluster.until(lambda: not zookeeper.has(znodes.topic_path("orders")))
        request.controller_epoch = cluster.broker(controller)._metadata.controller_epoch
        again = await (await connect(world, controller)).request(CREATE_TOPICS, request)
        assert not zookeeper.has(znodes.topic_path("orders")), again


@pytest.mark.parametrize("name", ["__consumer.offsets", "__transaction.state"])
@run_by(with_client)
async def test_a_client_cannot_create_a_name_that_collides_with_an_internal_topic(
    cluster: VirtualCluster, world: VirtualWorld, /, name: str
) -> None:
    await until_controller(cluster)
    async with Admin(cluster.bootstrap, world=world) as admin:
        with pytest.raises(BrokerError, match="the brokers' own") as raised:
            await admin.create_topic(name, partitions=1, replication_factor=3)
    assert raised.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
