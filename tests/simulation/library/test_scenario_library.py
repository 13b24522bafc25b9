"""The library of scenarios on virtual time, and the director's own failures."""

from __future__ import annotations

import pytest

from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.report import report
from minibroker.deploy.scenarios.stages.virtual import play_virtual

FEW = (
    "acks-all-waits",
    "kip-966-last-replica-standing",
    "member-dies",
    "transaction-coordinator-killed",
    "unclean-election",
)
"""A second each, for `make test`."""


def _check(name: str, seed: int) -> None:
    scenario = shelf.load(name)
    outcome = play_virtual(scenario, seed)
    assert outcome.kept, "\n".join(report(scenario, [outcome]))


@pytest.mark.parametrize("name", FEW)
def test_promises_of_the_library_are_kept(name: str) -> None:
    _check(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", shelf.names())
def test_every_promise_of_the_library_is_kept(name: str) -> None:
    for seed in (1, 2, 3):
        _check(name, seed)


def test_a_seed_repeats_a_run_and_another_seed_is_another_run() -> None:
    scenario = shelf.load("leader-killed")
    first = play_virtual(scenario, 7)
    assert play_virtual(scenario, 7) == first
    assert play_virtual(scenario, 8).happenings != first.happenings


def test_a_promise_that_cannot_be_kept_is_reported_as_broken() -> None:
    text = shelf.load("leader-killed").source.replace('longest_stall = "2 s"', 'longest_stall = "1 ms"')
    scenario = read_scenario(text, "strict.toml")
    outcome = play_virtual(scenario)
    assert [promise.text for promise in outcome.promises if not promise.kept] == ["no stall above 1 ms"]
    assert any(line.startswith("  BROKEN  no stall above 1 ms: ") for line in report(scenario, [outcome]))


def test_an_event_that_does_not_come_is_a_broken_promise_with_its_line() -> None:
    text = shelf.load("leader-killed").source.replace(
        'when = "orders-0 has a new leader"', 'when = "orders-0 has no leader"\nwithin = "3 s"'
    )
    outcome = play_virtual(read_scenario(text, "never.toml"))
    [promise] = outcome.promises
    assert not promise.kept
    assert '"orders-0 has no leader" did not come within 3.0 s' in promise.measured


SLOW_TO_THE_END = """
name = "Acknowledgements are slow to the end"
[[topics]]
name = "orders"
configs = { durability = "synced" }
[[clients]]
name = "shop"
produces = "orders"
[[steps]]
at = "1 s"
do = "slow disk of all by 500 ms"
[end]
after = "1 s"
heal = false
"""


def test_each_record_is_acknowledged_or_refused_before_the_final_reading() -> None:
    outcome = play_virtual(read_scenario(SLOW_TO_THE_END, "slow.toml"))
    assert outcome.kept
    assert outcome.sent == outcome.acknowledged > 50
