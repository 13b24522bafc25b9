"""Which processes the guardian counts as its cluster's."""

from __future__ import annotations

import pytest

from minibroker.deploy.testing.guardian import is_of_cluster

OURS = "/tmp/minibroker-test-a"
BROKER = ["python", "-m", "minibroker.broker", "--override", f"broker.secret.file={OURS}/broker.secret"]
ZOOKEEPER = ["java", "-cp", "x.jar", "org.apache.zookeeper.server.quorum.QuorumPeerMain", f"{OURS}/zookeeper/zoo.cfg"]


@pytest.mark.parametrize("arguments", [BROKER, ZOOKEEPER])
def test_what_the_launcher_started_over_the_directory_is_of_the_cluster(arguments: list[str]) -> None:
    assert is_of_cluster([*arguments, ""], OURS)
    assert not is_of_cluster([*arguments, ""], f"{OURS}b")
    assert not is_of_cluster([*arguments, ""], "/tmp/minibroker-test-")


@pytest.mark.parametrize(
    "arguments",
    [
        ["less", f"{OURS}/logs/broker-1.log"],
        ["vi", f"{OURS}/zookeeper/zoo.cfg"],
        ["rm", "-r", OURS],
        ["python", "-I", "-S", "guardian.py", "1", OURS],
        ["python", "-m", "minibroker.broker", "--properties", "broker.properties"],
        [],
    ],
)
def test_a_process_that_only_names_the_directory_is_a_stranger(arguments: list[str]) -> None:
    assert not is_of_cluster(arguments, OURS)
