"""`minibroker configs` and `brokers list` against a cluster of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minibroker.deploy.local.processes import wait_until
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell


@pytest.fixture
def minibroker(tmp_path: Path) -> Iterator[Shell]:
    with running_shell(tmp_path) as shell:
        yield shell


@pytest.mark.slow
def test_settings_are_changed_and_shown_and_take_effect_without_a_restart(minibroker: Shell) -> None:
    listed = minibroker("brokers", "list", "--format", "json").json()
    assert [broker["id"] for broker in listed] == [1, 2, 3]
    assert sum(broker["controller"] for broker in listed) == 1

    minibroker.ok("topics", "create", "orders", "--partitions", "1")
    alter = ("configs", "alter", "--topic", "orders")
    changed = minibroker.ok(*alter, "--set", "max.message.bytes=200", "--set", "retention.ms=3600000")
    assert changed == "changed max.message.bytes, retention.ms of topic orders\n"
    rows = minibroker.ok("configs", "describe", "--topic", "orders").splitlines()
    assert rows[0].split() == ["setting", "value", "from", "may", "be", "changed"]
    assert [row.split()[:3] for row in rows[1:]] == [
        ["max.message.bytes", "200", "topic"],
        ["retention.ms", "3600000", "topic"],
    ]
    line = b"x" * 1_000 + b"\n"
    assert wait_until(lambda: minibroker("produce", "orders", stdin=line).code == 1, PATIENCE_S)
    minibroker.ok(*alter, "--delete", "max.message.bytes", "--append", "cleanup.policy=compact")
    described = minibroker("configs", "describe", "--topic", "orders", "--format", "json").json()
    found = {entry["name"]: entry["value"] for entry in described}
    assert found == {"retention.ms": "3600000", "cleanup.policy": "delete,compact"}
    minibroker.ok(*alter, "--subtract", "cleanup.policy=compact")
    assert wait_until(lambda: minibroker("produce", "orders", stdin=line).code == 0, PATIENCE_S)

    assert "from 1 to" in minibroker.refused(1, *alter, "--set", "max.message.bytes=0")
    assert "give one of --topic TOPIC" in minibroker.refused(2, "configs", "describe")
    assert "no change given" in minibroker.refused(2, *alter)
    assert "start it again" in minibroker.refused(1, "configs", "alter", "--broker", "2", "--set", "num.partitions=2")
    assert "broker 9 is not alive" in minibroker.refused(1, "configs", "describe", "--broker", "9")

    minibroker.ok("configs", "alter", "--broker-default", "--set", "log.retention.ms=7200000")
    minibroker.ok("configs", "alter", "--broker", "2", "--set", "log.retention.ms=5000000")
    minibroker.ok(*alter, "--delete", "retention.ms")

    def retention(broker_id: int) -> object:
        rows = minibroker("configs", "describe", "--broker", str(broker_id), "--format", "json").json()
        return next((row["value"], row["source"]) for row in rows if row["name"] == "log.retention.ms")

    assert retention(1) == ("7200000", "DYNAMIC_DEFAULT_BROKER_CONFIG")
    assert retention(2) == ("5000000", "DYNAMIC_BROKER_CONFIG")
    minibroker.ok("kill", "2")
    minibroker.ok("start", "2")
    assert retention(2) == ("5000000", "DYNAMIC_BROKER_CONFIG")


@pytest.mark.slow
def test_a_quota_of_a_user_is_set_with_a_warning_even_if_the_cluster_has_no_users(minibroker: Shell) -> None:
    changed = minibroker("configs", "alter", "--user", "frank", "--set", "producer_byte_rate=1000000000")
    assert (changed.code, changed.out) == (0, "changed producer_byte_rate of user frank\n")
    assert changed.err.startswith("warning: 'frank' is none of the users with a password")


@pytest.mark.slow
def test_the_removal_of_a_quota_says_whether_it_was_set(minibroker: Shell) -> None:
    alter = ("configs", "alter", "--client-id", "loader")
    assert minibroker.ok(*alter, "--delete", "producer_byte_rate") == (
        "producer_byte_rate of client id loader was not set\n"
    )
    minibroker.ok("configs", "alter", "--client-id", "loader", "--user-default", "--set", "producer_byte_rate=1")
    mixed = (*alter, "--set", "consumer_byte_rate=200", "--delete", "producer_byte_rate")
    changed = minibroker(*mixed, "--format", "json").json()
    assert (changed["changed"], changed["was_not_set"]) == (["consumer_byte_rate"], ["producer_byte_rate"])
    assert minibroker.ok(*alter, "--delete", "consumer_byte_rate") == "changed consumer_byte_rate of client id loader\n"
