"""What the broker keeps for a client: within a budget, and no longer than the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from minibroker.broker.handlers import services as administrative
from minibroker.broker.handlers.fetch import MOST_WAIT_MS, WAITING_FETCH_BYTES
from minibroker.broker.replication import transcoding
from minibroker.broker.replication.reading import FetchAnswer
from minibroker.broker.replication.transcoding import Transcoder
from minibroker.broker.scheduling.budget import FairBudget, Turns
from minibroker.protocol import apis
from minibroker.protocol.messages import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
    FetchRequest,
    FetchTopic,
)
from minibroker.protocol.records import encode_batch
from minibroker.protocol.records.compression import Compression, compress, most_output
from tests.replication_support import TOPIC, TOPIC_ID, OneBroker, fetch_of, state, with_one_broker
from tests.running import run_by
from tests.storage_support import NOW
from tests.unit.broker.handlers.test_handlers_produce_and_control import RECORDS, Peer, produce

T = TypeVar("T")
FOREVER_MS = 2**31 - 1


def endless_fetch(max_wait_ms: int = FOREVER_MS) -> FetchRequest:
    wanted = FetchTopic(TOPIC, TOPIC_ID, [fetch_of(0)])
    return FetchRequest(-1, max_wait_ms, 1 << 20, 1 << 20, 0, [wanted])


@run_by(with_one_broker)
async def test_a_waiting_fetch_is_dropped_with_its_connection(broker: OneBroker, /) -> None:
    peer, fetches = Peer(broker), broker.replicas.waits.fetches
    await broker.told(state())
    await peer.send(apis.FETCH, endless_fetch())
    await peer.send(apis.FETCH, endless_fetch())
    assert fetches.delayed() == 2
    assert peer.services.waiting_fetches.held > 0
    peer.session.end()
    assert (fetches.delayed(), peer.services.waiting_fetches.held) == (0, 0)
    assert peer.answers == [None, None]
    await peer.send(apis.FETCH, endless_fetch())  # sent before the client hung up
    assert (fetches.delayed(), peer.answers) == (0, [None, None, None])


@run_by(with_one_broker)
async def test_no_fetch_of_a_consumer_waits_longer_than_five_minutes(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state())
    await peer.send(apis.FETCH, endless_fetch())
    await asyncio.sleep(MOST_WAIT_MS / 1_000 - 1)
    assert peer.answers == []
    await asyncio.sleep(2)
    assert not peer.answer(apis.FETCH).responses[0].partitions[0].records
    assert peer.services.waiting_fetches.held == 0


@run_by(with_one_broker)
async def test_an_answered_fetch_leaves_nothing_behind_in_its_session(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    wanted = FetchTopic(TOPIC, TOPIC_ID, [fetch_of(0)])
    await peer.send(apis.FETCH, FetchRequest(-1, 1_000, 1, 1 << 20, 0, [wanted]))
    await peer.send(apis.PRODUCE, produce(0, acks=1))
    await asyncio.sleep(0.1)
    assert len(peer.answers) == 2
    peer.session.end()
    assert len(peer.answers) == 2
    assert peer.services.waiting_fetches.held == 0


@run_by(with_one_broker)
async def test_beyond_the_budget_the_connection_with_most_waiting_fetches_is_answered(broker: OneBroker, /) -> None:
    heavy, light = Peer(broker), Peer(broker)
    heavy.services.waiting_fetches = light.services.waiting_fetches = FairBudget(10 * WAITING_FETCH_BYTES)
    await broker.told(state())
    await light.send(apis.FETCH, endless_fetch())
    for _ in range(20):
        await heavy.send(apis.FETCH, endless_fetch())
    assert light.answers == []
    assert len(heavy.answers) >= 10
    await heavy.send(apis.PRODUCE, produce(0, acks=1, records=RECORDS))


# -- conversions --


class SlowThreads:
    """An executor whose calls take a second each."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.calls = 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1)
        self.running -= 1
        return function(*arguments)


def expanding(number: int) -> bytes:
    """A small batch that takes megabytes in a conversion."""
    return bytes(encode_batch([b"%d" % number] * 50_000, base_timestamp=NOW, compression=Compression.GZIP))


