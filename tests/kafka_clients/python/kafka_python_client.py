"""kafka-python with the verbs of `programs`."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():  # its schemas use a function deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import (
        ConsumerRebalanceListener,
        KafkaAdminClient,
        KafkaConsumer,
        KafkaProducer,
        OffsetAndMetadata,
        TopicPartition,
    )
    from kafka.admin import ConfigResource, ConfigResourceType, NewPartitions, NewTopic
    from kafka.errors import InvalidReplicationFactorError, KafkaError, TopicAlreadyExistsError

from tests.kafka_clients import settings
from tests.kafka_clients.python.common import arguments_of, record_of, stopped_by_stdin, tell, tell_record

WAIT_S = 15


def produce(bootstrap: str, arguments: dict[str, str]) -> None:
    number, count, per_second = (int(arguments[name]) for name in ("first", "count", "per_second"))
    for codec in arguments["codecs"].split(","):
        producer = KafkaProducer(
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            **settings.of_kafka_python(bootstrap),
        )
        sent = []
        for each in range(number, number + count):
            try:
                sent.append((each, producer.send(arguments["topic"], **record_of(each, arguments))))
            except KafkaError as error:
                tell("failed", each, repr(error))
            if per_second:
                time.sleep(1 / per_second)
        for each, future in sent:
            try:
                at = future.get(60)
            except KafkaError as error:
                tell("failed", each, repr(error))
            else:
                tell("ack", each, at.partition, at.offset)
        producer.close(timeout=10)
        number += count


def consumer(bootstrap: str, **more: Any) -> KafkaConsumer:
    common = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    return KafkaConsumer(**common, **settings.of_kafka_python(bootstrap), **more)


def consume(bootstrap: str, arguments: dict[str, str]) -> None:
    reader = consumer(bootstrap, isolation_level=arguments.get("isolation", "read_uncommitted"))
    reader.assign([TopicPartition(arguments["topic"], p) for p in range(int(arguments["partitions"]))])
    left = int(arguments["until"])
    while left > 0:
        for records in reader.poll(200).values():
            for record in records:
                tell_record(record)
                left -= 1
    reader.close()


class Told(ConsumerRebalanceListener):  # type: ignore[misc]
    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        for each in assigned:
            tell("assigned", each.partition)

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        for each in revoked:
            tell("revoked", each.partition)


def group(bootstrap: str, arguments: dict[str, str]) -> None:
    stopped = stopped_by_stdin()
    reader = consumer(bootstrap, group_id=arguments["group"], session_timeout_ms=10_000, heartbeat_interval_ms=500)
    reader.subscribe([arguments["topic"]], listener=Told())
    while not stopped.is_set():
        found = reader.poll(100)
        for records in found.values():
            for record in records:
                tell_record(record)
        if found:
            try:
                reader.commit()
            except KafkaError as error:
                tell("note", "commit", repr(error))
    reader.close()


def admin(bootstrap: str, arguments: dict[str, str]) -> None:
    topic = arguments["topic"]
    name = f"{topic}-group"
    zero = TopicPartition(topic, 0)
    client = KafkaAdminClient(**settings.of_kafka_python(bootstrap))

    def until(holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {WAIT_S} s"
            time.sleep(0.05)

    def check(holds: object, found: object) -> None:
        assert holds, f"found {found}"

    def refused(kind: type[Exception], wanted: NewTopic) -> None:
        try:
            client.create_topics([wanted])
        except kind:
            return
        raise AssertionError(f"no {kind.__name__}")

    def partitions() -> list[Any]:
        [found] = client.describe_topics([topic])
        return list(found["partitions"])

    def retention() -> Any:
        found = client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        return found["topic"][topic]["retention.ms"]["value"]

    def alter() -> None:
        changed = ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "7200000"})
        client.alter_configs([changed])
        until(lambda: retention() == "7200000")

    def grow() -> None:
        client.create_partitions({topic: NewPartitions(5)})
        until(lambda: len(partitions()) == 5)

    def delete_records() -> None:
        producer = KafkaProducer(**settings.of_kafka_python(bootstrap))
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0)
        producer.close(timeout=WAIT_S)
        found = client.delete_records({zero: 5})
        check(found[zero]["low_watermark"] == 5, found)

    def committed() -> Any:
        return client.list_group_offsets({name: [zero]})[name][zero].offset

    wanted = NewTopic(topic, 3, 3, topic_configs={"retention.ms": "3600000"})
    step("create", lambda: client.create_topics([wanted]))
    step("create again", lambda: refused(TopicAlreadyExistsError, wanted))
    step("create with too many replicas", lambda: refused(InvalidReplicationFactorError, NewTopic(f"{topic}-9", 1, 9)))
    step("list topics", lambda: until(lambda: topic in client.list_topics()))
    step("describe topic", lambda: until(lambda: sum(len(each["isr_nodes"]) == 3 for each in partitions()) == 3))
    step("describe configs", lambda: check(retention() == "3600000", retention()))
    step("alter configs", alter)
    step("create partitions", grow)
    step("delete records", delete_records)
    step("describe cluster", lambda: check(len(client.describe_cluster()["brokers"]) == 3, client.describe_cluster()))
    step("alter offsets of a group", lambda: client.alter_group_offsets(name, {zero: OffsetAndMetadata(7, "", -1)}))
    step("list offsets of a group", lambda: check(committed() == 7, committed()))
    step("list groups", lambda: check(name in str(client.list_groups()), client.list_groups()))
    step(
        "describe group", lambda: check("Empty" in str(client.describe_groups([name])), client.describe_groups([name]))
    )
    step("delete group", lambda: client.delete_groups([name]))
    step("delete topic", lambda: client.delete_topics([topic]))
    step("see no topic", lambda: until(lambda: topic not in client.list_topics()))
    client.close()


def step(name: str, body: Callable[[], object]) -> None:
    try:
        body()
    except Exception as error:  # noqa: BLE001 - any exception is a failure of the step
        tell("bad", name, repr(error))
    else:
        tell("ok", name)


VERBS = {"produce": produce, "consume": consume, "group": group, "admin": admin}


if __name__ == "__main__":
    bootstrap, verb, arguments = arguments_of(sys.argv)
    VERBS[verb](bootstrap, arguments)
    tell("end")
