"""Can the storms see? `make mutants`: each planted bug against seed after seed, until one accuses it.

    python -m tests.simulation.storms.hunt [--mutant NAME ...] [--max-seeds 300] [--minutes 3] [--jobs N] [--groups]

A line for each mutant, as soon as it is done: how many seeds it took, and what caught it. An accusation counts if it
speaks of what was promised (not of a process that crashed), and if the same seed accuses nobody without the mutant.

Exit code: 0, every one was caught; 1, at least one was not; 130, it was stopped, by SIGINT or SIGTERM: the last line
says how far it had come.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import NamedTuple

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.storms.group_storm import GroupStorm
from tests.simulation.storms.report import Report
from tests.simulation.storms.simulate import simulate_many
from tests.simulation.storms.storm import Storm
from tests.simulation.storms.verdicts.history import Anomaly

CRASHES = ("failed", "a broker failed by itself", "a client crashed", "the storm itself failed")
"""Anomalies that say that something stumbled, not what the cluster has lost by it."""


_is_clean: dict[tuple[int, float, str], bool] = {}


class Catch(NamedTuple):
    """How a hunt ended."""

    mutant: Mutant
    seeds: int
    """How many were tried."""
    anomaly: Anomaly | None
    """What the last one found; None: the mutant got away."""
    crashes: int
    """Seeds in which something crashed, and nothing else was found."""
    seconds: float
    is_stopped: bool = False
    """Before its end: the mutant may be caught by a later seed."""

    def __str__(self) -> str:
        if self.anomaly is not None:
            found = f"{self.seeds:4d}  {self.anomaly.kind}"
        else:
            found = f">{self.seeds:3d}  {'stopped' if self.is_stopped else 'NOT CAUGHT'}"
        crashes = f" ({self.crashes} seeds with crashes alone)" if self.crashes else ""
        return f"{self.mutant.name:38} {self.mutant.family:26} {found}{crashes}"


def hunt(mutant: Mutant, *, max_seeds: int, minutes: float, jobs: int | None, kind: type[Storm] = Storm) -> Catch:
    """Storms in the order of their seeds until one convicts the mutant, or KeyboardInterrupt stops the hunt."""
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
            elif _accuses_nobody(outcome.report.seed, minutes, kind):
                conviction = accusation
                break
    except KeyboardInterrupt:
        is_stopped = True
    return Catch(mutant, tried, conviction, crashes, time.monotonic() - began, is_stopped)


def breaks_promise(anomaly: Anomaly) -> bool:
    return anomaly.kind not in CRASHES


def _broken_promise(report: Report) -> Anomaly | None:
    return next(filter(breaks_promise, report.anomalies), None)


def _accuses_nobody(seed: int, minutes: float, kind: type[Storm]) -> bool:
    """The product as it is passes this seed. (Many are caught by the same first seeds.)"""
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
    parser.add_argument("--groups", action="store_true", help="in storms of little but consumer groups")
    arguments = parser.parse_args()
    kind = GroupStorm if arguments.groups else Storm

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
