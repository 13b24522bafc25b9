from __future__ import annotations

import asyncio
import pickle
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pyarrow
import pytest

from minibroker.client.errors import (
    BufferFull,
    Closed,
    DeliveryFailed,
    PartitionerFailed,
    SerializationFailed,
    WrongEventLoop,
)
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import BatchDeliveryFailed, BatchMetadata, PartMetadata
from minibroker.client.producing.partitioners import Partitioner, Partitions, RoundRobin, WithoutKey, crc32, murmur2
from minibroker.protocol.apis import METADATA, PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.running import run_by
from tests.unit.client.scripted_broker import CARRY_OUT_AND_DROP, HANG, ORDINARY, ScriptedCluster, reject


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 1, partitions: int = 1
) -> None:
    """Run the scenario with a cluster that has a topic "orders"."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster)

    asyncio.run(main())


def values(count: int, first: int = 0) -> list[bytes | None]:
    return [str(index).encode() for index in range(first, first + count)]


# --- the ordinary ---


@run_by(run)
async def test_an_awaited_batch_says_where_its_records_are(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"first")
        delivery = producer.send_batch("orders", values(1_000), partition=0)
        assert not delivery.done()
        metadata = await delivery
        assert metadata == BatchMetadata("orders", (PartMetadata(0, 1, 1_000, range(1_000)),))
        assert metadata.record_count == 1_000
        assert metadata.offsets()[999] == (0, 1_000)
        assert delivery.done()
        assert await delivery == metadata
    assert cluster.log("orders").values() == [b"first", *values(1_000)]


@run_by(run)
async def test_a_batch_is_divided_by_batch_size_and_stays_in_order(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, batch_size=2_000) as producer:
        metadata = await producer.send_batch("orders", values(5_000), partition=0)
    assert metadata.parts == (PartMetadata(0, 0, 5_000, range(5_000)),)
    assert cluster.log("orders").values() == values(5_000)
    sizes = [len(batch.data) for batch in cluster.log("orders").batches]
    assert max(sizes) <= 2_000
    assert len(sizes) > 10


@run_by(run)
async def test_it_keeps_its_order_with_send_on_the_same_partition(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, batch_size=500) as producer:
        expected: list[bytes | None] = []
        for number in range(0, 300, 30):
            producer.send("orders", b"one", partition=0)
            producer.send_batch("orders", values(29, number), partition=0)
            producer.send("orders", b"last", key=b"k", partition=0)
            expected += [b"one", *values(29, number), b"last"]
    assert cluster.log("orders").values() == expected


@pytest.mark.parametrize("by_key", [crc32, murmur2, lambda key, count: len(key) % count])
@run_by(run, partitions=3)
async def test_records_with_keys_go_where_their_hash_says_and_keep_the_order_of_each_partition(
    cluster: ScriptedCluster, /, by_key: Callable[[bytes, int], int]
) -> None:
    async with Producer(cluster.bootstrap, partitioner=Partitioner(by_key=by_key), batch_size=1_000) as producer:
        keys = values(500)
        metadata = await producer.send_batch("orders", values(500), keys, timestamps_ms=range(500))
    for index in range(3):
        records = [
            (key, value, timestamp)
            for batch in cluster.log("orders", index).decoded()
            for key, value, timestamp in zip(batch.keys or (), batch.values, batch.timestamps, strict=True)
        ]
        assert records == [
            (key, key, number) for number, key in enumerate(keys) if key is not None and by_key(key, 3) == index
        ]
    for part in metadata.parts:
        for place, index in enumerate(part.indexes):
            batch = cluster.log("orders", part.partition).values()
            assert batch[part.base_offset + place] == keys[index]


@run_by(run, partitions=3)
async def test_records_without_a_key_are_spread_by_batches_and_none_is_lost(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, batch_size=1_000) as producer:
        metadata = await producer.send_batch("orders", values(2_000))
    assert len({part.partition for part in metadata.parts}) == 3
    found = [value for index in range(3) for value in cluster.log("orders", index).values()]
    assert sorted(map(str, found)) == sorted(map(str, values(2_000)))
    logs = [cluster.log("orders", index).values() for index in range(3)]
    assert [logs[partition][offset] for partition, offset in metadata.offsets()] == values(2_000)


@run_by(run, partitions=4)
async def test_records_with_and_without_a_key_may_be_mixed(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        keys: list[bytes | None] = [b"k" if number % 3 else None for number in range(90)]
        metadata = await producer.send_batch("orders", values(90), keys)
    places = metadata.offsets()
    assert {places[index][0] for index in range(90) if index % 3} == {crc32(b"k", 4)}
    assert len({places[index][0] for index in range(0, 90, 3)}) == 1
    for index, (partition, offset) in enumerate(places):
        assert cluster.log("orders", partition).values()[offset] == str(index).encode()


@run_by(run, partitions=3)
async def test_round_robin_spreads_a_batch_evenly(cluster: ScriptedCluster, /) -> None:
    for partitioner in (Partitioner(without_key=WithoutKey.ROUND_ROBIN), RoundRobin()):
        async with Producer(cluster.bootstrap, partitioner=partitioner) as producer:
            metadata = await producer.send_batch("orders", values(90))
        assert sorted((part.partition, len(part.indexes)) for part in metadata.parts) == [(0, 30), (1, 30), (2, 30)]


@run_by(run)
async def test_nulls_are_sent_and_bytes_of_other_kinds_taken(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        producer.send_batch("orders", (None, bytearray(b"a"), memoryview(b"b")), [b"k", None, bytearray(b"m")])
    (batch,) = cluster.log("orders").decoded()
    assert batch.values == [None, b"a", b"b"]
    assert batch.keys == [b"k", None, b"m"]


@run_by(run)
async def test_an_empty_batch_is_delivered_at_once(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        assert (await producer.send_batch("orders", [])).parts == ()
        assert (await producer.send_batch("orders", pyarrow.array([], "binary"))).parts == ()


@run_by(run, partitions=2)
async def test_a_batch_for_a_topic_that_is_not_known_yet_is_placed_once_it_is(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, batch_size=1_000) as producer:
        producer.send("orders", b"first", partition=1)
        delivery = producer.send_batch("orders", values(500), partition=1)
        keyed = producer.send_batch("orders", values(100), values(100))
        producer.send("orders", b"last", partition=1)
        metadata = await delivery
        assert metadata.parts == (PartMetadata(1, 1, 500, range(500)),)
        for (partition, offset), value in zip((await keyed).offsets(), values(100), strict=True):
            assert value is not None
            assert partition == crc32(value, 2)
            assert cluster.log("orders", partition).values()[offset] == value
    assert [value for value in cluster.log("orders", 1).values() if value in (b"first", b"last")]
    assert cluster.log("orders", 1).values()[:501] == [b"first", *values(500)]
    assert len(cluster.requests(METADATA)) == 2


@run_by(run)
async def test_several_tasks_may_await_it_and_a_cancelled_one_does_not_disturb_the_others(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        delivery = producer.send_batch("orders", values(10))
        tasks = [asyncio.create_task(delivery) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1] == results[2] == await asyncio.wait_for(delivery, 10)


# --- pyarrow ---


@pytest.mark.parametrize("kind", ["binary", "string", "large_binary", "large_string"])
@run_by(run)
async def test_arrow_arrays_are_sent_as_lists_are(cluster: ScriptedCluster, /, kind: str) -> None:
    texts = ["a", None, "", "zwölf", "e" * 100]
    array = pyarrow.array([None if text is None else text.encode() for text in texts], "binary").cast(kind)
    expected = [None if text is None else text.encode() for text in texts]

    async with Producer(cluster.bootstrap) as producer:
        producer.send_batch("orders", array, array, partition=0)
        producer.send_batch("orders", array[3:], partition=0)
        producer.send_batch("orders", array.slice(1, 2), partition=0)
        producer.send_batch("orders", pyarrow.chunked_array([array[4:], array[:1]]), partition=0)
        producer.send_batch("orders", pyarrow.nulls(2), partition=0)
    log = cluster.log("orders")
    assert log.values() == [*expected, *expected[3:], *expected[1:3], expected[4], expected[0], None, None]


@run_by(run)
async def test_an_arrow_array_of_another_type_is_refused(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        with pytest.raises(TypeError, match="int64: cast it"):
            producer.send_batch("orders", pyarrow.array([1, 2]))


# --- a refused batch is refused as a whole ---


@run_by(run)
async def test_a_batch_with_a_record_that_cannot_be_sent_is_refused_as_a_whole_and_names_it(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, max_request_size=10_000) as producer:
        await producer.send("orders", b"known")
        with pytest.raises(BrokerError, match=r"record 7 of .* for orders") as too_large:
            producer.send_batch("orders", [b"x"] * 7 + [b"x" * 10_000])
        assert too_large.value.code is ErrorCode.MESSAGE_TOO_LARGE
        with pytest.raises(TypeError, match=r"values\[1\] must be bytes.*encode"):
            producer.send_batch("orders", [b"a", "b"])
        with pytest.raises(TypeError, match=r"keys\[0\] must be bytes"):
            producer.send_batch("orders", [b"a"], [5])
        with pytest.raises(TypeError, match="values must be a list"):
            producer.send_batch("orders", b"one value")
        with pytest.raises(ValueError, match="1 key for 2 values"):
            producer.send_batch("orders", [b"a", b"b"], [b"k"])
        with pytest.raises(ValueError, match="3 timestamps for 2 values"):
            producer.send_batch("orders", [b"a", b"b"], timestamps_ms=[1, 2, 3])
        for wrong in ([-1], [1.5], [True], [1 << 54]):
            with pytest.raises(BrokerError, match=r"timestamps_ms\[0\]"):
                producer.send_batch("orders", [b"a"], timestamps_ms=wrong)  # type: ignore[arg-type]
        for partition in (1, -1):
            with pytest.raises(BrokerError, match=r"artition.?(1|-1)") as unknown:
                producer.send_batch("orders", [b"a"], partition=partition)
            assert unknown.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(BrokerError, match="a/b"):
            producer.send_batch("a/b", [b"a"])
        await producer.flush()
    assert cluster.log("orders").values() == [b"known"]
    with pytest.raises(Closed):
        producer.send_batch("orders", [b"late"])


@run_by(run)
async def test_more_than_the_buffer_may_hold_is_refused_and_what_is_taken_is_held_back_by_drain(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, buffer_memory=100_000, max_request_size=50_000) as producer:
        with pytest.raises(BufferFull, match="raise buffer_memory"):
            producer.send_batch("orders", [b"x" * 1_000] * 200)
        for _ in range(50):
            producer.send_batch("orders", [b"x" * 1_000] * 90)
            assert producer._accumulator.used <= 200_000 + 20_000
            await producer.drain()
            assert producer._accumulator.used <= 100_000
    assert cluster.log("orders").end == 4_500


@run_by(run)
async def test_another_event_loop_is_noticed(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:

        def elsewhere() -> None:
            async def call() -> None:
                with pytest.raises(WrongEventLoop):
                    producer.send_batch("orders", [b"a"])

            asyncio.run(call())

        await asyncio.to_thread(elsewhere)


# --- failures ---


@run_by(run)
async def test_a_batch_that_fails_in_part_says_which_records_failed_and_where_the_others_are(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap, batch_size=500, max_in_flight_requests_per_connection=1) as producer:
        await producer.send("orders", b"first")
        cluster.script(PRODUCE, ORDINARY, reject(ErrorCode.INVALID_RECORD))
        delivery = producer.send_batch("orders", values(60), values(60), partition=0)
        with pytest.raises(BatchDeliveryFailed, match="INVALID_RECORD") as caught:
            await delivery
        error = caught.value
        assert 0 < len(error.indexes) < 60
        assert [failure.value for failure in error.failures] == [str(index).encode() for index in error.indexes]
        assert [failure.key for failure in error.failures] == [str(index).encode() for index in error.indexes]
        delivered = [index for part in error.metadata.parts for index in part.indexes]
        assert sorted([*delivered, *error.indexes]) == list(range(60))
        assert isinstance(error, DeliveryFailed)
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.indexes, copy.metadata) == (error.indexes, error.metadata)
        await producer.flush()  # reported already
    assert cluster.log("orders").values() == [b"first", *(values(60)[index] for index in delivered)]


@run_by(run)
async def test_an_unawaited_failure_is_raised_by_flush(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
        producer.send_batch("orders", values(10))
        with pytest.raises(DeliveryFailed) as caught:
            await producer.flush()
        assert [failure.value for failure in caught.value.failures] == values(10)
        assert producer._accumulator.used == 0


@run_by(run)
async def test_a_batch_for_a_topic_that_does_not_exist_fails_as_a_whole(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, max_block_ms=50) as producer:
        with pytest.raises(BatchDeliveryFailed, match="UNKNOWN_TOPIC_OR_PARTITION") as caught:
            await producer.send_batch("missing", values(10))
        assert caught.value.indexes == tuple(range(10))
        with pytest.raises(BatchDeliveryFailed, match="orders has no partition 5"):
            await producer.send_batch("orders", values(10), partition=5)


@run_by(run)
async def test_a_batch_that_the_broker_finds_too_large_is_split_and_its_delivery_follows(
    cluster: ScriptedCluster, /
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"first")
        cluster.script(PRODUCE, *[reject(ErrorCode.MESSAGE_TOO_LARGE)] * 3)
        metadata = await producer.send_batch("orders", values(100))
        assert metadata.parts == (PartMetadata(0, 1, 100, range(100)),)
    assert cluster.log("orders").values() == [b"first", *values(100)]


@run_by(run)
async def test_a_connection_that_is_lost_after_the_append_makes_no_duplicates(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, CARRY_OUT_AND_DROP, ORDINARY, CARRY_OUT_AND_DROP, CARRY_OUT_AND_DROP)
    async with Producer(cluster.bootstrap, batch_size=1_000, retry_backoff_ms=1) as producer:
        for number in range(5):
            producer.send_batch("orders", values(100, number * 100), partition=0)
    assert cluster.log("orders").values() == values(500)
    sequences = [batch.header.base_sequence for batch in cluster.log("orders").batches]
    assert sequences == sorted(set(sequences))


@run_by(run)
async def test_a_closed_producer_fails_what_is_not_acknowledged(cluster: ScriptedCluster, /) -> None:
    producer = Producer(cluster.bootstrap)
    await producer.start()
    await producer.send("orders", b"known")
    cluster.script(PRODUCE, *[HANG] * 10)
    delivery = producer.send_batch("orders", values(10))
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        await asyncio.gather(closing, return_exceptions=True)
    with pytest.raises(BatchDeliveryFailed, match="closed") as caught:
        await delivery
    assert isinstance(caught.value.failures[0].error, Closed)


# --- serializers and partitioners ---


@run_by(run)
async def test_serializers_apply_to_each_record_and_name_the_one_that_fails(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, value_serializer="json", key_serializer="str") as producer:
        await producer.send_batch("orders", [{"a": 1}, None, [2]], ["k", None, "ö"], partition=0)
        for single in ("text", {"a": 1}, 5):
            with pytest.raises(TypeError, match="values must be a list"):
                producer.send_batch("orders", single)  # type: ignore[arg-type]
        with pytest.raises(SerializationFailed, match="value 1 for orders, of type object"):
            producer.send_batch("orders", [1, object()])
        await producer.send_batch("orders", pyarrow.array(["{}"]), partition=0)
    assert cluster.log("orders").values() == [b'{"a":1}', None, b"[2]", b"{}"]


@run_by(run, partitions=3)
async def test_a_function_that_chooses_partitions_is_asked_for_each_record(cluster: ScriptedCluster, /) -> None:
    seen: list[tuple[str, bytes | None, bytes | None]] = []

    def choose(topic: str, key: bytes | None, value: bytes | None, partitions: Partitions) -> int:
        seen.append((topic, key, value))
        assert partitions == Partitions(3, [0, 1, 2])
        return int(value or b"0") % partitions.count

    async with Producer(cluster.bootstrap, partitioner=choose) as producer:
        producer.send_batch("orders", values(9))
        await producer.flush()
        producer.send_batch("orders", values(9), values(9))
    for index in range(3):
        assert [int(value or b"") % 3 for value in cluster.log("orders", index).values()] == [index] * 6
    assert seen[0] == ("orders", None, b"0")
    assert seen[-1] == ("orders", b"8", b"8")


@run_by(run)
async def test_a_function_that_fails_to_choose_fails_the_call_or_the_records_and_never_the_producer(
    cluster: ScriptedCluster, /
) -> None:
    def choose(topic: str, key: bytes | None, value: bytes | None, partitions: Partitions) -> int:
        if value == b"raise":
            raise KeyError("no such customer")
        return 9 if value == b"far" else 0

    async with Producer(cluster.bootstrap, partitioner=choose) as producer:
        held = producer.send_batch("orders", [b"a", b"raise"])
        with pytest.raises(BatchDeliveryFailed, match="no such customer") as caught:
            await held
        assert isinstance(caught.value.failures[0].error, PartitionerFailed)
        assert isinstance(caught.value.failures[0].error.__cause__, KeyError)
        with pytest.raises(PartitionerFailed, match="no such customer"):
            producer.send("orders", b"raise")
        with pytest.raises(PartitionerFailed, match=r"returned 9 .* from 0 to 0"):
            producer.send_batch("orders", [b"a", b"far"])
        await producer.send("orders", b"fine")
    assert cluster.log("orders").values() == [b"fine"]
