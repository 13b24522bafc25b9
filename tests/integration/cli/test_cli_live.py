"""The command line against a cluster of real processes.

The tests share one cluster of three brokers. The fixture `minibroker` waits until it is healthy.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minibroker.deploy.local import secret_file
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports, is_free
from minibroker.deploy.local.processes import is_alive, wait_until
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell, start


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with running_shell(tmp_path_factory.mktemp("shell"), {"zookeeper.session.timeout.ms": "6000"}) as shell:
        yield shell


@pytest.fixture
def minibroker(running: Shell) -> Shell:
    return running.healthy()


@pytest.fixture(scope="module")
def numbers(running: Shell) -> str:
    """A topic with one partition that holds the records 0 to 9, with the keys k0 to k9."""
    running.ok("topics", "create", "numbers", "--partitions", "1")
    lines = b"".join(b"k%d:%d\n" % (number, number) for number in range(10))
    running.ok("produce", "numbers", "--key-separator", ":", stdin=lines)
    return "numbers"


# --- Topics ---


def test_a_topic_is_created_listed_described_and_deleted(minibroker: Shell) -> None:
    created = minibroker.ok("topics", "create", "orders", "--partitions", "3", "--replication-factor", "2")
    assert created == "created orders: 3 partitions, replication factor 2\n"
    assert ["orders", "3", "2"] in [line.split() for line in minibroker.ok("topics", "list").splitlines()]
    listed = {topic["name"]: topic for topic in minibroker("topics", "list", "--format", "json").json()}
    assert (listed["orders"]["partitions"], listed["orders"]["replication_factor"]) == (3, 2)
    assert minibroker.ok("topics", "describe", "orders").splitlines()[0].split("  ")[0] == "partition"
    described = minibroker("topics", "describe", "orders", "--format", "json").json()
    every = [json.loads(line) for line in minibroker.ok("topics", "describe", "--format", "json").splitlines()]
    assert described in every
    assert every[-1]["name"] == "__consumer_offsets"
    assert "orders:" in minibroker.ok("topics", "describe").splitlines()
    assert [partition["partition"] for partition in described["partitions"]] == [0, 1, 2]
    for partition in described["partitions"]:
        assert partition["leader"] in partition["replicas"]
        assert sorted(partition["isr"]) == sorted(partition["replicas"])
    assert "there is a topic 'orders' already" in minibroker.refused(1, "topics", "create", "orders")
    assert "repeat with --yes" in minibroker.refused(1, "topics", "delete", "orders")
    assert minibroker("topics", "delete", "orders", "--yes", "--format", "json").json() == {"deleted": "orders"}
    assert "UNKNOWN_TOPIC_OR_PARTITION" in minibroker.refused(1, "topics", "describe", "orders")
    # The name can be used again.
    assert minibroker("topics", "create", "orders", "--format", "json").json()["replication_factor"] == 3
    minibroker.ok("topics", "delete", "orders", "--yes")


@pytest.mark.slow
def test_a_topic_gets_more_partitions_and_is_described_with_offsets_sizes_and_settings(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "growing", "--partitions", "1")
    assert minibroker.ok("topics", "describe", "growing").splitlines()[-1] == "settings: none of its own"
    minibroker.ok("configs", "alter", "--topic", "growing", "--set", "retention.ms=-1", "--set", "segment.ms=60000")
    minibroker.ok("produce", "growing", stdin=b"a\nb\nc\n")
    assert minibroker.ok("topics", "alter", "growing", "--partitions", "3") == "altered growing: 3 partitions\n"
    for partition in ("1", "2"):
        minibroker.ok("produce", "growing", "-p", partition, stdin=b"d\n")
    refusal = minibroker.refused(1, "topics", "alter", "growing", "--partitions", "2")
    assert "has 3 partitions already, and 2 are asked for" in refusal
    topic = minibroker("topics", "describe", "growing", "--format", "json").json()
    assert topic["configs"] == {"retention.ms": "-1", "segment.ms": "60000"}
    described = topic["partitions"]
    assert [(each["start_offset"], each["end_offset"]) for each in described] == [(0, 3), (0, 1), (0, 1)]
    for each in described:
        assert sorted(each["sizes"]) == sorted(map(str, each["replicas"]))
        assert min(each["sizes"].values()) > 0
    lines = minibroker.ok("topics", "describe", "growing").splitlines()
    assert lines[0].split()[-3:] == ["start", "end", "size"]
    assert lines[1].split()[-3:] == ["0", "3", str(described[0]["sizes"][str(described[0]["leader"])])]
    assert lines[-1] == "settings: retention.ms=-1 segment.ms=60000"
    minibroker.ok("topics", "delete", "growing", "--yes")


@pytest.mark.slow
def test_the_oldest_records_are_deleted_and_consumers_begin_after_them(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "trimmed", "--partitions", "2")
    for partition in ("0", "1"):
        minibroker.ok("produce", "trimmed", "-p", partition, stdin=b"a\nb\nc\n")
    command = ("topics", "delete-records", "trimmed")
    assert "repeat with --yes" in minibroker.refused(1, *command, "--before", "2")
    assert minibroker.ok(*command, "--before", "2", "-p", "1", "--yes").splitlines()[1:] == ["1          2"]
    left = minibroker.ok("consume", "trimmed", "--exit-at-end", "--output", "%p%s\n")
    assert sorted(left.split()) == ["0a", "0b", "0c", "1c"]
    ended = minibroker(*command, "--before", "end", "--yes", "--format", "json").json()
    assert [(each["partition"], each["low_watermark"], each["error"]) for each in ended] == [(0, 3, None), (1, 3, None)]
    partly = minibroker(*command, "--before", "3", "-p", "1", "-p", "2", "--yes")
    assert (partly.code, partly.out.splitlines()[1].split()) == (1, ["1", "3", "-"])
    assert "whose committed records end at 3" in minibroker.refused(1, *command, "--before", "4", "--yes")
    assert "trimmed has no partition 2: its partitions are 0 to 1." in minibroker.refused(
        1, *command, "--before", "1", "-p", "2", "--yes"
    )
    minibroker.ok("topics", "create", "table", "--partitions", "2", "--config", "cleanup.policy=compact")
    refusal = minibroker.refused(1, "topics", "delete-records", "table", "--before", "end", "--yes")
    assert "table-0, table-1: POLICY_VIOLATION: topic table has cleanup.policy=compact" in refusal


@pytest.mark.slow
def test_settings_of_a_topic_are_validated_and_stored(minibroker: Shell) -> None:
    assert "min.insync.replicas" in minibroker.refused(
        1, "topics", "create", "strict", "--config", "min.insync.replica=2"
    )
    minibroker.ok("topics", "create", "strict", "--config", "max.message.bytes=2000")
    too_large = minibroker.refused(1, "produce", "strict", stdin=b"x" * 3_000)
    assert "MESSAGE_TOO_LARGE" in too_large
    assert "max.message.bytes is 2000" in too_large
    minibroker.ok("produce", "strict", stdin=b"x" * 1_000)


# --- Produce ---


@pytest.mark.slow
def test_lines_of_standard_input_come_back_in_order(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "lines", "--partitions", "1")
    lines = "".join(f"line {number}\n" for number in range(5_000))
    said = minibroker.ok("produce", "lines", stdin=lines.encode())
    assert said.startswith("produced 5,000 records to lines in ")
    assert minibroker.ok("consume", "lines", "--exit-at-end") == lines


@pytest.mark.slow
def test_a_file_is_produced_with_keys_and_reported_as_json(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "keyed")
    (minibroker.directory / "input").write_bytes(b"a\tone\nb\ttwo\na\tthree\nno key")
    said = minibroker(
        "produce", "keyed", "--file", "input", "--key-separator", r"\t", "--acks", "1", "--format", "json"
    ).json()
    assert (said["topic"], said["records"]) == ("keyed", 4)
    printed = minibroker.ok("consume", "keyed", "--exit-at-end", "--output", r"%k=%s\n").splitlines()
    assert sorted(printed) == ["=no key", "a=one", "a=three", "b=two"]
    assert printed.index("a=one") < printed.index("a=three")


@pytest.mark.slow
def test_records_are_delivered_with_each_acks_and_each_compression(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "ways", "--partitions", "1")
    for acks in ("all", "1"):
        for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
            minibroker.ok("produce", "ways", "--acks", acks, "--compression", codec, stdin=f"{acks} {codec}\n".encode())
    printed = minibroker.ok("consume", "ways", "--exit-at-end").splitlines()
    assert len(printed) == 10
    assert printed[4] == "all zstd"
    minibroker.ok("produce", "ways", "--acks", "0", stdin=b"unheard of\n")
    assert minibroker.ok("consume", "ways", "--from", "10", "--count", "1") == "unheard of\n"


@pytest.mark.slow
def test_produce_sets_the_key_headers_partition_and_time_of_each_record(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "told", "--partitions", "3")
    options = ("-p", "1", "-k", "fixed", "--key-separator", ":", "-H", "trace=42", "-H", "sum=1=1", "-H", "none=")
    minibroker.ok("produce", "told", *options, "--timestamp", "2023-11-14T23:13:20+01:00", stdin=b"own:first\nsecond\n")
    assert minibroker.ok("consume", "told", "--count", "1", "--output", r"%h\n") == "trace=42,sum=1=1,none=\n"
    printed = minibroker.ok("consume", "told", "--exit-at-end", "--output", "json").splitlines()
    headers = [{"name": "trace", "value": "42"}, {"name": "sum", "value": "1=1"}, {"name": "none", "value": ""}]
    shared = {"topic": "told", "partition": 1, "timestamp": 1_700_000_000_000, "headers": headers}
    assert [json.loads(line) for line in printed] == [
        {**shared, "offset": 0, "key": "own", "value": "first"},
        {**shared, "offset": 1, "key": "fixed", "value": "second"},
    ]


@pytest.mark.slow
def test_produce_sends_empty_values_as_empty_or_as_tombstones(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "gone", "--partitions", "1")
    minibroker.ok("produce", "gone", "--key-separator", ":", stdin=b"a:\n\n")
    minibroker.ok("produce", "gone", "--key-separator", ":", "--tombstone", stdin=b"a:\n\n")
    records = map(json.loads, minibroker.ok("consume", "gone", "--exit-at-end", "--output", "json").splitlines())
    assert [(each["key"], each["value"]) for each in records] == [("a", ""), (None, ""), ("a", None), (None, None)]


@pytest.mark.slow
def test_produce_without_input_succeeds(minibroker: Shell, numbers: str) -> None:
    assert minibroker("produce", numbers, "--format", "json").json()["records"] == 0


@pytest.mark.slow
def test_lines_that_a_broker_refuses_are_listed(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "short", "--partitions", "1", "--config", "max.message.bytes=2000")
    lines = [b"x" * (3_000 if number % 2 == 0 else 10) + b"\n" for number in range(1, 15)]
    said = minibroker.refused(1, "produce", "short", stdin=b"".join(lines))
    assert "7 of 14 lines acknowledged, 7 not: lines 2, 4, 6, 8, 10 and 2 more: MESSAGE_TOO_LARGE" in said
    assert len(minibroker.ok("consume", "short", "--exit-at-end").splitlines()) == 7


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_produce_reports_how_many_lines_were_acknowledged(
    minibroker: Shell, number: signal.Signals, code: int
) -> None:
    topic = f"interrupted-{code}"
    assert minibroker.ok("topics", "create", topic, "--partitions", "1").startswith(f"created {topic}: 1 partition, ")
    producer = start(["produce", topic], minibroker.directory, stdin=subprocess.PIPE)
    try:
        assert producer.stdin is not None
        producer.stdin.write(b"one\ntwo\n")
        producer.stdin.flush()
        assert minibroker.ok("consume", topic, "--count", "2") == "one\ntwo\n"
        producer.send_signal(number)
        producer.wait(PATIENCE_S)
        out, err = producer.communicate(timeout=PATIENCE_S)
    finally:
        producer.kill()
        producer.wait()
    assert (producer.returncode, out, err) == (code, b"", b"interrupted: 2 of 2 lines acknowledged\n")


# --- Consume ---


@pytest.mark.slow
def test_consume_begins_at_the_given_place(minibroker: Shell, numbers: str) -> None:
    def printed(*arguments: str) -> list[str]:
        return minibroker.ok("consume", numbers, "--exit-at-end", *arguments).split()

    everything = [str(number) for number in range(10)]
    assert printed() == everything
    assert printed("--from", "beginning") == everything
    assert printed("--from", "7") == ["7", "8", "9"]
    assert printed("--from", "10") == []
    assert printed("--from", "end") == []
    assert printed("--from", "@0") == everything
    assert printed("--from", "@32503680000000") == []
    assert printed("--from", "@3000-01-01") == []
    assert printed("--from", "earliest") == everything
    assert printed("--from", "latest") == []
    assert printed("--from", "-3") == ["7", "8", "9"]
    assert printed("-o", "-1") == ["9"]
    assert printed("-o", "-11") == everything
    assert printed("--partition", "0", "--count", "3") == ["0", "1", "2"]


@pytest.mark.slow
def test_consume_from_a_time_begins_at_the_first_record_of_that_time_or_later(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "times", "--partitions", "1")
    minibroker.ok("produce", "times", stdin=b"early\n")
    after_early = time.time_ns() // 1_000_000 + 1
    while time.time_ns() // 1_000_000 <= after_early:
        pass
    minibroker.ok("produce", "times", stdin=b"late\n")
    assert minibroker.ok("consume", "times", "--from", f"@{after_early}", "--exit-at-end") == "late\n"


@pytest.mark.slow
def test_consume_reads_several_topics_and_the_last_records_of_each_partition(minibroker: Shell) -> None:
    for topic in ("left", "right"):
        minibroker.ok("topics", "create", topic, "--partitions", "2")
        for partition in ("0", "1"):
            lines = "".join(f"{topic} {partition} {number}\n" for number in range(3))
            minibroker.ok("produce", topic, "-p", partition, stdin=lines.encode())
    said = minibroker.ok("consume", "left", "right", "left", "--from", "-2", "--exit-at-end", "-f", r"%t %p %s\n")
    assert sorted(said.splitlines()) == [
        f"{topic} {partition} {topic} {partition} {number}"
        for topic in ("left", "right")
        for partition in (0, 1)
        for number in (1, 2)
    ]
    assert len(minibroker.ok("consume", "left", "right", "-p", "1", "--exit-at-end").splitlines()) == 6
    assert "right has no partition 2" in minibroker.refused(1, "consume", "right", "left", "-p", "1", "-p", "2")
    assert "nosuch" in minibroker.refused(1, "consume", "left", "nosuch")


@pytest.mark.slow
def test_consume_prints_values_json_or_a_format(minibroker: Shell, numbers: str) -> None:
    one = ("consume", numbers, "--from", "4", "--count", "1")
    assert minibroker.ok(*one) == "4\n"
    record = minibroker(*one, "--output", "json").json()
    timestamp = record.pop("timestamp")
    assert record == {"topic": "numbers", "partition": 0, "offset": 4, "key": "k4", "value": "4"}
    assert minibroker(*one, "--format", "json").json()["offset"] == 4
    assert minibroker.ok(*one, "--output", r"%t/%p/%o %k=%s@%T\n") == f"numbers/0/4 k4=4@{timestamp}\n"


@pytest.mark.slow
def test_consume_from_the_end_prints_what_comes_afterwards(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "news", "--partitions", "1")
    minibroker.ok("produce", "news", stdin=b"old\n")
    consumer = start(["consume", "news", "--from", "end", "--count", "1"], minibroker.directory)
    try:
        # The test cannot see when the consumer has found the end, so it sends records until the consumer has one.
        deadline = time.monotonic() + PATIENCE_S
        count = 0
        while consumer.poll() is None and time.monotonic() < deadline:
            minibroker.ok("produce", "news", stdin=b"new %d\n" % (count := count + 1))
        out, err = consumer.communicate(timeout=PATIENCE_S)
    finally:
        consumer.kill()
        consumer.wait()
    assert (consumer.returncode, err) == (0, b"")
    assert out.startswith(b"new ")


def test_consume_runs_until_it_is_interrupted(minibroker: Shell, numbers: str) -> None:
    consumer = start(["consume", numbers], minibroker.directory)
    try:
        assert consumer.stdout is not None
        assert [consumer.stdout.readline() for _ in range(10)][-1] == b"9\n"
        consumer.send_signal(signal.SIGINT)
        out, err = consumer.communicate(timeout=PATIENCE_S)
    finally:
        consumer.kill()
        consumer.wait()
    assert (consumer.returncode, out, err) == (130, b"", b"")


def test_consume_interrupted_at_a_terminal_reports_the_number_of_records(minibroker: Shell, numbers: str) -> None:
    terminal, stderr = pty.openpty()
    consumer = start(["consume", numbers], minibroker.directory, stderr=stderr)
    os.close(stderr)
    try:
        assert consumer.stdout is not None
        assert [consumer.stdout.readline() for _ in range(10)][-1] == b"9\n"
        consumer.send_signal(signal.SIGINT)
        consumer.communicate(timeout=PATIENCE_S)
        assert (consumer.returncode, os.read(terminal, 1_000)) == (130, b"10 records\r\n")
    finally:
        consumer.kill()
        consumer.wait()
        os.close(terminal)


@pytest.mark.slow
def test_consume_ends_silently_when_its_reader_closes_the_pipe(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "long", "--partitions", "1")
    minibroker.ok("produce", "long", stdin=b"x" * 99 + b"\n" + b"y\n" * 200_000)
    consumer = start(["consume", "long"], minibroker.directory)
    try:
        assert consumer.stdout is not None
        assert consumer.stderr is not None
        assert consumer.stdout.readline() == b"x" * 99 + b"\n"
        consumer.stdout.close()
        with consumer.stderr as stderr:
            assert stderr.read() == b""
        assert consumer.wait(PATIENCE_S) == 141
    finally:
        consumer.kill()
        consumer.wait()


@pytest.mark.parametrize("kind", ["msgpack", "json"])
@pytest.mark.slow
def test_a_topic_is_copied_to_another_one_through_a_pipe(minibroker: Shell, kind: str) -> None:
    for topic in (f"from-{kind}", f"into-{kind}"):
        minibroker.ok("topics", "create", topic, "--partitions", "3")
    lines = b"".join(b"k%d:\xff%d\n" % (number % 7, number) for number in range(5_000)) + b"gone:\n"
    minibroker.ok("produce", f"from-{kind}", "--key-separator", ":", "-Z", "-H", "n=1", "-H", "n=2", stdin=lines)
    consumer = start(["consume", f"from-{kind}", "--exit-at-end", "--output", kind], minibroker.directory)
    into = ["produce", f"into-{kind}", "--input", kind, "--format", "json"]
    producer = start(into, minibroker.directory, stdin=consumer.stdout)
    out, err = producer.communicate(timeout=PATIENCE_S)
    assert consumer.communicate(timeout=PATIENCE_S) == (b"", b"")
    assert (consumer.returncode, producer.returncode, err) == (0, 0, b"")
    assert json.loads(out)["records"] == 5_001

    def records(topic: str) -> list[str]:
        everything = (topic, "--exit-at-end", "--output", r"%p@%o %T %k=%s %h\n")
        process = start(["consume", *everything], minibroker.directory)
        return sorted(process.communicate(timeout=PATIENCE_S)[0].decode("latin-1").splitlines())

    assert len(records(f"from-{kind}")) == 5_001
    assert records(f"into-{kind}") == records(f"from-{kind}")


def test_a_full_output_device_is_an_error_of_one_line(minibroker: Shell, numbers: str) -> None:
    with open("/dev/full", "wb") as full:
        consumer = start(["consume", numbers, "--exit-at-end"], minibroker.directory, stdout=full)
        _, err = consumer.communicate(timeout=PATIENCE_S)
    assert (consumer.returncode, err) == (1, b"error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("command", "out"),
    [
        ("consume numbers --exit-at-end --count 2 <&-", "0\n1\n"),
        ("topics describe numbers <&- >&- 2>&-", ""),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in [
                ("consume numbers --exit-at-end >&-", ""),
                ("produce numbers --format json <&- >&-", ""),
                ("status >&-", ""),
                ("consume numbers --exit-at-end | head -n 1", "0\n"),
            ]
        ),
    ],
)
def test_commands_that_talk_to_brokers_need_no_standard_streams(
    command: str, out: str, minibroker: Shell, numbers: str
) -> None:
    ended = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -P -m minibroker {command}"],
        cwd=minibroker.directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, out, "")


# --- Mistakes that only a cluster can detect ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["consume", "nosuch"], "minibroker topics list"),
        (["consume", "numbers", "--partition", "1"], "numbers has no partition 1: its partitions are 0 to 0"),
        (["kill", "4"], "there is no broker 4 in this cluster: its ids are 1, 2, 3"),
        (["up", "--brokers", "2"], "is running already, but not with --brokers 2 (brokers: 3, base port "),
        *(
            pytest.param(*mistake, marks=pytest.mark.slow)
            for mistake in [
                (["produce", "nosuch"], "minibroker topics create"),
                (["topics", "describe", "nosuch"], "minibroker topics create"),
                (["topics", "delete", "nosuch", "--yes"], "minibroker topics list"),
                (["topics", "delete-records", "nosuch", "--before", "end", "--yes"], "minibroker topics list"),
                *(
                    ([*command, "numbres"], "Did you mean 'numbers'?")
                    for command in (
                        ["topics", "describe"],
                        ["topics", "alter", "--partitions", "9"],
                        ["configs", "alter", "--set", "retention.ms=1", "--topic"],
                        ["consume", "--group", "g"],
                        ["elect", "--preferred", "--topic"],
                        ["reassign", "generate", "--brokers", "1", "--topic"],
                        ["transactions", "find-hanging", "--topic"],
                    )
                ),
                (["elect", "--preferred", "--topic", "numbers", "-p", "7"], "its partitions are 0 to 0"),
                (["consume", "numbers", "--from", "11"], "the log of numbers-0 begins at 0 and ends at 10"),
                (["topics", "create", "wide", "--replication-factor", "4"], "the number of live brokers (1, 2, 3)"),
                (["stop", "leader:nosuch-0"], "no broker knows a partition nosuch-0"),
                (["pause", "leader:numbers-1"], "no broker knows a partition numbers-1"),
                (["start", "controller"], "is running already"),
                (["start", "2"], "broker 2 is running already"),
                (["start", "zookeeper"], "ZooKeeper is running already"),
                (["resume", "3"], "broker 3 is not paused"),
                (["logs", "4"], "its ids are 1, 2, 3"),
                (["down", "--delete-data"], "repeat with --yes"),
            ]
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(
    arguments: list[str], said: str, minibroker: Shell, numbers: str
) -> None:
    assert said in minibroker.refused(1, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_up_on_a_running_cluster_prints_its_bootstrap_list_and_changes_nothing(
    detach: list[str], minibroker: Shell
) -> None:
    before = minibroker.cluster.file()
    assert minibroker.ok("up", *detach) == before.bootstrap + "\n"
    said = minibroker("up", "--brokers", "3", *detach, "--format", "json").json()
    assert [broker["pid"] for broker in said["brokers"]] == [each["pid"] for each in minibroker.status()["brokers"]]
    assert minibroker.cluster.file() == before


@pytest.mark.slow
def test_up_on_a_partly_running_cluster_names_the_command_that_starts_the_rest(minibroker: Shell) -> None:
    minibroker.ok("stop", "2")
    said = minibroker.refused(1, "up", "--detach")
    assert "is in use by a running cluster (broker 1, broker 3, ZooKeeper)" in said
    assert "start what is missing with `minibroker start all`" in said
    assert minibroker.ok("start", "all") == "start: broker 2\n"


@pytest.mark.slow
def test_a_line_that_is_too_large_is_reported_and_the_lines_before_it_are_sent(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "large", "--partitions", "1")
    said = minibroker.refused(1, "produce", "large", stdin=b"small\n" + b"x" * 2_000_000 + b"\nnever sent\n")
    assert "1 of 2 lines acknowledged, 1 not: line 2: MESSAGE_TOO_LARGE" in said
    assert "No line after 2 was sent" in said
    assert "Send smaller records" in said
    assert minibroker.ok("consume", "large", "--exit-at-end") == "small\n"


@pytest.mark.slow
def test_produce_accepts_longer_lines_with_a_larger_limit_of_topic_and_command(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "longer", "--partitions", "1", "-c", "max.message.bytes=5000000")
    line = b"x" * 2_000_000 + b"\n"
    minibroker.ok("produce", "longer", "--max-request-size", "5000000", stdin=line)
    assert minibroker.ok("consume", "longer", "--exit-at-end") == line.decode()


@pytest.mark.slow
def test_log_directories_of_brokers_are_listed_with_their_replicas(minibroker: Shell, numbers: str) -> None:
    found = minibroker("brokers", "log-dirs", "2", "1", "--format", "json").json()
    assert [each["broker"] for each in found] == [2, 1]
    for each in found:
        assert each["log_dir"] == str(minibroker.cluster.directory / f"broker-{each['broker']}")
        assert each["error"] is None
        assert 0 < each["usable_bytes"] <= each["total_bytes"]
        assert (numbers, 0) in [(replica["topic"], replica["partition"]) for replica in each["replicas"]]
    assert minibroker.ok("brokers", "log-dirs").count("online") == 3


def broker(minibroker: Shell, log_dir: Path, broker_id: int, port: int, *, has_secret: bool = True) -> list[str]:
    connect = minibroker.cluster.file().zookeeper.connect
    settings = {
        "broker.id": str(broker_id),
        "listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(log_dir),
        "zookeeper.connect": connect,
        "zookeeper.digest.file": str(minibroker.cluster.directory / secret_file.DIGEST_FILE_NAME),
    }
    if has_secret:
        settings["broker.secret.file"] = str(minibroker.cluster.directory / secret_file.FILE_NAME)
    return ["-m", "minibroker.broker", *(text for pair in settings.items() for text in ("--override", "=".join(pair)))]


def refused_broker(arguments: list[str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.stderr.endswith(error + "\n")
    return error


@pytest.mark.slow
def test_a_broker_that_would_harm_the_cluster_does_not_start(minibroker: Shell, tmp_path: Path) -> None:
    (free,) = free_ports(1)
    taken_port = minibroker.cluster.file().broker(1).port
    own_data = minibroker.cluster.directory / "broker-2"
    assert "broker id 1 is taken" in refused_broker(broker(minibroker, tmp_path / "a", 1, free))
    assert "is in use by another broker process" in refused_broker(broker(minibroker, own_data, 4, free))
    stranger = refused_broker(broker(minibroker, tmp_path / "c", 4, free, has_secret=False))
    assert "give all brokers of a cluster the same broker.secret.file" in stranger
    in_use = refused_broker(broker(minibroker, tmp_path / "b", 4, taken_port))
    assert f"cannot listen on 127.0.0.1:{taken_port}" in in_use
    assert [each["id"] for each in minibroker.status()["brokers"] if each["alive"]] == [1, 2, 3]


# --- Faults and repairs ---


@pytest.mark.slow
def test_status_of_a_complete_cluster_is_healthy(minibroker: Shell, numbers: str) -> None:
    printed = minibroker.ok("status")
    assert "under-replicated partitions: none" in printed
    status = minibroker("status", "--format", "json").json()
    assert [(each["id"], each["alive"], each["pid"] > 0) for each in status["brokers"]] == [
        (1, True, True),
        (2, True, True),
        (3, True, True),
    ]
    assert status["controller"]["id"] in (1, 2, 3)
    assert status["controller"]["epoch"] >= 1
    assert status["zookeeper"]["alive"]
    assert (status["offline_partitions"], status["under_replicated_partitions"]) == ([], [])
    elsewhere = minibroker("status", "--bootstrap", minibroker.cluster.bootstrap(), "--format", "json").json()
    assert elsewhere["controller"] == status["controller"]


def unhealthy(minibroker: Shell) -> Any:
    ended = minibroker("status", "--format", "json")
    assert (ended.code, ended.err) == (4, ""), ended
    return json.loads(ended.out)


def test_a_killed_leader_is_replaced_and_clients_continue(minibroker: Shell, numbers: str) -> None:
    def leader() -> int:
        leader: int = minibroker("topics", "describe", numbers, "--format", "json").json()["partitions"][0]["leader"]
        return leader

    before = leader()
    assert minibroker("kill", f"leader:{numbers}-0", "--format", "json").json() == {"action": "kill", "ids": [before]}
    produced = minibroker("produce", numbers, stdin=b"10\n")
    assert produced.code == 0, produced  # if the failover takes 5 s, a warning says so
    # If the controller was killed, a broker may answer that hears of the new leader after the producer did.
    assert wait_until(lambda: leader() != before, PATIENCE_S)
    # Brokers that do not answer status in time leave the partitions unknown.
    assert wait_until(
        lambda: f"{numbers}-0" in (unhealthy(minibroker)["under_replicated_partitions"] or ()), PATIENCE_S
    )
    status = unhealthy(minibroker)
    assert status["brokers"][before - 1] == {**status["brokers"][before - 1], "alive": False, "pid": None}
    assert minibroker.ok("start", str(before)) == f"start: broker {before}\n"
    assert minibroker.ok("consume", numbers, "--from", "9", "--count", "2") == "9\n10\n"


@pytest.mark.slow
def test_a_paused_controller_is_replaced_when_its_session_expires(minibroker: Shell) -> None:
    before = minibroker.status()["controller"]
    (paused,) = minibroker("pause", "controller", "--format", "json").json()["ids"]
    assert paused == before["id"]
    assert unhealthy(minibroker)["brokers"][paused - 1]["paused"]
    assert wait_until(lambda: minibroker.status()["controller"]["epoch"] > before["epoch"], PATIENCE_S)
    assert minibroker.ok("resume", str(paused)) == f"resume: broker {paused}\n"
    assert minibroker.status()["controller"]["id"] != paused


@pytest.mark.slow
def test_a_stopped_broker_ends_cleanly_and_rejoins_after_a_start(minibroker: Shell) -> None:
    assert minibroker("stop", "controller", "--format", "json").json()["action"] == "stop"
    (gone,) = [each["id"] for each in unhealthy(minibroker)["brokers"] if not each["alive"]]
    assert f"broker {gone} is not running: `minibroker start {gone}`" in minibroker.refused(1, "kill", str(gone))
    assert minibroker("start", "all", "--format", "json").json() == {"action": "start", "ids": [gone]}
    assert minibroker.ok("start", "all") == "start: nothing to do\n"


@pytest.mark.slow
def test_the_cluster_survives_the_death_and_restart_of_zookeeper(minibroker: Shell, numbers: str) -> None:
    assert minibroker("kill", "zookeeper", "--format", "json").json() == {"action": "kill", "ids": ["zookeeper"]}
    assert not unhealthy(minibroker)["zookeeper"]["alive"]
    # An idempotent producer could need producer ids, and new blocks of them come from ZooKeeper.
    minibroker.ok("produce", numbers, "--acks", "1", stdin=b"without ZooKeeper\n")
    assert minibroker.ok("start", "zookeeper") == "start: ZooKeeper\n"


@pytest.mark.slow
def test_logs_are_printed_and_followed(minibroker: Shell) -> None:
    assert "ready broker.id=2 port=" in minibroker.ok("logs", "2")
    assert re.search(r"^broker 3: [\d:.T-]+ ready broker\.id=3", minibroker.ok("logs", "all"), re.MULTILINE)
    assert "binding to port" in minibroker.ok("logs", "zookeeper")
    lines = minibroker.ok("logs", "1", "--format", "json").splitlines()
    assert all(json.loads(line)["who"] == 1 for line in lines)
    following = start(["logs", "1", "--follow"], minibroker.directory)
    try:
        assert following.stdout is not None
        for _ in lines:
            following.stdout.readline()
        minibroker.ok("stop", "1")
        minibroker.ok("start", "1")
        # The test's timeout is the deadline.
        while b"ready broker.id=1" not in following.stdout.readline():
            assert following.poll() is None
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=PATIENCE_S)
    finally:
        following.kill()
        following.wait()
    assert following.returncode == 130


@pytest.mark.slow
def test_commands_report_a_stopped_cluster_and_it_comes_up_with_its_records(running: Shell, numbers: str) -> None:
    before = running.ok("consume", numbers, "--exit-at-end")
    assert running("down", "--format", "json").json() == {"action": "down", "ids": [1, 2, 3, "zookeeper"]}
    for command in (["topics", "list"], ["consume", numbers], ["produce", numbers]):
        assert "is down: run `minibroker up`" in running.refused(1, *command)
    assert not unhealthy(running)["brokers"][0]["alive"]
    running.ok("up", "--detach")
    assert running.ok("consume", numbers, "--exit-at-end") == before
    assert "produced 1 record " in running.ok("produce", numbers, stdin=b"after\n")


@pytest.mark.slow
def test_commands_report_a_dead_cluster_within_seconds(running: Shell, numbers: str) -> None:
    running.ok("kill", "all")
    said = running.refused(1, "consume", numbers)
    assert "Connection refused" in said
    assert "minibroker up" in said
    assert running.ok("start", "all") == "start: broker 1, broker 2, broker 3\n"


# --- Tests with their own cluster ---


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell without a cluster. A cluster that the test starts is killed after it."""
    shell = Shell(tmp_path)
    yield shell
    if shell.cluster.file_or_none() is not None:
        shell.cluster.down(kill=True)


