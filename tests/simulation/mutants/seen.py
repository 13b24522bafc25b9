"""Check that each planted bug is seen by a test: `make mutants-seen`.

    python -m tests.simulation.mutants.seen [--mutant NAME ...]

`mutants/seen_by.toml` names a test for each mutant. The test runs twice: it must pass without the mutant and fail with
it, by an assertion or a deadline. An import error or an error in a fixture does not count. Storms search for the same
bugs without a hint (`hunt`), which takes minutes.

Exit code: 0 if each of these tests sees its mutant; otherwise 1.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import sys
import tomllib
from collections.abc import Generator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from minibroker.deploy.simulator.loop import Stuck
from tests.simulation.mutants import MUTANTS, plugin

TABLES = Path(__file__).with_name("seen_by.toml")
ROOT = Path(__file__).parents[3]

PASSED = "passed"
FAILED = "failed"
NOT_RUN = "was not run"

# The product is imported already; pytest would warn about it.
_OPTIONS = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
_DEADLINES = TimeoutError, Stuck, pytest.fail.Exception


def seen_by() -> dict[str, dict[str, str]]:
    """Return the tables of the file: the test of each mutant, or the reason why only storms see it."""
    return tomllib.loads(TABLES.read_text())


def why_unseen(mutant: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    """Return the reason why the mutant's test does not see it; empty if it does."""
    test = tables["fails"].get(mutant)
    if test is None:
        return "no test: " + tables["storms"].get(mutant, "it is in no table")
    without = outcome(test, None)
    if without != PASSED:
        return f"the test {without} without the mutant"
    with_it = outcome(test, mutant)
    return "" if with_it == FAILED else f"the test {with_it} with the mutant"


def outcome(test: str, mutant: str | None) -> str:
    """Run the test in its own process. Return PASSED, FAILED (by an assertion or a deadline), or another outcome."""
    # Forked: the product is not imported again for each mutant, and the tests are imported after it is planted.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_run, args=(test, mutant, sender))
    worker.start()
    sender.close()
    try:
        return str(receiver.recv())
    except EOFError:
        return "ended its process"
    finally:
        worker.join()


def _run(test: str, mutant: str | None, sender: Connection) -> None:
    os.environ.pop(plugin.VARIABLE, None)
    if mutant is not None:
        os.environ[plugin.VARIABLE] = mutant
    os.chdir(ROOT)
    judge = _Judge()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pytest.main([test, *_OPTIONS], plugins=[plugin, judge])
    sender.send(judge.outcome)


class _Judge:
    """A plugin that records the outcome of a test."""

    def __init__(self) -> None:
        self.outcome = NOT_RUN

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self.outcome == FAILED:
            pass  # its fixtures may fail as a consequence
        elif report.skipped:
            self.outcome = "was skipped"
        elif call.excinfo is not None:
            sees = report.when == "call" and _is_judgement(call.excinfo)
            self.outcome = FAILED if sees else f"stumbles over {call.excinfo.typename} in its {report.when}"
        elif self.outcome == NOT_RUN and report.when == "call":
            self.outcome = PASSED
        return report


def _is_judgement(failure: pytest.ExceptionInfo[BaseException]) -> bool:
    """Whether the test itself failed. A failed assertion of the product does not count."""
    if isinstance(failure.value, AssertionError):
        return Path(failure.traceback[-1].path).is_relative_to(ROOT / "tests")
    return isinstance(failure.value, _DEADLINES)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants.seen", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--mutant", action="append", choices=sorted(MUTANTS), metavar="NAME", help="only this one; may be repeated"
    )
    names = parser.parse_args().mutant or list(MUTANTS)

    tables = seen_by()
    unseen: list[str] = []
    for name in names:
        why = why_unseen(name, tables)
        if why:
            unseen.append(name)
        print(f"{name:46} {f'NOT SEEN: {why}' if why else tables['fails'][name]}", flush=True)
    without = [name for name in names if name not in tables["fails"]]
    listed = f": {', '.join(without)}" if without else ""
    print(f"\n{len(names) - len(unseen)} of {len(names)} seen; {len(without)} have no test{listed}")
    blind = [name for name in unseen if name not in without]
    if blind:
        print(f"not seen by their tests: {', '.join(blind)}")
    return 1 if blind else 0


if __name__ == "__main__":
    sys.exit(main())
