"""`docker-compose --profile spark`: the ingest job's Parquet files are exact, also when a worker's container is killed.

Run by `make spark-compose-test`, which builds the images first, Spark's (1.2 GB) among them. Fails without a
docker engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.scenarios.stages.compose import BROKERS, run
from tests.compose.containers import Containers, wait_until

TOPIC = "orders"
"""The topic that the profile ingests without INGEST_TOPICS."""
PARTITIONS = 3
RECORDS = 3_000
PATIENCE_S = 240.0

READ = """
import json
import pyarrow.parquet
from minibroker.spark_jobs.tables.manifests import Table

table = Table("ingested")
found = [pyarrow.parquet.ParquetFile(path).read(["partition", "offset", "value"]).to_pylist() for path in table.files()]
rows = [[row["partition"], row["offset"], row["value"].decode()] for rows in found for row in rows]
print(json.dumps({"rows": rows, "batches": table.manifests()[-1].last_batch + 1 if table.manifests() else 0}))
"""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class SparkContainers(Containers):
    """The cluster with the profile's services."""

    def down(self) -> None:
        self.compose("--profile", "spark", "down", "--volumes", "--timeout", "30")

    def start_spark(self) -> None:
        self.compose("--profile", "spark", "up", "--detach", "--no-build")

    def ingested(self) -> dict[str, Any]:
        """Read the files in the job's volume without Spark."""
        found: dict[str, Any] = json.loads(run("docker", "exec", self._existing("ingest"), "python3", "-c", READ))
        return found

    def has(self, rows: int) -> bool:
        assert self.state("ingest")["Running"], "the ingest job has ended"
        return len(self.ingested()["rows"]) >= rows


@pytest.fixture
def containers(request: pytest.FixtureRequest) -> Iterator[SparkContainers]:
    cluster = SparkContainers()
    cluster.down()  # remains of an interrupted run
    try:
        cluster.up()
        yield cluster
        if request.session.testsfailed:
            tell(cluster.compose("--profile", "spark", "logs", "--no-color")[-20_000:])
    finally:
        cluster.down()


async def create(cluster: Containers) -> None:
    async with Admin(cluster.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=len(BROKERS))


async def produce(cluster: Containers, first: int) -> None:
    async with Producer(cluster.bootstrap, acks="all") as producer:
        for number in range(first, first + RECORDS):
            producer.send(TOPIC, b"%d" % number, partition=number % PARTITIONS)
            await producer.drain()


@pytest.mark.timeout(900)
def test_ingestion_goes_on_when_the_container_of_a_worker_is_killed(containers: SparkContainers) -> None:
    began_s = time.monotonic()
    wait_until(lambda: len(containers.view().brokers) == len(BROKERS), "all brokers are registered", PATIENCE_S)
    asyncio.run(create(containers))
    asyncio.run(produce(containers, 0))
    containers.start_spark()
    wait_until(lambda: containers.has(RECORDS), "the first records are in Parquet files", PATIENCE_S)
    tell(f"\ningested {RECORDS} records {time.monotonic() - began_s:.1f} s after the brokers were started")
    asyncio.run(produce(containers, RECORDS))
    killed_s = time.monotonic()
    containers.kill("spark-worker-1")
    asyncio.run(produce(containers, 2 * RECORDS))
    wait_until(lambda: containers.has(3 * RECORDS), "the records after the kill are in Parquet files", PATIENCE_S)
    tell(f"caught up {time.monotonic() - killed_s:.1f} s after spark-worker-1 was killed")
    containers.start("spark-worker-1")
    asyncio.run(produce(containers, 3 * RECORDS))
    wait_until(lambda: containers.has(4 * RECORDS), "the records after the restart are in Parquet files", PATIENCE_S)
    found = containers.ingested()
    expected = [[number % PARTITIONS, number // PARTITIONS, str(number)] for number in range(4 * RECORDS)]
    assert sorted(found["rows"]) == sorted(expected)
    tell(f"{len(found['rows'])} records in {found['batches']} batches, each once")
