"""Our own producer's transactions on a whole cluster: through failovers, time-outs, fencing and lost answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minibroker.client.consumer import Consumer
from minibroker.client.errors import CommitFailed, CommitOutcomeUnknown, ProducerFenced, TransactionAborted
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from tests.running import run_by
from tests.simulation.scenarios.helpers import with_client

CLIENT = "client"
TRANSACTIONAL_ID = "billing-1"
SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "2",
    "transaction.state.log.replication.factor": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}
TOPIC: dict[str, Any] = {
    "name": "orders",
    "partitions": 2,
    "replication_factor": 3,
    "configs": {"min.insync.replicas": "2"},
}
STATE = TopicPartition(TRANSACTIONS_TOPIC, internal_partition(TRANSACTIONAL_ID, 2))
P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def play(program: Callable[[VirtualCluster, VirtualWorld], Awaitable[None]], seed: int = 0) -> None:
    with_client(program, TOPIC, settings=SETTINGS, host=CLIENT, seed=seed)


def producer_of(cluster: VirtualCluster, world: VirtualWorld, timeout_ms: float = 60_000) -> Producer:
    return Producer(
        cluster.bootstrap, world=world, transactional_id=TRANSACTIONAL_ID, transaction_timeout_ms=timeout_ms
    )


async def committed(
    cluster: VirtualCluster, world: VirtualWorld, last: bytes, *partitions: TopicPartition
) -> list[bytes]:
    """Return the values that read_committed consumers see, sorted. `last` is the last one of each partition."""
    of = list(partitions) or [P0, P1]
    async with Consumer(cluster.bootstrap, world=world, partitions=of, isolation_level="read_committed") as consumer:
        values: list[bytes] = []
        async with asyncio.timeout(60):
            while values.count(last) < len(of):
                values += [record.value or b"" for record in await consumer.poll(timeout_ms=1_000)]
        return sorted(values)


async def send_both(producer: Producer, value: bytes) -> None:
    for partition in (0, 1):
        await producer.send("orders", value, partition=partition)


@run_by(play)
async def test_only_committed_blocks_are_visible(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    async with producer_of(cluster, world) as producer:
        for number in range(20):
            try:
                async with producer.transaction():
                    await send_both(producer, b"%02d" % number)
                    if number % 2:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                continue
        async with producer.transaction():
            await send_both(producer, b"end")
    expected = [b"%02d" % number for number in range(0, 20, 2) for _ in range(2)]
    assert await committed(cluster, world, b"end") == [*expected, b"end", b"end"]


@pytest.mark.parametrize("victim", [P0, STATE], ids=["leader", "coordinator"])
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_transaction_outlives_its_leader_and_its_coordinator(victim: TopicPartition, fault: str) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with producer_of(cluster, world) as producer:
            for number in range(3):
                async with producer.transaction() as transaction:
                    await send_both(producer, b"%d-a" % number)
                    leader = cluster.state(victim).leader
                    if number == 1 and fault == "kill":
                        cluster.kill_broker(leader)
                    elif number == 1:
                        cluster.pause_broker(leader)
                    await send_both(producer, b"%d-b" % number)
                assert await transaction.was_committed()
        expected = [b"%d-%s" % (number, half) for number in range(3) for half in (b"a", b"b") for _ in range(2)]
        assert await committed(cluster, world, b"2-b") == expected

    play(scenario)


@run_by(play)
async def test_a_transaction_that_takes_too_long_is_aborted_and_may_be_repeated(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with producer_of(cluster, world, timeout_ms=2_000) as producer:
        for late in (False, True):
            with pytest.raises(TransactionAborted) as caught:  # noqa: PT012
                async with producer.transaction() as transaction:
                    await send_both(producer, b"slow")
                    await asyncio.sleep(10)
                    if late:
                        producer.send("orders", b"late", partition=0)
            assert not caught.value.is_fatal
            assert not await transaction.was_committed()
        async with producer.transaction():
            await send_both(producer, b"again")
    assert await committed(cluster, world, b"again") == [b"again", b"again"]


@run_by(play)
async def test_a_zombie_is_fenced_and_nothing_of_its_transaction_is_visible(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with producer_of(cluster, world) as zombie:
        transaction = zombie.transaction()
        await transaction.__aenter__()
        await send_both(zombie, b"zombie")
        async with producer_of(cluster, world) as producer:
            async with producer.transaction():
                await send_both(producer, b"a")
            zombie.send("orders", b"late", partition=0)
            with pytest.raises(ProducerFenced):
                await transaction.__aexit__(None, None, None)
            async with producer.transaction():
                await send_both(producer, b"b")
    assert await committed(cluster, world, b"b") == [b"a", b"a", b"b", b"b"]


@pytest.mark.parametrize("lost", ["answers", "requests"])
def test_the_outcome_of_an_unanswered_commit_is_found_out(lost: str) -> None:
    """The producer is cut off in one direction for longer than it waits. Without its request the coordinator aborts."""

    async def scenario(cluster: VirtualCluster, world: VirtualWorld) -> None:
        network = cluster.simulation.network
        async with producer_of(cluster, world, timeout_ms=11_000) as producer:
            with pytest.raises(CommitOutcomeUnknown):  # noqa: PT012
                async with producer.transaction() as transaction:
                    await send_both(producer, b"a")
                    for broker_id in cluster.broker_ids:
                        ends = host_name(broker_id), CLIENT
                        network.block(*(ends if lost == "answers" else reversed(ends)))
            await asyncio.sleep(5)
            network.heal()
            was_committed = await transaction.was_committed()
            assert was_committed is (lost == "answers")
            async with producer.transaction():
                await send_both(producer, b"b")
        expected = [b"a", b"a"] if was_committed else []
        assert await committed(cluster, world, b"b") == [*expected, b"b", b"b"]

    play(scenario)


@run_by(play)
async def test_offsets_and_results_of_a_batch_are_committed_together(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Each batch fails once, after its results and offsets were sent."""
    numbers = [b"%02d" % number for number in range(30)]
    async with Producer(cluster.bootstrap, world=world) as source:
        await source.send_batch("orders", numbers, partition=0)
    has_failed: set[int] = set()
    async with (
        producer_of(cluster, world) as producer,
        Consumer(cluster.bootstrap, world=world, topics=["orders"], group="billing") as consumer,
    ):
        position = 0
        while position < len(numbers):
            consumed = [r for r in await consumer.poll(timeout_ms=1_000, max_records=7) if r.partition == 0]
            if not consumed:
                continue
            try:
                async with producer.transaction() as transaction:
                    for record in consumed:
                        producer.send("orders", record.value, partition=1)
                    end = consumed[-1].offset + 1
                    await transaction.send_offsets({P0: end}, consumer.group_metadata())
                    if end not in has_failed:
                        has_failed.add(end)
                        raise ZeroDivisionError
                position = end
            except ZeroDivisionError:
                assert (await consumer.committed(P0))[P0] == (OffsetAndMetadata(position) if position else None)
                consumer.seek(P0, position)
        assert (await consumer.committed(P0))[P0] == OffsetAndMetadata(len(numbers))
    assert await committed(cluster, world, numbers[-1], P1) == numbers


@run_by(play)
async def test_a_member_that_the_group_has_removed_commits_nothing(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Producer(cluster.bootstrap, world=world) as source:
        await source.send("orders", b"a", partition=0)
    async with (
        producer_of(cluster, world) as producer,
        Consumer(
            cluster.bootstrap, world=world, topics=["orders"], group="billing", max_poll_interval_ms=6_000
        ) as consumer,
    ):
        assert await consumer.poll(timeout_ms=20_000)
        group = consumer.group_metadata()
        await asyncio.sleep(20)  # it leaves
        with pytest.raises(TransactionAborted):  # noqa: PT012
            async with producer.transaction() as transaction:
                producer.send("orders", b"result", partition=1)
                with pytest.raises(BrokerError, match="not a member of group billing now, or not any more"):
                    consumer.group_metadata()
                with pytest.raises(CommitFailed, match="UNKNOWN_MEMBER_ID"):
                    await transaction.send_offsets({P0: 1}, group)
        assert await consumer.committed(P0) == {P0: None}
