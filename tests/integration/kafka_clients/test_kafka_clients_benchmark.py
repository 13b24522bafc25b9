"""The comparisons with Apache Kafka, with a second minibroker cluster in Kafka's place. No test judges speed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live_cluster import live_cluster

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 400


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_quick_comparison_measures_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with live_cluster(tmp_path / "kafka") as kafka:
        start = [sys.executable, "-m", "minibroker", "start", "{id}", "--data", str(kafka.directory)]
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "tests.benchmarks.bench_kafka_clients", "--quick"),
                *("--kafka", kafka.bootstrap(), "--kafka-start", shlex.join(start)),
                *("--data", str(tmp_path / "bench"), "--json", str(tmp_path / "table.json")),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert {row["what"].split(",")[0] for row in rows} == {
        "produce",
        "consume",
        "consume columns",
        "p50 at 5",
        "p99 at 5",
        "gap after SIGKILL of the leader",
    }
    assert {row["client"].split()[0] for row in rows} == {"confluent-kafka", "aiokafka"}
    assert all(float(row["ratio"]) > 0 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kafka", "table.json"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_quick_benchmark_of_transactions_measures_all_sizes_and_readers(tmp_path: Path) -> None:
    with live_cluster(tmp_path / "kafka") as kafka:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "tests.benchmarks.bench_transactions", "--quick", "--kafka", kafka.bootstrap()),
                *("--data", str(tmp_path / "bench"), "--json", str(tmp_path / "table.json")),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert {(row["client"], row["baseline"]) for row in rows} == {
        ("minibroker", "idempotent"),
        ("confluent-kafka", "Kafka"),
        ("minibroker", "read_uncommitted"),
        ("confluent-kafka", "read_uncommitted"),
    }
    sizes = {row["what"].split(",")[0] for row in rows if row["baseline"] == "idempotent"}
    assert len(sizes) == 3
    assert all(float(row["ratio"]) > 0 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kafka", "table.json"]
