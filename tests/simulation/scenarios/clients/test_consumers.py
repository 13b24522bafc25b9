"""Consumers whose topic is recreated while they read it, or whose leader was deposed and does not know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.client.admin import Admin
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.consumer import Consumer
from minibroker.client.errors import InvalidSetting
from minibroker.client.fetching.records import Record
from minibroker.client.producer import Producer
from minibroker.controller.handlers import steps
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.spark_jobs.source.look_ups import LookUps, Topics
from minibroker.spark_jobs.source.offsets import OffsetRange, Offsets, TopicOffsets, losses
from minibroker.spark_jobs.source.options import Subscription
from minibroker.spark_jobs.source.reading import RangeFetcher, ReadSettings
from tests.running import run_by

P0, P1, P2 = (TopicPartition("t", index) for index in range(3))


class Scene:
    """Three brokers, a topic, and clients on hosts of their own."""

    def __init__(self) -> None:
        self.cluster = VirtualCluster(Simulation(), settings=NO_OFFSETS_TOPIC)
        self.network = self.cluster.simulation.network
        self.main = self.cluster.client("main")

    async def start(self, partitions: int = 1) -> None:
        await self.cluster.start()
        await self.create(partitions)

    def topic_id(self, name: str = "t") -> str:
        return znodes.decode_topic(name, self.cluster.simulation.zookeeper.data(znodes.topic_path(name))).topic_id

    def replicas(self, name: str) -> set[int]:
        """Return the brokers with a replica of that topic; none if there is no such topic."""
        path = znodes.topic_path(name)
        zookeeper = self.cluster.simulation.zookeeper
        if not zookeeper.has(path):
            return set()
        return {
            broker
            for replicas in znodes.decode_topic(name, zookeeper.data(path)).partitions.values()
            for broker in replicas
        }

    async def create(
        self, partitions: int = 1, *, again: bool = False, name: str = "t", replication_factor: int = 3
    ) -> None:
        async def create() -> None:
            async with Admin(self.cluster.bootstrap, world=self.main) as admin:
                if again:
                    await admin.delete_topic(name)
                async with asyncio.timeout(30):
                    while not await self._is_created(admin, name, partitions, replication_factor):
                        await asyncio.sleep(0.05)

        await self.main.process.run(create())

    @staticmethod
    async def _is_created(admin: Admin, name: str, partitions: int, replication_factor: int) -> bool:
        try:
            await admin.create_topic(name, partitions=partitions, replication_factor=replication_factor)
        except BrokerError as error:
            if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
            return False  # the old topic is still being deleted
        return True

    async def send(self, first: int, count: int, partition: int = 0) -> None:
        """Send numbers as records with acks=all."""

        async def send() -> None:
            async with Producer(self.cluster.bootstrap, acks="all", world=self.main) as producer:
                for number in range(first, first + count):
                    await producer.send("t", b"%d" % number, partition=partition)

        await self.main.process.run(send())

    async def send_batch(self, first: int, count: int, partition: int = 0) -> None:
        """As `send`, in a single batch."""

        async def send() -> None:
            async with Producer(self.cluster.bootstrap, acks="all", linger_ms=50, world=self.main) as producer:
                for number in range(first, first + count):
                    producer.send("t", b"%d" % number, partition=partition)
                await producer.flush()

        await self.main.process.run(send())

    async def depose(self) -> int:
        """Isolate the leader from all but clients, wait for another to be elected, and return the deposed one."""
        deposed = self.cluster.state(P0).leader
        self.cut_off(deposed)
        await self.cluster.until(lambda: self.cluster.state(P0).leader not in (-1, deposed))
        return deposed

    def cut_off(self, broker_id: int) -> None:
        """Isolate that broker from the other brokers and ZooKeeper, not from clients."""
        for other in self.cluster.broker_ids:
            if other != broker_id:
                self.separate(host_name(broker_id), host_name(other))
        self.cluster.simulation.zookeeper.cut(host_name(broker_id))

    def separate(self, one: str, other: str) -> None:
        self.network.block(one, other)
        self.network.block(other, one)

    def join(self, one: str, other: str) -> None:
        self.network.unblock(one, other)
        self.network.unblock(other, one)

    def client_of(self, broker_id: int, name: str = "fresh") -> VirtualWorld:
        """Return a client that can reach only that broker."""
        world = self.cluster.client(name)
        for other in self.cluster.broker_ids:
            if other != broker_id:
                self.separate(name, host_name(other))
        return world

    def reunite(self, name: str = "fresh") -> None:
        """Let that client reach every broker."""
        for broker_id in self.cluster.broker_ids:
            self.join(name, host_name(broker_id))


def play(scenario: Callable[[Scene], Awaitable[None]], partitions: int = 1, seed: int = 1) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.start(partitions)
        await scenario(scene)

    run(main(), seed=seed)


def numbers(records: list[Record]) -> list[int]:
    return [int(record.value or b"") for record in records]


async def take(consumer: Consumer, count: int, within_s: float = 60) -> list[Record]:
    async with asyncio.timeout(within_s):
        return [await anext(consumer) for _ in range(count)]


async def silence(consumer: Consumer, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await anext(consumer)


# --- The topic is recreated ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", ["by records", "by batches", "paused"])
@run_by(play)
async def test_a_topic_recreated_in_the_middle_of_a_batch_is_read_from_its_beginning(
    scene: Scene, /, taken: str
) -> None:
    await scene.send_batch(0, 10)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=scene.main) as consumer:
            assert numbers(await take(consumer, 3)) == [0, 1, 2]
            if taken == "paused":
                consumer.pause(P0)
            await scene.create(again=True)
            await scene.send(100, 5)
            state = consumer._partitions.states[P0]
            await scene.cluster.until(lambda: state.generation > 1 and state.position is not None)
            if taken == "by batches":
                values: list[int] = []
                batches = consumer.batches()
                while len(values) < 5:
                    values += [int(value or b"") for value in (await anext(batches)).values]
                assert values == [100, 101, 102, 103, 104]
                return
            consumer.resume(P0)
            assert numbers(await take(consumer, 5)) == [100, 101, 102, 103, 104]

    await scene.main.process.run(consume())


@run_by(play, partitions=3)
async def test_partitions_that_a_recreated_topic_lacks_leave_the_assignment(scene: Scene, /) -> None:
    await scene.send(0, 4, partition=2)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=scene.main) as consumer:
            await take(consumer, 4)
            await scene.create(2, again=True)
            await scene.send(100, 3, partition=1)
            assert numbers(await take(consumer, 3)) == [100, 101, 102]
            assert consumer.assignment() == [P0, P1]
            with pytest.raises(InvalidSetting, match="not assigned"):
                consumer.seek(P2, 0)

    await scene.main.process.run(consume())


@run_by(play)
async def test_additional_partitions_of_a_recreated_topic_are_read_from_their_beginning(scene: Scene, /) -> None:
    await scene.send(0, 2)

    async def consume() -> None:
        async with Consumer(
            scene.cluster.bootstrap, topics=["t"], auto_offset_reset="latest", world=scene.main
        ) as consumer:
            consumer.seek(P0, 0)
            await take(consumer, 2)
            await scene.create(3, again=True)
            await scene.send(100, 2, partition=0)
            await scene.send(200, 2, partition=2)
            assert sorted(numbers(await take(consumer, 4))) == [100, 101, 200, 201]

    await scene.main.process.run(consume())


@run_by(play, partitions=3)
async def test_a_named_partition_that_is_gone_is_reported_and_read_when_it_is_back(scene: Scene, /) -> None:
    await scene.send(0, 2, partition=2)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, partitions=[P2], world=scene.main) as consumer:
            await take(consumer, 2)
            await scene.create(1, again=True)
            with pytest.raises(BrokerError, match="t has no partition 2") as caught:
                await take(consumer, 1)
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            await scene.create(3, again=True)
            await scene.send(100, 2, partition=2)
            assert numbers(await take(consumer, 2)) == [100, 101]

    await scene.main.process.run(consume())


@run_by(play)
async def test_without_a_reset_policy_a_recreated_topic_is_an_error_until_a_position_is_chosen(scene: Scene, /) -> None:
    await scene.send(0, 5)

    async def consume() -> None:
        async with Consumer(
            scene.cluster.bootstrap, topics=["t"], auto_offset_reset="none", world=scene.main
        ) as consumer:
            consumer.seek(P0, 0)
            await take(consumer, 2)
            await scene.create(again=True)
            await scene.send(100, 3)
            for expected in ("created again", "has no position", "has no position"):
                with pytest.raises(BrokerError, match=expected) as caught:
                    await take(consumer, 10)
                assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
            consumer.seek(P0, 1)
            assert numbers(await take(consumer, 2)) == [101, 102]

    await scene.main.process.run(consume())


# --- The leader was deposed ---------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["leader doubts itself", "leader does not doubt itself"])
def _leaders_doubt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test also with leaders that do not doubt themselves without ZooKeeper: clients must not rely on that."""
    if not request.param:
        monkeypatch.setattr(ReplicaLifecycle, "_may_be_deposed", lambda self, told_in_broker_epoch: False)


