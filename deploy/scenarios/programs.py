"""The clients of a scenario. The same programs run on virtual time and in real time: only their World differs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from minibroker.client.consumer import Consumer
from minibroker.client.errors import ProducerFenced
from minibroker.client.fetching.records import Record
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.processing.results import ProducerRecord
from minibroker.client.processor import Processor
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.deploy.scenarios.ledger import Ledger, Read, value_of
from minibroker.deploy.scenarios.model import Client
from minibroker.deploy.simulator.kafka_clients import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    VERSIONS,
    KafkaConsumer,
    KafkaProducer,
    ProtocolBroken,
    Unreachable,
    Versions,
)
from minibroker.deploy.trials.trial import Acknowledged
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from minibroker.protocol.world.real import RealWorld

_POLL_MS = 200
_PAUSE_AFTER_ERROR_S = 0.1
_COMMIT_EVERY_S = 0.5
_KAFKA_REQUEST_TIMEOUT_MS = 5_000
"""A paused leader answers nothing, and librdkafka's 30 s would be the length of each run."""


class Surroundings(NamedTuple):
    """Where a client runs."""

    bootstrap: str
    world: World | None
    """None: the real one."""
    partitions: int
    """Of the topic that the client produces, or else consumes."""


def now_s() -> float:
    return asyncio.get_running_loop().time()


def error_name(error: BaseException) -> str:
    """Return Kafka's name of an error, as NOT_ENOUGH_REPLICAS, or the name of its class."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, BrokerError):
            return found.code.name
        found = found.__cause__
    return type(error).__name__


async def run_client(client: Client, member: str, place: Surroundings, ledger: Ledger) -> None:
    """Run the program until the ledger ends it. An error that ends it is noted."""
    if client.produces is not None and client.consumes is None:
        ledger.writers.add(member)
    try:
        if client.dialect == "kafka":
            await _speak_kafka(client, place, ledger)
        elif client.produces is not None and client.consumes is not None:
            await _process(client, place, ledger)
        elif client.consumes is not None:
            await _consume(client, member, place, ledger)
        elif client.transactional_id is not None:
            await _produce_in_transactions(client, place, ledger)
        else:
            await _produce(client, place, ledger)
    except ProducerFenced:
        ledger.failed("ProducerFenced", 0)
    except MinibrokerError as error:
        if ledger.running:
            ledger.crashed.append(f"{member}: {type(error).__name__}: {error}")
    finally:
        ledger.writers.discard(member)


def _numbers(client: Client, ledger: Ledger) -> Iterator[int]:
    while True:
        number = ledger.sent[client.name]
        ledger.sent[client.name] += 1
        yield number


async def _produce(client: Client, place: Surroundings, ledger: Ledger) -> None:
    acks = {"all": "all", "1": 1, "0": 0}[client.acks]
    producer = Producer(
        place.bootstrap,
        acks=acks,  # type: ignore[arg-type]
        client_id=client.name,
        delivery_timeout_ms=client.delivery_timeout_s * 1_000,
        world=place.world,
    )
    async with producer:

        def send(topic: str, value: bytes, partition: int) -> Delivery:
            return producer.send(topic, value, partition=partition)

        await _send_all(client, place, ledger, send, producer.drain, lambda: False)


async def _speak_kafka(client: Client, place: Surroundings, ledger: Ledger) -> None:
    world = place.world or RealWorld()
    versions = world.random.choice(VERSIONS)
    if client.consumes is not None:
        await _consume_as_kafka_does(client, place, ledger, world, versions)
        return
    while ledger.producing:
        producer = KafkaProducer(
            place.bootstrap,
            acks=-1 if client.acks == "all" else 1,
            compression="none",
            linger_ms=0,
            delivery_timeout_ms=round(client.delivery_timeout_s * 1_000),
            request_timeout_ms=_KAFKA_REQUEST_TIMEOUT_MS,
            versions=versions,
            world=world,
        )

        try:
            async with producer:
                await _send_as_kafka_does(client, place, ledger, producer)
        except Unreachable:  # no broker has given it a producer id
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)


async def _send_as_kafka_does(client: Client, place: Surroundings, ledger: Ledger, producer: KafkaProducer) -> None:
    def send(topic: str, value: bytes, partition: int) -> Awaitable[HasOffset]:
        return producer.send(topic, value, partition=partition)

    async def drain() -> None:
        """Do nothing: this producer has no buffer that could be full."""

    await _send_all(client, place, ledger, send, drain, lambda: producer.failure is not None)


async def _consume_as_kafka_does(
    client: Client, place: Surroundings, ledger: Ledger, world: World, versions: Versions
) -> None:
    assert client.consumes is not None
    partitions = [TopicPartition(client.consumes, number) for number in range(place.partitions)]
    isolation_level = READ_COMMITTED if client.read_committed else READ_UNCOMMITTED
    while ledger.running:
        consumer = KafkaConsumer(
            place.bootstrap, partitions=partitions, versions=versions, world=world, isolation_level=isolation_level
        )
        async with consumer:
            try:
                while ledger.running:
                    for batch in await consumer.poll():
                        ledger.received[client.name].update(value or b"" for value in batch.values)
            except ProtocolBroken:
                raise
            except MinibrokerError as error:  # for example truncated after an unclean election: read all again
                ledger.errors[error_name(error)] += 1
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)


class HasOffset(Protocol):
    @property
    def offset(self) -> int: ...


async def _send_all(
    client: Client,
    place: Surroundings,
    ledger: Ledger,
    send: Callable[[str, bytes, int], Awaitable[HasOffset]],
    drain: Callable[[], Awaitable[None]],
    has_failed: Callable[[], bool],
) -> None:
    """Send at the client's rate until the ledger ends it, or the producer has failed, and collect the outcomes."""
    assert client.produces is not None
    topic, pause_s = client.produces, 1 / client.rate
    collecting: set[asyncio.Task[None]] = set()
    numbers = _numbers(client, ledger)

    async def collect(number: int, partition: int, delivery: Awaitable[HasOffset]) -> None:
        try:
            metadata = await delivery
        except MinibrokerError as error:
            ledger.failed(error_name(error), 1)
        else:
            acknowledged = Acknowledged(number, metadata.offset, now_s())
            ledger.acknowledged[client.name][TopicPartition(topic, partition)].append(acknowledged)

    next_s = now_s()
    while ledger.producing and not has_failed():
        number = next(numbers)
        partition = number % place.partitions
        delivery = send(topic, value_of(client.name, number), partition)
        task = asyncio.create_task(collect(number, partition, delivery))
        collecting.add(task)
        task.add_done_callback(collecting.discard)
        await drain()
        next_s = max(next_s + pause_s, now_s() - pause_s)
        await asyncio.sleep(next_s - now_s())
    await asyncio.gather(*collecting)


