"""Transactions of our own producers on a cluster of real brokers: brokers and producers that are killed, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from minibroker.client.errors import TransactionAborted
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.who import BrokerId
from minibroker.protocol.model import TopicPartition
from minibroker.sync import Admin, Consumer, Producer
from tests.live_cluster import live_cluster
from tests.waiting import until_true

pytestmark = pytest.mark.slow

PATIENCE_S = 120
TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, index) for index in range(3)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    settings = {
        "zookeeper.session.timeout.ms": "6000",
        "transaction.state.log.num.partitions": "5",
        "offsets.topic.num.partitions": "5",
    }
    with live_cluster(tmp_path, settings=settings) as cluster:
        with Admin(cluster.bootstrap()) as admin:
            admin.create_topic(TOPIC, partitions=3, replication_factor=3, configs={"min.insync.replicas": "2"})
        yield cluster


def committed(cluster: LocalCluster) -> list[bytes]:
    """Return the values that read_committed consumers see, up to the last stable offsets after the next transaction."""
    with Producer(cluster.bootstrap(), transactional_id="the end") as producer, producer.transaction():
        for partition in PARTITIONS:
            producer.send(TOPIC, b"end", partition=partition.partition)
    values: list[bytes] = []
    with Consumer(cluster.bootstrap(), partitions=PARTITIONS, isolation_level="read_committed") as consumer:
        while values.count(b"end") < len(PARTITIONS):
            values += [record.value or b"" for record in consumer.poll(timeout_ms=1_000)]
    return [value for value in values if value != b"end"]


def wait_for(more: int, written: list[int]) -> None:
    before = len(written)
    until_true(lambda: len(written) >= before + more, PATIENCE_S)


def are_all_in_sync(admin: Admin) -> bool:
    topic = admin.describe_topics([TOPIC])[TOPIC]
    return all(len(partition.isr) == 3 for partition in topic.partitions)


def test_each_transaction_is_there_once_and_whole_although_every_broker_is_killed(cluster: LocalCluster) -> None:
    """Each transaction writes to all partitions; every third one raises. Those that are aborted by a fault are
    repeated."""
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        with Producer(cluster.bootstrap(), transactional_id="writer") as producer:
            number = 0
            while not stop.is_set():
                try:
                    with producer.transaction():
                        for partition in PARTITIONS:
                            producer.send(TOPIC, b"%d" % number, partition=partition.partition)
                        if number % 3 == 2:
                            producer.flush()
                            raise ZeroDivisionError
                    written.append(number)
                except TransactionAborted:
                    continue
                except ZeroDivisionError:
                    pass
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for broker_id in list(cluster.view().brokers):
            wait_for(20, written)
            cluster.kill(BrokerId(broker_id))
            wait_for(20, written)
            cluster.start(BrokerId(broker_id))
            with Admin(cluster.bootstrap()) as admin:
                until_true(partial(are_all_in_sync, admin), PATIENCE_S)
    finally:
        stop.set()
        writer.join(PATIENCE_S)
    assert not writer.is_alive()
    assert sorted(committed(cluster)) == sorted(b"%d" % number for number in written for _ in PARTITIONS)


PROGRAM = """
import sys, time
from minibroker.sync import Producer
with Producer(sys.argv[1], transactional_id="worker") as producer:
    with producer.transaction():
        for number in range(100):
            producer.send("orders", b"left", partition=number % 3).result()
        print("sent", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_what_an_interrupted_program_has_written_is_never_visible(
    cluster: LocalCluster, signal_number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, cluster.bootstrap()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "sent\n"
    process.send_signal(signal_number)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (signal_number is signal.SIGKILL) or said.strip().endswith("KeyboardInterrupt")
    if signal_number is signal.SIGKILL:  # the next one fences it, and aborts what it has left
        with Producer(cluster.bootstrap(), transactional_id="worker") as producer, producer.transaction():
            producer.send(TOPIC, b"next")
    assert committed(cluster) == ([b"next"] if signal_number is signal.SIGKILL else [])
