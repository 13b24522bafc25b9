"""The two clusters of `minibroker.testing` have the same methods, one of them awaitable."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import minibroker.testing
from minibroker.testing import LocalCluster, SyncLocalCluster

USER = ast.parse((Path(__file__).parents[3] / "typed_user.py").read_text())


def public(kind: type) -> dict[str, object]:
    own = [each for each in reversed(kind.__mro__) if each.__module__.startswith("minibroker.deploy.testing")]
    return {name: value for each in own for name, value in vars(each).items() if not name.startswith("_")}


def called_in(function: str) -> set[str]:
    (found,) = [node for node in USER.body if getattr(node, "name", "") == function]
    return {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute)}


def test_both_clusters_have_the_same_methods_with_the_same_signatures() -> None:
    ours, theirs = public(LocalCluster), public(SyncLocalCluster)
    assert ours.keys() - {"around"} == theirs.keys()
    assert inspect.signature(LocalCluster) == inspect.signature(SyncLocalCluster)
    for name, method in theirs.items():
        twin = ours[name]
        if callable(method) and callable(twin):
            assert inspect.signature(method) == inspect.signature(twin), name


def test_the_users_file_calls_every_method_and_names_every_name() -> None:
    assert public(LocalCluster).keys() - called_in("break_cluster") == {"around"}
    assert public(SyncLocalCluster).keys() - called_in("break_cluster_blocking") == set()
    attributes = {node.attr for node in ast.walk(USER) if isinstance(node, ast.Attribute)}
    assert set(minibroker.testing.__all__) - attributes == set()