@pytest.mark.usefixtures("_leaders_doubt")
@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
@run_by(play)
async def test_a_consumer_does_not_believe_a_deposed_leader_that_its_position_is_beyond_the_end(
    scene: Scene, /, reset: Any
) -> None:
    await scene.send(0, 12)
    deposed = await scene.depose()
    await scene.send(12, 8)
    world = scene.client_of(deposed)

    async def consume() -> None:
        bootstrap = f"{host_name(deposed)}:9092"
        async with Consumer(bootstrap, topics=["t"], auto_offset_reset=reset, world=world) as consumer:
            consumer.seek(P0, 15)
            await silence(consumer, 20)
            assert await consumer.position(P0) == 15
            scene.reunite()
            assert numbers(await take(consumer, 5)) == [15, 16, 17, 18, 19]

    await world.process.run(consume())


@run_by(play)
async def test_a_position_with_its_leader_epoch_is_not_read_from_an_older_leader(scene: Scene, /) -> None:
    await scene.send(0, 12)
    deposed = await scene.depose()
    await scene.send(12, 8)

    async def first() -> tuple[int, int | None]:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=scene.main) as consumer:
            assert consumer.position_epoch(P0) is None
            await take(consumer, 12)
            early = consumer.position_epoch(P0)
            await take(consumer, 3)
            epoch = consumer.position_epoch(P0)
            assert early is not None
            assert epoch is not None
            assert epoch > early
            return await consumer.position(P0), epoch

    position, epoch = await scene.main.process.run(first())
    world = scene.client_of(deposed)

    async def second() -> None:
        async with Consumer(f"{host_name(deposed)}:9092", topics=["t"], world=world) as consumer:
            consumer.seek(P0, position, epoch)
            with pytest.raises(BrokerError, match=f"leader epoch {epoch}") as caught:
                await take(consumer, 1)
            assert caught.value.code is ErrorCode.UNKNOWN_LEADER_EPOCH
            scene.reunite()
            assert numbers(await take(consumer, 5)) == [15, 16, 17, 18, 19]

    await world.process.run(second())


