"""`minibroker bench` against a cluster of real processes, and the benchmark matrix. No test judges speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.processes import is_alive, wait_until
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell, start

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def minibroker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with running_shell(tmp_path_factory.mktemp("bench")) as shell:
        yield shell


@pytest.mark.slow
def test_produced_records_are_consumed_and_checked(minibroker: Shell) -> None:
    asked = ("--records", "500", "--size", "64", "--partitions", "4", "--replication-factor", "2", "--acks", "1")
    produced = minibroker("bench", "produce", "rows", *asked, "--format", "json").json()
    assert (produced["action"], produced["topic"], produced["records"]) == ("produce", "rows", 500)
    assert produced["records_per_second"] > 0
    described = minibroker("topics", "describe", "rows", "--format", "json").json()["partitions"]
    assert [len(partition["replicas"]) for partition in described] == [2, 2, 2, 2]
    # Another run into the same topic uses its own record numbers.
    minibroker.ok("bench", "produce", "rows", "--records", "300", "--compression", "zstd")
    minibroker.ok("bench", "produce", "rows", "--records", "200", "--by", "batches")
    for by in ("batches", "records"):
        consumed = minibroker("bench", "consume", "rows", "--by", by, "--format", "json").json()
        assert (consumed["records"], consumed["checked"]) == (1_000, 1_000)
    assert minibroker.ok("bench", "consume", "rows").splitlines()[0].split()[:3] == ["action", "topic", "records"]


@pytest.mark.slow
def test_a_topic_that_contradicts_the_options_is_refused_with_the_remedy(minibroker: Shell) -> None:
    minibroker.ok("bench", "produce", "fixed", "--records", "1", "--partitions", "2", "--replication-factor", "1")
    said = minibroker.refused(1, "bench", "produce", "fixed", "--partitions", "3")
    assert "the topic fixed has 2 partitions, but --partitions is 3" in said
    assert "minibroker topics delete fixed" in said
    said = minibroker.refused(1, "bench", "latency", "fixed", "--replication-factor", "3")
    assert "has 1 replicas, but --replication-factor is 3" in said


@pytest.mark.slow
def test_records_that_no_benchmark_sent_are_reported(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "mixed", "--partitions", "1")
    assert "the topic mixed is empty: run `minibroker bench produce mixed`" in minibroker.refused(
        1, "bench", "consume", "mixed"
    )
    minibroker.ok("produce", "mixed", stdin=b"a line of somebody else\n")
    assert minibroker("bench", "consume", "mixed", "--format", "json").json()["checked"] == 0
    minibroker.ok("bench", "produce", "mixed", "--records", "10")
    ended = minibroker("bench", "consume", "mixed", "--format", "json")
    assert (ended.code, json.loads(ended.out)["checked"]) == (1, 10)
    assert "the records of mixed differ from those that were sent: 1 altered" in ended.err


@pytest.mark.parametrize("acks", ["all", *(pytest.param(acks, marks=pytest.mark.slow) for acks in ("1", "0"))])
@pytest.mark.slow
def test_latency_covers_each_record_from_due_to_sent_to_acknowledged_to_consumed(acks: str, minibroker: Shell) -> None:
    arguments = ("bench", "latency", f"times-{acks}", "--rate", "1500", "--seconds", "0.2", "--acks", acks)
    measured = minibroker(*arguments, "--format", "json").json()
    assert measured["records"] == 300
    for name in ("sent_ms", "acknowledged_ms", "consumed_ms"):
        row = measured[name]
        assert list(row) == ["p50", "p99", "p99.9", "max"]
        assert 0 <= row["p50"] <= row["p99"] <= row["p99.9"] <= row["max"]
    assert measured["sent_ms"]["p50"] <= measured["acknowledged_ms"]["p50"]
    assert measured["sent_ms"]["p50"] <= measured["consumed_ms"]["p50"]
    printed = minibroker.ok(*arguments).splitlines()
    assert [line.split()[0] for line in printed] == ["ms", "sent", "acknowledged", "consumed", "300"]
    # Both runs and their warm-up are complete.
    assert minibroker("bench", "consume", f"times-{acks}", "--format", "json").json()["checked"] == 606


@pytest.mark.slow
def test_synced_topics_are_measured_beside_replicated_ones_and_deleted(minibroker: Shell) -> None:
    asked = ("--partitions", "1", "--partitions", "2", "--records", "500", "--seconds", "0.2", "--rounds", "1")
    rows = minibroker("bench", "durability", *asked, "--format", "json").json()
    assert [row["partitions"] for row in rows] == [1, 2]
    for row in rows:
        assert all(value > 0 for value in row.values())
    topics = minibroker("topics", "list", "--format", "json").json()
    assert not [topic["name"] for topic in topics if topic["name"].startswith(("bench-synced", "bench-replicated"))]


@pytest.mark.slow
def test_the_upkeep_of_logs_is_measured_on_a_cluster_that_is_removed_afterwards(minibroker: Shell) -> None:
    data = minibroker.directory / "upkeep"
    asked = ("--megabytes", "2", "--segments", "20", "--rounds", "1", "--seconds", "0.2", "--data", str(data))
    rows = {row["what"]: row for row in minibroker("bench", "storage", *asked, "--format", "json").json()}
    assert list(rows) == [
        "start after a kill",
        "recovery",
        "follower's catch-up",
        "compaction: read and written",
        "compaction: produce p99 meanwhile",
        "deleting 20 segments: longest ping",
    ]
    # With so little data, noise exceeds the difference from the baseline.
    by_difference = ("recovery", "follower's catch-up")
    assert all(row["figure"] > 0 for what, row in rows.items() if what not in by_difference)
    assert [what for what, row in rows.items() if row["ratio"] is not None] == [
        "start after a kill",
        "compaction: produce p99 meanwhile",
        "deleting 20 segments: longest ping",
    ]
    assert not any(is_alive(each) for each in LocalCluster(data).file().processes())


SLOW_VICTIMS = ("controller", "zookeeper")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["leader", *(pytest.param(who, marks=pytest.mark.slow) for who in SLOW_VICTIMS)])
def test_failover_kills_and_restarts_and_loses_no_record(who: str, minibroker: Shell) -> None:
    measured = minibroker("bench", "failover", "--who", who, "--rounds", "1", "--format", "json").json()
    assert [measured[name] for name in ("lost", "duplicated", "out_of_order", "altered")] == [0, 0, 0, 0]
    assert measured["read_back"] >= measured["acknowledged"] > 1_000
    (gap,) = measured["gaps"]
    assert len(gap["killed"]) == 1
    assert 0 < gap["gap_ms"] == measured["gap_max_ms"]
    minibroker.healthy()
    topics = minibroker("topics", "list", "--format", "json").json()
    assert not [topic["name"] for topic in topics if topic["name"].startswith("bench-failover")]


@pytest.mark.slow
def test_a_rolling_restart_restarts_every_broker_and_loses_no_record(minibroker: Shell) -> None:
    measured = minibroker("bench", "rolling-restart", "--format", "json").json()
    assert [measured[name] for name in ("lost", "duplicated", "out_of_order", "altered", "failed")] == [0] * 5
    assert [gap["restarted"] for gap in measured["gaps"]] == [[1], [2], [3]]
    assert 0 < max(gap["gap_ms"] for gap in measured["gaps"]) == measured["gap_max_ms"]


@pytest.mark.slow
def test_failover_needs_a_healthy_cluster(minibroker: Shell) -> None:
    minibroker.ok("stop", "2")
    try:
        assert "broker 2 is not running" in minibroker.refused(1, "bench", "failover")
    finally:
        minibroker.ok("start", "2")


@pytest.mark.slow
def test_an_interrupted_bench_of_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = start(["bench", "storage"], tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert wait_until(lambda: any(tmp_path.glob("minibroker-bench-*/broker-1/bench-recover-0")), PATIENCE_S)
        (directory,) = tmp_path.glob("minibroker-bench-*")
        cluster = LocalCluster(directory)
        processes = cluster.file().processes()
        bench.send_signal(signal.SIGTERM)
        bench.communicate(timeout=PATIENCE_S)
        left = [process for process in processes if is_alive(process)]
        if left:
            cluster.down(kill=True)
    finally:
        bench.kill()
        bench.wait(PATIENCE_S)
    assert len(processes) == 4
    assert left == []
    assert bench.returncode == 130
    assert list(tmp_path.iterdir()) == []


def matrix(data: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.matrix", "--quick", "--data", str(data), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute of benchmarks, on a machine that may be busy
def test_the_quick_matrix_measures_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = matrix(tmp_path / "bench", "--json", str(tmp_path / "tables.json"))
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    assert process.returncode == 0, err
    found = json.loads((tmp_path / "tables.json").read_text())
    names = [table["name"] for table in found["tables"]]
    assert names == ["produce", "consume", "latency", "failover", "control-plane", "timing-wheel"]
    assert all(f"\n{name}: " in out for name in names)
    for table in found["tables"]:
        assert table["rows"]
        assert any("1.00x" in row.values() for row in table["rows"]) or table["name"] == "failover"
    assert [path.name for path in tmp_path.iterdir()] == ["tables.json"]


@pytest.mark.slow
def test_an_interrupted_matrix_leaves_nothing_behind(tmp_path: Path) -> None:
    process = matrix(tmp_path / "bench", "--group", "failover")
    try:
        assert process.stderr is not None
        assert "failover" in process.stderr.readline()
        processes = LocalCluster(tmp_path / "bench" / "cluster").file().processes()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    assert process.returncode == 130
    assert len(processes) == 4
    assert not any(is_alive(each) for each in processes)
    assert list(tmp_path.iterdir()) == []
