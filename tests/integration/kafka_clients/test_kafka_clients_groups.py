"""Groups of Kafka clients at real brokers. They join, divide the partitions, commit, and resume at the commits when a
member joins, when the coordinator is killed, and after all members have left."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError as AiokafkaError

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import AllBrokers, LeaderOf
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition, internal_partition
from minibroker.sync import Admin, Consumer, Producer
from tests.live_cluster import live_cluster
from tests.waiting import until_true

with warnings.catch_warnings():  # its schemas use a function deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka as kafka_python

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sockets_are_collected")]

PARTITIONS = 6
OFFSETS_PARTITIONS = 10
RECORDS = 3_000
LONG_S = 90

Place = tuple[int, int]
"""Partition and offset."""


class Member(Protocol):
    def run(self, bootstrap: str, group: str, topic: str, stop: threading.Event, read: list[Place]) -> None:
        """Read as a member of the group and commit the records read, until `stop` is set. Raises an error that a user
        would have to handle."""
        ...


class ConfluentMember:
    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def run(self, bootstrap: str, group: str, topic: str, stop: threading.Event, read: list[Place]) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "partition.assignment.strategy": self.strategy,
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 300,
                "log_level": 0,
            }
        )
        consumer.subscribe([topic])
        try:
            while not stop.is_set():
                found = consumer.consume(200, 0.2)
                for message in found:
                    error = message.error()
                    assert error is None or error.retriable(), str(error)
                    if error is None:
                        read.append((message.partition() or 0, message.offset() or 0))
                try:
                    consumer.commit(asynchronous=False)
                except confluent_kafka.KafkaException:
                    continue  # a rebalance, or nothing to commit; the next commit covers it
        finally:
            consumer.close()


class AiokafkaMember:
    def run(self, bootstrap: str, group: str, topic: str, stop: threading.Event, read: list[Place]) -> None:
        asyncio.run(self._run(bootstrap, group, topic, stop, read))

    async def _run(self, bootstrap: str, group: str, topic: str, stop: threading.Event, read: list[Place]) -> None:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6_000,
            heartbeat_interval_ms=300,
            metadata_max_age_ms=1_000,
        )
        await consumer.start()
        try:
            while not stop.is_set():
                for records in (await consumer.getmany(timeout_ms=200, max_records=200)).values():
                    read += [(record.partition, record.offset) for record in records]
                try:
                    await consumer.commit()
                except AiokafkaError:
                    continue
        finally:
            await consumer.stop()


class KafkaPythonMember:
    def run(self, bootstrap: str, group: str, topic: str, stop: threading.Event, read: list[Place]) -> None:
        consumer = kafka_python.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap.split(","),
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6_000,
            heartbeat_interval_ms=300,
            metadata_max_age_ms=1_000,
        )
        try:
            while not stop.is_set():
                found: dict[Any, list[Any]] = consumer.poll(timeout_ms=200, max_records=200)
                for records in found.values():
                    read += [(record.partition, record.offset) for record in records]
                try:
                    consumer.commit()
                except kafka_python.errors.KafkaError:
                    continue
        finally:
            consumer.close()


MEMBERS: dict[str, Member] = {
    "confluent-range": ConfluentMember("range"),
    "confluent-cooperative": ConfluentMember("cooperative-sticky"),
    "aiokafka": AiokafkaMember(),
    "kafka-python": KafkaPythonMember(),
}


class Running:
    """A member in its own thread."""

    def __init__(self, member: Member, bootstrap: str, group: str, topic: str) -> None:
        self.read: list[Place] = []
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(1)
        self._running = self._executor.submit(member.run, bootstrap, group, topic, self._stop, self.read)

    def is_well(self) -> bool:
        """Whether the member still runs. Raises the member's error."""
        if self._running.done():
            self._running.result()
        return True

    def end(self) -> None:
        self._stop.set()
        self._executor.shutdown()
        self._running.result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {
        "offsets.topic.num.partitions": str(OFFSETS_PARTITIONS),
        "group.initial.rebalance.delay.ms": "100",
    }
    with live_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield cluster


def write(bootstrap: str, topic: str, first: int, count: int) -> None:
    with Producer(bootstrap) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.flush()


