"""A topic is deleted and recreated under its name: no state of the earlier topic may be applied to the later one.
Brokers 0 and 1 have the replicas; broker 2 is the controller, so that the link between them can be cut without either
being considered dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest

from minibroker.broker.replication.partition import Partition
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.model import TopicPartition
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)
everywhere = every_seed(range(3))

CHECKPOINT_S = 6
"""Seconds after which the current high watermarks are in the checkpoint file."""
SESSION_S = 7
"""Seconds after which the session of a killed broker has ended."""

Scenario = Callable[[VirtualCluster], Awaitable[None]]


def _simulate(scenario: Scenario, seed: int, settings: dict[str, str] | None = None) -> None:
    async def main() -> None:
        cluster = VirtualCluster(Simulation(), settings=NO_OFFSETS_TOPIC | (settings or {}))
        await _start(cluster)
        await scenario(cluster)

    run(main(), seed=seed)


async def _start(cluster: VirtualCluster) -> None:
    """Start broker 2 as the controller, and then the others so that it sees both at once."""
    await cluster.start_broker(2)
    await cluster.until(lambda: cluster.broker(2).controller.is_active)  # type: ignore[union-attr]
    cluster.pause_broker(2)
    for broker_id in (0, 1):
        await cluster.start_broker(broker_id)
    cluster.resume_broker(2)


async def _create(cluster: VirtualCluster, *replicas: int) -> None:
    await as_admin(cluster, lambda admin: admin.create_topic(TOPIC, assignments=[replicas]))


def _partition(cluster: VirtualCluster, broker_id: int) -> Partition | None:
    replicas = cluster.broker(broker_id)._replicas
    return None if replicas is None else replicas.partitions.get(PARTITION)


def _has_records(cluster: VirtualCluster, broker_id: int) -> bool:
    partition = _partition(cluster, broker_id)
    return partition is not None and partition.log.log_end_offset > 0


def _proposes(cluster: VirtualCluster, broker_id: int, isr: tuple[int, ...]) -> bool:
    partition = _partition(cluster, broker_id)
    return partition is not None and partition.proposed_isr == isr


async def _delete(cluster: VirtualCluster) -> None:
    await as_admin(cluster, lambda admin: admin.delete_topic(TOPIC))
    await cluster.until(lambda: not cluster.simulation.zookeeper.has(znodes.delete_topic_path(TOPIC)))


async def _send(cluster: VirtualCluster, *values: bytes, acks: Literal["all", 1] = "all") -> None:
    """Send the values; return once all are acknowledged."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, acks=acks, world=world) as producer:
            for value in values:
                await producer.send(TOPIC, value)

    await world.process.run(produce())


async def _read(cluster: VirtualCluster, count: int) -> list[bytes]:
    """Return `count` values, and any more that arrive within two seconds."""
    world = cluster.client("consumer")
    found: list[bytes] = []

    async def read(consumer: Consumer, enough: int) -> None:
        while len(found) < enough:
            found.append((await anext(consumer)).value or b"")

    async def consume() -> None:
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            await read(consumer, count)
            try:
                async with asyncio.timeout(2):
                    await read(consumer, count + 1)
            except TimeoutError:
                pass

    async with asyncio.timeout(120):
        await world.process.run(consume())
    return found


def _cut(cluster: VirtualCluster, *, heal: bool = False) -> None:
    """Cut the link between the replicas, or heal it."""
    network = cluster.simulation.network
    change = network.unblock if heal else network.block
    for source, target in ((0, 1), (1, 0)):
        change(host_name(source), host_name(target))


# --- The checkpointed high watermark ------------------------------------------------------------------------------


async def _acknowledged_by_the_high_watermark_of_an_earlier_topic(cluster: VirtualCluster) -> None:
    await _create(cluster, 0, 1)
    await _send(cluster, *(b"old" for _ in range(20)))
    await asyncio.sleep(CHECKPOINT_S)
    await _delete(cluster)
    await _create(cluster, 0, 1)
    _cut(cluster)
    sending = asyncio.create_task(_send(cluster, b"x"))
    await cluster.until(lambda: _has_records(cluster, 0))
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    await asyncio.sleep(SESSION_S)
    await _start(cluster)
    await cluster.until(lambda: cluster.state(PARTITION).leader == 0)
    assert cluster.state(PARTITION).isr == (0, 1)
    await asyncio.sleep(3)  # the producer finds the leader, and retries unanswered batches
    cluster.kill_broker(0)
    _cut(cluster, heal=True)
    await cluster.until(lambda: cluster.state(PARTITION).leader == 1)
    await sending
    assert await _read(cluster, 1) == [b"x"]