@pytest.fixture
def foreground(shell: Shell) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def up(*arguments: str) -> subprocess.Popen[bytes]:
        process = start(["up", "--brokers", "1", *arguments], shell.directory, start_new_session=True)
        started.append(process)
        return process

    yield up
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP))],
)
def test_an_interrupted_up_stops_the_cluster_cleanly(
    number: signal.Signals, shell: Shell, foreground: Callable[..., subprocess.Popen[bytes]]
) -> None:
    (port,) = free_ports(1)
    up = foreground("--base-port", str(port))
    assert up.stdout is not None
    assert up.stdout.readline() == b"127.0.0.1:%d\n" % port
    shell.ok("topics", "create", "kept", "--replication-factor", "1", "--partitions", "1")
    shell.ok("produce", "kept", stdin=b"one\n")
    up.send_signal(number)
    out, err = up.communicate(timeout=PATIENCE_S)
    assert (up.returncode, out, err) == (0, b"", b"")
    assert is_free(port)
    assert (shell.cluster.directory / "broker-1" / ".kafka_cleanshutdown").exists()
    shell.ok("up", "--detach")
    assert shell.ok("consume", "kept", "--exit-at-end") == "one\n"


@pytest.mark.slow
def test_an_up_interrupted_during_its_start_leaves_no_process_running(
    shell: Shell, foreground: Callable[..., subprocess.Popen[bytes]]
) -> None:
    (port,) = free_ports(1)
    up = foreground("--base-port", str(port))
    found = shell.cluster.file_or_none
    assert wait_until(lambda: (known := found()) is not None and known.zookeeper.process is not None, PATIENCE_S)
    up.send_signal(signal.SIGINT)
    out, err = up.communicate(timeout=PATIENCE_S)
    assert (up.returncode, out, err) == (130, b"", b"")
    status = shell.status()
    assert not status["brokers"][0]["alive"]
    assert not status["zookeeper"]["alive"]


