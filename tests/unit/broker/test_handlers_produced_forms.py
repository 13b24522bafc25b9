"""What a leader makes of producers' batches before it appends them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from minibroker.protocol import apis, znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ProducePartitionResponse
from minibroker.protocol.records import (
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    BatchHeader,
    encode_batch,
    iterate_batches,
    parse_header,
    validate_batch,
)
from minibroker.protocol.records.header import write_header
from tests.replication_support import TOPIC, OneBroker, fetch_of, state, with_one_broker
from tests.storage_support import NOW
from tests.unit.broker.test_handlers_produce_and_control import Peer, produce

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
    """All from there on, as the log has them."""
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
def test_negative_timestamps_are_taken_and_the_header_gets_the_largest_that_there_is(
    tmp_path: Path, magic: int, base: int, claimed: int, largest: int
) -> None:
    async def scenario(broker: OneBroker) -> None:
        sent = encode_batch([b"a", b"b"], base_timestamp=NOW, timestamp_deltas=[0, 5], magic=magic)
        answer = await answer_to(broker, with_times(sent, base, claimed))
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, 0)
        [(header, _)] = fetched(broker)
        assert (header.base_timestamp, header.max_timestamp) == (base, largest)

    with_topic(tmp_path, {}, scenario)
