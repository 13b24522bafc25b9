"""The transaction coordinator on a whole cluster, through raw requests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest

from minibroker.broker.transactions.terms import PARTITION_BYTES
from minibroker.client.consumer import Consumer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import with_client
from tests.simulation.scenarios.transactions.raw_transactions import RawProducer, codes_of

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
E = ErrorCode

Program = Callable[[VirtualCluster, VirtualWorld], Coroutine[Any, Any, None]]
SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "2",
    "transaction.state.log.replication.factor": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}


def with_topic(program: Program, settings: dict[str, str] | None = None, seed: int = 0) -> None:
    """Run the program with a cluster of three that has the topic `orders` of two partitions."""
    topic = {"name": "orders", "partitions": 2, "replication_factor": 3, "configs": {"min.insync.replicas": "2"}}
    with_client(program, topic, settings=SETTINGS | (settings or {}), seed=seed)


async def read(
    cluster: VirtualCluster, world: VirtualWorld, isolation: Literal["read_committed", "read_uncommitted"], count: int
) -> list[bytes]:
    """Return the first `count` values of P0."""
    async with Consumer(cluster.bootstrap, world=world, isolation_level=isolation) as consumer:
        consumer.assign([P0])
        values: list[bytes] = []
        while len(values) < count:
            values += [record.value or b"" for record in await consumer.poll(timeout_ms=1_000)]
        return values


@run_by(with_topic)
async def test_a_transaction_commits_and_the_next_one_aborts(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    producer = RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    assert producer.epoch == 0
    assert await producer.send(P0, b"a", b"b") is E.NONE
    described = await producer.until_state("Ongoing")
    assert described.topics == [t.TransactionTopic("orders", [0])]
    assert await producer.end() is E.NONE
    assert producer.epoch == 1
    await producer.until_state("CompleteCommit")
    assert await producer.send(P0, b"never") is E.NONE
    assert await producer.send(P1, b"neither") is E.NONE
    assert await producer.end(committed=False) is E.NONE
    await producer.until_state("CompleteAbort")
    assert producer.epoch == 2
    assert await producer.send(P0, b"c") is E.NONE
    assert await producer.end() is E.NONE
    assert await read(cluster, world, "read_committed", 3) == [b"a", b"b", b"c"]
    assert await read(cluster, world, "read_uncommitted", 4) == [b"a", b"b", b"never", b"c"]


@run_by(with_topic)
async def test_a_late_end_of_an_earlier_transaction_does_nothing(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """KAFKA-17754."""
    producer, late = RawProducer(cluster, world), RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    assert await producer.send(P0, b"a") is E.NONE
    late.producer_id, late.epoch = producer.producer_id, producer.epoch
    assert await producer.end() is E.NONE
    assert await producer.send(P0, b"b") is E.NONE
    assert await late.end() is E.PRODUCER_FENCED
    assert await late.end(committed=False) is E.PRODUCER_FENCED
    assert (await producer.describe()).transaction_state == "Ongoing"
    assert await late.send(P0, b"late") in (E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED)
    assert await producer.end() is E.NONE
    assert await read(cluster, world, "read_committed", 2) == [b"a", b"b"]


@run_by(with_topic)
async def test_a_new_instance_fences_the_old_one_and_aborts_its_transaction(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    old, new = RawProducer(cluster, world), RawProducer(cluster, world)
    assert await old.init() is E.NONE
    assert await old.send(P0, b"old") is E.NONE
    assert await new.init() is E.NONE
    assert (new.producer_id, new.epoch) == (old.producer_id, old.epoch + 2)
    assert await old.send(P0, b"older") in (E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED)
    assert await old.end() is E.PRODUCER_FENCED
    assert await old.init(goes_on=True) is E.PRODUCER_FENCED
    assert await new.send(P0, b"new") is E.NONE
    assert await new.end() is E.NONE
    assert await read(cluster, world, "read_committed", 1) == [b"new"]


@run_by(with_topic)
async def test_a_late_batch_cannot_open_a_transaction_that_nobody_ends(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """KAFKA-14402, for a client that adds partitions itself and keeps its epoch."""
    producer = RawProducer(cluster, world, raises_epoch=False)
    assert await producer.init() is E.NONE
    assert await producer.send(P0, b"unannounced") is E.INVALID_TXN_STATE
    assert await producer.add(P0) == {E.NONE}
    producer._sequences.clear()
    assert await producer.send(P0, b"a") is E.NONE
    assert await producer.end() is E.NONE
    await producer.until_state("CompleteCommit")
    assert await producer.send(P0, b"late") is E.INVALID_TXN_STATE
    assert await read(cluster, world, "read_committed", 1) == [b"a"]


@run_by(with_topic)
async def test_a_transaction_that_is_open_for_too_long_is_aborted_and_its_producer_goes_on(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world)
    producer.timeout_ms = 5_000
    assert await producer.init() is E.NONE
    assert await producer.send(P0, b"slow") is E.NONE
    await producer.until_state("CompleteAbort", within_s=20)
    assert await producer.end() is E.TRANSACTION_ABORTABLE
    assert await producer.end(committed=False) is E.NONE
    assert await producer.send(P0, b"again") is E.NONE
    assert await producer.end() is E.NONE
    assert await read(cluster, world, "read_committed", 1) == [b"again"]


@pytest.mark.parametrize("committed", [True, False])
def test_the_next_coordinator_finishes_what_was_decided(committed: bool) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        producer = RawProducer(cluster, world)
        assert await producer.init() is E.NONE
        assert await producer.send(P0, b"a") is E.NONE
        assert await producer.end(committed=committed) is E.NONE
        coordinator = await producer.find_coordinator()
        cluster.kill_broker(coordinator)  # the markers may not be written yet
        assert await producer.send(P0, b"b") is E.NONE
        assert await producer.end() is E.NONE
        expected = [b"a", b"b"] if committed else [b"b"]
        assert await read(cluster, world, "read_committed", len(expected)) == expected

    with_topic(program)


@run_by(with_topic)
async def test_an_unanswered_end_is_repeated_at_the_next_coordinator(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    assert await producer.send(P0, b"a") is E.NONE
    assert await producer.end(takes_epoch=False) is E.NONE
    cluster.kill_broker(await producer.find_coordinator())
    assert await producer.end() is E.NONE
    assert producer.epoch == 1
    assert await read(cluster, world, "read_committed", 1) == [b"a"]


@run_by(with_topic)
async def test_a_deposed_coordinator_decides_nothing(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    """It does not know of its successor. "Committed", said of the transaction before, would lose the present one."""
    producer, misled = (RawProducer(cluster, world, raises_epoch=False) for _ in range(2))
    assert await producer.init() is E.NONE
    assert await producer.add(P0) == {E.NONE}
    assert await producer.send(P0, b"a") is E.NONE
    assert await producer.end() is E.NONE
    await producer.until_state("CompleteCommit")
    deposed = await producer.find_coordinator()
    misled.producer_id, misled.epoch = producer.producer_id, producer.epoch
    await misled.ask(deposed, apis.DESCRIBE_TRANSACTIONS, t.DescribeTransactionsRequest(["t"]))
    for other in {*cluster.broker_ids} - {deposed}:
        cut(cluster, deposed, other)
    cluster.simulation.zookeeper.cut(host_name(deposed))
    await cluster.until(lambda: cluster.state(producer.coordinator_partition(2)).leader != deposed)
    end = t.EndTxnRequest("t", misled.producer_id, misled.epoch, committed=True, raises_epoch=False)
    answer = await misled.ask(deposed, apis.END_TXN, end, timeout_s=30)
    assert answer.error_code in (E.COORDINATOR_NOT_AVAILABLE, E.NOT_COORDINATOR)
    add = t.TransactionToExtend("t", misled.producer_id, misled.epoch, [t.TransactionTopic("orders", [0])], True)
    verified = await misled.ask(deposed, apis.ADD_PARTITIONS_TO_TXN, t.AddPartitionsToTxnRequest([add]), timeout_s=30)
    assert codes_of(verified) & {E.COORDINATOR_NOT_AVAILABLE, E.NOT_COORDINATOR}


@run_by(with_topic)
async def test_a_transaction_is_complete_only_when_all_its_partitions_have_the_marker(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    coordinator = await producer.find_coordinator()
    far = next(p for p in (P0, P1) if cluster.state(p).leader != coordinator)
    assert await producer.send(far, b"a") is E.NONE
    cluster.pause_broker(cluster.state(far).leader)
    assert await producer.end() is E.NONE
    assert (await producer.describe()).transaction_state == "PrepareCommit"
    assert await producer.send(P0, b"b") is E.NONE  # waits for the next leader's marker
    assert await producer.end() is E.NONE
    await producer.until_state("CompleteCommit")


def cut(cluster: VirtualCluster, one: int, other: int) -> None:
    network = cluster.simulation.network
    network.block(host_name(one), host_name(other))
    network.block(host_name(other), host_name(one))


@run_by(with_topic)
async def test_a_late_attempt_to_start_does_not_fence_its_own_producer(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    coordinator = await producer.find_coordinator()
    codes = []
    for number in (2, 1):
        request = m.InitProducerIdRequest("t", attempt=Attempt("instance", number, -1))
        answer = await producer.ask(coordinator, apis.INIT_PRODUCER_ID, request)
        codes.append(answer.error_code)
    assert codes == [E.NONE, E.REQUEST_TIMED_OUT]
    assert (await producer.describe()).producer_epoch == 1


@run_by(with_topic)
async def test_an_administrators_marker_has_no_epochs_that_the_log_does_not_know(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """A higher one would fence the producer, or its coordinator, for good."""
    producer = RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    assert await producer.send(P0, b"a") is E.NONE
    leader = cluster.state(P0).leader

    async def abort(producer_epoch: int, coordinator_epoch: int) -> set[int]:
        marker = t.TransactionMarker(
            producer.producer_id, producer_epoch, False, coordinator_epoch, [t.TransactionTopic("orders", [0])]
        )
        answer = await producer.ask(leader, apis.WRITE_TXN_MARKERS, t.WriteTxnMarkersRequest([marker]))
        return {result.error_code for topic in answer.markers[0].topics for result in topic.results_by_partition}

    assert await abort(producer.epoch, 1_000_000) == {E.TRANSACTION_COORDINATOR_FENCED}
    assert await abort(producer.epoch + 1, 0) == {E.INVALID_PRODUCER_EPOCH}
    assert await producer.end() is E.NONE
    await producer.until_state("CompleteCommit")
    assert await abort(32_767, 1_000_000) == {E.NONE}  # nothing is open, so nothing is written
    assert await producer.send(P0, b"b") is E.NONE
    assert await producer.end() is E.NONE
    assert await read(cluster, world, "read_committed", 2) == [b"a", b"b"]


@run_by(with_topic)
async def test_a_partition_with_a_later_epoch_does_not_hold_up_the_end(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Anybody may write idempotent batches under another's producer id."""
    producer, stranger = (RawProducer(cluster, world) for _ in range(2))
    assert await producer.init() is E.NONE
    stranger.producer_id, stranger.epoch = producer.producer_id, 32_767
    records = stranger.batch(P0, b"x", transactional=False)
    assert await stranger.send_records(P0, records) is E.NONE
    assert await producer.send(P1, b"a") is E.NONE
    assert await producer.send(P0, b"b") is E.INVALID_PRODUCER_EPOCH
    assert await producer.end(committed=False) is E.NONE
    await producer.until_state("CompleteAbort")