@pytest.mark.slow
def test_up_names_a_port_in_use_and_an_address_without_zookeeper(shell: Shell) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        said = shell.refused(1, "up", "--brokers", "1", "--base-port", str(port))
    assert f"port {port} (broker 1) is in use" in said
    assert "--base-port" in said
    said = shell.refused(1, "up", "--base-port", str(port), "--zookeeper", "127.0.0.1:1")
    assert "no ZooKeeper answers at 127.0.0.1:1" in said
    assert "127.0.0.1:2181" in shell.refused(1, "up", "--base-port", str(port), "--zookeeper", "localhost")


@pytest.mark.slow
def test_valid_settings_of_brokers_are_kept_for_the_next_up_and_invalid_ones_are_not(
    shell: Shell, zookeeper: str
) -> None:
    arguments = ("up", "--detach", "--brokers", "1", "--base-port", str(free_ports(1)[0]), "--zookeeper", zookeeper)

    def partitions_of_a_new_topic(name: str) -> int:
        created: int = shell("topics", "create", name, "--format", "json").json()["partitions"]
        return created

    refused = shell.refused(1, *arguments, "--override", "num.partitons=7")
    assert "broker 1 did not start: broker setting 'num.partitons' is not known" in refused
    shell.ok(*arguments)
    assert partitions_of_a_new_topic("default") == 1
    assert "not with --override num.partitions=7 " in shell.refused(1, "up", "--override", "num.partitions=7")
    shell.ok("down")
    shell.ok("up", "--detach", "--override", "num.partitions=7", "--override", "default.replication.factor=1")
    assert partitions_of_a_new_topic("seven") == 7
    shell.ok("down")
    assert "'num.partitons' is not known" in shell.refused(1, "up", "--detach", "--override", "num.partitons=8")
    shell.ok("up", "--detach")
    assert partitions_of_a_new_topic("seven-again") == 7
    shell.ok("stop", "1")
    shell.ok("start", "1")
    assert partitions_of_a_new_topic("seven-after-a-start") == 7
    assert shell.ok("up", "--override", "num.partitions=7", "--override", "default.replication.factor=1")


