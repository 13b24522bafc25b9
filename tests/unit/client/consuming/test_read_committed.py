"""Isolation levels: consumers against scripted brokers with open, committed and aborted transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import minibroker.sync
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CorruptBatch, InvalidSetting
from minibroker.client.fetching.fetch_state import FetchedBatch, TopicPartitionState
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.settings import IsolationLevel
from minibroker.protocol.apis import FETCH, LIST_OFFSETS, OFFSET_FETCH
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import AbortedTransaction
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    HEADER_SIZE,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    BatchFilter,
    ControlType,
    encode_batch,
    parse_header,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import write_header
from tests.running import run_by
from tests.unit.client.scripted_broker import Log, ScriptedCluster, reject
from tests.unit.client.scripted_thread import scripted_cluster
from tests.waiting import until

P0 = TopicPartition("orders", 0)
COMMIT, ABORT = ControlType.COMMIT, ControlType.ABORT
LEVELS: list[IsolationLevel] = ["read_uncommitted", "read_committed"]


def run(scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ScriptedCluster() as cluster:
            cluster.add_topic("orders")
            await scenario(cluster)

    asyncio.run(main())


class Transactions:
    """Producers that write to a log. A value is a producer and a number."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._sequences: dict[int, int] = {}

    def send(self, producer: int, *values: int) -> None:
        sequence = self._sequences.get(producer, 0)
        data = encode_batch(
            [b"%d:%d" % (producer, value) for value in values],
            base_timestamp=1_000,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=True,
        )
        assert self.log.append(data)[0] is ErrorCode.NONE
        self._sequences[producer] = sequence + len(values)

    def plain(self, *values: int) -> None:
        self.log.append(encode_batch([b"%d" % value for value in values], base_timestamp=1_000))

    def end(self, producer: int, type: ControlType) -> None:
        self.log.end_transaction(producer, type)


def interleaved(log: Log) -> Transactions:
    """Offsets 0 to 11: what is committed are 0, 3, 6, 10; 7 is aborted by the producer that has committed before."""
    producers = Transactions(log)
    producers.plain(0)  # 0
    producers.send(1, 1, 2)  # 1, 2: aborted
    producers.send(2, 3)  # 3: committed
    producers.end(1, ABORT)  # 4
    producers.end(2, COMMIT)  # 5
    producers.send(1, 6)  # 6: committed
    producers.send(2, 7)  # 7: aborted
    producers.end(1, COMMIT)  # 8
    producers.end(2, ABORT)  # 9
    producers.plain(10)  # 10
    producers.end(3, ABORT)  # 11: of a transaction without records
    return producers


COMMITTED = [0, 3, 6, 10]


async def read_to_the_end(consumer: Consumer) -> list[int]:
    """Return the offsets of all records that there are."""
    offsets: list[int] = []
    while (await consumer.lag(P0))[P0] > 0:
        offsets += [record.offset for record in await consumer.poll(50)]
    return offsets


@run_by(run)
async def test_read_committed_returns_no_record_of_an_aborted_transaction(cluster: ScriptedCluster, /) -> None:
    interleaved(cluster.log("orders"))
    async with Consumer(cluster.bootstrap, topics=["orders"], isolation_level="read_committed") as consumer:
        assert await read_to_the_end(consumer) == COMMITTED
        assert await consumer.position(P0) == 12
        for first in range(13):
            consumer.seek(P0, first)
            assert await read_to_the_end(consumer) == [offset for offset in COMMITTED if offset >= first]


@run_by(run)
async def test_read_uncommitted_returns_all_records_and_no_marker(cluster: ScriptedCluster, /) -> None:
    interleaved(cluster.log("orders"))
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        assert await read_to_the_end(consumer) == [0, 1, 2, 3, 6, 7, 10]
        assert await consumer.position(P0) == 12
    assert {request.isolation_level for request in cluster.requests(FETCH)} == {READ_UNCOMMITTED}


@run_by(run)
async def test_an_open_transaction_ends_what_read_committed_reads(cluster: ScriptedCluster, /) -> None:
    producers = Transactions(cluster.log("orders"))
    producers.plain(0)
    producers.send(1, 1)
    producers.plain(2)
    async with Consumer(cluster.bootstrap, topics=["orders"], isolation_level="read_committed") as consumer:
        assert await read_to_the_end(consumer) == [0]
        assert await consumer.end_offsets([P0]) == {P0: 1}
        assert await consumer.lag() == {P0: 0}
        await until(lambda: "an open transaction holds back 2 offsets" in str(consumer.status()), 5)
        assert await consumer.poll(0) == []
        producers.end(1, COMMIT)
        cluster.notify()
        assert [record.offset for record in [await anext(consumer), await anext(consumer)]] == [1, 2]
    assert {request.isolation_level for request in cluster.requests(FETCH)} == {READ_COMMITTED}
    assert {request.isolation_level for request in cluster.requests(LIST_OFFSETS)} == {READ_COMMITTED}


