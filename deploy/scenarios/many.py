"""Many seeds of a scenario, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from minibroker.deploy.scenarios.director import Outcome
from minibroker.deploy.scenarios.model import Scenario
from minibroker.deploy.scenarios.reading import read_scenario
from minibroker.deploy.scenarios.stages.virtual import play_virtual

_SEEDS_AT_ONCE = 4


def play_seeds(scenario: Scenario, seeds: Sequence[int]) -> Iterator[Outcome]:
    """Yield the outcome of each seed, in order."""
    jobs = min(os.cpu_count() or 1, len(seeds))
    if jobs == 1:
        for seed in seeds:
            yield play_virtual(scenario, seed)
        return
    # Spawned, so that no state of this process decides a run.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        some = [seeds[at : at + _SEEDS_AT_ONCE] for at in range(0, len(seeds), _SEEDS_AT_ONCE)]
        futures = [pool.submit(_play_some, scenario.source, scenario.path, of_task) for of_task in some]
        try:
            for future in futures:
                yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _play_some(source: str, path: str, seeds: Sequence[int]) -> list[Outcome]:
    scenario = read_scenario(source, path)
    return [play_virtual(scenario, seed) for seed in seeds]
