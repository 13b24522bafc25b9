"""The batches that a leader appends, made from producers' batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from minibroker.protocol import apis, znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ProducePartitionResponse
from minibroker.protocol.records import (
    HEADER_SIZE,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    BatchHeader,
    decode_batch,
    encode_batch,
    iterate_batches,
    parse_header,
    validate_batch,
)
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import write_header
from tests.replication_support import TOPIC, OneBroker, fetch_of, state, with_one_broker
from tests.running import run_by
from tests.storage_support import NOW
from tests.unit.broker.handlers.test_handlers_produce_and_control import Peer, produce

every_magic = pytest.mark.parametrize("magic", [MAGIC_RECORDS, MAGIC_COLUMNS])


def with_topic(tmp_path: Path, configs: Mapping[str, str], scenario: Callable[[OneBroker], Awaitable[None]]) -> None:
    async def run(broker: OneBroker) -> None:
        broker.zookeeper.make(znodes.topic_config_path(TOPIC), znodes.encode_config(configs))
        await broker.told(state(1, isr=(1,), replicas=(1,)))
        await scenario(broker)

    with_one_broker(tmp_path, run)


async def answer_to(broker: OneBroker, records: bytes | bytearray) -> ProducePartitionResponse:
    peer = Peer(broker)
    await peer.send(apis.PRODUCE, produce(0, records=records))
    [frame] = peer.answers
    assert frame is not None
    response = apis.decode_response(apis.PRODUCE, apis.decode_response_envelope(frame[4:]))
    return response.responses[0].partition_responses[0]


def fetched(broker: OneBroker, offset: int = 0) -> list[tuple[BatchHeader, bytes]]:
    """Return all batches from `offset` on, as the log has them."""
    [response] = broker.fetch(fetch_of(offset)).result()
    found = []
    for header, start, end in iterate_batches(response.records):
        validate_batch(response.records, header, start)
        found.append((header, bytes(response.records[start:end])))
    return found


def with_times(content: bytes | bytearray, base_timestamp: int, max_timestamp: int) -> bytes:
    header = msgspec.structs.replace(parse_header(content), base_timestamp=base_timestamp, max_timestamp=max_timestamp)
    return bytes(write_header(bytearray(content), header))


# -- the largest timestamp --


@every_magic
@pytest.mark.parametrize(
    ("base", "claimed", "largest"),
    [
        (-1, -1, 4),
        (-1, 0, 4),
        (-5, -5, 0),
        (-1_000, -1_000, -1),
        (-1_000, NOW, -1),
        (NOW, -1, NOW + 5),
        (NOW, NOW + 5, NOW + 5),
        (0, 0, 0),
    ],
)
@run_by(with_topic, configs={})
async def test_negative_timestamps_are_accepted_and_the_header_gets_the_largest(
    broker: OneBroker, /, magic: int, base: int, claimed: int, largest: int
) -> None:
    sent = encode_batch([b"a", b"b"], base_timestamp=NOW, timestamp_deltas=[0, 5], magic=magic)
    answer = await answer_to(broker, with_times(sent, base, claimed))
    assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, 0)
    [(header, _)] = fetched(broker)
    assert (header.base_timestamp, header.max_timestamp) == (base, largest)


# -- compression.type --

LARGE = [b"%d of many " % number * 40 for number in range(300)]
CODECS = {
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}


@every_magic
@pytest.mark.parametrize("values", [[b"x"], LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", CODECS)
def test_a_batch_gets_the_codec_of_its_topic_and_a_repetition_is_still_known(
    tmp_path: Path, name: str, values: list[bytes], magic: int
) -> None:
    async def scenario(broker: OneBroker) -> None:
        for number, sent in enumerate(Compression):
            records = encode_batch(
                values,
                base_timestamp=NOW,
                compression=sent,
                producer_id=7,
                producer_epoch=0,
                base_sequence=number * len(values),
                magic=magic,
            )
            for _ in range(2):
                answer = await answer_to(broker, records)
                assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, number * len(values))
        found = fetched(broker)
        assert [header.compression for header, _ in found] == [CODECS[name]] * len(Compression)
        for header, batch in found:
            assert (header.magic, header.producer_id, header.max_timestamp) == (magic, 7, NOW)
            assert decode_batch(batch, header).values == values

    with_topic(tmp_path, {"compression.type": name}, scenario)


@run_by(with_topic, configs={"compression.type": "gzip", "record.format": "kafka"})
async def test_columns_that_become_records_also_get_the_codec_of_their_topic(broker: OneBroker, /) -> None:
    for sent in (Compression.NONE, Compression.ZSTD):
        assert not (await answer_to(broker, encode_batch([b"x"], base_timestamp=NOW, compression=sent))).error_code
    assert [(h.magic, h.compression) for h, _ in fetched(broker)] == [(MAGIC_RECORDS, Compression.GZIP)] * 2


@run_by(with_topic, configs={"compression.type": "uncompressed", "max.message.bytes": "1000"})
async def test_a_batch_is_measured_before_and_after_it_is_compressed_anew(broker: OneBroker, /) -> None:
    zeros = encode_batch([bytes(3_000)], base_timestamp=NOW, compression=Compression.GZIP)
    assert len(zeros) < 1_000
    assert (await answer_to(broker, zeros)).error_code == ErrorCode.MESSAGE_TOO_LARGE
    assert (await answer_to(broker, encode_batch([bytes(3_000)], base_timestamp=NOW))).error_code == (
        ErrorCode.MESSAGE_TOO_LARGE
    )
    assert fetched(broker) == []


@every_magic
@run_by(with_topic, configs={"compression.type": "zstd"})
async def test_an_undecompressable_batch_is_refused_and_a_damaged_one_is_reported(
    broker: OneBroker, /, magic: int
) -> None:
    whole = encode_batch([b"x" * 100], base_timestamp=NOW, compression=Compression.GZIP, magic=magic)
    nonsense = with_times(whole[:HEADER_SIZE] + b"?" * 9 + whole[HEADER_SIZE + 9 :], NOW, NOW)
    assert (await answer_to(broker, nonsense)).error_code == ErrorCode.INVALID_RECORD
    assert (await answer_to(broker, whole[:-9] + b"?" * 9)).error_code == ErrorCode.CORRUPT_MESSAGE
    assert (await answer_to(broker, whole)).base_offset == 0


@every_magic
@pytest.mark.parametrize("codec", [Compression.NONE, Compression.GZIP, Compression.LZ4, Compression.ZSTD])
@run_by(with_topic, configs={})
async def test_a_body_that_does_not_begin_as_its_header_says_is_refused(
    broker: OneBroker, /, magic: int, codec: Compression
) -> None:
    whole = encode_batch([b"x" * 100] * 2, base_timestamp=NOW, compression=codec, magic=magic)
    nonsense = with_times(whole[:HEADER_SIZE] + b"?" * 9 + whole[HEADER_SIZE + 9 :], NOW, NOW)
    refused = await answer_to(broker, nonsense)
    assert refused.error_code == ErrorCode.INVALID_RECORD
    assert "no consumer could read it" in (refused.error_message or "")
    assert (await answer_to(broker, whole)).base_offset == 0


@pytest.mark.parametrize("count", [1, 2])
@run_by(with_topic, configs={})
async def test_a_first_record_that_does_not_end_within_the_body_is_refused(broker: OneBroker, /, count: int) -> None:
    whole = encode_batch([b"x" * 20] * count, base_timestamp=NOW, magic=MAGIC_RECORDS)
    for length in (0, 1, 2, 126, 127) if count == 2 else (0, 2, whole[HEADER_SIZE] - 2, whole[HEADER_SIZE] + 2):
        lie = bytearray(whole)
        lie[HEADER_SIZE] = length
        code = (await answer_to(broker, with_times(lie, NOW, NOW))).error_code
        plausible = count == 2 and 0 < length < 64 and length % 2 == 0
        assert code == (ErrorCode.NONE if plausible else ErrorCode.INVALID_RECORD), length
    assert (await answer_to(broker, whole)).error_code == ErrorCode.NONE


def test_a_level_sets_how_hard_the_leader_compresses(tmp_path: Path) -> None:
    words = [b"%d" % (number * 7919 % 10_007) for number in range(3_000)]

    async def size(broker: OneBroker) -> int:
        await answer_to(broker, encode_batch(words, base_timestamp=NOW))
        return fetched(broker)[0][0].size

    async def fast(broker: OneBroker) -> None:
        sizes.append(await size(broker))

    sizes: list[int] = []
    for level in ("1", "9"):
        with_topic(tmp_path / level, {"compression.type": "gzip", "compression.gzip.level": level}, fast)
    assert sizes[0] > sizes[1]


# -- message.timestamp.type --


@every_magic
@pytest.mark.parametrize("compression", ["producer", "zstd"])
def test_log_append_time_stamps_all_records_and_is_returned_to_the_producer(
    tmp_path: Path, magic: int, compression: str
) -> None:
    async def scenario(broker: OneBroker) -> None:
        sent = encode_batch(
            [b"a", b"b"],
            timestamps=[-1, 5],
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            magic=magic,
        )
        before_ms = broker.world.clock.wall_ms()
        answers = [await answer_to(broker, sent)]
        await asyncio.sleep(10)
        answers.append(await answer_to(broker, sent))
        assert [(one.error_code, one.base_offset) for one in answers] == [(ErrorCode.NONE, 0)] * 2
        [(header, batch)] = fetched(broker)
        assert header.is_log_append_time
        assert before_ms <= header.max_timestamp < before_ms + 10_000
        assert [one.log_append_time_ms for one in answers] == [header.max_timestamp] * 2
        assert decode_batch(batch, header).timestamps == [header.max_timestamp] * 2

    with_topic(tmp_path, {"message.timestamp.type": "LogAppendTime", "compression.type": compression}, scenario)


# -- message.timestamp.before.max.ms and after --

HOUR_MS = 3_600_000


@every_magic
@pytest.mark.parametrize(
    ("configs", "offsets_ms", "is_taken"),
    [
        ({"message.timestamp.before.max.ms": "1000"}, [0, -900], True),
        ({"message.timestamp.before.max.ms": "1000"}, [0, -HOUR_MS], False),
        ({"message.timestamp.before.max.ms": "1000"}, [0, HOUR_MS], True),
        ({"message.timestamp.after.max.ms": "1000"}, [0, HOUR_MS], False),
        ({"message.timestamp.after.max.ms": "1000"}, [0, -HOUR_MS], True),
        ({"message.timestamp.difference.max.ms": "1000"}, [0, -HOUR_MS], False),
        ({"message.timestamp.difference.max.ms": "1000"}, [0, HOUR_MS], False),
        (
            {"message.timestamp.difference.max.ms": "1000", "message.timestamp.before.max.ms": "7200000"},
            [-HOUR_MS],
            True,
        ),
        ({"message.timestamp.difference.max.ms": "1000"}, [None], True),
        ({"message.timestamp.difference.max.ms": "1000", "message.timestamp.type": "LogAppendTime"}, [HOUR_MS], True),
    ],
)
@run_by(with_topic)
async def test_a_record_whose_time_is_too_far_from_the_leaders_clock_is_refused(
    broker: OneBroker, /, configs: dict[str, str], offsets_ms: list[int | None], is_taken: bool, magic: int
) -> None:
    now_ms = broker.world.clock.wall_ms()
    timestamps = [-1 if offset_ms is None else now_ms + offset_ms for offset_ms in offsets_ms]
    answer = await answer_to(broker, encode_batch([b"x"] * len(timestamps), timestamps=timestamps, magic=magic))
    assert answer.error_code == (ErrorCode.NONE if is_taken else ErrorCode.INVALID_TIMESTAMP)
    assert ("the broker's clock" in answer.error_message) is not is_taken
