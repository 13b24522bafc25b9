from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minibroker.broker.replication.appending import ToAppend
from minibroker.broker.replication.lifecycle import DELETIONS_REMEMBERED
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.refused_batches import MOST_REMEMBERED, REMEMBERED_S, RefusedBatches
from minibroker.broker.storage.log import Log
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import topic_ids, znodes
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    DeleteRecordsPartitionResult,
    FetchRequest,
    FetchTopic,
    LeaderAndIsrRequest,
    LeaderAndIsrTopic,
    PartitionError,
    UpdateMetadataPartition,
    UpdateMetadataRequest,
    UpdateMetadataTopic,
)
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS
from minibroker.protocol.world import Operation
from tests.replication_support import (
    LAG_S,
    ORDERS,
    TOPIC,
    TOPIC_ID,
    OneBroker,
    fetch_of,
    state,
    with_one_broker,
)
from tests.running import run_by
from tests.storage_support import batch, headers
from tests.waiting import until

RECORDS = batch(3)


# -- produce --


@run_by(with_one_broker)
async def test_acks_1_and_acks_0_are_answered_at_once(broker: OneBroker, /) -> None:
    await broker.told(state())
    for acks, offset in ((1, 0), (0, 3)):
        answer = broker.produce(RECORDS, acks=acks).result()
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, offset)


@run_by(with_one_broker)
async def test_acks_all_is_answered_once_every_in_sync_replica_has_it(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS)
    broker.follower_has(3, 2)
    await asyncio.sleep(0.1)
    assert not answer.done()
    broker.follower_has(3, 3)
    await asyncio.sleep(0.01)
    assert (answer.result().error_code, answer.result().base_offset) == (ErrorCode.NONE, 0)


@run_by(with_one_broker)
async def test_acks_all_below_min_insync_replicas_appends_nothing(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1,)))
    assert broker.produce(RECORDS).result().error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert broker.partition().log.log_end_offset == 0
    assert broker.produce(RECORDS, acks=1).result().error_code == ErrorCode.NONE


def of_kafka(sequence: int, epoch: int = 0) -> bytes:
    return batch(producer_id=7, producer_epoch=epoch, sequence=sequence, magic=MAGIC_RECORDS)


@run_by(with_one_broker)
async def test_what_an_unknown_producer_of_kafkas_has_under_way_behind_a_refused_batch_waits_for_it(
    broker: OneBroker, /
) -> None:
    def code(records: bytes) -> int:
        return broker.produce(records, acks=1).result().error_code

    assert code(of_kafka(5)) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await broker.told(state())
    assert [code(of_kafka(6)), code(of_kafka(7)), code(of_kafka(6))] == [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER] * 3
    assert [code(of_kafka(5)), code(of_kafka(6)), code(of_kafka(7))] == [ErrorCode.NONE] * 3
    assert broker.partition().log.log_end_offset == 3


@run_by(with_one_broker)
async def test_a_producer_does_not_wait_for_a_refused_batch_that_it_will_not_send_again_here(
    broker: OneBroker, /
) -> None:
    def code(records: bytes) -> int:
        return broker.produce(records, acks=1).result().error_code

    assert code(of_kafka(5)) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await broker.told(state())
    assert code(of_kafka(6)) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    await asyncio.sleep(REMEMBERED_S)
    assert code(of_kafka(6)) == ErrorCode.NONE, "it was appended by another leader, or given up"

    await broker.told(state(2, 1))
    assert code(batch(producer_id=8, sequence=5, magic=MAGIC_RECORDS)) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    await broker.told(state(epoch=2))
    bumped = batch(producer_id=8, producer_epoch=1, sequence=0, magic=MAGIC_RECORDS)
    assert code(bumped) == ErrorCode.NONE, "the producer has begun anew"


def test_as_many_refused_batches_are_remembered_as_memory_is_for() -> None:
    refused = RefusedBatches()
    for producer_id in range(MOST_REMEMBERED + 5):
        records = batch(producer_id=producer_id, sequence=1, magic=MAGIC_RECORDS)
        refused.note(ORDERS, records, ErrorCode.NOT_LEADER_OR_FOLLOWER, 1.0)
    assert len(refused) == MOST_REMEMBERED
    refused.note(ORDERS, b"nonsense", ErrorCode.NOT_LEADER_OR_FOLLOWER, 1.0)
    refused.note(ORDERS, batch(producer_id=MOST_REMEMBERED, sequence=1, magic=MAGIC_RECORDS), ErrorCode.NONE, 1.0)
    assert len(refused) == MOST_REMEMBERED - 1


@run_by(with_one_broker)
async def test_acks_all_ends_with_an_error_when_the_isr_has_become_too_small_meanwhile(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS)
    await broker.told(state(epoch=1, isr=(1,)))
    await asyncio.sleep(0.01)
    assert answer.result().error_code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


@run_by(with_one_broker)
async def test_acks_all_ends_with_an_error_when_the_leader_itself_is_left_alone(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS, timeout_ms=600_000)
    await asyncio.sleep(1)
    assert not answer.done()
    await asyncio.sleep(2 * LAG_S)  # no follower fetches
    assert broker.partition().isr == (1,)
    assert answer.result().error_code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    found = broker.in_zookeeper()
    assert (found.isr, found.eligible) == ((1,), (2, 3))


@run_by(with_one_broker)
async def test_acks_one_is_answered_where_nothing_can_be_committed(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1,), eligible={2: 5}))
    assert broker.produce(RECORDS, acks=1).result().error_code == ErrorCode.NONE
    assert broker.partition().high_watermark == 0


@run_by(with_one_broker)
async def test_a_replica_that_nobody_leads_tells_how_its_log_ends(broker: OneBroker, /) -> None:
    await broker.told(state(epoch=3, isr=(1, 2)))
    broker.produce(RECORDS, acks=1)
    assert await broker.told(state(epoch=4, isr=(1, 2))) == []  # an epoch without records
    [answer] = await broker.told(state(leader=-1, epoch=5, isr=(1,)))
    assert answer == PartitionError(TOPIC, 0, ErrorCode.NONE, leader_epoch=5, last_epoch=3, log_end_offset=3)


@run_by(with_one_broker)
async def test_acks_all_survives_a_new_epoch_of_the_same_leader(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS)
    await broker.told(state(epoch=1, isr=(1, 2)))
    broker.follower_has(3, 2)
    await asyncio.sleep(0.01)
    assert answer.result().error_code == ErrorCode.NONE