def write_until(enough: threading.Event, bootstrap: str, topic: str, least: int) -> int:
    """Write a few records at a time, as many to each partition, until `enough` is set, but at least `least`. Return
    their number."""
    written = 0
    with Producer(bootstrap) as producer:
        while written < least or not enough.is_set():
            for number in range(written, written + 3 * PARTITIONS):
                producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
            written += 3 * PARTITIONS
            producer.flush()
            time.sleep(0.02)
    return written


class OurMember:
    def run(self, bootstrap: str, group: str, topic: str, stop: threading.Event, read: list[Place]) -> None:
        with Consumer(
            bootstrap,
            topics=[topic],
            group=group,
            partition_assignment_strategy=["range"],
            auto_offset_reset="earliest",
        ) as consumer:
            while not stop.is_set():
                read += [(record.partition, record.offset) for record in consumer.poll(200)]


def test_a_group_has_members_of_minibroker_and_of_kafka(cluster: LocalCluster) -> None:
    """They agree on the range assignor, and each decodes the other's subscription and assignment."""
    group, topic, bootstrap = "mixed", "read-by-both", cluster.bootstrap()
    with Admin(bootstrap) as admin:
        admin.create_topic(topic, partitions=PARTITIONS, replication_factor=3)
    members: list[Running] = []
    written = 0
    try:
        for member in (ConfluentMember("range"), OurMember(), ConfluentMember("range"), OurMember()):
            members.append(Running(member, bootstrap, group, topic))

            def all_read() -> bool:
                nonlocal written
                write(bootstrap, topic, written, PARTITIONS)
                written += PARTITIONS
                return all(one.is_well() and len(one.read) > 0 for one in members)

            until_true(all_read, within_s=LONG_S, every_s=0.5)
        everything = {(p, o) for p in range(PARTITIONS) for o in range(written // PARTITIONS)}
        until_true(lambda: {place for one in members for place in one.read} == everything, within_s=LONG_S)
    finally:
        for one in members:
            one.end()


@pytest.mark.parametrize("kind", MEMBERS)
def test_a_group_reads_all_records_through_joins_and_the_loss_of_its_coordinator(
    cluster: LocalCluster, kind: str
) -> None:
    member, group, topic, bootstrap = MEMBERS[kind], f"group-{kind}", f"topic-{kind}", cluster.bootstrap()
    with Admin(bootstrap) as admin:
        admin.create_topic(topic, partitions=PARTITIONS, replication_factor=3)
    both_read = threading.Event()
    pool = ThreadPoolExecutor(1)
    # Records remain for the second member, however long it takes to join.
    writing = pool.submit(write_until, both_read, bootstrap, topic, least=RECORDS)
    members = [Running(member, bootstrap, group, topic)]
    try:
        until_true(lambda: members[0].is_well() and len(members[0].read) > 0, within_s=LONG_S)
        members.append(Running(member, bootstrap, group, topic))
        until_true(lambda: members[1].is_well() and len(members[1].read) > 0, within_s=LONG_S)
        both_read.set()
        cluster.kill(LeaderOf(TopicPartition(OFFSETS_TOPIC, internal_partition(group, OFFSETS_PARTITIONS))))

        written = writing.result()
        everything = {(p, o) for p in range(PARTITIONS) for o in range(written // PARTITIONS)}

        def have_read_all() -> bool:
            return all(one.is_well() for one in members) and {p for one in members for p in one.read} == everything

        until_true(have_read_all, within_s=LONG_S)

        def has_committed_all() -> bool:
            with Admin(bootstrap) as admin:
                found = admin.list_group_offsets(group)
            return {p.partition: c.offset for p, c in found.items() if c} == dict.fromkeys(
                range(PARTITIONS), written // PARTITIONS
            )

        until_true(lambda: all(one.is_well() for one in members) and has_committed_all(), within_s=LONG_S)
    finally:
        both_read.set()
        pool.shutdown()
        cluster.start(AllBrokers())
        for one in members:
            one.end()

    write(bootstrap, topic, written, 60)
    resumed = Running(member, bootstrap, group, topic)
    try:
        until_true(lambda: resumed.is_well() and len(resumed.read) >= 60, within_s=LONG_S)
    finally:
        resumed.end()
    assert sorted(resumed.read) == [(p, written // PARTITIONS + n) for p in range(PARTITIONS) for n in range(10)]
