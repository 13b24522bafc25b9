from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from minibroker.client.errors import BufferFull, Closed
from minibroker.client.fetching import fetch_state
from minibroker.client.producing import accumulator as module
from minibroker.client.producing import batch as batch_module
from minibroker.client.producing import buffer, choosing, columns, filling, partitioners, queues
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import UNASSIGNED, Batch, BatchVerdict, Identity, judge_batch
from minibroker.client.producing.buffer import GRANT
from minibroker.client.producing.partitioners import Partitioner, WithoutKey, crc32
from minibroker.client.producing.queues import LAST_PRODUCER_EPOCH, PartitionQueue
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.records import decode_batch
from minibroker.protocol.records.compression import Compression

KIB = 1024


def make(
    *,
    batch_size: int = 64 * KIB,
    buffer_memory: int = 1024 * KIB,
    max_request_size: int = 1024 * KIB,
    linger_s: float = 0.0,
    is_idempotent: bool = True,
    without_key: WithoutKey = WithoutKey.ADAPTIVE,
    partitions: int | None = 1,
) -> Accumulator:
    accumulator = Accumulator(
        batch_size=batch_size,
        buffer_memory=buffer_memory,
        max_request_size=max_request_size,
        linger_s=linger_s,
        delivery_timeout_s=120.0,
        is_idempotent=is_idempotent,
        partitioner=Partitioner(without_key=without_key),
        random=Random(7),
    )
    accumulator.identity = Identity(2, 0)
    if partitions is not None:
        accumulator.topic_is_known("t", "id", partitions, range(partitions))
    return accumulator


def add(
    accumulator: Accumulator,
    value: bytes | None,
    *,
    key: bytes | None = None,
    partition: int | None = None,
    now: float = 0.0,
    timestamp_ms: int = 5,
    headers: Sequence[tuple[str, bytes | None]] | None = None,
) -> tuple[Batch, int]:
    return accumulator.add(now, "t", value, key, partition, timestamp_ms, headers)


def fill(accumulator: Accumulator, value: bytes) -> int:
    """Add records, each with another key, until there is no room. Returns how many were added."""
    for count in range(10_000):
        try:
            add(accumulator, value, key=count.to_bytes(4, "big"))
        except BufferFull:
            return count
    raise AssertionError("the buffer has no end")


def deliver(accumulator: Accumulator, batch: Batch, base_offset: int = 0) -> None:
    assert accumulator.judge(batch, ErrorCode.NONE) is BatchVerdict.DELIVERED
    accumulator.delivered(batch, base_offset, -1)


def ready(accumulator: Accumulator, now: float = 0.0) -> list[int]:
    return [queue.partition for queue in accumulator.ready(now).queues]


def queue_of(accumulator: Accumulator, partition: int = 0) -> PartitionQueue:
    return accumulator._topics["t"].queues[partition]


