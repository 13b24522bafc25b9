"""Kafka clients read the records of minibroker's producer, in each codec and in both formats of the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.sync import Admin, Producer
from tests.integration.kafka_clients.python_kafka_clients import CLIENTS, Client, Read, Record
from tests.live_cluster import live_cluster

pytestmark = pytest.mark.slow

FIRST_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster"), 1, {"offsets.topic.replication.factor": "1"}) as cluster:
        yield cluster


def records(count: int) -> list[Record]:
    return [
        Record(
            0,
            key=(None, b"", b"key-%d" % number)[number % 3],
            value=None if number % 11 == 4 else b"value-%d" % number * (number % 40),
            headers=((), (("a", b"1"), ("a", b"")), (("zażółć", b"\xff\0"),))[number % 3],
            timestamp_ms=FIRST_MS + number // 7,
        )
        for number in range(count)
    ]


def write(bootstrap: str, topic: str, written: list[Record], **settings: Any) -> None:
    with Producer(bootstrap, **settings) as producer:
        for record in written:
            producer.send(
                topic,
                record.value,
                key=record.key,
                partition=0,
                headers=list(record.headers),
                timestamp_ms=record.timestamp_ms,
            )
        producer.flush()


@pytest.mark.parametrize("record_format", ["columns", "kafka"])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_kafka_clients_read_the_records_of_our_producer_in_each_codec(
    cluster: LocalCluster, client: Client, record_format: str
) -> None:
    topic = f"native-{client.name}-{record_format}"
    with Admin(cluster.bootstrap()) as admin:
        admin.create_topic(topic, partitions=1, replication_factor=1, configs={"record.format": record_format})
    begin = 0
    for codec in client.codecs:
        written = records(300)
        write(cluster.bootstrap(), topic, written, compression=codec)
        read = client.read(cluster.bootstrap(), topic, {0: begin}, len(written))
        assert read == [Read(begin + number, record) for number, record in enumerate(written)], codec
        assert client.read(cluster.bootstrap(), topic, {0: begin + 299}, 1) == read[-1:], f"{codec}, from its middle"
        begin += len(written)


def test_a_topic_changes_its_format_while_it_is_written_and_read(cluster: LocalCluster) -> None:
    """Kafka clients see one log, regardless of the format of its batches."""
    topic = "changing"
    resource = ConfigResource.of_topic(topic)
    written = records(400)
    with Admin(cluster.bootstrap()) as admin:
        admin.create_topic(topic, partitions=1, replication_factor=1)
        for turn, record_format in enumerate(("columns", "kafka", "columns", "kafka")):
            admin.incremental_alter_configs({resource: [ConfigChange.set("record.format", record_format)]})
            write(cluster.bootstrap(), topic, written[turn * 100 : turn * 100 + 100])
        assert admin.describe_configs([resource])[resource]["record.format"].value == "kafka"
    for client in CLIENTS:
        read = client.read(cluster.bootstrap(), topic, {0: 0}, len(written))
        assert read == [Read(number, record) for number, record in enumerate(written)], client.name
