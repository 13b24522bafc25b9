"""Ranges and look-ups against scripted brokers: gaps, failovers, losses, and records in Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pyarrow
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from minibroker.client.errors import CorruptBatch
from minibroker.protocol.apis import FETCH, LIST_OFFSETS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    HEADER_SIZE,
    READ_COMMITTED,
    ControlType,
    EndTransactionMarker,
    decode_batch,
    encode_batch,
    encode_control_batch,
    parse_header,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import write_header
from minibroker.spark_jobs.source import arrow
from minibroker.spark_jobs.source.arrow import BatchBuilder
from minibroker.spark_jobs.source.bounds import resolve, starting_offsets
from minibroker.spark_jobs.source.log_client import LogClient
from minibroker.spark_jobs.source.offsets import DataLost, OffsetRange
from minibroker.spark_jobs.source.options import EARLIEST, LATEST, Bound, Subscription, parse_read_options
from minibroker.spark_jobs.source.reading import ReadSettings, read_range
from minibroker.spark_jobs.source.source import read_schema
from tests.faults.hostile.readers import constant_batch, lying_batch
from tests.unit.client.scripted_broker import DROP, Action, Received, reject
from tests.unit.spark_jobs.scripted_log import ScriptedLog, scripted_log

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
T = Subscription(topics=("t",))


@pytest.fixture
def log() -> Iterator[ScriptedLog]:
    with scripted_log() as scripted:
        scripted.topic("t", 2)
        yield scripted


@pytest.fixture
def client(log: ScriptedLog) -> Iterator[LogClient]:
    with LogClient(log.bootstrap, "test", patience_s=30) as found:
        yield found


# --- records --------------------------------------------------------------------------------------------------


def test_a_record_has_all_its_columns(log: ScriptedLog) -> None:
    log.append(
        [b"v0", None, b"v2"],
        keys=[b"k0", None, b"k2"],
        headers=[[("h", b"1"), ("h", None)], None, []],
        timestamp=1_700_000_000_123,
    )
    rows = log.rows(log.wanted(0, 3), include_headers=True)
    assert rows[0] == {
        "key": b"k0",
        "value": b"v0",
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "timestamp": datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=123_000),
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
    }
    assert [(row["key"], row["value"], row["headers"]) for row in rows[1:]] == [
        (None, None, None),
        (b"k2", b"v2", None),
    ]


def test_headers_are_no_column_unless_asked_for(log: ScriptedLog) -> None:
    log.append([b"v"], headers=[[("h", b"1")]])
    assert list(log.rows(log.wanted(0, 1))[0]) == [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestampType",
    ]


def test_a_range_begins_and_ends_within_batches(log: ScriptedLog) -> None:
    for _ in range(3):
        log.append([b"x"] * 10)
    assert log.offsets(log.wanted(7, 23)) == list(range(7, 23))
    assert log.offsets(log.wanted(12, 13)) == [12]
    assert log.offsets(log.wanted(10, 20)) == list(range(10, 20))


def test_keys_and_headers_of_some_batches_alone_stay_with_their_records(log: ScriptedLog) -> None:
    log.append([b"a"])
    log.append([b"b"], keys=[b"k"], headers=[[("h", b"1")]])
    log.append([b"c"])
    rows = log.rows(log.wanted(0, 3), include_headers=True)
    assert [(row["value"], row["key"], bool(row["headers"])) for row in rows] == [
        (b"a", None, False),
        (b"b", b"k", True),
        (b"c", None, False),
    ]


def test_small_batches_are_joined_and_large_ones_are_not_held_back(log: ScriptedLog) -> None:
    for _ in range(30):
        log.append([b"x"] * 1_000)
    settings = ReadSettings(log.bootstrap, "test", False, True)
    schema = to_arrow_schema(read_schema(False), timezone="UTC")
    sizes = [batch.num_rows for batch in read_range(settings, log.wanted(0, 29_500), schema)]
    assert sizes == [10_000, 10_000, 9_500]


def test_a_batch_that_says_its_columns_once_becomes_batches_that_fit_into_memory(log: ScriptedLog) -> None:
    log.append_raw(bytes(constant_batch(bytes(4 << 20), 20)))
    pairs: list[tuple[str, bytes | None]] = [("h", bytes(1 << 20))]
    log.append_raw(bytes(constant_batch(b"v", 40, headers=pairs, base_offset=20)))
    settings = ReadSettings(log.bootstrap, "test", True, True)
    schema = to_arrow_schema(read_schema(True), timezone="UTC")
    batches = list(read_range(settings, log.wanted(2, 59), schema))
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == list(range(2, 59))
    assert max(batch.nbytes for batch in batches) <= 64 << 20


def test_gaps_that_compaction_left_are_no_end_and_no_loss(log: ScriptedLog) -> None:
    # Offsets 0, 3, 7 of 0..9 are left, then an empty batch, then 20..21.
    gappy = encode_batch([b"a", b"b", b"c"], base_timestamp=1, offset_deltas=[0, 3, 7], last_offset_delta=9)
    emptied = encode_batch([], base_timestamp=1, base_offset=10, last_offset_delta=9)
    rest = encode_batch([b"d", b"e"], base_timestamp=1, base_offset=20)
    for data in (gappy, emptied, rest):
        log.append_raw(data)
    assert log.offsets(log.wanted(0, 22)) == [0, 3, 7, 20, 21]
    assert log.offsets(log.wanted(1, 7)) == [3]
    assert log.offsets(log.wanted(4, 6)) == []
    assert log.offsets(log.wanted(8, 15)) == []
    assert log.offsets(log.wanted(8, 21)) == [20]


def test_control_batches_are_passed_over(log: ScriptedLog) -> None:
    log.append([b"a"])
    marker = EndTransactionMarker(ControlType.COMMIT, 0)
    control = encode_control_batch(marker, timestamp=1, producer_id=1, producer_epoch=0, base_offset=1)
    log.append_raw(control)
    log.append([b"b"])
    assert log.offsets(log.wanted(0, 3)) == [0, 2]
    assert log.offsets(log.wanted(0, 2)) == [0]


def transactions(log: ScriptedLog) -> None:
    """Offsets 0 (plain), 1, 2 (aborted), 3 (committed), 4 and 5 (their markers), 6 (plain), 7 (open)."""

    def work() -> None:
        for producer, values in ((None, [b"0"]), (1, [b"1", b"2"]), (2, [b"3"])):
            log.log().append(in_transaction(values, producer))
        log.log().end_transaction(1, ControlType.ABORT)
        log.log().end_transaction(2, ControlType.COMMIT)
        log.log().append(in_transaction([b"6"], None))
        log.log().append(in_transaction([b"7"], 3))

    def in_transaction(values: list[bytes], producer: int | None) -> bytearray:
        if producer is None:
            return encode_batch(values, base_timestamp=1)
        return encode_batch(
            values, base_timestamp=1, producer_id=producer, producer_epoch=0, base_sequence=0, transactional=True
        )

    log.call(work)


@pytest.mark.parametrize("first", range(7))
def test_read_committed_leaves_out_aborted_records_wherever_a_range_begins(log: ScriptedLog, first: int) -> None:
    transactions(log)
    rows = log.rows(log.wanted(first, 7), isolation_level=READ_COMMITTED)
    assert [row["offset"] for row in rows] == [offset for offset in (0, 3, 6) if offset >= first]
    assert log.offsets(log.wanted(first, 8)) == [offset for offset in (0, 1, 2, 3, 6, 7) if offset >= first]


def test_read_committed_ends_at_the_last_stable_offset(log: ScriptedLog) -> None:
    transactions(log)
    options = {"bootstrap.servers": log.bootstrap, "subscribe": "t", "startingOffsets": "latest"}
    for level, end in (("read_committed", 7), ("read_uncommitted", 8)):
        parsed = parse_read_options(options | {"isolation.level": level}, is_streaming=True)
        with LogClient(log.bootstrap, "test", isolation_level=parsed.isolation_level) as client:
            assert starting_offsets(client, parsed)["t"].offsets[0] == end
            assert client.latest(T)["t"].offsets[0] == end
    with pytest.raises(MinibrokerError, match="7 to 8 were readable but no longer are: the last stable offset is 7"):
        log.rows(log.wanted(0, 8), isolation_level=READ_COMMITTED, patience_s=0.1)


def test_a_damaged_marker_is_reported(log: ScriptedLog) -> None:
    transactions(log)
    stored = log.log().batches[3]
    damaged = bytearray(stored.data)
    damaged[-1] ^= 1
    log.log().batches[3] = stored._replace(data=bytes(damaged))
    with pytest.raises(CorruptBatch, match="t-0 at or after offset 4: the CRC is"):
        log.rows(log.wanted(0, 7))


def test_a_damaged_batch_is_reported_with_partition_and_offset(log: ScriptedLog) -> None:
    log.append([b"a"])
    damaged = encode_batch([b"b"], base_timestamp=1, base_offset=1)
    damaged[-1] ^= 1
    log.append_raw(damaged)
    with pytest.raises(CorruptBatch, match="t-0 at or after offset 1: the CRC is"):
        log.rows(log.wanted(0, 2))


def test_a_body_that_its_producer_filled_with_nonsense_is_reported_with_the_offset_after_it(log: ScriptedLog) -> None:
    log.append([b"a"])
    batch = encode_batch([b"b"] * 3, base_timestamp=1, base_offset=1)
    log.append_raw(write_header(batch[: HEADER_SIZE + 1] + b"\xff" * 9, parse_header(batch)))
    with pytest.raises(CorruptBatch, match="t-0 at or after offset 1: not the columns") as raised:
        log.rows(log.wanted(0, 4))
    assert 'startingOffsets (offset 4: {"t": {"0": 4}})' in str(raised.value)


@pytest.mark.parametrize(("delta", "told"), [(1 << 60, 1 << 61), (1 << 62, 5 << 60)])
def test_a_timestamp_beyond_sparks_range_is_reported_with_its_offset_or_is_null(delta: int, told: int) -> None:
    schema = to_arrow_schema(read_schema(False), timezone="UTC")
    for fails in (True, False):
        builder = BatchBuilder(OffsetRange("t", "id", 0, 0, 2), schema, False, fails)
        builder.add(decode_batch(encode_batch([b"x"], base_timestamp=7)), 0)
        bad = encode_batch([b"x"], base_timestamp=told - delta, timestamp_deltas=[delta], base_offset=1)
        builder.add(decode_batch(bad), 0)
        if fails:
            with pytest.raises(MinibrokerError, match=rf"t-0: .* offset 1 .* {told} ms.*timestampOutOfRange=null"):
                builder.build()
        else:
            assert builder.build().column("timestamp").cast(pyarrow.int64()).to_pylist() == [7_000, None]


def test_a_timestamp_that_its_batch_denies_is_null_and_fails_no_query() -> None:
    builder = BatchBuilder(OffsetRange("t", "id", 0, 0, 2), to_arrow_schema(read_schema(False), timezone="UTC"), False)
    builder.add(decode_batch(encode_batch([b"x"], base_timestamp=7)), 0)
    builder.add(decode_batch(lying_batch(b"y", 1 << 60, base_offset=1)), 0)
    assert builder.build().column("timestamp").cast(pyarrow.int64()).to_pylist() == [7_000, None]


@pytest.mark.parametrize("deltas", [[0, 255, 7], [0, 256, 7], [3, -1, 1 << 40]], ids=["bytes", "larger", "negative"])
def test_timestamps_are_those_of_the_records_whatever_their_deltas(deltas: list[int]) -> None:
    builder = BatchBuilder(OffsetRange("t", "id", 0, 1, 6), to_arrow_schema(read_schema(False), timezone="UTC"), False)
    for base_offset, base in ((0, 1_700_000_000_000), (3, 5)):
        data = encode_batch([b"x"] * 3, base_timestamp=base, timestamp_deltas=deltas, base_offset=base_offset)
        builder.add(decode_batch(data), 1)
    milliseconds = [1_700_000_000_000 + delta for delta in deltas[1:]] + [5 + delta for delta in deltas]
    timestamps = builder.build().column("timestamp").cast(pyarrow.int64()).to_pylist()
    assert timestamps == [1_000 * timestamp for timestamp in milliseconds]


def test_log_append_time_has_its_own_timestamp_type() -> None:
    data = encode_batch([b"x"], base_timestamp=5)
    data[22] |= 8  # the attributes' bit for it
    header = parse_header(data)
    builder = BatchBuilder(OffsetRange("t", "id", 0, 0, 1), to_arrow_schema(read_schema(False), timezone="UTC"), False)
    builder.add(decode_batch(data, header, check_crc=False), 0)
    assert builder.build().column("timestampType").to_pylist() == [1]


def test_what_compressed_batches_grow_to_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "ENOUGH_BYTES", 100_000)
    schema = to_arrow_schema(read_schema(False), timezone="UTC")
    builder = BatchBuilder(OffsetRange("t", "id", 0, 0, 99), schema, False)
    builder.add(decode_batch(encode_batch([b"x" * 99_999], base_timestamp=5, compression=Compression.ZSTD)), 0)
    is_full = builder.is_full
    builder.add(decode_batch(encode_batch([b"x"], base_timestamp=5, base_offset=1, compression=Compression.ZSTD)), 0)
    assert (is_full, builder.is_full) == (False, True)
    assert builder.build().num_rows == 2
    assert builder.rows == 0


# --- failovers and losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        DROP,
        reject(ErrorCode.NOT_LEADER_OR_FOLLOWER),
        reject(ErrorCode.FENCED_LEADER_EPOCH),
        reject(ErrorCode.OFFSET_NOT_AVAILABLE),
        reject(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_a_fetch_that_fails_is_made_again(log: ScriptedLog, trouble: Action) -> None:
    log.append([b"x"] * 10)
    log.script(FETCH, trouble, trouble)
    assert log.offsets(log.wanted(0, 10)) == list(range(10))


def test_a_leader_that_moves_is_followed() -> None:
    with scripted_log(3) as log:
        log.topic("t")
        for _ in range(3):
            log.append([b"x" * 100] * 30_000)  # each more than a fetch

        def moves(received: Received) -> Action | None:
            if received.api is FETCH and received.body.topics[0].partitions[0].fetch_offset == 30_000:
                log.cluster.rules.clear()
                log.cluster.move("t", 0, 2)
            return None

        log.call(lambda: log.cluster.rules.append(moves))
        assert log.offsets(log.wanted(0, 90_000)) == list(range(90_000))


def test_a_leader_that_stays_away_is_reported_once_patience_is_over(log: ScriptedLog) -> None:
    log.append([b"x"])

    def leaderless() -> None:
        log.log().leader = -1

    log.call(leaderless)
    with pytest.raises(BrokerError, match="LEADER_NOT_AVAILABLE: reading t-0 at offset 0"):
        log.rows(log.wanted(0, 1), patience_s=0.3)


@pytest.mark.slow
def test_brokers_that_stay_away_are_reported_once_patience_is_over() -> None:
    with scripted_log() as log:
        log.topic("t")
        wanted, bootstrap = log.wanted(0, 1), log.bootstrap
    settings = ReadSettings(bootstrap, "test", False, True)
    with pytest.raises(NetworkError, match="no broker answered"):
        list(read_range(settings, wanted, to_arrow_schema(read_schema(False), timezone="UTC"), patience_s=0.1))


def test_a_high_watermark_that_stays_behind_is_told_and_one_that_catches_up_is_not(log: ScriptedLog) -> None:
    log.append([b"x"] * 5)
    with pytest.raises(MinibrokerError, match="5 to 10 were readable but no longer are: the high watermark is 5"):
        log.rows(log.wanted(0, 10), patience_s=0.1)

    def catches_up(received: Received) -> Action | None:
        if received.api is FETCH and received.body.topics[0].partitions[0].fetch_offset == 5:
            log.cluster.rules.clear()
            log.log().append(encode_batch([b"x"] * 5, base_timestamp=1))
        return None

    log.call(lambda: log.cluster.rules.append(catches_up))
    assert log.offsets(log.wanted(0, 10)) == list(range(10))


def test_offsets_that_retention_took_fail_or_are_skipped(log: ScriptedLog) -> None:
    log.append([b"x"] * 10)

    def delete() -> None:
        log.log().start = 4

    log.call(delete)
    with pytest.raises(DataLost, match=r"t-0: offsets 2 to 4 are gone: the log begins at 4.*failOnDataLoss=false"):
        log.rows(log.wanted(2, 8))
    assert log.offsets(log.wanted(2, 8), fail_on_data_loss=False) == [4, 5, 6, 7]
    assert log.offsets(log.wanted(0, 3), fail_on_data_loss=False) == []


def test_a_log_that_ends_before_the_range_fails_or_is_read_to_its_end(log: ScriptedLog) -> None:
    log.append([b"x"] * 3)
    with pytest.raises(DataLost, match="offsets 5 to 8 are gone: the log ends at 3"):
        log.rows(log.wanted(5, 8))
    assert log.offsets(log.wanted(5, 8), fail_on_data_loss=False) == []


def test_a_topic_that_was_created_again_is_not_read(log: ScriptedLog) -> None:
    log.append([b"x"] * 3)
    wanted = log.wanted(0, 3)
    new_id = log.topic("t")
    log.append([b"y"] * 3)

    def checks_ids(received: Received) -> Action | None:
        is_other = received.api is FETCH and received.body.topics[0].topic_id != new_id
        return reject(ErrorCode.INCONSISTENT_TOPIC_ID) if is_other else None

    log.call(lambda: log.cluster.rules.append(checks_ids))
    with pytest.raises(DataLost, match=f"was deleted and created again: its id was {wanted.topic_id}, and is {new_id}"):
        log.rows(wanted)
    assert log.rows(wanted, fail_on_data_loss=False) == []


def test_a_topic_that_is_gone_is_reported_once_patience_is_over(log: ScriptedLog) -> None:
    log.append([b"x"] * 3)
    wanted = log.wanted(0, 3)
    log.call(lambda: log.cluster.topics.pop("t"))
    with pytest.raises(DataLost, match="topic t is gone"):
        log.rows(wanted, patience_s=0.2)
    assert log.offsets(wanted, fail_on_data_loss=False, patience_s=0.2) == []


def test_an_error_that_no_retry_mends_is_raised_at_once(log: ScriptedLog) -> None:
    log.append([b"x"])
    log.script(FETCH, reject(ErrorCode.INVALID_REQUEST))
    with pytest.raises(BrokerError, match="INVALID_REQUEST: reading t-0 at offset 0"):
        log.rows(log.wanted(0, 1))


# --- look-ups -----------------------------------------------------------------------------------------------------


def test_subscriptions_find_their_partitions(log: ScriptedLog, client: LogClient) -> None:
    log.topic("t2")
    assert client.topics(T).partitions == (P0, P1)
    assert client.topics(Subscription(pattern="t.*")).partitions == (P0, P1, TopicPartition("t2", 0))
    assert client.topics(Subscription(pattern="nothing")).partitions == ()
    found = client.topics(Subscription(partitions=(P1,)))
    assert (found.partitions, found.ids) == ((P1,), {"t": log.cluster.topics["t"].topic_id})


@pytest.mark.slow
def test_topics_and_partitions_that_do_not_exist_are_named(log: ScriptedLog) -> None:
    with LogClient(log.bootstrap, "test", patience_s=2) as client:
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION: topic missing"):
            client.topics(Subscription(topics=("t", "missing")))
        with pytest.raises(BrokerError, match="t has no partition 7: its partitions are 0 to 1"):
            client.topics(Subscription(partitions=(TopicPartition("t", 7),)))
        with pytest.raises(BrokerError, match="partition missing-0; there is no such topic"):
            client.topics(Subscription(partitions=(TopicPartition("missing", 0),)))


def test_looking_up_waits_for_leaders(log: ScriptedLog, client: LogClient) -> None:
    log.append([b"x"] * 3)
    log.script(LIST_OFFSETS, DROP, reject(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    assert client.known_offsets({P0: LATEST, P1: LATEST}) == {P0: 3, P1: 0}


@pytest.fixture
def resolved(log: ScriptedLog, client: LogClient) -> Callable[..., dict[TopicPartition, int]]:
    """Partition 0 holds offsets 0 to 2 of times 100, 200, 300; partition 1 is empty."""
    for timestamp in (100, 200, 300):
        log.append([b"x"], timestamp=timestamp)

    def resolve_options(
        side: str = "starting", *, is_streaming: bool = True, **options: str
    ) -> dict[TopicPartition, int]:
        given = {"bootstrap.servers": log.bootstrap, "subscribe": "t"} | options
        parsed = parse_read_options(given, is_streaming=is_streaming)
        bound = parsed.starting if side == "starting" else parsed.ending
        return resolve(client, client.topics(T), bound, name=side)

    return resolve_options


def test_words_numbers_and_offsets_become_offsets(resolved: Callable[..., dict[TopicPartition, int]]) -> None:
    assert resolved() == {P0: 3, P1: 0}
    assert resolved(startingOffsets="earliest") == {P0: 0, P1: 0}
    assert resolved(startingOffsets='{"t":{"0":2}}') == {P0: 2, P1: 0}
    assert resolved(startingOffsets='{"t":{"0":-2,"1":-1}}') == {P0: 0, P1: 0}
    assert resolved(startingOffsets='{"t":{"1":0},"*":-2}') == {P0: 0, P1: 0}
    assert resolved("ending", is_streaming=False, endingOffsets='{"t":{"0":1}}') == {P0: 1, P1: 0}


def test_timestamps_become_the_first_offset_as_young(resolved: Callable[..., dict[TopicPartition, int]]) -> None:
    by_partition = {"startingOffsetsByTimestamp": '{"t":{"0":150}}'}
    assert resolved(**by_partition) == {P0: 1, P1: 0}
    assert resolved("ending", is_streaming=False, endingTimestamp="300") == {P0: 2, P1: 0}
    assert resolved("ending", is_streaming=False, endingOffsetsByTimestamp='{"t":{"0":999}}') == {P0: 3, P1: 0}


def test_no_record_as_young_fails_or_means_the_end(resolved: Callable[..., dict[TopicPartition, int]]) -> None:
    with pytest.raises(MinibrokerError, match="t-1 has no record at or after the starting timestamp 150"):
        resolved(startingTimestamp="150")
    assert resolved(startingTimestamp="150", startingOffsetsByTimestampStrategy="latest") == {P0: 1, P1: 0}


def test_offsets_of_what_is_not_read_or_not_there_are_refused(
    log: ScriptedLog, resolved: Callable[..., dict[TopicPartition, int]]
) -> None:
    with pytest.raises(BrokerError, match=r"startingOffsets name t-5, which is not among what is read: t-0, t-1"):
        resolved(startingOffsets='{"t":{"5":0}}')
    with pytest.raises(BrokerError, match="startingOffsets say 9 for t-0, whose log holds 0 to 3"):
        resolved(startingOffsets='{"t":{"0":9}}')
    with pytest.raises(BrokerError, match="endingOffsets say 9 for t-0"):
        resolved("ending", is_streaming=False, endingOffsets='{"t":{"0":9}}')
    with pytest.raises(MinibrokerError, match=r"startingOffsets are of topic t with id old.*created again"):
        resolved(startingOffsets='{"t":{"id":"old","offsets":{"0":1}}}')


def test_offsets_of_a_checkpoint_are_taken_where_the_topic_is_the_same(
    log: ScriptedLog, resolved: Callable[..., dict[TopicPartition, int]]
) -> None:
    topic_id = log.cluster.topics["t"].topic_id
    assert resolved(startingOffsets=f'{{"t":{{"id":"{topic_id}","offsets":{{"0":1}}}}}}') == {P0: 1, P1: 0}


def test_a_query_begins_with_its_topics_ids(log: ScriptedLog, client: LogClient) -> None:
    options = parse_read_options({"bootstrap.servers": log.bootstrap, "subscribe": "t"}, is_streaming=True)
    found = starting_offsets(client, options)
    assert found["t"].topic_id == log.cluster.topics["t"].topic_id
    assert found["t"].offsets == {0: 0, 1: 0}
    assert Bound(EARLIEST).offset_of(P0) == EARLIEST


def test_arrow_columns_are_what_spark_expects() -> None:
    schema = to_arrow_schema(read_schema(True), timezone="UTC")
    builder = BatchBuilder(OffsetRange("t", "id", 3, 0, 9), schema, True)
    builder.add(decode_batch(encode_batch([b"x"], base_timestamp=5, headers=[[("h", b"1")]])), 0)
    batch = builder.build()
    batch.validate(full=True)
    assert batch.schema.equals(schema)
    assert batch.column("partition").type == pyarrow.int32()