@pytest.mark.slow
def test_a_cluster_refuses_the_data_of_another_cluster_which_still_accepts_it(shell: Shell, zookeeper: str) -> None:
    arguments = ("up", "--detach", "--brokers", "1", "--base-port", str(free_ports(1)[0]))
    shell.ok(*arguments, "--zookeeper", f"{zookeeper}/one")
    shell.ok("topics", "create", "kept", "--replication-factor", "1", "--partitions", "1")
    shell.ok("produce", "kept", stdin=b"one\n")
    shell.ok("down")
    said = shell.refused(1, *arguments, "--zookeeper", f"{zookeeper}/two")
    assert "belongs to cluster" in said
    assert "connect to that cluster's ZooKeeper" in said
    # The cluster remembers the last ZooKeeper that worked.
    shell.ok("up", "--detach")
    assert shell.ok("consume", "kept", "--exit-at-end") == "one\n"
    assert shell.ok("down", "--delete-data", "--yes") == "down: broker 1\n"
    assert not shell.cluster.directory.exists()


@pytest.mark.slow
def test_the_demo_loses_no_record_and_leaves_nothing_behind(tmp_path: Path) -> None:
    temporary = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = start(["demo", "--records", "30000", "--format", "json"], tmp_path, env=temporary)
    try:
        out, err = demo.communicate(timeout=PATIENCE_S * 2)
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(PATIENCE_S)
    assert (demo.returncode, err) == (0, b"")
    verdict = json.loads(out)
    assert verdict["sent"] == verdict["acknowledged"] == verdict["read_back"] >= 30_000
    assert [verdict[name] for name in ("lost", "duplicated", "out_of_order", "altered")] == [0, 0, 0, 0]
    assert [kill["role"] for kill in verdict["kills"]] == ["leader of demo-0", "controller"]
    assert all(kill["successor"] != kill["broker"] for kill in verdict["kills"])
    *steps, failover = verdict["timeline"]
    killed = verdict["kills"][1]
    text = f"Broker {killed['broker']} was lost and broker {killed['successor']} became the controller"
    assert failover["text"] == text
    assert 0 < failover["led_ms"] < 10_000
    assert "LeaderAndIsrAnswered" in {step["event"] for step in steps}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = start(["demo"], tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert demo.stdout is not None
        while b"acks=all" not in (line := demo.stdout.readline()):
            assert line, "the demo ended before it sent a record"
        (directory,) = tmp_path.glob("minibroker-demo-*")
        processes = LocalCluster(directory).file().processes()
        demo.send_signal(signal.SIGTERM)
        _, err = demo.communicate(timeout=PATIENCE_S)
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(PATIENCE_S)
    assert (demo.returncode, err) == (130, b"")
    assert list(tmp_path.iterdir()) == []
    assert len(processes) == 4
    assert not any(is_alive(process) for process in processes)