def test_what_decides_in_the_client_imports_neither_asyncio_nor_time_nor_os() -> None:
    for pure in (module, batch_module, buffer, choosing, columns, fetch_state, filling, partitioners, queues):
        assert pure.__file__ is not None
        tree = ast.parse(Path(pure.__file__).read_text())
        names = {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not names & {"asyncio", "time", "os"}


# --- readiness ---


def test_an_idle_partition_is_ready_at_once_and_a_busy_one_waits_until_its_batch_is_full() -> None:
    accumulator = make(batch_size=4 * KIB)
    add(accumulator, b"first")
    assert ready(accumulator) == [0]
    accumulator.take(queue_of(accumulator))
    add(accumulator, b"second")
    assert ready(accumulator) == []
    for _ in range(4):
        add(accumulator, b"x" * KIB)
    assert ready(accumulator) == [0]


def test_an_unfilled_batch_is_ready_again_once_what_was_in_flight_is_answered() -> None:
    accumulator = make()
    add(accumulator, b"first")
    batch = accumulator.take(queue_of(accumulator))
    add(accumulator, b"second")
    assert ready(accumulator) == []
    deliver(accumulator, batch)
    assert ready(accumulator) == [0]


def test_a_batch_lingers_and_the_accumulator_says_until_when() -> None:
    accumulator = make(linger_s=0.5)
    add(accumulator, b"v", now=10.0)
    assert accumulator.ready(10.4) == ([], 10.5)
    assert ready(accumulator, 10.5) == [0]


def test_a_full_batch_does_not_linger() -> None:
    accumulator = make(linger_s=100.0, batch_size=4 * KIB)
    for _ in range(4):
        add(accumulator, b"x" * KIB)
    assert ready(accumulator) == [0]


def test_an_exhausted_buffer_makes_every_partition_ready() -> None:
    accumulator = make(linger_s=100.0, partitions=2, buffer_memory=256 * KIB)
    add(accumulator, b"small", partition=0)
    assert ready(accumulator) == []
    while not accumulator.is_over_limit:
        add(accumulator, b"x" * KIB, partition=1)
    assert sorted(ready(accumulator)) == [0, 1]


def test_a_flush_makes_ready_what_was_there_when_it_began_and_nothing_newer() -> None:
    accumulator = make(linger_s=100.0, partitions=2)
    add(accumulator, b"old", partition=0)
    flush = accumulator.begin_flush()
    add(accumulator, b"new", partition=1)
    assert ready(accumulator) == [0]
    assert not accumulator.is_flushed(flush)
    deliver(accumulator, accumulator.take(queue_of(accumulator, 0)))
    assert accumulator.is_flushed(flush)


def test_a_partition_that_backs_off_is_not_ready_whatever_it_holds() -> None:
    accumulator = make()
    add(accumulator, b"v")
    batch = accumulator.take(queue_of(accumulator))
    assert accumulator.judge(batch, ErrorCode.NOT_ENOUGH_REPLICAS) is BatchVerdict.RETRY
    accumulator.retry(batch, 3.0)
    accumulator.begin_flush()
    assert accumulator.ready(2.0) == ([], 3.0)
    assert accumulator.backing_off(2.0) == [queue_of(accumulator)]
    assert ready(accumulator, 3.0) == [0]


def test_partitions_take_turns() -> None:
    accumulator = make(partitions=3, batch_size=2 * KIB)
    for partition in (0, 0, 0, 1, 1, 2):
        add(accumulator, b"x" * 1_500, partition=partition)
    order = []
    while queues := accumulator.ready(0.0).queues:
        order.append(queues[0].partition)
        accumulator.take(queues[0])
    assert order[:3] == [0, 1, 2]


# --- memory ---


def test_memory_is_granted_in_pieces_and_what_a_closed_batch_did_not_use_is_given_back() -> None:
    accumulator = make()
    add(accumulator, b"v")
    assert accumulator.used == GRANT
    batch = accumulator.take(queue_of(accumulator))
    assert accumulator.used == batch.size < 200
    deliver(accumulator, batch)
    assert accumulator.used == 0


def test_twice_the_buffer_memory_is_never_passed() -> None:
    accumulator = make(buffer_memory=128 * KIB)
    fill(accumulator, b"x" * KIB)
    assert 128 * KIB < accumulator.used <= 256 * KIB


def test_a_record_that_no_request_could_carry_is_refused_at_once() -> None:
    accumulator = make(max_request_size=16 * KIB, batch_size=8 * KIB)
    with pytest.raises(BrokerError) as caught:
        add(accumulator, b"x" * 16 * KIB)
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
    assert "the producer's max_request_size is 16384. Send smaller records, or raise it" in str(caught.value)
    batch, _ = add(accumulator, b"x" * 15 * KIB)
    assert batch.size > 15 * KIB


def test_what_a_batch_is_said_to_take_is_never_less_than_what_it_takes() -> None:
    accumulator = make()
    add(accumulator, b"", key=b"", timestamp_ms=0)
    add(accumulator, None, timestamp_ms=1 << 61, headers=[("ü" * 40, None), ("n", b"v" * 70_000)])
    add(accumulator, b"v" * 300, key=b"k" * 70_000)
    total = 0
    while queues := accumulator.ready(0.0).queues:
        batch = accumulator.take(queues[0])
        assert len(batch.encode(Compression.NONE)) <= batch.size
        total += batch.count
        deliver(accumulator, batch)
    assert total == 3


def test_failed_records_keep_their_memory_until_they_are_reported() -> None:
    accumulator = make()
    add(accumulator, b"v", key=b"k", headers=[("h", b"1")])
    batch = accumulator.take(queue_of(accumulator))
    error = BrokerError(ErrorCode.INVALID_RECORD)
    assert accumulator.judge(batch, error.code) is BatchVerdict.FAIL
    accumulator.fail(batch, error)
    assert accumulator.used > 0
    (failure,) = accumulator.take_failures()
    assert failure == ("t", 0, b"k", b"v", 5, [("h", b"1")], error)
    assert accumulator.used == 0
    assert accumulator.take_failures() == []


def test_records_whose_delivery_is_awaited_are_not_reported_again() -> None:
    accumulator = make()
    batch, first = add(accumulator, b"0")
    add(accumulator, b"1")
    batch.mark_awaited(first)
    accumulator.fail_all(Closed("over"))
    assert [failure.value for failure in accumulator.take_failures()] == [b"1"]


# --- partitions ---


def test_records_of_an_unknown_topic_are_held_and_placed_in_the_order_of_their_send() -> None:
    accumulator = make(partitions=None)
    handles = [
        add(accumulator, b"0", partition=1),
        add(accumulator, b"1", key=b"key"),
        add(accumulator, b"2"),
        add(accumulator, b"3", partition=1),
        add(accumulator, b"4", partition=9),
    ]
    assert all(batch.partition == UNASSIGNED for batch, _ in handles)
    assert accumulator.ready(0.0).queues == []
    assert accumulator.held_topics() == [("t", 0.0)]
    accumulator.topic_is_known("t", "id", 3, [0, 1, 2])
    assert accumulator.held_topics() == []
    placed = []
    for batch, index in handles:
        assert batch.forwarded is not None
        placed.append(batch.forwarded[index])
    assert placed[0][0].partition == placed[3][0].partition == 1
    assert placed[0][0].order <= placed[3][0].order
    assert [batch.values[index] for batch, index in placed[:4]] == [b"0", b"1", b"2", b"3"]
    refused = placed[4][0]
    assert isinstance(refused.error, BrokerError)
    assert refused.error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    (failure,) = accumulator.take_failures()
    assert (failure.partition, failure.value) == (9, b"4")


def test_a_flush_waits_for_held_records_and_for_the_batches_that_they_become() -> None:
    accumulator = make(partitions=None)
    add(accumulator, b"v")
    flush = accumulator.begin_flush()
    assert not accumulator.is_flushed(flush)
    accumulator.topic_is_known("t", "id", 1, [0])
    assert not accumulator.is_flushed(flush)
    deliver(accumulator, accumulator.take(queue_of(accumulator)))
    assert accumulator.is_flushed(flush)


def test_placing_held_records_never_fails_for_want_of_memory() -> None:
    accumulator = make(partitions=None, buffer_memory=64 * KIB, max_request_size=64 * KIB, batch_size=64 * KIB)
    count = fill(accumulator, b"x" * 500)
    accumulator.topic_is_known("t", "id", 100, range(100))
    accumulator.begin_flush()
    taken = 0
    while queues := accumulator.ready(0.0).queues:
        batch = accumulator.take(queues[0])
        taken += batch.count
        deliver(accumulator, batch)
    assert (taken, accumulator.used) == (count, 0)


def test_a_partition_that_does_not_exist_is_refused_at_once() -> None:
    accumulator = make(partitions=2)
    with pytest.raises(BrokerError, match="partitions are 0 to 1"):
        add(accumulator, b"v", partition=2)


def test_an_illegal_topic_name_is_refused_at_once() -> None:
    with pytest.raises(BrokerError) as caught:
        make().add(0.0, "no/slash", b"v", None, None, 0, None)
    assert caught.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION


def test_records_without_a_key_share_a_partition_until_batch_size_bytes_have_gone_there() -> None:
    accumulator = make(partitions=4, batch_size=8 * KIB)
    for _ in range(400):
        add(accumulator, b"x" * KIB)
    sizes = [
        sum(batch.size for batch in queue.waiting)
        for queue in accumulator._topics["t"].queues.values()
        if queue.waiting
    ]
    assert len(sizes) == 4
    full = [batch.is_closed for queue in accumulator._topics["t"].queues.values() for batch in queue.waiting]
    assert full.count(False) <= 1


def test_the_adaptive_partitioner_stays_with_its_partition_though_the_batch_was_sent() -> None:
    accumulator = make(partitions=4, batch_size=8 * KIB)
    partitions = set()
    for _ in range(5):
        batch, _ = add(accumulator, b"small")
        partitions.add(batch.partition)
        deliver(accumulator, accumulator.take(queue_of(accumulator, batch.partition)))
    assert len(partitions) == 1


def test_the_sticky_partitioner_changes_with_every_batch() -> None:
    accumulator = make(partitions=4, without_key=WithoutKey.STICKY)
    previous = -1
    for _ in range(10):
        batch, _ = add(accumulator, b"small")
        assert batch.partition != previous
        previous = batch.partition
        deliver(accumulator, accumulator.take(queue_of(accumulator, previous)))


def test_the_round_robin_partitioner_changes_with_every_record() -> None:
    accumulator = make(partitions=3, without_key=WithoutKey.ROUND_ROBIN)
    first = add(accumulator, b"v")[0].partition
    assert [add(accumulator, b"v")[0].partition for _ in range(5)] == [(first + 1 + i) % 3 for i in range(5)]


def test_records_without_a_key_avoid_partitions_without_a_leader() -> None:
    accumulator = make(partitions=3, batch_size=2 * KIB)
    accumulator.topic_is_known("t", "id", 3, [2])
    assert {add(accumulator, b"x" * KIB)[0].partition for _ in range(20)} == {2}
    accumulator.topic_is_known("t", "id", 3, [])
    assert {add(accumulator, b"x" * KIB)[0].partition for _ in range(50)} == {0, 1, 2}


def test_the_fast_path_is_offered_only_for_batches_without_keys_and_headers() -> None:
    accumulator = make()
    batch, _ = add(accumulator, b"v")
    assert accumulator.open_batches == {"t": batch}
    add(accumulator, b"v", key=b"k")
    assert accumulator.open_batches == {}
    add(accumulator, b"v")
    assert (batch.keys, batch.values) == ([None, b"k", None], [b"v"] * 3)


def test_columns_of_keys_and_headers_are_filled_up_for_records_without() -> None:
    accumulator = make()
    add(accumulator, b"0")
    add(accumulator, b"1", key=b"k", headers=[("h", b"x")], timestamp_ms=9)
    add(accumulator, None)
    batch = accumulator.take(queue_of(accumulator))
    decoded = decode_batch(batch.encode(Compression.ZSTD))
    assert decoded.values == [b"0", b"1", None]
    assert decoded.keys == [None, b"k", None]
    assert decoded.headers == [None, [("h", b"x")], None]
    assert decoded.timestamps == [5, 9, 5]
    assert (decoded.header.producer_id, decoded.header.producer_epoch, decoded.header.base_sequence) == (2, 0, 0)


# --- order and numbers ---


def pipeline(accumulator: Accumulator, count: int) -> list[Batch]:
    """Return that many batches of one record, all in flight."""
    batches = []
    for index in range(count):
        add(accumulator, str(index).encode())
        accumulator.begin_flush()
        batches.append(accumulator.take(queue_of(accumulator)))
    return batches


def test_batches_are_numbered_in_the_order_in_which_they_are_taken() -> None:
    accumulator = make()
    for count in (3, 1, 2):
        for _ in range(count):
            add(accumulator, b"v")
        accumulator.begin_flush()
        accumulator.take(queue_of(accumulator))
    assert [batch.sequence for batch in queue_of(accumulator).in_flight] == [0, 3, 4]


def test_sequences_wrap_to_zero_after_2_to_the_31_minus_1() -> None:
    accumulator = make()
    (first,) = pipeline(accumulator, 1)
    deliver(accumulator, first)
    queue_of(accumulator).next_sequence = 2**31 - 1
    add(accumulator, b"a")
    add(accumulator, b"b")
    assert accumulator.take(queue_of(accumulator)).sequence == 2**31 - 1
    assert queue_of(accumulator).next_sequence == 1


def test_a_retry_keeps_its_number_and_waits_until_nothing_of_the_partition_is_in_flight() -> None:
    accumulator = make()
    first, second, third = pipeline(accumulator, 3)
    encoded = first.encode(Compression.NONE)
    assert accumulator.judge(first, ErrorCode.NOT_LEADER_OR_FOLLOWER) is BatchVerdict.RETRY
    accumulator.retry(first, 0.0)
    assert ready(accumulator) == []
    for later in (second, third):
        assert accumulator.judge(later, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER) is BatchVerdict.RETRY
        accumulator.retry(later, 0.0)
    assert [accumulator.take(queue_of(accumulator)) for _ in range(1)] == [first]
    assert first.encode(Compression.NONE) is encoded
    assert ready(accumulator) == []
    deliver(accumulator, first)
    assert accumulator.take(queue_of(accumulator)) is second


def test_answers_that_come_in_any_order_put_batches_back_in_order() -> None:
    accumulator = make()
    batches = pipeline(accumulator, 4)
    for batch in (batches[2], batches[0], batches[3], batches[1]):
        accumulator.judge(batch, ErrorCode.NETWORK_EXCEPTION)
        accumulator.retry(batch, 0.0)
    assert list(queue_of(accumulator).waiting) == batches


def test_a_lost_number_gives_a_batch_that_was_refused_a_number_in_the_next_epoch() -> None:
    accumulator = make()
    first, second = pipeline(accumulator, 2)
    assert accumulator.judge(first, ErrorCode.UNKNOWN_PRODUCER_ID) is BatchVerdict.RENUMBER
    accumulator.renumber(first, 0.0)
    assert accumulator.judge(second, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER) is BatchVerdict.RETRY
    accumulator.retry(second, 0.0)
    assert accumulator.identity is not None
    next_epoch = accumulator.identity._replace(epoch=accumulator.identity.epoch + 1)
    assert accumulator.take(queue_of(accumulator)) is first
    assert (first.identity, first.sequence) == (next_epoch, 0)
    deliver(accumulator, first)
    # The second was in flight when the numbers were lost, and is certainly not in the log.
    assert accumulator.take(queue_of(accumulator)) is second
    assert (second.identity, second.sequence) == (next_epoch, 1)


def test_a_batch_that_may_be_in_the_log_is_never_numbered_anew() -> None:
    accumulator = make()
    (batch,) = pipeline(accumulator, 1)
    accumulator.judge(batch, ErrorCode.NETWORK_EXCEPTION)
    accumulator.retry(batch, 0.0)
    accumulator.take(queue_of(accumulator))
    assert accumulator.judge(batch, ErrorCode.UNKNOWN_PRODUCER_ID) is BatchVerdict.FAIL


def test_after_a_failed_batch_the_partition_goes_on_in_the_next_epoch_and_others_do_not() -> None:
    accumulator = make(partitions=2)
    add(accumulator, b"other", partition=1)
    deliver(accumulator, accumulator.take(queue_of(accumulator, 1)))
    add(accumulator, b"bad", partition=0)
    bad = accumulator.take(queue_of(accumulator, 0))
    assert accumulator.judge(bad, ErrorCode.INVALID_RECORD) is BatchVerdict.FAIL
    accumulator.fail(bad, BrokerError(ErrorCode.INVALID_RECORD))
    add(accumulator, b"next", partition=0)
    add(accumulator, b"next", partition=1)
    assert accumulator.identity is not None
    following = accumulator.take(queue_of(accumulator, 0))
    assert (following.identity, following.sequence) == (accumulator.identity._replace(epoch=1), 0)
    other = accumulator.take(queue_of(accumulator, 1))
    assert (other.identity, other.sequence) == (accumulator.identity, 1)


def test_after_the_last_epoch_comes_another_producer_id() -> None:
    accumulator = make()
    accumulator.identity = Identity(7, LAST_PRODUCER_EPOCH)
    add(accumulator, b"bad")
    bad = accumulator.take(queue_of(accumulator))
    accumulator.judge(bad, ErrorCode.INVALID_RECORD)
    accumulator.fail(bad, BrokerError(ErrorCode.INVALID_RECORD))
    add(accumulator, b"next")
    assert accumulator.lacks_identity(queue_of(accumulator))
    assert accumulator.identity is None


def test_the_first_batch_of_an_epoch_waits_for_those_in_flight() -> None:
    accumulator = make()
    first, second = pipeline(accumulator, 2)
    accumulator.judge(first, ErrorCode.INVALID_RECORD)
    accumulator.fail(first, BrokerError(ErrorCode.INVALID_RECORD))
    add(accumulator, b"later")
    accumulator.begin_flush()
    assert ready(accumulator) == []
    deliver(accumulator, second)
    assert ready(accumulator) == [0]


def test_a_batch_that_is_too_large_for_the_broker_is_split_and_keeps_its_numbers() -> None:
    accumulator = make()
    handles = [add(accumulator, str(index).encode(), key=b"k", timestamp_ms=index) for index in range(5)]
    whole = accumulator.take(queue_of(accumulator))
    used = accumulator.used
    whole.mark_awaited(4)
    assert accumulator.judge(whole, ErrorCode.MESSAGE_TOO_LARGE) is BatchVerdict.SPLIT
    accumulator.split(whole)
    assert accumulator.used == used
    left = accumulator.take(queue_of(accumulator))
    assert (left.values, left.sequence, left.timestamps) == ([b"0", b"1"], 0, [0, 1])
    deliver(accumulator, left, 10)
    right = accumulator.take(queue_of(accumulator))
    assert (right.values, right.sequence, right.keys) == ([b"2", b"3", b"4"], 2, [b"k"] * 3)
    assert right.awaited == {2}
    assert whole.forwarded is not None
    assert whole.forwarded[handles[4][1]] == (right, 2)
    deliver(accumulator, right, 12)
    assert accumulator.used == 0


def test_batches_get_smaller_once_a_broker_found_one_too_large() -> None:
    accumulator = make(batch_size=64 * KIB)
    for _ in range(30):
        add(accumulator, b"x" * KIB)
    whole = accumulator.take(queue_of(accumulator))
    accumulator.judge(whole, ErrorCode.MESSAGE_TOO_LARGE)
    accumulator.split(whole)
    accumulator.begin_flush()
    for _ in range(2):
        deliver(accumulator, accumulator.take(queue_of(accumulator)))
    for _ in range(30):
        add(accumulator, b"x" * KIB)
    assert accumulator.take(queue_of(accumulator)).size <= whole.size // 2 + 1 + 16 * KIB


def test_a_topic_that_was_created_again_gets_new_numbers() -> None:
    accumulator = make()
    (batch,) = pipeline(accumulator, 1)
    deliver(accumulator, batch)
    accumulator.topic_is_known("t", "another id", 1, [0])
    add(accumulator, b"v")
    assert accumulator.take(queue_of(accumulator)).sequence == 0


def test_a_batch_in_flight_to_a_deleted_topic_is_void_once_its_answer_comes() -> None:
    accumulator = make(batch_size=1)
    first, second = pipeline(accumulator, 2)
    accumulator.topic_is_known("t", "another id", 1, [0])
    add(accumulator, b"new")
    assert ready(accumulator) == []  # it must not overtake the batch in flight
    for batch in (second, first):
        assert accumulator.judge(batch, ErrorCode.NETWORK_EXCEPTION) is BatchVerdict.RETRY
        assert not batch.maybe_appended
        accumulator.retry(batch, 0.0)
    assert ready(accumulator) == [0]
    assert accumulator.take(queue_of(accumulator)) is first
    assert (first.sequence, first.topic_id) == (0, "another id")


def test_what_was_sent_to_the_present_topic_keeps_its_number_and_its_doubt() -> None:
    accumulator = make()
    accumulator.topic_is_known("t", "another id", 1, [0])
    (batch,) = pipeline(accumulator, 1)
    identity, sequence = batch.identity, batch.sequence
    accumulator.judge(batch, ErrorCode.NETWORK_EXCEPTION)
    accumulator.retry(batch, 0.0)
    accumulator.topic_is_known("t", "another id", 1, [0])
    assert batch.maybe_appended
    assert (batch.identity, batch.sequence) == (identity, sequence)


def test_another_topic_is_not_made_to_wait_for_the_back_off_of_the_one_before() -> None:
    accumulator = make()
    (batch,) = pipeline(accumulator, 1)
    accumulator.judge(batch, ErrorCode.INCONSISTENT_TOPIC_ID)
    accumulator.retry(batch, 5.0)
    assert ready(accumulator) == []
    accumulator.topic_is_known("t", "another id", 1, [0])
    assert ready(accumulator) == [0]


def test_records_for_partitions_that_are_no_more_fail_and_say_why() -> None:
    accumulator = make(partitions=3, batch_size=1)
    add(accumulator, b"in flight", partition=2)
    travelling = accumulator.take(queue_of(accumulator, 2))
    waiting, _ = add(accumulator, b"waiting", partition=2)
    kept, _ = add(accumulator, b"kept", partition=0)
    accumulator.topic_is_known("t", "another id", 1, [0])
    accumulator.judge(travelling, ErrorCode.NETWORK_EXCEPTION)
    accumulator.retry(travelling, 0.0)
    accumulator.topic_is_known("t", "another id", 1, [0])
    for batch, reason in (travelling, "it may be in the topic that was deleted"), (waiting, "it was not sent"):
        assert isinstance(batch.error, BrokerError)
        assert batch.error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert "has partitions 0 to 0 now" in str(batch.error)
        assert reason in str(batch.error)
    assert ready(accumulator) == [0]
    deliver(accumulator, accumulator.take(queue_of(accumulator)))
    assert kept.is_done
    for number in range(20):
        batch, _ = add(accumulator, b"v", key=b"%d" % number if number % 2 else None)
        assert batch.partition == 0
    with pytest.raises(BrokerError, match="partitions are 0 to 0"):
        add(accumulator, b"v", partition=1)


def test_the_open_batch_of_a_partition_that_is_no_more_takes_no_records() -> None:
    accumulator = make(partitions=None)
    accumulator.topic_is_known("t", "id", 3, [2])
    add(accumulator, b"v")
    assert accumulator.open_batches["t"].partition == 2
    accumulator.topic_is_known("t", "another id", 1, [0])
    assert accumulator.open_batches["t"].partition == 0
    assert add(accumulator, b"v")[0].partition == 0


def send_all(accumulator: Accumulator) -> dict[int, list[bytes | None]]:
    """Deliver every batch that is ready. Returns the values by partition."""
    sent: dict[int, list[bytes | None]] = {}
    while queues := accumulator.ready(0.0).queues:
        for queue in queues:
            batch = accumulator.take(queue)
            sent.setdefault(queue.partition, []).extend(batch.values)
            deliver(accumulator, batch)
    return sent


def by_key(numbers: Sequence[int], partitions: int) -> dict[int, list[bytes | None]]:
    places: dict[int, list[bytes | None]] = {}
    for number in numbers:
        places.setdefault(crc32(b"%d" % (number % 10), partitions), []).append(b"%d" % number)
    return places


def in_order_of_keys(sent: dict[int, list[bytes | None]], partitions: int) -> bool:
    for partition, values in sent.items():
        for key in range(10):
            numbers = [int(value) for value in values if value is not None and int(value) % 10 == key]
            if numbers != sorted(numbers) or (numbers and crc32(b"%d" % key, partitions) != partition):
                return False
    return True


@pytest.mark.parametrize(("before", "after"), [(3, 6), (6, 3), (4, 1)])
def test_records_waiting_while_their_topic_is_recreated_go_where_the_new_count_puts_them(
    before: int, after: int
) -> None:
    accumulator = make(partitions=before, batch_size=400)
    for number in range(100):
        add(accumulator, b"%d" % number, key=b"%d" % (number % 10), now=number / 100)
    accumulator.topic_is_known("t", "another id", after, range(after))
    for number in range(100, 150):
        add(accumulator, b"%d" % number, key=b"%d" % (number % 10), now=number / 100)
    flush = accumulator.begin_flush()
    sent = send_all(accumulator)
    assert in_order_of_keys(sent, after)
    assert sum(map(len, sent.values())) == 150
    assert accumulator.is_flushed(flush)
    assert accumulator.used == 0


def test_nothing_overtakes_what_is_in_flight_to_the_topic_that_was_deleted() -> None:
    accumulator = make(partitions=3)
    for number in range(20):
        add(accumulator, b"%d" % number, key=b"%d" % (number % 10))
    travelling = [accumulator.take(queue) for queue in accumulator.ready(0.0).queues]
    for number in range(20, 40):
        add(accumulator, b"%d" % number, key=b"%d" % (number % 10))
    accumulator.topic_is_known("t", "another id", 6, range(6))
    for number in range(40, 60):
        add(accumulator, b"%d" % number, key=b"%d" % (number % 10))
        assert accumulator.add_with_key("t", b"", b"0", 5) is None
    flush = accumulator.begin_flush()
    for batch in travelling:
        accumulator.topic_is_known("t", "another id", 6, range(6))
        assert ready(accumulator) == []
        assert accumulator.changing_topics() == ["t"]
        accumulator.judge(batch, ErrorCode.NETWORK_EXCEPTION)
        accumulator.retry(batch, 1.0)
    accumulator.topic_is_known("t", "another id", 6, range(6))
    assert accumulator.changing_topics() == []
    assert not accumulator.is_flushed(flush)
    assert send_all(accumulator) == by_key(range(60), 6)
    assert accumulator.is_flushed(flush)
    assert accumulator.used == 0


@pytest.mark.parametrize("without_key", WithoutKey)
def test_records_without_a_key_do_not_fail_for_partitions_that_are_no_more(without_key: WithoutKey) -> None:
    accumulator = make(partitions=4, batch_size=200, without_key=without_key)
    batches = [add(accumulator, b"%d" % number) for number in range(100)]
    accumulator.topic_is_known("t", "another id", 2, range(2))
    sent = send_all(accumulator)
    assert set(sent) <= {0, 1}
    assert sum(map(len, sent.values())) == 100
    for batch, index in batches:
        while batch.forwarded is not None:
            batch, index = batch.forwarded[index]
        assert batch.is_done
        assert batch.error is None


def test_a_batch_holds_either_records_that_were_placed_or_records_whose_partition_was_chosen() -> None:
    accumulator = make()
    placed, _ = add(accumulator, b"placed")
    assert accumulator.open_batches["t"] is placed
    chosen, _ = add(accumulator, b"chosen", key=b"k", partition=0)
    assert chosen is not placed
    assert "t" not in accumulator.open_batches
    assert accumulator.add_with_key("t", b"v", b"k", 5) is None
    by_its_key, _ = add(accumulator, b"by its key", key=b"k")
    assert by_its_key is not chosen
    assert accumulator.add_with_key("t", b"v", b"k", 5) == (by_its_key, 1)


def test_what_waits_for_a_topic_that_changes_expires_and_fails_as_ever() -> None:
    accumulator = make(partitions=2, batch_size=1)
    add(accumulator, b"in flight", partition=0)
    travelling = accumulator.take(queue_of(accumulator))
    waiting, _ = add(accumulator, b"waiting", partition=0)
    accumulator.topic_is_known("t", "another id", 1, [0])
    held, _ = add(accumulator, b"held", now=50.0)
    later, _ = add(accumulator, b"later", now=60.0)
    assert accumulator.expired(170.0) == [travelling, waiting, held]
    for batch in accumulator.expired(170.0):
        accumulator.expire(batch, Closed("late"))
    assert [batch.is_done for batch in (travelling, waiting, held, later)] == [True, True, True, False]
    accumulator.fail_all(Closed("closed"))
    assert len(accumulator.take_failures()) == 4
    assert accumulator.used == 0


def test_an_attempt_that_may_be_in_the_present_topic_binds_its_batch_to_partition_and_number() -> None:
    accumulator = make(partitions=None)
    accumulator.topic_is_known("t", "", 2, range(2))
    add(accumulator, b"v", key=b"4")
    queue = next(iter(accumulator.ready(0.0).queues))
    batch = accumulator.take(queue)
    number = batch.identity, batch.sequence
    accumulator.topic_is_known("t", "id", 2, range(2))
    accumulator.topic_is_known("t", "another id", 5, range(5))
    accumulator.judge(batch, ErrorCode.NETWORK_EXCEPTION)
    accumulator.retry(batch, 0.0)
    accumulator.topic_is_known("t", "another id", 5, range(5))
    assert accumulator.take(queue) is batch
    assert (batch.identity, batch.sequence) == number


def test_a_batch_of_the_topic_that_was_deleted_is_split_into_halves_without_numbers() -> None:
    accumulator = make()
    for _ in range(4):
        add(accumulator, b"v")
    batch = accumulator.take(queue_of(accumulator))
    accumulator.topic_is_known("t", "another id", 1, [0])
    assert accumulator.judge(batch, ErrorCode.MESSAGE_TOO_LARGE) is BatchVerdict.SPLIT
    accumulator.split(batch)
    halves = [accumulator.take(queue_of(accumulator))]
    deliver(accumulator, halves[0])
    halves.append(accumulator.take(queue_of(accumulator)))
    assert [half.sequence for half in halves] == [0, 2]


def test_a_topic_unknown_to_all_brokers_is_forgotten_with_its_records() -> None:
    accumulator = make(partitions=None)
    batch, _ = add(accumulator, b"v")
    accumulator.fail_held("t", BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    accumulator.forget("t")
    assert batch.is_done
    assert accumulator.topics() == []


# --- time ---


def test_what_waits_longer_than_the_delivery_timeout_expires() -> None:
    accumulator = make()
    old, _ = add(accumulator, b"old", now=1.0)
    assert accumulator.next_expiry(50.0) == 121.0
    assert accumulator.expired(120.9) == []
    assert accumulator.expired(121.0) == [old]
    accumulator.expire(old, Closed("late"))
    assert old.is_done
    assert accumulator.ready(121.0).queues == []
    assert accumulator.next_expiry(121.0) == 241.0


def test_a_batch_that_expires_in_flight_fails_and_its_late_answer_counts_for_sequences() -> None:
    accumulator = make()
    first, second = pipeline(accumulator, 2)
    accumulator.expire(first, Closed("late"))
    assert first.is_done
    assert queue_of(accumulator).in_flight == [first, second]
    deliver(accumulator, first)
    deliver(accumulator, second, 1)
    assert isinstance(first.error, Closed)
    add(accumulator, b"next")
    assert accumulator.take(queue_of(accumulator)).sequence == 2


def test_a_batch_that_expired_in_flight_unappended_renumbers_its_successors() -> None:
    accumulator = make()
    (first,) = pipeline(accumulator, 1)
    accumulator.expire(first, Closed("late"))
    assert accumulator.judge(first, ErrorCode.NETWORK_EXCEPTION) is BatchVerdict.RETRY
    accumulator.retry(first, 0.0)
    assert list(queue_of(accumulator).waiting) == []
    add(accumulator, b"next")
    following = accumulator.take(queue_of(accumulator))
    assert following.identity is not None
    assert first.identity is not None
    assert (following.identity.epoch, following.sequence) == (first.identity.epoch + 1, 0)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_has_a_verdict_and_only_success_delivers(code: ErrorCode) -> None:
    for is_first in (True, False):
        for maybe_appended in (True, False):
            verdict = judge_batch(
                code, record_count=1, is_first=is_first, maybe_appended=maybe_appended, is_idempotent=True
            )
            succeeded = code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER)
            assert (verdict is BatchVerdict.DELIVERED) == succeeded
            assert verdict is not BatchVerdict.SPLIT
            assert not (verdict is BatchVerdict.RENUMBER and maybe_appended)
