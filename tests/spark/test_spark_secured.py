"""The source, the sink and the jobs against `minibroker up --secure`, as a user with the ACLs of docs/spark.md."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from minibroker import sync
from minibroker.client.security import Security
from minibroker.spark_jobs.ingest import read_ingested
from minibroker.spark_jobs.jobs import Source, prepare_session, security_options
from minibroker.spark_jobs.lambda_ import run_lambda
from minibroker.spark_jobs.views.view_stream import read_view
from minibroker.testing import SyncLocalCluster
from tests.spark.exactness import differences

USER = "spark"
COUNT = 300
PREFIXED = ("--resource-pattern-type", "prefixed")
RIGHTS = [
    ("--operation", "Read", "--topic", "orders", "--topic", "copies"),
    ("--operation", "Write", "--topic", "copies"),
    ("--operation", "Write", "--transactional-id", "minibroker-spark-", *PREFIXED),
    ("--operation", "Read", "--group", "minibroker-spark-", *PREFIXED),
    ("--operation", "Read", "--topic", "__transaction_state"),
]


@pytest.fixture(scope="module")
def secured() -> Iterator[SyncLocalCluster]:
    with SyncLocalCluster(1, topics=["orders", "copies"], secure=True) as cluster:
        with sync.Producer(cluster.bootstrap_servers, **cluster.security()) as producer:
            for number in range(COUNT):
                producer.send("orders", b"line %d" % number)
        yield cluster


def minibroker(cluster: SyncLocalCluster, *arguments: str) -> str:
    """Run a command as the user `admin`."""
    command = [sys.executable, "-m", "minibroker", *arguments, "--data", str(cluster.directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


@pytest.fixture(scope="module")
def user(secured: SyncLocalCluster) -> Security:
    made = secured.add_user(USER)
    for given in RIGHTS:
        minibroker(secured, "acls", "add", "--allow-principal", f"User:{USER}", *given)
    return made


def explained(frame: DataFrame) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        frame.explain(extended=True)
    return shown.getvalue()


@pytest.mark.slow
def test_a_user_with_the_documented_acls_reads_streams_and_writes_exactly_once(
    spark: SparkSession, secured: SyncLocalCluster, user: Security, tmp_path: Path
) -> None:
    given = {"bootstrap.servers": secured.bootstrap_servers, **security_options(user)}
    rows = spark.read.format("minibroker").options(**given, subscribe="orders").load()
    assert rows.count() == COUNT
    password = user["sasl_plain_password"]
    assert password is not None
    assert password not in explained(rows)
    query = (
        spark.readStream.format("minibroker")
        .options(**given, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger=COUNT // 2)
        .load()
        .select("value")
        .writeStream.format("minibroker")
        .options(**given, topic="copies", exactlyOnce="true", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)
    assert query.exception() is None
    committed = given | {"subscribe": "copies", "isolation.level": "read_committed"}
    copies = spark.read.format("minibroker").options(**committed).load()
    assert differences(copies.select("value"), rows.select("value")) == (0, 0)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if password.encode() in path.read_bytes()]


@pytest.mark.slow
def test_the_layers_of_a_view_are_computed_over_tls(
    spark: SparkSession, secured: SyncLocalCluster, user: Security, tmp_path: Path
) -> None:
    prepare_session(spark)
    source = Source(secured.bootstrap_servers, ["orders"], security=security_options(user))
    run_lambda(spark, source, tmp_path, "v1")
    assert read_view(spark, tmp_path).selectExpr("sum(lines)").first() == (COUNT,)


@pytest.mark.slow
def test_a_job_takes_the_file_of_the_data_directory(
    spark: SparkSession, secured: SyncLocalCluster, tmp_path: Path
) -> None:
    job = ("spark", "ingest", "--once", "--topics", "orders", "--output", str(tmp_path / "out"), "--master", "local[1]")
    assert f"ingested {COUNT} records of orders" in minibroker(secured, *job, "--conf", "spark.driver.memory=512m")
    assert read_ingested(spark, tmp_path / "out").count() == COUNT
