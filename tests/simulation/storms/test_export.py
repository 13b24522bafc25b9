"""Storms as scenario files."""

from __future__ import annotations

import pytest

from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.report import report
from minibroker.deploy.scenarios.stages.virtual import play_virtual
from tests.simulation.storms.export import Recorder, exported


@pytest.mark.slow
def test_a_storm_becomes_a_scenario_that_says_what_is_left_out() -> None:
    text, of_storm = exported(17, 0.1)
    assert not of_storm.anomalies
    assert text.startswith("# Exported from the storm of seed 17 (0.1 virtual minutes). Left out:\n#   ")
    scenario = read_scenario(text, "storm-17.toml")
    assert {action.verb for step in scenario.steps for action in step.actions} >= {"kill", "start"}
    outcome = play_virtual(scenario)
    assert outcome.kept, "\n".join(report(scenario, [outcome]))


def test_what_heal_ends_too_early_is_repeated_and_starts_wait_for_what_would_block_them() -> None:
    recorder = Recorder(lambda: 0.0)
    recorder.begin()
    recorder.lasts(("isolated", "1"), "isolate 1")
    recorder.lasts(("zookeeper", "2"), "cut 2 from zookeeper")
    recorder.start(2)
    recorder.start(3)
    recorder.ends(("isolated", "1"))
    recorder.ends(("zookeeper", "2"))
    recorder.ends(("zookeeper", "2"))
    assert [step.sentences for step in recorder.steps] == [
        ("isolate 1",),
        ("cut 2 from zookeeper",),
        ("start 3",),
        ("heal", "cut 2 from zookeeper"),
        ("heal",),
        ("start 2",),
    ]
