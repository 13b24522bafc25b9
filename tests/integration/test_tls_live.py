"""A live broker whose listeners for clients, brokers and metrics are SSL."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from minibroker import Admin, Consumer, Producer, sync
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.protocol.errors import MinibrokerError
from tests.waiting import until_true


class Up:
    def __init__(self, cluster: LocalCluster, certificates: Certificates, port: int, metrics_port: int) -> None:
        self.cluster = cluster
        self.certificates = certificates
        self.bootstrap = f"127.0.0.1:{port}"
        self.port = port
        self.metrics_port = metrics_port
        self.plaintext = cluster.bootstrap()

    @property
    def security(self) -> dict[str, Any]:
        return {"security_protocol": "SSL", "ssl_cafile": str(self.certificates.authority)}

    @property
    def of_librdkafka(self) -> dict[str, str]:
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.certificates.authority),
        }

    def log(self) -> str:
        return self.cluster.log_of(1).read_text()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("tls")
    certificates = Certificates(directory / "certificates")
    plain, secured, metrics = free_ports(3)
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SSL://127.0.0.1:{secured},CONTROLLER://127.0.0.1:0",
        "metrics.listener": f"127.0.0.1:{metrics}",
        "metrics.listener.security.protocol": "SSL",
        "listener.name.metrics.ssl.client.auth": "none",
        **certificates.settings(),
    }
    cluster = LocalCluster(directory / "cluster")
    try:
        cluster.up(1, plain, None, settings)
        until_true(lambda: len(cluster.view().brokers) == 1)
        yield Up(cluster, certificates, secured, metrics)
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)


def test_an_asynchronous_client_produces_and_consumes(up: Up) -> None:
    async def run() -> list[bytes | None]:
        async with Admin(up.bootstrap, **up.security) as admin:
            await admin.create_topic("asynchronous", partitions=1)
        async with Producer(up.bootstrap, **up.security) as producer:
            await asyncio.gather(*[producer.send("asynchronous", b"%d" % number) for number in range(100)])
        found = []
        async with Consumer(up.bootstrap, topics=["asynchronous"], group="tls", **up.security) as consumer:
            async for record in consumer:
                found.append(record.value)
                if len(found) == 100:
                    return found
        return found

    assert asyncio.run(run()) == [b"%d" % number for number in range(100)]


def test_blocking_clients_and_large_batches(up: Up) -> None:
    large = [bytes([number]) * 900_000 for number in range(20)]
    with sync.Admin(up.bootstrap, **up.security) as admin:
        admin.create_topic("blocking", partitions=1)
    with sync.Producer(up.bootstrap, **up.security) as producer:
        for value in large:
            producer.send("blocking", value)
    with sync.Consumer(up.bootstrap, topics=["blocking"], **up.security) as consumer:
        found: list[bytes | None] = []
        while len(found) < len(large):
            found += [record.value for record in consumer.poll(timeout_ms=5_000)]
    assert found == large


def test_librdkafka_produces_and_consumes(up: Up) -> None:
    with sync.Admin(up.bootstrap, **up.security) as admin:
        admin.create_topic("librdkafka", partitions=1)
    producer = confluent_kafka.Producer(up.of_librdkafka)
    for number in range(100):
        producer.produce("librdkafka", b"%d" % number)
    assert producer.flush(20) == 0
    consumer = confluent_kafka.Consumer({**up.of_librdkafka, "group.id": "tls", "auto.offset.reset": "earliest"})
    consumer.subscribe(["librdkafka"])
    try:
        messages = consumer.consume(100, timeout=60)
    finally:
        consumer.close()
    assert [message.value() for message in messages] == [b"%d" % number for number in range(100)]


def refused(up: Up, bootstrap: str, **security: Any) -> str:
    async def run() -> str:
        with pytest.raises(MinibrokerError) as error:
            async with Admin(bootstrap, **security):
                pass
        return str(error.value)

    return asyncio.run(run())


def test_each_mistake_is_reported_with_its_remedy(up: Up, tmp_path: Path) -> None:
    stranger = str(Certificates(tmp_path).authority)
    assert 'security_protocol="SSL"' in refused(up, up.bootstrap)
    assert "leave security_protocol" in refused(up, up.plaintext, **up.security)
    assert "as ssl_cafile" in refused(up, up.bootstrap, security_protocol="SSL", ssl_cafile=stranger)
    assert "it speaks HTTP" in refused(up, f"127.0.0.1:{up.metrics_port}", **up.security)
    until_true(lambda: "it sent plaintext" in up.log())
    until_true(lambda: "a TLS handshake, but this listener is PLAINTEXT" in up.log())


def test_metrics_are_served_by_https(up: Up) -> None:
    context = ssl.create_default_context(cafile=str(up.certificates.authority))
    with urllib.request.urlopen(f"https://127.0.0.1:{up.metrics_port}/metrics", context=context) as answer:
        text = answer.read().decode()
    assert re.search(r"^minibroker_network_handshakes_failed_total [0-9.]+$", text, re.MULTILINE)


def serial_number(up: Up) -> str:
    context = ssl.create_default_context(cafile=str(up.certificates.authority))
    with (
        socket.create_connection(("127.0.0.1", up.port)) as below,
        context.wrap_socket(below, server_hostname="127.0.0.1") as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_a_renewed_certificate_is_used_without_a_restart(up: Up) -> None:
    before = serial_number(up)
    good = up.certificates.broker.read_bytes()
    up.certificates.broker.write_bytes(good[: len(good) // 2])
    until_true(lambda: "The previous certificates stay in use" in up.log())
    assert serial_number(up) == before
    up.certificates.renew()
    until_true(lambda: serial_number(up) != before)


def test_commands_and_the_health_check_use_tls(up: Up, tmp_path: Path) -> None:
    with sync.Admin(up.bootstrap, **up.security) as admin:
        admin.create_topic("commands", partitions=1)
    config = tmp_path / "client.properties"
    config.write_text(f"# for commands\nsecurity.protocol=SSL\nssl.truststore.location={up.certificates.authority}\n")
    minibroker = [sys.executable, "-m", "minibroker", "--command-config", str(config)]
    subprocess.run([*minibroker, "produce", "commands", "-b", up.bootstrap], input=b"a\nb\n", check=True, timeout=120)
    consume = [*minibroker, "consume", "commands", "-b", up.bootstrap, "--exit-at-end"]
    found = subprocess.run(consume, check=True, capture_output=True, timeout=120).stdout
    assert found.split() == [b"a", b"b"]
    health = [sys.executable, "-m", "minibroker.deploy.observing.healthcheck", str(up.port)]
    assert subprocess.run([*health, "ssl"], check=False, timeout=120).returncode == 0
    own = str(up.certificates.client("health"))
    assert subprocess.run([*health, "ssl", own], check=False, timeout=120).returncode == 0
    assert subprocess.run(health, check=False, timeout=120).returncode == 1
