"""Planted bugs of the Spark sink with `exactlyOnce`: batches that are written twice, in part, or not at all."""

from __future__ import annotations

from typing import Any

from minibroker.spark_jobs.source import decisions
from tests.simulation.mutants.planting import Patches, mutant


@mutant("exactly once", "a task of a batch that is decided writes its rows again")
def decided_rows_written_again(patches: Patches) -> None:
    @patches.instead_of(decisions, "must_write")
    def must_write(original: Any, *rest: Any) -> bool:
        return True


@mutant("exactly once", "a driver that repeats a batch does not finish what the one before has decided")
def decision_of_earlier_driver_ignored(patches: Patches) -> None:
    @patches.instead_of(decisions, "plan_commit")
    def plan_commit(original: Any, known: Any, *rest: Any) -> Any:
        return original(None, *rest)


@mutant("exactly once", "a transaction that timed out after the decision counts as committed")
def timed_out_rows_forgotten(patches: Patches) -> None:
    @patches.instead_of(decisions, "after_commits")
    def after_commits(original: Any, *rest: Any) -> None:
        return None


@mutant("exactly once", "a driver whose commit has failed aborts transactions of a batch that is decided")
def decided_rows_aborted(patches: Patches) -> None:
    @patches.instead_of(decisions, "undecided")
    def undecided(original: Any, known: Any, batch: int, reported: Any) -> Any:
        return tuple(reported)
