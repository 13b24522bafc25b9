"""`minibroker groups` and `consume --group` against a cluster of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import pytest

from minibroker.deploy.local.processes import wait_until
from minibroker.sync import Consumer
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell, start


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with running_shell(tmp_path_factory.mktemp("shell")) as shell:
        yield shell


@pytest.fixture
def minibroker(running: Shell) -> Shell:
    return running.healthy()


def fill(shell: Shell, topic: str, partitions: int, records: int) -> None:
    """Create a topic with this many records in each partition; their values are `PARTITION:NUMBER`."""
    shell.ok("topics", "create", topic, "--partitions", str(partitions))
    for partition in range(partitions):
        lines = b"".join(b"%d:%d\n" % (partition, number) for number in range(records))
        shell.ok("produce", topic, "-p", str(partition), stdin=lines)


def described(shell: Shell, group: str) -> Any:
    return shell("groups", "describe", group, "--format", "json").json()


def committed(shell: Shell, group: str) -> dict[int, int]:
    return {each["partition"]: each["committed"] for each in described(shell, group)["partitions"]}


def lines_of(stream: IO[bytes] | None, count: int) -> list[str]:
    assert stream is not None
    return [stream.readline().decode().rstrip("\n") for _ in range(count)]


def interrupt(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGINT) -> str:
    """Send Ctrl-C or another signal, wait for the end, and return the unread output."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (128 + number, b"")
    return out.decode()


@pytest.mark.slow
def test_a_group_resumes_at_its_commits_and_an_operator_describes_resets_and_deletes_it(minibroker: Shell) -> None:
    fill(minibroker, "orders", 2, 5)
    consume = ("consume", "orders", "--group", "billing", "--exit-at-end")
    first = minibroker.ok(*consume, "--count", "7").splitlines()
    assert sum(committed(minibroker, "billing").values()) == 7
    rest = minibroker.ok(*consume).splitlines()
    assert sorted(first + rest) == sorted(f"{p}:{n}" for p in range(2) for n in range(5))
    assert minibroker.ok(*consume) == ""

    minibroker.ok("produce", "orders", "-p", "1", stdin=b"1:5\n1:6\n")
    assert ["billing", "Empty", "consumer"] in [line.split() for line in minibroker.ok("groups", "list").splitlines()]
    lines = [line.split() for line in minibroker.ok("groups", "describe", "billing").splitlines()]
    assert lines[0][:3] == ["group", "billing:", "Empty,"]
    assert lines[-2:] == [["orders", "0", "5", "5", "0", "-"], ["orders", "1", "5", "7", "2", "-"]]

    misspelled = (
        ("describe", "biling"),
        ("delete", "biling", "--yes"),
        ("remove-members", "biling", "--all"),
        ("reset-offsets", "biling", "--all", "--to", "earliest"),
    )
    for arguments in misspelled:
        assert "Did you mean 'billing'?" in minibroker.refused(1, "groups", *arguments)
    reset = ("groups", "reset-offsets", "billing", "--topic", "orders")
    plan = [line.split() for line in minibroker.ok(*reset, "--to", "-1", "--dry-run").splitlines()[1:]]
    assert plan == [["orders", "0", "5", "4", "1"], ["orders", "1", "5", "6", "1"]]
    assert "repeat with --yes" in minibroker(*reset, "--to", "-1").err
    assert committed(minibroker, "billing") == {0: 5, 1: 5}
    minibroker.ok(*reset, "--to", "-1", "--yes")
    assert sorted(minibroker.ok(*consume).splitlines()) == ["0:4", "1:6"]

    assert minibroker.ok("groups", "delete", "billing", "--yes") == "deleted billing\n"
    assert "there is no group billing" in minibroker.refused(1, "groups", "describe", "billing")
    assert len(minibroker.ok(*consume).splitlines()) == 12
    assert minibroker.ok("groups", "delete", "billing", "--yes") == "deleted billing\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_commit_exactly_the_printed_records(minibroker: Shell, number: signal.Signals) -> None:
    topic, group = f"ticks-{number.name}", f"clock-{number.name}"
    fill(minibroker, topic, 1, 1_000)
    process = start(["consume", topic, "--group", group], minibroker.directory)
    printed = lines_of(process.stdout, 1_000)
    assert "" not in printed
    assert interrupt(process, number) == ""
    assert committed(minibroker, group) == {0: 1_000}
    assert described(minibroker, group)["state"] == "Empty"