@run_by(run)
async def test_the_end_is_the_last_stable_offset_wherever_it_is_asked_for(cluster: ScriptedCluster, /) -> None:
    producers = Transactions(cluster.log("orders"))
    producers.plain(0, 1)
    producers.send(1, 2)
    ends: dict[IsolationLevel, int] = {"read_uncommitted": 3, "read_committed": 2}
    for level, end in ends.items():
        async with Consumer(
            cluster.bootstrap, topics=["orders"], isolation_level=level, auto_offset_reset="latest"
        ) as consumer:
            assert await consumer.position(P0) == end
            consumer.seek_to_beginning()
            consumer.seek_to_end(P0)
            assert await consumer.position(P0) == end
            assert await consumer.end_offsets([P0]) == {P0: end}


@pytest.mark.parametrize("level", LEVELS)
@run_by(run)
async def test_answers_with_nothing_for_the_user_are_stepped_over(
    cluster: ScriptedCluster, /, level: IsolationLevel
) -> None:
    producers = Transactions(cluster.log("orders"))
    for number in range(20):
        producers.end(number, COMMIT if number % 2 else ABORT)
    producers.send(1, *range(100))
    producers.end(1, ABORT)
    async with Consumer(
        cluster.bootstrap, topics=["orders"], isolation_level=level, max_partition_fetch_bytes=1
    ) as consumer:
        assert len(await read_to_the_end(consumer)) == (0 if level == "read_committed" else 100)
        assert await consumer.position(P0) == 121
        producers.plain(121)
        cluster.notify()
        assert (await anext(consumer)).offset == 121


@run_by(run)
async def test_the_records_of_an_aborted_batch_are_not_even_decoded(cluster: ScriptedCluster, /) -> None:
    log = cluster.log("orders")
    producers = Transactions(log)
    producers.send(1, 0, 1, 2)
    stored = log.batches.pop()
    no_columns = write_header(bytearray(stored.data[:HEADER_SIZE]) + b"garbage", stored.header)
    log.append_raw(bytes(no_columns))
    producers.end(1, ABORT)
    producers.plain(4)
    async with Consumer(cluster.bootstrap, topics=["orders"], isolation_level="read_committed") as consumer:
        assert (await anext(consumer)).offset == 4
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:
        with pytest.raises(CorruptBatch, match="offsets 0 to 2"):
            await anext(consumer)


