"""Scenarios on real processes: the verdicts of the library agree with those on virtual time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.who import AllBrokers, BrokerId
from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.export import exported
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.record import record
from minibroker.deploy.scenarios.report import report
from minibroker.deploy.scenarios.stages.live import play_live

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "everything-killed",
        "full-disk",
        "kip-101-log-divergence",
        "member-dies",
        "partition-leader-follower",
        "unclean-election",
        "zombie-producer",
    ],
)
def test_a_scenario_keeps_its_promises_on_processes(name: str) -> None:
    scenario = shelf.load(name)
    # Stalls on a busy machine are not the cluster's.
    scenario = scenario._replace(expect=scenario.expect._replace(longest_stall_s=None, longest_rebalance_s=None))
    outcome = asyncio.run(play_live(scenario))
    assert outcome.kept, "\n".join(report(scenario, [outcome]))


def test_an_exported_module_runs_under_pytest(tmp_path: Path) -> None:
    source = shelf.load("leader-killed").source
    for limit in ('longest_stall = "2 s"', 'longest_rebalance = "10 s"'):
        source = source.replace(limit, "")
    module = tmp_path / "test_exported.py"
    module.write_text(exported(read_scenario(source, "x.toml")).replace("range(1, 11)", "range(1, 2)"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(module)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "2 passed" in ended.stdout, ended.stdout + ended.stderr


def test_what_is_done_to_a_cluster_is_recorded(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "data")
    cluster.up(3, free_ports(3)[0])
    told: list[str] = []
    acts: Iterator[Callable[[], object]] = iter(
        [
            lambda: cluster.kill(BrokerId(2)),
            lambda: cluster.start(AllBrokers()),
            lambda: cluster.stop(BrokerId(3)),
            lambda: cluster.start(BrokerId(3)),
        ]
    )
    done = 0

    def goes_on() -> bool:
        """Do the next when the one before was recorded."""
        nonlocal done
        if len(told) < done:
            return True
        act = next(acts, None)
        if act is None:
            return False
        act()
        done += 1
        return True

    try:
        scenario = read_scenario(record(cluster, goes_on, told.append), "recorded.toml")
    finally:
        cluster.down(kill=True)
    verbs = [action.verb for step in scenario.steps for action in step.actions]
    assert verbs == ["kill", "start", "stop", "start"]
