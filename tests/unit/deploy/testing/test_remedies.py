from __future__ import annotations

from pathlib import Path

import pytest

from minibroker.deploy.testing.remedies import for_tests


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("minibroker start 3", "cluster.start(3)"),
        ("minibroker resume zookeeper", 'cluster.resume("zookeeper")'),
        ("minibroker heal 2", "cluster.heal()"),
        ("minibroker heal", "cluster.heal()"),
        ("minibroker logs 2", "cluster.log_of(2)"),
        ("minibroker logs all", "cluster.log_of(...)"),
        ("minibroker status", "cluster.evidence()"),
        ("minibroker fault cut zookeeper all", 'cluster.cut("zookeeper", "all")'),
        ("minibroker topics list", "minibroker topics list --data '/a b'"),
        ("minibroker reassign --help", "minibroker reassign --help"),
        ("minibroker status --data /x", "minibroker status --data /x"),
    ],
)
def test_remedies_are_methods_of_the_cluster_where_one_does_the_same(command: str, remedy: str) -> None:
    said = for_tests(f"broker 3 is gone: `{command}`; see `docs`", Path("/a b"))
    assert said == f"broker 3 is gone: `{remedy}`; see `docs`"
