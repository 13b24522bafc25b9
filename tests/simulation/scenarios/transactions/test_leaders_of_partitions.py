"""What the leaders of partitions do in transactions, with a coordinator that is another broker or their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from minibroker.broker.cluster.peers import Peers
from minibroker.broker.replication.partition import Partition
from minibroker.client.admin import Admin
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import apis, znodes
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode, NetworkError
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.records import READ_COMMITTED, READ_UNCOMMITTED, iterate_batches
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of
from tests.simulation.scenarios.transactions.raw_transactions import NOT_NOW, RETRY_S, RawProducer, codes_of
from tests.simulation.scenarios.transactions.test_coordinator import P0, P1, with_topic

E = ErrorCode
BOTH = (P0, P1)


def leader_of(cluster: VirtualCluster, topic_partition: TopicPartition) -> Partition:
    return replica_of(cluster, cluster.state(topic_partition).leader, topic_partition)


async def stable(cluster: VirtualCluster, *partitions: TopicPartition) -> None:
    """Wait until these partitions have no open transaction."""

    def is_stable() -> bool:
        leaders = [leader_of(cluster, topic_partition) for topic_partition in partitions]
        return all(p.is_leader and p.last_stable_offset == p.log.log_end_offset for p in leaders)

    await cluster.until(is_stable)


async def fetch(producer: RawProducer, topic_partition: TopicPartition, isolation_level: int) -> tuple[list[int], int]:
    """Return the offsets of the batches of producers, and the number of aborted transactions."""
    wanted = m.FetchPartition(topic_partition.partition, -1, 0, -1, 0, 1 << 20)
    request = m.FetchRequest(-1, 0, 1, 1 << 20, isolation_level, [m.FetchTopic(topic_partition.topic, "", [wanted])])
    answer = await producer.ask(producer.cluster.state(topic_partition).leader, apis.FETCH, request)
    [found] = answer.responses[0].partitions
    assert not found.error_code
    batches = [header.base_offset for header, _, _ in iterate_batches(found.records) if not header.is_control]
    return batches, len(found.aborted_transactions)


def copy_of(producer: RawProducer) -> RawProducer:
    """Return one whose requests are those that the producer sends now."""
    copy = RawProducer(producer.cluster, producer.world, producer.transactional_id, raises_epoch=producer.raises_epoch)
    copy.producer_id, copy.epoch, copy._sequences = producer.producer_id, producer.epoch, {**producer._sequences}
    return copy


@run_by(with_topic)
async def test_every_partition_that_was_written_to_is_told_the_end(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world)
    await producer.init()
    for topic_partition in BOTH:
        assert await producer.send(topic_partition, b"committed") is E.NONE
        assert await fetch(producer, topic_partition, READ_COMMITTED) == ([], 0)
    assert await producer.end(committed=True) is E.NONE
    assert await producer.send(P0, b"aborted") is E.NONE
    assert await producer.end(committed=False) is E.NONE
    await stable(cluster, *BOTH)
    assert await fetch(producer, P0, READ_COMMITTED) == ([0, 2], 1)
    assert await fetch(producer, P1, READ_COMMITTED) == ([0], 0)


@pytest.mark.parametrize("partition", BOTH, ids=["took part", "took no part"])
@run_by(with_topic)
async def test_a_batch_that_comes_a_transaction_late_is_refused(
    cluster: VirtualCluster, world: VirtualWorld, /, partition: TopicPartition
) -> None:
    producer = RawProducer(cluster, world)
    await producer.init()
    assert await producer.send(P0, b"in time") is E.NONE
    late = copy_of(producer)
    await producer.end()
    await stable(cluster, P0)  # before its marker, a partition still takes batches of the transaction
    assert await copy_of(late).send(partition, b"late") is E.INVALID_PRODUCER_EPOCH
    assert await producer.send(P0, b"of the next transaction") is E.NONE
    assert await copy_of(late).send(partition, b"late") is E.INVALID_PRODUCER_EPOCH
    await producer.end()
    await stable(cluster, *BOTH)
    assert await fetch(producer, P0, READ_UNCOMMITTED) == ([0, 2], 0)
    assert await fetch(producer, P1, READ_UNCOMMITTED) == ([], 0)


@run_by(with_topic)
async def test_a_marker_that_comes_late_to_a_leader_that_was_replaced_does_not_end_the_next_transaction(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Its client keeps the epoch. The next leader has ended the transaction that the marker is for, and has gone."""
    producer = RawProducer(cluster, world, raises_epoch=False)
    await producer.init()
    await producer.add(P0)
    assert await producer.send(P0, b"first") is E.NONE
    first = cluster.state(P0).leader
    second = next(broker_id for broker_id in cluster.state(P0).isr if broker_id != first)
    with held(first) as late:
        assert await producer.end() is E.NONE
        await cluster.until(lambda: bool(late))
        await lead(cluster, world, P0, second)
    await stable(cluster, P0)
    await lead(cluster, world, P0, first)
    await producer.add(P0)
    assert await producer.send(P0, b"half") is E.NONE
    before = leader_of(cluster, P0).log.log_end_offset
    for request in late:
        assert codes_of((await request()).markers[0]) == {0}
    assert leader_of(cluster, P0).log.log_end_offset == before
    assert await producer.end(committed=False) is E.NONE
    await stable(cluster, P0)
    assert await fetch(producer, P0, READ_COMMITTED) == ([0, 2], 1)


