"""A cluster of real processes grows and shrinks, while records are written."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from random import Random

import pytest

from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import ProcessState, wait_until
from minibroker.protocol.model import TopicPartition
from tests.integration.cli.shell import PATIENCE_S, Shell, start

FETCH_BYTES = 20_000
LINES = [Random(number).randbytes(500).hex() for number in range(4_000)]  # which compression does not make small


@pytest.fixture
def minibroker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("shell"))
    try:
        # Room for a fourth broker. A throttle is exceeded by one fetch at most, so fetches are small.
        small = [f"--override=replica.fetch.{name}={FETCH_BYTES}" for name in ("max.bytes", "response.max.bytes")]
        shell.ok("up", "--detach", "--base-port", str(free_ports(4)[0]), *small)
        yield shell
    finally:
        if shell.cluster.file_or_none() is not None:
            shell.cluster.down(kill=True)


def create_orders(minibroker: Shell) -> None:
    small = ["--config", f"max.message.bytes={FETCH_BYTES}"]
    minibroker.ok("topics", "create", "orders", "--partitions", "4", "--replication-factor", "2", *small)
    minibroker.ok("produce", "orders", stdin="".join(f"{line}\n" for line in LINES).encode())


def replicas(minibroker: Shell) -> dict[TopicPartition, list[int]]:
    return {name: state.replica_nodes for name, state in minibroker.cluster.view().partitions.items()}


@pytest.mark.slow
def test_a_broker_is_added_by_up_and_a_removal_that_was_killed_is_finished(minibroker: Shell) -> None:
    assert "__consumer_offsets has up to 3 replicas" in minibroker.refused(1, "brokers", "remove", "3")
    metrics = {entry.id: entry.metrics_port for entry in minibroker.cluster.file().brokers}
    assert len(minibroker.ok("up", "--brokers", "4").split(",")) == 4
    minibroker.healthy()
    assert [entry.metrics_port for entry in minibroker.cluster.file().brokers][:3] == list(metrics.values())
    assert minibroker("up", "--brokers", "4", "--detach").code == 0, "nothing is left to do"
    assert "`minibroker brokers remove ID`" in minibroker.refused(1, "up", "--brokers", "3")

    create_orders(minibroker)
    minibroker.ok("configs", "alter", "--broker", "1", "--set", "num.io.threads=9")
    removal = start(["brokers", "remove", "1", "--throttle", "20000"], minibroker.directory)
    assert wait_until(lambda: minibroker("reassign", "list", "--format", "json").out != "[]\n", PATIENCE_S)
    assert minibroker.cluster.file().broker(1).leaving is not None
    assert "running, leaving" in minibroker("status").out
    removal.send_signal(signal.SIGKILL)
    removal.communicate()
    assert minibroker("reassign", "list", "--format", "json").out != "[]\n", "it goes on without the command"

    removed = minibroker("brokers", "remove", "1", "--throttle", "1000000000", "--format", "json").json()
    assert removed["ids"] == [1]
    assert removed["moved_partitions"] > 0
    assert [entry.id for entry in minibroker.cluster.file().brokers] == [2, 3, 4]
    assert not (minibroker.cluster.directory / "broker-1").exists()
    minibroker.healthy()
    assert not any(1 in nodes for nodes in replicas(minibroker).values())
    assert "throttled" not in minibroker.ok("configs", "describe", "--broker-default")
    assert "throttled" not in minibroker.ok("configs", "describe", "--topic", "orders")
    read = minibroker.ok("consume", "orders", "--exit-at-end", "--output", "%s\\n")
    assert sorted(read.splitlines()) == sorted(LINES)

    minibroker.ok("down")
    minibroker.ok("up", "--detach")
    assert [entry.id for entry in minibroker.cluster.file().brokers] == [2, 3, 4]
    assert json.loads(minibroker.ok("brokers", "add", "--format", "json")) == {"action": "add", "ids": [1]}
    minibroker.healthy()
    entries = json.loads(minibroker.ok("configs", "describe", "--broker", "1", "--format", "json"))
    assert not [entry for entry in entries if entry["name"] == "num.io.threads"], "the new broker 1 is another one"


@pytest.mark.slow
def test_a_removal_can_be_cancelled_and_a_broker_that_died_can_be_removed(minibroker: Shell) -> None:
    minibroker.ok("brokers", "add")
    create_orders(minibroker)
    before = replicas(minibroker)
    removal = start(["brokers", "remove", "2", "--throttle", "1000"], minibroker.directory)
    assert wait_until(lambda: minibroker("reassign", "list", "--format", "json").out != "[]\n", PATIENCE_S)
    removal.send_signal(signal.SIGINT)
    assert removal.wait(PATIENCE_S) == 130
    said = removal.communicate()[1].decode()
    assert said.startswith("interrupted: the copying goes on"), said
    assert "`minibroker brokers remove 2` finishes" in said
    assert "`minibroker brokers remove 2 --cancel` keeps" in said
    assert minibroker.ok("brokers", "remove", "2", "--cancel") == "keep: broker 2\n"
    idle = "broker 2 is not being removed: nothing to cancel\n"
    assert wait_until(lambda: minibroker.ok("brokers", "remove", "2", "--cancel") == idle, PATIENCE_S)
    assert minibroker("brokers", "remove", "2", "--cancel", "--format", "json").json()["ids"] == []
    assert wait_until(lambda: minibroker("reassign", "list", "--format", "json").out == "[]\n", PATIENCE_S)
    assert minibroker.cluster.file().broker(2).leaving is None
    now = replicas(minibroker)
    assert {name for name in now if 2 in now[name]} <= {name for name in before if 2 in before[name]}
    assert any(2 in nodes for nodes in now.values())

    minibroker.ok("kill", "2")
    assert wait_until(lambda: 2 not in minibroker.cluster.view().brokers, PATIENCE_S)
    minibroker.ok("brokers", "remove", "2", "--format", "json")
    assert [entry.id for entry in minibroker.cluster.file().brokers] == [1, 3, 4]
    assert all(minibroker.cluster.state_of(id) is ProcessState.RUNNING for id in (1, 3, 4))
    minibroker.healthy()
