from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from minibroker.client.errors import BufferFull, ClientCrashed, Closed, DeliveryFailed, DeliveryTimedOut
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.client.producing.partitioners import Partitioner, crc32, murmur2
from minibroker.protocol.apis import INIT_PRODUCER_ID, METADATA, PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.records import parse_header
from minibroker.protocol.world.real import RealNetwork, RealWorld
from tests.running import run_by
from tests.unit.client.scripted_broker import (
    CARRY_OUT_AND_DROP,
    CARRY_OUT_AND_HANG,
    DROP,
    HANG,
    Action,
    Received,
    ScriptedCluster,
    carry_out_and_answer,
    leap,
    reject,
)

P = TypeVar("P", bound=asyncio.BaseProtocol)


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 1, partitions: int = 1
) -> None:
    """Run the scenario with a cluster that has a topic "orders"."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster)

    asyncio.run(main())


def values(count: int) -> list[bytes]:
    return [str(index).encode() for index in range(count)]


# --- the ordinary ---


@run_by(run)
async def test_an_awaited_delivery_says_where_the_record_is(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        for offset in range(3):
            metadata = await producer.send("orders", b"v", timestamp_ms=1_000 + offset)
            assert metadata == ("orders", 0, offset, 1_000 + offset)
    assert cluster.log("orders").values() == [b"v"] * 3


@run_by(run)
async def test_keys_headers_and_tombstones_arrive_as_they_were_sent(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, compression="zstd") as producer:
        producer.send("orders", None, key=b"k", headers=[("a", b"1"), ("a", None)], timestamp_ms=7)
        producer.send("orders", bytearray(b"v"), key=memoryview(b"m"))
    (batch,) = cluster.log("orders").decoded()
    assert batch.values == [None, b"v"]
    assert batch.keys == [b"k", b"m"]
    assert batch.headers == [[("a", b"1"), ("a", None)], None]
    assert batch.timestamps[0] == 7


@run_by(run)
async def test_records_of_a_partition_are_in_the_log_in_the_order_of_their_send(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, batch_size=2_000) as producer:
        for value in values(5_000):
            producer.send("orders", value, partition=0)
            await producer.drain()
    assert cluster.log("orders").values() == values(5_000)


@run_by(run, partitions=3)
async def test_records_with_a_key_go_where_its_hash_says(cluster: ScriptedCluster, /) -> None:
    for hash_of in (crc32, murmur2):
        async with Producer(cluster.bootstrap, partitioner=Partitioner(by_key=hash_of)) as producer:
            deliveries = {key: producer.send("orders", b"v", key=key) for key in values(50)}
            for key, delivery in deliveries.items():
                assert (await delivery).partition == hash_of(key, 3)


@run_by(run)
async def test_the_first_record_of_a_topic_is_sent_as_soon_as_its_metadata_is_there(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, linger_ms=0) as producer:
        delivery = producer.send("orders", b"v", key=b"k")
        assert (await delivery).offset == 0
    assert len(cluster.requests(METADATA)) == 2


@run_by(run, partitions=6)
async def test_several_partitions_of_a_leader_share_a_request(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        for partition in range(6):
            producer.send("orders", b"v", partition=partition)
        await producer.flush()
    (request,) = cluster.requests(PRODUCE)
    assert sorted(p.index for p in request.topic_data[0].partition_data) == [0, 1, 2, 3, 4, 5]


@run_by(run, partitions=4)
async def test_requests_stay_below_max_request_size_and_everything_arrives(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, max_request_size=20_000, batch_size=16_000) as producer:
        for index in range(200):
            producer.send("orders", b"x" * 1_000, partition=index % 4)
    assert sum(cluster.log("orders", index).end for index in range(4)) == 200
    for request in cluster.requests(PRODUCE):
        assert sum(len(p.records) for topic in request.topic_data for p in topic.partition_data) <= 20_000


@pytest.mark.slow
@run_by(run)
async def test_no_more_than_the_permitted_requests_are_in_flight(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, *[CARRY_OUT_AND_HANG] * 3)
    async with Producer(
        cluster.bootstrap,
        max_in_flight_requests_per_connection=3,
        batch_size=1_000,
        max_request_size=2_000,
        request_timeout_ms=300,
    ) as producer:
        for _ in range(10):
            producer.send("orders", b"x" * 900, partition=0)
        await cluster.until(lambda: len(cluster.requests(PRODUCE)) == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(cluster.requests(PRODUCE)) == 3
    assert cluster.log("orders").end == 10


@run_by(run)
async def test_deliveries_may_be_awaited_by_many_and_again_and_cancelling_one_cancels_no_other(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        delivery = producer.send("orders", b"v")
        tasks = [asyncio.ensure_future(delivery) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1] == results[2] == await delivery


@run_by(run)
async def test_tasks_are_made_of_deliveries_as_of_coroutines(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(producer.send("orders", value)) for value in values(3)]
        assert [task.result().offset for task in started] == [0, 1, 2]
        delivery = producer.send("orders", b"3")
        alone = asyncio.create_task(delivery, name="alone")
        gathered = await asyncio.gather(delivery, producer.send("orders", b"4"))
        assert [metadata.offset for metadata in gathered] == [3, 4]
        assert await alone == await asyncio.wait_for(delivery, 5) == await asyncio.shield(delivery)
        future = asyncio.run_coroutine_threadsafe(producer.send("orders", b"5"), asyncio.get_running_loop())
        assert (await asyncio.wrap_future(future)).offset == 5
        assert asyncio.iscoroutine(delivery)
        assert "alone" in repr(alone)
        alone.print_stack()


@run_by(run)
async def test_two_tasks_that_close_a_producer_both_wait_until_all_is_acknowledged(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, HANG)
    async with Producer(cluster.bootstrap, request_timeout_ms=300) as producer:
        sent = producer.send("orders", b"v")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)  # it has begun
    assert sent.done()
    assert closing.done()
    assert cluster.log("orders").values() == [b"v"]


@run_by(run)
async def test_a_task_made_of_a_delivery_can_be_cancelled_and_the_record_is_sent_all_the_same(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        delivery = producer.send("orders", b"v")
        task = asyncio.create_task(delivery)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not delivery.done()
        await producer.flush()
        assert delivery.done()
    assert cluster.log("orders").values() == [b"v"]


@run_by(run)
async def test_a_task_made_of_a_delivery_raises_its_error_and_flush_does_not_repeat_it(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
        delivery = producer.send("orders", b"v")
        with pytest.raises(BrokerError):
            await asyncio.create_task(delivery)
        assert delivery.done()
        assert repr(delivery).startswith("<Delivery orders-0 failed: INVALID_RECORD")


@run_by(run)
async def test_a_delivery_says_in_its_repr_how_far_it_is(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        delivery = producer.send("orders", b"v")
        assert (repr(delivery), delivery.done()) == ("<Delivery orders waiting>", False)
        await delivery
        assert (repr(delivery), delivery.done()) == ("<Delivery orders-0 acknowledged, offset=0>", True)


@run_by(run)
async def test_acks_0_counts_as_delivered_what_was_written_and_knows_no_offset(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, acks=0) as producer:
        assert (await producer.send("orders", b"v")).offset == -1
        for _ in range(500):
            producer.send("orders", b"x" * 10_000)
            await producer.drain()
        await producer.flush()
        await cluster.until(lambda: cluster.log("orders").end == 501)
    assert {request.acks for request in cluster.requests(PRODUCE)} == {0}
    assert not cluster.requests(INIT_PRODUCER_ID)


@run_by(run)
async def test_acks_1_is_not_idempotent_and_needs_no_producer_id(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, acks=1) as producer:
        assert (await producer.send("orders", b"v")).offset == 0
    assert not cluster.log("orders").decoded()[0].header.has_producer_id


@run_by(run)
async def test_the_broker_may_set_the_timestamp(cluster: ScriptedCluster, /) -> None:
    answer = cluster.produce

    def stamped(node_id: int, request: Any, action: Any) -> Any:
        response = answer(node_id, request, action)
        response.responses[0].partition_responses[0].log_append_time_ms = 4_242
        return response

    cluster.produce = stamped  # type: ignore[method-assign]
    async with Producer(cluster.bootstrap) as producer:
        assert (await producer.send("orders", b"v", timestamp_ms=1)).timestamp_ms == 4_242


# --- what send refuses ---


@run_by(run)
async def test_send_refuses_what_is_not_bytes_and_says_how_to_encode(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        for wrong in ({"value": "text"}, {"value": b"", "key": "text"}):
            with pytest.raises(TypeError, match="encode"):
                producer.send("orders", **wrong)
        with pytest.raises(TypeError):
            producer.send("orders", 5)
        for headers in ([("name", "text")], [["name", b""]], [("name",)], [(b"name", b"")]):
            with pytest.raises(TypeError, match="headers"):
                producer.send("orders", b"", headers=headers)  # type: ignore[arg-type]


@run_by(run)
async def test_send_refuses_impossible_records_at_once(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"v")
        cases: list[tuple[ErrorCode, Callable[[], Delivery]]] = [
            (ErrorCode.INVALID_TOPIC_EXCEPTION, lambda: producer.send("../orders", b"v")),
            (ErrorCode.MESSAGE_TOO_LARGE, lambda: producer.send("orders", b"x" * 2_000_000)),
            (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, lambda: producer.send("orders", b"v", partition=1)),
            (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, lambda: producer.send("orders", b"v", partition=-1)),
            (ErrorCode.INVALID_TIMESTAMP, lambda: producer.send("orders", b"v", timestamp_ms=-5)),
            (ErrorCode.INVALID_TIMESTAMP, lambda: producer.send("orders", b"v", timestamp_ms=1 << 54)),
        ]
        for code, call in cases:
            with pytest.raises(BrokerError) as caught:
                call()
            assert caught.value.code is code
    assert cluster.log("orders").end == 1


@run_by(run)
async def test_send_raises_buffer_full_where_nobody_drains(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, *[HANG] * 5)
    producer = Producer(cluster.bootstrap, buffer_memory=1024 * 1024)
    await producer.start()
    with pytest.raises(BufferFull, match="drain"):  # noqa: PT012
        for _ in itertools.count():
            producer.send("orders", b"x" * 10_000)
    await producer._shut_down()


@run_by(run)
async def test_drain_holds_the_caller_back_until_brokers_took_records(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, buffer_memory=1024 * 1024) as producer:
        most = 0
        for _ in range(2_000):
            producer.send("orders", b"x" * 10_000)
            await producer.drain()
            most = max(most, producer._accumulator.used)
    assert cluster.log("orders").end == 2_000
    assert most < 1024 * 1024 + 300_000


@run_by(run)
async def test_a_producer_that_is_not_running_says_so(cluster: ScriptedCluster, /) -> None:
    producer = Producer(cluster.bootstrap)
    with pytest.raises(Closed, match="not started"):
        producer.send("orders", b"v")
    async with producer:
        await producer.send("orders", b"v")
    for key in (None, b"k"):
        with pytest.raises(Closed, match="closed"):
            producer.send("orders", b"v", key=key)
    with pytest.raises(Closed):
        await producer.flush()
    with pytest.raises(Closed):
        await producer.start()
    await producer.close()


# --- failures that are reported ---


@run_by(run)
async def test_flush_raises_every_record_that_failed_and_was_not_awaited_once(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
        deliveries = [producer.send("orders", value, key=b"k", timestamp_ms=3) for value in values(3)]
        with pytest.raises(BrokerError) as single:
            await deliveries[1]
        assert single.value.code is ErrorCode.INVALID_RECORD
        with pytest.raises(DeliveryFailed) as caught:
            await producer.flush()
        assert [failure.value for failure in caught.value.failures] == [b"0", b"2"]
        first = caught.value.failures[0]
        assert (first.topic, first.partition, first.key, first.timestamp_ms) == ("orders", 0, b"k", 3)
        assert "2 records" in str(caught.value)
        assert "INVALID_RECORD" in str(caught.value)
        await producer.flush()
        assert (await producer.send("orders", b"after")).offset == 0


@run_by(run)
async def test_close_raises_what_failed_and_still_closes(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
    producer = Producer(cluster.bootstrap)
    await producer.start()
    producer.send("orders", b"v")
    with pytest.raises(DeliveryFailed):
        await producer.close()
    assert len(asyncio.all_tasks()) == 1 + len(_server_tasks(cluster))


def _server_tasks(cluster: ScriptedCluster) -> list[asyncio.Task[None]]:
    return [task for node in cluster.nodes.values() for conn in node.connections for task in conn.tasks]


@run_by(run)
async def test_an_error_in_the_body_is_not_hidden_by_one_of_the_close(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))

    async def body() -> None:
        async with Producer(cluster.bootstrap) as producer:
            producer.send("orders", b"v")
            raise LookupError("mine")

    with pytest.raises(LookupError) as caught:
        await body()
    assert "INVALID_RECORD" in caught.value.__notes__[0]


@run_by(run)
async def test_failed_records_that_fill_the_buffer_are_raised_by_drain(cluster: ScriptedCluster, /) -> None:
    cluster.rules.append(lambda received: reject(ErrorCode.INVALID_RECORD) if received.api is PRODUCE else None)
    async with Producer(cluster.bootstrap, buffer_memory=1024 * 1024) as producer:
        with pytest.raises(DeliveryFailed) as caught:  # noqa: PT012
            while True:
                producer.send("orders", b"x" * 10_000)
                await producer.drain()
        assert caught.value.failures
        with pytest.raises(DeliveryFailed):
            await producer.flush()
        cluster.rules.clear()
        await producer.send("orders", b"after")


@run_by(run)
async def test_a_record_for_a_topic_that_nobody_knows_fails_after_max_block_ms(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, max_block_ms=200) as producer:
        delivery = producer.send("nowhere", b"v")
        with pytest.raises(BrokerError, match="topics create") as caught:
            await delivery
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        await producer.send("orders", b"v")
        assert cluster.requests(METADATA)[-1].topics == ["orders"]  # the other is no longer asked


@run_by(run)
async def test_a_record_waits_for_a_topic_that_is_about_to_exist(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        deliveries = [producer.send("later", value, key=b"k") for value in values(20)]
        await cluster.until(lambda: any(request.topics == ["later"] for request in cluster.requests(METADATA)))
        cluster.add_topic("later", 3)
        results = [await delivery for delivery in deliveries]
        assert [result.offset for result in results] == list(range(20))


@run_by(run)
async def test_a_delivery_times_out_with_the_reason_of_the_last_attempt(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, retry_backoff_ms=20) as producer:

        def refuse(received: Received) -> Action | None:
            if received.api is not PRODUCE:
                return None
            if len(cluster.requests(PRODUCE)) == 3:
                leap(producer)
            return reject(ErrorCode.NOT_ENOUGH_REPLICAS)

        cluster.rules.append(refuse)
        with pytest.raises(DeliveryTimedOut, match="NOT_ENOUGH_REPLICAS") as caught:
            await producer.send("orders", b"v")
        assert isinstance(caught.value, TimeoutError)
        assert len(cluster.requests(PRODUCE)) == 3


@pytest.mark.slow
@run_by(run)
async def test_a_delivery_times_out_while_its_answer_is_awaited(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, CARRY_OUT_AND_HANG)
    producer = Producer(cluster.bootstrap, delivery_timeout_ms=1_000, request_timeout_ms=100)
    await producer.start()
    with pytest.raises(DeliveryTimedOut):
        await producer.send("orders", b"0")
    assert (await producer.send("orders", b"1")).offset == 1
    await producer.close()
    assert cluster.log("orders").values() == [b"0", b"1"]


def test_a_producer_that_reaches_no_broker_names_every_address_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.cluster.runtime.START_PATIENCE_S", 0.1)

    async def scenario(cluster: ScriptedCluster) -> None:
        for node in cluster.nodes.values():
            await node.stop()
        with pytest.raises(NetworkError) as caught:
            await Producer(cluster.bootstrap).start()
        for address in cluster.bootstrap.split(","):
            assert address in str(caught.value)
        assert "minibroker up" in str(caught.value)

    run(scenario, brokers=2)


@run_by(run)
async def test_a_bug_in_a_task_fails_everything_that_waits_and_is_named(cluster: ScriptedCluster, /) -> None:
    def broken(batch: Any) -> Any:
        raise ZeroDivisionError("planted")

    producer = Producer(cluster.bootstrap)
    await producer.start()
    await producer.send("orders", b"v")
    producer._accumulator.take = broken  # type: ignore[assignment, method-assign]
    delivery = producer.send("orders", b"v")
    producer.send("orders", b"unawaited")
    with pytest.raises(ClientCrashed, match="planted"):
        await delivery
    with pytest.raises(ClientCrashed):
        producer.send("orders", b"v")
    with pytest.raises(ClientCrashed):
        await producer.flush()
    with pytest.raises(DeliveryFailed) as caught:
        await producer.close()
    assert [failure.value for failure in caught.value.failures] == [b"unawaited"]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- retries ---


RETRIED = {
    "refused by a broker that does not lead": reject(ErrorCode.NOT_LEADER_OR_FOLLOWER),
    "refused for too few replicas": reject(ErrorCode.NOT_ENOUGH_REPLICAS),
    "appended, then too few replicas": carry_out_and_answer(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
    "appended, then timed out": carry_out_and_answer(ErrorCode.REQUEST_TIMED_OUT),
    "connection lost before": DROP,
    "connection lost after": CARRY_OUT_AND_DROP,
}


@pytest.mark.parametrize("what", list(RETRIED))
@run_by(run, partitions=2)
async def test_retries_neither_lose_nor_duplicate_nor_reorder(cluster: ScriptedCluster, /, what: str) -> None:
    requests = itertools.count()

    def rule(received: Received) -> Any:
        return RETRIED[what] if received.api is PRODUCE and next(requests) % 3 == 1 else None

    cluster.rules.append(rule)
    async with Producer(cluster.bootstrap, batch_size=400, max_request_size=2_000, retry_backoff_ms=5) as producer:
        deliveries = []
        for index, value in enumerate(values(300)):
            deliveries.append(producer.send("orders", value, partition=index % 2))
            if index % 20 == 0:
                await producer.flush()
        results = await asyncio.gather(*deliveries)
    for partition in range(2):
        assert cluster.log("orders", partition).values() == values(300)[partition::2]
        offsets = [result.offset for result in results if result.partition == partition]
        assert offsets == list(range(150))


@run_by(run)
async def test_without_idempotence_a_lost_answer_may_duplicate_but_nothing_is_lost(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, CARRY_OUT_AND_DROP)
    async with Producer(cluster.bootstrap, acks=1, retry_backoff_ms=5) as producer:
        await producer.send("orders", b"v")
    assert cluster.log("orders").values() == [b"v", b"v"]


@run_by(run)
async def test_pipelined_batches_stay_in_order_when_the_first_of_them_fails(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, batch_size=1_000, max_request_size=1_500, retry_backoff_ms=5) as producer:
        await producer.send("orders", b"first")
        cluster.script(PRODUCE, reject(ErrorCode.NOT_ENOUGH_REPLICAS))
        for index in range(12):
            producer.send("orders", b"%02d" % index + b"x" * 800)
        await producer.flush()
    sent = [parse_header(r.topic_data[0].partition_data[0].records) for r in cluster.requests(PRODUCE)]
    assert len(sent) > 13
    assert [value[:2] for value in cluster.log("orders").values()[1:] if value] == [b"%02d" % i for i in range(12)]


@run_by(run)
async def test_a_producer_id_that_the_broker_forgot_goes_on_in_another_epoch(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, retry_backoff_ms=5) as producer:
        await producer.send("orders", b"0")
        await producer.send("orders", b"1")
        cluster.log("orders").forget_producers()
        assert (await producer.send("orders", b"2")).offset == 2
    assert len(cluster.requests(INIT_PRODUCER_ID)) == 1
    assert cluster.log("orders").values() == values(3)


@run_by(run)
async def test_a_batch_that_may_be_in_the_log_fails_rather_than_risk_a_duplicate(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, retry_backoff_ms=5) as producer:
        await producer.send("orders", b"0")

        def forget_after(received: Received) -> Any:
            if received.api is PRODUCE:
                cluster.rules.clear()
                cluster.log("orders").append(received.body.topic_data[0].partition_data[0].records)
                cluster.log("orders").forget_producers()
                return DROP
            return None

        cluster.rules.append(forget_after)
        with pytest.raises(BrokerError) as caught:
            await producer.send("orders", b"1")
        assert caught.value.code is ErrorCode.UNKNOWN_PRODUCER_ID
        assert (await producer.send("orders", b"2")).offset == 2
    assert cluster.log("orders").values() == values(3)


@run_by(run)
async def test_a_producer_id_is_asked_for_until_one_is_granted(cluster: ScriptedCluster, /) -> None:
    cluster.script(INIT_PRODUCER_ID, reject(ErrorCode.UNKNOWN_SERVER_ERROR), DROP)
    async with Producer(cluster.bootstrap, retry_backoff_ms=5) as producer:
        assert (await producer.send("orders", b"v")).offset == 0


@run_by(run)
async def test_what_has_waited_for_a_producer_id_says_so(cluster: ScriptedCluster, /) -> None:
    cluster.script(INIT_PRODUCER_ID, *[HANG] * 100)
    async with Producer(cluster.bootstrap, delivery_timeout_ms=500) as producer:
        with pytest.raises(DeliveryTimedOut, match="a producer id yet, for which it needs ZooKeeper"):
            await producer.send("orders", b"v")


@run_by(run)
async def test_a_batch_that_is_too_large_for_the_topic_is_split_until_it_fits(cluster: ScriptedCluster, /) -> None:
    cluster.log("orders").max_batch_bytes = 3_000
    async with Producer(cluster.bootstrap) as producer:
        deliveries = [producer.send("orders", b"%03d" % index + b"x" * 500) for index in range(40)]
        results = await asyncio.gather(*deliveries)
        assert [result.offset for result in results] == list(range(40))
        with pytest.raises(BrokerError) as caught:
            await producer.send("orders", b"x" * 3_000)
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
        assert (await producer.send("orders", b"after")).offset == 40
    assert [value[:3] for value in cluster.log("orders").values()[:40] if value] == [b"%03d" % i for i in range(40)]


@run_by(run)
async def test_a_throttled_producer_pauses_and_goes_on(cluster: ScriptedCluster, /) -> None:
    answer = cluster.produce
    times = []

    def throttled(node_id: int, request: Any, action: Any) -> Any:
        times.append(asyncio.get_running_loop().time())
        response = answer(node_id, request, action)
        response.throttle_time_ms = 100
        return response

    cluster.produce = throttled  # type: ignore[method-assign]
    async with Producer(cluster.bootstrap) as producer:
        for _ in range(3):
            await producer.send("orders", b"v")
    assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(times))


# --- failover ---


@run_by(run, brokers=2)
async def test_records_go_to_the_new_leader_that_a_broker_hints_at_without_a_refresh(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, retry_backoff_ms=60_000) as producer:
        await producer.send("orders", b"0")
        cluster.rules.append(lambda received: HANG if received.api is METADATA else None)
        cluster.move("orders", 0, 1)
        assert (await producer.send("orders", b"1")).offset == 1


@run_by(run, brokers=2)
async def test_records_go_to_the_new_leader_when_the_old_one_is_killed(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"0")
        await cluster.nodes[0].stop()
        deliveries = [producer.send("orders", value) for value in (b"1", b"2")]
        asked = len(cluster.requests(METADATA))
        await cluster.until(lambda: len(cluster.requests(METADATA)) > asked + 2)
        cluster.move("orders", 0, 1)
        assert [(await delivery).offset for delivery in deliveries] == [1, 2]
    assert cluster.log("orders").values() == values(3)


@pytest.mark.slow
@run_by(run, brokers=2)
async def test_a_leader_that_does_not_answer_is_left_once_another_leads(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"0")
        cluster.rules.append(lambda received: HANG if received.node_id == 0 else None)
        delivery = producer.send("orders", b"1")
        await cluster.until(lambda: len(cluster.requests(PRODUCE)) == 2)
        cluster.move("orders", 0, 1)
        assert (await delivery).offset == 1


class HangingNetwork(RealNetwork):
    """A network on which connections to one port never open, as behind a firewall that drops packets."""

    port: int | None = None

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        if port == self.port:
            await asyncio.get_running_loop().create_future()
        return await super().connect(host, port, factory)


@pytest.mark.slow
@run_by(run, brokers=2)
async def test_a_leader_that_cannot_be_connected_to_is_left_once_another_leads(cluster: ScriptedCluster, /) -> None:
    world = RealWorld()
    network = world.network = HangingNetwork()
    network.port = cluster.nodes[0].port
    async with Producer(cluster.bootstrap.split(",")[1], world=world) as producer:
        delivery = producer.send("orders", b"v")
        await cluster.until(lambda: len(cluster.requests(METADATA)) == 3)
        cluster.move("orders", 0, 1)
        assert (await delivery).offset == 0
    world.close()


@run_by(run)
async def test_records_wait_while_a_partition_has_no_leader(cluster: ScriptedCluster, /) -> None:
    cluster.log("orders").leader = -1
    async with Producer(cluster.bootstrap) as producer:
        delivery = producer.send("orders", b"v")
        await cluster.until(lambda: len(cluster.requests(METADATA)) > 4)
        cluster.move("orders", 0, 0)
        assert (await delivery).offset == 0


@run_by(run)
async def test_a_broker_that_comes_back_on_its_port_is_found_again(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, retry_backoff_ms=20) as producer:
        await producer.send("orders", b"0")
        await cluster.nodes[0].stop()
        delivery = producer.send("orders", b"1")
        await asyncio.sleep(0)
        await cluster.nodes[0].start()
        assert (await delivery).offset == 1


@run_by(run)
async def test_a_topic_that_was_deleted_and_created_again_takes_records_under_new_numbers(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, retry_backoff_ms=300) as producer:
        await producer.send("orders", b"0")
        del cluster.topics["orders"]
        delivery = producer.send("orders", b"1")
        await cluster.until(lambda: len(cluster.requests(PRODUCE)) >= 2)
        cluster.add_topic("orders")
        assert (await delivery).offset == 0
    assert cluster.log("orders").values() == [b"1"]
