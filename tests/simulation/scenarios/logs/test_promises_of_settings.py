"""Settings on which the promise of acks=all depends change without every broker knowing: acknowledged records are safe
under the settings by which they were acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.world import Operation, SetData
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin

TOPIC = "orders"
P0 = TopicPartition(TOPIC, 0)
MIN_ISR = "min.insync.replicas"
UNCLEAN = "unclean.leader.election.enable"
ALL = ConfigResource.of_all_brokers()


class Trio:
    """A cluster of three brokers, with a partition on the two that are not the controller."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        [self.controller] = cluster.active_controllers()
        self.leader, self.follower = (b for b in cluster.broker_ids if b != self.controller)
        self.bootstrap = ",".join(f"{host_name(b)}:{PORT}" for b in (self.leader, self.follower))

    async def administer(self, action: Callable[[Admin], Awaitable[object]], bootstrap: str = "") -> None:
        await as_admin(self.cluster, action, bootstrap=bootstrap or self.bootstrap)

    async def set(self, resource: ConfigResource, name: str, value: object) -> None:
        change = ConfigChange.set(name, str(value))
        bootstrap = f"{host_name(self.leader)}:{PORT}"
        await self.administer(lambda admin: admin.incremental_alter_configs({resource: [change]}), bootstrap)

    async def produce(self, numbers: range) -> None:
        """Acknowledged on return."""
        world = self.cluster.client("producer")

        async def send() -> None:
            async with Producer(self.bootstrap, world=world) as producer:
                for number in numbers:
                    await producer.send(TOPIC, b"%d" % number)

        async with asyncio.timeout(60):
            await world.process.run(send())

    async def read(self, count: int) -> list[int]:
        world = self.cluster.client("consumer")

        async def consume() -> list[int]:
            found: list[int] = []
            async with Consumer(self.cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
                async for record in consumer:
                    found.append(int(record.value or b""))
                    if len(found) == count:
                        break
            return found

        async with asyncio.timeout(60):
            return await world.process.run(consume())

    def needed_by_leader(self) -> int:
        replicas = self.cluster.broker(self.leader)._replicas
        partition = None if replicas is None else replicas.partitions.get(P0)
        return 0 if partition is None else partition.min_insync_replicas


def play(
    scenario: Callable[[Trio], Awaitable[None]],
    settings: Mapping[str, str],
    own: Mapping[str, str] | None = None,
    seed: int = 1,
) -> None:
    """Run the scenario; only the configuration file of the partition's leader contains the settings `own`."""

    async def main() -> None:
        cluster = VirtualCluster(Simulation(), settings=settings)
        await cluster.start()
        await cluster.until(cluster.active_controllers)
        trio = Trio(cluster)
        if own:
            cluster.own_settings[trio.leader] = dict(own)
            await cluster.stop_broker(trio.leader)
            await cluster.start_broker(trio.leader)
        await trio.administer(
            lambda admin: admin.create_topic(TOPIC, assignments=[(trio.leader, trio.follower)]), cluster.bootstrap
        )
        await scenario(trio)

    run(main(), seed=seed)


# --- min.insync.replicas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["for all brokers", "for the leader", "in the leader's file"])
def test_records_acknowledged_by_two_replicas_survive_whatever_min_isr_the_controller_knows(
    where: str,
) -> None:
    async def scenario(trio: Trio) -> None:
        cluster = trio.cluster
        await trio.produce(range(10))
        cluster.pause_broker(trio.controller)
        if where == "for all brokers":
            await trio.set(ALL, MIN_ISR, 2)
        elif where == "for the leader":
            await trio.set(ConfigResource.of_broker(trio.leader), MIN_ISR, 2)
        await cluster.until(lambda: trio.needed_by_leader() == 2)
        await trio.produce(range(10, 50))
        cluster.kill_broker(trio.follower)
        cluster.resume_broker(trio.controller)
        await cluster.until(lambda: cluster.state(P0).isr == (trio.leader,))
        assert cluster.state(P0).eligible == (trio.follower,)
        cluster.power_cut(trio.leader)
        await cluster.start_broker(trio.leader)
        await cluster.start_broker(trio.follower)
        assert await trio.read(50) == list(range(50))

    play(scenario, {MIN_ISR: "1"}, own={MIN_ISR: "2"} if where == "in the leader's file" else None)


@run_by(play, settings={MIN_ISR: "1"})
async def test_a_higher_min_insync_replicas_commits_nothing_before_it_is_recorded(trio: Trio, /) -> None:
    cluster, zookeeper = trio.cluster, trio.cluster.simulation.zookeeper
    await trio.produce(range(10))
    acknowledged_before: list[int] = []

    def written(session: VirtualSession, operations: Sequence[Operation]) -> None:
        if any(getattr(o, "path", "") == znodes.state_path(P0) for o in operations):
            acknowledged_before.append(cluster.state(P0).to_commit)

    assert cluster.state(P0).to_commit == 1
    zookeeper.after = written
    await trio.set(ALL, MIN_ISR, 2)
    await cluster.until(lambda: trio.needed_by_leader() == 2)
    await trio.produce(range(10, 11))
    assert acknowledged_before == [2]
    await trio.set(ALL, MIN_ISR, 1)
    await cluster.until(lambda: cluster.state(P0).to_commit == 1)


# --- unclean.leader.election.enable ------------------------------------------------------------------------------


async def leave_the_follower_behind(trio: Trio) -> None:
    """Kill the follower, so that it lacks the records acknowledged afterwards."""
    cluster = trio.cluster
    await trio.produce(range(10))
    cluster.kill_broker(trio.follower)
    await cluster.until(lambda: cluster.state(P0).isr == (trio.leader,))
    await trio.produce(range(10, 30))


@run_by(play, settings={MIN_ISR: "1"})
async def test_no_unclean_election_is_held_if_the_controller_does_not_know_of_its_ban_yet(trio: Trio, /) -> None:
    cluster = trio.cluster
    await trio.set(ALL, UNCLEAN, "true")
    await leave_the_follower_behind(trio)
    forbidden = znodes.encode_config({UNCLEAN: "false"})
    cluster.simulation.zookeeper.make(znodes.broker_config_path(None), forbidden)  # without a notification
    cluster.kill_broker(trio.leader)
    await cluster.start_broker(trio.follower)
    await cluster.until(lambda: cluster.state(P0).leader == NO_LEADER)
    await asyncio.sleep(1)
    assert cluster.state(P0).leader == NO_LEADER
    await cluster.start_broker(trio.leader)
    assert await trio.read(30) == list(range(30))


@run_by(play, settings={MIN_ISR: "1"})
async def test_an_unclean_election_forbidden_just_before_its_write_is_not_held(trio: Trio, /) -> None:
    """The controller has read the settings, and its write is in flight."""

    cluster, zookeeper = trio.cluster, trio.cluster.simulation.zookeeper
    await trio.set(ALL, UNCLEAN, "true")
    await leave_the_follower_behind(trio)
    forbidden: list[Operation] = []

    def about_to_write(session: VirtualSession, operations: Sequence[Operation]) -> None:
        elects = [o for o in operations if isinstance(o, SetData) and o.path == znodes.state_path(P0)]
        if not forbidden and elects and b'"leader":%d,' % trio.follower in elects[0].data:
            forbidden.extend(elects)
            everywhere = znodes.broker_config_path(None)
            zookeeper.make(everywhere, znodes.encode_config({UNCLEAN: "false"}))
            zookeeper.make(f"{znodes.CONFIG_CHANGE_PREFIX}x1", znodes.encode_config_change(everywhere))
            zookeeper.make(znodes.CONFIG_CHANGES, b"")  # as any broker that changes settings does

    zookeeper.before = about_to_write
    cluster.kill_broker(trio.leader)
    await cluster.start_broker(trio.follower)
    await cluster.until(lambda: forbidden)
    await asyncio.sleep(1)
    assert cluster.state(P0).leader == NO_LEADER
    await cluster.start_broker(trio.leader)
    assert await trio.read(30) == list(range(30))
