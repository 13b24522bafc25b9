from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from minibroker.broker.handlers.fetch import MOST_AT_ONCE_BYTES, MOST_TO_CONSUMERS_BYTES
from minibroker.broker.replication.isolation import CONSUMER
from minibroker.broker.replication.questions import WAIVED
from minibroker.broker.scheduling import slices
from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    EARLIEST_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.principal import broker_principal
from minibroker.protocol.records import READ_COMMITTED, READ_UNCOMMITTED, encode_batch
from tests.replication_support import TOPIC, TOPIC_ID, OneBroker, fetch_of, state, with_one_broker
from tests.running import run_by
from tests.storage_support import NOW, batch, headers, stamped
from tests.unit.broker.handlers.test_handlers_produce_and_control import Peer
from tests.waiting import until

PARTITIONS = 12
MEBIBYTE = 1024 * 1024


def response(peer: Peer, api: apis.Api[Any, Any]) -> Any:
    """A fetch request without a size limit."""
    frame = peer.answers[-1]
    assert frame is not None
    return apis.decode_response(api, apis.decode_response_envelope(frame[4:]))


async def lead_all(broker: OneBroker, batches: int, size: int) -> None:
    """Produce some batches of one record to every partition."""
    await broker.told(*(state(isr=(1,), replicas=(1, 2), index=index) for index in range(PARTITIONS)))
    records = batch(1, size=size)
    for index in range(PARTITIONS):
        for _ in range(batches):
            broker.partition(TopicPartition(TOPIC, index)).append(records, required_acks=1, now_ms=0)


