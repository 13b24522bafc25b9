"""Partitions are added to topics by request and by hand, under load, and while controllers change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import CreatePartitionsTopic
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Operation, SetData
from minibroker.protocol.znodes import TopicZnode
from tests.running import run_by
from tests.simulation.mutants import planted

TOPIC = "orders"
EVERYWHERE = [0, 1, 2]


class Scene:
    """A cluster with the topic, and an administrator."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.zookeeper = cluster.simulation.zookeeper
        self.world = cluster.client("client")

    async def admin(self, do: Callable[[Admin], Coroutine[Any, Any, object]], **settings: Any) -> None:
        async def administrate() -> None:
            async with Admin(self.cluster.bootstrap, world=self.world, **settings) as admin:
                await do(admin)

        await self.world.process.run(administrate())

    def topic(self) -> TopicZnode:
        return znodes.decode_topic(TOPIC, self.zookeeper.data(znodes.topic_path(TOPIC)))

    def write_by_hand(self, topic: TopicZnode) -> None:
        self.zookeeper.make(znodes.topic_path(TOPIC), znodes.encode_topic(topic))

    def has_leader(self, number: int) -> bool:
        partition = TopicPartition(TOPIC, number)
        there = self.zookeeper.has(znodes.state_path(partition))
        return there and self.cluster.state(partition).leader in EVERYWHERE

    async def grown_to(self, count: int) -> None:
        """Wait until every broker shows that number of partitions, all with leaders."""
        await self.cluster.until(
            lambda: all(
                broker._metadata.has_leaders(TOPIC, count)
                for broker in map(self.cluster.living_broker, EVERYWHERE)
                if broker is not None
            )
        )


def play(scenario: Callable[[Scene], Coroutine[Any, Any, None]], seed: int = 1, partitions: int = 2) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        scene = Scene(cluster)
        await scene.admin(lambda a: a.create_topic(TOPIC, assignments=[EVERYWHERE] * partitions))
        await scenario(scene)

    run(main(), seed=seed)


@run_by(play)
async def test_running_producers_and_consumers_find_added_partitions(s: Scene, /) -> None:
    async def use() -> None:
        bootstrap, world = s.cluster.bootstrap, s.world
        settings: dict[str, Any] = {"world": world, "metadata_max_age_ms": 1_000}
        async with (
            Admin(bootstrap, world=world) as admin,
            Producer(bootstrap, **settings) as producer,
            Consumer(bootstrap, topics=[TOPIC], auto_offset_reset="latest", **settings) as consumer,
        ):
            await producer.send(TOPIC, b"before", partition=0)
            await admin.create_partitions(TOPIC, 5)
            described = await admin.describe_topic(TOPIC)
            assert [len(p.isr) for p in described.partitions] == [3] * 5
            await asyncio.sleep(2)
            for number in range(5):
                await producer.send(TOPIC, b"%d" % number, partition=number)
            seen = {(await anext(consumer)).partition for _ in range(6)}
            assert seen == set(range(5))

    await s.world.process.run(use())


@pytest.mark.parametrize(
    ("count", "assignments", "code", "message"),
    [
        (2, None, ErrorCode.INVALID_PARTITIONS, "has 2 partitions already, and 2 are asked for"),
        (1, None, ErrorCode.INVALID_PARTITIONS, "has 2 partitions already, and 1 are asked for"),
        (3, [[0, 1]], ErrorCode.INVALID_REPLICA_ASSIGNMENT, "give it 3 replicas"),
        (3, [[0, 1, 9]], ErrorCode.INVALID_REPLICA_ASSIGNMENT, "broker 9 is not alive"),
        (3, [], ErrorCode.INVALID_REPLICA_ASSIGNMENT, "1 partition to be added, and 0 assigned"),
    ],
)
@run_by(play)
async def test_an_invalid_partition_count_or_assignment_is_refused_with_the_reason(
    s: Scene, /, count: int, assignments: list[list[int]] | None, code: ErrorCode, message: str
) -> None:
    with pytest.raises(BrokerError, match=message) as caught:
        await s.admin(lambda a: a.create_partitions(TOPIC, count, assignments=assignments))
    assert caught.value.code is code
    assert len(s.topic().partitions) == 2


@run_by(play)
async def test_partitions_of_a_topic_that_does_not_exist_are_refused(s: Scene, /) -> None:
    with pytest.raises(BrokerError) as caught:
        await s.admin(lambda a: a.create_partitions("nothing", 3))
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@run_by(play)
async def test_partitions_written_into_the_znode_by_hand_are_created(s: Scene, /) -> None:
    for count in (3, 4):  # the watch is set again
        topic = s.topic()
        s.write_by_hand(TopicZnode(topic.topic_id, topic.partitions | {count - 1: (1, 2)}))
        await s.grown_to(count)
    assert s.cluster.state(TopicPartition(TOPIC, 3)).leader == 1


