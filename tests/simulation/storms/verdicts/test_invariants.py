"""Each invariant detects its violation, made by hand in a healthy cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from minibroker.broker.replication.partition import Partition
from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.model import LeaderAndIsr, TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.verdicts.history import TopicIdPartition
from tests.simulation.storms.verdicts.invariants import Invariants

PARTITION = TopicPartition("orders", 0)
ACKNOWLEDGED = 3


def _kinds_after(harm: Callable[[VirtualCluster, Invariants], Awaitable[list[str] | None]]) -> list[str]:
    """Return the anomalies after this harm to a cluster with one partition and some records."""

    async def story() -> list[str]:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        world = cluster.client("client")
        await world.process.run(_fill(cluster, world))
        await cluster.until(
            lambda: all(_replica(cluster, b).high_watermark == ACKNOWLEDGED for b in cluster.broker_ids)
        )
        invariants = Invariants(cluster)
        acknowledged = {TopicIdPartition(_replica(cluster, 0).log.topic_id, PARTITION): ACKNOWLEDGED}
        assert list(invariants.look(acknowledged, ())) == []
        told = await harm(cluster, invariants) or []
        return told + [anomaly.kind for anomaly in invariants.look(acknowledged, ())]

    return run(story(), seed=1)


async def _fill(cluster: VirtualCluster, world: World) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic(PARTITION.topic, partitions=1, replication_factor=3)
    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(ACKNOWLEDGED):
            await producer.send(PARTITION.topic, b"%d" % number)


def _replica(cluster: VirtualCluster, broker_id: int) -> Partition:
    replicas = cluster.broker(broker_id)._replicas
    partition = replicas.partitions.get(PARTITION) if replicas is not None else None
    assert partition is not None
    return partition


def _written(cluster: VirtualCluster, invariants: Invariants, **changes: object) -> list[str]:
    before = cluster.state(PARTITION)
    after: LeaderAndIsr = msgspec.structs.replace(before, **changes)
    return [anomaly.kind for anomaly in invariants.state_written(PARTITION, before, after)]


def test_a_healthy_cluster_breaks_no_invariant() -> None:
    async def nothing(cluster: VirtualCluster, invariants: Invariants) -> None:
        pass

    assert _kinds_after(nothing) == []


def test_a_state_znode_whose_leader_epoch_goes_back_is_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> list[str]:
        return _written(cluster, invariants, leader_epoch=cluster.state(PARTITION).leader_epoch - 1)

    assert _kinds_after(harm) == ["leader epoch went back"]


def test_a_state_znode_with_a_second_leader_of_an_epoch_is_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> list[str]:
        leader = cluster.state(PARTITION).leader
        return _written(cluster, invariants, leader=next(b for b in cluster.broker_ids if b != leader))

    assert _kinds_after(harm) == ["two leaders in an epoch"]


def test_an_election_by_a_controller_that_was_deposed_is_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> list[str]:
        state = cluster.state(PARTITION)
        return _written(
            cluster, invariants, leader_epoch=state.leader_epoch + 1, controller_epoch=state.controller_epoch - 1
        )

    assert _kinds_after(harm) == ["a deposed controller elected"]


def test_an_election_by_the_newest_controller_breaks_no_invariant() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> list[str]:
        state = cluster.state(PARTITION)
        newest = znodes.decode_controller_epoch(cluster.simulation.zookeeper.data(znodes.CONTROLLER_EPOCH))
        return _written(cluster, invariants, leader=2, leader_epoch=state.leader_epoch + 1, controller_epoch=newest)

    assert _kinds_after(harm) == []


def test_a_replica_and_metadata_whose_leader_epochs_go_back_are_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> None:
        told = cluster.broker(2)._metadata.partition(PARTITION)
        assert told is not None
        for change in (2, -1):
            _replica(cluster, 1).leader_epoch += change
            told.leader_epoch += change
            if change > 0:
                list(invariants.look({}, ()))

    assert _kinds_after(harm) == ["leader epoch went back", "leader epoch went back"]


def test_a_high_watermark_that_goes_back_is_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> None:
        _replica(cluster, 1).high_watermark -= 1

    assert _kinds_after(harm) == ["high watermark went back"]


def test_a_high_watermark_may_decrease_if_an_unclean_election_may_lose_records() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> list[str]:
        replica = _replica(cluster, 1)
        replica.high_watermark -= 1
        return [anomaly.kind for anomaly in invariants.look({}, (), {replica.log.topic_id})]

    assert _kinds_after(harm) == []


def test_a_second_process_that_leads_in_an_epoch_is_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> None:
        leader = cluster.state(PARTITION).leader
        _replica(cluster, next(b for b in cluster.broker_ids if b != leader)).role = _replica(cluster, leader).role

    assert "two leaders in an epoch" in _kinds_after(harm)


def test_a_member_of_the_isr_without_acknowledged_records_is_seen() -> None:
    async def harm(cluster: VirtualCluster, invariants: Invariants) -> None:
        replica = _replica(cluster, next(b for b in cluster.broker_ids if b != cluster.state(PARTITION).leader))
        replica.log.truncate_to(ACKNOWLEDGED - 1)

    assert "an electable replica lacks acknowledged records" in _kinds_after(harm)
