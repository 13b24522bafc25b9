"""One look at a whole cluster, on virtual time: a broker that hangs costs one deadline, whatever is asked."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from minibroker.broker.replication.upkeep.slow_commits import SLOW_S, WINDOW_S
from minibroker.client.producer import Producer
from minibroker.deploy.observing.access import Address
from minibroker.deploy.observing.examination import Findings, examine
from minibroker.deploy.observing.followers import slow_followers
from minibroker.deploy.observing.status import status_of_view
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.apis import DESCRIBE_HEALTH
from minibroker.protocol.connections.rpc import Connection, RequestTimedOut, open_connection
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import with_client

ADDRESSES = [(f"broker-{broker}", PORT) for broker in range(3)]
ORDERS = {"name": "orders", "partitions": 1, "replication_factor": 3}
ARRIVES_S = 0.05
"""Within this time a record has reached its leader."""


class OfWorld:
    """Access to the brokers from a simulated host."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world

    async def open(self, address: Address, timeout_s: float) -> Connection:
        return await open_connection(self._world.network, *address, client_id="t", timeout_s=timeout_s)


class WithoutHealth(OfWorld):
    """No broker answers DescribeHealth, as one that is late."""

    async def open(self, address: Address, timeout_s: float) -> Connection:
        connection = await super().open(address, timeout_s)
        ask = connection.request

        async def request(api: Any, *arguments: Any, **options: Any) -> Any:
            if api is DESCRIBE_HEALTH:
                await asyncio.sleep(options["timeout_s"])
                raise RequestTimedOut("no answer")
            return await ask(api, *arguments, **options)

        connection.request = request  # type: ignore[method-assign]
        return connection


