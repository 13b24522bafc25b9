"""Positions of consumers in a log that was truncated, and at leaders that were deposed; and queries for offsets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from minibroker.broker.replication.lifecycle import ReplicaLifecycle
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.client.admin import Admin
from minibroker.client.administering.offsets import OffsetErrors
from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.consumer import Consumer
from minibroker.client.errors import LogTruncated
from minibroker.client.producer import Producer
from minibroker.client.settings import Address
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol.apis import OFFSET_FOR_LEADER_EPOCH
from minibroker.protocol.errors import ErrorCode
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.clients.test_consumers import P0, Scene, numbers, silence, take
from tests.simulation.scenarios.helpers import replica_of

OFTEN = {"log.flush.offset.checkpoint.interval.ms": "1000"}
FLUSHED, SENT = 10, 20


def play(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    settings: dict[str, str] | None = None,
    configs: dict[str, str] | None = None,
    seed: int = 1,
) -> None:
    async def main() -> None:
        scene = Scene()
        scene.cluster = VirtualCluster(Simulation(), settings=settings)
        scene.network = scene.cluster.simulation.network
        scene.main = scene.cluster.client("main")
        await scene.cluster.start()

        async def create() -> None:
            async with Admin(scene.cluster.bootstrap, world=scene.main) as admin:
                await admin.create_topic("t", partitions=1, replication_factor=3, configs=configs)

        await scene.main.process.run(create())
        await scenario(scene)

    run(main(), seed=seed)


# --- A log that was truncated -------------------------------------------------------------------------------------


class _Least(Random):
    """Draws the smallest values: a power cut keeps as little data as possible."""

    def random(self) -> float:
        return 1.0

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        return a


async def fill(scene: Scene) -> None:
    """Write twenty records; only the first ten are on disk."""
    await scene.send(0, FLUSHED)
    await asyncio.sleep(3)
    await scene.send_batch(FLUSHED, 5)
    await scene.send_batch(FLUSHED + 5, 5)


async def lose_the_end(scene: Scene) -> None:
    """Cut the power of all hosts at once, so that data not on disk is lost; then write more records than were lost."""
    cluster = scene.cluster
    for broker_id in cluster.broker_ids:
        cluster.simulation.host(host_name(broker_id)).disk.random = _Least()
        cluster.power_cut(broker_id)
    await asyncio.gather(*map(cluster.start_broker, cluster.broker_ids))
    await cluster.until(lambda: cluster.state(P0).leader != -1)
    await scene.send(100, 15)


AFTERWARDS = [*range(FLUSHED), *range(100, 115)]


@pytest.mark.parametrize("taken", [SENT, 15, 12])
@run_by(play, settings=OFTEN)
async def test_a_consumer_goes_back_to_where_the_log_was_truncated_and_logs_that(
    scene: Scene, /, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(scene)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=scene.main) as consumer:
            await take(consumer, taken)
            state = consumer._partitions.states[P0]
            before = state.generation
            with caplog.at_level(logging.WARNING, "minibroker.client"):
                await lose_the_end(scene)
                await scene.cluster.until(lambda: state.generation > before)
                assert numbers(await take(consumer, 15)) == AFTERWARDS[FLUSHED:]
            told = f"records of t-0 that were read are no longer in the log, from offset 10 on, up to {taken}"
            assert told in caplog.text
            assert consumer.position_epoch(P0) == scene.cluster.state(P0).leader_epoch

    await scene.main.process.run(consume())


@run_by(play, settings=OFTEN)
async def test_without_a_reset_policy_truncation_is_an_error_until_the_consumer_seeks(scene: Scene, /) -> None:
    await fill(scene)

    async def consume() -> None:
        async with Consumer(
            scene.cluster.bootstrap, topics=["t"], auto_offset_reset="none", world=scene.main
        ) as consumer:
            consumer.seek(P0, 0)
            await take(consumer, 15)
            await lose_the_end(scene)
            await scene.cluster.until(lambda: consumer._partitions.states[P0].error)
            for _ in range(2):
                with pytest.raises(LogTruncated) as caught:
                    await take(consumer, 1)
                told = caught.value
                assert (told.partition, told.offset, told.diverging_offset) == (P0, 15, 10)
            consumer.seek(told.partition, told.diverging_offset)
            assert numbers(await take(consumer, 15)) == AFTERWARDS[FLUSHED:]

    await scene.main.process.run(consume())


@run_by(play, settings=OFTEN)
async def test_records_fetched_but_not_returned_are_replaced_silently(
    scene: Scene, /, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(scene)

    async def consume() -> None:
        async with Consumer(
            scene.cluster.bootstrap, topics=["t"], auto_offset_reset="none", world=scene.main
        ) as consumer:
            consumer.seek(P0, 0)
            await take(consumer, 5)
            await scene.cluster.until(lambda: consumer._partitions.states[P0].fetch_offset == SENT)
            await lose_the_end(scene)
            await scene.cluster.until(lambda: consumer._partitions.states[P0].fetch_offset == len(AFTERWARDS))
            assert numbers(await take(consumer, 20)) == AFTERWARDS[5:]
            assert "no longer in the log" not in caplog.text

    await scene.main.process.run(consume())


async def _the_end_was_looked_up_before_it_was_lost(scene: Scene) -> None:
    await fill(scene)

    async def consume() -> None:
        async with Consumer(
            scene.cluster.bootstrap, topics=["t"], auto_offset_reset="latest", world=scene.main
        ) as consumer:
            assert await consumer.position(P0) == SENT
            assert consumer.position_epoch(P0) == 0
            await lose_the_end(scene)
            assert numbers(await take(consumer, 15)) == AFTERWARDS[FLUSHED:]

    await scene.main.process.run(consume())


async def _the_end_was_read_before_it_was_lost(scene: Scene) -> None:
    await fill(scene)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=scene.main) as consumer:
            await take(consumer, SENT)
            await lose_the_end(scene)
            assert numbers(await take(consumer, 15)) == AFTERWARDS[FLUSHED:]

    await scene.main.process.run(consume())


async def _the_end_was_found_by_its_time_before_it_was_lost(scene: Scene) -> None:
    await fill(scene)

    async def consume() -> None:
        async with Consumer(scene.cluster.bootstrap, topics=["t"], world=scene.main) as consumer:
            found = (await consumer.offsets_for_times({P0: 0}))[P0]
            assert found is not None
            assert (found.offset, found.leader_epoch) == (0, None)
            async with Admin(scene.cluster.bootstrap, world=scene.main) as admin:
                newest = (await admin.list_offsets({P0: "max_timestamp"}))[P0]
            assert newest is not None
            assert FLUSHED < newest.offset < SENT
            assert newest.leader_epoch == 0
            consumer.seek(P0, newest.offset, newest.leader_epoch)
            await lose_the_end(scene)
            assert numbers(await take(consumer, 15)) == AFTERWARDS[FLUSHED:]

    await scene.main.process.run(consume())


_POSITIONS = [
    _the_end_was_looked_up_before_it_was_lost,
    _the_end_was_read_before_it_was_lost,
    _the_end_was_found_by_its_time_before_it_was_lost,
]
every_position = pytest.mark.parametrize("scenario", _POSITIONS)


@every_position
def test_a_position_knows_the_epoch_of_the_record_before_it(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    play(scenario, settings=OFTEN)


@every_position
def test_without_epochs_a_consumer_would_skip_the_records_that_replaced_those_it_read(
    scenario: Callable[[Scene], Awaitable[None]],
) -> None:
    with planted("position-without-epoch"), pytest.raises((AssertionError, TimeoutError)):
        play(scenario, settings=OFTEN)


@run_by(play)
async def test_a_position_that_was_looked_up_outlives_leaders_that_wrote_nothing(scene: Scene, /) -> None:
    cluster = scene.cluster
    await scene.send(0, 5)

    async def change_leader() -> None:
        leader, epoch = cluster.state(P0).leader, cluster.state(P0).leader_epoch
        cluster.kill_broker(leader)
        await cluster.until(lambda: cluster.state(P0).leader not in (-1, leader))
        await cluster.start_broker(leader)
        await cluster.until(lambda: len(cluster.state(P0).isr) == 3)
        assert cluster.state(P0).leader_epoch > epoch

    async def consume() -> None:
        async with Consumer(cluster.bootstrap, topics=["t"], auto_offset_reset="none", world=scene.main) as consumer:
            await change_leader()
            consumer.seek_to_end(P0)
            assert await consumer.position(P0) == 5
            assert consumer.position_epoch(P0) == 0
            await change_leader()
            await scene.send(5, 2)
            assert numbers(await take(consumer, 2)) == [5, 6]

    await scene.main.process.run(consume())


# --- Deposed leaders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
@pytest.mark.parametrize("has_epoch", [True, False], ids=["position read", "position by seek"])
@run_by(play)
async def test_a_consumer_that_knows_the_new_leader_does_not_go_back_to_the_old_one(
    scene: Scene, /, reset: Any, has_epoch: bool
) -> None:
    await scene.send(0, 12)
    world = scene.cluster.client("fresh")

    async def consume() -> None:
        async with Consumer(
            scene.cluster.bootstrap,
            topics=["t"],
            auto_offset_reset=reset,
            metadata_max_age_ms=1_000,
            max_partition_fetch_bytes=1,
            world=world,
        ) as consumer:
            consumer.seek(P0, 0)
            await take(consumer, 12)
            deposed = await scene.depose()
            await scene.send(12, 8)
            await take(consumer, 3)
            for other in scene.cluster.broker_ids:
                if other != deposed:
                    scene.separate("fresh", host_name(other))
                    scene.network.reset("fresh", host_name(other))
            if not has_epoch:
                consumer.seek(P0, 15)
            await _read_all(consumer)  # records fetched before
            position = await consumer.position(P0)
            assert position >= 15
            await silence(consumer, 30)
            scene.reunite()
            await scene.send(20, 2)
            assert numbers(await take(consumer, 22 - position)) == list(range(position, 22))

    await world.process.run(consume())


async def _read_all(consumer: Consumer) -> None:
    try:
        while True:
            await take(consumer, 1, within_s=1)
    except TimeoutError:
        return


SMALL = {"segment.bytes": "1000", "retention.bytes": "3000"}
RETENTION = {**OFTEN, "log.retention.check.interval.ms": "1000"}


async def _a_deposed_leader_has_deleted_what_its_successor_has(scene: Scene) -> None:
    """Records that it will lose as a follower make its log large enough for retention to delete the oldest ones."""
    await scene.send(0, 12)
    deposed = await scene.depose()
    world = scene.client_of(deposed, "careless")
    replica = replica_of(scene.cluster, deposed, P0)

    async def send() -> None:
        async with Producer(f"{host_name(deposed)}:9092", acks=1, world=world) as producer:
            for _ in range(40):
                await producer.send("t", b"x" * 100, partition=0)

    await world.process.run(send())
    await scene.cluster.until(lambda: replica.log.log_start_offset > 5)
    world = scene.client_of(deposed)

    async def consume() -> None:
        async with Consumer(f"{host_name(deposed)}:9092", topics=["t"], world=world) as consumer:
            consumer.seek(P0, 3)
            await silence(consumer, 20)
            assert await consumer.position(P0) == 3
            scene.reunite()
            assert numbers(await take(consumer, 9)) == list(range(3, 12))

    await world.process.run(consume())


def _does_not_doubt_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a leader use settings that it has read before, as for a moment after its process was stopped and resumed."""

    async def read_before(_self: ReplicaSettings, partitions: Sequence[Partition]) -> list[Partition]:
        return list(partitions)

    monkeypatch.setattr(ReplicaLifecycle, "_may_be_deposed", lambda self, told_in_broker_epoch: False)
    monkeypatch.setattr(ReplicaSettings, "with_present_settings", read_before)


