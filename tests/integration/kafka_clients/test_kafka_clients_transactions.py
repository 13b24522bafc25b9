"""Transactions of Kafka's Python clients at real brokers. `make kafka-clients` has those of other languages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.cimpl import TopicPartition

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.protocol.model import TopicPartition as OurPartition
from minibroker.sync import Admin, Consumer, Producer
from tests.integration.kafka_clients.python_kafka_clients import CLIENTS, PATIENCE_S, Client
from tests.integration.kafka_clients.python_transactions import TRANSACTORS, Start, Transactor
from tests.live_cluster import live_cluster
from tests.waiting import until_true

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sockets_are_collected")]

INPUT = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "300"}
    with live_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    """The test's own topic, whose name is also its transactional id."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name[:100])
    with Admin(cluster.bootstrap()) as admin:
        admin.create_topic(name, partitions=1, replication_factor=3)
    return name


@pytest.fixture(params=TRANSACTORS, ids=lambda start: start.name)
def start(request: pytest.FixtureRequest) -> Start:
    chosen: Start = request.param
    return chosen


@pytest.fixture
def transactor(cluster: LocalCluster, topic: str, start: Start) -> Iterator[Transactor]:
    transactor = start(cluster.bootstrap(), topic, f"{topic}-group")
    yield transactor
    transactor.close()


def end_of(cluster: LocalCluster, topic: str, level: Any) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap()})
    specs: Any = OffsetSpec
    [found] = admin.list_offsets({TopicPartition(topic, 0): specs.latest()}, isolation_level=level).values()
    offset: int = found.result(PATIENCE_S).offset
    return offset


def wait_until_settled(cluster: LocalCluster, topic: str) -> int:
    """Wait until no transaction is open in the topic; return the end of its log."""
    levels: Any = IsolationLevel
    until_true(
        lambda: end_of(cluster, topic, levels.READ_COMMITTED) == end_of(cluster, topic, levels.READ_UNCOMMITTED),
        within_s=PATIENCE_S,
    )
    return end_of(cluster, topic, levels.READ_UNCOMMITTED)


def values(read: list[Any]) -> list[bytes]:
    return [each.record.value for each in read]


@pytest.mark.parametrize("reader", CLIENTS, ids=lambda client: client.name)
def test_readers_of_committed_records_skip_what_a_client_aborted(
    cluster: LocalCluster, topic: str, transactor: Transactor, reader: Client
) -> None:
    for number, ends in enumerate((transactor.commit, transactor.abort, transactor.commit)):
        transactor.begin()
        transactor.write(topic, [b"%d-%d" % (number, each) for each in range(3)])
        ends()
    committed = [b"0-0", b"0-1", b"0-2", b"2-0", b"2-1", b"2-2"]
    wait_until_settled(cluster, topic)
    assert values(reader.read(cluster.bootstrap(), topic, {0: 0}, 6, committed=True)) == committed
    aborted = [b"1-0", b"1-1", b"1-2"]
    everything = [*committed[:3], *aborted, *committed[3:]]
    assert values(reader.read(cluster.bootstrap(), topic, {0: 0}, 9)) == everything
    with Consumer(cluster.bootstrap(), isolation_level="read_committed") as ours:
        ours.assign([OurPartition(topic, 0)])
        assert values_of(ours, 6) == committed


def values_of(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += [record.value or b"" for record in consumer.poll(PATIENCE_S)]
    return found


def test_offsets_count_only_if_the_transaction_is_committed(
    cluster: LocalCluster, topic: str, transactor: Transactor
) -> None:
    source = f"{topic}-source"
    with Admin(cluster.bootstrap()) as admin:
        admin.create_topic(source, partitions=1, replication_factor=3)
    with Producer(cluster.bootstrap()) as producer:
        for number in range(INPUT):
            producer.send(source, b"%d" % number)
        producer.flush()
    for ends in (transactor.abort, transactor.commit):
        taken = transactor.take(source, 4)
        assert taken == [b"0", b"1", b"2", b"3"]
        transactor.begin()
        transactor.write(topic, taken)
        transactor.send_offset(source, 4)
        ends()
    assert transactor.take(source, 2) == [b"4", b"5"]


def test_a_second_producer_fences_the_first_and_aborts_its_transaction(
    cluster: LocalCluster, topic: str, start: Start, transactor: Transactor
) -> None:
    transactor.begin()
    transactor.write(topic, [b"of the first"])
    second = start(cluster.bootstrap(), topic, f"{topic}-group")
    try:
        second.begin()
        second.write(topic, [b"of the second"])
        second.commit()
    finally:
        second.close()
    wait_until_settled(cluster, topic)
    with pytest.raises(Exception, match=r"(?i)fenced|epoch"):
        transactor.commit()
    [reader] = [each for each in CLIENTS if each.name == "confluent-kafka"]
    assert values(reader.read(cluster.bootstrap(), topic, {0: 0}, 1, committed=True)) == [b"of the second"]


def test_a_transaction_that_stays_open_too_long_is_aborted(cluster: LocalCluster, topic: str, start: Start) -> None:
    late = start(cluster.bootstrap(), topic, f"{topic}-group", 1_000)
    try:
        late.begin()
        late.write(topic, [b"too late"])
        assert wait_until_settled(cluster, topic) == 2
        with pytest.raises(Exception, match=r"(?i)fenced|epoch|abort"):
            late.commit()
    finally:
        late.close()
