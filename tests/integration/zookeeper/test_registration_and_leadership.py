"""Registration and leadership against a real ZooKeeper, its real sessions, restarts and expiries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from minibroker.controller.governing.leadership import Leadership
from minibroker.controller.governing.registration import BrokerIdTaken, Registration
from minibroker.controller.zookeeper import KazooSession, KazooZooKeeper
from minibroker.protocol.model import CONTROL_LISTENER, Endpoint
from minibroker.protocol.world import SessionExpired, SessionState, ZooKeeperSession
from minibroker.protocol.world.real import RealWorld
from minibroker.protocol.znodes import (
    BROKER_IDS,
    CONTROLLER,
    CONTROLLER_EPOCH,
    broker_path,
    decode_controller,
    encode_broker,
)
from tests.integration.zookeeper.zookeeper_process import zookeeper_process
from tests.integration.zookeeper.zookeeper_sessions import CONNECT_TIMEOUT_MS, SESSION_TIMEOUT_MS, expire, open_session
from tests.waiting import until


class Broker:
    """A registration and a leadership, connected as in a broker process."""

    def __init__(self, world: RealWorld, servers: str, broker_id: int) -> None:
        self.id = broker_id
        self.terms: list[int] = []
        self.resignations: list[str] = []
        self.epochs: list[int] = []
        self.failures: list[Exception] = []
        self.lost: list[SessionState] = []
        self.registration = Registration(
            world,
            zookeeper_connect=servers,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
            broker_id=broker_id,
            trusted_since=lambda: 0,
        )
        self.leadership = Leadership(
            world,
            broker_id,
            on_elected=self._elected,
            on_resign=self._resigned,
            on_controller=lambda _broker_id, _epoch: None,
            on_removed=lambda _broker_id, _epoch: None,
        )
        self.registration.on_session(self._registered)
        self.registration.on_failure(self.failures.append)
        self.registration.on_lost(self.lost.append)

    async def start(self, port: int = 1) -> None:
        self.leadership.start()
        await self.registration.connect()
        await self.registration.start([Endpoint(CONTROL_LISTENER, "127.0.0.1", port)])

    async def close(self) -> None:
        await self.leadership.close()
        await self.registration.close()

    @property
    def session(self) -> KazooSession:
        session = self.registration.session
        assert isinstance(session, KazooSession)
        return session

    def _registered(self, session: ZooKeeperSession, broker_epoch: int) -> None:
        self.epochs.append(broker_epoch)
        self.leadership.attach(session)

    async def _elected(self, session: ZooKeeperSession, epoch: int, epoch_version: int) -> None:
        assert session is self.session
        _, stat = await session.get(CONTROLLER_EPOCH)
        assert stat.version == epoch_version
        self.terms.append(epoch)

    async def _resigned(self, reason: str) -> None:
        self.resignations.append(reason)


@asynccontextmanager
async def brokers(servers: str, count: int) -> AsyncIterator[list[Broker]]:
    world = RealWorld(KazooZooKeeper())
    running = [Broker(world, servers, broker_id) for broker_id in range(1, count + 1)]
    try:
        for number, broker in enumerate(running):
            await broker.start(port=1 + number)
        yield running
    finally:
        for broker in running:
            await broker.close()
        world.close()


async def elected(running: list[Broker], epoch: int) -> Broker:
    def agreed() -> bool:
        leaders = [broker for broker in running if broker.leadership.is_controller]
        return (
            len(leaders) == 1
            and leaders[0].terms[-1:] == [epoch]
            and all(
                (broker.leadership.controller_id, broker.leadership.epoch) == (leaders[0].id, epoch)
                for broker in running
            )
        )

    await until(agreed)
    [leader] = [broker for broker in running if broker.leadership.is_controller]
    return leader


async def all_done(leadership: Leadership) -> None:
    """Wait until all earlier calls are done."""
    done = asyncio.Event()

    async def note() -> None:
        done.set()

    leadership._work.put_nowait(note)
    await done.wait()


async def registered(broker: Broker, observer: ZooKeeperSession) -> bool:
    stat = await observer.exists(broker_path(broker.id))
    try:
        session_id = broker.session.session_id
    except SessionExpired:
        return False
    return stat is not None and (stat.ephemeral_owner, stat.czxid) == (session_id, broker.registration.broker_epoch)


async def until_registered(broker: Broker, observer: ZooKeeperSession) -> None:
    async with asyncio.timeout(60):
        while not await registered(broker, observer):
            await asyncio.sleep(0.005)


async def test_a_controller_whose_session_expires_is_replaced_and_returns_as_a_follower(zookeeper: str) -> None:
    async with brokers(zookeeper, 3) as running, open_session(zookeeper) as observer:
        for epoch in (1, 2, 3):
            leader = await elected(running, epoch)
            assert decode_controller((await observer.get(CONTROLLER))[0]) == leader.id
            await expire(zookeeper, leader.session)
            await until(lambda leader=leader: bool(leader.resignations))  # type: ignore[misc]
            await until_registered(leader, observer)
        await elected(running, 4)
        assert sorted(term for broker in running for term in broker.terms) == [1, 2, 3, 4]
        assert await observer.children(BROKER_IDS) == ["1", "2", "3"]


@pytest.mark.slow
async def test_leadership_and_registration_survive_a_restart_of_zookeeper_and_are_watched_again() -> None:
    with zookeeper_process() as server:
        async with brokers(server.address, 2) as running:
            leader = await elected(running, 1)
            epochs = [broker.epochs[:] for broker in running]
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            async with open_session(server.address) as observer:
                for broker in running:
                    await until_registered(broker, observer)
                assert await elected(running, 1) is leader
                assert [broker.epochs for broker in running] == epochs
                await observer.delete(CONTROLLER)
                await elected(running, 2)
                for broker in running:
                    await observer.delete(broker_path(broker.id))
                    await until(lambda broker=broker: len(broker.epochs) == 2)  # type: ignore[misc]
                    assert await registered(broker, observer)
                    assert broker.epochs == sorted(broker.epochs)


async def test_a_crashed_controller_is_removed_and_a_repeated_removal_has_no_effect(zookeeper: str) -> None:
    async with brokers(zookeeper, 3) as running, open_session(zookeeper) as observer:
        leader = await elected(running, 1)
        others = [broker for broker in running if broker is not leader]
        for other in others:
            other.leadership.remove_crashed(leader.id, 1)
        await until(lambda: bool(leader.resignations))
        successor = await elected(running, 2)
        _, stat = await observer.get(CONTROLLER)
        for broker in running:
            for suspect in (1, 2, 3):
                broker.leadership.remove_crashed(suspect, 1)
        for broker in running:
            await all_done(broker.leadership)
        assert await elected(running, 2) is successor
        assert (await observer.get(CONTROLLER))[1] == stat


async def test_the_node_of_the_previous_run_is_replaced_at_once(zookeeper: str) -> None:
    world = RealWorld(KazooZooKeeper())
    async with open_session(zookeeper) as former_run:
        for path in ("/brokers", BROKER_IDS):
            await former_run.create(path, b"")
        node = encode_broker([Endpoint(CONTROL_LISTENER, "127.0.0.1", 1)], None, 0)
        await former_run.create(broker_path(1), node, ephemeral=True)
        stale = await former_run.exists(broker_path(1))
        assert stale is not None
        broker = Broker(world, zookeeper, 1)
        await broker.start(port=1)
        assert await registered(broker, former_run)
        assert broker.registration.broker_epoch > stale.czxid
    async with open_session(zookeeper) as observer:
        assert await registered(broker, observer)  # the end of the former session removed nothing
    await broker.close()
    world.close()


async def test_the_id_of_a_broker_that_listens_is_refused(zookeeper: str) -> None:
    world = RealWorld(KazooZooKeeper())
    listener = await world.network.listen("127.0.0.1", 0)
    first, second = Broker(world, zookeeper, 1), Broker(world, zookeeper, 1)
    await first.start(port=listener.port)
    with pytest.raises(BrokerIdTaken, match=rf"taken by 127\.0\.0\.1:{listener.port}"):
        await second.start(port=1)
    await second.close()
    assert await registered(first, first.session)
    await first.close()
    assert first.lost == second.lost == []
    await listener.close()
    world.close()
