"""One broker of a virtual cluster loses its ZooKeeper, disk or tasks: which requests it serves, and how it stops."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.broker.broker import Broker
from minibroker.broker.metrics.disk_times import TimedWorld
from minibroker.client.admin import Admin
from minibroker.deploy.simulator.cluster import LOG_DIR, PORT, VirtualCluster
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.apis import CREATE_TOPICS, INIT_PRODUCER_ID, METADATA
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.running import run_by
from tests.simulation.scenarios.helpers import session_of

HANDLERS = 8
"""The broker's num.io.threads."""


async def one_broker(brokers: int = 1) -> VirtualCluster:
    cluster = VirtualCluster(Simulation(), brokers=brokers)
    await cluster.start()
    return cluster


async def connect(world: VirtualWorld) -> Connection:
    return await open_connection(world.network, "broker-0", PORT, client_id="test", timeout_s=1)


@pytest.mark.parametrize("api", ["InitProducerId", "CreateTopics"])
@run_by(on_virtual_loop)
async def test_requests_that_wait_for_zookeeper_do_not_keep_others_waiting(api: str) -> None:
    cluster = await one_broker()
    world = cluster.client("client")

    async def program() -> None:
        await asyncio.sleep(1)
        session_of(cluster, 0).suspend()
        waiting: list[asyncio.Future[object]] = []
        connections = [await connect(world) for _ in range(HANDLERS + 1)]
        for connection in connections[:HANDLERS]:
            if api == "InitProducerId":
                waiting.append(connection.send(INIT_PRODUCER_ID, m.InitProducerIdRequest(None)))  # type: ignore[arg-type]
            else:
                topic = m.CreatableTopic("orders", 1, 1, [], [])
                body = m.CreateTopicsRequest([topic], 5_000, False)
                waiting.append(connection.send(CREATE_TOPICS, body))  # type: ignore[arg-type]
        async with asyncio.timeout(0.5):
            await connections[-1].request(METADATA, m.MetadataRequest(None))
        assert not any(future.done() for future in waiting)
        for future in waiting:  # and these do not wait for ever
            with pytest.raises(BrokerError) as raised:
                await asyncio.wait_for(future, 5.5)
            assert raised.value.code is ErrorCode.REQUEST_TIMED_OUT
        session_of(cluster, 0).resume()
        for connection in connections:
            connection.close()

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_producer_ids_are_granted_again_when_zookeeper_is_back() -> None:
    cluster = await one_broker()
    world = cluster.client("client")

    async def program() -> None:
        await asyncio.sleep(1)
        session_of(cluster, 0).suspend()
        connection = await connect(world)
        asked = [connection.send(INIT_PRODUCER_ID, m.InitProducerIdRequest(None)) for _ in range(3)]
        await asyncio.sleep(1)
        session_of(cluster, 0).resume()
        assert [(await future).producer_id for future in asked] == [0, 1, 2]
        connection.close()

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_a_registration_that_cannot_be_read_stops_no_other_broker() -> None:
    cluster = await one_broker(brokers=3)
    await cluster.until(cluster.active_controllers)
    [controller] = cluster.active_controllers()
    zookeeper = cluster.simulation.zookeeper
    zookeeper.make(znodes.broker_path(controller), b"not JSON")
    other = next(b for b in cluster.broker_ids if b != controller)
    cluster.kill_broker(other)
    await cluster.start_broker(other)  # it has to look up the controller
    await asyncio.sleep(1)
    assert cluster.living() == [0, 1, 2]


@run_by(on_virtual_loop)
async def test_a_broker_whose_disk_has_failed_stops_with_that_reason_and_ends_its_session() -> None:
    cluster = await one_broker()
    broker = cluster.broker(0)
    world_of_client = cluster.client("admin")

    async def create() -> None:
        async with Admin(cluster.bootstrap, world=world_of_client) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=1)

    await world_of_client.process.run(create())
    broker._logs.online[0].directory.failure = OSError("the disk is gone")  # as a write that failed would leave it
    await cluster.stop_broker(0)  # raises nothing: `serve` raises the reason
    assert not cluster.simulation.zookeeper.has(znodes.broker_path(0))
    assert ".kafka_cleanshutdown" not in cluster.simulation.host("broker-0").start_process().disk.list(LOG_DIR)


@pytest.mark.parametrize("fails", [False, True])
@run_by(on_virtual_loop)
async def test_a_stop_during_which_something_fails_is_not_marked_clean(fails: bool) -> None:
    simulation = Simulation()
    world = simulation.host("broker-0").start_process()

    async def break_when_told_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if fails:
                raise RuntimeError("could not tidy up")

    async def start_and_stop() -> None:
        config = VirtualCluster(simulation, brokers=1)._config(0)
        broker = Broker(TimedWorld(world, config.log_directories(), world.clock.monotonic), config)
        await broker.start()
        broker._supervisor.start(break_when_told_to_end(), "a task of the broker")
        served = asyncio.ensure_future(broker.serve())
        await asyncio.sleep(0.01)
        served.cancel()  # as the process does on a signal
        await asyncio.sleep(0.01)
        await broker.stop()

    await world.process.run(start_and_stop())
    names = world.disk.list(LOG_DIR)
    assert (".kafka_cleanshutdown" in names) is not fails
