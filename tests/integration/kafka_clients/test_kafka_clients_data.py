"""Kafka clients at real brokers: each reads the records of all, and a killed leader costs no record."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from aiokafka import AIOKafkaProducer

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import AllBrokers, LeaderOf
from minibroker.protocol.model import TopicPartition
from minibroker.sync import Admin, Consumer
from tests.integration.kafka_clients.python_kafka_clients import (
    CLIENTS,
    PATIENCE_S,
    Aiokafka,
    Client,
    Confluent,
    Read,
    Record,
)
from tests.live_cluster import live_cluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sockets_are_collected")]

PARTITIONS = 3
FIRST_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with live_cluster(
        tmp_path_factory.mktemp("cluster"),
        settings={"auto.create.topics.enable": "true", "num.partitions": str(PARTITIONS)},
    ) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    """The test's own topic."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name[:100])
    with Admin(cluster.bootstrap()) as admin:
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)
    return name


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    chosen: Client = request.param
    return chosen


def of_all_kinds() -> list[Record]:
    """Ten records for each partition, with and without keys, values and headers, some of them empty. None lacks both
    key and value, because aiokafka and kafka-python refuse to send such a record."""
    return [
        Record(
            partition,
            key=(None, b"", b"key-%d" % number)[number % 3],
            value=None if number == 4 else (b"value-%d" % number * 50, b"")[number % 2],
            headers=((), (("a", b"1"), ("a", b"")), (("zażółć", b"\xff\0"),))[number % 3],
            timestamp_ms=FIRST_MS + number,
        )
        for number in range(10)
        for partition in range(PARTITIONS)
    ]


def by_partition(read: list[Read]) -> dict[int, list[Read]]:
    found: dict[int, list[Read]] = {partition: [] for partition in range(PARTITIONS)}
    for each in read:
        found[each.record.partition].append(each)
    return found


def test_all_clients_read_a_clients_records_in_each_codec(cluster: LocalCluster, topic: str, client: Client) -> None:
    everybody = (*CLIENTS, None)
    begins = dict.fromkeys(range(PARTITIONS), 0)
    for codec in client.codecs:
        records = of_all_kinds()
        offsets = client.write(cluster.bootstrap(), topic, records, codec)
        written = by_partition([Read(offset, record) for offset, record in zip(offsets, records, strict=True)])
        for reader in everybody:
            if reader is None:
                read = read_by_ours(cluster, topic, begins, len(records))
            elif codec in reader.codecs:
                read = reader.read(cluster.bootstrap(), topic, begins, len(records))
            else:
                continue
            assert by_partition(read) == written, f"{codec}, read by {reader.name if reader else 'ours'}"
        begins = {partition: begin + 10 for partition, begin in begins.items()}


def read_by_ours(cluster: LocalCluster, topic: str, offsets: dict[int, int], count: int) -> list[Read]:
    with Consumer(cluster.bootstrap(), auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, partition) for partition in offsets])
        for partition, offset in offsets.items():
            consumer.seek(TopicPartition(topic, partition), offset)
        records = [next(consumer) for _ in range(count)]
    return [
        Read(
            r.offset,
            Record(
                r.partition, r.key, r.value, tuple((name, value or b"") for name, value in r.headers), r.timestamp_ms
            ),
        )
        for r in records
    ]


def test_a_client_finds_offsets_by_time_and_the_ends(cluster: LocalCluster, topic: str, client: Client) -> None:
    client.write(cluster.bootstrap(), topic, of_all_kinds())
    assert client.offsets(cluster.bootstrap(), topic, 1, FIRST_MS + 4) == (0, 10, 4)
    assert client.offsets(cluster.bootstrap(), topic, 1, FIRST_MS - 99) == (0, 10, 0)
    assert client.offsets(cluster.bootstrap(), topic, 1, FIRST_MS + 10) == (0, 10, None)
    read = client.read(cluster.bootstrap(), topic, {1: 4}, 6)
    assert [each.offset for each in read] == [4, 5, 6, 7, 8, 9]


def test_a_topic_is_created_when_a_client_writes_to_it(cluster: LocalCluster, client: Client) -> None:
    topic = f"by-itself-{client.name}"
    offsets = client.write(cluster.bootstrap(), topic, [Record(2, None, b"first")])
    assert offsets == [0]
    with Admin(cluster.bootstrap()) as admin:
        assert len(admin.describe_topics([topic])[topic].partitions) == PARTITIONS


def test_an_aiokafka_producer_continues_after_its_topic_is_created_again(cluster: LocalCluster, topic: str) -> None:
    """Its sequence numbers continue in a new log, which does not know the producer."""
    count = 5

    async def write() -> list[int]:
        producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap(), enable_idempotence=True)
        await producer.start()
        try:
            for number in range(count):
                await producer.send_and_wait(topic, b"old-%d" % number, partition=0)
            await asyncio.to_thread(create_again)
            return [
                (await producer.send_and_wait(topic, b"new-%d" % number, partition=0)).offset for number in range(count)
            ]
        finally:
            await producer.stop()

    def create_again() -> None:
        with Admin(cluster.bootstrap()) as admin:
            admin.delete_topic(topic)
            admin.create_topic(topic, partitions=PARTITIONS, replication_factor=3)

    assert asyncio.run(asyncio.wait_for(write(), PATIENCE_S)) == list(range(count))
    read = Aiokafka().read(cluster.bootstrap(), topic, {0: 0}, count)
    assert [each.record.value for each in read] == [b"new-%d" % number for number in range(count)]


def test_a_killed_leader_costs_a_client_neither_records_nor_their_order(
    cluster: LocalCluster, topic: str, client: Client
) -> None:
    """One client writes idempotently and reads while the leader of partition 0 is killed."""
    count, began = 6_000, threading.Event()
    read: list[Read] = []

    def paced() -> Iterator[Record]:
        for number in range(count):
            if number == count // 4:
                began.set()
            if number % 20 == 0:
                time.sleep(0.01)  # the writes must be in progress when the leader dies
            yield Record(number % PARTITIONS, None, b"%d" % number)

    def read_all() -> None:
        read.extend(client.read(cluster.bootstrap(), topic, dict.fromkeys(range(PARTITIONS), 0), count))

    def kill() -> None:
        began.wait()
        cluster.kill(LeaderOf(TopicPartition(topic, 0)))

    others = [threading.Thread(target=read_all), threading.Thread(target=kill)]
    for thread in others:
        thread.start()
    try:
        client.write(cluster.bootstrap(), topic, paced())
        for thread in others:
            thread.join()
    finally:
        cluster.start(AllBrokers())
    final = Confluent().read(cluster.bootstrap(), topic, dict.fromkeys(range(PARTITIONS), 0), count)
    for partition, found in by_partition(final).items():
        assert [each.record.value for each in found] == [b"%d" % n for n in range(partition, count, PARTITIONS)]
    assert by_partition(read) == by_partition(final)
