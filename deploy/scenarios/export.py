"""A scenario as a module of tests for pytest. Pure."""

from __future__ import annotations

import re
import textwrap

from minibroker.deploy.scenarios.document import ScenarioError
from minibroker.deploy.scenarios.model import Scenario

_WIDTH = 100

_VIRTUAL = """

@pytest.mark.parametrize("seed", range(1, 11))
def test_{name}_on_virtual_time(seed: int) -> None:
    check_virtual(SCENARIO, seed)
"""

_LIVE = """

@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncLocalCluster]:
    with cluster_for(SCENARIO) as cluster:
        yield cluster


def test_{name}_on_processes(cluster: SyncLocalCluster) -> None:
    check_live(SCENARIO, cluster)
"""


def exported(scenario: Scenario) -> str:
    """Return the text of a module. It runs the scenario on virtual time with ten seeds and, if all of its sentences can
    be done there, on processes."""
    name = re.sub(r"\W+", "_", scenario.name.lower()).strip("_") or "scenario"
    try:
        scenario.check_runner("live")
        is_live = True
    except ScenarioError:
        is_live = False
    about = textwrap.fill(scenario.about, _WIDTH)
    head = f"{scenario.name}." + (f"\n\n{about}\n" if about else "")
    imports = ["import pytest", ""]
    if is_live:
        imports = ["from collections.abc import Iterator", "", *imports]
        imports += ["from minibroker.deploy.scenarios.checks import check_live, check_virtual, cluster_for"]
        imports += ["from minibroker.testing import SyncLocalCluster"]
    else:
        imports += ["from minibroker.deploy.scenarios.checks import check_virtual"]
    lines = [_quoted(head), "", *imports, "", f"SCENARIO = {_quoted(scenario.source, raw=True)}"]
    return "\n".join(lines) + "\n" + (_VIRTUAL + (_LIVE if is_live else "")).format(name=name)


def _quoted(text: str, *, raw: bool = False) -> str:
    """Return a literal of several lines whose value is the text."""
    quote = "'''" if '"""' in text else '"""'
    if quote in text:
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    return f"{quote}\\\n{escaped}{quote}" if raw else f"{quote}{escaped}{quote}"