@pytest.mark.parametrize(("reader", "most"), [(CONSUMER, MOST_TO_CONSUMERS_BYTES), (2, MOST_AT_ONCE_BYTES)])
@run_by(with_one_broker)
async def test_one_response_holds_no_more_than_one_read(broker: OneBroker, /, reader: int, most: int) -> None:
    peer = Peer(broker)
    if reader != CONSUMER:
        peer.session.principal = broker_principal(reader)
    await lead_all(broker, batches=8, size=MEBIBYTE // 8 - 1_000)
    asked = [fetch_of(0, index=index, max_bytes=MEBIBYTE) for index in range(PARTITIONS)]
    wanted = [FetchTopic(TOPIC, TOPIC_ID, asked)]
    await peer.send(apis.FETCH, FetchRequest(reader, 500, 1, 64 * MEBIBYTE, 0, wanted))
    answer: FetchResponse = response(peer, apis.FETCH)
    partitions = answer.responses[0].partitions
    sizes = [len(partition.records) for partition in partitions]
    assert len(sizes) == PARTITIONS
    assert most * 0.8 < sum(sizes) <= most < PARTITIONS * sizes[0]
    assert not any(partition.error_code for partition in partitions)


@run_by(with_one_broker)
async def test_a_smaller_limit_of_the_request_holds(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await lead_all(broker, batches=1, size=1_000)
    asked = [fetch_of(0, index=index) for index in range(PARTITIONS)]
    await peer.send(apis.FETCH, FetchRequest(-1, 500, 1, 3_000, 0, [FetchTopic(TOPIC, TOPIC_ID, asked)]))
    answer: FetchResponse = response(peer, apis.FETCH)
    assert sum(bool(partition.records) for partition in answer.responses[0].partitions) == 2


def emptied(base_offset: int) -> bytes:
    """Return the batch as compaction leaves it once its only record is gone."""
    sent = encode_batch([], base_timestamp=NOW, base_offset=base_offset, last_offset_delta=0)
    return stamped(bytes(sent), base_offset, 0)


async def fetched(broker: OneBroker, peer: Peer, *offsets: int, reader: int = CONSUMER, most: int = MEBIBYTE) -> Any:
    """Return base offset and number of records of each batch, for each partition."""
    epochs = [0 if offset and reader != CONSUMER else -1 for offset in offsets]
    asked = [fetch_of(offset, index=index, last_epoch=epochs[index]) for index, offset in enumerate(offsets)]
    before = len(peer.answers)
    await peer.send(apis.FETCH, FetchRequest(reader, 0, 1, most, 0, [FetchTopic(TOPIC, TOPIC_ID, asked)]))
    await until(lambda: len(peer.answers) > before)
    answer: FetchResponse = response(peer, apis.FETCH)
    partitions = answer.responses[0].partitions
    assert not any(partition.error_code for partition in partitions)
    return [[(h.base_offset, h.records_count) for h in headers(bytes(p.records))] for p in partitions]


@pytest.mark.parametrize("run", [1, 300])
def test_consumers_get_records_behind_batches_that_compaction_has_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    """kafka-go would ask for the same offset for ever. Followers get all batches."""
    slices_begun: list[None] = []
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    monkeypatch.setattr(slices.Slices, "breathe", counting(slices.Slices.breathe, slices_begun))

    async def scenario(broker: OneBroker) -> None:
        peer, follower = Peer(broker), Peer(broker)
        follower.session.principal = broker_principal(2)
        await broker.told(*(state(isr=(1, 2), replicas=(1, 2), index=index) for index in range(2)))
        for index in range(2):
            partition = broker.partition(TopicPartition(TOPIC, index))
            for offset in range(run):
                partition.log.append_as_follower(emptied(offset))
            partition.append(batch(1), required_acks=1, now_ms=NOW)
        everything = [(offset, 0) for offset in range(run)] + [(run, 1)]
        assert await fetched(broker, follower, 0, 0, reader=2) == [everything] * 2
        await fetched(broker, follower, run, run, reader=2)
        assert await fetched(broker, peer, 0) == [[(run - 1, 0)]], "the record is not committed yet"
        await fetched(broker, follower, run + 1, run + 1, reader=2)
        slices_begun.clear()
        assert await fetched(broker, peer, 0) == [[(run, 1)]]
        assert (len(slices_begun) > run // 100) == (run > 100)
        assert await fetched(broker, peer, run - 1, run) == [[(run, 1)]] * 2
        assert await fetched(broker, peer, 0, 0, most=1) == [[(run, 1)], []], "the limits hold for the bytes sent"

    with_one_broker(tmp_path, scenario)


def counting(original: Any, calls: list[None]) -> Any:
    async def counted(self: slices.Slices) -> None:
        calls.append(None)
        await original(self)

    return counted


@pytest.mark.parametrize("api", [apis.LIST_OFFSETS, apis.OFFSET_FOR_LEADER_EPOCH])
@run_by(with_one_broker)
async def test_the_loop_runs_other_work_between_the_partitions_of_an_offset_request(
    broker: OneBroker, /, monkeypatch: pytest.MonkeyPatch, api: apis.Api[Any, Any]
) -> None:
    peer = Peer(broker)
    await lead_all(broker, batches=3, size=100)
    if api is apis.LIST_OFFSETS:
        wanted = [ListOffsetsPartition(index, -1, LATEST_TIMESTAMP) for index in range(PARTITIONS)]
        body: Any = ListOffsetsRequest(-1, 0, [ListOffsetsTopic(TOPIC, wanted)])
    else:
        epochs = [OffsetForLeaderPartition(index, -1, 0) for index in range(PARTITIONS)]
        body = OffsetForLeaderEpochRequest(-1, [OffsetForLeaderTopic(TOPIC, epochs)])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while not peer.answers:
            await asyncio.sleep(slices.BREATH_S)
            turns += 1

    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # as long as the virtual clock stands still
    other = asyncio.ensure_future(others())
    await peer.send(api, body)
    await other
    assert turns >= PARTITIONS
    answer = response(peer, api)
    if isinstance(answer, ListOffsetsResponse):
        assert [partition.offset for partition in answer.topics[0].partitions] == [3] * PARTITIONS
    else:
        assert isinstance(answer, OffsetForLeaderEpochResponse)
        assert [partition.end_offset for partition in answer.topics[0].partitions] == [3] * PARTITIONS


@run_by(with_one_broker)
async def test_the_loop_runs_other_work_while_a_segment_is_searched(
    broker: OneBroker, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(broker)
    await lead_all(broker, batches=1, size=100)
    log = broker.partition(TopicPartition(TOPIC, 0)).log
    log.append_as_leader(batch(1, timestamp=NOW + 9_999), 0, NOW)
    for _ in range(1_000):
        log.append_as_leader(batch(1), 0, NOW)
    log.move_log_start_offset(2)
    broker.partition(TopicPartition(TOPIC, 0)).append(batch(1), required_acks=1, now_ms=0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while not peer.answers:
            await asyncio.sleep(slices.BREATH_S)
            turns += 1

    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # as long as the virtual clock stands still
    other = asyncio.ensure_future(others())
    wanted = [ListOffsetsPartition(0, -1, MAX_TIMESTAMP)]
    await peer.send(apis.LIST_OFFSETS, ListOffsetsRequest(-1, 0, [ListOffsetsTopic(TOPIC, wanted)]))
    await other
    assert turns > 10
    answer: ListOffsetsResponse = response(peer, apis.LIST_OFFSETS)
    found = answer.topics[0].partitions[0]
    assert (found.error_code, found.timestamp, found.offset) == (ErrorCode.NONE, NOW, 2)


@run_by(with_one_broker)
async def test_the_offsets_of_an_earlier_topic_of_that_name_are_not_returned(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await lead_all(broker, batches=3, size=100)
    wanted = [ListOffsetsPartition(0, -1, LATEST_TIMESTAMP)]
    codes = []
    for topic_id in (TOPIC_ID, "", "another-topic-id"):
        await peer.send(apis.LIST_OFFSETS, ListOffsetsRequest(-1, 0, [ListOffsetsTopic(TOPIC, wanted, topic_id)]))
        answer: ListOffsetsResponse = response(peer, apis.LIST_OFFSETS)
        codes.append(answer.topics[0].partitions[0].error_code)
        peer.answers.clear()
    assert codes == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.INCONSISTENT_TOPIC_ID]


@run_by(with_one_broker)
async def test_records_are_deleted_from_each_partition_by_itself_and_none_if_one_is_named_twice(
    broker: OneBroker, /
) -> None:
    peer = Peer(broker)
    await lead_all(broker, batches=3, size=100)
    wanted = [DeleteRecordsPartition(index, index) for index in range(5)]
    with pytest.raises(BrokerError, match="named twice"):
        await peer.send(apis.DELETE_RECORDS, DeleteRecordsRequest([DeleteRecordsTopic(TOPIC, wanted * 2)], 1_000))
    assert broker.partition(TopicPartition(TOPIC, 2)).log.log_start_offset == 0
    await peer.send(apis.DELETE_RECORDS, DeleteRecordsRequest([DeleteRecordsTopic(TOPIC, wanted)], 1_000))
    await asyncio.sleep(1)
    answer = response(peer, apis.DELETE_RECORDS)
    assert isinstance(answer, DeleteRecordsResponse)
    told = [(result.low_watermark, result.error_code) for result in answer.topics[0].partitions]
    beyond = (-1, ErrorCode.OFFSET_OUT_OF_RANGE)
    assert told == [(0, 0), (1, 0), (2, 0), (3, 0), beyond]


async def lead_with_an_open_transaction(broker: OneBroker) -> None:
    """A record at 0, an emptied batch at 1, a transaction that is open since 2, and a record at 3."""
    await broker.told(state(isr=(1,), replicas=(1,)))
    partition = broker.partition()
    partition.append(batch(timestamp=NOW), required_acks=1, now_ms=NOW)
    partition.log.append_as_follower(emptied(1))
    opening = batch(producer_id=7, transactional=True)
    partition.append(opening, required_acks=1, now_ms=NOW, question=WAIVED)
    partition.append(batch(timestamp=NOW + 9), required_acks=1, now_ms=NOW)


@run_by(with_one_broker)
async def test_offsets_for_read_committed_end_at_the_last_stable_offset(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await lead_with_an_open_transaction(broker)

    async def listed(isolation_level: int) -> list[int]:
        found = []
        for timestamp in (LATEST_TIMESTAMP, NOW + 9, MAX_TIMESTAMP, EARLIEST_TIMESTAMP):
            wanted = [ListOffsetsPartition(0, -1, timestamp)]
            await peer.send(
                apis.LIST_OFFSETS, ListOffsetsRequest(-1, isolation_level, [ListOffsetsTopic(TOPIC, wanted)])
            )
            answer: ListOffsetsResponse = response(peer, apis.LIST_OFFSETS)
            found.append(answer.topics[0].partitions[0].offset)
        return found

    assert await listed(READ_UNCOMMITTED) == [4, 3, 3, 0]
    assert await listed(READ_COMMITTED) == [2, -1, 0, 0]


@run_by(with_one_broker)
async def test_a_reader_of_committed_records_is_not_led_past_emptied_batches_into_an_open_transaction(
    broker: OneBroker, /
) -> None:
    peer = Peer(broker)
    await lead_with_an_open_transaction(broker)
    for isolation_level, found in ((READ_UNCOMMITTED, [2, 3]), (READ_COMMITTED, [1])):
        before = len(peer.answers)
        topics = [FetchTopic(TOPIC, TOPIC_ID, [fetch_of(1)])]
        await peer.send(apis.FETCH, FetchRequest(CONSUMER, 0, 1, MEBIBYTE, isolation_level, topics))
        await until(lambda before=before: len(peer.answers) > before)  # type: ignore[misc]
        answer: FetchResponse = response(peer, apis.FETCH)
        records = bytes(answer.responses[0].partitions[0].records)
        assert [header.base_offset for header in headers(records)] == found


@run_by(with_one_broker)
async def test_an_unknown_isolation_level_is_refused(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await lead_with_an_open_transaction(broker)
    with pytest.raises(BrokerError) as refused:
        await peer.send(
            apis.FETCH, FetchRequest(CONSUMER, 0, 1, MEBIBYTE, 2, [FetchTopic(TOPIC, TOPIC_ID, [fetch_of(0)])])
        )
    assert refused.value.code is ErrorCode.INVALID_REQUEST
