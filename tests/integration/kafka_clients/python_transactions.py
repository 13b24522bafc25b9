"""One interface for the transactions of confluent-kafka, aiokafka and kafka-python."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import confluent_kafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition

from tests.integration.kafka_clients.python_kafka_clients import PATIENCE_S

with warnings.catch_warnings():  # its schemas use a function deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka as kafka_python


class Transactor(Protocol):
    """A transactional producer that is initialised, with a consumer of its own group."""

    name: str

    def begin(self) -> None: ...
    def write(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        """Write the records and wait until they are acknowledged."""
        ...

    def take(self, topic: str, count: int) -> list[bytes]:
        """Read the next `count` values of partition 0 as the group, from its committed offset on."""
        ...

    def send_offset(self, topic: str, offset: int) -> None:
        """Add the group's offset for partition 0 to the transaction."""
        ...

    def commit(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[..., Transactor]
"""Called with the bootstrap list, the transactional id, the group and the transaction timeout in ms."""


class ConfluentTransactor:
    name = "confluent-kafka"

    def __init__(self, bootstrap: str, transactional_id: str, group: str, timeout_ms: int = 60_000) -> None:
        own: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 0}
        self._producer = confluent_kafka.Producer(
            {
                **own,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": timeout_ms,
                "message.timeout.ms": timeout_ms,
            }
        )
        self._producer.init_transactions(PATIENCE_S)
        self._consumer = confluent_kafka.Consumer(
            {**own, "group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
        )

    def begin(self) -> None:
        self._producer.begin_transaction()

    def write(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        for value in values:
            self._producer.produce(topic, value, partition=partition)
        assert self._producer.flush(PATIENCE_S) == 0

    def take(self, topic: str, count: int) -> list[bytes]:
        asked = confluent_kafka.TopicPartition(topic, 0)
        [committed] = self._consumer.committed([asked], PATIENCE_S)
        self._consumer.assign([confluent_kafka.TopicPartition(topic, 0, max(0, committed.offset))])
        return [message.value() or b"" for message in self._consumer.consume(count, PATIENCE_S)]

    def send_offset(self, topic: str, offset: int) -> None:
        self._producer.send_offsets_to_transaction(
            [confluent_kafka.TopicPartition(topic, 0, offset)], self._consumer.consumer_group_metadata(), PATIENCE_S
        )

    def commit(self) -> None:
        self._producer.commit_transaction(PATIENCE_S)

    def abort(self) -> None:
        self._producer.abort_transaction(PATIENCE_S)

    def close(self) -> None:
        self._consumer.close()


class AiokafkaTransactor:
    """aiokafka, whose tasks run while a method runs."""

    name = "aiokafka"

    def __init__(self, bootstrap: str, transactional_id: str, group: str, timeout_ms: int = 60_000) -> None:
        self._runner = asyncio.Runner()
        self._group = group

        async def start() -> None:
            self._producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
            )
            self._consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap,
                group_id=group,
                enable_auto_commit=False,
                isolation_level="read_committed",
            )
            await self._producer.start()
            await self._consumer.start()

        self._runner.run(start())

    def begin(self) -> None:
        self._runner.run(self._producer.begin_transaction())

    def write(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        async def write() -> None:
            await asyncio.gather(*[await self._producer.send(topic, value, partition=partition) for value in values])

        self._runner.run(write())

    def take(self, topic: str, count: int) -> list[bytes]:
        async def take() -> list[bytes]:
            partition = AioTopicPartition(topic, 0)
            self._consumer.assign([partition])
            self._consumer.seek(partition, await self._consumer.committed(partition) or 0)
            return [(await self._consumer.getone()).value for _ in range(count)]

        return self._runner.run(take())

    def send_offset(self, topic: str, offset: int) -> None:
        positions = {AioTopicPartition(topic, 0): offset}
        self._runner.run(self._producer.send_offsets_to_transaction(positions, self._group))

    def commit(self) -> None:
        self._runner.run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._runner.run(self._producer.abort_transaction())

    def close(self) -> None:
        async def stop() -> None:
            await self._consumer.stop()
            await self._producer.stop()

        self._runner.run(stop())
        self._runner.close()


class KafkaPythonTransactor:
    name = "kafka-python"

    def __init__(self, bootstrap: str, transactional_id: str, group: str, timeout_ms: int = 60_000) -> None:
        self._producer = kafka_python.KafkaProducer(
            bootstrap_servers=bootstrap, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
        )
        self._producer.init_transactions()
        self._consumer = kafka_python.KafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            isolation_level="read_committed",
        )

    def begin(self) -> None:
        self._producer.begin_transaction()

    def write(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        for future in [self._producer.send(topic, value, partition=partition) for value in values]:
            future.get(PATIENCE_S)

    def take(self, topic: str, count: int) -> list[bytes]:
        partition = kafka_python.TopicPartition(topic, 0)
        self._consumer.assign([partition])
        self._consumer.seek(partition, self._consumer.committed(partition) or 0)
        found: list[bytes] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < deadline_s:
            for records in self._consumer.poll(timeout_ms=500, max_records=count - len(found)).values():
                found += [record.value for record in records]
        return found

    def send_offset(self, topic: str, offset: int) -> None:
        positions = {kafka_python.TopicPartition(topic, 0): kafka_python.OffsetAndMetadata(offset, "", -1)}
        self._producer.send_offsets_to_transaction(positions, self._consumer.group_metadata())

    def commit(self) -> None:
        self._producer.commit_transaction()

    def abort(self) -> None:
        self._producer.abort_transaction()

    def close(self) -> None:
        self._consumer.close()
        self._producer.close(timeout=5)


TRANSACTORS: tuple[Start, ...] = (ConfluentTransactor, AiokafkaTransactor, KafkaPythonTransactor)
