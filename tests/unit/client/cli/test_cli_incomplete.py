"""Commands that succeed in part: the successful part is printed, and the exit code reports the failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
import typer

from minibroker.client.cli import brokers, topics
from minibroker.client.cli.records.consume import consume
from minibroker.client.cli.terminal.output import run_app
from minibroker.protocol.apis import DESCRIBE_CONFIGS, DESCRIBE_LOG_DIRS
from minibroker.protocol.records import encode_batch
from tests.unit.client.scripted_broker import DROP, HANG, ScriptedCluster


def ended(app: typer.Typer, prepare: Callable[[ScriptedCluster], None], *arguments: str) -> int:
    """Return the exit code of a command on a cluster of brokers 0 and 1."""

    async def main() -> int:
        async with asyncio.timeout(30), ScriptedCluster(2) as cluster:
            prepare(cluster)
            return await asyncio.to_thread(run_app, app, [*arguments, "--bootstrap", cluster.bootstrap])

    return asyncio.run(main())


def one_full_partition_and_an_empty_one(cluster: ScriptedCluster) -> None:
    cluster.add_topic("part", 2)
    cluster.log("part", 0).end = 100


DELETE = ("delete-records", "part", "--before", "50", "--yes")


def test_deleting_records_prints_each_partition_where_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(topics.app, one_full_partition_and_an_empty_one, *DELETE) == 1
    printed = capsys.readouterr()
    header, zero, one = printed.out.splitlines()
    assert header.split("  ")[0] == "partition"
    assert zero.split() == ["0", "50", "-"]
    assert one.split()[:2] == ["1", "-"]
    assert "OFFSET_OUT_OF_RANGE" in one
    assert printed.err.startswith("error: OFFSET_OUT_OF_RANGE: deleting records of part-1")
    assert printed.err.count("\n") == 1


def test_deleting_records_of_an_unknown_partition_prints_the_other_deletions_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ("-p", "0", "-p", "7", "--format", "json")
    assert ended(topics.app, one_full_partition_and_an_empty_one, *DELETE, *chosen) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert good == {"partition": 0, "low_watermark": 50, "error": None}
    assert (bad["partition"], bad["low_watermark"]) == (7, None)
    assert "its partitions are 0 to 1." in bad["error"]


@pytest.mark.slow
def test_describing_a_topic_shows_offline_replicas_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(topics.app, one_full_partition_and_an_empty_one, "describe", "part") == 0
    assert "offline" not in capsys.readouterr().out

    def one_is_offline(cluster: ScriptedCluster) -> None:
        one_full_partition_and_an_empty_one(cluster)
        cluster.log("part", 1).offline = [0]
        cluster.rules.append(lambda received: DROP if received.api is DESCRIBE_CONFIGS else None)

    assert ended(topics.app, one_is_offline, "describe", "part") == 0
    header, zero, one, settings = capsys.readouterr().out.splitlines()
    assert settings.startswith("settings: unknown")
    offline = header.split("  ").index("offline")
    assert [line.split()[offline] for line in (zero, one)] == ["-", "0"]


@pytest.mark.slow
def test_log_directories_of_the_brokers_that_answer_are_shown_and_errors_of_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minibroker.client.cli.command_admin.API_TIMEOUT_MS", 500)

    def one_is_silent(cluster: ScriptedCluster) -> None:
        one_full_partition_and_an_empty_one(cluster)
        cluster.rules.append(lambda got: HANG if got.api is DESCRIBE_LOG_DIRS and got.node_id == 1 else None)

    assert ended(brokers.app, one_is_silent, "log-dirs") == 1
    _, zero, one = capsys.readouterr().out.splitlines()
    assert zero.split()[:2] == ["0", "/data-0"]
    assert "unknown: " in one
    assert "no answer to DescribeLogDirs within" in one
    assert ended(brokers.app, one_is_silent, "log-dirs", "--format", "json") == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert (good["broker"], good["error"], bad["broker"], bad["log_dir"]) == (0, None, 1, None)


def test_log_directories_of_a_broker_that_is_away_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    def one_is_away(cluster: ScriptedCluster) -> None:
        one_full_partition_and_an_empty_one(cluster)
        cluster.log("part", 0).offline = [7]
        cluster.extra_replicas = [7]

    assert ended(brokers.app, one_is_away, "log-dirs") == 1
    away = capsys.readouterr().out.splitlines()[-1]
    assert away.split()[0] == "7"
    assert "unknown: it is not alive (those that are: 0, 1)" in away


def test_a_damaged_batch_is_an_error_that_says_where_to_go_on_at_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def damaged(cluster: ScriptedCluster) -> None:
        cluster.add_topic("part", 1)
        log = cluster.log("part")
        for _ in range(3):
            log.append(encode_batch([b"v"] * 10, base_timestamp=1_000, timestamp_deltas=list(range(10))))
        sound = log.batches[1]
        log.batches[1] = sound._replace(data=sound.data[:-1] + bytes([sound.data[-1] ^ 1]))

    app = typer.Typer()
    app.command()(consume)
    assert ended(app, damaged, "part", "--exit-at-end") == 1
    printed = capsys.readouterr()
    assert printed.out == "v\n" * 10
    assert "part-0 at offsets 10 to 19: " in printed.err
    assert "`minibroker consume part --partition 0 --from 20 --bootstrap" in printed.err
    assert "seek(" not in printed.err