@run_by(play)
async def test_a_position_beyond_the_end_is_reset_once_another_broker_confirms_the_leader(
    scene: Scene, /, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.send(0, 5)
    leader = scene.cluster.state(P0).leader
    witness = next(other for other in scene.cluster.broker_ids if other != leader)
    world = scene.client_of(leader)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=world) as consumer:
            consumer.seek(P0, 15)
            await silence(consumer, 5)
            scene.join("fresh", host_name(witness))
            assert numbers(await take(consumer, 5, within_s=10)) == [0, 1, 2, 3, 4]
            assert "t-0 has no offset 15, which is next: its log ends at 5; going on at its beginning" in caplog.text

    await world.process.run(consume())


# --- Spark jobs ---------------------------------------------------------------------------------------------------


def _fetcher(
    scene: Scene, deposed: int, world: VirtualWorld, start: int, leader_epoch: int, *, fails: bool
) -> RangeFetcher:
    wanted = OffsetRange("t", scene.topic_id(), 0, start, 20, leader_epoch)
    return RangeFetcher(ReadSettings(f"{host_name(deposed)}:9092", "task", False, fails), wanted, 120.0, world)


async def _read(fetcher: RangeFetcher) -> list[int]:
    values: list[int] = []
    await fetcher.start()
    try:
        while (fetched := await fetcher.next()) is not None:
            first_offset, batches = fetched
            for batch in batches:
                for offset, value in zip(batch.offsets, batch.values, strict=True):
                    if offset >= first_offset:
                        values.append(int(value or b""))
    finally:
        await fetcher.close()
    return values


