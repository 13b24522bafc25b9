"""One interface for three Kafka clients: confluent-kafka (librdkafka), aiokafka, kafka-python.

It writes records to given partitions and reads partitions from an offset, so that one test covers each client.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import confluent_kafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition

with warnings.catch_warnings():  # its schemas use a function deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka as kafka_python

PATIENCE_S = 60


class Record(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = 1_700_000_000_000


class Read(NamedTuple):
    offset: int
    record: Record


class Client(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that the installed client can write and read."""
        ...

    def write(self, bootstrap: str, topic: str, records: Iterable[Record], codec: str = "none") -> list[int]:
        """Write idempotently with acks=all; return the offsets. Raises if a record fails."""
        ...

    def read(
        self, bootstrap: str, topic: str, offsets: dict[int, int], count: int, *, committed: bool = False
    ) -> list[Read]:
        """Read `count` records, from the given offset of each partition on, in the client's order. If `committed`, the
        records of open and aborted transactions are left out."""
        ...

    def offsets(self, bootstrap: str, topic: str, partition: int, timestamp_ms: int) -> tuple[int, int, int | None]:
        """The beginning and the end of the partition, and the offset of the first record at or after the time."""
        ...


class Confluent:
    name = "confluent-kafka"
    codecs = ("none", "gzip", "snappy", "lz4", "zstd")

    def producer(self, bootstrap: str, codec: str = "none", **settings: Any) -> confluent_kafka.Producer:
        return confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": codec,
                "log.connection.close": False,
                "log_level": 2,
                **settings,
            }
        )

    def consumer(self, bootstrap: str, *, committed: bool = False) -> confluent_kafka.Consumer:
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "isolation.level": _level(committed),
                "group.id": "not-a-member",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "log_level": 2,
            }
        )

    def write(self, bootstrap: str, topic: str, records: Iterable[Record], codec: str = "none") -> list[int]:
        producer = self.producer(bootstrap, codec)
        offsets: dict[int, int] = {}
        problems: list[Any] = []

        def delivered(number: int) -> Any:
            def note(error: Any, message: Any) -> None:
                if error is not None:
                    problems.append(error)
                else:
                    offsets[number] = message.offset()

            return note

        for number, record in enumerate(records):
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                partition=record.partition,
                headers=list(record.headers),
                timestamp=record.timestamp_ms,
                on_delivery=delivered(number),
            )
            producer.poll(0)
        left = producer.flush(PATIENCE_S)
        assert (left, problems) == (0, [])
        return [offsets[number] for number in sorted(offsets)]

    def read(
        self, bootstrap: str, topic: str, offsets: dict[int, int], count: int, *, committed: bool = False
    ) -> list[Read]:
        consumer = self.consumer(bootstrap, committed=committed)
        consumer.assign([confluent_kafka.TopicPartition(topic, *each) for each in offsets.items()])
        read: list[Read] = []
        deadline_s = time.monotonic() + PATIENCE_S
        try:
            while len(read) < count and time.monotonic() < deadline_s:
                for message in consumer.consume(1_000, 0.5):
                    error = message.error()
                    assert error is None or error.retriable(), str(error)
                    if error is None:
                        told: Any = message.headers()
                        headers = tuple(told or ())
                        record = Record(
                            message.partition() or 0, message.key(), message.value(), headers, message.timestamp()[1]
                        )
                        read.append(Read(message.offset() or 0, record))
        finally:
            consumer.close()
        return read

    def offsets(self, bootstrap: str, topic: str, partition: int, timestamp_ms: int) -> tuple[int, int, int | None]:
        consumer = self.consumer(bootstrap)
        try:
            asked = confluent_kafka.TopicPartition(topic, partition, timestamp_ms)
            [found] = consumer.offsets_for_times([asked], timeout=PATIENCE_S)
            begin, end = consumer.get_watermark_offsets(asked, timeout=PATIENCE_S)
            return begin, end, None if found.offset < 0 else found.offset
        finally:
            consumer.close()


