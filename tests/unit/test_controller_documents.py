"""docs/internals/controller.md names, for each mechanism of Kafka's controller, modules and a test that exist."""

import re

import pytest

from tests.generated_documents import CONTROLLER, ROOT

SECTION = CONTROLLER.read_text().partition("## Kafka's controller, piece by piece")[2].partition("\n## ")[0]
ROWS = [line.strip("|").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]


def test_the_table_is_there() -> None:
    assert len(ROWS) > 50


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
