"""Records deleted on request (KIP-107): when the deletion is acknowledged, and that they do not come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import PartitionErrors
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import connect as connect_kafka
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.apis import DELETE_RECORDS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.kafka.data import PRODUCE
from minibroker.protocol.messages import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, encode_batch
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.control.test_forwarding import connect, cut
from tests.simulation.scenarios.helpers import replica_of, replicas_of, with_client
from tests.simulation.scenarios.logs.test_retention import P0, produce, starts

LONG_SESSION = {"zookeeper.session.timeout.ms": "60000", "replica.lag.time.max.ms": "60000"}
"""Long enough for a paused replica to stay in the ISR."""


class Scene:
    """Three brokers, and a topic of one partition with 40 records in a batch each."""

    def __init__(self, cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        self.cluster = cluster
        self.world = world
        self.admin = admin

    @property
    def leader(self) -> int:
        return self.cluster.state(P0).leader

    @property
    def followers(self) -> list[int]:
        return [broker_id for broker_id in self.cluster.broker_ids if broker_id != self.leader]

    def start_of(self, broker_id: int) -> int:
        return replica_of(self.cluster, broker_id, P0).log.log_start_offset

    async def first_offset(self) -> int:
        """Return the offset at which a new consumer begins."""
        async with Consumer(self.cluster.bootstrap, partitions=[P0], world=self.world) as consumer:
            return (await anext(consumer)).offset

    async def only_one_left(self, broker_id: int) -> None:
        for other in self.cluster.broker_ids:
            if other != broker_id and other in self.cluster.living():
                self.cluster.kill_broker(other)
        self.cluster.resume_broker(broker_id)
        await self.cluster.until(lambda: self.leader == broker_id)


def play(
    program: Callable[[Scene], Awaitable[None]],
    settings: dict[str, str] | None = None,
    *,
    min_insync_replicas: int = 2,
    unclean: bool = False,
) -> None:
    async def client(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Admin(cluster.bootstrap, world=world, default_api_timeout_ms=10_000) as admin:
            configs = {
                "min.insync.replicas": str(min_insync_replicas),
                "unclean.leader.election.enable": str(unclean).lower(),
            }
            await admin.create_topic("orders", partitions=1, replication_factor=3, configs=configs)
            await produce(cluster, world, 40)
            await program(Scene(cluster, world, admin))

    with_client(client, settings=settings)


@run_by(play)
async def test_every_replica_begins_where_the_answer_says_and_so_do_consumers(scene: Scene, /) -> None:
    assert await scene.admin.delete_records({P0: 7}) == {P0: 7}
    assert starts(scene.cluster) == [7, 7, 7]
    assert await scene.first_offset() == 7
    assert await scene.admin.delete_records({P0: 3}) == {P0: 7}
    assert await scene.admin.delete_records({P0: -1}) == {P0: 40}
    await produce(scene.cluster, scene.world, 1)
    assert await scene.first_offset() == 40


@run_by(play)
async def test_a_consumer_whose_position_was_deleted_logs_how_much_it_missed(
    scene: Scene, /, caplog: pytest.LogCaptureFixture
) -> None:
    async with Consumer(scene.cluster.bootstrap, partitions=[P0], world=scene.world) as consumer:
        consumer.seek(P0, 5)
        await scene.admin.delete_records({P0: 20})
        with caplog.at_level(logging.WARNING, "minibroker.client"):
            while (await anext(consumer)).offset < 20:  # records that it had already fetched
                pass
        consumer.seek(P0, 5)
        assert (await anext(consumer)).offset == 20
    assert "15 records of orders-0 were deleted unread" in caplog.text


@run_by(play)
async def test_uncommitted_records_cannot_be_deleted(scene: Scene, /) -> None:
    with pytest.raises(PartitionErrors) as raised:
        await scene.admin.delete_records({P0: 41})
    error = raised.value.errors[P0]
    assert isinstance(error, BrokerError)
    assert error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert "offset 41 of orders-0, whose committed records end at 40" in str(error)
    assert starts(scene.cluster) == [0, 0, 0]


@pytest.mark.parametrize(("policy", "refused"), [("compact", True), ("compact,delete", False), ("delete", False)])
@run_by(play)
async def test_records_of_a_topic_that_is_compacted_alone_are_not_deleted(
    scene: Scene, /, policy: str, refused: bool
) -> None:
    await scene.admin.create_topic("table", partitions=1, configs={"cleanup.policy": policy})
    partition = TopicPartition("table", 0)
    async with Producer(scene.cluster.bootstrap, world=scene.world) as producer:
        await producer.send("table", b"value", key=b"key")
    if not refused:
        assert await scene.admin.delete_records({partition: -1}) == {partition: 1}
        return
    with pytest.raises(PartitionErrors) as raised:
        await scene.admin.delete_records({partition: -1})
    error = raised.value.errors[partition]
    assert isinstance(error, BrokerError)
    assert error.code is ErrorCode.POLICY_VIOLATION
    for told in ("topic table", "cleanup.policy=compact,", "a record without a value", "compact,delete"):
        assert told in str(raised.value)
    assert "may yet" not in str(raised.value)
    async with Consumer(scene.cluster.bootstrap, partitions=[partition], world=scene.world) as consumer:
        assert (await anext(consumer)).offset == 0


@run_by(play, settings=LONG_SESSION)
async def test_a_timeout_says_that_records_may_yet_be_deleted_and_a_retry_deletes_them(scene: Scene, /) -> None:
    away = scene.followers[0]
    scene.cluster.pause_broker(away)
    with pytest.raises(PartitionErrors) as raised:
        await scene.admin.delete_records({P0: 7})
    error = raised.value.errors[P0]
    assert isinstance(error, BrokerError)
    assert error.code is ErrorCode.REQUEST_TIMED_OUT
    assert "may yet be deleted" in str(error)
    assert scene.start_of(scene.leader) == 7
    scene.cluster.resume_broker(away)
    assert await scene.admin.delete_records({P0: 7}) == {P0: 7}
    assert starts(scene.cluster) == [7, 7, 7]


@run_by(play, settings={"zookeeper.session.timeout.ms": "4000"})
async def test_a_replica_that_leaves_the_isr_is_waited_for_no_longer(scene: Scene, /) -> None:
    scene.cluster.pause_broker(scene.followers[0])
    assert await scene.admin.delete_records({P0: 7}) == {P0: 7}
    assert len(scene.cluster.state(P0).isr) == 2


@run_by(play, settings=LONG_SESSION)
async def test_a_deletion_is_retried_at_the_next_leader_if_the_first_dies_before_replication(scene: Scene, /) -> None:
    leader, paused = scene.leader, scene.followers
    for broker_id in paused:
        scene.cluster.pause_broker(broker_id)
    deletion = asyncio.create_task(scene.admin.delete_records({P0: 7}))
    await scene.cluster.until(lambda: scene.start_of(leader) == 7)
    scene.cluster.kill_broker(leader)
    for broker_id in paused:
        scene.cluster.resume_broker(broker_id)
    assert await deletion == {P0: 7}
    assert scene.leader != leader
    assert [scene.start_of(broker_id) for broker_id in paused] == [7, 7]
    assert await scene.first_offset() == 7


@pytest.mark.parametrize("doubts", [True, False], ids=["doubts itself", "does not doubt itself"])
def test_an_unaware_deposed_leader_acknowledges_no_deletion(doubts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not doubts:
        monkeypatch.setattr(ReplicaLifecycle, "_may_be_deposed", lambda self, told_in_broker_epoch: False)

    async def program(scene: Scene) -> None:
        deposed = scene.leader
        connection = await connect(scene.world, deposed)
        for other in scene.followers:
            cut(scene.cluster, host_name(deposed), host_name(other))
        scene.cluster.simulation.zookeeper.cut(host_name(deposed))
        await scene.cluster.until(lambda: scene.leader not in (-1, deposed))
        assert replica_of(scene.cluster, deposed, P0).is_leader
        topic = DeleteRecordsTopic("orders", [DeleteRecordsPartition(0, 7)])
        response = await connection.request(DELETE_RECORDS, DeleteRecordsRequest([topic], 3_000), timeout_s=10)
        [answer] = response.topics[0].partitions
        expected = ErrorCode.NOT_LEADER_OR_FOLLOWER if doubts else ErrorCode.REQUEST_TIMED_OUT
        assert (answer.error_code, answer.low_watermark) == (expected, -1)
        assert (scene.start_of(deposed), scene.start_of(scene.leader)) == (0 if doubts else 7, 0)
        connection.close()

    play(program)


@pytest.mark.parametrize("is_follower_paused", [False, True])
@run_by(play, settings=LONG_SESSION)
async def test_a_deletion_with_timeout_0_is_confirmed_if_all_replicas_are_there(
    scene: Scene, /, is_follower_paused: bool
) -> None:
    """With one replica, Kafka has done it by then, because it does not wait for the disk. librdkafka relies on that."""

    if is_follower_paused:
        scene.cluster.pause_broker(scene.followers[0])
    connection = await connect(scene.world, scene.leader)
    topic = DeleteRecordsTopic("orders", [DeleteRecordsPartition(0, 7)])
    response = await connection.request(DELETE_RECORDS, DeleteRecordsRequest([topic], 0), timeout_s=2)
    [answer] = response.topics[0].partitions
    expected = (ErrorCode.REQUEST_TIMED_OUT, -1) if is_follower_paused else (ErrorCode.NONE, 7)
    assert (answer.error_code, answer.low_watermark) == expected
    assert scene.start_of(scene.leader) == 7
    connection.close()


@run_by(play)
async def test_a_recreated_topic_keeps_its_records(scene: Scene, /) -> None:
    old_id = (await scene.admin.describe_topic("orders")).topic_id
    await scene.admin.delete_topic("orders")
    await scene.cluster.until(lambda: not scene.cluster.simulation.zookeeper.has(znodes.topic_path("orders")))
    await scene.admin.create_topic("orders", partitions=1, replication_factor=3)
    await produce(scene.cluster, scene.world, 10)
    connection = await connect(scene.world, scene.leader)
    topic = DeleteRecordsTopic("orders", [DeleteRecordsPartition(0, 7)], old_id)
    response = await connection.request(DELETE_RECORDS, DeleteRecordsRequest([topic], 3_000), timeout_s=10)
    assert response.topics[0].partitions[0].error_code == ErrorCode.INCONSISTENT_TOPIC_ID
    assert starts(scene.cluster) == [0, 0, 0]
    connection.close()


# --- The promise: records acknowledged as deleted are not served again ----------------------------------------------


def replica_that_was_paused_takes_over() -> None:
    async def program(scene: Scene) -> None:
        away = scene.followers[0]
        scene.cluster.pause_broker(away)
        try:
            await scene.admin.delete_records({P0: 7})
        except PartitionErrors:
            return  # nothing was promised
        await scene.only_one_left(away)
        assert await scene.first_offset() == 7

    play(program, LONG_SESSION, min_insync_replicas=1)


def all_are_killed_at_once() -> None:
    async def program(scene: Scene) -> None:
        await scene.admin.delete_records({P0: 7})
        for broker_id in scene.cluster.broker_ids:
            scene.cluster.kill_broker(broker_id)
        await scene.cluster.start()
        assert await scene.first_offset() == 7

    play(program)


def replica_that_was_dead_takes_over_when_it_has_joined() -> None:
    async def program(scene: Scene) -> None:
        away = scene.followers[0]
        scene.cluster.kill_broker(away)
        await scene.admin.delete_records({P0: 7})
        await scene.cluster.start_broker(away)
        await scene.cluster.until(lambda: away in scene.cluster.state(P0).isr)
        await scene.only_one_left(away)
        assert await scene.first_offset() == 7

    play(program, min_insync_replicas=1)


def replica_that_is_eligible_takes_over() -> None:
    async def program(scene: Scene) -> None:
        leader, away = scene.leader, scene.followers
        for broker_id in away:
            scene.cluster.kill_broker(broker_id)
        await scene.cluster.until(lambda: scene.cluster.state(P0).isr == (leader,))
        try:
            await scene.admin.delete_records({P0: 7})
        except PartitionErrors as failed:
            error = failed.errors[P0]
            assert isinstance(error, BrokerError)
            assert error.code is ErrorCode.NOT_ENOUGH_REPLICAS
            assert scene.start_of(leader) == 0
            return
        scene.cluster.kill_broker(leader)
        for broker_id in away:
            await scene.cluster.start_broker(broker_id)
        assert await scene.first_offset() == 7

    play(program)


PROMISES = {
    replica_that_was_paused_takes_over: "deletion-acknowledged-before-replicated",
    all_are_killed_at_once: "deletion-acknowledged-before-stored",
    replica_that_was_dead_takes_over_when_it_has_joined: "join-with-what-was-deleted",
    replica_that_is_eligible_takes_over: "deletion-acknowledged-below-min-isr",
}
"""Each promise with the mutant that breaks it."""


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_deleted_records_do_not_come_back(promise: Callable[[], None]) -> None:
    promise()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_the_mutant_is_caught(promise: Callable[[], None]) -> None:
    with planted(PROMISES[promise]), pytest.raises(AssertionError, match="assert 0 == 7"):
        promise()


@run_by(play, settings={"log.flush.offset.checkpoint.interval.ms": "1000"})
async def test_deleted_records_do_not_come_back_when_all_hosts_lose_their_power(scene: Scene, /) -> None:
    await asyncio.sleep(3)  # the records are on disk
    await scene.admin.delete_records({P0: 7})
    for broker_id in scene.cluster.broker_ids:
        scene.cluster.power_cut(broker_id)
    await scene.cluster.start()
    assert await scene.first_offset() == 7


@run_by(play, min_insync_replicas=1)
async def test_a_replica_that_was_away_follows_a_log_that_begins_within_a_batch(scene: Scene, /) -> None:
    cluster, away = scene.cluster, scene.followers[0]
    cluster.kill_broker(away)
    await cluster.until(lambda: away not in cluster.state(P0).isr)
    async with Producer(cluster.bootstrap, linger_ms=100, world=scene.world) as producer:
        for _ in range(10):
            producer.send("orders", b"x", partition=0)
        await producer.flush()
    assert await scene.admin.delete_records({P0: 45}) == {P0: 45}
    await cluster.start_broker(away)
    await cluster.until(lambda: away in cluster.state(P0).isr)
    assert (scene.start_of(away), replica_of(cluster, away, P0).log.log_end_offset) == (45, 50)
    await scene.only_one_left(away)
    assert await scene.first_offset() == 45


# --- A log that is empty, and ahead of its leader's -------------------------------------------------------------------


async def begin_anew_without_the_leader(scene: Scene) -> int:
    """Delete all records, and cut the power of all hosts before the followers know. The followers lose all data, and
    one of them leads. Return the former leader, whose log on disk is empty and begins at 40."""
    cluster, former = scene.cluster, scene.leader
    await replica_of(cluster, former, P0).log.flush()
    for broker_id in scene.followers:
        cluster.pause_broker(broker_id)
    deletion = asyncio.create_task(scene.admin.delete_records({P0: 40}))
    await cluster.until(lambda: replica_of(cluster, former, P0).log.stored_start_offset == 40)
    await replica_of(cluster, former, P0).log.flush()
    others = [broker_id for broker_id in cluster.broker_ids if broker_id != former]
    for broker_id in others:
        path = replica_of(cluster, broker_id, P0).log.path
        cluster.simulation.host(host_name(broker_id)).disk.file(f"{path}/{0:020d}.log").lose_dirty()
    for broker_id in cluster.broker_ids:
        cluster.power_cut(broker_id)
    deletion.cancel()
    await asyncio.gather(deletion, return_exceptions=True)
    for broker_id in others:
        await cluster.start_broker(broker_id)
    await cluster.until(lambda: scene.leader in others)
    await cluster.until(lambda: all(replicas_of(cluster, b).partitions.get(P0) is not None for b in others))
    assert [replica_of(cluster, broker_id, P0).log.log_end_offset for broker_id in others] == [0, 0]
    return former


@pytest.mark.parametrize("count", [30, 60])
@run_by(play, unclean=True)
async def test_a_replica_that_begins_after_its_leader_joins_with_all_of_its_leaders_records(
    scene: Scene, /, count: int
) -> None:
    """Otherwise it would lead without those records if the others die, and they would then drop acknowledged
    records."""

    cluster = scene.cluster
    former = await begin_anew_without_the_leader(scene)
    await produce(cluster, scene.world, count)
    await cluster.start_broker(former)
    await cluster.until(lambda: former in cluster.state(P0).isr)
    assert (scene.start_of(former), replica_of(cluster, former, P0).log.log_end_offset) == (0, count)
    await scene.only_one_left(former)
    assert await scene.first_offset() == 0


KAFKAS = encode_batch(
    [b"once"], base_timestamp=1_000, producer_id=7, producer_epoch=0, base_sequence=3, magic=MAGIC_RECORDS
)
"""A batch of a Kafka producer: from one that it does not know, the log accepts any sequence number."""


NOT_YET_LED = {ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
"""Errors of a broker that has not received the order to lead yet, or that has just started and knows no topics."""


async def _offset_of_repetition(scene: Scene) -> int:
    partition = ProducePartition(0, memoryview(KAFKAS))
    request = ProduceRequest(None, -1, 5_000, [ProduceTopic("orders", [partition])])
    while True:
        connection = await connect_kafka(scene.world.network, host_name(scene.leader), PORT)
        answer = await connection.request(PRODUCE, 7, request)
        connection.close()
        [told] = answer.responses[0].partition_responses
        if told.error_code not in NOT_YET_LED:
            assert told.error_code == ErrorCode.NONE, told
            return int(told.base_offset)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("crashes", [False, True])
@run_by(play, min_insync_replicas=1)
async def test_a_deleted_record_is_not_written_again_by_a_replica_that_began_after_it(
    scene: Scene, /, crashes: bool
) -> None:
    """Its producer got no answer, and retries it."""

    away = scene.followers[0]
    scene.cluster.kill_broker(away)
    await scene.cluster.until(lambda: away not in scene.cluster.state(P0).isr)
    assert await _offset_of_repetition(scene) == 40
    await scene.admin.delete_records({P0: -1})
    await scene.cluster.start_broker(away)
    await scene.cluster.until(lambda: away in scene.cluster.state(P0).isr)
    assert scene.start_of(away) == 41
    if crashes:
        scene.cluster.kill_broker(away)
        await scene.cluster.start_broker(away)
        await scene.cluster.until(lambda: away in scene.cluster.state(P0).isr)
    await scene.only_one_left(away)
    assert await _offset_of_repetition(scene) == 40
    assert replica_of(scene.cluster, away, P0).log.log_end_offset == 41