def transcoded(broker: OneBroker, transcoder: Transcoder, offset: int) -> asyncio.Task[FetchAnswer]:
    request = FetchRequest(-1, 0, 1, 1 << 22, 0, [FetchTopic(TOPIC, TOPIC_ID, [fetch_of(offset)])])
    answers: list[FetchAnswer] = []
    broker.replicas.reader.fetch(request, answers.append)
    return asyncio.create_task(transcoder.transcode(answers[0], request))


@run_by(with_one_broker)
async def test_conversions_take_turns_within_their_memory(broker: OneBroker, /) -> None:
    threads = SlowThreads()
    transcoder = Transcoder(broker.replicas, threads)
    transcoder._turns = Turns(8 << 20)  # one at a time
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    for number in range(4):
        await broker.produce(expanding(number), acks=1)
    fetches = [transcoded(broker, transcoder, 50_000 * number) for number in range(4)]
    answers = await asyncio.gather(*fetches)
    assert all(answer[0][1].records for answer in answers)
    assert threads.most == 1


@run_by(with_one_broker)
async def test_many_readers_of_one_batch_wait_for_one_conversion(broker: OneBroker, /) -> None:
    threads = SlowThreads()
    transcoder = Transcoder(broker.replicas, threads)
    transcoder._turns = Turns(8 << 20)
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    await broker.produce(expanding(0), acks=1)
    first = await transcoded(broker, transcoder, 0)
    alone, threads.calls = threads.calls, 0
    transcoder._cache.clear()
    answers = await asyncio.gather(*(transcoded(broker, transcoder, 0) for _ in range(10)))
    assert threads.calls == alone
    assert {bytes(answer[0][1].records) for answer in answers} == {bytes(first[0][1].records)}


@run_by(with_one_broker)
async def test_a_long_conversion_is_followed_by_a_rest(broker: OneBroker, /) -> None:
    transcoder = Transcoder(broker.replicas, SlowThreads())
    transcoder._turns = Turns(8 << 20)
    await broker.told(state(isr=(1,), replicas=(1, 2)))
    await broker.produce(expanding(0), acks=1)
    began_s = asyncio.get_running_loop().time()
    await transcoded(broker, transcoder, 0)
    first_s = asyncio.get_running_loop().time() - began_s
    await broker.produce(expanding(1), acks=1)
    await transcoded(broker, transcoder, 50_000)
    assert asyncio.get_running_loop().time() - began_s >= (2 + transcoding._REST) * first_s - 0.001


@run_by(with_one_broker)
async def test_a_cancelled_wait_for_a_turn_lets_the_next_one_in(broker: OneBroker, /) -> None:
    turns = Turns(10)
    assert await turns.take(100) == 10
    second, third = asyncio.create_task(turns.take(6)), asyncio.create_task(turns.take(4))
    await asyncio.sleep(0)
    second.cancel()
    turns.give_back(10)
    assert await third == 4
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await turns.take(6) == 6


@pytest.mark.parametrize("codec", list(Compression))
def test_the_bound_of_a_decompressed_size_holds_and_is_near(codec: Compression) -> None:
    for data in (b"x" * 1_000_000, bytes(range(256)) * 100, b""):
        bound = most_output(codec, compress(codec, data), 64 << 20)
        assert len(data) <= bound <= max(16_384, 4 * len(data) + (4 << 20))
    assert most_output(codec, compress(codec, bytes(100_000)), 50_000) == 50_000


@run_by(with_one_broker)
async def test_a_deletion_that_waits_for_a_replica_is_answered_within_five_minutes(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state(isr=(1, 2), replicas=(1, 2)))
    await peer.send(apis.PRODUCE, produce(0, acks=1))
    broker.fetch(fetch_of(3, epoch=0, last_epoch=0), replica=2)
    wanted = DeleteRecordsTopic(TOPIC, [DeleteRecordsPartition(0, 1)], TOPIC_ID)
    await peer.send(apis.DELETE_RECORDS, DeleteRecordsRequest([wanted], FOREVER_MS))
    waiting = broker.replicas.waits.deletions
    assert waiting.delayed() == 1, peer.answer(apis.DELETE_RECORDS)
    await asyncio.sleep(administrative.MOST_WAIT_MS / 1_000 + 1)
    assert waiting.delayed() == 0
