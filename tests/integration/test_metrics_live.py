"""The metrics of real brokers, scraped before and after traffic; and `status --watch`, with and without a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import wait_until
from minibroker.deploy.local.who import BrokerId
from minibroker.deploy.simulator.cluster import NO_OFFSETS_TOPIC
from minibroker.protocol.model import TopicPartition
from tests import monitoring

PATIENCE_S = 90.0
RECORDS = 2_000
MESSAGES_IN = "kafka_server_brokertopicmetrics_messagesin_total"
UNDER_REPLICATED = "kafka_server_replicamanager_underreplicatedpartitions"
Page = dict[str, float]


def scrape_text(cluster: LocalCluster, broker_id: int) -> str:
    port = cluster.file().broker(broker_id).metrics_port
    with urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=PATIENCE_S) as response:
        text: str = response.read().decode()
        return text


def scrape(cluster: LocalCluster, broker_id: int) -> Page:
    """Every metric, summed over its labels."""
    page: Page = {}
    for family in text_string_to_metric_families(scrape_text(cluster, broker_id)):
        for sample in family.samples:
            page[sample.name] = page.get(sample.name, 0) + sample.value
    return page


def scrape_all(cluster: LocalCluster, *broker_ids: int) -> Page:
    """Every metric, summed over the brokers."""
    pages = [scrape(cluster, broker_id) for broker_id in broker_ids]
    names = dict.fromkeys(name for page in pages for name in page)
    return {name: sum(page.get(name, 0) for page in pages) for name in names}


def is_healthy(cluster: LocalCluster) -> bool:
    return not cluster.status().problems()


async def produce(bootstrap: str) -> None:
    async with Admin(bootstrap) as admin:
        await admin.create_topic("orders", partitions=3, replication_factor=3)
    async with Producer(bootstrap) as producer:
        for number in range(RECORDS):
            producer.send("orders", b"%d" % number)
        await producer.flush()


@pytest.mark.slow
def test_metrics_show_traffic_and_a_killed_broker(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(3, NO_OFFSETS_TOPIC)
    assert wait_until(lambda: is_healthy(cluster), PATIENCE_S), cluster.status()
    before = scrape_all(cluster, 1, 2, 3)
    assert before.get(MESSAGES_IN, 0) == 0
    assert before["kafka_controller_kafkacontroller_activecontrollercount"] == 1
    assert before["kafka_controller_kafkacontroller_activebrokercount"] == 3

    asyncio.run(produce(cluster.bootstrap()))
    after = scrape_all(cluster, 1, 2, 3)
    assert after[MESSAGES_IN] == RECORDS
    assert after["kafka_log_log_logendoffset"] >= RECORDS
    assert after["kafka_server_replicamanager_partitioncount"] == 9
    assert after["kafka_server_replicamanager_leadercount"] == 3
    assert (
        after["kafka_network_requestmetrics_totaltimems_sum"] > before["kafka_network_requestmetrics_totaltimems_sum"]
    )
    lag_count = "minibroker_eventloop_lag_seconds_count"
    assert wait_until(lambda: scrape_all(cluster, 1, 2, 3)[lag_count] > before[lag_count], PATIENCE_S)
    # The last records are acknowledged when every follower of the ISR has them, so both have fetched them all.
    replicated = after["kafka_server_brokertopicmetrics_replicationbytesin_total"]
    assert replicated == 2 * after["kafka_server_brokertopicmetrics_bytesin_total"]

    assert wait_until(
        lambda: scrape_all(cluster, 1, 2, 3)["kafka_server_replicafetchermanager_maxlag"] == 0, PATIENCE_S
    )
    assert after["process_resident_memory_bytes"] > 3 * 20_000_000
    assert after["process_open_fds"] > 0

    cluster.kill(BrokerId(3))
    assert wait_until(lambda: scrape_all(cluster, 1, 2)[UNDER_REPLICATED] == 3, PATIENCE_S)
    assert scrape_all(cluster, 1, 2)["kafka_controller_kafkacontroller_offlinepartitionscount"] == 0


async def consume_some(bootstrap: str, records: int) -> dict[TopicPartition, int]:
    """Commit after this many records of the topic, and return the lag of each partition as administrators see it."""
    async with Consumer(bootstrap, topics=["orders"], group="billing") as consumer:
        async for _ in consumer:
            records -= 1
            if not records:
                break
        await consumer.commit()
    async with Admin(bootstrap) as admin:
        committed = await admin.list_group_offsets("billing")
        ends = await admin.list_offsets(dict.fromkeys(committed, "latest"))
    lags: dict[TopicPartition, int] = {}
    for partition, offset in committed.items():
        end = ends[partition]
        assert offset is not None
        assert end is not None
        lags[partition] = end.offset - offset.offset
    return lags


@pytest.mark.slow
def test_the_files_for_prometheus_and_grafana_use_metrics_that_brokers_have(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = local_cluster(3)
    asyncio.run(produce(cluster.bootstrap()))
    expected = asyncio.run(consume_some(cluster.bootstrap(), 1_500))
    text = "".join(scrape_text(cluster, broker_id) for broker_id in (1, 2, 3))
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    rules = {rule["record"]: rule["expr"] for rule in monitoring.rules() if "record" in rule}
    used = {name for expression in monitoring.expressions() for name in monitoring.metrics_of(expression)}
    assert used - names - rules.keys() == set()
    assert len(used) > 20
    buckets = [
        sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kafka_network_requestmetrics_totaltimems_bucket"
    ]
    assert {labels["request"] for labels in buckets if labels["le"] == "10"} >= {"Produce", "Fetch"}

    # What the recording rule computes.
    committed: dict[TopicPartition, float] = {}
    ends: dict[TopicPartition, float] = {}
    assert {"minibroker_partition_high_watermark", "minibroker_group_committed_offset"} == set(
        monitoring.metrics_of(rules["minibroker:group_partition_lag"])
    )
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            partition = TopicPartition(sample.labels.get("topic", ""), int(sample.labels.get("partition", -1)))
            if sample.name == "minibroker_partition_high_watermark":
                ends[partition] = sample.value
            elif sample.name == "minibroker_group_committed_offset" and sample.labels["group"] == "billing":
                committed[partition] = sample.value
    assert {partition: ends[partition] - offset for partition, offset in committed.items()} == expected
    assert sum(expected.values()) == RECORDS - 1_500


@pytest.mark.slow
def test_a_broker_survives_bad_http_and_half_open_connections(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(1)
    port = cluster.status().brokers[0].metrics_port
    assert port is not None
    idle = [HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S) for _ in range(5)]
    for connection in idle:
        connection.connect()
    for method, path, headers, status in (
        ("GET", "/", {}, 404),
        ("POST", "/metrics", {}, 405),
        ("GET", "/metrics", {"Cookie": "x" * 100_000}, 431),
        ("GET", "/metrics", {"X": "x" * 1_000}, 200),
    ):
        connection = HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)
        connection.request(method, path, body=b"x" * 50_000 if method == "POST" else None, headers=headers)
        assert connection.getresponse().status == status
        connection.close()
    for connection in idle:
        connection.close()
    assert scrape(cluster, 1)["kafka_server_kafkarequesthandlerpool_size"] == 9
    assert cluster.down() == [1, "zookeeper"]


# --- status --watch ------------------------------------------------------------------------------------------------


def start_watch(cluster: LocalCluster, *options: str, stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "minibroker", "status", "--watch", "--data", str(cluster.directory), *options],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )


@pytest.mark.slow
def test_watch_rewrites_changed_lines_on_a_terminal_and_ends_with_ctrl_c(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    cluster = local_cluster(2)
    assert wait_until(lambda: is_healthy(cluster), PATIENCE_S), cluster.status()
    screen, terminal = pty.openpty()
    shown = b""

    def read_until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(screen, 65_536)

    with start_watch(cluster, stdout=terminal) as watching:
        try:
            read_until(b"records: 0, 0/s")
            assert b"not running" not in shown
            cluster.kill(BrokerId(2))
            read_until(b"not running")
            read_until(b"`minibroker start 2 --data ")
            watching.send_signal(signal.SIGINT)
            assert watching.wait(PATIENCE_S) == 0
            assert b"\x1b[2K" in shown  # lines were cleared and rewritten
            assert watching.stderr is not None
            assert watching.stderr.read() == b""
        finally:
            watching.kill()
            os.close(terminal)
            os.close(screen)


@pytest.mark.slow
def test_watch_prints_lines_of_json_without_a_terminal(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(1)
    with start_watch(cluster, "--format", "json", stdout=subprocess.PIPE) as watching:
        try:
            assert watching.stdout is not None
            first, second = json.loads(watching.stdout.readline()), json.loads(watching.stdout.readline())
            assert first["brokers"][0]["id"] == second["brokers"][0]["id"] == 1
            assert second["records"] == 0
            watching.send_signal(signal.SIGINT)
            assert watching.wait(PATIENCE_S) == 0
        finally:
            watching.kill()
