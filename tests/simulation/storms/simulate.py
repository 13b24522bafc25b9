"""Storms by the hundred: `make simulate`, and the exact replay of one of them.

    python -m tests.simulation.storms.simulate --seeds 1..200 --minutes 3
    python -m tests.simulation.storms.simulate --seed 17 [--log FILE] [--scenario FILE]

Each seed is a storm of that many virtual minutes (see `storms.storm`), which runs in a worker process. A seed with an
anomaly is printed with the timeline that led to it. The same seed repeats the same storm, event for event, on any
machine with the same Python and packages. `--log` writes the logs of brokers and clients, with virtual times, and
`--scenario` a scenario file with the storm's faults.

Exit codes: 0 without anomalies, 1 with an anomaly or (with --floors) after a storm that was too mild to prove anything.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from minibroker.deploy.simulator.ownership import current_owner
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.storms.export import exported
from tests.simulation.storms.group_storm import GroupStorm
from tests.simulation.storms.report import Report
from tests.simulation.storms.storm import Storm, simulate
from tests.simulation.storms.transaction_storm import TransactionStorm
from tests.simulation.storms.verdicts.history import Anomaly

_TIMELINE_SHOWN = 60
_PROGRESS_EVERY_S = 10
_SEEDS_PER_WORKER = 4
_KINDS: dict[str, tuple[type[Storm], str]] = {
    "--groups": (GroupStorm, "storms of little but consumer groups"),
    "--transactions": (TransactionStorm, "storms of little but transactions"),
}


class Outcome(NamedTuple):
    report: Report
    cpu_s: float


def simulate_many(
    seeds: Sequence[int],
    minutes: float,
    *,
    mutant: str | None = None,
    is_enough: Callable[[Anomaly], bool] | None = None,
    kind: type[Storm] = Storm,
    jobs: int | None = None,
) -> Iterator[Outcome]:
    """Yield the outcome of each seed in order. `is_enough` (a function of a module) ends a storm early. Closing the
    iterator ends the storms under way. Raise BrokenProcessPool if a worker dies."""
    # Workers are spawned, and replaced after some seeds, so that the remains of a storm neither reach the next one nor
    # fill the memory. `max_tasks_per_child` does not do it: with it, Python 3.11's pool can hang (gh-115634).
    jobs = jobs or os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    for start in range(0, len(seeds), jobs * _SEEDS_PER_WORKER):
        others = set(multiprocessing.active_children())
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            some = seeds[start : start + jobs * _SEEDS_PER_WORKER]
            futures = [pool.submit(_outcome, seed, minutes, mutant, is_enough, kind) for seed in some]
            try:
                for future in futures:
                    yield future.result()
            finally:
                if not all(future.done() for future in futures):
                    # Their results are not needed, and a storm with a planted bug can last for minutes.
                    pool.shutdown(wait=False, cancel_futures=True)
                    for worker in set(multiprocessing.active_children()) - others:
                        worker.terminate()


def _outcome(
    seed: int, minutes: float, mutant: str | None, is_enough: Callable[[Anomaly], bool] | None, kind: type[Storm]
) -> Outcome:
    logging.disable(logging.CRITICAL)
    began = time.process_time()
    with planted(mutant):
        report = simulate(seed, minutes, is_enough, kind)
    del report.timeline[:-_TIMELINE_SHOWN]
    return Outcome(report, time.process_time() - began)


def add_kinds(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the kind of storm, as `kind`."""
    kinds = parser.add_mutually_exclusive_group()
    for option, (kind, what) in _KINDS.items():
        kinds.add_argument(option, action="store_const", const=kind, dest="kind", default=Storm, help=what)


def option_of(kind: type[Storm]) -> str:
    return next((f" {option}" for option, (of_option, _) in _KINDS.items() if of_option is kind), "")


def print_failure(report: Report, minutes: float, mutant: str | None, kind: type[Storm] = Storm) -> None:
    print(f"\nseed {report.seed}: {len(report.anomalies)} anomalies")
    for anomaly in report.anomalies:
        print(f"  {anomaly}")
    print("what came before:")
    for line in report.timeline:
        print(f"  {line}")
    options = option_of(kind) + (f" --mutant {mutant}" if mutant else "")
    # Flushed at once, even into a file, since a run of hours may be interrupted.
    print(
        f"replay: python -m tests.simulation.storms.simulate --seed {report.seed} --minutes {minutes:g}{options}",
        flush=True,
    )


