"""Planted bugs of Kafka's protocol: answers, records and producers of its clients."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from minibroker.broker.handlers import fetch
from minibroker.broker.network.handler_pool import RequestHandlerPool
from minibroker.broker.network.kafka_dialect import KafkaDialect
from minibroker.broker.network.ordered_answers import OrderedAnswers
from minibroker.broker.network.processor import ServerConnection
from minibroker.broker.replication import transcoding
from minibroker.broker.replication.following.fetcher import ReplicaFetcher
from minibroker.broker.storage.producer_state import ProducerState
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.kafka.primitives import FrameWriter
from minibroker.protocol.messages import ProduceRequest
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, NO_PRODUCER_ID, NO_SEQUENCE
from tests.simulation.mutants.planting import Patches, mutant


@mutant("responses out of order", "answers leave when they are ready, not in the order of the requests")
def answers_leave_as_they_come(patches: Patches) -> None:
    @patches.instead_of(OrderedAnswers, "answered")
    def answered(original: Any, self: Any, place: int, answer: Any, size: int) -> list[Any]:
        self._next_answer += 1
        return [answer]


@mutant("a read of the past", "a request behind a batch is answered before the batch is replicated")
def nothing_waits_for_a_batch(patches: Patches) -> None:
    @patches.instead_of(ServerConnection, "_waits_for_answers")
    def _waits_for_answers(original: Any, self: Any) -> bool:
        return False


@mutant("records elsewhere", "the large records of an answer leave after all small parts")
def large_records_leave_last(patches: Patches) -> None:
    @patches.instead_of(FrameWriter, "pieces")
    def pieces(original: Any, self: Any) -> list[Any]:
        found = original(self)
        return [*found[::2], *found[1::2]]


@mutant("a needless wait", "a large answer never holds the data that its consumer waits for")
def much_is_answered_in_parts(patches: Patches) -> None:
    @patches.instead_of(fetch, "most_bytes")
    def most_bytes(original: Any, min_bytes: int, usual: int) -> Any:
        return original(0, usual)


@mutant("acknowledged too early", "acks=all of Kafka's clients waits only for the leader")
def acks_of_kafkas_clients_are_one(patches: Patches) -> None:
    @patches.instead_of(KafkaDialect, "decode")
    def decode(original: Any, self: Any, frame: Any) -> Any:
        api, header, body = original(self, frame)
        if isinstance(body, ProduceRequest) and body.acks == -1:
            body.acks = 1
        return api, header, body


@mutant("KAFKA-5494", "a batch that one of Kafka's clients repeats is appended again")
def records_are_never_repeated(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "check")
    def check(original: Any, self: Any, header: Any) -> Any:
        try:
            found = original(self, header)
        except BrokerError:
            if header.magic == MAGIC_RECORDS:
                return None
            raise
        return None if header.magic == MAGIC_RECORDS else found


@mutant("idempotence lost in conversion", "records that are converted for the log lose their producer")
def converted_records_forget_their_producer(patches: Patches) -> None:
    @patches.instead_of(transcoding.Transcoder, "_appendable")
    async def _appendable(original: Any, self: Any, batch: Any, header: Any, config: Any) -> Any:
        stranger = msgspec.structs.replace(
            header, producer_id=NO_PRODUCER_ID, producer_epoch=-1, base_sequence=NO_SEQUENCE
        )
        return await original(self, batch, stranger, config)


@mutant("offsets that move", "a batch that is read from its middle reports that position as its base offset")
def batches_begin_where_they_are_read(patches: Patches) -> None:
    @patches.instead_of(transcoding.Transcoder, "_records")
    async def _records(original: Any, self: Any, batch: Any, header: Any, offset: int, turn: Any = None) -> Any:
        if header.base_offset < offset <= header.last_offset:
            header = msgspec.structs.replace(header, base_offset=offset)
        return await original(self, batch, header, offset, turn)


@mutant("a cache's key too short", "transcoded batches are cached by their offset alone, without the partition")
def cache_knows_offsets_alone(patches: Patches) -> None:
    key = transcoding._Key

    def short(topic_partition: Any, topic_id: str, base_offset: int, epoch: int, crc: int, codec: Any) -> Any:
        return key(TopicPartition("any", 0), "", base_offset, 0, 0, codec)

    patches.set(transcoding, "_Key", short)


@mutant("a batch overtaken", "the next request of a connection does not wait for the remainder of the one before it")
def rests_are_overtaken(patches: Patches) -> None:
    @patches.instead_of(RequestHandlerPool, "_finish")
    async def _finish(original: Any, self: Any, request: Any, rest: Any) -> None:
        self._handled(request, False, self._clock(), wake=True)
        await self._attempt(request, lambda _: rest)


@mutant(
    "a suspicion for ever",
    "a broker that cannot reach a leader hides it from Kafka's clients for as long as that lasts",
)
def lost_leaders_stay_lost(patches: Patches) -> None:
    @patches.instead_of(ReplicaFetcher, "lost_until_s")
    def lost_until_s(original: Any, self: Any) -> float:
        return -math.inf if self._broke_s is None else math.inf


@mutant(
    "a cluster without brokers",
    "a broker that has just started names no brokers to Kafka's clients, which then drop them all",
)
def nothing_is_known_at_the_start(patches: Patches) -> None:
    patches.set(KafkaDialect, "drops_unnamed_brokers", False)