class Aiokafka:
    name = "aiokafka"
    codecs = ("none", "gzip", "snappy", "lz4", "zstd")

    def write(self, bootstrap: str, topic: str, records: Iterable[Record], codec: str = "none") -> list[int]:
        async def write() -> list[int]:
            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                enable_idempotence=True,
                compression_type=None if codec == "none" else codec,
            )
            await producer.start()
            try:
                futures = [
                    await producer.send(
                        topic,
                        value=record.value,
                        key=record.key,
                        partition=record.partition,
                        headers=list(record.headers),
                        timestamp_ms=record.timestamp_ms,
                    )
                    for record in records
                ]
                return [metadata.offset for metadata in await asyncio.gather(*futures)]
            finally:
                await producer.stop()

        return asyncio.run(write())

    def read(
        self, bootstrap: str, topic: str, offsets: dict[int, int], count: int, *, committed: bool = False
    ) -> list[Read]:
        async def read() -> list[Read]:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap,
                group_id=None,
                auto_offset_reset="none",
                isolation_level=_level(committed),
            )
            await consumer.start()
            try:
                consumer.assign([AioTopicPartition(topic, partition) for partition in offsets])
                for partition, offset in offsets.items():
                    consumer.seek(AioTopicPartition(topic, partition), offset)
                found: list[Read] = []
                deadline_s = time.monotonic() + PATIENCE_S
                while len(found) < count and time.monotonic() < deadline_s:
                    for records in (await consumer.getmany(timeout_ms=500)).values():
                        found += [_of_python(record) for record in records]
                return found
            finally:
                await consumer.stop()

        return asyncio.run(read())

    def offsets(self, bootstrap: str, topic: str, partition: int, timestamp_ms: int) -> tuple[int, int, int | None]:
        async def ask() -> tuple[int, int, int | None]:
            consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
            await consumer.start()
            try:
                asked = AioTopicPartition(topic, partition)
                found = (await consumer.offsets_for_times({asked: timestamp_ms}))[asked]
                begin = (await consumer.beginning_offsets([asked]))[asked]
                end = (await consumer.end_offsets([asked]))[asked]
                return begin, end, None if found is None else found.offset
            finally:
                await consumer.stop()

        return asyncio.run(ask())


class KafkaPython:
    name = "kafka-python"
    codecs = ("none", "gzip")
    """The other codecs need packages that are not installed here."""

    def write(self, bootstrap: str, topic: str, records: Iterable[Record], codec: str = "none") -> list[int]:
        producer = kafka_python.KafkaProducer(
            bootstrap_servers=bootstrap,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
        )
        try:
            futures = [
                producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    partition=record.partition,
                    headers=list(record.headers),
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            return [future.get(PATIENCE_S).offset for future in futures]
        finally:
            producer.close(timeout=5)

    def consumer(self, bootstrap: str, *, committed: bool = False) -> Any:
        return kafka_python.KafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=None,
            auto_offset_reset="earliest",
            isolation_level=_level(committed),
        )

    def read(
        self, bootstrap: str, topic: str, offsets: dict[int, int], count: int, *, committed: bool = False
    ) -> list[Read]:
        consumer = self.consumer(bootstrap, committed=committed)
        try:
            consumer.assign([kafka_python.TopicPartition(topic, partition) for partition in offsets])
            for partition, offset in offsets.items():
                consumer.seek(kafka_python.TopicPartition(topic, partition), offset)
            found: list[Read] = []
            deadline_s = time.monotonic() + PATIENCE_S
            while len(found) < count and time.monotonic() < deadline_s:
                for records in consumer.poll(timeout_ms=500).values():
                    found += [_of_python(record) for record in records]
            return found
        finally:
            consumer.close()

    def offsets(self, bootstrap: str, topic: str, partition: int, timestamp_ms: int) -> tuple[int, int, int | None]:
        consumer = self.consumer(bootstrap)
        try:
            asked = kafka_python.TopicPartition(topic, partition)
            found = consumer.offsets_for_times({asked: timestamp_ms})[asked]
            begin, end = consumer.beginning_offsets([asked])[asked], consumer.end_offsets([asked])[asked]
            return begin, end, None if found is None else found.offset
        finally:
            consumer.close()


def _level(committed: bool) -> str:
    return "read_committed" if committed else "read_uncommitted"


def _of_python(record: Any) -> Read:
    headers: Sequence[tuple[str, bytes]] = record.headers
    return Read(record.offset, Record(record.partition, record.key, record.value, tuple(headers), record.timestamp))


CLIENTS: tuple[Client, ...] = (Confluent(), Aiokafka(), KafkaPython())
