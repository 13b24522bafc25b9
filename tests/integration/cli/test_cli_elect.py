"""`minibroker elect` against a cluster of real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.deploy.local.processes import wait_until
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell


@pytest.fixture
def minibroker(tmp_path: Path) -> Iterator[Shell]:
    with running_shell(tmp_path, {"auto.leader.rebalance.enable": "false"}) as shell:
        yield shell


def leads(minibroker: Shell) -> list[int]:
    described = minibroker("topics", "describe", "orders", "--format", "json").json()
    return [partition["leader"] for partition in described["partitions"]]


def preferred(minibroker: Shell) -> list[int]:
    described = minibroker("topics", "describe", "orders", "--format", "json").json()
    return [partition["replicas"][0] for partition in described["partitions"]]


@pytest.mark.slow
def test_preferred_leaders_are_elected_and_failures_and_mistakes_are_reported(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "orders", "--partitions", "3")
    assert leads(minibroker) == preferred(minibroker)
    assert minibroker.ok("elect", "--preferred", "--all") == "no partition needs an election\n"
    partition = preferred(minibroker).index(2)
    minibroker.ok("kill", "2")
    assert wait_until(lambda: 2 not in leads(minibroker), PATIENCE_S)
    only = ["elect", "--preferred", "--topic", "orders", "-p", str(partition)]
    [row] = json.loads(minibroker(*only, "--format", "json").out)
    assert (row["partition"], row["result"]) == (partition, "failed")
    refused = minibroker(*only).err
    assert "PREFERRED_LEADER_NOT_AVAILABLE" in refused
    assert "broker 2, is not alive" in refused
    minibroker.ok("start", "2")
    minibroker.healthy()
    assert leads(minibroker) != preferred(minibroker)

    rows = minibroker("elect", "--preferred", "--topic", "orders", "--format", "json").json()
    assert [(row["partition"], row["result"]) for row in rows] == [
        (number, "elected" if number == partition else "not needed") for number in range(3)
    ]
    assert leads(minibroker) == preferred(minibroker)
    assert "not needed" in minibroker.ok("elect", "--preferred", "--topic", "orders", "--partition", "0")

    assert "repeat with --yes" in minibroker.refused(1, "elect", "--unclean", "--all")
    assert minibroker.ok("elect", "--unclean", "--all", "--yes") == "no partition needs an election\n"
    for mistake in (
        ["elect", "--all"],
        ["elect", "--preferred", "--unclean", "--all"],
        ["elect", "--preferred"],
        ["elect", "--preferred", "--all", "--topic", "orders"],
        ["elect", "--preferred", "--all", "--partition", "0"],
    ):
        minibroker.refused(2, *mistake)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in minibroker.refused(1, "elect", "--preferred", "--topic", "none")
    unknown = minibroker.refused(1, "elect", "--preferred", "-t", "orders", "-p", "0", "-p", "7")
    assert "orders has no partition 7: its partitions are 0 to 2" in unknown