def summary(outcomes: Sequence[Outcome], wall_s: float) -> str:
    """Return a summary of these storms and of their speed."""
    reports = [outcome.report for outcome in outcomes]
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    virtual_s = sum(report.virtual_s for report in reports)
    faults: Counter[str] = sum((report.faults for report in reports), Counter())
    drawn = Counter(kind for report in reports for kind in report.faults | report.events)
    rarest_first = sorted(drawn.items(), key=lambda item: (item[1], item[0]))
    lines = [
        f"{len(reports)} seeds in {wall_s:.0f} s ({len(reports) / wall_s * 60:.1f} a minute), "
        f"{virtual_s / 3600:.2f} simulated cluster-hours, {virtual_s / 3600 / (cpu_s / 60):.2f} per CPU minute",
        "faults: " + ", ".join(f"{count} {kind}" for kind, count in faults.most_common()),
        "seeds by event: " + ", ".join(f"{kind} {seeds}" for kind, seeds in rarest_first),
        _range("faults a seed", [report.faults.total() for report in reports]),
        _range("records acknowledged", [report.acknowledged for report in reports]),
        _range("transactions committed", [report.events["transaction committed"] for report in reports]),
        _range("leader changes with produce in flight", [report.leader_changes for report in reports]),
        _range("unclean restarts", [report.unclean_restarts for report in reports]),
        _range("seconds until whole after the last fault", [round(report.recovery_s, 1) for report in reports]),
        f"acknowledged with acks=1 and lost, as is legal: {sum(report.lost_with_acks_1 for report in reports)}",
        f"acknowledged with acks=all and lost with all power, as is legal: {sum(r.lost_with_power for r in reports)}",
        f"seeds below a floor: {sum(bool(report.below_floors()) for report in reports)}",
        f"anomalies: {sum(len(report.anomalies) for report in reports)} "
        f"in {sum(bool(report.anomalies) for report in reports)} seeds",
    ]
    return "\n".join(lines)


def _range(name: str, values: Sequence[float]) -> str:
    return f"{name}: at least {min(values)}, {sum(values) / len(values):.1f} on average, at most {max(values)}"


def seeds_of(text: str) -> list[int]:
    """Return the seeds of an argument `FIRST..LAST`, or of a single number."""
    first, dots, last = text.partition("..")
    try:
        seeds = list(range(int(first), int(last) + 1)) if dots else [int(first)]
    except ValueError:
        seeds = []
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor FIRST..LAST")
    return seeds


class _VirtualTime(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.virtual_s = asyncio.get_running_loop().time()
        except RuntimeError:
            record.virtual_s = 0.0
        owner = current_owner.get()
        record.owner = "-" if owner is None else owner.name
        return True


def _log_to(path: str) -> None:
    handler = logging.FileHandler(path, mode="w")
    handler.addFilter(_VirtualTime())
    handler.setFormatter(logging.Formatter("%(virtual_s)10.4f %(owner)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _replay(seed: int, minutes: float, mutant: str | None, log: str | None, kind: type[Storm]) -> int:
    if log:
        _log_to(log)
    else:
        logging.disable(logging.CRITICAL)
    began = time.process_time()
    with planted(mutant):
        report = simulate(seed, minutes, kind=kind)
    print_failure(report, minutes, mutant, kind)
    print(summary([Outcome(report, time.process_time() - began)], time.process_time() - began))
    print(f"trace: {report.trace}")
    return 1 if report.anomalies else 0


def _export(seed: int, minutes: float, path: str) -> int:
    logging.disable(logging.CRITICAL)
    text, report = exported(seed, minutes)
    Path(path).write_text(text)
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    print("\n".join(comments))
    print(f"written to {path}, of a storm with {report.faults.total()} faults: minibroker scenario run {path}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.storms.simulate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1..200"), metavar="FIRST..LAST")
    parser.add_argument("--seed", type=int, help="replay this one, with its whole timeline")
    parser.add_argument("--minutes", type=float, default=3, help="virtual minutes of a storm (3)")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), metavar="NAME", help="with this bug planted")
    parser.add_argument("--jobs", type=int, help="worker processes (one per core)")
    parser.add_argument("--floors", action="store_true", help="fail where a storm was too mild")
    parser.add_argument("--scenario", metavar="FILE", help="with --seed: write the storm's faults as a scenario file")
    parser.add_argument("--log", metavar="FILE", help="with --seed: what brokers and clients log")
    add_kinds(parser)
    arguments = parser.parse_args()
    kind = arguments.kind
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise its workers would run forever
    if arguments.scenario is not None:
        if arguments.seed is None or kind is not Storm or arguments.mutant:
            parser.error("--scenario FILE writes the storm of one seed: give --seed, and no kind or mutant")
        return _export(arguments.seed, arguments.minutes, arguments.scenario)
    if arguments.seed is not None:
        return _replay(arguments.seed, arguments.minutes, arguments.mutant, arguments.log, kind)

    began = told = time.monotonic()
    outcomes: list[Outcome] = []
    failed = False
    many = simulate_many(arguments.seeds, arguments.minutes, mutant=arguments.mutant, kind=kind, jobs=arguments.jobs)
    try:
        for outcome in many:
            outcomes.append(outcome)
            if outcome.report.anomalies:
                failed = True
                print_failure(outcome.report, arguments.minutes, arguments.mutant, kind)
            elif arguments.floors and (misses := outcome.report.below_floors()):
                failed = True
                print(f"\nseed {outcome.report.seed} was too mild: {'; '.join(misses)}")
            if time.monotonic() - told > _PROGRESS_EVERY_S:
                told = time.monotonic()
                print(f"{len(outcomes)} of {len(arguments.seeds)} seeds, {told - began:.0f} s", file=sys.stderr)
    except KeyboardInterrupt:
        if outcomes:
            print(f"\nstopped; so far:\n{summary(outcomes, time.monotonic() - began)}")
        return 130
    print()
    print(summary(outcomes, time.monotonic() - began))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
