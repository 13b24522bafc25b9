"""The report of runs: the same for every runner, with a comparison. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minibroker.deploy.scenarios.director import Outcome
from minibroker.deploy.scenarios.ledger import seconds
from minibroker.deploy.scenarios.model import Scenario
from minibroker.protocol.words import counted

_FAILURES_SHOWN = 3


def report(scenario: Scenario, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a report about all runs of a scenario."""
    lines = [f"{scenario.name} ({scenario.path})"]
    runners = list(dict.fromkeys(outcome.runner for outcome in outcomes))
    shown = [outcome for outcome in outcomes if not outcome.kept][:_FAILURES_SHOWN]
    shown = shown or [next(outcome for outcome in outcomes if outcome.runner == runner) for runner in runners]
    for outcome in shown:
        lines += ["", f"{label(outcome)}:", *(f"  {h.at_s:8.3f} s  {h.text}" for h in outcome.happenings)]
    for runner in runners:
        lines += ["", *_of_runner(runner, [outcome for outcome in outcomes if outcome.runner == runner])]
    if len(runners) > 1:
        lines += ["", _agreement(runners, outcomes)]
    return lines


def label(outcome: Outcome) -> str:
    return outcome.runner if outcome.seed is None else f"{outcome.runner}, seed {outcome.seed}"


def _of_runner(runner: str, outcomes: Sequence[Outcome]) -> list[str]:
    runs = counted(len(outcomes), "run")
    stalls = sorted(outcome.stall_s for outcome in outcomes)
    lines = [
        f"{runner}: {runs}, {sum(outcome.kept for outcome in outcomes)} kept every promise; "
        f"{sum(outcome.acknowledged for outcome in outcomes):,} records acknowledged; "
        f"longest stall {_spread(stalls)}; longest rebalance {_spread([o.rebalance_s for o in outcomes])}"
    ]
    names = list(dict.fromkeys(promise.text for outcome in outcomes for promise in outcome.promises))
    for name in names:
        of_name = [(outcome, promise) for outcome in outcomes for promise in outcome.promises if promise.text == name]
        broken = [(outcome, promise) for outcome, promise in of_name if not promise.kept]
        if not broken:
            lines.append(f"  kept    {name}: {of_name[-1][1].measured}" + (" (last run)" if len(of_name) > 1 else ""))
        for outcome, promise in broken[:_FAILURES_SHOWN]:
            where = "" if outcome.seed is None else f" (seed {outcome.seed})"
            lines.append(f"  BROKEN  {name}: {promise.measured}{where}")
        if len(broken) > _FAILURES_SHOWN:
            seeds = ", ".join(str(outcome.seed) for outcome, _ in broken[_FAILURES_SHOWN:])
            lines.append(f"          and with seeds {seeds}")
    errors = sum((Counter(outcome.errors) for outcome in outcomes), Counter[str]())
    if errors:
        lines.append("  clients saw " + ", ".join(f"{name} {count} times" for name, count in sorted(errors.items())))
    return lines


def _spread(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return seconds(most) if len(values) == 1 or least == most else f"{seconds(least)} to {seconds(most)}"


def _agreement(runners: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    verdicts = {runner: all(outcome.kept for outcome in outcomes if outcome.runner == runner) for runner in runners}
    if len(set(verdicts.values())) == 1:
        return f"{', '.join(runners[:-1])} and {runners[-1]} agree"
    return "they disagree: " + ", ".join(
        f"{runner} {'kept' if kept else 'BROKEN'}" for runner, kept in verdicts.items()
    )