@run_by(with_one_broker)
async def test_acks_all_ends_with_an_error_when_the_leader_has_moved(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS)
    await broker.told(state(leader=2, epoch=1))
    await asyncio.sleep(0.01)
    found = answer.result()
    assert (found.error_code, found.current_leader_id, found.current_leader_epoch, found.base_offset) == (
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        2,
        1,
        -1,
    )


@run_by(with_one_broker)
async def test_acks_all_times_out(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS, timeout_ms=200)
    await asyncio.sleep(0.199)
    assert not answer.done()
    await asyncio.sleep(0.01)
    assert answer.result().error_code == ErrorCode.REQUEST_TIMED_OUT
    assert broker.replicas.waits.expired_produces == 1


@run_by(with_one_broker)
async def test_acks_all_ends_with_an_error_when_the_partition_is_deleted(broker: OneBroker, /) -> None:
    await broker.told(state())
    answer = broker.produce(RECORDS)
    reading = broker.fetch(fetch_of(0), max_wait_ms=500)
    assert await broker.stop_replica(epoch=1, delete=True) == []
    await asyncio.sleep(0.01)
    assert answer.result().error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert reading.result()[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert broker.logs.get(ORDERS) is None


@run_by(with_one_broker)
async def test_records_for_another_topic_of_the_same_name_are_refused_before_anything_is_appended(
    broker: OneBroker, /
) -> None:
    await broker.told(state())
    for acks in (1, 0, -1):
        answer = broker.produce(RECORDS, acks=acks, topic_id="another-id").result()
        assert (answer.error_code, answer.base_offset) == (ErrorCode.INCONSISTENT_TOPIC_ID, -1)
    assert broker.produce(RECORDS, acks=1, topic_id="").result().base_offset == 0


@run_by(with_one_broker)
async def test_a_finished_produce_does_not_keep_its_request_in_memory(broker: OneBroker, /) -> None:
    class Frame:
        """Return the object that the callback keeps: the request with its records."""

    await broker.told(state(), state(index=1))
    frame = Frame()
    gone = weakref.ref(frame)
    entries = [ToAppend(ORDERS, "", RECORDS), ToAppend(TopicPartition(TOPIC, 1), "", RECORDS)]
    appender = broker.replicas.appender
    statuses = appender.append(entries, -1)
    appender.await_replicas(statuses, timeout_ms=10, respond=lambda _, held=frame: None)  # type: ignore[misc]
    del frame
    await asyncio.sleep(0.1)
    gc.collect()
    assert broker.replicas.waits.expired_produces == 1
    assert gone() is None


@run_by(with_one_broker)
async def test_the_high_watermark_moves_when_a_silent_follower_outside_the_isr_is_given_up(
    broker: OneBroker, /
) -> None:
    broker.announce_brokers({1: 1, 2: 2, 3: 1})  # 2 is caught up, but in another run than this, so it cannot join
    await broker.told(state(isr=(1, 3)))
    broker.follower_has(0, 2, 3)
    answer = broker.produce(RECORDS, timeout_ms=60_000)
    broker.follower_has(3, 3)
    await asyncio.sleep(0.01)
    assert not answer.done()
    for _ in range(int(2 * LAG_S)):  # 3 has every record and goes on fetching; 2 stays silent
        await asyncio.sleep(1)
        if answer.done():
            break
    assert answer.done()
    assert answer.result().error_code == ErrorCode.NONE


# -- deletions --


@run_by(with_one_broker)
async def test_a_deletion_is_answered_once_every_in_sync_replica_and_the_disk_have_it(broker: OneBroker, /) -> None:
    await broker.told(state())
    broker.produce(RECORDS, acks=1)
    broker.follower_has(3, 2, 3)
    answer = broker.delete(2, timeout_ms=60_000)
    broker.follower_has(3, 3, start=2)
    await asyncio.sleep(1)
    assert not answer.done()
    broker.follower_has(3, 2, start=3)
    await asyncio.sleep(0.01)
    assert answer.result() == DeleteRecordsPartitionResult(0, 2, ErrorCode.NONE)
    again = broker.delete(1)
    assert again.result() == DeleteRecordsPartitionResult(0, 2, ErrorCode.NONE)
    everything = broker.delete(-1, timeout_ms=60_000)
    broker.follower_has(3, 2, 3, start=3)
    await asyncio.sleep(0)
    assert not everything.done()  # the leader's own disk does not have it yet
    await asyncio.sleep(1)
    assert everything.result().low_watermark == 3


@run_by(with_one_broker)
async def test_a_deletion_ends_with_an_error_that_says_what_may_still_happen(broker: OneBroker, /) -> None:
    await broker.told(state())
    broker.produce(RECORDS, acks=1)
    broker.follower_has(3, 2, 3)
    late = broker.delete(2, timeout_ms=200)
    await asyncio.sleep(1)
    assert (late.result().error_code, late.result().low_watermark) == (ErrorCode.REQUEST_TIMED_OUT, -1)
    assert "below 2 are not deleted yet" in late.result().error_message
    assert broker.replicas.waits.expired_deletions == 1
    lonely = broker.delete(2)
    await broker.told(state(epoch=1, isr=(1,)))
    await asyncio.sleep(0.01)
    assert lonely.result().error_code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    await broker.told(state(epoch=2))
    moved = broker.delete(2)
    await broker.told(state(leader=2, epoch=3))
    await asyncio.sleep(0.01)
    assert moved.result().error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    await broker.told(state(epoch=4))
    gone = broker.delete(2)
    assert await broker.stop_replica(epoch=5, delete=True) == []
    await asyncio.sleep(0.01)
    assert gone.result().error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


@run_by(with_one_broker)
async def test_a_deletion_does_not_wait_for_who_has_left_the_isr_but_for_who_is_eligible_beside_it(
    broker: OneBroker, /
) -> None:
    await broker.told(state())
    broker.produce(RECORDS, acks=1)
    broker.follower_has(3, 2, 3)
    answer = broker.delete(2, timeout_ms=60_000)
    broker.follower_has(3, 2, start=2)
    await asyncio.sleep(1)
    assert not answer.done()
    broker.zookeeper.cut("broker-1")  # otherwise it would remove 3 from the record
    await broker.told(state(epoch=1, isr=(1, 2), eligible={3: 1}))
    broker.follower_has(3, 2, start=2)
    await asyncio.sleep(0.01)
    assert not answer.done()
    await broker.told(state(epoch=2, isr=(1, 2)))
    broker.follower_has(3, 2, start=2)
    await asyncio.sleep(0.01)
    assert answer.result().low_watermark == 2


@run_by(with_one_broker)
async def test_clients_delete_nothing_from_a_topic_of_the_brokers_nor_from_another_one_of_the_name(
    broker: OneBroker, /
) -> None:
    await broker.told(state(isr=(1,), replicas=(1,)))
    broker.produce(RECORDS, acks=1)
    internal = TopicPartition("__consumer_offsets", 0)
    assert broker.delete(0, partition=internal).result().error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert broker.delete(2, topic_id="another-id").result().error_code == ErrorCode.INCONSISTENT_TOPIC_ID
    nowhere = broker.delete(2, partition=TopicPartition("nowhere", 0)).result()
    assert nowhere.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert broker.partition().log.log_start_offset == 0


@run_by(with_one_broker)
async def test_a_follower_joins_once_its_log_begins_where_the_leaders_does(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    broker.produce(RECORDS, acks=1)
    broker.follower_has(3, 2)
    broker.delete(2)
    broker.follower_has(3, 3)
    await asyncio.sleep(0.1)
    assert broker.partition().isr == (1, 2)
    broker.follower_has(3, 3, start=2)
    await asyncio.sleep(0.1)
    assert broker.partition().isr == (1, 2, 3)


# -- fetch --


@run_by(with_one_broker)
async def test_a_fetch_waits_for_min_bytes_of_committed_records(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    reading = broker.fetch(fetch_of(0), max_wait_ms=10_000, min_bytes=2 * len(RECORDS))
    broker.produce(RECORDS, acks=1)
    await asyncio.sleep(0.1)
    assert not reading.done()
    broker.produce(RECORDS, acks=1)
    await asyncio.sleep(0.01)
    [found] = reading.result()
    assert [h.base_offset for h in headers(bytes(found.records))] == [0, 3]
    assert found.high_watermark == 6


@run_by(with_one_broker)
async def test_a_fetch_that_waited_in_vain_is_answered_with_what_there_is(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    broker.produce(RECORDS, acks=1)
    reading = broker.fetch(fetch_of(0), max_wait_ms=300, min_bytes=1_000_000)
    await asyncio.sleep(0.299)
    assert not reading.done()
    await asyncio.sleep(0.01)
    assert len(reading.result()[0].records) == len(RECORDS)
    assert broker.replicas.waits.expired_fetches == 1


@run_by(with_one_broker)
async def test_a_finished_fetch_does_not_keep_its_request_in_memory(broker: OneBroker, /) -> None:
    class Frame:
        """Return the object that the callback keeps."""

    await broker.told(state(), state(index=1))
    frame = Frame()
    gone = weakref.ref(frame)
    topics = [FetchTopic(TOPIC, "", [fetch_of(0), fetch_of(0, index=1)])]
    request = FetchRequest(-1, 10, 1, 1 << 20, 0, topics)
    broker.replicas.reader.fetch(request, lambda _, held=frame: None)  # type: ignore[misc]
    del frame, request
    await asyncio.sleep(0.1)
    gc.collect()
    assert broker.replicas.waits.expired_fetches == 1
    assert gone() is None


@run_by(with_one_broker)
async def test_consumers_are_not_shown_what_is_not_committed(broker: OneBroker, /) -> None:
    await broker.told(state())
    broker.produce(RECORDS, acks=1)
    reading = broker.fetch(fetch_of(0), max_wait_ms=10_000)
    follower = broker.fetch(fetch_of(0, epoch=0), replica=2)
    assert len(follower.result()[0].records) == len(RECORDS)
    await asyncio.sleep(0.1)
    assert not reading.done()
    broker.follower_has(3, 2, 3)
    await asyncio.sleep(0.01)
    assert len(reading.result()[0].records) == len(RECORDS)


@run_by(with_one_broker)
async def test_a_waiting_fetch_is_answered_when_the_leader_moves(broker: OneBroker, /) -> None:
    await broker.told(state())
    readings = [
        broker.fetch(fetch_of(0), max_wait_ms=10_000, min_bytes=min_bytes, replica=replica)
        for min_bytes, replica in ((1, -1), (100, -1), (1, 2))
    ]
    await broker.told(state(leader=2, epoch=1))
    await asyncio.sleep(0.01)
    for reading in readings:
        [found] = reading.result()
        assert (found.error_code, found.current_leader_id) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 2)


@run_by(with_one_broker)
async def test_a_waiting_fetch_is_answered_when_its_log_has_been_closed(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    broker.produce(RECORDS, acks=1)
    reading = broker.fetch(fetch_of(0), max_wait_ms=10_000, min_bytes=1_000_000)
    await broker.partition().log.close()
    broker.replicas.waits.fetches.check_and_complete(ORDERS)
    assert reading.done()
    assert reading.result()[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_fetch_is_admitted_once_and_its_progress_noted_once_however_often_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        original = getattr(Partition, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(Partition, name, counted)

    for name in ("check_fetch", "record_follower_fetch", "read"):
        count(name)

    async def scenario(broker: OneBroker) -> None:
        await broker.told(state())
        reading = broker.fetch(fetch_of(0, epoch=0), replica=2, max_wait_ms=10_000, min_bytes=2 * len(RECORDS))
        for _ in range(2):
            assert not reading.done()
            broker.produce(RECORDS, acks=1)
            await asyncio.sleep(0.01)
        assert len(reading.result()[0].records) == 2 * len(RECORDS)
        assert calls == {"check_fetch": 1, "record_follower_fetch": 1, "read": 2}
        calls.clear()
        assert broker.fetch(fetch_of(0, epoch=0), replica=2).result()[0].error_code == 0
        assert calls == {"check_fetch": 1, "record_follower_fetch": 1, "read": 1}

    with_one_broker(tmp_path, scenario)


@run_by(with_one_broker)
async def test_what_a_refused_fetch_says_of_a_follower_is_not_noted(broker: OneBroker, /) -> None:
    await broker.told(state(epoch=2))
    broker.produce(RECORDS, acks=1)
    for refused in (fetch_of(3, epoch=1), fetch_of(3, epoch=3), fetch_of(4, epoch=2)):
        broker.fetch(refused, replica=2)
        broker.fetch(refused, replica=3)
    broker.fetch(fetch_of(3, epoch=2), replica=2, topic_id="another")
    assert {follower.log_end_offset for follower in broker.partition().followers.values()} == {-1}
    assert broker.partition().high_watermark == 0


@run_by(with_one_broker)
async def test_a_followers_fetch_waits_on_for_the_partitions_that_keep_their_leader_epoch(broker: OneBroker, /) -> None:
    await broker.told(state(), state(index=1))
    following, consuming = (
        broker.fetch(fetch_of(0, epoch=0), fetch_of(0, epoch=0, index=1), replica=replica, max_wait_ms=10_000)
        for replica in (2, -1)
    )
    await broker.told(state(epoch=1))
    await asyncio.sleep(0.01)
    assert not following.done(), "the controller tells the follower"
    assert [found.error_code for found in consuming.result()] == [ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.NONE]
    again = broker.fetch(fetch_of(0, epoch=1), replica=2, max_wait_ms=10_000)
    broker.produce(RECORDS, acks=1)
    await asyncio.sleep(0.01)
    assert len(again.result()[0].records) == len(RECORDS)
    assert not following.done()
    broker.produce(RECORDS, acks=1, partition=TopicPartition(TOPIC, 1))
    await asyncio.sleep(0.01)
    [fenced, found] = following.result()
    assert (fenced.error_code, len(found.records)) == (ErrorCode.FENCED_LEADER_EPOCH, len(RECORDS))


@run_by(with_one_broker)
async def test_a_waiting_fetch_looks_at_all_of_its_partitions_that_were_checked_in_one_turn(
    broker: OneBroker, /
) -> None:
    await broker.told(state(), state(index=1))
    reading = broker.fetch(fetch_of(0), fetch_of(0, index=1), replica=2, max_wait_ms=10_000)
    broker.replicas.waits.readable(ORDERS)
    broker.produce(RECORDS, acks=1, partition=TopicPartition(TOPIC, 1))
    await asyncio.sleep(0.01)
    assert reading.done()
    assert [len(found.records) for found in reading.result()] == [0, len(RECORDS)]


@run_by(with_one_broker)
async def test_a_waiting_fetch_does_not_wait_for_the_disk_on_which_its_replica_is_deleted(
    broker: OneBroker, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.told(state())
    reading = broker.fetch(fetch_of(0), max_wait_ms=10_000)
    delete, may_go_on = broker.logs.delete, asyncio.Event()

    async def when_it_may(topic_partition: TopicPartition) -> None:
        await may_go_on.wait()
        await delete(topic_partition)

    monkeypatch.setattr(broker.logs, "delete", when_it_may)
    deletion = asyncio.ensure_future(broker.stop_replica(epoch=0, delete=True))
    await asyncio.sleep(0.01)
    assert reading.done()
    assert reading.result()[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    may_go_on.set()
    assert await deletion == []


@run_by(with_one_broker, settings={"leader.replication.throttled.rate": "1000"})
async def test_what_was_withheld_from_a_waiting_follower_is_seen_once_anything_else_is_checked(
    broker: OneBroker, /
) -> None:
    throttled = {"leader.replication.throttled.replicas": "0:1"}
    broker.zookeeper.make(znodes.topic_config_path(TOPIC), znodes.encode_config(throttled))
    await broker.told(state(isr=(1, 2)), state(isr=(1, 2), index=1))
    for _ in range(5):
        broker.produce(batch(1, size=900), acks=1)
    broker.fetch(fetch_of(0, epoch=0, max_bytes=3_000), replica=3)
    fetches = fetch_of(1, epoch=0, last_epoch=0), fetch_of(0, epoch=0, index=1)
    reading = broker.fetch(*fetches, replica=3, max_wait_ms=60_000)
    quota = broker.partition().leader_quota
    assert quota is not None
    was_exceeded = quota.is_exceeded
    assert was_exceeded
    while quota.is_exceeded:
        await asyncio.sleep(1)
    broker.replicas.waits.readable(TopicPartition(TOPIC, 1))
    await asyncio.sleep(0.01)
    assert reading.done()
    assert reading.result()[0].records


@run_by(with_one_broker)
async def test_a_waiting_fetch_is_admitted_anew_in_another_epoch_of_the_same_leader(broker: OneBroker, /) -> None:
    await broker.told(state())
    fenced = broker.fetch(fetch_of(0, epoch=0), max_wait_ms=10_000)
    unfenced = broker.fetch(fetch_of(0), max_wait_ms=10_000)
    await broker.told(state(epoch=1))
    await asyncio.sleep(0.01)
    assert fenced.result()[0].error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert (unfenced.result()[0].error_code, len(unfenced.result()[0].records)) == (ErrorCode.NONE, 0)


@pytest.mark.parametrize(
    ("fetch", "code"),
    [
        (fetch_of(0, epoch=1), ErrorCode.FENCED_LEADER_EPOCH),
        (fetch_of(0, epoch=3), ErrorCode.UNKNOWN_LEADER_EPOCH),
        (fetch_of(4), ErrorCode.OFFSET_OUT_OF_RANGE),
        (fetch_of(-1), ErrorCode.OFFSET_OUT_OF_RANGE),
        (fetch_of(0, index=7), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
@pytest.mark.parametrize("replica", [-1, 2])
@run_by(with_one_broker)
async def test_a_fetch_that_cannot_be_served_is_refused_at_once(
    broker: OneBroker, /, fetch: object, code: ErrorCode, replica: int
) -> None:
    await broker.told(state(epoch=2))
    broker.produce(RECORDS, acks=1)
    [found] = broker.fetch(fetch, replica=replica, max_wait_ms=10_000).result()  # type: ignore[arg-type]
    if fetch == fetch_of(4) and replica != -1:
        assert found.diverging_epoch is not None  # a follower that is ahead truncates
    else:
        assert found.error_code == code


@run_by(with_one_broker)
async def test_a_fetch_for_another_topic_of_the_same_name_is_refused(broker: OneBroker, /) -> None:
    await broker.told(state())
    [found] = broker.fetch(fetch_of(0), topic_id="another").result()
    assert found.error_code == ErrorCode.INCONSISTENT_TOPIC_ID
    assert found.current_leader_id == -1, "no client is sent to the leader of another topic"


@pytest.mark.parametrize("max_bytes", [-1, 0, 1])
@run_by(with_one_broker)
async def test_a_fetch_with_an_absurd_limit_gets_one_batch(broker: OneBroker, /, max_bytes: int) -> None:
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    for _ in range(2):
        broker.produce(RECORDS, acks=1)
    for answer in (broker.fetch(fetch_of(0), max_bytes=max_bytes), broker.fetch(fetch_of(0, max_bytes=max_bytes))):
        assert len(answer.result()[0].records) == len(RECORDS)


# -- the ISR --


@run_by(with_one_broker)
async def test_a_lagging_follower_leaves_the_isr_and_comes_back_when_it_has_caught_up(broker: OneBroker, /) -> None:
    await broker.told(state())
    broker.produce(RECORDS, acks=1)
    for _ in range(20):
        broker.follower_has(3, 2)
        await asyncio.sleep(1)
    assert broker.in_zookeeper().isr == broker.partition().isr == (1, 2)
    broker.follower_has(3, 3)
    await until(lambda: broker.in_zookeeper().isr == (1, 2, 3))
    await until(lambda: len(broker.zookeeper.names(znodes.ISR_CHANGES)) == 2)


@run_by(with_one_broker)
async def test_a_follower_of_another_run_than_the_one_announced_does_not_join(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    broker.follower_has(0, 3, broker_epoch=7)
    await asyncio.sleep(1)
    assert broker.in_zookeeper().isr == (1, 2)
    broker.announce_brokers({1: 1, 2: 1, 3: 7})
    await until(lambda: broker.in_zookeeper().isr == (1, 2, 3))


@run_by(with_one_broker)
async def test_an_isr_write_whose_answer_was_lost_is_recognised(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        broker.zookeeper.after = None
        session.suspend()
        asyncio.get_running_loop().call_later(1, session.resume)

    broker.zookeeper.after = cut
    broker.follower_has(0, 3)
    await until(lambda: broker.partition().isr == (1, 2, 3))
    assert broker.partition().partition_epoch == broker.in_zookeeper().partition_epoch == 1


@run_by(with_one_broker)
async def test_an_older_leadership_that_a_server_behind_shows_after_a_lost_answer_is_no_successor(
    broker: OneBroker, /
) -> None:
    await broker.told(state(leader=2))
    broker.zookeeper.lag("broker-1", 3.0)
    await broker.told(state(epoch=1, isr=(1, 2)))

    def cut(session: VirtualSession, operations: Sequence[Operation]) -> None:
        broker.zookeeper.after = None
        session.suspend()
        asyncio.get_running_loop().call_later(1, session.resume)

    broker.zookeeper.after = cut
    broker.follower_has(0, 3)
    await until(lambda: broker.zookeeper.stale_sessions("broker-1"))
    await until(lambda: broker.partition().isr == broker.in_zookeeper().isr == (1, 2, 3))


@run_by(with_one_broker)
async def test_an_isr_does_not_overwrite_the_election_that_was_written_just_before(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    elected = LeaderAndIsr(2, 1, (2,), 1, -1)

    def elect(session: VirtualSession, operations: Sequence[Operation]) -> None:
        broker.zookeeper.before = None  # the write is on its way
        broker.zookeeper.make(znodes.state_path(ORDERS), znodes.encode_state(elected))

    broker.zookeeper.before = elect
    broker.follower_has(0, 3)
    await until(lambda: broker.zookeeper.before is None)
    await asyncio.sleep(3)  # in which a second attempt could still overwrite it
    found = broker.in_zookeeper()
    assert (found.leader, found.leader_epoch, found.isr) == (2, 1, (2,))
    assert broker.partition().isr == (1, 2)


@run_by(with_one_broker)
async def test_an_isr_that_waits_for_a_connection_does_not_hit_the_next_topic_of_its_name(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    new = LeaderAndIsr(2, 0, (2, 3), 1, -1)

    def recreate(session: VirtualSession, operations: Sequence[Operation]) -> None:
        broker.zookeeper.before = None  # the write is on its way
        broker.zookeeper.remove(znodes.topic_path(TOPIC))
        broker.topic_znodes(TOPIC, "another")
        broker.zookeeper.make(znodes.state_path(ORDERS), znodes.encode_state(new))

    broker.zookeeper.before = recreate
    broker.follower_has(0, 3)
    await asyncio.sleep(3)
    assert (broker.in_zookeeper().leader, broker.in_zookeeper().isr) == (2, (2, 3))
    assert broker.partition().isr == (1, 2)


@run_by(with_one_broker)
async def test_the_state_of_the_next_topic_of_the_name_is_not_adopted_after_a_lost_answer(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))

    def lose(session: VirtualSession, operations: Sequence[Operation]) -> None:
        broker.zookeeper.after = None
        session.suspend()
        broker.zookeeper.remove(znodes.topic_path(TOPIC))
        broker.topic_znodes(TOPIC, "another")
        for isr in ((1,), (1,), (1,)):  # the same state that this broker would write
            state_of_another = znodes.encode_state(LeaderAndIsr(1, 0, isr, 1, -1))
            broker.zookeeper.make(znodes.state_path(ORDERS), state_of_another)
        session.resume()

    broker.zookeeper.after = lose
    broker.follower_has(0, 3)
    await asyncio.sleep(3)
    assert broker.partition().isr == (1, 2)


@run_by(with_one_broker)
async def test_an_isr_waits_for_the_node_of_its_topics_id(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    identity = znodes.topic_id_path(TOPIC, broker.partition().log.topic_id)
    broker.zookeeper.remove(identity)  # as of a topic that an earlier version created
    broker.follower_has(0, 3)
    await asyncio.sleep(3)
    assert broker.in_zookeeper().isr == (1, 2)
    broker.zookeeper.make(identity)
    await until(lambda: broker.partition().isr == broker.in_zookeeper().isr == (1, 2, 3))


@run_by(with_one_broker)
async def test_the_isr_of_a_topic_without_an_id_is_written_all_the_same(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)), topic_id="")
    assert broker.fetch(fetch_of(0), replica=3, topic_id="").result()[0].error_code == 0
    await until(lambda: broker.in_zookeeper().isr == (1, 2, 3))


@run_by(with_one_broker)
async def test_an_isr_proposal_of_a_deleted_topic_does_not_hit_the_next_topic_of_its_name(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    session, broker.session = broker.session, None  # no session for a while: the proposal has to wait
    broker.follower_has(0, 3)
    await asyncio.sleep(0.1)
    assert await broker.stop_replica(epoch=1, delete=True) == []
    new = LeaderAndIsr(2, 0, (2, 3), 1, -1)
    broker.zookeeper.remove(znodes.state_path(ORDERS))
    broker.zookeeper.make(znodes.state_path(ORDERS), znodes.encode_state(new))
    broker.session = session
    await asyncio.sleep(1)
    assert (broker.in_zookeeper().leader, broker.in_zookeeper().isr) == (2, (2, 3))


@run_by(with_one_broker)
async def test_a_state_znode_that_cannot_be_read_does_not_stop_the_broker(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1, 2)))
    broker.zookeeper.make(znodes.state_path(ORDERS), b"not JSON")
    broker.follower_has(0, 3)
    await asyncio.sleep(1)
    assert not broker.supervisor.failure.done()
    assert broker.partition().isr == (1, 2)
    good = znodes.encode_state(LeaderAndIsr(1, 0, (1, 2), 1, -1))
    broker.zookeeper.make(znodes.state_path(ORDERS), good)  # repaired by hand
    await until(lambda: broker.in_zookeeper().isr == (1, 2, 3))


# -- control requests --


@run_by(with_one_broker)
async def test_an_older_leader_epoch_changes_nothing(broker: OneBroker, /) -> None:
    await broker.told(state(epoch=5))
    [error] = await broker.told(state(leader=2, epoch=4))
    assert error.error_code == ErrorCode.STALE_CONTROLLER_EPOCH
    assert broker.partition().is_leader
    assert broker.partition().leader_epoch == 5


@run_by(with_one_broker)
async def test_another_topic_of_the_same_name_is_refused(broker: OneBroker, /) -> None:
    await broker.told(state())
    [error] = await broker.told(state(epoch=1), topic_id="another")
    assert error.error_code == ErrorCode.INCONSISTENT_TOPIC_ID
    assert broker.partition().leader_epoch == 0


@run_by(with_one_broker)
async def test_a_replica_of_an_older_topic_gives_way_and_none_of_a_newer_one_does(broker: OneBroker, /) -> None:
    older, newer = (topic_ids.make(7, number, b"nonces") for number in (1, 2))
    await broker.told(state(epoch=5), topic_id=older)
    assert await broker.told(state(epoch=0), topic_id=newer) == []
    assert (broker.partition().log.topic_id, broker.partition().leader_epoch) == (newer, 0)
    [error] = await broker.told(state(epoch=6), topic_id=older)
    assert error.error_code == ErrorCode.INCONSISTENT_TOPIC_ID
    assert (broker.partition().log.topic_id, broker.partition().leader_epoch) == (newer, 0)


@run_by(with_one_broker)
async def test_stop_replica_of_an_older_leader_epoch_is_refused(broker: OneBroker, /) -> None:
    await broker.told(state(epoch=5))
    [error] = await broker.stop_replica(epoch=4, delete=True)
    assert error.error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert broker.partition().is_leader
    assert await broker.stop_replica(epoch=6, delete=False) == []
    assert broker.logs.get(ORDERS) is not None


@run_by(with_one_broker)
async def test_stop_replica_of_another_topic_of_the_same_name_stops_and_deletes_nothing(broker: OneBroker, /) -> None:
    await broker.told(state(), state(leader=2, index=1))
    for index in (0, 1):
        assert await broker.stop_replica(epoch=9, delete=True, index=index, topic_id="of an earlier topic") == []
    assert broker.partition().is_leader
    following = TopicPartition(TOPIC, 1)
    assert broker.replicas.fetchers.follows(following, 2, ("broker-2", 9092))
    assert broker.logs.get(ORDERS) is broker.partition().log
    # The same holds for a log that no request has opened since the start.
    del broker.replicas.partitions[following]
    await broker.stop_replica(epoch=9, delete=True, index=1, topic_id="of an earlier topic")
    assert broker.logs.get(following) is not None
    await broker.stop_replica(epoch=9, delete=True, index=1)
    assert broker.logs.get(following) is None


@run_by(with_one_broker)
async def test_an_order_of_before_the_deletion_that_comes_late_is_not_in_the_way_of_the_next_topic(
    broker: OneBroker, /
) -> None:
    await broker.told(state(epoch=3))
    assert await broker.stop_replica(epoch=3, delete=True) == []
    for epoch in (2, 3):
        [error] = await broker.told(state(epoch=epoch))
        assert error.error_code == ErrorCode.STALE_CONTROLLER_EPOCH
    assert broker.logs.get(ORDERS) is None
    assert await broker.told(state(), topic_id="another") == []
    assert broker.partition().is_leader
    assert await broker.stop_replica(epoch=0, delete=True, topic_id="another") == []
    assert await broker.told(state(epoch=4)) == []  # given to this broker again, of the same topic


@run_by(with_one_broker)
async def test_as_many_deletions_are_remembered_as_orders_may_come_late(broker: OneBroker, /) -> None:
    for number in range(DELETIONS_REMEMBERED + 5):
        broker.replicas.lifecycle._remember_deletion(ORDERS, str(number), 0)
    assert len(broker.replicas.lifecycle._deleted) == DELETIONS_REMEMBERED
    assert not broker.replicas.lifecycle.was_deleted(ORDERS, "4", 0)
    assert broker.replicas.lifecycle.was_deleted(ORDERS, "5", 0)


@run_by(with_one_broker)
async def test_a_replica_that_is_set_aside_costs_no_other_and_is_reported_to_whoever_asks_for_it(
    broker: OneBroker, /
) -> None:
    await broker.told(state(leader=2), state(leader=2, index=1))
    broker.replicas.lifecycle.set_aside(broker.partition(), "its leader does not fit")
    await until(lambda: list(broker.logs.damaged) == [ORDERS])
    assert broker.replicas.partitions.get(ORDERS) is None
    [error] = await broker.told(state(leader=3, epoch=1), state(leader=3, epoch=1, index=1))
    assert (error.partition_index, error.error_code) == (0, ErrorCode.KAFKA_STORAGE_ERROR)
    assert broker.partition(TopicPartition(TOPIC, 1)).leader_id == 3


@run_by(with_one_broker)
async def test_a_replica_that_is_set_aside_while_its_order_waits_does_not_take_on_the_role(
    broker: OneBroker, /
) -> None:
    await broker.told(state(leader=2))
    partition = broker.partition()
    session, broker.session = broker.session, None
    order = state(leader=3, epoch=1)
    topics = [LeaderAndIsrTopic(TOPIC, "id-of-orders", [order]), LeaderAndIsrTopic("slow", "x", [order])]
    request = LeaderAndIsrRequest(1, 1, 1, topics, [])
    telling = asyncio.ensure_future(broker.replicas.orders.apply_leader_and_isr(request))
    await asyncio.sleep(0.1)
    broker.replicas.lifecycle.set_aside(partition, "its leader does not fit")
    broker.session = session
    [error] = await telling
    assert (error.topic_name, error.error_code) == (TOPIC, ErrorCode.KAFKA_STORAGE_ERROR)
    assert partition.leader_epoch == 0


@run_by(with_one_broker)
async def test_a_topic_whose_settings_cannot_be_read_costs_no_other_partition(broker: OneBroker, /) -> None:
    for epoch, data in ((0, b'{"version":1,"config":{"retention.ms":"soon"}}'), (2, b"not JSON")):
        broker.zookeeper.make(znodes.topic_config_path("broken"), data)
        [error] = await told_two_topics(broker, "broken", epoch)
        assert (error.topic_name, error.error_code) == ("broken", ErrorCode.INVALID_CONFIG)
        assert broker.partition().is_leader
        assert await broker.stop_replica(epoch=epoch, delete=True) == []


@run_by(with_one_broker)
async def test_a_replica_that_cannot_change_its_role_costs_no_other_partition(broker: OneBroker, /) -> None:
    await broker.told(state(), state(index=1))
    await log_of(broker, ORDERS).close()  # as after damage that was met in the middle of a truncation
    [error] = await broker.told(state(epoch=1), state(epoch=1, index=1))
    assert (error.partition_index, error.error_code) == (0, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert broker.partition(TopicPartition(TOPIC, 1)).leader_epoch == 1


@run_by(with_one_broker)
async def test_a_leader_at_a_new_address_is_followed_there_with_all_its_partitions(broker: OneBroker, /) -> None:
    await broker.told(state(leader=2), state(leader=2, index=1), leader_ports={2: 9092})
    await broker.told(state(leader=2), leader_ports={2: 9999})  # the same epoch
    [fetcher] = broker.replicas.fetchers._fetchers.values()
    assert fetcher.address == ("broker-2", 9999)
    assert fetcher.follows(ORDERS)
    assert fetcher.follows(TopicPartition(TOPIC, 1))


@run_by(with_one_broker)
async def test_a_partition_without_a_leader_is_not_fetched(broker: OneBroker, /) -> None:
    await broker.told(state(leader=2))
    assert len(broker.replicas.fetchers._fetchers) == 1
    await broker.told(state(leader=NO_LEADER, epoch=1))
    assert not broker.replicas.fetchers._fetchers
    with pytest.raises(BrokerError):
        broker.partition().append(RECORDS, required_acks=1, now_ms=0)


@run_by(with_one_broker)
async def test_an_order_for_a_former_registration_changes_no_role_however_long_it_took(broker: OneBroker, /) -> None:
    session, broker.session = broker.session, None
    told = asyncio.ensure_future(broker.told(state()))
    await asyncio.sleep(1)
    broker.session, broker.broker_epoch = session, 2  # it has registered again before the order was carried out
    with pytest.raises(BrokerError) as raised:
        await told
    assert raised.value.code is ErrorCode.STALE_BROKER_EPOCH
    assert not broker.partition().is_leader
    assert await broker.told(state()) == []
    assert broker.partition().is_leader


@run_by(with_one_broker)
async def test_many_isr_changes_are_announced_in_nodes_that_zookeeper_takes(broker: OneBroker, /) -> None:
    changed = [TopicPartition("t" * 249, number) for number in range(5_000)]
    broker.replicas.isr_writer._changed.update(dict.fromkeys(changed))
    broker.replicas.isr_writer._has_changed.set()
    await until(lambda: len(broker.zookeeper.names(znodes.ISR_CHANGES)) == 5)
    announced: list[TopicPartition] = []
    for name in broker.zookeeper.names(znodes.ISR_CHANGES):
        announced += znodes.decode_isr_change(name, broker.zookeeper.data(f"{znodes.ISR_CHANGES}/{name}"))
    assert announced == changed


# -- role listeners --


class Listener:
    """Records each call and the state of the partition at that time."""

    def __init__(self, broker: OneBroker, told: list[tuple[object, ...]], name: str = "") -> None:
        self.broker = broker
        self.told = told
        self.name = name

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        partition = self.broker.partition(topic_partition)
        assert partition.leads_in(epoch)
        assert partition.epoch_start_offset == partition.log.log_end_offset
        self.told.append((f"{self.name}leader", topic_partition.partition, epoch))

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        partition = self.broker.replicas.partitions.get(topic_partition)
        assert partition is None or (not partition.is_leader and partition.leader_epoch == epoch)
        self.told.append((f"{self.name}follower", topic_partition.partition, epoch))


@run_by(with_one_broker)
async def test_listeners_are_told_of_each_epoch_once_and_of_none_that_is_stale(broker: OneBroker, /) -> None:
    told: list[tuple[object, ...]] = []
    broker.replicas.listeners.add(Listener(broker, told))
    for order in (
        state(),
        state(),
        state(epoch=2),
        state(leader=2, epoch=1),
        state(leader=2, epoch=3),
        state(leader=2, epoch=3),
        state(leader=NO_LEADER, epoch=4),
        state(epoch=5),
    ):
        await broker.told(order)
        broker.produce(RECORDS, acks=1)
    assert told == [
        ("leader", 0, 0),
        ("leader", 0, 2),
        ("follower", 0, 3),
        ("follower", 0, 4),
        ("leader", 0, 5),
    ]


@run_by(with_one_broker)
async def test_listeners_are_told_in_their_order_and_in_that_of_the_order(broker: OneBroker, /) -> None:
    told: list[tuple[object, ...]] = []
    for name in ("first ", "second "):
        broker.replicas.listeners.add(Listener(broker, told, name))
    await broker.told(state(index=1), state(leader=2))
    assert told == [
        ("first leader", 1, 0),
        ("second leader", 1, 0),
        ("first follower", 0, 0),
        ("second follower", 0, 0),
    ]


@run_by(with_one_broker)
async def test_listeners_are_told_that_a_replica_that_led_is_gone_and_not_of_one_that_followed(
    broker: OneBroker, /
) -> None:
    told: list[tuple[object, ...]] = []
    broker.replicas.listeners.add(Listener(broker, told))
    await broker.told(state(epoch=3), state(leader=2, epoch=3, index=1))
    told.clear()
    for index in (0, 0, 1):
        assert await broker.stop_replica(epoch=4, delete=True, index=index) == []
    assert told == [("follower", 0, 3)]
    assert await broker.told(state(), topic_id="another") == []
    assert told == [("follower", 0, 3), ("leader", 0, 0)]
    assert await broker.stop_replica(epoch=0, delete=False, topic_id="another") == []
    assert told == [("follower", 0, 3), ("leader", 0, 0), ("follower", 0, 0)], "it was stopped"
    assert await broker.stop_replica(epoch=0, delete=True, topic_id="another") == []
    assert len(told) == 3


@run_by(with_one_broker)
async def test_a_leader_that_is_stopped_keeps_its_log_and_answers_that_it_does_not_lead(broker: OneBroker, /) -> None:
    await broker.told(state(epoch=3))
    partition = broker.replicas.partitions.get(ORDERS)
    assert partition is not None
    assert partition.is_leader
    assert await broker.stop_replica(epoch=3, delete=False) == []
    assert broker.replicas.partitions.get(ORDERS) is partition
    with pytest.raises(BrokerError) as caught:
        partition.append(b"", required_acks=1, now_ms=0)
    assert caught.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    await broker.told(state(epoch=4))
    assert broker.replicas.partitions.get(ORDERS) is partition
    assert partition.leads_in(4)


@run_by(with_one_broker)
async def test_listeners_are_not_told_of_a_role_that_could_not_be_taken(broker: OneBroker, /) -> None:
    told: list[tuple[object, ...]] = []
    broker.replicas.listeners.add(Listener(broker, told))
    await broker.told(state())
    await log_of(broker, ORDERS).close()
    [error] = await broker.told(state(epoch=1))
    assert error.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert told == [("leader", 0, 0)]


# -- the end --


@run_by(with_one_broker)
async def test_closing_after_the_disk_has_failed_raises_nothing(broker: OneBroker, /) -> None:
    await broker.told(state())
    broker.logs.online[0].directory.fail(OSError("the disk is gone"), "a test")
    await broker.supervisor.close()
    await broker.replicas.close()


def log_of(broker: OneBroker, partition: TopicPartition) -> Log:
    log = broker.logs.get(partition)
    assert log is not None
    return log


async def told_two_topics(broker: OneBroker, other: str, epoch: int = 0) -> list[PartitionError]:
    order = state(epoch=epoch)
    topics = [LeaderAndIsrTopic(other, "x", [order]), LeaderAndIsrTopic(TOPIC, "id-of-orders", [order])]
    request = LeaderAndIsrRequest(1, 1, 1, topics, [])
    return await broker.replicas.orders.apply_leader_and_isr(request)


@pytest.mark.parametrize(
    ("replicas", "epoch", "topic_id", "is_deleted"),
    [
        ([2, 3], 5, TOPIC_ID, True),
        ([2, 3], 4, TOPIC_ID, False),  # there are records of a later epoch here
        ([2, 3, 1], 5, TOPIC_ID, False),
        ([2, 3], 5, "of an earlier topic", False),
    ],
)
@run_by(with_one_broker)
async def test_a_replica_that_has_moved_to_other_brokers_is_deleted_where_that_is_certain(
    broker: OneBroker, /, replicas: list[int], epoch: int, topic_id: str, is_deleted: bool
) -> None:
    await broker.told(state(epoch=5))
    broker.produce(RECORDS, acks=1)
    elsewhere = UpdateMetadataPartition(0, 1, 2, epoch, [2, 3], 9, replicas, [])
    topics = [UpdateMetadataTopic(TOPIC, topic_id, [elsewhere], num_partitions=1)]
    broker.metadata.update(UpdateMetadataRequest(1, 1, broker.broker_epoch, topics, [], names_the_last=True))
    await broker.replicas.orders.delete_strays()
    assert (broker.logs.get(ORDERS) is None) is is_deleted
    assert (broker.replicas.partitions.get(ORDERS) is None) is is_deleted


@pytest.mark.parametrize(
    ("epoch_of_known", "partition", "partitions", "replicas", "is_deleted"),
    [
        (6, 0, 1, [2, 3], True),
        (6, 1, 2, [2, 3], False),  # no LeaderAndIsr has named the replicas of the other partition yet
        (6, 0, 2, [2, 3, 1], False),  # the next LeaderAndIsr sets the old replica aside
        (4, 0, 1, [2, 3], False),  # this is the older topic
    ],
)
@run_by(with_one_broker)
async def test_a_replica_of_an_older_topic_than_the_one_that_has_its_name_is_deleted(
    broker: OneBroker, /, epoch_of_known: int, partition: int, partitions: int, replicas: list[int], is_deleted: bool
) -> None:
    await broker.told(state(epoch=5), topic_id=topic_ids.make(5, 1, bytes(6)))
    known = UpdateMetadataPartition(partition, 1, 2, 0, [2, 3], 0, replicas, [])
    topic_id = topic_ids.make(epoch_of_known, 1, bytes(6))
    topics = [UpdateMetadataTopic(TOPIC, topic_id, [known], num_partitions=partitions)]
    broker.metadata.update(UpdateMetadataRequest(1, 1, broker.broker_epoch, topics, [], names_the_last=True))
    await broker.replicas.orders.delete_strays()
    assert (broker.logs.get(ORDERS) is None) is is_deleted


@run_by(with_one_broker)
async def test_a_replica_of_a_topic_that_has_fewer_partitions_now_is_deleted(broker: OneBroker, /) -> None:
    await broker.told(state(index=3, epoch=5), topic_id=topic_ids.make(5, 1, bytes(6)))
    known = UpdateMetadataPartition(0, 1, 2, 0, [2, 3], 0, [1, 2, 3], [])
    topics = [UpdateMetadataTopic(TOPIC, topic_ids.make(6, 1, bytes(6)), [known], num_partitions=1)]
    broker.metadata.update(UpdateMetadataRequest(1, 1, broker.broker_epoch, topics, [], names_the_last=True))
    await broker.replicas.orders.delete_strays()
    assert broker.logs.get(TopicPartition(TOPIC, 3)) is None
