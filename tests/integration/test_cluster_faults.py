"""A cluster of real brokers, some of which are stopped, saturated or killed."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import TopicErrors
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery, RecordMetadata
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import BrokerId
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.deploy.trials.trial import Trial
from minibroker.protocol.model import TopicPartition

DEADLINE_S = 60.0
SESSION_S = 2
SHORT_SESSION = {"zookeeper.session.timeout.ms": str(SESSION_S * 1_000)}


class ClusterFactory(Protocol):
    def __call__(
        self, brokers: int = 3, settings: dict[str, str] | None = None, zookeeper: str | None = None
    ) -> LocalCluster: ...


def lines() -> Iterator[bytes]:
    return (b"line %d" % number for number in itertools.count())


async def until(cluster: LocalCluster, condition: Callable[[ClusterView], bool]) -> ClusterView:
    """Wait until the condition holds; return the view of the cluster."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            view = await asyncio.to_thread(cluster.view)
            if condition(view):
                return view
            await asyncio.sleep(0.05)


def is_whole(view: ClusterView) -> bool:
    return (
        view.controller_id is not None
        and len(view.brokers) == 3
        and not view.under_replicated_partitions()
        and not view.offline_partitions()
    )


async def acknowledged(delivery: Delivery) -> RecordMetadata:
    return await delivery


async def create(cluster: LocalCluster, topic: str, **configs: str) -> None:
    await until(cluster, lambda view: len(view.brokers) == 3)
    async with Admin(cluster.bootstrap()) as admin:
        settings = {name.replace("_", "."): value for name, value in configs.items()}
        await admin.create_topic(topic, partitions=3, replication_factor=3, configs=settings)
    # The next broker asked may not know the topic yet.
    await until(cluster, lambda view: sum(partition.topic == topic for partition in view.partitions) == 3)