@pytest.mark.parametrize("isolation_level", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("codec", [Compression.NONE, Compression.GZIP])
@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
@run_by(run)
async def test_a_body_that_its_producer_filled_with_nonsense_stops_the_consumer_until_it_seeks_past_it(
    cluster: ScriptedCluster, /, isolation_level: IsolationLevel, codec: Compression, magic: int
) -> None:
    log = cluster.log("orders")
    producers = Transactions(log)
    producers.plain(0)
    batch = encode_batch([b"a" * 50] * 3, base_timestamp=1, base_offset=1, compression=codec, magic=magic)
    nonsense = batch[: HEADER_SIZE + 4] + b"\xff" * (len(batch) - HEADER_SIZE - 4)
    log.append_raw(bytes(write_header(nonsense, parse_header(batch))))
    producers.plain(4)
    async with Consumer(cluster.bootstrap, topics=["orders"], isolation_level=isolation_level) as consumer:
        assert (await anext(consumer)).offset == 0
        with pytest.raises(CorruptBatch, match="orders-0 at offsets 1 to 3") as raised:
            await anext(consumer)
        assert "seek(TopicPartition(topic='orders', partition=0), 4)" in str(raised.value)
        consumer.seek(P0, raised.value.next_offset or 0)
        assert (await anext(consumer)).offset == 4


@pytest.mark.parametrize("place", [0, 1], ids=["aborted", "marker"])
@run_by(run)
async def test_a_damaged_batch_is_reported_even_if_the_user_gets_nothing_of_it(
    cluster: ScriptedCluster, /, place: int
) -> None:
    log = cluster.log("orders")
    producers = Transactions(log)
    producers.send(1, 0)
    producers.end(1, ABORT)
    producers.plain(2)
    header, data = log.batches[place]
    damaged = bytearray(data)
    damaged[-1] ^= 1
    log.batches[place] = log.batches[place]._replace(data=bytes(damaged))
    async with Consumer(cluster.bootstrap, topics=["orders"], isolation_level="read_committed") as consumer:
        with pytest.raises(CorruptBatch) as raised:
            await anext(consumer)
        consumer.seek(P0, header.next_offset)
        assert (await anext(consumer)).offset == 2
    assert f"offsets {place} to {place}: the CRC" in str(raised.value)


@run_by(run)
async def test_the_position_behind_a_marker_is_committed(cluster: ScriptedCluster, /) -> None:
    producers = interleaved(cluster.log("orders"))
    offsets = cluster.groups.group("billing").offsets
    async with Consumer(
        cluster.bootstrap,
        partitions=[P0],
        group="billing",
        isolation_level="read_committed",
        enable_auto_commit=True,
        auto_commit_interval_ms=20,
    ) as consumer:
        assert await read_to_the_end(consumer) == COMMITTED
        await consumer.commit()
        assert offsets["orders", 0].offset == 12
        producers.send(1, 12)
        producers.end(1, ABORT)
        cluster.notify()
        assert await read_to_the_end(consumer) == []
        await until(lambda: offsets["orders", 0].offset == 14)


@run_by(run)
async def test_a_commit_behind_the_last_record_of_a_transaction_includes_its_marker(
    cluster: ScriptedCluster, /
) -> None:
    producers = Transactions(cluster.log("orders"))
    producers.send(1, 0, 1)
    producers.send(2, 2)
    producers.end(2, ABORT)
    producers.end(1, COMMIT)
    async with Consumer(
        cluster.bootstrap, partitions=[P0], group="billing", isolation_level="read_committed"
    ) as consumer:
        batch = await anext(consumer.batches())
        assert (list(batch.offsets), batch.next_offset) == ([0, 1], 5)
        await consumer.commit()
        assert await consumer.committed(P0) == {P0: OffsetAndMetadata(5, 0)}
        assert await consumer.lag() == {P0: 0}
        consumer.seek_to_beginning()
        for position in (1, 2):
            await anext(consumer)
            assert await consumer.position(P0) == position
        assert await consumer.poll(0) == []
        assert await consumer.position(P0) == 5


@run_by(run)
async def test_a_committed_offset_that_a_transaction_may_change_is_waited_for(cluster: ScriptedCluster, /) -> None:
    interleaved(cluster.log("orders"))
    unstable = reject(ErrorCode.UNSTABLE_OFFSET_COMMIT)
    cluster.script(OFFSET_FETCH, unstable, unstable, unstable)
    async with Consumer(
        cluster.bootstrap, partitions=[P0], group="billing", isolation_level="read_committed", retry_backoff_ms=10
    ) as consumer:
        assert (await anext(consumer)).offset == 0
    asked = cluster.requests(OFFSET_FETCH)
    assert len(asked) == 4
    assert all(request.require_stable for request in asked)


def test_the_blocking_consumer_has_both_levels() -> None:
    with scripted_cluster(partitions=1) as cluster:
        cluster.do(lambda: interleaved(cluster.cluster.log("orders")) and None)
        found: dict[IsolationLevel, list[int]] = {
            "read_committed": COMMITTED,
            "read_uncommitted": [0, 1, 2, 3, 6, 7, 10],
        }
        for level, expected in found.items():
            with minibroker.sync.Consumer(cluster.bootstrap, partitions=[P0], isolation_level=level) as consumer:
                offsets: list[int] = []
                while consumer.lag(P0)[P0] > 0:
                    offsets += [record.offset for record in consumer.poll(50)]
                assert offsets == expected


def test_an_unknown_isolation_level_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="isolation_level='serializable': use one of 'read_uncommitted', "):
        Consumer("localhost:9092", isolation_level="serializable")  # type: ignore[arg-type]


def test_neighbouring_hidden_batches_take_the_memory_of_one() -> None:
    state = TopicPartitionState(P0, None)
    state.move(0)
    for offset in range(1_000):
        data = encode_batch([b"x"], base_timestamp=0, base_offset=offset)
        state.arrived(FetchedBatch.hidden(state, parse_header(data)))
    assert (len(state.fetched), state.fetched_bytes, state.fetch_offset) == (1, 0, 1_000)
    assert not state.has_records


# --- the filter -------------------------------------------------------------------------------------------------


def shown(log: Log, first: int, aborted: list[AbortedTransaction]) -> Iterator[int]:
    """The offsets of the batches from `first` on that are not hidden."""
    hidden = BatchFilter(aborted)
    for header, _ in log.batches:
        if header.last_offset >= first and not hidden.hides(header):
            yield header.base_offset


@pytest.mark.parametrize("first", range(12))
def test_only_aborted_batches_and_markers_are_hidden_wherever_an_answer_begins(first: int) -> None:
    log = Log(0, keeps=True)
    interleaved(log)
    listed = log.aborted_between(first, log.end)
    assert list(shown(log, first, listed)) == [offset for offset in COMMITTED if offset >= first]
    assert list(shown(log, first, listed[::-1])) == [offset for offset in COMMITTED if offset >= first]


def test_a_producer_may_commit_and_abort_in_turn() -> None:
    log = Log(0, keeps=True)
    producers = Transactions(log)
    for number in range(6):
        producers.send(1, number)
        producers.end(1, ABORT if number % 2 else COMMIT)
    assert list(shown(log, 0, log.aborted_between(0, log.end))) == [0, 4, 8]


def test_a_batch_outside_of_transactions_is_shown_even_if_its_producer_has_aborted() -> None:
    log = Log(0, keeps=True)
    producers = Transactions(log)
    producers.send(1, 0)
    plain = encode_batch([b"x"], base_timestamp=0, producer_id=1, producer_epoch=0, base_sequence=1, base_offset=1)
    log.append_raw(bytes(plain))
    producers.end(1, ABORT)
    assert list(shown(log, 0, log.aborted_between(0, log.end))) == [1]
