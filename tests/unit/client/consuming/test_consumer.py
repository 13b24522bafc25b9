from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from minibroker.client.cluster.offsets import OffsetAndTimestamp
from minibroker.client.consumer import Consumer
from minibroker.client.errors import (
    ApiTimedOut,
    ClientCrashed,
    Closed,
    CorruptBatch,
    DeserializationFailed,
    InvalidSetting,
    LogTruncated,
)
from minibroker.client.fetching.records import ConsumerBatch, Record
from minibroker.protocol import messages as m
from minibroker.protocol.apis import FETCH, LIST_OFFSETS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    MAX_RECORDS,
    ControlType,
    EndTransactionMarker,
    encode_batch,
    encode_control_batch,
)
from tests.faults.hostile.readers import constant_batch
from tests.running import run_by
from tests.unit.client.scripted_broker import DROP, HANG, Action, Log, Received, ScriptedCluster, reject
from tests.waiting import until

P0 = TopicPartition("orders", 0)
P1 = TopicPartition("orders", 1)


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 1, partitions: int = 1
) -> None:
    """Run the scenario with a cluster that has a topic "orders"."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster)

    asyncio.run(main())


def fill(log: Log, count: int, *, batch: int = 10, first: int | None = None, prefix: str = "") -> None:
    """Append records whose values are their offsets."""
    begin = log.end if first is None else first
    for start in range(begin, begin + count, batch):
        values = [f"{prefix}{offset}".encode() for offset in range(start, min(start + batch, begin + count))]
        log.append(encode_batch(values, base_timestamp=1_000 + start, timestamp_deltas=list(range(len(values)))))


def numbers(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]


async def take(consumer: Consumer, count: int) -> list[Record]:
    return [await anext(consumer) for _ in range(count)]


@run_by(run)
async def test_records_come_in_order_with_all_their_fields(cluster: ScriptedCluster, /) -> None:
    cluster.log("orders").append(
        encode_batch(
            [b"a", None],
            base_timestamp=50,
            timestamp_deltas=[0, 3],
            keys=[None, b"k"],
            headers=[None, [("h", b"x")]],
        )
    )
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert await take(consumer, 2) == [
            Record("orders", 0, 0, 50, None, b"a"),
            Record("orders", 0, 1, 53, b"k", None, [("h", b"x")]),
        ]
        assert await consumer.position(P0) == 2


@run_by(run)
async def test_records_that_come_later_are_waited_for(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        waiting = asyncio.ensure_future(anext(consumer))
        await cluster.until(lambda: len(cluster.requests(FETCH)) == 1)
        fill(cluster.log("orders"), 1)
        cluster.notify()
        assert (await waiting).offset == 0


@run_by(run, brokers=3, partitions=6)
async def test_all_partitions_of_all_leaders_are_read_and_none_starves(cluster: ScriptedCluster, /) -> None:
    for partition in range(6):
        fill(cluster.log("orders", partition), 500, batch=50)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert len(consumer.assignment()) == 6
        for assigned in consumer.assignment():  # all are fetched at once, whichever leader answers first
            consumer.seek(assigned, 0)
        records = await take(consumer, 3_000)
        for partition in range(6):
            mine = [record for record in records if record.partition == partition]
            assert numbers(mine) == list(range(500))
        assert {record.partition for record in records[:600]} == set(range(6))


@run_by(run, partitions=2)
async def test_only_the_assigned_partitions_are_read(cluster: ScriptedCluster, /) -> None:
    for partition in range(2):
        fill(cluster.log("orders", partition), 5)
    async with Consumer(cluster.bootstrap, partitions=[P1]) as consumer:
        assert {record.partition for record in await take(consumer, 5)} == {1}
        assert consumer.assignment() == [P1]


@run_by(run)
async def test_batches_are_columns(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 15)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        batches = consumer.batches()
        first, second = await anext(batches), await anext(batches)
        assert (len(first), len(second)) == (10, 5)
        assert list(second.offsets) == [10, 11, 12, 13, 14]
        assert list(second.timestamps) == [1_010, 1_011, 1_012, 1_013, 1_014]
        assert second.values == [b"10", b"11", b"12", b"13", b"14"]
        assert list(second.keys) == [None] * 5
        assert list(second.headers) == [()] * 5
        assert numbers(second.records()) == numbers(list(second)) == list(second.offsets)
        assert second.next_offset == await consumer.position(P0) == 15


@run_by(run)
async def test_a_batch_that_says_its_value_once_comes_in_parts(cluster: ScriptedCluster, /) -> None:
    assert cluster.log("orders").append(memoryview(constant_batch(bytes(1 << 20))))[0] is ErrorCode.NONE
    fill(cluster.log("orders"), 1)
    async with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        first = await anext(consumer.batches())
        second = await anext(consumer.batches())
        assert [*first.offsets, *second.offsets] == list(range(32))
        assert first.to_arrow().nbytes < 17 << 20
        assert [record.offset for record in await take(consumer, 40)] == list(range(32, 72))
        assert await consumer.position(P0) == 72
        consumer.seek(P0, MAX_RECORDS - 3)
        last = [record.offset for record in await take(consumer, 4)]
        assert last == [MAX_RECORDS - 3, MAX_RECORDS - 2, MAX_RECORDS - 1, MAX_RECORDS]


@run_by(run, partitions=2)
async def test_the_parts_of_a_batch_alternate_with_other_partitions(cluster: ScriptedCluster, /) -> None:
    for partition in range(2):
        assert cluster.log("orders", partition).append(constant_batch(bytes(4 << 20), 10))[0] is ErrorCode.NONE
    async with Consumer(cluster.bootstrap, partitions=[P0, P1]) as consumer:
        records = await take(consumer, 20)
    assert [record.offset for record in records if record.partition == 0] == list(range(10))
    assert [record.offset for record in records if record.partition == 1] == list(range(10))
    assert len({record.partition for record in records[:8]}) == 2


@run_by(run)
async def test_reading_by_records_and_by_batches_may_be_mixed(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 30)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert numbers(await take(consumer, 3)) == [0, 1, 2]
        assert list((await anext(consumer.batches())).offsets) == list(range(3, 10))
        assert numbers(await take(consumer, 10)) == list(range(10, 20))
        assert list((await anext(consumer.batches())).offsets) == list(range(20, 30))


@run_by(run)
async def test_an_iteration_that_was_left_or_cancelled_goes_on_where_it_was(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 20)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        async for record in consumer:
            if record.offset == 4:
                break
        async for record in consumer:
            assert record.offset == 5
            break
        batches = consumer.batches()
        await anext(batches)
        await anext(batches)
        for iterator in (consumer, batches):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(iterator)
        fill(cluster.log("orders"), 1)
        cluster.notify()
        assert (await anext(consumer)).offset == 20


@run_by(run)
async def test_a_batch_is_trimmed_to_the_position(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 20)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        consumer.seek(P0, 17)
        assert numbers(await take(consumer, 3)) == [17, 18, 19]


@run_by(run)
async def test_control_batches_and_gaps_of_compaction_are_passed(cluster: ScriptedCluster, /) -> None:
    log = cluster.log("orders")
    fill(log, 2)
    marker = EndTransactionMarker(ControlType.COMMIT, 0)
    log.append_raw(bytes(encode_control_batch(marker, timestamp=0, producer_id=1, producer_epoch=0, base_offset=2)))
    compacted = encode_batch([b"5", b"8"], base_timestamp=0, offset_deltas=[2, 5], last_offset_delta=6, base_offset=3)
    log.append_raw(bytes(compacted))
    log.append_raw(bytes(encode_batch([], base_timestamp=0, last_offset_delta=4, base_offset=10)))
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert numbers(await take(consumer, 4)) == [0, 1, 5, 8]
        fill(log, 1)
        cluster.notify()
        assert (await anext(consumer)).offset == 15
        consumer.seek(P0, 6)
        assert (await anext(consumer)).offset == 8


# --- positions ---


@run_by(run)
async def test_seek_moves_while_records_are_being_handed_out_and_drops_what_was_fetched(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 100)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        seen = []
        async for record in consumer:
            seen.append(record.offset)
            if seen == [0, 1, 2]:
                consumer.seek(P0, 50)
            if len(seen) == 6:
                break
        assert seen == [0, 1, 2, 50, 51, 52]
        consumer.seek_to_beginning(P0)
        assert await consumer.position(P0) == 0
        assert (await anext(consumer)).offset == 0
        consumer.seek_to_end()
        assert await consumer.position(P0) == 100


@run_by(run)
async def test_a_seek_at_the_end_of_the_log_does_not_wait_for_the_fetch_that_is_out(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 10)
    async with Consumer(cluster.bootstrap, topics=["orders"], fetch_max_wait_ms=60_000) as consumer:
        await take(consumer, 10)
        await cluster.until(lambda: cluster.requests(FETCH)[-1].topics[0].partitions[0].fetch_offset == 10)
        consumer.seek(P0, 5)
        assert (await anext(consumer)).offset == 5


@run_by(run)
async def test_latest_begins_at_the_end(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with Consumer(cluster.bootstrap, topics=["orders"], auto_offset_reset="latest") as consumer:
        assert await consumer.position(P0) == 10
        fill(cluster.log("orders"), 1)
        cluster.notify()
        assert (await anext(consumer)).offset == 10


@run_by(run)
async def test_none_demands_a_position(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with Consumer(cluster.bootstrap, topics=["orders"], auto_offset_reset="none") as consumer:
        with pytest.raises(BrokerError, match="seek"):
            await anext(consumer)
        consumer.seek(P0, 4)
        assert (await anext(consumer)).offset == 4
        consumer.seek(P0, 400)
        with pytest.raises(BrokerError, match="0 to 10") as caught:
            await anext(consumer)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


@run_by(run)
async def test_a_position_that_is_not_in_the_log_any_more_is_reset(cluster: ScriptedCluster, /) -> None:
    log = cluster.log("orders")
    fill(log, 30)
    log.batches = log.batches[1:]
    log.start = 10
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        consumer.seek(P0, 3)
        assert (await anext(consumer)).offset == 10


@run_by(run)
async def test_what_was_fetched_is_handed_out_before_a_position_is_reset(cluster: ScriptedCluster, /) -> None:
    log = cluster.log("orders")
    fill(log, 10)
    async with Consumer(cluster.bootstrap, topics=["orders"], fetch_max_wait_ms=10, retry_backoff_ms=5) as consumer:
        assert numbers(await take(consumer, 3)) == [0, 1, 2]
        cluster.received.clear()
        fill(log, 30)
        log.batches = log.batches[3:]
        log.start = 30
        await cluster.until(lambda: len(cluster.requests(FETCH)) > 2)
        assert numbers(await take(consumer, 9)) == [3, 4, 5, 6, 7, 8, 9, 30, 31]


@run_by(run)
async def test_the_rest_of_a_batch_is_dropped_where_the_log_was_truncated_in_the_middle_of_it(
    cluster: ScriptedCluster, /
) -> None:
    log = cluster.log("orders")
    fill(log, 20, batch=20)
    truncated = False

    def diverging(node_id: int, request: m.FetchRequest, action: Any) -> Any:
        response, size = read(node_id, request, action)
        if truncated and request.topics[0].partitions[0].fetch_offset == 20:
            response.responses[0].partitions[0].diverging_epoch = m.EpochEndOffset(0, 10)
            return response, 1
        return response, size

    read = cluster._read
    cluster._read = diverging  # type: ignore[method-assign]
    async with Consumer(cluster.bootstrap, topics=["orders"], fetch_max_wait_ms=10) as consumer:
        assert numbers(await take(consumer, 15)) == list(range(15))
        log.batches.clear()
        log.end = 0
        fill(log, 20, batch=10, prefix="new-")
        truncated = True
        state = consumer._partitions.states[P0]
        async with asyncio.timeout(10):
            while state.generation < 2:
                await asyncio.sleep(0.01)
        truncated = False
        assert [record.value for record in await take(consumer, 10)] == [b"new-%d" % n for n in range(10, 20)]


@run_by(run, brokers=2, partitions=2)
async def test_offsets_can_be_looked_up(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders", 0), 20)
    fill(cluster.log("orders", 1), 5)
    cluster.script(LIST_OFFSETS, reject(ErrorCode.NOT_LEADER_OR_FOLLOWER), DROP)
    async with Consumer(cluster.bootstrap, partitions=[P0], retry_backoff_ms=5) as consumer:
        assert await consumer.beginning_offsets([P0, P1]) == {P0: 0, P1: 0}
        cluster.script(LIST_OFFSETS, reject(ErrorCode.OFFSET_NOT_AVAILABLE))
        assert await consumer.end_offsets([P0, P1]) == {P0: 20, P1: 5}
        found = OffsetAndTimestamp(7, 1_007, leader_epoch=0)
        assert await consumer.offsets_for_times({P0: 1_007, P1: 9_999}) == {P0: found, P1: None}


@pytest.mark.slow
@run_by(run, brokers=2)
async def test_an_offset_look_up_at_a_broker_that_hangs_goes_to_the_new_leader(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        assert await consumer.position(P0) == 0
        cluster.received.clear()
        cluster.rules.append(lambda received: HANG if received.node_id == 0 else None)
        asking = asyncio.ensure_future(consumer.end_offsets([P0]))
        await cluster.until(lambda: bool(cluster.requests(LIST_OFFSETS)))
        cluster.move("orders", 0, 1)
        assert await asking == {P0: 0}


@pytest.mark.slow
@run_by(run, brokers=2, partitions=2)
async def test_an_offset_look_up_is_repeated_at_one_leader_while_another_hangs(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders", 1), 5)
    async with Consumer(cluster.bootstrap, partitions=[P0], retry_backoff_ms=5) as consumer:
        assert await consumer.position(P0) == 0
        cluster.received.clear()
        again = [reject(ErrorCode.NOT_LEADER_OR_FOLLOWER)]

        def asked(node_id: int) -> int:
            return sum(received[:2] == (node_id, LIST_OFFSETS) for received in cluster.received)

        def answer(received: Received) -> Action | None:
            if received.api is not LIST_OFFSETS:
                return None
            return HANG if received.node_id == 0 else again.pop() if again else None

        cluster.rules.append(answer)
        asking = asyncio.ensure_future(consumer.end_offsets([P0, P1]))
        async with asyncio.timeout(10):  # much less than the request timeout
            await cluster.until(lambda: asked(1) == 2)
        assert not asking.done()
        assert asked(0) == 1
        cluster.move("orders", 0, 1)
        assert await asking == {P0: 0, P1: 5}


@pytest.mark.parametrize("turns", range(5))
@run_by(run)
async def test_a_seek_is_not_undone_by_the_look_up_of_the_end_that_begins_just_then(
    cluster: ScriptedCluster, /, turns: int
) -> None:
    fill(cluster.log("orders", 0), 20)
    async with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        assert await consumer.position(P0) == 0
        cluster.received.clear()
        consumer.seek_to_end(P0)
        for _ in range(turns):
            await asyncio.sleep(0)
        consumer.seek(P0, 3)
        await cluster.until(lambda: any(received.api is FETCH for received in cluster.received))
        assert (await anext(consumer)).offset == 3


@run_by(run)
async def test_an_offset_that_nobody_can_tell_is_given_up_in_time(cluster: ScriptedCluster, /) -> None:
    async with Consumer(
        cluster.bootstrap, topics=["orders"], default_api_timeout_ms=200, retry_backoff_ms=10
    ) as consumer:
        await consumer.position(P0)
        cluster.move("orders", 0, -1)
        consumer.seek_to_end(P0)
        with pytest.raises(ApiTimedOut, match="orders-0"):
            await consumer.position(P0)
        with pytest.raises(BrokerError):
            await consumer.end_offsets([P0])
        with pytest.raises(BrokerError) as caught:
            await consumer.end_offsets([TopicPartition("orders", 7)])
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@run_by(run, partitions=2)
async def test_paused_partitions_are_silent_and_lose_nothing(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders", 0), 30)
    fill(cluster.log("orders", 1), 30)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        first = await anext(consumer)
        paused = TopicPartition("orders", first.partition)
        consumer.pause(paused)
        assert consumer.paused() == [paused]
        others = await take(consumer, 30)
        assert {record.partition for record in others} == {1 - first.partition}
        consumer.resume(paused)
        assert numbers(await take(consumer, 29)) == list(range(1, 30))


def test_a_leader_that_does_not_know_a_partition_yet_triggers_no_topic_lookup(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens while all brokers are restarted."""
    monkeypatch.setattr("minibroker.client.stalls.STALL_S", 0.1)

    async def scenario(cluster: ScriptedCluster) -> None:
        unknown = reject(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        cluster.rules.append(lambda received: unknown if received.api is FETCH else None)
        async with Consumer(cluster.bootstrap, topics=["orders"]):
            await cluster.until(lambda: bool(warnings()))  # the fetch repeats, and looks again each time

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "minibroker.client.stalls"]

    run(scenario)
    [told] = warnings()
    assert told.endswith(
        "UNKNOWN_TOPIC_OR_PARTITION: broker 0, which leads it, does not know it yet. See `minibroker status`"
    )


