"""The batches sent to a peer that knows no columns: records of magic 2, within the limits of its fetch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minibroker.broker.replication import transcoding
from minibroker.broker.replication.questions import WAIVED
from minibroker.broker.replication.reading import FetchAnswer
from minibroker.broker.replication.transcoding import CACHE_BYTES, Transcoder, has_columns
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.validator import is_to_be_rewritten
from minibroker.protocol import apis, znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    AbortedTransaction,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    READ_COMMITTED,
    BatchHeader,
    ControlType,
    EndTransactionMarker,
    decode_batch,
    decode_control_batch,
    encode_batch,
    iterate_batches,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.transcoding import Records, as_records
from tests.properties.test_records_properties import with_honest_crc
from tests.properties.test_transcoding_properties import said_once
from tests.replication_support import ORDERS, TOPIC, TOPIC_ID, OneBroker, fetch_of, state, with_one_broker
from tests.running import run_by
from tests.storage_support import NOW, batch
from tests.unit.broker.handlers.test_handlers_produce_and_control import Peer, produce


class Reader:
    """A consumer that knows no columns."""

    def __init__(self, broker: OneBroker) -> None:
        self.broker = broker
        self.transcoder = Transcoder(broker.replicas, broker.world.new_executor("transcoding"))
        broker.replicas.listeners.add(self.transcoder)

    async def fetch(
        self,
        *offsets: int,
        max_bytes: int = 1 << 22,
        partition_max_bytes: int = 1 << 22,
        knows_zstd: bool = True,
    ) -> list[FetchPartitionResponse]:
        """Fetch from these offsets of partition 0, 1, ..."""
        fetches = [fetch_of(offset, index=index) for index, offset in enumerate(offsets)]
        for fetch in fetches:
            fetch.partition_max_bytes = partition_max_bytes
        request = FetchRequest(-1, 0, 1, max_bytes, 0, [FetchTopic(TOPIC, TOPIC_ID, fetches)])
        answers: list[FetchAnswer] = []
        self.broker.replicas.reader.fetch(request, answers.append)
        return [response for _, response in await self.transcoder.transcode(answers[0], request, knows_zstd=knows_zstd)]


def headers(response: FetchPartitionResponse) -> list[BatchHeader]:
    assert response.error_code == ErrorCode.NONE
    return [header for header, _, _ in iterate_batches(response.records)]


def values(response: FetchPartitionResponse) -> list[bytes | None]:
    found: list[bytes | None] = []
    for header, start, _ in iterate_batches(response.records):
        found += decode_batch(response.records, header, start).values
    return found


def native(*contents: bytes, compression: Compression = Compression.NONE, magic: int = MAGIC_COLUMNS) -> bytes:
    return bytes(encode_batch(contents, base_timestamp=NOW, compression=compression, magic=magic))


def with_reader(tmp_path: Path, scenario: Callable[[OneBroker, Reader], Awaitable[None]], partitions: int = 1) -> None:
    """Run the scenario on a broker that leads all partitions, without followers."""

    async def run(broker: OneBroker) -> None:
        reader = Reader(broker)
        await broker.told(*(state(1, index=index, isr=(1,), replicas=(1,)) for index in range(partitions)))
        await scenario(broker, reader)

    with_one_broker(tmp_path, run)


def with_record_format(
    tmp_path: Path, record_format: str, scenario: Callable[[OneBroker, Reader], Awaitable[None]]
) -> None:
    """Run the scenario on a broker where the topic has this setting and no leader yet."""

    async def run(broker: OneBroker) -> None:
        broker.zookeeper.make(znodes.topic_config_path(TOPIC), znodes.encode_config({"record.format": record_format}))
        await scenario(broker, Reader(broker))

    with_one_broker(tmp_path, run)


def found_columns(answer: FetchAnswer) -> bool:
    *_, found = steps_and_end(has_columns(answer))
    return bool(found)


def steps_and_end(search: Generator[None, None, bool]) -> Iterator[bool | None]:
    while True:
        try:
            yield next(search)
        except StopIteration as end:
            yield end.value
            return


async def write(broker: OneBroker, records: Sequence[bytes], partition: TopicPartition = ORDERS) -> None:
    for each in records:
        response = await broker.produce(each, partition=partition)
        assert response.error_code == ErrorCode.NONE


@run_by(with_reader)
async def test_batches_of_both_kinds_arrive_as_kafkas(broker: OneBroker, reader: Reader, /) -> None:
    await write(broker, [native(b"a", b"b"), native(b"c", magic=MAGIC_RECORDS), native(b"d")])
    [response] = await reader.fetch(0)
    assert [header.magic for header in headers(response)] == [MAGIC_RECORDS] * 3
    assert [header.base_offset for header in headers(response)] == [0, 2, 3]
    assert values(response) == [b"a", b"b", b"c", b"d"]
    assert response.high_watermark == 4


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("size", [10, 900_000, 3_000_000], ids=["on the loop", "codec in a thread", "all in a thread"])
@run_by(with_reader)
async def test_small_and_large_batches_are_transcoded_equally(
    broker: OneBroker, reader: Reader, /, codec: Compression, size: int
) -> None:
    contents = [b"%08d" % index * (size // 1_000 // 8 + 1) for index in range(1_000)]

    broker.partition().log.configure(LogConfig(max_message_bytes=1 << 23))
    await write(broker, [native(*contents, compression=codec)])
    [response] = await reader.fetch(0)
    assert values(response) == contents
    assert headers(response)[0].compression is codec


@run_by(with_reader)
async def test_the_limits_of_a_fetch_hold_for_what_is_sent(broker: OneBroker, reader: Reader, /) -> None:
    """Batches grow when they become records: those that no longer fit are left for the next fetch."""
    batch = native(*[b"x"] * 1_000)

    await write(broker, [batch] * 4)
    [response] = await reader.fetch(0)
    size = len(response.records) // 4
    assert size > 1.5 * len(batch)

    for limit, expected in ((1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (4 * size, 4)):
        [response] = await reader.fetch(0, partition_max_bytes=limit)
        assert len(headers(response)) == expected
        [response] = await reader.fetch(0, max_bytes=limit)
        assert len(headers(response)) == expected


@run_by(with_reader, partitions=3)
async def test_all_partitions_share_what_a_fetch_allows_and_the_first_gets_one_batch_at_least(
    broker: OneBroker, reader: Reader, /
) -> None:
    for index in range(3):
        await write(broker, [native(*[b"x"] * 1_000)], TopicPartition(TOPIC, index))
    size = len((await reader.fetch(0))[0].records)

    # Within these limits the log has room for more than the records sent.
    found = await reader.fetch(0, 0, 0, max_bytes=2 * size)
    assert [len(headers(response)) for response in found] == [1, 1, 0]
    found = await reader.fetch(1_000, 0, 0, max_bytes=10)
    assert [len(headers(response)) for response in found] == [0, 1, 0]


@run_by(with_reader)
async def test_a_consumer_gets_past_a_batch_that_expands_beyond_what_can_be_sent(
    broker: OneBroker, reader: Reader, /
) -> None:
    value = b"v" * 100_000
    compact = said_once(value, 600)

    await write(broker, [compact, native(b"after")])
    offset = 0
    found: list[bytes | None] = []
    while offset < 601:
        [response] = await reader.fetch(offset)
        assert headers(response)[0].base_offset == offset
        assert len(response.records) < 2 << 20
        found += values(response)
        offset = headers(response)[-1].next_offset
    assert found == [*[value] * 600, b"after"]


@run_by(with_reader)
async def test_damage_on_the_disk_is_not_sent_under_a_valid_crc(
    broker: OneBroker, reader: Reader, /, tmp_path: Path
) -> None:
    await write(broker, [native(b"fine"), native(b"some value")])
    path = str(tmp_path / "data" / "orders-0" / f"{0:020}.log")
    file = broker.world.disk.open(path)
    content = file.pread(file.size(), 0)
    file.pwrite([b"x"], content.index(b"some value"))

    [response] = await reader.fetch(0)
    assert values(response) == [b"fine"]
    [response] = await reader.fetch(1)
    assert (response.error_code, len(response.records)) == (ErrorCode.CORRUPT_MESSAGE, 0)


@run_by(with_reader)
async def test_a_body_that_never_was_columns_is_an_error_and_costs_no_leadership(
    broker: OneBroker, reader: Reader, /
) -> None:
    whole = bytearray(native(b"some value"))
    nonsense = whole[:62] + b"\xff" * (len(whole) - 62)

    await write(broker, [with_honest_crc(nonsense)])
    [response] = await reader.fetch(0)
    assert response.error_code == ErrorCode.CORRUPT_MESSAGE
    assert broker.partition().is_leader


# -- the cache --


def test_a_batch_is_transcoded_once_for_many_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(header: BatchHeader, *arguments: Any) -> Records:
        made.append(header.base_offset)
        return as_records(header, *arguments)

    monkeypatch.setattr(transcoding, "as_records", counted)

    async def scenario(broker: OneBroker, reader: Reader) -> None:
        await write(broker, [native(b"a"), native(b"b")])
        for _ in range(3):
            [response] = await reader.fetch(0)
            assert values(response) == [b"a", b"b"]
        assert made == [0, 1]

    with_reader(tmp_path, scenario)


@run_by(with_reader)
async def test_the_cache_is_bounded_and_keeps_the_latest(broker: OneBroker, reader: Reader, /) -> None:
    await write(broker, [native(*[b"%04d" % index * 200] * 1_000) for index in range(CACHE_BYTES // 800_000 + 10)])
    offset = 0
    while offset < broker.partition().high_watermark:
        [response] = await reader.fetch(offset)
        offset = headers(response)[-1].next_offset
        assert reader.transcoder.cached_bytes <= CACHE_BYTES
    assert reader.transcoder.cached_bytes > CACHE_BYTES - 600_000


@run_by(with_reader, partitions=2)
async def test_nothing_is_kept_of_a_partition_that_is_led_elsewhere_or_deleted(
    broker: OneBroker, reader: Reader, /
) -> None:
    await write(broker, [native(b"a")])
    await write(broker, [native(b"b")], TopicPartition(TOPIC, 1))
    await reader.fetch(0, 0)
    both = reader.transcoder.cached_bytes
    await broker.told(state(2, epoch=1, isr=(2,), replicas=(1, 2)))
    assert 0 < reader.transcoder.cached_bytes < both
    await broker.stop_replica(epoch=1, delete=True, index=1)
    assert reader.transcoder.cached_bytes == 0


@run_by(with_reader, partitions=2)
async def test_the_cache_tells_two_partitions_at_one_offset_apart(broker: OneBroker, reader: Reader, /) -> None:
    await write(broker, [native(b"a")])
    await write(broker, [native(b"b")], TopicPartition(TOPIC, 1))
    for _ in range(2):  # the second answer is from the cache
        assert [values(response) for response in await reader.fetch(0, 0)] == [[b"a"], [b"b"]]


@run_by(with_reader)
async def test_a_topic_does_not_get_cached_batches_of_its_earlier_namesake(
    broker: OneBroker, reader: Reader, /
) -> None:
    """Offset, epoch and even the CRC are the same; the cache tells the topics apart by id."""

    await write(broker, [native(b"a")])
    [response] = await reader.fetch(0)
    assert values(response) == [b"a"]
    await broker.stop_replica(epoch=1, delete=True)
    [response] = await reader.fetch(0)
    assert response.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@run_by(with_reader)
async def test_only_columns_cost_anything(broker: OneBroker, reader: Reader, /) -> None:
    await write(broker, [native(b"a", magic=MAGIC_RECORDS)])
    [response] = broker.fetch(fetch_of(0)).result()
    assert not found_columns([(ORDERS, response)])
    await write(broker, [native(b"b")])
    [response] = broker.fetch(fetch_of(0)).result()
    assert found_columns([(ORDERS, response)])


@pytest.mark.parametrize("has_them", [False, True])
def test_columns_are_searched_for_in_steps_among_tens_of_thousands_of_batches(has_them: bool) -> None:
    records = native(b"r", magic=MAGIC_RECORDS) * 20_000 + (native(b"c") if has_them else b"")
    answer = [(ORDERS, FetchPartitionResponse(0, 0, records=memoryview(records)))]
    assert list(steps_and_end(has_columns(answer))) == [None] * 4 + [has_them]


@run_by(with_reader)
async def test_a_client_older_than_zstd_gets_transcoded_batches_as_gzip(broker: OneBroker, reader: Reader, /) -> None:
    sent = [
        native(b"a" * 1_000, compression=Compression.ZSTD),
        native(b"b" * 1_000, compression=Compression.ZSTD, magic=MAGIC_RECORDS),
        native(b"c" * 1_000, compression=Compression.LZ4),
    ]

    await write(broker, sent)
    for knows_zstd, made in ((True, Compression.ZSTD), (False, Compression.GZIP)) * 2:
        [response] = await reader.fetch(0, knows_zstd=knows_zstd)
        assert [header.compression for header in headers(response)] == [made, Compression.ZSTD, Compression.LZ4]
        assert values(response) == [each * 1_000 for each in (b"a", b"b", b"c")]


@run_by(with_reader)
async def test_transcoded_and_cached_batches_are_counted_separately(broker: OneBroker, reader: Reader, /) -> None:
    await write(broker, [native(b"a", b"b"), native(b"c"), native(b"d", magic=MAGIC_RECORDS)])
    [response] = await reader.fetch(0)
    made = sum(header.size for header in headers(response)[:2])
    transcoder = reader.transcoder
    assert (transcoder.fetched.records, transcoder.fetched.bytes) == (3, made)
    assert (transcoder.cache_hits, transcoder.cache_misses) == (0, 2)
    await reader.fetch(0)
    assert (transcoder.fetched.records, transcoder.cache_hits, transcoder.cache_misses) == (3, 2, 2)
    await transcoder.as_appended(native(b"e"), LogConfig(columns=False))
    assert (transcoder.produced.records, transcoder.fetched.records) == (1, 3)


# -- a log that takes no columns (record.format=kafka) --


def produce_answers(peer: Peer) -> list[ProduceResponse]:
    found = []
    for frame in peer.answers:
        assert frame is not None
        found.append(apis.decode_response(apis.PRODUCE, apis.decode_response_envelope(frame[4:])))
    return found


@run_by(with_record_format, record_format="kafka")
async def test_with_record_format_kafka_the_log_has_records_whatever_was_sent(
    broker: OneBroker, reader: Reader, /
) -> None:
    await broker.told(state(1, isr=(1,), replicas=(1,)))
    peer = Peer(broker)
    sent = encode_batch([b"a", b"b"], base_timestamp=NOW, producer_id=7, producer_epoch=0, base_sequence=0)
    for _ in range(2):  # the second is a repetition
        await peer.send(apis.PRODUCE, produce(0, records=sent))
    await peer.send(apis.PRODUCE, produce(0, records=native(b"c", magic=MAGIC_RECORDS)))
    answers = [answer.responses[0].partition_responses[0] for answer in produce_answers(peer)]
    assert [(one.error_code, one.base_offset) for one in answers] == [(0, 0), (0, 0), (0, 2)]
    [response] = broker.fetch(fetch_of(0)).result()
    assert [header.magic for header in headers(response)] == [MAGIC_RECORDS] * 2
    assert values(response) == [b"a", b"b", b"c"]
    assert headers(response)[0].producer_id == 7


@run_by(with_record_format, record_format="kafka")
async def test_a_batch_that_cannot_become_records_is_refused_alone(broker: OneBroker, reader: Reader, /) -> None:
    whole = native(b"some value")
    damaged = whole[:-1] + b"?"
    nonsense = with_honest_crc(whole[:61] + b"\xff" * (len(whole) - 61))
    too_much = said_once(b"v" * 100_000, 600)

    await broker.told(*(state(1, index=index, isr=(1,), replicas=(1,)) for index in range(4)))
    peer = Peer(broker)
    parts = [
        ProducePartition(index, memoryview(records))
        for index, records in enumerate((damaged, nonsense, too_much, whole))
    ]
    await peer.send(apis.PRODUCE, ProduceRequest(None, -1, 1_000, [ProduceTopic(TOPIC, parts)]))
    [answer] = produce_answers(peer)
    codes = {part.index: part.error_code for part in answer.responses[0].partition_responses}
    assert codes == {
        0: ErrorCode.CORRUPT_MESSAGE,
        1: ErrorCode.INVALID_RECORD,
        2: ErrorCode.MESSAGE_TOO_LARGE,
        3: ErrorCode.NONE,
    }


@pytest.mark.parametrize("magic", [0, 1])
@run_by(with_reader)
async def test_old_record_formats_are_refused_with_the_error_code_of_kafka_4(
    broker: OneBroker, reader: Reader, /, magic: int
) -> None:
    message = bytes(8) + (22).to_bytes(4, "big") + bytes(4) + bytes([magic]) + bytes(17)

    response = await broker.produce(message)
    assert response.error_code == ErrorCode.INVALID_RECORD
    assert f"magic {magic}" in response.error_message


@run_by(with_reader)
async def test_transactions_stay_transactions_when_they_are_transcoded(broker: OneBroker, reader: Reader, /) -> None:
    sent = batch(3, timestamp=broker.world.clock.wall_ms(), producer_id=7, producer_epoch=2, transactional=True)
    await broker.produce(sent, question=WAIVED)
    await broker.end_transaction(7, epoch=3, committed=False, coordinator_epoch=4)
    request = FetchRequest(-1, 0, 1, 1 << 22, READ_COMMITTED, [FetchTopic(TOPIC, TOPIC_ID, [fetch_of(0)])])
    answers: list[FetchAnswer] = []
    broker.replicas.reader.fetch(request, answers.append)
    [(_, response)] = await reader.transcoder.transcode(answers[0], request)
    records, marker = headers(response)
    assert (records.magic, records.is_transactional, records.is_control) == (MAGIC_RECORDS, True, False)
    assert (records.producer_id, records.producer_epoch, records.base_sequence) == (7, 2, 0)
    assert (marker.magic, marker.is_transactional, marker.is_control) == (MAGIC_RECORDS, True, True)
    end = decode_control_batch(response.records, marker, records.size)
    assert end == EndTransactionMarker(ControlType.ABORT, 4)
    assert response.aborted_transactions == [AbortedTransaction(7, 0)]


@pytest.mark.parametrize("record_format", ["columns", "kafka"])
def test_a_log_of_either_format_keeps_transactions_and_markers(tmp_path: Path, record_format: str) -> None:
    async def scenario(broker: OneBroker, reader: Reader) -> None:
        await broker.told(state(1, isr=(1,), replicas=(1,)))
        config = broker.partition().log.config
        sent = batch(3, timestamp=broker.world.clock.wall_ms(), producer_id=7, transactional=True)
        if is_to_be_rewritten(sent, config):
            sent = bytes(await reader.transcoder.as_appended(sent, config))
        await broker.produce(sent, question=WAIVED)
        await broker.end_transaction(7)
        [kept] = broker.fetch(fetch_of(0)).result()
        magic = MAGIC_RECORDS if record_format == "kafka" else MAGIC_COLUMNS
        assert [header.magic for header in headers(kept)] == [magic, MAGIC_RECORDS]
        assert [header.is_transactional for header in headers(kept)] == [True, True]
        assert [header.is_control for header in headers(kept)] == [False, True]
        assert [header.producer_id for header in headers(kept)] == [7, 7]
        assert kept.last_stable_offset == 4

    with_record_format(tmp_path, record_format, scenario)