@pytest.mark.slow
def test_ctrl_c_while_the_pipe_is_full_commits_exactly_the_complete_lines(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "long", "--partitions", "1")
    minibroker.ok("produce", "long", stdin=b"".join(b"%0500d\n" % number for number in range(20_000)))
    # Without a buffer, a signal interrupts a write in the middle.
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = start(["consume", "long", "--group", "pipe"], minibroker.directory, env=environment)
    assert process.stdout is not None
    got = os.read(process.stdout.fileno(), 1_000)
    process.send_signal(signal.SIGINT)
    while data := os.read(process.stdout.fileno(), 65_536):
        got += data
    assert process.wait(PATIENCE_S) == 130
    process.communicate()
    numbers = [int(line) for line in got.splitlines()]
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) < 20_000
    assert committed(minibroker, "pipe") == {0: len(numbers)}


@pytest.mark.slow
def test_two_members_share_the_partitions_and_block_reset_and_deletion(minibroker: Shell) -> None:
    fill(minibroker, "shared", 4, 3)
    members = [start(["consume", "shared", "--group", "pair"], minibroker.directory) for _ in range(2)]
    try:
        assert wait_until(lambda: _is_shared(minibroker), PATIENCE_S)
        found = described(minibroker, "pair")
        assert {each["client_id"] for each in found["members"]} == {"minibroker-cli"}
        assert {each["client_host"].lstrip("/") for each in found["members"]} == {"127.0.0.1"}
        owners = Counter(each["member_id"] for each in found["partitions"])
        assert owners == {each["member_id"]: 2 for each in found["members"]}
        refusal = minibroker.refused(1, "groups", "reset-offsets", "pair", "--all", "--to", "earliest", "--yes")
        assert all(each["member_id"] in refusal for each in found["members"])
        assert "NON_EMPTY_GROUP" in minibroker.refused(1, "groups", "delete", "pair", "--yes")
        # The other member takes over the partitions.
        interrupt(members[0])
        assert wait_until(lambda: len(described(minibroker, "pair")["members"]) == 1, PATIENCE_S)
        minibroker.ok("produce", "shared", "-p", "0", stdin=b"last\n")
        assert wait_until(lambda: committed(minibroker, "pair")[0] == 4, PATIENCE_S)
    finally:
        for process in members:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    members[1].communicate(timeout=PATIENCE_S)
    assert wait_until(lambda: described(minibroker, "pair")["state"] == "Empty", PATIENCE_S)
    assert committed(minibroker, "pair") == {0: 4, 1: 3, 2: 3, 3: 3}


@pytest.mark.slow
def test_a_member_joins_a_group_with_the_default_assignors_of_kafkas_clients(minibroker: Shell) -> None:
    fill(minibroker, "ranged", 2, 3)
    with Consumer(
        minibroker.cluster.bootstrap(), topics=["ranged"], group="ranges", partition_assignment_strategy="range"
    ) as consumer:
        assert consumer.poll(timeout_ms=PATIENCE_S * 1_000)
        process = start(["consume", "ranged", "--group", "ranges"], minibroker.directory)

        def shares() -> bool:
            consumer.poll(timeout_ms=100)
            return len(consumer.assignment()) == 1 and "" not in lines_of(process.stdout, 1)

        assert wait_until(shares, PATIENCE_S)
        assert {each["client_id"] for each in described(minibroker, "ranges")["members"]} > {"minibroker-cli"}
        assert interrupt(process) == ""


def _is_shared(shell: Shell) -> bool:
    found = shell("groups", "describe", "pair", "--format", "json")
    if found.code != 0:
        return False
    group = json.loads(found.out)
    return group["state"] == "Stable" and [len(each["partitions"] or ()) for each in group["members"]] == [2, 2]


@pytest.mark.slow
def test_lag_is_watched_while_the_coordinator_is_killed(minibroker: Shell) -> None:
    fill(minibroker, "watched", 1, 3)
    minibroker.ok("consume", "watched", "--group", "eyes", "--exit-at-end")
    watching = start(["groups", "describe", "eyes", "--watch"], minibroker.directory)
    try:
        assert lines_of(watching.stdout, 1) == ["Empty, 0 members, lag 0"]
        coordinator = described(minibroker, "eyes")["coordinator"]["id"]
        minibroker.ok("kill", str(coordinator))
        minibroker.ok("produce", "watched", stdin=b"4\n5\n")
        deadline = time.monotonic() + PATIENCE_S
        while (line := lines_of(watching.stdout, 1)[0]) != "Empty, 0 members, lag 2 (watched-0 2)":
            assert time.monotonic() < deadline, line
        assert described(minibroker, "eyes")["coordinator"]["id"] != coordinator
        assert minibroker.ok("consume", "watched", "--group", "eyes", "--exit-at-end") == "4\n5\n"
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=PATIENCE_S)
    assert watching.returncode == 0
    minibroker.ok("start", str(coordinator))