@run_by(play)
async def test_partitions_removed_from_the_znode_by_hand_are_restored(s: Scene, /) -> None:
    before = s.topic()
    s.write_by_hand(TopicZnode(before.topic_id, {0: before.partitions[0]}))
    await s.cluster.until(lambda: s.topic() == before)
    s.write_by_hand(TopicZnode(before.topic_id, {0: before.partitions[0], 2: (2, 1)}))
    await s.grown_to(3)
    await s.cluster.until(lambda: len(s.topic().partitions) == 3)


@run_by(play)
async def test_an_invalid_topic_znode_is_ignored_and_the_controller_continues(s: Scene, /) -> None:
    [controller] = s.cluster.active_controllers()
    good = s.zookeeper.data(znodes.topic_path(TOPIC))
    for nonsense in (b"", b"{", b'{"partitions": {"0": []}}', b'{"partitions": {}, "topic_id": "another"}'):
        s.zookeeper.make(znodes.topic_path(TOPIC), nonsense)
        await asyncio.sleep(1)
    s.zookeeper.make(znodes.topic_path(TOPIC), good)
    await s.admin(lambda a: a.create_partitions(TOPIC, 3))
    assert s.cluster.active_controllers() == [controller]


def test_partitions_are_not_added_to_the_next_topic_of_that_name() -> None:
    async def scenario(s: Scene) -> None:
        meant = s.topic().topic_id

        async def recreate(admin: Admin) -> None:
            await admin.delete_topic(TOPIC)
            await admin.create_topic(TOPIC, assignments=[EVERYWHERE] * 2)

        await s.admin(recreate)
        late = CreatePartitionsTopic(TOPIC, 5, None, meant, 2)
        [broker_id] = s.cluster.active_controllers()
        controller = s.cluster.broker(broker_id).controller
        assert controller is not None
        [result] = await s.cluster.process(broker_id).run(controller.create_partitions([late]))
        assert (result.error_code, len(s.topic().partitions)) == (ErrorCode.UNKNOWN_TOPIC_ID, 2)

    play(scenario)
    with planted("old-partitions-for-the-new-topic"), pytest.raises(AssertionError):
        play(scenario)


@run_by(play)
async def test_a_call_whose_answer_is_lost_succeeds_and_adds_only_the_requested_partitions(s: Scene, /) -> None:
    async def lose_the_answer(admin: Admin) -> None:
        await admin.list_topics()
        written = False

        def cut(session: object, operations: Sequence[Operation]) -> None:
            nonlocal written
            if not written and any(isinstance(o, SetData) and o.path == znodes.topic_path(TOPIC) for o in operations):
                written = True
                for broker_id in EVERYWHERE:
                    s.cluster.simulation.network.reset("client", host_name(broker_id))

        s.zookeeper.after = cut
        await admin.create_partitions(TOPIC, 4)
        assert written

    await s.admin(lose_the_answer)
    assert len(s.topic().partitions) == 4
    with pytest.raises(BrokerError) as caught:
        await s.admin(lambda a: a.create_partitions(TOPIC, 4))
    assert caught.value.code is ErrorCode.INVALID_PARTITIONS


@run_by(play)
async def test_a_topic_can_be_deleted_while_it_gets_partitions(s: Scene, /) -> None:
    adding = asyncio.ensure_future(s.admin(lambda a: a.create_partitions(TOPIC, 40)))
    await s.cluster.until(lambda: len(s.topic().partitions) == 40)
    await s.admin(lambda a: a.delete_topic(TOPIC))
    assert not s.zookeeper.has(znodes.topic_path(TOPIC))
    with suppress(BrokerError):
        await adding
    await s.admin(lambda a: a.create_topic(TOPIC, partitions=1))
    assert len(s.topic().partitions) == 1


@run_by(on_virtual_loop, seed=1)
async def test_replicas_of_new_topics_and_partitions_are_in_different_racks() -> None:
    cluster = VirtualCluster(Simulation(), brokers=4)
    racks = {broker_id: "east" if broker_id < 3 else "west" for broker_id in cluster.broker_ids}
    cluster.own_settings = {broker_id: {"broker.rack": rack} for broker_id, rack in racks.items()}
    await cluster.start()
    s = Scene(cluster)

    async def create(admin: Admin) -> None:
        await admin.create_topic(TOPIC, partitions=4, replication_factor=2)
        await admin.create_partitions(TOPIC, 9)
        for partition in (await admin.describe_topic(TOPIC)).partitions:
            assert {racks[broker_id] for broker_id in partition.replicas} == {"east", "west"}, partition

    await s.admin(create)