@contextlib.contextmanager
def held(broker_id: int) -> Iterator[list[Callable[[], Awaitable[t.WriteTxnMarkersResponse]]]]:
    """Markers for this broker are lost until the end of the block. The list delivers them after all."""
    late: list[Callable[[], Awaitable[t.WriteTxnMarkersResponse]]] = []
    with pytest.MonkeyPatch.context() as patch:
        request = Peers.request

        async def hold(self: Peers, to: int, api: Any, body: Any, **rest: Any) -> Any:
            if to != broker_id or api is not apis.WRITE_TXN_MARKERS:
                return await request(self, to, api, body, **rest)
            late.append(lambda: request(self, to, api, body, **rest))
            raise NetworkError("the marker is under way")

        patch.setattr(Peers, "request", hold)
        yield late


async def lead(cluster: VirtualCluster, world: VirtualWorld, topic_partition: TopicPartition, broker_id: int) -> None:
    """Make the broker lead the partition."""
    topic, index = topic_partition
    zookeeper = cluster.simulation.zookeeper

    def preferred() -> int:
        return znodes.decode_topic(topic, zookeeper.data(znodes.topic_path(topic))).partitions[index][0]

    order = [broker_id, *(other for other in cluster.broker_ids if other != broker_id)]
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.alter_partition_reassignments({topic_partition: order})
        await cluster.until(lambda: preferred() == broker_id)
        await admin.elect_leaders("preferred", [topic_partition])
    await cluster.until(
        lambda: cluster.state(topic_partition).leader == broker_id and leader_of(cluster, topic_partition).is_leader
    )


@run_by(with_topic)
async def test_an_older_client_writes_only_to_partitions_that_it_has_added(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world, raises_epoch=False)
    await producer.init()
    assert await copy_of(producer).send(P0, b"not added") is E.INVALID_TXN_STATE
    await producer.add(P0)
    assert await producer.send(P0, b"added") is E.NONE
    assert await producer.send(P1, b"not added") is E.INVALID_TXN_STATE
    await producer.end()
    await stable(cluster, P0)
    assert await producer.send(P0, b"late") is E.INVALID_TXN_STATE
    assert await fetch(producer, P0, READ_COMMITTED) == ([0], 0)
    assert await fetch(producer, P1, READ_UNCOMMITTED) == ([], 0)


@run_by(with_topic)
async def test_a_transaction_goes_on_at_the_next_leader(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    producer = RawProducer(cluster, world)
    await producer.init()
    assert await producer.send(P0, b"first") is E.NONE
    cluster.kill_broker(cluster.state(P0).leader)
    assert await producer.send(P0, b"second") is E.NONE
    assert await producer.send(P1, b"third") is E.NONE
    assert await fetch(producer, P0, READ_COMMITTED) == ([], 0)
    assert await producer.end() is E.NONE
    await stable(cluster, *BOTH)
    assert await fetch(producer, P0, READ_COMMITTED) == ([0, 1], 0)
    assert await fetch(producer, P1, READ_COMMITTED) == ([0], 0)


@run_by(with_topic)
async def test_a_leader_asks_the_next_coordinator_if_one_dies(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    producer = RawProducer(cluster, world)
    await producer.init()
    coordinator = cluster.state(producer.coordinator_partition(2)).leader
    asked = next(p for p in BOTH if cluster.state(p).leader != coordinator)
    cluster.pause_broker(coordinator)
    sending = asyncio.ensure_future(producer.send(asked, b"value"))
    await asyncio.sleep(0.5)
    assert not sending.done()
    assert leader_of(cluster, asked).log.log_end_offset == 0, "nobody has confirmed it"
    cluster.kill_broker(coordinator)
    assert await sending is E.NONE
    assert await producer.end() is E.NONE
    await stable(cluster, asked)
    assert await fetch(producer, asked, READ_COMMITTED) == ([0], 0)


@pytest.mark.parametrize("committed", [True, False])
@run_by(with_topic)
async def test_offsets_become_a_groups_with_the_transaction(
    cluster: VirtualCluster, world: VirtualWorld, /, committed: bool
) -> None:
    producer, offsets = RawProducer(cluster, world), TopicPartition(OFFSETS_TOPIC, 0)
    await producer.init()
    topics = [t.TxnOffsetCommitTopic("orders", [t.TxnOffsetCommitPartition(0, 5)])]

    async def at_the_group(api: apis.Api[Any, Any], body: m.Message) -> Any:
        find = g.FindCoordinatorRequest(0, ["billing"])
        while (found := (await producer.ask(0, apis.FIND_COORDINATOR, find)).coordinators[0]).error_code:
            await asyncio.sleep(RETRY_S)
        return await producer.ask(found.node_id, api, body)

    async def commit() -> ErrorCode:
        body = t.TxnOffsetCommitRequest("t", "billing", producer.producer_id, producer.epoch, topics)
        answer = await at_the_group(apis.TXN_OFFSET_COMMIT, body)
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    async def fetched() -> int:
        body = g.OffsetFetchRequest([g.OffsetFetchGroup("billing", [g.OffsetFetchTopic("orders", [0])])])
        answer = await at_the_group(apis.OFFSET_FETCH, body)
        return int(answer.groups[0].topics[0].partitions[0].committed_offset)

    while (code := await commit()) in NOT_NOW:
        await asyncio.sleep(RETRY_S)
    assert code is E.NONE
    assert await producer.send(P0, b"result") is E.NONE
    assert await fetched() == -1
    assert await producer.end(committed=committed) is E.NONE
    await stable(cluster, P0, offsets)
    assert await fetched() == (5 if committed else -1)