async def _produce_in_transactions(client: Client, place: Surroundings, ledger: Ledger) -> None:
    assert client.produces is not None
    topic, pause_s = client.produces, client.transaction_records / client.rate
    numbers = _numbers(client, ledger)
    producer = Producer(
        place.bootstrap, client_id=client.name, transactional_id=client.transactional_id, world=place.world
    )
    async with producer:
        while ledger.producing:
            chosen = [next(numbers) for _ in range(client.transaction_records)]
            try:
                async with producer.transaction():
                    sent = [
                        (
                            number,
                            producer.send(topic, value_of(client.name, number), partition=number % place.partitions),
                        )
                        for number in chosen
                    ]
            except ProducerFenced:
                raise
            except MinibrokerError as error:
                ledger.failed(error_name(error), len(chosen))
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
                continue
            at_s = now_s()
            for number, delivery in sent:
                metadata = await delivery
                partition = TopicPartition(topic, number % place.partitions)
                ledger.acknowledged[client.name][partition].append(Acknowledged(number, metadata.offset, at_s))
            await asyncio.sleep(pause_s)


class _Ownership(RebalanceListener):
    def __init__(self, ledger: Ledger, group: str, member: str) -> None:
        self._ledger = ledger
        self._group = group
        self._member = member

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self._ledger.took(self._group, self._member, partitions, now_s())

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self._ledger.gave_up(self._group, self._member, partitions, now_s())


async def _consume(client: Client, member: str, place: Surroundings, ledger: Ledger) -> None:
    assert client.consumes is not None
    group = client.group
    consumer = Consumer(
        place.bootstrap,
        topics=[client.consumes],
        group=group,
        listener=None if group is None else _Ownership(ledger, group, member),
        isolation_level="read_committed" if client.read_committed else "read_uncommitted",
        session_timeout_ms=round(client.session_timeout_s * 1_000),
        heartbeat_interval_ms=client.session_timeout_s * 1_000 / 6,
        client_id=member,
        world=place.world,
    )
    committed_s, is_dirty = now_s(), False
    async with consumer:
        while ledger.running:
            try:
                records = await consumer.poll(timeout_ms=_POLL_MS)
                ledger.received[group or client.name].update(record.value or b"" for record in records)
                is_dirty = is_dirty or bool(records)
                if group is not None and is_dirty and now_s() >= committed_s + _COMMIT_EVERY_S:
                    await consumer.commit()
                    committed_s, is_dirty = now_s(), False
            except MinibrokerError as error:
                ledger.errors[error_name(error)] += 1
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)


async def _process(client: Client, place: Surroundings, ledger: Ledger) -> None:
    assert client.consumes is not None
    assert client.produces is not None
    assert client.group is not None
    topic, prefix = client.produces, client.name.encode() + b">"

    def process(records: list[Record]) -> list[ProducerRecord]:
        ledger.received[client.group or ""].update(record.value or b"" for record in records)
        return [
            ProducerRecord(topic, prefix + (record.value or b""), partition=record.partition % place.partitions)
            for record in records
        ]

    processor = Processor(
        place.bootstrap,
        topics=[client.consumes],
        group=client.group,
        transactional_id=client.transactional_id,
        process=process,
        client_id=client.name,
        commit_interval_ms=_COMMIT_EVERY_S * 1_000,
        consumer_settings={"session_timeout_ms": round(client.session_timeout_s * 1_000)},
        world=place.world,
    )
    async with processor:
        running = asyncio.create_task(processor.run())
        while ledger.running and not running.done():
            await asyncio.wait([running], timeout=_POLL_MS / 1_000)
        if not running.done():
            processor.stop()
        await running


async def read_all(
    bootstrap: str, world: World | None, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, list[Read]]:
    """Read every committed record with a new consumer."""
    read: dict[TopicPartition, list[Read]] = {partition: [] for partition in partitions}
    consumer = Consumer(bootstrap, partitions=partitions, isolation_level="read_committed", world=world)
    async with consumer:
        ends = await consumer.end_offsets(partitions)
        begins = await consumer.beginning_offsets(partitions)
        unread = {partition for partition in partitions if ends[partition] > begins[partition]}
        while unread:
            for record in await consumer.poll(timeout_ms=_POLL_MS):
                read[TopicPartition(record.topic, record.partition)].append(Read(record.offset, record.value or b""))
            for partition in list(unread):
                if await consumer.position(partition) >= ends[partition]:
                    unread.discard(partition)
    return read
