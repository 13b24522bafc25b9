"""Scenarios on containers: the verdicts agree with those on virtual time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sys

import pytest

from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.report import report
from minibroker.deploy.scenarios.stages.compose import run
from minibroker.deploy.scenarios.stages.containers import PROJECT, play_containers
from minibroker.deploy.scenarios.stages.virtual import play_virtual


@pytest.mark.parametrize("name", ["leader-killed", "leader-isolated", "min-isr-missed"])
def test_verdicts_agree(name: str) -> None:
    scenario = shelf.load(name)
    outcomes = [play_virtual(scenario), asyncio.run(play_containers(scenario))]
    lines = report(scenario, outcomes)
    print(lines[-1], file=sys.stderr)
    assert all(outcome.kept for outcome in outcomes), "\n".join(lines)
    assert not run("docker", "ps", "--all", "--quiet", f"--filter=name={PROJECT}-").strip()
