"""Transactions of confluent-kafka; `programs` describes the verbs and their output."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from tests.kafka_clients import settings
from tests.kafka_clients.records import PARTITIONS

WAIT_S = 30
ABORTED_OF = 4
"""Every such transaction is aborted, and its records are moved again."""

Tell = Callable[..., None]


def servers(bootstrap: str) -> dict[str, Any]:
    """The settings of all clients."""
    return {**settings.of_librdkafka(), "bootstrap.servers": bootstrap}


def new_producer(bootstrap: str, transactional_id: str, **settings: Any) -> Producer:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return Producer(
        {**servers(bootstrap), "transactional.id": transactional_id, "linger.ms": 0, "log_level": 2, **named}
    )


def transfer(bootstrap: str, arguments: dict[str, str], tell: Tell) -> None:
    source, topic, left = arguments["source"], arguments["topic"], int(arguments["until"])
    producer = new_producer(bootstrap, arguments["id"])
    again(producer.init_transactions)
    reader = Consumer(
        {
            **servers(bootstrap),
            "group.id": arguments["group"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    reader.subscribe([source])
    number = 0
    while left > 0:
        messages = [each for each in reader.consume(20, timeout=0.2) if each.error() is None]
        if not messages:
            continue
        number += 1
        next_offsets = {each.partition() or 0: (each.offset() or 0) + 1 for each in messages}
        try:
            producer.begin_transaction()
            for each in messages:
                headers: Any = each.headers()
                producer.produce(
                    topic,
                    key=each.key(),
                    value=each.value(),
                    partition=each.partition() or 0,
                    timestamp=each.timestamp()[1],
                    headers=headers,
                )
            positions = [TopicPartition(source, partition, offset) for partition, offset in next_offsets.items()]
            again(partial(producer.send_offsets_to_transaction, positions, reader.consumer_group_metadata(), WAIT_S))
            if number % ABORTED_OF == 0:
                producer.flush(WAIT_S)
                again(producer.abort_transaction)
                tell("aborted", len(messages))
                rewind(reader)
                continue
            again(producer.commit_transaction)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            tell("note", "aborts", error)
            again(producer.abort_transaction)
            rewind(reader)
        else:
            left -= len(messages)
            tell("moved", len(messages))
    reader.close()


def again(call: Callable[[], object]) -> None:
    """Call until it succeeds or fails with an error that is not retriable."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            call()
            return
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline_s:
                raise


def rewind(reader: Consumer) -> None:
    """Move the consumer back to its group's offsets. librdkafka returns NOT_COORDINATOR while a coordinator moves."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            committed = reader.committed(reader.assignment(), timeout=WAIT_S)
            break
        except KafkaException as error:
            if error.args[0].code() != KafkaError.NOT_COORDINATOR or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
    for each in committed:
        reader.seek(TopicPartition(each.topic, each.partition, max(0, each.offset)))


def fence(bootstrap: str, arguments: dict[str, str], tell: Tell) -> None:
    topic, transactional_id = arguments["topic"], arguments["id"]
    admin = AdminClient(servers(bootstrap))
    levels: Any = IsolationLevel
    producers: list[Producer] = []

    def step(name: str, body: Callable[[], None]) -> None:
        try:
            body()
            tell("ok", name)
        except Exception as error:  # noqa: BLE001 - any exception is a failure of the step
            tell("bad", name, repr(error))

    def end(level: Any) -> int:
        """The sum of the partitions' ends."""
        specs: Any = OffsetSpec
        asked = {TopicPartition(topic, partition): specs.latest() for partition in range(PARTITIONS)}
        found = admin.list_offsets(asked, isolation_level=level)
        return sum(each.result(WAIT_S).offset for each in found.values())

    def started(**settings: Any) -> Producer:
        producer = new_producer(bootstrap, transactional_id, **settings)
        again(producer.init_transactions)
        producers.append(producer)
        return producer

    def write(producer: Producer, value: str) -> None:
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            producer.produce(topic, value.encode(), partition=partition)
        assert producer.flush(WAIT_S) == 0

    def until(condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline_s, "not within 15 s"
            time.sleep(0.05)

    def settled() -> bool:
        return end(levels.READ_COMMITTED) == end(levels.READ_UNCOMMITTED)

    def commit() -> None:
        producer = started()
        write(producer, "committed")
        again(producer.commit_transaction)
        until(settled)
        write(producer, "committed too")
        again(producer.commit_transaction)
        until(settled)

    def abort() -> None:
        write(producers[0], "aborted")
        again(producers[0].abort_transaction)
        until(settled)

    def stay_open() -> None:
        before = end(levels.READ_UNCOMMITTED)
        write(producers[0], "open")
        assert end(levels.READ_COMMITTED) == before, "the last stable offset moved"
        assert end(levels.READ_UNCOMMITTED) == before + PARTITIONS

    def be_fenced() -> None:
        """The open transaction of the step before is aborted by the second producer."""
        started()
        until(settled)
        refused(producers[0].commit_transaction, KafkaError._FENCED)

    def time_out() -> None:
        producer = started(transaction_timeout_ms=1_000, message_timeout_ms=900)
        write(producer, "too late")
        until(settled)
        refused(producer.commit_transaction, None)

    def refused(call: Callable[[], object], code: int | None) -> None:
        try:
            again(call)
        except KafkaException as error:
            tell("note", error)
            found = error.args[0].code()
        else:
            raise AssertionError("it was committed")
        assert code in (None, found), found

    def go_on() -> None:
        producer = started()
        write(producer, "committed at last")
        again(producer.commit_transaction)
        until(settled)

    step("commit", commit)
    step("abort", abort)
    step("stay open", stay_open)
    step("be fenced", be_fenced)
    step("time out", time_out)
    step("go on", go_on)
