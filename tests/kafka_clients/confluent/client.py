"""librdkafka, through confluent-kafka, with the verbs of `programs`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    ElectionType,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.kafka_clients.confluent.transactions import fence, servers, transfer
from tests.kafka_clients.records import NULL, full_record

WAIT_S = 20


def main() -> None:
    bootstrap, verb, *rest = sys.argv[1:]
    VERBS[verb](bootstrap, dict(each.split("=", 1) for each in rest))
    tell("end")


def tell(*cells: object) -> None:
    print(*(str(cell).replace("\t", " ").replace("\n", " ") for cell in cells), sep="\t", flush=True)


def content(text: str) -> bytes | None:
    return None if text == NULL else text.encode()


def text_of(data: Any) -> str:
    return NULL if data is None else str(data, "utf-8")


def headers_of(number: int) -> list[tuple[str, Any]]:
    pairs = (each.split("=", 1) for each in full_record(number).headers.split(","))
    return [(name, content(value)) for name, value in pairs]


def produce(bootstrap: str, arguments: dict[str, str]) -> None:
    number, count, per_second = (int(arguments[name]) for name in ("first", "count", "per_second"))
    for codec in arguments["codecs"].split(","):
        producer = Producer(
            {**servers(bootstrap), "enable.idempotence": True, "compression.type": codec, "linger.ms": 5}
        )

        def on_delivery(number: int) -> Callable[[Any, Message], None]:
            def told(error: Any, message: Message) -> None:
                if error is None:
                    tell("ack", number, message.partition(), message.offset())
                else:
                    tell("failed", number, error)

            return told

        for each in range(number, number + count):
            key, value, _ = full_record(each)
            producer.produce(
                arguments["topic"],
                key=content(key),
                value=content(value),
                partition=each % int(arguments["partitions"]),
                timestamp=int(arguments["base"]) + each,
                headers=headers_of(each),
                on_delivery=on_delivery(each),
            )
            producer.poll(1 / per_second if per_second else 0)
            if per_second:
                time.sleep(1 / per_second)
        number += count
        producer.flush(60)


def tell_record(message: Message) -> None:
    if message.error() is not None:
        tell("note", message.error())
        return
    headers = ",".join(f"{name}={text_of(value)}" for name, value in list[Any](message.headers() or []))
    key, value = text_of(message.key()), text_of(message.value())
    tell("rec", message.partition(), message.offset(), message.timestamp()[1], key, value, headers)


def consumer(bootstrap: str, **settings: Any) -> Consumer:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    common = {**servers(bootstrap), "auto.offset.reset": "earliest", "enable.auto.commit": False}
    return Consumer({**common, "group.id": "unused", **named})


def partitions_of(arguments: dict[str, str]) -> list[TopicPartition]:
    return [TopicPartition(arguments["topic"], p, 0) for p in range(int(arguments["partitions"]))]


def consume(bootstrap: str, arguments: dict[str, str]) -> None:
    reader = consumer(bootstrap, isolation_level=arguments.get("isolation", "read_uncommitted"))
    reader.assign(partitions_of(arguments))
    left = int(arguments["until"])
    while left > 0:
        for message in reader.consume(500, timeout=0.2):
            tell_record(message)
            left -= message.error() is None
    reader.close()


def seek(bootstrap: str, arguments: dict[str, str]) -> None:
    reader = consumer(bootstrap)
    partitions = partitions_of(arguments)
    reader.assign(partitions[:1])
    _next(reader)
    reader.seek(TopicPartition(arguments["topic"], 0, int(arguments["offset"])))
    tell_record(_next(reader))
    times = [TopicPartition(arguments["topic"], each.partition, int(arguments["time"])) for each in partitions]
    for each in reader.offsets_for_times(times, timeout=WAIT_S):
        tell("at", each.partition, each.offset)
    for each in partitions:
        first, last = reader.get_watermark_offsets(each, timeout=WAIT_S)
        tell("first", each.partition, first)
        tell("last", each.partition, last)
    reader.close()


def _next(reader: Consumer) -> Message:
    while True:
        message = reader.poll(1)
        if message is not None and message.error() is None:
            return message


def group(bootstrap: str, arguments: dict[str, str]) -> None:
    stopped = threading.Event()

    def wait_for_stop() -> None:
        sys.stdin.readline()
        stopped.set()

    threading.Thread(target=wait_for_stop, daemon=True).start()
    reader = consumer(
        bootstrap,
        group_id=arguments["group"],
        partition_assignment_strategy=arguments["strategy"],
        session_timeout_ms=10_000,
        heartbeat_interval_ms=500,
    )

    def told(what: str) -> Callable[[Consumer, list[TopicPartition]], None]:
        def tell_each(_: Consumer, partitions: list[TopicPartition]) -> None:
            for each in partitions:
                tell(what, each.partition)

        return tell_each

    reader.subscribe(
        [arguments["topic"]], on_assign=told("assigned"), on_revoke=told("revoked"), on_lost=told("revoked")
    )
    while not stopped.is_set():
        messages = reader.consume(500, timeout=0.1)
        for message in messages:
            tell_record(message)
        if messages:
            try:
                reader.commit(asynchronous=False)
            except KafkaException as error:
                tell("note", "commit", error)
    reader.close()


# -- administration --


def admin(bootstrap: str, arguments: dict[str, str]) -> None:
    topic = arguments["topic"]
    group_id = f"{topic}-group"
    zero = TopicPartition(topic, 0)
    client = AdminClient(servers(bootstrap))
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def step(name: str, body: Callable[[], None]) -> None:
        try:
            body()
            tell("ok", name)
        except Exception as error:  # noqa: BLE001 - any exception is a failure of the step
            tell("bad", name, repr(error))

    def of_one(futures: dict[Any, Any]) -> Any:
        [future] = futures.values()
        return future.result(WAIT_S)

    def check(holds: object, found: object) -> None:
        assert holds, f"found {found}"

    def expect(name: str, futures: dict[Any, Any]) -> None:
        try:
            of_one(futures)
        except KafkaException as error:
            check(error.args[0].name() == name, error)
        else:
            raise AssertionError(f"no {name}")

    def until(condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline_s, "not within 15 s"
            time.sleep(0.05)

    def described() -> Any:
        return client.list_topics(topic, timeout=WAIT_S).topics[topic]

    def retention() -> str:
        return str(of_one(client.describe_configs([resource]))["retention.ms"].value)

    def set_retention(value: str) -> dict[Any, Any]:
        entry = ConfigEntry("retention.ms", value, incremental_operation=AlterConfigOpType.SET)
        return client.incremental_alter_configs(
            [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
        )

    def offset_at(spec: Any) -> int:
        return int(of_one(client.list_offsets({zero: spec})).offset)

    def delete_records() -> None:
        producer = Producer(servers(bootstrap))
        for number in range(10):
            producer.produce(topic, b"%d" % number, partition=0)
        producer.flush(WAIT_S)
        low = of_one(client.delete_records([TopicPartition(topic, 0, 5)])).low_watermark
        check(low == 5, low)

    def alter_offsets() -> None:
        wanted = ConsumerGroupTopicPartitions(group_id, [TopicPartition(topic, 0, 7)])
        of_one(client.alter_consumer_group_offsets([wanted]))

    def committed() -> Any:
        asked = ConsumerGroupTopicPartitions(group_id, [zero])
        return of_one(client.list_consumer_group_offsets([asked])).topic_partitions[0].offset

    def groups() -> list[str]:
        return [each.group_id for each in client.list_consumer_groups().result(WAIT_S).valid]

    specs: Any = OffsetSpec
    wanted = [NewTopic(topic, 3, 3, config={"retention.ms": "3600000"})]
    step("create", lambda: of_one(client.create_topics(wanted)))
    step("create again", lambda: expect("TOPIC_ALREADY_EXISTS", client.create_topics(wanted)))
    too_many = [NewTopic(f"{topic}-9", 1, 9)]
    step("create with too many replicas", lambda: expect("INVALID_REPLICATION_FACTOR", client.create_topics(too_many)))
    step("list topics", lambda: until(lambda: topic in client.list_topics(timeout=WAIT_S).topics))
    step(
        "describe topic",
        lambda: until(
            lambda: sum(len(each.isrs) == 3 and each.leader > 0 for each in described().partitions.values()) == 3
        ),
    )
    step("describe configs", lambda: check(retention() == "3600000", retention()))
    step("alter configs", lambda: of_one(set_retention("7200000")))
    step("see the configs", lambda: until(lambda: retention() == "7200000"))
    step("alter configs wrongly", lambda: expect("INVALID_CONFIG", set_retention("soon")))
    step("create partitions", lambda: of_one(client.create_partitions([NewPartitions(topic, 5)])))
    step("see the partitions", lambda: until(lambda: len(described().partitions) == 5))
    step("delete records", delete_records)
    step("list offsets", lambda: check(offset_at(specs.earliest()) == 5, offset_at(specs.earliest())))
    step("list last offsets", lambda: check(offset_at(specs.latest()) == 10, offset_at(specs.latest())))
    step(
        "describe cluster",
        lambda: check(
            len(client.describe_cluster().result(WAIT_S).nodes) == 3, client.describe_cluster().result(WAIT_S)
        ),
    )
    step("alter offsets of a group", alter_offsets)
    step("list offsets of a group", lambda: check(committed() == 7, committed()))
    step("list groups", lambda: check(group_id in groups(), groups()))
    step(
        "describe group", lambda: check("EMPTY" in str(of_one(client.describe_consumer_groups([group_id])).state), "?")
    )
    step("delete group", lambda: of_one(client.delete_consumer_groups([group_id])))
    step("see no group", lambda: check(group_id not in groups(), groups()))
    step("elect leaders", lambda: check(client.elect_leaders(ElectionType.PREFERRED, [zero]).result(WAIT_S), "nothing"))
    step("delete topic", lambda: of_one(client.delete_topics([topic])))
    step("see no topic", lambda: until(lambda: topic not in client.list_topics(timeout=WAIT_S).topics))


VERBS: dict[str, Callable[[str, dict[str, str]], None]] = {
    "produce": produce,
    "consume": consume,
    "seek": seek,
    "group": group,
    "admin": admin,
    "transfer": lambda bootstrap, arguments: transfer(bootstrap, arguments, tell),
    "fence": lambda bootstrap, arguments: fence(bootstrap, arguments, tell),
}

if __name__ == "__main__":
    main()
