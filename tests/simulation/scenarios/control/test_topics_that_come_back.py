"""Topics that are deleted and recreated under their name while producers and administrators use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CommitFailed, DeliveryTimedOut
from minibroker.client.producer import Producer
from minibroker.client.producing.partitioners import crc32
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Create
from tests.running import run_by
from tests.simulation.mutants import planted

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)
PRODUCER, FIRST, SECOND = "producer", "first-admin", "second-admin"
EVERYWHERE = [0, 1, 2]


class Scenario:
    """A cluster, and clients on hosts of their own."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.network = cluster.simulation.network
        self.zookeeper = cluster.simulation.zookeeper
        for host in (PRODUCER, FIRST, SECOND):
            cluster.simulation.host(host)

    async def admin(self, host: str, do: Callable[[Admin], Coroutine[Any, Any, None]], **settings: Any) -> None:
        """Run `do` as an administrator in its own process."""
        world = self.cluster.client(host)

        async def administrate() -> None:
            async with Admin(self.cluster.bootstrap, world=world, **settings) as admin:
                await do(admin)

        await world.process.run(administrate())

    async def create(self, partitions: int = 1, host: str = SECOND) -> None:
        await self.admin(host, lambda a: a.create_topic(TOPIC, assignments=[EVERYWHERE] * partitions))

    async def delete(self) -> None:
        """Delete the topic; its name is free afterwards."""
        await self.admin(SECOND, lambda a: a.delete_topic(TOPIC))

    async def recreate(self, partitions: int = 1) -> None:
        await self.delete()
        await self.create(partitions)

    def topic_id(self) -> str:
        path = znodes.topic_path(TOPIC)
        return znodes.decode_topic(TOPIC, self.zookeeper.data(path)).topic_id if self.zookeeper.has(path) else ""

    def log_end(self, partition: TopicPartition = PARTITION) -> int:
        """Return the leader's log end offset, or -1 if it has no replica."""
        broker = self.cluster.broker(self.cluster.state(partition).leader)
        replica = None if broker._replicas is None else broker._replicas.partitions.get(partition)
        return -1 if replica is None else replica.log.log_end_offset

    @property
    def controller(self) -> str:
        [broker_id] = self.cluster.active_controllers()
        return host_name(broker_id)

    def lose_answers(self, source: str, target: str) -> Callable[[], None]:
        """Drop everything from the one host to the other from now on. Calling the result breaks open connections and
        repairs the link."""
        self.network.block(source, target)

        def end() -> None:
            self.network.reset(source, target)
            self.network.unblock(source, target)

        return end

    def after_creation_of(self, path: str, act: Callable[[], object]) -> None:
        """Call `act` once, after that znode is created and before any client learns of it."""

        def look(_: object, operations: Any) -> None:
            if any(isinstance(operation, Create) and operation.path == path for operation in operations):
                self.zookeeper.after = None
                act()

        self.zookeeper.after = look

    async def values(self, count: int) -> list[bytes | None]:
        """Return the topic's values: `count` of them, and any more that arrive within two seconds."""
        world = self.cluster.client("consumer")

        async def consume() -> list[bytes | None]:
            values: list[bytes | None] = []
            async with Consumer(self.cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
                try:
                    async with asyncio.timeout(2):
                        async for batch in consumer.batches():
                            values += batch.values
                except TimeoutError:
                    pass
            return values

        values = await world.process.run(consume())
        assert len(values) >= count
        return values


def play(scenario: Callable[[Scenario], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        await scenario(Scenario(cluster))

    run(main())


async def _produce(s: Scenario, produce: Callable[[Producer], Coroutine[Any, Any, None]], **settings: Any) -> None:
    world: VirtualWorld = s.cluster.client(PRODUCER)

    async def run_producer() -> None:
        async with Producer(s.cluster.bootstrap, world=world, **settings) as producer:
            await produce(producer)

    await world.process.run(run_producer())


# --- producers ---


@run_by(play)
async def test_a_lost_answer_after_a_recreation_duplicates_nothing(s: Scenario, /) -> None:
    await s.create()

    async def produce(producer: Producer) -> None:
        for value in (b"0", b"1"):
            await producer.send(TOPIC, value)
        await s.recreate()
        await producer.send(TOPIC, b"2")
        repair = s.lose_answers(host_name(s.cluster.state(PARTITION).leader), PRODUCER)
        delivery = producer.send(TOPIC, b"3")
        await s.cluster.until(lambda: s.log_end() == 2)
        repair()
        assert (await delivery).offset == 1

    await _produce(s, produce)
    assert await s.values(2) == [b"2", b"3"]


@pytest.mark.parametrize("lost", ["requests", "answers"])
@run_by(play)
async def test_batches_in_flight_during_a_recreation_are_in_the_new_topic_once_and_in_order(
    s: Scenario, /, lost: str
) -> None:
    await s.create()

    async def produce(producer: Producer) -> None:
        await producer.send(TOPIC, b"first")
        leader = host_name(s.cluster.state(PARTITION).leader)
        repair = s.lose_answers(*((PRODUCER, leader) if lost == "requests" else (leader, PRODUCER)))
        deliveries = []
        for number in range(8):
            deliveries.append(producer.send(TOPIC, b"%d" % number + b"x" * 900))
            await asyncio.sleep(0.01)
        await s.recreate()
        repair()
        for delivery in deliveries:
            await delivery

    await _produce(s, produce, batch_size=1_000, max_request_size=2_000)
    values = [value[:1] for value in await s.values(8) if value]
    assert values == [b"%d" % number for number in range(8)]


@run_by(play)
async def test_a_late_request_writes_nothing_into_the_recreated_topic(s: Scenario, /) -> None:
    await s.create()

    async def produce(producer: Producer) -> None:
        await producer.send(TOPIC, b"old")
        link = PRODUCER, host_name(s.cluster.state(PARTITION).leader)
        s.network.block(*link)
        with pytest.raises(DeliveryTimedOut):
            await producer.send(TOPIC, b"late")
        await s.recreate()
        s.network.unblock(*link)
        await asyncio.sleep(5)

    # Without sequence numbers (acks=1) only the topic's id shows that the request is for another topic.
    await _produce(s, produce, acks=1, delivery_timeout_ms=500)
    assert await s.values(0) == []


@run_by(play)
async def test_a_producer_continues_after_its_topic_was_recreated_with_fewer_partitions(s: Scenario, /) -> None:
    await s.create(partitions=6)

    async def produce(producer: Producer) -> None:
        for number in range(12):
            await producer.send(TOPIC, b"old", partition=number % 6)
        await s.recreate(partitions=1)
        gone = producer.send(TOPIC, b"gone", partition=5)
        with pytest.raises(BrokerError, match="has partitions 0 to 0 now") as caught:
            await gone
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        for number in range(20):
            await producer.send(TOPIC, b"%d" % number, key=b"%d" % number if number % 2 else None)

    await _produce(s, produce, delivery_timeout_ms=20_000)
    assert await s.values(20) == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize(("before", "after"), [(3, 6), (6, 2)])
@run_by(play)
async def test_each_key_goes_to_its_partition_of_the_recreated_topic(s: Scenario, /, before: int, after: int) -> None:
    await s.create(before)

    async def produce(producer: Producer) -> None:
        deliveries = []
        is_over = False

        async def send() -> None:
            number = 0
            while not is_over:
                deliveries.append(producer.send(TOPIC, b"%d" % number, key=b"key%d" % (number % 20)))
                deliveries.append(producer.send(TOPIC, b""))
                number += 1
                await asyncio.sleep(0.003)

        sending = asyncio.ensure_future(send())
        await asyncio.sleep(1)
        await s.delete()
        await asyncio.sleep(1)
        await s.create(after)
        await asyncio.sleep(1.5)
        is_over = True
        await sending
        for delivery in deliveries:
            await delivery
        with pytest.raises(BrokerError, match=f"partitions are 0 to {after - 1}"):
            producer.send(TOPIC, b"", partition=after)

    await _produce(s, produce)
    last: dict[bytes, int] = {}

    async def consume() -> None:
        async with Consumer(s.cluster.bootstrap, topics=[TOPIC], world=s.cluster.client("consumer")) as consumer:
            try:
                async with asyncio.timeout(2):
                    async for record in consumer:
                        if record.key is not None and record.value is not None:
                            assert record.partition == crc32(record.key, after)
                            assert int(record.value) > last.get(record.key, -1)
                            last[record.key] = int(record.value)
            except TimeoutError:
                pass

    await consume()
    assert len(last) == 20


@run_by(play)
async def test_a_partition_unknown_to_the_producer_is_refused_and_then_known(s: Scenario, /) -> None:
    await s.create(1)

    async def produce(producer: Producer) -> None:
        await producer.send(TOPIC, b"old")
        await s.recreate(3)
        await asyncio.sleep(2)
        with pytest.raises(BrokerError, match="partitions are 0 to 0"):
            producer.send(TOPIC, b"new", partition=2)
        await asyncio.sleep(1)
        assert (await producer.send(TOPIC, b"new", partition=2)).partition == 2

    await _produce(s, produce)


@run_by(play)
async def test_a_batch_split_during_a_recreation_is_written_once(s: Scenario, /) -> None:
    def small(admin: Admin) -> Coroutine[Any, Any, None]:
        return admin.create_topic(TOPIC, assignments=[EVERYWHERE], configs={"max.message.bytes": "2000"})

    await s.admin(SECOND, small)

    async def produce(producer: Producer) -> None:
        await producer.send(TOPIC, b"first")
        leader = host_name(s.cluster.state(PARTITION).leader)
        repair = s.lose_answers(leader, PRODUCER)
        deliveries = [producer.send(TOPIC, b"%02d" % number + b"x" * 300) for number in range(40)]
        await asyncio.sleep(0.1)
        await s.delete()
        await s.admin(SECOND, small)
        repair()
        for delivery in deliveries:
            await delivery

    await _produce(s, produce)
    assert [value[:2] for value in await s.values(40) if value] == [b"%02d" % number for number in range(40)]


# --- administrators ---


@run_by(play)
async def test_a_creation_whose_answer_was_lost_is_done_once_and_recognised_by_the_retry(s: Scenario, /) -> None:
    repairs: list[Callable[[], None]] = []
    lose = lambda: repairs.append(s.lose_answers(s.controller, FIRST))  # noqa: E731
    s.after_creation_of(znodes.topic_path(TOPIC), lose)
    creating = asyncio.ensure_future(s.create(2, FIRST))
    await s.cluster.until(lambda: s.topic_id() and repairs)
    topic_id = s.topic_id()
    await asyncio.sleep(0.5)
    repairs[0]()
    await creating
    assert s.topic_id() == topic_id


async def _create_without_hearing_of_it(s: Scenario, partitions: int) -> None:
    """Create the topic; the first attempt is executed, but its answer is lost."""

    async def create(admin: Admin) -> None:
        await admin.create_topic("another", assignments=[EVERYWHERE])  # opens a connection
        repair = s.lose_answers(s.controller, FIRST)
        creating = asyncio.ensure_future(admin.create_topic(TOPIC, assignments=[EVERYWHERE] * partitions))
        await asyncio.sleep(0.5)
        repair()
        await creating

    await s.admin(FIRST, create)


@run_by(play)
async def test_a_topic_created_by_another_client_does_not_count_as_created_after_a_lost_answer(s: Scenario, /) -> None:
    await s.create(1)
    with pytest.raises(BrokerError) as caught:
        await _create_without_hearing_of_it(s, 5)
    assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS


@run_by(play)
async def test_a_topic_that_is_being_deleted_does_not_count_as_created_after_a_lost_answer(s: Scenario, /) -> None:
    await s.create(1)
    victim = next(broker_id for broker_id in EVERYWHERE if host_name(broker_id) != s.controller)
    s.cluster.pause_broker(victim)  # so the deletion takes longer
    deleting = asyncio.ensure_future(s.admin(SECOND, lambda a: a.delete_topic(TOPIC)))
    await s.cluster.until(lambda: s.zookeeper.has(znodes.delete_topic_path(TOPIC)))
    with pytest.raises(BrokerError, match="still being deleted") as caught:
        await _create_without_hearing_of_it(s, 1)
    assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
    s.cluster.resume_broker(victim)
    await deleting


@run_by(play)
async def test_a_repeated_deletion_spares_the_recreated_topic(s: Scenario, /) -> None:
    await s.create()
    deleted = s.topic_id()
    repairs: list[Callable[[], None]] = []
    lose = lambda: repairs.append(s.lose_answers(s.controller, FIRST))  # noqa: E731
    s.after_creation_of(znodes.delete_topic_path(TOPIC), lose)
    deleting = asyncio.ensure_future(s.admin(FIRST, lambda a: a.delete_topic(TOPIC)))
    await s.cluster.until(lambda: repairs and not s.topic_id())
    await s.create()
    created = s.topic_id()
    repairs[0]()
    await deleting
    await asyncio.sleep(5)
    assert s.topic_id() == created != deleted


@run_by(play)
async def test_a_deletion_long_after_its_caller_gave_up_spares_the_recreated_topic(s: Scenario, /) -> None:
    await s.create()
    link = FIRST, s.controller

    async def delete(admin: Admin) -> None:
        await admin.create_topic("another", assignments=[EVERYWHERE])  # opens a connection
        s.network.block(*link)
        with pytest.raises(MinibrokerError):
            await admin.delete_topic(TOPIC)
        await s.recreate()
        created = s.topic_id()
        s.network.unblock(*link)
        await asyncio.sleep(10)
        assert s.topic_id() == created

    await s.admin(FIRST, delete, default_api_timeout_ms=1_000)


def test_a_deletion_that_reaches_the_controller_late_spares_the_recreated_topic() -> None:
    async def scenario(s: Scenario) -> None:
        await s.create()
        meant = s.topic_id()
        await s.recreate()
        created = s.topic_id()
        [broker_id] = s.cluster.active_controllers()
        controller = s.cluster.broker(broker_id).controller
        assert controller is not None
        [result] = await s.cluster.process(broker_id).run(controller.delete_topics({TOPIC: meant}))
        await asyncio.sleep(5)
        assert (result.error_code, s.topic_id()) == (ErrorCode.UNKNOWN_TOPIC_ID, created)

    play(scenario)
    with planted("old-deletion-hits-the-new-topic"), pytest.raises(AssertionError):
        play(scenario)


@run_by(play)
async def test_a_name_is_free_as_soon_as_its_topic_is_reported_as_deleted(s: Scenario, /) -> None:
    async def again_and_again(admin: Admin) -> None:
        for _ in range(5):
            await admin.create_topic(TOPIC, partitions=3, replication_factor=3)
            await admin.delete_topic(TOPIC)
            assert not s.zookeeper.has(znodes.topic_path(TOPIC))

    await s.admin(FIRST, again_and_again)


@run_by(play)
async def test_a_topic_deleted_by_two_clients_at_once_is_gone_for_both(s: Scenario, /) -> None:
    await s.create()
    await asyncio.gather(*(s.admin(host, lambda a: a.delete_topic(TOPIC)) for host in (FIRST, SECOND)))
    assert not s.topic_id()
    with pytest.raises(BrokerError) as caught:
        await s.admin(FIRST, lambda a: a.delete_topic(TOPIC))
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@run_by(play)
async def test_a_deletion_that_the_next_controller_finishes_succeeds_for_its_caller(s: Scenario, /) -> None:
    await s.create()
    [controller] = s.cluster.active_controllers()
    s.after_creation_of(znodes.delete_topic_path(TOPIC), lambda: s.cluster.kill_broker(controller))
    deleting = asyncio.ensure_future(s.admin(FIRST, lambda a: a.delete_topic(TOPIC)))
    await s.cluster.until(lambda: s.cluster.active_controllers() not in ([], [controller]))
    await s.cluster.start_broker(controller)
    await deleting
    assert not s.topic_id()


@run_by(on_virtual_loop, seed=1)
async def test_if_topic_deletion_is_disabled_requests_and_znodes_are_refused() -> None:
    cluster = VirtualCluster(Simulation(), settings={"delete.topic.enable": "false"})
    await cluster.start()
    s = Scenario(cluster)
    await s.create()
    with pytest.raises(BrokerError, match="TOPIC_DELETION_DISABLED.*delete.topic.enable") as caught:
        await s.admin(FIRST, lambda a: a.delete_topic(TOPIC))
    assert caught.value.code is ErrorCode.TOPIC_DELETION_DISABLED
    path = znodes.delete_topic_path(TOPIC)
    s.zookeeper.make(path)
    await cluster.until(lambda: not s.zookeeper.has(path))
    [controller] = cluster.active_controllers()
    cluster.kill_broker(controller)
    s.zookeeper.make(path)  # for the next controller to find
    await cluster.until(lambda: cluster.active_controllers() not in ([], [controller]))
    await cluster.until(lambda: not s.zookeeper.has(path))
    assert s.topic_id()


@pytest.mark.parametrize("number", [0, 1])
@run_by(play)
async def test_commits_of_a_deleted_topic_do_not_delay_those_of_the_recreated_one(s: Scenario, /, number: int) -> None:
    """If each commit were retried for 10 s in turn, those of the new topic would wait for minutes. Partition 1 no
    longer exists."""

    await s.create(partitions=2)
    world, old = s.cluster.client("consumer"), TopicPartition(TOPIC, number)

    async def consume() -> None:
        async with (
            Producer(s.cluster.bootstrap, world=world) as producer,
            Consumer(
                s.cluster.bootstrap, topics=[TOPIC], group="billing", metadata_max_age_ms=200, world=world
            ) as consumer,
        ):
            await producer.send(TOPIC, b"old", partition=number)
            assert (await anext(consumer)).value == b"old"
            commits = [consumer.commit_nowait({old: 1})]
            await s.recreate()
            commits += [consumer.commit_nowait({old: 1}) for _ in range(20)]
            await producer.send(TOPIC, b"new", partition=0)
            assert (await anext(consumer)).value == b"new"
            began = asyncio.get_running_loop().time()
            await consumer.commit({PARTITION: 1})
            assert asyncio.get_running_loop().time() - began < 5
            ends = await asyncio.gather(*commits, return_exceptions=True)
            assert all(isinstance(end, CommitFailed) and "created again" in str(end) for end in ends[1:])

    await world.process.run(consume())


@run_by(play)
async def test_commits_of_a_deleted_topic_delay_others_only_until_the_deletion_is_known(s: Scenario, /) -> None:
    """If each commit waited a second for the topic to appear, the delays would add up."""

    other = TopicPartition("other", 0)
    await s.create()
    await s.admin(SECOND, lambda a: a.create_topic(other.topic, assignments=[EVERYWHERE]))
    world = s.cluster.client("consumer")

    async def consume() -> None:
        async with (
            Producer(s.cluster.bootstrap, world=world) as producer,
            Consumer(s.cluster.bootstrap, topics=[TOPIC, other.topic], group="billing", world=world) as consumer,
        ):
            for partition in (PARTITION, other):
                await producer.send(partition.topic, b"value", partition=0)
                assert (await anext(consumer)).value == b"value"
            await s.delete()
            commits = [consumer.commit_nowait({PARTITION: 1}) for _ in range(20)]
            began = asyncio.get_running_loop().time()
            await consumer.commit({other: 1})
            assert asyncio.get_running_loop().time() - began < 3
            ends = await asyncio.gather(*commits, return_exceptions=True)
            assert all(isinstance(end, CommitFailed) and "UNKNOWN_TOPIC" in str(end) for end in ends)

    await world.process.run(consume())