def log_lines(cluster: LocalCluster, broker_id: int, pattern: str) -> list[str]:
    text = cluster.log_of(broker_id).read_text()
    return [line for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.slow
async def test_a_controller_stopped_beyond_its_session_is_fenced_resigns_and_rejoins(
    local_cluster: ClusterFactory,
) -> None:
    cluster = local_cluster(settings=SHORT_SESSION)
    await create(cluster, "t")
    before = await until(cluster, is_whole)
    old, old_epoch = before.controller_id, before.controller_epoch
    assert old is not None
    assert old_epoch is not None
    trial = Trial(cluster.bootstrap(), "t", 3, lines(), records_per_second=1_000)
    async with trial.sending():
        await trial.wait_for_acknowledgements(20, DEADLINE_S)
        await asyncio.to_thread(cluster.pause, BrokerId(old))
        # No connection breaks, so only the end of its session reveals the stop.
        after = await until(cluster, lambda view: view.controller_id not in (None, old))
        assert (after.controller_epoch or 0) > old_epoch
        await trial.wait_for_acknowledgements(20, DEADLINE_S)
        await asyncio.to_thread(cluster.resume, BrokerId(old))
        whole = await until(cluster, is_whole)
        await trial.wait_for_acknowledgements(20, DEADLINE_S)
    assert whole.controller_id == after.controller_id
    assert log_lines(cluster, old, rf"broker {old} is no longer the controller")
    assert log_lines(cluster, old, rf"broker {old} is again registered")
    verdict = await trial.verdict()
    assert verdict.flawless, verdict
    assert verdict.failed == 0


@pytest.mark.slow
async def test_a_session_survives_a_broker_that_is_saturated_for_longer(local_cluster: ClusterFactory) -> None:
    cluster = local_cluster(settings=SHORT_SESSION)
    await create(cluster, "flood")
    await until(cluster, is_whole)
    value = bytes(range(256)) * 8
    async with (
        Producer(cluster.bootstrap(), acks=1, batch_size=16_384) as first,
        Producer(cluster.bootstrap(), acks=1, batch_size=16_384) as second,
    ):
        ends_s = time.monotonic() + 4 * SESSION_S
        sent = 0
        while time.monotonic() < ends_s:
            for _ in range(200):
                first.send("flood", value)
                second.send("flood", value)
            sent += 400
            await first.drain()
            await second.drain()
    assert sent > 2_000
    for broker_id in (1, 2, 3):
        assert not log_lines(cluster, broker_id, "again registered|has expired|has not run")
    await until(cluster, is_whole)


@pytest.mark.slow
async def test_a_stopped_follower_leaves_the_isr_and_returns_when_it_has_caught_up(
    local_cluster: ClusterFactory,
) -> None:
    # The session outlives the stop, so only the leader can notice it.
    cluster = local_cluster(settings={"replica.lag.time.max.ms": "1000", "zookeeper.session.timeout.ms": "30000"})
    await create(cluster, "t")
    view = await until(cluster, is_whole)
    leader = view.partitions[TopicPartition("t", 0)].leader_id
    follower = next(b for b in (1, 2, 3) if b not in (leader, view.controller_id))
    trial = Trial(cluster.bootstrap(), "t", 3, lines(), records_per_second=500)
    async with trial.sending():
        await trial.wait_for_acknowledgements(20, DEADLINE_S)
        await asyncio.to_thread(cluster.pause, BrokerId(follower))
        await until(cluster, lambda view: follower not in view.partitions[TopicPartition("t", 0)].isr_nodes)
        acknowledged = len(trial.acknowledged[0])
        await asyncio.to_thread(cluster.resume, BrokerId(follower))
        await until(cluster, is_whole)
        async with asyncio.timeout(DEADLINE_S):
            while len(trial.acknowledged[0]) < acknowledged + 20:
                await asyncio.sleep(0.01)
    verdict = await trial.verdict()
    assert verdict.flawless, verdict


@pytest.mark.slow
async def test_a_broker_that_was_down_removes_a_deleted_topic_when_it_is_back(local_cluster: ClusterFactory) -> None:
    cluster = local_cluster()
    await create(cluster, "doomed")
    view = await until(cluster, is_whole)
    away = next(b for b in (1, 2, 3) if b != view.controller_id)
    directories = {b: cluster.directory / f"broker-{b}" for b in (1, 2, 3)}

    def replicas(broker_id: int) -> list[str]:
        return [path.name for path in directories[broker_id].glob("doomed-*")]

    async with asyncio.timeout(DEADLINE_S):
        while len(replicas(away)) < 3:  # replicas are in the ISR before they have a log
            await asyncio.sleep(0.05)
    await asyncio.to_thread(cluster.kill, BrokerId(away))
    await until(cluster, lambda view: away not in view.brokers)
    async with Admin(cluster.bootstrap(), default_api_timeout_ms=6_000) as admin:
        with pytest.raises(TopicErrors, match=f"broker {away}"):  # the deletion waits for this broker
            await admin.delete_topics(["doomed"])
    async with asyncio.timeout(DEADLINE_S):
        while any(replicas(b) for b in (1, 2, 3) if b != away):
            await asyncio.sleep(0.05)
    assert len(replicas(away)) == 3
    await asyncio.to_thread(cluster.start, BrokerId(away))
    async with asyncio.timeout(DEADLINE_S):
        while replicas(away):
            await asyncio.sleep(0.05)
    await create(cluster, "doomed")
    await until(cluster, is_whole)


@pytest.mark.slow
async def test_writes_need_min_insync_replicas_and_reads_do_not(local_cluster: ClusterFactory) -> None:
    cluster = local_cluster()
    await create(cluster, "strict", min_insync_replicas="3")
    view = await until(cluster, is_whole)
    async with Producer(cluster.bootstrap()) as producer:
        await producer.send("strict", b"while all live", partition=0)
        away = next(b for b in (1, 2, 3) if b != view.partitions[TopicPartition("strict", 0)].leader_id)
        await asyncio.to_thread(cluster.kill, BrokerId(away))
        await until(cluster, lambda view: len(view.partitions[TopicPartition("strict", 0)].isr_nodes) == 2)
        waiting = asyncio.create_task(acknowledged(producer.send("strict", b"while one is away", partition=0)))
        async with Consumer(cluster.bootstrap(), topics=["strict"]) as consumer:
            async for record in consumer:
                assert record.value == b"while all live"
                break
        assert not waiting.done()
        await asyncio.to_thread(cluster.start, BrokerId(away))
        metadata = await waiting
        assert metadata.offset == 1
