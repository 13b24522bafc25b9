"""Transactions whose topics are deleted, and perhaps created again, while they are open."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.simulation.scenarios.helpers import as_admin, with_client
from tests.simulation.scenarios.transactions.raw_transactions import RawProducer
from tests.simulation.scenarios.transactions.transaction_support import TOPIC, P, Q, Scenario, run_scenario
from tests.simulation.storms.clients.transacting.kafka_transactions import OLDER, RAISING, TransactionVersions

OTHER = "other"


@pytest.mark.parametrize("versions", [*OLDER, *RAISING])
@pytest.mark.parametrize("partitions", [0, 1, 3])
def test_a_transaction_ends_although_its_topic_was_deleted_or_recreated(
    versions: TransactionVersions, partitions: int
) -> None:
    """`partitions`: of the new topic; 0: there is none."""

    async def scenario(s: Scenario) -> None:
        zookeeper = s.cluster.simulation.zookeeper
        await as_admin(s.cluster, lambda admin: admin.create_topic(OTHER, partitions=1, replication_factor=3))
        async with s.client(versions) as producer:
            await producer.initialize()
            await producer.append(P, [b"x"])
            await producer.append(Q, [b"y"])
            await as_admin(s.cluster, lambda admin: admin.delete_topic(TOPIC))
            await s.cluster.until(lambda: not zookeeper.names(znodes.DELETE_TOPICS))
            if partitions:
                await as_admin(
                    s.cluster, lambda admin: admin.create_topic(TOPIC, partitions=partitions, replication_factor=3)
                )
            await producer.commit()
            await producer.append(P._replace(topic=OTHER, partition=0), [b"z"])
            await producer.commit()
            if partitions >= 2:
                assert await s.is_stable()
                assert await s.visible() == {P: [], Q: []}

    run_scenario(scenario)


def test_a_transaction_ends_although_the_deletion_of_its_topic_waits_for_a_dead_broker() -> None:
    async def scenario(s: Scenario) -> None:
        producer = RawProducer(s.cluster, s.world)
        assert await producer.init() is ErrorCode.NONE
        assert await producer.send(P, b"x") is ErrorCode.NONE
        coordinator = s.cluster.state(producer.coordinator_partition(1)).leader
        [dead, *_] = {*s.cluster.broker_ids} - {coordinator, *s.cluster.active_controllers()}
        s.cluster.kill_broker(dead)
        await s.cluster.until(lambda: dead not in s.cluster.state(P).isr)
        async with Admin(s.cluster.bootstrap, world=s.world) as admin:
            deleting = asyncio.ensure_future(admin.delete_topic(TOPIC))
            await s.cluster.until(lambda: not knows(s.cluster, coordinator, P))
            assert await producer.end() is ErrorCode.NONE
            await producer.until_state("CompleteCommit")
            assert s.cluster.simulation.zookeeper.names(znodes.DELETE_TOPICS) == [TOPIC]
            await s.cluster.start_broker(dead)
            await deleting

    run_scenario(scenario)


def test_a_topic_that_the_next_coordinator_has_not_heard_of_is_not_deleted() -> None:
    """It was cut off from the controller while the topic was created. The transaction would be complete without its
    marker, and the partition would never be stable."""
    committed: list[bytes] = []

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        network, fresh = cluster.simulation.network, TopicPartition("fresh", 0)
        producer = RawProducer(cluster, world)
        assert await producer.init() is ErrorCode.NONE
        [controller] = cluster.active_controllers()
        state = cluster.state(producer.coordinator_partition(1))
        [behind] = set(state.isr) - {state.leader}
        [leader] = {*cluster.broker_ids} - {controller, *state.isr}
        network.block(host_name(controller), host_name(behind))
        async with Admin(cluster.bootstrap, world=world) as admin:
            creating = asyncio.ensure_future(admin.create_topic("fresh", assignments=[[leader]]))
            await cluster.until(lambda: knows(cluster, state.leader, fresh) and knows(cluster, leader, fresh))
            assert await producer.send(fresh, b"a") is ErrorCode.NONE
            network.block(host_name(state.leader), host_name(leader))  # no marker from the first coordinator
            assert await producer.end() is ErrorCode.NONE
            cluster.kill_broker(state.leader)
            cluster.kill_broker(controller)
            await asyncio.sleep(1)
            network.heal()
            await producer.until_state("CompleteCommit")
            for broker_id in (state.leader, controller):
                await cluster.start_broker(broker_id)
            await asyncio.wait([creating])
            creating.exception()
        async with Consumer(cluster.bootstrap, world=world, isolation_level="read_committed") as consumer:
            consumer.assign([fresh])
            committed.extend(record.value or b"" for record in await consumer.poll(timeout_ms=10_000))

    settings = {
        "offsets.topic.replication.factor": "3",
        "transaction.state.log.num.partitions": "1",
        "transaction.state.log.replication.factor": "2",
        "transaction.state.log.min.isr": "1",
    }
    with_client(program, settings=settings, brokers=4)
    assert committed == [b"a"]


def knows(cluster: VirtualCluster, broker_id: int, topic_partition: TopicPartition) -> bool:
    services = cluster.broker(broker_id)._services
    return services is not None and services.metadata.partition(topic_partition) is not None