def test_a_consumer_does_not_believe_a_deposed_leader_that_its_records_were_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _does_not_doubt_itself(monkeypatch)
    play(_a_deposed_leader_has_deleted_what_its_successor_has, settings=RETENTION, configs=SMALL)


def test_a_consumer_that_believes_a_deposed_leader_skips_the_records_it_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _does_not_doubt_itself(monkeypatch)
    with planted("deposed-leader-is-believed"), pytest.raises(AssertionError, match="12 == 3"):
        play(_a_deposed_leader_has_deleted_what_its_successor_has, settings=RETENTION, configs=SMALL)


# --- Queries ------------------------------------------------------------------------------------------------------


@run_by(play)
async def test_clients_may_ask_for_the_end_of_an_epoch_but_not_a_leader_of_an_earlier_one(scene: Scene, /) -> None:
    await scene.send(0, 12)
    deposed = await scene.depose()
    await scene.send(12, 8)
    leader, epoch = scene.cluster.state(P0).leader, scene.cluster.state(P0).leader_epoch

    async def ask(broker_id: int, current_epoch: int, wanted: int) -> tuple[int, int, int]:
        connection = await runtime.connections.open(Address(host_name(broker_id), PORT), Purpose.REQUESTS)
        partition = m.OffsetForLeaderPartition(0, current_epoch, wanted)
        body = m.OffsetForLeaderEpochRequest(-1, [m.OffsetForLeaderTopic("t", [partition])])
        answer = (await connection.request(OFFSET_FOR_LEADER_EPOCH, body)).topics[0].partitions[0]
        return answer.error_code, answer.leader_epoch, answer.end_offset

    async def questions() -> None:
        await runtime.start()
        assert await ask(leader, epoch, 0) == (ErrorCode.NONE, 0, 12)
        assert await ask(leader, epoch, epoch) == (ErrorCode.NONE, epoch, 20)
        assert await ask(leader, epoch - 1, 0) == (ErrorCode.FENCED_LEADER_EPOCH, -1, -1)
        assert await ask(deposed, -1, epoch) == (ErrorCode.UNKNOWN_LEADER_EPOCH, -1, -1)
        assert await ask(deposed, epoch, 0) == (ErrorCode.UNKNOWN_LEADER_EPOCH, -1, -1)
        assert await ask(deposed, -1, 0) == (ErrorCode.NONE, 0, 12)
        await runtime.close()

    runtime = _runtime(scene.cluster.bootstrap, scene.main)
    await scene.main.process.run(questions())


