"""`make mutants`: run storms with each planted bug, seed after seed, until one detects it.

    python -m tests.simulation.storms.hunt [--mutant NAME ...] [--max-seeds 300] [--minutes 3] [--jobs N]
        [--groups | --transactions]

It prints a line for each mutant when it is done: the number of seeds and the anomaly that caught it. An anomaly counts
if it is a broken promise (not a crashed process), and if the same seed has no anomaly without the mutant.

Exit codes: 0 if all mutants were caught, 1 if at least one was not, 130 after SIGINT or SIGTERM. The last line then
says how far the hunt came.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import NamedTuple

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.storms.report import Report
from tests.simulation.storms.simulate import add_kinds, simulate_many
from tests.simulation.storms.storm import Storm
from tests.simulation.storms.verdicts.history import Anomaly

CRASHES = ("failed", "a broker failed by itself", "a client crashed", "the storm itself failed")
"""Anomalies that report a crash, not a broken promise."""


_is_clean: dict[tuple[int, float, str], bool] = {}


class Catch(NamedTuple):
    """The outcome of a hunt."""

    mutant: Mutant
    seeds: int
    """Number of seeds tried."""
    anomaly: Anomaly | None
    """The broken promise that caught the mutant, if any."""
    crashes: int
    """Seeds with crashes but no broken promise."""
    seconds: float
    is_stopped: bool = False
    """Whether the hunt was interrupted, so that a later seed may catch the mutant."""

    def __str__(self) -> str:
        if self.anomaly is not None:
            found = f"{self.seeds:4d}  {self.anomaly.kind}"
        else:
            found = f">{self.seeds:3d}  {'stopped' if self.is_stopped else 'NOT CAUGHT'}"
        crashes = f" ({self.crashes} seeds with crashes alone)" if self.crashes else ""
        return f"{self.mutant.name:38} {self.mutant.family:26} {found}{crashes}"


def hunt(mutant: Mutant, *, max_seeds: int, minutes: float, jobs: int | None, kind: type[Storm] = Storm) -> Catch:
    """Run storms in the order of their seeds until one catches the mutant or KeyboardInterrupt stops the hunt."""
    began = time.monotonic()
    tried = crashes = 0
    is_stopped = False
    conviction: Anomaly | None = None
    seeds = range(1, max_seeds + 1)
    # A cluster that has broken a promise can go on to break thousands, which takes minutes.
    storms = simulate_many(seeds, minutes, mutant=mutant.name, is_enough=breaks_promise, kind=kind, jobs=jobs)
    try:
        for outcome in storms:
            tried += 1
            accusation = _broken_promise(outcome.report)
            if accusation is None:
                crashes += bool(outcome.report.anomalies)
            elif _is_clean_without_mutant(outcome.report.seed, minutes, kind):
                conviction = accusation
                break
    except KeyboardInterrupt:
        is_stopped = True
    return Catch(mutant, tried, conviction, crashes, time.monotonic() - began, is_stopped)


def breaks_promise(anomaly: Anomaly) -> bool:
    return anomaly.kind not in CRASHES


def _broken_promise(report: Report) -> Anomaly | None:
    return next(filter(breaks_promise, report.anomalies), None)


def _is_clean_without_mutant(seed: int, minutes: float, kind: type[Storm]) -> bool:
    """Return whether this seed has no anomaly without a mutant. The first seeds catch many mutants, so it is cached."""
    key = seed, minutes, kind.__name__
    if key not in _is_clean:
        [outcome] = simulate_many([seed], minutes, kind=kind)
        _is_clean[key] = not outcome.report.anomalies
    return _is_clean[key]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.storms.hunt", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--mutant", action="append", choices=sorted(MUTANTS), metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument("--max-seeds", type=int, default=300, help="for each mutant (300)")
    parser.add_argument("--minutes", type=float, default=3, help="virtual minutes of a storm (3)")
    parser.add_argument("--jobs", type=int, help="worker processes (one per core)")
    add_kinds(parser)
    arguments = parser.parse_args()
    kind = arguments.kind

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    catches: list[Catch] = []
    print(f"{'mutant':38} {'family':26} seeds caught by")
    for name in arguments.mutant or MUTANTS:
        catch = hunt(
            MUTANTS[name], max_seeds=arguments.max_seeds, minutes=arguments.minutes, jobs=arguments.jobs, kind=kind
        )
        catches.append(catch)
        print(catch, flush=True)
        if catch.is_stopped:
            tried, caught = sum(each.seeds for each in catches), sum(each.anomaly is not None for each in catches)
            seconds = time.monotonic() - began
            print(f"\nstopped at {name} after {tried} seeds and {seconds:.0f} s: {caught} caught before", flush=True)
            return 130
    at_large = [catch.mutant.name for catch in catches if catch.anomaly is None]
    print(f"\n{len(catches) - len(at_large)} of {len(catches)} caught in {time.monotonic() - began:.0f} s")
    if at_large:
        print(f"at large: {', '.join(at_large)}")
    return 1 if at_large else 0


if __name__ == "__main__":
    sys.exit(main())
