"""`topics describe` of partitions with transactions, against scripted brokers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from minibroker import application
from minibroker.client.cli.terminal.output import DETAILS_WITHIN_MS, run_app
from minibroker.protocol.apis import DESCRIBE_LOG_DIRS, LIST_OFFSETS
from minibroker.protocol.records import ControlType, encode_batch
from tests.unit.client.scripted_broker import HANG
from tests.unit.client.scripted_thread import ClusterThread, scripted_cluster

Captured = pytest.CaptureFixture[str]


def begin_transaction(cluster: ClusterThread) -> None:
    """Write offset 0, and 1 in a transaction of producer 7."""
    log = cluster.cluster.log("orders")
    log.append(encode_batch([b"0"], base_timestamp=1))
    log.append(
        encode_batch([b"1"], base_timestamp=1, producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    )


def described(capsys: Captured, cluster: ClusterThread, *options: str) -> str:
    assert run_app(application(), ["topics", "describe", "orders", "--bootstrap", cluster.bootstrap, *options]) == 0
    return capsys.readouterr().out


def partitions(capsys: Captured, cluster: ClusterThread) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(described(capsys, cluster, "--format", "json"))["partitions"]
    return found


def test_describe_shows_the_last_stable_offset_where_it_is_behind(capsys: Captured) -> None:
    with scripted_cluster(partitions=2) as cluster:
        assert "last stable" not in described(capsys, cluster)
        cluster.do(lambda: begin_transaction(cluster))
        header, first, second, *_ = described(capsys, cluster).splitlines()
        assert "end  last stable  size" in header
        assert [line.split()[-3:-1] for line in (first, second)] == [["2", "1"], ["0", "0"]]
        offsets = [(p["end_offset"], p["last_stable_offset"]) for p in partitions(capsys, cluster)]
        assert offsets == [(2, 1), (0, 0)]
        cluster.do(lambda: cluster.cluster.log("orders").end_transaction(7, ControlType.COMMIT))
        assert "last stable" not in described(capsys, cluster)
        assert partitions(capsys, cluster)[0]["last_stable_offset"] == 3


def test_of_a_leader_that_hangs_the_details_are_unknown_and_the_rest_does_not_wait(capsys: Captured) -> None:
    questions = {LIST_OFFSETS, DESCRIBE_LOG_DIRS}
    with scripted_cluster(brokers=2, partitions=2) as cluster:
        rules = cluster.cluster.rules
        cluster.do(lambda: rules.append(lambda r: HANG if r.api in questions and r.node_id == 0 else None))
        began_s = time.monotonic()
        _, first, second, *_ = described(capsys, cluster).splitlines()
        assert time.monotonic() - began_s < 3 * DETAILS_WITHIN_MS / 1_000
    assert first.split()[-3:] == ["unknown"] * 3
    assert second.split()[-3:-1] == ["0", "0"]
