"""Three brokers that talk by TLS among themselves, while their leaders are killed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import confluent_kafka
import pytest

from minibroker import sync
from minibroker.protocol.errors import MinibrokerError
from minibroker.testing import SyncLocalCluster
from tests.waiting import until_true


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncLocalCluster]:
    with SyncLocalCluster(topics=["orders"], tls=True, settings={"ssl.client.auth": "required"}) as cluster:
        yield cluster


def of_librdkafka(cluster: SyncLocalCluster) -> dict[str, str]:
    alice = str(cluster.certificates.client("alice"))
    return {
        "bootstrap.servers": cluster.ssl_bootstrap_servers,
        "security.protocol": "SSL",
        "ssl.ca.location": str(cluster.certificates.authority),
        "ssl.certificate.location": alice,
        "ssl.key.location": alice,
    }


def logs(cluster: SyncLocalCluster) -> str:
    return "".join(cluster.log_of(broker).read_text() for broker in (1, 2, 3))


def test_nothing_is_lost_when_the_leader_is_killed_and_its_crash_is_detected_at_once(
    cluster: SyncLocalCluster,
) -> None:
    sent: list[bytes] = []
    theirs = confluent_kafka.Producer({**of_librdkafka(cluster), "enable.idempotence": True})
    with sync.Producer(cluster.ssl_bootstrap_servers, **cluster.security("alice")) as producer:
        for number in range(400):
            if number == 200:
                cluster.kill("leader:orders-0")
                began = time.monotonic()
            value = b"%d" % number
            producer.send("orders", value).result()
            if number == 200:
                gap = time.monotonic() - began
            theirs.produce("orders", b"theirs-" + value)
            sent += [value, b"theirs-" + value]
        assert theirs.flush(30) == 0
    assert gap < 3.0
    with sync.Consumer(cluster.ssl_bootstrap_servers, topics=["orders"], **cluster.security("alice")) as all:
        found: list[bytes | None] = []
        until = time.monotonic() + 30
        while len(found) < len(sent) and time.monotonic() < until:
            found += [record.value for record in all.poll(timeout_ms=1_000)]
    assert sorted(value for value in found if value is not None) == sorted(sent)
    assert re.search("is suspected to have crashed: it refuses connections", logs(cluster))


def test_no_client_is_accepted_without_a_certificate(cluster: SyncLocalCluster) -> None:
    cluster.restore()
    with (
        pytest.raises(MinibrokerError, match="asks for one"),
        sync.Admin(cluster.ssl_bootstrap_servers, **cluster.security()),
    ):
        pass
    until_true(lambda: "it sent no certificate" in logs(cluster))
