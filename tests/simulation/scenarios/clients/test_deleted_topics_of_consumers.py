"""Consumers of several topics when one is deleted: they read the others, and the deleted one if it is recreated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.waiting import until

KEPT, GONE = TopicPartition("kept", 0), TopicPartition("gone", 0)
WAYS: dict[str, dict[str, Any]] = {
    "topics": {"topics": ["kept", "gone"]},
    "pattern": {"pattern": "kept|gone"},
    "partitions": {"partitions": [KEPT, GONE]},
}


class Scene:
    """A cluster with both topics, and a client."""

    def __init__(self) -> None:
        self.cluster = VirtualCluster(
            Simulation(), settings={"offsets.topic.num.partitions": "4", "group.initial.rebalance.delay.ms": "0"}
        )
        self.world = self.cluster.client("user")
        self.admin = Admin(self.cluster.bootstrap, world=self.world)
        self.producer = Producer(self.cluster.bootstrap, world=self.world)

    def consumer(self, way: str, **settings: Any) -> Consumer:
        settings = {"enable_auto_commit": settings.get("group") is not None, **WAYS[way], **settings}
        return Consumer(self.cluster.bootstrap, world=self.world, **settings)


def play(program: Callable[[Scene], Awaitable[None]]) -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.cluster.start()

        async def inside() -> None:
            async with scene.admin, scene.producer:
                for topic in ("kept", "gone"):
                    await scene.admin.create_topic(topic, replication_factor=3)
                await program(scene)

        await scene.world.process.run(inside())

    run(scenario())


async def read(consumer: Consumer, count: int) -> list[tuple[str, bytes | None]]:
    """Return `count` records as pairs of topic and value; the iteration must raise nothing."""
    async with asyncio.timeout(60):
        return sorted([(record.topic, record.value) for record in [await anext(consumer) for _ in range(count)]])


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the topics and partitions that warnings report as gone. No other warning is allowed, except for commits to
    the deleted topic."""
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    texts = [text for text in texts if "gone-0: UNKNOWN_TOPIC_OR_PARTITION: committing offset" not in text]
    assert all("does not exist any more" in text for text in texts), texts
    return [text.partition(": ")[2].partition(" does not")[0] for text in texts]


@pytest.mark.parametrize("reset", ["earliest", "latest"])
@pytest.mark.parametrize("group", [None, "billing"])
@pytest.mark.parametrize("way", WAYS)
def test_a_consumer_reads_on_without_a_deleted_topic_and_starts_over_when_it_is_recreated(
    way: str, group: str | None, reset: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(scene: Scene) -> None:
        async with scene.consumer(way, auto_offset_reset=reset, group=group) as consumer:
            await asyncio.gather(*(consumer.position(each) for each in (KEPT, GONE)) if group is None else ())
            while len(consumer.assignment()) < 2:
                await consumer.poll(100)
            await asyncio.gather(*(consumer.position(each) for each in (KEPT, GONE)))
            for topic in ("kept", "gone"):
                for value in (b"0", b"1"):
                    await scene.producer.send(topic, value)
            assert await read(consumer, 4) == [("gone", b"0"), ("gone", b"1"), ("kept", b"0"), ("kept", b"1")]
            await scene.admin.delete_topic("gone")
            for number in range(60):
                await scene.producer.send("kept", b"%d" % number)
                assert await read(consumer, 1) == [("kept", b"%d" % number)]
                await asyncio.sleep(0.5)
            assert consumer.subscription() == {"topics": ["gone", "kept"], "pattern": ["kept"], "partitions": []}[way]
            assert (GONE in consumer.assignment()) is (way == "partitions")
            assert "other members" not in str(consumer.status())
            assert told(caplog) == ["topic gone"]
            await scene.admin.create_topic("gone", replication_factor=3)
            await scene.producer.send("gone", b"new")
            await scene.producer.send("kept", b"last")
            assert await read(consumer, 2) == [("gone", b"new"), ("kept", b"last")]

    play(program)
    assert len(told(caplog)) == 1


@run_by(play)
async def test_a_consumer_without_any_topic_raises_every_10_s_and_reads_a_new_topic_at_once(scene: Scene, /) -> None:
    async with scene.consumer("topics") as consumer:
        loop = asyncio.get_running_loop()
        for topic in ("kept", "gone"):
            await scene.admin.delete_topic(topic)
        raised: list[float] = []
        for _ in range(4):
            with pytest.raises(BrokerError, match="kept|gone") as caught:
                await anext(consumer)
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            raised.append(loop.time())
        assert 9 < raised[2] - raised[0] < 12
        assert raised[1] - raised[0] < 1, "each topic is named"
        assert "there is no topic kept, gone" in str(consumer.status())
        await scene.admin.create_topic("gone", replication_factor=3)
        await scene.producer.send("gone", b"new")
        async with asyncio.timeout(3):
            assert await read(consumer, 1) == [("gone", b"new")]


@pytest.mark.parametrize("way", WAYS)
@run_by(play)
async def test_topics_deleted_and_recreated_at_any_time_are_read_once_and_in_order(scene: Scene, /, way: str) -> None:
    random = Random(way)
    got: list[str] = []
    lasting: dict[str, list[str]] = {"kept": [], "gone": []}
    exists = dict.fromkeys(lasting, True)

    async def consume(consumer: Consumer) -> None:
        while True:
            got.append(((await anext(consumer)).value or b"").decode())

    async with scene.consumer(way) as consumer:
        reading = asyncio.ensure_future(consume(consumer))
        for number in range(40):
            topic = random.choice(["kept", "gone", "gone"])
            if not exists[topic]:
                await scene.admin.create_topic(topic, replication_factor=3)
                exists[topic] = True
            elif topic == "gone" and random.random() < 0.3:
                await scene.admin.delete_topic(topic)
                lasting[topic], exists[topic] = [], False
            else:
                lasting[topic].append(f"{topic} {number}")
                await scene.producer.send(topic, lasting[topic][-1].encode())
            await asyncio.sleep(random.choice([0.0, 0.01, 0.5, 3, 20, 20]))
        everything = [*lasting["kept"], *lasting["gone"]]
        await until(lambda: set(everything) <= set(got) or reading.done(), 60)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled(), "nothing was raised"
        assert len(got) == len(set(got))
        for topic, values in lasting.items():
            assert [value for value in got if value in values] == values, topic


@run_by(play)
async def test_a_consumer_that_cannot_learn_whether_a_topic_is_gone_asks_at_intervals(
    scene: Scene, /, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a pause between attempts this test would not end: connections are refused at once, so virtual time would
    stand still."""

    async with scene.consumer("topics") as consumer:
        await scene.producer.send("gone", b"1")
        await read(consumer, 1)
        await scene.admin.delete_topic("gone")
        seem_gone = [state for state in consumer._partitions.states.values() if state.partition == GONE]
        await scene.cluster.until(lambda: seem_gone[0].absent_since is not None)
        for broker_id in scene.cluster.broker_ids:
            scene.cluster.kill_broker(broker_id)
        await asyncio.sleep(30)
        assert not seem_gone[0].is_gone
        await scene.cluster.start()
        await scene.cluster.until(lambda: "topic gone does not exist any more" in caplog.text)
