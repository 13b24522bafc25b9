"""Kafka's clients over SASL_SSL with SCRAM, a session that ends every two seconds, and access control lists: nothing is
lost when the leader is killed."""

from __future__ import annotations

import asyncio
import gc
import importlib
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.helpers import create_ssl_context

from minibroker import NewTopic, Security, sync
from minibroker.protocol.acls import (
    AccessControlEntry,
    AclBinding,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    ResourcePattern,
)
from minibroker.protocol.model import TopicPartition
from minibroker.testing import SyncLocalCluster
from tests.kafka_clients.programs import tool
from tests.waiting import until_true

with warnings.catch_warnings():  # its schemas use a function deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer, KafkaProducer

kafka_admin: Any = importlib.import_module("confluent_kafka.admin")  # its type stubs are incomplete

pytestmark = [
    pytest.mark.slow,
    # kafka-python leaves sockets open that could not connect to the killed broker.
    pytest.mark.filterwarnings("ignore:.*socket.socket:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

RECORDS = 250
PAUSE_S = 0.02
PATIENCE_S = 90.0
TOPIC = "orders"


@pytest.fixture(autouse=True)
def warnings_are_ignored_here() -> Iterator[None]:
    """Collect the sockets of kafka-python while their warnings are ignored."""
    yield
    gc.collect()


class Given(NamedTuple):
    servers: str
    user: Security
    authority: str

    @property
    def of_librdkafka(self) -> dict[str, str]:
        return {
            "bootstrap.servers": self.servers,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": self.authority,
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": str(self.user["sasl_plain_username"]),
            "sasl.password": str(self.user["sasl_plain_password"]),
        }

    @property
    def of_kafka_python(self) -> dict[str, Any]:
        return {"bootstrap_servers": self.servers, "ssl_cafile": self.authority, **self._of_python}

    @property
    def of_aiokafka(self) -> dict[str, Any]:
        context = create_ssl_context(cafile=self.authority)
        return {"bootstrap_servers": self.servers, "ssl_context": context, **self._of_python}

    @property
    def _of_python(self) -> dict[str, Any]:
        return {name: value for name, value in self.user.items() if name != "ssl_cafile"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncLocalCluster]:
    settings = {"connections.max.reauth.ms": "2000", "group.initial.rebalance.delay.ms": "0"}
    with SyncLocalCluster(3, topics=[NewTopic(TOPIC, 3, 3)], settings=settings, secure=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def given(cluster: SyncLocalCluster) -> Given:
    user = cluster.add_user("shop")
    topic = ResourcePattern(AclResourceType.TOPIC, TOPIC)
    any_group = ResourcePattern(AclResourceType.GROUP, "*")
    needed = [(topic, AclOperation.READ), (topic, AclOperation.WRITE), (any_group, AclOperation.READ)]
    bindings = [
        AclBinding(pattern, AccessControlEntry("User:shop", "*", operation, AclPermissionType.ALLOW))
        for pattern, operation in needed
    ]
    with sync.Admin(cluster.bootstrap_servers, **cluster.security()) as admin:
        admin.create_acls(bindings)
    return Given(cluster.bootstrap_servers, user, str(cluster.certificates.authority))


def values(client: str) -> list[bytes]:
    return [b"%s %d" % (client.encode(), number) for number in range(RECORDS)]


def with_minibroker(given: Given, found: set[bytes]) -> None:
    with sync.Producer(given.servers, **given.user) as producer:
        for value in values("minibroker"):
            producer.send(TOPIC, value).result()
            time.sleep(PAUSE_S)
    with sync.Consumer(given.servers, topics=[TOPIC], group="minibroker", **given.user) as consumer:
        wanted, until = set(values("minibroker")), time.monotonic() + PATIENCE_S
        while not wanted <= found and time.monotonic() < until:
            found.update(record.value or b"" for record in consumer.poll(timeout_ms=500))


def with_confluent_kafka(given: Given, found: set[bytes]) -> None:
    failed: list[object] = []
    producer = confluent_kafka.Producer({**given.of_librdkafka, "enable.idempotence": True})
    for value in values("confluent"):
        producer.produce(TOPIC, value, on_delivery=lambda error, _: failed.append(error) if error else None)
        producer.poll(PAUSE_S)
    assert producer.flush(PATIENCE_S) == 0
    assert failed == []
    group = {"group.id": "confluent", "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer({**given.of_librdkafka, **group})
    consumer.subscribe([TOPIC])
    wanted, until = set(values("confluent")), time.monotonic() + PATIENCE_S
    while not wanted <= found and time.monotonic() < until:
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            found.add(message.value() or b"")
    consumer.close()


def with_kafka_python(given: Given, found: set[bytes]) -> None:
    producer = KafkaProducer(acks="all", retries=100, **given.of_kafka_python)
    sent = []
    for value in values("kafka-python"):
        sent.append(producer.send(TOPIC, value))
        time.sleep(PAUSE_S)
    for each in sent:
        each.get(PATIENCE_S)
    producer.close()
    consumer = KafkaConsumer(
        TOPIC, group_id="kafka-python", auto_offset_reset="earliest", consumer_timeout_ms=500, **given.of_kafka_python
    )
    wanted, until = set(values("kafka-python")), time.monotonic() + PATIENCE_S
    while not wanted <= found and time.monotonic() < until:
        found.update(record.value for record in consumer)
    consumer.close()


def with_aiokafka(given: Given, found: set[bytes]) -> None:
    async def run() -> None:
        async with AIOKafkaProducer(enable_idempotence=True, **given.of_aiokafka) as producer:
            for value in values("aiokafka"):
                await producer.send_and_wait(TOPIC, value)
                await asyncio.sleep(PAUSE_S)
        consumer = AIOKafkaConsumer(TOPIC, group_id="aiokafka", auto_offset_reset="earliest", **given.of_aiokafka)
        async with consumer:
            wanted, until = set(values("aiokafka")), time.monotonic() + PATIENCE_S
            while not wanted <= found and time.monotonic() < until:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    found.update(record.value or b"" for record in records)

    asyncio.run(run())


CLIENTS: dict[str, Callable[[Given, set[bytes]], None]] = {
    "minibroker": with_minibroker,
    "confluent": with_confluent_kafka,
    "kafka-python": with_kafka_python,
    "aiokafka": with_aiokafka,
}


def test_nothing_is_lost_when_the_leader_is_killed_under_four_clients(cluster: SyncLocalCluster, given: Given) -> None:
    found: dict[str, set[bytes]] = {client: set() for client in CLIENTS}
    with ThreadPoolExecutor(len(CLIENTS)) as threads:
        running = [threads.submit(CLIENTS[client], given, found[client]) for client in CLIENTS]
        until_more_are_written(cluster, RECORDS)
        cluster.kill(f"leader:{TOPIC}-0")
        admin = kafka_admin.AdminClient(given.of_librdkafka | of_admin(cluster))
        created = admin.create_topics([kafka_admin.NewTopic("made-meanwhile", 1, 2)])
        created["made-meanwhile"].result(60)
        until_more_are_written(cluster, RECORDS)
        cluster.restore()
        for each in running:
            each.result()
    missing = {client: len(set(values(client)) - found[client]) for client in CLIENTS}
    assert missing == dict.fromkeys(CLIENTS, 0)


def until_more_are_written(cluster: SyncLocalCluster, count: int) -> None:
    """Wait for as many records more, or for all."""
    partitions = [TopicPartition(TOPIC, number) for number in range(3)]

    def written() -> int:
        with sync.Admin(cluster.bootstrap_servers, **cluster.security()) as admin:
            found = admin.list_offsets(dict.fromkeys(partitions, "latest"))
        return sum(at.offset for at in found.values() if at is not None)

    wanted = min(written() + count, len(CLIENTS) * RECORDS)
    until_true(lambda: written() >= wanted, PATIENCE_S)


def of_admin(cluster: SyncLocalCluster) -> dict[str, str]:
    user = cluster.security()
    return {
        "sasl.username": str(user["sasl_plain_username"]),
        "sasl.password": str(user["sasl_plain_password"]),
    }


def test_a_wrong_password_is_reported_by_each_client(given: Given) -> None:
    wrong = given._replace(user={**given.user, "sasl_plain_password": "wrong"})
    errors: list[str] = []
    consumer = confluent_kafka.Consumer(
        {
            **wrong.of_librdkafka,
            "group.id": "wrong",
            "error_cb": lambda error: errors.append(str(error)),
            "log_level": 0,
        }
    )
    consumer.subscribe([TOPIC])
    until = time.monotonic() + 20
    while not any("uthentication" in error for error in errors) and time.monotonic() < until:
        consumer.poll(0.2)
    consumer.close()
    assert [error for error in errors if "uthentication failed" in error]

    async def start() -> None:
        producer = AIOKafkaProducer(**wrong.of_aiokafka)
        try:
            await producer.start()
        finally:
            await producer.stop()

    with pytest.raises(Exception, match="uthentication|bootstrap"):
        asyncio.run(start())


def test_kcat_loses_nothing_either(tmp_path: Path) -> None:
    """Debian's kcat with a librdkafka that repeats its nonce in SCRAM. Sessions do not end here, because it does not
    authenticate itself again."""
    config = tmp_path / "kcat.conf"
    kcat = [tool("kcat", "kcat"), "-F", str(config), "-q"]
    with SyncLocalCluster(3, topics=[NewTopic(TOPIC, 3, 3)], secure=True) as cluster:
        of_kcat = Given(cluster.bootstrap_servers, cluster.security(), str(cluster.certificates.authority))
        config.write_text("".join(f"{name}={value}\n" for name, value in of_kcat.of_librdkafka.items()))
        with subprocess.Popen([*kcat, "-P", "-t", TOPIC, "-X", "acks=all"], stdin=subprocess.PIPE) as producing:
            assert producing.stdin is not None
            for number, value in enumerate(values("kcat")):
                producing.stdin.write(value + b"\n")
                producing.stdin.flush()
                time.sleep(PAUSE_S)
                if number == RECORDS // 2:
                    cluster.kill(f"leader:{TOPIC}-0")
            producing.stdin.close()
            assert producing.wait(PATIENCE_S) == 0
        reading = [*kcat, "-C", "-t", TOPIC, "-e", "-o", "beginning"]
        read = subprocess.run(reading, capture_output=True, timeout=PATIENCE_S)
    assert set(values("kcat")) - set(read.stdout.splitlines()) == set()
