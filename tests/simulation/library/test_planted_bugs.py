"""Scenarios of the library see bugs: each of these is planted, and the scenario of its name breaks a promise."""

from __future__ import annotations

import pytest

from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.stages.virtual import play_virtual
from tests.simulation.mutants import planted

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mutant", "says"),
    [
        ("acks-all-waits", "acknowledged-before-replicated", "nothing lost"),
        ("kip-966-last-replica-standing", "eligible-replicas-ignored", "the scenario can be played"),
        ("min-isr-missed", "min-insync-replicas-not-checked", "the scenario can be played"),
        ("transaction-coordinator-killed", "markers-are-sent-once", "nothing lost"),
        ("zombie-producer", "successors-do-not-fence", "clients see ProducerFenced"),
    ],
)
def test_a_planted_bug_breaks_a_promise(name: str, mutant: str, says: str) -> None:
    with planted(mutant):
        outcome = play_virtual(shelf.load(name), 1)
    assert says in [promise.text for promise in outcome.promises if not promise.kept]
