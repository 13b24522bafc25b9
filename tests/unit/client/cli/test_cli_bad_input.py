"""Mistyped commands: one line with the remedy, and the right exit code, without a cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from minibroker import application
from minibroker.client.cli.terminal.output import run_app

NOBODY = ["--bootstrap", "127.0.0.1:1"]


@pytest.mark.usefixtures("short_patience")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["produse"], 2, "No such command"),
        (["consume", "orders", "--form", "end"], 2, "No such option"),
        (["consume"], 2, "Missing argument 'TOPIC'"),
        (["consume", "orders", "or/ders"], 2, "only a-z A-Z 0-9 . _ - are legal"),
        (["consume", "orders", "--from", "yesterday"], 2, "an offset such as 42"),
        (["consume", "orders", "--from", "-0"], 2, "-10 for the last 10 records"),
        (["consume", "orders", "-o", "2026-11-22"], 2, "a time such as @2026-11-22T10:30:00Z"),
        (["consume", "orders", "--output", "%x"], 2, "%x in '%x' is not a token"),
        (["consume", "orders", "--output", ""], 2, "is not json, msgpack, value or a format"),
        (["consume", "orders", "--partition", "-1"], 2, "greater than or equal to 0"),
        (["consume", "orders", "--count", "0"], 2, "greater than or equal to 1"),
        (["consume", "or/ders"], 2, "only a-z A-Z 0-9 . _ - are legal"),
        (["consume", "orders", "--bootstrap", "localhost"], 2, 'give brokers as "host:port"'),
        (["produce", "orders", "--acks", "2"], 2, "'all', '1', '0'"),
        (["produce", "orders", "--compression", "brotli"], 2, "'zstd'"),
        (["produce", "orders", "--key-separator", "", *NOBODY], 2, "--key-separator is empty"),
        (["produce", "orders", "--header", "trace", *NOBODY], 2, "--header 'trace': give NAME=VALUE"),
        (["produce", "orders", "-H", "=1", *NOBODY], 2, "give NAME=VALUE"),
        (["produce", "orders", "-H", "\udcff=1", *NOBODY], 2, "a name must be UTF-8"),
        (["produce", "orders", "-p", "-1", *NOBODY], 2, "greater than or equal to 0"),
        (["produce", "orders", "--timestamp", "yesterday", *NOBODY], 2, "such as 2026-11-22T10:30:00Z"),
        (["produce", "orders", "--input", "csv", *NOBODY], 2, "'lines', 'json', 'msgpack'"),
        (["produce", "orders", "--input", "json", "-k", "k", *NOBODY], 2, "--key applies only to lines"),
        (["produce", "orders", "--input", "msgpack", "--tombstone", *NOBODY], 2, "--tombstone applies only to lines"),
        (
            ["produce", "orders", "--file", "/no/such/file", *NOBODY],
            1,
            "/no/such/file: No such file or directory; check the path",
        ),
        (["topics", "create", "or ders"], 2, "only a-z A-Z 0-9 . _ - are legal"),
        (["topics", "create", "x" * 250], 2, "the limit is 249"),
        (["topics", "create", "..", *NOBODY], 2, "would name a directory"),
        (["topics", "create", "orders", "--partitions", "0"], 2, "greater than or equal to 1"),
        (["topics", "create", "orders", "--config", "retention.ms"], 2, "give NAME=VALUE"),
        (
            ["topics", "alter", "orders", *NOBODY],
            2,
            "give --partitions N. To change settings, use `minibroker configs",
        ),
        (
            ["configs", "alter", "--topic", "a", "--set", "b=1", "--delete", "b", *NOBODY],
            2,
            "b is changed 2 times",
        ),
        (["configs", "alter", "--topic", "a", "--set", "b=1", "--set", "b=2", *NOBODY], 2, "give each setting once"),
        (["topics", "list", *NOBODY], 1, "Connection refused"),
        (
            ["topics", "alter", "orders", "--config", "retention.ms=1"],
            2,
            "`minibroker configs alter --topic orders --set retention.ms=1`",
        ),
        (["topics", "delete-records", "orders", *NOBODY], 2, "--before"),
        (["topics", "delete-records", "orders", "--before", "-1", *NOBODY], 2, "an offset such as 42, or end"),
        (["topics", "delete-records", "or ders", "--before", "end", *NOBODY], 2, "only a-z A-Z 0-9 . _ - are legal"),
        (["bench", "produce", "--size", "7"], 2, "greater than or equal to 8"),
        (["bench", "produce", "--partitions", "0"], 2, "greater than or equal to 1"),
        (["bench", "produce", "a/b"], 2, "only a-z A-Z 0-9 . _ - are legal"),
        (["bench", "consume", "--by", "bytes"], 2, "'batches', 'records'"),
        (["bench", "latency", "--rate", "0"], 2, "greater than or equal to 1"),
        (["bench", "latency", "--acks", "2"], 2, "'all', '1', '0'"),
        (["bench", "latency", *NOBODY], 1, "Connection refused"),
        (["bench", "failover", "--who", "broker"], 2, "'leader', 'controller', 'both', 'zookeeper', 'all'"),
        (["bench", "failover", "--rounds", "0"], 2, "greater than or equal to 1"),
        (
            ["kill", "Broker1"],
            2,
            "leader:TOPIC-PARTITION, follower:TOPIC-PARTITION, coordinator:GROUP, transactions:ID, all or zookeeper",
        ),
        (["kill", "leader:orders"], 2, "leader:orders-0"),
        (["kill", "coordinator:"], 2, "coordinator:billing"),
        (["up", "--brokers", "0"], 2, "greater than or equal to 1"),
        (["up", "--base-port", "65536"], 2, "less than or equal to 65535"),
        (["up", "--override", "num.partitions"], 2, "--override 'num.partitions': give NAME=VALUE"),
        (["up", "--override", "log.dirs=/tmp"], 2, "--override log.dirs: it is set by `up`; give --data"),
        (["status", *NOBODY], 1, "no broker answers at 127.0.0.1:1: connecting to 127.0.0.1:1: Connection refused"),
        (["status", "--bootstrap", "localhost:port"], 2, "from 1 to 65535"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy_and_the_right_exit_code(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err


@pytest.mark.slow
def test_a_cluster_of_which_only_a_broker_that_hangs_is_named_is_not_said_to_be_down(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        at = f"127.0.0.1:{hangs.getsockname()[1]}"
        assert run_app(application(), ["status", "--bootstrap", at]) == 3
    told = capsys.readouterr().err
    assert f"no broker answers at {at}: {at} accepts connections, but gives no answer within 2 s. It hangs" in told
    assert "start" not in told


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["down"],
        ["kill", "1"],
        ["start", "all"],
        ["logs", "1"],
        ["topics", "list"],
        ["bench", "produce"],
        ["bench", "failover"],
    ],
)
def test_without_a_cluster_every_command_says_how_to_get_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (tmp_path, tmp_path / "not" / "there"):
        assert run_app(application(), [*command, "--data", str(directory)]) == 1
        assert "minibroker up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log_dirs", "said"),
    [
        (
            '["any", "/x"]',
            "orders-0 with log_dirs '/x': the broker chooses the directory: write \"any\", or leave",
        ),
        ('["any"]', 'orders-0 with 1 log_dirs for 2 replicas: write "any" for each of the replicas, or leave'),
        ("[]", "orders-0 with 0 log_dirs for 2 replicas"),
        ('"any"', "is not a list of reassignments"),
    ],
)
@pytest.mark.parametrize("command", ["execute", "verify", "cancel"])
def test_a_log_dir_in_a_reassignment_can_only_be_any(
    command: str, log_dirs: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), ["reassign", command, plan(tmp_path, log_dirs), *NOBODY]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("log_dirs", ['["any", "any"]', pytest.param("null", marks=pytest.mark.slow)])
def test_a_reassignment_may_say_any_log_dir_or_none(
    log_dirs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), ["reassign", "execute", plan(tmp_path, log_dirs), *NOBODY]) == 1
    assert "Connection refused" in capsys.readouterr().err  # so the request was sent once a broker answered


def plan(directory: Path, log_dirs: str) -> str:
    file = directory / "plan.json"
    file.write_text(
        f'{{"partitions": [{{"topic": "orders", "partition": 0, "replicas": [1, 2], "log_dirs": {log_dirs}}}]}}'
    )
    return str(file)


def test_a_damaged_cluster_file_is_reported_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.json").write_text("{")
    for command in (["status"], ["topics", "list"]):
        assert run_app(application(), [*command, "--data", str(tmp_path)]) == 1
        assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["topics"], ["bench"]])
def test_a_group_without_a_command_prints_its_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(application(), command) == 2
    printed = capsys.readouterr()
    assert "Commands" in printed.out
    assert printed.err == ""
