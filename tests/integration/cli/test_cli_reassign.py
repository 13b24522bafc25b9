"""`minibroker reassign` against a cluster of real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from minibroker.deploy.local.processes import wait_until
from tests.integration.cli.shell import PATIENCE_S, Shell, running_shell


@pytest.fixture
def minibroker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with running_shell(tmp_path_factory.mktemp("shell")) as shell:
        yield shell


@pytest.mark.slow
def test_replicas_are_moved_and_verified_and_moved_back(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "orders", "--partitions", "3", "--replication-factor", "1")
    minibroker.ok("produce", "orders", stdin=b"".join(b"%d\n" % number for number in range(30)))
    ids = ",".join(str(broker.id) for broker in minibroker.cluster.file().brokers)
    proposal = ["reassign", "generate", "--topic", "orders", "--brokers", ids, "--replication-factor", "2"]
    assert minibroker.ok(*proposal).splitlines()[0].split() == ["topic", "partition", "replicas", "proposed"]
    wanted = minibroker.ok(*proposal, "--format", "json").encode()
    assert {p["partition"]: len(p["replicas"]) for p in json.loads(wanted)["partitions"]} == {0: 2, 1: 2, 2: 2}
    before = minibroker.ok("reassign", "execute", "-", "--format", "json", stdin=wanted).encode()
    assert [len(p["replicas"]) for p in json.loads(before)["partitions"]] == [1, 1, 1]

    def is_complete(file: bytes) -> bool:
        return minibroker("reassign", "verify", "-", stdin=file).code == 0

    assert wait_until(lambda: is_complete(wanted), PATIENCE_S)
    states = json.loads(minibroker.ok("reassign", "verify", "-", "--format", "json", stdin=wanted))
    assert {state["state"] for state in states} == {"complete"}
    idle = minibroker.ok("reassign", "cancel", "-", stdin=wanted)
    assert idle == "not being reassigned: orders-0, orders-1, orders-2\n"
    assert json.loads(minibroker.ok("reassign", "cancel", "-", "--format", "json", stdin=wanted)) == []
    minibroker.ok("reassign", "execute", "-", stdin=before)
    assert wait_until(lambda: is_complete(before), PATIENCE_S)
    read = minibroker.ok("consume", "orders", "--exit-at-end", "--output", "%s\\n").split()
    assert sorted(map(int, read)) == list(range(30))
    elsewhere = ["reassign", "generate", "--topic", "orders", "--brokers", f"977,{ids}"]
    assert "broker 977 is not alive" in minibroker.refused(1, *elsewhere)
    nowhere = b'{"version":1,"partitions":[{"topic":"orders","partition":0,"replicas":[977]}]}'
    assert "broker 977 is not alive" in minibroker.refused(1, "reassign", "execute", "-", stdin=nowhere)
    assert "is not a list of reassignments" in minibroker.refused(2, "reassign", "execute", "-", stdin=b"{}")
    assert "version" in minibroker.refused(2, "reassign", "execute", "-", stdin=nowhere.replace(b":1,", b":7,", 1))


@pytest.mark.slow
def test_if_some_reassignments_are_refused_the_accepted_ones_can_be_reverted(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "orders", "--partitions", "2", "--replication-factor", "2")
    described = minibroker("topics", "describe", "orders", "--format", "json").json()["partitions"]
    one = described[1]["replicas"]
    entries = [
        {"topic": "orders", "partition": 0, "replicas": [977]},
        {"topic": "orders", "partition": 1, "replicas": one[::-1]},
    ]
    wanted = json.dumps({"version": 1, "partitions": entries}).encode()
    half = minibroker("reassign", "execute", "-", "--format", "json", stdin=wanted)
    assert half.code == 1
    assert half.err.startswith("error: INVALID_REPLICA_ASSIGNMENT: orders-0")
    assert json.loads(half.out) == {"version": 1, "partitions": [{"topic": "orders", "partition": 1, "replicas": one}]}


@pytest.mark.slow
def test_a_throttled_reassignment_is_listed_with_its_bytes_and_its_throttle_ends_with_it(minibroker: Shell) -> None:
    minibroker.ok("topics", "create", "bulk", "--partitions", "1", "--replication-factor", "1")
    minibroker.ok("produce", "bulk", stdin=(b"x" * 1_000 + b"\n") * 4_000)
    leader = minibroker("topics", "describe", "bulk", "--format", "json").json()["partitions"][0]["leader"]
    other = next(broker.id for broker in minibroker.cluster.file().brokers if broker.id != leader)
    entries = [{"topic": "bulk", "partition": 0, "replicas": [other]}]
    wanted = json.dumps({"version": 1, "partitions": entries}).encode()

    def listed() -> list[dict[str, object]]:
        found: list[dict[str, object]] = minibroker("reassign", "list", "--format", "json").json()
        return found

    def settings(*of: str) -> dict[str, str]:
        entries = minibroker("configs", "describe", *of, "--format", "json").json()
        return {one["name"]: one["value"] for one in entries if "throttled" in one["name"]}

    assert listed() == []
    file = minibroker.directory / "move bulk.json"
    file.write_bytes(wanted)
    begun = minibroker("reassign", "execute", file.name, "--throttle", "10000")
    stays = "the throttle of 10,000 bytes/s stays on, also after the move, until "
    assert (begun.code, begun.err) == (0, f"{stays}`minibroker reassign verify 'move bulk.json'` removes it\n")
    [one] = listed()
    assert (one["topic"], one["adding_replicas"], one["removing_replicas"]) == ("bulk", [other], [leader])
    assert isinstance(one["total_bytes"], int)
    assert one["total_bytes"] > 4_000
    assert "% of" in minibroker.ok("reassign", "list")
    status = minibroker("status")
    assert status.code == 0, status
    assert "under-replicated partitions: none" in status.out
    assert "moving, " in status.out
    assert "% of " in status.out
    assert settings("--topic", "bulk") == {
        "leader.replication.throttled.replicas": f"0:{leader}",
        "follower.replication.throttled.replicas": f"0:{other}",
    }
    assert set(settings("--broker-default").values()) == {"10000"}
    assert minibroker("reassign", "execute", "-", "--throttle", "1000000000", stdin=wanted).code == 0
    assert set(settings("--broker-default").values()) == {"1000000000"}
    said = ""

    def is_complete() -> bool:
        nonlocal said
        ended = minibroker("reassign", "verify", "-", stdin=wanted)
        said += ended.err
        return ended.code == 0

    assert wait_until(is_complete, PATIENCE_S)
    assert said == "the throttle is removed\n"
    assert listed() == []
    assert settings("--topic", "bulk") == settings("--broker-default") == {}
    assert minibroker.ok("reassign", "cancel", "--all", "--format", "json") == "[]\n"
    assert minibroker.ok("reassign", "cancel", "--all") == "no partition is being reassigned: nothing to cancel\n"
    assert "either FILE or --all" in minibroker.refused(2, "reassign", "cancel")
