"""What ARCHITECTURE.md says of the controller: its state machines, and where Kafka's mechanisms are."""

import re
from pathlib import Path

import pytest

from tests.state_diagrams import DOCUMENT, drawn

ROOT = Path(__file__).parents[2]
SECTION = DOCUMENT.read_text().partition("## Kafka's controller, piece by piece")[2].partition("\n## ")[0]
ROWS = [line.strip("|").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]


def test_the_diagrams_of_both_state_machines_are_what_the_tables_say() -> None:
    document = DOCUMENT.read_text()
    assert document == drawn(document), "run `make diagrams`"


def test_an_arrow_that_is_missing_is_drawn() -> None:
    document = DOCUMENT.read_text()
    arrow = "    OfflinePartition --> OnlinePartition\n"
    assert document.count(arrow) == 1
    assert drawn(document.replace(arrow, "")) == document


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_each_mechanism_of_kafkas_controller_has_modules_and_a_test_that_are_there(row: list[str]) -> None:
    _, here, shown_by = row
    modules = re.findall(r"`([\w/]+\.py)`", here)
    tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", shown_by)
    assert modules
    assert tests
    assert [module for module in modules if not (ROOT / module).is_file()] == []
    for path, name in tests:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
