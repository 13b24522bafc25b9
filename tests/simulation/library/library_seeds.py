"""Every scenario of the library with many seeds: `make scenarios SEEDS=1..100`.

    python -m tests.simulation.library.library_seeds --seeds 1..100 [--only leader-killed,full-disk]

Prints a line for each scenario, and the report of each broken promise. Exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from minibroker.deploy.scenarios import shelf
from minibroker.deploy.scenarios.director import Outcome
from minibroker.deploy.scenarios.many import play_seeds
from minibroker.deploy.scenarios.report import report
from minibroker.protocol.words import counted
from tests.simulation.storms.simulate import seeds_of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.library.library_seeds", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1..100"), metavar="FIRST..LAST")
    parser.add_argument("--only", default="", metavar="NAMES", help="scenarios, separated by commas")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else shelf.names()
    began_s = time.monotonic()
    broken: list[str] = []
    for name in names:
        scenario, of_name_s = shelf.load(name), time.monotonic()
        outcomes = list(play_seeds(scenario, arguments.seeds))
        failures = [outcome for outcome in outcomes if not outcome.kept]
        print(f"{name}: {_summary(outcomes, failures)}, {time.monotonic() - of_name_s:.0f} s", flush=True)
        if failures:
            broken.append(f"{name} ({', '.join(str(outcome.seed) for outcome in failures)})")
            print("\n".join(report(scenario, failures)), flush=True)
    cores = counted(os.cpu_count() or 1, "core")
    print(f"{counted(len(names), 'scenario')} in {time.monotonic() - began_s:.0f} s on {cores}; ", end="")
    print(f"broken promises: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


def _summary(outcomes: list[Outcome], failures: list[Outcome]) -> str:
    kept = f"{len(outcomes) - len(failures)} of {counted(len(outcomes), 'seed')} kept every promise"
    return f"{kept}, longest stall {max(outcome.stall_s for outcome in outcomes):.1f} s"


if __name__ == "__main__":
    sys.exit(main())
