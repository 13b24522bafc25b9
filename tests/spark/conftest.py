"""One Spark and one cluster of three brokers for all tests of this directory; each test has topics of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.spark_jobs.session import spark_session
from tests.spark.logs import Logs

ROOT = Path(__file__).parents[2]

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, 512 MB."""
    # Spark's workers must find the tests' own data sources too.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT) if before is None else f"{ROOT}{os.pathsep}{before}"
    directory = tmp_path_factory.mktemp("spark")
    session = spark_session(
        "tests",
        master="local[2]",
        settings={
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(directory),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
        },
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory, zookeeper_address: str) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster") / "data")
    try:
        settings = {
            "zookeeper.session.timeout.ms": "10000",
            # Tests date records to 1970. Leaders would delete them as too old, five minutes after they start, in the
            # middle of a test.
            "log.retention.ms": "-1",
        }
        cluster.up(3, free_ports(3)[0], f"{zookeeper_address}/spark", settings)
        yield cluster
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)


@pytest.fixture
def logs(spark: SparkSession, spark_cluster: LocalCluster) -> Logs:
    return Logs(spark, spark_cluster.bootstrap(), f"t{next(_numbers)}")