@everywhere
def test_an_earlier_topics_high_watermark_does_not_commit_records_only_the_leader_has(seed: int) -> None:
    _simulate(_acknowledged_by_the_high_watermark_of_an_earlier_topic, seed)


def test_without_lowering_the_checkpointed_high_watermark_an_acknowledged_record_is_lost() -> None:
    with planted("high-watermark-not-lowered"), pytest.raises(TimeoutError):
        _simulate(_acknowledged_by_the_high_watermark_of_an_earlier_topic, 0)


# --- A late write of the ISR --------------------------------------------------------------------------------------


async def _written_while_the_topic_is_created_again(cluster: VirtualCluster) -> None:
    await _create(cluster, 0, 1)
    _cut(cluster)
    await _send(cluster, b"old", acks=1)
    cluster.simulation.zookeeper.cut(host_name(0))
    await cluster.until(lambda: _proposes(cluster, 0, (0,)))
    await asyncio.sleep(0.5)  # by now the write waits for a connection
    await _delete(cluster)
    creating = asyncio.create_task(_create(cluster, 1, 0))  # which waits for broker 0 to know of it
    await cluster.until(lambda: cluster.simulation.zookeeper.has(znodes.state_path(PARTITION)))
    cluster.simulation.zookeeper.uncut(host_name(0))
    await asyncio.sleep(1)
    _cut(cluster, heal=True)
    await creating
    await cluster.until(lambda: cluster.state(PARTITION).isr == (1, 0))
    assert (cluster.state(PARTITION).leader, cluster.state(PARTITION).leader_epoch) == (1, 0)
    await _send(cluster, b"x", b"y")
    cluster.kill_broker(1)
    await cluster.until(lambda: cluster.state(PARTITION).leader == 0)
    assert await _read(cluster, 2) == [b"x", b"y"]


_SHORT_LAG = {"replica.lag.time.max.ms": "1500"}


@everywhere
def test_an_isr_that_waited_for_a_connection_is_not_written_to_a_recreated_topic(seed: int) -> None:
    _simulate(_written_while_the_topic_is_created_again, seed, _SHORT_LAG)


def test_without_a_topic_check_the_earlier_leader_is_written_to_the_recreated_topic() -> None:
    with planted("isr-of-another-topic"), pytest.raises((TimeoutError, AssertionError)):
        _simulate(_written_while_the_topic_is_created_again, 0, _SHORT_LAG)


# --- Clocks that jump ---------------------------------------------------------------------------------------------


async def _clock_set_between_a_batch_and_its_repetition(cluster: VirtualCluster) -> None:
    await _create(cluster, 0, 1)
    _cut(cluster)  # so that the batch is not acknowledged
    sending = asyncio.create_task(_send(cluster, b"x"))
    await cluster.until(lambda: _has_records(cluster, 0))
    for broker_id in cluster.broker_ids:
        cluster.simulation.host(host_name(broker_id)).clock_offset_ms += 2 * 86_400_000
    await asyncio.sleep(3)  # log maintenance runs in the meantime
    assert cluster.simulation.network.reset(host_name(0), "producer") > 0
    _cut(cluster, heal=True)
    await sending
    assert await _read(cluster, 1) == [b"x"]


_LOOKED_AFTER_OFTEN = {"log.flush.offset.checkpoint.interval.ms": "1000"}


@everywhere
def test_a_clock_set_between_a_batch_and_its_retry_does_not_duplicate_it(seed: int) -> None:
    _simulate(_clock_set_between_a_batch_and_its_repetition, seed, _LOOKED_AFTER_OFTEN)


def test_by_the_wall_clock_a_producer_would_expire_between_a_batch_and_its_retry() -> None:
    with planted("producers-forgotten-by-the-wall-clock"), pytest.raises(AssertionError, match="x"):
        _simulate(_clock_set_between_a_batch_and_its_repetition, 0, _LOOKED_AFTER_OFTEN)