@pytest.mark.usefixtures("_leaders_doubt")
@pytest.mark.parametrize("start", [4, 15])
@pytest.mark.parametrize("leader_epoch", [-1, 1], ids=["without epochs", "with epochs"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails on loss", "skips lost records"])
@run_by(play)
async def test_a_task_that_reaches_only_a_deposed_leader_skips_nothing(
    scene: Scene, /, start: int, leader_epoch: int, fails: bool
) -> None:
    await scene.send(0, 12)
    deposed = await scene.depose()
    await scene.send(12, 8)
    world = scene.client_of(deposed)
    reading = world.process.start(_read(_fetcher(scene, deposed, world, start, leader_epoch, fails=fails)))
    await asyncio.sleep(30)
    assert not reading.done()
    scene.reunite()
    assert await reading == list(range(start, 20))


@pytest.fixture
def _metadata_arrives_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send metadata in parts with pauses between them, as for thousands of partitions."""
    monkeypatch.setattr(steps, "PARTITIONS_AT_ONCE", 1)
    monkeypatch.setattr(steps, "BREATH_S", 10.0)


async def _restart_all_until_they_know_some_topics(scene: Scene) -> None:
    cluster = scene.cluster
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    await asyncio.gather(*map(cluster.start_broker, cluster.broker_ids))
    await cluster.until(
        lambda: all(
            len(finish_at_once(cluster.broker(b)._metadata.describe([])).brokers) == 3 for b in cluster.broker_ids
        )
    )
    assert all(cluster.broker(b)._metadata.topic_id("t") is None for b in cluster.broker_ids)


@pytest.mark.usefixtures("_metadata_arrives_slowly")
@pytest.mark.parametrize("fails", [True, False], ids=["fails on loss", "skips lost records"])
@run_by(play)
async def test_a_task_that_asks_brokers_with_incomplete_metadata_skips_nothing(scene: Scene, /, fails: bool) -> None:
    await scene.create(partitions=3, name="earlier")
    await scene.send(0, 20)
    wanted = OffsetRange("t", scene.topic_id(), 0, 0, 20, 0)
    settings = ReadSettings(scene.cluster.bootstrap, "task", False, fails)
    await _restart_all_until_they_know_some_topics(scene)
    world = scene.cluster.client("fresh")
    assert await world.process.run(_read(RangeFetcher(settings, wanted, 120.0, world))) == list(range(20))


@pytest.mark.usefixtures("_metadata_arrives_slowly")
@pytest.mark.parametrize("is_named", [True, False], ids=["one topic", "all topics"])
@run_by(play)
async def test_an_administrator_waits_for_brokers_with_incomplete_metadata(scene: Scene, /, is_named: bool) -> None:
    await scene.create(partitions=3, name="earlier")
    await _restart_all_until_they_know_some_topics(scene)
    world = scene.cluster.client("fresh")

    async def describe() -> list[str]:
        async with Admin(scene.cluster.bootstrap, world=world) as admin:
            return list(await admin.describe_topics(["t"] if is_named else None))

    assert await world.process.run(describe()) == (["t"] if is_named else ["earlier", "t"])


@pytest.mark.parametrize("with_epochs", [False, True])
@run_by(play)
async def test_the_driver_does_not_believe_a_deposed_leader_whose_log_ends_before_the_stream(
    scene: Scene, /, with_epochs: bool
) -> None:
    await scene.send(0, 12)
    deposed = await scene.depose()
    await scene.send(12, 8)
    world = scene.client_of(deposed)
    epochs = {0: scene.cluster.state(P0).leader_epoch} if with_epochs else {}
    since = {"t": TopicOffsets(scene.topic_id(), {0: 20}, epochs)}

    async def look() -> Offsets:
        async with _look_ups(f"{host_name(deposed)}:9092", world) as look_ups:
            return await look_ups.latest(Subscription(topics=("t",)), is_lenient=True, since=since)

    looking = world.process.start(look())
    await asyncio.sleep(30)
    assert not looking.done()
    scene.reunite()
    assert losses(since, await looking) == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["another id", "unknown"])
@run_by(play)
async def test_the_driver_does_not_believe_a_single_broker_that_a_topic_is_gone_or_recreated(
    scene: Scene, /, is_gone: bool
) -> None:
    if not is_gone:
        await scene.create(name="u", replication_factor=2)
    outsider = (set(scene.cluster.broker_ids) - scene.replicas("u")).pop()
    scene.cut_off(outsider)
    await scene.cluster.until(lambda: not scene.cluster.simulation.zookeeper.has(znodes.broker_path(outsider)))
    await scene.create(name="u", replication_factor=2, again=not is_gone)
    world = scene.client_of(outsider)
    since = {"u": TopicOffsets(scene.topic_id("u"), {0: 0})}

    async def look() -> Offsets:
        async with _look_ups(f"{host_name(outsider)}:9092", world) as look_ups:
            return await look_ups.latest(Subscription(topics=("u",)), is_lenient=True, since=since)

    looking = world.process.start(look())
    await asyncio.sleep(30)
    assert not looking.done()
    scene.reunite()
    assert losses(since, await looking) == []


@run_by(play)
async def test_the_driver_names_the_topic_that_is_deleted_between_its_two_requests(scene: Scene, /) -> None:
    await scene.create(name="u")
    world = scene.cluster.client("driver")
    deleted: list[str] = []

    async def look() -> Offsets:
        async with _look_ups(scene.cluster.bootstrap, world) as look_ups:
            topics = look_ups.topics

            async def topics_and_delete(*arguments: Any, **options: Any) -> Topics:
                found = await topics(*arguments, **options)
                if not deleted:
                    async with Admin(scene.cluster.bootstrap, world=world) as admin:
                        await admin.delete_topic("u")
                    deleted.append("u")
                return found

            look_ups.topics = topics_and_delete  # type: ignore[method-assign]
            return await look_ups.latest(Subscription(topics=("u",)))

    with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION: topic u"):
        await world.process.run(look())


@asynccontextmanager
async def _look_ups(bootstrap: str, world: VirtualWorld) -> AsyncIterator[LookUps]:
    runtime = ClientRuntime(
        bootstrap,
        client_id="driver",
        request_timeout_ms=30_000,
        retry_backoff_ms=100,
        metadata_max_age_ms=300_000,
        world=world,
        on_crash=lambda error: None,
    )
    await runtime.start()
    try:
        yield LookUps(runtime, 120.0)
    finally:
        await runtime.close()