async def look(
    world: VirtualWorld, addresses: list[Address], access: type[OfWorld] = OfWorld
) -> tuple[Findings, float]:
    """Return what is found, and the seconds that it took."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    found = await examine(addresses, access=access(world), asks_controller=True, asks_stalls=True, asks_rights=True)
    return found, clock() - began_s


@run_by(with_client, topic=ORDERS | {"partitions": 3})
async def test_a_look_at_a_cluster_with_a_broker_that_hangs_ends_within_three_seconds(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send("orders", b"before", partition=0)
        whole, took_s = await look(world, ADDRESSES)
        assert status_of_view(whole.view).problems() == []
        assert (sorted(whole.view.health), sorted(whole.offline_log_dirs), took_s < 0.5) == ([0, 1, 2],) * 2 + (True,)
        leader = whole.view.partitions[TopicPartition("orders", 0)].leader_id
        hanging = next(b for b in range(3) if b not in (leader, whole.view.controller_id))
        cluster.pause_broker(hanging)
        waiting = producer.send("orders", b"waits", partition=0)
        for addresses in (ADDRESSES, [ADDRESSES[hanging], ADDRESSES[leader]]):
            found, took_s = await look(world, addresses)
            assert took_s < 3
            assert found.view.silent() == [hanging]
            assert sorted(found.view.health) == sorted(found.offline_log_dirs) == sorted({0, 1, 2} - {hanging})
            assert found.view.stalls == {TopicPartition("orders", 0): [hanging]}
        alone, took_s = await look(world, [ADDRESSES[hanging]])
        assert took_s < 3
        assert (alone.view.is_unknown, alone.view.hanging()) == (True, [ADDRESSES[hanging]])
        session_s = 6
        await asyncio.sleep(session_s)
        found, _ = await look(world, ADDRESSES)
        assert (found.view.missing(), found.view.hanging()) == ([hanging], [ADDRESSES[hanging]])
        cluster.resume_broker(hanging)
        await waiting


@run_by(with_client)
async def test_a_broker_without_a_registration_is_seen_if_it_answers(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    cut_s = 10  # its session lasts for 6
    cluster.simulation.zookeeper.cut("broker-1")
    await asyncio.sleep(cut_s)
    found, _ = await look(world, ADDRESSES)
    assert dict(found.view.unregistered) == {1: ADDRESSES[1]}
    [problem] = [text for text in status_of_view(found.view).problems() if "broker 1 runs" in text]
    assert problem.startswith(
        f"broker 1 runs but is not in the cluster, since it has had no connection to ZooKeeper for {cut_s} s"
    )


@run_by(with_client, topic=ORDERS)
async def test_a_slow_follower_is_named_by_its_leader_and_no_other_one_under_the_same_load(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Producer(cluster.bootstrap, world=world, acks=1) as producer:
        load = asyncio.create_task(keep_sending(producer))
        for _ in range(10):
            await asyncio.sleep(0.3)
            found, _ = await look(world, ADDRESSES)
            assert slow_followers(found.view) == []
        leader = found.view.partitions[TopicPartition("orders", 0)].leader_id
        slow, slow_s = (leader + 1) % 3, 4
        cluster.simulation.network.delay_standing(f"broker-{slow}", f"broker-{leader}", 1.5)
        await asyncio.sleep(slow_s)
        found, _ = await look(world, ADDRESSES)
        [named] = slow_followers(found.view)
        assert (named.broker, named.partitions, named.leaders) == (slow, ["orders-0"], [leader])
        assert (named.is_in_sync, named.is_silent) == (True, False)
        assert 1 <= (named.behind_s or 0) <= slow_s
        assert named.records > 10
        cluster.simulation.network.delay_standing(f"broker-{slow}", f"broker-{leader}", 3.0)
        found, _ = await look(world, ADDRESSES)
        assert found.view.stalls == {TopicPartition("orders", 0): [slow]}
        assert found.view.doubted_stalls == frozenset()
        load.cancel()
        await asyncio.wait([load])


@run_by(with_client, topic=ORDERS)
async def test_of_a_leader_that_is_late_it_is_unknown_for_whom_it_waits_and_a_wait_that_is_over_is_none(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    name = TopicPartition("orders", 0)
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send("orders", b"record")
        found, _ = await look(world, ADDRESSES)
        leader = found.view.partitions[name].leader_id
        slow = (leader + 1) % 3
        for delay_s, stalls in ((2.5, {}), (5.0, {name: sorted({0, 1, 2} - {leader})})):
            cluster.simulation.network.delay_standing(f"broker-{slow}", f"broker-{leader}", delay_s)
            await producer.send("orders", b"its fetch waits at the leader already")
            waiting = asyncio.ensure_future(producer.send("orders", b"record"))
            await asyncio.sleep(ARRIVES_S)
            found, _ = await look(world, ADDRESSES, WithoutHealth)
            assert found.view.stalls == stalls
            assert found.view.doubted_stalls == stalls.keys()
            await waiting


@run_by(with_client, topic=ORDERS)
async def test_a_follower_whose_every_fetch_takes_a_second_is_named_although_it_has_all_the_leader_had(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send("orders", b"record")
        found, _ = await look(world, ADDRESSES)
        assert status_of_view(found.view).slow_commits == []
        leader = found.view.partitions[TopicPartition("orders", 0)].leader_id
        slow = (leader + 1) % 3
        cluster.simulation.network.delay_standing(f"broker-{slow}", f"broker-{leader}", 1.2)
        for _ in range(3):
            await producer.send("orders", b"record")
        found, _ = await look(world, ADDRESSES)
        status = status_of_view(found.view)
        assert status.problems() == []
        [line] = status.slow_commit_lines()
        pair = " and ".join(str(broker) for broker in sorted((leader, slow)))
        assert re.fullmatch(
            rf"acks=all took up to [12]\.\d s in orders-0 within the last 10 s, until broker {slow} had copied the "
            rf"records: check the disk, processor and network of brokers {pair}",
            line,
        )
        cluster.simulation.network.delay_standing(f"broker-{slow}", f"broker-{leader}", 0.0)
        await asyncio.sleep(WINDOW_S + 1)
        found, _ = await look(world, ADDRESSES)
        assert status_of_view(found.view).slow_commits == []


@run_by(with_client, topic=ORDERS)
async def test_no_follower_is_blamed_for_a_wait_in_which_the_leader_itself_was_stopped(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send("orders", b"record")
        found, _ = await look(world, ADDRESSES)
        leader = found.view.partitions[TopicPartition("orders", 0)].leader_id
        for follower in {0, 1, 2} - {leader}:  # so that the record waits for their next fetch when the leader stops
            cluster.simulation.network.delay_standing(f"broker-{follower}", f"broker-{leader}", 0.3)
        await producer.send("orders", b"record")
        waiting = asyncio.ensure_future(producer.send("orders", b"waits"))
        await asyncio.sleep(ARRIVES_S)
        assert not waiting.done()
        cluster.pause_broker(leader)
        await asyncio.sleep(3 * SLOW_S)
        cluster.resume_broker(leader)
        await waiting
        found, _ = await look(world, ADDRESSES)
        assert status_of_view(found.view).slow_commits == []


@run_by(with_client, topic=ORDERS)
async def test_a_follower_that_keeps_up_is_not_blamed_for_a_wait_that_ends_as_another_one_leaves_the_isr(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with (
        Producer(cluster.bootstrap, world=world) as producer,
        Producer(cluster.bootstrap, world=world, acks=1) as busy,
    ):
        load = asyncio.create_task(keep_sending(busy))
        await producer.send("orders", b"record")
        found, _ = await look(world, ADDRESSES)
        leader = found.view.partitions[TopicPartition("orders", 0)].leader_id
        hanging = next(b for b in range(3) if b not in (leader, found.view.controller_id))
        cluster.pause_broker(hanging)
        began_s = asyncio.get_running_loop().time()
        await producer.send("orders", b"waits until the session of the other follower ends")
        assert asyncio.get_running_loop().time() - began_s > SLOW_S
        found, _ = await look(world, [address for broker, address in enumerate(ADDRESSES) if broker != hanging])
        assert status_of_view(found.view).slow_commits == []
        cluster.resume_broker(hanging)
        load.cancel()
        await asyncio.wait([load])


async def keep_sending(producer: Producer) -> None:
    every_s = 0.002
    while True:
        await producer.send("orders", b"record")
        await asyncio.sleep(every_s)
