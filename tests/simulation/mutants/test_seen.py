"""The list of tests that see the planted bugs is complete, and unrelated errors do not count as seeing a bug."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache

import pytest

from tests.simulation.mutants import MUTANTS, seen

TABLES = seen.seen_by()
TEST = "tests/unit/controller/test_controller_broker_decisions.py::test_a_broker_that_registered_again_is_neither"
BOUNCED = f"{TEST}_lost_nor_added_but_bounced"


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((seen.ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_tables_contain_each_mutant_once() -> None:
    assert set(TABLES) == {"fails", "storms"}
    assert sorted([*TABLES["fails"], *TABLES["storms"]]) == sorted(MUTANTS)


def test_each_mutant_without_a_test_has_a_reason() -> None:
    assert all(TABLES["storms"].values())


@pytest.mark.parametrize(("mutant", "test"), TABLES["fails"].items())
def test_the_test_of_a_mutant_exists(mutant: str, test: str) -> None:
    file, _, function = test.partition("::")
    assert function.partition("[")[0] in functions_of(file)


@pytest.mark.parametrize(
    ("test", "mutant", "outcome"),
    [
        (BOUNCED, "bounce-not-noticed", seen.FAILED),
        (f"{TEST}_here", None, seen.NOT_RUN),
        *(
            pytest.param(BOUNCED, other, seen.PASSED, marks=pytest.mark.slow)
            for other in (None, "older-topic-believed")
        ),
    ],
)
def test_a_test_is_judged_in_its_own_process(test: str, mutant: str | None, outcome: str) -> None:
    """The judging process is forked from one without threads; that of pytest may have some."""
    program = f"from tests.simulation.mutants import seen; print(seen.outcome({test!r}, {mutant!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=seen.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == outcome