def _runtime(bootstrap: str, world: VirtualWorld) -> ClientRuntime:
    return ClientRuntime(
        bootstrap,
        client_id="asking",
        request_timeout_ms=30_000,
        retry_backoff_ms=100,
        metadata_max_age_ms=300_000,
        world=world,
        on_crash=lambda error: None,
    )


@run_by(play, settings={"zookeeper.session.timeout.ms": "60000"})
async def test_the_largest_timestamp_is_searched_among_committed_records(scene: Scene, /) -> None:
    cluster = scene.cluster

    async def send(times: list[int], acks: Any) -> None:
        async with Producer(cluster.bootstrap, acks=acks, world=scene.main) as producer:
            for time in times:
                await producer.send("t", b"x" * 100, partition=0, timestamp_ms=time)

    async def newest(admin: Admin) -> OffsetAndTimestamp | None:
        return (await admin.list_offsets({P0: "max_timestamp"}))[P0]

    async def client() -> None:
        async with Admin(cluster.bootstrap, world=scene.main) as admin:
            assert await newest(admin) is None
            await send([5_000, 9_000, 7_000, 9_000, 8_000], "all")
            assert await newest(admin) == (1, 9_000, 0)
            assert await admin.list_offsets({P0: "earliest"}) == {P0: (0, -1, None)}
            assert await admin.list_offsets({P0: "latest"}) == {P0: (5, -1, 0)}
            assert await admin.list_offsets({P0: 8_500}) == {P0: (1, 9_000, 0)}
            leader = cluster.state(P0).leader
            others = [broker_id for broker_id in cluster.broker_ids if broker_id != leader]
            for broker_id in others:
                cluster.pause_broker(broker_id)
            await send([99_000], 1)
            assert await newest(admin) == (1, 9_000, 0)
            for broker_id in others:
                cluster.resume_broker(broker_id)
            await cluster.until(lambda: _high_watermark(cluster, leader) == 6)
            assert await newest(admin) == (5, 99_000, 0)

    await scene.main.process.run(client())


def _high_watermark(cluster: VirtualCluster, broker_id: int) -> int:
    replicas = cluster.broker(broker_id)._replicas
    replica = None if replicas is None else replicas.partitions.get(P0)
    return -1 if replica is None else replica.high_watermark


@run_by(play)
async def test_an_invalid_offset_query_is_refused_with_the_valid_ones(scene: Scene, /) -> None:
    async def client() -> None:
        async with Admin(scene.cluster.bootstrap, world=scene.main) as admin:
            with pytest.raises(ValueError, match="'earliest', 'latest', 'max_timestamp'"):
                await admin.list_offsets({P0: "newest"})  # type: ignore[dict-item]
            with pytest.raises(OffsetErrors, match="its partitions are 0 to 0") as failed:
                await admin.list_offsets({P0._replace(partition=7): "latest", P0: "latest"})
            assert failed.value.results == {P0: (0, -1, None)}

    await scene.main.process.run(client())