@run_by(run, partitions=2)
async def test_a_partition_that_is_not_assigned_is_refused(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
        for call in (consumer.pause, consumer.seek_to_beginning):
            with pytest.raises(InvalidSetting, match="not assigned"):
                call(P1)
        with pytest.raises(InvalidSetting):
            consumer.seek(P0, -1)


# --- prefetching ---


@run_by(run)
async def test_the_next_fetch_is_sent_while_a_batch_is_consumed_and_stays_within_the_limit(
    cluster: ScriptedCluster, /
) -> None:
    log = cluster.log("orders")
    for _ in range(100):
        log.append(encode_batch([b"x" * 1_000] * 10, base_timestamp=0))
    async with Consumer(
        cluster.bootstrap, topics=["orders"], max_partition_fetch_bytes=100_000, fetch_max_bytes=200_000
    ) as consumer:
        batches = consumer.batches()
        await anext(batches)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(cluster.requests(FETCH)) == 1
        for _ in range(5):
            await anext(batches)
        await cluster.until(lambda: len(cluster.requests(FETCH)) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(cluster.requests(FETCH)) == 2
        state = consumer._partitions.states[P0]
        assert state.fetched_bytes < 150_000
        for _ in range(94):
            await anext(batches)
        assert await consumer.position(P0) == 1_000


@run_by(run, partitions=2)
async def test_an_idle_partition_does_not_hold_up_a_busy_one_of_the_same_leader(cluster: ScriptedCluster, /) -> None:
    log = cluster.log("orders")
    for _ in range(200):
        log.append(encode_batch([b"x" * 1_000] * 10, base_timestamp=0))
    async with Consumer(
        cluster.bootstrap, topics=["orders"], max_partition_fetch_bytes=50_000, fetch_max_wait_ms=60_000
    ) as consumer:
        async for batch in consumer.batches():
            if batch.next_offset == 2_000:
                break


def partitions_asked(request: m.FetchRequest) -> list[int]:
    return sorted(partition.partition for topic in request.topics for partition in topic.partitions)


@run_by(run, partitions=3)
async def test_a_busy_partition_is_asked_for_without_the_quiet_ones(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, topics=["orders"], fetch_max_wait_ms=60_000) as consumer:
        waiting = asyncio.ensure_future(take(consumer, 1))
        await cluster.until(lambda: len(cluster.requests(FETCH)) == 1)
        fill(cluster.log("orders", 1), 1)
        cluster.notify()
        await waiting
        await cluster.until(lambda: len(cluster.requests(FETCH)) == 3)
        for _ in range(3):
            waiting = asyncio.ensure_future(take(consumer, 1))
            before = len(cluster.requests(FETCH))
            fill(cluster.log("orders", 1), 1)
            cluster.notify()
            await waiting
            await cluster.until(lambda expected=before + 1: len(cluster.requests(FETCH)) == expected)  # type: ignore[misc]
        asked = [partitions_asked(request) for request in cluster.requests(FETCH)]
        assert sorted(asked[0]) == [0, 1, 2]
        assert sorted(asked[1:3]) == [[0, 2], [1]]
        assert asked[3:] == [[1]] * 3


@run_by(run, partitions=3)
async def test_with_a_minimum_of_bytes_all_partitions_are_asked_for_together(cluster: ScriptedCluster, /) -> None:
    async with Consumer(
        cluster.bootstrap, topics=["orders"], fetch_min_bytes=100, fetch_max_wait_ms=60_000
    ) as consumer:
        waiting = asyncio.ensure_future(take(consumer, 20))
        await cluster.until(lambda: len(cluster.requests(FETCH)) == 1)
        fill(cluster.log("orders", 0), 10)
        fill(cluster.log("orders", 2), 10)
        cluster.notify()
        await waiting
        await cluster.until(lambda: len(cluster.requests(FETCH)) == 2)
        requests = cluster.requests(FETCH)
        assert [partitions_asked(request) for request in requests] == [[0, 1, 2]] * 2
        assert [request.max_wait_ms for request in requests] == [60_000] * 2


@run_by(run, partitions=4)
async def test_partitions_that_an_answer_had_no_room_for_come_first_in_the_next(cluster: ScriptedCluster, /) -> None:
    for partition in range(4):
        for _ in range(20):
            cluster.log("orders", partition).append(encode_batch([b"x" * 1_000] * 10, base_timestamp=0))
    async with Consumer(
        cluster.bootstrap, topics=["orders"], max_partition_fetch_bytes=30_000, fetch_max_bytes=60_000
    ) as consumer:
        first: dict[int, int] = {}
        number = 0
        async for batch in consumer.batches():
            first.setdefault(batch.partition, number)
            number += 1
            if number == 80:
                break
        assert max(first.values()) < 20, "a partition waited until others had nothing left"


# --- failures ---


@run_by(run, brokers=2)
async def test_records_are_read_on_from_a_new_leader(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with Consumer(cluster.bootstrap, topics=["orders"], retry_backoff_ms=10) as consumer:
        await take(consumer, 10)
        cluster.move("orders", 0, 1)
        fill(cluster.log("orders"), 5)
        cluster.notify()
        assert numbers(await take(consumer, 5)) == [10, 11, 12, 13, 14]
        await cluster.nodes[1].stop()
        cluster.move("orders", 0, 0)
        fill(cluster.log("orders"), 5)
        cluster.notify()
        assert numbers(await take(consumer, 5)) == [15, 16, 17, 18, 19]
    assert {request.topics[0].partitions[0].current_leader_epoch for request in cluster.requests(FETCH)} == {
        0,
        1,
        2,
    }


@pytest.mark.slow
@run_by(run, brokers=2)
async def test_a_leader_that_does_not_answer_is_left_once_another_leads(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, topics=["orders"], fetch_max_wait_ms=10) as consumer:
        assert await consumer.position(P0) == 0
        cluster.rules.append(lambda received: HANG if received.node_id == 0 else None)
        waiting = asyncio.ensure_future(anext(consumer))
        await cluster.until(lambda: cluster.received[-1].api is FETCH)
        cluster.move("orders", 0, 1)
        fill(cluster.log("orders"), 1)
        assert (await waiting).offset == 0


@run_by(run)
async def test_what_may_succeed_later_is_retried(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 3)
    cluster.script(
        FETCH,
        DROP,
        reject(ErrorCode.OFFSET_NOT_AVAILABLE),
        reject(ErrorCode.UNKNOWN_LEADER_EPOCH),
        reject(ErrorCode.KAFKA_STORAGE_ERROR),
    )
    async with Consumer(cluster.bootstrap, topics=["orders"], retry_backoff_ms=5) as consumer:
        assert numbers(await take(consumer, 3)) == [0, 1, 2]


@run_by(run)
async def test_what_no_retry_mends_is_raised_and_iterating_on_tries_again(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 3)
    cluster.script(FETCH, reject(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE))
    async with Consumer(cluster.bootstrap, topics=["orders"], retry_backoff_ms=5) as consumer:
        with pytest.raises(BrokerError) as caught:
            await anext(consumer)
        assert caught.value.code is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
        assert (await anext(consumer)).offset == 0


@run_by(run)
async def test_a_damaged_batch_is_raised_until_it_is_skipped(cluster: ScriptedCluster, /) -> None:
    log = cluster.log("orders")
    fill(log, 30)
    sound = log.batches[1]
    log.batches[1] = sound._replace(data=sound.data[:-1] + bytes([sound.data[-1] ^ 1]))
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert numbers(await take(consumer, 10)) == list(range(10))
        for _ in range(2):
            with pytest.raises(CorruptBatch, match="offsets 10 to 19") as caught:
                await anext(consumer)
            assert (caught.value.partition, caught.value.next_offset) == (P0, 20)
        consumer.seek(P0, 20)
        assert (await anext(consumer)).offset == 20


@run_by(run)
async def test_bytes_that_are_no_batches_are_raised(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    log = cluster.log("orders")
    log.batches[0] = log.batches[0]._replace(data=b"\xff" * 200)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        with pytest.raises(CorruptBatch):
            await anext(consumer)
        log.batches[0] = log.batches[0]._replace(data=b"\x00" * 30)
        consumer.seek(P0, 0)
        with pytest.raises(MinibrokerError, match="no whole batch"):
            await anext(consumer)


@run_by(run)
async def test_a_log_that_was_truncated_takes_the_consumer_back_to_where_the_histories_part(
    cluster: ScriptedCluster, /
) -> None:
    fill(cluster.log("orders"), 20)

    def diverging(node_id: int, request: m.FetchRequest, action: Any) -> Any:
        (partition,) = request.topics[0].partitions
        response, size = read(node_id, request, action)
        if partition.fetch_offset == 20 and partition.last_fetched_epoch == 0:
            response.responses[0].partitions[0].diverging_epoch = m.EpochEndOffset(0, 15)
            return response, 1
        return response, size

    read = cluster._read
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        await take(consumer, 20)
        cluster._read = diverging  # type: ignore[method-assign]
        assert numbers(await take(consumer, 5)) == [15, 16, 17, 18, 19]
    async with Consumer(cluster.bootstrap, topics=["orders"], auto_offset_reset="none") as consumer:
        consumer.seek(P0, 0)
        assert len(await take(consumer, 20)) == 20
        with pytest.raises(LogTruncated, match="from offset 15"):
            await anext(consumer)


@run_by(run)
async def test_partitions_that_are_added_later_are_read_from_their_beginning(cluster: ScriptedCluster, /) -> None:
    async with Consumer(
        cluster.bootstrap, topics=["orders"], auto_offset_reset="latest", metadata_max_age_ms=20
    ) as consumer:
        assert await consumer.position(P0) == 0
        added = Log(0, True)
        fill(added, 3)
        cluster.topics["orders"].logs.append(added)
        assert [(record.partition, record.offset) for record in await take(consumer, 3)] == [(1, 0), (1, 1), (1, 2)]


@run_by(run)
async def test_a_topic_that_was_created_again_is_read_from_its_beginning(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)
    async with Consumer(cluster.bootstrap, topics=["orders"], metadata_max_age_ms=20, fetch_max_wait_ms=20) as consumer:
        await take(consumer, 10)
        cluster.add_topic("orders")
        fill(cluster.log("orders"), 3, prefix="new-")
        assert [record.value for record in await take(consumer, 3)] == [b"new-0", b"new-1", b"new-2"]


@run_by(run)
async def test_a_topic_that_does_not_exist_is_named_by_start(cluster: ScriptedCluster, /) -> None:
    for assignment in ({"topics": ["nowhere"]}, {"partitions": [TopicPartition("orders", 5)]}):
        consumer = Consumer(cluster.bootstrap, default_api_timeout_ms=150, **assignment)
        with pytest.raises(BrokerError) as caught:
            await consumer.start()
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(Closed):
            await consumer.start()


def test_a_topic_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minibroker.client.fetching.fetcher.UNKNOWN_TOPIC_PATIENCE_S", 0.2)

    async def scenario(cluster: ScriptedCluster) -> None:
        async with Consumer(
            cluster.bootstrap, topics=["orders"], fetch_max_wait_ms=10, retry_backoff_ms=10
        ) as consumer:
            await consumer.position(P0)
            del cluster.topics["orders"]
            with pytest.raises(BrokerError, match="orders") as caught:
                await anext(consumer)
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    run(scenario)


@run_by(run)
async def test_closing_ends_an_iteration_that_waits(cluster: ScriptedCluster, /) -> None:
    consumer = Consumer(cluster.bootstrap, topics=["orders"])
    await consumer.start()
    waiting = asyncio.ensure_future(anext(consumer))
    await cluster.until(lambda: len(cluster.requests(FETCH)) == 1)
    await consumer.close()
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        consumer.seek(P0, 0)


@run_by(run)
async def test_a_bug_in_a_task_is_raised_where_records_are_awaited(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:

        def broken(*arguments: object) -> None:
            raise ZeroDivisionError("planted")

        consumer._fetcher._settle = broken  # type: ignore[assignment, method-assign]
        fill(cluster.log("orders"), 1)
        cluster.notify()
        with pytest.raises(ClientCrashed, match="planted"):
            await anext(consumer)


@run_by(run)
async def test_a_throttled_consumer_pauses(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 1)
    times: list[float] = []

    def noted(received: Received) -> None:
        if received.api is FETCH:
            times.append(asyncio.get_running_loop().time())

    cluster.rules.append(noted)
    answer = cluster.fetch

    async def throttled(node_id: int, request: m.FetchRequest, action: Any) -> m.FetchResponse:
        response = await answer(node_id, request, action)
        response.throttle_time_ms = 100
        return response

    cluster.fetch = throttled  # type: ignore[method-assign]
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        await anext(consumer)
        await cluster.until(lambda: len(times) == 2)
    assert times[1] - times[0] >= 0.09


def test_arrow_needs_pyarrow_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    batch = ConsumerBatch("t", 0, [0], [0], None, [b"v"], None, 1)
    with pytest.raises(MinibrokerError, match="pip install"):
        batch.to_arrow()


@run_by(run)
async def test_deserializers_make_keys_and_values_of_bytes_and_leave_tombstones_alone(
    cluster: ScriptedCluster, /
) -> None:
    cluster.log("orders").append(encode_batch([b'{"n": 1}', None], base_timestamp=1, keys=[b"k", None]))
    async with Consumer(
        cluster.bootstrap, topics=["orders"], key_deserializer="str", value_deserializer="json"
    ) as consumer:
        first, second = await take(consumer, 2)
        assert (first.key, first.value) == ("k", {"n": 1})
        assert (second.key, second.value) == (None, None)


@pytest.mark.parametrize("mode", ["records", "batches", "poll"])
@run_by(run)
async def test_an_undeserializable_record_raises_after_those_before_it_until_it_is_skipped(
    cluster: ScriptedCluster, /, mode: str
) -> None:
    cluster.log("orders").append(encode_batch([b"1", b"2", b"{", b"4"], base_timestamp=1))
    async with Consumer(cluster.bootstrap, topics=["orders"], value_deserializer="json") as consumer:

        async def some() -> list[object]:
            if mode == "records":
                return [(await anext(consumer)).value]
            if mode == "batches":
                return list((await anext(consumer.batches())).values)
            return [record.value for record in await consumer.poll(30_000)]

        got: list[object] = []
        while len(got) < 2:
            got += await some()
        assert got == [1, 2]
        for _ in range(2):
            with pytest.raises(DeserializationFailed, match="orders-0 at offset 2") as raised:
                await some()
            assert await consumer.position(P0) == 2
        consumer.seek(raised.value.partition, raised.value.offset + 1)
        assert await some() == [4]


@run_by(run, partitions=2)
async def test_poll_returns_a_list_even_if_there_is_nothing(cluster: ScriptedCluster, /) -> None:
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert await consumer.poll(timeout_ms=0) == []
        assert await consumer.poll(timeout_ms=50) == []
        fill(cluster.log("orders", 0), 30)
        fill(cluster.log("orders", 1), 30)
        cluster.notify()
        got: list[Record] = []
        while len(got) < 60:
            some = await consumer.poll(30_000, max_records=7)
            assert 1 <= len(some) <= 7
            got += some
        assert sorted((record.partition, record.offset) for record in got) == [
            (partition, offset) for partition in (0, 1) for offset in range(30)
        ]


@run_by(run)
async def test_records_batches_and_polls_may_be_mixed(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 40)
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert numbers(await take(consumer, 3)) == [0, 1, 2]
        assert numbers(await consumer.poll(30_000, max_records=12)) == list(range(3, 15))
        assert list((await anext(consumer.batches())).offsets) == [15, 16, 17, 18, 19]
        assert numbers(await take(consumer, 1)) == [20]
        assert await consumer.position(P0) == 21


@run_by(run)
async def test_seek_to_time_goes_to_the_first_record_as_late_or_to_the_end(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), 10)  # at 1000, 1001, ...
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        consumer.seek_to_time(1_004)
        assert numbers(await take(consumer, 1)) == [4]
        consumer.seek_to_time(5_000, P0)
        assert await consumer.position(P0) == 10
        assert await consumer.lag() == {P0: 0}
        consumer.seek(P0, 3)
        assert await consumer.lag(P0) == {P0: 7}
        consumer.seek(P0, 13)
        assert await consumer.lag(P0) == {P0: -3}


@run_by(run, partitions=4)
async def test_no_more_is_fetched_ahead_than_the_buffer_takes_and_paused_partitions_do_not_fill_it(
    cluster: ScriptedCluster, /
) -> None:
    for partition in range(4):
        for _ in range(50):
            cluster.log("orders", partition).append(encode_batch([b"x" * 1_000], base_timestamp=1))
    async with Consumer(
        cluster.bootstrap, topics=["orders"], fetch_max_buffer_bytes=20_000, max_partition_fetch_bytes=8_000
    ) as consumer:
        states = consumer._partitions.states.values()
        most = 0
        count = 0
        await take(consumer, 1)
        consumer.pause(*consumer.assignment()[:3])
        last = consumer.assignment()[3]
        while (await consumer.position(last)) < 50:
            await anext(consumer)
            count += 1
            most = max(most, sum(state.fetched_bytes for state in states))
        assert most < 20_000 + 8_000 * 4
        consumer.resume(*consumer.paused())
        while count < 199:
            await anext(consumer)
            count += 1


@run_by(run)
async def test_a_pattern_takes_topics_that_match_as_a_whole_and_those_that_come_later(
    cluster: ScriptedCluster, /
) -> None:
    cluster.add_topic("orders-eu", 1)
    cluster.add_topic("reorders", 1)
    fill(cluster.log("orders-eu"), 1)
    async with Consumer(cluster.bootstrap, pattern="orders.*", metadata_max_age_ms=50) as consumer:
        await take(consumer, 1)
        assert {partition.topic for partition in consumer.assignment()} == {"orders", "orders-eu"}
        cluster.add_topic("orders-us", 1)
        fill(cluster.log("orders-us"), 1)
        assert (await anext(consumer)).topic == "orders-us"


@run_by(run)
async def test_the_status_says_why_nothing_arrives(cluster: ScriptedCluster, /) -> None:
    consumer = Consumer(cluster.bootstrap, topics=["orders"])
    assert "not started" in str(consumer.status())
    async with consumer:
        await until(lambda: "at the end" in str(consumer.status()), 10)
        consumer.pause(P0)
        assert "resume()" in str(consumer.status())
        consumer.resume(P0)
        cluster.log("orders").leader = -1
        cluster.log("orders").epoch += 1
        cluster.notify()
        await until(lambda: "no leader" in str(consumer.status()), 10)
        cluster.move("orders", 0, 0)
        fill(cluster.log("orders"), 1)
        cluster.notify()
        await until(lambda: "records are there" in str(consumer.status()), 10)
    assert "closed" in str(consumer.status())
