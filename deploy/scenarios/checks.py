"""Scenarios inside tests: what `minibroker scenario export` writes uses these functions."""

from __future__ import annotations

import asyncio

from minibroker.deploy.scenarios.director import Outcome
from minibroker.deploy.scenarios.model import Scenario
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.report import report
from minibroker.deploy.scenarios.stage import cluster_settings
from minibroker.deploy.scenarios.stages.live import play_on
from minibroker.deploy.scenarios.stages.virtual import play_virtual
from minibroker.deploy.testing.cluster import LocalCluster, SyncLocalCluster


def check_virtual(text: str, seed: int = 1, name: str = "scenario") -> Outcome:
    """Play the text of a scenario file on virtual time. Raises AssertionError with the report if a promise is broken,
    and ScenarioError if the text is wrong."""
    scenario = read_scenario(text, name)
    return _checked(scenario, play_virtual(scenario, seed))


def cluster_for(text: str, name: str = "scenario") -> SyncLocalCluster:
    """Return the cluster that a scenario describes, for `with`. Raises ScenarioError."""
    scenario = read_scenario(text, name)
    return SyncLocalCluster(scenario.brokers, settings=cluster_settings(scenario))


def check_live(text: str, cluster: SyncLocalCluster, name: str = "scenario") -> Outcome:
    """Play the text of a scenario file on a cluster that `cluster_for` has made. Raises as `check_virtual`, and
    LaunchError."""
    scenario = read_scenario(text, name)
    return _checked(scenario, asyncio.run(play_on(scenario, LocalCluster.around(cluster))))


def _checked(scenario: Scenario, outcome: Outcome) -> Outcome:
    if not outcome.kept:
        raise AssertionError("\n".join(report(scenario, [outcome])))
    return outcome