@run_by(with_topic)
async def test_requests_are_refused_with_the_errors_of_kafka(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    producer = RawProducer(cluster, world)
    producer.timeout_ms = 900_001
    assert await producer.init() is E.INVALID_TRANSACTION_TIMEOUT
    producer.timeout_ms = 900_000
    assert await producer.add(P0) == {E.INVALID_PRODUCER_ID_MAPPING, E.NONE}
    assert (await producer.describe()).error_code == E.TRANSACTIONAL_ID_NOT_FOUND
    assert await producer.init() is E.NONE
    assert await producer.end() is E.INVALID_TXN_STATE
    unknown = TopicPartition("nothing", 0)
    assert await producer.add(P0, unknown) == {E.UNKNOWN_TOPIC_OR_PARTITION, E.OPERATION_NOT_ATTEMPTED, E.NONE}
    listed = await producer.of_coordinator(apis.LIST_TRANSACTIONS, t.ListTransactionsRequest(["Empty", "What"]))
    assert listed.unknown_state_filters == ["What"]
    assert [each.transactional_id for each in listed.transaction_states] == ["t"]


@run_by(with_topic)
async def test_the_partitions_of_transactions_count_towards_the_memory_of_a_coordinator(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    producer = RawProducer(cluster, world)
    assert await producer.init() is E.NONE
    services = cluster.broker(await producer.find_coordinator())._services
    assert services is not None
    kept = services.transactions.terms.kept
    kept.limit = kept.kept + PARTITION_BYTES
    assert E.POLICY_VIOLATION in await producer.add(P0, P1)
    kept.limit += 10 * PARTITION_BYTES
    assert await producer.add(P0, P1) == {E.NONE}
    assert await producer.end() is E.NONE
