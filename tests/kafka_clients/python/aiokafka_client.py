"""aiokafka with the verbs of `programs`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.errors import KafkaError, for_code
from aiokafka.helpers import create_ssl_context

from tests.kafka_clients import settings
from tests.kafka_clients.python.common import arguments_of, record_of, stopped_by_stdin, tell, tell_record

WAIT_S = 15


def servers(bootstrap: str) -> dict[str, Any]:
    found = settings.of_kafka_python(bootstrap)
    authority = found.pop("ssl_cafile", None)
    return {**found, "ssl_context": create_ssl_context(cafile=authority)} if authority else found


async def produce(bootstrap: str, arguments: dict[str, str]) -> None:
    number, count, per_second = (int(arguments[name]) for name in ("first", "count", "per_second"))
    for codec in arguments["codecs"].split(","):
        producer = AIOKafkaProducer(
            enable_idempotence=True, compression_type=None if codec == "none" else codec, **servers(bootstrap)
        )

        async def told(number: int, delivery: Awaitable[Any]) -> None:
            try:
                sent = await delivery
            except KafkaError as error:
                tell("failed", number, repr(error))
            else:
                tell("ack", number, sent.partition, sent.offset)

        async with producer:
            deliveries = []
            for each in range(number, number + count):
                try:
                    delivery = await producer.send(arguments["topic"], **record_of(each, arguments))
                except KafkaError as error:
                    tell("failed", each, repr(error))
                else:
                    deliveries.append(asyncio.create_task(told(each, delivery)))
                await asyncio.sleep(1 / per_second if per_second else 0)
            await asyncio.gather(*deliveries)
        number += count


def consumer(bootstrap: str, **more: Any) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(auto_offset_reset="earliest", enable_auto_commit=False, **servers(bootstrap), **more)


async def consume(bootstrap: str, arguments: dict[str, str]) -> None:
    reader = consumer(bootstrap, isolation_level=arguments.get("isolation", "read_uncommitted"))
    reader.assign([TopicPartition(arguments["topic"], p) for p in range(int(arguments["partitions"]))])
    left = int(arguments["until"])
    async with reader:
        while left > 0:
            for records in (await reader.getmany(timeout_ms=200)).values():
                for record in records:
                    tell_record(record)
                    left -= 1


class Told(ConsumerRebalanceListener):  # type: ignore[misc]
    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        for each in assigned:
            tell("assigned", each.partition)

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        for each in revoked:
            tell("revoked", each.partition)


async def group(bootstrap: str, arguments: dict[str, str]) -> None:
    stopped = stopped_by_stdin()
    reader = consumer(bootstrap, group_id=arguments["group"], session_timeout_ms=10_000, heartbeat_interval_ms=500)
    reader.subscribe([arguments["topic"]], listener=Told())
    async with reader:
        while not stopped.is_set():
            found = await reader.getmany(timeout_ms=100)
            for records in found.values():
                for record in records:
                    tell_record(record)
            if found:
                try:
                    await reader.commit()
                except KafkaError as error:
                    tell("note", "commit", repr(error))


async def admin(bootstrap: str, arguments: dict[str, str]) -> None:
    topic = arguments["topic"]
    zero = TopicPartition(topic, 0)
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    client = AIOKafkaAdminClient(**servers(bootstrap))
    await client.start()

    async def until(holds: Callable[[], Awaitable[object]]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not await holds():
            assert time.monotonic() < deadline_s, f"not within {WAIT_S} s"
            await asyncio.sleep(0.05)

    async def create(wanted: NewTopic) -> int:
        [(_, code, *_)] = (await client.create_topics([wanted])).topic_errors
        return int(code)

    async def partitions() -> list[Any]:
        [found] = await client.describe_topics([topic])
        return list(found["partitions"])

    async def retention() -> str:
        [answer] = await client.describe_configs([resource])
        [(_, _, _, _, entries)] = answer.resources
        return next(str(entry[1]) for entry in entries if entry[0] == "retention.ms")

    async def alter() -> None:
        changed = ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "7200000"})
        for answer in await client.alter_configs([changed]):
            for code, *_ in answer.resources:
                assert code == 0, for_code(code)
        await until(lambda: _equals(retention(), "7200000"))

    async def grow() -> None:
        for _, code, *_ in (await client.create_partitions({topic: NewPartitions(5)})).topic_errors:
            assert code == 0, for_code(code)
        await until(lambda: _equals(_length(partitions()), 5))

    async def delete_records() -> None:
        async with AIOKafkaProducer(**servers(bootstrap)) as producer:
            for number in range(10):
                await producer.send_and_wait(topic, b"%d" % number, partition=0)
        found = await client.delete_records({zero: RecordsToDelete(5)})
        assert found == {zero: 5}, found

    async def see_brokers() -> None:
        found = await client.describe_cluster()
        assert len(found["brokers"]) == 3, found

    async def see_groups() -> None:
        name = f"{topic}-group"
        async with consumer(bootstrap, group_id=name) as member:
            member.subscribe([topic])
            await until(lambda: _assigned(member))
            await member.commit({zero: 7})
            assert any(each[0] == name for each in await client.list_consumer_groups())
            [answer] = await client.describe_consumer_groups([name])
            assert answer.groups[0][2] == "Stable", answer
        found = await client.list_consumer_group_offsets(name)
        assert found[zero].offset == 7, found

    async def remove() -> None:
        for _, code in (await client.delete_topics([topic])).topic_error_codes:
            assert code == 0, for_code(code)
        await until(lambda: _absent(topic, client))

    shape = {"num_partitions": 3, "replication_factor": 3}
    wanted = NewTopic(topic, **shape, topic_configs={"retention.ms": "3600000"})
    await step("create", lambda: _expect(create(wanted), 0))
    await step("create again", lambda: _expect(create(wanted), 36))
    await step("create with too many replicas", lambda: _expect(create(NewTopic(f"{topic}-9", 1, 9)), 38))
    await step("describe topic", lambda: until(lambda: _equals(_whole(partitions()), 3)))
    await step("describe configs", lambda: _expect(retention(), "3600000"))
    await step("alter configs", alter)
    await step("create partitions", grow)
    await step("delete records", delete_records)
    await step("describe cluster", see_brokers)
    await step("groups", see_groups)
    await step("delete topic", remove)
    await client.close()


async def step(name: str, body: Callable[[], Awaitable[object]]) -> None:
    try:
        await body()
    except Exception as error:  # noqa: BLE001 - any exception is a failure of the step
        tell("bad", name, repr(error))
    else:
        tell("ok", name)


async def _expect(answer: Awaitable[object], wanted: object) -> None:
    found = await answer
    assert found == wanted, f"found {found}"


async def _equals(answer: Awaitable[object], wanted: object) -> bool:
    return await answer == wanted


async def _length(answer: Awaitable[list[Any]]) -> int:
    return len(await answer)


async def _whole(answer: Awaitable[list[Any]]) -> int:
    return sum(len(each["isr"]) == 3 for each in await answer)


async def _assigned(member: AIOKafkaConsumer) -> bool:
    return bool(member.assignment())


async def _absent(topic: str, client: AIOKafkaAdminClient) -> bool:
    return topic not in await client.list_topics()


VERBS = {"produce": produce, "consume": consume, "group": group, "admin": admin}


if __name__ == "__main__":
    bootstrap, verb, arguments = arguments_of(sys.argv)
    asyncio.run(VERBS[verb](bootstrap, arguments))
    tell("end")
